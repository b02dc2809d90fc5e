"""Attention kernels: causal attention of the heads and tokens that one device has, whatever the mesh.

Comes before: the attention of a layer in `architectures/`, which computes queries, keys and values. Comes next: the
layer projects the result back into the residual.

All kernels compute the same. `attend` is the plain one; the others differ in how many scores they compute, and whether
they write them to memory. A new kernel is a function with the arguments and the result of `attend`, and an entry in
`ATTENTION` at the end.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels import flash, products

# Numbers of queries and of keys in a block of splash. The largest that divides T is the fastest; 128 is its least.
SPLASH_BLOCKS = (512, 256, 128)


def attend(q, k, v, position, start):
    """Causal attention that writes all T x T_k scores to memory.

    Queries q [B, H/tp, T, K], already scaled, are at `position` [B or 1, T]. Keys k [B, H_kv/tp, T_k, K] and values v
    [B, H_kv/tp, T_k, K_v] are at positions 0 to T_k - 1. Each head of keys and values serves H / H_kv consecutive heads
    of queries. A query sees the keys from `start` [B, T], where its document begins, up to its own position; without
    `start`, from 0. Returns [B, H/tp, T, K_v] in q's dtype. The softmax is in float32.
    """
    B, H, T, K = q.shape
    group = H // k.shape[1]
    if group > 1:  # heads that share keys become one head with more queries, which copies no keys
        q = q.reshape(B, H // group, group * T, K)
        start = None if start is None else jnp.tile(start, group)
        return attend(q, k, v, jnp.tile(position, group), start).reshape(B, H, T, -1)
    einsum = jnp.einsum if q.dtype == jnp.float32 else products.einsum_in_float32
    scores = einsum("bhtk,bhsk->bhts", q, k)
    seen = jnp.arange(k.shape[-2]) <= position[:, None, :, None]  # [B or 1, 1, T, T_k]
    if start is not None:
        seen &= jnp.arange(k.shape[-2]) >= start[:, None, :, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    # The softmax divides after the sum over values: on T x K_v numbers instead of T x T_k.
    largest = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    out = einsum("bhts,bhsk->bhtk", weights.astype(q.dtype), v)
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def blockwise_attention(q, k, v, position, start):
    """`attend` of whole sequences, one block of queries at a time. Each block reads the keys up to its own end, so that
    nearly half of all scores are never computed: those above the diagonal."""
    T = q.shape[2]
    size = query_block(T)

    def block(end):
        rows = slice(end - size, end)
        begins = None if start is None else start[:, rows]
        return attend(q[:, :, rows], k[:, :, :end], v[:, :, :end], position[:, rows], begins)

    ends = range(size, T + 1, size)
    return jnp.concatenate([block(end) for end in ends], 2)


def query_block(T):
    """Number of queries in a block of `blockwise_attention`: at most 8 blocks, since each is compiled by itself, of at
    least 64 queries, since small products are slow."""
    for blocks in (8, 4, 2):
        if T % blocks == 0 and T // blocks >= 64:
            return T // blocks
    return T


def splash_attention(q, k, v, position, start):
    """`attend` of whole sequences by the kernel for TPUs that comes with jax. It never writes scores to memory
    (FlashAttention-2, arXiv:2307.08691)."""
    # imported here, since only TPUs need it
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    H, T = q.shape[1:3]
    fields = [field.name for field in dataclasses.fields(splash.BlockSizes)]
    sizes = {name: splash_block(T) for name in fields if name.startswith("block")}
    layout = splash.QKVLayout.SEQ_MINOR  # as matrix products write q, k and v: without a copy
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
    """Number of channels that the key and the value of a head of a utils.Model have together."""
    return 2 * m.key_dim + m.rope_dim


class Kernel(NamedTuple):
    """What the choice of a kernel, the checks of flags and the planner need to know about it."""

    function: Callable  # with the arguments and the result of `attend`
    platforms: tuple[str, ...]  # where it runs, as `platform_of` names them
    score_share: Callable  # utils.Model -> the share of the T x T scores that it computes
    # {call: (products over the keys' channels, over the values')}, the forward one first
    products: dict
    blocks: Callable = lambda m: 1  # utils.Model -> blocks of queries, each an operation of its own
    multiple: int = 1  # of which T must be a multiple
    channels: float = math.inf  # that a key and a value may have together
    dtypes: tuple[str, ...] = ()  # in which it multiplies, of --model_dtype; (): all

    def takes(self, dtype):
        """Whether it multiplies in a --model_dtype."""
        return not self.dtypes or dtype in self.dtypes

    def fits(self, m):
        """Whether it computes the attention of a utils.Model."""
        has_room = m.T % self.multiple == 0 and channels(m) <= self.channels
        return has_room and self.takes(m.model_dtype)


# Products of kernels that are plain operations, whose calls have no name in a compiled program.
PLAIN = {"forward": (1, 1), "backward": (2, 2)}
EVERYWHERE = ("cpu", "gpu", "other gpu", "tpu", "other tpu")
# On these Mosaic, the compiler of `splash`, cannot multiply bfloat16.
OLD_TPUS = ("TPU v2", "TPU v3")

# The values of --attention but auto, which is the first of them that runs: the fastest come first.
ATTENTION = {
    "splash": Kernel(
        splash_attention,
        platforms=("tpu",),
        score_share=lambda m: causal_share(m.T, splash_block(m.T)),
        products={"splash_mha_fwd": (1, 1), "splash_mha_dq": (2, 1), "splash_mha_dkv": (2, 2)},
        multiple=min(SPLASH_BLOCKS),
        dtypes=("bfloat16", "float32"),  # Mosaic has no float16
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
        blocks=lambda m: m.T // query_block(m.T),
    ),
    "xla": Kernel(attend, EVERYWHERE, score_share=lambda m: 1.0, products=PLAIN),
}


def platform_of(device):
    """The platform of a jax device: cpu, tpu or gpu; "other tpu" or "other gpu" where no special kernel runs on it."""
    if device.platform == "tpu" and device.device_kind in OLD_TPUS:
        return "other tpu"
    if device.platform == "gpu" and device.compute_capability not in flash.CAPABILITIES:
        return "other gpu"
    return device.platform


def choose_kernel(m, platform):
    """The name of the kernel that a utils.Model uses: --attention, or for auto the first of `ATTENTION` that runs on
    `platform` and fits the model."""
    if m.attention != "auto":
        return m.attention
    for name, kernel in ATTENTION.items():
        if platform in kernel.platforms and kernel.fits(m):
            return name
    raise ValueError(f"no attention kernel runs on platform {platform!r}")
