"""Documents that are files: every text file of a folder, or Python's standard library."""

import hashlib
import os
import sysconfig

from data.sources.base import (
    Document,
    File,
    Source,
    listing_sha256,
    many,
    walk,
    warn_of_left_out,
)
from data.sources.text import read_text
from utils import UserError

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def list_documents(source):
    """The documents of a source, one per file, sorted by name.

    `source` is "stdlib", for the .py files of Python's standard library, or a folder, of which every regular file
    counts that is neither hidden (its name starts with a dot) nor in a hidden folder. UserError where there is no text.
    """
    if source == "stdlib":
        root = sysconfig.get_paths()["stdlib"]
        paths, links = walk(root, NOT_STDLIB)
        paths = [path for path in paths if path.endswith(".py")]
    else:
        root = source
        paths, links = walk(root)
    names = {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths}
    documents = [Document(name, path, os.path.getsize(path)) for name, path in names.items()]
    warn_of_left_out("symlinked folder", links)
    if not any(d.size for d in documents):
        has = "has no file"
        if documents:
            has = f"has {many(len(documents), 'file')} without a character"
        raise UserError(
            f"--source {source}: there is no text, the folder {has} (hidden ones and symlinked folders do "
            f"not count); give a folder with text files, or a file or quoted glob of records "
            f"(--help lists their endings)."
        )
    return sorted(documents)


def by_hash(documents):
    """The documents in an order that looks random and is the same on every machine."""
    return sorted(documents, key=lambda d: hashlib.sha256(os.fsencode(d.name)).digest())


def split_documents(documents, val_fraction):
    """(training, validation) documents, each sorted by name.

    Validation is the `val_fraction` of the documents whose names hash lowest: one at least, unless the fraction is 0
    or there is only one document.
    """
    n = len(documents)
    n_val = min(n - 1, max(1, round(val_fraction * n))) if val_fraction > 0 else 0
    shuffled = by_hash(documents)
    return sorted(shuffled[n_val:]), sorted(shuffled[:n_val])


class Files(Source):
    """A source of which every file is a document."""

    unit = "B"

    def __init__(self, source, val_fraction, skip):
        self.documents = list_documents(source)
        files = [File(d.name, d.size, os.stat(d.path).st_mtime_ns) for d in self.documents]
        super().__init__(files, skip)
        _, val = split_documents(self.documents, val_fraction)
        self.val_names = {d.name for d in val}
        self.splits = ("train", "val") if val else ("train",)
        self.total = sum(d.size for d in self.documents)
        # names and sizes, quick to compare: another Python has another stdlib, and folders change
        listing = listing_sha256((d.name, d.size) for d in self.documents)
        self.identity = {"source_listing_sha256": listing}

    def read(self, position):
        """Yield (split, document) from `position` on; self.position then says where the next document begins."""
        done, first = position.get("done", 0), position.get("documents", 0)
        # the position of an earlier version tells no CRC-32
        self.crc32s += [-1] * (first - len(self.crc32s))
        for i, document in enumerate(self.documents[first:], first):
            done += document.size
            self.position = {"documents": i + 1, "done": done}
            yield "val" if document.name in self.val_names else "train", document

    def crc32(self, i, position):
        """CRC-32 of file i's content as it is now."""
        return read_text(self.documents[i]).crc32
