"""The Hugging Face format of an architecture: which tensor is which parameter, and what config.json holds."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import utils
from architectures import architecture
from config.stored import read_values
from runtime.messages import UserError


class HuggingFace(NamedTuple):
    """How a model of an architecture is stored in the Hugging Face format: as transformers' class for it reads it."""

    model_types: tuple  # values of model_type in config.json that mean this architecture
    tensors: Callable  # utils.Model -> iterator over its `Tensor`s, the embedding first
    # utils.Model -> {entry: value} of config.json. Raises UserError where the class has no such model.
    config: Callable
    entries: dict  # {entry of config.json: flag whose value it holds}
    # {entry: value that it has where it is missing}, of the entries that may be missing
    missing: dict
    # ({flag: value} of the entries, the other entries of config.json) -> {flag: value}. Raises UserError for an entry
    # that may change numbers in a way unknown here.
    flags: Callable
    # regular expression of the names of tensors that only repeat others, or that no product reads
    copies: str
    prefix: str = ""  # of the names of tensors, which some files leave out
    equal: dict = {}  # {entry: another entry whose value it must have}

    @property
    def names(self):
        """{flag: what config.json calls it}."""
        return OTHER_NAMES | {flag: name for name, flag in self.entries.items()}


HEAD = "lm_head.weight"  # name of the head's weights in all architectures


class Tensor(NamedTuple):
    """One tensor of the Hugging Face format, and the part of our parameter tree that holds the same numbers.

    A tensor may be empty: shared experts of width 0, where a model has none, have no leaf in our tree.

    For example DeepSeek-V3 with 3 first layers: `model.layers.5.self_attn.kv_a_proj_with_mqa.weight` [R + 64, D] is
    transposed the part (2, :, Q:) of the leaf ("moe", "attention", "down"), its 64 rotated columns in another order.
    """

    name: str
    shape: tuple  # in the format
    leaf: tuple  # path of the leaf in our tree
    # which part of that leaf: an int or a slice for each leading dim, all of the other dims
    at: tuple
    part: tuple  # shape of that part, without the dims that have an int in `at`
    transposed: bool = False  # torch's Linear holds [outputs, inputs]
    # number of its last channels that have rotary positions. The two channels of a pair are neighbors there; here they
    # are in two halves.
    rotated: int = 0

    def ours(self, x):
        """Array of `shape` -> array of `part`."""
        x = (x.T if self.transposed else x).reshape(self.part)
        return self.in_order(x, -1, 2)

    def theirs(self, x):
        """Array of `part` -> array of `shape`."""
        x = self.in_order(x, 2, -1)
        if self.transposed:
            return x.reshape(self.shape[::-1]).T
        return x.reshape(self.shape)

    def in_order(self, x, *pairs):
        """x with its rotated channels reordered: they are read as an array with dims `pairs`, which is transposed."""
        if not self.rotated:
            return x
        others, rotated = np.split(x, [-self.rotated], -1)
        reordered = rotated.reshape(*rotated.shape[:-1], *pairs)
        reordered = reordered.swapaxes(-1, -2).reshape(rotated.shape)
        return np.concatenate([others, reordered], -1)


def table_of(m):
    """The parameter table of a utils.Model, with its shapes in the tree, on one device."""
    cfg = dataclasses.replace(utils.Config(), model=m)
    cfg = utils.replace(cfg, n_device_axis=(1, 1, 1))
    return architecture(m.architecture).table(cfg)


def linear(name, leaf, at, part, inputs=1, rotated=0):
    """`Tensor` of a torch Linear's weight. The first `inputs` dims of our part are what the Linear takes in."""
    columns = math.prod(part[:inputs])
    rows = math.prod(part[inputs:])
    return Tensor(name, (rows, columns), leaf, at, part, transposed=True, rotated=rotated)


def plain(name, leaf, at, part, shape=None):
    """`Tensor` that is not transposed. `shape` is its shape in the format, if it is not that of our part."""
    return Tensor(name, shape or part, leaf, at, part)


def vocabulary(name, leaf, m):
    """`Tensor` of a table with a row for each token. Ours is padded with rows of zeros."""
    rows = slice(0, m.vocab_size)
    return plain(name, (leaf,), (rows,), (m.vocab_size, m.model_dimension))


def outer_tensors(m):
    """Yield the `Tensor`s outside the layers, by the names that most models since Llama have."""
    yield vocabulary("model.embed_tokens.weight", "embedding", m)
    yield plain("model.norm.weight", ("norm",), (), (m.model_dimension,))
    if not m.tied:
        yield vocabulary(HEAD, "head", m)


def feed_forward(prefix, leaf, at, D, F, activation="swiglu"):
    """Yield the `Tensor`s of a feed-forward of width F. Our `up` holds the matrices of both branches of SwiGLU, the
    gate's first, or the only one of GELU."""
    branches = ["gate_proj", "up_proj"] if activation == "swiglu" else ["up_proj"]
    for i, name in enumerate(branches):
        yield linear(f"{prefix}.{name}.weight", (*leaf, "up"), (*at, i), (D, F))
    yield plain(f"{prefix}.down_proj.weight", (*leaf, "down"), at, (D, F))


# Without --T, T is at most this: max_position_embeddings is often far beyond the lengths that the model was trained on.
MOST_T = 4096
# {flag: entry} of the flags that the functions below read
OTHER_NAMES = dict(T="max_position_embeddings", rope_base="rope_theta")
# {entry: flag} of the entries that most models since Llama have
COMMON = dict(
    vocab_size="vocab_size",
    hidden_size="model_dimension",
    intermediate_size="ffn_dim",
    num_hidden_layers="blocks",
    num_attention_heads="n_head",
    rms_norm_eps="norm_eps",
    tie_word_embeddings="tied",
)
# What null means, in the entries that may be null
NULL = dict(
    n_inner=0,
    n_shared_experts=0,
    q_lora_rank=0,
    num_key_value_heads=0,
    n_group=1,
    topk_group=1,
    tie_word_embeddings=False,
)
# {flag: attribute of utils.Model that has its value once a default such as 0 is resolved}
SETTLED = dict(
    ffn_dim="ffn_width",
    expert_dim="expert_width",
    q_latent_dim="q_latent",
    head_dim="key_dim",
    n_kv_head="kv_heads",
)


def config_of(m, entries):
    """{entry: value} of a utils.Model."""
    return {name: getattr(m, SETTLED.get(flag, flag)) for name, flag in entries.items()}


def config_of_common(m, entries, supported):
    """`config_of`, with entries of positions and the first of the values that are `supported` of others."""
    rest = {name: values[0] for name, values in supported.items()}
    positions = dict(max_position_embeddings=int(m.T), rope_theta=m.rope_base)
    return config_of(m, entries) | positions | dict(attention_dropout=0.0) | rest


def read_flags(form, config, where):
    """{flag: value} of a config.json, read from `where`. Raises UserError for an entry that is missing, of the wrong
    type, or may change numbers in a way unknown here."""
    left = form.missing | config
    flags = {}
    for name, flag in form.entries.items():
        if name not in left:
            raise UserError(f"{where}: {name} is missing.")
        value = left.pop(name)
        flags[flag] = NULL.get(name) if value is None else value
    flags = read_values(flags, where, form.names)
    return read_values(form.flags(flags, left), where, form.names)


def pop_context_length(left):
    """Remove max_position_embeddings from the config `left`; return the value of T that follows from it."""
    positions = left.pop("max_position_embeddings", None) or MOST_T
    return min(positions, MOST_T) if isinstance(positions, int) else positions


def pop_object(left, name):
    """Remove `name` from the config `left`; return its object, {} where it is missing or null."""
    return dict(left.pop(name, None) or {})


def pop_rope(left):
    """Remove the entries of rotary positions from the config `left`; return (base, what else they hold)."""
    base = left.pop("rope_theta", 10_000.0)
    scaling = pop_object(left, "rope_scaling")
    parameters = pop_object(left, "rope_parameters")
    rope = scaling or parameters
    rope = {"rope_type": rope.get("type", "default")} | rope  # type is its older name
    if rope.get("factor") == 1 and rope["rope_type"] in ("default", "linear"):
        del rope["factor"]  # linear divides positions by it
        rope |= {name: "default" for name in ("rope_type", "type")}
    return rope.pop("rope_theta", base), rope


def pop_norm_of_gates(left, k, missing):
    """Remove norm_topk_prob, by default `missing`, from the config `left` of a model with k experts for each token.
    Raises UserError where its gates would not be those of `experts.choose_experts`."""
    norm = left.pop("norm_topk_prob", missing)
    if norm != (k > 1):
        raise UserError(
            f"config.json: norm_topk_prob is {norm!r}, but supported is {k > 1} with num_experts_per_tok {k}."
        )


# Entries that change no number that is computed here, in the config.json of any architecture
IMMATERIAL = set(
    # names: of classes, of the program that wrote the file, of the weights' type, which each tensor states itself
    "architectures auto_map model_type torch_dtype dtype use_bfloat16 transformers_version name_or_path _name_or_path "
    "_commit_hash unsloth_version unsloth_fixed quantization_config "
    # how a program runs it: kernels, caches, devices, the order of products
    "use_cache pretraining_tp ep_size attn_implementation _attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal experts_implementation _experts_implementation torchscript gradient_checkpointing "
    "chunk_size_feed_forward "
    # of training only: dropout, initialization, losses, for which this program has flags
    "attention_dropout initializer_range tf_legacy_loss "
    # results besides logits, and models with another head or an encoder
    "return_dict output_hidden_states output_attentions output_router_logits output_past id2label label2id num_labels "
    "problem_type finetuning_task is_decoder is_encoder_decoder tie_encoder_decoder cross_attention_hidden_size "
    # of the tokenizer, and of sampling
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix "
    "task_specific_params max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)
# Values of entries that all architectures have in common; others are refused
SUPPORTED = dict(add_cross_attention=[False], pruned_heads=[{}, None])
# The same, of most models since Llama
COMMON_SUPPORTED = dict(
    rope_type=["default"],
    type=["default"],
    partial_rotary_factor=[1],
    mlp_bias=[False],
)
SILU = ["silu", "swish"]  # names of one activation


def check_entries(left, model_type, immaterial=frozenset(), equal=None, **allowed):
    """Raise UserError where one of the entries `left` of a config may change a number. An entry may stay if it is known
    to be `immaterial`, if it has one of its values in `allowed`, or if it is unknown and null. equal: {entry: the one
    that it must equal}, for the message."""
    allowed |= SUPPORTED
    if left.get("quantization_config"):
        raise UserError(
            "config.json: its quantization_config says that the weights are quantized; convert them to bfloat16 first."
        )
    for key, value in left.items():
        if key in IMMATERIAL or key in immaterial:
            continue
        if key not in allowed:
            if value is None:  # as if it were missing
                continue
            raise UserError(
                f"config.json: {key} is {value!r}, and what that changes in {model_type} is not known here; "
                f"remove the entry if it changes no number."
            )
        if value not in allowed[key]:
            words = " or ".join(map(repr, allowed[key]))
            other = (equal or {}).get(key)
            like = f" where that is its {other}" if other else ""
            raise UserError(
                f"config.json: {key} is {value!r}, but {model_type} is supported with {words} only{like}."
            )
