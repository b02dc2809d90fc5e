"""List and verify the checkpoints of a run: each is read, and compared with the fingerprint of what was saved.

python tools/checkpoints.py runs/tiny

It needs no accelerator, and may be used while the run trains. To delete a checkpoint, remove its folder.
"""

if not __package__:
    import startup

    startup.prepare()

import os
from dataclasses import dataclass

import jax
import numpy as np
import orbax.checkpoint as ocp

from config.parser import argument
from runtime.jax_setup import quiet_libraries
from runtime.messages import UserError, first_line
from tools import common
from training import checkpointing


@dataclass(frozen=True)
class Options:
    """List the checkpoints of a run, and verify each."""

    run_dir: str = argument()
    """A run directory, or its gs:// or s3:// address."""


def verdict(checkpoints, step):
    """Verify a checkpoint: (whether it is sound, a description). Its whole state is read into memory, as numpy
    arrays."""
    try:
        with ocp.PyTreeCheckpointer() as reader:
            folder = checkpoints.folder / str(step) / "state"
            tree = reader.metadata(folder).item_metadata.tree
            arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            state = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=arrays))
        meta = checkpoints.meta(step)
    except Exception as e:  # a damaged file may make the libraries raise any error
        return False, f"damaged: {first_line(e)}"
    # sorted, since Orbax returns the leaves of a state in another order than they were saved in
    if sorted(checkpointing.fingerprint(state).tolist()) != sorted(meta["fingerprint"]):
        return False, "damaged: its contents are not those that were saved"
    words = f"sound, after {meta['sequences']:,} sequences"
    if meta["val_loss"] is not None:
        words += f", validation loss {meta['val_loss']:.4f}"
    return True, words


def main(options):
    """Print a line about each checkpoint. Raises UserError where there is none, or where one is damaged."""
    quiet_libraries()
    checkpoints = checkpointing.Checkpoints(os.path.join(options.run_dir, "checkpoints"))
    found = sorted(checkpoints.steps())
    if not found:
        raise UserError(f"{options.run_dir}: there are no checkpoints in it.")
    damaged = 0
    for step in found:
        is_sound, words = verdict(checkpoints, step)
        damaged += not is_sound
        print(f"{step}  {words}", flush=True)
    if damaged:
        raise UserError(f"{options.run_dir}: {damaged} of {len(found)} checkpoints are damaged.")


if __name__ == "__main__":
    common.run_on_cpu(Options, "tools/checkpoints.py", main)
