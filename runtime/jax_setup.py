"""Settings of jax and of the libraries below it, made here and nowhere at import."""

import logging
import os
import sys

import jax
from absl import logging as absl_logging

from runtime.files import check_writable
from runtime.messages import UserError, warn


def quiet_libraries():
    """Silence what the libraries log about errors that the programs here report themselves, in a sentence each."""
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax's
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a trace for each of Orbax's tasks

    # how reads of Orbax end after another one failed, and uploads of gcsfs
    ends = "Event loop is closed", "Existing exports of data: object cannot be re-sized"

    def hook(unraisable):
        if str(unraisable.exc_value) not in ends:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def configure_jax(cfg):
    """Silence the libraries, and set the compilation cache and the precision of products as `cfg` says."""
    quiet_libraries()
    cache = os.path.expanduser(cfg.run.compilation_cache)
    if cache:
        try:
            check_writable(os.path.join(cache, "entry"), "compilation_cache")
            jax.config.update("jax_compilation_cache_dir", cache)
        except UserError as e:  # one warning; jax would give one for every program that it compiles
            warn(e)
    set_precision(cfg)


def set_precision(cfg):
    """Have jax multiply as precisely as --model_dtype says."""
    if cfg.model.model_dtype == "float32":
        # accelerators would otherwise round the inputs of matrix products
        jax.config.update("jax_default_matmul_precision", "float32")
