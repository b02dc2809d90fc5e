"""Report where the time of a step went, from a trace that `main.py --profile` wrote, beside the plan.

python tools/trace.py runs/tiny

It reads the recording of jax's profiler and the compiled program saved beside it. It needs no accelerator.
"""

if not __package__:
    import startup

    startup.prepare()

import fnmatch
import functools
import gzip
import itertools
import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from jax.profiler import ProfileData

import collectives
from config import settle
from config.parser import argument
from logs import profiling
from planning import hlo, machines, plan
from runtime import chips
from runtime.files import names_in, read_file, read_json
from runtime.messages import UserError, size
from tools import common


@dataclass(frozen=True)
class Options:
    """Report where the time of a step went, from a trace that --profile wrote."""

    run: str = argument()
    """A run directory, or its gs:// or s3:// address."""
    trace: str = ""
    """Name of a trace in it, such as steps-20-22; empty: the newest."""


PRODUCTS = "matrix products"  # as a `Plan` calls this part
REST = "rest"
IDLE = "idle"
# {a scope of the model (jax.named_scope): part of a step}. An operation belongs to the innermost such scope around it.
PARTS = {name: name for name in ("attention", "feed_forward", "experts", "optimizer")}
PARTS |= dict(embed="vocabulary", head="vocabulary")
# What jax adds to the path of scopes for a loop or a function. It carries no information and is removed.
NOISE = re.compile(r"(jit\([^()]*\)|shard_map|while|body|cond|closed_call|checkpoint|eval_jaxpr)/")
# not counted: the operations that they run are in the trace too
LOOPS = ("while", "call", "conditional")
# {platform: regular expression for "PLANE LINE" of the lines of a trace that record what devices do}
DEVICES = dict(
    cpu="/host:CPU ", tpu=r"/device:TPU:\d+ (Async )?XLA Ops", gpu=r"/device:GPU:\d+ Stream"
)


class Operation(NamedTuple):
    """What an HLO operation, or several equal ones, are in the code."""

    path: str  # scopes, and jax's name of it: transpose(jvp(attention))/dot_general
    part: str  # a value of PARTS, or REST
    links: str  # the links over which it communicates, as a plan names them; "": it computes
    is_product: bool  # whether it has a matrix product


class Trace:
    """A trace and the optimized HLO of its step. facts: those about the run, as `profiling.Profile` wrote them. text:
    the HLO."""

    def __init__(self, folder, facts, cfg, text):
        self.folder = folder
        self.facts = facts
        self.cfg = cfg
        self.text = text
        self.program = re.match(r"HloModule ([\w.\-]+)", text)[1]
        self.computations = hlo.computations(text)
        self.ops = {op.name: op for ops in self.computations.values() for op in ops}

    @functools.cache
    def operation(self, name):
        """The `Operation` for the name of an HLO operation; None for a loop."""
        op = self.ops[name]
        if op.kind in LOOPS:
            return None
        if op.kind.endswith(("-done", "-update")):
            return self.operation(op.inputs[0].name)
        inside = list(self.inside(op))
        is_product = any(hlo.is_product(op) or hlo.is_kernel(op) for op in inside)
        links = "" if is_product else next(filter(None, map(self.links, inside)), "")
        named = re.search(r'op_name="\(?([^":]*)', " ".join(inner.rest for inner in inside))
        path = NOISE.sub("", named[1] if named else name)
        scopes = [scope for scope in re.findall(r"\w+", path) if scope in PARTS]
        part = PARTS[scopes[-1]] if scopes else REST
        return Operation(path, part, links, is_product)

    def inside(self, op):
        """Yield an operation and, recursively, those in the computations that it calls, such as the body of a
        fusion."""
        yield op
        for callee in hlo.CALLED.findall(op.rest):
            for inner in self.computations.get(callee, []):
                yield from self.inside(inner)

    def links(self, op):
        """The links over which an operation communicates; "" where it does not."""
        mesh = dict(zip(collectives.AXES, self.cfg.run.n_device_axis))
        collective = op.kind.removesuffix("-start")
        if collective in hlo.COLLECTIVES:
            axes, _ = hlo.group_axes(op, mesh)
            return axes and plan.links_of(axes, collective)
        across = hlo.slow_axis(mesh, self.facts["slices"])
        return plan.links_of([across], hlo.ACROSS) if collective in ("send", "recv") else ""


def open_trace(run, name=""):
    """The `Trace` of a run directory with that name; "": the newest. Raises UserError where there is none."""
    folder = os.path.join(run, profiling.FOLDER)
    known = {one: read_json(folder, one, "about.json") for one in sorted(names_in(folder))}
    known = {one: facts for one, facts in known.items() if facts}  # about.json is written last
    if not known:
        raise UserError(f"{run}: holds no whole trace; train with --profile FIRST:LAST.")
    name = name or max(known, key=lambda one: known[one]["written"])
    if name not in known:
        raise UserError(f"{run} has {', '.join(known)}", flag="trace", value=name)
    folder = os.path.join(folder, name)
    cfg = common.stored_config(known[name]["flags"])
    cfg = settle.validate(cfg, math.prod(cfg.run.n_device_axis))
    text = gzip.decompress(read_file(f"{folder}/step.hlo.gz")).decode()
    return Trace(folder, known[name], cfg, text)


def events_of_devices(trace):
    """For each device of all processes, the list of events (begin, end, name of an operation of the step), in ns."""
    found = []
    for name in fnmatch.filter(names_in(trace.folder), "*.xplane.pb"):
        data = ProfileData.from_serialized_xspace(read_file(f"{trace.folder}/{name}"))
        found += events_by_device(data, trace).values()
    return found


def events_by_device(data, trace):
    """{device: [(begin, end, name of an operation)]} of a ProfileData, in ns."""
    found = defaultdict(list)
    lines = [(plane, line) for plane in data.planes for line in plane.lines]
    for plane, line in lines:
        if not re.match(DEVICES[trace.facts["platform"]], f"{plane.name} {line.name}"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            # on a TPU the event's name is "%fusion.1 = f32[8]{0} fusion(...)", or just "fusion.1"
            op = stats.get("hlo_op") or re.match(r"%?([\w.\-]*)", event.name)[1]
            of_step = stats.get("hlo_module", trace.program) == trace.program
            again = event.name.startswith("end: ")  # a CPU records each end as an event too
            if again or not of_step or op not in trace.ops:
                continue
            one = trace.operation(op)
            if line.name.startswith("Async") and not (one and one.links):
                continue  # asynchronous copies, which run while the core computes
            device = plane.name, stats.get("device_ordinal")
            found[device].append((event.start_ns, event.end_ns, op))
    return found


def steps_in(events, trace, n):
    """[(begin, end)] of n steps of a device, in ns; [] where the trace holds fewer.

    Operations outside loops run once a step, so the k-th run of each belongs to the k-th step. The trace may hold one
    step more, which its end truncated.
    """
    entry = {op.name for op in trace.computations["ENTRY"]}
    times = defaultdict(list)
    for begin, end, op in sorted(events):
        if op in entry:
            times[op].append((begin, end))
    once_a_step = [every[:n] for every in times.values() if len(every) in (n, n + 1)]
    steps = [zip(*step) for step in zip(*once_a_step)]
    return [(min(begins), max(ends)) for begins, ends in steps]


def spans(found):
    """Divide time into spans in which the same intervals are active: yield (length, labels of the active intervals).

    found: [(begin, end, label)]. Spans in which none is active are left out.
    """
    points = sorted((at, number) for number, (*ends, _) in enumerate(found) for at in ends)
    active = {}
    for (at, number), (after, _) in itertools.pairwise(points):
        if number in active:
            del active[number]
        else:
            active[number] = found[number][2]
        if active and after > at:
            yield after - at, list(active.values())


class Shares:
    """The seconds of a step, divided among its parts; means over the steps and devices of a trace. Raises UserError
    where the trace holds no whole step."""

    def __init__(self, trace):
        # {part: seconds}; exposed communication is a part named by its links
        self.parts = Counter()
        # {links: seconds} of communication during which the device computes
        self.hidden = Counter()
        self.operations = Counter()  # {Operation: seconds}
        first, last = trace.facts["steps"]
        self.steps = last - first + 1
        runs = []  # of each device: (events, its steps)
        for events in events_of_devices(trace):
            if steps := steps_in(events, trace, self.steps):
                runs.append((events, steps))
        if not runs:
            raise UserError(f"{trace.folder}: holds no whole step; trace later ones.")
        self.devices = len(runs)
        for events, steps in runs:
            labeled = [(begin, end, trace.operation(op)) for begin, end, op in events]
            for ns, active in spans([*labeled, *((*step, IDLE) for step in steps)]):
                if IDLE in active:
                    seconds = ns / 1e9 / self.steps / self.devices
                    self.add_span(seconds, [one for one in active if one not in (None, IDLE)])
        self.step = self.parts.total()
        self.links = sorted({one.links for one in self.operations if one.links} | {*self.hidden})
        self.products = sum(t for one, t in self.operations.items() if one.is_product)  # seconds

    def add_span(self, seconds, active):
        """Add a span of time in which these operations were active on a device.

        It counts for the operations that compute, in equal shares. Where none computes, it counts for the links over
        which bytes travel; where none of these is active either, the device is idle.
        """
        computing = [one for one in active if not one.links]
        busy = computing or active
        for one in busy:
            self.operations[one] += seconds / len(busy)
            self.parts[one.links or one.part] += seconds / len(busy)
        if computing:
            for links in {one.links for one in active if one.links}:
                self.hidden[links] += seconds
        if not busy:
            self.parts[IDLE] += seconds


def compare_with_plan(trace, found):
    """{part: (seconds measured, seconds planned, FLOP or bytes of the program)} of a step of a device; None:
    unknown."""
    measured = {links: found.parts[links] + found.hidden[links] for links in found.links}
    waited = found.parts[IDLE] + sum(found.parts[links] for links in found.links)
    measured[PRODUCTS] = found.products
    measured["memory"] = found.step - waited - found.products
    measured["step"] = found.step
    facts = trace.facts
    device_kind = facts["device_kind"]
    n = math.prod(trace.cfg.run.n_device_axis)
    machine = machines.machine_of_kind(
        device_kind, facts["platform"], n, facts["processes"], facts["slices"]
    )
    # 0, 0: bytes of memory, which this report does not show
    of_program = plan.make_plan(trace.cfg, machine, machines.Compiled(trace.text, 0, 0))
    work = {PRODUCTS: of_program.flops} | plan.by_links(of_program.collectives, "bytes")
    planned = {}
    if chips.chip_of(device_kind):
        planned = of_program.seconds | dict(step=of_program.overlap.step)
    columns = measured, planned, work
    return {part: tuple(column.get(part) for column in columns) for part in work | measured}


def report(trace, found):
    """The report in Markdown: the `Shares` of a trace beside the plan."""
    mesh = trace.cfg.run.n_device_axis
    shares = []
    for part, seconds in found.parts.most_common():
        exposed = ", exposed" if part in found.links else ""
        shares.append((part + exposed, seconds))
    shares.append(("sum", found.step))
    for links, seconds in found.hidden.most_common():
        shares.append((f"{links}, hidden behind computation", seconds))
    costliest = [(one.path, seconds) for one, seconds in found.operations.most_common(10)]
    rows = []
    for part, (measured, planned, work) in compare_with_plan(trace, found).items():
        row = {"a step of a device": part}
        row["measured"] = "-" if measured is None else f"{measured:.4f} s"
        row["planned"] = "-" if planned is None else f"{planned:.4f} s"
        amount = f"{work / 1e9:,.2f} GFLOP" if part == PRODUCTS else size(work or 0)
        row["in the program"] = amount if work else "-"
        rows.append(row)
    return f"""{trace.folder}: {found.steps} steps from step {trace.facts["steps"][0]} on, {found.devices} of \
{math.prod(mesh)} x {trace.facts["device_kind"]}, mesh (dp, pp, tp) = {mesh}

{share_table("a step", shares, found.step)}

{share_table("operation", costliest, found.step)}

{common.markdown(rows)}"""


def share_table(heading, parts, step):
    """A Markdown table of [(part, seconds)], with the share of the seconds of a step."""
    rows = []
    for part, seconds in parts:
        row = {heading: part, "seconds": f"{seconds:.4f}", "share": f"{seconds / step:.1%}"}
        rows.append(row)
    return common.markdown(rows)


def main(options):
    """Print the `Shares` of a trace beside the plan."""
    trace = open_trace(options.run, options.trace)
    print(report(trace, Shares(trace)))


if __name__ == "__main__":
    common.run_on_cpu(Options, "tools/trace.py", main)
