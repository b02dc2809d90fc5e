"""The losses of runs over tokens and over time, in one picture, and a table.

python tools/compare.py runs/tiny runs/gpt2-tiny --output compare.png

Points are validation losses; faint lines are training losses, smoothed. Time is that of training: what an evaluation,
a checkpoint or a stop took does not count. It needs no accelerator, so it can look at runs in progress.
"""

if __name__ == "__main__":
    import program

    program.begin()

import math
import os
import sys
from dataclasses import MISSING, dataclass

import numpy as np

import utils
from tools import common
from training import platforms
from utils import UserError


@dataclass(frozen=True)
class Options:
    """Draw the losses of runs over tokens and over time, and print a table."""

    runs: tuple[str, ...] = utils.flag(MISSING, positional=True)
    """Run directories, or their gs:// or s3:// addresses."""
    output: str = "compare.png"
    """Picture to write: .png, .svg or .pdf."""


if __name__ == "__main__":
    platforms.choose_cpu()  # the accelerators may belong to a run
    options_given = utils.one_sentence(
        lambda: utils.read_flags(Options, sys.argv[1:], "tools/compare.py")
    )

from tools import curves
from training import runlog

UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def names(folders):
    """A name for each run: its folder's, or the whole path where two have that."""
    short = [os.path.basename(folder.rstrip("/")) for folder in folders]
    return short if len(set(short)) == len(short) else folders


def rows(runs):
    """Cells of the table of {name: Curve}."""
    cells = []
    for name, run in runs.items():
        total, active = run.parameters
        cells.append(
            [
                name,
                curves.in_millions(total),
                curves.in_millions(active),
                curves.in_millions(run.tokens[-1]),
                f"{run.val_loss[-1]:.4f}",
                f"{min(run.finite_val_loss, default=math.nan):.4f}",
                f"{run.tokens_per_second:,.0f}",
            ]
        )
    return cells


HEADINGS = ["run", "parameters", "active", "tokens", "final loss", "best loss", "tokens/s"]


def smoothed(x):
    """Mean of each value with those around it, a 25th of the whole in all; without what is not finite. [n] -> [n]"""
    reach = len(x) // 50
    finite = np.isfinite(x)
    sums = np.cumsum([0.0, *np.where(finite, x, 0)])
    counts = np.cumsum([0, *finite])
    at = np.arange(len(x))
    first, end = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(x))
    n = counts[end] - counts[first]
    return np.where(n, (sums[end] - sums[first]) / np.maximum(n, 1), np.nan)


def draw(runs):
    """The Figure of {name: Curve}."""
    figure = runlog.new_figure(11, 4.5, dpi=120)
    over_tokens, over_time = figure.subplots(1, 2, sharey=True)
    longest = max(run.seconds[-1] for run in runs.values())
    unit, size = next((unit for unit in UNITS if longest >= 3 * unit[1]), UNITS[-1])
    for i, (name, run) in enumerate(runs.items()):
        draw_run(over_tokens, run.tokens, run, name, f"C{i}")
        draw_run(over_time, run.seconds / size, run, name, f"C{i}")
    # the first steps' losses, above the first evaluation's, would leave no room for the others
    highest = [max(run.finite_val_loss) for run in runs.values() if len(run.finite_val_loss)]
    if highest:
        over_tokens.set_ylim(top=1.05 * max(highest))
    over_tokens.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    over_tokens.xaxis.set_major_formatter(curves.tick)
    over_time.set(xlabel=f"{unit} of training")
    over_tokens.legend(fontsize=8)
    return figure


def draw_run(axes, x, run, name, color):
    """One run's losses over x [n]."""
    axes.plot(x, smoothed(run.train_loss), lw=1, alpha=0.3, color=color)
    axes.plot(x[run.evaluated], run.val_loss, "o-", ms=3, lw=1.2, color=color, label=name)
    axes.grid(alpha=0.3)


def main(options):
    """Print the table and write the picture of the runs; returns {name: Curve}."""
    if not options.runs:
        raise UserError("compare.py: give the run directories to compare, such as runs/tiny.")
    curves.check_picture(options.output, "--output")
    runs = {}
    for name, folder in zip(names(options.runs), options.runs):
        runs[name] = curves.read_curve(folder)
    print("\n".join(curves.markdown(HEADINGS, rows(runs))))
    kind = os.path.splitext(options.output)[1][1:]
    utils.write_file(options.output, runlog.picture(draw(runs), kind))
    print(f"\nthe losses are drawn in {options.output}")
    return runs


if __name__ == "__main__":
    common.run(lambda: main(options_given))
