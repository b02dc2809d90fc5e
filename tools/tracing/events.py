"""What a trace of jax's profiler says that each device did, and when.

Every platform lays its trace out in its own way:

    CPU   one plane, a line for each thread; an operation names its simulated device
    TPU   a plane for each chip; "XLA Modules" are programs, "XLA Ops" what the core does, "Async XLA Ops" what runs
          beside it
    GPU   a plane for each GPU, a line for each stream; a kernel names its operation and program
"""

import bisect
import re
from collections import defaultdict
from typing import NamedTuple


class Event(NamedTuple):
    """An operation on a device, or a kernel of one."""

    op: str  # name of its HLO instruction; of a kernel that does not tell, the kernel's
    begin: float  # ns
    end: float  # ns
    program: str | None  # name of its HLO module; None: it does not tell
    beside: bool = False  # whether it runs beside what the device computes


def events_of(data):
    """{device: [Event]} of a jax.profiler.ProfileData; devices without any are left out."""
    found = defaultdict(list)
    for plane in data.planes:
        if plane.name == "/host:CPU":
            read_cpu(plane, found)
        elif re.fullmatch(r"/device:TPU:\d+", plane.name):
            found[plane.name] += read_tpu(plane)
        elif re.fullmatch(r"/device:GPU:\d+", plane.name):
            found[plane.name] += read_gpu(plane)
    return {device: events for device, events in found.items() if events}


def read_cpu(plane, found):
    """Add the events of simulated devices to {device: [Event]}."""
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("end: "):  # half of all; they say nothing new
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats:
                device = f"CPU:{stats.get('device_ordinal', 0)}"
                found[device].append(event_of(event, stats))


def read_gpu(plane):
    events = []
    for line in plane.lines:
        if line.name.startswith("Stream"):
            events += [event_of(event, dict(event.stats)) for event in line.events]
    return events


def event_of(event, stats):
    """`Event` of one that names its operation and program among its `stats`."""
    op, program = stats.get("hlo_op", event.name), stats.get("hlo_module")
    return Event(op, event.start_ns, event.end_ns, program)


def read_tpu(plane):
    lines = {line.name: list(line.events) for line in plane.lines}
    modules = sorted(lines.get("XLA Modules", []), key=lambda event: event.start_ns)
    begins = [module.start_ns for module in modules]
    events = []
    for name in ("XLA Ops", "Async XLA Ops"):
        for event in lines.get(name, []):
            at = bisect.bisect_right(begins, event.start_ns) - 1
            # jit_train_step(1234), with a fingerprint
            program = modules[at].name.split("(")[0] if at >= 0 else None
            # "%fusion.1 = f32[8]{0} fusion(...)", or "fusion.1" alone
            op = re.match(r"%?([\w.\-]*)", event.name)[1]
            beside = name == "Async XLA Ops"
            events.append(Event(op, event.start_ns, event.end_ns, program, beside))
    return events
