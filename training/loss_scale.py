"""The loss scale of a float16 run (arXiv:1710.03740, section 3.2), and how a step finds the next one.

Float16 ends at 65,504, has fewer digits below 6e-5, and none below 6e-8, where many gradients of activations are. So
the loss is multiplied by a scale before it is differentiated, and all gradients are that much larger. Those of the
weights, which are float32, are divided by it before anything reads them. Nobody knows the largest scale without
overflow, and it changes while a run learns. So the scale doubles after GROWS_AFTER sound steps, and halves where a
gradient overflows. The step that overflowed changes nothing else: it is skipped, and is no bad step
(`training/bad_steps.py`), unless the scale is at its least already or the loss itself is not finite.

A scale is a power of two, so to multiply and to divide by it rounds nothing.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from runtime.messages import say

# A gradient of up to 16 fits in float16 then. With 2^16, as in PyTorch, and with 2^14 too, a step of the warm-up of
# `qwen3-tiny` overflowed and was lost. From 2^13 and 2^12 none was, and both learned alike (dev/log.md).
FIRST = 2.0**12
# With the least, gradients are those of the loss itself. Beyond the largest nothing is gained: a gradient of 1e-14
# would be a normal number then.
LEAST, LARGEST = 1.0, 2.0**32
GROWS_AFTER = 2000  # sound steps, as PyTorch's GradScaler has it
NAME = "loss_scale"  # among the metrics of a step


class LossScale(NamedTuple):
    """The scale of the next step, a part of its `TrainState`."""

    value: jax.Array  # float32 []
    sound_steps: jax.Array  # int32 [], since the scale last changed


def is_needed(cfg):
    """Whether the run of a Config has a loss scale. Bfloat16 has the range of float32, which needs none."""
    return cfg.model.model_dtype == "float16"


def first():
    """The `LossScale` at step 0."""
    return LossScale(jnp.float32(FIRST), jnp.int32(0))


def scaled(loss, scale):
    """The function `loss`, which returns the loss and what is measured beside it, with the loss times a `LossScale`."""

    @functools.wraps(loss)
    def larger(*arguments):
        value, seen = loss(*arguments)
        return scale.value * value, seen

    return larger


def unscaled(tree, scale):
    """A tree of float32 arrays, of what `scaled` gave or of its gradients, divided by the `LossScale`."""
    return jax.tree.map(lambda x: x / scale.value, tree)


def next_scale(scale, loss, norm):
    """The `LossScale` after a step with this loss and this norm of the gradient, float32 [] both."""
    is_sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    overflows = jnp.isfinite(loss) & ~jnp.isfinite(norm)
    sound_steps = scale.sound_steps + is_sound
    grows = sound_steps == GROWS_AFTER
    value = jnp.where(grows, 2 * scale.value, scale.value)
    value = jnp.where(overflows, scale.value / 2, value)
    return LossScale(jnp.clip(value, LEAST, LARGEST), jnp.where(grows | overflows, 0, sound_steps))


def overflowed(row):
    """Whether a step, by its row of metrics.jsonl, was skipped for its scale alone; that is printed."""
    scale = row.get(NAME, LEAST)  # of the step
    if (
        scale == LEAST
        or not math.isfinite(row["loss/train_loss"])
        or math.isfinite(row["grad_norm"])
    ):
        return False
    say(
        f"step {row['step']} is skipped: its gradient overflows float16 with a loss scale of {scale:g}, which is "
        f"{scale / 2:g} from here on"
    )
    return True
