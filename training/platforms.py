"""The devices that jax will find: which kind, the flags that XLA needs for it, its peak. No jax in here."""

import contextlib
import glob
import importlib.metadata
import importlib.util
import os
import sys

# Flags for XLA by platform. Simulated CPU devices share few cores, so a device may wait long for its peers.
XLA_FLAGS = {
    "cpu": [
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
    ],
    "gpu": ["--xla_gpu_enable_latency_hiding_scheduler=true"],
    "tpu": [],
}


def platform():
    """The platform that jax will choose, found without importing it: "tpu", "gpu" or "cpu"."""
    chosen = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen:
        return {"cuda": "gpu", "rocm": "gpu"}.get(chosen, chosen)
    if glob.glob("/dev/nvidia[0-9]*") and any(
        importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)
    ):
        return "gpu"
    if (
        os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    ) and importlib.util.find_spec("libtpu"):
        return "tpu"
    return "cpu"


def may_have_tpu():
    """Whether anything here hints at a TPU: its device files or chips, or what its hosts have in the environment."""
    devices = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*")
    told = [name for name in os.environ if name.startswith("TPU_") and name != "TPU_LIBRARY_PATH"]
    return bool(devices or told or any(map(is_google, glob.glob("/sys/bus/pci/devices/*/vendor"))))


def is_google(path):
    """Whether the vendor in a file of the PCI bus is Google, which makes TPUs."""
    with contextlib.suppress(OSError), open(path) as f:
        return f.read().strip() == "0x1ae0"
    return False


def other_plugins():
    """Whether jax finds plugins for devices other than TPUs."""
    return bool(
        importlib.util.find_spec("jax_plugins")
        or importlib.metadata.entry_points(group="jax_plugins")
    )


def set_xla_flags(n_devices, num_processes=1):
    """Add this platform's XLA flags to the environment; what the user has set there stays and wins. Of n_devices
    simulated ones each process gets its part.

    Where libtpu is installed and there is no TPU, jax is told to leave it: it complains for lines that it finds none.
    """
    if not os.environ.get("JAX_PLATFORMS") and importlib.util.find_spec("libtpu"):
        if not may_have_tpu() and not other_plugins():
            choose_cpu()
    now, flags = os.environ.get("XLA_FLAGS", ""), list(XLA_FLAGS.get(platform(), []))
    if n_devices and platform() == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={n_devices // num_processes}")
    os.environ["XLA_FLAGS"] = " ".join(
        [now, *(f for f in flags if f.split("=")[0] not in now)]
    ).strip()
    if (
        num_processes > 1
    ):  # jax tells of a lost process over and over; main.py says it in a sentence
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def choose_cpu():
    """Have jax look for no accelerator, also where it is imported already but has not looked for devices yet."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def use_no_device():
    """Keep jax off the machine's own devices, and a TPU compiler from looking for any."""
    choose_cpu()
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v4-8",
        TPU_WORKER_ID="0",
    )


# Peak dense bfloat16 FLOP/s of one jax device, by the start of its device_kind (the vendors' data sheets).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind):
    """Peak FLOP/s of a device, or None where it is not known. The longest matching name wins."""
    known = [k for k in PEAK_FLOPS if device_kind.startswith(k)]
    return PEAK_FLOPS[max(known, key=len)] if known else None
