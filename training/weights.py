"""Weights from elsewhere: another run, or a folder in the Hugging Face format."""

import contextlib
import functools
import itertools
import os

import numpy as np

import model
import utils
from architectures import parameters
from training import hugging_face, settings
from training.checkpointing import Checkpoints, shapes_of
from utils import UserError


def other_flags(cfg, kept, there):
    """In words: the flags of the model that are not those of a checkpoint with arrays of the shapes {path: shape}
    `there`. kept: {flag: value} that it was saved with; for None, in older ones, it is found out if it is one flag."""
    free = settings.free_of_weights(cfg.model.architecture)
    now, kept = (
        {flag: value for flag, value in vars(cfg.model).items() if flag not in free},
        utils.clear_names(kept or {}),
    )
    differ = {flag: kept[flag] for flag in now if flag in kept and kept[flag] != now[flag]}
    if not kept and (
        wanted := {path: shape for path, shape in there.items() if path.startswith("params.")}
    ):
        fitting = (
            other for other in neighbours(now, wanted) if parameter_shapes(cfg, *other) == wanted
        )
        differ = dict(itertools.islice(fitting, 1))
    return ", ".join(
        f"--{flag} was {value} and is now {now[flag]}" for flag, value in differ.items()
    )


def neighbours(flags, shapes):
    """Yield each (flag, value) that differs from {flag: value} `flags` and may give parameters of `shapes`."""
    sizes = sorted({*range(10), *itertools.chain(*shapes.values())})
    for flag, value in flags.items():
        known = (
            [True, False] if isinstance(value, bool) else sizes if isinstance(value, int) else []
        )
        for other in ["swiglu", "gelu"] if flag == "activation" else known:
            if other != value:
                yield flag, other


def parameter_shapes(cfg, flag, value):
    """{path: shape} of the parameters of `cfg` with the flag of the model changed, or {} where that is no model."""
    with contextlib.suppress(ArithmeticError, ValueError):
        table = model.param_table(utils.replace(cfg, **{flag: value}))
        return shapes_of(
            {"params": parameters.table_map(lambda p: np.broadcast_to(0, p.shape), table)}
        )
    return {}


def open_weights(folder):
    """({flag: value} of the model in `folder`, load), where load(abstract) places its parameters as `abstract_params`.

    `folder` is a run directory, whose newest sound checkpoint is taken, or in the Hugging Face format. Raises UserError
    where it is neither.
    """
    config = settings.run_config(folder)
    if "model_type" in config:
        return hugging_face.model_flags(config, folder), functools.partial(
            hugging_face.load, folder
        )
    if "model_dimension" not in config:
        raise UserError(
            f"{folder}: neither a run directory nor a folder in the Hugging Face format (each holds a "
            f"config.json)."
        )
    flags = model_of_run(config, folder)
    explain = functools.partial(
        other_flags, utils.replace(utils.Config(), pp_interleave=1, **flags)
    )
    return flags, Checkpoints(os.path.join(folder, "checkpoints"), explain=explain).restore_params


def model_of_run(config, folder):
    """{flag: value} of the model that a run's config.json tells of. Raises UserError for values that no model has."""
    settings.check_stored(config, folder, ["architecture"])
    flags = {name: config[name] for name in vars(utils.Model()) if name in config}
    settings.check_model(flags, os.path.join(folder, "config.json"))
    return flags


def positions(folder, T):
    """Tokens of the longest sequence that the model in `folder` was made for; T: what `open_weights` says that it was
    trained with, which may be less."""
    config = utils.read_json(folder, "config.json")
    most = config.get("max_position_embeddings") or config.get("positions")
    return most if isinstance(most, int) else T
