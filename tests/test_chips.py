"""The table of chips: what a run, a plan and the choice of --model_dtype take from it."""

import importlib.util
import os
from unittest import mock

import pytest
from helpers import ROOT, refusal

import dev.machines
import utils
from config import presets, settle
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
        assert (
            chip.peak >= chip.speed_in(chip.dtype) > 0
            and chip.memory > 7e9
            and chip.bandwidth
            and chip.link
        )
    assert {name for name, chip in chips.CHIPS.items() if chip.gpu} == gpus.SPECS.keys()
    others = "cpu", "NVIDIA L40S", "NVIDIA H200 MIG 1g.18gb", "TPU v9"  # begin as known ones
    assert not any(map(chips.chip_of, others))


@pytest.mark.parametrize(
    "chip, given, dtype, said",
    [
        ("T4", [], "float16", "the model is float16, with a loss scale"),
        ("V100", [], "float16", "the model is float16, with a loss scale"),
        ("P100", [], "float32", "the model is float32 too"),
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


def test_float16_is_refused_to_new_runs_on_tpus_alone(capsys):
    flags = Flags(utils.replace(presets.preset("gpt2-124m"), model_dtype="float16"), frozenset())
    stored = utils.flatten(flags.cfg)

    def dtype_on(name, **found):
        kind = chips.CHIPS[name].jax_name if name in chips.CHIPS else name
        return settle.settle_model(flags, Found(1, device_kind=kind, **found)).cfg.model.model_dtype

    said = "--model_dtype float16: v5e does not multiply in it; give bfloat16"
    refusal(lambda: dtype_on("v5e"), said)
    others = dict(A100="in bfloat16", P100="in float32", cpu="in float32", T4="", unknown="")
    for name, better in others.items():
        assert dtype_on(name) == "float16"
        out = capsys.readouterr().out
        assert bool(out) == bool(better)
        if name != "cpu":  # which may have bfloat16
            assert (
                f"is no faster in float16 than {better}, which needs no loss scale" in out
                or not out
            )
    assert dtype_on("v5e", stored=stored) == dtype_on("A100", stored=stored) == "float16"
    assert not capsys.readouterr().out


BATCH = dict(preset="gpt2-124m", train_batch_size=8, val_batch_size=8, microbatches=8)


@pytest.mark.parametrize("name, chip", chips.CHIPS.items(), ids=chips.CHIPS)
def test_formulas_plan_for_every_chip(planned, name, chip):
    a = planned("--by_formulas", plan=MACHINES[name], **BATCH)
    assert a["devices"] == (1 if chip.gpu else 4 * chip.cores)
    assert a["memory"]["limit"] == chip.memory and 0 < a["mfu"] < 1
    assert a["seconds"]["step"] > a["flops"]["program"] / chip.speed_in(chip.dtype)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason='pip install "jax[tpu]"')
@pytest.mark.parametrize("name", [name for name, chip in chips.CHIPS.items() if not chip.gpu])
def test_the_tpu_compiler_knows_the_chip(name):
    with mock.patch.dict(os.environ):
        platforms.use_no_device()
        machine = machines.parse_machine(MACHINES[name])
        devices = machines.devices_of(machine)
    assert len(devices) == machine.n
    assert {device.device_kind for device in devices} <= set(machine.chip.jax_names)


@pytest.mark.parametrize("chip", chips.KNOWN, ids=lambda chip: chip.name)
def test_devices_are_named_as_the_machine_that_they_are(chip):
    for n_chips in (1, 4, 8):
        n = n_chips * chip.cores
        for kind in chip.jax_names:
            name = machines.name_of_devices(kind, n)
            if not chip.gpu and not chips.dims_of(chip, n_chips):
                assert name == ""  # v4 and later ones with three dims have no slice of one chip
                continue
            machine = machines.parse_machine(name)
            assert (machine.name, machine.chip, machine.n) == (name, chip, n)
    assert machines.name_of_devices("cpu", 8) == "cpu"
    assert machines.name_of_devices("NVIDIA L40S", 1) == ""


@pytest.fixture(scope="module")
def table():
    """The rows of docs/models.md that say what machines can train."""
    text = (ROOT / "docs/models.md").read_text().split("## What a machine can train")[1]
    return [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]


def test_the_table_has_every_machine(table):
    rows = [tuple(line.split(" | ")[:2]) for line in table]
    assert rows == [(f"| `{machine}`", str(hours)) for machine, hours in dev.machines.MACHINES]


@pytest.mark.parametrize("machine, hours", [("1xT4", 9), ("v5e-8", 24)])
def test_the_table_has_what_a_design_gives(table, machine, hours):
    """`python -m dev.machines` prints all rows."""
    assert dev.machines.row(machine, hours) in table
