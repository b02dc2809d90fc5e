"""The transformer: parameters, loss, forward pass, pipeline and stages, in pure JAX.

`architectures` holds what makes it a DeepSeek or another model: its table and its layers. Everything here but
parameters runs inside `shard_map`, on local shapes, which tail comments give. A mesh of (1, 1, 1) is the unsharded
model. `plain_model.py` shows what all of this computes, and tests compare the two. From a batch to its loss:

    local_loss
      hidden_states
        layer_params, top_params      the weights, gathered
        embed                         token ids -> what enters the first block
        run_blocks
          pipeline                    M microbatches through S stages
            run_stage                 the blocks of one stage
              run_layers, run_layer   -> a layer of architectures/NAME.py
      cross_entropy                   of kernels/loss.py
      reduce_loss                     sums over the mesh

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
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import utils
from architectures import architecture_of
from architectures.experts import choose_transport
from architectures.layers import (
    AFTER_EMBEDDING,
    Load,
    Tokens,
    dropout,
    gather,
    no_load,
    rows_of,
    take,
)
from architectures.parameters import is_param, table_map
from collectives import (
    AXES,
    BATCH_SPEC,
    EXPERT_AXES,
    MOST_EXCHANGED,
    WithGrad,
    count_slices,
    from_last_stage,
    gather_sequence,
    next_stage,
    platform,
    sum_over,
    to_stages,
)
from kernels import attention
from kernels import loss as losses


def param_table(cfg):
    """Nested dict of `Param`s for a validated Config. Leaves of blocks are stacked on a leading dim that pp splits,
    with --pp_interleave behind a dim of rounds."""
    m, rounds = cfg.model, cfg.run.pp_interleave
    arch = architecture_of(cfg)
    table = dict(arch.table(cfg))

    def in_rounds(p):
        blocks, *shape = p.shape
        shape = (rounds, blocks // rounds, *shape)
        return p._replace(dims=("rounds", *p.dims), shape=shape, spec=P(None, *p.spec))

    if rounds > 1:
        for kind in arch.stacks & table.keys():
            table[kind] = table_map(in_rounds, table[kind])
    if not m.tied:
        table["head"] = table["embedding"]._replace(inputs=("d",), outputs=("row",))
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
    """Floating-point operations of the forward and backward pass per training token, without recomputation: 6 for each
    active weight (PaLM, arXiv:2204.02311, appendix B), the head included, and causal attention at half of T x T."""
    m = cfg.model
    arch = architecture_of(cfg)
    _, active, _ = count_params(cfg)
    channels = 0
    for kind, number in arch.numbers(m).items():
        cost = arch.layer_cost(m, kind)
        channels += number * (cost.query_channels + cost.value_channels)
    attention_flops = m.T * m.n_head * channels / 2
    head = m.tied * m.vocab_size * m.model_dimension  # one of its own is among the active weights
    return 6 * (active + head + attention_flops)


class Metrics(NamedTuple):
    """What is measured of one batch over the whole mesh."""

    cross_entropy: jax.Array  # [] nats per token
    load_loss: jax.Array  # [] load-balancing loss, summed over layers, mean over sequences
    load: jax.Array  # [layers, E] choices that fell on each expert; dims as in param_table
    dropped: jax.Array  # [] share of the choices that found their expert's bucket full


def make_loss(cfg, mesh, train):
    """`loss(params, tokens, targets, key, first)` on global arrays -> the loss, float32 [], and `Metrics`.

    tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:]; key of dropout; first: number, within the training
    step, of the batch's first sequence. Without `train` there is no dropout.
    """
    cfg = for_devices(cfg, mesh)
    load = P(None, "pp") if cfg.run.pp_interleave > 1 else P("pp")
    spec = P(*BATCH_SPEC[1:])
    # check_vma is off: reduce_loss replicates what out_specs calls so. Tests hold gradients to those of one device.
    return jax.shard_map(
        functools.partial(local_loss, cfg, train),
        mesh=mesh,
        in_specs=(param_specs(cfg), spec, spec, P(), P()),
        out_specs=(P(), Metrics(P(), P(), load, P())),
        check_vma=False,
    )


def local_loss(cfg, train, params, ids, targets, key, first):
    """`make_loss`'s on one device: ids and targets [M/S, B/dp, T/tp]."""
    m = cfg.model
    batch = describe_batch(m, ids, key if train and m.dropout_rate else None, first)
    x, load, head = hidden_states(cfg, params, batch)
    with jax.named_scope("head"):
        cross_entropy = losses.cross_entropy(x, head, targets, m.vocab_size, loss_chunk())
    return reduce_loss(cfg, ids.shape, cross_entropy, load)


@jax.named_scope("reduce_loss")
def reduce_loss(cfg, shape, cross_entropy, load):
    """The loss and `Metrics` of the whole batch from one device's sum of nats and `Load`; shape: [M/S, B/dp, T/tp] of
    its tokens."""
    m, o = cfg.model, cfg.optimizer
    M, B, t = shape
    dp, pp, tp = map(lax.axis_size, AXES)
    sequences = M * pp * B * dp
    tokens = sequences * t * tp
    choices = tokens * m.experts_per_token * m.blocks
    cross_entropy = cross_entropy / tokens
    balance = load.loss / sequences
    loss = sum_over(cross_entropy + o.balance_weight * balance, AXES)

    # Metrics have no gradient, so they may be summed as well.
    cross_entropy, balance, load = lax.stop_gradient((cross_entropy, balance, load))
    return loss, Metrics(
        cross_entropy=sum_over(cross_entropy, AXES),
        load_loss=sum_over(balance, AXES),
        load=sum_over(load.tokens, EXPERT_AXES),
        dropped=sum_over(load.dropped, AXES) / float(max(1, choices)),
    )


def make_score(cfg, mesh, measure=losses.token_losses):
    """`score(params, tokens, targets)` on global arrays -> those of `losses.token_losses`, [M, B, T], or of another
    such function. tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:], as are the results. No token is
    dropped."""
    cfg = for_devices(dropless(cfg), mesh)
    m = cfg.model

    def local_score(params, ids, targets):
        x, _, head = hidden_states(cfg, params, describe_batch(m, ids))
        return measure(x, head, targets, m.vocab_size, loss_chunk())

    spec = P(*BATCH_SPEC[1:])
    return jax.shard_map(
        local_score,
        mesh=mesh,
        in_specs=(param_specs(cfg), spec, spec),
        out_specs=spec,
        check_vma=False,
    )


def dropless(cfg):
    """`cfg` without a capacity: for inference, where no token may be dropped."""
    return utils.replace(cfg, capacity_factor=0.0)


def for_devices(cfg, mesh):
    """`cfg` with what auto stands for on the devices of `mesh`, and with `choose_fsdp`."""
    device = mesh.devices.flat[0]
    kernel = attention.choose_kernel(cfg.model, attention.platform_of(device))
    experts = choose_transport(cfg.model, device.platform)
    fsdp = choose_fsdp(cfg, device.platform, count_slices(mesh.devices.flat))
    return utils.replace(cfg, attention=kernel, experts=experts, fsdp=fsdp)


def choose_fsdp(cfg, platform, slices):
    """What --fsdp becomes on devices of `platform`. hoist is full where each layer runs once a batch: then every layer
    gathers its own weights, and scatters its gradient, while others compute. full is exchange where gradients are
    better scattered by an all-to-all (`collectives.scatter_gradient`): on one slice of TPUs."""
    fsdp = cfg.model.fsdp
    if fsdp == "hoist" and runs_once(cfg):
        fsdp = "full"
    near = cfg.run.n_device_axis[0] <= MOST_EXCHANGED
    return "exchange" if fsdp == "full" and platform == "tpu" and slices == 1 and near else fsdp


def runs_once(cfg):
    """Whether each layer runs once a batch, for a single microbatch in a single stage."""
    _, pp, _ = cfg.run.n_device_axis
    return cfg.data.microbatches == pp == 1


def loss_chunk():
    """Number of tokens whose logits a device holds at once."""
    return losses.LOSS_CHUNK[platform()]


class Batch(NamedTuple):
    """A device's tokens, and what its layers must know of them."""

    ids: jax.Array  # int32 [M/S, B/dp, T/tp]
    position: jax.Array  # [1, T/tp] in the sequence
    sequence: jax.Array  # [B/dp] number of each sequence in its microbatch
    starts: jax.Array | None  # of `document_starts`
    key: jax.Array | None  # of dropout; None: there is none
    first: int  # number, within the training step, of its first sequence

    def tokens(self, microbatch):
        """The `Tokens` of a microbatch, whose number counts those of all stages."""
        number = None
        if self.key is not None:
            _, B, t = self.ids.shape
            sequences = self.first + microbatch * B * lax.axis_size("dp") + self.sequence
            number = sequences[:, None] * t * lax.axis_size("tp") + self.position
            number = number.astype(jnp.uint32)
        start = None if self.starts is None else self.starts[microbatch]
        return Tokens(self.position, key=self.key, number=number, start=start)


def describe_batch(m, ids, key=None, first=0):
    """The `Batch` of ids int32 [M/S, B/dp, T/tp]."""
    _, B, t = ids.shape
    position = (lax.axis_index("tp") * t + jnp.arange(t))[None]
    sequence = lax.axis_index("dp") * B + jnp.arange(B)
    return Batch(ids, position, sequence, document_starts(ids, m), key, first)


def document_starts(ids, m):
    """Where the document of each token begins, int32 [M, B/dp, T] for the microbatches of all stages: at the last
    end-of-text token up to it. None where documents are not kept apart. ids [M/S, B/dp, T/tp]."""
    if not m.document_mask:
        return None
    ids = to_stages(whole_sequences(ids))
    ends = jnp.where(ids == m.end_of_text, jnp.arange(ids.shape[-1]), 0)
    return lax.cummax(ends, axis=2)


def whole_sequences(ids):
    """ids [M/S, B/dp, T/tp] -> those of all devices of tp, [M/S, B/dp, T]."""
    M, B, t = ids.shape
    return gather_sequence(ids.reshape(M * B, t), True).reshape(M, B, -1)


def with_tokens_before(ids, n):
    """ids [M/S, B/dp, T/tp] and the n tokens before them in their sequences, [M/S, B/dp, n + T/tp]."""
    t = ids.shape[-1]
    whole = jnp.pad(whole_sequences(ids), [(0, 0), (0, 0), (n, 0)])
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("tp") * t, n + t, 2)


def own_microbatches(M):
    """Numbers, among those of all stages, of the M microbatches that this stage embeds and computes the loss of."""
    return lax.axis_index("pp") * M + jnp.arange(M)


def hidden_states(cfg, params, batch):
    """What the head reads, [M/S, B/dp, T/tp, D]; the stage's `Load`; the head."""
    layers = layer_params(params, cfg)
    with jax.named_scope("embed"):
        top = top_params(params, cfg)
        x = embed(cfg, top, layers, batch)  # [M/S, B/dp, T/tp, D]
        x = to_stages(x)  # [M, B/dp, T/tp, D]
    with jax.named_scope("pipeline"):
        x, load = run_blocks(cfg, layers, x, batch)
        x = from_last_stage(x)  # [M/S, B/dp, T/tp, D]
    with jax.named_scope("head"):
        x = architecture_of(cfg).norm(x, top["norm"], cfg.model.norm_eps)
    return x, load, top["head"]


def embed(cfg, top, layers, batch):
    """What enters the first block, [M/S, B/dp, T/tp, D]: the embedding, then --first_layers, which every stage runs
    for its own microbatches."""
    m, arch = cfg.model, architecture_of(cfg)
    microbatches = own_microbatches(len(batch.ids))

    def embed_one(rows, microbatch):
        tokens = batch.tokens(microbatch)
        x = arch.embed(top, rows, tokens.within_document())
        return dropout(x, m.dropout_rate, tokens, AFTER_EMBEDDING)

    def run_first_layers(weights, _, scanned):
        x, microbatch = scanned
        x, _, weights = run_layers(
            cfg,
            arch.first,
            m.first_layers,
            weights,
            block=(),
            first=m.blocks * m.layers_per_block,  # for dropout: blocks count before
            x=x,
            tokens=batch.tokens(microbatch),
        )
        return (), x, weights

    ids = batch.ids
    if lookback := arch.lookback(m):
        ids = with_tokens_before(ids, lookback)
    rows = rows_of(top["embedding"], ids)
    x = jax.vmap(embed_one)(rows, microbatches)
    if m.first_layers:
        weights = weights_of(layers, {arch.first})
        _, x, _ = scan_layers(run_first_layers, weights, (), (x, microbatches))
    return x


def run_blocks(cfg, layers, x, batch):
    """All blocks by the pipeline, x [M, B/dp, T/tp, D] -> x, which is meaningful on the last stage only, and this
    stage's `Load`, its tokens with dims as in param_table."""
    m, rounds = cfg.model, cfg.run.pp_interleave

    def run_turn(weights, x, total, turn, microbatch, valid):
        tokens = batch.tokens(microbatch)
        y, (load, _), weights = run_stage(cfg, weights, x, tokens, turn=turn)
        load = jax.tree.map(lambda n: jnp.where(valid, n, 0), load)
        total = Load(
            loss=total.loss + load.loss,
            tokens=total.tokens.at[turn].add(load.tokens),
            dropped=total.dropped + load.dropped,
        )
        return y, total, weights

    load = no_load(rounds, blocks_of_stage(cfg), m.n_experts)
    x, load = pipeline(run_turn, stacked(cfg, layers), x, load, rounds)
    if rounds == 1:
        load = load._replace(tokens=load.tokens[0])
    return x, load


def stacked(cfg, layers):
    """`WithGrad` of the layers that blocks consist of."""
    stacks = architecture_of(cfg).stacks
    return weights_of(layers, stacks & layers.value.keys())


def pipeline(stage, weights, inputs, state, rounds=1):
    """Run M microbatches through S stages (GPipe, arXiv:1811.06965, section 2.3), in `rounds` rounds (--pp_interleave;
    arXiv:2104.04473, section 2.2).

    In each tick every stage runs its blocks of one round on one microbatch and passes the result on; stage s idles for
    s ticks first and for S - 1 - s at the end. Two stages, four microbatches, two rounds; "1.2" is round 1 of
    microbatch 2, and what stage 1 passes on after tick 1, 0.0, waits at stage 0 for tick 4:

        tick       0    1    2    3    4    5    6    7    8
        stage 0   0.0  0.1  0.2  0.3  1.0  1.1  1.2  1.3   -
        stage 1    -   0.0  0.1  0.2  0.3  1.0  1.1  1.2  1.3

    inputs [M, ...] are known to every stage. `stage(weights, x, state, turn, microbatch, valid)` returns y, the state
    and the weights to carry on, `turn` being the round; where `valid` is false, the stage is idle and must leave the
    state as it was. Returns outputs [M, ...], meaningful on the last stage only, and the state.
    """
    S, M = lax.axis_size("pp"), len(inputs)
    own = lax.axis_index("pp")

    def tick(weights, carry, i):
        x, inputs, state = carry
        if rounds > 1:  # stage 0 gets from the last stage its input of the next round
            arrived = jnp.maximum(i - S, 0) % M
            kept = jnp.where(i >= S, x, inputs[arrived])
            inputs = inputs.at[arrived].set(kept)
        is_first = own == 0
        entering = i % M if rounds > 1 else jnp.minimum(i, M - 1)
        x = jnp.where(is_first, inputs[entering], x)

        done = jnp.clip(i - own, 0, rounds * M - 1)  # runs of this stage before this tick
        turn, microbatch = done // M, done % M
        valid = (i >= own) & (i - own < rounds * M)
        y, state, weights = stage(weights, x, state, turn, microbatch, valid)
        return (next_stage(y), inputs, state), y, weights

    start = jnp.zeros_like(inputs[0]), inputs, state
    ticks = jnp.arange(rounds * M + S - 1)
    (_, _, state), outputs, _ = scan_layers(tick, weights, start, ticks)
    return outputs[-M:], state


def scan_layers(body, weights, carry, scanned, unrolled=False):
    """`lax.scan` over `body(weights, carry, one of scanned)`, which runs layers and returns (carry, out, weights).

    weights: `WithGrad` of {kind: stack}. The loop carries their grads, into which each layer adds its own in place
    (see `take`), and not their values, which every turn would copy. Returns the last carry, the outs, and the weights.
    unrolled: as a program without a loop, which would stack what its turns keep.
    """
    if unrolled:
        outs = []
        for i in range(len(jax.tree.leaves(scanned)[0])):
            carry, out, weights = body(weights, carry, jax.tree.map(lambda part: part[i], scanned))
            outs.append(out)
        return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outs), weights

    def turn(carried, one):
        carry, grad = carried
        carry, out, own = body(WithGrad(weights.value, grad), carry, one)
        return (carry, own.grad), out

    (carry, grad), out = lax.scan(turn, (carry, weights.grad), scanned)
    return carry, out, WithGrad(weights.value, grad)


def weights_of(layers, kinds):
    """`WithGrad` of layers, with the grads of some kinds alone: those that a loop will carry."""
    return WithGrad(layers.value, {kind: layers.grad[kind] for kind in kinds})


def blocks_of_stage(cfg):
    """Number of blocks that one stage runs in one round."""
    return cfg.model.blocks // (cfg.run.pp_interleave * lax.axis_size("pp"))


def run_stage(cfg, weights, x, tokens, cache=None, turn=0):
    """This stage's blocks of round `turn` on x [B, T/tp, D]; the same for training and decoding. weights: those of
    `stacked`; cache: {kind: array}, None in training. Returns x; a pair of `Load`, with tokens [blocks, E] and the rest
    summed, and the cache; and the weights for what follows."""
    L, arch = cfg.model.layers_per_block, architecture_of(cfg)
    S, blocks = lax.axis_size("pp"), blocks_of_stage(cfg)

    def run_block(weights, x, scanned):
        i, cache = scanned
        number = ((turn * S + lax.axis_index("pp")) * blocks + i) * L
        index = (turn, i) if cfg.run.pp_interleave > 1 else (i,)
        new_cache = {}
        if L > 1:
            x, new_cache[arch.inner], weights = run_layers(
                cfg,
                arch.inner,
                L - 1,
                weights,
                block=index,
                first=number,
                x=x,
                tokens=tokens,
                cache=cache.get(arch.inner),
            )
        x, (load, new_cache[arch.last]), weights = run_layer(
            cfg,
            arch.last,
            weights,
            index,
            number=number + L - 1,
            x=x,
            tokens=tokens,
            cache=cache.get(arch.last),
        )
        return x, (load, new_cache), weights

    scanned = np.arange(blocks), cache or {}
    unrolled = not has_loop(cfg)
    x, (load, cache), weights = scan_layers(run_block, weights, x, scanned, unrolled)
    load = load._replace(loss=load.loss.sum(), dropped=load.dropped.sum())
    return x, (load, cache), weights


# Layers that a program holds one after another. A loop would stack what each layer keeps for its backward pass, and a
# loop around it would stack that again. More layers have the loop, to compile fast.
UNROLLED = 12


def has_loop(cfg):
    """Whether a stage's blocks run in a loop, over blocks or microbatches."""
    blocks = blocks_of_stage(cfg)
    many = blocks > 1 and blocks * cfg.model.layers_per_block > UNROLLED
    return many or not runs_once(cfg)


def run_layers(cfg, kind, n, weights, block, first, x, tokens, cache=None):
    """n layers of one kind, without experts, on x [B, T/tp, D]: those at (*block, 0), (*block, 1), .. of their stack,
    which are numbered from `first`. Returns x, the cache and the weights for what follows."""

    def run_next(own, x, scanned):
        i, cache = scanned
        index, number = (*block, i), first + i
        x, (_, cache), own = run_layer(cfg, kind, own, index, number, x, tokens, cache)
        return x, cache, own

    own = weights_of(weights, {kind})
    unrolled = n <= UNROLLED and (platform() != "cpu" or runs_once(cfg))
    x, cache, own = scan_layers(run_next, own, x, (np.arange(n), cache), unrolled)
    return x, cache, WithGrad(weights.value, weights.grad | own.grad)


def recompute(cfg, kind, run):
    """`run`, which runs a layer, with a backward pass that computes anew what --remat does not keep.

    What keeps XLA from doing both at once, and then keeping all, are jax's barriers around each layer; or, in blocks of
    several layers, the loop over microbatches or blocks, since forward passes are one loop and backward passes another.
    There barriers cost 2% of `moe1b`'s step by the TPU compiler. Around blocks of one layer they save 5% of
    `deepseek-v3-671b`'s, whose gradients are added up in place so.
    """
    if cfg.model.remat == "none":
        return run
    in_block = cfg.model.layers_per_block > 1 and kind in architecture_of(cfg).stacks
    barriers = platform() == "cpu" or not (has_loop(cfg) and in_block)
    kept = [cfg.model.remat]  # by `checkpoint_name`
    if keeps_attention(cfg, platform()):
        kept.append("kernel")
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint(run, prevent_cse=barriers, policy=policy)


def keeps_attention(cfg, platform):
    """Whether a layer keeps what its attention kernel returns, so that the backward pass need not run it again. A loop
    stacks what it keeps, and a loop around it stacks that again: on TPUs this takes longer than the kernel."""
    return cfg.model.remat != "full" and (platform != "tpu" or runs_once(cfg))


def run_layer(cfg, kind, weights, index, number, x, tokens, cache=None):
    """The layer at `index` of the stack of its kind; `number`: its own among all layers of the model, for dropout.
    Returns x, what else the layer returns (`Load`, cache), and the weights for what follows."""
    m = cfg.model
    layer = architecture_of(cfg).layers[kind]
    if tokens.key is not None:
        tokens = tokens._replace(key=jax.random.fold_in(tokens.key, number))

    @functools.partial(recompute, cfg, kind)
    def run(stack, x, cache):
        p, grad = take(stack, index)
        if m.fsdp in ("full", "exchange"):
            table, dtype = param_table(cfg)[kind], jnp.dtype(m.model_dtype)
            gathered = gather(p, table, dtype, exchange=m.fsdp == "exchange")
            p, _ = take(gathered, ())
        x, aside = layer(p, x, tokens, m, cache)
        if m.remat == "none" and platform() == "cpu":
            # else XLA fuses the sums that make x into each of its uses, and computes them several times
            x = lax.optimization_barrier(x)
        return x, aside, grad

    stack = WithGrad(weights.value[kind], weights.grad[kind])
    x, aside, grad = run(stack, x, cache)
    return x, aside, WithGrad(weights.value, weights.grad | {kind: grad})


def layer_params(params, cfg):
    """`WithGrad` of {kind: stack} of this device's layers. With --fsdp full they are as stored, in float32, and
    each layer gathers its own; else they are gathered here, once."""
    m = cfg.model
    table, dtype = param_table(cfg), jnp.dtype(m.model_dtype)
    if m.fsdp in ("full", "exchange"):
        table = table_map(lambda p: p._replace(gather_dim="", expert=""), table)
        dtype = jnp.float32
    kinds = architecture_of(cfg).layers.keys() & params.keys()
    return gather({kind: params[kind] for kind in kinds}, table, dtype)


def top_params(params, cfg):
    """The parameters outside layers, gathered: embedding, head, norm and what else `Architecture.embed` needs."""
    table, dtype = param_table(cfg), jnp.dtype(cfg.model.model_dtype)
    names = table.keys() - architecture_of(cfg).layers.keys()
    gathered = gather({name: params[name] for name in names}, table, dtype)
    top, _ = take(gathered, ())
    return {"head": top["embedding"], **top}


def update_router_bias(cfg, params, load, n_tokens):
    """Auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1): each router bias, where routers have one, moves by
    --bias_update_rate towards an even load. load [layers, E]: choices that fell on each expert in one training step of
    n_tokens, dims as in param_table."""
    kind = architecture_of(cfg).last
    layers = params[kind]
    if "bias" not in layers:
        return params
    # Whole counts against a constant: an expert at the mean stays where it is, however the batch was cut.
    mean = n_tokens * cfg.model.experts_per_token / cfg.model.n_experts
    below_mean = mean - load
    bias = layers["bias"] + cfg.optimizer.bias_update_rate * jnp.sign(below_mean)
    return params | {kind: layers | {"bias": bias}}
