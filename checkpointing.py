"""Checkpoints: written in the background, kept by a policy, verified when read, passed over when damaged."""

import contextlib
import itertools
import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax

import utils
from processes import all_of
from utils import UserError, say


@jax.jit
def fingerprint(state):
    """uint32 per leaf: the sum of its bit patterns modulo 2^32, the same on every mesh. A checkpoint that restores to
    another fingerprint than it was saved with is damaged."""
    return jnp.stack([lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32) for x in jax.tree.leaves(state)])


CHUNK = 2**27  # bytes of an array that are stored together, and so can be read without the rest


def stored_in_chunks(x):
    """How Orbax stores an array: large ones cut first between blocks, layers and experts, which lead their dims."""
    axes = 0
    while axes < 2 and x.ndim - axes > 2 and x.shape[axes] <= 512 and 4 * math.prod(x.shape[axes:]) > CHUNK:
        axes += 1
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(range(axes)))


def meet_or_fail():
    """Orbax's barrier for the threads that write a checkpoint. A process whose part failed goes on to the last barriers
    of the save ("set_value"); the others would wait for it for 20 minutes in one before, and here fail at once."""
    client, rounds = ocp.multihost.get_jax_distributed_client(), itertools.count()

    def barrier(*, key, timeout_ms):
        for n in rounds:
            client.key_value_set(f"checkpoint/{n}/{jax.process_index()}", key)
            at = [client.blocking_key_value_get(f"checkpoint/{n}/{i}", timeout_ms) for i in range(jax.process_count())]
            if {*at} == {key}:
                return
            if "set_value" not in key:
                raise OSError(f"process {next(i for i, other in enumerate(at) if other != key)} failed to")

    return barrier


def retention(keep, every, best):
    """{why: Orbax's policy} of the checkpoints to keep: the newest `keep` (None: all), those of every `every`-th step
    (0: none) and, if `best`, the one with the smallest validation loss."""
    policies = ocp.checkpoint_managers
    every = {"every": policies.EveryNSteps(every)} if every else {}
    best = policies.BestN(get_metric_fn=val_loss_of, reverse=True, n=int(best), keep_checkpoints_without_metrics=False)
    return {"newest": policies.LatestN(keep), "best": best} | every


def val_loss_of(metrics):
    return metrics["val_loss"] if math.isfinite(metrics["val_loss"]) else math.inf


def first_line(error):
    """What an error of the libraries says, 200 characters of it at most."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class Checkpoints:
    """The Orbax checkpoints in `folder`, of which those of `retention` stay: written in the background, verified
    when read."""

    def __init__(self, folder, keep=None, every=0, best=False):
        self.folder = epath.Path(folder if utils.is_remote(folder) else os.path.abspath(folder))
        policy = ocp.checkpoint_managers.AnyPreservationPolicy([*retention(keep, every, best).values()])
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, best_fn=val_loss_of, create=keep is not None,
            cleanup_tmp_directories=keep is not None,
            async_options=ocp.AsyncOptions(barrier_sync_fn=meet_or_fail() if jax.process_count() > 1 else None),
        )  # fmt: skip
        self.manager, self.saved = ocp.CheckpointManager(self.folder, options=options), None
        self.watcher, self.written, self.on_disk = ThreadPoolExecutor(1, "checkpoint"), None, None

    def save(self, step, state, sequences, about, val_loss=None):
        """Begin to write the state at `step`, after `sequences` sequences; `about` is kept with it. Where that fails,
        now or in the background, it is said, and `saved` is not `step` once `settle` was called."""
        if step == self.saved:
            return
        self.settle()
        size, free = sum(x.nbytes for x in jax.tree.leaves(state)), math.inf
        if not utils.is_remote(str(self.folder)):
            os.makedirs(self.folder, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        if not all_of(size < free):
            say(f"warning: checkpoint {step} is not written: it may need {size / 1e9:.2f} GB and {self.folder} has "
                f"{free / 1e9:.2f} GB free; the older ones stay, and the next save tries again")  # fmt: skip
            return
        meta = dict(about, step=step, sequences=sequences, fingerprint=np.asarray(fingerprint(state)).tolist())
        storage = jax.tree.map(stored_in_chunks, state)
        args = ocp.args.Composite(state=ocp.args.StandardSave(state, storage), meta=ocp.args.JsonSave(meta))
        self.manager.save(step, args=args, force=True, metrics=None if val_loss is None else {"val_loss": val_loss})
        self.saved, self.written = step, self.watcher.submit(self._watch, step)

    def _watch(self, step):
        """Wait until the save of `step` has ended; whether it went well. What a failed one left is removed."""
        try:
            self.manager.wait_until_finished()
            self.on_disk = step
            return True
        except Exception as e:  # whatever the storage makes the libraries raise
            say(f"warning: checkpoint {step} could not be written ({first_line(e)}); the older ones stay, and the next "
                f"save tries again")  # fmt: skip
            for thread in threading.enumerate():
                if thread.name == "async_save":  # Orbax's; it may fail after another one
                    thread.join()
            with contextlib.suppress(Exception):
                self.manager.check_for_errors()  # or the next save would raise its error
            torn = f"{self.folder / str(step)}{ocp.path.step.TMP_DIR_SUFFIX}"
            for _ in range(10 if jax.process_index() == 0 else 0):
                shutil.rmtree(torn, ignore_errors=True)
                time.sleep(0.5)  # a part of it may still be on its way
                if not os.path.exists(torn):
                    break
            return False

    def settle(self):
        """Wait until what was begun is written or has failed."""
        if self.written and not self.written.result():
            with contextlib.suppress(Exception):  # Orbax raises it once in each thread that asks
                self.manager.wait_until_finished()
            self.manager.reload()
            self.saved = self.saved if self.saved in self.steps() else None
        self.written = None

    def steps(self):
        """Steps of all checkpoints, the newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def meta(self, step):
        """What `save` kept beside the state."""
        return self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta

    def restore(self, abstract, before=math.inf, multiple=1):
        """(state, meta) of the newest sound checkpoint, or None where there is no checkpoint at all.

        Damaged ones are moved to checkpoints-damaged and what was lost is said. Raises UserError where none is sound.
        With `before` only earlier steps count, multiples of `multiple` first, and all that came after is deleted.
        """
        self.settle()
        steps = sorted((s for s in self.steps() if s < before), key=lambda s: (s % multiple == 0, s), reverse=True)
        state, meta, damaged = self._newest_sound(ocp.args.StandardRestore(abstract), steps)
        if damaged:
            self._set_aside(damaged)
            say(f"warning: going on from checkpoint {meta['step']}; the steps from {meta['step'] + 1} to {damaged[0]} "
                f"were lost and are run again, the damaged checkpoints stand in {self.folder}-damaged")  # fmt: skip
        self.saved = self.on_disk = meta and meta["step"]
        for step in self.steps() if before < math.inf else []:
            if step > (self.saved or 0):
                self.manager.delete(step)
        return None if state is None else (state, meta)

    def restore_params(self, abstract):
        """Parameters alone of the newest sound checkpoint, as `abstract`. Raises UserError where there is none."""
        item = {"params": abstract}
        args = ocp.args.PyTreeRestore(item, ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True)
        state, _, _ = self._newest_sound(args, self.steps())
        if state is None:
            raise UserError(f"{self.folder}: there is no checkpoint in here.")
        return state["params"]

    def _newest_sound(self, args, steps):
        """(what `args` read of the first sound checkpoint of `steps`, its meta, those before, which are damaged); where
        there are no checkpoints (None, None, []). Raises UserError where all are damaged."""
        args = ocp.args.Composite(state=args, meta=ocp.args.JsonRestore())
        # Each process reads by itself: one that finds damage would leave the others in Orbax's barriers.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(me, {me}, f"process{me}")
        reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)
        damaged = []
        for step in steps:
            reason = ""
            try:
                found = reader.restore(self.folder / str(step), args=args)
            except Exception as e:  # whatever a damaged file makes the libraries raise
                reason = first_line(e)
            if not all_of(not reason):
                reason = reason or "as another process found"
            else:
                saved = np.asarray(fingerprint(found.state)).tolist()
                if saved == found.meta["fingerprint"][: len(saved)]:  # parameters are a state's first leaves
                    return found.state, found.meta, damaged
                reason = "its contents are not those that were saved"
            say(f"warning: checkpoint {step} is damaged ({reason})")
            damaged.append(step)
        if damaged:
            raise UserError(f"--name: every checkpoint in {self.folder} is damaged ({', '.join(map(str, damaged))}); "
                            f"give another --name, or remove that folder to start again.")  # fmt: skip
        return None, None, []

    def _set_aside(self, steps):
        aside = self.folder.parent / f"{self.folder.name}-damaged"
        if jax.process_index() == 0:
            aside.mkdir(parents=True, exist_ok=True)
            for step in steps:
                (self.folder / str(step)).rename(aside / f"{step}-{time.time_ns()}")
        all_of(True)  # nobody looks before it is done
        self.manager.reload()

    def close(self):
        """As `settle`, for good."""
        self.settle()
        self.watcher.shutdown()
        self.manager.close()
