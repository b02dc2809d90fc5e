"""What must be set before jax is first imported: 8 simulated CPU devices, and what makes the tests quick."""

import gc
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def prepare():
    """Set environment variables, and where imports look. Later calls change nothing."""
    sys.path.insert(0, str(ROOT))
    # a shell ignores SIGINT in what it puts in the background, and so would every program that the tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["WANDB_MODE"] = "offline"
    # what each of several processes prints is read apart; tests/test_slurm.py has them print into one log
    os.environ["LOG_PER_PROCESS"] = "yes"
    # else gcsfs asks an emulator for gRPC, for a minute
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    # compiling would be most of the tests' time; these shorten it eightfold and change nothing that the tests look at
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    if version("jaxlib").startswith("0.10."):  # XLA ends a process that gives later ones this flag
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # small programs are cached too
    # tracing makes many objects: collecting them often is a fifth of its time
    gc.set_threshold(100_000)
