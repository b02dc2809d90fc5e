"""cluster/slurm.sbatch and srun with a real Slurm of two nodes: `real_slurm.Slurm`.

Most of a test is waiting for Slurm or for a process to start, so all tests of this file run at the same time.
"""

import functools
import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fake_training
import guard
import pytest
from helpers import ROOT, TINY, flags_of, metrics_of, wait_for
from real_slurm import LACKING, NODES, Slurm
from small_models import SMALL, given

from logs.rows import read_rows

pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"Slurm is not installed: {LACKING}")
STEPS = 60
LIFE = given(f"""
    --n_device_axis 2 1 1 --train_batch_size 4 --val_batch_size 4 --eval_every 20 --eval_steps 1
    --save_steps 20 --keep_checkpoints 99 --training_steps {STEPS}
""")
ON_FIRST = "--nodes", "1", "--nodelist", NODES[0]  # the other node is lost in one test
STORIES = []  # the tests that run at the same time, each a function of what `told` gives it


def at_once(story):
    """A test that runs while the others do."""
    STORIES.append(story)

    @functools.wraps(story)
    def test(told):
        told[story].result()

    return test


@pytest.fixture(scope="module")
def told(request, shards, xla_cache, tmp_path_factory):
    """{story: its future}, of those tests of this file that were asked for."""
    runs = tmp_path_factory.mktemp("slurm")

    def flags(name, **more):
        """Words of a run in which two processes share each step."""
        places = dict(name=name, data=shards, output_dir=runs, compilation_cache=xla_cache)
        return ["--preset", "tiny", *flags_of(**SMALL | TINY | LIFE | places | more)]

    slurm = Slurm()
    given = SimpleNamespace(slurm=slurm, flags=flags, runs=runs, second_node=threading.Lock())
    asked = {item.function.__name__ for item in request.session.items}
    with ThreadPoolExecutor(len(STORIES)) as pool:
        try:
            slurm.up()
            yield {f: pool.submit(f, given) for f in STORIES if f.__name__ in asked}
        finally:
            slurm.down()


def reached(run):
    """The newest step of a run."""
    return max((row["step"] for row in read_rows(str(run))), default=0)


def lines_of_run(said):
    """The lines that main.py and Slurm print. What C++ prints, such as gloo and a compiler that finds itself slow on a
    busy machine, each process has for itself."""
    ours = r"(?:\[\d\] )?(?:\d\d:\d\d:\d\d |warning: |error: |srun: |  ).*"
    return [line for line in said.splitlines() if re.fullmatch(ours, line)]


@at_once
def test_four_tasks_of_srun_find_each_other_and_write_one_log(told):
    four = dict(n_device_axis=(4, 1, 1), n_devices=4, microbatches=2, training_steps=4)
    four |= dict(train_batch_size=2, val_batch_size=2, prompt="a")
    python = [sys.executable, "main.py"]
    srun = ["srun", "--nodes", "2", "--ntasks-per-node", "2"]
    with told.second_node:
        said = told.slurm.call(*srun, *python, *told.flags("four", **four))
        wrong = told.slurm.call(*srun, *python, "--prset", "tiny")
    lines = lines_of_run(said)
    assert len({*lines}) == len(lines), said
    lines = [re.sub(r"\b\d\d:\d\d:\d\d ", "", line) for line in lines]
    assert any(line.startswith("done at step 4") for line in lines), said
    # Of the others one line each.
    own = [line for line in lines if line.startswith("[")]
    places = []
    for n in (1, 2, 3):
        node = re.escape(NODES[n // 2])
        places.append(rf"\[{n}\] process {n} of 4 on {node}, 1 x cpu; process 0 prints .*")
    assert all(re.fullmatch(place, line) for place, line in zip(places, sorted(own), strict=True))
    assert "process 0 of 4 on 127.0.0.1, 1 x cpu" in lines

    assert wrong.count("there is no such flag; the nearest is --preset") == 1, wrong
    assert wrong.count("error: ") == 1 + wrong.count("srun: error: "), wrong


@at_once
def test_a_shell_of_salloc_is_one_process(told):
    """Also where the shell is a step of Slurm's, in which jax would wait for three more processes."""
    found = "in_slurm_step(), tasks_of_slurm(), tasks_without_srun()"
    ask = f"from runtime.launchers import *; print({found})"
    typed = f"{sys.executable} -c '{ask}'\nexit\n"
    words = f"salloc --nodelist {NODES[0]} --ntasks 4"
    said = told.slurm.call("script", "-qc", words, "/dev/null", typed=typed)  # a terminal
    assert "True 1 4" in said, said


@at_once
def test_a_job_that_is_requeued_out_of_time_and_loses_a_node_ends_with_the_same_bits(told):
    slurm, run = told.slurm, told.runs / "life"
    whole = slurm.submit("--nodes", "2", "--", *told.flags("whole"))
    # What it has compiled is there for the other job.
    slurm.wait_for(lambda: reached(told.runs / "whole") > 0)
    pause = slurm.pause("life", 0.5)
    job = slurm.submit("--nodes", "2", "--", *told.flags("life"), PAUSE=pause)

    slurm.wait_for(lambda: reached(run) > 2)
    slurm.call("scontrol", "requeue", job)
    slurm.begin_again(job, 1)
    assert_stopped(slurm.log(job), "SIGTERM", 143)

    before = reached(run)
    slurm.wait_for(lambda: reached(run) > before)
    said = slurm.call("scontrol", "update", f"JobId={job}", "EndTime=now+170")
    assert not said, said
    # Slurm looks at the time limits every 30 s. A step that takes longer keeps the run from its end until then.
    slurm.pause("life", 2)
    slurm.wait_for(lambda: f"main.py ended with status 138; job {job} is queued" in slurm.log(job))
    slurm.pause("life", 0.5)
    slurm.begin_again(job, 2)
    assert_stopped(slurm.log(job), "SIGUSR1", 138)

    before = reached(run)
    slurm.wait_for(lambda: reached(run) > before)
    assert slurm.end_of(whole) == "COMPLETED", slurm.log(whole)
    with told.second_node:
        slurm.lose_node(NODES[1])
        slurm.wait_for(lambda: slurm.show(job)["Restarts"] == "3")
        slurm.wait_for(lambda: slurm.show(job)["JobState"] == "PENDING")
        # Slurm 22.05 starts no step of a job whose node returns in the second in which it was lost.
        time.sleep(2)
        slurm.return_node(NODES[1])
    # Process 0 says so once, unless jax aborts it first: seen once in 20 runs, on a busy machine (dev/log.md).
    lost = slurm.log(job).count("error: another process of this run was lost")
    assert lost == 1 or "task 0: Aborted" in slurm.log(job), slurm.log(job)
    slurm.pause("life", 0)
    slurm.begin_again(job, 3)
    assert slurm.end_of(job) == "COMPLETED", slurm.log(job)
    assert slurm.show(job)["Restarts"] == "3", slurm.log(job)
    assert "Traceback" not in slurm.log(job)
    assert "[1] " in slurm.log(whole) and slurm.log(whole).count("set up on ") == 3
    assert meta_of(run) == meta_of(told.runs / "whole")  # with the fingerprint
    assert metrics_of(run) == metrics_of(told.runs / "whole")


def meta_of(run):
    """What is beside the arrays of the last checkpoint."""
    return json.loads((run / f"checkpoints/{STEPS}/meta/metadata").read_text())


def assert_stopped(log, name, status):
    """In the log of a job of two processes, process 0 prints once that it stops for a signal, and all is saved."""
    said = re.findall(rf"^[\d:]+ {name}: stopping after this step, with a checkpoint", log, re.M)
    assert len(said) == 1, log
    assert re.search(r"stopped at step \d+ .*; everything is saved in ", log), log
    assert log.count(f"Exited with exit code {status}") == 2, log


@at_once
def test_tasks_of_an_array_are_runs_and_scancel_leaves_a_checkpoint_of_one(told):
    """main.py is tests/fake_training.py here, which starts fast and waits before its last step."""
    slurm, bucket = told.slurm, told.slurm.root / "bucket"
    bucket.mkdir()
    (bucket / "hold").touch()
    words = "--output_dir gs://bucket/runs --name seed-%a --save_steps 10 --training_steps 30"
    options = "--array", "3,5", *ON_FIRST
    job = slurm.submit(*options, "--", *words.split(), FAKE=f"{fake_training.__file__} {bucket}")
    third, fifth = f"{job}_3", f"{job}_5"
    saved = bucket / "runs/seed-3/10"
    slurm.wait_for(saved.exists)
    number = slurm.show(third)["JobId"]
    slurm.call("scancel", third)
    assert slurm.end_of(third) == "CANCELLED"
    (bucket / "hold").unlink()
    assert slurm.end_of(fifth) == "COMPLETED"
    log = slurm.log(number)
    stopped = re.search(r"stopped at step (\d+)$", log, re.MULTILINE)
    assert stopped and "queued again" not in log, log
    assert saved.with_name(stopped[1]).exists() and not saved.with_name("30").exists()
    assert (bucket / "runs/seed-5/30").exists()


@at_once
def test_what_may_pass_is_queued_again_and_what_a_person_must_fix_is_not(told):
    slurm = told.slurm

    def ends(name, *statuses):
        path = slurm.root / f"{name}.ends"
        path.write_text("".join(f"{status}\n" for status in statuses))
        return path

    no_gpus = "note: Slurm gave this job no GPUs"  # where they were not ruled out
    words = *ON_FIRST, "--", "--seed", "%a"
    once = slurm.submit(*words, ENDS=ends("once", 1), JAX_PLATFORMS="")
    words = *ON_FIRST, "--array", "7", "--", "--seed", "%a", "--prompt", "a  b"
    job = slurm.submit(*words, ENDS=ends("often", 75, 138, 137, 2))
    for restarts in (1, 2, 3):
        slurm.begin_again(job, restarts)
    assert slurm.end_of(job) == "FAILED"
    assert slurm.show(job)["ExitCode"] == "2:0" and slurm.show(job)["Restarts"] == "3"
    assert slurm.log(job).count("main.py --seed 7 --prompt a  b\n") == 4
    assert slurm.log(job).count("is queued again") == 3 and no_gpus not in slurm.log(job)

    assert slurm.end_of(once) == "FAILED"
    assert slurm.show(once)["Restarts"] == "0" and "main.py --seed %a\n" in slurm.log(once)
    assert no_gpus in slurm.log(once)


@at_once
def test_the_script_alone_and_in_a_wrong_folder_is_one_sentence(told):
    slurm, script = told.slurm, ROOT / "cluster/slurm.sbatch"
    assert slurm.call("bash", script).startswith("error: this file is for sbatch: sbatch cluster/")
    words = "sbatch", *ON_FIRST, "--parsable", "--output", "log", script
    job = slurm.call(*words, cwd=slurm.root).strip()
    assert slurm.end_of(job) == "FAILED"
    said = (slurm.root / "log").read_text()
    assert said.startswith(f"error: {slurm.root}: has no main.py; submit in the folder of"), said


def test_nothing_is_left_of_tests_that_are_killed(tmp_path):
    """What they started, and what that started, ends, also where it left their session; their folder goes."""
    variable, folder = f"SLURM_CONF={tmp_path}", tmp_path / "root"
    folder.mkdir()
    tests = f"""
import os, subprocess, sys, time
words = [sys.executable, {guard.__file__!r}, {variable!r}, {str(folder)!r}]
guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
detached = dict(env=os.environ | dict([{variable!r}.split("=")]), start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 1000; sleep 1001"], **detached)
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", tests])
    wait_for(lambda: len(guard.processes_with(variable)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not folder.exists() and not guard.processes_with(variable))
