"""The rows of metrics.jsonl, one for each step: reading them, and writing them while a run trains.

A local metrics.jsonl grows by a row at each step. An object in a bucket cannot be appended to, so there the rows are in
parts, metrics/NUMBER-after-STEP.jsonl. The parts are read in the order of their numbers. Each one replaces all rows
after its STEP that were read before. So a part may add rows, repeat rows, or replace rows after a rollback:

    000001-after-0.jsonl    steps 1 to 40
    000002-after-40.jsonl   steps 41 to 60
    000003-after-50.jsonl   steps 51 to 55, after a rollback to step 50: the run now has steps 1 to 55
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
WHOLE = 1 << 20  # bytes from which a part is complete and no later part takes it in
APART = 10  # least seconds between two parts, unless a checkpoint follows
SEEN = 60  # most seconds until a row is in a part, so that people can watch a run between two evaluations
PATIENCE = 60  # most seconds until a failed write of a local file is repeated
MOST = 16 << 20  # bytes of rows that may wait for room on a local disk


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
    # Not `in range(...)`, which takes minutes to find out that 5.5 is not in it.
    if "loss/train_loss" not in row or step % 1 or not 0 < step < 2**31:
        return None
    return row


def parts_in(folder):
    """[(number, STEP, file name)] of the parts in a run directory, in order."""
    found = map(PART.fullmatch, names_in(os.path.join(folder, PARTS)))
    return sorted((int(part[1]), int(part[2]), part[0]) for part in found if part)


def contents(folder):
    """[(STEP, bytes)] of metrics.jsonl, with STEP 0, and of the parts in a run directory, in order. Raises UserError
    where one cannot be read."""
    first = read_file(os.path.join(folder, NAME)) or b""
    # A part may be gone: a run in progress removes parts when it has joined them.
    for _ in range(3):
        parts = parts_in(folder)
        read = read_files([os.path.join(folder, PARTS, name) for *_, name in parts])
        if None not in read:
            break
    return [(0, first), *((after, content or b"") for (_, after, _), content in zip(parts, read))]


def read_files(paths):
    """The bytes of files in one folder, None for a missing one. Remote files are read together, since each answer of
    the storage takes a while."""
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
    """The rows in lines, without the damaged ones."""
    return [row for line in lines if (row := row_of(line))]


def join_rows(parts):
    """The rows, sorted by step, that [(STEP, rows)] of the parts make together."""
    rows = {}
    for after, found in parts:
        rows = {step: row for step, row in rows.items() if step <= after}
        rows |= {row["step"]: row for row in found}
    return [rows[step] for step in sorted(rows)]


def join(parts):
    """(rows sorted by step, whether the content is damaged) of what `contents` returns. A torn last line, as a kill
    leaves it, does not count as damage."""
    read = []
    damaged = False
    for after, content in parts:
        found = [row_of(line) for line in content.splitlines()]
        damaged |= not all(found[:-1])
        read.append((after, filter(None, found)))
    return join_rows(read), damaged


def read_rows(folder):
    """The rows of a run directory, sorted by step. Raises UserError where they cannot be read."""
    return join(contents(folder))[0]


class LocalRows:
    """Writes a local metrics.jsonl, which grows at each step. Where a write fails, as on a full disk, the rows wait and
    the write is repeated after ever longer pauses. What a failed write left of a row is cut off."""

    def __init__(self, folder):
        self.folder = folder
        self.path = os.path.join(folder, NAME)

    def replace(self, rows):
        """Have the file hold exactly these rows. Raises UserError."""
        content = b"".join(map(line_of, rows))
        write_file(self.path, content)
        for *_, name in parts_in(self.folder):  # parts are here if the run was copied from a bucket
            os.remove(os.path.join(self.folder, PARTS, name))
        self.size = len(content)  # bytes of the complete rows in the file
        self.waiting = b""  # rows that are not written yet
        self.pause = 0  # seconds between the last failed write and the next
        self.again = 0.0  # time of the next write after a failed one, by time.monotonic()

    def rewind(self, step):
        """Forget the rows after `step`. Raises UserError."""
        found = [*read_rows(self.folder), *rows_in(self.waiting.splitlines())]
        self.replace([row for row in found if row["step"] <= step])

    def add(self, row):
        """Append a row, at once unless the last write failed."""
        self.waiting += line_of(row)
        if len(self.waiting) > MOST:  # the oldest rows are dropped
            self.waiting = self.waiting[-MOST:].partition(b"\n")[2]
        if time.monotonic() >= self.again:
            self.flush()

    def flush(self, now=False):
        """Write the rows that wait. now: has no effect here; see `BucketRows.flush`."""
        if not self.waiting:
            return
        try:
            with open(self.path, "ab") as f:
                there = os.fstat(f.fileno()).st_size
                self.size = min(self.size, there)  # the file is new if somebody removed it
                f.truncate(self.size)  # cuts off what a failed write left
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
    """Writes the rows to a bucket, in parts.

    `flush` makes a part of the rows since the last part. The new part also takes in the parts before it that are no
    larger than itself, up to WHOLE bytes. Five flushes of size 1 leave parts of these sizes: 1, then 2, then 2 and 1,
    then 4, then 4 and 1. So a row is uploaded log2(WHOLE / bytes of a flush) times at most, and a run has few more
    parts than MiB of rows.
    """

    def __init__(self, folder, outbox):
        """outbox: an `Outbox`."""
        self.run = folder
        self.folder = os.path.join(folder, PARTS)
        self.outbox = outbox
        self.number = max((number for number, *_ in parts_in(folder)), default=0)

    def replace(self, rows):
        """Have the bucket hold exactly these rows. Raises UserError."""
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
        self.newest = step  # step of the newest row
        self.after = step  # step of the newest row that is in a part
        self.parts = []  # [(name, STEP, bytes)] of the parts that a later one may take in
        self._put(step, b"")  # an empty part replaces the rows after `step`
        self.flushed = -math.inf  # time of the last part, by time.monotonic()

    def add(self, row):
        """Append a row. It is uploaded within SEEN seconds while rows are added."""
        self.lines.append(line_of(row))
        self.newest = row["step"]
        if time.monotonic() > self.flushed + SEEN:
            self.flush()

    def flush(self, now=False):
        """Make a part of the rows since the last one, if that is APART seconds ago or it has to be `now`."""
        if not self.lines or (time.monotonic() < self.flushed + APART and not now):
            return
        content = b"".join(self.lines)
        after = self.after
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
            self.parts = []  # this part and those before it are complete
        for name in taken:
            self.outbox.drop(f"{self.folder}/{name}")

    def _put(self, after, content):
        """Have a part written."""
        self.number += 1
        name = f"{self.number:06d}-after-{after}.jsonl"
        self.parts.append((name, after, content))
        self.outbox.put(f"{self.folder}/{name}", content)


def line_of(row):
    """A row as a line of metrics.jsonl, in bytes."""
    return to_json(row).encode() + b"\n"
