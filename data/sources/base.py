"""The base classes of sources: `Source`, which yields documents, and `Records`, which reads one format of records.

A file is either one document, such as a text file, or it holds records, such as lines of JSON; then each is a document.
"""

import hashlib
import os
import zlib
from typing import NamedTuple

from data.sources.text import DAMAGE
from runtime.files import is_remote, persist
from runtime.messages import UserError, first_line, say_aside

ADVICE = "replace it and rerun the same command to resume, or give --skip_damaged"
SHOWN = 3  # warnings of one category that are printed; further ones are only counted
shown = {}  # {category: its warnings that were printed}, for the source that is open


class Document(NamedTuple):
    """A document: either its `text`, or the file at `path` that holds it, which is not read yet."""

    # path relative to the source, with forward slashes, or a number; it alone decides the order
    name: str
    path: str = ""  # "" where `text` holds the document
    size: int = 0  # bytes of the file, of its part or of the text
    text: str | None = None
    start: int | None = None  # offset in bytes of a document that is a part of a file
    is_known: bool = False  # known to be text, whatever its bytes look like
    # for a record or file left out by --skip_damaged: which count of the manifest it belongs to
    lost: str = ""


def warn(category, words):
    """Print a warning on stderr: at most SHOWN of each category, and none twice, since a source may be read twice."""
    printed = shown.setdefault(category, [])
    if len(printed) < SHOWN and words not in printed:
        printed.append(words)
        more = " (further ones like it are only counted)" if len(printed) == SHOWN else ""
        say_aside(f"warning: {words}{more}")


def counted(n, noun):
    """A number with its noun: "1 file", "2,000 files"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def warn_of_left_out(what, paths, more=""):
    """Print one warning about all paths that are left out. what: a noun for one of them; more: ends the sentence."""
    if paths:
        warn(what, f"left out: {counted(len(paths), what)} (such as {min(paths)}){more}")


def skipped(error):
    """The text of the warning about what --skip_damaged leaves out because of `error`."""
    return f"{str(error).rstrip('.')}: skipped"


def listing_sha256(files):
    """SHA-256 of a list of (name, size)."""
    lines = "".join(f"{name}\0{size}\0" for name, size in files)
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


class Records:
    """Files of one format that hold records, each of which is a document.

    A subclass defines
        entries(path)   Yields (number, done, text) for each record of a file. number: of the record, counted from 1;
                        done: bytes of the file that were read so far; text: a str, None for an empty cell, or a
                        Document for a record that --skip_damaged leaves out. Raises UserError or one of DAMAGE where
                        the rest of the file cannot be read.
    """

    def __init__(self, fs, files, column, skip):
        """files: {path: bytes} in the file system `fs`. column: name of the text column. skip: --skip_damaged."""
        self.fs = fs
        self.files = files
        self.column = column
        self.skip = skip
        self.advice = "" if skip else ADVICE

    def cannot_be_read(self, path, error):
        """The UserError for an error that was raised while a file was read."""
        if isinstance(error, UserError):
            return error
        return UserError(
            f"{path} cannot be read ({first_line(error)})", flag="source", remedy=self.advice
        )

    def cell(self, row, at):
        """The text column of a row, {column: value}: a str or None. Raises UserError where it holds no text."""
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
        """`damaged` for a whole file. Raises UserError where remote storage does not answer for it at all: the storage
        fails then, and the file may be sound."""
        address = self.fs.unstrip_protocol(path)
        if self.skip and is_remote(address):
            persist(lambda: self.fs.cat_file(path, start=0, end=1), address)
        return self.damaged(self.cannot_be_read(path, error), "damaged_files")


class Source:
    """Documents in an order that never changes: first the files that are documents, then the records of other files.

    identity: {setting: value} for the manifest. Shards whose manifest differs in one of these came from another source.
    position: where the next document begins. It holds "documents", the number of documents before it; "done", the bytes
    of files before it; and "file", the number of files that were read to the end. Inside a file of records it also
    holds "line", the number of records that were read from the file, and "crc32", the checksum of their texts.
    """

    def __init__(self, documents, readers, skip):
        """documents: those that are files. readers: a list of `Records`. skip: --skip_damaged."""
        self.documents = documents
        self.records = [(reader, path) for reader in readers for path in reader.files]
        self.files = [(d.name, d.size) for d in documents]  # [(name, bytes)]
        self.files += [(path, reader.files[path]) for reader, path in self.records]
        self.total = sum(size for _, size in self.files)
        self.skip = skip
        # Another Python has another standard library, and folders change. Names and sizes are quick to
        # compare.
        self.identity = {"source_listing_sha256": listing_sha256(self.files)}
        if readers:
            self.identity["text_column"] = readers[0].column

    def read_sha256(self, position):
        """SHA-256 of the names and sizes of the files before `position`. A run resumes there only if it is the same."""
        return listing_sha256(self.files[: position.get("file", 0)])

    def read(self, position):
        """Yield the documents from `position` on, {} being the beginning. With each, self.position moves past it.
        Raises UserError where the records before `position` have changed."""
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
        """Yield the documents of a file of records from `position` on.

        The records before the position are read again, and their CRC-32 shows whether they are unchanged.
        file: number of the file in the source. before: bytes of all files before it.
        """
        reader, path = self.records[file - len(self.documents)]
        n = self.position["documents"]
        line = position.get("line", 0)
        crc32 = 0
        is_reached = line == 0
        try:
            for number, done, text in reader.entries(path):
                content = text.encode(errors="surrogatepass") if isinstance(text, str) else b""
                crc32 = zlib.crc32(content, crc32)
                if is_reached:
                    document = text
                    if not isinstance(text, Document):
                        document = Document(str(n), size=len(content), text=text or "")
                        n += 1
                    self._set_position(n, before + done, file, number, crc32)
                    yield document
                elif number >= line:
                    is_reached = crc32 == position["crc32"]
                    if not is_reached:
                        break
        except (UserError, *DAMAGE) as e:
            if is_reached:
                lost = reader.damaged_file(path, e)
                self._set_position(n, before + reader.files[path], file + 1, 0, 0)
                yield lost
        if not is_reached:
            raise UserError(
                f"{path} has changed since it was read",
                flag="source",
                remedy="restore it, or give another {output}",
                output=None,
            )

    def _set_position(self, documents, done, file, line, crc32):
        self.position = dict(documents=documents, done=done, file=file, line=line, crc32=crc32)
