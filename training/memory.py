"""A device without room: how that is recognized, and the profile of what fills it."""

import contextlib
import re

import jax

from runtime.files import write_file
from runtime.messages import say
from runtime.outbox import attempt

# As XLA says it, its allocators (BFC, TPU) and CUDA; RESOURCE_EXHAUSTED alone may be a full disk.
OUT_OF_MEMORY = re.compile("out.of.memory|RESOURCE_EXHAUSTED: .*(allocat|reserve|hbm)", re.I)


@contextlib.contextmanager
def explained(cfg, out_of_memory):
    """Where the devices lack memory for what is done in here, raise out_of_memory(cfg, error) instead: a UserError that
    says which flags would make a step fit."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # the latter where a batch finds no room
        if not OUT_OF_MEMORY.search(str(e)):
            raise
        if cfg.run.profile:
            write_memory_profile(cfg, "out_of_memory")
        raise out_of_memory(cfg, e) from None


def write_memory_profile(cfg, name):
    """Write the arrays on this process's devices now, as a profile for pprof, into the run directory."""
    path = f"{cfg.run.folder}/{name}-{jax.process_index()}.pprof"
    content = jax.profiler.device_memory_profile()
    if attempt(lambda: write_file(path, content), f"--profile: {path} could not be written"):
        say(f"--profile: {path} holds what is in the devices' memory now")
