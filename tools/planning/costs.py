"""What a training step costs, by formulas: parameters, floating-point operations, memory, bytes over each mesh axis.

Everything is of one device and one optimizer step unless it says otherwise. Letters are those of model.py; sizes of
tokens and weights follow from model.param_table, so that no shape is written twice. What the formulas leave out (norms,
routing by index, biases) costs memory bandwidth, not matrix products; `Estimate.seconds` takes it as passes over
activations. tests/test_plan.py holds all of this to what XLA compiles.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

import collectives
import model
from architectures import architecture, parameters
from kernels import loss
from tools.planning import hlo
from training import platforms


class Chip(NamedTuple):
    """One device, from the vendors' data sheets, and what its compiler's programs show. Its peak FLOP/s stand in
    platforms.PEAK_FLOPS."""

    kind: str  # as jax names it
    memory: float  # bytes of it that a program may use
    bandwidth: float  # bytes/s of that memory
    link: float  # bytes/s of one link, one way
    network: float = (
        0.0  # bytes/s that it sends to other TPU slices (jax-ml.github.io/scaling-book, chapter 2)
    )
    clock: float = 0.0  # Hz, in which the TPU compiler counts cycles
    buffer: int = 1824  # tiles, see stays_scattered
    fuses: bool = False  # whether its compiler forms operands of products within them, so that less goes through memory

    @property
    def peak(self):
        """Dense bfloat16 FLOP/s."""
        return platforms.peak_flops(self.kind)


GiB = 2**30
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GiB, 1228e9, 45e9, 6.25e9, 1.05e9),
    "v5e": Chip("TPU v5e", 15.75 * GiB, 819e9, 45e9, 3.125e9, 1.5e9, fuses=True),
    "v5p": Chip("TPU v5", 95.74 * GiB, 2765e9, 90e9, 6.25e9, 1.75e9),
    "v6e": Chip("TPU v6 lite", 31.25 * GiB, 1640e9, 90e9, 12.5e9, 1.75e9, 3648, True),
    "A100": Chip("NVIDIA A100", 80e9, 2039e9, 300e9),
    "H100": Chip("NVIDIA H100", 80e9, 3350e9, 450e9),
    "H200": Chip("NVIDIA H200", 141e9, 4800e9, 450e9),
}


def link_seconds(chip, kind, n_bytes, n):
    """Seconds in which one of n devices sends so many bytes in a collective of this kind, nothing overlapped.

    A ring of more than two uses a link's both directions. An all-to-all goes s/4 hops on average along each side of a
    torus of side s; between GPUs one switch is all there is.
    """
    if kind == hlo.ACROSS:
        return n_bytes / chip.network
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
    operands: float  # bytes that matrix products read and write
    passes: float  # bytes that everything else does
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
    ticks: int  # in which every stage runs a round's blocks once, see model.pipeline
    own: int  # microbatches that a device embeds and takes the loss of
    B: int  # sequences of a microbatch on one device
    T: int
    bytes: int  # of a number in model_dtype


def sizes(cfg):
    """`Sizes` of a validated Config."""
    (dp, pp, tp), M = cfg.run.n_device_axis, cfg.data.microbatches
    return Sizes(
        dp,
        pp,
        tp,
        cfg.run.pp_interleave * M + pp - 1,
        M // pp,
        cfg.data.train_batch_size // M,
        cfg.model.T,
        2 if cfg.model.model_dtype == "bfloat16" else 4,
    )


def layer_runs(cfg):
    """{kind of layer: (layers on a device that run together, times that they run forward)}."""
    m, s = cfg.model, sizes(cfg)
    blocks = m.blocks // (s.pp * cfg.run.pp_interleave)
    runs = dict(
        dense=(blocks * (m.layers_per_block - 1), s.ticks),
        first=(m.first_layers, s.own),
        mtp=(m.mtp_depth, s.own),
        **{architecture(m.architecture).last: (blocks, s.ticks)},
    )
    return {kind: run for kind, run in runs.items() if run[0]}


class Layer(NamedTuple):
    """A layer's forward pass of one microbatch on one device: operations of matrix products, and what travels."""

    projections: float  # products with weights
    scores: float  # attention's products of queries, keys and values, forward
    scores_backward: float
    experts: float  # of routed experts
    experts_again: float  # of these, in the products that recomputation needs
    last: float  # of the product at its end, which recomputation has no need of
    gathered: float  # channels per token that are gathered over tp
    scattered: float  # channels per token that are summed over tp
    heads: float  # channels per token that are exchanged for tokens over tp
    to_experts: float  # bytes of the buckets that travel to other devices' experts, there alone
    kept: (
        float  # channels per token that products with weights give, so that --remat dots keeps them
    )
    wide: float  # channels per token of all its intermediates
    inside: float  # of these, of routed experts


def capacity(cfg, tokens):
    """Slots of one expert's bucket, of so many local tokens."""
    m = cfg.model
    return (
        min(tokens, math.ceil(m.capacity_factor * tokens * m.experts_per_token / m.n_experts))
        if m.capacity_factor
        else tokens
    )


def attention_share(m, platform):
    """Share of T x T scores that the attention kernel computes."""
    if m.attention == "xla":
        return 1.0
    if platform == "tpu" and m.attention == "auto" and m.T % 128 == 0 or m.attention == "splash":
        return (1 + next(b for b in (512, 256, 128) if m.T % b == 0) / m.T) / 2
    blocks = next(n for n in (8, 4, 2, 1) if m.T % n == 0 and (m.T // n >= 64 or n == 1))
    return (1 + 1 / blocks) / 2


def layer_cost(cfg, kind, platform):
    """`Layer` of a kind of layer; a product [a, b] x [b, c] takes 2abc operations. Attention after DeepSeek-V2,
    arXiv:2405.04434, section 2.1; feed-forward after arXiv:2002.05202; experts after arXiv:2006.16668, section 2.2."""
    m, s = cfg.model, sizes(cfg)
    D, H, K, V, R, Q, T = (
        m.model_dimension,
        m.n_head / s.tp,
        m.head_dim,
        m.value_dim,
        m.latent_dim,
        m.q_latent,
        m.T,
    )
    tokens, local = s.B * T, s.B * T / s.tp
    rope = m.rope_dim if m.moe_rope or kind in ("dense", "first") else 0
    branches, split_width = (
        {"swiglu": 2, "gelu": 1}[m.activation],
        m.sequence_parallel == "megatron",
    )

    if kind == "gpt2":
        projections, enter = 2 * tokens * D * 4 * H * K, D
    else:
        enter = Q + R + rope + (0 if Q else D)
        # what rotates queries, and copies the rotary key to every head, is a product too (deepseek.project_queries)
        up = (Q or D) * (K + 2 * rope) + (R + rope) * (K + rope) + R * V + V * D
        projections = 2 * local * D * (Q + R + rope) + 2 * tokens * H * up
    area = 2 * tokens * T * H * attention_share(m, platform)
    forward, backward = K + rope + V, 2 * (K + rope + V)
    if platform == "tpu" and m.attention in ("auto", "splash") and m.T % 128 == 0:
        backward += (
            2 * (K + rope) + V
        )  # each of the kernel's two backward passes computes the scores anew
    heads = H * s.tp * (2 * K + 3 * rope + V)

    experts, back_from_experts, travels, inside = 0, 0, 0, 0
    if kind in ("moe", "mtp"):
        C, F = capacity(cfg, int(local)), m.expert_width
        projections += 2 * local * D * m.n_experts + (2 * local * 2 * D * D if kind == "mtp" else 0)
        experts, back_from_experts = (
            2 * m.n_experts * C * (branches + 1) * D * F,
            2 * m.n_experts * C * D * F,
        )
        width = m.n_shared * F
        travels = m.n_experts * C * D * s.bytes
        inside = m.n_experts * C / local * ((branches + 1) * F + 2 * D)
    else:
        width = m.ffn_width
    more, last = 2 * local * (branches + 1) * D * width, 2 * local * D * width
    regions = split_width * D * bool(more)
    gathered, scattered = enter + regions, regions + split_width * D
    back = (
        D * s.tp if split_width else D
    )  # what a product gives back to the residual, of all tokens or of own ones
    kept = Q + R + rope + heads + branches * width + back
    # and norms, residuals, attention's output, what is gathered
    wide = kept + width + inside + back + gathered * s.tp + 4 * D + m.n_head * V
    return Layer(
        projections + more,
        area * forward,
        area * backward,
        experts,
        experts - back_from_experts,
        last,
        gathered,
        scattered,
        0 if split_width else m.n_head * V,
        travels,
        kept,
        wide,
        inside,
    )


def head_cost(cfg, platform):
    """(operations of all logits and their two gradients, numbers of logits in all, bytes of those held at once)."""
    m, s = cfg.model, sizes(cfg)
    tokens = s.own * s.B * s.T / s.tp
    logits = tokens * m.padded_vocab * (1 + m.mtp_depth)
    held = min(tokens, loss.LOSS_CHUNK[platform]) * m.padded_vocab
    return 6 * logits * m.model_dimension, logits, 4 * held


# --- What travels -------------------------------------------------------------------------------------------------


def near_devices(n):
    """Of n devices, how many gather among themselves first where it goes in two steps (collectives.all_gather); 1: it
    goes in one, n being a prime."""
    return next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)


def steps(n, devices, slices=1):
    """[(devices, distance between neighbours)] of the steps in which n of all devices reduce and scatter along an axis:
    two among all, see collectives.all_gather; on several slices one, since `Traffic.send_across` takes it whole."""
    near = near_devices(n) if n == devices and slices == 1 else 1
    return [(n // near, near), (near, 1)] if near > 1 else [(n, 1)]


class Place(NamedTuple):
    """What of the machine decides which collectives run and what is held."""

    platform: str = "tpu"
    slices: int = 1  # of TPUs, joined by
    across: str = "dp"
    squares: tuple = ()  # (axis, distance) of `steps` among four chips that lie in a plane of 2 x 2
    buffer: int = 1824  # and
    fuses: bool = False  # of its Chip


class Traffic:
    """Collects the collectives of a step in `sent`, as `Estimate` has it."""

    def __init__(self, cfg, place):
        self.split, self.place = dict(zip(collectives.AXES, cfg.run.n_device_axis)), place
        self.devices = cfg.run.n_devices
        self.sent = defaultdict(lambda: [0.0, 0.0, 0])

    def send(self, kind, axes, whole, times=1, count=1, n=0):
        """Collectives, `times` times in a step `count` of them, together of arrays of `whole` bytes with all their
        parts, among n devices (0: all along the axes), by rings: all-reduce is reduce-scatter and all-gather
        (arXiv:1909.09756, section 3). The TPU compiler makes an all-reduce of a reduce-scatter over all devices that
        collectives.all_gather cannot do in two steps."""
        axes = tuple(a for a in collectives.AXES if a in axes and self.split[a] > 1)
        n = n or math.prod(self.split[a] for a in axes)
        if n == 1 or not times * whole:
            return
        at_once = n == self.devices and near_devices(n) == 1
        if kind == "reduce-scatter" and self.place.platform == "tpu" and at_once:
            kind = "all-reduce"
        if self.place.slices > 1 and self.place.across in axes:
            axes, n, whole = self.send_across(kind, axes, n, whole, times, count)
        share = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
        self.add(axes, kind, n, whole * share, times, count)

    def send_across(self, kind, axes, n, whole, times, count):
        """What such a collective moves between slices; returns its axes, devices and bytes inside one."""
        slices, across = self.place.slices, self.place.across
        inside = axes if self.split[across] > slices else tuple(a for a in axes if a != across)
        most = {"all-to-all": whole * (slices - 1) / slices, "collective-permute": whole}
        rest = (
            whole / n * (slices - 1) * (1 + (kind == "all-reduce"))
        )  # each device's part to every other slice
        self.add((across,), hlo.ACROSS, slices, most.get(kind, rest), times, count)
        return inside, n // slices, 0 if kind == "all-to-all" else whole

    def reduce_scatter(self, axis, part, dim, n_bytes, times, count):
        """Reduce-scatters along `dim` to parts of such a shape, `count` of them together of n_bytes, in the steps of
        collectives.all_gather."""
        p = self.place
        for n, distance in steps(self.split[axis], self.devices, p.slices):
            own = [*part[:dim], distance * part[dim], *part[dim + 1 :]]
            kept = p.platform != "tpu" or stays_scattered(
                own, dim, n, p.buffer, (axis, distance) in p.squares
            )
            self.send(
                "reduce-scatter" if kept else "all-reduce",
                (axis,),
                n_bytes * distance * n,
                times,
                count,
                n,
            )

    def add(self, axes, kind, n, n_bytes, times, count):
        if n_bytes:
            entry = self.sent[axes, kind]
            entry[0] += times * n_bytes
            entry[1] += times * count
            entry[2] = n


def stays_scattered(part, dim, n, buffer=Place().buffer, square=False):
    """Whether the TPU compiler keeps a reduce-scatter of float32 among n devices, each of which gets a part of such a
    shape along `dim`, as collectives.all_gather has it; else it makes an all-reduce of it.

    Found by compiling 6,000 single ones (libtpu 0.0.42). Parts are of whole tiles, 8 x 128 numbers. Along the first
    dim they must also fall into two halves of 1, 2, 4, .. equal spans, of which n / 2 + 2 fit a `buffer` of so many
    tiles, and not belong to a `square`, four chips in a plane of 2 x 2; along a middle one there must be more than one
    part before it.
    """
    if dim == len(part) - 1:
        return (
            part[dim] % 128 == 0 or part[dim] < 128
        )  # whole programs lay out smaller ones with another dim last
    if dim or math.prod(part) >= 2**28:
        return part[dim] % 8 == 0 and (not dim or math.prod(part[:dim]) > 1)
    tiles = math.ceil(part[0] / 8) * math.ceil(math.prod(part[1:]) / 128)
    spans = 1 << (math.ceil(tiles * (n / 2 + 2) / buffer) - 1).bit_length()
    return tiles % (2 * spans) == 0 and not square


def expert_axes(E, split):
    """Axes along which the devices differ that hold different experts, and those that hold the same one; see
    collectives.expert_groups."""
    at = np.arange(split["dp"] * split["tp"])
    r = max(1, len(at) // E)
    at, groups = np.stack([at // split["tp"], at % split["tp"]]), at.reshape(-1, r)
    return [
        tuple(
            a
            for a, n in zip(collectives.EXPERT_AXES, (at[:, g] != at[:, g[0]][:, None]).any(1))
            if n
        )
        for g in (groups[:, 0], groups[0])
    ]


# --- Weights ------------------------------------------------------------------------------------------------------


def local_shape(p, split):
    """(shape of the part of a parameter that one device stores, axes that split it)."""
    dims = [
        () if entry is None else (entry,) if isinstance(entry, str) else entry for entry in p.spec
    ]
    shape = [n // math.prod(split[a] for a in axes) for n, axes in zip(p.shape, dims, strict=True)]
    return shape, [a for axes in dims for a in axes]


def tiled(shape):
    """Elements that an array takes on a TPU, which stores the two dims that it chooses in tiles of 8 x 128."""
    if len(shape) < 2:
        return math.prod(shape)

    def grown(n, to):
        return math.ceil(n / to) * to / n

    def tile(minor, second):
        return grown(shape[minor], 128) * grown(
            shape[second], min(8, 1 << (shape[second] - 1).bit_length())
        )

    dims = range(len(shape))
    return round(math.prod(shape) * min(tile(a, b) for a in dims for b in dims if a != b))


def weights_cost(cfg, traffic):
    """(elements stored; elements of layers' weights when gathered, of all and of the largest layer; those of all times
    the runs that give them a gradient).

    ZeRO-3 (arXiv:1910.02054, section 5.3): with --fsdp full weights are gathered for every layer's forward pass, and
    again where the backward pass computes that anew; else once a step, since XLA takes out of the loop of gradient
    accumulation what does not depend on it, but for TPUs once a batch. Gradients are reduce-scattered in float32.
    """
    m, s, split, A = cfg.model, sizes(cfg), traffic.split, cfg.run.accumulation_steps
    tpu, stacks = traffic.place.platform == "tpu", architecture(m.architecture).stacks
    stored, held, added, runs, batches = 0, {}, 0, layer_runs(cfg), A if tpu else 1
    for name, part in model.param_table(cfg).items():
        layers, times = runs.get(name, (1, 1))
        times /= cfg.run.pp_interleave if name in stacks else 1  # each time those of one round
        layers *= cfg.run.pp_interleave if name in stacks else 1
        once = name not in runs or m.fsdp != "full"
        stacked = 1 + (name == "dense") + (name in stacks and cfg.run.pp_interleave > 1)
        again = A * times * (1 + (m.remat != "none"))
        forth, back, count = (batches, A, 1) if once else (again, A * times, layers)
        for p in model.jax.tree.leaves(part, is_leaf=parameters.is_param):
            shape, axes = local_shape(p, split)
            whole, stored = math.prod(shape), stored + (tiled(shape) if tpu else math.prod(shape))
            width = s.bytes if p.matrix else 4
            # of what is stored in copies; the TPU compiler takes it out of the loop of gradient accumulation
            traffic.send(
                "all-reduce", set(collectives.AXES) - set(axes), 4 * whole, 1 if tpu else A
            )
            if (
                p.expert and p.gather
            ):  # slices of all experts are exchanged for slices of one, and these gathered
                (apart, together), n = expert_axes(m.n_experts, split), m.n_experts
                traffic.send("all-to-all", apart, whole * width, forth, count, n)
                traffic.send("all-to-all", apart, whole * 4, back, count, n)
                n = math.prod(split[a] for a in p.gather[1]) // n
                whole *= n
                traffic.send("all-gather", together, whole * width, forth, count, n)
                traffic.send("reduce-scatter", together, whole * 4, back, count, n)
            elif p.gather:
                for axis in reversed(p.gather[1]):
                    own = shape[0 if once else stacked :]
                    traffic.reduce_scatter(
                        axis, own, len(own) + p.gather[0], 4 * whole, back, count
                    )
                    shape[p.gather[0]] *= split[axis]
                    whole *= split[axis]
                    traffic.send("all-gather", (axis,), whole * width, forth, count)
            if name in runs:
                held[name] = held.get(name, 0) + whole
                added += whole * A * times
    largest = max(n / runs[name][0] for name, n in held.items())
    return stored, sum(held.values()), largest / cfg.run.pp_interleave, added


# --- The step -----------------------------------------------------------------------------------------------------


def layers_cost(cfg, platform, traffic):
    """(operations of all layers, of these in attention, of these in the pipeline's ticks; bytes that the forward passes
    of a batch leave for the backward passes; bytes of all layers' intermediates, and of the widest layer's).

    Tensor and sequence parallelism (arXiv:2205.05198, section 4.2.2, or arXiv:2309.14509, section 3.1) and experts
    (arXiv:2006.16668, section 3.2): every collective runs in the forward pass, again where that is recomputed, and its
    transpose in the backward pass.
    """
    m, s, again = cfg.model, sizes(cfg), cfg.model.remat != "none"
    flops, scores, pipelined, kept, touched, widest = 0, 0, 0, 0, 0, 0
    channel, residual = s.B * s.T * s.bytes, m.model_dimension
    for kind, (layers, times) in layer_runs(cfg).items():
        c, n = layer_cost(cfg, kind, platform), cfg.run.accumulation_steps * layers * times
        batched = c.scores + c.experts_again
        recomputed = {"none": 0, "dots": batched, "full": c.projections + batched - c.last}[m.remat]
        layer = n * (3 * (c.projections + c.experts) + c.scores + c.scores_backward + recomputed)
        flops, scores = flops + layer, scores + n * (c.scores * (1 + again) + c.scores_backward)
        pipelined += layer if times == s.ticks else 0
        last = residual if c.scattered else 0  # which recomputation has no need of
        regions = c.scattered - last
        # see stays_scattered: one sequence is a lone dim; latents are laid out with T last and stay as they are
        summed = "all-reduce" if platform == "tpu" and s.B == 1 else "reduce-scatter"
        traffic.send("all-gather", ("tp",), channel * c.gathered, n * (1 + again))
        traffic.send("reduce-scatter", ("tp",), channel * (c.gathered - regions), n)
        traffic.send(summed, ("tp",), channel * (c.scattered + regions), n)
        traffic.send(summed, ("tp",), channel * regions, n * again)
        traffic.send("all-gather", ("tp",), channel * c.scattered, n)
        traffic.send("all-to-all", ("tp",), channel * c.heads / s.tp, n * (2 + again))
        if c.to_experts:
            apart, spread = (
                expert_axes(m.n_experts, traffic.split)[0],
                min(m.n_experts, s.dp * s.tp),
            )
            gates = c.to_experts / m.model_dimension  # a number a slot, there alone
            traffic.send("all-to-all", apart, c.to_experts, n * (4 + again), 1, spread)
            traffic.send("all-to-all", apart, gates, n * (2 + again), 1, spread)
        of_all = KEPT[m.architecture] * (c.wide - c.inside) + KEPT["experts"] * c.inside
        keep = {"none": of_all, "dots": c.kept + residual, "full": residual}[m.remat]
        kept, wide = kept + layers * times * channel / s.tp * keep, channel / s.tp * c.wide
        touched, widest = touched + n * wide, max(widest, wide)
    return flops, scores, pipelined, kept, touched, widest


# Fitted to what the TPU compiler says of the README's configurations. Memory:
# channels that --remat none keeps, per channel of a layer's intermediates: in float32 where biases are added
KEPT = dict(deepseek=1.6, experts=2.5, gpt2=3.0)
LAYER = (
    1.4  # bytes held while the widest layer's gradients are computed, per byte of its intermediates
)
LOGITS = (
    1.5,
    1.0,
)  # copies of the logits that are held at once; here and below, the second where the compiler fuses
# Time, in bytes read and written per one of each:
OPERANDS, WEIGHTS = (
    5.2,
    22.0,
)  # intermediates (bytes) and gathered weights, every time, by matrix products
PASSES, SUMS = (3.7, 2.8), (12.0, 9.0)  # the same, by all else
STACKED = dict(
    none=(11.0, 3.0), dots=(26.0, 6.0), full=(29.0, 29.0)
)  # what is kept (bytes), by --remat
HEAD = 47.0, 35.0  # logits (numbers)


def workspace(cfg, fuses, stored, held, largest, kept, widest, logits, logits_held):
    """Bytes that are held beside weights, moments, the batch and what is `kept` for the backward pass, where they are
    most: while there are logits, in a layer's backward pass, or when the embedding's two gradients are added up."""
    s, again = sizes(cfg), cfg.run.accumulation_steps > 1
    embedding = cfg.model.padded_vocab * cfg.model.model_dimension
    several = 4 * logits > logits_held  # chunks of logits
    if (
        cfg.model.fsdp == "full"
    ):  # one layer at a time: its weights, the next one's, and its gradient
        gathered, gradients = 2 * s.bytes * largest, 4 * (largest + stored)
    else:
        gathered, gradients = s.bytes * held, 4 * held
    one_of_several = (
        kept / s.ticks * (s.ticks > 1)
    )  # what is kept of a microbatch is copied out of all that is kept
    return 4 * again * (held if cfg.model.fsdp == "none" else stored) + max(
        gathered + (s.bytes + 4 * several) * embedding + LOGITS[fuses] * logits_held,
        gathered + s.bytes * embedding + gradients + one_of_several + LAYER * widest,
        gradients + (s.bytes + 4) * embedding - kept,
    )


def estimate(cfg, place=Place()):
    """`Estimate` of a validated Config."""
    s, A, platform, fuses, traffic = (
        sizes(cfg),
        cfg.run.accumulation_steps,
        place.platform,
        place.fuses,
        Traffic(cfg, place),
    )
    stored, held, largest, added = weights_cost(cfg, traffic)
    flops, scores, pipelined, kept, touched, widest = layers_cost(cfg, platform, traffic)
    head, logits, logits_held = head_cost(cfg, platform)
    # a tick's activations go to the next stage and their gradients back; inputs and outputs are shared out
    tick = s.B * s.T / s.tp * cfg.model.model_dimension * s.bytes
    traffic.send("collective-permute", ("pp",), tick, A * 2 * s.ticks)
    traffic.send("all-gather", ("pp",), cfg.data.microbatches * tick, A)
    traffic.send("all-to-all", ("pp",), cfg.data.microbatches * tick, A * 3)
    return Estimate(
        flops=flops + A * head,
        scores=scores,
        sent=dict(traffic.sent),
        operands=OPERANDS * touched + WEIGHTS * added,
        passes=PASSES[fuses] * touched
        + SUMS[fuses] * added
        + STACKED[cfg.model.remat][fuses] * A * kept
        + HEAD[fuses] * A * logits,
        weights=4 * stored,
        optimizer=8 * stored,
        batch=8 * A * s.own * s.B * s.T / s.tp,
        activations=kept,
        workspace=workspace(cfg, fuses, stored, held, largest, kept, widest, logits, logits_held),
        bubble=(s.pp - 1) / s.ticks,
        pipeline_share=pipelined / (flops + A * head),
    )


def compute_seconds(e, chip):
    """{part: seconds} of an `Estimate` on a chip, without its links: matrix products at its peak, attention's at half
    of it, and memory at its bandwidth."""
    return {
        "matrix products": (e.flops + e.scores) / chip.peak + e.operands / chip.bandwidth,
        "memory": e.passes / chip.bandwidth,
    }
