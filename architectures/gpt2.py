"""GPT-2 (Radford et al., 2019): its parameter table, layers and cache."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from architectures import Architecture, LayerCost
from architectures.layers import (
    dropout,
    no_load,
    product,
    project_heads,
    tensor_parallel,
    write_cache,
)
from architectures.parameters import bias_param, matrix, over_tp, scale_param, stack
from collectives import AXES, gather_sequence
from kernels import attention as kernels


def gpt2_table(cfg):
    """The parameter table of GPT-2. Weights begin as in its paper, section 2.3, and code: normal with a deviation of
    0.02, those back into the residual of 0.02 / sqrt(2 x layers); biases begin at 0, scales of norms at 1."""
    m, W, tp = cfg.model, functools.partial(matrix, cfg), functools.partial(over_tp, cfg)
    D, H, K, F, std = m.model_dimension, m.n_head, m.head_dim, m.ffn_width, 0.02
    back = std / math.sqrt(2 * m.blocks)

    def norm():
        return dict(scale=scale_param(D), bias=bias_param(D))

    layer = dict(
        attention_norm=norm(),
        qkv=W((D, 3, H, K), std, fixed={2: "tp"}),
        qkv_bias=bias_param(3, H, K, spec=P(None, "tp", None)),
        out=W((H, K, D), back, fsdp=2, **tp(0)),
        out_bias=bias_param(D),
        norm=norm(),
        up=W((D, F), std, **tp(1)),
        up_bias=bias_param(F, spec=P("tp" if m.sequence_parallel == "megatron" else None)),
        down=W((F, D), back, fsdp=1, **tp(0)),
        down_bias=bias_param(D),
    )
    embedding = W((m.padded_vocab, D), std, over=AXES, rows=m.vocab_size)
    positions = W((m.T, D), std, over=AXES, active=1 / m.T)
    return dict(embedding=embedding, positions=positions, gpt2=stack(layer, m.blocks), norm=norm())


def layer_norm(x, p, eps):
    """Norm by mean and deviation over the last dim (arXiv:1607.06450, equation 3), in float32."""
    x32 = x.astype(jnp.float32)
    x32 -= x32.mean(-1, keepdims=True)
    normal = x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normal * p["scale"] + p["bias"]).astype(x.dtype)


def gpt2_layer(p, x, tokens, m, cache=None):
    """GPT-2's layer (Radford et al., 2019, section 2.3): multi-head attention, then a GELU feed-forward; pre-norm.

    x [B, T/tp, D] -> x, (an empty Load, cache). `cache` [B, T_max, 2, H/tp, K] holds keys and values.
    """
    with jax.named_scope("attention"):
        h = gather_sequence(
            layer_norm(x, p["attention_norm"], m.norm_eps), tokens.split
        )  # [B, T, D]
        qkv = (
            product("btd,dchk->bchtk", h, p["qkv"]) + p["qkv_bias"][:, :, None]
        )  # [B, 3, H/tp, T, K]
        q, kv = jnp.split(qkv.astype(x.dtype), (1,), 1)
        position, kernel = tokens.whole(h.shape[1]), m.attention
        if cache is not None:
            cache, kernel = (
                write_cache(cache, jnp.moveaxis(kv, 3, 1), position),
                "xla",
            )  # [B, T_max, 2, H/tp, K]
            kv = jnp.moveaxis(cache, 1, 3)
        out = kernels.ATTENTION[kernel].function(
            q[:, 0] * m.head_dim**-0.5, kv[:, 0], kv[:, 1], position, tokens.start
        )
        out = project_heads(out, p["out"], tokens, m) + p["out_bias"]
        x = x + dropout(out.astype(x.dtype), m.dropout_rate, tokens, 0)
    with jax.named_scope("feed_forward"):

        def mlp(h):
            h = jax.nn.gelu(product("btd,df->btf", h, p["up"]) + p["up_bias"]).astype(
                x.dtype
            )  # [B, T, F/tp]
            return product("btf,fd->btd", h, p["down"])

        out = tensor_parallel(mlp, layer_norm(x, p["norm"], m.norm_eps), tokens, m) + p["down_bias"]
        return x + dropout(out.astype(x.dtype), m.dropout_rate, tokens, 1), (no_load(0), cache)


def gpt2_embed(top, ids, position):
    """ids [B, T] at position [B or 1, T] -> rows of the embedding and of the learned positions, added, [B, T, D]."""
    return top["embedding"][ids] + top["positions"][position]


def key_value_cache(cfg, B, T):
    """{kind: (shape, spec)} of the cache of B sequences of at most T tokens: 2 x D numbers per token and layer."""
    m = cfg.model
    return dict(
        gpt2=((m.blocks, B, T, 2, m.n_head, m.head_dim), P("pp", "dp", None, None, "tp", None))
    )


# --- Costs ------------------------------------------------------------------------------------------------------


def layer_cost(m, kind):
    """`LayerCost` of a layer."""
    D, K = m.model_dimension, m.head_dim
    return LayerCost(
        own_weights=0,
        head_weights=4 * D * K,  # query, key, value and out
        query_channels=K,
        value_channels=K,
        gathered=D,
        products=m.n_head * 3 * K,
        branches=1,
        ffn_width=m.ffn_width,
        kept_ratio=3.0,  # biases are added in float32
    )


ARCHITECTURE = Architecture(
    table=gpt2_table,
    layers=dict(gpt2=gpt2_layer),
    last="gpt2",
    stacks=frozenset({"gpt2"}),
    routed={},
    embed=gpt2_embed,
    norm=layer_norm,
    cache=key_value_cache,
    layer_cost=layer_cost,
)
