"""What the loop does now, entered once for all that follow it: the watchdog, the goodput and the profile."""

import contextlib

from runtime.processes import Watchdog

# {phase of the loop, as the watchdog reports it: the part of the wall time that it counts as, of meter.py: PARTS}
PARTS = {
    "training": "steps",
    "evaluation": "evaluating",
    "tasks": "evaluating",
    "sampling": "evaluating",
    "checkpoint": "saving",
    "rollback": "restoring",
}


class Phases:
    """`with phases("evaluation", step):` has the watchdog time that phase of the step and the goodput count it. A phase
    within another one interrupts it. The trace of --profile begins with a training phase."""

    def __init__(self, cfg, goodput, profile):
        self.watchdog = Watchdog(cfg)
        self.goodput = goodput
        self.profile = profile

    @contextlib.contextmanager
    def __call__(self, name, step):
        with self.watchdog.during(name, step), self.goodput.during(PARTS[name]):
            if name == "training":
                self.profile.start_if_due(step)
            yield
