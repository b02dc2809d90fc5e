"""What goes wrong in a run: numbers that are not finite, disks that are full, damaged checkpoints, killed processes."""

import contextlib
import inspect
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, TINY, XLA_FLAGS, flags_of, free_port, metrics_of, refusal, wait_for
from small_models import SMALL, given

import model
import train as training_program
import utils
from config import command_line, presets
from data.sources.formats import open_source
from inference import sampling
from runtime import files, interrupts, locks, messages, processes
from runtime.jax_setup import configure_jax, quiet_libraries
from shards.mixture import Mixture
from shards.storage import Shard
from tools import checkpoints as tool
from tools import hf
from training import checkpointing
from training.bad_steps import BadSteps, Rollback

PER_STEP = 8  # sequences


def observed(limit, losses, norm=1.0):
    """`BadSteps` after steps with these losses."""
    bad_steps = BadSteps(limit)
    for step, loss in enumerate(losses, 1):
        bad_steps.observe(step, PER_STEP * step, loss, norm)
    return bad_steps


def test_single_bad_steps_are_counted_and_cause_no_rollback(capsys):
    bad_steps = observed(3, [4.0, math.nan, math.inf, 4.0, -math.inf, 4.0])
    assert (bad_steps.total, bad_steps.consecutive, bad_steps.due) == (3, 0, None)
    said = r"warning: step (\d) is skipped, its loss is (\S+) and .*\((\d) in a row\)"
    found = re.findall(said, capsys.readouterr().out)
    assert found == [("2", "nan", "1"), ("3", "inf", "2"), ("5", "-inf", "1")]
    assert observed(0, [math.nan] * 50).due is None
    for norm in (math.nan, math.inf):
        assert observed(2, [4.0, 4.0], norm).due == Rollback(1, 2 * PER_STEP, bad_steps=2)


def poisoned(cfg, steps, per_step):
    """`model.make_loss` whose training loss is not finite on batches that an undisturbed run has at these steps."""
    make_loss, first = model.make_loss, (np.array(steps) - 1) * per_step
    bad = Mixture(cfg, "train").sequences(first, seed=0)[:, :-1]

    def make(cfg, mesh, train):
        loss = make_loss(cfg, mesh, train)

        def not_finite(params, tokens, targets, key, first):
            value, seen = loss(params, tokens, targets, key, first)
            return jnp.where((tokens[0, 0] == bad).all(-1).any(), jnp.nan, 1.0) * value, seen

        return not_finite if train else loss

    return make


@pytest.fixture
def poison(shards, monkeypatch):
    cfg = utils.replace(presets.preset("tiny"), data=str(shards), T=16, vocab_size=250)
    return lambda steps: monkeypatch.setattr(model, "make_loss", poisoned(cfg, steps, PER_STEP))


def meta_of(run, step):
    return json.loads((run / "checkpoints" / str(step) / "meta" / "metadata").read_text())


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
        skipped = re.findall(r"step (\d) is skipped, its loss is nan", capsys.readouterr().out)
        assert skipped == {8: ["7", "8"], 9: ["9"]}.get(end, [])
    for row, same in zip(metrics_of(runs / "parts"), rows, strict=True):
        assert row | same == row  # it has evaluated where it was to end
    assert meta_of(runs / "parts", 12) == meta_of(runs / "whole", 12)  # with the fingerprint


def test_after_three_rollbacks_the_run_ends(train, poison, tmp_path, capsys):
    poison(range(6, 60))
    # no save among bad steps displaces the one checkpoint
    flags = dict(TINY, max_bad_steps=3, save_steps=4, training_steps=50, keep_checkpoints=1)
    for _ in range(2):
        ends = "--max_bad_steps 3: 3 steps ", " from step 5 on ", "after 3 rollbacks"
        refusal(lambda: train(**flags), *ends)
        said = capsys.readouterr().out
        assert len(re.findall("rollback . of 3 to step 4", said)) == 3
    assert [p.name for p in (tmp_path / "runs/run/checkpoints").iterdir()] == ["4"]


def state_of(seed, n=3000):
    rng = np.random.default_rng(seed)
    params = {"a": jnp.array(rng.normal(size=n), jnp.float32), "b": jnp.arange(7)}
    return {"params": params, "step": jnp.int32(seed)}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2; not to be written to."""
    quiet_libraries()  # as every program that reads checkpoints does
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpoints = checkpointing.Checkpoints(str(folder), 3)
    for step, loss in {1: 1.5, 2: None}.items():
        checkpoints.save(step, state_of(step), 8000 * step, {}, loss)
    checkpoints.close()
    return folder


def restored(folder):
    """The step that is restored from a folder, whose state must be that one's."""
    checkpoints = checkpointing.Checkpoints(str(folder), 3)
    state, meta = checkpoints.restore(state_of(0))
    checkpoints.close()
    assert jax.tree.all(jax.tree.map(np.array_equal, state, state_of(meta["step"])))
    return meta["step"]


def change_meta(checkpoint, sealed, **changes):
    """sealed: with the sum of what is there now."""
    path = checkpoint / "meta" / "metadata"
    meta = json.loads(path.read_text()) | changes
    if sealed:
        meta["sum"] = checkpointing.meta_sum(meta)
    path.write_text(json.dumps(meta))


DAMAGED = {  # what becomes of checkpoint 2
    "arrays": lambda at: change_meta(at, sealed=True, fingerprint=[1, 2]),
    "array metadata": lambda at: next((at / "state/array_metadatas").iterdir()).write_text("{"),
    "a file is a folder": lambda at: [(p.unlink(), p.mkdir()) for p in (at / "state/d").iterdir()],
    "cut off": lambda at: [os.truncate(path, 99) for path in (at / "state/d").iterdir()],
    "no meta": lambda at: shutil.rmtree(at / "meta"),
    "meta is a list": lambda at: (at / "meta/metadata").write_text("[1]"),
    "another position": lambda at: change_meta(at, sealed=False, sequences=8000),
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
    monkeypatch.setattr(interrupts, "words", interrupts.NOTHING_LOST)
    assert train(**TINY, training_steps=1) == 75
    assert interrupts.words == "interrupted; the steps from 1 to 1 are lost"
    done = capsys.readouterr()
    assert "the last checkpoint, of step 1, could not be written; make room and rerun" in done.err
    assert "done at" not in done.out and "saved in" not in done.out, "one ending"


def test_a_path_that_orbax_would_misread_is_refused_before_anything_is_written(
    train, tmp_path, monkeypatch
):
    """Brackets, wherever in the path they come from; what other links and characters it has does not matter."""
    inside = tmp_path / "b[1]"
    for folder in (inside, tmp_path / "plain"):
        folder.mkdir()
    (tmp_path / "to_inside").symlink_to(inside)
    (tmp_path / "l[1]").symlink_to("plain")
    monkeypatch.chdir(inside)
    places = ["runs", ".", tmp_path / "to_inside", tmp_path / "a[b", "../a]b"]
    places += [tmp_path / name for name in ("a**b", "a\\b", "gs:", "\udce9")]
    before = sorted(tmp_path.rglob("*"))
    for place in [*places, "gs://bucket/a[1]"]:
        refusal(lambda: train(output_dir=place), "/run: no checkpoint can be saved", "--output_dir")
        words = ["--preset", "tiny", "--output_dir", str(place)]
        if "://" in str(place):
            refusal(lambda: command_line.check(words, elsewhere=True), "no checkpoint can be saved")
        else:  # another machine has other links and another folder to begin in
            command_line.check(words, elsewhere=True)
    asked = hf.Options("import", "hf://is/not-asked-for", "imported [x]")
    refusal(lambda: hf.main(asked), f"{inside}/imported [x]: no checkpoint can be saved")
    assert sorted(tmp_path.rglob("*")) == before, "a refusal leaves nothing"
    odd = tmp_path / "l[1]/*?{a,b} %20#é'~"
    for training_steps in (1, 2):
        assert train(**TINY, output_dir=odd, training_steps=training_steps) == 0
    assert [row["step"] for row in metrics_of(odd / "run")] == [1, 2]


def test_a_checkpoint_that_cannot_be_read_back_is_a_save_that_failed(
    train, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(checkpointing, "check_run_path", lambda *_: None)
    monkeypatch.setattr(training_program, "check_run_path", lambda *_: None)
    flags = dict(TINY, output_dir=tmp_path / "b[1]", training_steps=4, save_steps=2)
    assert train(**flags) == 75
    said = capsys.readouterr()
    for step in (2, 4):
        assert f"checkpoint {step} could not be written (its arrays cannot be read" in said.err
    assert "the last checkpoint, of step 4, could not be written" in said.err
    assert "saved in" not in said.out
    assert os.listdir(tmp_path / "b[1]/run/checkpoints") == []

    read_back = checkpointing.Checkpoints._read_back

    for error in checkpointing.Unreadable, TimeoutError:

        def fails(checkpoints, step, error=error):
            read_back(checkpoints, step)
            if step == 2:
                raise error("on its way")

        monkeypatch.setattr(checkpointing.Checkpoints, "_read_back", fails)
        folder = tmp_path / error.__name__
        one = checkpointing.Checkpoints(str(folder), keep=1)
        for step, newest in ((1, 1), (2, 1), (3, 3)):
            one.save(step, state_of(step), step, {})
            one.finish()
            there = {str(newest)}  # the older one stays
            if step == 2 and error is TimeoutError:  # and what may be sound
                there.add("2")
            assert (one.on_disk, set(os.listdir(folder))) == (newest, there)
            assert one.saved == (None if step == 2 else step)
        one.close()
        assert restored(folder) == 3


def test_checkpoints_are_listed_and_verified(two_checkpoints, tmp_path, capsys):
    def run():
        tool.main(tool.Options(str(tmp_path)))
        return capsys.readouterr().out.splitlines()

    refusal(run, "there are no checkpoints in it")
    shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    listed = ["1  sound, after 8,000 sequences, validation loss 1.5000"]
    assert run() == [*listed, "2  sound, after 16,000 sequences"]
    for part in (tmp_path / "checkpoints/2/state/d").iterdir():
        os.truncate(part, 9)
    refusal(run, "1 of 2 checkpoints are damaged")
    assert "2  damaged: " in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_one_sentence_before_compiling(train, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", "/proc"):
        refusal(lambda: train(**TINY, output_dir=place), " cannot be written (")
    configure_jax(utils.replace(utils.Config(), compilation_cache="/proc/cache"))
    said = capsys.readouterr().err
    assert said.startswith("warning: --compilation_cache /proc/cache/entry: cannot be written (")
    files.check_writable(str(tmp_path / "new/plan.json"), "plan_json")
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

    monkeypatch.setattr(os, "fsync", lambda fd: signal.default_int_handler(fd, None))
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
        "/proc/plan.json": "",
        read_only: "Permission denied",
        str(tmp_path / "loop"): "Too many levels",
        str(tmp_path): "it is no plain file",
        f"{tmp_path}/new/": "it is no plain file",
        str(tmp_path / "pipe"): "it is no plain file",
    }
    for path, reason in reasons.items():
        refusal(lambda: files.write_file(path, ""), f"{path} cannot be written ({reason}")
        refusal(lambda: files.check_writable(path, "f"), f"--f {path}: cannot be written ({reason}")
    assert sorted(os.listdir(tmp_path)) == ["loop", "pipe", "read-only"]


def test_what_killed_writers_left_unfinished_is_removed_and_nothing_of_others(tmp_path):
    path = str(tmp_path / "ranks")
    for part in (files.part_of(path), files.part_of(str(tmp_path / "a")), tmp_path / "other.part"):
        Path(part).write_text("x")
    with files.replacing(path) as first:  # another program writes the same file meanwhile
        files.write_file(path, "second")
        assert len(os.listdir(tmp_path)) == 4 and os.path.exists(first.name)
        first.write(b"first")
    assert files.read_file(path) == b"first"
    with locks.alone_in(str(tmp_path), "output", "x", "output"):
        assert sorted(os.listdir(tmp_path)) == ["lock", "other.part", "ranks"]


def test_a_third_signal_ends_at_once_and_says_what_is_lost(train, tmp_path, monkeypatch):
    heard, save = [], checkpointing.Checkpoints.save

    def signalled(checkpoints, step, *rest):
        checkpoints.finish()
        for n in range(3 if step == 6 else 0):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: len(heard) > n)
        save(checkpoints, step, *rest)

    monkeypatch.setattr(checkpointing.Checkpoints, "save", signalled)
    monkeypatch.setattr(processes, "say", lambda words, own: heard.append(words))
    monkeypatch.setattr(interrupts, "end", lambda *what: heard.append(what))
    assert train(**TINY, training_steps=6, save_steps=4) == 0
    first, second, third = heard
    assert first == "SIGTERM: stopping after this step, with a checkpoint"
    assert second.endswith("; a third signal ends it at once, losing the steps from 5 to 6")
    assert third == (128 + signal.SIGTERM, "SIGTERM: ended at once, losing the steps from 5 to 6")
    assert sorted(os.listdir(tmp_path / "runs/run/checkpoints")) == ["4", "6"]


@pytest.mark.parametrize("name", "HUP USR1 USR2 XCPU".split())
def test_what_terminals_batch_systems_and_limits_send_leaves_a_checkpoint(
    name, train, tmp_path, monkeypatch, capsys
):
    """However often: the kernel repeats some of them. What was ignored when the program began stays ignored."""
    number, begin = signal.Signals[f"SIG{name}"], processes.Watchdog.enter
    received = processes.Interrupt._on_signal
    heard = []

    def noted(interrupt, n):
        heard.append(n)
        received(interrupt, n)

    def sent(watchdog, what, step):
        for n in range(4 if (what, step) == ("training", 3) else 0):
            os.kill(os.getpid(), number)
            if signal.getsignal(number) != signal.SIG_IGN:
                wait_for(lambda: len(heard) > n)
        begin(watchdog, what, step)

    monkeypatch.setattr(processes.Watchdog, "enter", sent)
    monkeypatch.setattr(processes.Interrupt, "_on_signal", noted)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert train(**TINY, training_steps=100) == 128 + number
        assert os.listdir(tmp_path / "runs/run/checkpoints") == ["3"] and heard == [number] * 4
        assert f"SIG{name}: stopping after this step, with a checkpoint" in capsys.readouterr().out
        if name == "HUP":
            signal.signal(number, signal.SIG_IGN)
            assert train(**TINY, training_steps=4, name="ignoring") == 0
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_stop_at_a_save_step_loses_no_samples(train, tmp_path, monkeypatch):
    """Whether a signal or an error is its reason."""

    def samples(name):
        assert train(**flags, name=name) == 0
        return (tmp_path / "runs" / name / "samples.txt").read_text()

    monkeypatch.setattr(sampling, "make_sampler", lambda *_: lambda p: [str(p["embedding"][0, 0])])
    flags = TINY | dict(training_steps=4, save_steps=2)
    whole = samples("whole")
    assert whole.count("=== step") == 2
    for stop in (signal.SIGTERM, processes.Interrupt.FAILED):
        asked = iter([0, stop])
        with monkeypatch.context() as patch, contextlib.suppress(messages.UserError):
            patch.setattr(processes.Interrupt, "agreed", lambda *_: next(asked))
            assert train(**flags, name=str(stop)) == 128 + stop
        assert samples(str(stop)) == whole


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


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response_only(403)
        self.end_headers()

    do_POST = do_PUT = do_HEAD = do_GET


def test_missing_rights_are_one_sentence_and_nothing_else(train, monkeypatch, caplog, capfd):
    pytest.importorskip("gcsfs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(files, "WAITS", (0,) * 6)
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    source = SimpleNamespace(source="gs://b/a.jsonl", text_column="text", skip_damaged=False)
    works = [lambda: files.write_file("gs://b/x", "content"), lambda: open_source(source)]
    works += [lambda f=f: train(**{f: "gs://b/x"}) for f in ("data", "output_dir", "init_from")]
    for work in works:
        refusal(work, "gs://b/", " cannot be used", "credentials give access to it.")
    server.shutdown()
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    assert caplog.text == "" and "Traceback" not in capfd.readouterr().err


@pytest.fixture
def clock(monkeypatch):
    """The clock of runtime/files.py, a list of seconds; it goes on when somebody sleeps."""
    now, sleep = [0.0], time.sleep

    def pause(seconds):
        now[0] += seconds
        sleep(0.001)

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pause))
    monkeypatch.setattr(files, "WAITING", files.Waiting())
    return now


def test_storage_that_fails_is_tried_for_a_minute_and_that_is_said(monkeypatch, capsys, clock):
    def fails():
        tries.append(clock[0])
        clock[0] += 20  # its library tried again, too
        raise OSError("no network")

    monkeypatch.setattr(files.random, "uniform", lambda *_: 0)
    tries = []
    said = "gs://bucket/x cannot be used (OSError: no network"
    refusal(lambda: files.persist(fails, "gs://bucket/x"), said)
    assert len(tries) >= 3 and tries[-1] < 70, "no try begins later than a minute"
    lines = capsys.readouterr().err.splitlines()
    assert "warning: gs://bucket/x (OSError: no network): trying again" in lines
    # The thread that watches may wake within a try, and says so in its own words. Its sleep moves the same clock, so on
    # a busy machine the minute may be over after three tries, of which two are tried again.
    assert len(lines) >= 2 and all(line.startswith("warning: gs://bucket/x") for line in lines)
    with pytest.raises(OSError):
        files.persist(fails, "/local")
    refusal(lambda: files.read_file("foo://x"), "foo://x: is no address that can be used (")


def test_storage_that_does_not_answer_is_told_while_it_is_waited_for(capsys, clock):
    """At once and then every few seconds, one line of all calls; nothing when all are answered."""
    answer, lines = threading.Event(), []

    def told():
        lines.extend(capsys.readouterr().err.splitlines())
        return len(lines) >= 6

    pool = ThreadPoolExecutor(3)
    calls = [pool.submit(files.persist, answer.wait, f"gs://b/{n}") for n in range(3)]
    wait_for(told)
    answer.set()
    assert all(call.result() for call in calls)
    wait_for(lambda: files.WAITING.thread is None)
    seconds = [float(re.search(r"after (\d+) s, still waiting", line)[1]) for line in lines]
    assert seconds[0] <= 3 and all(4 <= b - a <= 8 for a, b in zip(seconds, seconds[1:]))
    assert "warning: gs://b/0 and 2 more: " in lines[-1]
    files.persist(lambda: None, "gs://b/x")
    assert capsys.readouterr().err.count("\n") <= 1


def test_an_activity_that_fails_is_over(monkeypatch):
    """The watchdog does not count what saves the run after an error, and one inside another only interrupts it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock.now)
    watchdog = processes.Watchdog(SimpleNamespace(run=SimpleNamespace(stuck_limit=100)))
    watchdog.over.set()
    with pytest.raises(ValueError), watchdog.during("training", 7):
        clock.now += 5
        with watchdog.during("evaluation", 7):
            clock.now += 50
        assert watchdog.now == ("training", 7, 50.0)
        clock.now += 2
        raise ValueError
    assert watchdog.now is None
    assert {name: list(took) for name, took in watchdog.took.items()} == {
        "evaluation": [50],
        "training": [7],
    }


def error_of(status):
    return type("HttpError", (Exception,), dict(code=status))()


PASSES = [error_of(n) for n in (401, 408, 429, 500, 502, 503)] + [
    TimeoutError(),
    OSError(),
    EOFError(),
]
ACTS = [error_of(n) for n in (400, 403, "403", 412)] + [
    PermissionError(),
    Exception("Forbidden: x"),
]
ACTS += [
    type("DefaultCredentialsError", (Exception,), {})(),
    type("NoCredentialsError", (Exception,), {})(),
]
for status, errors in ((503, PASSES), (403, ACTS)):
    response = dict(ResponseMetadata=dict(HTTPStatusCode=status))
    errors.append(type("ClientError", (Exception,), dict(response=response))())


@pytest.mark.parametrize("error", [*PASSES, *ACTS], ids=lambda error: type(error).__name__)
def test_an_outage_ends_a_program_for_another_try_and_a_mistake_for_a_person(error, clock):
    with pytest.raises(messages.UserError) as e:
        files.persist(mock.Mock(side_effect=error), "gs://bucket/x")
    assert (type(e.value) is messages.Unavailable) == (error in PASSES)


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_block_of_a_shard_is_waited_for_as_long_as_an_outage_lasts(status, clock, monkeypatch):
    """Also where it denies access for a while: the run has read this corpus before."""

    class Storage(fsspec.AbstractFileSystem):
        def cat_file(self, path, start, end):
            if clock[0] < 1800:
                raise error_of(status)
            return bytes(end - start)

    monkeypatch.setattr(files, "filesystem", lambda path: (Storage(), path))
    cache = SimpleNamespace(get=lambda *_: b"", put=lambda *_: None)
    shard = Shard("gs://bucket/train/0.npy", {"size": 100}, {}, cache)
    assert bytes(shard._read_bytes(0, 100)) == bytes(100)
    assert 1800 <= clock[0] < 1900


BAD = [5, 6, 31, 32, 33]  # the last three send the run back to step 20
SAVE = 20
STEPS = 110
TOGETHER = given(f"""
    --n_device_axis 2 1 1 --n_devices 2 --num_processes 2 --train_batch_size 4 --val_batch_size 4
    --eval_every {10 * SAVE} --eval_steps 1 --save_steps {SAVE} --keep_checkpoints 9 --max_bad_steps 3
    --training_steps {STEPS} --peer_timeout 20
""")
# main.py whose batches BAD give a NaN. argv[1] is {"pause": seconds to read a batch, "unreadable": step whose batch
# process 1 cannot read}; beside this file process 0 writes a line for every step.
DRIVER = f"""
import json, pathlib, sys, time
faults = json.loads(sys.argv.pop(1))
sys.path.insert(0, {str(ROOT)!r})
import utils
from runtime import messages, platforms
from config import command_line
flags = command_line.parse(sys.argv[1:])
platforms.set_xla_flags(2, 2)
import jax
import jax.numpy as jnp
import numpy as np
import main, model, train
from shards.mixture import Mixture
from runtime import processes

{inspect.getsource(poisoned)}
cfg = flags.cfg
per_step = cfg.data.train_batch_size * 2
model.make_loss = poisoned(cfg, {BAD}, per_step)
put_batch, begin = train.put_batch, processes.Watchdog.enter

def slow(order, first, shape, mesh):
    time.sleep(faults.get("pause", 0))
    if cfg.run.process_id and first == (faults.get("unreadable", 0) - 1) * per_step:
        raise messages.Unavailable("this shard cannot be read.")
    return put_batch(order, first, shape, mesh)

def counted(watchdog, name, step):
    if name == "training" and not cfg.run.process_id:
        print(step, file=pathlib.Path(__file__).with_name("launched").open("a"))
    begin(watchdog, name, step)

train.put_batch, processes.Watchdog.enter = slow, counted
sys.exit(messages.one_sentence(lambda: train.run(flags, main.workbench())))
"""


class Pair:
    """Two processes that train together, each under a supervisor, with the faults of `DRIVER`."""

    def __init__(self, folder, shards, cache, name, faults, restarts):
        self.folder, self.run = folder / name, folder / "runs" / name
        self.folder.mkdir()
        (self.folder / "driver.py").write_text(DRIVER)
        flags = SMALL | TINY | TOGETHER | dict(name=name, compilation_cache=cache, data=shards)
        flags |= dict(output_dir=folder / "runs", coordinator=f"127.0.0.1:{free_port()}")
        env = {**os.environ, "XLA_FLAGS": XLA_FLAGS, "RESTART_PAUSE": "0"}
        env.pop("TF_CPP_MIN_LOG_LEVEL", None)  # jax sets it here
        supervise = ["bash", ROOT / "tools/cluster/supervise.sh", str(restarts)]
        program = [sys.executable, self.folder / "driver.py", json.dumps(faults)]
        program += ["--preset", "tiny"]
        self.supervisors = []
        for i in range(2):
            own = self.folder / str(i)
            own.mkdir()
            words = [*supervise, own, *program, *flags_of(**flags, process_id=i)]
            with open(own / "log", "w") as log:
                out = dict(stdout=log, stderr=subprocess.STDOUT)
                self.supervisors.append(subprocess.Popen(words, env=env, **out))

    def logs(self):
        return [(self.folder / str(i) / "log").read_text() for i in range(2)]

    def launched(self):
        path = self.folder / "launched"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pid(self, i):
        return int((self.folder / str(i) / "pid").read_text())

    def ends(self, status):
        """Both processes end with this status; what each has printed."""
        ended = [supervisor.wait(300) for supervisor in self.supervisors]
        assert ended == [status] * 2, "".join(self.logs())
        return self.logs()

    def kill(self):
        for i, supervisor in enumerate(self.supervisors):
            supervisor.terminate()
            with contextlib.suppress(OSError, ValueError):  # it has ended
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
        one.kill()


@pytest.fixture(scope="module")
def undisturbed(pair):
    whole = pair("whole")
    assert all("rollback 1 of 3 to step 20" in log for log in whole.ends(0))
    return whole.run


def test_killed_again_and_again_the_run_is_the_same(pair, undisturbed):
    """kill -9 of either process, within a save or soon after it, and between two."""
    disturbed = pair("killed", restarts=99, pause=0.06)
    for n, at in enumerate([41, 88]):
        seen = len(disturbed.launched())
        wait_for(lambda: len(disturbed.launched()) > seen and disturbed.launched()[-1] >= at)
        os.kill(disturbed.pid(n), signal.SIGKILL)
        wait_for(lambda: all(log.count("starting it again") > n for log in disturbed.logs()))
    said = "".join(disturbed.ends(0))
    assert "error: another process of this run was lost; its log says why" in said
    assert "Traceback" not in said, said
    assert meta_of(disturbed.run, STEPS) == meta_of(undisturbed, STEPS)  # with the fingerprint
    assert metrics_of(disturbed.run) == metrics_of(undisturbed)
    # A kill within a save loses what came after the save before. The rollback loses 14: from 34 back to 20.
    assert len(disturbed.launched()) - STEPS <= 2 * 2 * SAVE + 14
    assert not list((disturbed.run / "checkpoints").glob("*tmp*"))


def test_what_one_process_cannot_write_or_read_both_know_at_once(pair, undisturbed):
    """After a full disk training continues, and the next save is sound; what cannot be read ends it after a save."""
    some = pair("full", pause=0.05, unreadable=119)
    wait_for(lambda: max(some.launched(), default=0) > 45)
    resource.prlimit(some.pid(1), resource.RLIMIT_FSIZE, (9000, -1))
    wait_for(lambda: all("checkpoint 60 could not be written" in log for log in some.logs()))
    resource.prlimit(some.pid(1), resource.RLIMIT_FSIZE, (-1, -1))
    said = [log.splitlines()[-1] for log in some.ends(messages.Unavailable.status)]
    another = "error: another process failed; its log says why."
    assert said == [another, "error: this shard cannot be read."]
    saved = {int(name) for name in os.listdir(some.run / "checkpoints")}
    assert saved - {80} == {20, 40, 100, 105}, "a busy machine may not have room yet at step 80"
    assert meta_of(some.run, 105)["sequences"] == (119 - 1) * 8
    prints = [meta_of(run, 100)["fingerprint"] for run in (some.run, undisturbed)]
    assert prints[0] == prints[1]
