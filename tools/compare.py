"""The losses of runs in a table and a picture: of runs that are there, or of variations of a configuration, trained
one after another on the same data with several seeds.

python tools/compare.py runs/tiny runs/gpt2-tiny --output compare.png
python tools/compare.py --preset tiny --data data/shards/stdlib --seeds 3 --output runs/ablations/lr \
    --variation base --variation "high: --max_lr 3e-3" --variation "wide: --model_dimension 192"

With --variation it takes every flag of main.py for all variations. Rerun the same command to resume; finished runs are
not trained again.
"""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.realpath(__file__ + "/../..")
    from runtime import interrupts

    interrupts.begin()

import math
import re
import shlex
import signal
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

ENVIRONMENT = dict(os.environ)  # of the runs: importing jax changes it

import numpy as np

import model
import utils
from runtime import parser, platforms
from runtime.files import check_place, is_remote, read_file, read_json, to_json, write_file
from runtime.messages import UserError, say
from tools import common
from training import command_line, runlog, settings, steps

MAIN = os.path.realpath(__file__ + "/../../main.py")
# Ahead of the user's flags, which win: many runs should not fill a disk.
SAVE_LITTLE = "--keep_checkpoints 1 --inference_batch 1 --max_tokens 1".split()
OWN = {"seed", "name", "output_dir"}  # flags that each run gets from here
# Flags of which all variations must have the same value.
SAME_TEXT = ["T", "data", "mix", "eval_steps"]
# Flags that belong to the definition of a variation beside those that a run must have to resume.
OF_VARIATION = ["training_steps", "eval_steps", "eval_every", "init_from"]

# --- What runs measured -------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """The e evaluations of a run."""

    folder: str
    cfg: utils.Config
    data: str  # fingerprint of the shards
    last: int  # step of the last evaluation
    tokens: np.ndarray  # [e] that were trained on until then
    loss: np.ndarray  # [e] cross-entropy, nats per token
    speed: float  # tokens per second; a median over the steps, so that a busy spell hardly counts

    def tokens_to(self, loss):
        """Tokens until the loss first was at most `loss`, on straight lines between evaluations; nan: never."""
        reached = np.flatnonzero(self.loss <= loss)
        if not len(reached):
            return math.nan
        around = slice(max(0, reached[0] - 1), reached[0] + 1)
        # np.interp wants rising abscissae, and the loss falls
        return float(np.interp(-loss, -self.loss[around], self.tokens[around]))


def read_curve(folder):
    """The Curve of the run in a folder. Raises UserError where there is none."""
    config = read_json(folder, "config.json")
    if "n_device_axis" not in config:
        raise UserError(f"{folder}: is no run directory, which holds a config.json of main.py.")
    settings.check_stored(config, folder, settings.NEEDED_TO_RESUME)
    cfg = common.stored_config(config)
    rows, _ = runlog.read_rows(read_file(os.path.join(folder, "metrics.jsonl")) or b"")
    evaluated = [row for row in rows if "loss/val_cross_entropy_loss" in row]
    if not evaluated:
        raise UserError(f"{folder}: its metrics.jsonl holds no evaluation yet.")
    per_step = math.prod(steps.batch_shape(cfg))
    return Curve(
        folder=folder,
        cfg=cfg,
        data=config.get("data_fingerprint", ""),
        last=evaluated[-1]["step"],
        tokens=per_step * np.array([row["step"] for row in evaluated]),
        loss=np.array([row["loss/val_cross_entropy_loss"] for row in evaluated]),
        speed=float(np.median([row.get("tokens_per_second", math.nan) for row in rows])),
    )


def mean_and_error(values):
    """The mean over seeds [seed, ...], and its standard error, 0 for a single seed."""
    n = len(values)
    spread = np.std(values, 0, ddof=1) if n > 1 else 0 * values[0]
    return np.mean(values, 0), spread / math.sqrt(n)


def cell(values, form):
    """`mean_and_error` as text, each number as `form` says; "-" where there is none."""
    if not values or math.isnan(sum(values)):
        return "-"
    mean, error = mean_and_error(values)
    text = f"{mean:{form}}"
    return f"{text} ± {error:{form.lstrip('+')}}" if len(values) > 1 else text


def table(groups, marks=(), target=None):
    """Lines of a Markdown table of groups of runs, {name: {seed: Curve}}, beside the first group.

    marks: numbers of tokens; none: evaluations of the first run at about a quarter, half and three quarters of it.
    target: a loss; None: the first group's final one, of each seed its own.
    """
    first_name, first = next(iter(groups.items()))
    if not marks:
        tokens = next(iter(first.values())).tokens
        chosen = {math.ceil(len(tokens) * share) - 1 for share in (0.25, 0.5, 0.75)}
        marks = [tokens[i] for i in sorted(chosen) if i < len(tokens) - 1]
    rows = []
    for name, runs in groups.items():
        curves = list(runs.values())
        cfg = curves[0].cfg
        differences, to_target, shares = [], [], []
        for seed in sorted(runs.keys() & first.keys()):
            run, other = runs[seed], first[seed]
            loss = other.loss[-1] if target is None else target
            reached = run.tokens_to(loss)
            differences.append(run.loss[-1] - other.loss[-1])
            to_target.append(reached / 1e6)
            shares.append(reached / other.tokens_to(loss))
        total, active, embedding = model.count_params(cfg)
        row = {
            "run": name,
            "parameters": in_millions(total + embedding),
            "active": in_millions(active + embedding),
            "tokens": in_millions(curves[0].tokens[-1]),
        }
        for mark in marks:
            losses = [np.interp(mark, run.tokens, run.loss, math.nan, math.nan) for run in curves]
            row[f"loss at {in_millions(mark)}"] = cell(losses, ".4f")
        row["final loss"] = cell([run.loss[-1] for run in curves], ".4f")
        row[f"against {first_name}"] = "-" if runs is first else cell(differences, "+.4f")
        row["M tokens to target"] = cell(to_target, ".3f")
        row[f"x {first_name}'s"] = "1" if runs is first else cell(shares, ".3f")
        row["MFLOP/token"] = f"{model.flops_per_token(cfg) / 1e6:.2f}"
        row["tokens/s"] = cell([run.speed for run in curves], ",.0f")
        rows.append(row)
    return common.markdown(list(rows[0]), [list(row.values()) for row in rows])


def in_millions(n):
    """A number of tokens or parameters: 287k, 1.15M, 2.49B."""
    if n >= 999.5e6:
        return f"{n / 1e9:.2f}B"
    return f"{n / 1e6:.2f}M" if n >= 999.5e3 else f"{n / 1e3:.0f}k"


def picture(groups, kind="png"):
    """Bytes of a picture of groups of runs: the mean over seeds with a band of its standard error."""
    figure = runlog.new_figure(7, 4.5, dpi=120)
    axes = figure.subplots()
    for i, (name, runs) in enumerate(groups.items()):
        curves = list(runs.values())
        e = min(len(run.loss) for run in curves)
        mean, error = mean_and_error([run.loss[:e] for run in curves])
        tokens = curves[0].tokens[:e]
        axes.plot(tokens, mean, "o-", ms=3, lw=1.2, color=f"C{i}", label=name)
        axes.fill_between(tokens, mean - error, mean + error, alpha=0.25, color=f"C{i}", lw=0)
    axes.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda tokens, _: in_millions(tokens) if tokens else "0")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return runlog.picture(figure, kind)


# --- The program ------------------------------------------------------------------------------------------------


def compare_runs(runs, output, marks, target):
    """Print and draw the `table` of the runs that are there."""
    if not output.endswith((".png", ".svg", ".pdf")):
        raise UserError(f"--output {output}: must be a file that ends in .png, .svg or .pdf.")
    check_place(output, "--output")
    names = [os.path.basename(folder.rstrip("/")) for folder in runs]
    if len(set(names)) < len(names):
        names = runs
    groups = {name: {0: read_curve(folder)} for name, folder in zip(names, runs)}
    print("\n".join(table(groups, marks, target)))
    write_file(output, picture(groups, output[-3:]))
    print(f"\nthe losses are drawn in {output}")


@dataclass(frozen=True)
class Options:
    """Compare the losses of runs, or train variations of a configuration and compare theirs."""

    runs: tuple[str, ...] = parser.flag((), positional=True)
    """Run directories, or their gs:// or s3:// addresses; none with --variation."""
    variation: tuple[str, ...] = ()
    """A variation to train, "NAME: FLAGS": its name and the flags of main.py that it has besides; once for each, the
    one that the others are compared with first."""
    seeds: int = parser.flag(3, least=1)
    """Seeds of each variation: 0, 1, ..."""
    output: str = ""
    """Picture to write, .png, .svg or .pdf; empty: compare.png. With --variation the folder of the runs and results;
    empty: runs/ablation."""
    marks: tuple[float, ...] = ()
    """Tokens after which the table has the loss; without it three evaluations of the first run."""
    target: float | None = None
    """Loss to reach; without it the final one of the first run, seed by seed."""


def main(argv):
    own, flags = utils.read_own_flags(Options, argv, "tools/compare.py")
    if bool(own.runs) == bool(own.variation) or (own.runs and flags):
        raise UserError(
            "compare.py: give run directories, such as runs/tiny, or variations, such as --variation base "
            '--variation "high: --max_lr 3e-3".'
        )
    if own.runs:
        platforms.choose_cpu()
        compare_runs(own.runs, own.output or "compare.png", own.marks, own.target)
        return
    folder = own.output or "runs/ablation"
    if is_remote(folder):
        raise UserError(f"--output {folder}: must be a local folder, which holds the logs.")
    variations = [parse_variation(text, flags, folder) for text in own.variation]
    check_comparable(variations)
    platforms.choose_cpu()  # the devices belong to the runs
    groups, failed = train_all(variations, own.seeds, folder)
    if groups:
        print("\n".join(table(groups, own.marks, own.target)))
        print(f"\nresults.json and losses.png are saved in {folder}")
    if failed:
        n = own.seeds * len(variations)
        say(f"{failed} of {n} runs failed; rerun the same command to try them again")
        sys.exit(1)


if __name__ == "__main__":
    interrupts.run(lambda: main(sys.argv[1:]))
