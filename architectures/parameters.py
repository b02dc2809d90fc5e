"""What a parameter table is made of: shapes, how they lie on the mesh, how they begin."""

import dataclasses
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import AXES


class Param(NamedTuple):
    """One leaf: everything about it that initialisation, sharding, counting and the layers need to know."""

    shape: tuple
    spec: P
    std: float  # of its normal initialisation
    start: float = 0.0  # mean of its initialisation
    gather: tuple = ()  # (dim counted from the end, axes): gathered over these before use
    expert: int = 0  # dim counted from the end of which a device uses one alone, its own expert; 0: there is none
    matrix: bool = False  # used in model_dtype and decayed; otherwise float32 and not decayed
    active: float = 1.0  # share of it that one token uses
    rows: int = 0  # of its first dim that are used, the others are 0 and stay so; 0: all


def matrix(cfg, shape, std, over=("dp",), fsdp=0, fixed=None, **more):
    """`Param` of a weight whose dim `fsdp` is split over the axes `over` (or as many of them as divide it; not over dp
    where --fsdp is none) until it is used; dims in `fixed` ({dim: axes}) stay split."""
    sizes = dict(zip(AXES, cfg.run.n_device_axis))
    spec = [(fixed or {}).get(dim) for dim in range(len(shape))]
    if cfg.model.fsdp == "none" and not more.get("expert"):
        over = tuple(axis for axis in over if axis != "dp")
    while over and shape[fsdp] % math.prod(sizes[a] for a in over):
        over = () if more.get("expert") else over[1:]
    if over:
        spec[fsdp] = over
        more["gather"] = (fsdp - len(shape), over)
    return Param(tuple(shape), P(*spec), std, **{"matrix": True, **more})


def over_tp(cfg, dim):
    """How tp splits a weight behind a sum over `dim`, heads or feed-forward width, as arguments of `matrix`."""
    return (
        dict(fixed={dim: "tp"})
        if cfg.model.sequence_parallel == "megatron"
        else dict(over=("dp", "tp"))
    )


def scale_param(size):
    """`Param` of a norm's scale."""
    return Param((size,), P(None), 0.0, start=1.0)


def bias_param(*shape, spec=P(None)):
    """`Param` of a bias."""
    return Param(shape, spec, 0.0)


def stack(layer, *sizes, over="pp"):
    """Leading dims for every leaf of a layer's table, the first of them split over the axis `over`."""
    leading = P(over, *[None] * (len(sizes) - 1))
    return table_map(
        lambda p: p._replace(shape=(*sizes, *p.shape), spec=P(*leading, *p.spec)), layer
    )


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
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        x = (
            p.start + p.std * jax.random.normal(own, p.shape)
            if p.std
            else jnp.full(p.shape, p.start)
        )
        return jnp.where(jnp.arange(p.shape[0])[:, None] < p.rows, x, 0) if p.rows else x

    return jax.tree_util.tree_map_with_path(init, table, is_leaf=is_param)


def with_model(cfg, **flags):
    """`cfg` with flags of the model changed."""
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **flags))
