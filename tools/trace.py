"""Where the time of a step went, of a trace that `main.py --profile` wrote, beside what a plan says of it.

python tools/trace.py runs/tiny

It reads what jax's profiler recorded and the compiled program that lies beside it. It needs no accelerator.
"""

if __name__ == "__main__":
    import program

    program.begin()

import gzip
import math
import os
import sys
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import tyro

import utils
from tools import common
from training import command_line, platforms
from utils import UserError


@dataclass(frozen=True)
class Options:
    """Say where the time of a step went, of a trace that --profile wrote."""

    run: tyro.conf.Positional[str]
    """A run directory, or its gs:// or s3:// address."""
    trace: str = ""
    """Name of a trace in it, such as steps-20-22; empty: the newest."""
    plan: str = ""
    """Machine to plan for, as --plan of main.py takes it; empty: the devices of the trace, as far as they are known."""
    top: int = utils.flag(10, least=0)
    """Costliest operations to list."""
    json: bool = False
    """Print one JSON object instead of tables."""


if __name__ == "__main__":
    platforms.choose_cpu()  # the accelerators may belong to a run
    options_given = utils.one_sentence(
        lambda: command_line.read_flags(Options, sys.argv[1:], "trace.py")
    )

from jax.profiler import ProfileData

import collectives
from planning import costs, machines, plan
from tools.tracing import events, names, shares
from training import chips, profiling

PRODUCTS = "matrix products"  # as plan.Answer calls this part

# --- Reading ------------------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """A trace in a run directory."""

    folder: str
    about: dict  # as profiling.Profile.about wrote it
    cfg: utils.Config
    text: str  # optimized HLO of the step


def open_trace(run, name=""):
    """`Trace` of a run directory: of that name, or the newest. Raises UserError where there is none."""
    known = profiling.traces_of(run)
    if name and name not in known:
        raise UserError(f"--trace {name}: {run} has {', '.join(known) or 'no traces'}.")
    found = []
    for one in [name] if name else known:
        folder = os.path.join(run, profiling.FOLDER, one)
        if about := utils.read_json(folder, "about.json"):
            found.append((about["written"], folder, about))
    if not found and not utils.read_json(run, "config.json"):
        raise UserError(f"{run}: is no run directory, which holds a config.json of main.py.")
    if not found:
        raise UserError(
            f"{run}: holds no whole trace; train with --profile FIRST:LAST, such as 20:22, to make one."
        )
    _, folder, about = max(found, key=lambda entry: entry[0])
    program = utils.read_file(os.path.join(folder, "step.hlo.gz"))
    if program is None:
        raise UserError(f"{folder}: lacks step.hlo.gz; copy all files of a trace.")
    try:
        text = gzip.decompress(program).decode()
    except (OSError, EOFError, ValueError, zlib.error) as e:
        reason = utils.first_line(e)
        raise UserError(f"{folder}: step.hlo.gz is damaged ({reason}); copy it anew.") from None
    if not text.startswith("HloModule "):
        raise UserError(f"{folder}: step.hlo.gz is damaged (it holds no HLO); copy it anew.")
    return Trace(folder, about, config_of(about["flags"]), text)


def config_of(flags):
    """The Config of {flag: value} as JSON has it, of this version's flags or an older one's."""
    flags = utils.clear_names(flags)
    known = {name: value for name, value in flags.items() if name in utils.FIELDS}
    known["n_device_axis"] = tuple(known["n_device_axis"])
    return utils.replace(utils.Config(), **known)


def devices_in(trace):
    """[[Event] of a device], of all processes that wrote. Raises UserError where a file is damaged."""
    fs, there = utils.filesystem(trace.folder)
    found = []
    paths = utils.persist(lambda: fs.glob(f"{there}/*.xplane.pb"), trace.folder)
    for path in sorted(paths):
        content = utils.read_file(os.path.join(trace.folder, os.path.basename(path)))
        try:
            data = ProfileData.from_serialized_xspace(content)
        except RuntimeError as e:
            reason = utils.first_line(e)
            raise UserError(f"{path}: is no trace ({reason}); --trace names another.") from None
        found += events.events_of(data).values()
    return found


def measure(trace):
    """`shares.Shares` of a trace. Raises UserError where it holds no whole step."""
    run, (first, last) = trace.cfg.run, trace.about["steps"]
    program = names.Program(trace.text, mesh_of(trace))
    # the loop of main.py turns to an evaluation or a checkpoint after these
    every = [run.eval_every, run.save_steps]
    followed = [step - first for step in range(first, last) if any(step % n == 0 for n in every)]
    found = shares.measure(devices_in(trace), program, last - first + 1, followed)
    if found is None:
        raise UserError(
            f"{trace.folder}: holds no whole step; trace later ones, or one that is not interrupted."
        )
    return found


def mesh_of(trace):
    """{axis: size}."""
    return dict(zip(collectives.AXES, trace.cfg.run.n_device_axis))


def devices_of(trace):
    """Number of devices that trained."""
    return math.prod(trace.cfg.run.n_device_axis)


# --- The plan -----------------------------------------------------------------------------------------------------


def machine_of(trace, named):
    """machines.Machine that --plan has `named`, else the one that the run was on; None where its kind of device is not
    known. Raises UserError where the run does not fit on it."""
    about, n = trace.about, devices_of(trace)
    if named:
        machine = machines.parse_machine(named)
        if machine.n != n:
            raise UserError(f"--plan {named}: has {machine.n} devices; the run had {n}.")
        return machine
    name = about["device_kind"]
    chip = chips.chip_of(name)
    if chip is None:
        return None
    platform = "gpu" if chip.gpu else "tpu"
    return machines.Machine(name, chip, n, about["slices"], "", about["processes"], platform)


def counted(trace, place):
    """{who counted: {part: floating-point operations, or bytes sent}} of a step on one device."""
    estimate = costs.estimate(trace.cfg, place)
    cost = costs.read_program(trace.text, trace.cfg, place)
    return {
        "formulas": amounts(estimate.flops, estimate.sent),
        "program": amounts(cost.flops, cost.collectives),
    }


def amounts(flops, sent):
    """{part: amount} of the operations of products, and {(axes, kind): [bytes, ..]} of collectives."""
    parts = {PRODUCTS: flops}
    for (axes, kind), (n_bytes, *_) in sent.items():
        name = plan.links_of(dict(axes=axes, kind=kind))
        parts[name] = parts.get(name, 0) + n_bytes
    return parts


def planned(trace, machine):
    """{who planned: {part: seconds}} of a step: the formulas and, where the traced program was compiled for such a
    machine, what that program tells."""
    told = {"formulas": plan.answer(trace.cfg, machine).seconds}
    if machine.platform == trace.about["platform"]:
        # its memory does not matter here
        of_program = plan.answer(trace.cfg, machine, machines.Compiled(trace.text, 0, 0))
        exposed = {exposed_in(part): t for part, t in of_program.overlapped.items()}
        step = exposed.pop(exposed_in("step"))
        told["program"] = of_program.seconds | exposed | dict(step=step)
    return told


def measured(found, across):
    """{part: seconds} of `shares.Shares` in the parts of a plan, exposed and hidden communication together, and in
    those that a plan does not have. across: mesh axis that goes from slice to slice."""
    waits = {part: found.parts.get(part, 0.0) for part in shares.WAITS}
    links = {}
    for axes in found.links:
        name = f"network of {across}" if axes == names.SLICES else f"links of {axes}"
        exposed = found.parts.get(axes, 0.0)
        links |= {name: exposed + found.hidden.get(axes, 0.0), exposed_in(name): exposed}
    computing = found.step - sum(waits.values())
    computing -= sum(found.parts.get(axes, 0.0) for axes in found.links)
    parts = {PRODUCTS: found.products, "memory": computing - found.products}
    return parts | links | waits | dict(step=found.step)


def exposed_in(part):
    return f"{part}, exposed"


class Beside(NamedTuple):
    """What was measured, and what the plan says of the same step; {part: number} or {who: {part: number}}."""

    measured: dict  # seconds
    counted: dict  # floating-point operations and bytes
    planned: dict  # seconds; {} where the machine is not known


def beside(trace, found, named):
    """`Beside` of a trace and its `shares.Shares`, on the machine that --plan has `named`."""
    machine = machine_of(trace, named)
    place = costs.Place(trace.about["platform"])
    if machine:
        place = plan.place_of(trace.cfg, machine)
    seconds = planned(trace, machine) if machine else {}
    return Beside(measured(found, place.across), counted(trace, place), seconds)


# --- Printing -----------------------------------------------------------------------------------------------------


def heading(trace, found):
    """The first line: what was traced, where."""
    mesh = ", ".join(map(str, trace.cfg.run.n_device_axis))
    kind, first = trace.about["device_kind"], trace.about["steps"][0]
    return (
        f"{trace.folder}: {found.steps} steps from step {first} on, {found.devices} of "
        f"{devices_of(trace)} x {kind}, mesh (dp, pp, tp) = ({mesh})"
    )


def share_rows(found):
    """Rows of a table: the parts of a step, which add up to it."""
    order = [*names.PARTS.values(), names.REST, *found.links, *shares.WAITS]
    rows = [["a step", "seconds", "share"]]
    for part in dict.fromkeys(order):
        if seconds := found.parts.get(part):
            words = f"{part}, exposed" if part in found.links else part
            rows.append([words, *amount(seconds, found)])
    return [*rows, ["sum", *amount(found.step, found)]]


def beside_lines(found):
    """Lines: what is counted in several parts or in none."""
    lines = [f"matrix products: {found.products / found.step:.1%} of the step, in the parts above"]
    if found.links:
        hidden = [f"{axes} {found.hidden.get(axes, 0.0):.4f} s" for axes in found.links]
        lines.append(f"communication hidden behind computation: {', '.join(hidden)}")
    return lines


def operation_rows(found, top):
    """Rows of a table: the costliest operations."""
    costliest = sorted(found.operations.items(), key=lambda entry: -entry[1])
    rows = [["operation", "seconds", "share", "from"]]
    for operation, seconds in costliest[:top]:
        words = f"{operation.name} {operation.way}".strip()
        rows.append([words, *amount(seconds, found), operation.source])
    return rows


def counted_rows(b):
    """Rows of a table: what a device computes and sends in a step of `Beside`, and how fast it did what the program
    has."""
    rows = [["a step of a device", "measured", "rate", "by formulas", "in the program"]]
    for part in dict.fromkeys([*b.counted["program"], *b.counted["formulas"]]):
        unit = "FLOP" if part == PRODUCTS else "B"
        by_formulas, in_program = (b.counted[who].get(part, 0) for who in ("formulas", "program"))
        seconds = b.measured.get(part, 0)
        rate = f"{in_unit(in_program / seconds, unit)}/s" if seconds else "-"
        amounts = [in_unit(n, unit) for n in (by_formulas, in_program)]
        rows.append([part, f"{seconds:.4f} s", rate, *amounts])
    return rows


def in_unit(n, unit):
    """1234567 -> 1.23 MB, and so on."""
    power = max(p for p in range(5) if p == 0 or n >= 1000**p)
    return f"{n / 1000**power:.{2 * bool(power)}f} {' KMGT'[power].strip()}{unit}"


def planned_rows(b):
    """Rows of a table: the seconds of `Beside`."""
    told = [b.measured, *b.planned.values()]
    rows = [["seconds of a step", "measured", *b.planned]]
    for part in dict.fromkeys(part for seconds in told for part in seconds):
        cells = [seconds.get(part) for seconds in told]
        rows.append([part, *("-" if cell is None else f"{cell:.4f}" for cell in cells)])
    return rows


def amount(seconds, found):
    """Cells: seconds, and their share of a step."""
    return [f"{seconds:.4f}", f"{seconds / found.step:.1%}"]


def table(rows):
    """A table in lines: words to the left, numbers to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths)):
            is_text = column == 0 or rows[0][column] == "from"
            cells.append(cell.ljust(width) if is_text else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def report(trace, found, b, top):
    """All of it in words, as a list of lines."""
    lines = [heading(trace, found), *table(share_rows(found)), *beside_lines(found), ""]
    lines += [*table(operation_rows(found, top)), "", *table(counted_rows(b)), ""]
    if b.planned:
        return lines + table(planned_rows(b))
    kind = trace.about["device_kind"]
    return [
        *lines,
        f"no seconds are planned: the speeds of {kind} are not known; --plan names others",
    ]


def as_json(trace, found, b, top):
    """All of it as an object for JSON."""
    costliest = sorted(found.operations.items(), key=lambda entry: -entry[1])
    return dict(
        trace=trace.folder,
        steps=found.steps,
        devices=found.devices,
        device_kind=trace.about["device_kind"],
        step=found.step,
        products=found.products,
        parts=found.parts,
        hidden=found.hidden,
        operations=[one._asdict() | dict(seconds=seconds) for one, seconds in costliest[:top]],
        **b._asdict(),
    )


# --- The program --------------------------------------------------------------------------------------------------


def main(options):
    trace = open_trace(options.run, options.trace)
    found = measure(trace)
    told = beside(trace, found, options.plan)
    if options.json:
        print(utils.to_json(as_json(trace, found, told, options.top), indent=1))
    else:
        print("\n".join(report(trace, found, told, options.top)), flush=True)


if __name__ == "__main__":
    common.run(lambda: main(options_given))
