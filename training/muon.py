"""Muon: a hidden matrix is updated by its momentum made orthogonal (arXiv:2502.16982, section 2).

What it does. Momentum is a matrix M = U S V^T, and often a few of its singular values S dwarf the others. Muon updates
by about U V^T, in which all of them are 1: rare directions are learned as fast as frequent ones. A singular value
decomposition is slow on accelerators. A few Newton-Schulz steps, which are matrix products alone, come close enough.
Only matrices between hidden states are updated so. `training/optimizer.py` gives embeddings, norms and the rest to
AdamW.

Why a mesh needs more than that. AdamW works on each number by itself, so a device updates what it holds. Newton-Schulz
steps need whole matrices, of which a device may hold only a block, or a copy that other devices hold too. So every
matrix gets an owner: the blocks are sent to it, it makes the matrix orthogonal, and the blocks of the update are sent
back. The owners are chosen by shapes alone, before anything runs (`make_buckets`).

    block     What a device holds of a matrix: all of its rows and columns, or some of them.
    owner     The device that works on a matrix. All devices that hold blocks of the same matrices, or copies of them,
              own the same number of them.
    bucket    Matrices that are distributed over the mesh in the same way, worked on as one batch, since one product of
              many matrices is fast. Matrices of other shapes join a bucket where that saves time.
    padding   Zero rows and columns that bring a matrix to the shape of its bucket, and empty slots in a bucket, so that
              every owner has as many matrices.

Example: 20 matrices [768, 2048], whose rows are split over 16 devices. Each device holds 20 blocks [48, 2048] and owns
2 matrices. It sends to the other devices the blocks of their matrices, and gets the 15 missing blocks of each of its
own. 12 of the bucket's 32 slots are padding. If instead 16 devices hold copies of whole matrices, each owns 2 of them,
and the updates are gathered.

Rows and columns may be exchanged, and their order does not matter: Newton-Schulz steps commute with both.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import model
from architectures import parameters
from collectives import EXPERT_AXES, from_owners, to_owners

# (a, b, c) of each step's polynomial a X + b (X X^T) X + c (X X^T)^2 X, by Polar Express (arXiv:2505.16932, section 4).
# The four steps bring singular values between 0.003 and 1 close to 1. A division of the input by 1.02 is included in
# each: rounding in bfloat16 makes the largest singular value a little larger, and the polynomials grow fast beyond 1.
COEFFICIENTS = (
    (8.0579, -22.0522, 15.5407),
    (3.9263, -2.7538, 0.4974),
    (3.4545, -2.4875, 0.4775),
    (2.4623, -1.7456, 0.3975),
)
STEPS = len(COEFFICIENTS)
# Root mean square of an update (arXiv:2502.16982, section 2.2). It is about that of AdamW, so the same learning rates
# work.
UPDATE_RMS = 0.2
# Added to the norm of a matrix, so that a matrix of zeros stays zero and does not become NaN.
EPS = 1e-12
# Operations that a TPU does while it sends one number of two bytes. With it, computation and communication are compared
# when buckets are made.
FLOPS_PER_NUMBER = 5000


def orthogonalize(cfg, mesh):
    """The optax transformation from momentum to Muon's updates, for a tree of the parameter table's `hidden` leaves.

    Each matrix becomes about orthogonal, times 0.2 sqrt(max(inputs, outputs)) (arXiv:2502.16982, equation 4).
    """
    table = hidden_params(cfg)
    is_half = cfg.model.model_dtype == "float16"
    specs = [p.spec for p in table]
    dtype = jnp.dtype(cfg.model.model_dtype)
    local = functools.partial(
        orthogonalize_local, table=table, mesh_size=dict(mesh.shape), dtype=dtype
    )
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)

    def update(momentum, params):
        leaves, tree = jax.tree.flatten(momentum)
        if is_half:  # whose range a momentum may be below; its size does not matter
            leaves = [x / (root_mean_square(x) + EPS) for x in leaves]
        return jax.tree.unflatten(tree, on_mesh(leaves))

    return optax.stateless(update)


def root_mean_square(x):
    """That of all numbers of x, float32 []."""
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def hidden_params(cfg):
    """The `Param`s of Muon's leaves, in the order of a flattened tree."""
    table = model.param_table(cfg)
    leaves = jax.tree.leaves(table, is_leaf=parameters.is_param)
    return [p for p in leaves if p.hidden]


def orthogonalize_local(leaves, table, mesh_size, dtype):
    """Muon's updates, in float32, of a device's parts of the leaves that `table` describes; called inside shard_map.
    Numbers are sent and multiplied in `dtype`."""
    matrices = matrices_of(table, mesh_size)
    arrays = []  # the device's array of each element of `matrices`
    for x, p in zip(leaves, table):
        borders = np.cumsum(sizes_of_parts(p))[:-1]
        arrays += jnp.split(x.astype(dtype), borders, -1)
    updates = [None] * len(matrices)
    for bucket in make_buckets(matrices, mesh_size):
        blocks = [bucket.pad(matrices[i].to_blocks(arrays[i])) for i in bucket.members]
        empty = bucket.n_slots - bucket.n_blocks
        blocks.append(jnp.zeros((empty, *bucket.block), dtype))
        owned = to_owners(jnp.concatenate(blocks), *bucket.layout, bucket.owner_copies)
        blocks = from_owners(newton_schulz(owned), *bucket.layout, bucket.owner_copies)
        for i in bucket.members:
            updates[i] = matrices[i].from_blocks(blocks[: matrices[i].n_blocks])
            blocks = blocks[matrices[i].n_blocks :]
    results = []
    for p in table:  # the parts of a leaf are joined again
        n = len(sizes_of_parts(p))
        results.append(jnp.concatenate(updates[:n], -1))
        updates = updates[n:]
    return results


def newton_schulz(x):
    """Approximately U V^T for each matrix U S V^T of x [n, rows, columns], in the dtype of x. Singular values of at
    least 0.003 of the matrix's norm become 0.7 to 1.2. Zero rows and columns, such as padding, stay zero and do not
    affect the rest."""
    wide = x.shape[1] <= x.shape[2]
    is_half = x.dtype == jnp.float16
    wider = x.astype(jnp.float32) if is_half else x  # float16 has no room for squares
    squares = jnp.sum(jnp.square(wider), (1, 2), jnp.float32, keepdims=True)
    inverse = 1 / (jnp.sqrt(squares) + EPS)
    scale = inverse.astype(x.dtype)
    if is_half:  # nor for X X^T before the division
        x, scale = (inverse * wider).astype(x.dtype), 1
    for a, b, c in COEFFICIENTS:
        # X X^T or X^T X, whichever is smaller; the polynomial is the same with both.
        products = "nrc,nsc->nrs" if wide else "nrc,nrd->ncd"
        gram = jnp.einsum(products, x, x) * scale**2
        factor = b * gram + c * (gram @ gram)
        x = scale * (a * x + (factor @ x if wide else x @ factor))
        scale = 1  # the division by the norm is part of the first step
    return x


def newton_schulz_flops(rows, columns):
    """The number of operations of `newton_schulz` for one matrix."""
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


class Layout(NamedTuple):
    """How a matrix is distributed over the mesh: the axes that split its rows, those that split its columns, and those
    along which all devices hold copies."""

    rows: tuple
    columns: tuple
    copies: tuple


class Matrices(NamedTuple):
    """Matrices of one shape, in the array in which a device holds them.

    They are one parameter, or one part of a parameter in which several matrices lie side by side. Some dims of the
    array are rows, some are columns, and the others number the matrices, all in any order.
    """

    shape: tuple  # of the device's array
    row_dims: tuple
    column_dims: tuple
    layout: Layout
    scale: float  # a factor of the updates

    @property
    def dim_order(self):
        """The dims of the array in the order of blocks: first those that number matrices, then rows, then columns."""
        others = set(range(len(self.shape))) - {*self.row_dims, *self.column_dims}
        return (*sorted(others), *self.row_dims, *self.column_dims)

    @property
    def block(self):
        """(rows, columns) of a block."""
        rows = math.prod(self.shape[dim] for dim in self.row_dims)
        columns = math.prod(self.shape[dim] for dim in self.column_dims)
        return rows, columns

    @property
    def n_blocks(self):
        """The number of blocks on a device, one for each matrix."""
        return math.prod(self.shape) // math.prod(self.block)

    def to_blocks(self, x):
        """The device's array -> [n_blocks, rows, columns]."""
        return x.transpose(self.dim_order).reshape(self.n_blocks, *self.block)

    def from_blocks(self, blocks):
        """Blocks of results, which may be padded -> updates in the shape of the device's array, in float32."""
        rows, columns = self.block
        ordered = [self.shape[dim] for dim in self.dim_order]
        blocks = blocks[:, :rows, :columns].reshape(ordered)
        x = blocks.transpose(np.argsort(self.dim_order))
        return self.scale * x.astype(jnp.float32)


def sizes_of_parts(p):
    """The sizes along the last dim of the matrices side by side in a `Param`, such as a gate and its values."""
    return [n for n in p.parts if n] or [p.shape[-1]]


def matrices_of(table, mesh_size):
    """The `Matrices` of a list of `Param`s on a mesh of {axis: size}: one for each part of each `Param`."""
    found = []
    for p in table:
        axes = [real_axes(entry, mesh_size) for entry in p.spec]
        split = [axes_size(dim_axes, mesh_size) for dim_axes in axes]
        # The side whose dims come first in the array is the rows, so that few arrays need a transpose.
        sides = [tuple(sorted(map(p.dims.index, dims))) for dims in (p.inputs, p.outputs)]
        row_dims, column_dims = sorted(sides)
        row_axes = sum((axes[dim] for dim in row_dims), ())
        column_axes = sum((axes[dim] for dim in column_dims), ())
        used = sum(axes, ())
        copies = tuple(a for a in real_axes(EXPERT_AXES, mesh_size) if a not in used)
        layout = Layout(row_axes, column_axes, copies)
        for size in sizes_of_parts(p):
            whole = (*p.shape[:-1], size)
            local = tuple(size // parts for size, parts in zip(whole, split))
            largest = max(math.prod(whole[dim] for dim in dims) for dims in sides)
            scale = UPDATE_RMS * math.sqrt(largest)
            found.append(oriented(Matrices(local, row_dims, column_dims, layout, scale)))
    return found


def real_axes(entry, mesh_size):
    """The axes in an entry of a PartitionSpec that have more than one device."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in axes if mesh_size[axis] > 1)


def oriented(matrices):
    """`Matrices` with rows and columns exchanged if need be, so that as many as possible fit into the same bucket: the
    side that is split becomes the rows, or if none is split, the smaller one."""
    rows, columns, copies = matrices.layout
    exchanged = matrices._replace(
        row_dims=matrices.column_dims,
        column_dims=matrices.row_dims,
        layout=Layout(columns, rows, copies),
    )
    return min(matrices, exchanged, key=lambda m: (m.layout.columns, m.block))


class Bucket(NamedTuple):
    """Matrices that are worked on as one batch, and the devices that they are distributed to."""

    members: tuple  # indices in the list of `Matrices`
    layout: Layout
    block: tuple  # (rows, columns) that all blocks are padded to
    n_blocks: int  # on each device, without empty slots
    grid: tuple  # the numbers of devices that split (rows, columns)
    n_copies: int  # the number of devices along the axes of copies

    @property
    def matrix(self):
        """(rows, columns) of a whole, padded matrix."""
        rows, columns = self.block
        return rows * self.grid[0], columns * self.grid[1]

    @property
    def n_owned(self):
        """The number of matrices that a device owns, including empty slots."""
        return -(-self.n_blocks // (math.prod(self.grid) * self.n_copies))

    @property
    def owner_copies(self):
        """The number of devices with copies that divide the matrices among themselves.

        It is the smallest number with which `n_owned` is as small as with all of them, since the updates are gathered
        among that many devices. The other devices with copies form groups of the same size, which repeat the work.
        """
        enough = math.ceil(self.n_blocks / (math.prod(self.grid) * self.n_owned))
        numbers = range(enough, self.n_copies + 1)
        return next(n for n in numbers if self.n_copies % n == 0)

    @property
    def n_slots(self):
        """The number of blocks on a device, including empty slots, so that every owner has the same number of
        matrices."""
        return self.n_owned * math.prod(self.grid) * self.owner_copies

    @property
    def flops(self):
        """The number of operations of a device."""
        return self.n_owned * newton_schulz_flops(*self.matrix)

    @property
    def exchanged(self):
        """How many numbers a device sends to owners. As an owner it sends the same number back."""
        if math.prod(self.grid) == 1:
            return 0
        return self.n_slots // self.owner_copies * math.prod(self.block)

    @property
    def gathered(self):
        """How many numbers of updates a device holds when they are gathered among `owner_copies` devices; 0 if nothing
        is gathered."""
        return self.n_slots * math.prod(self.block) if self.owner_copies > 1 else 0

    @property
    def cost(self):
        """The time of a device, in operations."""
        return self.flops + FLOPS_PER_NUMBER * (2 * self.exchanged + self.gathered)

    def pad(self, blocks):
        """The blocks of one member, padded with zero rows and columns to the shape of the bucket."""
        rows, columns = [size - own for size, own in zip(self.block, blocks.shape[1:])]
        return jnp.pad(blocks, ((0, 0), (0, rows), (0, columns)))


def make_buckets(matrices, mesh_size):
    """The `Bucket`s of a list of `Matrices` on a mesh of {axis: size}.

    At first there is one bucket for each layout and shape. Then those two buckets are merged whose merging saves most
    time, again and again until no merging saves any. A bucket with fewer matrices than devices leaves devices idle. For
    example, 3 matrices [18, 7] and 29 matrices [16, 7] take twice as long on 64 devices in two buckets as in one bucket
    of 32 matrices [18, 7].
    """
    same_shape = {}
    for i, one in enumerate(matrices):
        same_shape.setdefault((one.layout, one.block), []).append(i)
    buckets = []
    for (layout, block), members in same_shape.items():
        *grid, n_copies = [axes_size(axes, mesh_size) for axes in layout]
        n_blocks = sum(matrices[i].n_blocks for i in members)
        buckets.append(Bucket(tuple(members), layout, block, n_blocks, tuple(grid), n_copies))
    while True:
        pairs = [pair for pair in itertools.combinations(buckets, 2) if saving(*pair) > 0]
        if not pairs:
            return buckets
        a, b = max(pairs, key=lambda pair: saving(*pair))
        buckets.remove(a)
        buckets.remove(b)
        buckets.append(merged(a, b))


def axes_size(axes, mesh_size):
    """The number of devices along these mesh axes."""
    return math.prod(mesh_size[axis] for axis in axes)


def merged(a, b):
    """The `Bucket` of the members of two buckets with the same layout, padded to the larger number of rows and of
    columns."""
    block = tuple(map(max, a.block, b.block))
    members = a.members + b.members
    return a._replace(members=members, block=block, n_blocks=a.n_blocks + b.n_blocks)


def saving(a, b):
    """The operations that a device saves if two buckets are merged."""
    if a.layout != b.layout:
        return 0
    return a.cost + b.cost - merged(a, b).cost
