"""The loss over a large vocabulary, for the tokens that one device has, whatever the mesh.

Comes before: the layers of `model.py`, whose last output is x. Comes next: `model.py: reduce_loss`, which sums over the
mesh.

The logits of all tokens would be the largest array of a step: 4,096 tokens x 100,277 token ids in float32 are 1.6 GB.
So the functions here compute them for one chunk of tokens after another, and keep only the losses.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels import xla_cpu

# Number of tokens in a chunk, by platform. On a CPU the logits of a chunk should fit in its cache. On an accelerator a
# chunk should be large enough to keep the matrix units busy.
LOSS_CHUNK = {"cpu": 256, "gpu": 2048, "tpu": 2048}
# Factor of the gradients that `cross_entropy` keeps in float16. That of a logit is at most 1, and as small as the
# probability of a token, which float16 would round to 0 below 3e-8.
LIFT = 2.0**14


def logits_of(x, embedding, vocab_size):
    """Logits float32 [V, n] of x [n, D] and the head, embedding [V, D]. Rows from vocab_size on are padding; theirs are
    -inf. Each token is a column, since CPUs then compute the gradient of the embedding, a sum over tokens, four times
    as fast."""
    logits = jnp.einsum("vd,nd->vn", embedding, x, preferred_element_type=jnp.float32)
    if embedding.shape[0] == vocab_size:
        return logits
    is_token = jnp.arange(embedding.shape[0]) < vocab_size
    return jnp.where(is_token[:, None], logits, -jnp.inf)


def in_chunks(x, targets, largest):
    """Split x [..., D] and targets [...] into chunks of n tokens: [chunks, n, D] and [chunks, n]. n is the largest
    divisor of the number of tokens that is at most `largest`."""
    n = min(targets.size, largest)
    while targets.size % n:
        n -= 1
    x = x.reshape(-1, n, x.shape[-1])
    return x, targets.reshape(-1, n)


def token_losses(x, embedding, targets, vocab_size, chunk):
    """The loss of each token, -log p(target), float32 [...], and whether its target is the likeliest token, bool [...].

    x [..., D], embedding [V, D], targets int32 [...]. The loss is 0 where the target is negative: such tokens do not
    count. At most `chunk` tokens have their logits in memory at once.
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
    """(log p of tokens [n], log p of the k likeliest tokens [n, k], and their ids [n, k]) by logits [n, V]."""
    logprobs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0]
    return own, *lax.top_k(logprobs, k)


def token_choices(x, embedding, targets, vocab_size, chunk, k):
    """What `beside_likeliest` returns for every target of `token_losses`: [...], [..., k] and [..., k]. The values are
    meaningless where the target is negative."""

    def one_chunk(_, scanned):
        x, targets = scanned
        return None, beside_likeliest(logits_of(x, embedding, vocab_size).T, targets, k)

    _, found = lax.scan(one_chunk, None, in_chunks(x, targets, chunk))
    return jax.tree.map(lambda x: x.reshape(*targets.shape, *x.shape[2:]), found)


def shift_and_norm(logits, x, embedding, targets, vocab_size):
    """A number near each token's largest logit, and the sum of exp(logit - it), both [n], by the logits [V, n] that
    `logits_of` made of x [n, D] and the embedding [V, D]; targets [n].

    The number is the logit of the target, known before all others. So one pass over the logits is enough, where the
    largest would need another, and a TPU makes that pass while it writes them: the loss of 8,192 tokens of `moe1b`
    takes 18.6 ms for 25.7 by the compiler for v4. The sum holds exp(0), so it is at least 1; it overflows where another
    token is e^88 times as likely as the target. Then the largest logits are taken, of few tokens at a time: memory for
    a second array of all logits would be reserved for a case that hardly occurs.
    """
    rows = embedding[jnp.maximum(targets, 0)]
    shift = jnp.einsum("nd,nd->n", x, rows, preferred_element_type=jnp.float32)
    norm = jnp.exp(logits - shift).sum(0)

    def by_largest(x, embedding, *_):
        def of_token(x):
            logits = logits_of(x[None], embedding, vocab_size)[:, 0]
            largest = logits.max()
            return largest, jnp.exp(logits - largest).sum()

        return lax.map(of_token, x, batch_size=16)

    def as_they_are(x, embedding, shift, norm):
        return shift, norm

    overflows = ~jnp.isfinite(norm).all()
    return lax.cond(overflows, by_largest, as_they_are, x, embedding, shift, norm)


def lift_of(dtype):
    """The factor of the gradients that `cross_entropy` keeps, for activations of this dtype."""
    return LIFT if dtype == jnp.float16 else 1.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(x, embedding, targets, vocab_size, chunk):
    """The sum of the losses of `token_losses`, float32 [].

    Its forward pass computes the gradients of x and of the embedding as well, chunk by chunk, and keeps them for the
    backward pass. So logits are neither kept nor computed twice. The backward pass only multiplies by the gradient of
    the sum. In float16, where the kept gradients could overflow before that, they are in float32.
    """
    losses, _ = token_losses(x, embedding, targets, vocab_size, chunk)
    return losses.sum()


def _cross_entropy_forward(x, embedding, targets, vocab_size, chunk):
    V, D = embedding.shape
    lift = lift_of(x.dtype)
    kept = jnp.float32 if x.dtype == jnp.float16 else x.dtype

    def one_chunk(carry, scanned):
        total, d_embedding = carry
        x, targets = scanned
        logits = logits_of(x, embedding, vocab_size)
        shift, norm = shift_and_norm(logits, x, embedding, targets, vocab_size)
        at_target = jnp.take_along_axis(logits, targets[None], 0)[0]
        counts = targets >= 0
        losses = shift + jnp.log(norm) - at_target
        total += jnp.where(counts, losses, 0).sum()
        one_hot = jnp.arange(V)[:, None] == targets
        # softmax minus one-hot
        d_logits = jnp.exp(logits - shift) * (counts / norm) - one_hot
        d_logits = (lift * d_logits).astype(x.dtype)
        d_embedding += jnp.einsum("vn,nd->vd", d_logits, x, preferred_element_type=jnp.float32)
        dx = xla_cpu.einsum_laid_out("vd,vn->dn", embedding, d_logits, kept)
        return (total, d_embedding), dx

    start = jnp.float32(0), jnp.zeros((V, D), jnp.float32)
    chunks = in_chunks(x, targets, chunk)
    (total, d_embedding), dx = lax.scan(one_chunk, start, chunks)
    d_embedding = d_embedding.astype(kept)
    # The barrier has all of this computed now. XLA would otherwise compute the loss after the backward pass, and keep
    # the logits until then.
    total, dx, d_embedding = lax.optimization_barrier((total, dx, d_embedding))
    dx = dx.swapaxes(1, 2).reshape(x.shape)
    like = jnp.zeros(0, x.dtype)  # only for its type, which the gradients must have in the end
    return total, (dx, d_embedding, like)


def _cross_entropy_backward(vocab_size, chunk, gradients, g):
    dx, d_embedding, like = gradients
    g = g / lift_of(like.dtype)
    dx = (g * dx).astype(like.dtype)
    d_embedding = (g * d_embedding).astype(like.dtype)
    return dx, d_embedding, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
