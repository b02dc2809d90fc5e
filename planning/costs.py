"""What a training step costs, by formulas: parameters, floating-point operations, memory, bytes over each mesh axis.

Everything is of one device and one optimizer step unless it says otherwise. Letters are those of model.py. The formulas
count matrix products and collectives as model.py writes them, whatever a compiler makes of them; all else (norms,
routing by index, biases) costs memory traffic, taken as a multiple of the activations.
"""

import functools
import math
from collections import Counter, defaultdict

import jax
import numpy as np
from jax.sharding import AbstractMesh

import collectives
import model
import utils
from architectures import architecture
from architectures.experts import capacity, choose_transport
from architectures.parameters import is_param
from kernels import attention, grouped, loss
from planning import hlo
from training import muon
from training.optimizer import make_optimizer
from training.train_state import abstract_params, map_opt_state

# Constants fitted to what compilers report of 31 steps of TPUs and 44 of GPUs (dev/log.md). The GPU compiler reports no
# times: there they follow the operations of programs (`Program`).
# {constant: on (TPUs, TPUs whose compiler forms operands inside products, GPUs)}
FITTED = {
    # memory traffic, in bytes read and written
    "intermediates": (3.7, 2.8, 4.8),  # per byte of them
    "weights": (12.0, 9.0, 25.0),  # per weight of a layer, every time that it gets a gradient
    "operands": (5.2, 5.2, 0.14),  # of matrix products, per byte of intermediates
    "operand_weights": (22.0, 22.0, 1.5),  # of matrix products, as "weights"
    "logits": (47.0, 35.0, 37.0),  # per logit
    "full": (29.0, 29.0, 9.6),  # per byte kept for the backward pass, with this --remat
    "attention": (29.0, 29.0, 9.6),
    "experts": (26.0, 6.0, 9.6),
    "dots": (26.0, 6.0, 9.6),
    "none": (11.0, 3.0, 2.4),
    # copies in memory
    "logit_copies": (1.25, 1.0, 1.44),  # of the logits that are held at once
    "layer_copies": (1.4, 1.4, 1.3),  # of a layer's intermediates, in its backward pass
    "layer_copies_kept": (1.4, 1.4, 1.0),  # of the same with --remat none
    "expert_copies": (1.4, 1.4, 3.2),  # of those in routed experts
    "kept": (1.6, 1.6, 0.9),  # channels that --remat none keeps per channel of intermediates
    "experts_kept": (2.5, 2.5, 0.9),  # of those in routed experts that --remat none keeps
    "scores_kept": (0.0, 0.0, 4.2),  # numbers that it keeps per score, where a kernel keeps scores
    "own_copies": (0.0, 0.0, 6.0),  # of the activations of all microbatches that a device embeds
}
MUON_TRAFFIC = 10.0  # likewise, per byte of the matrices that Muon works on and of their blocks


def link_seconds(cfg, machine, axes, kind, n_bytes, n):
    """Seconds in which each of n devices along some axes sends n_bytes in a collective, nothing overlapped.

    A ring of more than two TPUs uses both directions of a link. In an all-to-all along a torus of side s, a byte goes
    s/4 hops on average along each dim. The GPUs of a host have one switch between them. Between groups (TPU slices or
    hosts of GPUs) each device has its share of a network: what a ring sends to the next group, the devices of its own
    share out.
    """
    chip = machine.chip
    if kind == hlo.ACROSS:
        return n_bytes / chip.network
    seconds = n_bytes / chip.link
    if not chip.gpu and n > 2:
        seconds /= 2  # both directions
    if not chip.gpu and kind == "all-to-all":
        dims = 1 + (n > 4) + (n > 16)  # of the torus
        seconds *= max(1.0, n ** (1 / dims) / 4)
    groups = groups_along(axes, cfg.run.n_device_axis, machine.groups)
    if groups == 1:
        return seconds
    shares = {"all-to-all": (n - n / groups) / (n - 1), "collective-permute": 1}
    leaves = n_bytes * shares.get(kind, groups / n)
    return max(seconds, leaves / chip.network)


def groups_along(axes, shape, groups):
    """The number of groups in which the devices along some axes of a mesh lie; a group has neighbors of the mesh."""
    n = math.prod(shape)
    group = np.arange(n).reshape(shape) * groups // n
    along = tuple(slice(None) if axis in axes else 0 for axis in collectives.AXES)
    return len(np.unique(group[along]))


def expert_axes(E, split):
    """(axes along which devices hold different experts, axes along which they hold the same one)."""
    stage = {axis: split[axis] for axis in collectives.EXPERT_AXES}
    n = math.prod(stage.values())
    devices = np.arange(n).reshape(-1, max(1, n // E))  # a row of devices holds the same expert
    apart = devices[:, :1].T
    return hlo.axes_of(apart, stage), hlo.axes_of(devices[:1], stage)


# Seconds that a GPU takes to launch an operation, and operations of a layer and its gradient (dev/log.md, 2026-11-26)
LAUNCH = 2e-6
LAUNCHES = 180
# {whether it is a GPU: how much slower than other products attention kernels are}: half and a quarter of the peak
KERNELS = {False: 2, True: 3}


class Program(hlo.Timeline):
    """`hlo.Timeline` of the optimized HLO `text` of a validated Config's step."""

    def __init__(self, text, cfg, machine):
        self.cfg = cfg
        self.machine = machine
        self.kernel = attention.ATTENTION[attention.choose_kernel(cfg.model, machine.kernels)]
        mesh = dict(zip(collectives.AXES, cfg.run.n_device_axis))
        super().__init__(text, mesh, machine.slices)

    def in_kernel(self, words, arrays):
        m = self.cfg.model
        kernel = self.kernel
        group = m.n_head // m.kv_heads  # heads of queries that read the same values
        for name, (keys, values) in kernel.products.items():
            if name in words:  # its first arrays of floats are queries, keys and values
                q, _, v = [math.prod(dims) for kind, dims in arrays if "f" in kind][:3]
                return 2 * m.T * kernel.score_share(m) * (keys * q + values * group * v)
        return 0

    def compute_seconds(self, flops, cycles, moved, is_kernel):
        chip = self.machine.chip
        # no compiler estimates kernels
        products = flops / chip.speed * (KERNELS[chip.gpu] if is_kernel else 1)
        if chip.gpu:
            return bool(flops or moved) * LAUNCH + max(products, moved / chip.memory_speed)
        return products if is_kernel else cycles / chip.clock

    def link_seconds(self, *transfer):
        # what leaves a TPU slice is a transfer of its own in the program
        machine = self.machine
        joined = machine._replace(groups=machine.groups // machine.slices)
        return link_seconds(self.cfg, joined, *transfer)

    def overlapped(self):
        """Seconds of the step as the compiler scheduled it."""
        return self.products + self.others + sum(self.exposed.values())


def further_round(program, text):
    """Seconds by which a step is longer where every layer's experts take one further round (`experts.in_buckets`);
    program: of the HLO `text`, which takes none."""
    m, machine = program.cfg.model, program.machine
    if not m.n_experts or m.capacity_factor or choose_transport(m, machine.platform) == "tiles":
        return 0.0
    with_one = text.replace("at_even_load_0/", "at_even_load_1/")
    return Program(with_one, program.cfg, machine).overlapped() - program.overlapped()


@functools.cache  # --search asks thousands of times
def optimizer_bytes(m, o):
    """Bytes that the optimizer of `o`, a utils.Optimizer, keeps for each number of a parameter, in a tree like the
    parameters of `m`, a utils.Model: 8 for AdamW's two moments. Scalars are left out."""
    cfg = utils.Config(model=m, optimizer=o, run=utils.Run(n_device_axis=(1, 1, 1)))
    mesh = AbstractMesh(cfg.run.n_device_axis, collectives.AXES)
    params = abstract_params(cfg, mesh)
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    total = Counter()

    def add(leaf, name):
        total[name] += leaf.size * leaf.dtype.itemsize

    optimizer = make_optimizer(cfg, mesh)
    map_opt_state(optimizer, params, add, lambda leaf: None, beside=names)
    return jax.tree.map(lambda param, name: total[name] / param.size, params, names)


class Estimate:
    """What one device does in a step of a validated Config."""

    def __init__(self, cfg, machine):
        self.cfg = cfg
        self.m = cfg.model
        self.machine = machine
        column = 2 if machine.platform == "gpu" else int(machine.chip.fuses)
        self.fit = {name: values[column] for name, values in FITTED.items()}
        self.cut_up(cfg)
        self.fsdp = model.choose_fsdp(cfg, machine.platform, machine.slices)
        self.by_layer = self.fsdp in ("full", "exchange")  # weights are gathered
        self.flops = 0.0  # of matrix products
        self.scores = 0.0  # of these, attention's products of queries, keys and values
        self.layer_passes = 0  # of a microbatch through a layer, forward and backward
        # {(axes, kind): [bytes, collectives, seconds]}
        self.sent = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.operands = 0.0  # memory traffic of matrix products, bytes
        self.passes = 0.0  # memory traffic of everything else, bytes
        self.weights = self.optimizer = 0.0  # bytes; of what the optimizer keeps
        self.batch = 8 * self.batches * self.own * self.own_tokens  # bytes, with targets
        self.activations = 0.0  # bytes kept from the forward pass for the backward pass
        self.bubble = (self.pp - 1) / self.ticks  # share of the ticks in which a stage idles
        gathered, largest = self.add_weights()
        kept, widest = self.add_layers()
        self.add_head()
        if cfg.optimizer.optimizer == "muon":
            self.add_muon()
        self.add_pipeline()
        # bytes of all else: gradients, gathered weights, one layer's and the head's intermediates
        self.workspace = self.peak(gathered, largest, kept, widest)

    def cut_up(self, cfg):
        microbatches = cfg.data.microbatches
        self.batches = cfg.run.accumulation_steps
        self.dp, self.pp, self.tp = mesh = cfg.run.n_device_axis
        self.split = dict(zip(collectives.AXES, mesh))
        # in each tick every stage runs its blocks of one round, see model.pipeline
        self.ticks = cfg.run.pp_interleave * microbatches + self.pp - 1
        self.own = microbatches // self.pp  # that a device embeds and takes the loss of
        self.B = cfg.data.train_batch_size // microbatches  # sequences of one, on a device
        self.tokens = self.B * cfg.model.T  # of a microbatch on a device, as attention sees them
        self.own_tokens = self.tokens / self.tp  # and outside attention, tp splitting the sequence
        self.bytes = 2 if cfg.model.model_dtype == "bfloat16" else 4  # of a number in model_dtype
        # {kind of layer: (layers on a device that run one after another, times that they run forward)}
        self.runs = {}
        arch = architecture(cfg.model.architecture)
        for kind, layers in arch.numbers(cfg.model).items():
            if kind in arch.stacks:
                self.runs[kind] = layers // (self.pp * cfg.run.pp_interleave), self.ticks
            else:
                self.runs[kind] = layers, self.own

    def send(self, kind, axes, whole, times=1, count=1, n=0):
        """Add collectives along some axes, or the one named: `count` of them, `times` times in a step.

        Together their arrays have `whole` bytes, all parts counted. n devices take part (0: all along the axes), in
        rings; an all-reduce is a reduce-scatter and an all-gather (arXiv:1909.09756, section 3).
        """
        axes = tuple(a for a in collectives.AXES if a in axes and self.split[a] > 1)
        n = n or muon.axes_size(axes, self.split)
        if n == 1 or not times * whole:
            return
        shares = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n}
        n_bytes = times * whole * shares.get(kind, (n - 1) / n)
        entry = self.sent[axes, kind]
        entry[0] += n_bytes
        entry[1] += times * count
        entry[2] += link_seconds(self.cfg, self.machine, axes, kind, n_bytes, n)

    def add_weights(self):
        """Add what stores weights, gathers them, uses them and sums their gradients. Returns the numbers of gathered
        weights of all layers of a device and of the largest one.

        ZeRO-3 (arXiv:1910.02054, section 5.3): with --fsdp full weights are gathered for every layer's forward pass,
        and again where the backward pass recomputes it. Otherwise they are gathered once a step or, by the TPU
        compiler, once a batch; that one sums the gradients of copies outside the loop of gradient accumulation.
        """
        m = self.m
        rounds = self.cfg.run.pp_interleave
        stacks = architecture(m.architecture).stacks
        gathers, sums = 1, self.batches
        if self.machine.platform == "tpu":
            gathers, sums = self.batches, 1
        kept = optimizer_bytes(m, self.cfg.optimizer)
        used = 0
        gathered = defaultdict(int)
        for name, stack in model.param_table(self.cfg).items():
            in_layer = name in self.runs
            layers, times = self.runs.get(name, (1, 1))
            if name in stacks:
                layers *= rounds
                times /= rounds
            gradients = self.batches * times  # times that a layer gets one
            # times that it is gathered and that its gradients are scattered, layers each time
            use = gathers, self.batches, 1
            if self.by_layer and in_layer:
                use = gradients * (1 if m.remat == "none" else 2), gradients, layers
            params = jax.tree.leaves(stack, is_leaf=is_param)
            for p, of_optimizer in zip(params, jax.tree.leaves(kept[name])):
                axes = [axis for entry in p.spec for axis in muon.real_axes(entry, self.split)]
                own = math.prod(p.shape) // muon.axes_size(axes, self.split)
                n_bytes = 4 * own
                self.weights += n_bytes
                self.optimizer += of_optimizer * own
                self.send("all-reduce", self.split.keys() - axes, n_bytes, sums)
                whole = self.gather(p, own, in_layer, *use)
                if in_layer:
                    gathered[name] += whole
                    used += whole * gradients
        self.passes += self.fit["weights"] * used
        self.operands += self.fit["operand_weights"] * used
        if self.machine.platform == "gpu" and m.remat == "none":  # kept each time that a layer runs
            self.activations += self.bytes * used / self.batches
        largest = max(n / self.runs[name][0] for name, n in gathered.items())
        return sum(gathered.values()), largest / rounds

    def gather(self, p, whole, in_layer, forward, backward, count):
        """Add the collectives that gather a parameter `forward` times, of which a device stores `whole` numbers, and
        those that reduce and scatter its gradient in float32. Returns its size when gathered."""
        if not p.gather:
            return whole
        width = self.bytes if p.cast else 4

        def both_ways(kind, back, axes, n=0):
            self.send(kind, axes, whole * width, forward, count, n)
            self.send(back, axes, whole * 4, backward, count, n)

        _, axes = p.gather
        if p.expert:  # slices of all experts are exchanged for slices of one, and these gathered
            E = self.m.n_experts
            apart, together = expert_axes(E, self.split)
            both_ways("all-to-all", "all-to-all", apart, E)
            n = muon.axes_size(axes, self.split) // E
            whole *= n
            both_ways("all-gather", "reduce-scatter", together, n)
            return whole
        back = "all-to-all" if self.fsdp == "exchange" and in_layer else "reduce-scatter"
        for axis in reversed(axes):
            whole *= self.split[axis]
            both_ways("all-gather", back, axis)
        return whole

    def add_layers(self):
        """Add what layers compute, send and keep. Returns the bytes that the forward passes of a batch leave for the
        backward passes, and those of the widest layer's intermediates in its backward pass."""
        fit = self.fit
        remat = self.m.remat
        copies = fit["layer_copies_kept" if remat == "none" else "layer_copies"]
        kept, widest = 0, 0
        channel = self.own_tokens * self.bytes  # bytes
        for kind, (layers, times) in self.runs.items():
            layer = Layer(self, kind)
            n = self.batches * layers * times
            layer.send(n)
            self.flops += n * layer.flops()
            self.scores += n * layer.all_scores
            self.layer_passes += n
            intermediates = n * channel * (layer.computed + layer.in_experts)
            own_kept = layers * times * channel * layer.kept()
            of_attention = layers * times * channel * layer.kept_by_attention()
            self.passes += fit[remat] * self.batches * own_kept
            self.passes += fit["intermediates"] * (intermediates + self.batches * of_attention)
            self.operands += fit["operands"] * intermediates
            kept += own_kept + of_attention
            width = copies * layer.computed + fit["expert_copies"] * layer.in_experts
            widest = max(widest, channel * width)
        self.activations += kept
        return kept, widest

    def add_head(self):
        """Add the loss over the vocabulary."""
        m = self.m
        tokens = self.batches * self.own * self.own_tokens
        logits = tokens * m.padded_vocab
        self.flops += 6 * logits * m.model_dimension  # and their two gradients
        self.passes += self.fit["logits"] * logits

    def add_muon(self):
        """Add what Muon does to a step's updates; `muon.make_buckets` says which device owns what."""
        width = self.bytes
        matrices = muon.matrices_of(muon.hidden_params(self.cfg), self.split)
        for bucket in muon.make_buckets(matrices, self.split):
            rows, columns, near = bucket.layout
            self.send("all-to-all", rows + columns, width * bucket.exchanged, 2)
            if len(near) > 1:
                owners = np.arange(bucket.owner_copies)[None]
                near = hlo.axes_of(owners, dict(dp=self.dp, tp=self.tp))
            self.send("all-gather", near, width * bucket.gathered, 1, 1, bucket.owner_copies)
            self.flops += bucket.flops
            m, n = sorted(bucket.matrix)
            owned = width * bucket.n_owned * m
            self.operands += owned * muon.STEPS * (4 * n + 5 * m)
            blocks = width * bucket.n_slots * math.prod(bucket.block)
            self.passes += MUON_TRAFFIC * (blocks + 2 * owned * n)

    def add_pipeline(self):
        """Add what goes from stage to stage: activations, their gradients back, inputs and outputs shared out."""
        tick = self.own_tokens * self.m.model_dimension * self.bytes
        everything = self.cfg.data.microbatches * tick
        self.send("collective-permute", "pp", tick, self.batches * 2 * self.ticks)
        self.send("all-gather", "pp", everything, self.batches)
        self.send("all-to-all", "pp", everything, self.batches * 3)
        # the ids, for the rows of the tokens before
        if architecture(self.m.architecture).lookback(self.m):
            ids = self.own * self.own_tokens * self.tp
            self.send("all-gather", "tp", 4 * ids, self.batches)

    def peak(self, gathered, largest, kept, widest):
        """Bytes of peak memory beside weights, moments, the batch and what is kept for the backward pass: while there
        are logits, in a layer's backward pass, or when the embedding's two gradients are added up."""
        m = self.m
        fit = self.fit
        embedding = m.padded_vocab * m.model_dimension
        in_dtype = self.bytes * embedding
        weights = self.bytes * gathered
        gradients = 4 * gathered
        # gradients summed up so far
        accumulated = gradients if self.fsdp == "none" else self.weights
        if self.by_layer:  # its weights, the next one's, its gradient
            weights = 2 * self.bytes * largest
            gradients = 4 * largest + self.weights
        # a copy of what is kept of one microbatch, where several are kept
        one_microbatch = kept / self.ticks if self.ticks > 1 else 0
        tokens = self.own * self.own_tokens
        chunk = loss.LOSS_CHUNK[self.machine.platform]
        logits = min(tokens, chunk) * m.padded_vocab  # at once

        at_logits = weights + in_dtype + 4 * fit["logit_copies"] * logits
        if tokens > chunk:
            at_logits += 4 * embedding
        in_layer = weights + in_dtype + gradients + one_microbatch + widest
        at_embedding = gradients + in_dtype + 4 * embedding - kept
        embedded = fit["own_copies"] * tokens * m.model_dimension * self.bytes
        most = embedded + max(at_logits, in_layer, at_embedding)
        return most + accumulated if self.batches > 1 else most

    def seconds(self):
        """{part: seconds} without links."""
        chip = self.machine.chip
        flops = self.flops + (KERNELS[chip.gpu] - 1) * self.scores
        products = flops / chip.speed + self.operands / chip.memory_speed
        passes = self.passes / chip.memory_speed + chip.gpu * LAUNCHES * LAUNCH * self.layer_passes
        return {"matrix products": products, "memory": passes}


class Layer:
    """A layer's passes of one microbatch on one device."""

    def __init__(self, step, kind):
        self.step = step
        self.m = m = step.m
        platform = step.machine.kernels
        arch = architecture(m.architecture)
        self.cost = arch.layer_cost(m, kind)
        self.in_tiles = choose_transport(m, platform) == "tiles"
        self.megatron = m.sequence_parallel == "megatron"
        self.recomputes = m.remat != "none"
        self.keeps_experts = m.remat == "experts" and not self.in_tiles
        self.keeps_attention = model.keeps_attention(step.cfg, step.machine.platform)

        self.rows = 0  # that routed experts multiply, empty ones included, where the load is even
        E = m.n_experts
        if kind == arch.last and E:
            tokens = int(step.own_tokens)
            self.sharers = min(E, step.dp * step.tp)  # devices that share out all experts
            self.rows = E * capacity(m, tokens)
            if self.in_tiles:
                each = tokens * self.sharers * m.experts_per_token // E
                self.rows = E // self.sharers * grouped.padded(each)
        self.count_scores(attention.ATTENTION[attention.choose_kernel(m, platform)])
        self.count_channels()

    def count_scores(self, kernel):
        """Set the operations of products of queries, keys and values: in the forward pass, in all passes."""
        m, s, cost = self.m, self.step, self.cost
        pairs = 2 * s.tokens * m.T * (m.n_head / s.tp) * kernel.score_share(m)
        self.scores, *backward = [
            pairs * (keys * cost.query_channels + values * cost.value_channels)
            for keys, values in kernel.products.values()
        ]
        self.keeps_scores = sum(backward) <= 2 * self.scores  # or else computes them anew
        self.keeps_attention &= self.recomputes and not self.keeps_scores
        again = self.recomputes and not self.keeps_attention
        self.all_scores = self.scores * (1 + again) + sum(backward)

    def count_channels(self):
        """Set channels per token: of products, as --remat dots keeps them; of all; of routed experts, in neither."""
        m, cost, tp = self.m, self.cost, self.step.tp
        D = m.model_dimension
        added = D * (tp if self.megatron else 1)  # to the residual
        self.products = cost.products + cost.branches * cost.ffn_width + added
        # beside products: the feed-forward's, norms and residuals, what is gathered, attention's output
        gathered = cost.gathered + D * (self.megatron and cost.ffn_width > 0)
        others = cost.ffn_width + added + 4 * D + gathered * tp + m.n_head * cost.value_channels
        self.computed = self.products + others
        per_row = (cost.branches + 1) * m.expert_width + 2 * D
        self.in_experts = self.rows / self.step.own_tokens * per_row

    def flops(self):
        """Operations of matrix products, recomputed ones among them. A product [a, b] x [b, c] takes 2abc."""
        m, s, cost = self.m, self.step, self.cost
        out = 2 * s.own_tokens * m.model_dimension * cost.ffn_width
        projections = 2 * s.own_tokens * cost.own_weights + (cost.branches + 1) * out
        projections += 2 * s.tokens * (m.n_head / s.tp) * cost.head_weights
        # arXiv:2006.16668, section 2.2
        experts_out = 2 * self.rows * m.model_dimension * m.expert_width
        experts_into = cost.branches * experts_out

        # a product's two gradients take twice its own operations
        flops = 3 * (projections + experts_into + experts_out) + self.all_scores
        # recomputation stops before the layer's last product
        if self.recomputes and not self.keeps_experts:
            flops += experts_into
        if m.remat not in ("none", "dots"):
            flops += projections - out
        return flops

    def send(self, n):
        """Add the collectives of a layer that runs n times in a step.

        Tensor and sequence parallelism: arXiv:2205.05198, section 4.2.2, or arXiv:2309.14509, section 3.1. Every
        collective runs in the forward pass, again where that is recomputed, and its transpose in the backward pass.
        """
        m, s, cost = self.m, self.step, self.cost
        again = self.recomputes
        channel = s.tokens * s.bytes  # bytes
        # of the residual: megatron gathers it for attention and the feed-forward, and sums what these add to it
        attention_out = channel * m.model_dimension * self.megatron
        feed_forward = attention_out * (cost.ffn_width > 0)
        gathered = channel * cost.gathered + feed_forward
        exchanged = 0 if self.megatron else channel / s.tp * m.n_head * cost.value_channels
        choices = 4 * s.B * m.n_experts if self.rows else 0  # of each sequence, for the balance
        for kind, whole, times in (
            ("all-gather", gathered, 1 + again),
            ("all-gather", attention_out + feed_forward, 1),
            ("reduce-scatter", gathered, 1),
            ("reduce-scatter", attention_out + feed_forward, 1),
            ("reduce-scatter", attention_out, again),
            ("all-to-all", exchanged, 2 + again),
            ("all-reduce", choices, 1 + again),
        ):
            s.send(kind, "tp", whole, n * times)
        if self.rows:
            self.send_tokens(n, again)

    def send_tokens(self, n, again):
        """Add what takes tokens to their experts and back (arXiv:2006.16668, section 3.2)."""
        m, s = self.m, self.step
        apart, _ = expert_axes(m.n_experts, s.split)

        def send(kind, whole, times):
            s.send(kind, apart, whole, times, 1, self.sharers)

        if not self.in_tiles:  # buckets
            slots = self.rows * s.bytes  # bytes of a number for each, such as its gate
            into_again = again and not self.keeps_experts
            send("all-to-all", slots * m.model_dimension, n * (4 + into_again))
            send("all-to-all", slots, n * (2 + again))
            return
        tokens = s.own_tokens * self.sharers
        choices = tokens * m.experts_per_token
        channels = tokens * m.model_dimension * s.bytes
        gates = choices * s.bytes
        send("all-gather", channels, n * (2 + again))
        send("all-gather", gates + 4 * choices, n * (1 + again))  # and the experts' numbers
        send("reduce-scatter", channels, n * 2)
        send("reduce-scatter", gates, n)

    def kept_by_attention(self):
        """Channels per token that it keeps of its attention kernel: the output, and a sum in float32 for each head."""
        channels = self.m.n_head * (self.cost.value_channels + 4 / self.step.bytes)
        return self.keeps_attention * channels

    def kept(self):
        """Channels per token that it keeps for the backward pass, without `kept_by_attention`."""
        m, fit = self.m, self.step.fit
        if m.remat not in ("none", "dots"):
            per_row = m.model_dimension + self.cost.branches * m.expert_width
            in_experts = self.keeps_experts * self.rows / self.step.own_tokens * per_row
            return m.model_dimension + in_experts
        if m.remat == "dots":
            return self.products + m.model_dimension
        kept = fit["kept"] * self.computed + fit["experts_kept"] * self.in_experts
        if self.keeps_scores:
            per_score = 2 * (self.cost.query_channels + self.cost.value_channels)
            kept += fit["scores_kept"] * self.scores / per_score / self.step.own_tokens
        return kept
