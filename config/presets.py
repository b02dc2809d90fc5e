"""Presets: named sets of defaults, each a model and how it is trained, as flags of main.py. The last of equal flags
counts. A preset names its runs; the schedule ends with training_steps."""

import shlex

from architectures import flags_without_choice
from config.parser import read_words
from runtime.messages import UserError, nearest
from utils import Config, replace

# a model of 2M parameters, and minutes of training on two CPU cores, on the embedded corpus
MINUTES = """
    --model_dimension 128 --vocab_size 8192 --n_head 4 --blocks 4 --T 128 --model_dtype float32
    --global_batch_size 32 --microbatch_size 16 --max_lr 1.5e-3 --embedding_lr 16 --warmup_steps 30
    --training_steps 280 --adam_b2 0.99 --weight_decay 0 --eval_every 40
    --prompt class --data data/shards/stdlib
"""
# Muon to a rate of 0
MUON = "--optimizer muon --schedule linear --end_lr 0 --embedding_lr 1.75"
# the blocks of moe1b for minutes on two CPU cores
TINY = f"""{MINUTES} {MUON}
    --blocks 2 --layers_per_block 2 --latent_dim 64 --rope_dim 32 --embedding_norm --embedding_conv 3 --latent_conv 3
    --n_experts 8 --n_shared 1 --expert_dim 128 --global_batch_size 16 --eval_steps 20
    --muon_momentum 0.75 --max_lr 16e-3 --training_steps 400 --weight_decay 0.4
    --balance_weight 1e-3 --bias_update_rate 1e-2
"""
# nanoGPT's training of GPT-2: half a million tokens a step
GPT2 = """
    --architecture gpt2 --vocab_size 50257 --norm_eps 1e-5 --T 1024 --global_batch_size 480
    --microbatch_size 10 --eval_steps 1 --warmup_steps 2000 --training_steps 600000
"""
# DeepSeek-V3's and Moonlight's attention and experts
DEEPSEEK = """
    --no_tied --layers_per_block 1 --latent_dim 512 --head_dim 128 --rope_dim 64 --blocks 58
"""
QWEN3 = """
    --architecture qwen3 --vocab_size 151936 --head_dim 128 --T 4096 --rope_base 1e6
    --balance_weight 1e-3
"""


def week(width, batch, blocks, T, max_lr, weight_decay, warmup_steps, training_steps):
    """DeepSeek-V3's blocks, small enough that a machine of docs/models.md ends within a week with 20 tokens for each
    parameter. Rates as docs/rates.md derives them."""
    return f"""{MUON}
        --vocab_size 50257 --model_dimension {width} --n_head {width // 64} --T {T}
        --first_layers 1 --blocks {blocks} --layers_per_block 1
        --latent_dim {width // 4} --q_latent_dim 0 --head_dim 64 --rope_dim 32
        --experts_per_token 4 --n_shared 1 --expert_dim {width // 2}
        --global_batch_size {batch} --microbatch_size 4
        --max_lr {max_lr} --weight_decay {weight_decay} --warmup_steps {warmup_steps}
        --training_steps {training_steps} --eval_every 250 --save_steps 500
    """


PRESETS = {
    # rates as docs/rates.md derives them from those of tiny
    "moe1b": f"""{MUON}
        --eval_steps 5 --max_lr 4e-3 --weight_decay 0.03 --embedding_norm --embedding_conv 3 --latent_conv 3
    """,
    "tiny": TINY,
    # many small experts in every layer, at tiny's operations a token
    "sparse-tiny": f"""{TINY}
        --blocks 4 --layers_per_block 1 --n_experts 64 --experts_per_token 5 --expert_dim 64
    """,
    # JAXformer's small configuration, 8,192 tokens a step, to measure speed on a CPU: see tools/bench.py
    "jaxformer-small": """
        --model_dimension 256 --vocab_size 8192 --n_head 4 --blocks 2 --layers_per_block 2 --T 256
        --latent_dim 64 --rope_dim 32 --activation gelu --n_experts 8 --n_shared 1
        --global_batch_size 32 --accumulation_steps 4 --eval_steps 5 --remat none
    """,
    # every part of DeepSeek-V3 (arXiv:2412.19437, section 4.2), as small as tiny
    "deepseek-tiny": f"""{MINUTES}
        --no_tied --first_layers 1 --layers_per_block 1 --latent_dim 64 --q_latent_dim 96
        --rope_dim 16 --experts_per_token 4 --n_groups 4 --k_groups 2 --routed_scaling 2.5
        --n_shared 1 --expert_dim 64
    """,
    # Radford et al., 2019, table 2, and a small one for minutes on two CPU cores
    "gpt2-tiny": f"{MINUTES} --architecture gpt2 --norm_eps 1e-5",
    "gpt2-124m": f"{GPT2} --model_dimension 768 --n_head 12 --blocks 12",
    "gpt2-350m": f"""{GPT2}
        --model_dimension 1024 --n_head 16 --blocks 24 --max_lr 3e-4 --end_lr 3e-5
    """,
    "moe-131m": week(640, 64, 8, 512, 2.4e-3, 0.036, 5600, 80_500),
    "moe-684m": week(1152, 128, 16, 1024, 2.9e-3, 0.023, 7300, 105_000),
    "moe-1.6b": week(1536, 128, 22, 2048, 3.1e-3, 0.019, 8500, 122_000),
    "moe-6.3b": week(2048, 256, 28, 2048, 2.8e-3, 0.010, 17_000, 243_000) + "--n_experts 32",
    # many small experts in every layer; 20B tokens
    "moe-sparse": week(640, 256, 22, 1024, 3.6e-3, 0.033, 5300, 76_300)
    + "--first_layers 0 --n_experts 128 --expert_dim 256",
    # every part of Qwen3's mixture of experts, as small as tiny
    "qwen3-tiny": f"""{MINUTES}
        --architecture qwen3 --n_head 8 --n_kv_head 4 --head_dim 32 --experts_per_token 4
        --expert_dim 64 --balance_weight 1e-3
    """,
    # Qwen/Qwen3-0.6B-Base and Qwen/Qwen3-30B-A3B-Base, their published configurations, at the sequence length of most
    # of their pretraining
    "qwen3-0.6b": f"""{QWEN3}
        --model_dimension 1024 --n_head 16 --n_kv_head 8 --blocks 28 --ffn_dim 3072
        --n_experts 0 --experts_per_token 0
    """,
    "qwen3-30b-a3b": f"""{QWEN3}
        --no_tied --model_dimension 2048 --n_head 32 --n_kv_head 4 --blocks 48 --ffn_dim 6144
        --n_experts 128 --experts_per_token 8 --expert_dim 768
    """,
    # moonshotai/Moonlight-16B-A3B, its published configuration
    "moonlight-16b": f"""{DEEPSEEK}
        --model_dimension 2048 --vocab_size 163840 --norm_eps 1e-5 --n_head 16 --first_layers 1
        --blocks 26 --T 8192 --q_latent_dim 0 --rope_base 50000 --ffn_dim 11264 --n_experts 64
        --experts_per_token 6 --routed_scaling 2.446 --expert_dim 1408 --microbatch_size 2
    """,
    # deepseek-ai/DeepSeek-V3, its published configuration, at the sequence length and with the batch of its pretraining
    "deepseek-v3-671b": f"""{DEEPSEEK}
        --model_dimension 7168 --vocab_size 129280 --n_head 128 --first_layers 3 --T 4096
        --q_latent_dim 1536 --ffn_dim 18432 --n_experts 256 --experts_per_token 8 --n_groups 8
        --k_groups 4 --routed_scaling 2.5 --n_shared 1 --expert_dim 2048
        --global_batch_size 15360 --microbatch_size 2 --eval_steps 1
    """,
}


def preset(name):
    """The configuration that `--preset name` stands for. Raises UserError where there is none."""
    if name not in PRESETS:
        raise UserError(
            f"no such preset{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}, and list "
            f"shows their sizes",
            flag="preset",
            value=name or "''",
        )
    flags, _ = read_words(Config, shlex.split(PRESETS[name]), "config/presets.py")
    if "training_steps" in flags:
        flags["end_steps"] = flags["training_steps"]
    if "architecture" in flags:  # asking for another than the default one imports jax
        flags = flags_without_choice(flags["architecture"]) | flags
    return replace(Config(), preset=name, name=name, **flags)
