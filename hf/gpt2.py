"""GPT-2's Hugging Face format."""

import math

from hf.format import HEAD, HuggingFace, check_entries, config_of, plain, vocabulary


def tensors(m):
    """Yield the `Tensor`s of GPT2LMHeadModel for a utils.Model; its Conv1D holds [inputs, outputs], as we do."""
    D, F = m.model_dimension, m.ffn_width
    heads = (m.n_head, m.key_dim)
    yield vocabulary("transformer.wte.weight", "embedding", m)
    yield plain("transformer.wpe.weight", ("positions",), (), (m.T, D))
    for n in range(m.blocks):
        prefix = f"transformer.h.{n}"
        yield from norm_tensors(f"{prefix}.ln_1", ("gpt2", "attention_norm"), (n,), D)
        yield from norm_tensors(f"{prefix}.ln_2", ("gpt2", "norm"), (n,), D)
        for name, leaf, inputs, outputs in [
            ("attn.c_attn", "qkv", (D,), (3, *heads)),
            ("attn.c_proj", "out", heads, (D,)),
            ("mlp.c_fc", "up", (D,), (F,)),
            ("mlp.c_proj", "down", (F,), (D,)),
        ]:
            name = f"{prefix}.{name}"
            shape = (math.prod(inputs), math.prod(outputs))
            yield plain(f"{name}.weight", ("gpt2", leaf), (n,), inputs + outputs, shape)
            yield plain(f"{name}.bias", ("gpt2", f"{leaf}_bias"), (n,), outputs, shape[1:])
    yield from norm_tensors("transformer.ln_f", ("norm",), (), D)
    if not m.tied:
        yield vocabulary(HEAD, "head", m)


def norm_tensors(name, leaf, at, D):
    """Yield the `Tensor`s of a norm."""
    yield plain(f"{name}.weight", (*leaf, "scale"), at, (D,))
    yield plain(f"{name}.bias", (*leaf, "bias"), at, (D,))


# Entries that hold a flag's value
ENTRIES = dict(
    vocab_size="vocab_size",
    n_positions="T",
    n_embd="model_dimension",
    n_layer="blocks",
    n_head="n_head",
    n_inner="ffn_dim",
    layer_norm_epsilon="norm_eps",
    tie_word_embeddings="tied",
)
# Entries that change no number here: dropout, the order of products, heads of other models
IMMATERIAL = set(
    "attn_pdrop embd_pdrop resid_pdrop n_ctx reorder_and_upcast_attn predict_special_tokens n_special summary_type "
    "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout".split()
)
# transformers' names of GELU by tanh
GELU = ["gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"]


def to_config(m):
    """config.json of GPT2LMHeadModel."""
    return dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        activation_function="gelu_new",
        attn_pdrop=0.0,
        embd_pdrop=m.dropout_rate,
        resid_pdrop=m.dropout_rate,
        n_ctx=m.T,  # by which llama.cpp's converter goes
        **config_of(m, ENTRIES),
    )


def from_config(flags, left):
    """{flag: value} of config.json of GPT2LMHeadModel; see `hf/format.py: HuggingFace.flags`."""
    check_entries(
        left,
        "gpt2",
        IMMATERIAL,
        activation_function=GELU,
        scale_attn_weights=[True],
        scale_attn_by_inverse_layer_idx=[False],
    )
    return flags


FORMAT = HuggingFace(
    model_types=("gpt2",),
    tensors=tensors,
    config=to_config,
    entries=ENTRIES,
    missing=dict(n_inner=0, tie_word_embeddings=True),
    flags=from_config,
    copies=r"^lm_head.weight$|\.attn\.(masked_)?bias$",
    prefix="transformer.",
)
