"""Little text: where the shards hold too little for the preset's sequences, these get shorter, and batches smaller.
Where a run reads a text many times, decay and dropout keep it from learning that by heart.
"""

import os

from config.flags import free_of_weights
from utils import flatten

# The sequences that training and validation have at least, before they get shorter than the preset's, down to SHORTEST
# tokens, and the steps that an epoch has at least, before these get fewer sequences.
FEWEST = {"train": 32, "val": 4}
SHORTEST = 16
EPOCH = 8
# What a run does against learning its text by heart: the share of channels that dropout zeroes, and the share of each
# weight that decay removes in a step at --max_lr. It does all of it where the times that it reads the text again, times
# its active parameters for each token of the text, are MUCH, and nothing where they are LITTLE. Measured on 1 and 4 MB
# of prose and code (dev/log.md, 2026-11-29).
DROPOUT, DECAY = 0.2, 0.02
LITTLE, MUCH = 4, 12


def is_new_of_one_text(flags, found):
    """Whether it is a new run on the shards of one text, which say how many tokens they hold."""
    splits = sorted(os.path.basename(folder) for _, folder, _ in found.shards)
    told = all(manifest for *_, manifest in found.shards)
    return splits == ["train", "val"] and told and not found.resumes


def rates(flags, found):
    """{flag: value} of `not_by_heart`, where random weights are trained on one text alone. What was given stays."""
    known = found.active_params and is_new_of_one_text(flags, found)
    if flags.cfg.run.init_from or not known:
        return {}
    now = flatten(flags.cfg)
    tokens = now["training_steps"] * now["global_batch_size"] * now["T"]
    return not_by_heart(now, tokens, tokens_to_train_on(found), found.active_params(flags.cfg))


def not_by_heart(now, tokens, text, parameters):
    """{flag: value} of --dropout_rate and --weight_decay for a run with the {flag: value} `now`, a model of that many
    active parameters that trains on that many tokens of a text of `text` tokens. What they are already is the least.

    Example: `tiny` with 1.3M parameters, 800 steps on 241,000 tokens. It reads these 6.8 times, so 5.8 times again,
    with 5.4 parameters for each: 31 is more than MUCH. Dropout becomes 0.2, and decay 0.02 / 16e-3 = 1.25, not 0.4.
    """
    again = max(0.0, tokens / text - 1)
    share = min(1.0, max(0.0, (again * parameters / text - LITTLE) / (MUCH - LITTLE)))
    found = dict(dropout_rate=max(now["dropout_rate"], round(DROPOUT * share, 2)))
    if now["optimizer"] == "muon":  # AdamW's rates are another scale
        decay = float(f"{DECAY * share / now['max_lr']:.3g}")
        found["weight_decay"] = max(now["weight_decay"], decay)
    return found


def tokens_to_train_on(found):
    """Tokens of the training split."""
    (made,) = [made for _, folder, made in found.shards if os.path.basename(folder) == "train"]
    return made["tokens"]


def tell_rates(flags, settled, found):
    """What `rates` changed, in words, or ""."""
    before, now = flatten(flags.cfg), flatten(settled.cfg)
    if all(before[flag] == now[flag] for flag in ("dropout_rate", "weight_decay")):
        return ""
    text = tokens_to_train_on(found)
    epochs = now["training_steps"] * now["global_batch_size"] * now["T"] / text
    return (
        f"{text:,} tokens of text are read {epochs:.1f} times, so that they are not learned by heart: dropout "
        f"{now['dropout_rate']:g}, decay {now['weight_decay']:g}"
    )


def sizes(flags, found):
    """{flag: value} of shorter sequences, and of fewer of them in a step and in a validation batch, where the shards
    hold too little text for those of the preset. What was given stays.

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
    total = cfg.data.global_batch_size
    if not given & {"global_batch_size", "train_batch_size"}:
        total = halved(total, even, held["train"] // EPOCH)
    val = cfg.data.val_batch_size
    if held["val"] < total and not given & {"train_batch_size", "val_batch_size"}:
        val = halved(total, even, held["val"]) // dp
    return dict(T=T, global_batch_size=total, val_batch_size=val)


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
    if val != before.data.val_batch_size:
        n = val * now.run.n_device_axis[0]
        changed.append(f"a validation batch has {n} sequences and not {G}")
    if not changed:
        return ""
    held = []
    for split, what in (("train", "to train on"), ("val", "to validate on")):
        those = [made for _, folder, made in found.shards if os.path.basename(folder) == split]
        held.append(f"{sum(made['tokens'] for made in those):,} tokens {what}")
    return f"little text ({', '.join(held)}): {', '.join(changed)}"
