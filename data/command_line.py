"""What the data programs share: flags, the handling of signals and errors, and messages."""

import os
from dataclasses import MISSING, dataclass

from config.parser import flag
from runtime import interrupts
from runtime.messages import UserError, one_sentence

# Default share of the text held out by tokenize_shards.py; train_tokenizer.py does not learn from that part.
VAL_FRACTION = 0.1


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


def suggest_source(word):
    """Advice for a word on the command line that belongs to no flag: a file of that name was meant as --source."""
    return f"; give --source {word}" if os.path.exists(word) else ""


def run(main, what_is_left):
    """Run the `main` of a data program. A UserError or a signal ends it with one sentence, which for a signal ends with
    `what_is_left`."""
    interrupts.watch(lambda number: interrupts.end(128 + number, f"interrupted; {what_is_left}"))
    one_sentence(main)


def no_text_error(args, has):
    """The UserError for a source without text. has: what it has instead, in words."""
    return UserError(
        f"there is no text in it ({has}; hidden files, symlinked folders and empty columns do "
        f"not count); give another",
        flag="source",
        value=args.source,
    )
