"""launcher.sh --keep: a slice that comes and goes, made by a gcloud of the tests; its hosts have real sshd and tmux.

The run on it is tests/fake_training.py. `python -m tests.soak.slices` trains.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloud as clouds
import fake_training
import pytest
from helpers import ROOT, in_session, refusal
from helpers import wait_for as wait
from script_helpers import CLEAN, assert_one_sentence

from config.command_line import check_on_slice, places_of
from config.settle import validate
from tools.cluster import keeper, slices
from tools.cluster.record import Folder, Record
from utils import flatten

PLACES = "--data gs://bucket/shards --output_dir gs://bucket/runs"
RUN = f"--preset tiny {PLACES} --name run --save_steps 10 --training_steps"
# on the hosts alone: the machine that keeps runs no main.py
FAKE = f'[[ $1 != main.py ]] || exec {sys.executable} {ROOT}/tests/fake_training.py BUCKET "$@"'


def wait_for(condition):
    """On a busy machine a slice, a launch and a look take minutes."""
    wait(condition, 900)


@pytest.fixture(scope="module")
def made():
    if why := clouds.lacks():
        pytest.skip(why)
    cloud = clouds.Cloud()
    instead = FAKE.replace("BUCKET", str(cloud.folder / "buckets/bucket"))
    yield clouds.Keeping(cloud, instead)
    cloud.close()


@pytest.fixture
def kept(made):
    """The machine that keeps, with nothing on it, nor in its bucket and cloud. Afterwards nothing is left over: no
    slice, network, process or session."""
    made.cloud.reset()
    for folder in (made.home, made.bucket / "runs"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    made.set()
    yield made
    end = time.monotonic() + 60
    while made.cloud.leftovers() and time.monotonic() < end:
        time.sleep(0.1)
    assert made.cloud.leftovers() == [] and made.cloud.most <= 1


def keep(kept, steps, *words, **environment):
    return kept.launch("--keep", *RUN.split(), steps, *words, **environment)


def assert_done(kept, done, steps):
    assert done.returncode == 0, done.stdout + done.stderr
    assert kept.bits(steps) == fake_training.bits_after(steps)
    assert "error: " not in done.stderr, done.stderr


def test_a_run_is_kept_to_its_end(kept):
    done = keep(kept, 30)
    assert_done(kept, done, 30)
    created = [call for call in kept.cloud.view()["calls"] if " create " in call]
    assert len(created) == 1 and "--spot" in created[0]
    assert "--accelerator-type v4-8 --runtime-version tpu-ubuntu2204-base" in created[0]
    status = kept.launch("--status")
    assert status.returncode == 0, status.stderr
    assert "ended at" in status.stdout and "done at step 30" in status.stdout
    assert " chip-hours, about $" in status.stdout and "goodput  50%" in status.stdout
    assert "slices lost: 0" in status.stdout
    stop = kept.launch("--stop")
    assert stop.returncode == 0 and "nothing is left to stop: the run is done" in stop.stdout
    # a run that has ended begins anew, without a word about the old one
    assert_done(kept, keep(kept, 40), 40)


@pytest.mark.parametrize("seed", range(1, 1 + int(os.environ.get("SEEDS", 1))))
def test_ten_preemptions_at_drawn_moments_change_no_bit(kept, seed):
    """With a gcloud that is slow, fails, or loses answers. The keeper is killed three times too.

    SEEDS=6 ... -k ten_preemptions -rP prints a row for each of six seeds.
    """
    rng = random.Random(f"preemptions {seed}")
    kept.cloud.reset(hosts=2, faulty=0.15, seed=seed)
    kept.cloud.plan = clouds.moments(rng, 10, longest=0.7)
    kept.cloud.hold()
    process = kept.keep(rng, 3, *RUN.split(), 80)
    assert_done(kept, process, 80)
    assert len(kept.cloud.preemptions) == 10, kept.log()
    # in its setup, when running and in a checkpoint there is a slice
    assert kept.record["lost"] >= 3
    print(f"| {seed} | {', '.join(kept.cloud.preemptions)} | {kept.summary()} |")


FLAGS = [  # of main.py, and what the sentence holds
    ("--modle_dimension 3", "--modle_dimension"),
    ("--n_device_axis 16 1 1", "--n_device_axis 16 1 1: dp x pp x tp is 16 but", "devices, 4"),
    ("--output_dir runs", "--output_dir runs: a slice that vanishes takes its disks with it"),
    ("--data shards", "--data shards: a slice that vanishes", "gs://"),
    ("--data shards --mix gs://bucket/web:1,code:1", "--data shards: a slice that vanishes"),
]


def test_flags_are_checked_for_the_devices_and_disks_of_a_slice():
    for flags, *words in FLAGS:
        refusal(lambda: check_on_slice([*RUN.split(), "9", *flags.split()], "v4-8"), *words)
    refusal(lambda: check_on_slice(["--preset", "tiny"], "v4-8"), "no --output_dir: a slice")
    given = check_on_slice([*RUN.split(), "9", "--n_device_axis", "0", "1", "2"], "v5e-8").cfg.run
    assert given.n_device_axis == (0, 1, 2)
    resumed = [*RUN.split(), "9", "--name", "week"]
    settled = flatten(validate(check_on_slice(resumed, "v4-8").cfg, 4))
    stored = json.loads(json.dumps(settled)) | {"data_fingerprint": "x"}
    assert check_on_slice(resumed, "v4-8", stored).cfg.run.name == "week"
    other = [*resumed, "--global_batch_size", "64"]
    refusal(
        lambda: check_on_slice(other, "v4-8", stored), "--global_batch_size 64: run week exists"
    )
    mixed = check_on_slice([*RUN.split(), "9", "--mix", "gs://bucket/web:1,code:1"], "v4-8").cfg
    assert places_of(mixed)[1:] == ["gs://bucket/web", "gs://bucket/shards/code"]
    for kind, said in (("v4-12", "near it are v4-8 and v4-16"), ("v7x-8", "in Kubernetes only")):
        refusal(lambda: check_on_slice(RUN.split() + ["9"], kind), f"TPU_TYPE={kind}: ", said)


VIEWS = [  # states of the request and of its node, "" where there is none, and what the keeper makes of them
    (" ", "none"),
    (" READY", "deleting"),  # made by us, for a request that is gone
    ("ACCEPTED ", "queued"),
    ("WAITING_FOR_RESOURCES ", "queued"),
    ("PROVISIONING CREATING", "queued"),
    ("ACTIVE CREATING", "queued"),
    ("ACTIVE READY", "ready"),
    ("ACTIVE RESTARTING", "queued"),
    ("ACTIVE REPAIRING", "lost"),
    ("ACTIVE PREEMPTED", "lost"),
    ("ACTIVE ", "lost"),
    ("SUSPENDING PREEMPTED", "lost"),
    ("SUSPENDED ", "lost"),
    ("FAILED ", "lost"),
    ("DELETING READY", "deleting"),
]


def test_what_google_says_of_a_slice_is_understood(monkeypatch):
    slice_ = slices.Slice("pod", (), (), "ours")

    def view(states):
        request, node = states.split(" ")
        made = {"labels": {slices.LABEL: "ours"}, "state": node, "createTime": "now"}
        asked = {"state": {"state": request}, "tpu": {"nodeSpec": [{"node": made}]}}
        answers = {"queued-resources": asked if request else None, "tpu-vm": made if node else None}
        monkeypatch.setattr(slices.Slice, "_describe", lambda self, kind: answers[kind])
        return slice_.look()

    assert {states: view(states).kind for states, _ in VIEWS} == dict(VIEWS)
    for states in (
        "STATE_UNSPECIFIED ",
        "ACTIVE STATE_UNSPECIFIED",
    ):  # no reason to delete anything
        with pytest.raises(slices.Passing):
            view(states)


def test_progress_is_a_newer_checkpoint(tmp_path, capsys):
    """It forgets failures. A run that loses its steps is told why, and one that has made none is not."""
    folder = Folder(tmp_path)
    folder.save(Record("", [], "", False, []))
    kept = keeper.Keeper(None, folder, 4)
    for log, failures, said in (
        ("", 3, ""),
        ("", 3, "resumed at step 0 again"),
        ("01:02:03 resuming run at step 20, after 640 sequences", 0, ""),
        ("01:02:03 resuming run at step 20, after 640 sequences", 3, "resumed at step 20 again"),
    ):
        kept.record.failures, kept.log = 3, lambda lines: log
        kept.note_progress()
        assert kept.record.failures == failures
        assert said in capsys.readouterr().out if said else not capsys.readouterr().out


def test_a_script_that_hangs_is_ended_with_all_that_it_began(tmp_path):
    words = ["-c", f"sleep 1000 & echo $$ >{tmp_path}/pid; wait"]
    done = keeper.run_script(words, dict(os.environ), seconds=1)
    assert done.returncode == 1 and "took over 1 s" in done.stderr
    assert in_session(int((tmp_path / "pid").read_text())) == []


SETTINGS = [  # of cluster.env, and what the sentence holds
    ("TPU_TYPE=eight", "TPU_TYPE=eight: must be a slice as Google names it"),
    ("TPU_NAME=My_Pod", "TPU_NAME=My_Pod: must be a name for the slice"),
    ("ZONE=", "ZONE=: must be the zone of the slice"),
    ("SPOT=maybe", "SPOT=maybe: must be yes, no or empty"),
    ("HOSTS=a", "HOSTS, TPU_TYPE: ", "not both"),
    (
        "TPU_TYPE=",
        "there is no such TPU in ZONE=us-central2-b",
        "or set TPU_TYPE and have --keep ask",
    ),
    ("TPU_TYPE= TPU_NAME=", "--keep: TPU_TYPE, TPU_NAME and ZONE in cluster.env must say"),
]
MISTAKES = [  # flags, and what the sentence holds
    ("--modle_dimension 3", "--modle_dimension"),
    ("--data gs://bucket/shard", "--data gs://bucket/shard: there is nothing"),
    ("--output_dir gs://buckle/runs", "gs://buckle: there is no such bucket", "404"),
]


def assert_no_slice_was_asked_for(kept, done, status, *words):
    assert_one_sentence(done, status, *words)
    assert kept.cloud.view()["created"] == 0


def test_mistakes_are_found_before_a_slice_is_asked_for(kept):
    for setting, *words in SETTINGS:
        kept.set(setting)
        assert_no_slice_was_asked_for(kept, keep(kept, 30), 1, *words)
    kept.set()
    for words, said in (
        (["--keep", "--restart"], "--restart"),
        (RUN.split(), "is started by --keep"),
    ):
        assert_no_slice_was_asked_for(kept, kept.launch(*words), 1, said)
    for word in ("--status", "--stop"):
        done = kept.launch(word)
        assert_no_slice_was_asked_for(kept, done, 2, "TPU_NAME=pod: nothing is kept")
    done = kept.launch("--logs", "keeper")
    assert_no_slice_was_asked_for(kept, done, 1, "TPU_NAME=pod: nothing was kept so far")
    done = kept.launch("--attach", "keeper")
    assert_no_slice_was_asked_for(kept, done, 1, "no keeper is at work in tmux now")
    for flags, *words in MISTAKES:
        assert_no_slice_was_asked_for(kept, keep(kept, 30, *flags.split()), 2, *words)
    kept.run.mkdir()
    (kept.run / "config.json").write_text('{"model_dimension": 32}')
    done = keep(kept, 30, "--model_dimension", 64)
    assert_no_slice_was_asked_for(
        kept, done, 2, "--model_dimension 64: run run exists and has --model_dimension 32"
    )
    (kept.run / "config.json").unlink()
    kept.set("ZONE=us-central2-c")
    done = keep(kept, 30)
    assert done.returncode == 1 and kept.cloud.view()["created"] == 0
    assert "error: gcloud refuses (PERMISSION_DENIED: Permission denied on" in done.stdout


QUOTA = "RESOURCE_EXHAUSTED: Quota limit 'TPUV4sPreemptiblePerProject' has been exceeded. Limit: 0"


def test_googles_refusal_is_one_sentence_and_a_bucket_elsewhere_is_named(kept):
    kept.cloud.reset(refuses=QUOTA, buckets={"bucket": "EU"})
    done = keep(kept, 30)
    (said,) = re.findall("error: .*", done.stdout)
    assert done.returncode == 1 and said == f"error: Google refuses the slice ({QUOTA})"
    assert "note: gs://bucket lies in EU, the slice in us-central2; Google charges" in done.stderr


FULL = "There is no more capacity in the zone"


def test_a_request_that_fails_is_made_again_unless_that_is_hopeless(kept):
    kept.cloud.reset(failures=[FULL])
    done = keep(kept, 20)
    assert_done(kept, done, 20)
    assert f"refuses the slice (FAILED ({FULL})); asking again in" in done.stdout
    kept.cloud.reset(failures=[QUOTA])
    done = keep(kept, 30)
    assert (
        done.returncode == 1
        and f"error: Google refuses the slice (FAILED ({QUOTA}))" in done.stdout
    )
    assert kept.cloud.view()["created"] == 1


def test_a_slice_of_others_is_not_touched(kept):
    """Neither a request with another label, nor a node that somebody made by hand."""
    node = {"state": "READY", "labels": {"moe-pretraining-keeper": "another"}}
    request = {"state": {"state": "SUSPENDED"}, "tpu": {"nodeSpec": [{"node": node}]}, "since": 0}
    for made in (dict(requests={"pod": request}), dict(nodes={"pod": {"state": "READY"}})):
        kept.cloud.reset(**made)
        done = keep(kept, 30)
        assert done.returncode == 1 and "that this keeper did not make" in done.stdout, done.stdout
        view = kept.cloud.view()
        assert view["requests"].keys() | view["nodes"].keys() == {"pod"}
        assert not any(" delete " in call or " create " in call for call in view["calls"])
    kept.cloud.reset()


def test_a_run_that_needs_a_change_or_fails_always_costs_no_more(kept):
    """The keeper ends with the run's reason, and deletes the slice."""
    for file, starts, status, said in (
        ("refuses", 1, 2, "error: --max_lr 9"),
        ("crashes", 5, 1, "status 1"),
    ):
        kept.cloud.reset()
        kept.run.mkdir(parents=True, exist_ok=True)
        (kept.run / file).write_text("--max_lr 9: too much.")
        done = keep(kept, 30)
        assert done.returncode == status and kept.record["starts"] == starts, done.stdout
        assert said in kept.record["ending"][1], done.stdout
        assert kept.cloud.view()["created"] == 1 and not kept.cloud.view()["requests"]
        assert kept.launch("--status").returncode == 1
        (kept.run / file).unlink()


def test_stop_saves_and_deletes_with_and_without_a_keeper(kept):
    """Also a slice that KEEP_SLICE left, and one whose keeper was killed. Meanwhile nobody else can keep it."""
    kept.cloud.hold()
    kept.set("KEEP_SLICE=yes")
    file = kept.repo / "designed.json"
    file.write_text('{"max_lr": 0.01}')
    words = ["--config", "designed.json"]
    keeper = kept.begin("--keep", *RUN.split(), "50", *words)
    wait_for(lambda: list(kept.run.glob("20")))
    done = keep(kept, 50, *words)
    assert_one_sentence(
        done, 2, "TPU_NAME=pod: process ", " keeps this slice already; see --status"
    )
    status = kept.launch("--status")
    assert status.returncode == 0 and "running: " in status.stdout, status.stderr
    assert (
        "spot v4-8 in us-central2-b" in status.stdout and "state    running since" in status.stdout
    )
    os.kill(kept.record["process"], signal.SIGKILL)
    keeper.wait()
    status = kept.launch("--status")
    assert status.returncode == 2 and "nobody keeps the slice any more" in status.stderr
    assert status.stderr.rstrip().endswith(f"--keep {RUN} 50 --config designed.json")
    file.write_text('{"max_lr": 0.02}')
    assert_one_sentence(keep(kept, 50, *words), 2, "the file of --config has changed since the run")
    done = keep(kept, 40)
    assert_one_sentence(
        done, 2, f"kept for another run, started by bash launcher.sh --keep {RUN} 50"
    )

    stop = kept.launch("--stop")
    assert stop.returncode == 0 and "the slice stays, as KEEP_SLICE says" in stop.stdout, (
        stop.stdout
    )
    assert "pod" in kept.cloud.view()["nodes"]
    saved = max(int(path.name) for path in kept.run.glob("[0-9]*"))
    assert saved == 49 and kept.bits(saved) == fake_training.bits_after(saved)
    kept.set()
    kept.cloud.hold(False)
    keeper = kept.begin("--keep", *RUN.split(), "2000")  # on the slice that is there
    wait_for(lambda: list(kept.run.glob("60")))
    stop = kept.launch("--stop")
    out, err = keeper.communicate(timeout=1000)
    assert stop.returncode == 0 and "stopping the run, with a checkpoint" in stop.stdout, (
        stop.stdout
    )
    assert keeper.returncode == 143 and kept.cloud.view()["created"] == 1, out + err


def test_hosts_that_do_not_answer_and_maintenance_lose_the_slice(kept):
    kept.cloud.hold()
    keeper = kept.begin("--keep", *RUN.split(), "30")
    wait_for(lambda: list(kept.run.glob("20")))
    clouds.ip("link", "set", kept.cloud.instances[0].link, "down")
    wait_for(lambda: kept.record["lost"] == 1)
    wait_for(lambda: kept.record["phase"] == "running")
    with kept.cloud.opened() as content:
        content["nodes"]["pod"]["health"] = "UNHEALTHY_MAINTENANCE"
    wait_for(lambda: kept.record["lost"] == 2)
    kept.cloud.hold(False)
    keeper.stdout, keeper.stderr = keeper.communicate(timeout=1000)
    assert_done(kept, keeper, 30)
    assert "a host does not answer" in keeper.stdout or "cannot be reached" in keeper.stdout
    assert "UNHEALTHY_MAINTENANCE" in keeper.stdout


def test_it_works_in_tmux_by_itself_with_files_as_they_are_here(kept):
    """The command returns when the slice is asked for. What --sync sends stays the same until the run has ended."""
    kept.cloud.hold()
    (kept.repo / "new.txt").write_text("first")
    apart = {"TMUX_TMPDIR": str(kept.cloud.folder), "WANDB_API_KEY": "s3cr3t"}
    done = kept.launch("--keep", "--sync", *RUN.split(), "30", TMUX=None, **apart)
    assert done.returncode == 0 and "the keeper works in the background" in done.stdout, done.stdout
    (kept.repo / "new.txt").write_text("second")
    wait_for(lambda: list(kept.run.glob("20")))
    tmux = ["tmux", "-L", "moe-keep-p-us-central2-b-pod"]
    env = CLEAN | apart
    for words in (["show-environment", "-g"], ["list-panes", "-F", "#{pane_start_command}"]):
        said = subprocess.run([*tmux, *words], env=env, capture_output=True, text=True)
        assert said.returncode == 0 and "s3cr3t" not in said.stdout
    (instance,) = kept.cloud.instances
    assert b"WANDB_API_KEY=s3cr3t" in Path(f"/proc/{instance.pid}/environ").read_bytes()
    os.kill(kept.record["process"], signal.SIGKILL)
    with kept.cloud.opened() as content:
        kept.cloud.preempt(content, "pod")
    done = kept.launch("--keep", "--sync", *RUN.split(), "30", TMUX=None, **apart)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: kept.record["phase"] == "running" and kept.record["starts"] == 2)
    assert (kept.cloud.instances[0].code / "new.txt").read_text() == "first"
    assert "starting the run on 1 hosts" in kept.launch("--logs", "keeper").stdout
    kept.cloud.hold(False)
    wait_for(lambda: kept.record["has_ended"])
    assert kept.bits(30) == fake_training.bits_after(30)
