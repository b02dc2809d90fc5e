"""The optimizer and its schedule."""

import jax
import optax

import model
from architectures import parameters


def make_optimizer(cfg):
    """AdamW (arXiv:1711.05101) after clipping by the global norm, and its schedule: step -> learning rate."""
    o = cfg.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        o.min_lr, o.max_lr, o.warmup_steps, o.end_steps, o.end_lr
    )
    matrices = parameters.table_map(lambda param: param.matrix, model.param_table(cfg))
    adamw = optax.adamw(schedule, b1=0.9, b2=o.adam_b2, weight_decay=o.weight_decay, mask=matrices)
    embedding_lr = optax.masked(optax.scale(o.embedding_lr), embedding_of(matrices))
    return optax.chain(optax.clip_by_global_norm(o.grad_clip_norm), adamw, embedding_lr), schedule


def embedding_of(params):
    """A tree like `params`, True at the embedding and False elsewhere."""
    return {
        name: jax.tree.map(lambda _, here=name == "embedding": here, part)
        for name, part in params.items()
    }
