"""Mixture of experts: routing into buckets, the experts, the load-balancing loss; on local shapes.

Comes before: a layer of `architectures/deepseek.py` or another model, which calls `routed_experts` with its router.
Comes next: `collectives.py`, which sends the buckets to the devices of their experts.

Letters: n B x T/tp local tokens, k --experts_per_token, E experts, C capacity, D model, F feed-forward; of einsums:
e experts, p devices that sent a bucket, c its slots, d D, f F, g branches.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from architectures.layers import BRANCHES, activate, einsum
from architectures.parameters import weight_param
from collectives import (
    EXPERT_AXES,
    first_own_expert,
    from_experts,
    gather_tokens,
    largest,
    scatter_tokens,
    sum_over,
    to_experts,
)
from kernels.grouped import at_even_load, group_begins, grouped_feed_forward, row_space

# Slots of a bucket of dropless experts in the first round and in each further one, in multiples of the mean load
FIRST_ROUND, FURTHER_ROUND = 1.25, 0.25
# The same for the first round of a device with all experts, which chooses. They are few, since each is compiled.
FIRST_ROUNDS = (1.0625, 1.125, 1.25, 1.5)


class RoutingStats(NamedTuple):
    """What a layer's router did, as sums over tokens; they add up over microbatches, devices and steps."""

    balance_loss: jax.Array  # [] load-balancing loss, summed over sequences
    dropped: jax.Array  # [] choices that found their expert's bucket full
    measured: dict  # of `measure`


def measure(scores, chosen):
    """What is logged of each layer's router: {name: [n] or [n, ...]} of n tokens, float32 or int.

    It is summed over the tokens of a step. `load`, how many of a token's choices fell on each expert, also moves the
    routers' biases. Whatever else is added here is logged as router/NAME_LAYER, the mean over tokens; it has no
    gradient. scores [n, E] are above 0 or may round to it, and not every router's add up to 1; chosen [n, k].
    """
    hot = chosen[..., None] == jnp.arange(scores.shape[-1])
    return dict(load=hot.sum(1))


def no_routing(m, *leading):
    """`RoutingStats` of no token; `measured` has the dims `leading` before its own."""
    scores = jax.ShapeDtypeStruct((1, m.n_experts), jnp.float32)
    chosen = jax.ShapeDtypeStruct((1, m.experts_per_token), jnp.int32)
    of_a_token = jax.eval_shape(measure, scores, chosen)
    measured = {name: jnp.zeros((*leading, *x.shape[1:])) for name, x in of_a_token.items()}
    return RoutingStats(jnp.float32(0), jnp.float32(0), measured)


def experts_table(cfg, up_std, down_std):
    """Parameters of the routed experts. Every device of dp x tp holds experts of its own or, where experts are fewer, a
    slice of all of them, of which `gather_weight` makes the one that it computes."""
    m = cfg.model
    D, E, F = m.model_dimension, m.n_experts, m.expert_width
    dp, _, tp = cfg.run.n_device_axis

    if dp * tp > E:
        lies = dict(over=EXPERT_AXES, stored_along="d", expert="e")
    else:
        lies = dict(over=(), split=dict(e=EXPERT_AXES))
    active = m.experts_per_token / E
    up, down = dict(e=E, g=BRANCHES[m.activation], d=D, f=F), dict(e=E, d=D, f=F)
    return dict(
        up=weight_param(cfg, up, up_std, "d -> f", active=active, **lies),
        down=weight_param(cfg, down, down_std, "f -> d", active=active, **lies),
    )


def choose_transport(m, platform):
    """What --experts stands for: auto is tiles on CPUs without a capacity, else buckets."""
    if m.experts != "auto":
        return m.experts
    return "tiles" if platform == "cpu" and not m.capacity_factor else "buckets"


def router_logits(p, x):
    """x float32 [n, D] -> [n, E], in full precision on every platform."""
    return jnp.dot(x, p["router"], precision="highest")


def choose_experts(scores, wanted, m, normalize=True):
    """The k experts of each token that it wants most, [n, k], and their gates [n, k]: their scores, divided by their
    sum with `normalize`, times routed_scaling. scores and wanted [n, E].

    The gate of a single expert is its score, as in Switch Transformer (arXiv:2101.03961, equation 2): divided by itself
    it would be 1, and the router would learn nothing from the loss.
    """
    _, chosen = lax.top_k(wanted, m.experts_per_token)
    chosen_scores = jnp.take_along_axis(scores, chosen, -1)
    gates = m.routed_scaling * chosen_scores
    if normalize and m.experts_per_token > 1:
        gates = gates / (chosen_scores.sum(-1, keepdims=True) + 1e-20)
    return chosen, gates


def balance_loss(scores, chosen, m, split):
    """Sequence-level load-balancing loss (DeepSeek-V3, equations 17 to 20), this device's part of sum_b sum_e f P; an
    even load gives 1 per sequence. scores [B, T/tp, E], chosen [B, T/tp, k]. f counts, so it has no gradient."""
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


class Queues(NamedTuple):
    """k*n choices, waiting at their experts. First choices of all tokens come first."""

    choice: jax.Array  # [k*n] the expert
    rank: jax.Array  # [k*n] place in the expert's queue
    length: jax.Array  # [E] of each queue


def queue(chosen, E):
    """`Queues` of the chosen experts [n, k] of E: a token's first choice comes before anyone's second."""
    choice = chosen.T.reshape(-1)  # [k*n]
    hot = choice[:, None] == jnp.arange(E)
    queued = jnp.cumsum(hot.astype(jnp.int32), 0)  # [k*n, E] choices of each expert so far
    own = jnp.take_along_axis(queued, choice[:, None], 1)[:, 0]
    return Queues(choice, rank=own - 1, length=queued[-1])


class Places(NamedTuple):
    """Which choice lies where: k*n choices in `size` places, such as the slots of buckets."""

    place: jax.Array  # [k*n] of each choice; `size`: none
    entry: jax.Array  # [size] the choice that lies there; k*n: nobody's
    source: jax.Array  # [size] the token that made it; n: nobody's


def places(place, size, n):
    """`Places` of choices at `place` [k*n], `size` and more meaning none, of n tokens."""
    choices = len(place)
    place = jnp.minimum(place, size)
    entry = jnp.full(size, choices)
    entry = entry.at[place].set(jnp.arange(choices), mode="drop")
    source = jnp.where(entry < choices, entry % n, n)
    return Places(place, entry, source)


def capacity(m, n, factor):
    """Slots of each expert's bucket for n local tokens: `factor` times the mean load."""
    return min(n, math.ceil(factor * n * m.experts_per_token / m.n_experts))


def first_capacities(m, n, devices):
    """What `capacity` may be in the first round on `devices` of dp x tp, the smallest first. A single device chooses
    among several sizes in each step.

    More devices send their buckets, and these have one size. Nor is there a choice where a layer keeps what it computes
    of a round for its backward pass: it would keep arrays of every size.
    """
    factors = [m.capacity_factor or FIRST_ROUND]
    if devices == 1 and not m.capacity_factor and m.remat not in ("none", "experts"):
        factors = FIRST_ROUNDS
    return tuple(sorted({capacity(m, n, factor) for factor in factors}))


def fill_buckets(queues, C, first, n):
    """`Places` in E buckets of C slots each, for those of rank `first` to first + C in their queues.

    Example: 6 tokens with one choice each, E = 3 experts, C = 2; the queues' lengths are [3, 1, 2].

        token                  0  1  2  3  4  5
        choice                 0  2  0  0  1  2
        rank                   0  0  1  2  0  1
        place, first = 0       0  4  1  6  2  5     6 = E*C: token 3 is the third that wants expert 0
        place, first = 2       6  6  6  0  6  6     the next round has its slot

        slot                   0  1 | 2  3 | 4  5   two for each expert
        entry, first = 0       0  2 | 4  6 | 1  5   6 = k*n: empty
        source, first = 0      0  2 | 4  6 | 1  5   6 = n: empty
    """
    E = len(queues.length)
    rank = queues.rank - first
    fits = (rank >= 0) & (rank < C)
    slot = jnp.where(fits, queues.choice * C + rank, E * C)
    return places(slot, E * C, n)


def sum_leading(x):
    """Sum over the first dim, in float32: addition by addition, since CPUs are slow to reduce a leading dim."""
    total = sum(x.astype(jnp.float32))
    return total.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_rows(k, x, at):
    """The row of each place's token, [size, D] of x [n, D], by the `Places` of the tokens' k choices.

    A place where no choice lies has the row of some token. That does not matter, since the gate of such a place is 0:
    its hidden channels become 0, and so do its gradients. Zeros there would be a pass of their own on a TPU, 0.14 ms
    for 20,480 rows of 768 channels by the compiler for v4.

    The transpose is `sum_choices`, and the other way round. Neither is a scatter-add, which is slower.
    """
    return x.at[at.source].get(mode="clip")


def _take_rows_forward(k, x, at):
    return take_rows(k, x, at), at


def _take_rows_backward(k, at, g):
    return sum_choices(k, g, at), None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_choices(k, rows, at):
    """What lies at the `Places` [size, D], summed over each token's k choices: [n, D]. A choice that lies nowhere adds
    0."""
    of_choices = rows.at[at.place].get(mode="fill", fill_value=0)  # [k*n, D]
    return sum_leading(of_choices.reshape(k, -1, rows.shape[1]))


def _sum_choices_forward(k, rows, at):
    return sum_choices(k, rows, at), at


def _sum_choices_backward(k, at, g):
    return take_rows(k, g, at), None


sum_choices.defvjp(_sum_choices_forward, _sum_choices_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_gates(k, gates, at):
    """Gates [n, k] of the choices at their `Places`, [size, 1]; 0 where none lies."""
    return gates.T.reshape(-1, 1).at[at.entry].get(mode="fill", fill_value=0)


def _take_gates_forward(k, gates, at):
    return take_gates(k, gates, at), at


def _take_gates_backward(k, at, g):
    of_choices = g.at[at.place].get(mode="fill", fill_value=0)
    return of_choices.reshape(k, -1).T, None


take_gates.defvjp(_take_gates_forward, _take_gates_backward)


def routed_experts(p, x, m, split, router):
    """Mixture of routed experts on local tokens. x [B, T/tp, D] -> [B, T/tp, D] and `RoutingStats`.

    `router(p, x, m)`: float32 [n, D] -> scores [n, E], chosen experts [n, k] and their gates [n, k].
    """
    B, t, D = x.shape
    E = m.n_experts
    x = x.reshape(B * t, D)
    with jax.named_scope("route"):
        scores, chosen, gates = router(p, x.astype(jnp.float32), m)
    gates = gates.astype(x.dtype)
    of_tokens = measure(scores, chosen)
    measured = {name: each.sum(0).astype(jnp.float32) for name, each in of_tokens.items()}

    dropped = jnp.int32(0)
    if m.experts == "tiles":
        out = in_tiles(p["experts"], x, chosen, gates, m)
    else:
        out, dropped = in_buckets(p["experts"], x, chosen, gates, m)

    scores = scores.reshape(B, t, E)
    chosen = chosen.reshape(B, t, -1)
    stats = RoutingStats(
        balance_loss=balance_loss(scores, chosen, m, split),
        dropped=dropped.astype(jnp.float32),
        measured=lax.stop_gradient(measured),
    )
    return out.reshape(B, t, D), stats


def in_tiles(weights, x, chosen, gates, m):
    """Experts of all tokens of the devices that share them: each gathers those tokens and computes the choices that
    fall on its own experts; results are summed. x [n, D] -> [n, D]; chosen and gates [n, k]."""
    E = m.n_experts
    x = gather_tokens(x, E)
    chosen = gather_tokens(chosen, E)
    gates = gather_tokens(gates, E)
    n, k = chosen.shape  # of all those devices
    own = len(weights["up"])
    choice = chosen - first_own_expert(E)
    choice = jnp.where((choice >= 0) & (choice < own), choice, own)  # own: another device's

    # 1. Rows of the same expert lie together.
    queues = queue(choice, own)
    begins = group_begins(queues.length)
    size = row_space(n * min(k, own), own)
    is_own = queues.choice < own
    place = jnp.where(is_own, begins[queues.choice] + queues.rank, size)
    # the barrier has a row's index computed once: a CPU would compute it anew for each channel
    at = lax.optimization_barrier(places(place, size, n))
    rows = take_rows(k, x, at)  # [size, D]
    gates = take_gates(k, gates, at)

    # 2. The experts.
    up, down = weights["up"], weights["down"]
    keep = m.remat == "none"
    out = grouped_feed_forward(activate, n * k // E, keep, rows, gates, up, down, begins)

    # 3. Every token adds up what its choices gave, here and on the other devices.
    return scatter_tokens(sum_choices(k, out, at), E)


def in_buckets(weights, x, chosen, gates, m):
    """Experts of this device's tokens, sent in buckets of `capacity` slots for each expert (GShard, arXiv:2006.16668,
    section 2.2). x [n, D] -> [n, D] and the number of choices dropped.

    Choices that find their bucket full are dropped with a --capacity_factor, and add nothing. Without, they go in
    further rounds of fewer slots, as many as any device needs.

    Example: 8,192 tokens choose 2 of 16 experts each, 1,024 choices for each expert where the load is even. The first
    round takes 1,280 for each. Where an expert has 1,600 on some device, two further rounds take 256 each. On a single
    device, the first round takes 1,088 for each where the load is even, and 1,536 where an expert has 1,600; one
    further round takes the rest.
    """
    n = len(x)
    queues = queue(chosen, m.n_experts)
    operands = (queues, x, gates, weights["up"], weights["down"])
    sizes = first_capacities(m, n, lax.axis_size(EXPERT_AXES))
    C = sizes[-1]
    if m.capacity_factor:
        return one_round(C, 0, *operands), (queues.rank >= C).sum()
    more = capacity(m, n, FURTHER_ROUND)
    if len(sizes) == 1:
        return all_rounds(C, more, *operands), jnp.int32(0)
    return in_fitting_buckets(sizes, more, *operands), jnp.int32(0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_fitting_buckets(sizes, more, queues, *operands):
    """`one_round` in the smallest buckets of `sizes` that hold the longest queue; where none do, `all_rounds`.

    Its gradient is a second such choice, in which the rounds are computed anew. jax would keep arrays of every size for
    it, all but one of them zeros.
    """
    return for_longest_queue(sizes, queues, rounds_of(sizes, more), queues, *operands)


def rounds_of(sizes, more):
    """The functions of (queues, x, gates, up, down) among which `in_fitting_buckets` chooses."""
    fitting = [functools.partial(one_round, C, 0) for C in sizes]
    return [*fitting, functools.partial(all_rounds, sizes[-1], more)]


def for_longest_queue(sizes, queues, functions, *arguments):
    """The result of one of the functions: of the first whose size holds the longest queue, or of one more at the end
    where no size does."""
    too_small = jnp.array(sizes) < queues.length.max()
    with at_even_load(0):
        return lax.switch(too_small.sum(), functions, *arguments)


def _in_fitting_buckets_forward(sizes, more, *arguments):
    return in_fitting_buckets(sizes, more, *arguments), arguments


def _in_fitting_buckets_backward(sizes, more, arguments, d_out):
    queues, *operands = arguments

    def gradient_of(rounds):
        def gradient(d_out, queues, *operands):
            _, transpose = jax.vjp(functools.partial(rounds, queues), *operands)
            return transpose(d_out)

        return gradient

    gradients = [gradient_of(rounds) for rounds in rounds_of(sizes, more)]
    return None, *for_longest_queue(sizes, queues, gradients, d_out, *arguments)


in_fitting_buckets.defvjp(_in_fitting_buckets_forward, _in_fitting_buckets_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def all_rounds(C, more, queues, *operands):
    """`one_round` of C ranks, and further ones of `more` ranks each while there are choices left on any device.

    Its gradient is a second such loop, in which each further round is computed anew. Both begin with what the first
    round gave, and only where there is a further one: XLA would otherwise write zeros and add them, 0.03 s of 0.92
    of a step of `moe-sparse` on v5e in the forward pass alone, by the TPU compiler.
    """
    out, _ = _all_rounds_forward(C, more, queues, *operands)
    return out


def _all_rounds_forward(C, more, queues, *operands):
    out, transpose = jax.vjp(functools.partial(one_round, C, 0, queues), *operands)

    def add(run, sums):
        [out] = sums
        return [out + run(*operands)]

    [out] = add_further(C, more, queues, add, [out])
    return out, (transpose, queues, operands)


def _all_rounds_backward(C, more, kept, d_out):
    transpose, queues, operands = kept

    def add(run, sums):
        _, transpose = jax.vjp(run, *operands)
        return [total + own for total, own in zip(sums, transpose(d_out))]

    return None, *add_further(C, more, queues, add, transpose(d_out))


all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def add_further(C, more, queues, add, sums):
    """What `add(run, sums)` makes of the sums with one round after another, each the function `run` of the operands,
    from rank C on; the sums as they are where no device has choices left. Those of several rounds are in float32."""
    left = jnp.maximum(queues.length.max() - C, 0)
    rounds = largest(-(-left // more), EXPERT_AXES)

    def add_all(sums):
        def add_one(r, wide):
            run = functools.partial(one_round, more, C + r * more, queues)
            return add(run, wide)

        wide = [x.astype(jnp.float32) for x in sums]
        with at_even_load(1):  # once it is here
            wide = lax.fori_loop(0, rounds, add_one, wide)
        return [total.astype(x.dtype) for total, x in zip(wide, sums)]

    with at_even_load(0):
        return lax.cond(rounds > 0, add_all, list, list(sums))


def one_round(C, first, queues, x, gates, up, down):
    """Experts of the choices of rank `first` to first + C. x [n, D] -> [n, D]; gates [n, k]."""
    n, D = x.shape
    E, k = len(queues.length), gates.shape[1]
    at = fill_buckets(queues, C, first, n)

    # 1. Tokens go into the buckets, and the buckets to the devices of their experts.
    buckets = take_rows(k, x, at)  # [E*C, D]
    buckets = to_experts(buckets.reshape(E, C, D))  # [E/(dp tp), dp tp, C, D]
    buckets = checkpoint_name(buckets, "experts")

    # 2. So do the gates: where they weigh the hidden channels, no pass, forward or back, needs the experts' outputs.
    gates = take_gates(k, gates, at).reshape(E, C, 1)

    # 3. The experts.
    h = activate(einsum("epcd,egdf->epcgf", buckets, up, kept_by="experts"))
    gates = to_experts(gates)  # [E/(dp tp), dp tp, C, 1]
    h = jnp.einsum("epcf,epc->epcf", h, gates[..., 0])
    out = einsum("epcf,edf->epcd", h, down, kept_by=None)

    # 4. Outputs come back, and every token adds up those of its choices.
    out = from_experts(out).reshape(E * C, D)
    return sum_choices(k, out, at)
