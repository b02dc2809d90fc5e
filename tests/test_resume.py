"""A stopped and resumed run ends bit-identical to one that was never stopped; damage and misfits are reported."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
from helpers import (
    ROOT,
    TINY,
    assert_bitwise,
    checkpoint_of,
    flags_of,
    metrics_of,
    refusal,
    wait_for,
)
from small_models import given, small_config

import train as training_program
from inference import weights
from training.device_mesh import make_mesh
from training.train_state import abstract_params


def damage(folder):
    """Change a bit of the largest file of a checkpoint."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)


def test_resume_is_bitwise_also_past_damage_and_on_another_mesh_sees_the_same_batches(
    train, tmp_path, monkeypatch, capsys
):
    read, put_batch = [], training_program.put_batch

    def watched(sequences, first, shape, mesh):
        batch = put_batch(sequences, first, shape, mesh)
        if sequences.func.__self__.folder.endswith("train"):
            read.append(np.asarray(batch[0]).reshape(-1, shape[-1]))
        return batch

    monkeypatch.setattr(training_program, "put_batch", watched)
    whole, parts, moved = (tmp_path / "runs" / name for name in ("whole", "parts", "moved"))
    same = dict(optimizer="muon", dropout_rate=0.1)
    flags = dict(same, mesh=(2, 2, 2), save_steps=2, pp_interleave=2)
    flags |= given("--accumulation_steps 2 --microbatches 2 --train_batch_size 2")
    assert train(**flags, name="whole", training_steps=8) == 0
    assert train(**flags, name="parts", training_steps=4) == 0  # not a multiple of eval_every
    shutil.copytree(parts, moved)
    damage(parts / "checkpoints" / "4")
    assert train(**flags, name="parts", training_steps=8) == 0
    said = capsys.readouterr().err
    assert "checkpoint 4 is damaged" in said and "from checkpoint 2; the steps from 3 to 4" in said
    assert [p.name.split("-")[0] for p in (parts / "checkpoints-damaged").iterdir()] == ["4"]
    assert_bitwise(checkpoint_of(whole, 8), checkpoint_of(parts, 8))
    rows = metrics_of(whole)
    assert rows == metrics_of(parts) and [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if "loss/val_loss" in row] == [5, 8]
    # the batch sizes are not given again, and follow dp and accumulation_steps
    flags_there = same | dict(train_batch_size=None, val_batch_size=None, accumulation_steps=1)
    assert train(**flags_there, name="moved", training_steps=8) == 0
    assert json.loads((moved / "config.json").read_text())["train_batch_size"] == 8
    first, before, again, after = np.split(np.stack(read), [8, 12, 18])
    assert np.array_equal(first, [*before[:2], *again])
    assert np.array_equal(first, [*before, *after])
    for a, b in zip(rows, metrics_of(moved), strict=True):
        far = [k for k in a if k.startswith("loss") and abs(a[k] - b[k]) > 1e-4]
        assert a.keys() <= b.keys() and not far, (a, b)  # it has evaluated where it first ended

    for checkpoint in (parts / "checkpoints").iterdir():
        damage(checkpoint)
    said = "every checkpoint in ", " damaged (8, 6, 4)"
    refusal(lambda: train(**flags, name="parts", training_steps=9), *said)


def test_a_signal_leaves_a_checkpoint_to_resume_from(train, run_flags, tmp_path):
    """Another optimizer than above, and both kinds of layers."""
    number, runs = signal.SIGINT, tmp_path / "runs"
    other = dict(optimizer="adamw", layers_per_block=3, blocks=1, eval_every=100)
    flags = flags_of(**run_flags(**other, training_steps=100_000))
    words = [sys.executable, ROOT / "main.py", "--preset", "tiny", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, **pipes)
    metrics = runs / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 6)
    process.send_signal(number)
    said = itertools.takewhile(lambda line: "stopping after this step" not in line, process.stdout)
    assert len(list(said)) > 3
    process.send_signal(number)  # which changes nothing
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number and not err and "rerun the same command" in out
    assert "a third signal ends it at once, losing the steps from 1 to " in out
    step = max(map(int, os.listdir(runs / "run" / "checkpoints")))
    assert [row["step"] for row in metrics_of(runs / "run")] == list(range(1, step + 1))
    for name in ("run", "whole"):
        assert train(**other, training_steps=step + 3, name=name) == 0
    assert_bitwise(*(checkpoint_of(runs / name, step + 3) for name in ("run", "whole")))
    assert metrics_of(runs / "run") == metrics_of(runs / "whole")


def test_runs_of_other_versions_are_refused(train, tmp_path):
    """Where the program of today would make another model of their flags."""
    assert train(**TINY, training_steps=2) == 0
    run = tmp_path / "runs" / "run"
    stored = json.loads((run / "config.json").read_text())
    older = {flag: value for flag, value in stored.items() if flag != "revision"}
    other = stored | dict(attention_gate=True, expert_gate=0)  # one that is off changes nothing
    meant, unknown = "latent_conv 3 meant another model", "has no flag attention_gate; use "
    for config, said in ((older | dict(latent_conv=3), meant), (other, unknown)):
        (run / "config.json").write_text(json.dumps(config))
        refusal(lambda: train(**TINY, training_steps=4), f"{run}/config.json: ", said)
        refusal(lambda: weights.open_weights(str(run)), f"{run}/config.json: ", said)
    assert os.listdir(run / "checkpoints") == ["2"]


def test_resume_refuses_other_models_data_and_batches_and_a_torn_config(
    train, shards, tmp_path, capsys
):
    assert train(**TINY, training_steps=2) == 0
    run, other = tmp_path / "runs" / "run", tmp_path / "other"
    before = (run / "metrics.jsonl").read_bytes()
    config = (run / "config.json").read_text()
    stored = json.loads(config)
    torn = [dict(n_device_axis="1 1 1"), dict(train_batch_size=None), dict(T="32")]
    torn = [json.dumps(stored | other) for other in torn]
    torn.append(json.dumps({n: value for n, value in stored.items() if n != "accumulation_steps"}))
    for content in [config[:100], "[1, 2]", "null", "\xff\xfe{", *torn]:
        (run / "config.json").write_text(content, "latin-1")
        refusal(lambda: train(**TINY, training_steps=4), "config.json: ", "; restore it.")
    # a model of other flags is no damaged one, as its checkpoint beside no or another config.json tells
    (run / "config.json").unlink()
    for flag, value in dict(blocks=3, max_lr=1.0, train_batch_size=3).items():
        refusal(lambda: train(**TINY | {flag: value}, training_steps=3), flag)
    assert os.listdir(run / "checkpoints") == ["2"] and not (run / "config.json").exists()
    capsys.readouterr()
    assert train(**TINY, training_steps=2) == 0
    assert "nothing to do" in capsys.readouterr().out
    (run / "config.json").write_text(json.dumps(stored | {"blocks": 3}))
    cfg = small_config(**TINY | {"blocks": 3})
    params = abstract_params(cfg, make_mesh(cfg))
    said = "checkpoint 2 is of a model with other flags (--blocks was 1 and is now 3"
    refusal(lambda: weights.open_weights(str(run))[1](params), said)
    (run / "config.json").write_text(config)

    others = dict(ffn_dim=80, max_lr=1e-4, seed=3, T=8, train_batch_size=16, optimizer="adamw")
    for flag, value in others.items():
        flags = TINY | {flag: value, "training_steps": 4}
        refusal(lambda: train(**flags), f"--{flag} {value}: ", " --name")
    flags = TINY | dict(training_steps=4, accumulation_steps=2)
    refusal(lambda: train(**flags), "--train_batch_size 8: ", " 8 x 2")
    shutil.copytree(shards, other)
    np.save(other / "train" / "000003.npy", np.zeros(500, np.uint16))
    refusal(lambda: train(**TINY, training_steps=4, data=other), "saw other data")
    assert (run / "metrics.jsonl").read_bytes() == before, "a refusal writes nothing"
    # what may differ, with the same shards elsewhere
    (other / "train" / "000003.npy").unlink()
    (run / "samples.txt").write_bytes(b"=== step x\n\xff\n=== step 2\n--- 0\n=== step \n")
    flags = TINY | dict(data=other, eval_every=2, eval_steps=1, remat="full", microbatches=2)
    assert train(**flags, training_steps=4) == 0
