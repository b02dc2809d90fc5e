"""The ladder: runs of growing size by the recipe, a line through their losses, and what it predicts. No jax.

`dev/ladder.py` trains the runs and writes ladder.json beside this file. A prediction holds for the corpus and the
vocabulary of these runs alone: of another text, each token is easier or harder to guess.
"""

import functools
import json
import math
import pathlib
from typing import NamedTuple

import numpy as np

RECORD = pathlib.Path(__file__).with_name("ladder.json")
# Losses of two seeds differ by about this factor's logarithm, so that no line through few rungs is surer than that.
SEED_NOISE = 0.005


class Line(NamedTuple):
    """A straight line through losses and operations, both in logarithms: loss = scale x operations^-exponent."""

    scale: float
    exponent: float
    scatter: float  # standard deviation of the logarithm of a loss around the line
    center: float  # mean of the logarithms of the operations
    spread: float  # sum of their squared distances from it
    n: int  # rungs

    def loss(self, operations):
        """Nats per token after a training of so many operations."""
        return self.scale * operations**-self.exponent

    def error(self, operations):
        """Standard error of a single run's loss there, in nats. It grows with the distance from the rungs."""
        distance = math.log(operations) - self.center
        return (
            self.loss(operations)
            * self.scatter
            * math.sqrt(1 + 1 / self.n + distance**2 / self.spread)
        )

    def operations(self, loss):
        """Operations of a training that ends with this loss."""
        return (self.scale / loss) ** (1 / self.exponent)


def line_through(rungs):
    """The `Line` of least squares through [(operations, loss)] of three rungs or more."""
    operations, losses = np.log(np.array(rungs)).T
    center = operations.mean()
    distances = operations - center
    spread = (distances**2).sum()
    slope = (distances * losses).sum() / spread
    height = losses.mean()
    residuals = losses - height - slope * distances
    scatter = math.sqrt((residuals**2).sum() / (len(rungs) - 2))
    return Line(
        scale=math.exp(height - slope * center),
        exponent=-slope,
        scatter=max(scatter, SEED_NOISE),
        center=center,
        spread=spread,
        n=len(rungs),
    )


def rungs_of(record):
    """{width: (operations, loss)} of the rungs of a record: their runs as designed, and the mean of their seeds."""
    found = {}
    for run in record["runs"].values():
        if run["rate"] == 1 and run["tokens_per_parameter"] == record["tokens_per_parameter"]:
            found.setdefault(run["width"], []).append((run["operations"], run["loss"]))
    return {width: tuple(np.mean(found[width], 0)) for width in sorted(found)}


@functools.cache
def record():
    """ladder.json."""
    return json.loads(RECORD.read_text())


@functools.cache
def line():
    """The `Line` through all rungs of ladder.json."""
    return line_through([*rungs_of(record()).values()])


def applies_to(manifest):
    """Whether predictions hold for shards with this manifest: the same text, divided into as many kinds of tokens."""
    corpus = record()["corpus"]
    return all(manifest.get(name) == corpus[name] for name in ("source", "vocab_size"))


def predicted_loss(operations):
    """(nats per token, standard error): the loss on the validation split that a run by the recipe will end with, after
    so many `operations`, which are `model.flops_per_token` for each token of the run."""
    return line().loss(operations), line().error(operations)


def operations_for(loss):
    """The operations of a run by the recipe that will end with this loss, in nats per token."""
    return line().operations(loss)
