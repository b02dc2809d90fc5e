"""Which flags fit together: `check` refuses the rest, each in a sentence. Before it config/settle.py settles them."""

import math
import os
import re

import architectures
from config.flags import compare
from runtime import chips, platforms
from runtime.files import is_remote
from runtime.launchers import tasks_of_slurm
from runtime.messages import UserError, common_errors

MOST_PROFILED = 50  # steps; longer traces are too large for the programs that show them


def check(cfg):
    """Raises UserError where flags of a completed configuration do not fit each other."""
    check_multiples(cfg)
    if 0 < cfg.data.val_tokens < cfg.model.T:
        said = f"must be 0, for all, or at least a sequence of --T {cfg.model.T} tokens"
        raise UserError(said, flag="val_tokens", value=cfg.data.val_tokens)
    name = cfg.model.architecture
    only = architectures.flags_without_choice(name)
    compare(cfg, only, only.keys(), "{architecture} has no such choice, only", architecture=name)
    architectures.architecture(name).check(cfg)
    check_attention(cfg)
    check_experts(cfg.model)
    check_schedule(cfg.optimizer)
    check_names(cfg)
    profiled_steps(cfg.run)


def check_multiples(cfg):
    """Raises UserError where something must divide a flag and does not."""
    m = cfg.model
    dp, pp, tp = cfg.run.n_device_axis
    rounds = cfg.run.pp_interleave
    # megatron splits the hidden channels of a dense feed-forward over tp, and those of all shared experts together
    parts = tp if m.sequence_parallel == "megatron" else 1
    has_dense = not m.n_experts or m.first_layers or m.layers_per_block > 1
    common = math.gcd(parts, m.n_shared)
    of_each = f"tp / {common}" if common > 1 else "tp"
    expert_dim = "expert_dim" if m.expert_dim else "ffn_dim"
    megatron = "with --sequence_parallel megatron"
    multiples = [  # (flag, its value, what must divide it, in words)
        ("blocks", m.blocks, pp * rounds, "pp" if rounds == 1 else "pp x pp_interleave"),
        ("n_experts", m.n_experts, m.n_groups, "n_groups"),
        ("n_head", m.n_head, tp, "tp"),
        ("T", m.T, tp, "tp"),
        ("ffn_dim", m.ffn_width, parts if has_dense else 1, f"tp {megatron}"),
        ("rope_dim", m.rope_dim, 2, "2, since channels are rotated in pairs,"),
        ("model_dimension", m.model_dimension, 1 if m.head_dim else m.n_head, "n_head"),
        (expert_dim, m.expert_width, parts // common, f"{of_each} {megatron}"),
    ]
    for flag, value, by, words in multiples:
        if value % by:
            raise UserError(f"must be a multiple of {words} ({by})", flag=flag, value=value)
    n = dp * tp
    if m.n_experts % n and n % m.n_experts:
        raise UserError(
            f"must divide dp x tp, {n}, or be divided by it", flag="n_experts", value=m.n_experts
        )


def check_attention(cfg):
    """Raises UserError where there is no such attention kernel, or it does not run this model or on these devices."""
    from kernels import attention  # here: it imports jax, which parsing does without

    name = cfg.model.attention
    if name == "auto":
        return
    kernels = attention.ATTENTION
    if name not in kernels:
        raise UserError(f"must be one of auto, {', '.join(kernels)}", flag="attention", value=name)
    kernel = kernels[name]
    channels = attention.channels(cfg.model)
    if cfg.model.T % kernel.multiple:
        raise UserError(
            f"must be a multiple of {kernel.multiple} for {{attention}}",
            flag="T",
            value=cfg.model.T,
            attention=name,
        )
    if channels > kernel.channels:
        raise UserError(
            f"has room for {kernel.channels} channels of a head's key and value, and this model "
            f"has {channels}; auto takes the best that fits",
            flag="attention",
            value=name,
        )
    if not kernel.takes(cfg.model.model_dtype):
        raise UserError(
            f"multiplies in {' and '.join(kernel.dtypes)}, not in {{model_dtype}}; auto takes the best that does",
            flag="attention",
            value=name,
            model_dtype=cfg.model.model_dtype,
        )
    if platform_of(cfg) not in kernel.platforms:
        there = ", ".join(kernel.platforms)
        raise UserError(
            f"is for {there}; auto takes the best for the devices", flag="attention", value=name
        )


def platform_of(cfg):
    """The platform that a run is for: that of --plan's machine, else that of the devices here."""
    if cfg.plan.plan:
        machine = chips.parse_machine(cfg.plan.plan)
        return machine[1].platform if machine else "tpu"
    return platforms.platform()


def check_experts(m):
    """Raises UserError where experts and their groups do not fit together."""
    E, k = m.n_experts, m.experts_per_token
    if k > E:
        said = "cannot be more than there are, {n_experts}"
        raise UserError(said, flag="experts_per_token", value=k, n_experts=E)
    if m.n_groups > 1 and E < 2 * m.n_groups:
        said = "each must have two experts of {n_experts}"
        raise UserError(said, flag="n_groups", value=m.n_groups, n_experts=E)
    if m.k_groups > m.n_groups or k > m.k_groups * E // m.n_groups:
        said = "must be at most {n_groups} and hold {experts_per_token}"
        named = dict(n_groups=m.n_groups, experts_per_token=k)
        raise UserError(said, flag="k_groups", value=m.k_groups, **named)
    if m.experts == "tiles" and m.capacity_factor:
        said = "has no buckets for {capacity_factor}; leave one of them out"
        factor = f"{m.capacity_factor:g}"
        raise UserError(said, flag="experts", value=m.experts, capacity_factor=factor)


def check_schedule(o):
    """Raises UserError where the parts of the learning rate's schedule do not fit together."""
    room = o.end_steps - o.warmup_steps
    ends = dict(warmup_steps=o.warmup_steps, end_steps=o.end_steps)
    if room <= 0:
        said = "must be less than {end_steps}"
        raise UserError(said, flag="warmup_steps", value=o.warmup_steps, end_steps=o.end_steps)
    if o.decay_steps and o.schedule != "wsd":
        said = "{schedule} has none, only wsd does; leave the flag out"
        raise UserError(said, flag="decay_steps", value=o.decay_steps, schedule=o.schedule)
    if o.decay_steps > room:
        said = f"must be at most {room}, the steps from {{warmup_steps}} to {{end_steps}}"
        raise UserError(said, flag="decay_steps", value=o.decay_steps, **ends)


def check_names(cfg):
    """Raises UserError where no run directory can have the name or the place that was given."""
    r = cfg.run
    if is_remote(r.output_dir) and not r.output_dir.startswith("gs://"):
        raise UserError(
            "must be a local folder or gs:// address", flag="output_dir", value=r.output_dir
        )
    if not re.fullmatch(r"[\w.+=@-]+", r.name) or set(r.name) == {"."}:
        raise UserError(f"--name {r.name!r}: must be of letters, digits and . _ - + = @ only.")


def profiled_steps(run):
    """The first and the last step that --profile names; (1, 0), none, without it. Raises UserError."""
    if not run.profile:
        return 1, 0
    named = re.fullmatch(r"(\d{1,9}):(\d{1,9})", run.profile, re.ASCII)
    first, last = map(int, named.groups()) if named else (0, 0)
    if not 1 <= first <= last <= run.training_steps or last - first >= MOST_PROFILED:
        raise UserError(
            f"--profile {run.profile:.40}: must be FIRST:LAST, at most {MOST_PROFILED} steps up to --training_steps "
            f"{run.training_steps}, such as 20:22."
        )
    return first, last


@common_errors()
def check_processes(flags):
    """The number of processes, if flags or Slurm tell it, else 1. Raises UserError where the flags do not agree."""
    r = flags.cfg.run
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "torchrun: one process trains on all devices of a host; start python main.py."
        )
    tasks = 1 if r.num_processes == 1 else tasks_of_slurm()
    processes = r.num_processes or tasks
    counted = f"{processes} processes" + (
        " that srun started" if tasks > 1 and not r.num_processes else ""
    )
    if r.coordinator and not {"num_processes", "process_id"} <= flags.given:
        raise UserError(
            "needs --num_processes and --process_id", flag="coordinator", value=r.coordinator
        )
    for flag, alone in dict(num_processes=1, process_id=0).items():
        if not r.coordinator and vars(r)[flag] > alone:
            said = "needs --coordinator HOST:PORT, of process 0"
            raise UserError(said, flag=flag, value=vars(r)[flag])
    if not re.fullmatch(r"((\[[\da-fA-F:.]+\]|[^\s:]+):\d{1,5})?", r.coordinator):
        raise UserError(
            "must be HOST:PORT, such as host0:8476", flag="coordinator", value=r.coordinator
        )
    if r.process_id >= processes:
        raise UserError(
            f"must be below --num_processes {processes}", flag="process_id", value=r.process_id
        )
    if r.n_devices % processes:
        raise UserError(f"must be a multiple of the {counted}", flag="n_devices", value=r.n_devices)
    return processes
