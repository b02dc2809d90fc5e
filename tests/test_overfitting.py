"""Overfitting is reported where held-out loss rises while training loss falls, and nowhere else."""

import math
import random

import pytest

from training.overfitting import HELD_OUT, TRAINING, Overfit, overfit

EVERY = 20  # steps between evaluations


def rows_of(held_out, training, noise=0.0):
    """Rows with these losses at evaluations, and in the steps before each, which differ by up to `noise`."""
    draw = random.Random(0)
    rows = []
    for n in range(len(held_out) * EVERY):
        loss = training[n // EVERY] + draw.uniform(-noise, noise)
        rows.append({"step": n + 1, TRAINING: loss})
        if (n + 1) % EVERY == 0:
            rows[-1][HELD_OUT] = held_out[n // EVERY]
    return rows


WORSE = [3.5, 3.21, 3.25, 3.29, 3.34]
FALLING = [3.9, 3.3, 3.1, 3.0, 2.8]
FOUND = Overfit(40, 3.21, 3.34)


@pytest.mark.parametrize(
    "held_out, training, found",
    [
        (WORSE, FALLING, FOUND),
        (WORSE[:-1], FALLING, None),  # it rose twice
        (WORSE, [3.9, 3.3, 3.1, 3.2, 3.3], None),  # it diverges
        ([3.21, 3.25, 3.29, 3.34], [5.0, 3.1, 3.2, 3.3], None),  # below the beginning
        ([3.5, 3.21, 3.25, 3.24, 3.29, 3.28], [*FALLING, 2.7], None),  # it goes up and down
        ([*WORSE, 3.3], [*FALLING, 2.7], Overfit(40, 3.21, 3.3)),  # still worse than the best
        ([*WORSE, 3.2], [*FALLING, 2.7], None),  # better than the best
        ([3.5, 3.21, 3.25, math.nan, 3.29, 3.34], [3.9, 3.3, 3.1, 3.0, 2.9, 2.8], FOUND),
        ([], [], None),
    ],
)
def test_a_run_overfits_once_it_got_worse_three_times_while_training_loss_fell(
    held_out, training, found
):
    assert overfit(rows_of(held_out, training)) == found


def test_neither_noise_nor_skipped_steps_hide_it():
    rows = rows_of(WORSE, FALLING, noise=0.5)
    rows[90][TRAINING] = math.nan
    assert overfit(rows) == FOUND


def test_it_is_said_with_both_losses():
    said = "Overfitting since step 40: held-out loss rose from 3.2100 to 3.3400 while training loss fell"
    assert FOUND.words == said
