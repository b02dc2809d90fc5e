"""The text of a document: UTF-8, or UTF-16 and UTF-32 with their marks; the rest is replaced and counted."""

import codecs
import io
import os

import pyarrow

from data.tokenization import whole_characters
from runtime.messages import UserError, first_line

DAMAGE = (OSError, EOFError, UnicodeError, pyarrow.ArrowException)  # what a damaged file raises
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
LONGEST = 256_000_000  # bytes of a document, decompressed: a few kilobytes of an archive can spell gigabytes
PIECE = 1 << 20  # bytes that are read at once
WIDE = {  # those of 32 bits first: their marks begin with those of 16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def check_length(size, what, advice=""):
    """Raises UserError where `what`, a document of `size` bytes, is longer than LONGEST."""
    if size > LONGEST:
        raise UserError(f"--source: {what} is longer than {LONGEST:,} bytes{advice}.")


def decompressed(raw, path):
    """An open file as a buffered stream, decompressed as the ending of `path` tells."""
    compression = COMPRESSION.get(os.path.splitext(path)[1])
    stream = pyarrow.CompressedInputStream(raw, compression) if compression else raw
    # where a file is torn, what is in this buffer is lost
    stream = io.BufferedReader(stream, 1 << 16)
    if compression and not stream.peek(1) and not raw.tell():
        raise EOFError("no bytes are in it, not even those of an empty archive")
    return stream


def wide_encoding(content):
    """Name of the encoding that the byte order mark at the beginning of `content` tells, or None: UTF-8."""
    return next((name for mark, name in WIDE.items() if content.startswith(mark)), None)


def lines(stream):
    """Yield the lines of a stream as text, bytes that are not UTF-8 as lone surrogates; of a longer one LONGEST + 1."""
    encoding = wide_encoding(stream.peek(4))
    errors = "strict" if encoding else "surrogateescape"
    text = io.TextIOWrapper(stream, encoding or "utf-8-sig", errors, newline="\n")
    while line := text.readline(LONGEST + 1):
        yield line
        while line and not line.endswith("\n"):
            line = text.readline(PIECE)


def decode(content):
    """(text, number of characters that became U+FFFD) of a file's bytes, without a byte order mark."""
    try:
        return content.decode(wide_encoding(content) or "utf-8-sig"), 0
    except UnicodeDecodeError:
        text = content.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
        return text, text.count("\ufffd") - content.count("\ufffd".encode())


def read_text(document):
    """(text, number of characters that became U+FFFD) of a document. Raises UserError where it cannot be read."""
    if document.text is not None:
        content = whole_characters(document.text)
        return content, content.count("\ufffd") - document.text.count("\ufffd")
    try:
        with open(document.path, "rb") as raw:
            if document.start is None:
                content = decompressed(raw, document.path).read(LONGEST + 1)
            else:
                raw.seek(document.start)
                content = raw.read(min(document.size, LONGEST + 1))
    except DAMAGE as e:
        raise UserError(f"--source: {document.path} cannot be read ({first_line(e)}).") from None
    check_length(len(content), document.path, "; split it")
    return decode(content)
