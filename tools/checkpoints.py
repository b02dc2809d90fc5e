"""The checkpoints of a run: which there are and why they are kept, whether they are sound, and those to delete.

python tools/checkpoints.py list runs/tiny
python tools/checkpoints.py verify runs/tiny
python tools/checkpoints.py prune runs/tiny --keep 1 --every 1000 --dry_run

It needs no accelerator, so it can look at a run that is in progress; prune refuses such a one.
"""

if __name__ == "__main__":
    import program

    program.begin()

import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import fsspec
import tyro

import utils
from tools import common
from training import command_line, locks, platforms
from utils import UserError


@dataclass(frozen=True)
class Options:
    """List, verify or prune the checkpoints of a run."""

    command: tyro.conf.Positional[Literal["list", "verify", "prune"]]
    """list: a line each. verify: read each and compare it with what was saved. prune: delete what is not to keep."""
    run_dir: tyro.conf.Positional[str]
    """A run directory, or its gs:// address."""
    keep: int | None = None
    """Newest checkpoints to keep; None: as many as the run's keep_checkpoints."""
    every: int | None = None
    """Keep those whose step is a multiple of this; 0: none, None: the run's keep_every."""
    best: bool | None = None
    """Keep the one with the smallest validation loss; None: as the run's keep_best says."""
    dry_run: bool = False
    """Say what prune would delete, and delete nothing."""


if __name__ == "__main__":
    platforms.choose_cpu()  # the accelerators may belong to the run
    options_given = utils.one_sentence(
        lambda: command_line.read_flags(Options, sys.argv[1:], "checkpoints.py")
    )

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from training import checkpointing


def about(checkpoints, step):
    """{"meta": what was saved beside the state, "val_loss", "date", "size" in bytes} of a checkpoint; of a damaged one
    what can be read."""
    folder, known = str(checkpoints.folder / str(step)), dict(meta={}, val_loss=None, date=None)
    try:
        known["val_loss"] = checkpoints.val_loss(step)
        meta = checkpoints.meta(step)
        known["meta"] = meta if checkpointing.is_sound(meta) else {}
        known["date"] = checkpoints.manager.metadata(step).commit_timestamp_nsecs / 1e9
    except Exception:  # whatever a damaged file makes the libraries raise; `verify` says what
        pass
    fs, there = fsspec.core.url_to_fs(folder)
    return known | {"size": fs.du(there)}


def kept(checkpoints, options, config, every):
    """{step: [why it is kept]}; every: {step: `about`}."""
    default = dict(
        keep=config.get("keep_checkpoints", utils.Run.keep_checkpoints),
        every=config.get("keep_every", utils.Run.keep_every),
        best=config.get("keep_best", utils.Run.keep_best),
    )
    wanted = {
        name: default[name] if getattr(options, name) is None else getattr(options, name)
        for name in default
    }
    utils.check_least(wanted, dict(keep=1, every=0))
    losses = {step: one["val_loss"] for step, one in every.items()}
    infos = [
        SimpleNamespace(
            step=step, metrics=None if losses[step] is None else {"val_loss": losses[step]}
        )
        for step in sorted(every)
    ]
    reasons = {info.step: [] for info in infos}
    context = ocp.checkpoint_managers.PreservationContext()
    for why, policy in checkpointing.retention(**wanted).items():
        for info, keep in zip(infos, policy.should_preserve(infos, context=context)):
            reasons[info.step] += [why] * keep
    return reasons


def show(every, reasons):
    """Print a line for each checkpoint."""
    rows = [["step", "written", "size", "mesh", "sequences", "val loss", "kept", "versions"]]
    for step, one in sorted(every.items()):
        meta, date = one["meta"], one["date"]
        versions = " ".join(
            f"{name.split('.')[0]} {v}" for name, v in meta.get("versions", {}).items()
        )
        rows.append(
            [
                str(step),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(date)) if date else "?",
                utils.size(one["size"]),
                "x".join(map(str, meta.get("mesh", ["?"]))),
                f"{meta['sequences']:,}" if meta else "?",
                "-" if one["val_loss"] is None else f"{one['val_loss']:.4f}",
                "+".join(reasons[step]) or "-",
                versions,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def complaint(checkpoints, step):
    """What is wrong with a checkpoint, or None. Its state is read as numpy arrays, all of it into memory."""
    try:
        with ocp.PyTreeCheckpointer() as reader:
            folder = checkpoints.folder / str(step) / "state"
            tree = reader.metadata(folder).item_metadata.tree
            arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            state = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=arrays))
        meta = checkpoints.meta(step)
        checkpoints.val_loss(step)
    except Exception as e:  # whatever a damaged file makes the libraries raise
        return checkpointing.first_line(e)
    if not checkpointing.is_sound(meta):
        return "what stands beside its arrays is not what was saved"
    sums = [int(np.asarray(x).view(np.uint32).sum(dtype=np.uint32)) for x in jax.tree.leaves(state)]
    # in any order: a state's leaves come otherwise out of a file
    return (
        None
        if sorted(sums) == sorted(meta["fingerprint"])
        else "its contents are not those that were saved"
    )


def main(options):
    logging.set_verbosity(
        logging.FATAL
    )  # what Orbax has to say is said here in a line for each checkpoint
    if options.command != "prune" or options.dry_run:
        return look_at(options)
    with locks.alone_in(
        options.run_dir, options.run_dir, "run directory"
    ):  # a run may need what is to be deleted
        look_at(options)


def look_at(options):
    """List, verify or prune."""
    config = utils.read_json(options.run_dir, "config.json")
    checkpoints = checkpointing.Checkpoints(os.path.join(options.run_dir, "checkpoints"))
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{options.run_dir}: there are no checkpoints in it.")
    if options.command == "verify":
        damaged = []
        for step in sorted(steps):
            wrong = complaint(checkpoints, step)
            print(f"{step}  {'damaged: ' + wrong if wrong else 'sound'}", flush=True)
            damaged += [str(step)] * bool(wrong)
        if damaged:
            raise UserError(
                f"{options.run_dir}: damaged are {', '.join(damaged)}, of {len(steps)} checkpoints."
            )
        return
    every = {step: about(checkpoints, step) for step in steps}
    reasons = kept(checkpoints, options, config, every)
    if options.command == "list":
        return show(every, reasons)
    for step in (step for step in sorted(steps) if not reasons[step]):
        print(
            f"{step}  {'would be deleted' if options.dry_run else 'deleted'}, {utils.size(every[step]['size'])}"
        )
        if not options.dry_run:
            checkpoints.manager.delete(step)


if __name__ == "__main__":
    common.run(lambda: main(options_given))
