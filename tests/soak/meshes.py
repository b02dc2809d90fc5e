"""Drawn models on drawn meshes: train steps of any cut of a batch against those of one device.

python -m tests.soak.meshes SEED compares one, on the 8 devices that the tests simulate.
"""

import contextlib
import itertools
import math
import random
import re
import sys

import jax
import numpy as np
from conftest import SMALL_GPT2, SMALL_QWEN3, begin, furthest, random_batch, small_config
from test_parity import DEEPSEEK

from runtime import messages
from tests.soak.programs import Case, complaint, run
from training import steps

CLOSE = 1e-5  # of losses and gradients; what an optimizer makes of them may differ tenfold
MESHES = [mesh for mesh in itertools.product(range(1, 9), repeat=3) if 1 < math.prod(mesh) <= 8]
# values of flags that decide a model's result, on any mesh
MODEL = dict(n_head=[1, 2, 4, 8], model_dimension=[16, 32, 48, 64], blocks=[1, 2, 3, 4, 6, 8])
MODEL |= dict(T=[8, 16, 24, 32], vocab_size=[127, 128, 250], ffn_dim=[24, 48, 72])
MODEL |= dict(dropout_rate=[0, 0, 0.1], document_mask=[False, False, True], end_of_text=[7])
MODEL["optimizer"] = ["adamw", "muon", "muon"]
DEEPSEEK_MODEL = dict(n_experts=[2, 3, 4, 6, 8, 16], experts_per_token=[1, 2, 3])
DEEPSEEK_MODEL |= dict(expert_dim=[12, 24, 32], n_groups=[1, 1, 2], k_groups=[1, 2])
DEEPSEEK_MODEL |= dict(n_shared=[0, 1, 2], first_layers=[0, 0, 1, 2, 3], rope_dim=[2, 8])
DEEPSEEK_MODEL |= dict(layers_per_block=[1, 1, 2, 3], latent_dim=[9, 16], latent_conv=[0, 3])
DEEPSEEK_MODEL |= dict(q_latent_dim=[-1, 0, 10], embedding_norm=[False, True], tied=[False, True])
# of flags that say how a model and its batch are spread, and may not change a result
SPREAD = dict(accumulation_steps=[1, 1, 2, 4], pp_interleave=[1, 1, 2])
SPREAD |= dict(fsdp=["full", "hoist", "none"], remat=["none", "dots", "full"])
SPREAD |= dict(sequence_parallel=["megatron", "ulysses"], attention=["xla", "blockwise"])
PLAIN = dict(fsdp="none", remat="none", attention="xla", microbatches=1, val_batch_size=1)


def values(rng, choices):
    return {flag: rng.choice(of) for flag, of in choices.items()}


def draw(rng):
    """(what was drawn, Config of one device with the plainest way of each thing, Config of the mesh)."""
    base = rng.choice([{}, DEEPSEEK, SMALL_GPT2, SMALL_QWEN3])
    while True:
        flags = base | values(rng, MODEL)
        plain, spread = dict(PLAIN), values(rng, SPREAD)
        if base in ({}, DEEPSEEK):
            flags |= values(rng, DEEPSEEK_MODEL)
            plain["experts"], spread["experts"] = "tiles", rng.choice(["tiles", "buckets"])
        mesh = rng.choices(MESHES, [math.prod(mesh) for mesh in MESHES])[0]
        microbatches = mesh[1] * rng.choice([1, 1, 2, 4])
        spread |= dict(microbatches=microbatches, val_batch_size=microbatches)
        sequences = mesh[0] * microbatches * rng.choice([1, 2])
        whole = sequences * spread["accumulation_steps"]
        with contextlib.suppress(messages.UserError):  # of values that do not go together
            one = small_config((1, 1, 1), whole, **flags | plain)
            many = small_config(mesh, sequences, **flags | spread)
            return dict(mesh=mesh, sequences=whole, **spread, model=flags), one, many


def trained(cfg):
    """([loss of each step], first moments after the first step, which are gradients, parameters after the last)."""
    mesh = steps.make_mesh(cfg)
    state, step = begin(cfg, mesh)
    losses, moments = [], {}
    for seed in range(2 if cfg.optimizer.optimizer == "muon" else 1):
        state, metrics = step(state, *random_batch(cfg, mesh, seed))
        losses.append(float(metrics["loss/train_loss"]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
            name = jax.tree_util.keystr(path)
            if re.search(r"\.(mu|trace)\b", name):
                moments.setdefault(name, np.asarray(leaf))
    return losses, moments, jax.tree.map(np.asarray, state.params)


def compare(seed):
    """Print what was drawn; end with status 1 where the two differ."""
    tried, one, many = draw(random.Random(seed))
    print(tried, flush=True)
    losses, *whole = trained(one)
    losses_, *spread = trained(many)
    # rounds of the pipeline make two dims of that of the blocks
    spread = jax.tree.map(lambda x, y: y.reshape(x.shape), whole, spread)
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, losses_))
    (gradient, at), (parameter, at_) = map(furthest, whole, spread)
    if max(loss, gradient, parameter / 10) > CLOSE:
        sys.exit(f"loss {loss}, gradient {gradient} of {at}, parameter {parameter} of {at_}")


def case(rng, sound, folder):
    ended = run(["tests/soak/meshes.py", rng.getrandbits(64)], folder / "work")
    wrong = complaint(ended, (0,))
    how, said = wrong or f"within {CLOSE:g}", wrong and f"{wrong}: {ended.err}"
    return Case(ended.out.strip(), how, said, ended)


if __name__ == "__main__":
    compare(*sys.argv[1:])
