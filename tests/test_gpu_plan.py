"""Planning for GPUs: what XLA's compiler makes of the programs for machines with GPUs, on a machine that has none."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from conftest import flags_of
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_plan import add_written, check_bytes

import collectives
import model
import presets
import utils
from planning import costs, gpus, hlo, machines, plan
from training import command_line, decoding, settings, steps

pytestmark = pytest.mark.skipif(
    not gpus.has_compiler(), reason="the packages of pyproject.toml's extra plan-gpu"
)


@pytest.mark.parametrize("kind", ["T4", "A100-40GB", "H100", "B200"])
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


def plan_of_tiny(**flags):
    """Make the plan of tiny on four GPUs."""
    plan.main(command_line.parse(flags_of(preset="tiny", plan="gpu:4xH200", **flags)))


def test_formulas_answer_where_the_compiler_fails(monkeypatch, capsys):
    monkeypatch.setattr(machines, "compile_for", fail)
    plan_of_tiny()
    said = capsys.readouterr().out
    assert "INTERNAL: Mosaic failed" in said and "memory" in said


def test_what_does_not_fit_is_said(monkeypatch, capsys):
    used = machines.parse_machine("gpu:4xH200").chip.memory
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %c = f32[4] copy(%x)\n}"
    compiled = machines.Compiled(text, arguments=2**30, temporaries=used)
    monkeypatch.setattr(machines, "ask_compiler", lambda cfg, machine: compiled)
    plan_of_tiny()
    said = capsys.readouterr().out
    assert "does not fit: it needs 1.00 GiB more than a chip's 141.00 GiB" in said


# --- The programs of the small presets ----------------------------------------------------------------------------

MACHINES = {"gpu:8xH200": (2, 2, 2), "gpu:2x8xH200": (4, 2, 2)}
PROMPT = jax.ShapeDtypeStruct((16,), jnp.int32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


class Case:
    """A preset on a machine."""

    def __init__(self, preset, machine):
        self.machine = machines.parse_machine(machine)
        cfg = utils.replace(presets.preset(preset), n_device_axis=MACHINES[machine])
        self.cfg = settings.validate(cfg, self.machine.n)
        self.mesh = steps.make_mesh(self.cfg, machines.devices_of(self.machine))

    def read(self, compiled):
        """(`hlo.Timeline`, {(axes, kind): bytes}) of a compiled program, which must fit."""
        assert compiled.arguments + compiled.temporaries < self.machine.chip.memory
        cost = costs.read_program(compiled.text, self.cfg, self.machine)
        return cost, {key: n_bytes for key, (n_bytes, *_) in cost.collectives.items()}

    def compile(self, function, *args):
        """What `read` gives of a function of global arrays, without the operations of kernels."""
        compiled = machines.compile_for_mesh(jax.jit(function).lower(*args), self.mesh)
        _, sent = self.read(compiled)
        return hlo.Timeline(hlo.analyze(compiled.text, dict(self.mesh.shape))), sent


@pytest.fixture(
    params=[("tiny", "gpu:2x8xH200"), ("gpt2-tiny", "gpu:8xH200"), ("qwen3-tiny", "gpu:8xH200")],
    ids=str,
    scope="module",
)
def case(request):
    return Case(*request.param)


def test_a_train_step_costs_what_the_formulas_say(case):
    compiled = machines.compile_step(case.cfg, list(case.mesh.devices.flat))
    cost, sent = case.read(compiled)
    estimate = costs.Estimate(case.cfg, case.machine)
    assert cost.flops == pytest.approx(estimate.flops, rel=0.01)
    check_bytes(sent, {key: n_bytes for key, (n_bytes, *_) in estimate.sent.items()})


def test_evaluation_costs_what_is_written(case):
    cfg = case.cfg
    M, B = cfg.data.microbatches, cfg.data.val_batch_size * cfg.run.n_device_axis[0]
    batch = NamedSharding(case.mesh, P(*collectives.BATCH_SPEC[1:]))
    tokens = jax.ShapeDtypeStruct((M, B // M, cfg.model.T), jnp.int32, sharding=batch)
    args = steps.abstract_params(cfg, case.mesh), tokens, tokens, KEY, 0
    check_as_written(case, model.make_loss(cfg, case.mesh, train=False), *args)


def test_sampling_costs_what_is_written(case):
    # XLA writes products of one row on a device as sums, which are not counted
    cfg = utils.replace(case.cfg, pp_interleave=1, inference_batch=8)
    generate = decoding.make_generate(cfg, case.mesh)
    check_as_written(case, generate, steps.abstract_params(cfg, case.mesh), PROMPT, KEY)


def check_as_written(case, function, *args):
    """Hold what is compiled of a function to its operations and collectives as they are written."""
    cost, sent = case.compile(function, *args)
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    written = defaultdict(float)
    add_written(needed, 1, case.mesh, written)
    # some products are sums all the same, such as those of one query with its keys
    assert 0.97 * written["flops"] < cost.flops <= written.pop("flops")
    check_bytes(sent, written)
