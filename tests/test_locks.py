"""The lock of a folder: who holds it, who is dead, what comes late. `python -m tests.soak locks` draws more races."""

import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from helpers import ROOT, TINY, refusal, wait_for
from storage_servers import storage_server

from runtime import files, interrupts, lock_storage, locks, messages, processes
from tests.soak import locks as races

HOLD = """
import sys, time
from runtime import interrupts, locks
locks.BEAT = locks.POLL = 0.1
locks.DEAD = float(sys.argv[2])
locks.FRESH = locks.DEAD / 2
def main():
    with locks.alone_in(sys.argv[1], "output", "x", "output") as held:
        print("in", flush=True)
        while True:
            held.confirm()
            time.sleep(0.1)
interrupts.run(main)
"""
# a container's numbers and name
BOX = "unshare --pid --fork --kill-child --mount-proc --uts sh -c".split()


def alone(folder):
    return locks.alone_in(str(folder), "output", "x", "output")


def hold(folder, dead=60, host=None):
    """A process that holds a folder. dead: its seconds without a beat; host: in a container of this name."""
    words = [sys.executable, "-c", HOLD, str(folder), str(dead)]
    if host:
        words = [*BOX, f'hostname {host}; exec "$@"', "sh", *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(words, cwd=ROOT, **pipes)


def lines_until_in(process):
    said = ""
    while not said.endswith("in\n"):
        line = process.stdout.readline()
        assert line, process.communicate()
        said += line
    return said


@pytest.mark.parametrize(
    "place, count", [("local", 60), ("no flock", 60), ("memory", 60), ("gs", 6), ("s3", 4)]
)
def test_of_processes_that_race_one_is_in(place, count, tmp_path, monkeypatch):
    """Whatever pauses, deaths, and requests and answers that get lost are drawn."""
    with mock.patch.dict(os.environ):
        try:
            for number in range(count):
                folder = {kind: f"{kind}://bucket/{number}" for kind in ("gs", "s3")}
                folder["memory"] = f"memory://races/{number}"
                rng = random.Random(f"{place} {number}")
                world, tried = races.race(
                    rng, place, folder.get(place, str(tmp_path / str(number)))
                )
                assert not world.wrong, "\n".join([tried, world.wrong, *world.said])
        finally:
            races.close_servers()


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def folder(request, tmp_path, monkeypatch):
    kind = request.param
    with ExitStack() as stack:
        if kind in ("gs", "s3"):
            proxy, _, env = stack.enter_context(storage_server(kind))
            proxy.most = 0
            for name, value in env.items():
                monkeypatch.setenv(name, value)
        yield {"local": str(tmp_path), "memory": f"memory:/{tmp_path}"}.get(
            kind, f"{kind}://bucket/it"
        )


def test_a_write_that_comes_late_changes_nothing(folder):
    """As that of a process which was paused between its look and its write."""
    one, other = (
        lock_storage.open_storage(f"{folder}/lock", locks.this_process() | dict(token=token * 16))
        for token in "ab"
    )
    first = one.put(None, 1)
    second = one.put(first, 2)
    for late in (None, first):
        assert other.put(late, 1) is None
    other.remove(first)
    assert one.find()[:2] == second[:2]
    taken = other.put(second, 2)
    assert one.put(second, 3) is None
    one.remove(second)
    assert one.find()[:2] == taken[:2] == other.find()[:2] and one.find().token == "b" * 16
    other.remove(taken)
    assert one.find() is None
    if not files.is_remote(folder):
        assert os.listdir(folder) == []


def test_only_this_system_proves_who_is_dead():
    """By number and start of a process, where both mean the same."""
    me = locks.this_process()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = me | dict(pid=child.pid, started=locks.state_of(child.pid)[1])
    assert me["system"] and locks.is_alive(me) is locks.is_alive(its) is True
    assert locks.is_alive(its | dict(host="renamed")) is True
    assert locks.is_alive(me | dict(started="5")) is False  # its number is another's now
    for unknown in (
        dict(system=""),
        dict(system="x"),
        dict(pid="?"),
        dict(pid=0),
        dict(started=""),
    ):
        assert locks.is_alive(me | unknown) is None, unknown
    child.kill()
    wait_for(lambda: locks.state_of(child.pid)[0] == "Z")
    assert locks.is_alive(its) is False
    child.communicate()
    assert locks.is_alive(its) is False
    assert locks.is_alive(lock_storage.UNKNOWN) is None


def test_a_run_directory_is_one_process_alone(train, tmp_path, capsys, monkeypatch):
    run, flags = tmp_path / "runs" / "run", dict(TINY, training_steps=2)
    holder = hold(run)
    try:
        assert lines_until_in(holder) == "in\n"
        said = f"process {holder.pid} on {socket.gethostname()} has been writing to {run}"
        with pytest.raises(messages.Unavailable, match=said):
            train(**flags)
        refusal(lambda: train(**flags), said, "; wait for its end, or give another --name.")
        assert [p.name for p in run.iterdir()] == ["lock"]
        # of two processes the one that does not ask for the lock is refused too
        one = SimpleNamespace(folder=str(run), output_dir=str(run.parent))
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_index", lambda: 1)
            patch.setattr(processes, "largest_of", lambda here: processes.ENDS.index(2))
            refusal(processes.alone_in_folder(one).__enter__, "another")
    finally:
        holder.kill()
        holder.communicate()
    assert locks.is_held(str(run))
    assert train(**flags) == 0
    said = f"{run} is taken over from process {holder.pid}, which ended without releasing it"
    assert said in capsys.readouterr().out and not locks.is_held(str(run))
    assert "lock" not in os.listdir(run)
    flags |= dict(output_dir=tmp_path / "other", data=tmp_path / "nowhere")
    refusal(lambda: train(**flags), "--data")
    assert not (tmp_path / "other" / "run").exists(), "a refusal leaves nothing"


def test_containers_share_number_and_name_and_no_folder(tmp_path):
    """One that lives is not taken over, one that is killed is, under whatever name, and one that was paused for too
    long ends."""
    if subprocess.run([*BOX, "hostname box"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may make no namespaces")
    started = []

    def start(*words):
        started.append(hold(tmp_path / "run", *words))
        return started[-1]

    try:
        first = start(60, "localhost")
        assert lines_until_in(first) == "in\n"
        second = start(60, "localhost")
        out, err = second.communicate()
        assert second.returncode == messages.Unavailable.status and "waiting up to 60 s" in out
        assert "process 1 on localhost has been writing to" in err and err.count("\n") == 1
        first.kill()
        third = start(1, "renamed")
        said = lines_until_in(third)
        assert "is taken over from process 1 on localhost, which gave no sign of life" in said
        (child,) = Path(f"/proc/{third.pid}/task/{third.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        fourth = start(1, "renamed")
        assert "is taken over from process 1 on renamed" in lines_until_in(fourth)
        os.kill(int(child), signal.SIGCONT)
        out, err = third.communicate()
        assert third.returncode == 75 and "gave no sign of life for" in err and err.count("\n") == 1
        assert fourth.poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.fixture
def ends(monkeypatch):
    """What a process ended itself with."""
    monkeypatch.setattr(locks, "ANSWER", 1)
    ended = []
    monkeypatch.setattr(interrupts, "end", lambda *what: ended.append(what))
    return ended


def test_a_lock_that_a_person_removed_is_made_again(tmp_path, ends):
    with alone(tmp_path) as held:
        shutil.rmtree(tmp_path / "lock")
        held.asked.set()
        wait_for((tmp_path / "lock").exists)
        held.confirm()
    assert ends == [] and os.listdir(tmp_path) == []


def test_a_holder_that_lost_its_lock_ends_and_writes_nothing(tmp_path, ends):
    """Because another has it, or had it while this one was away."""
    for is_there in (True, False):
        with alone(tmp_path) as held:
            shutil.rmtree(tmp_path / "lock")
            if is_there:
                other = alone(tmp_path)
                other.__enter__()
            before = os.listdir(tmp_path)
            held.confirmed = -math.inf
            refusal(held.confirm, "could not be renewed")
            assert os.listdir(tmp_path) == before
        status, words = ends.pop()
        assert status == 75 and "another process may have written there" in words
        if is_there:
            assert locks.is_held(str(tmp_path)), "its release leaves the other's"
            other.__exit__(None, None, None)


def test_while_storage_is_away_nothing_is_confirmed(tmp_path, ends, capsys, monkeypatch):
    with alone("memory://away") as held:

        def fails(*_):
            raise ConnectionError("503 Slow Down")

        with monkeypatch.context() as patch:
            patch.setattr(held.storage, "write", fails)
            held.asked.set()
            held.confirm()  # at once, after the beat that it began with
            held.confirmed -= locks.FRESH
            refusal(held.confirm, "memory://away/lock could not be renewed for ")
        held.confirm()
    said = capsys.readouterr()
    assert said.err.count("(ConnectionError: 503 Slow Down); trying again") == 1
    assert "is renewed again" in said.out and ends == []


def test_what_no_process_left_as_a_lock_stays(tmp_path):
    """A person's file or folder of that name."""
    (tmp_path / "file").mkdir()
    (tmp_path / "file/lock").write_text("notes")
    (tmp_path / "folder/lock").mkdir(parents=True)
    (tmp_path / "folder/lock/notes").write_text("")
    for name in ("file", "folder"):
        refusal(alone(tmp_path / name).__enter__, f"{name}/lock: is no lock of a program")
    assert (tmp_path / "file/lock").read_text() == "notes"
    assert (tmp_path / "folder/lock/notes").exists()


@pytest.mark.parametrize(
    "content", ["", "{", json.dumps(dict(host="faraway", pid=5, since="noon"))]
)
def test_a_torn_or_older_lock_is_waited_for(tmp_path, capsys, monkeypatch, content):
    monkeypatch.setattr(locks, "DEAD", 0.1)
    monkeypatch.setattr(locks, "POLL", 0.02)
    (tmp_path / "lock").write_text(content)
    with alone(tmp_path):
        first, second = capsys.readouterr().out.splitlines()
    who = "process 5 on faraway" if "faraway" in content else "process ? on a host"
    assert f"{who} has held its lock since" in first and "waiting up to 0.1 s" in first
    assert f"is taken over from {who}, which gave no sign of life for 0.1 s" in second


def test_a_signal_gives_back_the_lock_and_removes_what_is_half_written(tmp_path):
    unfinished = files.replacing(str(tmp_path / "ranks"))
    with alone(tmp_path), pytest.raises(OSError), unfinished as f:
        f.write(b"half")
        interrupts.release_all()  # as the thread of signals does, while this one goes its way
        assert os.listdir(tmp_path) == []
    assert os.listdir(tmp_path) == []
