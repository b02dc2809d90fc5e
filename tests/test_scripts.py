"""The shell scripts: they are clean, run.sh adds the flags that are missing and no others, setup_tpu.sh installs once.

run.sh and setup_tpu.sh are copied beside stand-ins for what they call, so nothing is installed, tokenized or trained.
"""

import fcntl
import getpass
import glob
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ROOT, wait_for
from script_helpers import CLEAN, GCLOUD, TPU, assert_one_sentence, program

import utils
from runtime import platforms


def bash(*words, cwd=None, **environment):
    words = ["bash", *map(str, words)]
    pipes = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    return subprocess.run(words, cwd=cwd, env=CLEAN | environment, **pipes)


def test_scripts_are_clean_and_explain_themselves():
    folders = (".", "tests", "data", "tools/cluster")
    scripts = [script for folder in folders for script in (ROOT / folder).glob("*.sh")]
    for script in [*scripts, ROOT / ".ci/run", ROOT / "cluster/slurm.sbatch"]:
        for check in (["bash", "-n"], ["shellcheck", "-x"]):
            if shutil.which(check[0]):
                result = subprocess.run([*check, script], capture_output=True, text=True)
                assert result.returncode == 0, result.stdout + result.stderr

    for script in ("launcher.sh", "run.sh", "debug_tpu.sh", "setup_tpu.sh"):
        result = bash(ROOT / script, "--help")
        assert result.returncode == 0 and not result.stderr
        assert result.stdout.startswith(f"usage: bash {script}")


class Repository:
    """run.sh beside a setup_tpu.sh that does nothing, and a Python that writes down its arguments."""

    def __init__(self, root):
        self.root, self.calls, self.python = root, root / "calls", root / ".venv/bin/python"
        root.mkdir(exist_ok=True)
        for name in ("run.sh", "launcher.sh", "cluster.env.example"):
            shutil.copy(ROOT / name, root)
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("*.py"))
        program(root / "setup_tpu.sh", f'echo "$@" >>"{root}/setups"\n')
        program(self.python, f'#!/bin/sh\nprintf "%s\\0" "$@" END >>"{self.calls}"\n')
        program(root / "ssh", f"#!/bin/sh\ntouch '{root}/asked'\nexit 255\n")

    def run(self, word, *flags, **environment):
        """Run `run.sh local` or track with the flags; returns the arguments of every call of Python."""
        self.calls.unlink(missing_ok=True)
        result = bash(self.root / "run.sh", word, *flags, **environment)
        assert result.returncode == 0, result.stderr
        return [call.split("\0") for call in self.calls.read_text().split("\0END\0")[:-1]]

    def launch(self, *words, **environment):
        """Run launcher.sh. An ssh that is asked makes the file `asked`, and fails."""
        path = f"{self.root}:{os.environ['PATH']}"
        return bash(self.root / "launcher.sh", *words, PATH=path, **environment)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "a folder")


def test_run_refuses_in_one_sentence(repository):
    script = repository.root / "run.sh"
    assert_one_sentence(bash(script, "nonsense"), 2, "nonsense", "local")
    assert_one_sentence(bash(script), 2, "local")
    assert_one_sentence(bash(script, "--max_restarts", "x", "local"), 1, "--max_restarts x")
    assert not repository.calls.exists()


def test_run_sets_up_and_hands_its_flags_on_as_they_are(repository):
    odd = ["--prompt", "a  b\n'c' \"d\" $HOME `ls` \\ * ? ! é", "--name", "", "--output_dir=x y;z"]
    for flags in ([], ["--help"], odd):
        assert repository.run("local", *flags) == [["tools/local.py", *flags]]
        assert repository.run("track", *flags) == [["tools/track.py", *flags]]
    assert (repository.root / "setups").read_text() == 6 * "\n"


def test_run_from_elsewhere_and_failures(repository, tmp_path):
    def run():
        result = bash("a folder/run.sh", "local", cwd=tmp_path, CDPATH=str(tmp_path / "decoy"))
        return result.returncode, result.stdout

    program(repository.python, "#!/bin/sh\npwd\nexit 7\n")
    (tmp_path / "decoy/a folder").mkdir(parents=True)
    assert run() == (7, f"{repository.root}\n")
    program(repository.root / "setup_tpu.sh", "exit 3\n")
    assert run() == (3, "")


def test_run_starts_the_training_again(repository):
    """After a crash, as often as it may; not after a mistake in the flags."""
    words, lives = "--max_restarts 2 local".split(), repository.root / "lives"
    program(repository.python, "#!/bin/bash\nread -r s <lives; sed -i 1d lives; exit $s\n")
    for statuses, left, expected in (("1 75 0", "", 0), ("1 1 1 0", "0", 1), ("1 2 0", "0", 2)):
        lives.write_text(statuses.replace(" ", "\n") + "\n")
        done = bash(repository.root / "run.sh", *words, RESTART_PAUSE="0")
        assert done.returncode == expected and lives.read_text().strip() == left
        assert "starting it again in 0 s, 1 times more" in done.stdout, done.stdout


@pytest.mark.parametrize("name", "TERM HUP USR1 USR2 XCPU".split())
def test_run_hands_signals_to_the_training(repository, name):
    """Who stops the script stops the training itself, which is not started again. What nohup ignores stays ignored."""
    number = signal.Signals[f"SIG{name}"]
    program(repository.python, "#!/bin/sh\necho ready\nexec sleep 600\n")
    words = ["bash", repository.root / "run.sh", "--max_restarts", "2", "local"]
    for handler in (signal.SIG_DFL, signal.SIG_IGN)[: 1 + (name == "HUP")]:
        before = signal.signal(number, handler)  # which the script inherits
        with subprocess.Popen(words, env=CLEAN, stdout=subprocess.PIPE) as process:
            signal.signal(number, before)
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(number)
            if handler == signal.SIG_IGN:
                process.send_signal(signal.SIGTERM)
            wanted = number if handler == signal.SIG_DFL else signal.SIGTERM
            assert process.wait(300) == 128 + wanted and not process.stdout.read()


WRONG_WORDS = {  # and what the sentence must hold
    "--preset tiny --restart": "--restart before",
    "--max-restarts 3": "--max-restarts before",
    "--max_restarts --preset": "--preset number",
    "--sync --status": "--status alone",
    "--status extra words": "--status extra",
    "--logs -f b": "b HOSTS",
    "--logs a x@c": "--logs a x@c",
    "--attach": "--attach HOSTS",
}


def test_launcher_refuses_its_words_in_wrong_places_and_no_flag_of_main(repository):
    """One sentence and nothing else, before any host is asked; the words of main.py pass."""
    hosts = dict(HOSTS="a x@c")
    for words, expected in WRONG_WORDS.items():
        result = repository.launch(*words.split(), **hosts)
        assert_one_sentence(result, 1, *expected.split())
        assert not result.stdout
    result = repository.launch("--restart", "--preset", "tiny", "-h", **hosts)
    assert result.returncode == 0 and result.stdout.startswith("usage: bash launcher.sh")
    names = [*utils.flatten(utils.Config()), *vars(utils.Plan()), *vars(utils.Design())]
    flags = [f"--{no}{name}" for name in names for no in ("", "no_", "no-")]
    result = repository.launch(*flags, "--name", "status", COMMIT="none", **hosts)
    assert_one_sentence(result, 1, "COMMIT=none")
    assert not (repository.root / "asked").exists()


# what cluster.env says, and the hosts that it names
FORMS = {
    'HOSTS="\n  a\n\tme@b \n c\t\n"': "a me@b c",
    "HOSTS='a, me@b;c'": "a me@b c",
    "HOSTS=(a me@b\n  c)  # an array": "a me@b c",
    'HOSTS=a\nHOSTS="$HOSTS b"\nset -x': "a b",
    '\ufeffHOSTS="a b"\r\nMIN_DISK_GB="08"\r\n': "a b",
    'hosts="a b"\nHOSTS="$hosts"': "a b",
    'export HOSTS="a"\nexport SSH_AUTH_SOCK=/x WANDB_API_KEY=k': "a",
    "HOSTS=a\nSECRETS=(WANDB_API_KEY,MINE)\nMINE=k\n[[ 1 == 2 ]] && HOSTS=b": "a",
}
# what cluster.env says, and what the sentence must hold
WRONG_SETTINGS = {
    "HOSTS=a b": ["cluster.env, line 1: b: command not found"],
    "\nHOSTS = a": ["cluster.env, line 2: HOSTS: command not found", 'NAME="value"'],
    'HOSTS="a': ["cluster.env, line 1: unexpected EOF"],
    "HOSTS=a\nHOSTS=$(cat nothing)": ["cluster.env, line 2: HOSTS=$(cat nothing) failed"],
    "HOSTS=$HSOTS": ["cluster.env, line 1: HSOTS"],
    "HOSTS=a\nexit": ["cluster.env: ends before its last line"],
    "HOSTS=a\nHOSTS=b": ["cluster.env, line 2: HOSTS is set a second time", "HOSTS+="],
    "\0".join("HOSTS=a b"): ["line 1: b: command not found"],  # as UTF-16 has it
    "HOSTS=a\n\n  MIN_DISK=3": ["line 3: MIN_DISK is no setting", "cluster.env.example names all"],
    "HOSTS=a\nSECRETS=A=b": ["SECRETS: must hold names"],
    "HOSTS=' ,'": ["HOSTS: names no host"],
    "HOSTS='me@a b you@a'": ["HOSTS: names", "twice"],
}
NUMBERS = "MIN_DISK_GB START_TIMEOUT STOP_TIMEOUT MAX_RESTARTS SSH_PORT".split()
WRONG_VALUES = [f"{name}={value}" for name in NUMBERS for value in ("2.5", "9999999999")]
WRONG_VALUES += ["FOLDER=~me/x", "FOLDER=$USER/x", "SESSION=../x", "COORDINATOR=h"]
for setting in [*WRONG_VALUES, "MAX_CLOCK_SKEW=-1", "SSH_KEY=/no key"]:
    WRONG_SETTINGS["HOSTS=a\n" + setting.replace("=", "='") + "'"] = [f"{setting}: "]
for host in ["a:22", "'a' 'b'", "[a]", "-a", "ssh://a", "# b", "b=c", "n{0..3}"]:
    WRONG_SETTINGS[f'HOSTS="{host} z"'] = [f"HOSTS: {host.split()[0]}: "]


def test_every_form_of_cluster_env_works_or_is_refused_before_a_host_is_asked(repository):
    env = repository.root / "cluster.env"
    for text, hosts in FORMS.items():
        env.write_text(text)
        result = repository.launch("--status")
        table = [line.split()[1] for line in result.stdout.splitlines()[1:]]
        assert table == hosts.split(), (text, result)
        assert "cluster.env" not in result.stderr
    env.write_text("HOSTS=(b\nc)\n")  # the environment wins
    assert repository.launch("--status", HOSTS="a").stdout.split()[2:] == ["FAILED", "a"]
    (repository.root / "asked").unlink()
    for text, words in WRONG_SETTINGS.items():
        env.write_text(text)
        result = repository.launch("--preset", "tiny")
        assert_one_sentence(result, 1, *words)
        assert not result.stdout, text
    env.unlink()
    env.mkdir()
    assert_one_sentence(repository.launch("--status"), 1, "cluster.env: is no file")
    assert not (repository.root / "asked").exists()


# state, complaint, inner address of a TPU, and what is said of it
TPUS = [
    ("CREATING", "", "", "its state in ZONE=z of PROJECT=p is CREATING", "wait until it is READY"),
    ("REPAIRING", "", "10.0.0.2", "is REPAIRING", "wait until it is READY"),
    ("PREEMPTED", "", "10.0.0.2;10.0.0.3", "is PREEMPTED", "create another"),
    ("STOPPED", "", ";", "is STOPPED", "start it by gcloud compute tpus tpu-vm start"),
    ("", "NOT_FOUND: 'nodes/pod' was not found", "", "there is no such TPU in ZONE=z of PROJECT=p"),
    ("", "PERMISSION_DENIED: on p", "", "gcloud cannot describe it", "PERMISSION_DENIED: on p"),
    ("READY", "", "", "names no address of its hosts", "though its state is READY"),
    ("", "", "", "names no address of its hosts"),
]


def test_a_tpu_that_is_not_ready_is_told_by_its_state(repository):
    program(repository.root / "gcloud", GCLOUD)
    for state, complaint, inside, *said in TPUS:
        tpu = TPU | dict(STATE=state, COMPLAINT=complaint, INSIDE=inside)
        for words in (["--status"], ["--preset", "tiny"]):
            result = repository.launch(*words, **tpu)
            assert_one_sentence(result, 1, "TPU_NAME=pod: ", *said)
            assert not result.stdout
    assert not (repository.root / "asked").exists()


def on_this_host(home, *call, lock="/tmp/no lock", **settings):
    """How a function of tools/cluster/on_host.sh ended, as it runs on a host, whose home is `home`. `lock` is libtpu's
    file, since this machine may have a real one."""
    settings = dict(FOLDER=home, SESSION="s", VENV=".venv", PYTHON="", host="h") | settings
    settings |= dict(MAX_RESTARTS=1, START_TIMEOUT=300)
    head = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in settings.items())
    script = (ROOT / "tools/cluster/on_host.sh").read_text()
    head += script.replace("/tmp/libtpu_lockfile", shlex.quote(str(lock)))
    head += shlex.join(map(str, call)) + " </dev/null\n"
    env = CLEAN | {"HOME": str(home), "TMUX_TMPDIR": str(home)}
    pipes = dict(input=head, capture_output=True, text=True, timeout=300)
    return subprocess.run(["bash"], env=env, **pipes)


# An ssh to which the TPU is closed until gcloud has put the key there, and then goes no further.
REFUSING = r"""#!/bin/bash
[[ -e $0.admitted ]] || { echo "Permission denied (publickey)." >&2; exit 255; }
echo "kex_exchange_identification: reset" >&2
exit 255
"""
ADMITTING = (
    GCLOUD
    + r"""case $* in
  *--dry-run) echo "/usr/bin/ssh -t -i key -o HostKeyAlias=tpu.1-0 $KNOWN_AS@10.0.0.2" ;;
  *"tpu-vm ssh"*) [[ -n $LOCKED ]] && { echo "ERROR: (gcloud) $LOCKED" >&2; exit 1; }; touch "${0%/*}/ssh.admitted" ;;
esac
"""
)


def test_a_tpu_that_does_not_know_the_key_gets_it_from_gcloud(repository, tmp_path):
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        "-c user.name=n -c user.email=e commit -qm m".split(),
    ):
        subprocess.run(["git", "-C", repository.root, *words], check=True)
    program(repository.root / "ssh", REFUSING)
    program(repository.root / "gcloud", ADMITTING)
    calls = repository.root / "gcloud.calls"

    def launch(**more):
        (repository.root / "ssh.admitted").unlink(missing_ok=True)
        calls.unlink(missing_ok=True)
        tpu = TPU | dict(STATE="READY", INSIDE="10.0.0.2", OUTSIDE="", COMPLAINT="", LOCKED="")
        result = repository.launch(
            **tpu | dict(HOME=str(tmp_path), KNOWN_AS=getpass.getuser()) | more
        )
        assert result.returncode == 1
        return result, [line for line in calls.read_text().splitlines() if "tpu-vm ssh" in line]

    result, asked = launch()
    assert "10.0.0.2 refuses this machine's key; asking gcloud" in result.stdout
    assert (
        asked[0]
        == "compute tpus tpu-vm ssh pod --zone z --project p --worker 0 --quiet --command true"
    )
    assert "cannot be reached by ssh (kex_exchange" in result.stderr, (
        result
    )  # so it was tried again

    result, _ = launch(KNOWN_AS="ext_me_uni_edu")  # OS Login
    assert_one_sentence(
        result, 1, "TPU_NAME=pod: ", 'write SSH_USER="ext_me_uni_edu" in cluster.env'
    )
    result, asked = launch(KNOWN_AS="ext_me_uni_edu", SSH_USER="ext_me_uni_edu")
    assert "ssh ext_me_uni_edu@pod --zone z" in asked[0] and "OS Login" not in result.stderr

    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh/google_compute_engine"  # made by gcloud
    key.write_text("private")
    result, asked = launch(LOCKED="you may not")
    assert f"--ssh-key-file {key} --worker 0" in asked[0]
    assert "note: gcloud could not connect either (ERROR: (gcloud) you may not)" in result.stdout
    assert f"10.0.0.2: refuses the key SSH_KEY={key}" in result.stderr


@pytest.mark.skipif(glob.glob("/dev/accel*") != [], reason="this machine has a TPU")
def test_a_tpu_whose_devices_cannot_be_used_is_told_before_the_launch(tmp_path):
    result = on_this_host(tmp_path, "devices", "tpu")
    assert_one_sentence(result, 1, "error: h: it belongs to a TPU but has no device")
    assert on_this_host(tmp_path, "devices", "cpu").returncode == 0

    # a process of another user, which only root can see
    program(tmp_path / "sudo", f'#!/bin/sh\n[ "$2" = true ] || echo /proc/{os.getpid()}/fd/3\n')
    result = on_this_host(tmp_path, "devices", "tpu", PATH=f"{tmp_path}:{os.environ['PATH']}")
    words = f"another run holds its devices (process {os.getpid()} of {getpass.getuser()} "
    assert_one_sentence(result, 1, words)


def test_a_lock_that_another_user_left_is_named(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    own = on_this_host(tmp_path, "devices", "tpu", lock=lock)
    assert "has no device" in own.stderr  # the next check
    if os.getuid() == 0:
        os.chown(lock, 12345, 12345)
    other = lock if os.getuid() == 0 else Path("/etc/passwd")
    result = on_this_host(tmp_path, "devices", "tpu", lock=other)
    assert_one_sentence(result, 1, f"libtpu cannot open {other}", f"left; sudo rm {other}")


SAID = "11:26:35 compiled in 13s"
TRACE = 'Traceback (most recent call last):\n  File "main.py", line 3, in f\n    return g()\n           ^^^\n'
ERROR = "error: --name x: no."
NOISE = """[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
E1122 11:28:49.777834    4112 coordination_service_agent.cc:289] Polled an error from coordination service.
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
2026-11-22 11:28:49.123456: W external/xla/xla/service/hlo_pass.cc:79] Slow pass
WARNING:absl:something about a checkpoint
/a/b.py:12: UserWarning: this is deprecated
  warnings.warn("this")

   \r
 45%|####5     | 45/100 [00:01<00:01, 38.7it/s]\r 46%|####6     | 46/100 [00:01<00:01, 38.7it/s]
tools/cluster/supervise.sh: line 23:  3995 Killed                  ( trap - INT; exec "$@" )
"""
AGAIN = "main.py ended with status 1; starting it again in 5 s"
LOGS = [  # a log, and what --status shows of it
    (f"{SAID}\n{NOISE}", SAID),
    (NOISE, ""),
    (f"{SAID}\n{TRACE}ValueError: a\n more\nof it\n{NOISE}", "ValueError: a"),
    (f"{TRACE}KeyError: 1\n\nDuring handling of it:\n\n{TRACE}OSError: 2\n", "OSError: 2"),
    (f"{SAID}\n{ERROR}\n{TRACE}ValueError: a\n{NOISE}Fatal Python error\n", ERROR),
    (f"{ERROR}\n{AGAIN}\n{NOISE}", AGAIN),
    (f"{ERROR}\n{TRACE}ValueError: a\n{AGAIN}\n{NOISE}{SAID}\n", SAID),
    (f"{SAID}\nException ignored in: <f>\n{TRACE}ValueError: a\n", SAID),
    (f"{SAID}\nF1122 11:28:49.7    4112 client.h:80] Terminating\n{NOISE}", "Terminating"),
    (f"{NOISE}boom 7\n", "boom 7"),
    ("tools/cluster/supervise.sh: line 2: /x: No such file\n", "tools/cluster/supervise.sh: l"),
    ("\x1b[31mboom\x1b[0m\r\n", "boom"),
]


def test_status_shows_the_last_line_that_means_something(tmp_path):
    state = tmp_path / ".moe-pretraining/s/h"
    state.mkdir(parents=True)
    (state / "status").write_text("3\n")
    for log, expected in LOGS:
        (state / "log").write_text(log)
        shown = on_this_host(tmp_path, "state").stdout
        end = f": {expected}" if expected else "\n"
        assert shown.startswith(f"ended with status 3{end}"), log


def test_status_fails_where_a_run_ended_neither_well_nor_by_a_signal(repository):
    (repository.root / "run.sh").write_text('cat "$2"\n')
    states = {
        "starting: 11:26:35 mesh": "ok",
        "running: error: of the life before": "ok",
        "ended with status 0: 11:26:35 done": "ok",
        "ended with status 143: 11:26:35 stopped": "ok",
        "ended with status 129": "ok",
        "ended with status 1: Traceback": "FAILED",
        "ended with status 2: error: --data": "FAILED",
        "ended with status 75: error: another process": "FAILED",
        "ended with status 137": "FAILED",
        "was killed, or its host restarted": "FAILED",
    }
    for state, word in states.items():
        (repository.root / "host").write_text(f"{state}\n")
        done = repository.launch("--status", HOSTS="host")
        assert done.stdout.splitlines()[1].split() == [word, "host", *state.split()]
        assert done.returncode == (word == "FAILED") and not done.stderr


LIVES = """#!/bin/bash
echo "$SECRET" >>"$HOME/lives"
ls "$HOME/.moe-pretraining/s/h" | grep start >>"$HOME/lives"
(($(wc -l <"$HOME/lives") == 2)) && echo 11:26:35 compiled in 1s || exit 1
"""


@pytest.fixture
def home(tmp_path):
    """The home of a host with tmux, whose FOLDER it is too."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    yield tmp_path
    env = CLEAN | {"TMUX_TMPDIR": str(tmp_path)}
    subprocess.run(["tmux", "-L", "moe-s-h", "kill-server"], env=env, capture_output=True)


def test_secrets_reach_every_life_and_no_file_outlives_their_reading(home):
    program(home / ".venv/bin/python", LIVES)
    done = on_this_host(home, "start", "1", "SECRET=s3cret\nRESTART_PAUSE=0\n", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: not on_this_host(home, "state").stdout.startswith("running"))
    assert on_this_host(home, "state").stdout.startswith("ended with status 0: 11:26:35")
    assert (home / "lives").read_text() == "s3cret\n" * 2
    # nor where no session could be started, nor where it ended before the file was read
    state = home / ".moe-pretraining/s/h"
    program(home / "tmux", "#!/bin/sh\nexit 1\n")
    path = f"{home}:{os.environ['PATH']}"
    done = on_this_host(home, "start", "2", "SECRET=s3cret\n", PATH=path)
    assert_one_sentence(done, 1, "tmux could not start")
    assert not list(state.glob("start.*"))
    (state / "start.3").write_text("SECRET=s3cret\n")
    assert on_this_host(home, "stop", "60").returncode == 0 and not list(state.glob("start.*"))


# both starts come as far as this, one is first, and its session begins when the other has failed
AT_ONCE = """#!/bin/bash
if [[ " $* " == *" new-session "* ]]; then
  echo >>"$HOME/came"
  until (($(wc -l <"$HOME/came") == 2)); do sleep 0.05; done
  set -- "${@:1:$#-1}" "sleep 1; ${*: -1}"
fi
exec TMUX "$@"
"""
WAITS = '#!/bin/bash\necho "$SECRET $*" >>"$HOME/lives"\necho 1 compiled in 1s\nexec sleep 600\n'


def test_of_two_starts_at_once_one_runs_with_its_own_secrets_and_flags(home):
    """The other fails, and its launch, which takes back what it started, does not touch it."""
    program(home / "bin/tmux", AT_ONCE.replace("TMUX", shutil.which("tmux")))
    program(home / ".venv/bin/python", WAITS)
    starts = [("start", name, f"SECRET=of-{name}", "--seed", name) for name in ("one", "two")]
    path = f"{home}/bin:{os.environ['PATH']}"
    with ThreadPoolExecutor(2) as both:
        started = both.map(lambda call: on_this_host(home, *call, PATH=path), starts)
        done = dict(zip(("one", "two"), started))
    first, second = sorted(done, key=lambda name: done[name].returncode)
    assert done[first].returncode == 0, done
    assert_one_sentence(done[second], 1, "error: h: a run of SESSION=s is there already")
    assert on_this_host(home, "stop", "60", second).returncode == 0
    assert on_this_host(home, "state").stdout == "running: 1 compiled in 1s\n"
    assert (home / "lives").read_text() == f"of-{first} main.py --seed {first}\n"
    state = home / ".moe-pretraining/s/h"
    assert not list(state.glob("start.*")) and not (state / "stopping").exists()
    stopped = on_this_host(home, "stop", "60", first)
    assert stopped.stdout == "ended with status 143: 1 compiled in 1s\n", stopped
    # a start that was taken back while it was on its way, and one after it
    assert on_this_host(home, "stop", "60", "three").returncode == 0
    assert on_this_host(home, "start", "three", "SECRET=3").returncode == 1
    assert (home / "lives").read_text().count("\n") == 1


HUNG = """#!/bin/bash
trap 'echo TERM >>"$HOME/signals"' TERM
sleep 601 &
setsid sleep 602 &
echo $$ $! >"$HOME/pids"
pgrep -P $$ >>"$HOME/pids"
echo 1 compiled in 1s
while :; do sleep 0.1; done
"""


def test_a_run_that_ignores_sigterm_is_killed_whole_and_nobody_else(home):
    program(home / ".venv/bin/python", HUNG)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        for pid in ("", str(stranger.pid)):  # a process id that was left there may be another's now
            assert on_this_host(home, "start", f"1{pid}", "").returncode == 0
            if pid:
                (home / ".moe-pretraining/s/h/pid").write_text(pid)
            done = on_this_host(home, "stop", "2")
            assert_one_sentence(done, 137, "h: it still ran STOP_TIMEOUT=2 s after", "by SIGKILL")
            assert done.stdout.startswith("ended with status 137: error: it still ran"), done
            assert (home / "signals").read_text() == "TERM\n"
            pids = (home / "pids").read_text().split()
            words = ["ps", "-o", "stat=", "-p", ",".join(pids)]
            left = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
            assert len(pids) >= 4 and all(state.startswith("Z") for state in left)
            assert stranger.poll() is None
        stranger.kill()
    done = on_this_host(home, "stop", "60")
    assert done.returncode == 0 and done.stdout.startswith("ended with status 137"), done


# A Python whose venv is a copy of itself and whose pip only writes down what it was to install.
STAND_IN = """#!/bin/sh
root="{root}"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
  *"-m pip install "*)
    while [ "$1" != -r ]; do shift; done
    cat "$2" >"$root/pip"
    if [ -e "$root/no network" ]; then echo "no network" >&2; exit 1; fi ;;
  *) exec "{python}" "$@" ;;
esac
"""


class Setup:
    """setup_tpu.sh beside a small pyproject.toml, with the stand-in as $PYTHON."""

    def __init__(self, root):
        self.root, self.python, self.script = root, root / "bin/python", root / "setup_tpu.sh"
        (root / "runtime").mkdir(parents=True)
        for file in ("setup_tpu.sh", "runtime/platforms.py"):
            shutil.copy(ROOT / file, root / file)
        self.write_project("one>=1")
        program(self.python, STAND_IN.format(root=root, python=sys.executable))

    def write_project(self, dependency):
        extras = 'tpu = ["jax[tpu]"]\ncuda = ["jax[cuda12]"]\ntest = ["pytest"]\n'
        head = f'[project]\ndependencies = ["{dependency}"]\n[project.optional-dependencies]\n'
        (self.root / "pyproject.toml").write_text(head + extras)

    def __call__(self, *extras, **environment):
        """Set up with the extras; returns what pip was told to install (None: it was not called) and the result."""
        pip = self.root / "pip"
        pip.unlink(missing_ok=True)
        environment = {"PYTHON": str(self.python), "JAX_PLATFORMS": "cpu"} | environment
        result = bash(self.script, *extras, **environment)
        return pip.read_text().split() if pip.exists() else None, result


@pytest.fixture
def set_up(tmp_path):
    return Setup(tmp_path / "a folder")


def test_setup_installs_once_and_again_what_changed(set_up):
    installed, result = set_up("test")
    assert installed == ["one>=1", "pytest"] and result.returncode == 0, result.stderr
    for extras in (["test"], []):  # nothing to do, and nothing to say
        installed, result = set_up(*extras)
        assert (installed, result.returncode, result.stdout, result.stderr) == (None, 0, "", "")
    # extras accumulate
    assert set_up(JAX_PLATFORMS="cuda")[0] == ["one>=1", "jax[cuda12]", "pytest"]
    set_up.write_project("two>=2")
    assert set_up()[0] == ["two>=2", "jax[cuda12]", "pytest"]
    assert set_up()[0] is None


def test_a_setup_waits_for_another_one(set_up):
    if not shutil.which("flock"):
        pytest.skip("flock is not installed")
    env = CLEAN | {"PYTHON": str(set_up.python), "JAX_PLATFORMS": "cpu"}
    with open(set_up.root / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(["bash", set_up.script], env=env, stdout=subprocess.PIPE)
        assert b"waiting for another setup" in process.stdout.readline()
        assert not (set_up.root / "pip").exists()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and (set_up.root / "pip").exists(), said


def test_setup_mends_what_failed_or_broke_and_nothing_else(set_up):
    set_up()
    set_up.write_project("two>=2")
    (set_up.root / "no network").touch()
    _, result = set_up()
    assert result.returncode == 1 and result.stderr.startswith("no network\nerror: ")
    assert result.stderr.count("\n") == 2
    (set_up.root / "no network").unlink()
    set_up.write_project("one>=1")  # the project of the first stamp: only its absence tells
    assert set_up()[0] == ["one>=1"]
    program(set_up.root / ".venv/bin/python", "#!/bin/sh\nexit 1\n")
    installed, result = set_up()
    assert installed == ["one>=1"] and "rebuilding .venv" in result.stdout
    installed, result = set_up(VENV="runtime")
    assert installed is None and os.listdir(set_up.root / "runtime") == ["platforms.py"]
    assert_one_sentence(result, 1, "VENV=runtime")


# The python3 of Ubuntu 22.04, which Cloud TPUs have: 3.10, with pip. It is too old, so setup_tpu.sh gets uv by it.
PYTHON_310 = """#!/bin/sh
case "$*" in
  *version_info*) exit 1 ;;
  "-m pip install"*" --target "*)
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/bin" && cp "{uv}" "$2/bin/uv" ;;
  "-m pip --version") ;;
  *) exec "{python}" "$@" ;;
esac
"""
UV = """#!/bin/sh
echo "$@" >"{root}/uv"
while [ $# -gt 1 ]; do shift; done
exec "{stand_in}" -m venv "$1"
"""


def test_a_machine_with_an_old_python_gets_a_new_one_by_uv(set_up, tmp_path):
    bin = tmp_path / "bin"
    bin.mkdir()
    tools = "bash sh cat cksum cp cut dirname find head grep mkdir mktemp mv rm sed sleep tail touch wc flock"
    for name in tools.split():
        (bin / name).symlink_to(shutil.which(name))
    program(bin / "a uv", UV.format(root=set_up.root, stand_in=set_up.python))
    program(bin / "python3", PYTHON_310.format(uv=bin / "a uv", python=sys.executable))
    nowhere = dict(HOME=str(tmp_path), PYENV_ROOT=str(tmp_path))
    installed, result = set_up(PYTHON="", PATH=str(bin), **nowhere)
    assert installed == ["one>=1"] and result.returncode == 0, result.stderr
    assert "making .venv by uv, since no Python 3.11 or newer" in result.stdout
    assert "--python >=3.11,<3.14 .venv" in (set_up.root / "uv").read_text()


def test_setup_refuses_in_one_sentence(set_up):
    old = set_up.root / "old"
    program(old, '#!/bin/sh\n[ "$1" = -I ] && exit 1\necho is 3.9.1\n')
    assert_one_sentence(set_up(PYTHON="nonsense")[1], 1, "PYTHON=nonsense", "3.11")
    assert_one_sentence(set_up(PYTHON=str(old))[1], 1, "3.9.1", "3.11")
    assert_one_sentence(set_up("nonsense")[1], 1, "nonsense", "test")
    assert_one_sentence(set_up("--nonsense")[1], 1, "--nonsense", "--help")


def test_setup_says_what_the_machine_has(set_up, monkeypatch):
    for chosen, machine in [("cpu", "cpu"), ("tpu,cpu", "tpu"), ("cuda", "gpu")]:
        result = bash(set_up.script, "--accelerator", JAX_PLATFORMS=chosen)
        assert (result.stdout, result.returncode) == (machine + "\n", 0)
    monkeypatch.delenv("JAX_PLATFORMS")
    found = bash(set_up.script, "--accelerator")
    assert found.stdout.strip() == platforms.accelerator() and not found.stderr
