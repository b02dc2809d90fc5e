"""data/tokenize_shards.py on sources of records, killed, on Ray, to remote storage, and on a huge document."""

import contextlib
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from test_data_programs import content, run, validates

import data.encoding
import data.output
import data.workers
from data import tokenization, tokenize_shards, train_tokenizer
from data.sources import files as source_files
from data.sources import text as source_text
from data.sources.files import list_documents
from data.sources.text import read_text
from runtime import locks

LONE = ["\ud83d half of an emoji", "the other half \ude00", "\udfff\ud800 swapped"]
HOSTILE = [
    "<|endoftext|><|endoftext|> <|fim_prefix|>x<|im_start|>",
    "",
    None,
    "\0a\0\0b\0",
    " \n\t \n",
    " " * 3000,
    "👩‍👩‍👧‍👦 naïve 한국어 é\u200b\ufeff",
    "a\r\nb\u2028c\x85",
    "",
    "don't WE'LL 12345 ...!!??\n",
    "legal: \ufffd",
]


COMPRESS = {
    ".gz": gzip.compress,
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}


def make_texts(n, lone=True):
    """n texts, the hostile ones among them."""
    rng = random.Random(1)
    words = "def return the quick brown fox self. jumps over\n    lazy dogs, 1234 == '' {} ü".split(
        " "
    )
    hostile = HOSTILE + LONE * lone
    return hostile + [
        " ".join(rng.choices(words, k=rng.randrange(1, 300))) for _ in range(n - len(hostile))
    ]


def write_lines(path, texts):
    """A .jsonl file, compressed as its name says, in two frames where it is."""
    lines = [json.dumps({"id": i, "body": t}).encode() + b"\n" for i, t in enumerate(texts)]
    parts = b"".join(lines[: len(lines) // 2]), b"\n" + b"".join(lines[len(lines) // 2 :])
    if path.suffix in COMPRESS:
        parts = map(COMPRESS[path.suffix], parts)
    path.write_bytes(b"".join(parts))


def write_rows(path, texts):
    pq.write_table(pa.table({"id": range(len(texts)), "body": texts}), path, row_group_size=7)


def reference(texts, encoding, val_fraction):
    """What the shards must hold, by the plainest loop: {split: (token ids, documents, bytes, empty, replaced)}."""
    result = {"train": ([], [0, 0, 0, 0]), "val": ([], [0, 0, 0, 0])}
    for text in texts:
        valid = "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in text or "")
        ids, counts = result["val" if validates(valid, val_fraction) else "train"]
        if valid:
            ids += [encoding.eot_token, *encoding.encode_ordinary(valid)]
        for k, more in enumerate(
            (valid != "", len(valid.encode()), valid == "", valid != (text or ""))
        ):
            counts[k] += more
    return result


def check(output, expected):
    for split, (ids, counts) in expected.items():
        manifest = json.loads((output / split / "manifest.json").read_text())
        shards = [np.load(output / split / s["name"]) for s in manifest["shards"]]
        np.testing.assert_array_equal(np.concatenate(shards), ids)
        keys = ("documents", "bytes", "empty_documents", "replaced_documents")
        assert [manifest[k] for k in keys] == counts and manifest["tokens"] == len(ids)


@pytest.fixture(scope="module")
def ranks_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    trained = train_tokenizer.train([t or "" for t in make_texts(60, lone=False)], 400)
    path.write_bytes(tokenization.dump_ranks(train_tokenizer.to_ranks(trained)))
    return path


@pytest.fixture(params=["gpt2", "cl100k_base", "trained"])
def tokenizer(request, ranks_file, named_tokenizers):
    """Name or file of a tokenizer, its ranks at hand."""
    return str(ranks_file) if request.param == "trained" else request.param


def flags_of(source, output, ranks_file, *more):
    return [
        "--source",
        source,
        "--output",
        output,
        "--tokenizer",
        ranks_file,
        "--text_column",
        "body",
        "--workers",
        1,
        "--shard_tokens",
        1000,
        *more,
    ]


def start(*flags):
    program = [sys.executable, str(ROOT / "data" / "tokenize_shards.py"), *map(str, flags)]
    return subprocess.Popen(program, stdout=subprocess.DEVNULL)


# --- Sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("place", ["file", "folder", "glob"])
def test_records_equal_a_plain_loop(ranks_file, tmp_path, capsys, monkeypatch, kind, place):
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)
    texts = make_texts(60, lone=kind != ".parquet")
    (tmp_path / "in" / ".cache").mkdir(parents=True)
    (tmp_path / "in" / ".cache" / "hidden.txt").write_text("no document")
    write_file = write_rows if kind == ".parquet" else write_lines
    cuts = [0, 60] if place == "file" else [0, 11, 40, 60]
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        write_file(tmp_path / "in" / f"{i}{kind}", texts[a:b])
    source = tmp_path / "in" / {"file": f"0{kind}", "folder": "", "glob": f"[0-9]{kind}"}[place]
    status, _, err = run(
        tokenize_shards, capsys, monkeypatch, *flags_of(source, tmp_path / "out", ranks_file)
    )
    assert status == 0 and (
        "4 characters of 3 documents became U+FFFD" in err or (kind == ".parquet" and not err)
    ), err
    check(tmp_path / "out", reference(texts, tokenization.load_tokenizer(str(ranks_file)), 0.1))


def test_hostile_records(tokenizer, tmp_path, capsys, monkeypatch):
    texts = make_texts(60)
    write_lines(tmp_path / "a.jsonl", texts)
    flags = flags_of(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, "--val_fraction", 0.3)
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    expected = reference(texts, tokenization.load_tokenizer(tokenizer), 0.3)
    check(tmp_path / "out", expected)
    assert [sum(counts[k] for _, counts in expected.values()) for k in (2, 3)] == [3, 3]


def test_bytes_that_are_not_utf8(ranks_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "caf\xe9"}\n{"body": "plain"}')
    flags = flags_of(tmp_path / "a.jsonl", tmp_path / "out", ranks_file, "--val_fraction", 0)
    status, _, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (
        status == 0
        and "document 0 is not UTF-8: 1 character became U+FFFD (perhaps it is latin-1" in err
    )
    ids = np.load(tmp_path / "out/train/000000.npy").tolist()
    assert (
        tokenization.load_tokenizer(str(ranks_file)).decode(ids)
        == "<|endoftext|>caf\ufffd<|endoftext|>plain"
    )


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_records_with_a_byte_order_mark(ranks_file, tmp_path, capsys, monkeypatch, kind):
    """UTF-8, or UTF-16 and UTF-32 of either order; a README and others beside; a folder that is a link."""
    lines = '{"body": "naïve €"}\n\n{"body": "second"}'
    for i, encoding in enumerate(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"]):
        content = f"\ufeff{lines}".encode(encoding)
        (tmp_path / f"{i}{kind}").write_bytes(COMPRESS.get(Path(kind).suffix, bytes)(content))
    for name in ("README.md", "LICENSE", "dataset_infos.json"):
        (tmp_path / name).write_text("about it")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "0.jsonl")
    flags = flags_of(
        tmp_path, tmp_path.parent / f"{tmp_path.name}-out", ranks_file, "--val_fraction", 0
    )
    status, _, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert status == 0 and err.count("\n") == 5 and err.count("is read as such") == 3, err
    assert f"left out: 3 other files (such as {tmp_path}/LICENSE)" in err
    assert f"left out: 1 symlinked folder ({tmp_path}/link)" in err
    ids = np.load(Path(flags[3]) / "train/000000.npy").tolist()
    times = 5 if kind == ".jsonl" else 4
    text = tokenization.load_tokenizer(str(ranks_file)).decode(ids)
    assert text == "<|endoftext|>naïve €<|endoftext|>second" * times


def test_a_dataset_of_the_hub(ranks_file, tmp_path, capsys, monkeypatch):
    """Config, split and revision reach `datasets`, which here reads a folder laid out as a dataset of the hub is."""
    import datasets
    import huggingface_hub

    texts, folder = make_texts(60, lone=False), tmp_path / "hub"
    (folder / "small").mkdir(parents=True)
    write_rows(folder / "small" / "0.parquet", texts[:20])
    write_rows(folder / "small" / "1.parquet", texts[20:])
    files = "[{split: whole, path: small/*.parquet}]"
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: small\n  data_files: {files}\n---\n"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    info = huggingface_hub.hf_api.DatasetInfo(id="someone/texts", sha="5ha")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_: info)
    for loader in ("load_dataset", "load_dataset_builder"):

        def local(name, *args, revision, load=getattr(datasets, loader), **kwargs):
            assert (name, revision) == ("someone/texts", "5ha")
            return load(str(folder), *args, **kwargs)

        monkeypatch.setattr(datasets, loader, local)
    flags = flags_of(
        "someone/texts", tmp_path / "out", ranks_file, "--config", "small", "--split", "whole"
    )
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    check(tmp_path / "out", reference(texts, tokenization.load_tokenizer(str(ranks_file)), 0.1))
    manifest = json.loads((tmp_path / "out/train/manifest.json").read_text())
    of_the_hub = {"source": "someone/texts", "config": "small", "split": "whole", "revision": "5ha"}
    assert of_the_hub.items() <= manifest.items()
    for flag, value in (("config", "none"), ("split", "nothing")):
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags, f"--{flag}", value)
        assert (status, out, err.count("\n")) == (2, "", 1) and f"--{flag} {value}" in err, err


def test_a_tokenizer_of_records(tmp_path, capsys, monkeypatch, named_tokenizers):
    write_lines(tmp_path / "a.jsonl.gz", make_texts(60))
    flags = [
        "--source",
        tmp_path,
        "--text_column",
        "body",
        "--vocab_size",
        300,
        "--output",
        tmp_path / "x.tiktoken",
    ]
    status, out, err = run(train_tokenizer, capsys, monkeypatch, *flags)
    assert (status, err) == (0, "") and "held-out" in out and "cl100k_base" in out and "gpt2" in out
    assert tokenization.load_tokenizer(str(tmp_path / "x.tiktoken")).n_vocab == 300


@pytest.mark.parametrize(
    "content, flag, word",
    [
        (b'{"body": "x"}\n{"body": ', "source", "line 2"),
        (b'{"text": "x"}', "text_column", "text"),
        (b'["x"]', "text_column", "line 1"),
        (b'{"body": 3}', "text_column", "int"),
        (b"", "source", "0 documents"),
        (b'{"body": ""}\n' * 9, "source", "9 documents, all of them empty"),
        (None, "source", "cannot be read"),
    ],
)
def test_bad_records(ranks_file, tmp_path, capsys, monkeypatch, content, flag, word):
    path = tmp_path / ("a.jsonl" if content is not None else "a.jsonl.gz")
    path.write_bytes(b"not gzip" if content is None else content)
    status, out, err = run(
        tokenize_shards, capsys, monkeypatch, *flags_of(path, tmp_path / "out", ranks_file)
    )
    assert (status, out, err.count("\n")) == (2, "", 1) and f"--{flag}" in err and word in err, err


def test_bad_sources(ranks_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in/a.parquet", ["x"])
    (tmp_path / "in/bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "in/README.md").write_text("about it")
    write_lines(tmp_path / "in/b.jsonl", ["y"])
    for source, word in [
        ("", "different kinds"),
        ("bad.parquet", "cannot be read"),
        ("*.txt", "glob"),
        ("a.parquet", "--text_column nobody"),
    ]:
        flags = flags_of(
            tmp_path / "in" / source, tmp_path / "out", ranks_file, "--text_column", "nobody"
        )
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
        assert (status, out, err.count("\n")) == (2, "", 1) and word in err, err


COLUMNS = {
    "list": ["x"],
    "struct": {"a": "x"},
    "binary": b"x",
    "int64": 3,
    "double": 0.5,
    "bool": True,
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_parquet_columns_that_hold_no_text(ranks_file, tmp_path, capsys, monkeypatch, kind):
    """The first file has text: the second one and the type that it has instead are named before anything is written."""
    write_rows(tmp_path / "0.parquet", ["text"] * 9)
    pq.write_table(pa.table({"body": [COLUMNS[kind]] * 9}), tmp_path / "1.parquet")
    flags = flags_of(tmp_path / "*.parquet", tmp_path / "out", ranks_file)
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and not (tmp_path / "out").exists()
    assert f"--text_column body: {tmp_path}/1.parquet holds {kind}" in err, err


def test_parquet_columns_that_hold_text(ranks_file, tmp_path, capsys, monkeypatch):
    """However Arrow stores it. Only threads of this program read: those of Arrow that still do at exit abort it."""
    texts, readers = make_texts(60, lone=False), set()
    one = pa.array(texts)
    forms = [
        one,
        one.cast(pa.large_string()),
        one.cast(pa.string_view()),
        one.dictionary_encode(),
        pa.nulls(60),
    ]
    bad = pa.array([b"caf\xe9", None, b"x"] * 20).cast(pa.binary()).view(pa.string())
    for i, form in enumerate([*forms, bad]):
        pq.write_table(pa.table({"body": form}), tmp_path / f"{i}.parquet", row_group_size=13)
    opened = type(fsspec.filesystem("file")).open

    def watched(self, path, *args, **kwargs):
        f = opened(self, path, *args, **kwargs)
        if path.endswith(".parquet"):
            read = f.f.read
            f.read = lambda *args: (
                readers.add(type(threading.current_thread()).__name__),
                read(*args),
            )[1]
        return f

    monkeypatch.setattr(type(fsspec.filesystem("file")), "open", watched)
    flags = flags_of(tmp_path / "*.parquet", tmp_path / "out", ranks_file)
    status, _, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert status == 0 and "20 characters of 20 documents became U+FFFD" in err
    assert readers == {"_MainThread", "Thread"}, "a _DummyThread is none of Python's"
    expected = reference(
        texts * 4 + [None] * 60 + ["caf\ufffd", None, "x"] * 20,
        tokenization.load_tokenizer(str(ranks_file)),
        0.1,
    )
    for name, (_, counts) in expected.items():
        counts[3] = json.loads((tmp_path / f"out/{name}/manifest.json").read_text())[
            "replaced_documents"
        ]
    check(tmp_path / "out", expected)


# --- Long documents ---------------------------------------------------------------------------------------------


def test_pieces_change_no_token(tokenizer, monkeypatch):
    """The longest texts of the standard library, and hostile ones, in pieces of 50 characters."""
    monkeypatch.setattr(data.encoding, "PIECE", 50)
    encoding = tokenization.load_tokenizer(tokenizer)
    documents = sorted(list_documents("stdlib"), key=lambda d: -d.size)[:20]
    texts = [read_text(d)[0] for d in documents] + ["a b" * 100 + " \n" + "x" * 500]
    for text in texts + list(filter(None, HOSTILE)):
        parts = list(data.encoding.pieces(text, encoding))
        assert "".join(parts) == text and (len(text) < 5000 or len(parts) > len(text) / 500)
        assert [i for p in parts for i in encoding.encode_ordinary(p)] == encoding.encode_ordinary(
            text
        )


def peak_memory(process):
    """The most kB that a process had in memory, once it has ended."""
    peak = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        peak = max(peak, int(found[1])) if found else peak  # a process that ends has none
        time.sleep(0.02)
    return peak


def test_one_line_of_50_mb(ranks_file, tmp_path):
    """The tokens of `encode_ordinary` on the whole, in a few times the document's size of memory."""
    rng = random.Random(2)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(1, 9))) for _ in range(5000)]
    text = " ".join(rng.choices([*words, "1234", "'s", "—", "\n"], k=10_000_000))[:50_000_000]
    assert len(text) == 50_000_000
    texts = ["short", text, "after"]
    write_lines(tmp_path / "a.jsonl", texts)
    more = ["--val_fraction", 0, "--shard_tokens", 10**7]
    process = start(*flags_of(tmp_path / "a.jsonl", tmp_path / "out", ranks_file, *more))
    peak = peak_memory(process)
    assert process.returncode == 0 and 100_000 < peak < 500_000, f"{peak} kB"
    encoding = tokenization.load_tokenizer(str(ranks_file))
    shards = [np.load(p) for p in sorted((tmp_path / "out/train").glob("*.npy"))]
    expected = [np.r_[encoding.eot_token, encoding.encode_to_numpy(t)] for t in texts]
    assert np.array_equal(np.concatenate(shards), np.concatenate(expected))


# --- Killed and started again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", ".jsonl.gz", ".parquet"])
def test_killed_and_started_again(ranks_file, tmp_path, kind):
    """kill -9 after random times, until a run comes to its end: the files are those of an uninterrupted run."""
    (tmp_path / "in").mkdir()
    texts = make_texts(4000, lone=False)
    if kind == "folder":
        for i, text in enumerate(texts):
            (tmp_path / "in" / f"{i}.txt").write_text(text or "")
    else:
        write = write_rows if kind == ".parquet" else write_lines
        for i in range(2):
            write(tmp_path / "in" / f"{i}{kind}", texts[2000 * i :][:2000])
    flags = flags_of(
        tmp_path / "in", tmp_path / "out", ranks_file, "--workers", 2, "--shard_tokens", 9999
    )
    rng, killed, progress = random.Random(kind), 0, tmp_path / "out" / "progress.npz"

    def time_of_progress():
        return progress.stat().st_mtime_ns if progress.exists() else None

    for _ in range(3):
        before, process = time_of_progress(), start(*flags)
        while process.poll() is None and time_of_progress() in (before, None):
            time.sleep(0.01)  # a run that is killed before its first shard comes no further
        time.sleep(rng.random() / 10)
        process.kill()
        killed += process.wait() == -9
    assert killed and start(*flags).wait(120) == 0
    flags[3] = tmp_path / "whole"
    assert start(*flags).wait(120) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole") and not progress.exists()


class Killed(BaseException):
    pass


def write_long_text(path, texts):
    path.write_bytes("\n".join(text[:2000] for text in texts if text).encode())


PLACES = [(".jsonl", False), (".parquet", False), (".parquet", True), (".txt", False)]


@pytest.mark.parametrize("kind, remote", PLACES)
def test_stopped_at_every_write(ranks_file, tmp_path, capsys, monkeypatch, kind, remote):
    """A run that dies at its n-th write, for every n, goes on to the same files; it reads nothing before the place."""
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)
    if kind == ".txt":  # which is read in parts
        monkeypatch.setattr(source_text, "LONGEST", 3000)
        monkeypatch.setattr(source_files, "PART", 300)
    write = {".jsonl": write_lines, ".parquet": write_rows, ".txt": write_long_text}[kind]
    write(tmp_path / f"a{kind}", make_texts(40, lone=False))
    monkeypatch.setattr(locks.time, "sleep", lambda _: None)  # between two looks at a remote lock
    writes, new_file, manifest, outputs = (
        0,
        data.output.new_file,
        data.output.write_file,
        {},
    )
    dies_at = None

    def count():
        nonlocal writes
        writes += 1
        if writes == dies_at:
            raise Killed

    monkeypatch.setattr(data.output, "new_file", lambda path: (count(), new_file(path))[1])
    monkeypatch.setattr(
        data.output, "write_file", lambda path, content: (count(), manifest(path, content))
    )
    base = f"memory://{kind[1:]}" if remote else str(tmp_path)

    def tokenize(output):
        nonlocal writes
        writes = 0
        return run(
            tokenize_shards,
            capsys,
            monkeypatch,
            *flags_of(tmp_path / f"a{kind}", output, ranks_file, "--val_fraction", 0.3),
        )

    assert tokenize(f"{base}/whole")[0] == 0
    n = writes
    assert n > 10

    def written(output):
        fs, root = fsspec.core.url_to_fs(output)
        return {path.removeprefix(root): fs.cat_file(path) for path in fs.find(root)}

    for i in range(1, n + 1):
        dies_at = i
        with pytest.raises(Killed):
            tokenize(f"{base}/{i}")
        dies_at = None
        assert tokenize(f"{base}/{i}")[0] == 0
        assert writes <= n - i + 6  # what came before the last progress is not written again
        outputs[i] = written(f"{base}/{i}")
        assert outputs[i] == written(f"{base}/whole")
    assert tokenize(f"{base}/1")[1].endswith("nothing to do\n")


def test_an_interrupted_run_of_other_settings(ranks_file, tmp_path, capsys, monkeypatch):
    """Refused, as is one that lost a shard."""
    write_lines(tmp_path / "a.jsonl", make_texts(40))
    flags = flags_of(tmp_path / "a.jsonl", tmp_path / "out", ranks_file)

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(data.output.Output, "finish", die)
        run(tokenize_shards, capsys, monkeypatch, *flags)
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags, "--val_fraction", 0.2)
    assert (status, out, err.count("\n")) == (2, "", 1) and "val_fraction" in err, err
    (tmp_path / "out/train/000000.npy").unlink()
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and "000000.npy" in err, err


# --- Interrupted ------------------------------------------------------------------------------------------------


def in_session(session):
    """Numbers of the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session, *_ = stat.read_text().rpartition(")")[2].split()
            found += [stat.parent.name] if its_session == str(session) and state not in "ZX" else []
    return found


def interrupt(process, number):
    """Send a signal to a process and all that it started, as a terminal does; its one line on stderr."""
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (128 + number, "", 1) and err.startswith(
        "interrupted; "
    ), err
    for _ in range(100):  # what was killed takes a moment to go
        if not in_session(process.pid):
            return err
        time.sleep(0.1)
    raise AssertionError(in_session(process.pid))


def listens(process):
    """Whether a process has begun to take SIGTERM: it is importing."""
    caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1


def cpu_seconds(process):
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    "number, seconds", [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGINT, 4)]
)
def test_training_is_interrupted(tmp_path, number, seconds):
    """While it imports, and after so many seconds of work, when it merges: one line, and nothing is written."""
    flags = [
        "--source",
        "stdlib",
        "--vocab_size",
        "30000",
        "--output",
        str(tmp_path / "x.tiktoken"),
    ]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "data" / "train_tokenizer.py"), *flags], **PIPES
    )
    while process.poll() is None and not listens(process):
        time.sleep(0.01)
    while process.poll() is None and cpu_seconds(process) < seconds:
        time.sleep(0.01)
    assert "nothing was written" in interrupt(process, number) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tokenizing_is_interrupted(ranks_file, tmp_path, capsys, monkeypatch, number):
    """Two workers encode: one line that says what stands. Until then another run of the folder is refused."""
    write_lines(tmp_path / "a.jsonl", make_texts(4000, lone=False))
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes() * 20)
    flags = flags_of(
        tmp_path / "*.jsonl", tmp_path / "out", ranks_file, "--workers", 2, "--shard_tokens", 99_999
    )
    process = subprocess.Popen(
        [sys.executable, tokenize_shards.__file__, *map(str, flags)], **PIPES
    )
    while process.poll() is None and not (tmp_path / "out" / "progress.npz").exists():
        time.sleep(0.01)
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and f"process {process.pid} on" in err, err
    err = interrupt(process, number)
    assert (
        "documents; rerun the same command to resume" in err
        and not (tmp_path / "out" / "lock").exists()
    )


# --- Damage -----------------------------------------------------------------------------------------------------


def damage(path):
    """Cut a compressed file short, or overwrite a row group in the middle of a parquet file."""
    sound = path.read_bytes()
    if path.suffix == ".parquet":
        column = pq.ParquetFile(path).metadata.row_group(2).column(1)
        start = column.dictionary_page_offset or column.data_page_offset
        path.write_bytes(
            sound[:start]
            + b"\xff" * column.total_compressed_size
            + sound[start:][column.total_compressed_size :]
        )
    else:
        path.write_bytes(sound[: len(sound) * 2 // 3])
    return sound


@pytest.fixture(params=[".jsonl.gz", ".jsonl.zst", ".parquet"])
def three(request, tmp_path, ranks_file, capsys, monkeypatch):
    """(three files of 40 records, of which the second is damaged, what it was before, function that tokenizes them)."""
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)
    (tmp_path / "in").mkdir()
    paths = [tmp_path / "in" / f"{i}{request.param}" for i in range(3)]
    for path in paths:
        texts = [f"{path.name} {t}" for t in make_texts(40, lone=False)]
        (write_rows if request.param == ".parquet" else write_lines)(path, texts)
    flags = flags_of(tmp_path / "in", None, ranks_file)

    def tokenize(output, *more):
        flags[3] = tmp_path / output
        return run(tokenize_shards, capsys, monkeypatch, *flags, *more)

    return paths, damage(paths[1]), tokenize


def test_a_damaged_file_is_replaced(three, tmp_path):
    """The same command goes on from what is sound, to the bytes of a run that met no damage."""
    paths, sound, tokenize = three
    name = f"{paths[1].name} cannot be read"
    for _ in range(2):
        status, out, err = tokenize("out")
        assert (
            (status, out, err.count("\n")) == (2, "", 1)
            and name in err
            and "rerun the same command to resume" in err
        ), err
    shard = tmp_path / "out/train/000000.npy"
    written, first = shard.stat().st_mtime_ns, paths[0].read_bytes()
    paths[1].write_bytes(sound)
    (write_rows if paths[0].suffix == ".parquet" else write_lines)(
        paths[0], make_texts(40, lone=False)[::-1]
    )
    status, out, err = tokenize("out")
    assert (status, out, err.count("\n")) == (2, "", 1) and f"{paths[0]} has changed" in err, err
    paths[0].write_bytes(first)  # as it was, but written anew
    assert tokenize("out")[::2] == (0, "") and shard.stat().st_mtime_ns == written
    assert tokenize("whole")[0] == 0 and content(tmp_path / "out") == content(tmp_path / "whole")


def test_damage_is_skipped_and_counted(three, tmp_path, monkeypatch):
    """Also by a run that is stopped at its n-th write and started again, for every n, and by worker processes."""
    paths, sound, tokenize = three
    writes, new_file = [], data.output.new_file
    if paths[0].suffix != ".parquet":
        for line in (b'{"body": ', b'{"id": 3}', b'{"body": 3}', b"[]"):
            paths[2].write_bytes(paths[2].read_bytes() + COMPRESS[paths[2].suffix](line + b"\n"))
    lost = (
        {"damaged_files": 0, "damaged_records": 7}
        if paths[0].suffix == ".parquet"
        else {"damaged_files": 1, "damaged_records": 4}
    )

    def dying(path):
        writes.append(path)
        if len(writes) == dies_at:
            raise Killed
        return new_file(path)

    monkeypatch.setattr(data.output, "new_file", dying)
    dies_at = None
    status, out, err = tokenize("whole", "--skip_damaged")
    files = "0 damaged files" if paths[0].suffix == ".parquet" else "1 damaged file"
    words = f"{files} and {lost['damaged_records']} damaged"
    assert status == 0 and f"{paths[1]} cannot be read" in err and words in err, err
    manifests = [
        json.loads((tmp_path / f"whole/{s}/manifest.json").read_text()) for s in ("train", "val")
    ]
    assert {key: sum(m[key] for m in manifests) for key in lost} == lost
    documents = sum(m["documents"] + m["empty_documents"] for m in manifests)
    assert documents == 113 if paths[0].suffix == ".parquet" else 80 <= documents < 120
    for dies_at in range(1, len(writes), 4):
        writes.clear()
        with pytest.raises(Killed):
            tokenize(str(dies_at), "--skip_damaged")
        at, dies_at = dies_at, None
        assert tokenize(str(at), "--skip_damaged")[0] == 0
        assert content(tmp_path / str(at)) == content(tmp_path / "whole")


@pytest.mark.parametrize("three", [".jsonl.gz"], indirect=True)
def test_damage_is_skipped_by_workers(three, tmp_path):
    paths, _, tokenize = three
    for workers in (1, 2):
        assert tokenize(str(workers), "--skip_damaged", "--workers", workers)[0] == 0
    assert content(tmp_path / "1") == content(tmp_path / "2")


# --- Buckets ----------------------------------------------------------------------------------------------------


def test_a_bucket_that_fails(ranks_file, tmp_path, bucket):
    """Every third request fails, the first run is killed: the bucket holds the bytes of a local run."""
    address, fs, proxy = bucket
    write_lines(tmp_path / "a.jsonl", make_texts(400))
    more = ["--shard_tokens", 30_000, "--val_fraction", 0]
    flags = flags_of(tmp_path / "a.jsonl", tmp_path / "local", ranks_file, *more)
    assert start(*flags).wait(100) == 0
    flags[3] = address
    first, folder = start(*flags), address.split("://")[1]
    while first.poll() is None and not fs.exists(f"{folder}/progress.npz"):
        time.sleep(0.05)
        fs.invalidate_cache()
    first.kill()
    assert first.wait() == -9
    assert start(*flags).wait(100) == 0 and proxy.failed > 5
    fs.invalidate_cache()
    there = {path.removeprefix(f"{folder}/"): fs.cat_file(path) for path in fs.find(folder)}
    assert there == content(tmp_path / "local")


# --- Ray --------------------------------------------------------------------------------------------------------


def ray_workers():
    """Process ids of the Ray workers that descend from this process."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            names[int(stat.parent.name)] = (stat.parent / "cmdline").read_text()
        except OSError:  # it has ended
            pass
    found = []
    for pid in [p for p, name in names.items() if name.startswith("ray::Encoder")]:
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        found += [pid] if ancestor else []
    return found


def test_ray_with_a_worker_killed(ranks_file, tmp_path, capsys, monkeypatch):
    """The bytes of a single process, although a worker is lost on the way."""
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 20)
    write_lines(tmp_path / "a.jsonl", make_texts(4000))
    flags = flags_of(tmp_path / "a.jsonl", tmp_path / "one", ranks_file)
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    flags[3], killed, done = tmp_path / "ray", [], threading.Event()

    def kill():
        while not done.is_set() and not killed:
            if (tmp_path / "ray" / "progress.npz").exists() and (workers := ray_workers()):
                os.kill(workers[0], 9)
                killed.append(workers[0])
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert run(tokenize_shards, capsys, monkeypatch, *flags, "--ray", "--workers", 2)[0] == 0
    finally:
        done.set()
        killer.join()
    assert killed and content(tmp_path / "one") == content(tmp_path / "ray")


def test_ray_is_missing(ranks_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_lines(tmp_path / "a.jsonl", make_texts(20))
    flags = flags_of(tmp_path / "a.jsonl", tmp_path / "out", ranks_file, "--ray")
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and "pip install ray" in err
