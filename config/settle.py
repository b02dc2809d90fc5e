"""From flags to the final configuration: `settle` is the way in. What it refuses, it refuses in a sentence."""

import contextlib
import math
import os
import re
from typing import NamedTuple

import numpy as np

import architectures
import utils
from runtime import chips, platforms
from runtime.files import is_remote, names_in, read_json
from runtime.messages import UserError, say
from shards.tokenization import check_ids
from utils import Config, flags_with, flatten, replace

PADDING = 1.01  # up to which published models pad their vocabularies
MOST_PROFILED = 50  # steps; longer traces are too large for the programs that show them
# Of config.json, beside what a run keeps: these tell its batch, and `data` where it was read.
NEEDED_TO_RESUME = {"train_batch_size", "val_batch_size", "accumulation_steps", "n_device_axis"}
NEEDED_TO_RESUME |= {"data"}
# How a replica's share of the global batch is cut up, which changes no more than rounding.
SPLIT = {"train_batch_size", "accumulation_steps", "microbatches", "microbatch_size"}
# Of little text: the sequences that training and validation have at least, before they get shorter than the preset's,
# down to SHORTEST tokens, and the steps that an epoch has at least, before these get fewer sequences.
FEWEST = {"train": 32, "val": 4}
SHORTEST = 16
EPOCH = 8
# {flag: values that meant another model before `utils.Model.revision` 1}
CHANGED = dict(
    latent_conv=range(1, 65),  # weighed each channel of a rotary key apart
    experts_per_token=[1],  # its gate was 1, whatever its score
)


class Flags(NamedTuple):
    """A command line: a configuration that is not settled yet, and which of its flags were given."""

    cfg: Config
    given: frozenset

    def follow(self, **flags):
        """With these values of those flags that were not given."""
        rest = without(self.given, flags)
        return self._replace(cfg=replace(self.cfg, **rest))

    def fix(self, **flags):
        """With these values, as if they had been given."""
        return Flags(replace(self.cfg, **flags), self.given | flags.keys())


def without(some, flags):
    """{flag: value} of `flags` but for `some`."""
    return {flag: value for flag, value in flags.items() if flag not in some}


def settle(
    flags,
    n_devices,
    weights=None,
    stored=None,
    shards=(),
    encoding=None,
    device_kind="",
    memory_share=None,
):
    """The final configuration, in which nothing is open. It is made here and nowhere else.

    n_devices: how many are present; what --n_devices and --n_device_axis leave open follows from it.
    weights: {flag: value} of the model in --init_from, as `weights.open_weights` returns it; None without that flag.
    stored: `stored_config` of the run that it resumes, {} of a new one, None where none is meant (--plan, benchmarks).
    shards: as `listing.manifests` lists them. encoding: their tokenizer, None where none is known.
    device_kind: of the devices, as jax names it; "" where there is none to tell.
    memory_share: Config -> the share of a device's memory that a step needs; None where that is not known.
    Raises UserError naming the flag, its value and what would do.
    """
    if weights:
        flags = adopt(flags, weights)
    flags = follow_dtype(flags, stored or {}, device_kind)
    flags = follow_shards(flags, stored or {}, shards)
    flags = follow(flags)
    flags = flags._replace(cfg=complete(flags.cfg, n_devices))
    flags = resume(flags, stored)
    flags = fit_text(flags, stored or {}, shards)
    flags = flags._replace(cfg=split_batch(flags, stored, memory_share))
    check_vocabulary(flags, bool(weights or stored), shards)
    if stored is not None:
        flags = flags._replace(cfg=begin_documents(flags.cfg, encoding))
    cfg = fit_samples(flags, encoding)
    check(cfg)
    if stored:
        check_validation(cfg, stored)
        check_same(cfg, stored)
    return cfg


def validate(cfg, n_present):
    """`cfg` completed for the `n_present` devices and checked, every flag as it is but those that are 0, which follow
    from others. Raises UserError."""
    cfg = complete(cfg, n_present)
    given = SPLIT | {"val_batch_size"}
    if not cfg.data.train_batch_size:
        given -= {"accumulation_steps"}
    cfg = split_batch(Flags(cfg, frozenset(given)))
    check(cfg)
    return cfg


def complete(cfg, n_present):
    """`cfg` with the mesh for `n_present` devices, the pipeline's rounds and save_steps. Raises UserError."""
    r = cfg.run
    n_devices = r.n_devices or n_present
    if n_devices > n_present:
        raise UserError(f"only {n_present} devices are present", flag="n_devices", value=n_devices)
    dp, pp, tp = r.n_device_axis
    dp = dp or n_devices // max(1, pp * tp)
    wanted = dp * pp * tp
    if min(dp, pp, tp) < 1 or wanted != n_devices:
        simulate = ""
        if platform_of(cfg) == "cpu":
            simulate = f" (without an accelerator, --n_devices {wanted} simulates them)"
        raise UserError(
            f"--n_device_axis {dp} {pp} {tp}: dp x pp x tp is {wanted} but must be the number of devices, "
            f"{n_devices}{simulate}."
        )
    most = 4 if pp > 1 else 1
    rounds = [n for n in range(1, most + 1) if cfg.model.blocks % (pp * n) == 0]
    tenth = r.training_steps // 10
    return replace(
        cfg,
        n_device_axis=(dp, pp, tp),
        n_devices=n_devices,
        pp_interleave=r.pp_interleave or max(rounds, default=1),
        save_steps=r.save_steps or r.eval_every * min(10, max(1, tenth // r.eval_every)),
    )


def platform_of(cfg):
    """The platform that a run is for: that of --plan's machine, else that of the devices here."""
    if cfg.plan.plan:
        machine = chips.parse_machine(cfg.plan.plan)
        return "gpu" if machine and machine[1].gpu else "tpu"
    return platforms.platform()


def adopt(flags, weights):
    """`flags` with the architecture {flag: value} of the weights in --init_from. Raises UserError."""
    architecture = weights["architecture"]
    weights = without(free_of_weights(architecture), weights)
    whose = f"the weights in --init_from {flags.cfg.run.init_from} have"
    compare(flags.cfg, weights, flags.given, whose)
    return flags.follow(**architectures.flags_without_choice(architecture) | weights)


def free_of_weights(architecture):
    """Flags of the model that may differ between weights and what uses them."""
    free = flags_with(free_with_weights=True) | (utils.FIELDS.keys() - utils.KEPT)
    return free - {"T"} if architectures.architecture(architecture).learns_positions else free


def follow_dtype(flags, stored, device_kind):
    """`flags` with the --model_dtype of the run that it resumes, or else with float32 on a device without products in
    bfloat16, unless it was given, which is printed."""
    if "model_dtype" in stored:
        return flags.follow(model_dtype=stored["model_dtype"])
    device = chips.in_float32_only(device_kind)
    if not device or flags.cfg.model.model_dtype != "bfloat16":
        return flags
    given = "model_dtype" in flags.given
    then = "bfloat16 saves memory here, no time" if given else "the model is float32 too"
    say(f"{device} does not multiply in bfloat16, XLA does so in float32: {then}")
    return flags.follow(model_dtype="float32")


def follow_shards(flags, stored, shards):
    """`flags` with the vocabulary of the tokenizer that made `shards`, as `listing.manifests` lists them, unless flags,
    weights or the run that it resumes have one, or the preset's is larger by padding alone. A change is printed."""
    r, now = flags.cfg.run, flags.cfg.model.vocab_size
    if stored:
        return flags.follow(vocab_size=stored.get("vocab_size", now))
    if flags.given & {"vocab_size", "tokenizer"} or r.init_from:
        return flags
    sizes = {folder: manifest.get("vocab_size", 0) for _, folder, manifest in shards}
    # of several tokenizers the largest: that they differ is then refused, not one of their ids
    folder = max(sizes, key=sizes.get, default="")
    size = sizes.get(folder) or now
    if size <= now < PADDING * size:
        return flags
    say(f"the vocabulary has {size:,} tokens and not {now:,}, as the tokenizer of {folder}")
    return flags.follow(vocab_size=size)


def fit_text(flags, stored, shards):
    """`flags` with shorter sequences, fewer of them in a step and in a validation batch, where `shards` hold too little
    text for those of the preset. What was given stays, and what the run has that is resumed. A change is printed.

    Of 3 KB, which are 1,800 tokens to train on and 200 to validate on, `tiny` makes sequences of 32 tokens and not of
    128, 54 and 6 of them, and steps of 4 and not of 16: an epoch has 13. It is the same on every mesh whose dp x pp
    divides these batches; on others they are larger.
    """
    if stored:
        return flags.follow(T=stored.get("T", flags.cfg.model.T))
    splits = {os.path.basename(folder) for _, folder, _ in shards}
    if splits != {"train", "val"} or not all(manifest for *_, manifest in shards):
        return flags  # nothing tells how much it is
    before = flags.cfg
    dp, pp, tp = before.run.n_device_axis
    even = dp * pp  # which must divide a batch
    T = before.model.T
    shortest = SHORTEST
    if before.run.init_from and "T" not in free_of_weights(before.model.architecture):
        shortest = T  # that of the weights, which have a vector for each position
    while T % (2 * tp) == 0 and T > shortest and not enough(shards, T, max(FEWEST["val"], even)):
        T //= 2
    flags = flags.follow(T=T)
    held = sequences_in(shards, flags.cfg.model.T)
    if "train_batch_size" not in flags.given:
        most = held["train"] // EPOCH
        flags = flags.follow(global_batch_size=halved(before.data.global_batch_size, even, most))
    total = flags.cfg.data.global_batch_size
    if held["val"] < total and not flags.given & {"train_batch_size", "val_batch_size"}:
        flags = flags.follow(val_batch_size=halved(total, even, held["val"]) // dp)
    tell_text(before, flags.cfg, shards)
    return flags


def sequences_in(shards, T):
    """{split: sequences of T + 1 tokens} of shards as `listing.manifests` lists them."""
    held = dict.fromkeys(FEWEST, 0)
    for _, folder, manifest in shards:
        each = [max(0, (shard["tokens"] - 1) // T) for shard in manifest["shards"]]
        held[os.path.basename(folder)] += sum(each)
    return held


def enough(shards, T, fewest_val):
    """Whether shards hold sequences of T tokens enough to train and to validate, and each corpus one."""
    held = sequences_in(shards, T)
    if held["train"] < FEWEST["train"] or held["val"] < fewest_val:
        return False
    return all(any(sequences_in([shard], T).values()) for shard in shards)


def halved(size, even, most):
    """A batch of `size` sequences, halved while it has more than `most` and can be divided by `even`."""
    while size > most and size % (2 * even) == 0:
        size //= 2
    return size


def tell_text(before, now, shards):
    """Print what `fit_text` changed."""
    T, G, val = now.model.T, now.data.global_batch_size, now.data.val_batch_size
    changed = []
    if T != before.model.T:
        changed.append(f"a sequence has {T} tokens and not {before.model.T}")
    if G != before.data.global_batch_size:
        changed.append(f"a step has {G} sequences and not {before.data.global_batch_size}")
    if val != before.data.val_batch_size:
        n = val * now.run.n_device_axis[0]
        changed.append(f"a validation batch has {n} sequences and not {G}")
    if changed:
        held = []
        for split, what in (("train", "to train on"), ("val", "to validate on")):
            those = [made for _, folder, made in shards if os.path.basename(folder) == split]
            held.append(f"{sum(made['tokens'] for made in those):,} tokens {what}")
        say(f"little text ({', '.join(held)}): {', '.join(changed)}")


def check_vocabulary(flags, fixed, shards):
    """Raises UserError where the tokenizer of `shards` has more tokens than --vocab_size. Where the model has weights,
    so that its vocabulary is `fixed`, it is a warning: published tokenizers have tokens that no text becomes. (Where
    neither holds, the shards are of several tokenizers, or not of --tokenizer, which is refused as they are opened.)"""
    size = flags.cfg.model.vocab_size
    for _, folder, manifest in shards:
        needed = manifest.get("vocab_size", 0)
        if needed > size and fixed:
            say(
                f"warning: the tokenizer of {folder} has {needed} tokens, and the model {size}; a token id beyond ends "
                f"the run where it is read"
            )
            return
        if needed > size and "vocab_size" in flags.given:
            raise UserError(
                f"the shards in {folder} need {needed}; give that", flag="vocab_size", value=size
            )


def follow(flags):
    """`flags`, where a default that would refuse what was given gives way to it; whatever fits stays as it is."""
    if "architecture" in flags.given:
        flags = flags.follow(**architectures.flags_without_choice(flags.cfg.model.architecture))
    m = flags.cfg.model
    flags = flags.follow(experts_per_token=min(m.experts_per_token, m.n_experts))
    return flags.follow(**follow_schedule(flags))


def follow_schedule(flags):
    """{flag: value} of a schedule that ends with the run, where training_steps was given without end_steps. A warm-up
    and a decay that were not given fit in it."""
    (cfg, given), o = flags, flags.cfg.optimizer
    end = o.end_steps
    if "training_steps" in given and "end_steps" not in given and ends(o):
        end = cfg.run.training_steps
    decay = o.decay_steps if o.schedule == "wsd" else 0
    if "decay_steps" not in given:
        decay = min(decay, max(0, end - o.warmup_steps))
    before = max(0, end - decay)  # steps before the decay
    too_long = o.warmup_steps > before or o.warmup_steps >= end
    warmup = before // 10 if too_long else o.warmup_steps
    return dict(end_steps=end, decay_steps=decay, warmup_steps=warmup)


def ends(o):
    """Whether the learning rate of `utils.Optimizer` o comes to an end: that of a trunk does not."""
    return o.schedule != "wsd" or o.decay_steps > 0


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def split_batch(flags, stored=None, memory_share=None):
    """The configuration of `flags`, whose mesh is complete, with the global batch divided among replicas (dp),
    accumulation steps and microbatches. What was given stays as it is.

    What a training learns depends on its global batch. That is the same on every mesh, and the rest follows from it:
    128 sequences a step on (8, 1, 1) are 16 on each replica, in 4 microbatches of --microbatch_size 4. Where
    activations of 16 sequences do not fit in a device, they are 2 accumulation steps of 8 sequences.

    stored: config.json of the run that is resumed, if any. memory_share: Config -> the share of a device's memory that
    a step of it needs; None where that is not known. Raises UserError.
    """
    cfg, given = flags
    dp, pp, _ = cfg.run.n_device_axis
    accumulation = cfg.run.accumulation_steps
    size = cfg.data.train_batch_size
    if size and "train_batch_size" in given and "global_batch_size" not in given:
        cfg = replace(cfg, global_batch_size=size * dp * accumulation)
    check_global_batch(cfg, given, stored)
    own = cfg.data.global_batch_size // dp  # sequences of a replica
    if size and "train_batch_size" in given:
        return cut_replica(cfg, given, own // size)
    if "accumulation_steps" in given:
        return cut_replica(cfg, given, accumulation)
    fewest = math.gcd(accumulation, own // pp)
    tried = {}  # {share of the memory that it needs: Config}
    for accumulation in divisors(own // pp):
        if accumulation % fewest:
            continue
        try:
            found = cut_replica(cfg, given, accumulation)
        except UserError:  # fewer sequences than --microbatches, where that was given
            if tried:
                break
            raise
        share = 0
        if memory_share:
            check(found)  # the formulas take for granted that all fits together
            share = memory_share(found)
        tried.setdefault(share, found)
        if share <= 1:
            return found
    # Nothing fits. More steps than these save next to nothing, and each takes time.
    return next(found for share, found in tried.items() if share <= 1.05 * min(tried))


def check_global_batch(cfg, given, stored):
    """Raises UserError where the global batch cannot be divided as the mesh and the flags say."""
    d = cfg.data
    total = d.global_batch_size
    dp, pp, tp = cfg.run.n_device_axis
    whose, other = f"--preset {cfg.run.preset}", ""
    if stored:
        whose, other = f"run {cfg.run.name}", ", or give another --name"
    elif "global_batch_size" in given:
        whose = "--global_batch_size"
    if total % (dp * pp):
        mesh = f"dp x pp = {dp * pp} of the mesh (dp, pp, tp) = ({dp}, {pp}, {tp})"
        said = f"{whose} has {total} sequences a step, which {mesh} must divide"
        if whose == "--global_batch_size":
            said = f"{whose} {total}: must be a multiple of {mesh}"
        raise UserError(f"{said}; give {even_mesh(cfg)}{other}.")
    parts = {
        "train_batch_size": d.train_batch_size,
        "accumulation_steps": cfg.run.accumulation_steps,
    }
    parts = {flag: n for flag, n in parts.items() if n and flag in given}
    product = dp * math.prod(parts.values())
    exact = len(parts) == 2
    if total % product or (exact and total != product):
        flag, *_ = parts
        words = " x ".join(map(str, [*parts.values(), dp]))
        must = "be" if exact else "divide"
        raise UserError(
            f"--{flag} {parts[flag]}: {words} (dp) is {product} but must {must} the {total} sequences a step that "
            f"{whose} has; leave the flag out{other}."
        )


def even_mesh(cfg):
    """Flags of a mesh like that of `cfg` whose dp x pp divides the global batch: on all of its devices where heads and
    sequence can be divided among more, else on fewer."""
    total = cfg.data.global_batch_size
    dp, pp, tp = cfg.run.n_device_axis
    n = dp * pp * tp
    if total % pp:
        dp, pp = dp * pp, 1
    even = math.gcd(dp, total // pp)
    rest = dp // even * tp
    if cfg.model.n_head % rest == 0 and cfg.model.T % rest == 0:
        dp, tp = even, rest
    else:
        dp = max(size for size in range(1, dp + 1) if total % (size * pp) == 0)
    mesh = f"--n_device_axis {dp} {pp} {tp}"
    used = dp * pp * tp
    return mesh if used == n else f"--n_devices {used} {mesh}"


def cut_replica(cfg, given, accumulation):
    """`cfg` with a replica's sequences of an accumulation step, in the fewest microbatches of at most microbatch_size
    sequences that pp divides. Raises UserError where what was given does not go together."""
    d = cfg.data
    dp, pp, _ = cfg.run.n_device_axis
    parts = dp * accumulation
    train = d.global_batch_size // parts
    fitting = [n for n in divisors(train) if n % pp == 0]
    micro = d.microbatches if "microbatches" in given else 0
    if not micro:
        small = [n for n in fitting if train // n <= d.microbatch_size]
        micro = min(small, default=max(fitting, default=pp))
    if micro not in fitting:
        those = ["microbatches", "train_batch_size", "accumulation_steps"]
        flag = next((flag for flag in those if flag in given), "n_device_axis")
        could = ", ".join(map(str, fitting[:5])) or "no number"
        raise UserError(
            f"--{flag} {flatten(cfg)[flag]}: a replica's {train} sequences cannot be divided into {micro} microbatches "
            f"on pp {pp} stages; {could} would do."
        )
    if d.val_batch_size % pp:
        raise UserError(
            f"must be a multiple of the pp {pp} stages",
            flag="val_batch_size",
            value=d.val_batch_size,
        )
    return replace(
        cfg,
        train_batch_size=train,
        microbatches=micro,
        accumulation_steps=accumulation,
    )


def begin_documents(cfg, encoding):
    """`cfg` with the token that begins a document, where --document_mask needs it. Raises UserError."""
    if not cfg.model.document_mask or cfg.model.end_of_text >= 0:
        return cfg
    if encoding is None:
        raise UserError(
            f"the tokenizer of --data {cfg.data.data}, whose token begins a document, is not known; "
            f"give it as --tokenizer",
            flag="document_mask",
        )
    where = "--document_mask: what begins a document"
    check_ids(encoding, [encoding.eot_token], cfg.model.vocab_size, where)
    return replace(cfg, end_of_text=encoding.eot_token)


def fit_samples(flags, encoding):
    """The configuration with --max_tokens cut, if it was not given, so that the prompt and a sample fit in --T; a
    prompt that was not given is cut in `prompt_ids`. Raises UserError where what was given does not fit."""
    cfg, given = flags
    if encoding is None or cfg.model.T < 2:
        return cfg
    T, tokens = cfg.model.T, cfg.sample.max_tokens
    prompt = whole_prompt(cfg, encoding)
    if "prompt" in given:
        check_ids(encoding, prompt, cfg.model.vocab_size, "--prompt: the text")
    length = len(prompt)
    if "max_tokens" not in given:
        tokens = max(1, min(tokens, T - length))
    length = length if "prompt" in given else 1
    if length + tokens > T:
        flag = f"max_tokens {tokens}" if "max_tokens" in given else "prompt"
        raise UserError(f"--{flag}: {length} tokens and {tokens} after them are more than --T {T}.")
    return replace(cfg, max_tokens=tokens)


def whole_prompt(cfg, encoding):
    """Token ids of --prompt as the beginning of a document."""
    return [encoding.eot_token, *encoding.encode_ordinary(cfg.sample.prompt)]


def prompt_ids(cfg, encoding):
    """Token ids, int32, that samples continue; None where no tokenizer is known, --T leaves no room or the model does
    not know one of them."""
    if encoding is None or cfg.model.T < 2:
        return None
    ids = whole_prompt(cfg, encoding)[: cfg.model.T - cfg.sample.max_tokens]
    if max(ids) >= cfg.model.vocab_size:
        return None
    return np.array(ids, np.int32)


def global_batches(stored):
    """Sequences of a training step and of a validation batch, on all devices, of a run's {flag: value}."""
    dp = stored["n_device_axis"][0]
    total = stored["train_batch_size"] * dp * stored["accumulation_steps"]
    return total, stored["val_batch_size"] * dp or total


def resume(flags, stored):
    """`flags` with the global batch of the run that `stored` describes. Raises UserError.

    On the same mesh the batch is divided as before, unless flags say how: sums in another order differ in the last bit.
    """
    r = flags.cfg.run
    if not stored:
        return flags
    if "data_fingerprint" not in stored:
        raise UserError(
            f"this run holds weights alone; begin another from them with --init_from {r.folder}",
            flag="name",
            value=r.name,
        )
    check_stored(stored, r.folder, NEEDED_TO_RESUME)
    total, val_total = global_batches(stored)
    if "global_batch_size" in flags.given and flags.cfg.data.global_batch_size != total:
        raise UserError(
            f"run {r.name} exists and has {total}; give that, "
            f"or another --name, {from_its_weights(flags.cfg)}",
            flag="global_batch_size",
            value=flags.cfg.data.global_batch_size,
        )
    flags = flags.fix(global_batch_size=total)
    if stored["val_batch_size"]:
        flags = flags.follow(val_batch_size=max(1, val_total // r.n_device_axis[0]))
    if r.n_device_axis == tuple(stored["n_device_axis"]) and not flags.given & SPLIT:
        flags = flags.fix(**{flag: stored[flag] for flag in SPLIT & stored.keys()})
    return flags


def check_validation(cfg, stored):
    """Raises UserError where validation batches have another size than those of the run that `stored` describes."""
    _, before = global_batches(stored)
    _, now = global_batches(flatten(cfg))
    if before != now:
        raise UserError(
            f"run {cfg.run.name} validates on batches of {before} "
            f"sequences, and these would be of {now}; leave the flag out, or give another --name",
            flag="val_batch_size",
            value=cfg.data.val_batch_size,
        )


def check_same(cfg, stored, flags=utils.FIELDS.keys()):
    """Raises UserError where `cfg` would make another run, by its `flags`, than the one that `stored` describes."""
    whose = f"run {cfg.run.name} exists and has"
    advice = "give the same, or another --name"
    m = cfg.model
    of_weights = vars(m).keys() - free_of_weights(m.architecture) | {"tokenizer"}
    kept = flags & utils.KEPT
    compare(cfg, stored, kept & of_weights, whose, advice)
    compare(cfg, stored, kept - of_weights, whose, f"{advice}, {from_its_weights(cfg)}")


def from_its_weights(cfg):
    """In words: what begins another run where the one of that name cannot continue."""
    return f"with --init_from {cfg.run.folder} to begin from its weights"


def compare(cfg, others, flags, whose, remedy="leave the flag out", **named):
    """Raises UserError where one of `flags` has another value than in {flag: value} `others`, as `whose` words say;
    named: the flags that these name."""
    now = flatten(cfg)
    for flag in sorted(flags & others.keys()):
        if now[flag] != others[flag]:
            named[flag] = others[flag]
            said = f"{whose} {{{flag}}}"
            raise UserError(said, flag=flag, value=now[flag], remedy=remedy, **named)


def to_resume(cfg, fingerprint):
    """What `resume` reads of config.json, which every checkpoint keeps."""
    wanted = utils.KEPT | NEEDED_TO_RESUME | flags_with(on_resume="told")
    flags = flatten(cfg)
    kept = {flag: flags[flag] for flag in flags.keys() & wanted}
    return kept | dict(data_fingerprint=fingerprint)


def other_flags(cfg, kept):
    """In words: flags of the model that `cfg` has not as a checkpoint, with which {flag: value} or None was saved."""
    now = without(free_of_weights(cfg.model.architecture), vars(cfg.model))
    return changes(kept or {}, now, now)


def changes(then, now, flags):
    """In words: those of `flags` whose values in the {flag: value} `then`, which may lack some, and `now` differ."""
    changed = [flag for flag in flags if then.get(flag, now[flag]) != now[flag]]
    return ", ".join(f"--{flag} was {then[flag]} and is now {now[flag]}" for flag in changed)


def checkpoint_steps(folder):
    """Steps of the checkpoints in a run directory, the newest first."""
    names = names_in(f"{folder}/checkpoints")
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def stored_config(folder):
    """config.json of a run directory, or else what the newest sound checkpoint keeps of it; {} without either."""
    if stored := read_json(folder, "config.json"):
        return stored
    for step in checkpoint_steps(folder):
        with contextlib.suppress(UserError):  # a damaged one
            meta = read_json(folder, "checkpoints", str(step), "meta", "metadata")
            if stored := meta.get("config"):
                return stored
    return {}


def check_stored(config, folder, needed):
    """Raises UserError where a run's {flag: value} lacks one of `needed`, a value is none that its flag can have, or it
    meant another model when the run was made."""
    path, remedy = os.path.join(folder, "config.json"), "restore it"
    if missing := sorted({*needed} - config.keys()):
        raise UserError(f"{', '.join(missing)} is missing", where=path, remedy=remedy)
    read = (utils.KEPT | {*needed}) & config.keys()
    utils.read_values({flag: config[flag] for flag in read}, path, remedy=remedy)
    older = f"commit {config['commit']}" if config.get("commit") else "that version"
    for flag, values in CHANGED.items():
        if "revision" not in config and config.get(flag) in values:
            raise UserError(
                f"{path}: {flag} {config[flag]} meant another model in the version of this program that made the run; "
                f"use {older}, or train again."
            )


def check_model(flags, where, names=None):
    """Raises UserError where {flag: value} of a model, read from the file `where`, are no such values or do not fit
    together. names: {flag: what the file calls it}, where that differs."""
    names = {flag: flag for flag in flags} | (names or {})
    utils.read_values(flags, where, names)
    alone = dict(attention="auto", n_device_axis=(1, 1, 1), n_devices=1)
    try:
        validate(replace(Config(), **flags | alone), 1)
    except UserError as e:
        raise e.renamed(where, **names) from None


def check(cfg):
    """Raises UserError where flags of a completed configuration do not fit each other."""
    check_multiples(cfg)
    name = cfg.model.architecture
    only = architectures.flags_without_choice(name)
    compare(cfg, only, only.keys(), "{architecture} has no such choice, only", architecture=name)
    architectures.architecture(name).check(cfg)
    check_attention(cfg)
    check_experts(cfg.model)
    check_schedule(cfg.optimizer)
    check_names(cfg)
    profiled_steps(cfg.run)


def check_multiples(cfg):
    """Raises UserError where something must divide a flag and does not."""
    m = cfg.model
    dp, pp, tp = cfg.run.n_device_axis
    rounds = cfg.run.pp_interleave
    # megatron splits the hidden channels of a dense feed-forward over tp, and those of all shared experts together
    parts = tp if m.sequence_parallel == "megatron" else 1
    has_dense = not m.n_experts or m.first_layers or m.layers_per_block > 1
    common = math.gcd(parts, m.n_shared)
    of_each = f"tp / {common}" if common > 1 else "tp"
    expert_dim = "expert_dim" if m.expert_dim else "ffn_dim"
    megatron = "with --sequence_parallel megatron"
    multiples = [  # (flag, its value, what must divide it, in words)
        ("blocks", m.blocks, pp * rounds, "pp" if rounds == 1 else "pp x pp_interleave"),
        ("n_experts", m.n_experts, m.n_groups, "n_groups"),
        ("n_head", m.n_head, tp, "tp"),
        ("T", m.T, tp, "tp"),
        ("ffn_dim", m.ffn_width, parts if has_dense else 1, f"tp {megatron}"),
        ("rope_dim", m.rope_dim, 2, "2, since channels are rotated in pairs,"),
        ("model_dimension", m.model_dimension, 1 if m.head_dim else m.n_head, "n_head"),
        (expert_dim, m.expert_width, parts // common, f"{of_each} {megatron}"),
    ]
    for flag, value, by, words in multiples:
        if value % by:
            raise UserError(f"must be a multiple of {words} ({by})", flag=flag, value=value)
    n = dp * tp
    if m.n_experts % n and n % m.n_experts:
        raise UserError(
            f"must divide dp x tp, {n}, or be divided by it", flag="n_experts", value=m.n_experts
        )


def check_attention(cfg):
    """Raises UserError where there is no such attention kernel, or it does not run this model or on these devices."""
    from kernels import attention  # here: it imports jax, which parsing does without

    name = cfg.model.attention
    if name == "auto":
        return
    kernels = attention.ATTENTION
    if name not in kernels:
        raise UserError(
            f"must be one of auto, {', '.join(kernels)}", flag="attention", value=name or "''"
        )
    kernel = kernels[name]
    channels = attention.channels(cfg.model)
    if cfg.model.T % kernel.multiple:
        raise UserError(
            f"must be a multiple of {kernel.multiple} for {{attention}}",
            flag="T",
            value=cfg.model.T,
            attention=name,
        )
    if channels > kernel.channels:
        raise UserError(
            f"has room for {kernel.channels} channels of a head's key and value, and this model "
            f"has {channels}; auto takes the best that fits",
            flag="attention",
            value=name,
        )
    if platform_of(cfg) not in kernel.platforms:
        there = ", ".join(kernel.platforms)
        raise UserError(
            f"is for {there}; auto takes the best for the devices", flag="attention", value=name
        )


def check_experts(m):
    """Raises UserError where experts and their groups do not fit together."""
    E, k = m.n_experts, m.experts_per_token
    if k > E:
        said = "cannot be more than there are, {n_experts}"
        raise UserError(said, flag="experts_per_token", value=k, n_experts=E)
    if m.n_groups > 1 and E < 2 * m.n_groups:
        said = "each must have two experts of {n_experts}"
        raise UserError(said, flag="n_groups", value=m.n_groups, n_experts=E)
    if m.k_groups > m.n_groups or k > m.k_groups * E // m.n_groups:
        said = "must be at most {n_groups} and hold {experts_per_token}"
        named = dict(n_groups=m.n_groups, experts_per_token=k)
        raise UserError(said, flag="k_groups", value=m.k_groups, **named)
    if m.experts == "tiles" and m.capacity_factor:
        said = "has no buckets for {capacity_factor}; leave one of them out"
        factor = f"{m.capacity_factor:g}"
        raise UserError(said, flag="experts", value=m.experts, capacity_factor=factor)


def check_schedule(o):
    """Raises UserError where the parts of the learning rate's schedule do not fit together."""
    room = o.end_steps - o.warmup_steps
    ends = dict(warmup_steps=o.warmup_steps, end_steps=o.end_steps)
    if room <= 0:
        said = "must be less than {end_steps}"
        raise UserError(said, flag="warmup_steps", value=o.warmup_steps, end_steps=o.end_steps)
    if o.decay_steps and o.schedule != "wsd":
        said = "{schedule} has none, only wsd does; leave the flag out"
        raise UserError(said, flag="decay_steps", value=o.decay_steps, schedule=o.schedule)
    if o.decay_steps > room:
        said = f"must be at most {room}, the steps from {{warmup_steps}} to {{end_steps}}"
        raise UserError(said, flag="decay_steps", value=o.decay_steps, **ends)


def tell_schedule(cfg, stored):
    """Print where the run that `stored` describes had another schedule, or it does not end with the run."""
    o, last = cfg.optimizer, cfg.run.training_steps
    if changed := changes(stored, vars(o), sorted(flags_with(on_resume="told"))):
        say(f"the schedule changes from here on: {changed}")
    what = f"stays at --end_lr {o.end_lr:g} from --end_steps {o.end_steps} on"
    if last < o.end_steps:
        what = f"ends before its learning rate has come down, at --end_steps {o.end_steps}"
    if ends(o) and last != o.end_steps:
        say(f"warning: --training_steps {last}: the run {what}")


def check_names(cfg):
    """Raises UserError where no run directory can have the name or the place that was given."""
    r = cfg.run
    if is_remote(r.output_dir) and not r.output_dir.startswith("gs://"):
        raise UserError(
            "must be a local folder or gs:// address", flag="output_dir", value=r.output_dir
        )
    if not re.fullmatch(r"[\w.+=@-]+", r.name) or set(r.name) == {"."}:
        raise UserError(f"--name {r.name!r}: must be of letters, digits and . _ - + = @ only.")


def profiled_steps(run):
    """The first and the last step that --profile names; (1, 0), none, without it. Raises UserError."""
    if not run.profile:
        return 1, 0
    named = re.fullmatch(r"(\d{1,9}):(\d{1,9})", run.profile, re.ASCII)
    first, last = map(int, named.groups()) if named else (0, 0)
    if not 1 <= first <= last <= run.training_steps or last - first >= MOST_PROFILED:
        raise UserError(
            f"--profile {run.profile:.40}: must be FIRST:LAST, at most {MOST_PROFILED} steps up to --training_steps "
            f"{run.training_steps}, such as 20:22."
        )
    return first, last
