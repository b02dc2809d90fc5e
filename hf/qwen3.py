"""Qwen3's Hugging Face format, dense and mixture-of-experts, and that of the families whose layers are made by
architectures/qwen3.py: family."""

import functools
import math
from typing import NamedTuple

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
    table_of,
)


def tensors(m):
    """Yield the `Tensor`s of the class in transformers, such as Qwen3ForCausalLM or Qwen3MoeForCausalLM."""
    stack = m.architecture
    table = table_of(m)[stack]
    yield from outer_tensors(m)
    for n in range(m.blocks):
        prefix = f"model.layers.{n}"
        for name, leaf in [
            ("input_layernorm", "attention_norm"),
            ("self_attn.q_norm", "q_norm"),
            ("self_attn.k_norm", "k_norm"),
            ("post_attention_layernorm", "norm"),
        ]:
            part = table[leaf].shape[1:]
            # the scale of a norm over all heads is one row of numbers there
            flat = (math.prod(part),)
            yield plain(f"{prefix}.{name}.weight", (stack, leaf), (n,), part, flat)
        yield from attention_tensors(m, f"{prefix}.self_attn", n)
        yield from feed_forward_tensors(m, f"{prefix}.mlp", n)


def attention_tensors(m, prefix, n):
    """Yield the `Tensor`s of the attention of layer n. Our `kv` holds keys and values."""
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    key = (D, m.kv_heads, K)
    for name, leaf, at, part, inputs in [
        ("q_proj", "q", (n,), (D, H, K), 1),
        ("k_proj", "kv", (n, slice(None), 0), key, 1),
        ("v_proj", "kv", (n, slice(None), 1), key, 1),
        ("o_proj", "out", (n,), (H, K, D), 2),
    ]:
        yield linear(f"{prefix}.{name}.weight", (m.architecture, leaf), at, part, inputs)


def feed_forward_tensors(m, prefix, n):
    """Yield the `Tensor`s of the feed-forward of layer n: dense, or a router and its experts."""
    D, stack = m.model_dimension, m.architecture
    if not m.n_experts:
        yield from feed_forward(prefix, (stack, "ffn"), (n,), D, m.ffn_width)
        return
    yield linear(f"{prefix}.gate.weight", (stack, "router"), (n,), (D, m.n_experts))
    leaf = (stack, "experts")
    for e in range(m.n_experts):
        yield from feed_forward(f"{prefix}.experts.{e}", leaf, (n, e), D, m.expert_width)


class Published(NamedTuple):
    """How transformers has the models of a family. `Architecture.published` has these fields."""

    model_type: str  # in config.json
    model_class: str
    # {entry of config.json: flag whose value it holds}, on top of hf/format.py: COMMON
    entries: dict
    # {entry: its values that are supported, beside those of SUPPORTED}; the first is the one that we write
    supported: dict = {}
    head_dim: int = 0  # where config.json has none; 0: hidden_size / num_attention_heads


SUPPORTED = dict(hidden_act=SILU, attention_bias=[False, None])
HEADS = dict(num_key_value_heads="n_kv_head", head_dim="head_dim")
EXPERTS = dict(
    num_experts="n_experts",
    num_experts_per_tok="experts_per_token",
    moe_intermediate_size="expert_dim",
)
MAY_BE_MISSING = dict.fromkeys(EXPERTS, 0) | dict(head_dim=0, tie_word_embeddings=False)
NO_WINDOW = dict(use_sliding_window=[False, None])
DENSE = Published(
    "qwen3",
    "Qwen3ForCausalLM",
    entries=HEADS,
    supported=NO_WINDOW,
    head_dim=128,
)
WITH_EXPERTS = Published(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    entries=HEADS | EXPERTS,
    supported=NO_WINDOW | dict(decoder_sparse_step=[1], mlp_only_layers=[[], None]),
)


def to_config(m, models):
    """config.json of a utils.Model, of the last of the `models` where it has experts, or else of the first."""
    one = models[-1] if m.n_experts else models[0]
    config = config_of_common(m, COMMON | one.entries, SUPPORTED | one.supported)
    if m.n_experts and "norm_topk_prob" not in one.supported:
        config["norm_topk_prob"] = m.experts_per_token > 1
    return dict(architectures=[one.model_class], model_type=one.model_type) | config


def from_config(flags, left, models):
    """{flag: value} of a config.json of one of the `models`; see `hf/format.py: HuggingFace.flags`."""
    (one,) = [one for one in models if one.model_type == left["model_type"]]
    if "num_experts" in one.entries:
        flags["n_experts"] = left.pop("num_local_experts", flags["n_experts"])  # transformers 5
        if "norm_topk_prob" not in one.supported:
            pop_norm_of_gates(left, flags["experts_per_token"], missing=False)  # as transformers
    else:
        del flags["expert_dim"]  # there are no experts
    if one.head_dim:
        flags["head_dim"] = flags["head_dim"] or one.head_dim
    flags["T"] = pop_context_length(left)
    flags["rope_base"], rope = pop_rope(left)
    check_entries(
        left | rope,
        one.model_type,
        {"router_aux_loss_coef", "sliding_window", "max_window_layers"},
        **SUPPORTED | COMMON_SUPPORTED | one.supported,
        layer_types=[["full_attention"] * flags["blocks"], None],
    )
    return flags


def make_format(*models):
    """`HuggingFace` of a family whose layers architectures/qwen3.py makes, from the `Published` of its dense models, if
    there are such, and of those with experts."""
    entries = dict(COMMON)
    for one in models:
        entries |= one.entries
    missing = {entry: value for entry, value in MAY_BE_MISSING.items() if entry in entries}
    return HuggingFace(
        model_types=tuple(one.model_type for one in models),
        tensors=tensors,
        config=functools.partial(to_config, models=models),
        entries=entries,
        missing=missing,
        flags=functools.partial(from_config, models=models),
        copies=r"^lm_head.weight$|rotary_emb.inv_freq$",
    )


def format_like(published):
    """`HuggingFace` of another family, from its `Architecture.published`."""
    return make_format(Published(**published))


FORMAT = make_format(DENSE, WITH_EXPERTS)
