"""The sizes of a step, a validation batch and a model, from the configuration alone."""

import math

import model


def batch_shape(cfg):
    """[accumulation, M, B, T]: the shape of a step's tokens over the whole mesh, with M microbatches of B sequences."""
    M = cfg.data.microbatches
    B = cfg.data.train_batch_size * cfg.run.n_device_axis[0] // M
    return (cfg.run.accumulation_steps, M, B, cfg.model.T)


def val_batch_shape(cfg):
    """[parts, M, B]: the shape of a validation batch, in sequences, over the whole mesh. Its parts are evaluated one
    after another. A microbatch is no larger than in training, so that it fits into memory."""
    accumulation, M, B, _ = batch_shape(cfg)
    dp, pp, _ = cfg.run.n_device_axis
    own = cfg.data.val_batch_size  # sequences of one replica; 0: as many as in a training step
    if not own:
        return accumulation, M, B
    M = next(n for n in range(pp, own + 1, pp) if own % n == 0 and own // n <= B // dp)
    return 1, M, own * dp // M


def tokens_per_step(cfg):
    """The number of tokens of a training step on the whole mesh."""
    return math.prod(batch_shape(cfg))


def tokens_in_words(cfg):
    """The tokens of a step and of the whole run in words. All programs print these."""
    batches, M, B, T = batch_shape(cfg)
    dp = cfg.run.n_device_axis[0]
    each = f"{M} x {B // dp} sequences on each of {dp} replicas"
    if batches > 1:
        each = f"{batches} accumulation steps of {each}"
    tokens = tokens_per_step(cfg)
    total = tokens * cfg.run.training_steps
    return f"{tokens:,} tokens a step ({each}), {total:,} in {cfg.run.training_steps:,} steps"


def count_in_words(cfg):
    """The number of the model's parameters in words. All programs print these."""
    total, active, embedding = model.count_params(cfg)
    return f"{total:,} total, {active:,} active per token, both without the {embedding:,} of the embedding"
