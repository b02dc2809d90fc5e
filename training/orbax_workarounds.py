"""Everything in which this program relies on Orbax beyond its documentation.

It was read in the source of Orbax 0.12.8. tests/test_orbax_workarounds.py fails with another minor version, or if one
of these facts no longer holds. Then the source has to be read again, and this file changed.
"""

import jax
import orbax.checkpoint as ocp

from runtime.files import is_remote, names_in, read_file

MINOR_VERSION = "0.12"
# The barriers of a save: after the first, all processes have written, and after the second, process 0 has committed the
# checkpoint.
BARRIERS = 2
# In a bucket nothing can be renamed. Instead, an object with this name is written last and means that all others are
# there.
COMMITTED = "commit_success.txt"


class AnotherFailed(OSError):
    """A save failed on another process, which prints why."""


class SaveBarriers:
    """The barriers at which the processes that write a checkpoint wait for each other. They fail at once where one
    process has failed.

    Orbax's own barriers wait 20 minutes for a process that does not arrive. Here each process posts a word at every
    barrier of a save: that it has arrived, or that it has failed and will not arrive. So all processes know it, none
    waits in vain, and the next save starts with new barriers.
    """

    def __init__(self):
        self.client = ocp.multihost.get_jax_distributed_client()
        self.saves = 0
        self.barrier = 0  # barriers of the newest save at which this process has posted its word

    def start_save(self):
        """Use new barriers from now on."""
        self.saves += 1
        self.barrier = 0

    def __call__(self, *, key, timeout_ms):
        """Wait for all processes at the next barrier, as Orbax's `barrier_sync_fn`. Raises `AnotherFailed`."""
        barrier = f"checkpoint/{self.saves}/{self.barrier}"
        self._post("arrived")
        for process in range(jax.process_count()):
            word = self.client.blocking_key_value_get(f"{barrier}/{process}", timeout_ms)
            if word == "failed":
                raise AnotherFailed(f"process {process} failed to")

    def fail(self):
        """Post at the remaining barriers of this save that this process has failed."""
        while self.barrier < BARRIERS:
            self._post("failed")

    def _post(self, word):
        """Post a word of this process at its next barrier."""
        key = f"checkpoint/{self.saves}/{self.barrier}/{jax.process_index()}"
        self.client.key_value_set(key, word)
        self.barrier += 1


def temporary_path_class(folder):
    """Orbax's class for the temporary folder of a save in `folder`, changed so that an error in creating the folder is
    raised only when the save is finalized.

    Orbax's threads that write the arrays wait until the temporary folder exists. If it cannot be created, they would
    wait for 5 minutes, and the process could not end before.
    """
    usual = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)

    class TemporaryPath(usual):
        """Orbax's class, which keeps the error of `create`."""

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
    """Orbax's writer of checkpoints in `folder`, which writes in its own threads.

    barriers: `SaveBarriers`, or None in a single process. before_commit(): called by process 0 before a checkpoint gets
    its name; an error that it raises ends the save.
    """
    settings = dict(
        async_options=ocp.AsyncOptions(
            barrier_sync_fn=barriers, post_finalization_callback=before_commit
        ),
        # Otherwise the training thread would call the storage, and fail or wait with it.
        file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
        temporary_path_class=temporary_path_class(folder),
    )
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(**settings))
    return ocp.AsyncCheckpointer(handler, **settings)


def make_reader(handler):
    """Orbax's reader, which works in this process alone. Otherwise a process that finds a damaged file would leave the
    others waiting at Orbax's barriers."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(me, {me}, f"process{me}")
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def incomplete_saves(folder):
    """The names in `folder` of what incomplete saves left there."""
    names = names_in(folder)
    incomplete = [name for name in names if ocp.path.step.TMP_DIR_SUFFIX in name]
    if is_remote(folder):
        for name in names:
            # The object is read and not searched in a listing. A listing may be outdated, and what counts as incomplete
            # is removed.
            if name.isdecimal() and read_file(f"{folder}/{name}/{COMMITTED}") is None:
                incomplete.append(name)
    return incomplete
