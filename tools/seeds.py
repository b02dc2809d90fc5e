"""Variations trained with several seeds each: means, standard errors, a table and a picture.

Every variation is compared with the first one seed by seed: runs of one seed saw the same data in the same order, so
their difference usually varies less than their losses do.
"""

import math

import numpy as np

import model
from tools import curves
from training import runlog

# --- Numbers ----------------------------------------------------------------------------------------------------


def measured(values):
    """{"mean", "standard_error"} of one value for each seed, the latter None for a single one; None for no value."""
    if not values:
        return None
    error = None
    if len(values) > 1:
        error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    return dict(mean=float(np.mean(values)), standard_error=error)


def marks_of(first):
    """Up to three evaluations of a Curve, at about a quarter, half and three quarters of it: [tokens]."""
    n = len(first.evaluated)
    chosen = {math.ceil(n * quarter / 4) - 1 for quarter in (1, 2, 3)}
    return [int(first.val_tokens[i]) for i in sorted(chosen - {n - 1})]


def results(finished, marks, target):
    """{name: `numbers`} of the variations with finished runs, beside the first variation.

    finished: {name: {seed: Curve}}. marks: numbers of tokens; none: some of the first variation's evaluations. target:
    a loss; None: the first variation's final one, of each seed its own.
    """
    first = next(iter(finished.values()))
    if not marks and first:
        marks = marks_of(next(iter(first.values())))
    found = {}
    for name, runs in finished.items():
        if runs:
            found[name] = numbers(runs, first, marks, target)
    return found


def numbers(runs, first, marks, target):
    """{name: value} of a variation. runs, first: {seed: Curve} of it and of the first variation; marks: tokens;
    target: a loss, None for the final one of the first variation with the same seed."""
    pairs = [(run, first[seed]) for seed, run in runs.items() if seed in first]
    to_target, shares = [], []
    for run, other in pairs:
        loss = other.val_loss[-1] if target is None else target
        to_target.append(run.tokens_to(loss))
        shares.append(run.tokens_to(loss) / other.tokens_to(loss))
    one = next(iter(runs.values()))
    total, active = one.parameters
    return dict(
        parameters=total,
        active_parameters=active,
        flops_per_token=model.flops_per_token(one.cfg),
        seconds_per_token=measured([1 / run.tokens_per_second for run in runs.values()]),
        loss_at={mark: measured([run.loss_at(mark) for run in runs.values()]) for mark in marks},
        final_loss=measured([run.val_loss[-1] for run in runs.values()]),
        difference=measured([run.val_loss[-1] - other.val_loss[-1] for run, other in pairs]),
        tokens_to_target=measured(to_target),
        share_of_tokens=measured(shares),
        seeds={seed: curve_numbers(run) for seed, run in runs.items()},
    )


def curve_numbers(run):
    """What the JSON file keeps of a Curve: its evaluations."""
    return dict(
        folder=run.folder,
        tokens=run.val_tokens.tolist(),
        seconds=run.seconds[run.evaluated].tolist(),
        loss=run.val_loss.tolist(),
    )


# --- The table and the picture -----------------------------------------------------------------------------------


def cell(value, form, factor=1, sign=""):
    """What `measured` returns as text, each number as `form` says; "-" where there is none."""
    if value is None or math.isnan(value["mean"]):
        return "-"
    numbers = [format(factor * x, form) for x in value.values() if x is not None]
    numbers[0] = format(factor * value["mean"], sign + form)
    return " ± ".join(numbers)


def row(name, one, first):
    """Cells of the table for the variation `name` with `numbers` one; first: name of the first variation."""
    difference, share = "-", "1"
    if name != first:
        difference = cell(one["difference"], ".4f", sign="+")
        share = cell(one["share_of_tokens"], ".3f")
    return [
        name,
        curves.in_millions(one["parameters"]),
        *[cell(loss, ".4f") for loss in one["loss_at"].values()],
        cell(one["final_loss"], ".4f"),
        difference,
        cell(one["tokens_to_target"], ".3f", 1e-6),
        share,
        f"{one['flops_per_token'] / 1e6:.2f}",
        cell(one["seconds_per_token"], ".1f", 1e6),
    ]


def table(found, first):
    """Lines of a Markdown table of `results`; first: name of the first variation."""
    marks = next(iter(found.values()))["loss_at"]
    headings = [
        "variation",
        "parameters",
        *[f"loss at {curves.in_millions(mark)}" for mark in marks],
        "final loss",
        f"against {first}",
        "M tokens to target",
        f"x {first}'s",
        "MFLOP/token",
        "µs/token",
    ]
    return curves.markdown(headings, [row(name, one, first) for name, one in found.items()])


def draw(found):
    """The Figure of `results`: the mean over seeds and a band of its standard error over tokens."""
    figure = runlog.new_figure(7, 4.5, dpi=120)
    axes = figure.subplots()
    for i, (name, one) in enumerate(found.items()):
        runs = list(one["seeds"].values())
        losses = [measured(of_seeds) for of_seeds in zip(*[run["loss"] for run in runs])]
        mean = np.array([loss["mean"] for loss in losses])
        error = np.array([loss["standard_error"] or 0.0 for loss in losses])
        tokens = runs[0]["tokens"]
        axes.plot(tokens, mean, "o-", ms=3, lw=1.2, color=f"C{i}", label=name)
        axes.fill_between(tokens, mean - error, mean + error, alpha=0.25, color=f"C{i}", lw=0)
    axes.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    axes.xaxis.set_major_formatter(curves.tick)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
