"""Drawn models on drawn meshes: train steps of any cut of a batch against those of one device.

python -m tests.soak.meshes SEED compares one, on the 8 devices that the tests simulate.
"""

import itertools
import math
import random
import re
import sys

import jax
import numpy as np
from conftest import SMALL_GPT2, begin, furthest, random_batch, small_config
from test_parity import DEEPSEEK

from runtime import messages
from tests.soak.programs import Case, complaint, run
from training import steps

CLOSE = 1e-5  # of losses and gradients; what an optimizer makes of them may differ tenfold
MESHES = [mesh for mesh in itertools.product(range(1, 9), repeat=3) if 1 < math.prod(mesh) <= 8]


def draw_model(rng):
    """Flags of a model: what decides its result, on any mesh."""
    base = rng.choice([{}, DEEPSEEK, DEEPSEEK, SMALL_GPT2])
    heads = rng.choice([1, 2, 2, 4, 4, 8])
    flags = dict(
        n_head=heads,
        model_dimension=heads * rng.choice([4, 8, 12]),
        blocks=rng.choice([1, 2, 3, 4, 4, 6, 8]),
        T=rng.choice([8, 16, 24, 32]),
        vocab_size=rng.choice([127, 128, 129, 250, 300]),
        ffn_dim=rng.choice([24, 48, 72]),
        dropout_rate=rng.choice([0, 0, 0.1]),
        document_mask=rng.random() < 0.3,
        end_of_text=7,
        optimizer=rng.choice(["adamw", "muon", "muon"]),
    )
    if base is SMALL_GPT2:
        return {**base, **flags}
    experts = rng.choice([2, 3, 4, 6, 8, 8, 16])
    chosen = min(rng.choice([1, 2, 2, 3]), experts)
    grouped = base and experts % 4 == 0 and chosen < 3
    flags |= dict(
        n_groups=2 if grouped else 1,
        k_groups=rng.choice([1, 2]) if grouped else 1,
        n_experts=experts,
        experts_per_token=chosen,
        expert_dim=rng.choice([12, 24, 32]),
        n_shared=rng.choice([0, 1, 2]),
        first_layers=rng.choice([0, 0, 1, 2, 3]),
        layers_per_block=1 if base else rng.choice([1, 2, 3]),
        mtp_depth=rng.choice([0, 0, 1, 2]),
        latent_dim=rng.choice([9, 16, 16]),
        q_latent_dim=rng.choice([-1, 0, 10]),
        rope_dim=rng.choice([2, 8]),
        latent_conv=rng.choice([0, 3]),
        embedding_norm=rng.random() < 0.5,
        tied=rng.random() < 0.5,
        capacity_factor=rng.choice([0.0, 0.0, experts / chosen]),
    )
    return {**base, **flags}


def draw_spread(rng, model):
    """(mesh, flags of how the model and its batch are spread), none of which may change a result."""
    mesh = rng.choices(MESHES, [math.prod(mesh) for mesh in MESHES])[0]
    microbatches = mesh[1] * rng.choice([1, 1, 2, 4])
    flags = dict(
        accumulation_steps=rng.choice([1, 1, 2, 4]),
        microbatches=microbatches,
        val_batch_size=microbatches,
        pp_interleave=rng.choice([1, 1, 2]),
        fsdp=rng.choice(["full", "hoist", "none"]),
        remat=rng.choice(["none", "dots", "full"]),
        sequence_parallel=rng.choice(["megatron", "ulysses"]),
        attention=rng.choice(["xla", "blockwise"]),
    )
    if "n_experts" in model and not model["capacity_factor"]:
        flags["experts"] = rng.choice(["tiles", "buckets"])
    return mesh, flags


def draw(rng):
    """(what was drawn, Config of one device with the plainest way of each thing, Config of the mesh)."""
    while True:
        model = draw_model(rng)
        mesh, spread = draw_spread(rng, model)
        sequences = mesh[0] * spread["microbatches"] * rng.choice([1, 2])  # of a batch
        plain = dict(fsdp="none", remat="none", attention="xla", microbatches=1, val_batch_size=1)
        if "n_experts" in model:
            plain["experts"] = "buckets" if model["capacity_factor"] else "tiles"
        whole = sequences * spread["accumulation_steps"]
        try:
            one = small_config((1, 1, 1), whole, **{**model, **plain})
            many = small_config(mesh, sequences, **{**model, **spread})
        except messages.UserError:
            continue
        return dict(mesh=mesh, sequences=whole, **spread, model=model), one, many


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
    return Case(
        ended.out.strip(), wrong or f"within {CLOSE:g}", wrong and f"{wrong}: {ended.err}", ended
    )


if __name__ == "__main__":
    compare(*sys.argv[1:])
