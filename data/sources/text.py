"""The text of a document: UTF-8, or UTF-16 and UTF-32 with their marks; the rest is replaced and counted."""

import codecs
import re
import zlib
from typing import NamedTuple

from utils import UserError

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


def wide_encoding(content):
    """Name of the encoding that the byte order mark at the beginning of `content` tells, or None: UTF-8."""
    for mark, name in WIDE.items():
        if content.startswith(mark):
            return name
    return None


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
    only_ascii = text.replace("\ufffd", "").isascii()
    return Text(text, replaced, crc32, "" if only_ascii else "utf-8")


def without_lone_surrogates(text):
    """The Text of a record's text. Halves of a character alone, and bytes that were not UTF-8, become U+FFFD."""
    try:
        text.encode()
        return Text(text)
    except UnicodeEncodeError:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        replaced = whole.count("\ufffd") - text.count("\ufffd")
        were_bytes = re.search("[\udc80-\udcff]", text)  # as errors="surrogateescape" makes them
        only_ascii = whole.replace("\ufffd", "").isascii()
        return Text(whole, replaced, 0, "" if were_bytes and only_ascii else "utf-8")


def read_text(document, limit=None):
    """The Text of a document, or of its first `limit` bytes or characters.

    What is not UTF-8 in a file, and lone surrogates in a record, become U+FFFD. Raises UserError where the file cannot
    be read.
    """
    if document.text is not None:
        return without_lone_surrogates(document.text[:limit])
    try:
        with open(document.path, "rb") as f:
            content = f.read(limit)
    except OSError as e:
        raise UserError(f"--source: {document.path} cannot be read ({e.strerror}).") from None
    return decode(content, whole=limit is None)
