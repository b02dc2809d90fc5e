"""The repository's programs, each in a session of its own, and what is wrong with how one ended."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from typing import NamedTuple

from helpers import ROOT, in_session, wait_for

from tests.soak import forks

MOST_MEMORY = 8 << 30  # bytes of address space of a program; jax alone maps several
FORKED = True  # whether programs are forked; the tests' command line says
SECONDS = 300  # that a program may take
GRACE = 15  # seconds after a program within which what it started must have ended too
BAD_ENDS = ("Traceback (most recent", "stack trace", "Fatal Python", "terminate called")
TEMPORARY = ("*/tmp/*", "**/*.part", "**/*.tmp", "**/*orbax-checkpoint-tmp*")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # jax has set it here


class Ended(NamedTuple):
    """How a program ended."""

    status: int | None  # exit status, -N after signal N, None where it had to be ended
    out: str
    err: str
    orphans: int  # processes of its session that outlived it


class Case(NamedTuple):
    """What was tried, how it ended, and what is wrong with that."""

    tried: str
    how: str
    wrong: str | None
    ended: Ended


@functools.cache
def server():
    return forks.Server()


def start(words, folder, forked=None, **environment):
    """A program that runs in `folder`, with the files stdout and stderr and the folder tmp. words: of its command
    line, the first a path in the repository. forked: whether it need not import the libraries; None: as FORKED."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in (ROOT / words[0], *words[1:])]
    env = {**os.environ, "HOME": str(folder), "TMPDIR": str(temporary), **environment}
    if FORKED if forked is None else forked:
        return server().start(words, folder, env, folder / "stdout", folder / "stderr", MOST_MEMORY)
    words = ["prlimit", f"--as={MOST_MEMORY}", sys.executable, *words]
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        pipes = dict(stdout=out, stderr=err, start_new_session=True)
        return subprocess.Popen(words, cwd=folder, env=env, **pipes)


def wait(process, folder):
    """`Ended`, once a program and what it started have ended; what takes too long is killed."""
    status = None
    with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
        status = process.wait(SECONDS)
        wait_for(lambda: not in_session(process.pid), GRACE)
    remaining = in_session(process.pid)
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    said = [(folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return Ended(status, *said, len(remaining))


def run(words, folder):
    """`Ended` of a program that runs to its end."""
    return wait(start(words, folder), folder)


def complaint(ended, statuses=(0, 2)):
    """What is wrong with how a program ended, or None: a sentence of its own or success is right, nothing else."""
    if ended.status is None:
        return "does not end"
    if ended.orphans:
        return f"{ended.orphans} processes outlive it"
    if any(words in ended.out + ended.err for words in BAD_ENDS):
        return "traceback"
    if ended.status not in statuses:
        return f"status {ended.status}"
    errors = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    if ended.status in (2, 75) and (len(errors) != 1 or not errors[0].startswith("error: ")):
        return f"{len(errors)} lines instead of a sentence"
    return None


def leftovers(folder):
    """In words, which temporary file a program left in the folder of a case; None where it left none."""
    left = [path for pattern in TEMPORARY for path in folder.glob(pattern)]
    return f"left {left[0]}" if left else None
