"""The optimizer and its schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import model
from architectures import parameters
from training import muon


def make_optimizer(cfg, mesh):
    """AdamW (arXiv:1711.05101) or Muon (arXiv:2502.16982; training/muon.py) after clipping by the global norm, and its
    schedule: step -> learning rate.

    Its `update` takes the step's learning rate as `rate`, since the schedule counts skipped steps too. Weight decay
    follows the schedule: a step takes learning rate x weight_decay of a matrix away.
    """
    o = cfg.optimizer
    schedule = make_schedule(o)
    matrices = parameters.table_map(lambda param: param.cast, model.param_table(cfg))
    rule = optax.chain(
        make_rule(cfg, mesh),
        optax.add_decayed_weights(o.weight_decay, matrices),
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), descend),
    )
    is_embedding = {name: name == "embedding" for name in matrices}
    embedding_lr = optax.masked(optax.scale(o.embedding_lr), is_embedding)
    return optax.chain(optax.clip_by_global_norm(o.grad_clip_norm), rule, embedding_lr), schedule


def make_rule(cfg, mesh):
    """The optax transformation from gradients to updates of about equal size, by --optimizer."""
    adam = optax.scale_by_adam(b1=0.9, b2=cfg.optimizer.adam_b2)
    if cfg.optimizer.optimizer == "adamw":
        return adam
    momentum = optax.trace(cfg.optimizer.muon_momentum, nesterov=True)
    orthogonal = optax.chain(momentum, muon.orthogonalize(cfg, mesh))
    rules = dict(adamw=adam, muon=orthogonal)
    names = parameters.table_map(
        lambda param: "muon" if param.hidden else "adamw", model.param_table(cfg)
    )
    return optax.partition(rules, names)


def descend(updates, state, params=None, *, rate, **_):
    """`update` of the optax transformation that multiplies by -rate."""
    return jax.tree.map(lambda x: -rate * x, updates), state


NEVER = 2**31 - 1  # a step, int32, that no run reaches


def make_schedule(o):
    """step -> learning rate, a function of the step and of the flags `o` (`utils.Optimizer`) alone; never negative.

    With max_lr 1, end_lr 0, warmup_steps 10, end_steps 110 and, for wsd, decay_steps 40:

        step                    0     5     10    60    70    80    90    110 and later
        cosine                  0     0.5   1     0.5   0.35  0.21  0.10  0
        linear                  0     0.5   1     0.5   0.4   0.3   0.2   0
        wsd                     0     0.5   1     1     1     0.5   0.29  0
        wsd, decay_steps 0      0     0.5   1     1     1     1     1     1
    """
    if o.schedule == "wsd":
        return make_wsd(o)
    if o.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, o.max_lr, o.warmup_steps, o.end_steps, o.end_lr
        )
    else:
        warmup = optax.linear_schedule(0.0, o.max_lr, o.warmup_steps)
        line = optax.linear_schedule(o.max_lr, o.end_lr, o.end_steps - o.warmup_steps)
        schedule = optax.join_schedules([warmup, line], [o.warmup_steps])

    def rate(step):
        # rounding would lead a little past end_lr, and below 0
        is_before = step < o.end_steps
        lr = jnp.maximum(schedule(step), 0)
        return jnp.where(is_before, lr, o.end_lr)

    return rate


def make_wsd(o):
    """step -> learning rate of wsd. It decays as 1 - sqrt(share of the decay): of the shapes that arXiv:2405.18392
    compares this one ends with the lowest loss, below a straight line.

    Runs that differ in the decay alone compile to programs that differ in these numbers alone. XLA may not look at
    them, or it would simplify each program in its own way and round differently. So a branch is to the bit the run that
    was planned so from the start.
    """
    begin = o.end_steps - o.decay_steps if o.decay_steps else NEVER
    rates = np.float32([o.max_lr, o.end_lr])
    steps = np.int32([max(1, o.warmup_steps), begin, max(1, o.decay_steps)])

    def rate(step):
        (high, end), (warmup, begin, decay) = lax.optimization_barrier((rates, steps))
        warming = high * (step / warmup)
        share = jnp.clip((step - begin) / decay, 0, 1)
        decaying = end + (high - end) * (1 - jnp.sqrt(share))
        stable = jnp.where(step < begin, high, decaying)
        return jnp.where(step < o.warmup_steps, warming, stable)

    return rate
