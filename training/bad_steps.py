"""Bad steps, whose loss or gradient is not finite: they are skipped and counted, and several in a row cause a rollback.

The train step itself skips a bad step: it leaves the parameters and the optimizer as they were (train_step.py).
"""

import math
from typing import NamedTuple

from runtime.messages import UserError, say

MAX_ROLLBACKS = 3  # a run that needs more is not helped by them


class Rollback(NamedTuple):
    """Where a rollback leads. The run returns in steps, not in data: it leaves out the batches of the bad steps."""

    before: int  # the first bad step; the run restores a checkpoint of an earlier one
    sequences: int  # sequences of the training data after which the run continues
    bad_steps: int  # all bad steps of the run until then


class BadSteps:
    """Counts the bad steps of a run: after `limit` of them in a row (0: never) a rollback is due; after MAX_ROLLBACKS
    the run ends. state: what `state` returned when the checkpoint was saved that the run resumes from."""

    def __init__(self, limit, state=None):
        state = state or {}
        self.limit = limit
        self.total = state.get("bad_steps", 0)
        self.consecutive = state.get("in_a_row", 0)
        self.rollbacks = state.get("returns", 0)
        target = state.get("back")
        self.due = Rollback(**target) if target else None

    def state(self):
        """{name: value} for a checkpoint."""
        return dict(
            bad_steps=self.total,
            in_a_row=self.consecutive,
            returns=self.rollbacks,
            back=self.due._asdict() if self.due else None,
        )

    @property
    def in_progress(self):
        """Whether the run is between bad steps, or before a rollback, whose checkpoint a save could displace."""
        return self.consecutive > 0 or self.due is not None

    def observe(self, step, sequences, loss, grad_norm):
        """Take note of a finished step, the last of whose data is sequence number `sequences`."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.consecutive = 0
            return
        self.total += 1
        self.consecutive += 1
        say(
            f"warning: step {step} is skipped, its loss is {loss:.4f} and the norm of its gradient {grad_norm:.3f} "
            f"({self.consecutive} in a row)"
        )
        # Metrics arrive a step late, so one more bad step may follow: the first rollback that is due stands.
        if self.consecutive >= self.limit > 0 and not self.due:
            self.due = Rollback(step + 1 - self.consecutive, sequences, self.total)

    def check(self):
        """Raise UserError where the rollback that is due comes after MAX_ROLLBACKS of them."""
        if self.rollbacks == MAX_ROLLBACKS:
            raise UserError(
                f"{self.limit} steps in a row from step {self.due.before} on had a loss "
                f"or gradient that is not finite, after {MAX_ROLLBACKS} rollbacks; look at the losses before, or begin "
                f"another run by --init_from with a lower --max_lr",
                flag="max_bad_steps",
                value=self.limit,
            )

    def rolled_back(self, step):
        """The rollback that was due is done: the run is at `step`."""
        self.rollbacks += 1
        say(
            f"warning: rollback {self.rollbacks} of {MAX_ROLLBACKS} to step {step}; training continues with the data "
            f"after sequence {self.due.sequences:,}"
        )
        self.total = self.due.bad_steps
        self.consecutive = 0
        self.due = None
