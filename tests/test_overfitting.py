"""Overfitting is reported where held-out loss rises while training loss falls, and nowhere else."""

import math
import random
import re

import jax
import numpy as np
import pytest
from helpers import EVERY, FALLING, FOUND, TINY, WORSE, checkpoint_of, refusal, rows_of

from config import settle
from data.own_text import TextOptions, corpus_of
from inference import weights
from logs.overfitting import TRAINING, Overfit, Overfitting, overfit
from tools import common
from training.device_mesh import make_mesh
from training.train_state import abstract_params


@pytest.mark.parametrize(
    "held_out, training, found",
    [
        (WORSE, FALLING, FOUND),
        (WORSE[:-1], FALLING, None),  # it was worse twice
        ([3.5, 3.21, 3.3, 3.26, 3.4], FALLING, Overfit(40, 3.21, 3.4)),  # it rises in steps
        ([3.5, 3.21, 3.22, 3.23, 3.24], FALLING, None),  # by less than it varies
        (WORSE, [3.9, 3.3, 3.1, 3.2, 3.3], None),  # it diverges
        ([3.21, 3.25, 3.29, 3.34], [5.0, 3.1, 3.2, 3.3], None),  # below the beginning
        ([3.5, 3.21, 3.25, 3.24, 3.29, 3.28], [*FALLING, 2.7], None),  # it goes up and down
        ([*WORSE, 3.3], [*FALLING, 2.7], Overfit(40, 3.21, 3.3)),  # still worse than the best
        ([*WORSE, 3.2], [*FALLING, 2.7], None),  # better than the best
        ([3.5, 3.21, 3.25, math.nan, 3.29, 3.34], [3.9, 3.3, 3.1, 3.0, 2.9, 2.8], FOUND),
        ([], [], None),
    ],
)
def test_a_run_overfits_once_it_got_worse_three_times_while_training_loss_fell(
    held_out, training, found
):
    assert overfit(rows_of(held_out, training)) == found


def test_neither_noise_nor_skipped_steps_hide_it():
    rows = rows_of(WORSE, FALLING, noise=0.5)
    rows[90][TRAINING] = math.nan
    assert overfit(rows) == FOUND


def test_it_is_said_with_both_losses():
    said = "Overfitting since step 40: held-out loss rose from 3.2100 to 3.3400 while training loss fell"
    assert FOUND.words == said


def test_rows_are_judged_as_they_come_also_after_a_rollback():
    rows = rows_of(WORSE, FALLING)
    now = Overfitting(rows[:EVERY])
    began = [row["step"] for row in rows[EVERY:] if now.add(row)]
    assert (began, now.now) == ([5 * EVERY], FOUND)
    now.rewind(4 * EVERY)
    assert now.now is None
    assert [now.add(row) for row in rows[4 * EVERY :]] == [*[False] * (EVERY - 1), True]


def test_a_run_that_overfits_says_so_and_its_best_checkpoint_is_taken(
    train, tmp_path, capsys, monkeypatch
):
    """By all that open weights, unless RUN@STEP names another; the run ends with samples and the next commands."""
    rng = random.Random(0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random text.txt").write_text("".join(rng.choices("abcd ", k=1500)))
    folder, _ = corpus_of("random text.txt", TextOptions(), vocab_size=257)
    flags = TINY | dict(data=folder, tokenizer="", vocab_size=257, max_lr=0.005, warmup_steps=0)
    flags |= dict(training_steps=400, eval_every=40, save_steps=0, model_dimension=128, prompt=None)
    flags |= dict(
        blocks=2, ffn_dim=256, end_steps=400, n_head=4, weight_decay=0.0, dropout_rate=0.0
    )
    assert train(**flags) == 0
    out = capsys.readouterr().out
    losses = re.findall(r"step (\d+)/400 .* val (\d+\.\d+)", out)
    best = int(min(losses, key=lambda found: float(found[1]))[0])
    assert best < 300 and f"warning: Overfitting since step {best}: held-out loss rose" in out
    assert f"; checkpoint {best} is the best so far" in out and "\n  next:\n" in out
    run = tmp_path / "runs/run"
    assert f"tools/sample.py {run} --prompt " in out and f"tools/hf.py export {run} " in out
    assert re.search(r"\n  \| [a-h ]+", out), "samples, which continue words of the text"

    for name, step in ((f"{run}", best), (f"{run}@400", 400)):
        flags, load = weights.open_weights(name)
        cfg = common.config_of(common.Evaluate(model=name), flags)
        cfg = settle.validate(cfg, 1)
        params = load(abstract_params(cfg, make_mesh(cfg)))
        stored = checkpoint_of(run, step)
        for path, leaf in jax.tree.leaves_with_path(params):
            assert np.array_equal(leaf, stored[f"['params']{jax.tree_util.keystr(path)}"])
    said = capsys.readouterr().err
    assert (
        f"checkpoint {best} is the best and is taken" in said and f"{run}@400 is the newest" in said
    )
    refusal(
        lambda: load_of(f"{run}@7"), f"{run}@7: there is no checkpoint of step 7 in {run}, only 400"
    )


def load_of(name):
    """Open weights, and choose a checkpoint of them."""
    _, load = weights.open_weights(name)
    return load(None)
