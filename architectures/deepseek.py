"""DeepSeek-V3 (arXiv:2412.19437): its parameter table, layers and cache."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from architectures import Architecture, LayerCost
from architectures.experts import activate, routed_experts
from architectures.layers import (
    dropout,
    product,
    project_heads,
    rms_norm,
    tensor_parallel,
    write_cache,
)
from architectures.parameters import bias_param, matrix, over_tp, scale_param, stack
from collectives import AXES, EXPERT_AXES, gather_sequence
from kernels import attention as kernels

YARN_BETA = (
    32,
    1,
)  # turns over the original T above which a frequency stays, and below which it is stretched
BRANCHES = {"swiglu": 2, "gelu": 1}  # matrices that lead into a feed-forward


def deepseek_table(cfg):
    """The parameter table of DeepSeek-V3, but for a head of its own.

    | weight | standard deviation of its normal initialisation |
    | --- | --- |
    | matrices | 1 / sqrt(inputs), so that outputs are as large as inputs |
    | projections back into the residual | a tenth of that / sqrt(2 x layers), so that tokens begin as themselves |
    | embedding, which is the head too | 1 / sqrt(D), so that logits begin with a deviation of 1 |
    | norms | 0, they start at 1 |
    | biases | 0 |
    """
    m, W, tp = cfg.model, functools.partial(matrix, cfg), functools.partial(over_tp, cfg)
    D, H, K, R, E, L = (
        m.model_dimension,
        m.n_head,
        m.head_dim,
        m.latent_dim,
        m.n_experts,
        m.layers_per_block,
    )
    Q, V, layers = m.q_latent, m.value_dim, m.first_layers + m.blocks * L
    branches = BRANCHES[m.activation]

    def into(inputs):
        return 1 / math.sqrt(inputs)

    def back(inputs):
        return 0.1 / math.sqrt(inputs * 2 * layers)

    def attention(rope):
        leaves = dict(
            norm=scale_param(D),
            down=W((D, Q + R + rope), into(D)),
            kv_norm=scale_param(R),
            q_up=W((Q or D, H, K + rope), into(Q or D), fixed={1: "tp"}),
            kv_up=W((R, H, K + V), into(R), fixed={1: "tp"}),
            out=W((H, V, D), back(H * V), fsdp=2, **tp(0)),
        )
        if Q:
            leaves["q_norm"] = scale_param(Q)
        if m.attention_bias:
            leaves |= dict(down_bias=bias_param(Q + R + rope), out_bias=bias_param(D))
        return leaves

    def feed_forward(F):
        return dict(
            up=W((branches, D, F), into(D), fsdp=1, **tp(2)),
            down=W((D, F), back(F), **tp(1)),
        )

    def experts(F):
        """Each device of dp x tp holds experts of its own; where several share one, each holds a slice of every expert,
        from which `gather_weight` makes theirs."""
        dp, _, tp = cfg.run.n_device_axis
        shared = dp * tp > E
        split = dict(over=EXPERT_AXES) if shared else dict(fixed={0: EXPERT_AXES}, over=())
        return dict(
            up=W(
                (E, branches, D, F),
                into(D),
                fsdp=2,
                active=m.experts_per_token / E,
                expert=-4 * shared,
                **split,
            ),
            down=W(
                (E, D, F),
                back(F),
                fsdp=1,
                active=m.experts_per_token / E,
                expert=-3 * shared,
                **split,
            ),
        )

    dense = dict(
        attention=attention(m.rope_dim), norm=scale_param(D), ffn=feed_forward(m.ffn_width)
    )
    moe = dict(
        attention=attention(m.rope_dim if m.moe_rope else 0),
        norm=scale_param(D),
        router=W((D, E), into(D), matrix=False),
        bias=bias_param(E),
        experts=experts(m.expert_width),
    )
    if m.n_shared:
        moe["shared"] = feed_forward(m.n_shared * m.expert_width)
    embedding = W((m.padded_vocab, D), into(D), over=AXES, rows=m.vocab_size)
    table = dict(embedding=embedding, moe=stack(moe, m.blocks), norm=scale_param(D))
    if m.first_layers:
        table["first"] = stack(dense, m.first_layers, over=None)
    if L > 1:
        table["dense"] = stack(dense, m.blocks, L - 1)
    if m.mtp_depth:
        predict = dict(
            token_norm=scale_param(D),
            hidden_norm=scale_param(D),
            merge=W((2, D, D), into(2 * D), fsdp=1),
            layer=moe,
            norm=scale_param(D),
        )
        table["mtp"] = stack(predict, m.mtp_depth, over=None)
    return table


def rotary_frequencies(m):
    """Radians per position of the rope_dim/2 channel pairs (RoFormer, arXiv:2104.09864, section 3.2.2), float32.

    With rope_factor > 1, YaRN (arXiv:2309.00071, section 3.2): pairs that turn often over rope_original_T keep their
    frequency, those that turn less than once are slowed down by the factor, with a ramp between, as DeepSeek's code
    has it.
    """
    half = m.rope_dim // 2
    frequencies = m.rope_base ** (-np.arange(half, dtype=np.float32) / half)
    if m.rope_factor == 1:
        return frequencies
    turns = [
        half * math.log(m.rope_original_T / (beta * 2 * math.pi)) / math.log(m.rope_base)
        for beta in YARN_BETA
    ]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), m.rope_dim - 1)
    slowed = np.clip((np.arange(half, dtype=np.float32) - low) / (high - low or 1e-3), 0, 1)
    return frequencies * (1 - slowed) + frequencies / m.rope_factor * slowed


def score_scale(channels, m):
    """Factor on the products of queries and keys of so many channels, with YaRN's temperature."""
    return channels**-0.5 * (0.1 * m.rope_mscale * math.log(m.rope_factor) + 1) ** 2


def rotate(x, position, m):
    """Rotary positions, of the dims of x [..., rope_dim] but the last, with channel i paired with i + rope_dim/2."""
    angle = position[..., None] * rotary_frequencies(m)[: x.shape[-1] // 2]  # [..., rope_dim/2]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def project_queries(x, w, position, m):
    """Scaled queries [B, H/tp, T, K + rope_dim] of x [B, T, Q], the last rope_dim channels rotated; w [Q, H/tp, K + rope_dim].

    What each channel's partner adds is a product with the partners' weights: to move weights is cheaper than queries.
    """
    K, scale = m.head_dim, score_scale(w.shape[-1], m)
    if w.shape[-1] == K:
        return product("btr,rhk->bhtk", x, w * scale)
    a, b = jnp.split(w[..., K:], 2, -1)
    angle = position[:, None, :, None] * np.tile(
        rotary_frequencies(m), 2
    )  # [B or 1, 1, T, rope_dim]
    before = [(0, 0)] * 3 + [(K, 0)]
    rotated = (
        scale * m.rope_attention_factor**2
    )  # the keys' too, so that they need no operation for it
    sin, cos = ((f(angle) * rotated).astype(x.dtype) for f in (jnp.sin, jnp.cos))
    partner = product("btr,rhk->bhtk", x, jnp.concatenate([-b, a], -1)) * sin
    return product("btr,rhk->bhtk", x, w) * jnp.pad(cos, before, constant_values=scale) + jnp.pad(
        partner, before
    )


def project_keys(x, k_up):
    """Keys [B, H/tp, T, K + rope_dim] of x [B, T, R + rope_dim], latents and the rotary key, which all heads share as it is.

    One product, with an identity below k_up [R, H/tp, K], so that none of its gradient is a sum over heads of its own.
    """
    R, H, K = k_up.shape
    rope_dim = x.shape[-1] - R
    shared = jnp.pad(jnp.eye(rope_dim, dtype=x.dtype), ((0, 0), (K, 0)))[
        :, None
    ]  # [rope_dim, 1, K + rope_dim]
    w = jnp.concatenate(
        [
            jnp.pad(k_up, ((0, 0), (0, 0), (0, rope_dim))),
            jnp.broadcast_to(shared, (rope_dim, H, K + rope_dim)),
        ]
    )
    return product("bsr,rhk->bhsk", x, w)


def attention(p, x, tokens, m, cache=None):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), tensor-parallel over heads.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache. Only latents are gathered over tp, or x itself where queries have no
    latent (Q = 0). The rotary key, where the layer has one, is shared by the heads. `cache` [B, T_max, R + rope_dim] holds
    the normalised key/value latents and rotary keys of all positions; those of x are written into it and attention
    reads from it, in the latent space where x is one token (the paper's appendix C: up-projections absorbed).
    """
    Q, R, K = m.q_latent, m.latent_dim, m.head_dim
    down = product("btd,dr->btr", x, p["down"])  # [B, T/tp, Q + R + rope_dim]
    if m.attention_bias:
        down = (down + p["down_bias"]).astype(x.dtype)
    q, kv, k_rope = jnp.split(down, (Q, Q + R), -1)
    latents = [rms_norm(q, p["q_norm"], m.latent_norm_eps)] if Q else []
    latents += [rms_norm(kv, p["kv_norm"], m.latent_norm_eps), rotate(k_rope, tokens.position, m)]
    latents = gather_sequence(
        jnp.concatenate(latents, -1), tokens.split
    )  # [B, T, Q + R + rope_dim]
    q, kv = latents[..., :Q] if Q else gather_sequence(x, tokens.split), latents[..., Q:]
    position = tokens.whole(q.shape[1])
    if cache is not None:
        kv = cache = write_cache(cache, kv, position)
    q = project_queries(q, p["q_up"], position, m)  # [B, H/tp, T, K + rope_dim]
    k_up, v_up = jnp.split(p["kv_up"], (K,), -1)  # [R, H/tp, K], [R, H/tp, V]
    if (
        cache is not None and q.shape[2] == 1
    ):  # one query is cheaper brought into the latent space than all keys out
        q = jnp.concatenate(
            [jnp.einsum("bhtk,rhk->bhtr", q[..., :K], k_up), q[..., K:]], -1
        )  # [B, H/tp, 1, R + rope_dim]
        out = jnp.einsum(
            "bhtr,rhv->bhtv",
            kernels.attend(q, kv, kv[..., :R], position, tokens.start, heads=""),
            v_up,
        )
    else:
        v = product("bsr,rhv->bhsv", kv[..., :R], v_up)
        kernel = kernels.ATTENTION[m.attention if cache is None else "xla"].function
        out = kernel(q, project_keys(kv, k_up), v, position, tokens.start)
    out = project_heads(out, p["out"], tokens, m)
    if m.attention_bias:  # after the sum over tp, so once
        out = (out + p["out_bias"]).astype(x.dtype)
    return out, cache


def feed_forward(p, x, tokens, m):
    """x [B, T/tp, D] -> [B, T/tp, D]."""

    def mlp(x):
        h = activate(product("btd,gdf->btgf", x, p["up"]))  # [B, T, F/tp]
        return product("btf,df->btd", h, p["down"])

    return tensor_parallel(mlp, x, tokens, m)


def dense_layer(p, x, tokens, m, cache):
    """Attention with rotary positions, then a dense feed-forward; pre-norm. x [B, T/tp, D] -> x, (None, cache)."""
    with jax.named_scope("attention"):
        a, cache = attention(
            p["attention"], rms_norm(x, p["attention"]["norm"], m.norm_eps), tokens, m, cache
        )
        x = x + dropout(a, m.dropout_rate, tokens, 0)
    with jax.named_scope("feed_forward"):
        out = feed_forward(p["ffn"], rms_norm(x, p["norm"], m.norm_eps), tokens, m)
        return x + dropout(out, m.dropout_rate, tokens, 1), (None, cache)


def moe_layer(p, x, tokens, m, cache):
    """Attention, then routed and shared experts; pre-norm. x [B, T/tp, D] -> x, (Load, cache)."""
    with jax.named_scope("attention"):
        a, cache = attention(
            p["attention"], rms_norm(x, p["attention"]["norm"], m.norm_eps), tokens, m, cache
        )
        x = x + dropout(a, m.dropout_rate, tokens, 0)
    with jax.named_scope("experts"):
        h = rms_norm(x, p["norm"], m.norm_eps)
        out, load = routed_experts(p, h, m, tokens.split)
        if m.n_shared:
            out = out + feed_forward(p["shared"], h, tokens, m)
        return x + dropout(out, m.dropout_rate, tokens, 1), (load, cache)


def mtp_layer(p, x, tokens, m, cache):
    """One depth of multi-token prediction (DeepSeek-V3, section 2.2): x is the hidden state of the depth before and the
    embedding of the token that it predicts, each [B, T/tp, D] -> the next hidden state, normalised, (Load, cache)."""
    hidden, token = x
    both = (
        rms_norm(token, p["token_norm"], m.norm_eps),
        rms_norm(hidden, p["hidden_norm"], m.norm_eps),
    )
    x, aside = moe_layer(
        p["layer"], jnp.einsum("cbtd,cde->bte", jnp.stack(both), p["merge"]), tokens, m, cache
    )
    return rms_norm(x, p["norm"], m.norm_eps), aside


def embed(top, ids, position):
    """ids [B, T] -> rows of the embedding [B, T, D]; positions are the layers' affair."""
    return top["embedding"][ids]


def latent_cache(cfg, B, T):
    """{kind: (shape, spec)} of the cache of B sequences of at most T tokens: R numbers per token and layer, rope_dim more
    where it rotates."""
    m = cfg.model
    R, rotated = m.latent_dim, m.latent_dim + m.rope_dim
    cache = dict(moe=((m.blocks, B, T, rotated if m.moe_rope else R), P("pp", "dp", None, None)))
    if m.layers_per_block > 1:
        cache["dense"] = (
            (m.blocks, m.layers_per_block - 1, B, T, rotated),
            P("pp", None, "dp", None, None),
        )
    if m.first_layers:
        cache["first"] = (m.first_layers, B, T, rotated), P(None, "dp", None, None)
    return cache


# --- Costs ------------------------------------------------------------------------------------------------------


def layer_cost(m, kind):
    """`LayerCost` of a kind of layer: attention as in DeepSeek-V2, arXiv:2405.04434, section 2.1; feed-forward as in
    arXiv:2002.05202."""
    D, K, V, R, Q = m.model_dimension, m.head_dim, m.value_dim, m.latent_dim, m.q_latent
    routed = kind in ("moe", "mtp")
    rope = m.rope_dim if m.moe_rope or not routed else 0
    latents = Q + R + rope

    own_weights = D * latents
    if routed:
        own_weights += D * m.n_experts
    if kind == "mtp":
        own_weights += 2 * D * D  # merge

    # project_queries rotates by a second product, project_keys copies the rotary key by a larger one
    queries = (Q or D) * (K + 2 * rope)
    keys = (R + rope) * (K + rope)
    values = R * V
    out = V * D

    return LayerCost(
        own_weights=own_weights,
        head_weights=queries + keys + values + out,
        query_channels=K + rope,
        value_channels=V,
        gathered=latents if Q else latents + D,
        products=latents + m.n_head * (2 * K + 3 * rope + V),
        branches=BRANCHES[m.activation],
        ffn_width=m.n_shared * m.expert_width if routed else m.ffn_width,
        kept_ratio=1.6,
    )


ARCHITECTURE = Architecture(
    table=deepseek_table,
    layers=dict(first=dense_layer, dense=dense_layer, moe=moe_layer, mtp=mtp_layer),
    last="moe",
    stacks=frozenset({"dense", "moe"}),
    routed=dict(moe=EXPERT_AXES, mtp=AXES),
    embed=embed,
    norm=rms_norm,
    cache=latent_cache,
    layer_cost=layer_cost,
)
