"""Find flags that make a step faster, or make it fit in memory, with the same global batch. The formulas compare
them."""

import itertools
import math
import re
import typing

import utils
from config import settle
from config.batch import divisors
from planning import machines
from planning.plan import MARGIN, SEARCHED, make_plan
from runtime.messages import UserError, size

WORTH = 0.02  # smallest share of a step that a flag must save to be recommended
CHANGES = 3  # most changes of flags that are made, one after the other, until a step fits
# {flag with a fixed set of values that changes how a step is computed, but not its result: the values}
WAYS = {
    flag: typing.get_args(utils.FIELDS[flag].type)
    for flag in ("remat", "fsdp", "sequence_parallel")
}


def with_flags(cfg, n, **flags):
    """`cfg` with other flags and the same global batch, validated for n devices; None where these flags do not fit
    together."""
    # 0: as many as the mesh allows
    rounds = dict(pp_interleave=0) if "n_device_axis" in flags else {}
    new = utils.replace(cfg, **rounds | flags)
    parts = new.run.n_device_axis[0] * new.run.accumulation_steps
    train = cfg.data.global_batch_size // parts
    if train * parts != cfg.data.global_batch_size:
        return None
    try:
        # validation is not planned: 0 gives it any batch that fits
        return settle.validate(utils.replace(new, train_batch_size=train, val_batch_size=0), n)
    except UserError:
        return None


def meshes(cfg, n):
    """Yield the mesh shapes (dp, pp, tp) of n devices that can divide the model."""
    for pp in divisors(math.gcd(cfg.model.blocks, n)):
        for tp in divisors(n // pp):
            yield n // pp // tp, pp, tp


def variants(cfg, n, shapes=None):
    """All configurations that --search considers. They have the same global batch. shapes: meshes (dp, pp, tp); None:
    all that can divide the model."""
    total = cfg.data.global_batch_size // cfg.run.accumulation_steps
    found = []
    for dp, pp, tp in shapes or meshes(cfg, n):
        values = WAYS | dict(
            n_device_axis=[(dp, pp, tp)],
            microbatches=divisors(max(1, total // dp)),
            pp_interleave=divisors(cfg.model.blocks // pp) if pp > 1 else [1],
        )
        if tp == 1:  # no sequence is split, so the flag has no effect
            values["sequence_parallel"] = [cfg.model.sequence_parallel]
        for row in itertools.product(*values.values()):
            found.append(with_flags(cfg, n, **dict(zip(values, row))))
    return list(filter(None, found))


def changed_flags(old, new):
    """The flags in which `new` differs from `old`, as on a command line.

    With train_batch_size it names the accumulation steps too, since they would be 1 by default.
    """
    before = utils.flatten(old)
    now = utils.flatten(new)
    flags = [flag for flag in SEARCHED if now[flag] != before[flag]]
    if "train_batch_size" in flags and now["accumulation_steps"] > 1:
        flags = [*dict.fromkeys([*flags, "accumulation_steps"])]
    words = [f"--{flag} {now[flag]}" for flag in flags]
    return re.sub("[(),]", "", " ".join(words))  # a mesh without the signs of a tuple


def neighbors(cfg, n):
    """The configurations that differ from `cfg` in one flag or in the mesh, validated for n devices."""
    batch = cfg.data.train_batch_size
    values = WAYS | dict(
        pp_interleave=divisors(cfg.model.blocks // cfg.run.n_device_axis[1]),
        microbatches=divisors(batch),
        accumulation_steps=divisors(batch * cfg.run.accumulation_steps),
        n_device_axis=meshes(cfg, n),
    )
    changes = [with_flags(cfg, n, **{flag: value}) for flag in values for value in values[flag]]
    return [new for new in changes if new not in (None, cfg)]


def advise(plan):
    """One sentence of advice: the single change that saves most time or, where the step does not fit, what would make
    it fit. The formulas compare."""
    cfg = plan.cfg
    machine = plan.machine
    spare = plan.memory_limit - plan.memory.total
    if spare < 0:
        lacks = f"it needs {size(-spare)} more than a chip's {size(plan.memory_limit)}"
        return f"does not fit: {lacks}; {what_would_fit(plan)}"
    now = make_plan(cfg, machine)
    best = cfg
    saved = WORTH
    for new in neighbors(cfg, machine.n):
        other = make_plan(new, machine)
        saves = 1 - other.step / now.step
        if saves > saved and other.memory.total - now.memory.total <= spare:
            best = new
            saved = saves
    if best == cfg:
        return f"no single flag helps by more than {WORTH:.0%}, by the formulas"
    return (
        f"{changed_flags(cfg, best)} would help most: by {saved:.0%} of the step, by the formulas"
    )


def find_smaller(plan):
    """Find a Config that fits in memory: (Config, bytes that it needs), or None.

    It has the same global batch, and fits by the formulas with some room left. Of all single changes to the Config of
    `plan`, the fastest that fits is chosen. Where none fits, the one that saves most memory is made, and further
    changes are tried from there. Where `plan` needs more memory than the formulas say, others are taken to need more
    too, by the same factor.
    """
    machine = plan.machine
    limit = plan.memory_limit
    lacks = max(0, limit - plan.memory.total)
    by_formulas = make_plan(plan.cfg, machine).memory
    off = max(1, (plan.memory.working + lacks) / by_formulas.working)
    old = plan.cfg
    for _ in range(CHANGES):
        tried = []  # (bytes that it needs, seconds of a step, Config)
        for new in neighbors(old, machine.n):
            other = make_plan(new, machine)
            needs = other.memory.total + (off - 1) * other.memory.working
            tried.append((needs, other.step, new))
        fits = [one for one in tried if one[0] <= (1 - MARGIN) * limit]
        if fits:
            needs, _, new = min(fits, key=lambda one: one[1])
            return new, needs
        old = min(tried, key=lambda one: one[0])[2]
    return None


def what_would_fit(plan):
    """The flags that would make the step of a `Plan` fit, in words; or that there are none."""
    found = find_smaller(plan)
    if not found:
        return "no flags would make it fit, by the formulas; use more devices or a smaller model"
    new, used = found
    return f"{changed_flags(plan.cfg, new)} would make it fit, by the formulas: {size(used)}"


def memory_in_words(memory):
    """What a device holds, from a `Memory`, in words."""
    return ", ".join(f"{part} {size(n_bytes)}" for part, n_bytes in memory._asdict().items())


def explain_out_of_memory(cfg, machine, message):
    """One sentence for an error of jax that memory ran out: what a device holds in a step, and which flags would make
    it fit."""
    plan = make_plan(cfg, machine, refused=machines.too_large(message))
    limit = size(plan.memory_limit)
    used = size(plan.memory.total)
    needs = f"a device has {limit} and a step needs {used} of it ({memory_in_words(plan.memory)})"
    return f"out of memory: {needs}; {what_would_fit(plan)}."
