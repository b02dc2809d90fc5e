"""Settings of jax and of the libraries below it. They are made by these functions; importing a module changes none."""

import logging
import os
import sys

import jax
from absl import logging as absl_logging

from runtime.files import check_writable
from runtime.messages import UserError, warn


def quiet_libraries():
    """Silence what the libraries log about errors that the programs here report themselves, in one sentence each."""
    absl_logging.set_verbosity(absl_logging.FATAL)  # used by Orbax
    # It logs a traceback for each of Orbax's tasks.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    # The errors with which Orbax's reads end after another read has failed, and gcsfs's uploads after another upload.
    ends = "Event loop is closed", "Existing exports of data: object cannot be re-sized"

    def hook(unraisable):
        if str(unraisable.exc_value) not in ends:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def configure_jax(cfg):
    """Silence the libraries, and set the compilation cache and the precision of matrix products from the flags."""
    quiet_libraries()
    cache = os.path.expanduser(cfg.run.compilation_cache)
    if cache:
        try:
            check_writable(os.path.join(cache, "entry"), "compilation_cache")
            jax.config.update("jax_compilation_cache_dir", cache)
        except UserError as e:  # only warn, once: jax would warn for every program that it compiles
            warn(e, own=True)
    set_precision(cfg)


def set_precision(cfg):
    """Set the precision of matrix products that --model_dtype asks for."""
    if cfg.model.model_dtype == "float32":
        # By default, accelerators round the inputs of float32 products to fewer bits.
        jax.config.update("jax_default_matmul_precision", "float32")
