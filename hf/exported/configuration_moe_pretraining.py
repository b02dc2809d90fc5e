"""Configuration of a model trained with moe-pretraining, for Hugging Face's transformers 5."""

from transformers import PreTrainedConfig


class MoEPretrainingConfig(PreTrainedConfig):
    """The entries of config.json as attributes. Most are those of DeepSeek-V3; its own class lacks these:

    layers_per_block: the last layer of a block has routed experts, the others a dense feed-forward; where this is not
        1, the last has no rotary channels
    rope_frequencies: radians per position of each pair of rotary channels
    latent_conv: earlier tokens that a convolution adds to a key/value latent and a rotary key
    exclusive_attention: whether what heads read has no part along the token's own value, in layers with experts
    embedding_norm: whether rows of the embedding are normalized
    embedding_conv: earlier tokens whose rows of the embedding a convolution adds to a token's
    backout: whether a share of what entered the first layer is subtracted before the last norm
    hidden_act: silu for SwiGLU, or gelu_new for a feed-forward without a gate
    """

    model_type = "moe_pretraining"
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None  # from which rope_frequencies were computed
