"""What the data programs share: the documents of a source, how they split, their text, and the command line."""

import argparse
import base64
import hashlib
import os
import sysconfig
from typing import NamedTuple

from utils import UserError

VAL_FRACTION = 0.1  # tokenize_shards.py's default; train_tokenizer.py learns from none of these documents


class Document(NamedTuple):
    name: str  # path relative to the source, with forward slashes: order and split depend on it alone
    path: str
    size: int  # bytes of the file


def list_documents(source):
    """The documents of a source, one per file, sorted by name.

    `source` is "stdlib", for the .py files of Python's standard library, or a folder, of which every regular file
    counts that is neither hidden (its name starts with a dot) nor in a hidden folder. UserError where there is no text.
    """
    stdlib = source == "stdlib"
    root = sysconfig.get_paths()["stdlib"] if stdlib else source
    if not os.path.isdir(root):
        raise UserError(f"--source {source}: there is no such folder; give a folder of text files, or stdlib.")
    documents, skip = [], {"site-packages", "dist-packages", "__pycache__"} if stdlib else set()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in skip and not s.startswith(".")]
        for file in files:
            path = os.path.join(folder, file)
            if not file.startswith(".") and os.path.isfile(path) and (file.endswith(".py") or not stdlib):
                name = os.path.relpath(path, root).replace(os.sep, "/")
                documents.append(Document(name, path, os.path.getsize(path)))
    if not any(d.size for d in documents):
        raise UserError(f"--source {source}: there is no text in its {len(documents)} files (without hidden ones).")
    return sorted(documents)


def by_hash(documents):
    """The documents in an order that looks random and is the same on every machine."""
    return sorted(documents, key=lambda d: hashlib.sha256(os.fsencode(d.name)).digest())


def split(documents, val_fraction):
    """(training, validation) documents, each sorted by name.

    Validation is the `val_fraction` of the documents whose names hash lowest: one at least, unless the fraction is 0
    or there is only one document.
    """
    n = len(documents)
    n_val = min(n - 1, max(1, round(val_fraction * n))) if val_fraction > 0 else 0
    shuffled = by_hash(documents)
    return sorted(shuffled[n_val:]), sorted(shuffled[:n_val])


def read_text(document, limit=-1):
    """(text, replaced) of a document, or of its first `limit` bytes; replaced: what is not UTF-8 became U+FFFD.

    Raises UserError where the file cannot be read.
    """
    try:
        with open(document.path, "rb") as f:
            content = f.read(limit)
    except OSError as e:
        raise UserError(f"--source: {document.path} cannot be read ({e.strerror}).") from None
    try:
        return content.decode(), False
    except UnicodeDecodeError:
        return content.decode(errors="replace"), True


def dump_ranks(ranks):
    """{token bytes: rank} -> the bytes of a file of tiktoken ranks: a line `base64(token) rank` for each, by rank."""
    return b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in sorted(ranks.items(), key=lambda item: item[1]))


class Parser(argparse.ArgumentParser):
    """Help that shows the defaults; a flag that does not parse is a UserError, not a page of usage."""

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
        self.add_argument("--source", required=True, help="a folder of text files, read recursively, each file being a "
                          "document; or stdlib: the .py files of Python's standard library")  # fmt: skip

    def error(self, message):
        raise UserError(f"{message}; see --help.")
