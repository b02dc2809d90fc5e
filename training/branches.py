"""Branches: runs that begin with a checkpoint of another run, their trunk, and let its learning rate decay.

A trunk is trained with --schedule wsd and stays at --max_lr. A branch is what the trunk would have become if it had
been planned to decay there. It continues with the trunk's weights, optimizer, key and data. The trunk is only read. No
jax in here.
"""

import os

import utils
from runtime.files import read_json
from runtime.messages import UserError
from training import settings
from training.settings import PROCESSES, SCHEDULE
from utils import replace

# Flags that a branch has values of its own of, whatever its trunk has.
OWN = {"name", "output_dir", "init_from", "branch_from", "branch_step", "profile"}
OWN |= {"training_steps", "end_steps", "decay_steps", *PROCESSES}


def check_flags(flags):
    """Raises UserError where the flags of a branch do not fit together."""
    given, r, o = flags.given, flags.cfg.run, flags.cfg.optimizer
    if not r.branch_from:
        if "branch_step" in given:
            raise UserError(f"--branch_step {r.branch_step}: needs --branch_from beside it.")
        return
    for flag in ("branch_step", "decay_steps"):
        if flag not in given:
            raise UserError(f"--branch_from {r.branch_from}: needs --{flag} beside it.")
    if r.init_from:
        raise UserError(
            f"--init_from {r.init_from}: a branch begins with the weights of --branch_from; leave one of them out."
        )
    decay, end = o.decay_steps, end_of(flags)
    if not decay:
        raise UserError("--decay_steps 0: a branch must decay; give at least 1.")
    if end <= r.branch_step:
        raise UserError(f"--end_steps {end}: must be above --branch_step {r.branch_step}.")
    if end - decay < r.branch_step:
        raise UserError(
            f"--decay_steps {decay}: would begin at step {end - decay}, before --branch_step {r.branch_step}; give at "
            f"most {end - r.branch_step}, or another --end_steps."
        )


def end_of(flags):
    """The end_steps of a branch. Where they were not given, the decay begins at branch_step."""
    o = flags.cfg.optimizer
    return o.end_steps if "end_steps" in flags.given else flags.cfg.run.branch_step + o.decay_steps


def follow_trunk(flags):
    """`flags` of a branch: where they were not given, those of its trunk, or of the branch itself once it has a
    config.json; those that may follow nothing else from here on count as given. Without --branch_from, `flags`."""
    if not flags.cfg.run.branch_from:
        return flags
    cfg, given = flags = name_branch(flags)
    own = read_json(cfg.run.folder, "config.json")
    stored = own or open_trunk(cfg.run.branch_from, cfg.run.branch_step)
    if own:
        r = cfg.run
        if (own.get("branch_from"), own.get("branch_step")) != (r.branch_from, r.branch_step):
            raise UserError(
                f"--name {r.name}: this run exists, and is no branch of {r.branch_from} from step {r.branch_step}; "
                f"give another --name."
            )
        whose, compared = f"run {cfg.run.name} has", given | SCHEDULE - {"warmup_steps"}
    else:
        # end_lr never mattered to a trunk
        whose, compared = f"the trunk {cfg.run.branch_from} has", given - OWN - {"end_lr"}
    settings.compare(cfg, stored, compared & (utils.KEPT | SCHEDULE), whose)
    left_out = OWN | given
    if "n_device_axis" in given or cfg.plan.plan:
        left_out |= {"n_devices", "pp_interleave"}  # they follow the mesh
    followed = {}
    for flag in utils.FIELDS.keys() & stored.keys() - left_out:
        value = stored[flag]
        followed[flag] = tuple(value) if isinstance(value, list) else value
    return flags._replace(cfg=replace(cfg, **followed), given=given | SCHEDULE | {"training_steps"})


def name_branch(flags):
    """`flags` of a branch with its name and place, beside its trunk, and its decay, where they were not given."""
    r, end = flags.cfg.run, end_of(flags)
    trunk = r.branch_from.rstrip("/")
    flags = flags.follow(
        name=f"{os.path.basename(trunk)}-{r.branch_step}-{flags.cfg.optimizer.decay_steps}",
        output_dir=os.path.dirname(trunk) or ".",
        training_steps=end,
        end_steps=end,
    )
    return flags._replace(cfg=replace(flags.cfg, branch_from=trunk))


def open_trunk(folder, step):
    """{flag: value} of a trunk as it was at a step. Raises UserError."""
    stored = settings.stored_config(folder)
    if "data_fingerprint" not in stored:
        raise UserError(f"--branch_from {folder}: is no run directory, which holds a config.json.")
    known = [flag for flag in stored if flag in utils.FIELDS]
    settings.check_stored(stored, folder, {*settings.NEEDED_TO_RESUME, *known})
    steps = settings.stored_steps(folder)
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"--branch_step {step}: {folder} has no checkpoint of that step; there are {there} (--keep_every keeps "
            f"more)."
        )
    then = settings.saved_with(folder, step)  # its schedule may have been another since
    stored |= {flag: then[flag] for flag in SCHEDULE if flag in then}
    if stored["schedule"] != "wsd":
        raise UserError(
            f"--branch_from {folder}: its --schedule is {stored['schedule']}, which decays from the warm-up on; only "
            f"runs of wsd can be branched."
        )
    begin = stored["end_steps"] - stored["decay_steps"]
    if stored["decay_steps"] and begin < step:
        raise UserError(
            f"--branch_step {step}: the decay of {folder} began at step {begin}; give a step up to that one, of "
            f"{', '.join(map(str, steps))}."
        )
    return stored
