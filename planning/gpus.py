"""Descriptions of GPUs for XLA's compiler: jax's CUDA plugin compiles for them without a GPU and without a driver."""

import importlib.util
import shutil
from typing import NamedTuple

from jax.experimental import topologies

from runtime import platforms
from runtime.chips import CHIPS


class Spec(NamedTuple):
    """What the compiler needs to know about a GPU in addition to its `Chip`.

    The numbers of V100, A100, H100, H200 and B200 are those of openxla/xla, xla/backends/gpu/target_config/specs;
    others are from NVIDIA's white papers and the CUDA programming guide.
    """

    capability: str  # compute capability of CUDA
    cores: int  # streaming multiprocessors
    lanes: int  # float32 lanes of each multiprocessor
    threads: int  # most threads of each multiprocessor
    shared: int  # bytes of shared memory of each multiprocessor
    of_block: int  # bytes of it that a block may use
    clock: float  # GHz
    cache: int  # bytes of the level 2 cache


A100 = Spec("8.0", 108, 64, 2048, 167_936, 166_912, 1.41, 41_943_040)
HOPPER = Spec("9.0", 132, 128, 2048, 233_472, 232_448, 1.98, 52_428_800)
SPECS = {
    "P100": Spec("6.0", 56, 64, 2048, 65_536, 49_152, 1.329, 4_194_304),
    "T4": Spec("7.5", 40, 64, 1024, 65_536, 65_536, 1.59, 4_194_304),
    "V100": Spec("7.0", 80, 64, 2048, 98_304, 98_304, 1.53, 6_291_456),
    "L4": Spec("8.9", 58, 128, 1536, 102_400, 101_376, 2.04, 50_331_648),
    "A10": Spec("8.6", 72, 128, 1536, 102_400, 101_376, 1.695, 6_291_456),
    "RTX3090": Spec("8.6", 82, 128, 1536, 102_400, 101_376, 1.695, 6_291_456),
    "RTX4090": Spec("8.9", 128, 128, 1536, 102_400, 101_376, 2.52, 75_497_472),
    "A100": A100,
    "A100-40GB": A100,
    "H100": HOPPER,
    "H200": HOPPER,
    "B200": Spec("10.0", 148, 128, 2048, 233_472, 232_448, 1.965, 132_644_864),
}

# A GpuTargetConfigProto of XLA: constants that all these GPUs share, and the fields of a `Spec` and of its `Chip`.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {spec.threads}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {spec.of_block}
  shared_memory_per_core: {spec.shared} core_count: {spec.cores} fpus_per_core: {spec.lanes}
  memory_bandwidth: {chip.bandwidth:.0f} l2_cache_size: {spec.cache} clock_rate_ghz: {spec.clock}
  device_memory_size: {chip.memory:.0f} cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{chip.jax_name}"
"""


def has_compiler():
    """Whether the compiler is installed: jax's plugin, and NVIDIA's assembler in a package or on the machine."""
    if not any(map(importlib.util.find_spec, platforms.PLUGINS["gpu"])):
        return False
    packages = ("cuda_nvcc", "cu13") if importlib.util.find_spec("nvidia") else ()
    packaged = any(importlib.util.find_spec(f"nvidia.{name}") for name in packages)
    return packaged or shutil.which("ptxas") is not None


def devices(name, hosts, per_host):
    """Devices for the compiler: `per_host` GPUs, named as in `SPECS`, on each of several hosts."""
    chip = CHIPS[name]
    spec = SPECS[name]
    major, minor = spec.capability.split(".")
    # instructions that only one generation has, such as Hopper's matrix products of warp groups
    extension = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    target = TARGET.format(chip=chip, spec=spec, major=major, minor=minor, extension=extension)
    topology = f"1x{hosts}x{per_host}"  # partitions, hosts, devices of each
    options = dict(topology=topology, target_config=target)
    return topologies.get_topology_desc(platform="cuda", **options).devices
