"""The configuration: every flag, declared once. No jax in here.

A flag is a field of one of the dataclasses below, with its help beneath it and all else that is known of it beside it
(config/parser.py: Facts). The command line, presets, `config.json` and the checks on resume follow from that. What
nobody gave is settled by config/settle.py.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Literal

from config.parser import DAYS, MANY, VOCABULARY, WIDE, Mesh, facts_of, flag
from runtime.messages import masked


@dataclass(frozen=True)
class Model:
    """The architecture and its sizes. The defaults are of DeepSeek-V3's blocks (arXiv:2412.19437, section 2.1)."""

    architecture: str = flag("deepseek", on_resume="kept")
    """Family of the layers: the name of a file of architectures/, such as deepseek or gpt2."""
    model_dimension: int = flag(768, on_resume="kept", least=1, most=WIDE)
    """Width D of the residual stream, in channels."""
    vocab_size: int = flag(100277, on_resume="kept", least=2, most=VOCABULARY)
    """Token ids; if not given those of --tokenizer, or of the shards. The embedding has a multiple of 128 rows."""
    tied: bool = flag(True, on_resume="kept")
    """Whether the embedding is the output head too."""
    norm_eps: float = flag(1e-6, on_resume="kept")
    """Added to the mean square in norms; in those of latents it is 1e-6, as in DeepSeek-V3's code."""
    n_head: int = flag(12, on_resume="kept", least=1, most=MANY)
    """Attention heads."""
    n_kv_head: int = flag(0, on_resume="kept", absent=0, most=MANY)
    """Heads of keys and values, each read by n_head / n_kv_head query heads (arXiv:2305.13245); 0: n_head."""
    first_layers: int = flag(0, on_resume="kept", absent=0, most=MANY)
    """Dense layers before the blocks. They run on all of pp, as the embedding does, so stages stay even."""
    blocks: int = flag(8, on_resume="kept", least=1, most=MANY)
    """Blocks of layers; pp must divide it."""
    layers_per_block: int = flag(6, on_resume="kept", absent=1, least=1, most=MANY)
    """Layers in a block: the last has a mixture of experts, and rotary positions only where it is alone."""
    T: int = flag(1024, on_resume="kept", free_with_weights=True, common=True, least=1, most=2**22)
    """Sequence length in tokens; tp must divide it."""
    latent_dim: int = flag(128, on_resume="kept", absent=0, most=WIDE)
    """Channels of the key/value latent (multi-head latent attention)."""
    q_latent_dim: int = flag(-1, on_resume="kept", absent=0, least=-1, most=WIDE)
    """Channels of the query latent; -1: latent_dim, 0: queries are projected from the residual."""
    head_dim: int = flag(0, on_resume="kept", absent=0, most=WIDE)
    """Channels of a head's value, and of its query and key without rope_dim; 0: model_dimension / n_head."""
    rope_dim: int = flag(128, on_resume="kept", absent=0, alias="dhR", most=WIDE)
    """Channels of the decoupled rotary part of each query, and of the rotary key that the heads share."""
    rope_base: float = flag(10_000.0, on_resume="kept", absent=1.0, least=1)
    """Base of the rotary frequencies."""
    embedding_norm: bool = flag(False, on_resume="kept", absent=False)
    """Whether a token's row of the embedding is normalized before it enters the first layer."""
    embedding_conv: int = flag(0, on_resume="kept", absent=0, most=64)
    """Earlier tokens whose rows of the embedding a short convolution adds to each token's; 0: none."""
    backout: bool = flag(False, on_resume="kept", absent=False)
    """Whether what entered the first layer is subtracted before the last norm, by a learned share of each channel that
    begins at 1: then the head reads what the layers have added. A tied head otherwise predicts each token again."""
    latent_conv: int = flag(0, on_resume="kept", absent=0, most=64)
    """Earlier tokens that a short convolution mixes into each token's key/value latent and rotary key; 0: none."""
    exclusive_attention: bool = flag(False, on_resume="kept", absent=False)
    """Whether heads in layers with experts leave out what lies along a token's own value, and so bring only what other
    tokens say."""
    activation: Literal["swiglu", "gelu"] = flag("swiglu", on_resume="kept")
    """Feed-forward: swiglu has three matrices, gelu two."""
    ffn_dim: int = flag(0, on_resume="kept", most=WIDE)
    """Hidden width of a dense feed-forward; 0: 4 x model_dimension for gelu, 8/3 x, in multiples of 64, for swiglu."""
    expert_dim: int = flag(0, on_resume="kept", absent=0, most=WIDE)
    """Hidden width of one expert; 0: the same as ffn_dim."""
    n_experts: int = flag(16, on_resume="kept", absent=0, most=MANY)
    """Routed experts in every mixture-of-experts layer; dp x tp must divide it or be divided by it."""
    experts_per_token: int = flag(2, on_resume="kept", absent=0, alias="k", most=MANY)
    """Routed experts that each token goes to. Gates are divided by their sum, a single one is the router's score."""
    n_groups: int = flag(1, on_resume="kept", absent=1, least=1, most=MANY)
    """Groups that the experts form; a token's experts come from k_groups of them."""
    k_groups: int = flag(1, on_resume="kept", absent=1, least=1, most=MANY)
    """Groups that each token may choose its experts from."""
    routed_scaling: float = flag(1.0, on_resume="kept", absent=1.0)
    """Factor on the gates."""
    n_shared: int = flag(2, on_resume="kept", absent=0, most=MANY)
    """Shared experts, each as wide as a routed one, added for every token."""
    capacity_factor: float = flag(0.0, on_resume="kept", free_with_weights=True, absent=0.0)
    """Bucket size of an expert, in multiples of the mean load. Tokens beyond it skip the expert. 0: no token does."""
    document_mask: bool = flag(False, on_resume="kept", free_with_weights=True)
    """Keep documents apart: no attention across the end-of-text token that begins each; learned positions restart."""
    end_of_text: int = flag(-1, on_resume="kept", free_with_weights=True, derived=True, least=-1)
    """Token id that begins a document, for document_mask: the tokenizer's."""
    dropout_rate: float = flag(0.0, on_resume="kept", free_with_weights=True, below=1)
    """Probability of zeroing a channel after the embedding, attention and feed-forward. If not given, up to 0.2 on
    little text."""
    model_dtype: Literal["bfloat16", "float16", "float32"] = flag(
        "bfloat16", on_resume="kept", free_with_weights=True
    )
    """Type of activations and matrix products; parameters and delicate sums are always float32. float16, with a loss
    scale, is for GPUs without bfloat16."""
    remat: Literal["none", "dots", "experts", "attention", "full"] = flag(
        "attention", on_resume="free"
    )
    """What a layer keeps for its backward pass, beside its input; it recomputes the rest. dots: products with weights
    other than experts'. experts: what routed experts receive, and their first product. attention: what its kernel
    returns, where there is one (on TPUs only where each layer runs once a batch); dots and experts keep it too. full:
    nothing more. none: everything, which is the default where there is room for it, on a single GPU and on TPUs whose
    layers run once a batch; a single GPU with less room has dots."""
    fsdp: Literal["full", "hoist", "none"] = flag("hoist", on_resume="free")
    """Weights over dp. full: split, gathered before every use, for the least memory. hoist: split, gathered once a
    batch, and as full where that is one microbatch in one stage. none: whole on every replica (experts are always
    split)."""
    sequence_parallel: Literal["megatron", "ulysses"] = flag("ulysses", on_resume="free")
    """What is sent over tp. megatron (arXiv:2205.05198): activations; for wide models. ulysses (arXiv:2309.14509):
    latents, the heads' outputs, and weights; for many tokens."""
    experts: Literal["auto", "buckets", "tiles"] = flag("auto", on_resume="free", absent="auto")
    """How experts get their tokens. buckets: devices send them to the experts' devices. tiles: each device gathers all
    tokens, without capacity_factor. auto: tiles on CPUs if it can, else buckets."""
    attention: str = flag("auto", on_resume="free")
    """Kernel of the causal attention. xla: all T x T scores in memory; blockwise: half of them, in blocks; splash
    (TPUs) and flash (A100, H100, H200, B200): none. auto: splash or flash where it runs, else blockwise."""

    revision: int = flag(1, on_resume="kept", derived=True)
    """Goes up when flags begin to mean another model, which older runs are not (config/resume.py: CHANGED)."""

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
    def q_latent(self):
        """Channels of the query latent, --q_latent_dim -1 resolved; 0: there is none."""
        return self.latent_dim if self.q_latent_dim < 0 else self.q_latent_dim

    @property
    def ffn_width(self):
        """Hidden width of a dense feed-forward, --ffn_dim 0 resolved."""
        swiglu = math.ceil(self.model_dimension / 24) * 64
        return self.ffn_dim or (swiglu if self.activation == "swiglu" else 4 * self.model_dimension)

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

    data: str = flag(
        "data/shards",
        on_resume="free",
        alias="bucket_name",
        per_process=True,
        path_separator="",
        common=True,
        nonempty=True,
    )
    """Folder, gs:// or s3:// address that holds the shard folders."""
    mix: str = flag("", on_resume="kept", path_separator=",")
    """Corpora and weights, such as web:0.7,code:0.3: folders in data, or addresses. Weights may change at shares of the
    run: web:0.7,code:0.3 until 0.8, web:0.3,code:0.7. Validation has their mean. Empty: data is the only corpus."""
    cache_dir: str = flag(
        "data/cache", on_resume="free", alias="process_path", per_process=True, nonempty=True
    )
    """Local folder for what is read of remote shards; runs and processes of a machine share it."""
    cache_gb: float = flag(16.0, on_resume="free")
    """Gigabytes of remote shards to keep there; sequences are shuffled in windows of 2 to 4 GB."""
    tokenizer: str = flag("", on_resume="kept", path_separator="", common=True)
    """Tokenizer of the shards: a tiktoken name (cl100k_base, gpt2, ...), a file of tiktoken ranks or a Hugging Face
    tokenizer.json. Empty: the one that the shards' manifest names."""
    global_batch_size: int = flag(256, on_resume="batch", common=True, least=1, most=WIDE)
    """Training sequences of a step on all devices, the same on every mesh. Given train_batch_size alone, this is that
    x dp x accumulation_steps."""
    train_batch_size: int = flag(0, on_resume="batch", most=WIDE)
    """Training sequences per replica and accumulation step; 0: the replicas' share of global_batch_size."""
    val_batch_size: int = flag(0, on_resume="batch", most=WIDE)
    """Validation sequences per replica and batch; 0: a validation batch has global_batch_size sequences, divided as
    those of a training step."""
    val_tokens: int = flag(0, on_resume="free")
    """Tokens from the start of a corpus's validation shards that evaluations take their sequences from, as others who
    measure on the same shards do; 0: all."""
    microbatch_size: int = flag(8, on_resume="free", least=1, most=WIDE)
    """Most sequences of a microbatch on a replica, where microbatches are not given. On a single GPU they are as many
    as fit in its memory, unless this is given."""
    microbatches: int = flag(0, on_resume="free", alias="micro_batch_size", most=MANY)
    """Parts of a batch in the pipeline; pp must divide it. 0: as few as microbatch_size allows."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW or Muon, with global-norm clipping; the learning rate's schedule."""

    optimizer: Literal["adamw", "muon"] = flag("adamw", on_resume="kept")
    """adamw; or muon, which orthogonalizes updates of matrices between hidden channels (arXiv:2502.16982)."""
    max_lr: float = flag(6e-4, on_resume="kept", common=True)
    """Learning rate at the end of the warm-up."""
    end_lr: float = flag(6e-5, on_resume="kept")
    """Learning rate from end_steps on; 0: parameters no longer change."""
    schedule: Literal["cosine", "linear", "wsd"] = flag("cosine", on_resume="kept")
    """Learning rate from max_lr, after the warm-up, to end_lr. wsd: max_lr until the last decay_steps."""
    warmup_steps: int = flag(5000, on_resume="told")
    """Steps of linear warm-up from 0 to max_lr."""
    decay_steps: int = flag(0, on_resume="told")
    """Steps before end_steps in which wsd decays. 0: never."""
    end_steps: int = flag(75000, on_resume="told", least=1)
    """Step at which the learning rate reaches end_lr; training_steps, if only that is given."""
    grad_clip_norm: float = flag(1.0, on_resume="kept", least=1e-12)
    """Largest global norm of the gradient, in float32; larger gradients are scaled down."""
    embedding_lr: float = flag(1.0, on_resume="kept")
    """Learning rate of the embedding, in multiples of the schedule's; small models gain from 16."""
    weight_decay: float = flag(0.1, on_resume="kept")
    """Decoupled weight decay of matrices; norms, routers and their biases are exempt. If not given, more on little
    text."""
    adam_b2: float = flag(0.95, on_resume="kept", below=1)
    """Decay of AdamW's second moment; the first moment's is 0.9."""
    muon_momentum: float = flag(0.95, on_resume="kept", below=1)
    """Momentum of Muon, the share that the next step keeps. Short runs gain from less."""
    expert_momentum: float = flag(0.0, on_resume="kept", absent=0.0, below=1)
    """Momentum of Muon for routed experts; 0: muon_momentum. Many experts, with few tokens each, gain from more."""
    balance_weight: float = flag(
        1e-4, on_resume="kept", free_with_weights=True, absent=1e-4, alias="alpha"
    )
    """Weight of the sequence-level load-balancing loss."""
    bias_update_rate: float = flag(1e-3, on_resume="kept", free_with_weights=True, absent=1e-3)
    """Step by which a router's selection bias moves towards an even load after every training step."""

    @property
    def comes_down(self):
        """Whether the learning rate comes down to end_lr; that of a trunk, wsd without decay_steps, does not."""
        return self.schedule != "wsd" or self.decay_steps > 0


@dataclass(frozen=True)
class Run:
    """How long, how spread out, and what is written."""

    preset: str = flag("moe1b", on_resume="free", common=True)
    """Named set of defaults; a flag given beside it wins. list: print them all, with their sizes."""
    config: str = flag("", on_resume="free", per_process=True, common=True)
    """JSON file of flags, such as the config.json of a run, between the preset and the flags that are given."""
    name: str = flag("moe1b", on_resume="free", common=True, nonempty=True)
    """Name of the run, which is saved in output_dir/name."""
    output_dir: str = flag(
        "runs", on_resume="free", per_process=True, common=True, nonempty=True, expands_home=True
    )
    """Folder or gs:// address of all runs (Orbax writes no checkpoint to s3://)."""
    init_from: str = flag("", on_resume="free", path_separator="", common=True, expands_home=True)
    """Weights of a new run: a run directory, a Hugging Face folder, or hf://ORGANISATION/NAME[@REVISION] or gpt2 of its
    hub. They have the architecture."""
    n_device_axis: Mesh = flag((0, 1, 1), on_resume="free", common=True, most=MANY)
    """Mesh shape: dp pp tp. dp 0: all devices that are left."""
    n_devices: int = flag(0, on_resume="free", common=True, most=MANY)
    """Devices to use; 0: all. Without an accelerator this many are simulated."""
    pp_interleave: int = flag(0, on_resume="free", most=MANY)
    """Rounds of the pipeline, by which its bubble is divided; pp x this must divide blocks. 0: up to 4 where pp > 1."""
    training_steps: int = flag(75000, on_resume="free", common=True, least=1)
    """Optimizer step at which training ends, and the schedule unless end_steps is given too. If not given, little text
    ends it after four epochs."""
    accumulation_steps: int = flag(1, on_resume="batch", alias="grad_step", least=1, most=WIDE)
    """Batches whose gradients are accumulated for one optimizer step. If not given, more where a step would not fit in
    a device's memory."""
    eval_steps: int = flag(10, on_resume="free", least=1)
    """Validation batches of an evaluation, the same ones every time."""
    eval_every: int = flag(100, on_resume="free", alias="checkpoint_steps", common=True, least=1)
    """Steps between evaluations, each with one printed line."""
    eval_tasks: str = flag("", on_resume="free", path_separator=",")
    """Tasks, groups, tags or patterns of EleutherAI's lm_eval to score, with commas between them, at evaluations on
    a multiple of save_steps and at the end. A name with a slash is a folder of task files."""
    eval_tasks_limit: int = flag(0, on_resume="free")
    """Questions of each task, always the same; 0: all."""
    save_steps: int = flag(0, on_resume="free")
    """Steps between checkpoints and samples; 0: 10 x eval_every, in a short run fewer: about a tenth of it. One more is
    saved at the end, or when stopped."""
    keep_checkpoints: int = flag(3, on_resume="free", least=1)
    """Newest checkpoints to keep, beside those of keep_every and the one with the smallest validation loss."""
    keep_every: int = flag(0, on_resume="free")
    """Keep every checkpoint whose step is a multiple of this; 0: none."""
    max_bad_steps: int = flag(10, on_resume="free")
    """Consecutive skipped steps, whose loss or gradient is not finite, before a rollback to before them; 0: none."""
    seed: int = flag(0, on_resume="kept")
    """Seed of the parameters, the data order, dropout and samples."""
    wandb: bool = flag(False, on_resume="free", common=True)
    """Log to Weights & Biases too, into WANDB_PROJECT of WANDB_ENTITY; WANDB_MODE=offline works."""
    tensorboard: bool = flag(False, on_resume="free")
    """Write events for TensorBoard too (bash setup_tpu.sh tensorboard)."""
    profile: str = flag("", on_resume="free")
    """Steps FIRST:LAST that jax's profiler traces into plugins/profile of the run, for tools/trace.py and pprof."""
    compilation_cache: str = flag(
        "~/.cache/moe-pretraining-xla", on_resume="free", per_process=True
    )
    """Folder or gs:// address of XLA's persistent compilation cache; empty: none."""
    coordinator: str = flag("", on_resume="free", per_process=True)
    """HOST:PORT of process 0 of several that train together. Empty: found on TPU pods, Slurm and Kubernetes."""
    num_processes: int = flag(0, on_resume="free", most=MANY)
    """Processes that meet at coordinator, each with an equal part of the devices. 1: this one trains alone."""
    process_id: int = flag(0, on_resume="free", per_process=True, most=MANY)
    """Which of the num_processes this is, from 0."""
    peer_timeout: int = flag(100, on_resume="free", per_process=True, least=1, most=DAYS)
    """Seconds of silence after which a process is taken for lost; at the start all must meet in three times these."""
    stuck_limit: int = flag(1800, on_resume="free", least=1, most=DAYS)
    """Seconds that a step, evaluation, checkpoint or sampling may take before its process ends, with status 75."""

    @property
    def folder(self):
        """The run directory: everything that the run writes is in it."""
        return os.path.join(self.output_dir, self.name)


@dataclass(frozen=True)
class Sample:
    """The samples drawn at every checkpoint."""

    prompt: str = flag("The", on_resume="free")
    """Text that samples continue; if not given, the first words of the validation text, or the preset's on its own
    data."""
    inference_batch: int = flag(4, on_resume="free", least=1, most=MANY)
    """Samples to draw."""
    max_tokens: int = flag(64, on_resume="free", least=1)
    """Tokens to add to the prompt."""
    top_k: int = flag(40, on_resume="free")
    """Most likely tokens to draw from; 0: all."""
    temperature: float = flag(0.8, on_resume="free")
    """Divides the logits before drawing; 0: always the most likely token."""


@dataclass(frozen=True)
class Plan:
    """What a step would cost. Nothing is trained and no device is needed."""

    plan: str = flag("", common=True)
    """Machine whose compiler compiles the step: a slice as Google names it, v4-32 or v5e-8, CHIP:TOPOLOGY such as
    v4:2x4x4 (v2, v3, v4, v5e, v5p, v6e, v7x), SLICES*CHIP:TOPOLOGY, 8xH200 (any GPU of runtime/chips.py), or 2x8xH200
    for two hosts. A step that does not fit its memory ends with status 3."""
    by_formulas: bool = False
    """Answer by formulas alone, in a second, even where the compiler is installed."""
    search: bool = False
    """Try meshes, microbatches, remat and fsdp with the same global batch, and print the fastest."""
    plan_json: str = ""
    """File for the plan as one JSON object. Beside NAME.json, NAME.hlo is the compiled program."""


@dataclass(frozen=True)
class Design:
    """A run for what you have: a machine and some hours. Nothing is trained and no device is needed."""

    design: str = flag("", common=True)
    """Machine, as --plan names it: choose model, data, batch, rates and mesh for it, and write them as a file of flags
    for --config. Every flag given beside it stays as it is."""
    hours: float = flag(0.0, common=True, most=1e6)
    """Hours of the machine, for --design."""
    tokens: float = flag(0.0)
    """Tokens to train on, such as 5e9, for --design; with --hours the largest model that trains on them in time."""
    target_loss: float = flag(0.0)
    """Held-out loss to reach, for --design, on the text for which docs/rates.md predicts it."""
    design_json: str = flag("designed.json", nonempty=True)
    """File that --design writes."""


# The most layers that the program of a batch has one after another, by platform. More have a loop, to compile fast:
# the 48 of `moe1b` take the compiler for v4 two and a half times as long without, and the step is a sixth shorter.
UNROLLED = {"cpu": 12, "gpu": 48, "tpu": 48}


@dataclass(frozen=True)
class Config:
    """Pretrain a mixture-of-experts language model.

    Train a small one, on Python's own source, on whatever this machine has:
      bash run.sh local
    Train on shards of your own, on 8 devices:
      python main.py --preset gpt2-124m --data data/shards/fineweb-edu-10BT --n_device_axis 8 1 1
    See what a step would cost on a machine that you do not have:
      python main.py --n_device_axis 8 2 2 --plan v4:2x4x4
    Choose a model and everything else for a machine and some hours, and train it:
      python main.py --design v5e-8 --hours 24
      python main.py --config designed.json
    """

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: Run = field(default_factory=Run)
    sample: Sample = field(default_factory=Sample)
    plan: Plan = field(default_factory=Plan)
    design: Design = field(default_factory=Design)

    @property
    def runs_once(self):
        """Whether each layer runs once a batch, for a single microbatch in a single stage."""
        _, pp, _ = self.run.n_device_axis
        return self.data.microbatches == pp == 1

    def has_loop(self, platform):
        """Whether layers run in a loop, over blocks or microbatches. Otherwise the program of a batch has one layer
        after another, of which the backward pass takes what it needs. A loop would stack what each layer keeps, and a
        loop around it would stack that again: a pass to write it, another to read it."""
        m = self.model
        blocks = m.blocks // self.run.pp_interleave
        many = blocks > 1 and blocks * m.layers_per_block > UNROLLED[platform]
        return many or not self.runs_once


# The groups of flags that make a run.
GROUPS = ("model", "data", "optimizer", "run", "sample")

FIELDS = {f.name: f for group in GROUPS for f in dataclasses.fields(getattr(Config(), group))}


def flags_with(**facts):
    """The flags whose field has these facts, such as on_resume="free"."""
    found = set()
    for name, f in FIELDS.items():
        its = vars(facts_of(f))
        if all(its[fact] == value for fact, value in facts.items()):
            found.add(name)
    return found


KEPT = flags_with(on_resume="kept")
# {flag: its value where an architecture has no such flag} of the flags that not every architecture has
ABSENT = {n: facts_of(f).absent for n, f in FIELDS.items() if facts_of(f).absent is not None}
# {another name of a flag: the flag}
ALIASES = {facts_of(f).alias: name for name, f in FIELDS.items() if facts_of(f).alias}


def flatten(cfg):
    """Config -> {flag: value} without the groups, for what is printed and stored: no address has a password there."""
    flags = {name: value for group in GROUPS for name, value in vars(getattr(cfg, group)).items()}
    return {n: masked(value) if isinstance(value, str) else value for n, value in flags.items()}


def replace(cfg, **flags):
    """A copy of `cfg` with the given flags changed."""
    groups = {}
    for group, values in vars(cfg).items():
        if own := {n: flags.pop(n) for n in vars(values) if n in flags}:
            groups[group] = dataclasses.replace(values, **own)
    assert not flags, f"no such flags: {flags}"
    return dataclasses.replace(cfg, **groups)
