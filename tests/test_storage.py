"""Reading shards from storage: what is fetched, kept and verified, and training from buckets that fail."""

import errno
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers import (
    ROOT,
    TINY,
    assert_bitwise,
    checkpoint_of,
    describe,
    flags_of,
    metrics_of,
    refusal,
    tokenize_tests,
    wait_for,
)
from small_models import SMALL, small_config

import train as training_program
import utils
from config import presets, settle
from config.flags import Flags, Found
from config.program import read_flags
from data import output
from inference import weights
from runtime import files, messages, outbox, processes
from shards import storage
from shards.corpus import READERS, Corpus
from tools import checkpoints, common, compare, evaluate, hf, sample
from training import setup
from training.checkpointing import Checkpoints

SHARDS = 12


def write_corpus(folder, n=SHARDS, tokens=1001):
    """train/ and val/ of n and 1 shards of `tokens`, made and described as tokenize_shards.py does."""
    for split, count in dict(train=n, val=1).items():
        (folder / split).mkdir(parents=True)
        writer = output.ShardWriter(str(folder / split), tokens, np.dtype(np.uint16))
        noise = np.random.default_rng(count).choice([1, 2, 3], count * tokens, p=[0.8, 0.15, 0.05])
        writer.add((np.cumsum(noise) % SMALL["vocab_size"]).astype(np.uint16))
    return describe(folder)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """(local folder, address of a copy in fsspec's in-memory store, list of the (name, start, stop) read from it)."""
    monkeypatch.setattr(storage, "BLOCK", 512)
    monkeypatch.setattr(output, "BLOCK", 512)
    folder, fs, read = write_corpus(tmp_path / "corpus"), fsspec.filesystem("memory"), []
    fs.rm("/", recursive=True)
    fs.put(f"{folder}/", "/bucket/", recursive=True)
    cat_file = type(fs).cat_file

    def watched(self, path, start=None, end=None):
        read.append((os.path.basename(path), start, end))
        return cat_file(self, path, start, end)

    monkeypatch.setattr(type(fs), "cat_file", watched)
    return folder, "memory://bucket", read


def open_corpus(root, tmp_path, **flags):
    cfg = small_config(cache_dir=str(tmp_path / "cache"), **flags)
    return Corpus(cfg, str(root), "train")


def kept(tmp_path):
    return list((tmp_path / "cache" / "blocks").glob("*"))


def test_only_the_blocks_of_the_sequences_are_fetched_and_kept(remote, tmp_path):
    folder, address, read = remote
    local, corpus = open_corpus(folder, tmp_path), open_corpus(address, tmp_path)
    assert read == [("manifest.json", None, None)], "the manifest alone tells what is where"
    assert not kept(tmp_path) and local.n_sequences == corpus.n_sequences == SHARDS * 31
    numbers = np.arange(5)
    assert np.array_equal(corpus.sequences(numbers, seed=1), local.sequences(numbers, seed=1))
    blocks = set(read[1:])
    assert 5 < len(blocks) <= 15 and all(stop - start <= 512 for _, start, stop in blocks)
    everything = np.arange(2 * corpus.n_sequences)
    expected = local.sequences(everything, seed=1)
    assert np.array_equal(corpus.sequences(everything, seed=1), expected)
    blocks = set(read[1:])
    assert len(blocks) == len(kept(tmp_path)) == SHARDS * 5 and len(read) < 1.3 * len(blocks)
    again = open_corpus(address, tmp_path)  # another process, a day later
    del read[:]
    assert np.array_equal(again.sequences(everything, seed=1), expected) and not read


def test_the_least_recently_used_blocks_leave(tmp_path):
    """And nothing but blocks does, even where all other files are larger and older."""
    cache, key = storage.Cache(str(tmp_path), 32 * 100), "0123456789" * 4
    others = [key, f"{key}-1.npy", f"{key[1:]}-1", "notes.txt", "x.part", f"{key}-7/a.txt"]
    (tmp_path / f"{key}-7").mkdir()
    killed = f"{key}-1.0123456789abcdef.part"  # of a block that was being written
    for name in [*others, killed]:
        (tmp_path / name).write_bytes(bytes(10_000))
        os.utime(tmp_path / name, (0, 0))
    for i in range(100, 140):
        if i == 130:
            assert len(cache.get(f"{key}-100", 0, 100)) == 100
        cache.put(f"{key}-{i}", bytes(100))
        os.utime(tmp_path / f"{key}-{i}", (i, i)) if i < 130 else None
    assert all((tmp_path / name).stat().st_size == 10_000 for name in others)
    blocks = {p.name: p.stat().st_size for p in tmp_path.glob(f"{key}-1??")}
    assert {f"{key}-100", f"{key}-139"} <= blocks.keys() and f"{key}-101" not in blocks
    assert sum(blocks.values()) <= cache.limit and not (tmp_path / killed).exists()


def test_a_damaged_block_of_the_cache_is_fetched_again(remote, tmp_path):
    _, address, read = remote
    everything = np.arange(SHARDS * 31)
    expected = open_corpus(address, tmp_path).sequences(everything, seed=1)
    paths = sorted(kept(tmp_path))
    for path, content in zip(paths, (b"", b"x", bytes(512), b"1" * 511)):
        path.write_bytes(content)
    corpus = open_corpus(address, tmp_path)
    del read[:]
    assert np.array_equal(corpus.sequences(everything, seed=1), expected) and len(set(read)) == 4


def test_a_block_of_the_cache_that_changes_after_it_was_verified_is_fetched_again(remote, tmp_path):
    _, address, read = remote
    everything = np.arange(SHARDS * 31)
    corpus = open_corpus(address, tmp_path)
    expected = corpus.sequences(everything, seed=1)
    one, other, *_ = sorted(kept(tmp_path))
    os.truncate(one, 100)
    other.unlink()
    del read[:]
    assert np.array_equal(corpus.sequences(everything, seed=1), expected) and len(set(read)) == 2


def test_a_local_shard_that_changes_after_it_was_verified_is_verified_again(
    remote, tmp_path, monkeypatch
):
    """The same content may be written anew; without a manifest nothing tells that it is the same."""
    folder, _, _ = remote
    path, everything = folder / "train" / "000003.npy", np.arange(SHARDS * 31)
    content = path.read_bytes()
    corpus = open_corpus(folder, tmp_path)
    expected = corpus.sequences(everything, seed=1)

    def refused(*said):
        refusal(lambda: corpus.sequences(everything, seed=1), f"{path} ", *said)

    def write(content, times=itertools.count()):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.utime(path, (0, next(times)))  # the system's clock may not have gone on

    write(content)
    assert np.array_equal(corpus.sequences(everything, seed=1), expected)
    write(content[:700] + b"ab" + content[702:])
    refused("is damaged (its bytes from 512 on")
    write(content[:-600])
    refused(f"is damaged (it has {len(content) - 600:,} bytes instead of {len(content):,})")
    path.unlink()
    refused("is missing")
    write(content)
    assert np.array_equal(corpus.sequences(everything, seed=1), expected)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(messages.Unavailable) as e:
        patch.setattr(os, "preadv", fails)
        corpus.sequences(everything, seed=1)
    assert f"{path.parent}/" in str(e.value) and "cannot be read (Input/output error)" in str(
        e.value
    )
    (path.parent / "manifest.json").unlink()
    corpus = open_corpus(folder, tmp_path)
    assert np.array_equal(corpus.sequences(everything, seed=1), expected)
    write(content)
    refused("is damaged (it was changed after training began)")


def test_a_local_shard_that_shrinks_ends_the_run_after_a_checkpoint(run_flags, tmp_path):
    """In a process of its own, which a mapped file would kill."""
    folder = write_corpus(tmp_path / "corpus", n=2, tokens=20_000)  # of several pages each
    flags = run_flags(**TINY | dict(T=32, data=folder, training_steps=100_000))
    words = [sys.executable, ROOT / "main.py", "--preset", "tiny", *flags_of(**flags)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "runs/run"
    try:
        wait_for(lambda: process.poll() is not None or (run / "metrics.jsonl").exists())
        for path in (folder / "train").glob("*.npy"):
            os.truncate(path, 100)
        said = process.communicate(timeout=300)[1]
    finally:
        process.kill()
    assert process.returncode == messages.UserError.status, said
    assert re.fullmatch(r"error: --data: \S+\.npy is damaged \(it has 100 bytes .*\n", said), said
    (step,) = map(int, os.listdir(run / "checkpoints"))
    assert [row["step"] for row in metrics_of(run)] == list(range(1, step + 1))


def test_shards_without_a_manifest_and_written_anew(remote, tmp_path):
    _, address, _ = remote
    fs = fsspec.filesystem("memory")
    fs.rm("/bucket/train/manifest.json")
    first = open_corpus(address, tmp_path).sequences(np.arange(SHARDS * 31), seed=1)
    for path in fs.find("/bucket/train"):
        with fs.open(path) as f:
            tokens = np.load(f)
        with fs.open(path, "wb") as f:
            np.save(f, (tokens + 1) % 250)
    anew = open_corpus(address, tmp_path).sequences(np.arange(SHARDS * 31), seed=1)
    assert np.array_equal(anew, (first + 1) % 250)


def test_local_shards_are_verified(remote, tmp_path, monkeypatch):
    """All of them at the start, where they are few; else each block when it is first read."""
    folder, _, _ = remote
    path = folder / "train" / "000007.npy"
    content = bytearray(path.read_bytes())
    content[1500] ^= 1
    path.write_bytes(content)
    said = f"{path} is damaged", "bytes from 1,024 on"
    refusal(lambda: open_corpus(folder, tmp_path), *said)
    monkeypatch.setattr("shards.corpus.CHECK_AT_START", 0)
    corpus = open_corpus(folder, tmp_path)
    refusal(lambda: corpus.sequences(np.arange(corpus.n_sequences), seed=1), *said)


def test_a_lost_shard_ends_the_run_after_a_checkpoint(remote, train, tmp_path, monkeypatch):
    """The run resumes when the shard is back, with the losses of one that never lost it."""
    folder, address, _ = remote
    monkeypatch.setattr("shards.corpus.WINDOW", 31 * 32)  # a shard: the epoch's last is read last
    flags = TINY | dict(T=32, train_batch_size=32, training_steps=14, eval_every=7)
    flags |= dict(data=address, cache_dir=tmp_path / "cache")
    name = f"{np.random.default_rng([0, 0]).permutation(SHARDS)[-1]:06d}.npy"
    content, fs = (folder / "train" / name).read_bytes(), fsspec.filesystem("memory")
    make_evaluate = setup.make_evaluate

    def lose(*args):  # once training has begun
        fs.pipe_file(f"/bucket/train/{name}", content[:700] + b"ab" + content[702:])
        return make_evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(setup, "make_evaluate", lose)
        refusal(lambda: train(**flags), f"train/{name} is damaged")
    saved = [int(p.name) for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir()]
    assert max(saved) == 341 // 32, "as many steps as there are whole batches before that shard"
    fs.pipe_file(f"/bucket/train/{name}", content)
    assert train(**flags) == 0
    assert [row["step"] for row in metrics_of(tmp_path / "runs" / "run")] == list(range(1, 15))
    assert train(**flags, name="whole") == 0
    assert metrics_of(tmp_path / "runs" / "run") == metrics_of(tmp_path / "runs" / "whole")


def test_a_folder_that_cannot_be_listed_is_one_sentence(train, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    said = "loop", ": cannot be listed (Too many levels of symbolic links)."
    refusal(lambda: train(data=tmp_path / "loop"), *said)
    refusal(lambda: checkpoints.main(checkpoints.Options(str(tmp_path / "loop"))), *said)


def test_checkpoints_to_s3_are_refused(train):
    refusal(lambda: train(output_dir="s3://bucket/runs"), "--output_dir s3://bucket/runs: must be")


def test_a_remote_run_is_copied_from_the_folder_of_its_name():
    """That it could be read as a pattern of others changes nothing."""
    fs = fsspec.filesystem("memory")
    for name, content in {"r[1]": b"its own", "r1": b"another's"}.items():
        fs.pipe_file(f"/runs/{name}/checkpoints/5/meta/metadata", content)
    opened = Checkpoints("memory://runs/r[1]/checkpoints")
    assert (opened.folder / "5/meta/metadata").read_bytes() == b"its own"


def test_a_folder_is_no_pattern_for_what_may_have_been_meant(tmp_path):
    for name in ("m[1]/right", "m1/wrong"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    said = weights.hint(f"{tmp_path}/m[1]")
    assert "m[1]/right" in said and "wrong" not in said


def test_the_manifest_decides_the_vocabulary(tmp_path, capsys):
    """Where no flag, no weights and no run does. A preset's that is padded stays."""
    for size, preset, given, wanted in (
        (512, "tiny", {}, 512),
        (None, "tiny", {}, 8192),
        (50257, "gpt2-124m", {"vocab_size": 50304}, 50304),
        (512, "tiny", {"tokenizer": "x"}, 8192),
        (512, "tiny", {"init_from": "x"}, 8192),
    ):
        cfg = utils.replace(presets.preset(preset), **given, output_dir=str(tmp_path))
        shards = [("a", "a/train", dict(vocab_size=size) if size else {})]
        flags = Flags(cfg, {*given} - {"vocab_size"})
        found = settle.settle_model(flags, Found(1, shards=shards)).cfg
        assert found == utils.replace(cfg, vocab_size=wanted)
        assert ("the vocabulary has" in capsys.readouterr().out) == (found != cfg)
        stored = utils.flatten(cfg) | dict(vocab_size=60000, data_fingerprint="x")
        kept = settle.settle_model(Flags(cfg, set()), Found(1, stored=stored, shards=shards))
        assert kept.cfg.model.vocab_size == 60000


def used(run, shards, exported, capsys, cache):
    """What every tool says of the run at an address, and of the shards at another."""
    words = [run, "--prompt=import ", "--max_tokens=4", "--n_devices=1"]
    words.append(f"--compilation_cache={cache}")
    (row,) = sample.main(read_flags(common.Sample, words, "tools/sample.py"))
    hf.main(hf.Options("export", run, exported))
    Path("some.txt").write_text("import os\n" * 20)
    data = ("some.txt", shards, f"{shards}/text.txt")
    asked = common.Evaluate(model=run, data=data, limit=4, compilation_cache=cache, n_devices=1)
    measured = [row | dict(data="") for row in evaluate.main(asked)["data"]]
    checkpoints.main(checkpoints.Options(run))
    compare.main(compare.Options((run,)))
    said = capsys.readouterr()
    assert "4  sound" in said.out and "warning" not in said.out + said.err
    return row.tokens, measured


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_run_in_a_bucket_is_used_as_a_local_one(
    bucket, train, text_shards, tmp_path, capsys, monkeypatch, xla_cache
):
    """Tokenized, trained and resumed there while requests fail: the same as a local run. Then continued, measured,
    exported and the beginning of others."""
    monkeypatch.chdir(tmp_path)
    address, fs, proxy = bucket
    proxy.most, local, cache = 12, tmp_path / "bucket", str(xla_cache)
    tokenize_tests(address, text_shards / "tokenizer.tiktoken")
    files.write_file(f"{address}/text.txt", "def f():\n" * 20)
    runs = "gs://bucket/others"  # not runs, whose listing by another test this process may remember
    flags = TINY | dict(vocab_size=None, schedule="wsd", T=80, data=address)
    flags |= dict(cache_dir=tmp_path / "cache", output_dir=runs)
    for end in (2, 4):
        assert train(**flags, training_steps=end) == 0
    said = capsys.readouterr().out
    assert (
        f"the vocabulary has 512 tokens and not 8,192, as the tokenizer of {address}/train" in said
    )
    assert "resuming run at step 2" in said and proxy.failed > 5
    fs.invalidate_cache()
    fs.get("bucket", str(local), recursive=True)
    flags |= dict(data=local / "shards", output_dir=tmp_path / "runs")
    assert train(**flags, training_steps=4) == 0
    copy, its_shards, whole = local / "others/run", local / "shards", tmp_path / "runs/run"
    for row, same in zip(metrics_of(copy), metrics_of(whole), strict=True):
        assert row | same == row  # it has evaluated where it first ended
    assert_bitwise(checkpoint_of(copy, 4), checkpoint_of(whole, 4))
    there = used(f"{runs}/run", address, "there", capsys, cache)
    assert there == used(str(copy), str(its_shards), "here", capsys, cache)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert Path("there", name).read_bytes() == Path("here", name).read_bytes()
    begin = flags | dict(data=address, training_steps=1)
    assert train(**begin, name="weights", init_from=f"{runs}/run") == 0
    assert "warning" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def undisturbed():
    return {}  # {directory of a run without faults}, made once


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
@pytest.mark.parametrize("fault", [401, 503, "half", "late"])
def test_an_outage_while_a_run_trains_costs_nothing_but_checkpoints(
    fault, bucket, train, tmp_path, monkeypatch, capfd, undisturbed
):
    """It begins with a save and lasts over two more. The run waits for no storage in it, and ends with the bits and
    rows of a run on a local disk."""
    address, fs, proxy = bucket
    proxy.fault = lambda: None
    enter = processes.Watchdog.enter

    def outage(watchdog, name, step):
        if (name, step) == ("checkpoint", 4):
            proxy.fault = lambda: fault
        if (name, step) == ("training", 9):
            proxy.fault = lambda: None
        enter(watchdog, name, step)

    flags = TINY | dict(training_steps=12, save_steps=2, eval_every=3, keep_checkpoints=3)
    monkeypatch.setattr(training_program, "PATIENCE", 0.5)
    monkeypatch.setattr(outbox, "PAUSE", 0.1)
    if not undisturbed:
        assert train(**flags) == 0
        undisturbed["run"] = tmp_path / "runs/run"
    monkeypatch.setattr(processes.Watchdog, "enter", outage)
    run = f"gs://bucket/{fault}"
    assert train(**flags, output_dir=run) == 0
    said = capfd.readouterr()
    assert proxy.failed and "warning: " in said.err and "Traceback" not in said.err + said.out
    fs.invalidate_cache()
    copy = tmp_path / "copy"
    fs.get(run, str(copy), recursive=True)
    (folder,) = copy.rglob("config.json")
    assert "12" in os.listdir(folder.parent / "checkpoints")
    assert_bitwise(*(checkpoint_of(run, 12) for run in (folder.parent, undisturbed["run"])))
    assert metrics_of(folder.parent) == metrics_of(undisturbed["run"])
    assert len(fs.ls(f"{run}/run/metrics")) < 9 and fs.exists(f"{run}/run/ended.json")


@pytest.mark.parametrize("limit", [0, 8192])
def test_the_cache_is_bounded(remote, tmp_path, limit):
    _, address, _ = remote
    corpus = open_corpus(address, tmp_path, cache_gb=limit / 1e9)
    for numbers in np.array_split(np.arange(corpus.n_sequences), 20):
        corpus.sequences(numbers, seed=1)
        assert sum(p.stat().st_size for p in kept(tmp_path)) <= limit
    assert len(kept(tmp_path)) > (10 if limit else -1)


def test_blocks_that_threads_put_at_once_are_all_kept(tmp_path):
    cache, key = storage.Cache(str(tmp_path), 1e9), "0123456789" * 4
    names = [f"{key}-{i}" for i in range(500)]
    list(READERS.map(lambda name: cache.put(name, bytes(100)), names))
    assert {path.name for path in tmp_path.iterdir()} == {*names}


def test_a_bucket_that_fails_is_read_as_a_local_folder(bucket, tmp_path):
    """Every third request fails."""
    address, _, proxy = bucket
    folder = write_corpus(tmp_path / "corpus")
    for path in filter(Path.is_file, folder.rglob("*")):
        files.write_file(f"{address}/{path.relative_to(folder)}", path.read_bytes())
    local, corpus = open_corpus(folder, tmp_path), open_corpus(address, tmp_path)
    everything = np.arange(local.n_sequences)
    expected = local.sequences(everything, seed=1)
    assert np.array_equal(corpus.sequences(everything, seed=1), expected) and proxy.failed > 5
