"""The formats of sources: `open_source` finds the class that reads a --source."""

import glob
import io
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from fsspec.implementations.local import LocalFileSystem

from data.sources.base import Document, Source, counted, shown, warn_of_left_out
from data.sources.contents import TEXT, Contents, detect_contents, is_json
from data.sources.files import documents_of, stdlib_documents, walk
from data.sources.hub import find_dataset
from data.sources.jsonl import Lines
from data.sources.parquet import Tables
from data.sources.rows import Rows, delimiter_of
from data.sources.text import DAMAGE, content_of, not_text_error, read_text, stem
from data.sources.values import Values
from runtime.files import filesystem, is_remote, persist, read_file
from runtime.messages import UserError, first_line, say_aside

# {a format of records, as in contents.py: the subclass of base.Records that reads it}, in the order of documents
FORMATS = {"lines": Lines, "values": Values, "rows": Rows, "table": Tables}
NOTES = re.compile(r"\.(txt|md)$")  # names of the files that are read as texts beside records
ENDINGS = ".jsonl, .ndjson, .json, .csv, .tsv (also .gz, .bz2, .xz, .zst) or .parquet"
ENDING = re.compile(r"(\.\w+)?(\.(gz|bz2|xz|zstd?))?$", re.IGNORECASE)
# names of source code and the like: any ending but those of notes and JSON
CODE = re.compile(r"[^/]\.(?!(txt|md|json)$)[^./]+$")
WILDCARD = re.compile(r"[*?\[]")


def literal_part(fs, path):
    """The part of a path or glob before its first wildcard. A file or folder whose own name holds a wildcard character
    belongs to it."""
    literal = path
    while WILDCARD.search(literal) and not fs.exists(literal):
        literal = os.path.dirname(literal)
    return literal + WILDCARD.split(path.removeprefix(literal))[0]


def find(source):
    """Find the files of a source that is a file, a folder or a glob; hidden files are left out.

    Returns (file system, folder that names are relative to, {path: bytes}).
    """
    fs, path = filesystem(source)
    literal = literal_part(fs, path)
    if literal == path:
        matches = [path] if fs.exists(path) else []
    else:
        matches = fs.glob(glob.escape(literal) + path.removeprefix(literal))
    found = {}
    for match in matches:
        if fs.isdir(match) and is_remote(source):
            found |= fs.find(match, detail=True)
        else:
            paths = walk(match) if fs.isdir(match) else [match]
            found |= {p: fs.info(p) for p in paths}
    start = literal.rstrip("/")
    visible = [p for p in sorted(found) if "/." not in p.removeprefix(start)]
    root = path if fs.isdir(path) else os.path.dirname(literal)
    return fs, root, {p: found[p]["size"] or 0 for p in visible if found[p]["type"] == "file"}


def open_source(args):
    """The base.Source that --source, --config, --split and --text_column name. Raises UserError."""
    source, skip = args.source, args.skip_damaged
    shown.clear()
    if source == "stdlib":
        return Source(stdlib_documents(), [], skip)
    try:
        fs, root, found = persist(lambda: find(source), source)
    except (OSError, ValueError, ImportError) as e:
        raise UserError(f"cannot be read ({first_line(e)})", flag="source", value=source) from None
    is_local = isinstance(fs, LocalFileSystem)
    if not found and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not os.path.isdir(source):
        return open_dataset(args)
    contents = survey(fs, found)
    records, others = records_in(contents, found, args)
    if records:
        return open_records(args, fs, root, found, contents, records)
    if is_local and (found or os.path.isdir(source)):
        warn_of_left_out("record file", others, f" without a column {args.text_column}")
        return open_texts(args, root, {p: held for p, held in contents.items() if p not in others})
    if fs._strip_protocol(source) in found:
        return open_remote_text(args, *contents.items())
    what = "there is no such file or folder"
    if found:
        what = f"{counted(len(found), 'file')} there, none ending in {ENDINGS}, which alone are read from there"
    raise UserError(
        f"{what}; give a text file or a folder or quoted glob of them on this machine, a file, a "
        f"folder or a quoted glob of {ENDINGS}, a dataset of the Hugging Face hub as ORGANISATION/NAME, or stdlib",
        flag="source",
        value=source,
    )


def survey(fs, paths):
    """Detect what each file holds: {path: `Contents`}. Raises UserError where remote storage fails."""

    def contents_of(path):
        try:
            return detect_contents(fs, path)
        except Exception:
            # The file may be damaged, or the storage may have failed. Every storage has its own errors, so they do not
            # tell which: one byte is read again, and retried until the storage answers.
            if not isinstance(fs, LocalFileSystem):
                address = fs.unstrip_protocol(path)
                persist(lambda: fs.cat_file(path, start=0, end=1), address)
        try:
            return detect_contents(fs, path)
        # The storage works and the file is damaged. Reading it raises this error again, or counts it as damaged.
        except UserError:
            return Contents("rows" if delimiter_of(path) else "values")
        except DAMAGE:
            kind = "lines" if is_json(path) else "text"
            return Contents("rows" if delimiter_of(path) else kind)

    with ThreadPoolExecutor(16) as pool:  # remote storage is slow to answer
        return dict(zip(paths, pool.map(contents_of, paths)))


def records_in(contents, sizes, args):
    """Choose the files to read as records: ({path: one of FORMATS}, [path of a file of records without the column]).

    Beside source code, files of JSON or of rows that lack that column count as texts, and so does a file that is one
    single object. sizes: {path: bytes}. Raises UserError where no file has the column and the files without it are
    larger than the texts beside them.
    """
    texts = [path for path, held in contents.items() if held == TEXT]
    code = [path for path in texts if CODE.search(stem(path))]
    records, others = {}, []
    for path, held in contents.items():
        if held.format == "web archive":
            raise UserError(
                f"{path} is a web archive (WARC); write its texts as lines of JSON (.jsonl), as by warcio or "
                "trafilatura, and give these",
                flag="source",
            )
        has_text = (
            held.columns is None or held.format == "lines" or args.text_column in held.columns
        )
        if held.format in FORMATS and has_text and not (held.is_object and code):
            records[path] = held.format
        elif held.format in FORMATS:
            others.append(path)
    if code:
        return records, []
    bytes_of = [sum(sizes[path] for path in paths) for paths in (others, texts)]
    if others and not records and bytes_of[0] > bytes_of[1]:
        columns = ", ".join(contents[others[0]].columns)
        has = f"only {columns}" if columns else "as it holds no JSON objects with that column"
        raise UserError(
            f"{others[0]} has no column {args.text_column}, {has}; name that of the text by "
            f"--text_column, or move the file away",
            flag="source",
            value=args.source,
        )
    return records, others


def readers(args, fs, found, records):
    """A list of base.Records, one for each format in `records`, {path: one of FORMATS}."""
    made = []
    for name, reader in FORMATS.items():
        files = {path: size for path, size in found.items() if records.get(path) == name}
        if files:
            made.append(reader(fs, files, args.text_column, args.skip_damaged))
    return made


def open_records(args, fs, root, found, contents, records):
    """A source of the records in the files `found`, {path: bytes}, and of local notes beside them."""
    is_local = isinstance(fs, LocalFileSystem)
    notes = [p for p in found if is_local and contents[p] == TEXT and NOTES.search(stem(p))]
    others = found.keys() - records.keys() - set(notes)
    record_readers = readers(args, fs, found, records)
    warn_of_left_out("other file", others, f" beside the records: {endings_of(others)}")
    report_endings(args.source, found.keys() - others)
    documents = []
    if any(found[path] for path in notes):
        documents = documents_of(notes, root)
    return Source(documents, record_readers, args.skip_damaged)


def open_texts(args, root, contents):
    """A source of the texts in local files. Binary files are left out, and so are files in another encoding where they
    are at most a tenth. Raises UserError where they are more, or where all files are binary."""
    binary = [path for path, held in contents.items() if held.format == "binary"]
    garbled = [path for path, held in contents.items() if held.format == "garbled"]
    if args.skip_damaged:
        garbled = []  # they are counted as damaged when they are read
    texts = sorted(contents.keys() - {*binary, *garbled})
    if len(garbled) * 10 > len(texts) + len(garbled):
        raise not_text_error(garbled[0])
    if binary and not texts:
        raise only_binary_error(args.source, binary)
    warn_of_left_out("binary file", binary, f": {endings_of(binary)}")
    warn_of_left_out("file", garbled, ", not UTF-8 text; convert what is (iconv -t utf-8)")
    report_endings(args.source, texts)
    documents = documents_of(texts, root)
    if len(contents) == 1:
        # a single file that cannot be read is an error, raised before anything is written
        read_text(documents[0])
    return Source(documents, [], args.skip_damaged)


def open_remote_text(args, file):
    """A source of one remote text file, which is read here as a whole."""
    path, held = file
    if held.format == "binary":
        raise only_binary_error(args.source, [path])
    if held.format == "garbled":
        raise not_text_error(args.source)
    try:
        content = read_file(args.source) or b""
        text = content_of(io.BytesIO(content), args.source, "split it")
    except DAMAGE as e:
        raise UserError(
            f"cannot be read ({first_line(e)})", flag="source", value=args.source
        ) from None
    return Source([Document(path, size=len(content), text=text)], [], args.skip_damaged)


def only_binary_error(source, paths):
    """The UserError for a source of binary files alone."""
    endings = endings_of(paths)
    what = "is not UTF-8 text but a binary file; give text"
    if len(paths) == 1:
        source = paths[0]
    else:
        what = f"none of its {len(paths):,} files is text ({endings}); give text"
    if re.search(r"\.(npy|bin)\b", endings):
        what += "; token ids are no text: main.py reads them from .npy files in --data X, in folders X/train and X/val"
    return UserError(what, flag="source", value=source)


def open_dataset(args):
    """A source of the records of a dataset of the hub."""
    fs, files, identity = find_dataset(args)
    contents = survey(fs, files)
    records, _ = records_in(contents, files, args)
    if others := files.keys() - records.keys():
        raise UserError(
            f"{min(others)} holds no records; only those are read from the hub",
            flag="source",
            value=args.source,
        )
    source = Source([], readers(args, fs, files, records), args.skip_damaged)
    source.identity = identity | {"text_column": args.text_column}
    return source


def ending_of(path):
    """The ending of a file's name, such as .txt or .jsonl.gz; "no ending" where it has none."""
    return ENDING.search(path)[0] or "no ending"


def endings_of(paths):
    """The endings of files' names, as a list in words."""
    return ", ".join(sorted(set(map(ending_of, paths))))


def report_endings(source, paths):
    """Print how many files of each ending are read, where there are several endings."""
    endings = Counter(map(ending_of, sorted(paths)))
    if len(endings) > 1:
        words = ", ".join(f"{n:,} {ending}" for ending, n in endings.most_common())
        say_aside(f"{source}: {counted(len(paths), 'file')}: {words}")
