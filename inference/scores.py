"""-log p of sequences, a batch at a time on the mesh, and means with standard errors."""

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

    ids: np.ndarray  # int [n + 1]: n targets, each after those before it
    first: int  # targets at its beginning that are context alone
    unit: int  # number of the cluster that it belongs to


class Scored(NamedTuple):
    """The result for the targets of a `Piece` that count."""

    unit: int
    loss: float  # sum of -log p, nats
    tokens: int
    greedy: bool  # whether greedy decoding would draw every one of them


def make_scorer(cfg, mesh, batch_size):
    """`score(params, pieces, T)`: an iterable of `Piece`s of at most T targets -> an iterator over their `Scored`, in
    order. Every process gives the same pieces and gets all of the results. Batches are batch_size sequences per device
    of dp and stage of pp. They are padded to T; without it to a length of `length_for`."""
    dp, pp, _ = cfg.run.n_device_axis
    rows = pp * batch_size * dp
    sharding = NamedSharding(mesh, P(*collectives.BATCH_SPEC[1:]))
    scores = jax.jit(model.make_score(cfg, mesh), out_shardings=NamedSharding(mesh, P()))

    def score(params, pieces, T=None):
        pieces = iter(pieces)
        while batch := list(itertools.islice(pieces, rows)):
            longest = max(len(piece.ids) for piece in batch) - 1
            arrays = pad(batch, rows, fit_kernel(cfg, mesh, T or length_for(longest)))
            placed = []
            for x in arrays:
                x = x.reshape(pp, -1, x.shape[1])
                placed.append(jax.make_array_from_callback(x.shape, sharding, x.__getitem__))
            counts = arrays[1] >= 0
            found = scores(params, *placed)
            losses, greedy = (np.asarray(x).reshape(counts.shape) for x in found)
            sums = losses.sum(1, dtype=np.float64).tolist()
            numbers = counts.sum(1).tolist()
            greedy = (greedy | ~counts).all(1).tolist()
            for piece, *row in zip(batch, sums, numbers, greedy):
                yield Scored(piece.unit, *row)

    return score


def fit_kernel(cfg, mesh, length):
    """The smallest length from `length` on of sequences that tp and the kernel of attention can divide."""
    kernel = ATTENTION[model.for_devices(cfg, mesh).model.attention]
    multiple = math.lcm(cfg.run.n_device_axis[2], kernel.multiple)
    return math.ceil(length / multiple) * multiple


def pad(batch, rows, T):
    """(ids, targets), each int32 [rows, T], of `Piece`s; -1 is no target: padding and context."""
    ids = np.zeros((rows, T), np.int32)
    targets = np.full((rows, T), -1, np.int32)
    for i, piece in enumerate(batch):
        n = len(piece.ids) - 1
        ids[i, :n] = piece.ids[:-1]
        targets[i, piece.first : n] = piece.ids[1 + piece.first :]
    return ids, targets


def length_for(n):
    """The smallest length of 32, 48, 64, 96, 128, 192, .. that n tokens fit in: less than a third is padding."""
    length = 32
    while length < n:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return length


def mean(sums, weights):
    """Weighted mean sum(sums) / sum(weights) over independent clusters and its cluster-robust standard error (Cochran,
    Sampling techniques, section 6.4: the ratio estimator's), None for one cluster. Arrays [clusters]."""
    n, total = len(sums), float(weights.sum())
    value = float(sums.sum()) / total
    if n < 2:
        return value, None
    residuals = np.square(sums - value * weights).sum()
    return value, math.sqrt(n / (n - 1) * residuals) / total
