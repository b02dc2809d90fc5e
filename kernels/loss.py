"""The loss over a large vocabulary, as one device computes it, whatever the mesh."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

# Tokens whose logits a device holds at once: what stays in a CPU's cache, what keeps matrix units busy elsewhere.
LOSS_CHUNK = {"cpu": 256, "gpu": 2048, "tpu": 2048}


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
    return lax.optimization_barrier(
        (total, (dx.reshape(x.shape), d_embedding.T.astype(embedding.dtype)))
    )


def _cross_entropy_backward(vocab_size, most, gradients, g):
    dx, d_embedding = gradients
    return (g * dx).astype(dx.dtype), (g * d_embedding).astype(d_embedding.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
