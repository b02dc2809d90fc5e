"""The optimizer, its learning rate, and the numbers of both that a compiled step takes as inputs.

Comes before: `training/train_step.py`, which calls `update` with the gradient and the rate of `learning_rate`, and adds
the result to the parameters. Comes next: `training/muon.py`, with --optimizer muon, or `training/checkpointing.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
import utils
from architectures import parameters
from training import muon

# {flag: dtype} of the optimizer's flags that are numbers: rates, decays and the steps of the schedule.
HYPERPARAMETERS = {
    f.name: {int: np.int32, float: np.float32}[f.type]
    for f in dataclasses.fields(utils.Optimizer)
    if f.type in (int, float)
}


def hyperparameters(cfg, mesh):
    """{flag: int32 [] or float32 [] on all devices}: the numbers of `cfg.optimizer`, for `train_step.make_train_step`.

    A compiled step takes them as inputs and not as constants, for two reasons. First, runs that differ only in them, as
    in a sweep over learning rates, share one compiled program: the second run finds it in the cache. Second, XLA would
    simplify programs with different constants in different ways, which round differently. As they are inputs, a run
    that is resumed with another schedule, such as a longer one, equals to the bit a run that had it from the start.
    """
    replicated = NamedSharding(mesh, P())
    found = {}
    for name, dtype in HYPERPARAMETERS.items():
        value = dtype(getattr(cfg.optimizer, name))
        found[name] = jax.make_array_from_callback((), replicated, lambda _, value=value: value)
    return found


def make_optimizer(cfg, mesh):
    """AdamW (arXiv:1711.05101) or Muon (arXiv:2502.16982) after clipping by the global norm.

    Its `update` takes the `learning_rate` of the step as `rate`. optax's own schedules count updates, and so would not
    count skipped steps. Weight decay follows the schedule: each step subtracts learning rate x weight_decay x the
    matrix from a matrix, and embedding_lr times that from the embedding. The numbers of `cfg.optimizer` may be traced
    arrays, since a compiled step takes them as inputs; `init` needs none of them.
    """
    o = cfg.optimizer
    # Norms, biases and routers are not decayed: they are small, and their scale matters.
    matrices = parameters.table_map(lambda param: param.cast, model.param_table(cfg))
    rule = optax.chain(
        make_rule(cfg, mesh),
        optax.add_decayed_weights(o.weight_decay, matrices),
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), descend),
    )
    is_embedding = {name: name == "embedding" for name in matrices}
    embedding_lr = optax.masked(optax.scale(o.embedding_lr), is_embedding)
    return optax.chain(optax.clip_by_global_norm(o.grad_clip_norm), rule, embedding_lr)


def make_rule(cfg, mesh):
    """The optax transformation that --optimizer names. It turns gradients of any size into updates of about the same
    size, which are then multiplied by the learning rate.

    Muon is made for matrices between hidden channels, and updates only those; AdamW updates all other parameters.
    """
    adam = optax.scale_by_adam(b1=0.9, b2=cfg.optimizer.adam_b2)
    if cfg.optimizer.optimizer == "adamw":
        return adam
    orthogonal = optax.chain(nesterov(cfg.optimizer), muon.orthogonalize(cfg, mesh))
    rules = dict(adamw=adam, muon=orthogonal)
    names = parameters.table_map(
        lambda param: "muon" if param.hidden else "adamw", model.param_table(cfg)
    )
    return optax.partition(rules, names)


def nesterov(o):
    """Nesterov's momentum, with the state of `optax.trace`; that of experts is --expert_momentum, where it is not 0.

    A token goes to few experts. Where each gets one choice in 32, its gradient is the mean over few tokens and noisy.
    Averaging over more steps then gains more than it loses by their age: a run of 2.62M tokens ended 0.03 lower with
    0.95 for experts and 0.75 for all else.
    """
    of_experts = jnp.where(o.expert_momentum > 0, o.expert_momentum, o.muon_momentum)

    def kept(path):
        is_expert = any(getattr(key, "key", None) == "experts" for key in path)
        return of_experts if is_expert else o.muon_momentum

    def update(gradients, state, params=None):
        def add(path, gradient, trace):
            return gradient + kept(path) * trace

        trace = jax.tree.map_with_path(add, gradients, state.trace)
        return jax.tree.map_with_path(add, gradients, trace), optax.TraceState(trace)

    return optax.GradientTransformation(optax.trace(0).init, update)


def descend(updates, state, params=None, *, rate, **_):
    """The `update` function of an optax transformation that multiplies by -rate."""
    return jax.tree.map(lambda x: -rate * x, updates), state


NEVER = 2**31 - 1  # the largest int32, a step that no run reaches
# {--schedule: function from the share of the decay that has passed to the share of max_lr - end_lr that remains}. For
# wsd it is 1 - sqrt, which ends with the lowest loss of the shapes that arXiv:2405.18392 compares.
SHAPES = dict(
    cosine=lambda share: (1 + jnp.cos(jnp.pi * share)) / 2,
    linear=lambda share: 1 - share,
    wsd=lambda share: 1 - jnp.sqrt(share),
)


def learning_rate(o, step):
    """The learning rate of step number `step`, counted from 0, as float32 []. It is never negative. It depends only on
    the step and on the flags `o`, a `utils.Optimizer`.

    With max_lr 1, end_lr 0, warmup_steps 10, end_steps 110 and, for wsd, decay_steps 40:

        step                    0     5     10    60    70    80    90    110 and later
        cosine                  0     0.5   1     0.5   0.35  0.21  0.10  0
        linear                  0     0.5   1     0.5   0.4   0.3   0.2   0
        wsd                     0     0.5   1     1     1     0.5   0.29  0
        wsd, decay_steps 0      0     0.5   1     1     1     1     1     1
    """
    decay_start = o.warmup_steps
    if o.schedule == "wsd":
        decay_start = jnp.where(o.decay_steps > 0, o.end_steps - o.decay_steps, NEVER)
    share = jnp.clip((step - decay_start) / jnp.maximum(1, o.end_steps - decay_start), 0, 1)
    decaying = (o.max_lr - o.end_lr) * SHAPES[o.schedule](share) + o.end_lr
    warming = o.max_lr - o.max_lr * (1 - step / jnp.maximum(1, o.warmup_steps))
    after_warmup = jnp.where(step < decay_start, o.max_lr, decaying)
    return jnp.where(step < o.warmup_steps, warming, after_warmup)
