"""Exported runs and their parameters."""

import jax
import numpy as np
from helpers import make_run
from small_models import settled

import utils
from config.flags import free_of_weights
from inference import weights
from tools import hf
from training.device_mesh import make_mesh
from training.train_state import abstract_params


def params_of(folder, cfg):
    """The parameters of a run or an exported folder, in which the model is that of `cfg`."""
    stored, load = weights.open_weights(str(folder))
    free = free_of_weights(cfg.model.architecture)
    of_weights = {flag: value for flag, value in stored.items() if flag not in free}
    assert settled(utils.replace(cfg, **of_weights).model) == settled(cfg.model)
    return jax.tree.map(np.asarray, load(abstract_params(cfg, make_mesh(cfg))))


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def exported_run(folder, flags):
    """(Config, run directory, the folder that it is exported to)."""
    run, cfg, _, _ = make_run(folder, **flags)
    hf.export(str(run), str(folder / "exported"))
    return cfg, run, folder / "exported"
