"""Out of memory: the sentence that says what a step holds, and that the flags which it names do make it fit."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL_GPT2, flags_of, small_config

from planning import machines, plan

# main.py on devices of argv[1] bytes: a step that takes more, by XLA's own account, ends as it does on such a device
DRIVER = """
import sys
limit = int(sys.argv.pop(1))
sys.path.insert(0, ROOT)
import jax
from runtime import messages
from training import command_line
flags = command_line.parse(sys.argv[1:])
import main
from planning import plan
compile_train_step = main.compile_train_step
def limited(*args):
    train_step = compile_train_step(*args)
    memory = train_step.memory_analysis()
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print("taken:", taken)
    def step(*args):
        if taken > limit:
            said = f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {taken} bytes."
            raise jax.errors.JaxRuntimeError(said)
        return train_step(*args)
    return step
main.compile_train_step = limited
plan.memory_limit = lambda: limit
sys.exit(messages.one_sentence(lambda: main.run(flags)))
"""


LIMIT = 2**27  # bytes of a device


def limited_run(limit, *words):
    """main.py on two simulated devices of `limit` bytes each."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    driver = DRIVER.replace("ROOT", repr(str(ROOT)))
    return subprocess.run(
        [sys.executable, "-c", driver, str(limit), *map(str, words)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_flags_that_the_sentence_names_make_a_step_fit(shards, tmp_path):
    flags = SMALL_GPT2 | dict(preset="tiny", name="run", n_device_axis=(2, 1, 1), blocks=1, T=256)
    flags |= dict(train_batch_size=128, microbatches=1, val_batch_size=2, training_steps=2)
    flags |= dict(remat="none", attention="xla", eval_every=2, eval_steps=1)
    flags |= dict(output_dir=tmp_path, data=shards)
    run = limited_run(LIMIT, *flags_of(**flags))
    (error,) = run.stderr.splitlines()
    assert run.returncode == 2 and error.startswith("error: out of memory: a device has ")
    for part in ("weights", "optimizer", "activations", "temporaries"):
        assert re.search(rf"{part} [\d.]+ .?i?B", error), part
    words = re.search(r"; (--.*) would make it fit, by the formulas: ", error)[1].split()
    assert "--train_batch_size" not in words or "--accumulation_steps" in words
    run = limited_run(LIMIT, *flags_of(**flags), *words)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("off", (0.5, 1, 3))
def test_the_flags_suffice_where_the_formulas_are_off(off):
    """By a factor, of what a step works with: they are off by as much with other flags, or right."""
    machine = machines.parse_machine("gpu:1xH100")
    sizes = dict(T=256, train_batch_size=64, remat="none")
    cfg = small_config((1, 1, 1), **SMALL_GPT2 | sizes)
    memory = plan.answer(cfg, machine).memory
    given = memory["total"] - plan.working(memory)
    taken = off * plan.working(memory)
    chip = machine.chip._replace(memory=given + taken / 2)
    tight = machine._replace(chip=chip)
    refused = plan.answer(cfg, tight, refused=machines.TooLarge(given + taken, chip.memory)).memory
    assert refused["total"] == pytest.approx(given + taken) and min(refused.values()) >= 0
    new, needs = plan.smaller(cfg, tight, refused)
    found = plan.answer(new, tight).memory
    unseen = (max(1, off) - 1) * plan.working(found)
    assert needs == pytest.approx(found["total"] + unseen) and needs < chip.memory
