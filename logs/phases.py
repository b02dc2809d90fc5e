"""The phases of the loop. The loop enters each one once, for the watchdog, the goodput and the profile together."""

import contextlib

from runtime.processes import Watchdog

# {phase of the loop, as the watchdog reports it: the part of the wall time, one of meter.py: PARTS, that it counts as}.
PARTS = {
    "training": "steps",
    "evaluation": "evaluating",
    "tasks": "evaluating",
    "sampling": "evaluating",
    "checkpoint": "saving",
    "rollback": "restoring",
}


class Phases:
    """`with phases("evaluation", step):` lets the watchdog time that phase of a step and the goodput count it. A phase
    inside another one interrupts it. The trace of --profile starts when a training phase does."""

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
