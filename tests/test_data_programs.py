"""The programs in data/: shards against a plain loop, however a run is cut, killed, interrupted or disturbed."""

import gzip
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import unicodedata
from collections import Counter

import fsspec
import numpy as np
import pytest
from data_helpers import (
    HOSTILE,
    RECORDS,
    check,
    content,
    make_texts,
    manifests,
    reference,
    refused,
    some_texts,
    tokenize_flags,
    validates,
    write,
    write_files,
)
from helpers import BYTE_RANKS, ROOT, in_session, refusal, wait_for, without_pulse
from tiktoken_ext import openai_public
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

import data.encoding
import data.output
import data.workers
from data import splits, tokenize_shards, train_tokenizer
from data.command_line import Source as Options
from data.sources import files as source_files
from data.sources import text as source_text
from data.sources.base import Source
from data.sources.files import stdlib_documents
from data.sources.formats import open_source
from runtime import files
from shards import manifest, published, tokenization

HOSTILE_FILES = {
    "specials.txt": b"<|endoftext|><|endoftext|> <|fim_prefix|>x<|im_start|>",
    "empty.txt": b"",
    "nested/deeper/empty": b"",
    "invalid.bin": b"\xff\xfe latin \xe9t\xe9, half a character: \xf0\x9f\x98"
    + b" and plain words" * 3,
    "emoji.md": "👩‍👩‍👧‍👦 naïve 한국어 العربية 𝔘𝔫𝔦 é\u200b\ufeff".encode(),
    "replacement character.txt": "legal: \ufffd".encode(),
    "nul.txt": b"\0a\0\0b\0" + b" and plain words" * 5,
    "nested/line ends.txt": b"a\r\nb\rc\n\n\n  d\t \n   ",
    "bom.txt": b"\xef\xbb\xbfwith a mark",
    "utf-16.txt": "\ufeffnaïve text of Windows".encode("utf-16-le"),
    "big-endian.txt": "\ufeffand of others".encode("utf-16-be"),
    "latin-1.txt": "déjà vu, en un mot comme en cent".encode("latin-1"),
    "zipped.txt.gz": gzip.compress(b"not much"),
}
HIDDEN = {".hidden.txt": b"not a document", ".git/config": b"nor this", "nested/.cache/x": b"no"}


# --- Sources and shards -----------------------------------------------------------------------------------------


def remove(at):
    fs, path = fsspec.core.url_to_fs(at)
    fs.rm_file(path)


# --- Programs ---------------------------------------------------------------------------------------------------


# --- Shards -----------------------------------------------------------------------------------------------------


MADE = [("", "trained", 97, 0.1), ("", "gpt2", 10**8, 0.5), (".jsonl", "cl100k_base", 1000, 0.3)]
MADE += [(kind, "trained", 1000, 0.1) for kind in RECORDS]


@pytest.mark.parametrize("kind, name, shard_tokens, val_fraction", MADE)
def test_shards_equal_a_plain_loop(
    tokenize, tmp_path, ranks_file, named_tokenizers, kind, name, shard_tokens, val_fraction
):
    (tmp_path / "in").mkdir()
    if not kind:
        plain = {f"p/{i:02d}.txt": text.encode() for i, text in enumerate(some_texts(30))}
        files = plain | HOSTILE_FILES
        write_files(tmp_path / "in", files | HIDDEN)
        wide = {"utf-16.txt": "utf-16", "big-endian.txt": "utf-16"}
        files["zipped.txt.gz"] = b"not much"
        texts = [files[n].decode(wide.get(n, "utf-8-sig"), "replace") for n in sorted(files)]
        words = ["latin-1.txt is not UTF-8: 2 char", "7 characters of 2 doc"]
    else:
        texts = make_texts(60, lone=kind != ".parquet")
        for i, (a, b) in enumerate([(0, 11), (11, 40), (40, 60)]):
            write(tmp_path / "in" / f"{i}{kind}", texts[a:b])
        words = ["4 characters of 3 documents became U+FFFD"] * (kind != ".parquet")
    source = f"in/[0-9]{kind}" if kind in (".jsonl", ".parquet") else "in"
    tokenizer = str(ranks_file) if name == "trained" else name
    more = ["--shard_tokens", shard_tokens, "--val_fraction", val_fraction]
    status, out, err = tokenize(source, "out", "--tokenizer", tokenizer, *more)
    assert (status, out.count("\n")) == (0, 1) and all(word in err for word in words), err
    encoding = tokenization.load_tokenizer(tokenizer)
    expected = reference(texts, encoding, val_fraction)
    check(tmp_path / "out", expected, encoding, shard_tokens)
    if kind:
        for (_, counts), about in zip(expected.values(), manifests(tmp_path / "out")):
            assert about["replaced_characters"] == counts[3]
    made = manifests(tmp_path / "out")[0]
    assert (made["shard_tokens"], made["val_fraction"]) == (shard_tokens, val_fraction)
    assert made["tokenizer"] == ("tokenizer.tiktoken" if name == "trained" else name)
    if name == "trained":  # the hash is that of the file of ranks
        ranks = (tmp_path / "out/tokenizer.tiktoken").read_bytes()
        assert ranks == ranks_file.read_bytes()
        assert made["tokenizer_sha256"] == hashlib.sha256(ranks).hexdigest()


def test_a_run_of_spaces_beyond_what_tiktoken_takes(ranks_file):
    """Text comes back whole, where `encode_ordinary` itself panics, and is the same where it does not."""
    encoding = tokenization.load_tokenizer(str(ranks_file))
    for text in ("def f():" + " " * 1_200_000 + "return 1", "def f():" + " " * 1000 + "return 1"):
        assert encoding.decode(data.encoding.encode_text(text, encoding)) == text
    assert data.encoding.encode_text(text, encoding).tolist() == encoding.encode_ordinary(text)


def test_texts_are_cut_where_no_token_changes(ranks_file, named_tokenizers):
    """For every pattern: at `CUT`s, which validation of few documents and `encode_text` use."""
    text = " ".join(some_texts(3)) + " a b" * 30 + "  c d\n e f"
    for name in (str(ranks_file), "gpt2", "cl100k_base"):
        encoding = tokenization.load_tokenizer(name)
        cuts = [0, *(m.end() for m in tokenization.CUT.finditer(text)), len(text)]
        parts = [encoding.encode_ordinary(text[a:b]) for a, b in zip(cuts, cuts[1:])]
        assert len(parts) > 50 and sum(parts, []) == encoding.encode_ordinary(text)


def test_shards_whose_manifest_says_less_are_there(tokenize, tmp_path):
    write(tmp_path / "in.jsonl", some_texts(40))
    assert tokenize("in.jsonl")[0] == 0
    for made, split in zip(manifests(tmp_path / "out"), splits.SPLITS):
        assert made.pop("end_of_text") == 320 and made.pop("tokens_wanted") == 0
        (tmp_path / "out" / split / manifest.NAME).write_text(manifest.dump(made))
    status, out, _ = tokenize("in.jsonl")
    assert status == 0 and "nothing to do" in out
    (tmp_path / "out/train" / manifest.NAME).write_text(manifest.dump(made | {"end_of_text": 7}))
    refused(tokenize("in.jsonl"), "end_of_text was 7 and is now 320")


# --- Killed, and what others made -------------------------------------------------------------------------------

CASES = [  # (kind of source, texts, flags)
    ("", some_texts(3) + some_texts(1), ["--shard_tokens", 50]),  # few: their ends validate
    (".parquet", [*some_texts(60), *some_texts(9)], ["--val_fraction", 0.3, "--drop_duplicates"]),
    (".txt", make_texts(40, False)[8:], ["--val_fraction", 0.3]),  # long, so read in parts
]


def saved(save, *args, **arrays):
    """What np.save or np.savez would write."""
    file = io.BytesIO()
    save(file, *args, **arrays)
    return file.getvalue()


SHARD = saved(np.save, np.arange(9, dtype=np.uint16))


@pytest.fixture(params=["local", "remote"])
def output(request, tmp_path):
    """A local folder and an address to write shards to."""
    yield str(tmp_path / "out") if request.param == "local" else "memory://others/out"
    fs = fsspec.filesystem("memory")
    if fs.exists("/others"):
        fs.rm("/others", recursive=True)


@pytest.mark.parametrize("kind, texts, more", CASES, ids=[kind or "folder" for kind, *_ in CASES])
def test_killed_at_every_write(tokenize, writes, output, tmp_path, monkeypatch, kind, texts, more):
    """A run that dies at its n-th write, for every n, resumes to the same files. A file that it did not make and that
    has the name of one of its own, or of any further one, is refused by then, and stays."""
    monkeypatch.setattr(source_text, "LONGEST", 6000)
    monkeypatch.setattr(source_files, "PART", 600)
    write(tmp_path / f"in{kind}", texts)

    def run_to(at, *flags):
        return tokenize(f"in{kind}", f"{output}/{at}", *more, *flags)

    assert run_to("whole")[0] == 0
    n, whole = len(writes), content(f"{output}/whole")
    assert n > 8
    if kind != ".txt" and "://" not in output:
        assert run_to("two", "--workers", 2)[0] == 0 and content(f"{output}/two") == whole
    for i in range(1, n + 1):
        writes.killed(i, lambda: run_to(i))
        shards = [name for name in whole if name.endswith(".npy")]
        for name in [*shards[i % 2 :: 2], "train/000099.npy"] if i > 1 else []:
            if name not in content(f"{output}/{i}"):
                files.write_file(f"{output}/{i}/{name}", SHARD)
                refused(run_to(i), f"{i}/{name}")
                assert content(f"{output}/{i}")[name] == SHARD
                remove(f"{output}/{i}/{name}")
        writes.clear()
        assert run_to(i)[0] == 0
        assert len(writes) <= n - i + 6  # what came before the last progress is not written again
        assert content(f"{output}/{i}") == whole


def tokens_of(output, split):
    """All token ids of a split."""
    return np.concatenate([np.load(path) for path in sorted((output / split).glob("*.npy"))])


@pytest.mark.parametrize("kind, texts, more", CASES[:2], ids=["folder", CASES[1][0]])
def test_the_first_tokens_of_a_source(tokenize, writes, tmp_path, monkeypatch, kind, texts, more):
    """Are the same for any number of workers and after any kill: whole documents, up to the one that makes them
    enough, and the beginning of what the whole source would give."""
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 5)
    write(tmp_path / f"in{kind}", texts)
    source = f"in{kind}"
    assert tokenize(source, "whole", *more)[0] == 0
    whole = [tokens_of(tmp_path / "whole", split) for split in ("train", "val")]
    wanted = len(whole[0]) // 3
    more = [*more, "--tokens", wanted]
    writes.clear()
    assert tokenize(source, "some", *more)[0] == 0
    n, some = len(writes), content(tmp_path / "some")
    part = [tokens_of(tmp_path / "some", split) for split in ("train", "val")]
    assert wanted <= len(part[0]) < 2 * wanted and len(part[1])
    for ids, more_ids in zip(part, whole):
        assert (ids == more_ids[: len(ids)]).all()
        # the next document begins there
        assert len(ids) == len(more_ids) or more_ids[len(ids)] == ids[0]
    assert tokenize(source, "two", *more, "--workers", 2)[0] == 0
    assert content(tmp_path / "two") == some
    for i in range(1, n + 1, 3):
        writes.killed(i, lambda: tokenize(source, f"{i}", *more))
        assert tokenize(source, f"{i}", *more)[0] == 0 and content(tmp_path / f"{i}") == some
    refused(tokenize(source, "some", *more[:-1], wanted + 1), "tokens_wanted was")
    status, out, _ = tokenize(source, "some", *more)
    assert status == 0 and "nothing to do" in out


SOME_STATE = saved(np.savez, state=np.frombuffer(b'{"settings": 1}', np.uint8))
OF_OTHERS = [  # (name, content) of files that a run would replace, or that readers would take for its own
    ("train/000000.npy", SHARD),
    ("train/000003.npy", SHARD),
    ("val/embedding.npy", b""),
    ("train/manifest.json", b'{"name": "an app"}'),
    ("val/manifest.json", b""),
    ("progress.npz", SOME_STATE),
    ("progress.npz", b"notes"),
    ("tokenizer.tiktoken", b"YQ== 0\n"),
    ("lock", b"notes"),
]
HARMLESS = ["train/keep.txt", "train/000000.npy.part", "progress.npz.part", "train/in/000000.npy"]


def test_what_others_made_stays(tokenize, output, tmp_path):
    """A run refuses a folder where it would be in the way, and only there."""
    write(tmp_path / "in", some_texts(20))
    for i, (name, held) in enumerate(OF_OTHERS):
        files.write_file(f"{output}/{i}/{name}", held)
        # without validation, val/ is nothing that a run may replace either
        for fraction in (0.1, 0):
            ended = tokenize("in", f"{output}/{i}", "--val_fraction", fraction)
            refused(ended, name, f"{output}/{i}")
            assert content(f"{output}/{i}") == {name: held}
    for name in HARMLESS:
        files.write_file(f"{output}/{name}", b"mine")
    assert tokenize("in", output)[0] == 0
    made = content(output)
    assert all(made[name] == b"mine" for name in HARMLESS) and "progress.npz" not in made


def test_another_start_after_a_kill(tokenize, writes, output, tmp_path):
    """Before it wrote a shard a run holds nothing back; then other settings are refused, and so is a lost shard."""
    write(tmp_path / "a.jsonl", make_texts(40))
    writes.killed(2, lambda: tokenize("a.jsonl", output))
    assert "progress.npz" in content(output)
    flags = ["a.jsonl", output, "--shard_tokens"]
    writes.killed(9, lambda: tokenize(*flags, 500))
    refused(tokenize(*flags, 999), "shard_tokens was 500 and is now 999")
    remove(f"{output}/train/000000.npy")
    refused(tokenize(*flags, 500), "train/000000.npy is missing")


def test_running_again(tokenize, named_tokenizers, tmp_path):
    """Finished shards are left alone; those of other settings or sources, or damaged ones, are refused and stay."""
    write(tmp_path / "in", some_texts(40))
    assert tokenize("in")[0] == 0
    status, out, err = tokenize("in")
    assert (status, err) == (0, "") and "nothing to do" in out
    files = content(tmp_path / "out")
    shutil.copytree("in", "other")
    write_files(tmp_path, {"other/one more.txt": b"text"})
    changes = {"shard_tokens": 999, "val_fraction": 0.2, "tokenizer": "gpt2", "source": "other"}
    for flag, value in changes.items():
        refused(tokenize("in", "out", f"--{flag}", value), "out", flag)
    for name in ("train/000001.npy", "train/000000.npy"):
        path = tmp_path / "out" / name
        path.write_bytes(b"torn") if "000000" in name else path.unlink()
        left = content(tmp_path / "out")
        refused(tokenize("in"), f"out/{name}")
        assert content(tmp_path / "out") == left
        path.write_bytes(files[name])


# --- Processes --------------------------------------------------------------------------------------------------


def killing(monkeypatch, victim):
    """Let victim(), a worker, be killed after the third batch."""
    encode = tokenize_shards.encode_batches

    def killing(*args):
        for n, result in enumerate(encode(*args)):
            if n == 2:
                victim().kill()
            yield result

    monkeypatch.setattr(tokenize_shards, "encode_batches", killing)


def test_a_worker_is_killed(tokenize, tmp_path, monkeypatch):
    """A sentence, and the next run resumes."""
    write(tmp_path / "a.jsonl", make_texts(100))
    assert tokenize("a.jsonl", "whole")[0] == 0
    with monkeypatch.context() as patch:
        killing(patch, lambda: multiprocessing.active_children()[0])
        patch.setattr(data.workers, "IN_FLIGHT", 0)  # one batch after the other
        refused(tokenize("a.jsonl", "out", "--workers", 2), "--workers 2: one was killed")
    assert tokenize("a.jsonl", "out", "--workers", 2)[0] == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_tokenizing_is_interrupted(ranks_file, tokenize, tmp_path, number):
    """Two workers encode: one line that says what to do, and no process stays. Until then another run of the folder is
    refused."""
    write(tmp_path / "a.jsonl", make_texts(400, lone=False) * 80)
    more = ["--workers", 2, "--shard_tokens", 99_999]
    flags = tokenize_flags(tmp_path / "a.jsonl", tmp_path / "out", ranks_file, *more)
    program = [sys.executable, tokenize_shards.__file__, *map(str, flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(program, **pipes, start_new_session=True)
    wait_for((tmp_path / "out/train/000000.npy").exists, 600)
    refused(tokenize("a.jsonl", tmp_path / "out", *more), f"process {process.pid} on", status=75)
    os.killpg(process.pid, number)  # as a terminal does
    out, err = process.communicate(timeout=600)
    assert (process.returncode, without_pulse(out)) == (128 + number, "")
    assert err.count("\n") == 1, err
    assert err.startswith("interrupted; ") and "rerun the same command to resume" in err, err
    assert not (tmp_path / "out/lock").exists()
    wait_for(lambda: not in_session(process.pid))  # what was killed takes a moment to go


def test_a_bucket_that_fails(tokenize, writes, tmp_path, monkeypatch, bucket):
    """Every third request fails, the first run is killed: the bucket holds the bytes of a local run."""
    address, fs, proxy = bucket
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 100)
    write(tmp_path / "a.jsonl", make_texts(250))
    more = ["--shard_tokens", 30_000, "--val_fraction", 0]
    assert tokenize("a.jsonl", "local", *more)[0] == 0
    writes.killed(4, lambda: tokenize("a.jsonl", address, *more))
    assert tokenize("a.jsonl", address, *more)[0] == 0 and proxy.failed > 5
    fs.invalidate_cache()
    folder = address.split("://")[1]
    there = {path.removeprefix(f"{folder}/"): fs.cat_file(path) for path in fs.find(folder)}
    assert there == content(tmp_path / "local")


def test_ray_with_a_worker_killed(tokenize, tmp_path, monkeypatch):
    """The bytes of a single process, although a worker is lost on the way. Without ray a sentence says so."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    import psutil  # which Ray brings along

    write(tmp_path / "a.jsonl", make_texts(2000))
    monkeypatch.setattr(data.workers, "BATCH_DOCUMENTS", 20)
    assert tokenize("a.jsonl", "one")[0] == 0

    def victim():
        children = psutil.Process().children(recursive=True)
        return next(child for child in children if child.name()[:12] == "ray::Encoder")

    killing(monkeypatch, victim)
    assert tokenize("a.jsonl", "ray", "--ray", "--workers", 2)[0] == 0 and not ray.is_initialized()
    assert content(tmp_path / "one") == content(tmp_path / "ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(tokenize("a.jsonl", "out", "--ray"), "pip install ray")


def test_training(run, tmp_path):
    """The same ranks on each run, as many as asked, from the training part alone; no other file is replaced."""
    write(tmp_path / "in", some_texts(60))
    held_out = [p for p in (tmp_path / "in").iterdir() if validates(p.read_text(), 0.1)]
    assert held_out
    path = tmp_path / "x.tiktoken"
    flags = ["--source", tmp_path / "in", "--vocab_size", 280, "--output", path]
    written = []
    for i in range(2):
        status, out, err = run(train_tokenizer, *flags)
        assert (status, err, out.count("\n")) == (0, "", 1) and "280 tokens" in out
        written.append(path.read_bytes())
        for k, held in enumerate(held_out):
            others = (f"zyzzyva {k} {n} " * 30 for n in range(10**6))
            text = next(text for text in others if validates(text, 0.1))
            held.write_text(text)
    assert written[0] == written[1]
    encoding = tokenization.load_tokenizer(str(path))
    assert (encoding.n_vocab, encoding.eot_token) == (280, 279)
    asked = [
        "--source",
        tmp_path / "in",
        "--vocab_size",
        100_000,
        "--output",
        tmp_path / "y.tiktoken",
    ]
    status, out, _ = run(train_tokenizer, *asked)
    assert status == 0 and "which is all that the text yields of 100000" in out
    path.write_bytes(b"notes")
    refused(run(train_tokenizer, *flags), f"--output {path}: is there")
    assert path.read_bytes() == b"notes"


@pytest.mark.parametrize("kind", ["", ".jsonl"])
def test_the_sample_to_train_on_is_measured_in_bytes(tmp_path, monkeypatch, kind):
    """Of files and of records, whatever the script; no character is cut in two."""
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 10_000)
    texts = [f"{i} " + letter * 4000 for i, letter in enumerate("aé中😀" * 5)]
    write(tmp_path / f"in{kind}", texts)
    source = open_source(Options(str(tmp_path / f"in{kind}"), text_column="body"))
    read = []
    monkeypatch.setattr(
        source, "read", lambda at, all=source.read: (read.append(d) or d for d in all(at))
    )
    sampled = train_tokenizer.sample(source)
    assert 9_990 < sum(len(text.encode()) for text in sampled) <= 10_000
    assert all(any(text.startswith(part) for text in texts) for part in sampled)
    if kind:  # no more records are read than that takes, the second time: the first one chose the validation
        assert sum(len(d.text.encode()) for d in read[len(texts) :]) < 10_000 + 16_010


def test_tiktoken_encodes_as_the_training_library(tmp_path, monkeypatch):
    """On the documents it was trained on, on others, and on hostile ones; words without end take no time."""
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 300_000)
    documents = stdlib_documents()
    names = [d.name for d in documents]
    assert names == sorted(set(names)) and {"os.py", "json/decoder.py"} <= set(names)
    assert all(n.endswith(".py") and "site-packages" not in n for n in names)
    texts = train_tokenizer.sample(Source(documents, [], False))
    assert sum(map(len, texts)) > 290_000
    trained = train_tokenizer.train([*texts, " " * 10**6 + "x" * 10**6], 1000)
    ranks = tokenization.dump_ranks(train_tokenizer.to_ranks(trained))
    (tmp_path / "x.tiktoken").write_bytes(ranks)
    encoding = tokenization.load_tokenizer(str(tmp_path / "x.tiktoken"))
    for text in [*texts, *filter(None, HOSTILE)]:
        assert trained.encode(text).ids == encoding.encode_ordinary(text)


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base"])
def test_a_published_file_of_ranks_is_read_as_its_name_says(name, tmp_path, named_tokenizers):
    """Its pattern and its end of text, however its lines end."""
    encoding = tokenization.load_tokenizer(name)
    path = tmp_path / "some.tiktoken"
    content = tokenization.dump_ranks(encoding._mergeable_ranks)
    for held in (content, content.replace(b"\n", b"\r\n")):
        path.write_bytes(held)
        of_file = tokenization.load_tokenizer(str(path))
        assert (of_file.eot_token, of_file.n_vocab) == (encoding.eot_token, encoding.n_vocab)
        assert tokenization.content_sha256(of_file) == tokenization.content_sha256(encoding)
        for text in (tokenization.PROBE, (ROOT / "model.py").read_text(), *filter(None, HOSTILE)):
            assert of_file.encode_ordinary(text) == encoding.encode_ordinary(text)


def test_the_hashes_of_tiktokens_files_are_those_of_its_package(monkeypatch):
    wanted = []
    load = "load_tiktoken_bpe"
    monkeypatch.setattr(openai_public, load, lambda _, expected_hash: wanted.append(expected_hash))
    for sha256, name in published.TIKTOKEN.items():
        openai_public.ENCODING_CONSTRUCTORS[name]()
        assert wanted.pop() == sha256
        ranks = {bytes([0]): 0}
        assert (
            published.encoding_arguments(sha256, ranks)["mergeable_ranks"] == ranks and not wanted
        )
    assert published.encoding_arguments("0" * 64, {}) is None


def test_qwens_ranks_have_its_pattern_and_special_tokens(tmp_path, monkeypatch):
    path = tmp_path / "x.tiktoken"
    path.write_bytes(tokenization.dump_ranks(BYTE_RANKS | {b"12": 256, b"(s": 257}))
    refusal(lambda: tokenization.load_tokenizer(str(path)), "comes from another program", "'(s'")
    monkeypatch.setattr(published, "QWEN", hashlib.sha256(path.read_bytes()).hexdigest())
    qwen = tokenization.load_tokenizer(str(path))
    assert (qwen.eot_token, qwen.n_vocab) == (258, 258 + 208)
    assert qwen.encode_ordinary("12(s") == [*b"12", 257]  # it cuts digits apart


def trained_with(pattern, texts):
    """The content of a file of ranks that another program trained with a pattern of its own."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenization.dump_ranks(train_tokenizer.to_ranks(tokenizer))


def test_ranks_of_another_pattern_are_refused_and_our_own_need_no_mark(tmp_path):
    texts = [document.read_text(errors="replace") for document in ROOT.glob("data/*.py")]
    texts += ["I'll, we've, they're don't: 'r 'l 'v\n\n \t x  y"] * 99 + list(filter(None, HOSTILE))
    path = tmp_path / "x.tiktoken"
    path.write_bytes(trained_with(published.QWEN_PATTERN, texts))
    said = f"--tokenizer {path}: comes from another program, and ranks do not say where that cuts"
    refusal(lambda: tokenization.load_tokenizer(str(path)), said, "tokenizer.json")
    path.write_bytes(trained_with(tokenization.PATTERN, texts))
    encoding = tokenization.load_tokenizer(str(path))
    assert (encoding.n_vocab, encoding.eot_token) == (601, 600)


def hub_tokenizer(folder, model, end, special=(), **parts):
    """The path of a tokenizer.json with this model and end of text; parts: of a tokenizers.Tokenizer."""
    tokenizer = Tokenizer(model)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in special])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder / "tokenizer.json"


def letters(*more):
    """{token: id} of the tokens `more`, then all bytes as ByteLevel spells them."""
    return {
        token: i for i, token in enumerate([*more, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }


def byte_level(folder, end, vocabulary, special=(), **how):
    parts = dict(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    return hub_tokenizer(folder, models.BPE(vocabulary, [], **how), end, special, **parts)


@pytest.mark.parametrize("kind", ["added", "a word", "a piece", "unknown"])
def test_text_that_spells_the_end_of_text_stays_text(tokenize, tmp_path, kind):
    """Where it is an added token that is not special, where the vocabulary itself holds it, and where it is what
    unknown characters become: only documents begin with it."""
    folder, end = tmp_path / "tokenizer", "</s>"
    if kind == "added":
        path = byte_level(folder, end, letters(), special=[end])
    elif kind == "a word":
        path = hub_tokenizer(folder, models.WordLevel({end: 0, "a": 1, "?": 2}, unk_token="?"), end)
    elif kind == "a piece":
        pieces = [("<unk>", 0.0), (end, 0.0), *((letter, -3.0) for letter in "a b</s>")]
        path = hub_tokenizer(folder, models.Unigram(pieces, unk_id=0), end, decoder=decoders.Fuse())
    else:
        known = letters(end)
        del known["b"]
        path = byte_level(folder, end, known, unk_token=end)
    encoding = tokenization.load_tokenizer(str(path))
    texts = [f"a {end} b{end}{end}", end, f"{end} a", "a b"]
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert encoding.eot_token not in ids
        assert kind in ("a word", "unknown") or encoding.decode(ids) == text
    write(tmp_path / "in.jsonl", texts)
    flags = ["--tokenizer", path, "--val_fraction", 0]
    assert tokenize("in.jsonl", "out", *flags, "--lossy")[0] == 0
    ids = np.load(tmp_path / "out/train/000000.npy")
    assert (ids == encoding.eot_token).sum() == len(texts)


RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. "
ENGLISH = "the quick brown fox, jumps over: lazy dogs. "
FEW_LETTERS = {letter: i for i, letter in enumerate(["</s>", "[UNK]", *sorted(set(ENGLISH))])}


def knows_english(folder, **how):
    """A tokenizer.json without the letters of other languages."""
    return hub_tokenizer(
        folder, models.BPE(FEW_LETTERS, [], **how), "</s>", decoder=decoders.Fuse()
    )


@pytest.mark.parametrize("unknown", [None, "[UNK]", "</s>"])
def test_a_tokenizer_that_loses_text_is_refused(tokenize, tmp_path, monkeypatch, unknown):
    """Above 1%, unless that is accepted, which resumes; below it is counted and said."""
    path = knows_english(tmp_path / "tokenizer", unk_token=unknown, fuse_unk=True)
    flags = ["--tokenizer", path, "--val_fraction", 0]
    write(tmp_path / "ru.jsonl", [RUSSIAN * 40] * 9)
    counted = f"--tokenizer {path}: of a sample of 2,304 characters, 1,"
    refused(tokenize("ru.jsonl", "ru", *flags), counted, "are lost", "--lossy")
    assert not (tmp_path / "ru/train/manifest.json").exists()
    status, _, err = tokenize("ru.jsonl", "ru", *flags, "--lossy")
    assert status == 0 and f"warning: {counted}" in err
    made = json.loads((tmp_path / "ru/train/manifest.json").read_text())
    assert made["sampled_characters"] == 2304 and 1800 < made["lost_characters"] < 2000
    write(tmp_path / "en.jsonl", [ENGLISH * 9, "é" + ENGLISH * 9])
    status, _, err = tokenize("en.jsonl", "en", *flags)
    assert status == 0 and "of a sample of 512 characters, 1 (0.20%) are lost" in err
    monkeypatch.setattr(tokenize_shards, "EARLY", 1000)  # 4 documents, of 3 a batch
    write(tmp_path / "begins.jsonl", [RUSSIAN * 40] * 9 + [ENGLISH] * 10_000)
    refused(tokenize("begins.jsonl", "begins", *flags), "of a sample of 1,536 characters, 1,")


NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKD": normalizers.NFKD(),
    "strip": normalizers.Strip(),
    "prefix": normalizers.Prepend("x"),
    "lowercase": normalizers.Lowercase(),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_what_a_normalizer_changes_is_lost_where_it_cannot_be_read_back(tmp_path, name):
    path = byte_level(tmp_path / "t", "</s>", letters("</s>"))
    plain = tokenization.load_tokenizer(str(path))
    text = "  Ein e\u0301te\u0301, ﬁve; ½ …\r\n\tx\n"
    wanted = Counter(sampled_characters=len(unicodedata.normalize("NFKC", text).strip()))
    assert +data.encoding.count_lost(text, plain) == wanted
    plain.tokenizer.normalizer = NORMALIZERS[name]
    lost = dict(lowercase=1, accents=2).get(name, 0)
    assert +data.encoding.count_lost(text, plain) == wanted + Counter(lost_characters=lost)


def test_spaces_that_a_tokenizer_makes_alike_are_no_lost_text(tmp_path):
    """Metaspace writes one before the text; what it cuts at is whitespace of any kind, which is counted apart."""
    vocabulary = {letter: i for i, letter in enumerate(["</s>", *"▁abc"])}
    parts = dict(decoder=decoders.Metaspace(), pre_tokenizer=pre_tokenizers.Metaspace())
    path = hub_tokenizer(tmp_path / "a", models.BPE(vocabulary, []), "</s>", **parts)
    kept = data.encoding.count_lost("a b  c", tokenization.load_tokenizer(str(path)))
    assert +kept == Counter(sampled_characters=6)
    cuts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    parts["pre_tokenizer"] = pre_tokenizers.Sequence(cuts)
    path = hub_tokenizer(tmp_path / "b", models.BPE(vocabulary, []), "</s>", **parts)
    cut = data.encoding.count_lost("a b\nc\n  a", tokenization.load_tokenizer(str(path)))
    assert +cut == Counter(sampled_characters=9, lost_whitespace=2)


# --- Errors -----------------------------------------------------------------------------------------------------

BAD_FLAGS = [("source", "/no/such/folder"), ("source", "empty"), ("tokenizer", "gpt99")]
BAD_FLAGS += [("tokenizer", "missing.tiktoken"), ("val_fraction", "1"), ("output", "in/shards")]
BAD_FLAGS += [("shard_tokens", "10000000000000000"), ("output", "a file")]
BAD_TRAINING = [("vocab_size", "256"), ("output", "ranks.txt")]
BAD_TRAINING += [("source", "empty"), ("output", "a file/x.tiktoken")]


@pytest.mark.parametrize(
    "program, flag, value",
    [(tokenize_shards, *bad) for bad in BAD_FLAGS] + [(train_tokenizer, *b) for b in BAD_TRAINING],
)
def test_bad_flags(ranks_file, run, tmp_path, program, flag, value):
    write_files(tmp_path, {"in/a.txt": b"text", "empty/a.txt": b"", "a file": b""})
    flags = {"source": "in", "output": "out", "tokenizer": str(ranks_file), "workers": "1"}
    if program is train_tokenizer:
        flags = {"source": "in", "output": "out.tiktoken", "vocab_size": "258"}
    words = [f"--{k}={v}" for k, v in (flags | {flag: value}).items()]
    err = refused(run(program, *words), f"--{flag}")
    assert value.replace("00", "") in err.replace("00", "")
    assert {p.name for p in tmp_path.iterdir()} <= {"in", "empty", "a file", "out"}
