"""The mesh, the training state and the compiled steps: what the run, the plan and the benchmarks share."""

import functools
import logging
import math
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
from runtime.files import check_place
from runtime.messages import UserError, say, warn
from runtime.processes import together
from training.optimizer import HYPERPARAMETERS, learning_rate, make_optimizer


class TrainState(NamedTuple):
    """All that a step reads and writes. A checkpoint holds it and the number of sequences consumed."""

    params: Any  # float32, see model.param_table
    opt_state: Any
    step: jax.Array  # int32 []
    key: jax.Array  # uint32 [2], of dropout


def make_mesh(cfg, devices=None):
    """The (dp, pp, tp) mesh over `devices`, by default the first n_devices; neighbors on an axis are near."""
    if devices is None:
        devices = jax.devices()[: cfg.run.n_devices]
    grid = device_grid(cfg.run.n_device_axis, devices)
    return Mesh(grid, collectives.AXES, axis_types=(AxisType.Auto,) * 3)


def device_grid(shape, devices):
    """`devices` as an array of `shape` (dp, pp, tp): tp on the fastest links, then pp, then dp. TPU slices, which
    only a slow network joins, lie along dp, or along pp where they do not divide dp."""
    slices = collectives.count_slices(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    dp, pp, tp = shape
    if dp % slices and pp % slices:
        raise UserError(
            f"--n_device_axis {dp} {pp} {tp}: dp or pp must be a multiple of the number of TPU slices, {slices}."
        )
    outer = (1, slices, 1) if dp % slices else (slices, 1, 1)
    inner = [size // parts for size, parts in zip(shape, outer)]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )


def abstract_params(cfg, mesh):
    """The parameters as float32 ShapeDtypeStructs with shardings."""
    table = model.param_table(cfg)
    return jax.tree.map(
        lambda param, sharding: jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=sharding),
        table,
        parameters.shardings(table, mesh),
        is_leaf=parameters.is_param,
    )


def map_opt_state(optimizer, params, of_params, of_others, beside):
    """The optimizer's state for `params`, a tree of ShapeDtypeStructs: of_params(leaf, x) for what belongs to the
    parameter of x in the tree `beside`, of_others(leaf) for all else."""

    def is_masked(leaf):  # a parameter that another rule of the optimizer updates
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
    """TrainState of ShapeDtypeStructs: optimizer leaves lie as their parameters do, scalars on all devices."""
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
    return TrainState(params, opt_state, step, key)


def arranger(cfg, abstract):
    """Function that gives a tree the shapes and shardings of `abstract`. Checkpoints and samples have the blocks in
    order [blocks, ...]; --pp_interleave deals them out to stages in rounds."""
    if cfg.run.pp_interleave == 1:
        return lambda tree: tree

    def arrange(tree):
        return jax.tree.map(lambda x, a: x.reshape(a.shape), tree, abstract)

    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(arrange, out_shardings=shardings)


def init_state(cfg, abstract, optimizer, params=None):
    """TrainState at step 0, made in place on the mesh, the same on every mesh. `params`, if given, are used up."""

    def init(params, seed):
        init_key, key = jax.random.split(jax.random.key(seed))
        params = params or parameters.init_params(model.param_table(cfg), init_key)
        opt_state = optimizer.init(params)
        return TrainState(params, opt_state, jnp.int32(0), jax.random.key_data(key))

    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params, cfg.run.seed)


def make_train_step(cfg, mesh):
    """`train_step(state, tokens, targets, numbers)` -> (state, metrics); tokens and targets int32 [accumulation, M, B,
    T]; numbers: of `optimizer.hyperparameters`, which stand in for those of `cfg`.

    Gradients are averaged over the accumulation in float32. shard_map is around the loss alone: gradient, clipping and
    optimizer see global arrays. A bad step, whose loss or gradient is not finite, changes only `state.step`, the one
    clock of the learning rate.
    """

    def train_step(state, tokens, targets, numbers):
        now = utils.replace(cfg, **numbers)
        gradient = jax.value_and_grad(model.make_loss(now, mesh, train=True), has_aux=True)
        # jit, so that it is traced once, for its shapes and for its use; inline, so that the program stays the same
        gradient = jax.jit(gradient, inline=True)
        optimizer = make_optimizer(now, mesh)
        rate = learning_rate(now.optimizer, state.step)
        (loss, seen), grads = accumulate_gradient(gradient, state, tokens, targets)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, rate=rate)
            params = optax.apply_updates(state.params, updates)
            params = model.update_router_bias(now, params, seen.load, tokens.size)
            norm = optax.tree.norm(grads)
            sound = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = state.params, state.opt_state
            choose = functools.partial(jnp.where, sound)
            params, opt_state = jax.tree.map(choose, (params, opt_state), before)
        metrics = step_metrics(cfg, loss, seen, rate, norm)
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    return train_step


def accumulate_gradient(gradient, state, tokens, targets):
    """((loss, `model.Metrics`), gradient of every parameter): means over the accumulation, but the load is its sum.
    gradient: of jax.value_and_grad, a function of one batch; tokens, targets int32 [accumulation, M, B, T]."""
    n_batches, M, B, _ = tokens.shape
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

    def add_batch(total, batch):
        i, tokens, targets = batch
        more = gradient(state.params, tokens, targets, key, i * M * B)
        return jax.tree.map(jnp.add, total, more), None

    batch = tokens[0], targets[0]
    shapes = jax.eval_shape(gradient, state.params, *batch, key, jnp.int32(0))
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    total, _ = lax.scan(add_batch, zeros, (jnp.arange(n_batches), tokens, targets))
    (_, summed), _ = total
    (loss, seen), grads = jax.tree.map(lambda x: x / n_batches, total)
    # whole counts, by which router biases move
    return (loss, seen._replace(load=summed.load)), grads


@jax.named_scope("metrics")
def step_metrics(cfg, loss, seen, lr, grad_norm):
    """{name: float32 [], [E] or [layers]} of a training step, as metrics.jsonl calls them. seen: `model.Metrics`."""
    metrics = {
        "loss/train_loss": loss,
        "loss/train_cross_entropy_loss": seen.cross_entropy,
        "lr": lr,
        "grad_norm": grad_norm,
    }
    if cfg.model.n_experts:
        counts = seen.load.reshape(-1, cfg.model.n_experts)  # [layers, E] tokens routed to each
        metrics["loss/load_loss"] = seen.load_loss
        shares = counts / counts.sum(-1, keepdims=True)
        metrics["load/experts"] = shares.mean(0)  # [E]
        # the fullest expert of each layer, [layers]; 1 where the load is even
        metrics["load/layers"] = cfg.model.n_experts * shares.max(-1)
        metrics["load/dropped"] = seen.dropped
    return metrics


def batch_shape(cfg):
    """[accumulation, M, B, T] of a step's tokens over the whole mesh."""
    M = cfg.data.microbatches
    B = cfg.data.train_batch_size * cfg.run.n_device_axis[0] // M
    return (cfg.run.accumulation_steps, M, B, cfg.model.T)


def val_batch_shape(cfg):
    """[parts, M, B] of the sequences of a validation batch over the whole mesh; its parts are evaluated one after
    another. A microbatch is no larger than one of training."""
    accumulation, M, B, _ = batch_shape(cfg)
    dp, pp, _ = cfg.run.n_device_axis
    own = cfg.data.val_batch_size  # sequences of a replica
    if not own:
        return accumulation, M, B
    M = next(n for n in range(pp, own + 1, pp) if own % n == 0 and own // n <= B // dp)
    return 1, M, own * dp // M


def tokens_per_step(cfg):
    """Tokens of a training step on the whole mesh."""
    return math.prod(batch_shape(cfg))


def lower_train_step(cfg, mesh, abstract):
    """`make_train_step`, ready to be compiled for a TrainState like `abstract`, which it overwrites. (Not for a state
    itself: a restored one would give another program.)"""
    batch = NamedSharding(mesh, collectives.BATCH_SPEC)
    tokens = jax.ShapeDtypeStruct(batch_shape(cfg), jnp.int32, sharding=batch)
    replicated = NamedSharding(mesh, P())
    numbers = {
        name: jax.ShapeDtypeStruct((), kind, sharding=replicated)
        for name, kind in HYPERPARAMETERS.items()
    }
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(
        make_train_step(cfg, mesh),
        donate_argnums=0,
        out_shardings=(state_shardings, replicated),
    )
    return step.lower(abstract, tokens, tokens, numbers)


def make_evaluate(cfg, mesh, corpus):
    """`evaluate(params)` -> {"loss/val_loss", "loss/val_cross_entropy_loss"} over eval_steps batches drawn from all
    validation shards: the same batches every time, whatever --seed. Raises UserError where there is less than one."""
    n_parts, M, B = val_batch_shape(cfg)
    batch_size = n_parts * M * B
    n_batches = min(cfg.run.eval_steps, corpus.n_sequences // batch_size)
    if not n_batches:
        raise UserError(
            f"{corpus.folder} holds {corpus.n_sequences} sequences of {corpus.T + 1} tokens, but a validation batch "
            f"has {batch_size}; use more text, fewer devices, or a smaller --val_batch_size or --T."
        )
    if n_batches < cfg.run.eval_steps:
        say(
            f"validation: an evaluation takes {n_batches * batch_size} sequences and not "
            f"{cfg.run.eval_steps * batch_size}, since {corpus.folder} holds no more"
        )
    n_parts *= n_batches
    loss = jax.jit(model.make_loss(utils.replace(cfg, microbatches=M), mesh, train=False))
    order = functools.partial(corpus.sequences, seed=0)

    def batch(i):
        return put_batch(order, i * M * B, (1, M, B, corpus.T), mesh)

    def evaluate(params):
        batches = Prefetch(batch, range(n_parts), depth=n_parts)
        together(batches.error(n_parts))
        no_dropout = jax.random.key(0)
        total, cross_entropy = 0, 0
        for tokens, targets in batches:
            value, seen = loss(params, tokens[0], targets[0], no_dropout, 0)
            total += value
            cross_entropy += seen.cross_entropy
        return {
            "loss/val_loss": float(total / n_parts),
            "loss/val_cross_entropy_loss": float(cross_entropy / n_parts),
        }

    return evaluate


def quiet_libraries():
    """Silence what the libraries log about errors that the programs here report themselves, in a sentence each."""
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax's
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a trace for each of Orbax's tasks

    # how reads of Orbax end after another one failed, and uploads of gcsfs
    ends = "Event loop is closed", "Existing exports of data: object cannot be re-sized"

    def hook(unraisable):
        if str(unraisable.exc_value) not in ends:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def configure_jax(cfg):
    """Settings of jax itself, made here and nowhere at import."""
    quiet_libraries()
    cache = os.path.expanduser(cfg.run.compilation_cache)
    if cache:
        try:
            check_place(os.path.join(cache, "entry"), "--compilation_cache")
            jax.config.update("jax_compilation_cache_dir", cache)
        except UserError as e:  # one warning; jax would give one for every program that it compiles
            warn(e)
    set_precision(cfg)


def set_precision(cfg):
    """Have jax multiply as precisely as --model_dtype says."""
    if cfg.model.model_dtype == "float32":
        # accelerators would otherwise round the inputs of matrix products
        jax.config.update("jax_default_matmul_precision", "float32")


def tokens_in_words(cfg):
    """The tokens of a step and of the whole run in words, the same wherever they are printed."""
    batches, M, B, T = batch_shape(cfg)
    dp = cfg.run.n_device_axis[0]
    each = f"{M} x {B // dp} sequences on each of {dp} replicas"
    if batches > 1:
        each = f"{batches} accumulation steps of {each}"
    tokens = tokens_per_step(cfg)
    total = tokens * cfg.run.training_steps
    return f"{tokens:,} tokens a step ({each}), {total:,} in {cfg.run.training_steps:,} steps"


def count_in_words(cfg):
    """The model's parameters in words, the same wherever they are printed."""
    total, active, embedding = model.count_params(cfg)
    return f"{total:,} total, {active:,} active per token, both without the {embedding:,} of the embedding"
