"""tools/bench.py: every number that was asked for is there, and the torch baseline is the same model as ours."""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, SMALL, SMALL_GPT2, flags_of, make_params, random_batch, small_config

import model
from runtime.messages import UserError
from tools import bench
from training import steps

ROUNDS = "--rounds", "2", "--steps", "1"
TINY = dict(
    blocks=1, layers_per_block=1, vocab_size=250, train_batch_size=4, val_batch_size=4, n_devices=1
)


def measured(*words, folder):
    """(dict of --json, lines of the table) of tools/bench.py in a process of its own."""
    words = [
        sys.executable,
        ROOT / "tools" / "bench.py",
        *words,
        *ROUNDS,
        "--json",
        folder / "bench.json",
    ]
    # the numbers of devices are the program's own affair
    env = os.environ | {"XLA_FLAGS": re.sub(r"\S*device_count=8", "", os.environ["XLA_FLAGS"])}
    ran = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, env=env)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "bench.json").read_text()), ran.stdout.splitlines()


def check(row):
    """Whether all numbers of a row of --json are there and agree."""
    for key in ("tokens_per_second", "ratio", "step_seconds", "tokens_per_cpu_second"):
        low, middle, high = row[key]
        assert 0 < low <= middle <= high
    assert row["rounds"] == 2 and row["steps_per_round"] == 1 and row["tokens_per_step"] == 4 * 32
    assert (
        row["peak_bytes"] > 1e7
        and row["flops_per_token"] > 0
        and row["device"] == "cpu"
        and row["mfu"] is None
    )


def test_configurations_side_by_side_on_simulated_devices(tmp_path):
    variants = "remat=none", "n_device_axis=2,1,1 n_devices=2 train_batch_size=2 microbatches=2"
    words = flags_of(**{**SMALL, **TINY})
    found, lines = measured("--preset", "tiny", *words, "--vary", *variants, folder=tmp_path)
    assert found["cores"] > 0 and found["versions"]["jax"] == jax.__version__
    assert [row["name"] for row in found["configurations"]] == list(variants)
    for row, devices in zip(found["configurations"], (1, 2)):
        check(row)
        assert (
            row["devices"] == devices
            and row["compile_seconds"] > 0
            and row["compile_cpu_seconds"] > 0
        )
        assert row["compiler_bytes"] > 1e5
    assert "128 tokens a step" in lines[0] and all(column in lines[1] for column in bench.COLUMNS)
    assert len(lines) == 5
    assert all(line.startswith(f"| {name}") for line, name in zip(lines[3:], variants))


def test_torch_side_by_side(tmp_path):
    pytest.importorskip("torch", reason="pip install torch")
    words = flags_of(**{**SMALL_GPT2, **TINY, "T": 32, "model_dimension": 32, "microbatches": 2})
    found, lines = measured("--preset", "gpt2-tiny", *words, "--compare", folder=tmp_path)
    ours, theirs = found["configurations"]
    assert (ours["name"], theirs["name"]) == ("gpt2-tiny", "gpt2-tiny, torch")
    for row in (ours, theirs):
        check(row)
    assert theirs["compile_seconds"] is None and lines[-1].startswith("| gpt2-tiny, torch")


def test_the_baseline_is_the_same_model():
    torch = pytest.importorskip("torch", reason="pip install torch")
    from tools import torch_baseline

    cfg = small_config(
        **{**SMALL_GPT2, "vocab_size": 256, "microbatches": 1, "norm_eps": 1e-5}, sequences=4
    )
    mesh, D, net = steps.make_mesh(cfg), cfg.model.model_dimension, torch_baseline.GPT2(cfg.model)
    params = jax.tree.map(np.asarray, make_params(cfg, mesh))
    params = jax.tree.map(
        lambda w: w + np.random.default_rng(0).normal(0, 0.1, w.shape).astype("f4"), params
    )
    total, _, embedding = model.count_params(cfg)
    assert sum(p.numel() for p in net.parameters()) == total + embedding

    weights = {
        "embedding.weight": params["embedding"],
        "positions.weight": params["positions"],
        "norm.weight": params["norm"]["scale"],
        "norm.bias": params["norm"]["bias"],
    }
    for i in range(cfg.model.blocks):
        p = jax.tree.map(lambda w: w[i], params["gpt2"])
        for name in ("attention_norm", "norm"):
            weights |= {
                f"layers.{i}.{name}.weight": p[name]["scale"],
                f"layers.{i}.{name}.bias": p[name]["bias"],
            }
        for name, outputs in dict(qkv=3 * D, out=D, up=cfg.model.ffn_width, down=D).items():
            weights[f"layers.{i}.{name}.weight"] = p[name].reshape(-1, outputs).T
            weights[f"layers.{i}.{name}.bias"] = p[f"{name}_bias"].reshape(-1)
    net.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
    tokens, targets = (np.asarray(x)[0] for x in random_batch(cfg, mesh))
    ours, _ = jax.jit(model.make_loss(cfg, mesh, train=True))(
        params, tokens, targets, jax.random.key(0), 0
    )
    theirs = net(*(torch.tensor(x[0].astype(np.int64)) for x in (tokens, targets)))
    assert abs(float(ours) - theirs.item()) < 1e-4 and float(ours) > 1


WRONG = {
    "--rounds 0": ["--rounds 0", "at least 1"],
    "--steps few": ["--steps", "few"],
    "--compare": ["--compare", "--preset gpt2-tiny"],
    "--compare --preset gpt2-tiny --dropout_rate 0.1": ["--dropout_rate"],
    "--compare --preset gpt2-tiny --n_devices 8": ["--n_devices 8", "1"],
    "--compare --preset gpt2-tiny --n_device_axis 2 1 1": ["--n_device_axis 2 1 1"],
    "--vary remat=sometimes": ["remat", "sometimes"],
    "--vary nonsense": ["nonsense"],
    "--preset nonsense": ["--preset nonsense"],
    "--plan v4:2x2x2": ["--plan", "main.py"],
    "--plan_json=plan.json": ["--plan_json", "main.py"],
    "--vary search": ["--search", "main.py"],
}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_get_one_sentence(words, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError) as e:
        bench.parse(words.split())
    assert all(part in str(e.value) for part in WRONG[words]) and "\n" not in str(e.value)


def test_without_torch_the_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch is not installed; pip install"):
        bench.parse(["--compare", "--preset", "gpt2-tiny"])


def test_what_does_not_fit_the_devices_is_said_by_the_program():
    ran = subprocess.run(
        [
            sys.executable,
            ROOT / "tools" / "bench.py",
            "--preset",
            "tiny",
            "--n_device_axis",
            "3",
            "1",
            "1",
            "--n_devices",
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (
        ran.returncode == 2
        and ran.stderr.startswith("error: --n_device_axis 3 1 1")
        and ran.stderr.count("\n") == 1
    )
