"""Muon: the same update as optax's, however the matrices lie; its runs. (On every mesh: tests/test_parity.py.)"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import SMALL_GPT2, SMALL_QWEN3
from mesh_helpers import assert_same, first_params, furthest, on_one_device, spread
from small_models import small_config

import model
from architectures import parameters
from training import muon
from training.device_mesh import make_mesh
from training.optimizer import learning_rate, make_optimizer

# matrices of all kinds, and experts fewer than devices
DEEPSEEK = dict(n_experts=2, first_layers=1, layers_per_block=1)


@functools.cache
def updated(mesh_shape, size=1.0, **flags):
    """(parameters after three updates by random gradients of about `size`, those gradients shaped as on one device)."""
    muon_flags = dict(optimizer="muon", muon_momentum=0.8, weight_decay=0.5, grad_clip_norm=1e9)
    cfg = small_config(mesh_shape, **muon_flags | flags)
    mesh, start = make_mesh(cfg), first_params(**on_one_device(flags))
    optimizer = make_optimizer(cfg, mesh)

    def update(carry, given):
        (params, state), (gradient, rate) = carry, given
        updates, state = optimizer.update(gradient, state, params, rate=rate)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train(params, *gradients):
        rates = jnp.stack([learning_rate(cfg.optimizer, step) for step in range(3)])
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *gradients)
        return jax.lax.scan(update, (params, optimizer.init(params)), (stacked, rates))[0][0]

    rng = np.random.default_rng(0)

    def draw(tree):
        return jax.tree.map(
            lambda x: np.float32(size) * rng.standard_normal(x.shape, np.float32), tree
        )

    gradients = [draw(start) for _ in range(3)]
    params = train(*(spread(tree, cfg, mesh) for tree in (start, *gradients)))
    return jax.tree.map(np.asarray, params), gradients


SPREAD = {
    "megatron": ((2, 2, 2), dict(sequence_parallel="megatron", fsdp="none")),
    "copies": ((4, 2, 1), dict(DEEPSEEK, fsdp="none")),
    "rounds": ((2, 2, 2), dict(fsdp="full", pp_interleave=2)),
    "gpt2": ((2, 1, 4), dict(SMALL_GPT2, sequence_parallel="megatron")),
    "filled": ((1, 1, 4), SMALL_QWEN3),
}


@pytest.mark.parametrize("mesh, flags", SPREAD.values(), ids=SPREAD)
def test_updates_on_a_mesh_are_those_of_one_device(mesh, flags):
    params, _ = updated((1, 1, 1), **on_one_device(flags))
    assert_same(params, updated(mesh, **flags)[0], 1e-4)


def test_experts_may_have_a_momentum_of_their_own():
    """Their updates are those of a run in which all have it, and all others those of a run without it."""
    flags = dict(blocks=1, layers_per_block=2)
    plain, longer, both = (
        updated((1, 1, 1), **flags, **more)[0]
        for more in ({}, dict(muon_momentum=0.9), dict(expert_momentum=0.9))
    )
    short, long, own = (params["moe"].pop("experts") for params in (plain, longer, both))
    assert_same(own, long, 1e-6)
    assert furthest(own, short)[0] > 1e-3
    assert_same(both, plain, 1e-6)


def test_gradients_below_the_range_of_float16_make_the_same_updates():
    flags = dict(blocks=1, layers_per_block=1)
    exact, _ = updated((1, 1, 1), size=1e-9, **flags)
    rounded, _ = updated((1, 1, 1), size=1e-9, model_dtype="float16", **flags)
    assert_same(exact, rounded, 2**-6)


def test_large_matrices_share_a_bucket():
    """Of two shapes with fewer matrices than devices, each would keep one device of 64 busy after the other."""
    mesh, layout = dict(dp=64, pp=1, tp=1), muon.Layout(("dp",), (), ())
    shapes = [(3, 288, 7168), (29, 256, 7168), (64, 256, 7168)]
    few, more, many = (muon.Matrices(s, (1,), (2,), layout, scale=1.0) for s in shapes)
    assert [bucket.members for bucket in muon.make_buckets([few, more], mesh)] == [(0, 1)]
    assert len(muon.make_buckets([few, many], mesh)) == 2


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_singular_values_become_about_one(shape):
    """From 0.003 of the matrix's norm on; its singular vectors stay."""
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    before = np.geomspace(1, 150, 24)
    before /= np.linalg.norm(before)
    assert 0.003 < before[0] < 0.005
    x = jnp.asarray(1e-4 * (u * before) @ v, jnp.float32)
    after = u.T @ np.asarray(muon.newton_schulz(x[None])[0]) @ v.T
    assert np.all((0.7 < np.diag(after)) & (np.diag(after) < 1.25))
    assert np.abs(after - np.diag(np.diag(after))).max() < 1e-3


@pytest.mark.parametrize("dtype, size", [("bfloat16", 1.0), ("float16", 1.0), ("float16", 300.0)])
def test_singular_values_stay_bounded_in_short_types(dtype, size):
    """Rounding can push the only one of a matrix of rank 1 beyond 1, where the polynomials grow fast. The squares of a
    large matrix are beyond float16."""
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((40, 96, 1))
    for rows in (rng.standard_normal((40, 1, 160)), rng.uniform(1, 2, (40, 1, 1)) * np.ones(160)):
        found = muon.newton_schulz(jnp.asarray(size * columns * rows, dtype))
        largest = np.linalg.svd(np.asarray(found, np.float32), compute_uv=False).max(1)
        assert np.all((0.7 < largest) & (largest < 1.25))


def unfused(p, x):
    """{part: its matrices [n, inputs, outputs]} of a parameter."""
    inputs = [p.dims.index(dim) for dim in p.inputs]
    outputs = [p.dims.index(dim) for dim in p.outputs]
    others = [dim for dim in range(x.ndim) if dim not in inputs + outputs]
    matrices, begin = {}, 0
    for size in [n for n in p.parts if n] or [x.shape[-1]]:
        part = x[..., begin : begin + size]
        n_inputs = math.prod(part.shape[dim] for dim in inputs)
        n_outputs = math.prod(part.shape[dim] for dim in outputs)
        part = part.transpose(others + inputs + outputs)
        matrices[begin] = part.reshape(-1, n_inputs, n_outputs)
        begin += size
    return matrices


@pytest.mark.parametrize("flags", [DEEPSEEK, SMALL_GPT2])
def test_updates_are_those_of_optax(flags):
    cfg = small_config(optimizer="muon", **flags)
    table = jax.tree.leaves(model.param_table(cfg), is_leaf=parameters.is_param)
    schedule = functools.partial(learning_rate, cfg.optimizer)
    params, gradients = updated((1, 1, 1), **flags)
    scaled = dict(ns_coeffs=muon.COEFFICIENTS, weight_decay=0.5, consistent_rms=0.2)
    # its own momentum, whose bias it corrects and the paper does not, is off
    theirs = optax.contrib.muon(schedule, beta=0.0, nesterov=False, **scaled)
    reference = optax.chain(optax.trace(0.8, nesterov=True), theirs)

    @jax.jit
    @jax.vmap
    def train(matrices, gradients):
        state = reference.init(matrices)
        for gradient in gradients:
            updates, state = reference.update(gradient, state, matrices)
            matrices = optax.apply_updates(matrices, updates)
        return matrices

    leaves = map(jax.tree.leaves, (first_params(**flags), params, *gradients))
    for p, before, after, *each in zip(table, *leaves):
        if p.hidden:
            theirs = train(unfused(p, before), [unfused(p, gradient) for gradient in each])
            assert furthest(theirs, unfused(p, after))[0] < 1e-4, p
