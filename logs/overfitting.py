"""Detects that a run overfits: its held-out loss rises while its training loss falls."""

import math
import statistics
from typing import NamedTuple

HELD_OUT = "loss/val_cross_entropy_loss"
TRAINING = "loss/train_cross_entropy_loss"
# Evaluations in a row, each worse than the best one by this share of its loss, that mean overfitting. Held-out loss
# goes up and down by less than that from one evaluation to the next, and a rise in steps has some that fall.
WORSE = 3
RISE = 0.01


class Overfit(NamedTuple):
    """A run that overfits."""

    step: int  # of the evaluation with the smallest held-out loss, since which it overfits
    best: float  # that loss
    newest: float  # the newest held-out loss

    @property
    def words(self):
        """This in a sentence, without its full stop."""
        return (
            f"Overfitting since step {self.step:,}: held-out loss rose from {self.best:.4f} to "
            f"{self.newest:.4f} while training loss fell"
        )


class Evaluation(NamedTuple):
    """The held-out loss at a step, and the mean training loss of the steps since the previous evaluation."""

    step: int
    held_out: float
    training: float


def evaluations(rows):
    """The `Evaluation`s in rows of metrics.jsonl, in order, without those whose loss is not finite."""
    found = []
    losses = []  # training losses since the previous evaluation
    for row in rows:
        if math.isfinite(loss := row.get(TRAINING, math.nan)):  # otherwise the step was skipped
            losses.append(loss)
        if math.isfinite(held_out := row.get(HELD_OUT, math.nan)):
            mean = statistics.fmean(losses) if losses else math.nan
            found.append(Evaluation(row["step"], held_out, mean))
            losses = []
    return found


def overfit(rows):
    """The `Overfit` of a run with these rows of metrics.jsonl, or None."""
    return overfit_in(evaluations(rows))


def overfit_in(found):
    """The `Overfit` of a run with these `Evaluation`s, or None.

    A run overfits once WORSE evaluations in a row are worse than the best one by RISE of its loss, while training loss
    has fallen since then. It stops overfitting when an evaluation is better than the best. Training loss is noisy from
    step to step, so means between evaluations are compared: the mean before the newest evaluation with the first mean
    after the best one. (The mean before the best one may include the high losses at the beginning of a run. Later
    losses stay below it even when they rise again.)

        step                                     100   200   300   400   500
        held-out loss                           3.50  3.21  3.25  3.29  3.34
        mean training loss since the one before 3.90  3.30  3.10  3.00  2.80

    is above 3.21 by 0.03 and more three times, while training loss fell from 3.10 to 2.80: Overfit(200, 3.21, 3.34).
    """
    best = 0  # index of the best evaluation so far
    worse = 0  # evaluations in a row
    is_overfit = False
    for n in range(1, len(found)):
        if found[n].held_out < found[best].held_out:
            best, worse, is_overfit = n, 0, False
            continue
        worse = worse + 1 if found[n].held_out > (1 + RISE) * found[best].held_out else 0
        if worse >= WORSE and found[n].training < found[best + 1].training:
            is_overfit = True
    if not is_overfit:
        return None
    return Overfit(found[best].step, found[best].held_out, found[-1].held_out)


class Overfitting:
    """Follows whether a run overfits while its rows are logged. now: its `Overfit` at the moment, or None."""

    def __init__(self, rows):
        """rows: the rows of the run so far."""
        self.found = evaluations(rows)
        self.rows = []  # rows since the newest evaluation
        self.now = overfit_in(self.found)

    def add(self, row):
        """Add the next row. Returns whether the run starts to overfit with it."""
        self.rows.append(row)
        if HELD_OUT not in row:
            return False
        self.found += evaluations(self.rows)
        self.rows = []
        before, self.now = self.now, overfit_in(self.found)
        return self.now is not None and before is None

    def rewind(self, step):
        """Forget the rows after `step`, to which the run rolls back."""
        self.found = [evaluation for evaluation in self.found if evaluation.step <= step]
        self.rows = []
        self.now = overfit_in(self.found)
