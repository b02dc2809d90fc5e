"""The known chips with their peaks, memory and links: for MFU, for --plan, and for the choice of --model_dtype.

All numbers are those of one jax device. That is a core of a TPU v2, v3 or 7x, whose chips are two devices, and a whole
chip otherwise. This file does not import jax. The numbers come from:

- TPU v2 and v3: Jouppi et al., A domain-specific supercomputer for training deep neural networks, CACM 63(7), 2020.
- TPU v4 to 7x: the page of each chip at cloud.google.com/tpu/docs. Links and networks of v4 to v6e:
  jax-ml.github.io/scaling-book, chapter 2. Those of 7x are half of a v5p chip's.
- Memory of TPUs: as much as the TPU compiler lets a program use. Clocks: chosen so that matrix products, in the cycles
  that the compiler counts, run at the peak.
- GPUs: NVIDIA's data sheets, and for RTX 3090 and 4090 the white papers of GA102 and AD102. All peaks are for dense
  products with sums in float32. Memory: openxla/xla, xla/backends/gpu/target_config/specs, if the GPU is there, and
  otherwise what the driver leaves.
- A P100 multiplies twice as fast in float16, but only with sums in float16, which XLA does not make.
- GPUs without NVLink are linked by PCIe. The plan treats the PCIe of a host as a switch between its GPUs.
"""

import itertools
import math
import re
from importlib.metadata import version
from typing import NamedTuple

from runtime import platforms
from runtime.messages import UserError

GiB = 2**30
# The share of a GPU's peak and bandwidth that programs reach, by a trace of an H200 (dev/log.md, 2026-11-26). TPUs need
# no such number, since their estimates come from the TPU compiler.
GPU_REACHES = 0.75
# The share of the speed of one large product that a whole step reaches on CPU cores (dev/log.md, 2026-11-28).
CPU_REACHES = 0.6
CPU = "cpu"  # this machine's, all cores as one device, in --plan and --design


class Chip(NamedTuple):
    """One jax device of a kind of chip."""

    name: str  # its name in --plan
    jax_names: tuple[str, ...]  # its names as `device_kind` of jax
    # FLOP/s of dense products in bfloat16; of a chip without it, in the faster of float16 and float32.
    peak: float
    memory: float  # bytes that a program may use
    bandwidth: float  # bytes/s of that memory
    link: float  # bytes/s of one link to another chip, in one direction
    network: float  # bytes/s to other TPU slices or to other hosts
    clock: float = 0.0  # Hz of the cycles that the TPU compiler counts; 0: a GPU
    dims: int = 2  # number of dims of a TPU slice's topology
    cores: int = 1  # jax devices on a TPU chip
    # FLOP/s in float32, in which XLA multiplies bfloat16 on a chip without it; 0: the chip has it.
    float32: float = 0.0
    # Whether its compiler computes operands inside products, which saves memory traffic.
    fuses: bool = False

    @property
    def jax_name(self):
        """The first of jax's names."""
        return self.jax_names[0]

    @property
    def platform(self):
        """Its platform in jax: "tpu", "gpu" or "cpu"."""
        if self.name == CPU:
            return "cpu"
        return "tpu" if self.clock else "gpu"

    @property
    def gpu(self):
        """Whether it is a GPU."""
        return self.platform == "gpu"

    @property
    def dtype(self):
        """The --model_dtype in which it multiplies fastest."""
        if not self.float32:
            return "bfloat16"
        return "float16" if self.peak > self.float32 else "float32"

    def peak_in(self, dtype):
        """Peak FLOP/s of products in a --model_dtype. A chip with bfloat16 counts as if it multiplied all as fast."""
        return self.peak if dtype == self.dtype or not self.float32 else self.float32

    def speed_in(self, dtype):
        """FLOP/s that the plan assumes for products in a --model_dtype."""
        reaches = {"gpu": GPU_REACHES, "cpu": CPU_REACHES}.get(self.platform, 1)
        return self.peak_in(dtype) * reaches

    @property
    def memory_speed(self):
        """Bytes/s that the plan assumes for reading and writing memory."""
        return self.bandwidth * (GPU_REACHES if self.gpu else 1)


A100_40 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")
# Bytes/s from one GPU to other hosts, where eight GPUs share a network card of 100 Gbit/s.
CARD = 12.5e9 / 8
# fmt: off
KNOWN = [
    Chip("v2", ("TPU v2",), 23e12, 7.48 * GiB, 350e9, 62e9, CARD, 0.7e9, cores=2),
    Chip("v3", ("TPU v3",), 61.5e12, 15.48 * GiB, 450e9, 82e9, CARD, 0.94e9, cores=2),
    Chip("v4", ("TPU v4",), 275e12, 30.75 * GiB, 1228e9, 45e9, 6.25e9, 1.05e9, dims=3),
    Chip("v5e", ("TPU v5e", "TPU v5 lite"), 197e12, 15.75 * GiB, 819e9, 45e9, 3.125e9, 1.5e9, fuses=True),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, 95.74 * GiB, 2765e9, 90e9, 6.25e9, 1.75e9, dims=3),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * GiB, 1640e9, 90e9, 12.5e9, 1.75e9, fuses=True),
    Chip("v7x", ("TPU7x",), 1153.5e12, 94.75 * GiB, 3690e9, 90e9, 6.25e9, 2.2e9, dims=3, cores=2),
    Chip("P100", ("Tesla P100-PCIE-16GB",), 9.3e12, 15.89 * GiB, 732e9, 16e9, CARD, float32=9.3e12),
    Chip("T4", ("Tesla T4",), 65e12, 14.56 * GiB, 320e9, 16e9, CARD, float32=8.1e12),
    Chip("V100", ("Tesla V100-SXM2-16GB",), 125e12, 16_935_682_048, 898e9, 150e9, 6.25e9, float32=15.7e12),
    Chip("L4", ("NVIDIA L4",), 121e12, 22.03 * GiB, 300e9, 32e9, CARD),
    Chip("A10", ("NVIDIA A10",), 125e12, 22.06 * GiB, 600e9, 32e9, CARD),
    Chip("RTX3090", ("NVIDIA GeForce RTX 3090",), 71e12, 23.5 * GiB, 936e9, 32e9, CARD),
    Chip("RTX4090", ("NVIDIA GeForce RTX 4090",), 165.2e12, 23.5 * GiB, 1008e9, 32e9, CARD),
    Chip("A100", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12, 85_100_068_864, 2039.04e9, 300e9, 25e9),
    Chip("A100-40GB", A100_40, 312e12, 42_331_013_120, 1555.2e9, 300e9, 25e9),
    Chip("H100", ("NVIDIA H100 80GB HBM3",), 989e12, 84_942_979_072, 3352.32e9, 450e9, 50e9),
    Chip("H200", ("NVIDIA H200",), 989e12, 151_397_597_184, 4800e9, 450e9, 50e9),
    Chip("B200", ("NVIDIA B200",), 2250e12, 191_514_411_008, 7672.32e9, 900e9, 50e9),
]
# fmt: on
CHIPS = {chip.name: chip for chip in KNOWN}
# {TPU: chips of the largest slice}, from the page of each at cloud.google.com/tpu/docs.
LARGEST = dict(v2=256, v3=1024, v4=4096, v5e=256, v5p=6144, v6e=256, v7x=9216)
# {chips: dims} of the slices of three-dimensional TPUs that are smaller than a cube of 64 chips.
BELOW_A_CUBE = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
BY_NAME = {name.lower(): chip for name, chip in CHIPS.items()}
OTHER_NAMES = {"v5litepod": "v5e", "tpu7x": "v7x", "a100-80gb": "a100"}
OTHER_NAMES |= {"4090": "rtx4090", "3090": "rtx3090"}
# How --plan names a machine: TPU slices by Google's name or by their dims, GPUs by hosts and GPUs or by number.
MACHINES = [
    r"(?:(?P<groups>\d+)[*x])?(?P<chip>v\w+|tpu7x)-(?P<number>\d+)",  # v4-32
    r"(?:(?P<groups>\d+)\*)?(?P<chip>v\w+):(?P<dims>[\dx]*\d)",  # v4:2x2x4
    r"(?:gpu:)?(?:(?P<groups>\d+)x)?(?P<dims>\d+)x(?P<chip>[\w-]+)",  # gpu:2x8xH100
    r"(?P<groups>)(?P<chip>[a-z][\w-]*)(?::(?P<dims>\d+))?",  # H100:8
]


def chip_of(device_kind):
    """The `Chip` with this name in jax; None where it is not in the list."""
    return next((chip for chip in KNOWN if device_kind in chip.jax_names), None)


def best_dtype(device_kind):
    """(name of a device, for messages; the --model_dtype in which XLA multiplies fastest on it). An unknown one has no
    name, and bfloat16."""
    if device_kind == "cpu":
        dtype = "bfloat16" if platforms.cpu_has_bfloat16() else "float32"
        return f"this CPU, with jax {version('jax')},", dtype
    chip = chip_of(device_kind)
    return (chip.name, chip.dtype) if chip else ("", "bfloat16")


def parse_machine(name):
    """(number of slices or hosts, Chip, dims of a slice or (number of GPUs of a host,)) of a machine as --plan names
    it; None where the name means no machine. Raises UserError for a TPU slice of a size that does not exist."""
    if name.lower() == CPU:
        # its speed is not in a table: planning/machines.py measures it
        return 1, Chip(CPU, (CPU,), 0.0, 0.0, math.inf, math.inf, math.inf, dims=1), (1,)
    for pattern in MACHINES:
        found = re.fullmatch(pattern, name.lower())
        chip_name = found and OTHER_NAMES.get(found["chip"], found["chip"])
        chip = BY_NAME.get(chip_name)
        if chip and chip.gpu == (pattern in MACHINES[2:]):
            values = found.groupdict()
            if "dims" in values:
                dims = tuple(map(int, (values["dims"] or "1").split("x")))
            else:
                dims = slice_dims(chip, int(found["number"]), name)
            return int(found["groups"] or 1), chip, dims
    return None


def parse_slice(name):
    """(Chip, number of chips) of a TPU slice as Cloud TPU rents it, such as v4-32. Raises UserError."""
    try:
        found = parse_machine(name) if re.fullmatch(r"v\d\w*-\d+", name.lower()) else None
    except UserError as e:
        raise UserError(e.said, value=f"TPU_TYPE={name}") from None
    if not found or found[1].gpu:
        raise UserError(
            "must be a slice as Google names it, such as v4-32", value=f"TPU_TYPE={name}"
        )
    _, chip, dims = found
    if chip.name == "v7x":  # cloud.google.com/tpu/docs/runtimes
        raise UserError(
            "Google offers this chip in Kubernetes only, not as a slice", value=f"TPU_TYPE={name}"
        )
    return chip, math.prod(dims)


def slice_dims(chip, number, name):
    """The dims of a slice from the number in Google's name for it. It counts TensorCores, of which a chip has two; for
    v5e and v6e it counts chips. Raises UserError where there is no such slice."""
    cores = 1 if (chip.dims, chip.cores) == (2, 1) else 2
    sizes = [n * cores for n in range(1, LARGEST[chip.name] + 1) if dims_of(chip, n)]
    if number not in sizes:
        first, second = sorted(sorted(sizes, key=lambda n: abs(n - number))[:2])
        unit = "chips" if cores == 1 else "TensorCores, two a chip"
        raise UserError(
            f"there is no such slice; the number counts {unit}, and near it are {chip.name}-{first} "
            f"and {chip.name}-{second}",
            flag="plan",
            value=name,
        )
    return dims_of(chip, number // cores)


def dims_of(chip, n):
    """The dims of a slice of n chips; () where there is no such slice.

    In two dims they are as close to a square as possible. In three dims a slice is either one of BELOW_A_CUBE, or made
    of cubes of 64 chips, and then as close to a cube as possible.
    """
    if chip.dims == 2:
        side = 2 ** ((n.bit_length() - 1) // 2)
        return (side, n // side) if n.bit_count() == 1 and n != 2 else ()
    if n % 64 or n == 0:
        return BELOW_A_CUBE.get(n, ())
    sides = [side for side in range(1, n // 64 + 1) if n // 64 % side == 0]
    shapes = itertools.combinations_with_replacement(sides, 3)
    return min(([4 * x for x in shape] for shape in shapes if math.prod(shape) == n // 64), key=sum)
