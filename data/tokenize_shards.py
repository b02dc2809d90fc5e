"""Tokenise a source of text into shards of token ids, for training and for validation.

python data/tokenize_shards.py --source stdlib --output data/shards/stdlib --tokenizer data/shards/bpe8192.tiktoken

Writes OUTPUT/train/000000.npy, ... and OUTPUT/val/000000.npy, ...: one-dimensional arrays that numpy.load reads, uint16
where that holds the vocabulary, else uint32. A document is the end-of-text token and then its text, no part of which
becomes a special token; documents continue from one shard into the next. manifest.json beside them is written last: a
folder without one is unfinished, and the same command goes on from the last whole shard, as OUTPUT/progress.npz says.
OUTPUT/source.npz tells whether a file of the source has changed since.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from training import interrupts

if __name__ == "__main__":
    interrupts.at_once("interrupted; nothing was written")

import hashlib
import io
import json
import logging
import re
import signal
import tempfile
import threading
import time
import tomllib
import zipfile
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process, util
from pathlib import Path

import fsspec
import numpy as np
from tqdm import tqdm

from data.sources import (
    VAL_FRACTION,
    Parser,
    dump_ranks,
    many,
    open_source,
    read_text,
    run,
    say_what_stands,
    warn,
)
from data.storage import BLOCK
from data.tokenization import CUT, TOKENIZER_FILES, HubTokenizer, keep_tokenizer, load_tokenizer
from training.locks import alone_in
from utils import UserError, is_remote, read_file, read_json, say, write_file

ROOT = Path(__file__).resolve().parents[1]
BATCH_BYTES, BATCH_DOCUMENTS = (
    1_000_000,
    1000,
)  # what a worker takes at once, whichever is reached first: about 0.2 s
IN_FLIGHT = 4 * BATCH_BYTES  # per worker: enough that none waits, and a bound on memory
COUNTS = (
    "documents",
    "bytes",
    "empty_documents",
    "replaced_documents",
    "replaced_characters",
    "foreign_documents",
    "damaged_files",
    "damaged_records",
)
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
        return encoding.encode_to_numpy(
            text, disallowed_special=()
        )  # no text is special, and none is an error
    except ValueError:
        half = len(text) // 2
        half = cut.end() if (cut := CUT.search(text, half)) else half
        return np.concatenate(
            [encode_text(text[:half], encoding), encode_text(text[half:], encoding)]
        )


def encode_batch(batch, encoding, dtype, skip):
    """[(split, document)] -> ({split: (token ids as one array of `dtype`, the COUNTS)}, CRC-32s of the documents that
    are files, [(kind, words)] to warn of); no tokens of empty documents. skip: go on where a file cannot be read."""
    parts, crc32s, warnings = {}, [], []
    for split, document in batch:
        ids, counts = parts.setdefault(
            split, ([np.empty(0, dtype)], np.zeros(len(COUNTS), np.int64))
        )
        if any(document.lost):
            counts[-2:] += document.lost
            continue
        try:
            text, replaced, crc32, held_in = read_text(document)
        except UserError as e:
            if not skip:
                raise
            warnings.append(("damage", f"{str(e).rstrip('.')}: skipped"))
            crc32s.append(-1)
            counts[-2] += 1
            continue
        if text:
            ids.append(np.array([encoding.eot_token], dtype))
            ids += [encode_text(piece, encoding).astype(dtype) for piece in pieces(text, encoding)]
        counts[:6] += bool(text), len(text.encode()), not text, replaced > 0, replaced, not held_in
        crc32s += [crc32] if document.path else []
        warnings += odd_encoding(document, text, replaced, held_in)
    return (
        {split: (np.concatenate(ids), counts) for split, (ids, counts) in parts.items()},
        crc32s,
        warnings,
    )


def odd_encoding(document, text, replaced, held_in):
    """[(kind, words)] to warn of a document that is not plain UTF-8."""
    name = document.name if document.path else f"document {document.name}"
    if not held_in or replaced:
        but = (
            "" if held_in else " (perhaps it is latin-1: iconv -f latin1 -t utf-8 would keep them)"
        )
        return [
            ("replaced", f"{name} is not UTF-8: {many(replaced, 'character')} became U+FFFD{but}")
        ]
    if held_in != "utf-8":
        return [("wide", f"{name} is {held_in.upper()} and is read as such")]
    if document.path and text.count("\0") * 4 > len(text):
        return [
            (
                "nul",
                f"{name} is full of NUL characters, as UTF-16 without its mark would be; they stay",
            )
        ]
    return []


# --- Workers ----------------------------------------------------------------------------------------------------


def set_up_worker(*arguments):
    """Keep in the worker process what is the same for all its batches, and end with the program if that is killed."""
    global encode_arguments
    encode_arguments = arguments
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def encode_in_worker(batch):
    return encode_batch(batch, *encode_arguments)


@contextmanager
def processes(workers, *arguments):
    """(function that submits a batch, function that waits for its result), on this machine's processes."""
    # not a Pool: that waits for ever when the system kills a worker
    executor, most = ProcessPoolExecutor(workers, get_context("spawn"), set_up_worker, arguments), 0
    error = UserError(
        f"--workers {workers}: one was killed, as happens when memory is short; try fewer."
    )
    starting = threading.Lock()

    def submit(batch):
        nonlocal most
        with starting:
            # processes that start here ignore Ctrl-C, which a terminal sends to them too
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            future = executor.submit(encode_in_worker, batch)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            most = max(most, len(active_children()))
        return future

    def kill():
        starting.acquire()  # for ever: none is to start any more
        for worker in active_children():
            worker.kill()
        util._run_finalizers(
            0
        )  # semaphores, which else are said to be left over; not what waits for the workers

    def result(future):
        while True:
            try:
                return future.result(timeout=5)
            except TimeoutError:
                # killed in the middle of a message, for the rest of which the executor would wait
                if len(active_children()) < most:
                    interrupts.end(2, f"error: {error}")

    interrupts.given_back.append(kill)
    try:
        yield submit, result
    except BrokenProcessPool:
        time.sleep(0.5)  # a signal that ended them all ends this process too, and says so
        raise error from None
    finally:
        executor.shutdown(cancel_futures=True)
        interrupts.given_back.remove(kill)


@contextmanager
def ray_actors(workers, *arguments):
    """The same on a Ray cluster, or on one that Ray starts here; what a lost worker had to do is done again."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "--ray: the package ray is not installed; pip install ray does that."
        ) from None

    class Encoder:
        def encode(self, batch):
            return encode_batch(batch, *arguments)

    def result(reference):
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as e:
            raise e.cause from None

    # the cluster's other machines have this repository, and tiktoken's ranks, where this one has them
    names = ("PYTHONPATH", "TIKTOKEN_CACHE_DIR")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "data"), environment.get("PYTHONPATH", "")]
    )
    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        runtime_env={"env_vars": environment}, log_to_driver=False, logging_level=logging.ERROR
    )
    signal.signal(signal.SIGTERM, before)  # Ray took it
    interrupts.given_back.append(ray.shutdown)
    try:
        actor = ray.remote(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")(
            Encoder
        )
        actors = deque(actor.remote() for _ in range(workers))

        def submit(batch):
            actors.rotate()
            return actors[0].encode.remote(batch)

        yield submit, result
    finally:
        ray.shutdown()
        interrupts.given_back.remove(ray.shutdown)


def encode(batches, workers, start, *arguments):
    """Yield (`encode_batch` of a batch, position after it) for each (batch, position), in order for any `workers`.

    start: None for this process, or `processes` or `ray_actors`; arguments: those of `encode_batch`. IN_FLIGHT bytes
    per worker are underway at most, or one batch where a document alone has more.
    """
    if not start:
        yield from ((encode_batch(batch, *arguments), position) for batch, position in batches)
        return
    with start(workers, *arguments) as (submit, result):
        underway, size = deque(), 0

        def oldest():
            nonlocal size
            future, position, its_size = underway.popleft()
            size -= its_size
            return result(future), position

        for batch, position in batches:
            its_size = size_of(batch)
            while underway and (
                size + its_size > IN_FLIGHT * workers or len(underway) >= 4 * workers
            ):
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
        try:
            with open(part, "w+b") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
        except OSError:
            with suppress(OSError):
                os.remove(part)  # half of it, where the disk is full
            raise
        if is_remote(path):  # an object appears whole when its upload ends
            fs, there = fsspec.core.url_to_fs(path)
            fs.put_file(part, there)
        else:
            os.replace(part, path)


class ShardWriter:
    """Cuts a stream of token ids into files of exactly `shard_tokens`, the last one shorter; holds one at a time."""

    def __init__(self, folder, shard_tokens, dtype):
        self.folder, self.shards, self.filled, self.totals = (
            folder,
            [],
            0,
            np.zeros(len(COUNTS), np.int64),
        )
        try:
            self.shard = np.empty(shard_tokens, dtype)
        except (MemoryError, ValueError):
            raise UserError(
                f"--shard_tokens {shard_tokens}: a shard must fit into memory; try fewer."
            ) from None

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
        self.shards.append(
            {"name": name, "tokens": self.filled, "sha256": sha256.hexdigest(), "crc32": crc32}
        )
        self.filled = 0

    @property
    def tokens(self):
        return sum(s["tokens"] for s in self.shards) + self.filled

    def manifest(self):
        """What there is so far, for the manifest, and to go on from together with the tokens of the next shard."""
        return {
            "tokens": self.tokens,
            **dict(zip(COUNTS, self.totals.tolist(), strict=True)),
            "shards": self.shards,
        }

    def go_on(self, manifest, ids):
        """Return to the state that `manifest` and the tokens `ids` of the unfinished shard describe."""
        self.shards, self.filled = manifest["shards"], len(ids)
        self.shard[: len(ids)] = ids
        self.totals = np.array([manifest.get(key, 0) for key in COUNTS], np.int64)


# --- The output folder ------------------------------------------------------------------------------------------


class Output:
    """The folder that the shards, their manifests and the progress are written to, local or remote."""

    def __init__(self, path, source, settings):
        self.path, self.source, self.splits, self.settings = path, source, source.splits, settings
        self.fs, self.root = fsspec.core.url_to_fs(path)

    def check(self, held, name, but=None):
        """Raises UserError where shards were made with other settings than these. but: a setting that may differ."""
        differ = [k for k, v in self.settings.items() if held.get(k) != v and k != but]
        words = [f"{k} was {held.get(k)} and is now {self.settings[k]}" for k in differ]
        if differ == ["source_listing_sha256"]:
            words = ["the source has other files now, or files of other sizes"]
        if differ:
            raise UserError(
                f"--output {self.path}: {name} holds shards of other settings ({', '.join(words)}); give "
                f"another folder, or delete this one."
            )

    def load(self, name):
        """The arrays of a .npz file of this folder, {} where there is none."""
        content = read_file(os.path.join(self.path, name))
        try:
            return dict(np.load(io.BytesIO(content))) if content else {}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
            raise UserError(
                f"--output {self.path}: {name} is damaged ({e}); delete the folder."
            ) from None

    def save(self, name, **arrays):
        with new_file(os.path.join(self.path, name)) as f:
            np.savez(f, **arrays)

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
            finished &= (
                bool(manifest) and not self.missing(name, manifest["shards"])
            ) or name not in self.splits
        held = self.load("source.npz") if finished else {}  # shards of earlier versions have none
        if held and (
            again := self.source.compare(held, {}, "give another --output, or delete this one")
        ):
            say(
                f"--source: {many(len(again), 'file')} written again with the same content, such as {again[0]}"
            )
            with suppress(
                OSError, UserError
            ):  # a folder to read from alone: they are compared again the next time
                self.save("source.npz", **held | self.source.stamps())
        return finished

    def clear(self):
        """Make the folders, and remove what an earlier run left: the manifests first, they vouch for the rest."""
        ours = []
        for name in ("train", "val"):
            folder = os.path.join(self.root, name)
            self.fs.makedirs(folder, exist_ok=True)
            there = self.fs.find(
                folder, maxdepth=1
            )  # not ls, to which an empty folder of a bucket is an error
            ours += [
                p
                for p in there
                if re.fullmatch(r"(manifest\.json|\d{6,}\.npy)(\.part)?", os.path.basename(p))
            ]
        for path in sorted(ours, key=lambda path: not path.endswith("manifest.json")):
            self.fs.rm_file(path)

    def save_progress(self, position, writers):
        """Write where a run that is killed from now on goes on: after the batch that ended at `position`."""
        splits, seen = (
            {name: writer.manifest() for name, writer in writers.items()},
            self.source.seen(position),
        )
        state = {"settings": self.settings, "position": position, "splits": splits}
        state["names_sha256"] = self.source.names_sha256(len(seen["sizes"]))
        unfinished = {name: writer.shard[: writer.filled] for name, writer in writers.items()}
        self.save(
            "progress.npz",
            state=np.frombuffer(json.dumps(state).encode(), np.uint8),
            **seen,
            **unfinished,
        )
        self.say_what_stands(position)

    def load_progress(self, writers):
        """Return the writers to the last progress; its position in the source, {} where there is none. Raises UserError
        where what was read until then has changed."""
        held = self.load("progress.npz")
        if not held:
            return {}
        state = json.loads(bytes(held["state"]))
        names = state.get(
            "names_sha256"
        )  # an earlier version has none, and what it read is told by all files alone
        self.check(state["settings"], "progress.npz", but=names and "source_listing_sha256")
        advice = f"put back what it was, or give another --output, or delete {self.path}"
        if names:
            if names != self.source.names_sha256(len(held["sizes"])):
                raise UserError(
                    f"--source: files that were read for these shards have gone, or new ones lie between "
                    f"them; {advice}."
                )
            self.source.compare(held, state["position"], advice)
        for name, writer in writers.items():
            writer.go_on(state["splits"][name], held[name])
            if path := self.missing(name, writer.shards):
                raise UserError(
                    f"--output {self.path}: {path} is missing, which an interrupted run had written; put "
                    f"it back, or delete the folder."
                )
        self.say_what_stands(state["position"])
        return state["position"]

    def say_what_stands(self, position):
        made = f"{self.path} holds what was made of the first {position['documents']:,} documents"
        say_what_stands(f"{made}, and the same command goes on after them")

    def finish(self, writers):
        """Write the last shards, then the manifests, and forget the progress."""
        for writer in writers.values():
            writer.flush()
        self.save("source.npz", **self.source.stamps(), crc32s=self.source.crc32s)
        for name, writer in writers.items():
            manifest = {"version": version(), **self.settings, **writer.manifest()}
            write_file(
                os.path.join(self.path, name, "manifest.json"),
                json.dumps(manifest, indent=1) + "\n",
            )
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
    writers = {
        n: ShardWriter(os.path.join(args.output, n), args.shard_tokens, dtype)
        for n in source.splits
    }
    position = output.load_progress(writers)
    if not position:
        output.clear()
    keep_tokenizer(args.output, args.tokenizer)
    start, done = time.monotonic(), position.get("done", 0)
    workers = ray_actors if args.ray else processes if args.workers > 1 else None
    results = encode(
        cut(source, position), args.workers, workers, encoding, dtype, args.skip_damaged
    )
    shown = "{l_bar}{bar}| {n_fmt}{unit}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"
    bar = {"total": source.total, "unit": source.unit, "unit_scale": True, "bar_format": shown}
    with tqdm(**bar, initial=done, disable=None) as bar:  # disable=None: for a terminal only
        n_bytes = n_tokens = 0
        for (parts, crc32s, warnings), position in results:
            source.crc32s += crc32s
            for kind, words in warnings:
                warn(kind, words)
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
    check_text(args, writers)
    output.finish(writers)
    warn_of_losses(writers)
    return ", ".join(
        f"{n} {w.tokens:,} tokens of {w.totals[0]:,} documents" for n, w in writers.items()
    )


def check_text(args, writers):
    """Raises UserError where a split has no text."""
    totals = dict(zip(COUNTS, sum(writer.totals for writer in writers.values()).tolist()))
    if not any(writer.tokens for writer in writers.values()):
        what = f"{many(totals['empty_documents'], 'document')}, all of them empty"
        if totals["damaged_files"] + totals["damaged_records"]:
            what += f", and {left_out(totals)} left out"
        raise UserError(
            f"--source {args.source}: there is no text in it ({what}); give another, or see that "
            f"--text_column {args.text_column} is the column with the text."
        )
    for name, writer in writers.items():
        if not writer.tokens:
            raise UserError(
                f"--val_fraction {args.val_fraction}: there is no text for {name} in the "
                f"{writer.totals[2]} documents that fall to it; 0 makes no val."
            )


def left_out(totals):
    return f"{many(totals['damaged_files'], 'damaged file')} and {many(totals['damaged_records'], 'damaged record')}"


def warn_of_losses(writers):
    """Say how much of the text was replaced or left out, by all runs that made these shards."""
    totals = dict(zip(COUNTS, sum(writer.totals for writer in writers.values()).tolist()))
    if totals["replaced_characters"]:
        characters, documents = (
            many(totals["replaced_characters"], "character"),
            totals["replaced_documents"],
        )
        foreign = totals["foreign_documents"]
        foreign = f"; {many(foreign, 'document')} perhaps in latin-1" if foreign else ""
        warn(
            "total",
            f"{characters} of {many(documents, 'document')} became U+FFFD, not being UTF-8{foreign}",
        )
    if totals["damaged_files"] + totals["damaged_records"]:
        warn(
            "total",
            f"{left_out(totals)} left out; of a file, what comes before the damage is there",
        )


# --- The program ------------------------------------------------------------------------------------------------


def parse():
    """The command line, checked. Raises UserError."""
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        required=True,
        help="folder, gs:// or s3:// address to write train/ and val/ into",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="tiktoken's name of an encoding (gpt2, cl100k_base, ...), "
        "a .tiktoken file of ranks or a Hugging Face tokenizer.json; files are copied to OUTPUT",
    )
    parser.add_argument(
        "--shard_tokens",
        type=int,
        default=100_000_000,
        help="tokens per shard; memory holds one for training and one for validation",
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=VAL_FRACTION,
        help="share of the documents that goes to "
        "val/, from 0 to below 1: those whose relative paths, or numbers, hash lowest",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="processes; the shards do not depend on it",
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        default=False,
        help="have the workers on the Ray cluster that "
        "RAY_ADDRESS names, or on one of this machine; all of its machines need this repository, and "
        "a source of text files, at the same paths",
    )
    args = parser.parse_args()
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction}: must be at least 0 and below 1.")
    for flag in ("shard_tokens", "workers"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: must be at least 1.")
    local = args.source != "stdlib" and not is_remote(args.source) and not is_remote(args.output)
    if local and Path(args.output).resolve().is_relative_to(Path(args.source).resolve()):
        raise UserError(
            f"--output {args.output}: must not lie in --source {args.source}, whose files are documents."
        )
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
        output = Output(args.output, source, settings)
        words = None if output.is_finished() else write_alone(args, source, output, encoding)
        if not words:
            output.forget_progress()  # of a run that was killed just before it would have done so
            say(f"{args.output}: these shards are there already, nothing to do")
            return
    except OSError as e:
        raise UserError(
            f"--output {args.output}: cannot be used ({e}); make room, or give another."
        ) from None
    say(f"{args.output}: {words}; {time.monotonic() - start:.1f} s")


def write_alone(args, source, output, encoding):
    """`write`, while no other process writes to the folder; None where one has just done it all."""
    with alone_in(args.output, f"--output {args.output}", "--output"):
        return None if output.is_finished() else write(args, source, output, encoding)


if __name__ == "__main__":
    run(main)
