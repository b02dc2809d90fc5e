"""Attention's kernels and the loss over a large vocabulary: what is computed on one device, whatever the mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

# Tokens whose logits a device holds at once: what stays in a CPU's cache, what keeps matrix units busy elsewhere.
LOSS_CHUNK = {"cpu": 256, "gpu": 2048, "tpu": 2048}
# The kernel that --attention auto stands for.
BEST_ATTENTION = {"cpu": "blockwise", "gpu": "blockwise", "tpu": "splash"}

# --- Attention --------------------------------------------------------------------------------------------------


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
    out = jnp.einsum(f"bhts,b{heads}sv->bhtv", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return (out / weights.sum(-1, keepdims=True)).astype(q.dtype)


def blockwise_attention(q, k, v, position, start):
    """`attend` of whole sequences in blocks of queries, each to the keys up to its end: little more than half of the
    scores are computed, and one block's stand in memory."""
    T = q.shape[2]
    size = next(T // n for n in (8, 4, 2, 1) if T % n == 0 and (T // n >= 64 or n == 1))

    def block(end):
        rows = slice(end - size, end)
        return attend(q[:, :, rows], k[:, :, :end], v[:, :, :end], position[:, rows],
                      None if start is None else start[:, rows])  # fmt: skip

    return jnp.concatenate([block(end) for end in range(size, T + 1, size)], 2)


def splash_attention(q, k, v, position, start):
    """`attend` of whole sequences by a kernel for TPUs that never writes scores to memory (FlashAttention-2,
    arXiv:2307.08691). T must be a multiple of 128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    H, T = q.shape[1:3]
    block = next(b for b in (512, 256, 128) if T % b == 0)
    sizes = {f.name: block for f in dataclasses.fields(splash.BlockSizes) if f.name.startswith("block")}
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.SEQ_MINOR)  # as products leave them
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * H)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=splash.BlockSizes(**sizes, **layouts))
    documents = None if start is None else splash.SegmentIds(start, start)
    return jax.vmap(kernel)(q, k, v, documents)


ATTENTION = {"xla": attend, "blockwise": blockwise_attention, "splash": splash_attention}


# --- Loss -------------------------------------------------------------------------------------------------------


def logits_of(x, embedding, vocab_size):
    """x [n, D], embedding [V, D] -> float32 logits [n, V]; the padding of the vocabulary is never predicted."""
    logits = jnp.einsum("nd,vd->nv", x, embedding, preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(embedding.shape[0]) < vocab_size, logits, -jnp.inf)


def _chunks(most, x, targets):
    chunk = next(c for c in range(min(targets.size, most), 0, -1) if targets.size % c == 0)
    return x.reshape(-1, chunk, x.shape[-1]), targets.reshape(-1, chunk)


def token_losses(x, embedding, targets, vocab_size, most):
    """-log p(target) of every token, float32 [...], never holding the logits of more than `most` tokens; 0 where the
    target is negative. x [..., D], embedding [V, D], targets [...]."""

    def chunk(_, scanned):
        x, targets = scanned
        logits = logits_of(x, embedding, vocab_size)
        at_target = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return None, jnp.where(targets >= 0, jax.nn.logsumexp(logits, -1) - at_target, 0)

    return lax.scan(chunk, None, _chunks(most, x, targets))[1].reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(x, embedding, targets, vocab_size, most):
    """Sum of `token_losses`. Its gradient is formed in the forward pass, chunk by chunk, so that no logits are computed
    twice."""
    return token_losses(x, embedding, targets, vocab_size, most).sum()


def _cross_entropy_forward(x, embedding, targets, vocab_size, most):
    def chunk(carry, scanned):
        total, d_embedding = carry
        x, targets = scanned
        logits = logits_of(x, embedding, vocab_size)
        top = logits.max(-1, keepdims=True)
        exp = jnp.exp(logits - top)
        norm = exp.sum(-1, keepdims=True)
        at_target, counts = jnp.take_along_axis(logits, targets[:, None], 1), targets[:, None] >= 0
        total += jnp.where(counts, top + jnp.log(norm) - at_target, 0).sum()
        hot = targets[:, None] == jnp.arange(embedding.shape[0])
        d_logits = (exp * (counts / norm) - hot).astype(x.dtype)  # softmax minus one-hot
        d_embedding += jnp.einsum("nd,nv->dv", x, d_logits, preferred_element_type=jnp.float32)
        return (total, d_embedding), jnp.einsum("nv,vd->nd", d_logits, embedding)

    # the embedding's gradient is summed up transposed: CPUs multiply so twice as fast
    start = jnp.float32(0), jnp.zeros(embedding.shape[::-1], jnp.float32)
    (total, d_embedding), dx = lax.scan(chunk, start, _chunks(most, x, targets))
    # all of it now: what XLA puts off, such as the loss itself, would keep the logits through the backward pass
    return lax.optimization_barrier((total, (dx.reshape(x.shape), d_embedding.T.astype(embedding.dtype))))


def _cross_entropy_backward(vocab_size, most, gradients, g):
    dx, d_embedding = gradients
    return (g * dx).astype(dx.dtype), (g * d_embedding).astype(d_embedding.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
