"""The checkpoints of a run: which there are and why they are kept, whether they are sound, and those to delete.

python tools/checkpoints.py list runs/tiny
python tools/checkpoints.py verify runs/tiny
python tools/checkpoints.py prune runs/tiny --keep 1 --every 1000 --dry_run

It needs no accelerator. list and verify may look at a run that is in progress; prune refuses such a one.
"""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.realpath(__file__ + "/../..")
    from runtime import interrupts

    interrupts.begin()

import time
from dataclasses import MISSING, dataclass
from typing import Literal

import utils
from runtime import locks, messages, platforms
from runtime.files import filesystem, read_json
from runtime.messages import UserError, first_line
from runtime.parser import flag
from tools import common


@dataclass(frozen=True)
class Options:
    """List, verify or prune the checkpoints of a run."""

    command: Literal["list", "verify", "prune"] = flag(MISSING, positional=True)
    """list: a line each. verify: read each and compare it with what was saved. prune: delete what is not to keep."""
    run_dir: str = flag(MISSING, positional=True)
    """A run directory, or its gs:// or s3:// address."""
    keep: int | None = flag(None, least=1)
    """Newest checkpoints to keep; None: as many as the run's keep_checkpoints."""
    every: int | None = flag(None, least=0)
    """Keep those whose step is a multiple of this; 0: none, None: the run's keep_every."""
    dry_run: bool = False
    """Say what prune would delete, and delete nothing."""


if __name__ == "__main__":
    platforms.choose_cpu()  # the accelerators may belong to the run
    options_given = common.read_options(Options, "tools/checkpoints.py")

import jax
import numpy as np
import orbax.checkpoint as ocp

from training import checkpointing, steps


def about(checkpoints, step):
    """{"meta": saved beside the state, "val_loss", "date", "size" in bytes}, as far as they can be read."""
    known = dict(meta={}, val_loss=None, date=None)
    try:
        known["meta"] = checkpoints.meta(step)
        known["val_loss"] = known["meta"]["val_loss"]
        known["date"] = checkpoints.manager.metadata(step).commit_timestamp_nsecs / 1e9
    except Exception:  # whatever a damaged file makes the libraries raise; `verify` says what
        pass
    fs, there = filesystem(str(checkpoints.folder / str(step)))
    # `du` would look behind a link that leads nowhere
    size = sum(file["size"] for file in fs.find(there, detail=True).values())
    return known | {"size": size}


def kept(options, every):
    """{step: [why it is kept]}, as the run's flags say where `options` do not. every: {step: `about`}."""
    config = read_json(options.run_dir, "config.json")
    keep, multiple = options.keep, options.every
    if keep is None:
        keep = config.get("keep_checkpoints", utils.Run.keep_checkpoints)
    if multiple is None:
        multiple = config.get("keep_every", utils.Run.keep_every)
    losses = {step: one["val_loss"] for step, one in every.items()}
    return checkpointing.kept(losses, keep, multiple)


def cells(step, one, reasons):
    """A checkpoint's line of the table, `one` being what is known `about` it."""
    meta, date, loss = one["meta"], one["date"], one["val_loss"]
    return [
        str(step),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(date)) if date else "?",
        messages.size(one["size"]),
        "x".join(map(str, meta.get("mesh", ["?"]))),
        f"{meta['sequences']:,}" if meta else "?",
        "-" if loss is None else f"{loss:.4f}",
        "+".join(reasons) or "-",
    ]


def complaint(checkpoints, step):
    """What is wrong with a checkpoint, or None. Its state is read as numpy arrays, all of it into memory."""
    try:
        with ocp.PyTreeCheckpointer() as reader:
            folder = checkpoints.folder / str(step) / "state"
            tree = reader.metadata(folder).item_metadata.tree
            arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            state = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=arrays))
        meta = checkpoints.meta(step)
    except Exception as e:  # whatever a damaged file makes the libraries raise
        return first_line(e)
    # in any order: the leaves of a state come out of a file in another one
    if sorted(checkpointing.fingerprint(state).tolist()) != sorted(meta["fingerprint"]):
        return "its contents are not those that were saved"
    return None


def main(options):
    steps.quiet_libraries()
    if options.command != "prune" or options.dry_run:
        return look_at(options)
    if options.run_dir.startswith("s3://"):
        raise UserError(f"prune {options.run_dir}: Orbax deletes no checkpoint on s3://.")
    # a run in progress may need what is to be deleted
    with locks.alone_in(options.run_dir, options.run_dir, "run directory"):
        look_at(options)


def look_at(options):
    """List, verify or prune. Raises UserError where there are no checkpoints, or a damaged one to verify."""
    checkpoints = checkpointing.Checkpoints(os.path.join(options.run_dir, "checkpoints"))
    found = sorted(checkpoints.steps())
    if not found:
        raise UserError(f"{options.run_dir}: there are no checkpoints in it.")
    if options.command == "verify":
        damaged = 0
        for step in found:
            wrong = complaint(checkpoints, step)
            print(f"{step}  {'damaged: ' + wrong if wrong else 'sound'}", flush=True)
            damaged += wrong is not None
        if damaged:
            raise UserError(
                f"{options.run_dir}: {damaged} of {len(found)} checkpoints are damaged."
            )
        return
    every = {step: about(checkpoints, step) for step in found}
    reasons = kept(options, every)
    if options.command == "list":
        headings = ["step", "written", "size", "mesh", "sequences", "val loss", "kept"]
        rows = [cells(step, one, reasons[step]) for step, one in every.items()]
        print("\n".join(common.markdown(headings, rows)))
        return
    for step in found:
        if reasons[step]:
            continue
        done = "would be deleted" if options.dry_run else "deleted"
        print(f"{step}  {done}, {messages.size(every[step]['size'])}")
        if not options.dry_run:
            checkpoints.manager.delete(step)


if __name__ == "__main__":
    interrupts.run(lambda: main(options_given))
