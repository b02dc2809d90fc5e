"""Documents that are files: text files, compressed or not, or Python's standard library."""

import hashlib
import os
import sysconfig

from data.sources import text
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
from runtime.messages import UserError

PART = 1_000_000  # bytes of a part of a text file that is too long for one document
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
    warn_of_left_out("symlinked folder", links)
    return documents_of(paths, root, source)


def documents_of(paths, root, source):
    """The documents of files in a folder `root`, sorted by name. Raises UserError, with `source`, where there is no
    text."""
    names = {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths}
    documents = []
    for name, path in sorted(names.items()):
        documents += parts_of(name, path)
    if not any(d.size for d in documents):
        has = "no file"
        if documents:
            has = f"{many(len(documents), 'file')} without a character"
        raise UserError(
            f"--source {source}: there is no text, it has {has} (hidden ones and symlinked folders do not "
            f"count); give a text file, a folder with some, or a file or quoted glob of records (--help "
            f"lists their endings)."
        )
    return documents


def parts_of(name, path):
    """The documents of a file: itself, or parts of a text that is too long for one and neither compressed nor UTF-16.

    Parts have about PART bytes and end with a line, wherever the next line ends.
    """
    size = os.path.getsize(path)
    if size <= text.LONGEST or os.path.splitext(path)[1] in text.COMPRESSION:
        return [Document(name, path, size)]
    parts, start = [], 0
    try:
        with open(path, "rb") as f:
            if text.wide_encoding(f.read(4)):
                return [Document(name, path, size)]
            while start < size:
                f.seek(start + PART)
                while (line := f.readline(PART)) and not line.endswith(b"\n"):
                    pass
                end = min(f.tell(), size)
                parts.append(Document(f"{name}:{start}", path, end - start, start=start))
                start = end
    except OSError:  # reading the document says so
        return [Document(name, path, size)]
    return parts


def check_is_text(document):
    """Raises UserError where a file is no text: what is not UTF-8 in it is a tenth of it."""
    content = read_text(document)
    if content.replaced * 10 > len(content.text):
        raise UserError(
            f"--source {document.path}: is no text in UTF-8; give one (iconv -f ENCODING -t utf-8 makes it "
            f"from another text)."
        )


def by_hash(documents):
    """The documents in an order that looks random and is the same on every machine."""
    return sorted(documents, key=lambda d: hashlib.sha256(os.fsencode(d.name)).digest())


class Files(Source):
    """A source of which every file is a document."""

    unit = "B"

    def __init__(self, documents, skip):
        self.documents = documents
        files = [File(d.name, d.size, os.stat(d.path).st_mtime_ns) for d in self.documents]
        super().__init__(files, skip)
        self.total = sum(d.size for d in self.documents)
        # names and sizes, quick to compare: another Python has another stdlib, and folders change
        listing = listing_sha256((d.name, d.size) for d in self.documents)
        self.identity = {"source_listing_sha256": listing}

    def read(self, position):
        """Yield documents from `position` on; self.position then says where the next one begins."""
        done, first = position.get("done", 0), position.get("documents", 0)
        del self.crc32s[first:]
        for i, document in enumerate(self.documents[first:], first):
            done += document.size
            self.position = {"documents": i + 1, "done": done}
            yield document

    def crc32(self, i, position):
        """CRC-32 of file i's content as it is now."""
        return read_text(self.documents[i]).crc32
