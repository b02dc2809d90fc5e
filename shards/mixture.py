"""The corpora of --mix, drawn in fixed shares: which corpus, and which of its sequences, is sequence n of a run.

Comes before: `shards/corpus.py`, one folder of shards. Comes next: `dataset.py`, which makes batches of sequences.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter

import numpy as np

from runtime.files import is_remote
from runtime.messages import UserError
from shards import manifest
from shards.corpus import Corpus
from shards.storage import list_split
from shards.tokenization import content_sha256

PERIOD = 100_000  # sequences in which a mixture repeats; no corpus can have less than one
EXAMPLE = "an example is --mix 'web:0.7,code:0.3 until 0.8, web:1,code:2'"
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
PART_OF_MIX = re.compile(rf"\s*(.+):({NUMBER})(?:\s+until\s+({NUMBER}))?\s*")


class Mixture:
    """The corpora of --mix, or the single one of --data. In each phase of a run, every corpus has a fixed share of the
    sequences.

    folder: the split, train or val. n_train: number of sequences of the whole run, which is divided into phases. With
    None, for validation, there is one phase, in which each corpus has its mean share of the run, and corpora without
    the split are left out. Raises UserError.
    """

    def __init__(self, cfg, folder, n_train=None):
        self.mix = cfg.data.mix
        phases = parse_mix(self.mix)
        average = average_mix(phases)
        names = list(average)
        if n_train is None:
            phases = [(1.0, average)]
            has_split = [n for n in names if list_split(os.path.join(corpus_root(cfg, n), folder))]
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
                f"{self.folder} were made with different tokenizers; tokenize all with the same one",
                flag="mix",
            )
        # the number of the first sequence of each phase but the first
        self.borders = [round(end * n_train) for end, _ in phases[:-1]]
        if self.borders and np.diff([0, *self.borders, n_train]).min() < 1:
            raise UserError(
                f"a phase of it has no sequence in a run of {n_train:,}; give a longer phase or run",
                flag="mix",
                value=self.mix,
            )
        self.shares = np.array([shares_of(mix, names) for _, mix in phases])  # [phases, corpora]
        self.phases = [Phase(self.shares[0], 0, np.zeros(len(names), np.int64))]
        for start, shares in zip(self.borders, self.shares[1:]):
            self.phases.append(Phase(shares, start, self.phases[-1].seen(start)))

    def check_borders(self, borders, n):
        """Raises UserError where the first n sequences of a run, whose phases had these borders, are not the first n of
        this mixture."""
        passed = [border for border in borders if border < n]
        if passed != [border for border in self.borders if border < n]:
            raise UserError(
                f"it would change after {self.borders} sequences now, but after {borders} when the "
                f"first {n:,} were read; give the same --training_steps, or another --name",
                flag="mix",
                value=self.mix,
            )

    @property
    def n_sequences(self):
        """Sequences that a mixture of one phase yields before it repeats one."""
        (phase,) = self.phases
        ends = []
        for k, corpus in enumerate(self.corpora):
            periods, rest = divmod(corpus.n_sequences, int(phase.shares[k]))
            ends.append(periods * len(phase.which) + np.flatnonzero(phase.which == k)[rest])
        return int(min(ends))

    @property
    def bytes_per_token(self):
        """Mean UTF-8 bytes of a token in a mixture of one phase; None where a corpus has no manifest with its size."""
        each = [corpus.bytes_per_token for corpus in self.corpora]
        return None if None in each else float(np.average(each, weights=self.shares[0]))

    def check_encoding(self, encoding):
        """Raises UserError where `encoding`, unless it is None, is not the tokenizer that made all of the shards."""
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
        """{metric: number of epochs of each corpus} after n sequences of the run."""
        phase = self.phases[np.searchsorted(self.borders, n, "right")]
        seen = phase.seen(n)
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
    """Which corpus each sequence of a phase comes from. A pattern, the period, is repeated.

    Of the c sequences of a corpus in a period, the i-th lies at the fraction (i + 1/2) / c of the period. So every
    stretch of the phase has the right shares to within about one sequence. For example, shares [2, 1] make the period
    a b a. A corpus is read in its own order through all periods and phases, as if it were alone.

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
        periods, positions = np.divmod(numbers - self.start, len(self.which))
        return self.before + np.multiply.outer(periods, self.shares) + self.earlier[positions]


def data_fingerprint(*mixtures):
    """The hash of the content of the mixtures' shards. It does not depend on the folder or bucket that they are in."""
    contents = []
    for corpus in [corpus for mixture in mixtures for corpus in mixture.corpora]:
        shards = []
        for shard in corpus.shards:
            name = os.path.basename(shard.path)
            sha256 = shard.entry.get("sha256")
            # without a manifest nothing but the name and the length is known before all of the file is read
            known = {"name": name, "tokens": shard.length, "sha256": sha256}
            shards.append(known if sha256 else (name, shard.length))
        contents.append([shards, corpus.manifest.get("tokenizer_sha256")])
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def corpus_root(cfg, name):
    """The folder or address of a corpus of --mix. Its name is either an address itself, or a folder inside --data."""
    return name if is_remote(name) else os.path.join(cfg.data.data, name)


def parse_mix(mix):
    """The phases of --mix: [(share of the run at which it ends, {name: weight})]. Raises UserError.

    "a:2,b:1 until 0.8, b:1" is [(0.8, {"a": 2.0, "b": 1.0}), (1.0, {"b": 1.0})]. Without --mix, which is then "", the
    only corpus is --data itself, with the name "".
    """
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
                f"{part.strip()!r} must be a folder that is named once in its phase, a colon and a weight "
                f"above 0, until a share of the run above {before:g} and below 1; {EXAMPLE}",
                flag="mix",
                value=mix,
            )
        weights[name] = float(weight)
        if end:
            before = float(end)
            phases.append((before, weights))
            weights = {}
    if not weights:
        raise UserError(f"nothing follows the last until; {EXAMPLE}", flag="mix", value=mix)
    return [*phases, (1.0, weights)]


def shares_of(mix, names):
    """int64 [names]: sequences of each corpus in the shortest period that has the shares of {name: weight}, to within
    1/PERIOD of it. Raises UserError."""
    weights = np.array([mix.get(name, 0.0) for name in names])
    # the borders are rounded, not the shares, so that the shares still add up to PERIOD
    edges = np.cumsum([0.0, *weights]) / weights.sum() * PERIOD
    shares = np.diff(np.rint(edges).astype(np.int64))
    for name, weight, share in zip(names, weights, shares):
        if weight and not share:
            raise UserError(
                f"{name} has less than 1/{PERIOD:,} of the run; leave it out", flag="mix"
            )
    return shares // np.gcd.reduce(shares)


def average_mix(phases):
    """{name: weight} of a mixture over a whole run. phases: as `parse_mix` returns them."""
    average = Counter()
    start = 0.0
    for end, mix in phases:
        total = sum(mix.values())
        for name, weight in mix.items():
            average[name] += (end - start) * weight / total
        start = end
    return average if len(phases) > 1 else phases[0][1]
