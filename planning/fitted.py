"""Constants of the formulas of planning/costs.py that no theory gives: they are fitted to what compilers report.

TPU and FUSED_TPU were fitted to the cycles and the peak memory that the TPU compiler reports of 31 train steps: `moe1b`
and models like it with other widths, meshes, --remat and --fsdp. The GPU compiler reports no times. There, memory
traffic was fitted to the bytes that the operations of 44 compiled steps read and write (`planning/program.py`), that of
logits and of --remat none to five later ones, and memory to its peak in the first, with --remat none in four more.
dev/log.md says how far off they are.
"""

from typing import NamedTuple


class Fitted(NamedTuple):
    """The constants for one compiler, factors in the formulas."""

    # Memory traffic: bytes read and written
    intermediates: float  # per byte of a layer's intermediates, for all that is no matrix product
    weights: float  # per weight of a layer, each time that it gets a gradient
    product_intermediates: float  # of matrix products, per byte of intermediates
    product_weights: float  # of matrix products, per weight and gradient
    logits: float  # per logit
    kept: dict  # {--remat: per byte that it keeps for the backward pass}
    # Memory
    logit_copies: float  # copies of the logits that are held at once
    layer_copies: float  # of a layer's intermediates, in its backward pass
    layer_copies_kept: float  # of the same, with --remat none
    expert_copies: float  # of the intermediates of routed experts, in the backward pass
    channels_kept: float  # that --remat none keeps, per channel of intermediates
    expert_channels_kept: float  # the same of routed experts
    scores_kept: float  # numbers that it keeps per score, where the attention kernel keeps scores
    embedded_copies: float  # copies of the activations of all microbatches that a device embeds


TPU = Fitted(
    intermediates=3.7,
    weights=12.0,
    product_intermediates=5.2,
    product_weights=22.0,
    logits=47.0,
    kept=dict(full=29.0, attention=29.0, experts=26.0, dots=26.0, none=11.0),
    logit_copies=1.25,
    layer_copies=1.4,
    layer_copies_kept=1.4,
    expert_copies=1.4,
    channels_kept=1.6,
    expert_channels_kept=2.5,
    scores_kept=0.0,  # no TPU kernel keeps scores
    embedded_copies=0.0,
)

# A TPU whose compiler forms the operands of a product inside it (`Chip.fuses`), so that fewer are written and read.
FUSED_TPU = TPU._replace(
    intermediates=2.8,
    weights=9.0,
    logits=35.0,
    kept=dict(full=29.0, attention=29.0, experts=6.0, dots=6.0, none=3.0),
    logit_copies=1.0,
)

# Either of them where no loop stacks what layers keep (`utils.Config.has_loop`), so that `kept` is 0: fitted to the
# memory of `moe1b` on 32 chips of v4 with --remat none. With attention it is too low: `moe-sparse` on v5e:2x4 in one
# microbatch needs 9.6 GiB by the compiler and 5.6 by these.
WITHOUT_LOOP = dict(
    kept=dict(full=0.0, attention=0.0, experts=0.0, dots=0.0, none=0.0),
    channels_kept=0.85,
    expert_channels_kept=0.85,
)

GPU = Fitted(
    intermediates=4.8,
    weights=25.0,
    product_intermediates=0.14,
    product_weights=1.5,
    logits=10.0,  # in float32 read twice, their gradient written in bfloat16
    kept=dict(full=9.6, attention=9.6, experts=9.6, dots=9.6, none=1.0),
    logit_copies=1.44,
    layer_copies=1.3,
    layer_copies_kept=1.0,
    expert_copies=3.2,
    channels_kept=0.9,
    expert_channels_kept=0.9,
    scores_kept=4.2,
    embedded_copies=6.0,
)

# Bytes read and written per byte of the matrices that Muon works on and of their blocks, on any machine.
MUON_TRAFFIC = 10.0

# Measured on one H200 (dev/log.md): the seconds that launching an operation takes, and how many operations a layer and
# its gradient launch.
LAUNCH = 2e-6
LAUNCHES = 180

# How many times longer attention kernels take than other products of as many operations. Half of the peak is assumed
# on TPUs, which report no time of kernels. An H200 reached a third, of a peak that is cut to 3/4 already: 29% to 40% in
# four shapes of heads, and 32% in each of two traced steps, `moe-1.6b` and `gpt2-124m` (dev/log.md).
ATTENTION_ON_TPU = 2
ATTENTION_ON_GPU = 2.25


def fitted_to(machine, has_loop):
    """The `Fitted` constants of a machine; CPUs have those of TPUs, and no times. has_loop: of the step's Config."""
    if machine.platform == "gpu":
        return GPU
    fit = FUSED_TPU if machine.chip.fuses else TPU
    return fit if has_loop or machine.platform == "cpu" else fit._replace(**WITHOUT_LOOP)


def attention_slowdown(chip):
    """How many times longer attention kernels take on a chip than other products of as many operations."""
    return {"tpu": ATTENTION_ON_TPU, "gpu": ATTENTION_ON_GPU}.get(chip.platform, 1)
