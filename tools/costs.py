"""What a training step costs, by formulas: parameters, floating-point operations, memory, bytes over each mesh axis.

Everything is of one device and one optimizer step unless it says otherwise. Letters are those of model.py; sizes of
tokens and weights follow from model.param_table, so that no shape is written twice. What the formulas leave out (norms,
routing by index, biases) costs memory bandwidth, not matrix products; `Estimate.seconds` takes it as passes over
activations. tests/test_plan.py holds all of this to what XLA compiles.
"""

import dataclasses
import math
from collections import defaultdict
from typing import NamedTuple

import model
import utils


class Chip(NamedTuple):
    """One device, from the vendors' data sheets. Its peak FLOP/s stand in utils.PEAK_FLOPS."""

    kind: str  # as jax names it
    memory: float  # bytes of it that a program may use
    bandwidth: float  # bytes/s of that memory
    link: float  # bytes/s of one link, one way
    clock: float = 0.0  # Hz, in which the TPU compiler counts cycles

    @property
    def peak(self):
        """Dense bfloat16 FLOP/s."""
        return utils.peak_flops(self.kind)


GiB = 2**30
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GiB, 1228e9, 45e9, 1.05e9),
    "v5e": Chip("TPU v5e", 15.75 * GiB, 819e9, 45e9, 1.5e9),
    "v5p": Chip("TPU v5", 95.74 * GiB, 2765e9, 90e9, 1.75e9),
    "v6e": Chip("TPU v6 lite", 31.25 * GiB, 1640e9, 90e9, 1.75e9),
    "A100": Chip("NVIDIA A100", 80e9, 2039e9, 300e9),
    "H100": Chip("NVIDIA H100", 80e9, 3350e9, 450e9),
    "H200": Chip("NVIDIA H200", 141e9, 4800e9, 450e9),
}


def link_seconds(chip, kind, n_bytes, n):
    """Seconds in which one of n devices sends so many bytes in a collective of this kind, nothing overlapped.

    A ring of more than two uses a link's both directions. An all-to-all goes s/4 hops on average along each side of a
    torus of side s; between GPUs one switch is all there is.
    """
    if not chip.clock:
        return n_bytes / chip.link
    hops = 1.0
    if "all-to-all" in kind:
        sides = 1 if n <= 4 else 2 if n <= 16 else 3
        hops = max(1.0, n ** (1 / sides) / 4)
    return n_bytes * hops / (chip.link * (2 if n > 2 else 1))


class Estimate(NamedTuple):
    """Of one step on one device."""

    flops: float  # of matrix products
    scores: float  # of these, attention's products of queries, keys and values
    sent: dict  # {(axes, kind): [bytes, collectives, devices that take part]}
    passes: float  # bytes that what is not a matrix product reads and writes
    weights: float  # bytes, float32
    optimizer: float  # bytes of AdamW's two moments
    batch: float  # bytes of tokens and targets
    activations: float  # bytes kept from the forward for the backward pass
    workspace: float  # bytes of all else: gradients, gathered weights, one layer's and the head's intermediates
    bubble: float  # share of the pipeline's ticks in which a stage idles
    pipeline_share: float  # of the operations that belong to these ticks

    @property
    def memory(self):
        """Bytes in all."""
        return self.weights + self.optimizer + self.batch + self.activations + self.workspace


class Sizes(NamedTuple):
    """How a step is cut up."""

    dp: int
    pp: int
    tp: int
    ticks: int  # in which every stage runs once: GPipe (arXiv:1811.06965, section 2.3)
    own: int  # microbatches that a device embeds and takes the loss of
    B: int  # sequences of a microbatch on one device
    T: int
    bytes: int  # of a number in model_dtype


def sizes(cfg):
    """`Sizes` of a validated Config."""
    (dp, pp, tp), M = cfg.run.n_device_axis, cfg.data.micro_batch_size
    return Sizes(dp, pp, tp, M + pp - 1, M // pp, cfg.data.train_batch_size // M, cfg.model.T,
                 2 if cfg.model.model_dtype == "bfloat16" else 4)  # fmt: skip


def layer_runs(cfg):
    """{kind of layer: (layers on a device, times that each runs forward)}."""
    m, s = cfg.model, sizes(cfg)
    blocks = m.blocks // s.pp
    runs = dict(dense=(blocks * (m.layers_per_block - 1), s.ticks), first=(m.first_layers, s.own),
                mtp=(m.mtp_depth, s.own), **{model.ARCHITECTURES[m.architecture].last: (blocks, s.ticks)})  # fmt: skip
    return {kind: run for kind, run in runs.items() if run[0]}


class Layer(NamedTuple):
    """A layer's forward pass of one microbatch on one device."""

    projections: float  # floating-point operations of products with weights
    scores: float  # of attention
    experts: float  # of routed experts
    last: float  # of the product at its end, which recomputation has no need of
    gathered: float  # channels per token that enter its tensor-parallel regions
    scattered: float  # channels per token that leave them
    to_experts: float  # bytes of the buckets that travel to other devices' experts, there alone
    wide: float  # channels per token that it computes, split over tp
    narrow: float  # and on the residual


def capacity(cfg, tokens):
    """Slots of one expert's bucket, of so many local tokens."""
    m = cfg.model
    return min(tokens, math.ceil(m.capacity_factor * tokens * m.k / m.n_experts)) if m.capacity_factor else tokens


def layer_cost(cfg, kind):
    """`Layer` of a kind of layer; a product [a, b] x [b, c] takes 2abc operations. Attention after DeepSeek-V2,
    arXiv:2405.04434, section 2.1; feed-forward after arXiv:2002.05202; experts after arXiv:2006.16668, section 2.2."""
    m, s = cfg.model, sizes(cfg)
    D, H, K, V, R, Q, T = m.model_dimension, m.n_head / s.tp, m.head_dim, m.value_dim, m.latent_dim, m.q_latent, m.T
    tokens, local = s.B * T, s.B * T / s.tp
    rope = m.dhR if m.moe_rope or kind in ("dense", "first") else 0
    branches = {"swiglu": 2, "gelu": 1}[m.activation]

    if kind == "gpt2":
        projections, enter = 2 * tokens * D * 4 * H * K, D
    else:
        down, enter = Q + R + rope, Q + R + rope + (0 if Q else D)
        up = (Q or D) * H * (K + rope) + R * H * (K + V) + H * V * D
        projections = 2 * local * D * down + 2 * tokens * up
    scores = 2 * tokens * T * H * (K + rope + V)
    wide, narrow = H * (2 * K + 2 * rope + 2 * V), 8 * D

    def feed_forward(F):
        return 2 * tokens * (branches + 1) * D * F / s.tp, 2 * tokens * D * F / s.tp, (branches + 1) * F / s.tp

    experts, travels = 0, 0
    if kind in ("moe", "mtp"):
        C, F = capacity(cfg, int(local)), m.expert_width
        projections += 2 * local * D * m.n_experts + (2 * local * 2 * D * D if kind == "mtp" else 0)
        experts = 2 * m.n_experts * C * (branches + 1) * D * F
        shared, last, more = feed_forward(m.n_shared * F)
        travels = m.n_experts * C * D * s.bytes if model.experts_are_split(cfg) else 0
        wide += more + m.n_experts * C / tokens * ((branches + 1) * F + 2 * D)
        projections, regions = projections + shared, 1 + bool(m.n_shared)
    else:
        regions = 2
        more, last, extra = feed_forward(m.ffn_width)
        projections, wide = projections + more, wide + extra
    return Layer(projections, scores, experts, last, enter + (regions - 1) * D, regions * D, travels, wide, narrow)


def head_cost(cfg):
    """(operations of logits and their two gradients, bytes of the logits that a device holds at once)."""
    m, s = cfg.model, sizes(cfg)
    tokens = s.own * s.B * s.T / s.tp
    return 6 * tokens * m.padded_vocab * m.model_dimension * (1 + m.mtp_depth), min(tokens, 2048) * m.padded_vocab * 4


def local_shape(p, split):
    """(shape of the part of a parameter that one device stores, axes that split it)."""
    dims = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in p.spec]
    shape = [n // math.prod(split[a] for a in axes) for n, axes in zip(p.shape, dims, strict=True)]
    return shape, [a for axes in dims for a in axes]


def tiled(shape, platform):
    """Elements that an array takes: a TPU stores the two dims that it chooses in tiles of 8 x 128."""
    if platform != "tpu" or len(shape) < 2:
        return math.prod(shape)

    def grown(minor, second):
        rows = min(8, 1 << (shape[second] - 1).bit_length())
        return math.ceil(shape[minor] / 128) * 128 / shape[minor] * math.ceil(shape[second] / rows) * rows / shape[second]

    dims = range(len(shape))
    return round(math.prod(shape) * min(grown(a, b) for a in dims for b in dims if a != b))


def estimate(cfg, platform="tpu"):
    """`Estimate` of a validated Config."""
    m, s = cfg.model, sizes(cfg)
    split, A = dict(zip(model.AXES, cfg.run.n_device_axis)), cfg.run.grad_step
    runs, sent = layer_runs(cfg), defaultdict(lambda: [0.0, 0.0, 0])

    def send(kind, axes, whole, times=1):
        """A collective of arrays of `whole` bytes, all parts together, by rings: all-reduce is reduce-scatter and
        all-gather (arXiv:1909.09756, section 3)."""
        axes = tuple(a for a in model.AXES if a in axes and split[a] > 1)
        n = math.prod(split[a] for a in axes)
        if n == 1 or not times:
            return
        if kind == "reduce-scatter" and n == cfg.run.n_devices and platform == "tpu":
            kind = "all-reduce"  # what the TPU compiler makes of one over all devices of a slice
        share = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
        entry = sent[axes, kind]
        entry[0] += A * times * whole * share
        entry[1] += A * times
        entry[2] = n

    # Weights: ZeRO-3 (arXiv:1910.02054, section 5.3): gathered for the forward and again for the backward pass, and
    # gradients reduce-scattered in float32. The forward gathers do not depend on the microbatch, and XLA runs them once.
    stored, gathered_layer, gathered_top, held = 0, defaultdict(float), 0, 0
    for name, part in model.param_table(cfg).items():
        layers, times = runs.get(name, (1, 1))
        for p in leaves(part):
            shape, axes = local_shape(p, split)
            local, stored = math.prod(shape), stored + tiled(shape, platform)
            send("all-reduce", set(model.AXES) - set(axes), 4 * local)  # the gradient of what is stored in copies
            width = s.bytes if p.matrix else 4
            whole = local * math.prod(split[a] for a in p.gather[1]) if p.gather else local
            once = name not in runs or m.fsdp == "hoist"
            if p.gather:
                send("all-gather", p.gather[1], whole * width, 1 if once else 1 + times)
                send("reduce-scatter", p.gather[1], whole * 4, 1 if once else times)
            if name in runs:
                gathered_layer[name] += whole / layers
                held += whole * width
            elif p.matrix:
                gathered_top += whole

    # Layers: tensor and sequence parallelism (arXiv:2205.05198, section 4.2.2), experts (arXiv:2006.16668, section 3.2)
    flops, scores, pipelined, kept = 0, 0, 0, 0
    recomputed = m.remat != "none"
    for kind, (layers, times) in runs.items():
        c, n = layer_cost(cfg, kind), layers * times
        again = {"none": 0, "dots": c.scores + c.experts, "full": c.projections + c.scores + c.experts - c.last}[m.remat]
        layer = n * (3 * (c.projections + c.scores + c.experts) + again)
        flops, scores = flops + layer, scores + n * c.scores * (3 + recomputed)
        pipelined += layer if times == s.ticks else 0
        channel = s.B * s.T * s.bytes
        leave, D = c.scattered, m.model_dimension
        send("all-gather", ("tp",), channel * c.gathered, n * (1 + recomputed))
        send("reduce-scatter", ("tp",), channel * c.gathered, n)
        send("reduce-scatter", ("tp",), channel * leave, n)
        send("reduce-scatter", ("tp",), channel * (leave - D), n * recomputed)
        send("all-gather", ("tp",), channel * leave, n)
        send("all-to-all", ("dp", "tp"), c.to_experts, 2 * n * (2 + recomputed))
        kept += n * s.B * s.T / s.tp * m.model_dimension * s.bytes
    head, logits = head_cost(cfg)
    flops += head

    # Pipeline: a tick's activations go to the next stage and their gradients back; inputs and outputs are shared out
    residual = s.B * s.T / s.tp * m.model_dimension * s.bytes
    send("collective-permute", ("pp",), residual, 2 * s.ticks)
    for kind in ("all-gather", "reduce-scatter"):
        send(kind, ("pp",), cfg.data.micro_batch_size * residual, 2)

    return Estimate(A * flops, A * scores, dict(sent), 0, 4 * stored, 8 * stored, 8 * A * s.own * s.B * s.T / s.tp, kept,
                    0, (s.pp - 1) / s.ticks, pipelined / flops)  # fmt: skip


MATMUL = 0.4  # share of the peak that matrix products reach, as the TPU compiler estimates it


def compute_seconds(e, chip):
    """{part: seconds} of an `Estimate` on a chip, without its links."""
    return {"matrix products": e.flops / chip.peak / MATMUL, "memory": e.passes / chip.bandwidth}


def leaves(part):
    """The `Param`s of a part of a parameter table."""
    return model.jax.tree.leaves(part, is_leaf=model.is_param)
