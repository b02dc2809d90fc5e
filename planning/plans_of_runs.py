"""What a run asks of the plans: how much of its devices' memory a step needs, and how fast it should be."""

import functools

import jax

from planning import advice, machines, plan
from runtime import chips
from runtime.messages import UserError

as_json = plan.as_json  # of a plan, for plan.json


def memory_share():
    """A function from a Config to the share of their memory that a step needs on the devices here; None where that is
    not known. By the table of chips, not by what is free: all processes, and the run that resumes, must find the
    same."""
    chip = chips.chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return None
    machine = machines.machine_of(jax.devices(), chip.memory)
    return functools.partial(plan.memory_share, machine=machine.as_a_run_has_it())


def plan_of(cfg):
    """The plan of a run on the devices here, by formulas; None where the peak of these devices is not known."""
    devices = jax.devices()[: cfg.run.n_devices]
    if chips.chip_of(devices[0].device_kind) is None:
        return None
    return plan.make_plan(cfg, machines.machine_of(devices))


def out_of_memory(cfg, error):
    """The UserError for `error`, with which a device ran out of memory: which flags would make a step fit."""
    machine = machines.machine_of(jax.devices()[: cfg.run.n_devices])
    return UserError(advice.explain_out_of_memory(cfg, machine, str(error)))
