"""DeepSeek-V3's Hugging Face format, and that of the models of architectures/deepseek.py that are no DeepSeek-V3."""

from architectures.deepseek import layers_of, rope_channels
from architectures.layers import rotary_frequencies
from hf.format import (
    COMMON,
    COMMON_SUPPORTED,
    SILU,
    HuggingFace,
    check_entries,
    config_of_common,
    feed_forward,
    linear,
    outer_tensors,
    plain,
    pop_context_length,
    pop_norm_of_gates,
    pop_rope,
)
from runtime.messages import UserError


def tensors(m):
    """Yield the `Tensor`s of DeepseekV3ForCausalLM and of our own MoEPretrainingForCausalLM."""
    D, L = m.model_dimension, m.layers_per_block
    yield from outer_tensors(m)
    if m.embedding_norm:
        yield plain("model.embedding_norm.weight", ("embedding_norm",), (), (D,))
    if m.embedding_conv:
        yield plain("model.embedding_conv", ("embedding_conv",), (), (m.embedding_conv, D))
    if m.backout:
        yield plain("model.backout", ("backout",), (), (D,))
    for n in range(m.first_layers):
        yield from layer_tensors(m, n, ("first",), (n,))
    for block in range(m.blocks):
        begin = m.first_layers + block * L
        for i in range(L - 1):
            yield from layer_tensors(m, begin + i, ("dense",), (block, i))
        yield from layer_tensors(m, begin + L - 1, ("moe",), (block,))


def layer_tensors(m, n, leaf, at):
    """Yield the `Tensor`s of layer n, which is the part `at` of the parameters in `leaf`."""
    D, routed = m.model_dimension, leaf == ("moe",)
    prefix = f"model.layers.{n}"
    yield plain(f"{prefix}.input_layernorm.weight", (*leaf, "attention", "norm"), at, (D,))
    yield plain(f"{prefix}.post_attention_layernorm.weight", (*leaf, "norm"), at, (D,))
    attention = (*leaf, "attention")
    rope = rope_channels(m, routed)
    yield from attention_tensors(m, f"{prefix}.self_attn", attention, at, rope)
    if routed:
        yield from moe_tensors(m, f"{prefix}.mlp", leaf, at)
    else:
        ffn = (*leaf, "ffn")
        yield from feed_forward(f"{prefix}.mlp", ffn, at, D, m.ffn_width, m.activation)


def attention_tensors(m, prefix, leaf, at, rope):
    """Yield the `Tensor`s of latent attention with `rope` rotary channels. Our `down` holds [query latent, key/value
    latent, rotary key]."""
    D, H, K, V = m.model_dimension, m.n_head, m.key_dim, m.key_dim
    Q, R = m.q_latent, m.latent_dim
    down = (*leaf, "down")
    inputs = slice(None)
    queries, keys = slice(0, Q), slice(Q, Q + R + rope)  # columns of `down`
    if Q:
        yield linear(f"{prefix}.q_a_proj.weight", down, (*at, inputs, queries), (D, Q))
        yield plain(f"{prefix}.q_a_layernorm.weight", (*leaf, "q_norm"), at, (Q,))
    name = "q_b_proj" if Q else "q_proj"
    part = (Q or D, H, K + rope)
    yield linear(f"{prefix}.{name}.weight", (*leaf, "q_up"), at, part, rotated=rope)
    name = f"{prefix}.kv_a_proj_with_mqa"
    yield linear(f"{name}.weight", down, (*at, inputs, keys), (D, R + rope), rotated=rope)
    yield plain(f"{prefix}.kv_a_layernorm.weight", (*leaf, "kv_norm"), at, (R,))
    yield linear(f"{prefix}.kv_b_proj.weight", (*leaf, "kv_up"), at, (R, H, K + V))
    yield linear(f"{prefix}.o_proj.weight", (*leaf, "out"), at, (H, V, D), inputs=2)
    if m.latent_conv:
        yield plain(f"{prefix}.conv", (*leaf, "conv"), at, (m.latent_conv, R + rope // 2))


def moe_tensors(m, prefix, leaf, at):
    """Yield the `Tensor`s of a router, its bias, and of shared and routed experts."""
    D, E, F = m.model_dimension, m.n_experts, m.expert_width
    shared, experts, act = (*leaf, "shared"), (*leaf, "experts"), m.activation
    yield linear(f"{prefix}.gate.weight", (*leaf, "router"), at, (D, E))
    yield plain(f"{prefix}.gate.e_score_correction_bias", (*leaf, "bias"), at, (E,))
    yield from feed_forward(f"{prefix}.shared_experts", shared, at, D, m.n_shared * F, act)
    for e in range(E):
        yield from feed_forward(f"{prefix}.experts.{e}", experts, (*at, e), D, F, act)


# Flags that have one value in DeepseekV3ForCausalLM. Models with another are exported as MoEPretrainingForCausalLM,
# with its code (hf/exported/).
ONE_VALUE = dict(
    layers_per_block=1,
    activation="swiglu",
    embedding_norm=False,
    embedding_conv=0,
    backout=False,
    latent_conv=0,
    exclusive_attention=False,
)
OWN_TYPE = "moe_pretraining"
HIDDEN_ACT = dict(swiglu="silu", gelu="gelu_new")
# Entries that hold a flag's value, but for num_hidden_layers, which counts all layers
ENTRIES = COMMON | dict(
    moe_intermediate_size="expert_dim",
    n_shared_experts="n_shared",
    n_routed_experts="n_experts",
    routed_scaling_factor="routed_scaling",
    kv_lora_rank="latent_dim",
    q_lora_rank="q_latent_dim",
    qk_rope_head_dim="rope_dim",
    qk_nope_head_dim="head_dim",
    n_group="n_groups",
    topk_group="k_groups",
    num_experts_per_tok="experts_per_token",
    first_k_dense_replace="first_layers",
    layers_per_block="layers_per_block",
    embedding_norm="embedding_norm",
    embedding_conv="embedding_conv",
    backout="backout",
    latent_conv="latent_conv",
    exclusive_attention="exclusive_attention",
)
# Entries of which other values are refused; the first of each is the one that we write, and the one of a missing entry
SUPPORTED = dict(
    scoring_func=["sigmoid", None],
    topk_method=["noaux_tc", None],
    moe_layer_freq=[1, None],
    rope_interleave=[True],
    attention_bias=[False, None],
)
# Entries that change no number here; multi-token prediction serves training alone
IMMATERIAL = set("aux_loss_alpha seq_aux rope_frequencies num_nextn_predict_layers".split())

# {entry: the one that it must equal}
EQUAL = dict(
    num_key_value_heads="num_attention_heads",
    v_head_dim="qk_nope_head_dim",
    head_dim="qk_rope_head_dim",
)


def to_config(m):
    """config.json of DeepseekV3ForCausalLM, or of MoEPretrainingForCausalLM where that has no such layers."""
    config = config_of_common(m, ENTRIES, SUPPORTED) | dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_hidden_layers=layers_of(m),
        num_key_value_heads=m.n_head,
        v_head_dim=m.key_dim,
        q_lora_rank=m.q_latent or None,
        norm_topk_prob=m.experts_per_token > 1,
        hidden_act=HIDDEN_ACT[m.activation],
    )
    if any(getattr(m, flag) != value for flag, value in ONE_VALUE.items()):
        return config | own_entries(m)
    return {name: value for name, value in config.items() if name not in ONE_VALUE}


def own_entries(m):
    """Entries of config.json that MoEPretrainingForCausalLM has otherwise or besides."""
    return dict(
        architectures=["MoEPretrainingForCausalLM"],
        model_type=OWN_TYPE,
        auto_map=dict(
            AutoConfig="configuration_moe_pretraining.MoEPretrainingConfig",
            AutoModelForCausalLM="modeling_moe_pretraining.MoEPretrainingForCausalLM",
        ),
        rope_frequencies=rotary_frequencies(m.rope_dim, m.rope_base).tolist(),
    )


def from_config(flags, left):
    """{flag: value} of a config.json that `to_config` may have written; see `hf/format.py: HuggingFace.flags`."""
    model_type = left["model_type"]
    activations = {name: flag for flag, name in HIDDEN_ACT.items()}
    if model_type != OWN_TYPE:
        activations = dict.fromkeys(SILU, "swiglu")
    flags["activation"] = activations.get(left.get("hidden_act", "silu"))
    flags["T"] = pop_context_length(left)
    flags["rope_base"], rope = pop_rope(left)
    pop_norm_of_gates(left, flags["experts_per_token"], missing=True)  # as transformers
    in_blocks = flags["blocks"] - flags["first_layers"]
    flags["blocks"], rest = divmod(in_blocks, max(1, flags["layers_per_block"]))
    if rest:
        raise UserError(
            f"config.json: num_hidden_layers less first_k_dense_replace is {in_blocks}, but must be a multiple of "
            f"layers_per_block, {flags['layers_per_block']}."
        )
    check_entries(
        left | rope,
        model_type,
        IMMATERIAL,
        EQUAL,
        **SUPPORTED,
        **COMMON_SUPPORTED,
        hidden_act=[*activations],
        num_key_value_heads=[flags["n_head"], None],
        v_head_dim=[flags["head_dim"]],
        head_dim=[flags["rope_dim"]],
        qk_head_dim=[flags["head_dim"] + flags["rope_dim"]],
    )
    return flags


FORMAT = HuggingFace(
    model_types=("deepseek_v3", OWN_TYPE),
    tensors=tensors,
    config=to_config,
    entries=ENTRIES,
    missing=dict(
        tie_word_embeddings=False,
        layers_per_block=1,
        embedding_norm=False,
        embedding_conv=0,
        backout=False,
        latent_conv=0,
        exclusive_attention=False,
    ),
    flags=from_config,
    equal=EQUAL,
    copies=r"^lm_head.weight$|rotary_emb.inv_freq$|shared_head.head.weight$|layers.\d+.embed_tokens",
)
