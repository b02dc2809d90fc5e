"""The shards of one folder as sequences, in the order of training.

Comes before: `shards/storage.py`, which reads and verifies tokens. Comes next: `shards/mixture.py`, which draws the
sequences of several corpora.

Sequence i of a shard is its tokens i*T .. i*T + T; the last of them is only a target. The order is a pure function of
(shards, seed, number of sequences consumed). It knows nothing of hosts, devices, batches or steps, so a run resumes at
the same sequence on any of them, and one integer is its whole state.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from runtime.files import is_remote
from runtime.messages import UserError
from shards import manifest
from shards.missing import remedy
from shards.storage import Cache, Shard, list_split
from shards.tokenization import shards_tokenizer

# Tokens whose sequences are shuffled together. A larger window would read from more shards at the same time.
WINDOW = 1 << 30
# Local shards of up to this many tokens in all are checked before training. For more, it would take minutes.
CHECK_AT_START = 1 << 28
# Many threads, since remote storage takes long to answer although it sends fast.
READERS = ThreadPoolExecutor(32, "read")
# The READERS that read local shards: more would wait for one another and not for the disk.
LOCAL_READERS = 16
# Ranges up to this size are shuffled by an array. A Feistel network of so few bits makes some permutations far more
# often than others.
SHUFFLED = 32


class Corpus:
    """The shards of `folder` inside `root`, read as sequences of T + 1 tokens. Raises UserError."""

    def __init__(self, cfg, root, folder):
        self.T = cfg.model.T
        self.vocab_size = cfg.model.vocab_size
        self.folder = os.path.join(root, folder)
        self.manifest = manifest.read(self.folder)
        self.bytes_per_token = None  # of UTF-8
        # a lossy tokenizer's tokens do not hold all the bytes that the manifest counts
        if self.manifest and not manifest.is_lossy(self.manifest):
            self.bytes_per_token = self.manifest["bytes"] / self.manifest["tokens"]
        self.tokenizer = shards_tokenizer(root, self.manifest, cfg.data.tokenizer)
        warning = f"{self.folder} has no {manifest.NAME}, so its shards are not verified"
        self.unverified = "" if self.manifest else warning
        found = list_split(self.folder)
        if self.manifest:
            named = {os.path.basename(path): info for path, info in found.items()}
            manifest.check_files(self.folder, self.manifest, named)
        if not found:
            raise UserError(
                f"there are no shards (.npy) in {self.folder}; {remedy(self.folder)}", flag="data"
            )
        entries = {entry["name"]: entry for entry in self.manifest.get("shards", [])}
        cache = Cache(f"{cfg.data.cache_dir}/blocks", cfg.data.cache_gb * 1e9)
        self.shards = []
        for path, info in found.items():
            entry = entries.get(os.path.basename(path), {})
            self.shards.append(Shard(path, info, entry, cache))
        lengths = list(READERS.map(lambda shard: shard.length, self.shards))
        self.counts = np.array([max(0, (n - 1) // self.T) for n in lengths])  # sequences per shard
        if folder == "val" and cfg.data.val_tokens:
            ends = np.minimum(np.cumsum(self.counts), cfg.data.val_tokens // self.T)
            self.counts = np.diff(ends, prepend=0)
        self.n_sequences = int(self.counts.sum())
        if not self.n_sequences:
            raise UserError(
                f"the shards in {self.folder} have no {self.T + 1} tokens, as a sequence has; use more text, or a "
                f"smaller --T."
            )
        if not is_remote(root) and sum(lengths) <= CHECK_AT_START:
            list(READERS.map(lambda shard: shard.check(self.vocab_size), self.shards))

    def read(self, positions, order):
        """int32 [n, T + 1]: the sequences at `positions` [n] of the shards laid end to end in `order`."""
        ends = np.cumsum(self.counts[order])
        at = np.searchsorted(ends, positions, "right")  # index into `order` of each one's shard
        starts = (positions - ends[at] + self.counts[order[at]]) * self.T  # in tokens
        rows = np.empty((len(positions), self.T + 1), np.int32)

        def fill(part):
            for row in part:
                shard = self.shards[order[at[row]]]
                start = int(starts[row])
                rows[row] = shard.read(start, start + self.T + 1, self.vocab_size)

        # Remote storage answers some requests late, so each of its rows is a task that any idle thread can do.
        n_parts = len(positions) if self.shards[0].is_remote else LOCAL_READERS
        list(READERS.map(fill, np.array_split(np.arange(len(positions)), n_parts)))
        return rows

    def sequences(self, numbers, seed):
        """int32 [n, T + 1]: the sequences with the given numbers [n], counted from the start of training.

        Every epoch visits each sequence once, in an order of its own: the shards are permuted and laid end to end, and
        then the sequences are permuted within each window of WINDOW tokens.
        """
        epochs, positions = np.divmod(numbers, self.n_sequences)
        size = max(1, WINDOW // self.T)  # sequences per window
        windows = positions // size
        rows = np.empty((len(numbers), self.T + 1), np.int32)
        for epoch, window in sorted(set(zip(epochs.tolist(), windows.tolist()))):
            here = (epochs == epoch) & (windows == window)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.shards))
            start = window * size
            stop = min(start + size, self.n_sequences)
            shuffled = permute(positions[here] - start, stop - start, [seed, epoch, window])
            rows[here] = self.read(start + shuffled, order)
        return rows


def permute(index, size, key):
    """Images of `index` (array of int) under a permutation of range(size) that the integers `key` choose.

    A table of the permutation would take gigabytes for a large corpus. So above SHUFFLED a Feistel network of four
    rounds permutes range(2^(2h)), the next even power of two. An image that is not below `size` goes through the
    network again until it is ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The
    cycle of each index returns to it in the end, so this stops, and no two indices share an image.
    """
    if size <= SHUFFLED:
        return np.random.default_rng(key).permutation(size)[index]
    half = (int(size - 1).bit_length() + 1) // 2
    mask = np.uint64((1 << half) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(4, np.uint64)

    def network(x):
        left, right = x >> np.uint64(half), x & mask
        for round_key in round_keys:
            # the multipliers of splitmix64; products wrap around
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half)) | right

    x = network(np.asarray(index, np.uint64))
    while (x >= size).any():
        outside = x >= size
        x[outside] = network(x[outside])
    return x.astype(np.int64)
