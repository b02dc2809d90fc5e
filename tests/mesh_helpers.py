"""Losses, gradients and train steps of small models on any mesh, and their comparison."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from families import ARCHITECTURES
from small_models import given, small_config

import collectives
import model
from architectures import parameters
from training.device_mesh import make_mesh
from training.optimizer import hyperparameters, make_optimizer
from training.train_state import abstract_state, init_state
from training.train_step import lower_train_step


def make_params(cfg, mesh):
    """Parameters with the spread of their table, the same on any mesh; numpy draws them, which needs no compiling."""

    def draw(path, p):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        x = p.start + p.std * rng.standard_normal(p.shape)
        x[p.rows or len(x) :] = 0
        return x.astype(np.float32)

    table = model.param_table(cfg)
    drawn = jax.tree_util.tree_map_with_path(draw, table, is_leaf=parameters.is_param)
    return jax.device_put(drawn, parameters.shardings(table, mesh))


def batch_of(cfg, mesh, seed=0):
    """Global (tokens, targets) [accumulation, M, B, T] of random tokens; the same sequences however they are cut."""
    A, M = cfg.run.accumulation_steps, cfg.data.microbatches
    B = cfg.data.train_batch_size * cfg.run.n_device_axis[0] // M
    shape, rng = (A * M * B, cfg.model.T + 1), np.random.default_rng(seed)
    rows = rng.integers(0, cfg.model.vocab_size, shape).astype(np.int32).reshape(A, M, B, -1)
    sharding = jax.sharding.NamedSharding(mesh, collectives.BATCH_SPEC)
    return tuple(jax.device_put(part, sharding) for part in (rows[..., :-1], rows[..., 1:]))


def furthest(a, b):
    """Largest difference between two trees, each leaf relative to its own largest entry, and that leaf's path."""
    found = []
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        difference = np.abs(np.subtract(x, y)).max(initial=0) / np.abs(x).max(initial=1e-30)
        found.append((float(difference), jax.tree_util.keystr(path)))
    return max(found)


def begin(cfg, mesh):
    """(TrainState at step 0, the compiled train step)."""
    optimizer = make_optimizer(cfg, mesh)
    abstract = abstract_state(cfg, mesh, optimizer)
    step = lower_train_step(cfg, mesh, abstract).compile()
    numbers = hyperparameters(cfg, mesh)
    state = init_state(cfg, abstract, optimizer, make_params(cfg, mesh))
    return state, lambda state, tokens, targets: step(state, tokens, targets, numbers)


def steps_of(cfg, seeds):
    """TrainState after a step on the random batch of each seed, and the metrics of every step."""
    mesh = make_mesh(cfg)
    state, step = begin(cfg, mesh)
    seen = []
    for seed in seeds:
        state, metrics = step(state, *batch_of(cfg, mesh, seed))
        seen.append(jax.device_get(metrics))
    return state, seen


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


DOCUMENTS = given("--document_mask") | dict(end_of_text=7)
# DeepSeek-V3's first layers run on all of pp; experts as on accelerators
DEEPSEEK = given(
    "--embedding_norm --embedding_conv 3 --backout --latent_conv 3 --exclusive_attention --experts buckets"
)
DEEPSEEK = ARCHITECTURES["deepseek"] | DEEPSEEK
MEGATRON = given("--sequence_parallel megatron")


@functools.cache
def three_steps(mesh, sequences=32, **flags):
    """(parameters, losses, norms) of three clipped steps."""
    # balance_weight, clipping and weight_decay are strong enough for an error in any to show
    strong = dict(grad_clip_norm=0.1, balance_weight=0.1, weight_decay=1.0, max_lr=1e-3)
    sequences //= flags.get("accumulation_steps", 1)
    state, metrics = steps_of(small_config(mesh, sequences, **strong | flags), range(3))
    losses, norms = ([m[key] for m in metrics] for key in ("loss/train_loss", "grad_norm"))
    return jax.tree.map(np.asarray, (state.params, losses, norms))
