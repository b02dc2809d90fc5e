"""Qwen3 (arXiv:2505.09388), dense and mixture-of-experts: parameters, layers, cache, costs and Hugging Face format."""

import jax
from jax import lax

from architectures import Architecture, LayerCost
from architectures import hf_format as hf
from architectures.experts import choose_experts, experts_table, routed_experts, router_logits
from architectures.layers import (
    AFTER_ATTENTION,
    AFTER_FEED_FORWARD,
    attend_to_heads,
    dropout,
    feed_forward,
    feed_forward_table,
    key_value_cache,
    no_load,
    product,
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
    "balance_weight".split()
)


def check_flags(cfg):
    """Raises UserError for flags that do not fit each other."""
    m, tp = cfg.model, cfg.run.n_device_axis[2]
    if m.n_head % m.kv_heads:
        raise UserError(f"--n_kv_head {m.kv_heads}: must divide --n_head {m.n_head}.")
    if m.kv_heads % tp:
        raise UserError(f"--n_kv_head {m.kv_heads}: must be a multiple of tp ({tp}).")
    if m.key_dim % 2:
        raise UserError(
            f"--head_dim {m.key_dim}: must be a multiple of 2, since channels are rotated in pairs."
        )
    if m.n_experts and not m.experts_per_token:
        raise UserError("--experts_per_token 0: must be at least 1 where there are experts.")


def qwen3_table(cfg):
    """The parameter table of Qwen3. Its weights begin as those of architectures/deepseek.py do (`std_into`,
    `std_back`); norms start at 1."""
    m = cfg.model
    D = m.model_dimension
    std = std_into(D)
    layer = attention_table(cfg) | dict(norm=scale_param(D))
    if m.n_experts:
        back = std_back(m.expert_width, m.blocks)
        layer["router"] = weight_param(cfg, (D, m.n_experts), std, cast=False, hidden=False)
        layer["experts"] = experts_table(cfg, std, back)
    else:
        back = std_back(m.ffn_width, m.blocks)
        layer["ffn"] = feed_forward_table(cfg, m.ffn_width, std, back)
    return dict(
        embedding=embedding_param(cfg, m.padded_vocab, std, rows=m.vocab_size),
        qwen3=stack(layer, m.blocks),
        norm=scale_param(D),
    )


def attention_table(cfg):
    """Grouped-query attention: `kv` holds keys and values of n_kv_head heads."""
    m = cfg.model
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    std = std_into(D)
    kv = (D, 2, m.kv_heads, K)
    return dict(
        attention_norm=scale_param(D),
        q=weight_param(cfg, (D, H, K), std, outputs=(1, 2), fixed={1: "tp"}),
        kv=weight_param(cfg, kv, std, outputs=(2, 3), fixed={2: "tp"}),
        q_norm=scale_param(K),
        k_norm=scale_param(K),
        out=out_param(cfg, (H, K, D), std_back(H * K, m.blocks)),
    )


def attention(p, x, tokens, m, cache):
    """Grouped-query attention (arXiv:2305.13245) with normalized, rotated queries and keys, tensor-parallel over heads.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache, [B, T_max, 2, H_kv/tp, K] or None.
    """
    x = gather_sequence(x, tokens.split)  # [B, T, D]
    position = tokens.whole(x.shape[1])
    q = product("btd,dhk->bhtk", x, p["q"])  # [B, H/tp, T, K]
    k = product("btd,dhk->bhtk", x, p["kv"][:, 0])  # [B, H_kv/tp, T, K]
    v = product("btd,dhk->bhtk", x, p["kv"][:, 1])

    frequencies = rotary_frequencies(m.key_dim, m.rope_base)
    q = rms_norm(q, p["q_norm"], m.norm_eps)
    q = rotate(q, position[:, None], frequencies)
    k = rms_norm(k, p["k_norm"], m.norm_eps)
    k = rotate(k, position[:, None], frequencies)
    return attend_to_heads(q, k, v, position, p["out"], tokens, m, cache)


def softmax_router(p, x, m):
    """Softmax router (arXiv:2505.09388, section 2; Switch Transformer, arXiv:2101.03961, section 2.1): x float32 [n, D]
    -> scores [n, E], chosen experts [n, k] and their gates [n, k]."""
    scores = jax.nn.softmax(router_logits(p, x))
    return scores, *choose_experts(scores, lax.stop_gradient(scores), m)


def qwen3_layer(p, x, tokens, m, cache):
    """Qwen3's layer, pre-norm. x [B, T/tp, D] -> x, (`Load`, cache)."""
    load = no_load(m.n_experts)
    with jax.named_scope("attention"):
        h = rms_norm(x, p["attention_norm"], m.norm_eps)
        out, cache = attention(p, h, tokens, m, cache)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_ATTENTION)
    with jax.named_scope("experts" if m.n_experts else "feed_forward"):
        h = rms_norm(x, p["norm"], m.norm_eps)
        if m.n_experts:
            out, load = routed_experts(p, h, m, tokens.split, softmax_router)
        else:
            out = feed_forward(p["ffn"], h, tokens, m)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_FEED_FORWARD)
    return x, (load, cache)


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


def hugging_face_tensors(m):
    """Yield the `Tensor`s of Qwen3ForCausalLM, or of Qwen3MoeForCausalLM where there are experts."""
    D, K = m.model_dimension, m.key_dim
    yield from hf.outer_tensors(m)
    for n in range(m.blocks):
        prefix = f"model.layers.{n}"
        for name, leaf, size in [
            ("input_layernorm", "attention_norm", D),
            ("self_attn.q_norm", "q_norm", K),
            ("self_attn.k_norm", "k_norm", K),
            ("post_attention_layernorm", "norm", D),
        ]:
            yield hf.plain(f"{prefix}.{name}.weight", ("qwen3", leaf), (n,), (size,))
        yield from attention_tensors(m, f"{prefix}.self_attn", n)
        yield from feed_forward_tensors(m, f"{prefix}.mlp", n)


def attention_tensors(m, prefix, n):
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    key = (D, m.kv_heads, K)
    for name, leaf, at, part, inputs in [
        ("q_proj", "q", (n,), (D, H, K), 1),
        ("k_proj", "kv", (n, slice(None), 0), key, 1),
        ("v_proj", "kv", (n, slice(None), 1), key, 1),
        ("o_proj", "out", (n,), (H, K, D), 2),
    ]:
        yield hf.linear(f"{prefix}.{name}.weight", ("qwen3", leaf), at, part, inputs)


def feed_forward_tensors(m, prefix, n):
    D = m.model_dimension
    if not m.n_experts:
        yield from hf.feed_forward(prefix, ("qwen3", "ffn"), (n,), D, m.ffn_width)
        return
    router = (D, m.n_experts)
    yield hf.linear(f"{prefix}.gate.weight", ("qwen3", "router"), (n,), router)
    leaf = ("qwen3", "experts")
    for e in range(m.n_experts):
        yield from hf.feed_forward(f"{prefix}.experts.{e}", leaf, (n, e), D, m.expert_width)


# Entries that hold a flag's value
ENTRIES = hf.COMMON | dict(num_key_value_heads="n_kv_head", head_dim="head_dim")
MOE_ENTRIES = dict(
    num_experts="n_experts",
    num_experts_per_tok="experts_per_token",
    moe_intermediate_size="expert_dim",
)
# Entries of which other values are refused; the first of each is the one that we write
SUPPORTED = dict(
    hidden_act=hf.SILU,
    attention_bias=[False, None],
    use_sliding_window=[False, None],
)


def to_hugging_face(m):
    """config.json of Qwen3ForCausalLM, or of Qwen3MoeForCausalLM where there are experts."""
    config = hf.config_of_common(m, ENTRIES, SUPPORTED)
    if not m.n_experts:
        return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3") | config
    config |= dict(decoder_sparse_step=1, mlp_only_layers=[])
    config["norm_topk_prob"] = m.experts_per_token > 1
    names = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    return names | config | hf.config_of(m, MOE_ENTRIES)


def from_hugging_face(flags, left):
    """{flag: value} of config.json of either class; see `hf_format.HuggingFace.flags`."""
    kind = left["model_type"]
    if kind == "qwen3_moe":
        flags["n_experts"] = left.pop("num_local_experts", flags["n_experts"])  # transformers 5
        hf.take_norm_of_gates(left, flags["experts_per_token"], missing=False)  # as transformers
    else:
        del flags["expert_dim"]  # there are no experts
        # as transformers; its class with experts divides hidden_size
        flags["head_dim"] = flags["head_dim"] or 128
    flags["T"] = hf.take_T(left)
    flags["rope_base"], rope = hf.take_rope(left)
    hf.require(
        left | rope,
        kind,
        {"router_aux_loss_coef", "sliding_window", "max_window_layers"},
        **SUPPORTED,
        **hf.COMMON_SUPPORTED,
        layer_types=[["full_attention"] * flags["blocks"], None],
        decoder_sparse_step=[1],
        mlp_only_layers=[[], None],
    )
    return flags


ARCHITECTURE = Architecture(
    table=qwen3_table,
    layers=dict(qwen3=qwen3_layer),
    last="qwen3",
    embed=lambda top, x, position: x,
    norm=rms_norm,
    cache=key_value_cache,
    layer_cost=layer_cost,
    hugging_face=hf.HuggingFace(
        model_types=("qwen3", "qwen3_moe"),
        tensors=hugging_face_tensors,
        config=to_hugging_face,
        entries=ENTRIES | MOE_ENTRIES,
        missing=dict.fromkeys(MOE_ENTRIES, 0) | dict(head_dim=0, tie_word_embeddings=False),
        flags=from_hugging_face,
        copies=r"^lm_head.weight$|rotary_emb.inv_freq$",
    ),
    flags=FLAGS,
    fixed=dict(activation="swiglu"),
    check=check_flags,
)
