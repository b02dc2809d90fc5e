"""Several hosts: real sshd and tmux on 127.0.0.1-3, each with its own keys, home, programs and tmux socket.

The hosts get a copy of this repository as it stands, with a stand-in for setup_tpu.sh.
"""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (
    ROOT,
    XLA_FLAGS,
    copy_repository,
    flags_of,
    free_port,
    refusal,
    start_main,
    wait_for,
)
from script_helpers import CLEAN, GCLOUD, TPU, assert_one_sentence, program
from small_models import given
from ssh_hosts import LACKING, SSHD, Host

from runtime import messages, processes
from training.device_mesh import device_grid

SECRET = "s3cr3t'\"$x y"
ODD = "a  b\n'c' \"d\" $HOME `ls` \\ * ? ! é 漢"
# The Python that it installs: with the file `broken` at home training fails, after the seconds that it holds, with
# `follows` it fails at once with the words that it holds, with `instant` it is done at once, with `waits` it waits for
# SIGTERM, and with `silent` it never says that it compiled
SETUP = f"""mkdir -p .venv/bin
cat >.venv/bin/python <<'E'
#!/bin/bash
[ ! -e ~/broken ] || {{ sleep 0$(<~/broken); echo "boom $((3+4))"; exit 7; }}
[[ $1 != main.py || ! -e ~/follows ]] || {{ cat ~/follows; exit 2; }}
[[ $1 != main.py || ! -e ~/silent ]] || exec sleep 7654
[[ $1 != main.py || ! -e ~/waits ]] || {{ echo 0 compiled in 0 s; exec sleep 7654; }}
[ ! -e ~/instant ] || {{ echo compiled in 0 s; exit; }}
exec nice -n 19 {sys.executable} "$@"
E
chmod +x .venv/bin/python
echo set up
"""


class Cluster:
    """Three hosts and the repository that launches onto them."""

    def __init__(self, base):
        self.base, self.repo, port = base, base / "repo", free_port()
        self.hosts = [Host(base, number, port) for number in (1, 2, 3)]
        config = [f"Host {h.address}\n  IdentityFile {h.root}/user\n" for h in self.hosts]
        config.append(f"Host *\n  UserKnownHostsFile {base}/known_hosts\n")
        (base / "ssh_config").write_text("".join(config))
        (base / "tmp").mkdir()
        # no Python here can parse flags, unless a test has one that can
        program(base / "bare/python3", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        copy_repository(self.repo, "docs")
        (self.repo / "setup_tpu.sh").write_text(SETUP)
        self.git("init", "-q")
        self.commit()
        self.first = self.git("rev-parse", "HEAD")

    def git(self, *words):
        words = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
        done = subprocess.run(words, cwd=self.repo, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "as it stands")

    def environment(self, hosts=2, **more):
        ours = {
            "HOSTS": " ".join(h.address for h in self.hosts[:hosts]),
            "SSH_CONFIG": str(self.base / "ssh_config"),
            "SSH_PORT": str(self.hosts[0].port),
            "SSH_USER": getpass.getuser(),
            "MIN_DISK_GB": "0",
            "PYTHON": "",
            "PASS_ENV": "JAX_PLATFORMS XLA_FLAGS JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "COORDINATOR": f"127.0.0.1:{free_port()}",
            "MAX_CLOCK_SKEW": "5",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": XLA_FLAGS,
            "TMPDIR": str(self.base / "tmp"),
            "PATH": f"{self.base}/bare:{os.environ['PATH']}",
        }
        return CLEAN | ours | more

    def begin(self, *words, script="launcher.sh", **environment):
        words = ["bash", self.repo / script, *map(str, words)]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen(words, env=self.environment(**environment), text=True, **pipes)

    def launch(self, *words, **environment):
        return ended(self.begin(*words, **environment))

    def step(self, word, host, *flags, **environment):
        """How one step of run.sh on the host ended."""
        hosts = dict(script="run.sh", hosts=3)
        return self.launch(word, host.address, *flags, **hosts, **environment)

    def passes(self, *words, **environment):
        """What a script printed, which must succeed."""
        done = self.launch(*words, **environment)
        assert done.returncode == 0, done.said
        return done.stdout


def ended(process):
    out, err = process.communicate(timeout=400)
    return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=err, said=out + err)


def assert_refused(done, *words):
    """It failed with one sentence about the first host that holds the words."""
    assert_one_sentence(done, 1, "error: 127.0.0.1: ", *words)


@pytest.fixture(scope="module")
def cluster():
    if LACKING or not SSHD or sys.platform != "linux":
        pytest.skip("needs Linux with sshd, ssh, tmux and git")
    # short: a socket's path has at most 107 bytes
    base = Path(tempfile.mkdtemp(prefix="moe", dir="/tmp"))
    cluster = Cluster(base)
    try:
        for host in cluster.hosts:
            host.up()
        yield cluster
    finally:
        for host in cluster.hosts:
            host.tmux("kill-server")
            if host.process:
                host.down()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def idle(cluster):
    """The cluster with nothing on its hosts, and the first state of its files again afterwards. No temporary file
    stays, here or there."""
    for host in cluster.hosts:
        for folder in (host.home, host.root / "tmp"):
            shutil.rmtree(folder)
            folder.mkdir()
    yield cluster
    for host in cluster.hosts:
        host.tmux("kill-server")
    cluster.git("reset", "-q", "--hard", cluster.first)
    cluster.git("clean", "-qfdx")
    for root in (cluster.base, *(host.root for host in cluster.hosts)):
        assert not list((root / "tmp").iterdir())


@pytest.fixture
def flags(run_flags):
    """`flags(**more)`: words of a small model on two processes with a device each."""
    small = THIN | dict(train_batch_size=6, val_batch_size=6, peer_timeout=20, name="over2")
    return lambda **more: ["--preset", "tiny", *flags_of(**run_flags((2, 1, 1), **small | more))]


THIN = given("--n_experts 6 --blocks 2 --microbatches 2")


def losses(run):
    """{step: training loss} of metrics.jsonl."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss/train_loss"] for row in rows}


def content(path):
    with contextlib.suppress(OSError):  # of a process that has just ended
        return path.read_bytes()
    return b""


def processes_of(name, word):
    """Command lines of the processes of a program, one of whose arguments holds `word`."""
    lines = [content(path).split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if line[0] == name and any(word in part for part in line)]


def assert_nothing_was_started(cluster):
    for host in cluster.hosts:
        assert not host.alive and not list(host.home.iterdir())


# where tmux could show a secret
TMUX_SHOWS = ["capture-pane -p -S -", "show-environment -g", "show-environment", "list-buffers"]
TMUX_SHOWS += ["list-panes -F #{pane_start_command}"]


def assert_secret_is_nowhere(cluster, run):
    """Not in argv of any process, the logs, tmux's buffers and environment, nor the run's folder."""
    files = [*Path("/proc").glob("[0-9]*/cmdline"), *run.rglob("*")]
    said = b""
    for host in cluster.hosts[:2]:
        files += host.state.iterdir()
        said += b"".join(host.tmux(*words.split()).stdout.encode() for words in TMUX_SHOWS)
    said += b"".join(map(content, files))
    assert b"step" in said and SECRET[:6].encode() not in said


def survive_cut_connections(cluster, run):
    """Nothing happens to the training, and the launcher reports it again once it reaches the hosts."""
    hosts, before = cluster.hosts[:2], len(losses(run))
    for host in hosts:
        host.down()
    dead = cluster.launch("--status")
    assert dead.returncode and dead.stderr.count(": cannot be reached") == 2, dead.said
    wait_for(lambda: len(losses(run)) > before + 10)
    for host in hosts:
        host.up()
    status = cluster.passes("--status")
    assert status.count("running: ") == 2 and "step" in status
    logs = cluster.passes("--logs", "127.0.0.2")
    assert "compiled in" in logs and "127.0.0.1" not in logs and "Noise" not in logs
    assert all(f"--- {host.address}" in cluster.passes("--logs") for host in hosts)


def lose_a_process_and_a_part_of_its_checkpoint(cluster, run):
    """kill -9 of process 1, then damage to what it alone reads: both start again from the checkpoint before."""
    hosts, before = cluster.hosts[:2], max(losses(run))
    wait_for(lambda: max(losses(run)) > before + 7)
    os.kill(hosts[1].pid, signal.SIGKILL)
    wait_for(lambda: all("starting it again" in (h.state / "log").read_text() for h in hosts))
    newest = max(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())
    part = run / f"checkpoints/{newest}/state/ocdbt.process_1"
    parts = [path for path in part.rglob("*") if path.is_file()]
    os.truncate(max(parts, key=lambda path: path.stat().st_size), 100)
    before = max(losses(run))
    wait_for(lambda: max(losses(run)) > before + 2)
    for host in hosts:  # not by --logs, whose last lines may be later ones already
        assert "warning: resuming from checkpoint" in (host.state / "log").read_text()


def test_two_hosts_launch_watch_and_survive(idle, flags, train, tmp_path):
    """The whole life of a run: the same losses as one process, whatever happened."""
    run = tmp_path / "runs/over2"
    _, second = hosts = idle.hosts[:2]
    noise = "echo Noise\nprintf Noise\ntrap 'echo Noise' EXIT\n"
    (second.home / ".bashrc").write_text(noise)
    long = given("--training_steps 100000 --end_steps 200000 --save_steps 5")
    words = flags(prompt=ODD, **long)
    done = idle.launch(*words, WANDB_API_KEY=SECRET)
    assert done.returncode == 0 and done.stdout.count("running") == 2, done.said
    assert SECRET not in done.said and "Noise" not in done.said
    assert idle.git("rev-parse", "HEAD") == idle.git("-C", second.code, "rev-parse", "HEAD")
    # flags arrived whole, and so did the secret
    argv, environment = (content(Path(f"/proc/{second.pid}/{of}")) for of in ("cmdline", "environ"))
    assert f"\0--prompt\0{ODD}\0".encode() in argv
    assert f"WANDB_API_KEY={SECRET}\0".encode() in environment
    assert_secret_is_nowhere(idle, run)
    survive_cut_connections(idle, run)
    # a second launch, and flags that main.py would refuse, stop nothing
    pids = [host.pid for host in hosts]
    again = idle.launch(*words)
    assert again.returncode and again.stderr.count("a run of SESSION=train is there already") == 2
    refused = idle.launch("--restart", *words, "--modle_dimension", 3)
    assert refused.returncode and refused.stderr.count("error: 127.0.0.2: ") == 1, refused.said
    assert "--modle_dimension" in refused.stderr and "stop " not in refused.stdout, refused.said
    assert pids == [host.pid for host in hosts] and all(host.alive for host in hosts)

    restarted = idle.passes("--restart", "--max_restarts", "2", *words)
    assert restarted.count("ended with status 143: ") == 2
    assert "resuming over2 at step" in idle.passes("--logs")
    lose_a_process_and_a_part_of_its_checkpoint(idle, run)
    os.kill(second.pid, signal.SIGTERM)  # a preemption of one host: all write one checkpoint
    again = "main.py ended with status 143; starting it again"
    wait_for(lambda: all(again in (host.state / "log").read_text() for host in hosts))
    assert idle.passes("--stop").count("ended with status 143: ") == 2
    assert_same_as_alone(run, train, **long)


def assert_same_as_alone(run, train, **long):
    """A run over two processes has the losses of one process, and a checkpoint at its end."""
    together = losses(run)
    last = max(together)
    assert (run / f"checkpoints/{last}/meta").exists()
    assert sorted(together) == list(range(1, last + 1))
    batch = dict(train_batch_size=12, val_batch_size=12)
    assert train(**THIN, **batch, **long | dict(name="one", training_steps=15)) == 0
    alone = losses(run.parent / "one")
    assert all(abs(alone[step] - together[step]) < 1e-4 for step in alone)


def test_flags_are_parsed_by_the_program_that_is_to_run(idle):
    """Neither by the one that stands on the host, which nothing changes, nor by the one here where a commit is sent."""
    host = idle.hosts[0]
    new = "--preset tiny --brand_new 3 --tokenizer ranks/new.tiktoken".split()
    bare = (ROOT / "utils.py").read_text()

    def here(*words):
        """What the launcher says before it asks a host, or of a host that it asks."""
        asked = idle.launch(*words, hosts=1, MIN_DISK_GB="9999999")
        assert asked.returncode == (1 if "its disk is full" in asked.stderr else 2)
        assert asked.stderr.count("\n") == 1
        return asked.stderr

    # the environment is not there yet
    assert "flags not checked" in idle.step("--flags", host, *new).stdout
    for word in ("--code", "--setup"):
        idle.step(word, host)
    before = {path: path.read_bytes() for path in host.code.rglob("*") if path.is_file()}
    assert "--brand_new" in idle.step("--flags", host, *new).stderr
    python = idle.repo / ".venv/bin/python"
    program(python, f'#!/bin/bash\nexec {sys.executable} "$@"\n')  # here a Python can
    flag = '    brand_new: int = 0\n    """New."""\n'
    (idle.repo / "utils.py").write_text(bare.replace("    seed: int = ", f"{flag}    seed: int = "))
    (idle.repo / "ranks").mkdir()
    (idle.repo / "ranks/new.tiktoken").write_text("IQ== 0\n")
    assert "--brand_new" in here(*new) and "disk" in here("--sync", *new)
    idle.commit()
    (idle.repo / "utils.py").write_text(bare)
    assert "--brand_new" in here("--sync", *new) and "disk" in here(*new)
    assert idle.step("--flags", host, *new).said == "flags understood\n"
    other = idle.step("--flags", host, *new, "--tokenizer", "ranks/other.tiktoken")
    assert "other.tiktoken: there is no such file" in other.stderr
    assert before == {path: path.read_bytes() for path in host.code.rglob("*") if path.is_file()}


def test_a_launch_cut_short_names_what_it_could_not_take_back_and_leaves_no_file(idle):
    """A host is lost while it starts, then Ctrl-C while all start: nothing stays unmentioned."""
    host = idle.hosts[1]
    for other in idle.hosts[:2]:
        (other.home / "silent").touch()  # so that the launch is still waiting when it is cut

    def begin():
        (host.state / "pid").unlink(missing_ok=True)
        process = idle.begin("--max_restarts", "2")
        wait_for(lambda: (host.state / "pid").exists() and host.alive)
        return process

    launch = begin()
    host.down()
    done = ended(launch)
    (named,) = [line for line in done.stderr.splitlines() if "was not taken back" in line]
    assert named.startswith("error: 127.0.0.2: was not taken back (cannot be reached"), named
    assert done.returncode == 1 and "again up to 2 times" in named and not idle.hosts[0].alive
    host.up()
    assert host.alive
    advice = named.split("end it by: ")[1]
    subprocess.run(advice, cwd=idle.repo, env=idle.environment(), shell=True, check=True)
    assert not host.alive

    launch = begin()
    launch.send_signal(signal.SIGINT)
    done = ended(launch)
    assert done.returncode and "taking back" in done.stdout, done.said
    assert "not taken back" not in done.stderr and not any(h.alive for h in idle.hosts)
    wait_for(lambda: not processes_of(b"ssh", bytes(idle.base)))


def test_logs_are_followed_on_all_hosts_until_ctrl_c(idle):
    for host in idle.hosts[:2]:
        host.state.mkdir(parents=True)
        (host.state / "log").write_text(f"old {host.address}\n")
        (host.home / ".bashrc").write_text("echo noise; printf 'more of it'\n")
    idle.hosts[2].down()
    follow = idle.begin("--logs", "-f", hosts=3)
    first = {follow.stdout.readline(), follow.stdout.readline()}
    assert first == {f"127.0.0.{i}: old 127.0.0.{i}\n" for i in (1, 2)}
    assert follow.stderr.readline().startswith("error: 127.0.0.3: cannot be reached")
    with open(idle.hosts[1].state / "log", "a") as log:
        log.write("a  new\\ line\n")
    assert follow.stdout.readline() == "127.0.0.2: a  new\\ line\n"
    follow.send_signal(signal.SIGINT)
    assert ended(follow).returncode
    idle.hosts[2].up()
    wait_for(lambda: not processes_of(b"tail", b".moe-pretraining/train/127.0.0."))
    wait_for(lambda: not processes_of(b"ssh", bytes(idle.base)))


# of three hosts: program that is replaced, its text, and what the sentence must hold
FULL = "#!/bin/bash\necho x 9 9 9000000 9% /\n"
BAD_HOSTS = [
    [
        ("tmux", None, "tmux is not installed"),
        ("df", FULL, "disk is full"),
        ("date", "#!/bin/bash\necho 1000000000.5\n", "its clock is -"),
    ],
    [
        ("python3", None, "no Python runs there"),
        ("nvidia-smi", "#!/bin/bash\necho 4711\n", "another run holds its devices (process 4711)"),
        ("df", FULL, "8 GB free"),
    ],
]


def test_a_host_that_fails_the_check_is_named(idle):
    for bad in BAD_HOSTS:
        for host, (name, text, _) in zip(idle.hosts, bad):
            (host.bin / name).unlink(missing_ok=True)
            if text:
                program(host.bin / name, text)
        done = idle.launch("--preset", "tiny", hosts=3, MIN_DISK_GB="9")
        for host, (name, _, _) in zip(idle.hosts, bad):
            host.restore(name)
        lines = sorted(done.stderr.splitlines())
        assert done.returncode == 1 and done.stdout.count("FAILED") == 3, done.said
        for line, host, (_, _, words) in zip(lines, idle.hosts, bad, strict=True):
            assert line.startswith(f"error: {host.address}: ") and words in line, done.said
    assert_nothing_was_started(idle)


def test_a_dead_host_a_refused_key_and_a_changed_host_key(idle):
    refusing, dead, changed = idle.hosts
    idle.passes("--status", hosts=3)  # their keys are known from here
    allowed, known = refusing.root / "authorized", idle.base / "known_hosts"
    key, other_key = allowed.read_text(), rf"\1 {(dead.root / 'host.pub').read_text()}"
    known.write_text(re.sub(r"(\[127\.0\.0\.3\]\S+) .*\n", other_key, known.read_text()))
    allowed.write_text("")
    dead.down()
    done = idle.launch(hosts=3)
    allowed.write_text(key)
    dead.up()
    lines, said = sorted(done.stderr.splitlines()), ("refuses the key", "cannot be", "its host key")
    assert done.returncode == 1
    for line, host, words in zip(lines, idle.hosts, said, strict=True):
        assert line.startswith(f"error: {host.address}: {words}"), done.said
    advice = lines[2].split(" run ")[1].split(" and start again")[0]  # it helps, as it stands
    subprocess.run(advice, shell=True, capture_output=True, check=True)
    idle.passes("--status", hosts=3)
    assert_nothing_was_started(idle)


def test_a_tilde_in_a_setting_is_the_home_there(idle):
    """So is $HOME, which the shell here would replace by the home here."""
    host, env = idle.hosts[0], idle.repo / "cluster.env"
    program(host.home / "an env/bin/python", "#!/bin/sh\necho Python 9.9\n")
    for path in ("~/an env", "$HOME/an env"):
        assert idle.step("--check", host, VENV=path).stdout.endswith("Python 9.9\n")
    for text in ("~/a/%h", '"$HOME/c"'):
        env.write_text(f"FOLDER={text}\n")
        assert idle.step("--code", host).returncode == 0
    for folder in (f"a/{host.address}", "c"):
        assert (host.home / folder / "main.py").exists()
    assert not (host.home / "~").exists()


def test_a_folder_that_others_made_is_left_alone(idle):
    host = idle.hosts[0]
    take = dict(SYNC="1", TAKE_FOLDER="yes")
    host.code.mkdir()
    (host.code / "thesis.tex").write_text("theirs")
    for word, sync in (("--check", ""), ("--check", "1"), ("--code", "1")):
        done = idle.step(word, host, SYNC=sync, TAKE_FOLDER="no")
        assert_refused(done, "the launcher did not make it", "TAKE_FOLDER")
    for folder in (".", "/", str(host.home)):
        done = idle.step("--check", host, FOLDER=folder, TAKE_FOLDER="yes")
        assert_refused(done, "the home and / are never filled")
    assert [path.name for path in host.code.iterdir()] == ["thesis.tex"]
    (host.code / "main.py").write_text("theirs")
    overwritten = "would be overwritten (1 files or folders, main.py first)"
    assert_refused(idle.step("--code", host, **take), overwritten)
    assert (host.code / "main.py").read_text() == "theirs" and len(list(host.code.iterdir())) == 3
    (host.code / "main.py").unlink()
    assert idle.step("--code", host, **take).said == "files as they stand here\n"
    assert (host.code / "thesis.tex").read_text() == "theirs" and (host.code / "main.py").exists()
    # a git repository: with changes in it, then with a commit that no branch holds, and a file that it ignores
    theirs, take = host.home / "theirs", dict(FOLDER="theirs", TAKE_FOLDER="yes")

    def git(*words):
        return idle.git("-C", theirs, *words)

    theirs.mkdir()
    git("init", "-q")
    (theirs / ".git/info/exclude").write_text("main.py\n")
    for name in ("notes", "more"):
        (theirs / name).write_text("theirs")
        git("add", name)
        git("commit", "-qm", name)
        git("checkout", "-q", "--detach")
    (theirs / "more").write_text("changed")
    assert_refused(idle.step("--check", host, SYNC="1", **take), "commit or undo that first")
    git("checkout", "-q", "more")
    (theirs / "main.py").write_text("theirs")
    assert overwritten in idle.step("--code", host, **take).stderr
    assert (theirs / "main.py").read_text() == "theirs"
    (theirs / "main.py").unlink()
    assert idle.step("--code", host, **take).returncode == 0
    assert git("branch", "--list", "kept-*")
    assert git("log", "--all", "--format=%s").count("more") == 1


def test_only_what_was_sent_is_ever_removed(idle):
    """--sync and commits in turn: run directories and files of others stay, changes made there are not lost."""
    host, runs = idle.hosts[0], ["out/run", "runs/other"]
    (host.home / "instant").touch()
    for name in ("new.py", "folder/inside/a b\n'é"):
        (idle.repo / name).parent.mkdir(parents=True, exist_ok=True)
        (idle.repo / name).write_text("ours")
    for run in (idle.repo / "out/run", idle.repo / "local"):  # of this machine: not sent
        (run / "checkpoints/5").mkdir(parents=True)
        (run / "metrics.jsonl").write_text("ours")
    status = idle.git("status", "--porcelain")
    idle.passes("--sync", hosts=1)
    assert status == idle.git("status", "--porcelain") and not (host.code / "local").exists()
    assert (host.code / "folder/inside/a b\n'é").exists() and not (host.code / "out").exists()

    for run in runs:
        (host.code / run / "checkpoints/5").mkdir(parents=True)
        (host.code / run / "metrics.jsonl").write_text("theirs")
    (host.code / "folder/mine").write_text("theirs")
    (host.code / "main.py").write_text("theirs")
    (idle.repo / "new.py").unlink()
    shutil.rmtree(idle.repo / "folder")
    done = idle.passes("--sync", "--restart", "--output_dir", "out", hosts=1)
    assert "kept in its git branch kept-" in done
    kept = idle.git("-C", host.code, "branch", "--list", "kept-*", "--format=%(refname:short)")
    assert idle.git("-C", host.code, "show", f"{kept}:main.py") == "theirs"
    assert (host.code / "main.py").read_text() == (idle.repo / "main.py").read_text()
    assert not (host.code / "new.py").exists()
    assert [path.name for path in (host.code / "folder").iterdir()] == ["mine"]

    done = idle.passes(hosts=1)  # by commit again
    assert idle.git("-C", host.code, "rev-parse", "HEAD") == idle.git("rev-parse", "HEAD")
    assert "what git does not know here is not sent (2 files, local/metrics.jsonl first)" in done
    assert (host.code / "folder/mine").exists() and (host.code / "out/run/checkpoints/5").exists()
    # what is sent lies where a run wrote
    idle.git("add", "-f", "out/run/metrics.jsonl")
    commit = idle.git("commit-tree", "-m", "a run's file", idle.git("write-tree"))
    for sync in ("", "1"):
        refused = idle.step("--code", host, COMMIT=commit, SYNC=sync)
        assert_refused(refused, "would be overwritten (1 files or folders, out/run/metrics.jsonl f")
    assert [(host.code / run / "metrics.jsonl").read_text() for run in runs] == ["theirs"] * 2


def test_sending_that_was_interrupted_is_completed(idle):
    """git was killed, or its machine, while it put another commit's files there. Other changes there are refused."""
    host = idle.hosts[0]

    def git(*words):
        return idle.git("-C", host.code, *words)

    assert idle.step("--code", host).returncode == 0
    (host.code / "main.py").write_text("half")
    said = "it would not run the same commit", "were changed there", "--sync"
    assert_refused(idle.launch(), *said)
    tree = idle.git("commit-tree", "-m", "another", "HEAD^{tree}")
    git("update-ref", "refs/moe-launcher/half", git("commit-tree", "-m", "half", "HEAD^{tree}"))
    (host.code / ".git/index.lock").touch()
    for torn in (False, True):
        if torn:
            (host.code / ".git/refs/moe-launcher").mkdir(exist_ok=True)
            (host.code / ".git/refs/moe-launcher/half").write_text("")
        for word in ("--check", "--code"):
            assert idle.step(word, host, COMMIT=tree).returncode == 0
        assert not git("status", "--porcelain") and git("rev-parse", "HEAD") == tree


def test_hosts_that_share_a_folder_get_it_once(idle):
    """All of three, then two of three; host 2 has no flock."""
    for host in idle.hosts:
        (host.home / "instant").touch()
    for host in (idle.hosts[0], idle.hosts[2]):
        host.restore("flock")
    shared = idle.base / "shared"
    shared.mkdir()
    for host in idle.hosts[:2]:
        (idle.base / f"at {host.address}").symlink_to(shared)
    done = idle.passes("--sync", hosts=3, FOLDER=f"{idle.base}/a b")
    assert done.count("files as they stand") == done.count("  set up") == 1
    done = idle.passes(hosts=3, FOLDER=f"{idle.base}/at %h")
    assert done.count(" commit ") == done.count("  set up") == 2
    assert done.count("the folder of 127.0.0.") == 2


def test_one_host_that_fails_to_start_takes_the_others_back(idle):
    for host in idle.hosts:
        (host.home / "waits").touch()
    (idle.hosts[1].home / "broken").touch()
    done = idle.launch(hosts=3)
    assert done.returncode == 1 and "taking back" in done.stdout, done.said
    assert "--- the last 20 lines of 127.0.0.2" in done.stderr and "boom 7" in done.stderr
    assert "ended with status 7" in done.stderr and not any(host.alive for host in idle.hosts)
    assert not processes_of(b"sleep", b"7654")  # not even outside tmux


def test_of_hosts_that_fail_together_the_one_that_knows_why_is_shown(idle):
    """Though the others fail before it. Without one that knows, one that failed is shown."""
    for host, words in zip(idle.hosts, (processes.ANOTHER, processes.LOST)):
        (host.home / "follows").write_text(f"error: {words}\n")
    (idle.hosts[2].home / "broken").write_text("1")
    for hosts, shown, said in ((3, "3", "boom 7"), (1, "1", processes.ANOTHER)):
        done = idle.launch(hosts=hosts)
        assert done.returncode == 1 and said in done.stderr, done.said
        assert f"error: 127.0.0.{shown}: main.py ended with status" in done.stderr
        assert f"--- the last 20 lines of 127.0.0.{shown}" in done.stderr
        assert done.stderr.count("--- ") == 1 and ("its log says why" in done.said) == (hosts == 1)


def test_debug_opens_a_pane_for_each_of_many_hosts(idle):
    names = [f"127.0.0.{i}" for i in range(1, 41)]
    own = dict(HOSTS=" ".join(names), WANDB_API_KEY=SECRET, TMUX_TMPDIR=str(idle.base))

    def tmux(*words):
        env = idle.environment(**own)
        return subprocess.run(["tmux", *words], env=env, capture_output=True, text=True).stdout

    try:
        idle.passes("echo here is %h", script="debug_tpu.sh", **own)
        panes = tmux("list-panes", "-s", "-t", "debug-train", "-F", "#W").split()
        assert panes.count("run") == panes.count("devices") == 40
        third = ["capture-pane", "-p", "-t", "debug-train:run.2"]
        wait_for(lambda: "here is 127.0.0.3" in tmux(*third))
        assert SECRET[:6] not in tmux("show-environment", "-g")
    finally:
        tmux("kill-server")


def test_a_tpus_hosts_come_from_gcloud(idle):
    program(idle.base / "gcloud/gcloud", GCLOUD)
    path = f"{idle.base}/gcloud:{os.environ['PATH']}"
    inside = dict(INSIDE="127.0.0.1;127.0.0.3", STATE="READY", PATH=path)
    done = idle.launch("--status", **TPU, **inside)
    hosts = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert done.returncode == 0 and hosts == ["127.0.0.1", "127.0.0.3"]
    calls = (idle.base / "gcloud/gcloud.calls").read_text()
    assert "compute tpus tpu-vm describe pod --zone z --project p" in calls


# gcloud compute ssh VM ... -- -W HOST:PORT, which connects its stdin and stdout with that port
DOOR = """#!/bin/bash
echo "$*" >>"$0.calls"
at=${@: -1}
exec 3<>"/dev/tcp/${at%:*}/${at##*:}"
cat <&3 &
cat >&3
"""


def test_hosts_without_external_addresses_are_reached_through_a_vm(idle):
    """By the ssh_config that docs/several-hosts.md has for them."""
    page = (ROOT / "docs/several-hosts.md").read_text()
    way = re.search(r"Host 10\.\*\n(  ProxyCommand .*\n)", page)[1]
    config = idle.base / "through_a_vm"
    config.write_text(f"Host 127.0.0.*\n{way}" + (idle.base / "ssh_config").read_text())
    program(idle.base / "door/gcloud", DOOR)
    path = f"{idle.base}/door:{os.environ['PATH']}"
    table = idle.passes("--status", SSH_CONFIG=str(config), PATH=path).splitlines()[1:]
    assert [line.split()[:2] for line in table] == [["ok", h.address] for h in idle.hosts[:2]]
    calls = (idle.base / "door/gcloud.calls").read_text()
    for host in idle.hosts[:2]:
        assert "compute ssh door --zone ZONE --project PROJECT --tunnel-through-iap" in calls
        assert f" -- -W {host.address}:{host.port}" in calls


def test_processes_that_do_not_come_together_say_so_in_time(flags):
    port = free_port()
    words = f"--peer_timeout 1 --coordinator 127.0.0.1:{port} --num_processes 2 --process_id"
    for number in "10":
        process = start_main([*flags(), *words.split(), number])
        said = process.communicate(timeout=300)[0]
        assert process.returncode == messages.Unavailable.status and "Traceback" not in said, said
        assert "did not all meet within" in said


def test_a_process_that_finds_no_devices_ends_and_so_do_the_others(flags):
    words = f"--coordinator 127.0.0.1:{free_port()} --num_processes 2 --process_id"
    words = [*flags(), *words.split()]
    first = start_main([*words, "0"])
    second = start_main([*words, "1"], JAX_PLATFORMS="quantum")
    why = "JAX_PLATFORMS=quantum: jax finds no 'quantum' on this machine; "
    for process, words in ((first, processes.ANOTHER), (second, why)):
        said = process.communicate(timeout=300)[0]
        *_, last = said.splitlines()  # after what it does meanwhile
        assert process.returncode == 2 and last.startswith(f"error: {words}"), said
        assert said.count("error: ") == 1, said


def test_slurm_is_recognised_and_processes_that_differ_are_refused(flags):
    """Two tasks of one Slurm step with different seeds: they come together without a flag, and all say what differs."""
    port = free_port()
    task = dict(SLURM_JOB_ID=1, SLURM_STEP_NODELIST="127.0.0.1", SLURM_NTASKS=2)
    task |= dict(SLURM_STEP_NUM_NODES=1, JAX_COORDINATOR_PORT=port)
    task["JAX_COORDINATOR_BIND_ADDRESS"] = f"0.0.0.0:{port}"
    places = [dict(SLURM_PROCID=i, SLURM_LOCALID=i) for i in range(2)]
    tasks = [start_main(flags(seed=i), **task, **place) for i, place in enumerate(places)]
    for process in tasks:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 2, said
        assert "error: process 1 differs from process 0 in --seed 1 instead of 0; give all" in said


def test_a_frozen_process_is_found(flags, tmp_path):
    words = "--training_steps 100000 --end_steps 200000 --eval_every 50000 --stuck_limit 10"
    words += f" --coordinator 127.0.0.1:{free_port()} --num_processes 2 --process_id"
    words = [*flags(), *words.split()]
    first, second = (start_main([*words, str(i)]) for i in range(2))
    try:
        wait_for(lambda: first.poll() is not None or len(losses(tmp_path / "runs/over2")) > 5)
        assert first.poll() is None, first.communicate()[0]
        second.send_signal(signal.SIGSTOP)
        said = first.communicate(timeout=300)[0]
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 75, said
    assert "watchdog: training of step" in said and "Thread 0x" in said, said
    # the other one froze before it sent its part of a step, or its part of what they agree on after one
    assert "in finish_step" in said or "in agreed" in said, said


def test_slices_lie_along_dp_or_pp():
    """Two slices of 16 chips, four hosts each."""
    about = dict(platform="tpu", device_kind="TPU v4", core_on_chip=0)
    devices = []
    for i in range(32):
        own = dict(slice_index=i // 16, process_index=i // 4, id=i)
        own["coords"] = (i % 2, i // 2 % 2, i // 4 % 4)
        devices.append(SimpleNamespace(**own, **about))
    slice_of = np.vectorize(lambda device: device.slice_index)
    grid = slice_of(device_grid((8, 2, 2), devices))
    assert grid.shape == (8, 2, 2) and (grid[:4] == 0).all() and (grid[4:] == 1).all()
    grid = slice_of(device_grid((1, 8, 4), devices))
    assert (grid[:, :4] == 0).all() and (grid[:, 4:] == 1).all()
    refusal(lambda: device_grid((1, 1, 32), devices), "number of TPU slices, 2")
    assert device_grid((2, 2, 4), devices[:16]).shape == (2, 2, 4)
