"""The transformer: parameters, stages, pipeline and loss, in pure JAX.

Everything between "Collectives" and the public functions at the end runs inside `shard_map` on local shapes, which
tail comments give. A mesh of (1, 1, 1) is the unsharded model; there is no second implementation.

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

from architectures import architecture
from architectures.layers import Load, Tokens, dropout, gather, no_load, take
from architectures.parameters import is_param, table_map, with_model
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
    """Nested dict of `Param`s for a validated Config. Leaves of blocks are stacked on a leading dim that pp splits."""
    m = cfg.model
    arch = architecture(m.architecture)
    table = dict(arch.table(cfg))
    rounds = cfg.run.pp_interleave
    if (
        rounds > 1
    ):  # blocks go round the stages so many times: every stage has a part of every round's
        for kind in arch.stacks & table.keys():
            table[kind] = table_map(
                lambda p: p._replace(
                    shape=(rounds, p.shape[0] // rounds, *p.shape[1:]), spec=P(None, *p.spec)
                ),
                table[kind],
            )
    if not m.tied:
        table["head"] = table["embedding"]
    return table


def count_params(cfg):
    """(total, active for one token, embedding) numbers of parameters; the first two without the embedding."""
    table = param_table(cfg)
    embedding = math.prod(table["embedding"].shape)
    leaves = jax.tree.leaves(table, is_leaf=is_param)
    total = sum(math.prod(p.shape) for p in leaves)
    active = sum(math.prod(p.shape) * p.active for p in leaves)
    return total - embedding, round(active) - embedding, embedding


def flops_per_token(cfg):
    """Floating-point operations of forward and backward pass per training token, recomputation not counted.

    6 per active weight (PaLM, arXiv:2204.02311, appendix B), the head included, and causal attention at half of
    T x T.
    """
    m = cfg.model
    _, active, _ = count_params(cfg)
    dense, last = m.first_layers + m.blocks * (m.layers_per_block - 1), m.blocks + m.mtp_depth
    channels = (dense + last) * (m.head_dim + m.value_dim) + (
        dense + last * m.moe_rope
    ) * m.rope_dim
    heads = m.mtp_depth + m.tied  # a head of its own is among the active weights once
    return 6 * (active + heads * m.vocab_size * m.model_dimension + m.T * m.n_head * channels / 2)


def document_starts(ids, m):
    """`start(i)`: int32 [B/dp, T], where the document of each token of microbatch i (of all stages') begins: at the
    last end-of-text token up to it; None where documents are not kept apart. ids [M/S, B/dp, T/tp]."""
    if not m.document_mask:
        return lambda microbatch: None
    M, B, t = ids.shape
    ids = to_stages(gather_sequence(ids.reshape(M * B, t), True).reshape(M, B, -1))
    starts = lax.cummax(
        jnp.where(ids == m.end_of_text, jnp.arange(ids.shape[-1]), 0), axis=2
    )  # [M, B/dp, T]
    return lambda microbatch: starts[microbatch]


# --- Stage and pipeline -----------------------------------------------------------------------------------------


REMAT = {
    "none": lambda f: f,
    "dots": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("product")
    ),
    "full": jax.checkpoint,
}


def layer_params(params, cfg):
    """{kind: `Weights`} of this device's layers: gathered here, once, unless fsdp is full."""
    table, dtype = param_table(cfg), jnp.dtype(cfg.model.model_dtype)
    if cfg.model.fsdp == "full":
        table, dtype = table_map(lambda p: p._replace(gather=(), expert=0), table), jnp.float32
    kinds = [kind for kind in architecture(cfg.model.architecture).layers if kind in params]
    return {kind: gather(params[kind], table[kind], dtype) for kind in kinds}


def top_params(params, cfg):
    """The parameters outside layers, gathered: embedding, head (which may be the embedding), norm and what
    `Architecture.embed` needs."""
    layers, table = architecture(cfg.model.architecture).layers, param_table(cfg)
    names = [name for name in table if name not in layers]
    params, table = ({name: tree[name] for name in names} for tree in (params, table))
    top, _ = take(gather(params, table, jnp.dtype(cfg.model.model_dtype)), ())
    return {"head": top["embedding"], **top}


def make_layer(cfg, remat):
    """`layer(kind, weights, index, number, x, tokens, cache)`: the layer at `index` of the stack of its kind, the
    `number`th of the model as far as dropout goes. Returns x, what else the layer returns, and the stack to go on with.
    """
    m, table, layers = cfg.model, param_table(cfg), architecture(cfg.model.architecture).layers
    wrap, dtype = REMAT[m.remat if remat else "none"], jnp.dtype(m.model_dtype)

    def layer(kind, weights, index, number, x, tokens, cache):
        own = (
            tokens
            if tokens.key is None
            else tokens._replace(key=jax.random.fold_in(tokens.key, number))
        )

        def run(weights, x, cache):
            p, grad = take(weights, index)
            if m.fsdp == "full":
                p, _ = take(gather(p, table[kind], dtype), ())
            return *layers[kind](p, x, own, m, cache), grad

        x, aside, grad = wrap(run)(weights, x, cache)
        return x, aside, Weights(weights.value, grad)

    return layer


def make_dense(cfg, kind, n, remat):
    """`dense(weights, block, first, x, tokens, cache)`: n dense layers numbered from `first`, at (*block, 0), .. of
    their stack, on x [B, T/tp, D]; returns x, the cache and the stack to go on with."""
    layer = make_layer(cfg, remat)

    def dense(weights, block, first, x, tokens, cache):
        def one(carry, scanned):
            x, grad = carry
            i, cache = scanned
            x, (_, cache), new = layer(
                kind, Weights(weights.value, grad), (*block, i), first + i, x, tokens, cache
            )
            return (x, new.grad), cache

        (x, grad), cache = lax.scan(one, (x, weights.grad), (jnp.arange(n), cache))
        return x, cache, Weights(weights.value, grad)

    return dense


def make_stage(cfg, remat=True):
    """`stage(weights, x, tokens, cache, turn)`: this device's blocks, of round `turn` with --pp_interleave, on x
    [B, T/tp, D], the same for training and decoding.

    Returns x, (`Load`, with tokens [blocks, E] and the rest summed; the cache, empty where none was given) and the
    weights, which come from `layer_params`, to go on with.
    """
    m, rounds, L, layer = (
        cfg.model,
        cfg.run.pp_interleave,
        cfg.model.layers_per_block,
        make_layer(cfg, remat),
    )
    dense, last = make_dense(cfg, "dense", L - 1, remat), architecture(m.architecture).last

    def stage(weights, x, tokens, cache=None, turn=0):
        S = lax.axis_size("pp")
        blocks = m.blocks // (rounds * S)

        def block(carry, scanned):
            x, grads = carry
            i, cache = scanned
            number, new = ((turn * S + lax.axis_index("pp")) * blocks + i) * L, {}
            at = (turn, i) if rounds > 1 else (i,)
            own = {kind: Weights(weights[kind].value, grad) for kind, grad in grads.items()}
            if L > 1:
                x, new["dense"], own["dense"] = dense(
                    own["dense"], at, number, x, tokens, cache.get("dense")
                )
            x, (load, new[last]), own[last] = layer(
                last, own[last], at, number + L - 1, x, tokens, cache.get(last)
            )
            return (x, {kind: w.grad for kind, w in own.items()}), (load, new)

        grads = {kind: weights[kind].grad for kind in ("dense", last) if kind in weights}
        (x, grads), (load, cache) = lax.scan(block, (x, grads), (jnp.arange(blocks), cache or {}))
        weights = weights | {
            kind: Weights(weights[kind].value, grad) for kind, grad in grads.items()
        }
        return x, (Load(load.loss.sum(), load.tokens, load.dropped.sum()), cache), weights

    return stage


def pipeline(stage, inputs, state, rounds=1):
    """GPipe (arXiv:1811.06965, section 2.3): M microbatches through S stages in M + S - 1 ticks; in `rounds` of them
    (arXiv:2104.04473, section 2.2, without its order of forward and backward passes) in rounds x M + S - 1, each as
    much shorter.

    Warm-up: stage s idles (on zeros) for s ticks; steady; cool-down: S - 1 - s ticks. inputs [M, ...] are known to
    every stage. `stage(x, state, round, m, valid)` returns y and the state to carry on; it must leave the state as it
    was where `valid` is false. Returns outputs [M, ...], meaningful on the last stage only, and the state.
    """
    S, M, s = lax.axis_size("pp"), len(inputs), lax.axis_index("pp")

    def tick(carry, i):
        x, inputs, state = carry
        if rounds > 1:  # what comes to stage 0 from the last one waits until its next round
            back = jnp.maximum(i - S, 0) % M
            inputs = inputs.at[back].set(jnp.where(i >= S, x, inputs[back]))
        x = jnp.where(s == 0, inputs[i % M if rounds > 1 else jnp.minimum(i, M - 1)], x)
        turn = jnp.clip(i - s, 0, rounds * M - 1)
        y, state = stage(x, state, turn // M, turn % M, (i >= s) & (i - s < rounds * M))
        return (next_stage(y), inputs, state), y

    (_, _, state), outputs = lax.scan(
        tick, (jnp.zeros_like(inputs[0]), inputs, state), jnp.arange(rounds * M + S - 1)
    )
    return outputs[-M:], state


# --- Loss -------------------------------------------------------------------------------------------------------


def for_devices(cfg, mesh):
    """`cfg` with the attention kernel that auto stands for on the devices of `mesh`."""
    platform = mesh.devices.flat[0].platform
    kernel = attention.choose_kernel(cfg.model.attention, platform, cfg.model.T)
    return with_model(cfg, attention=kernel)


class Metrics(NamedTuple):
    """Of one batch over the whole mesh."""

    cross_entropy: jax.Array  # [] nats per token
    mtp: jax.Array  # [] nats per token of multi-token prediction, mean over its depths
    load_loss: (
        jax.Array
    )  # [] load-balancing loss summed over mixture-of-experts layers, mean over sequences
    load: dict  # {"moe": [blocks, E], "mtp": [mtp_depth, E]} choices that fell on each expert; dims as in param_table
    dropped: jax.Array  # [] share of the choices that found their expert's bucket full


def make_forward(cfg, train):
    """`forward(params, ids, tokens_of)` on local shapes: ids int32 [M/S, B/dp, T/tp], tokens_of(i) the `Tokens` of
    microbatch i counted over all stages.

    Returns final hidden states [M/S, B/dp, T/tp, D], normalised for the head; the stage's `Load`; and the gathered
    parameters outside layers and in layers.
    """
    m, arch, rounds = cfg.model, architecture(cfg.model.architecture), cfg.run.pp_interleave
    stage = make_stage(cfg, remat=train)
    first_layers = make_dense(cfg, "first", m.first_layers, remat=train)

    def forward(params, ids, tokens_of):
        M, layers = len(ids), layer_params(params, cfg)
        own = lax.axis_index("pp") * M + jnp.arange(M)

        def enter(ids, microbatch):
            tokens = tokens_of(microbatch)
            return dropout(
                arch.embed(top, ids, tokens.within_document()), m.dropout_rate, tokens, 2
            )

        def enter_layers(grad, scanned):
            x, microbatch = scanned
            x, _, new = first_layers(
                Weights(layers["first"].value, grad),
                (),
                m.blocks * m.layers_per_block,
                x,
                tokens_of(microbatch),
                None,
            )
            return new.grad, x

        def run_stage(x, state, turn, microbatch, valid):
            load, grads = state
            weights = {kind: Weights(layers[kind].value, grad) for kind, grad in grads.items()}
            y, (new, _), weights = stage(weights, x, tokens_of(microbatch), turn=turn)
            grads = {kind: w.grad for kind, w in weights.items()}
            new = jax.tree.map(lambda n: jnp.where(valid, n, 0), new)
            load = Load(
                load.loss + new.loss,
                load.tokens.at[turn].add(new.tokens),
                load.dropped + new.dropped,
            )
            return y, (load, grads)

        with jax.named_scope("embed"):
            top = top_params(params, cfg)
            x = jax.vmap(enter)(ids, own)
            if m.first_layers:
                _, x = lax.scan(enter_layers, layers["first"].grad, (x, own))
            x = to_stages(x)
        grads = {kind: w.grad for kind, w in layers.items() if kind in ("dense", arch.last)}
        load = no_load(rounds, m.blocks // (rounds * lax.axis_size("pp")), m.n_experts)
        x, (load, _) = pipeline(run_stage, x, (load, grads), rounds)  # [M, B/dp, T/tp, D]
        load = load if rounds > 1 else load._replace(tokens=load.tokens[0])
        return arch.norm(from_last_stage(x), top["norm"], m.norm_eps), load, top, layers

    return forward


def make_loss(cfg, mesh, train):
    """`loss(params, tokens, targets, key, first)` on global arrays, to be differentiated from outside.

    tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:]; key of dropout; first: number, within the training
    step, of the batch's first sequence. Returns the scalar loss, float32, and `Metrics`: cross-entropy + balance_weight x
    load-balancing loss + mtp_weight x multi-token prediction's cross-entropy. Without `train`: no dropout and no
    multi-token prediction.
    """
    cfg = for_devices(cfg, mesh)
    m, o, table, spec = cfg.model, cfg.optimizer, param_table(cfg), P(*BATCH_SPEC[1:])
    forward, layer, depths = (
        make_forward(cfg, train),
        make_layer(cfg, train),
        m.mtp_depth if train else 0,
    )
    chunk = losses.LOSS_CHUNK[mesh.devices.flat[0].platform]

    def predict_further(x, targets, tokens_of, top, layers):
        """Sum of the cross-entropies of the tokens after the next (DeepSeek-V3, section 2.2), and `Load` [depths, E]:
        depth d predicts from the hidden states of the depth before and the tokens d ahead."""
        M, B, t = targets.shape
        whole = gather_sequence(targets.reshape(M * B, t), True)
        whole = jnp.pad(whole, ((0, 0), (0, depths)), constant_values=-1)  # [M*B, T + depths]
        own, total, loads, weights = lax.axis_index("pp") * M + jnp.arange(M), 0, [], layers["mtp"]
        for depth in range(depths):
            number = m.blocks * m.layers_per_block + m.first_layers + depth
            ahead = lax.dynamic_slice_in_dim(
                whole, lax.axis_index("tp") * t + depth, t + 1, 1
            ).reshape(M, B, t + 1)

            def one(weights, scanned):
                x, ids, i = scanned
                token = architecture(m.architecture).embed(top, jnp.maximum(ids, 0), None)
                at = (depth,)  # noqa: B023
                x, (load, _), weights = layer(
                    "mtp", weights, at, number, (x, token), tokens_of(i), None
                )  # noqa: B023
                return weights, (x, load)

            weights, (x, load) = lax.scan(one, weights, (x, ahead[..., :-1], own))
            loads.append(jax.tree.map(lambda v: v.sum(0), load))
            total += losses.cross_entropy(x, top["head"], ahead[..., 1:], m.vocab_size, chunk)
        return total, jax.tree.map(lambda *v: jnp.stack(v), *loads)

    def local_loss(params, ids, targets, key, first):
        M, B, t = ids.shape  # [M/S, B/dp, T/tp]
        S, dp, tp = lax.axis_size("pp"), lax.axis_size("dp"), lax.axis_size("tp")
        position = (lax.axis_index("tp") * t + jnp.arange(t))[None]
        sequence, start = lax.axis_index("dp") * B + jnp.arange(B), document_starts(ids, m)

        def tokens_of(microbatch):
            if not (train and m.dropout_rate):
                return Tokens(position, start=start(microbatch))
            number = ((first + microbatch * B * dp + sequence)[:, None] * t * tp + position).astype(
                jnp.uint32
            )
            return Tokens(position, key=key, number=number, start=start(microbatch))

        x, load, top, layers = forward(params, ids, tokens_of)
        with jax.named_scope("head"):
            nll = losses.cross_entropy(x, top["head"], targets, m.vocab_size, chunk)
        loads, mtp = dict(moe=load), jnp.float32(0)
        if depths:
            with jax.named_scope("mtp"):
                mtp, loads["mtp"] = predict_further(x, targets, tokens_of, top, layers)
        sequences = M * S * B * dp
        nll, mtp = nll / (sequences * t * tp), mtp / (sequences * t * tp * max(1, depths))
        balance = sum(load.loss.sum() for load in loads.values()) / sequences
        loss = sum_over(nll + o.balance_weight * balance + o.mtp_weight * mtp, AXES)
        nll, mtp, balance, loads = lax.stop_gradient((nll, mtp, balance, loads))
        spread = {"moe": EXPERT_AXES} | architecture(m.architecture).routed
        counts = {kind: sum_over(load.tokens, spread[kind]) for kind, load in loads.items()}
        choices = sequences * t * tp * m.experts_per_token * (m.blocks + depths)
        dropped = sum_over(sum(load.dropped.sum() for load in loads.values()), AXES) / max(
            1, choices
        )
        return loss, Metrics(
            sum_over(nll, AXES), sum_over(mtp, AXES), sum_over(balance, AXES), counts, dropped
        )

    loads = {"moe": P("pp") if cfg.run.pp_interleave == 1 else P(None, "pp")} | (
        {"mtp": P()} if depths else {}
    )
    # check_vma off: what out_specs calls replicated is so by the sums above, and tests hold gradients to one device's
    return jax.shard_map(
        local_loss,
        mesh=mesh,
        in_specs=(table_map(lambda p: p.spec, table), spec, spec, P(), P()),
        out_specs=(P(), Metrics(P(), P(), P(), loads, P())),
        check_vma=False,
    )


def dropless(cfg):
    """`cfg` without a capacity: for inference, where no token may be dropped."""
    return with_model(cfg, capacity_factor=0.0)


def make_score(cfg, mesh):
    """`score(params, tokens, targets)` on global arrays: -log p of every target, float32 [M, B, T] like the int32
    inputs, sharded as BATCH_SPEC[1:]; 0 where the target is negative. Nothing is dropped."""
    cfg = for_devices(dropless(cfg), mesh)
    m, spec, forward = cfg.model, P(*BATCH_SPEC[1:]), make_forward(cfg, train=False)
    chunk = losses.LOSS_CHUNK[mesh.devices.flat[0].platform]

    def local_score(params, ids, targets):
        position = (lax.axis_index("tp") * ids.shape[-1] + jnp.arange(ids.shape[-1]))[None]
        start = document_starts(ids, m)
        x, _, top, _ = forward(
            params, ids, lambda microbatch: Tokens(position, start=start(microbatch))
        )
        return losses.token_losses(x, top["head"], targets, m.vocab_size, chunk)

    specs = table_map(lambda p: p.spec, param_table(cfg))
    return jax.shard_map(
        local_score, mesh=mesh, in_specs=(specs, spec, spec), out_specs=spec, check_vma=False
    )


def update_router_bias(params, load, rate):
    """Auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1): each router bias moves by `rate` towards an even
    load. load {kind: [layers, E]}, of one training step, dims as in param_table."""

    def moved(layer, load):
        return {
            **layer,
            "bias": layer["bias"] + rate * jnp.sign(load.mean(-1, keepdims=True) - load),
        }

    out = dict(params)
    if "moe" in params:
        out["moe"] = moved(params["moe"], load["moe"])
    if "mtp" in params:
        out["mtp"] = {**params["mtp"], "layer": moved(params["mtp"]["layer"], load["mtp"])}
    return out
