"""The train step: from a batch to an updated `TrainState`, as one compiled program.

Comes before: `dataset.py`, which puts the batch on the mesh, and `model.py`, whose `make_loss` is differentiated here.
Comes next: `training/optimizer.py`, which turns the gradient into new parameters, and `train.py`, the loop that calls
this step. The plan and the benchmarks compile this same step.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
import model
import utils
from architectures import architecture_of
from training import loss_scale
from training.optimizer import HYPERPARAMETERS, learning_rate, make_optimizer
from training.sizes import batch_shape


def make_train_step(cfg, mesh):
    """`train_step(state, tokens, targets, numbers)` -> (state, metrics).

    tokens, targets: int32 [accumulation, M, B, T]. numbers: of `optimizer.hyperparameters`; they replace the numbers in
    `cfg.optimizer`.

    Gradients are averaged over the accumulation in float32. Only the loss is inside shard_map: gradient, clipping and
    optimizer see global arrays. A bad step, whose loss or gradient is not finite, changes nothing but `state.step`, by
    which the learning rate is found, and in float16 the loss scale.
    """

    arch = architecture_of(cfg)
    is_scaled = loss_scale.is_needed(cfg)

    def train_step(state, tokens, targets, numbers):
        # From here on the configuration holds the step's inputs, traced arrays, in place of its numbers.
        now = utils.replace(cfg, **numbers)
        loss = model.make_loss(now, mesh, train=True)
        if is_scaled:
            loss = loss_scale.scaled(loss, state.scale)
        gradient = jax.value_and_grad(loss, has_aux=True)
        # With jit it is traced only once, although it is used twice: for its shapes and for its values. With inline the
        # compiled program is the same as without jit.
        gradient = jax.jit(gradient, inline=True)
        optimizer = make_optimizer(now, mesh)
        rate = learning_rate(now.optimizer, state.step)
        (loss, seen), grads = accumulate_gradient(gradient, state, tokens, targets)
        if is_scaled:
            loss, grads = loss_scale.unscaled((loss, grads), state.scale)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, rate=rate)
            params = optax.apply_updates(state.params, updates)
            params = arch.after_step(now, params, seen.measured["load"], tokens.size)
            norm = optax.tree.norm(grads)
            is_sound = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = state.params, state.opt_state
            choose = functools.partial(jnp.where, is_sound)
            params, opt_state = jax.tree.map(choose, (params, opt_state), before)
        metrics = step_metrics(cfg, loss, seen, rate, norm)
        after = state._replace(params=params, opt_state=opt_state, step=state.step + 1)
        if is_scaled:
            metrics[loss_scale.NAME] = state.scale.value
            after = after._replace(scale=loss_scale.next_scale(state.scale, loss, norm))
        return after, metrics

    return train_step


def accumulate_gradient(gradient, state, tokens, targets):
    """((loss, `model.Metrics`), gradient of every parameter), all as means over the accumulation. Only what routers
    measure is a sum.

    gradient: a function of one batch, made by jax.value_and_grad. tokens, targets: int32 [accumulation, M, B, T].
    """
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
    # Sums, since the load must stay a count of tokens, by which router biases are updated.
    return (loss, seen._replace(measured=summed.measured)), grads


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
        # {name: [layers, ...]}, sums over the tokens of the step
        of_routers = {name: x.reshape(-1, *x.shape[2:]) for name, x in seen.measured.items()}
        counts = of_routers.pop("load")  # [layers, E] tokens routed to each
        metrics["loss/load_loss"] = seen.load_loss
        shares = counts / counts.sum(-1, keepdims=True)
        metrics["load/expert"] = shares.mean(0)  # [E]
        # [layers]: how full the fullest expert of each layer is, 1 where the load is even
        metrics["load/layer"] = cfg.model.n_experts * shares.max(-1)
        metrics["load/dropped"] = seen.dropped
        n_tokens = counts.sum(-1) / cfg.model.experts_per_token  # [layers]
        for name, sums in of_routers.items():
            metrics[f"router/{name}"] = sums / n_tokens
    return metrics


def as_row(metrics):
    """What `step_metrics` returned as {name: number} on the host. An array NAME becomes NAME_0, NAME_1 and so on."""
    row = {}
    for name, value in metrics.items():
        if value.ndim:
            row |= {f"{name}_{i}": float(number) for i, number in enumerate(value)}
        else:
            row[name] = float(value)
    return row


def lower_train_step(cfg, mesh, abstract):
    """The function of `make_train_step`, lowered for a TrainState like `abstract`. The compiled step overwrites the
    state that it gets.

    It is lowered for an abstract state, since a restored state would lower to another program than an initial one.
    """
    batch = NamedSharding(mesh, collectives.BATCH_SPEC)
    tokens = jax.ShapeDtypeStruct(batch_shape(cfg), jnp.int32, sharding=batch)
    replicated = NamedSharding(mesh, P())
    numbers = {
        name: jax.ShapeDtypeStruct((), dtype, sharding=replicated)
        for name, dtype in HYPERPARAMETERS.items()
    }
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(
        make_train_step(cfg, mesh),
        donate_argnums=0,
        out_shardings=(state_shardings, replicated),
    )
    return step.lower(abstract, tokens, tokens, numbers)
