"""Detect what a file holds: by its name where that is certain, and otherwise by its first bytes."""

import re
import unicodedata
from typing import NamedTuple

from data.sources import rows, text, values

LINES = (".jsonl", ".ndjson", ".jl")  # endings of names that mean lines of JSON
TABLE = ".parquet"
FETCHED = 1 << 18  # bytes that are fetched at once of a remote file, to see how it begins
# Bytes that are examined by themselves: many binary formats have a header of numbers, followed by text.
HEADER = 64
SAMPLE = 4096  # bytes from which an encoding is detected
# Unicode's categories of control characters and of code points without a meaning
NO_SCRIPT = {"Cc", "Cn", "Co", "Cs"}
# first bytes of binary files whose header is small or holds no numbers: PDF, NumPy, Arrow, zip and pickle
BINARY = re.compile(rb"%PDF-|\x93NUMPY|ARROW1|PK\x03\x04|\x80[\x02-\x05]")
WEB_ARCHIVE = re.compile(rb"WARC/\d")
JSON = re.compile(r'\s*\[?\s*\{\s*(\}|"([^"\\\n]|\\.)*"\s*:)')  # an object, or an array of them


class Contents(NamedTuple):
    """What a file holds."""

    # Of records: "lines", "values", "rows" or "table". Others: "web archive", "binary", "garbled" or "text".
    format: str
    columns: tuple | None = None  # of its first record, where that was read
    is_object: bool = False  # whether it is a single JSON object


TEXT = Contents("text")
MAY_BE_VALUES = Contents("values")


def format_by_name(path):
    """The format of records that the name of a file settles: "table", "lines" or None where the name settles none."""
    if path.lower().endswith(TABLE):
        return "table"
    return "lines" if text.stem(path).endswith(LINES) else None


def is_json(path):
    """Whether a file's name ends in .json, before the ending of a compression."""
    return text.stem(path).endswith(".json")


def detect_contents(fs, path):
    """The `Contents` of a file in the file system `fs`. Raises UserError or one of text.DAMAGE."""
    if by_name := format_by_name(path):
        return Contents(by_name)
    with fs.open(path, "rb", block_size=FETCHED) as raw:
        contents = contents_of_stream(text.decompressed(raw, path), path)
    if contents != MAY_BE_VALUES:
        return contents
    with fs.open(path, "rb") as raw:
        return contents_of_json(values.content_of(raw, path), path)


def contents_of_stream(stream, path):
    """The `Contents` of a stream, detected from its beginning. MAY_BE_VALUES: the whole must be read to know."""
    head = stream.peek(text.BUFFER)
    if not head:
        return TEXT
    if WEB_ARCHIVE.match(head):
        return Contents("web archive")
    by_bytes = format_of_bytes(head)
    if by_bytes != "text":
        return Contents(by_bytes)
    if rows.delimiter_of(path):
        return Contents("rows", tuple(next(rows.table(stream, path), ())))
    if is_json(path) or JSON.match(text.decode(head[:SAMPLE])[0]):
        lines = filter(str.strip, text.lines(stream))
        first, _ = json_in(next(lines, ""))
        if first and next(lines, "").lstrip().startswith("{"):
            return Contents("lines", columns_of(first))
        return MAY_BE_VALUES
    return TEXT


def format_of_bytes(head):
    """The format of a file that begins with these bytes: "text", "binary" or "garbled", which is text in an encoding
    that the programs do not read."""
    if text.wide_encoding(head):
        return "text"
    header = head[:HEADER]
    if BINARY.match(head):
        return "binary"
    has_numbers = text.count_controls(header) * 10 > len(header)
    if not has_numbers and not text.is_garbled(head):
        return "text"
    if is_unmarked(header) and is_unmarked(head[:SAMPLE]):
        return "garbled"
    return "binary" if has_numbers or text.count_controls(head) * 50 > len(head) else "garbled"


def is_unmarked(head):
    """Whether bytes are UTF-16 or UTF-32 without a byte order mark: read so, under 2% of characters mean nothing."""
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        characters = head.decode(encoding, "replace")
        n_odd = sum(unicodedata.category(c) in NO_SCRIPT for c in characters if c not in "\t\n\r")
        n_odd += characters.count("\ufffd")
        if n_odd * 50 < len(characters):
            return True
    return False


def contents_of_json(content, path):
    """The `Contents` of a file's whole text, where the file begins like JSON or its name ends in .json."""
    found, is_whole = json_in(content)
    if not is_whole:
        # whole JSON before other text heads the pages of some web sites
        is_page = found and not is_json(path)
        return TEXT if is_page else Contents("values", ())
    is_object = len(found) == 1 and isinstance(found[0], dict)
    return Contents("values", columns_of(found), is_object)


def json_in(content):
    """([value] of the JSON that a text begins with, whether the text is nothing but JSON)."""
    found = []
    try:
        for value in values.values_in(content):
            found.append(value)
    except (ValueError, RecursionError):
        return found, False
    return found, True


def columns_of(found):
    """The columns of the first record in a list of JSON values; () where that record is no object."""
    first = next(values.objects_in(found), None)
    return tuple(first) if isinstance(first, dict) else ()
