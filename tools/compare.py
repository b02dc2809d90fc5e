"""Compare the losses of runs with those of the first, in a table and a picture.

python tools/compare.py runs/tiny runs/gpt2-tiny --output compare.png
python tools/compare.py runs/base-seed* runs/high-seed*

Runs whose names differ only in an ending -seedN share a line, which has their mean and its standard error.
"""

if not __package__:
    import startup

    startup.prepare()

import io
import math
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

import model
import utils
from config import resume
from config.flags import compare
from config.parser import argument
from logs.rows import read_rows
from runtime.files import check_writable, read_json, write_file
from runtime.messages import UserError, short, warn
from tools import common
from training.sizes import tokens_per_step


class Curve(NamedTuple):
    """The evaluations of a run; there are e of them."""

    folder: str
    cfg: utils.Config
    text: tuple  # everything on which the evaluated text depends
    tokens: np.ndarray  # [e] tokens trained on before each evaluation
    loss: np.ndarray  # [e] cross-entropy, nats per token
    # tokens per second: the median over steps, which ignores slow spells of the machine
    speed: float

    def tokens_to(self, loss):
        """Tokens until the loss was first at most `loss`, interpolated linearly between evaluations; nan: never."""
        reached = np.flatnonzero(self.loss <= loss)
        if not len(reached):
            return math.nan
        ends = slice(max(0, reached[0] - 1), reached[0] + 1)  # of the line on which it is reached
        # negative, since the loss falls and np.interp requires rising abscissae
        return float(np.interp(-loss, -self.loss[ends], self.tokens[ends]))


def read_curve(folder):
    """The `Curve` of the run in a folder. Raises UserError where there is no run or no evaluation."""
    config = read_json(folder, "config.json")
    if "n_device_axis" not in config:
        raise UserError(f"{folder}: is no run directory, which holds a config.json of main.py.")
    resume.check_stored(config, folder, resume.NEEDED_TO_RESUME)
    cfg = common.stored_config(config)
    rows = read_rows(folder)
    evaluated = [row for row in rows if "loss/val_cross_entropy_loss" in row]
    if not evaluated:
        raise UserError(f"{folder}: its metrics.jsonl holds no evaluation yet.")
    per_step = tokens_per_step(cfg)
    _, batch = resume.global_batches(config)
    return Curve(
        folder=folder,
        cfg=cfg,
        text=(config.get("data_fingerprint"), cfg.model.T, cfg.run.eval_steps, batch),
        tokens=per_step * np.array([row["step"] for row in evaluated]),
        loss=np.array([row["loss/val_cross_entropy_loss"] for row in evaluated]),
        speed=float(np.median([row.get("tokens_per_second", math.nan) for row in rows])),
    )


def mean_and_error(values):
    """(mean, its standard error) over the first dim of values [seed, ...]; the error of a single seed is 0."""
    n = len(values)
    return np.mean(values, 0), np.std(values, 0, ddof=min(1, n - 1)) / math.sqrt(n)


def cell(values, form):
    """`mean_and_error` of a list as text; "-" where it is empty or has a nan."""
    if not values or math.isnan(sum(values)):
        return "-"
    mean, error = mean_and_error(values)
    return common.cell(mean, error if len(values) > 1 else None, form)


def table(groups, marks, target):
    """A Markdown table that compares groups of runs, {name: {seed: Curve}}, with the first. marks, target: the
    flags."""
    first_name, first = next(iter(groups.items()))
    if not marks:
        tokens = next(iter(first.values())).tokens
        marks = np.unique(np.quantile(tokens, (0.25, 0.5, 0.75), method="lower"))
    rows = []
    for name, runs in groups.items():
        curves = list(runs.values())
        cfg = curves[0].cfg
        total, active, embedding = model.count_params(cfg)
        row = {"run": name}
        row["parameters"] = short(total + embedding)
        row["active"] = short(active + embedding)
        row["tokens"] = short(curves[0].tokens[-1])
        for mark in marks:
            losses = [np.interp(mark, run.tokens, run.loss, math.nan, math.nan) for run in curves]
            row[f"loss at {short(mark)}"] = cell(losses, ".4f")
        row["final loss"] = cell([run.loss[-1] for run in curves], ".4f")
        differences = []
        to_target = []
        shares = []
        for seed in sorted(runs.keys() & first.keys()):
            run, other = runs[seed], first[seed]
            loss = other.loss[-1] if target is None else target
            reached = run.tokens_to(loss)
            differences.append(run.loss[-1] - other.loss[-1])
            to_target.append(reached / 1e6)
            shares.append(reached / other.tokens_to(loss))
        row[f"against {first_name}"] = cell(differences, "+.4f")
        row["M tokens to target"] = cell(to_target, ".3f")
        row[f"x {first_name}'s"] = cell(shares, ".3f")
        row["MFLOP/token"] = f"{model.flops_per_token(cfg) / 1e6:.2f}"
        row["tokens/s"] = cell([run.speed for run in curves], ",.0f")
        rows.append(row)
    return common.markdown(rows)


def picture(groups, file_format):
    """Bytes of a picture of groups of runs: the mean over seeds, in a band of its standard error."""
    # without pyplot, which may look for a display
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for i, (name, runs) in enumerate(groups.items()):
        curves = list(runs.values())
        e = min(len(run.loss) for run in curves)
        mean, error = mean_and_error([run.loss[:e] for run in curves])
        tokens = curves[0].tokens[:e]
        axes.plot(tokens, mean, "o-", ms=3, lw=1.2, color=f"C{i}", label=name)
        axes.fill_between(tokens, mean - error, mean + error, alpha=0.25, color=f"C{i}", lw=0)
    axes.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda tokens, _: short(tokens) if tokens else "0")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format=file_format)
    return image.getvalue()


def read_groups(folders):
    """Read run directories and group them: {name: {seed: Curve}}.

    All NAME-seedN are one group NAME; any other run is a group by itself. Raises UserError where runs of a group differ
    in more than their seed. Warns where they differ in length, or where runs were evaluated on different texts.
    """
    names = [os.path.basename(folder.rstrip("/")) for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    groups = {}
    curves = [read_curve(folder) for folder in folders]
    for name, curve in zip(names, curves):
        group = re.sub(r"-seed\d+$", "", name)
        runs = groups.setdefault(group, {})
        runs[name.removeprefix(group)] = curve
        first = next(iter(runs.values()))
        whose = f"{curve.folder} has it, and {first.folder} has"
        advice = "give runs that differ in more than their seed names that differ before -seed"
        flags = resume.to_resume(first.cfg, "") | {"training_steps": first.cfg.run.training_steps}
        compare(curve.cfg, flags, utils.FIELDS.keys() - {"seed"}, whose, advice)
        if curve.tokens[-1] != first.tokens[-1]:
            warn(f"{curve.folder} and {first.folder} are averaged, but one has trained for longer")
        if curve.text != curves[0].text:
            warn(f"{curve.folder} was evaluated on other text than {curves[0].folder}")
    return groups


@dataclass(frozen=True)
class Options:
    """Compare the losses of runs."""

    runs: tuple[str, ...] = argument()
    """Run directories, or their gs:// or s3:// addresses. The others are compared with the first."""
    output: str = "compare.png"
    """Picture to write: .png, .svg or .pdf."""
    marks: tuple[float, ...] = ()
    """Numbers of tokens at which the table shows the loss; without it, those of three evaluations of the first run."""
    target: float | None = None
    """Loss to reach; without it, the final loss of the first run, seed by seed."""


def main(options):
    """Print the table and write the picture. Raises UserError."""
    output = options.output
    if not output.endswith((".png", ".svg", ".pdf")):
        raise UserError(
            "must be a file that ends in .png, .svg or .pdf", flag="output", value=output
        )
    check_writable(output, "output")
    groups = read_groups(options.runs)
    print(table(groups, options.marks, options.target))
    write_file(output, picture(groups, output[-3:]))
    print(f"\nthe losses are drawn in {output}")


if __name__ == "__main__":
    common.run_on_cpu(Options, "tools/compare.py", main)
