"""Attention's kernels: causal attention as one device computes it, whatever the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

# The kernel that --attention auto stands for.
BEST_ATTENTION = {"cpu": "blockwise", "gpu": "blockwise", "tpu": "splash"}


def attend(q, k, v, position, start, heads="h"):
    """Causal attention of scaled queries q [B, H/tp, T, K] at `position` [B or 1, T], back to `start` [B, T] if given.

    Keys and values stand at positions 0.. of k [B, H/tp, S, K] and v [B, H/tp, S, V], without the dim of the heads
    where all share them (`heads` ""). Returns [B, H/tp, T, V].
    """
    scores = jnp.einsum(f"bhtk,b{heads}sk->bhts", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[-2]) <= position[:, None, :, None]  # [B or 1, 1, T, S]
    if start is not None:
        seen &= jnp.arange(k.shape[-2]) >= start[:, None, :, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    # softmax, its division put off until after the sum over s: one pass less over T x S
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.einsum(
        f"bhts,b{heads}sv->bhtv", weights.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def blockwise_attention(q, k, v, position, start):
    """`attend` of whole sequences in blocks of queries, each to the keys up to its end: little more than half of the
    scores are computed, and one block's stand in memory."""
    T = q.shape[2]
    size = next(T // n for n in (8, 4, 2, 1) if T % n == 0 and (T // n >= 64 or n == 1))

    def block(end):
        rows = slice(end - size, end)
        return attend(
            q[:, :, rows],
            k[:, :, :end],
            v[:, :, :end],
            position[:, rows],
            None if start is None else start[:, rows],
        )

    return jnp.concatenate([block(end) for end in range(size, T + 1, size)], 2)


def splash_attention(q, k, v, position, start):
    """`attend` of whole sequences by a kernel for TPUs that never writes scores to memory (FlashAttention-2,
    arXiv:2307.08691). T must be a multiple of 128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    H, T = q.shape[1:3]
    block = next(b for b in (512, 256, 128) if T % b == 0)
    sizes = {
        f.name: block for f in dataclasses.fields(splash.BlockSizes) if f.name.startswith("block")
    }
    layouts = dict.fromkeys(
        ("q_layout", "k_layout", "v_layout"), splash.QKVLayout.SEQ_MINOR
    )  # as products leave them
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * H)
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=splash.BlockSizes(**sizes, **layouts)
    )
    documents = None if start is None else splash.SegmentIds(start, start)
    return jax.vmap(kernel)(q, k, v, documents)


ATTENTION = {"xla": attend, "blockwise": blockwise_attention, "splash": splash_attention}
