"""What goes wrong in a run: numbers that are not finite, disks that are full, damaged checkpoints, killed processes."""

import contextlib
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SMALL, SMALL_GPT2, flags_of, small_config
from test_cluster import XLA_FLAGS, free_port
from test_resume import metrics_of
from test_scripts import wait_for

import dataset
import main
import model
import presets
import utils
from data.sources.kinds import open_source
from inference import weights
from runtime import files, interrupts, locks, messages, processes
from training import checkpointing, steps

# --- Numbers that are not finite ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def all_in_the_cache():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


TINY = {**SMALL_GPT2, "blocks": 1, "model_dimension": 16, "ffn_dim": 32, "T": 16}


def poisoned(make_loss, bad):
    """`model.make_loss` whose training loss is not finite on batches that begin with one of the rows `bad` [n, T]."""

    def make(cfg, mesh, train):
        loss = make_loss(cfg, mesh, train)

        def not_finite(params, tokens, targets, key, first):
            value, seen = loss(params, tokens, targets, key, first)
            return jnp.where((tokens[0, 0] == bad).all(-1).any(), jnp.nan, 1.0) * value, seen

        return not_finite if train else loss

    return make


@pytest.fixture
def poison(shards, monkeypatch):
    """`poison(steps, **flags)`: let the batches that an undisturbed run has at these steps give a NaN."""
    make_loss = model.make_loss

    def poison(steps, T=16, batch=8):
        cfg = utils.replace(presets.preset("tiny"), data=str(shards), T=T, vocab_size=250)
        first = (np.array(steps) - 1) * batch
        bad = dataset.Mixture(cfg, "train").sequences(first, seed=0)[:, :-1]
        monkeypatch.setattr(model, "make_loss", poisoned(make_loss, bad))

    return poison


def meta_of(run, step):
    return json.loads((run / "checkpoints" / str(step) / "meta" / "metadata").read_text())


def test_a_step_that_is_not_finite_changes_nothing_but_is_counted(train, poison, tmp_path, capsys):
    poison([5, 6])
    moe = dict(blocks=1, layers_per_block=1, n_experts=4)
    assert train(mesh=(2, 1, 1), T=16, training_steps=6, save_steps=4, **moe) == 0
    run = tmp_path / "runs" / "run"
    said = capsys.readouterr().out
    assert [s for s in range(1, 7) if f"step {s} is skipped, its loss is nan" in said] == [5, 6]
    assert [row["bad_steps"] for row in metrics_of(run)] == [0, 0, 0, 0, 1, 2]
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        before, after = (reader.restore(run / "checkpoints" / step / "state") for step in "46")
    steps = before.pop("step"), after.pop("step")
    assert [int(s) for s in steps] == [4, 6] and meta_of(run, 6)["sequences"] == 48
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), before, after))


def test_bad_steps_in_a_row_roll_the_run_back_and_past_their_data(train, poison, tmp_path, capsys):
    """The same whether or not it is stopped, before, among and after them."""
    poison([7, 8, 9])
    flags = dict(TINY, max_bad_steps=3, save_steps=4, keep_checkpoints=5)
    assert train(**flags, name="whole", training_steps=12) == 0
    said, runs = capsys.readouterr().out, tmp_path / "runs"
    assert "rollback 1 of 3 to step 4; training continues with the data after sequence 72" in said
    assert meta_of(runs / "whole", 12)["sequences"] == 72 + 8 * 8
    rows = metrics_of(runs / "whole")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert np.isfinite([row["loss/train_loss"] for row in rows]).all()
    assert [row["bad_steps"] for row in rows] == [0] * 4 + [3] * 8
    for end in (6, 8, 9, 12):
        assert train(**flags, name="parts", training_steps=end) == 0
    assert metrics_of(runs / "parts") == rows
    assert meta_of(runs / "parts", 12) == meta_of(runs / "whole", 12)  # with the fingerprint


def test_after_three_rollbacks_the_run_ends(train, poison, tmp_path, capsys):
    poison(range(6, 60))
    # no save among bad steps displaces the one checkpoint
    flags = dict(TINY, max_bad_steps=3, save_steps=4, training_steps=50, keep_checkpoints=1)
    for _ in range(2):
        with pytest.raises(
            messages.UserError,
            match="--max_bad_steps 3: 3 steps .* from step 5 on .*after 3 rollbacks",
        ):
            train(**flags)
        said = capsys.readouterr().out
        assert len(re.findall("rollback . of 3 to step 4", said)) == 3
    assert [p.name for p in (tmp_path / "runs/run/checkpoints").iterdir()] == ["4"]


# --- Checkpoints --------------------------------------------------------------------------------------------------


def state_of(seed, n=3000):
    rng = np.random.default_rng(seed)
    return {
        "params": {"a": jnp.array(rng.normal(size=n), jnp.float32), "b": jnp.arange(7)},
        "step": jnp.int32(seed),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2; not to be written to."""
    steps.quiet_libraries()  # as every program that reads checkpoints does
    folder = tmp_path_factory.mktemp("two") / "whole"
    checkpoints = checkpointing.Checkpoints(str(folder), 3)
    for step in (1, 2):
        checkpoints.save(step, state_of(step), step, {}, 1.5)
    checkpoints.close()
    return folder


def restored(folder):
    """The step that is restored from a folder, whose state must be that one's."""
    checkpoints = checkpointing.Checkpoints(str(folder), 3)
    state, meta = checkpoints.restore(abstract(state_of(0)))
    checkpoints.close()
    assert same(state, state_of(meta["step"]))
    return meta["step"]


def test_a_checkpoint_truncated_anywhere_is_passed_over(two_checkpoints, tmp_path, capsys):
    rng = random.Random(0)
    parts = [p for p in (two_checkpoints / "2").rglob("*") if p.is_file()]
    parts = [p for p in parts if {"state", "meta"} & {*p.parts}]
    passed_over = 0
    for n, part in enumerate(rng.choices(parts, [p.stat().st_size for p in parts], k=20)):
        shutil.copytree(two_checkpoints, tmp_path / str(n))
        part = tmp_path / str(n) / part.relative_to(two_checkpoints)
        os.truncate(part, rng.randrange(part.stat().st_size))
        passed_over += restored(tmp_path / str(n)) == 1  # what no reader looks at may be missing
    assert passed_over >= 16
    assert capsys.readouterr().err.count("resuming from checkpoint 1") == passed_over


def in_meta(checkpoint, old, new):
    path = checkpoint / "meta" / "metadata"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def of_other_contents(checkpoint):
    """Beside arrays that can be read and are not those that were saved."""
    path = checkpoint / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["fingerprint"][0] ^= 1
    path.write_text(json.dumps(meta | {"sum": checkpointing.meta_sum(meta)}))


DAMAGED = {  # what becomes of checkpoint 2
    "arrays": of_other_contents,
    "array metadata": lambda at: next((at / "state/array_metadatas").iterdir()).write_text("{"),
    "a file is a folder": lambda at: [(p.unlink(), p.mkdir()) for p in (at / "state/d").iterdir()],
    "no meta": lambda at: shutil.rmtree(at / "meta"),
    "meta is a list": lambda at: (at / "meta/metadata").write_text("[1]"),
    "another position": lambda at: in_meta(at, '"sequences": 2', '"sequences": 3'),
    "no step": lambda at: in_meta(at, '"step"', '"stop"'),
}


def test_damage_of_every_kind_is_said_in_two_lines(two_checkpoints, tmp_path, capfd):
    for name, damage in DAMAGED.items():
        shutil.copytree(two_checkpoints, tmp_path / name)
        damage(tmp_path / name / "2")
        assert restored(tmp_path / name) == 1, name
        said = capfd.readouterr().err.splitlines()
        # Orbax's threads may print there too, late
        first, second = [line for line in said if line.startswith("warning: ")]
        assert "warning: checkpoint 2 is damaged (" in first, name
        assert "warning: resuming from checkpoint 1; the steps from 2 to 2 were lost" in second


def test_a_model_of_other_flags_is_not_a_damaged_one(train, tmp_path, capsys):
    """Nothing is moved or written, and the flag is named, wherever it is still known."""
    flags = dict(TINY, name="run", training_steps=2)
    run = tmp_path / "runs" / "run"
    assert train(**flags) == 0
    before = json.loads((run / "config.json").read_text())
    (run / "config.json").unlink()
    for other in (dict(blocks=3), dict(max_lr=1.0), dict(train_batch_size=4)):
        with pytest.raises(messages.UserError, match=f"{next(iter(other))}.*"):
            train(**flags | other | dict(training_steps=3))
    assert sorted(os.listdir(run / "checkpoints")) == ["2"] and not (run / "config.json").exists()
    capsys.readouterr()
    assert train(**flags) == 0
    assert "nothing to do" in capsys.readouterr().out

    # what tools open: the run's checkpoint beside another config.json
    (run / "config.json").write_text(json.dumps(before | dict(blocks=3)))
    cfg = small_config(**TINY | dict(blocks=3))
    params = steps.abstract_params(cfg, steps.make_mesh(cfg))
    said = "checkpoint 2 is of a model with other flags .--blocks was 1 and is now 3"
    with pytest.raises(messages.UserError, match=said):
        weights.open_weights(str(run))[1](params)


def test_the_newest_every_kth_and_the_best_are_kept(tmp_path):
    checkpoints = checkpointing.Checkpoints(str(tmp_path / "c"), 2, every=3)
    for step, loss in enumerate([5.0, 2.0, 4.0, None, float("nan"), 3.0, 3.5, 3.6], 1):
        checkpoints.save(step, state_of(step, 10), step, {}, loss)
    checkpoints.close()
    checkpoints = checkpointing.Checkpoints(str(tmp_path / "c"), 2, every=3)
    assert checkpoints.steps() == [8, 7, 6, 3, 2]
    checkpoints.save(9, state_of(9, 10), 9, {}, 1.0)  # the earlier losses are known still
    checkpoints.close()
    assert checkpoints.steps() == [9, 8, 6, 3]


def test_a_run_whose_last_checkpoint_is_not_written_ends_in_an_error(train, capsys, monkeypatch):
    monkeypatch.setattr(checkpointing.Checkpoints, "save", lambda *_: None)
    assert train(**TINY, training_steps=1) == 1
    done = capsys.readouterr()
    assert "the last checkpoint, of step 1, is not written; make room and rerun" in done.err
    assert "done at" not in done.out and "saved in" not in done.out, "one ending"


def test_checkpoints_are_listed_and_verified(tmp_path, capsys):
    from tools import checkpoints as tool

    def run():
        tool.main(tool.Options(str(tmp_path)))
        return capsys.readouterr().out.splitlines()

    with pytest.raises(messages.UserError, match="there are no checkpoints in it"):
        run()
    checkpoints = checkpointing.Checkpoints(str(tmp_path / "checkpoints"), 9)
    for step, loss in enumerate([5.0, None], 1):
        checkpoints.save(step, state_of(step, 100), 8000 * step, {"mesh": [2, 1, 1]}, loss)
    checkpoints.close()
    assert run() == [
        "1  sound, after 8,000 sequences, validation loss 5.0000",
        "2  sound, after 16,000 sequences",
    ]
    for part in (tmp_path / "checkpoints/2/state/d").iterdir():
        os.truncate(part, 9)
    with pytest.raises(messages.UserError, match="1 of 2 checkpoints are damaged"):
        run()
    assert "2  damaged: " in capsys.readouterr().out


# --- One process in a folder --------------------------------------------------------------------------------------

HOLD = """
import sys, time
from runtime import locks
with locks.alone_in(sys.argv[1], "--output x", "--output"):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holding(folder):
    """A process that holds `folder`, until it is killed."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def refusal(folder):
    held = locks.alone_in(str(folder), "--output x", "--output")
    with pytest.raises(messages.UserError) as e, held:
        pass
    return str(e.value)


def test_a_run_directory_is_one_process_alone(train, tmp_path, capsys, monkeypatch):
    run, flags = tmp_path / "runs" / "run", dict(TINY, training_steps=2)
    with holding(run) as pid:
        before = (run / "lock").read_bytes()
        with pytest.raises(messages.UserError) as e:
            train(**flags)
        assert f"process {pid} on {socket.gethostname()} has been writing to {run}" in str(e.value)
        assert "; wait for its end, or give another --name." in str(e.value)
        assert [p.name for p in run.iterdir()] == ["lock"] and (run / "lock").read_bytes() == before
        # of two processes the one that does not ask for the lock is refused too
        one = SimpleNamespace(folder=str(run), output_dir=str(run.parent))
        with monkeypatch.context() as patch, pytest.raises(messages.UserError, match="another"):
            patch.setattr(jax, "process_index", lambda: 1)
            patch.setattr(processes, "all_of", lambda here: False)
            with processes.alone_in_folder(one):
                pass
    assert train(**flags) == 0  # what the killed process left is taken over
    said = capsys.readouterr().out
    assert f"{run} is taken over from process {pid}, which ended without a word" in said
    assert "lock" not in os.listdir(run)
    with pytest.raises(messages.UserError, match="--data"):
        train(**flags, output_dir=tmp_path / "other", data=tmp_path / "nowhere")
    assert not (tmp_path / "other" / "run").exists(), "a refusal leaves nothing"


@pytest.mark.parametrize("where", ["local", "memory://locks"])
def test_a_lock_of_another_host_is_refused_and_that_of_a_dead_process_is_not(
    where, tmp_path, capsys
):
    folder = str(tmp_path / "out") if where == "local" else f"{where}/out"
    path, me = f"{folder}/lock", json.loads(locks.this_process())

    def left(**differs):
        files.write_file(path, json.dumps(me | differs))

    left(host="faraway", pid=5, since="noon")
    assert refusal(folder) == (
        f"--output x: process 5 on faraway has been writing to {folder} since noon; if it runs "
        f"no more, remove {path}, else give another --output."
    )
    assert json.loads(files.read_file(path))["host"] == "faraway"
    left(pid=2**22 + 1)
    with locks.alone_in(folder, "--output x", "--output"):
        assert json.loads(files.read_file(path))["pid"] == os.getpid()
        if where == "local":  # a process of a bucket's lock is known by its number alone
            assert f"process {os.getpid()} on {me['host']}" in refusal(folder)
    assert files.read_file(path) is None
    assert "is taken over from process" in capsys.readouterr().out
    if where != "local":
        left(pid=os.getppid())
        assert f"process {os.getppid()} on {me['host']}" in refusal(folder), "it is alive"
        files.filesystem(path)[0].rm_file("/locks/out/lock")
    with locks.alone_in(folder, "--output x", "--output"):
        if where == "local":
            os.remove(path)
        left(host="faraway")
    assert files.read_file(path), "another's by now, so it stays"


def test_a_lock_whose_file_its_holder_removes_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """The next process would lock a new file of that name."""
    lock = locks.system_lock
    monkeypatch.setattr(locks, "system_lock", lambda f: os.remove(tmp_path / "lock") or lock(f))
    assert "wait for its end" in refusal(tmp_path)


def test_a_place_that_cannot_be_written_is_one_sentence_before_compiling(train, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", "/proc"):
        with pytest.raises(messages.UserError, match=r"^[^\n]* cannot be written \("):
            train(**TINY, output_dir=place)
    for place in ("/proc/plan.json", tmp_path):
        with pytest.raises(messages.UserError, match="--plan_json .*: cannot be written"):
            files.check_place(str(place), "--plan_json")
    steps.configure_jax(utils.replace(utils.Config(), compilation_cache="/proc/cache"))
    said = capsys.readouterr().err
    assert said.startswith("warning: --compilation_cache /proc/cache/entry: cannot be written (")
    files.check_place(str(tmp_path / "new/plan.json"), "--plan_json")
    assert not (tmp_path / "new").exists()


def test_a_file_is_replaced_whole_and_nothing_else_is_touched(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    (tmp_path / "plan.json.part").write_text("mine")
    before = os.umask(0o027)
    files.write_file(str(path), "old")
    os.umask(before)
    assert oct(path.stat().st_mode)[-3:] == "640"
    path.chmod(0o604)
    (tmp_path / "link").symlink_to("plan.json")
    (tmp_path / "dangling").symlink_to("folder/new.json")
    files.write_file(str(tmp_path / "link"), "new")
    files.write_file(str(tmp_path / "dangling"), "new")
    assert path.read_text() == (tmp_path / "folder/new.json").read_text() == "new"
    assert os.readlink(tmp_path / "link") == "plan.json" and oct(path.stat().st_mode)[-3:] == "604"

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(KeyboardInterrupt):
        files.write_file(str(path), "half")
    assert path.read_text() == "new" and (tmp_path / "plan.json.part").read_text() == "mine"
    assert len(os.listdir(tmp_path)) == 5, "no remains"


def test_a_file_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "read-only").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    may, read_only = os.access, str(tmp_path / "read-only")  # root may do all
    monkeypatch.setattr(os, "access", lambda path, how: path != read_only and may(path, how))
    reasons = {
        read_only: "Permission denied",
        str(tmp_path / "loop"): "Too many levels",
        str(tmp_path): "Is a directory",
        f"{tmp_path}/new/": "Is a directory",
        str(tmp_path / "pipe"): "it is no plain file",
    }
    for path, reason in reasons.items():
        with pytest.raises(messages.UserError, match=f"{path} cannot be written .{reason}"):
            files.write_file(path, "plan")
        with pytest.raises(messages.UserError, match=f"--f {path}: cannot be written .{reason}"):
            files.check_place(path, "--f")
    assert sorted(os.listdir(tmp_path)) == ["loop", "pipe", "read-only"]


def test_what_killed_writers_left_unfinished_is_removed_and_nothing_of_others(tmp_path):
    path, other = str(tmp_path / "ranks"), str(tmp_path / "other.part")
    for part in (files.part_of(path), files.part_of(str(tmp_path / "other")), other):
        with open(part, "w") as f:
            f.write("x")
    with files.replacing(path) as first:  # another program writes the same file meanwhile
        files.write_file(path, "second")
        assert len(os.listdir(tmp_path)) == 4 and os.path.exists(first.name)
        first.write(b"first")
    assert files.read_file(path) == b"first"
    with locks.alone_in(str(tmp_path), "--output x", "--output"):
        assert sorted(os.listdir(tmp_path)) == ["lock", "other.part", "ranks"]


def test_a_signal_that_ends_the_process_gives_back_the_lock_and_removes_what_is_half_written(
    tmp_path,
):
    with (
        locks.alone_in(str(tmp_path), "--output x", "--output"),
        pytest.raises(OSError),
        files.replacing(str(tmp_path / "ranks")) as f,
    ):
        f.write(b"half")
        interrupts.give_back()  # as the thread of signals does, while this one goes its way
        assert os.listdir(tmp_path) == []
    assert os.listdir(tmp_path) == []


# --- Signals ------------------------------------------------------------------------------------------------------


def test_a_third_signal_ends_at_once_and_says_what_is_lost(train, tmp_path, monkeypatch):
    heard, save = [], checkpointing.Checkpoints.save

    def signalled(checkpoints, step, *rest):
        checkpoints.finish()
        for n in range(3 if step == 6 else 0):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: len(heard) > n)
        save(checkpoints, step, *rest)

    monkeypatch.setattr(checkpointing.Checkpoints, "save", signalled)
    monkeypatch.setattr(processes, "say", heard.append)
    monkeypatch.setattr(interrupts, "end", lambda *what: heard.append(what))
    assert train(**TINY, training_steps=6, save_steps=4) == 0
    first, second, third = heard
    assert first == "SIGTERM: stopping after this step, with a checkpoint"
    assert second.endswith("; a third signal ends it at once, losing the steps from 5 to 6")
    assert third == (128 + signal.SIGTERM, "SIGTERM: ended at once, losing the steps from 5 to 6")
    assert sorted(os.listdir(tmp_path / "runs/run/checkpoints")) == ["4", "6"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, processes.Interrupt.FAILED])
def test_a_stop_at_a_save_step_loses_no_samples(train, tmp_path, monkeypatch, stop):
    def asked(*_):
        steps_done.append(1)
        return stop if len(steps_done) == 4 else 0

    steps_done = []
    monkeypatch.setattr(
        main, "make_sampler", lambda *_: lambda params: [str(params["embedding"][0, 0])]
    )
    flags = {**TINY, "training_steps": 6, "save_steps": 2}
    assert train(**flags, name="whole") == 0
    with monkeypatch.context() as patch, contextlib.suppress(messages.UserError):
        patch.setattr(processes.Interrupt, "agreed", asked)
        assert train(**flags) == 128 + stop
    assert train(**flags) == 0
    samples = [(tmp_path / "runs" / name / "samples.txt").read_text() for name in ("whole", "run")]
    assert samples[0] == samples[1] and samples[0].count("=== step") == 3


def test_an_interrupt_while_jax_is_imported_is_one_line(tmp_path):
    """Whoever imports jax, and all of its group, are sent SIGINT, as from a terminal."""
    fake = "import os, signal, time\nos.killpg(0, signal.SIGINT)\ntime.sleep(600)\n"
    (tmp_path / "jax.py").write_text(fake)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    lost = "interrupted while no step was in progress; nothing was lost"
    pipes = dict(capture_output=True, text=True, timeout=300, start_new_session=True)
    for words, said in ((["main.py"], lost), (["tools/sample.py", "x"], "interrupted")):
        done = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, **pipes)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", said + "\n"), words


def test_signals_are_heard_before_anything_else_is_imported():
    """Ctrl-C during an import ends in a traceback, if it is not heard yet."""
    program = f"""
import os, sys  # which Python itself has imported by then
sys.path.insert(0, {str(ROOT)!r})
before = set(sys.modules)
from runtime import interrupts
print(*set(sys.modules) - before)
"""
    words = [sys.executable, "-S", "-c", program]  # -S: without what is installed
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"runtime", "runtime.interrupts", "_signal"}


# --- Storage without a network, or without rights -----------------------------------------------------------------


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with one status."""

    def answer(self):
        self.send_response_only(self.server.status)
        self.end_headers()

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def denied(monkeypatch):
    """Storage that answers so to all requests."""
    pytest.importorskip("gcsfs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    server.status = 403
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(files, "WAITS", (0,) * 6)
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    yield
    server.shutdown()
    fsspec.get_filesystem_class("gs").clear_instance_cache()


def test_missing_rights_are_one_sentence_and_nothing_else(denied, train, tmp_path, caplog, capfd):
    source = SimpleNamespace(source="gs://bucket/a.jsonl", text_column="text", skip_damaged=False)
    works = [
        lambda: files.write_file("gs://bucket/x", "content"),
        lambda: open_source(source),
        lambda: train(data="gs://bucket/x"),
        lambda: train(output_dir="gs://bucket/x"),
        lambda: train(init_from="gs://bucket/x"),
    ]
    for work in works:
        said = r"^[^\n]*gs://bucket/\S* cannot be used.*credentials are good for it\.$"
        with pytest.raises(messages.UserError, match=said):
            work()
    assert caplog.text == "" and "Traceback" not in capfd.readouterr().err


def test_storage_that_does_not_answer_is_tried_for_a_minute_with_a_word(monkeypatch, capsys):
    def fails():
        now[0] += 20  # its library tried again, too
        tries.append(now[0])
        raise OSError("no network")

    now, tries = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
    monkeypatch.setattr(files, "time", clock)
    with pytest.raises(messages.UserError, match="gs://bucket/x cannot be used .OSError: no netw"):
        files.persist(fails, "gs://bucket/x")
    assert tries == [20, 40, 60, 80], "no try begins later than a minute"
    said = capsys.readouterr()
    assert said.err == "warning: gs://bucket/x (OSError: no network); trying again\n"
    with pytest.raises(OSError):
        files.persist(fails, "/local")
    with pytest.raises(messages.UserError, match="foo://x: is no address that can be used .*foo"):
        files.read_file("foo://x")


# --- Two processes ------------------------------------------------------------------------------------------------

# main.py with faults: argv[1] is {"bad": steps whose batches give a NaN, "pause": seconds to read a batch, "launched":
# file that gets a line for every step, "unreadable": step whose batch this process cannot read}
DRIVER = """
import json, sys, time
faults = json.loads(sys.argv.pop(1))
sys.path.insert(0, ROOT)
import utils
from runtime import messages, platforms
from training import command_line
flags = command_line.parse(sys.argv[1:])
platforms.set_xla_flags(2, 2)
import jax
import jax.numpy as jnp
import numpy as np
import dataset, main, model
from runtime import processes

cfg = flags.cfg
per_step = cfg.data.train_batch_size * 2
bad = dataset.Mixture(cfg, "train").sequences((np.array(faults["bad"]) - 1) * per_step, seed=0)[:, :-1]
model.make_loss = poisoned(model.make_loss, bad)
put_batch, begin = main.put_batch, processes.Watchdog.begin

def slow(order, first, shape, mesh):
    time.sleep(faults.get("pause", 0))
    if first == (faults.get("unreadable", 0) - 1) * per_step:
        raise messages.UserError("this shard is damaged.")
    return put_batch(order, first, shape, mesh)

def counted(watchdog, name, step):
    if name == "training" and faults.get("launched"):
        open(faults["launched"], "a").write(f"{step}\\n")
    begin(watchdog, name, step)

main.put_batch, processes.Watchdog.begin = slow, counted
sys.exit(messages.one_sentence(lambda: main.run(flags)))
"""
BAD = [5, 6, 31, 32, 33]  # the last three send the run back to step 20
SAVE = 20
STEPS = 120


class Pair:
    """Two processes that train together, each under a supervisor, with the faults of `DRIVER`."""

    def __init__(self, folder, shards, cache, name, faults, restarts):
        self.folder, self.run = folder / name, folder / "runs" / name
        self.folder.mkdir()
        (self.folder / "driver.py").write_text(
            f"ROOT = {str(ROOT)!r}\n{inspect.getsource(poisoned)}{DRIVER}"
        )
        flags = {**SMALL, **TINY, "n_device_axis": (2, 1, 1), "n_devices": 2}
        flags |= dict(train_batch_size=4, val_batch_size=4, eval_every=10 * SAVE, eval_steps=1)
        flags |= dict(output_dir=folder / "runs", data=shards, name=name, compilation_cache=cache)
        flags |= dict(save_steps=SAVE, max_bad_steps=3, peer_timeout=20, training_steps=STEPS)
        flags |= dict(num_processes=2, coordinator=f"127.0.0.1:{free_port()}")
        env = {**os.environ, "XLA_FLAGS": XLA_FLAGS, "RESTART_PAUSE": "0"}
        env.pop("TF_CPP_MIN_LOG_LEVEL", None)  # jax sets it here
        supervise = ["bash", ROOT / "tools/cluster/supervise.sh", str(restarts)]
        self.supervisors = []
        for i in range(2):
            own = self.folder / str(i)
            own.mkdir()
            faults_here = {key: v[i] if key == "unreadable" else v for key, v in faults.items()}
            faults_here |= {"bad": BAD, "launched": str(own / "launched")}
            program = [sys.executable, self.folder / "driver.py", json.dumps(faults_here)]
            words = [*supervise, own, *program, "--preset", "tiny"]
            words += flags_of(**flags, process_id=i)
            with open(own / "log", "w") as log:
                out = dict(stdout=log, stderr=subprocess.STDOUT)
                self.supervisors.append(subprocess.Popen(words, env=env, **out))

    def log(self, i):
        return (self.folder / str(i) / "log").read_text()

    def launched(self):
        path = self.folder / "0" / "launched"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pid(self, i):
        try:
            return int((self.folder / str(i) / "pid").read_text())
        except (OSError, ValueError):  # between two lives
            return None

    def wait(self):
        return [supervisor.wait(300) for supervisor in self.supervisors]

    def end(self):
        for i, supervisor in enumerate(self.supervisors):
            supervisor.terminate()
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.pid(i), signal.SIGKILL)
            supervisor.wait(30)


@pytest.fixture(scope="module")
def pair(shards, xla_cache, tmp_path_factory):
    """`pair(name, restarts, **faults)` -> a `Pair` that has begun; all end with the tests of this file."""
    folder, pairs = tmp_path_factory.mktemp("pairs"), []

    def pair(name, restarts=0, **faults):
        pairs.append(Pair(folder, shards, xla_cache, name, faults, restarts))
        return pairs[-1]

    yield pair
    for one in pairs:
        one.end()


@pytest.fixture(scope="module")
def undisturbed(pair):
    """meta of the last checkpoint, with its fingerprint, of a run that nothing but its data disturbed."""
    whole = pair("whole")
    assert whole.wait() == [0, 0], whole.log(0) + whole.log(1)
    assert all("rollback 1 of 3 to step 20" in whole.log(i) for i in range(2))
    return meta_of(whole.run, STEPS), metrics_of(whole.run)


KILLS = int(os.environ.get("FAULT_KILLS", 2))


def test_killed_again_and_again_the_run_is_the_same(pair, undisturbed):
    """kill -9 of either process, at moments spread over the interval between saves and so within saves too."""
    rng = random.Random(KILLS)
    disturbed = pair("killed", restarts=99, pause=0.06)
    # steps since a multiple of SAVE
    after = [SAVE * (n + rng.random()) / KILLS for n in range(KILLS)]
    rng.shuffle(after)
    lives = 0
    for n, further in enumerate(after):
        at = min(40 + SAVE * (n * 5 // KILLS), STEPS - 2 * SAVE) + further
        seen = len(disturbed.launched())
        wait_for(lambda: len(disturbed.launched()) > seen and disturbed.launched()[-1] >= int(at))
        time.sleep(0.06 * (at % 1))
        victim = rng.randrange(2)
        os.kill(disturbed.pid(victim), signal.SIGKILL)
        lives += 1
        wait_for(
            lambda: all(disturbed.log(i).count("starting it again") >= lives for i in range(2))
        )
    assert disturbed.wait() == [0, 0], disturbed.log(0) + disturbed.log(1)
    said = disturbed.log(0) + disturbed.log(1)
    assert "error: another process of this run was lost; its log says why" in said
    assert "Traceback" not in said, said
    meta, rows = undisturbed
    assert meta_of(disturbed.run, STEPS) == meta and metrics_of(disturbed.run) == rows
    lost = len(disturbed.launched()) - STEPS
    print(f"{KILLS} kills: {lost} steps were run again, {lost / KILLS:.1f} a kill")
    # A kill within a save loses what came after the save before. The rollback loses 14: from 34 back to 20.
    assert lost <= KILLS * 2 * SAVE + 14
    assert not list((disturbed.run / "checkpoints").glob("*tmp*"))


def test_one_process_that_cannot_write_fails_the_save_of_all_at_once(pair, undisturbed):
    """As on a full disk; training continues, and the next save is sound."""
    some = pair("full", pause=0.05)
    wait_for(lambda: max(some.launched(), default=0) > 45)
    resource.prlimit(some.pid(1), resource.RLIMIT_FSIZE, (9000, -1))
    wait_for(lambda: all("checkpoint 60 could not be written" in some.log(i) for i in range(2)))
    wait_for(lambda: sorted(os.listdir(some.run / "checkpoints")) == ["20", "40"])
    resource.prlimit(some.pid(1), resource.RLIMIT_FSIZE, (-1, -1))
    assert some.wait() == [0, 0], some.log(0) + some.log(1)
    assert meta_of(some.run, STEPS)["fingerprint"] == undisturbed[0]["fingerprint"]


def test_what_one_process_cannot_read_ends_both_after_a_checkpoint(pair):
    one = pair("unreadable", unreadable=[0, 48])
    assert one.wait() == [2, 2], one.log(0) + one.log(1)
    assert one.log(1).splitlines()[-1] == "error: this shard is damaged."
    assert one.log(0).splitlines()[-1] == "error: another process failed; its log says why."
    steps = sorted(int(p.name) for p in (one.run / "checkpoints").iterdir())
    assert steps == [20, 34] and meta_of(one.run, 34)["sequences"] == (48 - 1) * 8
