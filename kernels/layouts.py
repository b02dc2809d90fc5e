"""How the operands of a product lie in memory, where XLA's own choice is slow."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def einsum(spec, a, b, dtype=None):
    """`jnp.einsum(spec, a, b)` in `dtype`, on a CPU with `a` laid out as a matrix product reads it.

    XLA leaves an operand whose summed dims come first as it lies. On a CPU with units for bfloat16 (Intel's AMX) such
    a product does without them: 70 GFLOP/s in place of 350 to 620 by jax 0.12, the copy included. In float32 both take
    as long.
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
