"""What all sources of documents have in common, and what those have whose files hold records.

A new kind of file with records is a subclass of `Records` in a file of its own, and an entry of KINDS in kinds.py.
jsonl.py and parquet.py are examples.
"""

import hashlib
import os
import sys
import zlib
from typing import NamedTuple

from tqdm import tqdm

from data.sources.text import DAMAGE, check_length
from runtime.files import is_remote, persist
from runtime.messages import UserError, first_line

SHOWN = 3  # warnings of one kind that are printed; the rest are counted


class Lost(NamedTuple):
    """What --skip_damaged leaves out at one place."""

    files: int = 0
    records: int = 0


class Document(NamedTuple):
    name: str  # path relative to the source, with forward slashes, or number: the order depends on it alone
    path: str  # "" where `text` holds the document
    size: int  # bytes of the file or of its part, or characters of the text
    text: str | None = None
    lost: Lost = Lost()  # of what is damaged between this document and the one before
    start: int | None = (
        None  # where the part of a file that is the document begins; None: all of it is
    )


class File(NamedTuple):
    name: str
    size: int
    stamp: int  # changes when the file is written again


# --- Messages ---------------------------------------------------------------------------------------------------


class Warnings:
    """Prints warnings on stderr, at most SHOWN of each kind, and none twice: a source may be read twice."""

    def __init__(self):
        self.shown = {}

    def __call__(self, kind, words):
        shown = self.shown.setdefault(kind, [])
        if len(shown) < SHOWN and words not in shown:
            shown.append(words)
            more = " (further ones like it are only counted)" if len(shown) == SHOWN else ""
            tqdm.write(f"warning: {words}{more}", file=sys.stderr)


warn = Warnings()


def many(n, noun):
    """A number of things, in words."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def warn_of_left_out(what, paths, more=""):
    """Warn of the paths of things that are left out; `what` is one of them in words, `more` ends the sentence."""
    if paths:
        such_as = min(paths) if len(paths) == 1 else f"such as {min(paths)}"
        warn(what, f"left out: {many(len(paths), what)} ({such_as}){more}")


def skipped(error):
    """The words of a warning of what --skip_damaged leaves out because of `error`."""
    return f"{str(error).rstrip('.')}: skipped"


# --- Files ------------------------------------------------------------------------------------------------------


def walk(root, leave_out=()):
    """(paths of a local folder's regular files, paths of symlinked folders, which are not entered).

    Hidden files and folders are left out, and so are folders named in leave_out. Raises UserError where a folder cannot
    be read.
    """

    def stop(e):
        raise UserError(f"--source: {e.filename} cannot be read ({e.strerror}).")

    paths, links = [], []
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [s for s in subfolders if s not in leave_out and not s.startswith(".")]
        inside = [os.path.join(folder, s) for s in subfolders]
        links += [path for path in inside if os.path.islink(path)]
        visible = [os.path.join(folder, f) for f in files if not f.startswith(".")]
        paths += [path for path in visible if os.path.isfile(path)]
    return paths, links


def stamp_of(info):
    """A number that changes when a file is written again, from what its file system says of it; 0 where it is silent.

    Storage that knows a checksum says that one first, so that a copy has the same stamp.
    """
    checksums = ("md5Hash", "crc32c", "ETag", "etag", "blob_id")
    times = ("mtime", "LastModified", "last_modified", "created")
    for key in checksums + times:
        if info.get(key):
            return int.from_bytes(hashlib.sha256(str(info[key]).encode()).digest()[:8], "big") >> 1
    return 0


def listing_sha256(files):
    """Hash of (name, size) pairs."""
    lines = "".join(f"{name}\0{size}\0" for name, size in files)
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


# --- Any source -------------------------------------------------------------------------------------------------


class Source:
    """Documents in an order that never changes, and what tells whether its files have changed since they were read.

    A subclass has
        read(position)   yields documents from `position` on, {} for the beginning. After each, self.position says where
                         the next one begins: a dict for JSON, in which "documents" counts documents and "done" units.
        crc32(i, position)   CRC-32 of file i as it is now, as far as it was read up to `position`
        identity         {setting: value} of the manifest; shards of another identity are other shards
        unit, total      of the progress bar; total is None where nothing tells
    """

    def __init__(self, files, skip):
        self.files = files
        self.skip = skip  # --skip_damaged, or None for a program without that flag
        self.crc32s = []  # of what was read of each of the first files; -1: not known
        self.advice = ""
        if skip is False:
            self.advice = (
                "; replace it and rerun the same command to resume, or give --skip_damaged"
            )

    def stamps(self, n=None):
        """{name: integers} of the first n files, or all: their sizes and stamps."""
        files = self.files[:n]
        return {"sizes": [f.size for f in files], "stamps": [f.stamp for f in files]}

    def seen(self, position):
        """{name: integers} of the files that were read up to `position`: their sizes, stamps and CRC-32s."""
        crc32s = self.crc32s[: position["documents"]]
        return self.stamps(len(crc32s)) | {"crc32s": crc32s}

    def names_sha256(self, n):
        """Hash of the names that must stay once n files were read: further ones may come and go."""
        return listing_sha256((f.name, "") for f in self.files[:n])

    def compare(self, seen, position, advice):
        """Take over what an earlier run has `seen` up to `position`.

        Returns the names of the files that were written again with the same content. Raises UserError, with `advice`,
        where the content of one has changed.
        """
        written_again = []
        crc32s = seen["crc32s"].tolist()
        before = zip(seen["sizes"].tolist(), seen["stamps"].tolist(), crc32s)
        for i, (file, (size, stamp, crc32)) in enumerate(zip(self.files, before)):
            known = crc32 >= 0
            if file.size == size and (file.stamp == stamp or not known):
                continue
            if not known or self.crc32(i, position) != crc32:
                raise UserError(
                    f"--source: {file.name} has changed since it was read for these shards; {advice}."
                )
            written_again.append(file.name)
        self.crc32s = crc32s
        return written_again

    def cannot_be_read(self, what, error):
        """The UserError for an error that was raised in reading `what`."""
        if isinstance(error, UserError):
            return error
        return UserError(f"--source: {what} cannot be read ({first_line(error)}){self.advice}.")

    def damaged(self, error, **lost):
        """Warn of `error`, a UserError, and return the Lost that it means. Raises it without --skip_damaged."""
        if not self.skip:
            raise error
        warn("damage", skipped(error))
        return Lost(**lost)


# --- Sources of records -----------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """What one record of a file is read as."""

    number: int  # of the next record of the file, from which `entries` can continue
    done: int  # units of the progress bar up to here, those of earlier files too
    content: bytes  # what the file's CRC-32 is taken of
    text: str | Lost | None  # Lost: this record or these records are damaged


class Records(Source):
    """A source whose files hold records, each of which is a document.

    A subclass has
        endings                the endings of its files' names
        unit                   of the progress bar: "B", or " documents"
        entries(file, first)   yields an Entry for each record of file number `file` from record `first` on. Where the
                               rest cannot be read it raises UserError or one of DAMAGE.
        before(file)           units in the files before number `file`, where they are not bytes
    """

    endings = ()
    unit = "B"

    def __init__(self, fs, files, column, skip):
        """files: {path: what the file system `fs` says of it}; column: the one that holds the text."""
        super().__init__([File(p, i["size"] or 0, stamp_of(i)) for p, i in files.items()], skip)
        self.fs = fs
        self.column = column
        listing = listing_sha256((f.name, f.size) for f in self.files)
        self.identity = {"source_listing_sha256": listing, "text_column": column}

    @property
    def total(self):
        return self.before(len(self.files))

    def before(self, file):
        """Bytes of the files before number `file`."""
        return sum(f.size for f in self.files[:file])

    def read(self, position):
        """Yield documents from `position` on; self.position then says where the next one begins."""
        n, crc32 = position.get("documents", 0), position.get("crc32", 0)
        first, begin = position.get("file", 0), position.get("line", 0)
        del self.crc32s[first:]
        for file in range(first, len(self.files)):
            try:
                for entry in self.entries(file, begin):
                    crc32 = zlib.crc32(entry.content, crc32)
                    document = record(n, entry.text)
                    n += not any(document.lost)
                    self._stand_at(n, entry.done, file, entry.number, crc32)
                    yield document
                self.crc32s.append(crc32)
            except (UserError, *DAMAGE) as e:
                name = self.files[file].name
                self._see_storage(name)
                lost = self.damaged(self.cannot_be_read(name, e), files=1)
                self.crc32s.append(crc32)
                self._stand_at(n, self.before(file + 1), file + 1, 0, 0)
                yield record(n, lost)
            begin = crc32 = 0

    def _stand_at(self, documents, done, file, line, crc32):
        self.position = dict(documents=documents, done=done, file=file, line=line, crc32=crc32)

    def _see_storage(self, path):
        """Raises UserError where remote storage gives nothing of a file at all: the file is not damaged then."""
        address = self.fs.unstrip_protocol(path)
        if self.skip and is_remote(address):
            persist(lambda: self.fs.cat_file(path, start=0, end=1), address)

    def seen(self, position):
        """As of any source; of the file that `position` lies in, the CRC-32 is of the records before it."""
        crc32s = self.crc32s[: position["file"]]
        if position["line"]:
            crc32s = [*crc32s, position["crc32"]]
        return self.stamps(len(crc32s)) | {"crc32s": crc32s}

    def crc32(self, i, position):
        """CRC-32 of file i's records as they are now, of those before `position` where it lies in that file.

        None where the file ends before `position`.
        """
        last = position["line"] if i == position.get("file") else None
        crc32 = number = 0
        try:
            for entry in self.entries(i, 0):
                number = entry.number
                crc32 = zlib.crc32(entry.content, crc32)
                if number == last:
                    break
        except DAMAGE:  # it may have been damaged then, too
            pass
        return crc32 if last in (None, number) else None


def record(i, text):
    """The Document of record i of a source; where `text` is a Lost, one that has no text and tells what is lost."""
    if isinstance(text, Lost):
        return Document("", "", 0, "", text)
    return Document(str(i), "", len(text or ""), text or "")


def text_in(row, column, where):
    """The text of a record, a str or None. Raises UserError, with `where` it stands, where the record has none or too
    much."""
    has = "it is no object"
    if isinstance(row, dict):
        has = f"its columns are {', '.join(map(str, row))}"
    if not isinstance(row, dict) or column not in row:
        raise UserError(f"--text_column {column}: {where} has no such column ({has}).")
    text = row[column]
    if not isinstance(text, str | None):
        raise UserError(
            f"--text_column {column}: {where} holds {type(text).__name__} there, not text."
        )
    check_length(len(text or ""), where)
    return text
