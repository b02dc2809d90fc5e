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
    "damaged_files",
    "damaged_records",
    "duplicate_documents",
)


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
    warnings: list  # (kind, words)


def encode_batch(encoding, dtype, skip, val_fraction, validation, batch):
    """The Encoded of a batch of documents.

    skip: leave out and count a file that cannot be read, instead of raising UserError; validation: as in splits.py.
    """
    lengths = np.zeros((len(batch), 2), np.int64)
    counts = {key: np.zeros_like(lengths) for key in COUNTS}
    hashes = np.zeros(len(batch), np.uint64)
    ids, warnings = [np.empty(0, dtype)], []
    for i, document in enumerate(batch):
        if document.lost:
            counts[document.lost][i, 0] = 1
            continue
        try:
            text, replaced = read_text(document)
        except UserError as e:
            if not skip:
                raise
            warnings.append(("damage", skipped(e)))
            counts["damaged_files"][i, 0] = 1
            continue
        hashes[i] = hash_of(text)
        parts = divide(text, val_fraction, validation)
        for k, part in enumerate(parts):
            counts["documents"][i, k] = part != ""
            counts["bytes"][i, k] = len(part.encode())
            if part:
                ids.append(np.array([encoding.eot_token], dtype))
                ids.append(encode_text(part, encoding).astype(dtype))
                lengths[i, k] = 1 + len(ids[-1])
        home = int(parts[0] == "" != parts[1])  # an empty document counts in train
        counts["empty_documents"][i, home] = text == ""
        counts["replaced_documents"][i, home] = replaced > 0
        counts["replaced_characters"][i, home] = replaced
        name = document.name if document.path else f"document {document.name}"
        if replaced:
            words = f"{name} is not UTF-8: {many(replaced, 'character')} became U+FFFD (iconv -t utf-8 keeps them)"
            warnings.append(("replaced", words))
        if document.path and text.count("\0") * 4 > len(text):
            words = f"{name} is full of NUL characters, as UTF-16 without its mark would be"
            warnings.append(("nul", words))
    return Encoded(np.concatenate(ids), lengths, counts, hashes, warnings)
