"""Corpora of shards, the order of their sequences, and batches on the mesh.

Sequence i of a shard is its tokens i*T .. i*T + T; the last of them is only a target. The order is a pure function of
(shards, seed, number of sequences consumed). It knows nothing of hosts, devices, batches or steps, so a run resumes at
the same place anywhere, and one integer is its whole state.
"""

import glob
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import numpy as np
from jax.sharding import NamedSharding

from collectives import BATCH_SPEC
from runtime.files import is_remote, names_in
from runtime.messages import UserError
from shards import manifest
from shards.storage import Cache, Shard, list_shards
from shards.tokenization import content_sha256, load_tokenizer, shards_tokenizer, text_of

WINDOW = 1 << 30  # tokens whose sequences are shuffled together; they are of few shards
CHECK_AT_START = 1 << 28  # tokens up to which local shards are checked as training begins
PERIOD = 100_000  # sequences in which a mixture repeats; no corpus can have less than one
READERS = ThreadPoolExecutor(32, "read")  # remote storage is slow to answer, not slow to send
LOCAL_READERS = (
    16  # of these for local shards: more of them wait for one another longer than for a disk
)
OPENING = 64  # tokens that hold the first words of a text
EXAMPLE = "an example is --mix 'web:0.7,code:0.3 until 0.8, web:1,code:2'"
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
PART_OF_MIX = re.compile(rf"\s*(.+):({NUMBER})(?:\s+until\s+({NUMBER}))?\s*")


def instead(folder):
    """What the message says that a folder, train or val, holds no shards: where they are, or what makes them."""
    root, split = os.path.split(folder)
    if near := sorted(glob.glob(f"{glob.escape(root)}/*/{split}/*.npy")):
        return f"give a folder in it, such as {os.path.dirname(os.path.dirname(near[0]))}"
    above, name = os.path.split(root)
    names = [n for n in names_in(root) if n[0] != "."]
    base = above if names == [name] else root  # of a file it is the file's own
    if any(name.endswith(".npy") for name in names):
        if name in ("train", "val"):
            return f"give the folder above, {above or '.'}"
        return f"move the .npy files in {base} to {base}/train and {base}/val, each to its split"
    if any(name.endswith(".bin") for name in names):
        return (
            f"shards are .npy files in {base}/train and {base}/val, of one row of token ids each, as "
            "numpy.save(SHARD, numpy.fromfile(BIN, 'uint16')) makes them of nanoGPT's .bin"
        )
    has_files = glob.glob(f"{glob.escape(root)}/*.*") and not os.path.exists(f"{root}/train")
    if os.path.isfile(root) or has_files:
        return f"bash run.sh local --data {root} makes shards of its text and trains on them"
    return "data/tokenize_shards.py makes them of text (val if --val_fraction is above 0), data/prepare.py of corpora"


class Corpus:
    """The shards of `folder` inside `root`, read as sequences of T + 1 tokens. Raises UserError."""

    def __init__(self, cfg, root, folder):
        self.T = cfg.model.T
        self.vocab_size = cfg.model.vocab_size
        self.folder = os.path.join(root, folder)
        self.manifest = made = manifest.read(self.folder)
        # of UTF-8; bytes that the tokens do not hold would count, too
        counted = made and not manifest.is_lossy(made)
        self.bytes_per_token = made["bytes"] / made["tokens"] if counted else None
        self.tokenizer = shards_tokenizer(root, made, cfg.data.tokenizer)
        warning = f"{self.folder} has no {manifest.NAME}, so its shards are not verified"
        self.unverified = "" if made else warning
        found = list_shards(self.folder)
        if made:
            manifest.check_files(self.folder, made, found)
        if not found:
            raise UserError(
                f"--data: there are no shards (.npy) in {self.folder}; {instead(self.folder)}."
            )
        entries = {entry["name"]: entry for entry in made.get("shards", [])}
        cache = Cache(f"{cfg.data.cache_dir}/blocks", cfg.data.cache_gb * 1e9)
        self.shards = []
        for name, info in found.items():
            path = os.path.join(self.folder, name)
            self.shards.append(Shard(path, info, entries.get(name, {}), cache))
        lengths = list(READERS.map(lambda shard: shard.length, self.shards))
        self.counts = np.array([max(0, (n - 1) // self.T) for n in lengths])  # sequences per shard
        self.n_sequences = int(self.counts.sum())
        if not self.n_sequences:
            raise UserError(
                f"the shards in {self.folder} have no {self.T + 1} tokens, as a sequence has; use more text, or a "
                f"smaller --T."
            )
        if not is_remote(root) and sum(lengths) <= CHECK_AT_START:
            list(READERS.map(lambda shard: shard.check(self.vocab_size), self.shards))

    def read(self, places, order):
        """int32 [n, T + 1]: the sequences at `places` [n] of the shards laid end to end in `order`."""
        ends = np.cumsum(self.counts[order])
        at = np.searchsorted(ends, places, "right")  # which shard of `order` holds each place
        starts = (places - ends[at] + self.counts[order[at]]) * self.T  # in tokens
        rows = np.empty((len(places), self.T + 1), np.int32)

        def fill(part):
            for row in part:
                shard = self.shards[order[at[row]]]
                start = int(starts[row])
                rows[row] = shard.read(start, start + self.T + 1, self.vocab_size)

        # one by one of remote shards, which answer some requests later than others
        n_parts = len(places) if self.shards[0].is_remote else LOCAL_READERS
        list(READERS.map(fill, np.array_split(np.arange(len(places)), n_parts)))
        return rows

    def sequences(self, numbers, seed):
        """int32 [n, T + 1]: the sequences with the given numbers [n], counted from the start of training.

        Every epoch visits each sequence once, in a new permutation: it permutes the shards, and then shuffles
        sequences within windows of WINDOW tokens, which span shards.
        """
        epochs, places = np.divmod(numbers, self.n_sequences)
        size = max(1, WINDOW // self.T)  # sequences per window
        windows = places // size
        rows = np.empty((len(numbers), self.T + 1), np.int32)
        for epoch, window in sorted(set(zip(epochs.tolist(), windows.tolist()))):
            here = (epochs == epoch) & (windows == window)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.shards))
            start = window * size
            stop = min(start + size, self.n_sequences)
            shuffled = permute(places[here] - start, stop - start, [seed, epoch, window])
            rows[here] = self.read(start + shuffled, order)
        return rows


# Sizes up to this one are shuffled: a network of so few bits makes some permutations far more often than others.
SHUFFLED = 32


def permute(index, size, key):
    """Where a permutation of range(size), chosen by the integers `key`, puts each of `index` (array of int).

    Above SHUFFLED a Feistel network of four rounds permutes range(2^(2h)), the next even power of two, without a table.
    Where the result is not below `size`, the network is applied again until it is ("cycle walking": Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). Every cycle of the network returns to range(size): it stays a
    permutation.
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


class Mixture:
    """The corpora of --mix, or the one of --data, in shares of the sequences that are fixed within a phase.

    folder: the split, train or val. n_train: sequences of the run, a share of which each phase takes; None, as for
    validation: one phase with the mean shares of the run, of those corpora that have the split. Raises UserError.
    """

    def __init__(self, cfg, folder, n_train=None):
        self.mix = cfg.data.mix
        phases = parse_mix(self.mix)
        average = average_mix(phases)
        names = list(average)
        if n_train is None:
            phases = [(1.0, average)]
            has_split = [n for n in names if list_shards(os.path.join(corpus_root(cfg, n), folder))]
            names = has_split or names  # where none has the split, opening the first one raises
        self.T = cfg.model.T
        self.names = names
        self.corpora = [Corpus(cfg, corpus_root(cfg, name), folder) for name in names]
        self.folder = ", ".join(corpus.folder for corpus in self.corpora)  # for messages
        self.tokenizer = self.corpora[0].tokenizer  # name or file, "" where nothing names it
        made = [corpus.manifest for corpus in self.corpora]
        hashes = {one.get("tokenizer_sha256") for one in made}
        ends = {manifest.end_of_text(one) for one in made} - {None}
        if len(hashes) > 1 or len(ends) > 1:
            raise UserError(
                f"--mix: {self.folder} were made with different tokenizers; tokenize all with the same one."
            )
        # the number of the first sequence of each phase but the first
        self.borders = [round(end * n_train) for end, _ in phases[:-1]]
        if self.borders and np.diff([0, *self.borders, n_train]).min() < 1:
            raise UserError(
                f"--mix {self.mix}: a phase of it has no sequence in a run of {n_train:,}; give a longer phase or run."
            )
        self.shares = np.array([shares_of(mix, names) for _, mix in phases])  # [phases, corpora]
        self.phases = [Phase(self.shares[0], 0, np.zeros(len(names), np.int64))]
        for start, shares in zip(self.borders, self.shares[1:]):
            self.phases.append(Phase(shares, start, self.phases[-1].seen(start)))

    def check_borders(self, borders, n):
        """Raises UserError where the first n sequences, read when the phases had these borders, would be others now."""
        passed = [border for border in borders if border < n]
        if passed != [border for border in self.borders if border < n]:
            raise UserError(
                f"--mix {self.mix}: it would change after {self.borders} sequences now, but after {borders} when the "
                f"first {n:,} were read; give the same --training_steps, or another --name."
            )

    @property
    def n_sequences(self):
        """Sequences that a mixture of one phase yields before one is seen again."""
        (phase,) = self.phases
        ends = []
        for k, corpus in enumerate(self.corpora):
            periods, rest = divmod(corpus.n_sequences, int(phase.shares[k]))
            ends.append(periods * len(phase.which) + np.flatnonzero(phase.which == k)[rest])
        return int(min(ends))

    @property
    def bytes_per_token(self):
        """Mean number of UTF-8 bytes of a token of a mixture of one phase, or None where no manifest tells."""
        each = [corpus.bytes_per_token for corpus in self.corpora]
        return None if None in each else float(np.average(each, weights=self.shares[0]))

    def check_encoding(self, encoding):
        """Raises UserError where the content of a tokenizer, if it is not None, is not that which made all shards."""
        if not encoding:
            return
        for corpus in self.corpora:
            made_with = corpus.manifest.get("tokenizer_sha256")
            end = manifest.end_of_text(corpus.manifest)
            differs = ""
            if end not in (None, encoding.eot_token):
                differs = f"their documents begin with token {end}, its end of text is {encoding.eot_token}"
            if made_with not in (None, content_sha256(encoding)):
                differs = "tokenizer_sha256 of their manifest is another"
            if differs:
                raise UserError(
                    f"{self.tokenizer}: is not the tokenizer that made the shards in {corpus.folder} ({differs}); give "
                    f"that one (--tokenizer), or tokenize the text again."
                )

    def epochs(self, n):
        """{metric: how often each corpus has been seen} after n sequences."""
        seen = self.phases[np.searchsorted(self.borders, n, "right")].seen(n)
        metrics = {}
        for name, n_seen, corpus in zip(self.names, seen, self.corpora):
            metric = f"data/epoch_{name}" if name else "data/epoch"
            metrics[metric] = int(n_seen) / corpus.n_sequences
        return metrics

    def sequences(self, numbers, seed):
        """int32 [n, T + 1]: the sequences with the given numbers [n], counted from the start of training."""
        numbers = np.asarray(numbers)
        phase_of = np.searchsorted(self.borders, numbers, "right")
        rows = np.empty((len(numbers), self.T + 1), np.int32)
        for i, phase in enumerate(self.phases):
            corpus_of = phase.which[(numbers - phase.start) % len(phase.which)]
            for k, corpus in enumerate(self.corpora):
                mine = (phase_of == i) & (corpus_of == k)
                rows[mine] = corpus.sequences(phase.seen(numbers[mine])[:, k], seed)
        return rows


class Phase:
    """Which sequences a phase of a mixture takes: a period that repeats.

    Within a period the i-th of the c sequences of a corpus lies at the fraction (i + 1/2) / c, so every stretch has
    the shares to within about a sequence: shares [2, 1] make a period a b a. Every corpus continues where the phase
    before left it, and from period to period, so it is read as it would be alone.
    shares: int64 [corpora]: sequences of each corpus in a period. start: number of the phase's first sequence.
    before: int64 [corpora]: sequences of each corpus before that one.
    """

    def __init__(self, shares, start, before):
        self.shares = shares
        self.start = start
        self.before = before
        fractions = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        order = np.argsort(fractions, kind="stable")
        corpora = np.arange(len(shares))
        # the corpus of each sequence of a period, and how many of each corpus come before it
        self.which = np.repeat(corpora, shares)[order]
        one_hot = (self.which[:, None] == corpora).astype(np.int64)
        self.earlier = np.cumsum(one_hot, axis=0) - one_hot

    def seen(self, numbers):
        """int64 [..., corpora]: sequences of each corpus before those with these numbers [...] of this phase."""
        periods, places = np.divmod(numbers - self.start, len(self.which))
        return self.before + np.multiply.outer(periods, self.shares) + self.earlier[places]


def corpus_root(cfg, name):
    """Folder or address of a corpus of --mix: its own address, or a folder inside --data."""
    return name if is_remote(name) else os.path.join(cfg.data.data, name)


def manifests(cfg, *splits):
    """[(root, folder, its manifest or {})] of the folders `splits` that hold shards, of all corpora."""
    found = []
    for name in average_mix(parse_mix(cfg.data.mix)):
        root = corpus_root(cfg, name)
        for folder in [os.path.join(root, split) for split in splits]:
            if list_shards(folder):
                found.append((root, folder, manifest.read(folder)))
    return found


def encoding_of(shards, flag):
    """The tokenizer of shards as `manifests` lists them, or of --tokenizer, `flag`; None where none is named."""
    root, _, made = shards[0] if shards else ("", "", {})
    name = shards_tokenizer(root, made, flag)
    return load_tokenizer(name) if name else None


def opening_of(cfg, shards, encoding):
    """The first words of the validation text of shards as `manifests` lists them, for samples to continue; "" where
    there are none. Raises UserError where it cannot be read."""
    held_out = [(there, made) for _, there, made in shards if os.path.basename(there) == "val"]
    if not held_out or encoding is None:
        return ""
    folder, made = held_out[0]
    name, info = next(iter(list_shards(folder).items()))
    about = next((entry for entry in made.get("shards", []) if entry["name"] == name), {})
    cache = Cache(f"{cfg.data.cache_dir}/blocks", cfg.data.cache_gb * 1e9)
    shard = Shard(os.path.join(folder, name), info, about, cache)
    ids = shard.read(0, min(OPENING, shard.length), encoding.n_vocab).tolist()
    text = itertools.takewhile(lambda token: token != encoding.eot_token, ids[1:])
    words = re.match(r"\s*(\S+(?: \S+){0,3})\s", text_of(encoding, text) + " ")
    return words[1][:24].rstrip("\ufffd ") if words else ""


def shares_of(mix, names):
    """int64 [names]: sequences of each corpus of {name: weight} in the shortest period. Raises UserError."""
    weights = np.array([mix.get(name, 0.0) for name in names])
    edges = np.cumsum([0.0, *weights]) / weights.sum() * PERIOD
    shares = np.diff(np.rint(edges).astype(np.int64))
    for name, weight, share in zip(names, weights, shares):
        if weight and not share:
            raise UserError(f"--mix: {name} has less than 1/{PERIOD:,} of the run; leave it out.")
    return shares // np.gcd.reduce(shares)


def average_mix(phases):
    """{name: weight} of a mixture over a whole run; phases: as `parse_mix` returns them."""
    average = Counter()
    start = 0.0
    for end, mix in phases:
        total = sum(mix.values())
        for name, weight in mix.items():
            average[name] += (end - start) * weight / total
        start = end
    return average if len(phases) > 1 else phases[0][1]


def data_fingerprint(*mixtures):
    """Hash of what the shards of the mixtures hold, wherever they lie."""
    held = []
    for corpus in [corpus for mixture in mixtures for corpus in mixture.corpora]:
        shards = []
        for shard in corpus.shards:
            about = {"name": os.path.basename(shard.path), "tokens": shard.length}
            sha256 = shard.about.get("sha256")
            shards.append(about | {"sha256": sha256} if sha256 else tuple(about.values()))
        held.append([shards, corpus.manifest.get("tokenizer_sha256")])
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()


def parse_mix(mix):
    """The phases of --mix: [(share of the run at which it ends, {name: weight})]. Raises UserError.
    "a:2,b:1 until 0.8, b:1" is [(0.8, {"a": 2.0, "b": 1.0}), (1.0, {"b": 1.0})], and "" is one corpus ""."""
    if not mix:
        return [(1.0, {"": 1.0})]
    phases = []
    weights = {}
    before = 0.0
    for part in mix.split(","):
        found = PART_OF_MIX.fullmatch(part)
        name, weight, end = found.groups() if found else ("", 0, None)
        in_order = not end or before < float(end) < 1
        if not 0 < float(weight) < math.inf or name in weights or not in_order:
            raise UserError(
                f"--mix {mix}: {part.strip()!r} must be a folder that is named once in its phase, a colon and a weight "
                f"above 0, until a share of the run above {before:g} and below 1; {EXAMPLE}."
            )
        weights[name] = float(weight)
        if end:
            before = float(end)
            phases.append((before, weights))
            weights = {}
    if not weights:
        raise UserError(f"--mix {mix}: nothing follows the last until; {EXAMPLE}.")
    return [*phases, (1.0, weights)]


def put_batch(sequences, first, shape, mesh):
    """Global (tokens, targets), int32 [accumulation, M, B, T], of the sequences from number `first` on.

    `sequences` maps numbers [n] to int32 [n, T + 1]. The numbers run fastest along B, then M, then accumulation, so
    however a batch is cut it holds the same sequences. A host reads only those that its devices hold.
    """
    numbers = first + np.arange(math.prod(shape[:3])).reshape(shape[:3])
    sharding = NamedSharding(mesh, BATCH_SPEC)
    indices = sharding.addressable_devices_indices_map(shape).values()
    mine = np.unique(np.concatenate([numbers[index[:3]].ravel() for index in indices]))
    rows = sequences(mine)  # [n, T + 1]

    def put(values):  # [n, T]
        def part(index):
            return values[np.searchsorted(mine, numbers[index[:3]]), index[3]]

        return jax.make_array_from_callback(shape, sharding, part)

    return put(rows[:, :-1]), put(rows[:, 1:])


class Prefetch:
    """Iterator over make(n) for every n of `numbers`. A background thread makes `depth` of them ahead; an error is
    raised where its item would have come. busy(), called before each wait, returns when the devices idle."""

    def __init__(self, make, numbers, depth=3, busy=lambda: None):
        self.make = make
        self.numbers = iter(numbers)
        self.depth = depth
        self.busy = busy
        self.waited = 0.0  # seconds in which the devices only waited for items
        self.worker = ThreadPoolExecutor(1, "prefetch")
        self.ahead = deque()  # futures, in order

    def __iter__(self):
        return self

    def __next__(self):
        self._begin(self.depth + 1)
        if not self.ahead:
            self.close()
            raise StopIteration
        return self._wait(self.ahead.popleft()).result()

    def error(self, n):
        """The first error among the next n items, or None. Waits until they are made."""
        self._begin(self.depth)
        errors = [self._wait(item).exception() for item in itertools.islice(self.ahead, n)]
        return next(filter(None, errors), None)

    def _begin(self, n):
        """Begin items until n are ahead."""
        for number in itertools.islice(self.numbers, n - len(self.ahead)):
            self.ahead.append(self.worker.submit(self.make, number))

    def _wait(self, item):
        """The future `item`, when it is done."""
        if not item.done():
            self.busy()
            began = time.monotonic()
            wait([item])
            self.waited += time.monotonic() - began
        return item

    def close(self):
        """Make no more items; wait for the one that is being made."""
        self.worker.shutdown(cancel_futures=True)
