"""An emulated bucket, and proxies before it that fail as drawn."""

import atexit
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import ThreadingHTTPServer

import fsspec
from helpers import ROOT, free_port, listens, wait_for
from storage_servers import Faulty

FLEETING = [429, 500, 503, "reset", "half", "late"]  # faults that a library tries again by itself
FAULTS = [*FLEETING, 401, 403, "hang"]


STARTING = threading.Lock()


def emulator():
    """Port of the server of the bucket gs://bucket, the same for all threads, which ends with this process."""
    with STARTING:
        return start_emulator()


@functools.cache
def start_emulator():
    port = free_port()
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = [sys.executable, ROOT / "tests/gcs_emulator.py", port, "bucket"]
    server = subprocess.Popen([*map(str, words)], **quiet)
    atexit.register(server.kill)
    wait_for(lambda: listens("127.0.0.1", port))
    return port


def environment(port, address="127.0.0.1"):
    """Variables by which a program finds the bucket at a port."""
    url = f"http://{address}:{port}"
    return dict(
        STORAGE_EMULATOR_HOST=url,
        TENSORSTORE_GCS_HTTP_URL=url,
        GOOGLE_AUTH_TOKEN_FOR_TESTING="x",
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
    )


def download(address, folder):
    """Copy a folder of the bucket, past all faults."""
    os.environ |= environment(emulator())
    unfailing().get(address, str(folder), recursive=True)


def remove(address):
    """Remove a folder of the bucket: the emulator keeps all in memory."""
    unfailing().rm(address, recursive=True)


def upload(folder, address):
    """Copy a folder to the bucket, past all faults."""
    unfailing().put(str(folder), address, recursive=True)


def unfailing():
    """The bucket's file system, past all faults."""
    url = f"http://127.0.0.1:{emulator()}"
    return fsspec.filesystem("gs", endpoint_url=url, token="anon", skip_instance_cache=True)


class Counted(Faulty):
    """Of a `Proxy`: counts the bytes of what is uploaded of a run's rows, and of all else."""

    def behind(self, body):
        kind = "rows" if b"/metrics/" in body[:999] or "metrics%2F" in self.path else "else"
        self.server.sent[kind] += len(body)
        return super().behind(body)


class Proxy(ThreadingHTTPServer):
    """A proxy to the bucket. Each request fails with probability `share`, with a fault of `kinds`, and all do with the
    same one in an outage: (seconds after the first request, its length, fault)."""

    daemon_threads = True

    def __init__(self, rng, share, kinds, outages, address="127.0.0.1", handler=Counted):
        super().__init__((address, 0), handler)
        self.behind = emulator()
        self.rng, self.share, self.kinds, self.outages = rng, share, kinds, outages
        self.count = itertools.count(1)
        self.requests = self.failed = 0
        self.sent = Counter()  # bytes
        self.began = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fault(self):
        now = time.monotonic()
        self.began = self.began or now
        self.requests = next(self.count)
        for begin, length, kind in self.outages:
            if begin <= now - self.began < begin + length:
                return kind
        fails = self.share and self.rng.random() < self.share
        return self.rng.choice(self.kinds) if fails else None
