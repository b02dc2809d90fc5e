"""tools/compare.py: what its table says is what the runs' metrics.jsonl says."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SMALL, flags_of, small_config

import model
import utils
from runtime import files, messages
from tools import compare
from training import command_line

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


# --- Curves and variations --------------------------------------------------------------------------------------


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


def test_every_run_is_printed_and_drawn(tmp_path, capsys):
    a = write_run(tmp_path / "a", [5.0, 4.0, 4.5])
    b = write_run(tmp_path / "b", [5.5, math.nan, 5.25], speed=2000.0, n_experts=16)
    output = tmp_path / "picture.png"
    compare.main([a, b, "--output", str(output)])
    rows = rows_of(capsys.readouterr().out)
    for heading, *cells in (
        ("final loss", "4.5000", "5.2500"),
        ("against a", "-", "+0.7500"),
        ("tokens/s", "100", "2,000"),
    ):
        assert [row[heading] for row in rows.values()] == cells, heading
    total, _, embedding = model.count_params(small_config(sequences=8))
    assert rows["a"]["parameters"] == f"{(total + embedding) / 1000:.0f}k"
    assert output.read_bytes().startswith(b"\x89PNG")
    diverged = write_run(tmp_path / "diverged", [math.nan] * 2)
    # the same name twice: each run has its path
    compare.main([a, a + "/", diverged, "--output", str(tmp_path / "same.svg")])
    assert rows_of(capsys.readouterr().out).keys() == {a, a + "/", diverged}
    assert "<svg" in (tmp_path / "same.svg").read_text()


def test_what_is_no_run_is_named(tmp_path):
    run, empty = write_run(tmp_path / "run", [5.0]), tmp_path / "empty"
    empty.mkdir()
    begun = write_run(tmp_path / "begun", [])
    for runs, output, said in (
        ((), "x.png", "give run directories"),
        (("--preset", "tiny"), "x.png", "give run directories"),
        ((run, str(empty)), "x.png", f"{empty}: is no run directory"),
        ((run, str(tmp_path / "none")), "x.png", "none: is no run directory"),
        ((begun,), "x.png", "begun: its metrics.jsonl holds no evaluation"),
        ((run,), "x.gif", "--output .*x.gif: must be a file that ends in .png"),
        ((run,), "run/config.json/x.png", "cannot be written"),
    ):
        with pytest.raises(messages.UserError, match=said):
            compare.main([*runs, "--output", str(tmp_path / output)])
    assert not (tmp_path / "x.png").exists()


# --- variations ---------------------------------------------------------------------------------------------------


def losses_of(seed, max_lr, steps=40):
    """The made-up validation losses of a run, one for every 10 steps."""
    start = 6 + 0.1 * seed - 20 * max_lr * (1 + seed)
    return [start - 0.05 * step for step in range(10, steps + 1, 10)]


def pretend(command, log):
    """Replaces `compare.run_to_end`: the run is there at once, and its losses follow from --seed and --max_lr."""
    cfg, _ = command_line.parse(command[2:])
    path = Path(cfg.run.folder)
    with open(path.parent / "calls", "a") as calls:
        calls.write(path.name + "\n")
    if cfg.optimizer.weight_decay == 0.5:
        log.write("said before\nerror: this one cannot be trained.\n")
        return 2, False
    losses = losses_of(cfg.run.seed, cfg.optimizer.max_lr, cfg.run.training_steps)
    write_run(path, losses, **vars(cfg.optimizer))
    return 0, False


@pytest.fixture
def study(tmp_path, monkeypatch):
    """`study(*words)`: compare.py with made-up runs; `study.calls()`: those that it began."""
    monkeypatch.setattr(compare, "run_to_end", pretend)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    small = flags_of(**SMALL, train_batch_size=8, training_steps=40, eval_every=10)

    def study(*words):
        return compare.main(["--preset", "tiny", *small, "--output", str(tmp_path / "out"), *words])

    study.output = tmp_path / "out"
    study.calls = lambda: (study.output / "calls").read_text().split()
    return study


BASE = ("--variation", "base: --max_lr 1e-3", "--variation", "high: --max_lr 5e-3")


def shown(values, form, factor=1):
    """The mean of values for each seed with its standard error, as the table has it."""
    mean, error = np.mean(values) * factor, np.std(values, ddof=1) / len(values) ** 0.5 * factor
    return f"{mean:{form}} ± {error:{form.lstrip('+')}}"


def test_the_table_compares_seed_by_seed(study, capsys):
    study(*BASE, "--seeds", "3")
    assert study.calls() == [f"{name}-seed{seed}" for seed in range(3) for name in ("base", "high")]
    high = rows_of(capsys.readouterr().out)["high"]
    finals = {lr: [losses_of(seed, lr)[-1] for seed in range(3)] for lr in (1e-3, 5e-3)}
    differences = np.subtract(finals[5e-3], finals[1e-3])
    assert high["final loss"] == shown(finals[5e-3], ".4f")
    assert high["against base"] == shown(differences, "+.4f")
    # the loss falls by 0.05 a step, so each seed reaches its base's final loss that much earlier
    steps = np.maximum(10, 40 + differences / 0.05)
    assert high["M tokens to target"] == shown(steps * PER_STEP, ".3f", 1e-6)
    assert high["x base's"] == shown(steps / 40, ".3f")
    marks = [heading for heading in high if heading.startswith("loss at")]
    assert marks == ["loss at 3k", "loss at 5k", "loss at 8k"]
    assert high["loss at 5k"] == shown([losses_of(seed, 5e-3)[1] for seed in range(3)], ".4f")
    kept = json.loads((study.output / "results.json").read_text())
    assert kept["high"]["2"]["loss"] == losses_of(2, 5e-3)
    assert (study.output / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_marks_and_target_may_be_given_and_one_seed_has_no_error(study, capsys):
    marks = str(15 * PER_STEP), str(99 * PER_STEP)
    study(*BASE, "--seeds", "1", "--target", "4.9", "--marks", *marks)
    high = rows_of(capsys.readouterr().out)["high"]
    a, b = losses_of(0, 5e-3)[:2]
    assert (high["loss at 4k"], high["loss at 25k"]) == (f"{(a + b) / 2:.4f}", "-")
    to_target = (6 - 20 * 5e-3 - 4.9) / 0.05 * PER_STEP
    assert high["M tokens to target"] == f"{to_target / 1e6:.3f}"


def test_what_is_finished_is_not_trained_again_and_must_be_the_same(study):
    low = "--variation", "low: --max_lr 5e-4"
    study(*BASE, "--seeds", "1")
    study(*BASE, "--seeds", "2", *low)
    names = ["base-seed0", "high-seed0", "low-seed0", "base-seed1", "high-seed1", "low-seed1"]
    assert study.calls() == names
    metrics = study.output / "low-seed1" / "metrics.jsonl"  # as of a stopped run
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:25]))
    study(*BASE, "--seeds", "2", *low)
    assert study.calls() == [*names, "low-seed1"]
    for words, said in (
        (("--variation", "base: --max_lr 2e-3"), "max_lr was 0.001 and is now 0.002"),
        ((*BASE, "--training_steps", "50"), "training_steps was 40 and is now 50"),
        ((*BASE, "--eval_steps", "3"), "eval_steps was .* and is now 3"),
    ):
        with pytest.raises(messages.UserError, match=f"--variation base: .*{said}"):
            study(*words, "--seeds", "1")
    # what the losses do not depend on may change
    study("--variation", "base: --save_steps 7 --max_lr=0.001", "--seeds", "1")
    assert study.calls() == [*names, "low-seed1"]
    config = study.output / "high-seed0" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"data_fingerprint": "other"}))
    with pytest.raises(messages.UserError, match="high-seed0 saw other data than .*base-seed0"):
        study(*BASE, "--seeds", "1")


def test_a_failed_run_is_named_and_the_others_are_compared(study, capsys):
    with pytest.raises(SystemExit) as e:
        study(*BASE, "--variation", "bad: --weight_decay 0.5", "--seeds", "1")
    said = capsys.readouterr().out
    log = study.output / "bad-seed0.log"
    assert f"bad-seed0 failed with status 2: this one cannot be trained; see {log}" in said
    assert "| high" in said and "| bad" not in said and "1 of 3 runs failed" in said
    assert e.value.code == 1 and "error: this one cannot be trained." in log.read_text()
    # nothing was trained, so the name is free
    study(*BASE, "--variation", "bad: --weight_decay 0.4", "--seeds", "1")
    assert study.calls()[-2:] == ["bad-seed0", "bad-seed0"]


@pytest.mark.parametrize(
    "variations, said",
    [
        ([], "give run directories, .* or variations"),
        (["a b: --max_lr 1"], "'a b: --max_lr 1': must be a name"),
        (["a: --max_lr 1", "a"], "--variation a: two have this name"),
        (["a: --max_lt 1"], "--variation a: --max_lt: .*nearest is --max_lr"),
        (["a: --n_head 5"], "--variation a: --model_dimension 32"),
        (["a: --prompt 'x"], "--variation a: No closing quotation"),
        (["a: --name b"], "--name: each run here gets its own"),
        (["a: --seed 3"], "--seed: .*--seeds"),
        (["a", "b: --T 16"], "--variation b: --T is 16, but 32 for a"),
        (["a", "b: --val_batch_size 8"], "--variation b: --val_batch_size x dp is 8, but 16 for a"),
        (["a", "--output gs://bucket/x"], "--output gs://bucket/x: must be a local"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(study, variations, said):
    words = []
    for text in variations:
        words += text.split() if text.startswith("--output") else ["--variation", text]
    with pytest.raises(messages.UserError, match=said) as e:
        study(*words)
    assert str(e.value).endswith(".") and "\n" not in str(e.value)
    assert not study.output.exists()


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(print("a checkpoint") or 130))
print("begun", flush=True)
time.sleep(60)
"""
WITH_SLOW_MAIN = """
import sys
sys.path[:0] = [{root!r}]
from runtime import interrupts
from tools import compare
compare.MAIN = {main!r}
interrupts.run(lambda: compare.main(sys.argv[1:]))
"""


def test_ctrl_c_is_passed_on_and_ends_with_a_sentence(tmp_path):
    """One signal, to compare.py alone: the run in progress gets it from there, and is waited for."""
    (tmp_path / "main.py").write_text(SLOW)
    program = WITH_SLOW_MAIN.format(root=str(ROOT), main=str(tmp_path / "main.py"))
    words = ["--preset", "tiny", "--output", str(tmp_path), "--variation", "slow"]
    command = [sys.executable, "-c", program, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log, deadline = tmp_path / "slow-seed0.log", time.time() + 100
    while not (log.exists() and log.read_text()) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, wrong = process.communicate(timeout=50)
    assert process.returncode == 130 and not wrong
    assert "stopped in slow-seed0; rerun the same command to resume" in said
    assert log.read_text() == "begun\na checkpoint\n"


def test_runs_of_main_on_the_same_data(shards, xla_cache, tmp_path, monkeypatch):
    """Two equal variations see the same batches, so their losses are equal, and few files stay."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    steps = dict(training_steps=4, eval_every=2, eval_steps=2, train_batch_size=8, val_batch_size=8)
    device = dict(n_devices=1, n_device_axis=(1, 1, 1), blocks=1, layers_per_block=1)
    flags = {**SMALL, **steps, **device, "data": shards, "compilation_cache": xla_cache}
    words = ["--preset", "tiny", *flags_of(**flags), "--output", str(tmp_path / "out")]
    equal = ["--variation", "a", "--variation", "b: --max_bad_steps 5"]
    compare.main([*words, *equal, "--seeds", "1"])
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    a, b = kept["a"]["0"], kept["b"]["0"]
    assert a["loss"] == b["loss"] and a["tokens"] == [2 * PER_STEP, 4 * PER_STEP]
    checkpoints = (tmp_path / "out" / "a-seed0" / "checkpoints").iterdir()
    assert [path.name for path in checkpoints] == ["4"]
