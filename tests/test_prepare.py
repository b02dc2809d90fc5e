"""Corpora that people train on, from small files laid out as they are."""

import json

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import COMPRESS, content, manifests, refused

from config import presets
from data import prepare
from data.sources import hub

TEXTS = [f"story {i} of a small corpus\n" for i in range(60)]
CONFIGS = """---
configs:
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
---
"""


def lines(column):
    return b"".join(json.dumps({column: text}).encode() + b"\n" for text in TEXTS)


@pytest.fixture
def laid_out(tmp_path, monkeypatch):
    """Folder in which each corpus is laid out as where it comes from; the hub's cache has those of the hub."""
    table = pa.table({"text": TEXTS})
    for folder in (
        "tinystories/data",
        "fineweb-edu-10BT/sample/10BT",
        "the-stack-smol/data/python",
        "dclm",
    ):
        (tmp_path / folder).mkdir(parents=True)
    pq.write_table(table, tmp_path / "tinystories/data/train-00000-of-00004.parquet")
    pq.write_table(table, tmp_path / "fineweb-edu-10BT/sample/10BT/000_00000.parquet")
    (tmp_path / "fineweb-edu-10BT/README.md").write_text(CONFIGS)
    (tmp_path / "the-stack-smol/data/python/data.json").write_bytes(lines("content"))
    (tmp_path / "dclm/shard_0_processed.jsonl.zstd").write_bytes(COMPRESS[".zst"](lines("text")))
    (tmp_path / "input.txt").write_text("".join(TEXTS))
    of_hub = {about["source"]: name for name, about in reversed(prepare.CORPORA.items())}
    monkeypatch.setattr(hub, "newest", lambda source: (None, str(tmp_path / of_hub[source])))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


SOURCES = {"shakespeare": "input.txt", "dclm": "dclm/*.jsonl.zst*"}  # that are not of the hub


@pytest.mark.parametrize("name", ["tinystories", "fineweb-edu-10BT", "the-stack-smol", *SOURCES])
def test_a_corpus_is_told_and_tokenized(name, laid_out, run, writes, ranks_file, monkeypatch):  # noqa: F811
    """And again after a kill, to the same shards; with validation and the command that trains on it."""
    monkeypatch.setitem(prepare.CORPORA[name], "val_fraction", 0.2)
    words = [name, "--tokenizer", ranks_file, "--workers", 1]
    words += ["--source", SOURCES[name]] if name in SOURCES else []
    writes.killed(2, lambda: run(prepare, *words, "--output", "again"))
    assert run(prepare, *words, "--output", "again")[0] == 0
    status, out, err = run(prepare, *words)
    about = prepare.CORPORA[name]
    assert status == 0 and about["licence"] in out and "MB/s as measured" in out, err
    assert f"next: python main.py --preset {about['preset']} --data data/shards/{name}" in out
    made = manifests(laid_out / f"data/shards/{name}")
    n_documents = 1 if name == "shakespeare" else len(TEXTS)
    assert sum(part["documents"] for part in made) in (n_documents, 2 * n_documents)
    assert all(part["tokens"] for part in made)
    assert content(laid_out / f"data/shards/{name}") == content(laid_out / "again")


def test_the_first_tokens_of_a_corpus(laid_out, run, ranks_file, monkeypatch):  # noqa: F811
    """Are announced as such, and have a folder of their own."""
    monkeypatch.setitem(prepare.CORPORA["tinystories"], "val_fraction", 0.2)
    status, out, err = run(
        prepare, "tinystories", "--tokens", 300, "--tokenizer", ranks_file, "--workers", 1
    )
    assert status == 0 and "about 300 tokens, " in out, err
    assert "--data data/shards/tinystories-0.0003M" in out
    train, _ = manifests(laid_out / "data/shards/tinystories-0.0003M")
    assert 300 <= train["tokens"] < 600 and train["documents"] < len(TEXTS) / 2


def test_files_of_a_corpus_that_are_here(laid_out, run, ranks_file, monkeypatch):  # noqa: F811
    """Are read as those of the hub: the-stack-smol's data.json holds lines, whose text is in `content`."""
    monkeypatch.setitem(prepare.CORPORA["the-stack-smol"], "val_fraction", 0.2)
    words = ["the-stack-smol", "--tokenizer", ranks_file, "--workers", 1]
    there = []
    for i, source in enumerate(([], ["--source", "the-stack-smol"])):
        assert run(prepare, *words, *source, "--output", str(i))[0] == 0
        there.append({n: held for n, held in content(laid_out / str(i)).items() if ".npy" in n})
    assert there[0] == there[1]


def test_the_table(run):  # noqa: F811
    assert {about["preset"] for about in prepare.CORPORA.values()} <= presets.PRESETS.keys()
    refused(run(prepare), "name: is missing, the word that comes before all flags")
    refused(run(prepare, "fineweb-edu"), "the nearest is fineweb-edu-10BT")


def test_a_dataset_in_the_hubs_cache_needs_no_network(tmp_path, monkeypatch):
    place = tmp_path / "datasets--org--texts"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("abc")
    (place / "snapshots/abc").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def unreached(*_):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreached)
    assert hub.newest("org/texts") == ("abc", str(place / "snapshots/abc"))
    with pytest.raises(OSError, match="no network"):
        hub.newest("org/others")
