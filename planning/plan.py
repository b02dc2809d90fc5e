"""The plan of a run on a machine: memory, operations, transfers and time of a step, from a compiler or from formulas.

planning/machines.py compiles the real train step, planning/program.py analyzes it, and planning/costs.py has the
formulas.
"""

import math
from collections import Counter
from typing import NamedTuple

import model
import utils
from planning import costs, hlo
from planning.machines import Compiled, Machine
from planning.program import Program, further_round
from training.sizes import tokens_per_step

MARGIN = 0.1  # share of a device's memory to leave free, since the formulas may be that far off
# Flags of which --search tries values, and which a plan lists: how a step is divided and computed.
SEARCHED = "n_device_axis pp_interleave train_batch_size microbatches accumulation_steps".split()
SEARCHED += ["remat", "fsdp", "sequence_parallel"]


class Memory(NamedTuple):
    """Bytes that a device holds at the moment of peak memory."""

    weights: float
    optimizer: float
    batch: float
    activations: float  # kept for the backward pass
    temporaries: float  # all else

    @property
    def total(self):
        """Bytes in all."""
        return sum(self)

    @property
    def working(self):
        """Bytes of all that a step computes. The formulas are exact for its inputs, and not for these."""
        return self.activations + self.temporaries


class Collective(NamedTuple):
    """All collectives of one kind along the same axes, as one device runs them in a step."""

    axes: tuple
    kind: str
    bytes: float  # sent
    times: float
    seconds: float
    exposed: float | None  # seconds in which nothing else runs; None: not known


class Overlap(NamedTuple):
    """The step as a compiler scheduled it."""

    exposed: dict  # {links: seconds in which the device waits for them}
    step: float  # seconds
    # seconds more if the experts of every layer need one more round, or larger buckets
    further_round: float


class Plan(NamedTuple):
    """What one step of a validated Config costs, in bytes and seconds. For one device unless it says otherwise."""

    cfg: utils.Config
    machine: Machine
    compiled: Compiled | None  # by the compiler, if it was asked
    mesh: dict  # {axis: size}
    memory: Memory
    memory_limit: float
    flops: float  # of the matrix products in the program
    collectives: list  # of `Collective`
    seconds: dict  # {part: seconds}, nothing overlapped
    overlap: Overlap | None  # None: not known
    bubble: float  # share of the pipeline's ticks in which a stage idles

    @property
    def fits(self):
        """Whether a step fits in memory."""
        return self.memory.total <= self.memory_limit

    @property
    def step(self):
        """Seconds of a step, nothing overlapped; NaN where the seconds are unknown, as on a CPU."""
        return sum(self.seconds.values()) or math.nan

    @property
    def tokens(self):
        """Tokens of a step, on all devices."""
        return tokens_per_step(self.cfg)

    @property
    def model_flops(self):
        """Operations that the model itself needs, without recomputation and padding."""
        return model.flops_per_token(self.cfg) * self.tokens / self.machine.n

    @property
    def tokens_per_second(self):
        """Tokens per second of all devices."""
        return self.tokens / self.step

    @property
    def mfu(self):
        """Model FLOPs utilization: the share of the peak speed that the model's own operations use. The peak is
        that of --model_dtype on chips without bfloat16, else that of bfloat16."""
        peak = self.machine.chip.peak_in(self.cfg.model.model_dtype)
        return self.model_flops / self.step / peak

    @property
    def hours(self):
        """Hours of the whole run."""
        return self.step * self.cfg.run.training_steps / 3600

    @property
    def bound(self):
        """The part that takes longest."""
        return max(self.seconds, key=self.seconds.get)

    @property
    def searched(self):
        """{flag: value} of the flags in SEARCHED."""
        flags = utils.flatten(self.cfg)
        return {flag: flags[flag] for flag in SEARCHED}


def make_plan(cfg, machine, compiled=None, refused=None):
    """The `Plan` of a validated Config.

    compiled: the `Compiled` step; None: the formulas answer. refused: the TooLarge that the compiler, or a device,
    raised for the step.
    """
    estimate = costs.estimate(cfg, machine)
    used = None
    limit = machine.chip.memory
    flops = estimate.flops
    seconds = estimate.seconds
    overlap = None
    collectives = collectives_of(estimate.sent, {})
    if compiled:
        used = compiled.arguments + compiled.temporaries
        program = Program(compiled.text, cfg, machine)
        flops = program.flops
        seconds = {"matrix products": program.products, "memory": program.others}
        collectives = collectives_of(program.collectives, program.exposed)
        exposed = by_links(collectives, "exposed")
        overlap = Overlap(exposed, program.overlapped(), further_round(program, compiled.text))
    elif refused:
        used, limit = refused.args
    return Plan(
        cfg=cfg,
        machine=machine,
        compiled=compiled,
        mesh=estimate.mesh,
        memory=memory_of(estimate, used),
        memory_limit=limit,
        flops=flops,
        collectives=collectives,
        seconds=seconds | by_links(collectives, "seconds"),
        overlap=overlap,
        bubble=estimate.bubble,
    )


def memory_of(estimate, used):
    """The `Memory` of an `Estimate`. used: bytes in all by a compiler or a device; None: unknown. Bytes that the
    formulas do not explain are then among the temporaries."""
    given = estimate.weights + estimate.optimizer + estimate.batch
    work = estimate.activations + estimate.workspace
    if used is not None:
        work = used - given
    activations = min(estimate.activations, work)
    return Memory(
        weights=estimate.weights,
        optimizer=estimate.optimizer,
        batch=estimate.batch,
        activations=activations,
        temporaries=work - activations,
    )


def collectives_of(sent, exposed):
    """[`Collective`] of {(axes, collective): (bytes, times, seconds)}. exposed: {the same key: seconds}, {} if
    unknown."""
    found = []
    for (axes, kind), amounts in sorted(sent.items()):
        found.append(Collective(axes, kind, *amounts, exposed.get((axes, kind))))
    return found


def by_links(collectives, field):
    """{links: sum of the field} over a list of `Collective`s."""
    sums = Counter()
    for one in collectives:
        sums[links_of(one.axes, one.kind)] += getattr(one, field)
    return dict(sums)


def links_of(axes, collective):
    """The links over which a collective travels, in words."""
    return ("network of " if collective == hlo.ACROSS else "links of ") + "+".join(axes)


def memory_share(cfg, machine):
    """The memory that a step needs by the formulas, as a share of a device's memory without MARGIN. At most 1: it fits,
    even if the formulas are off by that much."""
    room = (1 - MARGIN) * machine.chip.memory
    return make_plan(cfg, machine).memory.total / room


def as_json(plan):
    """A `Plan` as the JSON of --plan_json and of a run's plan.json."""
    memory = plan.memory._asdict() | dict(total=plan.memory.total, limit=plan.memory_limit)
    overlapped = None
    if plan.overlap:
        whole = {"step": plan.overlap.step, "further round": plan.overlap.further_round}
        overlapped = plan.overlap.exposed | whole
    return dict(
        machine=plan.machine.name,
        devices=plan.machine.n,
        mesh=plan.mesh,
        flags=plan.searched,
        compiled=plan.compiled is not None,
        parameters=dict(zip(("total", "active", "embedding"), model.count_params(plan.cfg))),
        tokens=plan.tokens,
        memory=memory,
        fits=plan.fits,
        flops=dict(program=plan.flops, model=plan.model_flops),
        collectives=[one._asdict() for one in plan.collectives],
        seconds=plan.seconds | dict(step=plan.step),
        overlapped=overlapped,
        bubble=plan.bubble,
        tokens_per_second=plan.tokens_per_second,
        mfu=plan.mfu,
        hours=plan.hours,
        chip_hours=plan.hours * plan.machine.n,
        bound=plan.bound,
    )
