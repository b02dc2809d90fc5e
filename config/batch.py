"""The batch: how its sequences are divided among replicas, accumulation steps and microbatches."""

import math

from config.checks import check
from runtime.chips import chip_of
from runtime.messages import UserError
from utils import flatten, replace

# How a replica's share of the global batch is divided, which changes no more than rounding.
SPLIT = {"train_batch_size", "accumulation_steps", "microbatches", "microbatch_size"}
# Tokens of a microbatch that fill a single GPU. An H200 trained `gpt2-124m` 14% faster with --remat none than with
# attention in a microbatch of so many (dev/log.md).
FILLS_GPU = 48 * 1024
# A TPU divides its batch until all that layers keep fits, into microbatches of at least this many tokens. Products of
# fewer are slow, so it computes some things twice instead. `moe-sparse` on v5e:2x4 takes 0.74 s a step in four
# microbatches of 8,192 tokens, kept whole, and 0.92 s in one of 32,768, by the compiler (dev/log.md).
FILLS_TPU = 8 * 1024


def divided(flags, found):
    """{flag: value} of the global batch, divided among replicas (dp), accumulation steps and microbatches. What was
    given stays as it is. The mesh is settled before. Raises UserError.

    What a training learns depends on its global batch. That is the same on every mesh, and the rest follows from it:
    128 sequences a step on (8, 1, 1) are 16 on each replica, in 4 microbatches of --microbatch_size 4. Where
    activations of 16 sequences do not fit in a device, they are 2 accumulation steps of 8 sequences.

    On a single GPU and on TPUs that includes --remat (`fill_gpu`, `in_one_microbatch`, `keeps_all`).
    """
    cfg, given = flags
    dp = cfg.run.n_device_axis[0]
    accumulation = cfg.run.accumulation_steps
    size = cfg.data.train_batch_size
    is_size_given = size and "train_batch_size" in given
    if is_size_given and "global_batch_size" not in given:
        cfg = replace(cfg, global_batch_size=size * dp * accumulation)
    total = cfg.data.global_batch_size
    check_global_batch(cfg, given, found.resumes)
    steps = 0  # as many as it takes
    if is_size_given:
        steps = total // dp // size
    elif "accumulation_steps" in given:
        steps = accumulation
    if found.memory_share and is_one_gpu(cfg, found):
        parts = fill_gpu(cfg, given, steps, found.memory_share)
    elif is_tpu(found) and (whole := in_one_microbatch(cfg, given, steps, found.memory_share)):
        parts = whole
    elif steps:
        parts = cut_replica(cfg, given, steps)
    else:
        parts = fit_memory(cfg, given, found.memory_share)
    if "remat" not in given | parts.keys() and keeps_all(cfg, parts, found):
        parts |= dict(remat="none")
    return dict(global_batch_size=total) | parts


def is_tpu(found):
    """Whether a run is on TPUs that are known."""
    chip = chip_of(found.device_kind)
    return chip is not None and chip.platform == "tpu" and found.memory_share is not None


def in_one_microbatch(cfg, given, steps, memory_share):
    """{flag: value} of a TPU's sequences with --remat none, in accumulation steps of one microbatch, for which no loop
    is needed (`utils.Config.has_loop`): the fewest of at least FILLS_TPU tokens that fit. {} where none do, or flags or
    the mesh say otherwise. steps: of accumulation; 0: at least those of the preset."""
    dp, pp, tp = cfg.run.n_device_axis
    total = cfg.data.global_batch_size
    if pp > 1 or given & {"microbatches", "microbatch_size", "remat"}:
        return {}
    own = total // dp  # sequences of a replica
    fewest = steps or math.gcd(cfg.run.accumulation_steps, own)
    most = fewest if steps else max(fewest, own * cfg.model.T // tp // FILLS_TPU)
    whole = replace(cfg, remat="none", microbatch_size=total)
    for n in divisors(own):
        if n % fewest or n > most:
            continue
        parts = cut_replica(whole, given, n)
        fits = checked_share(whole, parts, memory_share) <= 1
        if fits and not replace(whole, **parts).has_loop("tpu"):
            return parts | dict(remat="none")
    return {}


def keeps_all(cfg, parts, found):
    """Whether TPUs compute nothing twice (--remat none) with these parts of a batch: where no loop stacks what layers
    keep, and all of it fits. `moe1b` takes 0.28 s a step for 0.34 on 32 chips of v4, by the compiler (dev/log.md)."""
    if not is_tpu(found):
        return False
    cfg = replace(cfg, remat="none", **parts)
    return not cfg.has_loop("tpu") and found.memory_share(cfg) <= 1


def is_one_gpu(cfg, found):
    """Whether a run is on one device, a GPU that is known."""
    chip = chip_of(found.device_kind)
    return chip is not None and chip.gpu and math.prod(cfg.run.n_device_axis) == 1


def fill_gpu(cfg, given, steps, memory_share):
    """{flag: value} of a single GPU's sequences, in microbatches as large as its memory allows, since products of few
    tokens leave a large GPU idle. Where FILLS_GPU tokens of one, or all of the batch, fit with --remat none, nothing is
    computed twice; where they fit with dots, few products are. steps: of accumulation; 0: the fewest that fit."""
    for remat in () if "remat" in given else ("none", "dots"):
        keeps_more = replace(cfg, remat=remat)
        parts = largest_microbatches(keeps_more, given, steps, memory_share)
        tokens = parts["train_batch_size"] // parts["microbatches"] * cfg.model.T
        is_full = tokens >= min(FILLS_GPU, cfg.data.global_batch_size * cfg.model.T)
        if is_full and checked_share(keeps_more, parts, memory_share) <= 1:
            return parts | dict(remat=remat)
    return largest_microbatches(cfg, given, steps, memory_share)


def largest_microbatches(cfg, given, steps, memory_share):
    """`fill_gpu` for one value of --remat."""
    total = cfg.data.global_batch_size
    if not steps:
        if "microbatch_size" not in given:
            cfg = replace(cfg, microbatch_size=total)
        return fit_memory(cfg, given, memory_share)
    sizes = divisors(total // steps)
    if "microbatch_size" in given:
        sizes = [cfg.data.microbatch_size]
    for size in reversed(sizes):
        parts = cut_replica(replace(cfg, microbatch_size=size), given, steps)
        if checked_share(cfg, parts, memory_share) <= 1:
            break
    return parts


def checked_share(cfg, parts, memory_share):
    """`memory_share` of `cfg` with these parts. The formulas take for granted that all fits together, so that is
    checked before. Raises UserError."""
    cfg = replace(cfg, **parts)
    check(cfg)
    return memory_share(cfg)


def fit_memory(cfg, given, memory_share):
    """`cut_replica` into the fewest accumulation steps with which a step fits in a device's memory, at least those of
    the preset. memory_share: of `Found`."""
    dp, pp, _ = cfg.run.n_device_axis
    own = cfg.data.global_batch_size // dp  # sequences of a replica
    fewest = math.gcd(cfg.run.accumulation_steps, own // pp)
    tried = {}  # {share of the memory that it needs: its parts}
    for accumulation in divisors(own // pp):
        if accumulation % fewest:
            continue
        try:
            parts = cut_replica(cfg, given, accumulation)
        except UserError:  # fewer sequences than --microbatches, where that was given
            if tried:
                break
            raise
        share = checked_share(cfg, parts, memory_share) if memory_share else 0
        tried.setdefault(share, parts)
        if share <= 1:
            return parts
    # Nothing fits. More steps than these save next to nothing, and each takes time.
    return next(parts for share, parts in tried.items() if share <= 1.05 * min(tried))


def check_global_batch(cfg, given, resumes):
    """Raises UserError where the global batch cannot be divided as the mesh and the flags say."""
    d = cfg.data
    total = d.global_batch_size
    dp, pp, tp = cfg.run.n_device_axis
    whose, other = f"--preset {cfg.run.preset}", ""
    if resumes:
        whose, other = f"run {cfg.run.name}", ", or give another --name"
    elif "global_batch_size" in given:
        whose = "--global_batch_size"
    if total % (dp * pp):
        mesh = f"dp x pp = {dp * pp} of the mesh (dp, pp, tp) = ({dp}, {pp}, {tp})"
        said = f"{whose} has {total} sequences a step, which {mesh} must divide"
        if whose == "--global_batch_size":
            said = f"{whose} {total}: must be a multiple of {mesh}"
        raise UserError(f"{said}; give {even_mesh(cfg)}{other}.")
    parts = {
        "train_batch_size": d.train_batch_size,
        "accumulation_steps": cfg.run.accumulation_steps,
    }
    parts = {flag: n for flag, n in parts.items() if n and flag in given}
    product = dp * math.prod(parts.values())
    exact = len(parts) == 2
    if total % product or (exact and total != product):
        flag, *_ = parts
        words = " x ".join(map(str, [*parts.values(), dp]))
        must = "be" if exact else "divide"
        raise UserError(
            f"--{flag} {parts[flag]}: {words} (dp) is {product} but must {must} the {total} sequences a step that "
            f"{whose} has; leave the flag out{other}."
        )


def even_mesh(cfg):
    """Flags of a mesh like that of `cfg` whose dp x pp divides the global batch: on all of its devices where heads and
    sequence can be divided among more, else on fewer."""
    total = cfg.data.global_batch_size
    dp, pp, tp = cfg.run.n_device_axis
    n = dp * pp * tp
    if total % pp:
        dp, pp = dp * pp, 1
    even = math.gcd(dp, total // pp)
    rest = dp // even * tp
    if cfg.model.n_head % rest == 0 and cfg.model.T % rest == 0:
        dp, tp = even, rest
    else:
        dp = max(size for size in range(1, dp + 1) if total % (size * pp) == 0)
    mesh = f"--n_device_axis {dp} {pp} {tp}"
    used = dp * pp * tp
    return mesh if used == n else f"--n_devices {used} {mesh}"


def cut_replica(cfg, given, accumulation):
    """{flag: value} of a replica's sequences of an accumulation step, in the fewest microbatches of at most
    microbatch_size sequences that pp divides. Raises UserError where what was given does not go together."""
    d = cfg.data
    dp, pp, _ = cfg.run.n_device_axis
    parts = dp * accumulation
    train = d.global_batch_size // parts
    fitting = [n for n in divisors(train) if n % pp == 0]
    micro = d.microbatches if "microbatches" in given else 0
    if not micro:
        small = [n for n in fitting if train // n <= d.microbatch_size]
        micro = min(small, default=max(fitting, default=pp))
    if micro not in fitting:
        those = ["microbatches", "train_batch_size", "accumulation_steps"]
        flag = next((flag for flag in those if flag in given), "n_device_axis")
        could = ", ".join(map(str, fitting[:5])) or "no number"
        raise UserError(
            f"--{flag} {flatten(cfg)[flag]}: a replica's {train} sequences cannot be divided into {micro} microbatches "
            f"on pp {pp} stages; {could} would do."
        )
    if d.val_batch_size % pp:
        raise UserError(
            f"must be a multiple of the pp {pp} stages",
            flag="val_batch_size",
            value=d.val_batch_size,
        )
    return dict(train_batch_size=train, microbatches=micro, accumulation_steps=accumulation)


def divisors(n):
    """The numbers that divide n, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]
