"""The mesh, the training state and the compiled steps: what the run, the plan and the benchmarks share."""

import functools
import logging
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import logging as absl_logging
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
import model
import utils
from architectures import parameters
from dataset import Prefetch, put_batch
from training.processes import together
from utils import UserError, say


class TrainState(NamedTuple):
    """All that a step reads and writes; with the number of sequences consumed it is the whole checkpoint."""

    params: Any  # float32, see model.param_table
    opt_state: Any
    step: jax.Array  # int32 []
    key: jax.Array  # uint32 [2], of dropout


def make_mesh(cfg):
    """The (dp, pp, tp) mesh over the first n_devices devices, laid out so that neighbours on an axis are near."""
    grid = device_grid(cfg.run.n_device_axis, jax.devices()[: cfg.run.n_devices])
    return Mesh(grid, collectives.AXES, axis_types=(AxisType.Auto,) * 3)


def device_grid(shape, devices):
    """`devices` as an array of `shape` (dp, pp, tp): tp on the fastest links, then pp, then dp. Slices of TPUs, which
    only a slow network joins, lie along dp, else along pp."""
    # a single slice that only a compiler knows (tools/planning/plan.py) has no index
    slices = (
        len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    )
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across = next((axis for axis in (0, 1) if shape[axis] % slices == 0), None)
    if across is None:
        raise UserError(
            f"--n_device_axis {' '.join(map(str, shape))}: dp or pp must be a multiple of the number of "
            f"TPU slices, {slices}."
        )
    outer = [slices if axis == across else 1 for axis in range(3)]
    inner = [size // n for size, n in zip(shape, outer)]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )


def abstract_params(cfg, mesh):
    """The parameters as float32 ShapeDtypeStructs with shardings."""
    table = model.param_table(cfg)
    return jax.tree.map(
        lambda p, sharding: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding),
        table,
        parameters.shardings(table, mesh),
        is_leaf=parameters.is_param,
    )


def abstract_state(cfg, mesh, optimizer):
    """TrainState of ShapeDtypeStructs with shardings: optimizer leaves lie as their parameters do, scalars all over."""
    params, replicated = abstract_params(cfg, mesh), NamedSharding(mesh, P())
    opt_state = optax.tree_map_params(
        optimizer,
        lambda s, p: s.update(sharding=p.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated),
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return TrainState(
        params, opt_state, step, jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated)
    )


def arranger(cfg, abstract):
    """Function that gives a tree the shapes and shardings of `abstract`: checkpoints and samples have the blocks in one
    row, --pp_interleave deals them out in rounds."""
    if cfg.run.pp_interleave == 1:
        return lambda tree: tree
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(
        lambda t: jax.tree.map(lambda x, a: x.reshape(a.shape), t, abstract),
        out_shardings=shardings,
    )


def init_state(cfg, abstract, optimizer, params=None):
    """TrainState at step 0, made in place on the mesh, the same on every mesh. `params`, if given, are used up."""

    def init(params):
        init_key, key = jax.random.split(jax.random.key(cfg.run.seed))
        params = params or parameters.init_params(model.param_table(cfg), init_key)
        return TrainState(params, optimizer.init(params), jnp.int32(0), jax.random.key_data(key))

    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params)


def make_train_step(cfg, mesh, optimizer, schedule):
    """`train_step(state, tokens, targets)` -> (state, metrics); tokens and targets int32 [accumulation, M, B, T].

    Gradients are averaged over the accumulation in float32. shard_map stands around the loss alone: gradient, clipping
    and optimizer see global arrays, so norms are global and replicated parameters get one gradient. Where the loss or
    the norm of the gradient is not finite, all but the step stays as it was.
    """
    gradient = jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True)

    def train_step(state, tokens, targets):
        A, M, B, _ = tokens.shape
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def accumulate(total, batch):
            i, tokens, targets = batch
            return jax.tree.map(
                jnp.add, total, gradient(state.params, tokens, targets, key, i * M * B)
            ), None

        zeros = jax.tree.map(
            jnp.zeros_like, jax.eval_shape(gradient, state.params, tokens[0], targets[0], key, 0)
        )
        total, _ = lax.scan(accumulate, zeros, (jnp.arange(A), tokens, targets))
        (mean_loss, seen), grads = jax.tree.map(lambda x: x / A, total)

        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            params = model.update_router_bias(params, seen.load, cfg.optimizer.bias_update_rate)
            norm = optax.tree.norm(grads)
            sound = jnp.isfinite(mean_loss) & jnp.isfinite(norm)
            params, opt_state = jax.tree.map(
                functools.partial(jnp.where, sound),
                (params, opt_state),
                (state.params, state.opt_state),
            )
        metrics = {
            "loss/train_loss": mean_loss,
            "loss/train_cross_entropy_loss": seen.cross_entropy,
            "lr": schedule(state.step),
            "grad_norm": norm,
        }
        if cfg.model.n_experts:
            load = jnp.concatenate(
                [x.reshape(-1, cfg.model.n_experts) for x in seen.load.values()]
            )  # [layers, E]
            metrics |= {
                "loss/load_loss": seen.load_loss,
                "load/head": (load / load.sum(-1, keepdims=True)).mean(
                    0
                ),  # [E] share of the routed tokens
                "load/dropped": seen.dropped,
            }
        if cfg.model.mtp_depth:
            metrics["loss/mtp_loss"] = seen.mtp
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    return train_step


def batch_shape(cfg):
    """[accumulation, M, B, T] of a step's tokens over the whole mesh."""
    d, r = cfg.data, cfg.run
    return (
        r.accumulation_steps,
        d.microbatches,
        d.train_batch_size * r.n_device_axis[0] // d.microbatches,
        cfg.model.T,
    )


def lower_train_step(cfg, mesh, optimizer, schedule, abstract):
    """`make_train_step`, to be compiled for a TrainState like `abstract`, which it overwrites. (Not for a state itself:
    one that was restored would make another program.)"""
    tokens = jax.ShapeDtypeStruct(
        batch_shape(cfg), jnp.int32, sharding=NamedSharding(mesh, collectives.BATCH_SPEC)
    )
    shardings = jax.tree.map(lambda s: s.sharding, abstract), NamedSharding(mesh, P())
    step = jax.jit(
        make_train_step(cfg, mesh, optimizer, schedule), donate_argnums=0, out_shardings=shardings
    )
    return step.lower(abstract, tokens, tokens)


def make_evaluate(cfg, mesh, corpus):
    """`evaluate(params)` -> {"loss/val_loss", "loss/val_cross_entropy_loss"} over eval_steps batches drawn from all
    of the validation shards: the same ones every time, whatever --seed."""
    M, B = cfg.data.microbatches, cfg.data.val_batch_size * cfg.run.n_device_axis[0]
    batches = min(cfg.run.eval_steps, corpus.n_sequences // B)
    if not batches:
        raise UserError(
            f"--val_batch_size {cfg.data.val_batch_size}: a validation batch would be {B} sequences of "
            f"{corpus.T + 1} tokens, but {corpus.folder} holds {corpus.n_sequences}."
        )
    if batches < cfg.run.eval_steps:
        say(
            f"validation: {corpus.folder} holds {batches} batches of {B} sequences, so --eval_steps is {batches}"
        )
    loss, order = (
        jax.jit(model.make_loss(cfg, mesh, train=False)),
        functools.partial(corpus.sequences, seed=0),
    )

    def evaluate(params):
        make = lambda i: put_batch(order, i * B, (1, M, B // M, corpus.T), mesh)  # noqa: E731
        ahead = Prefetch(make, range(batches), depth=batches)
        together(ahead.error(batches))
        losses, seen = zip(*[loss(params, x[0], y[0], jax.random.key(0), 0) for x, y in ahead])
        return {
            "loss/val_loss": float(sum(losses) / batches),
            "loss/val_cross_entropy_loss": float(sum(s.cross_entropy for s in seen) / batches),
        }

    return evaluate


def quiet_libraries():
    """Leave out what the libraries say of matters that the programs here say themselves."""
    absl_logging.set_verbosity(
        absl_logging.FATAL
    )  # Orbax's errors are caught and said in a sentence, which need not
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # hide in the many traces of its tasks


def configure_jax(cfg):
    """Settings of jax itself, made here and nowhere at import."""
    quiet_libraries()
    if cache := os.path.expanduser(cfg.run.compilation_cache):
        try:
            if not utils.is_remote(cache):
                utils.check_place(os.path.join(cache, "entry"), "--compilation_cache")
            jax.config.update("jax_compilation_cache_dir", cache)
        except UserError as e:  # jax would warn of every program
            print(f"warning: {e}", file=sys.stderr, flush=True)
    if (
        cfg.model.model_dtype == "float32"
    ):  # accelerators would otherwise round the inputs of matrix products
        jax.config.update("jax_default_matmul_precision", "float32")


def count_in_words(cfg):
    """The model's parameters in words, the same wherever they are told."""
    total, active, embedding = model.count_params(cfg)
    return f"{total:,} total, {active:,} active per token, both without the {embedding:,} of the embedding"
