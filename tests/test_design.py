"""`--design`: what is chosen for a machine and some hours, and that the file which it writes trains exactly that."""

import json
import re

import pytest
from helpers import flags_of, refusal

import utils
from config import command_line
from planning import command, design, design_page, recipe
from runtime import platforms


@pytest.fixture
def designed(tmp_path, capsys, monkeypatch):
    """A function that designs a run by formulas: (its file's {flag: value}, the page that was printed)."""
    # two sizes suffice to choose between, and each takes a second
    monkeypatch.setattr(recipe, "WIDTHS", (64, 256))
    path = tmp_path / "designed.json"

    def designed(machine, *words, **flags):
        words = [*flags_of(**flags, design=machine, design_json=path), "--by_formulas", *words]
        capsys.readouterr()
        design_page.main(command_line.parse(words))
        return json.loads(path.read_text()), capsys.readouterr().out

    return designed


def plan_of(tmp_path, *words):
    """The plan of a command line, by formulas."""
    path = tmp_path / "plan.json"
    flags = command_line.parse([*words, "--by_formulas", "--plan_json", str(path)])
    command.main(flags)
    return json.loads(path.read_text())


def test_a_model_that_fits_nowhere_is_refused_and_no_file_is_written(designed, tmp_path):
    words = ["--design 1xT4: the model of the flags beside it", "give a smaller one"]
    refusal(lambda: designed("1xT4", hours=9, preset="moonlight-16b"), *words)
    assert not (tmp_path / "designed.json").exists()


def test_a_short_run_needs_a_part_of_its_corpus(designed):
    """Of two digits, with a folder of its own; a long run needs all of it."""
    flags, page = designed("v5e-8", tokens=123e6)
    make = "python data/prepare.py fineweb-edu-10BT"
    assert flags["data"] == "data/shards/fineweb-edu-10BT-130M"
    assert flags["design"]["make"] == f"{make} --tokens 130e6" and flags["design"]["make"] in page
    flags, _ = designed("v5e-8", tokens=6e9)
    assert flags["data"] == "data/shards/fineweb-edu-10BT" and flags["design"]["make"] == make


@pytest.mark.parametrize("machine, hours", [("v5e-8", 1), ("6xA100", 0.5), ("1xT4", 9)])
def test_the_file_has_the_plan_of_the_page(designed, tmp_path, machine, hours):
    """Its steps take the hours but for what is spared, also on devices whose number is no power of two."""
    flags, page = designed(machine, hours=hours)
    planned = plan_of(tmp_path, "--config", str(tmp_path / "designed.json"), "--plan", machine)
    assert planned["fits"]
    assert planned["hours"] * 3600 == pytest.approx(
        (1 - design.SPARE) * 3600 * hours - design.START, rel=0.01
    )
    assert flags["design"]["tokens"] == planned["tokens"] * flags["training_steps"]
    assert f"step         {planned['seconds']['step']:.3f} s by formulas" in page
    assert f"MFU {planned['mfu']:.1%}" in page and "on demand" in page


def test_steps_that_are_given_have_a_schedule_of_their_own(designed):
    """However many more the hours would allow."""
    flags, _ = designed("v5e-8", hours=1, training_steps=30)
    assert flags["training_steps"] == 30 > flags["warmup_steps"] and flags["eval_every"] == 3
    per_step = flags["global_batch_size"] * flags["T"]
    assert flags["design"]["tokens"] == 30 * per_step


def test_the_file_is_the_same_run_beside_any_preset(designed, tmp_path):
    designed("v5e-4", tokens=1e8)
    path = str(tmp_path / "designed.json")
    alone, beside = (
        command_line.parse(["--config", path, *words]).cfg for words in ([], ["--preset", "tiny"])
    )
    now, then = utils.flatten(alone), utils.flatten(beside)
    kept = utils.KEPT | design_page.DECIDED
    assert {flag: now[flag] for flag in kept} == {flag: then[flag] for flag in kept}
    # and so it is where the launcher sends its text
    sent = command_line.parse(["--config", (tmp_path / "designed.json").read_text()]).cfg
    assert utils.replace(alone, config="") == sent


def test_given_flags_stay_and_the_rest_follows(designed):
    given = dict(max_lr=0.003, n_device_axis=(2, 1, 2), model_dimension=192, global_batch_size=16)
    flags, _ = designed("4xL4", hours=1, **given)
    assert {flag: flags[flag] for flag in given} == given | dict(n_device_axis=[2, 1, 2])
    assert flags["optimizer"] == "muon" and flags["training_steps"] > 1
    preset, _ = designed("1xL4", hours=1, preset="gpt2-tiny")
    assert preset["architecture"] == "gpt2" and preset["model_dimension"] == 128


def test_tokens_are_of_four_epochs_at_most(designed, text_shards):
    """A model of less text is smaller, and never of another vocabulary."""
    n = tokens_of(text_shards)
    flags, page = designed("1xL4", tokens=1e12, data=text_shards)
    step = flags["global_batch_size"] * flags["T"]
    assert abs(flags["design"]["tokens"] - design.EPOCHS * n) < step and "4.00 epochs" in page
    assert flags["model_dimension"] == 64 and flags["vocab_size"] == 512
    assert flags["data"] == str(text_shards)


def test_hours_that_little_text_leaves_over_train_a_larger_model(
    designed, text_shards, monkeypatch
):
    """Which reads it as often, with dropout against learning it by heart; up to a size beyond which it learns no
    more."""
    n = tokens_of(text_shards)
    few, _ = designed("1xT4", tokens=1e12, data=text_shards)
    hours, page = designed("1xT4", hours=5, data=text_shards)
    assert (few["model_dimension"], hours["model_dimension"]) == (64, 256)
    step = hours["global_batch_size"] * hours["T"]
    assert abs(hours["design"]["tokens"] - design.EPOCHS * n) < step
    assert hours["dropout_rate"] > few["dropout_rate"] and "more text would help" in page
    assert f", dropout {hours['dropout_rate']:g}" in page
    monkeypatch.setattr(design, "MOST_PARAMETERS", 1)
    limited, _ = designed("1xT4", hours=5, data=text_shards)
    assert limited["model_dimension"] == 64


def tokens_of(shards):
    """Tokens to train on."""
    made = json.loads((shards / "train/manifest.json").read_text())
    return sum(shard["tokens"] for shard in made["shards"])


def test_more_hours_train_a_larger_model(designed):
    small, page = designed("1xL4", hours=0.3)
    large, _ = designed("1xL4", hours=5)
    assert (small["model_dimension"], large["model_dimension"]) == (64, 256)
    assert small["max_lr"] > large["max_lr"]
    assert page.count("--max_lr") == 3 and "half" in page and "twice" in page


def test_the_file_trains_what_was_designed(designed, train, text_shards, tmp_path):
    """To its end, and with fewer steps, whose warm-up then fits."""
    designed("cpu", tokens=6000, data=text_shards)
    path = str(tmp_path / "designed.json")
    free = dict(train_batch_size=None, val_batch_size=None, output_dir=tmp_path / "runs")
    flags = command_line.flags_of_file(path, {})
    assert train(**flags | free) == 0
    stored = json.loads((tmp_path / "runs" / flags["name"] / "config.json").read_text())
    assert all(stored[flag] == utils.flatten(parsed(path))[flag] for flag in utils.KEPT)
    assert stored["training_steps"] == flags["training_steps"] > 2
    short = command_line.flags_of_file(path, dict(training_steps=2))
    assert train(**short | free | dict(training_steps=2, name="short")) == 0


def parsed(path):
    """The Config of --config."""
    return command_line.parse(["--config", path]).cfg


@pytest.mark.parametrize(
    "words, said",
    [
        (["v5e-8"], "needs --hours"),
        (["v5e-9", "--hours", "1"], "--design v5e-9: there is no such slice"),
        (["9xFoo", "--hours", "1"], "--design 9xFoo: must be a slice"),
        (["v5e-8", "--hours", "0.01"], "--hours 0.01: must be more than"),
        (["1xT4", "--hours", "0.02"], "the smallest model"),
        (["v5e-8", "--hours", "1", "--optimizer", "adamw"], "--optimizer adamw"),
        (["v5e-8", "--hours", "1", "--data", "/nowhere"], "--data /nowhere: no shards"),
        (["v5e-8", "--hours", "1", "--train_batch_size", "4"], "--train_batch_size 4"),
    ],
)
def test_what_cannot_be_designed_is_refused(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(recipe, "WIDTHS", (256,))
    words = ["--design", *words, "--by_formulas", "--design_json", str(tmp_path / "designed.json")]
    refusal(lambda: design_page.main(command_line.parse(words)), said)
    assert not (tmp_path / "designed.json").exists()


def test_a_file_that_no_design_wrote_is_kept(designed, tmp_path):
    (tmp_path / "designed.json").write_text('{"max_lr": 0.1}')
    refusal(lambda: designed("v5e-8", hours=1), "holds flags that no design wrote")


@pytest.mark.parametrize("word", ["--hours 3", "--tokens 1e9"])
def test_a_budget_needs_a_machine(word):
    refusal(lambda: command_line.parse(word.split()), "needs --design beside it")


def test_a_cpu_is_measured(designed, monkeypatch, tmp_path):
    """And a design for it is the same as its plan."""
    monkeypatch.setattr(platforms, "cpu_has_bfloat16", lambda: False)
    flags, page = designed("cpu", hours=2)
    assert flags["model_dtype"] == "float32" and flags["data"] == "data/shards/stdlib-1024"
    planned = plan_of(tmp_path, "--config", str(tmp_path / "designed.json"), "--plan", "cpu")
    assert (
        planned["hours"] == pytest.approx(0.9 * 2 - 1 / 60, rel=0.01)
        and "bash run.sh local" in page
    )


def test_a_loss_is_predicted_on_the_text_of_the_ladder_alone(designed, text_shards):
    _, page = designed("cpu", tokens=3e6)
    loss, error = map(float, re.search(r"loss         (\S+) \+- (\S+) nats", page).groups())
    assert 1 < loss < 4 and 0 < error < 0.2
    flags, page = designed("cpu", target_loss=loss)
    assert flags["design"]["tokens"] == pytest.approx(3e6, rel=0.4)
    assert float(re.search(r"loss         (\S+)", page)[1]) == pytest.approx(loss, abs=0.1)
    _, page = designed("cpu", tokens=3e6, data=text_shards)
    assert "loss         " not in page
    refusal(
        lambda: designed("cpu", target_loss=2, data=text_shards),
        "--target_loss 2.0",
        "predicted for Python's",
    )
