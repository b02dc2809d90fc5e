"""Checkpoints. They are written in the background, kept by a policy, and verified when they are read. Damaged ones are
skipped.

A checkpoint holds a state, which is any tree of arrays, and a few values beside it, its `meta`. This file knows neither
the mesh nor the flags of a run, which `training/run_checkpoints.py` adds. Programs that read the parameters of a run
need only this file.
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
from runtime.processes import all_of, on_all, spoken_for
from training.orbax_workarounds import (
    AnotherFailed,
    SaveBarriers,
    incomplete_saves,
    make_reader,
    make_writer,
)

FOUND_ELSEWHERE = (
    "as another process found"  # why a checkpoint is damaged that this process can read
)


@jax.jit
def fingerprint(state):
    """uint32 [leaves]: for each leaf of a state, the sum of its bit patterns modulo 2^32, which is the same on every
    mesh. A checkpoint is damaged if the fingerprint of what is read differs from the one that was saved with it."""
    sums = []
    for leaf in jax.tree.leaves(state):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32)
        sums.append(bits.sum(dtype=jnp.uint32))
    return jnp.stack(sums)


CHUNK = 2**27  # bytes of a piece of an array; each piece can be read without the others


def chunks_of(x):
    """How Orbax cuts an array into pieces. A large array is cut between blocks, layers and experts, its first dims."""
    cut = []
    for dim, size in enumerate(x.shape[:-2][:2]):
        if size > 512 or 4 * math.prod(x.shape[dim:]) <= CHUNK:
            break
        cut.append(dim)
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(cut))


def steps_to_keep(losses, keep, every=0):
    """The steps whose checkpoints are kept, of {step: validation loss or None}: the newest `keep`, the multiples of
    `every` (0: none of them), and the one with the smallest loss."""
    steps = sorted(losses)
    measured = [step for step, loss in losses.items() if math.isfinite(loss or math.nan)]
    stay = {*steps[-keep:]}
    if measured:
        stay.add(min(measured, key=losses.get))
    if every:
        stay |= {step for step in steps if step % every == 0}
    return stay


def meta_sum(meta):
    """The checksum of the values that are saved beside a state."""
    content = json.dumps(meta | {"sum": 0}, sort_keys=True)
    return zlib.crc32(content.encode())


class Unreadable(OSError):
    """A checkpoint that was just written cannot be read back."""


class Checkpoints:
    """The Orbax checkpoints in `folder`.

    keep, every: which checkpoints are kept, as for `steps_to_keep`. With keep None, this object only reads.
    explain(config): the flags, in words, by which a checkpoint belongs to another model; "" if it does not. config is
    the {flag: value} that was saved with the checkpoint, or None.
    confirm(): raises an error if this run may write no more.
    """

    def __init__(self, folder, keep=None, every=0, explain=None, confirm=lambda: None):
        self.keep = keep
        self.every = every
        self.explain = explain
        self.confirm = confirm
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
        # Called in the background before a checkpoint gets its name.
        self.wait_for_log = lambda: None
        self.saved = None  # step of the newest checkpoint, which may still be in the process of being written
        self.on_disk = None  # step of the newest checkpoint that is written and can be read back
        self.written = None  # a future that is done when the newest save has ended
        self.started = 0.0  # when that save started, by time.monotonic()
        self.losses = {}  # {step: validation loss or None} of checkpoints, as they are saved or read

    def _local_copy(self, folder):
        """Copy a remote folder that Orbax cannot read, such as s3://, to a local one, and return the path of that."""
        self.copy = tempfile.TemporaryDirectory()  # it is removed together with this object
        fs, there = filesystem(folder)
        with contextlib.suppress(FileNotFoundError):
            paths = persist(lambda: fs.find(there), folder)
            copies = [os.path.join(self.copy.name, os.path.relpath(p, there)) for p in paths]
            # Lists of files are given, since a folder's name with brackets would be taken for a glob.
            persist(lambda: fs.get(paths, copies), folder)
        return self.copy.name

    def _open_writer(self):
        """Make `writer`, and the folder, from which incomplete saves are removed."""
        self.barriers = SaveBarriers() if jax.process_count() > 1 else None
        if jax.process_index() == 0:
            # Whatever the storage raises is suppressed: the first save tries again.
            with contextlib.suppress(Exception):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_all(self._incomplete())
        self.writer = make_writer(self.folder, self.barriers, self._before_commit)

    def _before_commit(self):
        """Called in process 0 before a checkpoint gets its name. Raises an error if the run may not write it."""
        self.wait_for_log()
        self.confirm()

    def save(self, step, state, sequences, extra, val_loss=None, patience=None):
        """Start to write the state at `step`, after `sequences` sequences, with {name: value} `extra` in its meta.

        If it fails, now or in the background, a warning is printed, and after `finish` the attribute `saved` is not
        `step`. The previous save must end first. If it has not ended `patience` seconds after it started, no checkpoint
        is written, with a warning; with None, this save waits for it.
        """
        if step == self.saved:
            return
        if self.written and patience is not None:
            wait([self.written], max(0, self.started + patience - time.monotonic()))
            if not all_of(self.written.done()):
                warn(f"no checkpoint of step {step}: the previous one is still being written")
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
        except Exception as e:
            # An error of the storage: the copy from the devices to memory cannot fail.
            error = e
        self.saved = step
        self.started = time.monotonic()
        self.written = self.watcher.submit(self._watch, step, val_loss, error)

    def _watch(self, step, val_loss, error):
        """Wait until the save of `step` has ended. Then remove the checkpoints that are no longer kept or, if it
        failed, what it left. error: the error with which the save failed to start, or None."""
        try:
            if error:
                raise error
            self.writer.wait_until_finished()
            if jax.process_index() == 0:
                self._read_back(step)
            self.on_disk = step
            self.losses[step] = val_loss
            if jax.process_index() == 0:
                # Whatever the storage raises is suppressed: the next save tries again.
                with contextlib.suppress(Exception):
                    self._remove_old_ones()
        except Exception as e:  # whatever the storage makes the libraries raise
            if self.barriers:
                self.barriers.fail()
            warn(
                f"checkpoint {step} could not be written ({first_line(e)}); the older ones stay, and the next save "
                f"tries again",
                own=not isinstance(e, AnotherFailed),
            )
            if jax.process_index() == 0:
                self._clean_up(step, is_unreadable=isinstance(e, Unreadable))

    def _read_back(self, step):
        """Raises an error if Orbax cannot read the description of the arrays in a checkpoint. The numbers themselves
        are not read. A save that wrote something unreadable raises no error of its own."""
        self.meta(step)
        reader = make_reader(ocp.PyTreeCheckpointHandler())
        state = self.folder / str(step) / "state"
        if persist(lambda: reader.metadata(state), str(state)).item_metadata is None:
            raise Unreadable("its arrays cannot be read back")

    def _remove_old_ones(self):
        """Remove the checkpoints that `steps_to_keep` does not name. If the validation loss of a checkpoint cannot be
        read since the storage does not answer, raises Unavailable before anything is removed."""
        self.confirm()
        losses = {step: self.val_loss(step) for step in self._list()}
        gone = losses.keys() - steps_to_keep(losses, self.keep, self.every)
        # Whatever is incomplete belongs to an earlier save, since no other save runs now.
        self._remove_all([*map(str, gone), *self._incomplete()])

    def val_loss(self, step):
        """The validation loss of a checkpoint; None if none was measured or the checkpoint is damaged. Raises
        Unavailable."""
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
        checkpoint is removed only if it is unreadable. If the storage did not answer, it may be sound."""
        # Whatever the storage raises is suppressed: the next save tries again.
        with contextlib.suppress(Exception):
            if is_unreadable:
                self._remove_all([str(step)])
            for _ in range(0 if is_remote(str(self.folder)) else 10):
                time.sleep(0.5)  # another process may still be writing its part
                names = self._incomplete()
                self._remove_all(names)
                if not names:
                    break

    def _remove_all(self, names):
        """Remove the folders with these names from the folder of the checkpoints."""
        for name in names:
            folder = str(self.folder / name)
            with contextlib.suppress(FileNotFoundError):
                ask(folder, "rm", recursive=True)

    def finish(self):
        """Wait until the newest save has succeeded or failed on all processes."""
        if self.written:
            self.written.result()
            if not all_of(self.on_disk == self.saved):
                self.losses.pop(self.saved, None)
                # True if it succeeded on this process and failed on another one.
                if self.on_disk == self.saved:
                    self.on_disk = None
                self.saved = None
        self.written = None

    def steps(self):
        """The steps of all checkpoints that process 0 finds, the newest first. Raises UserError on all processes."""
        most = 1000  # a fixed number, since a broadcast needs the same shape on all processes
        found = on_all(lambda: self._list()[:most] if jax.process_index() == 0 else [])
        shared = np.full(most, -1, np.int64)
        shared[: len(found)] = found
        if jax.process_count() > 1:
            shared = multihost_utils.broadcast_one_to_all(shared)
        return [int(step) for step in shared if step >= 0]

    def _list(self):
        """The steps of the checkpoints that this process finds, the newest first."""
        names = set(names_in(str(self.folder))) - {*self._incomplete()}
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _incomplete(self):
        """Names of what saves left that did not complete."""
        return incomplete_saves(str(self.folder))

    def meta(self, step):
        """The values that `save` wrote beside the state. Raises UserError if they are damaged."""
        meta = read_json(str(self.folder), str(step), "meta", "metadata")
        if meta.get("sum") != meta_sum(meta):
            raise UserError("what is beside its arrays is not what was saved")
        return meta

    def restore(self, abstract, before=math.inf, multiple=1):
        """(state, meta) of the newest sound checkpoint; None if there are no checkpoints. Raises UserError if all are
        damaged. Damaged ones are moved to the folder checkpoints-damaged, with a warning.

        before: given for a rollback. Only checkpoints of earlier steps are read, first those whose step is a multiple
        of `multiple`, and all later ones are deleted.
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
        self.saved = step
        self.on_disk = step
        return found

    def _clear(self, later, damaged):
        """Remove the checkpoints of the steps `later`, and move the damaged ones to another folder, where no later save
        collides with them. Returns, in words, where they are now. Raises UserError."""
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
        """The parameters alone, with the shapes and shardings of `abstract`: those of the checkpoint of step `first` if
        it is sound, else those of the newest sound one. Raises UserError if there is none."""
        item = {"params": abstract}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args, partial_restore=True)
        steps = sorted(self.steps(), key=lambda step: step == first, reverse=True)
        found, damaged = self._newest_sound(args, steps)
        if found is None:
            raise UserError(f"{self.folder}: there is no checkpoint in here.")
        state, meta = found
        if damaged:
            warn(f"the parameters are those of checkpoint {meta['step']}")
        return state["params"]

    def _newest_sound(self, args, steps):
        """Read the checkpoints of `steps`, in this order, until one is sound.

        Returns ((what Orbax's `args` read of it, its meta), the steps of the damaged ones before it); (None, []) if
        `steps` is empty. Raises UserError if none is sound, or if one is of another model.
        """
        reader = make_reader(ocp.CompositeCheckpointHandler())
        damaged = []
        for step in steps:
            found, reason = self._read(reader, step, args)
            if not reason:
                return found, damaged
            words = f"checkpoint {step} is damaged ({reason})"
            if not spoken_for(f"damaged/{step}", words):
                warn(words, own=reason != FOUND_ELSEWHERE)
            damaged.append(step)
        if damaged:
            names = ", ".join(map(str, damaged))
            raise UserError(
                f"{self.folder}: every checkpoint in here is damaged ({names}); take another run, or remove that "
                f"folder to start again."
            )
        return None, []

    def _read(self, reader, step, args):
        """((what `args` read of one checkpoint, its meta), "") if all processes find it sound, else (None, why it is
        not sound). Raises UserError if it is of another model, and Unavailable if the storage of a process does not
        answer."""
        found, reason, other = on_all(lambda: self._read_here(reader, step, args))
        if not all_of(not reason):
            return None, reason or FOUND_ELSEWHERE
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
        """Read a checkpoint on this process. Returns ((what `args` read, its meta) or None, why it cannot be read or
        "", by which flags it is of another model or ""). Raises Unavailable.

        An error does not tell whether the checkpoint is damaged or the storage failed for a moment. So a remote
        checkpoint is read up to three times, each time after the storage answers again.
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
                names_in(folder)  # the listing is not used: this waits until the storage answers
        return None, reason, ""

    def close(self):
        """Wait for the newest save and end the threads."""
        self.finish()
        self.watcher.shutdown()
        if self.writer:
            self.writer.close()
