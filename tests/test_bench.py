"""tools/bench.py: every number that was asked for is there, and the torch baseline is the same model as ours.
tools/planning/growth.py: its points are what it says."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import ROOT, SMALL, SMALL_GPT2, flags_of, make_params, random_batch, small_config

import model
from tools import bench
from tools.planning import growth
from training import command_line, settings, steps
from utils import UserError

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
    assert [line.startswith(name) for line, name in zip(lines[2:], variants)] == [
        True,
        True,
    ] and len(lines) == 4


def test_torch_side_by_side(tmp_path):
    pytest.importorskip("torch", reason="pip install torch")
    words = flags_of(**{**SMALL_GPT2, **TINY, "T": 32, "model_dimension": 32, "microbatches": 2})
    found, lines = measured("--preset", "gpt2-tiny", *words, "--compare", folder=tmp_path)
    ours, theirs = found["configurations"]
    assert (ours["name"], theirs["name"]) == ("gpt2-tiny", "gpt2-tiny, torch")
    for row in (ours, theirs):
        check(row)
    assert theirs["compile_seconds"] is None and lines[-1].startswith("gpt2-tiny, torch")


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
    "--torch_compile": ["--torch_compile", "--compare"],
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


# --- growth.py --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", growth.CURVES)
def test_the_points_of_a_curve_are_valid_and_vary_one_thing(name):
    first, points = growth.CURVES[name]
    seen = []
    for x, flags in points.items():
        words = [*first.split(), *flags.split()]
        at = words.index("--plan")
        _, machine = words.pop(at), words.pop(at)
        chips = math.prod(map(int, machine.removeprefix("v4:").split("x")))
        cfg = settings.settle(command_line.parse(words), chips)
        d, m = cfg.data, cfg.model
        assert x == dict(blocks=m.blocks, chips=chips, T=m.T)[name]
        seen.append((d.train_batch_size * m.T, cfg.run.n_device_axis[1:], cfg.run.pp_interleave))
    assert len(set(seen)) == 1


def test_points_are_drawn_and_listed():
    point = dict(
        compile_cpu_seconds=9.5,
        sent_bytes=2e9,
        memory_bytes=2**31,
        step_seconds=0.5,
        tokens_per_second=1e6,
        mfu=0.25,
    )
    curves = {
        name: {x: point | dict(fits=x < 32) for x in points}
        for name, (_, points) in growth.CURVES.items()
    }
    assert (
        growth.draw(curves).startswith(b"\x89PNG")
        and growth.draw({"blocks": curves["blocks"]})[:4] == b"\x89PNG"
    )
    for fits in (True, False):
        words = growth.line(1024, point | dict(fits=fits)).split()
        assert (
            words[:7] == ["1024", "9.5", "2.00", "2.0", "0.500", "1,000,000", "25.0%"]
            and (len(words) == 7) == fits
        )


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason='pip install "jax[tpu]"')
def test_a_point_is_compiled(tmp_path):
    words = "--curves blocks --points 1 --preset tiny --plan v4:2x2x2 --n_device_axis 2 2 2".split()
    with mock.patch.dict(os.environ):
        found = growth.main(
            [
                *words,
                "--json",
                str(tmp_path / "growth.json"),
                "--plot",
                str(tmp_path / "growth.png"),
            ]
        )
    assert found["blocks"][4]["fits"] and all(found["blocks"][4].values())
    assert json.loads((tmp_path / "growth.json").read_text()) == {
        "blocks": {"4": found["blocks"][4]}
    }
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_growth_needs_the_compiler_and_known_curves(monkeypatch):
    monkeypatch.setattr(growth.importlib.util, "find_spec", lambda name: None)
    for words, part in {
        "": "not installed",
        "--curves width": "width",
        "--points 0": "--points 0",
    }.items():
        with pytest.raises(UserError, match=part):
            growth.main(words.split())
