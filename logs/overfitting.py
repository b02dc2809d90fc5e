"""Whether a run overfits: held-out loss rises while training loss falls."""

import math
import statistics
from typing import NamedTuple

HELD_OUT = "loss/val_cross_entropy_loss"
TRAINING = "loss/train_cross_entropy_loss"
RISES = 3  # evaluations in a row, each worse than the one before


class Overfit(NamedTuple):
    """A run overfits since `step`, the evaluation with the smallest held-out loss, `best`; `newest` is the newest."""

    step: int
    best: float
    newest: float

    @property
    def words(self):
        return (
            f"Overfitting since step {self.step:,}: held-out loss rose from {self.best:.4f} to "
            f"{self.newest:.4f} while training loss fell"
        )


class Evaluation(NamedTuple):
    """The held-out loss at a step, and the mean training loss of the steps since the evaluation before."""

    step: int
    held_out: float
    training: float


def evaluations(rows):
    """The evaluations in rows of metrics.jsonl, in order, without those whose loss is not finite."""
    found = []
    losses = []  # of training, since the evaluation before
    for row in rows:
        if math.isfinite(loss := row.get(TRAINING, math.nan)):  # else the step was skipped
            losses.append(loss)
        if math.isfinite(held_out := row.get(HELD_OUT, math.nan)):
            mean = statistics.fmean(losses) if losses else math.nan
            found.append(Evaluation(row["step"], held_out, mean))
            losses = []
    return found


def overfit(rows):
    """`overfit_in` rows of metrics.jsonl."""
    return overfit_in(evaluations(rows))


def overfit_in(found):
    """The `Overfit` of a run with these `evaluations`, or None.

    A run overfits once held-out loss has risen at RISES evaluations in a row, while training loss has fallen since the
    best one. It does until an evaluation is better than the best. Training loss is noisy from step to step, so means
    between evaluations are compared: that before the newest with the first one after the best. (The one before the best
    may hold the steep beginning of a run, below which the loss stays also when it rises again.)

        step                                     100   200   300   400   500
        held-out loss                           3.50  3.21  3.25  3.29  3.34
        mean training loss since the one before 3.90  3.30  3.10  3.00  2.80

    has risen three times from 3.21, while training loss fell from 3.10 to 2.80: Overfit(200, 3.21, 3.34).
    """
    best = rises = 0
    is_overfit = False
    for n in range(1, len(found)):
        if found[n].held_out < found[best].held_out:
            best, rises, is_overfit = n, 0, False
            continue
        rises = rises + 1 if found[n].held_out > found[n - 1].held_out else 0
        if rises >= RISES and found[n].training < found[best + 1].training:
            is_overfit = True
    if not is_overfit:
        return None
    return Overfit(found[best].step, found[best].held_out, found[-1].held_out)


class Overfitting:
    """Whether a run overfits, as its rows come. now: its `Overfit`, or None."""

    def __init__(self, rows):
        """rows: those of the run so far."""
        self.found = evaluations(rows)
        self.rows = []  # since the newest evaluation
        self.now = overfit_in(self.found)

    def add(self, row):
        """Take a further row; whether the run begins to overfit with it."""
        self.rows.append(row)
        if HELD_OUT not in row:
            return False
        self.found += evaluations(self.rows)
        self.rows = []
        before, self.now = self.now, overfit_in(self.found)
        return self.now is not None and before is None

    def rewind(self, step):
        """Forget what came after `step`."""
        self.found = [evaluation for evaluation in self.found if evaluation.step <= step]
        self.rows = []
        self.now = overfit_in(self.found)
