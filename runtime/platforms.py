"""Which devices jax will find on this machine, and the flags that XLA needs for them. Does not import jax at the top.

python runtime/platforms.py     prints what this machine computes on: tpu, gpu or cpu (setup_tpu.sh calls it)
"""

import functools
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

# {platform: flags for XLA}. Simulated CPU devices share few cores, so a device may wait long for the others in a
# collective: the limits are raised. On TPUs and GPUs the flags let computation overlap with communication.
XLA_FLAGS = {
    "cpu": [
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
    ],
    "gpu": ["--xla_gpu_enable_latency_hiding_scheduler=true"],
    "tpu": [
        "--xla_tpu_enable_async_all_to_all=true",
        "--xla_enable_async_all_gather=true",
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=true",
    ],
}
# {accelerator: modules, one of which jax needs beside itself}.
PLUGINS = {"gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}


def accelerator():
    """What this machine computes on: "tpu", "gpu" or "cpu", also before jax is installed. JAX_PLATFORMS wins."""
    chosen = chosen_platform()
    return chosen if chosen in ("cpu", "tpu", "gpu") else hardware()


def hardware():
    """What this machine has, whatever JAX_PLATFORMS says: "tpu", "gpu" or "cpu"."""
    # nvidia-smi is needed where /dev/nvidia0 is missing, as in WSL. It takes a second, so /dev is checked first.
    if glob.glob("/dev/nvidia[0-9]*") or nvidia_smi_lists_gpus():
        return "gpu"
    if glob.glob("/dev/accel[0-9]*"):
        return "tpu"
    # Newer TPUs are vfio devices, as many others are. 0x1ae0 is Google's PCI vendor id.
    vendors = glob.glob("/sys/bus/pci/devices/*/vendor") if glob.glob("/dev/vfio/[0-9]*") else []
    is_tpu = any(Path(path).read_text().strip() == "0x1ae0" for path in vendors)
    return "tpu" if is_tpu else "cpu"


def platform():
    """The platform that jax will choose, without importing jax: the accelerator's, if its plugin is installed."""
    if chosen := chosen_platform():
        return chosen
    found = accelerator()
    return found if has_plugin(found) else "cpu"


def has_plugin(accelerator):
    """Whether the plugin that jax needs for an accelerator is installed."""
    return any(importlib.util.find_spec(name) for name in PLUGINS.get(accelerator, ()))


def cpu_has_bfloat16():
    """Whether XLA multiplies in bfloat16 on this machine's CPU. It does with Intel's AMX, from jax 0.11 on."""
    info = Path("/proc/cpuinfo")
    major, minor, *_ = map(int, re.findall(r"\d+", version("jaxlib")))
    return (major, minor) >= (0, 11) and info.exists() and " amx_bf16" in info.read_text()


def chosen_platform():
    """The first platform of JAX_PLATFORMS; "" where the variable is not set."""
    name = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    return "gpu" if name in ("cuda", "rocm") else name


@functools.cache
def nvidia_smi_lists_gpus():
    """Whether nvidia-smi is installed and lists a GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.stdout.startswith("GPU")


def set_xla_flags(n_devices, num_processes=1):
    """Add this platform's XLA flags to the environment. Flags that the user has set there stay, and win.

    n_devices: number of simulated CPU devices, which are divided among the processes; 0: no such flag is added.
    """
    # If a plugin is installed, for example for --plan, jax would complain that the accelerator is missing.
    if not os.environ.get("JAX_PLATFORMS") and accelerator() == "cpu":
        choose_cpu()
    # The TPU compiler reads its flags from another variable.
    variable = "LIBTPU_INIT_ARGS" if platform() == "tpu" else "XLA_FLAGS"
    now = os.environ.get(variable, "").strip()
    if os.path.isfile(now):  # the variable may also name a file that holds the flags
        now = Path(now).read_text()
    flags = list(XLA_FLAGS.get(platform(), []))
    if n_devices and platform() == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={n_devices // num_processes}")
    given = {name_of_flag(word) for word in now.split()}
    added = [flag for flag in flags if name_of_flag(flag) not in given]
    os.environ[variable] = " ".join([now, *added]).strip()
    if num_processes > 1:
        # The C++ code would report a lost process over and over, which main.py reports in one sentence.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def name_of_flag(word):
    """The name of an XLA flag that is given as --name=value, as --name, or as --noname, with which libtpu turns one
    off."""
    return re.match(r"(?:--?(?:no)?)?([^=]*)", word)[1]


def find_devices():
    """Have jax find the devices. Raises UserError where it finds none of those that JAX_PLATFORMS names, `Unavailable`
    where it cannot use those that the machine has."""
    import jax

    # imported here, since this file is also run as a program, which finds no other module of this repository
    from runtime.messages import Unavailable, UserError, first_line

    try:
        jax.devices()
        return
    except Exception as e:  # a RuntimeError, or an AssertionError for a missing GPU
        error = e
    has = hardware()
    usable = {"cpu", "cuda" if has == "gpu" else has}
    chosen = os.environ.get("JAX_PLATFORMS", "")
    missing = [name for name in dict.fromkeys(chosen.split(",")) if name not in usable]
    if chosen and missing:
        names = " and no ".join(map(repr, missing))
        raise UserError(
            f"JAX_PLATFORMS={chosen}: jax finds no {names} on this machine; leave it unset, or give "
            f"{' or '.join(sorted(usable))}."
        )
    if has in PLUGINS and not has_plugin(has):
        raise UserError(
            f"JAX_PLATFORMS={chosen}: this Python has no jax for a {has.upper()}; bash setup_tpu.sh adds it."
        )
    raise Unavailable(f"jax cannot use the {has.upper()} of this machine ({first_line(error)}).")


def choose_cpu():
    """Keep jax from searching for accelerators. It works before jax is imported and after, until jax has searched."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def use_no_device():
    """Keep jax away from the machine's own devices, and the TPU compiler from searching for any."""
    choose_cpu()
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v4-8",
        TPU_WORKER_ID="0",
    )


if __name__ == "__main__":
    print(accelerator())
