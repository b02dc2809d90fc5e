"""What a program in this folder calls before its other imports, which take seconds and may be interrupted."""

import os
import sys


def prepare():
    """Let imports find the repository, since Python looks in the program's own folder alone, and have signals end the
    program in a sentence from now on."""
    sys.path[0] = os.path.realpath(__file__ + "/../..")
    from runtime import interrupts

    interrupts.install("interrupted; rerun the same command to resume")
