"""A real Slurm: munged, slurmctld and a slurmd for each of two nodes, all of them on this machine and of one test file.

The nodes are named 127.0.0.1 and 127.0.0.2, since jax looks for process 0 under the name of its node. Jobs run a copy
of this repository, with a stand-in for setup_tpu.sh.
"""

import contextlib
import getpass
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import guard
from helpers import XLA_FLAGS, copy_repository
from script_helpers import CLEAN, program

PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
PROGRAMS = "munged slurmctld slurmd sbatch srun salloc scontrol scancel squeue sinfo script".split()
LACKING = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
NODES = "127.0.0.1", "127.0.0.2"
# What the daemons and the commands read. Each node pretends to have 16 CPUs, so that no job waits for another.
# SlurmdTimeout: a node is down after 30 s without an answer. On a busy machine a live one may take several.
# KillWait: what is canceled has long to write its checkpoint.
# FirstJobId: the ports of a run follow from the number of its job, and another Slurm may be on this machine.
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
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
MessageTimeout=60
SlurmdTimeout=30
KillWait=600
FirstJobId={first_job}
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=16
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# What jobs start as Python. With a program in $FAKE, that takes the place of main.py. With a file $ENDS, main.py only
# ends with the statuses in it, one after the other. Else reading a batch takes the seconds in the file $PAUSE.
PYTHON = f"""#!/bin/bash
[[ -z $FAKE ]] || exec {sys.executable} $FAKE "$@"
[[ $ENDS ]] || exec {sys.executable} slow.py "${{@:2}}"
echo "$@"
read -r status <"$ENDS"
sed -i 1d "$ENDS"
exit "$status"
"""
SLOW = """
import os
import time
from pathlib import Path

import main
import train

put_batch = train.put_batch

def slow(*arguments):
    time.sleep(float(Path(os.environ["PAUSE"]).read_text()))
    return put_batch(*arguments)

train.put_batch = slow
main.cli()
"""


def free_ports(n):
    """Free ports below those that systems give to outgoing connections: one of these could take the port of a slurmd
    between its end and its next start."""
    found = []
    while len(found) < n:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
    return found


class Slurm:
    """The daemons, whose files are in a folder of their own, and the commands."""

    def __init__(self):
        # a short path: munge's socket is in it
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.variable = f"SLURM_CONF={self.root}/slurm.conf"  # of all that it starts
        words = [sys.executable, guard.__file__, self.variable, self.root]
        self.guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        self.over = threading.Event()  # whether the tests have ended
        self.daemons = {}  # {name: process}
        self.folder = self.root / "repository"  # from which jobs are submitted
        copy_repository(self.folder, "docs")
        (self.folder / "slow.py").write_text(SLOW)
        (self.folder / "setup_tpu.sh").write_text('echo "set up on $SLURMD_NODENAME"')
        program(self.folder / ".venv/bin/python", PYTHON)
        # not that of a job in which the tests run
        self.env = {name: value for name, value in CLEAN.items() if not name.startswith("SLURM_")}
        self.env |= {"PATH": PATH, "SLURM_CONF": f"{self.root}/slurm.conf", "LOG_PER_PROCESS": ""}
        self.env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS}
        # What salloc starts on the node. Where no person has logged in, it is not set.
        self.env["SHELL"] = "/bin/bash"
        self.env |= {"FAKE": "", "ENDS": "", "PAUSE": self.pause("none", 0)}

    def up(self):
        (self.root / "state").mkdir()
        (self.root / "munge.key").write_bytes(os.urandom(128))
        (self.root / "munge.key").chmod(0o600)
        of_here = dict(host=socket.gethostname().split(".")[0], user=getpass.getuser())
        drawn = dict(ports=free_ports(3), first_job=random.randrange(1, 60_000))
        (self.root / "slurm.conf").write_text(CONF.format(root=self.root, **of_here, **drawn))
        names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        names["seed-file"] = "seed"
        munge = [f"--{option}={self.root}/munge.{name}" for option, name in names.items()]
        self.start("munged", "munged", "-F", "--force", *munge)
        self.wait_for((self.root / "munge.socket").exists)
        self.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start(node, "slurmd", "-D", "-N", node)
        self.wait_for_nodes()

    def down(self):
        """End all daemons, jobs and commands, and delete their files."""
        self.over.set()
        self.guard.stdin.close()
        self.guard.wait()
        for daemon in self.daemons.values():
            daemon.wait()

    def start(self, name, *words):
        with open(self.root / f"{name}.out", "a") as out:
            streams = dict(stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            path = shutil.which(words[0], path=PATH)
            self.daemons[name] = subprocess.Popen([path, *words[1:]], env=self.env, **streams)

    def wait_for(self, condition, seconds=1200):
        """On a busy machine a job takes minutes to its first step. Most conditions start a command of Slurm's, so they
        are not asked often."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "did not come true"
            assert not self.over.wait(0.5), "the tests have ended"

    def wait_for_nodes(self):
        form = "--noheader", "--Node", "--format", "%T"
        alive = {"idle", "mixed", "allocated", "completing"}

        def are_alive():
            states = self.call("sinfo", *form).split()
            return len(states) == 2 and alive >= {*states}

        self.wait_for(are_alive)

    def call(self, *words, cwd=None, typed=None, **environment):
        """What a command prints."""
        words = [shutil.which(words[0], path=PATH), *map(str, words[1:])]
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, input=typed)
        settings = dict(env=self.env | environment, cwd=cwd or self.folder, timeout=1200)
        return subprocess.run(words, **settings, **streams).stdout

    def submit(self, *words, **environment):
        """The number of a job of cluster/slurm.sbatch. words: options of sbatch, then "--", then flags of main.py."""
        at = words.index("--")
        options, flags = words[:at], words[at + 1 :]
        options = ["--parsable", "--output", self.root / "%j.log", *options]
        said = self.call("sbatch", *options, "cluster/slurm.sbatch", *flags, **environment).strip()
        assert said.isdecimal(), said
        return said

    def pause(self, name, seconds):
        """Have reading a batch take that many seconds in the jobs whose PAUSE is the returned path."""
        path = self.root / f"{name}.pause"
        path.with_suffix(".new").write_text(str(seconds))
        path.with_suffix(".new").rename(path)
        return str(path)

    def log(self, job):
        path = self.root / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def show(self, job):
        """{name: value} that Slurm knows of a job, or of a task of an array."""
        said = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def end_of(self, job):
        """The state in which a job ends."""
        at_work = "PENDING", "RUNNING", "COMPLETING"
        self.wait_for(lambda: self.show(job)["JobState"] not in at_work)
        return self.show(job)["JobState"]

    def begin_again(self, job, restarts):
        """Wait until a job is queued for the n-th time again, and have it begin at once, not in two minutes, as Slurm
        would."""
        queued = dict(JobState="PENDING", Restarts=str(restarts))
        self.wait_for(lambda: queued.items() <= self.show(job).items())
        # What begins in the second of the requeue is refused: "Job credential revoked". Slurm compares whole seconds.
        time.sleep(3)
        said = self.call("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")
        assert not said, said

    def lose_node(self, node):
        """End what runs on a node, as when its power fails: slurmd, and what supervises tasks there, with the tasks."""
        ours = guard.processes_with(self.variable)
        tasks = guard.processes_with(self.variable, f"SLURMD_NODENAME={node}")
        guard.kill([self.daemons[node].pid, *tasks, *(ours & {parent_of(task) for task in tasks})])
        self.daemons[node].wait()

    def return_node(self, node):
        self.start(node, "slurmd", "-D", "-N", node)
        self.wait_for_nodes()


def parent_of(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
