"""The ladder: runs of growing size by the recipe, the curve through their losses, and what it predicts. No jax.

`dev/ladder.py` trains the runs and writes ladder.json beside this file. A prediction holds for the corpus and the
vocabulary of these runs alone: the tokens of another text are easier or harder to guess.
"""

import functools
import math
import pathlib
from typing import NamedTuple

import numpy as np

from runtime.files import read_json

RECORD = str(pathlib.Path(__file__).with_name("ladder.json"))
# Standard deviation of a loss's logarithm from seed to seed, at least: few rungs may lie on a curve by chance.
SEED_NOISE = 0.005


class Curve(NamedTuple):
    """loss = floor + scale x operations^-exponent (arXiv:2203.15556, section 3.3).

    No training gets below the floor. What a loss has above it is a straight line over operations, both in logarithms.
    """

    floor: float  # nats per token
    scale: float
    exponent: float
    noise: float  # standard deviation of the logarithm of a loss around the curve
    uncertainty: np.ndarray  # [3, 3]: covariance of (floor, log scale, exponent) over noise^2

    def loss(self, operations):
        """Nats per token after a training of that many operations."""
        return self.floor + self.scale * operations**-self.exponent

    def error(self, operations):
        """Standard error of a single run's loss there, in nats. It grows with the distance from the rungs."""
        g = gradient(self.floor, self.scale, self.exponent, np.array([operations]))[0]
        return self.loss(operations) * self.noise * math.sqrt(1 + g @ self.uncertainty @ g)

    def operations(self, loss):
        """Operations of a training that ends with this loss; inf where none does."""
        if loss <= self.floor:
            return math.inf
        return ((loss - self.floor) / self.scale) ** (-1 / self.exponent)


def gradient(floor, scale, exponent, operations):
    """d log(loss) / d (floor, log scale, exponent) at operations [n]: [n, 3]."""
    above = scale * operations**-exponent
    return np.stack([above**0, above, -above * np.log(operations)], 1) / (floor + above)[:, None]


def curve_through(rungs):
    """The `Curve` of least squares, in the logarithm of the loss, through [(operations, loss)] of four rungs or
    more."""
    operations, losses = np.array(rungs).T
    best = (math.inf,)
    for floor in np.linspace(0, 0.95 * min(losses), 1000):
        slope, height = np.polyfit(np.log(operations), np.log(losses - floor), 1)
        fitted = floor + np.exp(height) * operations**slope
        squares = (np.log(fitted / losses) ** 2).sum()
        best = min(best, (squares, floor, math.exp(height), -slope))
    squares, *found = best
    g = gradient(*found, operations)
    noise = math.sqrt(squares / (len(rungs) - 3))
    return Curve(*found, max(noise, SEED_NOISE), np.linalg.pinv(g.T @ g))


def rungs_of(record):
    """{width: (operations, loss)} of the rungs of a record: of each width the run as designed, with seed 0."""
    of_rung = dict(rate=1, seed=0, tokens_per_parameter=record["tokens_per_parameter"])
    found = {}
    for run in record["runs"].values():
        if all(run[name] == value for name, value in of_rung.items()):
            found[run["width"]] = run["operations"], run["loss"]
    return dict(sorted(found.items()))


@functools.cache
def record():
    """ladder.json."""
    return read_json(RECORD)


@functools.cache
def curve():
    """The `Curve` through all rungs of ladder.json."""
    return curve_through([*rungs_of(record()).values()])


def applies_to(manifest):
    """Whether predictions hold for shards with this manifest: the same text, and a vocabulary of the same size."""
    corpus = record()["corpus"]
    return all(manifest.get(name) == corpus[name] for name in ("source", "vocab_size"))


def predicted_loss(operations):
    """(nats per token, standard error): the loss on the validation split that a run by the recipe will end with, after
    that many `operations`, which are `model.flops_per_token` for each token of the run."""
    return curve().loss(operations), curve().error(operations)


def operations_for(loss):
    """The operations of a run by the recipe that will end with this loss, in nats per token; inf where none will."""
    return curve().operations(loss)
