"""Devices that run out of memory: recognizes the error, and writes a profile of what fills the memory."""

import contextlib
import re

import jax

from runtime.files import write_file
from runtime.messages import say
from runtime.outbox import attempt

# The words of XLA, of its allocators (BFC and TPU) and of CUDA. RESOURCE_EXHAUSTED alone may mean a full disk.
OUT_OF_MEMORY = re.compile("out.of.memory|RESOURCE_EXHAUSTED: .*(allocat|reserve|hbm)", re.I)


@contextlib.contextmanager
def explained(cfg, out_of_memory):
    """If the devices run out of memory in a `with` block, raise out_of_memory(cfg, error) instead, a UserError that
    says which flags would make a step fit."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # a ValueError where a batch does not fit
        if not OUT_OF_MEMORY.search(str(e)):
            raise
        if cfg.run.profile:
            write_memory_profile(cfg, "out_of_memory")
        raise out_of_memory(cfg, e) from None


def write_memory_profile(cfg, name):
    """Write a profile for pprof of the arrays that are now on this process's devices into the run directory."""
    path = f"{cfg.run.folder}/{name}-{jax.process_index()}.pprof"
    content = jax.profiler.device_memory_profile()
    if attempt(lambda: write_file(path, content), f"--profile: {path} could not be written"):
        say(f"--profile: {path} holds what is in the devices' memory now", own=True)
