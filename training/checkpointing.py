"""Checkpoints: written in the background, kept by a policy, verified when read; damaged ones are passed over."""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax

from runtime import messages
from runtime.files import filesystem, is_remote, persist, read_file, read_json
from runtime.messages import UserError, first_line, say
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


# Bytes of an array that are stored in one piece, which can be read without the others.
CHUNK = 2**27


def stored_in_chunks(x):
    """How Orbax stores an array: large ones are cut between blocks, layers and experts, which lead their dims."""
    cut = []
    while len(cut) < 2 and is_cut(x.shape[len(cut) :]):
        cut.append(len(cut))
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(cut))


def is_cut(shape):
    """Whether float32 arrays of this shape are stored in one piece for each index of their first dim."""
    return len(shape) > 2 and shape[0] <= 512 and 4 * math.prod(shape) > CHUNK


def meet_or_fail():
    """Orbax's barrier for the threads that write a checkpoint, made to fail at once.

    A process whose part failed goes straight to the last barriers of the save ("set_value"). With Orbax's own barrier
    the others wait for it in an earlier one, for 20 minutes. Here each process tells which barrier it has reached; one
    that learns of a process at another barrier fails.
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


def retention(keep, every, best):
    """{why: Orbax's policy} of the checkpoints to keep: the newest `keep` (None: all), those of every `every`-th step
    (0: none) and, if `best`, the one with the smallest validation loss."""
    policies = ocp.checkpoint_managers
    wanted = {"newest": policies.LatestN(keep)}
    wanted["best"] = policies.BestN(
        get_metric_fn=val_loss_of, reverse=True, n=int(best), keep_checkpoints_without_metrics=False
    )
    if every:
        wanted["every"] = policies.EveryNSteps(every)
    return wanted


def val_loss_of(metrics):
    return metrics["val_loss"] if math.isfinite(metrics["val_loss"]) else math.inf


class QuietLoop(asyncio.SelectorEventLoop):
    """An event loop that Orbax may close early.

    Orbax reads all arrays of a checkpoint in one loop and closes it when the first cannot be read. Other reads are
    still under way; each would print a traceback because its loop is closed. So they are canceled first, and what
    their threads report later is dropped.
    """

    def close(self):
        if not self.is_closed() and not self.is_running():
            self._cancel_all()
        super().close()

    def _cancel_all(self):
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def call_soon_threadsafe(self, callback, *args, context=None):
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise


class QuietLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return QuietLoop()


def meta_sum(meta):
    """Checksum of what is saved beside a state."""
    return zlib.crc32(json.dumps({**meta, "sum": 0}, sort_keys=True).encode())


def is_sound(meta):
    """Whether what was read beside a state can be what `save` wrote there. Older checkpoints have no checksum."""
    if not isinstance(meta, dict):
        return False
    kinds = dict(step=int, sequences=int, fingerprint=list)
    if not all(isinstance(meta.get(key), kind) for key, kind in kinds.items()):
        return False
    return "sum" not in meta or meta["sum"] == meta_sum(meta)


def shapes_of(tree):
    """{path of a leaf: its shape} of a tree of arrays or of what describes them, the same however it was stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): tuple(x.shape) for path, x in leaves}


def first_misfit(there, here):
    """In words, the first leaf whose shape differs between `there` and `here`, {path: shape}; "" where none does.
    Parameters come before the optimizer's leaves."""
    for leaf in sorted(there.keys() | here.keys(), key=lambda leaf: (leaf[:6] != "params", leaf)):
        if there.get(leaf) != here.get(leaf):
            saved = list(there[leaf]) if leaf in there else "missing"
            wanted = list(here[leaf]) if leaf in here else "missing"
            return f"{leaf} is {saved} there and {wanted} here"
    return ""


class Advice(NamedTuple):
    """How the messages of a reader of checkpoints end."""

    other_flags: str  # where a checkpoint is of a model with other flags
    damaged: str  # where all are damaged


RESUMING = Advice(
    "give another --name, or the values it had",
    "give another --name, or remove that folder to start again",
)
READING = Advice("restore the run's config.json", "take another run")


def copy_to(local, address):
    """Copy a remote folder, if it is there, into a local one; returns the path of the copy."""
    fs, there = filesystem(address)
    path = os.path.join(local, "checkpoints")
    os.makedirs(path)
    with contextlib.suppress(FileNotFoundError):
        persist(lambda: fs.get(f"{there}/", f"{path}/", recursive=True), address)
    return path


class Checkpoints:
    """The Orbax checkpoints in `folder`: written in the background, verified when read, kept as `retention` says.

    keep, every, best: of `retention`; keep None: they are only read. explain(flags) -> which flags make a
    checkpoint that of another model, in words: {flag: value} that was saved with it, or None.
    """

    def __init__(self, folder, keep=None, every=0, best=False, explain=None):
        asyncio.set_event_loop_policy(QuietLoops())
        self.explain = explain
        if is_remote(folder) and not folder.startswith("gs://"):  # which Orbax cannot read
            self.copy = tempfile.TemporaryDirectory()  # removed with this object
            folder = copy_to(self.copy.name, folder)
        self.folder = epath.Path(folder if is_remote(folder) else os.path.abspath(folder))
        writes = keep is not None
        if writes:
            self._remove_torn_losses()
        self.manager = ocp.CheckpointManager(
            self.folder, options=manager_options(keep, every, best)
        )
        self.watcher = ThreadPoolExecutor(1, "checkpoint")
        self.saved = None  # step of the newest checkpoint, which may still be on its way
        self.on_disk = None  # step of the newest one that is written
        self.written = None  # future: whether the newest save went well

    def val_loss(self, step):
        """The validation loss that is kept with a checkpoint, or None. Raises ValueError where that is damaged."""
        content = read_file(str(self.folder / str(step) / "metrics" / "metrics"))
        if content is None:
            return None
        kept = json.loads(content)
        if not isinstance(kept, dict) or not isinstance(kept.get("val_loss"), int | float):
            raise ValueError("it holds no such number")
        return kept["val_loss"]

    def _remove_torn_losses(self):
        """Remove damaged validation losses: Orbax begins by reading all, and ends the run where it cannot. A checkpoint
        without one is as sound as before, but none of the best."""
        folders = [path.parent for path in self.folder.glob("*/metrics")]
        steps = [folder.name for folder in folders if folder.name.isdigit()]
        for step in steps if jax.process_index() == 0 else []:
            try:
                self.val_loss(step)
            except Exception as e:  # whatever it holds
                say(
                    f"warning: the validation loss of checkpoint {step} is damaged ({first_line(e)}) and removed"
                )
                (self.folder / step / "metrics").rmtree()
        all_of(True)  # nobody looks before it is done

    def save(self, step, state, sequences, about, val_loss=None):
        """Begin to write the state at `step`, after `sequences` sequences, with {name: value} `about` beside it. Where
        that fails, now or in the background, a warning is printed, and after `settle` `saved` is not `step`."""
        if step == self.saved:
            return
        self.settle()
        if not self._has_room(step, state):
            return
        meta = dict(about, step=step, sequences=sequences)
        meta["fingerprint"] = np.asarray(fingerprint(state)).tolist()
        meta["sum"] = meta_sum(meta)
        storage = jax.tree.map(stored_in_chunks, state)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state, storage), meta=ocp.args.JsonSave(meta)
        )
        metrics = None if val_loss is None else {"val_loss": val_loss}
        self.manager.save(step, args=args, force=True, metrics=metrics)
        self.saved = step
        self.written = self.watcher.submit(self._watch, step)

    def _has_room(self, step, state):
        """Whether the disks of all processes have room for the state; a warning is printed where one has not."""
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        free = math.inf
        if not is_remote(str(self.folder)):
            os.makedirs(self.folder, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        if all_of(size < free):
            return True
        say(
            f"warning: checkpoint {step} is not written: it may need {messages.size(size)} and {self.folder} has "
            f"{messages.size(free)} free; the older ones stay, and the next save tries again"
        )
        return False

    def _watch(self, step):
        """Wait until the save of `step` has ended; whether it went well. What a failed one left is removed."""
        try:
            self.manager.wait_until_finished()
            self.on_disk = step
            return True
        except Exception as e:  # whatever the storage makes the libraries raise
            say(
                f"warning: checkpoint {step} could not be written ({first_line(e)}); the older ones stay, and the next "
                f"save tries again"
            )
            self._clean_up(step)
            return False

    def _clean_up(self, step):
        """Remove what a failed save of `step` left, once all threads that wrote it have ended."""
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

    def settle(self):
        """Wait until the newest save is written or has failed."""
        if self.written and not self.written.result():
            with contextlib.suppress(Exception):  # Orbax raises it once in each thread that asks
                self.manager.wait_until_finished()
            self.manager.reload()
            if self.saved not in self.steps():
                self.saved = None
        self.written = None

    def steps(self):
        """Steps of all checkpoints, the newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def meta(self, step):
        """What `save` wrote beside the state."""
        return self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta

    def restore(self, abstract, before=math.inf, multiple=1):
        """(state, meta) of the newest sound checkpoint, or None where there is no checkpoint at all.

        Damaged ones are moved to checkpoints-damaged, and a warning tells what was lost. Raises UserError where none is
        sound. With `before` only earlier steps count, multiples of `multiple` first, and all later ones are deleted.
        """
        self.settle()
        earlier = [step for step in self.steps() if step < before]
        steps = sorted(earlier, key=lambda step: (step % multiple == 0, step), reverse=True)
        item = ocp.args.StandardRestore(abstract)
        found, damaged = self._newest_sound(item, shapes_of(abstract), steps, say, RESUMING)
        step = found[1]["step"] if found else None
        if damaged:
            self._set_aside(damaged)
            say(
                f"warning: going on from checkpoint {step}; the steps from {step + 1} to {damaged[0]} were lost and "
                f"are run again, the damaged checkpoints stand in {self.folder}-damaged"
            )
        self.saved = self.on_disk = step
        for later in self.steps() if before < math.inf else []:
            if later > (step or 0):
                self.manager.delete(later)
        return found

    def restore_step(self, abstract, step):
        """(state, meta) of the checkpoint of `step`. Raises UserError where that is damaged or of another model."""
        item = ocp.args.StandardRestore(abstract)
        found, reason = self._read(lone_reader(), step, with_meta(item))
        if not reason:
            return found.state, found.meta
        other = self._misfit(step, shapes_of(abstract))
        if other:
            raise UserError(f"{self.folder}: {self._of_other_flags(step, other, READING)}.")
        raise UserError(
            f"{self.folder}: checkpoint {step} is damaged ({reason}); take one of another step."
        )

    def restore_params(self, abstract):
        """Parameters alone of the newest sound checkpoint, as `abstract`. Raises UserError where there is none."""
        item = {"params": abstract}
        args = ocp.args.PyTreeRestore(
            item, ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        warn = functools.partial(print, file=sys.stderr)  # stdout may be one JSON object
        found, damaged = self._newest_sound(args, shapes_of(item), self.steps(), warn, READING)
        if found is None:
            raise UserError(f"{self.folder}: there is no checkpoint in here.")
        state, meta = found
        other = self.explain and self.explain(meta.get("config"))
        if other:
            raise UserError(f"{self.folder}: {self._of_other_flags(meta['step'], other, READING)}.")
        if damaged:
            warn(f"warning: the parameters are those of checkpoint {meta['step']}")
        return state["params"]

    def _of_other_flags(self, step, other, advice):
        return f"checkpoint {step} is of a model with other flags ({other}); {advice.other_flags}"

    def _newest_sound(self, args, shapes, steps, warn, advice):
        """((what `args` read of the first sound checkpoint of `steps`, its meta), those before, which are damaged);
        (None, []) where there are no checkpoints. shapes: {path: shape} of what is read. Raises UserError where none is
        sound."""
        reader = lone_reader()
        args = with_meta(args)
        damaged, unfit = [], []
        for step in steps:
            found, reason = self._read(reader, step, args)
            if not reason:
                return (found.state, found.meta), damaged
            other = self._misfit(step, shapes)
            if other:
                unfit.append(self._of_other_flags(step, other, advice))
            else:
                warn(f"warning: checkpoint {step} is damaged ({reason})")
            damaged.append(step)
        if unfit:
            raise UserError(f"{self.folder}: {unfit[0]}.")
        if damaged:
            names = ", ".join(map(str, damaged))
            raise UserError(
                f"{self.folder}: every checkpoint in here is damaged ({names}); {advice.damaged}."
            )
        return None, []

    def _read(self, reader, step, args):
        """(what `args` read of one checkpoint, "") where all processes find it sound, else (None, why it is not)."""
        found, reason = None, ""
        try:
            found = reader.restore(self.folder / str(step), args=args)
            if not is_sound(found.meta):
                reason = "what stands beside its arrays is not what was saved"
        except Exception as e:  # whatever a damaged file makes the libraries raise
            reason = first_line(e)
        if not all_of(not reason):
            return None, reason or "as another process found"
        here = np.asarray(fingerprint(found.state)).tolist()
        if here != found.meta["fingerprint"][: len(here)]:  # parameters are a state's first leaves
            return None, "its contents are not those that were saved"
        return found, ""

    def _misfit(self, step, shapes):
        """How the arrays of a checkpoint differ from {path: shape} `shapes`, which may lack the optimizer's; "" where
        they do not, or nothing tells."""
        try:
            stored = ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "state").tree
            there = shapes_of(stored)
        except Exception:  # as above
            return ""
        parts = {leaf.split(".")[0] for leaf in shapes}
        there = {leaf: shape for leaf, shape in there.items() if leaf.split(".")[0] in parts}
        differs = first_misfit(there, shapes)
        if differs and self.explain:
            with contextlib.suppress(ValueError, UserError):
                meta = read_json(str(self.folder), str(step), "meta", "metadata")
                differs = self.explain(meta.get("config")) or differs
        return differs

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


def manager_options(keep, every, best):
    """Options of Orbax's manager, with the arguments of `Checkpoints`."""
    writes = keep is not None
    policies = list(retention(keep, every, best).values())
    several = jax.process_count() > 1
    return ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
        best_fn=val_loss_of,
        create=writes,
        cleanup_tmp_directories=writes,
        lightweight_initialize=not writes,  # or it reads all validation losses, of which one may be damaged
        async_options=ocp.AsyncOptions(barrier_sync_fn=meet_or_fail() if several else None),
    )


def with_meta(args):
    """Arguments that read a state by `args`, and what was saved beside it."""
    return ocp.args.Composite(state=args, meta=ocp.args.JsonRestore())


def lone_reader():
    """A reader for this process alone: one that finds damage would leave the others in Orbax's barriers."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"process{me}")
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)
