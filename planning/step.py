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
    """The step of a validated Config on a machine. Numbers are those of one device."""

    cfg: object
    machine: object
    fit: Fitted
    mesh: dict  # {axis: size}
    batches: int  # batches whose gradients are accumulated
    ticks: int  # ticks of the pipeline in a batch
    own: int  # microbatches of a batch that a device embeds, and whose loss it computes
    B: int  # sequences of a microbatch
    tokens: int  # tokens of a microbatch in attention, which sees whole sequences
    own_tokens: float  # tokens of a microbatch elsewhere, where tp splits the sequence
    width: int  # bytes of a number in --model_dtype
    # {kind of layer: (layers that run one after another, times that they run in a batch's forward pass)}
    layers: dict
    fsdp: str

    @property
    def gathers_by_layer(self):
        """Whether each layer gathers its weights each time that it runs."""
        return self.fsdp in ("full", "exchange")


def divide(cfg, machine):
    """The `Step` of a validated Config on a machine."""
    dp, pp, tp = cfg.run.n_device_axis
    microbatches = cfg.data.microbatches
    # in each tick, every stage runs its blocks of one round (model.pipeline)
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
        fit=fitted_to(machine, cfg.has_loop(machine.platform)),
        mesh=dict(zip(collectives.AXES, (dp, pp, tp))),
        batches=cfg.run.accumulation_steps,
        ticks=ticks,
        own=own,
        B=B,
        tokens=B * cfg.model.T,
        own_tokens=B * cfg.model.T / tp,
        width=4 if cfg.model.model_dtype == "float32" else 2,
        layers=layers,
        fsdp=model.choose_fsdp(cfg, machine.platform, machine.slices),
    )


class Transfer(NamedTuple):
    """Equal collectives along some axes."""

    axes: tuple
    collective: str
    n_bytes: float  # bytes that a device sends in all of them
    times: float  # how many of them there are in a step
    seconds: float


def transfers(step, collective, axes, whole, times=1, count=1, n=0):
    """[`Transfer`] of `count` collectives, `times` times in a step; [] where no device sends anything.

    axes: one or several. whole: bytes of the arrays of the `count` collectives, all parts together. n: devices that
    take part, in rings; 0: all along the axes. An all-reduce counts as a reduce-scatter and an all-gather
    (arXiv:1909.09756, section 3).
    """
    axes = tuple(a for a in collectives.AXES if a in axes and step.mesh[a] > 1)
    n = n or muon.axes_size(axes, step.mesh)
    if n == 1 or not times * whole:
        return []
    shares = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}
    n_bytes = times * whole * shares.get(collective, (n - 1) / n)
    seconds = link_seconds(step.cfg, step.machine, axes, collective, n_bytes, n)
    return [Transfer(axes, collective, n_bytes, times * count, seconds)]


class Work(NamedTuple):
    """The work of a device for one part of a step."""

    flops: float = 0.0  # of matrix products
    attention: float = 0.0  # the part of these in attention's products of queries, keys and values
    attention_traffic: float = 0.0  # bytes that these read and write where scores are in memory
    layer_passes: float = 0.0  # passes of a microbatch through a layer, forward and backward as one
    product_traffic: float = 0.0  # bytes that matrix products read and write
    other_traffic: float = 0.0  # bytes that all other operations read and write
    transfers: list = []


def total(works):
    """The sum of several `Work`s."""
    sums = [sum(values) for values in zip(*(work[:-1] for work in works))]
    return Work(*sums, [one for work in works for one in work.transfers])


def sent(transfers):
    """{(axes, collective): (bytes, times, seconds)}, the sums over a list of `Transfer`s."""
    sums = defaultdict(lambda: np.zeros(3))
    for one in transfers:
        sums[one.axes, one.collective] += one.n_bytes, one.times, one.seconds
    return {key: tuple(values.tolist()) for key, values in sums.items()}


def expert_axes(n_experts, mesh):
    """(axes along which devices hold different experts, axes along which they hold slices of the same one)."""
    stage = {axis: mesh[axis] for axis in collectives.EXPERT_AXES}
    n = math.prod(stage.values())
    # a row of devices holds the same expert
    devices = np.arange(n).reshape(-1, max(1, n // n_experts))
    apart = devices[:, :1].T
    return hlo.axes_of(apart, stage), hlo.axes_of(devices[:1], stage)
