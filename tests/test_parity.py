"""The mesh is invisible: any mesh, and any way to cut a batch, computes what one device computes.

tests/test_plain.py compares what the plain model covers. Here are the other architectures, dropout, and train steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, furthest, given, make_params, small_config, steps_of
from families import ARCHITECTURES

import model
from architectures import parameters
from training.device_mesh import make_mesh
from training.optimizer import make_optimizer
from training.train_state import abstract_state, init_state


def mesh_id(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


# Flags of how a model and its batch lie on a mesh, which may not change what they give
SPREAD = {"fsdp", "sequence_parallel", "pp_interleave", "remat"}
SPREAD |= {"microbatches", "val_batch_size", "accumulation_steps"}


def on_one_device(flags):
    return {name: value for name, value in flags.items() if name not in SPREAD}


@functools.cache
def first_params(**flags):
    cfg = small_config((1, 1, 1), **flags)
    return jax.tree.map(np.asarray, make_params(cfg, make_mesh(cfg)))


def spread(tree, cfg, mesh):
    """A tree like the parameters on one device, as they lie on `mesh`."""
    table = model.param_table(cfg)
    # --pp_interleave makes two dims of that of the blocks
    shaped = jax.tree.map(lambda x, p: x.reshape(p.shape), tree, table)
    return jax.device_put(shaped, parameters.shardings(table, mesh))


@functools.cache
def loss_and_gradients(mesh_shape, make_params=first_params, **flags):
    """((loss, Metrics), gradients) of a batch, with the parameters that `make_params` makes of the flags."""
    cfg = small_config(mesh_shape, **flags)
    mesh = make_mesh(cfg)
    tokens, targets = batch_of(cfg, mesh)
    params = make_params(**on_one_device(flags))
    f = jax.jit(jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True))
    out = f(spread(params, cfg, mesh), tokens[0], targets[0], jax.random.key(7), jnp.int32(0))
    return jax.tree.map(np.asarray, out)


def assert_same(one, other, close):
    """`one` and `other`, which may have its blocks in rounds."""
    other = jax.tree.map(lambda x, y: y.reshape(x.shape), one, other)
    assert furthest(one, other)[0] < close, furthest(one, other)


def assert_parity(mesh, **flags):
    one = loss_and_gradients((1, 1, 1), **on_one_device(flags))
    assert_same(one, loss_and_gradients(mesh, **flags), 1e-5)
    for path, gradient in jax.tree_util.tree_leaves_with_path(one[1]):
        assert "bias" in str(path) or gradient.any(), path


DOCUMENTS = given("--document_mask") | dict(end_of_text=7)
# DeepSeek-V3's first layers run on all of pp; experts as on accelerators
DEEPSEEK = given("--embedding_norm --embedding_conv 3 --latent_conv 3 --experts buckets")
DEEPSEEK = ARCHITECTURES["deepseek"] | DEEPSEEK
GPT2 = ARCHITECTURES["gpt2"] | DOCUMENTS | given("--blocks 8 --dropout_rate 0.1 --ffn_dim 70")
DENSE = given("--n_kv_head 2 --n_experts 0 --experts_per_token 0")
DENSE = ARCHITECTURES["qwen3"] | DOCUMENTS | DENSE
DROPOUT = given("--dropout_rate 0.2 --fsdp full")
ROUNDS = given("--pp_interleave 2 --microbatches 8 --val_batch_size 8 --remat dots")
MEGATRON = given("--sequence_parallel megatron")
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


@functools.cache
def three_steps(mesh, sequences=32, **flags):
    """(parameters, losses, norms) of three clipped steps."""
    # balance_weight, clipping and weight_decay are strong enough for an error in any to show
    strong = dict(grad_clip_norm=0.1, balance_weight=0.1, weight_decay=1.0, max_lr=1e-3)
    sequences //= flags.get("accumulation_steps", 1)
    state, metrics = steps_of(small_config(mesh, sequences, **strong | flags), range(3))
    losses, norms = ([m[key] for m in metrics] for key in ("loss/train_loss", "grad_norm"))
    return jax.tree.map(np.asarray, (state.params, losses, norms))


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
