"""Planning for GPUs: what XLA's compiler makes of the programs for machines with GPUs, on a machine that has none."""

import jax
import pytest
from test_plan import check_program

import presets
import utils
from planning import gpus, machines, plan
from training import command_line, settings

pytestmark = pytest.mark.skipif(
    not gpus.has_compiler(), reason="the packages of pyproject.toml's extra plan-gpu"
)


@pytest.mark.parametrize("kind", ["T4", "B200"])
def test_devices_that_exist_for_the_compiler_alone(kind):
    machine = machines.parse_machine(f"gpu:2x4x{kind}")
    devices = machines.devices_of(machine)
    assert len(devices) == machine.n == 8
    assert {d.process_index for d in devices[:4]} == {0}
    assert {d.process_index for d in devices[4:]} == {1}
    assert {(d.platform, d.device_kind) for d in devices} == {("gpu", machine.chip.kind)}


def fail(cfg, machine):
    """What some programs make of the compiler."""
    raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile")


TINY = ["--preset", "tiny", "--plan", "gpu:4xH200"]


def test_formulas_answer_where_the_compiler_fails(monkeypatch, capsys):
    monkeypatch.setattr(machines, "compile_for", fail)
    plan.main(command_line.parse(TINY))
    said = capsys.readouterr().out
    assert "INTERNAL: Mosaic failed" in said and "memory" in said


def test_what_does_not_fit_is_said(monkeypatch, capsys):
    used = machines.parse_machine("gpu:4xH200").chip.memory
    ops = ["%x = f32[4] parameter(0)", "ROOT %c = f32[4] copy(%x)"]
    text = "\n  ".join(["ENTRY %main (x: f32[4]) -> f32[4] {", *ops])
    compiled = machines.Compiled(text, arguments=2**30, temporaries=used)
    monkeypatch.setattr(machines, "ask_compiler", lambda cfg, machine: compiled)
    plan.main(command_line.parse(TINY))
    said = capsys.readouterr().out
    assert "does not fit: it needs 1.00 GiB more than a chip's 141.00 GiB" in said


CASES = [("tiny", "gpu:2x8xH200", (4, 2, 2)), ("qwen3-tiny", "gpu:8xH200", (2, 2, 2))]


@pytest.mark.parametrize("preset, name, mesh", CASES, ids=str)
def test_a_train_step_costs_what_the_formulas_say(preset, name, mesh):
    machine = machines.parse_machine(name)
    cfg = utils.replace(presets.preset(preset), n_device_axis=mesh)
    cfg = settings.validate(cfg, machine.n)
    compiled = machines.compile_step(cfg, machines.devices_of(machine))
    assert compiled.arguments + compiled.temporaries < machine.chip.memory
    check_program(compiled.text, cfg, machine)
