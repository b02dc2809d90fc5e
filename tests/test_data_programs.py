"""The programs in data/: shards against a plain loop, on documents that try to break them."""

import base64
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from conftest import ROOT

import data.encoding
import data.output
import data.workers
from data import tokenization, tokenize_shards, train_tokenizer
from data.sources.files import list_documents
from data.sources.text import read_text
from runtime import files, locks, messages

HOSTILE = {
    "specials.txt": b"<|endoftext|><|endoftext|> <|fim_prefix|>x<|im_start|>",
    "empty.txt": b"",
    "nested/deeper/empty": b"",
    "invalid.bin": b"\xff\xfe latin \xe9t\xe9, half a character: \xf0\x9f\x98",
    "emoji.md": "👩‍👩‍👧‍👦 naïve 한국어 العربية 𝔘𝔫𝔦 é\u200b\ufeff".encode(),
    "replacement character.txt": "legal: \ufffd".encode(),
    "nul.txt": b"\0a\0\0b\0",
    "nested/line ends.txt": b"a\r\nb\rc\n\n\n  d\t \n   ",
    "bom.txt": b"\xef\xbb\xbfwith a mark",
    "utf-16.txt": "\ufeffnaïve text of Windows".encode("utf-16-le"),
    "big-endian.txt": "\ufeffand of others".encode("utf-16-be"),
    "latin-1.txt": "déjà vu".encode("latin-1"),
    "blank": b" \n\t \n",
    "nested/naïve.txt": b"don't WE'LL 12345 ...!!??\n",
}
HIDDEN = {
    ".hidden.txt": b"not a document",
    ".git/config": b"nor this",
    "nested/.cache/x.txt": b"nor that",
}


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def run(program, capsys, monkeypatch, *flags):
    """Run a program's main as its command line would; (exit status, stdout, stderr)."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, flags)])
    try:
        messages.one_sentence(program.main)
        status = 0
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of 40 documents, some of them hostile."""
    folder = tmp_path_factory.mktemp("source")
    words = "def return the quick brown fox self. jumps over\n    lazy dogs, 1234 == '' {} ü".split(
        " "
    )
    rng = random.Random(0)
    plain = {
        f"p/{i:02d}.txt": " ".join(rng.choices(words, k=200)).encode()
        for i in range(40 - len(HOSTILE))
    }
    write_files(folder, plain | HOSTILE | HIDDEN)
    return folder


@pytest.fixture(scope="module")
def ranks_file(source, tmp_path_factory):
    """A small tokenizer trained on the training part of `source`."""
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    texts, _ = train_tokenizer.sample(list_documents(str(source)))
    trained = train_tokenizer.train(texts, 299)
    path.write_bytes(tokenization.dump_ranks(train_tokenizer.to_ranks(trained)))
    return path


def validates(text, val_fraction):
    """Whether a document of this text is for validation."""
    text_hash = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return int(text_hash, 16) < val_fraction * 2**64


def reference(source, encoding, val_fraction):
    """What the shards must hold, by the plainest loop: {split: (token ids, documents, bytes, empty, replaced)}."""
    names = [p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()]
    names = sorted(n for n in names if not any(part.startswith(".") for part in n.split("/")))
    result = {}
    for split in ("train", "val"):
        ids, counts = [], [0, 0, 0, 0]
        for name in names:
            content = (source / name).read_bytes()
            wide = {"utf-16.txt": "utf-16", "big-endian.txt": "utf-16"}
            text = content.decode(wide.get(name, "utf-8-sig"), errors="replace")
            if validates(text, val_fraction) != (split == "val"):
                continue
            if text:
                ids += [encoding.eot_token, *encoding.encode_ordinary(text)]
            valid = name not in ("invalid.bin", "latin-1.txt")
            for i, more in enumerate((text != "", len(text.encode()), text == "", not valid)):
                counts[i] += more
        result[split] = ids, counts
    return result


def check_shards(output, expected, encoding, dtype, shard_tokens):
    """The shards and the manifests in `output` are what `reference` says."""
    for split, (ids, counts) in expected.items():
        manifest = json.loads((output / split / "manifest.json").read_text())
        files = sorted((output / split).glob("*.npy"))
        assert [s["name"] for s in manifest["shards"]] == [f.name for f in files]
        assert [f.name for f in files] == [f"{i:06d}.npy" for i in range(len(files))]
        shards = [np.load(f) for f in files]
        assert all(s.dtype == dtype and s.ndim == 1 for s in shards)
        assert (
            all(len(s) == shard_tokens for s in shards[:-1]) and 0 < len(shards[-1]) <= shard_tokens
        )
        np.testing.assert_array_equal(np.concatenate(shards), ids)
        assert [s["tokens"] for s in manifest["shards"]] == [len(s) for s in shards]
        assert [s["sha256"] for s in manifest["shards"]] == [
            hashlib.sha256(f.read_bytes()).hexdigest() for f in files
        ]
        keys = ("documents", "bytes", "empty_documents", "replaced_documents")
        assert [manifest[k] for k in keys] == counts and manifest["tokens"] == len(ids)
        assert (manifest["dtype"], manifest["vocab_size"]) == (dtype, encoding.n_vocab)
        assert not list((output / split).glob("*.part"))


def content(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


# --- Shards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_tokens, val_fraction", [(97, 0.1), (10**8, 0.5)])
def test_shards_equal_a_plain_loop(
    source, ranks_file, tmp_path, capsys, monkeypatch, shard_tokens, val_fraction
):
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)
    flags = [
        "--source",
        source,
        "--output",
        tmp_path / "out",
        "--tokenizer",
        ranks_file,
        "--workers",
        1,
    ]
    flags += ["--shard_tokens", shard_tokens, "--val_fraction", val_fraction]
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, out.count("\n")) == (0, 1)
    encoding = tokenization.load_tokenizer(str(ranks_file))
    expected = reference(source, encoding, val_fraction)
    check_shards(tmp_path / "out", expected, encoding, "uint16", shard_tokens)
    empty, replaced = (sum(counts[i] for _, counts in expected.values()) for i in (2, 3))
    assert (empty, replaced) == (2, 2)
    assert "latin-1.txt is not UTF-8: 2 characters became U+FFFD (perhaps it is latin-1" in err
    assert (
        "invalid.bin is not UTF-8: 5 characters" in err
        and "7 characters of 2 documents became U+FFFD" in err
    )
    assert (
        "utf-16.txt is UTF-16" in err
        and "big-endian.txt is UTF-16" in err
        and "nul.txt is full of NUL" in err
    )
    assert all(line.startswith("warning: ") for line in err.splitlines()) and err.count("\n") == 6
    manifest = json.loads((tmp_path / "out/train/manifest.json").read_text())
    assert manifest["tokenizer"] == "tokenizer.tiktoken"
    assert (tmp_path / "out/tokenizer.tiktoken").read_bytes() == ranks_file.read_bytes()
    assert manifest["tokenizer_sha256"] == hashlib.sha256(ranks_file.read_bytes()).hexdigest()
    assert (manifest["shard_tokens"], manifest["val_fraction"]) == (shard_tokens, val_fraction)


def test_workers_do_not_change_a_byte(source, ranks_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        data.workers, "BATCH_DOCUMENTS", 1
    )  # 40 batches: more than are in flight at once
    for workers in (1, 2):
        flags = ["--source", source, "--output", tmp_path / str(workers), "--tokenizer", ranks_file]
        assert (
            run(
                tokenize_shards,
                capsys,
                monkeypatch,
                *flags,
                "--shard_tokens",
                1000,
                "--workers",
                workers,
            )[0]
            == 0
        )
    assert content(tmp_path / "1") == content(tmp_path / "2")


@pytest.mark.parametrize("name, dtype", [("gpt2", "uint16"), ("cl100k_base", "uint32")])
def test_tiktoken_by_name(source, tmp_path, capsys, monkeypatch, named_tokenizers, name, dtype):
    flags = ["--source", source, "--output", tmp_path / "out", "--tokenizer", name, "--workers", 1]
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    encoding = tokenization.load_tokenizer(name)
    check_shards(tmp_path / "out", reference(source, encoding, 0.1), encoding, dtype, 10**8)
    manifest = json.loads((tmp_path / "out/train/manifest.json").read_text())
    assert manifest["tokenizer"] == name and not (tmp_path / "out/tokenizer.tiktoken").exists()
    ranks = sorted((rank, token) for token, rank in encoding._mergeable_ranks.items())
    # the hash is that of tiktoken's own file of ranks
    file = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in ranks)
    assert manifest["tokenizer_sha256"] == hashlib.sha256(file.encode()).hexdigest()


def test_a_run_of_spaces_beyond_what_tiktoken_takes(ranks_file):
    """Text comes back whole, where `encode_ordinary` itself panics, and is the same where it does not."""
    encoding = tokenization.load_tokenizer(str(ranks_file))
    for text in ("def f():" + " " * 1_200_000 + "return 1", "def f():" + " " * 1000 + "return 1"):
        assert encoding.decode(data.encoding.encode_text(text, encoding)) == text
    assert data.encoding.encode_text(text, encoding).tolist() == encoding.encode_ordinary(text)


# --- Running again ----------------------------------------------------------------------------------------------


def test_running_again(source, ranks_file, tmp_path, capsys, monkeypatch):
    """Finished shards are left alone; those of other settings, of text that changed or that are damaged are refused."""
    source = shutil.copytree(source, tmp_path / "source")
    output, other = tmp_path / "out", tmp_path / "other"
    flags = [
        "--source",
        source,
        "--output",
        output,
        "--tokenizer",
        ranks_file,
        "--workers",
        1,
        "--shard_tokens",
        1000,
    ]
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    files = content(output)
    times = {p: p.stat().st_mtime_ns for p in output.rglob("*")}

    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, err) == (0, "") and "nothing to do" in out
    shutil.copytree(source, other)
    (other / "one more.txt").write_text("text")
    fewer = tmp_path / "fewer.tiktoken"
    fewer.write_bytes(b"".join(ranks_file.read_bytes().splitlines(keepends=True)[:-1]))
    changes = {"shard_tokens": 999, "val_fraction": 0.2, "tokenizer": fewer, "source": other}
    for flag, value in changes.items():
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags, f"--{flag}", value)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert str(output) in err and flag in err
    assert {p: p.stat().st_mtime_ns for p in output.rglob("*")} == times

    text = (source / "bom.txt").read_bytes()
    os.utime(source / "latin-1.txt")  # the same content, written again
    (source / "bom.txt").write_bytes(text.replace(b"mark", b"bark"))
    status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and "bom.txt has changed" in err, err
    (source / "bom.txt").write_bytes(text)
    for again in (2, 0):
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
        assert (status, err) == (0, "") and "nothing to do" in out
        assert (f"{again} files written again with the same content" in out) == (again > 0)
    files["source.npz"] = content(output)["source.npz"]

    assert content(output) == files

    # what is no longer whole is refused and stays
    for name, others in {
        "val/manifest.json": None,
        "train/000001.npy": None,
        "train/000000.npy": b"torn",
    }.items():
        sound = (output / name).read_bytes()
        (output / name).unlink() if others is None else (output / name).write_bytes(others)
        left = content(output)
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
        assert (status, out, err.count("\n")) == (2, "", 1) and str(output / name) in err, err
        assert content(output) == left
        (output / name).write_bytes(sound)
    assert "nothing to do" in run(tokenize_shards, capsys, monkeypatch, *flags)[1]


# --- What others made -------------------------------------------------------------------------------------------


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(n):
    file = io.BytesIO()
    np.save(file, np.arange(n, dtype=np.uint16))
    return file.getvalue()


SOME_STATE = np.frombuffer(b'{"settings": 1}', np.uint8)
OF_OTHERS = {  # files that a run would replace, or that readers would take for its own
    "train/000000.npy": npy(10),
    "train/000003.npy": npy(10),
    "val/000000.npy": b"",
    "train/weights.npy": b"mine",
    "val/embedding.npy": npy(3),
    "train/manifest.json": b'{"name": "an app"}',
    "val/manifest.json": b"",
    "progress.npz": npz(x=np.zeros(3)),
    "progress.npz ": npz(state=SOME_STATE),
    "progress.npz  ": b"notes",
    "source.npz": npz(x=np.zeros(3)),
    "source.npz ": b"",
    "tokenizer.tiktoken": b"YQ== 0\n",
    "lock": b"notes",
}
HARMLESS = {
    "train/keep.txt": b"a",
    "train/000000.npy.part": b"b",
    "val/manifest.json.part": b"c",
    "progress.npz.part": b"d",
    "train/deeper/000000.npy": b"e",
    "notes.md": b"f",
}


def in_storage(address):
    """{path: content} of all files at a local path or an address."""
    fs, root = fsspec.core.url_to_fs(str(address))
    return {path.removeprefix(root): fs.cat_file(path) for path in fs.find(root)}


@pytest.fixture(params=["local", "remote"])
def output(request, tmp_path, monkeypatch):
    """A local folder and an address to write shards to."""
    monkeypatch.setattr(locks.time, "sleep", lambda _: None)  # between two looks at a remote lock
    yield str(tmp_path / "out") if request.param == "local" else "memory://others/out"
    fs = fsspec.filesystem("memory")
    if fs.exists("/others"):
        fs.rm("/others", recursive=True)


def tokenize_flags(source, output, ranks_file):
    flags = ["--source", source, "--output", output, "--tokenizer", ranks_file]
    return [*flags, "--workers", 1, "--shard_tokens", 1000]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_others_made_is_refused_and_stays(
    source, ranks_file, output, capsys, monkeypatch, name
):
    files.write_file(f"{output}/{name.strip()}", OF_OTHERS[name])
    before = in_storage(output)
    for fraction in (0.1, 0):  # without validation, val/ is nothing that a run may replace either
        flags = [*tokenize_flags(source, output, ranks_file), "--val_fraction", fraction]
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert name.strip() in err and output in err and in_storage(output) == before


def test_what_is_not_in_the_way_stays(source, ranks_file, output, capsys, monkeypatch):
    for name, held in HARMLESS.items():
        files.write_file(f"{output}/{name}", held)
    flags = tokenize_flags(source, output, ranks_file)
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    held = in_storage(output)
    assert all(held[f"/{name}"] == content for name, content in HARMLESS.items())
    assert "/progress.npz" not in held


class Killed(BaseException):
    pass


def test_what_others_put_between_two_runs_stays(source, ranks_file, output, capsys, monkeypatch):
    """A run dies at its n-th write, for every n; then a file that it did not make has the name of one of its own, or of
    any further one. Without that file the run goes on to what it would have written."""
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)
    writes, dies_at, new_file, write = 0, None, data.output.new_file, data.output.write_file

    def count(path):
        nonlocal writes
        writes += 1
        if writes == dies_at:
            raise Killed

    monkeypatch.setattr(data.output, "new_file", lambda path: (count(path), new_file(path))[1])
    monkeypatch.setattr(data.output, "write_file", lambda *args: (count(args[0]), write(*args))[1])

    def tokenize(at):
        nonlocal writes
        writes = 0
        return run(tokenize_shards, capsys, monkeypatch, *tokenize_flags(source, at, ranks_file))

    assert tokenize(f"{output}/whole")[0] == 0
    n, whole = writes, in_storage(f"{output}/whole")
    shards = [name for name in whole if name.endswith(".npy")]
    assert n > 10 and len(shards) > 4
    for dies_at in range(2, n + 1):
        at = f"{output}/{dies_at}"
        with pytest.raises(Killed):
            tokenize(at)
        dies_at = None
        for name in ["/train/000099.npy", *shards]:
            if name in in_storage(at):
                continue
            files.write_file(f"{at}{name}", npy(9))
            status, out, err = tokenize(at)
            assert (status, out, err.count("error: ")) == (2, "", 1) and name in err, err
            assert in_storage(at)[name] == npy(9)
            fs, path = fsspec.core.url_to_fs(f"{at}{name}")
            fs.rm_file(path)
        assert tokenize(at)[0] == 0
        assert in_storage(at) == whole


def test_shards_that_are_made_anew_are_removed_by_their_content(
    source, ranks_file, output, tmp_path, capsys, monkeypatch
):
    """Where there are too few documents for validation, what was made of them goes, but nothing else of that name."""
    (tmp_path / "one.txt").write_bytes((source / "p" / "00.txt").read_bytes() * 30)
    flags = tokenize_flags(tmp_path / "one.txt", output, ranks_file)
    begin_again = data.output.Output.begin_again

    def replaced(self, validation, writers):
        files.write_file(f"{output}/train/000000.npy", npy(9))
        begin_again(self, validation, writers)

    with monkeypatch.context() as patch:
        patch.setattr(data.output.Output, "begin_again", replaced)
        status, out, err = run(tokenize_shards, capsys, monkeypatch, *flags)
    assert status == 2 and "train/000000.npy is in the way" in err, err
    assert in_storage(output)["/train/000000.npy"] == npy(9)


def test_another_start_after_an_early_end(source, ranks_file, output, capsys, monkeypatch):
    """A run that wrote no shard leaves nothing that holds the next one back, whatever its settings."""

    def die(*_):
        raise Killed

    flags = tokenize_flags(source, output, ranks_file)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenize_shards, "encode", die)
        run(tokenize_shards, capsys, monkeypatch, *flags)
    assert "/progress.npz" in in_storage(output)
    flags[-1] = 999
    assert run(tokenize_shards, capsys, monkeypatch, *flags)[0] == 0
    assert "/progress.npz" not in in_storage(output)


def test_a_file_of_ranks_is_not_replaced(source, tmp_path, capsys, monkeypatch):
    """But by the same ones."""
    path = tmp_path / "ranks.tiktoken"
    flags = ["--source", source, "--vocab_size", 270, "--output", path]
    for _ in range(2):
        assert run(train_tokenizer, capsys, monkeypatch, *flags)[0] == 0
    for other in (b"notes", path.read_bytes()[:-9]):
        path.write_bytes(other)
        status, out, err = run(train_tokenizer, capsys, monkeypatch, *flags)
        assert (status, out, err.count("\n")) == (2, "", 1) and f"--output {path}: is there" in err
        assert path.read_bytes() == other


def test_ranks_are_written_to_a_fifo(source, tmp_path, capsys, monkeypatch):
    path = tmp_path / "ranks.tiktoken"
    os.mkfifo(path)
    with ThreadPoolExecutor() as pool:
        content = pool.submit(path.read_bytes)
        flags = ["--source", source, "--vocab_size", 270, "--output", path]
        assert run(train_tokenizer, capsys, monkeypatch, *flags)[0] == 0
    assert content.result().count(b"\n") == 269 and path.is_fifo()


# --- The tokenizer ----------------------------------------------------------------------------------------------


def test_training(source, tmp_path, capsys, monkeypatch):
    """The same file on each run, as large as asked, from the training part alone."""
    written = []
    held_out = [d for d in list_documents(str(source)) if validates(read_text(d).text, 0.1)]
    assert held_out
    for i in range(3):
        copy, path = tmp_path / f"source{i}", tmp_path / f"ranks{i}.tiktoken"
        shutil.copytree(source, copy)
        if i == 2:
            for k, document in enumerate(held_out):
                others = (f"zyzzyva {k} {n} " * 30 for n in range(10**6))
                text = next(text for text in others if validates(text, 0.1))
                (copy / document.name).write_text(text)
        flags = ["--source", copy, "--vocab_size", 300, "--output", path]
        status, out, err = run(train_tokenizer, capsys, monkeypatch, *flags)
        assert (status, err, out.count("\n")) == (0, "", 1) and "held-out" in out
        written.append(path.read_bytes())
    assert written[0] == written[1] == written[2]
    lines = [line.split() for line in written[0].splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(299)) and written[0].endswith(b"\n")
    assert {bytes([b]) for b in range(256)} <= {base64.b64decode(token) for token, _ in lines}
    encoding = tokenization.load_tokenizer(str(path))
    assert (encoding.n_vocab, encoding.eot_token) == (300, 299)


def test_tiktoken_encodes_as_the_training_library(source, tmp_path, monkeypatch):
    """On the documents it was trained on, on others, and on hostile ones."""
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 300_000)
    train, val = train_tokenizer.sample(list_documents("stdlib"))
    trained = train_tokenizer.train(train, 1000)
    path = tmp_path / "check.tiktoken"
    path.write_bytes(tokenization.dump_ranks(train_tokenizer.to_ranks(trained)))
    encoding = tokenization.load_tokenizer(str(path))
    texts = train + val + [read_text(d)[0] for d in list_documents(str(source))]
    for text in texts:
        assert trained.encode(text).ids == encoding.encode_ordinary(text)


def test_training_survives_a_long_word():
    assert (
        len(
            train_tokenizer.to_ranks(
                train_tokenizer.train([" " * 10**6 + "x" * 10**6, "some words"], 270)
            )
        )
        == 270
    )


def test_training_again_into_the_same_file(tmp_path):
    """The ranks are those in the file now, not those of an earlier file of that name (tiktoken caches by name)."""
    path = tmp_path / "again.tiktoken"
    for vocab_size in (260, 265):
        trained = train_tokenizer.train(["the quick brown fox jumps over the lazy dog"], vocab_size)
        path.write_bytes(tokenization.dump_ranks(train_tokenizer.to_ranks(trained)))
        assert tokenization.load_tokenizer(str(path)).n_vocab == vocab_size + 1


# --- Documents --------------------------------------------------------------------------------------------------


def test_the_standard_library():
    documents = list_documents("stdlib")
    names = [d.name for d in documents]
    assert names == sorted(set(names)) and {"os.py", "json/decoder.py"} <= set(names)
    assert all(n.endswith(".py") and "site-packages" not in n for n in names)
    assert sum(d.size for d in documents) > 10**7


# --- Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag, value",
    [
        ("source", "/no/such/folder"),
        ("source", "empty"),
        ("tokenizer", "gpt99"),
        ("tokenizer", "missing.tiktoken"),
        ("val_fraction", "1"),
        ("val_fraction", "-0.1"),
        ("val_fraction", "nan"),
        ("val_fraction", "half"),
        ("shard_tokens", "0"),
        ("shard_tokens", "10000000000000000"),
        ("workers", "0"),
        ("output", "source/shards"),
        ("output", "a file"),
        ("no_such_flag", ""),
    ],
)
def test_bad_flags(ranks_file, tmp_path, capsys, monkeypatch, flag, value):
    monkeypatch.chdir(tmp_path)
    write_files(
        tmp_path,
        {"source/a.txt": b"text", "source/b.txt": b"text", "empty/a.txt": b"", "a file": b""},
    )
    flags = {"source": "source", "output": "out", "tokenizer": str(ranks_file), "workers": "1"} | {
        flag: value
    }
    status, out, err = run(
        tokenize_shards, capsys, monkeypatch, *(f"--{k}={v}" for k, v in flags.items())
    )
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert (
        err.startswith("error: ")
        and f"--{flag}" in err
        and value.replace("00", "") in err.replace("00", "")
    )


@pytest.mark.parametrize(
    "flag, value",
    [
        ("source", "/no/such/folder"),
        ("vocab_size", "256"),
        ("vocab_size", "100000"),
        ("output", "ranks.txt"),
        ("output", "a file/x.tiktoken"),
    ],
)
def test_bad_flags_of_training(tmp_path, capsys, monkeypatch, flag, value):
    monkeypatch.chdir(tmp_path)
    write_files(
        tmp_path, {"source/a.txt": b"some text", "source/b.txt": b"some text", "a file": b""}
    )
    flags = {"source": "source", "output": "out.tiktoken", "vocab_size": "258"} | {flag: value}
    status, out, err = run(
        train_tokenizer, capsys, monkeypatch, *(f"--{k}={v}" for k, v in flags.items())
    )
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and f"--{flag}" in err and value in err
    assert not os.path.exists("out.tiktoken")


def test_a_source_without_text(tmp_path, capsys, monkeypatch):
    """Both programs say what is there, and what would do."""
    files = {
        "hidden/.a.txt": b"text",
        "blank/a.txt": b"",
        "records/a.jsonl": b"",
        "nulls/a.jsonl": b'{"text": null}\n' * 9,
    }
    write_files(tmp_path, files)
    ranks = tmp_path / "x.tiktoken"
    ranks.write_bytes(tokenization.dump_ranks({bytes([i]): i for i in range(256)}))
    for folder, word in {
        "hidden": "has no file",
        "blank": "has 1 file without a character",
        "records": "0 documents",
        "nulls": "documents",
    }.items():
        for program, more in (
            (tokenize_shards, ["--tokenizer", ranks, "--output", tmp_path / "out", "--workers", 1]),
            (train_tokenizer, ["--output", tmp_path / "y.tiktoken"]),
        ):
            status, out, err = run(
                program, capsys, monkeypatch, "--source", tmp_path / folder, *more
            )
            assert (status, out, err.count("\n")) == (2, "", 1) and "give a" in err, err
            assert f"--source {tmp_path / folder}: there is no text" in err and word in err, err


def test_from_the_command_line(tmp_path):
    """Both programs from another folder, in a process of their own, on every core; then with a mistake."""
    write_files(
        tmp_path, {f"text/{i}.txt": b"%d words of text, more words " % i * 50 for i in range(20)}
    )
    python = [sys.executable, str(ROOT / "data" / "train_tokenizer.py")]
    flags = ["--source", "text", "--vocab_size", "270", "--output", "made/x.tiktoken"]
    subprocess.run(python + flags, cwd=tmp_path, check=True, timeout=120)
    python = [sys.executable, str(ROOT / "data" / "tokenize_shards.py")]
    flags = ["--source", "text", "--output", "out", "--tokenizer", "made/x.tiktoken"]
    subprocess.run(python + flags, cwd=tmp_path, check=True, timeout=120)
    encoding = tokenization.load_tokenizer(str(tmp_path / "made/x.tiktoken"))
    check_shards(
        tmp_path / "out", reference(tmp_path / "text", encoding, 0.1), encoding, "uint16", 10**8
    )
    flags[1] = "txt"
    wrong = subprocess.run(
        python + flags, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "--source txt" in wrong.stderr and "Traceback" not in wrong.stderr
