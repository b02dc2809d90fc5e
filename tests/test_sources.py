"""Sources however they are: damaged, duplicated, of few or too long documents, files of all kinds."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import random
import shutil
import tarfile
import zipfile

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import (
    COMPRESS,
    RECORDS,
    check,
    content,
    make_texts,
    manifests,
    reference,
    refused,
    some_texts,
    write,
    write_files,
)

from data import command_line, splits, train_tokenizer
from data.sources import files
from data.sources import text as source_text
from data.sources.contents import detect_contents
from data.sources.formats import FORMATS, open_source
from runtime.messages import UserError
from shards import tokenization
from tools import evaluate


def texts_in(output, ranks_file):
    """{split: the texts of its documents, in order}."""
    encoding, texts = tokenization.load_tokenizer(str(ranks_file)), {}
    for split in ("train", "val"):
        shards = [np.load(path) for path in sorted((output / split).glob("*.npy"))]
        ids = np.concatenate([np.empty(0, np.uint16), *shards])
        starts = np.flatnonzero(ids == encoding.eot_token)
        texts[split] = [encoding.decode(part[1:]) for part in np.split(ids, starts)[1:]]
    return texts


@pytest.mark.parametrize("name", ["doc", "doc.txt.gz", "doc.md.zst"])
def test_one_text_file(tokenize, run, ranks_file, tmp_path, monkeypatch, name):
    """Its end validates, however the file is named; the tokenizer learns from its beginning alone."""
    text = "".join(f"line {i} of the only document\n" for i in range(300))
    compress = COMPRESS.get("." + name.rpartition(".")[2], bytes)
    write_files(tmp_path, {f"in/{name}": compress(text.encode())})
    monkeypatch.setenv("HOME", str(tmp_path))
    learned, train = [], train_tokenizer.train
    monkeypatch.setattr(train_tokenizer, "train", lambda *a: learned.append(a[0]) or train(*a))
    for source in (f"~/in/{name}", tmp_path / "in" / name, "in", "in/d*"):
        shutil.rmtree("out", ignore_errors=True)
        status, out, err = tokenize(source)
        assert (status, err, out.count("\n")) == (0, "", 2) and "val is the last 10% of each" in out
        (begin,), (end,) = texts_in(tmp_path / "out", ranks_file).values()
        assert begin + end == text and 0.09 * len(text) < len(end) < 0.11 * len(text)
        about = manifests(tmp_path / "out")[1]
        assert (about["validation"], about["bytes"]) == ("the end of every document", len(end))
        flags = [f"--source={source}", "--vocab_size", 270, "--output", "x.tiktoken"]
        assert run(train_tokenizer, *flags)[0] == 0
        assert learned.pop() == [begin]


@pytest.mark.parametrize("kind", ["", ".jsonl", ".parquet"])
def test_few_documents(tokenize, ranks_file, tmp_path, monkeypatch, kind):
    """Val has the share of the text, and of equal documents the same end. Of more documents none is cut."""
    texts = some_texts(3)
    write(tmp_path / f"in{kind}", [*texts, texts[0]])
    status, out, _ = tokenize(f"in{kind}")
    assert status == 0 and "1 exact duplicate kept" in out
    train, val = texts_in(tmp_path / "out", ranks_file).values()
    assert [a + b for a, b in zip(train, val, strict=True)] == [*texts, texts[0]]
    assert all(0.05 * len(t) < len(end) < 0.15 * len(t) for t, end in zip(texts, val))
    assert [m["documents"] for m in manifests(tmp_path / "out")] == [4, 4]
    monkeypatch.setattr(splits, "ENOUGH", 4)
    assert tokenize(f"in{kind}", "none", "--val_fraction", 0)[0] == 0
    assert not (tmp_path / "none/val").exists()
    more = [f"in{kind}", "more", "--val_fraction", 0.999]
    refused(tokenize(*more), "no text for train")  # no document is cut
    assert tokenize(*more, "--drop_duplicates")[0] == 0  # of which there are three


def test_the_text_alone_decides(tokenize, ranks_file, tmp_path):
    """In any order, in files of any kind, with duplicates among them, a document is on the same side. Without them the
    shards are those of the first of each text; empty documents are no duplicates."""
    texts, sides = some_texts(60), None
    for i, kind in enumerate(["", ".jsonl", ".parquet"]):
        shuffled = random.Random(i).sample(texts + texts[:20], 80) + ["", ""]
        for name, held in {"in": shuffled, "unique": [*dict.fromkeys(shuffled), ""]}.items():
            write(tmp_path / f"{name}{kind}", held)

        def shards(source, output, *more):
            output = f"{output}{kind}"
            ended = tokenize(f"{source}{kind}", output, "--val_fraction", 0.3, *more)
            assert ended[0] == 0
            held = content(tmp_path / output)
            return ended[1], {name: held[name] for name in held if name.endswith(".npy")}

        assert "20 exact duplicates kept" in shards("in", "out")[0]
        found = texts_in(tmp_path / f"out{kind}", ranks_file)
        here = {split: sorted(set(found[split])) for split in splits.SPLITS}
        sides = sides or here
        assert here == sides and sorted(here["train"] + here["val"]) == sorted(texts)
        said, dropped = shards("in", "drop", "--drop_duplicates")
        assert "20 exact duplicates left out" in said and dropped == shards("unique", "u_out")[1]
        about = manifests(tmp_path / f"drop{kind}")
        counts = [sum(m[f"{k}documents"] for m in about) for k in ("", "duplicate_", "empty_")]
        assert counts == [60, 20, 2]


def damage(path):
    """Cut a compressed file short, or overwrite a row group in the middle of a parquet file."""
    sound = path.read_bytes()
    if path.suffix == ".parquet":
        column = pq.ParquetFile(path).metadata.row_group(2).column(1)
        start = column.dictionary_page_offset or column.data_page_offset
        end = start + column.total_compressed_size
        path.write_bytes(sound[:start] + b"\xff" * (end - start) + sound[end:])
    else:
        path.write_bytes(sound[: len(sound) * 2 // 3])
    return sound


@pytest.fixture(params=[".jsonl.gz", ".parquet"])
def three(request, tmp_path, monkeypatch):
    """(three files of 40 records, of which the second is damaged, what it was before, kind). No few documents."""
    monkeypatch.setattr(splits, "ENOUGH", 5)
    paths = [tmp_path / "in" / f"{i}{request.param}" for i in range(3)]
    paths[0].parent.mkdir()
    for path in paths:
        write(path, [f"{path.name} {t}" for t in make_texts(40, lone=False)])
    return paths, damage(paths[1]), request.param


def test_a_damaged_file_is_replaced(three, tokenize, tmp_path):
    """The same command resumes from what is sound, to the bytes of a run that met no damage. What was read before must
    be the same: also the beginning of the file that was replaced."""
    paths, sound, kind = three
    name = f"{paths[1].name} cannot be read"
    for _ in range(2):
        refused(tokenize("in"), name, "rerun the same command to resume")
    shard = tmp_path / "out/train/000000.npy"
    written, first = shard.stat().st_mtime_ns, paths[0].read_bytes()
    # of a torn archive as small as these no record was read
    for path in paths[: 2 if kind == ".parquet" else 1]:
        write(path, make_texts(40, lone=False)[::-1])
        refused(tokenize("in"), "changed")
        paths[0].write_bytes(first)
    paths[1].write_bytes(sound)
    status, _, err = tokenize("in")
    assert (status, err) == (0, "") and shard.stat().st_mtime_ns == written
    assert tokenize("in", "whole")[0] == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_damage_is_skipped_and_counted(three, tokenize, writes, tmp_path):
    """Also by a run that is stopped at its n-th write and started again, and by worker processes."""
    paths, _, kind = three
    lost = {"damaged_files": 1, "damaged_records": 4 * (kind != ".parquet")}
    if kind != ".parquet":
        lines = b'{"body": \n{"id": 3}\n{"body": 3}\n[]\n'
        paths[2].write_bytes(paths[2].read_bytes() + gzip.compress(lines))
    status, _, err = tokenize("in", "whole", "--skip_damaged")
    words = f"1 damaged file and {lost['damaged_records']} damaged records left out"
    assert status == 0 and f"{paths[1]} cannot be read" in err and words in err, err
    about, n = manifests(tmp_path / "whole"), len(writes)
    assert {key: sum(m[key] for m in about) for key in lost} == lost
    documents = sum(m["documents"] + m["empty_documents"] for m in about)
    assert documents == 94 if kind == ".parquet" else 80 <= documents < 120
    for dies_at in range(2, n, 4):
        writes.killed(dies_at, lambda: tokenize("in", str(dies_at), "--skip_damaged"))
        assert tokenize("in", str(dies_at), "--skip_damaged")[0] == 0
        assert content(tmp_path / str(dies_at)) == content(tmp_path / "whole")
    assert tokenize("in", "two", "--skip_damaged", "--workers", 2)[0] == 0
    assert content(tmp_path / "two") == content(tmp_path / "whole")


def test_files_that_cannot_be_read(tokenize, tmp_path):
    """Damaged records, what is no text, whose shards would hold U+FFFD, and remote text."""
    for name, held, *words in [
        ("a.jsonl", b'{"body": "x"}\n{"body": ', "--source", "line 2 of"),
        ("a.jsonl", b'{"text": "x"}', "no column body", "only text"),
        ("a.jsonl", b'["x"]', "--source", "line 1 of"),
        ("a.jsonl", b'{"body": 3}', "--source", "holds 3 in its column body"),
        ("a.jsonl.gz", b"not gzip", "--source", "cannot be read"),
        ("a.parquet", b"PAR1", "--source", "cannot be read"),
        ("book.pdf", random.Random(0).randbytes(5000), "book.pdf: is not UTF-8 text"),
        ("russian.txt", "Привет, мир. ".encode("cp1251") * 99, "russian.txt: is not UTF-8 text"),
    ]:
        write_files(tmp_path, {name: held})
        refused(tokenize(name), *words)
    fsspec.filesystem("memory").pipe_file("/texts/a.txt", b"text")
    refused(tokenize("none*", "new"), "no such file")
    refused(tokenize("memory://texts", "new"), "1 file there, none ending in")
    assert not (tmp_path / "new").exists()


def test_records_in_other_encodings(tokenize, ranks_file, tmp_path):
    """UTF-8, or UTF-16 and UTF-32 of either order, with their marks; bytes that are not UTF-8; files that are others,
    and a folder that is a link."""
    (tmp_path / "in").mkdir()
    lines = '{"body": "naïve €"}\n\n{"body": "second"}'
    for i, encoding in enumerate(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"]):
        held = gzip.compress(f"\ufeff{lines}".encode(encoding))
        (tmp_path / "in" / f"{i}.jsonl.gz").write_bytes(held)
    (tmp_path / "in/9.jsonl").write_bytes(b'{"body": "caf\xe9"}')
    for name in ("README.rst", "LICENSE", "x.json"):
        (tmp_path / "in" / name).write_text("about it")
    (tmp_path / "in/link").symlink_to(tmp_path / "in")
    status, _, err = tokenize("in", "out", "--val_fraction", 0)
    assert status == 0 and "left out: 1 symlinked folder" in err, err
    assert f"left out: 3 other files (such as {tmp_path}/in/LICENSE)" in err
    assert "document 8 is not UTF-8: 1 character became U+FFFD" in err
    found = texts_in(tmp_path / "out", ranks_file)["train"]
    assert found == ["naïve €", "second"] * 4 + ["caf\ufffd"]


def test_a_folder_of_mixed_kinds(tokenize, writes, ranks_file, tmp_path):
    """All are read and told, texts first; a run that was killed, and one of two workers, ends with the same shards."""
    files = {"a.txt": b"plain", "sub/b.md": b"# heading", "c.txt.gz": gzip.compress(b"packed")}
    files |= {"d.md.zst": COMPRESS[".zst"](b"packed too"), "empty.txt": b"", "e.png": b"picture"}
    write_files(tmp_path / "in", files)
    for name in ("f.jsonl", "g.jsonl.gz", "h.parquet", "i.jsonl"):
        write(
            tmp_path / "in" / name, [f"{name} {i}" for i in range(9)] if name != "i.jsonl" else []
        )
    status, _, err = tokenize("in", "whole", "--val_fraction", 0)
    assert status == 0 and f"left out: 1 other file (such as {tmp_path}/in/e.png)" in err
    found = texts_in(tmp_path / "whole", ranks_file)["train"]
    assert found[:4] == ["plain", "packed", "packed too", "# heading"]
    assert found[4:] == [
        f"{name} {i}" for name in ("f.jsonl", "g.jsonl.gz", "h.parquet") for i in range(9)
    ]
    source = open_source(command_line.Source(str(tmp_path / "in"), text_column="body"))
    positions = [source.position for _ in source.read({})]
    assert positions[-1]["done"] == source.total
    for i, position in enumerate(positions, 1):
        assert [source.position for _ in source.read(position)] == positions[i:]
    (tmp_path / "in/.hidden.jsonl").write_text("no record")
    writes.killed(2, lambda: tokenize("in", "again", "--val_fraction", 0))
    assert tokenize("in", "again", "--val_fraction", 0, "--workers", 2)[0] == 0
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_parquet_columns(tokenize, ranks_file, tmp_path):
    """Text is read however Arrow stores it; what else a column holds is named before anything is written."""
    texts = make_texts(60, lone=False)
    one = pa.array(texts)
    forms = [one, one.cast(pa.large_string()), one.cast(pa.string_view()), one.dictionary_encode()]
    bad = pa.array([b"caf\xe9", None, b"x"] * 20).cast(pa.binary()).view(pa.string())
    for i, form in enumerate([*forms, pa.nulls(60), bad]):
        pq.write_table(pa.table({"body": form}), tmp_path / f"{i}.parquet", row_group_size=13)
    refused(tokenize("0.parquet", "out", "--text_column", "no"), "no column no, only body")
    status, _, err = tokenize("*.parquet")
    assert status == 0 and "20 characters of 20 documents became U+FFFD" in err
    encoding = tokenization.load_tokenizer(str(ranks_file))
    texts = texts * 4 + [None] * 60 + ["caf\ufffd", None, "x"] * 20
    check(tmp_path / "out", reference(texts, encoding, 0.1), encoding, 1000)
    for kind, cell in [("list", ["x"]), ("binary", b"x"), ("int64", 3)]:
        pq.write_table(pa.table({"body": [cell] * 9}), tmp_path / "9.parquet")
        refused(tokenize("*.parquet", "new"), f"{tmp_path}/9.parquet holds {kind}")
    assert not (tmp_path / "new").exists()


TOO_LONG = {"folder": "001.txt", "zipped": "1.txt.gz", "in.jsonl.gz": "line 2 of"}
# the second holds every text once
TOO_LONG |= {"in.parquet": "row 2 of", "dictionary.parquet": "row 2 of"}


@pytest.mark.parametrize("source, word", TOO_LONG.items())
def test_a_document_that_is_too_long(tokenize, ranks_file, tmp_path, monkeypatch, source, word):
    """Refused by its file and place; with --skip_damaged it alone is left out and counted. One that is just short
    enough is read."""
    monkeypatch.setattr(source_text, "LONGEST", 3000)
    longest = "b" * (2900 if "jsonl" in source else 3000)  # a line has more than its text
    texts = ["before", "a" * 10_000, longest, "c" * 9_000_000, "after"]
    if source == "zipped":
        zipped = {f"{i}.txt.gz": gzip.compress(text.encode()) for i, text in enumerate(texts)}
        write_files(tmp_path / source, zipped)
    elif source == "dictionary.parquet":
        column = pa.array(texts).dictionary_encode()
        pq.write_table(pa.table({"body": column}), tmp_path / source)
    else:
        write(tmp_path / source, texts)
    refused(tokenize(source, "out", "--val_fraction", 0), word, "is longer than 3,000 bytes")
    status, _, err = tokenize(source, "skip", "--val_fraction", 0, "--skip_damaged")
    assert status == 0 and err.count("is longer than") == 2 and "Traceback" not in err
    assert texts_in(tmp_path / "skip", ranks_file)["train"] == [texts[0], texts[2], texts[4]]
    made = json.loads((tmp_path / "skip/train/manifest.json").read_text())
    lost = "damaged_records" if source.endswith(RECORDS) else "damaged_files"
    assert made[lost] == 2 and made["documents"] == 3


def test_a_long_text_file_is_read_in_parts(tokenize, ranks_file, tmp_path, monkeypatch):
    """Which end with lines."""
    monkeypatch.setattr(source_text, "LONGEST", 3000)
    monkeypatch.setattr(files, "PART", 700)
    lines = [f"{n} " + "é" * (n % 50) + "\n" for n in range(300)]
    (tmp_path / "long.txt").write_text("".join(lines) + "no end")
    status, out, err = tokenize("long.txt")
    assert (status, err) == (0, "") and "of 20 documents" in out, out
    texts = texts_in(tmp_path / "out", ranks_file)
    found = texts["train"] + texts["val"]
    assert sorted("".join(found)) == sorted("".join(lines) + "no end")
    assert len(found) > 10 and sum(not text.endswith("\n") for text in found) == 1
    assert max(len(text.encode()) for text in found) < 900


def test_a_dataset_of_the_hub(tokenize, ranks_file, tmp_path, monkeypatch):
    """Config, split and revision reach `datasets`, which here reads a folder laid out as a dataset of the hub is."""
    import datasets
    import huggingface_hub

    texts, folder = make_texts(60, lone=False), tmp_path / "hub"
    (folder / "small").mkdir(parents=True)
    for i, some in enumerate((texts[:20], texts[20:])):
        write(folder / "small" / f"{i}.json.gz", some)
    listing = "config_name: small\n  data_files: [{split: whole, path: small/*.json.gz}]"
    (folder / "README.md").write_text(f"---\nconfigs:\n- {listing}\n---\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    info = huggingface_hub.hf_api.DatasetInfo(id="someone/texts", sha="5ha")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_: info)
    load = datasets.load_dataset_builder

    def local(name, *args, revision):
        assert (name, revision) == ("someone/texts", "5ha")
        return load(str(folder), *args)

    monkeypatch.setattr(datasets, "load_dataset_builder", local)
    asked = ["--config", "small", "--split", "whole"]
    assert tokenize("someone/texts", "out", *asked)[0] == 0
    encoding = tokenization.load_tokenizer(str(ranks_file))
    check(tmp_path / "out", reference(texts, encoding, 0.1), encoding, 1000)
    of_the_hub = {"source": "someone/texts", "config": "small", "split": "whole", "revision": "5ha"}
    assert of_the_hub.items() <= manifests(tmp_path / "out")[0].items()
    for flag, value in (("config", "none"), ("split", "nothing")):
        refused(tokenize("someone/texts", "out", *asked, f"--{flag}", value), f"--{flag} {value}")


# --- What files hold, whatever they are called ---------------------------------------------------------------------

STORIES = [{"body": f'story {i}, "é"\nand more', "id": i} for i in range(3)]
LINES = "".join(json.dumps(story) + "\n" for story in STORIES).encode()
ARRAY = json.dumps(STORIES).encode()
OBJECTS = [json.dumps(story, indent=1).encode() for story in STORIES]


def separated(delimiter, names=("body", "id")):
    file = io.StringIO()
    rows = [names, *(story.values() for story in STORIES)]
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue().encode()


HOLD_RECORDS = {  # {name of a file: its content}, each of the STORIES
    "c4-train.00000.json.gz": gzip.compress(LINES),
    "data.json": LINES,
    "c4.JSON.ZST": COMPRESS[".zst"](LINES),
    "some.ndjson": LINES,
    "some.jl.xz": lzma.compress(LINES),
    "some.JSONL": LINES,
    "some.Jsonl.Gz": gzip.compress(LINES),
    "some.json.bz2": bz2.compress(LINES),
    "RC_2012-01.zst": COMPRESS[".zst"](LINES),
    "lines.txt": LINES,
    "lines": LINES,
    "windows.json": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "blank.json": b"\n \n\r\n" + LINES,
    "blank.txt": b"\n \n\r\n" + LINES,
    "wide.json": LINES.decode().encode("utf-16"),
    "array.json": ARRAY,
    "array.txt": ARRAY,
    "pretty.json.gz": gzip.compress(json.dumps(STORIES, indent=2).encode()),
    "objects.json": b"\n".join(OBJECTS),
    "rows.csv": separated(","),
    "rows.CSV.gz": gzip.compress(separated(",")),
    "rows.tsv": separated("\t"),
}


def texts_of(source, **flags):
    """The texts of a source's documents, in order."""
    opened = open_source(command_line.Source(str(source), text_column="body", **flags))
    return [source_text.read_text(document)[0] for document in opened.read({})]


def error_of(source, **flags):
    """The sentence that refuses a source."""
    with pytest.raises(UserError) as raised:
        texts_of(source, **flags)
    return str(raised.value)


@pytest.mark.parametrize("name", HOLD_RECORDS)
def test_records_are_told_by_what_a_file_holds(name, tmp_path):
    """In a folder and alone, here and remote, in every program; from any record on."""
    write_files(tmp_path, {f"in/{name}": HOLD_RECORDS[name]})
    wanted = [story["body"] for story in STORIES]
    address = f"memory://records/{name}"
    fsspec.filesystem("memory").pipe_file(f"/records/{name}", HOLD_RECORDS[name])
    for source in (tmp_path / "in", tmp_path / "in" / name, address):
        assert texts_of(source) == wanted
        assert list(evaluate.texts(str(source), "body")) == wanted
    source = open_source(command_line.Source(address, text_column="body"))
    learned = sorted(train_tokenizer.sample(source))
    assert all(text.startswith(part) for text, part in zip(wanted, learned, strict=True))
    positions = [source.position for _ in source.read({})]
    for i, position in enumerate(positions, 1):
        assert [source.position for _ in source.read(position)] == positions[i:]


def test_one_record_in_each_file(tmp_path):
    files = {f"{i}.json": content for i, content in enumerate(OBJECTS)} | {"README.md": b"about"}
    write_files(tmp_path, files)
    assert texts_of(tmp_path) == ["about", *(story["body"] for story in STORIES)]


OTHER = LINES.replace(b'"body"', b'"content"')
OF_OTHER_COLUMNS = {  # {name of a file: (its content, a word of the sentence)}
    "data.json": (OTHER, "only content, id"),
    "data.txt": (OTHER, "only content, id"),
    "array.json": (json.dumps([{"content": "x"}]).encode(), "only content"),
    "object.json": (
        json.dumps({"version": 1, "data": STORIES}, indent=1).encode(),
        "version, data",
    ),
    "one line.json": (b'{"content": "x"}', "only content"),
    "rows.csv": (separated(",", ("a", "b")), "only a, b"),
    "torn.json": (ARRAY[:-9], "holds no JSON objects"),
    "torn.txt": (json.dumps(STORIES, indent=1).encode()[:-9], "holds no JSON objects"),
    "strings.json": (b'["a", "b", "cde", "fgh"]', "holds no JSON objects"),
    "a.ipynb": (json.dumps({"cells": []}, indent=1).encode(), "only cells"),
}


@pytest.mark.parametrize("name", OF_OTHER_COLUMNS)
def test_records_of_other_columns_are_no_prose(name, tmp_path):
    """Refused, also beside notes."""
    held, word = OF_OTHER_COLUMNS[name]
    write_files(tmp_path, {name: held, "README.md": b"# about it", "LICENSE": b"free"})
    for source in (tmp_path, tmp_path / name):
        said = error_of(source)
        assert "no column body" in said and name in said and word in said


def test_a_few_records_of_other_columns_beside_much_text_are_left_out(tmp_path, capsys):
    """As a list of the titles beside books."""
    books = {f"{i}.txt": f"Book {i}. ".encode() * 40 for i in range(3)}
    write_files(tmp_path, books | {"metadata.json": b'[{"title": "Book"}]', "cover.png": PICTURE})
    assert texts_of(tmp_path) == [held.decode() for held in books.values()]
    said = capsys.readouterr().err
    assert "1 record file" in said and "metadata.json) without a column body" in said
    assert "1 binary file" in said


def test_source_code_stays_text(tmp_path, capsys):
    """With its .json and .csv files, which are no records there; with pictures it is read without these."""
    files = {
        "a.py": b"print()\n",
        "package.json": json.dumps({"name": "a", "version": "1"}, indent=1).encode(),
        "tsconfig.json": b'{\n // a comment\n "strict": true,\n}',
        "en.json": b'{"body": "Text"}',
        "people.json": b'[{"name": "A"}]',
        "table.csv": b"a,b\n1,2\n",
        "a.js.map": b'{"version": 3, "sources": []}',
    }
    write_files(tmp_path, files | {"docs/logo.png": PICTURE})
    assert sorted(texts_of(tmp_path)) == sorted(held.decode() for held in files.values())
    assert "left out: 1 binary file" in capsys.readouterr().err


def test_text_that_begins_as_json_does(tmp_path):
    texts = [
        '{\n "title": "x"\n}\n\nA page.\n',
        "{\\bf TeX}\n{\\it it}",
        "[1] A book\n[2] One more",
    ]
    write_files(tmp_path, {f"{i}.txt": text.encode() for i, text in enumerate(texts)})
    assert texts_of(tmp_path) == texts


def test_rows_that_do_not_fit(tmp_path):
    """A cell that is not quoted, and a quotation mark out of place, would change the texts in silence."""
    write_files(tmp_path, {"a.csv": b"body,id\nx,1\ny, and more,2\nz,3\n"})
    assert "row 2 of" in error_of(tmp_path / "a.csv")
    source = open_source(
        command_line.Source(str(tmp_path / "a.csv"), text_column="body", skip_damaged=True)
    )
    assert [d.lost or d.text for d in source.read({})] == ["x", "damaged_records", "z"]
    write_files(tmp_path, {"b.tsv": b'body\tid\n"quoted" once\t1\n'})
    assert "b.tsv cannot be read" in error_of(tmp_path / "b.tsv")


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.wet.gz", "a.txt"])
def test_web_archives_are_refused(name, tmp_path):
    held = b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"
    held = COMPRESS.get("." + name.rpartition(".")[2], bytes)(held)
    write_files(tmp_path, {name: held, "b.txt": b"text"})
    for source in (tmp_path, tmp_path / name):
        assert f"{name} is a web archive" in error_of(source)


def saved_as(save, *args):
    file = io.BytesIO()
    save(file, *args)
    return file.getvalue()


def archive(file):
    with tarfile.open(fileobj=file, mode="w") as made:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(PROSE)
        made.addfile(entry, io.BytesIO(PROSE))


def zipped(file):
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a.txt", PROSE)


def arrow(file):
    table = pa.table({"body": [PROSE.decode()] * 9})
    with pa.ipc.new_stream(file, table.schema) as made:
        made.write_table(table)


PROSE = b"plain words of some length, " * 300
NOISE = random.Random(1).randbytes(900)
PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\1\0\x08\2\0\0\0" + NOISE
IDS = np.random.default_rng(1).integers(0, 50257, 900).astype(np.uint16)
HOLD_NO_TEXT = {  # the longest of them is mostly text
    "a.png": PICTURE,
    "a.npy": saved_as(np.save, IDS),
    "few.npy": saved_as(np.save, np.arange(9)),
    "train.bin": IDS.tobytes(),
    "a.arrow": saved_as(arrow),
    "a.zip": saved_as(zipped),
    "a.tar": saved_as(archive),
    "a.tar.gz": gzip.compress(saved_as(archive)),
    "a.pdf": b"%PDF-1.4\n" + b"1 0 obj << /Type /Catalog >> endobj\n" * 99,
    "a.pkl": pickle.dumps([PROSE.decode()]),
    "a.tfrecord": (b"\x90\x1f\0\0\0\0\0\0\xa1\xb2\xc3\xd4\n\x9e\x1f" + PROSE) * 2,
}


@pytest.mark.parametrize("name", HOLD_NO_TEXT)
def test_binary_files_are_no_text(name, tmp_path, capsys):
    """Left out and told beside text, refused where there is none, whatever their names are."""
    for at in (name, "data.txt.gz" if name.endswith(".gz") else "data.txt"):
        folder = tmp_path / at
        write_files(folder, {at: HOLD_NO_TEXT[name]})
        for source in (folder, folder / at):
            assert f"{at}: is not UTF-8 text" in error_of(source)
        write_files(folder, {"text.md": b"some text"})
        capsys.readouterr()
        assert texts_of(folder) == ["some text"]
        assert f"left out: 1 binary file (such as {folder / at})" in capsys.readouterr().err
    write_files(tmp_path / "two", {"a.npy": HOLD_NO_TEXT["a.npy"], "b.bin": NOISE})
    said = error_of(tmp_path / "two")
    assert "none of its 2 files is text (.bin, .npy)" in said and "X/train and X/val" in said


GARBLED = [
    "plain words\n",
    "Привет, мир. \n",
    "中文字符，测试。\n",
    "日本語のひらがなです。\n",
    "한국어 글\n",
]


def test_text_in_other_encodings(tokenize, tmp_path, capsys):
    """Of UTF-16 and UTF-32 without a mark, and of one byte: refused, also beside text, where it is more than a few
    files; a few are left out and told."""
    encodings = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
    cases = [(encoding, text * 9) for encoding in encodings for text in GARBLED]
    for encoding, text in [*cases, ("cp1251", GARBLED[1] * 9), ("koi8-r", GARBLED[1] * 9)]:
        write_files(tmp_path, {"a.txt": text.encode(encoding), "b.txt": b"more"})
        for source in (tmp_path, tmp_path / "a.txt"):
            assert "a.txt: is not UTF-8 text; convert it" in error_of(source), (encoding, text)
    write_files(tmp_path, {f"in/{i}.txt": GARBLED[i % 2].encode("cp1251") * 9 for i in range(4)})
    status, _, err = tokenize("in", "out", "--skip_damaged")
    assert status == 0 and "2 damaged files and 0 damaged records left out" in err
    for made in ("in", "out"):
        shutil.rmtree(tmp_path / made)
    write_files(tmp_path, {f"{i}.py": b"pass" for i in range(9)})
    capsys.readouterr()
    assert texts_of(tmp_path) == ["pass"] * 9 + ["more"]
    assert f"left out: 1 file (such as {tmp_path}/a.txt), not UTF-8" in capsys.readouterr().err
    # what only the rest of a file tells
    write_files(tmp_path, {"b.txt": PROSE * 9 + NOISE * 99})
    assert "b.txt: is not UTF-8 text" in error_of(tmp_path)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst", ".ZSTD", ".Gz"])
def test_compressed_files(ending, tmp_path):
    """Of several parts; torn, they are refused. Zeros behind a .gz are its padding."""
    compress = dict(COMPRESS) | {".bz2": bz2.compress, ".xz": lzma.compress}
    compress = compress.get(ending.lower(), COMPRESS[".zst"])
    held = compress(b"one ") + compress(b"two")
    write_files(tmp_path, {f"a.txt{ending}": held})
    assert texts_of(tmp_path) == ["one two"]
    write_files(tmp_path, {f"a.txt{ending}": held[:-9]})
    assert f"a.txt{ending} cannot be read" in error_of(tmp_path)
    if ending == ".gz":
        write_files(tmp_path, {"a.txt.gz": held + bytes(512)})
        assert texts_of(tmp_path) == ["one two"]


def test_a_zstd_window_that_is_too_large_is_named(tmp_path):
    """By the window's byte, as in streams, or by the size of all, as of files, both as zstd --long writes them."""
    magic = b"\x28\xb5\x2f\xfd"
    headers = [magic + bytes([0x04, 21 << 3]), magic + b"\xe0" + (2**31).to_bytes(8, "little")]
    for header in headers:
        for name in ("RC_2012-01.zst", "a.jsonl.zst", "a.txt.zst"):
            write_files(tmp_path, {f"{name}/{name}": header + bytes(20)})
            said = error_of(tmp_path / name)
            assert f"{name} cannot be read" in said and "2,048 MiB" in said and "--long" in said


def test_a_path_that_exists_is_no_glob(tokenize, ranks_file, tmp_path):
    """Nor is the folder in which a glob looks; files here and remote."""
    files = {
        "data[1].txt": b"right",
        "data1.txt": b"wrong",
        "x[ab]/in.txt": b"right",
        "xa/in.txt": b"wrong",
    }
    write_files(tmp_path, files)
    for name, held in files.items():
        fsspec.filesystem("memory").pipe_file(f"/odd/{name}", held)
    for place in (f"{tmp_path}", "memory://odd"):
        for source in ("data[1].txt", "x[ab]/in.txt"):
            assert texts_of(f"{place}/{source}") == ["right"]
            assert list(evaluate.texts(f"{place}/{source}", "body")) == ["right"]
    for source in ("x[ab]", "x[ab]/*.txt", "x[ab]/**/*.txt"):
        assert texts_of(tmp_path / source) == ["right"]
        assert list(evaluate.texts(f"{tmp_path}/{source}", "body")) == ["right"]
    assert texts_of(tmp_path / "dat[a]1.txt") == ["wrong"]
    # the shards' folder matches the source where that is read as a pattern
    assert tokenize("x[ab]", "xa/out")[0] == 0
    assert "".join(map("".join, texts_in(tmp_path / "xa/out", ranks_file).values())) == "right"


def test_storage_that_fails_once_changes_nothing(monkeypatch):
    """What a file holds is looked at again; where nothing comes, a sentence names the address."""
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/once/RC_2012-01.zst", COMPRESS[".zst"](LINES))
    failing, opened = [ValueError("of the storage")], type(fs)._open

    def fail_first(*args, **settings):
        if failing:
            raise failing.pop()
        return opened(*args, **settings)

    monkeypatch.setattr(type(fs), "_open", fail_first)
    assert texts_of("memory://once") == [story["body"] for story in STORIES]
    assert not failing


def test_every_kind_of_records_is_tested():
    found = {"table"}
    fs = fsspec.filesystem("memory")
    for name, held in HOLD_RECORDS.items():
        fs.pipe_file(f"/kinds/{name}", held)
        found.add(detect_contents(fs, f"/kinds/{name}").format)
    assert found == FORMATS.keys()
