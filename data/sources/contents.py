"""What a file holds, told by its name or, as most names tell nothing, by how it begins."""

import re
import unicodedata
from typing import NamedTuple

from data.sources import rows, text, values

LINES = (".jsonl", ".ndjson", ".jl")  # endings of names that mean lines of JSON
TABLE = ".parquet"
FETCHED = 1 << 18  # bytes that are fetched of a remote file at once, to see how it begins
HEADER = 64  # bytes that are looked at apart: many kinds of files have a header of numbers, and then text
SAMPLE = 4096  # bytes that tell an encoding
NO_SCRIPT = {"Cc", "Cn", "Co", "Cs"}  # Unicode's categories of controls and of what means nothing
# how files begin whose header is small or has no numbers
BINARY = re.compile(rb"%PDF-|\x93NUMPY|ARROW1|PK\x03\x04|\x80[\x02-\x05]")
WEB_ARCHIVE = re.compile(rb"WARC/\d")
JSON = re.compile(r'\s*\[?\s*\{\s*(\}|"([^"\\\n]|\\.)*"\s*:)')  # an object, or an array of them


class Contents(NamedTuple):
    """What a file holds."""

    kind: str  # lines, values, rows or table, of records; web archive, binary, garbled or text
    columns: tuple | None = None  # of its first record, where that was read
    is_object: bool = False  # whether it is a single JSON object


TEXT = Contents("text")
MAY_BE_VALUES = Contents("values")


def kind_by_name(path):
    """The kind of records that the name of a file tells for sure, or None."""
    if path.lower().endswith(TABLE):
        return "table"
    return "lines" if text.stem(path).endswith(LINES) else None


def is_json(path):
    return text.stem(path).endswith(".json")


def look(fs, path):
    """The `Contents` of a file in the file system `fs`. Raises UserError or one of text.DAMAGE."""
    if kind := kind_by_name(path):
        return Contents(kind)
    with fs.open(path, "rb", block_size=FETCHED) as raw:
        contents = look_at(text.decompressed(raw, path), path)
    if contents != MAY_BE_VALUES:
        return contents
    with fs.open(path, "rb") as raw:
        return look_at_values(values.content_of(raw, path), path)


def look_at(stream, path):
    """The `Contents` of a stream, as far as its beginning tells."""
    head = stream.peek(text.BUFFER)
    if not head:
        return TEXT
    if WEB_ARCHIVE.match(head):
        return Contents("web archive")
    if (kind := kind_of_bytes(head)) != "text":
        return Contents(kind)
    if rows.delimiter_of(path):
        return Contents("rows", tuple(next(rows.table(stream, path), ())))
    if is_json(path) or JSON.match(text.decode(head[:SAMPLE])[0]):
        lines = filter(str.strip, text.lines(stream))
        first, _ = json_in(next(lines, ""))
        if first and next(lines, "").lstrip().startswith("{"):
            return Contents("lines", columns_of(first))
        return MAY_BE_VALUES
    return TEXT


def kind_of_bytes(head):
    """Whether a file that begins with these bytes is text, binary, or garbled: text in an encoding that is not read."""
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
    """Whether some bytes are text of UTF-16 or UTF-32 without a mark: hardly any characters are none of a script."""
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        characters = head.decode(encoding, "replace")
        n_odd = sum(unicodedata.category(c) in NO_SCRIPT for c in characters if c not in "\t\n\r")
        n_odd += characters.count("\ufffd")
        if n_odd * 50 < len(characters):
            return True
    return False


def look_at_values(content, path):
    """The `Contents` of the text of a file that begins as JSON does or has its ending."""
    found, is_whole = json_in(content)
    if not is_whole:
        # whole JSON before other text heads the pages of some web sites
        is_page = found and not is_json(path)
        return TEXT if is_page else Contents("values", ())
    is_object = len(found) == 1 and isinstance(found[0], dict)
    return Contents("values", columns_of(found), is_object)


def json_in(content):
    """([value] of a text of JSON, whether there is nothing else in it)."""
    found = []
    try:
        for value in values.values_in(content):
            found.append(value)
    except (ValueError, RecursionError):
        return found, False
    return found, True


def columns_of(found):
    """The columns of the first record of [value]; none where that is no object."""
    first = next(values.objects_in(found), None)
    return tuple(first) if isinstance(first, dict) else ()
