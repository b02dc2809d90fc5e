"""Score sequences (-log p of their tokens) in batches on the mesh, and average the scores with standard errors."""

import itertools
import math
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

    # int [n + 1]: each token but the first is a target, predicted from those before it
    ids: np.ndarray
    first: int  # number of targets at the beginning that are only context and do not count
    unit: int  # number of the cluster, such as the document, that the sequence belongs to


class Scored(NamedTuple):
    """The result for a `Piece`, over its targets that count."""

    unit: int
    loss: float  # sum of -log p, nats
    tokens: int
    greedy: bool  # whether greedy decoding would choose each of them


def make_scorer(cfg, mesh, batch_size):
    """`score(params, pieces, T)`: an iterable of `Piece`s of at most T targets -> an iterator over their `Scored`.

    Results come in the order of the pieces. Every process passes the same pieces and gets all results. A batch has
    batch_size sequences per device of dp and stage of pp. It is padded to T or, where T is None, to a length of
    `length_for`, so that few lengths are compiled.
    """
    dp, pp, _ = cfg.run.n_device_axis
    rows = pp * batch_size * dp
    sharding = NamedSharding(mesh, P(*collectives.BATCH_SPEC[1:]))
    scores = jax.jit(model.make_score(cfg, mesh), out_shardings=NamedSharding(mesh, P()))

    def score(params, pieces, T=None):
        pieces = iter(pieces)
        while batch := list(itertools.islice(pieces, rows)):
            longest = max(len(piece.ids) for piece in batch) - 1
            arrays = pad(batch, rows, fit_kernel(cfg, mesh, T or length_for(longest)))
            on_devices = []
            for x in arrays:
                x = x.reshape(pp, -1, x.shape[1])
                on_devices.append(jax.make_array_from_callback(x.shape, sharding, x.__getitem__))
            counts = arrays[1] >= 0
            found = scores(params, *on_devices)
            losses, greedy = (np.asarray(x).reshape(counts.shape) for x in found)
            sums = losses.sum(1, dtype=np.float64).tolist()
            n_tokens = counts.sum(1).tolist()
            greedy = (greedy | ~counts).all(1).tolist()
            for piece, *row in zip(batch, sums, n_tokens, greedy):
                yield Scored(piece.unit, *row)

    return score


def fit_kernel(cfg, mesh, length):
    """`length`, rounded up to a multiple that tp divides and that the attention kernel accepts."""
    kernel = ATTENTION[model.for_devices(cfg, mesh).model.attention]
    multiple = math.lcm(cfg.run.n_device_axis[2], kernel.multiple)
    return math.ceil(length / multiple) * multiple


def pad(batch, rows, T):
    """(ids, targets) of `Piece`s, each int32 [rows, T]. A target of -1, for padding and context, does not count."""
    ids = np.zeros((rows, T), np.int32)
    targets = np.full((rows, T), -1, np.int32)
    for i, piece in enumerate(batch):
        n = len(piece.ids) - 1
        ids[i, :n] = piece.ids[:-1]
        targets[i, piece.first : n] = piece.ids[1 + piece.first :]
    return ids, targets


def length_for(n):
    """The smallest of the lengths 32, 48, 64, 96, 128, 192, ... into which n tokens fit. From 32 on, less than a third
    is padding."""
    length = 32
    while length < n:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return length


def weighted_mean(sums, weights):
    """The weighted mean sum(sums) / sum(weights) over independent clusters, and its standard error.

    sums, weights: arrays [clusters]. The error is cluster-robust, that of the ratio estimator (Cochran, Sampling
    techniques, section 6.4), and None for a single cluster.
    """
    n = len(sums)
    total = float(weights.sum())
    value = float(sums.sum()) / total
    if n < 2:
        return value, None
    residuals = np.square(sums - value * weights).sum()
    return value, math.sqrt(n / (n - 1) * residuals) / total
