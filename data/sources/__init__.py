"""Where documents come from: `open_source` finds the class that reads a --source."""

import os
import re

from data.sources.base import walk, warn, warn_of_left_out
from data.sources.files import Files
from data.sources.hub import open_dataset
from data.sources.jsonl import Lines
from data.sources.parquet import Tables
from utils import UserError, filesystem, first_line, is_remote, persist

# The kinds of files that hold records, each a subclass of base.Records in a file of its own.
KINDS = (Lines, Tables)
ENDINGS = ", ".join(ending for kind in KINDS for ending in kind.endings)


def kind_of(path):
    """The one of KINDS that reads a file, or None."""
    for kind in KINDS:
        if path.endswith(kind.endings):
            return kind
    return None


def find(source):
    """(file system, {path: what it says of the file}, paths of symlinked folders that are not entered) of a file, a
    folder or a glob, hidden files left out."""
    fs, path = filesystem(source)
    links = []
    if not fs.isdir(path):
        found = fs.glob(path, detail=True)
        if "**" in path and not is_remote(source):
            before_wildcard = re.split(r"[*?\[]", path)[0]
            _, links = walk(os.path.dirname(before_wildcard))
    elif is_remote(source):
        found = fs.find(path, detail=True)
        found = {p: info for p, info in found.items() if "/." not in p.removeprefix(path)}
    else:
        paths, links = walk(path)
        found = {p: fs.info(p) for p in paths}
    return fs, {p: found[p] for p in sorted(found) if found[p]["type"] == "file"}, links


def open_source(args, val_fraction):
    """What --source, --config, --split and --text_column name: a base.Source. Raises UserError."""
    source, skip = args.source, vars(args).get("skip_damaged")
    warn.counts.clear()
    if source == "stdlib":
        return Files(source, val_fraction, skip)
    try:
        fs, found, links = persist(lambda: find(source), source)
    except (OSError, ValueError, ImportError) as e:
        raise UserError(f"--source {source}: cannot be read ({first_line(e)}).") from None
    settings = args.text_column, val_fraction, skip
    records = {path: info for path, info in found.items() if kind_of(path)}
    if records:
        kind = only_kind(source, records)
        warn_of_left_out("symlinked folder", links)
        warn_of_left_out("other file", [path for path in found if path not in records])
        return kind(fs, records, *settings)
    if os.path.isdir(source):
        return Files(source, val_fraction, skip)
    if not found and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return open_dataset(source, args.config, args.split, *settings)
    raise UserError(
        f"--source {source}: there is no such folder, and no such file ending in {ENDINGS}; "
        f"give one, a glob of such files, a dataset of the Hugging Face hub as ORGANISATION/NAME, "
        f"or stdlib."
    )


def only_kind(source, paths):
    """The one of KINDS that reads all these files. Raises UserError where there are two."""
    examples = {kind_of(path): path for path in paths}
    if len(examples) > 1:
        raise UserError(
            f"--source {source}: holds files of different kinds ({', '.join(examples.values())}); give a glob "
            f"of one kind, such as {os.path.join(source, '**', '*.parquet')}."
        )
    return next(iter(examples))
