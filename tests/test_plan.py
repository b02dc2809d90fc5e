"""Planning: the formulas against what XLA compiles, the reader of its programs, and what --plan says."""

import importlib.util
import json
import math
import os
import re
from types import SimpleNamespace
from unittest import mock

import jax
import optax
import pytest
from families import ARCHITECTURES, FAMILIES
from helpers import ROOT, flags_of, gpu_compiler, refusal
from small_models import given, small_config

import model
import utils
from config import command_line, presets, settle
from config.flags import Flags
from planning import command, costs, hlo, machines
from planning.fitted import fitted_to
from planning.program import Program
from runtime import platforms
from training import optimizer
from training.device_mesh import make_mesh
from training.train_state import abstract_state

no_tpu_compiler = not importlib.util.find_spec("libtpu")
tpu_compiler = pytest.mark.skipif(no_tpu_compiler, reason='pip install "jax[tpu]"')
SHORT = given("--blocks 2 --layers_per_block 1 --optimizer adamw")
GPT2 = ARCHITECTURES["gpt2"] | SHORT
ACCUMULATED = given("--accumulation_steps 2 --train_batch_size 16 --blocks 4 --fsdp full")
MEGATRON = given("--sequence_parallel megatron --fsdp none --remat dots")
MUON = given("--fsdp full --layers_per_block 2 --n_shared 0 --optimizer muon")
BUCKETS = given("--q_latent_dim 0 --experts buckets --fsdp none --remat experts --expert_dim 35")
# (mesh, flags on top of small_models.SMALL)
CONFIGURATIONS = [
    ((8, 1, 1), SHORT | MUON),
    ((1, 2, 4), SHORT | ACCUMULATED | given("--remat none")),
    ((2, 1, 4), SHORT | BUCKETS),
    ((2, 1, 4), SHORT | MEGATRON),
]
CONFIGURATIONS += [(family.plan_mesh, family.small | family.plan) for family in FAMILIES.values()]
OF_TPUS = given("--T 512 --model_dimension 256 --model_dtype bfloat16")
# one sequence a microbatch, grouped keys
GROUPED = given("--head_dim 64 --attention auto --train_batch_size 4")
TPU_CONFIGURATIONS = [
    ("v4:2x2x2", (2, 2, 2), OF_TPUS | given("--optimizer adamw --layers_per_block 1")),
    ("v5e:2x4", (4, 1, 2), OF_TPUS | ARCHITECTURES["qwen3"] | GROUPED),
]


def bytes_of(sent):
    return {key: n_bytes for key, (n_bytes, *_) in sent.items()}


def check_program(text, cfg, machine):
    """A program's operations and the bytes that it sends are those of the formulas, which are returned."""
    e, program = costs.estimate(cfg, machine), Program(text, cfg, machine)
    assert e.flops == pytest.approx(program.flops, rel=0.01)
    sent, expected = bytes_of(e.sent), bytes_of(program.collectives)
    few = 4e-4 * sum(expected.values())  # sums of a few numbers are left out
    for key in {*sent, *expected}:
        assert sent.get(key, 0) == pytest.approx(expected.get(key, 0), rel=2e-3, abs=few), key
    return e


@pytest.mark.parametrize("mesh, flags", CONFIGURATIONS, ids=str)
def test_formulas_agree_with_xla_on_simulated_devices(mesh, flags):
    cfg, machine = small_config(mesh, **flags), machines.machine_of(jax.devices())
    compiled = machines.compile_step(cfg, jax.devices())
    e = check_program(compiled.text, cfg, machine)
    assert e.weights + e.optimizer + e.batch == pytest.approx(compiled.arguments, rel=2e-3)


RULES = {  # of an optimizer that somebody adds: floats that it keeps for each of a parameter's
    "lion": (lambda cfg, mesh: optax.scale_by_lion(), 1),
    "sgd": (lambda cfg, mesh: optax.identity(), 0),
    "momentum in half": (lambda cfg, mesh: optax.trace(0.9, accumulator_dtype="bfloat16"), 0.5),
    "amsgrad": (lambda cfg, mesh: optax.scale_by_amsgrad(), 3),
    "adamw": (None, 2),
    "muon": (None, None),  # one for its matrices, two for all else
}


@pytest.mark.parametrize("name, rule, kept", [(n, *rule) for n, rule in RULES.items()])
def test_a_plan_counts_what_the_optimizer_keeps(name, rule, kept, monkeypatch):
    monkeypatch.setattr(costs, "optimizer_bytes", costs.optimizer_bytes.__wrapped__)
    if rule:
        monkeypatch.setattr(optimizer, "make_rule", rule)
    known = dict(optimizer=name) if not rule else {}
    for mesh in ((1, 1, 1), (2, 2, 2)):
        cfg = small_config(mesh, **known)
        e = costs.estimate(cfg, machines.machine_of(jax.devices()))
        grid = make_mesh(cfg)
        state = abstract_state(cfg, grid, optimizer.make_optimizer(cfg, grid))
        stored = 0
        for leaf in jax.tree.leaves(state.opt_state):
            if leaf.ndim:  # scalars are left out
                stored += leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        assert e.optimizer == stored
        if kept is None:
            assert e.weights < e.optimizer < 2 * e.weights
        else:
            assert e.optimizer == kept * e.weights


def test_logits_are_in_memory_beside_the_embedding():
    """Those of a vocabulary that is large for the model."""
    cfg = small_config((1, 1, 1), 8, **GPT2 | dict(vocab_size=2**16))
    machine = machines.parse_machine("v4:1x1x1")
    needed = costs.estimate(cfg, machine).workspace
    logits, embedding = 8 * cfg.model.T * 2**16, 2**16 * cfg.model.model_dimension
    width = 4  # of a float32, which is the dtype of the small models here
    assert needed >= 4 * fitted_to(machine, has_loop=True).logit_copies * logits + width * embedding


@pytest.fixture
def no_device():
    """The environment that --plan sets, for one test."""
    with mock.patch.dict(os.environ):
        platforms.use_no_device()
        yield


@tpu_compiler
@pytest.mark.parametrize("name, mesh, flags", TPU_CONFIGURATIONS, ids=str)
def test_formulas_agree_with_the_tpu_compiler(
    no_device, name, mesh, flags, tmp_path, monkeypatch, capsys
):
    """It pads small arrays, and makes small sums over devices an all-reduce or a reduce-scatter as it likes."""
    machine, cfg = machines.parse_machine(name), small_config(mesh, **flags)
    compiled = machines.ask_compiler(cfg, machine)
    e = costs.estimate(cfg, machine)
    given = e.weights + e.optimizer + e.batch
    assert given == pytest.approx(compiled.arguments, rel=0.5)  # of 20 MB
    assert e.activations + e.workspace == pytest.approx(compiled.temporaries, rel=0.5)

    monkeypatch.setattr(machines, "ask_compiler", lambda cfg, machine, limit=0: compiled)
    asked = utils.replace(cfg, plan=name, plan_json=str(tmp_path / "a/plan.json"))
    command.main(Flags(asked, frozenset(utils.flatten(cfg))))
    a = json.loads((tmp_path / "a/plan.json").read_text())
    assert machine.chip.jax_name in capsys.readouterr().out and a["compiled"] and a["fits"]
    assert (tmp_path / "a/plan.hlo").read_text() == compiled.text
    assert e.flops == pytest.approx(a["flops"]["program"], rel=0.03)
    for kind in ("all-to-all", "collective-permute"):
        ours = sum(n_bytes for key, n_bytes in bytes_of(e.sent).items() if key[1] == kind)
        theirs = sum(row["bytes"] for row in a["collectives"] if row["kind"] == kind)
        assert ours == pytest.approx(theirs, rel=0.1)
    assert a["memory"]["total"] == pytest.approx(compiled.arguments + compiled.temporaries)
    assert min(a["seconds"]["matrix products"], a["seconds"]["memory"]) > 0
    assert 0 < a["overlapped"]["step"] <= a["seconds"]["step"]
    may_overflow = cfg.model.n_experts and not cfg.model.capacity_factor
    in_rounds = may_overflow and cfg.model.experts != "tiles"
    assert (a["overlapped"]["further round"] > 0) == bool(in_rounds)


@pytest.mark.parametrize(
    "written",
    [
        "%p, %a, %b), true_computation=%two, false_computation=%one, metadata={",  # of lax.cond
        "%i, %a, %b), branch_computations={%one, %two}, metadata={",  # of lax.switch
    ],
)
def test_the_branches_of_a_conditional_are_in_the_order_of_their_index(written):
    assert hlo.branches_of(SimpleNamespace(rest=written)) == ["one", "two"]


MESH = dict(dp=2, pp=3, tp=4)
GROUPS = {  # of devices, as compilers write them: their axes, and how many are in one
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ("tp", 4),
    "replica_groups=[12,2]<=[2,12]T(1,0)": ("dp", 2),
    "replica_groups=[3,8]<=[2,3,4]T(1,0,2)": ("dp tp", 8),
    "replica_groups=mesh['a'=2,'b'=3,'c'=4] {'b'}": ("pp", 3),
    "replica_groups=mesh['a'=3,'b'=2,'c'=4], device_ids=([2,3,4]T(1,0,2)) {'b','c'}": ("dp tp", 8),
    "source_target_pairs={{0,4},{4,8},{8,0}}": ("pp", 2),
    "replica_groups={}": ("dp pp tp", 24),
}


def test_axes_of_a_collective():
    for attribute, (axes, n) in GROUPS.items():
        op = hlo.Op("x", "f32[8]", "all-reduce", f"%y), channel_id=1, {attribute}, to_apply=%add")
        assert hlo.group_axes(op, MESH) == (tuple(axes.split()), n), attribute


# a call of cuBLAS
CALL = '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
# as the TPU compiler writes [8,512,128] x [128,6,64]: heads are a dim of the window, five sixths on padding
HEADS = "window={size=1x6 pad=0_0x5_5 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f"
# and batched products: one place of the window for each member of the batch
BATCHED = "window={size=8x6 stride=7x5 lhs_dilate=8x6}, dim_labels=0b1f_0o1i->01bf"
PRODUCTS = [
    ("(f32[5,7], s8[4096])", "f32[5,3] f32[3,7]", CALL, 5 * 3 * 7),
    ("bf16[8,512,6,64]", "bf16[8,512,128,1] bf16[128,6,64,1]", HEADS, 8 * 512 * 6 * 64 * 128),
    ("f32[8,6,32,16]", "bf16[8,32,6,24] bf16[8,16,6,24]", BATCHED, 8 * 6 * 32 * 16 * 24),
]


def test_operations_of_a_product():
    for out, operands, rest, multiplications in PRODUCTS:
        kind = "convolution" if "window" in rest else "dot"
        inputs = [hlo.Op("x", operand, "parameter", "") for operand in operands.split()]
        found = hlo.matmul_flops(hlo.Op("c", out, kind, f"%a, %b), {rest}", inputs))
        assert found == 2 * multiplications


FUSION = """%{0} (p: f32[4]) -> f32[8] {{
  %p = f32[4] parameter(0)
  ROOT %g = f32[8] all-gather(%p), replica_groups={{{{0,1}}}}, frontend_attributes={{chain_id="{1}"}}
}}
"""


def test_a_collective_beside_several_fusions_counts_once():
    chains = dict(first=0, second=0, other=1)
    text = "HloModule step\n" + "".join(FUSION.format(*item) for item in chains.items())
    text += "ENTRY %main (x: f32[4]) -> f32[8] {\n  %x = f32[4] parameter(0)\n"
    for name in chains:
        text += f"  %{name}_call = f32[8] fusion(%x), kind=kCustom, calls=%{name}\n"
    found = timeline(text + "}\n", 0).collectives
    assert found == {(("dp",), "all-gather"): [2 * 32 / 2, 2, 0]}


def timeline(text, seconds):
    """Of a program in which a byte is moved in a second and every transfer takes some."""

    class Program(hlo.Timeline):
        def compute_seconds(self, flops, cycles, moved, is_kernel):
            return moved

        def link_seconds(self, *transfer):
            return seconds

    return Program(text, dict(dp=2, pp=1, tp=1), 1)


TWO_PRODUCTS = """HloModule step
ENTRY %main (a: f16[8,4], b: f32[8,8]) -> f32[8,8] {
  %a = f16[8,4] parameter(0)
  %b = f32[8,8] parameter(1)
  %short = f32[8,8] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %long = f32[8,8] dot(%b, %short), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_product_is_as_fast_as_the_type_of_its_factors(monkeypatch):
    """On a T4, which multiplies eight times as fast in float16."""
    counted, compute_seconds = [], Program.compute_seconds

    def watched(program, flops, *rest):
        counted.append(dict(flops))
        return compute_seconds(program, flops, *rest)

    monkeypatch.setattr(Program, "compute_seconds", watched)
    found = Program(TWO_PRODUCTS, small_config(), machines.parse_machine("1xT4"))
    short, long = 2 * 8 * 8 * 4, 2 * 8 * 8 * 8
    assert [flops for flops in counted if flops] == [{"float16": short}, {"float32": long}]
    assert found.flops == short + long
    fast = found.compute_seconds({"float16": 1e12}, 0, 0, False)
    slow = found.compute_seconds({"float32": 1e12}, 0, 0, False)
    assert fast == pytest.approx(1 / (0.75 * 65), rel=1e-3)
    assert slow == pytest.approx(1 / (0.75 * 8.1), rel=1e-3)


def test_computation_hides_what_travels_meanwhile():
    """As a compiler for GPUs writes it."""
    text = (ROOT / "tests/program.hlo").read_text()
    short, long = timeline(text, 10), timeline(text, 100)
    gathered, permuted = (("dp",), "all-gather"), (("dp",), "collective-permute")
    assert short.flops == 5 * 2 * 16
    assert short.collectives == {gathered: [32, 2, 2 * 10], permuted: [5 * 16, 5, 5 * 10]}
    # a slice, its place and the result; and the array around a slice that is replaced stays
    assert short.products == long.products == 5 * (16 + 64) and short.others == 2 * (16 + 4 + 16)
    assert short.exposed == {gathered: 10, permuted: 0}  # one of the two is not asynchronous
    assert long.exposed == {gathered: 200 - 36, permuted: 5 * (100 - 80)}


def test_a_fusion_reads_what_it_uses():
    """Of an array that it slices, also behind an operation on each number, the slice; of one that it also sums, all."""
    fused = """%fused (a: f32[10,4], b: f32[40], i: s32[]) -> (f32[4], f32[]) {
  %a = f32[10,4] parameter(0)
  %b = f32[40] parameter(1)
  %i = s32[] parameter(2)
  %view = f32[40] bitcast(%a)
  %sum = f32[40] add(%view, %b)
  %slice = f32[4] dynamic-slice(%sum, %i), dynamic_slice_sizes={4}
  %total = f32[] reduce(%b, %i), dimensions={0}
  ROOT %both = (f32[4], f32[]) tuple(%slice, %total)
}
"""
    main = """ENTRY %main (a: f32[10,4], b: f32[40], i: s32[]) -> (f32[4], f32[]) {
  %a = f32[10,4] parameter(0)
  %b = f32[40] parameter(1)
  %i = s32[] parameter(2)
  ROOT %c = (f32[4], f32[]) fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""
    assert timeline(fused + main, 0).others == 16 + 160 + 4 + 16 + 4


def test_a_second_of_computation_hides_one_transfer():
    text = """ENTRY %main (p: f32[1]) -> f32[1] {
  %p = f32[1] parameter(0)
  %first = f32[1] collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %second = (f32[1], f32[2]) all-gather-start(%p), replica_groups={{0,1}}
  %a = f32[1] negate(%p)
  %second_done = f32[2] all-gather-done(%second)
  %b = f32[1] negate(%p)
  %first_done = f32[1] collective-permute-done(%first)
}
"""
    # 8 seconds hide the first, which began first; the second has the other 2 of these
    exposed = timeline(text, 6).exposed
    assert exposed == {(("dp",), "all-gather"): 4, (("dp",), "collective-permute"): 0}


def test_a_plan_by_formulas(planned, capsys):
    a = planned("--by_formulas", plan="gpu:8xH200", n_device_axis=(4, 2, 1))
    assert a["devices"] == 8 and a["mesh"] == dict(dp=4, pp=2, tp=1)
    assert a["fits"] and not a["compiled"]
    cfg, step = presets.preset("tiny"), a["seconds"].pop("step")
    assert a["tokens"] == cfg.data.global_batch_size * cfg.model.T
    assert a["bubble"] == pytest.approx(1 / 3)  # two microbatches of two sequences
    assert step == pytest.approx(sum(a["seconds"].values()))
    assert a["tokens_per_second"] == pytest.approx(a["tokens"] / step)
    assert a["chip_hours"] == 8 * a["hours"] == pytest.approx(cfg.run.training_steps * step / 450)
    assert a["mfu"] == pytest.approx(a["flops"]["model"] / step / 989e12)
    assert a["parameters"]["total"] == model.count_params(settle.validate(cfg, 1))[0]
    said = capsys.readouterr().out
    parts = "parameters memory operations collectives tokens/s chip-hours".split()
    assert all(word in said for word in [*parts, "bound by", "next"])


def test_search_keeps_the_global_batch_and_ranks(planned, capsys):
    a = planned("--search", "--by_formulas", plan="gpu:4xA100", train_batch_size=16)
    said = capsys.readouterr().out
    meshes = {tuple(row["mesh"].values()) for row in a["search"]}
    assert meshes == {(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)}
    assert all(row["tokens"] == 64 * 128 for row in a["search"])
    steps = [row["seconds"]["step"] for row in a["search"]]
    assert steps == sorted(steps) and a["seconds"]["step"] == steps[0]
    assert "formulas" in said and "the fastest: --" in said


def test_the_flag_that_is_advised_is_faster(planned, capsys):
    flags = dict(preset="moe1b", plan="gpu:8xH200", n_device_axis=(2, 2, 2), global_batch_size=64)
    a = planned("--by_formulas", **flags)
    said = r"(--.*) would help most: by (\d+)% of the step.*"
    advised, by = re.fullmatch(said, a["advice"]).groups()
    seconds = re.findall(r" MB +[\d,]+ +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    other = planned("--by_formulas", *advised.split(), **flags)
    expected = (1 - int(by) / 100) * a["seconds"]["step"]
    assert other["seconds"]["step"] == pytest.approx(expected, rel=0.01)


def test_what_does_not_fit_says_what_would(capsys):
    batch = dict(train_batch_size=4096, microbatches=4, val_batch_size=4)
    words = flags_of(preset="moe1b", plan="gpu:1xA100", **batch)
    assert command.main(command_line.parse(["--by_formulas", *words])) == 3
    said = capsys.readouterr().out
    assert "does not fit: it needs" in said and "--" in said.split("next")[1]


def test_without_a_compiler_formulas_answer(planned, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    commands = {"v4:2x2x2": 'pip install "jax[tpu]"', "gpu:8xH200": "setup_tpu.sh plan-gpu"}
    for name, install in commands.items():
        a = planned(plan=name)
        assert install in capsys.readouterr().out and a["devices"] == 8 and not a["compiled"]
        assert not list(tmp_path.glob("*.hlo"))


MACHINES = {  # (devices, slices or hosts, the topology that the compiler is asked for)
    "2*v5e:4x8": (64, 2, "v5e:4x8"),
    "gpu:2x8xA100-40GB": (16, 2, None),
    "v3:2x2": (8, 1, "v3:2x2"),  # of a v3-8: two devices a chip
    "v7x:2x2x1": (8, 1, "tpu7x:2x2x1"),
}
NO_MACHINES = """v4 v9:2x2 v4:2x2 v5e:2x2x2 v4:2x0x2 0*v4:2x2x1 gpu:8xK80 gpu:0xH100 gpu:0x8xH100 gpu:2x2x8xH100
v4:2x2x2x2 v4:ax2x2 gpu:8xv4 v9-8 8xK80 v5-8 8xv4 H100x8""".split()
# Google's tables, and how others write GPUs
NAMES = """v4-8=v4:2x2x1 v4-32=v4:2x2x4 v4-64=v4:2x4x4 v4-512=v4:4x8x8 v5p-16=v5p:2x2x2 v5p-1152=v5p:4x12x12
v5p-12288=v5p:16x16x24 v5e-8=v5e:2x4 v5litepod-8=v5e:2x4 v5e-1=v5e:1x1 v6e-32=v6e:4x8 v6e-256=v6e:16x16 v3-8=v3:2x2
v3-2048=v3:32x32 tpu7x-128=v7x:4x4x4 2*v5e-64=2*v5e:8x8 8xH100=gpu:8xH100 a100:4=gpu:4xA100 2x8xh200=gpu:2x8xH200
T4=gpu:1xT4 8xA100-80GB=gpu:8xA100 gpu:8xH200=gpu:8xH200""".split()


def test_a_machine_is_called_as_a_grant_or_a_cloud_calls_it():
    for name, (n, groups, topology) in MACHINES.items():
        machine = machines.parse_machine(name)
        assert (machine.n, machine.groups) == (n, groups) and machine.chip.peak
        assert topology in (None, machine.topology)
    for names in NAMES:
        name, ours = names.split("=")
        assert machines.parse_machine(name) == machines.parse_machine(ours)
        assert machines.parse_machine(name).name == ours
    for name in ("v4-12", "v5e-2"):
        refusal(lambda: machines.parse_machine(name), f"--plan {name}: there is no such slice")
    for name in NO_MACHINES:
        refusal(lambda: machines.parse_machine(name), "such as")


MISTAKES = {
    "--plan gpu:8xH200 --n_device_axis 3 1 1": "--n_device_axis 3 1 1",
    "--plan gpu:8xH200 --n_devices 4": "--n_devices 4",
    "--search": "--search: needs --plan",
    "--plan v7:2x2": "--plan v7:2x2: must be",
    "--plan v5e-8 --by_formulas --attention x": "--attention x: must be one of auto, ",
}


def test_mistakes_get_one_sentence():
    for words, said in MISTAKES.items():
        found = refusal(
            lambda: command.main(command_line.parse(["--preset", "tiny", *words.split()]))
        )
        assert found.startswith(said) and "simulates" not in found


def test_a_plan_is_no_part_of_a_run():
    cfg, _ = command_line.parse(["--plan", "v4:2x2x1", "--search"])
    of_plan = {"plan", "by_formulas", "search", "plan_json"}
    assert cfg.plan.search and not of_plan & set(utils.flatten(cfg))
    assert utils.replace(cfg, T=64).plan == cfg.plan


@tpu_compiler
def test_the_tpu_compiler_refuses_what_does_not_fit(no_device, planned, capsys):
    flags = dict(train_batch_size=2**15, microbatches=1, remat="none", preset="gpt2-tiny")
    planned(plan="v5e:2x2", n_device_axis=(4, 1, 1), **flags)
    said = capsys.readouterr().out
    assert "compiling" in said and "does not fit: it needs" in said


def abort(cfg, machine, limit):
    os.abort()


def fail(cfg, machine, limit):
    raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile")


@tpu_compiler
def test_formulas_answer_where_a_compiler_crashes(no_device, planned, monkeypatch, capsys):
    """As some programs make that of TPUs do, and that for GPUs."""
    for said, crash in {"A process in the": abort, "INTERNAL: Mosaic": fail}.items():
        monkeypatch.setattr(machines, "compile_for", crash)
        a = planned(plan="v4:2x2x1", train_batch_size=16)
        assert f"an error of its own ({said}" in capsys.readouterr().out
        assert a["fits"] and not a["compiled"]


@tpu_compiler
def test_a_design_does_not_wait_for_a_compiler_that_takes_long(no_device, capsys):
    machine = machines.parse_machine("v4:2x2x1")
    cfg = settle.validate(presets.preset("moe1b"), machine.n)  # whose step takes more than a minute
    assert machines.ask_compiler(cfg, machine, limit=2) is None
    assert "has not ended after 2s" in capsys.readouterr().out


@tpu_compiler
def test_a_slice_that_no_one_sells(no_device):
    machine = machines.parse_machine("v4:3x4x4")
    refusal(lambda: machines.devices_of(machine), "knows no such slice")


@gpu_compiler
@pytest.mark.parametrize("kind", ["T4", "B200"])
def test_devices_that_exist_for_the_compiler_alone(kind):
    machine = machines.parse_machine(f"gpu:2x4x{kind}")
    devices = machines.devices_of(machine)
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
    assert {(d.platform, d.device_kind) for d in devices} == {("gpu", machine.chip.jax_name)}


GPU_CONFIGURATIONS = [("tiny", "gpu:2x8xH200", (4, 2, 2)), ("qwen3-tiny", "gpu:8xH200", (2, 2, 2))]


@gpu_compiler
@pytest.mark.parametrize("preset, name, mesh", GPU_CONFIGURATIONS, ids=str)
def test_a_train_step_costs_what_the_formulas_say(preset, name, mesh):
    machine = machines.parse_machine(name)
    cfg = utils.replace(presets.preset(preset), n_device_axis=mesh)
    cfg = settle.validate(cfg, machine.n)
    compiled = machines.compile_step(cfg, machines.devices_of(machine))
    assert compiled.arguments + compiled.temporaries < machine.chip.memory
    check_program(compiled.text, cfg, machine)


@gpu_compiler
def test_scores_in_memory_take_the_time_that_the_formulas_say():
    """On a T4, which has no kernel that keeps them out of memory."""
    machine = machines.parse_machine("gpu:1xT4")
    flags = dict(blocks=1, T=256, vocab_size=1024, model_dtype="float16", remat="attention")
    batch = dict(global_batch_size=64, microbatch_size=64, n_device_axis=(1, 1, 1))
    cfg = settle.validate(utils.replace(presets.preset("gpt2-124m"), **flags | batch), 1)
    compiled = machines.compile_step(cfg, machines.devices_of(machine))
    e, program = costs.estimate(cfg, machine), Program(compiled.text, cfg, machine)
    assert sum(e.seconds.values()) == pytest.approx(program.products + program.others, rel=0.15)
