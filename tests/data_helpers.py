"""Texts in files of many kinds, and the shards that the programs of data/ make of them."""

import gzip
import hashlib
import json
import random
import zlib
from functools import partial

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import data.workers
from data import splits

HOSTILE = ["<|endoftext|> <|fim_prefix|>x", "", None, "\0a\0\0b\0", " " * 3000]
HOSTILE += ["👩‍👩‍👧‍👦 naïve 한국어 é\u200b\ufeff", "a\r\nb\u2028c\x85", "legal: \ufffd"]
LONE = ["\ud83d half of an emoji", "the other half \ude00", "\udfff\ud800 swapped"]
WORDS = "def return the quick brown fox self. jumps over\n    lazy dogs, 1234 == '' {} ü".split(" ")
ZSTD = partial(pa.Codec("zstd").compress, asbytes=True)
COMPRESS = {".gz": gzip.compress, ".zst": ZSTD}
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


def make_texts(n, lone=True):
    """n texts, the hostile ones among them."""
    rng, hostile = random.Random(1), HOSTILE + LONE * lone
    plain = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 300))) for _ in range(n - len(hostile))]
    return hostile + plain


def some_texts(n):
    rng, words = random.Random(3), [word for word in WORDS if word.isalpha()]
    return [" ".join(rng.choices(words, k=50)) for _ in range(n)]


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write(path, texts):
    """A file of records as its ending says, one long text, or a folder of text files."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(texts)), "body": texts}), path, row_group_size=7)
    elif path.suffix == ".txt":
        path.write_text("\n".join(texts))
    elif path.suffix:  # lines, in two frames where they are compressed
        lines = [json.dumps({"id": i, "body": t}).encode() + b"\n" for i, t in enumerate(texts)]
        half, compress = len(lines) // 2, COMPRESS.get(path.suffix, bytes)
        frames = b"".join(lines[:half]), b"\n" + b"".join(lines[half:])
        path.write_bytes(b"".join(map(compress, frames)))
    else:
        write_files(path, {f"{i:03d}.txt": (text or "").encode() for i, text in enumerate(texts)})


def validates(text, val_fraction):
    """Whether a document of this text is for validation."""
    text_hash = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return int(text_hash, 16) < val_fraction * 2**64


def reference(texts, encoding, val_fraction):
    """What the shards must hold, by the plainest loop: {split: (token ids, [documents, bytes, empty ones, halves])}."""
    result = {"train": ([], [0] * 4), "val": ([], [0] * 4)}
    for text in texts:
        lone = sum(0xD800 <= ord(c) <= 0xDFFF for c in text or "")
        text = "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in text or "")
        ids, counts = result["val" if validates(text, val_fraction) else "train"]
        if text:
            ids += [encoding.eot_token, *encoding.encode_ordinary(text)]
        for k, more in enumerate((text != "", len(text.encode()), text == "", lone)):
            counts[k] += more
    return result


def manifests(output):
    return [json.loads((output / split / "manifest.json").read_text()) for split in splits.SPLITS]


def check(output, expected, encoding, shard_tokens):
    """The shards and the manifests in `output` are what `reference` says."""
    for (split, (ids, counts)), made in zip(expected.items(), manifests(output)):
        files = sorted((output / split).glob("*.npy"))
        assert [f.name for f in files] == [f"{i:06d}.npy" for i in range(len(files))]
        shards = [np.load(f) for f in files]
        np.testing.assert_array_equal(np.concatenate(shards), ids)
        assert {len(s) for s in shards[:-1]} <= {shard_tokens} and len(shards[-1]) <= shard_tokens
        for about, file, shard in zip(made["shards"], files, shards, strict=True):
            held, size = file.read_bytes(), data.output.BLOCK
            blocks = [held[start : start + size] for start in range(0, len(held), size)]
            crc32 = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
            sha256 = hashlib.sha256(held).hexdigest()
            assert about == dict(name=file.name, tokens=len(shard), sha256=sha256, crc32=crc32)
            dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
            assert shard.dtype == made["dtype"] == dtype
        assert [made[k] for k in ("documents", "bytes", "empty_documents")] == counts[:3]
        assert (made["tokens"], made["vocab_size"]) == (len(ids), encoding.n_vocab)


def content(at):
    """{path: content} of all files at a local path or an address."""
    fs, root = fsspec.core.url_to_fs(str(at))
    return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}


def tokenize_flags(source, output, ranks_file, *more):
    flags = ["--source", source, "--output", output, "--tokenizer", ranks_file, "--workers", 1]
    return [*flags, "--text_column", "body", "--shard_tokens", 1000, *more]


def refused(ended, *words, status=2):
    """A run ended with this status and one sentence with these words, which is returned."""
    ended_with, out, err = ended
    assert (ended_with, err.count("error: ")) == (status, 1) and "Traceback" not in err, err
    assert "tokens of" not in out
    assert err.rstrip().endswith(".") and all(str(word) in err for word in words), (err, words)
    return err


class Killed(BaseException):
    pass
