"""From token ids to a folder of shards, their manifests, and the progress of a run that may be interrupted."""

import hashlib
import io
import json
import os
import re
import tempfile
import tomllib
import zipfile
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import numpy as np

from data.command_line import say_what_stands
from data.encoding import COUNTS
from data.sources.base import many
from data.splits import SPLITS, WHOLE, Seen
from data.storage import BLOCK
from utils import UserError, is_remote, read_file, read_json, say, write_file

BEGINNING = {
    "documents": 0,
    "done": 0,
    "file": 0,
    "line": 0,
    "crc32": 0,
}  # a position in any source
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


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
        self.folder = folder
        self.shards = []  # entries of the manifest
        self.filled = 0  # tokens of the shard that is not yet written
        self.totals = Counter()  # of the COUNTS
        try:
            self.shard = np.empty(shard_tokens, dtype)
        except (MemoryError, ValueError):
            raise UserError(
                f"--shard_tokens {shard_tokens}: a shard must fit into memory; try fewer."
            ) from None

    def add(self, ids, counts):
        """Take token ids and their COUNTS; returns whether this filled a shard."""
        self.totals.update(counts)
        n_shards = len(self.shards)
        while len(ids):
            room = self.shard[self.filled :][: len(ids)]
            room[:] = ids[: len(room)]
            self.filled += len(room)
            ids = ids[len(room) :]
            if self.filled == len(self.shard):
                self.flush()
        return len(self.shards) > n_shards

    def flush(self):
        """Write what is there as a shard; a reader sees the whole of it or nothing."""
        if not self.filled:
            return
        name = f"{len(self.shards):06d}.npy"
        sha256, crc32 = hashlib.sha256(), ""
        with new_file(os.path.join(self.folder, name)) as f:
            np.save(f, self.shard[: self.filled])
            f.seek(0)
            while block := f.read(BLOCK):
                sha256.update(block)
                # of each block, so that dataset.py can verify the blocks that it reads alone
                crc32 += f"{zlib.crc32(block):08x}"
        about = {"name": name, "tokens": self.filled, "sha256": sha256.hexdigest(), "crc32": crc32}
        self.shards.append(about)
        self.filled = 0

    @property
    def n_tokens(self):
        return sum(shard["tokens"] for shard in self.shards) + self.filled

    def manifest(self):
        """What there is so far, for the manifest, and to go on from together with the tokens of the next shard."""
        counts = {key: self.totals[key] for key in COUNTS}
        return {"tokens": self.n_tokens, **counts, "shards": self.shards}

    def go_on(self, manifest, ids):
        """Return to the state that `manifest` and the tokens `ids` of the unfinished shard describe."""
        self.shards = manifest["shards"]
        self.filled = len(ids)
        self.shard[: len(ids)] = ids
        self.totals = Counter({key: manifest.get(key, 0) for key in COUNTS})


class Output:
    """The folder that the shards, their manifests and the progress are written to, local or remote."""

    def __init__(self, path, source, settings):
        self.path = path
        self.source = source
        self.settings = settings
        self.splits = SPLITS if settings["val_fraction"] else SPLITS[:1]
        self.validation = WHOLE
        self.seen = Seen()
        self.fs, self.root = fsspec.core.url_to_fs(path)

    # --- What is there

    def check(self, held, name, but=None):
        """Raises UserError where shards were made with other settings than these. but: a setting that may differ."""
        held = {"drop_duplicates": False} | held  # earlier versions dropped none
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
        if not content:
            return {}
        try:
            return dict(np.load(io.BytesIO(content)))
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
            raise UserError(
                f"--output {self.path}: {name} is damaged ({e}); delete the folder."
            ) from None

    def save(self, name, **arrays):
        with new_file(os.path.join(self.path, name)) as f:
            np.savez(f, **arrays)

    def missing(self, split, shards):
        """Path of the first of the shards of a split that is not there, or None."""
        for shard in shards:
            path = os.path.join(self.root, split, shard["name"])
            if not self.fs.isfile(path):
                return path
        return None

    def is_finished(self):
        """Whether the shards of all splits are there.

        Raises UserError where there are those of other settings, or where a file of the source has changed since.
        """
        finished = True
        for split in ("train", "val"):
            manifest = read_json(self.path, split, "manifest.json")
            if manifest:
                self.check(manifest, split)
            whole = manifest and not self.missing(split, manifest["shards"])
            if split in self.splits and not whole:
                finished = False
        if finished:
            self.compare_source()
        return finished

    def compare_source(self):
        """Raises UserError where the content of a file of the source has changed since the shards were finished."""
        seen = self.load("source.npz")
        if not seen:  # an earlier version wrote the shards
            return
        again = self.source.compare(seen, {}, "give another --output, or delete this one")
        if again:
            files = many(len(again), "file")
            say(f"--source: {files} written again with the same content, such as {again[0]}")
            # in a folder that can only be read, they are compared again the next time
            with suppress(OSError, UserError):
                self.save("source.npz", **seen | self.source.stamps())

    def clear(self):
        """Make the folders, and remove what an earlier run left: the manifests first, since they vouch for the rest."""
        ours = []
        for split in ("train", "val"):
            folder = os.path.join(self.root, split)
            self.fs.makedirs(folder, exist_ok=True)
            # not ls, for which an empty folder of a bucket is an error
            for path in self.fs.find(folder, maxdepth=1):
                name = os.path.basename(path)
                if re.fullmatch(r"(manifest\.json|\d{6,}\.npy)(\.part)?", name):
                    ours.append(path)
        for path in sorted(ours, key=lambda path: not path.endswith("manifest.json")):
            self.fs.rm_file(path)

    # --- Progress

    def save_progress(self, position, writers):
        """Write where a run that is killed from now on goes on: after the batch that ended at `position`."""
        seen = self.source.seen(position)
        state = {
            "settings": self.settings,
            "validation": self.validation,
            "position": position,
            "splits": {split: writer.manifest() for split, writer in writers.items()},
            "names_sha256": self.source.names_sha256(len(seen["sizes"])),
        }
        unfinished = {split: writer.shard[: writer.filled] for split, writer in writers.items()}
        content = np.frombuffer(json.dumps(state).encode(), np.uint8)
        self.save("progress.npz", state=content, hashes=self.seen.all(), **seen, **unfinished)
        self.say_what_stands(position)

    def load_progress(self, writers):
        """Return the writers to the last progress; its position in the source, {} where there is none.

        Raises UserError where what was read until then has changed.
        """
        held = self.load("progress.npz")
        if not held:
            return {}
        state = json.loads(bytes(held["state"]))
        if "validation" not in state:
            raise UserError(
                f"--output {self.path}: an earlier version began these shards, which chose other documents for "
                f"val; delete the folder."
            )
        self.check(state["settings"], "progress.npz", but="source_listing_sha256")
        self.compare_names_and_files(state["names_sha256"], held, state["position"])
        self.validation = state["validation"]
        self.seen.add(held["hashes"])
        for split, writer in writers.items():
            writer.go_on(state["splits"][split], held[split])
            path = self.missing(split, writer.shards)
            if path:
                raise UserError(
                    f"--output {self.path}: {path} is missing, which an interrupted run had written; put "
                    f"it back, or delete the folder."
                )
        self.say_what_stands(state["position"])
        return state["position"]

    def compare_names_and_files(self, names, seen, position):
        """Raises UserError where the files that were read up to `position` are others now."""
        advice = f"put back what it was, or give another --output, or delete {self.path}"
        if names != self.source.names_sha256(len(seen["sizes"])):
            raise UserError(
                f"--source: files that were read for these shards have gone, or new ones lie between "
                f"them; {advice}."
            )
        self.source.compare(seen, position, advice)

    def begin_again(self, validation, writers):
        """Remove the shards that were just made of the whole source, and begin anew with another way of validation."""
        self.forget_progress()
        for split, writer in writers.items():
            # the last one first: what a kill leaves is then the beginning of what the same command makes
            for shard in reversed(writer.shards):
                self.fs.rm_file(os.path.join(self.root, split, shard["name"]))
            writer.go_on({"shards": []}, [])
        self.validation, self.seen = validation, Seen()
        self.save_progress(BEGINNING, writers)

    def say_what_stands(self, position):
        made = f"{self.path} holds what was made of the first {position['documents']:,} documents"
        say_what_stands(f"{made}, and the same command goes on after them")

    def finish(self, writers):
        """Write the last shards, then the manifests, and forget the progress."""
        for writer in writers.values():
            writer.flush()
        self.save("source.npz", **self.source.stamps(), crc32s=self.source.crc32s)
        for split, writer in writers.items():
            validation = self.validation if len(self.splits) > 1 else "none"
            about = {"version": version(), **self.settings, "validation": validation}
            manifest = about | writer.manifest()
            path = os.path.join(self.path, split, "manifest.json")
            write_file(path, json.dumps(manifest, indent=1) + "\n")
        self.forget_progress()

    def forget_progress(self):
        path = os.path.join(self.root, "progress.npz")
        if self.fs.exists(path):
            self.fs.rm_file(path)


def version():
    """This repository's version, or "unknown" where its pyproject.toml did not come along."""
    if not PYPROJECT.is_file():
        return "unknown"
    return tomllib.loads(PYPROJECT.read_text())["project"]["version"]
