"""Every collective of the program, with its transpose and its paper.

Comes before: `model.py`, `architectures/` and `training/muon.py`, which call these. Comes next: with the gradient at
hand, `training/optimizer.py`.

A collective is an operation in which devices exchange arrays. All of them run inside `shard_map`: shapes are local,
those of the array that one device holds. The transpose is what the backward pass runs in its place. The collectives of
`jax.lax` are called here and, for TPUs, in `kernels/xla_tpu.py`, nowhere else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from kernels import xla_tpu

# The axes of the mesh: data, pipeline and tensor parallelism. A device's number counts tp fastest, dp slowest.
AXES = ("dp", "pp", "tp")
# The axes that the devices of one pipeline stage lie along. They share out the experts of their layers.
EXPERT_AXES = ("dp", "tp")
# How tokens [accumulation, M, B, T] lie on the mesh: pp splits the microbatches, dp the sequences, tp the positions.
BATCH_SPEC = P(None, "pp", "dp", "tp")


def platform():
    """The platform of the mesh's devices, inside `shard_map`: cpu, gpu or tpu."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def all_gather(x, axis, dim):
    """Join the parts [.., n, ..] of all devices of a mesh axis along `dim`, in order -> [.., axis size x n, ..].
    Transpose: `reduce_scatter`."""
    n = lax.axis_size(axis)
    if n == 1:
        return x
    if platform() == "tpu":
        return xla_tpu.all_gather(x, axis, dim, n, lax.axis_size(AXES))
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x, axis, dim):
    """Sum x [.., axis size x n, ..] over a mesh axis; each device takes its part. Transpose: `all_gather`."""
    shape = list(x.shape)
    shape[dim] //= lax.axis_size(axis)
    part = jax.ShapeDtypeStruct(shape, x.dtype)
    scatter = jax.linear_transpose(functools.partial(all_gather, axis=axis, dim=dim), part)
    return scatter(x)[0]


def sum_over(x, axes):
    """Sum over mesh axes: every device gets the whole sum. Transpose: `sum_over`, since a device's backward pass knows
    the part of the sum's gradient that comes from its own use of the sum."""
    return lax.psum(x, axes)


def largest(x, axes):
    """Largest x of all devices of mesh axes, of integers."""
    return lax.pmax(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(w, p, dtype, exchange=False):
    """Gather a weight just before use (ZeRO-3, arXiv:1910.02054, section 5.3): w, stored in float32 as its `Param` p
    says -> the whole weight, or this device's expert where several share one, in `dtype`, which is also what travels.
    Transpose: `scatter_weight_gradient`."""
    return _whole(w.astype(dtype), p)


def _gather_weight_forward(w, p, dtype, exchange):
    return gather_weight(w, p, dtype, exchange), None


def _gather_weight_backward(p, dtype, exchange, _, g):
    return (scatter_weight_gradient(g.astype(jnp.float32), p, exchange),)


gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)


def scatter_weight_gradient(g, p, exchange=False):
    """Reduce the float32 gradient g of what `gather_weight` gave, and scatter it to where the weight of the `Param` p
    is stored; with `exchange` by `scatter_gradient`."""
    if exchange and p.gather_dim and not p.expert:
        return scatter_gradient(g, p.position(p.gather_dim), p.gather_axes)
    stored = list(g.shape)
    if p.gather_dim:
        stored[p.position(p.gather_dim)] //= lax.axis_size(p.gather_axes)
    if p.expert:
        experts = p.position(p.expert)
        stored[experts] = p.shape[experts]
    part = jax.ShapeDtypeStruct(stored, jnp.float32)
    [scattered] = jax.linear_transpose(functools.partial(_whole, p=p), part)(g)
    return scattered


# Devices of an axis from which on an all-to-all takes longer than a reduce-scatter: bytes travel far on a larger torus
MOST_EXCHANGED = 64


def scatter_gradient(g, dim, axes):
    """Sum g over mesh axes, each device taking its part along `dim`: each sends every other its part of g, and adds up
    what it gets. The TPU compiler lets devices compute during an all-to-all, and has them wait for a reduce-scatter."""
    dim %= g.ndim
    for axis in axes:
        n = lax.axis_size(axis)
        parts = g.reshape(*g.shape[:dim], n, g.shape[dim] // n, *g.shape[dim + 1 :])
        g = lax.all_to_all(parts, axis, dim, dim).sum(dim)
    return g


def count_slices(devices):
    """Number of TPU slices that devices lie in, which only a slow network joins; 1 for other devices."""
    if devices[0].platform != "tpu":
        return 1
    # those of a single slice that only the compiler knows (planning/machines.py) have no index
    return len({getattr(device, "slice_index", 0) for device in devices})


def _whole(w, p):
    """The weight that a device uses, from the part that it stores."""
    if p.expert:
        return _own_expert(w, p)
    if p.gather_dim:
        dim = p.position(p.gather_dim) % w.ndim
        # one by one: XLA reduces and scatters over one axis only
        for axis in reversed(p.gather_axes):
            w = all_gather(w, axis, dim)
    return w


def _own_expert(w, p):
    """This device's expert, where several devices share one; see `expert_groups`.

    Where the stored weight is split along D, it takes two steps. E = 2 experts on 4 devices, which store slices 0 to 3
    of both along D:

        device          0           1           2           3
        stores          A0 B0       A1 B1       A2 B2       A3 B3
        all-to-all      A0 A2       A1 A3       B0 B2       B1 B3        in groups [0, 2] and [1, 3]
        all-gather      A0..A3      A0..A3      B0..B3      B0..B3       in groups [0, 1] and [2, 3]

    Where the devices do not divide D, each stores all experts whole, and nothing travels.
    """
    E, experts = p.shape[p.position(p.expert)], p.position(p.expert) % w.ndim
    different, same = expert_groups(E, lax.axis_size(EXPERT_AXES))
    if not p.gather_dim:
        own = lax.axis_index(EXPERT_AXES) // len(different)
        return lax.dynamic_slice_in_dim(w, own, 1, experts)
    dim = p.position(p.gather_dim) % w.ndim
    w = lax.all_to_all(w, EXPERT_AXES, experts, dim, axis_index_groups=different, tiled=True)
    shape = w.shape  # [.., 1, .., E x slice, ..]
    w = w.reshape(*shape[:dim], E, -1, *shape[dim + 1 :])
    w = lax.all_gather(w, EXPERT_AXES, axis=dim + 1, tiled=True, axis_index_groups=same)
    return w.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def expert_groups(E, devices):
    """(groups that hold different experts, groups that hold the same one) of the devices of a stage that share E
    experts, as `axis_index_groups`; (None, None) where each device has experts of its own."""
    if devices <= E:
        return None, None
    grid = np.arange(devices).reshape(E, -1)
    return grid.T.tolist(), grid.tolist()


def to_experts(x):
    """Send the buckets of every expert to the devices that hold it (GShard, arXiv:2006.16668, section 3): x [E, C, D],
    from this device's tokens -> [E/p, p, C, D], the buckets of its own experts from p = dp x tp senders. Where p > E,
    each expert's p/E devices take the buckets of E senders each: [1, E, C, D]. Transpose: `from_experts`."""
    devices = lax.axis_size(EXPERT_AXES)
    if devices == 1:
        return x.reshape(len(x), 1, *x.shape[1:])
    E = len(x)
    n = min(E, devices)
    different, _ = expert_groups(E, devices)
    # One expert on each device: a dim of 1 beside n would have a TPU copy the buckets into another order.
    if n == E:
        return lax.all_to_all(x, EXPERT_AXES, 0, 0, axis_index_groups=different)[None]
    x = x.reshape(n, -1, *x.shape[1:])  # [n, E/n, C, D]
    x = lax.all_to_all(x, EXPERT_AXES, 0, 0)
    return x.swapaxes(0, 1)


def from_experts(x):
    """Send what the experts made of their buckets back: [E/p, p, C, D] -> [E, C, D]. Transpose: `to_experts`."""
    per_device, senders, C, D = x.shape
    part = jax.ShapeDtypeStruct((per_device * senders, C, D), x.dtype)
    return jax.linear_transpose(to_experts, part)(x)[0]


def gather_tokens(x, E):
    """Gather what belongs to tokens, x [n, ...], from the min(E, dp tp) devices that share out the same E experts ->
    [N, ...]. Transpose: `scatter_tokens`."""
    return _among_experts(lax.all_gather, x, E)


def scatter_tokens(x, E):
    """Sum x [N, ...] over the devices that share out the same E experts; each keeps its own tokens' part [n, ...].
    Transpose: `gather_tokens`."""
    return _among_experts(lax.psum_scatter, x, E)


def _among_experts(collective, x, E):
    devices = lax.axis_size(EXPERT_AXES)
    if devices == 1:
        return x
    different, _ = expert_groups(E, devices)
    return collective(x, EXPERT_AXES, tiled=True, axis_index_groups=different)


def first_own_expert(E):
    """Number of the first expert, of E, that this device holds."""
    return lax.axis_index(EXPERT_AXES) * E // lax.axis_size(EXPERT_AXES)


def gather_sequence(x, split):
    """Enter a tensor-parallel region: [B, T/tp, ...] -> [B, T, ...] (arXiv:2205.05198, section 4.2.2). Transpose:
    reduce-scatter over T. Without `split` (decoding), T is whole already and nothing travels."""
    return all_gather(x, "tp", 1) if split else x


def scatter_sequence(x, split):
    """Leave a tensor-parallel region: sum the partial sums [B, T, D] of tp's devices -> [B, T/tp, D]. Transpose:
    all-gather over T. Without `split` (decoding), an all-reduce over tp -> [B, T, D]."""
    return reduce_scatter(x, "tp", 1) if split else lax.psum(x, "tp")


def exchange_heads(x, split):
    """Own heads of all tokens -> all heads of own tokens: [B, H/tp, T, K] -> [B, H, T/tp, K], by an all-to-all
    (DeepSpeed Ulysses, arXiv:2309.14509, section 3.1). Without `split` (decoding), an all-gather -> [B, H, T, K]."""
    if lax.axis_size("tp") == 1:
        return x
    if not split:
        return lax.all_gather(x, "tp", axis=1, tiled=True)
    return lax.all_to_all(x, "tp", split_axis=2, concat_axis=1, tiled=True)


def to_owners(x, rows, columns, copies, owner_copies):
    """Make blocks whole matrices, each with one of the devices that hold its blocks (arXiv:2502.16982, section 2.3, by
    an all-to-all instead of a gather). The way back: `from_owners`.

    x [n, r, c]: this device's blocks of n matrices, which the axes `rows` split into i and `columns` into j parts;
    along the axes `copies` all devices hold the same, and `owner_copies` of them share the matrices out. Returns
    [n / (i j owner_copies), i r, j c], the matrices that this device owns.

    Four matrices, i = 2, j = 1, copies on two devices:

        device                   0           1           2           3
        holds the rows           0 A B C D   1 A B C D   0 A B C D   1 A B C D
        takes its share          0 A B       1 A B       0 C D       1 C D
        all-to-all over `rows`   01 A        01 B        01 C        01 D
    """
    if owner_copies > 1:
        own = lax.axis_index(copies) % owner_copies
        x = x.reshape(owner_copies, -1, *x.shape[1:])[own]
    if not rows + columns:
        return x
    i, j = lax.axis_size(rows), lax.axis_size(columns)
    x = x.reshape(i * j, -1, *x.shape[1:])  # [owner, matrices, r, c]
    # Its slices must not become the arrays that it was joined of: XLA:CPU sends slices, all of one layout.
    x = lax.all_to_all(lax.optimization_barrier(x), rows + columns, 0, 0)  # [block, matrices, r, c]
    _, n, r, c = x.shape
    x = x.reshape(i, j, n, r, c).transpose(2, 0, 3, 1, 4)
    return x.reshape(n, i * r, j * c)


def from_owners(x, rows, columns, copies, owner_copies):
    """The way back of `to_owners`: owned matrices [n / (i j owner_copies), i r, j c] -> blocks of all of them, [n, r,
    c]."""
    if rows + columns:
        i, j = lax.axis_size(rows), lax.axis_size(columns)
        n = len(x)
        x = x.reshape(n, i, x.shape[1] // i, j, x.shape[2] // j).transpose(1, 3, 0, 2, 4)
        x = x.reshape(i * j, *x.shape[2:])  # [block, matrices, r, c]
        x = lax.all_to_all(x, rows + columns, 0, 0)  # [owner, matrices, r, c]
        x = x.reshape(-1, *x.shape[2:])
    if owner_copies > 1:
        groups = np.arange(lax.axis_size(copies)).reshape(-1, owner_copies).tolist()
        x = lax.all_gather(x, copies, tiled=True, axis_index_groups=groups)
    return x


def next_stage(x):
    """Pass x [...] on to the next stage, the last one's to stage 0 (GPipe, arXiv:1811.06965, section 2.3). Transpose:
    pass to the stage before."""
    S = lax.axis_size("pp")
    if S == 1:
        return x
    return lax.ppermute(x, "pp", [(stage, (stage + 1) % S) for stage in range(S)])


@jax.custom_vjp
def to_stages(x):
    """Gather the microbatches of all stages: [M/S, ...] of each -> [M, ...] on each. Transpose: `share_out` by stage 0,
    the only one that feeds them to the pipeline."""
    if lax.axis_size("pp") == 1:
        return x
    return lax.all_gather(x, "pp", axis=0, tiled=True)


to_stages.defvjp(lambda x: (to_stages(x), None), lambda _, g: (share_out(g, 0),))


def share_out(x, stage):
    """Scatter the microbatches [M, ...] of one stage -> [M/S, ...] on each, by an all-to-all, of which each stage keeps
    what `stage` sent."""
    S = lax.axis_size("pp")
    if S == 1:
        return x
    x = x.reshape(S, -1, *x.shape[1:])
    return lax.all_to_all(x, "pp", 0, 0)[stage]


def from_last_stage(x, everywhere=False):
    """Outputs [M, ...] of the last stage -> [M/S, ...] on each stage by `share_out`; with `everywhere` all of them,
    [M, ...], on each stage by an all-reduce (decoding)."""
    last = lax.axis_size("pp") - 1
    if everywhere:
        return lax.psum(jnp.where(lax.axis_index("pp") == last, x, 0), "pp")
    return share_out(x, last)
