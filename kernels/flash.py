"""Causal attention for NVIDIA GPUs that never writes scores to memory: FlashAttention-2 (arXiv:2307.08691), written in
Pallas and compiled by Triton.

Each program of a kernel computes one head of one sequence. It either owns a block of queries and loops over the keys
that they see, or owns a block of keys and loops over the queries that see them. Scores exist for one pair of blocks at
a time, in registers. `kernels/attention.py: attend` computes the same in plain operations.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

LOG2E = math.log2(math.e)  # GPUs compute 2^x in hardware; e^x is 2^(LOG2E x)
# The score of a key that a query does not see. It is finite, since -inf - -inf would be NaN.
UNSEEN = -1e30
LEAST = 16  # the fewest channels that Triton can multiply; arrays are padded to a multiple
OWN = 64  # rows that a program owns; T must be a multiple


class Blocks(NamedTuple):
    """The sizes of a kernel's blocks, and how a GPU runs them."""

    walked: int  # rows in each block that a program loops over; divides OWN
    warps: int = 4
    stages: int = 2  # blocks in flight, so that loads overlap with products


# The fastest on an H200 (dev/log.md, 2026-11-26). Blocks are smaller where a key and a value have more than WIDE
# channels together, and in float32: larger ones would not fit in registers.
BLOCKS = Blocks(64)
WIDE, WIDE_BACKWARD = 192, Blocks(32, stages=3)
FLOAT32 = Blocks(16, warps=8)
# Most channels of a key and a value together, DeepSeek-V3's 192 + 128: more would not fit in the shared memory of an
# A100, 163 KB.
MOST = 320
# CUDA's compute capabilities of the GPUs that the kernels were compiled for: A100; H100 and H200; B200. Other GPUs have
# less shared memory, or are not NVIDIA's.
CAPABILITIES = ("8.0", "9.0", "10.0")


def block_sizes(channels, dtype):
    """`Blocks` of the forward and of the backward kernels. channels: those of a key and a value together."""
    if dtype == jnp.float32:
        return FLOAT32, FLOAT32
    return BLOCKS, WIDE_BACKWARD if channels > WIDE else BLOCKS


def pieces(channels):
    """Slices of the channels whose widths are powers of two, the only ones that Triton has: 192 channels are 0:128 and
    128:192."""
    spans, begin = [], 0
    while begin < channels:
        width = 1 << (channels - begin).bit_length() - 1
        spans.append(pl.ds(begin, width))
        begin += width
    return spans


def load_rows(ref, rows):
    """The rows of ref [T, channels], one array for each of its `pieces`."""
    return [ref[rows, span] for span in pieces(ref.shape[-1])]


def store_rows(ref, rows, arrays):
    """Write arrays, one for each of the `pieces`, to the rows of ref [T, channels], in its type."""
    for span, array in zip(pieces(ref.shape[-1]), arrays, strict=True):
        ref[rows, span] = array.astype(ref.dtype)


def zeros(rows, ref):
    """Sums in float32 that start at 0, one array for each of the `pieces` of ref."""
    return [jnp.zeros((rows, span.size), jnp.float32) for span in pieces(ref.shape[-1])]


def product(a, b):
    """The matrix product a b, summed in float32. Operands in float32 are not rounded to TF32."""
    return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)


def pairs(a, b):
    """Products of every row of a with every row of b, both in `pieces`: float32 [rows of a, rows of b]."""
    parts = [product(x, y.T) for x, y in zip(a, b, strict=True)]
    return functools.reduce(jnp.add, parts)


def add_product(sums, a, b):
    """sums + a b, where sums and b are in `pieces`."""
    a = a.astype(b[0].dtype)
    return [total + product(a, piece) for total, piece in zip(sums, b, strict=True)]


def hide(scores, query, key, start):
    """`scores`, replaced by UNSEEN where the query does not see the key. query, key: positions; start: of the query's
    document, or None. All broadcast to the scores."""
    seen = key <= query
    if start is not None:
        seen &= key >= start
    return jnp.where(seen, scores, UNSEEN)


def own_queries(start_ref):
    """The queries that a program owns: their rows, their positions [OWN], and their `start` [OWN, 1] or None.

    Later queries see more keys, so the last block of queries is computed first. Short programs then fill the GPU at the
    end, where a long one would keep it waiting."""
    block = pl.num_programs(0) - 1 - pl.program_id(0)
    rows = pl.ds(block * OWN, OWN)
    position = rows.start + jnp.arange(OWN)
    start = None if start_ref is None else start_ref[rows][:, None]
    return rows, position, start


def seen_scores(q, k, first_key, position, start, masked):
    """Products of queries and keys in `pieces`. With `masked`, keys that a query does not see are hidden."""
    scores = pairs(q, k)
    if not masked:
        return scores
    key = first_key + jnp.arange(scores.shape[1])
    return hide(scores, position[:, None], key[None], start)


# Both functions loop over the blocks on the diagonal first: their number is fixed and at least one. The order matters
# on a Hopper GPU: after a loop that may have no iteration, its assembler would let no two products overlap.


def over_keys(step, carry, first, start_ref, blocks):
    """The carry after step(block of keys, carry, masked) for all blocks that the OWN queries from `first` on see."""
    diagonal = first // blocks.walked
    end = diagonal + OWN // blocks.walked
    documents = start_ref is not None
    begin = start_ref[first] // blocks.walked if documents else 0
    carry = lax.fori_loop(diagonal, end, functools.partial(step, masked=True), carry)
    return lax.fori_loop(begin, diagonal, functools.partial(step, masked=documents), carry)


def over_queries(step, carry, first, last, blocks, documents):
    """The carry after step(block of queries, carry, masked) for all blocks before `last` that see the OWN keys from
    `first` on."""
    diagonal = first // blocks.walked
    after = diagonal + OWN // blocks.walked
    end = pl.cdiv(last, blocks.walked)
    carry = lax.fori_loop(diagonal, after, functools.partial(step, masked=True), carry)
    return lax.fori_loop(after, end, functools.partial(step, masked=documents), carry)


# --- Kernels ------------------------------------------------------------------------------------------------------
# Each ref is one head's part of an array: q, k and their gradients [T, K]; v, the output, its gradient g and that of v
# [T, K_v]; start (or None), lse and inner [T]. For each query, lse is log2 of the sum of exp(scores), from which the
# backward pass recomputes the weights, and inner is the inner product of its output and g.


def flash_forward(q_ref, k_ref, v_ref, start_ref, out_ref, lse_ref, *, blocks):
    """Compute a block of the output and of lse (algorithm 1): a softmax over keys that come block by block. When a
    block has a larger score, the sums so far are scaled down."""
    rows, position, start = own_queries(start_ref)
    q = load_rows(q_ref, rows)

    def step(j, carry, masked):
        largest, total, out = carry
        keys = pl.ds(j * blocks.walked, blocks.walked)
        scores = seen_scores(q, load_rows(k_ref, keys), keys.start, position, start, masked)
        now = jnp.maximum(largest, LOG2E * scores.max(1))
        weights = jnp.exp2(LOG2E * scores - now[:, None])
        decay = jnp.exp2(largest - now)
        out = [decay[:, None] * piece for piece in out]
        out = add_product(out, weights, load_rows(v_ref, keys))
        return now, decay * total + weights.sum(1), out

    largest = jnp.full(OWN, UNSEEN, jnp.float32)
    total = jnp.zeros(OWN, jnp.float32)
    carry = largest, total, zeros(OWN, v_ref)
    largest, total, out = over_keys(step, carry, rows.start, start_ref, blocks)
    store_rows(out_ref, rows, [piece / total[:, None] for piece in out])
    lse_ref[rows] = largest + jnp.log2(total)


def flash_backward_queries(
    q_ref, k_ref, v_ref, start_ref, g_ref, lse_ref, inner_ref, dq_ref, *, blocks
):
    """Compute a block of the gradient of the queries (algorithm 2)."""
    rows, position, start = own_queries(start_ref)
    q, g = load_rows(q_ref, rows), load_rows(g_ref, rows)
    lse, inner = lse_ref[rows][:, None], inner_ref[rows][:, None]

    def step(j, dq, masked):
        keys = pl.ds(j * blocks.walked, blocks.walked)
        k = load_rows(k_ref, keys)
        scores = seen_scores(q, k, keys.start, position, start, masked)
        weights = jnp.exp2(LOG2E * scores - lse)
        d_scores = weights * (pairs(g, load_rows(v_ref, keys)) - inner)
        return add_product(dq, d_scores, k)

    dq = over_keys(step, zeros(OWN, q_ref), rows.start, start_ref, blocks)
    store_rows(dq_ref, rows, dq)


def flash_backward_keys(
    q_ref, k_ref, v_ref, start_ref, g_ref, lse_ref, inner_ref, end_ref, dk_ref, dv_ref, *, blocks
):
    """Compute a block of the gradients of keys and values (algorithm 2). Scores are transposed: a row for each key. end
    [T / OWN], or None: the position after the last query that sees any key of each block."""
    block = pl.program_id(0)
    rows = pl.ds(block * OWN, OWN)
    position = rows.start + jnp.arange(OWN)
    k, v = load_rows(k_ref, rows), load_rows(v_ref, rows)
    documents = start_ref is not None

    def step(i, carry, masked):
        dk, dv = carry
        queries = pl.ds(i * blocks.walked, blocks.walked)
        q, g = load_rows(q_ref, queries), load_rows(g_ref, queries)
        scores = pairs(k, q)
        if masked:
            query = queries.start + jnp.arange(blocks.walked)
            start = start_ref[queries][None] if documents else None
            scores = hide(scores, query[None], position[:, None], start)
        weights = jnp.exp2(LOG2E * scores - lse_ref[queries][None])
        d_scores = weights * (pairs(v, g) - inner_ref[queries][None])
        return add_product(dk, d_scores, q), add_product(dv, weights, g)

    carry = zeros(OWN, k_ref), zeros(OWN, v_ref)
    last = end_ref[block] if documents else q_ref.shape[0]
    dk, dv = over_queries(step, carry, rows.start, last, blocks, documents)
    store_rows(dk_ref, rows, dk)
    store_rows(dv_ref, rows, dv)


# --- Calls --------------------------------------------------------------------------------------------------------
# Arrays are [B, T, H, channels] here, the layout in which products with weights write them: XLA need not transpose any.


def of_a_head(array, H):
    """The part of an array that the program of one of H heads sees: of [B, T, H or fewer heads, channels], [B, H, T] or
    [B, n]. Where an array has fewer heads, several programs share one."""
    if array is None:
        return None
    if array.ndim == 2:
        return pl.BlockSpec((None, array.shape[1]), lambda t, h, b: (b, 0))
    if array.ndim == 3:
        return pl.BlockSpec((None, None, array.shape[2]), lambda t, h, b: (b, h, 0))
    _, T, heads, channels = array.shape
    return pl.BlockSpec((None, T, None, channels), lambda t, h, b: (b, 0, h // (H // heads), 0))


def call(kernel, blocks, inputs, outputs):
    """Run a kernel for all blocks, heads and sequences. The first input is q. Returns arrays of the shapes of
    `outputs`."""
    from jax.experimental.pallas import triton  # here: not every platform's jax has it

    B, T, H, _ = inputs[0].shape
    return pl.pallas_call(
        functools.partial(kernel, blocks=blocks),
        grid=(T // OWN, H, B),
        in_specs=[of_a_head(array, H) for array in inputs],
        out_specs=[of_a_head(array, H) for array in outputs],
        out_shape=outputs,
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        name=kernel.__name__,
    )(*inputs)


def like(array, H, dtype=None):
    """The shape [B, T, H, channels] of `array`, but with H heads, in its type or another one."""
    B, T, _, channels = array.shape
    return jax.ShapeDtypeStruct((B, T, H, channels), dtype or array.dtype)


@jax.custom_vjp
def flash(q, k, v, start):
    """`flash_attention` with arrays [B, T, H or H_kv, channels], whose channels are a multiple of LEAST."""
    out, _ = _flash_forward(q, k, v, start)
    return out


def _flash_forward(q, k, v, start):
    B, T, H, K = q.shape
    blocks, _ = block_sizes(K + v.shape[-1], q.dtype)
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    out, lse = call(flash_forward, blocks, (q, k, v, start), (like(v, H), lse))
    out, lse = checkpoint_name((out, lse), "kernel")
    return out, (q, k, v, start, out, lse)


def _flash_backward(kept, g):
    q, k, v, start, out, lse = kept
    _, blocks = block_sizes(q.shape[-1] + v.shape[-1], q.dtype)
    inner = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), -1).swapaxes(1, 2)
    inputs = q, k, v, start, g, lse, inner
    H, H_kv = q.shape[2], k.shape[2]
    (dq,) = call(flash_backward_queries, blocks, inputs, (like(q, H),))
    end = None if start is None else last_queries(start)
    # the sum over the heads that share a key is in float32
    dtype = None if H == H_kv else jnp.float32
    outputs = like(k, H, dtype), like(v, H, dtype)
    dk, dv = call(flash_backward_keys, blocks, (*inputs, end), outputs)
    return dq, sum_groups(dk, k), sum_groups(dv, v), None


def sum_groups(gradients, array):
    """Gradients [B, T, H, channels] of each head of the queries -> those of `array`, each of whose heads is shared by a
    group of them."""
    if gradients.shape == array.shape:
        return gradients
    B, T, heads, channels = array.shape
    return gradients.reshape(B, T, heads, -1, channels).sum(3).astype(array.dtype)


flash.defvjp(_flash_forward, _flash_backward)


def last_queries(start):
    """[B, T / OWN]: the position after the last query that sees any key of a block. `start` [B, T] never decreases."""
    last_key = jnp.arange(OWN - 1, start.shape[1], OWN)
    return jnp.sum(start[:, None] <= last_key[:, None], -1, dtype=jnp.int32)


def flash_attention(q, k, v, position, start):
    """`attention.attend` of whole sequences, in any --model_dtype. T is a multiple of OWN; `start` never decreases."""

    def padded(array):
        array = array.swapaxes(1, 2)
        return jnp.pad(array, [(0, 0)] * 3 + [(0, -array.shape[-1] % LEAST)])

    out = flash(padded(q), padded(k), padded(v), start)
    return out[..., : v.shape[-1]].swapaxes(1, 2)
