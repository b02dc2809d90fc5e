"""A run's weights to and from a folder that Hugging Face's transformers loads, tensor by tensor.

python tools/hf.py export runs/deepseek-tiny exported      checkpoint -> folder
python tools/hf.py import exported runs/imported           folder -> run directory with its weights alone

`main.py --init_from FOLDER` trains on from such a folder without the detour.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from training import interrupts

if __name__ == "__main__":
    interrupts.at_once("interrupted")

import utils
from data import tokenization
from tools import common
from training import platforms
from utils import UserError, say

if __name__ == "__main__":
    platforms.set_xla_flags(0)

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
import tokenizers
from jax import lax
from safetensors import safe_open

import model
from architectures import deepseek, parameters
from training import checkpointing, settings, steps, weights

SHARD_BYTES = 5 * 10**9  # most in one file
DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # to store in, by safetensors' name
MOST_T = 4096  # tokens of a sequence, unless told otherwise: what a model can do is often more than it was trained on
READABLE = {"F32", "F16", "BF16", "F64"}
FLOAT8, SCALE = (
    "F8_E4M3",
    "_scale_inv",
)  # what quantised weights are, and the end of the names of their scales


# --- Which tensor is which ----------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """One tensor of the Hugging Face format and the part of our parameter tree that holds the same numbers. Where there
    are no shared experts, theirs are of width 0 there and need not be in a file; here there is nothing."""

    name: str
    shape: tuple  # there
    leaf: tuple  # path of the leaf in our tree
    at: tuple  # its part of that leaf: an int or a slice for each leading dim, the other dims whole
    part: tuple  # shape of the part, ints in `at` left out
    transposed: bool = False  # torch's Linear holds [outputs, inputs]
    rotated: int = 0  # last channels of the part that positions rotate: neighbours are paired there, halves here

    def ours(self, x):
        """Array of `shape` -> array of `part`."""
        x = (x.T if self.transposed else x).reshape(self.part)
        if self.rotated:
            still, r = np.split(x, [x.shape[-1] - self.rotated], -1)
            r = r.reshape(*r.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(r.shape)
            x = np.concatenate([still, r], -1)
        return x

    def theirs(self, x):
        """Array of `part` -> array of `shape`."""
        if self.rotated:
            still, r = np.split(x, [x.shape[-1] - self.rotated], -1)
            r = r.reshape(*r.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(r.shape)
            x = np.concatenate([still, r], -1)
        return x.reshape(self.shape[::-1]).T if self.transposed else x.reshape(self.shape)


def linear(name, leaf, at, part, inputs=1, rotated=0):
    """A torch Linear without bias, whose inputs are the first `inputs` dims of our part."""
    shape = math.prod(part[inputs:]), math.prod(part[:inputs])
    return Tensor(name, shape, leaf, at, part, transposed=True, rotated=rotated)


def plain(name, leaf, at, part, shape=None, rotated=0):
    return Tensor(name, shape or part, leaf, at, part, rotated=rotated)


def deepseek_tensors(m):
    """`Tensor`s of DeepseekV3ForCausalLM for a utils.Model."""
    D, H, K, R, V, Q, F = (
        m.model_dimension,
        m.n_head,
        m.head_dim,
        m.latent_dim,
        m.value_dim,
        m.q_latent,
        m.expert_width,
    )

    def feed_forward(prefix, leaf, at, F):
        for i, name in enumerate(("gate_proj", "up_proj")):
            yield linear(f"{prefix}.{name}.weight", (*leaf, "up"), (*at, i), (D, F))
        yield plain(f"{prefix}.down_proj.weight", (*leaf, "down"), at, (D, F))

    def layer(n, leaf, at, moe):
        prefix, a = f"model.layers.{n}", (*leaf, "attention")
        yield plain(f"{prefix}.input_layernorm.weight", (*a, "norm"), at, (D,))
        yield plain(f"{prefix}.post_attention_layernorm.weight", (*leaf, "norm"), at, (D,))
        prefix += ".self_attn"
        if Q:
            yield linear(
                f"{prefix}.q_a_proj.weight", (*a, "down"), (*at, slice(None), slice(0, Q)), (D, Q)
            )
            yield plain(f"{prefix}.q_a_layernorm.weight", (*a, "q_norm"), at, (Q,))
            if m.attention_bias:
                yield plain(f"{prefix}.q_a_proj.bias", (*a, "down_bias"), (*at, slice(0, Q)), (Q,))
        q = "q_b_proj" if Q else "q_proj"
        yield linear(
            f"{prefix}.{q}.weight",
            (*a, "q_up"),
            at,
            (Q or D, H, K + m.rope_dim),
            rotated=m.rope_dim,
        )
        yield linear(
            f"{prefix}.kv_a_proj_with_mqa.weight",
            (*a, "down"),
            (*at, slice(None), slice(Q, Q + R + m.rope_dim)),
            (D, R + m.rope_dim),
            rotated=m.rope_dim,
        )
        yield plain(f"{prefix}.kv_a_layernorm.weight", (*a, "kv_norm"), at, (R,))
        yield linear(f"{prefix}.kv_b_proj.weight", (*a, "kv_up"), at, (R, H, K + V))
        yield linear(f"{prefix}.o_proj.weight", (*a, "out"), at, (H, V, D), inputs=2)
        if m.attention_bias:
            yield plain(
                f"{prefix}.kv_a_proj_with_mqa.bias",
                (*a, "down_bias"),
                (*at, slice(Q, Q + R + m.rope_dim)),
                (R + m.rope_dim,),
                rotated=m.rope_dim,
            )
            yield plain(f"{prefix}.o_proj.bias", (*a, "out_bias"), at, (D,))
        prefix = f"model.layers.{n}.mlp"
        if not moe:
            yield from feed_forward(prefix, (*leaf, "ffn"), at, m.ffn_width)
            return
        yield linear(f"{prefix}.gate.weight", (*leaf, "router"), at, (D, m.n_experts))
        yield plain(f"{prefix}.gate.e_score_correction_bias", (*leaf, "bias"), at, (m.n_experts,))
        yield from feed_forward(f"{prefix}.shared_experts", (*leaf, "shared"), at, m.n_shared * F)
        for e in range(m.n_experts):
            yield from feed_forward(f"{prefix}.experts.{e}", (*leaf, "experts"), (*at, e), F)

    rows = (slice(0, m.vocab_size),), (m.vocab_size, D)
    yield plain("model.embed_tokens.weight", ("embedding",), *rows)
    for n in range(m.first_layers):
        yield from layer(n, ("first",), (n,), moe=False)
    for n in range(m.blocks):
        yield from layer(m.first_layers + n, ("moe",), (n,), moe=True)
    yield plain("model.norm.weight", ("norm",), (), (D,))
    if not m.tied:
        yield plain("lm_head.weight", ("head",), *rows)
    for d in range(m.mtp_depth):
        n = m.first_layers + m.blocks + d
        for theirs, ours in [
            ("enorm", "token_norm"),
            ("hnorm", "hidden_norm"),
            ("shared_head.norm", "norm"),
        ]:
            yield plain(f"model.layers.{n}.{theirs}.weight", ("mtp", ours), (d,), (D,))
        yield linear(
            f"model.layers.{n}.eh_proj.weight", ("mtp", "merge"), (d,), (2, D, D), inputs=2
        )
        yield from layer(n, ("mtp", "layer"), (d,), moe=True)


def gpt2_tensors(m):
    """`Tensor`s of GPT2LMHeadModel for a utils.Model; its Conv1D holds [inputs, outputs], as we do."""
    D, H, K, F = m.model_dimension, m.n_head, m.head_dim, m.ffn_width

    def norm(name, leaf, at):
        yield plain(f"{name}.weight", (*leaf, "scale"), at, (D,))
        yield plain(f"{name}.bias", (*leaf, "bias"), at, (D,))

    yield plain(
        "transformer.wte.weight", ("embedding",), (slice(0, m.vocab_size),), (m.vocab_size, D)
    )
    yield plain("transformer.wpe.weight", ("positions",), (), (m.T, D))
    for n in range(m.blocks):
        prefix = f"transformer.h.{n}"
        yield from norm(f"{prefix}.ln_1", ("gpt2", "attention_norm"), (n,))
        yield from norm(f"{prefix}.ln_2", ("gpt2", "norm"), (n,))
        for name, leaf, part, shape in [
            ("attn.c_attn", "qkv", (D, 3, H, K), (D, 3 * D)),
            ("attn.c_proj", "out", (H, K, D), (D, D)),
            ("mlp.c_fc", "up", (D, F), (D, F)),
            ("mlp.c_proj", "down", (F, D), (F, D)),
        ]:
            bias = part[1:] if leaf == "qkv" else part[-1:]
            yield plain(f"{prefix}.{name}.weight", ("gpt2", leaf), (n,), part, shape)
            yield plain(
                f"{prefix}.{name}.bias", ("gpt2", f"{leaf}_bias"), (n,), bias, (math.prod(bias),)
            )
    yield from norm("transformer.ln_f", ("norm",), ())
    if not m.tied:
        yield plain("lm_head.weight", ("head",), (slice(0, m.vocab_size),), (m.vocab_size, D))


# --- config.json --------------------------------------------------------------------------------------------------


def deepseek_config(m):
    """config.json of DeepseekV3ForCausalLM. Raises UserError where it knows no such architecture."""
    for flag, wanted in dict(
        layers_per_block=1, moe_rope=True, activation="swiglu", latent_norm_eps=1e-6
    ).items():
        if vars(m)[flag] != wanted:
            raise UserError(
                f"--{flag} {vars(m)[flag]}: transformers has no model with such layers; its "
                f"DeepseekV3ForCausalLM has {flag} {wanted}, as in --preset deepseek-tiny."
            )
    config = dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        vocab_size=m.vocab_size,
        hidden_size=m.model_dimension,
        intermediate_size=m.ffn_width,
        moe_intermediate_size=m.expert_width,
        num_hidden_layers=m.first_layers + m.blocks,
        num_attention_heads=m.n_head,
        num_key_value_heads=m.n_head,
        n_shared_experts=m.n_shared,
        n_routed_experts=m.n_experts,
        routed_scaling_factor=m.routed_scaling,
        kv_lora_rank=m.latent_dim,
        q_lora_rank=m.q_latent or None,
        qk_rope_head_dim=m.rope_dim,
        v_head_dim=m.value_dim,
        qk_nope_head_dim=m.head_dim,
        n_group=m.n_groups,
        topk_group=m.k_groups,
        num_experts_per_tok=m.experts_per_token,
        first_k_dense_replace=m.first_layers,
        norm_topk_prob=m.norm_topk_prob,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        hidden_act="silu",
        max_position_embeddings=int(m.T),
        rms_norm_eps=m.norm_eps,
        attention_bias=m.attention_bias,
        attention_dropout=0.0,
        rope_interleave=True,
        rope_theta=m.rope_base,
        tie_word_embeddings=m.tied,
        num_nextn_predict_layers=m.mtp_depth,
    )
    if m.rope_factor > 1 or m.rope_attention_factor != 1:
        config["rope_scaling"] = yarn_config(m)
    return config


def yarn_config(m):
    """The entry rope_scaling. Some programs know no attention_factor and take the ratio of temperatures of mscale and
    mscale_all_dim for it."""
    fast, slow = deepseek.YARN_BETA
    weight, log = m.rope_mscale, 0.1 * math.log(m.rope_factor)
    if m.rope_attention_factor != 1 and log:
        weight = (m.rope_attention_factor * (log * m.rope_mscale + 1) - 1) / log
    return dict(
        type="yarn",
        rope_type="yarn",
        factor=m.rope_factor,
        beta_fast=fast,
        beta_slow=slow,
        mscale=weight,
        mscale_all_dim=m.rope_mscale,
        attention_factor=m.rope_attention_factor,
        original_max_position_embeddings=m.rope_original_T,
    )


def deepseek_flags(config):
    """config.json of DeepseekV3ForCausalLM -> {flag: value}, but for T, which its positions leave open.

    Raises UserError for an entry that may change numbers in a way unknown here, KeyError for one that is missing."""
    left = dict(config)
    take = left.pop
    heads, nope, rotated, first = map(
        take,
        ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "first_k_dense_replace"),
    )
    flags = dict(
        architecture="deepseek",
        model_dimension=take("hidden_size"),
        vocab_size=take("vocab_size"),
        tied=bool(take("tie_word_embeddings", False)),
        norm_eps=take("rms_norm_eps"),
        latent_norm_eps=1e-6,
        layers_per_block=1,
        n_head=heads,
        first_layers=first,
        moe_rope=True,
        blocks=take("num_hidden_layers") - first,
        latent_dim=take("kv_lora_rank"),
        q_latent_dim=take("q_lora_rank") or 0,
        nope_dim=nope,
        v_dim=take("v_head_dim"),
        rope_dim=rotated,
        attention_bias=bool(take("attention_bias", False)),
        activation="swiglu",
        ffn_dim=take("intermediate_size"),
        expert_dim=take("moe_intermediate_size"),
        n_experts=take("n_routed_experts"),
        experts_per_token=take("num_experts_per_tok"),
        n_groups=take("n_group") or 1,
        k_groups=take("topk_group") or 1,
        routed_scaling=take("routed_scaling_factor"),
        norm_topk_prob=bool(take("norm_topk_prob", True)),
        n_shared=take("n_shared_experts") or 0,
        mtp_depth=take("num_nextn_predict_layers", 0) or 0,
        **rope_flags(left),
    )
    block_sizes(left)
    require(
        left,
        "deepseek_v3",
        hidden_act=["silu"],
        rope_interleave=[True],
        scoring_func=["sigmoid", None],
        topk_method=["noaux_tc", None],
        moe_layer_freq=[1, None],
        num_key_value_heads=[heads, None],
        head_dim=[rotated],
        qk_head_dim=[nope + rotated],
    )
    return flags


def rope_flags(left):
    """{flag: value} of the rotary positions in a config, whose entries are taken out, as transformers computes them
    (modeling_rope_utils.py: RotaryEmbeddingConfigMixin, _compute_yarn_parameters; there mscale counts only beside
    mscale_all_dim, and neither where attention_factor is given)."""
    theta, positions = left.pop("rope_theta", 10_000.0), left.pop("max_position_embeddings", 4096)
    scaling, parameters = left.pop("rope_scaling", None), left.pop("rope_parameters", None)
    rope = dict(scaling or parameters or {})
    outside = left.pop("original_max_position_embeddings", None)
    kind = rope.pop("rope_type", rope.get("type", "default"))
    rope.pop("type", None)
    flags = dict(
        rope_base=float(rope.pop("rope_theta", theta)), rope_factor=1.0, rope_attention_factor=1.0
    )
    if kind == "yarn":
        factor, original = (
            rope.pop("factor"),
            rope.pop("original_max_position_embeddings", positions),
        )
        original = outside or original
        for key, value in dict(factor=factor, original_max_position_embeddings=original).items():
            if not (
                isinstance(value, (int, float))
                and value >= 1
                and (key == "factor" or value == int(value))
            ):
                raise UserError(
                    f"config.json: {key} is {value!r}, but yarn is supported with numbers from 1 on only."
                )
        mscale, all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        amplitude, log = rope.pop("attention_factor", None), 0.1 * math.log(factor)
        if amplitude is None:
            amplitude = (log * mscale + 1) / (log * all_dim + 1) if mscale and all_dim else log + 1
        flags |= dict(
            rope_factor=float(factor),
            rope_mscale=float(all_dim or 0),
            rope_original_T=int(original),
            rope_attention_factor=float(amplitude),
        )
    fast, slow = deepseek.YARN_BETA
    require(
        {"rope_type": kind} | rope,
        "deepseek_v3",
        rope_type=["default", "yarn"],
        beta_fast=[fast, None],
        beta_slow=[slow, None],
        truncate=[True],
        partial_rotary_factor=[1],
    )
    return flags


def block_sizes(left):
    """(rows, columns) of the blocks that share a scale in the float8 weights that a config tells of, None where it
    tells of none; its entry is taken out."""
    quantized = left.pop("quantization_config", None)
    if quantized is None:
        return None
    quantized = {"quant_method": None} | quantized
    size = quantized.pop("weight_block_size", (128, 128))
    # which weights are quantised is seen in the files; activations are not; a scale is a number however it was chosen
    for key in ("modules_to_not_convert", "ignored_layers", "dequantize", "scale_fmt"):
        quantized.pop(key, None)
    require(
        quantized,
        "a quantization_config of deepseek_v3",
        quant_method=["fp8"],
        fmt=["e4m3", None],
        activation_scheme=["dynamic"],
        expert_dtype=["fp8"],
    )
    if not (
        isinstance(size, (list, tuple))
        and len(size) == 2
        and all(isinstance(n, int) and n > 0 for n in size)
    ):
        raise UserError(
            f"config.json: weight_block_size is {size!r}, but must be two numbers, such as [128, 128]."
        )
    return tuple(size)


def gpt2_config(m):
    """config.json of GPT2LMHeadModel."""
    return dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=m.vocab_size,
        n_positions=m.T,
        n_embd=m.model_dimension,
        n_layer=m.blocks,
        n_head=m.n_head,
        n_inner=m.ffn_width,
        layer_norm_epsilon=m.norm_eps,
        activation_function="gelu_new",
        tie_word_embeddings=m.tied,
        attn_pdrop=0.0,
        embd_pdrop=m.dropout_rate,
        resid_pdrop=m.dropout_rate,
    )


def gpt2_flags(config):
    """config.json of GPT2LMHeadModel -> {flag: value}. Raises as `deepseek_flags` does."""
    left = dict(config)
    take = left.pop
    D = take("n_embd")
    flags = dict(
        utils.GPT2,
        vocab_size=take("vocab_size"),
        T=take("n_positions"),
        model_dimension=D,
        n_head=take("n_head"),
        blocks=take("n_layer"),
        ffn_dim=take("n_inner", None) or 4 * D,
        norm_eps=take("layer_norm_epsilon"),
        tied=bool(take("tie_word_embeddings", True)),
    )
    require(
        left,
        "gpt2",
        activation_function=["gelu_new", "gelu_pytorch_tanh"],
        scale_attn_weights=[True],
        scale_attn_by_inverse_layer_idx=[False],
        quantization_config=[None],
    )
    return flags


# Entries of a config.json that change no number here.
IMMATERIAL = set(
    # names: of classes, of what wrote it, of the type that weights are stored in, which each tensor says itself
    "architectures auto_map model_type torch_dtype dtype use_bfloat16 transformers_version name_or_path _name_or_path "
    "_commit_hash unsloth_version unsloth_fixed "
    # how a program runs it: kernels, caches, devices, the order of products
    "use_cache pretraining_tp ep_size attn_implementation _attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal experts_implementation _experts_implementation torchscript gradient_checkpointing "
    "chunk_size_feed_forward reorder_and_upcast_attn n_ctx "
    # training alone: dropout, beginnings, losses, for which there are flags here
    "attention_dropout attn_pdrop embd_pdrop resid_pdrop initializer_range aux_loss_alpha seq_aux tf_legacy_loss "
    # what it returns besides logits, and models with another head or an encoder
    "return_dict output_hidden_states output_attentions output_router_logits output_past id2label label2id num_labels "
    "problem_type finetuning_task summary_type summary_use_proj summary_activation summary_proj_to_labels "
    "summary_first_dropout predict_special_tokens n_special is_decoder is_encoder_decoder tie_encoder_decoder "
    "cross_attention_hidden_size "
    # the tokenizer's affairs, and how text is drawn
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix "
    "task_specific_params max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)


def require(left, kind, **allowed):
    """Raise UserError where one of the entries that are left of a config has none of the values `allowed`, or is
    neither among these nor known to change no number. What is missing stands at the first of its values."""
    allowed |= dict(add_cross_attention=[False], pruned_heads=[{}, None])
    for key, value in left.items():
        values = allowed.get(key)
        if values is not None and value not in values:
            raise UserError(
                f"config.json: {key} is {value!r}, but {kind} is supported with "
                f"{' or '.join(repr(v) for v in values if v is not None) or 'none'} only."
            )
        if values is None and key not in IMMATERIAL:
            raise UserError(
                f"config.json: {key} is {value!r}, and what that changes in {kind} is not known here; "
                f"remove the entry if it changes no number."
            )


# What the entries of a config.json must be, those of rope_scaling among them
WHOLE = dict.fromkeys(  # at least
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads kv_lora_rank "
    "num_key_value_heads qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts num_experts_per_tok n_group "
    "topk_group moe_layer_freq max_position_embeddings original_max_position_embeddings n_positions n_embd n_layer "
    "n_head n_inner".split(),
    1,
) | dict.fromkeys(
    "first_k_dense_replace q_lora_rank n_shared_experts num_nextn_predict_layers".split(), 0
)
NUMBERS = set(
    "rms_norm_eps layer_norm_epsilon routed_scaling_factor rope_theta factor attention_factor mscale mscale_all_dim "
    "beta_fast beta_slow".split()
)
TRUTHS = set("tie_word_embeddings attention_bias norm_topk_prob rope_interleave truncate".split())
OBJECTS = {"rope_scaling", "rope_parameters", "quantization_config"}
MAY_BE_NULL = (
    TRUTHS
    | OBJECTS
    | set(
        "q_lora_rank n_shared_experts num_nextn_predict_layers num_key_value_heads n_group topk_group moe_layer_freq "
        "n_inner max_position_embeddings original_max_position_embeddings attention_factor mscale mscale_all_dim beta_fast "
        "beta_slow".split()
    )
)


def check_entries(config, where):
    """Raise UserError naming an entry of a config, or of an object in it, that is not what one of its name must be."""
    for key, value in config.items():
        if value is None and key in MAY_BE_NULL:
            continue
        truth, number = isinstance(value, bool), isinstance(value, (int, float))
        wanted = ""
        if key in WHOLE and (
            truth or not isinstance(value, int) or not WHOLE[key] <= value < 2**31
        ):
            wanted = f"a whole number of at least {WHOLE[key]}"
        elif key in NUMBERS and (truth or not number or not 0 <= value < math.inf):
            wanted = "a number of at least 0"
        elif key in TRUTHS and not truth:
            wanted = "true or false"
        elif key in OBJECTS and not isinstance(value, dict):
            wanted = "an object"
        if wanted:
            raise UserError(f"{where}: {key} is {json.dumps(value)[:40]}, but must be {wanted}.")
        if key in OBJECTS:
            check_entries(value, f"{where}: {key}")


class Format(NamedTuple):
    tensors: Callable  # utils.Model -> Tensors
    config: Callable  # utils.Model -> config.json
    flags: Callable  # config.json -> {flag: value}
    copies: str  # pattern of the names of tensors that hold nothing of their own
    names: dict  # {flag: entry of config.json}


DEEPSEEK_NAMES = dict(
    model_dimension="hidden_size",
    n_head="num_attention_heads",
    blocks="num_hidden_layers",
    experts_per_token="num_experts_per_tok",
    first_layers="first_k_dense_replace",
    latent_dim="kv_lora_rank",
    q_latent_dim="q_lora_rank",
    n_groups="n_group",
    nope_dim="qk_nope_head_dim",
    v_dim="v_head_dim",
    rope_dim="qk_rope_head_dim",
    rope_base="rope_theta",
    rope_factor="factor",
    k_groups="topk_group",
    ffn_dim="intermediate_size",
    expert_dim="moe_intermediate_size",
    n_experts="n_routed_experts",
    n_shared="n_shared_experts",
    norm_eps="rms_norm_eps",
    routed_scaling="routed_scaling_factor",
    T="max_position_embeddings",
)
FORMATS = {
    "deepseek_v3": Format(
        deepseek_tensors,
        deepseek_config,
        deepseek_flags,
        r"^lm_head.weight$|rotary_emb.inv_freq$|shared_head.head.weight$|layers.\d+.embed_tokens",
        DEEPSEEK_NAMES,
    ),
    "gpt2": Format(
        gpt2_tensors,
        gpt2_config,
        gpt2_flags,
        r"^lm_head.weight$|\.attn\.(masked_)?bias$",
        dict(
            model_dimension="n_embd",
            blocks="n_layer",
            ffn_dim="n_inner",
            T="n_positions",
            norm_eps="layer_norm_epsilon",
        ),
    ),
}
MODEL_TYPES = {"deepseek": "deepseek_v3", "gpt2": "gpt2"}  # by --architecture


# --- Import -------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """Where a tensor stands, as the header of its file says."""

    path: str
    shape: tuple
    dtype: str


def files_of(folder):
    """{name of tensor: `Stored`} of a folder's safetensors."""
    path = os.path.join(folder, "model.safetensors.index.json")
    index = utils.read_json(path)
    names = index.get("weight_map") if index else {"": "model.safetensors"}
    if not isinstance(names, dict) or not all(map(is_file_name, names.values())):
        raise UserError(
            f"{path}: its weight_map must give each tensor the name of a file beside it; copy it again."
        )
    found = {}
    for name in sorted(set(names.values())):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing; a folder in the Hugging Face format holds it.")
        try:
            with safe_open(path, "numpy") as f:
                slices = {name: f.get_slice(name) for name in f.keys()}
                found |= {
                    name: Stored(path, tuple(s.get_shape()), s.get_dtype())
                    for name, s in slices.items()
                }
        except Exception as e:  # safetensors has an error of its own, and others
            raise UserError(f"{path} cannot be read ({e}); copy it again.") from None
    return found


def is_file_name(name):
    return (
        isinstance(name, str) and name.endswith(".safetensors") and os.path.basename(name) == name
    )


def their_name(name, there):
    """The name of a tensor as the folder has it: GPT-2's own files leave the prefix out."""
    short = name.removeprefix("transformer.")
    return short if short in there and name not in there else name


def model_flags(config, folder):
    """{flag: value} of the model in a folder with this config.json. Raises UserError for one that is not supported."""
    kind, where = config.get("model_type"), os.path.join(folder, "config.json")
    if kind not in list(FORMATS):
        raise UserError(f"{where}: model_type is {kind!r}; supported are {', '.join(FORMATS)}.")
    check_entries(config, where)
    try:
        flags = FORMATS[kind].flags(config)
    except KeyError as e:
        raise UserError(f"{where}: {e.args[0]} is missing.") from None
    if (
        kind == "deepseek_v3"
    ):  # the config of many a model names predictors that its files do not hold
        first, there = flags["first_layers"] + flags["blocks"], files_of(folder)
        depth = min(flags["mtp_depth"], len(there))
        predictors = [f"model.layers.{first + d}.eh_proj.weight" for d in range(depth)]
        flags["T"] = min(config.get("max_position_embeddings") or MOST_T, MOST_T)
        flags["mtp_depth"] = sum(name in there for name in predictors)
    settings.check_model(flags, where, FORMATS[kind].names)
    return flags


def check(folder, tensors, form, block):
    """{name: `Stored`} of a folder that holds exactly `tensors`, float8 ones with scales of `block_sizes`. Raises
    UserError naming one that is missing, extra, misshapen or of an unreadable type."""
    there = files_of(folder)
    wanted = {}
    for t in tensors:  # of an absurd config billions, but then one of the first is missing
        name = their_name(t.name, there)
        if name not in there:
            raise UserError(f"{folder}: tensor {name} is missing; its config.json calls for it.")
        wanted[name] = t.shape
        if block and there[name].dtype == FLOAT8 and len(t.shape) == 2:
            wanted[name + SCALE] = tuple(-(-n // size) for n, size in zip(t.shape, block))
    for name in wanted:
        if name not in there:
            raise UserError(f"{folder}: tensor {name} is missing; its config.json calls for it.")
    for name, (_, shape, dtype) in there.items():
        if name not in wanted and (re.search(form.copies, name) or 0 in shape):
            continue
        if name not in wanted:
            raise UserError(
                f"{folder}: tensor {name} is extra; its config.json has no place for it."
            )
        if shape != wanted[name]:
            raise UserError(
                f"{folder}: tensor {name} is {list(shape)}, but its config.json calls for "
                f"{list(wanted[name])}."
            )
        if dtype not in READABLE and name + SCALE not in wanted:
            raise UserError(
                f"{folder}: tensor {name} is {dtype}; supported are {', '.join(sorted(READABLE))}."
            )
    return there


def read_tensor(there, name, block):
    """numpy array of a tensor in a folder; a float8 one in float32, with each block of it times its scale (DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2)."""
    path, shape, dtype = there[name]
    if dtype != FLOAT8:
        with safe_open(path, "numpy") as f:
            return f.get_tensor(name)
    with open(path, "rb") as f:  # numpy has no such type, so safetensors gives none
        length = int.from_bytes(f.read(8), "little")
        begin, end = json.loads(f.read(length))[name]["data_offsets"]
        f.seek(8 + length + begin)
        x = np.frombuffer(f.read(end - begin), jnp.float8_e4m3fn).reshape(shape).astype(np.float32)
    scales = read_tensor(there, name + SCALE, block).astype(np.float32)
    for first in range(0, shape[0], block[0]):
        row = np.repeat(scales[first // block[0]], block[1])
        x[first : first + block[0]] *= row[: shape[1]]
    return x


def read_sound(there, name, block):
    """`read_tensor` of one whose numbers are all finite in float32. Raises UserError naming one that is not."""
    x = read_tensor(there, name, block)
    with np.errstate(over="ignore"):
        if not np.isfinite(x.astype(np.float32, copy=False)).all():
            raise UserError(
                f"{there[name].path}: tensor {name} holds NaN or infinite values; copy it again."
            )
    return x


def filled(tensors):
    """Those of the tensors that hold numbers."""
    return (t for t in tensors if math.prod(t.shape))


@functools.partial(jax.jit, donate_argnums=0)
def put(leaf, part, starts):
    return lax.dynamic_update_slice(leaf, part.astype(leaf.dtype), starts)


def load(folder, abstract):
    """Parameters like `abstract` (steps.abstract_params) from a folder: each tensor is read, put into its place on the
    devices and forgotten. Raises UserError as `check` does."""
    config = utils.read_json(folder, "config.json")
    form, flags = FORMATS[config["model_type"]], model_flags(config, folder)
    m = utils.replace(utils.Config(), **flags).model
    block = block_sizes(dict(config))
    there = check(folder, filled(form.tensors(m)), form, block)
    first = next(form.tensors(m)).name
    head, rows = (their_name(name, there) for name in ("lm_head.weight", first))
    if (
        m.tied
        and head in there
        and not np.array_equal(*(read_sound(there, name, block) for name in (head, rows)))
    ):
        raise UserError(
            f"{folder}: tensor {head} is not {rows}, though its config.json ties them; tie_word_embeddings "
            f"must be false there."
        )
    zeros = jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape), abstract),
        out_shardings=jax.tree.map(lambda a: a.sharding, abstract),
    )
    params = zeros()
    for t in filled(form.tensors(m)):
        part = t.ours(read_sound(there, their_name(t.name, there), block))
        *parents, last = t.leaf
        node = functools.reduce(dict.__getitem__, parents, params)
        starts = tuple(i if isinstance(i, int) else i.start or 0 for i in t.at)
        starts += (0,) * (node[last].ndim - len(starts))
        sizes, dims = [], iter(part.shape)
        for dim in range(node[last].ndim):
            sizes.append(1 if dim < len(t.at) and isinstance(t.at[dim], int) else next(dims))
        node[last] = put(node[last], part.reshape(sizes), starts)
    return params


def import_folder(folder, run_dir):
    """A run directory with the weights of `folder` as its only checkpoint."""
    if os.path.exists(run_dir):
        raise UserError(
            f"{run_dir} exists already; give another run directory, or remove that one."
        )
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(
            f"{folder}: there is no config.json; a folder in the Hugging Face format holds one."
        )
    config = utils.read_json(folder, "config.json")
    flags = model_flags(config, folder)
    output_dir, name = os.path.split(os.path.abspath(run_dir))
    cfg = utils.replace(
        utils.Config(),
        **flags,
        name=name,
        output_dir=output_dir,
        n_device_axis=(1, 1, 1),
        n_devices=1,
    )
    cfg = settings.validate(cfg, jax.device_count())
    tokenization.folder_tokenizer(folder)  # said now, if it is torn
    mesh = steps.make_mesh(cfg)
    params = load(folder, steps.abstract_params(cfg, mesh))
    tokenizer = os.path.join(folder, "tokenizer.json")
    config = dict(utils.flatten(cfg), encoding="", positions=weights.positions(folder, flags["T"]))
    with appearing(run_dir) as part:
        if os.path.isfile(tokenizer):
            config["encoding"] = tokenization.keep_tokenizer(part, tokenizer)
        else:
            say(f"warning: {folder} has no tokenizer.json, so the run can't turn text into tokens")
        checkpoints = checkpointing.Checkpoints(os.path.join(part, "checkpoints"))
        checkpoints.save(0, {"params": params}, 0, {})
        checkpoints.close()
        if checkpoints.saved is None:
            raise UserError(f"{run_dir}: the checkpoint could not be written there.")
        utils.write_file(os.path.join(part, "config.json"), json.dumps(config, indent=1) + "\n")
    say(
        f"{run_dir}: {steps.count_in_words(cfg)}; begin a run from them with main.py --init_from {run_dir}"
    )


@contextlib.contextmanager
def appearing(folder):
    """A new folder beside to write into, which becomes `folder` when all is written, or goes where that fails. Raises
    UserError where it cannot be written."""
    part = os.path.normpath(folder) + ".part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        os.makedirs(part)
        yield part
        os.rename(part, folder)
    except OSError as e:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"{folder}: cannot be written ({e.strerror}).") from None
    except UserError:
        shutil.rmtree(part, ignore_errors=True)
        raise


# --- Export -------------------------------------------------------------------------------------------------------


class Damaged(Exception):
    """A checkpoint whose contents are not those that were saved."""


class StoredParams:
    """The parameters in a checkpoint, read part by part with TensorStore, without the rest of the state. What can't be
    read raises Damaged."""

    def __init__(self, checkpoints, step, table):
        try:
            fingerprint = checkpoints.meta(step)["fingerprint"]
        except Exception as e:  # whatever a damaged file makes the library raise
            raise Damaged(f"its meta can't be read: {type(e).__name__}") from None
        # experts come one by one out of chunks that hold several
        context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": 3 * checkpointing.CHUNK}}
        )
        base = f"file://{checkpoints.folder / str(step)}/state/"
        at = jax.tree_util.tree_flatten_with_path(table, is_leaf=parameters.is_param)[0]
        self.leaves, self.wanted, self.seen = {}, {}, {}
        for (path, _), number in zip(at, fingerprint):
            leaf = tuple(key.key for key in path)
            kvstore = dict(driver="ocdbt", base=base, path=f"params.{'.'.join(leaf)}/")
            opened = tensorstore.open(dict(driver="zarr", kvstore=kvstore), context=context)
            self.leaves[leaf] = self._result(leaf, opened)
            self.wanted[leaf], self.seen[leaf] = number, 0

    @staticmethod
    def _result(leaf, future):
        try:
            return future.result()
        except ValueError as e:  # TensorStore's error for what is missing or corrupt
            raise Damaged(f"{'.'.join(leaf)}: {str(e)[:150]}") from None

    def read(self, leaf, at):
        """float32 array: the part `at` of a leaf."""
        x = self._result(leaf, self.leaves[leaf][at].read())
        self.seen[leaf] += int(
            x.view(np.uint32).sum(dtype=np.uint32)
        )  # as checkpointing.fingerprint
        return x

    def verify(self, vocab_size):
        """Raise Damaged where what was read, and the vocabulary's padding, is not what was saved. All else must have
        been read once."""
        for leaf, wanted in self.wanted.items():
            if leaf in (("embedding",), ("head",)):
                self.read(leaf, (slice(vocab_size, None),))
            if self.seen[leaf] % 2**32 != wanted:
                raise Damaged(f"{'.'.join(leaf)} is not what was saved")


def write_tensors(folder, tensors, stored, dtype):
    """The tensors as safetensors files of at most SHARD_BYTES (a larger tensor has a file to itself), one tensor in
    memory at a time, with the index that transformers needs of several files."""
    size_of = lambda t: math.prod(t.shape) * jnp.dtype(dtype).itemsize  # noqa: E731
    groups, room = [], 0
    for t in tensors:
        if size_of(t) > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(t)
        room -= size_of(t)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else ["model.safetensors"]
    for name, group in zip(names, groups):
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for t in group:
            header[t.name] = dict(
                dtype=DTYPES[dtype], shape=t.shape, data_offsets=[offset, offset + size_of(t)]
            )
            offset += size_of(t)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with open(os.path.join(folder, name), "wb") as f:
            f.write(len(head).to_bytes(8, "little") + head)
            for t in group:
                x = stored.read(t.leaf, t.at) if math.prod(t.shape) else np.zeros(t.part)
                x = t.theirs(x).astype(dtype, copy=False)
                f.write(np.ascontiguousarray(x).view(np.uint8).data)
            f.flush()
            os.fsync(f.fileno())
    if len(groups) > 1:
        where = {t.name: name for name, group in zip(names, groups) for t in group}
        index = dict(metadata=dict(total_size=sum(map(size_of, tensors))), weight_map=where)
        utils.write_file(
            os.path.join(folder, "model.safetensors.index.json"), json.dumps(index, indent=1)
        )


def byte_level(encoding):
    """tokenizers.Tokenizer with the tokens, merges and cuts of a tiktoken.Encoding."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    ranks, merges = encoding._mergeable_ranks, []

    def halves(token, rank):
        """The two tokens that were merged into this one: what its bytes come to without it."""
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = min(range(len(pairs)), key=pairs.__getitem__)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            merges.append(tuple(map(spell, halves(token, rank))))
    bpe = tokenizers.models.BPE({spell(t): i for t, i in ranks.items()}, merges, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    # possessive quantifiers only save time in these patterns, and mean something else after {1,3} here; so does $
    cuts = tokenizers.Regex(
        re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", encoding._pat_str).replace("$", r"\z")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(cuts, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = {i: name for name, i in encoding._special_tokens.items()}
    last = max([*special, *ranks.values()])
    unused = {
        i: f"<|unused_{i}|>" for i in set(range(last)) - set(ranks.values()) - set(special)
    }  # ids have no gaps
    for _, name in sorted((special | unused).items()):
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    return tokenizer


def export_tokenizer(folder, run_dir, m):
    """Files that AutoTokenizer loads, where the run has a tokenizer; returns what config.json says of it. Without one
    the ends of text are those of the utils.Model, or null, where transformers would take ids of its own."""
    encoding = tokenization.folder_tokenizer(run_dir)
    if encoding is None:
        say(f"warning: {run_dir} has no tokenizer, so what is exported has none")
        return dict.fromkeys(
            ("bos_token_id", "eos_token_id"), m.end_of_text if m.end_of_text >= 0 else None
        )
    if isinstance(encoding, tokenization.HubTokenizer):
        tokenization.keep_tokenizer(folder, os.path.join(run_dir, "tokenizer.json"))
    else:
        byte_level(encoding).save(os.path.join(folder, "tokenizer.json"))
        end = tokenization.END_OF_TEXT
        about = dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=end,
            eos_token=end,
            model_max_length=m.T,
            clean_up_tokenization_spaces=False,
        )
        utils.write_file(
            os.path.join(folder, "tokenizer_config.json"), json.dumps(about, indent=1) + "\n"
        )
    return dict(bos_token_id=encoding.eot_token, eos_token_id=encoding.eot_token)


def export(run_dir, folder, dtype="float32"):
    """The newest sound checkpoint of a run directory as a folder that transformers loads. It appears when whole."""
    if os.path.exists(folder):
        raise UserError(f"{folder} exists already; give another folder, or remove that one.")
    stored = settings.run_config(run_dir)
    if "model_dimension" not in stored:
        raise UserError(f"{run_dir}: not a run directory (there is no config.json of a run in it).")
    cfg = utils.replace(
        utils.Config(), **weights.model_of_run(stored, run_dir), n_device_axis=(1, 1, 1)
    )
    m, table, form = cfg.model, model.param_table(cfg), FORMATS[MODEL_TYPES[cfg.model.architecture]]
    config, tensors = form.config(m), list(form.tensors(m))
    tokenization.folder_tokenizer(run_dir)  # said now, if it is torn
    checkpoints = checkpointing.Checkpoints(os.path.join(run_dir, "checkpoints"))
    with appearing(folder) as part:
        step = write_newest(part, checkpoints, table, tensors, m.vocab_size, dtype)
        if step is None:
            raise UserError(f"{run_dir}: there is no sound checkpoint in it.")
        about = dict(config, torch_dtype=dtype, **export_tokenizer(part, run_dir, m))
        utils.write_file(os.path.join(part, "config.json"), json.dumps(about, indent=2) + "\n")
    say(f"{folder}: {steps.count_in_words(cfg)}; of step {step}, as {config['architectures'][0]}")


def write_newest(folder, checkpoints, table, tensors, vocab_size, dtype):
    """`write_tensors` of the newest sound checkpoint; returns its step, None where there is none."""
    for step in checkpoints.steps():
        try:
            params = StoredParams(checkpoints, step, table)
            write_tensors(folder, tensors, params, dtype)
            params.verify(vocab_size)
            return step
        except Damaged as e:
            say(f"warning: checkpoint {step} is damaged ({e})")
            for name in os.listdir(folder):
                os.remove(os.path.join(folder, name))
    return None


def run(argv):
    parser = utils.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser(
        "export", help="checkpoint of a run directory -> folder that transformers loads"
    )
    out.add_argument("run_dir")
    out.add_argument("folder")
    out.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="type to store in; bfloat16 rounds"
    )
    into = commands.add_parser("import", help="folder in the Hugging Face format -> run directory")
    into.add_argument("folder")
    into.add_argument("run_dir")
    args = parser.parse_args(argv)
    for path in (args.run_dir, args.folder):
        if utils.is_remote(path):
            raise UserError(f"{path}: must be a local folder; copy it with the storage's own tool.")
    steps.quiet_libraries()
    if args.command == "export":
        export(args.run_dir, args.folder, args.dtype)
    else:
        import_folder(args.folder, args.run_dir)


if __name__ == "__main__":
    common.run(lambda: run(sys.argv[1:]))
