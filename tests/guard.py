"""Ends what tests leave behind, however they end: `python guard.py NAME=VALUE FOLDER`, with a pipe of theirs as stdin.

It waits until the pipe is closed, which the kernel does also for a process that was killed. Then it kills every process
with that variable in its environment and deletes the folder.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def processes_with(*variables):
    """Numbers of the processes that were started with these variables, as in NAME=VALUE."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or it is another user's
            if {*variables} <= set(environ.read_text(errors="replace").split("\0")):
                found.add(int(environ.parent.name))
    return found


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(variable, folder):
    sys.stdin.read()
    # One that is just starting another is found with it, or the other is found the next time.
    while found := processes_with(variable):
        kill(found)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
