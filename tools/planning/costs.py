"""What a training step costs, by formulas: parameters, floating-point operations, memory, bytes over each mesh axis.

Everything is of one device and one optimizer step unless it says otherwise. Letters are those of model.py. Sizes of
weights follow from model.param_table, what a layer does to a token from `Architecture.layer_cost`. The formulas count
matrix products and collectives exactly; all else (norms, routing by index, biases) costs memory traffic, which
`Estimate.passes` takes as a multiple of the activations. tests/test_plan.py compares all of it with what XLA compiles.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np

import collectives
import model
from architectures import architecture
from architectures.experts import capacity, choose_transport
from architectures.parameters import is_param
from kernels import attention, grouped, loss
from tools.planning import hlo
from training import chips, muon


class Place(NamedTuple):
    """What decides which collectives run and what is held in memory: the machine, as far as formulas look at it."""

    platform: str = "tpu"
    kernels: str = ""  # the platform whose attention kernels run where that is another, see attention.platform_of
    slices: int = 1  # TPU slices, which only a network joins
    across: str = "dp"  # mesh axis that goes from slice to slice
    squares: tuple = ()  # (axis, distance) of `scatter_steps` among four chips in a plane of 2 x 2
    buffer: int = chips.BUFFER  # of the Chip
    fuses: bool = False  # of the Chip


class Estimate(NamedTuple):
    """Of one step on one device."""

    flops: float  # of matrix products
    scores: float  # of these, attention's products of queries, keys and values
    sent: dict  # {(axes, kind): [bytes, collectives, devices that take part]}
    operands: float  # memory traffic of matrix products, bytes
    passes: float  # memory traffic of everything else, bytes
    weights: float  # bytes, float32
    optimizer: float  # bytes of AdamW's two moments, or of Muon's one
    batch: float  # bytes of tokens and targets
    activations: float  # bytes kept from the forward pass for the backward pass
    workspace: float  # bytes of all else: gradients, gathered weights, one layer's and the head's intermediates
    bubble: float  # share of the pipeline's ticks in which a stage idles
    pipeline_share: float  # share of the operations that belong to these ticks

    @property
    def memory(self):
        """Peak memory in bytes."""
        return self.weights + self.optimizer + self.batch + self.activations + self.workspace


class Sizes(NamedTuple):
    """How a step is cut up."""

    dp: int
    pp: int
    tp: int
    ticks: int  # in each, every stage runs its blocks of one round, see model.pipeline
    own: int  # microbatches that a device embeds and takes the loss of
    B: int  # sequences of a microbatch on one device
    T: int
    bytes: int  # of a number in model_dtype

    @property
    def tokens(self):
        """Tokens of a microbatch that attention sees on a device."""
        return self.B * self.T

    @property
    def own_tokens(self):
        """Tokens of a microbatch on a device outside attention, tp splitting the sequence."""
        return self.B * self.T / self.tp


def sizes(cfg):
    """`Sizes` of a validated Config."""
    dp, pp, tp = cfg.run.n_device_axis
    microbatches = cfg.data.microbatches
    return Sizes(
        dp=dp,
        pp=pp,
        tp=tp,
        ticks=cfg.run.pp_interleave * microbatches + pp - 1,
        own=microbatches // pp,
        B=cfg.data.train_batch_size // microbatches,
        T=cfg.model.T,
        bytes=2 if cfg.model.model_dtype == "bfloat16" else 4,
    )


def layer_runs(cfg):
    """{kind of layer: (layers on a device that run one after another, times that they run forward)}."""
    m, s = cfg.model, sizes(cfg)
    arch, rounds = architecture(m.architecture), cfg.run.pp_interleave
    runs = {}
    for kind, layers in arch.numbers(m).items():
        piped = kind in arch.stacks
        runs[kind] = (layers // (s.pp * rounds), s.ticks) if piped else (layers, s.own)
    return runs


# --- What travels -------------------------------------------------------------------------------------------------


def link_seconds(chip, kind, n_bytes, n, hosts=1):
    """Seconds in which one of n devices sends so many bytes in a collective of this kind, nothing overlapped.

    A ring of more than two TPUs uses both directions of a link. In an all-to-all along a torus of side s, a byte goes
    s/4 hops on average along each dim. The GPUs of a host have one switch between them; on several `hosts` each GPU has
    an adapter to the others, and what a ring sends to the next host is shared out among those of its host.
    """
    if kind == hlo.ACROSS:
        return n_bytes / chip.network
    if chip.gpu:
        of_host = n / hosts  # GPUs
        if hosts == 1:
            leaves = 0
        elif kind == "all-to-all":
            leaves = n_bytes * (n - of_host) / (n - 1)
        elif kind == "collective-permute":
            leaves = n_bytes
        else:
            leaves = n_bytes / of_host
        return max(n_bytes / chip.link, leaves / chip.network)
    hops = 1.0
    if "all-to-all" in kind:
        hops = max(1.0, n ** (1 / torus_dims(n)) / 4)
    directions = 2 if n > 2 else 1
    return n_bytes * hops / (chip.link * directions)


def hosts_along(axes, shape, hosts):
    """Number of hosts on which the devices along some axes of a mesh of such a shape lie, the first ones, say."""
    host = np.arange(math.prod(shape)).reshape(shape) * hosts // math.prod(shape)
    along = tuple(slice(None) if axis in axes else 0 for axis in collectives.AXES)
    return len(np.unique(host[along]))


def torus_dims(n):
    """Dims of a torus of n chips."""
    if n <= 4:
        return 1
    return 2 if n <= 16 else 3


def scatter_steps(n, devices, slices=1, platform="tpu"):
    """[(devices, distance between neighbors)] of the steps in which n devices along an axis reduce and scatter.

    Two steps where these are all devices of one slice, see collectives.gather_steps; else one. On several slices it is
    one too, since `Traffic.send_across` takes it whole.
    """
    near = 1
    if n == devices and slices == 1 and platform != "gpu":
        near = collectives.near_devices(n)
    if near == 1:
        return [(n, 1)]
    return [(n // near, near), (near, 1)]


def stays_scattered(part, dim, n, buffer=chips.BUFFER, square=False):
    """Whether the TPU compiler keeps a reduce-scatter of float32 as collectives.reduce_scatter writes it; else it makes
    an all-reduce of it. Each of n devices gets a part of shape `part`, cut along `dim`.

    Found by compiling 6,000 single ones (libtpu 0.0.42). Parts must consist of whole tiles, 8 x 128 numbers. Along the
    first dim they must also fall into two halves of 1, 2, 4, .. equal spans, of which n / 2 + 2 fit a `buffer` of so
    many tiles, and must not belong to a `square`, four chips in a plane of 2 x 2. Along a middle dim there must be more
    than one part before it. collectives.in_tiles makes them whole there.
    """
    if dim == len(part) - 1 > 1 and part[dim] % 8:  # as collectives.all_gather moves it
        return stays_scattered([part[0], part[dim], *part[1:dim]], 1, n, buffer, square)
    if dim == len(part) - 1:
        # whole programs lay out smaller ones with another dim last
        return part[dim] % 128 == 0 or part[dim] < 128
    if dim:
        rows, _ = collectives.in_tiles(part[dim], math.prod(part[dim + 1 :]), dim)
        return rows % 8 == 0 and math.prod(part[:dim]) > 1
    if math.prod(part) >= 2**28:
        return part[0] % 8 == 0
    tiles = math.ceil(part[0] / 8) * math.ceil(math.prod(part[1:]) / 128)
    spans = 1 << (math.ceil(tiles * (n / 2 + 2) / buffer) - 1).bit_length()
    return tiles % (2 * spans) == 0 and not square


def differing_axes(devices, tp):
    """Axes of dp x tp along which devices differ that are numbered row by row."""
    dp_index, tp_index = np.divmod(devices, tp)
    differ = {"dp": np.ptp(dp_index) > 0, "tp": np.ptp(tp_index) > 0}
    return tuple(axis for axis in collectives.EXPERT_AXES if differ[axis])


def expert_axes(E, split):
    """(axes along which devices differ that hold different experts, axes of those that hold the same expert); see
    collectives.expert_groups."""
    n = split["dp"] * split["tp"]
    devices = np.arange(n).reshape(-1, max(1, n // E))  # a row of devices holds the same expert
    return differing_axes(devices[:, 0], split["tp"]), differing_axes(devices[0], split["tp"])


class Traffic:
    """Collects the collectives of a step in `sent`, as `Estimate` has it."""

    def __init__(self, cfg, place):
        self.split = dict(zip(collectives.AXES, cfg.run.n_device_axis))
        self.place = place
        self.devices = cfg.run.n_devices
        self.sent = defaultdict(lambda: [0.0, 0.0, 0])

    def send(self, kind, axes, whole, times=1, count=1, n=0):
        """Add collectives: `count` of them, `times` times in a step.

        Together their arrays have `whole` bytes, all parts counted. n devices take part (0: all along the axes), in
        rings; an all-reduce is a reduce-scatter and an all-gather (arXiv:1909.09756, section 3). Where
        collectives.all_gather cannot take two steps among all devices, the TPU compiler turns its transpose, a
        reduce-scatter, into an all-reduce.
        """
        axes = tuple(a for a in collectives.AXES if a in axes and self.split[a] > 1)
        n = n or math.prod(self.split[a] for a in axes)
        if n == 1 or not times * whole:
            return
        one_step_of_all = n == self.devices and collectives.near_devices(n) == 1
        if kind == "reduce-scatter" and self.place.platform == "tpu" and one_step_of_all:
            kind = "all-reduce"
        if self.place.slices > 1 and self.place.across in axes:
            axes, n, whole = self.send_across(kind, axes, n, whole, times, count)
        shares = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}
        share = shares.get(kind, (n - 1) / n)
        self.add(axes, kind, n, whole * share, times, count)

    def send_across(self, kind, axes, n, whole, times, count):
        """Add what such a collective moves between slices. Returns the axes, devices and bytes of it inside one."""
        slices, across = self.place.slices, self.place.across
        if kind == "all-to-all":
            n_bytes = whole * (slices - 1) / slices
        elif kind == "collective-permute":
            n_bytes = whole
        else:  # each device sends its part to every other slice, in an all-reduce twice
            n_bytes = whole / n * (slices - 1) * (1 + (kind == "all-reduce"))
        self.add((across,), hlo.ACROSS, slices, n_bytes, times, count)
        if self.split[across] == slices:
            axes = tuple(a for a in axes if a != across)
        return axes, n // slices, 0 if kind == "all-to-all" else whole

    def reduce_scatter(self, axis, part, dim, n_bytes, times, count):
        """Add reduce-scatters along `dim` to parts of shape `part`, `count` of them together of n_bytes, in the steps
        of collectives.all_gather."""
        place = self.place
        along = self.split[axis]
        for n, distance in scatter_steps(along, self.devices, place.slices, place.platform):
            own = [*part[:dim], distance * part[dim], *part[dim + 1 :]]
            square = (axis, distance) in place.squares
            kind = "reduce-scatter"
            if place.platform == "tpu" and not stays_scattered(own, dim, n, place.buffer, square):
                kind = "all-reduce"
            self.send(kind, (axis,), n_bytes * distance * n, times, count, n)

    def add(self, axes, kind, n, n_bytes, times, count):
        """Add `count` collectives, `times` times, in which each device sends n_bytes."""
        if n_bytes:
            entry = self.sent[axes, kind]
            entry[0] += times * n_bytes
            entry[1] += times * count
            entry[2] = n


# --- Weights ------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Numbers of weights on one device."""

    stored: int  # in parts, padding of TPU tiles included
    moments: int  # of the optimizer, likewise
    gathered: int  # of all its layers, whole
    largest: float  # of its largest layer, whole
    used: float  # of its layers, every time that they get a gradient


class Use(NamedTuple):
    """How often a step gathers the weights of a stack of layers."""

    forward: float  # times that they are gathered
    backward: float  # times that their gradients are reduced and scattered
    count: int  # layers each time, in a collective of their own
    leading: int  # dims before those of the weights that are gathered at once
    gradients: float  # times that they get a gradient


def local_shape(p, split):
    """(shape of the part of a parameter that one device stores, axes that split it)."""
    shape, axes = [], []
    for n, entry in zip(p.shape, p.spec, strict=True):
        if entry is None:
            entry = ()
        elif isinstance(entry, str):
            entry = (entry,)
        shape.append(n // math.prod(split[axis] for axis in entry))
        axes += entry
    return shape, axes


def tiled(shape):
    """Numbers that an array takes on a TPU, which stores two dims of its choice in tiles of 8 x 128."""
    if len(shape) < 2:
        return math.prod(shape)

    def padded(n, multiple):
        return math.ceil(n / multiple) * multiple / n

    def growth(minor, second):
        rows = min(8, 1 << (shape[second] - 1).bit_length())
        return padded(shape[minor], 128) * padded(shape[second], rows)

    dims = range(len(shape))
    least = min(growth(a, b) for a in dims for b in dims if a != b)
    return round(math.prod(shape) * least)


def stack_use(cfg, name, platform):
    """`Use` of an entry of model.param_table: a stack of layers, or what stands outside layers.

    ZeRO-3 (arXiv:1910.02054, section 5.3): with --fsdp full weights are gathered for every layer's forward pass, and
    again where the backward pass recomputes it. Otherwise they are gathered once a step, since XLA moves out of the
    loop of gradient accumulation what does not depend on it; the TPU compiler does not: there it is once a batch.
    """
    m, accumulation = cfg.model, cfg.run.accumulation_steps
    layers, times = layer_runs(cfg).get(name, (1, 1))
    arch = architecture(m.architecture)
    in_rounds = name in arch.stacks
    if in_rounds:
        layers *= cfg.run.pp_interleave
        times /= cfg.run.pp_interleave
    gradients = accumulation * times
    if m.fsdp != "full" or name not in layer_runs(cfg):
        forward = accumulation if platform == "tpu" else 1
        return Use(forward, backward=accumulation, count=1, leading=0, gradients=gradients)
    leading = 1 + (name == arch.inner) + (in_rounds and cfg.run.pp_interleave > 1)
    forward = gradients * (2 if m.remat != "none" else 1)  # once more where it is recomputed
    return Use(forward, backward=gradients, count=layers, leading=leading, gradients=gradients)


def gather_cost(p, shape, use, width, traffic, E):
    """Add the collectives that gather a parameter, of which a device stores `shape`, in numbers of `width` bytes, and
    those that reduce and scatter its gradient in float32. Returns its size when gathered."""
    split = traffic.split
    whole = math.prod(shape)
    if not p.gather:
        return whole
    dim, axes = p.gather
    if p.expert:  # slices of all experts are exchanged for slices of one, and these gathered
        apart, together = expert_axes(E, split)
        traffic.send("all-to-all", apart, whole * width, use.forward, use.count, E)
        traffic.send("all-to-all", apart, whole * 4, use.backward, use.count, E)
        n = math.prod(split[a] for a in axes) // E
        whole *= n
        traffic.send("all-gather", together, whole * width, use.forward, use.count, n)
        traffic.send("reduce-scatter", together, whole * 4, use.backward, use.count, n)
        return whole
    shape = list(shape)
    for axis in reversed(axes):
        part = shape[use.leading :]
        traffic.reduce_scatter(axis, part, len(part) + dim, 4 * whole, use.backward, use.count)
        shape[dim] *= split[axis]
        whole *= split[axis]
        traffic.send("all-gather", (axis,), whole * width, use.forward, use.count)
    return whole


def weights_cost(cfg, traffic):
    """`Weights`; adds what gathers them and sums their gradients to `traffic`."""
    s, runs = sizes(cfg), layer_runs(cfg)
    on_tpu = traffic.place.platform == "tpu"
    with_muon = cfg.optimizer.optimizer == "muon"
    stored, moments, used, gathered = 0, 0, 0, defaultdict(int)
    for name, stack in model.param_table(cfg).items():
        use = stack_use(cfg, name, traffic.place.platform)
        for p in jax.tree.leaves(stack, is_leaf=is_param):
            shape, axes = local_shape(p, traffic.split)
            own = tiled(shape) if on_tpu else math.prod(shape)
            stored += own
            moments += own if with_muon and p.hidden else 2 * own
            # gradients of copies are summed; the TPU compiler moves that out of the loop of gradient accumulation
            copies = set(collectives.AXES) - set(axes)
            times = 1 if on_tpu else cfg.run.accumulation_steps
            traffic.send("all-reduce", copies, 4 * math.prod(shape), times)
            width = s.bytes if p.matrix else 4
            whole = gather_cost(p, shape, use, width, traffic, cfg.model.n_experts)
            if name in runs:
                gathered[name] += whole
                used += whole * use.gradients
    largest = max(n / runs[name][0] for name, n in gathered.items())
    return Weights(stored, moments, sum(gathered.values()), largest / cfg.run.pp_interleave, used)


# --- Layers -------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer's forward pass of one microbatch on one device: operations of matrix products, and what travels."""

    projections: float  # operations of products with weights, routed experts' left out
    last_product: float  # of these, of the product at its end
    needs_last: bool  # whether recomputation needs what the layer ends with: multi-token prediction normalizes it
    scores: float  # operations of attention's products of queries, keys and values
    scores_backward: float  # operations of the same in the backward pass
    experts: float  # operations of routed experts
    experts_backward: float  # operations of the same in the backward pass
    experts_again: float  # operations of the same in recomputation
    gathered: float  # channels per token that are gathered over tp for attention
    into_feed_forward: (
        float  # of the residual that are gathered over tp, and summed over it afterwards
    )
    out_of_attention: float  # of the residual that are summed over tp
    exchanged: float  # channels per token that are exchanged for tokens over tp
    to_experts: float  # bytes of the buckets that travel to other devices' experts, one way
    shared_tokens: (
        float  # bytes of the tokens that devices gather for their experts, and add up afterwards
    )
    kept: float  # channels per token that --remat dots keeps: what products with weights give
    intermediates: float  # channels per token of all that it computes
    in_experts: float  # of these, in routed experts
    of_others: float  # of these, in partial sums of other devices' tokens


def score_operations(cost, m, s, platform):
    """(forward, backward) operations of a layer's products of queries, keys and values."""
    kernel = attention.ATTENTION[attention.choose_kernel(m, platform)]
    pairs = 2 * s.tokens * m.T * (m.n_head / s.tp) * kernel.score_share(m)
    forward, *backward = [
        pairs * (keys * cost.query_channels + values * cost.value_channels)
        for keys, values in kernel.products.values()
    ]
    return forward, sum(backward)


def read_program(text, cfg, place):
    """`hlo.Cost` of the optimized HLO `text` of a validated Config's step."""
    m, mesh = cfg.model, dict(zip(collectives.AXES, cfg.run.n_device_axis))
    kernel = attention.ATTENTION[attention.choose_kernel(m, place.kernels or place.platform)]

    def in_kernel(words, arrays):
        """Operations of a call of the kernel; 0 of any other's."""
        for name, (keys, values) in kernel.products.items():
            if name in words:
                q, _, v = [math.prod(dims) for _, dims in arrays if len(dims) == 4][:3]
                return 2 * m.T * kernel.score_share(m) * (keys * q + values * v)
        return 0

    return hlo.analyze(text, mesh, place.slices, place.across, in_kernel)


def layer_of(cfg, kind, platform):
    """`Layer` of a kind of layer; a product [a, b] x [b, c] takes 2abc operations. Routed experts after
    arXiv:2006.16668, section 2.2."""
    m, s = cfg.model, sizes(cfg)
    arch = architecture(m.architecture)
    cost, D = arch.layer_cost(m, kind), m.model_dimension
    megatron = m.sequence_parallel == "megatron"

    attention_weights = 2 * s.own_tokens * cost.own_weights
    attention_weights += 2 * s.tokens * (m.n_head / s.tp) * cost.head_weights
    feed_forward = 2 * s.own_tokens * (cost.branches + 1) * D * cost.ffn_width
    scores, scores_backward = score_operations(cost, m, s, platform)

    rows = expert_rows(m, s, platform) if kind in arch.routed else 0
    in_tiles, needs_last = choose_transport(m, platform) == "tiles", kind == arch.mtp
    experts_into = 2 * rows * cost.branches * D * m.expert_width
    experts_back = 2 * rows * D * m.expert_width
    in_experts = rows / s.own_tokens * ((cost.branches + 1) * m.expert_width + 2 * D)
    # the gradient of tiles computes the hidden channels anew, whatever else is recomputed
    experts_backward = 2 * (experts_into + experts_back) + in_tiles * experts_into

    # megatron gathers all tokens for the feed-forward, and sums over tp what that and attention add to the residual
    into_feed_forward = D if megatron and feed_forward else 0
    back = D * s.tp if megatron else D  # added to the residual: of all tokens, or of own ones
    kept = cost.products + cost.branches * cost.ffn_width + back
    intermediates = kept + cost.ffn_width + in_experts + back
    # norms, residuals, what is gathered, attention's output
    intermediates += (
        (cost.gathered + into_feed_forward) * s.tp + 4 * D + m.n_head * cost.value_channels
    )
    return Layer(
        projections=attention_weights + feed_forward,
        last_product=2 * s.own_tokens * D * cost.ffn_width,
        needs_last=needs_last,
        scores=scores,
        scores_backward=scores_backward,
        experts=experts_into + experts_back,
        experts_backward=experts_backward,
        experts_again=(not in_tiles or needs_last) * experts_into + needs_last * experts_back,
        gathered=cost.gathered,
        into_feed_forward=into_feed_forward,
        out_of_attention=D if megatron else 0,
        exchanged=0 if megatron else m.n_head * cost.value_channels,
        to_experts=0 if in_tiles else rows * D * s.bytes,
        shared_tokens=in_tiles * bool(rows) * s.own_tokens * sharers(m, s) * D * s.bytes,
        kept=kept,
        intermediates=intermediates,
        in_experts=in_experts,
        of_others=2 * (back - D),  # of attention, and of the feed-forward
    )


def sharers(m, s):
    """Devices that share out all routed experts and exchange tokens."""
    return min(m.n_experts, s.dp * s.tp)


def expert_rows(m, s, platform):
    """Rows that a device's routed experts multiply, empty ones included, where the load is even."""
    if choose_transport(m, platform) == "buckets":
        return m.n_experts * capacity(m, int(s.own_tokens))
    devices = sharers(m, s)
    each = int(s.own_tokens) * devices * m.experts_per_token // m.n_experts
    return m.n_experts // devices * grouped.padded(each)


class Layers(NamedTuple):
    """All layers of a device."""

    flops: float  # of matrix products in a step
    scores: float  # of these, attention's products of queries, keys and values
    pipelined: float  # of the operations, those in the pipeline's ticks
    kept: float  # bytes that the forward passes of a batch leave for the backward passes
    copied: float  # of these, every time that they are copied
    intermediates: float  # bytes, of all layers in a step
    widest: float  # bytes that the widest layer's intermediates take in its backward pass


def send_layer(cfg, c, n, traffic):
    """Add the collectives of a `Layer` that runs n times in a step.

    Tensor and sequence parallelism (arXiv:2205.05198, section 4.2.2, or arXiv:2309.14509, section 3.1) and experts
    (arXiv:2006.16668, section 3.2): every collective runs in the forward pass, again where that is recomputed, and its
    transpose in the backward pass.
    """
    m, s, again = cfg.model, sizes(cfg), cfg.model.remat != "none"
    last_again = again and c.needs_last
    channel = s.tokens * s.bytes  # bytes
    residual = c.into_feed_forward + c.out_of_attention
    # see stays_scattered: one sequence is a lone dim; latents are laid out with T last and stay as they are
    on_tpu = traffic.place.platform == "tpu"
    summed = "all-reduce" if on_tpu and s.B == 1 else "reduce-scatter"
    into = channel * (c.gathered + c.into_feed_forward)
    traffic.send("all-gather", ("tp",), into, n * (1 + again))
    traffic.send("reduce-scatter", ("tp",), channel * c.gathered, n)
    traffic.send(summed, ("tp",), channel * (residual + c.into_feed_forward), n)
    traffic.send(summed, ("tp",), channel * c.out_of_attention, n * again)
    traffic.send(summed, ("tp",), channel * c.into_feed_forward, n * last_again)
    traffic.send("all-gather", ("tp",), channel * residual, n)
    traffic.send("all-to-all", ("tp",), channel * c.exchanged / s.tp, n * (2 + again))
    if c.experts:  # each sequence's choices, for the balance
        traffic.send("all-reduce", ("tp",), 4 * s.B * m.n_experts, n * (1 + again))
    if c.to_experts:
        apart, _ = expert_axes(m.n_experts, traffic.split)
        devices = sharers(m, s)
        gates = c.to_experts / m.model_dimension  # a number a slot, one way
        traffic.send("all-to-all", apart, c.to_experts, n * (4 + again + last_again), 1, devices)
        traffic.send("all-to-all", apart, gates, n * (2 + again), 1, devices)
    if c.shared_tokens:
        apart, _ = expert_axes(m.n_experts, traffic.split)
        devices = sharers(m, s)
        gates = c.shared_tokens / m.model_dimension * m.experts_per_token
        chosen = 4 / s.bytes * gates  # experts
        traffic.send("all-gather", apart, c.shared_tokens, n * (2 + again), 1, devices)
        traffic.send("all-gather", apart, gates + chosen, n * (1 + again), 1, devices)
        traffic.send("reduce-scatter", apart, c.shared_tokens, n * (2 + last_again), 1, devices)
        traffic.send("reduce-scatter", apart, gates, n, 1, devices)


def kept_channels(cfg, kind, c, place):
    """Channels per token that a `Layer` keeps for the backward pass."""
    m = cfg.model
    if m.remat == "full":
        return m.model_dimension
    if m.remat == "dots":
        return c.kept + m.model_dimension
    ratios = architecture(m.architecture).layer_cost(m, kind).kept_ratio
    outside = c.intermediates - c.in_experts
    if place.platform == "gpu":
        outside = ratios["gpu"] * (outside - c.of_others) + SCORES_KEPT * kept_scores(cfg, kind, c)
    else:
        outside *= ratios["tpu"]
    return outside + fit_of(place).experts_kept * c.in_experts


def loops_around(cfg, kind):
    """Number of loops of several turns around a kind of layer: each stacks what its turns keep."""
    m, (layers, times) = cfg.model, layer_runs(cfg)[kind]
    stacked = kind in architecture(m.architecture).stacks
    blocks = m.blocks // (cfg.run.n_device_axis[1] * cfg.run.pp_interleave) if stacked else 1
    return sum(turns > 1 for turns in (times, blocks, layers // blocks))


def kept_scores(cfg, kind, c):
    """Scores per token of a `Layer` whose backward pass does not compute them anew."""
    if c.scores_backward > 2 * c.scores:
        return 0
    cost = architecture(cfg.model.architecture).layer_cost(cfg.model, kind)
    scores = c.scores / (2 * (cost.query_channels + cost.value_channels))
    return scores / sizes(cfg).own_tokens


def kept_weights(cfg, place, weights):
    """Bytes of weights that --remat none keeps on GPUs: of each layer, every time that it runs."""
    if place.platform != "gpu" or cfg.model.remat != "none":
        return 0
    return sizes(cfg).bytes * weights.used / cfg.run.accumulation_steps


def recomputed_flops(cfg, c):
    """Operations of a `Layer` that the backward pass computes anew."""
    if cfg.model.remat == "none":
        return 0
    batched = c.scores + c.experts_again
    projections = c.projections - (not c.needs_last) * c.last_product
    return batched if cfg.model.remat == "dots" else batched + projections


def layers_cost(cfg, traffic):
    """`Layers`; adds what they send to `traffic`."""
    s, again = sizes(cfg), cfg.model.remat != "none"
    fit = fit_of(traffic.place)
    flops, scores, pipelined, kept, copied, intermediates, widest = 0, 0, 0, 0, 0, 0, 0
    channel = s.tokens * s.bytes  # bytes
    for kind, (layers, times) in layer_runs(cfg).items():
        c = layer_of(cfg, kind, traffic.place.kernels or traffic.place.platform)
        n = cfg.run.accumulation_steps * layers * times
        # a product's two gradients take twice its own operations
        once = 3 * c.projections + c.experts + c.experts_backward + c.scores + c.scores_backward
        own = n * (once + recomputed_flops(cfg, c))
        flops += own
        if times == s.ticks:
            pipelined += own
        scores += n * (c.scores * (1 + again) + c.scores_backward)
        send_layer(cfg, c, n, traffic)
        channels = kept_channels(cfg, kind, c, traffic.place)
        own_kept = layers * times * channel / s.tp * channels
        kept += own_kept
        copied += own_kept * (loops_around(cfg, kind) if traffic.place.platform == "gpu" else 1)
        width = channel / s.tp * c.intermediates
        intermediates += n * width
        beside_experts = fit.layer_copies if again else fit.layer_copies_kept
        held = fit.expert_copies * c.in_experts
        held += beside_experts * (c.intermediates - c.in_experts)
        widest = max(widest, channel / s.tp * held)
    return Layers(flops, scores, pipelined, kept, copied, intermediates, widest)


# --- The optimizer ------------------------------------------------------------------------------------------------


class Orthogonalization(NamedTuple):
    """What Muon does to a step's updates on a device; nothing with AdamW."""

    flops: float = 0  # of Newton-Schulz steps, those on empty places included
    operands: float = 0  # memory traffic of their products, bytes
    passes: float = 0  # memory traffic of what brings matrices together, bytes
    held: float = 0  # bytes of updates at once


def muon_cost(cfg, traffic):
    """`Orthogonalization`; adds what travels to `traffic`. training/muon.py deals the matrices out."""
    if cfg.optimizer.optimizer != "muon":
        return Orthogonalization()
    width = sizes(cfg).bytes
    stacks = muon.stacks_of(muon.hidden_params(cfg), traffic.split)
    flops, operands, passes, held = 0, 0, 0, 0
    for group in muon.deal(stacks, traffic.split):
        rows, columns, copies = group.layout
        traffic.send("all-to-all", rows + columns, width * group.exchanged, 2)
        devices = np.arange(group.sharers)
        near = differing_axes(devices, traffic.split["tp"]) if len(copies) > 1 else copies
        traffic.send("all-gather", near, width * group.gathered, 1, 1, group.sharers)
        flops += group.flops
        m, n = sorted(group.whole)
        operands += width * group.owned * muon.STEPS * (4 * m * n + 5 * m * m)
        moved = width * (group.places * math.prod(group.block) + 2 * group.owned * m * n)
        passes += MUON_COPIES * moved
        held += moved
    return Orthogonalization(flops, operands, passes, held)


# --- The step -----------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """The loss over the vocabulary, of all microbatches of a batch."""

    flops: float  # of all logits and their two gradients
    logits: float  # numbers
    held: float  # bytes of the logits that are held at once


def head_cost(cfg, platform):
    """`Head` of a validated Config."""
    m, s = cfg.model, sizes(cfg)
    tokens = s.own * s.B * s.T / s.tp
    logits = tokens * m.padded_vocab * (1 + m.mtp_depth)
    held = min(tokens, loss.LOSS_CHUNK[platform]) * m.padded_vocab
    return Head(6 * logits * m.model_dimension, logits, 4 * held)


class Fit(NamedTuple):
    """Constants fitted to what compilers report of the configurations in docs/planning.md: copies in memory, and memory
    traffic in bytes read and written. The GPU compiler reports no times: there they follow the operations of programs
    (plan.compiled_work)."""

    logit_copies: float  # of the logits that are held at once
    intermediates: float  # traffic per byte of them
    weights: float  # traffic per weight of a layer, every time that it gets a gradient
    kept: dict  # traffic per byte kept for the backward pass, on GPUs of each loop around it, {--remat: bytes}
    logits: float  # traffic per logit
    experts_kept: float = (
        2.5  # channels that --remat none keeps per channel of routed experts' intermediates
    )
    expert_copies: float = 1.4  # bytes held per byte of a layer's routed experts' intermediates
    layer_copies: float = 1.4  # the same of all else in the layer, in its backward pass
    layer_copies_kept: float = 1.4  # with --remat none
    own_copies: float = 0.0  # of the activations of all microbatches that a device embeds
    operands: float = 5.2  # bytes that matrix products read and write per byte of intermediates
    operand_weights: float = (
        22.0  # the same, per weight of a layer, every time that it gets a gradient
    )


PLAIN = Fit(1.25, 3.7, 12.0, dict(none=11.0, dots=26.0, full=29.0), 47.0)
FUSED = Fit(1.0, 2.8, 9.0, dict(none=3.0, dots=6.0, full=29.0), 35.0)  # see Chip.fuses
GPU = Fit(
    logit_copies=1.44,
    intermediates=4.8,
    weights=25.0,
    kept=dict.fromkeys(("none", "dots", "full"), 4.8),
    logits=37.0,
    experts_kept=1.41,
    expert_copies=3.2,
    layer_copies=1.3,
    layer_copies_kept=2.4,
    own_copies=6.0,
    operands=0.14,
    operand_weights=1.5,
)
SCORES_KEPT = 4.2  # numbers that --remat none keeps on GPUs per score, where a kernel keeps scores
MUON_COPIES = 10.0  # traffic per byte of the matrices that Muon brings together and of their blocks


def fit_of(place):
    """The `Fit` for a `Place`."""
    if place.platform == "gpu":
        return GPU
    return FUSED if place.fuses else PLAIN


def workspace(cfg, fit, weights, layers, head):
    """Bytes of peak memory beside weights, moments, the batch and what is kept for the backward pass.

    The peak is at one of three moments: while there are logits, in a layer's backward pass, or when the embedding's
    two gradients are added up.
    """
    s = sizes(cfg)
    embedding = cfg.model.padded_vocab * cfg.model.model_dimension
    if cfg.model.fsdp == "full":  # a layer at a time: its weights, the next one's, its gradient
        gathered = 2 * s.bytes * weights.largest
        gradients = 4 * (weights.largest + weights.stored)
    else:
        gathered = s.bytes * weights.gathered
        gradients = 4 * weights.gathered

    accumulated = 0  # gradients summed up so far
    if cfg.run.accumulation_steps > 1:
        accumulated = 4 * (weights.gathered if cfg.model.fsdp == "none" else weights.stored)
    one_microbatch = 0  # a copy of what is kept of it, where several are kept
    if s.ticks > 1:
        one_microbatch = layers.kept / s.ticks
    several_chunks = 4 * head.logits > head.held

    at_logits = gathered + (s.bytes + 4 * several_chunks) * embedding + fit.logit_copies * head.held
    in_layer = gathered + s.bytes * embedding + gradients + one_microbatch + layers.widest
    at_embedding = gradients + (s.bytes + 4) * embedding - layers.kept
    own = s.own * s.own_tokens * cfg.model.model_dimension * s.bytes
    return accumulated + fit.own_copies * own + max(at_logits, in_layer, at_embedding)


def send_pipeline(cfg, traffic):
    """Add what goes from stage to stage: every tick's activations to the next one and their gradients back; inputs and
    outputs are shared out."""
    s, accumulation = sizes(cfg), cfg.run.accumulation_steps
    tick = s.own_tokens * cfg.model.model_dimension * s.bytes
    everything = cfg.data.microbatches * tick
    traffic.send("collective-permute", ("pp",), tick, accumulation * 2 * s.ticks)
    traffic.send("all-gather", ("pp",), everything, accumulation)
    traffic.send("all-to-all", ("pp",), everything, accumulation * 3)


def estimate(cfg, place=Place()):
    """`Estimate` of a validated Config."""
    s, accumulation = sizes(cfg), cfg.run.accumulation_steps
    fit = fit_of(place)
    traffic = Traffic(cfg, place)
    weights = weights_cost(cfg, traffic)
    layers = layers_cost(cfg, traffic)
    head = head_cost(cfg, place.platform)
    orthogonalization = muon_cost(cfg, traffic)
    send_pipeline(cfg, traffic)

    flops = layers.flops + accumulation * head.flops + orthogonalization.flops
    passes = fit.intermediates * layers.intermediates + fit.weights * weights.used
    passes += fit.kept[cfg.model.remat] * accumulation * layers.copied
    passes += fit.logits * accumulation * head.logits + orthogonalization.passes
    operands = fit.operands * layers.intermediates + fit.operand_weights * weights.used
    return Estimate(
        flops=flops,
        scores=layers.scores,
        sent=dict(traffic.sent),
        operands=operands + orthogonalization.operands,
        passes=passes,
        weights=4 * weights.stored,
        optimizer=4 * weights.moments,
        batch=8 * accumulation * s.own * s.B * s.T / s.tp,
        activations=layers.kept + kept_weights(cfg, place, weights),
        workspace=workspace(cfg, fit, weights, layers, head),
        bubble=(s.pp - 1) / s.ticks,
        pipeline_share=layers.pipelined / flops,
    )


def compute_seconds(e, chip):
    """{part: seconds} of an `Estimate` on a chip, its links left out: matrix products at its speed, attention's
    at half of it, and memory traffic at its bandwidth."""
    return {
        "matrix products": (e.flops + e.scores) / chip.speed + e.operands / chip.bandwidth,
        "memory": e.passes / chip.bandwidth,
    }
