"""What all sources of documents have in common, and what those have whose files hold records."""

import hashlib
import os
import sys
import zlib
from typing import NamedTuple

from tqdm import tqdm

from data.sources.text import DAMAGE
from runtime.files import is_remote, persist
from runtime.messages import UserError, first_line

SHOWN = 3  # warnings of one kind that are printed; the rest are counted


class Document(NamedTuple):
    name: str  # path relative to the source, with forward slashes, or number: the order depends on it alone
    path: str = ""  # "" where `text` holds the document
    size: int = 0  # bytes of the file or of its part, or characters of the text
    text: str | None = None
    start: int | None = None  # where a document begins that is a part of a file
    lost: str = ""  # the count of the manifest that --skip_damaged adds to here; no text then


shown = {}  # {kind: warnings of it that were printed}, of one source


def warn(kind, words):
    """Print a warning on stderr, at most SHOWN of each kind, and none twice: a source may be read twice."""
    printed = shown.setdefault(kind, [])
    if len(printed) < SHOWN and words not in printed:
        printed.append(words)
        more = " (further ones like it are only counted)" if len(printed) == SHOWN else ""
        tqdm.write(f"warning: {words}{more}", file=sys.stderr)


def many(n, noun):
    """A number of things, in words."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def warn_of_left_out(what, paths):
    """Warn of paths that are left out; `what` is one of them in words."""
    if paths:
        warn(what, f"left out: {many(len(paths), what)} (such as {min(paths)})")


def skipped(error):
    """The words of the warning of what --skip_damaged leaves out because of `error`."""
    return f"{str(error).rstrip('.')}: skipped"


def listing_sha256(files):
    """Hash of (name, size) pairs."""
    lines = "".join(f"{name}\0{size}\0" for name, size in files)
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


class Source:
    """Documents in an order that never changes.

    A subclass has
        read(position)   yields documents from `position` on, {} for the beginning. After each, self.position says where
                         the next one begins: {"documents": how many, "done": bytes of files, "file": files read to
                         their end}. Raises UserError where what `position` was taken of has changed.
        identity         {setting: value} of the manifest; shards of another identity are other shards
    """

    def __init__(self, files, skip):
        self.files = files  # [(name, bytes)]
        self.total = sum(size for _, size in files)
        self.skip = skip  # --skip_damaged
        advice = "; replace it and rerun the same command to resume, or give --skip_damaged"
        self.advice = "" if skip else advice

    def read_sha256(self, position):
        """Hash of the names and sizes of the files that were read before `position`: they must stay."""
        return listing_sha256(self.files[: position.get("file", 0)])

    def damaged(self, error, count):
        """Warn of `error`, a UserError, and return a Document that counts what is lost. Raises it without
        --skip_damaged."""
        if not self.skip:
            raise error
        warn("damage", skipped(error))
        return Document("", lost=count)


class Records(Source):
    """A source whose files hold records, each of which is a document.

    A subclass has
        endings         of its files' names
        entries(file)   yields for each record of file number `file` the number of the next one, the bytes of the file
                        up to here, and its text: a str, None, or the Document of what --skip_damaged leaves out.
                        Where the rest cannot be read it raises UserError or one of DAMAGE.
    """

    endings = ()

    def __init__(self, fs, files, column, skip):
        """files: {path: bytes} in the file system `fs`; column: the one that holds the text."""
        super().__init__(list(files.items()), skip)
        self.fs = fs
        self.column = column
        self.identity = {"source_listing_sha256": listing_sha256(self.files), "text_column": column}

    def read(self, position):
        """Yield documents from `position` on. The records before it in its file are read again: their CRC-32 tells
        whether they are the same."""
        n = position.get("documents", 0)
        first = position.get("file", 0)
        line = position.get("line", 0)
        before = sum(size for _, size in self.files[:first])
        for file, (name, size) in enumerate(self.files[first:], first):
            crc32, is_reached = 0, line == 0
            try:
                for number, done, text in self.entries(file):
                    content = text.encode(errors="surrogatepass") if isinstance(text, str) else b""
                    crc32 = zlib.crc32(content, crc32)
                    if is_reached:
                        document = text
                        if not isinstance(text, Document):
                            document = Document(str(n), size=len(text or ""), text=text or "")
                            n += 1
                        self._stand_at(n, before + done, file, number, crc32)
                        yield document
                    elif number >= line:
                        is_reached = crc32 == position["crc32"]
                        if not is_reached:
                            break
            except (UserError, *DAMAGE) as e:
                if is_reached:
                    self._check_storage(name)
                    lost = self.damaged(self.cannot_be_read(name, e), "damaged_files")
                    self._stand_at(n, before + size, file + 1, 0, 0)
                    yield lost
            if not is_reached:
                raise UserError(
                    f"--source: {name} has changed since it was read for these shards; restore it, or give another "
                    f"--output."
                )
            before += size
            line = 0

    def _stand_at(self, documents, done, file, line, crc32):
        self.position = dict(documents=documents, done=done, file=file, line=line, crc32=crc32)

    def cannot_be_read(self, path, error):
        """The UserError for an error that was raised in reading a file."""
        if isinstance(error, UserError):
            return error
        return UserError(f"--source: {path} cannot be read ({first_line(error)}){self.advice}.")

    def _check_storage(self, path):
        """Raises UserError where remote storage gives nothing of a file at all: the file is not damaged then."""
        address = self.fs.unstrip_protocol(path)
        if self.skip and is_remote(address):
            persist(lambda: self.fs.cat_file(path, start=0, end=1), address)


class Mixed(Source):
    """Sources one after the other, as of a folder with files of several kinds. Only the first may be of whole files:
    its documents are numbered like its files."""

    def __init__(self, parts):
        super().__init__([file for part in parts for file in part.files], parts[0].skip)
        self.parts = parts
        self.identity = parts[-1].identity | {"source_listing_sha256": listing_sha256(self.files)}

    def read(self, position):
        at = dict(documents=0, done=0, file=0) | position
        first = size = 0  # files and bytes of the parts before
        for part in self.parts:
            end = first + len(part.files)
            if at["file"] < end:
                here = dict(file=at["file"] - first, done=at["done"] - size)
                for document in part.read(at | here):
                    at = dict(part.position)
                    at["file"] += first
                    at["done"] += size
                    self.position = at
                    yield document
                at = dict(documents=at["documents"], file=end, done=size + part.total)
            first = end
            size += part.total
