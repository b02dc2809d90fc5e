"""Sources however they are: one file, few documents, duplicates, documents too long, files of all kinds."""

import gzip
import json
import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_programs import content, run, write_files
from test_data_scale import COMPRESS, Killed, write_lines, write_rows
from test_data_scale import ranks_file as ranks_file  # a fixture

import data.output
import data.workers
from data import splits, tokenization, tokenize_shards, train_tokenizer
from data.sources import files
from data.sources import text as source_text

RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@pytest.fixture
def tokenize(ranks_file, tmp_path, capsys, monkeypatch):
    """A function that runs data/tokenize_shards.py on a source in tmp_path; it returns as test_data_programs.run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 3)

    def tokenize(source, output="out", *more):
        flags = ["--output", output, "--tokenizer", ranks_file, "--text_column", "body"]
        flags += ["--shard_tokens", 500, "--workers", 1, *more]
        return run(tokenize_shards, capsys, monkeypatch, f"--source={source}", *flags)

    return tokenize


def texts_in(output, ranks_file):
    """{split: the texts of its documents, in order}."""
    encoding, texts = tokenization.load_tokenizer(str(ranks_file)), {}
    for split in ("train", "val"):
        shards = [np.load(path) for path in sorted((output / split).glob("*.npy"))]
        ids = np.concatenate([np.empty(0, np.uint16), *shards])
        starts = np.flatnonzero(ids == encoding.eot_token)
        texts[split] = [encoding.decode(part[1:]) for part in np.split(ids, starts)[1:]]
    return texts


def manifests(output):
    return [json.loads((output / split / "manifest.json").read_text()) for split in splits.SPLITS]


def write(path, texts):
    """A file of records, or a folder of text files."""
    if path.suffix == ".parquet":
        write_rows(path, texts)
    elif path.suffix:
        write_lines(path, texts)
    else:
        write_files(path, {f"{i:03d}.txt": text.encode() for i, text in enumerate(texts)})


def some_texts(n):
    rng = random.Random(3)
    return [" ".join(rng.choices("the quick brown fox jumps".split(), k=50)) for _ in range(n)]


# --- A file, and few documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["doc.txt", "doc.unknown", "doc", "doc.txt.gz", "doc.md.zst"])
def test_one_text_file(tokenize, ranks_file, tmp_path, capsys, monkeypatch, name):
    """Its end validates, however the file is named; the tokenizer learns from its beginning alone."""
    text = "".join(f"line {i} of the only document\n" for i in range(300))
    compress = COMPRESS.get("." + name.rpartition(".")[2], bytes)
    write_files(tmp_path, {f"in/{name}": compress(text.encode())})
    monkeypatch.setenv("HOME", str(tmp_path))
    learned = []
    train = train_tokenizer.train
    monkeypatch.setattr(
        train_tokenizer, "train", lambda *args: learned.append(args[0]) or train(*args)
    )
    for source in (f"in/{name}", f"~/in/{name}", tmp_path / "in" / name, "in", "in/d*"):
        shutil.rmtree("out", ignore_errors=True)
        status, out, err = tokenize(source)
        assert (status, err, out.count("\n")) == (0, "", 2) and "val is the last 10% of each" in out
        (begin,), (end,) = texts_in(tmp_path / "out", ranks_file).values()
        assert begin + end == text and 0.09 * len(text) < len(end) < 0.11 * len(text)
        assert manifests(tmp_path / "out")[1]["validation"] == "the end of every document"
        assert manifests(tmp_path / "out")[1]["bytes"] == len(end)
        flags = [f"--source={source}", "--vocab_size", 270, "--output", "x.tiktoken"]
        assert run(train_tokenizer, capsys, monkeypatch, *flags)[0] == 0
        assert learned.pop() == [begin]
    status, out, _ = tokenize(source)
    assert status == 0 and out.count("\n") == 1 and "nothing to do" in out


@pytest.mark.parametrize("kind", ["", *RECORDS])
def test_few_documents(tokenize, ranks_file, tmp_path, monkeypatch, kind):
    """Val has the share of the text, and of equal documents the same end; killed at any write, the bytes are the same,
    and those of two workers."""
    texts = some_texts(3)
    write(tmp_path / f"in{kind}", [*texts, texts[0]])
    status, out, _ = tokenize(f"in{kind}", "whole")
    assert status == 0 and "1 exact duplicate among them" in out
    train, val = texts_in(tmp_path / "whole", ranks_file).values()
    assert [a + b for a, b in zip(train, val, strict=True)] == [*texts, texts[0]]
    assert all(0.05 * len(t) < len(end) < 0.15 * len(t) for t, end in zip(texts, val))
    assert [m["documents"] for m in manifests(tmp_path / "whole")] == [4, 4]

    writes, new_file, write_file = [], data.output.new_file, data.output.write_file

    def count(of):
        def counted(path, *args):
            writes.append(path)
            if len(writes) == dies_at:
                raise Killed
            return of(path, *args)

        return counted

    monkeypatch.setattr(data.output, "new_file", count(new_file))
    monkeypatch.setattr(data.output, "write_file", count(write_file))
    dies_at = None
    assert tokenize(f"in{kind}", "again", "--shard_tokens", 50)[0] == 0
    for dies_at in range(1, len(writes) + 1):
        writes.clear()
        with pytest.raises(Killed):
            tokenize(f"in{kind}", str(dies_at), "--shard_tokens", 50)
        at, dies_at = dies_at, None
        assert tokenize(f"in{kind}", str(at), "--shard_tokens", 50)[0] == 0
        assert content(tmp_path / str(at)) == content(tmp_path / "again")
    if not kind:
        assert tokenize("in", "two", "--shard_tokens", 50, "--workers", 2)[0] == 0
        assert content(tmp_path / "two") == content(tmp_path / "again")


def test_few_documents_of_a_word(tokenize, tmp_path):
    """A text of one character cannot be cut: a sentence says so. Of 0 there is no val, and nothing is cut."""
    write_files(tmp_path, {"in/a": b"x"})
    status, out, err = tokenize("in")
    assert (
        status == 2
        and err.count("\n") == 1
        and "--val_fraction 0.1: there is no text for val" in err
    )
    assert tokenize("in", "none", "--val_fraction", 0)[0] == 0
    assert not (tmp_path / "none/val/manifest.json").exists()
    assert json.loads((tmp_path / "none/train/manifest.json").read_text())["validation"] == "none"


# --- Train and val, and duplicates ------------------------------------------------------------------------------


def test_the_text_alone_decides(tokenize, ranks_file, tmp_path):
    """In any order, in files of any kind, with duplicates among them, a document is on the same side."""
    texts = some_texts(60)
    sides = None
    for i, kind in enumerate(["", *RECORDS]):
        shuffled = random.Random(i).sample(texts + texts[:20], 80)
        write(tmp_path / f"in{kind}", shuffled)
        status, out, _ = tokenize(f"in{kind}", f"out{kind}", "--val_fraction", 0.3)
        assert status == 0 and "20 exact duplicates among them (--drop_duplicates" in out
        found = texts_in(tmp_path / f"out{kind}", ranks_file)
        assert sum(m["duplicate_documents"] for m in manifests(tmp_path / f"out{kind}")) == 20
        here = {split: sorted(set(found[split])) for split in splits.SPLITS}
        sides = sides or here
        assert here == sides and not set(here["train"]) & set(here["val"])
        assert sorted(here["train"] + here["val"]) == sorted(texts)


@pytest.mark.parametrize("kind", ["", ".jsonl", ".parquet"])
def test_duplicates_are_left_out(tokenize, ranks_file, tmp_path, monkeypatch, kind):
    """The shards are those of the first of each text, also when killed at any write and resumed, and of two workers;
    empty documents are no duplicates."""
    texts = ["", *some_texts(40), ""]
    again = random.Random(0).choices(texts[1:-1], k=30)
    more = ["--val_fraction", 0.3]
    write(tmp_path / f"in{kind}", texts + again)
    write(tmp_path / f"unique{kind}", texts)
    assert tokenize(f"unique{kind}", "unique_out", *more)[0] == 0
    drop = [*more, "--drop_duplicates"]
    writes, new_file, dies_at = [], data.output.new_file, None

    def dying(path):
        writes.append(path)
        if len(writes) == dies_at:
            raise Killed
        return new_file(path)

    monkeypatch.setattr(data.output, "new_file", dying)
    status, out, _ = tokenize(f"in{kind}", "whole", *drop)
    assert status == 0 and "30 exact duplicates left out" in out
    for split in splits.SPLITS:
        for path in (tmp_path / "unique_out" / split).glob("*.npy"):
            assert path.read_bytes() == (tmp_path / "whole" / split / path.name).read_bytes()
    about = manifests(tmp_path / "whole")
    assert sum(m["duplicate_documents"] for m in about) == 30
    assert (
        sum(m["documents"] for m in about) == 40 and sum(m["empty_documents"] for m in about) == 2
    )
    for dies_at in range(1, len(writes) + 1):
        writes.clear()
        with pytest.raises(Killed):
            tokenize(f"in{kind}", str(dies_at), *drop)
        at, dies_at = dies_at, None
        assert tokenize(f"in{kind}", str(at), *drop)[0] == 0
        assert content(tmp_path / str(at)) == content(tmp_path / "whole")
    if not kind:
        assert tokenize("in", "two", *drop, "--workers", 2)[0] == 0
        assert content(tmp_path / "two") == content(tmp_path / "whole")
    status, out, err = tokenize(f"in{kind}", "whole", *more)
    assert status == 2 and "drop_duplicates was True and is now False" in err


def test_hashes_that_were_seen():
    """As a set tells, however they come, and in few sorted arrays."""
    rng, seen, expected = np.random.default_rng(0), splits.Seen(), set()
    for _ in range(200):
        hashes = rng.integers(0, 3000, rng.integers(0, 40)).astype(np.uint64)
        for value, again in zip(hashes.tolist(), seen.add(hashes).tolist()):
            assert again == (value in expected)
            expected.add(value)
        assert len(seen) == len(expected) and len(seen.arrays) < 12
    assert set(seen.all().tolist()) == expected


def test_shards_of_an_earlier_version(tokenize, tmp_path):
    """Whose manifests tell nothing of validation and duplicates: finished ones are still those of these settings."""
    write(tmp_path / "in", some_texts(40))
    assert tokenize("in")[0] == 0
    for split, manifest in zip(splits.SPLITS, manifests(tmp_path / "out")):
        for key in ("validation", "drop_duplicates", "duplicate_documents", "manifest_sha256"):
            manifest.pop(key, None)
        (tmp_path / "out" / split / "manifest.json").write_text(json.dumps(manifest))
    status, out, _ = tokenize("in")
    assert status == 0 and "nothing to do" in out
    status, _, err = tokenize("in", "out", "--drop_duplicates")
    assert status == 2 and "drop_duplicates was False and is now True" in err


# --- Documents that are too long --------------------------------------------------------------------------------


def write_dictionary(path, texts):
    """A parquet file whose dictionary holds every text once."""
    pq.write_table(pa.table({"body": pa.array(texts).dictionary_encode()}), path)


def write_wide(path, texts):
    """A .jsonl file in UTF-16."""
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts), "utf-16")


TOO_LONG = [(kind, write) for kind in ("", ".txt.gz", *RECORDS)]


@pytest.mark.parametrize(
    "kind, writer", [*TOO_LONG, (".parquet", write_dictionary), (".jsonl", write_wide)]
)
def test_a_document_that_is_too_long(tokenize, ranks_file, tmp_path, monkeypatch, kind, writer):
    """Refused by its file and place; with --skip_damaged it alone is left out and counted. One that is just short
    enough is read."""
    monkeypatch.setattr(source_text, "LONGEST", 3000)
    texts = ["before", "a" * 10_000, "b" * 2900, "c" * 9_000_000, "after"]
    if kind == ".txt.gz":
        files = {f"in/{i}{kind}": gzip.compress(text.encode()) for i, text in enumerate(texts)}
        write_files(tmp_path, files)
        source, word = "in", "1.txt.gz"
    else:
        source = f"in{kind}"
        writer(tmp_path / source, texts)
        word = {"": "001.txt", ".parquet": "row 2 of"}.get(kind, "line 2 of")
    status, out, err = tokenize(source, "out", "--val_fraction", 0)
    assert (status, out, err.count("error: ")) == (2, "", 1) and "Traceback" not in err, err
    assert word in err and source in err and "is longer than 3,000 bytes" in err, err
    flags = ["--val_fraction", 0, "--skip_damaged"]
    status, out, err = tokenize(source, "skip", *flags)
    assert status == 0 and err.count("is longer than") == 2 and "Traceback" not in err
    assert texts_in(tmp_path / "skip", ranks_file)["train"] == [texts[0], texts[2], texts[4]]
    manifest = json.loads((tmp_path / "skip/train/manifest.json").read_text())
    lost = "damaged_records" if kind in RECORDS else "damaged_files"
    assert manifest[lost] == 2 and manifest["documents"] == 3


@pytest.mark.parametrize(
    "fraction, where", [(0.1, "of 20 documents"), (0.01, "the last 1% of each")]
)
def test_a_long_text_file_is_read_in_parts_that_end_with_lines(
    tokenize, ranks_file, tmp_path, monkeypatch, fraction, where
):
    monkeypatch.setattr(source_text, "LONGEST", 3000)
    monkeypatch.setattr(files, "PART", 700)
    lines = [f"{n} " + "é" * (n % 50) + "\n" for n in range(300)]
    (tmp_path / "long.txt").write_text("".join(lines) + "no end")
    status, out, err = tokenize("long.txt", "out", "--val_fraction", fraction)
    assert (status, err) == (0, "")
    assert where in out, out
    texts = texts_in(tmp_path / "out", ranks_file)
    found = texts["train"] + texts["val"]
    assert sorted("".join(found)) == sorted("".join(lines) + "no end")
    if fraction == 0.1:
        assert len(found) > 10 and sum(not text.endswith("\n") for text in found) == 1
        assert max(len(text.encode()) for text in found) < 900


def test_a_record_that_memory_cannot_hold(tokenize, tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", ["y", "x", "z"])
    loads = json.loads

    def short(line):
        if '"y"' in line:
            raise MemoryError
        return loads(line)

    monkeypatch.setattr("data.sources.jsonl.json.loads", short)
    status, out, err = tokenize("a.jsonl")
    assert (status, out, err.count("\n")) == (2, "", 1) and "line 1 of" in err and "memory" in err


# --- Kinds of files ---------------------------------------------------------------------------------------------


def test_a_glob_of_folders(tokenize, ranks_file, tmp_path):
    """The files in them are read; what is hidden or a link is not."""
    texts = some_texts(4)
    write_files(tmp_path, {"recs1/x/.hidden/c.jsonl": b"no record", ".recs/d.jsonl": b"no record"})
    write_lines(tmp_path / "recs1/x/a.jsonl", texts[:2])
    (tmp_path / "recs2").mkdir()
    write_lines(tmp_path / "recs2/b.jsonl", texts[2:])
    (tmp_path / "recs3").symlink_to("recs2")
    (tmp_path / "recs4.jsonl").symlink_to("recs2/b.jsonl")
    status, _, err = tokenize("recs*", "out", "--val_fraction", 0)
    assert status == 0 and "left out: 1 symlinked folder" in err and err.count("\n") == 1, err
    assert texts_in(tmp_path / "out", ranks_file)["train"] == texts + texts[2:]
    status, _, err = tokenize("recs*", "recs-out", "--val_fraction", 0)
    assert (
        status == 2 and "must not lie in --source" in err and not (tmp_path / "recs-out").exists()
    )


@pytest.mark.parametrize(
    "files", [["recs1/a", "recs2/b"], ["recs1", "recs2"], ["recs1", "recs2/b"]]
)
def test_the_advice_for_two_kinds_works(tokenize, tmp_path, files):
    """Whatever matches: folders, files, or both. Following it, one has no error."""
    for name, kind in zip(files, (".jsonl", ".parquet")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}{kind}", some_texts(3))
    status, out, err = tokenize("recs*")
    assert (status, out, err.count("\n")) == (2, "", 1) and "different kinds" in err
    advice = err.strip().rpartition("such as ")[2].removesuffix(".")
    assert tokenize(advice)[0] == 0, advice


def test_text_beside_records_is_named(tokenize, tmp_path):
    write_lines(tmp_path / "in.jsonl", ["x"])
    write_files(
        tmp_path, {"in/a.txt": b"text", "in/b.md": b"text", "in/c.txt.gz": gzip.compress(b"x")}
    )
    shutil.copy(tmp_path / "in.jsonl", tmp_path / "in/d.jsonl")
    status, _, err = tokenize("in", "out", "--val_fraction", 0)
    assert status == 0 and "left out: 3 other files (such as" in err and ".gz, .md, .txt" in err, (
        err
    )


@pytest.mark.parametrize("name", ["book.pdf", "archive.zip", "russian.txt"])
def test_a_file_that_is_no_text(tokenize, tmp_path, name):
    """Named alone it is refused: its shards would hold U+FFFD."""
    noise = random.Random(0).randbytes(5000)
    write_files(tmp_path, {name: "Привет, мир. ".encode("cp1251") * 99 if "txt" in name else noise})
    status, out, err = tokenize(name)
    assert (status, out, err.count("\n")) == (2, "", 1) and f"{name}: is no text in UTF-8" in err
    assert not (tmp_path / "out").exists()


def test_remote_text_is_refused(tokenize):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/texts/a.txt", b"text")
    status, out, err = tokenize("memory://texts")
    assert (status, out, err.count("\n")) == (2, "", 1) and "1 file there, none ending in" in err
