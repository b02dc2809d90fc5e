"""The recipe, which designs runs from a width and a number of tokens, and the ladder of runs that it designed."""

import argparse
import copy
import math
from datetime import datetime

import pytest
from environment import ROOT

import model
import utils
from config import presets
from dev import ladder as training
from planning import ladder, recipe
from runtime.files import read_json, write_json

RECORD = ladder.record()


def member(width, vocab_size=1024, mesh=(1, 1, 1)):
    flags = recipe.model_flags(width, vocab_size)
    return utils.replace(utils.Config(), **flags, n_device_axis=mesh)


def test_members_of_the_family_grow_and_divide_evenly():
    """Each is larger than the one before, and any mesh of up to 4 stages and heads divides the large ones."""
    sizes = [sum(model.count_params(member(width))[1:]) for width in recipe.WIDTHS]
    assert sizes == sorted({*sizes})
    for width in recipe.WIDTHS:
        m = member(width).model
        assert m.model_dimension % m.n_head == 0 and m.blocks >= 1
        assert m.T % 128 == 0 and m.expert_dim % 16 == 0
        if width >= 256:
            assert m.key_dim == 64 and m.n_experts == 16
        if width >= 1024:
            assert m.n_head % 2 == 0 and m.blocks % 2 == 0


def test_the_recipe_gives_back_the_presets_it_came_from():
    """tiny in the shape of its model, and nearly in its training; moe1b in its batch, rate and decay."""
    tiny = utils.flatten(presets.preset("tiny"))
    shape = recipe.model_flags(128, tiny["vocab_size"])
    assert {flag: tiny[flag] for flag in shape} == shape
    batch = recipe.batch_tokens(819_200, tiny["T"])
    found = recipe.training_flags(819_200, batch, 1_900_000, tiny["T"], 128)
    same = "global_batch_size training_steps optimizer schedule max_lr end_lr warmup_steps"
    same += " embedding_lr muon_momentum adam_b2 balance_weight bias_update_rate eval_every"
    for flag in same.split():
        assert found[flag] == pytest.approx(tiny[flag]), flag
    assert found["weight_decay"] == pytest.approx(tiny["weight_decay"], rel=0.1)
    large = utils.replace(presets.preset("moe1b"), n_device_axis=(1, 1, 1))
    tokens = 75_000 * 262_144
    assert recipe.batch_tokens(tokens, 1024) == 262_144
    _, active, embedding = model.count_params(large)
    found = recipe.training_flags(tokens, 262_144, active + embedding, 1024, 768)
    for flag in ("max_lr", "weight_decay"):
        assert found[flag] == pytest.approx(getattr(large.optimizer, flag), rel=0.02), flag


PUBLISHED = [  # (width, tokens, tokens a step, rate in our units): nanochat d20, Moonlight, Kimi K2
    (1280, 11.2e9, 2**19, 0.02 / (0.2 * 1280**0.5)),
    (2048, 5.2e12, 2**24, 4.2e-4),
    (7168, 15.5e12, 67e6, 2e-4),
]


@pytest.mark.parametrize("width, tokens, batch, rate", PUBLISHED)
def test_rates_are_near_those_of_large_runs(width, tokens, batch, rate):
    """Though they are derived from runs of a ten-thousandth of the size."""
    assert 0.4 < recipe.max_rate(width, tokens, batch) / rate < 2.5


@pytest.mark.parametrize("tokens", [1e5, 1e6, 3e7, 1e9, 2e10, 1e12])
def test_a_training_is_sound_at_any_length(tokens):
    for T in (128, 4096):
        batch = recipe.batch_tokens(tokens, T)
        flags = recipe.training_flags(tokens, batch, tokens / 20, T, width=256)
        assert batch == flags["global_batch_size"] * T
        steps = flags["training_steps"]
        assert abs(steps * batch - tokens) <= batch
        assert flags["warmup_steps"] <= 0.1 * steps
        assert 1 <= flags["eval_every"] <= steps and flags["save_steps"] % flags["eval_every"] == 0
        assert 0.3 < flags["muon_momentum"] <= 0.95 and 0.8 < flags["adam_b2"] < 1
        decay = flags["max_lr"] * flags["weight_decay"] * steps
        assert decay == pytest.approx(recipe.total_decay(20), rel=0.02)
        utils.replace(utils.Config(), **flags)


@pytest.mark.parametrize("floor", [0, 1.2])
def test_a_curve_is_found_again_and_is_less_sure_far_away(floor):
    points = [(10.0**n, floor + 50 * 10 ** (-0.1 * n)) for n in range(11, 16)]
    curve = ladder.curve_through(points)
    assert curve.exponent == pytest.approx(0.1, rel=0.02)
    assert curve.floor == pytest.approx(floor, abs=0.02)
    for operations, loss in points:
        assert curve.loss(operations) == pytest.approx(loss, rel=1e-3)
        assert curve.operations(loss) == pytest.approx(operations, rel=0.02)
    near, far = (curve.error(operations) / curve.loss(operations) for operations in (1e13, 1e20))
    assert ladder.SEED_NOISE < near < far
    assert curve.operations(curve.floor) == math.inf


def test_the_runs_of_the_ladder_had_the_flags_that_the_recipe_designs():
    """A change of the recipe needs a new ladder."""
    for name, run in RECORD["runs"].items():
        asked = run["width"], run["rate"], run["seed"], run["tokens_per_parameter"]
        flags, parameters, operations = training.designed(*asked)
        assert name == training.name_of(*asked)
        assert run["flags"] == flags and run["parameters"] == parameters, name
        assert run["operations"] == operations


def test_the_ladder_is_a_curve_and_its_last_rung_was_predicted():
    rungs = ladder.rungs_of(RECORD)
    assert len(rungs) >= 5
    for operations, loss in rungs.values():
        predicted, error = ladder.predicted_loss(operations)
        assert abs(predicted - loss) < 3 * error
        assert math.isclose(ladder.operations_for(predicted), operations, rel_tol=1e-6)
    assert RECORD["predictions"]
    for name, prediction in RECORD["predictions"].items():
        run = RECORD["runs"][name]
        assert datetime.fromisoformat(prediction["written"]) < datetime.fromisoformat(run["ended"])
        assert run["width"] > max(prediction["rungs"])
        assert prediction["loss"] == pytest.approx(run["loss"], rel=0.02)


def test_what_has_ended_is_not_predicted(tmp_path, monkeypatch):
    """From the rungs below alone, and into the record at once."""
    last = max(ladder.rungs_of(RECORD))
    name = training.name_of(last)
    record = copy.deepcopy(RECORD)
    ended = record["runs"].pop(name)
    record["predictions"] = {}
    path = str(tmp_path / "ladder.json")
    write_json(path, record)
    monkeypatch.setattr(ladder, "RECORD", path)
    training.predict(argparse.Namespace(width=last))
    record = read_json(path)
    assert record["predictions"][name]["loss"] == RECORD["predictions"][name]["loss"]
    record["runs"][name] = ended
    write_json(path, record)
    with pytest.raises(SystemExit, match="has ended"):
        training.predict(argparse.Namespace(width=last))


def test_the_page_has_the_table_of_the_record():
    assert training.table(RECORD) in (ROOT / "docs/rates.md").read_text()


def test_predictions_are_for_their_own_corpus():
    corpus = RECORD["corpus"]
    assert ladder.applies_to(corpus)
    assert not ladder.applies_to(corpus | dict(vocab_size=8192))
    assert not ladder.applies_to(corpus | dict(source="input.txt"))
    assert not ladder.applies_to({})
