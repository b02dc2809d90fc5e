"""The attention kernel for GPUs: interpreted on the CPU against plain attention, and compiled for GPUs that are not
here."""

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SMALL_QWEN3
from helpers import gpu_compiler
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_helpers import DOCUMENTS, assert_same, furthest, loss_and_gradients

import utils
from config import presets
from kernels import attention, flash
from planning import gpus


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels as plain operations, as a CPU can run them."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    allowed = attention.ATTENTION["flash"]._replace(platforms=("cpu",))
    monkeypatch.setitem(attention.ATTENTION, "flash", allowed)


# B, H, T, K, V: widths that are no powers of two, or no multiples of what the kernel multiplies, from one channel to
# all 320 that it takes; one block, many blocks of 128 queries, and odd multiples of 64
SHAPES = [(1, 1, 64, 16, 16), (2, 1, 64, 5, 7), (1, 5, 128, 48, 32), (3, 2, 128, 192, 64)]
SHAPES += [(2, 3, 192, 8, 100), (1, 2, 256, 192, 128), (1, 1, 320, 96, 64), (1, 1, 64, 1, 1)]
SHAPES += [(2, 1, 64, 33, 65), (1, 2, 128, 3, 255), (1, 1, 192, 300, 20), (1, 1, 384, 24, 12)]


def inputs(shape, dtype, seed=0):
    """Scaled queries, keys, values and the gradient of the output."""
    B, H, T, K, V = shape
    rng = np.random.default_rng(seed)
    q, k, v, g = (rng.standard_normal((B, H, T, n)) for n in (K, K, V, V))
    return [jnp.asarray(a, dtype) for a in (q * K**-0.5, k, v, g)]


def document_starts(B, T, seed=0):
    """`start` [B, T] of documents that begin anywhere, some of them with one token."""
    begins = np.random.default_rng(seed).random((B, T)) < 0.05
    starts = np.maximum.accumulate(np.where(begins, np.arange(T), 0), 1)
    return jnp.asarray(starts, jnp.int32)


def output_and_gradients(kernel, q, k, v, g, start):
    """Of a kernel of `attention.ATTENTION`: the output, and what g makes of q, k and v."""
    function = attention.ATTENTION[kernel].function
    position = jnp.arange(q.shape[2])[None]

    @jax.jit
    def run(q, k, v):
        out, transpose = jax.vjp(lambda q, k, v: function(q, k, v, position, start), q, k, v)
        return out, *transpose(g.astype(out.dtype))

    return [np.float32(a) for a in run(q, k, v)]


def assert_rounded(exact, rounded, digits):
    """Arrays agree but for rounding to that many binary digits."""
    assert furthest(exact, rounded)[0] < 2 ** (1 - digits)
    for a, b in zip(exact, rounded):
        assert np.square(a - b).mean() < 4**-digits * np.square(a).mean()


@pytest.mark.parametrize(
    "shape, documents", [(s, True) for s in SHAPES] + [(s, False) for s in SHAPES[::3]]
)
def test_output_and_gradients_equal_those_of_xla(shape, documents, interpreted):
    start = document_starts(shape[0], shape[2]) if documents else None
    short = inputs(shape, jnp.bfloat16)
    long = [a.astype(jnp.float32) for a in short]
    exact = output_and_gradients("xla", *long, start)
    assert furthest(exact, output_and_gradients("flash", *long, start))[0] < 1e-5
    assert_rounded(exact, output_and_gradients("flash", *short, start), 8)


@pytest.mark.parametrize("kernel", ["xla", "blockwise", "flash"])
@pytest.mark.parametrize("dtype, digits", [("bfloat16", 7), ("float16", 10)])
def test_kernels_in_short_types_lose_one_of_their_digits(kernel, dtype, digits, interpreted):
    shape = (2, 3, 128, 48, 32)
    start, short = document_starts(2, 128), inputs(shape, dtype)
    exact = output_and_gradients("xla", *(a.astype(jnp.float32) for a in short), start)
    assert_rounded(exact, output_and_gradients(kernel, *short, start), digits)


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ((2, 2, 1), dict(blocks=2, layers_per_block=1, remat="attention")),
        ((1, 1, 2), dict(SMALL_QWEN3, blocks=1, remat="none")),
    ],
)
def test_loss_and_gradients_of_a_model(mesh, flags, interpreted):
    flags = dict(flags, **DOCUMENTS, T=64, sequences=8)
    plain, ours = (loss_and_gradients(mesh, attention=name, **flags) for name in ("xla", "flash"))
    assert_same(plain, ours, 1e-5)


def blocks_computed(T, blocks, start, ends):
    """(for queries, for keys): how many blocks of scores the kernels compute."""

    def count(block, n, masked):
        return n + 1

    with jax.disable_jit():
        firsts = range(0, T, flash.OWN)
        by_queries = [flash.over_keys(count, 0, first, start, blocks) for first in firsts]
        documents = start is not None
        by_keys = [
            flash.over_queries(count, 0, first, end, blocks, documents)
            for first, end in zip(firsts, ends)
        ]
    return sum(by_queries), sum(by_keys)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("T", [64, 128, 192, 640])
def test_kernels_compute_the_scores_that_the_plan_counts(T, dtype):
    cfg = utils.replace(presets.preset("tiny"), T=T, model_dtype=dtype)
    wanted = attention.ATTENTION["flash"].score_share(cfg.model) * T * T
    for blocks in flash.block_sizes(flash.MOST, dtype):
        for n in blocks_computed(T, blocks, None, [T] * T):
            assert n * flash.OWN * blocks.walked == wanted


def test_kernels_compute_the_products_that_the_plan_counts(interpreted, monkeypatch):
    """Over the 16 channels of keys and the 256 of values, in each of a kernel's two loops."""
    call, product, seen = flash.call, flash.product, {}

    def noted(kernel, *arguments):
        seen[kernel.__name__] = []
        return call(kernel, *arguments)

    def counted(a, b):
        *_, latest = seen.values()
        latest.append(16 in a.shape + b.shape)
        return product(a, b)

    monkeypatch.setattr(flash, "call", noted)
    monkeypatch.setattr(flash, "product", counted)
    output_and_gradients("flash", *inputs((1, 1, 64, 16, 256), jnp.bfloat16), None)
    for name, (of_keys, of_values) in attention.ATTENTION["flash"].products.items():
        assert (seen[name].count(True), seen[name].count(False)) == (2 * of_keys, 2 * of_values)


def test_documents_leave_out_blocks_that_none_sees():
    """Two documents of half a sequence: each costs what a sequence of its length costs."""
    T, blocks = 512, flash.Blocks(32)
    start = jnp.where(jnp.arange(T) < T // 2, 0, T // 2)
    ends = flash.last_queries(start[None])[0]
    half, _ = blocks_computed(T // 2, blocks, None, [T] * T)
    assert blocks_computed(T, blocks, start, ends) == (2 * half, 2 * half)


def head_shapes():
    """(K, V, dtype) of every attention of the presets."""
    shapes = set()
    for m in [presets.preset(name).model for name in presets.PRESETS]:
        for rope in (m.rope_dim, m.rope_dim * m.moe_rope):
            shapes.add((m.key_dim + rope, m.key_dim, m.model_dtype))
    return sorted(shapes)


def summed(q, k, v, start):
    return flash.flash_attention(q, k, v, None, start).astype(jnp.float32).sum()


def compiled_for(kind, K, V, dtype, **options):
    """The program of a GPU for the gradients, inside a shard_map as model.py has it."""
    mesh, gradients = Mesh(np.array(gpus.devices(kind, 1, 1)), ("x",)), jax.grad(summed, (0, 1, 2))
    place = dict(sharding=NamedSharding(mesh, P()))
    arrays = [jax.ShapeDtypeStruct((2, 3, 1024, n), dtype, **place) for n in (K, K, V)]
    arrays.append(jax.ShapeDtypeStruct((2, 1024), jnp.int32, **place))
    whole = jax.shard_map(gradients, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    options |= dict(xla_backend_optimization_level=3)  # as programs have it
    return jax.jit(whole).lower(*arrays).compile(options).as_text()


@gpu_compiler
@pytest.mark.parametrize(
    "shape, kind",
    [
        *itertools.product(head_shapes(), ["A100", "H100"]),
        ((192, 128, "bfloat16"), "B200"),
        ((192, 128, "float16"), "A100"),
    ],
)
def test_heads_of_all_presets_compile(shape, kind):
    assert compiled_for(kind, *shape).count("xla.gpu.triton") == 3


@gpu_compiler
@pytest.mark.parametrize("shape", [shape for shape in head_shapes() if shape[-1] == "bfloat16"])
def test_products_overlap_on_hopper(shape, tmp_path):
    """The assembler tells where it makes every product wait for the one before, and what it keeps outside registers."""
    # newer jax writes the kernels only of the emitters asked for
    compiled_for("H100", *shape, xla_dump_to=str(tmp_path), xla_dump_emitter_re=".*")
    kernels = [path for path in tmp_path.glob("*.ptx") if "entry flash" in path.read_text()]
    assert len(kernels) == 3
    for path in kernels:
        assert "wgmma.mma_async" in path.read_text()
        command = [assembler(), "-v", "--gpu-name", "sm_90a", path, "-o", tmp_path / "out"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        assert "serialized" not in report
        spilled = re.search(r"(\d+) bytes spill stores", report)[1]
        assert int(spilled) <= 64  # of each thread, which has 1,020 in registers


def assembler():
    """NVIDIA's, of the installed packages or of the machine."""
    packages = importlib.util.find_spec("nvidia")
    folders = packages.submodule_search_locations if packages else []
    found = [path for folder in folders for path in Path(folder).glob("*/bin/ptxas")]
    return found[0] if found else shutil.which("ptxas")
