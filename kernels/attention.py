"""Attention kernels: causal attention as one device computes it, whatever the mesh.

A new kernel is a function with the arguments and the result of `attend`, and an entry in `ATTENTION` at the end.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels import flash

SPLASH_BLOCKS = (512, 256, 128)  # numbers of queries and keys in a block, the fastest first


def attend(q, k, v, position, start):
    """Causal attention, which writes all T x S scores to memory.

    q [B, H/tp, T, K] are scaled queries at `position` [B or 1, T]. Keys k [B, H_kv/tp, S, K] and values v [B, H_kv/tp,
    S, V] are at positions 0, 1, ..; each of their heads is read by H / H_kv heads of queries in a row. A query sees the
    keys from `start` [B, T] up to its position; without `start`, from 0. Returns [B, H/tp, T, V] in q's dtype; softmax
    is in float32.
    """
    B, H, T, K = q.shape
    group = H // k.shape[1]
    if group > 1:  # the queries of heads that share keys count as further queries of one head
        q = q.reshape(B, H // group, group * T, K)
        start = None if start is None else jnp.tile(start, group)
        return attend(q, k, v, jnp.tile(position, group), start).reshape(B, H, T, -1)
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[-2]) <= position[:, None, :, None]  # [B or 1, 1, T, S]
    if start is not None:
        seen &= jnp.arange(k.shape[-2]) >= start[:, None, :, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    # Softmax divides after the sum over s: one pass less over T x S.
    largest = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    out = jnp.einsum(
        "bhts,bhsv->bhtv", weights.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def blockwise_attention(q, k, v, position, start):
    """`attend` of whole sequences, a block of queries at a time, each to the keys up to the block's end."""
    T = q.shape[2]
    size = query_block(T)

    def block(end):
        rows = slice(end - size, end)
        begins = None if start is None else start[:, rows]
        return attend(q[:, :, rows], k[:, :, :end], v[:, :, :end], position[:, rows], begins)

    ends = range(size, T + 1, size)
    return jnp.concatenate([block(end) for end in ends], 2)


def query_block(T):
    """Number of queries in a block of `blockwise_attention`: at least 64, in at most 8 blocks."""
    for blocks in (8, 4, 2):
        if T % blocks == 0 and T // blocks >= 64:
            return T // blocks
    return T


def splash_attention(q, k, v, position, start):
    """`attend` of whole sequences by jax's kernel for TPUs, which writes no scores to memory (FlashAttention-2,
    arXiv:2307.08691)."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    H, T = q.shape[1:3]
    fields = [field.name for field in dataclasses.fields(splash.BlockSizes)]
    sizes = {name: splash_block(T) for name in fields if name.startswith("block")}
    layout = splash.QKVLayout.SEQ_MINOR  # as matrix products leave q, k and v
    layouts = {name: layout for name in fields if name.endswith("layout")}
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * H)
    sizes = splash.BlockSizes(**sizes, **layouts)
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=sizes, residual_checkpoint_name="kernel"
    )
    documents = None if start is None else splash.SegmentIds(start, start)
    return jax.vmap(kernel)(q, k, v, documents)


def splash_block(T):
    """Number of queries, and of keys, in a block of `splash_attention`."""
    return next(block for block in SPLASH_BLOCKS if T % block == 0)


def causal_share(T, block):
    """Share of T x T scores in the blocks on or below the diagonal. T = 4 in blocks of 2: 3 of 4 blocks."""
    return (1 + block / T) / 2


def channels(m):
    """Channels that the key and the value of a head have together, of a utils.Model."""
    return 2 * m.key_dim + m.rope_dim


class Kernel(NamedTuple):
    """What the choice of a kernel, the checks of flags and the planner need to know about it."""

    function: Callable  # with the arguments and the result of `attend`
    platforms: tuple[str, ...]  # where it runs, as `platform_of` names them
    score_share: Callable  # utils.Model -> the share of the T x T scores that it computes
    # {call: (products over the keys' channels, over the values')}, the forward one first
    products: dict
    multiple: int = 1  # of which T must be a multiple
    channels: float = math.inf  # that a key and a value may have together

    def fits(self, m):
        """Whether it computes the attention of a utils.Model."""
        return m.T % self.multiple == 0 and channels(m) <= self.channels


# One that keeps the scores of the forward pass has no calls that a program names.
PLAIN = {"forward": (1, 1), "backward": (2, 2)}
EVERYWHERE = ("cpu", "gpu", "other gpu", "tpu", "other tpu")
# Mosaic, which compiles `splash`, has no products in bfloat16 for these.
OLD_TPUS = ("TPU v2", "TPU v3")

# What --attention takes beside auto. The fastest come first: auto is the first that runs.
ATTENTION = {
    "splash": Kernel(
        splash_attention,
        platforms=("tpu",),
        score_share=lambda m: causal_share(m.T, splash_block(m.T)),
        products={"splash_mha_fwd": (1, 1), "splash_mha_dq": (2, 1), "splash_mha_dkv": (2, 2)},
        multiple=min(SPLASH_BLOCKS),
    ),
    "flash": Kernel(
        flash.flash_attention,
        platforms=("gpu",),
        score_share=lambda m: causal_share(m.T, flash.OWN),
        products={
            "flash_forward": (1, 1),
            "flash_backward_queries": (2, 1),
            "flash_backward_keys": (2, 2),
        },
        multiple=flash.OWN,
        channels=flash.MOST,
    ),
    "blockwise": Kernel(
        blockwise_attention,
        platforms=EVERYWHERE,
        score_share=lambda m: causal_share(m.T, query_block(m.T)),
        products=PLAIN,
    ),
    "xla": Kernel(attend, EVERYWHERE, score_share=lambda m: 1.0, products=PLAIN),
}


def platform_of(device):
    """The platform of a jax device: cpu, tpu or gpu, or "other tpu" and "other gpu" for those without a kernel."""
    if device.platform == "tpu" and device.device_kind in OLD_TPUS:
        return "other tpu"
    if device.platform == "gpu" and device.compute_capability not in flash.CAPABILITIES:
        return "other gpu"
    return device.platform


def choose_kernel(m, platform):
    """The name of the kernel that --attention of a utils.Model stands for: auto is the first of `ATTENTION` that runs
    on `platform` and fits."""
    if m.attention != "auto":
        return m.attention
    for name, kernel in ATTENTION.items():
        if platform in kernel.platforms and kernel.fits(m):
            return name
    raise ValueError(f"no attention kernel runs on platform {platform!r}")
