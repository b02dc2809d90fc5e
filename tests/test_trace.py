"""--profile and tools/trace.py: what a trace says is what the devices did, by the names of the code."""

import os
import re
import shutil
from types import SimpleNamespace

import jax
import pytest
from families import SMALL_GPT2
from helpers import metrics_of, refusal
from small_models import SMALL_RUN, small_config

import main
import train as training_program
import utils
from config import presets
from config.flags import Flags
from logs import profiling
from planning import costs, machines
from tools import trace


@pytest.fixture(scope="module")
def runs(shards, xla_cache, tmp_path_factory):
    """Directory of two runs of eight steps: `plain`, and `traced` in two parts, with --profile 2:4 and 5:8."""
    folder = tmp_path_factory.mktemp("runs")
    flags = dict(train_batch_size=4, val_batch_size=4, n_devices=8, n_device_axis=(2, 2, 2))
    flags |= dict(output_dir=str(folder), data=str(shards), compilation_cache=str(xla_cache))
    flags |= dict(eval_every=3, eval_steps=1, blocks=2)

    def train(**more):
        given = SMALL_RUN | flags | more
        cfg = utils.replace(presets.preset("tiny"), **given)
        assert training_program.start(Flags(cfg, frozenset(given)), main.workbench()) == 0

    train(name="plain", training_steps=8)
    train(name="traced", training_steps=6, profile="2:4")
    train(name="traced", training_steps=8, profile="5:8")
    return folder


@pytest.fixture(scope="module")
def measured(runs):
    """`trace.Trace` of steps 2 to 4, with an evaluation after step 3, and its `trace.Shares`."""
    first = trace.open_trace(str(runs / "traced"), "steps-2-4")
    return first, trace.Shares(first)


def test_a_profile_changes_no_number_and_each_part_of_a_run_has_its_own(runs, tmp_path):
    assert metrics_of(runs / "traced")[:8] == metrics_of(runs / "plain")
    assert sorted(os.listdir(runs / "traced" / profiling.FOLDER)) == ["steps-2-4", "steps-7-8"]
    newest = trace.open_trace(str(runs / "traced"))
    assert newest.facts["steps"] == [7, 8] and trace.Shares(newest).steps == 2
    # as two processes write it
    newest.folder = str(shutil.copytree(newest.folder, tmp_path / "both"))
    shutil.copy(tmp_path / "both/process-0.xplane.pb", tmp_path / "both/process-1.xplane.pb")
    assert trace.Shares(newest).devices == 16


def test_a_trace_that_cannot_be_made_ends_no_run(train, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no profiler here\nand more")

    monkeypatch.setattr("jax.profiler.start_trace", fail)
    tiny = {**SMALL_GPT2, "blocks": 1, "T": 16}
    assert train(**tiny, training_steps=3, profile="2:3") == 0
    assert capsys.readouterr().err.count("--profile: no trace is written: no profiler here\n") == 1


def test_parts_add_up_to_the_step(measured):
    lengths = []
    first, found = measured
    for events in trace.events_of_devices(first):
        lengths += [end - begin for begin, end in trace.steps_in(events, first, 3)]
    assert found.devices == 8 and found.steps == 3 and len(lengths) == 24
    step = sum(lengths) / len(lengths) / 1e9
    assert sum(found.parts.values()) == pytest.approx(step, rel=1e-6)
    assert sum(found.operations.values()) == pytest.approx(step - found.parts[trace.IDLE], rel=1e-6)
    computes = {"attention", "experts", "vocabulary", "optimizer"}
    axes = {f"links of {axes}" for axes in ("dp", "pp", "tp", "dp+tp")}
    assert computes <= found.parts.keys() and axes <= set(found.links)
    paths = " ".join(operation.path for operation in found.operations)
    assert all(way in paths for way in ("jvp(", "transpose(", "rematted_computation"))


def test_the_plan_stands_beside_it(measured):
    """The program's own work on any device, seconds where the device's speeds are known."""
    first, found = measured
    rows = trace.compare_with_plan(first, found)
    assert rows["step"] == (found.step, None, None) and 0 < found.products < found.step
    estimate = costs.estimate(first.cfg, machines.machine_of(jax.devices()))
    assert rows["matrix products"][2] == pytest.approx(estimate.flops, rel=0.1)
    assert all(rows[f"links of {axis}"][2] > 0 for axis in ("dp", "pp", "tp"))
    facts = first.facts | dict(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    of_program = trace.compare_with_plan(
        trace.Trace(first.folder, facts, first.cfg, first.text), found
    )
    assert of_program["step"][1] > 0 and of_program["links of dp"][1] > 0


STEP = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (p: f32[8,8]) -> f32[16,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %dot.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(train_step)/jvp(attention)/dot_general"}
  %all-gather-start.1 = (f32[8,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%dot.1), \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, metadata={op_name="jit(train_step)/experts/all_gather"}
  %add.2 = f32[8,8]{1,0} add(%dot.1, %dot.1), metadata={op_name="jit(train_step)/transpose(jvp(experts))/add"}
  %all-gather-done.1 = f32[16,8]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %add.3 = f32[16,8]{1,0} add(%all-gather-done.1, %all-gather-done.1), metadata={op_name="optimizer/add"}
}
"""
# What a device did in a step: (operation, begin, end) in ns.
COMPUTED = [("dot.1", 0, 10), ("add.2", 11, 31), ("add.3", 45, 50)]
WAITED = [("all-gather-start.1", 10, 11), ("all-gather-done.1", 31, 41)]
TRAVELED = [("all-gather-start.1", 10, 41)]


def traced(plane, lines, told):
    """What ProfileData has of a plane with {line: [(operation, begin, end)]}, times in ns. told: an operation -> the
    name of its events and what else they tell, {name: text}."""

    def event(op, begin, end):
        name, stats = told(op)
        return SimpleNamespace(name=name, start_ns=begin, end_ns=end, stats=stats.items())

    lines = [
        SimpleNamespace(name=name, events=[event(*one) for one in found])
        for name, found in lines.items()
    ]
    return SimpleNamespace(planes=[SimpleNamespace(name=plane, lines=lines)])


def at_times(found, begins):
    return [(name, at + a, at + b) for at in begins for name, a, b in found]


def on_tpu(begins):
    """Steps at these times as a TPU tells them, and the begin of another one."""
    lines = {
        "Steps": at_times([("dot.1", 0, 50)], begins),
        "XLA Ops": at_times([*COMPUTED, *WAITED], begins) + at_times(COMPUTED[:1], [999]),
        "Async XLA Ops": at_times([*TRAVELED, ("copy-start.5", 0, 45)], begins),
    }
    return traced("/device:TPU:0", lines, lambda op: (f"%{op} = f32[8]{{0}} add(..)", {}))


def on_gpu(begins):
    """The same as a GPU tells it: by kernels, on two streams. Its host tells of some operations too."""
    lines = {
        "Stream #1(Compute)": at_times(COMPUTED, begins) + at_times(COMPUTED[:1], [999]),
        "Stream #2(Compute)": at_times(TRAVELED, begins),
        "XLA Ops": at_times(COMPUTED, begins),  # derived from the streams, not a second time
    }
    program = dict(hlo_module="jit_train_step")

    def told(op):
        return "kernel", program | dict(hlo_op=op)

    trace = traced("/device:GPU:0", lines, told)
    host = traced("/host:CPU", {"Host Threads/487": at_times(COMPUTED, begins)}, told)
    trace.planes += host.planes
    return trace


def written_on(platform):
    """A `trace.Trace` of three steps of the program `STEP`."""
    cfg = small_config((2, 2, 2), sequences=8)
    return trace.Trace("a folder", dict(steps=[5, 7], slices=1, platform=platform), cfg, STEP)


@pytest.mark.parametrize("layout, platform", [(on_tpu, "tpu"), (on_gpu, "gpu")])
def test_what_is_hidden_and_exposed_on_an_accelerator(layout, platform, monkeypatch):
    written = written_on(platform)
    events = trace.events_by_device(layout([100, 200, 500]), written)
    monkeypatch.setattr(trace, "events_of_devices", lambda *_: list(events.values()))
    found = trace.Shares(written)
    ns = {part: round(3e9 * t, 3) for part, t in found.parts.items()}
    # dp while nothing is computed
    assert ns == {"attention": 30, "experts": 60, "links of dp": 33, "optimizer": 15, "idle": 12}
    assert found.steps == 3 and found.hidden["links of dp"] == pytest.approx(20e-9)
    assert found.products == pytest.approx(10e-9)
    paths = {operation.path for operation in found.operations}
    assert {"jvp(attention)/dot_general", "transpose(jvp(experts))/add"} <= paths


def test_a_step_that_is_cut_off_or_missing_is_left_out(monkeypatch):
    written = written_on("tpu")
    [device] = trace.events_by_device(on_tpu([100]), written).values()
    assert trace.steps_in(device, written, 1) == [(100, 150)]
    monkeypatch.setattr(trace, "events_of_devices", lambda *_: [device, []])
    refusal(lambda: trace.Shares(written), "holds no whole step")


def test_the_program_prints_shares_operations_and_the_plan(runs, measured, capsys):
    trace.main(trace.Options(str(runs / "traced"), "steps-2-4"))
    said = capsys.readouterr().out
    _, found = measured
    shares, operations = said.split("| operation")
    parts = re.findall(r"^\| (.+?) +\| +([\d.]+) \| +([\d.]+)% \|$", shares, re.MULTILINE)
    (*rows, (name, step, whole)) = parts[: len(found.parts) + 1]
    assert name == "sum" and whole == "100.0" and float(step) == pytest.approx(found.step, abs=1e-4)
    assert sum(float(share) for _, _, share in rows) == pytest.approx(100, abs=1)
    assert len(re.findall(r"% \|$", operations, re.MULTILINE)) == 10 and "| links of dp" in said


def test_a_mistake_gets_a_sentence(runs, tmp_path):
    for run, part, *name in (
        (tmp_path, "holds no whole trace; train with --profile FIRST:LAST"),
        (runs / "traced", "has steps-2-4, steps-7-8", "steps-1-2"),
    ):
        refusal(lambda: trace.main(trace.Options(str(run), *name)), part)
