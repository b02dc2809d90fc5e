"""Grouped products: every row through the feed-forward of its own expert, with no work for rows that are not there.

Rows lie sorted by expert. A loop over experts computes each one's tiles of rows; the gradient is a second such loop,
written by hand, since jax cannot transpose a loop of unknown length. On a CPU this takes less time than products over
buckets with room for 1.5 times the mean load.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels import xla_cpu

# Rows in a tile. An expert's rows fill as many of the largest tiles as they can, since products of many rows are
# faster; one tile more, some multiple of the smallest, takes the rest.
SMALLEST, LARGEST = 64, 512

tile_of = lax.dynamic_slice_in_dim  # (x, at, size)
put_tile = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)  # (x, tile, at)


def padded(rows):
    """`rows` rounded up to a multiple of the smallest tile: 65 -> 128."""
    return -(-rows // SMALLEST) * SMALLEST


def row_space(choices, experts):
    """Number of rows that hold the choices, however they fall on the experts: each expert begins a tile."""
    return padded(choices) + experts * SMALLEST


def group_begins(counts):
    """Where each expert's rows begin, and where the last ones end: counts [E] -> [E + 1]. [3, 70] -> [0, 64, 192]."""
    ends = jnp.cumsum(padded(counts))
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])


def at_even_load(n):
    """Scope that tells planning/hlo.py how often a loop runs, or which branch is taken, where the load is even. It is
    here and not in planning/ since the compiled program has to carry it."""
    return jax.named_scope(f"at_even_load_{n}")


def for_tiles(begin, end, expected, step, arrays, zeros):
    """Compute the rows from `begin` to `end` in tiles: rows 64 to 704 in one of 512 at 64 and one of 128 at 576.

    `step(at, size, arrays)` computes a tile: `arrays` [rows, ..] after it, and terms like `zeros`. Returns the arrays
    after all tiles, and the terms' sums. `expected`: rows where the load is even.
    """
    # never all rows: such a tile is the same in every turn, so XLA computes it before the loop, even one of no turn
    largest = min(LARGEST, len(arrays[0]) - SMALLEST)
    full, rest = divmod(end - begin, largest)
    even_full, even_rest = divmod(padded(expected), largest)
    sizes = range(SMALLEST, largest, SMALLEST)
    fitting = [functools.partial(step, end - rest, size) for size in sizes]
    with at_even_load(even_rest // SMALLEST):
        carry = lax.switch(rest // SMALLEST, [lambda arrays: (arrays, zeros), *fitting], arrays)

    def tile(i, carry):
        arrays, sums = carry
        arrays, terms = step(begin + i * largest, largest, arrays)
        return arrays, jax.tree.map(jnp.add, sums, terms)

    with at_even_load(even_full):
        return lax.fori_loop(0, full, tile, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def grouped_feed_forward(activate, expected, keep, rows, gates, up, down, begins):
    """Rows through the feed-forward of their experts: (gate x activate(row x up)) x down transposed.

    rows [n, D]: those of expert e lie from begins[e] to begins[e + 1], multiples of SMALLEST; begins int32 [E + 1].
    gates [n, 1]; up [E, g, D, F] and down [E, D, F]; activate [.., g, F] -> [.., F]; `expected` rows of each expert
    where the load is even; `keep`: whether the hidden channels are kept for the gradient, which else computes them
    anew. Returns [n, D], zeros behind the last expert's rows. Gradients of the weights are summed in float32.
    """
    out, _ = _forward(activate, expected, False, rows, gates, up, down, begins)
    return out


def _forward(activate, expected, keep, rows, gates, up, down, begins):
    _, g, D, F = up.shape

    def expert(arrays, own):
        up, down, begin, end = own
        up = up.swapaxes(0, 1).reshape(D, g * F)  # once for all tiles

        def step(at, size, arrays):
            out, hidden = arrays
            h = tile_of(rows, at, size) @ up
            if keep:
                hidden = put_tile(hidden, h, at)
            h = activate(h.reshape(size, g, F)) * tile_of(gates, at, size)
            return (put_tile(out, jnp.einsum("nf,df->nd", h, down), at), hidden), ()

        arrays, _ = for_tiles(begin, end, expected, step, arrays, ())
        return arrays, None

    hidden = jnp.zeros((len(rows), g * F), rows.dtype) if keep else None
    experts = up, down, begins[:-1], begins[1:]
    (out, hidden), _ = lax.scan(expert, (jnp.zeros_like(rows), hidden), experts)
    return out, (rows, gates, up, down, begins, hidden)


def _backward(activate, expected, keep, kept, d_out):
    rows, gates, up, down, begins, hidden = kept
    _, g, D, F = up.shape

    def weigh(h, gates):
        return activate(h.reshape(-1, g, F)) * gates

    def expert(arrays, own):
        up, down, begin, end = own
        up = up.swapaxes(0, 1).reshape(D, g * F)

        def step(at, size, arrays):
            d_rows, d_gates = arrays
            x, d = tile_of(rows, at, size), tile_of(d_out, at, size)
            h = tile_of(hidden, at, size) if keep else x @ up
            weighed, transpose = jax.vjp(weigh, h, tile_of(gates, at, size))
            d_h, d_gate = transpose(d @ down)
            d_x = jnp.einsum("nf,df->nd", d_h, up)
            d_up = xla_cpu.einsum_laid_out("nd,nf->df", x, d_h, jnp.float32)
            d_down = xla_cpu.einsum_laid_out("nd,nf->df", d, weighed, jnp.float32)
            return (put_tile(d_rows, d_x, at), put_tile(d_gates, d_gate, at)), (d_up, d_down)

        zeros = jnp.zeros(up.shape, jnp.float32), jnp.zeros(down.shape, jnp.float32)
        arrays, (d_up, d_down) = for_tiles(begin, end, expected, step, arrays, zeros)
        d_up = d_up.astype(up.dtype).reshape(D, g, F).swapaxes(0, 1)
        return arrays, (d_up, d_down.astype(down.dtype))

    zeros = jnp.zeros_like(rows), jnp.zeros_like(gates)
    d_rows, d_experts = lax.scan(expert, zeros, (up, down, begins[:-1], begins[1:]))
    return *d_rows, *d_experts, None


grouped_feed_forward.defvjp(_forward, _backward)
