"""What a run would cost on a machine, before it is paid for: `main.py ... --plan v4:2x4x4`.

The real train step is compiled for the slice by the TPU compiler, which needs no TPU (pip install "jax[tpu]"); its
program is read by tools/planning/hlo.py. The formulas of tools/planning/costs.py answer where there is no compiler, rank what --search
tries, and say which flag would help.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import math
import multiprocessing
import os
import re
import tempfile
import typing
from concurrent import futures
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import collectives
import model
import utils
from tools.planning import costs, hlo
from training import settings, steps, weights
from training.optimizer import make_optimizer
from utils import UserError, say, size

COMPILED = 4  # configurations that --search compiles
LISTED = 16  # rows of its table
NO_COMPILER = 'the TPU compiler is not installed (pip install "jax[tpu]"), so these are the formulas\' numbers alone'


class Machine(NamedTuple):
    """What --plan names."""

    name: str
    chip: costs.Chip
    n: int  # devices
    slices: int = 1
    topology: str = ""  # as the TPU compiler calls a slice; empty: it cannot be asked


def parse_machine(name):
    """--plan's value -> `Machine`. Raises UserError where it is none."""
    tpus = [c for c in costs.CHIPS if costs.CHIPS[c].clock]
    gpus = [c for c in costs.CHIPS if c not in tpus]
    if gpu := re.fullmatch(r"gpu:(\d+)x(\w+)", name):
        if gpu[2] not in gpus or int(gpu[1]) < 1:
            raise UserError(
                f"--plan {name}: must be gpu:NUMBERxKIND with one of {', '.join(gpus)}, such as "
                f"gpu:8xH200."
            )
        return Machine(name, costs.CHIPS[gpu[2]], int(gpu[1]))
    tpu = re.fullmatch(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+){1,2})", name)
    if not tpu or tpu[2] not in tpus or tpu[1] == "0":
        raise UserError(
            f"--plan {name}: must be [SLICES*]CHIP:TOPOLOGY with one of {', '.join(tpus)}, such as "
            f"v4:2x4x4 or 2*v5e:16x16, or gpu:8xH200."
        )
    dims, slices = [int(n) for n in tpu[3].split("x")], int(tpu[1] or 1)
    wanted = 3 if tpu[2] in ("v4", "v5p") else 2
    if len(dims) != wanted or 0 in dims:
        raise UserError(
            f"--plan {name}: the topology of {tpu[2]} has {wanted} dims, such as "
            f"{tpu[2]}:{'x'.join('444'[:wanted])}."
        )
    return Machine(
        name, costs.CHIPS[tpu[2]], math.prod(dims) * slices, slices, f"{tpu[2]}:{tpu[3]}"
    )


# --- The compiler -------------------------------------------------------------------------------------------------


def slice_devices(machine):
    """The devices of a TPU slice (or of several), which exist for the compiler alone. Raises UserError where there is
    no such slice."""
    dims = [int(n) for n in machine.topology.split(":")[1].split("x")]
    host = [min(2, n) for n in dims[:2]] + [1]  # chips of a host along each side
    options = dict(chips_per_host_bounds=host, num_slices=machine.slices)
    if len(dims) == 3:
        options["chip_config_name"] = (
            "megacore"  # a chip's two cores are one device, as on Cloud TPU
        )
    try:
        return topologies.get_topology_desc(machine.topology, "tpu", **options).devices
    except jax.errors.JaxRuntimeError as e:
        reason = str(e).splitlines()[0]
        raise UserError(
            f"--plan {machine.name}: the TPU compiler knows no such slice ({reason})."
        ) from None


@functools.cache
def square_steps(machine, shape):
    """`squares` of costs.Place for a mesh of such a shape; none where no compiler tells where chips lie."""
    fours = [
        (axis, distance)
        for i, axis in enumerate(collectives.AXES)
        for n, distance in costs.scatter_steps(shape[i], machine.n)
        if n == 4
    ]
    torus = machine.topology.count("x") == 2 and machine.slices == 1
    if not fours or not torus or not importlib.util.find_spec("libtpu"):
        return ()
    grid = steps.device_grid(shape, slice_devices(machine))
    at = np.array([d.coords for d in grid.flat]).reshape(*shape, 3)

    def is_square(axis, distance):
        i = collectives.AXES.index(axis)
        four = np.moveaxis(at, i, 0).reshape(-1, 4, distance, grid.size // shape[i], 3)
        return (four != four[:, :1]).any((0, 1, 2, 3)).sum() == 2

    return tuple(step for step in fours if is_square(*step))


def place_of(cfg, machine):
    """`costs.Place` of a validated Config on a machine, several slices as steps.device_grid lays them."""
    across = "dp" if cfg.run.n_device_axis[0] % machine.slices == 0 else "pp"
    squares, chip = square_steps(machine, cfg.run.n_device_axis), machine.chip
    return costs.Place(
        "tpu" if machine.topology else "gpu",
        machine.slices,
        across,
        squares,
        chip.buffer,
        chip.fuses,
    )


class Compiled(NamedTuple):
    """What the compiler says of a step on one device."""

    text: str  # its optimised HLO
    arguments: int  # bytes
    temporaries: int  # bytes, of those that are held at the same time where they are most


class TooLarge(Exception):
    """A step that needs more memory than a device has; both in bytes."""

    def __init__(self, used, limit):
        self.used, self.limit = used, limit


def compile_step(cfg, devices):
    """`Compiled` train step, as main.py builds it, for the devices of a topology. Raises TooLarge."""
    mesh = Mesh(
        steps.device_grid(cfg.run.n_device_axis, devices),
        collectives.AXES,
        axis_types=(AxisType.Auto,) * 3,
    )
    optimizer, schedule = make_optimizer(cfg)
    state = steps.abstract_state(cfg, mesh, optimizer)
    lowered = steps.lower_train_step(cfg, mesh, optimizer, schedule, state)
    try:
        step = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        sizes = re.search(
            r"Used (\S+) of (\S+) hbm|temporaries \((\S+)\) exceeds available HBM \((\S+)\)", str(e)
        )
        if not sizes:
            raise
        words = [word for word in sizes.groups() if word]
        raise TooLarge(
            *(float(word[:-1]) * 1024 ** " KMGT".index(word[-1]) for word in words)
        ) from None
    memory = step.memory_analysis()
    arguments = (
        memory.argument_size_in_bytes
    )  # temp_size_in_bytes counts more than stands in memory at any time
    return Compiled(step.as_text(), arguments, memory.peak_memory_in_bytes - arguments)


def ask_compiler(cfg, machine):
    """`Compiled` train step for a slice, or None where the compiler fails. Raises TooLarge.

    In a process of its own, which some programs end: the TPU compiler aborts where a check of its own fails.
    """
    with (
        tempfile.NamedTemporaryFile("r") as log,
        futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), redirect_errors, (log.name,)
        ) as apart,
    ):
        try:
            return apart.submit(compile_for, cfg, machine).result()
        except futures.process.BrokenProcessPool:
            check = re.search(r"Check failed: .*\S", log.read())
            why = f"libtpu {importlib.metadata.version('libtpu')}" + (
                f": {check[0]}" if check else ""
            )
            say(
                f"the TPU compiler aborts on this step, a fault of its own ({why}), and may on the machine too; the "
                f"formulas answer, and another mesh or width may pass"
            )
            return None


def redirect_errors(path):
    os.dup2(os.open(path, os.O_WRONLY), 2)


def compile_for(cfg, machine):
    steps.configure_jax(cfg)
    return compile_step(cfg, slice_devices(machine))


# --- The answer ---------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A plan, on one device and for one step where it does not say otherwise; bytes and seconds."""

    machine: str
    devices: int
    mesh: dict  # {axis: size}
    flags: dict  # {flag: value} that the search may change
    compiled: bool  # by the TPU compiler; else all numbers come from formulas
    parameters: dict  # total, active, embedding
    tokens: int  # of a step on all devices
    memory: dict  # weights, optimizer, batch, activations, temporaries, total, limit
    flops: dict  # of matrix products: program, model
    collectives: list  # dicts of axes, kind, bytes, times, seconds
    seconds: dict  # matrix products, memory, links of each group of axes, step
    bubble: float  # share of the pipeline's ticks in which a stage idles
    tokens_per_second: float  # of all devices
    mfu: float
    hours: float  # of training_steps
    chip_hours: float
    bound: str

    @property
    def fits(self):
        return self.memory["total"] <= self.memory["limit"]


WAYS = (
    "remat",
    "fsdp",
    "sequence_parallel",
)  # flags of a few words that change how a step is computed, not what
SEARCHED = (
    "n_device_axis",
    "pp_interleave",
    "train_batch_size",
    "microbatches",
    "accumulation_steps",
    *WAYS,
)


def answer(cfg, machine, compiled=None, too_large=None):
    """`Answer` for a validated Config, from the compiler where it was asked, else from formulas."""
    chip, mesh = machine.chip, dict(zip(collectives.AXES, cfg.run.n_device_axis))
    place = place_of(cfg, machine)
    e = costs.estimate(cfg, place)
    memory = dict(
        weights=e.weights,
        optimizer=e.optimizer,
        batch=e.batch,
        activations=e.activations,
        temporaries=e.workspace,
    )
    seconds, flops, sent_along = costs.compute_seconds(e, chip), e.flops, e.sent
    if too_large:
        memory["temporaries"] = too_large.used - sum(memory.values()) + e.workspace
    if compiled:
        c = hlo.analyze(compiled.text, mesh, place.slices, place.across)
        memory["temporaries"] = (
            compiled.arguments + compiled.temporaries - sum(memory.values()) + e.workspace
        )
        flops, sent_along = c.flops + (e.scores if c.kernels else 0), c.collectives
        kernels = (
            e.scores * 2 / chip.peak if c.kernels else 0
        )  # the compiler does not estimate them: at half the peak
        seconds = {
            "matrix products": c.matmul_cycles / chip.clock + kernels,
            "memory": c.other_cycles / chip.clock,
        }
    memory |= dict(total=sum(memory.values()), limit=too_large.limit if too_large else chip.memory)
    rows = [
        dict(
            axes=list(axes),
            kind=kind,
            bytes=n_bytes,
            times=times,
            seconds=costs.link_seconds(chip, kind, n_bytes, n),
        )
        for (axes, kind), (n_bytes, times, n) in sorted(sent_along.items())
    ]
    for row in rows:
        name = ("network of " if row["kind"] == hlo.ACROSS else "links of ") + "+".join(row["axes"])
        seconds[name] = seconds.get(name, 0) + row["seconds"]
    step = sum(seconds.values())
    tokens = math.prod(steps.batch_shape(cfg))
    total, active, embedding = model.count_params(cfg)
    of_model = model.flops_per_token(cfg) * tokens / machine.n
    # what a bubble costs stands among the compute: every stage computes in every tick, on zeros in some
    idle = e.bubble * e.pipeline_share
    parts = {
        name: t * (1 - idle if name in ("matrix products", "memory") else 1)
        for name, t in seconds.items()
    }
    parts["the pipeline's bubble"] = idle * (seconds["matrix products"] + seconds["memory"])
    hours = step * cfg.run.training_steps / 3600
    return Answer(
        machine.name,
        machine.n,
        mesh,
        {flag: utils.flatten(cfg)[flag] for flag in SEARCHED},
        compiled is not None,
        dict(total=total, active=active, embedding=embedding),
        tokens,
        memory,
        dict(program=flops, model=of_model),
        rows,
        seconds | dict(step=step),
        e.bubble,
        tokens / step,
        of_model / step / chip.peak,
        hours,
        hours * machine.n,
        max(parts, key=parts.get),
    )


def report(cfg, machine, a):
    """The plan in words, as a list of lines."""
    m, s, p = a.memory, a.seconds, a.parameters
    mesh = ", ".join(map(str, a.mesh.values()))
    lines = [
        f"{cfg.run.preset} on {machine.name}: {a.devices} x {machine.chip.kind}, mesh (dp, pp, tp) = ({mesh}), "
        f"{a.tokens:,} tokens a step",
        f"parameters   {p['total']:,} total, {p['active']:,} active per token, both without the {p['embedding']:,} of "
        f"the embedding",
        "memory       "
        + ", ".join(
            f"{part} {size(m[part], 1024)}" for part in m if part not in ("total", "limit")
        ),
        f"             {size(m['total'], 1024)} of a chip's {size(m['limit'], 1024)}",
        f"operations   {a.flops['program'] / 1e12:.2f} TFLOP of matrix products per chip, "
        f"{a.flops['program'] / a.flops['model']:.2f} x the model's own",
    ]
    if a.collectives:
        lines.append(
            f"{'collectives':<13}{'axes':<10} {'kind':<18} {'sent per chip':>13} {'times':>8} {'seconds':>8}"
        )
        for row in sorted(a.collectives, key=lambda row: -row["seconds"]):
            if row["seconds"] > 1e-3 * s["step"]:
                lines.append(
                    f"{'':<13}{'+'.join(row['axes']):<10} {row['kind']:<18} {row['bytes'] / 1e6:>10,.1f} MB "
                    f"{row['times']:>8,.0f} {row['seconds']:>8.4f}"
                )
    parts = ", ".join(f"{part} {t:.3f}" for part, t in s.items() if part != "step" and t >= 5e-4)
    lines += [
        f"step         {s['step']:.3f} s: {parts}",
        f"             {a.tokens_per_second:,.0f} tokens/s, MFU {a.mfu:.1%}, pipeline bubble {a.bubble:.1%} of ticks",
        f"run          {cfg.run.training_steps:,} steps: {a.hours:,.1f} hours, {a.chip_hours:,.0f} chip-hours",
        f"bound by     {a.bound}",
    ]
    return lines


# --- Other configurations -----------------------------------------------------------------------------------------


def choices(flag):
    """The values that a flag of a few words may have."""
    return typing.get_args(typing.get_type_hints(utils.Model)[flag])


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def fitted(cfg, n, **flags):
    """`cfg` with other flags and the same global batch, validated for n devices; None where they do not go together."""
    total = cfg.data.train_batch_size * cfg.run.n_device_axis[0] * cfg.run.accumulation_steps
    new = utils.replace(cfg, **flags)
    parts = new.run.n_device_axis[0] * new.run.accumulation_steps
    if total % parts:
        return None
    try:  # the validation batch is no part of the step
        return settings.validate(
            utils.replace(
                new, train_batch_size=total // parts, val_batch_size=new.data.microbatches
            ),
            n,
        )
    except UserError:
        return None


def meshes(cfg, n):
    """The shapes (dp, pp, tp) of n devices that the model can be spread over."""
    for pp in divisors(math.gcd(cfg.model.blocks, n)):
        for tp in divisors(n // pp):
            yield n // pp // tp, pp, tp


def variants(cfg, n):
    """Every configuration that --search considers: meshes, rounds, microbatches, ways, for the same global batch."""
    total = cfg.data.train_batch_size * cfg.run.n_device_axis[0]
    for mesh in meshes(cfg, n):
        ways = [choices(flag) for flag in WAYS]
        if mesh[2] == 1:  # no tp: no sequences to be split
            ways[WAYS.index("sequence_parallel")] = [cfg.model.sequence_parallel]
        rounds = divisors(cfg.model.blocks // mesh[1]) if mesh[1] > 1 else [1]
        for micro, turns, *values in itertools.product(
            divisors(max(1, total // mesh[0])), rounds, *ways
        ):
            flags = dict(
                zip(WAYS, values), n_device_axis=mesh, microbatches=micro, pp_interleave=turns
            )
            if new := fitted(cfg, n, **flags):
                yield new


def changed(old, new):
    """The flags that make `new` of `old`, as on a command line."""
    before, now = utils.flatten(old), utils.flatten(new)
    return " ".join(
        f"--{flag} {' '.join(map(str, v)) if isinstance(v := now[flag], tuple) else v}"
        for flag in SEARCHED
        if now[flag] != before[flag]
    )


def advise(cfg, machine, a):
    """One sentence: the flag that would help most by the formulas, or what would make the step fit."""
    d, r = cfg.data, cfg.run
    steps = [{flag: value} for flag in WAYS for value in choices(flag)]
    steps += [dict(pp_interleave=v) for v in divisors(cfg.model.blocks // r.n_device_axis[1])]
    steps += [dict(microbatches=v) for v in divisors(d.train_batch_size)]
    steps += [
        dict(accumulation_steps=v) for v in divisors(d.train_batch_size * r.accumulation_steps)
    ]
    steps += [dict(n_device_axis=mesh, pp_interleave=0) for mesh in meshes(cfg, machine.n)]
    now, spare = answer(cfg, machine), a.memory["limit"] - a.memory["total"]
    best, gain = None, (0.02 * now.seconds["step"] if a.fits else -math.inf)
    for flags in steps:
        new = fitted(cfg, machine.n, **flags)
        if new is None or new == cfg:
            continue
        other = answer(new, machine)
        saved = now.seconds["step"] - other.seconds["step"]
        if other.memory["total"] - now.memory["total"] <= spare and saved > gain:
            best, gain = new, saved
    if a.fits:
        if best is None:
            return "no single flag helps by more than 2%, as far as the formulas know"
        return f"{changed(cfg, best)} would help most: by {gain / now.seconds['step']:.0%} of the step, as formulas go"
    lacks = f"does not fit: it needs {size(-spare, 1024)} more than a chip's {size(a.memory['limit'], 1024)}"
    if best is None:
        return f"{lacks}, and no single flag would make it fit; take more chips or a smaller model"
    return f"{lacks}; {changed(cfg, best)} would make it fit, as formulas go"


def search(cfg, machine, compiler):
    """[(Config, Answer)] of the best configuration of every mesh, the fastest first: formulas rank all of them,
    the compiler, if it is there, checks the best."""
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
    for i, (new, a) in enumerate(found[:COMPILED] if compiler else []):
        if a.fits:
            say(f"compiling the best on {new.run.n_device_axis}")
            found[i] = new, compiled_answer(new, machine)[0]
    found.sort(key=lambda pair: (compiler and not pair[1].compiled, *rank(pair[1])))
    return found


def rank(a):
    """What --search sorts by: what fits by its time, what does not by its memory."""
    return not a.fits, a.seconds["step"] if a.fits else a.memory["total"]


def table(found):
    """The answers of `search` as lines; each but the first with the part of its step that makes it lose."""
    first = found[0][1]
    row = "{:>4} {:>3} {:>3} {:>6} {:>6} {:>6} {:>6} {:>9} {:>8} {:>6} {:>6}  {:<9} {}"
    lines = [
        row.format(*"dp pp tp rounds micro remat fsdp sequences step MFU GiB by".split(), "why not")
    ]
    for _, a in found[:LISTED]:
        why = ""
        if not a.fits:
            why = f"does not fit: {size(a.memory['total'] - a.memory['limit'], 1024)} more than there is"
        elif a is not first:
            parts = (a.seconds | first.seconds).keys() - {"step"}
            more = {part: a.seconds.get(part, 0) - first.seconds.get(part, 0) for part in parts}
            most = max(more, key=more.get)
            why = f"{most} +{more[most]:.3f} s" if more[most] > 0 else ""
        values = [a.flags[flag] for flag in ("pp_interleave", "microbatches", *WAYS)]
        lines.append(
            row.format(
                *a.mesh.values(),
                *values,
                f"{a.seconds['step']:.3f}",
                f"{a.mfu:.1%}",
                f"{a.memory['total'] / 2**30:.1f}",
                "compiler" if a.compiled else "formulas",
                why,
            )
        )
    return lines


def compiled_answer(cfg, machine):
    """(Answer, text of the program or None) from the compiler; also where it refuses since memory does not suffice."""
    try:
        compiled = ask_compiler(cfg, machine)
    except TooLarge as e:
        return answer(cfg, machine, too_large=e), None
    return answer(cfg, machine, compiled), compiled and compiled.text


def main(cfg, given):
    """Print the plan of the run that the flags describe, and write what --plan_json and --plan_dump ask for."""
    asked, machine = cfg.plan, parse_machine(cfg.plan.plan)
    if cfg.run.n_devices not in (0, machine.n):
        raise UserError(
            f"--n_devices {cfg.run.n_devices}: --plan {machine.name} has {machine.n}; leave the flag out."
        )
    if asked.plan_json:
        utils.check_place(asked.plan_json, "--plan_json")
    if asked.plan_dump:
        utils.check_place(os.path.join(asked.plan_dump, "step.hlo"), "--plan_dump")
    if cfg.run.init_from:
        cfg = settings.adopt(cfg, given, weights.open_weights(cfg.run.init_from)[0])
    # no cache: what was compiled for devices that are not there cannot be read back
    cfg = settings.validate(utils.replace(cfg, n_devices=0, compilation_cache=""), machine.n)
    if cfg.model.document_mask:
        cfg = utils.replace(cfg, end_of_text=0)  # any token will do
    steps.configure_jax(cfg)
    compiler = bool(machine.topology and importlib.util.find_spec("libtpu"))
    if compiler:
        slice_devices(
            machine
        )  # a slice that there is not is refused here, before formulas rank anything for it
    elif asked.plan_dump:
        raise UserError(
            f"--plan_dump {asked.plan_dump}: "
            + (
                NO_COMPILER
                if machine.topology
                else "a GPU's program cannot be compiled without one"
            )
            + "."
        )
    given_cfg, found, text = cfg, [], None
    if asked.search:
        found = search(cfg, machine, compiler)
        cfg, a = found[0]
    elif compiler:
        say(f"compiling the step for {machine.name}")
        a, text = compiled_answer(cfg, machine)
    else:
        a = answer(cfg, machine)
    if machine.topology and not compiler:
        print(NO_COMPILER)
    if found:
        print(
            *table(found),
            f"the fastest: {changed(given_cfg, cfg) or 'the flags as given'}",
            sep="\n",
        )
    for line in report(cfg, machine, a):
        print(line)
    advice = advise(cfg, machine, a)
    print(f"next         {advice}", flush=True)
    if asked.plan_json:
        content = a._asdict() | dict(fits=a.fits, advice=advice)
        if found:
            content["search"] = [other._asdict() | dict(fits=other.fits) for _, other in found]
        utils.write_file(asked.plan_json, utils.to_json(content, indent=1) + "\n")
    if asked.plan_dump:
        if asked.search and a.compiled and a.fits:
            text = ask_compiler(cfg, machine).text
        if a.fits and text is None:
            raise UserError(
                f"--plan_dump {asked.plan_dump}: the TPU compiler failed, so there is no program to write."
            )
        if text:
            utils.write_file(os.path.join(asked.plan_dump, "step.hlo"), text)
    return 0
