"""What a parameter table is made of: shapes, how weights lie on the mesh, how they begin.

A table is a nested dict of `Param`s. Initialization, sharding, counting and checkpoints all follow from it.
"""

import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import AXES


class Param(NamedTuple):
    """One leaf: everything about it that initialization, sharding, counting and the layers need to know."""

    shape: tuple
    spec: P
    std: float  # standard deviation of its normal initialization
    start: float = 0.0  # mean of its initialization
    gather: tuple = ()  # (dim counted from the end, axes): gathered over these before use
    expert: int = 0  # dim of experts, counted from the end, of which a device uses one; 0: none
    cast: bool = False  # used in model_dtype and decayed; otherwise float32 and not decayed
    active: float = 1.0  # share of it that one token uses
    rows: int = 0  # rows of its first dim that are used, the others are 0 and stay so; 0: all
    inputs: tuple = ()  # dims, counted from the end, that a product with it sums over
    outputs: tuple = ()  # dims, counted from the end, that the product has in their place; the rest number matrices
    parts: tuple = ()  # sizes of the matrices that lie side by side along its last dim; none: it is one
    hidden: bool = False  # inputs and outputs are hidden channels: what Muon is for


def weight_param(
    cfg, shape, std, inputs=(0,), outputs=(-1,), over=("dp",), dim=0, fixed=None, **more
):
    """`Param` of a weight from its dims `inputs` to its dims `outputs`, with standard deviation `std`.

    It is stored in parts along `dim`, over those of the mesh axes `over` that --fsdp allows and whose sizes divide it,
    and gathered before use. fixed {dim: axes}: dims that stay split in use. `more` are fields of `Param`.
    """
    n = len(shape)
    axes = storage_axes(cfg, over, shape[dim], more.get("expert"))
    spec = [None] * n
    for fixed_dim, fixed_axes in (fixed or {}).items():
        spec[fixed_dim] = fixed_axes
    facts = dict(cast=True, hidden=True) | more
    if axes:
        spec[dim] = axes
        facts["gather"] = (dim - n, axes)
    dims = dict(inputs=from_end(inputs, n), outputs=from_end(outputs, n))
    return Param(tuple(shape), P(*spec), std, **dims, **facts)


def from_end(dims, n):
    """Dims of an array of n dims, counted from its end: 0 of 3 is -3."""
    return tuple(dim % n - n for dim in dims)


def storage_axes(cfg, over, size, expert):
    """Those of the mesh axes `over` that split a dim of `size` of a weight while it is stored: not dp with --fsdp none;
    while they do not divide the size, the first is left out. Experts need all of `over`, or none."""
    if cfg.model.fsdp == "none" and not expert:
        over = tuple(axis for axis in over if axis != "dp")
    mesh_size = dict(zip(AXES, cfg.run.n_device_axis))
    while size % math.prod(mesh_size[axis] for axis in over):
        over = () if expert else over[1:]
    return over


def split_over_tp(cfg, dim):
    """Arguments of `weight_param` for a weight that is summed over `dim`, heads or feed-forward width: with
    --sequence_parallel megatron tp splits that dim in use, with ulysses it only stores a part of the weight."""
    if cfg.model.sequence_parallel == "megatron":
        return dict(fixed={dim: "tp"})
    return dict(over=("dp", "tp"))


def out_param(cfg, shape, std):
    """`Param` of the projection of heads' outputs back into the residual; shape [H, V, D]."""
    return weight_param(cfg, shape, std, inputs=(0, 1), dim=2, **split_over_tp(cfg, 0))


def scale_param(size):
    """`Param` of a norm's scale, which begins at 1."""
    return Param((size,), P(None), 0.0, start=1.0)


def bias_param(*shape, spec=P(None)):
    """`Param` of a bias, which begins at 0."""
    return Param(shape, spec, 0.0)


def embedding_param(cfg, size, std, **more):
    """`Param` of a table [size, D] with one row for each token id or position, stored in parts over the whole mesh."""
    shape = (size, cfg.model.model_dimension)
    return weight_param(cfg, shape, std, over=AXES, hidden=False, **more)


def std_into(inputs):
    """Standard deviation of a matrix whose outputs begin as large as its inputs."""
    return 1 / math.sqrt(inputs)


def std_back(inputs, layers):
    """Standard deviation of a matrix of `inputs` inputs that writes to the residual, in a model of `layers` layers: a
    tenth of `std_into`'s / sqrt(2 x layers), so that tokens begin as themselves."""
    return 0.1 / math.sqrt(inputs * 2 * layers)


def stack(layer, *sizes, over="pp"):
    """The table of a stack of layers: leading dims of `sizes` for every leaf, the first split over the axis `over`."""
    leading = P(over, *[None] * (len(sizes) - 1))

    def stacked(p):
        return p._replace(shape=(*sizes, *p.shape), spec=P(*leading, *p.spec))

    return table_map(stacked, layer)


def is_param(x):
    return isinstance(x, Param)


def table_map(f, table):
    """`f` of every Param of a table, in the table's nesting."""
    return jax.tree.map(f, table, is_leaf=is_param)


def shardings(table, mesh):
    """NamedSharding of every parameter."""
    return table_map(lambda p: NamedSharding(mesh, p.spec), table)


def init_params(table, key):
    """Float32 parameters; each leaf depends on `key` and its own path, not on the mesh or on other leaves."""

    def init(path, p):
        if p.std:
            path_hash = zlib.crc32(jax.tree_util.keystr(path).encode())
            own_key = jax.random.fold_in(key, path_hash)
            x = p.start + p.std * jax.random.normal(own_key, p.shape)
        else:
            x = jnp.full(p.shape, p.start)
        if p.rows:
            used = jnp.arange(p.shape[0])[:, None] < p.rows
            x = jnp.where(used, x, 0)
        return x

    return jax.tree_util.tree_map_with_path(init, table, is_leaf=is_param)
