"""The machines that --plan names, and their compilers, which compile a train step without a device."""

import functools
import importlib.util
import math
import multiprocessing
import os
import re
import signal
import statistics
import time
import types
from concurrent import futures
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from collectives import count_slices
from config.parser import MANY
from kernels import attention
from planning import gpus, hlo
from runtime import chips, platforms
from runtime.chips import CHIPS, Chip, chip_of
from runtime.jax_setup import configure_jax
from runtime.messages import UserError, duration, first_line, say
from training.device_mesh import make_mesh
from training.optimizer import make_optimizer
from training.train_state import abstract_state
from training.train_step import lower_train_step

LIBTPU_NAMES = {"v7x": "tpu7x"}  # chips for which libtpu has another name
# {platform: command that installs its compiler}
INSTALL = {"tpu": 'pip install "jax[tpu]"', "gpu": "bash setup_tpu.sh plan-gpu"}

GPU_SHARE = 0.75  # share of a GPU's memory that jax allocates for programs
MEASURED_SECONDS = 2  # for the speed of a CPU: long enough that no burst decides it


class Machine(NamedTuple):
    """The machine that a plan is for."""

    name: str
    chip: Chip
    n: int  # devices
    groups: int = 1  # TPU slices, or hosts of GPUs, which only a network joins
    topology: str = ""  # name of a slice for the TPU compiler
    platform: str = "tpu"

    @property
    def compiler(self):
        """Its compiler, in words."""
        return f"the {self.platform.upper()} compiler"

    @property
    def slices(self):
        """Number of TPU slices; 1 for other platforms."""
        return self.groups if self.platform == "tpu" else 1

    def as_a_run_has_it(self):
        """This machine with the memory that jax gives to programs, where `Chip.memory` is all of it."""
        share = GPU_SHARE if self.chip.gpu else 1
        return self._replace(chip=self.chip._replace(memory=share * self.chip.memory))

    @property
    def kernels(self):
        """The platform by which attention kernels and experts are chosen, as `attention.platform_of` returns it for
        devices."""
        chip = self.chip
        device = types.SimpleNamespace(platform=self.platform, device_kind=chip.jax_name)
        device.compute_capability = gpus.SPECS[chip.name].capability if chip.gpu else ""
        return attention.platform_of(device)


def parse_machine(name):
    """The `Machine` that a value of --plan names. Raises UserError where it names none."""
    groups, chip, dims = chips.parse_machine(name) or (0, None, ())
    if chip and chip.platform == "cpu":
        measured = chip._replace(peak=measured_speed(), memory=memory_of_this_machine())
        return Machine(chip.name, measured, 1, platform="cpu")
    n = math.prod(dims) * groups * (chip.cores if chip else 0)
    if n > MANY:
        raise UserError(f"has {n:,} devices; give at most {MANY:,}", flag="plan", value=name)
    if not n or len(dims) != (1 if chip.gpu else chip.dims):
        raise UserError(
            f"must be a slice as Google names it, such as v4-32 or v5e-8, or [SLICES*]CHIP:TOPOLOGY, "
            f"such as v4:2x4x4 or 2*v5e:16x16 (v4, v5p and v7x have three dims, the others two), or GPUs, "
            f"[HOSTSx]NUMBERxCHIP, such as 8xH200 or 2x8xH200, or cpu for this machine's; the chips are "
            f"{', '.join(chips.CHIPS)}",
            flag="plan",
            value=name,
        )
    shape = "x".join(map(str, dims))
    if chip.gpu:
        hosts = f"{groups}x" if groups > 1 else ""
        return Machine(f"gpu:{hosts}{shape}x{chip.name}", chip, n, groups, platform="gpu")
    slices = f"{groups}*" if groups > 1 else ""
    topology = f"{LIBTPU_NAMES.get(chip.name, chip.name)}:{shape}"
    return Machine(f"{slices}{chip.name}:{shape}", chip, n, groups, topology)


def machine_of(devices, memory=None):
    """The `Machine` of jax's devices. memory: bytes of one device; None: those that a program may use now."""
    processes = len({device.process_index for device in devices})
    slices = count_slices(devices)
    first = devices[0]
    machine = machine_of_kind(first.device_kind, first.platform, len(devices), processes, slices)
    memory = memory or memory_limit() or machine.chip.memory
    return machine._replace(chip=machine.chip._replace(memory=memory))


def machine_of_kind(device_kind, platform, n, processes, slices):
    """The `Machine` of n devices of jax's device_kind. For an unknown one the speeds are those of another chip, which
    is good enough to compare configurations."""
    chip = chip_of(device_kind) or CHIPS["A100" if platform == "gpu" else "v4"]
    return Machine(device_kind, chip, n, processes if chip.gpu else slices, platform=platform)


def name_of_devices(device_kind, n):
    """The name of a machine of n devices of jax's device_kind, as `parse_machine` takes it; "" where it knows none."""
    chip = chip_of(device_kind)
    if chip is None:
        return chips.CPU if device_kind == chips.CPU else ""
    if chip.gpu:
        return f"gpu:{n}x{chip.name}"
    dims = chips.dims_of(chip, n // chip.cores)
    return f"{chip.name}:{'x'.join(map(str, dims))}" if dims else ""


def memory_limit():
    """Bytes that a program may use on a device here; None: unknown. Simulated devices share the memory of the
    machine."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    return memory_of_this_machine() / jax.local_device_count()


def memory_of_this_machine():
    """Bytes of its main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def measured_speed():
    """FLOP/s of a matrix product in float32 on all cores of this machine: the median over MEASURED_SECONDS.

    A run takes longer than a burst: cores of a VM, and those of a laptop until they are warm, are faster for moments.
    """
    m, k, n = 1024, 512, 1024
    left, right = jnp.ones((m, k)), jnp.ones((k, n))
    multiply = jax.jit(jnp.matmul)
    multiply(left, right).block_until_ready()  # which compiles it
    seconds = []
    end = time.perf_counter() + MEASURED_SECONDS
    while not seconds or time.perf_counter() < end:
        began = time.perf_counter()
        multiply(left, right).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * m * k * n / statistics.median(seconds)


def devices_of(machine):
    """Devices of a machine for its compiler, which cannot run programs. Raises UserError where there is no such
    slice."""
    if machine.platform == "gpu":
        return gpus.devices(machine.chip.name, machine.groups, machine.n // machine.groups)
    columns, rows, *layers = hlo.numbers(machine.topology.split(":")[1])
    host = [min(2, columns), min(2, rows), 1]  # chips of one host along each dim
    options = dict(chips_per_host_bounds=host, num_slices=machine.groups)
    if layers and machine.chip.cores == 1:
        # the two cores of a chip are one device, as on Cloud TPU
        options["chip_config_name"] = "megacore"
    try:
        return topologies.get_topology_desc(machine.topology, "tpu", **options).devices
    except jax.errors.JaxRuntimeError as e:
        words = f"the TPU compiler knows no such slice ({first_line(e)})"
        raise UserError(words, flag="plan", value=machine.name) from None


def has_compiler(machine):
    """Whether the compiler for a machine is installed, and tells times. That for CPUs does not."""
    if machine.platform == "cpu":
        return False
    if machine.platform == "gpu":
        return gpus.has_compiler()
    return importlib.util.find_spec("libtpu") is not None


class Compiled(NamedTuple):
    """A compiled program, on one device."""

    text: str  # its optimized HLO
    arguments: int  # bytes
    temporaries: int  # bytes, at the moment of peak memory


class TooLarge(Exception):
    """A step needs more memory than a device has. Its arguments are (bytes needed, bytes of the device)."""


def compile_step(cfg, devices):
    """Compile the train step that main.py builds for devices of a topology: `Compiled`. Raises TooLarge."""
    mesh = make_mesh(cfg, devices)
    state = abstract_state(cfg, mesh, make_optimizer(cfg, mesh))
    lowered = lower_train_step(cfg, mesh, state)
    options = compiler_options(devices[0].platform)
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as e:
        if refused := too_large(str(e)):
            raise refused from None
        if not re.search("find output tile sizes|Failed to get configs", str(e)):
            raise
        # The compiler has no tile sizes for a product, and no GPU to try others on: cuBLAS computes all products then.
        options["xla_gpu_enable_triton_gemm"] = False
        program = lowered.compile(compiler_options=options)
    memory = program.memory_analysis()
    arguments = memory.argument_size_in_bytes
    # not temp_size_in_bytes, which counts more than is in memory at any one time
    return Compiled(program.as_text(), arguments, memory.peak_memory_in_bytes - arguments)


def compiler_options(platform):
    """Options of the compiler for a platform, including those that a run sets in its environment."""
    if platform not in INSTALL:
        return {}
    # 0: no autotuning, since there is no GPU to measure on
    options = {"xla_gpu_autotune_level": 0} if platform == "gpu" else {}
    for flag in platforms.XLA_FLAGS[platform]:
        name, value = flag.removeprefix("--").split("=")
        options[name] = {"true": True, "false": False}.get(value, value)
    return options


def too_large(message):
    """A `TooLarge` for the compiler's message "Used 40.1G of 30.75G hbm"; None for any other message."""
    sizes = re.search(
        r"Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\)", message
    )
    if not sizes:
        return None
    n_bytes = []
    for x in filter(None, sizes.groups()):  # such as 30.75G
        n_bytes.append(float(x[:-1]) * 1024 ** " KMGT".index(x[-1]))
    return TooLarge(*n_bytes)


def ask_compiler(cfg, machine, limit=0):
    """`compile_step` for a machine in a process of its own; None where the compiler crashes, or needs more than `limit`
    seconds (0: as many as it needs). Raises TooLarge."""
    spawn = multiprocessing.get_context("spawn")
    began = time.monotonic()
    with futures.ProcessPoolExecutor(1, spawn, hide_errors) as pool:
        try:
            return pool.submit(compile_for, cfg, machine, limit).result()
        except (futures.process.BrokenProcessPool, jax.errors.JaxRuntimeError) as e:
            if limit and time.monotonic() > began + limit:
                say(
                    f"{machine.compiler} has not ended after {duration(limit)}: these are the formulas' numbers; "
                    f"--plan waits for it"
                )
                return None
            say(
                f"{machine.compiler} crashes on this step, an error of its own ({first_line(e)}), and may crash on the "
                f"machine too; these are the formulas' numbers; another mesh or width may compile"
            )
            return None


def hide_errors():
    """Discard stderr, to which a compiler that crashes writes pages."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def compile_for(cfg, machine, limit):
    """`compile_step` for a machine, in the process that `ask_compiler` starts. That ends after `limit` seconds, also
    within the compiler: SIGALRM ends a process that does not expect it."""
    signal.alarm(limit)
    configure_jax(cfg)
    return compile_step(cfg, devices_of(machine))
