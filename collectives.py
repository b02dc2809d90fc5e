"""Every collective of the program, each with its transpose and paper; inside `shard_map`, on local shapes."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

AXES = ("dp", "pp", "tp")
EXPERT_AXES = ("dp", "tp")  # axes over which the experts of a pipeline stage are spread
BATCH_SPEC = P(None, "pp", "dp", "tp")  # of tokens [accumulation, M, B, T]


def near_devices(n):
    """Number of devices that gather among themselves first where n gather in two steps: the largest divisor of n up to
    its square root. 8 -> 2, 12 -> 3; for a prime it is 1, and there is one step."""
    return next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)


def all_gather(x, axis, dim):
    """[.., n, ..], a part along `dim` -> the parts of all devices of a mesh axis, one after another. Transpose:
    reduce-scatter.

    The TPU compiler makes an all-reduce, of twice the bytes, of many a reduce-scatter among all devices of a mesh, of
    small last dims or along the first: that goes in two steps (arXiv:1909.09756, section 3), with the dims after `dim`
    as one, and with parts of less than 2^28 numbers along a dim of their own.
    """
    n, shape, tiled = lax.axis_size(axis), x.shape, dim > 0 or x.size >= 2**28
    near = near_devices(n) if n == lax.axis_size(AXES) else 1
    devices = np.arange(n).reshape(-1, near)
    x = x if dim == x.ndim - 1 else x.reshape(*shape[: dim + 1], -1)
    for groups in (devices, devices.T) if near > 1 else (devices.T,) if n > 1 else ():
        x = lax.all_gather(x, axis, axis=dim, tiled=tiled, axis_index_groups=groups.tolist())
    return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def reduce_scatter(x, axis, dim):
    """A sum over a mesh axis, of which every device takes its part along `dim`. Transpose: `all_gather`."""
    part = jax.ShapeDtypeStruct(
        x.shape[:dim] + (x.shape[dim] // lax.axis_size(axis),) + x.shape[dim + 1 :], x.dtype
    )
    return jax.linear_transpose(functools.partial(all_gather, axis=axis, dim=dim), part)(x)[0]


class Weights(NamedTuple):
    """Weights, one or a tree of them, and zeros in float32 of the same shapes at which their gradients arrive instead:
    see `take`."""

    value: jax.Array
    grad: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_weight(w, p, dtype):
    """A weight of the `Param` p as it is stored -> the whole of it, or this device's expert, `Weights` in `dtype`
    (ZeRO-3, arXiv:1910.02054, section 5.3).

    Travels in `dtype`; the gradient, which its transpose reduces and scatters, in float32.
    """
    whole = _whole(w.astype(dtype), p)
    return Weights(whole, jnp.zeros(whole.shape, jnp.float32))


def _whole(w, p):
    dim, axes = p.gather or (0, EXPERT_AXES)
    dim %= w.ndim
    if not p.expert:
        for axis in reversed(
            axes if p.gather else ()
        ):  # one after another: XLA reduces and scatters no more than that
            w = all_gather(w, axis, dim)
        return w
    E, experts = p.shape[p.expert], p.expert % w.ndim
    apart, together = expert_groups(E)
    if not p.gather:
        return lax.dynamic_slice_in_dim(w, lax.axis_index(axes) // len(apart), 1, experts)
    # device e r + j has slice e r + j of every expert, and exchanges them for the slices j, r + j, ... of expert e
    w = lax.all_to_all(w, axes, experts, dim, axis_index_groups=apart, tiled=True)
    shape = w.shape
    w = w.reshape(*shape[:dim], E, -1, *shape[dim + 1 :])
    w = lax.all_gather(
        w, axes, axis=dim + 1, tiled=True, axis_index_groups=together
    )  # [..., E, r x slice, ...]
    return w.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _gather_weight_forward(w, p, dtype):
    return gather_weight(w, p, dtype), None


def _gather_weight_backward(p, dtype, _, g):
    stored = list(g.grad.shape)
    if p.gather:
        stored[p.gather[0]] //= lax.axis_size(p.gather[1])
    if p.expert:
        stored[p.expert] = p.shape[p.expert]
    return jax.linear_transpose(
        functools.partial(_whole, p=p), jax.ShapeDtypeStruct(stored, jnp.float32)
    )(g.grad)


gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)


def expert_groups(E):
    """How n = dp x tp devices share E experts, device e n/E + j expert e, as axis_index_groups: (those that hold
    different experts, those that hold the same one); (None, None) where each has experts of its own."""
    r = lax.axis_size(EXPERT_AXES) // E
    if r < 2:
        return None, None
    devices = np.arange(E * r).reshape(E, r)
    return devices.T.tolist(), devices.tolist()


def gather_sequence(x, split):
    """[B, T/tp, ...] -> [B, T, ...]: enter a tensor-parallel region (arXiv:2205.05198, section 4.2.2).

    Transpose: reduce-scatter over T. Tokens that are not split over tp (decoding) are whole already.
    """
    return all_gather(x, "tp", 1) if split else x


def scatter_sequence(x, split):
    """[B, T, D], a partial sum on every device of tp -> [B, T/tp, D], summed: leave a tensor-parallel region.

    Transpose: all-gather over T. Where tokens are not split over tp, a sum over tp.
    """
    return reduce_scatter(x, "tp", 1) if split else lax.psum(x, "tp")


def exchange_heads(x, split):
    """[B, H/tp, T, V] of all tokens -> [B, H, T/tp, V] of this device's (DeepSpeed Ulysses, arXiv:2309.14509,
    section 3.1). Transpose: the way back. Where tokens are not split over tp, [B, H, T, V], an all-gather."""
    n = lax.axis_size("tp")
    if n == 1 or not split:
        return x if n == 1 else lax.all_gather(x, "tp", axis=1, tiled=True)
    B, H, T, V = x.shape
    x = lax.all_to_all(
        jnp.moveaxis(x.reshape(B, H, n, T // n, V), 2, 0), "tp", 0, 0
    )  # [tp, B, H/tp, T/tp, V]
    return jnp.moveaxis(x, 0, 1).reshape(B, n * H, T // n, V)


def to_experts(x):
    """Buckets [E, C, D] -> [E/n, n, C, D] on the n devices of dp x tp that own the experts, of n senders each; where
    n > E every device takes from E, [1, E, C, D]. Transpose: from_experts."""
    if lax.axis_size(EXPERT_AXES) == 1:
        return x[:, None]
    n = min(len(x), lax.axis_size(EXPERT_AXES))
    x = x.reshape(n, -1, *x.shape[1:])  # [n, E/n, C, D]
    return lax.all_to_all(
        x, EXPERT_AXES, 0, 0, axis_index_groups=expert_groups(len(x))[0]
    ).swapaxes(0, 1)


def from_experts(x):
    """[E/n, n, C, D] -> [E, C, D], back on the devices that the tokens came from. Transpose: to_experts."""
    if lax.axis_size(EXPERT_AXES) == 1:
        return x[:, 0]
    x = x.swapaxes(0, 1)  # [n, E/n, C, D]
    return lax.all_to_all(x, EXPERT_AXES, 0, 0, axis_index_groups=expert_groups(len(x))[0]).reshape(
        -1, *x.shape[2:]
    )


def next_stage(x):
    """What the stage before sent; stage 0 receives from the last. Transpose: the other way round."""
    S = lax.axis_size("pp")
    return lax.ppermute(x, "pp", [(s, (s + 1) % S) for s in range(S)]) if S > 1 else x


@jax.custom_vjp
def to_stages(x):
    """Microbatches [M/S, ...] of every stage -> [M, ...] on every stage. Transpose: `share_out` by stage 0, which alone
    puts them to use."""
    return lax.all_gather(x, "pp", axis=0, tiled=True) if lax.axis_size("pp") > 1 else x


to_stages.defvjp(lambda x: (to_stages(x), None), lambda _, g: (share_out(g, 0),))


def share_out(x, stage):
    """Microbatches [M, ...] of one stage -> [M/S, ...] on every stage. Transpose: the way back."""
    S = lax.axis_size("pp")
    return lax.all_to_all(x.reshape(S, -1, *x.shape[1:]), "pp", 0, 0)[stage] if S > 1 else x


def from_last_stage(x, everywhere=False):
    """Outputs [M, ...] of the last stage -> [M/S, ...], shared out (`everywhere`: all of them on every stage)."""
    last = lax.axis_size("pp") - 1
    if everywhere:
        return lax.psum(jnp.where(lax.axis_index("pp") == last, x, 0), "pp")
    return share_out(x, last)


def sum_over(x, axes):
    """Sum over mesh axes. In the differentiated path this is the last operation of the loss and stands nowhere else."""
    return lax.psum(x, axes)
