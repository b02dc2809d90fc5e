"""Checkpoints: written in the background, kept by a policy, verified when read; damaged ones are passed over."""

import contextlib
import itertools
import json
import math
import os
import shutil
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax

from runtime.files import check_run_path, filesystem, is_remote, persist, read_json
from runtime.messages import UserError, first_line, warn
from runtime.processes import all_of


@jax.jit
def fingerprint(state):
    """uint32 per leaf: the sum of its bit patterns modulo 2^32, the same on every mesh. A checkpoint that restores to
    another fingerprint than it was saved with is damaged."""
    sums = []
    for leaf in jax.tree.leaves(state):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32)
        sums.append(bits.sum(dtype=jnp.uint32))
    return jnp.stack(sums)


CHUNK = 2**27  # bytes of an array that are one piece, read without the others


def stored_in_chunks(x):
    """How Orbax stores an array: large ones are cut between blocks, layers and experts, which lead their dims."""
    cut = []
    for dim, size in enumerate(x.shape[:-2][:2]):
        if size > 512 or 4 * math.prod(x.shape[dim:]) <= CHUNK:
            break
        cut.append(dim)
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(cut))


def meet_or_fail():
    """Orbax's barrier for the threads that write a checkpoint, made to fail at once where a process is at another one.

    A process whose part failed goes straight to the last barriers of the save ("set_value"). With Orbax's own barrier
    the others wait for it in an earlier one, for 20 minutes.
    """
    client = ocp.multihost.get_jax_distributed_client()
    rounds = itertools.count()

    def barrier(*, key, timeout_ms):
        for n in rounds:
            client.key_value_set(f"checkpoint/{n}/{jax.process_index()}", key)
            reached = [
                client.blocking_key_value_get(f"checkpoint/{n}/{process}", timeout_ms)
                for process in range(jax.process_count())
            ]
            elsewhere = [process for process, at in enumerate(reached) if at != key]
            if not elsewhere:
                return
            if "set_value" not in key:
                raise OSError(f"process {elsewhere[0]} failed to")

    return barrier


def reader_of_one(handler):
    """Orbax's reader for this process alone: one that finds damage would leave the others in Orbax's barriers."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"process{me}")
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def kept(losses, keep, every=0):
    """The steps to keep of {step: validation loss or None}: the newest `keep`, every `every`-th (0: none), the best."""
    steps = sorted(losses)
    measured = [step for step, loss in losses.items() if math.isfinite(loss or math.nan)]
    stay = {*steps[-keep:]}
    if measured:
        stay.add(min(measured, key=losses.get))
    if every:
        stay |= {step for step in steps if step % every == 0}
    return stay


def meta_sum(meta):
    """Checksum of what is saved beside a state."""
    content = json.dumps(meta | {"sum": 0}, sort_keys=True)
    return zlib.crc32(content.encode())


class Unreadable(OSError):
    """A checkpoint that was just written cannot be read."""


class Checkpoints:
    """The Orbax checkpoints in `folder`: written in the background, verified when read, kept as `kept` says; all stay
    with keep None. explain(flags) -> which flags make a checkpoint that of another model, in words: {flag: value} that
    was saved with it, or None."""

    def __init__(self, folder, keep=None, every=0, explain=None):
        self.keep, self.every, self.explain = keep, every, explain
        if is_remote(folder) and not folder.startswith("gs://"):  # which Orbax cannot read
            self.copy = tempfile.TemporaryDirectory()  # removed with this object
            fs, there = filesystem(folder)
            with contextlib.suppress(FileNotFoundError):
                paths = persist(lambda: fs.find(there), folder)
                copies = [os.path.join(self.copy.name, os.path.relpath(p, there)) for p in paths]
                # by lists of files: brackets in a folder's name would make it a glob
                persist(lambda: fs.get(paths, copies), folder)
            folder = self.copy.name
        if not is_remote(folder):
            folder = os.path.realpath(folder)
        if keep is not None:
            check_run_path(folder)
        self.folder = epath.Path(folder)
        several = jax.process_count() > 1
        options = ocp.CheckpointManagerOptions(
            create=keep is not None,
            cleanup_tmp_directories=keep is not None,
            async_options=ocp.AsyncOptions(barrier_sync_fn=meet_or_fail() if several else None),
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)
        self.watcher = ThreadPoolExecutor(1, "checkpoint")
        self.saved = None  # step of the newest checkpoint, which may still be on its way
        self.on_disk = None  # step of the newest one that is written and can be read back
        self.written = None  # future of the end of the newest save

    def save(self, step, state, sequences, about, val_loss=None):
        """Begin to write the state at `step`, after `sequences` sequences, with {name: value} `about` beside it. Where
        that fails, now or in the background, a warning is printed, and after `finish` `saved` is not `step`."""
        if step == self.saved:
            return
        self.finish()
        meta = dict(about, step=step, sequences=sequences, val_loss=val_loss)
        meta["fingerprint"] = np.asarray(fingerprint(state)).tolist()
        meta["sum"] = meta_sum(meta)
        storage = jax.tree.map(stored_in_chunks, state)
        state = ocp.args.StandardSave(state, storage)
        args = ocp.args.Composite(state=state, meta=ocp.args.JsonSave(meta))
        self.manager.save(step, args=args, force=True)
        self.saved = step
        self.written = self.watcher.submit(self._watch, step)

    def _watch(self, step):
        """Wait until the save of `step` has ended, and remove what need not stay, or what a failed one left."""
        try:
            self.manager.wait_until_finished()
            if jax.process_index() == 0:
                self._read_back(step)
            self.on_disk = step
            if jax.process_index() == 0:
                with contextlib.suppress(Exception):  # as below; the next save tries again
                    self._remove_old_ones()
        except Exception as e:  # whatever the storage makes the libraries raise
            warn(
                f"checkpoint {step} could not be written ({first_line(e)}); the older ones stay, and the next save "
                f"tries again"
            )
            self._clean_up(step, is_unreadable=isinstance(e, Unreadable))

    def _read_back(self, step):
        """Raises an error where a checkpoint cannot be opened again: all that describes its arrays, not their numbers.
        Orbax itself reports no error where it wrote something else than it reads."""
        self.meta(step)
        reader = reader_of_one(ocp.PyTreeCheckpointHandler())
        state = self.folder / str(step) / "state"
        if persist(lambda: reader.metadata(state), str(state)).item_metadata is None:
            raise Unreadable("its arrays cannot be read back")

    def _remove_old_ones(self):
        self.manager.reload()
        losses = dict.fromkeys(self.steps())
        for step in losses:
            with contextlib.suppress(UserError):  # it is damaged
                losses[step] = self.meta(step)["val_loss"]
        for step in losses.keys() - kept(losses, self.keep, self.every):
            (self.folder / str(step)).rmtree()

    def _clean_up(self, step, is_unreadable):
        """Remove what a failed save of `step` left, once all threads that wrote it have ended. A whole checkpoint goes
        only where it is unreadable: it may be sound where the storage did not answer."""
        for thread in threading.enumerate():
            if thread.name == "async_save":  # Orbax's; it may fail after another one
                thread.join()
        with contextlib.suppress(Exception):
            self.manager.check_for_errors()  # or the next save would raise its error
        torn = f"{self.folder / str(step)}{ocp.path.step.TMP_DIR_SUFFIX}"
        if is_unreadable:
            with contextlib.suppress(Exception):  # as above
                (self.folder / str(step)).rmtree()
        for _ in range(10 if jax.process_index() == 0 else 0):
            shutil.rmtree(torn, ignore_errors=True)
            time.sleep(0.5)  # a part of it may still be on its way
            if not os.path.exists(torn):
                break

    def finish(self):
        """Wait until the newest save is written, or has failed, on all processes."""
        if self.written:
            self.written.result()
            with contextlib.suppress(Exception):  # Orbax raises it once in each thread that asks
                self.manager.wait_until_finished()
            on_all = all_of(self.on_disk == self.saved)  # nobody looks before it is done
            self.manager.reload()
            if not on_all or self.saved not in self.steps():
                sound = [step for step in self.steps() if step != self.saved]
                self.on_disk = max(sound, default=None)
                self.saved = None
        self.written = None

    def steps(self):
        """Steps of all checkpoints, the newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def meta(self, step):
        """What `save` wrote beside the state. Raises UserError where it is damaged."""
        meta = read_json(str(self.folder), str(step), "meta", "metadata")
        if meta.get("sum") != meta_sum(meta):
            raise UserError("what is beside its arrays is not what was saved")
        return meta

    def restore(self, abstract, before=math.inf, multiple=1):
        """(state, meta) of the newest sound checkpoint, or None where there is none at all. Damaged ones are moved to
        checkpoints-damaged, with a warning. Raises UserError where none is sound. With `before` only earlier steps
        count, multiples of `multiple` first, and all later ones are deleted."""
        self.finish()
        earlier = [step for step in self.steps() if step < before]
        steps = sorted(earlier, key=lambda step: (step % multiple == 0, step), reverse=True)
        found, damaged = self._newest_sound(ocp.args.StandardRestore(abstract), steps)
        step = found[1]["step"] if found else None
        if damaged:
            aside = self.folder.parent / f"{self.folder.name}-damaged"
            if jax.process_index() == 0:
                aside.mkdir(parents=True, exist_ok=True)
                for n in damaged:
                    (self.folder / str(n)).rename(aside / f"{n}-{time.time_ns()}")
            all_of(True)  # nobody looks before it is done
            self.manager.reload()
            warn(
                f"resuming from checkpoint {step}; the steps from {step + 1} to {damaged[0]} were lost and are run "
                f"again, the damaged checkpoints are moved to {aside}"
            )
        self.saved = self.on_disk = step
        for later in self.steps() if before < math.inf else []:
            if later > (step or 0):
                self.manager.delete(later)
        return found

    def restore_params(self, abstract):
        """Parameters alone of the newest sound checkpoint, as `abstract`. Raises UserError where there is none."""
        item = {"params": abstract}
        how = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, how, partial_restore=True)
        found, damaged = self._newest_sound(args, self.steps())
        if found is None:
            raise UserError(f"{self.folder}: there is no checkpoint in here.")
        state, meta = found
        if damaged:
            warn(f"the parameters are those of checkpoint {meta['step']}")
        return state["params"]

    def _newest_sound(self, args, steps):
        """((what `args` read of the first sound checkpoint of `steps`, its meta), those before, which are damaged);
        (None, []) where there are no checkpoints. Raises UserError where none is sound, or one is of another model."""
        reader = reader_of_one(ocp.CompositeCheckpointHandler())
        damaged = []
        for step in steps:
            found, reason = self._read(reader, step, args)
            if not reason:
                return found, damaged
            warn(f"checkpoint {step} is damaged ({reason})")
            damaged.append(step)
        if damaged:
            names = ", ".join(map(str, damaged))
            raise UserError(
                f"{self.folder}: every checkpoint in here is damaged ({names}); take another run, or remove that "
                f"folder to start again."
            )
        return None, []

    def _read(self, reader, step, args):
        """((what `args` read of one checkpoint, its meta), "") where all processes find it sound, else (None, why it is
        not). Raises UserError where it is of another model."""
        reason = other = ""
        try:
            meta = self.meta(step)
            other = self.explain and self.explain(meta.get("config"))
            if not other:
                composite = ocp.args.Composite(state=args)
                state = reader.restore(self.folder / str(step), args=composite).state
        except Exception as e:  # whatever a damaged file makes the libraries raise
            reason = first_line(e)
        if not all_of(not reason):
            return None, reason or "as another process found"
        if other:
            raise UserError(
                f"{self.folder}: checkpoint {step} is of a model with other flags ({other}); give the values it had, "
                f"or another --name."
            )
        here = np.asarray(fingerprint(state)).tolist()
        if here != meta["fingerprint"][: len(here)]:  # parameters are a state's first leaves
            return None, "its contents are not those that were saved"
        return (state, meta), ""

    def close(self):
        """As `finish`, for good."""
        self.finish()
        self.watcher.shutdown()
        self.manager.close()
