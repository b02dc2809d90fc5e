"""The transformer: parameters, loss, forward pass, pipeline and stages, in pure JAX.

What makes it a DeepSeek or another model, its table and its layers, stands in `architectures`. Everything here but
parameters runs inside `shard_map`, on local shapes, which tail comments give. A mesh of (1, 1, 1) is the unsharded
model; there is no second implementation.

Letters: B batch, T sequence, D model, H heads, K head dim, R latent, E experts, C capacity, F feed-forward,
V vocabulary, L layers per block, M microbatches, S stages. "axis" is a mesh axis, "dim" an array dimension:

    dp  splits the batch, every large weight (gathered just before use) and, with tp, the experts
    pp  splits the stack of blocks into stages, and the microbatches outside the pipeline
    tp  splits heads and feed-forward width, and the sequence everywhere else
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import utils
from architectures import architecture
from architectures.experts import choose_experts
from architectures.layers import AFTER_EMBEDDING, Load, Tokens, dropout, gather, no_load, take
from architectures.parameters import is_param, table_map
from collectives import (
    AXES,
    BATCH_SPEC,
    EXPERT_AXES,
    Weights,
    from_last_stage,
    gather_sequence,
    next_stage,
    sum_over,
    to_stages,
)
from kernels import attention
from kernels import loss as losses

# --- Parameters: one table --------------------------------------------------------------------------------------


def param_table(cfg):
    """Nested dict of `Param`s for a validated Config.

    Leaves of blocks are stacked on a leading dim that pp splits. With --pp_interleave they have a dim of rounds before
    it, and every stage has a part of every round's blocks.
    """
    m, rounds = cfg.model, cfg.run.pp_interleave
    arch = architecture(m.architecture)
    table = dict(arch.table(cfg))

    def in_rounds(p):
        blocks, *shape = p.shape
        return p._replace(shape=(rounds, blocks // rounds, *shape), spec=P(None, *p.spec))

    if rounds > 1:
        for kind in arch.stacks & table.keys():
            table[kind] = table_map(in_rounds, table[kind])
    if not m.tied:
        table["head"] = table["embedding"]._replace(inputs=(-1,), outputs=(-2,))
    return table


def param_specs(cfg):
    """The PartitionSpec of every parameter, nested like `param_table`."""
    return table_map(lambda p: p.spec, param_table(cfg))


def count_params(cfg):
    """(total, active for one token, embedding) numbers of parameters; the first two without the embedding."""
    table = param_table(cfg)
    embedding = math.prod(table["embedding"].shape)
    leaves = jax.tree.leaves(table, is_leaf=is_param)
    total = sum(math.prod(p.shape) for p in leaves)
    active = sum(math.prod(p.shape) * p.active for p in leaves)
    return total - embedding, round(active) - embedding, embedding


def flops_per_token(cfg):
    """Floating-point operations of the forward and backward pass per training token, without recomputation.

    6 for each active weight (PaLM, arXiv:2204.02311, appendix B), the head included, and causal attention at half of
    T x T.
    """
    m = cfg.model
    arch = architecture(m.architecture)
    _, active, _ = count_params(cfg)
    heads = m.mtp_depth + m.tied  # a head of its own is among the active weights once
    layers = {
        "first": m.first_layers,
        "dense": m.blocks * (m.layers_per_block - 1),
        arch.last: m.blocks,
        "mtp": m.mtp_depth,
    }
    channels = 0
    for kind, number in layers.items():
        cost = arch.layer_cost(m, kind)
        channels += number * (cost.query_channels + cost.value_channels)
    attention_flops = m.T * m.n_head * channels / 2
    return 6 * (active + heads * m.vocab_size * m.model_dimension + attention_flops)


# --- Loss -------------------------------------------------------------------------------------------------------


class Metrics(NamedTuple):
    """What is measured of one batch over the whole mesh."""

    cross_entropy: jax.Array  # [] nats per token
    mtp: jax.Array  # [] nats per token of multi-token prediction, mean over its depths
    load_loss: jax.Array  # [] load-balancing loss, summed over layers, mean over sequences
    load: dict  # {kind of layer: [layers, E]} choices that fell on each expert; dims as in param_table
    dropped: jax.Array  # [] share of the choices that found their expert's bucket full


def make_loss(cfg, mesh, train):
    """`loss(params, tokens, targets, key, first)` on global arrays, to be differentiated from outside.

    tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:]; key of dropout; first: number, within the training
    step, of the batch's first sequence. Returns the loss, float32 [], and `Metrics`. The loss is cross-entropy +
    balance_weight x load-balancing loss + mtp_weight x multi-token prediction's cross-entropy. Without `train` there
    is no dropout and no multi-token prediction.
    """
    cfg = for_devices(cfg, mesh)
    m = cfg.model
    arch = architecture(m.architecture)
    depths = m.mtp_depth if train else 0
    chunk = loss_chunk(mesh)
    forward = make_forward(cfg, train)
    layer = make_layer(cfg, train)

    @jax.named_scope("head")
    def head_loss(x, head, targets):
        return losses.cross_entropy(x, head, targets, m.vocab_size, chunk)

    def local_loss(params, ids, targets, key, first):  # ids and targets [M/S, B/dp, T/tp]
        tokens_of = describe_tokens(m, ids, key if train and m.dropout_rate else None, first)
        x, load, top, layers = forward(params, ids, tokens_of)
        cross_entropy = head_loss(x, top["head"], targets)
        loads, mtp = {arch.last: load}, jnp.float32(0)
        if depths:
            with jax.named_scope("mtp"):
                mtp, loads["mtp"] = arch.predict_further(
                    m, x, targets, tokens_of, top, layers["mtp"], layer, head_loss
                )
        return reduce_loss(cfg, ids.shape, cross_entropy, mtp, loads)

    loads = {arch.last: P("pp") if cfg.run.pp_interleave == 1 else P(None, "pp")}
    if depths:
        loads["mtp"] = P()
    spec = P(*BATCH_SPEC[1:])
    # check_vma is off: reduce_loss replicates what out_specs calls so. Tests hold gradients to those of one device.
    return jax.shard_map(
        local_loss,
        mesh=mesh,
        in_specs=(param_specs(cfg), spec, spec, P(), P()),
        out_specs=(P(), Metrics(P(), P(), P(), loads, P())),
        check_vma=False,
    )


@jax.named_scope("reduce_loss")
def reduce_loss(cfg, shape, cross_entropy, mtp, loads):
    """The loss and `Metrics` of the whole batch from one device's sums of nats and {kind of layer: `Load`}.

    shape: [M/S, B/dp, T/tp] of the device's tokens.
    """
    m, o = cfg.model, cfg.optimizer
    M, B, t = shape
    S, dp, tp = lax.axis_size("pp"), lax.axis_size("dp"), lax.axis_size("tp")
    sequences = M * S * B * dp
    tokens = sequences * t * tp
    depths = m.mtp_depth if "mtp" in loads else 0
    choices = tokens * m.experts_per_token * (m.blocks + depths)

    cross_entropy = cross_entropy / tokens
    mtp = mtp / (tokens * max(1, depths))
    balance = sum(load.loss.sum() for load in loads.values()) / sequences
    loss = sum_over(cross_entropy + o.balance_weight * balance + o.mtp_weight * mtp, AXES)

    # Metrics have no gradient, so they may be summed as well.
    cross_entropy, mtp, balance, loads = lax.stop_gradient((cross_entropy, mtp, balance, loads))
    routed = architecture(m.architecture).routed
    counts = {}
    for kind, load in loads.items():
        counts[kind] = sum_over(load.tokens, routed.get(kind, EXPERT_AXES))
    dropped = sum_over(sum(load.dropped.sum() for load in loads.values()), AXES)
    return loss, Metrics(
        dropped=dropped / max(1, choices),
        cross_entropy=sum_over(cross_entropy, AXES),
        mtp=sum_over(mtp, AXES),
        load_loss=sum_over(balance, AXES),
        load=counts,
    )


def make_score(cfg, mesh):
    """`score(params, tokens, targets)` on global arrays: -log p of every target, float32 [M, B, T], 0 where the target
    is negative; and whether greedy decoding would draw it, bool [M, B, T].

    tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:], as are the results. No token is dropped.
    """
    cfg = for_devices(dropless(cfg), mesh)
    m = cfg.model
    chunk = loss_chunk(mesh)
    forward = make_forward(cfg, train=False)

    def local_score(params, ids, targets):
        x, _, top, _ = forward(params, ids, describe_tokens(m, ids))
        return losses.token_losses(x, top["head"], targets, m.vocab_size, chunk)

    spec = P(*BATCH_SPEC[1:])
    return jax.shard_map(
        local_score,
        mesh=mesh,
        in_specs=(param_specs(cfg), spec, spec),
        out_specs=(spec, spec),
        check_vma=False,
    )


def dropless(cfg):
    """`cfg` without a capacity: for inference, where no token may be dropped."""
    return utils.replace(cfg, capacity_factor=0.0)


def for_devices(cfg, mesh):
    """`cfg` with what auto stands for on the devices of `mesh`."""
    device = mesh.devices.flat[0]
    kernel = attention.choose_kernel(cfg.model, attention.platform_of(device))
    experts = choose_experts(cfg.model, device.platform)
    return utils.replace(cfg, attention=kernel, experts=experts)


def loss_chunk(mesh):
    """Number of tokens whose logits a device of `mesh` holds at once."""
    return losses.LOSS_CHUNK[mesh.devices.flat[0].platform]


# --- Forward pass -----------------------------------------------------------------------------------------------


def make_forward(cfg, train):
    """`forward(params, ids, tokens_of)` on local shapes: ids int32 [M/S, B/dp, T/tp], and `tokens_of` of
    `describe_tokens`.

    Returns the hidden states [M/S, B/dp, T/tp, D] that the head reads, the stage's `Load`, and the gathered parameters
    outside layers and in layers (`top_params`, `layer_params`).
    """
    m = cfg.model
    arch = architecture(m.architecture)
    embed = make_embed(cfg, train)
    run_blocks = make_blocks(cfg, train)

    def forward(params, ids, tokens_of):
        layers = layer_params(params, cfg)
        microbatches = own_microbatches(len(ids))
        with jax.named_scope("embed"):
            top = top_params(params, cfg)
            x = embed(top, layers, ids, microbatches, tokens_of)  # [M/S, B/dp, T/tp, D]
            x = to_stages(x)  # [M, B/dp, T/tp, D]
        with jax.named_scope("pipeline"):
            x, load = run_blocks(layers, x, tokens_of)
            x = from_last_stage(x)  # [M/S, B/dp, T/tp, D]
        with jax.named_scope("head"):
            x = arch.norm(x, top["norm"], m.norm_eps)
        return x, load, top, layers

    return forward


def describe_tokens(m, ids, key=None, first=0):
    """`tokens_of(microbatch)`: the `Tokens` of a microbatch, whose number counts those of all stages.

    ids int32 [M/S, B/dp, T/tp]; key of dropout, None for none of it; first: number, within the training step, of the
    first sequence of the batch.
    """
    _, B, t = ids.shape
    dp, tp = lax.axis_size("dp"), lax.axis_size("tp")
    position = (lax.axis_index("tp") * t + jnp.arange(t))[None]  # [1, T/tp]
    sequence = lax.axis_index("dp") * B + jnp.arange(B)  # [B/dp]
    starts = document_starts(ids, m)

    def tokens_of(microbatch):
        number = None
        if key is not None:
            sequences = first + microbatch * B * dp + sequence
            number = (sequences[:, None] * t * tp + position).astype(jnp.uint32)
        start = None if starts is None else starts[microbatch]
        return Tokens(position, key=key, number=number, start=start)

    return tokens_of


def document_starts(ids, m):
    """Where the document of each token begins, int32 [M, B/dp, T] for the microbatches of all stages: at the last
    end-of-text token up to it. None where documents are not kept apart. ids [M/S, B/dp, T/tp]."""
    if not m.document_mask:
        return None
    M, B, t = ids.shape
    ids = gather_sequence(ids.reshape(M * B, t), True)
    ids = to_stages(ids.reshape(M, B, -1))
    ends = jnp.where(ids == m.end_of_text, jnp.arange(ids.shape[-1]), 0)
    return lax.cummax(ends, axis=2)


def own_microbatches(M):
    """Numbers, among those of all stages, of the M microbatches that this stage embeds and computes the loss of."""
    return lax.axis_index("pp") * M + jnp.arange(M)


def make_embed(cfg, train):
    """`embed(top, layers, ids, microbatches, tokens_of)`: what enters the first block, [M/S, B/dp, T/tp, D], of ids
    [M/S, B/dp, T/tp]: the embedding and --first_layers, which every stage runs for its own microbatches."""
    m = cfg.model
    arch = architecture(m.architecture)
    first_layers = make_layer_loop(cfg, "first", m.first_layers, remat=train)
    number = m.blocks * m.layers_per_block  # of the first one, for dropout: blocks count before

    def embed(top, layers, ids, microbatches, tokens_of):
        def embed_one(ids, microbatch):
            tokens = tokens_of(microbatch)
            x = arch.embed(top, ids, tokens.within_document())
            return dropout(x, m.dropout_rate, tokens, AFTER_EMBEDDING)

        def run_first_layers(grad, scanned):
            x, microbatch = scanned
            weights = Weights(layers["first"].value, grad)
            x, _, weights = first_layers(weights, (), number, x, tokens_of(microbatch), None)
            return weights.grad, x

        x = jax.vmap(embed_one)(ids, microbatches)
        if m.first_layers:
            _, x = lax.scan(run_first_layers, layers["first"].grad, (x, microbatches))
        return x

    return embed


def make_blocks(cfg, train):
    """`run_blocks(layers, x, tokens_of)`: all blocks by the pipeline, x [M, B/dp, T/tp, D] -> x, which is meaningful
    on the last stage only, and this stage's `Load`, its tokens with dims as in param_table."""
    m, rounds = cfg.model, cfg.run.pp_interleave
    stacks = architecture(m.architecture).stacks
    stage = make_stage(cfg, remat=train)

    def run_blocks(layers, x, tokens_of):
        def run_stage(x, state, turn, microbatch, valid):
            total, grads = state
            weights = with_grads(layers, grads)
            y, (load, _), weights = stage(weights, x, tokens_of(microbatch), turn=turn)
            load = jax.tree.map(lambda n: jnp.where(valid, n, 0), load)
            total = Load(
                loss=total.loss + load.loss,
                tokens=total.tokens.at[turn].add(load.tokens),
                dropped=total.dropped + load.dropped,
            )
            return y, (total, grads_of(weights))

        grads = grads_of({kind: layers[kind] for kind in layers if kind in stacks})
        load = no_load(rounds, blocks_of_stage(cfg), m.n_experts)
        x, (load, _) = pipeline(run_stage, x, (load, grads), rounds)
        if rounds == 1:
            load = load._replace(tokens=load.tokens[0])
        return x, load

    return run_blocks


def pipeline(stage, inputs, state, rounds=1):
    """Run M microbatches through S stages (GPipe, arXiv:1811.06965, section 2.3), in `rounds` rounds (--pp_interleave;
    arXiv:2104.04473, section 2.2, without its order of forward and backward passes).

    In each tick every stage runs its blocks of one round on one microbatch and passes the result on. Two stages, four
    microbatches, two rounds; "1.2" is round 1 of microbatch 2:

        tick       0    1    2    3    4    5    6    7    8
        stage 0   0.0  0.1  0.2  0.3  1.0  1.1  1.2  1.3   -
        stage 1    -   0.0  0.1  0.2  0.3  1.0  1.1  1.2  1.3

    There are rounds x M + S - 1 ticks: stage s idles for s ticks first (warm-up) and for S - 1 - s at the end
    (cool-down). What stage 1 passes on after tick 1, 0.0, reaches stage 0 in tick 2 and waits there for tick 4. More
    rounds make shorter ticks, and idle time shrinks with them.

    inputs [M, ...] are known to every stage. `stage(x, state, turn, microbatch, valid)` returns y and the state to
    carry on, `turn` being the round; where `valid` is false, the stage is idle and must leave the state as it was.
    Returns outputs [M, ...], meaningful on the last stage only, and the state.
    """
    S, M = lax.axis_size("pp"), len(inputs)
    own = lax.axis_index("pp")

    def tick(carry, i):
        x, inputs, state = carry
        if rounds > 1:  # stage 0 gets from the last stage its input of the next round
            arrived = jnp.maximum(i - S, 0) % M
            inputs = inputs.at[arrived].set(jnp.where(i >= S, x, inputs[arrived]))
        is_first = own == 0
        entering = i % M if rounds > 1 else jnp.minimum(i, M - 1)
        x = jnp.where(is_first, inputs[entering], x)

        done = jnp.clip(i - own, 0, rounds * M - 1)  # runs of this stage before this tick
        turn, microbatch = done // M, done % M
        valid = (i >= own) & (i - own < rounds * M)
        y, state = stage(x, state, turn, microbatch, valid)
        return (next_stage(y), inputs, state), y

    start = jnp.zeros_like(inputs[0]), inputs, state
    (_, _, state), outputs = lax.scan(tick, start, jnp.arange(rounds * M + S - 1))
    return outputs[-M:], state


# --- Stages and layers ------------------------------------------------------------------------------------------


def blocks_of_stage(cfg):
    """Number of blocks that one stage runs in one round."""
    return cfg.model.blocks // (cfg.run.pp_interleave * lax.axis_size("pp"))


def make_stage(cfg, remat=True):
    """`stage(weights, x, tokens, cache, turn)`: this stage's blocks of round `turn` on x [B, T/tp, D]; the same for
    training and decoding.

    weights: {kind: `Weights`} of `layer_params`; cache: {kind: array}, None in training. Returns x; a pair of `Load`,
    with tokens [blocks, E] and the rest summed, and the cache; and the weights to go on with.
    """
    m, rounds = cfg.model, cfg.run.pp_interleave
    arch, L = architecture(m.architecture), m.layers_per_block
    dense_layers = make_layer_loop(cfg, "dense", L - 1, remat)
    layer = make_layer(cfg, remat)

    def run_block(weights, index, number, x, tokens, cache):
        new_cache = {}
        if L > 1:
            x, new_cache["dense"], weights["dense"] = dense_layers(
                weights["dense"], index, number, x, tokens, cache.get("dense")
            )
        last, own_cache = arch.last, cache.get(arch.last)
        x, (load, new_cache[last]), weights[last] = layer(
            last, weights[last], index, number + L - 1, x, tokens, own_cache
        )
        return x, load, new_cache, weights

    def stage(weights, x, tokens, cache=None, turn=0):
        S, blocks = lax.axis_size("pp"), blocks_of_stage(cfg)

        def scan_block(carry, scanned):
            x, grads = carry
            i, cache = scanned
            number = ((turn * S + lax.axis_index("pp")) * blocks + i) * L
            index = (turn, i) if rounds > 1 else (i,)
            own = with_grads(weights, grads)
            x, load, cache, own = run_block(own, index, number, x, tokens, cache)
            return (x, grads_of(own)), (load, cache)

        grads = grads_of({kind: weights[kind] for kind in weights if kind in arch.stacks})
        scanned = jnp.arange(blocks), cache or {}
        (x, grads), (load, cache) = lax.scan(scan_block, (x, grads), scanned)
        load = Load(load.loss.sum(), load.tokens, load.dropped.sum())
        return x, (load, cache), with_grads(weights, grads)

    return stage


def make_layer_loop(cfg, kind, n, remat):
    """`run(weights, block, first, x, tokens, cache)`: n layers of one kind, without experts, on x [B, T/tp, D].

    They stand at (*block, 0), (*block, 1), .. of their stack and are numbered from `first`. Returns x, the cache and
    the stack's `Weights` to go on with.
    """
    layer = make_layer(cfg, remat)

    def run(weights, block, first, x, tokens, cache):
        def scan_layer(carry, scanned):
            x, grad = carry
            i, cache = scanned
            own = Weights(weights.value, grad)
            x, (_, cache), own = layer(kind, own, (*block, i), first + i, x, tokens, cache)
            return (x, own.grad), cache

        scanned = jnp.arange(n), cache
        (x, grad), cache = lax.scan(scan_layer, (x, weights.grad), scanned)
        return x, cache, Weights(weights.value, grad)

    return run


# What --remat keeps of a layer's forward pass for its backward pass: all, matrix products, or the input.
REMAT = {
    "none": lambda f: f,
    "dots": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("product")
    ),
    "full": jax.checkpoint,
}


def make_layer(cfg, remat):
    """`layer(kind, weights, index, number, x, tokens, cache)`: the layer at `index` of the stack of its kind.

    number: its own among all layers of the model, for dropout. Returns x, what else the layer returns (`Load`, cache),
    and the stack's `Weights` to go on with.
    """
    m = cfg.model
    table, dtype = param_table(cfg), jnp.dtype(m.model_dtype)
    functions = architecture(m.architecture).layers
    checkpoint = REMAT[m.remat if remat else "none"]

    def layer(kind, weights, index, number, x, tokens, cache):
        if tokens.key is not None:
            tokens = tokens._replace(key=jax.random.fold_in(tokens.key, number))

        @checkpoint
        def run(weights, x, cache):
            p, grad = take(weights, index)
            if m.fsdp == "full":
                p, _ = take(gather(p, table[kind], dtype), ())
            x, aside = functions[kind](p, x, tokens, m, cache)
            return x, aside, grad

        x, aside, grad = run(weights, x, cache)
        return x, aside, Weights(weights.value, grad)

    return layer


def layer_params(params, cfg):
    """{kind: `Weights`} of this device's layers. With --fsdp full they are as stored, in float32, and each layer
    gathers its own; else they are gathered here, once."""
    m = cfg.model
    table, dtype = param_table(cfg), jnp.dtype(m.model_dtype)
    if m.fsdp == "full":
        table = table_map(lambda p: p._replace(gather=(), expert=0), table)
        dtype = jnp.float32
    kinds = architecture(m.architecture).layers
    return {kind: gather(params[kind], table[kind], dtype) for kind in kinds if kind in params}


def top_params(params, cfg):
    """The parameters outside layers, gathered: embedding, head (the embedding where it is tied), norm and what else
    `Architecture.embed` needs."""
    table = param_table(cfg)
    names = table.keys() - architecture(cfg.model.architecture).layers.keys()
    stored = {name: params[name] for name in names}
    table = {name: table[name] for name in names}
    top, _ = take(gather(stored, table, jnp.dtype(cfg.model.model_dtype)), ())
    return {"head": top["embedding"], **top}


def grads_of(weights):
    """{kind: grad} of {kind: `Weights`}. Loops carry the grads alone; a carried value would be copied in every turn."""
    return {kind: weights[kind].grad for kind in weights}


def with_grads(weights, grads):
    """{kind: `Weights`} of the kinds in `grads`, with these grads."""
    return {kind: Weights(weights[kind].value, grads[kind]) for kind in grads}


# --- Router bias ------------------------------------------------------------------------------------------------


def update_router_bias(params, load, rate):
    """Auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1): each router bias moves by `rate` towards an even
    load.

    load {kind: [layers, E]}: choices that fell on each expert in one training step, dims as in param_table.
    """
    return params | {kind: move_bias(params[kind], load[kind], rate) for kind in load}


def move_bias(layers, load, rate):
    """A stack's parameters with its router bias moved, if it has one."""
    if "layer" in layers:  # of a multi-token predictor, which holds a layer
        return layers | {"layer": move_bias(layers["layer"], load, rate)}
    if not {"router", "bias"} <= layers.keys():
        return layers
    bias = layers["bias"] + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
    return layers | {"bias": bias}
