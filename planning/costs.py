"""What a training step costs, by formulas: parameters, floating-point operations, memory, bytes over each mesh axis.

Everything is of one device and one optimizer step unless it says otherwise. Letters are those of model.py. Sizes of
weights follow from model.param_table, what a layer does to a token from `Architecture.layer_cost`. The formulas count
matrix products and collectives as model.py writes them, whatever a compiler makes of them; all else (norms, routing by
index, biases) costs memory traffic, which `Estimate.passes` takes as a multiple of the activations. tests/test_plan.py
compares all of it with what XLA compiles.
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
from planning import hlo
from training import muon


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


def link_seconds(chip, kind, n_bytes, n, groups=1):
    """Seconds in which one of n devices sends n_bytes in a collective of this kind, nothing overlapped.

    A ring of more than two TPUs uses both directions of a link. In an all-to-all along a torus of side s, a byte goes
    s/4 hops on average along each dim. The GPUs of a host have one switch between them. From the `groups`, TPU slices
    or hosts of GPUs, in which the n lie, each device has its share of a network to the others: what a ring sends to
    the next group is shared out among the devices of its own.
    """
    if kind == hlo.ACROSS:
        return n_bytes / chip.network
    leaves, hops, directions = 0, 1.0, 1
    if groups > 1:
        shares = {"all-to-all": (n - n / groups) / (n - 1), "collective-permute": 1}
        leaves = n_bytes * shares.get(kind, groups / n)
    if not chip.gpu:
        directions = 2 if n > 2 else 1
        if kind == "all-to-all":
            dims = 1 if n <= 4 else 2 if n <= 16 else 3  # of the torus
            hops = max(1.0, n ** (1 / dims) / 4)
    return max(n_bytes * hops / (chip.link * directions), leaves / chip.network)


def groups_along(axes, shape, groups):
    """In how many of so many groups, neighbors in a mesh of such a shape, the devices along some axes lie: the first
    ones, say."""
    group = np.arange(math.prod(shape)).reshape(shape) * groups // math.prod(shape)
    along = tuple(slice(None) if axis in axes else 0 for axis in collectives.AXES)
    return len(np.unique(group[along]))


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


class Tally:
    """Adds up what a device does in a step; fields as `Estimate` has them."""

    def __init__(self, cfg, machine):
        self.split = dict(zip(collectives.AXES, cfg.run.n_device_axis))
        self.machine, self.fit = machine, constants(machine)
        self.sent = defaultdict(lambda: [0.0, 0.0, 0])
        self.flops = self.scores = self.operands = self.passes = 0.0

    def send(self, kind, axes, whole, times=1, count=1, n=0):
        """Add collectives: `count` of them, `times` times in a step.

        Together their arrays have `whole` bytes, all parts counted. n devices take part (0: all along the axes), in
        rings; an all-reduce is a reduce-scatter and an all-gather (arXiv:1909.09756, section 3).
        """
        axes = tuple(a for a in collectives.AXES if a in axes and self.split[a] > 1)
        n = n or math.prod(self.split[a] for a in axes)
        if n == 1 or not times * whole:
            return
        shares = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}
        entry = self.sent[axes, kind]
        entry[0] += times * whole * shares.get(kind, (n - 1) / n)
        entry[1] += times * count
        entry[2] = n


# --- Weights ------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Numbers of weights on one device."""

    stored: int  # in parts
    moments: int  # of the optimizer, likewise
    gathered: int  # of all its layers, whole
    largest: float  # of its largest layer, whole
    kept: float  # bytes of those that the forward pass leaves for the backward pass


class Use(NamedTuple):
    """How often a step gathers the weights of a stack of layers."""

    forward: float  # times that they are gathered
    backward: float  # times that their gradients are reduced and scattered
    count: int  # layers each time, in a collective of their own
    gradients: float  # times that they get a gradient


def stack_use(cfg, name, platform):
    """`Use` of an entry of model.param_table: a stack of layers, or what stands outside layers.

    ZeRO-3 (arXiv:1910.02054, section 5.3): with --fsdp full weights are gathered for every layer's forward pass, and
    again where the backward pass recomputes it. Otherwise they are gathered once a step, since XLA moves out of the
    loop of gradient accumulation what does not depend on it; the TPU compiler does not: there it is once a batch.
    """
    m, accumulation = cfg.model, cfg.run.accumulation_steps
    layers, times = layer_runs(cfg).get(name, (1, 1))
    if name in architecture(m.architecture).stacks:
        layers *= cfg.run.pp_interleave
        times /= cfg.run.pp_interleave
    gradients = accumulation * times
    if m.fsdp != "full" or name not in layer_runs(cfg):
        return Use(accumulation if platform == "tpu" else 1, accumulation, 1, gradients)
    return Use(gradients * (2 if m.remat != "none" else 1), gradients, layers, gradients)


def gather_cost(p, whole, use, width, tally, E):
    """Add the collectives that gather a parameter, of which a device stores `whole` numbers, in numbers of `width`
    bytes, and those that reduce and scatter its gradient in float32. Returns its size when gathered."""
    split = tally.split
    if not p.gather:
        return whole
    _, axes = p.gather
    if p.expert:  # slices of all experts are exchanged for slices of one, and these gathered
        apart, together = expert_axes(E, split)
        tally.send("all-to-all", apart, whole * width, use.forward, use.count, E)
        tally.send("all-to-all", apart, whole * 4, use.backward, use.count, E)
        n = math.prod(split[a] for a in axes) // E
        whole *= n
        tally.send("all-gather", together, whole * width, use.forward, use.count, n)
        tally.send("reduce-scatter", together, whole * 4, use.backward, use.count, n)
        return whole
    for axis in reversed(axes):
        whole *= split[axis]
        tally.send("reduce-scatter", (axis,), whole * 4, use.backward, use.count)
        tally.send("all-gather", (axis,), whole * width, use.forward, use.count)
    return whole


def weights_cost(cfg, tally):
    """`Weights`; adds what gathers them, uses them and sums their gradients to `tally`."""
    s, runs, platform = sizes(cfg), layer_runs(cfg), tally.machine.platform
    with_muon = cfg.optimizer.optimizer == "muon"
    stored, moments, used, gathered = 0, 0, 0, defaultdict(int)
    for name, stack in model.param_table(cfg).items():
        use = stack_use(cfg, name, platform)
        for p in jax.tree.leaves(stack, is_leaf=is_param):
            axes = [axis for entry in p.spec for axis in muon.real_axes(entry, tally.split)]
            own = math.prod(p.shape) // math.prod(tally.split[axis] for axis in axes)
            stored += own
            moments += own if with_muon and p.hidden else 2 * own
            # gradients of copies are summed; the TPU compiler moves that out of the loop of gradient accumulation
            copies = set(collectives.AXES) - set(axes)
            times = 1 if platform == "tpu" else cfg.run.accumulation_steps
            tally.send("all-reduce", copies, 4 * own, times)
            width = s.bytes if p.matrix else 4
            whole = gather_cost(p, own, use, width, tally, cfg.model.n_experts)
            if name in runs:
                gathered[name] += whole
                used += whole * use.gradients
    tally.passes += tally.fit["weights"] * used
    tally.operands += tally.fit["operand_weights"] * used
    kept = 0
    if platform == "gpu" and cfg.model.remat == "none":  # each time that a layer runs
        kept = s.bytes * used / cfg.run.accumulation_steps
    largest = max(n / runs[name][0] for name, n in gathered.items())
    return Weights(stored, moments, sum(gathered.values()), largest / cfg.run.pp_interleave, kept)


# --- Layers -------------------------------------------------------------------------------------------------------


def score_operations(cost, m, s, platform):
    """(forward, backward) operations of a layer's products of queries, keys and values."""
    kernel = attention.ATTENTION[attention.choose_kernel(m, platform)]
    pairs = 2 * s.tokens * m.T * (m.n_head / s.tp) * kernel.score_share(m)
    forward, *backward = [
        pairs * (keys * cost.query_channels + values * cost.value_channels)
        for keys, values in kernel.products.values()
    ]
    return forward, sum(backward)


def read_program(text, cfg, machine, **seconds):
    """`hlo.Timeline` of the optimized HLO `text` of a validated Config's step; `seconds` as that takes them."""
    m, mesh = cfg.model, dict(zip(collectives.AXES, cfg.run.n_device_axis))
    kernel = attention.ATTENTION[attention.choose_kernel(m, machine.kernels)]
    group = m.n_head // m.kv_heads  # heads of queries that read the same values

    def in_kernel(words, arrays):
        """Operations of a call of the kernel; 0 of any other's."""
        for name, (keys, values) in kernel.products.items():
            if name in words:  # its first arrays of floats are queries, keys and values
                q, _, v = [math.prod(dims) for kind, dims in arrays if "f" in kind][:3]
                return 2 * m.T * kernel.score_share(m) * (keys * q + values * group * v)
        return 0

    return hlo.Timeline(hlo.analyze(text, mesh, machine.slices, in_kernel), **seconds)


class Layer:
    """A layer's passes of one microbatch on one device."""

    def __init__(self, cfg, kind, machine):
        self.m, self.s, self.machine = cfg.model, sizes(cfg), machine
        arch = architecture(self.m.architecture)
        self.cost = arch.layer_cost(self.m, kind)
        routed = kind in arch.routed and self.m.n_experts
        self.rows = expert_rows(self.m, self.s, machine.kernels) if routed else 0
        self.in_tiles = choose_transport(self.m, machine.kernels) == "tiles"
        self.megatron = self.m.sequence_parallel == "megatron"
        self.recomputes = self.m.remat != "none"
        # recomputation runs to the layer's end only where that is needed: multi-token prediction normalizes it
        self.needs_end = kind == arch.mtp
        self.scores, self.scores_backward = score_operations(
            self.cost, self.m, self.s, machine.kernels
        )

    def flops(self):
        """Operations of matrix products, recomputed ones among them. A product [a, b] x [b, c] takes 2abc."""
        m, s, cost = self.m, self.s, self.cost
        out = 2 * s.own_tokens * m.model_dimension * cost.ffn_width
        projections = 2 * s.own_tokens * cost.own_weights + (cost.branches + 1) * out
        projections += 2 * s.tokens * (m.n_head / s.tp) * cost.head_weights
        # arXiv:2006.16668, section 2.2
        experts_out = 2 * self.rows * m.model_dimension * m.expert_width
        experts_into = cost.branches * experts_out

        # a product's two gradients take twice its own operations
        flops = 3 * (projections + experts_into + experts_out) + self.scores + self.scores_backward
        # the gradient of tiles computes the hidden channels anew, whatever else is recomputed
        flops += self.in_tiles * experts_into
        if self.recomputes:
            flops += self.scores + self.needs_end * experts_out
            flops += (self.needs_end or not self.in_tiles) * experts_into
        if m.remat == "full":
            flops += projections - (not self.needs_end) * out
        return flops

    def score_flops(self):
        """Of these, attention's products of queries, keys and values."""
        return self.scores * (1 + self.recomputes) + self.scores_backward

    def send(self, n, tally):
        """Add the collectives of a layer that runs n times in a step.

        Tensor and sequence parallelism: arXiv:2205.05198, section 4.2.2, or arXiv:2309.14509, section 3.1. Every
        collective runs in the forward pass, again where that is recomputed, and its transpose in the backward pass.
        """
        m, s, cost = self.m, self.s, self.cost
        again, end_again = self.recomputes, self.recomputes and self.needs_end
        channel = s.tokens * s.bytes  # bytes
        # of the residual: megatron gathers it for attention and the feed-forward, and sums what these add to it
        attention_out = channel * m.model_dimension * self.megatron
        feed_forward = attention_out * (cost.ffn_width > 0)
        gathered = channel * cost.gathered
        exchanged = 0 if self.megatron else channel / s.tp * m.n_head * cost.value_channels
        tally.send("all-gather", ("tp",), gathered + feed_forward, n * (1 + again))
        tally.send("all-gather", ("tp",), attention_out + feed_forward, n)
        tally.send("reduce-scatter", ("tp",), gathered + feed_forward, n)
        tally.send("reduce-scatter", ("tp",), attention_out + feed_forward, n)
        tally.send("reduce-scatter", ("tp",), attention_out, n * again)
        tally.send("reduce-scatter", ("tp",), feed_forward, n * end_again)
        tally.send("all-to-all", ("tp",), exchanged, n * (2 + again))
        if self.rows:
            # each sequence's choices, for the balance
            tally.send("all-reduce", ("tp",), 4 * s.B * m.n_experts, n * (1 + again))
            self.send_tokens(n, tally, again, end_again)

    def send_tokens(self, n, tally, again, end_again):
        """Add what takes tokens to their experts and back (arXiv:2006.16668, section 3.2)."""
        m, s = self.m, self.s
        apart, _ = expert_axes(m.n_experts, tally.split)
        devices = sharers(m, s)
        if not self.in_tiles:  # buckets
            slots = self.rows * s.bytes  # bytes of a number for each, such as its gate
            channels = slots * m.model_dimension
            tally.send("all-to-all", apart, channels, n * (4 + again + end_again), 1, devices)
            tally.send("all-to-all", apart, slots, n * (2 + again), 1, devices)
            return
        numbers = s.own_tokens * devices  # one of every token
        channels = numbers * m.model_dimension * s.bytes
        gates = numbers * m.experts_per_token * s.bytes
        experts = numbers * m.experts_per_token * 4
        tally.send("all-gather", apart, channels, n * (2 + again), 1, devices)
        tally.send("all-gather", apart, gates + experts, n * (1 + again), 1, devices)
        tally.send("reduce-scatter", apart, channels, n * (2 + end_again), 1, devices)
        tally.send("reduce-scatter", apart, gates, n, 1, devices)

    def channels(self):
        """Channels per token of products with weights, as --remat dots keeps them; of all that is computed; and of what
        is computed in routed experts, which both leave out."""
        m, s, cost = self.m, self.s, self.cost
        D = m.model_dimension
        added = D * (s.tp if self.megatron else 1)  # to the residual
        products = cost.products + cost.branches * cost.ffn_width + added
        # beside products: the feed-forward's, norms and residuals, what is gathered, attention's output
        gathered = cost.gathered + D * (self.megatron and cost.ffn_width > 0)
        computed = products + cost.ffn_width + added + 4 * D
        computed += gathered * s.tp + m.n_head * cost.value_channels
        in_experts = (cost.branches + 1) * m.expert_width + 2 * D
        return products, computed, self.rows / s.own_tokens * in_experts

    def kept(self):
        """Channels per token that it keeps for the backward pass."""
        m, fit = self.m, constants(self.machine)
        products, computed, in_experts = self.channels()
        if m.remat == "full":
            return m.model_dimension
        if m.remat == "dots":
            return products + m.model_dimension
        kept = fit["kept"] * computed + fit["experts_kept"] * in_experts
        if self.scores_backward <= 2 * self.scores:  # they are not computed anew
            per_score = 2 * (self.cost.query_channels + self.cost.value_channels)
            kept += fit["scores_kept"] * self.scores / per_score / self.s.own_tokens
        return kept


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


def layers_cost(cfg, tally):
    """(bytes that the forward passes of a batch leave for the backward passes, bytes that the widest layer's
    intermediates take in its backward pass); adds what layers compute and send to `tally`."""
    s, fit = sizes(cfg), tally.fit
    copies = fit["layer_copies_kept" if cfg.model.remat == "none" else "layer_copies"]
    kept, widest = 0, 0
    channel = s.own_tokens * s.bytes  # bytes
    for kind, (layers, times) in layer_runs(cfg).items():
        layer = Layer(cfg, kind, tally.machine)
        n = cfg.run.accumulation_steps * layers * times
        layer.send(n, tally)
        tally.flops += n * layer.flops()
        tally.scores += n * layer.score_flops()
        _, computed, in_experts = layer.channels()
        own_kept = layers * times * channel * layer.kept()
        tally.passes += fit[cfg.model.remat] * cfg.run.accumulation_steps * own_kept
        tally.passes += fit["intermediates"] * n * channel * (computed + in_experts)
        tally.operands += fit["operands"] * n * channel * (computed + in_experts)
        kept += own_kept
        widest = max(widest, channel * (copies * computed + fit["expert_copies"] * in_experts))
    return kept, widest


# --- The optimizer ------------------------------------------------------------------------------------------------


def muon_cost(cfg, tally):
    """Add what Muon does to a step's updates to `tally`; training/muon.py deals the matrices out."""
    width = sizes(cfg).bytes
    stacks = muon.stacks_of(muon.hidden_params(cfg), tally.split)
    for group in muon.deal(stacks, tally.split):
        rows, columns, copies = group.layout
        tally.send("all-to-all", rows + columns, width * group.exchanged, 2)
        devices = np.arange(group.sharers)
        near = differing_axes(devices, tally.split["tp"]) if len(copies) > 1 else copies
        tally.send("all-gather", near, width * group.gathered, 1, 1, group.sharers)
        tally.flops += group.flops
        m, n = sorted(group.whole)
        tally.operands += width * group.owned * muon.STEPS * (4 * m * n + 5 * m * m)
        moved = width * (group.places * math.prod(group.block) + 2 * group.owned * m * n)
        tally.passes += tally.fit["muon"] * moved


# --- The step -----------------------------------------------------------------------------------------------------


def head_cost(cfg, tally):
    """(bytes of all logits of a batch in float32, bytes of those that are held at once); adds the loss over the
    vocabulary to `tally`."""
    m, s, accumulation = cfg.model, sizes(cfg), cfg.run.accumulation_steps
    tokens = s.own * s.own_tokens
    logits = tokens * m.padded_vocab * (1 + m.mtp_depth)
    tally.flops += 6 * accumulation * logits * m.model_dimension  # and their two gradients
    tally.passes += tally.fit["logits"] * accumulation * logits
    held = min(tokens, loss.LOSS_CHUNK[tally.machine.platform]) * m.padded_vocab
    return 4 * logits, 4 * held


# Constants fitted to what compilers report of the configurations in docs/planning.md. The GPU compiler reports no
# times: there they follow the operations of programs (plan.compiled_work).
# {constant: on (TPUs, TPUs whose compiler forms operands inside products, GPUs)}
FITTED = {
    # memory traffic, in bytes read and written
    "intermediates": (3.7, 2.8, 4.8),  # per byte of them
    "weights": (12.0, 9.0, 25.0),  # per weight of a layer, every time that it gets a gradient
    "operands": (5.2, 5.2, 0.14),  # of matrix products, per byte of intermediates
    "operand_weights": (22.0, 22.0, 1.5),  # of matrix products, as "weights"
    "logits": (47.0, 35.0, 37.0),  # per logit
    "full": (29.0, 29.0, 9.6),  # per byte kept for the backward pass, with this --remat
    "dots": (26.0, 6.0, 9.6),
    "none": (11.0, 3.0, 9.6),
    # per byte of the matrices that Muon brings together and of their blocks
    "muon": (10.0, 10.0, 10.0),
    # copies in memory
    "logit_copies": (1.25, 1.0, 1.44),  # of the logits that are held at once
    "layer_copies": (1.4, 1.4, 1.3),  # of a layer's intermediates, in its backward pass
    "layer_copies_kept": (1.4, 1.4, 2.4),  # of the same with --remat none
    "expert_copies": (1.4, 1.4, 3.2),  # of those in routed experts
    "kept": (1.6, 1.6, 2.5),  # channels that --remat none keeps per channel of intermediates
    "experts_kept": (2.5, 2.5, 1.41),  # of those in routed experts that --remat none keeps
    "scores_kept": (0.0, 0.0, 4.2),  # numbers that it keeps per score, where a kernel keeps scores
    "own_copies": (0.0, 0.0, 6.0),  # of the activations of all microbatches that a device embeds
}


def constants(machine):
    """{constant: value} of `FITTED` for a `Machine`."""
    column = 2 if machine.platform == "gpu" else int(machine.chip.fuses)
    return {name: values[column] for name, values in FITTED.items()}


def workspace(cfg, fit, weights, layers, head):
    """Bytes of peak memory beside weights, moments, the batch and what is kept for the backward pass. layers, head: as
    `layers_cost` and `head_cost` return them.

    The peak is at one of three moments: while there are logits, in a layer's backward pass, or when the embedding's
    two gradients are added up.
    """
    s = sizes(cfg)
    kept, widest = layers
    logits, held = head
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
    # a copy of what is kept of one microbatch, where several are kept
    one_microbatch = kept / s.ticks if s.ticks > 1 else 0

    at_logits = gathered + (s.bytes + 4 * (logits > held)) * embedding + fit["logit_copies"] * held
    in_layer = gathered + s.bytes * embedding + gradients + one_microbatch + widest
    at_embedding = gradients + (s.bytes + 4) * embedding - kept
    own = s.own * s.own_tokens * cfg.model.model_dimension * s.bytes
    return accumulated + fit["own_copies"] * own + max(at_logits, in_layer, at_embedding)


def send_pipeline(cfg, tally):
    """Add what goes from stage to stage: every tick's activations to the next one and their gradients back; inputs and
    outputs are shared out."""
    s, accumulation = sizes(cfg), cfg.run.accumulation_steps
    tick = s.own_tokens * cfg.model.model_dimension * s.bytes
    everything = cfg.data.microbatches * tick
    tally.send("collective-permute", ("pp",), tick, accumulation * 2 * s.ticks)
    tally.send("all-gather", ("pp",), everything, accumulation)
    tally.send("all-to-all", ("pp",), everything, accumulation * 3)


def estimate(cfg, machine):
    """`Estimate` of a validated Config."""
    s = sizes(cfg)
    tally = Tally(cfg, machine)
    weights = weights_cost(cfg, tally)
    layers = layers_cost(cfg, tally)
    head = head_cost(cfg, tally)
    if cfg.optimizer.optimizer == "muon":
        muon_cost(cfg, tally)
    send_pipeline(cfg, tally)
    return Estimate(
        flops=tally.flops,
        scores=tally.scores,
        sent=dict(tally.sent),
        operands=tally.operands,
        passes=tally.passes,
        weights=4 * weights.stored,
        optimizer=4 * weights.moments,
        batch=8 * cfg.run.accumulation_steps * s.own * s.own_tokens,
        activations=layers[0] + weights.kept,
        workspace=workspace(cfg, tally.fit, weights, layers, head),
        bubble=(s.pp - 1) / s.ticks,
    )


def compute_seconds(e, chip):
    """{part: seconds} of an `Estimate` on a chip, its links left out: matrix products at its speed, attention's
    at half of it, and memory traffic at its bandwidth."""
    return {
        "matrix products": (e.flops + e.scores) / chip.speed + e.operands / chip.bandwidth,
        "memory": e.passes / chip.bandwidth,
    }
