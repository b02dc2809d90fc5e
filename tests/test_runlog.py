"""What a run says of itself: the event file of TensorBoard, and whether it is well."""

import json
import re

import numpy as np
import pytest

import main
import utils
from presets import preset
from tools.planning import plan
from training import chips, runlog, settings


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


def row(val, **other):
    losses = {"loss/train_cross_entropy_loss": val - 0.1, "loss/val_cross_entropy_loss": val}
    return dict(step=40, grad_norm=1.0, lr=1e-3, bad_steps=0.0) | losses | other


class Halfway:
    """A `Pace` of so many tokens a second."""

    def __init__(self, speed):
        self.speed = speed

    def since_last(self):
        return {"tokens_per_second": self.speed, "data/wait": 0.0}

    def seconds_for(self, steps):
        return 2.0 * steps


def test_a_line_says_whether_a_run_is_well(capsys, monkeypatch):
    cfg = settings.validate(utils.replace(preset("tiny"), n_device_axis=(4, 1, 1)), 4)
    progress = runlog.Progress(cfg, 4.0)
    progress.print(row(5.5), Halfway(9000), None)
    first = capsys.readouterr().out
    assert "train 5.4000  val 5.5000  1.984 bits/byte  9,000 tokens/s  grad norm" in first
    assert "bad steps" not in first and "checkpoint" not in first and "plan" not in first
    progress.print(row(5.25, bad_steps=2.0), Halfway(9000), 20)
    second = capsys.readouterr().out
    assert "val 5.2500 (-0.2500)" in second
    assert second.endswith("  2 bad steps  checkpoint 20  12m00s left\n")

    monkeypatch.setattr(chips, "chip_of", lambda kind: chips.CHIPS["v4"])
    planned = plan.answer(cfg, plan.parse_machine("v4:2x2x1"))
    runlog.Progress(cfg, planned=main.planned_speed(cfg)).print(
        row(5.5), Halfway(planned.tokens_per_second / 4), None
    )
    line = capsys.readouterr().out
    share = int(re.search(r" tokens/s \((\d+)% of the plan\)", line)[1])
    assert abs(share - 25) < 3, "how the chips are wired is not known"
    assert f"MFU {planned.mfu / 4:.1%}" in line
