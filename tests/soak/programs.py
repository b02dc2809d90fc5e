"""The repository's programs, each in a process forked from one that has imported what they need."""

import atexit
import contextlib
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT  # which also sets the environment of all that follows

# What programs import, so that a fork finds it imported. None of it looks for devices.
IMPORTED = """conftest test_data_programs test_resume pyarrow.parquet matplotlib.figure tools.common planning.plan
tools.compare tools.hf tools.trace inference.scores data.tokenize_shards data.train_tokenizer
training.run_checkpoints training.runlog inference.sampling""".split()
MOST_MEMORY = 8 << 30  # bytes of address space of a program; jax alone maps several
SECONDS = 120  # that a program may take, unless its case says otherwise
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

context = multiprocessing.get_context("forkserver")
asking = threading.Lock()  # two threads that ask at once whether a process ended would read it once


def prepare():
    """Start the process that all others are forked from."""
    context.set_forkserver_preload(IMPORTED)
    # read once, when jax is imported; main.py sets it for several processes, before that
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    forkserver.ensure_running()
    del os.environ["TF_CPP_MIN_LOG_LEVEL"]


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
    """A program that runs, in a session of its own: words of its command line, the first a path in the repository.

    folder: where it runs, with the files stdout and stderr and the folder tmp.
    """

    def __init__(self, words, folder, **environment):
        self.folder = Path(folder)
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        own = {"HOME": str(folder), "TMPDIR": str(self.folder / "tmp"), **environment}
        words = [str(word) for word in words]
        self.began = time.monotonic()
        self.process = context.Process(target=become, args=(words, str(folder), own))
        with asking:
            self.process.start()

    def runs(self):
        with asking:
            return self.process.is_alive()

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

    def wait(self, seconds=SECONDS, grace=0):
        """`Ended`; the program is killed where it takes longer. grace: seconds for what it started to end too."""
        left = max(0, self.began + seconds - time.monotonic())
        connection.wait([self.process.sentinel], left)
        late = self.runs()
        deadline = time.monotonic() + grace
        while not late and self.session() and time.monotonic() < deadline:
            time.sleep(0.05)
        remaining = self.session()
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        connection.wait([self.process.sentinel])
        with asking:
            status = self.process.exitcode
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


def become(words, folder, environment):
    """Be the program, as a new Python would be, in this fork."""
    os.setsid()
    tracker = resource_tracker._resource_tracker  # of the process that this one is forked from
    tracker._fd = tracker._pid = None
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing has its own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = str(ROOT / words[0])
    sys.argv = [path, *words[1:]]
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:  # as Python ends: threads first, then what is registered
        threading._shutdown()
        atexit._run_exitfuncs()


def run(words, folder, seconds=SECONDS):
    """`Ended` of a program that runs to its end."""
    return Program(words, folder).wait(seconds)


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
