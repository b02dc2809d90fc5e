"""Any mesh computes what the plain model computes: the loss, what it consists of, and every gradient."""

import functools
import re
import textwrap
import zlib

import jax
import numpy as np
import pytest
from mesh_helpers import (
    DEEPSEEK,
    DOCUMENTS,
    MEGATRON,
    assert_same,
    batch_of,
    loss_and_gradients,
    mesh_id,
    on_one_device,
)
from small_models import given, small_config

import collectives
import model
import plain_model
from architectures import layers, parameters
from training.device_mesh import make_mesh


@functools.cache
def large_params(**flags):
    """Parameters twice as far from their means as at the start of training, biases too, so that every part matters."""

    def draw(path, p):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        x = p.start + (2 * p.std or 0.1) * rng.standard_normal(p.shape)
        x[p.rows or len(x) :] = 0
        return np.float32(x)

    table = model.param_table(small_config(**flags))
    return jax.tree_util.tree_map_with_path(draw, table, is_leaf=parameters.is_param)


@functools.cache
def params_with_a_favorite(**flags):
    """`large_params`, with which every token chooses expert 5."""
    params = large_params(**flags)
    bias = np.zeros_like(params["moe"]["bias"])
    bias[..., 5] = 10
    return params | {"moe": params["moe"] | {"bias": bias}}


@functools.cache
def plain_loss_and_gradients(make_params, **flags):
    """((loss, Metrics), gradients) of the batch of `loss_and_gradients`, by the plain model."""
    cfg = small_config(**flags)
    batch = batch_of(cfg, make_mesh(cfg))
    tokens, targets = (np.reshape(part, (-1, cfg.model.T)) for part in batch)

    def loss(params):
        weight = cfg.optimizer.balance_weight
        value, parts = plain_model.loss(params, tokens, targets, cfg.model, weight)
        measured = dict(load=parts.pop("load"))
        return value, model.Metrics(**parts, dropped=0.0, measured=measured)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(make_params(**flags))


def assert_plain(mesh, make_params=large_params, sharded=loss_and_gradients, **flags):
    """On `mesh` the model of these flags computes what the plain model does."""
    flags = dict(flags, balance_weight=0.1)  # whose gradient shows
    of_model = on_one_device(flags)
    of_model.pop("experts", None)  # the plain model has one way to its experts
    plain = plain_loss_and_gradients(make_params, **of_model)
    (loss, seen), gradients = sharded(mesh, make_params, **flags)
    # of what is measured of routers, the plain model knows the load
    seen = seen._replace(measured=dict(load=seen.measured["load"]))
    assert_same(plain, ((loss, seen), gradients), 1e-5)
    for path, gradient in jax.tree_util.tree_leaves_with_path(plain[1]):
        assert gradient.any() or path[-1].key == "bias", path


def test_the_example_in_the_docstring_runs():
    """As far as shapes go, which compiles nothing."""
    example, *_ = re.findall(r"(?:^ {4}.*\n)+", plain_model.__doc__, re.MULTILINE)
    *lines, call = textwrap.dedent(example).splitlines()

    def run():
        names = {}
        exec("\n".join(lines), names)
        return eval(call, names)

    loss, parts = jax.eval_shape(run)
    assert loss.shape == () and parts["load"].shape == (2, 8)  # layers with experts, experts


MESHES = [(8, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2), (1, 2, 4), (4, 2, 1)]


@pytest.mark.parametrize("mesh", [(1, 1, 1), *MESHES], ids=mesh_id)
def test_loss_and_every_gradient(mesh):
    assert_plain(mesh)


DOCUMENTS_APART = DEEPSEEK | DOCUMENTS
FEW_EXPERTS = given("--n_experts 4 --n_groups 2 --k_groups 1 --experts_per_token 2")
OTHER_LAYERS = given("--first_layers 2 --q_latent_dim 0 --fsdp full")
ROUNDS = given("--pp_interleave 2 --remat dots --experts tiles")
COPIES = given("--n_experts 2 --activation gelu --fsdp none --remat none --n_shared 2")
COPIES |= dict(expert_dim=33)
UNEVEN = given("--n_experts 3 --latent_dim 9 --vocab_size 127 --ffn_dim 67 --expert_dim 35")
UNEVEN |= dict(sequences=24)


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ((1, 1, 4), DOCUMENTS_APART),
        ((4, 2, 1), DOCUMENTS_APART),
        ((2, 2, 2), DOCUMENTS_APART | ROUNDS),
        ((4, 1, 2), DEEPSEEK | OTHER_LAYERS | FEW_EXPERTS | MEGATRON),
        # fewer experts than devices
        ((4, 1, 2), COPIES | MEGATRON),
        # sizes that neither dp nor tp divides
        ((3, 1, 2), UNEVEN),
    ],
    ids=mesh_id,
)
def test_variants(mesh, flags):
    assert_plain(mesh, **flags)


@pytest.mark.parametrize(
    "mesh, experts",
    [((2, 2, 2), "tiles"), ((2, 2, 2), "buckets"), ((1, 2, 1), "buckets")],
    ids=str,
)
def test_every_token_chooses_one_expert(mesh, experts):
    """No choice is dropped: buckets take as many rounds as they need, also where one device has all experts of a
    stage."""
    flags = dict(layers_per_block=1, experts_per_token=1, n_shared=0, T=16)
    assert_plain(mesh, params_with_a_favorite, experts=experts, **flags)


@pytest.mark.parametrize(
    "mesh, flags",
    [
        ((8, 1, 1), dict(microbatches=1)),
        ((2, 2, 2), dict(DEEPSEEK, layers_per_block=3, pp_interleave=2, remat="dots")),
    ],
    ids=mesh_id,
)
def test_what_accelerators_do_otherwise(mesh, flags, monkeypatch):
    """Layers of a block one after another, recomputed without barriers, plain products, weights gathered as the TPU
    compiler needs it, gradients scattered by an all-to-all."""
    for module in (model, layers, collectives):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    monkeypatch.setattr(model, "choose_fsdp", lambda *_: "exchange")
    assert_plain(mesh, sharded=loss_and_gradients.__wrapped__, **flags)
