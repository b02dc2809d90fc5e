"""Presets: named sets of defaults, each a model and how it is trained.

A preset is {flag: value}, built `based_on` others: what it gives itself is how it differs from them. A preset names its
runs, and its schedule ends with training_steps.
"""

from architectures import flags_without_choice
from config import parser
from runtime.messages import UserError, nearest
from utils import FIELDS, Config, replace


def based_on(*bases, **flags):
    """{flag: value} of a preset: that of the `bases`, where a later one wins, with `flags` in place of theirs."""
    for name, value in flags.items():
        must = parser.unmet(FIELDS[name], value)
        assert not must, f"{name} is {value!r}, but must be {must}"
    found = {}
    for base in bases:
        found |= base
    return found | flags


# a model of 2M parameters, and minutes of training on two CPU cores, on the embedded corpus
MINUTES = based_on(
    model_dimension=128,
    vocab_size=8192,
    n_head=4,
    blocks=4,
    T=128,
    model_dtype="float32",
    global_batch_size=32,
    microbatch_size=16,
    max_lr=1.5e-3,
    embedding_lr=16.0,
    warmup_steps=30,
    training_steps=280,
    adam_b2=0.99,
    weight_decay=0.0,
    eval_every=40,
    prompt="class",
    data="data/shards/stdlib",
)
# Muon to a rate of 0
MUON = based_on(optimizer="muon", schedule="linear", end_lr=0.0, embedding_lr=1.0)
# the blocks of moe1b for minutes on two CPU cores
TINY = based_on(
    MINUTES,
    MUON,
    blocks=2,
    layers_per_block=2,
    latent_dim=64,
    rope_dim=32,
    embedding_norm=True,
    embedding_conv=3,
    backout=True,
    latent_conv=3,
    exclusive_attention=True,
    n_experts=8,
    n_shared=1,
    expert_dim=128,
    global_batch_size=16,
    eval_steps=20,
    warmup_steps=10,
    muon_momentum=0.75,
    max_lr=16e-3,
    training_steps=400,
    weight_decay=0.4,
    balance_weight=1e-3,
    bias_update_rate=1e-2,
)
# nanoGPT's training of GPT-2: half a million tokens a step
GPT2 = based_on(
    architecture="gpt2",
    vocab_size=50257,
    norm_eps=1e-5,
    T=1024,
    global_batch_size=480,
    microbatch_size=10,
    eval_steps=1,
    warmup_steps=2000,
    training_steps=600_000,
)
# DeepSeek-V3's and Moonlight's attention and experts
DEEPSEEK = based_on(
    tied=False, layers_per_block=1, latent_dim=512, head_dim=128, rope_dim=64, blocks=58
)
QWEN3 = based_on(
    architecture="qwen3",
    vocab_size=151936,
    head_dim=128,
    T=4096,
    rope_base=1e6,
    balance_weight=1e-3,
)


# DeepSeek-V3's blocks at sizes that one machine trains: heads of 64 channels and no query latent
DEEPSEEK_SMALL = based_on(
    MUON,
    vocab_size=50257,
    layers_per_block=1,
    q_latent_dim=0,
    head_dim=64,
    rope_dim=32,
    experts_per_token=4,
    n_shared=1,
    microbatch_size=4,
    eval_every=250,
    save_steps=500,
)
PRESETS = {
    # rates as docs/rates.md derives them from those of tiny
    "moe1b": based_on(
        MUON,
        eval_steps=5,
        max_lr=1.2e-3,
        weight_decay=0.053,
        embedding_norm=True,
        embedding_conv=3,
        latent_conv=3,
    ),
    "tiny": TINY,
    # many small experts in every layer, at tiny's operations a token
    "sparse-tiny": based_on(
        TINY, blocks=4, layers_per_block=1, n_experts=64, experts_per_token=5, expert_dim=64
    ),
    # JAXformer's small configuration, 8,192 tokens a step, to measure speed on a CPU: see tools/bench.py
    "jaxformer-small": based_on(
        model_dimension=256,
        vocab_size=8192,
        n_head=4,
        blocks=2,
        layers_per_block=2,
        T=256,
        latent_dim=64,
        rope_dim=32,
        activation="gelu",
        n_experts=8,
        n_shared=1,
        global_batch_size=32,
        accumulation_steps=4,
        eval_steps=5,
        remat="none",
    ),
    # every part of DeepSeek-V3 (arXiv:2412.19437, section 4.2), as small as tiny
    "deepseek-tiny": based_on(
        MINUTES,
        tied=False,
        first_layers=1,
        layers_per_block=1,
        latent_dim=64,
        q_latent_dim=96,
        rope_dim=16,
        experts_per_token=4,
        n_groups=4,
        k_groups=2,
        routed_scaling=2.5,
        n_shared=1,
        expert_dim=64,
    ),
    # Radford et al., 2019, table 2, and a small one for minutes on two CPU cores
    "gpt2-tiny": based_on(MINUTES, architecture="gpt2", norm_eps=1e-5),
    "gpt2-124m": based_on(GPT2, model_dimension=768, n_head=12, blocks=12),
    "gpt2-350m": based_on(
        GPT2, model_dimension=1024, n_head=16, blocks=24, max_lr=3e-4, end_lr=3e-5
    ),
    # measured on an H200 (dev/log.md, 2026-11-26), to which the plan's times of GPUs are fitted (planning/fitted.py)
    "moe-1.6b": based_on(
        DEEPSEEK_SMALL,
        model_dimension=1536,
        n_head=24,
        blocks=22,
        first_layers=1,
        latent_dim=384,
        expert_dim=768,
        T=2048,
        global_batch_size=128,
        max_lr=3.1e-3,
        weight_decay=0.019,
        warmup_steps=8500,
        training_steps=122_000,
    ),
    # many small experts in every layer; 20B tokens
    "moe-sparse": based_on(
        DEEPSEEK_SMALL,
        model_dimension=640,
        n_head=10,
        blocks=22,
        latent_dim=160,
        n_experts=128,
        expert_dim=256,
        T=1024,
        global_batch_size=256,
        max_lr=3.6e-3,
        weight_decay=0.033,
        warmup_steps=5300,
        training_steps=76_300,
    ),
    # every part of Qwen3's mixture of experts, as small as tiny
    "qwen3-tiny": based_on(
        MINUTES,
        architecture="qwen3",
        n_head=8,
        n_kv_head=4,
        head_dim=32,
        experts_per_token=4,
        expert_dim=64,
        balance_weight=1e-3,
    ),
    # Qwen/Qwen3-0.6B-Base and Qwen/Qwen3-30B-A3B-Base, their published configurations, at the sequence length of most
    # of their pretraining
    "qwen3-0.6b": based_on(
        QWEN3,
        model_dimension=1024,
        n_head=16,
        n_kv_head=8,
        blocks=28,
        ffn_dim=3072,
        n_experts=0,
        experts_per_token=0,
    ),
    "qwen3-30b-a3b": based_on(
        QWEN3,
        tied=False,
        model_dimension=2048,
        n_head=32,
        n_kv_head=4,
        blocks=48,
        ffn_dim=6144,
        n_experts=128,
        experts_per_token=8,
        expert_dim=768,
    ),
    # moonshotai/Moonlight-16B-A3B, its published configuration
    "moonlight-16b": based_on(
        DEEPSEEK,
        model_dimension=2048,
        vocab_size=163840,
        norm_eps=1e-5,
        n_head=16,
        first_layers=1,
        blocks=26,
        T=8192,
        q_latent_dim=0,
        rope_base=50_000.0,
        ffn_dim=11264,
        n_experts=64,
        experts_per_token=6,
        routed_scaling=2.446,
        expert_dim=1408,
        microbatch_size=2,
    ),
    # deepseek-ai/DeepSeek-V3, its published configuration, at the sequence length and with the batch of its pretraining
    "deepseek-v3-671b": based_on(
        DEEPSEEK,
        model_dimension=7168,
        vocab_size=129280,
        n_head=128,
        first_layers=3,
        T=4096,
        q_latent_dim=1536,
        ffn_dim=18432,
        n_experts=256,
        experts_per_token=8,
        n_groups=8,
        k_groups=4,
        routed_scaling=2.5,
        n_shared=1,
        expert_dim=2048,
        global_batch_size=15360,
        microbatch_size=2,
        eval_steps=1,
    ),
}


def preset(name):
    """The configuration of `--preset name`. Raises UserError where there is none."""
    if name not in PRESETS:
        raise UserError(
            f"no such preset{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}, and list "
            f"shows their sizes",
            flag="preset",
            value=name,
        )
    flags = PRESETS[name]
    if "training_steps" in flags:
        flags = flags | dict(end_steps=flags["training_steps"])
    if "architecture" in flags:  # asking for another than the default one imports jax
        flags = flags_without_choice(flags["architecture"]) | flags
    return replace(Config(), preset=name, name=name, **flags)
