"""What a run says of its progress and leaves behind beside its checkpoints: metrics, samples and how it ended."""

import contextlib
import json
import math
import os
import re
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from runtime.files import is_remote, read_file, to_json, write_file
from runtime.messages import UserError, first_line, say, warn
from utils import flatten


def duration(seconds):
    """Seconds in words: 42s, 3m05s, 2h10m, 4d03h."""
    minutes, s = divmod(int(max(0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    if d:
        return f"{d}d{h:02d}h"
    if h:
        return f"{h}h{m:02d}m"
    if m:
        return f"{m}m{s:02d}s"
    return f"{s}s"


class Progress:
    """Prints a line for each evaluation, with losses as cross-entropies."""

    def __init__(self, cfg, bytes_per_token=None, plan=None):
        """bytes_per_token: of the validation data; plan: of `plan.answer`. None: not known."""
        self.steps, self.bytes_per_token, self.plan = cfg.run.training_steps, bytes_per_token, plan
        self.before = None  # validation loss of the line before

    def print(self, row, pace, on_disk):
        """row: metrics of the step; pace: a `Pace`; on_disk: step of the newest checkpoint, or None."""
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
        with contextlib.suppress(OSError):  # as in `say`
            tqdm.write(time.strftime("%H:%M:%S ") + "  ".join(parts))
            sys.stdout.flush()

    def losses(self, row):
        """Words for the losses; after that of the validation its change since the line before."""
        val = row["loss/val_cross_entropy_loss"]
        change = "" if self.before is None else f" ({val - self.before:+.4f})"
        self.before = val
        parts = [f"train {row['loss/train_cross_entropy_loss']:.4f}", f"val {val:.4f}{change}"]
        if self.bytes_per_token:
            parts.append(f"{val / math.log(2) / self.bytes_per_token:.3f} bits/byte")
        return parts

    def speed(self, row):
        """Words for the speed; beside it what share that is of the plan's and of the devices' peak."""
        speed = row["tokens_per_second"]
        words = f"{speed:,.0f} tokens/s"
        if self.plan is None:
            return [words]
        share = speed / self.plan.tokens_per_second
        return [f"{words} ({share:.0%} of the plan)", f"MFU {share * self.plan.mfu:.1%}"]


# (step, text) of the samples of a step in samples.txt
SAMPLES = re.compile(r"^=== step (\d{1,15})\n(.*?)(?=^=== step |\Z)", re.MULTILINE | re.DOTALL)


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


def read_rows(content):
    """(rows of metrics.jsonl, by step; whether anything else is in it but a last line that a kill tore)."""
    found = [row_of(line) for line in content.splitlines()]
    rows = {row["step"]: row for row in found if row}
    return [rows[step] for step in sorted(rows)], not all(found[:-1])


def end_of(folder, rows):
    """The last of a run's rows once more, as it was when the run had saved all steps and ended; None where it has not
    ended so."""
    with contextlib.suppress(UserError):  # somebody damaged it
        end = row_of(read_file(os.path.join(folder, "ended.json")) or b"")
        last = rows[-1] if rows else {}
        if (
            end
            and end["step"] == last.get("step")
            and end.get("time", 0) >= last.get("time", math.inf)
        ):
            return end


class NoLog:
    """The log of a process that writes none: every call does nothing."""

    found = history = ()
    end = None

    def __getattr__(self, name):
        return lambda *_: None


class RunLog:
    """metrics.jsonl, samples.txt and, on request, TensorBoard's event file and wandb.

    A row is appended to a local metrics.jsonl at once; in a bucket `flush` writes all of them. A thread passes rows on
    to TensorBoard and wandb, which may take seconds. No failure to write ends the run.
    """

    def __init__(self, cfg, start_step):
        self.folder = cfg.run.folder
        self.events = None
        self.wandb = None
        self.worker = ThreadPoolExecutor(1)  # of TensorBoard and wandb
        self.found = self._read_history(start_step)  # rows of metrics.jsonl, also of later steps
        self.end = end_of(self.folder, self.found)
        self.history = self.found
        self.complete = True  # whether that file has them all
        kept = (read_file(self.path("samples.txt")) or b"").decode(errors="replace")
        self.samples = {int(step): text for step, text in SAMPLES.findall(kept)}
        self._forget(start_step)  # what came after the checkpoint will be written again
        if cfg.run.tensorboard:
            from training import events  # here: it imports tensorboard

            self.events = events.EventFile(self.folder, self.history)
        if cfg.run.wandb:
            self._later(lambda: self._begin_wandb(cfg))

    def path(self, name):
        return os.path.join(self.folder, name)

    def metrics(self, row):
        """Record one step: {"step": int, name: number, ...}."""
        self.history.append(row)
        self._later(lambda: self._report(row))
        if is_remote(self.folder):
            self.complete = False
        elif self.complete:
            self.complete = attempt(lambda: self._append(row))
        else:  # the row before may be torn, on a disk that was full
            self.flush()

    def text(self, step, texts):
        """Record the samples drawn at `step`."""
        rows = [f"--- {i}\n{text}\n" for i, text in enumerate(texts)]
        self.samples[step] = "".join(rows)
        whole = "".join(f"=== step {n}\n{text}" for n, text in self.samples.items())
        attempt(lambda: write_file(self.path("samples.txt"), whole))

    def rewind(self, step):
        """Forget what came after `step`, to which the run rolls back."""
        self._forget(step)
        if self.events:
            last = self.history[-1:]
            self._later(lambda: self.events.restart(last))

    def flush(self):
        """Have metrics.jsonl hold all rows so far: a kill would lose those that a checkpoint is ahead of."""
        if not self.complete:
            rows = "".join(to_json(row) + "\n" for row in self.history)
            self.complete = attempt(lambda: write_file(self.path("metrics.jsonl"), rows))
        if self.events:
            self._later(self.events.upload)

    def close(self):
        """Wait until everything is written."""
        self.flush()
        self.worker.shutdown(wait=True)
        if self.events:
            attempt(self.events.close)
        if self.wandb:
            attempt(self.wandb.finish)

    def ended(self, spent):
        """Record that all steps are saved and the run ends. spent: `Goodput.row` of now."""
        last = to_json(self.history[-1] | spent)
        attempt(lambda: write_file(self.path("ended.json"), last))

    def _forget(self, step):
        self.history = [row for row in self.history if row["step"] <= step]
        self.samples = {n: text for n, text in self.samples.items() if n <= step}
        self.complete = False
        self.flush()

    def _later(self, work):
        self.worker.submit(attempt, work)

    def _append(self, row):
        with open(self.path("metrics.jsonl"), "a") as f:
            f.write(to_json(row) + "\n")

    def _report(self, row):
        """Pass a row to TensorBoard and wandb."""
        if self.events:
            self.events.add(row)
        if self.wandb:
            self.wandb.log(row)

    def _read_history(self, step):
        """The rows. What a damaged metrics.jsonl holds is kept beside it, with a warning of the rows up to `step`."""
        path = self.path("metrics.jsonl")
        content = read_file(path) or b""
        found, is_damaged = read_rows(content)
        if is_damaged:
            rows = [row for row in found if row["step"] <= step]
            n = 1
            while read_file(f"{path}.damaged-{n}") is not None:
                n += 1
            write_file(f"{path}.damaged-{n}", content)
            say(
                f"warning: {path} is damaged: it keeps the {len(rows)} rows up to step {step} that can be read, and "
                f"what it held is saved in {path}.damaged-{n}"
            )
        return found  # a killed run leaves rows of the next steps behind

    def _begin_wandb(self, cfg):
        """Begin wandb's run: offline where nobody is logged in, or its server is not reached in half a minute."""
        import wandb

        kept = read_file(self.path("wandb_id")) or b""
        run_id = kept.decode(errors="replace").strip()
        if not re.fullmatch(r"\w+", run_id):
            run_id = secrets.token_hex(4)
            write_file(self.path("wandb_id"), run_id)
        about = dict(
            project=os.environ.get("WANDB_PROJECT", "moe-pretraining"),
            id=run_id,
            name=cfg.run.name,
            dir=self.folder,
            config=flatten(cfg),
        )
        seconds = dict(init_timeout=30, login_timeout=30, finish_timeout=600)
        limits = wandb.Settings(finish_timeout_raises=False, **seconds)
        try:
            wandb.init(resume="allow", settings=limits, **about)
        except wandb.errors.Error as e:
            later = f"wandb sync {self.path('wandb')}/offline-run-* uploads it"
            say(f"warning: --wandb: {first_line(e)}; the run is logged offline, and {later}")
            wandb.teardown()  # it still holds the run's id
            wandb.init(mode="offline", **about)
        # wandb's own count of steps, log(step=...), only rises: it would drop what is run again after a rollback
        wandb.define_metric("step", hidden=True)
        wandb.define_metric("*", step_metric="step")
        self.wandb = wandb


def attempt(work, what="the run's log could not be written"):
    """Call work(); whether it went well. A failure is printed as a warning, which begins with `what`."""
    try:
        work()
    except Exception as e:  # training continues without TensorBoard, wandb or a profile
        warn(f"{what}: {first_line(e)}")
        return False
    return True
