"""What the data programs share: the documents of a source, how they split, their text, and the command line."""

import argparse
import base64
import hashlib
import io
import json
import os
import re
import sysconfig
from typing import NamedTuple

import fsspec
import pyarrow
import pyarrow.parquet

from utils import UserError, is_remote

VAL_FRACTION = 0.1  # tokenize_shards.py's default; train_tokenizer.py learns from none of these documents
RECORDS = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd", ".parquet": None}  # ending: compression


class Document(NamedTuple):
    name: str  # path relative to the source, with forward slashes, or number: order and split depend on it alone
    path: str  # "" where `text` holds the document
    size: int  # bytes of the file, or characters of the text
    text: str | None = None


# --- Documents that are files -----------------------------------------------------------------------------------


def list_documents(source):
    """The documents of a source, one per file, sorted by name.

    `source` is "stdlib", for the .py files of Python's standard library, or a folder, of which every regular file
    counts that is neither hidden (its name starts with a dot) nor in a hidden folder. UserError where there is no text.
    """
    stdlib = source == "stdlib"
    root = sysconfig.get_paths()["stdlib"] if stdlib else source
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


class Files:
    """A source of which every file is a document."""

    unit = "B"

    def __init__(self, source, val_fraction):
        self.documents = list_documents(source)
        val = {d.name for d in split(self.documents, val_fraction)[1]}
        self.split_of = ["val" if d.name in val else "train" for d in self.documents]
        self.splits = ("train", "val") if val else ("train",)
        self.total = sum(d.size for d in self.documents)
        # names and sizes, quick to compare: another Python has another stdlib, and folders change
        self.identity = {"source_listing_sha256": listing_sha256((d.name, d.size) for d in self.documents)}

    def read(self, position):
        """Yield (split, document) from `position` on; self.position then says where the next document begins."""
        done = position.get("done", 0)
        for i in range(position.get("documents", 0), len(self.documents)):
            done += self.documents[i].size
            self.position = {"documents": i + 1, "done": done}
            yield self.split_of[i], self.documents[i]


# --- Documents that are records ---------------------------------------------------------------------------------


def record(i, where, row, column, val_fraction):
    """(split, document) of record i of a source; `where` names it in the UserError of one without such a text."""
    if not isinstance(row, dict) or column not in row:
        there = f"its columns are {', '.join(map(str, row))}" if isinstance(row, dict) else "it is no object"
        raise UserError(f"--text_column {column}: {where} has no such column ({there}).")
    text = "" if row[column] is None else row[column]
    if not isinstance(text, str):
        raise UserError(f"--text_column {column}: {where} holds {type(text).__name__} there, not text.")
    # the number's hash: any reader of the source finds the same split, wherever it begins
    hashed = int.from_bytes(hashlib.sha256(b"%d" % i).digest()[:8], "big") / 2**64
    return "val" if hashed < val_fraction else "train", Document(str(i), "", len(text), text)


class Lines:
    """A source of .jsonl files, compressed or not, of which every line that is not blank is a document."""

    unit = "B"

    def __init__(self, fs, paths, column, val_fraction):
        self.fs, self.paths, self.column, self.val_fraction = fs, paths, column, val_fraction
        self.splits = ("train", "val") if val_fraction else ("train",)
        self.sizes = [fs.size(path) for path in paths]
        self.total = sum(self.sizes)
        self.identity = {"source_listing_sha256": listing_sha256(zip(paths, self.sizes)), "text_column": column}

    def read(self, position):
        """Yield (split, document) from `position` on; self.position then says where the next document begins."""
        n, first_file, first_line = (position.get(key, 0) for key in ("documents", "file", "line"))
        for file in range(first_file, len(self.paths)):
            path, before = self.paths[file], sum(self.sizes[:file])
            try:
                with self.fs.open(path, "rb") as raw:
                    compression = RECORDS[ending(path)]
                    stream = pyarrow.CompressedInputStream(raw, compression) if compression else raw
                    for line, content in enumerate(io.BufferedReader(stream, 1 << 20)):
                        if (file, line) < (first_file, first_line) or not content.strip():
                            continue
                        try:
                            # bytes that are not UTF-8 become lone surrogates, which read_text replaces and counts
                            row = json.loads(content.decode(errors="surrogateescape"))
                        except ValueError as e:
                            raise UserError(f"--source: line {line + 1} of {path} is not JSON ({e}).") from None
                        item = record(n, f"line {line + 1} of {path}", row, self.column, self.val_fraction)
                        n += 1
                        self.position = {"documents": n, "done": before + raw.tell(), "file": file, "line": line + 1}
                        yield item
            except (OSError, pyarrow.ArrowException) as e:
                raise UserError(f"--source: {path} cannot be read ({e}).") from None


class Rows:
    """A source that the package `datasets` streams: of parquet files, or of the hub. A row is a document."""

    unit = " documents"

    def __init__(self, column, val_fraction, identity, total, *args, **kwargs):
        import datasets  # a second of importing

        self.column, self.val_fraction, self.total = column, val_fraction, total
        self.splits = ("train", "val") if val_fraction else ("train",)
        self.identity = identity | {"text_column": column}
        self.stream = datasets.load_dataset(*args, **kwargs, streaming=True)
        if total is None and self.stream.info.splits and kwargs["split"] in self.stream.info.splits:
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
                raise UserError(f"--source: document {n} cannot be read ({first_line(e)}).") from None
            item = record(n, f"document {n}", row, self.column, self.val_fraction)
            n += 1
            self.position = {"documents": n, "done": n, "state": self.stream.state_dict()}
            yield item


def parquet(fs, paths, column, val_fraction):
    """The rows of parquet files. Raises UserError where one is damaged or has no such column."""
    total, sizes = 0, []
    for path in paths:
        try:
            with fs.open(path, "rb") as f:
                file = pyarrow.parquet.ParquetFile(f)
                total, columns = total + file.metadata.num_rows, file.schema_arrow.names
        except (OSError, pyarrow.ArrowException) as e:
            raise UserError(f"--source: {path} cannot be read ({e}).") from None
        if column not in columns:
            raise UserError(f"--text_column {column}: {path} has no such column; it has {', '.join(columns)}.")
        sizes.append(fs.size(path))
    identity = {"source_listing_sha256": listing_sha256(zip(paths, sizes))}
    urls = [fs.unstrip_protocol(path) if is_remote(fs.unstrip_protocol(path)) else path for path in paths]
    # batch_size: rows read at a time, where a file's row groups may be of any size
    settings = {"data_files": urls, "columns": [column], "batch_size": 100, "split": "train"}
    return Rows(column, val_fraction, identity, total, "parquet", **settings)


def hub(name, config, split, column, val_fraction):
    """The rows of a dataset of the Hugging Face hub, at the revision that is its newest now. Raises UserError."""
    import huggingface_hub

    try:
        revision = huggingface_hub.HfApi().dataset_info(name).sha
        identity = {"config": config, "split": split, "revision": revision}
        return Rows(column, val_fraction, identity, None, name, config, revision=revision, split=split)
    except Exception as e:  # of the network, of datasets' builders: there is no common class
        raise UserError(f"--source {name}: there is no such file or folder, and the Hugging Face hub gives no such "
                        f"dataset with --config {config} and --split {split} ({first_line(e)}).") from None  # fmt: skip


# --- Any source -------------------------------------------------------------------------------------------------


def ending(path):
    """The ending in RECORDS that a path has, or None."""
    return next((e for e in RECORDS if path.endswith(e)), None)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def listing_sha256(files):
    """Hash of (name, size) pairs."""
    return hashlib.sha256(os.fsencode("".join(f"{name}\0{size}\0" for name, size in files))).hexdigest()


def open_source(args, val_fraction):
    """What --source, --config, --split and --text_column name: Files, Lines or Rows. Raises UserError."""
    source = args.source
    if source == "stdlib":
        return Files(source, val_fraction)
    try:
        fs, path = fsspec.core.url_to_fs(source)
        if fs.isdir(path):
            paths = [p for p in sorted(fs.find(path)) if "/." not in p.removeprefix(path)]
        else:
            paths = [p for p in sorted(fs.glob(path)) if fs.isfile(p)]
    except (OSError, ValueError, ImportError) as e:
        raise UserError(f"--source {source}: cannot be read ({first_line(e)}).") from None
    if not any(map(ending, paths)):
        if os.path.isdir(source):
            return Files(source, val_fraction)
        if not paths and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            return hub(source, args.config, args.split, args.text_column, val_fraction)
        raise UserError(f"--source {source}: there is no such folder, and no such file ending in {', '.join(RECORDS)}; "
                        f"give one, a glob of such files, a dataset of the Hugging Face hub as ORGANISATION/NAME, "
                        f"or stdlib.")  # fmt: skip
    kinds = {(ending(p) or "others").split(".")[:2][-1]: p for p in paths}
    if len(kinds) > 1:
        raise UserError(f"--source {source}: holds files of different kinds ({', '.join(kinds.values())}); give a glob "
                        f"of one kind, such as {os.path.join(source, '**', '*.parquet')}.")  # fmt: skip
    return (parquet if "parquet" in kinds else Lines)(fs, paths, args.text_column, val_fraction)


def read_text(document, limit=None):
    """(text, replaced) of a document, or of its first `limit` bytes or characters.

    replaced: what is not UTF-8 in a file, and lone surrogates in a record, became U+FFFD. Raises UserError where the
    file cannot be read.
    """
    if document.text is not None:
        text = document.text[:limit]
        try:
            text.encode()
            return text, False
        except UnicodeEncodeError:
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
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
                          f"document; a file, a folder or a quoted glob of {', '.join(RECORDS)}, local or remote, each "
                          "record being a document; a dataset of the Hugging Face hub, ORGANISATION/NAME; or stdlib: "
                          "the .py files of Python's standard library")  # fmt: skip
        self.add_argument("--config", default=None, help="configuration of a dataset of the hub, such as sample-10BT")
        self.add_argument("--split", default="train", help="split of a dataset of the hub, all of which is read")
        self.add_argument("--text_column", default="text", help="column of a record that holds the text")

    def error(self, message):
        raise UserError(f"{message}; see --help.")
