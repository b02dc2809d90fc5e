"""What the processes of a run agree on before anything is compiled, and with which status they end where one fails."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, XLA_FLAGS, copy_repository, free_port

from runtime import interrupts
from runtime.messages import Unavailable, UserError
from runtime.processes import ANOTHER

# main.py that meets the others and, in place of training, does what argv[1] says.
DRIVER = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from runtime import installation, messages, platforms, processes
from config import command_line
task = sys.argv.pop(1)
flags = command_line.parse(sys.argv[1:])
platforms.set_xla_flags(2, 2)
import train

def fail(error):
    raise error

train.start = lambda *_: processes.on_all(lambda: None) or 0
exec(task)
sys.exit(messages.one_sentence(lambda: train.run(flags, None)))
"""


def start(driver, tasks, flags=("", ""), **environment):
    """A process for each of the tasks."""
    words = "--preset tiny --n_device_axis 2 1 1 --num_processes 2 --peer_timeout 20 --process_id"
    words = ["--coordinator", f"127.0.0.1:{free_port()}", *words.split()]
    env = {**os.environ, "XLA_FLAGS": XLA_FLAGS, **environment}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    begun = []
    for i, task in enumerate(tasks):
        command = [sys.executable, driver, task, *words, str(i), *flags[i].split()]
        begun.append(subprocess.Popen(command, **pipes))
    return begun


def ends(begun):
    """(status, the last error or "") of each process."""
    ended = []
    for process in begun:
        _, said = process.communicate(timeout=300)
        assert "Traceback" not in said and "stack trace" not in said, said
        # C++ may end a line of its own within or after the sentence's
        _, error, words = said.rpartition("error: ")
        ended.append((process.returncode, (error + words).strip() if error else ""))
    return ended


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path / "driver.py"


OTHER_JAX = """
of = installation.version
installation.version = lambda name: "0.10.2" if name == "jax" else of(name)
"""
OTHER_FILE = """
installation.ROOT = pathlib.Path({!r})
with open(installation.ROOT / "architectures/gpt2.py", "a") as f:  # which is not imported yet
    f.write("#")
"""
DIFFER = {  # what makes process 1 another one: (task, flags, what is said)
    "commit": ("installation.commit = lambda: 'abc'", "", "commit abc instead of "),
    "package": (OTHER_JAX, "", "jax 0.10.2 instead of "),
    "file": (OTHER_FILE, "", "architectures/gpt2.py "),
    "flag": ("", "--seed 3", "--seed 3 instead of 0"),
}


@pytest.mark.parametrize("what", ["commit", "package", "file", "flag"])
def test_processes_of_another_program_are_refused_before_they_look_for_devices(
    what, driver, tmp_path
):
    """Each tells what differs, with both values, and all end with the same status."""
    task, flags, said = DIFFER[what]
    if what == "file":
        copy_repository(tmp_path / "copy", "docs")
        task = task.format(str(tmp_path / "copy"))
    alone = "platforms.find_devices = lambda: os._exit(9)\n"
    # of one that has no git only the files tell
    first = "installation.commit = lambda: 'def-dirty'" if what == "commit" else ""
    for status, words in ends(start(driver, [alone + first, alone + task], ["", flags])):
        assert status == UserError.status, words
        assert words.startswith(f"error: process 1 differs from process 0 in {said}"), words


def test_processes_that_agree_meet(driver):
    """A commit that is not known, and flags that each may have its own, are no difference."""
    unknown = "installation.commit = lambda: ''"
    assert ends(start(driver, ["", unknown], ["", "--data x --peer_timeout 19"])) == [
        (0, ""),
        (0, ""),
    ]


def test_a_process_killed_before_it_tells_its_program_is_found_in_time(driver):
    killed = "processes.same_everywhere = lambda *_: os.kill(os.getpid(), 9)"
    first, second = start(driver, ["processes.LINGER = 1", killed])
    said = "error: process 1 did not send its program and flags within 10 s; its log says why."
    assert ends([first]) == [(Unavailable.status, said)]
    assert second.wait() == -9
    second.communicate()


FAIL = "lambda: fail(messages.{}('no.'))"
TOGETHER = f"train.start = lambda *_: processes.on_all({FAIL})"
ALONE = f"train.start = lambda *_: ({FAIL})()"
AGREED, MUST_CHANGE, MAY_PASS = f"error: {ANOTHER}", UserError.status, Unavailable.status
FAILURES = {  # (task of each process, the status with which both end, what each says last)
    "may pass": (["", TOGETHER.format("Unavailable")], MAY_PASS, [AGREED, "error: no."]),
    "must change": (["", TOGETHER.format("UserError")], MUST_CHANGE, [AGREED, "error: no."]),
    "both": (
        [TOGETHER.format(e) for e in ("Unavailable", "UserError")],
        MUST_CHANGE,
        ["error: no."] * 2,
    ),
    "first alone": ([ALONE.format("Unavailable"), ""], MAY_PASS, ["error: no.", AGREED]),
    "second alone": (["", ALONE.format("UserError")], MUST_CHANGE, [AGREED, "error: no."]),
}


@pytest.mark.parametrize("how", FAILURES)
def test_where_one_process_fails_all_end_with_the_same_status(how, driver):
    """Or a supervisor would start some of them again, and not the others."""
    tasks, status, said = FAILURES[how]
    assert ends(start(driver, tasks)) == [(status, words) for words in said]


def test_hosts_in_another_order_than_the_tpus_are_refused(driver):
    swapped = "import jax; jax.process_index = lambda backend=None: 1 - int(sys.argv[-1])"
    ended = ends(start(driver, [swapped, swapped]))
    own = [
        f"error: --process_id {number}: this host is number {1 - number} of its TPU; leave --coordinator out"
        for number in range(2)
    ]
    # one that is more than 3 s behind the other hears of its failure first
    told = [error.startswith(words) for (_, error), words in zip(ended, own, strict=True)]
    assert any(told), ended
    for (status, error), said in zip(ended, told, strict=True):
        assert status == 2 and (said or error == f"error: {ANOTHER}"), ended


SAY = """
def said():
    messages.say("of all")
    messages.warn("mine", own=True)
    {}
train.start = lambda *_: processes.on_all(said) or 0
"""
ONE_LOG = {  # (tasks, what both print into one log after where they are)
    "nothing": ([SAY.format("")] * 2, ["of all", "warning: mine", "[1] warning: mine"]),
    "alike": ([TOGETHER.format("Unavailable")] * 2, ["error: no."]),
    "own": (["", TOGETHER.format("Unavailable")], [AGREED, "[1] error: no."]),
    "first alone": ([ALONE.format("UserError"), ""], ["error: no."]),
    "last alone": (["", ALONE.format("UserError")], [AGREED, "[1] error: no."]),
}


@pytest.mark.parametrize("how", ONE_LOG)
def test_in_one_log_process_0_speaks_and_others_only_for_themselves(how, driver):
    tasks, expected = ONE_LOG[how]
    lines = []
    for process in start(driver, tasks, LOG_PER_PROCESS=""):
        lines += "".join(process.communicate(timeout=300)).splitlines()
    # of gloo, which prints from C++
    lines = [re.sub(r"\d\d:\d\d:\d\d ", "", line) for line in lines if "[Gloo]" not in line]
    places = [line for line in lines if " of 2 on " in line]
    assert len(places) == 2, lines
    assert re.fullmatch(r"process 0 of 2 on \S+, 1 x cpu", places[0])
    assert re.fullmatch(r"\[1\] process 1 of 2 on \S+, 1 x cpu; process 0 prints .*", places[1])
    assert sorted(set(lines) - {*places}) == sorted(expected)
    assert len(lines) == 2 + len(expected)


def test_a_signal_to_all_before_the_first_step_ends_each_with_its_status(driver):
    """Also where process 0 gets it first: it holds what the others are connected to, and waits for them."""
    waits = """
processes.LINGER = 60
def wait():
    processes.all_of(True)
    print("here", flush=True)
    time.sleep(1000)
train.start = lambda *_: wait()
"""
    begun = start(driver, [f"import time\n{waits}"] * 2, LOG_PER_PROCESS="")
    for process in begun:
        while process.stdout.readline() != "here\n":
            assert process.poll() is None
    for process in begun:
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
    said = ""
    for process in begun:
        said += process.communicate(timeout=300)[1]
        assert process.returncode == 128 + signal.SIGTERM, said
    lines = [line for line in said.splitlines() if "[Gloo]" not in line]
    assert lines == [interrupts.NOTHING_LOST], said


def test_a_crash_of_all_is_one_traceback_and_one_of_a_process_has_its_number(driver):
    crash = "raise RuntimeError('a\\nb')"
    together = SAY.format(f"processes.all_of(True)\n    {crash}")
    for tasks, prefixes in (([together] * 2, {""}), (["", SAY.format(crash)], {"[1] "})):
        said = ""
        for process in start(driver, tasks, LOG_PER_PROCESS=""):
            said += "".join(process.communicate(timeout=300))
        found = re.findall(
            r"^(.*)Traceback .*\n(?:\1  .*\n)+\1RuntimeError: a\n\1b$", said, re.MULTILINE
        )
        assert {*found} == prefixes and len(found) == 1, said
