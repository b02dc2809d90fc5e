"""How every program here begins: with the repository on Python's path, signals heard, and its packages there."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from training import interrupts


def begin():
    """Let SIGINT and SIGTERM end the program with a sentence from now on, also while it imports. End it now where
    packages are missing."""
    interrupts.at_once("interrupted; nothing was written")
    from training import packages  # here: a signal while it is imported is heard

    packages.check()
