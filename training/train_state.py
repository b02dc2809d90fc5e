"""The training state, which a step reads and writes: its shapes, its shardings, and its initial values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
from architectures import parameters
from training import loss_scale


class TrainState(NamedTuple):
    """All that a step reads and writes. A checkpoint holds this and the number of sequences consumed."""

    params: Any  # float32, a tree as of `model.param_table`
    opt_state: Any
    step: jax.Array  # int32 []
    key: jax.Array  # uint32 [2], the random key of dropout


class ScaledState(NamedTuple):
    """The `TrainState` of a float16 run. It is a class of its own, since Orbax would also store that others have no
    scale, and then read no checkpoint that does not say so."""

    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array
    scale: loss_scale.LossScale


def with_scale(cfg, state, scale):
    """`TrainState`, or in a float16 run the `ScaledState` with the scale that `scale()` makes."""
    return ScaledState(*state, scale()) if loss_scale.is_needed(cfg) else state


def abstract_params(cfg, mesh):
    """The model's parameters as float32 ShapeDtypeStructs with shardings."""
    table = model.param_table(cfg)
    return jax.tree.map(
        lambda param, sharding: jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=sharding),
        table,
        parameters.shardings(table, mesh),
        is_leaf=parameters.is_param,
    )


def map_opt_state(optimizer, params, of_params, of_others, beside):
    """A tree like the optimizer's state for `params`, which is a tree of ShapeDtypeStructs.

    Its leaves are of_params(leaf, x) for a leaf of the state that belongs to a parameter, where x is that parameter's
    leaf in the tree `beside`, and of_others(leaf) for all other leaves.
    """

    def is_masked(leaf):
        """Whether the leaf belongs to a parameter that another rule of the optimizer updates."""
        return isinstance(leaf, optax.MaskedNode)

    return optax.tree_map_params(
        optimizer,
        lambda leaf, x: leaf if is_masked(leaf) else of_params(leaf, x),
        jax.eval_shape(optimizer.init, params),
        beside,
        transform_non_params=of_others,
        is_leaf=is_masked,
    )


def abstract_state(cfg, mesh, optimizer):
    """A TrainState of ShapeDtypeStructs. Leaves of the optimizer are sharded like their parameters, and scalars are
    replicated."""
    params = abstract_params(cfg, mesh)
    replicated = NamedSharding(mesh, P())
    opt_state = map_opt_state(
        optimizer,
        params,
        lambda leaf, param: leaf.update(sharding=param.sharding),
        lambda leaf: leaf.update(sharding=replicated),
        beside=params,
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated)

    def scale():
        shapes = jax.eval_shape(loss_scale.first)
        return jax.tree.map(lambda leaf: leaf.update(sharding=replicated), shapes)

    return with_scale(cfg, TrainState(params, opt_state, step, key), scale)


def arranger(cfg, abstract):
    """A function that gives a tree the shapes and shardings of the tree `abstract`.

    Checkpoints and samples hold the blocks in their order in the model, [blocks, ...]. With --pp_interleave, a stage
    holds several groups of blocks, one for each round, and so a running state has other shapes.
    """
    if cfg.run.pp_interleave == 1:
        return lambda tree: tree

    def arrange(tree):
        return jax.tree.map(lambda x, a: x.reshape(a.shape), tree, abstract)

    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(arrange, out_shardings=shardings)


def init_state(cfg, abstract, optimizer, params=None):
    """The TrainState at step 0, with the same values on every mesh. Every device computes its own part. `params`, if
    given, are used instead of random ones, and are donated: the caller can no longer use them."""

    def init(params, seed):
        init_key, key = jax.random.split(jax.random.key(seed))
        params = params or parameters.init_params(model.param_table(cfg), init_key)
        opt_state = optimizer.init(params)
        state = TrainState(params, opt_state, jnp.int32(0), jax.random.key_data(key))
        return with_scale(cfg, state, loss_scale.first)

    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params, cfg.run.seed)
