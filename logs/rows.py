"""The rows of metrics.jsonl, one for each step: how they are read, and how they are written while a run trains.

A local metrics.jsonl grows by a row at each step. Nothing can be appended to an object in a bucket. There the rows are
in parts beside it, metrics/NUMBER-after-STEP.jsonl: the parts are read by their numbers, and each replaces all rows
after its STEP that were read before. So a part may hold further rows, the same ones again, or others after a rollback:

    000001-after-0.jsonl    steps 1 to 40
    000002-after-40.jsonl   steps 41 to 60
    000003-after-50.jsonl   steps 51 to 55, after the run has returned to step 50: it has steps 1 to 55 now
"""

import json
import math
import os
import re
import time

from runtime.files import filesystem, is_remote, names_in, persist, read_file, to_json, write_file
from runtime.messages import first_line, warn

NAME = "metrics.jsonl"
PARTS = "metrics"  # the folder of parts
PART = re.compile(r"(\d{6,9})-after-(\d{1,12})\.jsonl")
WHOLE = 1 << 20  # bytes from which a part stays as it is
APART = 10  # seconds at least between two parts, unless a checkpoint follows
SEEN = 60  # seconds until rows are in a part also between two evaluations: somebody may look on
PATIENCE = 60  # seconds at most until a local file that could not be written is tried again
MOST = 16 << 20  # bytes of rows that wait for room on a local disk


def row_of(line):
    """The row in a line of metrics.jsonl, {name: number}, or None where it is damaged."""
    try:
        row = {key: math.nan if v is None else v for key, v in json.loads(line).items()}
    except (ValueError, AttributeError, RecursionError):
        return None
    for value in row.values():
        if not isinstance(value, int | float) or abs(value) > 1e300:
            return None
    step = row.get("step", 0)
    # not by range, which takes minutes to find that it has no 5.5
    if "loss/train_loss" not in row or step % 1 or not 0 < step < 2**31:
        return None
    return row


def parts_in(folder):
    """[(number, step after which its rows are, name)] of the parts of a run directory, in order."""
    found = map(PART.fullmatch, names_in(os.path.join(folder, PARTS)))
    return sorted((int(part[1]), int(part[2]), part[0]) for part in found if part)


def contents(folder):
    """[(step after which its rows are, bytes)] of metrics.jsonl and of the parts of a run directory, in order. Raises
    UserError where one cannot be read."""
    first = read_file(os.path.join(folder, NAME)) or b""
    for _ in range(3):  # a run that is in progress removes parts that it has put together
        parts = parts_in(folder)
        read = read_files([os.path.join(folder, PARTS, name) for *_, name in parts])
        if None not in read:
            break
    return [(0, first), *((after, content or b"") for (_, after, _), content in zip(parts, read))]


def read_files(paths):
    """Bytes of files of one folder, None for one that is not there; many at once, since storage is slow to answer."""
    if not paths or not is_remote(paths[0]):
        return [read_file(path) for path in paths]
    fs, _ = filesystem(paths[0])
    there = [filesystem(path)[1] for path in paths]

    def read():
        found = fs.cat_ranges(there, [None] * len(there), [None] * len(there), on_error="return")
        for one in found:
            if isinstance(one, Exception) and not isinstance(one, FileNotFoundError):
                raise one
        return [None if isinstance(one, Exception) else one for one in found]

    return persist(read, paths[0])


def rows_in(lines):
    """The rows in lines, without those that are damaged."""
    return [row for line in lines if (row := row_of(line))]


def join_rows(parts):
    """The rows, by step, of [(step after which its rows are, rows)] of parts."""
    rows = {}
    for after, found in parts:
        rows = {step: row for step, row in rows.items() if step <= after}
        rows |= {row["step"]: row for row in found}
    return [rows[step] for step in sorted(rows)]


def join(parts):
    """(rows, by step; whether anything else is in them but a last line that a kill tore) of `contents`."""
    read = []
    damaged = False
    for after, content in parts:
        found = [row_of(line) for line in content.splitlines()]
        damaged |= not all(found[:-1])
        read.append((after, filter(None, found)))
    return join_rows(read), damaged


def read_rows(folder):
    """The rows of a run directory, by step. Raises UserError where they cannot be read."""
    return join(contents(folder))[0]


class LocalRows:
    """A local metrics.jsonl, which grows at each step. Where that fails, as on a full disk, the rows wait, and the file
    is tried again ever more seldom; what a failed try left of a row is cut off."""

    def __init__(self, folder):
        self.folder = folder
        self.path = os.path.join(folder, NAME)

    def replace(self, rows):
        """Have the file hold these rows alone. Raises UserError."""
        content = b"".join(map(line_of, rows))
        write_file(self.path, content)
        for *_, name in parts_in(self.folder):  # of a run that was copied from a bucket
            os.remove(os.path.join(self.folder, PARTS, name))
        self.size = len(content)  # bytes of whole rows in the file
        self.waiting = b""
        self.pause = 0
        self.again = 0.0  # when to try next, by time.monotonic()

    def rewind(self, step):
        """Forget the rows after `step`. Raises UserError."""
        found = [*read_rows(self.folder), *rows_in(self.waiting.splitlines())]
        self.replace([row for row in found if row["step"] <= step])

    def add(self, row):
        self.waiting += line_of(row)
        if len(self.waiting) > MOST:  # the oldest are given up
            self.waiting = self.waiting[-MOST:].partition(b"\n")[2]
        if time.monotonic() >= self.again:
            self.flush()

    def flush(self, now=False):
        """Write what waits. now: nothing is held back here."""
        if not self.waiting:
            return
        try:
            with open(self.path, "ab") as f:
                there = os.fstat(f.fileno()).st_size
                self.size = min(self.size, there)  # somebody may have removed it
                f.truncate(self.size)
                f.write(self.waiting)
        except OSError as e:
            self.pause = min(PATIENCE, 2 * self.pause or 1)
            self.again = time.monotonic() + self.pause
            if self.pause < PATIENCE:
                warn(f"the run's log could not be written: {first_line(e)}")
            return
        self.size += len(self.waiting)
        self.waiting = b""
        self.pause = 0


class BucketRows:
    """The rows in a bucket. `flush` makes a part of the rows since the last one. It takes in the parts before it that
    are no larger, up to WHOLE bytes: of parts of 1, 1, 1, 1 and 1 become 1, 2, 2 + 1, 4, 4 + 1. So a row is uploaded
    log2(WHOLE / bytes of a flush) times at most, and a run has little more parts than MiB of rows."""

    def __init__(self, folder, outbox):
        """outbox: an `Outbox`."""
        self.run = folder
        self.folder = os.path.join(folder, PARTS)
        self.outbox = outbox
        self.number = max((number for number, *_ in parts_in(folder)), default=0)

    def replace(self, rows):
        """Have these rows in place of all that is there. Raises UserError."""
        before = [os.path.join(PARTS, name) for *_, name in parts_in(self.run)]
        self.rewind(0)
        for row in rows:
            self.add(row)
        self.flush(now=True)
        for name in (NAME, *before):
            self.outbox.put(os.path.join(self.run, name), None)

    def rewind(self, step):
        """Forget the rows after `step`."""
        self.lines = []  # of the next part
        self.newest = self.after = step  # of the newest row; of the newest that is in a part
        self.parts = []  # [(name, step after which its rows are, bytes)] that a later part may take in
        self._put(step, b"")
        self.flushed = -math.inf  # when, by time.monotonic()

    def add(self, row):
        self.lines.append(line_of(row))
        self.newest = row["step"]
        if time.monotonic() > self.flushed + SEEN:
            self.flush()

    def flush(self, now=False):
        """Make a part of the rows since the last one, if that was a while ago or has to be `now`."""
        if not self.lines or (time.monotonic() < self.flushed + APART and not now):
            return
        content, after = b"".join(self.lines), self.after
        self.lines = []
        self.after = self.newest
        self.flushed = time.monotonic()
        taken = []
        while self.parts and len(self.parts[-1][2]) <= len(content):
            name, after, before = self.parts.pop()
            content = before + content
            taken.append(name)
        self._put(after, content)
        if len(content) >= WHOLE:
            self.parts = []  # it stays as it is, and those before it
        for name in taken:
            self.outbox.drop(f"{self.folder}/{name}")

    def _put(self, after, content):
        self.number += 1
        name = f"{self.number:06d}-after-{after}.jsonl"
        self.parts.append((name, after, content))
        self.outbox.put(f"{self.folder}/{name}", content)


def line_of(row):
    return to_json(row).encode() + b"\n"
