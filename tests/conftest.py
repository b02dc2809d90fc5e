"""Fixtures of the tests. What else they share is in helpers.py and the files beside it."""

import environment
import pytest

environment.prepare()  # before jax is imported
pytest.register_assert_rewrite(
    "data_helpers",
    "helpers",
    "hf_helpers",
    "mesh_helpers",
    "page_helpers",
    "script_helpers",
    "small_models",
    "storage_servers",
)


import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import tiktoken
from data_helpers import Killed, make_texts, tokenize_flags
from helpers import flags_of, hash_of_made_ranks, made_ranks, run_on_tests, tokenize_tests
from small_models import SMALL, SMALL_RUN
from storage_servers import storage_server
from tiktoken_ext import openai_public

import data.workers
import main
import train as training_program
import utils
from config import command_line, presets
from config.flags import Flags
from data import tokenize_shards, train_tokenizer
from planning import command
from runtime import messages
from shards import published, tokenization

# Workers take whole files, whose tests share what they compile, and begin with the longest ones.
LONGEST = "memory docs muon trace resume faults storage model cluster parity".split()


def pytest_collection_modifyitems(items):
    for name in LONGEST:
        items.sort(key=lambda item: item.path.stem != f"test_{name}")


@pytest.fixture(scope="session")
def text_shards(tmp_path_factory):
    """Shards of the tests' own text, which keep the tokenizer of 512 tokens that made them."""
    folder = tmp_path_factory.mktemp("text")
    ranks = folder / "small.tiktoken"
    run_on_tests("train_tokenizer.py", "--vocab_size", 512, "--output", ranks)
    tokenize_tests(folder / "shards", ranks)
    return folder / "shards"


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


@pytest.fixture
def planned(tmp_path):
    """A function that makes a plan in this process, of the preset tiny where no other is given; its JSON."""

    def planned(*words, **flags):
        path = tmp_path / "plan.json"
        words = ["--preset", "tiny", *flags_of(**flags, plan_json=path), *words]
        command.main(command_line.parse(words))
        return json.loads(path.read_text())

    return planned


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A function that runs a program's main as its command line would, with tmp_path as its folder; it returns (exit
    status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(program, *flags):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, flags)])
        try:
            messages.one_sentence(program.main)
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def ranks_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    trained = train_tokenizer.train([t or "" for t in make_texts(60, lone=False)], 320)
    path.write_bytes(tokenization.dump_ranks(train_tokenizer.to_ranks(trained)))
    return path


@pytest.fixture
def tokenize(ranks_file, run, monkeypatch):
    """A function that runs data/tokenize_shards.py, as `run`."""
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(data.output, "BLOCK", 512)

    def tokenize(source, output="out", *more):
        return run(tokenize_shards, *tokenize_flags(source, output, ranks_file, *more))

    return tokenize


@pytest.fixture
def writes(monkeypatch):
    """The paths that data/output.py has written; at number writes.dies_at it raises Killed instead."""

    class Writes(list):
        dies_at = 0

        def killed(self, n, tokenize):
            """Let the run die at its n-th write."""
            self.dies_at = len(self) + n
            with pytest.raises(Killed):
                tokenize()
            self.dies_at = 0
            self.clear()

    written, write_file = Writes(), data.output.write_file

    def write(path, content):
        written.append(path)
        if len(written) == written.dies_at:
            raise Killed
        write_file(path, content)

    monkeypatch.setattr(data.output, "write_file", write)
    return written
