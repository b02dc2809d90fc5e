"""Decode on any mesh: compute the logits of the next token with a cache of the tokens before it, and draw tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
import model
from architectures import architecture_of
from architectures.layers import Tokens, write_cache
from kernels import loss


def make_decode(cfg, mesh):
    """`decode(params, ids, cache, offset, last)` -> (logits, cache), on global arrays.

    params: with the blocks in one round (pp_interleave 1). ids: int32 [B, n], B a multiple of dp, the tokens of each
    sequence from position offset [B] on. cache: as from `empty_cache`. last: [B], the index in each row of ids of the
    token whose logits are returned.

    Returns float32 logits [B, V], and the cache with the n tokens added. Rows may be padded at their end, since the
    cache after a row's last token is overwritten before it is read. No token is dropped.
    """
    cfg = model.dropless(cfg)
    m = cfg.model

    def local_decode(params, ids, cache, offset, last):
        position = offset[:, None] + jnp.arange(ids.shape[1])
        top = model.top_params(params, cfg)
        layers = model.layer_weights(params, cfg)
        embedded, cache = embed(cfg, top, ids, position, cache)
        x, cache = run_layers(cfg, layers, embedded, position, cache)
        x, embedded = (at_index(last, of_tokens) for of_tokens in (x, embedded))  # [B/dp, D]
        x = collectives.from_last_stage(x, everywhere=True)
        x = model.read_out(cfg, top, x, embedded)
        return loss.logits_of(x, top["head"], m.vocab_size).T, cache

    rows = P("dp")
    caches = cache_specs(cfg)
    return jax.shard_map(
        local_decode,
        mesh=mesh,
        in_specs=(model.param_specs(cfg), rows, caches, rows, rows),
        out_specs=(rows, caches),
        check_vma=False,
    )


def at_index(index, x):
    """Of each row of x [B, n, D] the token at its `index` [B]: [B, D]."""
    return jnp.take_along_axis(x, index[:, None, None], 1)[:, 0]


def embed(cfg, top, ids, position, cache):
    """The embedded tokens [B, n, D] of ids [B, n], and the cache. Where the embedding reads the tokens before
    (`Architecture.lookback`), their ids come from the cache."""
    arch = architecture_of(cfg)
    if lookback := arch.lookback(cfg.model):
        known = write_cache(cache[IDS], ids, position)
        before = position[:, :1] + jnp.arange(-lookback, 0)
        # a sequence begins at 0; what is read in place of the tokens before that counts as 0 in `arch.embed`
        before = jnp.take_along_axis(known, jnp.maximum(before, 0), 1)
        ids = jnp.concatenate([before, ids], 1)
        cache = cache | {IDS: known}
    return arch.embed(top, top["embedding"][ids], position), cache


def run_layers(cfg, layers, x, position, cache):
    """All layers on x [B, n, D]: --first_layers on every stage, then the blocks by the pipeline, as one microbatch.
    Returns x, which is meaningful on the last stage only, and the cache."""
    m, arch = cfg.model, architecture_of(cfg)
    tokens = Tokens(position, split=False)
    new = {}
    if m.first_layers:
        x, new[arch.first] = model.run_layers(
            cfg, arch.first, m.first_layers, layers, (), 0, x, tokens, cache[arch.first]
        )

    def run_stage(x, cache, round, microbatch, valid):
        y, _, new_cache = model.run_stage(cfg, layers, x, tokens, cache)
        keep = functools.partial(jnp.where, valid)
        return y, jax.tree.map(keep, new_cache, cache)

    of_blocks = {kind: cache[kind] for kind in cache.keys() & arch.stacks}
    x, of_blocks = model.pipeline(run_stage, layers.scan, x[None], of_blocks)
    return x[0], cache | new | of_blocks


IDS = "ids"  # where the cache has the ids of the tokens themselves


def cache_table(cfg, B, T):
    """{name: (shape, spec, dtype)} of the cache of B sequences of at most T tokens: for each kind of layer what
    `Architecture.cache` says, and the ids where the embedding reads the tokens before."""
    m, arch = cfg.model, architecture_of(cfg)
    table = {}
    for kind, stack in arch.stack_shapes(m).items():
        shape, axes = arch.cache(m, kind)
        stages = ["pp" if kind in arch.stacks else None] + [None] * (len(stack) - 1)
        table[kind] = (*stack, B, T, *shape), P(*stages, "dp", None, *axes), m.model_dtype
    if arch.lookback(m):
        table[IDS] = (B, T), P("dp", None), "int32"
    return table


def cache_specs(cfg):
    """The PartitionSpec of each array of the cache."""
    return {name: spec for name, (_, spec, _) in cache_table(cfg, 1, 1).items()}


def empty_cache(cfg, B, T):
    """Cache of B sequences of at most T tokens."""
    return {
        name: jnp.zeros(shape, dtype) for name, (shape, _, dtype) in cache_table(cfg, B, T).items()
    }


def draw_tokens(logits, key, s):
    """Draw a token for each row of logits [B, V]: int [B]. s: a utils.Sample.

    Each row has a key of its own, so the size of the batch does not change what a row draws.
    """
    if s.temperature == 0:
        return jnp.argmax(logits, -1)
    logits = logits / s.temperature
    if s.top_k:
        smallest = kth_largest(logits, s.top_k)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)

    def draw(row, logits):
        return jax.random.categorical(jax.random.fold_in(key, row), logits)

    return jax.vmap(draw)(jnp.arange(len(logits)), logits)


def kth_largest(x, k):
    """The k-th largest number of each row of x, float32 [B, V]: [B, 1]. The smallest, where a row has fewer than k."""
    return largest_reached(x, 1, min(k, x.shape[-1]))


def smallest_of_nucleus(logits, p):
    """The smallest logit in the nucleus of each row of logits [B, V]: [B, 1].

    The nucleus is the smallest set of likeliest tokens that together have probability p [B, 1]. It always contains the
    likeliest token (Holtzman et al., arXiv:1904.09751).
    """
    smallest = largest_reached(logits, jax.nn.softmax(logits), p)
    return jnp.minimum(smallest, logits.max(-1, keepdims=True))


def largest_reached(x, weights, needed):
    """The largest number t in each row of x, float32 [B, V], such that the `weights` of all numbers >= t in the row sum
    to at least `needed`: [B, 1].

    It is the smallest number of a row whose weights sum to less, and infinity where `needed` is 0 or less. The bits of
    t are found one by one, from the highest.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # integers in the same order as x, which CPUs compare much faster
    integers = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def try_bit(n, found):
        # bit 0 is the sign: flipping it turns the smallest integer into 0
        larger = found ^ jnp.left_shift(jnp.int32(1), 31 - n)
        reach = jnp.where(integers >= larger, weights, 0).sum(-1, keepdims=True)
        return jnp.where(reach >= needed, larger, found)

    least = jnp.iinfo(jnp.int32).min
    smallest = jnp.full((len(x), 1), least)
    found = lax.fori_loop(0, 32, try_bit, smallest)
    reached = jnp.where(integers >= found, x, jnp.inf)
    return reached.min(-1, keepdims=True)


# The devices draw this many tokens of each row before the host reads them: reading after every token would be slow.
CHUNK = 8


def make_stream(cfg, mesh, s, length, chunk=CHUNK, draw=None):
    """Jitted functions that continue prompts with a cache, in rows of at most `length` tokens. s: a utils.Sample.

        prefill(params, ids [B, n], lengths [B], key) -> state
        advance(params, state) -> state, the next tokens [chunk, B]

    A state is (newest token [B], which is not in the cache yet; its position [B]; cache; key for the next draw).
    `advance` donates the memory of its state. draw: replaces `draw_next`. It may return (token, ...), with further
    arrays [B, ...], in place of the token, and its key may be any tree.
    """
    draw = draw or draw_next
    decode = make_decode(cfg, mesh)

    def prefill(params, ids, lengths, key):
        cache = empty_cache(cfg, len(ids), length)
        logits, cache = decode(params, ids, cache, jnp.zeros_like(lengths), lengths - 1)
        token, key = draw(logits, key, s)
        return token, lengths, cache, key

    def advance(params, state):
        def one(state, _):
            token, position, cache, key = state
            ids = jax.tree.leaves(token)[0][:, None]  # [B, 1]
            last = jnp.zeros_like(position)
            logits, cache = decode(params, ids, cache, position, last)
            drawn, key = draw(logits, key, s)
            return (drawn, position + 1, cache, key), token

        return lax.scan(one, state, length=chunk)

    rows = NamedSharding(mesh, P("dp"))
    everywhere = NamedSharding(mesh, P())
    cache = {kind: NamedSharding(mesh, spec) for kind, spec in cache_specs(cfg).items()}
    state = (rows, rows, cache, everywhere)
    advance = jax.jit(advance, out_shardings=(state, everywhere), donate_argnums=1)
    return jax.jit(prefill, out_shardings=state), advance


def pad(sequences, n):
    """Sequences of token ids, padded with 0 to n: (ids [B, n], lengths [B]), both int32."""
    ids = np.zeros((len(sequences), n), np.int32)
    for row, sequence in zip(ids, sequences):
        row[: len(sequence)] = sequence
    return ids, np.array([len(sequence) for sequence in sequences], np.int32)


def chunks_of(advance, params, state, n):
    """Yield the next tokens in n chunks, int32 [B, chunk]. The devices draw a chunk while the host uses the one
    before."""
    state, drawn = advance(params, state)
    for _ in range(n - 1):
        state, ahead = advance(params, state)
        yield np.asarray(drawn).T
        drawn = ahead
    yield np.asarray(drawn).T


def draw_next(logits, key, s):
    """(tokens int32 [B] from `draw_tokens`, key for the next draw)."""
    key, now = jax.random.split(key)
    return draw_tokens(logits, now, s).astype(jnp.int32), key
