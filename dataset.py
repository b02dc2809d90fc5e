"""Corpora of shards, the order of sequences, and putting a batch on the mesh.

A shard is a one-dimensional .npy file of token ids; sequence i of a shard is its tokens i*T .. i*T + T, the last of
which is only a target. The order is a pure function of (shards, seed, number of sequences consumed): it knows nothing
of hosts, devices, batches or steps, so a run goes on anywhere at the same place, and its whole state is one integer.
"""

import functools
import itertools
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import numpy as np
from jax.sharding import NamedSharding

from data.storage import BLOCK, Cache, Shard, list_shards
from data.tokenization import TOKENIZER_FILES, keep_tokenizer, load_tokenizer
from model import BATCH_SPEC
from utils import UserError, is_remote, read_json

WINDOW = (
    1 << 30
)  # tokens whose sequences are shuffled together; each window touches few shards, however many there are
CHECK_AT_START = (
    1 << 28
)  # tokens of local shards up to which all are checked before training begins (about a second)
PERIOD = 100_000  # sequences after which the pattern of a mixture repeats; no corpus can have a smaller share than one
READERS = ThreadPoolExecutor(32, "read")  # remote storage is slow to answer, not slow to send

# --- Sequences --------------------------------------------------------------------------------------------------


class Corpus:
    """The shards of `folder` inside `root`, read as sequences of T + 1 tokens.

    Raises UserError, naming the folder or the file, where shards are missing, unreadable, or do not fit the
    vocabulary or the tokeniser.
    """

    def __init__(self, cfg, root, folder):
        d, m = cfg.data, cfg.model
        self.T, self.vocab_size = m.T, m.vocab_size
        self.folder = os.path.join(root, folder)
        self.manifest = read_json(self.folder, "manifest.json")
        self.shards = self._open(Cache(os.path.join(d.cache_dir, "blocks"), d.cache_gb * 1e9))
        self.tokenizer = self._tokenizer(d, root)
        lengths = list(READERS.map(lambda shard: shard.length, self.shards))
        self.counts = np.array([max(0, (n - 1) // self.T) for n in lengths])
        self.n_sequences = int(self.counts.sum())
        if not self.n_sequences:
            raise UserError(
                f"--T {self.T}: the shards in {self.folder} hold no sequence of {self.T + 1} tokens."
            )
        if not is_remote(root) and sum(lengths) <= CHECK_AT_START:
            list(READERS.map(self._check, self.shards))

    def _open(self, cache):
        """The shards, by name; the manifest, where there is one, says which must be there."""
        there = list_shards(self.folder)
        about = {shard["name"]: shard for shard in self.manifest.get("shards", [])}
        if missing := [name for name in about if name not in there]:
            raise UserError(
                f"--bucket_name: {os.path.join(self.folder, missing[0])} is missing, although the "
                f"manifest beside it lists it."
            )
        if not there:
            raise UserError(
                f"--bucket_name: there are no shards (.npy) in {self.folder}; data/tokenize_shards.py "
                f"makes them, and run.sh local does so by itself."
            )
        return [
            Shard(os.path.join(self.folder, n), there[n], about.get(n, {}), cache) for n in there
        ]

    def _check(self, shard):
        for start in range(0, shard.length, BLOCK):
            shard.tokens(start, min(start + BLOCK, shard.length), self.vocab_size)

    def _tokenizer(self, d, root):
        """Name or file of the tokeniser, checked against the manifest and the vocabulary; "" where nothing tells."""
        made_with, vocabulary = (
            self.manifest.get("tokenizer", ""),
            self.manifest.get("vocab_size", 0),
        )
        if vocabulary > self.vocab_size:
            raise UserError(
                f"--vocab_size {self.vocab_size}: the shards in {self.folder} were made with a vocabulary "
                f"of {vocabulary} ({made_with}); give that or other shards."
            )
        given = os.path.basename(d.tokenizer)
        # a tokeniser's file is copied beside the shards under one name, so only its kind can be compared
        same_kind = os.path.splitext(given)[1] == os.path.splitext(made_with)[1] in TOKENIZER_FILES
        if given and made_with and given != made_with and not same_kind:
            raise UserError(
                f"--tokenizer {d.tokenizer}: the shards in {self.folder} were made with {made_with}; give "
                f"that one or other shards."
            )
        if not made_with.endswith(TOKENIZER_FILES):
            return d.tokenizer or made_with
        path = os.path.join(root, made_with)
        if not is_remote(path):
            return path
        copies = os.path.join(d.cache_dir, self.manifest["tokenizer_sha256"])
        copy = os.path.join(copies, made_with)
        if not os.path.exists(copy):
            keep_tokenizer(copies, path)
        return copy

    @property
    def bytes_per_token(self):
        """Mean UTF-8 bytes of a token, or None where no manifest tells."""
        return (
            self.manifest["bytes"] / self.manifest["tokens"]
            if self.manifest.get("tokens")
            else None
        )

    def read(self, places, order):
        """int32 [n, T + 1]: the sequences at `places` [n] of the shards laid end to end in `order`."""
        ends = np.cumsum(self.counts[order])
        at = np.searchsorted(ends, places, "right")
        starts = (places - ends[at] + self.counts[order[at]]) * self.T
        rows = np.empty((len(places), self.T + 1), np.int32)

        def fill(near):
            for row in near:
                start = int(starts[row])
                rows[row] = self.shards[order[at[row]]].tokens(
                    start, start + self.T + 1, self.vocab_size
                )

        # the headers first, then by one thread the rows that begin in one block of uint16: no two fetch the same block
        list(READERS.map(lambda i: self.shards[i].header, np.unique(order[at])))
        together = {}
        for row, where in enumerate(zip(at.tolist(), (starts // (BLOCK // 2)).tolist())):
            together.setdefault(where, []).append(row)
        list(READERS.map(fill, together.values()))
        return rows

    def sequences(self, numbers, seed):
        """int32 [n, T + 1]: the sequences with the given numbers [n], counted from the start of training.

        Every epoch visits each sequence once, in a new permutation: epochs permute the shards, and sequences are
        shuffled within windows across shards.
        """
        numbers, N, size = np.asarray(numbers), self.n_sequences, max(1, WINDOW // self.T)
        rows = np.empty((len(numbers), self.T + 1), np.int32)
        groups = np.stack([numbers // N, numbers % N // size], 1)  # (epoch, window)
        for epoch, window in np.unique(groups, axis=0).tolist():
            mine = (groups == (epoch, window)).all(1)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.shards))
            start = window * size
            inside = permute(numbers[mine] % N - start, min(size, N - start), [seed, epoch, window])
            rows[mine] = self.read(start + inside, order)
        return rows


def permute(index, size, key):
    """Where a permutation of range(size), chosen by the integers `key`, puts each of `index` (array of int).

    A four-round Feistel network on the next even power of two, walked until it falls inside (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002): no table, no buffer, constant time at any index.
    """
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = np.random.SeedSequence(key).generate_state(4, np.uint64)

    def once(x):
        left, right = x >> np.uint64(half), x & mask
        for k in rounds:
            mixed = (right ^ k) * np.uint64(
                0x9E3779B97F4A7C15
            )  # wraps around; the golden ratio's multiplier
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half)) | right

    x = once(np.asarray(index, np.uint64))
    while (outside := x >= size).any():
        x[outside] = once(x[outside])
    return x.astype(np.int64)


class Mixture:
    """The corpora of --mix, or the one of --bucket_name, in fixed shares of the sequences.

    Within a period the i-th of the c sequences of a corpus stands at the fraction (i + 1/2) / c, so every stretch has
    the shares to within about a sequence. The periods of a corpus follow one another: it is read as it would be alone.

    `folder` is the split, train or val; with `optional`, corpora that lack it are left out and the others keep their
    proportions. Raises UserError where a corpus or the mixture does not fit.
    """

    def __init__(self, cfg, folder, optional=False):
        mix = parse_mix(cfg.data.mix) or {"": 1.0}
        roots = {
            name: name if is_remote(name) else os.path.join(cfg.data.bucket_name, name)
            for name in mix
        }
        if optional and (
            some := {n: w for n, w in mix.items() if list_shards(os.path.join(roots[n], folder))}
        ):
            mix = some
        self.names, self.corpora = list(mix), [Corpus(cfg, roots[name], folder) for name in mix]
        self.T = cfg.model.T
        first = self.corpora[0]
        for c in self.corpora[1:]:
            if any(
                c.manifest.get(key) != first.manifest.get(key)
                for key in ("tokenizer", "tokenizer_sha256")
            ):
                raise UserError(
                    f"--mix: {c.folder} was made with another tokeniser than {first.folder}; tokenise both "
                    f"with the same one."
                )
        # In a period of sum(share) sequences, number j is the rank[j]-th of corpus which[j].
        edges = np.rint(np.cumsum([0.0, *mix.values()]) / sum(mix.values()) * PERIOD).astype(
            np.int64
        )
        if not (shares := np.diff(edges)).all():
            few = self.names[int(np.argmin(shares))]
            raise UserError(
                f"--mix: {few} has less than 1/{PERIOD:,} of the sequences; give it more or leave it out."
            )
        self.shares = shares // np.gcd.reduce(shares)
        pattern = np.argsort(
            np.concatenate([(np.arange(c) + 0.5) / c for c in self.shares]), kind="stable"
        )
        self.which = np.repeat(np.arange(len(mix)), self.shares)[pattern]
        self.rank = np.concatenate([np.arange(c) for c in self.shares])[pattern]

    @property
    def folder(self):
        """The corpora's folders, for messages."""
        return ", ".join(c.folder for c in self.corpora)

    @property
    def n_sequences(self):
        """Sequences that the mixture yields before one is seen again."""
        ends = [
            c.n_sequences // share * len(self.which)
            + np.flatnonzero(self.which == k)[c.n_sequences % share]
            for k, (c, share) in enumerate(zip(self.corpora, self.shares))
        ]
        return int(min(ends))

    @property
    def bytes_per_token(self):
        """Mean UTF-8 bytes of a token, or None where no manifest tells."""
        each = [c.bytes_per_token for c in self.corpora]
        return None if None in each else float(np.average(each, weights=self.shares))

    @property
    def tokenizer(self):
        """Name or file of the tokeniser; "" where neither a manifest nor --tokenizer names it."""
        return self.corpora[0].tokenizer

    def encoding(self):
        """The tokeniser, or None where nothing names it."""
        return load_tokenizer(self.tokenizer) if self.tokenizer else None

    def epochs(self, n):
        """{metric: how often each corpus has been seen} after n sequences."""
        periods, rest = divmod(n, len(self.which))
        seen = periods * self.shares + np.bincount(self.which[:rest], minlength=len(self.shares))
        return {
            "data/epoch" + (name and f"_{name}"): int(k) / c.n_sequences
            for name, k, c in zip(self.names, seen, self.corpora)
        }

    def sequences(self, numbers, seed):
        """int32 [n, T + 1]: the sequences with the given numbers [n], counted from the start of training."""
        periods, rest = np.divmod(numbers, len(self.which))
        which, rows = self.which[rest], np.empty((len(rest), self.T + 1), np.int32)
        for k in np.unique(which).tolist():
            mine = which == k
            rows[mine] = self.corpora[k].sequences(
                (periods * self.shares[k] + self.rank[rest])[mine], seed
            )
        return rows


def parse_mix(mix):
    """The {name: weight} of "a:0.7,b:0.3", {} for "". Raises UserError."""
    weights = {}
    for part in filter(None, mix.split(",")):
        name, _, weight = part.strip().rpartition(":")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not name or not 0 < value < float("inf") or name in weights:
            problem = (
                "is named twice"
                if name in weights
                else "is not a folder, a colon and a weight above 0"
            )
            raise UserError(
                f"--mix {mix}: {part!r} {problem}; an example is --mix web:0.7,code:0.3."
            )
        weights[name] = value
    return weights


# --- Batches ----------------------------------------------------------------------------------------------------


def put_batch(sequences, first, shape, mesh):
    """Global (tokens, targets), int32 [accumulation, M, B, T], of the sequences from number `first` on.

    Sequence numbers run fastest along B, then M, then accumulation, so however a batch is cut it holds the same
    sequences. A host reads only those that its devices hold.
    """
    A, M, B, T = shape
    numbers, sharding = (
        first + np.arange(A * M * B).reshape(A, M, B),
        NamedSharding(mesh, BATCH_SPEC),
    )
    indices = sharding.addressable_devices_indices_map(shape).values()
    mine = np.unique(np.concatenate([numbers[index[:3]].ravel() for index in indices]))
    rows = sequences(mine)  # [n, T + 1]

    def part(index, shift):
        start, stop, _ = index[3].indices(T)
        return rows[np.searchsorted(mine, numbers[index[:3]]), start + shift : stop + shift]

    return tuple(
        jax.make_array_from_callback(shape, sharding, functools.partial(part, shift=s))
        for s in (0, 1)
    )


class Prefetch:
    """Iterator over make(n) for every n of `numbers`, made `depth` ahead in a background thread; errors arrive in
    their turn.

    `waited` counts the seconds that a caller had nothing to do but wait: from when `busy()` returned, which is called
    before a wait and returns when the devices have done what they were given.
    """

    def __init__(self, make, numbers, depth=3, busy=lambda: None):
        self.make, self.numbers, self.depth, self.busy, self.waited = (
            make,
            iter(numbers),
            depth,
            busy,
            0.0,
        )
        self.worker, self.ahead = ThreadPoolExecutor(1, "prefetch"), deque()

    def __iter__(self):
        return self

    def __next__(self):
        self._begin(self.depth + 1)
        if not self.ahead:
            self.close()
            raise StopIteration
        self._wait(self.ahead[0])
        return self.ahead.popleft().result()

    def error(self, n):
        """What the first of the next n that could not be made ended in, or None; waits until they are made."""
        self._begin(self.depth)
        for made in itertools.islice(self.ahead, n):
            self._wait(made)
            if made.exception():
                return made.exception()

    def _begin(self, n):
        for number in itertools.islice(self.numbers, n - len(self.ahead)):
            self.ahead.append(self.worker.submit(self.make, number))

    def _wait(self, made):
        if not made.done():
            self.busy()
            began = time.monotonic()
            wait([made])
            self.waited += time.monotonic() - began

    def close(self):
        """Make no more; wait for what is being made."""
        self.worker.shutdown(cancel_futures=True)
