"""What the layers of every architecture are made of, on local shapes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from architectures.parameters import is_param
from collectives import Weights, exchange_heads, gather_sequence, gather_weight, scatter_sequence


class Tokens(NamedTuple):
    """Where the tokens of an activation [B, T/tp, D] stand in their sequences and in the training step."""

    position: jax.Array  # [B, T/tp] position in the sequence; [1, T/tp] where it is the same in all
    split: bool = True  # whether T is split over tp
    key: jax.Array | None = None  # of dropout in this layer; None: no dropout
    number: jax.Array | None = (
        None  # [B, T/tp] uint32, number of the token within the training step
    )
    start: jax.Array | None = (
        None  # [B, T] position at which each token's document begins; None: all are one
    )

    def whole(self, T):
        """Positions [B or 1, T] of all T tokens of the sequences."""
        return jnp.arange(T)[None] if self.split else self.position

    def within_document(self):
        """Positions [B or 1, T/tp] counted from the beginning of each token's document."""
        if self.start is None:
            return self.position
        return self.position - self.start[:, self.position[0]]


def gather(params, table, dtype):
    """`Weights` of parameters, gathered over the axes that only store them, matrices in `dtype`, others in float32."""
    leaves, tree = jax.tree.flatten(params)
    described = jax.tree.leaves(table, is_leaf=is_param)
    pairs = [
        gather_weight(w, p, dtype if p.matrix else jnp.float32) for w, p in zip(leaves, described)
    ]
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
    return Weights(
        None, jax.tree.map(lambda total, g: total.at[index].add(g.astype(jnp.float32)), total, g)
    ), None


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
    ordered = "".join(
        sorted(of_w, key=lambda dim: (dim not in first, dim not in second))
    )  # batch, first, second
    dw = jnp.einsum(f"{ordered}->{of_w}", jnp.einsum(f"{first},{second}->{ordered}", a, b))
    return jnp.einsum(f"{of_g},{of_w}->{of_x}", g, w), dw


_product.defvjp(lambda spec, x, w: (_product(spec, x, w), (x, w)), _product_backward)


def rms_norm(x, scale, eps):
    """Root-mean-square norm over the last dim (arXiv:1910.07467, equation 4), in float32."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * scale).astype(x.dtype)


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


class Load(NamedTuple):
    """What routing did, as sums over local tokens; adds up over microbatches, devices and steps."""

    loss: jax.Array  # [] load-balancing loss, summed over sequences (here: this device's part of T)
    tokens: jax.Array  # [E] choices that fell on each expert
    dropped: jax.Array  # [] choices that found their expert's bucket full


def no_load(*shape):
    """A `Load` of nothing, with tokens of the given shape [..., E]."""
    return Load(jnp.float32(0), jnp.zeros(shape), jnp.float32(0))
