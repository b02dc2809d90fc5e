"""Which documents are for training, which for validation, and which are duplicates. Only their text decides."""

import hashlib

import numpy as np

from data.sources.base import skipped, warn
from data.sources.text import read_text
from runtime.messages import UserError
from shards.tokenization import CUT

SPLITS = ("train", "val")
# How the validation split is chosen, in the words of manifests
WHOLE = "documents whose text hashes lowest"
ENDS = "the end of every document"
ENOUGH = 1000  # with this many documents, whole ones give val about its share of the text


def hash_of(text):
    """A hash of a text, an int below 2**64."""
    content = hashlib.blake2b(text.encode(), digest_size=8)
    return int(content.hexdigest(), 16)


def divide(text, val_fraction, validation):
    """Divide a text: (part for train, part for val), either of which may be empty.

    validation: WHOLE, and one part is the whole text; or ENDS, and val is the last share of it, from the end of a word.
    """
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
    """How to choose the validation split of a source: by WHOLE documents, or by the ENDS of each.

    ENDS is for a source of fewer than ENOUGH documents, where whole ones would divide it badly: train or val would get
    less than a third of its share of the text, or val more than three times its share. drop: leave out duplicates.
    """
    if not val_fraction:
        return WHOLE
    hashes = set()
    sizes = [0, 0]  # bytes for train and for val, by whole documents
    n = 0
    for document in source.read({}):
        text = text_of(document, source.skip)
        text_hash = hash_of(text)
        if not text or (drop and text_hash in hashes):
            continue
        hashes.add(text_hash)
        n += 1
        if n == ENOUGH:
            return WHOLE
        sizes[text_hash < val_fraction * 2**64] += len(text.encode())
    train, val = sizes
    share = val_fraction * (train + val)
    rest = train + val - share
    is_uneven = val * 3 < share or train * 3 < rest or val > 3 * share
    return ENDS if is_uneven else WHOLE


def text_of(document, skip):
    """The text of a document; "" where it is left out as damaged or, with `skip`, cannot be read. Raises UserError."""
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
    """A set of hashes, 8 bytes each, kept as sorted arrays.

    Each array is more than twice as long as the next, so n hashes are in at most about log2(n) arrays.
    """

    def __init__(self):
        self.arrays = []

    def __len__(self):
        return sum(map(len, self.arrays))

    def all(self):
        """uint64 [n]: all hashes in the set."""
        return np.concatenate([np.empty(0, np.uint64), *self.arrays])

    def add(self, hashes):
        """Add hashes, uint64 [n]. Returns bool [n]: whether each was in the set before, or earlier in `hashes`."""
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
