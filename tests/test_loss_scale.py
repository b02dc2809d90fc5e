"""float16 with its loss scale: how the scale is found, that a run resumes with it, and that a mesh changes nothing."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ARCHITECTURES
from helpers import TINY, assert_bitwise, checkpoint_of, metrics_of
from mesh_helpers import batch_of, begin, furthest, mesh_id, on_one_device, three_steps
from small_models import given, small_config

from training import loss_scale
from training.device_mesh import make_mesh
from training.loss_scale import LossScale, next_scale

HALF = dict(model_dtype="float16")


def scales(losses, norms, start):
    """The scales after steps with these losses and norms."""
    scale = LossScale(jnp.float32(start), jnp.int32(0))
    found = []
    for loss, norm in zip(losses, norms, strict=True):
        scale = next_scale(scale, jnp.float32(loss), jnp.float32(norm))
        found.append((float(scale.value), int(scale.sound_steps)))
    return found


def test_the_scale_doubles_after_sound_steps_and_halves_at_an_overflow(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    norms = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0, math.nan]
    found = scales([4.0] * 8, norms, 1024)
    counted = [(1024, 1), (1024, 2), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1), (512, 0)]
    assert found == counted
    # a loss that is not finite was so before it was scaled
    assert scales([math.nan, math.inf, 4.0], [math.nan, 1.0, 1.0], 8) == [(8, 0), (8, 0), (8, 1)]
    assert scales([4.0] * 3, [math.inf] * 3, 2) == [(1, 0)] * 3
    largest = loss_scale.LARGEST
    assert scales([4.0] * 3, [1.0] * 3, largest) == [(largest, 1), (largest, 2), (largest, 0)]


@pytest.mark.parametrize(
    "loss, norm, scale, overflows",
    [
        (4.0, math.inf, 1024.0, True),
        (4.0, math.nan, 2.0, True),
        (4.0, 1.0, 1024.0, False),
        (math.nan, math.nan, 1024.0, False),
        (4.0, math.inf, loss_scale.LEAST, False),  # nothing is left to halve
        (4.0, math.inf, None, False),  # of another type
    ],
)
def test_an_overflow_is_no_bad_step(loss, norm, scale, overflows, capsys):
    row = {"step": 7, "loss/train_loss": loss, "grad_norm": norm}
    if scale:
        row[loss_scale.NAME] = scale
    assert loss_scale.overflowed(row) == overflows
    said = capsys.readouterr().out
    assert bool(said) == overflows
    if overflows:
        assert (
            f"step 7 is skipped: its gradient overflows float16 with a loss scale of {scale:g}"
            in said
        )
        assert f"which is {scale / 2:g} from here on" in said


def test_a_run_recovers_from_a_scale_that_is_far_too_large():
    """It ends with the bits of one that begins at the scale reached."""
    cfg = small_config(sequences=8, blocks=1, layers_per_block=1, warmup_steps=1, **HALF)
    mesh = make_mesh(cfg)
    batches = [batch_of(cfg, mesh, seed) for seed in range(40)]
    state, step = begin(cfg, mesh)
    params = jax.tree.map(np.asarray, state.params)
    state = state._replace(scale=LossScale(jnp.float32(loss_scale.LARGEST), jnp.int32(0)))
    skipped = 0
    while True:
        before = float(state.scale.value)
        state, metrics = step(state, *batches[skipped])
        if np.isfinite(metrics["grad_norm"]):
            break
        assert np.isfinite(metrics["loss/train_loss"]) and metrics["loss_scale"] == before
        assert state.scale.value == before / 2
        skipped += 1
        assert furthest(params, state.params)[0] == 0, "an overflow changes parameters"
    assert skipped > 5
    for batch in batches[skipped + 1 :][:3]:
        state, _ = step(state, *batch)

    other, _ = begin(cfg, mesh)
    reached = LossScale(jnp.float32(before), jnp.int32(0))
    other = other._replace(step=jnp.int32(skipped), scale=reached)
    for batch in batches[skipped:][:4]:
        other, _ = step(other, *batch)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, other))


def test_a_run_resumes_to_the_bit_with_its_scale(train, tmp_path, monkeypatch, capsys):
    """Within overflows, in the middle of a count, and after the scale grew; none of the overflows is a bad step."""
    monkeypatch.setattr(loss_scale, "FIRST", loss_scale.LARGEST)
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    flags = dict(TINY, **HALF, max_bad_steps=2, save_steps=5, keep_checkpoints=9)
    assert train(**flags, name="whole", training_steps=30) == 0
    said = capsys.readouterr().out
    assert "its loss is" not in said and "rollback" not in said
    for end in (4, 22, 30):
        assert train(**flags, name="parts", training_steps=end) == 0
    runs = tmp_path / "runs"
    rows = metrics_of(runs / "whole")
    found = [row["loss_scale"] for row in rows]
    overflows = [row["step"] for row in rows if not math.isfinite(row["grad_norm"])]
    assert overflows[:4] == [1, 2, 3, 4] and len(overflows) < 28
    assert said.count("its gradient overflows float16") == len(overflows)
    assert any(later > earlier for earlier, later in zip(found, found[1:])), "it never grew"
    assert {row["bad_steps"] for row in rows} == {0}
    assert [row["loss_scale"] for row in metrics_of(runs / "parts")] == found
    whole, parts = (checkpoint_of(runs / name, 30) for name in ("whole", "parts"))
    assert_bitwise(whole, parts)
    of_scale = {key for key in whole if key.startswith("['scale']")}
    assert of_scale == {"['scale']['value']", "['scale']['sound_steps']"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_types_have_no_scale_in_steps_or_checkpoints(dtype, train, tmp_path):
    assert train(**TINY | dict(model_dtype=dtype, training_steps=1)) == 0
    run = tmp_path / "runs" / "run"
    metadata = json.loads((run / "checkpoints/1/state/_METADATA").read_text())
    fields = {path.split("'")[1] for path in metadata["tree_metadata"]}
    assert fields == {"params", "opt_state", "step", "key"}
    assert "loss_scale" not in metrics_of(run)[0]


# A token whose choice of experts hangs by rounding may turn the whole step of a router's bias. And what layers have
# added is small at first: as the difference of two float16 numbers it has few digits.
NO_BIAS = dict(bias_update_rate=0.0, optimizer="muon", backout=False)
MESHES = [
    ((8, 1, 1), dict(NO_BIAS, accumulation_steps=2, sequences=64)),
    ((2, 2, 2), dict(NO_BIAS, **given("--fsdp full"))),
    ((1, 2, 4), dict(ARCHITECTURES["qwen3"], **given("--sequence_parallel megatron"))),
]


@pytest.mark.parametrize("mesh, flags", MESHES, ids=mesh_id)
def test_every_mesh_computes_the_same_but_for_rounding(mesh, flags):
    """After three steps, and what float32 computes; float16 has 11 digits, of which sums and Muon cost a few."""
    flags = dict(blocks=2, layers_per_block=1) | flags
    exact = three_steps((1, 1, 1), model_dtype="float32", **on_one_device(flags))
    for where in ((1, 1, 1), mesh):
        of_mesh = flags if where == mesh else on_one_device(flags)
        found = three_steps(where, **HALF, **of_mesh)
        found = jax.tree.map(lambda x, y: y.reshape(x.shape), exact, found)
        assert furthest(exact[1:], found[1:])[0] < 2**-10, "losses and norms"
        assert furthest(exact[0], found[0])[0] < 2**-5
