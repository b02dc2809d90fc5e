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
# {--schedule: share of the decay -> share of max_lr - end_lr that is left}. wsd's, of the shapes that arXiv:2405.18392
# compares, ends with the lowest loss, below a straight line.
SHAPES = dict(
    cosine=lambda share: (1 + jnp.cos(jnp.pi * share)) / 2,
    linear=lambda share: 1 - share,
    wsd=lambda share: 1 - jnp.sqrt(share),
)


def make_schedule(o):
    """step -> learning rate, a function of the step and of the flags `o` (`utils.Optimizer`) alone; never negative.

    With max_lr 1, end_lr 0, warmup_steps 10, end_steps 110 and, for wsd, decay_steps 40:

        step                    0     5     10    60    70    80    90    110 and later
        cosine                  0     0.5   1     0.5   0.35  0.21  0.10  0
        linear                  0     0.5   1     0.5   0.4   0.3   0.2   0
        wsd                     0     0.5   1     1     1     0.5   0.29  0
        wsd, decay_steps 0      0     0.5   1     1     1     1     1     1

    Runs that differ in steps and rates alone compile to programs that differ in these numbers alone. XLA may not look
    at them, or it would simplify each program in its own way and round differently. So a branch is to the bit the run
    that was planned so from the start.
    """
    begin = o.warmup_steps
    if o.schedule == "wsd":
        begin = o.end_steps - o.decay_steps if o.decay_steps else NEVER
    rates = np.float32([o.max_lr, o.end_lr])
    steps = np.int32([max(1, o.warmup_steps), begin, max(1, o.end_steps - begin)])

    def rate(step):
        (high, end), (warmup, begin, length) = lax.optimization_barrier((rates, steps))
        share = jnp.clip((step - begin) / length, 0, 1)
        decaying = (high - end) * SHAPES[o.schedule](share) + end
        warming = high - high * (1 - step / warmup)
        rest = jnp.where(step < begin, high, decaying)
        return jnp.where(step < o.warmup_steps, warming, rest)

    return rate
