"""A cloud for tests: the states of queued resources, hosts with sshd in network namespaces of their own, and a machine
that keeps a slice of it.

tests/fake_gcloud.py is how programs ask it. Each slice that it makes has new addresses, new host keys and empty disks.
Needs to be root.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import fake_gcloud
from helpers import ROOT, copy_repository, free_port, wait_for
from script_helpers import CLEAN, program
from ssh_hosts import LACKING, SSHD, Host

# {state: (the one after it, seconds until then)}
NEXT = dict(CREATING=("WAITING_FOR_RESOURCES", 0.2), WAITING_FOR_RESOURCES=("PROVISIONING", 0.3))
NEXT |= dict(PROVISIONING=("ACTIVE", 0.3), SUSPENDING=("SUSPENDED", 0.3))
ENDS = "SUSPENDING SUSPENDED DELETING".split()
MOMENTS = "CREATING WAITING_FOR_RESOURCES PROVISIONING setup running checkpoint DELETING".split()
# waits to have no host that nobody made; one that hangs would be a test that does not end
IP = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")


def lacks():
    """Why there can be no such cloud here; "" if there can."""
    if os.getuid() or not IP or not SSHD or LACKING:
        return "needs root, ip of iproute2, sshd, ssh, tmux and git"
    return "" if ip("link", "show", check=False) == 0 and can_make_networks() else "needs networks"


def ip(*words, check=True):
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.run([IP, *map(str, words)], check=check, **quiet).returncode


def can_make_networks():
    name = f"moe-try-{os.getpid()}"
    made = ip("netns", "add", name, check=False) == 0
    ip("netns", "del", name, check=False)
    return made


def moments(rng, n, longest):
    """n preemptions for `Cloud.plan`, each (moment, seconds after it, whether no connection is closed).

    Half of them are these: while a slice is made, set up, computes, saves, and what is left of it is deleted. The last
    one comes when the run is done, while its slice is deleted. longest: most seconds after a moment that lasts.
    """
    drawn = ["PROVISIONING", "setup", "running", "checkpoint", "DELETING"]
    drawn += [rng.choice(MOMENTS) for _ in range(n - 1 - len(drawn))]
    rng.shuffle(drawn)
    first = next(
        moment for moment in drawn if moment != "DELETING"
    )  # there is nothing to delete yet
    drawn.remove(first)
    return [
        (moment, rng.uniform(0, longest) * (moment in ("setup", "running")), rng.random() < 0.3)
        for moment in [first, *drawn, "end"]
    ]


class Instance(Host):
    """A host in a network of its own, joined to the cloud's bridge."""

    def __init__(self, cloud, number, keys):
        self.net, self.link = f"moe{cloud.net}-{number}", f"m{cloud.net}-{number}"
        self.inside = (IP, "netns", "exec", self.net)
        super().__init__(cloud.folder, number, cloud.port, f"10.213.{cloud.net}.{number + 1}")
        (self.root / "authorized").write_text(keys)
        ip("netns", "add", self.net)
        ip("link", "add", self.link, "type", "veth", "peer", "eth0", "netns", self.net)
        ip("link", "set", self.link, "master", cloud.bridge, "up")
        ip("-n", self.net, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            ip("-n", self.net, "link", "set", name, "up")
        self.up()

    def end(self, silently=False):
        """The machine is gone: at once, and silently where no connection is closed."""
        if silently:
            ip("link", "del", self.link)
        while pids := subprocess.check_output([IP, "netns", "pids", self.net], text=True).split():
            subprocess.run(["kill", "-KILL", *pids], stderr=subprocess.DEVNULL)
            self.process.poll()  # which the kernel otherwise still lists
            time.sleep(0.02)
        self.process.wait()
        ip("netns", "del", self.net)
        shutil.rmtree(self.root, ignore_errors=True)


class Cloud:
    """One zone, in which one slice at most is there."""

    def __init__(self):
        # short: a socket's path has at most 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="moe", dir="/tmp"))
        self.number, self.instances = 0, []
        self.port = free_port()
        (self.folder / "cloud.json").write_text("{}")
        (self.folder / "buckets/bucket").mkdir(parents=True)
        self.reset()
        program(
            self.folder / "bin/gcloud",
            f'#!/bin/sh\nexec {sys.executable} -S -E {ROOT}/tests/fake_gcloud.py "$@"\n',
        )
        self.make_bridge()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def reset(self, hosts=1, **content):
        """Nothing was asked for so far. hosts: of a slice; content: see fake_gcloud.py."""
        self.n_hosts = hosts
        self.plan, self.since = [], None  # see `disturb`
        self.preemptions = []
        self.hold(False)
        self.most = 0  # slices that were there at once
        fresh = dict(requests={}, nodes={}, calls=[], faults=[], failures=[])
        fresh |= dict(zones=["us-central2-b"], buckets={"bucket": "US-CENTRAL2"})
        fresh |= dict(seed=0, faulty=0.0, refuses="", created=0)
        with self.opened() as now:
            while self.instances:  # of a test that failed
                self.instances.pop().end()
            now.clear()
            now.update(fresh | content)

    def hold(self, on=True):
        """Let the runs in the bucket wait before their last step, see fake_training.py."""
        path = self.folder / "buckets/bucket/hold"
        path.touch() if on else path.unlink(missing_ok=True)

    def make_bridge(self):
        """On a network that no other test uses."""
        for self.net in range(os.getpid() % 200 + 1, 255):
            self.bridge = f"moebr{self.net}"
            if ip("link", "add", self.bridge, "type", "bridge", check=False) == 0:
                ip("addr", "add", f"10.213.{self.net}.1/24", "dev", self.bridge)
                ip("link", "set", self.bridge, "up")
                return
        raise AssertionError("no network is free")

    def opened(self):
        return fake_gcloud.opened(self.folder)

    def view(self):
        """What cloud.json holds."""
        with self.opened() as content:
            return content

    def work(self):
        while not self.is_over.wait(0.03):
            with self.opened() as content:
                for name in list(content["requests"]):
                    self.advance(content, name)
                self.disturb(content)

    def advance(self, content, name):
        """Move a request to its next state, if it is time."""
        request = content["requests"][name]
        state, now = request["state"]["state"], time.time()
        after, seconds = NEXT.get(state, (None, 0))
        if state == "DELETING" and now > request["since"] + 0.3:
            self.vanish(content, name)
            del content["requests"][name]
        elif after and now > request["since"] + seconds:
            if after == "PROVISIONING" and content["failures"]:
                error = {"error": {"message": content["failures"].pop(0)}}
                request |= {"state": {"state": "FAILED", "failedData": error}}
                return
            if after == "ACTIVE":
                self.boot(content, name, request["tpu"]["nodeSpec"][0]["node"])
            elif after == "SUSPENDED":
                self.vanish(content, name)
            request |= {"state": {"state": after}, "since": now}

    def boot(self, content, name, node):
        keys = node.get("metadata", {}).get("ssh-keys", "").partition(":")[2]
        self.instances = []
        for _ in range(self.n_hosts):
            self.number = self.number % 250 + 1
            self.instances.append(Instance(self, self.number, keys))
        ends = [{"ipAddress": i.address} for i in self.instances]
        made = {"state": "READY", "health": "HEALTHY", "networkEndpoints": ends}
        content["nodes"][name] = node | made | {"createTime": f"{time.time():.6f}"}
        self.most = max(self.most, len(content["nodes"]))

    def vanish(self, content, name, silently=False):
        content["nodes"].pop(name, None)
        while self.instances:
            self.instances.pop().end(silently)

    def preempt(self, content, name, silently=False):
        """Take the slice away, as Google does. A deletion that it is in the midst of is forgotten."""
        if name in content["nodes"]:
            node = content["nodes"][name]
            self.vanish(content, name, silently)
            content["nodes"][name] = node | {"state": "PREEMPTED"}
        content["requests"][name] |= {"state": {"state": "SUSPENDING"}, "since": time.time()}

    def disturb(self, content):
        """Do the first of `plan`, (moment, seconds after it, silently), when it is time."""
        if not self.plan or not content["requests"]:
            return
        (name,) = content["requests"]
        state = content["requests"][name]["state"]["state"]
        moment, seconds, silently = self.plan[0]
        if not self.since and self.has_come(moment, state, content["nodes"]):
            self.since = time.time()
        is_late = state in ENDS and moment not in ("DELETING", "end")
        if not self.since or time.time() < self.since + seconds or is_late:
            return
        self.plan.pop(0)
        if not self.plan or self.plan[0][0] == "end":
            self.hold(False)
        self.since = None
        self.preempt(content, name, silently)
        self.preemptions.append(f"{moment} in {state}")

    def has_come(self, moment, state, nodes):
        """Whether it is a moment: a state of the request, "setup", "running", "checkpoint", or "end", the deletion of a
        slice that nobody has taken away."""
        if moment.isupper():
            return state == moment
        if moment == "end":
            return state == "DELETING" and any(node["state"] == "READY" for node in nodes.values())
        if state != "ACTIVE":
            return False
        homes = [instance.home for instance in self.instances]
        logs = [log for home in homes for log in home.glob(".moe-pretraining/*/*/log")]
        said = "".join(log.read_text(errors="replace") for log in logs)
        if moment == "setup":
            return any((home / "moe-pretraining").exists() for home in homes) and not said
        has_begun = re.search(r" step \d+/", said)
        return has_begun and (moment == "running" or self.is_saving())

    def is_saving(self):
        """Whether a run writes a checkpoint."""
        return any((self.folder / "buckets").rglob("*.part"))

    def close(self):
        self.is_over.set()
        self.thread.join()
        while self.instances:
            self.instances.pop().end()
        ip("link", "del", self.bridge)
        shutil.rmtree(self.folder, ignore_errors=True)

    def leftovers(self):
        """What should not be there once a keeper has ended: requests, nodes, networks, processes."""
        content = self.view()
        nets = subprocess.check_output([IP, "netns", "list"], text=True).split()
        found = [*content["requests"], *content["nodes"]]
        found += [net for net in nets if net.startswith(f"moe{self.net}-")]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # of a process that has just ended
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if f"{self.folder}/" in f"{words} {os.readlink(process / 'cwd')}/":
                    found.append(words)
        return found


# takes the place of setup_tpu.sh, on hosts and on the machine that keeps; INSTEAD is done by its python first
SETUP = f"""mkdir -p .venv/bin
sleep 0.3
cat >.venv/bin/python <<'E'
#!/bin/bash
INSTEAD
exec {sys.executable} "$@"
E
chmod +x .venv/bin/python
"""
SETTINGS = """TPU_NAME=pod
TPU_TYPE=v4-8
ZONE=us-central2-b
PROJECT=p
SPOT=yes
MIN_DISK_GB=0
MAX_CLOCK_SKEW=5
SSH_USER=root
"""


class Keeping:
    """A repository whose cluster.env describes a slice, on a machine with the cloud's gcloud."""

    def __init__(self, cloud, instead="", settings=SETTINGS):
        self.cloud, self.repo, self.home = cloud, cloud.folder / "repo", cloud.folder / "home"
        self.bucket = cloud.folder / "buckets/bucket"
        self.run = self.bucket / "runs/run"
        self.folder = self.home / ".moe-pretraining/keep/p.us-central2-b.pod"
        (self.bucket / "shards/train").mkdir(parents=True)
        copy_repository(self.repo, "docs")
        (self.repo / "setup_tpu.sh").write_text(SETUP.replace("INSTEAD", instead))
        key = cloud.folder / "key"
        subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", key], check=True)
        self.settings = f"{settings}SSH_KEY={key}\nSSH_PORT={cloud.port}\n"
        for words in ("init -q", "add -A", "-c user.name=n -c user.email=e commit -qm all"):
            subprocess.run(["git", *words.split()], cwd=self.repo, check=True)

    def set(self, *rows):
        """Write cluster.env."""
        (self.repo / "cluster.env").write_text(self.settings + "\n".join(rows) + "\n")

    def begin(self, *words, **environment):
        """Start launcher.sh as if inside tmux, where the keeper stays in the foreground."""
        env = CLEAN | {"HOME": str(self.home), "FAKE_CLOUD": str(self.cloud.folder), "TMUX": "here"}
        env |= {"PATH": f"{self.cloud.folder}/bin:{os.environ['PATH']}", "KEEP_PAUSE": "0.3"}
        env["JAX_PLATFORMS"] = "cpu"
        words = ["bash", self.repo / "launcher.sh", *map(str, words)]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        env = {name: value for name, value in (env | environment).items() if value is not None}
        return subprocess.Popen(words, env=env, text=True, **pipes)

    def launch(self, *words, **environment):
        process = self.begin(*words, **environment)
        process.stdout, process.stderr = process.communicate(timeout=1000)
        return process

    def keep(self, rng, kills, *words, **environment):
        """--keep until the run has ended, through deaths of the keeper at drawn moments of the cloud's plan.

        Returns the process of the last keeper, with its output."""
        plan = self.cloud.plan
        for life in range(kills + 1):
            process = self.begin("--keep", *words, **environment)
            left = len(plan) * (kills - life) // (kills + 1)
            wait_for(lambda: process.poll() is not None or self.is_kept_by(process), 900)
            wait_for(lambda: process.poll() is not None or len(plan) <= left, 3000)
            if life < kills and process.poll() is None:
                time.sleep(rng.uniform(0, 1))
                process.kill()
            process.stdout, process.stderr = process.communicate(timeout=3000)
        return process

    def is_kept_by(self, process):
        """Whether the process is a keeper, and no launcher still."""
        with contextlib.suppress(OSError):
            return self.record["process"] == process.pid
        return False

    @property
    def record(self):
        return json.loads((self.folder / "state.json").read_text())

    def summary(self):
        """What a table of preemptions says about a run."""
        record = self.record
        return f"{record['starts']} starts, {record['lost']} slices lost"

    def bits(self, steps):
        """Of the run's checkpoint."""
        return (self.run / str(steps)).read_text()

    def log(self):
        return (self.folder / "log").read_text()
