"""From flags to the final configuration: `settle` is the way in. What it refuses, it refuses in a sentence."""

import contextlib
import json
import os
import re
from typing import Literal, NamedTuple, get_args, get_origin

import numpy as np

import architectures
import utils
from runtime import platforms
from runtime.files import filesystem, is_remote, persist, read_json
from runtime.messages import UserError, nearest, say
from runtime.parser import MOST
from utils import Config, flags_with, flatten, replace

PADDING = 1.01  # up to which published models pad their vocabularies
MOST_PROFILED = 50  # steps; longer traces are too large for the programs that show them

# --- Settle -----------------------------------------------------------------------------------------------------


class Flags(NamedTuple):
    """What a command line says: a configuration that is not settled yet, and which of its flags were given."""

    cfg: Config
    given: frozenset

    def follow(self, **flags):
        """With these values of those flags that were not given."""
        return self._replace(cfg=replace(self.cfg, **without(self.given, flags)))

    def fix(self, **flags):
        """With these values, as if they had been given."""
        return Flags(replace(self.cfg, **flags), self.given | flags.keys())


def settle(flags, n_devices, weights=None, stored=None, shards=(), encoding=None, chip=None):
    """The final configuration, in which nothing is open. It is made here and nowhere else.

    n_devices: how many are present; what --n_devices and --n_device_axis leave open follows from it.
    weights: {flag: value} of the model in --init_from, as `weights.open_weights` returns it; None without that flag.
    stored: `stored_config` of the run that it resumes, {} of a new one, None where none is meant (--plan, benchmarks).
    shards: as `dataset.manifests` lists them. encoding: their tokenizer, None where none is known.
    chip: chips.Chip of the devices, None where it is not known.

    Raises UserError naming the flag, its value and what would do.
    """
    if weights:
        flags = adopt(flags, weights)
    flags = follow_dtype(flags, stored or {}, chip)
    flags = follow_shards(flags, stored or {}, shards)
    flags = follow(flags)
    flags = flags._replace(cfg=complete(flags.cfg, n_devices))
    if stored is not None:
        flags = resume(flags, stored)
        flags = flags._replace(cfg=begin_documents(flags.cfg, encoding))
    cfg = fit_samples(flags, encoding)
    validate(cfg, n_devices)
    if stored:
        check_same(cfg, stored)
    return cfg


def follow_dtype(flags, stored, chip):
    """`flags` with the --model_dtype of the run that it resumes, whatever devices that had; of another with float32 on
    a chips.Chip without products in bfloat16, unless it was given. It says so.

    float16 is no way out: without a scale of the loss its small gradients would be 0.
    """
    if "model_dtype" in stored:
        return flags.follow(model_dtype=stored["model_dtype"])
    if chip is None or chip.bfloat16 or flags.cfg.model.model_dtype != "bfloat16":
        return flags
    without_it = f"{chip.name} does not multiply in bfloat16, XLA does so in float32"
    if "model_dtype" in flags.given:
        say(f"{without_it}: bfloat16 saves memory here, no time")
    else:
        say(f"{without_it}: --model_dtype is float32 unless given")
    return flags.follow(model_dtype="float32")


def adopt(flags, weights):
    """`flags` with the architecture {flag: value} of the weights in --init_from. Raises UserError where a flag was
    given another value."""
    cfg, architecture = flags.cfg, weights["architecture"]
    weights = without(free_of_weights(architecture), weights)
    for name, value in weights.items():
        if name in flags.given and flatten(cfg)[name] != value:
            raise UserError(
                f"--{name} {flatten(cfg)[name]}: the weights in --init_from {cfg.run.init_from} have "
                f"{value}; leave the flag out."
            )
    return flags.follow(**architectures.flags_without_choice(architecture) | weights)


def free_of_weights(architecture):
    """Flags of the model that may differ between weights and what uses them."""
    free = flags_with("of_weights", False)
    return free - {"T"} if architectures.architecture(architecture).learns_positions else free


def follow(flags):
    """`flags`, where a default that would refuse what was given gives way to it; whatever fits stays as it is."""
    if "architecture" in flags.given:
        flags = flags.follow(**architectures.flags_without_choice(flags.cfg.model.architecture))
    flags = flags.follow(**follow_experts(flags.cfg.model))
    flags = flags.follow(**follow_schedule(flags))
    return flags.follow(**follow_batches(flags))


def follow_schedule(flags):
    """{flag: value} of a schedule that ends with the run, where training_steps was given alone, and of a warm-up and a
    decay that fit in it. Where those were given, it ends as late as they need, up to the default."""
    (cfg, given), o = flags, flags.cfg.optimizer
    end, decay = o.end_steps, o.decay_steps if o.schedule == "wsd" else 0
    if "training_steps" in given and "end_steps" not in given and ends(o):
        asked = {flag: getattr(o, flag) for flag in SCHEDULE & given}
        least = asked.get("warmup_steps", 0) + max(1, asked.get("decay_steps", 0))
        end = max(cfg.run.training_steps, min(least, end))
    if "decay_steps" not in given:
        decay = min(decay, max(0, end - o.warmup_steps))
    before = max(0, end - decay)  # steps before the decay
    too_long = o.warmup_steps > before or o.warmup_steps >= end
    warmup = before // 10 if too_long else o.warmup_steps
    return dict(end_steps=end, decay_steps=decay, warmup_steps=warmup)


def ends(o):
    """Whether the learning rate of `utils.Optimizer` o comes to an end: that of a trunk does not."""
    return o.schedule != "wsd" or o.decay_steps > 0


def follow_shards(flags, stored, shards):
    """`flags` with the vocabulary of the tokenizer that made `shards`, as `dataset.manifests` lists them, unless flags,
    weights or the run that it resumes say which. A preset's that is larger by padding alone stays. A change is
    printed."""
    r, now = flags.cfg.run, flags.cfg.model.vocab_size
    if flags.given & {"vocab_size", "tokenizer"} or r.init_from or r.branch_from:
        return flags
    if stored:
        check_stored(stored, r.folder, [])
        return flags.follow(vocab_size=stored.get("vocab_size", now))
    for _, folder, manifest in shards:
        size = manifest.get("vocab_size", now)
        if not size <= now < PADDING * size:
            say(f"--vocab_size is {size} and not {now}, as the tokenizer of {folder} has it")
            return flags.follow(vocab_size=size)
    return flags


def follow_experts(m):
    """{flag: value} that the number of experts leaves to the flags beside it."""
    if not m.n_experts:
        return dict(experts_per_token=0)
    chosen = min(m.experts_per_token, m.n_experts)
    changed = dict(experts_per_token=chosen)
    uneven = m.n_experts % m.n_groups or m.n_experts < 2 * m.n_groups
    if m.n_groups > 1 and (uneven or chosen > m.k_groups * m.n_experts // m.n_groups):
        changed |= dict(n_groups=1, k_groups=1)
    return changed


def follow_batches(flags):
    """{flag: value} of microbatches and batch sizes that fit those of them that were given, and pp."""
    d = flags.cfg.data
    sizes = dict(train_batch_size=d.train_batch_size, val_batch_size=d.val_batch_size)
    micro = d.microbatches if "microbatches" in flags.given else microbatches(flags, sizes)
    return {flag: -(-size // micro) * micro for flag, size in sizes.items()} | dict(
        microbatches=micro
    )


def without(some, flags):
    """{flag: value} of `flags` but for `some`."""
    return {flag: value for flag, value in flags.items() if flag not in some}


def microbatches(flags, sizes):
    """The most microbatches, up to the default, that pp divides and that divide the batch `sizes` that were given, and
    the others too if any do; where none do, as many as the default, rounded up to a multiple of pp."""
    pp, default = max(1, flags.cfg.run.n_device_axis[1]), flags.cfg.data.microbatches
    fitting = [n for n in range(default, 0, -1) if n % pp == 0]
    fitting = [
        n for n in fitting if not any(sizes[flag] % n for flag in sizes.keys() & flags.given)
    ]
    fitting_all = [n for n in fitting if not any(size % n for size in sizes.values())]
    return next(iter(fitting_all or fitting), -(-default // pp) * pp)


def begin_documents(cfg, encoding):
    """`cfg` with the token that begins a document, where --document_mask needs it. Raises UserError where no tokenizer
    is known."""
    if not cfg.model.document_mask or cfg.model.end_of_text >= 0:
        return cfg
    if encoding is None:
        raise UserError(
            f"--document_mask: nothing tells which token begins a document in --data "
            f"{cfg.data.data}; give its --tokenizer."
        )
    return replace(cfg, end_of_text=encoding.eot_token)


# --- Samples ------------------------------------------------------------------------------------------------------


def fit_samples(flags, encoding):
    """The configuration with --max_tokens cut, if it was not given, so that the prompt and a sample fit in --T. A
    prompt that was not given gives way too (see `prompt_ids`). Raises UserError where what was given does not fit."""
    cfg, given = flags
    if encoding is None or cfg.model.T < 2:
        return cfg
    T, tokens = cfg.model.T, cfg.sample.max_tokens
    length = len(whole_prompt(cfg, encoding))
    if "prompt" not in given:
        room = T - (tokens if "max_tokens" in given else 1)
        length = min(length, max(1, room))
    if "max_tokens" not in given:
        tokens = max(1, min(tokens, T - length))
    if length + tokens > T:
        flag = f"max_tokens {tokens}" if "max_tokens" in given else "prompt"
        raise UserError(
            f"--{flag}: the prompt's {length} tokens and {tokens} after it are more than --T {T}."
        )
    return replace(cfg, max_tokens=tokens)


def whole_prompt(cfg, encoding):
    """Token ids of --prompt as the beginning of a document."""
    return [encoding.eot_token, *encoding.encode_ordinary(cfg.sample.prompt)]


def prompt_ids(cfg, encoding):
    """Token ids, int32, that the samples of a settled `cfg` continue; None where no tokenizer is known or --T leaves no
    room."""
    if encoding is None or cfg.model.T < 2:
        return None
    ids = whole_prompt(cfg, encoding)[: cfg.model.T - cfg.sample.max_tokens]
    return np.array(ids, np.int32)


# --- A run that goes on -------------------------------------------------------------------------------------------

# Of config.json, beside what must be the same.
NEEDED_TO_RESUME = [
    "n_device_axis",
    "train_batch_size",
    "accumulation_steps",
    "val_batch_size",
    "data",
]


# What a branch must know of its trunk's schedule, and cannot change.
SCHEDULE = {"warmup_steps", "decay_steps", "end_steps"}


def resume(flags, stored):
    """`flags` with the batch sizes that keep the global batches of the run that `stored` describes, or where that is
    {} of the trunk of a branch.

    The global batch train_batch_size x dp x accumulation_steps must stay. Where dp or accumulation_steps changed and
    the batch size was not given, it follows (val_batch_size x dp likewise). Raises UserError where none does.
    """
    r = flags.cfg.run
    if stored and "data_fingerprint" not in stored:
        raise UserError(
            f"--name {r.name}: this run holds weights alone; begin another from them with --init_from {r.folder}."
        )
    if stored:
        check_stored(stored, r.folder, NEEDED_TO_RESUME)
    elif r.branch_from:
        stored = stored_config(r.branch_from)
    else:
        return flags
    flags = keep_global_batch(flags, stored)
    return flags.follow(**follow_batches(flags))


def check_same(cfg, stored):
    """Raises UserError where `cfg` would make another run than the one that `stored` describes."""
    now, fixed = as_json(flatten(cfg)), utils.FIELDS.keys() - flags_with("free_on_resume")
    differ = [n for n in now if n in fixed and n in stored and now[n] != stored[n]]
    if differ:
        fields = ", ".join(f"{n} was {stored[n]!r} and is now {now[n]!r}" for n in differ)
        raise UserError(
            f"--name {cfg.run.name}: this run exists with another configuration ({fields}); give another "
            f"--name, or the values it had."
        )


def check_data(cfg, stored, fingerprint):
    """Raises UserError where the run that `stored` describes, or the trunk of a new branch, saw other shards than those
    of this fingerprint."""
    r, where, advice = cfg.run, f"--name {cfg.run.name}: this run exists and", "another --name or "
    if not stored and r.branch_from:
        stored, where, advice = (
            stored_config(r.branch_from),
            f"--branch_from {r.branch_from}: the trunk",
            "",
        )
    if stored and stored["data_fingerprint"] != fingerprint:
        raise UserError(
            f"{where} saw other data than now stands in --data {cfg.data.data} (it was "
            f"{stored['data']}); give {advice}those shards."
        )


def keep_global_batch(flags, stored):
    """`flags` with the batch sizes that keep the global batches of the run that `stored` describes. Raises UserError
    where none do."""
    r = flags.cfg.run
    dp, accumulation_steps = r.n_device_axis[0], r.accumulation_steps
    old_dp, old_accumulation_steps = stored["n_device_axis"][0], stored["accumulation_steps"]
    parts = dict(train_batch_size=dp * accumulation_steps, val_batch_size=dp)
    old_parts = dict(train_batch_size=old_dp * old_accumulation_steps, val_batch_size=old_dp)
    for flag in parts:
        total = stored[flag] * old_parts[flag]
        if total % parts[flag] == 0:
            flags = flags.follow(**{flag: total // parts[flag]})
        now = flatten(flags.cfg)[flag]
        if now * parts[flag] != total:
            raise UserError(
                f"--{flag} {now}: run {r.name} has a global batch of {total} sequences, but this "
                f"would make it {now} x {parts[flag]} = {now * parts[flag]} (dp {dp}, accumulation_steps "
                f"{accumulation_steps}); give another --name or a mesh and --accumulation_steps whose product "
                f"divides it."
            )
        flags = flags.fix(**{flag: now})
    return flags


def check_run(flags):
    """Raises UserError where a flag was given that the run in a local folder, if there is one, cannot go on with."""
    cfg, given = flags
    stored = {} if is_remote(cfg.run.folder) else run_config(cfg.run.folder)
    now = as_json(flatten(cfg))
    for flag in sorted(given & set(now) & set(stored) - flags_with("free_on_resume")):
        if now[flag] != stored[flag]:
            raise UserError(
                f"--{flag} {now[flag]}: run {cfg.run.name} has {stored[flag]}; leave the flag out, or give "
                f"another --name."
            )


def as_json(flags):
    """{flag: value} as it comes back from a JSON file, with lists for tuples."""
    return json.loads(json.dumps(flags))


def to_resume(cfg, fingerprint):
    """What `resume` and branches read of config.json. Every checkpoint keeps it: a run is more than that file."""
    now = flatten(cfg)
    wanted = {*NEEDED_TO_RESUME, *SCHEDULE} | now.keys() - flags_with("free_on_resume")
    return {name: now[name] for name in now if name in wanted} | dict(data_fingerprint=fingerprint)


def other_flags(cfg, kept):
    """In words: the flags in which the model of a checkpoint differs from that of `cfg`. kept: {flag: value} that was
    saved with the checkpoint, or None."""
    free = free_of_weights(cfg.model.architecture)
    kept = kept or {}
    words = []
    for flag, value in vars(cfg.model).items():
        if flag not in free and kept.get(flag, value) != value:
            words.append(f"--{flag} was {kept[flag]} and is now {value}")
    return ", ".join(words)


def run_config(folder):
    """{flag: value} of config.json in a run directory, {} where there is none."""
    return read_json(folder, "config.json")


def stored_config(folder):
    """config.json of a run directory, or where that is missing what the newest checkpoint that has it keeps of it; {}
    where there is neither."""
    if stored := run_config(folder):
        return stored
    for step in sorted(stored_steps(folder), key=int, reverse=True):
        with contextlib.suppress(ValueError, AttributeError, UserError):  # a damaged one
            meta = read_json(folder, "checkpoints", step, "meta", "metadata")
            if stored := meta.get("config"):
                return stored
    return {}


def stored_steps(folder):
    """Names of the checkpoints of a run directory, which are their steps."""
    fs, there = filesystem(os.path.join(folder, "checkpoints"))
    try:
        paths = persist(lambda: fs.ls(there, detail=False), folder)
    except FileNotFoundError:
        return []
    names = [os.path.basename(path.rstrip("/")) for path in paths]
    return [name for name in names if name.isdigit()]


def check_stored(config, folder, needed, file="config.json"):
    """Raises UserError where the {flag: value} `config` of a file of a run directory lacks one of `needed`, or has a
    value that its flag cannot have, as a file that someone edited."""
    path = os.path.join(folder, file)
    if missing := [name for name in needed if name not in config]:
        raise UserError(f"{path}: {', '.join(missing)} is missing; put back what it was.")
    read = (utils.FIELDS.keys() - flags_with("free_on_resume") | {*needed}) & config.keys()
    for name in sorted(read):
        kind = utils.FIELDS[name].type
        if not is_value(config[name], kind):
            wanted = choices(kind)
            wrong = f"but must be {wanted}" if wanted else "which no run has"
            raise UserError(
                f"{path}: {name} is {config[name]!r:.40}, {wrong}; put back what it was."
            )


# --- Values -------------------------------------------------------------------------------------------------------


def is_value(value, kind):
    """Whether a value of a JSON file is one of a flag of this type."""
    if kind == tuple[int, int, int]:  # the mesh
        return isinstance(value, list) and len(value) == 3 and all(map(is_positive, value))
    if get_args(kind):
        return value in get_args(kind)
    right = isinstance(value, (int, float) if kind is float else kind)
    return right and isinstance(value, bool) == (kind is bool)


def choices(kind):
    """In words: the values that a flag of this type may have; "" where they are too many to name."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    return " or ".join(map(repr, values))


def is_positive(value):
    return type(value) is int and value > 0


def check_model(flags, where, names=None):
    """Raises UserError where {flag: value} of a model, read from the file `where`, are no such values or do not fit
    together. names: {flag: what the file calls it}, where that differs."""
    names = names or {}
    for flag, value in flags.items():
        kind = utils.FIELDS[flag].type
        too_large = type(value) is int and abs(value) >= 2**31
        if too_large or not is_value(value, kind):
            wanted = choices(kind) or f"of type {kind.__name__}"
            raise UserError(f"{where}: {names.get(flag, flag)} is {value!r}, but must be {wanted}.")
    try:
        alone = flags | dict(attention="auto", n_device_axis=(1, 1, 1), n_devices=1)
        cfg = replace(Config(), **alone)
        utils.check_bounds(cfg.model)
        validate(cfg, 1)
    except UserError as e:

        def in_the_file(flag):
            return names.get(flag[1], flag[1]) if flag[1] in flags else flag[0]

        words = re.sub(r"--(\w+)", in_the_file, str(e))
        raise UserError(f"{where}: {words}") from None


def validate(cfg, n_present):
    """Check the flags against each other and against the `n_present` devices; fill in the mesh and save_steps.

    Returns the completed Config. Raises UserError naming the flag, its value and what would do.
    """
    cfg = complete(cfg, n_present)
    check_multiples(cfg)
    check_tokens(cfg)
    check_architecture(cfg)
    check_attention(cfg)
    check_experts(cfg)
    check_optimizer(cfg)
    check_names(cfg)
    profiled_steps(cfg.run)
    return cfg


def complete(cfg, n_present):
    """`cfg` with the mesh for `n_present` devices, the pipeline's rounds and save_steps. Raises UserError where the
    mesh does not fit."""
    r = cfg.run
    n_devices = r.n_devices or n_present
    if n_devices > n_present:
        raise UserError(f"--n_devices {n_devices}: only {n_present} devices are present.")
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
    return replace(
        cfg,
        n_device_axis=(dp, pp, tp),
        n_devices=n_devices,
        pp_interleave=r.pp_interleave or most_rounds(cfg.model.blocks, pp),
        save_steps=r.save_steps or 10 * r.eval_every,
    )


def platform_of(cfg):
    """The platform that a run is for: that of --plan's machine, else that of the devices here."""
    if cfg.plan.plan:
        return "gpu" if cfg.plan.plan.startswith("gpu:") else "tpu"
    return platforms.platform()


def most_rounds(blocks, pp):
    """Rounds of the pipeline where --pp_interleave leaves them open: up to 4 if there are stages."""
    rounds = [n for n in (1, 2, 3, 4) if blocks % (pp * n) == 0]
    return max(rounds, default=1) if pp > 1 else 1


def check_multiples(cfg):
    """Raises UserError where something must divide a flag and does not."""
    m, d, (dp, pp, tp), rounds = cfg.model, cfg.data, cfg.run.n_device_axis, cfg.run.pp_interleave
    multiples = [  # (flag, its value, what must divide it, in words)
        ("blocks", m.blocks, pp * rounds, "pp" if rounds == 1 else "pp x pp_interleave"),
        ("n_experts", m.n_experts, m.n_groups, "n_groups"),
        ("n_head", m.n_head, tp, "tp"),
        ("T", m.T, tp, "tp"),
        ("ffn_dim", m.ffn_width, tp, "tp"),
        ("rope_dim", m.rope_dim, 2, "2, since channels are rotated in pairs,"),
        ("microbatches", d.microbatches, pp, "pp"),
        ("train_batch_size", d.train_batch_size, d.microbatches, "microbatches"),
        ("val_batch_size", d.val_batch_size, d.microbatches, "microbatches"),
        ("model_dimension", m.model_dimension, 1 if m.head_dim else m.n_head, "n_head"),
        ("expert_dim", m.expert_width, tp if m.n_shared else 1, "tp"),
    ]
    for flag, value, by, words in multiples:
        if value % by:
            raise not_a_multiple(flag, value, by, words)
    if m.n_experts % (dp * tp) and (dp * tp) % m.n_experts:
        raise UserError(
            f"--n_experts {m.n_experts}: must divide dp x tp ({dp} x {tp} = {dp * tp}) or be divided by it."
        )


def check_tokens(cfg):
    """Raises UserError where a step or a validation batch has more tokens than can be numbered."""
    d, dp, most = cfg.data, cfg.run.n_device_axis[0], MOST[int] // cfg.model.T
    sequences = dict(
        train_batch_size=d.train_batch_size * dp * cfg.run.accumulation_steps,
        val_batch_size=d.val_batch_size * dp,
    )
    for flag, n in sequences.items():
        if n > most:
            raise UserError(
                f"--{flag} {vars(d)[flag]}: with dp and accumulation_steps that makes {n:,} sequences at once; of --T "
                f"{cfg.model.T} tokens at most {most:,} can be numbered."
            )


def not_a_multiple(flag, value, by, words):
    """The UserError for a flag that `by`, in words, does not divide, with the nearest values that it does."""
    below, above = max(by, value // by * by), -(-value // by) * by
    near = " or ".join(map(str, sorted({below, above})))
    return UserError(f"--{flag} {value}: must be a multiple of {words} ({by}), such as {near}.")


def check_architecture(cfg):
    """Raises UserError for flags that the architecture does not have, and for those that it does not take."""
    name, now = cfg.model.architecture, flatten(cfg)
    for flag, value in architectures.flags_without_choice(name).items():
        if now[flag] != value:
            raise UserError(
                f"--{flag} {now[flag]}: --architecture {name} has no such choice, its configurations have {value} "
                f"there; leave the flag out."
            )
    architectures.architecture(name).check(cfg)


def check_attention(cfg):
    """Raises UserError where there is no such attention kernel, or it does not run on these devices or with this T or
    such wide heads."""
    from kernels import attention  # here: it imports jax, which parsing does without

    name, T = cfg.model.attention, cfg.model.T
    if name == "auto":
        return
    kernels = attention.ATTENTION
    if name not in kernels:
        near, known = nearest(name, kernels), ", ".join(["auto", *kernels])
        raise UserError(f"--attention {name}: no such kernel{near}; there are {known}.")
    kernel, channels = kernels[name], attention.channels(cfg.model)
    if T % kernel.multiple:
        raise not_a_multiple("T", T, kernel.multiple, f"{kernel.multiple} for --attention {name}")
    if channels > kernel.channels:
        raise UserError(
            f"--attention {name}: this kernel has room for {kernel.channels} channels of a head's key and value "
            f"together, and this model has {channels}; auto takes the best that fits."
        )
    if platform_of(cfg) not in kernel.platforms:
        there = " and ".join(f"{platform.upper()}s" for platform in kernel.platforms)
        raise UserError(
            f"--attention {name}: this kernel is for {there}; auto takes the best for the devices at hand."
        )


def check_experts(cfg):
    """Raises UserError where tokens, experts and their groups do not fit together."""
    m = cfg.model
    if m.experts_per_token > m.n_experts:
        raise UserError(
            f"--experts_per_token {m.experts_per_token}: a token cannot go to more experts than there are "
            f"(--n_experts {m.n_experts})."
        )
    if m.n_groups > 1 and m.n_experts < 2 * m.n_groups:
        raise UserError(
            f"--n_groups {m.n_groups}: a group must have two experts at least (--n_experts {m.n_experts})."
        )
    if m.k_groups > m.n_groups or m.experts_per_token > m.k_groups * m.n_experts // m.n_groups:
        raise UserError(
            f"--k_groups {m.k_groups}: must be at most --n_groups {m.n_groups} and hold --experts_per_token "
            f"{m.experts_per_token} experts."
        )
    if m.experts == "tiles" and m.capacity_factor:
        raise UserError(
            f"--experts tiles: has no buckets that --capacity_factor {m.capacity_factor:g} could limit; give "
            f"--capacity_factor 0, or --experts buckets."
        )


def check_optimizer(cfg):
    """Raises UserError where the parts of the learning rate's schedule do not fit together."""
    o = cfg.optimizer
    if o.warmup_steps >= o.end_steps:
        raise UserError(
            f"--warmup_steps {o.warmup_steps}: must be less than --end_steps {o.end_steps}; give "
            f"fewer, or a larger --end_steps."
        )
    if o.decay_steps and o.schedule != "wsd":
        raise UserError(
            f"--decay_steps {o.decay_steps}: --schedule {o.schedule} falls from the warm-up on, only wsd has a decay "
            f"of its own; leave the flag out, or give --schedule wsd."
        )
    room = o.end_steps - o.warmup_steps
    if o.decay_steps > room:
        raise UserError(
            f"--decay_steps {o.decay_steps}: must be at most {room}, since the decay ends at --end_steps "
            f"{o.end_steps} and cannot begin within the {o.warmup_steps} --warmup_steps."
        )


def tell_schedule(cfg):
    """Print what may surprise of the schedule: that a resumed run had another one, or that it does not end with the
    run."""
    o, last = cfg.optimizer, cfg.run.training_steps
    before, now = stored_config(cfg.run.folder), vars(o)
    changed = [flag for flag in sorted(SCHEDULE & before.keys()) if before[flag] != now[flag]]
    if changed:
        words = [f"{flag} was {before[flag]} and is now {now[flag]}" for flag in changed]
        say(f"the schedule changes from here on: {', '.join(words)}")
    if not ends(o) or last == o.end_steps:
        return
    if last < o.end_steps:
        what = f"ends before its learning rate has come down, at --end_steps {o.end_steps}"
    else:
        what = f"stays at --end_lr {o.end_lr:g} from --end_steps {o.end_steps} on"
    say(f"warning: --training_steps {last}: the run {what}")


def check_names(cfg):
    """Raises UserError where no run directory can have the name, or stand in the place, that was given."""
    r = cfg.run
    if is_remote(r.output_dir) and not r.output_dir.startswith("gs://"):
        raise UserError(
            f"--output_dir {r.output_dir}: Orbax writes checkpoints to a local folder or gs:// only."
        )
    if not re.fullmatch(r"[\w.+=@-]+", r.name) or set(r.name) == {"."}:
        raise UserError(
            f"--name {r.name!r}: must be the name of a folder, of letters, digits and . _ - + = @ only."
        )


def profiled_steps(run):
    """The first and the last step that --profile names; (1, 0), none, without it. Raises UserError."""
    if not run.profile:
        return 1, 0
    named = re.fullmatch(r"(\d{1,9}):(\d{1,9})", run.profile, re.ASCII)
    first, last = map(int, named.groups()) if named else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            f"--profile {run.profile}: must be FIRST:LAST, the first and the last step to trace, such as 20:22."
        )
    if last > run.training_steps:
        raise UserError(
            f"--profile {run.profile}: must end by the last step, --training_steps {run.training_steps}."
        )
    if last - first >= MOST_PROFILED:
        raise UserError(
            f"--profile {run.profile}: names {last - first + 1} steps; a trace holds at most {MOST_PROFILED}."
        )
    return first, last
