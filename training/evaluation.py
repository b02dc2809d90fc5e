"""The held-out loss, always over the same validation batches."""

import functools

import jax

import model
import utils
from dataset import Prefetch, put_batch
from runtime.messages import UserError, say
from runtime.processes import raise_together
from training.sizes import val_batch_shape


def make_evaluate(cfg, mesh, corpus):
    """`evaluate(params)` -> {"loss/val_loss", "loss/val_cross_entropy_loss"}, the means over --eval_steps batches from
    all validation shards. The batches are always the same, whatever --seed is. Raises UserError where the shards hold
    less than one batch."""
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
    n_parts *= n_batches  # parts of all batches together
    loss = jax.jit(model.make_loss(utils.replace(cfg, microbatches=M), mesh, train=False))
    order = functools.partial(corpus.sequences, seed=0)

    def batch(i):
        return put_batch(order, i * M * B, (1, M, B, corpus.T), mesh)

    def evaluate(params):
        batches = Prefetch(batch, range(n_parts), depth=n_parts)
        raise_together(batches.error(n_parts))
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
