"""Qwen3 (arXiv:2505.09388), dense and mixture-of-experts: parameters, layers, cache and costs.

Families whose layers differ from these in the norm of queries and keys, or in the router, are made by `family` too:
architectures/olmoe.py shows how.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

from architectures import Architecture, LayerCost
from architectures.experts import (
    choose_experts,
    experts_table,
    no_routing,
    routed_experts,
    router_logits,
)
from architectures.layers import (
    AFTER_ATTENTION,
    AFTER_FEED_FORWARD,
    attend_to_heads,
    dropout,
    einsum,
    feed_forward,
    feed_forward_table,
    key_value_cache,
    rms_norm,
    rotary_frequencies,
    rotate,
)
from architectures.parameters import (
    embedding_param,
    out_param,
    scale_param,
    stack,
    std_back,
    std_into,
    weight_param,
)
from collectives import gather_sequence
from runtime.messages import UserError

FLAGS = frozenset(
    "head_dim n_kv_head rope_base n_experts experts_per_token expert_dim capacity_factor experts "
    "expert_momentum balance_weight".split()
)


def check_flags(cfg):
    """Raises UserError for flags that do not fit each other."""
    m, tp = cfg.model, cfg.run.n_device_axis[2]
    if m.n_head % m.kv_heads:
        raise UserError("must divide {n_head}", flag="n_kv_head", value=m.kv_heads, n_head=m.n_head)
    if m.kv_heads % tp:
        raise UserError(f"must be a multiple of tp ({tp})", flag="n_kv_head", value=m.kv_heads)
    if m.key_dim % 2:
        raise UserError(
            "must be a multiple of 2, since channels are rotated in pairs",
            flag="head_dim",
            value=m.key_dim,
        )
    if m.n_experts and not m.experts_per_token:
        raise UserError(
            "must be at least 1 where there are experts", flag="experts_per_token", value=0
        )


class HeadNorm(NamedTuple):
    """How a family normalizes queries and keys."""

    scale: Callable  # (H, K) -> `Param` of its scale, for H heads of K channels
    norm: Callable  # (x [B, H/tp, T, K], scale, eps) -> x


EACH_HEAD = HeadNorm(lambda H, K: scale_param(k=K), rms_norm)


def family_table(cfg, name, head_norm):
    """The parameter table of a family: its layers are stacked at `name`. Weights begin as those of
    architectures/deepseek.py do (`std_into`, `std_back`); norms start at 1."""
    m = cfg.model
    D = m.model_dimension
    std = std_into(D)
    layer = attention_table(cfg, head_norm) | dict(norm=scale_param(d=D))
    if m.n_experts:
        back = std_back(m.expert_width, m.blocks)
        sizes = dict(d=D, e=m.n_experts)
        layer["router"] = weight_param(cfg, sizes, std, "d -> e", cast=False, hidden=False)
        layer["experts"] = experts_table(cfg, std, back)
    else:
        back = std_back(m.ffn_width, m.blocks)
        layer["ffn"] = feed_forward_table(cfg, m.ffn_width, std, back)
    return {
        "embedding": embedding_param(cfg, m.padded_vocab, std, used=m.vocab_size),
        name: stack(layer, blocks=m.blocks),
        "norm": scale_param(d=D),
    }


def attention_table(cfg, head_norm):
    """Grouped-query attention: `kv` holds keys and values of n_kv_head heads."""
    m = cfg.model
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    std = std_into(D)
    q, kv = dict(d=D, h=H, k=K), dict(d=D, two=2, h=m.kv_heads, k=K)
    by_heads = dict(split=dict(h="tp"))
    return dict(
        attention_norm=scale_param(d=D),
        q=weight_param(cfg, q, std, "d -> h k", **by_heads),
        kv=weight_param(cfg, kv, std, "d -> h k", **by_heads),
        q_norm=head_norm.scale(H, K),
        k_norm=head_norm.scale(m.kv_heads, K),
        out=out_param(cfg, H, K, std_back(H * K, m.blocks)),
    )


def attention(p, x, tokens, m, cache, norm):
    """Grouped-query attention (arXiv:2305.13245) with rotated queries and keys, tensor-parallel over heads. norm: of
    `HeadNorm`, for queries and keys.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache, [B, T_max, 2, H_kv/tp, K] or None.
    """
    x = gather_sequence(x, tokens.split)  # [B, T, D]
    position = tokens.whole(x.shape[1])
    q = einsum("btd,dhk->bhtk", x, p["q"])  # [B, H/tp, T, K]
    k = einsum("btd,dhk->bhtk", x, p["kv"][:, 0])  # [B, H_kv/tp, T, K]
    v = einsum("btd,dhk->bhtk", x, p["kv"][:, 1])

    frequencies = rotary_frequencies(m.key_dim, m.rope_base)
    q = norm(q, p["q_norm"], m.norm_eps)
    q = rotate(q, position[:, None], frequencies)
    k = norm(k, p["k_norm"], m.norm_eps)
    k = rotate(k, position[:, None], frequencies)
    return attend_to_heads(q, k, v, position, p["out"], tokens, m, cache)


def softmax_router(p, x, m):
    """Softmax router (arXiv:2505.09388, section 2; Switch Transformer, arXiv:2101.03961, section 2.1): x float32 [n, D]
    -> scores [n, E], chosen experts [n, k] and their gates [n, k]."""
    scores = jax.nn.softmax(router_logits(p, x))
    return scores, *choose_experts(scores, lax.stop_gradient(scores), m)


def layer(p, x, tokens, m, cache, norm, router):
    """Grouped-query attention, then a dense feed-forward or routed experts, pre-norm. norm: of `HeadNorm`; router: of
    `routed_experts`. x [B, T/tp, D] -> x, (`RoutingStats`, cache)."""
    stats = no_routing(m)
    with jax.named_scope("attention"):
        h = rms_norm(x, p["attention_norm"], m.norm_eps)
        out, cache = attention(p, h, tokens, m, cache, norm)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_ATTENTION)
    with jax.named_scope("experts" if m.n_experts else "feed_forward"):
        h = rms_norm(x, p["norm"], m.norm_eps)
        if m.n_experts:
            out, stats = routed_experts(p, h, m, tokens.split, router)
        else:
            out = feed_forward(p["ffn"], h, tokens, m)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_FEED_FORWARD)
    return x, (stats, cache)


def layer_cost(m, kind):
    """`LayerCost` of a layer."""
    D, H, K, H_kv = m.model_dimension, m.n_head, m.key_dim, m.kv_heads
    return LayerCost(
        own_weights=D * m.n_experts,
        head_weights=2 * D * K + 2 * D * K * H_kv / H,
        query_channels=K,
        value_channels=K,
        gathered=D,
        products=(H + 2 * H_kv) * K,
        branches=2,
        ffn_width=0 if m.n_experts else m.ffn_width,
    )


def family(name, head_norm=EACH_HEAD, router=softmax_router, **others):
    """`Architecture` of a family whose layers are Qwen3's, but for the norm of queries and keys and for the router.
    others: fields of `Architecture` in which it differs too."""
    fields = dict(
        table=functools.partial(family_table, name=name, head_norm=head_norm),
        layers={name: functools.partial(layer, norm=head_norm.norm, router=router)},
        last=name,
        embed=lambda top, x, position: x,
        norm=rms_norm,
        cache=key_value_cache,
        layer_cost=layer_cost,
        flags=FLAGS,
        fixed=dict(activation="swiglu"),
        check=check_flags,
    )
    return Architecture(**fields | others)


ARCHITECTURE = family("qwen3")
