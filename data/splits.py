"""Which documents train, which validate, and which are duplicates. Their text alone decides."""

import hashlib

import numpy as np

from data.sources.base import skipped, warn
from data.sources.text import read_text
from runtime.messages import UserError
from shards.tokenization import CUT

SPLITS = ("train", "val")
# How validation is chosen, as manifests tell it
WHOLE = "documents whose text hashes lowest"
ENDS = "the end of every document"
FEW = 1000  # documents, from which on whole ones divide evenly enough


def hash_of(text):
    """A hash of a text, below 2**64."""
    content = hashlib.blake2b(text.encode(), digest_size=8)
    return int(content.hexdigest(), 16)


def divide(text, val_fraction, validation):
    """(part for train, part for val) of a text; either may be empty."""
    if validation == WHOLE:
        return ("", text) if hash_of(text) < val_fraction * 2**64 else (text, "")
    if val_fraction == 0 or len(text) < 2:
        return text, ""
    at = round((1 - val_fraction) * len(text))
    at = min(max(1, at), len(text) - 1)
    word_end = CUT.search(text, at, at + 1000)
    at = word_end.end() if word_end else at
    return text[:at], text[at:]


def choose_validation(source, val_fraction, drop=False):
    """How the documents of a source validate, duplicates left out if `drop`: as a whole, or by their ends where they
    are FEW and val, or train, would get less than a third of its share of the text, or val three times it."""
    if not val_fraction:
        return WHOLE
    hashes, sizes, n = set(), [0, 0], 0
    for document in source.read({}):
        text = text_of(document, source.skip)
        text_hash = hash_of(text)
        if not text or (drop and text_hash in hashes):
            continue
        hashes.add(text_hash)
        n += 1
        if n == FEW:
            return WHOLE
        sizes[text_hash < val_fraction * 2**64] += len(text.encode())
    train, val = sizes
    share = val_fraction * (train + val)
    rest = train + val - share
    is_uneven = val * 3 < share or train * 3 < rest or val > 3 * share
    return ENDS if is_uneven else WHOLE


def text_of(document, skip):
    """A document's text, "" where it is lost or, with `skip`, cannot be read. Raises UserError."""
    if document.lost:
        return ""
    try:
        return read_text(document)[0]
    except UserError as e:
        if not skip:
            raise
        warn("damage", skipped(e))
        return ""


class Seen:
    """A set of hashes, 8 bytes each: sorted arrays, each more than twice the next."""

    def __init__(self):
        self.arrays = []

    def __len__(self):
        return sum(map(len, self.arrays))

    def all(self):
        """uint64 [n]: all hashes."""
        return np.concatenate([np.empty(0, np.uint64), *self.arrays])

    def add(self, hashes):
        """Add uint64 [n]; returns bool [n], whether each was there, or is an earlier one of these."""
        _, first = np.unique(hashes, return_index=True)
        new = np.zeros(len(hashes), bool)
        new[first] = True
        for array in self.arrays:
            at = np.searchsorted(array, hashes)
            new &= array[np.minimum(at, len(array) - 1)] != hashes
        if new.any():
            self.arrays.append(np.sort(hashes[new]))
        while len(self.arrays) > 1:
            larger, smaller = self.arrays[-2:]
            if len(larger) > 2 * len(smaller):
                break
            self.arrays[-2:] = [np.sort(np.concatenate([larger, smaller]))]
        return ~new
