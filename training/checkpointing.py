"""Checkpoints: written in the background, kept by a policy, verified when read; damaged ones are passed over."""

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
    read_file,
    read_json,
)
from runtime.messages import Unavailable, UserError, first_line, warn
from runtime.processes import all_of, on_all


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


class Meeting:
    """Barriers of the threads that write a checkpoint, as Orbax calls them, which fail at once where a process failed.

    Orbax's own would have the others wait for it for 20 minutes. A process leaves word for every barrier of a save:
    that it is there, or that it will not come. So all know, and the next save begins anew.
    """

    STAGES = 2  # barriers of a save: all have written, and the first process has committed it

    def __init__(self):
        self.client = ocp.multihost.get_jax_distributed_client()
        self.saves = 0
        self.stage = 0  # barriers of the newest save that this process has left word for

    def begin(self):
        self.saves += 1
        self.stage = 0

    def __call__(self, *, key, timeout_ms):
        here = f"checkpoint/{self.saves}/{self.stage}"
        self._leave("there")
        for process in range(jax.process_count()):
            word = self.client.blocking_key_value_get(f"{here}/{process}", timeout_ms)
            if word == "failed":
                raise OSError(f"process {process} failed to")

    def fail(self):
        while self.stage < self.STAGES:
            self._leave("failed")

    def _leave(self, word):
        here = f"checkpoint/{self.saves}/{self.stage}/{jax.process_index()}"
        self.client.key_value_set(here, word)
        self.stage += 1


def place_of(folder):
    """Orbax's class of the place where a save in `folder` grows until it is whole, made to fail at its end alone.

    All threads that write the parts wait until it is there. Where making it fails, Orbax has them wait for 5 minutes,
    and the process with them where it ends.
    """
    usual = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)

    class Place(usual):
        error = None

        async def create(self, **settings):
            try:
                return await super().create(**settings)
            except Exception as e:  # of the storage
                self.error = e
                return self.get()

        async def finalize(self):
            if self.error:
                raise self.error
            await super().finalize()

    return Place


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
    with keep None, and none is written. explain(flags) -> which flags make a checkpoint that of another model, in
    words: {flag: value} that was saved with it, or None. confirm(): raises an error where this run may not write any
    more."""

    def __init__(self, folder, keep=None, every=0, explain=None, confirm=lambda: None):
        self.keep, self.every, self.explain, self.confirm = keep, every, explain, confirm
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
        self.began = 0.0  # when that one began, by time.monotonic()
        self.losses = {}  # {step: validation loss or None} of checkpoints, as they are saved or read

    def _open_writer(self):
        self.meeting = Meeting() if jax.process_count() > 1 else None
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):  # of any storage; the first save tries again
                self.folder.mkdir(parents=True, exist_ok=True)
                for name in self._torn():
                    self._remove(name)
        how = dict(
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=self.meeting,
                post_finalization_callback=self._before_commit,
            ),
            # else the training thread would ask the storage, and fail or wait with it
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            temporary_path_class=place_of(self.folder),
        )
        handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(**how))
        self.writer = ocp.AsyncCheckpointer(handler, **how)

    def _before_commit(self):
        """What the first process does before a checkpoint gets its name. Raises an error where it may not."""
        self.wait_for_log()
        self.confirm()

    def save(self, step, state, sequences, about, val_loss=None, patience=None):
        """Begin to write the state at `step`, after `sequences` sequences, with {name: value} `about` beside it. Where
        that fails, now or in the background, a warning is printed, and after `finish` `saved` is not `step`. So it is
        where the save before is not done `patience` seconds after it began; None: this one waits for it."""
        if step == self.saved:
            return
        if self.written and patience is not None:
            wait([self.written], max(0, self.began + patience - time.monotonic()))
            if not all_of(self.written.done()):
                warn(f"no checkpoint of step {step}: the one before is still being written")
                return
        self.finish()
        meta = dict(about, step=step, sequences=sequences, val_loss=val_loss)
        meta["fingerprint"] = np.asarray(fingerprint(state)).tolist()
        meta["sum"] = meta_sum(meta)
        storage = jax.tree.map(stored_in_chunks, state)
        state = ocp.args.StandardSave(state, storage)
        args = ocp.args.Composite(state=state, meta=ocp.args.JsonSave(meta))
        if self.meeting:
            self.meeting.begin()
        error = None
        try:
            self.writer.save(self.folder / str(step), args=args)
        except Exception as e:  # of the storage: what is copied from the devices is in memory
            error = e
        self.saved = step
        self.began = time.monotonic()
        self.written = self.watcher.submit(self._watch, step, val_loss, error)

    def _watch(self, step, val_loss, error):
        """Wait until the save of `step` has ended, and remove what need not stay, or what a failed one left. error:
        with which it could not even begin, or None."""
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
            if self.meeting:
                self.meeting.fail()
            warn(
                f"checkpoint {step} could not be written ({first_line(e)}); the older ones stay, and the next save "
                f"tries again"
            )
            if jax.process_index() == 0:
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
        """Raises Unavailable, before anything is removed, where the storage does not tell how good one is."""
        self.confirm()
        losses = {step: self.val_loss(step) for step in self._list()}
        gone = losses.keys() - kept(losses, self.keep, self.every)
        for name in (*map(str, gone), *self._torn()):  # no other save is on its way
            self._remove(name)

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
        """Remove what a failed save of `step` left: a full disk has room for the next one then. A whole checkpoint goes
        only where it is unreadable: it may be sound where the storage did not answer."""
        with contextlib.suppress(Exception):  # as above
            if is_unreadable:
                self._remove(str(step))
            for _ in range(0 if is_remote(str(self.folder)) else 10):
                time.sleep(0.5)  # another process's part of it may still be on its way
                torn = self._torn()
                for name in torn:
                    self._remove(name)
                if not torn:
                    break

    def _remove(self, name):
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
        names = set(names_in(str(self.folder))) - {*self._torn()}
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _torn(self):
        """Names of what saves left that were not completed."""
        names = names_in(str(self.folder))
        torn = [name for name in names if ocp.path.step.TMP_DIR_SUFFIX in name]
        if is_remote(str(self.folder)):  # nothing is renamed there: a last object tells of all
            steps = [name for name in names if name.isdecimal()]
            ends = [f"{self.folder}/{name}/commit_success.txt" for name in steps]
            # read, and not looked up in a listing, which may be older: what is torn is removed
            torn += [name for name, end in zip(steps, ends) if read_file(end) is None]
        return torn

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
        there = self.steps()
        earlier = [step for step in there if step < before]
        steps = sorted(earlier, key=lambda step: (step % multiple == 0, step), reverse=True)
        found, damaged = self._newest_sound(ocp.args.StandardRestore(abstract), steps)
        step = found[1]["step"] if found else None
        later = [n for n in there if n > (step or 0) and n not in damaged and before < math.inf]
        moved = ""
        if damaged or later:
            make_way = functools.partial(self._make_way, later, damaged)
            moved = on_all(make_way if jax.process_index() == 0 else lambda: "")
        if damaged:
            warn(
                f"resuming from checkpoint {step}; the steps from {step + 1} to {damaged[0]} were lost and are run "
                f"again{moved}"
            )
        self.saved = self.on_disk = step
        return found

    def _make_way(self, later, damaged):
        """Remove the checkpoints `later`, and move damaged ones out of the way of the next saves; says where to. Raises
        UserError."""
        self.confirm()
        for n in later:
            self._remove(str(n))
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
        """Parameters alone of the newest sound checkpoint, or of that of step `first` if it is sound, as `abstract`.
        Raises UserError where there is none."""
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
        not). Raises UserError where it is of another model, Unavailable where a process's storage does not answer."""
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
        """((what `args` read, its meta) or None, why it cannot be read or "", which other model it is of or "") of a
        checkpoint on this process. Raises Unavailable.

        An error tells not whether the checkpoint is damaged or the storage was not there for a moment. So remote ones
        are read again once the storage answers, three times in all.
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
                names_in(folder)
        return None, reason, ""

    def close(self):
        """As `finish`, for good."""
        self.finish()
        self.watcher.shutdown()
        if self.writer:
            self.writer.close()
