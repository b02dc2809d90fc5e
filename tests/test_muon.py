"""Muon: the same update as optax's, on every mesh; its runs resume; what it costs is counted."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MESHES, SMALL_GPT2, furthest, make_params, small_config, steps_of

import model
import utils
from architectures import parameters
from training import muon, steps
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

FEW = dict(blocks=1, layers_per_block=2, n_experts=2)  # matrices: optax works on one after the other

def unfused(p, x):
    """{name: matrix [inputs, outputs]} of all matrices that a parameter holds, by plain indexing."""
    dims = [dim % x.ndim for dim in (*p.inputs, *p.outputs)]
    matrices = {}
    begin = 0
    for size in [n for n in p.parts if n] or [x.shape[-1]]:
        part = x[..., begin : begin + size]
        begin += size
        others = [range(1 if dim in dims else n) for dim, n in enumerate(part.shape)]
        for at in np.ndindex(*map(len, others)):
            index = tuple(slice(None) if dim in dims else at[dim] for dim in range(x.ndim))
            matrix = part[index]
            left = sorted(dims)
            order = [left.index(dim) for dim in dims]
            inputs = math.prod(part.shape[dim] for dim in p.inputs)
            matrices[begin, at] = matrix.transpose(order).reshape(inputs, -1)
    return matrices


@pytest.mark.parametrize(
    "flags", [FEW, dict(FEW, mtp_depth=1, q_latent_dim=0), dict(SMALL_GPT2, blocks=1)], ids=str
)
def test_updates_are_those_of_optax(flags):
    """Of each matrix on its own, over three steps."""
    cfg = small_config(optimizer="muon", grad_clip_norm=1e9, weight_decay=0.5, **flags)
    mesh = steps.make_mesh(cfg)
    table, params = model.param_table(cfg), make_params(cfg, mesh)
    table = jax.tree.leaves(table, is_leaf=parameters.is_param)
    optimizer, schedule = make_optimizer(cfg, mesh)
    state = optimizer.init(params)
    ours, gradients = params, []
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), len(table))
        leaves, tree = jax.tree.flatten(params)
        leaves = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves)]
        gradients.append(leaves)
        updates, state = jax.jit(optimizer.update)(jax.tree.unflatten(tree, leaves), state, ours)
        ours = optax.apply_updates(ours, updates)
    # optax's own momentum corrects its bias, which the paper's does not
    reference = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.contrib.muon(
            schedule, beta=0.0, nesterov=False, weight_decay=0.5, consistent_rms=0.2
        ),
    )
    leaves = jax.tree.leaves(params)
    for i, p in enumerate(table):
        if p.hidden:
            theirs = unfused(p, leaves[i])
            state, update = reference.init(theirs), jax.jit(reference.update)
            for step in gradients:
                updates, state = update(unfused(p, step[i]), state, theirs)
                theirs = optax.apply_updates(theirs, updates)
            found = unfused(p, jax.tree.leaves(ours)[i])
            assert furthest(theirs, found)[0] < 1e-4, p
