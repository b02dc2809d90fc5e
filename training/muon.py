"""Muon's orthogonalization, on any mesh (arXiv:2502.16982, section 2).

Muon turns the momentum M = U S V^T of a matrix into about U V^T, whose singular values are all 1, by Newton-Schulz
steps, which are matrix products. A matrix is worked on whole: its blocks travel to one of the devices that hold them,
and the result travels back. Which device does which matrix is fixed before anything runs, by `deal`.

    stack     Matrices of one shape: a parameter, or a part of one that holds several side by side. A device holds a
              block of each of its matrices: all rows and columns, or some.
    group     Stacks that lie on the mesh in the same way and have the same shape are worked on as one batch. Other
              shapes join them, padded with zeros, where that saves time.
    owners    The devices that hold blocks of the same matrices, or copies of them, share a group out.

Example: 20 matrices [768, 2048], whose rows are split over 16 devices. Each device holds 20 blocks [48, 2048]. Each
owns 2 matrices: it sends the others the blocks of theirs and gets the 15 missing blocks of its own (12 of the 32 places
stay empty). With copies on 16 devices instead, each takes its 2, and the results are gathered.

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
# Root mean square of an update (arXiv:2502.16982, section 2.2): about AdamW's
UPDATE_RMS = 0.2
# Added to the norm of a matrix, which may be 0
EPS = 1e-12
# Operations that a TPU does while it sends one number of two bytes
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
    spread = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)

    def update(momentum, params):
        leaves, tree = jax.tree.flatten(momentum)
        return jax.tree.unflatten(tree, spread(leaves))

    return optax.stateless(update)


def hidden_params(cfg):
    """The `Param`s of Muon's leaves, in the order of a flattened tree."""
    table = model.param_table(cfg)
    leaves = jax.tree.leaves(table, is_leaf=parameters.is_param)
    return [p for p in leaves if p.hidden]


def orthogonalize_local(leaves, table, mesh_size, dtype):
    """Muon's updates, float32, of a device's parts of the leaves that `table` describes, inside shard_map; what travels
    and is multiplied is of type `dtype`."""
    stacks = stacks_of(table, mesh_size)
    pieces = []
    for x, p in zip(leaves, table):
        borders = np.cumsum(sizes_of_parts(p))[:-1]
        pieces += jnp.split(x.astype(dtype), borders, -1)
    updates = [None] * len(stacks)
    for group in deal(stacks, mesh_size):
        blocks = [group.pad(stacks[i].to_blocks(pieces[i])) for i in group.members]
        # nothing for the places that the members leave empty
        empty = group.places - group.number
        blocks.append(jnp.zeros((empty, *group.block), dtype))
        whole = to_owners(jnp.concatenate(blocks), *group.layout, group.sharers)
        blocks = from_owners(newton_schulz(whole), *group.layout, group.sharers)
        for i in group.members:
            updates[i] = stacks[i].from_blocks(blocks[: stacks[i].number])
            blocks = blocks[stacks[i].number :]
    results = []
    for p in table:
        n = len(sizes_of_parts(p))
        results.append(jnp.concatenate(updates[:n], -1))
        updates = updates[n:]
    return results


def newton_schulz(x):
    """About U V^T of each matrix U S V^T of x [n, rows, columns], in x's type: singular values of 0.7 to 1.2, where
    they are at least 0.003 of the matrix's norm. Zero rows and columns stay zero."""
    wide = x.shape[1] <= x.shape[2]
    squares = jnp.sum(jnp.square(x), (1, 2), jnp.float32, keepdims=True)
    norm = jnp.sqrt(squares)
    scale = (1 / (norm + EPS)).astype(x.dtype)
    for a, b, c in COEFFICIENTS:
        # the smaller of X X^T and X^T X
        products = "nrc,nsc->nrs" if wide else "nrc,nrd->ncd"
        gram = jnp.einsum(products, x, x) * scale**2
        factor = b * gram + c * (gram @ gram)
        x = scale * (a * x + (factor @ x if wide else x @ factor))
        scale = 1  # the first step has made it so
    return x


def newton_schulz_flops(rows, columns):
    """Operations of `newton_schulz` for one matrix."""
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


class Layout(NamedTuple):
    """Mesh axes of a stack: those that split rows, those that split columns, and those along which there are copies."""

    rows: tuple
    columns: tuple
    copies: tuple


class Stack(NamedTuple):
    """Matrices of one shape, as a device holds them: [*numbers, *first dims, *second dims] in some order."""

    shape: tuple  # of the device's array
    first: tuple  # its dims that are rows
    second: tuple  # its dims that are columns
    layout: Layout
    scale: float  # of updates

    @property
    def order(self):
        """Its dims: those that number matrices, rows, columns."""
        others = set(range(len(self.shape))) - {*self.first, *self.second}
        return (*sorted(others), *self.first, *self.second)

    @property
    def block(self):
        """(rows, columns) of a block."""
        return self.size(self.first), self.size(self.second)

    @property
    def number(self):
        """Of its blocks."""
        return math.prod(self.shape) // math.prod(self.block)

    def size(self, dims):
        return math.prod(self.shape[dim] for dim in dims)

    def to_blocks(self, x):
        """The device's array -> [number, rows, columns]."""
        return x.transpose(self.order).reshape(self.number, *self.block)

    def from_blocks(self, blocks):
        """Results of at least these sizes -> updates as the device's array, in float32."""
        rows, columns = self.block
        ordered = [self.shape[dim] for dim in self.order]
        blocks = blocks[:, :rows, :columns].reshape(ordered)
        x = blocks.transpose(np.argsort(self.order))
        return self.scale * x.astype(jnp.float32)


def sizes_of_parts(p):
    """Sizes along the last dim of the matrices that lie side by side in a `Param`."""
    return [n for n in p.parts if n] or [p.shape[-1]]


def stacks_of(table, mesh_size):
    """The `Stack`s of a list of `Param`s on a mesh of {axis: size}: one for each part of each."""
    stacks = []
    for p in table:
        axes = [real_axes(entry, mesh_size) for entry in p.spec]
        split = [axes_size(dim_axes, mesh_size) for dim_axes in axes]
        n = len(p.shape)
        # in the order of the array, so that few are transposed
        sides = [tuple(sorted(dim % n for dim in dims)) for dims in (p.inputs, p.outputs)]
        first, second = sorted(sides)
        row_axes = sum((axes[dim] for dim in first), ())
        column_axes = sum((axes[dim] for dim in second), ())
        used = sum(axes, ())
        copies = tuple(a for a in real_axes(EXPERT_AXES, mesh_size) if a not in used)
        layout = Layout(row_axes, column_axes, copies)
        for size in sizes_of_parts(p):
            whole = (*p.shape[:-1], size)
            local = tuple(size // parts for size, parts in zip(whole, split))
            largest = max(math.prod(whole[dim] for dim in dims) for dims in sides)
            scale = UPDATE_RMS * math.sqrt(largest)
            stacks.append(alike(Stack(local, first, second, layout, scale)))
    return stacks


def real_axes(entry, mesh_size):
    """Axes of an entry of a PartitionSpec that split anything."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in axes if mesh_size[axis] > 1)


def alike(stack):
    """`stack`, with rows and columns in the order that makes most stacks alike: split rows first, then few rows."""
    rows, columns, copies = stack.layout
    swapped = stack._replace(
        first=stack.second, second=stack.first, layout=Layout(columns, rows, copies)
    )
    return min(stack, swapped, key=lambda s: (s.layout.columns, s.block))


class Group(NamedTuple):
    """Stacks that are worked on as one batch, and the devices that share it out."""

    members: tuple  # numbers of the stacks
    layout: Layout
    block: tuple  # (rows, columns) that all blocks are padded to
    number: int  # of blocks on a device
    grid: tuple  # devices that split (rows, columns)
    n_copies: int  # devices along the axes of copies

    @property
    def whole(self):
        """(rows, columns) of a matrix."""
        return tuple(size * n for size, n in zip(self.block, self.grid))

    @property
    def owned(self):
        """Matrices that a device works on, empty places included."""
        return -(-self.number // (math.prod(self.grid) * self.n_copies))

    @property
    def sharers(self):
        """Devices with copies that share the matrices out: as few as make `owned` no larger. The next ones do the same
        among themselves, so that less must be gathered."""
        enough = math.ceil(self.number / (math.prod(self.grid) * self.owned))
        numbers = range(enough, self.n_copies + 1)
        return next(n for n in numbers if self.n_copies % n == 0)

    @property
    def places(self):
        """For blocks on a device, so that every owner has as many matrices."""
        return self.owned * math.prod(self.grid) * self.sharers

    @property
    def flops(self):
        """Operations of a device."""
        return self.owned * newton_schulz_flops(*self.whole)

    @property
    def exchanged(self):
        """Numbers that a device sends to owners, and again those that it sends back."""
        if math.prod(self.grid) == 1:
            return 0
        return self.places // self.sharers * math.prod(self.block)

    @property
    def gathered(self):
        """Numbers that the sharers gather."""
        return self.places * math.prod(self.block) if self.sharers > 1 else 0

    @property
    def cost(self):
        """Time of a device, in operations."""
        return self.flops + FLOPS_PER_NUMBER * (2 * self.exchanged + self.gathered)

    def pad(self, blocks):
        """Blocks of one member with zeros up to the group's rows and columns."""
        rows, columns = [size - own for size, own in zip(self.block, blocks.shape[1:])]
        return jnp.pad(blocks, ((0, 0), (0, rows), (0, columns)))


def deal(stacks, mesh_size):
    """The `Group`s of stacks on a mesh of {axis: size}. Groups are joined while that saves time: 3 matrices [18, 7] and
    29 of [16, 7] on 64 devices take half as long as 32 of [18, 7]."""
    alike_ones = {}
    for i, stack in enumerate(stacks):
        alike_ones.setdefault((stack.layout, stack.block), []).append(i)
    groups = []
    for (layout, block), members in alike_ones.items():
        *grid, n_copies = [axes_size(axes, mesh_size) for axes in layout]
        number = sum(stacks[i].number for i in members)
        groups.append(Group(tuple(members), layout, block, number, tuple(grid), n_copies))
    while True:
        pairs = [pair for pair in itertools.combinations(groups, 2) if saving(*pair) > 0]
        if not pairs:
            return groups
        a, b = max(pairs, key=lambda pair: saving(*pair))
        groups.remove(a)
        groups.remove(b)
        groups.append(joined(a, b))


def axes_size(axes, mesh_size):
    """Number of devices along mesh axes."""
    return math.prod(mesh_size[axis] for axis in axes)


def joined(a, b):
    """The `Group` of two groups of one layout."""
    block = tuple(map(max, a.block, b.block))
    members = a.members + b.members
    return a._replace(members=members, block=block, number=a.number + b.number)


def saving(a, b):
    """What a device saves where two groups are joined, in operations."""
    if a.layout != b.layout:
        return 0
    return a.cost + b.cost - joined(a, b).cost
