"""From flags to the final configuration: `settle` applies RULES in their order, then checks that all fits together.

Before it comes config/command_line.py, which reads what was given; after it training, which finds nothing open. A rule
takes two inputs, the `Flags` and what was `Found`, and returns the values of a few flags. The rules of batches, of a
stored run, of little text and of samples are in config/batch.py, resume.py, little_text.py and prompt.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import architectures
import utils
from config import batch, little_text, prompt, resume
from config.checks import check, platform_of
from config.flags import Flags, Found, compare, free_of_weights, without
from config.stored import read_values
from runtime import chips
from runtime.messages import UserError, say
from shards.tokenization import check_ids
from utils import Config, replace

PADDING = 1.01  # up to which published models pad their vocabularies


def of_weights(flags, found):
    """The architecture and its sizes that the weights in --init_from have; another given value is refused."""
    if not found.weights:
        return {}
    architecture = found.weights["architecture"]
    own = without(free_of_weights(architecture), found.weights)
    whose = f"the weights in --init_from {flags.cfg.run.init_from} have"
    compare(flags.cfg, own, flags.given, whose)
    return architectures.flags_without_choice(architecture) | own


def model_dtype(flags, found):
    """On a device without products in bfloat16 the type in which it multiplies fastest, float16 or float32. Raises
    UserError for a new run in float16 on TPUs, where XLA converts each number; a run that began so may be resumed there
    and sampled from. A CPU may always try it, and other GPUs have it."""
    now = flags.cfg.model.model_dtype
    if "model_dtype" in found.stored:
        return {}
    chip = chips.chip_of(found.device_kind)
    if now == "float16" and chip and chip.platform == "tpu":
        said = f"{chip.name} does not multiply in it; give bfloat16, which needs no loss scale"
        raise UserError(said, flag="model_dtype", value=now)
    _, best = chips.best_dtype(found.device_kind)
    return dict(model_dtype=best) if now == "bfloat16" else {}


def tell_dtype(flags, settled, found):
    """What `model_dtype` changed, or would have changed had no flag been given; or that float16 gains nothing here."""
    device, best = chips.best_dtype(found.device_kind)
    before, after = (each.cfg.model.model_dtype for each in (flags, settled))
    if not device or "model_dtype" in found.stored or best == before:
        return ""
    if before == "float16":
        return f"{device} is no faster in float16 than in {best}, which needs no loss scale"
    then = dict(
        bfloat16="bfloat16 saves memory here, no time",
        float16="the model is float16, with a loss scale",
        float32="the model is float32 too",
    )
    said = f"{device} does not multiply in bfloat16, XLA does so in float32: {then[after]}"
    return said if before == "bfloat16" else ""


def vocab_size(flags, found):
    """That of the tokenizer of the shards, unless flags, weights or a stored run have one. A preset's that is larger by
    padding alone stays."""
    now = flags.cfg.model.vocab_size
    if found.resumes or flags.given & {"vocab_size", "tokenizer"} or flags.cfg.run.init_from:
        return {}
    _, size = largest_vocabulary(found.shards)
    is_padded = size <= now < PADDING * size
    return dict(vocab_size=size) if size and not is_padded else {}


def largest_vocabulary(shards):
    """(folder, tokens of its tokenizer) of the shards whose tokenizer has most; ("", 0) where none says. That several
    differ is refused as they are opened, in a better sentence than one of their ids would get."""
    sizes = {folder: manifest.get("vocab_size", 0) for _, folder, manifest in shards}
    folder = max(sizes, key=sizes.get, default="")
    return folder, sizes.get(folder) or 0


def tell_vocabulary(flags, settled, found):
    """What `vocab_size` changed."""
    now, size = flags.cfg.model.vocab_size, settled.cfg.model.vocab_size
    if found.resumes or now == size:
        return ""
    folder, _ = largest_vocabulary(found.shards)
    return f"the vocabulary has {size:,} tokens and not {now:,}, as the tokenizer of {folder}"


def absent_flags(flags, found):
    """The values of the flags that a given --architecture does not have."""
    if "architecture" not in flags.given:
        return {}
    return architectures.flags_without_choice(flags.cfg.model.architecture)


def experts_per_token(flags, found):
    """Not more than there are experts."""
    m = flags.cfg.model
    return dict(experts_per_token=min(m.experts_per_token, m.n_experts))


def schedule(flags, found):
    """A schedule that ends with the run, where training_steps was given without end_steps, and a decay and a warm-up
    that fit in it."""
    (cfg, given), o = flags, flags.cfg.optimizer
    end = o.end_steps
    if "training_steps" in given and "end_steps" not in given and o.comes_down:
        end = cfg.run.training_steps
    decay = o.decay_steps if o.schedule == "wsd" else 0
    if "decay_steps" not in given:
        decay = min(decay, max(0, end - o.warmup_steps))
    before_decay = max(0, end - decay)
    is_too_long = o.warmup_steps > before_decay or o.warmup_steps >= end
    warmup = before_decay // 10 if is_too_long else o.warmup_steps
    return dict(end_steps=end, decay_steps=decay, warmup_steps=warmup)


def steps_of_little_text(flags, found):
    """Fewer steps, with their schedule and as many evaluations, where more would learn little text by heart."""
    cfg = flags.cfg
    steps = little_text.steps(flags, found)
    if "training_steps" in flags.given or steps == cfg.run.training_steps:
        return {}
    fewer = flags.with_given(training_steps=steps)
    return dict(
        training_steps=steps,
        eval_every=min(cfg.run.eval_every, max(1, steps // 10)),
        **schedule(fewer, found),
    )


def mesh(flags, found):
    """All devices that are present, of which dp 0 has those that are left. Raises UserError for another number."""
    r = flags.cfg.run
    n_devices = r.n_devices or found.n_devices
    if n_devices > found.n_devices:
        said = f"only {found.n_devices} devices are present"
        raise UserError(said, flag="n_devices", value=n_devices)
    dp, pp, tp = r.n_device_axis
    dp = dp or n_devices // max(1, pp * tp)
    wanted = dp * pp * tp
    if min(dp, pp, tp) < 1 or wanted != n_devices:
        said = f"dp x pp x tp is {wanted} but must be the number of devices, {n_devices}"
        if platform_of(flags.cfg) == "cpu":
            said += f" (without an accelerator, --n_devices {wanted} simulates them)"
        raise UserError(said, flag="n_device_axis", value=(dp, pp, tp))
    return dict(n_device_axis=(dp, pp, tp), n_devices=n_devices)


def pp_interleave(flags, found):
    """As many rounds of the pipeline as the blocks allow, up to 4."""
    cfg = flags.cfg
    pp = cfg.run.n_device_axis[1]
    most = 4 if pp > 1 else 1
    rounds = [n for n in range(1, most + 1) if cfg.model.blocks % (pp * n) == 0]
    return dict(pp_interleave=cfg.run.pp_interleave or max(rounds, default=1))


def save_steps(flags, found):
    """A checkpoint at every tenth evaluation, or in a short run about ten of them."""
    r = flags.cfg.run
    tenth = r.training_steps // 10
    evaluations = min(10, max(1, tenth // r.eval_every))
    return dict(save_steps=r.save_steps or r.eval_every * evaluations)


def end_of_text(flags, found):
    """The token that begins a document, which --document_mask needs. Raises UserError where it is not known."""
    m = flags.cfg.model
    if not found.is_data_open or not m.document_mask or m.end_of_text >= 0:
        return {}
    if found.encoding is None:
        raise UserError(
            f"the tokenizer of --data {flags.cfg.data.data}, whose token begins a document, is not known",
            flag="document_mask",
            remedy="give it as --tokenizer",
        )
    token = found.encoding.eot_token
    check_ids(found.encoding, [token], m.vocab_size, "--document_mask: what begins a document")
    return dict(end_of_text=token)


class Rule(NamedTuple):
    """How some flags are settled. flags: their names, or the section of a Config that they are in."""

    flags: str
    # (Flags, Found) -> {flag: value}; {} where the rule does not apply. It may raise UserError.
    values: Callable
    why: str
    # False: only flags that were not given get their values. True: all do, and they count as given from then on, so no
    # later rule changes them. Such a rule keeps a given value itself, or refuses it.
    is_final: bool = False
    # (Flags before, Flags after, Found) -> what is printed about it, or ""
    tell: Callable | None = None


# What needs no devices. The weights come first: what follows depends on their architecture.
MODEL_RULES = (
    Rule("model", of_weights, "weights have the shapes of their own model"),
    Rule(
        "model_dtype vocab_size T max_lr dropout_rate weight_decay",
        resume.stored_model,
        "a run is one model to its end",
    ),
    Rule("model_dtype", model_dtype, "bfloat16 costs time where it is emulated", tell=tell_dtype),
    Rule("vocab_size", vocab_size, "the model must know each token id", tell=tell_vocabulary),
    Rule("model optimizer", absent_flags, "the preset's are those of another architecture"),
    Rule("experts_per_token", experts_per_token, "--n_experts alone must not be refused"),
    Rule("end_steps decay_steps warmup_steps", schedule, "a rate comes down by the end of a run"),
)
# The mesh comes before the batch, which is divided over it. A stored run comes before little text, which keeps
# the batch and the rates of that run. The batch is divided at last, when its size is known.
RULES = MODEL_RULES + (
    Rule("n_device_axis n_devices", mesh, "a program is compiled for a mesh", is_final=True),
    Rule("pp_interleave", pp_interleave, "rounds divide the pipeline's bubble", is_final=True),
    Rule(
        "global_batch_size",
        resume.stored_batch,
        "what a run learns depends on its batch, which no mesh changes",
        is_final=True,
    ),
    Rule("val_batch_size", resume.stored_val_batch, "its losses are compared with earlier ones"),
    Rule(
        "train_batch_size accumulation_steps microbatches microbatch_size remat",
        resume.stored_split,
        "on the same devices sums in the same order repeat a run to the bit",
        is_final=True,
    ),
    Rule(
        "T global_batch_size val_batch_size max_lr",
        little_text.sizes,
        "a preset's sequences may be more than the text has",
        tell=little_text.tell,
    ),
    Rule(
        "global_batch_size train_batch_size accumulation_steps microbatches remat",
        batch.divided,
        "a device holds activations of a microbatch",
        is_final=True,
    ),
    Rule(
        "training_steps eval_every end_steps decay_steps warmup_steps",
        steps_of_little_text,
        "a text that was read a few times has no more to give",
        tell=little_text.tell_steps,
    ),
    Rule("save_steps", save_steps, "a killed run must not lose most of its work", is_final=True),
    Rule(
        "dropout_rate weight_decay",
        little_text.rates,
        "what is read many times must not be learned by heart",
        tell=little_text.tell_rates,
    ),
    Rule("end_of_text", end_of_text, "a mask needs the token between documents"),
    Rule("max_tokens", prompt.max_tokens, "prompt and sample must fit in --T"),
)


def apply(rules, flags, found, tell=say):
    """`Flags` after these rules. tell: prints what a rule has to tell; None: nothing is printed."""
    for rule in rules:
        values = rule.values(flags, found)
        settled = flags
        if values:
            settle_by = flags.with_given if rule.is_final else flags.with_defaults
            settled = settle_by(**values)
        if tell and rule.tell and (words := rule.tell(flags, settled, found)):
            tell(words)
        flags = settled
    return flags


def settle(flags, found, tell=say):
    """The final configuration, in which nothing is open. It is made here and nowhere else. tell: of `apply`. Raises
    UserError naming the flag, its value and what would do."""
    if found.resumes:
        resume.check_resumable(flags.cfg, found.stored)
    flags = apply(RULES, flags, found, tell)
    check_vocabulary(flags, found)
    check(flags.cfg)
    if found.resumes:
        resume.check_validation(flags.cfg, found.stored)
        resume.check_same(flags.cfg, found.stored)
    return flags.cfg


def settle_model(flags, found, tell=say):
    """`Flags` whose model and schedule are settled, before the devices are known. tell: of `apply`."""
    return apply(MODEL_RULES, flags, found, tell)


def validate(cfg, n_devices):
    """`cfg` completed for `n_devices` and checked, every flag as it is but those that are 0, which follow from others.
    Raises UserError."""
    open_flags = {"global_batch_size"}  # the product of the others
    if not cfg.data.train_batch_size:
        open_flags |= {"accumulation_steps"}
    given = frozenset(utils.FIELDS.keys() - open_flags)
    return settle(Flags(cfg, given), Found(n_devices))


def check_vocabulary(flags, found):
    """Raises UserError where the tokenizer of the shards has more tokens than --vocab_size. Of a model that has weights
    already it is a warning: published tokenizers have tokens that no text becomes. (Where neither holds, the shards are
    of several tokenizers, or not of --tokenizer, which is refused as they are opened.)"""
    size = flags.cfg.model.vocab_size
    for _, folder, manifest in found.shards:
        needed = manifest.get("vocab_size", 0)
        if needed > size and (found.weights or found.resumes):
            say(
                f"warning: the tokenizer of {folder} has {needed} tokens, and the model {size}; a token id beyond ends "
                f"the run where it is read"
            )
            return
        if needed > size and "vocab_size" in flags.given:
            said = f"the shards in {folder} need {needed}"
            raise UserError(said, flag="vocab_size", value=size, remedy="give that")


def check_model(flags, where, names=None):
    """Raises UserError where {flag: value} of a model, read from the file `where`, are no such values or do not fit
    together. names: {flag: what the file calls it}, where that differs."""
    names = {flag: flag for flag in flags} | (names or {})
    read_values(flags, where, names)
    alone = dict(attention="auto", n_device_axis=(1, 1, 1), n_devices=1)
    try:
        validate(replace(Config(), **flags | alone), 1)
    except UserError as e:
        raise e.renamed(where, **names) from None
