"""Little text: where the shards hold too little for the preset's sequences, these get shorter, and batches smaller.
Where a run would read a text many times, it ends earlier, and decay and dropout keep it from learning that by heart.
"""

import math
import os
from typing import NamedTuple

from config.checks import check
from config.flags import free_of_weights
from utils import flatten

# The sequences that training and validation have at least, before they get shorter than the preset's, down to SHORTEST
# tokens. A step gets fewer sequences until an epoch has EPOCH steps, but keeps FEW of them, so that several devices can
# share it, unless an epoch had fewer than SHORT_EPOCH steps then.
FEWEST = {"train": 32, "val": 4}
SHORTEST = 16
EPOCH, FEW, SHORT_EPOCH = 32, 4, 8
# What tells how well a run can learn its text by heart: the times that it reads it again, times its active parameters
# for each token of the text. Below LITTLE nothing is needed; from MUCH on dropout zeroes this share of channels, and
# decay removes this share of each weight in a step at --max_lr. After EPOCHS a run that could learn it by heart ends,
# unless steps were given. Measured on 60 KB to 4 MB of prose and code (dev/log.md, 2026-11-29).
LITTLE, MUCH = 4, 12
DROPOUT, DECAY = 0.2, 0.02
EPOCHS = 4


class Reading(NamedTuple):
    """How a run reads its text."""

    text: int  # tokens to train on, in one epoch
    tokens: int  # to train on, in all
    parameters: int  # that a token uses, with the embedding

    @property
    def epochs(self):
        """Times that it reads it."""
        return self.tokens / self.text

    @property
    def by_heart(self):
        """How well the run can learn it by heart: see LITTLE."""
        return max(0.0, self.epochs - 1) * self.parameters / self.text


def reading(flags, found):
    """The `Reading` of a run whose random weights are trained on one text alone, the length of which its shards tell;
    else None. Raises UserError where the flags of the model do not fit together."""
    cfg = flags.cfg
    splits = sorted(os.path.basename(folder) for _, folder, _ in found.shards)
    told = all(manifest.get("tokens") for *_, manifest in found.shards)
    if splits != ["train", "val"] or not told or not found.active_params or cfg.run.init_from:
        return None
    check(cfg)  # a model that does not fit together has no number of parameters
    tokens = cfg.run.training_steps * tokens_of_step(cfg)
    return Reading(tokens_of(found, "train"), tokens, found.active_params(cfg))


def tokens_of_step(cfg):
    """Tokens that a step trains on."""
    return cfg.data.global_batch_size * cfg.model.T


def tokens_of(found, split):
    """Tokens of a split of the shards."""
    those = [made for _, folder, made in found.shards if os.path.basename(folder) == split]
    return sum(made["tokens"] for made in those)


def steps(flags, found):
    """--training_steps that read the text EPOCHS times, where more would learn it by heart; else what they are."""
    now = reading(flags, found)
    if not now or now.by_heart <= LITTLE or now.epochs <= EPOCHS:
        return flags.cfg.run.training_steps
    return max(1, round(EPOCHS * now.text / tokens_of_step(flags.cfg)))


def tell_steps(flags, settled, found):
    """What `steps` changed, in words, or ""."""
    before, now = flags.cfg.run.training_steps, settled.cfg.run.training_steps
    if before == now:
        return ""
    return (
        f"training takes {now:,} steps and not {before:,}: after reading {tokens_of(found, 'train'):,} tokens of text "
        f"{EPOCHS} times it would only learn them by heart"
    )


def rates(flags, found):
    """{flag: value} of `not_by_heart` for a new run. What was given stays."""
    now = reading(flags, found)
    return not_by_heart(flatten(flags.cfg), now) if now and not found.resumes else {}


def not_by_heart(flags, now):
    """{flag: value} of --dropout_rate and --weight_decay for a run with the {flag: value} `flags` and the `Reading`
    `now`. What they are already is the least.

    Example: `tiny` with 1.3M parameters, 400 steps on 241,000 tokens. It reads these 3.4 times, so 2.4 times again,
    with 5.4 parameters for each: 13 is more than MUCH. Dropout becomes 0.2, and decay 0.02 / 16e-3 = 1.25, not 0.4.
    """
    share = min(1.0, max(0.0, (now.by_heart - LITTLE) / (MUCH - LITTLE)))
    settled = dict(dropout_rate=max(flags["dropout_rate"], round(DROPOUT * share, 2)))
    if flags["optimizer"] == "muon":  # AdamW's rates are another scale
        decay = float(f"{DECAY * share / flags['max_lr']:.3g}")
        settled["weight_decay"] = max(flags["weight_decay"], decay)
    return settled


def tell_rates(flags, settled, found):
    """What `rates` changed, in words, or ""."""
    before, now = flatten(flags.cfg), flatten(settled.cfg)
    if all(before[flag] == now[flag] for flag in ("dropout_rate", "weight_decay")):
        return ""
    how = reading(settled, found)
    return (
        f"{how.text:,} tokens of text are read {how.epochs:.1f} times, so that they are not learned by heart: dropout "
        f"{now['dropout_rate']:g}, decay {now['weight_decay']:g}"
    )


def sizes(flags, found):
    """{flag: value} of shorter sequences, and of fewer of them in a step and in a validation batch, where the shards
    hold too little text for those of the preset, and the rate that suits such a batch. What was given stays.

    Of 3 KB, which are 1,800 tokens to train on and 200 to validate on, `tiny` makes sequences of 32 tokens and not of
    128, 54 and 6 of them, and steps of 4 and not of 16: an epoch has 13. It is the same on every mesh whose dp x pp
    divides these batches; on others they are larger.
    """
    cfg, given = flags
    if found.resumes:  # which keeps its own
        return {}
    shards = found.shards
    splits = {os.path.basename(folder) for _, folder, _ in shards}
    if splits != {"train", "val"} or not all(manifest for *_, manifest in shards):
        return {}  # nothing tells how much it is
    dp, pp, _ = cfg.run.n_device_axis
    even = dp * pp  # which must divide a batch
    T = cfg.model.T if "T" in given else shorter(cfg, shards)
    held = sequences_in(shards, T)
    total = before = cfg.data.global_batch_size
    if not given & {"global_batch_size", "train_batch_size"}:
        total = halved(total, even, most_of_step(held["train"]))
    val = cfg.data.val_batch_size
    if held["val"] < total and not given & {"train_batch_size", "val_batch_size"}:
        val = halved(total, even, held["val"]) // dp
    rate = cfg.optimizer.max_lr * math.sqrt(total / before)  # rule 1 of docs/rates.md
    return dict(T=T, global_batch_size=total, val_batch_size=val, max_lr=rate)


def shorter(cfg, shards):
    """--T, halved until the shards hold enough sequences."""
    dp, pp, tp = cfg.run.n_device_axis
    T = cfg.model.T
    shortest = SHORTEST
    if cfg.run.init_from and "T" not in free_of_weights(cfg.model.architecture):
        shortest = T  # that of the weights, which have a vector for each position
    fewest_val = max(FEWEST["val"], dp * pp)
    while T % (2 * tp) == 0 and T > shortest and not enough(shards, T, fewest_val):
        T //= 2
    return T


def sequences_in(shards, T):
    """{split: sequences of T + 1 tokens} of shards as `listing.manifests` lists them."""
    held = dict.fromkeys(FEWEST, 0)
    for _, folder, manifest in shards:
        each = [max(0, (shard["tokens"] - 1) // T) for shard in manifest["shards"]]
        held[os.path.basename(folder)] += sum(each)
    return held


def enough(shards, T, fewest_val):
    """Whether shards hold enough sequences of T tokens to train and to validate, and each corpus at least one."""
    held = sequences_in(shards, T)
    if held["train"] < FEWEST["train"] or held["val"] < fewest_val:
        return False
    return all(any(sequences_in([shard], T).values()) for shard in shards)


def most_of_step(held):
    """The most sequences that a step should have where there are `held` to train on."""
    return max(held // EPOCH, min(FEW, held // SHORT_EPOCH))


def halved(size, even, most):
    """A batch of `size` sequences, halved while it has more than `most` and can be divided by `even`."""
    while size > most and size % (2 * even) == 0:
        size //= 2
    return size


def tell(flags, settled, found):
    """What `sizes` changed, in words, or ""."""
    before, now = flags.cfg, settled.cfg
    T, G, val = now.model.T, now.data.global_batch_size, now.data.val_batch_size
    changed = []
    if T != before.model.T:
        changed.append(f"a sequence has {T} tokens and not {before.model.T}")
    if G != before.data.global_batch_size:
        changed.append(f"a step has {G} sequences and not {before.data.global_batch_size}")
    if now.optimizer.max_lr != before.optimizer.max_lr:
        changed.append(
            f"the rate is at most {now.optimizer.max_lr:g} and not {before.optimizer.max_lr:g}"
        )
    if val != before.data.val_batch_size:
        n = val * now.run.n_device_axis[0]
        changed.append(f"a validation batch has {n} sequences and not {G}")
    if not changed:
        return ""
    held = f"{tokens_of(found, 'train'):,} tokens to train on, {tokens_of(found, 'val'):,} tokens to validate on"
    return f"little text ({held}): {', '.join(changed)}"
