"""What XLA needs help with on CPUs: plain operations, written so that CPUs compute them faster. Layers call these on
CPUs alone."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(spec, x, w):
    """`jnp.einsum(spec, x, w)` of activations x and a weight w.

    A CPU copies the first operand of a product. So the weight's gradient is a product whose first operand is the
    smaller of x and the result's gradient, laid out as `einsum_laid_out` does.
    """
    return jnp.einsum(spec, x, w)


def _einsum_forward(spec, x, w):
    return einsum(spec, x, w), (x, w)


def _einsum_backward(spec, operands, g):
    x, w = operands
    x_dims, w_dims, g_dims = spec.replace("->", ",").split(",")
    first, second = (x_dims, x), (g_dims, g)
    if g.size < x.size:
        first, second = second, first
    dw = weight_gradient(w_dims, *first, *second)
    dx = jnp.einsum(f"{g_dims},{w_dims}->{x_dims}", g, w)
    return dx, dw


def weight_gradient(w_dims, a_dims, a, b_dims, b):
    """The product of a and b with dims `w_dims`. It is computed with its dims as a plain matrix product has them: those
    of both operands, then those of a, then those of b."""
    shared = [dim for dim in w_dims if dim in a_dims and dim in b_dims]
    rows = [dim for dim in w_dims if dim in a_dims and dim not in b_dims]
    columns = [dim for dim in w_dims if dim not in a_dims]
    ordered = "".join(shared + rows + columns)
    dw = einsum_laid_out(f"{a_dims},{b_dims}->{ordered}", a, b)
    return jnp.einsum(f"{ordered}->{w_dims}", dw)


einsum.defvjp(_einsum_forward, _einsum_backward)


def einsum_laid_out(spec, a, b, dtype=None):
    """`jnp.einsum(spec, a, b)` with a result in `dtype` (None: that of a and b). On a CPU it first copies `a` to memory
    with the summed dims last.

    XLA does not copy an operand whose summed dims come first, and then leaves Intel's units for bfloat16 (AMX) idle:
    70 GFLOP/s in place of 350 to 620 by jax 0.12, the copy included. Together with `in_float32` it makes a step of
    `jaxformer-small` 1.45 times as fast there. In float32 the copy changes nothing.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)

    def on_cpu(a, b):
        first, second, result = spec.replace("->", ",").split(",")
        kept = [dim for dim in result if dim in first]
        summed = [dim for dim in first if dim not in result]
        rows = "".join(kept + summed)
        a = row_major(jnp.einsum(f"{first}->{rows}", a))
        return row_major(product(f"{rows},{second}->{result}", a, b))

    return lax.platform_dependent(a, b, cpu=on_cpu, default=functools.partial(product, spec))


def row_major(x):
    """x with its last dim contiguous in memory."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def in_float32(kernel):
    """An attention kernel on float32 copies of its operands: CPUs are slow to sum gradients in bfloat16. The gain is in
    that of `einsum_laid_out`."""

    def attend(q, k, v, *rest):
        operands = [x.astype(jnp.float32) for x in (q, k, v)]
        return kernel(*operands, *rest).astype(q.dtype)

    return attend


def compute_once(x):
    """x, which XLA would otherwise fuse into each of its uses and compute several times. This is one of three changes
    that together made a step of `jaxformer-small` 1.05 times as fast."""
    return lax.optimization_barrier(x)
