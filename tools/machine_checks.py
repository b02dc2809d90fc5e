"""Checks of `tools/check_machine.py` that compare with a known answer: kernels, collectives, small models, resuming.

Each is a function that returns its result in words, or raises `Wrong` or `Skipped` with a sentence.
"""

import itertools
import math
import tempfile
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import architectures
import collectives
import model
import utils
from architectures import parameters
from architectures.layers import activate
from collectives import AXES, EXPERT_AXES
from config.batch import divisors
from config.presets import PRESETS, preset
from kernels import attention, grouped
from kernels import loss as losses
from planning.advice import with_flags
from tools import bench
from training.bad_steps import BadSteps
from training.checkpointing import fingerprint
from training.device_mesh import device_grid, make_mesh
from training.optimizer import make_optimizer
from training.run_checkpoints import RunCheckpoints

# largest difference that counts as rounding, as a share of the largest number
LIMITS = {"float32": 1e-4, "bfloat16": 2**-5, "float16": 2**-8}
# With its own settings XLA compiles some models for minutes: on a CPU it optimizes, on a GPU it measures tile sizes.
COMPILER = {"cpu": {"xla_backend_optimization_level": 0}, "gpu": {"xla_gpu_autotune_level": 0}}
# the small preset of each architecture that has one
MODELS = [f"{name}-tiny" for name in architectures.names() if f"{name}-tiny" in PRESETS]


class Wrong(Exception):
    """The machine computes wrong numbers."""


class Skipped(Exception):
    """The check cannot run on this machine."""


def compare(right, found, limit):
    """The largest difference between two trees of arrays, in words. Raises `Wrong` where an array differs by more than
    `limit`, as a share of its largest number."""
    furthest = 0.0
    for (path, x), y in zip(jax.tree.leaves_with_path(right), jax.tree.leaves(found), strict=True):
        x = np.asarray(x, np.float64)
        off = np.abs(x - y).max() / np.abs(x).max(initial=1e-30)
        if not off <= limit:  # true for NaN too
            name = jax.tree_util.keystr(path)
            raise Wrong(f"{name} is {off:.1e} of its largest number off, more than {limit:.1e}")
        furthest = max(furthest, off)
    return f"{furthest:.0e}"


def draw(*shape):
    """A random array whose rows have length 1 on average."""
    rng = np.random.default_rng(math.prod(shape))  # other numbers for other shapes
    return rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])


def check_kernel(kernel, plain, *inputs):
    """Compare outputs and gradients of a kernel with those of `plain` in float32: in each type, but on TPUs not in
    float16, in which no run begins there."""
    found = []
    for dtype, limit in LIMITS.items():
        if dtype == "float16" and jax.default_backend() == "tpu":
            continue
        rounded = [jnp.asarray(x, dtype) for x in inputs]
        right = with_gradients(plain, *(x.astype(jnp.float32) for x in rounded))
        difference = compare({dtype: right}, {dtype: with_gradients(kernel, *rounded)}, limit)
        found.append(f"{dtype} {difference}")
    return ", ".join(found)


def with_gradients(function, *inputs):
    """{"output": of a function, "gradients": of its inputs, for a fixed gradient of the output}."""

    @jax.jit
    def run(*inputs):
        out, transpose = jax.vjp(function, *inputs)
        g = jnp.cos(jnp.arange(out.size)).astype(jnp.bfloat16)
        return dict(output=out, gradients=transpose(g.reshape(out.shape).astype(out.dtype)))

    # the same rule as in runtime/jax_setup.py: set_precision
    precision = "float32" if inputs[0].dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        return run(*inputs)


def check_attention(name):
    """Compare an attention kernel with the plain one, on two documents."""
    kernel = attention.ATTENTION[name]
    platform = attention.platform_of(jax.devices()[0])
    if platform not in kernel.platforms:
        raise Skipped(f"it is for {' and '.join(kernel.platforms)}, this is {platform}")
    B, H, T = 2, 4, 256
    position = jnp.arange(T)[None]
    start = jnp.broadcast_to(jnp.where(position < 100, 0, 100), (B, T))  # two documents

    def run(attend, q, k, v):
        return attend(30 * q, k, v, position, start)

    # heads of moe1b's sizes, except that two heads of queries share those of keys and values
    inputs = draw(B, H, T, 192), draw(B, 2, T, 192), draw(B, 2, T, 64)
    return check_kernel(partial(run, kernel.function), partial(run, attention.attend), *inputs)


def check_loss():
    """Compare the kernel of the cross entropy with its formula."""
    V, rows, n = 300, 384, 100
    targets = np.arange(n) * 7 % V
    targets[::9] = -1  # no targets: these rows do not count

    def plain(x, embedding):
        likely = jax.nn.log_softmax(x @ embedding[:V].T)[jnp.arange(n), targets]
        return -jnp.where(targets >= 0, likely, 0).sum()

    def kernel(x, embedding):
        return losses.cross_entropy(x, embedding, targets, V, 20)

    return check_kernel(kernel, plain, 8 * draw(n, 64), draw(rows, 64))


def check_grouped():
    """Compare the kernel of grouped feed-forward layers with a product per row. One expert has no rows."""
    begins = grouped.group_begins(jnp.array([40, 0, 300]))
    expert = np.repeat(np.arange(3), np.diff(begins))

    def plain(rows, gates, up, down):
        h = activate(jnp.einsum("nd,ngdf->ngf", rows, up[expert]))
        return jnp.einsum("nf,ndf->nd", h * gates, down[expert])

    def kernel(*inputs):
        return grouped.grouped_feed_forward(activate, 113, True, *inputs, begins)

    inputs = draw(len(expert), 64), draw(len(expert), 1), draw(3, 2, 64, 96), draw(3, 64, 96)
    return check_kernel(kernel, plain, *inputs)


def list_collectives(n):
    """The collectives to check: {name in collectives.py: (axes, plain, *arguments)}. The others are made of these.

    axes: those along which n devices exchange arrays. plain: what the collective should do, as a function of the arrays
    of all devices, [n, 2 n, n, 3]. arguments: further arguments of the collective.
    """

    def gather(dim):
        return lambda x: [np.concatenate(x, dim)] * n

    def scatter(dim):
        return lambda x: np.split(x.sum(0), n, dim)

    dp, pp, tp = ("dp",), ("pp",), ("tp",)
    return dict(
        all_gather=(AXES, gather(1), AXES, 1),
        reduce_scatter=(AXES, scatter(1), AXES, 1),
        sum_over=(AXES, lambda x: [x.sum(0)] * n, AXES),
        largest=(AXES, lambda x: [x.max(0)] * n, AXES),
        scatter_gradient=(EXPERT_AXES, scatter(0), 0, EXPERT_AXES),
        gather_tokens=(EXPERT_AXES, gather(0), 2 * n),
        scatter_tokens=(EXPERT_AXES, scatter(0), 2 * n),
        to_experts=(EXPERT_AXES, lambda x: np.split(x.swapaxes(0, 1), n)),
        from_experts=(EXPERT_AXES, lambda x: x),  # applied after to_experts, which it undoes
        exchange_heads=(tp, lambda x: np.split(np.concatenate(x)[None], n, 2), True),
        to_owners=(dp, lambda x: np.split(np.concatenate(x, 1), n), dp, (), (), 1),
        from_owners=(dp, lambda x: np.split(np.concatenate(x), n, 1), dp, (), (), 1),
        next_stage=(pp, lambda x: np.roll(x, 1, 0)),
        to_stages=(pp, gather(0)),
        share_out=(pp, lambda x: np.split(x[0], n), 0),
        from_last_stage=(pp, lambda x: np.split(x[-1], n)),
    )


def all_meshes(n):
    """Every mesh shape (dp, pp, tp) of n devices, those with the most axes longer than 1 first."""
    lengths = itertools.product(divisors(n), repeat=3)
    shapes = [shape for shape in lengths if math.prod(shape) == n]
    return sorted(shapes, key=lambda shape: shape.count(1))


def check_collective(name, n):
    """Compare a collective among n devices, and its gradient, with numpy. The numbers are integers, whose sums are
    exact."""
    if n == 1:
        raise Skipped("a single device exchanges nothing")
    axes, plain, *arguments = list_collectives(n)[name]
    along = [AXES.index(axis) for axis in axes]
    shape = next(mesh for mesh in all_meshes(n) if math.prod(mesh[axis] for axis in along) == n)
    mesh = Mesh(device_grid(shape, jax.devices()[:n]), AXES)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    def run(x):
        if name != "exchange_heads":  # that one expects the four dims
            x = x[0]
        if name == "from_experts":
            x = collectives.to_experts(x)
        return getattr(collectives, name)(x, *arguments)[None]

    draw = np.random.default_rng(0).integers
    x = draw(-4, 5, (n, 2 * n, n, 3)).astype(np.float32)
    out = np.asarray(run(x))
    if not np.array_equal(np.stack(plain(x)), out):
        raise Wrong(f"gives other numbers than numpy on mesh {shape}")
    if name not in ("largest", "to_stages"):  # of integers; of which the first stage's alone count
        g = draw(-4, 5, out.shape).astype(np.float32)
        [back] = jax.vjp(run, x)[1](g)
        # the definition of a transpose
        if np.sum(g * out, dtype=float) != np.sum(back * x, dtype=float):
            raise Wrong(f"has a wrong gradient on mesh {shape}")
    return f"equal on mesh {shape}"


def small_model(name, n, mesh=(1, 1, 1), **flags):
    """The validated Config of a preset with two sequences per step for each of n devices; None where the mesh cannot
    divide the model."""
    flags |= dict(global_batch_size=2 * n)
    one = utils.replace(preset(name), n_device_axis=(1, 1, 1), **flags)
    size = math.prod(mesh)
    return with_flags(one, size, n_device_axis=mesh, n_devices=size, microbatches=mesh[1])


@cache
def loss_and_gradients(cfg):
    """(loss, gradients) of a model with its initial parameters and random tokens, as arrays on the host."""
    mesh = make_mesh(cfg)
    table = model.param_table(cfg)
    draw = partial(parameters.init_params, table)
    params = jax.jit(draw, out_shardings=parameters.shardings(table, mesh))(jax.random.key(0))
    tokens, targets = bench.random_batch(cfg, mesh)
    f = jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True)
    f = jax.jit(f, compiler_options=COMPILER.get(jax.default_backend()))
    (loss, _), gradients = f(params, tokens[0], targets[0], jax.random.key(0), jnp.int32(0))
    return jax.device_get((loss, gradients))


def check_model(name, n, mesh):
    """Compare loss and gradients on a mesh with those of one device without kernels, recomputation and fsdp."""
    cfg = small_model(name, n, mesh)
    if not cfg:
        raise Skipped("the model cannot be spread so")
    with jax.default_matmul_precision("float32"):
        plain = dict(attention="xla", experts="auto", remat="none", fsdp="none")
        right = loss_and_gradients(small_model(name, n, **plain))
        found = loss_and_gradients(cfg)
    # --pp_interleave divides the dim of the blocks into two
    found = jax.tree.map(lambda x, y: y.reshape(x.shape), right, found)
    return compare(right, found, LIMITS["float32"])


def check_resume(n, mesh):
    """Train two steps with and without restoring a checkpoint first: the states must be equal to the last bit."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = small_model(MODELS[0], n, mesh, output_dir=folder, compilation_cache="")
        compiled = bench.CompiledStep(cfg)
        mesh = make_mesh(cfg)
        checkpoints = RunCheckpoints(cfg, mesh, make_optimizer(cfg, mesh), "")
        compiled.run(2)
        checkpoints.save_running(2, 0, compiled.state, BadSteps(0))
        compiled.run(2)
        right = fingerprint(compiled.state)
        compiled.state, _ = checkpoints.restore_or_init()
        checkpoints.close()
        compiled.run(2)
    if not np.array_equal(right, fingerprint(compiled.state)):
        raise Wrong("two steps after a checkpoint give other numbers than without it")
    return "equal to the last bit"
