"""How arrays lie in memory, where XLA's own choice is slow."""

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(x):
    """x, on a CPU with its last dim contiguous in memory.

    XLA leaves a transposed operand of a product as it lies. On a CPU with units for bfloat16 (Intel's AMX) that product
    does without them: 70 GFLOP/s in place of 350 to 620 by jax 0.12, the copy included. In float32 both are as fast.
    """

    def copy(x):
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return lax.platform_dependent(x, cpu=copy, default=lambda x: x)
