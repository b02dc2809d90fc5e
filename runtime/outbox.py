"""Files on their way to a bucket: a thread writes them, so that a run never waits for what it says of itself."""

import threading
import time

from runtime.files import ask, is_remote, write_file
from runtime.messages import first_line, warn

MOST = 64 << 20  # bytes that may wait, in an outage of hours
PAUSE = 10  # seconds before a file is tried again, which each time takes a minute


class Outbox:
    """Writes files, or removes them, in the order in which they were put, each until that is done. Of a file that waits
    only the newest content is written. Local ones are written at once. No failure is an error: it is a warning."""

    def __init__(self):
        self.waiting = {}  # {address: bytes, or None where it is to be removed}
        self.changed = threading.Condition()
        self.busy = None  # the address that is being written
        self.thread = None

    def put(self, path, content):
        """Have bytes or text written to a path or address; None: have it removed."""
        if not is_remote(path):
            attempt(lambda: deliver(path, content), f"{path} could not be written")
            return
        with self.changed:
            self.waiting.pop(path, None)
            self.waiting[path] = content
            while sum(map(len, filter(None, self.waiting.values()))) > MOST:
                oldest = next(path for path, content in self.waiting.items() if content)
                del self.waiting[oldest]
                warn(f"{oldest} is given up: too much waits for the storage to answer")
            if not self.thread:
                self.thread = threading.Thread(target=self._work, name="outbox", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def drop(self, path):
        """Forget what waits to be written to a path; have it removed where it was written."""
        with self.changed:
            waited = self.waiting.pop(path, None) is not None and path != self.busy
        if not waited:
            self.put(path, None)

    def _work(self):
        failed = False
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                path, content = next(iter(self.waiting.items()))
                self.busy = path
            try:
                deliver(path, content)
            except Exception as e:  # whatever the storage makes the libraries raise
                if not failed:
                    warn(f"{path} could not be written ({first_line(e)}); it is tried again")
                failed = True
                time.sleep(PAUSE)
                continue
            failed = False
            with self.changed:
                self.busy = None
                if self.waiting.get(path, self) is content:  # nothing newer was put meanwhile
                    del self.waiting[path]
                self.changed.notify_all()

    def settle(self, seconds):
        """Wait until everything is written, at most so long; what is not is returned: addresses."""
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting, seconds)
            return [*self.waiting]


def deliver(path, content):
    """Write bytes or text to a path or address, or remove it with None."""
    if content is not None:
        write_file(path, content)
        return
    try:
        ask(path, "rm_file")
    except FileNotFoundError:  # a try before this one, whose answer was lost
        pass


def attempt(work, what):
    """Call work(); whether it went well. A failure is printed as a warning, which begins with `what`."""
    try:
        work()
    except Exception as e:  # training continues without its log or a profile
        warn(f"{what}: {first_line(e)}")
        return False
    return True
