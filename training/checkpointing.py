"""Checkpoints: written in the background, kept by a policy, verified when read, passed over when damaged."""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import sys
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

import utils
from training.processes import all_of
from utils import UserError, say


@jax.jit
def fingerprint(state):
    """uint32 per leaf: the sum of its bit patterns modulo 2^32, the same on every mesh. A checkpoint that restores to
    another fingerprint than it was saved with is damaged."""
    return jnp.stack(
        [
            lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32)
            for x in jax.tree.leaves(state)
        ]
    )


CHUNK = 2**27  # bytes of an array that are stored together, and so can be read without the rest


def stored_in_chunks(x):
    """How Orbax stores an array: large ones cut first between blocks, layers and experts, which lead their dims."""
    axes = 0
    while (
        axes < 2
        and x.ndim - axes > 2
        and x.shape[axes] <= 512
        and 4 * math.prod(x.shape[axes:]) > CHUNK
    ):
        axes += 1
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(range(axes)))


def meet_or_fail():
    """Orbax's barrier for the threads that write a checkpoint. A process whose part failed goes on to the last barriers
    of the save ("set_value"); the others would wait for it for 20 minutes in one before, and here fail at once."""
    client, rounds = ocp.multihost.get_jax_distributed_client(), itertools.count()

    def barrier(*, key, timeout_ms):
        for n in rounds:
            client.key_value_set(f"checkpoint/{n}/{jax.process_index()}", key)
            at = [
                client.blocking_key_value_get(f"checkpoint/{n}/{i}", timeout_ms)
                for i in range(jax.process_count())
            ]
            if {*at} == {key}:
                return
            if "set_value" not in key:
                raise OSError(
                    f"process {next(i for i, other in enumerate(at) if other != key)} failed to"
                )

    return barrier


def retention(keep, every, best):
    """{why: Orbax's policy} of the checkpoints to keep: the newest `keep` (None: all), those of every `every`-th step
    (0: none) and, if `best`, the one with the smallest validation loss."""
    policies = ocp.checkpoint_managers
    every = {"every": policies.EveryNSteps(every)} if every else {}
    best = policies.BestN(
        get_metric_fn=val_loss_of, reverse=True, n=int(best), keep_checkpoints_without_metrics=False
    )
    return {"newest": policies.LatestN(keep), "best": best} | every


def val_loss_of(metrics):
    return metrics["val_loss"] if math.isfinite(metrics["val_loss"]) else math.inf


def first_line(error):
    """What an error of the libraries says, 200 characters of it at most."""
    text = (
        str(error).split(" See full TensorStore")[0].strip()
    )  # what follows there is a function's address
    return (text.splitlines() or [type(error).__name__])[0][:200]


class Loop(asyncio.SelectorEventLoop):
    """Orbax reads the arrays of a checkpoint together in an event loop, which it closes when the first cannot be read.
    The others are on their way still: they are given up before, and what their threads report later, each time in a
    traceback of its own that the loop is closed, is wanted by nobody."""

    def close(self):
        others = set() if self.is_closed() or self.is_running() else asyncio.all_tasks(self)
        for task in others:
            task.cancel()
        if others:
            self.run_until_complete(asyncio.gather(*others, return_exceptions=True))
        super().close()

    def call_soon_threadsafe(self, callback, *args, context=None):
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise


class Loops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return Loop()


def meta_sum(meta):
    """Sum of what is kept beside a state, to know a damaged one."""
    return zlib.crc32(json.dumps({**meta, "sum": 0}, sort_keys=True).encode())


def is_sound(meta):
    """Whether what was read beside a state can be what `save` kept there. Older ones have no sum."""
    kinds = dict(step=int, sequences=int, fingerprint=list)
    if not isinstance(meta, dict) or not all(
        isinstance(meta.get(key), kind) for key, kind in kinds.items()
    ):
        return False
    return "sum" not in meta or meta["sum"] == meta_sum(meta)


def shapes_of(tree):
    """{path of a leaf: its shape} of a tree of arrays or of what describes them, the same however it was stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): tuple(x.shape) for path, x in leaves}


def first_misfit(there, here):
    """The first leaf that `there` and `here`, {path: shape}, have in different shapes, in words; "" where none is."""
    for leaf in sorted(
        there.keys() | here.keys(), key=lambda leaf: (not leaf.startswith("params"), leaf)
    ):
        if there.get(leaf) != here.get(leaf):
            saved, wanted = (
                list(side[leaf]) if leaf in side else "missing" for side in (there, here)
            )
            return f"{leaf} is {saved} there and {wanted} here"
    return ""


class Checkpoints:
    """The Orbax checkpoints in `folder`, of which those of `retention` stay: written in the background, verified
    when read. explain({flag: value} kept with one or None, {path: shape} of it) tells in words which flags make it of
    another model."""

    def __init__(self, folder, keep=None, every=0, best=False, explain=None):
        asyncio.set_event_loop_policy(Loops())
        self.explain = explain
        self.folder = epath.Path(folder if utils.is_remote(folder) else os.path.abspath(folder))
        policy = ocp.checkpoint_managers.AnyPreservationPolicy(
            [*retention(keep, every, best).values()]
        )
        writes = keep is not None
        if writes:
            self._remove_torn_losses()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=val_loss_of,
            create=writes,
            cleanup_tmp_directories=writes,
            lightweight_initialize=not writes,  # or it reads all validation losses, of which one may be damaged
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=meet_or_fail() if jax.process_count() > 1 else None
            ),
        )
        self.manager, self.saved = ocp.CheckpointManager(self.folder, options=options), None
        self.watcher, self.written, self.on_disk = ThreadPoolExecutor(1, "checkpoint"), None, None

    def val_loss(self, step):
        """The validation loss that is kept with a checkpoint, or None. Raises ValueError where that is damaged."""
        content = utils.read_file(str(self.folder / str(step) / "metrics" / "metrics"))
        if content is None:
            return None
        kept = json.loads(content)
        if not isinstance(kept, dict) or not isinstance(kept.get("val_loss"), int | float):
            raise ValueError("it holds no such number")
        return kept["val_loss"]

    def _remove_torn_losses(self):
        """Orbax begins by reading the losses of all checkpoints, and ends the run where one is damaged. Without it the
        checkpoint is as sound as it was, but none of the best."""
        steps = [
            path.parent.name for path in self.folder.glob("*/metrics") if path.parent.name.isdigit()
        ]
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
            say(
                f"warning: checkpoint {step} is not written: it may need {utils.size(size)} and {self.folder} has "
                f"{utils.size(free)} free; the older ones stay, and the next save tries again"
            )
            return
        meta = dict(
            about,
            step=step,
            sequences=sequences,
            fingerprint=np.asarray(fingerprint(state)).tolist(),
        )
        meta["sum"] = meta_sum(meta)
        storage = jax.tree.map(stored_in_chunks, state)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state, storage), meta=ocp.args.JsonSave(meta)
        )
        self.manager.save(
            step,
            args=args,
            force=True,
            metrics=None if val_loss is None else {"val_loss": val_loss},
        )
        self.saved, self.written = step, self.watcher.submit(self._watch, step)

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
        steps = sorted(
            (s for s in self.steps() if s < before),
            key=lambda s: (s % multiple == 0, s),
            reverse=True,
        )
        advice = (
            "give another --name, or the values it had",
            "give another --name, or remove that folder to start again",
        )
        found, damaged = self._newest_sound(
            ocp.args.StandardRestore(abstract), shapes_of(abstract), steps, say, advice
        )
        if damaged:
            self._set_aside(damaged)
            say(
                f"warning: going on from checkpoint {found[1]['step']}; the steps from {found[1]['step'] + 1} to "
                f"{damaged[0]} were lost and are run again, the damaged checkpoints stand in "
                f"{self.folder}-damaged"
            )
        self.saved = self.on_disk = found and found[1]["step"]
        for step in self.steps() if before < math.inf else []:
            if step > (self.saved or 0):
                self.manager.delete(step)
        return found

    def restore_params(self, abstract):
        """Parameters alone of the newest sound checkpoint, as `abstract`. Raises UserError where there is none."""
        item = {"params": abstract}
        args = ocp.args.PyTreeRestore(
            item, ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        tell = functools.partial(print, file=sys.stderr)  # stdout may be one JSON object
        advice = "restore the run's config.json", "take another run"
        found, damaged = self._newest_sound(args, shapes_of(item), self.steps(), tell, advice)
        if found is None:
            raise UserError(f"{self.folder}: there is no checkpoint in here.")
        other = self.explain and self.explain(found[1].get("config"), {})
        if other:
            raise UserError(
                f"{self.folder}: checkpoint {found[1]['step']} is of a model with other flags ({other}); "
                f"{advice[0]}."
            )
        if damaged:
            tell(f"warning: the parameters are those of checkpoint {found[1]['step']}")
        return found[0]["params"]

    def _newest_sound(self, args, shapes, steps, tell, advice):
        """((what `args` read of the first sound checkpoint of `steps`, its meta), those before, which are damaged);
        (None, []) where there are no checkpoints. shapes: {path: shape} of what is read.

        Where none is sound it raises UserError, which ends with advice[0] where one has other shapes, else advice[1].
        """
        args = ocp.args.Composite(state=args, meta=ocp.args.JsonRestore())
        # Each process reads by itself: one that finds damage would leave the others in Orbax's barriers.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(me, {me}, f"process{me}")
        reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)
        damaged, unfit = [], ""
        for step in steps:
            reason, found = "", None
            try:
                found = reader.restore(self.folder / str(step), args=args)
                reason = (
                    ""
                    if is_sound(found.meta)
                    else "what stands beside its arrays is not what was saved"
                )
            except Exception as e:  # whatever a damaged file makes the libraries raise
                reason = first_line(e)
            if not all_of(not reason):
                reason = reason or "as another process found"
            else:
                saved = np.asarray(fingerprint(found.state)).tolist()
                if (
                    saved == found.meta["fingerprint"][: len(saved)]
                ):  # parameters are a state's first leaves
                    return (found.state, found.meta), damaged
                reason = "its contents are not those that were saved"
            if other := self._misfit(step, shapes):
                unfit = (
                    unfit
                    or f"checkpoint {step} is of a model with other flags ({other}); {advice[0]}"
                )
            else:
                tell(f"warning: checkpoint {step} is damaged ({reason})")
            damaged.append(step)
        if damaged:
            every = (
                f"every checkpoint in here is damaged ({', '.join(map(str, damaged))}); {advice[1]}"
            )
            raise UserError(f"{self.folder}: {unfit or every}.")
        return None, []

    def _misfit(self, step, shapes):
        """How the arrays of a checkpoint differ from {path: shape} `shapes`, which may lack the optimizer's; "" where
        they do not, or nothing tells."""
        try:
            there = shapes_of(
                ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "state").tree
            )
        except Exception:  # as above
            return ""
        parts = {leaf.split(".")[0] for leaf in shapes}
        there = {leaf: shape for leaf, shape in there.items() if leaf.split(".")[0] in parts}
        differs = first_misfit(there, shapes)
        if differs and self.explain:
            with contextlib.suppress(ValueError, UserError):
                meta = utils.read_json(str(self.folder), str(step), "meta", "metadata")
                differs = self.explain(meta.get("config"), there) or differs
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
