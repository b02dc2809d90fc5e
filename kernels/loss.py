"""The loss over a large vocabulary, as one device computes it, whatever the mesh."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels import layouts

# Tokens whose logits a device holds at once, by platform: as many as fit a CPU's cache; elsewhere as many as keep the
# matrix units busy.
LOSS_CHUNK = {"cpu": 256, "gpu": 2048, "tpu": 2048}


def logits_of(x, embedding, vocab_size):
    """Logits float32 [V, n] of x [n, D] by embedding [V, D], -inf in the rows from vocab_size on, which are padding. A
    token is a column: so CPUs compute the gradient of the embedding, a sum over tokens, four times as fast."""
    logits = jnp.einsum("vd,nd->vn", embedding, x, preferred_element_type=jnp.float32)
    if embedding.shape[0] == vocab_size:
        return logits
    is_token = jnp.arange(embedding.shape[0]) < vocab_size
    return jnp.where(is_token[:, None], logits, -jnp.inf)


def in_chunks(x, targets, largest):
    """Split x [..., D] and targets [...] into chunks of n tokens, [chunks, n, D] and [chunks, n]; n is the largest
    divisor of their number up to `largest`."""
    n = min(targets.size, largest)
    while targets.size % n:
        n -= 1
    x = x.reshape(-1, n, x.shape[-1])
    return x, targets.reshape(-1, n)


def token_losses(x, embedding, targets, vocab_size, chunk):
    """-log p(target) of every token, float32 [...], 0 where the target is negative; and whether no other token is
    likelier, bool [...].

    x [..., D], embedding [V, D], targets int32 [...]. Never holds the logits of more than `chunk` tokens.
    """

    def one_chunk(_, scanned):
        x, targets = scanned
        logits = logits_of(x, embedding, vocab_size)
        at_target = jnp.take_along_axis(logits, targets[None], 0)[0]
        losses = jax.nn.logsumexp(logits, 0) - at_target
        losses = jnp.where(targets >= 0, losses, 0)
        return None, (losses, at_target >= logits.max(0))

    _, (losses, greedy) = lax.scan(one_chunk, None, in_chunks(x, targets, chunk))
    return losses.reshape(targets.shape), greedy.reshape(targets.shape)


def beside_likeliest(logits, tokens, k):
    """(log p of tokens [n] by logits [n, V]; that of the k likeliest tokens, and these), [n], [n, k] and [n, k]."""
    logprobs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0]
    return own, *lax.top_k(logprobs, k)


def token_choices(x, embedding, targets, vocab_size, chunk, k):
    """Of every token of `token_losses` what `beside_likeliest` tells: [...], [..., k] and [..., k]; anything where the
    target is negative."""

    def one_chunk(_, scanned):
        x, targets = scanned
        return None, beside_likeliest(logits_of(x, embedding, vocab_size).T, targets, k)

    _, found = lax.scan(one_chunk, None, in_chunks(x, targets, chunk))
    return jax.tree.map(lambda x: x.reshape(*targets.shape, *x.shape[2:]), found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(x, embedding, targets, vocab_size, chunk):
    """Sum of the losses of `token_losses`, float32 []. The forward pass computes the gradients too, chunk by chunk, so
    no logits are computed twice."""
    losses, _ = token_losses(x, embedding, targets, vocab_size, chunk)
    return losses.sum()


def _cross_entropy_forward(x, embedding, targets, vocab_size, chunk):
    V, D = embedding.shape

    def one_chunk(carry, scanned):
        total, d_embedding = carry
        x, targets = scanned
        logits = logits_of(x, embedding, vocab_size)
        largest = logits.max(0)
        exp = jnp.exp(logits - largest)
        norm = exp.sum(0)
        at_target = jnp.take_along_axis(logits, targets[None], 0)[0]
        counts = targets >= 0
        losses = largest + jnp.log(norm) - at_target
        total += jnp.where(counts, losses, 0).sum()
        one_hot = jnp.arange(V)[:, None] == targets
        d_logits = exp * (counts / norm) - one_hot  # softmax minus one-hot
        d_logits = d_logits.astype(x.dtype)
        d_embedding += jnp.einsum("vn,nd->vd", d_logits, x, preferred_element_type=jnp.float32)
        dx = layouts.einsum("vd,vn->dn", embedding, d_logits)
        return (total, d_embedding), dx

    start = jnp.float32(0), jnp.zeros((V, D), jnp.float32)
    chunks = in_chunks(x, targets, chunk)
    (total, d_embedding), dx = lax.scan(one_chunk, start, chunks)
    d_embedding = d_embedding.astype(embedding.dtype)
    # The barrier computes all of this now. XLA would put off the loss and keep the logits through the backward pass.
    total, dx, d_embedding = lax.optimization_barrier((total, dx, d_embedding))
    dx = dx.swapaxes(1, 2).reshape(x.shape)
    return total, (dx, d_embedding)


def _cross_entropy_backward(vocab_size, chunk, gradients, g):
    dx, d_embedding = gradients
    dx = (g * dx).astype(dx.dtype)
    d_embedding = (g * d_embedding).astype(d_embedding.dtype)
    return dx, d_embedding, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
