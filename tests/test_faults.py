"""What goes wrong in a run: numbers that are not finite, disks that are full, damaged checkpoints, killed processes."""

import json
import os
import random
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SMALL_GPT2
from test_resume import metrics_of

import dataset
import main
import model
import utils

# --- Numbers that are not finite ----------------------------------------------------------------------------------

TINY = {**SMALL_GPT2, "blocks": 1, "model_dimension": 16, "ffn_dim": 32, "T": 16}


def poisoned(make_loss, bad):
    """`model.make_loss` whose training loss is not finite on batches that begin with one of the rows `bad` [n, T]."""

    def make(cfg, mesh, train):
        loss = make_loss(cfg, mesh, train)

        def not_finite(params, tokens, targets, key, first):
            value, seen = loss(params, tokens, targets, key, first)
            return jnp.where((tokens[0, 0] == bad).all(-1).any(), jnp.nan, 1.0) * value, seen

        return not_finite if train else loss

    return make


@pytest.fixture
def poison(shards, monkeypatch):
    """`poison(steps, **flags)`: let the batches that an undisturbed run has at these steps give a NaN."""
    make_loss = model.make_loss

    def poison(steps, T=16, batch=8):
        cfg = utils.replace(utils.preset("tiny"), bucket_name=str(shards), T=T, vocab_size=250)
        first = (np.array(steps) - 1) * batch
        bad = dataset.Mixture(cfg, "train").sequences(first, seed=0)[:, :-1]
        monkeypatch.setattr(model, "make_loss", poisoned(make_loss, bad))

    return poison


def meta_of(run, step):
    return json.loads((run / "checkpoints" / str(step) / "meta" / "metadata").read_text())


def test_a_step_that_is_not_finite_changes_nothing_but_is_counted(train, poison, tmp_path, capsys):
    poison([5, 6])
    moe = dict(blocks=1, layers_per_block=1, n_experts=4)
    assert train(mesh=(2, 1, 1), T=16, training_steps=6, save_steps=4, **moe) == 0
    run = tmp_path / "runs" / "run"
    said = capsys.readouterr().out
    assert [s for s in range(1, 7) if f"step {s} is skipped, its loss is nan" in said] == [5, 6]
    assert [row["bad_steps"] for row in metrics_of(run)] == [0, 0, 0, 0, 1, 2]
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        before, after = (reader.restore(run / "checkpoints" / step / "state") for step in "46")
    steps = before.pop("step"), after.pop("step")
    assert [int(s) for s in steps] == [4, 6] and meta_of(run, 6)["sequences"] == 48
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), before, after))


def test_bad_steps_in_a_row_send_the_run_back_and_past_their_data(train, poison, tmp_path, capsys):
    """The same whether or not it is stopped, before, among and after them."""
    poison([7, 8, 9])
    flags = dict(TINY, max_bad_steps=3, save_steps=4, keep_checkpoints=5)
    assert train(**flags, name="whole", training_steps=12) == 0
    said, runs = capsys.readouterr().out, tmp_path / "runs"
    assert "going back to step 4, and on with the data after sequence 72 (return 1 of 3)" in said
    assert meta_of(runs / "whole", 12)["sequences"] == 72 + 8 * 8
    rows = metrics_of(runs / "whole")
    assert [row["step"] for row in rows] == list(range(1, 13)) and np.isfinite([r["loss/train_loss"] for r in rows]).all()
    assert [row["bad_steps"] for row in rows] == [0] * 4 + [3] * 8
    for steps in (6, 8, 9, 12):
        assert train(**flags, name="parts", training_steps=steps) == 0
    assert metrics_of(runs / "parts") == rows
    assert meta_of(runs / "parts", 12) == meta_of(runs / "whole", 12)  # with the fingerprint


def test_after_three_returns_the_run_stops(train, poison, tmp_path, capsys):
    poison(range(6, 60))
    flags = dict(TINY, max_bad_steps=2, save_steps=4, training_steps=50)
    for _ in range(2):
        with pytest.raises(utils.UserError, match="--max_bad_steps 2: so many in a row from step 5 on .*after 3 returns"):
            train(**flags)
        said = capsys.readouterr().out
        assert said.count("going back to step 4") == 3
    assert [p.name for p in (tmp_path / "runs/run/checkpoints").iterdir()] == ["4"]


def test_a_run_without_a_checkpoint_goes_back_to_its_beginning(train, poison, tmp_path, capsys):
    poison([2, 3])
    assert train(**TINY, max_bad_steps=2, training_steps=5) == 0
    assert "going back to step 0, and on with the data after sequence 24" in capsys.readouterr().out
    assert meta_of(tmp_path / "runs/run", 5)["sequences"] == 24 + 5 * 8


def test_loss_spikes_are_logged_and_counted(tmp_path, capsys):
    cfg = utils.replace(utils.preset("tiny"), output_dir=str(tmp_path), name="run")
    log, losses = utils.RunLog(cfg, 0, True), np.random.default_rng(0).normal(3, 0.1, 150)
    losses[[10, 60, 61, 120]] = 9, 3.5, np.nan, 4
    for step, loss in enumerate(losses, 1):
        log.metrics({"step": step, "loss/train_loss": float(loss)})
    log.close()
    counts = [json.loads(line)["loss_spikes"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert np.flatnonzero(np.diff(counts)).tolist() == [119]  # not the first of all, where no mean is known yet
    assert capsys.readouterr().out.count("is a spike") == 1
    log = utils.RunLog(cfg, 130, True)
    log.metrics({"step": 131, "loss/train_loss": 4.5})
    log.close()
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["loss_spikes"] == 2
    assert not utils.is_spike(9.0, [3.0, 3.1] * 50, 0)


# --- Checkpoints --------------------------------------------------------------------------------------------------


def state_of(seed, n=3000):
    rng = np.random.default_rng(seed)
    return {"params": {"a": jnp.array(rng.normal(size=n), jnp.float32), "b": jnp.arange(7)}, "step": jnp.int32(seed)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b))


def test_a_checkpoint_truncated_anywhere_is_passed_over(tmp_path, capsys):
    checkpoints, rng = main.Checkpoints(str(tmp_path / "whole"), 3), random.Random(0)
    for step in (1, 2):
        checkpoints.save(step, state_of(step), step, {})
    checkpoints.close()
    parts = [p.relative_to(tmp_path) for p in (tmp_path / "whole/2").rglob("*") if p.is_file()]
    parts = [p for p in parts if "state" in p.parts or "meta" in p.parts]
    chosen = rng.choices(parts, [(tmp_path / p).stat().st_size for p in parts], k=50)
    passed_over = 0
    for n, part in enumerate(chosen):
        folder = tmp_path / str(n) / "whole"
        shutil.copytree(tmp_path / "whole", folder)
        os.truncate(folder.parent / part, rng.randrange((folder.parent / part).stat().st_size))
        checkpoints = main.Checkpoints(str(folder), 3)
        state, meta = checkpoints.restore(abstract(state_of(0)))
        checkpoints.close()
        assert same(state, state_of(meta["step"]))  # what no reader looks at may be missing
        passed_over += meta["step"] == 1
        shutil.rmtree(folder.parent)
    assert passed_over >= 40 and capsys.readouterr().out.count("going on from checkpoint 1") == passed_over


def test_the_newest_every_kth_and_the_best_are_kept(tmp_path):
    checkpoints = main.Checkpoints(str(tmp_path / "c"), 2, every=3, best=True)
    for step, loss in enumerate([5.0, 2.0, 4.0, None, float("nan"), 3.0, 3.5, 3.6], 1):
        checkpoints.save(step, state_of(step, 10), step, {}, loss)
    checkpoints.close()
    checkpoints = main.Checkpoints(str(tmp_path / "c"), 2, every=3, best=True)
    assert checkpoints.steps() == [8, 7, 6, 3, 2]
    checkpoints.save(9, state_of(9, 10), 9, {}, 1.0)  # the earlier losses are known still
    checkpoints.close()
    assert checkpoints.steps() == [9, 8, 6, 3]


def test_without_room_the_save_is_left_out_and_the_run_goes_on(train, tmp_path, capsys, monkeypatch):
    free = iter([10**9, 10**3, 10**9])
    monkeypatch.setattr(main.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    assert train(**TINY, training_steps=6, save_steps=2) == 0
    said = capsys.readouterr().out
    assert said.count("checkpoint 4 is not written: it may need 0.00 GB and ") == 1 and "done at step 6" in said
    checkpoints = tmp_path / "runs/run/checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["2", "6"]
    monkeypatch.setattr(main.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**3))
    assert train(**TINY, training_steps=8, save_steps=2) == 1
    done = capsys.readouterr()
    assert done.err.startswith("error: --output_dir ") and "the last checkpoint, of step 8, is not written" in done.err
    assert sorted(p.name for p in checkpoints.iterdir()) == ["2", "6"]
