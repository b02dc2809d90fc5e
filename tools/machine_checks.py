"""The checks of `tools/check_machine.py` that know the right answer: kernels, collectives, small models, resuming.

Each is a function that returns what it found, in words, or raises `Wrong` or `Skipped` with a sentence.
"""

import math
import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import collectives
import model
import utils
from architectures import parameters
from architectures.layers import activate
from collectives import AXES, EXPERT_AXES
from kernels import attention, grouped
from kernels import loss as losses
from planning import plan
from presets import preset
from tools import bench
from training import steps
from training.bad_steps import BadSteps
from training.checkpointing import fingerprint
from training.optimizer import make_optimizer
from training.run_checkpoints import RunCheckpoints

# Largest difference that is rounding, as a share of the largest number of the same array
LIMITS = {"float32": 1e-4, "bfloat16": 2**-5}
# XLA takes minutes for some models on a CPU where it optimizes
COMPILER = {"cpu": {"xla_backend_optimization_level": 0}}
MODELS = ("deepseek-tiny", "gpt2-tiny", "qwen3-tiny")


class Wrong(Exception):
    """The machine computes something else than it should."""


class Skipped(Exception):
    """The check cannot run on this machine."""


def compare(right, found, limit):
    """Words: how far two trees are apart. Raises Wrong where that is more than `limit`."""
    furthest, at = 0.0, ""
    for (path, x), y in zip(jax.tree.leaves_with_path(right), jax.tree.leaves(found), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        difference = np.abs(x - y).max() / np.abs(x).max(initial=1e-30)
        difference = np.nan_to_num(difference, nan=np.inf)
        if difference > furthest:
            furthest, at = difference, jax.tree_util.keystr(path)
    if furthest > limit:
        raise Wrong(f"{at} is {furthest:.1e} of its largest number off, more than {limit:.1e}")
    return f"{furthest:.0e}"


# --- Kernels ------------------------------------------------------------------------------------------------------


def kernel_checks():
    """{name: check} of all kernels."""
    checks = {}
    for name in attention.ATTENTION:
        if name != "xla":
            checks[f"kernel attention {name}"] = partial(check_attention, name)
    return checks | {"kernel loss": check_loss, "kernel grouped": check_grouped}


def draw(*shape):
    """Random numbers whose rows have length 1."""
    rng = np.random.default_rng(math.prod(shape))  # others for each shape
    return rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])


def check_kernel(kernel, plain, *inputs):
    """Compare outputs and gradients of a kernel, in both types, with `plain` of the same numbers in float32."""
    found = []
    for dtype, limit in LIMITS.items():
        rounded = [jnp.asarray(x, dtype) for x in inputs]
        right = with_gradients(plain, *(x.astype(jnp.float32) for x in rounded))
        try:
            found.append(f"{dtype} {compare(right, with_gradients(kernel, *rounded), limit)}")
        except Wrong as e:
            raise Wrong(f"{dtype}: {e}") from None
    return ", ".join(found)


def with_gradients(function, *inputs):
    """{"output": of a function, "gradients": what a fixed gradient of it makes of the inputs}."""

    @jax.jit
    def run(*inputs):
        out, transpose = jax.vjp(function, *inputs)
        g = jnp.cos(jnp.arange(out.size)).astype(jnp.bfloat16)
        return dict(output=out, gradients=transpose(g.reshape(out.shape).astype(out.dtype)))

    # as training/steps.py: set_precision has it
    precision = "float32" if inputs[0].dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        return run(*inputs)


def check_attention(name):
    kernel = attention.ATTENTION[name]
    platform = attention.platform_of(jax.devices()[0])
    if platform not in kernel.platforms:
        raise Skipped(f"it is for {' and '.join(kernel.platforms)}, this is {platform}")
    B, H, T = 2, 4, 256
    position = jnp.arange(T)[None]
    start = jnp.broadcast_to(jnp.where(position < 100, 0, 100), (B, T))  # two documents

    def run(attend, q, k, v):
        return attend(30 * q, k, v, position, start)

    # heads as moe1b has them, but two of queries share the keys and values of one
    q, k, v = draw(B, H, T, 192), draw(B, 2, T, 192), draw(B, 2, T, 64)
    ours = partial(run, kernel.function)
    plain = partial(run, attention.attend)
    return check_kernel(ours, plain, q, k, v)


def check_loss():
    V, rows, n = 300, 384, 100
    targets = np.arange(n) * 7 % V
    targets[::9] = -1  # which do not count

    def plain(x, embedding):
        likely = jax.nn.log_softmax(x @ embedding[:V].T)[jnp.arange(n), targets]
        return -jnp.where(targets >= 0, likely, 0).sum()

    def kernel(x, embedding):
        return losses.cross_entropy(x, embedding, targets, V, 20)

    return check_kernel(kernel, plain, 8 * draw(n, 64), draw(rows, 64))


def check_grouped():
    begins = grouped.group_begins(jnp.array([40, 0, 300]))
    expert = np.repeat(np.arange(3), np.diff(begins))

    def plain(rows, gates, up, down):
        h = activate(jnp.einsum("nd,ngdf->ngf", rows, up[expert]))
        return jnp.einsum("nf,ndf->nd", h * gates, down[expert])

    def kernel(*inputs):
        return grouped.grouped_feed_forward(activate, 113, *inputs, begins)

    inputs = draw(len(expert), 64), draw(len(expert), 1), draw(3, 2, 64, 96), draw(3, 64, 96)
    return check_kernel(kernel, plain, *inputs)


# --- Collectives --------------------------------------------------------------------------------------------------


class Collective(NamedTuple):
    """A collective, and what it should do."""

    name: str
    axes: tuple  # along which devices exchange arrays
    shape: tuple  # of each device's array
    plain: Callable  # the arrays [n, ...] of all n devices along the axes -> what each of them gets
    arguments: dict = {}
    has_transpose: bool = True

    def __call__(self, x):
        """On a device's array, inside `shard_map`."""
        if self.name == "from_experts":
            x = collectives.to_experts(x)
        return getattr(collectives, self.name)(x, **self.arguments)


def gather(dim):
    return lambda x: [np.concatenate(x, dim)] * len(x)


def split(dim):
    return lambda x: np.split(x, len(x), dim)


def sum_and_split(dim):
    return lambda x: np.split(x.sum(0), len(x), dim)


def list_collectives(n):
    """`Collective`s, with arrays that up to n devices can share out. The others are made of these."""
    dp, pp, tp = ("dp",), ("pp",), ("tp",)
    E = 2 * n
    experts = dict(E=E)
    owners = dict(rows=dp, columns=(), copies=(), sharers=1)
    along = dict(axis=tp, dim=1)
    whole = dict(axis=AXES, dim=1)
    found = [
        Collective("all_gather", tp, (2, 3, 5), gather(1), along),
        Collective("all_gather", AXES, (2, 3, 5), gather(1), whole),
        Collective("reduce_scatter", tp, (2, n, 5), sum_and_split(1), along),
        Collective("reduce_scatter", AXES, (2, n, 5), sum_and_split(1), whole),
        Collective("sum_over", AXES, (3,), lambda x: [x.sum(0)] * len(x), dict(axes=AXES)),
        Collective("largest", AXES, (3,), lambda x: [x.max(0)] * len(x), dict(axes=AXES), False),
        Collective("gather_tokens", EXPERT_AXES, (3, 5), gather(0), experts),
        Collective("scatter_tokens", EXPERT_AXES, (n, 5), sum_and_split(0), experts),
        Collective(
            "to_experts", EXPERT_AXES, (E, 3, 5), lambda x: np.split(x.swapaxes(0, 1), len(x))
        ),
        # there and back
        Collective("from_experts", EXPERT_AXES, (E, 3, 5), lambda x: x),
        Collective("exchange_heads", tp, (1, 2, n, 3), split(3), dict(split=True)),
        Collective(
            "to_owners", dp, (n, 2, 3), lambda x: np.split(np.concatenate(x, 1), len(x)), owners
        ),
        Collective(
            "from_owners", dp, (1, n, 3), lambda x: np.split(np.concatenate(x), len(x), 1), owners
        ),
        Collective("next_stage", pp, (3,), lambda x: np.roll(x, 1, 0)),
        # only stage 0 feeds the pipeline, so the gradients of the others do not count
        Collective("to_stages", pp, (2, 3), gather(0), {}, False),
        Collective("share_out", pp, (n, 3), lambda x: np.split(x[0], len(x)), dict(stage=0)),
        Collective("from_last_stage", pp, (n, 3), lambda x: np.split(x[-1], len(x))),
    ]
    parts = dict(dim=0, axes=EXPERT_AXES)
    found.append(Collective("scatter_gradient", EXPERT_AXES, (n, 3), sum_and_split(0), parts))
    return {f"collective {one.name} over {'+'.join(one.axes)}": one for one in found}


def all_meshes(n):
    """Every shape (dp, pp, tp) of n devices, those first that spread them over the most axes."""
    shapes = [(dp, pp, n // dp // pp) for dp in plan.divisors(n) for pp in plan.divisors(n // dp)]
    return sorted(shapes, key=lambda shape: shape.count(1))


def widest_mesh(axes, n):
    """The shape of n devices that spreads them over the most of these axes, or else over the most of all."""
    own = [AXES.index(axis) for axis in axes]
    return max(all_meshes(n), key=lambda shape: sum(shape[axis] > 1 for axis in own))


def check_collective(collective, n):
    """Compare a collective and its gradient with numpy, in both types, of whole numbers, whose sums are exact."""
    shape = widest_mesh(collective.axes, n)
    own = [AXES.index(axis) for axis in collective.axes]
    size = math.prod(shape[axis] for axis in own)
    if size == 1:
        raise Skipped("a device alone exchanges nothing")
    run = on_devices(collective, shape)

    def in_groups(x):
        """[dp, pp, tp, ...] -> [groups, devices along the axes, ...]."""
        x = np.asarray(x, np.float64)
        x = np.moveaxis(x, own, range(3 - len(own), 3))
        return x.reshape(-1, size, *x.shape[3:])

    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (*shape, *collective.shape))
    right = [np.stack(collective.plain(group)) for group in in_groups(x)]
    for dtype in LIMITS:
        out, transpose = run(jnp.asarray(x, dtype))
        if not np.array_equal(right, in_groups(out)):
            raise Wrong(f"gives other numbers than numpy on mesh {shape} in {dtype}")
        if not collective.has_transpose:
            continue
        g = rng.integers(-4, 5, out.shape)
        [back] = transpose(jnp.asarray(g, dtype))
        forward = in_groups(g) * in_groups(out)
        backward = in_groups(back) * in_groups(x)
        if forward.sum() != backward.sum():  # which define it
            raise Wrong(f"has a wrong gradient on mesh {shape} in {dtype}")
    return f"equal on mesh {shape}"


def on_devices(collective, shape):
    """Function of [dp, pp, tp, ...], an array for each device of a mesh: (what each gets, the transpose or None)."""
    devices = jax.devices()[: math.prod(shape)]
    mesh = Mesh(steps.device_grid(shape, devices), AXES)

    def local(x):
        return collective(x[0, 0, 0])[None, None, None]

    lies = P(*AXES)
    run = jax.shard_map(local, mesh=mesh, in_specs=lies, out_specs=lies, check_vma=False)
    run = jax.jit(run)
    if collective.has_transpose:
        return lambda x: jax.vjp(run, x)
    return lambda x: (run(x), None)


# --- Models -------------------------------------------------------------------------------------------------------


def small_model(name, n, mesh=(1, 1, 1), **flags):
    """Validated Config of a preset, with two sequences a step for each of n devices; None where it does not fit."""
    flags |= dict(train_batch_size=2 * n, val_batch_size=2 * n, microbatches=1)
    one = utils.replace(preset(name), n_device_axis=(1, 1, 1), **flags)
    size = math.prod(mesh)
    return plan.fitted(one, size, n_device_axis=mesh, n_devices=size, microbatches=mesh[1])


def loss_and_gradients(cfg):
    """The loss of random tokens and the gradients of the first parameters, as one device has them."""
    mesh = steps.make_mesh(cfg)
    table = model.param_table(cfg)
    draw = partial(parameters.init_params, table)
    params = jax.jit(draw, out_shardings=parameters.shardings(table, mesh))(jax.random.key(0))
    tokens, targets = bench.random_batch(cfg, mesh)
    f = jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True)
    f = jax.jit(f, compiler_options=COMPILER.get(jax.default_backend()))
    (loss, _), gradients = f(params, tokens[0], targets[0], jax.random.key(0), jnp.int32(0))
    return jax.device_get((loss, gradients))


@cache
def plain_loss_and_gradients(name, n):
    """Those on one device, computed in the plainest way."""
    plain = dict(attention="xla", experts="auto", remat="none", fsdp="none")
    return loss_and_gradients(small_model(name, n, **plain))


def check_model(name, n, mesh):
    """Compare loss and gradients on a mesh with the plain ones of one device."""
    cfg = small_model(name, n, mesh)
    if not cfg:
        raise Skipped("the model cannot be spread so")
    with jax.default_matmul_precision("float32"):
        right = plain_loss_and_gradients(name, n)
        found = loss_and_gradients(cfg)
    # --pp_interleave makes two dims of that of the blocks
    found = jax.tree.map(lambda x, y: y.reshape(x.shape), right, found)
    return compare(right, found, LIMITS["float32"])


def check_resume(n, mesh):
    """Train on from a checkpoint and without it: the states must be equal to the last bit."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = small_model(MODELS[0], n, mesh, output_dir=folder, compilation_cache="")
        bench.prepare(cfg)
        mesh = steps.make_mesh(cfg)
        checkpoints = RunCheckpoints(cfg, mesh, make_optimizer(cfg, mesh)[0], "")
        bench.run_steps(2)
        checkpoints.save_running(2, 0, bench.compiled["state"], BadSteps(0))
        bench.run_steps(2)
        right = fingerprint(bench.compiled["state"])
        bench.compiled["state"], _ = checkpoints.restore_or_begin()
        checkpoints.close()
        bench.run_steps(2)
    if not np.array_equal(right, fingerprint(bench.compiled["state"])):
        raise Wrong("two steps after a checkpoint give other numbers than without it")
    return "equal to the last bit"
