"""What `training/orbax_workarounds.py` relies on in Orbax. A failure here means that Orbax has changed."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint._src.checkpointers import async_checkpointer
from orbax.checkpoint._src.path import atomicity_types

from training import orbax_workarounds as workarounds


def test_the_installed_version_is_the_one_whose_source_was_read():
    assert ocp.__version__.startswith(workarounds.MINOR_VERSION + ".")


def test_a_save_passes_as_many_barriers_as_each_process_posts_words(monkeypatch):
    """The function in which Orbax's thread ends a save, with two processes."""
    passed = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    async_checkpointer._background_wait_for_commit_futures(
        epath.Path("folder"),
        [],
        lambda: None,
        barrier_sync_key_prefix=None,
        sync_fn=lambda key, timeout_ms: passed.append(key),
        timeout_secs=60,
        primary_host=0,
    )
    assert len(passed) == workarounds.BARRIERS


def test_the_object_that_completes_a_checkpoint_in_a_bucket_has_this_name():
    assert atomicity_types.COMMIT_SUCCESS_FILE == workarounds.COMMITTED


def save(folder, before_commit=lambda: None):
    """Save into folder/1, and wait until it is written."""
    writer = workarounds.make_writer(folder, None, before_commit)
    args = ocp.args.Composite(state=ocp.args.StandardSave({"a": np.arange(3)}))
    try:
        writer.save(folder / "1", args=args)
        writer.wait_until_finished()
    finally:
        writer.close()


def test_a_folder_that_cannot_be_created_is_an_error_at_once(tmp_path, monkeypatch):
    folder = epath.Path(tmp_path)
    usual = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)

    async def full(*_, **settings):
        raise OSError("no space left")

    monkeypatch.setattr(usual, "create", full)
    with pytest.raises(OSError, match="no space left"):
        save(folder)
    assert not (tmp_path / "1").exists()


def test_a_save_that_may_not_commit_leaves_only_what_counts_as_incomplete(tmp_path):
    def refuse():
        raise OSError("the lock is lost")

    folder = epath.Path(tmp_path)
    with pytest.raises(OSError, match="the lock is lost"):
        save(folder, refuse)
    (left,) = [path.name for path in tmp_path.iterdir()]
    assert workarounds.incomplete_saves(str(tmp_path)) == [left]
    save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert workarounds.incomplete_saves(str(tmp_path)) == []
