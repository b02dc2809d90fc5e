"""The plain model: the training loss as the papers write it, on one device.

Comes before: nothing, this file is the first to read. Comes next: `train.py`, which trains this model on a mesh, and
docs/guide.md, which shows how each function here is spread over devices.

This is `--architecture deepseek` in float32, without a mesh, a collective or a fast path. `model.py` and
`architectures/deepseek.py` compute the same on any mesh, faster and in less memory. No program runs this file. It is
there to be read, and tests compare the loss and every gradient on many meshes with its own (tests/test_plain.py).

It reads the program's own parameters, of any preset with this architecture, such as `tiny`, `moe1b` or `deepseek-tiny`.
It does not cover other architectures, `--dropout_rate`, and `--capacity_factor`, which drops choices. With random
weights:

    import jax, model, plain_model
    from architectures import parameters
    from config import presets, settle
    cfg = settle.validate(presets.preset("tiny"), 1)
    params = parameters.init_params(model.param_table(cfg), jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, cfg.model.vocab_size)
    plain_model.loss(params, tokens[:, :-1], tokens[:, 1:], cfg.model, balance_weight=1e-3)

With the weights of a run:

    from tools import common
    options = common.Sample(model="runs/tiny", model_dtype="float32", n_device_axis=(1, 1, 1))
    cfg, _, params, tokenizer = common.open_model(options, text=True)

Equations are those of DeepSeek-V3 (arXiv:2412.19437, section 2.1). Letters of shapes and einsums: b B batch, t T
sequence (s where a token is a key), d D model, h H heads, k K channels of a head, p P rotary channels, r R channels of
a latent, e E experts, f F hidden channels of a feed-forward, v V vocabulary. `m` holds the flags of the model.
"""

import jax
import jax.numpy as jnp

# A short convolution starts at 0 and Adam moves all weights by similar steps: this factor lets it learn faster.
CONV_SCALE = 4.0
# Added to the mean square in the norms of latents and of the embedding's rows, and to the square of a value that is
# divided by. Other norms have --norm_eps.
EPS = 1e-6


def loss(params, tokens, targets, m, balance_weight):
    """The training loss of tokens and targets [B, T], and a dict of what it is made of: the cross entropy, the balance
    loss before its weight, and load [layers with experts, E], the number of choices of each expert."""
    logits, load_loss, load = forward(params, tokens, m)
    log_probs = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(log_probs, targets[..., None], -1)
    cross_entropy = -log_probs.mean()
    parts = dict(cross_entropy=cross_entropy, load_loss=load_loss, load=load)
    return cross_entropy + balance_weight * load_loss, parts


def forward(params, tokens, m):
    """Logits [B, T, vocab_size] of tokens [B, T]; the balance loss, summed over layers; and load, as `loss` has it."""
    start = document_starts(tokens, m)
    x = embedded = embed(params, tokens, start, m)  # [B, T, D], the residual stream
    load_loss, load = 0.0, []
    for p in layers(params, m):
        h = rms_norm(x, p["attention"]["norm"], m.norm_eps)
        exclusive = m.exclusive_attention and "router" in p  # heads bring what other tokens say
        x = x + attention(p["attention"], h, start, m, exclusive)
        h = rms_norm(x, p["norm"], m.norm_eps)
        if "router" in p:
            out, scores, chosen = mixture_of_experts(p, h, m)
            load_loss += balance_loss(scores, chosen, m)
            load.append(chosen.sum((0, 1)))
        else:
            out = feed_forward(p["ffn"], h, m)
        x = x + out
    if m.backout:  # the share begins at 1: the head reads what the layers have added
        x = x - params["backout"] * embedded
    x = rms_norm(x, params["norm"], m.norm_eps)
    head = params["embedding"] if m.tied else params["head"]
    head = head[: m.vocab_size]  # the rows beyond are padding
    return jnp.einsum("btd,vd->btv", x, head), load_loss, jnp.stack(load)


def layers(params, m):
    """Yield the parameters of each layer in order: --first_layers, which are dense, then --blocks of --layers_per_block
    layers, of which only the last has experts. `params` stacks all layers of a kind in one array for each weight."""
    for i in range(m.first_layers):
        yield select(params["first"], i)
    for block in range(m.blocks):
        for i in range(m.layers_per_block - 1):
            yield select(params["dense"], (block, i))
        yield select(params["moe"], block)


def select(stack, index):
    """The parameters of one layer, or of one expert, at an index of the leading dims of a stack."""
    return jax.tree.map(lambda weight: weight[index], stack)


def document_starts(tokens, m):
    """The position [B, T] at which the document of each token starts. With --document_mask an end-of-text token starts
    one; without, each sequence is one document."""
    if not m.document_mask:
        return jnp.zeros_like(tokens)
    start = jnp.where(tokens == m.end_of_text, jnp.arange(tokens.shape[1]), 0)
    return jax.lax.cummax(start, axis=1)


def embed(params, tokens, start, m):
    """The input of the first layer, [B, T, D]: the rows of the embedding. Positions come in where attention rotates
    queries and keys."""
    x = params["embedding"][tokens]
    if m.embedding_norm:
        x = rms_norm(x, params["embedding_norm"], EPS)
    if m.embedding_conv:
        x = short_conv(x, params["embedding_conv"], start)
    return x


def short_conv(x, weights, start):
    """Add to each token's channels x [B, T, channels] those of the n tokens before it in its document. weights [n,
    channels] has one weight for each distance and channel, that of the nearest token first (H3, arXiv:2212.14052,
    section 3.1)."""
    position = jnp.arange(x.shape[1]) - start  # [B, T], of each token in its document
    out = x
    for distance, weight in enumerate(weights, 1):
        before = jnp.roll(x, distance, axis=1)
        before = jnp.where(position[..., None] >= distance, before, 0)
        out = out + CONV_SCALE * weight * before
    return out


def rms_norm(x, scale, eps):
    """Root-mean-square norm over channels (arXiv:1910.07467, equation 4)."""
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x, base):
    """Rotary positions (RoFormer, arXiv:2104.09864, section 3.2.2): channels i and i + P/2 of x [..., T, P] are a point
    in a plane, which is rotated by the token's position times the frequency of the pair."""
    *_, T, P = x.shape
    frequency = base ** (-2 * jnp.arange(P // 2) / P)
    angle = jnp.arange(T)[:, None] * frequency  # [T, P/2]
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(p, x, start, m, exclusive):
    """Multi-head latent attention (equations 1 to 11), x [B, T, D] -> [B, T, D]. The keys and values of all heads are
    computed from one narrow latent. Decoding caches only this latent and the rotary key, which all heads share."""
    # One matrix computes both latents and the rotary key, which has no channels in layers without positions.
    down = jnp.einsum("btd,dr->btr", x, p["down"])
    q_latent, kv_latent, k_rope = jnp.split(down, (m.q_latent, m.q_latent + m.latent_dim), -1)
    q_latent = rms_norm(q_latent, p["q_norm"], EPS) if m.q_latent else x  # [B, T, R], equation 6
    kv_latent = rms_norm(kv_latent, p["kv_norm"], EPS)  # [B, T, R], equation 1
    k_rope = rotate(k_rope, m.rope_base)  # [B, T, P], equation 3
    if m.latent_conv:
        weights, pair_weights = jnp.split(p["conv"], (m.latent_dim,), -1)
        # Both channels of a rotated pair have the same weight: so scores still depend on distances alone.
        pair_weights = jnp.concatenate([pair_weights, pair_weights], -1)
        kv_latent = short_conv(kv_latent, weights, start)
        k_rope = short_conv(k_rope, pair_weights, start)

    q = jnp.einsum("btr,rhk->bhtk", q_latent, p["q_up"])
    q_nope, q_rope = jnp.split(q, (m.key_dim,), -1)  # [B, H, T, K] and [B, H, T, P], equation 7
    q_rope = rotate(q_rope, m.rope_base)  # equation 8
    kv = jnp.einsum("bsr,rhk->bhsk", kv_latent, p["kv_up"])
    k_nope, v = jnp.split(kv, (m.key_dim,), -1)  # each [B, H, T, K], equations 2 and 5

    scores = jnp.einsum("bhtk,bhsk->bhts", q_nope, k_nope)  # equation 10
    scores += jnp.einsum("bhtp,bsp->bhts", q_rope, k_rope)
    scores /= q.shape[-1] ** 0.5
    position = jnp.arange(x.shape[1])
    is_past = position <= position[:, None]  # [T, T]: query t may see key s
    same_document = position >= start[..., None]  # [B, T, T]
    visible = is_past & same_document
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    heads = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores), v)
    if exclusive:  # less the part along the token's own value (arXiv:2603.09078)
        along = jnp.sum(heads * v, -1) / (jnp.sum(v * v, -1) + EPS)
        heads -= along[..., None] * v
    return jnp.einsum("bhtk,hkd->btd", heads, p["out"])  # equation 11


def feed_forward(p, x, m):
    """A feed-forward of hidden width F: SwiGLU (arXiv:2002.05202, equation 5) or GELU. x [B, T, D]."""
    gate, *up = jnp.einsum("btd,gdf->gbtf", x, p["up"])  # g: two matrices for SwiGLU, one for GELU
    hidden = jax.nn.gelu(gate) if m.activation == "gelu" else jax.nn.silu(gate) * up[0]
    return jnp.einsum("btf,df->btd", hidden, p["down"])


def mixture_of_experts(p, x, m):
    """The sum of the shared experts and of the routed experts that each token chose, weighted by their gates (equation
    12): x [B, T, D] -> [B, T, D]. Returns the scores and the choice of `route`, too, for the balance loss."""
    scores, chosen, gates = route(p, x, m)
    out = feed_forward(p["shared"], x, m) if m.n_shared else 0
    for e in range(m.n_experts):
        # Every expert computes every token here; the gates of those that did not choose it are 0.
        out += gates[..., e, None] * feed_forward(select(p["experts"], e), x, m)
    return out, scores, chosen


def route(p, x, m):
    """The router, x [B, T, D] -> three arrays [B, T, E]: the scores; chosen, 1 for the experts that a token goes to and
    0 for the others; and the gates."""
    scores = jax.nn.sigmoid(jnp.einsum("btd,de->bte", x, p["router"]))  # equation 15
    # Equation 16: the bias evens out the load. It decides who is chosen, and is no part of the gates.
    wanted = scores + p["bias"]
    if m.n_groups > 1:
        wanted = within_best_groups(wanted, m)
    _, experts = jax.lax.top_k(wanted, m.experts_per_token)
    chosen = jax.nn.one_hot(experts, m.n_experts).sum(-2)
    gates = scores * chosen  # equation 14
    if m.experts_per_token > 1:  # a single gate divided by itself would teach the router nothing
        gates = gates / gates.sum(-1, keepdims=True)  # equation 13
    return scores, chosen, m.routed_scaling * gates


def within_best_groups(wanted, m):
    """`wanted` [B, T, E], with -inf for experts outside the best k_groups of n_groups groups. A group is as good as the
    sum of its two best experts (section 2.1.2, node-limited routing)."""
    groups = jnp.stack(jnp.split(wanted, m.n_groups, -1), -2)  # [B, T, groups, E/groups]
    two_best, _ = jax.lax.top_k(groups, 2)
    _, best = jax.lax.top_k(two_best.sum(-1), m.k_groups)
    allowed = jax.nn.one_hot(best, m.n_groups).sum(-2)  # [B, T, groups]
    return jnp.where(allowed[..., None] > 0, groups, -jnp.inf).reshape(wanted.shape)


def balance_loss(scores, chosen, m):
    """The sequence-wise balance loss without its weight (equations 17 to 20), mean over sequences. It is 1 where each
    sequence chooses all experts equally often. scores and chosen [B, T, E]."""
    frequency = chosen.mean(1) * m.n_experts / m.experts_per_token  # [B, E], equation 18
    share = scores / scores.sum(-1, keepdims=True)  # equation 19
    return (frequency * share.mean(1)).sum(-1).mean()  # equations 20 and 17
