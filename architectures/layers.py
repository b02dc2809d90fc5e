"""What the layers of several architectures are made of, on the local shapes inside `shard_map`.

Letters, also of einsums: b B batch, t T sequence, d D model, h H heads, k K channels of a head, f F feed-forward,
g branches of a feed-forward, E experts. A layer is a function `layer(p, x, tokens, m, cache)`:
parameters, the residual [B, T/tp, D], `Tokens`, the flags of utils.Model, and the layer's cache or None. It returns the
new residual, and a pair of `RoutingStats` (None for dense layers before a block's last) and the new cache.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from architectures.parameters import is_param, split_over_tp, weight_param
from collectives import (
    exchange_heads,
    gather_sequence,
    gather_weight,
    platform,
    scatter_sequence,
    sum_over,
)
from kernels import attention as kernels
from kernels import products, xla_cpu

# Places in a model behind which channels are dropped; each draws differently.
AFTER_ATTENTION, AFTER_FEED_FORWARD, AFTER_EMBEDDING = range(3)

BRANCHES = {"swiglu": 2, "gelu": 1}  # matrices that --activation puts before the hidden channels


class Tokens(NamedTuple):
    """Where the tokens of an activation [B, T/tp, D] are in their sequences and in the training step."""

    position: jax.Array  # [B, T/tp] position in the sequence; [1, T/tp] where it is the same in all
    split: bool = True  # whether T is split over tp
    key: jax.Array | None = None  # of dropout in this layer; None: no dropout
    number: jax.Array | None = None  # [B, T/tp] uint32, the token's number in the training step
    start: jax.Array | None = None  # [B, T] where each token's document begins; None: all are one

    def whole(self, T):
        """Positions [B or 1, T] of all T tokens of the sequences."""
        return jnp.arange(T)[None] if self.split else self.position

    def within_document(self):
        """Positions [B or 1, T/tp] counted from the beginning of each token's document."""
        if self.start is None:
            return self.position
        return self.position - self.start[:, self.position[0]]


@jax.named_scope("gather_weights")
def gather(params, table, dtype, exchange=False):
    """Parameters, gathered over the axes that only store them; matrices in `dtype`, others in float32. table: theirs,
    or a larger one; exchange: of `gather_weight`."""

    def gather_one(p, w):
        return gather_weight(w, p, dtype if p.cast else jnp.float32, exchange)

    table = {name: table[name] for name in params}
    return jax.tree.map(gather_one, table, params, is_leaf=is_param)


@jax.custom_vjp
def rows_of(table, ids):
    """table[ids], [..., D] of table [n, D]. Its gradient is summed in float32, to the same bits every time."""
    return table[ids]


def _rows_of_forward(table, ids):
    return table[ids], (table, ids)


def _rows_of_backward(kept, g):
    table, ids = kept
    n, D = table.shape
    ids = ids.reshape(-1)
    g = g.reshape(-1, D).astype(jnp.float32)
    if platform() == "gpu":  # which adds to a row in any order, and so rounds in many ways
        g = jnp.cumsum(g[jnp.argsort(ids)], 0)
        ends = jnp.cumsum(jnp.bincount(ids, length=n))  # of each row's terms, in that order
        upto = jnp.where(ends[:, None] > 0, g[ends - 1], 0)
        total = jnp.diff(upto, axis=0, prepend=0)
    else:
        total = jnp.zeros((n, D), jnp.float32).at[ids].add(g)
    return total.astype(table.dtype), None


rows_of.defvjp(_rows_of_forward, _rows_of_backward)


def einsum(spec, x, w, kept_by="dots"):
    """`jnp.einsum(spec, x, w)` of activations x and a weight w; the --remat `kept_by`, if any, keeps the result."""
    y = products.einsum(spec, x, w)
    return checkpoint_name(y, kept_by) if kept_by else y


# A function that is cheap to compute again keeps its inputs alone for the backward pass, also with --remat none: not
# float32 intermediates, which take several times the memory of inputs in bfloat16.
keep_inputs = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(keep_inputs, static_argnums=2)
def rms_norm(x, scale, eps):
    """Root-mean-square norm over the last dim (arXiv:1910.07467, equation 4), in float32; returns x's dtype."""
    x32 = x.astype(jnp.float32)
    square = jnp.mean(x32 * x32, -1, keepdims=True)
    inverse = lax.rsqrt(square + eps)
    return (x32 * inverse * scale).astype(x.dtype)


def rms_norm_of_all_heads(x, scale, eps):
    """`rms_norm` over the channels of all heads together, which tp splits: x [B, H/tp, T, K], scale [H/tp, K]."""
    channels = x.shape[1] * x.shape[3] * lax.axis_size("tp")
    square = sum_over(sum_of_squares(x), "tp") / channels  # [B, T]
    return scale_to_square(x, square[:, None, :, None], scale[:, None], eps)


@keep_inputs
def sum_of_squares(x):
    """x [B, H/tp, T, K] -> the sum of the squares of each token's channels [B, T], in float32."""
    x32 = x.astype(jnp.float32)
    return jnp.sum(x32 * x32, (1, 3))


# not one function with `sum_of_squares`: what is computed again in the backward pass must not exchange anything
@functools.partial(keep_inputs, static_argnums=3)
def scale_to_square(x, square, scale, eps):
    """x over the root of its mean `square`, times scale, in float32; returns x's dtype."""
    return (x.astype(jnp.float32) * lax.rsqrt(square + eps) * scale).astype(x.dtype)


def dropout(x, rate, tokens, place):
    """Zero a share `rate` of x [B, T/tp, D] behind an `AFTER_` place and scale the rest up. Each token's number in the
    step decides, so every mesh does the same."""
    if tokens.key is None:
        return x
    key = jax.random.fold_in(tokens.key, place)

    def kept_channels(number):
        token_key = jax.random.fold_in(key, number)
        return jax.random.bernoulli(token_key, 1 - rate, x.shape[-1:])

    keep = jax.vmap(jax.vmap(kept_channels))(tokens.number)
    dropped = jnp.where(keep, x / (1 - rate), 0)
    return dropped.astype(x.dtype)


def rotary_frequencies(channels, base):
    """Radians per position [channels/2] of pairs of channels, float32 (RoFormer, arXiv:2104.09864, section 3.2.2)."""
    half = channels // 2
    return base ** (-np.arange(half, dtype=np.float32) / half)


def rotate(x, position, frequencies):
    """Rotary positions: channel i of x [..., channels] turns with channel i + channels/2, by position x frequency.
    position broadcasts to the dims of x but the last; frequencies [channels/2]."""
    angle = position[..., None] * frequencies  # [..., channels/2]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = jnp.concatenate([a, b], -1)
    return rotated.astype(x.dtype)


def attention_kernel(m, cache):
    """The kernel that --attention names; with a cache xla, the one for queries that are not as many as the keys."""
    name = m.attention if cache is None else "xla"
    kernel = kernels.ATTENTION[name].function
    return xla_cpu.in_float32(kernel) if platform() == "cpu" and cache is None else kernel


def write_cache(cache, new, position):
    """`new` [B, T, ...] into `cache` [B, T_max, ...] from each sequence's first position on; position [B, T]."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(cache, new.astype(cache.dtype), position[:, 0])


def key_value_cache(m, kind):
    """(shape, mesh axes) of what a layer caches of a token: its key and its value."""
    return (2, m.kv_heads, m.key_dim), (None, "tp", None)


def attend_to_heads(q, k, v, position, weight, tokens, m, cache):
    """Attention of queries q [B, H/tp, T, K] at position [B or 1, T] to keys and values k and v [B, H_kv/tp, T, K] of
    the same tokens, and to those before them in the `key_value_cache`, if there is one. Returns what `project_heads`
    makes of it, and the cache."""
    if cache is not None:
        new = jnp.stack([k, v], 2).swapaxes(1, 3)  # [B, T, 2, H_kv/tp, K]
        cache = write_cache(cache, new, position)
        k, v = jnp.moveaxis(cache.swapaxes(1, 3), 2, 0)
    attend = attention_kernel(m, cache)
    out = attend(q * m.key_dim**-0.5, k, v, position, tokens.start)
    return project_heads(out, weight, tokens, m), cache


def project_heads(out, weight, tokens, m):
    """Outputs of heads, [B, H/tp, T, K], back into the residual [B, T/tp, D], by weight [H/tp, K, D], with ulysses
    [H, K, D]."""
    if m.sequence_parallel == "ulysses":
        out = exchange_heads(out, tokens.split)  # [B, H, T/tp, K]
        return einsum("bhtk,hkd->btd", out, weight)
    out = einsum("bhtk,hkd->btd", out, weight)  # [B, T, D], of own heads
    return scatter_sequence(out, tokens.split)


@keep_inputs
def activate(h):
    """[..., 2, F] -> SwiGLU (arXiv:2002.05202, equation 5); [..., 1, F] -> GELU. Returns [..., F].

    Computed in float32: on a CPU XLA rounds bfloat16 after every operation, which takes three times as long.
    """
    gate = h[..., 0, :].astype(jnp.float32)
    if h.shape[-2] == 1:
        return jax.nn.gelu(gate).astype(h.dtype)
    return (jax.nn.silu(gate) * h[..., 1, :]).astype(h.dtype)


def feed_forward_table(cfg, F, up_std, down_std):
    """Parameters of `feed_forward` with F hidden channels, and the standard deviations with which they begin."""
    D, branches = cfg.model.model_dimension, BRANCHES[cfg.model.activation]
    up, down = dict(g=branches, d=D, f=F), dict(d=D, f=F)
    lies = dict(stored_along="d") | split_over_tp(cfg, "f")
    return dict(
        up=weight_param(cfg, up, up_std, "d -> f", **lies),
        down=weight_param(cfg, down, down_std, "f -> d", **lies),
    )


def feed_forward(p, x, tokens, m):
    """SwiGLU or GELU feed-forward without biases: x [B, T/tp, D] -> [B, T/tp, D]."""

    def mlp(x):
        h = activate(einsum("btd,gdf->btgf", x, p["up"]))  # [B, T, F/tp]
        return einsum("btf,df->btd", h, p["down"])

    return tensor_parallel(mlp, x, tokens, m)


def tensor_parallel(f, x, tokens, m):
    """f(x) with x and the result [B, T/tp, D], for an f that acts on each token alone. With --sequence_parallel
    megatron (arXiv:2205.05198, section 4.2.2) f sees all tokens and a part of its weights, and its results are summed
    over tp; with ulysses it sees its own tokens and all its weights."""
    if m.sequence_parallel == "ulysses":
        return f(x)
    x = gather_sequence(x, tokens.split)  # [B, T, D]
    return scatter_sequence(f(x), tokens.split)
