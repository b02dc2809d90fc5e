"""A process that has imported what is slow to import, and from which programs are forked: a second less for each.

python tests/soak/forks.py answers the lines of its stdin on its stdout, each a JSON object. A forked program has a
session, arguments, folder, environment, memory and files of its own, and begins at its first line. So it behaves as one
that was started, but for what jax and other libraries read of the environment as they are imported: that is of this
process. Programs that it spawns are ordinary processes.
"""

import itertools
import json
import os
import resource
import runpy
import select
import subprocess
import sys
import threading
from pathlib import Path

LIBRARIES = "jax jax.numpy jax.experimental.multihost_utils optax orbax.checkpoint tiktoken fsspec tqdm safetensors"
LIBRARIES += " tokenizers multiprocessing.pool symtable shlex tomllib"
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1"
}  # of numpy, as it is imported: a fork has no other threads


class Program:
    """A forked program, with the methods of `subprocess.Popen` that the soak needs."""

    def __init__(self):
        self.pid = None
        self.returncode = None
        self.begun = threading.Event()
        self.ended = threading.Event()

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode


class Server:
    """The process that forks, seen from the soak."""

    def __init__(self):
        self.programs = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        words = [sys.executable, Path(__file__).resolve()]
        self.process = subprocess.Popen(words, env={**os.environ, **ONE_THREAD}, **pipes)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            number, what, value = json.loads(line)
            program = self.programs[number]
            if what == "pid":
                program.pid = value
                program.begun.set()
            else:
                program.returncode = value
                program.ended.set()
                del self.programs[number]

    def start(self, words, folder, env, out, err, memory):
        """`Program` of a command line, the first word of which is the path of a Python file."""
        program = Program()
        number = next(self.numbers)
        self.programs[number] = program
        asked = [number, words, str(folder), env, str(out), str(err), memory]
        with self.lock:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        program.begun.wait()
        return program


def become(words, folder, env, out, err, memory):
    """Make this process what a shell would have started with these words, but for what it has imported."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as jax does when it is imported
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    files = [
        (os.devnull, os.O_RDONLY),
        *((path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in (out, err)),
    ]
    for number, (path, how) in enumerate(files):
        descriptor = os.open(path, how | os.O_CLOEXEC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = folder
    sys.modules["tempfile"].tempdir = None
    sys.argv = list(words)
    sys.path[0] = os.path.dirname(words[0])


def serve():
    """Fork what is asked for, until stdin ends. Returns, in a forked process, the path of the program to run."""
    running = {}  # {pid: number}
    asked, answers = os.dup(0), os.dup(1)  # a program has others
    buffer = b""

    def answer(*words):
        os.write(answers, f"{json.dumps(words)}\n".encode())

    while True:
        ready, _, _ = select.select([asked], [], [], 0.01)
        if ready:
            received = os.read(asked, 1 << 20)
            if not received:
                os._exit(0)
            buffer += received
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                number, words, *how = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    os.close(asked)
                    os.close(answers)
                    become(words, *how)
                    return words[0]
                running[pid] = number
                answer(number, "pid", pid)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            answer(running.pop(pid), "status", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    import gc
    from importlib import import_module

    for name in LIBRARIES.split():
        import_module(name)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, (
        "a fork has one thread"
    )
    gc.freeze()  # or collecting would copy all of it
    runpy.run_path(serve(), run_name="__main__")
