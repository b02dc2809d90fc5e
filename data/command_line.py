"""The flags that the data programs share, and how such a program begins and ends."""

import os
from dataclasses import MISSING, dataclass

from config.parser import flag
from runtime import interrupts
from runtime.messages import UserError, one_sentence

VAL_FRACTION = 0.1  # of tokenize_shards.py; train_tokenizer.py learns from none of it


@dataclass(frozen=True)
class Source:
    """Flags that name a source of text."""

    source: str = flag(MISSING, nonempty=True, expands_home=True)
    """A text file, a folder of them, read recursively, or a quoted glob, each file being a document; a file, a folder
    or a quoted glob of lines of JSON (.jsonl, .ndjson, .json), .json, .csv, .tsv or .parquet, local or remote, each
    record being a document; all but .parquet also as .gz, .bz2, .xz or .zst; a dataset of the Hugging Face hub,
    ORGANISATION/NAME; or stdlib: the .py files of Python's standard library."""
    config: str | None = None
    """Configuration of a dataset of the hub, such as sample-10BT."""
    split: str = "train"
    """Split of a dataset of the hub, all of which is read."""
    text_column: str = "text"
    """Column of a record that holds the text."""
    skip_damaged: bool = False
    """Leave out, report and count files and records that cannot be read."""


def meant(word):
    """What a word that belongs to no flag should have been: the text."""
    return f"; give --source {word}" if os.path.exists(word) else ""


def run(main, what_is_left):
    """Run the main of a data program, which a UserError, Ctrl-C or SIGTERM ends with a sentence."""
    interrupts.watch(lambda number: interrupts.end(128 + number, f"interrupted; {what_is_left}"))
    one_sentence(main)


def no_text(args, has):
    """The UserError for a source without text."""
    return UserError(
        f"there is no text in it ({has}; hidden files, symlinked folders and empty columns do "
        f"not count); give another",
        flag="source",
        value=args.source,
    )
