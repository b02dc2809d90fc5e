"""The table of model families: one row for each architecture, from which its tests follow.

What a row says is read by the tests of parity, decoding, documents, plan, export and, with sizes, transformers. They
take every row, so `pytest -k NAME` runs what there is for one family.
"""

from typing import NamedTuple

import numpy as np
from small_models import given

from architectures import flags_without_choice


class Family(NamedTuple):
    """What the tests need to know of an architecture."""

    small: dict  # flags of a model that compiles in seconds, on top of small_models.SMALL
    # {name: flags on top of `small`} in which transformers must have the same logits and gradients; all sizes are odd
    sizes: dict = {}
    # (dp, pp, tp) on which the plan's formulas are compared with what XLA compiles
    plan_mesh: tuple = (1, 2, 4)
    plan: dict = {}  # flags of that comparison, on top of `small`
    spellings: tuple = ()  # entries of config.json that leave the model the same, beside those of all families


SMALL_DEEPSEEK = given("""
    --no_embedding_norm --embedding_conv 0 --no_backout --latent_conv 0 --no_exclusive_attention --first_layers 1
    --layers_per_block 1 --no_tied --head_dim 12 --q_latent_dim 10 --experts_per_token 3 --n_groups 4 --k_groups 2
    --routed_scaling 2.5
""")
ODD_DEEPSEEK = given("""
    --n_groups 1 --k_groups 1 --experts_per_token 2 --blocks 2 --rope_dim 6 --latent_dim 20
    --q_latent_dim 18 --balance_weight 0
""")
GROUPS = given("--n_experts 8 --n_groups 4 --k_groups 2 --experts_per_token 3 --n_shared 2")
NO_LATENT = given("""
    --q_latent_dim 0 --first_layers 2 --rope_base 5e4 --n_shared 0 --experts_per_token 1
""")
SPARSE = given("""
    --first_layers 0 --n_shared 1 --n_experts 16 --experts_per_token 4 --tied --expert_dim 8
""")
SMALL_GPT2 = flags_without_choice("gpt2") | given("--blocks 4 --ffn_dim 72 --embedding_lr 1")
SMALL_QWEN3 = flags_without_choice("qwen3") | given("""
    --n_kv_head 4 --n_head 8 --head_dim 12 --rope_base 3e4
""")
MEGATRON = given("""
    --blocks 2 --optimizer adamw --sequence_parallel megatron --fsdp none --remat dots
""")

FAMILIES = {
    "deepseek": Family(
        SMALL_DEEPSEEK,
        sizes={
            "groups": ODD_DEEPSEEK | GROUPS,
            "no query latent": ODD_DEEPSEEK | NO_LATENT | given("--sequence_parallel megatron"),
            "moe-sparse": ODD_DEEPSEEK | NO_LATENT | SPARSE,
        },
        plan_mesh=(2, 2, 2),
        plan=given("--capacity_factor 1.5 --blocks 2"),
    ),
    "gpt2": Family(
        SMALL_GPT2,
        sizes={
            "gpt2": given("--model_dimension 36 --T 24"),
            "gpt2 wide": given(
                "--model_dimension 28 --T 24 --n_head 2 --blocks 2 --ffn_dim 0 --no_tied"
            ),
        },
        plan_mesh=(2, 2, 2),
        plan=MEGATRON,
        spellings=(
            {"activation_function": "gelu_pytorch_tanh"},
            {"activation_function": "gelu_fast"},
        ),
    ),
    "qwen3": Family(
        SMALL_QWEN3,
        sizes={
            "qwen3": given("--balance_weight 0"),
            "qwen3 of one expert": given("--balance_weight 0 --experts_per_token 1 --blocks 2"),
            "qwen3 dense": given("""
                --balance_weight 0 --n_kv_head 2 --blocks 2 --n_experts 0 --experts_per_token 0 --no_tied
            """),
        },
        plan=MEGATRON,
    ),
    "olmoe": Family(
        flags_without_choice("olmoe") | given("--n_kv_head 4 --n_head 8 --rope_base 3e4 --no_tied"),
        sizes={"olmoe": given("--balance_weight 0 --expert_dim 20 --experts_per_token 3")},
        plan=MEGATRON,
    ),
}
# {name: flags} of one small model of each family
ARCHITECTURES = {name: family.small for name, family in FAMILIES.items()}
# {name: flags} of the models that transformers has too, each with an epsilon of its own in its norms
SIZES = {
    name: family.small | flags
    for family in FAMILIES.values()
    for name, flags in family.sizes.items()
}
for flags, exponent in zip(SIZES.values(), np.random.default_rng(0).uniform(-6, -3, len(SIZES))):
    flags["norm_eps"] = float(10**exponent)
