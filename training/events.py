"""The rows of metrics.jsonl once more, as an event file of TensorBoard beside it (--tensorboard)."""

import importlib.util
import io
import struct
import time

import utils
from utils import UserError

# TensorBoard reads all files whose names begin so, in their order; the end says that they are of this program.
BEGINNING, END = "events.out.tfevents.", ".metrics"


def check(run):
    """Raises UserError where --tensorboard was given and its package is missing."""
    if run.tensorboard and not importlib.util.find_spec("tensorboard"):
        missing = "the package tensorboard is not installed"
        raise UserError(f"--tensorboard: {missing}; bash setup_tpu.sh tensorboard installs it.")


class EventFile:
    """An event file that holds what metrics.jsonl holds: for each key of a row a scalar, at the row's step.

    A run that resumes or rolls back writes it anew, so no step is in there twice. Its first event makes a TensorBoard
    that is looking on forget what it has read. An object in a bucket cannot be appended to: `upload` writes all of it.
    """

    def __init__(self, folder, rows):
        """rows: those of metrics.jsonl so far."""
        self.fs, self.folder = utils.filesystem(folder)
        self.address = folder
        self.begin(rows)

    def begin(self, rows):
        """Write a file with these rows in the place of the one before, whose times they keep."""
        pattern = f"{self.folder}/{BEGINNING}*{END}"
        before = sorted(utils.persist(lambda: self.fs.glob(pattern), self.address))
        times = {}
        for path in before:
            times |= times_in(utils.persist(lambda: self.fs.cat_file(path), self.address))
        content = header() + b"".join(record(row, times.get(row["step"])) for row in rows)
        self.path = f"{self.address}/{BEGINNING}{time.time_ns()}{END}"
        utils.write_file(self.path, content)
        for path in before[:-1]:
            utils.persist(lambda: self.fs.rm_file(path), self.address)
        if before:  # the last one a TensorBoard may be reading: from its end it goes on to the next
            utils.persist(lambda: self.fs.pipe_file(before[-1], b""), self.address)
        self.content = bytearray(content if utils.is_remote(self.address) else b"")

    def add(self, row):
        """Append a row. In a bucket it can be read from the next `upload` on."""
        if utils.is_remote(self.address):
            self.content += record(row)
            return
        with open(self.path, "ab") as f:
            f.write(record(row))

    def upload(self):
        """Write all rows so far, to a bucket."""
        if utils.is_remote(self.address):
            utils.write_file(self.path, bytes(self.content))


# --- Records ------------------------------------------------------------------------------------------------------


def framed(event):
    """The bytes of an Event in a file: length, checksum, content, checksum."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()


def header():
    """The records that begin a file: the version of its format, and that a run begins at step 0."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    now = time.time()
    start = SessionLog(status=SessionLog.START)
    version = Event(wall_time=now, file_version="brain.Event:2")
    return framed(version) + framed(Event(wall_time=now, step=0, session_log=start))


def record(row, at=None):
    """The record of a row of metrics.jsonl, measured `at` so many seconds after 1970; None: now."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=key, simple_value=v) for key, v in row.items() if key != "step"]
    summary = Summary(value=values)
    return framed(Event(wall_time=at or time.time(), step=row["step"], summary=summary))


def times_in(content):
    """{step: seconds since 1970} of the rows in the bytes of an event file, up to where a kill tore it."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    times, at = {}, 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        try:
            event = Event.FromString(content[at + 12 : at + 12 + length])
        except DecodeError:
            break
        if event.HasField("summary"):
            times[event.step] = event.wall_time
        at += 16 + length
    return times
