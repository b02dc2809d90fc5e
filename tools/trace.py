"""Where the time of a step went, of a trace that `main.py --profile` wrote, beside what a plan says of it.

python tools/trace.py runs/tiny

It reads what jax's profiler recorded and the compiled program that lies beside it. It needs no accelerator.
"""

if __name__ == "__main__":
    import program

    program.begin()

import gzip
import os
import sys
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
    """A run directory, or its gs:// address."""
    trace: str = ""
    """Name of a trace in it, such as steps-20-22; empty: the newest."""
    top: int = utils.flag(10, least=0)
    """Costliest operations to list."""
    json: bool = False
    """Print one JSON object instead of tables."""


if __name__ == "__main__":
    platforms.choose_cpu()  # the accelerators may belong to a run
    options_given = utils.one_sentence(
        lambda: command_line.read_flags(Options, sys.argv[1:], "trace.py")
    )

import fsspec
from jax.profiler import ProfileData

import collectives
from tools.planning import costs, plan
from tools.tracing import events, names, shares
from training import profiling

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
    if not found:
        raise UserError(
            f"{run}: holds no whole trace; train with --profile FIRST:LAST, such as 20:22, to make one."
        )
    _, folder, about = max(found, key=lambda entry: entry[0])
    text = gzip.decompress(utils.read_file(os.path.join(folder, "step.hlo.gz"))).decode()
    return Trace(folder, about, config_of(about["flags"]), text)


def config_of(flags):
    """The Config of {flag: value} as JSON has it, of this version's flags or an older one's."""
    flags = utils.clear_names(flags)
    known = {name: value for name, value in flags.items() if name in utils.FIELDS}
    known["n_device_axis"] = tuple(known["n_device_axis"])
    return utils.replace(utils.Config(), **known)


def devices_in(trace):
    """[[Event] of a device], of all processes that wrote. Raises UserError where a file is damaged."""
    fs, there = fsspec.core.url_to_fs(trace.folder)
    found = []
    for path in sorted(fs.glob(f"{there}/*.xplane.pb")):
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
    first, last = trace.about["steps"]
    mesh = dict(zip(collectives.AXES, trace.cfg.run.n_device_axis))
    program = names.Program(trace.text, mesh)
    found = shares.measure(devices_in(trace), program, last - first + 1)
    if found is None:
        raise UserError(
            f"{trace.folder}: holds no whole step; trace later ones, or one that is not interrupted."
        )
    return found


# --- The plan -----------------------------------------------------------------------------------------------------


def machine_of(trace):
    """plan.Machine that the run was on; None where its kind of device is not known."""
    about = trace.about
    for name, chip in costs.CHIPS.items():
        if chip.kind == about["device_kind"]:
            hosts = about["processes"] if chip.gpu else 1
            n = trace.cfg.run.n_devices
            return plan.Machine(name, chip, n, about["slices"], hosts=hosts)
    return None


def planned(trace):
    """{what told: plan.Answer} for the run of a trace, {} where its kind of device is not known."""
    machine = machine_of(trace)
    if machine is None:
        return {}
    program = plan.Compiled(trace.text, 0, 0)  # its memory does not matter here
    return {
        "formulas": plan.answer(trace.cfg, machine),
        "program": plan.answer(trace.cfg, machine, program),
    }


def measured_parts(found):
    """{part: seconds} of `shares.Shares` in the parts of a plan, and those that a plan does not have. Links count
    exposed and hidden."""
    waits = {part: found.parts.get(part, 0.0) for part in shares.WAITS}
    exposed = sum(found.parts.get(axes, 0.0) for axes in found.links)
    computing = found.step - exposed - sum(waits.values())
    parts = {"matrix products": found.products, "memory": computing - found.products}
    for axes in found.links:
        parts[f"links of {axes}"] = found.parts.get(axes, 0.0) + found.hidden.get(axes, 0.0)
    return parts | waits | dict(step=found.step)


# --- Printing -----------------------------------------------------------------------------------------------------


def heading(trace, found):
    """The first line: what was traced, where."""
    mesh = ", ".join(map(str, trace.cfg.run.n_device_axis))
    kind, first = trace.about["device_kind"], trace.about["steps"][0]
    return (
        f"{trace.folder}: {found.steps} steps from step {first} on, {found.devices} of "
        f"{trace.cfg.run.n_devices} x {kind}, mesh (dp, pp, tp) = ({mesh})"
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


def plan_rows(found, plans):
    """Rows of a table: the parts of a plan as they were measured and as {who tells: plan.Answer} have them."""
    measured = measured_parts(found)
    told = [answer.seconds for answer in plans.values()]
    rows = [["a step, seconds", "measured", *plans]]
    for part in dict.fromkeys([*measured, *(part for seconds in told for part in seconds)]):
        cells = [seconds.get(part) for seconds in (measured, *told)]
        rows.append([part, *("-" if cell is None else f"{cell:.4f}" for cell in cells)])
    overlapped = plans["program"].overlapped["step"]
    return [*rows, ["step, overlapped", f"{found.step:.4f}", "-", f"{overlapped:.4f}"]]


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


def report(trace, found, plans, top):
    """All of it in words, as a list of lines."""
    lines = [heading(trace, found), *table(share_rows(found)), *beside_lines(found), ""]
    lines += [*table(operation_rows(found, top)), ""]
    if plans:
        return lines + table(plan_rows(found, plans))
    kind = trace.about["device_kind"]
    return [*lines, f"no plan beside it: the peaks of this kind of device, {kind}, are not known"]


def as_json(trace, found, plans, top):
    """All of it as an object for JSON."""
    costliest = sorted(found.operations.items(), key=lambda entry: -entry[1])
    return dict(
        trace=trace.folder,
        steps=found.steps,
        devices=found.devices,
        device_kind=trace.about["device_kind"],
        step=found.step,
        parts=found.parts,
        hidden=found.hidden,
        operations=[one._asdict() | dict(seconds=seconds) for one, seconds in costliest[:top]],
        measured=measured_parts(found),
        plan={by: answer.seconds for by, answer in plans.items()},
    )


# --- The program --------------------------------------------------------------------------------------------------


def main(options):
    utils.check_bounds(options)
    trace = open_trace(options.run, options.trace)
    found = measure(trace)
    plans = planned(trace)
    if options.json:
        print(utils.to_json(as_json(trace, found, plans, options.top), indent=1))
    else:
        print("\n".join(report(trace, found, plans, options.top)), flush=True)


if __name__ == "__main__":
    common.run(lambda: main(options_given))
