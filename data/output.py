"""Write token ids to a folder of shards with their manifests, and save the progress, from which a killed run resumes.

A run replaces no file that it did not make. It recognizes its own by their content, or by progress.npz, which it writes
before the first shard and removes after the manifests.
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
SMALL = 10_000_000  # up to this many hashes are saved with every shard
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


class ShardWriter:
    """Divides a stream of token ids into shards of exactly `shard_tokens`, the last one shorter. Memory holds one
    shard."""

    def __init__(self, folder, shard_tokens, dtype):
        self.folder = folder
        self.shards = []  # the manifest's entries for shards that are written
        self.filled = 0  # tokens in the shard that is not yet written
        self.totals = Counter()  # of the COUNTS
        self.shard = np.empty(shard_tokens, dtype)

    @property
    def tokens(self):
        """Tokens added so far."""
        return len(self.shards) * len(self.shard) + self.filled

    def add(self, ids):
        """Append the token ids of a document, and write each shard that is filled."""
        while len(ids):
            room = self.shard[self.filled :][: len(ids)]
            room[:] = ids[: len(room)]
            self.filled += len(room)
            ids = ids[len(room) :]
            if self.filled == len(self.shard):
                self.flush()

    def flush(self):
        """Write the current shard. A run that was killed may have written it already, with the same content; raises
        UserError where a file of its name has another content."""
        if not self.filled:
            return
        name = manifest.shard_name(len(self.shards))
        path = os.path.join(self.folder, name)
        file = io.BytesIO()
        np.save(file, self.shard[: self.filled])
        content = file.getvalue()
        if read_file(path) not in (None, content):
            raise foreign_file_error(path)
        write_file(path, content)
        # one checksum for each block, so that a reader can verify the blocks that it reads without reading the others
        blocks = range(0, len(content), BLOCK)
        crc32 = "".join(f"{zlib.crc32(content[start : start + BLOCK]):08x}" for start in blocks)
        sha256 = hashlib.sha256(content).hexdigest()
        shard = {"name": name, "tokens": self.filled, "sha256": sha256, "crc32": crc32}
        self.shards.append(shard)
        self.filled = 0

    def manifest(self):
        """The totals and shards so far, as the manifest and the progress record them."""
        n_tokens = sum(shard["tokens"] for shard in self.shards)
        counts = {key: self.totals[key] for key in COUNTS}
        return {"tokens": n_tokens, **counts, "shards": self.shards}


def foreign_file_error(path):
    """The UserError for a file that is in the way and was not made by this run."""
    return UserError(
        f"{path} is in the way and not known to be of these shards; move it away, or give another folder",
        flag="output",
    )


class Output:
    """The folder, local or remote, to which shards, manifests and progress are written."""

    def __init__(self, path, source, settings):
        self.path = path
        self.source = source
        self.settings = settings
        self.splits = SPLITS if settings["val_fraction"] else SPLITS[:1]
        self.writers = {}  # {split: ShardWriter}, made by `prepare`
        self.position = {}  # position in the source; {} at its beginning
        self.validation = ""  # how documents are chosen for it: WHOLE or ENDS of splits.py
        self.seen = Seen()
        self.unsaved = 0  # tokens since the progress was last saved

    def check_settings(self, held, name, but=None):
        """Raises UserError where shards were made with settings other than these. but: a setting that may differ."""
        # not every manifest names the end of text: then it is not compared
        end = manifest.end_of_text(held)
        held = held | {"end_of_text": self.settings["end_of_text"] if end is None else end}
        # nor how many tokens were wanted: then the whole source was
        held = {"tokens_wanted": 0} | held
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
        """Whether the shards of all splits are complete. Raises UserError where some are damaged or have other
        settings."""
        finished = set()
        for split in SPLITS:
            folder = os.path.join(self.path, split)
            if held := manifest.read(folder):
                self.check_settings(held, split)
                manifest.check_files(folder, held, list_shards(folder))
                finished.add(split)
        return finished.issuperset(self.splits)

    def load_progress(self):
        """What `save_progress` saved; {} where there is no progress. Raises UserError where the file is damaged or
        foreign."""
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
        """Save the progress. A run that is killed from now on resumes after the batch that ended at `position`."""
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

    def prepare(self, tokenizer):
        """Make the writers, resume from the progress of an earlier run, if there is one, and copy the tokenizer.

        Raises UserError where other files are in the way, or where the files that the earlier run read have changed.
        """
        dtype = np.dtype(self.settings["dtype"])
        length = self.settings["shard_tokens"]
        for split in self.splits:
            self.writers[split] = ShardWriter(os.path.join(self.path, split), length, dtype)
        held = self.load_progress()
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
        """Restore the progress `held`, as `load_progress` returned it. Raises UserError where the files that were read
        before it have changed."""
        self.check_settings(held["settings"], PROGRESS, but="source_listing_sha256")
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

    @property
    def train_tokens(self):
        """Tokens for training so far."""
        return next(iter(self.writers.values())).tokens

    @property
    def is_full(self):
        """Whether there are as many tokens for training as are wanted."""
        wanted = self.settings["tokens_wanted"]
        return bool(wanted) and self.train_tokens >= wanted

    def add(self, batch, position):
        """Write a batch of `Encoded` that ends at `position` in the source, up to the document at which the output is
        full; save progress where it fills a shard."""
        writers = list(self.writers.values())
        n_shards = sum(len(writer.shards) for writer in writers)
        hashes = [document.text_hash for document in batch if document.text_hash is not None]
        again = iter(self.seen.add(np.array(hashes, np.uint64)))
        for document in batch:
            # Documents and not batches: batches begin elsewhere after a run has resumed.
            if self.is_full:
                break
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
        # Progress holds all hashes, 8 bytes each. Saved with every shard, they would soon be most of what is written,
        # so beyond SMALL of them at least two tokens are written, of 2 or 4 bytes, for each hash.
        if filled and self.unsaved >= 2 * (len(self.seen) - SMALL):
            self.save_progress(position)
            self.unsaved = 0

    def totals(self):
        """A Counter of the COUNTS, summed over the splits."""
        return sum((writer.totals for writer in self.writers.values()), Counter())

    def check_shards(self, split, resumed):
        """Raises UserError where the folder of a split holds other shards than its writer has written."""
        folder = os.path.join(self.path, split)
        names = set(list_shards(folder))
        writer = self.writers.get(split)
        known = {shard["name"] for shard in writer.shards} if writer else set()
        if gone := known - names:
            raise UserError(
                f"{folder}/{min(gone)} is missing, which an interrupted run wrote; put it back",
                flag="output",
            )
        # a run may have been killed after it wrote the next shards and before it saved its progress
        next_ones = range(len(known), len(names)) if resumed and writer else ()
        if others := names - known - set(map(manifest.shard_name, next_ones)):
            raise foreign_file_error(os.path.join(folder, min(others)))

    def finish(self):
        """Write the last shards, then the manifests, and remove the progress."""
        for writer in self.writers.values():
            writer.flush()
        version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
        validation = self.validation if len(self.splits) > 1 else "none"
        made = {"version": version, **self.settings, "validation": validation}
        for split, writer in self.writers.items():
            path = os.path.join(self.path, split, manifest.NAME)
            write_file(path, manifest.dump(made | writer.manifest()))
        self.remove_progress()

    def remove_progress(self):
        """Remove progress.npz. After `is_finished` it may remain from a run that was killed just before it removed
        it."""
        if self.load_progress():
            ask(os.path.join(self.path, PROGRESS), "rm_file")
