"""What many test files share: small models and runs, texts and tokenizers, refusals, waiting."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from environment import ROOT
from families import SMALL_GPT2
from mesh_helpers import make_params
from small_models import small_config

import utils
from logs import meter
from logs.overfitting import HELD_OUT, TRAINING, Overfit
from logs.rows import read_rows
from planning import gpus
from runtime import messages
from shards import manifest, storage, tokenization
from training.checkpointing import Checkpoints
from training.device_mesh import make_mesh


def random_transformer(config, folder):
    """The torch model of a config.json, float32; its own code, where it needs some, is copied to `folder`."""
    import torch  # here: few tests have it
    import transformers

    from tools import hf

    shutil.copytree(hf.CODE, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code="auto_map" in config)
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, trust_remote_code=True, attn_implementation="eager").float()


def files_of_repository(*patterns):
    """Those that git has, or would take."""
    words = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.check_output(words, cwd=ROOT, text=True).split()
    return [path for path in listed if (ROOT / path).is_file()]


def copy_repository(folder, *left_out):
    """All but tests/ and other folders."""
    for path in files_of_repository():
        if path.split("/")[0] not in ("tests", *left_out):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)


def run_on_tests(program, *words):
    """Run a program of data/ on the tests' own text, in a process of its own."""
    words = [sys.executable, ROOT / "data" / program, "--source", ROOT / "tests", *words]
    subprocess.run([*map(str, words)], check=True, capture_output=True)


def tokenize_tests(folder, tokenizer):
    """Write shards of the tests' own text."""
    words = ("--output", folder, "--tokenizer", tokenizer, "--val_fraction", 0.2)
    run_on_tests("tokenize_shards.py", *words)


BYTE_RANKS = {bytes([b]): b for b in range(256)}


def small_tokenizer(folder, n=200):
    """Write a tokenizer.json of n tokens; what a manifest says of it."""
    vocabulary = {f"<{i}>": i for i in range(n - 1)} | {tokenization.END_OF_TEXT: n - 1}
    path = folder / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(path))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"tokenizer": path.name, "tokenizer_sha256": sha256, "vocab_size": n}


def describe(folder, **made_with):
    """Write manifests as tokenize_shards.py does for the shards in train/, val/, ... of a folder; made_with: keys of
    them that tell the tokenizer, or else those of `small_tokenizer`."""
    made_with = made_with or small_tokenizer(folder)
    for split in {path.parent for path in folder.glob("*/*.npy")}:
        entries = []
        for path in sorted(split.glob("*.npy")):
            content = path.read_bytes()
            blocks = [content[i:][: storage.BLOCK] for i in range(0, len(content), storage.BLOCK)]
            about = {"name": path.name, "tokens": len(np.load(path))}
            about["sha256"] = hashlib.sha256(content).hexdigest()
            about["crc32"] = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
            entries.append(about)
        n_tokens = sum(about["tokens"] for about in entries)
        counts = {"tokens": n_tokens, "documents": 1, "bytes": 5 * n_tokens}
        made = {**made_with, "dtype": "uint16", **counts, "shards": entries}
        (split / manifest.NAME).write_text(manifest.dump(made))
    return folder


def write_bin(path, ids):
    """Write token ids as llm.c and modded-nanogpt publish them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype(np.uint16).tobytes())


def flags_of(**flags):
    """{flag: value} as command-line words."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def refusal(call, *parts):
    """The sentence, which holds the parts, by which a call is refused."""
    with pytest.raises(messages.UserError) as e:
        call()
    said = str(e.value)
    assert "\n" not in said and said[-1] in ".?" and all(part in said for part in parts), said
    return said


def without_pulse(said):
    """What a program printed, but for the lines by which a `runtime/pulse.py: Pulse` shows that it is at work. On a
    busy machine there may be some anywhere."""
    return re.sub(r"^\d\d:\d\d:\d\d (starting, |tokenizing: ).*\n", "", said, flags=re.MULTILINE)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.05)


def free_port(address="127.0.0.1"):
    with socket.create_server((address, 0)) as s:
        return s.getsockname()[1]


def listens(address, port):
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
        return True
    return False


def in_session(session):
    """Numbers of the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session, *_ = stat.read_text().rpartition(")")[2].split()
            if its_session == str(session) and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


@functools.cache
def made_ranks(n):
    """{token bytes: rank} of n tokens: every byte, every pair of bytes in a random order, triples of common letters."""
    pairs = list(itertools.product(range(256), repeat=2))
    random.Random(0).shuffle(pairs)
    triples = itertools.product(b" abcdefghijklmnopqrstuvwxyz.,()_=", repeat=3)
    tokens = itertools.chain(((b,) for b in range(256)), pairs, triples)
    return {bytes(token): rank for rank, token in enumerate(itertools.islice(tokens, n))}


@functools.cache
def hash_of_made_ranks(n):
    return hashlib.sha256(tokenization.dump_ranks(made_ranks(n))).hexdigest()


TINY = {**SMALL_GPT2, "blocks": 1, "model_dimension": 16, "ffn_dim": 32, "T": 16}


def metrics_of(run):
    """Rows of a run without the keys that are times."""
    rows = read_rows(str(run))
    times = {"tokens_per_second", "data/wait", "time", "goodput", "resumed"}
    times |= {f"seconds/{part}" for part in meter.PARTS}
    return [{key: row[key] for key in row.keys() - times} for row in rows]


def checkpoint_of(run, step):
    """Every leaf of a checkpoint, as it was saved, and its metadata."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        state = reader.restore(run / "checkpoints" / str(step) / "state")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def assert_bitwise(a, b):
    assert a.keys() == b.keys() and len(a) > 20
    assert [key for key in a if a[key].tobytes() != b[key].tobytes()] == []


XLA_FLAGS = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")


def start_main(words, **environment):
    """A process of main.py that runs, with its stderr in its stdout."""
    env = {**os.environ, "XLA_FLAGS": XLA_FLAGS}
    env |= {name: str(value) for name, value in environment.items()}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen([sys.executable, ROOT / "main.py", *words], env=env, text=True, **pipes)


def make_run(folder, **flags):
    """(a run directory with a model of bytes, as if training had ended there; its Config, mesh and parameters)."""
    ranks = folder / "bytes.tiktoken"
    ranks.write_bytes(tokenization.dump_ranks(BYTE_RANKS))
    small = dict(blocks=2, layers_per_block=1, val_batch_size=8, eval_steps=2, vocab_size=257)
    cfg = small_config(sequences=8, model_dtype="float32", **small | flags)
    mesh, rng = make_mesh(cfg), np.random.default_rng(0)

    def louder(path, x):
        """Logits are far from uniform, biases not 0; what pads the vocabulary stays 0."""
        of_tokens = path[0].key in ("embedding", "head")
        return 3 * x + (0 if of_tokens else rng.normal(0, 0.02, x.shape).astype("f4"))

    params = jax.tree_util.tree_map_with_path(louder, make_params(cfg, mesh))
    return save_run(folder, cfg, params, ranks), cfg, mesh, params


def save_run(folder, cfg, params, tokenizer):
    """Write the run directory `folder`/run with these parameters and the tokenizer of a file."""
    checkpoints = Checkpoints(str(folder / "run/checkpoints"), keep=1)
    checkpoints.save(0, {"params": params}, 0, {})
    checkpoints.close()
    config = utils.flatten(cfg) | dict(data_fingerprint="x")
    config["encoding"] = tokenization.copy_tokenizer(str(folder / "run"), str(tokenizer))
    (folder / "run" / "config.json").write_text(json.dumps(config))
    return folder / "run"


# What the model of `run_with_special_tokens` draws after "a": <pad>, b, the first byte of é, <mark>, the second one, c
# and the end of text
DRAWN = [257, *b"b\xc3", 258, *b"\xa9c", 256]


def run_with_special_tokens(folder):
    """A run directory with a model that draws `DRAWN` after "a". Two of these are special tokens, <pad> and <mark>.

    Its layers add nothing to a token's embedding, in whose direction the head has the row of the token that follows.
    """
    from tools import hf  # here: few tests have it

    ranks, tokenizer = folder / "bytes.tiktoken", folder / "tokenizer.json"
    ranks.write_bytes(tokenization.dump_ranks(BYTE_RANKS))
    made = hf.byte_level(tokenization.load_tokenizer(str(ranks)))
    made.add_special_tokens(["<pad>", "<mark>"])
    made.save(str(tokenizer))
    cfg = small_config(blocks=1, layers_per_block=1, vocab_size=259, tied=False)
    rng = np.random.default_rng(0)

    def fill(path, x):
        if path[0].key == "embedding":
            return rng.normal(0, 1, x.shape).astype("f4")
        return np.full(x.shape, "norm" in path[-1].key, np.float32)

    params = jax.tree_util.tree_map_with_path(fill, make_params(cfg, make_mesh(cfg)))
    before = np.array([ord("a"), *DRAWN[:-1]])
    direction = params["embedding"][before]
    params["head"][DRAWN] = direction / np.linalg.norm(direction, axis=1, keepdims=True)
    return save_run(folder, cfg, params, tokenizer)


gpu_compiler = pytest.mark.skipif(not gpus.has_compiler(), reason="pyproject.toml's plan-gpu")
EVERY = 20  # steps between evaluations


def rows_of(held_out, training, noise=0.0):
    """Rows with these losses at evaluations, and in the steps before each, which differ by up to `noise`."""
    draw = random.Random(0)
    rows = []
    for n in range(len(held_out) * EVERY):
        loss = training[n // EVERY] + draw.uniform(-noise, noise)
        rows.append({"step": n + 1, TRAINING: loss})
        if (n + 1) % EVERY == 0:
            rows[-1][HELD_OUT] = held_out[n // EVERY]
    return rows


WORSE = [3.5, 3.21, 3.25, 3.29, 3.34]
FALLING = [3.9, 3.3, 3.1, 3.0, 2.8]
FOUND = Overfit(40, 3.21, 3.34)
