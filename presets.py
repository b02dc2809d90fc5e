"""Presets: named sets of defaults, each a model and how it is trained."""

from architectures import flags_without_choice
from utils import Config, UserError, nearest, replace

# minutes of training on two CPU cores, on the embedded corpus
SMALL_RUN = dict(
    model_dtype="float32",
    fsdp="hoist",
    train_batch_size=16,
    val_batch_size=16,
    microbatches=8,
    max_lr=1.5e-3,
    end_lr=6e-5,
    embedding_lr=16.0,
    warmup_steps=30,
    end_steps=280,
    training_steps=280,
    adam_b2=0.99,
    weight_decay=0.0,
    eval_every=40,
    prompt="def ",
    bucket_name="data/shards/stdlib",
)
# nanoGPT's training of GPT-2: half a million tokens a step where dp is 1
GPT2_RUN = dict(
    vocab_size=50257,
    norm_eps=1e-5,
    T=1024,
    train_batch_size=480,
    val_batch_size=48,
    microbatches=48,
    warmup_steps=2000,
    end_steps=600_000,
    training_steps=600_000,
)
PRESETS = {
    # rates as docs/rates.md derives them from those of tiny
    "moe1b": dict(
        optimizer="muon",
        schedule="linear",
        max_lr=4e-3,
        end_lr=0.0,
        embedding_lr=1.75,
        weight_decay=0.03,
        embedding_norm=True,
        latent_conv=3,
    ),
    "tiny": SMALL_RUN
    | dict(
        name="tiny",
        train_batch_size=8,
        microbatches=4,
        optimizer="muon",
        schedule="linear",
        muon_momentum=0.85,
        max_lr=16e-3,
        end_lr=0.0,
        embedding_lr=1.75,
        warmup_steps=30,
        end_steps=400,
        training_steps=400,
        weight_decay=0.1,
        balance_weight=4e-2,
        bias_update_rate=1e-2,
        model_dimension=128,
        vocab_size=8192,
        n_head=4,
        blocks=2,
        layers_per_block=2,
        T=128,
        latent_dim=64,
        rope_dim=32,
        embedding_norm=True,
        latent_conv=3,
        n_experts=8,
        experts_per_token=2,
        n_shared=1,
        expert_dim=128,
    ),
    # JAXformer's small configuration, 8,192 tokens a step on one device, to measure speed on a CPU: see tools/bench.py
    "jaxformer-small": dict(
        name="jaxformer-small",
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
        experts_per_token=2,
        n_shared=1,
        model_dtype="float32",
        fsdp="hoist",
        microbatches=8,
    ),
    # every part of DeepSeek-V3 (arXiv:2412.19437, section 4.2), as small as tiny
    "deepseek-tiny": dict(
        **SMALL_RUN,
        name="deepseek-tiny",
        model_dimension=128,
        vocab_size=8192,
        tied=False,
        n_head=4,
        first_layers=1,
        blocks=4,
        layers_per_block=1,
        moe_rope=True,
        T=128,
        latent_dim=64,
        q_latent_dim=96,
        nope_dim=32,
        v_dim=32,
        rope_dim=16,
        n_experts=16,
        experts_per_token=4,
        n_groups=4,
        k_groups=2,
        routed_scaling=2.5,
        n_shared=1,
        expert_dim=64,
    ),
    # Radford et al., 2019, table 2, and a small one for minutes on two CPU cores
    "gpt2-tiny": dict(
        architecture="gpt2",
        **SMALL_RUN,
        name="gpt2-tiny",
        model_dimension=128,
        vocab_size=8192,
        norm_eps=1e-5,
        n_head=4,
        blocks=4,
        T=128,
    ),
    "gpt2-124m": dict(
        architecture="gpt2", **GPT2_RUN, name="gpt2-124m", model_dimension=768, n_head=12, blocks=12
    ),
    "gpt2-350m": dict(
        architecture="gpt2",
        **GPT2_RUN,
        name="gpt2-350m",
        model_dimension=1024,
        n_head=16,
        blocks=24,
        max_lr=3e-4,
        end_lr=3e-5,
    ),
    # moonshotai/Moonlight-16B-A3B, its published configuration
    "moonlight-16b": dict(
        model_dimension=2048,
        vocab_size=163840,
        tied=False,
        norm_eps=1e-5,
        n_head=16,
        first_layers=1,
        blocks=26,
        layers_per_block=1,
        moe_rope=True,
        T=8192,
        latent_dim=512,
        q_latent_dim=0,
        nope_dim=128,
        v_dim=128,
        rope_dim=64,
        rope_base=50_000.0,
        ffn_dim=11264,
        n_experts=64,
        experts_per_token=6,
        routed_scaling=2.446,
        n_shared=2,
        expert_dim=1408,
        name="moonlight-16b",
    ),
    # deepseek-ai/DeepSeek-V3, its published configuration, at the sequence length of its pretraining
    "deepseek-v3-671b": dict(
        model_dimension=7168,
        vocab_size=129280,
        tied=False,
        n_head=128,
        first_layers=3,
        blocks=58,
        layers_per_block=1,
        moe_rope=True,
        T=4096,
        latent_dim=512,
        q_latent_dim=1536,
        nope_dim=128,
        v_dim=128,
        rope_dim=64,
        ffn_dim=18432,
        n_experts=256,
        experts_per_token=8,
        n_groups=8,
        k_groups=4,
        routed_scaling=2.5,
        n_shared=1,
        expert_dim=2048,
        name="deepseek-v3-671b",
    ),
}


def preset(name):
    """The configuration that `--preset name` stands for."""
    if name not in PRESETS:
        raise UserError(
            f"--preset {name}: no such preset{nearest(name, PRESETS)}; there are "
            f"{', '.join(PRESETS)}."
        )
    flags = PRESETS[name]
    if "architecture" in flags:  # asking for another than the default one imports jax
        flags = flags_without_choice(flags["architecture"]) | flags
    return replace(Config(), preset=name, **flags)
