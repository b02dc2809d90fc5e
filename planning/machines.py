"""The machines that --plan names, and what their compilers make of a train step.

A compiler needs none of the devices: it compiles the real step for them, on any machine.
"""

import importlib.util
import math
import multiprocessing
import os
import re
import tempfile
from concurrent import futures
from typing import NamedTuple

import jax
from jax.experimental import topologies

from planning import gpus
from runtime import platforms
from runtime.chips import CHIPS, Chip
from runtime.messages import UserError, say
from runtime.parser import MANY
from training import steps
from training.optimizer import make_optimizer

LIBTPU_NAMES = {"v7x": "tpu7x"}  # of chips that libtpu calls otherwise


class Compiler(NamedTuple):
    """What compiles for machines of one platform."""

    name: str
    install: str  # how it is had
    options: dict  # of a compilation

    @property
    def missing(self):
        return f"{self.name} is not installed ({self.install}), so these are the formulas' numbers alone"


COMPILERS = {
    "tpu": Compiler("the TPU compiler", 'pip install "jax[tpu]"', {}),
    # no GPU is there to time tiles on
    "gpu": Compiler(
        "the GPU compiler", "bash setup_tpu.sh plan-gpu", {"xla_gpu_autotune_level": 0}
    ),
}


class Machine(NamedTuple):
    """What --plan names."""

    name: str
    chip: Chip
    n: int  # devices
    slices: int = 1
    topology: str = ""  # as the TPU compiler calls a slice; empty: it is not asked
    hosts: int = 1  # of GPUs
    platform: str = "tpu"

    @property
    def compiler(self):
        return COMPILERS[self.platform]


def parse_machine(name):
    """--plan's value -> `Machine`. Raises UserError where it is none."""
    machine = parse_gpus(name) if name.startswith("gpu:") else parse_slices(name)
    if machine.n > MANY:
        raise UserError(
            f"--plan {name}: has {machine.n:,} devices; at most {MANY:,} can be planned for."
        )
    return machine


def parse_gpus(name):
    """gpu:8xH200 or gpu:2x8xH200, 2 hosts of 8 -> `Machine`."""
    found = re.fullmatch(r"gpu:(?:(\d{1,20})x)?(\d{1,20})x(.+)", name)
    hosts, per_host, kind = found.groups() if found else (0, 0, "")
    n = int(hosts or 1) * int(per_host)
    known = [name for name, chip in CHIPS.items() if chip.gpu]
    if kind not in known or not n:
        raise UserError(
            f"--plan {name}: must be gpu:[HOSTSx]NUMBERxKIND with one of {', '.join(known)}, such as gpu:8xH200 "
            f"or gpu:2x8xH200."
        )
    return Machine(name, CHIPS[kind], n, hosts=int(hosts or 1), platform="gpu")


def parse_slices(name):
    """v4:2x4x4 or 2*v4:2x4x4 -> `Machine`."""
    kinds = [name for name, chip in CHIPS.items() if not chip.gpu]
    found = re.fullmatch(r"(?:(\d{1,20})\*)?(\w+):(\d{1,20}(?:x\d{1,20}){1,2})", name)
    if not found or found[2] not in kinds or not int(found[1] or 1):
        raise UserError(
            f"--plan {name}: must be [SLICES*]CHIP:TOPOLOGY with one of {', '.join(kinds)}, such as v4:2x4x4 or "
            f"2*v5e:16x16, or gpu:8xH200."
        )
    slices = int(found[1] or 1)
    chip, topology = CHIPS[found[2]], found[3]
    dims = [int(n) for n in topology.split("x")]
    if len(dims) != chip.dims or 0 in dims:
        example = "x".join("4" * chip.dims)
        raise UserError(
            f"--plan {name}: the topology of {chip.name} has {chip.dims} dims, such as {chip.name}:{example}."
        )
    n = math.prod(dims) * chip.cores * slices
    return Machine(name, chip, n, slices, f"{LIBTPU_NAMES.get(chip.name, chip.name)}:{topology}")


# --- The compiler -------------------------------------------------------------------------------------------------


def slice_devices(machine):
    """The devices of one or several TPU slices, which exist for the compiler alone. Raises UserError where there is no
    such slice."""
    dims = [int(n) for n in machine.topology.split(":")[1].split("x")]
    host = [min(2, n) for n in dims[:2]] + [1]  # chips of a host along each dim
    options = dict(chips_per_host_bounds=host, num_slices=machine.slices)
    if len(dims) == 3 and machine.chip.cores == 1:
        # a chip's two cores are one device, as on Cloud TPU
        options["chip_config_name"] = "megacore"
    try:
        return topologies.get_topology_desc(machine.topology, "tpu", **options).devices
    except jax.errors.JaxRuntimeError as e:
        reason = str(e).splitlines()[0]
        raise UserError(
            f"--plan {machine.name}: the TPU compiler knows no such slice ({reason})."
        ) from None


def devices_of(machine):
    """The devices of a machine, for its compiler. Raises UserError where there is no such slice."""
    if machine.platform == "gpu":
        return gpus.devices(machine.chip.name, machine.hosts, machine.n // machine.hosts)
    return slice_devices(machine)


def has_compiler(machine):
    """Whether the compiler for a machine is installed."""
    if machine.platform == "gpu":
        return gpus.has_compiler()
    return importlib.util.find_spec("libtpu") is not None


class Compiled(NamedTuple):
    """What the compiler says of a program on one device."""

    text: str  # its optimized HLO
    arguments: int  # bytes
    temporaries: int  # bytes, at the moment of peak memory


class TooLarge(Exception):
    """A step that needs more memory than a device has: `used` bytes of `limit`."""

    def __init__(self, used, limit):
        self.used, self.limit = used, limit


def compile_step(cfg, devices):
    """`Compiled` train step, as main.py builds it, for the devices of a topology. Raises TooLarge."""
    mesh = steps.make_mesh(cfg, devices)
    optimizer, schedule = make_optimizer(cfg, mesh)
    state = steps.abstract_state(cfg, mesh, optimizer)
    return compile_for_mesh(steps.lower_train_step(cfg, mesh, optimizer, schedule, state), mesh)


def compile_for_mesh(lowered, mesh):
    """`Compiled` program that was lowered for the devices of a mesh. Raises TooLarge."""
    try:
        program = compile_with(compiler_options(mesh), lowered)
    except jax.errors.JaxRuntimeError as e:
        refused = too_large(str(e))
        if refused is None:
            raise
        raise refused from None
    memory = program.memory_analysis()
    arguments = memory.argument_size_in_bytes
    # not temp_size_in_bytes, which counts more than is in memory at any time
    return Compiled(program.as_text(), arguments, memory.peak_memory_in_bytes - arguments)


def compile_with(options, lowered):
    """The compiled program, with options of the compiler. Where XLA finds no tiles for a product, without a GPU to try
    others on, all products become calls of cuBLAS."""
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as e:
        if "Couldn't find output tile sizes" not in str(e):
            raise
        return lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})


def compiler_options(mesh):
    """Options of the compiler for the devices of a mesh, those that a run's environment gives it among them."""
    platform = mesh.devices.flat[0].platform
    if platform not in COMPILERS:
        return {}
    options = dict(COMPILERS[platform].options)
    for flag in platforms.XLA_FLAGS[platform]:
        name, value = flag.removeprefix("--").split("=")
        options[name] = {"true": True, "false": False}.get(value, value)
    return options


def too_large(message):
    """The compiler's complaint that a program does not fit, such as "Used 40.1G of 30.75G hbm", as `TooLarge`; None for
    any other."""
    sizes = re.search(
        r"Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\)", message
    )
    if not sizes:
        return None
    used, limit = [word for word in sizes.groups() if word]
    return TooLarge(in_bytes(used), in_bytes(limit))


def in_bytes(word):
    """30.75G -> bytes."""
    return float(word[:-1]) * 1024 ** " KMGT".index(word[-1])


def ask_compiler(cfg, machine):
    """`Compiled` train step for a machine, or None where the compiler crashes. Raises TooLarge.

    It runs in a process of its own: where one of its checks fails, a compiler ends its process.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.NamedTemporaryFile("r") as log,
        futures.ProcessPoolExecutor(1, spawn, redirect_errors, (log.name,)) as pool,
    ):
        try:
            return pool.submit(compile_for, cfg, machine).result()
        except (futures.process.BrokenProcessPool, jax.errors.JaxRuntimeError) as e:
            check = re.search(r"Check failed: .*\S|INTERNAL: .{,100}", f"{log.read()}\n{e}")
            why = f" ({check[0]})" if check else ""
            say(
                f"{machine.compiler.name} crashes on this step, an error of its own{why}, and may crash on the machine "
                f"too; these are the formulas' numbers; another mesh or width may compile"
            )
            return None


def redirect_errors(path):
    os.dup2(os.open(path, os.O_WRONLY), 2)


def compile_for(cfg, machine):
    steps.configure_jax(cfg)
    return compile_step(cfg, devices_of(machine))
