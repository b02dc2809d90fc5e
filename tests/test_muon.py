"""Muon: the same update as optax's, on every mesh; its runs resume; what it costs is counted."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from conftest import MESHES, SMALL_GPT2, furthest, make_params, small_config, steps_of

import model
from architectures import parameters
from training import steps
from training.optimizer import make_optimizer


@functools.cache
def three_steps(mesh, **flags):
    flags = dict(optimizer="muon", max_lr=1e-3, weight_decay=1.0) | flags
    state, metrics = steps_of(small_config(mesh, **flags), 3)
    return jax.tree.map(np.asarray, state.params), metrics


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_parity_after_three_steps(mesh):
    params, metrics = three_steps((1, 1, 1))
    params_, metrics_ = three_steps(mesh)
    assert furthest(params, params_)[0] < 1e-4, furthest(params, params_)
    assert furthest(metrics, metrics_)[0] < 1e-4


# --- The update ---------------------------------------------------------------------------------------------------


def unfused(p, x):
    """{part: its matrices [n, inputs, outputs]} of a parameter."""
    inputs = [dim % x.ndim for dim in p.inputs]
    outputs = [dim % x.ndim for dim in p.outputs]
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


@pytest.mark.parametrize("flags", [dict(mtp_depth=1), SMALL_GPT2], ids=["deepseek", "gpt2"])
def test_updates_are_those_of_optax(flags):
    """Of each matrix on its own, over three steps."""
    cfg = small_config(optimizer="muon", grad_clip_norm=1e9, weight_decay=0.5, **flags)
    mesh = steps.make_mesh(cfg)
    params = make_params(cfg, mesh)
    leaves, tree = jax.tree.flatten(params)
    table = jax.tree.leaves(model.param_table(cfg), is_leaf=parameters.is_param)
    optimizer, schedule = make_optimizer(cfg, mesh)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    gradients = []
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        gradients.append([jax.random.normal(key, x.shape) for key, x in zip(keys, leaves)])
        updates, state = update(jax.tree.unflatten(tree, gradients[-1]), state, params)
        params = optax.apply_updates(params, updates)

    # optax corrects the momentum's bias, the paper does not
    without_momentum = dict(beta=0.0, nesterov=False)
    reference = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.contrib.muon(schedule, weight_decay=0.5, consistent_rms=0.2, **without_momentum),
    )
    for i, p in enumerate(table):
        if p.hidden:
            theirs = unfused(p, leaves[i])
            state, update = jax.vmap(reference.init)(theirs), jax.jit(jax.vmap(reference.update))
            for gradient in gradients:
                updates, state = update(unfused(p, gradient[i]), state, theirs)
                theirs = optax.apply_updates(theirs, updates)
            ours = unfused(p, jax.tree.leaves(params)[i])
            assert furthest(theirs, ours)[0] < 1e-4, p
