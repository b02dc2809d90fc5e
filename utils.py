"""Configuration, validation, files and messages. No jax in here.

Every option is declared once, as a field of one of the dataclasses below; the flags, their help text, the presets,
`config.json` and the comparison on resume all derive from those fields.
"""

import argparse
import contextlib
import dataclasses
import difflib
import errno
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Literal

import fsspec

from training import platforms

# --- Errors -----------------------------------------------------------------------------------------------------


class UserError(Exception):
    """Something that the user can mend: one sentence with what was wrong, where, and what would be right."""


def one_sentence(program):
    """Run `program()`; a UserError becomes one line on stderr and exit status 2, without a traceback."""
    try:
        return program()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        sys.exit(2)


def nearest(word, known):
    """The words "; the nearest is X" for one of the words `known`, or "" where none is near."""
    plain = {k.strip("-").replace("-", "_").lower(): k for k in known}
    near = difflib.get_close_matches(word.strip("-").replace("-", "_").lower(), plain, 1)
    return f"; the nearest is {plain[near[0]]}" if near else ""


def flags_in(argv):
    """The words of a command line that look like flags, without =VALUE."""
    return [word.split("=")[0] for word in argv if re.match(r"--?[A-Za-z]", word)]


def complaint(said, argv, known):
    """What a parser said of the command line argv, as a sentence, with the nearest of the flags `known` for one that is
    not among them, or of the choices that it lists."""
    said, exact = said.rstrip("."), {flag.replace("-", "_") for flag in known}
    if re.search("unrecognized|required|missing", said, re.IGNORECASE):
        for flag in flags_in(argv):
            if flag.replace("-", "_") not in exact and (near := nearest(flag, known)):
                return f"{flag}: there is no such flag{near}; see --help."
    if choice := re.search(r"invalid choice:? '(.*?)'.*\((?:choose from )?(.*)\)", said):
        said += nearest(choice[1], [word.strip("'\" ") for word in choice[2].split(",")])
    return f"{said}; see --help."


class Parser(argparse.ArgumentParser):
    """One whose mistakes are UserErrors, with the nearest flag, not a page of usage."""

    argv, commands = (), None

    def add_subparsers(self, **settings):
        self.commands = super().add_subparsers(**settings)
        return self.commands

    def parse_known_args(self, args=None, namespace=None):
        self.argv = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def flags(self):
        """All that it and its commands know."""
        known = re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", self.format_help())
        for command in self.commands.choices.values() if self.commands else []:
            known += command.flags()
        return known

    def error(self, message):
        raise UserError(complaint(message, self.argv, self.flags()))


# --- Configuration ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The architecture: DeepSeek-V3's blocks (arXiv:2412.19437, section 2.1) or GPT-2's."""

    architecture: Literal["deepseek", "gpt2"] = "deepseek"
    """Family of the layers; for gpt2 begin with --preset gpt2-124m."""
    model_dimension: int = 768
    """Width D of the residual stream, in channels."""
    vocab_size: int = 100277
    """Number of token ids; padded inside to a multiple of 128, the padding is never predicted. Without the flag it
    follows --tokenizer."""
    tied: bool = True
    """Whether the embedding is the output head too."""
    norm_eps: float = 1e-6
    """Added to the mean square in every norm but those of latents."""
    latent_norm_eps: float = 1e-6
    """Added to the mean square in the norms of latents; DeepSeek-V3's code has 1e-6 there whatever norm_eps is."""
    n_head: int = 12
    """Attention heads."""
    first_layers: int = 0
    """Dense layers before the blocks; they run with the embedding, on all of pp, so that stages stay even."""
    blocks: int = 8
    """Blocks of layers; pp must divide it."""
    layers_per_block: int = 6
    """Layers in a block: all but the last have rotary positions and a dense feed-forward, the last has a mixture of
    experts."""
    moe_rope: bool = False
    """Whether the last layer of a block has rotary positions too."""
    T: int = 1024
    """Sequence length in tokens; tp must divide it."""
    latent_dim: int = 128
    """Channels of the key/value latent (multi-head latent attention)."""
    q_latent_dim: int = -1
    """Channels of the query latent; -1: as latent_dim, 0: queries come from the residual itself, without one."""
    nope_dim: int = 0
    """Channels of each head's query and key that no position rotates; 0: model_dimension / n_head."""
    v_dim: int = 0
    """Channels of each head's value; 0: as nope_dim."""
    rope_dim: int = 128
    """Channels of the decoupled rotary part of each query, and of the one rotary key that the heads share."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_factor: float = 1.0
    """Times rope_original_T that YaRN stretches the context to (arXiv:2309.00071); 1: no YaRN."""
    rope_original_T: int = 4096
    """Sequence length in tokens that the rotary frequencies were made for, where YaRN stretches it."""
    rope_mscale: float = 1.0
    """Weight of YaRN's attention temperature: scores are multiplied by (0.1 x rope_mscale x ln rope_factor + 1)^2."""
    rope_attention_factor: float = 1.0
    """Factor on the rotated channels of queries and keys, after their rotation."""
    attention_bias: bool = False
    """Whether the projections into latents and back into the residual have a bias (GPT-2's layers always have)."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward: swiglu has three matrices, gelu two."""
    ffn_dim: int = 0
    """Hidden width of a dense feed-forward; 0: 4 x model_dimension for gelu, 8/3 x for swiglu (the same number of
    parameters), rounded up to a multiple of 64."""
    expert_dim: int = 0
    """Hidden width of one expert; 0: the same as ffn_dim."""
    n_experts: int = 16
    """Routed experts E in every mixture-of-experts layer; dp x tp must divide it or be divided by it."""
    experts_per_token: int = 2
    """Routed experts that each token goes to."""
    n_groups: int = 1
    """Groups that the experts form; a token's experts come from k_groups of them."""
    k_groups: int = 1
    """Groups that each token may choose its experts from."""
    routed_scaling: float = 1.0
    """Factor on the gates."""
    norm_topk_prob: bool = True
    """Divide the gates of a token's experts by their sum; without it they are the router's scores."""
    n_shared: int = 2
    """Shared experts, each as wide as a routed one, added for every token."""
    mtp_depth: int = 0
    """Further tokens that training predicts after the next, each by one more layer (multi-token prediction,
    arXiv:2412.19437, section 2.2); evaluation and samples do without."""
    capacity_factor: float = 1.5
    """Bucket size of an expert in multiples of the balanced load tokens x k / n_experts; tokens beyond it pass by on
    the residual. 0: dropless, no token is ever dropped (buckets as large as the worst case, so slower)."""
    document_mask: bool = False
    """Keep documents apart: no attention across the end-of-text token that begins each, and learned positions count
    from it."""
    end_of_text: int = -1
    """Token id that begins a document, for document_mask; -1: the tokeniser's."""
    dropout_rate: float = 0.0
    """Probability of zeroing a channel after the embedding and after every attention and feed-forward."""
    model_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and matrix products; parameters and sums that need it are always float32."""
    remat: Literal["none", "dots", "full"] = "full"
    """What a layer keeps for the backward pass: none recomputes nothing, dots keeps products with weights other
    than experts', full keeps only the layer's input."""
    fsdp: Literal["full", "hoist", "none"] = "hoist"
    """Where weights lie: full, in parts over dp, gathered before every use, for the least memory; hoist, in parts,
    gathered once a batch, for the fewest messages; none, whole on every replica (experts are always spread)."""
    sequence_parallel: Literal["megatron", "ulysses"] = "ulysses"
    """What travels over tp: megatron, the tokens, into and out of every attention and feed-forward, whose weights are
    split (arXiv:2205.05198), for wide models; ulysses, latents and the heads' outputs alone (arXiv:2309.14509), for
    more tokens than weights: what lies behind the heads is gathered over tp too."""
    attention: Literal["auto", "xla", "blockwise", "splash"] = "auto"
    """Kernel of the causal attention: xla writes all T x T scores to memory; blockwise computes half of them, block by
    block; splash writes none (TPUs, T a multiple of 128). auto: splash on TPUs, else blockwise."""

    @property
    def head_dim(self):
        """Unrotated channels of a head, --nope_dim 0 resolved."""
        return self.nope_dim or self.model_dimension // self.n_head

    @property
    def value_dim(self):
        """Channels of a head's value, --v_dim 0 resolved."""
        return self.v_dim or self.head_dim

    @property
    def q_latent(self):
        """Channels of the query latent, --q_latent_dim -1 resolved; 0: there is none."""
        return self.latent_dim if self.q_latent_dim < 0 else self.q_latent_dim

    @property
    def ffn_width(self):
        """Hidden width of a dense feed-forward, --ffn_dim 0 resolved."""
        return (
            self.ffn_dim
            or {
                "gelu": 4 * self.model_dimension,
                "swiglu": math.ceil(self.model_dimension / 24) * 64,
            }[self.activation]
        )

    @property
    def expert_width(self):
        """Hidden width of one expert, --expert_dim 0 resolved."""
        return self.expert_dim or self.ffn_width

    @property
    def padded_vocab(self):
        """Rows of the embedding: a multiple of 128, the same on every mesh, so that checkpoints fit any."""
        return math.ceil(self.vocab_size / 128) * 128


@dataclass(frozen=True)
class Data:
    """Where the tokens are."""

    bucket_name: str = "data/shards"
    """Folder, gs:// or s3:// address that holds the shard folders."""
    mix: str = ""
    """Corpora and their weights, such as web:0.7,code:0.3: folders inside bucket_name, or addresses, each with folders
    of shards of its own. Validation has the same weights. Empty: bucket_name is the one corpus."""
    cache_dir: str = "data/cache"
    """Local folder for what is read of remote shards, which other runs and processes on the machine may share."""
    cache_gb: float = 16.0
    """Gigabytes of remote shards to keep there. Sequences are shuffled in windows of 2 to 4 GB; a cache that holds
    less than one fetches the same bytes again and again."""
    train_folder_name: str = "train"
    """Folder of training shards (.npy) inside bucket_name."""
    val_folder_name: str = "val"
    """Folder of validation shards (.npy) inside bucket_name."""
    tokenizer: str = ""
    """Tokeniser of the shards: a tiktoken name (cl100k_base, gpt2, ...), a file of tiktoken ranks or a Hugging Face
    tokenizer.json. Empty: the one that the shards' manifest names."""
    train_batch_size: int = 32
    """Training sequences per data-parallel replica and accumulation step. The global batch is this x dp x accumulation_steps;
    on resume it follows a change of dp or accumulation_steps unless given."""
    val_batch_size: int = 16
    """Validation sequences per data-parallel replica and batch."""
    microbatches: int = 4
    """Number of microbatches that a batch is cut into for the pipeline; pp must divide it."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW with global-norm clipping and a warm-up cosine schedule."""

    max_lr: float = 6e-4
    """Learning rate at the end of the warm-up."""
    min_lr: float = 0.0
    """Learning rate at step 0."""
    end_lr: float = 6e-5
    """Learning rate from end_steps on."""
    warmup_steps: int = 5000
    """Steps of linear warm-up from min_lr to max_lr."""
    end_steps: int = 75000
    """Step, warm-up included, at which the cosine reaches end_lr."""
    grad_clip_norm: float = 1.0
    """Largest global norm of the gradient, in float32 over all devices; larger ones are scaled down."""
    embedding_lr: float = 1.0
    """Learning rate of the embedding, in multiples of the schedule's. Rows of rare tokens see few gradients; small
    models on few tokens gain from 16."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, routers and their biases are exempt."""
    adam_b2: float = 0.95
    """Decay of AdamW's second moment; the first moment's is 0.9."""
    balance_weight: float = 1e-4
    """Weight of the sequence-level load-balancing loss."""
    mtp_weight: float = 0.3
    """Weight of the mean cross-entropy of multi-token prediction."""
    bias_update_rate: float = 1e-3
    """Step by which the router's selection bias moves towards an even load after every training step."""


@dataclass(frozen=True)
class Run:
    """How long, how spread out, and what is written."""

    preset: str = "moe1b"
    """Named set of defaults; a flag given beside it wins."""
    name: str = "moe1b"
    """Name of the run; everything it writes stands in output_dir/name."""
    output_dir: str = "runs"
    """Folder or gs:// address of all runs (Orbax writes no checkpoint to s3://)."""
    init_from: str = ""
    """Weights that a new run begins with: a run directory or a folder in the Hugging Face format. The architecture is
    taken from there."""
    n_device_axis: tuple[int, int, int] = (0, 1, 1)
    """Mesh shape: dp pp tp. dp 0: as many as there are devices left."""
    n_devices: int = 0
    """Devices to use; 0: all that are present. On a machine without an accelerator this many are simulated."""
    pp_interleave: int = 0
    """Rounds of the pipeline: every stage has a part of the blocks of each round, so that the first and last
    microbatches leave so many times less of it idle; pp times this must divide blocks. 0: up to 4 where pp > 1."""
    training_steps: int = 75000
    """Optimizer step at which training ends."""
    accumulation_steps: int = 1
    """Batches whose gradients are accumulated for one optimizer step."""
    eval_steps: int = 10
    """Validation batches of an evaluation, the same ones every time."""
    eval_every: int = 100
    """Steps between evaluations, each with one printed line and new plots."""
    save_steps: int = 0
    """Steps between checkpoints and samples; 0: 10 x eval_every. One more is written at the end and on SIGTERM
    or SIGINT."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep; older ones are deleted but for those of the next two flags."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this too; 0: none."""
    keep_best: bool = True
    """Keep the checkpoint with the smallest validation loss too."""
    max_bad_steps: int = 10
    """Steps in a row with a loss or gradient that is not finite, each skipped, before the run goes back to the
    checkpoint before them and on with the data after them, three times at most; 0: never."""
    spike_zscore: float = 6.0
    """Standard deviations of the last 100 training losses above their mean from which a loss is logged as a spike; 0:
    none is."""
    seed: int = 0
    """Seed of the parameters, the data order, dropout and samples."""
    wandb: bool = False
    """Log to Weights & Biases too (WANDB_MODE=offline works)."""
    compilation_cache: str = "~/.cache/moe-pretraining-xla"
    """Folder or gs:// address of XLA's persistent compilation cache; empty: none."""
    coordinator: str = ""
    """HOST:PORT of process 0, for processes on several hosts that train together. Empty: what a TPU pod, Slurm or
    Kubernetes says; where none of them is, this process trains alone."""
    num_processes: int = 0
    """Processes that meet at coordinator, each with an equal part of the devices. 1: this one trains alone, whatever
    the machine belongs to."""
    process_id: int = 0
    """Which of the num_processes this is, from 0."""
    connect_timeout: int = 300
    """Seconds within which all processes must have come together."""
    peer_timeout: int = 100
    """Seconds of silence after which a process is taken for lost and the others end."""
    stuck_factor: float = 10.0
    """Times the median so far that a step, evaluation, checkpoint or sampling may take before its process writes the
    stacks of all its threads to the log."""
    stuck_limit: int = 1800
    """Seconds that one may take before its process ends, with status 75."""

    @property
    def folder(self):
        """The run directory: everything that the run writes stands in it."""
        return os.path.join(self.output_dir, self.name)


@dataclass(frozen=True)
class Sample:
    """The samples drawn at every checkpoint."""

    prompt: str = "The"
    """Text that samples continue."""
    inference_batch: int = 4
    """Samples to draw."""
    max_tokens: int = 64
    """Tokens to add to the prompt."""
    top_k: int = 40
    """Draw from this many most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens whose probabilities add up to this; 1: from all."""
    temperature: float = 0.8
    """Divides the logits before drawing; 0: always the most likely token."""
    use_cache: bool = True
    """Decode with a cache of the attention latents; without it every token recomputes the whole prefix, to the same
    text."""


@dataclass(frozen=True)
class Plan:
    """What a step would cost, asked before paying for it; nothing is trained and no device is needed."""

    plan: str = ""
    """The machine: CHIP:TOPOLOGY such as v4:2x4x4 (also v5e, v5p, v6e), which the TPU compiler compiles the step for,
    SLICES*CHIP:TOPOLOGY for several, or gpu:8xH200 (A100, H100, H200), by formulas alone."""
    search: bool = False
    """Try the meshes, microbatches, remat and fsdp that give the same global batch, and say which is fastest."""
    plan_json: str = ""
    """File for the plan as one JSON object."""
    plan_dump: str = ""
    """Folder for step.hlo, the program that the compiler made of the step."""


@dataclass(frozen=True)
class Config:
    """Pretrain a mixture-of-experts language model. README.md shows how to begin."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: Run = field(default_factory=Run)
    sample: Sample = field(default_factory=Sample)
    plan: Plan = field(default_factory=Plan)


GROUPS = tuple(
    f.name for f in dataclasses.fields(Config) if f.name != "plan"
)  # of what makes a run

# What GPT-2 has no use for stands at these values in every configuration of it.
GPT2 = dict(
    architecture="gpt2",
    latent_norm_eps=1e-6,
    layers_per_block=1,
    first_layers=0,
    moe_rope=False,
    latent_dim=0,
    q_latent_dim=0,
    nope_dim=0,
    v_dim=0,
    rope_dim=0,
    rope_base=1.0,
    rope_factor=1.0,
    rope_original_T=1,
    rope_mscale=1.0,
    rope_attention_factor=1.0,
    attention_bias=False,
    activation="gelu",
    expert_dim=0,
    n_experts=0,
    experts_per_token=0,
    n_groups=1,
    k_groups=1,
    routed_scaling=1.0,
    norm_topk_prob=True,
    n_shared=0,
    mtp_depth=0,
    capacity_factor=0.0,
)

# Flags that had another name: {old: clear}. The old ones are accepted on command lines and in run directories.
RENAMED = dict(
    micro_batch_size="microbatches",
    checkpoint_steps="eval_every",
    process_path="cache_dir",
    grad_step="accumulation_steps",
    dhR="rope_dim",
    k="experts_per_token",
    alpha="balance_weight",
)


def clear_names(flags):
    """{flag: value} of a run directory, with the clear names of flags that had another."""
    return {RENAMED.get(flag, flag): value for flag, value in flags.items()}


# What may differ between a run and its resumption: nothing here changes the parameters' shapes, the tokens seen or
# the mathematics of a step. The batch sizes may differ as long as the global batch stays (see `resume`).
FREE_ON_RESUME = {*vars(Run()), *vars(Sample())} - {"seed"} | set(
    "bucket_name cache_dir cache_gb train_batch_size val_batch_size microbatches end_steps warmup_steps remat "
    "fsdp sequence_parallel attention".split()
)

# What processes that train together may have each its own value of.
OF_ONE_PROCESS = set(
    "process_id coordinator connect_timeout peer_timeout cache_dir bucket_name output_dir compilation_cache".split()
)


def flatten(cfg):
    """Config -> {flag: value} without the groups."""
    return {name: value for group in GROUPS for name, value in vars(getattr(cfg, group)).items()}


def replace(cfg, **flags):
    """A copy of `cfg` with the given flags changed."""
    groups = {}
    for group in GROUPS:
        values = getattr(cfg, group)
        groups[group] = dataclasses.replace(
            values, **{n: flags.pop(n) for n in vars(values) if n in flags}
        )
    if flags:
        raise UserError(f"no such flag: {', '.join('--' + n for n in flags)}.")
    return dataclasses.replace(cfg, **groups)


def validate(cfg, n_present):
    """Check the flags against each other and against the `n_present` devices; fill in the mesh and save_steps.

    Returns the completed Config. Raises UserError naming the flag, its value and what would do.
    """
    m, d, o, r = cfg.model, cfg.data, cfg.optimizer, cfg.run
    n_devices = r.n_devices or n_present
    if n_devices > n_present:
        raise UserError(f"--n_devices {n_devices}: only {n_present} devices are present.")
    dp, pp, tp = r.n_device_axis
    dp = dp or n_devices // max(1, pp * tp)
    if min(dp, pp, tp) < 1 or dp * pp * tp != n_devices:
        wanted = dp * pp * tp
        simulated = platforms.platform() == "cpu" and not cfg.plan.plan
        simulate = (
            f" (without an accelerator, --n_devices {wanted} simulates them)" if simulated else ""
        )
        raise UserError(
            f"--n_device_axis {dp} {pp} {tp}: dp x pp x tp is {wanted} but must be the number of devices, "
            f"{n_devices}{simulate}."
        )
    rounds = r.pp_interleave
    if not rounds:
        rounds = max(n for n in range(1, 5) if n == 1 or pp > 1 and m.blocks % (pp * n) == 0)
    multiples = [  # (flag, its value, what must divide it, in words)
        ("blocks", m.blocks, pp * rounds, "pp" if rounds == 1 else "pp x pp_interleave"),
        ("n_experts", m.n_experts, m.n_groups, "n_groups"),
        ("n_head", m.n_head, tp, "tp"),
        ("T", m.T, tp, "tp"),
        ("ffn_dim", m.ffn_width, tp, "tp"),
        ("rope_dim", m.rope_dim, 2, "2, since channels are rotated in pairs,"),
        ("microbatches", d.microbatches, pp, "pp"),
        ("train_batch_size", d.train_batch_size, d.microbatches, "microbatches"),
        ("val_batch_size", d.val_batch_size, d.microbatches, "microbatches"),
        ("T", m.T, 128 if m.attention == "splash" else 1, "128 for --attention splash"),
        ("model_dimension", m.model_dimension, 1 if m.nope_dim else m.n_head, "n_head"),
        ("expert_dim", m.expert_width, tp if m.n_shared else 1, "tp"),
    ]
    for flag, value, by, words in multiples:
        if value % by:
            near = sorted({max(by, value // by * by), -(-value // by) * by})
            raise UserError(
                f"--{flag} {value}: must be a multiple of {words} ({by}), such as "
                f"{' or '.join(map(str, near))}."
            )
    if m.n_experts % (dp * tp) and (dp * tp) % m.n_experts:
        raise UserError(
            f"--n_experts {m.n_experts}: must divide dp x tp ({dp} x {tp} = {dp * tp}) or be divided by it."
        )
    if m.architecture == "gpt2":
        for flag, value in GPT2.items():
            if vars(m)[flag] != value:
                raise UserError(
                    f"--{flag}: GPT-2 has no such choice, its configurations have {value} there; begin "
                    f"with --preset gpt2-124m."
                )
    else:
        for flag in ("latent_dim", "rope_dim", "n_experts", "experts_per_token"):
            if not vars(m)[flag]:
                raise UserError(
                    f"--{flag} 0: must be at least 1; only GPT-2 (--preset gpt2-124m) goes without."
                )
        if m.rope_factor > 1 and m.rope_base <= 1:
            raise UserError(
                f"--rope_base {m.rope_base}: must be above 1 where --rope_factor stretches the context."
            )
    if m.attention == "splash" and platforms.platform() != "tpu" and not cfg.plan.plan:
        raise UserError(
            "--attention splash: this kernel is for TPUs; auto takes the best for the devices at hand."
        )
    if m.experts_per_token > m.n_experts:
        raise UserError(
            f"--experts_per_token {m.experts_per_token}: a token cannot go to more experts than there are (--n_experts {m.n_experts})."
        )
    if m.n_groups > 1 and m.n_experts < 2 * m.n_groups:
        raise UserError(
            f"--n_groups {m.n_groups}: a group must have two experts at least (--n_experts {m.n_experts})."
        )
    if m.k_groups > m.n_groups or m.experts_per_token > m.k_groups * m.n_experts // m.n_groups:
        raise UserError(
            f"--k_groups {m.k_groups}: must be at most --n_groups {m.n_groups} and hold --experts_per_token {m.experts_per_token} experts."
        )
    if m.dropout_rate >= 1:
        raise UserError(f"--dropout_rate {m.dropout_rate}: must be below 1.")
    if o.adam_b2 >= 1:
        raise UserError(f"--adam_b2 {o.adam_b2}: must be below 1.")
    if o.warmup_steps >= o.end_steps:
        raise UserError(
            f"--warmup_steps {o.warmup_steps}: must be less than --end_steps {o.end_steps}; give "
            f"fewer, or a larger --end_steps."
        )
    if is_remote(r.output_dir) and not r.output_dir.startswith("gs://"):
        raise UserError(
            f"--output_dir {r.output_dir}: Orbax writes checkpoints to a local folder or gs:// only."
        )
    if not re.fullmatch(r"[\w.+=@-]+", r.name) or set(r.name) == {"."}:
        raise UserError(
            f"--name {r.name!r}: must be the name of a folder, of letters, digits and . _ - + = @ only."
        )
    return replace(
        cfg,
        n_device_axis=(dp, pp, tp),
        n_devices=n_devices,
        pp_interleave=rounds,
        save_steps=r.save_steps or 10 * r.eval_every,
    )


def run_config(folder):
    """config.json of a run directory, {} where there is none. Runs from before --latent_norm_eps were trained with
    norm_eps there, and what was imported before it with 1e-6."""
    stored = clear_names(read_json(folder, "config.json"))
    if "model_dimension" in stored and stored.get("architecture") != "gpt2":
        before = (
            stored.get("norm_eps", Model.norm_eps)
            if "data_fingerprint" in stored
            else Model.latent_norm_eps
        )
        stored.setdefault("latent_norm_eps", before)
    return stored


def follow(cfg, given):
    """`cfg`, where a default that would refuse what was `given` gives way to it; whatever fits stays as it is."""
    d, o, changed = cfg.data, cfg.optimizer, {}
    if "experts_per_token" not in given and cfg.model.n_experts:
        changed["experts_per_token"] = min(cfg.model.experts_per_token, cfg.model.n_experts)
    if "warmup_steps" not in given and o.warmup_steps >= o.end_steps:
        changed["warmup_steps"] = o.end_steps // 10
    sizes = dict(train_batch_size=d.train_batch_size, val_batch_size=d.val_batch_size)
    micro = d.microbatches
    if "microbatches" not in given:
        micro = changed["microbatches"] = microbatches(cfg, given, sizes)
    changed |= {
        flag: -(-size // micro) * micro for flag, size in sizes.items() if flag not in given
    }
    return replace(cfg, **changed)


def microbatches(cfg, given, sizes):
    """The most microbatches, up to the default, that pp divides and that divide the `given` of the batch `sizes`, and
    the others too if any do; where none do, as many as the default, rounded up to a multiple of pp."""
    pp, default = max(1, cfg.run.n_device_axis[1]), cfg.data.microbatches
    fitting = [n for n in range(default, 0, -1) if n % pp == 0]
    fitting = [n for n in fitting if not any(sizes[flag] % n for flag in sizes.keys() & given)]
    fitting_all = [n for n in fitting if not any(size % n for size in sizes.values())]
    return next(iter(fitting_all or fitting), -(-default // pp) * pp)


# Flags of the model that may differ between weights and the run that begins with them.
FREE_OF_WEIGHTS = set(
    "capacity_factor document_mask end_of_text dropout_rate model_dtype remat fsdp sequence_parallel attention".split()
)


def free_of_weights(architecture):
    """Flags of the model that may differ between weights and what uses them; GPT-2 learns its positions."""
    return FREE_OF_WEIGHTS | ({"T"} if architecture == "deepseek" else set())


def adopt(cfg, given, flags):
    """`cfg` with the architecture {flag: value} of the weights in --init_from. Raises UserError where a flag was given
    another value."""
    free = free_of_weights(flags["architecture"])
    flags = {name: value for name, value in flags.items() if name not in free}
    for name, value in flags.items():
        if name in given and flatten(cfg)[name] != value:
            raise UserError(
                f"--{name} {flatten(cfg)[name]}: the weights in --init_from {cfg.run.init_from} have "
                f"{value}; leave the flag out."
            )
    return replace(cfg, **flags)


# Of config.json, beside what must be the same.
NEEDED_TO_RESUME = [
    "n_device_axis",
    "train_batch_size",
    "accumulation_steps",
    "val_batch_size",
    "bucket_name",
]


def check_stored(config, folder, needed):
    """Raises UserError where the {flag: value} `config` of a run directory lacks one of `needed`, or has a value that
    its flag cannot have, as a file that someone edited."""
    kinds = {bool: bool, int: int, float: (int, float), str: str, tuple: list}
    path = os.path.join(folder, "config.json")
    if missing := [name for name in needed if name not in config]:
        raise UserError(f"{path}: {', '.join(missing)} is missing; put back what it was.")
    for name, default in flatten(Config()).items():
        if name not in config or (name in FREE_ON_RESUME and name not in needed):
            continue
        value = config[name]
        sound = isinstance(value, kinds[type(default)]) and isinstance(value, bool) == isinstance(
            default, bool
        )
        if name == "n_device_axis":
            sound = sound and len(value) == 3 and all(type(n) is int and n > 0 for n in value)
        if not sound:
            raise UserError(
                f"{path}: {name} is {value!r:.40}, which no run has; put back what it was."
            )


def to_resume(cfg, data):
    """What `resume` reads of config.json, which every checkpoint keeps too: a run is more than that file."""
    now = flatten(cfg)
    wanted = {
        "bucket_name",
        "n_device_axis",
        "train_batch_size",
        "val_batch_size",
        "accumulation_steps",
    }
    wanted |= now.keys() - FREE_ON_RESUME
    return {name: now[name] for name in now if name in wanted} | dict(data_fingerprint=data)


def stored_config(folder):
    """config.json of a run directory, or where that is missing what the newest checkpoint that has it keeps of it; {}
    where there is neither."""
    if stored := run_config(folder):
        return stored
    fs, there = fsspec.core.url_to_fs(os.path.join(folder, "checkpoints"))
    with contextlib.suppress(FileNotFoundError):
        steps = [
            name
            for path in persist(lambda: fs.ls(there, detail=False), folder)
            if (name := os.path.basename(path.rstrip("/"))).isdigit()
        ]
        for step in sorted(steps, key=int, reverse=True):
            with contextlib.suppress(ValueError, AttributeError, UserError):  # a damaged one
                if stored := read_json(folder, "checkpoints", step, "meta", "metadata").get(
                    "config"
                ):
                    return clear_names(stored)
        if steps:
            say(
                f"warning: {folder} holds no config.json and its checkpoints are of an older version, which kept no "
                f"flags; that they are those of before is taken on trust"
            )
    return {}


def resume(cfg, given, data):
    """`cfg`, fitted to the run that --name resumes where there is one; data: fingerprint of the shards.

    The global batch train_batch_size x dp x accumulation_steps must stay; where dp or accumulation_steps changed and the batch size was
    not given, it follows (val_batch_size x dp likewise). Raises UserError with what differs.
    """
    stored = stored_config(cfg.run.folder)
    if not stored:
        return cfg
    if "data_fingerprint" not in stored:
        raise UserError(
            f"--name {cfg.run.name}: this run holds weights alone; begin another from them with "
            f"--init_from {cfg.run.folder}."
        )
    check_stored(stored, cfg.run.folder, NEEDED_TO_RESUME)
    (dp, _, _), (old_dp, _, _) = cfg.run.n_device_axis, stored["n_device_axis"]
    follow = [
        (
            "train_batch_size",
            stored["train_batch_size"] * old_dp * stored["accumulation_steps"],
            dp * cfg.run.accumulation_steps,
        ),
        ("val_batch_size", stored["val_batch_size"] * old_dp, dp),
    ]
    for flag, total, parts in follow:
        if flag not in given and total % parts == 0:
            cfg = replace(cfg, **{flag: total // parts})
        now = flatten(cfg)[flag]
        if now * parts != total:
            raise UserError(
                f"--{flag} {now}: run {cfg.run.name} has a global batch of {total} sequences, but this "
                f"would make it {now} x {parts} = {now * parts} (dp {dp}, accumulation_steps {cfg.run.accumulation_steps}); "
                f"give another --name or a mesh and --accumulation_steps whose product divides it."
            )
    if (
        "latent_norm_eps" not in given and "latent_norm_eps" in stored
    ):  # of runs from before the flag, norm_eps
        cfg = replace(cfg, latent_norm_eps=stored["latent_norm_eps"])
    now = json.loads(json.dumps(flatten(cfg)))
    differ = [n for n in now if n not in FREE_ON_RESUME and n in stored and now[n] != stored[n]]
    if differ:
        fields = ", ".join(f"{n} was {stored[n]!r} and is now {now[n]!r}" for n in differ)
        raise UserError(
            f"--name {cfg.run.name}: this run exists with another configuration ({fields}); give another "
            f"--name, or the values it had."
        )
    if stored["data_fingerprint"] != data:
        raise UserError(
            f"--name {cfg.run.name}: this run exists and saw other data than now stands in --bucket_name "
            f"{cfg.data.bucket_name} (it was {stored['bucket_name']}); give another --name or those "
            f"shards."
        )
    return cfg


# --- Files and messages -----------------------------------------------------------------------------------------


def is_remote(path):
    return "://" in path


WAITS = (
    1,
    2,
    4,
    8,
    16,
    32,
)  # seconds before each further try; storage that fails for a minute costs no run


def persist(work, path):
    """work(), which reads or writes `path`, tried again with exponential back-off while remote storage fails.

    FileNotFoundError and its kin pass at once. Raises UserError after the last try.
    """
    for pause in (*WAITS, None):
        try:
            return work()
        except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
            raise
        except Exception as e:  # every kind of storage has errors of its own
            if not is_remote(path):
                raise
            if pause is None or isinstance(e, PermissionError):
                raise UserError(
                    f"{path} cannot be used ({type(e).__name__}: {e}); see that the storage is there and "
                    f"that this machine's credentials are good for it."
                ) from None
            time.sleep(pause * random.uniform(0.5, 1.0))  # hosts do not come back all at one moment


def write_file(path, content):
    """Write bytes or text to a local path or remote address; a reader sees the old content or the new, no mixture.
    Raises UserError where it cannot be written."""
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):  # an object appears whole when its upload ends
        fs, there = fsspec.core.url_to_fs(path)
        return persist(lambda: fs.pipe_file(there, content), path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path + ".part", "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".part", path)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.remove(path + ".part")
        raise UserError(
            f"{path} cannot be written ({e.strerror}); give a place that can be, with room."
        ) from None


def check_place(path, flag):
    """Raises UserError where no file can be written at the local `path` that `flag` named: before one works for it."""
    at = os.path.abspath(path)
    try:
        if os.path.isdir(at):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        while not os.path.isdir(at):
            at = os.path.dirname(at)
            if os.path.isfile(at):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        tempfile.TemporaryFile(dir=at).close()
    except OSError as e:
        raise UserError(
            f"{flag} {path}: cannot be written ({e.strerror}); give a place that can be."
        ) from None


def read_file(path):
    """Bytes of a local file or remote object, or None where there is none."""
    fs, there = fsspec.core.url_to_fs(path)
    try:
        return persist(lambda: fs.cat_file(there), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(*path):
    """The object in a local JSON file or remote object, its path in parts; {} where there is none. Raises UserError
    where it holds something else."""
    path = os.path.join(*path)
    try:
        content = json.loads(read_file(path) or b"{}")
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}).") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: is not JSON ({e}); put back what it was.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {content!r:.40}, not a JSON object; put back what it was.")
    return content


def to_json(content, **settings):
    """JSON of `content`, with null for numbers that are not finite, since it has no others; settings: of json.dumps."""

    def finite(x):
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [finite(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(content), **settings)


def size(n, of=1000):
    """Bytes in a unit that fits, of 1000 or of 1024 of the one below: 999 B, 16.00 KiB, 0.12 GB."""
    power = max(p for p in range(4) if p == 0 or n >= 0.1 * of**p)
    unit = ("i" if of == 1024 and power else "") + "B"
    return f"{n / of**power:.{2 * bool(power)}f} {' KMG'[power].strip()}{unit}"


def say(*words):
    """Print a line with the time of day, at once."""
    with contextlib.suppress(OSError):  # a full disk under the log ends no training
        print(time.strftime("%H:%M:%S"), *words, flush=True)
