"""Tokenise a source of text into shards of token ids, for training and for validation.

python data/tokenize_shards.py --source stdlib --output data/shards/stdlib --tokenizer data/shards/bpe8192.tiktoken

Writes OUTPUT/train/000000.npy, ... and OUTPUT/val/000000.npy, ...: one-dimensional arrays that numpy.load reads, uint16
where that holds the vocabulary, else uint32. A document is the end-of-text token and then its text, no part of which
becomes a special token; documents continue from one shard into the next. manifest.json beside them is written last: a
folder without one is unfinished, and the same command goes on from the last whole shard, as OUTPUT/progress.npz says.
"""

import hashlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
import tomllib
import zlib
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fsspec
import numpy as np
from sources import VAL_FRACTION, Parser, dump_ranks, open_source, read_text
from tqdm import tqdm

from storage import BLOCK
from tokenization import CUT, TOKENIZER_FILES, HubTokenizer, keep_tokenizer, load_tokenizer
from utils import UserError, is_remote, one_sentence, read_file, read_json, say, write_file

ROOT = Path(__file__).resolve().parents[1]
BATCH_BYTES, BATCH_DOCUMENTS = 1_000_000, 1000  # what a worker takes at once, whichever is reached first: about 0.2 s
IN_FLIGHT = 4 * BATCH_BYTES  # per worker: enough that none waits, and a bound on memory
COUNTS = ("documents", "bytes", "empty_documents", "replaced_documents")
PIECE = 1_000_000  # characters; longer texts are encoded in pieces of at least so many, where they can be cut

# --- From documents to tokens -----------------------------------------------------------------------------------


def pieces(text, encoding):
    """The text in pieces whose tokens, one after the other, are its tokens: itself where it may not be cut."""
    start, may_be_cut = 0, getattr(encoding, "may_be_cut", True)  # tiktoken's always may
    while may_be_cut and (end := CUT.search(text, start + PIECE)):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def encode_text(text, encoding):
    """Token ids of a text, uint32: those of `encode_ordinary`.

    tiktoken's regular expressions give up after a million steps, which a run of that many spaces takes; a text with
    one is cut in two, where that changes no token if it can, until each passes.
    """
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())  # no text is special, and none is an error
    except ValueError:
        half = len(text) // 2
        half = cut.end() if (cut := CUT.search(text, half)) else half
        return np.concatenate([encode_text(text[:half], encoding), encode_text(text[half:], encoding)])


def encode_batch(batch, encoding, dtype):
    """[(split, document)] -> {split: (token ids as one array of `dtype`, the four COUNTS)}; without empty documents."""
    parts = {}
    for split, document in batch:
        ids, counts = parts.setdefault(split, ([np.empty(0, dtype)], np.zeros(len(COUNTS), np.int64)))
        text, replaced = read_text(document)
        if text:
            ids.append(np.array([encoding.eot_token], dtype))
            ids += [encode_text(piece, encoding).astype(dtype) for piece in pieces(text, encoding)]
        counts += bool(text), len(text.encode()), not text, replaced
    return {split: (np.concatenate(ids), counts) for split, (ids, counts) in parts.items()}


# --- Workers ----------------------------------------------------------------------------------------------------


def set_up_worker(*arguments):
    """Keep in the worker process what is the same for all its batches, and end with the program if that is killed."""
    global encode_arguments
    encode_arguments = arguments
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def encode_in_worker(batch):
    return encode_batch(batch, *encode_arguments)


@contextmanager
def processes(encoding, dtype, workers):
    """(function that submits a batch, function that waits for its result), on this machine's processes."""
    # not a Pool: that waits for ever when the system kills a worker
    executor = ProcessPoolExecutor(workers, get_context("spawn"), set_up_worker, (encoding, dtype))
    try:
        yield partial(executor.submit, encode_in_worker), Future.result
    except BrokenProcessPool:
        raise UserError(f"--workers {workers}: one was killed, as happens when memory is short; try fewer.") from None
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def ray_actors(encoding, dtype, workers):
    """The same on a Ray cluster, or on one that Ray starts here; what a lost worker had to do is done again."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray: the package ray is not installed; pip install ray does that.") from None

    class Encoder:
        def encode(self, batch):
            return encode_batch(batch, encoding, dtype)

    def result(reference):
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as e:
            raise e.cause from None

    # the cluster's other machines have this repository, and tiktoken's ranks, where this one has them
    names = ("PYTHONPATH", "TIKTOKEN_CACHE_DIR")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "data"), environment.get("PYTHONPATH", "")])
    ray.init(runtime_env={"env_vars": environment}, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actor = ray.remote(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")(Encoder)
        actors = deque(actor.remote() for _ in range(workers))

        def submit(batch):
            actors.rotate()
            return actors[0].encode.remote(batch)

        yield submit, result
    finally:
        ray.shutdown()


def encode(batches, encoding, dtype, workers, start):
    """Yield (`encode_batch` of a batch, position after it) for each (batch, position), in order for any `workers`.

    start: None for this process, or `processes` or `ray_actors`. IN_FLIGHT bytes per worker are underway at most,
    or one batch where a document alone has more.
    """
    if not start:
        yield from ((encode_batch(batch, encoding, dtype), position) for batch, position in batches)
        return
    with start(encoding, dtype, workers) as (submit, result):
        underway, size = deque(), 0

        def oldest():
            nonlocal size
            future, position, its_size = underway.popleft()
            size -= its_size
            return result(future), position

        for batch, position in batches:
            its_size = size_of(batch)
            while underway and (size + its_size > IN_FLIGHT * workers or len(underway) >= 4 * workers):
                yield oldest()
            underway.append((submit(batch), position, its_size))
            size += its_size
        while underway:
            yield oldest()


def size_of(batch):
    return sum(document.size for _, document in batch)


def cut(source, position):
    """Yield (batch, position after it): the (split, document) pairs of the source from `position` on, in batches."""
    batch, size = [], 0
    for item in source.read(position):
        batch.append(item)
        size += item[1].size
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch, source.position
            batch, size = [], 0
    if batch:
        yield batch, source.position


# --- From tokens to shards --------------------------------------------------------------------------------------


@contextmanager
def new_file(path):
    """A binary file to write and read, which becomes `path`, local or remote, when all is written: whole or not."""
    with tempfile.TemporaryDirectory() as folder:
        part = os.path.join(folder, "part") if is_remote(path) else path + ".part"
        with open(part, "w+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        if is_remote(path):  # an object appears whole when its upload ends
            fs, there = fsspec.core.url_to_fs(path)
            fs.put_file(part, there)
        else:
            os.replace(part, path)


class ShardWriter:
    """Cuts a stream of token ids into files of exactly `shard_tokens`, the last one shorter; holds one at a time."""

    def __init__(self, folder, shard_tokens, dtype):
        self.folder, self.shards, self.filled, self.totals = folder, [], 0, np.zeros(len(COUNTS), np.int64)
        try:
            self.shard = np.empty(shard_tokens, dtype)
        except (MemoryError, ValueError):
            raise UserError(f"--shard_tokens {shard_tokens}: a shard must fit into memory; try fewer.") from None

    def add(self, ids, counts):
        """Take token ids and their COUNTS; whether this filled a shard."""
        self.totals += counts
        before = len(self.shards)
        while len(ids):
            room = self.shard[self.filled :][: len(ids)]
            room[:] = ids[: len(room)]
            self.filled, ids = self.filled + len(room), ids[len(room) :]
            if self.filled == len(self.shard):
                self.flush()
        return len(self.shards) > before

    def flush(self):
        """Write what is there as a shard; a reader sees the whole of it or nothing."""
        if not self.filled:
            return
        name = f"{len(self.shards):06d}.npy"
        with new_file(os.path.join(self.folder, name)) as f:
            np.save(f, self.shard[: self.filled])
            f.seek(0)
            sha256, crc32 = hashlib.sha256(), ""
            while block := f.read(BLOCK):
                sha256.update(block)
                crc32 += f"{zlib.crc32(block):08x}"  # of each block, so that dataset.py verifies what it reads alone
        self.shards.append({"name": name, "tokens": self.filled, "sha256": sha256.hexdigest(), "crc32": crc32})
        self.filled = 0

    @property
    def tokens(self):
        return sum(s["tokens"] for s in self.shards) + self.filled

    def manifest(self):
        """What there is so far, for the manifest, and to go on from together with the tokens of the next shard."""
        return {"tokens": self.tokens, **dict(zip(COUNTS, self.totals.tolist(), strict=True)), "shards": self.shards}

    def go_on(self, manifest, ids):
        """Return to the state that `manifest` and the tokens `ids` of the unfinished shard describe."""
        self.shards, self.filled = manifest["shards"], len(ids)
        self.shard[: len(ids)] = ids
        self.totals = np.array([manifest[key] for key in COUNTS], np.int64)


# --- The output folder ------------------------------------------------------------------------------------------


class Output:
    """The folder that the shards, their manifests and the progress are written to, local or remote."""

    def __init__(self, path, splits, settings):
        self.path, self.splits, self.settings = path, splits, settings
        self.fs, self.root = fsspec.core.url_to_fs(path)

    def check(self, held, name):
        """Raises UserError where shards were made with other settings than these."""
        differ = [f"{k} was {held.get(k)} and is now {v}" for k, v in self.settings.items() if held.get(k) != v]
        if differ:
            raise UserError(f"--output {self.path}: {name} holds shards of other settings ({', '.join(differ)}); give "
                            f"another folder, or delete this one.")  # fmt: skip

    def missing(self, name, shards):
        """Path of the first of the shards of a split that is not there, or None."""
        paths = (os.path.join(self.root, name, shard["name"]) for shard in shards)
        return next((path for path in paths if not self.fs.isfile(path)), None)

    def is_finished(self):
        """Whether the shards of all splits are there. Raises UserError where there are those of other settings."""
        finished = True
        for name in ("train", "val"):
            manifest = read_json(self.path, name, "manifest.json")
            if manifest:
                self.check(manifest, name)
            finished &= (bool(manifest) and not self.missing(name, manifest["shards"])) or name not in self.splits
        return finished

    def clear(self):
        """Make the folders, and remove what an earlier run left: the manifests first, they vouch for the rest."""
        ours = []
        for name in ("train", "val"):
            folder = os.path.join(self.root, name)
            self.fs.makedirs(folder, exist_ok=True)
            there = self.fs.find(folder, maxdepth=1)  # not ls, to which an empty folder of a bucket is an error
            ours += [p for p in there if re.fullmatch(r"(manifest\.json|\d{6,}\.npy)(\.part)?", os.path.basename(p))]
        for path in sorted(ours, key=lambda path: not path.endswith("manifest.json")):
            self.fs.rm_file(path)

    def save_progress(self, position, writers):
        """Write where a run that is killed from now on goes on: after the batch that ended at `position`."""
        splits = {name: writer.manifest() for name, writer in writers.items()}
        state = json.dumps({"settings": self.settings, "position": position, "splits": splits}).encode()
        unfinished = {name: writer.shard[: writer.filled] for name, writer in writers.items()}
        with new_file(os.path.join(self.path, "progress.npz")) as f:
            np.savez(f, state=np.frombuffer(state, np.uint8), **unfinished)

    def load_progress(self, writers):
        """Return the writers to the last progress; its position in the source, {} where there is none."""
        content = read_file(os.path.join(self.path, "progress.npz"))
        if not content:
            return {}
        held = np.load(io.BytesIO(content))
        state = json.loads(bytes(held["state"]))
        self.check(state["settings"], "progress.npz")
        for name, writer in writers.items():
            writer.go_on(state["splits"][name], held[name])
            if path := self.missing(name, writer.shards):
                raise UserError(f"--output {self.path}: {path} is missing, which an interrupted run had written; put "
                                f"it back, or delete the folder.")  # fmt: skip
        return state["position"]

    def finish(self, writers):
        """Write the last shards, then the manifests, and forget the progress."""
        for writer in writers.values():
            writer.flush()
        for name, writer in writers.items():
            manifest = {"version": version(), **self.settings, **writer.manifest()}
            write_file(os.path.join(self.path, name, "manifest.json"), json.dumps(manifest, indent=1) + "\n")
        self.forget_progress()

    def forget_progress(self):
        if self.fs.exists(path := os.path.join(self.root, "progress.npz")):
            self.fs.rm_file(path)


def version():
    """This repository's version, or "unknown" where its pyproject.toml did not come along."""
    path = ROOT / "pyproject.toml"
    return tomllib.loads(path.read_text())["project"]["version"] if path.is_file() else "unknown"


def write(args, source, output, encoding):
    """Write every split, the manifests last; returns a summary in words."""
    dtype = np.dtype(output.settings["dtype"])
    writers = {n: ShardWriter(os.path.join(args.output, n), args.shard_tokens, dtype) for n in source.splits}
    position = output.load_progress(writers)
    if not position:
        output.clear()
    keep_tokenizer(args.output, args.tokenizer)
    start, done = time.monotonic(), position.get("done", 0)
    workers = ray_actors if args.ray else processes if args.workers > 1 else None
    results = encode(cut(source, position), encoding, dtype, args.workers, workers)
    shown = "{l_bar}{bar}| {n_fmt}{unit}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"
    bar = {"total": source.total, "unit": source.unit, "unit_scale": True, "bar_format": shown}
    with tqdm(**bar, initial=done, disable=None) as bar:  # disable=None: for a terminal only
        n_bytes = n_tokens = 0
        for parts, position in results:
            filled = [writers[name].add(*part) for name, part in parts.items()]
            if any(filled):
                output.save_progress(position, writers)
            n_bytes += sum(int(counts[1]) for _, counts in parts.values())
            n_tokens += sum(len(ids) for ids, _ in parts.values())
            seconds = time.monotonic() - start
            speed = f"{n_bytes / 1e6 / seconds:.1f} MB/s, {n_tokens / 1e6 / seconds:.2f}M tokens/s"
            bar.set_postfix_str(f"{position['documents']:,} documents, {speed}", refresh=False)
            bar.update(position["done"] - done)
            done = position["done"]
    for name, writer in writers.items():
        if not writer.tokens:
            raise UserError(f"--val_fraction {args.val_fraction}: there is no text for {name} in the "
                            f"{writer.totals[2]} documents that fall to it; 0 makes no val.")  # fmt: skip
    output.finish(writers)
    return ", ".join(f"{n} {w.tokens:,} tokens of {w.totals[0]:,} documents" for n, w in writers.items())


# --- The program ------------------------------------------------------------------------------------------------


def parse():
    """The command line, checked. Raises UserError."""
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, help="folder, gs:// or s3:// address to write train/ and val/ into")
    parser.add_argument("--tokenizer", required=True, help="tiktoken's name of an encoding (gpt2, cl100k_base, ...) "
                        "a .tiktoken file of ranks or a Hugging Face tokenizer.json; files are copied to OUTPUT")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard; memory holds one for "
                        "training and one for validation")  # fmt: skip
    parser.add_argument("--val_fraction", type=float, default=VAL_FRACTION, help="share of the documents that goes to "
                        "val/, from 0 to below 1: those whose relative paths, or numbers, hash lowest")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; the shards do not depend on it")
    parser.add_argument("--ray", action="store_true", default=False, help="have the workers on the Ray cluster that "
                        "RAY_ADDRESS names, or on one of this machine; all of its machines need this repository, and "
                        "a source of text files, at the same paths")  # fmt: skip
    args = parser.parse_args()
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction}: must be at least 0 and below 1.")
    for flag in ("shard_tokens", "workers"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: must be at least 1.")
    local = args.source != "stdlib" and not is_remote(args.source) and not is_remote(args.output)
    if local and Path(args.output).resolve().is_relative_to(Path(args.source).resolve()):
        raise UserError(f"--output {args.output}: must not lie in --source {args.source}, whose files are documents.")
    return args


def main():
    args, start = parse(), time.monotonic()
    source = open_source(args, args.val_fraction)
    encoding = load_tokenizer(args.tokenizer)
    whole = isinstance(encoding, HubTokenizer)
    ranks = Path(args.tokenizer).read_bytes() if whole else dump_ranks(encoding._mergeable_ranks)
    kind = os.path.splitext(args.tokenizer)[1]
    settings = {
        "source": os.path.abspath(args.source) if os.path.exists(args.source) else args.source,
        **source.identity,
        "tokenizer_sha256": hashlib.sha256(ranks).hexdigest(),
        "vocab_size": encoding.n_vocab,
        "shard_tokens": args.shard_tokens,
        "val_fraction": args.val_fraction,
        "tokenizer": f"tokenizer{kind}" if kind in TOKENIZER_FILES else args.tokenizer,
        "dtype": "uint16" if encoding.n_vocab <= 2**16 else "uint32",
    }
    try:
        output = Output(args.output, source.splits, settings)
        if output.is_finished():
            output.forget_progress()  # of a run that was killed just before it would have done so
            say(f"{args.output}: these shards are there already, nothing to do")
            return
        words = write(args, source, output, encoding)
    except OSError as e:
        raise UserError(f"--output {args.output}: cannot be used ({e}).") from None
    say(f"{args.output}: {words}; {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    one_sentence(main)
