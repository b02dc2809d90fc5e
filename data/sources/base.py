"""What all sources of documents have in common, and what those have whose files hold records."""

import hashlib
import os
import zlib
from typing import NamedTuple

from data.sources.text import DAMAGE
from runtime.files import is_remote, persist
from runtime.messages import UserError, first_line, say_aside

ADVICE = "replace it and rerun the same command to resume, or give --skip_damaged"
SHOWN = 3  # warnings of one kind that are printed; the rest are counted
shown = {}  # {kind: warnings of it that were printed}, of one source


class Document(NamedTuple):
    name: str  # path relative to the source, with forward slashes, or number: the order depends on it alone
    path: str = ""  # "" where `text` holds the document
    size: int = 0  # bytes of the file, of its part or of the text
    text: str | None = None
    start: int | None = None  # where a document begins that is a part of a file
    is_known: bool = False  # to be text, whatever its bytes are
    lost: str = ""  # the count of the manifest that --skip_damaged adds to here; no text then


def warn(kind, words):
    """Print a warning on stderr, at most SHOWN of each kind, and none twice: a source may be read twice."""
    printed = shown.setdefault(kind, [])
    if len(printed) < SHOWN and words not in printed:
        printed.append(words)
        more = " (further ones like it are only counted)" if len(printed) == SHOWN else ""
        say_aside(f"warning: {words}{more}")


def many(n, noun):
    """A number of things, in words."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def warn_of_left_out(what, paths, more=""):
    """Warn of paths that are left out; `what` is one of them in words, `more` ends the sentence."""
    if paths:
        warn(what, f"left out: {many(len(paths), what)} (such as {min(paths)}){more}")


def skipped(error):
    """The words of the warning of what --skip_damaged leaves out because of `error`."""
    return f"{str(error).rstrip('.')}: skipped"


def listing_sha256(files):
    """Hash of (name, size) pairs."""
    lines = "".join(f"{name}\0{size}\0" for name, size in files)
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


class Records:
    """Files of one kind that hold records, each of which is a document.

    A subclass has
        entries(path)   yields for each record of a file the number of the next one, the bytes of the file up to here,
                        and its text: a str, None, or the Document of what --skip_damaged leaves out. Where the rest
                        cannot be read it raises UserError or one of DAMAGE.
    """

    def __init__(self, fs, files, column, skip):
        """files: {path: bytes} in the file system `fs`; column: the one that holds the text; skip: --skip_damaged."""
        self.fs = fs
        self.files = files
        self.column = column
        self.skip = skip
        self.advice = "" if skip else ADVICE

    def cannot_be_read(self, path, error):
        """The UserError for an error that was raised in reading a file."""
        if isinstance(error, UserError):
            return error
        return UserError(
            f"{path} cannot be read ({first_line(error)})", flag="source", remedy=self.advice
        )

    def cell(self, row, at):
        """What is in the column of a row, {column: value}: a str or None. Raises UserError where that is no text."""
        if not isinstance(row, dict):
            has = f"holds {row!r:.40}, not an object with a column {self.column}"
        elif self.column not in row:
            others = ", ".join(row)
            has = f"has no column {self.column}, only {others}; name that of the text by --text_column"
        elif not isinstance(row[self.column], str | None):
            has = f"holds {row[self.column]!r:.40} in its column {self.column}, which is no text"
        else:
            return row[self.column]
        raise UserError(f"{at} {has}", flag="source")

    def damaged(self, error, count):
        """Warn of `error`, a UserError, and count what is lost by a Document; raise it without --skip_damaged."""
        if not self.skip:
            raise error
        warn("damage", skipped(error))
        return Document("", lost=count)

    def damaged_file(self, path, error):
        """`damaged` of a file. Raises UserError where remote storage gives nothing of it at all: it is sound then."""
        address = self.fs.unstrip_protocol(path)
        if self.skip and is_remote(address):
            persist(lambda: self.fs.cat_file(path, start=0, end=1), address)
        return self.damaged(self.cannot_be_read(path, error), "damaged_files")


class Source:
    """Documents in an order that never changes: those that are files, then the records of other files.

    identity: {setting: value} of the manifest; shards of another identity are other shards.
    position: where the next document begins: {"documents": how many came before, "done": bytes of files, "file": files
    read to their end}, and in a file of records "line", how many were read, and their "crc32".
    """

    def __init__(self, documents, kinds, skip):
        """documents: those that are files; kinds: a list of Records; skip: --skip_damaged."""
        self.documents = documents
        self.records = [(kind, path) for kind in kinds for path in kind.files]
        self.files = [(d.name, d.size) for d in documents]  # [(name, bytes)]
        self.files += [(path, kind.files[path]) for kind, path in self.records]
        self.total = sum(size for _, size in self.files)
        self.skip = skip
        # names and sizes, quick to compare: another Python has another stdlib, and folders change
        self.identity = {"source_listing_sha256": listing_sha256(self.files)}
        if kinds:
            self.identity["text_column"] = kinds[0].column

    def read_sha256(self, position):
        """Hash of the names and sizes of the files that were read before `position`: they must stay."""
        return listing_sha256(self.files[: position.get("file", 0)])

    def read(self, position):
        """Yield documents from `position` on, {} for the beginning; after each, self.position is that of the next one.
        Raises UserError where what `position` was taken of has changed."""
        self.position = {"documents": 0} | position
        first = position.get("file", 0)
        done = sum(size for _, size in self.files[:first])
        for file, (_, size) in enumerate(self.files[first:], first):
            if file < len(self.documents):
                self.position = {"documents": file + 1, "done": done + size, "file": file + 1}
                yield self.documents[file]
            else:
                yield from self._read_records(file, done, position if file == first else {})
            done += size

    def _read_records(self, file, before, position):
        """Yield the documents of a file of records from `position` on, `before` bytes after the first file. The records
        before it are read again: their CRC-32 tells whether they are the same."""
        kind, path = self.records[file - len(self.documents)]
        n = self.position["documents"]
        line = position.get("line", 0)
        crc32, is_reached = 0, line == 0
        try:
            for number, done, text in kind.entries(path):
                content = text.encode(errors="surrogatepass") if isinstance(text, str) else b""
                crc32 = zlib.crc32(content, crc32)
                if is_reached:
                    document = text
                    if not isinstance(text, Document):
                        document = Document(str(n), size=len(content), text=text or "")
                        n += 1
                    self._stand_at(n, before + done, file, number, crc32)
                    yield document
                elif number >= line:
                    is_reached = crc32 == position["crc32"]
                    if not is_reached:
                        break
        except (UserError, *DAMAGE) as e:
            if is_reached:
                lost = kind.damaged_file(path, e)
                self._stand_at(n, before + kind.files[path], file + 1, 0, 0)
                yield lost
        if not is_reached:
            raise UserError(
                f"{path} has changed since it was read",
                flag="source",
                remedy="restore it, or give another {output}",
                output=None,
            )

    def _stand_at(self, documents, done, file, line, crc32):
        self.position = dict(documents=documents, done=done, file=file, line=line, crc32=crc32)
