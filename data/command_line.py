"""The flags that the data programs share, and how such a program begins and ends."""

import argparse
import os

import utils
from data.sources.kinds import ENDINGS
from training import interrupts
from utils import one_sentence

# tokenize_shards.py's default; train_tokenizer.py learns from none of these documents
VAL_FRACTION = 0.1


class Parser(utils.Parser):
    """The flags that name a source; its help shows the defaults."""

    def __init__(self, description):
        super().__init__(
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.add_argument(
            "--source",
            required=True,
            type=os.path.expanduser,
            help="a text file, a folder of them, read recursively, or a quoted glob, each file (also .gz, "
            f".zst) being a document; a file, a folder or a quoted glob of {ENDINGS}, local or remote, each "
            "record being a document; a dataset of the Hugging Face hub, ORGANISATION/NAME; or stdlib: "
            "the .py files of Python's standard library",
        )
        self.add_argument(
            "--config",
            default=None,
            help="configuration of a dataset of the hub, such as sample-10BT",
        )
        self.add_argument(
            "--split", default="train", help="split of a dataset of the hub, all of which is read"
        )
        self.add_argument(
            "--text_column", default="text", help="column of a record that holds the text"
        )
        self.add_argument(
            "--skip_damaged",
            action="store_true",
            default=False,
            help="leave out, report and count files and records that cannot be read",
        )


# what a signal leaves at this moment, in words
what_is_left = "nothing was written; rerun the same command to start over"


def say_what_is_left(words):
    """Set what a signal from now on says that it leaves."""
    global what_is_left
    what_is_left = words


def run(main):
    """Run the main of a data program.

    A UserError ends it with a sentence and status 2. Ctrl-C and SIGTERM end it at once, with a sentence that says what
    is left, and status 128 + the signal.
    """
    interrupts.watch(lambda number: interrupts.end(128 + number, f"interrupted; {what_is_left}"))
    one_sentence(main)
