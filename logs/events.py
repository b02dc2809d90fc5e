"""TensorBoard's event files (--tensorboard), which hold the same rows as metrics.jsonl beside them."""

import io
import time

from runtime.files import is_remote, names_in
from runtime.messages import UserError

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as e:
    missing = f"its package cannot be imported ({e})"
    raise UserError(
        f"{missing}; bash setup_tpu.sh tensorboard adds it", flag="tensorboard"
    ) from None

BEGINNING = "events.out.tfevents."  # TensorBoard reads the files whose names start like this
LARGE = 1 << 20  # bytes after which a file in a bucket is complete and another one is started


class EventFile:
    """Writes each number of a row as a scalar. A run that resumes starts another file.

    An object in a bucket cannot be appended to. So `upload` writes all of it again, and starts another one when it is
    large.
    """

    def __init__(self, folder, rows, outbox):
        """rows: the rows of metrics.jsonl so far, which are added if no earlier file holds them. outbox: an
        `Outbox`."""
        self.folder = folder
        self.outbox = outbox
        if any(name.startswith(BEGINNING) for name in names_in(folder)):
            # An earlier file holds them all; `restart` needs the step of the newest one.
            rows = rows[-1:]
        self.start_file()
        self.restart(rows)

    def start_file(self):
        """Start a new file."""
        self.path = f"{self.folder}/{BEGINNING}{time.time_ns()}"
        self.file = io.BytesIO() if is_remote(self.folder) else open(self.path, "wb")
        self.records = RecordWriter(self.file)
        self.write(Event(file_version="brain.Event:2"))

    def restart(self, rows):
        """Have TensorBoard forget what it has read from the first of these rows onwards, and add these."""
        start = SessionLog(status=SessionLog.START)
        first = rows[0]["step"] if rows else 0
        self.write(Event(session_log=start, step=first))
        for row in rows:
            self.add(row)

    def write(self, event):
        """Append an event, with the time."""
        event.wall_time = time.time()
        self.records.write(event.SerializeToString())
        self.file.flush()

    def add(self, row):
        """Append a row. In a bucket it can be read after the next `upload`."""
        step, numbers = row["step"], row.items()
        values = [Summary.Value(tag=key, simple_value=v) for key, v in numbers if key != "step"]
        self.write(Event(step=step, summary=Summary(value=values)))

    def upload(self):
        """Write the file to its bucket. A local file is written already."""
        if is_remote(self.folder):
            content = self.file.getvalue()
            self.outbox.put(self.path, content)
            if len(content) > LARGE:
                self.start_file()

    def close(self):
        """Write everything and close the file."""
        self.upload()
        self.file.close()
