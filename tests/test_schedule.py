"""Schedules of the learning rate: their values, their one clock, and that weight decay and the run's length agree."""

import itertools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, assert_bitwise, checkpoint_of, metrics_of
from mesh_helpers import batch_of, begin
from small_models import given, small_config

import model
import utils
from architectures import parameters
from training import train_step
from training.device_mesh import make_mesh
from training.optimizer import hyperparameters, learning_rate, make_optimizer
from training.train_state import abstract_state
from training.train_step import lower_train_step

# flags of each schedule, with 4 steps of warm-up and the end at step 20
PLAIN = given("--max_lr 1 --end_lr 0 --warmup_steps 4 --end_steps 20")
SCHEDULES = {
    "cosine": dict(PLAIN, schedule="cosine"),
    "linear": dict(PLAIN, schedule="linear"),
    "wsd": dict(PLAIN, schedule="wsd", decay_steps=8),
    "trunk": dict(PLAIN, schedule="wsd"),
}


def schedule_of(**flags):
    """Steps, int32 of any shape, -> learning rates, computed of numbers that are inputs, as the compiled step does."""
    cfg = small_config(**flags)
    numbers = hyperparameters(cfg, make_mesh(cfg))

    @jax.jit
    def rates(steps, numbers):
        return learning_rate(utils.replace(cfg, **numbers).optimizer, steps)

    return lambda steps: rates(jnp.asarray(steps, jnp.int32), numbers)


def rates(n, **flags):
    """The learning rates of the steps before n."""
    return np.array(schedule_of(**flags)(np.arange(n)))


def test_rates_are_those_of_the_formulas():
    step = np.arange(20)
    after = {
        "cosine": (1 + np.cos(np.pi * (step - 4) / 16)) / 2,
        "linear": 1 - (step - 4) / 16,
        "wsd": np.where(step <= 12, 1, 1 - np.sqrt(np.maximum(0, step - 12) / 8)),
        "trunk": np.ones(20),
    }
    for name, flags in SCHEDULES.items():
        assert np.allclose(rates(20, **flags), np.where(step < 4, step / 4, after[name])), name


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rate_is_negative_and_a_decay_ends_at_end_lr_to_the_bit(name):
    """Rounding made -4e-10 of 0 at the end of a line; the flags are those of presets and odd ones."""
    odd = [(16e-3, 30, 400), (4e-3, 5000, 75000), (6e-4, 0, 7), (1e-9, 2, 3), (3.0, 1, 2**24 + 3)]
    for (max_lr, warmup, end), share in itertools.product(odd, (0.0, 0.3)):
        flags = SCHEDULES[name] | dict(max_lr=max_lr, end_lr=share * max_lr)
        flags |= dict(warmup_steps=warmup, end_steps=end, decay_steps=0)
        if name == "wsd":
            flags["decay_steps"] = (end - warmup) // 2 + 1
        schedule = schedule_of(**flags)
        near = np.arange(-40, 200) + end
        steps_ = np.concatenate([np.arange(450), near[near > 0], [2**31 - 1]])
        found = schedule(steps_)
        assert (found >= 0).all() and jnp.isfinite(found).all(), flags
        if name != "trunk":
            assert (found[steps_ >= end] == np.float32(share * max_lr)).all(), flags
        assert all(schedule(step) >= 0 for step in (0, end, end + 60))


def test_a_trunk_is_every_run_that_decays_later_to_the_bit():
    """Its rate depends on neither the end nor its flags, also where max_lr is not end_lr + (max_lr - end_lr)."""
    flags = given("--max_lr 6e-4 --end_lr 6e-5 --warmup_steps 4 --schedule wsd")
    trunk = rates(40, **flags, end_steps=10)
    assert (trunk[4:] == np.float32(6e-4)).all()
    for end_steps in (12, 30):
        whole = rates(40, **flags, end_steps=end_steps, decay_steps=8)
        assert np.array_equal(whole[: end_steps - 8], trunk[: end_steps - 8])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_follows_the_schedule_and_at_rate_0_nothing_moves(optimizer):
    """Without a gradient a step takes learning rate x weight_decay of each matrix away, and nothing of others."""
    flags = SCHEDULES["linear"] | dict(optimizer=optimizer, weight_decay=0.25, blocks=1)
    cfg = small_config(**flags, embedding_lr=1.0)
    optimizer = make_optimizer(cfg, make_mesh(cfg))
    table = model.param_table(cfg)
    params = parameters.table_map(lambda param: jnp.ones(param.shape), table)
    decays = jax.tree.leaves(parameters.table_map(lambda param: param.cast, table))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient, step in itertools.product((0.0, 0.1), range(22)):
        gradients, rate = (
            jax.tree.map(lambda x: gradient * x, params),
            learning_rate(cfg.optimizer, step),
        )
        updates, state = update(gradients, state, params, rate=rate)
        for moved, decay in zip(jax.tree.leaves(updates), decays, strict=True):
            if gradient:
                assert bool(moved.all()) == (rate > 0)
            else:
                assert np.allclose(moved, -0.25 * rate * decay, rtol=1e-6, atol=0)


def test_a_bad_step_counts_in_the_rate_applied_and_logged_and_changes_nothing_else(monkeypatch):
    flags = SCHEDULES["linear"] | dict(weight_decay=0.25, embedding_lr=1.0)
    cfg = small_config(**flags, blocks=1, layers_per_block=1)
    bad = jnp.array([2, 3, 4, 13])

    def no_gradient(gradient, state, tokens, targets):
        zero = jnp.where((state.step == bad).any(), jnp.nan, 0.0)
        load = jnp.arange(8.0)[None]  # which a sound step balances
        seen = model.Metrics(*jnp.ones(2), dropped=0.0, measured=dict(load=load))
        return (1 + zero, seen), jax.tree.map(lambda x: zero + 0 * x, state.params)

    monkeypatch.setattr(train_step, "accumulate_gradient", no_gradient)
    state, step = begin(cfg, make_mesh(cfg))
    batch, planned = batch_of(cfg, make_mesh(cfg)), rates(22, **flags)
    for i in range(22):
        before = jax.device_get(state)
        state, metrics = step(state, *batch)
        assert metrics["lr"] == planned[i] and state.step == i + 1
        applied = 0.0 if i in bad else planned[i]
        old, new = (np.float64(x.params["embedding"]) for x in (before, state))
        assert np.allclose(old - new, 0.25 * applied * old, rtol=1e-4, atol=1e-7), i
        same = jax.tree.map(np.array_equal, before._replace(step=0), state._replace(step=0))
        assert jax.tree.all(same) == (i in bad), i


def test_the_schedule_follows_the_length_of_a_run_also_where_that_changes(train, capsys, tmp_path):
    """A finished run that continues learns again; where it would not, one line tells."""
    flags = TINY | dict(schedule="linear", end_lr=0.0, max_lr=0.01, eval_every=50)
    lives = [  # (--training_steps, --end_steps, shares of max_lr of the last steps, ends of the lines)
        (4, None, [1, 0.5], []),
        (8, None, [4 / 6, 3 / 6, 2 / 6, 1 / 6], ["here on: --end_steps was 4 and is now 8"]),
        (10, 8, [0, 0], ["--training_steps 10: the run stays at --end_lr 0 from --end_steps 8 on"]),
        (11, 12, [2 / 10], ["is now 12", "has come down, at --end_steps 12"]),
    ]
    for n, end_steps, wanted, endings in lives:
        assert train(**flags, training_steps=n, end_steps=end_steps) == 0
        rows = metrics_of(tmp_path / "runs" / "run")
        assert [row["step"] for row in rows] == list(range(1, n + 1))
        assert [100 * row["lr"] for row in rows[-len(wanted) :]] == pytest.approx(wanted)
        lines = capsys.readouterr().out.splitlines()
        said = [line for line in lines if re.search("the schedule changes|warning: --", line)]
        assert len(said) == len(endings) and all(map(str.endswith, said, endings)), said


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_sweep_compiles_one_program(optimizer):
    """Another rate, length, decay, momentum or seed is another input of the same step, not another step."""
    base = dict(SCHEDULES["wsd"], optimizer=optimizer)
    sweep = [
        given("--max_lr 0.5 --end_lr 0.1 --embedding_lr 3 --warmup_steps 0"),
        given("--end_steps 31 --training_steps 31 --decay_steps 0"),
        given("--weight_decay 0 --grad_clip_norm 2 --seed 7"),
        given("--adam_b2 0.99 --muon_momentum 0.5 --bias_update_rate 0.1 --balance_weight 0.5"),
    ]
    texts = set()
    for flags in ({}, *sweep):
        cfg = small_config(**base | flags)
        mesh = make_mesh(cfg)
        abstract = abstract_state(cfg, mesh, make_optimizer(cfg, mesh))
        texts.add(lower_train_step(cfg, mesh, abstract).as_text())
    assert len(texts) == 1


def test_a_copied_checkpoint_of_a_trunk_decays_to_the_bit_as_the_run_planned_so(train, tmp_path):
    """docs/runs.md: the copy needs nothing else of the trunk."""
    runs, flags = tmp_path / "runs", TINY | dict(schedule="wsd", end_lr=0.0, dropout_rate=0.1)
    assert train(**flags, name="trunk", training_steps=3) == 0
    shutil.copytree(runs / "trunk/checkpoints/3", runs / "branch/checkpoints/3")
    flags |= dict(training_steps=5, end_steps=5, decay_steps=2)
    assert train(**flags, name="branch") == train(**flags, name="whole") == 0
    assert_bitwise(checkpoint_of(runs / "branch", 5), checkpoint_of(runs / "whole", 5))
    assert metrics_of(runs / "branch") == metrics_of(runs / "whole")[3:]
