"""Out of memory: the sentence that says what a step holds, and that the flags which it names do make it fit."""

import re

import jax
import pytest
from families import SMALL_GPT2
from helpers import refusal
from small_models import small_config

from planning import advice, machines, plan
from training import setup

LIMIT = 2**27  # bytes of a device


def test_the_flags_that_the_sentence_names_make_a_step_fit(train, monkeypatch):
    """A step that takes more than a device has, by XLA's own account, ends as it does on such a device."""
    compile_train_step = setup.compile_train_step

    def limited(*arguments):
        train_step = compile_train_step(*arguments)
        memory = train_step.memory_analysis()
        taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes

        def step(*batch):
            if taken > LIMIT:
                said = f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {taken} bytes."
                raise jax.errors.JaxRuntimeError(said)
            return train_step(*batch)

        return step

    monkeypatch.setattr(setup, "compile_train_step", limited)
    monkeypatch.setattr(machines, "memory_limit", lambda: LIMIT)
    flags = SMALL_GPT2 | dict(blocks=1, T=256, remat="none", attention="xla", training_steps=1)
    flags |= dict(train_batch_size=128, microbatches=1, val_batch_size=2, eval_steps=1)
    flags |= dict(model_dimension=128, vocab_size=8192)
    said = refusal(lambda: train((2, 1, 1), **flags), "out of memory: a device has ")
    for part in ("weights", "optimizer", "activations", "temporaries"):
        assert re.search(rf"{part} [\d.]+ .?i?B", said), part
    words = re.search(r"; (--.*) would make it fit, by the formulas: ", said)[1].split()
    for flag, value in zip(words[::2], words[1::2]):
        flags[flag.removeprefix("--")] = int(value) if value.isdigit() else value
    assert "--train_batch_size" not in words or "--accumulation_steps" in words
    assert train((2, 1, 1), **flags) == 0


@pytest.mark.parametrize("off", (0.5, 1, 3))
def test_the_flags_suffice_where_the_formulas_are_off(off):
    """By a factor, of what a step works with: they are off by as much with other flags, or right."""
    machine = machines.parse_machine("gpu:1xH100")
    cfg = small_config(**SMALL_GPT2, T=256, train_batch_size=64, remat="none")
    memory = plan.make_plan(cfg, machine).memory
    given = memory.total - memory.working
    taken = off * memory.working
    chip = machine.chip._replace(memory=given + taken / 2)
    tight = machine._replace(chip=chip)
    too_large = machines.TooLarge(given + taken, chip.memory)
    refused = plan.make_plan(cfg, tight, refused=too_large)
    assert refused.memory.total == pytest.approx(given + taken) and min(refused.memory) >= 0
    new, needs = advice.find_smaller(refused)
    found = plan.make_plan(new, tight).memory
    unseen = (max(1, off) - 1) * found.working
    assert needs == pytest.approx(found.total + unseen) and needs < chip.memory
