"""The mesh is invisible: any mesh, and any way to cut a batch, computes what one device computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    ARCHITECTURES,
    MESHES,
    SMALL_DEEPSEEK,
    SMALL_GPT2,
    SMALL_QWEN3,
    furthest,
    make_params,
    random_batch,
    small_config,
    steps_of,
)

import model
from architectures import parameters
from training import steps
from training.optimizer import make_optimizer


def mesh_id(value):
    """2x2x2 of (2, 2, 2), in the names of tests."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@functools.cache
def first_params(**flags):
    """Parameters on one device."""
    cfg = small_config((1, 1, 1), **flags)
    return jax.tree.map(np.asarray, make_params(cfg, steps.make_mesh(cfg)))


@functools.cache
def loss_and_gradients(mesh_shape, favorite=None, **flags):
    """((loss, Metrics), gradients) of a batch; all tokens choose the expert `favorite`, if it is given."""
    cfg = small_config(mesh_shape, **flags)
    mesh = steps.make_mesh(cfg)
    tokens, targets = random_batch(cfg, mesh)
    shardings = parameters.shardings(model.param_table(cfg), mesh)
    params = first_params(**flags)
    if favorite is not None:
        bias = np.zeros_like(params["moe"]["bias"])
        bias[..., favorite] = 10
        params = {**params, "moe": {**params["moe"], "bias": bias}}
    params = jax.device_put(params, shardings)
    f = jax.jit(jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True))
    out = f(params, tokens[0], targets[0], jax.random.key(7), jnp.int32(0))
    return jax.tree.map(np.asarray, out)


def assert_parity(mesh, **flags):
    (loss, metrics), gradients = loss_and_gradients((1, 1, 1), **flags)
    (loss_, metrics_), gradients_ = loss_and_gradients(mesh, **flags)
    assert abs(loss - loss_) < 1e-5 * abs(loss)
    assert furthest(metrics._asdict(), metrics_._asdict())[0] < 1e-5
    assert furthest(gradients, gradients_)[0] < 1e-5, furthest(gradients, gradients_)
    assert all(
        np.abs(g).max() > 0
        for path, g in jax.tree_util.tree_leaves_with_path(gradients)
        if "bias" not in str(path)
    )


@pytest.mark.parametrize("mesh", MESHES[1:], ids=mesh_id)
def test_parity_of_loss_and_every_gradient(mesh):
    assert_parity(mesh)


@pytest.mark.parametrize(
    "mesh, experts",
    [
        ((1, 1, 4), "tiles"),
        ((2, 2, 2), "tiles"),
        ((1, 1, 1), "buckets"),
        ((8, 1, 1), "buckets"),
        ((2, 2, 2), "buckets"),
    ],
    ids=mesh_id,
)
def test_parity_where_all_tokens_choose_one_expert(mesh, experts):
    """Nothing is dropped: with buckets, in as many rounds as that takes, on any mesh as with tiles on one device."""
    small = dict(layers_per_block=1, experts_per_token=1, n_shared=0, T=16)
    (loss, _), gradients = loss_and_gradients((1, 1, 1), favorite=5, experts="tiles", **small)
    skewed = loss_and_gradients(mesh, favorite=5, experts=experts, **small)
    (loss_, metrics), gradients_ = skewed
    load = metrics.load["moe"]
    assert metrics.dropped == 0 and load[..., 5].sum() == load.sum()
    assert abs(loss - loss_) < 1e-5 * abs(loss)
    assert furthest(gradients, gradients_)[0] < 1e-5, furthest(gradients, gradients_)
    assert np.abs(gradients["moe"]["experts"]["up"][:, 5]).max() > 0


# DeepSeek-V3's first layers run on all of pp; experts as on accelerators
DEEPSEEK = SMALL_DEEPSEEK | dict(rope_factor=4.0, embedding_norm=True, latent_conv=3)
DEEPSEEK |= dict(experts="buckets")
PUBLISHED = ARCHITECTURES | {"deepseek": DEEPSEEK}
DOCUMENTS = dict(document_mask=True, end_of_text=7)
VARIANTS = [
    # dropout depends on a token's number, and remat draws it again
    ((2, 2, 2), dict(dropout_rate=0.2, fsdp="full", sequence_parallel="megatron")),
    # fewer experts than devices
    ((4, 1, 2), dict(n_experts=2, activation="gelu", fsdp="none")),
    # sizes that dp does not divide
    ((3, 1, 2), dict(sequences=24, n_experts=3, latent_dim=9, vocab_size=127)),
    ((2, 2, 1), dict(remat="dots", fsdp="full", microbatches=8, val_batch_size=8, n_shared=0)),
    ((2, 2, 2), dict(pp_interleave=2, dropout_rate=0.1)),
    ((1, 4, 1), dict(SMALL_GPT2, blocks=8, pp_interleave=2)),
    ((2, 1, 2), dict(remat="none", sequence_parallel="megatron", fsdp="none")),
    ((2, 2, 2), dict(DEEPSEEK, dropout_rate=0.1)),
    ((1, 4, 2), dict(first_layers=2, layers_per_block=1, q_latent_dim=0, fsdp="full")),
    ((2, 2, 2), dict(DEEPSEEK, mtp_depth=2, sequence_parallel="megatron")),
    (
        (4, 1, 2),
        dict(DEEPSEEK, mtp_depth=1, fsdp="full", n_experts=4, n_groups=2, k_groups=1)
        | dict(experts_per_token=2),
    ),
    ((2, 2, 2), dict(SMALL_GPT2, dropout_rate=0.1, sequence_parallel="megatron")),
    ((2, 2, 2), dict(DEEPSEEK, mtp_depth=1, **DOCUMENTS)),
    ((1, 2, 4), dict(SMALL_GPT2, **DOCUMENTS)),
    (
        (2, 2, 2),
        dict(SMALL_QWEN3, n_kv_head=2, sequence_parallel="megatron", **DOCUMENTS)
        | dict(n_experts=0, experts_per_token=0),
    ),
]


@pytest.mark.parametrize("mesh, flags", VARIANTS, ids=mesh_id)
def test_parity_of_variants(mesh, flags):
    assert_parity(mesh, **flags)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("mesh", [(1, 1, 4), (4, 2, 1)], ids=mesh_id)
def test_parity_of_the_published_architectures(mesh, name):
    assert_parity(mesh, **PUBLISHED[name])


@functools.cache
def three_steps(mesh, **flags):
    # balance_weight, clipping and weight_decay are strong enough for an error in any to show
    strong = dict(grad_clip_norm=0.1, balance_weight=0.1, weight_decay=1.0)
    flags = dict(optimizer="muon", max_lr=1e-3) | strong | flags
    state, metrics = steps_of(small_config(mesh, **flags), 3)
    assert all(m["grad_norm"] > 0.2 for m in metrics), "clipping is not active"
    return jax.tree.map(np.asarray, state.params), metrics


def assert_same_run(one, other):
    """The same parameters and losses after three steps."""
    (params, metrics), (params_, metrics_) = one, other
    assert furthest(params, params_)[0] < 1e-4, furthest(params, params_)
    for m, m_ in zip(metrics, metrics_):
        assert abs(m["loss/train_loss"] - m_["loss/train_loss"]) < 1e-4
        assert abs(m["grad_norm"] - m_["grad_norm"]) < 1e-4 * m["grad_norm"]


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ((8, 1, 1), {}),
        ((1, 2, 4), {}),
        ((2, 2, 2), dict(optimizer="adamw")),
        ((2, 2, 2), SMALL_GPT2),
    ],
    ids=mesh_id,
)
def test_parity_after_three_clipped_steps(mesh, flags):
    assert_same_run(three_steps((1, 1, 1), **flags), three_steps(mesh, **flags))


@pytest.mark.parametrize(
    "mesh, cut, flags",
    [
        ((1, 1, 1), dict(accumulation_steps=4, sequences=8), {}),
        ((2, 2, 2), dict(accumulation_steps=2, sequences=16), {}),
        ((2, 2, 2), dict(microbatches=2), {}),
        ((2, 2, 2), dict(accumulation_steps=2, sequences=16), DEEPSEEK),
        ((2, 1, 1), dict(accumulation_steps=2, sequences=16), SMALL_QWEN3),
    ],
    ids=mesh_id,
)
def test_parity_however_a_batch_is_cut(mesh, cut, flags):
    assert_same_run(three_steps((1, 1, 1), **flags), three_steps(mesh, **cut, **flags))


def test_parity_of_initialization():
    """Each leaf is the same on every mesh, with the spread that the table says."""
    trees = []
    for mesh_shape in [(1, 1, 1), (2, 2, 2)]:
        cfg = small_config(mesh_shape)
        mesh = steps.make_mesh(cfg)
        optimizer, _ = make_optimizer(cfg, mesh)
        state = steps.init_state(cfg, steps.abstract_state(cfg, mesh, optimizer), optimizer)
        trees.append(jax.tree.map(np.asarray, state.params))
    assert jax.tree.all(jax.tree.map(np.array_equal, *trees))
    table = model.param_table(small_config())
    for p, x in zip(jax.tree.leaves(table, is_leaf=parameters.is_param), jax.tree.leaves(trees[0])):
        assert abs(x.std() - p.std) < 0.1 * p.std + 1e-12
        assert abs(x.mean() - p.start) < 5 * p.std / x.size**0.5 + 1e-12
