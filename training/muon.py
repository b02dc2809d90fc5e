"""Muon: a hidden matrix is updated by its momentum made orthogonal (arXiv:2502.16982, section 2).

What it does. Momentum is a matrix M = U S V^T, and often a few of its singular values S dwarf the others. Muon updates
by about U V^T, in which all of them are 1: rare directions are learned as fast as frequent ones. A singular value
decomposition is slow on accelerators. A few Newton-Schulz steps, which are matrix products alone, come close enough.
Only matrices between hidden states are updated so. `training/optimizer.py` gives embeddings, norms and the rest to
AdamW.

Why a mesh needs more than that. AdamW works on each number by itself, so a device updates what it holds. Newton-Schulz
steps need whole matrices, of which a device may hold a block, or a copy that others hold too. So every matrix gets an
owner: blocks travel to it, it makes the matrix orthogonal, and blocks of the update travel back. Who owns what is fixed
by shapes alone, before anything runs (`make_buckets`).

    block     What a device holds of a matrix: all of its rows and columns, or some.
    owner     The device that works on a matrix. The devices that hold blocks of the same matrices, or copies of them,
              own equally many.
    bucket    Matrices that lie on the mesh in the same way, worked on as one batch: a product of many matrices at once
              is fast. Those of other shapes join where that saves time.
    padding   Zero rows and columns that bring a matrix to the shape of its bucket, and empty slots in a bucket, so that
              every owner has as many matrices.

Example: 20 matrices [768, 2048], whose rows are split over 16 devices. Each device holds 20 blocks [48, 2048] and owns
2 matrices: it sends the others the blocks of theirs and gets the 15 missing blocks of its own. 12 of the bucket's 32
slots are padding. With copies on 16 devices instead, each owns 2 of those that it holds, and the updates are gathered.

Rows may change places with columns, and their order does not matter: Newton-Schulz steps commute with both.
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

# (a, b, c) of each step's polynomial a X + b (X X^T) X + c (X X^T)^2 X, by Polar Express (arXiv:2505.16932, section 4):
# four steps that bring singular values of 0.003 to 1 near to 1. Each divides its input by 1.02 as well: rounding in
# bfloat16 makes the largest a little larger, and these polynomials grow fast beyond their range.
COEFFICIENTS = (
    (8.0579, -22.0522, 15.5407),
    (3.9263, -2.7538, 0.4974),
    (3.4545, -2.4875, 0.4775),
    (2.4623, -1.7456, 0.3975),
)
STEPS = len(COEFFICIENTS)
# Root mean square of an update (arXiv:2502.16982, section 2.2): about that of AdamW, so the same learning rates work
UPDATE_RMS = 0.2
# Added to the norm of a matrix: a matrix of zeros stays zero instead of becoming NaN
EPS = 1e-12
# Operations that a TPU does while it sends one number of two bytes. Work and traffic are weighed against each other by
# it.
FLOPS_PER_NUMBER = 5000


def orthogonalize(cfg, mesh):
    """The optax transformation from momentum to Muon's updates, for a tree of the parameter table's `hidden` leaves.

    Each matrix becomes about orthogonal, times 0.2 sqrt(max(inputs, outputs)) (arXiv:2502.16982, equation 4).
    """
    table = hidden_params(cfg)
    specs = [p.spec for p in table]
    dtype = jnp.dtype(cfg.model.model_dtype)
    local = functools.partial(
        orthogonalize_local, table=table, mesh_size=dict(mesh.shape), dtype=dtype
    )
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)

    def update(momentum, params):
        leaves, tree = jax.tree.flatten(momentum)
        return jax.tree.unflatten(tree, on_mesh(leaves))

    return optax.stateless(update)


def hidden_params(cfg):
    """The `Param`s of Muon's leaves, in the order of a flattened tree."""
    table = model.param_table(cfg)
    leaves = jax.tree.leaves(table, is_leaf=parameters.is_param)
    return [p for p in leaves if p.hidden]


def orthogonalize_local(leaves, table, mesh_size, dtype):
    """Muon's updates, float32, of the parts that a device holds of the leaves that `table` describes, inside shard_map.
    What travels and is multiplied has the type `dtype`."""
    matrices = matrices_of(table, mesh_size)
    arrays = []  # a device's array of each of `matrices`
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
    """About U V^T of each matrix U S V^T of x [n, rows, columns], in x's type. Singular values that are at least 0.003
    of the matrix's norm become 0.7 to 1.2. Zero rows and columns, such as padding, stay zero and change nothing
    else."""
    wide = x.shape[1] <= x.shape[2]
    squares = jnp.sum(jnp.square(x), (1, 2), jnp.float32, keepdims=True)
    norm = jnp.sqrt(squares)
    scale = (1 / (norm + EPS)).astype(x.dtype)
    for a, b, c in COEFFICIENTS:
        # X X^T or X^T X, whichever is smaller: both give the same polynomial
        products = "nrc,nsc->nrs" if wide else "nrc,nrd->ncd"
        gram = jnp.einsum(products, x, x) * scale**2
        factor = b * gram + c * (gram @ gram)
        x = scale * (a * x + (factor @ x if wide else x @ factor))
        scale = 1  # the division by the norm is part of the first step
    return x


def newton_schulz_flops(rows, columns):
    """Operations of `newton_schulz` for one matrix."""
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


class Layout(NamedTuple):
    """Mesh axes of a matrix: those that split its rows, those that split its columns, and those along which all devices
    hold the same."""

    rows: tuple
    columns: tuple
    copies: tuple


class Matrices(NamedTuple):
    """Matrices of one shape, of one parameter or of a part of one that holds several side by side, as a device holds
    them: an array whose dims are those of rows, those of columns, and others, which number the matrices, in any order.
    """

    shape: tuple  # of the device's array
    row_dims: tuple
    column_dims: tuple
    layout: Layout
    scale: float  # of updates

    @property
    def dim_order(self):
        """The array's dims as the blocks have them: those that number matrices, rows, columns."""
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
        """Blocks on a device, one of each matrix."""
        return math.prod(self.shape) // math.prod(self.block)

    def to_blocks(self, x):
        """The device's array -> [n_blocks, rows, columns]."""
        return x.transpose(self.dim_order).reshape(self.n_blocks, *self.block)

    def from_blocks(self, blocks):
        """Blocks of results, which may be padded -> updates as the device's array, in float32."""
        rows, columns = self.block
        ordered = [self.shape[dim] for dim in self.dim_order]
        blocks = blocks[:, :rows, :columns].reshape(ordered)
        x = blocks.transpose(np.argsort(self.dim_order))
        return self.scale * x.astype(jnp.float32)


def sizes_of_parts(p):
    """Sizes along the last dim of the matrices that lie side by side in a `Param`, such as a gate beside its values."""
    return [n for n in p.parts if n] or [p.shape[-1]]


def matrices_of(table, mesh_size):
    """The `Matrices` of a list of `Param`s on a mesh of {axis: size}: one for each part of each."""
    found = []
    for p in table:
        axes = [real_axes(entry, mesh_size) for entry in p.spec]
        split = [axes_size(dim_axes, mesh_size) for dim_axes in axes]
        # whichever comes first in the array are the rows, so that few arrays need a transpose
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
    """`Matrices`, perhaps with rows and columns exchanged, so that as many as possible fit the same bucket: what is
    split are rows, and of unsplit ones the fewer are rows."""
    rows, columns, copies = matrices.layout
    exchanged = matrices._replace(
        row_dims=matrices.column_dims,
        column_dims=matrices.row_dims,
        layout=Layout(columns, rows, copies),
    )
    return min(matrices, exchanged, key=lambda m: (m.layout.columns, m.block))


class Bucket(NamedTuple):
    """Matrices that are worked on as one batch, and how many devices they are shared out to."""

    members: tuple  # indices in the list of `Matrices`
    layout: Layout
    block: tuple  # (rows, columns) that all blocks are padded to
    n_blocks: int  # on a device, without empty slots
    grid: tuple  # devices that split (rows, columns)
    n_copies: int  # devices along the axes of copies

    @property
    def matrix(self):
        """(rows, columns) of a whole, padded matrix."""
        rows, columns = self.block
        return rows * self.grid[0], columns * self.grid[1]

    @property
    def n_owned(self):
        """Matrices that a device owns, empty slots included."""
        return -(-self.n_blocks // (math.prod(self.grid) * self.n_copies))

    @property
    def owner_copies(self):
        """Of the devices with copies, how many share the matrices out.

        The fewest with which `n_owned` is what it would be with all: the updates are gathered among them alone. The
        next ones do the same work among themselves.
        """
        enough = math.ceil(self.n_blocks / (math.prod(self.grid) * self.n_owned))
        numbers = range(enough, self.n_copies + 1)
        return next(n for n in numbers if self.n_copies % n == 0)

    @property
    def n_slots(self):
        """Blocks on a device with empty slots, so that every owner has as many matrices."""
        return self.n_owned * math.prod(self.grid) * self.owner_copies

    @property
    def flops(self):
        """Operations of a device."""
        return self.n_owned * newton_schulz_flops(*self.matrix)

    @property
    def exchanged(self):
        """Numbers that a device sends to owners, and again those that it sends back as an owner."""
        if math.prod(self.grid) == 1:
            return 0
        return self.n_slots // self.owner_copies * math.prod(self.block)

    @property
    def gathered(self):
        """Numbers of updates that a device has once they are gathered among `owner_copies`; 0 where nothing is."""
        return self.n_slots * math.prod(self.block) if self.owner_copies > 1 else 0

    @property
    def cost(self):
        """Time of a device, in operations."""
        return self.flops + FLOPS_PER_NUMBER * (2 * self.exchanged + self.gathered)

    def pad(self, blocks):
        """Blocks of one member with zero rows and columns up to the bucket's shape."""
        rows, columns = [size - own for size, own in zip(self.block, blocks.shape[1:])]
        return jnp.pad(blocks, ((0, 0), (0, rows), (0, columns)))


def make_buckets(matrices, mesh_size):
    """The `Bucket`s of a list of `Matrices` on a mesh of {axis: size}: at first one for each layout and shape.

    Then the two buckets are merged whose merging saves most time, until none saves any. A bucket of
    fewer matrices than devices leaves devices idle: in two buckets, 3 matrices [18, 7] and 29 of [16, 7] take twice as
    long on 64 devices as in one bucket of 32 [18, 7].
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
    """Number of devices along mesh axes."""
    return math.prod(mesh_size[axis] for axis in axes)


def merged(a, b):
    """The `Bucket` of two buckets of one layout, padded to the larger rows and columns."""
    block = tuple(map(max, a.block, b.block))
    members = a.members + b.members
    return a._replace(members=members, block=block, n_blocks=a.n_blocks + b.n_blocks)


def saving(a, b):
    """What a device saves where two buckets are merged, in operations."""
    if a.layout != b.layout:
        return 0
    return a.cost + b.cost - merged(a, b).cost
