"""Formulas for the costs of a training step: parameters, operations, memory, and bytes over each mesh axis.

They have four uses. `--plan --by_formulas` answers in a second, without a compiler. --search ranks thousands of
configurations. A run divides its batch by the memory that they predict. An error that memory ran out names the flags
that would fit.

Everything is for one device and one optimizer step unless it says otherwise. Letters are those of model.py. The
formulas count matrix products and collectives as model.py writes them, not as a compiler changes them. All else (norms,
routing by index, biases) costs memory traffic, taken as a multiple of the activations (`planning/fitted.py`).
"""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

import collectives
import model
import utils
from architectures import architecture
from architectures.parameters import is_param
from kernels import loss
from planning import hlo, layer_costs
from planning.fitted import LAUNCH, LAUNCHES, MUON_TRAFFIC, attention_slowdown
from planning.step import Work, divide, expert_axes, sent, total, transfers
from training import muon
from training.optimizer import make_optimizer
from training.train_state import abstract_params, map_opt_state


class Estimate(NamedTuple):
    """The costs of a step on one device."""

    mesh: dict  # {axis: size}
    flops: float  # of matrix products
    sent: dict  # {(axes, kind of collective): (bytes, times, seconds)}
    seconds: dict  # {part: seconds}, without those of links
    bubble: float  # share of the pipeline's ticks in which a stage idles
    # bytes
    weights: float
    optimizer: float  # its state
    batch: float  # tokens and targets
    activations: float  # kept from the forward pass for the backward pass
    workspace: float  # all else at the moment of peak memory


def estimate(cfg, machine):
    """The `Estimate` of the step of a validated Config."""
    step = divide(cfg, machine)
    weights = weights_of(step)
    layers = layers_of(step)
    works = [weights.work, layers.work, head_work(step)]
    if cfg.optimizer.optimizer == "muon":
        works.append(muon_work(step))
    works.append(pipeline_work(step))
    work = total(works)
    return Estimate(
        mesh=step.mesh,
        flops=work.flops,
        sent=sent(work.transfers),
        seconds=seconds_of(work, machine.chip, cfg.model.model_dtype),
        bubble=(step.mesh["pp"] - 1) / step.ticks,
        weights=weights.stored,
        optimizer=weights.optimizer,
        batch=8 * step.batches * step.own * step.own_tokens,  # two int32 per token
        activations=weights.kept + layers.kept,
        workspace=workspace(step, weights, layers),
    )


def seconds_of(work, chip, dtype):
    """{part: seconds} of a `Work` in a --model_dtype, without those of links."""
    speed = chip.speed_in(dtype)
    attention = attention_slowdown(chip) * work.attention / speed
    if work.attention_traffic:  # products as all others, most of which wait for memory
        attention = max(work.attention / speed, work.attention_traffic / chip.memory_speed)
    products = (work.flops - work.attention) / speed + attention
    products += work.product_traffic / chip.memory_speed
    others = work.other_traffic / chip.memory_speed
    launches = chip.gpu * LAUNCHES * LAUNCH * work.layer_passes
    return {"matrix products": products, "memory": others + launches}


@functools.cache  # --search calls it thousands of times
def optimizer_bytes(m, o):
    """Bytes of optimizer state for each number of a parameter, such as 8 for AdamW's two moments. Scalars are left out.

    m: a utils.Model. o: a utils.Optimizer. Returns a tree like the parameters.
    """
    cfg = utils.Config(model=m, optimizer=o, run=utils.Run(n_device_axis=(1, 1, 1)))
    mesh = AbstractMesh(cfg.run.n_device_axis, collectives.AXES)
    params = abstract_params(cfg, mesh)
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    n_bytes = Counter()

    def add(leaf, name):
        n_bytes[name] += leaf.size * leaf.dtype.itemsize

    optimizer = make_optimizer(cfg, mesh)
    map_opt_state(optimizer, params, add, lambda leaf: None, beside=names)
    return jax.tree.map(lambda param, name: n_bytes[name] / param.size, params, names)


@functools.cache  # of thousands of configurations, most differ in --remat and microbatches alone
def table_of(m, run):
    """(`model.param_table`, Muon's `Bucket`s) of a model and a mesh. run: a utils.Run with nothing but the mesh."""
    cfg = utils.Config(model=m, run=run)
    mesh = dict(zip(collectives.AXES, run.n_device_axis))
    matrices = muon.matrices_of(muon.hidden_params(cfg), mesh)
    return model.param_table(cfg), muon.make_buckets(matrices, mesh)


def table_of_step(step):
    """`table_of` of a `Step`."""
    m, run = step.cfg.model, step.cfg.run
    mesh = utils.Run(n_device_axis=run.n_device_axis, pp_interleave=run.pp_interleave)
    return table_of(dataclasses.replace(m, remat="full"), mesh)


class Weights(NamedTuple):
    """The costs of a device's parameters."""

    work: Work  # to gather weights, use them in products and sum their gradients
    stored: float  # bytes of parameters
    optimizer: float  # bytes of its state
    gathered: float  # numbers of gathered weights, of all layers of a device
    largest: float  # numbers of gathered weights of the largest layer
    kept: float  # bytes of weights that are kept for the backward pass


def weights_of(step):
    """The `Weights` of a `Step`.

    ZeRO-3 (arXiv:1910.02054, section 5.3): with --fsdp full, weights are gathered for every layer's forward pass, and
    again where the backward pass recomputes it. Otherwise they are gathered once a step. The TPU compiler gathers them
    once a batch instead, and sums the gradients of copies outside the loop of gradient accumulation.
    """
    cfg, m = step.cfg, step.cfg.model
    rounds = cfg.run.pp_interleave
    gathers, sums = 1, step.batches  # of weights and of the gradients of their copies, in a step
    if step.machine.platform == "tpu":
        gathers, sums = sums, gathers
    kept_by_optimizer = optimizer_bytes(m, cfg.optimizer)
    stored = optimizer = used = 0
    gathered = defaultdict(int)
    sent = []
    for name, table in table_of_step(step)[0].items():
        in_layer = name in step.layers
        layers, times = step.layers.get(name, (1, 1))
        if name in architecture(m.architecture).stacks:
            layers *= rounds
            times /= rounds
        gradients = step.batches * times  # how often a layer gets a gradient
        # how often weights are gathered, how often their gradients are scattered, and how many layers each time
        use = gathers, step.batches, 1
        if step.gathers_by_layer and in_layer:
            use = gradients * (1 if m.remat == "none" else 2), gradients, layers
        params = jax.tree.leaves(table, is_leaf=is_param)
        for p, per_number in zip(params, jax.tree.leaves(kept_by_optimizer[name])):
            axes = [axis for entry in p.spec for axis in muon.real_axes(entry, step.mesh)]
            own = math.prod(p.shape) // muon.axes_size(axes, step.mesh)
            stored += 4 * own
            optimizer += per_number * own
            sent += transfers(step, "all-reduce", step.mesh.keys() - axes, 4 * own, sums)
            whole, gathering = gather(step, p, own, in_layer, *use)
            sent += gathering
            if in_layer:
                gathered[name] += whole
                used += whole * gradients
    kept = 0
    # gathered weights are kept of each run of a layer
    if step.machine.platform == "gpu" and m.remat == "none":
        kept = step.width * used / step.batches
    largest = max(n / step.layers[name][0] for name, n in gathered.items())
    work = Work(
        product_traffic=step.fit.product_weights * used,
        other_traffic=step.fit.weights * used,
        transfers=sent,
    )
    return Weights(work, stored, optimizer, sum(gathered.values()), largest / rounds, kept)


def gather(step, p, own, in_layer, forward, backward, count):
    """(numbers of a parameter when it is gathered, [`Transfer`]).

    The transfers gather it `forward` times, and `backward` times reduce and scatter its gradient in float32. own:
    numbers of it that a device stores. count: collectives each time.
    """
    if not p.gather_dim:
        return own, []
    width = step.width if p.cast else 4
    whole = own
    found = []

    def both_ways(collective, back, axes, n=0):
        found.extend(transfers(step, collective, axes, whole * width, forward, count, n))
        found.extend(transfers(step, back, axes, whole * 4, backward, count, n))

    # slices of all experts are exchanged for slices of one expert, and these are gathered
    if p.expert:
        E = step.cfg.model.n_experts
        apart, together = expert_axes(E, step.mesh)
        both_ways("all-to-all", "all-to-all", apart, E)
        n = muon.axes_size(p.gather_axes, step.mesh) // E
        whole *= n
        both_ways("all-gather", "reduce-scatter", together, n)
        return whole, found
    back = "all-to-all" if step.fsdp == "exchange" and in_layer else "reduce-scatter"
    for axis in reversed(p.gather_axes):
        whole *= step.mesh[axis]
        both_ways("all-gather", back, axis)
    return whole, found


class Layers(NamedTuple):
    """The costs of a device's layers."""

    work: Work
    kept: float  # bytes that the forward passes of a batch keep for the backward passes
    widest: float  # bytes of the largest layer's intermediates in its backward pass


def layers_of(step):
    """The `Layers` of a `Step`."""
    fit = step.fit
    remat = step.cfg.model.remat
    copies = fit.layer_copies_kept if remat == "none" else fit.layer_copies
    channel = step.own_tokens * step.width  # bytes of a channel of a microbatch
    works = []
    all_kept = 0
    widest = 0
    for kind, (layers, times) in step.layers.items():
        layer = layer_costs.layer_of(step, kind)
        n = step.batches * layers * times
        kept = layers * times * channel * layer_costs.kept(layer)
        of_attention = layers * times * channel * layer_costs.attention_kept(layer)
        scores = channel * layer_costs.scores_kept(layer)
        passes = layer_costs.score_traffic(layer)
        intermediates = n * channel * (layer.computed + layer.in_experts)
        traffic = fit.kept[remat] * step.batches * kept
        traffic += fit.intermediates * (intermediates + step.batches * of_attention)
        traffic += n * passes.others
        work = Work(
            flops=n * layer_costs.flops(layer),
            attention=n * layer.all_scores,
            attention_traffic=n * passes.products,
            layer_passes=n,
            product_traffic=fit.product_intermediates * intermediates,
            other_traffic=traffic,
            transfers=layer_costs.sent_by(layer, n),
        )
        works.append(work)
        all_kept += kept + of_attention
        width = copies * layer.computed + fit.expert_copies * layer.most_in_experts
        widest = max(widest, channel * width)
        if layer.recomputes:  # the scores of one layer, when the rest of its intermediates is gone
            widest = max(widest, scores)
        else:
            all_kept += layers * times * scores
    return Layers(total(works), all_kept, widest)


def head_work(step):
    """The `Work` of the logits and the loss."""
    m = step.cfg.model
    logits = step.batches * step.own * step.own_tokens * m.padded_vocab
    flops = 6 * logits * m.model_dimension  # 2 for the product, 4 for its two gradients
    return Work(flops=flops, other_traffic=step.fit.logits * logits)


def muon_work(step):
    """The `Work` of Muon on the updates of a step. `muon.make_buckets` decides which device owns which matrices."""
    width = step.width
    works = []
    _, buckets = table_of_step(step)
    for bucket in buckets:
        rows, columns, near = bucket.layout
        exchanged = transfers(step, "all-to-all", rows + columns, width * bucket.exchanged, 2)
        if len(near) > 1:
            owners = np.arange(bucket.owner_copies)[None]
            near = hlo.axes_of(owners, dict(dp=step.mesh["dp"], tp=step.mesh["tp"]))
        updates = width * bucket.gathered
        gathered = transfers(step, "all-gather", near, updates, 1, 1, bucket.owner_copies)
        m, n = sorted(bucket.matrix)
        owned = width * bucket.n_owned * m
        blocks = width * bucket.n_slots * math.prod(bucket.block)
        work = Work(
            flops=bucket.flops,
            product_traffic=owned * muon.STEPS * (4 * n + 5 * m),
            other_traffic=MUON_TRAFFIC * (blocks + 2 * owned * n),
            transfers=exchanged + gathered,
        )
        works.append(work)
    return total(works)


def pipeline_work(step):
    """The `Work` of the pipeline's transfers: activations from stage to stage, their gradients back, and the inputs and
    outputs that all stages share."""
    m, n = step.cfg.model, step.batches
    tick = step.own_tokens * m.model_dimension * step.width
    everything = step.cfg.data.microbatches * tick
    found = transfers(step, "collective-permute", "pp", tick, n * 2 * step.ticks)
    found += transfers(step, "all-gather", "pp", everything, n)
    found += transfers(step, "all-to-all", "pp", everything, n * 3)
    # token ids, of which an embedding with a lookback needs those before
    if architecture(m.architecture).lookback(m):
        ids = step.own * step.own_tokens * step.mesh["tp"]
        found += transfers(step, "all-gather", "tp", 4 * ids, n)
    return Work(transfers=found)


def workspace(step, weights, layers):
    """Bytes at the moment of peak memory, in addition to what is stored and what is kept for the backward pass.

    The peak is the largest of three moments: while logits exist, in a layer's backward pass, and when the two gradients
    of the embedding are added.
    """
    m = step.cfg.model
    fit = step.fit
    width = step.width
    embedding = m.padded_vocab * m.model_dimension
    in_dtype = width * embedding
    in_use = width * weights.gathered
    gradients = 4 * weights.gathered
    # the gradients summed so far
    accumulated = gradients if step.fsdp == "none" else weights.stored
    if step.gathers_by_layer:  # a layer's weights, those of the next, and its gradient
        in_use = 2 * width * weights.largest
        gradients = 4 * weights.largest + weights.stored
    # a copy of what one microbatch keeps, where several keep it
    one_microbatch = layers.kept / step.ticks if step.ticks > 1 else 0
    tokens = step.own * step.own_tokens
    chunk = loss.LOSS_CHUNK[step.machine.platform]
    logits = min(tokens, chunk) * m.padded_vocab  # that exist at once

    at_logits = in_use + in_dtype + 4 * fit.logit_copies * logits
    if tokens > chunk:
        at_logits += 4 * embedding
    in_layer = in_use + in_dtype + gradients + one_microbatch + layers.widest
    at_embedding = gradients + in_dtype + 4 * embedding - layers.kept
    embedded = fit.embedded_copies * tokens * m.model_dimension * width
    most = embedded + max(at_logits, in_layer, at_embedding)
    return most + accumulated if step.batches > 1 else most
