"""tools/compare.py: what its table says is what the runs' metrics.jsonl says."""

import json
import math

import numpy as np
import pytest
from helpers import refusal
from small_models import SMALL, small_config

import model
import utils
from config.program import read_flags
from runtime import files
from tools import compare

PER_STEP = 8 * SMALL["T"]  # tokens of a step of the made-up runs


def write_run(folder, losses, every=10, speed=100.0, **flags):
    """A made-up run with an evaluation of these losses every `every` steps."""
    cfg = small_config(sequences=8, **flags)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(utils.flatten(cfg)))
    rows = []
    for step in range(1, every * len(losses) + 1):
        rows.append({"step": step, "loss/train_loss": 9 - step / 100, "tokens_per_second": speed})
        if step % every == 0:
            loss = losses[step // every - 1]
            rows[-1] |= {"loss/val_loss": loss + 1, "loss/val_cross_entropy_loss": loss}
    lines = [files.to_json(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "loss']))
    return str(folder)


def test_a_curve_is_what_the_metrics_say(tmp_path):
    folder = write_run(tmp_path / "run", [5.0, 4.0, 4.1])
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("100.0", "1.0", 1))  # a slow step
    curve = compare.read_curve(folder)
    assert curve.loss.tolist() == [5.0, 4.0, 4.1]  # without the balance of experts
    assert curve.tokens.tolist() == [10 * PER_STEP, 20 * PER_STEP, 30 * PER_STEP]
    assert curve.speed == 100
    assert curve.tokens_to(4.2) == pytest.approx(18 * PER_STEP)
    assert curve.tokens_to(4.05) == pytest.approx(19.5 * PER_STEP)  # when it was first reached
    assert curve.tokens_to(6.0) == 10 * PER_STEP  # before the first evaluation nothing is known
    assert math.isnan(curve.tokens_to(3.9))


def rows_of(said):
    """{name: {heading: cell}} of the table that was printed."""
    lines = [line for line in said.splitlines() if line.startswith("|")]
    headings, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(headings, row)) for row in rows}


def compared(*words):
    compare.main(read_flags(compare.Options, [str(word) for word in words], "compare.py"))


def test_every_run_is_printed_and_drawn(tmp_path, capsys):
    a = write_run(tmp_path / "a", [5.0, 4.0, 4.5])
    b = write_run(tmp_path / "b", [5.5, math.nan, 5.25], speed=2000.0, n_experts=16)
    compared(a, b, "--output", tmp_path / "picture.png")
    rows = rows_of(capsys.readouterr().out)
    for heading, *cells in (
        ("final loss", "4.5000", "5.2500"),
        ("against a", "+0.0000", "+0.7500"),
        ("tokens/s", "100", "2,000"),
    ):
        assert [row[heading] for row in rows.values()] == cells, heading
    total, _, embedding = model.count_params(small_config(sequences=8))
    assert rows["a"]["parameters"] == f"{(total + embedding) / 1000:.0f}k"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    diverged = write_run(tmp_path / "diverged", [math.nan] * 2)
    # the same name twice: each run has its path
    compared(a, a + "/", diverged, "--output", tmp_path / "same.svg")
    assert rows_of(capsys.readouterr().out).keys() == {a, a + "/", diverged}
    assert "<svg" in (tmp_path / "same.svg").read_text()


def test_what_is_no_run_is_named(tmp_path):
    run = write_run(tmp_path / "run", [5.0])
    begun = write_run(tmp_path / "begun", [])
    for runs, output, said in (
        ((run, tmp_path / "none"), "x.png", "none: is no run directory"),
        ((begun,), "x.png", "begun: its metrics.jsonl holds no evaluation"),
        ((run,), "x.gif", f"--output {tmp_path}/x.gif: must be a file that ends in .png"),
        ((run,), "run/config.json/x.png", "cannot be written"),
    ):
        refusal(lambda: compared(*runs, "--output", tmp_path / output), said)
    assert not (tmp_path / "x.png").exists()


def losses_of(seed, high):
    """The made-up validation losses of a run, one for every 10 steps: they fall by 0.05 a step."""
    start = 6 + 0.1 * seed - high * 0.1 * (1 + seed)
    return [start - 0.05 * step for step in range(10, 41, 10)]


@pytest.fixture
def runs(tmp_path):
    made = []
    for name in ("base", "high"):
        for seed in range(3):
            flags = dict(seed=seed, max_lr=1e-3 * (1 + (name == "high")), training_steps=40)
            losses = losses_of(seed, name == "high")
            made.append(write_run(tmp_path / f"{name}-seed{seed}", losses, **flags))
    return made


def shown(values, form, factor=1):
    """The mean of values for each seed with its standard error, as the table has it."""
    mean, error = np.mean(values) * factor, np.std(values, ddof=1) / len(values) ** 0.5 * factor
    return f"{mean:{form}} ± {error:{form.lstrip('+')}}"


def test_the_table_compares_seed_by_seed(runs, tmp_path, capsys):
    compared(*runs, "--output", tmp_path / "x.png")
    rows = rows_of(capsys.readouterr().out)
    assert [*rows] == ["base", "high"]
    high = rows["high"]
    base_ends, high_ends = ([losses_of(seed, n)[-1] for seed in range(3)] for n in (0, 1))
    differences = np.subtract(high_ends, base_ends)
    assert high["final loss"] == shown(high_ends, ".4f")
    assert high["against base"] == shown(differences, "+.4f")
    # each seed reaches its base's final loss that much earlier
    steps = 40 + differences / 0.05
    assert high["M tokens to target"] == shown(steps * PER_STEP, ".3f", 1e-6)
    assert high["x base's"] == shown(steps / 40, ".3f")
    marks = [heading for heading in high if heading.startswith("loss at")]
    assert marks == ["loss at 3k", "loss at 5k", "loss at 8k"]
    assert high["loss at 5k"] == shown([losses_of(seed, 1)[1] for seed in range(3)], ".4f")


def test_marks_and_target_may_be_given_and_one_seed_has_no_error(runs, tmp_path, capsys):
    marks = 15 * PER_STEP, 99 * PER_STEP
    words = ["--target", 4.9, "--marks", *marks, "--output", tmp_path / "x.png"]
    compared(runs[0], runs[3], *words)
    high = rows_of(capsys.readouterr().out)["high"]
    a, b = losses_of(0, 1)[:2]
    assert (high["loss at 4k"], high["loss at 25k"]) == (f"{(a + b) / 2:.4f}", "-")
    to_target = (5.9 - 4.9) / 0.05 * PER_STEP
    assert high["M tokens to target"] == f"{to_target / 1e6:.3f}"


def test_what_cannot_be_averaged_or_compared_is_said(runs, tmp_path, capsys):
    flags = dict(seed=7, max_lr=1e-3, training_steps=40)
    other = write_run(tmp_path / "base-seed7", [5.0] * 4, **flags | dict(weight_decay=0.5))
    said = "--weight_decay 0.5: ", "base-seed7 has it, and"
    refusal(lambda: compared(*runs, other, "--output", tmp_path / "x.png"), *said)
    behind = write_run(tmp_path / "base-seed8", [5.0] * 3, **flags | dict(seed=8))
    longer = write_run(tmp_path / "longer", [5.0] * 4, **flags | dict(T=64))
    compared(*runs, behind, longer, "--output", tmp_path / "x.png")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "base-seed8" in said[0] and "one has trained for longer" in said[0]
    assert "longer was evaluated on other text than" in said[1]
