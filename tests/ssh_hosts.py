"""Hosts for tests: each an sshd with its own keys, home, programs and tmux socket."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

from helpers import listens, wait_for
from script_helpers import CLEAN

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
LACKING = [name for name in ("ssh", "tmux", "git") if not shutil.which(name)]
PROGRAMS = """awk basename bash cat chmod cut date df dirname env find git git-receive-pack grep head ls mkdir mktemp mv
nice ps python3 rm sed sh sleep tail tee tmux tr""".split()
# what a host's sshd reads
SSHD_CONFIG = """Port {port}
ListenAddress {address}
HostKey {root}/host
StrictModes no
PidFile none
AuthorizedKeysFile {root}/authorized
PasswordAuthentication no
UsePAM no
PermitRootLogin yes
KbdInteractiveAuthentication no
MaxStartups 100
SetEnv HOME={root}/home TMUX_TMPDIR={root}/tmux PATH={root}/bin TMPDIR={root}/tmp
"""


class Host:
    """An sshd of its own, whose logins see their own HOME, TMUX_TMPDIR and, in bin, the only programs there are."""

    inside = ()  # what starts a program in the host's own network

    def __init__(self, base, number, port, address=None):
        self.address, self.port = address or f"127.0.0.{number}", port
        self.root = base / f"h{number}"
        self.home, self.bin, self.process = self.root / "home", self.root / "bin", None
        self.code = self.home / "moe-pretraining"
        self.state = self.home / f".moe-pretraining/train/{self.address}"
        for folder in ("home", "bin", "tmux", "tmp"):
            (self.root / folder).mkdir(parents=True)
        for name in PROGRAMS:
            self.restore(name)
        for key in ("host", "user"):
            words = ["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", self.root / key]
            subprocess.run(words, check=True)
        shutil.copy(self.root / "user.pub", self.root / "authorized")
        (self.root / "sshd").write_text(SSHD_CONFIG.format(**vars(self)))

    def up(self):
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        words = [*self.inside, SSHD, "-D", "-f", self.root / "sshd"]
        self.process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        wait_for(lambda: listens(self.address, self.port), 60)

    def down(self):
        """Cut every connection and listen no more."""
        mine = [self.process.pid]
        for pid in mine:
            words = ["ps", "-o", "pid=", "--ppid", str(pid)]
            mine += map(int, subprocess.run(words, capture_output=True).stdout.split())
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def tmux(self, *words):
        env = CLEAN | {"TMUX_TMPDIR": f"{self.root}/tmux"}
        words = ["tmux", "-L", f"moe-train-{self.address.replace('.', '-')}", *words]
        return subprocess.run(words, env=env, capture_output=True, text=True)

    @property
    def alive(self):
        return self.tmux("has-session").returncode == 0

    @property
    def pid(self):
        return int((self.state / "pid").read_text())

    def restore(self, name):
        """The program `name` is that of this machine, if it has it."""
        (self.bin / name).unlink(missing_ok=True)
        if found := sys.executable if name == "python3" else shutil.which(name):
            (self.bin / name).symlink_to(found)
