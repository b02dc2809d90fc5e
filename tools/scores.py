"""-log p of sequences, a batch at a time on the mesh, and means with standard errors."""

import itertools
import math
from collections import deque
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
import model
from kernels.attention import ATTENTION


class Piece(NamedTuple):
    """A sequence to score."""

    ids: np.ndarray  # int [n + 1]: n targets, each after what stands before it
    first: int  # targets at its beginning that are context alone
    unit: int  # number of the cluster that it belongs to


def make_scorer(cfg, mesh, params, batch_size):
    """`score(pieces, T)`: an iterable of `Piece`s of at most T targets -> an iterator over their (unit, sum of -log p
    of the targets that count, their number), in order.

    Batches are batch_size sequences per device of dp and stage of pp. All are padded to one length, so that one program
    is compiled.
    """
    dp, pp, tp = cfg.run.n_device_axis
    kernel = ATTENTION[model.for_devices(cfg, mesh).model.attention]
    multiple = math.lcm(tp, kernel.multiple)  # of which the length must be one
    rows = pp * batch_size * dp
    scores = jax.jit(model.make_score(cfg, mesh))
    sharding = NamedSharding(mesh, P(*collectives.BATCH_SPEC[1:]))

    def begin(batch, T):
        ids = np.zeros((rows, T), np.int32)
        targets = np.full((rows, T), -1, np.int32)  # no target: padding and context
        for i, piece in enumerate(batch):
            n = len(piece.ids) - 1
            ids[i, :n] = piece.ids[:-1]
            targets[i, piece.first : n] = piece.ids[1 + piece.first :]
        microbatches = ids.reshape(pp, -1, T), targets.reshape(pp, -1, T)
        return batch, scores(params, *jax.device_put(microbatches, sharding))

    def end(batch, losses):
        for piece, row in zip(batch, np.asarray(losses, np.float64).reshape(rows, -1)):
            yield piece.unit, row.sum(), len(piece.ids) - 1 - piece.first

    def score(pieces, T):
        T = math.ceil(T / multiple) * multiple
        pieces, running = iter(pieces), deque()
        while batch := list(itertools.islice(pieces, rows)):
            running.append(begin(batch, T))
            if len(running) > 1:  # the devices score a batch while the host makes the next one
                yield from end(*running.popleft())
        for batch in running:
            yield from end(*batch)

    return score


def mean(sums, weights):
    """Weighted mean sum(sums) / sum(weights) over independent clusters and its cluster-robust standard error (Cochran,
    Sampling techniques, section 6.4: the ratio estimator's), None for one cluster. Arrays [clusters]."""
    n, total = len(sums), float(weights.sum())
    value = float(sums.sum()) / total
    if n < 2:
        return value, None
    residuals = np.square(sums - value * weights).sum()
    return value, math.sqrt(n / (n - 1) * residuals) / total
