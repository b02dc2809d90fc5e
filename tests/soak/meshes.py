"""Drawn models on drawn meshes: train steps of any cut of a batch against those of one device.

python -m tests.soak.meshes SEED compares one, on the 8 devices that the tests simulate.
"""

import json
import math
import random
import re
import sys

import jax
import numpy as np
from conftest import SMALL_GPT2, begin, furthest, random_batch, small_config
from test_parity import DEEPSEEK

from runtime import messages
from tests.soak.programs import complaint, fresh_folder, run
from training import steps

CLOSE = 1e-5  # of losses and gradients; what an optimizer makes of them may differ tenfold
MESHES = []
for dp in range(1, 9):
    for pp in range(1, 8 // dp + 1):
        MESHES += [(dp, pp, tp) for tp in range(1, 8 // dp // pp + 1) if dp * pp * tp > 1]

# --- What is drawn ------------------------------------------------------------------------------------------------


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
    if base is not SMALL_GPT2:
        flags |= draw_experts(rng, base)
    return {**base, **flags}


def draw_experts(rng, base):
    """Flags that GPT-2 does not have."""
    experts = rng.choice([2, 3, 4, 6, 8, 8, 16])
    chosen = rng.choice([1, 2, 2, 3])
    groups = dict(n_groups=1, k_groups=1)
    if base and experts % 4 == 0 and chosen < 3:
        groups = dict(n_groups=2, k_groups=rng.choice([1, 2]))
    return dict(
        **groups,
        n_experts=experts,
        experts_per_token=min(chosen, experts),
        expert_dim=rng.choice([12, 24, 32]),
        n_shared=rng.choice([0, 1, 2]),
        first_layers=rng.choice([0, 0, 1, 2, 3]),
        layers_per_block=1 if base else rng.choice([1, 2, 3]),
        mtp_depth=rng.choice([0, 0, 1, 2]),
        latent_dim=rng.choice([0, 9, 16]) or 16,
        q_latent_dim=rng.choice([-1, 0, 10]),
        rope_dim=rng.choice([2, 8]),
        latent_conv=rng.choice([0, 3]),
        embedding_norm=rng.random() < 0.5,
        tied=rng.random() < 0.5,
        # room for all tokens, or no limit
        capacity_factor=rng.choice([0.0, 0.0, experts / min(chosen, experts)]),
    )


def draw_spread(rng, model):
    """Flags of how the model and its batch are spread, none of which may change a result."""
    mesh = rng.choices(MESHES, map(math.prod, MESHES))[0]
    flags = dict(
        accumulation_steps=rng.choice([1, 1, 2, 4]),
        microbatches=mesh[1] * rng.choice([1, 1, 2, 4]),
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
    """(model, mesh, spread, sequences of a whole batch) that the program takes."""
    while True:
        model = draw_model(rng)
        mesh, spread = draw_spread(rng, model)
        per_replica = spread["microbatches"] * rng.choice([1, 2])
        sequences = mesh[0] * per_replica * spread["accumulation_steps"]
        try:
            on_one(model, sequences), spread_out(model, mesh, spread, sequences)
        except messages.UserError:
            continue
        return model, mesh, spread, sequences


def on_one(model, sequences):
    """Config of one device, with the plainest way of each thing."""
    plain = dict(fsdp="none", remat="none", attention="xla", microbatches=1, val_batch_size=1)
    if "n_experts" in model:
        plain["experts"] = "buckets" if model["capacity_factor"] else "tiles"
    return small_config((1, 1, 1), sequences, **{**model, **plain})


def spread_out(model, mesh, spread, sequences):
    of_one_batch = sequences // spread["accumulation_steps"]
    batch = dict(val_batch_size=spread["microbatches"])
    return small_config(mesh, of_one_batch, **{**model, **spread, **batch})


# --- What is compared ---------------------------------------------------------------------------------------------


def trained(cfg):
    """([loss of each step], first moments after the first step, which are gradients, parameters after the last)."""
    mesh = steps.make_mesh(cfg)
    state, step = begin(cfg, mesh)
    losses, moments = [], None
    for seed in range(2 if cfg.optimizer.optimizer == "muon" else 1):
        state, metrics = step(state, *random_batch(cfg, mesh, seed))
        losses.append(float(metrics["loss/train_loss"]))
        if moments is None:
            moments = first_moments(state.opt_state)
    return losses, moments, jax.tree.map(np.asarray, state.params)


def first_moments(state):
    """{path: array} of the momentum of every parameter."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if re.search(r"\.(mu|trace)\b", name):
            found[name] = np.asarray(leaf)
    return found


def compare(seed):
    """What was drawn, and how far the two are from each other."""
    model, mesh, spread, sequences = draw(random.Random(seed))
    tried = dict(mesh=mesh, sequences=sequences, **spread, model=model)
    print(json.dumps(tried), flush=True)
    losses, moments, params = trained(on_one(model, sequences))
    losses_, moments_, params_ = trained(spread_out(model, mesh, spread, sequences))
    # rounds of the pipeline make two dims of that of the blocks
    moments_, params_ = (
        jax.tree.map(lambda x, y: y.reshape(x.shape), a, b)
        for a, b in ((moments, moments_), (params, params_))
    )
    loss = max(abs(a - b) / abs(a) for a, b in zip(losses, losses_))
    found = dict(
        loss=loss, gradient=furthest(moments, moments_), parameter=furthest(params, params_)
    )
    print(json.dumps(found))


# --- A case -------------------------------------------------------------------------------------------------------


class Kind:
    """Cases of meshes."""

    def __init__(self, folder):
        pass

    def case(self, rng, folder):
        """(what was tried, how it ended, what is wrong with that or None, the Ended)."""
        words = ["tests/soak/meshes.py", rng.getrandbits(64)]
        ended = run(words, fresh_folder(folder) / "work", seconds=300)
        lines = ended.out.splitlines()
        tried = next((line for line in lines if line.startswith("{")), "?")
        wrong = complaint(ended, (0,))
        if wrong:
            return tried, wrong, wrong, ended
        found = json.loads(lines[-1])
        far = max(found["loss"], found["gradient"][0], found["parameter"][0] / 10)
        wrong = None if far < CLOSE else f"differs: {json.dumps(found)}"
        return tried, "differs" if wrong else f"within {CLOSE:g}", wrong, ended


if __name__ == "__main__":
    compare(*sys.argv[1:])
