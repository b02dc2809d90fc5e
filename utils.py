"""The configuration. No jax in here.

Every flag is declared once, as a field of one of the dataclasses below, with its help and all that is known of it. The
command line, presets, `config.json` and the checks on resume follow from the fields. training/settings.py makes the
final configuration of the flags.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Literal

from runtime.messages import UserError
from runtime.parser import (
    DAYS,
    MANY,
    VOCABULARY,
    WIDE,
    Mesh,
    check_number,
    fields_of,
    flag,
    read_words,
    renamed,
    setting,
    shown,
    value_in_file,
)


@dataclass(frozen=True)
class Model:
    """The architecture and its sizes. The defaults are of DeepSeek-V3's blocks (arXiv:2412.19437, section 2.1)."""

    architecture: str = flag("deepseek")
    """Family of the layers: deepseek, gpt2 or another file of architectures/. Presets choose one and its sizes."""
    model_dimension: int = flag(768, least=1, most=WIDE)
    """Width D of the residual stream, in channels."""
    vocab_size: int = flag(100277, least=2, most=VOCABULARY)
    """Number of token ids. The embedding is padded to a multiple of 128 rows, which are never predicted. Without the
    flag it is that of --tokenizer, or else of the tokenizer that made the shards."""
    tied: bool = flag(True)
    """Whether the embedding is the output head too."""
    norm_eps: float = flag(1e-6, least=0)
    """Added to the mean square in every norm but those of latents, where it is 1e-6 as in DeepSeek-V3's code."""
    n_head: int = flag(12, least=1, most=MANY)
    """Attention heads."""
    n_kv_head: int = flag(0, least=0, absent=0, most=MANY)
    """Heads of keys and values, each of which n_head / n_kv_head heads of queries read (grouped-query attention,
    arXiv:2305.13245); 0: n_head."""
    first_layers: int = flag(0, least=0, absent=0, most=MANY)
    """Dense layers before the blocks. They run on all of pp, as the embedding does, so that stages stay even."""
    blocks: int = flag(8, least=1, most=MANY)
    """Blocks of layers; pp must divide it."""
    layers_per_block: int = flag(6, least=1, absent=1, most=MANY)
    """Layers in a block: all but the last have rotary positions and a dense feed-forward, the last has a mixture of
    experts, and rotary positions only where it is alone."""
    T: int = flag(1024, least=1, of_weights=False, most=2**22, first=True)
    """Sequence length in tokens; tp must divide it."""
    latent_dim: int = flag(128, least=0, absent=0, most=WIDE)
    """Channels of the key/value latent (multi-head latent attention)."""
    q_latent_dim: int = flag(-1, least=-1, absent=0, most=WIDE)
    """Channels of the query latent; -1: as latent_dim, 0: queries come from the residual itself, without one."""
    head_dim: int = flag(0, least=0, absent=0, most=WIDE)
    """Channels of each head's value, and of its query and key without the rotary part of rope_dim; 0: model_dimension /
    n_head."""
    rope_dim: int = flag(128, least=0, absent=0, most=WIDE, jaxformer="dhR")
    """Channels of the decoupled rotary part of each query, and of the one rotary key that the heads share."""
    rope_base: float = flag(10_000.0, least=1, absent=1.0)
    """Base of the rotary frequencies."""
    rope_factor: float = flag(1.0, least=1, absent=1.0)
    """Times rope_original_T that YaRN stretches the context to (arXiv:2309.00071); 1: no YaRN."""
    rope_original_T: int = flag(4096, least=1, absent=1)
    """Sequence length in tokens that the rotary frequencies were made for, where YaRN stretches it."""
    embedding_norm: bool = flag(False, absent=False)
    """Whether a token's row of the embedding is normalized before it enters the first layer."""
    latent_conv: int = flag(0, least=0, absent=0, most=64)
    """Tokens before each one of which its key/value latent gets shares, by a short convolution; 0: there is none."""
    activation: Literal["swiglu", "gelu"] = flag("swiglu")
    """Feed-forward: swiglu has three matrices, gelu two."""
    ffn_dim: int = flag(0, least=0, most=WIDE)
    """Hidden width of a dense feed-forward; 0: 4 x model_dimension for gelu, 8/3 x for swiglu (the same number of
    parameters), rounded up to a multiple of 64."""
    expert_dim: int = flag(0, least=0, absent=0, most=WIDE)
    """Hidden width of one expert; 0: the same as ffn_dim."""
    n_experts: int = flag(16, least=0, absent=0, most=MANY)
    """Routed experts E in every mixture-of-experts layer; dp x tp must divide it or be divided by it."""
    experts_per_token: int = flag(2, least=0, absent=0, most=MANY, jaxformer="k")
    """Routed experts that each token goes to."""
    n_groups: int = flag(1, least=1, absent=1, most=MANY)
    """Groups that the experts form; a token's experts come from k_groups of them."""
    k_groups: int = flag(1, least=1, absent=1, most=MANY)
    """Groups that each token may choose its experts from."""
    routed_scaling: float = flag(1.0, least=0, absent=1.0)
    """Factor on the gates."""
    n_shared: int = flag(2, least=0, absent=0, most=MANY)
    """Shared experts, each as wide as a routed one, added for every token."""
    mtp_depth: int = flag(0, least=0, absent=0, most=64)
    """Further tokens that training predicts after the next, each by one more layer (multi-token prediction,
    arXiv:2412.19437, section 2.2); evaluation and samples do without."""
    capacity_factor: float = flag(0.0, least=0, absent=0.0, of_weights=False)
    """Bucket size of an expert, in multiples of the mean load tokens x experts_per_token / n_experts. Tokens beyond it
    are dropped: they pass by on the residual. 0: no token is ever dropped, so results do not depend on the mesh."""
    document_mask: bool = flag(False, of_weights=False)
    """Keep documents apart: no attention across the end-of-text token that begins each, and learned positions count
    from it."""
    end_of_text: int = flag(-1, least=-1, of_weights=False, derived=True)
    """Token id that begins a document, for document_mask: the tokenizer's."""
    dropout_rate: float = flag(0.0, least=0, below=1, of_weights=False)
    """Probability of zeroing a channel after the embedding and after every attention and feed-forward."""
    model_dtype: Literal["bfloat16", "float32"] = flag("bfloat16", of_weights=False)
    """Type of activations and matrix products; parameters and sums that need it are always float32."""
    remat: Literal["none", "dots", "full"] = setting("full", of_weights=False)
    """What a layer recomputes in the backward pass. none: nothing. dots: all but products with weights other than
    experts'. full: all, from the layer's input."""
    fsdp: Literal["full", "hoist", "none"] = setting("hoist", of_weights=False)
    """Where weights lie. full: split over dp and gathered before every use, for the least memory. hoist: split over dp
    and gathered once a batch, for the fewest messages. none: whole on every replica (experts are always spread)."""
    sequence_parallel: Literal["megatron", "ulysses"] = setting("ulysses", of_weights=False)
    """What travels over tp. megatron (arXiv:2205.05198): activations, into and out of every attention and feed-forward,
    whose weights are split; for wide models. ulysses (arXiv:2309.14509): only latents and the heads' outputs, while
    weights are gathered over tp; where there are more tokens than weights."""
    experts: Literal["auto", "buckets", "tiles"] = setting("auto", absent="auto", of_weights=False)
    """How experts get their tokens. buckets: every device sends buckets of tokens to the experts' devices, which
    multiply whole buckets. tiles: every device gathers all tokens and multiplies those of its own experts, in tiles;
    only without a capacity_factor. auto: tiles on CPUs without a capacity_factor, else buckets."""
    attention: str = setting("auto", of_weights=False)
    """Kernel of the causal attention: xla writes all T x T scores to memory; blockwise computes half of them, block by
    block; splash (TPUs, T a multiple of 128) and flash (A100, H100, H200, B200; T a multiple of 64, a key and a value
    of at most 320 channels together) write none. auto: splash or flash where it runs, else blockwise."""

    @property
    def key_dim(self):
        """Channels of a head's key but the decoupled rotary ones, --head_dim 0 resolved."""
        return self.head_dim or self.model_dimension // self.n_head

    @property
    def moe_rope(self):
        """Whether the last layer of a block has rotary positions."""
        return self.layers_per_block == 1

    @property
    def kv_heads(self):
        """Heads of keys and values, --n_kv_head 0 resolved."""
        return self.n_kv_head or self.n_head

    @property
    def value_dim(self):
        """Channels of a head's value."""
        return self.key_dim

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

    data: str = setting("data/shards", per_process=True, first=True, jaxformer="bucket_name")
    """Folder, gs:// or s3:// address that holds the shard folders."""
    mix: str = flag("")
    """Corpora and their weights, such as web:0.7,code:0.3: folders inside data, or addresses, each with folders
    of shards of its own. They may change at shares of the run: web:0.7,code:0.3 until 0.8, web:0.3,code:0.7. Validation
    has the same weights all along, the mean over the run. Empty: data is the one corpus."""
    cache_dir: str = setting("data/cache", per_process=True, jaxformer="process_path")
    """Local folder for what is read of remote shards, which other runs and processes on the machine may share."""
    cache_gb: float = setting(16.0, least=0)
    """Gigabytes of remote shards to keep there. Sequences are shuffled in windows of 2 to 4 GB; a cache that holds
    less than one fetches the same bytes again and again."""
    tokenizer: str = flag("", first=True)
    """Tokenizer of the shards: a tiktoken name (cl100k_base, gpt2, ...), a file of tiktoken ranks or a Hugging Face
    tokenizer.json. Empty: the one that the shards' manifest names."""
    train_batch_size: int = setting(32, least=1, most=WIDE, first=True)
    """Training sequences per data-parallel replica and accumulation step. The global batch is this x dp x
    accumulation_steps; on resume it follows a change of dp or accumulation_steps unless given."""
    val_batch_size: int = setting(16, least=1, most=WIDE)
    """Validation sequences per data-parallel replica and batch."""
    microbatches: int = setting(4, least=1, most=MANY, jaxformer="micro_batch_size")
    """Number of microbatches that a batch is cut into for the pipeline; pp must divide it."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW or Muon, with global-norm clipping; the learning rate's schedule."""

    optimizer: Literal["adamw", "muon"] = flag("adamw")
    """adamw; or muon, which orthogonalizes the updates of all matrices between hidden channels (arXiv:2502.16982).
    Embedding, head, routers, norms and biases stay with AdamW. Its updates are as large as AdamW's at the same rate."""
    max_lr: float = flag(6e-4, least=0, first=True)
    """Learning rate at the end of the warm-up."""
    end_lr: float = flag(6e-5, least=0)
    """Learning rate from end_steps on; with 0 training stands still there."""
    schedule: Literal["cosine", "linear", "wsd"] = flag("cosine")
    """Course of the learning rate from max_lr, after the warm-up, to end_lr. cosine: half a wave. linear: a straight
    line (arXiv:2502.15938: best down to 0). wsd: max_lr until the last decay_steps before end_steps."""
    warmup_steps: int = setting(5000, least=0)
    """Steps of linear warm-up from 0 to max_lr."""
    decay_steps: int = setting(0, least=0)
    """Steps before end_steps in which wsd decays. 0: it never does; such a run is a trunk, from which --branch_from
    branches decays off."""
    end_steps: int = setting(75000, least=1)
    """Step, warm-up included, at which the learning rate reaches end_lr. Where training_steps is given without it, it
    is that step. Given alone, it leaves the length of the run as it is."""
    grad_clip_norm: float = flag(1.0, least=1e-12)
    """Largest global norm of the gradient, in float32 over all devices; larger ones are scaled down."""
    embedding_lr: float = flag(1.0, least=0)
    """Learning rate of the embedding, in multiples of the schedule's. Rows of rare tokens see few gradients; small
    models on few tokens gain from 16."""
    weight_decay: float = flag(0.1, least=0)
    """Decoupled weight decay of matrices; norms, routers and their biases are exempt."""
    adam_b2: float = flag(0.95, least=0, below=1)
    """Decay of AdamW's second moment; the first moment's is 0.9."""
    muon_momentum: float = flag(0.95, least=0, below=1.95)
    """Momentum of Muon: the share of it that the next step keeps. Runs of few steps gain from less."""
    balance_weight: float = flag(1e-4, least=0, absent=1e-4, of_weights=False, jaxformer="alpha")
    """Weight of the sequence-level load-balancing loss."""
    bias_update_rate: float = flag(1e-3, least=0, absent=1e-3, of_weights=False)
    """Step by which the router's selection bias moves towards an even load after every training step."""


@dataclass(frozen=True)
class Run:
    """How long, how spread out, and what is written."""

    preset: str = setting("moe1b", first=True)
    """Named set of defaults; a flag given beside it wins."""
    config: str = setting("", per_process=True, first=True)
    """JSON file of flags, such as the config.json of a run. It wins over the preset, flags given beside it win over
    it."""
    name: str = setting("moe1b", first=True)
    """Name of the run; everything it writes stands in output_dir/name."""
    output_dir: str = setting("runs", per_process=True, first=True)
    """Folder or gs:// address of all runs (Orbax writes no checkpoint to s3://)."""
    init_from: str = setting("", first=True)
    """Weights that a new run begins with: a run directory or a folder in the Hugging Face format. The architecture is
    taken from there."""
    branch_from: str = flag("")
    """Run directory of a trunk (--schedule wsd) that this new run begins as, with weights, optimizer, key and place in
    the data. Flags that are not given are the trunk's."""
    branch_step: int = flag(0, least=0)
    """Step of the trunk's checkpoint to begin with. The decay, of decay_steps, begins there unless end_steps is given
    too."""
    n_device_axis: Mesh = setting((0, 1, 1), most=MANY, first=True)
    """Mesh shape: dp pp tp. dp 0: as many as there are devices left."""
    n_devices: int = setting(0, least=0, most=MANY, first=True)
    """Devices to use; 0: all that are present. On a machine without an accelerator this many are simulated."""
    pp_interleave: int = setting(0, least=0, most=MANY)
    """Rounds of the pipeline (interleaved stages): each stage holds some blocks of every round, and its bubble is so
    many times smaller. pp times this must divide blocks. 0: up to 4 where pp > 1."""
    training_steps: int = setting(75000, least=1, first=True)
    """Optimizer step at which training ends, and the schedule with it, unless end_steps is given too. The schedule of
    a trunk (wsd without decay_steps) has no end."""
    accumulation_steps: int = setting(1, least=1, most=WIDE, jaxformer="grad_step")
    """Batches whose gradients are accumulated for one optimizer step."""
    eval_steps: int = setting(10, least=1)
    """Validation batches of an evaluation, the same ones every time."""
    eval_every: int = setting(100, least=1, first=True, jaxformer="checkpoint_steps")
    """Steps between evaluations, each with one printed line and new plots."""
    eval_tasks: str = setting("")
    """Tasks, groups, tags or patterns of EleutherAI's lm_eval, with commas between them, that the model answers at
    every save_steps-th step that has an evaluation, and at the end. A name with a slash in it is a folder of task files
    of your own, or of the data of the group core."""
    eval_tasks_limit: int = setting(0, least=0)
    """Questions of each task, the same ones every time; 0: all."""
    save_steps: int = setting(0, least=0)
    """Steps between checkpoints and samples; 0: 10 x eval_every. One more is written at the end and on SIGTERM
    or SIGINT."""
    keep_checkpoints: int = setting(3, least=1)
    """Newest checkpoints to keep. Older ones are deleted, except those that keep_every keeps and
    the one with the smallest validation loss."""
    keep_every: int = setting(0, least=0)
    """Keep every checkpoint whose step is a multiple of this too; 0: none."""
    max_bad_steps: int = setting(10, least=0)
    """Steps in a row with a loss or gradient that is not finite, each skipped, that cause a rollback to the checkpoint
    before them; training goes on with the data after them. After three rollbacks the run ends. 0: no rollback."""
    seed: int = flag(0, least=0)
    """Seed of the parameters, the data order, dropout and samples."""
    wandb: bool = setting(False, first=True)
    """Log to Weights & Biases too (WANDB_MODE=offline works), into the project WANDB_PROJECT of WANDB_ENTITY."""
    tensorboard: bool = setting(False)
    """Write an event file for TensorBoard too, with what metrics.jsonl holds (bash setup_tpu.sh tensorboard)."""
    profile: str = setting("")
    """Optimizer steps FIRST:LAST, both included, of which every process writes a trace by jax's profiler into
    plugins/profile of the run directory; tools/trace.py reads it. Beside it, which arrays its devices hold during the
    first of them, and again where memory runs out, as a profile for pprof."""
    compilation_cache: str = setting("~/.cache/moe-pretraining-xla", per_process=True)
    """Folder or gs:// address of XLA's persistent compilation cache; empty: none."""
    coordinator: str = setting("", per_process=True)
    """HOST:PORT of process 0, for processes on several hosts that train together. Empty: as a TPU pod, Slurm or
    Kubernetes says; elsewhere this process trains alone."""
    num_processes: int = setting(0, least=0, most=MANY)
    """Processes that meet at coordinator, each with an equal part of the devices. 1: this one trains alone, whatever
    the machine belongs to."""
    process_id: int = setting(0, least=0, per_process=True, most=MANY)
    """Which of the num_processes this is, from 0."""
    peer_timeout: int = setting(100, least=1, per_process=True, most=DAYS)
    """Seconds of silence after which a process is taken for lost and the others end. At the start all must come
    together within three times as many."""
    stuck_limit: int = setting(1800, least=1, most=DAYS)
    """Seconds that a step, evaluation, checkpoint or sampling may take before its process ends, with status 75."""

    @property
    def folder(self):
        """The run directory: everything that the run writes stands in it."""
        return os.path.join(self.output_dir, self.name)


@dataclass(frozen=True)
class Sample:
    """The samples drawn at every checkpoint."""

    prompt: str = setting("The")
    """Text that samples continue."""
    inference_batch: int = setting(4, least=1, most=MANY)
    """Samples to draw."""
    max_tokens: int = setting(64, least=1)
    """Tokens to add to the prompt."""
    top_k: int = setting(40, least=0)
    """Draw from this many most likely tokens; 0: from all."""
    temperature: float = setting(0.8, least=0)
    """Divides the logits before drawing; 0: always the most likely token."""


@dataclass(frozen=True)
class Plan:
    """What a step would cost. Nothing is trained and no device is needed."""

    plan: str = flag("", first=True)
    """The machine, for which its compiler compiles the step: CHIP:TOPOLOGY such as v4:2x4x4 (also v2, v3, v5e, v5p,
    v6e, v7x), SLICES*CHIP:TOPOLOGY for several, gpu:8xH200 (any GPU of runtime/chips.py, such as T4, RTX4090 or
    A100), or gpu:2x8xH200 for two hosts."""
    by_formulas: bool = False
    """Answer by formulas alone, in a second, also where the machine's compiler is installed."""
    search: bool = False
    """Try the meshes, microbatches, remat and fsdp that give the same global batch, and say which is fastest."""
    plan_json: str = ""
    """File for the plan as one JSON object. Beside NAME.json, NAME.hlo is the program that the compiler made."""


@dataclass(frozen=True)
class Config:
    """Pretrain a mixture-of-experts language model.

    Train a small one, on Python's own source, on whatever this machine has:
      bash run.sh local
    Train on shards of your own, on 8 devices:
      python main.py --preset gpt2-124m --data data/shards/fineweb --n_device_axis 8 1 1
    See what a step would cost on a machine that you do not have:
      python main.py --n_device_axis 8 2 2 --train_batch_size 32 --plan v4:2x4x4
    """

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: Run = field(default_factory=Run)
    sample: Sample = field(default_factory=Sample)
    plan: Plan = field(default_factory=Plan)


# The groups of flags that make a run.
GROUPS = tuple(f.name for f in dataclasses.fields(Config) if f.name != "plan")

FIELDS = {f.name: f for group in GROUPS for f in dataclasses.fields(getattr(Config(), group))}
RENAMED = renamed(FIELDS)


def flags_with(fact, value=True):
    """The flags whose field has this fact, such as free_on_resume."""
    return {name for name, f in FIELDS.items() if f.metadata.get(fact) == value}


def absent_values():
    """{flag: its value where an architecture has no such flag} of the flags that not every architecture has."""
    return {name: f.metadata["absent"] for name, f in FIELDS.items() if "absent" in f.metadata}


def flatten(cfg):
    """Config -> {flag: value} without the groups."""
    return {name: value for group in GROUPS for name, value in vars(getattr(cfg, group)).items()}


def replace(cfg, **flags):
    """A copy of `cfg` with the given flags changed."""
    groups = {}
    for group in (*GROUPS, "plan"):
        values = getattr(cfg, group)
        if own := {n: flags.pop(n) for n in vars(values) if n in flags}:
            groups[group] = dataclasses.replace(values, **own)
    assert not flags, f"no such flags: {flags}"
    return dataclasses.replace(cfg, **groups)


# --- From outside -------------------------------------------------------------------------------------------------


def read_flags(kind, argv, program):
    """Command line of `program` -> an instance of the dataclass `kind`. Raises UserError for what does not parse and
    for numbers beyond their bounds; `--help` exits."""
    return made_of(kind, read_words(kind, argv, program)[0])


def read_own_flags(kind, argv, program):
    """(an instance of the dataclass `kind`, the words left over) of a program that takes the flags of main.py too."""
    given, rest = read_words(kind, argv, program, others=Config)
    return made_of(kind, given), rest


def made_of(kind, flags):
    """The dataclass `kind` of {flag: value}. Raises UserError where a flag is missing or beyond its bounds."""
    for name, f in fields_of(kind).items():
        if name not in flags and f.default is dataclasses.MISSING:
            raise UserError(f"{shown(f)}: is missing; see --help.")
    options = kind(**flags)
    check_bounds(kind, vars(options))
    return options


def check_bounds(kind, flags):
    """Raises UserError where a number of {flag: value} is beyond what its field of the dataclass `kind` allows. What
    `FIELDS` knows of a flag holds in other programs too, where they do not say otherwise."""
    for name, f in fields_of(kind).items():
        known = FIELDS[name].metadata if name in FIELDS else {}
        check_number(name, flags[name], **{**known, **f.metadata})


def read_values(flags, where, names=None, advice=""):
    """{flag: value} of what the JSON file `where` holds of {flag: value}. names: {flag: what the file calls it}, where
    that differs. Raises UserError for a value that the flag cannot have."""
    read = {}
    for name, value in flags.items():
        try:
            read[name] = value_in_file(FIELDS[name], value)
        except UserError as e:
            name = (names or {}).get(name, name)
            raise UserError(f"{where}: {name} is {value!r:.40}, but must be {e}{advice}.") from None
    return read
