"""Several hosts: real sshd and tmux on 127.0.0.1-3, each with its own keys, home, programs and tmux socket.

The hosts get a copy of this repository as it stands, with a stand-in for setup_tpu.sh.
"""

import contextlib
import getpass
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SMALL_RUN, flags_of
from test_scripts import AT_ONCE, CLEAN, program

import utils
from runtime import messages, processes
from training import command_line, steps

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
LACKING = [
    name
    for name in ("sshd", "ssh", "tmux", "git")
    if not (SSHD if name == "sshd" else shutil.which(name))
]
needs_hosts = pytest.mark.skipif(
    bool(LACKING) or sys.platform != "linux", reason=f"not here: {LACKING or 'Linux'}"
)
PROGRAMS = """awk basename bash cat chmod cut date df dirname env find git git-receive-pack grep head ls mkdir mktemp mv
nice ps python3 rm sed sh sleep tail tee tmux tr""".split()
XLA_FLAGS = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
SECRET = "s3cr3t'\"$x y"
ODD = "a  b\n'c' \"d\" $HOME `ls` \\ * ? ! é 漢"


def free_port(address="127.0.0.1"):
    with socket.create_server((address, 0)) as s:
        return s.getsockname()[1]


class Host:
    """An sshd of its own, whose logins see their own HOME, TMUX_TMPDIR and, in bin, the only programs there are."""

    def __init__(self, base, number, port):
        self.address, self.root, self.process = f"127.0.0.{number}", base / f"h{number}", None
        self.home, self.bin, self.port = self.root / "home", self.root / "bin", port
        self.code, self.state = (
            self.home / "moe-pretraining",
            self.home / f".moe-pretraining/train/{self.address}",
        )
        for folder in (self.home, self.bin, self.root / "tmux", self.root / "tmp"):
            folder.mkdir(parents=True)
        for name in PROGRAMS:
            self.restore(name)
        for key in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", self.root / key], check=True
            )
        shutil.copy(self.root / "user.pub", self.root / "authorized")
        (self.root / "sshd").write_text(
            f"Port {port}\nListenAddress {self.address}\nHostKey {self.root}/host\nStrictModes no\nPidFile none\n"
            f"AuthorizedKeysFile {self.root}/authorized\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\n"
            f"KbdInteractiveAuthentication no\nMaxStartups 100\n"
            f"SetEnv HOME={self.home} TMUX_TMPDIR={self.root}/tmux PATH={self.bin} TMPDIR={self.root}/tmp\n"
        )

    def up(self):
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        with open(self.root / "sshd.log", "a") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", self.root / "sshd"], stderr=log
            )
        for _ in range(100):
            with contextlib.suppress(OSError):
                return socket.create_connection((self.address, self.port), 1).close()
            time.sleep(0.05)
        raise AssertionError((self.root / "sshd.log").read_text())

    def down(self):
        """Cut every connection and listen no more."""
        tree = subprocess.run(
            ["ps", "-eo", "pid,ppid"], capture_output=True, text=True
        ).stdout.split("\n")[1:]
        tree, mine = [tuple(map(int, line.split())) for line in tree if line], [self.process.pid]
        for pid in mine:
            mine += [child for child, parent in tree if parent == pid]
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def tmux(self, *words):
        env = CLEAN | {"TMUX_TMPDIR": f"{self.root}/tmux"}
        socket_name = f"moe-train-{self.address.replace('.', '-')}"
        return subprocess.run(
            ["tmux", "-L", socket_name, *words], env=env, capture_output=True, text=True
        )

    @property
    def alive(self):
        return self.tmux("has-session").returncode == 0

    def replace(self, name, text):
        (self.bin / name).unlink()
        if text:
            program(self.bin / name, text)

    def restore(self, name):
        (self.bin / name).unlink(missing_ok=True)
        if found := sys.executable if name == "python3" else shutil.which(name):
            (self.bin / name).symlink_to(found)


class Cluster:
    """Three hosts and the repository that launches onto them."""

    def __init__(self, base):
        self.base, self.repo, port = base, base / "repo", free_port()
        self.hosts = [Host(base, number, port) for number in (1, 2, 3)]
        config = "".join(f"Host {h.address}\n  IdentityFile {h.root}/user\n" for h in self.hosts)
        (base / "tmp").mkdir()
        (base / "ssh_config").write_text(
            config + f"Host *\n  UserKnownHostsFile {base}/known_hosts\n"
        )
        for file in subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.split():
            if not file.startswith(("tests/", "docs/")):
                (self.repo / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, self.repo / file)
        # on a host with the file `broken` at home training fails at once, with `instant` it is done at once; with
        # `waits` beside that it waits for SIGTERM, with `hung` it ignores it
        text = '[ ! -e ~/broken ] || { echo "boom $((3+4))"; exit 7; }\n'
        text += '[[ $1 == main.py && ( -e ~/hung || -e ~/waits ) ]] && echo 0 compiled in 0 s "$WANDB_API_KEY"\n'
        text += "[[ $1 == main.py && -e ~/hung ]] && trap '' TERM && while :; do sleep 0.1; done\n"
        text += "[[ $1 == main.py && -e ~/waits ]] && exec sleep 600\n"
        text += "[ ! -e ~/instant ] || { echo compiled in 0 s; exit; }\n"
        text += f'exec nice -n 19 {sys.executable} "$@"\n'
        program(
            self.repo / "setup_tpu.sh",
            f"mkdir -p .venv/bin\ncat >.venv/bin/python <<'E'\n#!/bin/bash\n{text}E\n"
            "chmod +x .venv/bin/python\necho set up\n",
        )
        self.git("init", "-q")
        self.commit()

    def git(self, *words):
        return subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            cwd=self.repo,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "as it stands")

    def environment(self, hosts=2, **more):
        return (
            CLEAN
            | {
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
            }
            | more
        )

    def run(self, step, host, **environment):
        """run.sh's one step on the host, started."""
        words, env = (
            ["bash", self.repo / "run.sh", step, host.address],
            self.environment(3, **environment),
        )
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen(words, env=env, text=True, **pipes)

    def launch(self, *words, script="launcher.sh", **environment):
        launch = self.begin(*words, script=script, **environment)
        said = launch.communicate(timeout=200)
        return SimpleNamespace(returncode=launch.returncode, stdout=said[0], stderr=said[1])

    def begin(self, *words, script="launcher.sh", **environment):
        words, env = ["bash", self.repo / script, *map(str, words)], self.environment(**environment)
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen(words, env=env, text=True, **pipes)


@pytest.fixture(scope="module")
def cluster():
    base = Path(
        tempfile.mkdtemp(prefix="moe", dir="/tmp")
    )  # short: a socket's path has at most 107 bytes
    cluster = Cluster(base)
    try:
        for host in cluster.hosts:
            host.up()
        yield cluster
    finally:
        for host in cluster.hosts:
            host.tmux("kill-server")
            host.down()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def idle(cluster):
    """The cluster with nothing on its hosts, and their first state again afterwards. No temporary file stays, here or
    there."""
    for host in cluster.hosts:
        for folder in (host.home, host.root / "tmp"):
            shutil.rmtree(folder)
            folder.mkdir()
    yield cluster
    for host in cluster.hosts:
        host.tmux("kill-server")
    assert [
        p
        for root in (cluster.base, *(h.root for h in cluster.hosts))
        for p in (root / "tmp").iterdir()
    ] == []


@pytest.fixture
def flags(shards, xla_cache, tmp_path):
    """Flags of the small model for so many processes, each with one device, on the mesh (processes, 1, 1)."""

    def flags(processes, **more):
        small = {
            **SMALL_RUN,
            "n_experts": 6,
            "blocks": 2,
            "n_device_axis": (processes, 1, 1),
            "n_devices": processes,
            "train_batch_size": 12 // processes,
            "val_batch_size": 12 // processes,
            "microbatches": 2,
            "name": f"over{processes}",
            "output_dir": tmp_path / "runs",
            "data": shards,
            "compilation_cache": xla_cache,
            "eval_every": 5,
            "eval_steps": 2,
            "peer_timeout": 20,
            **more,
        }
        return ["--preset", "tiny", *flags_of(**small)]

    return flags


def current_umask():
    os.umask(mask := os.umask(0))
    return mask


def wait_for(condition, seconds=120):
    for _ in range(int(seconds * 5)):
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("did not come true")


def losses(run):
    """{step: training loss} of metrics.jsonl."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss/train_loss"] for row in rows}


def assert_nothing_was_started(cluster):
    for host in cluster.hosts:
        assert not host.alive and list(host.home.iterdir()) in ([], [host.home / "broken"])


# --- The launcher -----------------------------------------------------------------------------------------------


@needs_hosts
def test_two_hosts_launch_watch_and_survive(idle, flags, train, tmp_path):
    """The whole life of a run: the same losses as one process, cut connections, status, restart, stop, no secret."""
    runs = tmp_path / "runs"
    words = flags(2, training_steps=100_000, end_steps=200_000, prompt=ODD)
    done = idle.launch(*words, WANDB_API_KEY=SECRET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("running") == 2 and SECRET not in done.stdout + done.stderr
    assert idle.git("rev-parse", "HEAD") == idle.git("-C", idle.hosts[1].code, "rev-parse", "HEAD")

    # flags arrived whole, and so did the secret, in no file any more
    argv = (
        Path(f"/proc/{(idle.hosts[1].state / 'pid').read_text().strip()}/cmdline")
        .read_bytes()
        .decode()
        .split("\0")
    )
    assert argv[argv.index("--prompt") + 1] == ODD
    environment = (
        Path(f"/proc/{(idle.hosts[1].state / 'pid').read_text().strip()}/environ")
        .read_bytes()
        .decode()
    )
    assert f"WANDB_API_KEY={SECRET}\0" in environment
    assert not any((h.state / "environment").exists() for h in idle.hosts)

    # every connection is cut, and nothing happens to the training
    before = len(losses(runs / "over2"))
    for host in idle.hosts:
        host.down()
    dead = idle.launch("--status")
    assert dead.returncode and all(
        f"error: {h.address}: cannot be reached" in dead.stderr for h in idle.hosts[:2]
    )
    wait_for(lambda: len(losses(runs / "over2")) > before + 10)
    for host in idle.hosts:
        host.up()
    status = idle.launch("--status")
    assert (
        status.returncode == 0 and status.stdout.count("running: ") == 2 and "step" in status.stdout
    )

    logs = idle.launch("--logs", "127.0.0.2")
    assert logs.returncode == 0 and "compiled in" in logs.stdout and "127.0.0.1" not in logs.stdout
    assert all(f"--- {h.address}" in idle.launch("--logs").stdout for h in idle.hosts[:2])
    again = idle.launch(*words)
    assert again.returncode and again.stderr.count("a run of SESSION=train is there already") == 2
    assert all(h.alive for h in idle.hosts[:2])

    # the secret is nowhere: argv of all processes, logs, tmux's buffers and environment, the run's folder
    seen = [b"".join(map(content, Path("/proc").glob("[0-9]*/cmdline")))]
    for host in idle.hosts[:2]:
        for what in (
            ["capture-pane", "-p", "-S", "-"],
            ["show-environment", "-g"],
            ["show-environment"],
            ["list-panes", "-F", "#{pane_start_command}"],
            ["list-buffers"],
        ):
            seen.append(host.tmux(*what).stdout.encode())
        seen += [p.read_bytes() for p in host.state.iterdir()]
    seen += [content(p) for p in runs.rglob("*") if p.is_file()]
    assert (
        len(seen) > 10
        and b"step" in b"".join(seen)
        and not any(SECRET[:6].encode() in part for part in seen)
    )

    # flags that main.py would refuse stop nothing
    pids = [(h.state / "pid").read_text() for h in idle.hosts[:2]]
    for wrong in (["--modle_dimension", 3], ["--tokenizer", "none.tiktoken"]):
        refused = idle.launch("--restart", *words, *wrong)
        assert refused.returncode and refused.stderr.count("error: 127.0.0.2: ") == 1, (
            refused.stderr
        )
        assert wrong[0] in refused.stderr and "stop " not in refused.stdout, refused.stdout
    assert pids == [(h.state / "pid").read_text() for h in idle.hosts[:2]] and all(
        h.alive for h in idle.hosts[:2]
    )

    restarted = idle.launch("--restart", *words)
    assert restarted.returncode == 0, restarted.stdout + restarted.stderr
    assert (
        "ended with status 143" in restarted.stdout
        and "resuming over2 at step" in idle.launch("--logs").stdout
    )
    # to one host alone: all write one checkpoint
    os.kill(int((idle.hosts[1].state / "pid").read_text()), signal.SIGTERM)
    wait_for(lambda: not any(h.alive for h in idle.hosts[:2]))
    assert [(h.state / "status").read_text().strip() for h in idle.hosts[:2]] == ["143", "143"]

    # a part of the newest checkpoint that only process 1 reads is damaged: both go on from the one before
    newest = max(losses(runs / "over2"))
    damaged = (runs / f"over2/checkpoints/{newest}/state/ocdbt.process_1").rglob("*")
    os.truncate(max((p for p in damaged if p.is_file()), key=lambda p: p.stat().st_size), 100)
    restarted = idle.launch(*words)
    assert restarted.returncode == 0, restarted.stdout + restarted.stderr
    assert idle.launch("--logs").stdout.count("warning: resuming from checkpoint") == 2
    stopped = idle.launch("--stop")
    assert stopped.returncode == 0 and stopped.stdout.count("ended with status 143: ") == 2
    last = max(losses(runs / "over2"))
    assert (runs / f"over2/checkpoints/{last}/meta").exists()

    small = dict(
        n_experts=6,
        blocks=2,
        train_batch_size=12,
        val_batch_size=12,
        microbatches=2,
    )
    assert train(**small, name="one", training_steps=15, end_steps=200_000) == 0
    alone, together = losses(runs / "one"), losses(runs / "over2")
    assert sorted(together) == list(range(1, last + 1))  # across connections cut, restart and stop
    assert all(abs(alone[step] - together[step]) < 1e-4 for step in alone)


def content(path):
    with contextlib.suppress(OSError):  # of a process that has just ended
        return path.read_bytes()
    return b""


@needs_hosts
def test_three_hosts_train_to_the_losses_of_one_though_one_is_killed(idle, flags, train, tmp_path):
    (idle.repo / "new file").write_text("not committed")
    words = flags(3, training_steps=25, save_steps=5)
    done = idle.launch("--sync", "--max_restarts", "2", *words, hosts=3)
    (idle.repo / "new file").unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (idle.hosts[2].code / "new file").exists()
    wait_for(lambda: len(losses(tmp_path / "runs/over3")) > 7)
    os.kill(int((idle.hosts[2].state / "pid").read_text()), signal.SIGKILL)
    wait_for(lambda: not any(h.alive for h in idle.hosts))
    assert [(h.state / "status").read_text() for h in idle.hosts] == ["0\n"] * 3
    for log in [(h.state / "log").read_text() for h in idle.hosts]:  # a log on every host
        assert (
            "starting it again in 5 s" in log
            and "resuming over3 at step" in log
            and "done at step 25" in log
        )
    small = dict(
        n_experts=6,
        blocks=2,
        train_batch_size=12,
        val_batch_size=12,
        microbatches=2,
    )
    assert train(**small, name="one", training_steps=25) == 0
    alone, together = losses(tmp_path / "runs/one"), losses(tmp_path / "runs/over3")
    assert (tmp_path / "runs/over3/config.json").stat().st_mode & 0o777 == 0o666 & ~current_umask()
    assert len(together) == 25 and all(abs(alone[step] - together[step]) < 1e-4 for step in alone)


@needs_hosts
def test_flags_are_parsed_by_the_program_that_is_to_run(idle):
    """Neither by the one that stands on the host, which nothing changes, nor by the one here where a commit is sent."""
    host = idle.hosts[0]

    def step(word, *flags, **settings):
        done = idle.launch(word, host.address, *flags, script="run.sh", hosts=1, **settings)
        return done.stdout + done.stderr

    new, bare = (
        "--preset tiny --brand_new 3 --tokenizer ranks/new.tiktoken".split(),
        (ROOT / "utils.py").read_text(),
    )
    flag = '    brand_new: int = 0\n    """New."""\n'

    def here(*words):
        """What the launcher says before it asks a host, or of a host that it asks."""
        asked = idle.launch(*words, hosts=1, MIN_DISK_GB="9999999")
        assert (
            asked.returncode == (1 if "its disk is full" in asked.stderr else 2)
            and asked.stderr.count("\n") == 1
        )
        return asked.stderr

    assert "flags not checked" in step("--flags", *new)  # the environment is not there yet
    step("--code")
    step("--setup")
    before = {p: p.read_bytes() for p in host.code.rglob("*") if p.is_file()}
    assert "--brand_new" in step("--flags", *new)
    try:
        program(
            idle.repo / ".venv/bin/python", f'#!/bin/bash\nexec {sys.executable} "$@"\n'
        )  # here a Python can
        (idle.repo / "utils.py").write_text(
            bare.replace("    seed: int = ", f"{flag}    seed: int = ", 1)
        )
        (idle.repo / "ranks").mkdir()
        (idle.repo / "ranks/new.tiktoken").write_text("IQ== 0\n")
        assert "--brand_new" in here(*new) and "disk" in here("--sync", *new)
        idle.commit()
        (idle.repo / "utils.py").write_text(bare)
        assert "--brand_new" in here("--sync", *new) and "disk" in here(*new)
        assert step("--flags", *new) == "flags understood\n"
        assert "other.tiktoken: there is no such file" in step(
            "--flags", *new, "--tokenizer", "ranks/other.tiktoken"
        )
    finally:
        (idle.repo / "utils.py").write_text(bare)
        shutil.rmtree(idle.repo / "ranks")
        shutil.rmtree(idle.repo / ".venv")
        idle.commit()
    assert before == {p: p.read_bytes() for p in host.code.rglob("*") if p.is_file()}


@needs_hosts
def test_a_launch_cut_short_names_what_it_could_not_take_back_and_leaves_no_file(idle, flags):
    """A host is lost while it starts, then Ctrl-C while all start: nothing goes on unmentioned."""
    host = idle.hosts[1]

    def begin():
        # long enough in compiling that the launch is still waiting when it is cut
        slow = flags(2, layers_per_block=3, compilation_cache="")
        process = idle.begin("--max_restarts", "2", *slow)
        wait_for(lambda: (host.state / "pid").exists() and host.alive)
        return process

    launch = begin()
    host.down()
    said = launch.communicate(timeout=60)
    named = [line for line in said[1].splitlines() if "was not taken back" in line]
    assert launch.returncode == 1 and len(named) == 1, said
    assert named[0].startswith("error: 127.0.0.2: was not taken back (cannot be reached"), named
    assert "again up to 2 times" in named[0] and not idle.hosts[0].alive
    logs = idle.launch("--logs")
    assert (
        logs.returncode == 1
        and "--- 127.0.0.2" in logs.stdout
        and "error: 127.0.0.2: cannot be" in logs.stderr
    )
    host.up()
    assert host.alive
    advice = named[0].split("end it by: ")[1]
    assert (
        subprocess.run(advice, cwd=idle.repo, env=idle.environment(), shell=True).returncode == 0
        and not host.alive
    )

    (host.state / "pid").unlink(missing_ok=True)
    launch = begin()
    launch.send_signal(signal.SIGINT)
    said = launch.communicate(timeout=60)
    assert launch.returncode and "taking back" in said[0] and "not taken back" not in said[1], said
    assert not any(h.alive for h in idle.hosts)
    wait_for(lambda: not jobs(b"ssh", bytes(idle.base)), 20)


def jobs(name, word):
    """Command lines of the processes of a program, one of whose arguments holds `word`."""
    lines = [content(p).split(b"\0") for p in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if line[0] == name and any(word in part for part in line)]


@needs_hosts
def test_logs_are_followed_on_all_hosts_until_ctrl_c(idle):
    for host in idle.hosts[:2]:
        host.state.mkdir(parents=True)
        (host.state / "log").write_text(f"old {host.address}\n")
        (host.home / ".bashrc").write_text("echo noise; printf 'more of it'\n")
    idle.hosts[2].down()
    follow = idle.begin("--logs", "-f", hosts=3)
    try:
        assert sorted(follow.stdout.readline() for _ in "12") == [
            f"127.0.0.{i}: old 127.0.0.{i}\n" for i in (1, 2)
        ]
        assert follow.stderr.readline().startswith("error: 127.0.0.3: cannot be reached")
        with open(idle.hosts[1].state / "log", "a") as log:
            log.write("a  new\\ line\n")
        assert follow.stdout.readline() == "127.0.0.2: a  new\\ line\n"
        follow.send_signal(signal.SIGINT)
        follow.communicate(timeout=60)
        assert follow.returncode
        wait_for(lambda: not jobs(b"tail", b".moe-pretraining/train/127.0.0."), 20)
        wait_for(lambda: not jobs(b"ssh", bytes(idle.base)), 20)
    finally:
        follow.terminate()
        idle.hosts[2].up()


DATE_OFF = "#!/bin/bash\necho 1000000000.5\n"
BAD_HOSTS = {  # what is wrong with host 2: program replaced, its text, settings, and what the sentence must hold
    "full disk": (
        "df",
        "#!/bin/bash\necho x 9 9 9000000 9% /\n",
        {"MIN_DISK_GB": "20"},
        "disk is full",
        "8 GB free",
    ),
    "no Python": ("python3", None, {}, "no Python runs there", "PYTHON"),
    "no tmux": ("tmux", None, {}, "tmux is not installed"),
    "clock": ("date", DATE_OFF, {}, "its clock is -", "NTP"),
    "devices": (
        "nvidia-smi",
        "#!/bin/bash\necho 4711\n",
        {},
        "another run holds its devices (process 4711)",
    ),
}


@needs_hosts
@pytest.mark.parametrize("what", BAD_HOSTS)
def test_a_host_that_fails_the_check_is_named(idle, what):
    name, text, settings, *words = BAD_HOSTS[what]
    if name == "nvidia-smi":
        program(idle.hosts[1].bin / name, text)
    else:
        idle.hosts[1].replace(name, text)
    try:
        done = idle.launch("--preset", "tiny", **settings)
    finally:
        (idle.hosts[1].bin / name).unlink(missing_ok=True)
        if name != "nvidia-smi":
            idle.hosts[1].restore(name)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: 127.0.0.2: ") and all(
        word in done.stderr for word in words
    ), done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["ok", "127.0.0.1"],
        ["FAILED", "127.0.0.2"],
    ]
    assert_nothing_was_started(idle)


@needs_hosts
def test_a_dead_host_a_refused_key_and_a_changed_host_key(idle):
    host = idle.hosts[1]
    key = (host.root / "authorized").read_text()
    (host.root / "authorized").write_text("")
    done = idle.launch()
    (host.root / "authorized").write_text(key)
    assert done.returncode == 1 and done.stderr.startswith("error: 127.0.0.2: refuses the key"), (
        done.stderr
    )
    host.down()
    done = idle.launch()
    assert done.returncode == 1 and done.stderr.startswith("error: 127.0.0.2: cannot be reached"), (
        done.stderr
    )
    shutil.copy(idle.hosts[0].root / "user", idle.base / "open key")
    (idle.base / "open key").chmod(0o644)
    done = idle.launch(
        "--status", SSH_KEY=str(idle.base / "open key"), SSH_CONFIG="/dev/null", hosts=1
    )
    assert (
        "open key" in done.stderr and "chmod 600" in done.stderr and "refuses" not in done.stderr
    ), done.stderr
    for other in ("host", "host.pub"):
        (host.root / other).rename(host.root / f"{other}.first")
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", host.root / "host"], check=True)
    host.up()
    done = idle.launch()
    assert (
        done.returncode == 1 and "error: 127.0.0.2: its host key is not the one" in done.stderr
    ), done.stderr
    advice = done.stderr.split(" run ")[1].split(" and start again")[0]  # it helps, as it stands
    assert subprocess.run(advice, shell=True, capture_output=True).returncode == 0, advice
    assert idle.launch("--status").returncode == 0
    subprocess.run(advice, shell=True, capture_output=True)  # for the first key again
    host.down()
    for other in ("host", "host.pub"):
        (host.root / f"{other}.first").rename(host.root / other)
    host.up()
    assert_nothing_was_started(idle)


@needs_hosts
def test_the_check_reports_the_python_of_an_absolute_environment(idle):
    home = idle.hosts[0].home
    program(home / "an env/bin/python", "#!/bin/sh\necho Python 9.9\n")
    for path in (home / "an env", "~/an env", "$HOME/an env"):
        done = idle.launch("--check", "127.0.0.1", script="run.sh", VENV=path)
        assert done.stdout.endswith("Python 9.9\n"), done.stdout + done.stderr


@needs_hosts
def test_a_tilde_in_folder_is_the_home_there(idle):
    """So is $HOME, which the shell here would replace by the home here."""
    host, env = idle.hosts[0], idle.repo / "cluster.env"
    try:
        for text, folder in (
            ("~/a/%h", {}),
            ("", {"FOLDER": "~/b c"}),
            ('"$HOME/c"', {}),
            ('"${HOME}/d"', {}),
        ):
            env.write_text(f"FOLDER={text}\n")
            assert said(idle.run("--code", host, **folder))[0] == 0
    finally:
        env.unlink()
    for folder in (f"a/{host.address}", "b c", "c", "d"):
        assert (host.home / folder / "main.py").exists()
    assert not (host.home / "~").exists()


@needs_hosts
def test_a_wrong_commit(idle):
    done = idle.launch(COMMIT="nonsense")
    assert done.returncode == 1 and done.stderr.startswith("error: COMMIT=nonsense: "), done.stderr
    assert_nothing_was_started(idle)
    for host in idle.hosts[:2]:
        assert said(idle.run("--code", host))[0] == 0
    assert said(idle.run("--code", host, COMMIT="nonsense"))[1] == done.stderr
    (idle.hosts[1].code / "main.py").write_text("print('other')\n")
    done = idle.launch()
    assert (
        done.returncode == 1 and "error: 127.0.0.2: it would not run the same commit" in done.stderr
    ), done.stderr
    assert not any(h.alive for h in idle.hosts)


# --- What is sent, and what stays -------------------------------------------------------------------------------


def said(process):
    text = process.communicate(timeout=60)
    return process.returncode, "".join(text)


def assert_refused(done, *words):
    status, text = done
    assert status == 1 and text.startswith("error: 127.0.0.1: ") and text.count("\n") == 1, text
    assert all(word in text for word in words), text


@pytest.fixture
def alone(idle):
    """`alone(words, **environment)`: launch on host 1 alone, where training is done at once. Its files are put back."""
    (idle.hosts[0].home / "instant").touch()
    yield lambda *words, **environment: idle.launch(*words, hosts=1, **environment)
    idle.git("reset", "-q", "--hard")
    idle.git("clean", "-qfd")


@needs_hosts
def test_a_folder_that_others_made_is_left_alone(idle):
    host = idle.hosts[0]
    step = lambda word="--code", **settings: said(idle.run(word, host, **settings))  # noqa: E731
    host.code.mkdir()
    (host.code / "thesis.tex").write_text("theirs")
    for word, sync in (("--check", ""), ("--check", "1"), ("--code", "1")):
        assert_refused(
            step(word, SYNC=sync, TAKE_FOLDER="no"), "the launcher did not make it", "TAKE_FOLDER"
        )
    for folder in (".", "/", str(host.home)):
        assert_refused(
            step("--check", FOLDER=folder, TAKE_FOLDER="yes"), "the home and / are never filled"
        )
    assert [p.name for p in host.code.iterdir()] == ["thesis.tex"]
    (host.code / "main.py").write_text("theirs")
    assert_refused(
        step(SYNC="1", TAKE_FOLDER="yes"),
        "would be overwritten (1 files or folders, main.py first)",
    )
    assert (host.code / "main.py").read_text() == "theirs" and len(list(host.code.iterdir())) == 3
    (host.code / "main.py").unlink()
    assert step(SYNC="1", TAKE_FOLDER="yes") == (0, "files as they stand here\n")
    assert (host.code / "thesis.tex").read_text() == "theirs" and (host.code / "main.py").exists()

    # a git repository: with changes in it, then with a commit that no branch holds, and a file that it ignores
    theirs, git = host.home / "theirs", lambda *words: idle.git("-C", theirs, *words)
    theirs.mkdir()
    git("init", "-q")
    (theirs / ".git/info/exclude").write_text("main.py\n")
    for name in ("notes", "more"):
        (theirs / name).write_text("theirs")
        git("add", name)
        git("commit", "-qm", name)
        git("checkout", "-q", "--detach")
    (theirs / "more").write_text("changed")
    assert_refused(
        step("--check", SYNC="1", FOLDER="theirs", TAKE_FOLDER="yes"), "commit or undo that first"
    )
    git("checkout", "-q", "more")
    (theirs / "main.py").write_text("theirs")
    status, text = step(FOLDER="theirs", TAKE_FOLDER="yes")
    assert status == 1 and "would be overwritten (1 files or folders, main.py first)" in text, text
    assert (theirs / "main.py").read_text() == "theirs"
    (theirs / "main.py").unlink()
    assert step(FOLDER="theirs", TAKE_FOLDER="yes")[0] == 0
    assert (
        git("branch", "--list", "kept-*") and git("log", "--all", "--format=%s").count("more") == 1
    )


@needs_hosts
def test_only_what_was_sent_is_ever_removed(idle, alone):
    """--sync and commits in turn: run directories and files of others stay, changes made there are not lost."""
    host, runs = idle.hosts[0], ["out/run", "runs/other"]
    for name in ("new.py", "folder/inside/a b\n'é"):
        (idle.repo / name).parent.mkdir(parents=True, exist_ok=True)
        (idle.repo / name).write_text("ours")
    for run in (idle.repo / "out/run", idle.repo / "local"):  # of this machine: not sent
        (run / "checkpoints/5").mkdir(parents=True)
        (run / "metrics.jsonl").write_text("ours")
    status = idle.git("status", "--porcelain")
    assert alone("--sync").returncode == 0
    assert status == idle.git("status", "--porcelain") and not (host.code / "local").exists()
    assert (host.code / "folder/inside/a b\n'é").exists() and not (host.code / "out").exists()

    for run in runs:
        (host.code / run / "checkpoints/5").mkdir(parents=True)
        (host.code / run / "metrics.jsonl").write_text("theirs")
    (host.code / "folder/mine").write_text("theirs")
    (host.code / "main.py").write_text("theirs")
    (idle.repo / "new.py").unlink()
    shutil.rmtree(idle.repo / "folder")
    done = alone("--sync", "--restart", "--output_dir", "out")
    assert done.returncode == 0 and "kept in its git branch kept-" in done.stdout, (
        done.stdout + done.stderr
    )
    kept = idle.git("-C", host.code, "branch", "--list", "kept-*", "--format=%(refname:short)")
    assert idle.git("-C", host.code, "show", f"{kept}:main.py") == "theirs"
    assert (host.code / "main.py").read_text() == (idle.repo / "main.py").read_text()
    assert not (host.code / "new.py").exists() and [
        p.name for p in (host.code / "folder").iterdir()
    ] == ["mine"]
    assert [(host.code / run / "metrics.jsonl").read_text() for run in runs] == ["theirs"] * 2

    done = alone()  # by commit again
    assert done.returncode == 0 and idle.git("-C", host.code, "rev-parse", "HEAD") == idle.git(
        "rev-parse", "HEAD"
    )
    assert (
        "what git does not know here is not sent (2 files, local/metrics.jsonl first)"
        in done.stdout
    )
    assert (host.code / "folder/mine").exists() and (host.code / "out/run/checkpoints/5").exists()
    (host.code / "main.py").write_text("theirs")
    assert_refused(said(idle.run("--check", host)), "files in", "were changed there", "--sync")
    (host.code / "main.py").write_text((idle.repo / "main.py").read_text())

    # what is sent lies where a run wrote
    idle.git("add", "-f", "out/run/metrics.jsonl")
    commit = idle.git("commit-tree", "-m", "a run's file", idle.git("write-tree"))
    for sync in ("", "1"):
        refused = said(idle.run("--code", host, COMMIT=commit, SYNC=sync))
        assert_refused(
            refused, "would be overwritten (1 files or folders, out/run/metrics.jsonl first)"
        )
    assert [(host.code / run / "metrics.jsonl").read_text() for run in runs] == ["theirs"] * 2


@needs_hosts
def test_what_an_older_launcher_made_and_what_was_interrupted_goes_on(idle):
    host = idle.hosts[0]
    git = lambda *words: idle.git("-C", host.code, *words)  # noqa: E731
    host.code.mkdir()
    git("init", "-q")
    git("config", "receive.shallowUpdate", "true")
    for name in ("main.py", "leftover.py"):
        (host.code / name).write_text("by rsync")
    for step in ("--check", "--code"):
        assert said(idle.run(step, host))[0] == 0
    assert git("status", "--porcelain") == "?? leftover.py"
    assert git("rev-parse", "HEAD") == idle.git("rev-parse", "HEAD")

    # git was killed, or its machine, while it put another commit's files there
    tree = idle.git("commit-tree", "-m", "another", "HEAD^{tree}")
    git("update-ref", "refs/moe-launcher/half", git("commit-tree", "-m", "another", "HEAD^{tree}"))
    (host.code / ".git/index.lock").touch()
    (host.code / "main.py").write_text("half")
    for text in (None, "", "0" * 40):
        if text is not None:
            (host.code / ".git/refs/moe-launcher").mkdir(exist_ok=True)
            (host.code / ".git/refs/moe-launcher/half").write_text(text)
        for step in ("--check", "--code"):
            assert said(idle.run(step, host, COMMIT=tree))[0] == 0
        assert git("status", "--porcelain") == "?? leftover.py" and git("rev-parse", "HEAD") == tree


@needs_hosts
def test_hosts_that_share_a_folder_get_it_once(idle):
    """All of three, two of three, and each by hand at the same time; host 2 has no flock."""
    for host in idle.hosts:
        (host.home / "instant").touch()
    for host in (idle.hosts[0], idle.hosts[2]):
        host.restore("flock")
    shared, names = idle.base / "shared", [idle.base / f"at {host.address}" for host in idle.hosts]
    shared.mkdir()
    for name in names[:2]:
        name.symlink_to(shared)
    try:
        done = idle.launch("--sync", hosts=3, FOLDER=f"{idle.base}/a b")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("files as they stand") == done.stdout.count("  set up") == 1
        done = idle.launch(hosts=3, FOLDER=f"{idle.base}/at %h")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(" commit ") == done.stdout.count("  set up") == 2
        assert done.stdout.count("the folder of 127.0.0.") == 2
        others = [idle.git("commit-tree", "-m", f"{i}", "HEAD^{tree}") for i in range(3)]
        for step in ("--code", "--check"):
            started = [
                idle.run(step, host, FOLDER=str(shared), COMMIT=c)
                for host, c in zip(idle.hosts, others, strict=True)
            ]
            assert [said(process)[0] for process in started] == [0, 0, 0]
        assert not idle.git("-C", shared, "status", "--porcelain", "--untracked-files=no")
        assert idle.git("-C", shared, "rev-parse", "HEAD") in others
    finally:
        for folder in (shared, idle.base / "a b", *names):
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


@needs_hosts
def test_a_shell_that_prints_disturbs_nothing(idle, alone):
    (idle.hosts[0].home / ".bashrc").write_text("echo Welcome\nprintf more\ntrap 'echo bye' EXIT\n")
    done = alone("--sync")
    assert done.returncode == 0, done.stdout + done.stderr
    done = [
        done.stdout + done.stderr,
        said(idle.run("--code", idle.hosts[0]))[1],
        alone("--logs").stdout,
    ]
    assert not any(word in "".join(done) for word in ("Welcome", "more", "bye"))


@needs_hosts
def test_one_host_that_fails_to_start_takes_the_others_back(idle, flags):
    (idle.hosts[1].home / "broken").touch()
    done = idle.launch(*flags(3), hosts=3)
    assert done.returncode == 1 and "taking back" in done.stdout
    assert "--- the last 20 lines of 127.0.0.2" in done.stderr and "boom 7" in done.stderr
    assert "ended with status 7" in done.stderr and not any(h.alive for h in idle.hosts)
    for host in idle.hosts:  # not even outside tmux
        for pid in [p.read_text().strip() for p in host.state.glob("pid")]:
            command = Path(f"/proc/{pid}/cmdline")
            assert not command.exists() or b"main.py" not in command.read_bytes()


@needs_hosts
def test_a_hung_run_is_ended_by_sigkill_and_told(idle):
    hung, waits = idle.hosts[:2]
    for file in (hung.home / "hung", waits.home / "waits"):
        file.touch()
        (file.parent / "instant").touch()
    launched = idle.launch(STOP_TIMEOUT="1")
    assert launched.returncode == 0, launched.stdout + launched.stderr
    restarted = idle.launch("--restart", STOP_TIMEOUT="1")
    assert restarted.returncode == 0, restarted.stdout + restarted.stderr
    stopped = idle.launch("--stop", STOP_TIMEOUT="1")
    for done in (restarted, stopped):
        assert "KILLED   127.0.0.1 " in done.stdout and "ended with status 137" in done.stdout
        assert "ok       127.0.0.2 " in done.stdout and "ended with status 143" in done.stdout
        assert done.stderr.startswith("error: 127.0.0.1: it still ran STOP_TIMEOUT=1 s after SIGT")
        assert "SIGKILL" in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert "after STOP_TIMEOUT=1 s is ended by SIGKILL\n" in done.stdout
    assert stopped.returncode == 137 and not hung.alive and not waits.alive
    assert not jobs(b"/bin/bash", bytes(hung.code))
    again = idle.launch("--stop", STOP_TIMEOUT="1")
    assert again.returncode == 0 and "137: error: it still ran" in again.stdout, again


@needs_hosts
def test_of_launches_at_once_one_survives_with_its_secret(idle):
    """Both come as far as their session. Whoever is second takes back nothing of the first."""
    host = idle.hosts[0]
    for file in ("waits", "instant"):
        (host.home / file).touch()
    for step in ("--code", "--setup"):
        assert said(idle.run(step, host))[0] == 0
    host.restore("wc")
    host.replace("tmux", AT_ONCE.replace("TMUX", shutil.which("tmux")))
    try:
        launches = [idle.begin(hosts=1, WANDB_API_KEY=f"of {i}") for i in range(2)]
        done = [launch.communicate(timeout=200) for launch in launches]
    finally:
        host.restore("tmux")
    codes = [launch.returncode for launch in launches]
    assert sorted(codes) == [0, 1], done
    first, second = codes.index(0), codes.index(1)
    assert "a run of SESSION=train is there already" in done[second][1], done
    assert "taking back" in done[second][0] and "taking back" not in done[first][0], done
    assert host.alive and f"0 compiled in 0 s of {first}\n" == (host.state / "log").read_text()
    assert not list(host.state.glob("start.*"))
    assert idle.launch("--stop", hosts=1).returncode == 0 and not host.alive


@needs_hosts
def test_debug_opens_a_pane_for_each_of_many_hosts(idle):
    names = [f"127.0.0.{i}" for i in range(1, 41)]
    env = idle.environment(HOSTS=" ".join(names), WANDB_API_KEY=SECRET, TMUX_TMPDIR=str(idle.base))
    words = ["bash", idle.repo / "debug_tpu.sh", "echo here is %h"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    try:

        def tmux(*words):
            return subprocess.run(["tmux", *words], env=env, capture_output=True, text=True).stdout

        panes = tmux("list-panes", "-s", "-t", "debug-train", "-F", "#W").split()
        assert panes.count("run") == 40 and panes.count("devices") == 40
        wait_for(
            lambda: "here is 127.0.0.3" in tmux("capture-pane", "-p", "-t", "debug-train:run.2"), 20
        )
        assert SECRET[:6] not in tmux("show-environment", "-g")
    finally:
        subprocess.run(["tmux", "kill-server"], env=env)


@needs_hosts
def test_a_tpus_hosts_come_from_gcloud(idle):
    program(
        idle.base / "gcloud/gcloud",
        '#!/bin/bash\nprintf "%s\\n" "$*" >&2\n[[ $* == *ipAddress* ]] || exit 0\n'
        'echo "127.0.0.1;127.0.0.3"\n',
    )
    tpu = {"HOSTS": "", "COORDINATOR": "", "TPU_NAME": "pod", "ZONE": "z", "PROJECT": "p"}
    done = idle.launch("--status", **tpu, PATH=f"{idle.base}/gcloud:{os.environ['PATH']}")
    hosts = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert done.returncode == 0 and hosts == ["127.0.0.1", "127.0.0.3"]
    assert "compute tpus tpu-vm describe pod --zone z --project p" in done.stderr


@pytest.mark.parametrize("script", ["launcher.sh", "run.sh", "debug_tpu.sh", "setup_tpu.sh"])
def test_help(script):
    done = subprocess.run(
        ["bash", ROOT / script, "--help"], env=CLEAN, capture_output=True, text=True
    )
    assert (
        done.returncode == 0 and done.stdout.startswith(f"usage: bash {script}") and not done.stderr
    )


# --- Processes --------------------------------------------------------------------------------------------------

BAD = {
    "--num_processes 2": ["--num_processes 2", "--coordinator HOST:PORT"],
    "--process_id 1": ["--process_id 1", "--coordinator"],
    "--coordinator h:1": ["--coordinator h:1", "--num_processes and --process_id"],
    "--coordinator h:1 --num_processes 2": ["--process_id"],
    "--coordinator h --num_processes 2 --process_id 0": ["--coordinator h", "HOST:PORT"],
    "--coordinator h:1 --num_processes 2 --process_id 2": ["--process_id 2", "--num_processes 2"],
    "--coordinator h:1 --num_processes 2 --process_id 0 --n_devices 3": [
        "--n_devices 3",
        "multiple",
        "2",
    ],
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_combination_gets_a_sentence(words):
    with pytest.raises(messages.UserError) as e:
        command_line.check_processes(command_line.parse(words.split()))
    assert all(part in str(e.value) for part in BAD[words]) and str(e.value).endswith("."), e.value


def start(words, **environment):
    env = {**os.environ, "XLA_FLAGS": XLA_FLAGS, **environment}
    return subprocess.Popen(
        [sys.executable, ROOT / "main.py", *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_processes_that_do_not_come_together_say_so_in_time(flags):
    port = free_port()
    words = [
        *flags(2, peer_timeout=1),
        "--coordinator",
        f"127.0.0.1:{port}",
        "--num_processes",
        "2",
    ]
    second = start([*words, "--process_id", "1"])
    said = second.communicate(timeout=60)[0]
    assert second.returncode == 1 and said.count("\n") == 1, said
    assert f"did not all meet at --coordinator 127.0.0.1:{port} within" in said
    first = start([*words, "--process_id", "0"])
    said = first.communicate(timeout=60)[0]
    assert (
        first.returncode == 1
        and f"did not all meet at --coordinator 127.0.0.1:{port} within" in said
        and "Traceback" not in said
    ), said


def test_slurm_is_recognised_and_processes_that_differ_are_refused(flags):
    """Two tasks of one Slurm step with different seeds: they come together without a flag, and all say what differs."""
    port = str(free_port())
    task = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_PORT": port,
        "JAX_COORDINATOR_BIND_ADDRESS": f"0.0.0.0:{port}",
    }
    tasks = [
        start([*flags(2, seed=i)], SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **task)
        for i in range(2)
    ]
    for process in tasks:
        said = process.communicate(timeout=100)[0]
        assert (
            process.returncode == 2
            and "error: --seed: not the same on process 1 as on process 0" in said
        ), said


def listening(pid):
    """{(address, port)} where a process listens for TCP connections."""
    fds = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir() if p.is_symlink()]
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in fds:
                raw, port = local.split(":")
                words = np.frombuffer(bytes.fromhex(raw), ">u4").astype("=u4").tobytes()
                address = ipaddress.ip_address(words)
                found.add((str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)))
    return found


OWN, OTHER = "127.0.0.1", "198.51.100.7"
MEETINGS = {  # --coordinator: what its host resolves to, where process 0 listens, what it says
    "127.0.0.1:7": ([OWN], "127.0.0.1:7", ""),
    "[::1]:7": (["::1"], "[::1]:7", ""),
    "localhost:7": (["::1", OWN], "localhost:7", ""),
    "0.0.0.0:7": (["0.0.0.0"], "0.0.0.0:7", ""),
    # the name of a pod, say, with an address that this machine has, here by any
    "own:7": (["0.0.0.0"], "own:7", ""),
    "service:7": ([OTHER], "0.0.0.0:7", f"{OTHER} is not an address of this machine"),
    "nat:7": (["0.0.0.0", OTHER], "0.0.0.0:7", f"{OTHER} is not an address of this machine"),
    "[2001:db8::7]:7": (["2001:db8::7"], "[::]:7", "2001:db8::7 is not an address of this"),
    "debian:7": (["127.0.1.1"], "0.0.0.0:7", "debian leads to 127.0.1.1 here"),
    "nobody:7": ([], "0.0.0.0:7", "nobody cannot be resolved here"),
}


@pytest.mark.parametrize("coordinator", MEETINGS)
def test_process_0_listens_where_it_was_named(coordinator, monkeypatch, capsys):
    addresses, bind, words = MEETINGS[coordinator]

    def resolve(host, port, type):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        families = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in addresses]
        return [(f, type, 6, "", (a, port)) for f, a in zip(families, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    runs = [utils.Run(coordinator=coordinator, num_processes=2, process_id=i) for i in range(2)]
    for process, run in enumerate(runs):
        assert processes.meeting_place(run)["coordinator_bind_address"] == bind
        said = capsys.readouterr().out
        assert (words in said and said.count("\n") == 1) if words and not process else not said
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.5:7")
    assert processes.meeting_place(runs[0])["coordinator_bind_address"] == "10.0.0.5:7"
    assert not capsys.readouterr().out


def test_a_frozen_process_is_found(flags, tmp_path):
    """And until then the two listen on no interface but those that docs/several-hosts.md names."""
    port = free_port()
    words = [
        *flags(2, training_steps=100_000, end_steps=200_000, eval_every=50_000, stuck_limit=10),
        "--coordinator",
        f"127.0.0.1:{port}",
        "--num_processes",
        "2",
    ]
    first, second = [start([*words, "--process_id", str(i)]) for i in range(2)]
    try:
        wait_for(lambda: first.poll() is not None or len(losses(tmp_path / "runs/over2")) > 5, 600)
        assert first.poll() is None, first.communicate()[0]
        if sys.platform == "linux":
            assert ("127.0.0.1", port) in listening(first.pid)
            own = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
            others = (listening(first.pid) | listening(second.pid)) - {("127.0.0.1", port)}
            assert len(others) == 2 and {address for address, _ in others} <= own, others
        second.send_signal(signal.SIGSTOP)
        said = first.communicate(timeout=300)[0]
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 75, said
    assert "watchdog: training of step" in said and "Thread 0x" in said and "in fetch" in said, said


def test_slices_lie_along_dp_or_pp():
    def devices(slices):
        about = dict(platform="tpu", device_kind="TPU v4", core_on_chip=0)
        return [
            SimpleNamespace(
                slice_index=s,
                process_index=4 * s + p // 4,
                id=16 * s + p,
                coords=(p % 2, p // 2 % 2, p // 4),
                **about,
            )
            for s in range(slices)
            for p in range(16)
        ]

    slice_of = np.vectorize(lambda d: d.slice_index)
    grid = slice_of(steps.device_grid((8, 2, 2), devices(2)))
    assert grid.shape == (8, 2, 2) and (grid[:4] == 0).all() and (grid[4:] == 1).all()
    grid = slice_of(steps.device_grid((1, 8, 4), devices(2)))
    assert (grid[:, :4] == 0).all() and (grid[:, 4:] == 1).all()
    with pytest.raises(messages.UserError, match="number of TPU slices, 2"):
        steps.device_grid((1, 1, 32), devices(2))
    hosts = np.vectorize(lambda d: d.id // 4)(steps.device_grid((2, 2, 4), devices(1)))
    assert hosts.shape == (2, 2, 4)
