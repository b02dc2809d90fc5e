"""What the data programs share: the documents of a source, how they split, their text, and the command line."""

import argparse
import base64
import codecs
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import fsspec
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

import utils
from training import interrupts
from utils import UserError, is_remote, one_sentence, persist

VAL_FRACTION = (
    0.1  # tokenize_shards.py's default; train_tokenizer.py learns from none of these documents
)
RECORDS = {
    ".jsonl": None,
    ".jsonl.gz": "gzip",
    ".jsonl.zst": "zstd",
    ".parquet": None,
}  # ending: compression
DAMAGE = (
    OSError,
    EOFError,
    UnicodeError,
    pyarrow.ArrowException,
)  # what reading a damaged file raises
WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
TEXT_TYPES = (
    "string",
    "large_string",
    "string_view",
    "null",
)  # Arrow's, of a column that holds text
SHOWN = 3  # warnings of one kind that are printed; the rest are counted


class Lost(NamedTuple):
    """What --skip_damaged leaves out at one place."""

    files: int = 0
    records: int = 0


class Document(NamedTuple):
    name: str  # path relative to the source, with forward slashes, or number: order and split depend on it alone
    path: str  # "" where `text` holds the document
    size: int  # bytes of the file, or characters of the text
    text: str | None = None
    lost: Lost = Lost()  # of what is damaged between this document and the one before


class File(NamedTuple):
    name: str
    size: int
    stamp: int  # changes when the file is written again


class Warnings:
    """Prints warnings on stderr, at most SHOWN of each kind."""

    def __init__(self):
        self.counts = {}

    def __call__(self, kind, words):
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= SHOWN:
            more = " (further ones like it are only counted)" if self.counts[kind] == SHOWN else ""
            tqdm.write(f"warning: {words}{more}", file=sys.stderr)


warn = Warnings()


def many(n, noun):
    """A number of things, in words."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


# --- Any source's files -----------------------------------------------------------------------------------------


def walk(root, leave_out=()):
    """(paths of a local folder's regular files, paths of symlinked folders, which are not entered), none of them hidden
    or in a hidden folder or in one named in leave_out. Raises UserError where a folder cannot be read."""

    def stop(e):
        raise UserError(f"--source: {e.filename} cannot be read ({e.strerror}).")

    paths, links = [], []
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [s for s in subfolders if s not in leave_out and not s.startswith(".")]
        links += [path for s in subfolders if os.path.islink(path := os.path.join(folder, s))]
        paths += [
            path
            for f in files
            if not f.startswith(".") and os.path.isfile(path := os.path.join(folder, f))
        ]
    return paths, links


def warn_of_left_out(what, paths):
    if paths:
        such_as = min(paths) if len(paths) == 1 else f"such as {min(paths)}"
        warn(what, f"left out: {many(len(paths), what)} ({such_as})")


def stamp_of(info):
    """A number that changes when a file is written again, from what its file system says of it; 0 where that is
    nothing. Storage that knows a checksum tells that one, so that a copy has the same."""
    for key in (
        "md5Hash",
        "crc32c",
        "ETag",
        "etag",
        "blob_id",
        "mtime",
        "LastModified",
        "last_modified",
        "created",
    ):
        if info.get(key):
            return int.from_bytes(hashlib.sha256(str(info[key]).encode()).digest()[:8], "big") >> 1
    return 0


class Source:
    """The files of a source, and the CRC-32 of what was read of each of the first ones (-1: not known)."""

    def __init__(self, files, skip):
        self.files, self.skip, self.crc32s = files, skip, []
        # skip: None for a program without such a flag
        self.advice = (
            "; replace it and the same command goes on, or give --skip_damaged"
            if skip is False
            else ""
        )

    def seen(self, position):
        """{name: integers} of the files that were read up to `position`: their sizes, stamps and CRC-32s."""
        crc32s = self.crc32s[: position["documents"]]
        return self.stamps(len(crc32s)) | {"crc32s": crc32s}

    def stamps(self, n=None):
        """{name: integers} of the first n files, or all: their sizes and stamps."""
        return {
            "sizes": [f.size for f in self.files[:n]],
            "stamps": [f.stamp for f in self.files[:n]],
        }

    def names_sha256(self, n):
        """Hash of the names that must stay, where n files were read: of all, since the split depends on all."""
        return listing_sha256((f.name, "") for f in self.files)

    def compare(self, seen, position, advice):
        """Take over what an earlier run has `seen`, up to `position`. Raises UserError where a file has changed since;
        one that was written again with the same content has not."""
        again = []
        for i, (file, *held) in enumerate(
            zip(self.files, *(seen[k].tolist() for k in ("sizes", "stamps", "crc32s")))
        ):
            size, stamp, crc32 = held
            if (file.size, file.stamp) == (size, stamp) or (crc32 < 0 and file.size == size):
                continue
            if crc32 < 0 or self.crc32(i, position) != crc32:
                raise UserError(
                    f"--source: {file.name} has changed since it was read for these shards; {advice}."
                )
            again.append(file.name)
        self.crc32s = seen["crc32s"].tolist()
        return again

    def cannot_be_read(self, what, error):
        """The UserError for what was raised in reading `what`."""
        if isinstance(error, UserError):
            return error
        return UserError(f"--source: {what} cannot be read ({first_line(error)}){self.advice}.")

    def damaged(self, error, **lost):
        """The Lost for what `error`, a UserError, tells of, with a warning; raises it without --skip_damaged."""
        if not self.skip:
            raise error
        warn("damage", f"{str(error).rstrip('.')}: skipped")
        return Lost(**lost)


# --- Documents that are files -----------------------------------------------------------------------------------


def list_documents(source):
    """The documents of a source, one per file, sorted by name.

    `source` is "stdlib", for the .py files of Python's standard library, or a folder, of which every regular file
    counts that is neither hidden (its name starts with a dot) nor in a hidden folder. UserError where there is no text.
    """
    stdlib = source == "stdlib"
    root = sysconfig.get_paths()["stdlib"] if stdlib else source
    paths, links = walk(root, {"site-packages", "dist-packages", "__pycache__"} if stdlib else ())
    names = {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths}
    names = {name: path for name, path in names.items() if name.endswith(".py") or not stdlib}
    documents = [Document(name, path, os.path.getsize(path)) for name, path in names.items()]
    warn_of_left_out("symlinked folder", links)
    if not any(d.size for d in documents):
        what = (
            f"has {many(len(documents), 'file')} without a character"
            if documents
            else "has no file"
        )
        raise UserError(
            f"--source {source}: there is no text, the folder {what} (hidden ones and symlinked folders do "
            f"not count); give a folder with text files, or a file or quoted glob of "
            f"{', '.join(RECORDS)}."
        )
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


class Files(Source):
    """A source of which every file is a document."""

    unit = "B"

    def __init__(self, source, val_fraction, skip):
        self.documents = list_documents(source)
        super().__init__(
            [File(d.name, d.size, os.stat(d.path).st_mtime_ns) for d in self.documents], skip
        )
        val = {d.name for d in split(self.documents, val_fraction)[1]}
        self.split_of = ["val" if d.name in val else "train" for d in self.documents]
        self.splits = ("train", "val") if val else ("train",)
        self.total = sum(d.size for d in self.documents)
        # names and sizes, quick to compare: another Python has another stdlib, and folders change
        self.identity = {
            "source_listing_sha256": listing_sha256((d.name, d.size) for d in self.documents)
        }

    def read(self, position):
        """Yield (split, document) from `position` on; self.position then says where the next document begins."""
        done, first = position.get("done", 0), position.get("documents", 0)
        self.crc32s += [-1] * (
            first - len(self.crc32s)
        )  # a position of an earlier version tells none
        for i in range(first, len(self.documents)):
            done += self.documents[i].size
            self.position = {"documents": i + 1, "done": done}
            yield self.split_of[i], self.documents[i]

    def crc32(self, i, position):
        """CRC-32 of file i's content as it is now."""
        return read_text(self.documents[i]).crc32


# --- Documents that are records ---------------------------------------------------------------------------------


def text_in(row, column, where):
    """The text of a record, a str or None; `where` names it in the UserError of one that has none."""
    if not isinstance(row, dict) or column not in row:
        there = (
            f"its columns are {', '.join(map(str, row))}"
            if isinstance(row, dict)
            else "it is no object"
        )
        raise UserError(f"--text_column {column}: {where} has no such column ({there}).")
    if not isinstance(row[column], str | None):
        raise UserError(
            f"--text_column {column}: {where} holds {type(row[column]).__name__} there, not text."
        )
    return row[column]


def record(i, text, val_fraction):
    """(split, document) of record i of a source."""
    # the number's hash: any reader of the source finds the same split, wherever it begins
    hashed = int.from_bytes(hashlib.sha256(b"%d" % i).digest()[:8], "big") / 2**64
    return "val" if hashed < val_fraction else "train", Document(
        str(i), "", len(text or ""), text or ""
    )


class Records(Source):
    """A source of files that hold records, each of which is a document. `entries` reads those of one file."""

    def __init__(self, fs, files, column, val_fraction, skip):
        super().__init__(
            [File(p, info["size"] or 0, stamp_of(info)) for p, info in files.items()], skip
        )
        self.fs, self.column, self.val_fraction = fs, column, val_fraction
        self.splits = ("train", "val") if val_fraction else ("train",)
        listing = listing_sha256((f.name, f.size) for f in self.files)
        self.identity = {"source_listing_sha256": listing, "text_column": column}

    def read(self, position):
        """Yield (split, document) from `position` on; self.position then says where the next document begins."""
        n, first, line, crc32 = (
            position.get(key, 0) for key in ("documents", "file", "line", "crc32")
        )
        crc32 = (
            -1 if n and "crc32" not in position else crc32
        )  # a position of an earlier version tells none
        self.crc32s += [-1] * (first - len(self.crc32s))
        del self.crc32s[first:]
        for file in range(first, len(self.files)):
            try:
                for line, done, content, text in self.entries(file, line):
                    crc32 = crc32 if crc32 < 0 else zlib.crc32(content, crc32)
                    item = "train", Document("", "", 0, "", text)
                    if not isinstance(text, Lost):
                        item, n = record(n, text, self.val_fraction), n + 1
                    self.position = {
                        "documents": n,
                        "done": done,
                        "file": file,
                        "line": line,
                        "crc32": crc32,
                    }
                    yield item
                self.crc32s.append(crc32)
            except (UserError, *DAMAGE) as e:
                self.see_storage(self.files[file].name)
                lost = self.damaged(self.cannot_be_read(self.files[file].name, e), files=1)
                self.crc32s.append(crc32)
                self.position = {
                    "documents": n,
                    "done": self.before(file + 1),
                    "file": file + 1,
                    "line": 0,
                    "crc32": 0,
                }
                yield "train", Document("", "", 0, "", lost)
            line = crc32 = 0

    def see_storage(self, path):
        """Raises UserError where remote storage gives nothing of a file at all: the file is not damaged then."""
        if self.skip and is_remote(self.fs.unstrip_protocol(path)):
            persist(lambda: self.fs.cat_file(path, start=0, end=1), self.fs.unstrip_protocol(path))

    def seen(self, position):
        """As of any source; of the file that `position` lies in, the CRC-32 is of the records before it."""
        crc32s = self.crc32s[: position["file"]] + ([position["crc32"]] if position["line"] else [])
        return self.stamps(len(crc32s)) | {"crc32s": crc32s}

    def names_sha256(self, n):
        """Hash of the names that must stay, where n files were read: further ones may come and go."""
        return listing_sha256((f.name, "") for f in self.files[:n])

    def crc32(self, i, position):
        """CRC-32 of file i's records as they are now, of those before `position` where it lies in that file."""
        last, crc32, line = position["line"] if i == position.get("file") else None, 0, 0
        try:
            for line, _, content, _ in self.entries(i, 0):
                crc32 = zlib.crc32(content, crc32)
                if line == last:
                    break
        except DAMAGE:  # as it was, perhaps
            pass
        return crc32 if last in (None, line) else None


class Lines(Records):
    """A source of .jsonl files, compressed or not, of which every line that is not blank is a document."""

    unit = "B"

    def __init__(self, *args):
        super().__init__(*args)
        self.total = self.before(len(self.files))

    def before(self, file):
        """Bytes of the files before number `file`."""
        return sum(f.size for f in self.files[:file])

    def lines(self, raw, path):
        """The lines, in UTF-8, of an open file in UTF-8 or, with a byte order mark, in UTF-16 or UTF-32."""
        compression = RECORDS[ending(path)]
        stream = pyarrow.CompressedInputStream(raw, compression) if compression else raw
        stream = io.BufferedReader(
            stream, 1 << 16
        )  # where a file is torn, what stands in this buffer is lost
        if compression and not stream.peek(1) and not raw.tell():
            raise EOFError("no bytes are in it, not even those of an empty archive")
        if wide := wide_encoding(stream.peek(4)):
            warn("wide", f"{path} is {wide.upper()} and is read as such")
            return (line.encode() for line in io.TextIOWrapper(stream, wide, newline="\n"))
        return stream

    def entries(self, file, first):
        """Yield (number of the next line, bytes done, the line, text or Lost) from line `first` on."""
        path, before = self.files[file].name, self.before(file)
        with self.fs.open(path, "rb") as raw:
            for line, content in enumerate(self.lines(raw, path)):
                content = content.removeprefix(codecs.BOM_UTF8)
                if line < first or not content.strip():
                    continue
                yield (
                    line + 1,
                    before + raw.tell(),
                    content,
                    self.text(content, f"line {line + 1} of {path}"),
                )

    def text(self, content, where):
        try:
            # bytes that are not UTF-8 become lone surrogates, which read_text replaces and counts
            return text_in(json.loads(content.decode(errors="surrogateescape")), self.column, where)
        except UserError as e:
            return self.damaged(e, records=1)
        except (ValueError, RecursionError) as e:
            return self.damaged(
                UserError(f"--source: {where} is not JSON ({e}){self.advice}."), records=1
            )


class Tables(Records):
    """A source of .parquet files, of which every row is a document.

    They are read by this thread alone: threads of Arrow that still read when the interpreter ends would abort it.
    """

    unit = " documents"

    def __init__(self, *args):
        super().__init__(*args)
        with ThreadPoolExecutor(16) as pool:  # remote storage is slow to answer
            self.groups = list(
                pool.map(self.look, [f.name for f in self.files])
            )  # rows of each row group
        errors = [g for g in self.groups if isinstance(g, UserError)]
        if errors and (not self.skip or len(errors) == len(self.groups)):
            raise errors[0]
        self.total = self.before(len(self.files))

    def open(self, f):
        settings = {"buffer_size": 1 << 20, "page_checksum_verification": True}
        return pyarrow.parquet.ParquetFile(
            f, pre_buffer=False, **settings
        )  # no thread of Arrow reads ahead

    def look(self, path):
        """Rows of each row group of a file, or the UserError of one that is damaged or has no text in the column."""
        try:
            with self.fs.open(path, "rb") as f, self.open(f) as table:
                types = dict(zip(table.schema_arrow.names, table.schema_arrow.types))
                rows = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
        except DAMAGE as e:
            return self.cannot_be_read(path, e)
        if self.column not in types:
            has = ", ".join(types)
            return UserError(
                f"--text_column {self.column}: {path} has no such column; it has {has}."
            )
        kind = types[self.column]
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(kind) not in TEXT_TYPES:
            return UserError(
                f"--text_column {self.column}: {path} holds {kind} there, not text; give a column of "
                f"strings."
            )
        return rows

    def before(self, file):
        """Rows of the files before number `file`."""
        return sum(sum(g) for g in self.groups[:file] if not isinstance(g, UserError))

    def read(self, position):
        """As of any records; a position of an earlier version tells the number of rows alone."""
        if position and "file" not in position:
            ends = [self.before(i + 1) for i in range(len(self.files))]
            file = sum(end <= position["documents"] for end in ends)
            position = position | {"file": file, "line": position["documents"] - self.before(file)}
        return super().read(position)

    def entries(self, file, first):
        """Yield (number of the next row, rows done, its text's bytes, text or Lost) from row `first` on."""
        path, groups, before, row = self.files[file].name, self.groups[file], self.before(file), 0
        if isinstance(groups, UserError):
            raise groups
        with self.fs.open(path, "rb") as f, self.open(f) as table:
            for group, rows in enumerate(groups):
                begin, row = row, row + rows
                if row <= first:
                    continue
                at = begin
                try:
                    for at, text in enumerate(self.rows(table, group), begin + 1):
                        if at > first:
                            content = b"\0" if text is None else text.encode(errors="surrogatepass")
                            yield at, before + at, content, text
                except DAMAGE as e:
                    error = self.cannot_be_read(f"row group {group} of {path}", e)
                    yield row, before + row, b"", self.damaged(error, records=row - max(at, first))

    def rows(self, table, group):
        """Yield the texts of a row group; bytes that are not UTF-8 become lone surrogates."""
        settings = {"columns": [self.column], "use_threads": False, "batch_size": 100}
        for batch in table.iter_batches(row_groups=[group], **settings):
            column = batch.column(0)
            try:
                yield from column.to_pylist()
            except UnicodeDecodeError:
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                held = column.cast(pyarrow.large_binary()).to_pylist()
                yield from (b if b is None else b.decode(errors="surrogateescape") for b in held)


class Rows(Source):
    """A source that the package `datasets` streams from the hub: of files that are not parquet. A row is a document."""

    unit = " documents"

    def __init__(self, column, val_fraction, skip, *args, **kwargs):
        import datasets  # a second of importing

        super().__init__([], skip)
        self.column, self.val_fraction, self.total = column, val_fraction, None
        self.splits = ("train", "val") if val_fraction else ("train",)
        self.identity = {"text_column": column}
        self.stream = datasets.load_dataset(*args, **kwargs, streaming=True)
        if self.stream.info.splits and kwargs["split"] in self.stream.info.splits:
            self.total = self.stream.info.splits[kwargs["split"]].num_examples or None
        if self.stream.column_names and column in self.stream.column_names:
            self.stream = self.stream.select_columns([column])

    def read(self, position):
        """Yield (split, document) from `position` on; self.position then says where the next document begins."""
        n = position.get("documents", 0)
        if n:
            self.stream.load_state_dict(position["state"])
        rows = iter(self.stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as e:  # of the network, of a format: datasets raises what it meets
                raise UserError(
                    f"--source: document {n} cannot be read ({first_line(e)})."
                ) from None
            try:
                item = record(n, text_in(row, self.column, f"document {n}"), self.val_fraction)
                n += 1
            except UserError as e:
                item = "train", Document("", "", 0, "", self.damaged(e, records=1))
            self.position = {"documents": n, "done": n, "state": self.stream.state_dict()}
            yield item


def hub(name, config, split, *settings):
    """The rows of a dataset of the Hugging Face hub, at the revision that is its newest now. Raises UserError."""
    import datasets
    import huggingface_hub

    try:
        revision = huggingface_hub.HfApi().dataset_info(name).sha
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        urls = (builder.config.data_files or {}).get(split, [])
        if urls and all(url.endswith(".parquet") for url in urls):
            fs = fsspec.core.url_to_fs(urls[0])[0]
            with ThreadPoolExecutor(16) as pool:
                infos = list(pool.map(fs.info, urls))
            source = Tables(
                fs, {fs._strip_protocol(url): info for url, info in zip(urls, infos)}, *settings
            )
            del source.identity["source_listing_sha256"]  # the revision tells
        else:
            source = Rows(*settings, name, config, revision=revision, split=split)
    except UserError:
        raise
    except Exception as e:  # of the network, of datasets' builders: there is no common class
        raise UserError(
            f"--source {name}: there is no such file or folder, and the Hugging Face hub gives no such "
            f"dataset with --config {config} and --split {split} ({first_line(e)})."
        ) from None
    source.identity = {"config": config, "split": split, "revision": revision} | source.identity
    return source


# --- Any source -------------------------------------------------------------------------------------------------


def ending(path):
    """The ending in RECORDS that a path has, or None."""
    return next((e for e in RECORDS if path.endswith(e)), None)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def listing_sha256(files):
    """Hash of (name, size) pairs."""
    return hashlib.sha256(
        os.fsencode("".join(f"{name}\0{size}\0" for name, size in files))
    ).hexdigest()


def find(source):
    """(file system, {path: what it says of the file}, paths of symlinked folders that are not entered) of a file, a
    folder or a glob, hidden files left out."""
    fs, path = fsspec.core.url_to_fs(source)
    if not fs.isdir(path):
        there = fs.glob(path, detail=True)
        beginning = re.split(r"[*?\[]", path)[0]
        links = (
            walk(os.path.dirname(beginning))[1] if "**" in path and not is_remote(source) else []
        )
    elif is_remote(source):
        there, links = fs.find(path, detail=True), []
        there = {p: info for p, info in there.items() if "/." not in p.removeprefix(path)}
    else:
        paths, links = walk(path)
        there = {p: fs.info(p) for p in paths}
    return fs, {p: there[p] for p in sorted(there) if there[p]["type"] == "file"}, links


def open_source(args, val_fraction):
    """What --source, --config, --split and --text_column name: Files, Lines, Tables or Rows. Raises UserError."""
    source, skip = args.source, vars(args).get("skip_damaged")
    warn.counts.clear()
    if source == "stdlib":
        return Files(source, val_fraction, skip)
    try:
        fs, files, links = find(source)
    except (OSError, ValueError, ImportError) as e:
        raise UserError(f"--source {source}: cannot be read ({first_line(e)}).") from None
    settings = args.text_column, val_fraction, skip
    kinds = {ending(p).split(".")[1]: p for p in files if ending(p)}
    if not kinds:
        if os.path.isdir(source):
            return Files(source, val_fraction, skip)
        if not files and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            return hub(source, args.config, args.split, *settings)
        raise UserError(
            f"--source {source}: there is no such folder, and no such file ending in {', '.join(RECORDS)}; "
            f"give one, a glob of such files, a dataset of the Hugging Face hub as ORGANISATION/NAME, "
            f"or stdlib."
        )
    if len(kinds) > 1:
        raise UserError(
            f"--source {source}: holds files of different kinds ({', '.join(kinds.values())}); give a glob "
            f"of one kind, such as {os.path.join(source, '**', '*.parquet')}."
        )
    warn_of_left_out("symlinked folder", links)
    warn_of_left_out("other file", [p for p in files if not ending(p)])
    records = {p: info for p, info in files.items() if ending(p)}
    return (Tables if "parquet" in kinds else Lines)(fs, records, *settings)


class Text(NamedTuple):
    """The text of a document."""

    text: str
    replaced: int = 0  # characters that became U+FFFD
    crc32: int = 0  # of a file's bytes
    encoding: str = (
        "utf-8"  # that it was read in; "" where nothing but ASCII in it is UTF-8, as in latin-1
    )


def wide_encoding(content):
    """Name of the encoding that the byte order mark at the beginning of `content` tells, or None: UTF-8."""
    return next((name for mark, name in WIDE.items() if content.startswith(mark)), None)


def decode(content, whole=True):
    """The Text of a file's bytes, without a byte order mark. whole: these bytes are not the beginning of more."""
    crc32 = zlib.crc32(content)
    for encoding in filter(None, (wide_encoding(content), "utf-8-sig")):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(content, whole)
            return Text(text, 0, crc32, encoding.removesuffix("-sig"))
        except UnicodeDecodeError:
            pass
    text = content.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    replaced = text.count("\ufffd") - content.count("\ufffd".encode())
    return Text(text, replaced, crc32, "" if text.replace("\ufffd", "").isascii() else "utf-8")


def read_text(document, limit=None):
    """The Text of a document, or of its first `limit` bytes or characters.

    What is not UTF-8 in a file, and lone surrogates in a record, became U+FFFD. Raises UserError where the file cannot
    be read.
    """
    if document.text is not None:
        text = document.text[:limit]
        try:
            text.encode()
            return Text(text)
        except UnicodeEncodeError:
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            foreign = (
                re.search("[\udc80-\udcff]", text) and whole.replace("\ufffd", "").isascii()
            )  # once bytes
            return Text(
                whole, whole.count("\ufffd") - text.count("\ufffd"), 0, "" if foreign else "utf-8"
            )
    try:
        with open(document.path, "rb") as f:
            content = f.read(limit)
    except OSError as e:
        raise UserError(f"--source: {document.path} cannot be read ({e.strerror}).") from None
    return decode(content, whole=limit is None)


def dump_ranks(ranks):
    """{token bytes: rank} -> the bytes of a file of tiktoken ranks: a line `base64(token) rank` for each, by rank."""
    return b"".join(
        base64.b64encode(t) + b" %d\n" % r
        for t, r in sorted(ranks.items(), key=lambda item: item[1])
    )


class Parser(utils.Parser):
    """Help that shows the defaults."""

    def __init__(self, description):
        super().__init__(
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.add_argument(
            "--source",
            required=True,
            help="a folder of text files, read recursively, each file being a "
            f"document; a file, a folder or a quoted glob of {', '.join(RECORDS)}, local or remote, each "
            "record being a document; a dataset of the Hugging Face hub, ORGANISATION/NAME; or stdlib: "
            "the .py files of Python's standard library",
        )
        self.add_argument(
            "--config",
            default=None,
            help="configuration of a dataset of the hub, such as sample-10BT",
        )
        self.add_argument(
            "--split", default="train", help="split of a dataset of the hub, all of which is read"
        )
        self.add_argument(
            "--text_column", default="text", help="column of a record that holds the text"
        )
        self.add_argument(
            "--skip_damaged",
            action="store_true",
            default=False,
            help="leave out, report and count files and records that cannot be read",
        )


# --- Running a program ------------------------------------------------------------------------------------------

stands = (
    "nothing was written, and the same command begins anew"  # what a signal now leaves, in words
)


def say_what_stands(words):
    global stands
    stands = words


def run(main):
    """Run the main of a data program. A UserError ends it with a sentence and status 2; Ctrl-C and SIGTERM do so at
    once, with what stands in a sentence and status 128 + the signal."""
    interrupts.watch(lambda number: interrupts.end(128 + number, f"interrupted; {stands}"))
    one_sentence(main)
