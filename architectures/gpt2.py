"""GPT-2 (Radford et al., 2019): parameters, layers, cache, costs and Hugging Face format."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from architectures import Architecture, LayerCost
from architectures import hf_format as hf
from architectures.layers import (
    AFTER_ATTENTION,
    AFTER_FEED_FORWARD,
    attend_to_heads,
    dropout,
    key_value_cache,
    no_load,
    product,
    rows_of,
    tensor_parallel,
)
from architectures.parameters import (
    bias_param,
    embedding_param,
    out_param,
    scale_param,
    split_over_tp,
    stack,
    weight_param,
)
from collectives import gather_sequence

STD = 0.02  # standard deviation with which matrices begin


def gpt2_table(cfg):
    """The parameter table of GPT-2. Weights begin as in the paper's section 2.3 and its code."""
    m = cfg.model
    layer = attention_table(cfg) | feed_forward_table(cfg)
    return dict(
        embedding=embedding_param(cfg, m.padded_vocab, STD, rows=m.vocab_size),
        positions=embedding_param(cfg, m.T, STD, active=1 / m.T),
        gpt2=stack(layer, m.blocks),
        norm=norm_table(m),
    )


def back_std(m):
    return STD / math.sqrt(2 * m.blocks)


def norm_table(m):
    return dict(scale=scale_param(m.model_dimension), bias=bias_param(m.model_dimension))


def attention_table(cfg):
    m = cfg.model
    D, H, K = m.model_dimension, m.n_head, m.key_dim
    qkv = (D, 3, H, K)
    return dict(
        attention_norm=norm_table(m),
        qkv=weight_param(cfg, qkv, STD, outputs=(2, 3), fixed={2: "tp"}),
        qkv_bias=bias_param(3, H, K, spec=P(None, "tp", None)),
        out=out_param(cfg, (H, K, D), back_std(m)),
        out_bias=bias_param(D),
    )


def feed_forward_table(cfg):
    m = cfg.model
    D, F = m.model_dimension, m.ffn_width
    width_axis = "tp" if m.sequence_parallel == "megatron" else None
    return dict(
        norm=norm_table(m),
        up=weight_param(cfg, (D, F), STD, **split_over_tp(cfg, 1)),
        up_bias=bias_param(F, spec=P(width_axis)),
        down=weight_param(cfg, (F, D), back_std(m), dim=1, **split_over_tp(cfg, 0)),
        down_bias=bias_param(D),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def layer_norm(x, p, eps):
    """Norm by mean and deviation over the last dim (arXiv:1607.06450, equation 3), in float32; returns x's dtype."""
    return _layer_norm_forward(x, p, eps)[0]


def _layer_norm_forward(x, p, eps):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    x32 -= mean
    inverse = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    y = x32 * inverse * p["scale"] + p["bias"]
    return y.astype(x.dtype), (x, p, mean, inverse)


# Gradients of the norm and of GELU are written out so that no float32 array of x's size goes through a GPU's memory.
# The barriers hide from XLA what it would otherwise keep in float32 from the forward pass, or share between two uses.
def _layer_norm_backward(eps, kept, g):
    x, p, mean, inverse = lax.optimization_barrier(kept)
    normal = (x.astype(jnp.float32) - mean) * inverse
    g = g.astype(jnp.float32)
    d_normal = g * p["scale"]
    along = jnp.mean(d_normal * normal, -1, keepdims=True)
    dx = inverse * (d_normal - d_normal.mean(-1, keepdims=True) - normal * along)
    others = tuple(range(g.ndim - 1))
    dp = dict(scale=(g * normal).sum(others), bias=g.sum(others))
    return dx.astype(x.dtype), dp


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def attention(p, x, tokens, m, cache):
    """Multi-head attention (arXiv:1706.03762, section 3.2.2), tensor-parallel over heads.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache, [B, T_max, 2, H/tp, K] or None.
    """
    x = gather_sequence(x, tokens.split)  # [B, T, D]

    def heads(part):  # [B, H/tp, T, K]; a product for each, since its gradient need not join them
        h = product("btd,dhk->bhtk", x, p["qkv"][:, part]) + p["qkv_bias"][part, :, None]
        return h.astype(x.dtype)

    q, k, v = map(heads, range(3))
    position = tokens.whole(x.shape[1])
    out, cache = attend_to_heads(q, k, v, position, p["out"], tokens, m, cache)
    out = out + p["out_bias"]
    return out.astype(x.dtype), cache


def feed_forward(p, x, tokens, m):
    """GELU feed-forward: x [B, T/tp, D] -> [B, T/tp, D]."""

    def mlp(x):
        h = product("btd,df->btf", x, p["up"])  # [B, T, F/tp]
        h = gelu(h, p["up_bias"])
        return product("btf,fd->btd", h, p["down"])

    out = tensor_parallel(mlp, x, tokens, m) + p["down_bias"]
    return out.astype(x.dtype)


@jax.custom_vjp
def gelu(h, bias):
    """GELU (arXiv:1606.08415, section 2) of h [B, T, F] + bias [F], in h's dtype."""
    return jax.nn.gelu(h + bias).astype(h.dtype)


def _gelu_forward(h, bias):
    return gelu(h, bias), (h, bias)


def _gelu_backward(inputs, g):
    h, bias, g = lax.optimization_barrier((*inputs, g))
    _, pull = jax.vjp(jax.nn.gelu, h + bias)
    (dh,) = pull(g.astype(bias.dtype))
    dh = lax.optimization_barrier(dh.astype(h.dtype))
    return dh, dh.sum((0, 1), bias.dtype)


gelu.defvjp(_gelu_forward, _gelu_backward)


def gpt2_layer(p, x, tokens, m, cache=None):
    """GPT-2's layer (its section 2.3), pre-norm. x [B, T/tp, D] -> x, (an empty `Load`, cache)."""
    with jax.named_scope("attention"):
        h = layer_norm(x, p["attention_norm"], m.norm_eps)
        out, cache = attention(p, h, tokens, m, cache)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_ATTENTION)
    with jax.named_scope("feed_forward"):
        h = layer_norm(x, p["norm"], m.norm_eps)
        out = feed_forward(p, h, tokens, m)
        x = x + dropout(out, m.dropout_rate, tokens, AFTER_FEED_FORWARD)
    return x, (no_load(0), cache)


def embed(top, x, position):
    """Rows of the embedding x [B, T, D] and of the learned positions, for position [B or 1, T], added."""
    return x + rows_of(top["positions"], position)


def layer_cost(m, kind):
    """`LayerCost` of a layer."""
    D, K = m.model_dimension, m.key_dim
    return LayerCost(
        own_weights=0,
        head_weights=4 * D * K,  # query, key, value and out
        query_channels=K,
        value_channels=K,
        gathered=D,
        products=m.n_head * 3 * K,
        branches=1,
        ffn_width=m.ffn_width,
    )


def hugging_face_tensors(m):
    """Yield the `Tensor`s of GPT2LMHeadModel for a utils.Model; its Conv1D holds [inputs, outputs], as we do."""
    D, F = m.model_dimension, m.ffn_width
    heads = (m.n_head, m.key_dim)
    yield hf.vocabulary("transformer.wte.weight", "embedding", m)
    yield hf.plain("transformer.wpe.weight", ("positions",), (), (m.T, D))
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
            yield hf.plain(f"{name}.weight", ("gpt2", leaf), (n,), inputs + outputs, shape)
            yield hf.plain(f"{name}.bias", ("gpt2", f"{leaf}_bias"), (n,), outputs, shape[1:])
    yield from norm_tensors("transformer.ln_f", ("norm",), (), D)
    if not m.tied:
        yield hf.vocabulary(hf.HEAD, "head", m)


def norm_tensors(name, leaf, at, D):
    """Yield the `Tensor`s of a norm."""
    yield hf.plain(f"{name}.weight", (*leaf, "scale"), at, (D,))
    yield hf.plain(f"{name}.bias", (*leaf, "bias"), at, (D,))


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


def to_hugging_face(m):
    """config.json of GPT2LMHeadModel."""
    return dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        activation_function="gelu_new",
        attn_pdrop=0.0,
        embd_pdrop=m.dropout_rate,
        resid_pdrop=m.dropout_rate,
        n_ctx=m.T,  # by which llama.cpp's converter goes
        **hf.config_of(m, ENTRIES),
    )


def from_hugging_face(flags, left):
    """{flag: value} of config.json of GPT2LMHeadModel; see `hf_format.HuggingFace.flags`."""
    hf.require(
        left,
        "gpt2",
        IMMATERIAL,
        activation_function=GELU,
        scale_attn_weights=[True],
        scale_attn_by_inverse_layer_idx=[False],
    )
    return flags


ARCHITECTURE = Architecture(
    table=gpt2_table,
    layers=dict(gpt2=gpt2_layer),
    last="gpt2",
    embed=embed,
    norm=layer_norm,
    cache=key_value_cache,
    layer_cost=layer_cost,
    hugging_face=hf.HuggingFace(
        model_types=("gpt2",),
        tensors=hugging_face_tensors,
        config=to_hugging_face,
        entries=ENTRIES,
        missing=dict(n_inner=0, tie_word_embeddings=True),
        flags=from_hugging_face,
        copies=r"^lm_head.weight$|\.attn\.(masked_)?bias$",
        prefix="transformer.",
    ),
    fixed=dict(activation="gelu"),
    learns_positions=True,
)
