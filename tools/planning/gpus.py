"""GPUs that exist for XLA's compiler alone: what it needs to know of each kind, and devices of them.

The CUDA plugin of jax compiles for them without a GPU and without a driver (the extra plan-gpu of pyproject.toml).
"""

import importlib.util
import shutil
from typing import NamedTuple

from jax.experimental import topologies

from training import platforms

ASSEMBLERS = ("cuda_nvcc", "cu13")  # packages of `nvidia` that hold ptxas


class Spec(NamedTuple):
    """What differs between kinds of GPUs, as openxla/xla has it in xla/backends/gpu/target_config/specs."""

    kind: str  # as jax names the device
    capability: str  # of CUDA, in the text form of a protocol buffer
    cores: int  # streaming multiprocessors
    lanes: int  # of each, for float32
    shared: int  # bytes of shared memory of each
    clock: float  # GHz
    cache: int  # bytes, level 2
    bandwidth: float  # bytes/s of memory
    memory: int  # bytes that a program may use


AMPERE = ("major: 8", 108, 64, 167_936, 1.41, 41_943_040)
HOPPER = ("major: 9 feature_extension: ACCELERATED_FEATURES", 132, 128, 233_472, 1.98, 52_428_800)
BLACKWELL = (
    "major: 10 feature_extension: ACCELERATED_FEATURES",
    148,
    128,
    233_472,
    1.965,
    132_644_864,
)
SPECS = {
    "A100": Spec("NVIDIA A100-SXM4-80GB", *AMPERE, 2_039_040_000_000, 85_100_068_864),
    "A100-40GB": Spec("NVIDIA A100-SXM4-40GB", *AMPERE, 1_555_200_000_000, 42_331_013_120),
    "H100": Spec("NVIDIA H100 80GB HBM3", *HOPPER, 3_352_320_000_000, 84_942_979_072),
    "H200": Spec("NVIDIA H200", *HOPPER, 4_800_000_000_000, 151_397_597_184),
    "B200": Spec("NVIDIA B200", *BLACKWELL, 7_672_320_000_000, 191_514_411_008),
}

# A GpuTargetConfigProto of XLA: what all kinds have in common, and the fields of a `Spec`.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_of_block}
  shared_memory_per_core: {shared} core_count: {cores} fpus_per_core: {lanes}
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} cuda_compute_capability {{ {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{kind}"
"""


def has_compiler():
    """Whether the compiler is installed: jax's plugin, and NVIDIA's assembler in a package or of the machine."""
    if not any(map(importlib.util.find_spec, platforms.PLUGINS["gpu"])):
        return False
    packages = ASSEMBLERS if importlib.util.find_spec("nvidia") else ()
    packaged = any(importlib.util.find_spec(f"nvidia.{name}") for name in packages)
    return packaged or shutil.which("ptxas") is not None


def devices(kind, hosts, per_host):
    """`per_host` devices of a kind of `SPECS` on each of so many hosts, which exist for the compiler alone."""
    spec = SPECS[kind]
    target = TARGET.format(**spec._asdict(), shared_of_block=spec.shared - 1024)
    topology = f"1x{hosts}x{per_host}"  # partitions, hosts, devices of each
    return topologies.get_topology_desc(
        platform="cuda", topology=topology, target_config=target
    ).devices
