"""What runs measured while they trained, read of their config.json and metrics.jsonl: numbers, a table and a picture.

Runs with several seeds are a mean with its standard error. Each is compared with the first one of the same seed: those
saw the same data in the same order, so their difference usually varies less than their losses do.
"""

import math
import os
from typing import NamedTuple

import numpy as np

import model
import utils
from runtime.files import read_file
from runtime.messages import UserError
from tools import common
from training import runlog, settings, steps

# --- Numbers ----------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """The e evaluations of a run."""

    folder: str
    cfg: utils.Config
    data: str  # fingerprint of the shards
    last: int  # step of the last evaluation
    tokens: np.ndarray  # [e] that were trained on until then
    seconds: np.ndarray  # [e] of training until then, without evaluations, checkpoints and stops
    loss: np.ndarray  # [e] cross-entropy, nats per token
    speed: float  # tokens per second; a median over the steps, so that a busy spell hardly counts

    def loss_at(self, tokens):
        """The loss after a number of tokens, between evaluations on a straight line; nan before the first of them and
        after the last."""
        return float(np.interp(tokens, self.tokens, self.loss, math.nan, math.nan))

    def tokens_to(self, loss):
        """Tokens until the loss first was at most `loss`, between evaluations on a straight line; nan where it never
        was.

        Example: 5.0 at 100 tokens and 4.0 at 200, so 4.2 was reached after 180.
        """
        reached = np.flatnonzero(self.loss <= loss)
        if not len(reached):
            return math.nan
        around = slice(max(0, reached[0] - 1), reached[0] + 1)
        # np.interp wants rising abscissae, and the loss falls
        return float(np.interp(-loss, -self.loss[around], self.tokens[around]))


def read_curve(folder):
    """The Curve of the run in a local folder or at an address. Raises UserError where there is none."""
    config = settings.run_config(folder)
    if "n_device_axis" not in config:
        raise UserError(f"{folder}: is no run directory, which holds a config.json of main.py.")
    settings.check_stored(config, folder, settings.NEEDED_TO_RESUME)
    cfg = common.stored_config(config)
    rows = runlog.rows_in(read_file(os.path.join(folder, "metrics.jsonl")) or b"")
    evaluated = [i for i, row in enumerate(rows) if "loss/val_loss" in row]
    if not evaluated:
        raise UserError(f"{folder}: its metrics.jsonl holds no evaluation yet.")
    per_step = math.prod(steps.batch_shape(cfg))
    reached = np.array([row["step"] for row in rows])
    # a run may begin with the step of another's checkpoint
    trained = np.diff(reached, prepend=reached[0] - 1) * per_step
    speed = np.array([row.get("tokens_per_second", math.nan) for row in rows])
    return Curve(
        folder=folder,
        cfg=cfg,
        data=config.get("data_fingerprint", ""),
        last=rows[evaluated[-1]]["step"],
        tokens=(reached * per_step)[evaluated],
        seconds=np.cumsum(trained / speed)[evaluated],
        loss=np.array([cross_entropy(rows[i]) for i in evaluated]),
        speed=float(np.median(speed)),
    )


def cross_entropy(row):
    """The validation loss of an evaluation, without what training adds to it to balance the experts: so runs that
    weigh that differently can be compared."""
    return row.get("loss/val_cross_entropy_loss", row["loss/val_loss"])


def measured(values):
    """{"mean", "standard_error"} of one value for each seed, the latter None for a single one; None for no value."""
    if not values:
        return None
    error = None
    if len(values) > 1:
        error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    return dict(mean=float(np.mean(values)), standard_error=error)


def results(groups, marks=(), target=None):
    """{name: `numbers`} of groups of runs, {name: {seed: Curve}}, beside the first group; those without runs are left
    out.

    marks: numbers of tokens; none: up to three evaluations of the first run, at about a quarter, half and three
    quarters of it. target: a loss; None: the first group's final one, of each seed its own.
    """
    first = next(iter(groups.values()))
    if not marks and first:
        tokens = next(iter(first.values())).tokens
        e = len(tokens)
        chosen = {math.ceil(e * quarter / 4) - 1 for quarter in (1, 2, 3)}
        marks = [int(tokens[i]) for i in sorted(chosen) if i < e - 1]
    found = {}
    for name, runs in groups.items():
        if runs:
            found[name] = numbers(runs, first, marks, target)
    return found


def numbers(runs, first, marks, target):
    """{name: value} of a group of runs; see `results`."""
    pairs = [(run, first[seed]) for seed, run in runs.items() if seed in first]
    to_target, shares = [], []
    for run, other in pairs:
        loss = other.loss[-1] if target is None else target
        to_target.append(run.tokens_to(loss))
        shares.append(run.tokens_to(loss) / other.tokens_to(loss))
    curves = list(runs.values())
    total, active, embedding = model.count_params(curves[0].cfg)
    finite = [run.loss[np.isfinite(run.loss)] for run in curves]
    return dict(
        parameters=total + embedding,
        active_parameters=active + embedding,
        flops_per_token=model.flops_per_token(curves[0].cfg),
        tokens=int(curves[0].tokens[-1]),
        tokens_per_second=measured([run.speed for run in curves]),
        loss_at={mark: measured([run.loss_at(mark) for run in curves]) for mark in marks},
        final_loss=measured([run.loss[-1] for run in curves]),
        best_loss=measured([min(losses, default=math.nan) for losses in finite]),
        difference=measured([run.loss[-1] - other.loss[-1] for run, other in pairs]),
        tokens_to_target=measured(to_target),
        share_of_tokens=measured(shares),
        seeds={seed: evaluations(run) for seed, run in runs.items()},
    )


def evaluations(run):
    """What the JSON file keeps of a Curve."""
    lists = {key: getattr(run, key).tolist() for key in ("tokens", "seconds", "loss")}
    return dict(folder=run.folder) | lists


# --- The table and the picture -----------------------------------------------------------------------------------


def cell(value, form, factor=1, sign=""):
    """What `measured` returns as text, each number as `form` says; "-" where there is none."""
    if value is None or math.isnan(value["mean"]):
        return "-"
    mean = format(factor * value["mean"], sign + form)
    error = value["standard_error"]
    return mean if error is None else f"{mean} ± {factor * error:{form}}"


def table(found):
    """Lines of a Markdown table of `results`."""
    first = next(iter(found))
    rows = []
    for name, one in found.items():
        rows.append(
            [
                name,
                in_millions(one["parameters"]),
                in_millions(one["active_parameters"]),
                in_millions(one["tokens"]),
                *[cell(loss, ".4f") for loss in one["loss_at"].values()],
                cell(one["final_loss"], ".4f"),
                cell(one["best_loss"], ".4f"),
                cell(one["difference"], ".4f", sign="+") if name != first else "-",
                cell(one["tokens_to_target"], ".3f", 1e-6),
                cell(one["share_of_tokens"], ".3f") if name != first else "1",
                f"{one['flops_per_token'] / 1e6:.2f}",
                cell(one["tokens_per_second"], ",.0f"),
            ]
        )
    marks = [f"loss at {in_millions(mark)}" for mark in found[first]["loss_at"]]
    headings = ["run", "parameters", "active", "tokens", *marks, "final loss", "best loss"]
    headings += [f"against {first}", "M tokens to target", f"x {first}'s"]
    return common.markdown([*headings, "MFLOP/token", "tokens/s"], rows)


def in_millions(tokens):
    """A number of tokens or parameters: 287k, 1.15M, 2.49B."""
    for power, letter in ((9, "B"), (6, "M")):
        if tokens >= 0.9995 * 10**power:
            return f"{tokens / 10**power:.2f}{letter}"
    return f"{tokens / 1000:.0f}k"


def draw(found):
    """The Figure of `results`: over tokens and over time, the mean over seeds with a band of its standard error."""
    figure = runlog.new_figure(11, 4.5, dpi=120)
    over_tokens, over_time = figure.subplots(1, 2, sharey=True)
    for i, (name, one) in enumerate(found.items()):
        runs = list(one["seeds"].values())
        e = min(len(run["loss"]) for run in runs)
        losses = np.array([run["loss"][:e] for run in runs])  # [seeds, e]
        mean, error = losses.mean(0), np.zeros(e)
        if len(runs) > 1:
            error = losses.std(0, ddof=1) / math.sqrt(len(runs))
        minutes = np.mean([run["seconds"][:e] for run in runs], 0) / 60
        for axes, x in ((over_tokens, runs[0]["tokens"][:e]), (over_time, minutes)):
            axes.plot(x, mean, "o-", ms=3, lw=1.2, color=f"C{i}", label=name)
            axes.fill_between(x, mean - error, mean + error, alpha=0.25, color=f"C{i}", lw=0)
            axes.grid(alpha=0.3)
    over_tokens.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    over_tokens.xaxis.set_major_formatter(lambda tokens, _: in_millions(tokens) if tokens else "0")
    over_time.set(xlabel="minutes of training")
    over_tokens.legend(fontsize=8)
    return figure
