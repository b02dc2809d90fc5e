"""How a train step is divided over devices, and the records in which its costs are counted."""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

import collectives
import model
from architectures import architecture
from planning import hlo
from planning.fitted import Fitted, fitted_to
from planning.links import link_seconds
from training import muon


class Step(NamedTuple):
    """The step of a validated Config on a machine. Numbers are of one device."""

    cfg: object
    machine: object
    fit: Fitted
    mesh: dict  # {axis: size}
    batches: int  # that are accumulated
    ticks: int  # of the pipeline, for a batch
    own: int  # microbatches of a batch that a device embeds and computes the loss of
    B: int  # sequences of a microbatch
    tokens: int  # of a microbatch, as attention sees them
    own_tokens: float  # of a microbatch outside attention, where tp splits the sequence
    width: int  # bytes of a number in --model_dtype
    layers: dict  # {kind of layer: (layers that run one after another, times that they run in a batch's forward pass)}
    fsdp: str

    @property
    def gathers_by_layer(self):
        """Whether each layer gathers its own weights, each time that it runs."""
        return self.fsdp in ("full", "exchange")


def divide(cfg, machine):
    """The `Step` of a validated Config on a machine."""
    dp, pp, tp = cfg.run.n_device_axis
    microbatches = cfg.data.microbatches
    # in each tick every stage runs its blocks of one round, see model.pipeline
    ticks = cfg.run.pp_interleave * microbatches + pp - 1
    own = microbatches // pp
    B = cfg.data.train_batch_size // microbatches
    arch = architecture(cfg.model.architecture)
    layers = {}
    for kind, n in arch.numbers(cfg.model).items():
        if kind in arch.stacks:
            layers[kind] = n // (pp * cfg.run.pp_interleave), ticks
        else:  # outside the pipeline
            layers[kind] = n, own
    return Step(
        cfg=cfg,
        machine=machine,
        fit=fitted_to(machine),
        mesh=dict(zip(collectives.AXES, (dp, pp, tp))),
        batches=cfg.run.accumulation_steps,
        ticks=ticks,
        own=own,
        B=B,
        tokens=B * cfg.model.T,
        own_tokens=B * cfg.model.T / tp,
        width=2 if cfg.model.model_dtype == "bfloat16" else 4,
        layers=layers,
        fsdp=model.choose_fsdp(cfg, machine.platform, machine.slices),
    )


class Transfer(NamedTuple):
    """Collectives of one kind along some axes."""

    axes: tuple
    kind: str
    n_bytes: float  # that a device sends, in all of them
    times: float  # how many there are
    seconds: float


def transfers(step, kind, axes, whole, times=1, count=1, n=0):
    """`count` collectives along some axes, or the one named, `times` times in a step: [`Transfer`], or [] where no
    device sends anything.

    Together their arrays have `whole` bytes, all parts counted. n devices take part (0: all along the axes), in rings;
    an all-reduce is a reduce-scatter and an all-gather (arXiv:1909.09756, section 3).
    """
    axes = tuple(a for a in collectives.AXES if a in axes and step.mesh[a] > 1)
    n = n or muon.axes_size(axes, step.mesh)
    if n == 1 or not times * whole:
        return []
    shares = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}
    n_bytes = times * whole * shares.get(kind, (n - 1) / n)
    seconds = link_seconds(step.cfg, step.machine, axes, kind, n_bytes, n)
    return [Transfer(axes, kind, n_bytes, times * count, seconds)]


class Work(NamedTuple):
    """What a device does for one part of a step."""

    flops: float = 0.0  # of matrix products
    attention: float = 0.0  # of these, attention's products of queries, keys and values
    layer_passes: float = 0.0  # of a microbatch through a layer, forward and backward
    product_traffic: float = 0.0  # bytes that matrix products read and write
    other_traffic: float = 0.0  # bytes that all else reads and writes
    transfers: list = []


def total(works):
    """The `Work` of several parts together."""
    sums = [sum(values) for values in zip(*(work[:-1] for work in works))]
    return Work(*sums, [one for work in works for one in work.transfers])


def sent(transfers):
    """{(axes, kind): (bytes, times, seconds)} of a list of `Transfer`s."""
    sums = defaultdict(lambda: np.zeros(3))
    for one in transfers:
        sums[one.axes, one.kind] += one.n_bytes, one.times, one.seconds
    return {key: tuple(values.tolist()) for key, values in sums.items()}


def expert_axes(n_experts, mesh):
    """(axes along which devices hold different experts, axes along which they hold the same one)."""
    stage = {axis: mesh[axis] for axis in collectives.EXPERT_AXES}
    n = math.prod(stage.values())
    # a row of devices holds the same expert
    devices = np.arange(n).reshape(-1, max(1, n // n_experts))
    apart = devices[:, :1].T
    return hlo.axes_of(apart, stage), hlo.axes_of(devices[:1], stage)
