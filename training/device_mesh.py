"""The device mesh: how the devices are arranged along the axes dp, pp and tp."""

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

import collectives
from runtime.messages import UserError


def make_mesh(cfg, devices=None):
    """The (dp, pp, tp) mesh over `devices`, by default the first --n_devices. Neighbors on an axis are close to each
    other in the network."""
    if devices is None:
        devices = jax.devices()[: cfg.run.n_devices]
    grid = device_grid(cfg.run.n_device_axis, devices)
    return Mesh(grid, collectives.AXES, axis_types=(AxisType.Auto,) * 3)


def device_grid(shape, devices):
    """`devices` as an array of `shape` (dp, pp, tp): tp gets the fastest links, then pp, then dp.

    TPU slices are connected by a slower network. They are arranged along dp, or along pp if their number does not
    divide dp. Raises UserError where it divides neither.
    """
    slices = collectives.count_slices(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    dp, pp, tp = shape
    if dp % slices and pp % slices:
        raise UserError(
            f"--n_device_axis {dp} {pp} {tp}: dp or pp must be a multiple of the number of TPU slices, {slices}."
        )
    outer = (1, slices, 1) if dp % slices else (slices, 1, 1)
    inner = [size // parts for size, parts in zip(shape, outer)]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )
