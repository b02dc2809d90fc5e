"""What a run says of itself: the event file of TensorBoard, and whether it is well."""

import json

import numpy as np
import pytest


@pytest.fixture
def accumulator():
    return pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="bash setup_tpu.sh tensorboard",
    ).EventAccumulator


def scalars(accumulator):
    """[(step, key, value)] that TensorBoard's own reader has read, as it shows them."""
    accumulator.Reload()
    found = []
    for key in accumulator.Tags()["scalars"]:
        found += [(event.step, key, event.value) for event in accumulator.Scalars(key)]
    return sorted(found)


def logged(run):
    """The same of metrics.jsonl; TensorBoard keeps numbers in float32."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = []
    for row in rows:
        step = row.pop("step")
        numbers += [(step, key, float(np.float32(value))) for key, value in row.items()]
    return sorted(numbers)


def test_tensorboard_finds_what_metrics_jsonl_holds_and_no_step_twice(
    train, tmp_path, accumulator, monkeypatch
):
    run = tmp_path / "runs" / "run"
    flags = dict(tensorboard=True, save_steps=4, eval_every=4)
    assert train(**flags, training_steps=6) == 0
    watching = accumulator(str(run), size_guidance=dict(scalars=0))
    seen = scalars(watching)
    assert seen == logged(run) and max(seen)[0] == 6
    assert {key for _, key, _ in seen} > {"loss/train_loss", "loss/val_loss", "lr", "grad_norm"}
    times = {event.step: event.wall_time for event in watching.Scalars("lr")}

    # a run that was killed goes on from an earlier checkpoint, and the last event is torn
    (run / "checkpoints" / "6").rename(tmp_path / "6")
    (file,) = run.glob("events.out.tfevents.*")
    file.write_bytes(file.read_bytes()[:-9])
    assert train(**flags, training_steps=7) == 0
    assert scalars(accumulator(str(run))) == logged(run)
    assert scalars(watching) == logged(run), "a TensorBoard that looks on follows"
    now = {event.step: event.wall_time for event in watching.Scalars("lr")}
    assert list(now) == [1, 2, 3, 4, 5, 6, 7]
    assert [now[step] for step in (1, 4)] == [times[step] for step in (1, 4)], "times are kept"
    assert now[5] > times[6]
    assert train(**flags, training_steps=8) == 0
    assert scalars(watching) == scalars(accumulator(str(run))) == logged(run)
    sizes = [file.stat().st_size for file in sorted(run.glob("events.out.tfevents.*"))]
    assert len(sizes) == 2 and sizes[0] == 0 < sizes[1], "old ones are emptied, then removed"
