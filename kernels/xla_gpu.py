"""What XLA needs help with on GPUs: a plain operation, written so that it reads a large array once. Other platforms
compute the plain operation."""

import jax.numpy as jnp
from jax import lax


def largest_and_norm(logits):
    """The largest logit of each column and the sum of exp(logit - largest), both [n], of float32 logits [V, n].

    On a GPU both come from one pass over the logits, as in a block of flash attention (arXiv:1805.02867): a sum so far
    is scaled down where a larger logit is found. XLA alone would read 400 MB of logits twice.
    """
    return lax.platform_dependent(logits, cuda=in_one_pass, default=in_two_passes)


def in_two_passes(logits):
    """`largest_and_norm`, one after the other."""
    largest = logits.max(0)
    return largest, jnp.exp(logits - largest).sum(0)


def in_one_pass(logits):
    """`largest_and_norm` by one reduction of pairs, of which each logit and 1 are the first."""

    def join(one, other):
        largest = jnp.maximum(one[0], other[0])
        norms = [norm * jnp.exp(found - largest) for found, norm in (one, other)]
        return largest, sum(norms)

    # finite, since -inf - -inf, of a logit that pads the vocabulary, would be NaN
    lowest = jnp.finfo(logits.dtype).min
    return lax.reduce((logits, jnp.ones_like(logits)), (lowest, jnp.float32(0)), join, (0,))
