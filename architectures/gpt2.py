"""GPT-2 (Radford et al., 2019): parameters, layers, cache and costs."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from architectures import Architecture, LayerCost
from architectures.experts import no_routing
from architectures.layers import (
    AFTER_ATTENTION,
    AFTER_FEED_FORWARD,
    attend_to_heads,
    dropout,
    einsum,
    key_value_cache,
    rows_of,
    tensor_parallel,
)
from architectures.parameters import (
    bias_param,
    embedding_param,
    out_param,
    scale_param,
    split_over_tp,
    stack,
    weight_param,
)
from collectives import gather_sequence

STD = 0.02  # standard deviation with which matrices begin


def gpt2_table(cfg):
    """The parameter table of GPT-2. Weights begin as in the paper's section 2.3 and its code."""
    m = cfg.model
    layer = attention_table(cfg) | feed_forward_table(cfg)
    return dict(
        embedding=embedding_param(cfg, m.padded_vocab, STD, used=m.vocab_size),
        positions=embedding_param(cfg, m.T, STD, active=1 / m.T),
        gpt2=stack(layer, blocks=m.blocks),
        norm=norm_table(m),
    )


def back_std(m):
    return STD / math.sqrt(2 * m.blocks)


def norm_table(m):
    D = m.model_dimension
    return dict(scale=scale_param(d=D), bias=bias_param(d=D))


def attention_table(cfg):
    m = cfg.model
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    heads = dict(three=3, h=H, k=K)
    by_heads = dict(h="tp")
    return dict(
        attention_norm=norm_table(m),
        qkv=weight_param(cfg, dict(d=D) | heads, STD, "d -> h k", split=by_heads),
        qkv_bias=bias_param(split=by_heads, **heads),
        out=out_param(cfg, H, K, back_std(m)),
        out_bias=bias_param(d=D),
    )


def feed_forward_table(cfg):
    m = cfg.model
    D, F = m.model_dimension, m.ffn_width
    lies = split_over_tp(cfg, "f")
    return dict(
        norm=norm_table(m),
        up=weight_param(cfg, dict(d=D, f=F), STD, "d -> f", **lies),
        up_bias=bias_param(split=lies.get("split"), f=F),
        down=weight_param(cfg, dict(f=F, d=D), back_std(m), "f -> d", stored_along="d", **lies),
        down_bias=bias_param(d=D),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def layer_norm(x, p, eps):
    """Norm by mean and deviation over the last dim (arXiv:1607.06450, equation 3), in float32; returns x's dtype."""
    return _layer_norm_forward(x, p, eps)[0]


def _layer_norm_forward(x, p, eps):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    x32 -= mean
    inverse = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    y = x32 * inverse * p["scale"] + p["bias"]
    return y.astype(x.dtype), (x, p, mean, inverse)


# Gradients of the norm and of GELU are written out so that no float32 array of x's size goes through a GPU's memory.
# The barriers hide from XLA what it would otherwise keep in float32 from the forward pass, or share between two uses.
def _layer_norm_backward(eps, kept, g):
    x, p, mean, inverse = lax.optimization_barrier(kept)
    normal = (x.astype(jnp.float32) - mean) * inverse
    g = g.astype(jnp.float32)
    d_normal = g * p["scale"]
    along = jnp.mean(d_normal * normal, -1, keepdims=True)
    dx = inverse * (d_normal - d_normal.mean(-1, keepdims=True) - normal * along)
    others = tuple(range(g.ndim - 1))
    dp = dict(scale=(g * normal).sum(others), bias=g.sum(others))
    return dx.astype(x.dtype), dp


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def attention(p, x, tokens, m, cache):
    """Multi-head attention (arXiv:1706.03762, section 3.2.2), tensor-parallel over heads.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache, [B, T_max, 2, H/tp, K] or None.
    """
    x = gather_sequence(x, tokens.split)  # [B, T, D]

    def heads(part):  # [B, H/tp, T, K]; a product for each, since its gradient need not join them
        h = einsum("btd,dhk->bhtk", x, p["qkv"][:, part]) + p["qkv_bias"][part, :, None]
        return h.astype(x.dtype)

    q, k, v = map(heads, range(3))
    position = tokens.whole(x.shape[1])
    out, cache = attend_to_heads(q, k, v, position, p["out"], tokens, m, cache)
    out = out + p["out_bias"]
    return out.astype(x.dtype), cache


def feed_forward(p, x, tokens, m):
    """GELU feed-forward: x [B, T/tp, D] -> [B, T/tp, D]."""

    def mlp(x):
        h = einsum("btd,df->btf", x, p["up"])  # [B, T, F/tp]
        h = gelu(h, p["up_bias"])
        return einsum("btf,fd->btd", h, p["down"])

    out = tensor_parallel(mlp, x, tokens, m) + p["down_bias"]
    return out.astype(x.dtype)


@jax.custom_vjp
def gelu(h, bias):
    """GELU (arXiv:1606.08415, section 2) of h [B, T, F] + bias [F], in h's dtype."""
    return jax.nn.gelu(h + bias).astype(h.dtype)


def _gelu_forward(h, bias):
    return gelu(h, bias), (h, bias)


def _gelu_backward(inputs, g):
    h, bias, g = lax.optimization_barrier((*inputs, g))
    _, pull = jax.vjp(jax.nn.gelu, h + bias)
    (dh,) = pull(g.astype(bias.dtype))
    dh = lax.optimization_barrier(dh.astype(h.dtype))
    return dh, dh.sum((0, 1), bias.dtype)


gelu.defvjp(_gelu_forward, _gelu_backward)


def gpt2_layer(p, x, tokens, m, cache=None):
    """GPT-2's layer (its section 2.3), pre-norm. x [B, T/tp, D] -> x, (empty `RoutingStats`, cache)."""
    with jax.named_scope("attention"):
        h = layer_norm(x, p["attention_norm"], m.norm_eps)
        out, cache = attention(p, h, tokens, m, cache)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_ATTENTION)
    with jax.named_scope("feed_forward"):
        h = layer_norm(x, p["norm"], m.norm_eps)
        out = feed_forward(p, h, tokens, m)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_FEED_FORWARD)
    return x, (no_routing(m), cache)


def embed(top, x, position):
    """Rows of the embedding x [B, T, D] and of the learned positions, for position [B or 1, T], added."""
    return x + rows_of(top["positions"], position)


def layer_cost(m, kind):
    """`LayerCost` of a layer."""
    D, K = m.model_dimension, m.key_dim
    return LayerCost(
        own_weights=0,
        head_weights=4 * D * K,  # query, key, value and out
        query_channels=K,
        value_channels=K,
        gathered=D,
        products=m.n_head * 3 * K,
        branches=1,
        ffn_width=m.ffn_width,
    )


ARCHITECTURE = Architecture(
    table=gpt2_table,
    layers=dict(gpt2=gpt2_layer),
    last="gpt2",
    embed=embed,
    norm=layer_norm,
    cache=key_value_cache,
    layer_cost=layer_cost,
    fixed=dict(activation="gelu"),
    learns_positions=True,
)
