"""The transformer: parameter table, collectives, layers, pipeline and loss, in pure JAX.

Everything between "Collectives" and the public functions at the end runs inside `shard_map` on local shapes, which
tail comments give. A mesh of (1, 1, 1) is the unsharded model; there is no second implementation.

Letters: B batch, T sequence, D model, H heads, K head dim, R latent, E experts, C capacity, F feed-forward,
V vocabulary, L layers per block, M microbatches, S stages. "axis" is a mesh axis, "dim" an array dimension:

    dp  splits the batch, every large weight (gathered just before use) and, with tp, the experts
    pp  splits the stack of blocks into stages, and the microbatches outside the pipeline
    tp  splits heads and feed-forward width, and the sequence everywhere else
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels

AXES = ("dp", "pp", "tp")
YARN_BETA = 32, 1  # turns over the original T above which a frequency stays, and below which it is stretched
BLOCKS = {"dense", "moe", "gpt2"}  # kinds of layers that blocks consist of, in stacks that pp splits
SPREAD = dict(moe=("dp", "tp"), mtp=AXES)  # over which axes a layer's tokens are spread, the stage given
BATCH_SPEC = P(None, "pp", "dp", "tp")  # of tokens [accumulation, M, B, T]


# --- Parameters: one table --------------------------------------------------------------------------------------


class Param(NamedTuple):
    """One leaf: everything about it that initialisation, sharding, counting and the layers need to know."""

    shape: tuple
    spec: P
    std: float  # of its normal initialisation
    start: float = 0.0  # mean of its initialisation
    gather: tuple = ()  # (dim counted from the end, axes): gathered over these before use
    expert: int = 0  # dim counted from the end of which a device uses one alone, its own expert; 0: there is none
    matrix: bool = False  # used in model_dtype and decayed; otherwise float32 and not decayed
    active: float = 1.0  # share of it that one token uses
    rows: int = 0  # of its first dim that are used, the others are 0 and stay so; 0: all


def with_model(cfg, **flags):
    """`cfg` with flags of the model changed."""
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **flags))


def param_table(cfg):
    """Nested dict of `Param`s for a validated Config. Leaves of blocks are stacked on a leading dim that pp splits."""
    m = cfg.model
    table = dict(ARCHITECTURES[m.architecture].table(cfg))
    rounds = cfg.run.pp_interleave
    if rounds > 1:  # blocks go round the stages so many times: every stage has a part of every round's
        for kind in BLOCKS & table.keys():
            table[kind] = table_map(lambda p: p._replace(shape=(rounds, p.shape[0] // rounds, *p.shape[1:]),
                                                         spec=P(None, *p.spec)), table[kind])  # fmt: skip
    if not m.tied:
        table["head"] = table["embedding"]
    return table


def matrix(cfg, shape, std, over=("dp",), fsdp=0, fixed=None, **more):
    """`Param` of a weight whose dim `fsdp` is split over the axes `over` (or as many of them as divide it; not over dp
    where --fsdp is none) until it is used; dims in `fixed` ({dim: axes}) stay split."""
    sizes = dict(zip(AXES, cfg.run.n_device_axis))
    spec = [(fixed or {}).get(dim) for dim in range(len(shape))]
    if cfg.model.fsdp == "none" and not more.get("expert"):
        over = tuple(axis for axis in over if axis != "dp")
    while over and shape[fsdp] % math.prod(sizes[a] for a in over):
        over = () if more.get("expert") else over[1:]
    if over:
        spec[fsdp] = over
        more["gather"] = (fsdp - len(shape), over)
    return Param(tuple(shape), P(*spec), std, **{"matrix": True, **more})


def over_tp(cfg, dim):
    """How tp splits a weight behind a sum over `dim`, heads or feed-forward width, as arguments of `matrix`."""
    return dict(fixed={dim: "tp"}) if cfg.model.sequence_parallel == "megatron" else dict(over=("dp", "tp"))


def scale_param(size):
    """`Param` of a norm's scale."""
    return Param((size,), P(None), 0.0, start=1.0)


def bias_param(*shape, spec=P(None)):
    """`Param` of a bias."""
    return Param(shape, spec, 0.0)


def stack(layer, *sizes, over="pp"):
    """Leading dims for every leaf of a layer's table, the first of them split over the axis `over`."""
    leading = P(over, *[None] * (len(sizes) - 1))
    return table_map(lambda p: p._replace(shape=(*sizes, *p.shape), spec=P(*leading, *p.spec)), layer)


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
    D, H, K, R, E, L = m.model_dimension, m.n_head, m.head_dim, m.latent_dim, m.n_experts, m.layers_per_block
    Q, V, layers = m.q_latent, m.value_dim, m.first_layers + m.blocks * L
    branches = {"swiglu": 2, "gelu": 1}[m.activation]

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
        split = dict(over=SPREAD["moe"]) if shared else dict(fixed={0: SPREAD["moe"]}, over=())
        return dict(
            up=W((E, branches, D, F), into(D), fsdp=2, active=m.k / E, expert=-4 * shared, **split),
            down=W((E, D, F), back(F), fsdp=1, active=m.k / E, expert=-3 * shared, **split),
        )

    dense = dict(attention=attention(m.dhR), norm=scale_param(D), ffn=feed_forward(m.ffn_width))
    moe = dict(
        attention=attention(m.dhR if m.moe_rope else 0),
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
        predict = dict(token_norm=scale_param(D), hidden_norm=scale_param(D), merge=W((2, D, D), into(2 * D), fsdp=1),
                       layer=moe, norm=scale_param(D))  # fmt: skip
        table["mtp"] = stack(predict, m.mtp_depth, over=None)
    return table


def is_param(x):
    return isinstance(x, Param)


def table_map(f, table):
    """`f` of every Param of a table, in the table's nesting."""
    return jax.tree.map(f, table, is_leaf=is_param)


def shardings(table, mesh):
    """NamedSharding of every parameter."""
    return table_map(lambda p: NamedSharding(mesh, p.spec), table)


def init_params(table, key):
    """Float32 parameters; each leaf depends on `key` and its own path, not on the mesh or on other leaves."""

    def init(path, p):
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        x = p.start + p.std * jax.random.normal(own, p.shape) if p.std else jnp.full(p.shape, p.start)
        return jnp.where(jnp.arange(p.shape[0])[:, None] < p.rows, x, 0) if p.rows else x

    return jax.tree_util.tree_map_with_path(init, table, is_leaf=is_param)


def count_params(cfg):
    """(total, active for one token, embedding) numbers of parameters; the first two without the embedding."""
    table = param_table(cfg)
    embedding = math.prod(table["embedding"].shape)
    leaves = jax.tree.leaves(table, is_leaf=is_param)
    total = sum(math.prod(p.shape) for p in leaves)
    active = sum(math.prod(p.shape) * p.active for p in leaves)
    return total - embedding, round(active) - embedding, embedding


def flops_per_token(cfg):
    """Floating-point operations of forward and backward pass per training token, recomputation not counted.

    6 per active weight (PaLM, arXiv:2204.02311, appendix B), the head included, and causal attention at half of
    T x T.
    """
    m = cfg.model
    _, active, _ = count_params(cfg)
    dense, last = m.first_layers + m.blocks * (m.layers_per_block - 1), m.blocks + m.mtp_depth
    channels = (dense + last) * (m.head_dim + m.value_dim) + (dense + last * m.moe_rope) * m.dhR
    heads = m.mtp_depth + m.tied  # a head of its own is among the active weights once
    return 6 * (active + heads * m.vocab_size * m.model_dimension + m.T * m.n_head * channels / 2)


# --- Collectives: every one of the program ----------------------------------------------------------------------


def all_gather(x, axis, dim):
    """[.., n, ..], a part along `dim` -> the parts of all devices of a mesh axis, one after another. Transpose:
    reduce-scatter.

    The TPU compiler makes an all-reduce, of twice the bytes, of many a reduce-scatter among all devices of a mesh, of
    small last dims or along the first: that goes in two steps (arXiv:1909.09756, section 3), with the dims after `dim`
    as one, and with parts of less than 2^28 numbers along a dim of their own.
    """
    n, shape, tiled = lax.axis_size(axis), x.shape, dim > 0 or x.size >= 2**28
    near = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0) if n == lax.axis_size(AXES) else 1
    devices = np.arange(n).reshape(-1, near)
    x = x if dim == x.ndim - 1 else x.reshape(*shape[: dim + 1], -1)
    for groups in (devices, devices.T) if near > 1 else (devices.T,) if n > 1 else ():
        x = lax.all_gather(x, axis, axis=dim, tiled=tiled, axis_index_groups=groups.tolist())
    return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def reduce_scatter(x, axis, dim):
    """A sum over a mesh axis, of which every device takes its part along `dim`. Transpose: `all_gather`."""
    part = jax.ShapeDtypeStruct(x.shape[:dim] + (x.shape[dim] // lax.axis_size(axis),) + x.shape[dim + 1 :], x.dtype)
    return jax.linear_transpose(functools.partial(all_gather, axis=axis, dim=dim), part)(x)[0]


class Weights(NamedTuple):
    """Weights, one or a tree of them, and zeros in float32 of the same shapes at which their gradients arrive instead:
    see `take`."""

    value: jax.Array
    grad: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_weight(w, p, dtype):
    """A weight of the `Param` p as it is stored -> the whole of it, or this device's expert, `Weights` in `dtype`
    (ZeRO-3, arXiv:1910.02054, section 5.3).

    Travels in `dtype`; the gradient, which its transpose reduces and scatters, in float32.
    """
    whole = _whole(w.astype(dtype), p)
    return Weights(whole, jnp.zeros(whole.shape, jnp.float32))


def _whole(w, p):
    dim, axes = p.gather or (0, SPREAD["moe"])
    dim %= w.ndim
    if not p.expert:
        for axis in reversed(axes if p.gather else ()):  # one after another: XLA reduces and scatters no more than that
            w = all_gather(w, axis, dim)
        return w
    E, experts = p.shape[p.expert], p.expert % w.ndim
    apart, together = expert_groups(E)
    if not p.gather:
        return lax.dynamic_slice_in_dim(w, lax.axis_index(axes) // len(apart), 1, experts)
    # device e r + j has slice e r + j of every expert, and exchanges them for the slices j, r + j, ... of expert e
    w = lax.all_to_all(w, axes, experts, dim, axis_index_groups=apart, tiled=True)
    shape = w.shape
    w = w.reshape(*shape[:dim], E, -1, *shape[dim + 1 :])
    w = lax.all_gather(w, axes, axis=dim + 1, tiled=True, axis_index_groups=together)  # [..., E, r x slice, ...]
    return w.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _gather_weight_forward(w, p, dtype):
    return gather_weight(w, p, dtype), None


def _gather_weight_backward(p, dtype, _, g):
    stored = list(g.grad.shape)
    if p.gather:
        stored[p.gather[0]] //= lax.axis_size(p.gather[1])
    if p.expert:
        stored[p.expert] = p.shape[p.expert]
    return jax.linear_transpose(functools.partial(_whole, p=p), jax.ShapeDtypeStruct(stored, jnp.float32))(g.grad)


gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)


def expert_groups(E):
    """How n = dp x tp devices share E experts, device e n/E + j expert e, as axis_index_groups: (those that hold
    different experts, those that hold the same one); (None, None) where each has experts of its own."""
    r = lax.axis_size(SPREAD["moe"]) // E
    if r < 2:
        return None, None
    devices = np.arange(E * r).reshape(E, r)
    return devices.T.tolist(), devices.tolist()


def gather_sequence(x, split):
    """[B, T/tp, ...] -> [B, T, ...]: enter a tensor-parallel region (arXiv:2205.05198, section 4.2.2).

    Transpose: reduce-scatter over T. Tokens that are not split over tp (decoding) are whole already.
    """
    return all_gather(x, "tp", 1) if split else x


def scatter_sequence(x, split):
    """[B, T, D], a partial sum on every device of tp -> [B, T/tp, D], summed: leave a tensor-parallel region.

    Transpose: all-gather over T. Where tokens are not split over tp, a sum over tp.
    """
    return reduce_scatter(x, "tp", 1) if split else lax.psum(x, "tp")


def exchange_heads(x, split):
    """[B, H/tp, T, V] of all tokens -> [B, H, T/tp, V] of this device's (DeepSpeed Ulysses, arXiv:2309.14509,
    section 3.1). Transpose: the way back. Where tokens are not split over tp, [B, H, T, V], an all-gather."""
    n = lax.axis_size("tp")
    if n == 1 or not split:
        return x if n == 1 else lax.all_gather(x, "tp", axis=1, tiled=True)
    B, H, T, V = x.shape
    x = lax.all_to_all(jnp.moveaxis(x.reshape(B, H, n, T // n, V), 2, 0), "tp", 0, 0)  # [tp, B, H/tp, T/tp, V]
    return jnp.moveaxis(x, 0, 1).reshape(B, n * H, T // n, V)


def to_experts(x):
    """Buckets [E, C, D] -> [E/n, n, C, D] on the n devices of dp x tp that own the experts, of n senders each; where
    n > E every device takes from E, [1, E, C, D]. Transpose: from_experts."""
    if lax.axis_size(SPREAD["moe"]) == 1:
        return x[:, None]
    n = min(len(x), lax.axis_size(SPREAD["moe"]))
    x = x.reshape(n, -1, *x.shape[1:])  # [n, E/n, C, D]
    return lax.all_to_all(x, SPREAD["moe"], 0, 0, axis_index_groups=expert_groups(len(x))[0]).swapaxes(0, 1)


def from_experts(x):
    """[E/n, n, C, D] -> [E, C, D], back on the devices that the tokens came from. Transpose: to_experts."""
    if lax.axis_size(SPREAD["moe"]) == 1:
        return x[:, 0]
    x = x.swapaxes(0, 1)  # [n, E/n, C, D]
    return lax.all_to_all(x, SPREAD["moe"], 0, 0, axis_index_groups=expert_groups(len(x))[0]).reshape(-1, *x.shape[2:])


def next_stage(x):
    """What the stage before sent; stage 0 receives from the last. Transpose: the other way round."""
    S = lax.axis_size("pp")
    return lax.ppermute(x, "pp", [(s, (s + 1) % S) for s in range(S)]) if S > 1 else x


@jax.custom_vjp
def to_stages(x):
    """Microbatches [M/S, ...] of every stage -> [M, ...] on every stage. Transpose: `share_out` by stage 0, which alone
    puts them to use."""
    return lax.all_gather(x, "pp", axis=0, tiled=True) if lax.axis_size("pp") > 1 else x


to_stages.defvjp(lambda x: (to_stages(x), None), lambda _, g: (share_out(g, 0),))


def share_out(x, stage):
    """Microbatches [M, ...] of one stage -> [M/S, ...] on every stage. Transpose: the way back."""
    S = lax.axis_size("pp")
    return lax.all_to_all(x.reshape(S, -1, *x.shape[1:]), "pp", 0, 0)[stage] if S > 1 else x


def from_last_stage(x, everywhere=False):
    """Outputs [M, ...] of the last stage -> [M/S, ...], shared out (`everywhere`: all of them on every stage)."""
    last = lax.axis_size("pp") - 1
    if everywhere:
        return lax.psum(jnp.where(lax.axis_index("pp") == last, x, 0), "pp")
    return share_out(x, last)


def sum_over(x, axes):
    """Sum over mesh axes. In the differentiated path this is the last operation of the loss and stands nowhere else."""
    return lax.psum(x, axes)


# --- Layers, on local shapes ------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """Where the tokens of an activation [B, T/tp, D] stand in their sequences and in the training step."""

    position: jax.Array  # [B, T/tp] position in the sequence; [1, T/tp] where it is the same in all
    split: bool = True  # whether T is split over tp
    key: jax.Array | None = None  # of dropout in this layer; None: no dropout
    number: jax.Array | None = None  # [B, T/tp] uint32, number of the token within the training step
    start: jax.Array | None = None  # [B, T] position at which each token's document begins; None: all are one

    def whole(self, T):
        """Positions [B or 1, T] of all T tokens of the sequences."""
        return jnp.arange(T)[None] if self.split else self.position

    def within_document(self):
        """Positions [B or 1, T/tp] counted from the beginning of each token's document."""
        if self.start is None:
            return self.position
        return self.position - self.start[:, self.position[0]]


def document_starts(ids, m):
    """`start(i)`: int32 [B/dp, T], where the document of each token of microbatch i (of all stages') begins: at the
    last end-of-text token up to it; None where documents are not kept apart. ids [M/S, B/dp, T/tp]."""
    if not m.document_mask:
        return lambda microbatch: None
    M, B, t = ids.shape
    ids = to_stages(gather_sequence(ids.reshape(M * B, t), True).reshape(M, B, -1))
    starts = lax.cummax(jnp.where(ids == m.end_of_text, jnp.arange(ids.shape[-1]), 0), axis=2)  # [M, B/dp, T]
    return lambda microbatch: starts[microbatch]


def gather(params, table, dtype):
    """`Weights` of parameters, gathered over the axes that only store them, matrices in `dtype`, others in float32."""
    leaves, tree = jax.tree.flatten(params)
    described = jax.tree.leaves(table, is_leaf=is_param)
    pairs = [gather_weight(w, p, dtype if p.matrix else jnp.float32) for w, p in zip(leaves, described)]
    return Weights(*(jax.tree.unflatten(tree, part) for part in zip(*pairs)))


@jax.custom_vjp
def take(weights, index):
    """Values of one layer, at `index` of a stack of `Weights` (() for all of it), and the stack's grad to go on with.

    The gradient is added to what arrives at that grad: one that is carried through a loop is summed up in place, in
    float32, where a stack's own would be made anew in every turn.
    """
    return jax.tree.map(lambda w: w[index], weights.value), weights.grad


def _take_backward(index, gradients):
    g, total = gradients
    return Weights(None, jax.tree.map(lambda total, g: total.at[index].add(g.astype(jnp.float32)), total, g)), None


take.defvjp(lambda weights, index: (take(weights, index), index), _take_backward)


def product(spec, x, w, keep=True):
    """`einsum` of x and a weight w; --remat dots keeps it.

    The weight's gradient is formed with the narrower of x and what comes back first: CPUs write the first operand out
    anew, transposed.
    """
    y = _product(spec, x, w)
    return checkpoint_name(y, "product") if keep else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec, x, w):
    return jnp.einsum(spec, x, w)


def _product_backward(spec, operands, g):
    x, w = operands
    of_x, of_w, of_g = spec.replace("->", ",").split(",")
    (first, a), (second, b) = sorted([(of_x, x), (of_g, g)], key=lambda operand: operand[1].size)
    ordered = "".join(sorted(of_w, key=lambda dim: (dim not in first, dim not in second)))  # batch, first, second
    dw = jnp.einsum(f"{ordered}->{of_w}", jnp.einsum(f"{first},{second}->{ordered}", a, b))
    return jnp.einsum(f"{of_g},{of_w}->{of_x}", g, w), dw


_product.defvjp(lambda spec, x, w: (_product(spec, x, w), (x, w)), _product_backward)


def rms_norm(x, scale, eps):
    """Root-mean-square norm over the last dim (arXiv:1910.07467, equation 4), in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def rotary_frequencies(m):
    """Radians per position of the dhR/2 channel pairs (RoFormer, arXiv:2104.09864, section 3.2.2), float32.

    With rope_factor > 1, YaRN (arXiv:2309.00071, section 3.2): pairs that turn often over rope_original_T keep their
    frequency, those that turn less than once are slowed down by the factor, with a ramp between, as DeepSeek's code
    has it.
    """
    half = m.dhR // 2
    frequencies = m.rope_base ** (-np.arange(half, dtype=np.float32) / half)
    if m.rope_factor == 1:
        return frequencies
    turns = [half * math.log(m.rope_original_T / (beta * 2 * math.pi)) / math.log(m.rope_base) for beta in YARN_BETA]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), m.dhR - 1)
    slowed = np.clip((np.arange(half, dtype=np.float32) - low) / (high - low or 1e-3), 0, 1)
    return frequencies * (1 - slowed) + frequencies / m.rope_factor * slowed


def score_scale(channels, m):
    """Factor on the products of queries and keys of so many channels, with YaRN's temperature."""
    return channels**-0.5 * (0.1 * m.rope_mscale * math.log(m.rope_factor) + 1) ** 2


def rotate(x, position, m):
    """Rotary positions, of the dims of x [..., dhR] but the last, with channel i paired with i + dhR/2."""
    angle = position[..., None] * rotary_frequencies(m)[: x.shape[-1] // 2]  # [..., dhR/2]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def project_queries(x, w, position, m):
    """Scaled queries [B, H/tp, T, K + dhR] of x [B, T, Q], the last dhR channels rotated; w [Q, H/tp, K + dhR].

    What each channel's partner adds is a product with the partners' weights: to move weights is cheaper than queries.
    """
    K, scale = m.head_dim, score_scale(w.shape[-1], m)
    if w.shape[-1] == K:
        return product("btr,rhk->bhtk", x, w * scale)
    a, b = jnp.split(w[..., K:], 2, -1)
    angle = position[:, None, :, None] * np.tile(rotary_frequencies(m), 2)  # [B or 1, 1, T, dhR]
    before = [(0, 0)] * 3 + [(K, 0)]
    rotated = scale * m.rope_attention_factor**2  # the keys' too, so that they need no operation for it
    sin, cos = ((f(angle) * rotated).astype(x.dtype) for f in (jnp.sin, jnp.cos))
    partner = product("btr,rhk->bhtk", x, jnp.concatenate([-b, a], -1)) * sin
    return product("btr,rhk->bhtk", x, w) * jnp.pad(cos, before, constant_values=scale) + jnp.pad(partner, before)


def project_keys(x, k_up):
    """Keys [B, H/tp, T, K + dhR] of x [B, T, R + dhR], latents and the rotary key, which all heads share as it is.

    One product, with an identity below k_up [R, H/tp, K], so that none of its gradient is a sum over heads of its own.
    """
    R, H, K = k_up.shape
    dhR = x.shape[-1] - R
    shared = jnp.pad(jnp.eye(dhR, dtype=x.dtype), ((0, 0), (K, 0)))[:, None]  # [dhR, 1, K + dhR]
    w = jnp.concatenate([jnp.pad(k_up, ((0, 0), (0, 0), (0, dhR))), jnp.broadcast_to(shared, (dhR, H, K + dhR))])
    return product("bsr,rhk->bhsk", x, w)


def dropout(x, rate, tokens, salt):
    """Zero a share `rate` of x [B, T/tp, D], decided by each token's number in the step, so alike on every mesh."""
    if tokens.key is None:
        return x
    key = jax.random.fold_in(tokens.key, salt)
    keys = jax.vmap(jax.vmap(functools.partial(jax.random.fold_in, key)))(tokens.number)
    keep = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[-1:])))(keys)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def write_cache(cache, new, position):
    """`new` [B, T, ...] into `cache` [B, T_max, ...] from each sequence's first position on; position [B, T]."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(cache, new.astype(cache.dtype), position[:, 0])


def attention(p, x, tokens, m, cache=None):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), tensor-parallel over heads.

    x [B, T/tp, D] -> [B, T/tp, D] and the cache. Only latents are gathered over tp, or x itself where queries have no
    latent (Q = 0). The rotary key, where the layer has one, is shared by the heads. `cache` [B, T_max, R + dhR] holds
    the normalised key/value latents and rotary keys of all positions; those of x are written into it and attention
    reads from it, in the latent space where x is one token (the paper's appendix C: up-projections absorbed).
    """
    Q, R, K = m.q_latent, m.latent_dim, m.head_dim
    down = product("btd,dr->btr", x, p["down"])  # [B, T/tp, Q + R + dhR]
    if m.attention_bias:
        down = (down + p["down_bias"]).astype(x.dtype)
    q, kv, k_rope = jnp.split(down, (Q, Q + R), -1)
    latents = [rms_norm(q, p["q_norm"], m.latent_norm_eps)] if Q else []
    latents += [rms_norm(kv, p["kv_norm"], m.latent_norm_eps), rotate(k_rope, tokens.position, m)]
    latents = gather_sequence(jnp.concatenate(latents, -1), tokens.split)  # [B, T, Q + R + dhR]
    q, kv = latents[..., :Q] if Q else gather_sequence(x, tokens.split), latents[..., Q:]
    position = tokens.whole(q.shape[1])
    if cache is not None:
        kv = cache = write_cache(cache, kv, position)
    q = project_queries(q, p["q_up"], position, m)  # [B, H/tp, T, K + dhR]
    k_up, v_up = jnp.split(p["kv_up"], (K,), -1)  # [R, H/tp, K], [R, H/tp, V]
    if cache is not None and q.shape[2] == 1:  # one query is cheaper brought into the latent space than all keys out
        q = jnp.concatenate([jnp.einsum("bhtk,rhk->bhtr", q[..., :K], k_up), q[..., K:]], -1)  # [B, H/tp, 1, R + dhR]
        out = jnp.einsum("bhtr,rhv->bhtv", kernels.attend(q, kv, kv[..., :R], position, tokens.start, heads=""), v_up)
    else:
        v = product("bsr,rhv->bhsv", kv[..., :R], v_up)
        kernel = kernels.ATTENTION[m.attention if cache is None else "xla"]
        out = kernel(q, project_keys(kv, k_up), v, position, tokens.start)
    out = project_heads(out, p["out"], tokens, m)
    if m.attention_bias:  # after the sum over tp, so once
        out = (out + p["out_bias"]).astype(x.dtype)
    return out, cache


def activate(h):
    """[..., 2, F] -> SwiGLU (arXiv:2002.05202, equation 5); [..., 1, F] -> GELU. Returns [..., F]."""
    return jax.nn.silu(h[..., 0, :]) * h[..., 1, :] if h.shape[-2] == 2 else jax.nn.gelu(h[..., 0, :])


def tensor_parallel(f, x, tokens, m):
    """f(x), both [B, T/tp, D]: of all tokens, with a part of f's weights on every device of tp and so a part of its
    sum; or, with --sequence_parallel ulysses, of own tokens, with all its weights."""
    if m.sequence_parallel == "ulysses":
        return f(x)
    return scatter_sequence(f(gather_sequence(x, tokens.split)), tokens.split)


def project_heads(out, weight, tokens, m):
    """Heads' outputs [B, H/tp, T, V] back into the residual [B, T/tp, D] by weight [H/tp, V, D], or [H, V, D] with
    --sequence_parallel ulysses."""
    if m.sequence_parallel == "ulysses":
        return product("bhtv,hvd->btd", exchange_heads(out, tokens.split), weight)
    return scatter_sequence(product("bhtv,hvd->btd", out, weight), tokens.split)


def feed_forward(p, x, tokens, m):
    """x [B, T/tp, D] -> [B, T/tp, D]."""

    def mlp(x):
        h = activate(product("btd,gdf->btgf", x, p["up"]))  # [B, T, F/tp]
        return product("btf,df->btd", h, p["down"])

    return tensor_parallel(mlp, x, tokens, m)


def add_up(x):
    """Sum over the first dim, in float32: addition by addition, since CPUs are slow to reduce a leading dim."""
    return sum(x.astype(jnp.float32)).astype(x.dtype)


@jax.custom_vjp
def take_rows(x, index, inverse):
    """Rows of x [n, D] at index [m]; index n gives zeros. inverse [r, n] says where each row went (m: nowhere), so
    that the transpose is a gather too and needs no scatter-add."""
    return x.at[index].get(mode="fill", fill_value=0)


def _take_rows_forward(x, index, inverse):
    return take_rows(x, index, inverse), inverse


def _take_rows_backward(inverse, g):
    return add_up(g.at[inverse].get(mode="fill", fill_value=0)), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


class Load(NamedTuple):
    """What routing did, as sums over local tokens; adds up over microbatches, devices and steps."""

    loss: jax.Array  # [] load-balancing loss, summed over sequences (here: this device's part of T)
    tokens: jax.Array  # [E] choices that fell on each expert
    dropped: jax.Array  # [] choices that found their expert's bucket full


def no_load(*shape):
    """A `Load` of nothing, with tokens of the given shape [..., E]."""
    return Load(jnp.float32(0), jnp.zeros(shape), jnp.float32(0))


def route(p, x, m):
    """Sigmoid router with a selection bias (DeepSeek-V3, arXiv:2412.19437, equations 13 to 16), in float32.

    x [n, D] -> scores [n, E], chosen experts [n, k], their gates [n, k], which sum to routed_scaling, or without
    --norm_topk_prob are the scores times it. The bias selects only. Of the groups of experts, those k_groups count
    whose two best experts are best (section 2.1.2).
    """
    scores = jax.nn.sigmoid(jnp.dot(x.astype(jnp.float32), p["router"], precision="highest"))
    wanted = lax.stop_gradient(scores) + lax.stop_gradient(p["bias"])
    if m.n_groups > 1:
        groups = wanted.reshape(len(x), m.n_groups, -1)
        _, allowed = lax.top_k(lax.top_k(groups, 2)[0].sum(-1), m.k_groups)  # [n, k_groups]
        allowed = (allowed[..., None] == jnp.arange(m.n_groups)).any(1)  # [n, n_groups]
        wanted = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(wanted.shape)
    _, chosen = lax.top_k(wanted, m.k)
    gates = jnp.take_along_axis(scores, chosen, -1)
    scaled = m.routed_scaling * gates
    if m.norm_topk_prob:
        scaled /= gates.sum(-1, keepdims=True) + 1e-20
    return scores, chosen, scaled


def balance_loss(scores, chosen, m, split):
    """Sequence-level load-balancing loss (DeepSeek-V3, equations 17 to 20), this device's part of sum_b sum_e f P.

    scores [B, T/tp, E], chosen [B, T/tp, k]. f counts choices, so it carries no gradient and may be summed over tp.
    An even load gives 1 per sequence.
    """
    T = scores.shape[1] * (lax.axis_size("tp") if split else 1)
    f = jax.nn.one_hot(chosen, m.n_experts).sum((1, 2)) * m.n_experts / (m.k * T)  # [B, E]
    f = sum_over(lax.stop_gradient(f), "tp") if split else f
    share = scores / scores.sum(-1, keepdims=True)
    return (f * share.sum(1) / T).sum()


def routed_experts(p, x, m, split):
    """Mixture of routed experts on local tokens. x [B, T/tp, D] -> [B, T/tp, D] and `Load`.

    A token's first choice is served before anyone's second; choices beyond a bucket's capacity add nothing, so those
    tokens pass by on the residual (GShard, arXiv:2006.16668, section 2.2). Buckets are filled by index.
    """
    (B, t, D), E, k = x.shape, m.n_experts, m.k
    n = B * t
    x = x.reshape(n, D)
    scores, chosen, gates = route(p, x, m)
    C = min(n, math.ceil(m.capacity_factor * n * k / E)) if m.capacity_factor else n

    choice = chosen.T.reshape(-1)  # [k*n], all first choices first
    hot = (choice[:, None] == jnp.arange(E)).astype(jnp.int32)  # [k*n, E]
    rank = jnp.take_along_axis(jnp.cumsum(hot, 0), choice[:, None], 1)[:, 0] - 1  # place in the expert's queue
    slot = jnp.where(rank < C, choice * C + rank, E * C)  # [k*n], E*C: dropped
    entry = jnp.full(E * C, k * n).at[slot].set(jnp.arange(k * n), mode="drop")  # [E*C], k*n: empty
    source = jnp.where(entry < k * n, entry % n, n)

    buckets = take_rows(x, source, slot.reshape(k, n)).reshape(E, C, D)
    buckets = to_experts(buckets)  # [E/(dp tp), dp tp, C, D]
    # gates go along and weigh the hidden channels: so no pass, forward or back, needs the experts' outputs again
    gates = take_rows(gates.T.reshape(-1, 1).astype(x.dtype), entry, slot[None]).reshape(E, C, 1)
    h = activate(product("encd,egdf->encgf", buckets, p["experts"]["up"], keep=False))
    h = jnp.einsum("encf,enc->encf", h, to_experts(gates)[..., 0])
    out = from_experts(product("encf,edf->encd", h, p["experts"]["down"], keep=False)).reshape(E * C, D)
    out = add_up(take_rows(out, slot, entry[None]).reshape(k, B, t, D))

    loss = balance_loss(scores.reshape(B, t, E), chosen.reshape(B, t, k), m, split)
    return out, Load(loss, hot.sum(0).astype(jnp.float32), (rank >= C).sum().astype(jnp.float32))


def dense_layer(p, x, tokens, m, cache):
    """Attention with rotary positions, then a dense feed-forward; pre-norm. x [B, T/tp, D] -> x, (None, cache)."""
    with jax.named_scope("attention"):
        a, cache = attention(p["attention"], rms_norm(x, p["attention"]["norm"], m.norm_eps), tokens, m, cache)
        x = x + dropout(a, m.dropout_rate, tokens, 0)
    with jax.named_scope("feed_forward"):
        out = feed_forward(p["ffn"], rms_norm(x, p["norm"], m.norm_eps), tokens, m)
        return x + dropout(out, m.dropout_rate, tokens, 1), (None, cache)


def moe_layer(p, x, tokens, m, cache):
    """Attention, then routed and shared experts; pre-norm. x [B, T/tp, D] -> x, (Load, cache)."""
    with jax.named_scope("attention"):
        a, cache = attention(p["attention"], rms_norm(x, p["attention"]["norm"], m.norm_eps), tokens, m, cache)
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
    both = rms_norm(token, p["token_norm"], m.norm_eps), rms_norm(hidden, p["hidden_norm"], m.norm_eps)
    x, aside = moe_layer(p["layer"], jnp.einsum("cbtd,cde->bte", jnp.stack(both), p["merge"]), tokens, m, cache)
    return rms_norm(x, p["norm"], m.norm_eps), aside


def embed(top, ids, position):
    """ids [B, T] -> rows of the embedding [B, T, D]; positions are the layers' affair."""
    return top["embedding"][ids]


def latent_cache(cfg, B, T):
    """{kind: (shape, spec)} of the cache of B sequences of at most T tokens: R numbers per token and layer, dhR more
    where it rotates."""
    m = cfg.model
    R, rotated = m.latent_dim, m.latent_dim + m.dhR
    cache = dict(moe=((m.blocks, B, T, rotated if m.moe_rope else R), P("pp", "dp", None, None)))
    if m.layers_per_block > 1:
        cache["dense"] = (m.blocks, m.layers_per_block - 1, B, T, rotated), P("pp", None, "dp", None, None)
    if m.first_layers:
        cache["first"] = (m.first_layers, B, T, rotated), P(None, "dp", None, None)
    return cache


# --- Stage and pipeline -----------------------------------------------------------------------------------------


REMAT = {
    "none": lambda f: f,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("product")),
    "full": jax.checkpoint,
}


def layer_params(params, cfg):
    """{kind: `Weights`} of this device's layers: gathered here, once, unless fsdp is full."""
    table, dtype = param_table(cfg), jnp.dtype(cfg.model.model_dtype)
    if cfg.model.fsdp == "full":
        table, dtype = table_map(lambda p: p._replace(gather=(), expert=0), table), jnp.float32
    kinds = [kind for kind in ARCHITECTURES[cfg.model.architecture].layers if kind in params]
    return {kind: gather(params[kind], table[kind], dtype) for kind in kinds}


def top_params(params, cfg):
    """The parameters outside layers, gathered: embedding, head (which may be the embedding), norm and what
    `Architecture.embed` needs."""
    layers, table = ARCHITECTURES[cfg.model.architecture].layers, param_table(cfg)
    names = [name for name in table if name not in layers]
    params, table = ({name: tree[name] for name in names} for tree in (params, table))
    top, _ = take(gather(params, table, jnp.dtype(cfg.model.model_dtype)), ())
    return {"head": top["embedding"], **top}


def make_layer(cfg, remat):
    """`layer(kind, weights, index, number, x, tokens, cache)`: the layer at `index` of the stack of its kind, the
    `number`th of the model as far as dropout goes. Returns x, what else the layer returns, and the stack to go on with.
    """
    m, table, layers = cfg.model, param_table(cfg), ARCHITECTURES[cfg.model.architecture].layers
    wrap, dtype = REMAT[m.remat if remat else "none"], jnp.dtype(m.model_dtype)

    def layer(kind, weights, index, number, x, tokens, cache):
        own = tokens if tokens.key is None else tokens._replace(key=jax.random.fold_in(tokens.key, number))

        def run(weights, x, cache):
            p, grad = take(weights, index)
            if m.fsdp == "full":
                p, _ = take(gather(p, table[kind], dtype), ())
            return *layers[kind](p, x, own, m, cache), grad

        x, aside, grad = wrap(run)(weights, x, cache)
        return x, aside, Weights(weights.value, grad)

    return layer


def make_dense(cfg, kind, n, remat):
    """`dense(weights, block, first, x, tokens, cache)`: n dense layers numbered from `first`, at (*block, 0), .. of
    their stack, on x [B, T/tp, D]; returns x, the cache and the stack to go on with."""
    layer = make_layer(cfg, remat)

    def dense(weights, block, first, x, tokens, cache):
        def one(carry, scanned):
            x, grad = carry
            i, cache = scanned
            x, (_, cache), new = layer(kind, Weights(weights.value, grad), (*block, i), first + i, x, tokens, cache)
            return (x, new.grad), cache

        (x, grad), cache = lax.scan(one, (x, weights.grad), (jnp.arange(n), cache))
        return x, cache, Weights(weights.value, grad)

    return dense


def make_stage(cfg, remat=True):
    """`stage(weights, x, tokens, cache, turn)`: this device's blocks, of round `turn` with --pp_interleave, on x
    [B, T/tp, D], the same for training and decoding.

    Returns x, (`Load`, with tokens [blocks, E] and the rest summed; the cache, empty where none was given) and the
    weights, which come from `layer_params`, to go on with.
    """
    m, rounds, L, layer = cfg.model, cfg.run.pp_interleave, cfg.model.layers_per_block, make_layer(cfg, remat)
    dense, last = make_dense(cfg, "dense", L - 1, remat), ARCHITECTURES[m.architecture].last

    def stage(weights, x, tokens, cache=None, turn=0):
        S = lax.axis_size("pp")
        blocks = m.blocks // (rounds * S)

        def block(carry, scanned):
            x, grads = carry
            i, cache = scanned
            number, new = ((turn * S + lax.axis_index("pp")) * blocks + i) * L, {}
            at = (turn, i) if rounds > 1 else (i,)
            own = {kind: Weights(weights[kind].value, grad) for kind, grad in grads.items()}
            if L > 1:
                x, new["dense"], own["dense"] = dense(own["dense"], at, number, x, tokens, cache.get("dense"))
            x, (load, new[last]), own[last] = layer(last, own[last], at, number + L - 1, x, tokens, cache.get(last))
            return (x, {kind: w.grad for kind, w in own.items()}), (load, new)

        grads = {kind: weights[kind].grad for kind in ("dense", last) if kind in weights}
        (x, grads), (load, cache) = lax.scan(block, (x, grads), (jnp.arange(blocks), cache or {}))
        weights = weights | {kind: Weights(weights[kind].value, grad) for kind, grad in grads.items()}
        return x, (Load(load.loss.sum(), load.tokens, load.dropped.sum()), cache), weights

    return stage


def pipeline(stage, inputs, state, rounds=1):
    """GPipe (arXiv:1811.06965, section 2.3): M microbatches through S stages in M + S - 1 ticks; in `rounds` of them
    (arXiv:2104.04473, section 2.2, without its order of forward and backward passes) in rounds x M + S - 1, each as
    much shorter.

    Warm-up: stage s idles (on zeros) for s ticks; steady; cool-down: S - 1 - s ticks. inputs [M, ...] are known to
    every stage. `stage(x, state, round, m, valid)` returns y and the state to carry on; it must leave the state as it
    was where `valid` is false. Returns outputs [M, ...], meaningful on the last stage only, and the state.
    """
    S, M, s = lax.axis_size("pp"), len(inputs), lax.axis_index("pp")

    def tick(carry, i):
        x, inputs, state = carry
        if rounds > 1:  # what comes to stage 0 from the last one waits until its next round
            back = jnp.maximum(i - S, 0) % M
            inputs = inputs.at[back].set(jnp.where(i >= S, x, inputs[back]))
        x = jnp.where(s == 0, inputs[i % M if rounds > 1 else jnp.minimum(i, M - 1)], x)
        turn = jnp.clip(i - s, 0, rounds * M - 1)
        y, state = stage(x, state, turn // M, turn % M, (i >= s) & (i - s < rounds * M))
        return (next_stage(y), inputs, state), y

    (_, _, state), outputs = lax.scan(tick, (jnp.zeros_like(inputs[0]), inputs, state), jnp.arange(rounds * M + S - 1))
    return outputs[-M:], state


# --- Loss -------------------------------------------------------------------------------------------------------


def for_devices(cfg, mesh):
    """`cfg` with the attention kernel that auto stands for on the devices of `mesh`."""
    best = kernels.BEST_ATTENTION[mesh.devices.flat[0].platform]
    if cfg.model.attention != "auto":
        return cfg
    return with_model(cfg, attention="blockwise" if best == "splash" and cfg.model.T % 128 else best)


class Metrics(NamedTuple):
    """Of one batch over the whole mesh."""

    cross_entropy: jax.Array  # [] nats per token
    mtp: jax.Array  # [] nats per token of multi-token prediction, mean over its depths
    load_loss: jax.Array  # [] load-balancing loss summed over mixture-of-experts layers, mean over sequences
    load: dict  # {"moe": [blocks, E], "mtp": [mtp_depth, E]} choices that fell on each expert; dims as in param_table
    dropped: jax.Array  # [] share of the choices that found their expert's bucket full


def make_forward(cfg, train):
    """`forward(params, ids, tokens_of)` on local shapes: ids int32 [M/S, B/dp, T/tp], tokens_of(i) the `Tokens` of
    microbatch i counted over all stages.

    Returns final hidden states [M/S, B/dp, T/tp, D], normalised for the head; the stage's `Load`; and the gathered
    parameters outside layers and in layers.
    """
    m, arch, rounds = cfg.model, ARCHITECTURES[cfg.model.architecture], cfg.run.pp_interleave
    stage = make_stage(cfg, remat=train)
    first_layers = make_dense(cfg, "first", m.first_layers, remat=train)

    def forward(params, ids, tokens_of):
        M, layers = len(ids), layer_params(params, cfg)
        own = lax.axis_index("pp") * M + jnp.arange(M)

        def enter(ids, microbatch):
            tokens = tokens_of(microbatch)
            return dropout(arch.embed(top, ids, tokens.within_document()), m.dropout_rate, tokens, 2)

        def enter_layers(grad, scanned):
            x, microbatch = scanned
            x, _, new = first_layers(Weights(layers["first"].value, grad), (), m.blocks * m.layers_per_block, x,
                                     tokens_of(microbatch), None)  # fmt: skip
            return new.grad, x

        def run_stage(x, state, turn, microbatch, valid):
            load, grads = state
            weights = {kind: Weights(layers[kind].value, grad) for kind, grad in grads.items()}
            y, (new, _), weights = stage(weights, x, tokens_of(microbatch), turn=turn)
            grads = {kind: w.grad for kind, w in weights.items()}
            new = jax.tree.map(lambda n: jnp.where(valid, n, 0), new)
            load = Load(load.loss + new.loss, load.tokens.at[turn].add(new.tokens), load.dropped + new.dropped)
            return y, (load, grads)

        with jax.named_scope("embed"):
            top = top_params(params, cfg)
            x = jax.vmap(enter)(ids, own)
            if m.first_layers:
                _, x = lax.scan(enter_layers, layers["first"].grad, (x, own))
            x = to_stages(x)
        grads = {kind: w.grad for kind, w in layers.items() if kind in ("dense", arch.last)}
        load = no_load(rounds, m.blocks // (rounds * lax.axis_size("pp")), m.n_experts)
        x, (load, _) = pipeline(run_stage, x, (load, grads), rounds)  # [M, B/dp, T/tp, D]
        load = load if rounds > 1 else load._replace(tokens=load.tokens[0])
        return arch.norm(from_last_stage(x), top["norm"], m.norm_eps), load, top, layers

    return forward


def make_loss(cfg, mesh, train):
    """`loss(params, tokens, targets, key, first)` on global arrays, to be differentiated from outside.

    tokens and targets int32 [M, B, T], sharded as BATCH_SPEC[1:]; key of dropout; first: number, within the training
    step, of the batch's first sequence. Returns the scalar loss, float32, and `Metrics`: cross-entropy + alpha x
    load-balancing loss + mtp_weight x multi-token prediction's cross-entropy. Without `train`: no dropout and no
    multi-token prediction.
    """
    cfg = for_devices(cfg, mesh)
    m, o, table, spec = cfg.model, cfg.optimizer, param_table(cfg), P(*BATCH_SPEC[1:])
    forward, layer, depths = make_forward(cfg, train), make_layer(cfg, train), m.mtp_depth if train else 0
    chunk = kernels.LOSS_CHUNK[mesh.devices.flat[0].platform]

    def predict_further(x, targets, tokens_of, top, layers):
        """Sum of the cross-entropies of the tokens after the next (DeepSeek-V3, section 2.2), and `Load` [depths, E]:
        depth d predicts from the hidden states of the depth before and the tokens d ahead."""
        M, B, t = targets.shape
        whole = gather_sequence(targets.reshape(M * B, t), True)
        whole = jnp.pad(whole, ((0, 0), (0, depths)), constant_values=-1)  # [M*B, T + depths]
        own, total, loads, weights = lax.axis_index("pp") * M + jnp.arange(M), 0, [], layers["mtp"]
        for depth in range(depths):
            number = m.blocks * m.layers_per_block + m.first_layers + depth
            ahead = lax.dynamic_slice_in_dim(whole, lax.axis_index("tp") * t + depth, t + 1, 1).reshape(M, B, t + 1)

            def one(weights, scanned):
                x, ids, i = scanned
                token = embed(top, jnp.maximum(ids, 0), None)
                at = (depth,)  # noqa: B023
                x, (load, _), weights = layer("mtp", weights, at, number, (x, token), tokens_of(i), None)  # noqa: B023
                return weights, (x, load)

            weights, (x, load) = lax.scan(one, weights, (x, ahead[..., :-1], own))
            loads.append(jax.tree.map(lambda v: v.sum(0), load))
            total += kernels.cross_entropy(x, top["head"], ahead[..., 1:], m.vocab_size, chunk)
        return total, jax.tree.map(lambda *v: jnp.stack(v), *loads)

    def local_loss(params, ids, targets, key, first):
        M, B, t = ids.shape  # [M/S, B/dp, T/tp]
        S, dp, tp = lax.axis_size("pp"), lax.axis_size("dp"), lax.axis_size("tp")
        position = (lax.axis_index("tp") * t + jnp.arange(t))[None]
        sequence, start = lax.axis_index("dp") * B + jnp.arange(B), document_starts(ids, m)

        def tokens_of(microbatch):
            if not (train and m.dropout_rate):
                return Tokens(position, start=start(microbatch))
            number = ((first + microbatch * B * dp + sequence)[:, None] * t * tp + position).astype(jnp.uint32)
            return Tokens(position, key=key, number=number, start=start(microbatch))

        x, load, top, layers = forward(params, ids, tokens_of)
        with jax.named_scope("head"):
            nll = kernels.cross_entropy(x, top["head"], targets, m.vocab_size, chunk)
        loads, mtp = dict(moe=load), jnp.float32(0)
        if depths:
            with jax.named_scope("mtp"):
                mtp, loads["mtp"] = predict_further(x, targets, tokens_of, top, layers)
        sequences = M * S * B * dp
        nll, mtp = nll / (sequences * t * tp), mtp / (sequences * t * tp * max(1, depths))
        balance = sum(load.loss.sum() for load in loads.values()) / sequences
        loss = sum_over(nll + o.alpha * balance + o.mtp_weight * mtp, AXES)
        nll, mtp, balance, loads = lax.stop_gradient((nll, mtp, balance, loads))
        counts = {kind: sum_over(load.tokens, SPREAD[kind]) for kind, load in loads.items()}
        choices = sequences * t * tp * m.k * (m.blocks + depths)
        dropped = sum_over(sum(load.dropped.sum() for load in loads.values()), AXES) / max(1, choices)
        return loss, Metrics(sum_over(nll, AXES), sum_over(mtp, AXES), sum_over(balance, AXES), counts, dropped)

    loads = {"moe": P("pp") if cfg.run.pp_interleave == 1 else P(None, "pp")} | ({"mtp": P()} if depths else {})
    # check_vma off: what out_specs calls replicated is so by the sums above, and tests hold gradients to one device's
    return jax.shard_map(
        local_loss, mesh=mesh, in_specs=(table_map(lambda p: p.spec, table), spec, spec, P(), P()),
        out_specs=(P(), Metrics(P(), P(), P(), loads, P())), check_vma=False,
    )  # fmt: skip


def dropless(cfg):
    """`cfg` without a capacity: for inference, where no token may be dropped."""
    return with_model(cfg, capacity_factor=0.0)


def make_score(cfg, mesh):
    """`score(params, tokens, targets)` on global arrays: -log p of every target, float32 [M, B, T] like the int32
    inputs, sharded as BATCH_SPEC[1:]; 0 where the target is negative. Nothing is dropped."""
    cfg = for_devices(dropless(cfg), mesh)
    m, spec, forward = cfg.model, P(*BATCH_SPEC[1:]), make_forward(cfg, train=False)
    chunk = kernels.LOSS_CHUNK[mesh.devices.flat[0].platform]

    def local_score(params, ids, targets):
        position = (lax.axis_index("tp") * ids.shape[-1] + jnp.arange(ids.shape[-1]))[None]
        start = document_starts(ids, m)
        x, _, top, _ = forward(params, ids, lambda microbatch: Tokens(position, start=start(microbatch)))
        return kernels.token_losses(x, top["head"], targets, m.vocab_size, chunk)

    specs = table_map(lambda p: p.spec, param_table(cfg))
    return jax.shard_map(local_score, mesh=mesh, in_specs=(specs, spec, spec), out_specs=spec, check_vma=False)


def update_router_bias(params, load, rate):
    """Auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1): each router bias moves by `rate` towards an even
    load. load {kind: [layers, E]}, of one training step, dims as in param_table."""

    def moved(layer, load):
        return {**layer, "bias": layer["bias"] + rate * jnp.sign(load.mean(-1, keepdims=True) - load)}

    out = dict(params)
    if "moe" in params:
        out["moe"] = moved(params["moe"], load["moe"])
    if "mtp" in params:
        out["mtp"] = {**params["mtp"], "layer": moved(params["mtp"]["layer"], load["mtp"])}
    return out


# --- GPT-2's layers ---------------------------------------------------------------------------------------------


def gpt2_table(cfg):
    """The parameter table of GPT-2. Weights begin as in its paper, section 2.3, and code: normal with a deviation of
    0.02, those back into the residual of 0.02 / sqrt(2 x layers); biases begin at 0, scales of norms at 1."""
    m, W, tp = cfg.model, functools.partial(matrix, cfg), functools.partial(over_tp, cfg)
    D, H, K, F, std = m.model_dimension, m.n_head, m.head_dim, m.ffn_width, 0.02
    back = std / math.sqrt(2 * m.blocks)

    def norm():
        return dict(scale=scale_param(D), bias=bias_param(D))

    layer = dict(
        attention_norm=norm(),
        qkv=W((D, 3, H, K), std, fixed={2: "tp"}),
        qkv_bias=bias_param(3, H, K, spec=P(None, "tp", None)),
        out=W((H, K, D), back, fsdp=2, **tp(0)),
        out_bias=bias_param(D),
        norm=norm(),
        up=W((D, F), std, **tp(1)),
        up_bias=bias_param(F, spec=P("tp" if m.sequence_parallel == "megatron" else None)),
        down=W((F, D), back, fsdp=1, **tp(0)),
        down_bias=bias_param(D),
    )
    embedding = W((m.padded_vocab, D), std, over=AXES, rows=m.vocab_size)
    positions = W((m.T, D), std, over=AXES, active=1 / m.T)
    return dict(embedding=embedding, positions=positions, gpt2=stack(layer, m.blocks), norm=norm())


def layer_norm(x, p, eps):
    """Norm by mean and deviation over the last dim (arXiv:1607.06450, equation 3), in float32."""
    x32 = x.astype(jnp.float32)
    x32 -= x32.mean(-1, keepdims=True)
    normal = x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normal * p["scale"] + p["bias"]).astype(x.dtype)


def gpt2_layer(p, x, tokens, m, cache=None):
    """GPT-2's layer (Radford et al., 2019, section 2.3): multi-head attention, then a GELU feed-forward; pre-norm.

    x [B, T/tp, D] -> x, (an empty Load, cache). `cache` [B, T_max, 2, H/tp, K] holds keys and values.
    """
    with jax.named_scope("attention"):
        h = gather_sequence(layer_norm(x, p["attention_norm"], m.norm_eps), tokens.split)  # [B, T, D]
        qkv = product("btd,dchk->bchtk", h, p["qkv"]) + p["qkv_bias"][:, :, None]  # [B, 3, H/tp, T, K]
        q, kv = jnp.split(qkv.astype(x.dtype), (1,), 1)
        position, kernel = tokens.whole(h.shape[1]), m.attention
        if cache is not None:
            cache, kernel = write_cache(cache, jnp.moveaxis(kv, 3, 1), position), "xla"  # [B, T_max, 2, H/tp, K]
            kv = jnp.moveaxis(cache, 1, 3)
        out = kernels.ATTENTION[kernel](q[:, 0] * m.head_dim**-0.5, kv[:, 0], kv[:, 1], position, tokens.start)
        out = project_heads(out, p["out"], tokens, m) + p["out_bias"]
        x = x + dropout(out.astype(x.dtype), m.dropout_rate, tokens, 0)
    with jax.named_scope("feed_forward"):

        def mlp(h):
            h = jax.nn.gelu(product("btd,df->btf", h, p["up"]) + p["up_bias"]).astype(x.dtype)  # [B, T, F/tp]
            return product("btf,fd->btd", h, p["down"])

        out = tensor_parallel(mlp, layer_norm(x, p["norm"], m.norm_eps), tokens, m) + p["down_bias"]
        return x + dropout(out.astype(x.dtype), m.dropout_rate, tokens, 1), (no_load(0), cache)


def gpt2_embed(top, ids, position):
    """ids [B, T] at position [B or 1, T] -> rows of the embedding and of the learned positions, added, [B, T, D]."""
    return top["embedding"][ids] + top["positions"][position]


def key_value_cache(cfg, B, T):
    """{kind: (shape, spec)} of the cache of B sequences of at most T tokens: 2 x D numbers per token and layer."""
    m = cfg.model
    return dict(gpt2=((m.blocks, B, T, 2, m.n_head, m.head_dim), P("pp", "dp", None, None, "tp", None)))


# --- Architectures ----------------------------------------------------------------------------------------------


class Architecture(NamedTuple):
    """What a family of models brings along; all else is common to them."""

    table: Callable  # cfg -> parameter table, but for a head of its own
    layers: dict  # {kind of layer, as in the table: function}
    last: str  # kind of the layer that ends a block; those before it are "dense"
    embed: Callable  # (parameters outside layers, ids [B, T], position [B or 1, T]) -> [B, T, D]
    norm: Callable  # (x, parameters, eps) -> x, before the head
    cache: Callable  # (cfg, B, T) -> {kind of layer: (shape, spec)}


ARCHITECTURES = {
    "deepseek": Architecture(deepseek_table, dict(first=dense_layer, dense=dense_layer, moe=moe_layer, mtp=mtp_layer),
                             "moe", embed, rms_norm, latent_cache),
    "gpt2": Architecture(gpt2_table, dict(gpt2=gpt2_layer), "gpt2", gpt2_embed, layer_norm, key_value_cache),
}  # fmt: skip
