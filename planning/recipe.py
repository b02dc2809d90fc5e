"""The recipe: the rules that turn a width and a number of tokens into the flags of a run. No jax.

    width  = WIDTHS[k]                                the size of the model: the one dial
    model  = model_flags(width, vocab_size)           from which `model.count_params` counts its parameters
    tokens = TOKENS_PER_PARAMETER x parameters
    batch  = batch_tokens(tokens, T)
    rest   = training_flags(tokens, batch, parameters, T, width)

All sizes are members of one family, that of the presets tiny and moe1b. docs/rates.md says where each rule comes from,
and shows the ladder: runs of growing size that these functions designed (dev/ladder.py).
"""

import math

# Tokens to train on for each parameter that a token uses, with the embedding: Chinchilla, arXiv:2203.15556, table 3.
TOKENS_PER_PARAMETER = 20
# The members of the family. Larger ones have dimensions that large meshes divide evenly.
WIDTHS = (
    *range(32, 128, 16),
    *range(128, 256, 32),
    *range(256, 1024, 64),
    *range(1024, 4096 + 1, 128),
)
# The run at which the rules were found, preset tiny: its width, its tokens, its tokens a step, and its steps.
WIDTH, TOKENS, BATCH, STEPS = 128, 819_200, 2048, 400


def model_flags(width, vocab_size):
    """{flag: value} of the member of the family with this --model_dimension, one of WIDTHS.

    Depth grows with width, a block of two layers for every 64 channels, so that the shape stays that of tiny: 2 blocks
    for 128 channels, 16 for 1,024. One of a block's layers has experts.
    """
    assert width in WIDTHS, width
    is_small = width < 256
    return dict(
        architecture="deepseek",
        model_dimension=width,
        vocab_size=vocab_size,
        tied=True,
        blocks=max(1, round(width / 64)),
        layers_per_block=2,
        # accelerators multiply heads of 64 channels faster; small models need several heads more
        n_head=round(width / (32 if is_small else 64)),
        latent_dim=width // 2,
        rope_dim=32,
        embedding_norm=True,
        embedding_conv=3,
        backout=True,
        latent_conv=3,
        # its gain was gone after 5M tokens, and TPUs take longer with it
        exclusive_attention=is_small,
        n_experts=8 if is_small else 16,
        experts_per_token=2,
        n_shared=1,
        expert_dim=width,
        T=sequence_length(width),
    )


def sequence_length(width):
    """--T: the power of two at or below the width, between 128 and 4,096. So attention's scores, whose cost grows with
    T, keep their share of a step of about a tenth."""
    return 2 ** math.floor(math.log2(min(max(width, 128), 4096)))


def batch_tokens(tokens, T):
    """Tokens of a step in a run of `tokens`: tiny's, growing with the square root of the tokens, down to a power of two
    of sequences of T tokens.

    Example: 2,048 for 1M tokens, 262,144 for 20B, as moe1b has it. A larger batch wastes tokens, a smaller one leaves
    devices idle. The largest batch that wastes none grows nearly as fast, as tokens^0.46 (arXiv:2505.13738).
    """
    sequences = BATCH * math.sqrt(tokens / TOKENS) / T
    return T * 2 ** max(0, math.floor(math.log2(sequences)))


def training_flags(tokens, tokens_per_step, parameters, T, width):
    """{flag: value} of training a model of this `width` on `tokens`, in sequences of T, each of which uses this many
    `parameters`, with the embedding."""
    steps = max(1, round(tokens / tokens_per_step))
    rate = max_rate(width, tokens, tokens_per_step)
    eval_every = min(250, math.ceil(steps / 10))
    return dict(
        global_batch_size=tokens_per_step // T,
        training_steps=steps,
        optimizer="muon",
        schedule="linear",
        max_lr=rounded(rate),
        end_lr=0.0,
        warmup_steps=round(0.025 * steps),
        embedding_lr=1.0,
        weight_decay=rounded(total_decay(tokens / parameters) / (rate * steps)),
        muon_momentum=rounded(momentum(steps)),
        # the second moment averages over more steps where they are small
        adam_b2=rounded(1 - 0.01 * (tokens_per_step / BATCH) ** (1 / 3)),
        balance_weight=1e-3,
        # a bias has to find its place within the run, then stay there
        bias_update_rate=rounded(max(1e-3, 1e-2 * math.sqrt(min(1, STEPS / steps)))),
        eval_every=eval_every,
        save_steps=2 * eval_every,
    )


def max_rate(width, tokens, tokens_per_step):
    """--max_lr for Muon, rule 1 of docs/rates.md."""
    of_batch = math.sqrt(tokens_per_step / BATCH)
    of_length = (tokens / TOKENS) ** -0.32
    # The update of a matrix is about orthogonal, times width^0.5 (training/muon.py). By theory the rate falls as
    # width^-0.5 (arXiv:2310.17813, section 2); what large runs were trained with falls as fast as this.
    of_width = WIDTH / width
    return 16e-3 * of_batch * of_length * of_width


def total_decay(tokens_per_parameter):
    """--max_lr x --weight_decay x steps, rule 4 of docs/rates.md: 2.7 at tiny's 0.4 tokens per parameter, 4.4 at 20."""
    return 3 * tokens_per_parameter ** (1 / 8)


def momentum(steps):
    """--muon_momentum, rule 6 of docs/rates.md: 0.75 in 400 steps, 0.88 in 4,000, 0.95 from 80,000 on. A gradient
    counts for 1 / (1 - m) steps, of which a longer run can have more."""
    return min(0.95, 1 - 0.25 * (STEPS / steps) ** 0.3)


def rounded(value):
    """A value to three significant digits: what a person would write in a command."""
    return float(f"{value:.3g}")
