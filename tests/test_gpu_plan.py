"""Planning for GPUs: what XLA's compiler makes of the programs for machines with GPUs, on a machine that has none."""

import pytest

from tools.planning import gpus, plan

gpu_compiler = pytest.mark.skipif(
    not gpus.has_compiler(), reason="the packages of pyproject.toml's extra plan-gpu"
)


@gpu_compiler
@pytest.mark.parametrize("kind", gpus.SPECS)
def test_devices_that_exist_for_the_compiler_alone(kind):
    machine = plan.parse_machine(f"gpu:2x4x{kind}")
    devices = plan.gpu_devices(machine)
    assert len(devices) == machine.n == 8
    assert {d.process_index for d in devices[:4]} == {0}
    assert {d.process_index for d in devices[4:]} == {1}
    assert {(d.platform, d.device_kind) for d in devices} == {("gpu", machine.chip.kind)}
