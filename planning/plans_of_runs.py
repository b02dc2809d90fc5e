"""What a training run needs of plans: how much of its devices' memory a step needs, and how fast it should be."""

import functools

import jax

from planning import advice, machines, plan
from runtime import chips
from runtime.messages import UserError

as_json = plan.as_json  # a plan for plan.json


def memory_share():
    """`memory_share(cfg)`: the share of their memory that a step needs on the devices here. None for unknown devices.

    It is computed from the table of chips, not from the memory that is free now, since all processes must get the same
    answer, and so must the same run when it resumes.
    """
    chip = chips.chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return None
    machine = machines.machine_of(jax.devices(), chip.memory)
    return functools.partial(plan.memory_share, machine=machine.as_a_run_has_it())


def plan_of(cfg):
    """The `Plan` of a run on the devices here, by the formulas; None where the peak of these devices is not known."""
    devices = jax.devices()[: cfg.run.n_devices]
    if chips.chip_of(devices[0].device_kind) is None:
        return None
    return plan.make_plan(cfg, machines.machine_of(devices))


def out_of_memory(cfg, error):
    """The UserError for jax's `error` that a device ran out of memory. It names flags that would make the step fit."""
    machine = machines.machine_of(jax.devices()[: cfg.run.n_devices])
    return UserError(advice.explain_out_of_memory(cfg, machine, str(error)))
