"""What a run says of its progress and leaves behind beside its checkpoints: metrics, samples, plots."""

import contextlib
import io
import json
import math
import netrc
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import jax
import numpy as np
from tqdm import tqdm

from utils import UserError, flatten, is_remote, read_file, say, to_json, write_file


def duration(seconds):
    """Seconds in words: 42s, 3m05s, 2h10m, 4d03h."""
    m, s = divmod(int(max(0, seconds)), 60)
    h, m = divmod(m, 60)
    d, h = divmod(h, 24)
    return f"{d}d{h:02d}h" if d else f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{s}s"


class Pace:
    """How fast steps of `tokens` tokens are done. The host sees some of them late, and then several at once; a thread
    waits for each, so that a step takes from when the devices had done the one before, or turned to training again, to
    when they had done it. waited: seconds so far in which the devices had nothing to do but wait for data."""

    def __init__(self, tokens, waited):
        self.tokens, self.worker, self.launches = tokens, ThreadPoolExecutor(1, "pace"), deque()
        self.steps, self.newest = (
            [],
            deque(maxlen=10),
        )  # (seconds, of these waited): since the last line, the last ten
        self.on(waited)

    def on(self, waited):
        """The devices turn to training, and have done all before."""
        self.before, self.waited = time.time(), waited

    def launched(self, metrics, waited):
        """The next step is on the devices' list; metrics: of its results."""
        end = self.worker.submit(lambda: (jax.block_until_ready(metrics), time.time())[1])
        self.launches.append((end, waited - self.waited))
        self.waited = waited

    def step(self):
        """{"tokens_per_second", "data/wait": share of the time}, means of ten steps up to the first launched one that
        was not asked for: on a busy machine the thread too may see two ends at once."""
        end, waited = self.launches.popleft()
        seconds, self.before = end.result() - self.before, end.result()
        self.steps.append((seconds, waited))
        self.newest.append((seconds, waited))
        return self._mean(self.newest)

    def since_last(self):
        """The same, means of all steps since the last call."""
        steps, self.steps = self.steps, []
        return self._mean(steps)

    def _mean(self, steps):
        seconds, waited = map(sum, zip(*steps))
        seconds = max(1e-9, seconds)
        return {
            "tokens_per_second": self.tokens * len(steps) / seconds,
            "data/wait": min(1.0, waited / seconds),
        }

    def close(self):
        """Wait for no more steps."""
        self.worker.shutdown(wait=False)


def progress(cfg, row, left, bytes_per_token, at_peak):
    """Print the line of an evaluation. row: the step's metrics, with the pace since the last line; left: seconds to the
    end; at_peak: tokens per second at the devices' peak, or None."""
    parts = [
        f"step {row['step']}/{cfg.run.training_steps}",
        f"train {row['loss/train_loss']:.4f}",
        f"val {row['loss/val_loss']:.4f}",
    ]
    if bytes_per_token:
        parts.append(
            f"{row['loss/val_cross_entropy_loss'] / np.log(2) / bytes_per_token:.3f} bits/byte"
        )
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if at_peak:
        parts.append(f"MFU {row['tokens_per_second'] / at_peak:.1%}")
    parts += [f"grad norm {row['grad_norm']:.3f}", f"lr {row['lr']:.2e}", f"{duration(left)} left"]
    if row["data/wait"] > 0.05:
        parts.append(
            f"storage is too slow: {row['data/wait']:.0%} of the time was spent waiting for data"
        )
    with contextlib.suppress(OSError):  # as in `say`
        tqdm.write(time.strftime("%H:%M:%S ") + "  ".join(parts))
        sys.stdout.flush()


def is_spike(loss, before, zscore):
    """Whether `loss` lies more than zscore standard deviations above the mean of the finite ones of the losses
    `before`, which must be 20 at least."""
    before = [x for x in before if math.isfinite(x)]
    return (
        len(before) >= 20
        and zscore > 0
        and bool(zscore * np.std(before) < loss - np.mean(before) < math.inf)
    )


SAMPLE = re.compile(r"^(?==== step \d+$)", re.MULTILINE)  # where the samples of a step begin


def rows_in(content):
    """The rows of metrics.jsonl, without what is none, such as a line that a kill tore."""
    rows = []
    for line in content.decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, AttributeError):
            row = {key: math.nan if v is None else v for key, v in json.loads(line).items()}
            numbers = all(isinstance(v, int | float) for v in row.values())
            if numbers and {"step", "loss/train_loss"} <= row.keys():
                rows.append(row)
    return rows


UPLOAD, MOST_UPLOAD = (
    "wandb",
    600,
)  # name of a thread, and the seconds to wait for it at the end of a run


def check_login():
    """Raises UserError where wandb would ask for a key or refuse to begin; it is not asked, nor its server."""
    import wandb

    try:
        settings = wandb.setup().settings
    except Exception as e:  # whatever library checks them
        reason = " ".join(str(e).split("For further information")[0].split())
        raise UserError(
            f"--wandb: its settings, of the environment or its files, are refused: {reason}."
        ) from None
    if settings.mode in ("offline", "dryrun", "disabled") or settings.api_key:
        return
    files = os.environ.get("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")
    for file in filter(None, files):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(urlsplit(settings.base_url).hostname):
                return
    if not getattr(settings, "identity_token_file", None):
        advice = "run wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline"
        raise UserError(f"--wandb: this machine is not logged in to Weights & Biases; {advice}.")


def uploading():
    """Whether an upload to wandb goes on that the run's end waits no longer for."""
    return any(thread.name == UPLOAD for thread in threading.enumerate())


class RunLog:
    """What a run leaves behind: metrics.jsonl, samples.txt, plots and, on request, wandb.

    Calls return at once; one background thread writes in order. `active` is true on process 0 alone, elsewhere
    nothing is written. Metrics are plain numbers, one object a step.
    """

    def __init__(self, cfg, start_step, active):
        self.dir, self.active, self.wandb = cfg.run.folder, active, None
        self.worker, self.history, self.zscore = ThreadPoolExecutor(1), [], cfg.run.spike_zscore
        if not active:
            return
        # Resuming: lines after the checkpoint will be written again, and an evaluation that only the end of the
        # earlier run brought about is not part of an uninterrupted one.
        for row in rows_in(read_file(self.path("metrics.jsonl")) or b""):
            if row["step"] == start_step and start_step % cfg.run.eval_every:
                row = {key: v for key, v in row.items() if not key.startswith("loss/val")}
            self.history.append(row)
        kept = (read_file(self.path("samples.txt")) or b"").decode(errors="replace")
        self.samples = [text for text in re.split(SAMPLE, kept) if text]
        self._rewind(start_step)
        if cfg.run.wandb:
            self._run(lambda: self._begin_wandb(cfg))

    def _begin_wandb(self, cfg):
        """Begin wandb's run, offline where its server is not reached in half a minute or refuses it."""
        import wandb

        run_id = (read_file(self.path("wandb_id")) or b"").decode(errors="replace").strip()
        if not re.fullmatch(r"\w+", run_id):
            run_id = secrets.token_hex(4)
            write_file(self.path("wandb_id"), run_id)
        about = dict(
            project="moe-pretraining",
            id=run_id,
            name=cfg.run.name,
            dir=self.dir,
            config=flatten(cfg),
        )
        try:
            wandb.init(resume="allow", settings=wandb.Settings(init_timeout=30), **about)
        except wandb.errors.Error as e:
            reason = (str(e).splitlines() or [type(e).__name__])[0]
            later = f"wandb sync {self.path('wandb')}/offline-run-* uploads it"
            say(f"warning: --wandb: {reason:.200}; the run is logged offline, and {later}")
            wandb.teardown()  # it still holds the run's id
            wandb.init(mode="offline", **about)
        self.wandb = wandb

    def path(self, name):
        return os.path.join(self.dir, name)

    def _write_metrics(self):
        write_file(self.path("metrics.jsonl"), "".join(to_json(row) + "\n" for row in self.history))

    def _rewind(self, step):
        self.history = [row for row in self.history if row["step"] <= step]
        self.samples = [
            text
            for text in self.samples
            if not re.match(SAMPLE, text) or int(text.split()[2]) <= step
        ]
        self._write_metrics()

    def rewind(self, step):
        """Forget what came after `step`, to which the run goes back."""
        self._run(lambda: self._rewind(step))

    def _run(self, work):
        if self.active:
            self.worker.submit(work).add_done_callback(self._complain)

    @staticmethod
    def _complain(future):
        if future.exception():
            print(
                f"warning: the run's log could not be written: {future.exception()}",
                file=sys.stderr,
                flush=True,
            )

    def metrics(self, row):
        """Record one step: {"step": int, key: number, ...}."""

        def work():
            losses = [before["loss/train_loss"] for before in self.history[-100:]]
            spikes = self.history[-1].get("loss_spikes", 0) if self.history else 0
            if spike := is_spike(row["loss/train_loss"], losses, self.zscore):
                say(
                    f"warning: the loss of step {row['step']} is a spike, {row['loss/train_loss']:.4f}, more than "
                    f"{self.zscore:g} standard deviations above those before"
                )
            row["loss_spikes"] = spikes + spike
            self.history.append(row)
            if not is_remote(self.dir):
                with open(self.path("metrics.jsonl"), "a") as f:
                    f.write(to_json(row) + "\n")
            if self.wandb:
                self.wandb.log(
                    {key: v for key, v in row.items() if key != "step"}, step=row["step"]
                )

        self._run(work)

    def text(self, step, texts):
        """Record the samples drawn at `step`."""

        def work():
            self.samples.append(
                f"=== step {step}\n" + "".join(f"--- {i}\n{t}\n" for i, t in enumerate(texts))
            )
            write_file(self.path("samples.txt"), "".join(self.samples))
            if self.wandb:
                table = self.wandb.Table(
                    columns=["step", "sample"], data=[[step, t] for t in texts]
                )
                self.wandb.log({"samples": table}, step=step)

        self._run(work)

    def plots(self):
        """Redraw the three plots from all metrics so far."""

        def work():
            if is_remote(self.dir):
                self._write_metrics()
            for name, title, keys in [
                ("val_loss", "validation loss (nats per token)", ["loss/val_loss"]),
                (
                    "load_loss",
                    "load-balancing loss (even load: 1 per MoE layer)",
                    ["loss/load_loss"],
                ),
                (
                    "tokens_per_expert",
                    "share of the routed tokens per expert",
                    sorted(
                        (k for k in self.history[-1] if k.startswith("load/head_")),
                        key=lambda k: int(k[10:]),
                    ),
                ),
            ]:
                if any(key in row for row in self.history for key in keys):
                    write_file(self.path(name + ".png"), draw(self.history, title, keys))

        self._run(work)

    def close(self):
        """Wait until everything is written."""
        self.worker.shutdown(wait=True)
        if self.wandb:
            upload = threading.Thread(target=self.wandb.finish, name=UPLOAD, daemon=True)
            upload.start()
            upload.join(MOST_UPLOAD)


def draw(history, title, keys):
    """PNG bytes of a line per key over the step."""
    from matplotlib.figure import (
        Figure,
    )  # without pyplot: safe off the main thread, and needs no display

    figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for key in keys:
        rows = [row for row in history if key in row]
        axes.plot(
            [row["step"] for row in rows],
            [row[key] for row in rows],
            lw=1,
            label=key.removeprefix("load/"),
        )
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
    if 1 < len(keys) <= 16:
        axes.legend(fontsize=7, ncols=2)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
