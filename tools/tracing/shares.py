"""Where the time of a step went, by what its devices did.

A step lasts until the next one begins, or to its own end where the run does something else then. Every moment of it
belongs to one part. Where a device computes: to what it computes, in equal shares where several operations run at once.
Else, where bytes travel: to the communication over those mesh axes, which is exposed. Else it idles, if its program is
under way; or it runs another program; or it waits for the host. What travels while the device computes is hidden; that
is told beside the parts.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

# Parts in which a device does nothing of the step. The first two label intervals too.
STEP, OTHER, HOST = WAITS = "idle", "other programs", "host"
APART = "between steps"  # labels intervals that belong to no step


class Shares(NamedTuple):
    """Seconds of one step, means over the steps and the devices."""

    steps: int  # whole ones in the trace
    devices: int
    parts: dict  # {part: seconds}, mesh axes such as dp+tp for exposed communication; they add up to the step
    hidden: dict  # {axes: seconds}
    operations: dict  # {names.Operation: seconds}

    @property
    def step(self):
        return sum(self.parts.values())

    @property
    def links(self):
        """Mesh axes over which something travels: ["dp", "dp+tp", "tp"]."""
        return sorted({operation.axes for operation in self.operations} - {""} | self.hidden.keys())

    @property
    def products(self):
        """Seconds of operations with matrix products."""
        return sum(t for operation, t in self.operations.items() if operation.is_product)


def measure(devices, program, most, followed=()):
    """`Shares` of the first `most` whole steps of a names.Program, of [[events.Event] of a device]; None where there is
    no whole step. followed: which of the steps, from 0 on, the run did something else after."""
    parts, hidden, operations = defaultdict(float), defaultdict(float), defaultdict(float)
    steps = 0
    found = [(events, whole_steps(events, program, most)) for events in devices]
    found = [(events, runs) for events, runs in found if runs]
    for events, runs in found:
        steps = max(steps, len(runs))
        labeled = intervals(events, program, runs) + between(runs, followed)
        for ns, active in moments(labeled):
            seconds = ns / 1e9 / len(runs) / len(found)
            add_moment(seconds, active, parts, hidden, operations)
    return Shares(steps, len(found), parts, hidden, operations) if found else None


def whole_steps(events, program, most):
    """[(begin, end)] in ns of the first steps, at most so many, of a `names.Program` that a device ran from begin to
    end.

    Operations outside loops run once a step. So most of them are in the trace as often as there are whole steps, and
    once more where a step is cut off. The n-th time of each belongs to the n-th step: a few may begin before those that
    stand before them in the program.
    """
    times = defaultdict(list)
    for event in sorted(events, key=lambda event: event.begin):
        own = event.program == program.name and not event.beside
        if own and event.op in program.entry:
            times[event.op].append(event)
    if not times:
        return []
    [(usual, _)] = Counter(map(len, times.values())).most_common(1)
    whole = most if usual == most + 1 else usual
    once_a_step = [every for every in times.values() if whole <= len(every) <= whole + 1]
    steps = []
    for step in zip(*once_a_step):
        steps.append((min(event.begin for event in step), max(event.end for event in step)))
    return steps[: min(whole, most)]


def between(steps, followed):
    """[(begin, end, label)] of the times after these of the (begin, end) `steps`, from 0 on, until the next one."""
    ends = [(steps[at][1], steps[at + 1][0]) for at in followed if at + 1 < len(steps)]
    return [(end, begin, APART) for end, begin in ends]


def intervals(events, program, steps):
    """[(begin, end, label)] of what a device did from the first step to the last."""
    first, last = steps[0][0], steps[-1][1]
    found = [(begin, end, STEP) for begin, end in steps]
    for event in events:
        label = OTHER
        if event.program in (program.name, None):
            label = program.operation(event.op)
        if label is None or event.beside and (label is OTHER or not label.axes):
            continue  # a loop, or a copy that runs beside the computation
        begin, end = max(event.begin, first), min(event.end, last)
        if begin < end:
            found.append((begin, end, label))
    return found


def moments(found):
    """Yield (length, labels) of each span of time in which the same intervals are under way; from the begin of the
    first one to the end of the last one."""
    points = []
    for number, (begin, end, _) in enumerate(found):
        points += [(begin, number), (end, number)]
    points.sort()
    active, before = {}, points[0][0]
    for at, number in points:
        if at > before:
            yield at - before, list(active.values())
            before = at
        if number in active:
            del active[number]
        else:
            active[number] = found[number][2]


def add_moment(seconds, active, parts, hidden, operations):
    """Add a time in which these labels were active on a device."""
    if APART in active:
        return
    computing = [label for label in active if label not in (STEP, OTHER) and not label.axes]
    travelling = [label for label in active if label not in (STEP, OTHER) and label.axes]
    busy = computing or travelling
    for operation in busy:
        operations[operation] += seconds / len(busy)
        parts[operation.axes or operation.part] += seconds / len(busy)
    if computing:
        for axes in {operation.axes for operation in travelling}:
            hidden[axes] += seconds
    if not busy:
        part = STEP if STEP in active else OTHER if OTHER in active else HOST
        parts[part] += seconds
