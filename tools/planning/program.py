"""How every program here begins: with the repository on Python's path, signals heard, and its packages there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training import interrupts, packages


def begin():
    """Let SIGINT and SIGTERM end the program with a sentence from now on, also while it imports. End it now where
    packages are missing."""
    interrupts.at_once("interrupted")
    packages.check()
