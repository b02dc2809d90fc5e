"""A stopped and resumed run ends bit-identical to one that was never stopped; damage and misfits are reported."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, SMALL_RUN, flags_of

import main
from inference import weights
from runtime import messages


def metrics_of(run):
    """Rows of metrics.jsonl without the keys that are times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("tokens_per_second", "data/wait")}
        for row in rows
    ]


def checkpoint_of(run, step):
    """Every leaf of a checkpoint, as it was saved, and its metadata."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        state = reader.restore(run / "checkpoints" / str(step) / "state")
    return {
        jax.tree_util.keystr(p): np.asarray(x)
        for p, x in jax.tree_util.tree_leaves_with_path(state)
    }


def assert_bitwise(a, b):
    assert a.keys() == b.keys() and len(a) > 20
    different = [key for key in a if a[key].tobytes() != b[key].tobytes()]
    assert not different, different


def test_resume_is_bitwise(train, tmp_path):
    flags = dict(optimizer="muon", mesh=(2, 2, 2), pp_interleave=2, dropout_rate=0.1)
    assert train(**flags, name="whole", training_steps=12) == 0
    assert train(**flags, name="parts", training_steps=7) == 0  # not a multiple of eval_every
    assert train(**flags, name="parts", training_steps=12) == 0
    whole, parts = tmp_path / "runs" / "whole", tmp_path / "runs" / "parts"
    assert_bitwise(checkpoint_of(whole, 12), checkpoint_of(parts, 12))
    rows = metrics_of(whole)
    assert rows == metrics_of(parts) and [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "loss/val_loss" in row] == [5, 10, 12]


def test_resume_on_another_mesh_sees_the_same_batches(train, tmp_path, monkeypatch):
    read, put_batch = [], main.put_batch

    def watched(sequences, first, shape, mesh):
        batch = put_batch(sequences, first, shape, mesh)
        if sequences.func.__self__.folder.endswith("train"):
            read.append(np.asarray(batch[0]).reshape(-1, shape[-1]))
        return batch

    monkeypatch.setattr(main, "put_batch", watched)
    assert train(name="whole", training_steps=8) == 0
    assert train(name="moved", training_steps=4) == 0
    # the batch sizes are not given again, and follow dp and accumulation_steps
    moved = dict(mesh=(2, 2, 2), accumulation_steps=2, microbatches=2, pp_interleave=2)
    moved |= dict(train_batch_size=None, val_batch_size=None)
    assert train(name="moved", training_steps=8, **moved) == 0
    assert np.array_equal(np.stack(read[:8]), np.stack(read[8:]))
    whole, moved = metrics_of(tmp_path / "runs" / "whole"), metrics_of(tmp_path / "runs" / "moved")
    for a, b in zip(whole, moved, strict=True):
        far = [k for k in a if k.startswith("loss") and abs(a[k] - b[k]) > 1e-4]
        assert a.keys() == b.keys() and not far, (a, b)
    stored = json.loads((tmp_path / "runs" / "moved" / "config.json").read_text())
    assert stored["train_batch_size"] == 2


def test_a_signal_leaves_a_checkpoint_to_resume_from(train, shards, xla_cache, tmp_path):
    """Another optimizer than above, and both kinds of layers."""
    number = signal.SIGINT
    other = dict(optimizer="adamw", layers_per_block=3, blocks=1)
    flags = SMALL_RUN | other
    flags |= dict(n_device_axis=(1, 1, 1), n_devices=1, name="run", data=shards)
    flags |= dict(train_batch_size=8, val_batch_size=8, output_dir=tmp_path / "runs")
    flags |= dict(compilation_cache=xla_cache, eval_every=5, eval_steps=2, training_steps=100_000)
    words = [sys.executable, str(ROOT / "main.py"), "--preset", "tiny", *flags_of(**flags)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    deadline = time.time() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 6):
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    said = itertools.takewhile(lambda line: "stopping after this step" not in line, process.stdout)
    assert len(list(said)) > 3
    process.send_signal(number)  # which changes nothing
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number and not err and "rerun the same command" in out
    assert "a third signal ends it at once, losing the steps from 1 to " in out
    step = max(int(p) for p in os.listdir(tmp_path / "runs" / "run" / "checkpoints"))
    assert [row["step"] for row in metrics_of(metrics.parent)] == list(range(1, step + 1))
    assert train(**other, training_steps=step + 3) == 0
    assert train(**other, training_steps=step + 3, name="whole") == 0
    runs = tmp_path / "runs"
    assert_bitwise(checkpoint_of(runs / "run", step + 3), checkpoint_of(runs / "whole", step + 3))
    assert metrics_of(runs / "run") == metrics_of(runs / "whole")


def damage(folder):
    """Change a bit of the largest file of a checkpoint."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)


def test_resume_passes_over_damaged_checkpoints_and_refuses_where_all_are(train, tmp_path, capsys):
    for step in (2, 4):
        assert train(training_steps=step) == 0
    run = tmp_path / "runs" / "run"
    sound = checkpoint_of(run, 4)
    damage(run / "checkpoints" / "4")
    assert train(training_steps=4) == 0
    said = capsys.readouterr().err
    assert "checkpoint 4 is damaged" in said and "resuming from checkpoint 2" in said
    assert "3 to 4" in said
    assert_bitwise(sound, checkpoint_of(run, 4))
    assert [p.name.split("-")[0] for p in (run / "checkpoints-damaged").iterdir()] == ["4"]
    for step in "24":
        damage(run / "checkpoints" / step)
    with pytest.raises(messages.UserError, match=r"every checkpoint in .* is damaged \(4, 2\)"):
        train(training_steps=4)


def test_resume_refuses_what_changes_the_model_the_data_or_the_batch(train, shards, tmp_path):
    assert train(training_steps=2) == 0
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    others = dict(n_shared=2, max_lr=1e-4, seed=3, T=16, train_batch_size=16)
    for flag, value in others.items():
        with pytest.raises(messages.UserError, match=f"--{flag} {value}: .* --name"):
            train(training_steps=4, **{flag: value})
    with pytest.raises(messages.UserError, match="--train_batch_size 8: .* 8 x 2"):
        train(training_steps=4, accumulation_steps=2)
    now = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    assert now == before, "a refusal writes nothing"
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    assert train(training_steps=3, data=other) == 0  # the same shards elsewhere
    np.save(other / "train" / "000003.npy", np.zeros(500, np.uint16))
    with pytest.raises(messages.UserError, match="saw other data"):
        train(training_steps=4, data=other)
    # what may differ
    assert train(training_steps=4, eval_every=2, eval_steps=1, remat="full", microbatches=2) == 0


def test_a_torn_config_is_one_sentence_and_torn_samples_are_no_error(train, tmp_path):
    assert train(training_steps=2) == 0
    run = tmp_path / "runs" / "run"
    good = (run / "config.json").read_text()
    stored = json.loads(good)
    edited = [
        {**stored, "n_device_axis": "1 1 1"},
        {**stored, "train_batch_size": None},
        {**stored, "T": "32"},
        {name: value for name, value in stored.items() if name != "accumulation_steps"},
    ]
    for torn in [good[:100], "[1, 2]", "null", "3", *map(json.dumps, edited)]:
        (run / "config.json").write_text(torn)
        with pytest.raises(messages.UserError, match=r"config\.json: .*; put back what it was\.$"):
            train(training_steps=4)
    (run / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(messages.UserError, match=r"config\.json: is not JSON"):
        weights.open_weights(str(run))
    (run / "config.json").write_text(good)
    (run / "samples.txt").write_bytes(b"=== step x\n\xff\n=== step 2\n--- 0\n=== step \n")
    assert train(training_steps=4) == 0
