"""`bash run.sh track` once there is an environment: what is fetched, designed and trained, and what the page says."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from helpers import BYTE_RANKS, ROOT, XLA_FLAGS, flags_of, refusal, wait_for, write_bin
from small_models import SMALL_RUN, small_config

from config.flags import without
from logs.overfitting import HELD_OUT
from logs.rows import read_rows
from shards import tokenization
from tools import track


@pytest.fixture
def stand_in(tmp_path):
    """A folder like modded-nanogpt's, of little text that is easy to learn, with a tokenizer."""
    rng = np.random.default_rng(0)
    for i, (split, n) in enumerate([("val", 2_000), ("train", 6_000), ("train", 5_000)]):
        ids = np.cumsum(rng.choice([1, 2, 3], n, p=[0.8, 0.15, 0.05])) % 250
        write_bin(tmp_path / f"fineweb10B/fineweb_{split}_{i:06d}.bin", ids)
    (tmp_path / "bytes.tiktoken").write_bytes(tokenization.dump_ranks(BYTE_RANKS))
    return tmp_path / "fineweb10B"


def cells(page):
    """The rows of the page's last table."""
    table = page.split("| step |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace(",", "") for cell in line.split("|")[1:-1]] for line in table]


def test_the_track_runs_on_a_stand_in_and_its_page_says_what_the_run_recorded(
    stand_in, tmp_path, xla_cache, monkeypatch, capsys
):
    """On a CPU, with a target that a small model reaches. Another target is looked up in the same run."""
    of_a_design = {"max_lr", "end_lr", "embedding_lr", "warmup_steps", "end_steps", "microbatches"}
    flags = without(of_a_design, SMALL_RUN) | dict(vocab_size=257, blocks=1, max_lr=0.02)
    flags |= dict(training_steps=24, global_batch_size=8, val_tokens=512, max_tokens=4)
    flags |= dict(data=stand_in, tokenizer=tmp_path / "bytes.tiktoken", compilation_cache=xla_cache)
    words = [*flags_of(**flags), "--target_loss", "4.5"]
    env = os.environ | dict(XLA_FLAGS=XLA_FLAGS)
    command = [sys.executable, ROOT / "tools/track.py", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("no accelerator is here") == 1
    run = tmp_path / "runs/track-cpu-0.25h"
    page = (run / track.PAGE).read_text()
    evaluated = [row for row in read_rows(str(run)) if HELD_OUT in row]
    assert [row["step"] for row in evaluated] == [8, 16, 24]
    for row, (step, tokens, trained, wall, loss) in zip(evaluated, cells(page), strict=True):
        assert (int(step), int(tokens)) == (row["step"], row["step"] * 8 * 32)
        assert float(trained) == pytest.approx(
            row["seconds/steps"] + row["seconds/waiting"], abs=0.1
        )
        seconds = sum(s for name, s in row.items() if name.startswith("seconds/"))
        assert float(wall) == pytest.approx(seconds, abs=0.1) and float(trained) < float(wall)
        assert loss == f"{row[HELD_OUT]:.4f}"
    first = next(row for row in evaluated if row[HELD_OUT] <= 4.5)
    said = f"4.5 was reached: {first[HELD_OUT]:.4f} at step {first['step']}, after {first['step'] * 256:,} tokens"
    assert said in page and said in done.stdout
    for words in ("1 x cpu", "jax 0.", "in 24 steps of 8 x 32", "of 2 files", "8 experts of which"):
        assert words in page, words
    assert "over the first 512 tokens" in page and "so this is another loss" in page
    stored = json.loads(re.search(r"```json\n(.*)\n```", page)[1])
    assert stored == json.loads((run / "config.json").read_text())
    track.write_page(str(run), "again", 0.1)
    last = min(evaluated, key=lambda row: row[HELD_OUT])
    assert f"0.1 was not reached: the best loss is {last[HELD_OUT]:.4f}" in capsys.readouterr().out
    assert "`again`" in (run / track.PAGE).read_text()


class Recorded:
    """Stands in for `track.Programs`: keeps the words of main.py, and writes designs of 256,000 tokens a step."""

    def __init__(self, status=0):
        self.calls, self.status = [], status

    def run(self, *words):
        self.calls.append(words)
        if "--design" in words:
            design = dict(design={}, training_steps=1000, global_batch_size=256, T=1000, name="x")
            with open(words[words.index("--design_json") + 1], "w") as f:
                json.dump(design, f)
        return 0 if "--design" in words else self.status


@pytest.fixture
def hub(tmp_path, monkeypatch, named_tokenizers):
    """The names of the files that are fetched, in an empty folder on a v5e-8."""
    fetched = []

    def download(repository, name, repo_type, local_dir):
        assert (repository, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        fetched.append(name)
        write_bin(tmp_path / local_dir / name, np.arange(9))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(track, "this_machine", lambda: "v5e:2x4")
    (tmp_path / "runs/track-v5e-2x4-0.25h").mkdir(parents=True)
    return fetched


def test_it_fetches_what_the_design_needs_and_trains_that(hub):
    """256M tokens need three files. What is there stays, a stopped run has its design, and given flags win."""
    programs = Recorded(status=143)
    assert track.main(["--seed", "3"], programs) == 143, "no page of a run that was stopped"
    assert hub == ["fineweb_val_000000.bin", *(f"fineweb_train_00000{i}.bin" for i in (1, 2, 3))]
    design, train = map(" ".join, programs.calls)
    assert design.startswith("--design v5e:2x4 --hours 0.25 --by_formulas")
    assert "--data data/shards/fineweb10B" in design and "--preset" not in design
    assert "--name track-v5e-2x4-0.25h" in design and "--seed 3" in design and "--seed 3" in train
    assert (
        train.startswith("--config runs/track-v5e-2x4-0.25h/designed.json")
        and "--design" not in train
    )
    assert "--val_tokens 10485760" in train and "--tokenizer gpt2 --vocab_size 50257" in train
    again = Recorded(status=143)
    track.main("--seed 3 --T 512 --eval_every 7".split(), again)
    assert len(again.calls) == 1 and len(hub) == 4
    assert "--T 1024" not in " ".join(again.calls[0]) and again.calls[0].count("--eval_every") == 1
    mine = Recorded(status=2)
    track.main(["--config", "runs/track-v5e-2x4-0.25h/designed.json", "--data", "mine"], mine)
    assert len(mine.calls) == 1 and "data/shards/fineweb10B" not in mine.calls[0] and len(hub) == 4


def test_a_hub_that_does_not_answer_is_told_in_a_sentence(hub, monkeypatch):
    def fails(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    said = [
        "fineweb_val_000000.bin of kjj0/fineweb10B-gpt2",
        "(no route to host)",
        "--data data/sh",
    ]
    refusal(lambda: track.main([], Recorded()), *said)


def test_evaluations_are_over_the_boards_tokens_and_take_a_small_share():
    for batch, steps in ((32, 20_000), (512, 9), (64, 200), (1, 10**6)):
        cfg = small_config(sequences=8, T=1024, val_tokens=track.BOARD_TOKENS)
        cfg = SimpleNamespace(
            model=cfg.model,
            data=SimpleNamespace(global_batch_size=batch, val_tokens=track.BOARD_TOKENS),
            run=SimpleNamespace(training_steps=steps),
        )
        tokens = steps * batch * 1024
        flags = track.evaluations_for(cfg, tokens)
        assert flags["eval_steps"] * batch * 1024 == track.BOARD_TOKENS
        n = -(-steps // flags["eval_every"])
        assert 1 <= n <= track.EVALUATIONS
        assert n == 1 or n * track.BOARD_TOKENS <= 0.3 * tokens + track.BOARD_TOKENS


@pytest.mark.parametrize(
    "batch, there, said",
    [
        (
            32,
            10_240,
            "over the first 10,485,760 tokens of the validation shards in `x`, those of m",
        ),
        (48, 10_240, "over 10,469,376 of the first 10,485,760 tokens"),
        (32, 20_000, "over 10,485,760 of the first 20,480,000 tokens"),
        (32, 3_200, "over the first 3,276,800 tokens"),
    ],
)
def test_the_page_says_over_which_tokens_the_loss_is(monkeypatch, batch, there, said):
    monkeypatch.setattr(track, "Mixture", lambda *_: SimpleNamespace(n_sequences=there))
    flags = dict(T=1024, data="x", n_device_axis=[1, 1, 1], accumulation_steps=1, val_batch_size=0)
    lines = track.definitions(flags | dict(train_batch_size=batch, eval_steps=10_240 // batch))
    assert said in lines[0] and ("another loss" in lines[0]) == ((batch, there) != (32, 10_240))


def test_a_signal_reaches_the_training(tmp_path, monkeypatch):
    """Which ends as it does by itself."""
    (tmp_path / "main.py").write_text("open('ready', 'w')\nimport time\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(track, "ROOT", tmp_path)
    programs, ended = track.Programs(), []
    thread = threading.Thread(target=lambda: ended.append(programs.run()))
    thread.start()
    wait_for((tmp_path / "ready").exists)
    programs.pass_on(signal.SIGTERM)
    thread.join(60)
    assert ended == [128 + signal.SIGTERM]
