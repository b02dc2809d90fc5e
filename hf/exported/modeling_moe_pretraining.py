"""A model trained with moe-pretraining, for Hugging Face's transformers 5.

DeepSeek-V3 (arXiv:2412.19437) with blocks of several layers, a norm of the embedding, and short convolutions.
To read, evaluate and sample; it is not fast.

Shapes: B batch, t new tokens, T all tokens up to the last, D model, H heads, K channels of a head's key and value,
R latent, E experts, k chosen ones.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, DynamicLayer, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from .configuration_moe_pretraining import MoEPretrainingConfig

CONV_SCALE = 4  # factor on the weights of short convolutions
SMALL_EPS = 1e-6  # in norms of latents and of the embedding, and where a value's length divides


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, channels, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()
        square = x32.pow(2).mean(-1, keepdim=True)
        return (x32 * torch.rsqrt(square + self.eps) * self.weight).to(x.dtype)


def rotate(x, positions, frequencies):
    """Rotary positions: channels 2i and 2i + 1 of x [B, ..., t, channels] turn by positions [B, t] x frequency i."""
    angle = positions[..., None] * frequencies  # [B, t, channels/2]
    while angle.dim() < x.dim():
        angle = angle[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention. The cache holds normalized latents and rotated keys [B, 1, T, R + rope]."""

    def __init__(self, config, index, rope, exclusive):
        super().__init__()
        D, H, Q = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.K, self.R = config.qk_nope_head_dim, config.kv_lora_rank
        self.heads, self.rope, self.index = H, rope, index
        if Q:
            self.q_a_proj = linear(D, Q)
            self.q_a_layernorm = RMSNorm(Q, SMALL_EPS)
            self.q_b_proj = linear(Q, H * (self.K + rope))
        else:
            self.q_proj = linear(D, H * (self.K + rope))
        self.kv_a_proj_with_mqa = linear(D, self.R + rope)
        self.kv_a_layernorm = RMSNorm(self.R, SMALL_EPS)
        self.kv_b_proj = linear(self.R, H * 2 * self.K)
        self.o_proj = linear(H * self.K, D)
        if config.latent_conv:
            self.conv = nn.Parameter(torch.zeros(config.latent_conv, self.R + rope // 2))
        self.exclusive = exclusive
        self.frequencies = config.rope_frequencies[: rope // 2]
        self.scale = (self.K + rope) ** -0.5

    def forward(self, x, positions, real, seen, cache):
        """x [B, t, D] -> the same; real [B, T] is False for padding, seen [B, t, T] says who attends to whom."""
        frequencies = torch.tensor(self.frequencies, device=x.device)
        q = self.queries(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, t, K + rope]
        q, q_rope = q.split([self.K, self.rope], -1)
        q = torch.cat([q, rotate(q_rope, positions, frequencies)], -1)

        latent, key = self.kv_a_proj_with_mqa(x).split([self.R, self.rope], -1)
        key = rotate(key, positions, frequencies)
        latents = torch.cat([self.kv_a_layernorm(latent), key], -1)
        if cache is not None:
            latents = latents[:, None]
            latents = cache.update(latents, latents[..., :0], self.index)[0][:, 0]
        latents = latents * real[..., None]  # [B, T, R + rope]
        if hasattr(self, "conv"):
            latent, pairs = self.conv.split([self.R, self.rope // 2], -1)
            # one weight for both channels of a rotated pair: scores depend on distances alone
            weights = torch.cat([latent, pairs.repeat_interleave(2, -1)], -1)
            latents = short_conv(latents, weights)

        latent, key = latents.split([self.R, self.rope], -1)
        kv = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.chunk(2, -1)  # [B, H, T, K]
        k = torch.cat([k, key[:, None].expand(-1, self.heads, -1, -1)], -1)
        out = F.scaled_dot_product_attention(q, k, v, seen[:, None], scale=self.scale)
        if self.exclusive:
            out = exclude_own(out, v[:, :, -x.shape[1] :])
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def queries(self, x):
        if hasattr(self, "q_proj"):
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def exclude_own(out, own):
    """What heads read less its part along the token's own value; both [B, H, t, K]."""
    y, v = out.float(), own.float()
    along = (y * v).sum(-1, keepdim=True)
    square = v.square().sum(-1, keepdim=True)
    return (y - along / (square + SMALL_EPS) * v).to(out.dtype)


def short_conv(x, weights):
    """Adds to each token's channels those of a few tokens before it, by weights [n, C]: x [B, T, C] -> the same."""
    y = x.float()
    for distance, weight in enumerate(weights, 1):
        before = F.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]
        y = y + CONV_SCALE * weight * before
    return y.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU, or GELU without a gate."""

    def __init__(self, config, width):
        super().__init__()
        D = config.hidden_size
        if config.hidden_act == "silu":
            self.gate_proj = linear(D, width)
        self.up_proj = linear(D, width)
        self.down_proj = linear(width, D)

    def forward(self, x):
        up = self.up_proj(x)
        if hasattr(self, "gate_proj"):
            return self.down_proj(F.silu(self.gate_proj(x)) * up)
        return self.down_proj(F.gelu(up, approximate="tanh"))


class Router(nn.Linear):
    """Sigmoid router. The bias decides who is chosen and nothing else."""

    def __init__(self, config):
        super().__init__(config.hidden_size, config.n_routed_experts, bias=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.config = config

    def forward(self, x):
        """x [n, D] -> chosen experts [n, k] and their gates [n, k]."""
        c = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        wanted = scores + self.e_score_correction_bias
        groups = wanted.unflatten(-1, (c.n_group, -1))  # [n, groups, E/groups]
        if c.n_group > 1:  # only the best topk_group groups, by the sum of their two best experts
            strength = groups.topk(2, -1).values.sum(-1)
            best = strength.topk(c.topk_group, -1).indices
            kept = torch.zeros_like(strength, dtype=torch.bool).scatter(1, best, True)
            wanted = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = wanted.topk(c.num_experts_per_tok, -1).indices
        gates = scores.gather(-1, chosen)
        if c.norm_topk_prob:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        return chosen, c.routed_scaling_factor * gates


class MixtureOfExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = Router(config)
        experts = (FeedForward(config, width) for _ in range(config.n_routed_experts))
        self.experts = nn.ModuleList(experts)
        if config.n_shared_experts:
            self.shared_experts = FeedForward(config, config.n_shared_experts * width)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        chosen, gates = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            weighted = gates[token, choice, None].to(x.dtype) * expert(tokens[token])
            out.index_add_(0, token, weighted)
        out = out.view_as(x)
        if hasattr(self, "shared_experts"):
            out = out + self.shared_experts(x)
        return out


class Layer(GradientCheckpointingLayer):
    def __init__(self, config, index):
        super().__init__()
        D, eps, L = config.hidden_size, config.rms_norm_eps, config.layers_per_block
        in_blocks = index - config.first_k_dense_replace
        routed = in_blocks >= 0 and in_blocks % L == L - 1
        rope = 0 if routed and L > 1 else config.qk_rope_head_dim
        self.input_layernorm = RMSNorm(D, eps)
        self.self_attn = Attention(config, index, rope, routed and config.exclusive_attention)
        self.post_attention_layernorm = RMSNorm(D, eps)
        if routed:
            self.mlp = MixtureOfExperts(config)
        else:
            self.mlp = FeedForward(config, config.intermediate_size)

    def forward(self, x, positions, real, seen, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), positions, real, seen, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.embedding_norm:
            self.embedding_norm = RMSNorm(config.hidden_size, SMALL_EPS)
        if n := config.embedding_conv:
            self.embedding_conv = nn.Parameter(torch.zeros(n, config.hidden_size))
        layers = (Layer(config, index) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.backout:
            self.backout = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, **others):
        """input_ids [B, t] -> the hidden states [B, t, D] that the head multiplies. attention_mask [B, T] is 0 for
        padding. others: what training programs that call it directly pass to every model, such as use_cache."""
        B, t = input_ids.shape
        before = 0 if cache is None else cache.get_seq_length()
        query = before + torch.arange(t, device=input_ids.device)
        if position_ids is None:
            position_ids = query.expand(B, t)
        key = torch.arange(before + t, device=input_ids.device)
        if attention_mask is None:
            attention_mask = torch.ones_like(key).expand(B, -1)
        real = attention_mask.bool()
        seen = (key <= query[:, None]) & real[:, None]
        # padding attends to itself, since softmax of nothing is NaN
        seen = seen | (key == query[:, None])

        x = self.embed_tokens(input_ids)
        if hasattr(self, "embedding_norm"):
            x = self.embedding_norm(x)
        if hasattr(self, "embedding_conv"):
            x = self.with_tokens_before(x, real, cache)
        embedded = x
        for layer in self.layers:
            x = layer(x, position_ids, real, seen, cache=cache)
        if hasattr(self, "backout"):  # the head reads what the layers have added
            x = x - (self.backout.float() * embedded).to(x.dtype)
        return BaseModelOutput(last_hidden_state=self.norm(x))

    def with_tokens_before(self, x, real, cache):
        """x [B, t, D] -> the same, with shares of earlier tokens, which `cache` holds as one more layer."""
        t = x.shape[1]
        if cache is not None:
            if len(cache.layers) == len(self.layers):  # generate() makes as many
                cache.layers.append(DynamicLayer())
            x = cache.update(x[:, None], x[:, None, :, :0], len(self.layers))[0][:, 0]
        x = x * real[..., None]  # [B, T, D]
        return short_conv(x, self.embedding_conv)[:, -t:]


class MoEPretrainingForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MoEPretrainingConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "gate.weight", "conv"]
    _no_split_modules = ["Layer"]
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.model = Transformer(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        use_cache=None,
        labels=None,
        logits_to_keep=0,
        **others,
    ):
        """input_ids [B, t] -> logits [B, t, vocabulary], or of the last logits_to_keep tokens alone. attention_mask
        [B, T] is 0 for padding; labels [B, t] as transformers has them, -100 for tokens without a loss. others:
        arguments of the loss, such as num_items_in_batch, by which Trainer divides where it accumulates gradients."""
        if cache is None:  # transformers before 5.24 calls it by the other name
            cache = past_key_values
        if use_cache and cache is None:
            cache = DynamicCache()
        if not isinstance(cache, DynamicCache | None):
            raise ValueError(
                f"This model decodes with a DynamicCache, not with a {type(cache).__name__}; leave "
                f"cache_implementation out."
            )
        x = self.model(input_ids, attention_mask, position_ids, cache).last_hidden_state
        logits = self.lm_head(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        output["cache" if hasattr(output, "cache") else "past_key_values"] = cache
        return output
