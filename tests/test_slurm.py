"""A real Slurm: munged, slurmctld and a slurmd for each of two nodes, all of them on this machine and of these tests.

The nodes are named 127.0.0.1 and 127.0.0.2, since jax looks for process 0 under the name of its node. Jobs run a copy
of this repository, with a stand-in for setup_tpu.sh.
"""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import helpers
import pytest
from helpers import (
    ROOT,
    TINY,
    XLA_FLAGS,
    copy_repository,
    flags_of,
    free_port,
    metrics_of,
)
from script_helpers import CLEAN
from small_models import SMALL, given

from logs.rows import read_rows

PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
PROGRAMS = "munged slurmctld slurmd sbatch srun salloc scontrol scancel squeue sinfo script".split()
LACKING = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"Slurm is not installed: {LACKING}"),
    helpers.not_repeated_yet,
]

NODES = "127.0.0.1", "127.0.0.2"


def wait_for(condition, seconds=1200):
    """As in helpers.py, but longer: on a busy machine a job takes minutes to its first step."""
    helpers.wait_for(condition, seconds)


# What the daemons and the commands read. Each node pretends to have 4 CPUs. A node is down after 10 s without answer.
SLURM_CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
ReturnToService=2
SlurmdTimeout=10
KillWait=60
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={port2} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# The Python that it installs. With a file `ends` in the folder of the job, main.py only ends with the statuses in it,
# one after the other; else reading a batch takes the seconds in the file `pause`.
SETUP = f"""mkdir -p .venv/bin
cat >.venv/bin/python <<'E'
#!/bin/bash
[[ -e ends ]] || exec {sys.executable} slow.py "${{@:2}}"
echo "$@"
read -r status <ends
sed -i 1d ends
exit "$status"
E
chmod +x .venv/bin/python
echo "set up on $SLURMD_NODENAME"
"""
SLOW = """
import time
from pathlib import Path

import main
import train

put_batch = train.put_batch

def slow(*arguments):
    time.sleep(float(Path("pause").read_text()))
    return put_batch(*arguments)

train.put_batch = slow
main.cli()
"""


class Slurm:
    """The daemons, whose files are in the folder `root`, and the commands."""

    def __init__(self, root):
        self.root = root
        self.folder = root / "repository"  # from which jobs are submitted
        self.daemons = {}  # {name: process}
        (root / "state").mkdir()
        (root / "munge.key").write_bytes(os.urandom(128))
        (root / "munge.key").chmod(0o600)
        ports = dict(port=free_port(), port1=free_port(), port2=free_port())
        host = socket.gethostname().split(".")[0]
        conf = SLURM_CONF.format(root=root, host=host, user=getpass.getuser(), **ports)
        (root / "slurm.conf").write_text(conf)
        copy_repository(self.folder, "docs")
        (self.folder / "setup_tpu.sh").write_text(SETUP)
        (self.folder / "slow.py").write_text(SLOW)
        self.pause(0)
        # not that of a job in which the tests run
        self.env = {name: value for name, value in CLEAN.items() if not name.startswith("SLURM_")}
        self.env |= {"PATH": PATH, "SLURM_CONF": f"{root}/slurm.conf", "LOG_PER_PROCESS": ""}
        self.env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS}

    def pause(self, seconds):
        (self.folder / "pause.new").write_text(str(seconds))
        (self.folder / "pause.new").rename(self.folder / "pause")

    def up(self):
        names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        names["seed-file"] = "seed"
        munge = [f"--{option}={self.root}/munge.{name}" for option, name in names.items()]
        self.start("munged", "munged", "-F", "--force", *munge)
        wait_for(lambda: (self.root / "munge.socket").exists(), 60)
        self.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start(node, "slurmd", "-D", "-N", node)
        self.wait_for_nodes()

    def start(self, name, *words):
        with open(self.root / f"{name}.out", "a") as out:
            streams = dict(stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            path = shutil.which(words[0], path=PATH)
            self.daemons[name] = subprocess.Popen([path, *words[1:]], env=self.env, **streams)

    def wait_for_nodes(self):
        form = "--noheader", "--Node", "--format", "%t"
        wait_for(lambda: self.call("sinfo", *form).split() == ["idle", "idle"], 120)

    def down(self):
        self.call("scancel", "--user", getpass.getuser())
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.call("squeue", "--noheader"), 90)
        for name in reversed([*self.daemons]):
            self.daemons[name].terminate()
            try:
                self.daemons[name].wait(20)
            except subprocess.TimeoutExpired:
                self.daemons[name].kill()
                self.daemons[name].wait()
        kill(self.started_by_slurm())

    def call(self, *words, **more):
        """What a command prints."""
        words = [shutil.which(words[0], path=PATH), *map(str, words[1:])]
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        settings = dict(env=self.env, cwd=self.folder, timeout=600, **streams) | more
        return subprocess.run(words, **settings).stdout

    def submit(self, *words):
        """The number of a job of cluster/slurm.sbatch. words: options of sbatch, then "--", then flags of main.py."""
        at = words.index("--")
        options, flags = words[:at], words[at + 1 :]
        options = ["--parsable", "--output", self.root / "%j.log", *options]
        return self.call("sbatch", *options, "cluster/slurm.sbatch", *flags).strip()

    def log(self, job):
        path = self.root / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def show(self, job):
        """{name: value} that Slurm knows of a job, or of a task of an array."""
        said = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def state(self, job):
        return self.show(job).get("JobState")

    def begin_again(self, job):
        """Wait until a job is queued again, and have it begin at once, not in two minutes, as Slurm would."""
        wait_for(lambda: self.state(job) == "PENDING", 120)
        # What begins in the second of the requeue is refused: "Job credential revoked". Slurm compares whole seconds.
        time.sleep(5)
        said = self.call("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")
        assert not said, said

    def lose_node(self, node):
        """End what runs on a node, as when its power fails: slurmd, and what supervises tasks there, with the tasks."""
        ours = self.started_by_slurm()
        tasks = self.started_by_slurm(f"SLURMD_NODENAME={node}")
        kill([self.daemons[node].pid, *tasks, *(ours & {parent_of(task) for task in tasks})])
        self.daemons[node].wait()

    def started_by_slurm(self, *variables):
        """Numbers of the processes that these daemons and their steps started, with these variables."""
        wanted = {f"SLURM_CONF={self.root}/slurm.conf", *variables}
        found = set()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or it is another user's
                if wanted <= set(environ.read_text(errors="replace").split("\0")):
                    found.add(int(environ.parent.name))
        return found


def parent_of(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def slurm():
    # a short path: munge's socket is in it
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.up()
            yield slurm
        finally:
            slurm.down()


STEPS = 120
LIFE = given(f"""
    --n_device_axis 2 1 1 --train_batch_size 4 --val_batch_size 4 --eval_every 30 --eval_steps 1
    --save_steps 40 --keep_checkpoints 99 --training_steps {STEPS}
""")


@pytest.fixture
def flags(shards, xla_cache, tmp_path):
    """`flags(name, **flags)`: words of a run in which two processes share each step."""

    def flags(name, **more):
        all_flags = SMALL | TINY | LIFE | dict(name=name, data=shards, compilation_cache=xla_cache)
        return ["--preset", "tiny", *flags_of(**all_flags | dict(output_dir=tmp_path) | more)]

    return flags


def reached(run):
    """The newest step of a run."""
    return max((row["step"] for row in read_rows(str(run))), default=0)


def without_gloo(said):
    """Lines, but for what gloo prints from C++ when it connects."""
    return [line for line in said.splitlines() if line and not line.startswith("[Gloo]")]


def test_four_tasks_of_srun_find_each_other_and_write_one_log(slurm, flags):
    four = dict(n_device_axis=(4, 1, 1), n_devices=4, microbatches=2, training_steps=4)
    four |= dict(train_batch_size=2, val_batch_size=2, prompt="a")
    python = [sys.executable, "main.py"]
    srun = ["srun", "--nodes", "2", "--ntasks-per-node", "2"]
    said = slurm.call(*srun, *python, *flags("four", **four))
    told = without_gloo(said)
    assert len({*told}) == len(told), said
    lines = [re.sub(r"\b\d\d:\d\d:\d\d ", "", line) for line in told]
    assert any(line.startswith("done at step 4") for line in lines), said
    # Of the others one line each.
    own = [line for line in lines if line.startswith("[")]
    places = []
    for n in (1, 2, 3):
        node = re.escape(NODES[n // 2])
        places.append(rf"\[{n}\] process {n} of 4 on {node}, 1 x cpu; process 0 prints .*")
    assert all(re.fullmatch(place, line) for place, line in zip(places, sorted(own), strict=True))
    assert "process 0 of 4 on 127.0.0.1, 1 x cpu" in lines

    wrong = slurm.call(*srun, *python, "--prset", "tiny")
    assert wrong.count("there is no such flag; the nearest is --preset") == 1, wrong
    assert wrong.count("error: ") == 1 + wrong.count("srun: error: "), wrong


def test_a_shell_of_salloc_is_one_process(slurm):
    """Also where the shell is a step of Slurm's, in which jax would wait for three more processes."""
    found = "in_slurm_step(), tasks_of_slurm(), tasks_without_srun()"
    ask = f"from runtime.launchers import *; print({found})"
    typed = f"{sys.executable} -c '{ask}'\nexit\n"
    said = slurm.call("script", "-qc", "salloc --ntasks 4", "/dev/null", input=typed)  # a terminal
    assert "True 1 4" in said, said


def test_a_job_that_is_requeued_out_of_time_and_loses_a_node_ends_with_the_same_bits(
    slurm, flags, tmp_path
):
    whole = slurm.submit("--nodes", "2", "--", *flags("whole"))
    wait_for(lambda: slurm.state(whole) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert slurm.state(whole) == "COMPLETED", slurm.log(whole)
    assert "[1] " in slurm.log(whole) and slurm.log(whole).count("set up on ") == 3

    slurm.pause(0.1)
    job, run = slurm.submit("--nodes", "2", "--", *flags("life")), tmp_path / "life"
    wait_for(lambda: reached(run) > 10)
    slurm.call("scontrol", "requeue", job)
    slurm.begin_again(job)
    assert_stopped(slurm.log(job), "SIGTERM", 143)

    wait_for(lambda: "resuming life at step" in slurm.log(job) and reached(run) > 25)
    # Slurm looks at the time limits every 30 s.
    slurm.pause(1)
    slurm.call("scontrol", "update", f"JobId={job}", "EndTime=now+2minutes")
    wait_for(lambda: f"main.py ended with status 138; job {job} is queued again" in slurm.log(job))
    assert_stopped(slurm.log(job), "SIGUSR1", 138)
    slurm.pause(0.1)
    slurm.begin_again(job)

    wait_for(lambda: slurm.log(job).count("resuming life at step") == 2)
    before = reached(run)
    wait_for(lambda: reached(run) > before + 5)
    slurm.lose_node(NODES[1])
    wait_for(lambda: slurm.log(job).count("is queued again") == 2)
    assert slurm.log(job).count("error: another process of this run was lost") == 1
    wait_for(lambda: slurm.state(job) == "PENDING")
    # Slurm 22.05 starts no step of a job whose node returns in the second in which it was lost.
    time.sleep(5)
    slurm.start(NODES[1], "slurmd", "-D", "-N", NODES[1])
    slurm.wait_for_nodes()
    slurm.pause(0)
    slurm.begin_again(job)
    wait_for(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert slurm.state(job) == "COMPLETED", slurm.log(job)
    assert slurm.show(job)["Restarts"] == "3", slurm.log(job)
    assert "Traceback" not in slurm.log(job)
    assert meta_of(run) == meta_of(tmp_path / "whole")  # with the fingerprint
    assert metrics_of(run) == metrics_of(tmp_path / "whole")


def meta_of(run):
    """What is beside the arrays of the last checkpoint."""
    return json.loads((run / f"checkpoints/{STEPS}/meta/metadata").read_text())


def assert_stopped(log, name, status):
    """The log of a job of two processes tells once that it stopped for a signal, with everything saved."""
    assert log.count(f"{name}: stopping after this step, with a checkpoint") == 1, log
    assert re.search(r"stopped at step \d+ .*; everything is saved in ", log), log
    assert log.count(f"Exited with exit code {status}") == 2, log


def test_tasks_of_an_array_are_runs_and_scancel_leaves_a_checkpoint_of_one(slurm, flags, tmp_path):
    slurm.pause(0.1)
    alone = dict(n_device_axis=(1, 1, 1), train_batch_size=8, training_steps=40, seed="%a")
    job = slurm.submit("--array", "3,5", "--nodes", "1", "--", *flags("seed-%a", **alone))
    third, fifth = f"{job}_3", f"{job}_5"
    wait_for(lambda: reached(tmp_path / "seed-3") > 5)
    number = slurm.show(third)["JobId"]
    slurm.call("scancel", third)
    wait_for(lambda: slurm.state(third) == "CANCELLED" and slurm.state(fifth) == "COMPLETED")
    log, saved = slurm.log(number), reached(tmp_path / "seed-3")
    assert f"stopped at step {saved} " in log and "queued again" not in log, log
    assert (tmp_path / f"seed-3/checkpoints/{saved}").exists() and saved < 40
    assert (tmp_path / "seed-5/checkpoints/40").exists()
    assert json.loads((tmp_path / "seed-5/config.json").read_text())["seed"] == 5


@pytest.fixture
def ends(slurm):
    """`ends(statuses)`: main.py ends with these statuses, one after the other."""
    path = slurm.folder / "ends"
    yield lambda statuses: path.write_text("".join(f"{status}\n" for status in statuses))
    path.unlink()


def test_what_may_pass_is_queued_again_and_what_a_person_must_fix_is_not(slurm, ends):
    ends([75, 138, 137, 2])
    job = slurm.submit("--array", "7", "--", "--seed", "%a", "--prompt", "a  b")
    for restarts in (1, 2, 3):
        wait_for(lambda: slurm.log(job).count("is queued again") == restarts)
        slurm.begin_again(job)
    wait_for(lambda: slurm.state(job) == "FAILED")
    assert slurm.show(job)["ExitCode"] == "2:0" and slurm.show(job)["Restarts"] == "3"
    assert slurm.log(job).count("main.py --seed 7 --prompt a  b\n") == 4

    ends([1])
    job = slurm.submit("--", "--seed", "%a")
    wait_for(lambda: slurm.state(job) == "FAILED")
    assert slurm.show(job)["Restarts"] == "0" and "main.py --seed %a\n" in slurm.log(job)


def test_the_script_alone_and_in_a_wrong_folder_is_one_sentence(slurm):
    script = ROOT / "cluster/slurm.sbatch"
    assert slurm.call("bash", script).startswith("error: this file is for sbatch: sbatch cluster/")
    job = slurm.call("sbatch", "--parsable", "--output", "log", script, cwd=slurm.root).strip()
    wait_for(lambda: slurm.state(job) == "FAILED")
    said = (slurm.root / "log").read_text()
    assert said.startswith(f"error: {slurm.root}: has no main.py; submit in the folder of"), said
