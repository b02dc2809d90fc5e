"""Checkpoints: written in the background, kept by a policy, verified when read. Damaged ones are skipped.

A checkpoint is a state, any tree of arrays, and a few values beside it, `meta`. This file knows neither mesh nor flags
of a run: `training/run_checkpoints.py` adds those. Programs that read a run's parameters need only this file.
"""

import contextlib
import functools
import json
import math
import os
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax
from jax.experimental import multihost_utils

from runtime.files import (
    ask,
    check_run_path,
    filesystem,
    is_remote,
    names_in,
    persist,
    read_json,
)
from runtime.messages import Unavailable, UserError, first_line, warn
from runtime.processes import all_of, on_all
from training.orbax_workarounds import SaveBarriers, incomplete_saves, make_reader, make_writer


@jax.jit
def fingerprint(state):
    """uint32 per leaf of a state: the sum of its bit patterns modulo 2^32, the same on every mesh. A checkpoint is
    damaged where its fingerprint after reading differs from the one that was saved with it."""
    sums = []
    for leaf in jax.tree.leaves(state):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32)
        sums.append(bits.sum(dtype=jnp.uint32))
    return jnp.stack(sums)


CHUNK = 2**27  # bytes of a piece of an array; a piece is read without the others


def chunks_of(x):
    """How Orbax cuts an array into pieces: large ones between blocks, layers and experts, which are the first dims."""
    cut = []
    for dim, size in enumerate(x.shape[:-2][:2]):
        if size > 512 or 4 * math.prod(x.shape[dim:]) <= CHUNK:
            break
        cut.append(dim)
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(cut))


def steps_to_keep(losses, keep, every=0):
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
    """Checksum of the values that are saved beside a state."""
    content = json.dumps(meta | {"sum": 0}, sort_keys=True)
    return zlib.crc32(content.encode())


class Unreadable(OSError):
    """A checkpoint that was just written cannot be read back."""


class Checkpoints:
    """The Orbax checkpoints in `folder`.

    keep, every: which ones are kept, as `steps_to_keep` says; with keep None, this object only reads. explain(config):
    which flags make a checkpoint one of another model, in words, or ""; config: {flag: value} that was saved with it,
    or None. confirm(): raises an error where this run may write no more.
    """

    def __init__(self, folder, keep=None, every=0, explain=None, confirm=lambda: None):
        self.keep, self.every, self.explain, self.confirm = keep, every, explain, confirm
        if is_remote(folder) and not folder.startswith("gs://"):
            folder = self._local_copy(folder)
        if not is_remote(folder):
            folder = os.path.realpath(folder)
        self.folder = epath.Path(folder)
        self.writer = None
        if keep is not None:
            check_run_path(folder)
            self._open_writer()
        self.watcher = ThreadPoolExecutor(1, "checkpoint")
        self.wait_for_log = lambda: None  # called, in the background, before one gets its name
        self.saved = None  # step of the newest checkpoint, which may still be on its way
        self.on_disk = None  # step of the newest one that is written and can be read back
        self.written = None  # future of the end of the newest save
        self.started = 0.0  # when that save started, by time.monotonic()
        self.losses = {}  # {step: validation loss or None} of checkpoints, as they are saved or read

    def _local_copy(self, folder):
        """A local folder with what a remote one holds that Orbax cannot read, such as s3://."""
        self.copy = tempfile.TemporaryDirectory()  # removed with this object
        fs, there = filesystem(folder)
        with contextlib.suppress(FileNotFoundError):
            paths = persist(lambda: fs.find(there), folder)
            copies = [os.path.join(self.copy.name, os.path.relpath(p, there)) for p in paths]
            # by lists of files: brackets in a folder's name would make it a glob
            persist(lambda: fs.get(paths, copies), folder)
        return self.copy.name

    def _open_writer(self):
        self.barriers = SaveBarriers() if jax.process_count() > 1 else None
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):  # of any storage; the first save tries again
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_all(self._incomplete())
        self.writer = make_writer(self.folder, self.barriers, self._before_commit)

    def _before_commit(self):
        """Called in process 0 before a checkpoint gets its name. Raises an error where the run may not write it."""
        self.wait_for_log()
        self.confirm()

    def save(self, step, state, sequences, extra, val_loss=None, patience=None):
        """Start to write the state at `step`, after `sequences` sequences, with {name: value} `extra` in its meta.

        Where that fails, now or in the background, a warning is printed, and after `finish` `saved` is not `step`. The
        save before comes first: where it is not done `patience` seconds after it started, this one is given up with a
        warning; None: this one waits for it.
        """
        if step == self.saved:
            return
        if self.written and patience is not None:
            wait([self.written], max(0, self.started + patience - time.monotonic()))
            if not all_of(self.written.done()):
                warn(f"no checkpoint of step {step}: the one before is still being written")
                return
        self.finish()
        meta = dict(extra, step=step, sequences=sequences, val_loss=val_loss)
        meta["fingerprint"] = np.asarray(fingerprint(state)).tolist()
        meta["sum"] = meta_sum(meta)
        storage = jax.tree.map(chunks_of, state)
        state = ocp.args.StandardSave(state, storage)
        args = ocp.args.Composite(state=state, meta=ocp.args.JsonSave(meta))
        if self.barriers:
            self.barriers.start_save()
        error = None
        try:
            self.writer.save(self.folder / str(step), args=args)
        except Exception as e:  # of the storage: what is copied from the devices is in memory
            error = e
        self.saved = step
        self.started = time.monotonic()
        self.written = self.watcher.submit(self._watch, step, val_loss, error)

    def _watch(self, step, val_loss, error):
        """Wait until the save of `step` has ended. Then remove the checkpoints that are not to be kept or, where it
        failed, what it left. error: the one with which the save could not even start, or None."""
        try:
            if error:
                raise error
            self.writer.wait_until_finished()
            if jax.process_index() == 0:
                self._read_back(step)
            self.on_disk = step
            self.losses[step] = val_loss
            if jax.process_index() == 0:
                with contextlib.suppress(Exception):  # as below; the next save tries again
                    self._remove_old_ones()
        except Exception as e:  # whatever the storage makes the libraries raise
            if self.barriers:
                self.barriers.fail()
            warn(
                f"checkpoint {step} could not be written ({first_line(e)}); the older ones stay, and the next save "
                f"tries again"
            )
            if jax.process_index() == 0:
                self._clean_up(step, is_unreadable=isinstance(e, Unreadable))

    def _read_back(self, step):
        """Raises an error where Orbax cannot read what describes the arrays of a checkpoint; the numbers themselves are
        not read. Orbax reports no error of its own where it has written something that it cannot read."""
        self.meta(step)
        reader = make_reader(ocp.PyTreeCheckpointHandler())
        state = self.folder / str(step) / "state"
        if persist(lambda: reader.metadata(state), str(state)).item_metadata is None:
            raise Unreadable("its arrays cannot be read back")

    def _remove_old_ones(self):
        """Remove what `steps_to_keep` does not name. Raises Unavailable, before anything is removed, where the storage
        cannot tell the validation loss of a checkpoint."""
        self.confirm()
        losses = {step: self.val_loss(step) for step in self._list()}
        gone = losses.keys() - steps_to_keep(losses, self.keep, self.every)
        # what is incomplete is of an earlier save: no other one runs now
        self._remove_all([*map(str, gone), *self._incomplete()])

    def val_loss(self, step):
        """Validation loss of a checkpoint; None where none was measured, or it is damaged. Raises Unavailable."""
        if step not in self.losses:
            try:
                self.losses[step] = self.meta(step)["val_loss"]
            except Unavailable:
                raise
            except UserError:
                self.losses[step] = None
        return self.losses[step]

    def _clean_up(self, step, is_unreadable):
        """Remove what a failed save of `step` left, so that a full disk has room for the next one. A complete
        checkpoint is removed only where it is unreadable: where the storage did not answer, it may be sound."""
        with contextlib.suppress(Exception):  # as above
            if is_unreadable:
                self._remove_all([str(step)])
            for _ in range(0 if is_remote(str(self.folder)) else 10):
                time.sleep(0.5)  # another process's part of it may still be on its way
                names = self._incomplete()
                self._remove_all(names)
                if not names:
                    break

    def _remove_all(self, names):
        for name in names:
            folder = str(self.folder / name)
            with contextlib.suppress(FileNotFoundError):
                ask(folder, "rm", recursive=True)

    def finish(self):
        """Wait until the newest save is written, or has failed, on all processes."""
        if self.written:
            self.written.result()
            if not all_of(self.on_disk == self.saved):
                self.losses.pop(self.saved, None)
                if self.on_disk == self.saved:  # as this process alone believes
                    self.on_disk = None
                self.saved = None
        self.written = None

    def steps(self):
        """Steps of all checkpoints, the newest first: what process 0 finds. Raises UserError on all processes."""
        most = 1000  # of all processes the same shape
        found = on_all(lambda: self._list()[:most] if jax.process_index() == 0 else [])
        shared = np.full(most, -1, np.int64)
        shared[: len(found)] = found
        if jax.process_count() > 1:
            shared = multihost_utils.broadcast_one_to_all(shared)
        return [int(step) for step in shared if step >= 0]

    def _list(self):
        """Steps of the checkpoints that this process finds, the newest first."""
        names = set(names_in(str(self.folder))) - {*self._incomplete()}
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _incomplete(self):
        return incomplete_saves(str(self.folder))

    def meta(self, step):
        """The values that `save` wrote beside the state. Raises UserError where they are damaged."""
        meta = read_json(str(self.folder), str(step), "meta", "metadata")
        if meta.get("sum") != meta_sum(meta):
            raise UserError("what is beside its arrays is not what was saved")
        return meta

    def restore(self, abstract, before=math.inf, multiple=1):
        """(state, meta) of the newest sound checkpoint; None where there are no checkpoints. Raises UserError where all
        are damaged. Damaged ones are moved to checkpoints-damaged, with a warning.

        before: for a rollback: only checkpoints of earlier steps are read, those of multiples of `multiple` first, and
        all later ones are deleted.
        """
        self.finish()
        there = self.steps()
        earlier = [step for step in there if step < before]
        steps = sorted(earlier, key=lambda step: (step % multiple == 0, step), reverse=True)
        found, damaged = self._newest_sound(ocp.args.StandardRestore(abstract), steps)
        step = found[1]["step"] if found else None
        later = [n for n in there if n > (step or 0) and n not in damaged and before < math.inf]
        moved = ""
        if damaged or later:
            clear = functools.partial(self._clear, later, damaged)
            moved = on_all(clear if jax.process_index() == 0 else lambda: "")
        if damaged:
            warn(
                f"resuming from checkpoint {step}; the steps from {step + 1} to {damaged[0]} were lost and are run "
                f"again{moved}"
            )
        self.saved = self.on_disk = step
        return found

    def _clear(self, later, damaged):
        """Remove the checkpoints of the steps `later`, and move damaged ones away, where no save will meet them.
        Returns in words where those are now. Raises UserError."""
        self.confirm()
        self._remove_all(map(str, later))
        if not damaged:
            return ""
        aside = self.folder.parent / f"{self.folder.name}-damaged"
        try:
            aside.mkdir(parents=True, exist_ok=True)
            for n in damaged:
                (self.folder / str(n)).rename(aside / f"{n}-{time.time_ns()}")
        except Exception as e:  # whatever the storage makes the libraries raise
            return f", the damaged checkpoints stay where they are ({first_line(e)})"
        return f", the damaged checkpoints are moved to {aside}"

    def restore_params(self, abstract, first=None):
        """The parameters alone, like `abstract`, of the checkpoint of step `first` if that is sound, else of the newest
        sound one. Raises UserError where there is none."""
        item = {"params": abstract}
        how = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, how, partial_restore=True)
        steps = sorted(self.steps(), key=lambda step: step == first, reverse=True)
        found, damaged = self._newest_sound(args, steps)
        if found is None:
            raise UserError(f"{self.folder}: there is no checkpoint in here.")
        state, meta = found
        if damaged:
            warn(f"the parameters are those of checkpoint {meta['step']}")
        return state["params"]

    def _newest_sound(self, args, steps):
        """Read the checkpoints of `steps`, in this order, until one is sound: ((what Orbax's `args` read of it, its
        meta), the steps of the damaged ones before it). (None, []) where `steps` is empty. Raises UserError where none
        is sound, or one is of another model."""
        reader = make_reader(ocp.CompositeCheckpointHandler())
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
        not sound). Raises UserError where it is of another model, Unavailable where the storage of a process does not
        answer."""
        found, reason, other = on_all(lambda: self._read_here(reader, step, args))
        if not all_of(not reason):
            return None, reason or "as another process found"
        if other:
            raise UserError(
                f"{self.folder}: checkpoint {step} is of a model with other flags ({other}); give the values it had, "
                f"or another --name."
            )
        state, meta = found
        here = np.asarray(fingerprint(state)).tolist()
        if here != meta["fingerprint"][: len(here)]:  # parameters are a state's first leaves
            return None, "its contents are not those that were saved"
        return found, ""

    def _read_here(self, reader, step, args):
        """Read a checkpoint on this process: ((what `args` read, its meta) or None, why it cannot be read or "", which
        other model it is of or ""). Raises Unavailable.

        An error does not tell whether the checkpoint is damaged or the storage was away for a moment. So a remote
        checkpoint is read up to three times, each time once the storage answers again.
        """
        folder = str(self.folder / str(step))
        for _ in range(3 if is_remote(folder) else 1):
            try:
                meta = self.meta(step)
                other = self.explain and self.explain(meta.get("config"))
                if other:
                    return None, "", other
                composite = ocp.args.Composite(state=args)
                state = reader.restore(self.folder / str(step), args=composite).state
                return (state, meta), "", ""
            except Exception as e:  # whatever a damaged file makes the libraries raise
                reason = first_line(e)
                names_in(folder)  # waits until the storage answers
        return None, reason, ""

    def close(self):
        """`finish`, and end the threads."""
        self.finish()
        self.watcher.shutdown()
        if self.writer:
            self.writer.close()
