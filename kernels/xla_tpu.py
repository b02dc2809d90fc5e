"""What the TPU compiler needs help with: an all-gather whose transpose stays a reduce-scatter."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

# Rows in a tile of a TPU's memory
TILE_ROWS = 8


def all_gather(x, axis, dim, axis_size, mesh_size):
    """`lax.all_gather(x, axis, axis=dim, tiled=True)` over an axis of axis_size devices, in a mesh of mesh_size.

    The TPU compiler turns some reduce-scatters, the transposes of these, into all-reduces, which send twice the bytes.
    Each case has its remedy:

        among all devices of the mesh       two steps (arXiv:1909.09756, section 3), see `gather_steps`
        with a small last dim               the dims after `dim` become one
        n is no multiple of 8               more and shorter rows: [28, 7168] -> [56, 3584]; a last dim becomes a middle
                                            one
        along dim 0                         parts of less than 2^28 numbers are joined along a dim of their own
    """
    shape = x.shape
    if dim == x.ndim - 1 > 1 and shape[dim] % TILE_ROWS:
        x = jnp.moveaxis(x, dim, 1)
        return jnp.moveaxis(all_gather(x, axis, 1, axis_size, mesh_size), 1, dim)
    tiled = dim > 0 or x.size >= 2**28
    if dim < x.ndim - 1:
        columns = math.prod(shape[dim + 1 :])
        cuts = TILE_ROWS // math.gcd(shape[dim], TILE_ROWS)
        if dim == 0 or columns % cuts:
            cuts = 1
        x = x.reshape(*shape[:dim], shape[dim] * cuts, columns // cuts)
    for groups in gather_steps(axis_size, mesh_size):
        x = lax.all_gather(x, axis, axis=dim, tiled=tiled, axis_index_groups=groups)
    return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def gather_steps(n, mesh_size):
    """The groups of devices (`axis_index_groups`) in which n devices gather, step by step.

    Devices that are the whole mesh gather among near ones first, as many as the largest divisor of n up to its square
    root. Six gather in [[0, 1], [2, 3], [4, 5]], where device 0 gets parts 0 and 1, then in [[0, 2, 4], [1, 3, 5]],
    where it gets parts (0, 1), (2, 3) and (4, 5).
    """
    near = 1
    if n == mesh_size:
        near = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
    grid = np.arange(n).reshape(-1, near)
    steps = [grid, grid.T] if near > 1 else [grid.T]
    return [groups.tolist() for groups in steps]
