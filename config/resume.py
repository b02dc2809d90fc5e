"""A run that exists already: what it stored, what it keeps, and what may change when it resumes.

Whether a flag may change is said at its field (`utils.py`, on_resume); here that is checked, and a change is reported.
"""

import contextlib
import os

import utils
from config.batch import SPLIT
from config.flags import compare, free_of_weights, without
from config.stored import BESIDE_FLAGS, read_values
from runtime.files import names_in, read_json
from runtime.messages import UserError, say
from utils import flags_with, flatten

# Of config.json, beside the flags that a run keeps: the first four give its batch, and messages name `data`.
NEEDED_TO_RESUME = {
    "train_batch_size",
    "val_batch_size",
    "accumulation_steps",
    "n_device_axis",
    "data",
}
# {flag: values that meant another model before `utils.Model.revision` 1}
CHANGED = dict(
    latent_conv=range(1, 65),  # weighed each channel of a rotary key apart
    experts_per_token=[1],  # its gate was 1, whatever its score
)


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
    meant another model when the run was made. A flag that is unknown here may have shaped the model too, unless it is
    off."""
    path, remedy = os.path.join(folder, "config.json"), "restore it"
    if missing := sorted({*needed} - config.keys()):
        raise UserError(f"{', '.join(missing)} is missing", where=path, remedy=remedy)
    read = (utils.KEPT | {*needed}) & config.keys()
    read_values({flag: config[flag] for flag in read}, path, remedy=remedy)
    older = f"commit {config['commit']}" if config.get("commit") else "that version"
    unknown = config.keys() - utils.FIELDS.keys() - BESIDE_FLAGS
    if others := ", ".join(sorted(flag for flag in unknown if config[flag])):
        raise UserError(
            f"{path}: this version of the program has no flag {others}; use {older}, which made the run, or train "
            f"again."
        )
    for flag, values in CHANGED.items():
        if "revision" not in config and config.get(flag) in values:
            raise UserError(
                f"{path}: {flag} {config[flag]} meant another model in the version of this program that made the run; "
                f"use {older}, or train again."
            )


def global_batches(stored):
    """Sequences of a training step and of a validation batch, on all devices, of a run's {flag: value}."""
    dp = stored["n_device_axis"][0]
    total = stored["train_batch_size"] * dp * stored["accumulation_steps"]
    return total, stored["val_batch_size"] * dp or total


def check_resumable(cfg, stored):
    """Raises UserError where `stored` is no config.json of a run, or a damaged one."""
    r = cfg.run
    if "data_fingerprint" not in stored:
        said = "this run holds weights alone"
        remedy = f"begin another from them with --init_from {r.folder}"
        raise UserError(said, flag="name", value=r.name, remedy=remedy)
    check_stored(stored, r.folder, NEEDED_TO_RESUME)


def stored_model(flags, found):
    """{flag: value} of what the shards and the devices of today would settle otherwise."""
    settled_by_others = {"model_dtype", "vocab_size", "T", "max_lr", "dropout_rate", "weight_decay"}
    return {flag: found.stored[flag] for flag in settled_by_others & found.stored.keys()}


def stored_batch(flags, found):
    """{flag: value} of the global batch of the run that is resumed. Raises UserError where another was given."""
    if not found.resumes:
        return {}
    total, _ = global_batches(found.stored)
    now = flags.cfg.data.global_batch_size
    if "global_batch_size" in flags.given and now != total:
        said = f"run {flags.cfg.run.name} exists and has {total}"
        remedy = f"give that, or another --name, {from_its_weights(flags.cfg)}"
        raise UserError(said, flag="global_batch_size", value=now, remedy=remedy)
    return dict(global_batch_size=total)


def stored_val_batch(flags, found):
    """{flag: value} of validation batches as large as before, divided over the mesh of today."""
    if not found.stored.get("val_batch_size"):
        return {}
    _, total = global_batches(found.stored)
    return dict(val_batch_size=max(1, total // flags.cfg.run.n_device_axis[0]))


def stored_split(flags, found):
    """{flag: value} of the batch divided as before, and of --remat, on the mesh of before, unless flags say how: sums
    in another order differ in the last bit. Another kind of device may have less memory, and has other bits anyway."""
    if not found.resumes or flags.given & SPLIT:
        return {}
    here = flags.cfg.run.n_device_axis, found.device_kind
    kind = found.stored.get("device_kind", found.device_kind)
    before = tuple(found.stored["n_device_axis"]), kind
    if here != before:
        return {}
    kept = (SPLIT | {"remat"}) - flags.given
    return {flag: found.stored[flag] for flag in kept & found.stored.keys()}


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


def to_resume(cfg, fingerprint):
    """What resuming reads of config.json, which every checkpoint keeps."""
    wanted = utils.KEPT | NEEDED_TO_RESUME | flags_with(on_resume="told")
    flags = flatten(cfg)
    kept = {flag: flags[flag] for flag in flags.keys() & wanted}
    return kept | dict(data_fingerprint=fingerprint)


def other_flags(cfg, kept):
    """In words: the model flags in which `cfg` differs from the {flag: value} with which a checkpoint was saved. kept:
    these, or None where it does not say."""
    now = without(free_of_weights(cfg.model.architecture), vars(cfg.model))
    return changes(kept or {}, now, now)


def changes(then, now, flags):
    """In words: those of `flags` whose values in the {flag: value} `then`, which may lack some, and `now` differ."""
    changed = [flag for flag in flags if then.get(flag, now[flag]) != now[flag]]
    return ", ".join(f"--{flag} was {then[flag]} and is now {now[flag]}" for flag in changed)


def tell_schedule(cfg, stored):
    """Print where the run that `stored` describes had another schedule, or it does not end with the run."""
    o, last = cfg.optimizer, cfg.run.training_steps
    if changed := changes(stored, vars(o), sorted(flags_with(on_resume="told"))):
        say(f"the schedule changes from here on: {changed}")
    what = f"stays at --end_lr {o.end_lr:g} from --end_steps {o.end_steps} on"
    if last < o.end_steps:
        what = f"ends before its learning rate has come down, at --end_steps {o.end_steps}"
    if o.comes_down and last != o.end_steps:
        say(f"warning: --training_steps {last}: the run {what}")
