"""Tokenise a source of text into shards of token ids, for training and for validation.

python data/tokenize_shards.py --source stdlib --output data/shards/stdlib --tokenizer data/shards/bpe8192.tiktoken

Writes OUTPUT/train/000000.npy, ... and OUTPUT/val/000000.npy, ...: one-dimensional arrays that numpy.load reads, uint16
where that holds the vocabulary, else uint32. A document is the end-of-text token and then its text, no part of which
becomes a special token; documents continue from one shard into the next. manifest.json beside them is written last: a
folder without one is unfinished.
"""

import hashlib
import json
import os
import re
import sys
import time
import tomllib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from sources import VAL_FRACTION, Parser, dump_ranks, list_documents, read_text, split
from tqdm import tqdm

from utils import UserError, load_tokenizer, one_sentence, read_file, say, write_file

BATCH_BYTES, BATCH_DOCUMENTS = 1_000_000, 1000  # what a worker takes at once, whichever is reached first: about 0.2 s
COUNTS = ("documents", "bytes", "empty_documents", "replaced_documents")

# --- From documents to tokens -----------------------------------------------------------------------------------


def encode_text(text, encoding):
    """Token ids of a text, uint32: those of `encode_ordinary`.

    tiktoken's regular expressions give up after a million steps, which a run of that many spaces takes; a text with
    one is cut in halves until each passes.
    """
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())  # no text is special, and none is an error
    except ValueError:
        half = len(text) // 2
        return np.concatenate([encode_text(text[:half], encoding), encode_text(text[half:], encoding)])


def encode_batch(batch, encoding, dtype):
    """Documents -> (their token ids as one array of `dtype`, the four COUNTS); empty documents are left out."""
    ids, counts = [], np.zeros(len(COUNTS), np.int64)
    for document in batch:
        text, replaced = read_text(document)
        ids += [[encoding.eot_token], encode_text(text, encoding)] if text else []
        counts += bool(text), len(text.encode()), not text, replaced
    return np.concatenate([np.asarray(i, dtype) for i in [[], *ids]]), counts


def set_up_worker(*arguments):
    """Keep in the worker process what is the same for all its batches."""
    global encode_arguments
    encode_arguments = arguments


def encode_in_worker(batch):
    return encode_batch(batch, *encode_arguments)


def encode(batches, encoding, dtype, workers):
    """Yield the `encode_batch` of each batch, in order for any number of workers, with few in flight."""
    if workers == 1:
        yield from (encode_batch(batch, encoding, dtype) for batch in batches)
        return
    # not a Pool: that waits for ever when the system kills a worker
    executor = ProcessPoolExecutor(workers, get_context("spawn"), set_up_worker, (encoding, dtype))
    try:
        in_flight = deque()
        for batch in batches:
            in_flight.append(executor.submit(encode_in_worker, batch))
            if len(in_flight) > 4 * workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool:
        raise UserError(f"--workers {workers}: one was killed, as happens when memory is short; try fewer.") from None
    finally:
        executor.shutdown(cancel_futures=True)


# --- From tokens to shards --------------------------------------------------------------------------------------


def cut(documents):
    """The documents in batches."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class ShardWriter:
    """Cuts a stream of token ids into files of exactly `shard_tokens`, the last one shorter; holds one at a time."""

    def __init__(self, folder, shard_tokens, dtype):
        self.folder, self.shards, self.filled = folder, [], 0
        try:
            self.shard = np.empty(shard_tokens, dtype)
        except (MemoryError, ValueError):
            raise UserError(f"--shard_tokens {shard_tokens}: a shard must fit into memory; try fewer.") from None

    def add(self, ids):
        while len(ids):
            room = self.shard[self.filled :][: len(ids)]
            room[:] = ids[: len(room)]
            self.filled, ids = self.filled + len(room), ids[len(room) :]
            if self.filled == len(self.shard):
                self.flush()

    def flush(self):
        """Write what is there as a shard; a reader sees the whole of it or nothing."""
        if not self.filled:
            return
        name = f"{len(self.shards):06d}.npy"
        path = os.path.join(self.folder, name)
        with open(path + ".part", "w+b") as f:
            np.save(f, self.shard[: self.filled])
            f.flush()
            os.fsync(f.fileno())
            f.seek(0)
            sha256 = hashlib.file_digest(f, "sha256").hexdigest()
        os.replace(path + ".part", path)
        self.shards.append({"name": name, "tokens": self.filled, "sha256": sha256})
        self.filled = 0


# --- The output folder ------------------------------------------------------------------------------------------


def is_finished(output, splits, settings):
    """Whether the shards that these settings make are all there. Raises UserError where there are those of others."""
    finished = True
    for name in ("train", "val"):
        folder = os.path.join(output, name)
        manifest = json.loads(read_file(os.path.join(folder, "manifest.json")) or "{}")
        differ = [f"{k} was {manifest.get(k)} and is now {v}" for k, v in settings.items() if manifest.get(k) != v]
        if manifest and differ:
            raise UserError(f"--output {output}: {name} holds shards of other settings ({', '.join(differ)}); give "
                            f"another folder, or delete this one.")  # fmt: skip
        there = manifest and all(os.path.isfile(os.path.join(folder, s["name"])) for s in manifest["shards"])
        finished &= bool(there) or name not in splits
    return finished


def clear(folder):
    """Make the folder, and remove what an interrupted run left in it: the manifest first, it vouches for the rest."""
    os.makedirs(folder, exist_ok=True)
    ours = [name for name in os.listdir(folder) if re.fullmatch(r"(manifest\.json|\d{6,}\.npy)(\.part)?", name)]
    for name in sorted(ours, key=lambda name: name != "manifest.json"):
        os.remove(os.path.join(folder, name))


def version():
    """This repository's version, or "unknown" where its pyproject.toml did not come along."""
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    return tomllib.loads(path.read_text())["project"]["version"] if path.is_file() else "unknown"


def write_split(folder, documents, results, shard_tokens, dtype, bar):
    """Write the shards of one split from the results of its batches; returns its part of the manifest."""
    writer, totals, tokens, start = ShardWriter(folder, shard_tokens, dtype), 0, 0, time.monotonic()
    bar.set_description(os.path.basename(folder))
    for batch in cut(documents):
        ids, counts = next(results)
        writer.add(ids)
        totals, tokens = totals + counts, tokens + len(ids)
        speed = tokens / (time.monotonic() - start)
        bar.set_postfix_str(f"{totals[0]:,} documents, {speed / 1e6:.2f}M tokens/s", refresh=False)
        bar.update(sum(d.size for d in batch))
    writer.flush()
    return {"tokens": tokens, **dict(zip(COUNTS, totals.tolist(), strict=True)), "shards": writer.shards}


def write(args, splits, encoding, ranks, settings):
    """Write every split, its manifest last; returns a summary in words."""
    for name in ("train", "val"):
        clear(os.path.join(args.output, name))
    is_file = args.tokenizer.endswith(".tiktoken")
    if is_file:
        write_file(os.path.join(args.output, "tokenizer.tiktoken"), ranks)
    dtype, words = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32), []
    settings = settings | {"tokenizer": "tokenizer.tiktoken" if is_file else args.tokenizer, "dtype": dtype.name}
    results = encode((batch for part in splits.values() for batch in cut(part)), encoding, dtype, args.workers)
    # disable=None: the bar is for a terminal only
    with tqdm(total=sum(d.size for p in splits.values() for d in p), unit="B", unit_scale=True, disable=None) as bar:
        for name, part in splits.items():
            folder = os.path.join(args.output, name)
            written = write_split(folder, part, results, args.shard_tokens, dtype, bar)
            manifest = {"version": version(), **settings, **written}
            write_file(os.path.join(folder, "manifest.json"), json.dumps(manifest, indent=1) + "\n")
            words.append(f"{name} {written['tokens']:,} tokens of {written['documents']:,} documents")
    return ", ".join(words)


# --- The program ------------------------------------------------------------------------------------------------


def parse():
    """The command line, checked. Raises UserError."""
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, help="folder to write train/ and val/ into")
    parser.add_argument("--tokenizer", required=True, help="tiktoken's name of an encoding (gpt2, cl100k_base, ...) "
                        "or a .tiktoken file of ranks, which is then copied to OUTPUT/tokenizer.tiktoken")  # fmt: skip
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard; memory holds one")
    parser.add_argument("--val_fraction", type=float, default=VAL_FRACTION, help="share of the documents that goes to "
                        "val/, from 0 to below 1: those whose relative paths hash lowest")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; the shards do not depend on it")
    args = parser.parse_args()
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction}: must be at least 0 and below 1.")
    for flag in ("shard_tokens", "workers"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: must be at least 1.")
    if args.source != "stdlib" and Path(args.output).resolve().is_relative_to(Path(args.source).resolve()):
        raise UserError(f"--output {args.output}: must not lie in --source {args.source}, whose files are documents.")
    return args


def main():
    args, start = parse(), time.monotonic()
    documents = list_documents(args.source)
    splits = dict(zip(("train", "val"), split(documents, args.val_fraction), strict=True))
    splits = {name: part for name, part in splits.items() if part}
    for name, part in splits.items():
        if not any(d.size for d in part):
            raise UserError(f"--val_fraction {args.val_fraction}: all files for {name} would be empty, {len(part)} of "
                            f"{len(documents)}; 0 makes no val.")  # fmt: skip
    encoding = load_tokenizer(args.tokenizer)
    ranks = dump_ranks(encoding._mergeable_ranks)
    listing = "".join(f"{d.name}\0{d.size}\0" for d in documents)
    settings = {
        "source": args.source if args.source == "stdlib" else os.path.abspath(args.source),
        # names and sizes, quick to compare: another Python has another stdlib, and folders change
        "source_listing_sha256": hashlib.sha256(os.fsencode(listing)).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(ranks).hexdigest(),
        "vocab_size": encoding.n_vocab,
        "shard_tokens": args.shard_tokens,
        "val_fraction": args.val_fraction,
    }
    try:
        if is_finished(args.output, splits, settings):
            say(f"{args.output}: these shards are there already, nothing to do")
            return
        words = write(args, splits, encoding, ranks, settings)
    except OSError as e:
        raise UserError(f"--output {args.output}: cannot be used ({e}).") from None
    n_bytes = sum(d.size for d in documents)
    say(f"{args.output}: {words}; {n_bytes / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    one_sentence(main)
