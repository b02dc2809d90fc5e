"""Make shards of a user's own text, with a tokenizer trained on it unless one is given, and a name for both.

`corpus_of("My Book.txt", TextOptions())` makes data/shards/My-Book and data/shards/My-Book.tiktoken, unless they exist.
"""

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass, replace

from config.parser import flag
from data import tokenize_shards, train_tokenizer
from data.command_line import VAL_FRACTION
from data.output import Output
from data.sources.formats import WILDCARD, open_source
from data.sources.text import compression_of
from data.splits import SPLITS
from data.workers import BATCH_BYTES
from runtime.messages import UserError, say
from shards import manifest

SHARDS = "data/shards"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Flags for reading text, with the same meaning as in data/tokenize_shards.py."""

    text_column: str = "text"
    """Column of a record that holds the text."""
    skip_damaged: bool = False
    """Leave out, report and count files and records that cannot be read."""
    drop_duplicates: bool = False
    """Leave out documents whose text is exactly that of an earlier one."""
    val_fraction: float = flag(VAL_FRACTION, below=1)
    """Share of the text that is held out for validation."""
    lossy: bool = False
    """Accept a tokenizer that loses more than 1% of the text."""


def name_of(source):
    """A name for the shards of a text and for a run on it, made of the characters that a run's name may have.

    It is the name of the file without its ending, or that of the folder: "input (1).txt" -> "input-1",
    "corpus.v2.jsonl.gz" -> "corpus.v2".
    """
    if WILDCARD.search(source) and not os.path.exists(source):
        source = os.path.dirname(WILDCARD.split(source)[0])
    name = os.path.basename(os.path.abspath(source))
    if os.path.isfile(source):
        name, _ = os.path.splitext(name.removesuffix(compression_of(name)))
    return re.sub(r"[^\w.+=@-]+", "-", name).strip(".-") or "text"


def name_of_tokenizer(tokenizer):
    """The same for a tokenizer: tiktoken's name of it, or the name of its file, or of the folder of a
    tokenizer.json."""
    folder, file = os.path.split(tokenizer)
    stem, _ = os.path.splitext(file)
    return name_of(
        os.path.basename(folder) if stem == "tokenizer" else file.removesuffix(".tiktoken")
    )


def corpus_of(source, options, tokenizer="", vocab_size=None):
    """(folder of the shards of a text, name for a run on it). Shards and tokenizer are made where they are missing.

    source: as in data/tokenize_shards.py, on this machine. options: a `TextOptions`. tokenizer: as there; "": one is
    trained on the text. vocab_size: tokens of the one that is trained; None: a number that suits the length of the
    text. Raises UserError.
    """
    try:
        return make_corpus(source, options, tokenizer, vocab_size)
    except UserError as e:  # it names the flags of tokenize_shards.py; this caller has --data
        raise e.renamed(source="--data", output="folder of shards") from None


def make_corpus(source, options, tokenizer, vocab_size):
    """`corpus_of`, but errors name the flags of data/tokenize_shards.py."""
    name = name_of(source)
    if tokenizer:
        name += f"-{name_of_tokenizer(tokenizer)}"
    elif vocab_size:
        name += f"-{vocab_size}"
    ours = tokenize_shards.Options(source=source, output="", tokenizer="", **vars(options))
    opened = open_source(ours)
    name = choose_name(name, tokenize_shards.settings_of_text(ours, opened))
    folder = os.path.join(SHARDS, name)
    ranks = f"{folder}.tiktoken"
    if not tokenizer and not os.path.exists(ranks):
        asked = dict(source=source, vocab_size=vocab_size, output=ranks)
        train_tokenizer.make_tokenizer(train_tokenizer.Options(**asked), opened)
    # no more workers than batches, since each takes a second to start
    workers = min(ours.workers, 1 + opened.total // BATCH_BYTES)
    asked = replace(ours, output=folder, tokenizer=tokenizer or ranks, workers=workers)
    tokenize_shards.tokenize(asked, opened)
    return folder, name


def choose_name(name, text):
    """`name` where its folder of shards is free or holds those of this text; else `name` with six digits of a hash.

    So another text of that name, or an earlier version of this one, keeps its shards and its runs. text: the settings
    that identify the text, from `tokenize_shards.settings_of_text`.
    """
    held = stored_settings(os.path.join(SHARDS, name))
    if not held or all(held.get(key) == value for key, value in text.items()):
        return name
    own = f"{name}-{hashlib.sha256(repr(text).encode()).hexdigest()[:6]}"
    say(f"{SHARDS}/{name} holds another text, or this one before it changed: this is {own}")
    return own


def stored_settings(folder):
    """{setting: value} of the shards in a folder, finished or not; {} where there are none. Damaged ones give {} too:
    they are refused when they are opened."""
    with contextlib.suppress(UserError):
        for split in SPLITS:
            if held := manifest.read(os.path.join(folder, split)):
                return held
        return Output(folder, None, {"val_fraction": 0}).load_progress().get("settings", {})
    return {}
