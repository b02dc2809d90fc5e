"""Mixture of experts: routing into buckets, the experts, the load-balancing loss; on local shapes.

Letters: n B x T/tp local tokens, k --experts_per_token, E experts, C capacity, D model, F feed-forward; of einsums:
e experts, n senders of a bucket, c its slots, d D, f F, g branches.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from architectures.layers import BRANCHES, Load, activate, product
from architectures.parameters import weight_param
from collectives import EXPERT_AXES, from_experts, sum_over, to_experts


def experts_table(cfg, up_std, down_std):
    """Parameters of the routed experts, and the standard deviations with which they begin.

    Every device of dp x tp holds experts of its own. Where there are fewer experts than devices, every device holds a
    slice of all of them, and `gather_weight` makes from these the one expert that it computes.
    """
    m = cfg.model
    D, E, F = m.model_dimension, m.n_experts, m.expert_width
    dp, _, tp = cfg.run.n_device_axis

    def weight(shape, std, inputs, outputs, dim):
        if dp * tp > E:
            lies = dict(over=EXPERT_AXES, dim=dim, expert=-len(shape))
        else:
            lies = dict(over=(), fixed={0: EXPERT_AXES})
        active = m.experts_per_token / E
        return weight_param(cfg, shape, std, inputs, outputs, active=active, **lies)

    up, down = (E, BRANCHES[m.activation], D, F), (E, D, F)
    return dict(
        up=weight(up, up_std, inputs=(2,), outputs=(3,), dim=2),
        down=weight(down, down_std, inputs=(2,), outputs=(1,), dim=1),
    )


# --- Routing ------------------------------------------------------------------------------------------------------


def route(p, x, m):
    """Sigmoid router with a selection bias (DeepSeek-V3, arXiv:2412.19437, equations 13 to 16), in float32.

    x [n, D] -> scores [n, E], chosen experts [n, k] and their gates [n, k]. The bias decides who is chosen and nothing
    else. Gates are the scores of the chosen experts, divided by their sum (not without --norm_topk_prob), times
    routed_scaling.
    """
    x = x.astype(jnp.float32)
    logits = jnp.dot(x, p["router"], precision="highest")
    scores = jax.nn.sigmoid(logits)
    wanted = lax.stop_gradient(scores) + lax.stop_gradient(p["bias"])
    if m.n_groups > 1:
        wanted = keep_best_groups(wanted, m)
    _, chosen = lax.top_k(wanted, m.experts_per_token)
    chosen_scores = jnp.take_along_axis(scores, chosen, -1)
    gates = m.routed_scaling * chosen_scores
    if m.norm_topk_prob:
        gates /= chosen_scores.sum(-1, keepdims=True) + 1e-20
    return scores, chosen, gates


def keep_best_groups(wanted, m):
    """`wanted` [n, E] with -inf for experts outside each token's best k_groups of n_groups groups of experts.

    A group counts as much as its two best experts together (DeepSeek-V3, section 2.1.2).
    """
    groups = wanted.reshape(len(wanted), m.n_groups, -1)  # [n, n_groups, E/n_groups]
    two_best, _ = lax.top_k(groups, 2)
    _, best = lax.top_k(two_best.sum(-1), m.k_groups)  # [n, k_groups]
    allowed = best[..., None] == jnp.arange(m.n_groups)
    allowed = allowed.any(1)  # [n, n_groups]
    kept = jnp.where(allowed[..., None], groups, -jnp.inf)
    return kept.reshape(wanted.shape)


def balance_loss(scores, chosen, m, split):
    """Sequence-level load-balancing loss (DeepSeek-V3, equations 17 to 20), this device's part of sum_b sum_e f P.

    scores [B, T/tp, E], chosen [B, T/tp, k]. f counts choices, so it has no gradient and may be summed over tp.
    An even load gives 1 per sequence.
    """
    T = scores.shape[1]
    if split:
        T *= lax.axis_size("tp")
    hot = jax.nn.one_hot(chosen, m.n_experts)
    counts = hot.sum((1, 2))  # [B, E]
    f = counts * m.n_experts / (m.experts_per_token * T)
    if split:
        f = sum_over(lax.stop_gradient(f), "tp")
    share = scores / scores.sum(-1, keepdims=True)
    parts = f * share.sum(1) / T  # [B, E]
    return parts.sum()


# --- Buckets ------------------------------------------------------------------------------------------------------


class Buckets(NamedTuple):
    """Where k*n choices of experts lie in E buckets of C slots each. First choices of all tokens come first."""

    hot: jax.Array  # [k*n, E] 1 where the choice is the expert
    rank: jax.Array  # [k*n] place in the expert's queue; C and more: dropped
    slot: jax.Array  # [k*n] expert * C + rank; E*C: dropped
    entry: jax.Array  # [E*C] the choice that lies in each slot; k*n: the slot is empty
    source: jax.Array  # [E*C] the token that made it; n: the slot is empty


def capacity(m, n):
    """Slots of each expert's bucket for n local tokens."""
    if not m.capacity_factor:
        return n
    return min(n, math.ceil(m.capacity_factor * n * m.experts_per_token / m.n_experts))


def fill_buckets(chosen, E, C):
    """`Buckets` of the chosen experts [n, k]: a token's first choice is served before anyone's second.

    Example: 6 tokens with one choice each, E = 3 experts, buckets of C = 2 slots.

        token      0  1  2  3  4  5
        chosen     0  2  0  0  1  2
        rank       0  0  1  2  0  1     token 3 is the third that wants expert 0, and is dropped
        slot       0  4  1  6  2  5     6 = E*C: none

        slot       0  1 | 2  3 | 4  5   two slots for each expert
        entry      0  2 | 4  6 | 1  5   6 = k*n: empty
        source     0  2 | 4  6 | 1  5   6 = n: empty

    With second choices 1 0 1 1 0 1 of the same tokens, choices 6 to 11, the empty slot 3 goes to token 0: its entry is
    6, its source 6 % 6 = 0. The other five find no slot.
    """
    n, k = chosen.shape
    choice = chosen.T.reshape(-1)  # [k*n]
    hot = choice[:, None] == jnp.arange(E)
    hot = hot.astype(jnp.int32)  # [k*n, E]
    queued = jnp.cumsum(hot, 0)  # choices of each expert so far
    rank = jnp.take_along_axis(queued, choice[:, None], 1)[:, 0] - 1
    slot = jnp.where(rank < C, choice * C + rank, E * C)
    entry = jnp.full(E * C, k * n).at[slot].set(jnp.arange(k * n), mode="drop")
    source = jnp.where(entry < k * n, entry % n, n)
    return Buckets(hot, rank, slot, entry, source)


def sum_leading(x):
    """Sum over the first dim, in float32: addition by addition, since CPUs are slow to reduce a leading dim."""
    total = sum(x.astype(jnp.float32))
    return total.astype(x.dtype)


@jax.custom_vjp
def take_rows(x, index, inverse):
    """Rows of x [n, D] at index [m]; index n gives zeros.

    inverse [r, n] says where each row went, up to r times (m: nowhere). So the transpose is a gather too: a row's
    gradient is the sum of those of its copies. Plain indexing would transpose to a scatter-add, which is slower.

    Example: x = [10, 11, 12, 13] with index [2, 4, 0] gives [12, 0, 10]. Row 0 went to place 2, row 2 to place 0,
    the others nowhere: inverse is [[2, 3, 0, 3]], and gradients [7, 8, 9] become [9, 0, 7, 0].
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _take_rows_forward(x, index, inverse):
    return take_rows(x, index, inverse), inverse


def _take_rows_backward(inverse, g):
    copies = g.at[inverse].get(mode="fill", fill_value=0)  # [r, n, D]
    return sum_leading(copies), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


# --- Experts ------------------------------------------------------------------------------------------------------


def routed_experts(p, x, m, split):
    """Mixture of routed experts on local tokens. x [B, T/tp, D] -> [B, T/tp, D] and `Load`.

    Choices beyond a bucket's capacity add nothing, so those tokens pass by on the residual (GShard, arXiv:2006.16668,
    section 2.2).
    """
    B, t, D = x.shape
    n = B * t
    E, k = m.n_experts, m.experts_per_token
    C = capacity(m, n)

    # 1. Every token chooses k experts, and every choice gets a slot.
    x = x.reshape(n, D)
    scores, chosen, gates = route(p, x, m)
    at = fill_buckets(chosen, E, C)

    # 2. Tokens go into the buckets, and the buckets to the devices of their experts.
    buckets = take_rows(x, at.source, at.slot.reshape(k, n))  # [E*C, D]
    buckets = to_experts(buckets.reshape(E, C, D))  # [E/(dp tp), dp tp, C, D]

    # 3. So do the gates: where they weigh the hidden channels, no pass, forward or back, needs the experts' outputs.
    gates = gates.T.reshape(-1, 1).astype(x.dtype)  # [k*n, 1]
    gates = take_rows(gates, at.entry, at.slot[None])  # [E*C, 1]
    gates = gates.reshape(E, C, 1)

    # 4. The experts.
    h = activate(product("encd,egdf->encgf", buckets, p["experts"]["up"], keep=False))
    gates = to_experts(gates)  # [E/(dp tp), dp tp, C, 1]
    h = jnp.einsum("encf,enc->encf", h, gates[..., 0])
    out = product("encf,edf->encd", h, p["experts"]["down"], keep=False)

    # 5. Outputs come back, and every token adds up those of its choices.
    out = from_experts(out).reshape(E * C, D)
    out = take_rows(out, at.slot, at.entry[None])  # [k*n, D]
    out = sum_leading(out.reshape(k, B, t, D))

    # 6. How even the load was.
    loss = balance_loss(scores.reshape(B, t, E), chosen.reshape(B, t, k), m, split)
    tokens = at.hot.sum(0).astype(jnp.float32)
    dropped = at.rank >= C
    dropped = dropped.sum().astype(jnp.float32)
    return out, Load(loss, tokens, dropped)
