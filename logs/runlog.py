"""The log of a run: the progress lines that it prints, and what it writes beside its checkpoints, such as metrics,
samples and how it ended."""

import contextlib
import math
import os
import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

from logs import rows
from runtime.files import is_remote, read_file, to_json, write_file
from runtime.messages import UserError, duration, first_line, say, warn
from runtime.outbox import Outbox, attempt
from utils import flatten

UNWRITTEN = "the run's log could not be written"
# Calls that may wait for TensorBoard and wandb, each of which may take seconds.
MOST_BEHIND = 20_000
LAST = 120  # most seconds that the end of a run waits for a bucket
ROWS_FIRST = 30  # most seconds that a checkpoint waits for the rows before it


class Progress:
    """Prints a line for each evaluation, with losses as cross-entropies."""

    def __init__(self, cfg, bytes_per_token=None, plan=None):
        """bytes_per_token: of the validation data. plan: the `Plan` of the run. None where they are unknown."""
        self.steps = cfg.run.training_steps
        self.bytes_per_token = bytes_per_token
        self.plan = plan
        self.before = None  # validation loss of the previous line

    def print(self, row, pace, on_disk):
        """Print the line of a step. row: its metrics. pace: a `Pace`. on_disk: step of the newest checkpoint, or
        None."""
        row = row | pace.since_last()
        parts = [f"step {row['step']}/{self.steps}", *self.losses(row), *self.speed(row)]
        parts += [f"grad norm {row['grad_norm']:.3f}", f"lr {row['lr']:.2e}"]
        if row["bad_steps"]:
            parts.append(f"{row['bad_steps']:.0f} bad steps")
        if on_disk:
            parts.append(f"checkpoint {on_disk}")
        parts.append(f"{duration(pace.seconds_for(self.steps - row['step']))} left")
        if row["data/wait"] > 0.05:
            share = f"{row['data/wait']:.0%} of the time"
            parts.append(f"storage is too slow: {share} was spent waiting for data")
        say("  ".join(parts))

    def losses(self, row):
        """Words for the losses, with the change of the validation loss since the previous line."""
        val = row["loss/val_cross_entropy_loss"]
        change = "" if self.before is None else f" ({val - self.before:+.4f})"
        self.before = val
        parts = [f"train {row['loss/train_cross_entropy_loss']:.4f}", f"val {val:.4f}{change}"]
        if self.bytes_per_token:
            parts.append(f"{val / math.log(2) / self.bytes_per_token:.3f} bits/byte")
        return parts

    def speed(self, row):
        """Words for the speed, and for its shares of the plan's speed and of the devices' peak."""
        speed = row["tokens_per_second"]
        words = f"{speed:,.0f} tokens/s"
        if self.plan is None:
            return [words]
        share = speed / self.plan.tokens_per_second
        return [f"{words} ({share:.0%} of the plan)", f"MFU {share * self.plan.mfu:.1%}"]


# (step, text) of the samples of a step in samples.txt.
SAMPLES = re.compile(r"^=== step (\d{1,15})\n(.*?)(?=^=== step |\Z)", re.MULTILINE | re.DOTALL)


def end_of(folder, found):
    """The row that a run recorded when it ended with all steps saved; None unless it belongs to the last of the run's
    rows `found`, since a run that was resumed later has not ended so."""
    with contextlib.suppress(UserError):  # raised for a damaged file
        end = rows.row_of(read_file(os.path.join(folder, "ended.json")) or b"")
        last = found[-1] if found else {}
        if not end or end["step"] != last.get("step"):
            return None
        if end.get("time", 0) >= last.get("time", math.inf):
            return end
    return None


class NoLog:
    """The log of a process that writes none: every call does nothing."""

    def open(self, step):
        """What `RunLog.open` returns for a run without rows."""
        return [], None

    def rows_so_far(self):
        """No rows."""
        return []

    def __getattr__(self, name):
        return lambda *_, **__: None


class RunLog:
    """metrics.jsonl, samples.txt, config.json, plan.json and, on request, TensorBoard's event file and wandb.

    One thread writes the files of a bucket, and another passes rows on to TensorBoard and wandb. The run waits for
    neither, and a failure to write does not end it.
    """

    def __init__(self, cfg):
        self.cfg = cfg
        self.folder = cfg.run.folder
        self.outbox = Outbox()
        if is_remote(self.folder):
            self.rows = rows.BucketRows(self.folder, self.outbox)
        else:
            self.rows = rows.LocalRows(self.folder)
        self.last = {}  # the newest row
        self.events = None
        self.wandb = None
        self.worker = ThreadPoolExecutor(1)  # for TensorBoard and wandb
        self.room = threading.Semaphore(MOST_BEHIND)  # how many more calls may wait for the worker
        self.is_behind = False  # whether calls were left out

    def open(self, step):
        """Prepare to log the steps after `step`. Returns the rows that were there, also those of later steps, and
        `end_of` them. Raises UserError where they cannot be read."""
        found, damaged = self._read_rows(step)
        kept = [row for row in found if row["step"] <= step]
        if damaged or not is_remote(self.folder):
            self.rows.replace(kept)
        else:
            self.rows.rewind(step)
        texts = (read_file(self.path("samples.txt")) or b"").decode(errors="replace")
        self.samples = {int(n): text for n, text in SAMPLES.findall(texts) if int(n) <= step}
        if self.cfg.run.tensorboard:
            from logs import events  # imported here, since it needs the package tensorboard

            self.events = events.EventFile(self.folder, kept, self.outbox)
        if self.cfg.run.wandb:
            self._later(self._start_wandb)
        return found, end_of(self.folder, found)

    def path(self, name):
        """The path of a file of the run directory."""
        return os.path.join(self.folder, name)

    def write(self, name, content):
        """Write an object as a JSON file in the run directory."""
        self.outbox.put(self.path(name), to_json(content, indent=1) + "\n")

    def metrics(self, row):
        """Record the metrics of one step: {"step": int, name: number, ...}."""
        self.last = row
        self.rows.add(row)
        self._later(lambda: self._report(row))

    def text(self, step, texts):
        """Record the texts that were sampled at `step`."""
        parts = [f"--- {i}\n{text}\n" for i, text in enumerate(texts)]
        self.samples[step] = "".join(parts)
        self._write_samples()

    def rows_so_far(self):
        """The rows that can be read at the moment; none where the storage does not answer."""
        try:
            return rows.read_rows(self.folder)
        except UserError:
            return []

    def rewind(self, step):
        """Forget everything after `step`, to which the run rolls back."""
        attempt(lambda: self.rows.rewind(step), UNWRITTEN)
        self.samples = {n: text for n, text in self.samples.items() if n <= step}
        self._write_samples()
        if self.events:
            before = [row for row in self.rows_so_far() if row["step"] == step]
            self._later(lambda: self.events.restart(before))

    def flush(self, now=False):
        """Write the rows so far. now: a checkpoint or the end of the run follows, so no row may wait any longer: a kill
        after the checkpoint would lose it."""
        self.rows.flush(now)
        if self.events:
            self._later(self.events.upload)

    def close(self):
        """Write everything, and wait for it, but not forever for a storage that does not answer."""
        self.flush(now=True)
        self.worker.shutdown(wait=True)
        if self.events:
            attempt(self.events.close, UNWRITTEN)
        if self.wandb:
            attempt(self.wandb.finish, UNWRITTEN)
        self._settle()

    def ended(self, spent):
        """Record that the run ends with all steps saved. spent: what `Goodput.row` returns now."""
        self.outbox.put(self.path("ended.json"), to_json(self.last | spent))
        self._settle()

    def wait_for_rows(self):
        """Wait until the rows before a checkpoint are written, for at most ROWS_FIRST seconds.

        It is called before a checkpoint gets its name, since a run that resumes from the checkpoint would otherwise
        lack these rows. A storage that accepts no rows for that long will not accept the checkpoint either.
        """
        self.outbox.settle(ROWS_FIRST)

    def _settle(self):
        """Wait until the outbox is empty, for at most LAST seconds, and warn of what is left."""
        if left := self.outbox.settle(LAST):
            warn(f"not written, as the storage does not answer: {', '.join(left)}")

    def _write_samples(self):
        """Write samples.txt."""
        whole = "".join(f"=== step {n}\n{text}" for n, text in self.samples.items())
        self.outbox.put(self.path("samples.txt"), whole)

    def _later(self, work):
        """Have the worker call work(), unless it is far behind."""
        if not self.room.acquire(blocking=False):
            if not self.is_behind:
                warn("TensorBoard or wandb does not keep up: rows of this run are left out there")
            self.is_behind = True
            return

        def done():
            attempt(work, UNWRITTEN)
            self.room.release()

        self.worker.submit(done)

    def _report(self, row):
        """Pass a row to TensorBoard and wandb."""
        if self.events:
            self.events.add(row)
        if self.wandb:
            self.wandb.log(row)

    def _read_rows(self, step):
        """(the rows that are there, whether some are damaged). The content of damaged files is copied beside them, and
        a warning says how many rows up to `step` are left."""
        parts = rows.contents(self.folder)
        # A killed run also leaves rows of steps that will be repeated.
        found, is_damaged = rows.join(parts)
        if is_damaged:
            path = self.path(rows.NAME)
            n = 1
            while read_file(f"{path}.damaged-{n}") is not None:
                n += 1
            write_file(f"{path}.damaged-{n}", b"".join(content for _, content in parts))
            kept = sum(row["step"] <= step for row in found)
            say(
                f"warning: {path} is damaged: it keeps the {kept} rows up to step {step} that can be read, and "
                f"what it held is saved in {path}.damaged-{n}"
            )
        return found, is_damaged

    def _start_wandb(self):
        """Start wandb's run. It is an offline one where nobody is logged in, or where the server cannot be reached in
        half a minute."""
        import wandb

        kept = read_file(self.path("wandb_id")) or b""
        run_id = kept.decode(errors="replace").strip()
        if not re.fullmatch(r"\w+", run_id):
            run_id = secrets.token_hex(4)
            write_file(self.path("wandb_id"), run_id)
        settings = dict(
            project=os.environ.get("WANDB_PROJECT", "moe-pretraining"),
            id=run_id,
            name=self.cfg.run.name,
            dir=self.folder,
            config=flatten(self.cfg),
        )
        seconds = dict(init_timeout=30, login_timeout=30, finish_timeout=600)
        limits = wandb.Settings(finish_timeout_raises=False, **seconds)
        try:
            wandb.init(resume="allow", settings=limits, **settings)
        except wandb.errors.Error as e:
            later = f"wandb sync {self.path('wandb')}/offline-run-* uploads it"
            say(f"warning: --wandb: {first_line(e)}; the run is logged offline, and {later}")
            wandb.teardown()  # the failed try still holds the run's id
            wandb.init(mode="offline", **settings)
        # wandb's own step counter, log(step=...), can only rise: it would drop the steps repeated after a rollback.
        wandb.define_metric("step", hidden=True)
        wandb.define_metric("*", step_metric="step")
        self.wandb = wandb
