"""Bad steps, whose loss or gradient is not finite. They are skipped and counted, and several in a row cause a rollback.

The train step itself skips a bad step: it leaves the parameters and the optimizer as they were (train_step.py).
"""

import math
from typing import NamedTuple

from runtime.messages import UserError, say

MAX_ROLLBACKS = 3  # of a run: if three did not help, further ones will not either


class Rollback(NamedTuple):
    """Where a rollback leads. The run returns to an earlier step, but not to earlier data: it leaves out the batches of
    the bad steps."""

    before: int  # the first bad step; the run restores a checkpoint of an earlier one
    sequences: int  # sequences of the training data after which the run continues
    bad_steps: int  # number of all bad steps of the run so far


class BadSteps:
    """Counts the bad steps of a run.

    After `limit` of them in a row a rollback is due; with limit 0, never. A run that needs more than MAX_ROLLBACKS ends
    with an error. state: what the method `state` returned when the checkpoint was saved from which the run resumes.
    """

    def __init__(self, limit, state=None):
        state = state or {}
        self.limit = limit
        self.total = state.get("bad_steps", 0)
        self.consecutive = state.get("in_a_row", 0)
        self.rollbacks = state.get("returns", 0)
        target = state.get("back")
        self.due = Rollback(**target) if target else None

    def state(self):
        """{name: value} for a checkpoint. The names stay those of older checkpoints."""
        return dict(
            bad_steps=self.total,
            in_a_row=self.consecutive,
            returns=self.rollbacks,
            back=self.due._asdict() if self.due else None,
        )

    @property
    def in_progress(self):
        """Whether the last step was bad or a rollback is due. No checkpoint should be saved then: it could displace the
        one to roll back to."""
        return self.consecutive > 0 or self.due is not None

    def observe(self, step, sequences, loss, grad_norm):
        """Count a finished step if it was bad. sequences: number of sequences consumed up to the end of this step."""
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
                f"or gradient that is not finite, after {MAX_ROLLBACKS} rollbacks; look at the losses before, or start "
                f"another run by --init_from with a lower --max_lr",
                flag="max_bad_steps",
                value=self.limit,
            )

    def rolled_back(self, step):
        """Record that the rollback that was due is done, and the run is at `step`."""
        self.rollbacks += 1
        say(
            f"warning: rollback {self.rollbacks} of {MAX_ROLLBACKS} to step {step}; training continues with the data "
            f"after sequence {self.due.sequences:,}"
        )
        self.total = self.due.bad_steps
        self.consecutive = 0
        self.due = None
