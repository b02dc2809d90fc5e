"""The table of chips: what a run, a plan and the choice of --model_dtype take from it."""

import importlib.util
import os
from unittest import mock

import pytest
from helpers import ROOT

import utils
from config import command_line, presets, settle
from config.flags import Flags, Found
from planning import gpus, machines
from runtime import chips, platforms

MACHINES = {
    name: f"gpu:1x{name}" if chip.gpu else f"{name}:{'2x2x1' if chip.dims == 3 else '2x2'}"
    for name, chip in chips.CHIPS.items()
}


def test_a_device_is_one_chip():
    kinds = [kind for chip in chips.KNOWN for kind in chip.jax_names]
    assert len(kinds) == len(set(kinds))
    for chip in chips.KNOWN:
        assert all(chips.chip_of(kind) is chip for kind in chip.jax_names)
        assert chip.peak >= chip.speed > 0 and chip.memory > 7e9 and chip.bandwidth and chip.link
    assert {name for name, chip in chips.CHIPS.items() if chip.gpu} == gpus.SPECS.keys()
    others = "cpu", "NVIDIA L40S", "NVIDIA H200 MIG 1g.18gb", "TPU v9"  # begin as known ones
    assert not any(map(chips.chip_of, others))


@pytest.mark.parametrize(
    "chip, given, dtype, said",
    [
        ("T4", [], "float32", "the model is float32 too"),
        ("V100", [], "float32", "the model is float32 too"),
        ("T4", ["model_dtype"], "bfloat16", "saves memory here, no time"),
        ("L4", [], "bfloat16", ""),
        ("unknown", [], "bfloat16", ""),
        ("cpu", [], "float32", "this CPU, with jax"),
        ("cpu with AMX", [], "bfloat16", ""),
    ],
)
def test_the_dtype_of_a_chip(capsys, monkeypatch, chip, given, dtype, said):
    """Which a run keeps on another chip."""
    monkeypatch.setattr(platforms, "cpu_has_bfloat16", lambda: chip == "cpu with AMX")
    flags = Flags(presets.preset("gpt2-124m"), frozenset(given))
    kind = chips.CHIPS[chip].jax_name if chip in chips.CHIPS else chip.split()[0]
    cfg = settle.settle_model(flags, Found(1, device_kind=kind)).cfg
    out = capsys.readouterr().out
    assert cfg.model.model_dtype == dtype and said in out and bool(said) == bool(out)
    for other in ("T4", "L4", "T4"):
        kind = chips.CHIPS[other].jax_name
        found = Found(1, device_kind=kind, stored=utils.flatten(cfg))
        cfg = settle.settle_model(flags, found).cfg
        assert cfg.model.model_dtype == dtype


BATCH = dict(preset="gpt2-124m", train_batch_size=8, val_batch_size=8, microbatches=8)


@pytest.mark.parametrize("name, chip", chips.CHIPS.items(), ids=chips.CHIPS)
def test_formulas_plan_for_every_chip(planned, name, chip):
    a = planned("--by_formulas", plan=MACHINES[name], **BATCH)
    assert a["devices"] == (1 if chip.gpu else 4 * chip.cores)
    assert a["memory"]["limit"] == chip.memory and 0 < a["mfu"] < 1
    assert a["seconds"]["step"] > a["flops"]["program"] / chip.speed


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason='pip install "jax[tpu]"')
@pytest.mark.parametrize("name", [name for name, chip in chips.CHIPS.items() if not chip.gpu])
def test_the_tpu_compiler_knows_the_chip(name):
    with mock.patch.dict(os.environ):
        platforms.use_no_device()
        machine = machines.parse_machine(MACHINES[name])
        devices = machines.devices_of(machine)
    assert len(devices) == machine.n
    assert {device.device_kind for device in devices} <= set(machine.chip.jax_names)


BELIEVED = 0.33  # most of a chip's peak that its hours count on


def table_of_machines():
    text = (ROOT / "docs/models.md").read_text().split("## The largest for a machine")[1]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("row", table_of_machines(), ids=lambda row: row[0])
def test_a_preset_trains_within_a_week(planned, row):
    """As the table of docs/models.md has it."""
    name, preset, flags, memory, utilization, hours = row
    machine = machines.parse_machine(name)
    words = ["--preset", preset, "--plan", name, *flags.split()]
    a = planned(*words, "--by_formulas")
    total, limit = a["memory"]["total"], a["memory"]["limit"]
    assert memory == f"{total / 2**30:.1f} of {limit / 2**30:.1f} GiB"
    assert total < limit * (0.75 if machine.chip.gpu else 1)

    reached = (
        a["flops"]["model"] / a["seconds"]["step"] / (machine.chip.float32 or machine.chip.peak)
    )
    parameters = a["parameters"]["total"] + a["parameters"]["embedding"]
    seconds = 20 * parameters / a["tokens_per_second"] * max(1, reached / BELIEVED)
    assert (utilization, hours) == (f"{reached:.0%}", f"{seconds / 3600:.0f}")
    assert seconds < 7 * 24 * 3600
    trained = command_line.parse(words).cfg.run.training_steps * a["tokens"]
    assert 20 < trained / parameters < 20.2
