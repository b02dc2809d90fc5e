"""The text of a document: UTF-8, or UTF-16 and UTF-32 with their marks; the rest is replaced and counted."""

import codecs
import io
import os
import re
import zlib
from typing import NamedTuple

import pyarrow

from runtime.messages import UserError, first_line

# what reading a damaged file raises
DAMAGE = (OSError, EOFError, UnicodeError, pyarrow.ArrowException)
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
# Bytes of the longest document, decompressed. A few kilobytes of an archive can spell gigabytes.
LONGEST = 256_000_000
PIECE = 1 << 20  # bytes that are read at once
WIDE = {  # those of 32 bits first: their marks begin with those of 16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Text(NamedTuple):
    """The text of a document."""

    text: str
    replaced: int = 0  # characters that became U+FFFD
    crc32: int = 0  # of a file's bytes
    # that it was read in; "" where nothing but ASCII in it is UTF-8, as in latin-1
    encoding: str = "utf-8"


# --- Bytes ------------------------------------------------------------------------------------------------------


def check_length(size, what, advice=""):
    """Raises UserError where `what`, a document of `size` bytes, is longer than LONGEST."""
    if size > LONGEST:
        raise UserError(
            f"--source: {what} is longer than {LONGEST:,} bytes, the most that a document may have{advice}."
        )


def decompressed(raw, path):
    """An open file as a buffered stream, decompressed as the ending of `path` tells."""
    compression = COMPRESSION.get(os.path.splitext(path)[1])
    stream = pyarrow.CompressedInputStream(raw, compression) if compression else raw
    # where a file is torn, what is in this buffer is lost
    stream = io.BufferedReader(stream, 1 << 16)
    if compression and not stream.peek(1) and not raw.tell():
        raise EOFError("no bytes are in it, not even those of an empty archive")
    return stream


def lines(stream):
    """Yield the lines of a stream of bytes or of characters; of one longer than LONGEST, a beginning that is too."""
    while line := stream.readline(LONGEST + 1):
        yield line
        newline = "\n" if isinstance(line, str) else b"\n"
        while line and not line.endswith(newline):
            line = stream.readline(PIECE)


def whole(stream):
    """All bytes of a stream, or more than LONGEST of them."""
    pieces, size = [], 0
    while size <= LONGEST and (piece := stream.read(PIECE)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


# --- Characters -------------------------------------------------------------------------------------------------


def wide_encoding(content):
    """Name of the encoding that the byte order mark at the beginning of `content` tells, or None: UTF-8."""
    for mark, name in WIDE.items():
        if content.startswith(mark):
            return name
    return None


def decode(content):
    """The Text of a file's bytes, without a byte order mark."""
    crc32 = zlib.crc32(content)
    for encoding in filter(None, (wide_encoding(content), "utf-8-sig")):
        try:
            return Text(content.decode(encoding), 0, crc32, encoding.removesuffix("-sig"))
        except UnicodeDecodeError:
            pass
    text = content.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    replaced = text.count("\ufffd") - content.count("\ufffd".encode())
    only_ascii = text.replace("\ufffd", "").isascii()
    return Text(text, replaced, crc32, "" if only_ascii else "utf-8")


def without_lone_surrogates(text):
    """The Text of a record's text. Halves of a character alone, and bytes that were not UTF-8, become U+FFFD."""
    try:
        text.encode()
        return Text(text)
    except UnicodeEncodeError:
        sound = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        replaced = sound.count("\ufffd") - text.count("\ufffd")
        were_bytes = re.search("[\udc80-\udcff]", text)  # as errors="surrogateescape" makes them
        only_ascii = sound.replace("\ufffd", "").isascii()
        return Text(sound, replaced, 0, "" if were_bytes and only_ascii else "utf-8")


def read_text(document):
    """The Text of a document.

    What is not UTF-8 in a file, and lone surrogates in a record, become U+FFFD. Raises UserError where the file cannot
    be read or is too long.
    """
    if document.text is not None:
        return without_lone_surrogates(document.text)
    try:
        with open(document.path, "rb") as raw:
            if document.start is None:
                content = whole(decompressed(raw, document.path))
            else:
                raw.seek(document.start)
                content = raw.read(min(document.size, LONGEST + 1))
    except DAMAGE as e:
        raise UserError(f"--source: {document.path} cannot be read ({first_line(e)}).") from None
    check_length(len(content), document.path, "; split it")
    return decode(content)
