"""The costs of one layer on a device, for the forward and backward passes of one microbatch."""

from typing import NamedTuple

import model
from architectures import LayerCost, architecture
from architectures.experts import choose_transport, first_capacities
from kernels import attention, grouped
from planning.step import Step, expert_axes, transfers


class Layer(NamedTuple):
    """A kind of layer, and how --remat and the kernels compute it. Channels are per token."""

    step: Step
    cost: LayerCost
    recomputes: bool  # whether the backward pass computes the forward pass again
    in_tiles: bool  # whether experts are computed in tiles, not in buckets
    keeps_experts: bool  # whether the inputs of routed experts are kept, rather than sent again
    keeps_attention: bool  # whether the attention kernel's output is kept
    keeps_scores: bool  # whether the attention kernel keeps scores, rather than recomputes them
    blocks: int  # of queries in attention
    scores: float  # numbers in attention's scores
    all_scores: float  # operations of attention's products in all passes
    rows: int  # rows that routed experts multiply, with empty ones, where the load is even
    expert_devices: int  # devices over which all experts are distributed
    products: float  # channels of the results of products, which --remat dots keeps
    computed: float  # channels of all intermediates except those of routed experts
    in_experts: float  # channels of the intermediates of routed experts
    most_in_experts: float  # the same of the largest load for which there is memory in any case

    @property
    def megatron(self):
        """Whether --sequence_parallel is megatron."""
        return self.step.cfg.model.sequence_parallel == "megatron"


def layer_of(step, kind):
    """The `Layer` of a kind of layers in a `Step`."""
    cfg = step.cfg
    m = cfg.model
    arch = architecture(m.architecture)
    cost = arch.layer_cost(m, kind)
    recomputes = m.remat != "none"
    in_tiles = choose_transport(m, step.machine.kernels) == "tiles"

    kernel = attention.ATTENTION[attention.choose_kernel(m, step.machine.kernels)]
    scores = step.tokens * m.T * (m.n_head / step.mesh["tp"]) * kernel.score_share(m)
    forward, *backward = [
        2 * scores * (keys * cost.query_channels + values * cost.value_channels)
        for keys, values in kernel.products.values()
    ]
    # the gradients of two products take twice their operations; a kernel that needs more recomputes scores
    keeps_scores = sum(backward) <= 2 * forward
    may_keep = model.keeps_attention(cfg, step.machine.platform)
    keeps_attention = may_keep and recomputes and not keeps_scores
    again = recomputes and not keeps_attention

    has_experts = kind == arch.last and m.n_experts
    rows, most_rows, devices = expert_rows(step, in_tiles) if has_experts else (0, 0, 0)
    products, computed = channels(step, cost)
    per_row = (cost.branches + 1) * m.expert_width + 2 * m.model_dimension
    return Layer(
        step=step,
        cost=cost,
        recomputes=recomputes,
        in_tiles=in_tiles,
        keeps_experts=m.remat == "experts" and not in_tiles,
        keeps_attention=keeps_attention,
        keeps_scores=keeps_scores,
        blocks=kernel.blocks(m),
        scores=scores,
        all_scores=forward * (1 + again) + sum(backward),
        rows=rows,
        expert_devices=devices,
        products=products,
        computed=computed,
        in_experts=rows / step.own_tokens * per_row,
        most_in_experts=most_rows / step.own_tokens * per_row,
    )


def expert_rows(step, in_tiles):
    """(rows that a device's routed experts multiply where the load is even, those of the largest first round, devices
    over which all experts are distributed)."""
    m = step.cfg.model
    E = m.n_experts
    tokens = int(step.own_tokens)
    devices = min(E, step.mesh["dp"] * step.mesh["tp"])
    if not in_tiles:
        sizes = first_capacities(m, tokens, step.mesh["dp"] * step.mesh["tp"])
        return E * sizes[0], E * sizes[-1], devices
    each = tokens * devices * m.experts_per_token // E
    rows = E // devices * grouped.padded(each)
    return rows, rows, devices


def channels(step, cost):
    """Channels per token outside routed experts: (of products, of all intermediates)."""
    m, tp = step.cfg.model, step.mesh["tp"]
    D = m.model_dimension
    megatron = m.sequence_parallel == "megatron"
    added = D * (tp if megatron else 1)  # channels that are added to the residual
    products = cost.products + cost.branches * cost.ffn_width + added
    # further intermediates: activations of the feed-forward, norms and residuals, gathered arrays, attention's output
    gathered = cost.gathered + D * (megatron and cost.ffn_width > 0)
    others = cost.ffn_width + added + 4 * D + gathered * tp + m.n_head * cost.value_channels
    return products, products + others


def flops(layer):
    """Operations of matrix products, including recomputed ones. A product [a, b] x [b, c] takes 2abc."""
    s, cost = layer.step, layer.cost
    m = s.cfg.model
    out = 2 * s.own_tokens * m.model_dimension * cost.ffn_width
    projections = 2 * s.own_tokens * cost.own_weights + (cost.branches + 1) * out
    projections += 2 * s.tokens * (m.n_head / s.mesh["tp"]) * cost.head_weights
    # arXiv:2006.16668, section 2.2
    experts_out = 2 * layer.rows * m.model_dimension * m.expert_width
    experts_into = cost.branches * experts_out

    # a product's two gradients take twice its own operations
    n = 3 * (projections + experts_into + experts_out) + layer.all_scores
    # recomputation stops before the layer's last product
    if layer.recomputes and not layer.keeps_experts:
        n += experts_into
    if m.remat not in ("none", "dots"):
        n += projections - out
    return n


def sent_by(layer, n):
    """[`Transfer`] of a layer that runs n times in a step.

    Tensor and sequence parallelism: arXiv:2205.05198, section 4.2.2, or arXiv:2309.14509, section 3.1. Every collective
    runs in the forward pass, again where that is recomputed, and its transpose in the backward pass.
    """
    s, cost, again = layer.step, layer.cost, layer.recomputes
    m = s.cfg.model
    channel = s.tokens * s.width  # bytes
    # bytes of the residual: megatron gathers it for attention and the feed-forward, and sums what these add to it
    attention_out = channel * m.model_dimension * layer.megatron
    feed_forward = attention_out * (cost.ffn_width > 0)
    gathered = channel * cost.gathered + feed_forward
    exchanged = channel / s.mesh["tp"] * m.n_head * cost.value_channels
    if layer.megatron:
        exchanged = 0
    choices = 4 * s.B * m.n_experts if layer.rows else 0  # of each sequence, for the balance
    found = []
    for collective, whole, times in (
        ("all-gather", gathered, 1 + again),
        ("all-gather", attention_out + feed_forward, 1),
        ("reduce-scatter", gathered, 1),
        ("reduce-scatter", attention_out + feed_forward, 1),
        ("reduce-scatter", attention_out, again),
        ("all-to-all", exchanged, 2 + again),
        ("all-reduce", choices, 1 + again),
        ("all-reduce", 4 * s.tokens * cost.summed, 2 + again),
    ):
        found += transfers(s, collective, "tp", whole, n * times)
    if layer.rows:
        found += tokens_sent(layer, n)
    return found


def tokens_sent(layer, n):
    """[`Transfer`] of the collectives that take tokens to their experts and back (arXiv:2006.16668, section 3.2)."""
    s, again = layer.step, layer.recomputes
    m = s.cfg.model
    if layer.in_tiles:
        tokens = s.own_tokens * layer.expert_devices
        choices = tokens * m.experts_per_token
        residual = tokens * m.model_dimension * s.width
        gates = choices * s.width
        rows = (
            ("all-gather", residual, 2 + again),
            ("all-gather", gates + 4 * choices, 1 + again),  # with the numbers of the experts
            ("reduce-scatter", residual, 2),
            ("reduce-scatter", gates, 1),
        )
    else:
        # bytes of one number for each slot of the buckets, such as its gate
        slots = layer.rows * s.width
        into_again = again and not layer.keeps_experts
        rows = (
            ("all-to-all", slots * m.model_dimension, 4 + into_again),
            ("all-to-all", slots, 2 + again),
        )
    apart, _ = expert_axes(m.n_experts, s.mesh)
    found = []
    for collective, whole, times in rows:
        found += transfers(s, collective, apart, whole, n * times, 1, layer.expert_devices)
    return found


def attention_kept(layer):
    """Channels that the attention kernel keeps for the backward pass: its output, and a float32 sum for each head."""
    if not layer.keeps_attention:
        return 0
    return layer.step.cfg.model.n_head * (layer.cost.value_channels + 4 / layer.step.width)


def scores_kept(layer):
    """The same of scores and what is made of them, where --remat none keeps all."""
    if not layer.keeps_scores:
        return 0
    return layer.step.fit.scores_kept * layer.scores / layer.step.own_tokens


class ScoreTraffic(NamedTuple):
    """Bytes that attention reads and writes in all passes of a layer because its scores are in memory."""

    products: float = 0.0  # in matrix products
    others: float = 0.0  # in all other operations


def score_traffic(layer):
    """The `ScoreTraffic` of `kernels/attention.py: attend` and `blockwise_attention` on a GPU, as its compiler divides
    them into operations.

    Forward, a product writes the scores in float32. One pass reads them for their largest, another for the weights,
    their exponentials in --model_dtype, which the product with the values reads. A recomputation makes both passes
    twice, for the output and for the gradients. Backward, a product writes the gradients of the weights, a pass makes
    those of the scores of them and of the scores, and three products read these or the weights.

    Each block of queries meets the keys and values up to its own end, and makes a copy of these. The gradients of each
    copy are read and written once more, to be added to those of other blocks.
    """
    s, cost = layer.step, layer.cost
    if not layer.keeps_scores or s.machine.platform != "gpu":  # other compilers were not looked at
        return ScoreTraffic()
    m = s.cfg.model
    again = layer.recomputes
    products = 4 + s.width + again * (4 + s.width) + 4 * s.width
    others = 8 + s.width + 2 * again * (8 + s.width) + 4 + 2 * s.width
    # bytes of the key and the value of a head, or of its query and its output
    head = s.tokens * (cost.query_channels + cost.value_channels) * s.width
    queries = m.n_head / s.mesh["tp"] * head
    keys = m.kv_heads / s.mesh["tp"] * head
    met = keys * (layer.blocks + 1) / 2
    copied = 2 * (met - keys)  # read and written; the last block takes all keys as they are
    return ScoreTraffic(
        products=products * layer.scores + (3 + again) * (met + queries),
        others=others * layer.scores + (2 + 2 * again) * copied,
    )


def kept(layer):
    """Channels that a layer keeps for the backward pass, except for those of `attention_kept` and `scores_kept`."""
    s, fit = layer.step, layer.step.fit
    m = s.cfg.model
    if m.remat == "dots":
        return layer.products + m.model_dimension
    if m.remat != "none":
        per_row = m.model_dimension + layer.cost.branches * m.expert_width
        in_experts = layer.keeps_experts * layer.rows / s.own_tokens * per_row
        return m.model_dimension + in_experts
    return fit.channels_kept * layer.computed + fit.expert_channels_kept * layer.in_experts
