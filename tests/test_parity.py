"""The mesh is invisible: any mesh, and any way to cut a batch, computes what one device computes.

tests/test_plain.py compares what the plain model covers. Here are the other architectures, dropout, and train steps.
"""

import jax
import numpy as np
import pytest
from families import ARCHITECTURES
from mesh_helpers import (
    DEEPSEEK,
    DOCUMENTS,
    MEGATRON,
    assert_same,
    loss_and_gradients,
    mesh_id,
    on_one_device,
    three_steps,
)
from small_models import given, small_config

import model
from architectures import parameters
from training.device_mesh import make_mesh
from training.optimizer import make_optimizer
from training.train_state import abstract_state, init_state


def assert_parity(mesh, **flags):
    one = loss_and_gradients((1, 1, 1), **on_one_device(flags))
    assert_same(one, loss_and_gradients(mesh, **flags), 1e-5)
    for path, gradient in jax.tree_util.tree_leaves_with_path(one[1]):
        assert "bias" in str(path) or gradient.any(), path


GPT2 = ARCHITECTURES["gpt2"] | DOCUMENTS | given("--blocks 8 --dropout_rate 0.1 --ffn_dim 70")
DENSE = given("--n_kv_head 2 --n_experts 0 --experts_per_token 0")
DENSE = ARCHITECTURES["qwen3"] | DOCUMENTS | DENSE
DROPOUT = given("--dropout_rate 0.2 --fsdp full")
ROUNDS = given("--pp_interleave 2 --microbatches 8 --val_batch_size 8 --remat dots")
VARIANTS = [
    # dropout depends on a token's number, and remat draws it again
    ((2, 2, 2), DROPOUT | given("--experts buckets --remat experts") | MEGATRON),
    ((2, 2, 2), DROPOUT | ROUNDS),
    ((2, 2, 2), DEEPSEEK | given("--experts tiles --dropout_rate 0.1") | DOCUMENTS),
    ((1, 4, 1), GPT2 | given("--pp_interleave 2")),
    ((2, 2, 2), GPT2 | MEGATRON),
    ((2, 2, 2), DENSE | MEGATRON),
]


@pytest.mark.parametrize("mesh, flags", VARIANTS, ids=mesh_id)
def test_parity_of_variants(mesh, flags):
    assert_parity(mesh, **flags)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"deepseek"}))
@pytest.mark.parametrize("mesh", [(1, 1, 4), (4, 2, 1)], ids=mesh_id)
def test_parity_of_other_families(mesh, name):
    flags = ARCHITECTURES | {"gpt2": GPT2}
    assert_parity(mesh, **flags[name])


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ((8, 1, 1), dict(DEEPSEEK, optimizer="muon")),
        ((1, 2, 4), dict(DEEPSEEK, optimizer="muon", microbatches=2)),
        ((2, 2, 2), dict(DEEPSEEK, optimizer="muon", accumulation_steps=3, sequences=24)),
        ((2, 2, 2), dict(GPT2, dropout_rate=0.0, optimizer="adamw", accumulation_steps=2)),
        ((1, 1, 1), dict(layers_per_block=1, accumulation_steps=5, sequences=40)),
    ],
    ids=mesh_id,
)
def test_parity_after_three_clipped_steps_however_a_batch_is_cut(mesh, flags):
    one = three_steps((1, 1, 1), **on_one_device(flags))
    assert min(one[2]) > 0.2, "clipping is not active"
    assert_same(one, three_steps(mesh, **flags), 1e-4)


def test_parity_of_initialization():
    """Each leaf is the same on every mesh, with the spread that the table says."""
    trees = []
    for mesh_shape in [(1, 1, 1), (2, 2, 2)]:
        cfg = small_config(mesh_shape)
        mesh = make_mesh(cfg)
        optimizer = make_optimizer(cfg, mesh)
        state = init_state(cfg, abstract_state(cfg, mesh, optimizer), optimizer)
        trees.append(jax.tree.map(np.asarray, state.params))
    assert jax.tree.all(jax.tree.map(np.array_equal, *trees))
    table = model.param_table(small_config())
    for p, x in zip(jax.tree.leaves(table, is_leaf=parameters.is_param), jax.tree.leaves(trees[0])):
        assert abs(x.std() - p.std) < 0.1 * p.std + 1e-12
        assert abs(x.mean() - p.start) < 5 * p.std / x.size**0.5 + 1e-12
