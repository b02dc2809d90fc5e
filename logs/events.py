"""The rows of metrics.jsonl once more, as event files of TensorBoard beside it (--tensorboard)."""

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

BEGINNING = "events.out.tfevents."  # so begin the names of files that TensorBoard reads
LARGE = 1 << 20  # bytes from which a file in a bucket stays as it is


class EventFile:
    """A scalar for each number of a row. A run that resumes begins another file. An object in a bucket cannot be
    appended to: `upload` writes all of it, and begins another one when it is large."""

    def __init__(self, folder, rows, outbox):
        """rows: those of metrics.jsonl so far, which are added where no file before has them. outbox: an `Outbox`."""
        self.folder = folder
        self.outbox = outbox
        if any(name.startswith(BEGINNING) for name in names_in(folder)):
            rows = rows[-1:]
        self.begin_file()
        self.restart(rows)

    def begin_file(self):
        self.path = f"{self.folder}/{BEGINNING}{time.time_ns()}"
        self.file = io.BytesIO() if is_remote(self.folder) else open(self.path, "wb")
        self.records = RecordWriter(self.file)
        self.write(Event(file_version="brain.Event:2"))

    def restart(self, rows):
        """Have TensorBoard forget what it has read from the first of these rows on, and add them."""
        start = SessionLog(status=SessionLog.START)
        first = rows[0]["step"] if rows else 0
        self.write(Event(session_log=start, step=first))
        for row in rows:
            self.add(row)

    def write(self, event):
        event.wall_time = time.time()
        self.records.write(event.SerializeToString())
        self.file.flush()

    def add(self, row):
        """Append a row. In a bucket it can be read from the next `upload` on."""
        step, numbers = row["step"], row.items()
        values = [Summary.Value(tag=key, simple_value=v) for key, v in numbers if key != "step"]
        self.write(Event(step=step, summary=Summary(value=values)))

    def upload(self):
        """Write the rows so far, to a bucket."""
        if is_remote(self.folder):
            content = self.file.getvalue()
            self.outbox.put(self.path, content)
            if len(content) > LARGE:
                self.begin_file()

    def close(self):
        self.upload()
        self.file.close()
