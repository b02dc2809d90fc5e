"""How long a collective takes on a machine's links and networks."""

import math

import numpy as np

import collectives
from planning import hlo


def link_seconds(cfg, machine, axes, collective, n_bytes, n):
    """Seconds in which each of n devices along some axes sends n_bytes in a collective, nothing overlapped.

    A ring of more than two TPUs uses both directions of a link. In an all-to-all along a torus of side s, a byte
    travels s/4 hops on average along each dim. The GPUs of a host are joined by one switch. Between groups (TPU slices
    or hosts of GPUs), each device has its share of the network, and the devices of a group divide among them what a
    ring sends to the next group.
    """
    chip = machine.chip
    if collective == hlo.ACROSS:
        return n_bytes / chip.network
    seconds = n_bytes / chip.link
    if not chip.gpu and n > 2:
        seconds /= 2  # both directions
    if not chip.gpu and collective == "all-to-all":
        dims = 1 + (n > 4) + (n > 16)  # of the torus
        seconds *= max(1.0, n ** (1 / dims) / 4)
    groups = groups_along(axes, cfg.run.n_device_axis, machine.groups)
    if groups == 1:
        return seconds
    # the share of a device's bytes that leaves its group
    shares = {"all-to-all": (n - n / groups) / (n - 1), "collective-permute": 1}
    leaves = n_bytes * shares.get(collective, groups / n)
    return max(seconds, leaves / chip.network)


def groups_along(axes, shape, groups):
    """The number of a machine's `groups` over which the devices along some axes of a mesh extend. A group has neighbors
    in the mesh of that shape, numbered row by row."""
    n = math.prod(shape)
    group = np.arange(n).reshape(shape) * groups // n
    along = tuple(slice(None) if axis in axes else 0 for axis in collectives.AXES)
    return len(np.unique(group[along]))
