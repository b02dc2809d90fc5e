"""Read the text of a document: UTF-8, or UTF-16 or UTF-32 with a byte order mark, compressed or not.

Bytes that are not of that encoding become U+FFFD and are counted.
"""

import bz2
import codecs
import gzip
import io
import lzma
import os
import zlib

import pyarrow

from runtime.messages import UserError, first_line
from shards.tokenization import whole_characters

# what reading a damaged file raises
DAMAGE = (OSError, EOFError, UnicodeError, zlib.error, lzma.LZMAError, pyarrow.ArrowException)
# Most bytes of a document, decompressed: a compressed file of a few kilobytes can expand to gigabytes.
LONGEST = 256_000_000
PIECE = 1 << 20  # bytes that are read at once
BUFFER = 1 << 16  # bytes of a stream that can be inspected before they are read
WIDE = {  # UTF-32 first, since the little-endian mark of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_WINDOW = 1 << 27  # bytes: the largest window that the library reads
# Bytes that no text contains: the control characters, except for backspace, tabs, ends of lines and pages, and escape,
# which colors logs.
CONTROLS = bytes({*range(32), 127} - {8, 9, 10, 11, 12, 13, 27})


def check_length(size, what, advice=""):
    """Raises UserError where `what`, a document of `size` bytes, is longer than LONGEST."""
    if size > LONGEST:
        raise UserError(f"{what} is longer than {LONGEST:,} bytes", flag="source", remedy=advice)


def zstd_window(header):
    """Bytes of the window that a zstd file needs, from its first 18 bytes; 0 where they do not say. RFC 8878, 3.1.1."""
    if len(header) < 6 or not header.startswith(ZSTD_MAGIC):
        return 0
    descriptor = header[4]
    if descriptor & 0x20:  # a single segment: its window is the whole content
        start = 5 + (0, 1, 2, 4)[descriptor & 3]  # after the dictionary's number
        width = (1, 2, 4, 8)[descriptor >> 6]
        return int.from_bytes(header[start : start + width], "little")
    exponent, eighths = divmod(header[5], 8)
    return (8 + eighths) << (7 + exponent)


def open_zstd(raw):
    """The stream that a zstd file holds. Raises OSError for a window that the library cannot read."""
    window = zstd_window(raw.read(18))
    raw.seek(0)
    if window > ZSTD_WINDOW:
        raise OSError(
            f"its zstd window has {window >> 20:,} MiB, more than the {ZSTD_WINDOW >> 20} MiB that can be read: "
            "compress it again without --long, as by zstd -dc --long=31 OLD | zstd -o NEW"
        )
    return pyarrow.CompressedInputStream(raw, "zstd")


COMPRESSION = {  # Python's own gzip accepts zeros after the end, as the program gzip does
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": open_zstd,
    ".zstd": open_zstd,
}


def compression_of(path):
    """The ending of a compressed file's name, one of COMPRESSION in upper or lower case; else ""."""
    ending = os.path.splitext(path)[1]
    return ending if ending.lower() in COMPRESSION else ""


def stem(path):
    """A path in lower case, without the ending of a compression."""
    return path.removesuffix(compression_of(path)).lower()


def decompressed(raw, path):
    """An open file as a buffered stream, decompressed according to the ending of `path`."""
    compression = compression_of(path).lower()
    stream = COMPRESSION[compression](raw) if compression else raw
    # Where a file is truncated, the last bytes before the end, which are in this buffer, are lost.
    stream = io.BufferedReader(stream, BUFFER)
    if compression and not stream.peek(1) and not raw.tell():
        raise EOFError("no bytes are in it, not even those of an empty archive")
    return stream


def wide_encoding(content):
    """The encoding that the byte order mark of `content` names, "utf-16" or "utf-32"; None where it has none."""
    return next((name for mark, name in WIDE.items() if content.startswith(mark)), None)


def lines(stream):
    """Yield the lines of a stream as text, with lone surrogates for bytes that are not UTF-8.

    Of a line that is too long come the first LONGEST + 1 characters, by which the caller recognizes it.
    """
    encoding = wide_encoding(stream.peek(4))
    errors = "strict" if encoding else "surrogateescape"
    text = io.TextIOWrapper(stream, encoding or "utf-8-sig", errors, newline="\n")
    while line := text.readline(LONGEST + 1):
        yield line
        while line and not line.endswith("\n"):
            line = text.readline(PIECE)


def content_of(raw, path, advice):
    """The whole text of an open file, with lone surrogates for bytes that are not UTF-8. Raises UserError where it is
    too long, with `advice` as its remedy, or one of DAMAGE."""
    content = decompressed(raw, path).read(LONGEST + 1)
    check_length(len(content), path, advice)
    return "".join(lines(io.BufferedReader(io.BytesIO(content))))


def decode(content):
    """Decode a file's bytes: (text without the byte order mark, number of characters that became U+FFFD)."""
    try:
        return content.decode(wide_encoding(content) or "utf-8-sig"), 0
    except UnicodeDecodeError:
        text = content.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
        return text, text.count("\ufffd") - content.count("\ufffd".encode())


def count_controls(content):
    """The number of bytes that are among CONTROLS."""
    return len(content) - len(content.translate(None, CONTROLS))


def is_garbled(content):
    """Whether more than a tenth of the bytes is not text, as in a text of another encoding."""
    text, replaced = decode(content)
    # half of the bytes of UTF-16 may be zeros, which are no control characters there
    is_wide = wide_encoding(content) and not replaced
    controls = 0 if is_wide else count_controls(content)
    return (replaced + controls) * 10 > len(text)


def not_text_error(path):
    """The UserError for a file that is garbled."""
    return UserError("is not UTF-8 text; convert it (iconv -t utf-8)", flag="source", value=path)


def read_text(document):
    """Read a document: (text, number of characters that became U+FFFD). Raises UserError where it cannot be read."""
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
        raise UserError(
            f"{document.path} cannot be read ({first_line(e)})", flag="source"
        ) from None
    check_length(len(content), document.path, "split it")
    if not document.is_known and is_garbled(content):
        raise not_text_error(document.path)
    return decode(content)
