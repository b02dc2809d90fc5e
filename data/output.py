"""From token ids to a folder of shards, their manifests, and the progress of a run that may be interrupted.

All that a run replaces is known as its own: by its content, or by progress.npz, which it writes before the first shard
and removes after the manifests.
"""

import hashlib
import io
import json
import os
import tomllib
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from data.encoding import COUNTS
from data.splits import SPLITS, Seen, choose_validation
from runtime.files import ask, read_file, write_file
from runtime.messages import UserError, first_line
from shards import manifest
from shards.storage import BLOCK, list_shards
from shards.tokenization import copy_tokenizer

PROGRESS = "progress.npz"
SMALL = 10_000_000  # hashes that are saved with every shard
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


class ShardWriter:
    """Cuts a stream of token ids into files of exactly `shard_tokens`, the last one shorter; holds one at a time."""

    def __init__(self, folder, shard_tokens, dtype):
        self.folder = folder
        self.shards = []  # entries of the manifest
        self.filled = 0  # tokens of the shard that is not yet written
        self.totals = Counter()  # of the COUNTS
        self.shard = np.empty(shard_tokens, dtype)

    def add(self, ids):
        """Take the token ids of a document."""
        while len(ids):
            room = self.shard[self.filled :][: len(ids)]
            room[:] = ids[: len(room)]
            self.filled += len(room)
            ids = ids[len(room) :]
            if self.filled == len(self.shard):
                self.flush()

    def flush(self):
        """Write what is there as a shard, perhaps once more. Raises UserError where another file has its name."""
        if not self.filled:
            return
        name = manifest.shard_name(len(self.shards))
        path = os.path.join(self.folder, name)
        file = io.BytesIO()
        np.save(file, self.shard[: self.filled])
        content = file.getvalue()
        if read_file(path) not in (None, content):
            raise foreign(path)
        write_file(path, content)
        # of each block, so that dataset.py can verify the blocks that it reads alone
        blocks = range(0, len(content), BLOCK)
        crc32 = "".join(f"{zlib.crc32(content[start : start + BLOCK]):08x}" for start in blocks)
        sha256 = hashlib.sha256(content).hexdigest()
        shard = {"name": name, "tokens": self.filled, "sha256": sha256, "crc32": crc32}
        self.shards.append(shard)
        self.filled = 0

    def manifest(self):
        """What there is so far, for the manifest and to resume from."""
        n_tokens = sum(shard["tokens"] for shard in self.shards)
        counts = {key: self.totals[key] for key in COUNTS}
        return {"tokens": n_tokens, **counts, "shards": self.shards}


def foreign(path):
    """The UserError for a file that is in the way and that no run of this program is known to have made."""
    return UserError(
        f"{path} is in the way and not known to be of these shards; move it away, or give another folder",
        flag="output",
    )


class Output:
    """The folder that the shards, their manifests and the progress are written to, local or remote."""

    def __init__(self, path, source, settings):
        self.path = path
        self.source = source
        self.settings = settings
        self.splits = SPLITS if settings["val_fraction"] else SPLITS[:1]
        self.writers = {}  # {split: ShardWriter}, from `begin` on
        self.position = {}  # where in the source, {} at its beginning
        self.validation = ""  # how it is chosen, as in splits.py
        self.seen = Seen()
        self.unsaved = 0  # tokens since the last progress

    def check(self, held, name, but=None):
        """Raises UserError where shards were made with other settings than these. but: a setting that may differ."""
        end = manifest.end_of_text(held)  # which not every manifest names
        held = held | {"end_of_text": self.settings["end_of_text"] if end is None else end}
        differ = [k for k, v in self.settings.items() if k != but and held.get(k) != v]
        words = [f"{k} was {held.get(k)} and is now {self.settings[k]}" for k in differ]
        if differ == ["source_listing_sha256"]:
            words = ["the source has other files now, or files of other sizes"]
        if differ:
            raise UserError(
                f"{name} has other settings ({', '.join(words)}); give another folder",
                flag="output",
                value=self.path,
            )

    def is_finished(self):
        """Whether the shards of all splits are there. Raises UserError where some are damaged or of other settings."""
        finished = set()
        for split in SPLITS:
            folder = os.path.join(self.path, split)
            if held := manifest.read(folder):
                self.check(held, split)
                manifest.check_files(folder, held, list_shards(folder))
                finished.add(split)
        return finished.issuperset(self.splits)

    def load(self):
        """What `save_progress` saved, {} where there is nothing. Raises UserError where it is something else."""
        content = read_file(os.path.join(self.path, PROGRESS))
        if content is None:
            return {}
        try:
            held = dict(np.load(io.BytesIO(content)))
            held |= json.loads(bytes(held.pop("state")))
            names = "settings", "validation", "position", "splits", "read_sha256", "hashes"
            return held | {name: held[name] for name in names}
        except Exception as e:  # damage may raise any error of zipfile, zlib, numpy and json
            raise UserError(
                f"{PROGRESS} is damaged or foreign ({first_line(e)}); give another folder",
                flag="output",
                value=self.path,
            ) from None

    def save_progress(self, position):
        """Write where a run that is killed from now on resumes: after the batch that ended at `position`."""
        state = {
            "settings": self.settings,
            "validation": self.validation,
            "position": position,
            "splits": {split: writer.manifest() for split, writer in self.writers.items()},
            "read_sha256": self.source.read_sha256(position),
        }
        arrays = {"hashes": self.seen.all()}
        arrays["state"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        for split, writer in self.writers.items():
            arrays[split] = writer.shard[: writer.filled]
        file = io.BytesIO()
        np.savez(file, **arrays)
        write_file(os.path.join(self.path, PROGRESS), file.getvalue())

    def begin(self, tokenizer):
        """Make the writers, and resume where an earlier run was killed, if one was; the tokenizer is copied there.
        Raises UserError where something else is in the way or what was read until the position has changed."""
        dtype, length = np.dtype(self.settings["dtype"]), self.settings["shard_tokens"]
        for split in self.splits:
            self.writers[split] = ShardWriter(os.path.join(self.path, split), length, dtype)
        held = self.load()
        if held.get("position"):
            self.resume(held)
        for split in SPLITS:
            self.check_shards(split, bool(held))
        copy_tokenizer(self.path, tokenizer)
        if not self.position:
            settings = self.settings["val_fraction"], self.settings["drop_duplicates"]
            self.validation = choose_validation(self.source, *settings)
            self.save_progress({})

    def resume(self, held):
        """Return to what `load` returned. Raises UserError where what was read until then has changed."""
        self.check(held["settings"], PROGRESS, but="source_listing_sha256")
        self.position = held["position"]
        if held["read_sha256"] != self.source.read_sha256(self.position):
            raise UserError(
                "files that were read for these shards changed",
                flag="source",
                remedy="restore them, or give another {output}",
                output=None,
            )
        self.validation = held["validation"]
        self.seen.add(held["hashes"])
        for split, writer in self.writers.items():
            so_far = held["splits"][split]
            writer.shards = so_far["shards"]
            writer.totals.update({key: so_far.get(key, 0) for key in COUNTS})
            writer.add(held[split])

    def add(self, batch, position):
        """Write a batch of `Encoded` that ends at `position` in the source; save progress where it fills a shard."""
        writers = list(self.writers.values())
        n_shards = sum(len(writer.shards) for writer in writers)
        hashes = [document.text_hash for document in batch if document.text_hash is not None]
        again = iter(self.seen.add(np.array(hashes, np.uint64)))
        for document in batch:
            self.unsaved += sum(map(len, document.ids))
            if document.text_hash is not None and next(again):
                home = 0 if len(document.ids[0]) else 1
                writers[home].totals["duplicate_documents"] += 1
                if self.settings["drop_duplicates"]:
                    continue
            for writer, ids, counts in zip(writers, document.ids, document.counts):
                writer.add(ids)
                writer.totals.update(counts)
        filled = sum(len(writer.shards) for writer in writers) > n_shards
        # the hashes in it, of 8 bytes, must not be written much more often than tokens, of 2 or 4
        if filled and self.unsaved >= 2 * (len(self.seen) - SMALL):
            self.save_progress(position)
            self.unsaved = 0

    def totals(self):
        """Counter of the COUNTS of all splits."""
        return sum((writer.totals for writer in self.writers.values()), Counter())

    def check_shards(self, split, begun):
        """Raises UserError where the shards of a split are not those that its writer knows."""
        folder = os.path.join(self.path, split)
        names = set(list_shards(folder))
        writer = self.writers.get(split)
        known = {shard["name"] for shard in writer.shards} if writer else set()
        if gone := known - names:
            raise UserError(
                f"{folder}/{min(gone)} is missing, which an interrupted run wrote; put it back",
                flag="output",
            )
        # a run may have been killed between writing the next ones and saving its progress
        next_ones = range(len(known), len(names)) if begun and writer else ()
        if others := names - known - set(map(manifest.shard_name, next_ones)):
            raise foreign(os.path.join(folder, min(others)))

    def finish(self):
        """Write the last shards, then the manifests, and forget the progress."""
        for writer in self.writers.values():
            writer.flush()
        version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
        validation = self.validation if len(self.splits) > 1 else "none"
        made = {"version": version, **self.settings, "validation": validation}
        for split, writer in self.writers.items():
            path = os.path.join(self.path, split, manifest.NAME)
            write_file(path, manifest.dump(made | writer.manifest()))
        self.forget_progress()

    def forget_progress(self):
        """Remove progress.npz, also that of a run that was killed just before it would have done so."""
        if self.load():
            ask(os.path.join(self.path, PROGRESS), "rm_file")
