"""A branch off a trunk is to the bit the run that was planned so from the start, and leaves the trunk as it was."""

import hashlib
import json
import os

import pytest
from conftest import run_program, small_config
from test_resume import assert_bitwise, checkpoint_of, damage, metrics_of

import main
import presets
import utils
from runtime import files, messages
from training import branches, command_line, settings

TRUNK = dict(schedule="wsd", end_lr=0.0, dropout_rate=0.1, blocks=1)


def contents(folder):
    """{path: (hash, time of the last change)} of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path: (hashlib.md5(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in files
    }


def follow(trunk, **flags):
    """What `command_line.parse` makes of --branch_from and these flags. (The parser compiles source, which Python 3.11
    cannot do beside other threads.)"""
    cfg = utils.replace(presets.preset("moe1b"), branch_from=str(trunk), **flags)
    given = {"branch_from", *flags}
    flags = settings.Flags(cfg, given)
    branches.check_flags(flags)
    return branches.follow_trunk(flags)


def losses_of(run):
    return [row["loss/train_loss"] for row in metrics_of(run)]


def test_branches_are_the_whole_runs_to_the_bit_and_the_trunk_stays_as_it_was(train, tmp_path):
    runs = tmp_path / "runs"
    trunk, moved = runs / "trunk", runs / "moved"

    def whole(end, decay):
        flags = dict(end_steps=end, training_steps=end, decay_steps=decay)
        assert train(**TRUNK, **flags, name=f"whole-{end}") == 0
        return runs / f"whole-{end}"

    def check(run, whole, step, end):
        assert_bitwise(checkpoint_of(run, end), checkpoint_of(whole, end))
        assert losses_of(run) == losses_of(whole)[step:]
        assert [row["step"] for row in metrics_of(run)] == list(range(step + 1, end + 1))

    assert train(**TRUNK, name="trunk", training_steps=6, save_steps=3) == 0
    before = contents(trunk)

    # one command, with nothing but what must be said
    said = run_program("--branch_from", trunk, "--branch_step", 3, "--decay_steps", 2)
    assert said.returncode == 0, said.stderr
    assert f"trunk-3-2 branches off {trunk} at step 3" in said.stdout
    check(runs / "trunk-3-2", whole(5, 2), 3, 5)

    # another length, and a decay that begins after the checkpoint
    assert main.main(follow(trunk, branch_step=3, decay_steps=4, end_steps=8)) == 0
    check(runs / "trunk-3-4", whole(8, 4), 3, 8)

    # another checkpoint, stopped and resumed after the trunk has gone
    same = dict(branch_step=6, decay_steps=3, name="parts")
    assert main.main(follow(trunk, **same, training_steps=7)) == 0
    assert contents(trunk) == before
    trunk.rename(moved)
    assert main.main(follow(trunk, **same)) == 0
    check(runs / "parts", whole(9, 3), 6, 9)
    moved.rename(trunk)
    config = json.loads((runs / "parts" / "config.json").read_text())
    assert (config["branch_from"], config["branch_step"]) == (str(trunk), 6)

    # another mesh
    mesh = dict(n_device_axis=(4, 1, 2), n_devices=8, microbatches=1)
    assert main.main(follow(trunk, branch_step=6, decay_steps=3, **mesh)) == 0
    assert losses_of(runs / "trunk-6-3") == pytest.approx(losses_of(runs / "parts"), abs=1e-4)
    assert contents(trunk) == before

    # a damaged checkpoint: a sentence, and no file is left behind
    damage(trunk / "checkpoints" / "3")
    with pytest.raises(messages.UserError, match="checkpoint 3 is damaged .*; take one of another"):
        main.main(follow(trunk, branch_step=3, decay_steps=1))
    assert not contents(runs / "trunk-3-1")


@pytest.fixture
def made(tmp_path):
    """`made(name, steps, **flags)`: a run directory with a config.json and, of checkpoints, what is kept beside."""

    def make(name="trunk", steps=(100, 200), **flags):
        flags = {"schedule": "wsd", "end_steps": 1000, "warmup_steps": 10, **flags}
        cfg = utils.replace(small_config(**flags), name=name, output_dir=str(tmp_path))
        stored = utils.flatten(cfg) | {"data_fingerprint": "x"}
        files.write_file(os.path.join(cfg.run.folder, "config.json"), json.dumps(stored))
        for step in steps:
            path = os.path.join(cfg.run.folder, "checkpoints", str(step), "meta", "metadata")
            files.write_file(path, json.dumps({"config": settings.to_resume(cfg, "x")}))
        return cfg.run.folder

    return make


def test_a_branch_follows_its_trunk_in_all_that_was_not_given(made, tmp_path):
    folder = made(weight_decay=0.03, eval_every=7, keep_every=50, decay_steps=100)
    cfg, given = follow(folder + "/", branch_step=200, decay_steps=50, end_lr=1e-6, eval_every=9)
    o, r = cfg.optimizer, cfg.run
    assert (o.schedule, o.weight_decay, o.end_lr) == ("wsd", 0.03, 1e-6)
    assert (o.warmup_steps, o.decay_steps, o.end_steps, r.training_steps) == (10, 50, 250, 250)
    assert (r.eval_every, r.keep_every, cfg.model.blocks) == (9, 50, 4)
    assert (r.name, r.output_dir, r.branch_from) == ("trunk-200-50", str(tmp_path), folder)
    assert settings.follow(settings.Flags(cfg, given)).cfg == cfg
    other = dict(name="b", output_dir="elsewhere")
    later, _ = follow(folder, branch_step=200, end_steps=400, decay_steps=50, **other)
    assert (later.optimizer.decay_steps, later.optimizer.end_steps) == (50, 400)
    assert later.run.folder == "elsewhere/b"


def test_the_step_where_the_decay_begins_is_the_last_that_can_be_branched(made):
    folder = made(steps=(100, 200, 201), end_steps=300, decay_steps=100)
    assert follow(folder, branch_step=200, decay_steps=9)[0].optimizer.end_steps == 209
    with pytest.raises(
        messages.UserError, match="--branch_step 201: the decay .* at step 200; .* 100"
    ):
        follow(folder, branch_step=201, decay_steps=9)
    stored = files.read_json(folder, "config.json")  # the trunk has gone on without a decay since
    files.write_file(folder + "/config.json", json.dumps(stored | {"decay_steps": 0}))
    with pytest.raises(messages.UserError, match="--branch_step 201: the decay"):
        follow(folder, branch_step=201, decay_steps=9)


WRONG = [  # flags of a branch, and what is said
    (dict(branch_step=150), "--branch_step 150: .* no checkpoint of that step; there are 100, 200"),
    (dict(max_lr=0.5), "--max_lr 0.5: the trunk .* has 0.005; leave the flag out"),
    (dict(schedule="linear"), "--schedule linear: the trunk .* has wsd"),
    (dict(end_steps=190), "--end_steps 190: must be above --branch_step 200"),
    (dict(end_steps=210), "--decay_steps 20: would begin at step 190, before --branch_step 200"),
    (dict(decay_steps=0), "--decay_steps 0: a branch must decay"),
    (dict(init_from="x"), "--init_from x: a branch begins with the weights of --branch_from"),
    (dict(name="other"), "--name other: this run exists, and is no branch of"),
    (dict(name="branch"), "--decay_steps 20: run branch has 30; leave the flag out"),
    (dict(name="branch", decay_steps=30, T=8), "--T 8: run branch has 32; leave the flag out"),
]


def test_what_a_branch_cannot_be_is_a_sentence(made, tmp_path):
    trunk = made()
    made("other")
    decay = dict(branch_step=200, end_steps=230, decay_steps=30)
    made("branch", steps=(), branch_from=trunk, **decay)
    for flags, said in WRONG:
        flags = dict(branch_step=200, decay_steps=20, output_dir=str(tmp_path)) | flags
        with pytest.raises(messages.UserError, match=rf"^{said}[^\n]*\.$"):
            follow(trunk, **flags)


def test_what_is_no_trunk_is_a_sentence(made, tmp_path):
    cases = {
        made("cosine", schedule="cosine"): "is cosine.*only runs of wsd can be branched",
        tmp_path / "nowhere": "nowhere: is no run directory",
        made("new", steps=()): "--branch_step 100: .*; there are none",
    }
    for folder, said in cases.items():
        with pytest.raises(messages.UserError, match=said):
            follow(folder, branch_step=100, decay_steps=5)
    cfg, given = follow(made(), branch_step=100, decay_steps=5)
    with pytest.raises(messages.UserError, match="--branch_from .*: the trunk saw other data"):
        settings.check_data(cfg, {}, "y")


def test_flags_of_a_branch_stand_together():
    for words, said in (
        ("--branch_step 3", "--branch_step 3: needs --branch_from beside it"),
        ("--branch_from x --decay_steps 3", "--branch_from x: needs --branch_step beside it"),
        ("--branch_from x --branch_step 3", "--branch_from x: needs --decay_steps beside it"),
    ):
        with pytest.raises(messages.UserError, match=said):
            command_line.check(words.split(), elsewhere=True)
    whole = "--branch_from runs/nowhere --branch_step 3 --decay_steps 3"
    command_line.check(whole.split(), elsewhere=True)  # the trunk is on another machine
