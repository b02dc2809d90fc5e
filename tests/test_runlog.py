"""What a run reports of itself: its lines, rows and event file of TensorBoard; and rows that are damaged."""

import io
import json
import math
import os
import random
import re
import shutil
import struct
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import fsspec
import numpy as np
import pytest
from helpers import TINY, refusal
from small_models import small_config

import utils
from config import settle
from config.presets import preset
from logs import meter, rows, runlog
from planning import machines, plan, plans_of_runs
from runtime import chips, files, outbox


@pytest.fixture
def accumulator():
    module = "tensorboard.backend.event_processing.event_accumulator"
    return pytest.importorskip(module, reason="bash setup_tpu.sh tensorboard").EventAccumulator


def scalars(accumulator):
    """[(step, key, value)] that TensorBoard's own reader has read, as it shows them."""
    accumulator.Reload()
    found = []
    for key in accumulator.Tags()["scalars"]:
        found += [(event.step, key, event.value) for event in accumulator.Scalars(key)]
    return sorted(found)


def logged(run):
    """The same of metrics.jsonl; TensorBoard keeps numbers in float32."""
    found = []
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        step = row.pop("step")
        found += [(step, key, float(np.float32(value))) for key, value in row.items()]
    return sorted(found)


def test_tensorboard_finds_what_metrics_jsonl_holds_and_no_step_twice(train, tmp_path, accumulator):
    run = tmp_path / "runs" / "run"
    flags = TINY | dict(save_steps=4, eval_every=4)
    assert train(**flags, training_steps=2) == 0
    flags["tensorboard"] = True  # asked for later: it has the rows before too
    assert train(**flags, training_steps=6) == 0
    watching = accumulator(str(run), size_guidance=dict(scalars=0))
    seen = scalars(watching)
    assert seen == logged(run) and max(seen)[0] == 6
    assert {key for _, key, _ in seen} > {"loss/train_loss", "loss/val_loss", "lr", "grad_norm"}
    # a run that was killed resumes from an earlier checkpoint, and the last event is torn
    (run / "checkpoints" / "6").rename(tmp_path / "6")
    (file,) = run.glob("events.out.tfevents.*")
    file.write_bytes(file.read_bytes()[:-9])
    assert train(**flags, training_steps=7) == 0
    assert scalars(accumulator(str(run))) == logged(run)
    assert scalars(watching) == logged(run), "a TensorBoard that looks on follows"
    assert train(**flags, training_steps=8) == 0
    assert scalars(watching) == scalars(accumulator(str(run))) == logged(run)


def test_tensorboard_reads_from_a_bucket_what_was_uploaded(
    bucket, tmp_path, accumulator, monkeypatch
):
    """In files of which each is uploaded few times."""
    from logs import events

    monkeypatch.setattr(events, "LARGE", 200)
    address, fs, _ = bucket
    log, loss = log_in(address, tensorboard=True), "loss/train_loss"
    for step in (1, 2, 3, 4):
        log.metrics({"step": step, loss: 1 / step})
        log.flush(now=True)
    log.outbox.settle(60)
    log.rewind(1)
    log.metrics({"step": 2, loss: 2.0})
    log.close()
    files = fs.glob(f"{address}/run/events.out.tfevents.*")
    assert len(files) > 1
    for path in files:
        fs.get_file(path, str(tmp_path / path.split("/")[-1]))
    assert scalars(accumulator(str(tmp_path))) == [(1, loss, 1.0), (2, loss, 2.0)]


def row(val, **other):
    losses = {"loss/train_cross_entropy_loss": val - 0.1, "loss/val_cross_entropy_loss": val}
    return dict(step=40, grad_norm=1.0, lr=1e-3, bad_steps=0.0) | losses | other


def pace_of(speed):
    """A `Pace` of `speed` tokens and half a step a second."""
    measured = {"tokens_per_second": speed, "data/wait": 0.0}
    return SimpleNamespace(since_last=lambda: measured, seconds_for=lambda steps: 2.0 * steps)


def test_a_line_says_whether_a_run_is_well(tmp_path, capsys, monkeypatch):
    flags = dict(n_device_axis=(4, 1, 1), output_dir=str(tmp_path))
    cfg = settle.validate(utils.replace(preset("tiny"), **flags), 4)
    progress = runlog.Progress(cfg, 4.0)
    progress.print(row(5.5), pace_of(9000), None)
    first = capsys.readouterr().out
    assert "train 5.4000  val 5.5000  1.984 bits/byte  9,000 tokens/s  grad norm" in first
    assert "bad steps" not in first and "checkpoint" not in first and "plan" not in first
    progress.print(row(5.25, bad_steps=2.0), pace_of(9000), 20)
    second = capsys.readouterr().out
    assert "val 5.2500 (-0.2500)" in second
    assert second.endswith("  2 bad steps  checkpoint 20  12m00s left\n")

    monkeypatch.setattr(chips, "chip_of", lambda kind: chips.CHIPS["v4"])
    planned = plan.make_plan(cfg, machines.parse_machine("v4:2x2x1"))
    progress = runlog.Progress(cfg, plan=plans_of_runs.plan_of(cfg))
    progress.print(row(5.5), pace_of(planned.tokens_per_second / 4), None)
    line = capsys.readouterr().out
    # how the chips are wired is not known
    assert re.search(r" tokens/s \(2[3-7]% of the plan\)", line)
    assert f"MFU {planned.mfu / 4:.1%}" in line


def test_goodput_counts_every_moment_once_also_over_restarts_and_rollbacks(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter.time, "time", lambda: clock.now)

    def step(goodput, number):
        goodput.enter("steps")
        clock.now += 10
        goodput.waited(2)
        return {"step": number} | goodput.row()

    def spent(row):
        return {part: seconds for part, seconds in meter.spent_in(row).items() if seconds}

    goodput = meter.Goodput(90.0)
    goodput.enter("compiling")
    clock.now += 5
    before = [step(goodput, number) for number in (1, 2, 3)]
    assert spent(before[-1]) == dict(starting=10, compiling=5, steps=24, waiting=6)
    assert before[-1]["goodput"] == pytest.approx(24 / 45, abs=1e-6) and before[-1]["resumed"] == 0

    clock.now += 7  # killed, started again 3 s ago, resumed from step 1
    goodput = meter.Goodput(clock.now - 3)
    goodput.enter("restoring")
    goodput.add_spent(before, 1)
    row = step(goodput, 2)
    assert spent(row) == dict(starting=13, compiling=5, steps=16, waiting=4, lost=24)
    assert sum(spent(row).values()) == clock.now - 90 and row["resumed"] == 1
    assert goodput.words().startswith("26% of 1m02s in steps, 39% lost to restarts, 21% starting")

    goodput.restart(clock.now)  # rolls back to the same step
    goodput.add_spent([before[0], row], 1)
    assert meter.spent_in(goodput.row())["lost"] == 37  # from the row of step 1 until now
    assert goodput.resumed == 2 and sum(goodput.seconds.values()) == clock.now - 90
    other = meter.Goodput(clock.now)
    other.add_spent([{"step": 1, "lr": 0.1}], 1)  # of an older run: it counts from here
    assert sum(other.seconds.values()) == 0


def test_time_between_a_clean_end_and_the_next_start_is_rest_and_not_lost(train, tmp_path):
    flags, run, gap = TINY | dict(save_steps=2), tmp_path / "runs/run", 1000.0

    def rows_then(steps):
        """Rows after a run of these steps, as if what is there now had been written `gap` seconds earlier."""
        for path in run.glob("*.json*"):
            if path.name != "config.json":
                rows = [json.loads(line) for line in path.read_text().splitlines()]
                older = [json.dumps(row | {"time": row["time"] - gap}) + "\n" for row in rows]
                path.write_text("".join(older))
        assert train(**flags, training_steps=steps) == 0
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def spent(row):
        return meter.spent_in(row)["resting"] // gap, meter.spent_in(row)["lost"] // gap

    assert spent(rows_then(2)[-1]) == (0, 0)
    rows = rows_then(4)
    assert [spent(row) for row in rows] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    share = sum(meter.spent_in(rows[-1]).values()) - rows[-1]["seconds/resting"]
    assert rows[-1]["goodput"] == pytest.approx(rows[-1]["seconds/steps"] / share, abs=1e-3)
    shutil.rmtree(run / "checkpoints/4")  # steps 3 and 4 are lost, the rest is not
    assert spent(rows_then(6)[-1]) == (2, 0)
    for content in (b"\xff{", b"[1]", to_ended(run, step=5), to_ended(run, time=0.0)):
        end = (run / "ended.json").read_bytes()
        (run / "ended.json").write_bytes(content)
        assert runlog.end_of(str(run), rows_in(run)) is None, content
        (run / "ended.json").write_bytes(end)
    (run / "ended.json").unlink()  # it was killed
    assert spent(rows_then(8)[-1]) == (2, 1)


def rows_in(run):
    return rows.read_rows(str(run))


def to_ended(run, **changes):
    return json.dumps(json.loads((run / "ended.json").read_bytes()) | changes).encode()


def test_the_pace_counts_training_alone(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(meter.time, "time", lambda: clock.now)
    pace = meter.Pace(tokens=100)
    pace.resume(0.5)
    for clock.now, waited in ((2.0, 0.5), (4.0, 1.5), (6.0, 1.5)):
        last = pace.ended(waited)
    assert last == pace.since_last() == {"tokens_per_second": 50, "data/wait": 1 / 6}
    clock.now = 90.0
    pace.resume(7.0)  # after an evaluation
    clock.now = 90.5
    assert pace.ended(7.0)["tokens_per_second"] == pytest.approx(400 / 6.5)
    assert pace.since_last() == {"tokens_per_second": 200, "data/wait": 0}
    assert pace.seconds_for(4) == 6.5


def log_in(folder, step=0, **flags):
    """The log of a run that resumes at `step`."""
    cfg = utils.replace(small_config(), output_dir=str(folder), name="run", **flags)
    log = runlog.RunLog(cfg)
    log.open(step)
    return log


def steps_in(log):
    """Steps of the rows that a reader finds, once all is written."""
    log.outbox.settle(60)
    for _, content in rows.contents(log.folder):
        for line in content.splitlines():
            json.loads(line, parse_constant=pytest.fail)
    return [row["step"] for row in rows.read_rows(log.folder)]


@pytest.mark.parametrize("place", ["{}", "memory://{}"])
def test_flushed_rows_are_written(tmp_path, place):
    log = log_in(place.format(tmp_path))
    for step in (1, 2):
        log.metrics({"step": step, "loss/train_loss": 1.0, "loss/val_cross_entropy_loss": 1.0})
    log.text(2, ["a", "b"])
    log.metrics({"step": 3, "loss/train_loss": math.nan})
    log.flush(now=True)
    assert steps_in(log) == [1, 2, 3]
    assert b'"loss/train_loss": null' in b"".join(part for _, part in rows.contents(log.folder))
    log.text(3, ["c"])
    log.rewind(2)
    assert steps_in(log) == [1, 2]
    log.close()
    samples = files.read_file(log.path("samples.txt")).decode()
    assert samples == "=== step 2\n--- 0\na\n--- 1\nb\n"


def test_a_disk_that_is_full_for_a_while_costs_no_row_and_few_words(tmp_path, monkeypatch, capsys):
    """And no row is written twice meanwhile: a try follows ever later, and what it tore is cut off."""
    clock, tries = SimpleNamespace(now=0.0), []

    class Full(io.FileIO):
        def write(self, content):
            tries.append(len(content))
            if 100 < clock.now < 400:
                super().write(content[:9])
                raise OSError("no room")
            return super().write(content)

    monkeypatch.setattr(rows.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(rows, "open", lambda path, mode: Full(path, "ab"), raising=False)
    log = log_in(tmp_path)
    for step in range(1, 501):
        clock.now += 1
        log.metrics({"step": step, "loss/train_loss": 1.0})
    log.close()
    assert steps_in(log) == list(range(1, 501))
    assert len(tries) < 220, "each step does not try"
    said = capsys.readouterr().err
    assert said.count("the run's log could not be written: no room") == said.count("\n") < 8


def test_rows_in_a_bucket_are_uploaded_few_times_and_read_back_after_rollbacks(tmp_path):
    """Against the plain way: a list, of which a rollback takes away."""
    sent, address = [], f"memory://{tmp_path}"
    plain = []
    rng = random.Random(1)
    clock = SimpleNamespace(now=0.0)
    few = mock.patch.object(rows, "WHOLE", 10_000)
    with mock.patch.object(rows.time, "monotonic", lambda: clock.now), few:
        log = log_in(address)
        put = log.outbox.put
        log.outbox.put = lambda path, content: (sent.append(content or b""), put(path, content))
        step = 0
        while step < 3000:
            step += 1
            clock.now += 1
            row = {"step": step, "loss/train_loss": rng.random(), "text": 1.0}
            plain.append(row)
            log.metrics(row)
            if rng.random() < 0.02:
                log.flush()
            if rng.random() < 0.002:
                step = rng.randint(max(0, step - 100), step)
                plain = [row for row in plain if row["step"] <= step]
                log.rewind(step)
            if rng.random() < 0.005:
                log.rows.flush(now=True)
                log.outbox.settle(60)
                assert rows.read_rows(log.folder) == plain
        log.close()
    assert rows.read_rows(log.folder) == plain
    whole = len("".join(files.to_json(row) + "\n" for row in plain))
    assert len(rows.parts_in(log.folder)) < 100 and sum(map(len, sent)) < 10 * whole
    assert sum(len(content) for *_, content in log.rows.parts) < 2 * 10_000
    copy = tmp_path / "run"  # which continues on a local disk
    fsspec.filesystem("memory").get(f"{tmp_path}/run", str(copy), recursive=True)
    again = log_in(tmp_path, 1000)
    assert rows.read_rows(str(copy)) == plain[:1000] and not rows.parts_in(str(copy))
    again.metrics({"step": 1001, "loss/train_loss": 1.0})
    again.close()
    assert steps_in(again) == list(range(1, 1002))


def test_what_waits_for_a_bucket_is_bounded_and_written_when_it_answers(monkeypatch, capsys):
    """The newest content of each file, in order; the run waits for nothing."""
    answers, written = threading.Event(), []

    def deliver(path, content):
        if not answers.is_set():
            raise OSError("no answer")
        written.append((path, content))

    monkeypatch.setattr(outbox, "deliver", deliver)
    monkeypatch.setattr(outbox, "PAUSE", 0.01)
    monkeypatch.setattr(outbox, "MOST", 100)
    box = outbox.Outbox()
    box.put("gs://b/samples.txt", b"old")
    for n in range(20):
        box.put(f"gs://b/{n}", b"0123456789")
    box.drop("gs://b/15")
    box.put("gs://b/samples.txt", b"new")
    assert box.settle(0.1)[0] == "gs://b/10"
    answers.set()
    assert box.settle(60) == []
    kept = [(f"gs://b/{n}", b"0123456789") for n in range(10, 20) if n != 15]
    assert written == [*kept, ("gs://b/samples.txt", b"new")]
    said = capsys.readouterr().err
    assert said.count("could not be written (no answer); trying again") == 1
    assert "is given up: too much is waiting" in said


def test_without_a_login_or_a_network_wandb_logs_offline(tmp_path, monkeypatch, capsys):
    import wandb

    fake = mock.Mock(errors=wandb.errors)
    fake.init.side_effect = [wandb.errors.UsageError("no key\nat all"), None]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = log_in(tmp_path, wandb=True)
    for step in (1, 2):
        log.metrics({"step": step, "loss/train_loss": 1.0})
    log.close()
    asked, again = (call.kwargs for call in fake.init.call_args_list)
    assert again["id"] == asked["id"] and again["mode"] == "offline"
    assert [call.args[0]["step"] for call in fake.log.call_args_list] == [1, 2]
    fake.finish.assert_called_once_with()
    said = capsys.readouterr().out
    assert "warning: --wandb: no key; the run is logged offline, and wandb sync" in said


def test_what_does_not_keep_up_with_the_run_holds_a_bounded_number_of_rows(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(runlog, "MOST_BEHIND", 5)
    log, goes_on, got = log_in(tmp_path), threading.Event(), []
    log.wandb = SimpleNamespace(log=lambda row: (goes_on.wait(), got.append(row)), finish=int)
    for step in range(1, 100):
        log.metrics({"step": step, "loss/train_loss": 1.0})
    goes_on.set()
    log.close()
    assert [row["step"] for row in got] == [1, 2, 3, 4, 5] and steps_in(log) == [*range(1, 100)]
    assert capsys.readouterr().err.count("does not keep up") == 1


def wandb_records(path):
    """What an offline run's file holds: a log as LevelDB writes it, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    content, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        room = 2**15 - at % 2**15  # of the block
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def test_wandb_has_the_last_value_of_each_step_after_rollbacks_and_resumes(tmp_path, capfd):
    import wandb

    loss, last, axes = "loss/train_loss", {}, set()

    def log_rows(log, steps, value):
        for step in steps:
            log.metrics({"step": step, loss: value + step})

    def close(log):
        log.close()
        wandb.teardown()  # until its service has ended, the file may lack the end
        (path,) = (tmp_path / "run/wandb").glob("latest-run/*.wandb")
        for record in wandb_records(path):
            axes.add((record.metric.glob_name, record.metric.step_metric))
            items = record.history.item
            row = {(*i.nested_key, i.key)[0]: json.loads(i.value_json) for i in items}
            if row:
                last[row["step"]] = row[loss]
        shutil.rmtree(tmp_path / "run/wandb")  # whose names of two runs in one second are the same

    log = log_in(tmp_path, wandb=True)
    log_rows(log, (1, 2, 3, 4), 0.0)
    log.rewind(1)
    log_rows(log, (2, 3), 10.0)
    close(log)
    log = log_in(tmp_path, 2, wandb=True)  # it was killed
    log_rows(log, (3, 4), 20.0)
    close(log)
    assert last == {1: 1.0, 2: 12.0, 3: 23.0, 4: 24.0} and ("*", "step") in axes
    assert last == {row["step"]: row[loss] for row in rows.read_rows(log.folder)}
    out, err = capfd.readouterr()
    assert "less than" not in out + err, "no warning of a step that is logged again"


STEP = 8  # of the checkpoint
ROWS = [{"step": n, "loss/train_loss": n / 2, "lr": None} for n in range(1, 12)]
ROWS = [json.dumps(row).encode() for row in ROWS]
WHOLE = b"\n".join(ROWS) + b"\n"


def instead(n, line):
    """WHOLE with another line of step n."""
    return b"\n".join([*ROWS[: n - 1], line, *ROWS[n:]]) + b"\n"


def without(*steps):
    return [n for n in range(1, STEP + 1) if n not in steps]


def changed(**new):
    return json.dumps(json.loads(ROWS[4]) | new).encode()


DAMAGED = {  # {kind: (content, steps whose rows can be read)}; None: nothing is missing
    "garbage": (instead(5, bytes(range(256)) * 3), without(5)),
    "zeros before a row": (instead(5, bytes(99) + ROWS[4]), without(5)),
    "half a line before another": (WHOLE.replace(ROWS[4] + b"\n", ROWS[4][:20]), without(5, 6)),
    "all rows twice": (WHOLE + WHOLE, None),
    "nested": (instead(5, b"[" * 200_000), without(5)),
    "a number of 400 digits": (instead(5, changed(lr=10**400)), without(5)),
    "NaN": (instead(5, changed(lr=float("nan"))), None),
    "a text": (instead(5, changed(lr="0.1")), without(5)),
    "a number": (instead(5, b"5"), without(5)),
    "no loss": (instead(5, ROWS[4].replace(b"loss", b"moss")), without(5)),
    "a negative step": (instead(5, changed(step=-5)), without(5)),
    "no whole step": (instead(5, changed(step=5.5)), without(5)),
    "swapped": (b"\n".join([*ROWS[4:8], *ROWS[:4], *ROWS[8:]]), None),
    "torn after the checkpoint": (WHOLE[:-9], None),
    "zeros after the checkpoint": (WHOLE + bytes(4096), None),
}


def opened(tmp_path, step=STEP, **flags):
    """Steps of the rows that metrics.jsonl keeps for a run that resumes at `step`."""
    log = log_in(tmp_path, step, **flags)
    log.close()
    return steps_in(log)


@pytest.mark.parametrize("content, left", DAMAGED.values(), ids=DAMAGED)
def test_of_damaged_metrics_the_rest_stays_and_all_is_kept_beside_it(
    content, left, tmp_path, capsys
):
    metrics = tmp_path / "run/metrics.jsonl"
    kept, aside = (metrics.with_name(f"metrics.jsonl.damaged-{n}") for n in (1, 2))
    files.write_file(str(metrics), content)
    kept.write_text("of another day")
    assert opened(tmp_path) == (left or without())
    said = capsys.readouterr().out
    assert said.count("\n") == aside.exists() == (left is not None)
    if left:
        assert aside.read_bytes() == content
        assert f"warning: {metrics} is damaged: it keeps the {len(left)} rows up to step 8" in said
        assert said.endswith(f"saved in {aside}\n")
    assert opened(tmp_path) == (left or without())
    assert "is damaged" not in capsys.readouterr().out, "that is said once"
    assert kept.read_text() == "of another day"
    assert len(os.listdir(tmp_path / "run")) == 2 + bool(left)


def test_a_torn_last_row_is_no_damage(tmp_path, capsys):
    metrics = tmp_path / "run/metrics.jsonl"
    assert opened(tmp_path) == [] and capsys.readouterr().out == "", "somebody removed it"
    metrics.write_bytes(b"\n".join(ROWS[:5]) + b"\n" + ROWS[5][:9])
    assert opened(tmp_path) == [1, 2, 3, 4, 5] and capsys.readouterr().out == ""
    metrics.unlink()
    metrics.mkdir()
    refusal(lambda: opened(tmp_path), "metrics.jsonl: cannot be read (Is a directory")
