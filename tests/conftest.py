"""Eight simulated CPU devices, set before jax is first imported, and what several test files share."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# a shell ignores SIGINT in what it puts in the background, and so would every program that the tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["WANDB_MODE"] = "offline"
# else gcsfs asks an emulator for gRPC, for a minute
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# compiling would be most of the tests' time; these shorten it eightfold and change nothing that the tests look at
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):  # XLA ends a process that gives later ones this flag
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # small programs are cached too
# tracing makes many objects: collecting them often is a fifth of its time
gc.set_threshold(100_000)

import fsspec
import jax
import numpy as np
import pytest
import tiktoken
import tokenizers
from tiktoken_ext import openai_public

import collectives
import main
import model
import train as training_program
import utils
from architectures import parameters
from config import parser, presets, settle
from config.flags import Flags
from runtime import messages
from shards import manifest, published, storage, tokenization
from training.device_mesh import make_mesh
from training.optimizer import hyperparameters, make_optimizer
from training.train_state import abstract_state, init_state
from training.train_step import lower_train_step


def given(words):
    """{flag: value} of words of a command line."""
    return parser.read_words(utils.Config, shlex.split(words), "tests")[0]


# A model small enough to compile in seconds, with every part that a large one has.
SMALL = given("""
    --model_dimension 32 --vocab_size 250 --n_head 4 --blocks 4 --layers_per_block 3 --T 32 --latent_dim 16
    --rope_dim 8 --ffn_dim 64 --attention blockwise --n_experts 8 --experts_per_token 2 --n_shared 1
    --expert_dim 32 --capacity_factor 0 --max_lr 5e-3 --end_lr 2e-4 --embedding_lr 2 --warmup_steps 2
    --end_steps 100 --microbatches 4 --pp_interleave 1 --compilation_cache ''
""")
# for runs that are looked at for their files and processes: one kind of layers compiles in two thirds of the time
SMALL_RUN = SMALL | dict(layers_per_block=1)
# Workers take whole files, whose tests share what they compile, and begin with the longest ones.
LONGEST = "memory docs muon trace resume faults storage model cluster parity".split()


def pytest_collection_modifyitems(items):
    for name in LONGEST:
        items.sort(key=lambda item: item.path.stem != f"test_{name}")


def small_config(mesh=(1, 1, 1), sequences=32, **flags):
    """A validated Config of SMALL on `mesh` with `sequences` training sequences a batch over the whole mesh."""
    small = SMALL | dict(n_device_axis=mesh, n_devices=int(np.prod(mesh)))
    small |= dict(train_batch_size=sequences // mesh[0], val_batch_size=max(4, 8 // mesh[0]))
    cfg = utils.replace(presets.preset("tiny"), **small | flags)
    return settle.validate(cfg, jax.device_count())


def settled(m):
    """The utils.Model with the widths written out that 0 or -1 stand for."""
    widths = dict(ffn_dim=m.ffn_width, expert_dim=m.expert_width)
    return dataclasses.replace(m, head_dim=m.key_dim, q_latent_dim=m.q_latent, **widths)


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


@pytest.fixture(scope="session")
def text_shards(tmp_path_factory):
    """Shards of the tests' own text, which keep the tokenizer of 512 tokens that made them."""
    folder = tmp_path_factory.mktemp("text")
    ranks = folder / "small.tiktoken"
    run_on_tests("train_tokenizer.py", "--vocab_size", 512, "--output", ranks)
    tokenize_tests(folder / "shards", ranks)
    return folder / "shards"


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


def make_params(cfg, mesh):
    """Parameters with the spread of their table, the same on any mesh; numpy draws them, which needs no compiling."""

    def draw(path, p):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        x = p.start + p.std * rng.standard_normal(p.shape)
        x[p.rows or len(x) :] = 0
        return x.astype(np.float32)

    table = model.param_table(cfg)
    drawn = jax.tree_util.tree_map_with_path(draw, table, is_leaf=parameters.is_param)
    return jax.device_put(drawn, parameters.shardings(table, mesh))


def batch_of(cfg, mesh, seed=0):
    """Global (tokens, targets) [accumulation, M, B, T] of random tokens; the same sequences however they are cut."""
    A, M = cfg.run.accumulation_steps, cfg.data.microbatches
    B = cfg.data.train_batch_size * cfg.run.n_device_axis[0] // M
    shape, rng = (A * M * B, cfg.model.T + 1), np.random.default_rng(seed)
    rows = rng.integers(0, cfg.model.vocab_size, shape).astype(np.int32).reshape(A, M, B, -1)
    sharding = jax.sharding.NamedSharding(mesh, collectives.BATCH_SPEC)
    return tuple(jax.device_put(part, sharding) for part in (rows[..., :-1], rows[..., 1:]))


def furthest(a, b):
    """Largest difference between two trees, each leaf relative to its own largest entry, and that leaf's path."""
    found = []
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        difference = np.abs(np.subtract(x, y)).max(initial=0) / np.abs(x).max(initial=1e-30)
        found.append((float(difference), jax.tree_util.keystr(path)))
    return max(found)


def begin(cfg, mesh):
    """(TrainState at step 0, the compiled train step)."""
    optimizer = make_optimizer(cfg, mesh)
    abstract = abstract_state(cfg, mesh, optimizer)
    step = lower_train_step(cfg, mesh, abstract).compile()
    numbers = hyperparameters(cfg, mesh)
    state = init_state(cfg, abstract, optimizer, make_params(cfg, mesh))
    return state, lambda state, tokens, targets: step(state, tokens, targets, numbers)


def steps_of(cfg, seeds):
    """TrainState after a step on the random batch of each seed, and the metrics of every step."""
    mesh = make_mesh(cfg)
    state, step = begin(cfg, mesh)
    seen = []
    for seed in seeds:
        state, metrics = step(state, *batch_of(cfg, mesh, seed))
        seen.append(jax.device_get(metrics))
    return state, seen


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Plain shards without a manifest: tokens that follow a noisy rule, so that there is something to learn."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    for split, lengths in dict(train=[9_000, 7_001, 5_003], val=[4_000]).items():
        (folder / split).mkdir()
        for i, n in enumerate(lengths):
            tokens = np.cumsum(rng.choice([1, 2, 3], n, p=[0.8, 0.15, 0.05])) % SMALL["vocab_size"]
            np.save(folder / split / f"{i:06d}.npy", tokens.astype(np.uint16))
    return folder


@pytest.fixture(autouse=True)
def keep_precision():
    """A run sets jax's precision of matrix products: the next test has its own again."""
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory):
    """A compilation cache that all runs of main.py in one test session share."""
    return tmp_path_factory.mktemp("xla_cache")


def flags_of(**flags):
    """{flag: value} as command-line words."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


@pytest.fixture
def run_flags(shards, xla_cache, tmp_path):
    """`run_flags(mesh, **flags)`: {flag: value} of a run of SMALL_RUN on small shards."""

    def run_flags(mesh=(1, 1, 1), **flags):
        batch = 8 // mesh[0]
        small = SMALL_RUN | dict(n_device_axis=mesh, n_devices=int(np.prod(mesh)), name="run")
        small |= dict(train_batch_size=batch, val_batch_size=batch, eval_every=5, eval_steps=2)
        small |= dict(data=shards, output_dir=tmp_path / "runs", compilation_cache=xla_cache)
        return small | flags

    return run_flags


@pytest.fixture
def train(run_flags):
    """`train(mesh, **flags)`: run the program in this process, with `run_flags`; its exit status."""

    def train(mesh=(1, 1, 1), **flags):
        flags = run_flags(mesh, **flags)
        # not through the command line: its parser compiles source, which Python 3.11 cannot do beside other threads
        flags = {n: str(v) if isinstance(v, Path) else v for n, v in flags.items() if v is not None}
        cfg = utils.replace(presets.preset("tiny"), **flags)
        return training_program.start(Flags(cfg, frozenset(flags)), main.workbench())

    return train


def refusal(call, *parts):
    """The sentence, which holds the parts, by which a call is refused."""
    with pytest.raises(messages.UserError) as e:
        call()
    said = str(e.value)
    assert "\n" not in said and said[-1] in ".?" and all(part in said for part in parts), said
    return said


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


@pytest.fixture
def named_tokenizers(monkeypatch):
    """tiktoken's gpt2 and cl100k_base with made ranks: their patterns, special tokens and sizes, and no download. Files
    of these ranks are known as the published ones.

    Where the environment names a TIKTOKEN_CACHE_DIR, the ranks in that folder serve.
    """
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        return
    loaders = {"data_gym_to_mergeable_bpe_ranks": 50_256, "load_tiktoken_bpe": 100_256}
    for name, n in loaders.items():
        monkeypatch.setattr(openai_public, name, lambda *_, n=n, **__: made_ranks(n))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # those made before
    files = {hash_of_made_ranks(50_256): "r50k_base", hash_of_made_ranks(100_256): "cl100k_base"}
    monkeypatch.setattr(published, "TIKTOKEN", files)


class Faulty(BaseHTTPRequestHandler):
    """Of a proxy to the server at port `behind`. Its `fault()` says what is wrong with a request: a status that is
    answered instead, "reset", "half" of the answer, "late": done behind, without an answer, "hang": nothing for a
    while; or None."""

    protocol_version = "HTTP/1.1"  # clients wait for its "100 Continue"
    disable_nagle_algorithm = True  # with it every answer takes 40 ms

    def handle(self):
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault()
        self.server.failed += fault is not None
        if fault == "hang":
            time.sleep(5)
        if fault in ("hang", "reset"):
            return self.hang_up()
        done = (fault, {}, b"") if isinstance(fault, int) else self.behind(body)
        if fault == "late":
            return self.hang_up()
        self.send(*done, half=fault == "half")

    def behind(self, body):
        """(status, headers, content) of the server's answer."""
        connection = HTTPConnection("127.0.0.1", self.server.behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()

    def send(self, status, headers, content, half=False):
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if half and content:
            self.wfile.write(content[: len(content) // 2])
            return self.hang_up()
        self.wfile.write(content)

    def hang_up(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = answer


def every_third(proxy):
    """A `fault` of the proxy: every third request is answered with 503, `proxy.most` times."""
    requests = itertools.count(1)

    def fault():
        return 503 if next(requests) % 3 == 0 and proxy.failed < proxy.most else None

    return fault


@contextlib.contextmanager
def storage_server(kind):
    """(a proxy to an emulator of gs or s3 with a bucket "bucket", where every third request fails; the file system of
    that past the proxy; the environment by which clients find the proxy)."""
    package = dict(gs="gcp_storage_emulator", s3="moto.server")[kind]
    pytest.importorskip(package, reason="bash setup_tpu.sh test")
    port = free_port()
    servers = dict(gs=[ROOT / "tests/gcs_emulator.py", port, "bucket"])
    servers["s3"] = ["-m", "moto.server", "-p", port]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = subprocess.Popen([sys.executable, *map(str, servers[kind])], **quiet)
    try:
        wait_for(lambda: listens("127.0.0.1", port))
        proxy, url = ThreadingHTTPServer(("127.0.0.1", 0), Faulty), f"http://127.0.0.1:{port}"
        proxy.behind, proxy.failed, proxy.most = port, 0, 9**9
        proxy.fault = every_third(proxy)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        if kind == "gs":
            env = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), address)
            env["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "x"
        else:
            env = dict(AWS_ENDPOINT_URL=address, AWS_DEFAULT_REGION="us-east-1")
            env |= dict(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
        fsspec.get_filesystem_class(kind).clear_instance_cache()  # of another test's server
        settings = {"token": "anon"} if kind == "gs" else dict(key="x", secret="x")
        fs = fsspec.filesystem(kind, endpoint_url=url, skip_instance_cache=True, **settings)
        if kind == "s3":
            fs.mkdir("bucket")
        yield proxy, fs, env
        proxy.shutdown()
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["gs", "s3"])
def bucket(request, monkeypatch):
    """(address of a bucket whose server fails every third request, its file system without failures, the proxy)."""
    kind = request.param
    with storage_server(kind) as (proxy, fs, env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        if kind == "gs":  # gcsfs tries again at once, not after a second
            monkeypatch.setattr("gcsfs.retry.random", SimpleNamespace(random=lambda: -1))
        yield f"{kind}://bucket/shards", fs, proxy
