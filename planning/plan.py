"""What a run would cost on a machine, before it is paid for: `main.py ... --plan v4:2x4x4`.

The machine's compiler, which needs none of its devices, compiles the real train step for it, and planning/hlo.py
reads the program. The formulas of planning/costs.py answer where there is no compiler, rank what --search tries,
and say which flag would help.
"""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import math
import multiprocessing
import os
import re
import resource
import tempfile
import types
import typing
from concurrent import futures
from typing import NamedTuple

import jax
from jax.experimental import topologies

import collectives
import model
import utils
from kernels import attention
from planning import costs, gpus, hlo, overlap
from training import platforms, settings, steps, weights
from training.chips import CHIPS, Chip, chip_of
from training.optimizer import make_optimizer
from utils import UserError, say, size

LIBTPU_NAMES = {"v7x": "tpu7x"}  # of chips that libtpu calls otherwise
COMPILED = 4  # configurations that --search compiles
LISTED = 16  # rows of its table
TRIED = 50_000  # configurations that it considers at most


class Compiler(NamedTuple):
    """What compiles for machines of one platform."""

    name: str
    modules: tuple[str, ...]  # one of which is installed with it
    install: str  # how it is had
    options: dict  # of a compilation

    @property
    def missing(self):
        return f"{self.name} is not installed ({self.install}), so these are the formulas' numbers alone"

    @property
    def version(self):
        """Its package and that one's version."""
        module = next(name for name in self.modules if importlib.util.find_spec(name))
        package = module.replace("_", "-")
        return f"{package} {importlib.metadata.version(package)}"


COMPILERS = {
    "tpu": Compiler("the TPU compiler", platforms.PLUGINS["tpu"], 'pip install "jax[tpu]"', {}),
    "gpu": Compiler(
        "the GPU compiler",
        platforms.PLUGINS["gpu"],
        "bash setup_tpu.sh plan-gpu",
        {"xla_gpu_autotune_level": 0},  # no GPU is there to time tiles on
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
    return parse_gpus(name) if name.startswith("gpu:") else parse_slices(name)


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
    check_devices(name, n)
    return Machine(name, CHIPS[kind], n, hosts=int(hosts or 1), platform="gpu")


def check_devices(name, n):
    """Raises UserError where a machine has more devices than any."""
    if n > utils.MANY:
        raise UserError(
            f"--plan {name}: has {n:,} devices; at most {utils.MANY:,} can be planned for."
        )


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
    check_devices(name, n)
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


def gpu_devices(machine):
    """The devices of a machine with GPUs, which exist for the compiler alone."""
    return gpus.devices(machine.chip.name, machine.hosts, machine.n // machine.hosts)


def devices_of(machine):
    """The devices of a machine, for its compiler. Raises UserError where there is no such slice."""
    return gpu_devices(machine) if machine.platform == "gpu" else slice_devices(machine)


def has_compiler(machine):
    """Whether the compiler for a machine is installed."""
    if machine.platform == "gpu":
        return gpus.has_compiler()
    return importlib.util.find_spec("libtpu") is not None


def place_of(cfg, machine):
    """`costs.Place` of a validated Config on a machine, several slices as steps.device_grid lays them."""
    return costs.Place(
        platform=machine.platform,
        kernels=kernels_of(machine),
        slices=machine.slices,
        across="dp" if cfg.run.n_device_axis[0] % machine.slices == 0 else "pp",
        fuses=machine.chip.fuses,
    )


def kernels_of(machine):
    """The platform whose attention kernels run on a machine, as attention.platform_of says of its devices."""
    chip = machine.chip
    device = types.SimpleNamespace(platform=machine.platform, device_kind=chip.kind)
    device.compute_capability = gpus.SPECS[chip.name].capability if chip.gpu else ""
    return attention.platform_of(device)


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
    # not temp_size_in_bytes, which counts more than stands in memory at any time
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
            compiler = machine.compiler
            why = f"{compiler.version}: {check[0]}" if check else compiler.version
            say(
                f"{compiler.name} crashes on this step, an error of its own ({why}), and may crash on the machine too; "
                f"these are the formulas' numbers; another mesh or width may compile"
            )
            return None


def redirect_errors(path):
    os.dup2(os.open(path, os.O_WRONLY), 2)


def compile_for(cfg, machine):
    steps.configure_jax(cfg)
    return compile_step(cfg, devices_of(machine))


# --- The answer ---------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A plan, on one device and for one step where it does not say otherwise; bytes and seconds."""

    machine: str
    devices: int
    mesh: dict  # {axis: size}
    flags: dict  # {flag: value} that the search may change
    compiled: bool  # by the machine's compiler; else all numbers come from formulas
    parameters: dict  # total, active, embedding
    tokens: int  # of a step on all devices
    memory: dict  # weights, optimizer, batch, activations, temporaries, total, limit
    flops: dict  # of matrix products: program, model
    collectives: list  # dicts of axes, kind, bytes, times, seconds and, where a compiler told, exposed seconds
    seconds: dict  # matrix products, memory, links of each group of axes, step; nothing overlaps
    overlapped: dict | None  # exposed seconds of the links, step, as the compiler scheduled it
    bubble: float  # share of the pipeline's ticks in which a stage idles
    tokens_per_second: float  # of all devices
    mfu: float
    hours: float  # of training_steps
    chip_hours: float
    bound: str

    @property
    def fits(self):
        return self.memory["total"] <= self.memory["limit"]


# flags of a few words that change how a step is computed, not what
WAYS = ("remat", "fsdp", "sequence_parallel")
SEARCHED = (
    "n_device_axis",
    "pp_interleave",
    "train_batch_size",
    "val_batch_size",
    "microbatches",
    "accumulation_steps",
    *WAYS,
)


class Work(NamedTuple):
    """What one device does in a step."""

    flops: float  # of matrix products
    seconds: dict  # {part: seconds}, links left out
    sent: dict  # {(axes, kind): [bytes, times, devices that take part]}
    timeline: overlap.Timeline | None  # of a program


def compiled_work(cfg, machine, compiled):
    """`Work` of a compiled step."""
    chip = machine.chip
    cost = costs.read_program(compiled.text, cfg, place_of(cfg, machine))

    def compute_seconds(event):
        # no compiler estimates kernels: they run at half the peak
        products = event.flops / chip.speed * (1 + event.is_kernel)
        if chip.gpu:
            return max(products, event.moved / chip.bandwidth)
        return products if event.is_kernel else event.cycles / chip.clock

    def link_seconds(event):
        return transfer_seconds(cfg, machine, event.axes, event.kind, event.bytes, event.devices)

    timeline = overlap.Timeline(cost.schedule, compute_seconds, link_seconds)
    seconds = {"matrix products": timeline.products, "memory": timeline.others}
    return Work(cost.flops, seconds, cost.collectives, timeline)


def transfer_seconds(cfg, machine, axes, kind, n_bytes, n):
    """Seconds in which each of n devices sends so many bytes in a collective along some axes."""
    hosts = costs.hosts_along(axes, cfg.run.n_device_axis, machine.hosts)
    return costs.link_seconds(machine.chip, kind, n_bytes, n, hosts)


def memory_of(estimate, limit, used=None):
    """{part: bytes} of peak memory. Where the compiler says how much is `used` in all, what the formulas do not know
    exactly, the temporaries, is the rest of it; none where they say too much of the activations."""
    memory = dict(
        weights=estimate.weights,
        optimizer=estimate.optimizer,
        batch=estimate.batch,
        activations=estimate.activations,
        temporaries=estimate.workspace,
    )
    if used is not None:
        work = used - estimate.weights - estimate.optimizer - estimate.batch
        memory["activations"] = min(estimate.activations, work)
        memory["temporaries"] = work - memory["activations"]
    return memory | dict(total=sum(memory.values()), limit=limit)


def links(cfg, machine, work):
    """Rows of the table of collectives, and {links: seconds} of them."""
    rows, seconds = [], {}
    for (axes, kind), (n_bytes, times, n) in sorted(work.sent.items()):
        row = dict(axes=list(axes), kind=kind, bytes=n_bytes, times=times)
        if work.timeline:
            exposed = work.timeline.exposed[axes, kind]
            row |= dict(seconds=exposed + work.timeline.hidden[axes, kind], exposed=exposed)
        else:
            row["seconds"] = transfer_seconds(cfg, machine, axes, kind, n_bytes, n)
        rows.append(row)
        name = links_of(row)
        seconds[name] = seconds.get(name, 0) + row["seconds"]
    return rows, seconds


def links_of(row):
    """What a row of the table of collectives travels over, in words."""
    where = "network of " if row["kind"] == hlo.ACROSS else "links of "
    return where + "+".join(row["axes"])


def overlapped(work, rows):
    """`Answer.overlapped` of the rows of the table of collectives; None where no compiler told."""
    if work.timeline is None:
        return None
    exposed = {}
    for row in rows:
        name = links_of(row)
        exposed[name] = exposed.get(name, 0) + row["exposed"]
    return exposed | dict(step=sum(work.seconds.values()) + sum(exposed.values()))


def bound_by(estimate, seconds):
    """The part of a step that takes longest, the pipeline's bubble among them. Every stage computes in every tick, on
    zeros in some, so a bubble's time is counted as matrix products and memory traffic."""
    idle = estimate.bubble * estimate.pipeline_share
    computing = ("matrix products", "memory")
    parts = dict(seconds)
    for part in computing:
        parts[part] *= 1 - idle
    parts["the pipeline's bubble"] = idle * sum(seconds[part] for part in computing)
    return max(parts, key=parts.get)


def answer(cfg, machine, compiled=None, refused=None):
    """`Answer` for a validated Config: from the compiler where it was asked, `refused` being its TooLarge, else from
    formulas."""
    chip = machine.chip
    estimate = costs.estimate(cfg, place_of(cfg, machine))
    work = Work(estimate.flops, costs.compute_seconds(estimate, chip), estimate.sent, None)
    memory = memory_of(estimate, chip.memory)
    if refused:
        memory = memory_of(estimate, refused.limit, refused.used)
    if compiled:
        work = compiled_work(cfg, machine, compiled)
        memory = memory_of(estimate, chip.memory, compiled.arguments + compiled.temporaries)
    rows, seconds_of_links = links(cfg, machine, work)
    seconds = work.seconds | seconds_of_links
    step = sum(seconds.values())
    tokens = math.prod(steps.batch_shape(cfg))
    total, active, embedding = model.count_params(cfg)
    of_model = model.flops_per_token(cfg) * tokens / machine.n
    hours = step * cfg.run.training_steps / 3600
    return Answer(
        machine=machine.name,
        devices=machine.n,
        mesh=dict(zip(collectives.AXES, cfg.run.n_device_axis)),
        flags={flag: utils.flatten(cfg)[flag] for flag in SEARCHED},
        compiled=compiled is not None,
        parameters=dict(total=total, active=active, embedding=embedding),
        tokens=tokens,
        memory=memory,
        flops=dict(program=work.flops, model=of_model),
        collectives=rows,
        seconds=seconds | dict(step=step),
        overlapped=overlapped(work, rows),
        bubble=estimate.bubble,
        tokens_per_second=tokens / step,
        mfu=of_model / step / chip.peak,
        hours=hours,
        chip_hours=hours * machine.n,
        bound=bound_by(estimate, seconds),
    )


def report(cfg, machine, a):
    """The plan in words, as a list of lines."""
    memory, seconds, counts = a.memory, a.seconds, a.parameters
    mesh = ", ".join(map(str, a.mesh.values()))
    parts = [f"{part} {t:.3f}" for part, t in seconds.items() if part != "step" and t >= 5e-4]
    return [
        f"{cfg.run.preset} on {machine.name}: {a.devices} x {machine.chip.kind}, mesh (dp, pp, tp) = ({mesh}), "
        f"{a.tokens:,} tokens a step",
        f"parameters   {counts['total']:,} total, {counts['active']:,} active per token, both without the "
        f"{counts['embedding']:,} of the embedding",
        f"memory       {in_parts(memory)}",
        f"             {size(memory['total'], 1024)} of a chip's {size(memory['limit'], 1024)}",
        f"operations   {a.flops['program'] / 1e12:.2f} TFLOP of matrix products per chip, "
        f"{a.flops['program'] / a.flops['model']:.2f} x the model's own",
        *collectives_table(a),
        f"step         {seconds['step']:.3f} s: {', '.join(parts)}",
        *overlap_line(a),
        f"             {a.tokens_per_second:,.0f} tokens/s, MFU {a.mfu:.1%}, pipeline bubble {a.bubble:.1%} of ticks",
        f"run          {cfg.run.training_steps:,} steps: {a.hours:,.1f} hours, {a.chip_hours:,.0f} chip-hours",
        f"bound by     {a.bound}",
    ]


def overlap_line(a):
    """A line: what the device waits for where computation runs while bytes travel."""
    if not a.overlapped:
        return []
    waits = []
    for name, exposed in a.overlapped.items():
        if name != "step" and a.seconds[name] >= 5e-4:
            waits.append(f"{name} {exposed:.3f} of {a.seconds[name]:.3f}")
    return [
        f"overlapped   {a.overlapped['step']:.3f} s, of which exposed: {', '.join(waits) or 'nothing'}"
    ]


def collectives_table(a):
    """Lines: the collectives of an `Answer` that take a thousandth of the step or more, the slowest first."""
    if not a.collectives:
        return []
    lines = [
        f"{'collectives':<13}{'axes':<10} {'kind':<18} {'sent per chip':>13} {'times':>8} {'seconds':>8}"
    ]
    for row in sorted(a.collectives, key=lambda row: -row["seconds"]):
        if row["seconds"] > 1e-3 * a.seconds["step"]:
            lines.append(
                f"{'':<13}{'+'.join(row['axes']):<10} {row['kind']:<18} {row['bytes'] / 1e6:>10,.1f} MB "
                f"{row['times']:>8,.0f} {row['seconds']:>8.4f}"
            )
    return lines


# --- Other configurations -----------------------------------------------------------------------------------------


def choices(flag):
    """The values that a flag of a few words may have."""
    return typing.get_args(typing.get_type_hints(utils.Model)[flag])


def divisors(n):
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def fitted(cfg, n, **flags):
    """`cfg` with other flags and the same global batch, validated for n devices; None where they do not go together."""
    total = cfg.data.train_batch_size * cfg.run.n_device_axis[0] * cfg.run.accumulation_steps
    new = utils.replace(cfg, **flags)
    parts = new.run.n_device_axis[0] * new.run.accumulation_steps
    if total % parts:
        return None
    # the validation batch is no part of the step: any that fits will do
    for val_batch_size in (cfg.data.val_batch_size, new.data.microbatches):
        batches = dict(train_batch_size=total // parts, val_batch_size=val_batch_size)
        with contextlib.suppress(UserError):
            return settings.validate(utils.replace(new, **batches), n)
    return None


def meshes(cfg, n):
    """The shapes (dp, pp, tp) of n devices that the model can be spread over."""
    for pp in divisors(math.gcd(cfg.model.blocks, n)):
        for tp in divisors(n // pp):
            yield n // pp // tp, pp, tp


def variants(cfg, n):
    """Every configuration that --search considers: meshes, rounds, microbatches, ways, for the same global batch.
    Raises UserError where they are too many."""
    total, found = cfg.data.train_batch_size * cfg.run.n_device_axis[0], []
    for mesh in meshes(cfg, n):
        dp, pp, tp = mesh
        values = {flag: choices(flag) for flag in WAYS}
        if tp == 1:  # no sequences to be split
            values["sequence_parallel"] = [cfg.model.sequence_parallel]
        microbatches = divisors(max(1, total // dp))
        rounds = divisors(cfg.model.blocks // pp) if pp > 1 else [1]
        for m, r, *ways in itertools.product(microbatches, rounds, *values.values()):
            flags = dict(zip(WAYS, ways), n_device_axis=mesh, microbatches=m, pp_interleave=r)
            found.append(flags)
            if len(found) > TRIED:
                raise UserError(
                    f"--search: there are more than {TRIED:,} configurations of these flags; give a train_batch_size, "
                    f"blocks or a machine with fewer divisors."
                )
    return [new for flags in found if (new := fitted(cfg, n, **flags))]


def changed(old, new):
    """The flags that make `new` of `old`, as on a command line."""
    before, now = utils.flatten(old), utils.flatten(new)
    words = []
    for flag in SEARCHED:
        if now[flag] != before[flag]:
            values = now[flag] if isinstance(now[flag], tuple) else [now[flag]]
            words.append(f"--{flag} {' '.join(map(str, values))}")
    return " ".join(words)


def single_changes(cfg, n):
    """{flag: value} of the changes that `advise` tries: one flag each, or another mesh."""
    batch, pp = cfg.data.train_batch_size, cfg.run.n_device_axis[1]
    for flag in WAYS:
        for value in choices(flag):
            yield {flag: value}
    for rounds in divisors(cfg.model.blocks // pp):
        yield dict(pp_interleave=rounds)
    for microbatches in divisors(batch):
        yield dict(microbatches=microbatches)
    for accumulation in divisors(batch * cfg.run.accumulation_steps):
        yield dict(accumulation_steps=accumulation)
    for mesh in meshes(cfg, n):
        yield dict(n_device_axis=mesh, pp_interleave=0)


def best_change(cfg, machine, spare, least):
    """(Config, seconds that it saves) of the single change that saves most by the formulas, more than `least` seconds,
    and takes at most `spare` bytes more; (None, `least`) where there is none."""
    now = answer(cfg, machine)
    best, gain = None, least
    for flags in single_changes(cfg, machine.n):
        new = fitted(cfg, machine.n, **flags)
        if new is None or new == cfg:
            continue
        other = answer(new, machine)
        saved = now.seconds["step"] - other.seconds["step"]
        more = other.memory["total"] - now.memory["total"]
        if more <= spare and saved > gain:
            best, gain = new, saved
    return best, gain


def advise(cfg, machine, a):
    """One sentence: the flag that would help most by the formulas, or what would make the step fit. Where a compiler
    made the plan, it compiles the step with that flag too, and its word counts."""
    spare = a.memory["limit"] - a.memory["total"]
    if not a.fits:
        limit = size(a.memory["limit"], 1024)
        lacks = f"does not fit: it needs {size(-spare, 1024)} more than a chip's {limit}"
        return f"{lacks}; {what_would_fit(cfg, machine, a.memory)}"
    step = answer(cfg, machine).seconds["step"]
    best, gain = best_change(cfg, machine, spare, 0.02 * step)
    if best is None:
        return "no single flag helps by more than 2%, by the formulas"
    flags = changed(cfg, best)
    saved, source = gain / step, "by the formulas"
    if a.compiled:
        say(f"compiling the step with {flags}, which would help most by the formulas")
        other, _ = compiled_answer(best, machine)
        if not other.fits:
            return f"no single flag helps by more than 2%; with {flags} the step does not fit"
        if other.compiled:
            saved, source = 1 - other.seconds["step"] / a.seconds["step"], "as compiled"
    if saved < 0.02:
        effect = f"saves {saved:.0%}" if saved > 0 else f"takes {-saved:.0%} longer"
        return f"no single flag helps by more than 2%; {flags}, the best by the formulas, {effect} as compiled"
    return f"{flags} would help most: by {saved:.0%} of the step, {source}"


# --- What does not fit --------------------------------------------------------------------------------------------

MARGIN = 0.1  # share of a device's memory to leave free: so far off the formulas may be
CHANGES = 3  # in a row, at most
KEPT = 8  # configurations, those of the least memory, to change further


def smaller(cfg, machine, memory):
    """(Config, bytes that it needs) of the same global batch with the fewest changes that fits by the formulas with
    some room left, the fastest of these; None where there is none. memory: of `cfg`, as `Answer` has it."""
    limit = memory["limit"]
    # where the formulas say too little of `cfg`, they say too little of others, by the same factor
    lacks = max(0, limit - memory["total"])
    off = max(1, (working(memory) + lacks) / working(answer(cfg, machine).memory))
    seen, kept = {cfg}, [cfg]
    for _ in range(CHANGES):
        tried = []
        for old in kept:
            for flags in single_changes(old, machine.n):
                new = fitted(old, machine.n, **flags)
                if new is None or new in seen:
                    continue
                seen.add(new)
                other = answer(new, machine)
                needs = other.memory["total"] + (off - 1) * working(other.memory)
                tried.append((new, needs, other.seconds["step"]))
        fits = [one for one in tried if one[1] <= (1 - MARGIN) * limit]
        if fits:
            return min(fits, key=lambda one: one[2])[:2]
        kept = [new for new, _, _ in sorted(tried, key=lambda one: one[1])[:KEPT]]
    return None


def working(memory):
    """Bytes of what a step works with beside what it is given: of this the formulas are not exact."""
    return memory["activations"] + memory["temporaries"]


def what_would_fit(cfg, machine, memory):
    """Words: the flags that make a step fit which takes so much `memory`, or that there are none."""
    found = smaller(cfg, machine, memory)
    if not found:
        return "no flags would make it fit, by the formulas; take more devices or a smaller model"
    new, used = found
    return f"{changed(cfg, new)} would make it fit, by the formulas: {size(used, 1024)}"


def in_parts(memory):
    """Words: what a device holds, of {part: bytes}."""
    parts = [(part, n) for part, n in memory.items() if part not in ("total", "limit")]
    return ", ".join(f"{part} {size(n, 1024)}" for part, n in parts)


def machine_of(devices):
    """The `Machine` of devices that jax has found. Speeds of a kind that is not known are those of another, which will
    do to compare configurations."""
    kind, platform = devices[0].device_kind, devices[0].platform
    chip = chip_of(kind) or CHIPS["A100" if platform == "gpu" else "v4"]
    chip = chip._replace(memory=memory_limit() or chip.memory)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    hosts = len({device.process_index for device in devices})
    return Machine(kind, chip, len(devices), slices, hosts=hosts, platform=platform)


def memory_limit():
    """Bytes of its memory that a program may use on a device of this process, which tells nothing of the others'; None
    where it does not tell. Simulated devices share what the process may have."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    page = os.sysconf("SC_PAGE_SIZE")
    most = page * os.sysconf("SC_PHYS_PAGES")
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as f:
            taken = page * int(f.read().split()[0])  # by the program itself, mostly
        most = min(most, allowed - taken)
    return most / jax.local_device_count()


def explain(cfg, machine, message):
    """One sentence for an error of jax's that says that memory does not suffice: what a device holds in a step, and
    which flags would make it fit."""
    a = answer(cfg, machine, refused=too_large(message))
    used, limit = (size(a.memory[key], 1024) for key in ("total", "limit"))
    needs = f"a device has {limit} and a step needs {used} of it ({in_parts(a.memory)})"
    return f"out of memory: {needs}; {what_would_fit(cfg, machine, a.memory)}."


# --- The search ---------------------------------------------------------------------------------------------------


def search(cfg, machine, compiler):
    """[(Config, Answer)] of the best configuration of every mesh, the fastest first: formulas rank all of them, and the
    compiler, if it is there, checks the best."""
    best, tried = {}, 0
    for new in variants(cfg, machine.n):
        tried += 1
        a, mesh = answer(new, machine), new.run.n_device_axis
        if mesh not in best or rank(a) < rank(best[mesh][1]):
            best[mesh] = new, a
    found = sorted(best.values(), key=lambda pair: rank(pair[1]))
    if not found:
        raise UserError(
            f"--search: no mesh of {machine.n} devices fits these flags; a train_batch_size x dp x "
            f"accumulation_steps with more divisors may help."
        )
    say(f"{tried:,} configurations on {len(found)} meshes ranked by formulas")
    if not compiler:
        return found
    for i, (new, a) in enumerate(found[:COMPILED]):
        if a.fits:
            say(f"compiling the best on {new.run.n_device_axis}")
            found[i] = new, compiled_answer(new, machine)[0]
    return sorted(found, key=lambda pair: (not pair[1].fits, not pair[1].compiled, *rank(pair[1])))


def rank(a):
    """What --search sorts by: what fits by its time, what does not by its memory."""
    return not a.fits, a.seconds["step"] if a.fits else a.memory["total"]


def table(found):
    """The answers of `search` as lines."""
    row = "{:>4} {:>3} {:>3} {:>6} {:>6} {:>6} {:>6} {:>9} {:>8} {:>6} {:>6}  {:<9} {}"
    headings = "dp pp tp rounds micro remat fsdp sequences step MFU GiB by".split()
    lines = [row.format(*headings, "why not")]
    first = found[0][1]
    for _, a in found[:LISTED]:
        cells = [
            *a.mesh.values(),
            *(a.flags[flag] for flag in ("pp_interleave", "microbatches", *WAYS)),
            f"{a.seconds['step']:.3f}",
            f"{a.mfu:.1%}",
            f"{a.memory['total'] / 2**30:.1f}",
            "compiler" if a.compiled else "formulas",
            why_not(a, first),
        ]
        lines.append(row.format(*cells))
    return lines


def why_not(a, first):
    """What makes an `Answer` worse than the first one: that it does not fit, or the part that takes longer."""
    if not a.fits:
        lacks = a.memory["total"] - a.memory["limit"]
        return f"does not fit: {size(lacks, 1024)} more than there is"
    if a is first:
        return ""
    parts = (a.seconds | first.seconds).keys() - {"step"}
    more = {part: a.seconds.get(part, 0) - first.seconds.get(part, 0) for part in parts}
    most = max(more, key=more.get)
    return f"{most} +{more[most]:.3f} s" if more[most] > 0 else ""


# --- The program --------------------------------------------------------------------------------------------------


def compiled_answer(cfg, machine):
    """(Answer, text of the program or None) from the compiler; also where it refuses since memory does not suffice."""
    try:
        compiled = ask_compiler(cfg, machine)
    except TooLarge as e:
        return answer(cfg, machine, refused=e), None
    return answer(cfg, machine, compiled), compiled and compiled.text


def settle(cfg, given, machine):
    """The configuration that is planned for. Raises UserError."""
    asked = cfg.plan
    if cfg.run.n_devices not in (0, machine.n):
        raise UserError(
            f"--n_devices {cfg.run.n_devices}: --plan {machine.name} has {machine.n}; leave the flag out."
        )
    if asked.plan_json:
        utils.check_place(asked.plan_json, "--plan_json")
    if asked.plan_dump:
        utils.check_place(os.path.join(asked.plan_dump, "step.hlo"), "--plan_dump")
    flags = weights.open_weights(cfg.run.init_from)[0] if cfg.run.init_from else None
    # no cache: what was compiled for devices that are not there cannot be read back
    cfg = utils.replace(cfg, n_devices=0, compilation_cache="")
    cfg = settings.choose_dtype(cfg, given, machine.chip)
    cfg = settings.settle(cfg, given, machine.n, flags)
    if cfg.model.document_mask:
        cfg = utils.replace(cfg, end_of_text=0)  # any token will do
    return cfg


def find_compiler(asked, machine):
    """Whether to ask the machine's compiler. Raises UserError where there is no such slice, or --plan_dump needs it."""
    if asked.by_formulas and asked.plan_dump:
        raise UserError(
            f"--plan_dump {asked.plan_dump}: formulas make no program; leave --by_formulas out."
        )
    if asked.by_formulas:
        return False
    if has_compiler(machine):
        devices_of(machine)
        return True
    if asked.plan_dump:
        raise UserError(f"--plan_dump {asked.plan_dump}: {machine.compiler.missing}.")
    return False


def write_program(cfg, machine, a, text):
    """Write the program of a plan, whose `text` may not have been kept, to --plan_dump. Raises UserError."""
    folder = cfg.plan.plan_dump
    if text is None and a.compiled and a.fits:
        text = ask_compiler(cfg, machine).text
    if text:
        utils.write_file(os.path.join(folder, "step.hlo"), text)
    elif a.fits:
        raise UserError(
            f"--plan_dump {folder}: {machine.compiler.name} failed, so there is no program to write."
        )


def main(cfg, given):
    """Print the plan of the run that the flags describe, and write what --plan_json and --plan_dump ask for."""
    asked, machine = cfg.plan, parse_machine(cfg.plan.plan)
    cfg = settle(cfg, given, machine)
    steps.configure_jax(cfg)
    compiler = find_compiler(asked, machine)
    found, text = [], None
    if asked.search:
        found = search(cfg, machine, compiler)
        best, a = found[0]
    elif compiler:
        say(f"compiling the step for {machine.name}")
        best, (a, text) = cfg, compiled_answer(cfg, machine)
    else:
        best, a = cfg, answer(cfg, machine)

    if not compiler and not asked.by_formulas:
        print(machine.compiler.missing)
    if found:
        print("\n".join(table(found)))
        print(f"the fastest: {changed(cfg, best) or 'the flags as given'}")
    print("\n".join(report(best, machine, a)), flush=True)
    advice = advise(best, machine, a)
    print(f"next         {advice}", flush=True)
    if asked.plan_json:
        content = a._asdict() | dict(fits=a.fits, advice=advice)
        if found:
            content["search"] = [other._asdict() | dict(fits=other.fits) for _, other in found]
        utils.write_file(asked.plan_json, utils.to_json(content, indent=1) + "\n")
    if asked.plan_dump:
        write_program(best, machine, a, text)
    return 0
