"""OLMoE (arXiv:2409.02060): Qwen3's layers with experts, with two differences. Queries and keys are normalized over all
heads together (section 2.1, QK-Norm), and gates are not divided by their sum."""

import jax
from jax import lax

from architectures import qwen3
from architectures.experts import choose_experts, router_logits
from architectures.layers import rms_norm_of_all_heads
from architectures.parameters import scale_param
from runtime.messages import UserError

ALL_HEADS = qwen3.HeadNorm(
    scale=lambda H, K: scale_param(h=H, k=K, split=dict(h="tp")),
    norm=rms_norm_of_all_heads,
)


def router(p, x, m):
    """Softmax router whose gates are the scores themselves: x float32 [n, D] -> scores [n, E], chosen experts [n, k]
    and their gates [n, k]."""
    scores = jax.nn.softmax(router_logits(p, x))
    return scores, *choose_experts(scores, lax.stop_gradient(scores), m, normalize=False)


def layer_cost(m, kind):
    """`LayerCost` of a layer: Qwen3's, and a sum over tp for a token's queries and one for its keys."""
    return qwen3.layer_cost(m, kind)._replace(summed=2)


def check_flags(cfg):
    """Raises UserError for flags that do not fit each other."""
    if not cfg.model.n_experts:
        raise UserError(
            "must be at least 1 for {architecture}",
            flag="n_experts",
            value=0,
            architecture="olmoe",
        )
    qwen3.check_flags(cfg)


ARCHITECTURE = qwen3.family(
    "olmoe",
    head_norm=ALL_HEADS,
    router=router,
    layer_cost=layer_cost,
    check=check_flags,
    flags=qwen3.FLAGS - {"head_dim"},
    fixed=dict(activation="swiglu", ffn_dim=0),
    like="qwen3",
    published=dict(
        model_type="olmoe",
        model_class="OlmoeForCausalLM",
        entries=dict(
            intermediate_size="expert_dim",
            num_key_value_heads="n_kv_head",
            num_experts="n_experts",
            num_experts_per_tok="experts_per_token",
        ),
        # without a pad_token_id transformers takes token 1, which then has no gradient
        supported=dict(norm_topk_prob=[False], clip_qkv=[None], pad_token_id=[None]),
    ),
)
