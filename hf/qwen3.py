"""Qwen3's Hugging Face format, dense and mixture-of-experts."""

from hf.format import (
    COMMON,
    COMMON_SUPPORTED,
    SILU,
    HuggingFace,
    config_of,
    config_of_common,
    feed_forward,
    linear,
    outer_tensors,
    plain,
    pop_context_length,
    pop_norm_of_gates,
    pop_rope,
    require,
)


def tensors(m):
    """Yield the `Tensor`s of Qwen3ForCausalLM, or of Qwen3MoeForCausalLM where there are experts."""
    D, K = m.model_dimension, m.key_dim
    yield from outer_tensors(m)
    for n in range(m.blocks):
        prefix = f"model.layers.{n}"
        for name, leaf, size in [
            ("input_layernorm", "attention_norm", D),
            ("self_attn.q_norm", "q_norm", K),
            ("self_attn.k_norm", "k_norm", K),
            ("post_attention_layernorm", "norm", D),
        ]:
            yield plain(f"{prefix}.{name}.weight", ("qwen3", leaf), (n,), (size,))
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
        yield linear(f"{prefix}.{name}.weight", ("qwen3", leaf), at, part, inputs)


def feed_forward_tensors(m, prefix, n):
    D = m.model_dimension
    if not m.n_experts:
        yield from feed_forward(prefix, ("qwen3", "ffn"), (n,), D, m.ffn_width)
        return
    router = (D, m.n_experts)
    yield linear(f"{prefix}.gate.weight", ("qwen3", "router"), (n,), router)
    leaf = ("qwen3", "experts")
    for e in range(m.n_experts):
        yield from feed_forward(f"{prefix}.experts.{e}", leaf, (n, e), D, m.expert_width)


# Entries that hold a flag's value
ENTRIES = COMMON | dict(num_key_value_heads="n_kv_head", head_dim="head_dim")
MOE_ENTRIES = dict(
    num_experts="n_experts",
    num_experts_per_tok="experts_per_token",
    moe_intermediate_size="expert_dim",
)
# Entries of which other values are refused; the first of each is the one that we write
SUPPORTED = dict(
    hidden_act=SILU,
    attention_bias=[False, None],
    use_sliding_window=[False, None],
)


def to_hugging_face(m):
    """config.json of Qwen3ForCausalLM, or of Qwen3MoeForCausalLM where there are experts."""
    config = config_of_common(m, ENTRIES, SUPPORTED)
    if not m.n_experts:
        return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3") | config
    config |= dict(decoder_sparse_step=1, mlp_only_layers=[])
    config["norm_topk_prob"] = m.experts_per_token > 1
    names = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    return names | config | config_of(m, MOE_ENTRIES)


def from_hugging_face(flags, left):
    """{flag: value} of config.json of either class; see `hf/format.py: HuggingFace.flags`."""
    kind = left["model_type"]
    if kind == "qwen3_moe":
        flags["n_experts"] = left.pop("num_local_experts", flags["n_experts"])  # transformers 5
        pop_norm_of_gates(left, flags["experts_per_token"], missing=False)  # as transformers
    else:
        del flags["expert_dim"]  # there are no experts
        # as transformers; its class with experts divides hidden_size
        flags["head_dim"] = flags["head_dim"] or 128
    flags["T"] = pop_context_length(left)
    flags["rope_base"], rope = pop_rope(left)
    require(
        left | rope,
        kind,
        {"router_aux_loss_coef", "sliding_window", "max_window_layers"},
        **SUPPORTED,
        **COMMON_SUPPORTED,
        layer_types=[["full_attention"] * flags["blocks"], None],
        decoder_sparse_step=[1],
        mlp_only_layers=[[], None],
    )
    return flags


FORMAT = HuggingFace(
    model_types=("qwen3", "qwen3_moe"),
    tensors=tensors,
    config=to_hugging_face,
    entries=ENTRIES | MOE_ENTRIES,
    missing=dict.fromkeys(MOE_ENTRIES, 0) | dict(head_dim=0, tie_word_embeddings=False),
    flags=from_hugging_face,
    copies=r"^lm_head.weight$|rotary_emb.inv_freq$",
)
