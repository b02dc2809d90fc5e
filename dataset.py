"""Where shards are, the order of sequences, and putting a batch on the mesh.

A shard is a one-dimensional .npy file of token ids; sequence i of a shard is its tokens i*T .. i*T + T, the last of
which is only a target. The order is a pure function of (shards, seed, number of sequences consumed): it knows nothing
of hosts, devices, batches or steps, so a run goes on anywhere at the same place, and its whole state is one integer.
"""

import bisect
import functools
import json
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import fsspec
import jax
import numpy as np
from jax.sharding import NamedSharding

from model import BATCH_SPEC
from utils import UserError, is_remote, load_tokenizer, read_file

WINDOW = 1 << 20  # sequences that are shuffled together; each window touches few shards, however many there are
CHECK_AT_START = 1 << 28  # tokens up to which all shards are checked before training begins (less than a second)


class Corpus:
    """The shards of one folder, read as sequences of T + 1 tokens.

    Raises UserError, naming the folder or the file, where shards are missing, unreadable, or do not fit the
    vocabulary or the tokeniser.
    """

    def __init__(self, cfg, folder):
        d, m = cfg.data, cfg.model
        self.T, self.vocab_size = m.T, m.vocab_size
        self.folder = os.path.join(d.bucket_name, folder)
        self.cache = os.path.join(d.process_path, self.folder.split("://")[-1])
        manifest = read_file(os.path.join(self.folder, "manifest.json"))
        self.manifest = json.loads(manifest) if manifest else {}
        self.names = self._list()
        self.tokenizer = self._tokenizer(d)
        self.lengths = [self._length(name) for name in self.names]
        self.counts = np.array([max(0, (n - 1) // self.T) for n in self.lengths])
        self.n_sequences = int(self.counts.sum())
        if not self.n_sequences:
            raise UserError(f"--T {self.T}: the shards in {self.folder} hold no sequence of {self.T + 1} tokens.")
        if sum(self.lengths) <= CHECK_AT_START:
            for i in range(len(self.names)):
                self.shard(i)

    def _list(self):
        """Names of the shards; the manifest, where there is one, says which must be there."""
        fs, path = fsspec.core.url_to_fs(self.folder)
        try:
            there = {os.path.basename(p) for p in fs.ls(path, detail=False)}
        except (FileNotFoundError, NotADirectoryError):
            there = set()
        names = sorted(n for n in there if n.endswith(".npy"))
        missing = [s["name"] for s in self.manifest.get("shards", []) if s["name"] not in there]
        if missing:
            raise UserError(f"--bucket_name: {os.path.join(self.folder, missing[0])} is missing, although the "
                            f"manifest beside it lists it.")  # fmt: skip
        if not names:
            raise UserError(f"--bucket_name: there are no shards (.npy) in {self.folder}; data/tokenize_shards.py "
                            f"makes them, and run.sh local does so by itself.")  # fmt: skip
        return names

    def _tokenizer(self, d):
        """Name or file of the tokeniser, checked against the manifest and the vocabulary; "" where nothing tells."""
        made_with, vocabulary = self.manifest.get("tokenizer", ""), self.manifest.get("vocab_size", 0)
        if vocabulary > self.vocab_size:
            raise UserError(f"--vocab_size {self.vocab_size}: the shards in {self.folder} were made with a vocabulary "
                            f"of {vocabulary} ({made_with}); give that or other shards.")  # fmt: skip
        given = os.path.basename(d.tokenizer)
        # a trained tokeniser's ranks are copied into bucket_name under one name, so only its kind can be compared
        trained = given.endswith(".tiktoken") and made_with.endswith(".tiktoken")
        if given and made_with and given != made_with and not trained:
            raise UserError(f"--tokenizer {d.tokenizer}: the shards in {self.folder} were made with {made_with}; give "
                            f"that one or other shards.")  # fmt: skip
        if not made_with.endswith(".tiktoken"):
            return d.tokenizer or made_with
        return self._local(os.path.join(d.bucket_name, made_with), os.path.join(d.process_path, "tokenizer.tiktoken"))

    @staticmethod
    def _local(path, copy):
        """A local path itself; a remote one is copied whole to `copy` first, beside and then renamed."""
        if not is_remote(path):
            return path
        if not os.path.exists(copy):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            part = f"{copy}.{os.getpid()}.part"
            fs, source = fsspec.core.url_to_fs(path)
            fs.get_file(source, part)
            os.replace(part, copy)
        return copy

    def _length(self, name):
        """Tokens in a shard, from its header alone."""
        path = os.path.join(self.folder, name)
        try:
            with fsspec.open(path, "rb") as f:
                version = np.lib.format.read_magic(f)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(f)
        except (ValueError, OSError) as e:
            raise UserError(f"--bucket_name: {path} is not a shard ({e}); make it again.") from None
        if len(shape) != 1 or dtype.kind not in "ui":
            raise UserError(f"--bucket_name: {path} holds {dtype} of shape {shape}; a shard is one row of token ids.")
        return shape[0]

    @functools.lru_cache(maxsize=4096)
    def shard(self, i):
        """Shard i, memory-mapped, its ids checked against the vocabulary."""
        path = os.path.join(self.folder, self.names[i])
        try:
            tokens = np.load(self._local(path, os.path.join(self.cache, self.names[i])), mmap_mode="r")
        except (ValueError, OSError) as e:
            raise UserError(f"--bucket_name: {path} is damaged ({e}); make it again.") from None
        if len(tokens) and (top := int(tokens.max())) >= self.vocab_size:
            raise UserError(f"--vocab_size {self.vocab_size}: {path} holds token id {top}, beyond the vocabulary; give "
                            f"a larger --vocab_size or other shards.")  # fmt: skip
        return tokens

    @property
    def bytes_per_token(self):
        """Mean UTF-8 bytes of a token, or None where no manifest tells."""
        return self.manifest["bytes"] / self.manifest["tokens"] if self.manifest.get("tokens") else None

    def encoding(self):
        """The tokeniser, or None where neither a manifest nor --tokenizer names it."""
        return load_tokenizer(self.tokenizer) if self.tokenizer else None

    def read(self, places, order):
        """int32 [n, T + 1]: the sequences at `places` [n] of the shards laid end to end in `order`."""
        ends = np.cumsum(self.counts[order]).tolist()
        rows = np.empty((len(places), self.T + 1), np.int32)
        for row, place in zip(rows, places):
            at = bisect.bisect_right(ends, place)
            start = (place - (ends[at] - self.counts[order[at]])) * self.T
            row[:] = self.shard(int(order[at]))[start : start + self.T + 1]
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
            mixed = (right ^ k) * np.uint64(0x9E3779B97F4A7C15)  # wraps around; the golden ratio's multiplier
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half)) | right

    x = once(np.asarray(index, np.uint64))
    while (outside := x >= size).any():
        x[outside] = once(x[outside])
    return x.astype(np.int64)


class Shuffled:
    """Training order: every epoch visits each sequence once, in a new permutation. Sequence n is a pure function of
    (shards, seed, n): epochs permute the shards, and sequences are shuffled within windows across shards."""

    def __init__(self, corpus, seed):
        self.corpus, self.seed = corpus, seed

    def __call__(self, numbers):
        """int32 [n, T + 1]: the sequences with the given numbers [n], counted from the start of training."""
        numbers, N = np.asarray(numbers), self.corpus.n_sequences
        rows = np.empty((len(numbers), self.corpus.T + 1), np.int32)
        groups = np.stack([numbers // N, numbers % N // WINDOW], 1)  # (epoch, window)
        for epoch, window in np.unique(groups, axis=0).tolist():
            mine = (groups == (epoch, window)).all(1)
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.corpus.names))
            start = window * WINDOW
            inside = permute(numbers[mine] % N - start, min(WINDOW, N - start), [self.seed, epoch, window])
            rows[mine] = self.corpus.read(start + inside, order)
        return rows


def put_batch(sequences, first, shape, mesh):
    """Global (tokens, targets), int32 [accumulation, M, B, T], of the sequences from number `first` on.

    Sequence numbers run fastest along B, then M, then accumulation, so however a batch is cut it holds the same
    sequences. A host reads only those that its devices hold.
    """
    A, M, B, T = shape
    numbers = first + np.arange(A * M * B).reshape(A, M, B)

    @functools.cache
    def read(*bounds):
        mine = numbers[tuple(slice(*b) for b in bounds)]
        return sequences(mine.ravel()).reshape(*mine.shape, T + 1)

    def part(index, shift):
        bounds = [s.indices(size)[:2] for s, size in zip(index, shape)]
        t0, t1 = bounds[3]
        return read(*bounds[:3])[..., t0 + shift : t1 + shift]

    sharding = NamedSharding(mesh, BATCH_SPEC)
    return tuple(jax.make_array_from_callback(shape, sharding, functools.partial(part, shift=s)) for s in (0, 1))


def prefetch(make, numbers, depth=2):
    """make(n) for every n of `numbers`, made `depth` ahead in a background thread; errors arrive in their turn."""
    with ThreadPoolExecutor(1) as worker:
        ahead = deque()
        try:
            for n in numbers:
                ahead.append(worker.submit(make, n))
                if len(ahead) > depth:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
