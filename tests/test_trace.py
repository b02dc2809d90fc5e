"""--profile and tools/trace.py: what a trace says is what the devices did, by the names of the code."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict

import pytest
from conftest import ROOT, SMALL_GPT2, SMALL_RUN, flags_of, run_program, small_config
from jax.profiler import ProfileData
from test_cluster import free_port, start
from test_resume import metrics_of

import utils
from planning import machines, plan
from runtime import messages
from tools import trace
from training import profiling, settings


@pytest.fixture(scope="module")
def runs(shards, xla_cache, tmp_path_factory):
    """Directory of two runs of nine steps: `plain`, and `traced` in two parts, with --profile 2:4 and 5:8."""
    folder = tmp_path_factory.mktemp("runs")

    def train(**more):
        flags = dict(
            SMALL_RUN,
            train_batch_size=4,
            val_batch_size=4,
            n_devices=8,
            n_device_axis=(2, 2, 2),
            output_dir=folder,
            data=shards,
            compilation_cache=xla_cache,
            eval_every=3,
            eval_steps=1,
        )
        done = run_program("--preset", "tiny", *flags_of(**flags | more))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train(name="plain", training_steps=9)
    said = train(name="traced", training_steps=6, profile="2:4")
    assert "profile: steps 2 to 4 in" in said
    said = train(name="traced", training_steps=9, profile="5:8")
    assert "profile: steps 7 to 8 in" in said
    return folder


@pytest.fixture(scope="module")
def first(runs):
    """`trace.Trace` of steps 2 to 4, with an evaluation after step 3."""
    return trace.open_trace(str(runs / "traced"), "steps-2-4")


@pytest.fixture(scope="module")
def found(first):
    return trace.measure(first)


# --- Writing ------------------------------------------------------------------------------------------------------


def test_a_profile_changes_no_number(runs):
    assert metrics_of(runs / "traced")[:9] == metrics_of(runs / "plain")


def test_each_part_of_a_run_has_a_trace_of_its_own(runs):
    assert profiling.traces_of(str(runs / "traced")) == ["steps-2-4", "steps-7-8"]
    newest = trace.open_trace(str(runs / "traced"))
    assert newest.about["steps"] == [7, 8] and trace.measure(newest).steps == 2


def test_several_processes_trace_their_own_devices(shards, xla_cache, tmp_path):
    """Also where the last step is the run's last."""
    flags = {**SMALL_GPT2, "blocks": 1, "T": 16, "n_devices": 2, "n_device_axis": (2, 1, 1)}
    flags |= dict(train_batch_size=4, val_batch_size=4, training_steps=4, profile="3:4")
    flags |= dict(output_dir=tmp_path, name="pair", data=shards, eval_steps=1)
    flags |= dict(compilation_cache=xla_cache, num_processes=2, warmup_steps=2, end_steps=100)
    flags |= dict(coordinator=f"127.0.0.1:{free_port()}")
    both = [start(["--preset", "tiny", *flags_of(**flags, process_id=i)]) for i in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [words.count("profile: steps 3 to 4") for words in said] == [1, 0]
    measured = trace.measure(trace.open_trace(str(tmp_path / "pair")))
    assert measured.devices == 2 and measured.steps == 2 and "links of dp" in measured.links


def test_a_trace_that_cannot_be_made_ends_no_run(train, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("no profiler here\nand more")

    monkeypatch.setattr("jax.profiler.start_trace", fail)
    tiny = {**SMALL_GPT2, "blocks": 1, "T": 16}
    assert train(**tiny, training_steps=3, profile="2:3") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "--profile" in line]
    assert warnings == ["warning: --profile: no trace is written: no profiler here"]
    assert train(**tiny, training_steps=4, profile="2:3") == 0
    assert "--profile 2:3: step 3 is done already, so nothing is traced" in capsys.readouterr().out


def test_perfetto_is_given_well_formed_events(first):
    """Of the Trace Event Format: an object with a list of events; a span has a name, a begin and a length."""
    with gzip.open(f"{first.folder}/process-0.trace.json.gz") as f:
        content = json.load(f)
    assert content.keys() == {"displayTimeUnit", "traceEvents"}
    spans = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    assert all({"pid", "tid", "ts", "dur", "name"} <= span.keys() for span in spans)
    steps = {span["args"]["step_num"] for span in spans if span["name"] == "train"}
    assert steps >= {"2", "3", "4"}


# --- Reading ------------------------------------------------------------------------------------------------------


def runs_of(path):
    """[[(begin, end)] of the runs of the train step, in ns] of a simulated device, as the profiler numbers them."""
    found = defaultdict(lambda: defaultdict(list))
    for plane in ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == "jit_train_step" and "end: " not in event.name:
                    span = event.start_ns, event.end_ns
                    found[stats["device_ordinal"]][stats["run_id"]].append(span)
    devices = []
    for by_run in found.values():
        spans = [(min(b for b, _ in run), max(e for _, e in run)) for run in by_run.values()]
        devices.append(sorted(spans))
    return devices


def test_parts_add_up_to_the_step(first, found):
    """Of three steps of each device, which lie in the runs that the profiler numbers, one in each."""
    program, lengths = trace.Program(first), []
    runs = runs_of(f"{first.folder}/process-0.xplane.pb")

    def lie_in(steps, spans):
        pairs = zip(steps, spans[:3], strict=True)
        return all(a <= begin < end <= b for (begin, end), (a, b) in pairs)

    for events in trace.devices_in(first, program):
        steps = trace.steps_in(events, program, 3)
        assert any(lie_in(steps, spans) for spans in runs)
        lengths += [end - begin for begin, end in steps]
    assert found.devices == 8 and found.steps == 3 and len(lengths) == 24
    step = sum(lengths) / len(lengths) / 1e9
    assert sum(found.parts.values()) == pytest.approx(step, rel=1e-6)
    assert min(found.parts.values()) >= 0 and found.between >= 0
    busy = step - found.parts.get(trace.IDLE, 0)
    assert sum(found.operations.values()) == pytest.approx(busy, rel=1e-6)


def test_a_trace_in_a_bucket_is_read(bucket, runs):
    address, fs, _ = bucket
    run = address.replace("shards", "run")
    assert profiling.traces_of(run) == []
    fs.put(str(runs / "traced" / "plugins"), run.split("://")[1] + "/plugins", recursive=True)
    assert profiling.traces_of(run) == ["steps-2-4", "steps-7-8"]
    there, here = (trace.open_trace(folder) for folder in (run, str(runs / "traced")))
    assert trace.measure(there) == trace.measure(here)


def test_every_part_of_the_model_and_every_axis_is_found(found):
    computes = {"attention", "experts", "vocabulary", "optimizer"}
    axes = {f"links of {axes}" for axes in ("dp", "pp", "tp", "dp+tp")}
    assert computes <= found.parts.keys() and axes <= set(found.links)
    assert 0 < found.products < found.step
    paths = " ".join(operation.path for operation in found.operations)
    assert all(way in paths for way in ("jvp(", "transpose(", "rematted_computation"))


def test_the_plan_stands_beside_it(first, found):
    rows = trace.beside(first, found, "")
    assert rows["step"] == dict(measured=found.step)
    assert rows.keys() > {"matrix products", "links of dp", "links of pp", "links of tp"}
    total = sum(row.get("program", 0) for row in rows.values())
    for part, row in rows.items():
        if "formulas" in row:
            near = pytest.approx(row["formulas"], rel=0.1, abs=0.001 * total)
            assert row.get("program", 0) == near, part
        assert row["measured"] > 0, part


def test_a_known_device_has_planned_seconds(first, found):
    about = first.about | dict(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    on_gpus = first._replace(about=about)
    of_program = trace.beside(on_gpus, found, "")
    assert of_program["step"]["planned"] > 0 and of_program["links of dp"]["planned"] > 0
    answer = plan.answer(first.cfg, machines.parse_machine("v4:2x2x2"))
    elsewhere = trace.beside(on_gpus, found, "v4:2x2x2")
    told = {part: row["planned"] for part, row in elsewhere.items() if "planned" in row}
    assert told == answer.seconds


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


def space(plane, lines):
    """jax.profiler.ProfileData of a plane with {line: [(name, begin, end, {stat: text})]}."""
    texts, known, stats = [], [], []
    for line, found in lines.items():
        inside = []
        for name, begin, end, told in found:
            known += [name] * (name not in known)
            stats += [stat for stat in told if stat not in stats]
            words = [
                f'stats {{ metadata_id: {stats.index(s) + 1} str_value: "{v}" }}'
                for s, v in told.items()
            ]
            at = f"offset_ps: {begin * 1000} duration_ps: {(end - begin) * 1000}"
            inside.append(
                f"events {{ metadata_id: {known.index(name) + 1} {at} {' '.join(words)} }}"
            )
        texts.append(f'lines {{ name: "{line}" {" ".join(inside)} }}')
    for kind, named in (("event", known), ("stat", stats)):
        for number, name in enumerate(named, 1):
            value = f'value {{ id: {number} name: "{name}" }}'
            texts.append(f"{kind}_metadata {{ key: {number} {value} }}")
    return ProfileData.from_text_proto(f'planes {{ name: "{plane}" {" ".join(texts)} }}')


def later(found, begin):
    return [(name, begin + a, begin + b) for name, a, b in found]


def on_tpu(begins):
    """Steps at these times as a TPU tells them, and the begin of another one."""
    core = [one for at in begins for one in later([*COMPUTED, *WAITED], at)]
    core += later(COMPUTED[:1], 999)
    beside = [one for at in begins for one in later(TRAVELED, at)]
    beside += later([("copy-start.5", 0, 45)], begins[0])
    lines = {
        "Steps": [("5", at, at + 50, {}) for at in begins],
        "XLA Ops": [(f"%{op} = f32[8]{{0}} add(..)", a, b, {}) for op, a, b in core],
        "Async XLA Ops": [(f"%{op} = (f32[8]{{0}})", a, b, {}) for op, a, b in beside],
    }
    return space("/device:TPU:0", lines)


def on_gpu(begins):
    """The same as a GPU tells it: by kernels, on two streams."""

    def kernels(found, name):
        told = [one for at in begins for one in later(found, at)]
        return [(name, a, b, dict(hlo_op=op, hlo_module="jit_train_step")) for op, a, b in told]

    cut = ("gemm", 999, 1009, dict(hlo_op="dot.1", hlo_module="jit_train_step"))
    lines = {
        "Stream #1(Compute)": [*kernels(COMPUTED, "gemm"), cut],
        "Stream #2(Compute)": kernels(TRAVELED, "ncclDevKernel"),
        "XLA Ops": kernels(COMPUTED, "gemm"),  # derived from the streams, not a second time
    }
    return space("/device:GPU:0", lines)


@pytest.fixture
def written():
    """A `trace.Trace` of three steps of the program `STEP`."""
    cfg = small_config((2, 2, 2), sequences=8)
    return trace.Trace("a folder", dict(steps=[5, 7], slices=1), cfg, STEP)


@pytest.mark.parametrize("layout", [on_tpu, on_gpu])
def test_what_is_hidden_and_exposed_on_an_accelerator(layout, written, monkeypatch):
    events = trace.events_of(layout([100, 200, 500]), trace.Program(written))
    monkeypatch.setattr(trace, "devices_in", lambda *_: list(events.values()))
    found = trace.measure(written)
    ns = {part: round(3e9 * t, 3) for part, t in found.parts.items()}
    # dp while nothing is computed
    assert ns == {"attention": 30, "experts": 60, "links of dp": 33, "optimizer": 15, "idle": 12}
    assert found.steps == 3 and found.hidden["links of dp"] == pytest.approx(20e-9)
    assert found.products == pytest.approx(10e-9) and found.between == pytest.approx(150e-9)


def test_an_operation_is_named_by_its_scopes(written):
    program = trace.Program(written)
    dot, add = program.operation("dot.1"), program.operation("add.2")
    assert dot == ("jvp(attention)/dot_general", "attention", "", True)
    assert add == ("transpose(jvp(experts))/add", "experts", "", False)
    gather = program.operation("all-gather-done.1")
    assert gather == program.operation("all-gather-start.1") and gather.links == "links of dp"
    assert program.operation("add.3").part == "optimizer"


def test_a_step_that_is_cut_off_or_missing_is_left_out(written, monkeypatch):
    program = trace.Program(written)
    [device] = trace.events_of(on_tpu([100]), program).values()
    assert trace.steps_in(device, program, 1) == [(100, 150)]
    monkeypatch.setattr(trace, "devices_in", lambda *_: [device, []])
    with pytest.raises(messages.UserError, match="holds no whole step"):
        trace.measure(written)


# --- The program --------------------------------------------------------------------------------------------------


def test_the_program_prints_shares_operations_and_the_plan(runs, found):
    words = [str(runs / "traced"), "--trace", "steps-2-4", "--top", "3"]
    command = [sys.executable, str(ROOT / "tools/trace.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shares, operations = done.stdout.split("| operation")
    parts = re.findall(r"^\| (.+?) +\| +([\d.]+) \| +([\d.]+)% \|$", shares, re.MULTILINE)
    (*rows, (name, step, whole)) = parts
    assert name == "sum" and whole == "100.0" and float(step) == pytest.approx(found.step, abs=1e-4)
    assert sum(float(share) for _, _, share in rows) == pytest.approx(100, abs=1)
    assert len(re.findall(r"% \|$", operations, re.MULTILINE)) == 3
    assert "| links of dp" in done.stdout and "--plan names others" in done.stdout


def test_a_mistake_gets_a_sentence(runs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(runs / "traced" / profiling.FOLDER, broken / profiling.FOLDER)
    for path in broken.rglob("*.xplane.pb"):
        path.write_bytes(path.read_bytes()[:1001])
    cut, flipped, no_text = [tmp_path / name for name in ("cut", "flipped", "no_text")]
    for folder, damage in (
        (cut, lambda content: content[:1001]),
        (flipped, lambda content: content[:500] + bytes(100) + content[600:]),
        (no_text, lambda content: gzip.compress(b"\xff\xfe")),
    ):
        shutil.copytree(runs / "traced" / profiling.FOLDER, folder / profiling.FOLDER)
        for path in folder.rglob("step.hlo.gz"):
            path.write_bytes(damage(path.read_bytes()))
    for run, flags, part in (
        (tmp_path, {}, "is no run directory"),
        (runs / "plain", {}, "holds no whole trace; train with --profile FIRST:LAST"),
        (runs / "traced", dict(trace="steps-1-2"), "has steps-2-4, steps-7-8"),
        (runs / "traced", dict(plan="gpu:4xH100"), "has 4 devices; the run had 8"),
        (runs / "traced", dict(plan="gpu:8xH101"), "--plan gpu:8xH101"),
        (broken, {}, "is no trace"),
        (cut, {}, "step.hlo.gz is damaged"),
        (flipped, {}, "step.hlo.gz is damaged"),
        (no_text, {}, "step.hlo.gz is damaged"),
    ):
        with pytest.raises(messages.UserError) as e:
            trace.main(trace.Options(str(run), **flags))
        said = str(e.value)
        assert part in said and "\n" not in said and said.endswith("."), said


@pytest.mark.parametrize(
    "edit",
    [
        dict(platform=2**63),
        dict(steps="/"),
        dict(steps=[10]),
        dict(steps=[10, True]),
        dict(slices=0),
        dict(flags=None),
        dict(flags={}),
        dict(written=None),
    ],
    ids=str,
)
def test_a_damaged_about_json_is_one_sentence(edit):
    flags = settings.as_json(utils.flatten(small_config((1, 1, 1))))
    names = dict(platform="cpu", device_kind="cpu")
    about = dict(steps=[10, 11], written=1.5, processes=1, slices=1, flags=flags) | names
    trace.check_about(about, "runs/x")
    with pytest.raises(messages.UserError, match="^runs/x.*about.json"):
        trace.check_about(about | edit, "runs/x")
    with pytest.raises(messages.UserError, match="model_dimension is .1, 'x'.") as e:
        trace.check_about(about | dict(flags=flags | dict(model_dimension=[1, "x"])), "runs/x")
    assert "about.json" in str(e.value)
