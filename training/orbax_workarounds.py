"""What this program relies on inside Orbax, beyond its documentation, all in one file.

Read in the source of Orbax 0.12.8. tests/test_orbax_workarounds.py fails with another minor version, or where one of
these facts no longer holds: then read that source again, here.
"""

import jax
import orbax.checkpoint as ocp

from runtime.files import is_remote, names_in, read_file

MINOR_VERSION = "0.12"
BARRIERS = 2  # that Orbax passes in a save: all have written, and the first process has committed the checkpoint
# In a bucket nothing can be renamed: a last object, with this name, says that all others are there.
COMMITTED = "commit_success.txt"


class SaveBarriers:
    """The barriers at which the processes that write a checkpoint meet. They fail at once where one process failed.

    Orbax's own barriers wait 20 minutes for a process that does not come. Here each process posts a word at every
    barrier of a save: that it has arrived, or that it failed and will not come. So all processes know, none waits for
    nothing, and the next save starts with new barriers.
    """

    def __init__(self):
        self.client = ocp.multihost.get_jax_distributed_client()
        self.saves = 0
        self.barrier = 0  # barriers of the newest save at which this process has posted its word

    def start_save(self):
        self.saves += 1
        self.barrier = 0

    def __call__(self, *, key, timeout_ms):
        """Wait for all processes at the next barrier, as Orbax's `barrier_sync_fn`. Raises OSError where one failed."""
        barrier = f"checkpoint/{self.saves}/{self.barrier}"
        self._post("arrived")
        for process in range(jax.process_count()):
            word = self.client.blocking_key_value_get(f"{barrier}/{process}", timeout_ms)
            if word == "failed":
                raise OSError(f"process {process} failed to")

    def fail(self):
        """Post at the barriers of this save that are left that this process will not come."""
        while self.barrier < BARRIERS:
            self._post("failed")

    def _post(self, word):
        key = f"checkpoint/{self.saves}/{self.barrier}/{jax.process_index()}"
        self.client.key_value_set(key, word)
        self.barrier += 1


def temporary_path_class(folder):
    """Orbax's class of the temporary folder that a save in `folder` fills, changed so that an error in creating it is
    raised when the save is finalized.

    Orbax's threads that write the arrays wait until the temporary folder is there. Where it cannot be created, they
    would wait for 5 minutes, and so would the process where it ends.
    """
    usual = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)

    class TemporaryPath(usual):
        error = None

        async def create(self, **settings):
            try:
                return await super().create(**settings)
            except Exception as e:  # whatever the storage raises
                self.error = e
                return self.get()

        async def finalize(self):
            if self.error:
                raise self.error
            await super().finalize()

    return TemporaryPath


def make_writer(folder, barriers, before_commit):
    """Orbax's writer of checkpoints in `folder`, which works in threads of its own.

    barriers: `SaveBarriers`, or None in a single process. before_commit(): called by the first process before a
    checkpoint gets its name; an error that it raises ends the save.
    """
    how = dict(
        async_options=ocp.AsyncOptions(
            barrier_sync_fn=barriers, post_finalization_callback=before_commit
        ),
        # else the training thread would ask the storage, and fail or wait with it
        file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
        temporary_path_class=temporary_path_class(folder),
    )
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(**how))
    return ocp.AsyncCheckpointer(handler, **how)


def make_reader(handler):
    """Orbax's reader for this process alone. Otherwise a process that finds damage would leave the others waiting in
    Orbax's barriers."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"process{me}")
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def incomplete_saves(folder):
    """Names in `folder` of what saves left that did not complete."""
    names = names_in(folder)
    incomplete = [name for name in names if ocp.path.step.TMP_DIR_SUFFIX in name]
    if is_remote(folder):
        for name in names:
            # The object is read, not looked up in a listing: a listing may be older, and what is incomplete is removed.
            if name.isdecimal() and read_file(f"{folder}/{name}/{COMMITTED}") is None:
                incomplete.append(name)
    return incomplete
