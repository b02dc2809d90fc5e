"""Schedules of the learning rate: their values, their one clock, and that weight decay and the run's length agree."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import begin, random_batch, small_config
from test_resume import assert_bitwise, checkpoint_of, metrics_of

import model
from architectures import parameters
from training import steps
from training.optimizer import make_optimizer, make_schedule

# flags of each schedule, with 4 steps of warm-up and the end at step 20
PLAIN = dict(max_lr=1.0, end_lr=0.0, warmup_steps=4, end_steps=20)
SCHEDULES = {
    "cosine": dict(PLAIN, schedule="cosine"),
    "linear": dict(PLAIN, schedule="linear"),
    "wsd": dict(PLAIN, schedule="wsd", decay_steps=8),
    "trunk": dict(PLAIN, schedule="wsd"),
}
EVERY = pytest.mark.parametrize("flags", SCHEDULES.values(), ids=SCHEDULES)


def rates(n, **flags):
    """The learning rates of the steps before n, computed as the compiled step does."""
    schedule = jax.jit(make_schedule(small_config(**flags).optimizer))
    return np.array([schedule(jnp.int32(step)) for step in range(n)])


def test_rates_are_those_of_the_formulas():
    step = np.arange(20)
    warmup = step / 4
    after = {
        "cosine": (1 + np.cos(np.pi * (step - 4) / 16)) / 2,
        "linear": 1 - (step - 4) / 16,
        "wsd": np.where(step <= 12, 1, 1 - np.sqrt(np.maximum(0, step - 12) / 8)),
        "trunk": np.ones(20),
    }
    for name, flags in SCHEDULES.items():
        assert np.allclose(rates(20, **flags), np.where(step < 4, warmup, after[name])), name


@pytest.mark.parametrize("end_lr", [0.0, 0.3])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_decay_ends_at_end_lr_to_the_bit_and_stays_there(name, end_lr):
    seen = rates(30, **{**SCHEDULES[name], "end_lr": end_lr})
    assert (seen[4:20] > end_lr).all() and (seen[20:] == np.float32(end_lr)).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rate_is_negative_at_any_step(name):
    """Rounding made -4e-10 of 0 at the end of a line; the flags are those of presets and odd ones."""
    odd = [(16e-3, 30, 400), (4e-3, 5000, 75000), (6e-4, 0, 7), (1e-9, 2, 3), (3.0, 1, 2**24 + 3)]
    for max_lr, warmup_steps, end_steps in odd:
        for end_lr in (0.0, 0.3 * max_lr):
            rates_ = dict(max_lr=max_lr, end_lr=end_lr)
            whole = dict(warmup_steps=warmup_steps, end_steps=end_steps, decay_steps=0)
            if name == "wsd":
                whole["decay_steps"] = (end_steps - warmup_steps) // 2 + 1
            flags = {**SCHEDULES[name], **rates_, **whole}
            schedule = make_schedule(small_config(**flags).optimizer)
            near = np.arange(-40, 200) + end_steps
            steps_ = np.concatenate([np.arange(450), near[near > 0], [2**31 - 1]])
            found = jax.jit(jax.vmap(schedule))(jnp.asarray(steps_, jnp.int32))
            assert (found >= 0).all() and jnp.isfinite(found).all(), flags
            assert all(schedule(jnp.int32(step)) >= 0 for step in (0, end_steps, end_steps + 60))


def test_a_trunk_is_every_run_that_decays_later_to_the_bit():
    """Its rate depends on neither the end nor its flags, also where max_lr is not end_lr + (max_lr - end_lr)."""
    flags = dict(max_lr=6e-4, end_lr=6e-5, warmup_steps=4, schedule="wsd")
    trunk = rates(40, **flags, end_steps=10)
    assert (trunk[4:] == np.float32(6e-4)).all()
    for end_steps in (12, 30):
        whole = rates(40, **flags, end_steps=end_steps, decay_steps=8)
        assert np.array_equal(whole[: end_steps - 8], trunk[: end_steps - 8])


def updates_of(cfg, gradient, n):
    """Yield (step, learning rate, updates, which of them decay) of n steps of the optimizer with the same gradient,
    every parameter being 1."""
    optimizer, schedule = make_optimizer(cfg, steps.make_mesh(cfg))
    table = model.param_table(cfg)
    params = parameters.table_map(lambda param: jnp.ones(param.shape), table)
    decays = parameters.table_map(lambda param: param.cast, table)
    gradients = jax.tree.map(lambda leaf: jnp.full(leaf.shape, gradient), params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(n):
        updates, state = update(gradients, state, params, rate=schedule(step))
        yield step, schedule(step), jax.tree.leaves(updates), jax.tree.leaves(decays)


@EVERY
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_follows_the_schedule_and_at_rate_0_nothing_moves(flags, optimizer):
    """Without a gradient a step takes learning rate x weight_decay of each matrix away, and nothing of others."""
    cfg = small_config(**flags, optimizer=optimizer, weight_decay=0.25, embedding_lr=1.0)
    for _, rate, updates, decays in updates_of(cfg, 0.0, 22):
        for update, decay in zip(updates, decays, strict=True):
            assert np.allclose(update, -0.25 * rate * decay, rtol=1e-6, atol=0)
    for _, rate, updates, _ in updates_of(cfg, 0.1, 22):
        assert all(bool(update.all()) == (rate > 0) for update in updates)


@pytest.mark.parametrize("name", ["linear", "trunk"])
def test_skipped_steps_count_in_the_applied_rate_as_in_the_logged_one(name, monkeypatch):
    """Without a gradient a sound step takes rate x weight_decay of a matrix away; a bad one nothing."""
    flags = SCHEDULES[name]
    cfg = small_config(**flags, weight_decay=0.25, embedding_lr=1.0, blocks=1, layers_per_block=1)
    bad = jnp.array([2, 3, 4, 13])

    def no_gradient(gradient, state, tokens, targets):
        loss = jnp.where((state.step == bad).any(), jnp.nan, 1.0)
        seen = model.Metrics(*jnp.ones(3), load={"moe": jnp.ones((1, 8))}, dropped=0.0)
        return (loss, seen), jax.tree.map(jnp.zeros_like, state.params)

    monkeypatch.setattr(steps, "accumulate_gradient", no_gradient)
    state, step = begin(cfg, steps.make_mesh(cfg))
    batch, planned = random_batch(cfg, steps.make_mesh(cfg)), rates(22, **flags)
    for i in range(22):
        before = np.asarray(state.params["embedding"], np.float64)
        state, metrics = step(state, *batch)
        after = np.asarray(state.params["embedding"], np.float64)
        assert metrics["lr"] == planned[i] and state.step == i + 1
        applied = 0.0 if i in bad else planned[i]
        assert np.allclose(before - after, 0.25 * applied * before, rtol=1e-4, atol=1e-7), i


def test_the_schedule_follows_the_length_of_a_run_also_where_that_changes(train, capsys, tmp_path):
    """A finished run that continues learns again; where it would not, one line tells."""
    flags = dict(end_steps=None, schedule="linear", end_lr=0.0, max_lr=0.01, eval_every=50)
    flags |= dict(eval_steps=1, blocks=1, microbatches=1)

    def rates_of_run(n, **more):
        """Those of steps 3 to n as logged, in shares of max_lr, and what was printed of the schedule."""
        assert train(**flags | more) == 0
        rows = metrics_of(tmp_path / "runs" / "run")
        assert [row["step"] for row in rows] == list(range(1, n + 1))
        lines = capsys.readouterr().out.splitlines()
        said = [line for line in lines if re.search("the schedule changes|warning: --", line)]
        return [100 * row["lr"] for row in rows[2:]], said

    found, said = rates_of_run(4, training_steps=4)
    assert found == pytest.approx([1, 0.5]) and not said
    found, said = rates_of_run(8, training_steps=8)
    assert found[2:] == pytest.approx([4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert len(said) == 1 and said[0].endswith("from here on: end_steps was 4 and is now 8")
    found, said = rates_of_run(10, training_steps=10, end_steps=8)
    assert found[6:] == [0, 0]
    assert len(said) == 1 and said[0].endswith(
        "--training_steps 10: the run stays at --end_lr 0 from --end_steps 8 on"
    )
    found, said = rates_of_run(11, training_steps=11, end_steps=12)
    assert found[8:] == pytest.approx([2 / 10])
    assert len(said) == 2 and said[1].endswith(
        "--training_steps 11: the run ends before its learning rate has come down, at --end_steps 12"
    )


def test_a_copied_checkpoint_of_a_trunk_decays_to_the_bit_as_the_run_planned_so(train, tmp_path):
    """docs/runs.md: the copy needs nothing else of the trunk."""
    runs, flags = tmp_path / "runs", dict(schedule="wsd", end_lr=0.0, dropout_rate=0.1, blocks=1)
    assert train(**flags, name="trunk", training_steps=3) == 0
    shutil.copytree(runs / "trunk/checkpoints/3", runs / "branch/checkpoints/3")
    flags |= dict(training_steps=5, end_steps=5, decay_steps=2)
    assert train(**flags, name="branch") == train(**flags, name="whole") == 0
    assert_bitwise(checkpoint_of(runs / "branch", 5), checkpoint_of(runs / "whole", 5))
    assert metrics_of(runs / "branch") == metrics_of(runs / "whole")[3:]
