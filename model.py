"""The transformer: parameters, loss, forward pass, pipeline and stages, in pure JAX.

Comes before: `training/train_step.py`, which differentiates `make_loss`. Comes next: a layer, such as
`architectures/deepseek.py`, and the collectives that it and the pipeline use, `collectives.py`.

`architectures` holds what makes it a DeepSeek or another model: its table and its layers. Everything here but
parameters runs inside `shard_map`, on local shapes, which tail comments give. A mesh of (1, 1, 1) is the unsharded
model. `plain_model.py` shows what all of this computes, and tests compare the two. From a batch to its loss:

    local_loss
      hidden_states
        layer_weights, top_params     the weights, gathered
        embed, run_first_layers       token ids -> what enters the first block
        run_blocks
          pipeline                    M microbatches through S stages
            run_stage                 the blocks of one stage
              run_layers, run_layer   -> a layer of architectures/NAME.py
        read_out                      what the head reads of the last layer's output
      cross_entropy                   of kernels/loss.py
      reduce_loss                     sums over the mesh

Letters: B batch, T sequence, D model, H heads, K channels of a head, R latent, E experts, C capacity, F feed-forward,
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
from architectures.experts import RoutingStats, choose_transport, no_routing
from architectures.layers import (
    AFTER_EMBEDDING,
    Tokens,
    dropout,
    gather,
    rows_of,
)
from architectures.parameters import is_param, table_map
from architectures.weights import LayerWeights
from collectives import (
    AXES,
    BATCH_SPEC,
    EXPERT_AXES,
    MOST_EXCHANGED,
    count_slices,
    from_last_stage,
    gather_sequence,
    next_stage,
    platform,
    sum_over,
    to_stages,
)
from kernels import attention, xla_cpu
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


def active_params(cfg):
    """The number of parameters that a token uses, with the embedding."""
    _, active, embedding = count_params(cfg)
    return active + embedding


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
    dropped: jax.Array  # [] share of the choices that found their expert's bucket full
    # {name: [rounds, blocks in a round, ...]} of `experts.measure`, summed over the batch
    measured: dict


def make_loss(cfg, mesh, train):
    """`loss(params, tokens, targets, key, first)` on global arrays -> the loss, float32 [], and `Metrics`.

    tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:]; key of dropout; first: number, within the training
    step, of the batch's first sequence. Without `train` there is no dropout.
    """
    cfg = for_devices(cfg, mesh)
    spec = P(*BATCH_SPEC[1:])
    # check_vma is off: reduce_loss replicates what out_specs calls so. Tests hold gradients to those of one device.
    return jax.shard_map(
        functools.partial(local_loss, cfg, train),
        mesh=mesh,
        in_specs=(param_specs(cfg), spec, spec, P(), P()),
        out_specs=(P(), Metrics(P(), P(), P(), measured=P(None, "pp"))),
        check_vma=False,
    )


def local_loss(cfg, train, params, ids, targets, key, first):
    """`make_loss`'s on one device: ids and targets [M/S, B/dp, T/tp]."""
    m = cfg.model
    batch = describe_batch(m, ids, key if train and m.dropout_rate else None, first)
    x, stats, head = hidden_states(cfg, params, batch)
    with jax.named_scope("head"):
        cross_entropy = losses.cross_entropy(x, head, targets, m.vocab_size, loss_chunk())
    return reduce_loss(cfg, ids.shape, cross_entropy, stats)


@jax.named_scope("reduce_loss")
def reduce_loss(cfg, shape, cross_entropy, stats):
    """The loss and `Metrics` of the whole batch from one device's sum of nats and `RoutingStats`; shape: [M/S, B/dp,
    T/tp] of its tokens."""
    m, o = cfg.model, cfg.optimizer
    M, B, t = shape
    dp, pp, tp = map(lax.axis_size, AXES)
    sequences = M * pp * B * dp
    tokens = sequences * t * tp
    choices = tokens * m.experts_per_token * m.blocks
    cross_entropy = cross_entropy / tokens
    balance = stats.balance_loss / sequences
    loss = sum_over(cross_entropy + o.balance_weight * balance, AXES)

    # Metrics have no gradient, so they may be summed as well.
    cross_entropy, balance, stats = lax.stop_gradient((cross_entropy, balance, stats))
    return loss, Metrics(
        cross_entropy=sum_over(cross_entropy, AXES),
        load_loss=sum_over(balance, AXES),
        dropped=sum_over(stats.dropped, AXES) / float(max(1, choices)),
        measured=sum_over(stats.measured, EXPERT_AXES),
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
    if fsdp == "hoist" and cfg.runs_once:
        fsdp = "full"
    near = cfg.run.n_device_axis[0] <= MOST_EXCHANGED
    return "exchange" if fsdp == "full" and platform == "tpu" and slices == 1 and near else fsdp


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
    """What the head reads, [M/S, B/dp, T/tp, D]; the stage's `RoutingStats`; the head."""
    layers = layer_weights(params, cfg)
    with jax.named_scope("embed"):
        top = top_params(params, cfg)
        embedded = embed(cfg, top, batch)  # [M/S, B/dp, T/tp, D]
        x = run_first_layers(cfg, layers, embedded, batch)
        x = to_stages(x)  # [M, B/dp, T/tp, D]
    with jax.named_scope("pipeline"):
        x, stats = run_blocks(cfg, layers, x, batch)
        x = from_last_stage(x)  # [M/S, B/dp, T/tp, D]
    with jax.named_scope("head"):
        x = read_out(cfg, top, x, embedded)
    return x, stats, top["head"]


def read_out(cfg, top, x, embedded):
    """What the head reads of the residual x behind the last layer, which began as `embedded`; both [..., D].

    With --backout that is at first what the layers have added, then x less a learned share of `embedded`. A token's own
    logit begins at sqrt(D) without it where the head is the embedding (11 for `tiny`, where others begin between -3 and
    3): the layers first have to learn to take the token away.
    """
    if cfg.model.backout:
        x = x - (top["backout"] * embedded).astype(x.dtype)
    return architecture_of(cfg).norm(x, top["norm"], cfg.model.norm_eps)


def embed(cfg, top, batch):
    """What enters the first layer, [M/S, B/dp, T/tp, D]; each stage embeds its own microbatches."""
    m, arch = cfg.model, architecture_of(cfg)

    def embed_one(rows, microbatch):
        tokens = batch.tokens(microbatch)
        x = arch.embed(top, rows, tokens.within_document())
        return dropout(x, m.dropout_rate, tokens, AFTER_EMBEDDING)

    ids = batch.ids
    if lookback := arch.lookback(m):
        ids = with_tokens_before(ids, lookback)
    rows = rows_of(top["embedding"], ids)
    return jax.vmap(embed_one)(rows, own_microbatches(len(batch.ids)))


def run_first_layers(cfg, layers, x, batch):
    """What enters the first block, [M/S, B/dp, T/tp, D]: x behind --first_layers, which each stage runs for its own
    microbatches."""
    m, arch = cfg.model, architecture_of(cfg)
    if not m.first_layers:
        return x
    number = m.blocks * m.layers_per_block  # for dropout: blocks count before

    def run_one(_, scanned):
        x, microbatch = scanned
        tokens = batch.tokens(microbatch)
        x, _ = run_layers(cfg, arch.first, m.first_layers, layers, (), number, x, tokens)
        return (), x

    _, x = layers.scan(run_one, (), (x, own_microbatches(len(x))))
    return x


def run_blocks(cfg, layers, x, batch):
    """All blocks by the pipeline, x [M, B/dp, T/tp, D] -> x, which is meaningful on the last stage only, and this
    stage's `RoutingStats`, measured in [rounds, blocks, ...] and else summed over layers."""
    m, rounds = cfg.model, cfg.run.pp_interleave

    def run_round(x, total, round, microbatch, valid):
        tokens = batch.tokens(microbatch)
        y, stats, _ = run_stage(cfg, layers, x, tokens, round=round)
        stats = jax.tree.map(lambda n: jnp.where(valid, n, 0), stats)

        def add_round(total, of_round):
            return total.at[round].add(of_round)

        total = RoutingStats(
            balance_loss=total.balance_loss + stats.balance_loss,
            dropped=total.dropped + stats.dropped,
            measured=jax.tree.map(add_round, total.measured, stats.measured),
        )
        return y, total

    stats = no_routing(m, rounds, blocks_of_stage(cfg))
    return pipeline(run_round, layers.scan, x, stats, rounds)


def pipeline(stage, scan, inputs, state, rounds=1):
    """Run M microbatches through S stages (GPipe, arXiv:1811.06965, section 2.3), in `rounds` rounds (--pp_interleave;
    arXiv:2104.04473, section 2.2).

    In each tick every stage runs its blocks of one round on one microbatch and passes the result on; stage s idles for
    s ticks first and for S - 1 - s at the end. Two stages, four microbatches, two rounds; "1.2" is round 1 of
    microbatch 2, and what stage 1 passes on after tick 1, 0.0, waits at stage 0 for tick 4:

        tick       0    1    2    3    4    5    6    7    8
        stage 0   0.0  0.1  0.2  0.3  1.0  1.1  1.2  1.3   -
        stage 1    -   0.0  0.1  0.2  0.3  1.0  1.1  1.2  1.3

    inputs [M, ...] are known to every stage. `stage(x, state, round, microbatch, valid)` returns y and the state; where
    `valid` is false, the stage is idle and must leave the state as it was. scan: `LayerWeights.scan` of the weights
    that `stage` uses. Returns outputs [M, ...], meaningful on the last stage only, and the state.
    """
    S, M = lax.axis_size("pp"), len(inputs)
    own = lax.axis_index("pp")

    def tick(carry, i):
        x, inputs, state = carry
        is_first = own == 0
        entering = i % M if rounds > 1 else jnp.minimum(i, M - 1)
        fed = inputs[entering]
        # Stage 0 gets its input of the next round from the last stage. It waits M - S ticks. What arrives in the first
        # S ticks is nobody's: it lies where the first input was, and is replaced before anyone reads it.
        if rounds > 1 and M > S:
            inputs = inputs.at[jnp.maximum(i - S, 0) % M].set(x)
        elif rounds > 1:
            is_first &= i < M
        x = jnp.where(is_first, fed, x)

        done = jnp.clip(i - own, 0, rounds * M - 1)  # runs of this stage before this tick
        round, microbatch = done // M, done % M
        valid = (i >= own) & (i - own < rounds * M)
        y, state = stage(x, state, round, microbatch, valid)
        return (next_stage(y), inputs, state), y

    start = jnp.zeros_like(inputs[0]), inputs, state
    ticks = jnp.arange(rounds * M + S - 1)
    (_, _, state), outputs = scan(tick, start, ticks)
    return outputs[-M:], state


def blocks_of_stage(cfg):
    """Number of blocks that one stage runs in one round."""
    return cfg.model.blocks // (cfg.run.pp_interleave * lax.axis_size("pp"))


def run_stage(cfg, layers, x, tokens, cache=None, round=0):
    """This stage's blocks of a round on x [B, T/tp, D]; the same for training and decoding. cache: {kind: array}, None
    in training. Returns x; `RoutingStats`, measured in [blocks, ...] and else summed; and the cache."""
    L, arch = cfg.model.layers_per_block, architecture_of(cfg)
    S, blocks = lax.axis_size("pp"), blocks_of_stage(cfg)

    def run_block(x, scanned):
        i, cache = scanned
        number = ((round * S + lax.axis_index("pp")) * blocks + i) * L  # of the block's first layer
        block = (round, i)
        new_cache = {}
        if L > 1:
            x, new_cache[arch.inner] = run_layers(
                cfg, arch.inner, L - 1, layers, block, number, x, tokens, cache.get(arch.inner)
            )
        x, (stats, new_cache[arch.last]) = run_layer(
            cfg, arch.last, layers, block, number + L - 1, x, tokens, cache.get(arch.last)
        )
        return x, (stats, new_cache)

    scanned = np.arange(blocks), cache or {}
    # Decoding has no backward pass to keep anything for, so its program is as short as on CPUs.
    has_loop = cfg.has_loop("cpu" if cache else platform())
    x, (stats, cache) = layers.scan(run_block, x, scanned, unrolled=not has_loop)
    stats = stats._replace(balance_loss=stats.balance_loss.sum(), dropped=stats.dropped.sum())
    return x, stats, cache


def run_layers(cfg, kind, n, layers, block, first, x, tokens, cache=None):
    """n layers of one kind, without experts, on x [B, T/tp, D]: those at (*block, 0), (*block, 1), .. of their stack,
    which are numbered from `first`. Returns x and the cache."""

    def run_next(x, scanned):
        i, cache = scanned
        x, (_, cache) = run_layer(cfg, kind, layers, (*block, i), first + i, x, tokens, cache)
        return x, cache

    unrolled = n <= utils.UNROLLED[platform()] and (platform() != "cpu" or cfg.runs_once)
    return layers.scan(run_next, x, (np.arange(n), cache), unrolled)


def run_layer(cfg, kind, layers, index, number, x, tokens, cache=None):
    """The layer at `index` of the stack of its kind; `number`: its own among all layers of the model, for dropout.
    Returns x and what else the layer returns (`RoutingStats`, cache)."""
    m = cfg.model
    layer = architecture_of(cfg).layers[kind]
    if tokens.key is not None:
        tokens = tokens._replace(key=jax.random.fold_in(tokens.key, number))

    def run(p, x, cache):
        if gathers_by_layer(cfg):
            table, dtype = param_table(cfg)[kind], jnp.dtype(m.model_dtype)
            p = gather(p, table, dtype, exchange=m.fsdp == "exchange")
        x, aside = layer(p, x, tokens, m, cache)
        if m.remat == "none" and platform() == "cpu":
            x = xla_cpu.compute_once(x)
        return x, aside

    if m.remat == "none":
        return layers.run(run, kind, index, x, cache)
    recomputed = functools.partial(
        jax.checkpoint, policy=remat_policy(cfg), prevent_cse=needs_barriers(cfg, kind)
    )
    return layers.run(run, kind, index, x, cache, recomputed=recomputed)


def remat_policy(cfg):
    """What a layer keeps for its backward pass, beside its input: arrays of the `checkpoint_name` that --remat gives,
    and what the attention kernel returns."""
    kept = [cfg.model.remat]
    if keeps_attention(cfg, platform()):
        kept.append("kernel")
    return jax.checkpoint_policies.save_only_these_names(*kept)


def keeps_attention(cfg, platform):
    """Whether a layer keeps what its attention kernel returns, so that the backward pass need not run it again. A loop
    stacks what it keeps, and a loop around it stacks that again: on TPUs this takes longer than the kernel."""
    return cfg.model.remat != "full" and (platform != "tpu" or cfg.runs_once)


def needs_barriers(cfg, kind):
    """Whether jax puts barriers around a layer that is computed again in the backward pass.

    Without them XLA would find the same operations in the forward pass, compute them once, and keep all of them. Where
    the layer is inside a loop, the forward and the backward pass are two loops, which XLA does not merge: barriers are
    not needed there, and cost 2% of `moe1b`'s step by the TPU compiler. But in blocks of one layer they save 5% of
    `deepseek-v3-671b`'s step, whose gradients are then summed in place.
    """
    if platform() == "cpu":
        return True
    in_block = cfg.model.layers_per_block > 1 and kind in architecture_of(cfg).stacks
    return not (in_block and cfg.has_loop(platform()))


def gathers_by_layer(cfg):
    """Whether each layer gathers its own weights just before use, and not all of them once a batch."""
    return cfg.model.fsdp in ("full", "exchange")


def layer_weights(params, cfg):
    """The `LayerWeights` of this device, [rounds, blocks, ...] of the layers in blocks. Where each layer gathers its
    own they are as stored, in float32; else they are gathered here, once."""
    arch = architecture_of(cfg)
    table, dtype = param_table(cfg), jnp.dtype(cfg.model.model_dtype)
    stacks = {kind: params[kind] for kind in arch.layers.keys() & params.keys()}
    if cfg.run.pp_interleave == 1:  # param_table has no dim of rounds then
        for kind in arch.stacks & stacks.keys():
            stacks[kind] = jax.tree.map(lambda w: w[None], stacks[kind])
    if gathers_by_layer(cfg):
        table = table_map(lambda p: p._replace(gather_dim="", expert=""), table)
        dtype = jnp.float32
    with jax.named_scope("gather_weights"):
        return LayerWeights(stacks, table, dtype)


def top_params(params, cfg):
    """The parameters outside layers, gathered: embedding, head, norm and what else `Architecture.embed` needs."""
    table, dtype = param_table(cfg), jnp.dtype(cfg.model.model_dtype)
    names = table.keys() - architecture_of(cfg).layers.keys()
    top = gather({name: params[name] for name in names}, table, dtype)
    return {"head": top["embedding"], **top}
