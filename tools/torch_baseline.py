"""GPT-2 in torch, trained as nanoGPT trains it: what tools/bench.py --compare measures main.py against.

The same shapes, batch, microbatches, precision, clipping and AdamW as main.py's; attention, the optimizer and autocast
are torch's own fused ones. Rows that pad the vocabulary are predicted as any others, which saves a mask.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from runtime import platforms
from runtime.messages import UserError


class Layer(nn.Module):
    """Multi-head attention, then a GELU feed-forward; pre-norm. x [B, T, D] -> [B, T, D]."""

    def __init__(self, m):
        super().__init__()
        D = m.model_dimension
        self.n_head = m.n_head
        self.attention_norm = nn.LayerNorm(D, m.norm_eps)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D, m.norm_eps)
        self.up = nn.Linear(D, m.ffn_width)
        self.down = nn.Linear(m.ffn_width, D)

    def forward(self, x):
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, K]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, T, K] each
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """tokens, targets int64 [B, T] -> mean cross-entropy. Matrices begin with a deviation of 0.02, as GPT-2's."""

    def __init__(self, m):
        super().__init__()
        self.embedding = nn.Embedding(m.padded_vocab, m.model_dimension)  # the head too
        self.positions = nn.Embedding(m.T, m.model_dimension)
        self.layers = nn.Sequential(*(Layer(m) for _ in range(m.blocks)))
        self.norm = nn.LayerNorm(m.model_dimension, m.norm_eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.layers(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(cfg, net):
    """AdamW as main.py's: matrices alone are decayed."""
    o = cfg.optimizer
    matrices = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() != 2]
    groups = [
        dict(params=matrices, weight_decay=o.weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=o.max_lr, betas=(0.9, o.adam_b2), fused=True)


def make_step(cfg, net, device):
    """(`step()` on random tokens, tokens in it)."""
    m = cfg.model
    microbatches = cfg.run.accumulation_steps * cfg.data.microbatches
    sequences = cfg.data.train_batch_size // cfg.data.microbatches
    rows = torch.randint(m.vocab_size, (microbatches, sequences, m.T + 1)).to(device)
    optimizer = make_optimizer(cfg, net)
    mixed = contextlib.nullcontext()
    if m.model_dtype == "bfloat16":
        mixed = torch.autocast(device, torch.bfloat16)

    def step():
        for row in rows:
            with mixed:
                loss = net(row[:, :-1], row[:, 1:]) / microbatches
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.optimizer.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step, rows[..., 1:].numel()


def prepare(cfg, threads):
    """As `prepare` of tools/bench.py, on the first GPU or on `threads` CPU threads; peak is None where it is the
    process's own. Raises UserError."""
    on_gpu = platforms.platform() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise UserError(
            "--compare: jax has a GPU here, but this torch has none; install the one that has."
        )
    torch.set_num_threads(threads)
    torch.manual_seed(cfg.run.seed)
    device = "cuda" if on_gpu else "cpu"
    net = GPT2(cfg.model).to(device)
    step, tokens_per_step = make_step(cfg, net, device)

    def run(steps):
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()

    about = dict(
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        devices=1,
        tokens_per_step=tokens_per_step,
        compile_seconds=None,
        compile_cpu_seconds=None,
        compiler_bytes=None,
    )
    return about, run, torch.cuda.max_memory_allocated if on_gpu else None
