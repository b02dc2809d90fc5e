"""DeepSeek-V3 (arXiv:2412.19437): parameters, layers, cache and costs.

Comes before: `model.py`, whose stages run `layer`. Comes next: `architectures/experts.py`, where tokens meet experts.

Letters of einsums, beside those of layers.py: r channels of a latent, with those of the rotary key where both lie in
one array; s tokens as keys. Intermediate values have the papers' names: latents q_latent and kv_latent, and the parts
of queries and keys with rotary positions, q_rope and k_rope, and without, q_nope and k_nope.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from architectures import Architecture, LayerCost
from architectures.experts import choose_experts, experts_table, routed_experts, router_logits
from architectures.layers import (
    AFTER_ATTENTION,
    AFTER_FEED_FORWARD,
    BRANCHES,
    attention_kernel,
    dropout,
    einsum,
    feed_forward,
    feed_forward_table,
    keep_inputs,
    project_heads,
    rms_norm,
    rotary_frequencies,
    rotate,
    write_cache,
)
from architectures.parameters import (
    bias_param,
    embedding_param,
    out_param,
    scale_param,
    stack,
    std_back,
    std_into,
    weight_param,
)
from collectives import gather_sequence
from kernels import attention as kernels
from runtime.messages import UserError

# Factor on the weights of short convolutions. They begin at 0 and AdamW moves all weights alike; so these move faster.
CONV_SCALE = 4
# Added to the mean square of a row of the embedding, which begins at 1 / D and is 0 for tokens that never come.
EMBEDDING_NORM_EPS = 1e-6
# Added to the mean square of a latent, whatever --norm_eps is
LATENT_NORM_EPS = 1e-6
# Added to the square of a value's length before `exclude_own` divides by it, since a value may be 0
VALUE_EPS = 1e-6


FLAGS = frozenset(
    "first_layers layers_per_block latent_dim q_latent_dim head_dim rope_dim rope_base "
    "embedding_norm embedding_conv backout latent_conv exclusive_attention "
    "expert_dim n_experts experts_per_token n_groups k_groups routed_scaling n_shared "
    "capacity_factor experts expert_momentum balance_weight bias_update_rate".split()
)


def check_flags(cfg):
    """Raises UserError for flags that do not fit each other."""
    m = cfg.model
    for flag in ("latent_dim", "rope_dim", "n_experts", "experts_per_token"):
        if not getattr(m, flag):
            raise UserError(
                "must be at least 1 for {architecture}",
                flag=flag,
                value=0,
                architecture=m.architecture,
            )


def deepseek_table(cfg):
    """The parameter table of DeepSeek-V3, without a head of its own. Matrices begin as `std_into` and `std_back` say,
    the embedding, which is the head too, with 1 / sqrt(D), so that logits begin with a deviation of 1."""
    m = cfg.model
    D = m.model_dimension
    dense = layer_table(cfg, routed=False)
    moe = layer_table(cfg, routed=True)
    table = dict(
        embedding=embedding_param(cfg, m.padded_vocab, std_into(D), used=m.vocab_size),
        moe=stack(moe, blocks=m.blocks),
        norm=scale_param(d=D),
    )
    if m.embedding_norm:
        table["embedding_norm"] = scale_param(d=D)
    if m.embedding_conv:
        table["embedding_conv"] = bias_param(tokens=m.embedding_conv, d=D)
    if m.backout:
        table["backout"] = scale_param(d=D)
    if m.first_layers:
        table["first"] = stack(dense, over=None, layers=m.first_layers)
    if m.layers_per_block > 1:
        table["dense"] = stack(dense, blocks=m.blocks, layers=m.layers_per_block - 1)
    return table


def layers_of(m):
    """Number of layers."""
    return m.first_layers + m.blocks * m.layers_per_block


def rope_channels(m, routed):
    """Rotary channels of a layer, with routed experts or a dense feed-forward."""
    return m.rope_dim if m.moe_rope or not routed else 0


def attention_table(cfg, rope):
    """Multi-head latent attention with `rope` rotary channels."""
    m = cfg.model
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    Q, R = m.q_latent, m.latent_dim
    from_latent = Q or D  # queries come from x itself where they have no latent

    def up_param(channels, *parts):
        sizes = dict(r=channels, h=H, k=sum(parts))
        std = std_into(channels)
        return weight_param(cfg, sizes, std, "r -> h k", split=dict(h="tp"), parts=parts)

    down = dict(d=D, r=Q + R + rope)
    table = dict(
        norm=scale_param(d=D),
        down=weight_param(cfg, down, std_into(D), "d -> r", parts=(Q, R, rope)),
        kv_norm=scale_param(r=R),
        q_up=up_param(from_latent, K + rope),
        kv_up=up_param(R, K, K),  # of keys, then of values
        out=out_param(cfg, H, K, std_back(H * K, layers_of(m))),
    )
    if Q:
        table["q_norm"] = scale_param(r=Q)
    if m.latent_conv:
        # two rotated channels that turn together have one weight: see `attention`
        table["conv"] = bias_param(tokens=m.latent_conv, r=R + rope // 2)
    return table


def layer_table(cfg, routed):
    """A layer with a dense feed-forward, or with routed and shared experts."""
    m = cfg.model
    D, E, F = m.model_dimension, m.n_experts, m.expert_width
    layers, into = layers_of(m), std_into(D)

    def mlp(width):
        return feed_forward_table(cfg, width, into, std_back(width, layers))

    table = dict(attention=attention_table(cfg, rope_channels(m, routed)), norm=scale_param(d=D))
    if not routed:
        return table | dict(ffn=mlp(m.ffn_width))
    table |= dict(
        router=weight_param(cfg, dict(d=D, e=E), into, "d -> e", cast=False, hidden=False),
        bias=bias_param(e=E),
        experts=experts_table(cfg, into, std_back(F, layers)),
    )
    if m.n_shared:
        table["shared"] = mlp(m.n_shared * F)
    return table


def attention(p, x, tokens, m, cache=None, exclusive=False):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), tensor-parallel over heads.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache [B, T_max, R + rope_dim] of `compressed_kv`. Queries, keys and values
    are projected up from latents; only these are gathered over tp. exclusive: see `exclude_own`.
    """
    q_latent, compressed_kv = compress(p, x, tokens, m)
    position = tokens.whole(q_latent.shape[1])
    if cache is not None:
        cache = write_cache(cache, compressed_kv, position)
        compressed_kv = cache
    if m.latent_conv:
        compressed_kv = convolve(compressed_kv, p["conv"], tokens.start, m)
    q = project_queries(q_latent, p["q_up"], position, m)  # [B, H/tp, T, K + rope_dim]
    k_up, v_up = jnp.split(p["kv_up"], (m.key_dim,), -1)  # both [R, H/tp, K]
    kv_latent = compressed_kv[..., : m.latent_dim]
    if cache is not None and q.shape[2] == 1:
        out = attend_in_latent_space(q, compressed_kv, k_up, v_up, position, tokens.start)
    else:
        k = project_keys(compressed_kv, k_up)  # [B, H/tp, T, K + rope_dim]
        v = einsum("bsr,rhk->bhsk", kv_latent, v_up)
        attend = attention_kernel(m, cache)
        out = attend(q, k, v, position, tokens.start)
    if exclusive:
        # a cache holds more tokens than the queries; none of these is beyond it, so clip checks none
        if cache is not None:
            own_latent = jnp.take_along_axis(kv_latent, position[..., None], 1, mode="clip")
            v = einsum("btr,rhk->bhtk", own_latent, v_up)
        out = exclude_own(out, v)
    return project_heads(out, p["out"], tokens, m), cache


def compress(p, x, tokens, m):
    """What attention projects up: x [B, T/tp, D] -> the latent of queries [B, T, Q], or x [B, T, D] where they have
    none, and `compressed_kv` [B, T, R + rope_dim], the latent of keys and values beside the rotary key that all heads
    share. Latents are normalized, the rotary key is rotated, and all are gathered over tp in one piece."""
    Q, R = m.q_latent, m.latent_dim
    down = einsum("btd,dr->btr", x, p["down"])  # [B, T/tp, Q + R + rope_dim]
    q_latent, kv_latent, k_rope = jnp.split(down, (Q, Q + R), -1)
    kv_latent = rms_norm(kv_latent, p["kv_norm"], LATENT_NORM_EPS)
    # layers without rotary positions have no channels here, and need no frequencies
    frequencies = rotary_frequencies(m.rope_dim, m.rope_base)[: k_rope.shape[-1] // 2]
    k_rope = rotate(k_rope, tokens.position, frequencies)
    latents = [kv_latent, k_rope]
    if Q:
        q_latent = rms_norm(q_latent, p["q_norm"], LATENT_NORM_EPS)
        latents = [q_latent, *latents]
    latents = gather_sequence(jnp.concatenate(latents, -1), tokens.split)
    q_latent = latents[..., :Q] if Q else gather_sequence(x, tokens.split)
    return q_latent, latents[..., Q:]


@jax.named_scope("short_conv")
def convolve(compressed_kv, weights, start, m):
    """`short_conv` of compressed_kv [B, T, R + rope_dim] by weights [n, R + rope_dim/2].

    Both channels of a rotated pair have one weight. Rotations commute with a factor that both have, and with no other:
    so scores depend on distances alone."""
    latent, pairs = jnp.split(weights, (m.latent_dim,), -1)
    weights = jnp.concatenate([latent, pairs, pairs], -1)  # [n, R + rope_dim]
    position = jnp.arange(compressed_kv.shape[1])[None]
    if start is not None:
        position = position - start
    padded = jnp.pad(compressed_kv, [(0, 0), (m.latent_conv, 0), (0, 0)])
    return short_conv(padded, weights, position)


def short_conv(x, w, position):
    """Causal convolution of each channel over a few tokens, added to the token's own channels (H3, arXiv:2212.14052,
    section 3.1, shift matrix): x [B, n + T, channels] -> the last T tokens, [B, T, channels].

    w [n, channels], float32, weighs the token before, the one before that, and so on. position [B or 1, T] of each
    token in its document: what is before the document's first token counts as 0.
    """
    n = len(w)
    y = x[:, n:].astype(jnp.float32)
    for distance, weight in enumerate(w, 1):
        before = x[:, n - distance : -distance]
        before = jnp.where(position[..., None] >= distance, before, 0)
        y = y + CONV_SCALE * weight * before
    return y.astype(x.dtype)


def project_queries(q_latent, q_up, position, m):
    """Scaled queries [B, H/tp, T, K + rope_dim] of q_latent [B, T, Q or D] by q_up [Q or D, H/tp, K + rope_dim].

    A rotated channel is its own value times cos plus its partner's times sin. Instead of moving channels to their
    partners' places, which took 0.1 s of a step of 0.5 s of `moe1b` by the TPU compiler, a second product computes the
    partners: its weight has the columns in these places. --remat dots keeps the sum of both, not the two products.
    """
    K, scale = m.key_dim, q_up.shape[-1] ** -0.5
    if q_up.shape[-1] == K:  # no rotary channels
        return einsum("btr,rhk->bhtk", q_latent, q_up * scale)
    a, b = jnp.split(q_up[..., K:], 2, -1)
    frequencies = np.tile(rotary_frequencies(m.rope_dim, m.rope_base), 2)
    angle = position[:, None, :, None] * frequencies  # [B or 1, 1, T, rope_dim]
    sin = (jnp.sin(angle) * scale).astype(q_latent.dtype)
    cos = (jnp.cos(angle) * scale).astype(q_latent.dtype)
    partner = einsum("btr,rhk->bhtk", q_latent, jnp.concatenate([-b, a], -1), kept_by=None) * sin
    unrotated = [(0, 0), (0, 0), (0, 0), (K, 0)]  # the K channels before the rotated ones
    factor = jnp.pad(cos, unrotated, constant_values=scale)
    own = einsum("btr,rhk->bhtk", q_latent, q_up, kept_by=None) * factor
    return checkpoint_name(own + jnp.pad(partner, unrotated), "dots")


def project_keys(compressed_kv, k_up):
    """Keys [B, H/tp, T, K + rope_dim] of compressed_kv [B, T, R + rope_dim], by k_up [R, H/tp, K].

    All heads share the rotary key. The identity below k_up has the same product copy it to every head, so that its
    gradient needs no sum over heads of its own.
    """
    R, H, K = k_up.shape
    rope = compressed_kv.shape[-1] - R
    identity = jnp.eye(rope, dtype=compressed_kv.dtype)
    identity = jnp.pad(identity, ((0, 0), (K, 0)))[:, None]  # [rope_dim, 1, K + rope_dim]
    k_up = jnp.pad(k_up, ((0, 0), (0, 0), (0, rope)))
    identity = jnp.broadcast_to(identity, (rope, H, K + rope))
    return einsum("bsr,rhk->bhsk", compressed_kv, jnp.concatenate([k_up, identity]))


def attend_in_latent_space(q, compressed_kv, k_up, v_up, position, start):
    """Attention of one query per sequence, q [B, H/tp, 1, K + rope_dim], to compressed_kv [B, T_max, R + rope_dim],
    which costs less than keys of all positions (DeepSeek-V2, appendix C). Returns [B, H/tp, 1, K]."""
    R, _, K = k_up.shape
    q_nope, q_rope = jnp.split(q, (K,), -1)
    q_nope = jnp.einsum("bhtk,rhk->bhtr", q_nope, k_up)  # q (W k) is (q W) k
    q = jnp.concatenate([q_nope, q_rope], -1)  # [B, H/tp, 1, R + rope_dim]
    k = compressed_kv[:, None]  # one head, which all queries read
    kv_latent = k[..., :R]
    latents = kernels.attend(q, k, kv_latent, position, start)
    return jnp.einsum("bhtr,rhk->bhtk", latents, v_up)


@keep_inputs
def exclude_own(out, own):
    """Exclusive self attention (arXiv:2603.09078): what a head read, y, less its part along the token's own value v,
    y - (y.v / v.v) v. out and own [B, H/tp, T, K].

    Tokens attend much to themselves, and so heads repeat what the residual has already. Here they bring only what other
    tokens say; the first token of a document, which sees no other, reads 0.
    """
    # Tokens last: a TPU sums over rows faster than within them, and pads the last dim to 128, which K seldom fills. By
    # its compiler this takes 0.66 times as long as sums over a last dim of 64, forward and backward.
    y, v = (x.astype(jnp.float32).swapaxes(2, 3) for x in (out, own))  # [B, H/tp, K, T]
    along = jnp.sum(y * v, 2, keepdims=True)
    square = jnp.sum(v * v, 2, keepdims=True)
    y = y - along / (square + VALUE_EPS) * v
    return y.swapaxes(2, 3).astype(out.dtype)


def sigmoid_router(p, x, m):
    """Sigmoid router with a selection bias (DeepSeek-V3, arXiv:2412.19437, equations 13 to 16): x float32 [n, D] ->
    scores [n, E], chosen experts [n, k] and their gates [n, k]. The bias decides who is chosen and nothing else."""
    scores = jax.nn.sigmoid(router_logits(p, x))
    wanted = lax.stop_gradient(scores + p["bias"])
    if m.n_groups > 1:
        wanted = keep_best_groups(wanted, m)
    return scores, *choose_experts(scores, wanted, m)


def keep_best_groups(wanted, m):
    """`wanted` [n, E] with -inf for experts outside each token's best k_groups of n_groups groups of experts, by the
    sum of a group's two best experts (DeepSeek-V3, section 2.1.2)."""
    groups = wanted.reshape(len(wanted), m.n_groups, -1)  # [n, n_groups, E/n_groups]
    two_best, _ = lax.top_k(groups, 2)
    _, best = lax.top_k(two_best.sum(-1), m.k_groups)  # [n, k_groups]
    allowed = best[..., None] == jnp.arange(m.n_groups)
    allowed = allowed.any(1)  # [n, n_groups]
    kept = jnp.where(allowed[..., None], groups, -jnp.inf)
    return kept.reshape(wanted.shape)


def layer(p, x, tokens, m, cache):
    """Attention, then a dense feed-forward or routed and shared experts, pre-norm. x [B, T/tp, D] -> x and
    (`RoutingStats`, None where it is dense; cache)."""
    stats, routed = None, "router" in p
    with jax.named_scope("attention"):
        h = rms_norm(x, p["attention"]["norm"], m.norm_eps)
        exclusive = routed and m.exclusive_attention
        out, cache = attention(p["attention"], h, tokens, m, cache, exclusive)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_ATTENTION)
    with jax.named_scope("experts" if routed else "feed_forward"):
        h = rms_norm(x, p["norm"], m.norm_eps)
        if routed:
            out, stats = routed_experts(p, h, m, tokens.split, sigmoid_router)
            if m.n_shared:
                out = out + feed_forward(p["shared"], h, tokens, m)
        else:
            out = feed_forward(p["ffn"], h, tokens, m)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_FEED_FORWARD)
    return x, (stats, cache)


def embed(top, x, position):
    """Rows of the embedding x [B, T, D], normalized with --embedding_norm. With --embedding_conv n they come with those
    of the n tokens before, [B, n + T, D], and these are added. Layers add positions."""
    if "embedding_norm" in top:
        x = rms_norm(x, top["embedding_norm"], EMBEDDING_NORM_EPS)
    if "embedding_conv" in top:
        x = short_conv(x, top["embedding_conv"], position)
    return x


def latent_cache(m, kind):
    """(shape, mesh axes) of what a layer caches of a token: its latent, and its rotary key where it has one."""
    return (m.latent_dim + rope_channels(m, routed=kind == "moe"),), (None,)


def layer_cost(m, kind):
    """`LayerCost` of a kind of layer: attention as in DeepSeek-V2, arXiv:2405.04434, section 2.1; feed-forward as in
    arXiv:2002.05202."""
    D, R, Q = m.model_dimension, m.latent_dim, m.q_latent
    K = m.key_dim
    routed = kind == "moe"
    rope = rope_channels(m, routed)
    latents = Q + R + rope

    own_weights = D * latents + m.latent_conv * (R + rope // 2)
    if routed:
        own_weights += D * m.n_experts

    # project_queries rotates by a second product, project_keys copies the rotary key by a larger one
    queries = (Q or D) * (K + 2 * rope)
    keys = (R + rope) * (K + rope)
    values = R * K
    out = K * D

    return LayerCost(
        own_weights=own_weights,
        head_weights=queries + keys + values + out,
        query_channels=K + rope,
        value_channels=K,
        gathered=latents if Q else latents + D,
        products=latents + m.n_head * (3 * K + 3 * rope),
        branches=BRANCHES[m.activation],
        ffn_width=m.n_shared * m.expert_width if routed else m.ffn_width,
    )


def update_router_bias(cfg, params, load, n_tokens):
    """Auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1): each router bias moves by --bias_update_rate
    towards an even load. load [.., E]: choices that fell on each expert of all layers in one step of n_tokens."""
    layers = params["moe"]
    # Whole counts against a constant: an expert at the mean stays where it is, however the batch was cut.
    mean = n_tokens * cfg.model.experts_per_token / cfg.model.n_experts
    below_mean = mean - load.reshape(layers["bias"].shape)
    bias = layers["bias"] + cfg.optimizer.bias_update_rate * jnp.sign(below_mean)
    return params | {"moe": layers | {"bias": bias}}


ARCHITECTURE = Architecture(
    table=deepseek_table,
    layers=dict(first=layer, dense=layer, moe=layer),
    last="moe",
    inner="dense",
    first="first",
    embed=embed,
    norm=rms_norm,
    cache=latent_cache,
    lookback=lambda m: m.embedding_conv,
    layer_cost=layer_cost,
    after_step=update_router_bias,
    flags=FLAGS,
    check=check_flags,
)
