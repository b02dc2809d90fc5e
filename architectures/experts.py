"""Mixture of experts: routing into buckets, the experts, the load-balancing loss; on local shapes."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from architectures.layers import Load, product
from collectives import from_experts, sum_over, to_experts


def activate(h):
    """[..., 2, F] -> SwiGLU (arXiv:2002.05202, equation 5); [..., 1, F] -> GELU. Returns [..., F]."""
    return (
        jax.nn.silu(h[..., 0, :]) * h[..., 1, :] if h.shape[-2] == 2 else jax.nn.gelu(h[..., 0, :])
    )


def add_up(x):
    """Sum over the first dim, in float32: addition by addition, since CPUs are slow to reduce a leading dim."""
    return sum(x.astype(jnp.float32)).astype(x.dtype)


@jax.custom_vjp
def take_rows(x, index, inverse):
    """Rows of x [n, D] at index [m]; index n gives zeros. inverse [r, n] says where each row went (m: nowhere), so
    that the transpose is a gather too and needs no scatter-add."""
    return x.at[index].get(mode="fill", fill_value=0)


def _take_rows_forward(x, index, inverse):
    return take_rows(x, index, inverse), inverse


def _take_rows_backward(inverse, g):
    return add_up(g.at[inverse].get(mode="fill", fill_value=0)), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def route(p, x, m):
    """Sigmoid router with a selection bias (DeepSeek-V3, arXiv:2412.19437, equations 13 to 16), in float32.

    x [n, D] -> scores [n, E], chosen experts [n, k], their gates [n, k], which sum to routed_scaling, or without
    --norm_topk_prob are the scores times it. The bias selects only. Of the groups of experts, those k_groups count
    whose two best experts are best (section 2.1.2).
    """
    scores = jax.nn.sigmoid(jnp.dot(x.astype(jnp.float32), p["router"], precision="highest"))
    wanted = lax.stop_gradient(scores) + lax.stop_gradient(p["bias"])
    if m.n_groups > 1:
        groups = wanted.reshape(len(x), m.n_groups, -1)
        _, allowed = lax.top_k(lax.top_k(groups, 2)[0].sum(-1), m.k_groups)  # [n, k_groups]
        allowed = (allowed[..., None] == jnp.arange(m.n_groups)).any(1)  # [n, n_groups]
        wanted = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(wanted.shape)
    _, chosen = lax.top_k(wanted, m.experts_per_token)
    gates = jnp.take_along_axis(scores, chosen, -1)
    scaled = m.routed_scaling * gates
    if m.norm_topk_prob:
        scaled /= gates.sum(-1, keepdims=True) + 1e-20
    return scores, chosen, scaled


def balance_loss(scores, chosen, m, split):
    """Sequence-level load-balancing loss (DeepSeek-V3, equations 17 to 20), this device's part of sum_b sum_e f P.

    scores [B, T/tp, E], chosen [B, T/tp, k]. f counts choices, so it carries no gradient and may be summed over tp.
    An even load gives 1 per sequence.
    """
    T = scores.shape[1] * (lax.axis_size("tp") if split else 1)
    f = (
        jax.nn.one_hot(chosen, m.n_experts).sum((1, 2)) * m.n_experts / (m.experts_per_token * T)
    )  # [B, E]
    f = sum_over(lax.stop_gradient(f), "tp") if split else f
    share = scores / scores.sum(-1, keepdims=True)
    return (f * share.sum(1) / T).sum()


def capacity(m, n):
    """Slots of each expert's bucket for n local tokens."""
    if not m.capacity_factor:
        return n
    return min(n, math.ceil(m.capacity_factor * n * m.experts_per_token / m.n_experts))


def routed_experts(p, x, m, split):
    """Mixture of routed experts on local tokens. x [B, T/tp, D] -> [B, T/tp, D] and `Load`.

    A token's first choice is served before anyone's second; choices beyond a bucket's capacity add nothing, so those
    tokens pass by on the residual (GShard, arXiv:2006.16668, section 2.2). Buckets are filled by index.
    """
    (B, t, D), E, k = x.shape, m.n_experts, m.experts_per_token
    n = B * t
    x = x.reshape(n, D)
    scores, chosen, gates = route(p, x, m)
    C = capacity(m, n)

    choice = chosen.T.reshape(-1)  # [k*n], all first choices first
    hot = (choice[:, None] == jnp.arange(E)).astype(jnp.int32)  # [k*n, E]
    rank = (
        jnp.take_along_axis(jnp.cumsum(hot, 0), choice[:, None], 1)[:, 0] - 1
    )  # place in the expert's queue
    slot = jnp.where(rank < C, choice * C + rank, E * C)  # [k*n], E*C: dropped
    entry = jnp.full(E * C, k * n).at[slot].set(jnp.arange(k * n), mode="drop")  # [E*C], k*n: empty
    source = jnp.where(entry < k * n, entry % n, n)

    buckets = take_rows(x, source, slot.reshape(k, n)).reshape(E, C, D)
    buckets = to_experts(buckets)  # [E/(dp tp), dp tp, C, D]
    # gates go along and weigh the hidden channels: so no pass, forward or back, needs the experts' outputs again
    gates = take_rows(gates.T.reshape(-1, 1).astype(x.dtype), entry, slot[None]).reshape(E, C, 1)
    h = activate(product("encd,egdf->encgf", buckets, p["experts"]["up"], keep=False))
    h = jnp.einsum("encf,enc->encf", h, to_experts(gates)[..., 0])
    out = from_experts(product("encf,edf->encd", h, p["experts"]["down"], keep=False)).reshape(
        E * C, D
    )
    out = add_up(take_rows(out, slot, entry[None]).reshape(k, B, t, D))

    loss = balance_loss(scores.reshape(B, t, E), chosen.reshape(B, t, k), m, split)
    return out, Load(loss, hot.sum(0).astype(jnp.float32), (rank >= C).sum().astype(jnp.float32))
