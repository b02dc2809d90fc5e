"""From documents to token ids and counts. This is what the workers of tokenize_shards.py do."""

from typing import NamedTuple

import numpy as np

from data.sources.base import many, skipped
from data.sources.text import read_text
from data.splits import divide, hash_of
from data.tokenization import CUT
from runtime.messages import UserError

COUNTS = (
    "documents",
    "bytes",
    "empty_documents",
    "replaced_documents",
    "replaced_characters",
    "foreign_documents",
    "damaged_files",
    "damaged_records",
    "duplicate_documents",
)
PIECE = 1_000_000  # characters; longer texts are encoded in pieces of at least this many, where they can be cut


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


class Encoded(NamedTuple):
    """What becomes of a batch of n documents, each of which has a part for train and one for val."""

    ids: np.ndarray  # tokens of all parts, one after the other
    lengths: np.ndarray  # int64 [n, 2]: tokens of each part; an empty one has none
    counts: dict  # of each of the COUNTS, int64 [n, 2]
    hashes: np.ndarray  # uint64 [n]: of the texts
    crc32s: list  # of the documents that are files; -1 for one that cannot be read
    warnings: list  # (kind, words)


def encode_batch(batch, encoding, dtype, skip, val_fraction, validation):
    """The Encoded of a batch of documents.

    skip: leave out and count a file that cannot be read, instead of raising UserError; validation: as in splits.py.
    """
    lengths = np.zeros((len(batch), 2), np.int64)
    counts = {key: np.zeros_like(lengths) for key in COUNTS}
    hashes = np.zeros(len(batch), np.uint64)
    ids, crc32s, warnings = [np.empty(0, dtype)], [], []
    for i, document in enumerate(batch):
        counts["damaged_files"][i, 0] = document.lost.files
        counts["damaged_records"][i, 0] = document.lost.records
        if any(document.lost):
            continue
        try:
            text = read_text(document)
        except UserError as e:
            if not skip:
                raise
            warnings.append(("damage", skipped(e)))
            crc32s.append(-1)
            counts["damaged_files"][i, 0] = 1
            continue
        text_hash = hash_of(text.text)
        hashes[i] = text_hash
        parts = divide(text.text, text_hash, val_fraction, validation)
        for k, part in enumerate(parts):
            counts["documents"][i, k] = part != ""
            counts["bytes"][i, k] = len(part.encode())
            encoded = encode_document(part, encoding, dtype)
            ids += encoded
            lengths[i, k] = sum(map(len, encoded))
        home = int(parts[0] == "" != parts[1])  # an empty document counts in train
        counts["empty_documents"][i, home] = text.text == ""
        counts["replaced_documents"][i, home] = text.replaced > 0
        counts["replaced_characters"][i, home] = text.replaced
        counts["foreign_documents"][i, home] = text.encoding == ""
        if document.path:
            crc32s.append(text.crc32)
        warnings += odd_encoding(document, text)
    return Encoded(np.concatenate(ids), lengths, counts, hashes, crc32s, warnings)


def encode_document(text, encoding, dtype):
    """Token ids of a document, as arrays one after the other; none of an empty one."""
    if not text:
        return []
    ids = [np.array([encoding.eot_token], dtype)]
    for piece in pieces(text, encoding):
        ids.append(encode_text(piece, encoding).astype(dtype))
    return ids


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
