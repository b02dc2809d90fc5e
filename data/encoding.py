"""From documents to token ids and counts: what the workers of tokenize_shards.py do."""

import unicodedata
from collections import Counter
from typing import NamedTuple

import numpy as np

from data.sources.base import many, skipped
from data.sources.text import read_text
from data.splits import divide, hash_of
from runtime.messages import UserError
from shards.tokenization import CUT, HubTokenizer, whole_characters

COUNTS = """documents bytes empty_documents replaced_documents replaced_characters damaged_files damaged_records
duplicate_documents sampled_characters lost_characters lost_whitespace""".split()
# The first SAMPLED of every EVERY characters are decoded again: some of each document, at little cost.
SAMPLED, EVERY = 256, 4096


def encode_text(text, encoding):
    """Token ids of a text, uint32: those of `encode_ordinary`.

    tiktoken's regular expressions give up after a million steps, as in a long run of spaces. A text with such a run is
    halved until each part passes, where that changes no token if it can.
    """
    try:
        # no text is special, and none is an error
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:
        cut = CUT.search(text, len(text) // 2)
        half = cut.end() if cut else len(text) // 2
        parts = [encode_text(part, encoding) for part in (text[:half], text[half:])]
        return np.concatenate(parts)


def count_lost(text, encoding):
    """A Counter of characters of a sample of `text`: how many there are, and how many are lost, whitespace apart, when
    their tokens are decoded again. What Unicode calls compatible (NFKC) is the same here, and so is what a tokenizer
    adds, such as a first space; "a" in place of "A" is a loss."""
    if not isinstance(encoding, HubTokenizer):  # tiktoken's have a token for every byte
        return Counter()
    text = whole_characters(text)
    sample = "".join(text[start : start + SAMPLED] for start in range(0, len(text), EVERY))
    # without special tokens: one of them may be the name of what is not known, such as [UNK]
    decoded = encoding.tokenizer.decode(encoding.encode_ordinary(sample))
    before, after = (Counter(unicodedata.normalize("NFKC", x).strip()) for x in (sample, decoded))
    lost = (before - after).items()
    return Counter(
        sampled_characters=before.total(),
        lost_characters=sum(n for character, n in lost if not character.isspace()),
        lost_whitespace=sum(n for character, n in lost if character.isspace()),
    )


class Encoded(NamedTuple):
    """What becomes of a document, which has a part for train and one for val."""

    ids: list  # token ids of each part, none where it is empty
    counts: list  # of each part, a Counter of the COUNTS
    text_hash: int | None = None  # None where it has no text
    warning: tuple = ()  # (kind, words)


def encode_document(encoding, dtype, skip, val_fraction, validation, document):
    """The Encoded of a document. skip: leave out and count a file that cannot be read; validation: as in splits.py."""
    ids = [np.empty(0, dtype)] * 2
    counts = [Counter(), Counter()]
    if document.lost:
        counts[0][document.lost] = 1
        return Encoded(ids, counts)
    try:
        text, replaced = read_text(document)
    except UserError as e:
        if not skip:
            raise
        counts[0]["damaged_files"] = 1
        return Encoded(ids, counts, warning=("damage", skipped(e)))
    parts = divide(text, val_fraction, validation)
    for k, part in enumerate(parts):
        if part:
            whole = np.insert(encode_text(part, encoding), 0, encoding.eot_token)
            ids[k] = whole.astype(dtype)
            counts[k].update(documents=1, bytes=len(part.encode()))
            counts[k].update(count_lost(part, encoding))
    home = counts[1] if parts[1] and not parts[0] else counts[0]  # train, where it is empty
    if not text:
        home["empty_documents"] = 1
        return Encoded(ids, counts)
    warning = ()
    if replaced and not document.is_known:
        home.update(replaced_documents=1, replaced_characters=replaced)
        name = document.name if document.path else f"document {document.name}"
        words = f"{name} is not UTF-8: {many(replaced, 'character')} became U+FFFD (iconv -t utf-8 keeps them)"
        warning = ("replaced", words)
    return Encoded(ids, counts, hash_of(text), warning)
