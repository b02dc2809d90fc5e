"""How a program runs and ends."""

import contextlib
import multiprocessing
import sys

from runtime import interrupts
from runtime.messages import one_sentence


def run(program):
    """Run `program()` and end the process: with status 0, 2 and a sentence after a UserError, 130 after Ctrl-C, or 141
    without a word where the reader of its output has left, as head does."""
    with contextlib.suppress(KeyboardInterrupt):
        interrupts.as_usual()
        one_sentence(program)
        sys.exit()
    for child in multiprocessing.active_children():  # which may miss the signal while it imports
        child.kill()
    print("interrupted", file=sys.stderr)
    sys.exit(130)
