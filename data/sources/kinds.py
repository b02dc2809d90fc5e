"""The kinds of sources: `open_source` finds the class that reads a --source."""

import os
import re
import sys
from collections import Counter

from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from data.sources.base import Source, many, shown, warn_of_left_out
from data.sources.files import documents_of, stdlib_documents, walk
from data.sources.hub import open_dataset
from data.sources.jsonl import Lines
from data.sources.parquet import Tables
from data.sources.text import read_text
from runtime.files import filesystem, is_remote, persist
from runtime.messages import UserError, first_line

KINDS = (Lines, Tables)  # of files that hold records, each a subclass of base.Records
TEXT = re.compile(r"\.(txt|md)(\.gz|\.zst)?$")  # files that are read as texts beside records
ENDINGS = ", ".join(ending for kind in KINDS for ending in kind.endings)
ENDING = re.compile(r"(\.\w+)?(\.gz|\.zst)?$")
WILDCARD = re.compile(r"[*?\[]")


def kind_of(path):
    """The one of KINDS that reads a file, or None."""
    return next((kind for kind in KINDS if path.endswith(kind.endings)), None)


def find(source):
    """(file system, {path: bytes}) of a file, a folder or a glob of both, without hidden files."""
    fs, path = filesystem(source)
    found = {}
    for match in [path] if fs.isdir(path) else fs.glob(path):
        if fs.isdir(match) and is_remote(source):
            found |= fs.find(match, detail=True)
        else:
            paths = walk(match) if fs.isdir(match) else [match]
            found |= {p: fs.info(p) for p in paths}
    start = WILDCARD.split(path)[0].rstrip("/")
    visible = [p for p in sorted(found) if "/." not in p.removeprefix(start)]
    return fs, {p: found[p]["size"] or 0 for p in visible if found[p]["type"] == "file"}


def open_source(args):
    """What --source, --config, --split and --text_column name: a base.Source. Raises UserError."""
    source, skip = args.source, args.skip_damaged
    shown.clear()
    if source == "stdlib":
        return Source(stdlib_documents(), [], skip)
    try:
        fs, found = persist(lambda: find(source), source)
    except (OSError, ValueError, ImportError) as e:
        raise UserError(f"--source {source}: cannot be read ({first_line(e)}).") from None
    if any(map(kind_of, found)):
        return open_records(args, fs, found)
    if isinstance(fs, LocalFileSystem) and (found or os.path.isdir(source)):
        tell_kinds(source, found)
        return Source(text_files(source, fs, found), [], skip)
    if not found and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return open_dataset(args)
    what = "there is no such file or folder"
    if found:
        what = f"{many(len(found), 'file')} there, none ending in {ENDINGS}, which alone are read from there"
    raise UserError(
        f"--source {source}: {what}; give a text file or a folder or quoted glob of them on this machine, a file, a "
        f"folder or a quoted glob of {ENDINGS}, a dataset of the Hugging Face hub as ORGANISATION/NAME, or stdlib."
    )


def open_records(args, fs, found):
    """A source of the records and, on this machine, of the texts in the files `found`, {path: bytes}."""
    is_local = isinstance(fs, LocalFileSystem)
    texts = [path for path in found if is_local and TEXT.search(path)]
    others = found.keys() - set(texts)
    kinds = []
    for kind in KINDS:
        files = {path: size for path, size in found.items() if kind_of(path) is kind}
        others -= files.keys()
        if files:
            kinds.append(kind(fs, files, args.text_column, args.skip_damaged))
    endings = sorted({ending_of(path) for path in others})
    warn_of_left_out("other file", others, f" beside the records: {', '.join(endings)}")
    tell_kinds(args.source, found.keys() - others)
    documents = []
    if any(found[path] for path in texts):
        documents = text_files(args.source, fs, texts)
    return Source(documents, kinds, args.skip_damaged)


def ending_of(path):
    """The ending of a file's name, .txt or .jsonl.gz, in words where it has none."""
    return ENDING.search(path)[0] or "no ending"


def tell_kinds(source, paths):
    """Print how many files of each of several endings are read, on stderr: stdout may be one JSON object."""
    kinds = Counter(map(ending_of, sorted(paths)))
    if len(kinds) > 1:
        words = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common())
        tqdm.write(f"--source {source}: {many(len(paths), 'file')}: {words}", file=sys.stderr)


def text_files(source, fs, found):
    """The documents of a local text file, of a folder of them or of a glob, whose files are `found`."""
    path = fs._strip_protocol(source)
    root = path if fs.isdir(path) else os.path.dirname(WILDCARD.split(path)[0])
    documents = documents_of(found, root)
    if path in found:
        content, replaced = read_text(documents[0])
        if replaced * 10 > len(content):  # as of a PDF or of text in another encoding
            raise UserError(f"--source {source}: is not UTF-8 text; convert it (iconv -t utf-8).")
    return documents
