"""Products of activations and weights, whose gradients are products too."""

import functools

import jax
import jax.numpy as jnp

from kernels import xla_cpu


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(spec, x, w):
    """`jnp.einsum(spec, x, w)` of activations x and a weight w.

    Its two gradients are einsums of the arrays as they are. jax would first transpose arrays as large as x: that makes
    a step of `moe1b` with two layers in a block 1.6% longer, by the TPU compiler on (8, 2, 2) of v4:2x4x4.
    """
    return jnp.einsum(spec, x, w)


def _einsum_forward(spec, x, w):
    return einsum(spec, x, w), (x, w)


def _einsum_backward(spec, operands, g):
    x, w = operands
    x_dims, w_dims, g_dims = spec.replace("->", ",").split(",")
    dw = xla_cpu.weight_gradient(w_dims, x_dims, x, g_dims, g)
    dx = jnp.einsum(f"{g_dims},{w_dims}->{x_dims}", g, w)
    return dx, dw


einsum.defvjp(_einsum_forward, _einsum_backward)
