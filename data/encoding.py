"""From documents to token ids and counts. This is what the workers of tokenize_shards.py do."""

from collections import Counter

import numpy as np

from data.sources.base import many, skipped
from data.sources.text import read_text
from data.tokenization import CUT
from utils import UserError

COUNTS = (
    "documents",
    "bytes",
    "empty_documents",
    "replaced_documents",
    "replaced_characters",
    "foreign_documents",
    "damaged_files",
    "damaged_records",
)
PIECE = 1_000_000  # characters; longer texts are encoded in pieces of at least so many, where they can be cut


def pieces(text, encoding):
    """The text in pieces whose tokens, one after the other, are its tokens: itself where it may not be cut."""
    start = 0
    if getattr(encoding, "may_be_cut", True):  # tiktoken's always may
        while end := CUT.search(text, start + PIECE):
            yield text[start : end.end()]
            start = end.end()
    yield text[start:]


def encode_text(text, encoding):
    """Token ids of a text, uint32: those of `encode_ordinary`.

    tiktoken's regular expressions give up after a million steps, which a run of that many spaces takes. A text with
    such a run is halved until each part passes, where that changes no token if it can.
    """
    try:
        # no text is special, and none is an error
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:
        cut = CUT.search(text, len(text) // 2)
        half = cut.end() if cut else len(text) // 2
        first, second = encode_text(text[:half], encoding), encode_text(text[half:], encoding)
        return np.concatenate([first, second])


def encode_batch(batch, encoding, dtype, skip):
    """What becomes of the documents of a batch [(split, document)], in three parts:

    {split: (token ids as one array of `dtype`, Counter of the COUNTS)}; no tokens of empty documents
    [CRC-32s of the documents that are files]; -1 for one that cannot be read
    [(kind, words)] to warn of

    skip: leave out and count a file that cannot be read, instead of raising UserError.
    """
    splits, crc32s, warnings = {}, [], []
    for split, document in batch:
        ids, counts = splits.setdefault(split, ([np.empty(0, dtype)], Counter()))
        if any(document.lost):
            counts["damaged_files"] += document.lost.files
            counts["damaged_records"] += document.lost.records
            continue
        try:
            text = read_text(document)
        except UserError as e:
            if not skip:
                raise
            warnings.append(("damage", skipped(e)))
            crc32s.append(-1)
            counts["damaged_files"] += 1
            continue
        if text.text:
            ids.append(np.array([encoding.eot_token], dtype))
            for piece in pieces(text.text, encoding):
                ids.append(encode_text(piece, encoding).astype(dtype))
        counts.update(counts_of(text))
        if document.path:
            crc32s.append(text.crc32)
        warnings += odd_encoding(document, text)
    parts = {split: (np.concatenate(ids), counts) for split, (ids, counts) in splits.items()}
    return parts, crc32s, warnings


def counts_of(text):
    """{count: number} of one document's Text."""
    return {
        "documents": int(text.text != ""),
        "bytes": len(text.text.encode()),
        "empty_documents": int(text.text == ""),
        "replaced_documents": int(text.replaced > 0),
        "replaced_characters": text.replaced,
        "foreign_documents": int(text.encoding == ""),
    }


def odd_encoding(document, text):
    """[(kind, words)] to warn of a document whose Text is not plain UTF-8."""
    name = document.name if document.path else f"document {document.name}"
    if text.replaced or not text.encoding:
        words = f"{name} is not UTF-8: {many(text.replaced, 'character')} became U+FFFD"
        if not text.encoding:
            words += " (perhaps it is latin-1: iconv -f latin1 -t utf-8 would keep them)"
        return [("replaced", words)]
    if text.encoding != "utf-8":
        return [("wide", f"{name} is {text.encoding.upper()} and is read as such")]
    if document.path and text.text.count("\0") * 4 > len(text.text):
        words = "is full of NUL characters, as UTF-16 without its mark would be; they stay"
        return [("nul", f"{name} {words}")]
    return []
