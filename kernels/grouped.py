"""Grouped products: every row through the feed-forward of its own expert, with no work for rows that are not there.

Rows lie sorted by expert. A loop over experts runs a loop over its tiles of rows; the gradient is a
second such loop, written by hand, since jax cannot transpose a loop of unknown length. On a CPU this takes less
than products over buckets with room for 1.5 times the mean load.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels import layouts

# Numbers of rows in a tile. An expert's rows fill as many of the largest as they can, then at most one of each other
# size: products of many rows are faster, and half a small tile is what an expert computes in vain.
TILES = (512, 256, 128, 64, 32)
SMALL = TILES[-1]


def padded(rows):
    """`rows` rounded up to whole small tiles: 33 -> 64."""
    return -(-rows // SMALL) * SMALL


def row_space(choices, experts):
    """Number of rows that hold the choices, however they fall on the experts: each expert begins a tile."""
    return padded(choices) + experts * SMALL


def group_begins(counts):
    """Where each expert's rows begin, and where the last ones end: counts [E] -> [E + 1]. [3, 40] -> [0, 32, 96]."""
    ends = jnp.cumsum(padded(counts))
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])


def expected_trips(n):
    """Scope for a loop of unknown length that tells planning/hlo.py how often it runs where the load is even."""
    return jax.named_scope(f"expected_trips_{n}")


def for_tiles(begin, end, expected, step, carry):
    """`carry` after `step(at, size, carry)` for each tile of the rows from `begin` to `end`, a multiple of small tiles:
    of rows 64 to 416, 256 at 64, 64 at 320 and 32 at 384. No tile has more rows than the `expected` ones, as many as
    there are where the load is even: an empty loop takes time too."""
    expected = padded(expected)
    for size in [size for size in TILES if size <= expected]:
        tiles = (end - begin) // size

        def tile(i, carry, begin=begin, size=size):
            return step(begin + i * size, size, carry)

        with expected_trips(expected // size):
            carry = lax.fori_loop(0, tiles, tile, carry)
        begin += tiles * size
        expected %= size
    return carry


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def grouped_feed_forward(activate, expected, keep, rows, gates, up, down, begins):
    """Rows through the feed-forward of their experts: (gate x activate(row x up)) x down transposed.

    rows [R, D]: those of expert e lie from begins[e] to begins[e + 1], multiples of a small tile; begins int32 [E + 1].
    gates [R, 1]; up [E, g, D, F] and down [E, D, F]; activate [.., g, F] -> [.., F]; `expected` rows of each expert
    where the load is even; `keep`: whether the hidden channels are kept for the gradient, which else computes them
    anew. Returns [R, D], zeros behind the last expert's rows. Gradients of the weights are summed in float32.
    """
    out, _ = _forward(activate, expected, False, rows, gates, up, down, begins)
    return out


def tile_of(x, at, size):
    return lax.dynamic_slice_in_dim(x, at, size)


def put_tile(x, tile, at):
    return lax.dynamic_update_slice_in_dim(x, tile, at, 0)


def _forward(activate, expected, keep, rows, gates, up, down, begins):
    def expert(carry, own):
        up, down, begin, end = own

        def step(at, size, carry):
            out, hidden = carry
            h = jnp.einsum("nd,gdf->ngf", tile_of(rows, at, size), up)
            if keep:
                hidden = put_tile(hidden, h, at)
            h = activate(h) * tile_of(gates, at, size)
            return put_tile(out, jnp.einsum("nf,df->nd", h, down), at), hidden

        return for_tiles(begin, end, expected, step, carry), None

    _, g, _, F = up.shape
    hidden = jnp.zeros((len(rows), g, F), rows.dtype) if keep else None
    experts = up, down, begins[:-1], begins[1:]
    (out, hidden), _ = lax.scan(expert, (jnp.zeros_like(rows), hidden), experts)
    return out, (rows, gates, up, down, begins, hidden)


def _backward(activate, expected, keep, kept, d_out):
    rows, gates, up, down, begins, hidden = kept

    def weigh(h, gates):
        return activate(h) * gates

    def expert(carry, own):
        up, down, begin, end = own

        def step(at, size, carry):
            d_rows, d_gates, d_up, d_down = carry
            x, g = tile_of(rows, at, size), tile_of(d_out, at, size)
            h = tile_of(hidden, at, size) if keep else jnp.einsum("nd,gdf->ngf", x, up)
            weighed, transpose = jax.vjp(weigh, h, tile_of(gates, at, size))
            d_h, d_gate = transpose(g @ down)
            d_x = jnp.einsum("ngf,gdf->nd", d_h, up)
            d_up += layouts.einsum("nd,ngf->dgf", x, d_h, jnp.float32)
            d_down += layouts.einsum("nd,nf->df", g, weighed, jnp.float32)
            return put_tile(d_rows, d_x, at), put_tile(d_gates, d_gate, at), d_up, d_down

        sums = jnp.zeros_like(up.swapaxes(0, 1), jnp.float32), jnp.zeros_like(down, jnp.float32)
        d_rows, d_gates, d_up, d_down = for_tiles(begin, end, expected, step, carry + sums)
        return (d_rows, d_gates), (d_up.swapaxes(0, 1).astype(up.dtype), d_down.astype(down.dtype))

    experts = up, down, begins[:-1], begins[1:]
    zeros = jnp.zeros_like(rows), jnp.zeros_like(gates)
    d_rows, d_experts = lax.scan(expert, zeros, experts)
    return *d_rows, *d_experts, None


grouped_feed_forward.defvjp(_forward, _backward)
