"""Drawn models on drawn meshes: train steps of any cut of a batch against those of one device.

python -m tests.soak.meshes SEED compares one, on the 8 devices that the tests simulate.
"""

import contextlib
import itertools
import math
import random
import sys

from families import SMALL_GPT2, SMALL_QWEN3
from mesh_helpers import DEEPSEEK, assert_same, loss_and_gradients, on_one_device, three_steps
from small_models import small_config

from runtime import messages
from tests.soak.programs import Case, complaint, run

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
DEEPSEEK_MODEL |= dict(embedding_conv=[0, 3])
DEEPSEEK_MODEL |= dict(q_latent_dim=[-1, 0, 10], embedding_norm=[False, True], tied=[False, True])
DEEPSEEK_MODEL |= dict(backout=[False, True], exclusive_attention=[False, True])
DEEPSEEK_MODEL["experts"] = ["tiles", "buckets"]
# of flags that say how a model and its batch are spread, and may not change a result
SPREAD = dict(accumulation_steps=[1, 1, 2, 4], pp_interleave=[1, 1, 2])
SPREAD |= dict(fsdp=["full", "hoist", "none"], remat=["none", "dots", "attention", "full"])
SPREAD |= dict(sequence_parallel=["megatron", "ulysses"], attention=["xla", "blockwise"])
PLAIN = dict(fsdp="none", remat="none", attention="xla")  # the plainest way of each thing


def values(rng, choices):
    return {flag: rng.choice(of) for flag, of in choices.items()}


def draw(rng):
    """(mesh, sequences of a train step, flags)."""
    base = rng.choice([{}, DEEPSEEK, SMALL_GPT2, SMALL_QWEN3])
    while True:
        flags = base | values(rng, MODEL) | values(rng, SPREAD)
        if base in ({}, DEEPSEEK):
            flags |= values(rng, DEEPSEEK_MODEL)
        mesh = rng.choices(MESHES, [math.prod(mesh) for mesh in MESHES])[0]
        microbatches = mesh[1] * rng.choice([1, 1, 2, 4])
        flags |= dict(microbatches=microbatches, val_batch_size=microbatches)
        sequences = math.lcm(4, mesh[0] * microbatches * rng.choice([1, 2]))
        with contextlib.suppress(messages.UserError):  # of values that do not go together
            small_config((1, 1, 1), sequences, **on_one_device(flags) | PLAIN)
            small_config(mesh, sequences, **flags)
            return mesh, sequences * flags["accumulation_steps"], flags


def compare(seed):
    """Print what was drawn; fail where the mesh computes something else than one device does."""
    mesh, sequences, flags = draw(random.Random(seed))
    print(dict(mesh=mesh, sequences=sequences, **flags), flush=True)
    for compute, close in (loss_and_gradients, 1e-5), (three_steps, 1e-4):
        one = compute((1, 1, 1), sequences=sequences, **on_one_device(flags) | PLAIN)
        assert_same(one, compute(mesh, sequences=sequences, **flags), close)


def case(rng, sound, folder):
    ended = run(["tests/soak/meshes.py", rng.getrandbits(64)], folder / "work")
    wrong = complaint(ended, (0,))
    how, said = wrong or "the same", wrong and f"{wrong}: {ended.err}"
    return Case(ended.out.strip(), how, said, ended)


if __name__ == "__main__":
    compare(*sys.argv[1:])
