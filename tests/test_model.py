"""Parts of the model, and properties that any right implementation has. (The whole of it: tests/test_plain.py.)"""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ARCHITECTURES
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import PartitionSpec as P
from mesh_helpers import batch_of, furthest, make_params, steps_of
from small_models import small_config

import model
import plain_model
import utils
from architectures import architecture, deepseek, experts, layers, qwen3
from config import presets, settle
from inference import decoding
from kernels import attention, grouped, loss, xla_cpu
from training.device_mesh import make_mesh
from training.evaluation import make_evaluate
from training.optimizer import make_optimizer
from training.train_state import TrainState, abstract_params
from training.train_step import accumulate_gradient, as_row


def on_mesh(cfg, f, in_specs, out_specs):
    specs = dict(in_specs=in_specs, out_specs=out_specs)
    return jax.jit(jax.shard_map(f, mesh=make_mesh(cfg), check_vma=False, **specs))


def decoder(cfg):
    """(`decode` of cfg, parameters, an empty cache of B sequences of 16 tokens)."""
    mesh = make_mesh(cfg)
    decode = jax.jit(decoding.make_decode(cfg, mesh))
    return decode, make_params(cfg, mesh), lambda B: decoding.empty_cache(cfg, B, 16)


def raised_params(cfg):
    """Parameters of which no two are alike, as biases are at first, the same on any mesh."""
    rng = np.random.default_rng(0)

    def raise_one(x):
        noise = 0.02 + 0.01 * rng.standard_normal(x.shape)
        return jax.device_put(np.float32(x + noise), x.sharding)

    return jax.tree.map(raise_one, make_params(cfg, make_mesh(cfg)))


@pytest.mark.parametrize("kernel", ["blockwise", "splash"])  # flash: tests/test_flash.py
@pytest.mark.parametrize("documents", [False, True])
def test_attention_kernels_agree(kernel, documents, monkeypatch):
    """Outputs and gradients, for keys wider than values that two queries share; the TPU's kernel is interpreted."""
    make = "make_splash_mha_single_device"
    interpreted = functools.partial(getattr(splash_attention_kernel, make), interpret=True)
    monkeypatch.setattr(splash_attention_kernel, make, interpreted)
    B, T, rng = 2, 256, np.random.default_rng(0)
    shapes = [(B, 4, T, 24), (B, 2, T, 24), (B, 2, T, 16)]
    qkv = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    position = jnp.arange(T)[None]
    start = jnp.where(position < 100, 0, 100) * jnp.ones((B, 1), jnp.int32) if documents else None
    found = []
    for name in (kernel, "xla"):
        attend = attention.ATTENTION[name].function
        out, transpose = jax.vjp(jax.jit(lambda *qkv: attend(*qkv, position, start)), *qkv)
        found.append([out, *transpose(jnp.sin(out))])
    for ours, theirs in zip(*found):
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_auto_takes_the_fastest_kernel_that_runs():
    def choice(platform, **flags):
        return attention.choose_kernel(small_config(attention="auto", **flags).model, platform)

    assert choice("tpu", T=1024) == "splash"
    assert choice("tpu", T=1000) == "blockwise"  # splash: multiples of 128
    assert choice("gpu", T=1024) == "flash"
    assert choice("gpu", T=1000) == choice("gpu", T=1024, head_dim=160) == "blockwise"
    assert choice("other gpu", T=1024) == choice("cpu", T=1024) == "blockwise"
    m = small_config(attention="xla").model
    assert attention.choose_kernel(m, "tpu") == "xla"
    # a T4; an RTX 4090, whose blocks have 99 KB of shared memory; an MI300
    others = dict.fromkeys(["7.5", "8.9", "gfx942"], "other gpu")
    for capability, wanted in ({"8.0": "gpu", "9.0": "gpu"} | others).items():
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        assert attention.platform_of(device) == wanted


def test_shares_of_scores_that_kernels_compute():
    """With 2, 16, 8 and 1 blocks of queries."""
    m = small_config(T=1024, attention="auto").model  # float32, of which flash takes small blocks
    for name, share in dict(splash=3 / 4, flash=17 / 32, blockwise=9 / 16, xla=1).items():
        assert attention.ATTENTION[name].score_share(m) == share


@pytest.mark.parametrize("capacity_factor, k", [(1.0, 2), (1.25, 1)])
def test_choices_beyond_the_capacity_are_dropped(capacity_factor, k, monkeypatch):
    """The rest is what the plain model computes; the first choices of all tokens come before any second one."""
    flags = dict(capacity_factor=capacity_factor, experts_per_token=k, n_shared=0)
    cfg = small_config(experts="buckets", layers_per_block=1, **flags)
    m, rng = cfg.model, np.random.default_rng(0)
    p = plain_model.select(raised_params(cfg)["moe"], 0)
    p = p | {"router": rng.standard_normal(p["router"].shape, np.float32)}
    x = rng.standard_normal((2, 16, m.model_dimension), np.float32)
    router = deepseek.sigmoid_router
    route = on_mesh(cfg, lambda x: experts.routed_experts(p, x, m, True, router), (P(),), P())
    out, stats = route(x)

    scores, chosen, gates = map(np.array, plain_model.route(p, x, m))
    wanted = np.where(chosen, scores + p["bias"], -np.inf)
    choices = np.argsort(-wanted, -1)[..., :k].reshape(32, k)  # each token's best expert first
    gate_of = gates.reshape(32, -1)  # a view: what is dropped loses its gate
    queued = np.zeros(m.n_experts)
    for token, expert in zip(np.tile(np.arange(32), k), choices.T.flat):
        queued[expert] += 1
        if queued[expert] > math.ceil(capacity_factor * 32 * k / m.n_experts):
            gate_of[token, expert] = 0
    monkeypatch.setattr(plain_model, "route", lambda *_: (scores, chosen, gates))
    theirs, *_ = plain_model.mixture_of_experts(p, x, m)
    assert np.abs(out - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert stats.dropped == 32 * k - (gates > 0).sum() > 0


def choices_with_a_queue(longest, n, E):
    """Two experts for each of n tokens, [n, 2]: expert 0 for the first `longest` tokens, others as evenly as can be."""
    chosen = np.zeros((n, 2), int)
    is_other = np.ones((n, 2), bool)
    is_other[:longest, 0] = False
    chosen[is_other] = 1 + np.arange(2 * n - longest) % (E - 1)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    return chosen


@pytest.mark.parametrize("longest, size", [(32, 0), (36, 1), (37, 2), (48, 3), (49, 4), (100, 4)])
def test_a_single_device_takes_the_smallest_buckets_that_hold_all(longest, size):
    """The mean load is 32, and buckets have 34, 36, 40 or 48 slots. Output and gradients are those of plain products
    whichever are taken, and where none are large enough."""
    cfg = small_config(layers_per_block=1)
    m, n, rng = cfg.model, 128, np.random.default_rng(0)
    D, E, F = m.model_dimension, m.n_experts, m.expert_width
    shapes = [(E, 2, D, F), (E, D, F), (n, D), (n, 2), (n, D)]
    up, down, x, gates, weight = [rng.standard_normal(shape, np.float32) for shape in shapes]
    chosen = choices_with_a_queue(longest, n, E)

    sizes = experts.first_capacities(m, n, 1)
    functions = [lambda number=number: number for number in range(len(sizes) + 1)]
    queues = experts.queue(chosen, E)
    assert queues.length.max() == longest
    assert experts.for_longest_queue(sizes, queues, functions) == size

    def in_buckets(up, down, x, gates):
        out, dropped = experts.in_buckets(dict(up=up, down=down), x, chosen, gates, m)
        return (out * weight).sum(), dropped

    def plainly(up, down, x, gates):
        h = layers.activate(jnp.einsum("nd,nkgdf->nkgf", x, up[chosen]))
        return (jnp.einsum("nk,nkf,nkdf->nd", gates, h, down[chosen]) * weight).sum()

    operands, places = (up, down, x, gates), (0, 1, 2, 3)
    ours = jax.value_and_grad(in_buckets, places, has_aux=True)
    (out, dropped), gradients = on_mesh(cfg, ours, (P(),) * 4, P())(*operands)
    theirs = jax.value_and_grad(plainly, places)(*operands)
    assert dropped == 0 and furthest(theirs, (out, gradients))[0] < 1e-5


@pytest.mark.parametrize("branches", [1, 2])
def test_an_activation_of_bfloat16_is_rounded_once(branches):
    """That of float32 numbers, and its gradient, rounded to bfloat16."""
    h, g = jax.random.normal(jax.random.key(0), (2, 64, branches, 32), jnp.bfloat16)

    def with_gradient(h, g):
        out, transpose = jax.vjp(layers.activate, h)
        return out, *transpose(g[:, 0])

    ours = jax.jit(with_gradient)(h, g)
    exact = jax.jit(with_gradient)(h.astype(jnp.float32), g.astype(jnp.float32))
    for got, want in zip(ours, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        assert jnp.allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("counts", [[0, 5, 850, 512, 0, 1100, 70], [130]], ids=str)
def test_grouped_products_equal_a_product_for_each_row(branches, counts):
    """Forward and every gradient, with experts that have no rows, a small tile, large ones, and both; and with an
    expert whose only tile is the largest of few rows."""
    counts, D, F = np.array(counts), 8, 12
    begins = grouped.group_begins(jnp.array(counts))
    size = grouped.row_space(counts.sum(), len(counts))
    owner = np.full(size, -1)
    for expert, count in enumerate(counts):
        owner[int(begins[expert]) : int(begins[expert]) + count] = expert
    there = (owner >= 0)[:, None]

    rng = np.random.default_rng(0)
    rows = there * rng.standard_normal((size, D))
    gates = there * rng.random((size, 1))
    up = rng.standard_normal((len(counts), branches, D, F)) / D**0.5
    down = rng.standard_normal((len(counts), D, F)) / F**0.5
    operands = [jnp.float32(a) for a in (rows, gates, up, down)]
    d_out = jnp.float32(there * rng.standard_normal((size, D)))

    def each_row(rows, gates, up, down):
        h = layers.activate(jnp.einsum("nd,ngdf->ngf", rows, up[owner])) * gates
        return jnp.einsum("nf,ndf->nd", h, down[owner])

    def in_tiles(keep, *operands):
        return grouped.grouped_feed_forward(layers.activate, 512, keep, *operands, begins)

    out, transpose = jax.vjp(each_row, *operands)
    for keep in (False, True):
        ours = jax.vjp(functools.partial(in_tiles, keep), *operands)
        assert np.abs(out - ours[0]).max() < 1e-5
        assert furthest(transpose(d_out), ours[1](d_out))[0] < 1e-5


@pytest.mark.parametrize(
    "spec, shape",
    [("epcf,epcd->efd", (2, 3, 5, 4)), ("nbhtv,btd->nhvd", (2, 3, 4, 5, 6)), ("vd,vn->dn", (5, 4))],
)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_a_product_with_its_operand_laid_out_is_the_product(spec, shape, dtype):
    """Of bfloat16, and in float32 where that is asked for."""
    sizes = dict(d=7, n=3) | dict(zip(spec.split(",")[0], shape))
    rng = np.random.default_rng(0)
    operands = [
        rng.standard_normal([sizes[dim] for dim in dims]).astype(jnp.bfloat16)
        for dims in spec.split("->")[0].split(",")
    ]
    ours = jax.jit(functools.partial(xla_cpu.einsum_laid_out, spec, dtype=dtype))(*operands)
    exact = np.einsum(spec, *[np.float64(operand) for operand in operands])
    assert ours.dtype == (dtype or jnp.bfloat16)
    rounding = 1e-5 if dtype else 2**-7
    assert np.allclose(ours.astype(np.float32), exact, rtol=rounding, atol=rounding)


def test_what_is_measured_of_routers_is_logged_for_each_layer_alike_on_every_mesh(monkeypatch):
    """One line in `measure`; mesh, rounds, microbatches and accumulation do not show."""
    load_alone = experts.measure

    def measure(scores, chosen):
        shares = scores / scores.sum(-1, keepdims=True)
        entropy = jax.scipy.special.entr(shares).sum(-1)
        return load_alone(scores, chosen) | dict(patched_entropy=entropy)

    monkeypatch.setattr(experts, "measure", measure)
    logged = []
    cut = dict(pp_interleave=2, microbatches=2, accumulation_steps=2, sequences=16)
    for mesh, flags in [((1, 1, 1), {}), ((2, 2, 2), cut)]:
        cfg = small_config(mesh, **dict(blocks=4, layers_per_block=1) | flags)
        _, [metrics] = steps_of(cfg, [0])
        logged.append(as_row(metrics))
    one, eight = logged
    values = [one[f"router/patched_entropy_{layer}"] for layer in range(4)]
    assert 0 < min(values) < max(values) < math.log(cfg.model.n_experts)
    for name, value in one.items():
        assert eight[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_router_biases_move_towards_an_even_load():
    """In one step, in which nothing else moves."""
    flags = dict(blocks=1, layers_per_block=1, bias_update_rate=5e-3, sequences=8)
    cfg = small_config(max_lr=0.0, end_lr=0.0, optimizer="adamw", **flags)
    mesh = make_mesh(cfg)
    batch = (part[0] for part in batch_of(cfg, mesh))
    compute = jax.jit(model.make_loss(cfg, mesh, train=True))
    _, seen = compute(make_params(cfg, mesh), *batch, jax.random.key(0), 0)
    after, load = steps_of(cfg, [0])[0].params, np.asarray(seen.measured["load"])
    assert load.std() > 0
    assert np.allclose(after["moe"]["bias"], 5e-3 * np.sign(load.mean(-1, keepdims=True) - load))


@pytest.mark.parametrize("n_batches", [1, 3, 5, 7])
def test_whole_counts_decide_where_router_biases_move(n_batches):
    """However many batches a step is cut into, an expert at exactly the mean stays where it is."""
    cfg, layers = small_config(bias_update_rate=5e-3), 300
    E, k, tokens = cfg.model.n_experts, cfg.model.experts_per_token, np.zeros((n_batches, 1, 4, 32))
    tokens += np.arange(n_batches)[:, None, None, None]
    choices = tokens[0].size * k
    rng = np.random.default_rng(0)
    counts = rng.multinomial(choices, np.full(E, 1 / E), (n_batches, layers)).astype(np.float32)

    def gradient(params, tokens, *_):
        load = jnp.asarray(counts)[tokens[0, 0, 0]]
        return (jnp.float32(0), model.Metrics(*jnp.zeros(3), dict(load=load))), params

    params, key = {"moe": {"bias": jnp.zeros((layers, E))}}, jax.random.key_data(jax.random.key(0))
    state, tokens = TrainState(params, None, jnp.int32(0), key), tokens.astype(np.int32)
    (_, seen), _ = jax.jit(functools.partial(accumulate_gradient, gradient))(state, tokens, tokens)
    after = deepseek.update_router_bias(cfg, params, seen.measured["load"], tokens.size)["moe"][
        "bias"
    ]
    total, mean = counts.sum(0), n_batches * choices // E
    assert (total == mean).sum() > 20
    assert np.allclose(after, 5e-3 * np.sign(mean - total))


@pytest.mark.parametrize("name", ["deepseek", "qwen3"])
def test_the_router_of_one_expert_for_each_token_learns_from_the_loss(name):
    """Without a balance loss its gradient is no rounding: it is of the size of the experts'."""
    flags = dict(experts_per_token=1, n_shared=0, balance_weight=0.0, blocks=1, layers_per_block=1)
    cfg = small_config(sequences=8, **ARCHITECTURES[name] | flags)
    mesh = make_mesh(cfg)
    batch = (part[0] for part in batch_of(cfg, mesh))
    compute = jax.jit(jax.grad(model.make_loss(cfg, mesh, train=True), has_aux=True))
    gradients, _ = compute(raised_params(cfg), *batch, jax.random.key(0), 0)
    layer = gradients[{"deepseek": "moe"}.get(name, name)]
    assert jnp.abs(layer["router"]).max() > 1e-2 * jnp.abs(layer["experts"]["down"]).max()


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_layers_in_a_loop_compute_what_they_do_one_after_another(remat, monkeypatch):
    found = []
    for most in (1, 6):
        monkeypatch.setitem(utils.UNROLLED, "cpu", most)
        cfg = small_config(
            sequences=8,
            blocks=3,
            layers_per_block=2,
            microbatches=1,
            remat=remat,
            experts="buckets",
        )
        assert cfg.has_loop("cpu") == (most < 6)
        tokens, targets = batch_of(cfg, make_mesh(cfg))
        compute = jax.jit(
            jax.value_and_grad(model.make_loss(cfg, make_mesh(cfg), True), has_aux=True)
        )
        found.append(compute(raised_params(cfg), tokens[0], targets[0], jax.random.key(7), 0))
    assert furthest(*found)[0] < 1e-5


@pytest.mark.parametrize("size", [1, 40], ids=["usual", "targets of no probability"])
def test_cross_entropy_and_its_gradient(size):
    """In chunks, against the plain formula; the padding of the vocabulary has no probability. Of large logits some are
    beyond float32's range above their target's."""
    rng = np.random.default_rng(0)
    x, table = (jnp.float32(rng.standard_normal((n, 8))) for n in (24, 128))
    x *= size
    targets = rng.integers(0, 100, 24)

    def plain(x, table):
        return -jax.nn.log_softmax(x @ table[:100].T)[jnp.arange(24), targets].sum()

    def chunked(x, table):
        return loss.cross_entropy(x, table, targets, 100, 7)  # in chunks of 6, which divides 24

    logits = x @ table[:100].T
    assert (size > 1) == (logits.max(1) - logits[jnp.arange(24), targets] > 89).any()
    tripled = jax.value_and_grad(lambda *a: 3 * chunked(*a), (0, 1))
    value, gradients = tripled(x, table)  # the forward pass of training
    assert np.allclose(value, 3 * plain(x, table), rtol=1e-5)
    assert np.allclose(chunked(x, table), plain(x, table), rtol=1e-5)
    for ours, theirs in zip(gradients, jax.grad(plain, (0, 1))(x, table)):
        assert np.allclose(ours, 3 * theirs, atol=1e-4 * size)


def test_the_gradient_of_the_loss_in_float16_keeps_unlikely_tokens_and_sums_many():
    """Probabilities that float16 rounds to 0, and a sum over tokens that is beyond it."""
    rng, n = np.random.default_rng(0), 16384
    x = np.float16(np.abs(rng.standard_normal((n, 8))) + 8)
    table = np.float16(0.02 * rng.standard_normal((128, 8)))
    table[:20] -= 0.21
    targets = np.full(n, 50)
    likely = jax.nn.softmax(np.float32(x) @ np.float32(table).T)
    assert likely[:, :20].max() < 2.0**-25

    def gradients(dtype, scale):
        def mean(x, table):
            return scale / n * loss.cross_entropy(x, table, targets, 128, 2048)

        found = jax.jit(jax.grad(mean, (0, 1)))(x.astype(dtype), table.astype(dtype))
        return [np.float32(g) / scale for g in found]

    exact = gradients(np.float32, 1.0)
    assert n * np.abs(exact[1]).max() > np.finfo(np.float16).max
    for right, found in zip(exact, gradients(np.float16, 2.0**12)):
        off = np.abs(found - right).max(1) / np.abs(right).max(1)
        assert off.max() < 2**-8


def test_a_batch_of_more_choices_than_int32_counts():
    cfg = small_config()
    shape = 1, 2**25, 32  # 2**30 tokens, each of which makes two choices in every block
    stats = experts.no_routing(cfg.model, 4)._replace(dropped=jnp.float32(2**32))
    reduce = functools.partial(model.reduce_loss, cfg, shape, jnp.float32(0), stats)
    _, seen = on_mesh(cfg, reduce, (), P())()
    choices = 2**30 * cfg.model.experts_per_token * cfg.model.blocks
    assert seen.dropped == 2**32 / choices


def test_embedding_lr_multiplies_the_steps_of_the_embedding_alone():
    found = []
    for embedding_lr in (1.0, 3.0):
        flags = dict(embedding_lr=embedding_lr, optimizer="adamw")
        cfg = small_config(**ARCHITECTURES["gpt2"] | flags)
        mesh = make_mesh(cfg)
        optimizer = make_optimizer(cfg, mesh)
        params = make_params(cfg, mesh)
        update = jax.jit(optimizer.update)
        found.append(update(params, optimizer.init(params), params, rate=0.1)[0])  # as gradients
    one, three = found
    assert furthest(one | {"embedding": 3 * one["embedding"]}, three)[0] < 1e-6


def test_one_batch_overfits():
    schedule = dict(max_lr=1e-2, end_lr=1e-3, warmup_steps=10, end_steps=100)
    small = dict(sequences=8, T=16, blocks=1, layers_per_block=2)
    cfg = small_config(bias_update_rate=1e-2, **small, **schedule)
    _, metrics = steps_of(cfg, [0] * 100)
    assert metrics[-1]["loss/train_cross_entropy_loss"] < 0.1


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_the_embedding_sums_a_token_s_terms_in_float32(
    platform, dtype, monkeypatch
):
    """A GPU sums them sorted, since its scatter-adds round in another way each time; no row where no token was."""
    monkeypatch.setattr(layers, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.3, (4, 500)) % 300  # half of them are a few tokens
    g = jnp.asarray(rng.standard_normal((4, 500, 8)), dtype)
    table = jnp.zeros((320, 8), dtype)
    _, pull = jax.vjp(lambda table: layers.rows_of(table, ids), table)
    right = np.zeros((320, 8))
    np.add.at(right, ids, np.asarray(g, np.float64))
    found = np.asarray(pull(g)[0], np.float64)
    rounding = 1e-4 + abs(right) * (2**-8 if dtype == "bfloat16" else 0)
    assert (abs(found - right) <= rounding).all()
    assert not found[right == 0].any()


DEEPSEEK = ARCHITECTURES["deepseek"] | dict(first_layers=2, q_latent_dim=0)
# every part that decoding or documents meet
EVERY_PART = dict(embedding_conv=3, latent_conv=3, embedding_norm=True)
EVERY_PART |= dict(backout=True, exclusive_attention=True)
DECODED = ARCHITECTURES | dict(deepseek=DEEPSEEK | EVERY_PART)
NO_SHARED = DEEPSEEK | dict(n_shared=0)
BLOCKS_OF_TWO = EVERY_PART | dict(embedding_conv=2, layers_per_block=2, capacity_factor=0.5)
CACHED = dict(every_part=BLOCKS_OF_TWO)
CACHED |= ARCHITECTURES | dict(deepseek=NO_SHARED)


@pytest.mark.parametrize("flags", CACHED.values(), ids=CACHED)
def test_decoding_with_a_cache_gives_the_scores_of_the_full_forward_pass(flags):
    """Of prompts of different lengths, on a mesh the scores of one device; no token is dropped. The cache holds a
    token's latent and its rotary key, if any, or its keys and values; its id where the embedding looks back."""
    one, cfg = (small_config(mesh, T=16, sequences=8, **flags) for mesh in [(1, 1, 1), (2, 2, 2)])
    mesh = make_mesh(one)
    ids, targets = (np.asarray(part).reshape(8, 16) for part in batch_of(one, mesh))
    targets = np.where(np.arange(16) == 4, ids, targets)  # where some are the likeliest
    score = jax.jit(model.make_score(one, mesh))
    known = np.where(np.arange(16) == 15, -1, targets)
    found = score(raised_params(one), ids.reshape(4, 2, 16), known.reshape(4, 2, 16))
    losses, greedy = (np.asarray(part).reshape(8, 16) for part in found)
    assert not losses[:, 15].any()

    m, (decode, _, empty) = cfg.model, decoder(cfg)
    params, rows = raised_params(cfg), np.arange(8)
    cache, lengths = empty(8), np.array([3, 9, 1, 6, 2, 9, 5, 4])
    per_token = sum(leaf.size for leaf in jax.tree.leaves(cache)) / (8 * 16)
    layers, without = m.first_layers + m.blocks * m.layers_per_block, 0 if m.moe_rope else m.blocks
    latents = layers * (m.latent_dim + m.rope_dim) - without * m.rope_dim
    latents += bool(m.embedding_conv)  # the token's id
    assert per_token == (latents if m.latent_dim else 2 * layers * m.kv_heads * m.key_dim)
    padded = np.where(np.arange(9) < lengths[:, None], ids[:, :9], 7)
    logits, cache = decode(params, padded, cache, 0 * lengths, lengths - 1)
    for at in range(5):
        last = lengths + at - 1
        if at:
            logits, cache = decode(params, ids[rows, last, None], cache, last, 0 * lengths)
        wanted = -jax.nn.log_softmax(logits)[rows, targets[rows, last]]
        assert np.allclose(losses[rows, last], wanted, atol=1e-4)
        assert (greedy[rows, last] == (logits.argmax(-1) == targets[rows, last])).all()


@pytest.mark.parametrize("name", DECODED)
def test_decoding_in_short_types_is_near_float32(name):
    """Prefill and a step, for one sequence and for several: the shapes that a CPU must multiply in bfloat16."""
    flags = DECODED[name] | dict(blocks=1, layers_per_block=1)
    ids, all_logits = np.random.default_rng(0).integers(0, 250, (4, 9)).astype(np.int32), []
    for dtype, rows in [("float32", 4), ("bfloat16", 4), ("bfloat16", 1), ("float16", 4)]:
        decode, params, empty = decoder(small_config(model_dtype=dtype, **flags))
        at = functools.partial(np.full, rows)
        _, cache = decode(params, ids[:rows, :8], empty(rows), at(0), at(7))
        logits, _ = decode(params, ids[:rows, 8:], cache, at(8), at(0))
        all_logits.append(np.asarray(logits)[:, :250])
    exact, *rounded = all_logits
    for logits in rounded:
        assert np.abs(logits - exact[: len(logits)]).max() < 0.1 * np.abs(exact).max()


def test_samples_are_the_same_on_every_mesh():
    texts, drawing = [], utils.Sample(top_k=20, temperature=1.0)
    prompts, lengths = decoding.pad([range(5)] * 4, 5)
    for mesh_shape in ((1, 1, 1), (2, 2, 2)):
        cfg = small_config(mesh_shape, blocks=2, layers_per_block=1)
        mesh = make_mesh(cfg)
        prefill, advance = decoding.make_stream(cfg, mesh, drawing, 17, chunk=12)
        params = make_params(cfg, mesh)
        state = prefill(params, prompts, lengths, jax.random.key(3))
        texts.append(np.asarray(advance(params, state)[1]).T)
    assert texts[0].shape == (4, 12) and np.array_equal(*texts)
    assert texts[0].max() < 250 and len({tuple(row) for row in texts[0].tolist()}) == 4


@pytest.mark.parametrize("name", DECODED)
def test_documents_kept_apart_score_as_each_does_alone(name):
    """Three documents in one sequence, each begun by token 0, against each at the beginning of its own sequence."""
    flags = DECODED[name] | dict(document_mask=True, end_of_text=0)
    cfg = small_config((2, 2, 2), T=16, sequences=8, **flags)
    lengths, rng = [5, 1, 10], np.random.default_rng(0)
    params = jax.tree.map(lambda x: 2 * x, raised_params(cfg))  # of the conv too
    score = jax.jit(model.make_score(cfg, make_mesh(cfg)))
    documents = [np.concatenate([[0], rng.integers(1, 250, n - 1)]) for n in lengths]
    tokens = np.zeros((8, 17), np.int32)
    tokens[0, :16] = np.concatenate(documents)
    for i, document in enumerate(documents):
        tokens[1 + i, : len(document)] = document
    losses, _ = score(params, *(part.reshape(4, 2, 16) for part in (tokens[:, :-1], tokens[:, 1:])))
    losses = np.asarray(losses).reshape(8, 16)
    at = 0
    for i, n in enumerate(lengths):  # the last token of a document has another target in company
        assert np.allclose(losses[0, at : at + n - 1], losses[1 + i, : n - 1], atol=1e-5)
        at += n


ROTARY = {
    name: flags for name, flags in ARCHITECTURES.items() if not architecture(name).learns_positions
}
ROTARY |= {"several layers in a block": {}, "convolved": DECODED["deepseek"]}


@pytest.mark.parametrize("name", ROTARY)
def test_scores_with_rotary_positions_depend_on_distances_alone(name, monkeypatch):
    """All positions shifted alike, in training's forward pass and in decoding, change no logit."""
    cfg = small_config(T=16, sequences=8, **ROTARY[name] | dict(blocks=1))
    mesh, params = make_mesh(cfg), raised_params(cfg)
    tokens, targets = (part[0] for part in batch_of(cfg, mesh))
    ids, length = np.asarray(tokens).reshape(8, 16), np.full(8, 9)

    def scores():
        losses, _ = jax.jit(model.make_score(cfg, mesh))(params, tokens, targets)
        decode, _, empty = decoder(cfg)
        first, cache = decode(params, ids[:, :9], empty(8), 0 * length, length - 1)
        return losses, first, decode(params, ids[:, 9:10], cache, length, 0 * length)[0]

    before = scores()
    shift_rotations(monkeypatch, 200)
    for ours, theirs in zip(before, scores()):
        assert np.allclose(ours, theirs, atol=1e-4)


def shift_rotations(monkeypatch, shift):
    """Have queries and keys turn as if `shift` tokens were before them."""
    for module in (deepseek, qwen3):
        monkeypatch.setattr(
            module, "rotate", lambda x, position, *rest: layers.rotate(x, position + shift, *rest)
        )
    project = deepseek.project_queries
    monkeypatch.setattr(
        deepseek,
        "project_queries",
        lambda x, w, position, m: project(x, w, position + shift, m),
    )


def test_a_threshold_draws_what_sorting_draws():
    """Among ties, zeros of both signs, impossible tokens, and rows with fewer possible ones than top_k."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (64, 300)).astype(np.float32)
    logits[16:32] = np.round(logits[16:32])
    logits[32:40] *= 1e-38  # below the smallest normal number
    logits[40:48] *= 1e37
    logits[48:, 5:] = np.where(rng.random((16, 295)) < 0.9, -np.inf, logits[48:, 5:])
    logits[::7, :40] = rng.choice([0.0, -0.0], 40)
    for k in (1, 2, 40, 299, 300, 1000):
        wanted = -np.sort(-logits, -1)[:, min(k, 300) - 1]
        assert np.array_equal(decoding.kth_largest(jnp.array(logits), k)[:, 0], wanted)
    key = jax.random.key(0)
    likeliest = decoding.draw_tokens(logits, key, utils.Sample(temperature=0))
    assert np.array_equal(likeliest, logits.argmax(-1))
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(64))
    scaled = jnp.array(logits) / 0.8
    for top_k, least in (0, -np.inf), (40, jnp.sort(scaled, -1)[:, -40, None]):
        tokens = decoding.draw_tokens(logits, key, utils.Sample(temperature=0.8, top_k=top_k))
        possible = jnp.where(scaled < least, -jnp.inf, scaled)
        assert np.array_equal(tokens, jax.vmap(jax.random.categorical)(keys, possible))


def test_the_abstract_parameters_of_deepseek_v3_and_its_published_counts():
    """671.0B parameters; active 37.55B with the embedding and the head, of which the paper says 37B."""
    cfg = utils.replace(presets.preset("deepseek-v3-671b"), n_device_axis=(2, 2, 2))
    cfg = settle.validate(cfg, 8)
    total, active, embedding = model.count_params(cfg)
    params = abstract_params(cfg, make_mesh(cfg))
    sizes = sum(x.size for x in jax.tree.leaves(params))
    assert sizes == total + embedding == 671_026_419_200
    assert active + embedding == 37_552_297_472


def test_validation_takes_no_more_batches_than_there_are(capsys):
    cfg = small_config(eval_steps=10)
    corpus = SimpleNamespace(n_sequences=27, folder="val", T=cfg.model.T, sequences=list)
    make_evaluate(cfg, make_mesh(cfg), corpus)
    said = "an evaluation takes 24 sequences and not "
    assert said in capsys.readouterr().out
