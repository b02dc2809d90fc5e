"""Encode documents as token ids, and count what happens to them: the work of the workers of tokenize_shards.py."""

import unicodedata
from collections import Counter
from typing import NamedTuple

import numpy as np

from data.sources.base import counted, skipped
from data.sources.text import read_text
from data.splits import divide, hash_of
from runtime.messages import UserError
from shards.tokenization import CUT, HubTokenizer, whole_characters

COUNTS = """documents bytes empty_documents replaced_documents replaced_characters damaged_files damaged_records
duplicate_documents sampled_characters lost_characters lost_whitespace""".split()
# Of every EVERY characters the first SAMPLED are decoded again: a part of each document, at little cost.
SAMPLED = 256
EVERY = 4096


def encode_text(text, encoding):
    """uint32 [n]: the token ids of a text, the same that `encode_ordinary` returns as a list.

    tiktoken's regular expressions give up after a million steps, as in a long run of spaces. A text with such a run is
    halved until each part passes. It is cut where no token changes, if there is such a place.
    """
    try:
        # text that spells a special token is ordinary text, and no error
        return encoding.encode_to_numpy(text, disallowed_special=())
    except ValueError:
        cut = CUT.search(text, len(text) // 2)
        half = cut.end() if cut else len(text) // 2
        parts = [encode_text(part, encoding) for part in (text[:half], text[half:])]
        return np.concatenate(parts)


def count_lost(text, encoding):
    """Count the characters in a sample of `text` that are lost when its tokens are decoded again.

    Returns a Counter of the characters in the sample and of those lost, whitespace separately. Characters that Unicode
    calls compatible (NFKC) count as equal. What a tokenizer adds, such as a first space, is no loss; "a" in place of
    "A" is one.
    """
    if not isinstance(
        encoding, HubTokenizer
    ):  # tiktoken's encodings have a token for every byte, and lose nothing
        return Counter()
    text = whole_characters(text)
    sample = "".join(text[start : start + SAMPLED] for start in range(0, len(text), EVERY))
    # decode leaves special tokens out: one of them may stand for unknown characters, such as [UNK]
    decoded = encoding.tokenizer.decode(encoding.encode_ordinary(sample))
    before, after = (Counter(unicodedata.normalize("NFKC", x).strip()) for x in (sample, decoded))
    lost = (before - after).items()
    return Counter(
        sampled_characters=before.total(),
        lost_characters=sum(n for character, n in lost if not character.isspace()),
        lost_whitespace=sum(n for character, n in lost if character.isspace()),
    )


class Encoded(NamedTuple):
    """An encoded document, in two parts: one for train and one for val."""

    ids: list  # token ids of each part; an empty array where the part is empty
    counts: list  # a Counter of the COUNTS for each part
    text_hash: int | None = None  # None where the document has no text
    warning: tuple = ()  # (category, words) for `base.warn`


def encode_document(encoding, dtype, skip, val_fraction, validation, document):
    """Encode a document: its `Encoded`. skip: leave out and count a file that cannot be read. validation: WHOLE or ENDS
    of splits.py."""
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
    # what concerns the whole document is counted once: for val where all of it is there, else for train
    of_document = counts[1] if parts[1] and not parts[0] else counts[0]
    if not text:
        of_document["empty_documents"] = 1
        return Encoded(ids, counts)
    warning = ()
    if replaced and not document.is_known:
        of_document.update(replaced_documents=1, replaced_characters=replaced)
        name = document.name if document.path else f"document {document.name}"
        words = f"{name} is not UTF-8: {counted(replaced, 'character')} became U+FFFD (iconv -t utf-8 keeps them)"
        warning = ("replaced", words)
    return Encoded(ids, counts, hash_of(text), warning)
