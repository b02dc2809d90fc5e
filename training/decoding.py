"""Decoding: logits of the next token with a cache of the tokens before, and text drawn from them, on any mesh."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import collectives
import model
from architectures import architecture, layers, parameters
from kernels import loss


def make_decode(cfg, mesh):
    """`decode(params, ids, cache, start, last)` on global arrays, for decoding on any mesh.

    ids int32 [B, n], B a multiple of dp, are the tokens at positions start [B].. of each sequence; the cache of
    `empty_cache` holds what attention needs of those before. Returns float32 logits [B, V] of the token last [B] of
    each row of ids, and the cache with the n tokens added. Rows may be padded at their end: what stands behind a row's
    last token is overwritten before it is seen. Nothing is dropped.
    """
    cfg = model.dropless(cfg)
    m, arch, stage = (
        cfg.model,
        architecture(cfg.model.architecture),
        model.make_stage(cfg, remat=False),
    )
    first_layers = model.make_layer_loop(cfg, "first", m.first_layers, remat=False)
    cache_spec = {kind: spec for kind, (_, spec) in arch.cache(cfg, 1, 1).items()}

    def local_decode(params, ids, cache, start, last):
        tokens = layers.Tokens(start[:, None] + jnp.arange(ids.shape[1]), split=False)
        top, weights = model.top_params(params, cfg), model.layer_params(params, cfg)

        def run_stage(x, cache, turn, microbatch, valid):
            y, (_, new), _ = stage(weights, x, tokens, cache)
            return y, jax.tree.map(lambda old, new: jnp.where(valid, new, old), cache, new)

        x, blocks, done = arch.embed(top, ids, tokens.position), dict(cache), {}
        if m.first_layers:
            x, done["first"], _ = first_layers(
                weights["first"], (), 0, x, tokens, blocks.pop("first")
            )
        x, blocks = model.pipeline(run_stage, x[None], blocks)  # [1, B/dp, n, D]
        x = jnp.take_along_axis(x[0], last[:, None, None], 1)[:, 0]  # [B/dp, D]
        x = collectives.from_last_stage(x, everywhere=True)
        return loss.logits_of(
            arch.norm(x, top["norm"], m.norm_eps), top["head"], m.vocab_size
        ), blocks | done

    specs, rows = parameters.table_map(lambda p: p.spec, model.param_table(cfg)), P("dp")
    return jax.shard_map(
        local_decode,
        mesh=mesh,
        in_specs=(specs, rows, cache_spec, rows, rows),
        out_specs=(rows, cache_spec),
        check_vma=False,
    )


def empty_cache(cfg, B, T):
    """Cache of B sequences of at most T tokens, in model_dtype; its size is said at each `Architecture.cache`."""
    cache = architecture(cfg.model.architecture).cache(cfg, B, T)
    return {kind: jnp.zeros(shape, cfg.model.model_dtype) for kind, (shape, _) in cache.items()}


def to_integers(x):
    """int32 in the order of the float32 of an array: sorting and comparing them is much faster on a CPU."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def from_integers(i):
    """The float32 of `to_integers`."""
    return lax.bitcast_convert_type(jnp.where(i < 0, i ^ 0x7FFFFFFF, i), jnp.float32)


def kth_largest(x, k):
    """The k-th largest of each row of float32 [B, V], [B, 1], found bit by bit: the largest number that k of the row
    reach. A row of fewer has its smallest."""
    i, k = to_integers(x), min(k, x.shape[-1])

    def one_bit(n, found):
        higher = found ^ jnp.left_shift(
            jnp.int32(1), 31 - n
        )  # the first turns the smallest number into 0
        return jnp.where((i >= higher).sum(-1, keepdims=True) >= k, higher, found)

    return from_integers(
        lax.fori_loop(0, 32, one_bit, jnp.full((len(x), 1), jnp.iinfo(jnp.int32).min))
    )


def draw_tokens(logits, key, s):
    """One token per row of logits [B, V], as the settings `s` (utils.Sample) say: of the top_k most likely (0: all),
    and of the most likely whose probabilities add up to top_p (arXiv:1904.09751, section 3.1); temperature 0 takes the
    most likely one.

    Each row draws with a key of its own, so the size of the batch does not change what a row draws.
    """
    if s.temperature == 0:
        return jnp.argmax(logits, -1)
    logits = logits / s.temperature
    if s.top_k:
        logits = jnp.where(logits < kth_largest(logits, s.top_k), -jnp.inf, logits)
    if s.top_p < 1:
        ordered = from_integers(jnp.sort(to_integers(logits), -1)[:, ::-1])
        share = jnp.cumsum(jax.nn.softmax(ordered, -1), -1)
        kept = (share < s.top_p).sum(-1, keepdims=True)  # the one that reaches top_p is kept too
        logits = jnp.where(logits < jnp.take_along_axis(ordered, kept, 1), -jnp.inf, logits)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, logits)


def make_generate(cfg, mesh):
    """`generate(params, prompt, key)`: continue prompt int32 [n] by max_tokens, inference_batch times over.

    Returns int32 [inference_batch, n + max_tokens]. With and without use_cache the tokens are the same.
    """
    s, dp = cfg.sample, cfg.run.n_device_axis[0]
    decode, B = make_decode(cfg, mesh), math.ceil(s.inference_batch / dp) * dp

    def generate(params, prompt, key):
        n = len(prompt)
        text = jnp.zeros((B, n + s.max_tokens), jnp.int32).at[:, :n].set(prompt)
        cache = empty_cache(cfg, B, n + s.max_tokens)
        everywhere = functools.partial(jnp.full, (B,))

        def append(text, logits, i):
            token = draw_tokens(logits, jax.random.fold_in(key, i), s)
            return lax.dynamic_update_slice_in_dim(text, token[:, None].astype(jnp.int32), i, 1)

        def cached(carry, i):
            text, cache = carry
            newest = lax.dynamic_slice_in_dim(text, i - 1, 1, 1)
            logits, cache = decode(params, newest, cache, everywhere(i - 1), everywhere(0))
            return (append(text, logits, i), cache), None

        def uncached(text, i):
            return append(
                text, decode(params, text, cache, everywhere(0), everywhere(i - 1))[0], i
            ), None

        if not s.use_cache:
            return lax.scan(uncached, text, n + jnp.arange(s.max_tokens))[0][: s.inference_batch]
        logits, cache = decode(params, text[:, :n], cache, everywhere(0), everywhere(n - 1))
        steps = n + 1 + jnp.arange(s.max_tokens - 1)
        return lax.scan(cached, (append(text, logits, n), cache), steps)[0][0][: s.inference_batch]

    return generate
