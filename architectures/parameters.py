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

    dims: tuple  # names of its dims, such as ("blocks", "d", "h", "k"); the other fields name dims by them
    shape: tuple
    spec: P
    std: float  # standard deviation of its normal initialization
    start: float = 0.0  # mean of its initialization
    gather_dim: str = ""  # dim along which it is stored in parts, gathered before use; "": none
    gather_axes: tuple = ()  # mesh axes over which these parts lie
    expert: str = ""  # dim of experts, of which a device uses one; "": none
    cast: bool = False  # used in model_dtype and decayed; otherwise float32 and not decayed
    active: float = 1.0  # share of it that one token uses
    rows: int = 0  # rows of its first dim that are used, the others are 0 and stay so; 0: all
    inputs: tuple = ()  # dims that a product with it sums over
    outputs: tuple = ()  # dims that the product has in their place; the rest number matrices
    parts: tuple = ()  # sizes of the matrices that lie side by side along its last dim; none: it is one
    hidden: bool = False  # inputs and outputs are hidden channels: what Muon is for

    def position(self, dim):
        """Where a dim is, counted from the end: so it is the same in one layer's weight as in the stack of all layers,
        which has more dims in front."""
        return self.dims.index(dim) - len(self.dims)


def weight_param(
    cfg, sizes, std, product, stored_along="", over=("dp",), split=None, expert="", **more
):
    """`Param` of a weight with dims of the `sizes` {name: size}, which begins with standard deviation `std`.

    product: what it does, "d -> h k" where it takes channels d to heads h of k channels each. Dims that are not in it
    number separate matrices. `split` {dim: axes} names the dims that stay split in use. The weight is stored in parts
    along the dim `stored_along`, by default the first, over those of the mesh axes `over` that --fsdp allows and whose
    sizes divide it, and gathered before use. `more` are fields of `Param`.

    Example: on a mesh of (8, 2, 2), queries' weight_param(cfg, dict(d=768, h=12, k=64), std, "d -> h k",
    split=dict(h="tp")) has the spec P("dp", "tp", None). A device stores [96, 6, 64] of it and multiplies by
    [768, 6, 64].
    """
    stored_along = stored_along or next(iter(sizes))
    axes = storage_axes(cfg, over, sizes[stored_along], expert)
    lies = dict(split or {})
    facts = dict(cast=True, hidden=True, expert=expert) | more
    if axes:
        lies[stored_along] = axes
        facts |= dict(gather_dim=stored_along, gather_axes=axes)
    inputs, outputs = product.split("->")
    facts |= dict(inputs=tuple(inputs.split()), outputs=tuple(outputs.split()))
    return param(sizes, std, split=lies, **facts)


def param(sizes, std, split=None, **more):
    """`Param` with dims of the `sizes` {name: size}, split over the mesh axes of `split` {dim: axes}."""
    split = split or {}
    spec = P(*[split.get(dim) for dim in sizes])
    return Param(tuple(sizes), tuple(sizes.values()), spec, std, **more)


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
        return dict(split={dim: "tp"})
    return dict(over=("dp", "tp"))


def out_param(cfg, H, channels, std):
    """`Param` of the projection of the outputs of H heads, all of the same width, back into the residual."""
    sizes = dict(h=H, k=channels, d=cfg.model.model_dimension)
    return weight_param(cfg, sizes, std, "h k -> d", stored_along="d", **split_over_tp(cfg, "h"))


def scale_param(split=None, **sizes):
    """`Param` of a norm's scale, which begins at 1; `split` {dim: axes}."""
    return param(sizes, 0.0, split, start=1.0)


def bias_param(split=None, **sizes):
    """`Param` of a bias, which begins at 0; `split` {dim: axes}."""
    return param(sizes, 0.0, split)


def embedding_param(cfg, rows, std, used=0, **more):
    """`Param` of a table [rows, D] with one row for each token id or position, stored in parts over the whole mesh.
    used: the number of its first rows that mean anything, if not all."""
    sizes = dict(row=rows, d=cfg.model.model_dimension)
    return weight_param(cfg, sizes, std, "row -> d", over=AXES, hidden=False, rows=used, **more)


def std_into(inputs):
    """Standard deviation of a matrix whose outputs begin as large as its inputs."""
    return 1 / math.sqrt(inputs)


def std_back(inputs, layers):
    """Standard deviation of a matrix of `inputs` inputs that writes to the residual, in a model of `layers` layers: a
    tenth of `std_into`'s / sqrt(2 x layers), so that tokens begin as themselves."""
    return 0.1 / math.sqrt(inputs * 2 * layers)


def stack(layer, over="pp", **sizes):
    """The table of layers stacked over dims of the `sizes` {name: size}, the first of which is split over `over`."""
    first = next(iter(sizes))
    spec = [over if dim == first else None for dim in sizes]

    def stack_one(p):
        return p._replace(
            dims=(*sizes, *p.dims), shape=(*sizes.values(), *p.shape), spec=P(*spec, *p.spec)
        )

    return table_map(stack_one, layer)


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
