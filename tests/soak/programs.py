"""The repository's programs, each in a session of its own, and what is wrong with how one ended."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT  # which also sets the environment of all that follows

MOST_MEMORY = 8 << 30  # bytes of address space of a program; jax alone maps several
SECONDS = 300  # that a program may take
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests"
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)  # jax has set it here


class Ended(NamedTuple):
    """How a program ended."""

    status: int | None  # exit status, -N after signal N, None where it had to be ended
    out: str
    err: str
    orphans: int = 0  # processes of its session that outlived it


class Case(NamedTuple):
    """What was tried, how it ended, and what is wrong with that."""

    tried: str
    how: str
    wrong: str | None
    ended: Ended | None = None


class Program:
    """A program that runs: words of its command line, the first a path in the repository.

    folder: where it runs, with the files stdout and stderr and the folder tmp.
    """

    def __init__(self, words, folder):
        self.folder = Path(folder)
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, ROOT / words[0], *map(str, words[1:])]
        env = {**os.environ, "HOME": str(folder), "TMPDIR": str(temporary)}
        with open(self.folder / "stdout", "w") as out, open(self.folder / "stderr", "w") as err:
            self.process = subprocess.Popen(
                words, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
            )
        with contextlib.suppress(ProcessLookupError):
            limits = (MOST_MEMORY, MOST_MEMORY)
            resource.prlimit(self.process.pid, resource.RLIMIT_AS, limits)

    def runs(self):
        return self.process.poll() is None

    def send(self, number, to_all=False):
        """Send a signal to the program, or to all of its session as a terminal does, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_all else os.kill)(self.process.pid, number)

    def listens(self):
        """Whether the program takes SIGTERM itself by now; before, Python would end it in its own way."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            return caught >> (signal.SIGTERM - 1) & 1
        return False

    def wait(self, grace=0):
        """`Ended`; a program that takes too long is killed. grace: seconds for what it started to end too."""
        late = False
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            late = True
        deadline = time.monotonic() + grace
        while not late and self.session() and time.monotonic() < deadline:
            time.sleep(0.05)
        remaining = self.session()
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = self.process.wait()
        said = [(self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        return Ended(None if late else status, *said, 0 if late else len(remaining))

    def session(self):
        """Numbers of the processes of its session that have not ended."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if session == str(self.process.pid) and state not in "ZX":
                    found.append(int(stat.parent.name))
        return found


def run(words, folder):
    """`Ended` of a program that runs to its end."""
    return Program(words, folder).wait()


def complaint(ended, statuses=(0, 2)):
    """What is wrong with how a program ended, or None: a sentence of its own or success is right, nothing else."""
    if ended.status is None:
        return "does not end"
    for word in ("Traceback (most recent", "stack trace", "Fatal Python", "terminate called"):
        if word in ended.out + ended.err:
            return "traceback"
    if ended.status < 0:
        return f"ended by signal {-ended.status}"
    if ended.status not in statuses:
        return f"status {ended.status}"
    if ended.status == 2:
        errors = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
        if len(errors) != 1 or not errors[0].startswith("error: "):
            return f"{len(errors)} lines instead of a sentence"
    return None


def fresh_folder(path):
    """An empty folder at `path`."""
    shutil.rmtree(path, ignore_errors=True)
    Path(path).mkdir(parents=True)


def leftovers(folder):
    """In words, which temporary file a program left in the folder of a case; None where it left none."""
    left = [*folder.glob("*/tmp/*")]
    for path in folder.rglob("*"):
        if path.name.endswith((".part", ".tmp")) or "orbax-checkpoint-tmp" in path.name:
            left.append(path)
    return f"left {left[0]}" if left else None
