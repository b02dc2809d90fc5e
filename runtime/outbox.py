"""Writes files to a bucket in a thread, so that a run never waits for its own log."""

import threading
import time

from runtime.files import ask, is_remote, write_file
from runtime.messages import first_line, warn

MOST = 64 << 20  # bytes that may wait to be written; an outage of hours must not fill the memory
# Seconds before a failed write is repeated. Each write takes about a minute to fail, since `files.persist` repeats it
# too.
PAUSE = 10


class Outbox:
    """Writes and removes files in the order of the calls of `put`, and repeats each until it succeeds.

    Of a file that waits, only the newest content is written. Local files are written at once. A failure raises no
    error: it is printed as a warning.
    """

    def __init__(self):
        self.waiting = {}  # {address: bytes, or None for a file to be removed}
        self.changed = threading.Condition()  # of `waiting` and `busy`
        self.busy = None  # the address that is being written
        self.thread = None

    def put(self, path, content):
        """Have bytes or text written to a path or address; with None, have the file removed."""
        if not is_remote(path):
            attempt(lambda: deliver(path, content), f"{path} could not be written")
            return
        with self.changed:
            self.waiting.pop(path, None)
            self.waiting[path] = content
            while sum(map(len, filter(None, self.waiting.values()))) > MOST:
                oldest = next(path for path, content in self.waiting.items() if content)
                del self.waiting[oldest]
                warn(f"{oldest} is given up: too much is waiting for the storage to answer")
            if not self.thread:
                self.thread = threading.Thread(target=self._work, name="outbox", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def drop(self, path):
        """Undo the `put` of a path: forget its content if it still waits, else have the file removed."""
        with self.changed:
            waited = self.waiting.pop(path, None) is not None and path != self.busy
        if not waited:
            self.put(path, None)

    def _work(self):
        """The thread: write the files that wait, the oldest first."""
        failed = False  # whether the newest write failed; a warning is printed for the first failure only
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                path, content = next(iter(self.waiting.items()))
                self.busy = path
            try:
                deliver(path, content)
            except Exception as e:  # any class: every kind of storage has errors of its own
                if not failed:
                    warn(f"{path} could not be written ({first_line(e)}); trying again")
                failed = True
                time.sleep(PAUSE)
                continue
            failed = False
            with self.changed:
                self.busy = None
                # Only if no newer content was put meanwhile.
                if self.waiting.get(path, self) is content:
                    del self.waiting[path]
                self.changed.notify_all()

    def settle(self, seconds):
        """Wait until everything is written, for at most that many seconds. Returns the addresses that still wait."""
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting, seconds)
            return [*self.waiting]


def deliver(path, content):
    """Write bytes or text to a path or address, or with None remove the file."""
    if content is not None:
        write_file(path, content)
        return
    try:
        ask(path, "rm_file")
    except FileNotFoundError:  # an earlier try removed it, and its answer was lost
        pass


def attempt(work, what):
    """Call work() and return whether it succeeded. A failure is printed as a warning that starts with `what`."""
    try:
        work()
    except Exception as e:  # any class: training continues without its log or a profile
        warn(f"{what}: {first_line(e)}", own=True)
        return False
    return True
