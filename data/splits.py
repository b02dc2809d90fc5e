"""Which documents train and which validate, and which are duplicates: all of it told by their text alone."""

import hashlib
from collections import Counter

import numpy as np

from data.tokenization import CUT

SPLITS = ("train", "val")
# How validation is chosen, as manifests tell it
WHOLE = "documents whose text hashes lowest"
ENDS = "the end of every document"
FEW = 1000  # documents, from which on whole ones divide evenly enough


def hash_of(text):
    """A hash of a text, below 2**64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def divide(text, text_hash, val_fraction, validation):
    """(part for train, part for val) of a text; either may be empty."""
    if validation == WHOLE:
        return ("", text) if text_hash < val_fraction * 2**64 else (text, "")
    at = min(len(text) - 1, max(1, round((1 - val_fraction) * len(text))))
    if val_fraction == 0 or at < 1:
        return text, ""
    word_end = CUT.search(text, at, at + 1000)
    at = word_end.end() if word_end else at
    return text[:at], text[at:]


def are_uneven(sizes, val_fraction):
    """Whether whole documents divide badly: val, or train, has less than a third of its share, or val three times it.

    sizes: bytes of train and of val.
    """
    train, val = sizes
    total = train + val
    too_little = val * 3 < val_fraction * total or train * 3 < (1 - val_fraction) * total
    return val_fraction > 0 and total > 0 and (too_little or val > 3 * val_fraction * total)


class Seen:
    """The set of the hashes of all documents so far, 8 bytes each: sorted arrays, each more than twice the next."""

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
        while len(self.arrays) > 1 and len(self.arrays[-2]) <= 2 * len(self.arrays[-1]):
            self.arrays[-2:] = [np.sort(np.concatenate(self.arrays[-2:]))]
        return ~new


def apportion(encoded, seen, drop):
    """{split: (token ids, Counter)} of a batch, an encoding.Encoded.

    Documents whose text is in `seen`, or comes earlier in the batch, are counted, and with `drop` left out.
    """
    lengths = encoded.lengths
    with_text = lengths.any(1)
    again = np.zeros(len(lengths), bool)
    again[with_text] = seen.add(encoded.hashes[with_text])
    kept = ~again | (not drop)
    home = np.where(lengths[:, 0], 0, 1)  # the split that a duplicate is counted in
    parts = {}
    for i, split in enumerate(SPLITS):
        mine = np.zeros(lengths.shape, bool)
        mine[:, i] = kept
        counts = Counter({key: int(n[kept, i].sum()) for key, n in encoded.counts.items()})
        counts["duplicate_documents"] = int((again & (home == i)).sum())
        its_ids = np.repeat(mine.ravel(), lengths.ravel())
        # of one long document no copy
        parts[split] = encoded.ids if its_ids.all() else encoded.ids[its_ids], counts
    return parts
