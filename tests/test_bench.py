"""tools/bench.py: every number that was asked for is there, and mistakes get a sentence."""

import json
import os
import re
import subprocess
import sys

import pytest
from families import SMALL_GPT2
from helpers import ROOT, flags_of, refusal
from small_models import SMALL

from tools import bench

TINY = SMALL | SMALL_GPT2 | dict(blocks=1, train_batch_size=4, val_batch_size=4, n_devices=1)


def test_configurations_side_by_side_on_simulated_devices(tmp_path):
    variants = "remat=none", "n_device_axis=2,1,1 n_devices=2 train_batch_size=2 microbatches=2"
    words = [sys.executable, ROOT / "tools" / "bench.py", "--preset", "tiny", *flags_of(**TINY)]
    words += ["--rounds=2", "--steps=1", f"--json={tmp_path}/bench.json", "--vary", *variants]
    # the number of devices is the program's own affair
    env = os.environ | {"XLA_FLAGS": re.sub(r"\S*device_count=8", "", os.environ["XLA_FLAGS"])}
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)
    assert ran.returncode == 0, ran.stderr
    found, lines = json.loads((tmp_path / "bench.json").read_text()), ran.stdout.splitlines()
    assert [row["name"] for row in found["configurations"]] == list(variants)
    for row, devices in zip(found["configurations"], (1, 2)):
        for key in ("tokens_per_second", "ratio", "step_seconds", "tokens_per_cpu_second"):
            assert 0 < row[key][0] <= row[key][1] <= row[key][2]
        assert (row["devices"], row["tokens_per_step"], row["rounds"]) == (devices, 4 * 32, 2)
        assert min(row["compile_seconds"], row["flops_per_token"]) > 0
        assert row["peak_bytes"] > 1e7 and row["compiler_bytes"] > 1e5 and row["mfu"] is None
    columns = bench.cells(found["configurations"][0])
    assert "128 tokens a step" in lines[0] and all(column in lines[1] for column in columns)
    assert all(cell in lines[3] for cell in columns.values())


@pytest.mark.parametrize(
    "words, parts",
    [
        ("--rounds 0", ["--rounds 0", "at least 1"]),
        ("--vary remat=sometimes", ["remat", "sometimes"]),
        ("--plan v4:2x4x4", ["--plan", "main.py"]),
        ("--vary nonsense", ["nonsense"]),
    ],
)
def test_mistakes_get_one_sentence(words, parts):
    refusal(lambda: bench.parse(words.split()), *parts)
