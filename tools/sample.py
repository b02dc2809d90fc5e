"""Text from the newest checkpoint of a run or from a model in the Hugging Face format.

python tools/sample.py runs/tiny --prompt "def " "import os" --max_tokens 100

Prompts of all lengths are one batch, decoded with a cache on any mesh. With a model trained here each is preceded by
the end-of-text token, as every document is in training; no part of it becomes a special token. Text goes to stdout as
it comes, row after row; speeds go to stderr.
"""

if __name__ == "__main__":
    import program

    program.begin()

import dataclasses
import itertools
import math
import sys
import time
from collections import deque

import utils
from data.tokenization import text_of
from tools import common
from utils import UserError

if __name__ == "__main__":
    options_given = common.begin(common.Sample, "sample.py")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from architectures import architecture
from training import decoding
from training.weights import positions

CHUNK = (
    8  # tokens of a row between two looks at what was drawn: beside them the host's part is small
)
MULTIPLE = 64  # to which prompts are padded, so that programs compiled for one fit others


def make_sampler(cfg, mesh, options, length):
    """Jitted `prefill(params, ids [B, n], lengths [B])` -> state, and `advance(params, state)` -> state, the next
    tokens [CHUNK, B]; rows of at most `length` tokens. A state is (newest token [B], drawn but not yet in the cache;
    its position [B]; the cache, used up by `advance`; number of draws)."""
    decode, key = decoding.make_decode(cfg, mesh), jax.random.key(options.seed)

    def draw(logits, number):
        return decoding.draw_tokens(logits, jax.random.fold_in(key, number), options).astype(
            jnp.int32
        )

    def prefill(params, ids, lengths):
        cache = decoding.empty_cache(cfg, len(ids), length)
        logits, cache = decode(params, ids, cache, jnp.zeros_like(lengths), lengths - 1)
        return draw(logits, 0), lengths, cache, jnp.int32(1)

    def advance(params, state):
        def one(state, _):
            token, position, cache, number = state
            logits, cache = decode(
                params, token[:, None], cache, position, jnp.zeros_like(position)
            )
            return (draw(logits, number), position + 1, cache, number + 1), token

        return lax.scan(one, state, length=CHUNK)

    rows, everywhere = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())
    specs = architecture(cfg.model.architecture).cache(cfg, 1, 1)
    placed = (
        rows,
        rows,
        {kind: NamedSharding(mesh, spec) for kind, (_, spec) in specs.items()},
        everywhere,
    )
    advance = jax.jit(advance, out_shardings=(placed, everywhere), donate_argnums=1)
    return jax.jit(prefill, out_shardings=placed), advance


class Row:
    """One sequence as its tokens arrive. prompt: token ids, the first `hidden` of which are not shown; head: text to
    show before it."""

    def __init__(self, encoding, prompt, options, hidden=1, head=""):
        self.encoding, self.prompt, self.options = encoding, prompt, options
        self.tokens, self.text, self.done = [], "", False
        self.before, self.unseen = (
            len(text_of(encoding, prompt)),
            head + text_of(encoding, prompt[hidden:]),
        )

    def add(self, tokens):
        """Take further tokens; `text` is then as much of the continuation as no later token changes, and `unseen` has
        grown by what is new in it."""
        if self.done:
            return
        tokens, end = tokens[: self.options.max_tokens - len(self.tokens)], self.encoding.eot_token
        self.tokens += itertools.takewhile(lambda t: t != end, tokens)
        self.done = end in tokens or len(self.tokens) == self.options.max_tokens
        text, stop = (
            text_of(self.encoding, self.prompt + self.tokens)[self.before :],
            self.options.stop,
        )
        found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
        if found:  # of several, the one that is whole first
            text, self.done = text[: min(found)[1]], True
        if not self.done:  # the end may be part of a character, or the beginning of a stop string
            text = text.rstrip("\ufffd")
            text = text[
                : len(text)
                - max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
            ]
        self.text, self.unseen = text, self.unseen + text[len(self.text) :]


def show(waiting):
    """Print what is unseen of the `waiting` rows, a deque: the first as it grows, the others when it is done."""
    while waiting:
        print(waiting[0].unseen, end="", flush=True)
        waiting[0].unseen = ""
        if not waiting[0].done:
            return
        print(flush=True)
        waiting.popleft()


def main(options):
    """Print the continuations of the prompts; returns their `Row`s."""
    cfg, mesh, params, encoding = common.open_model(options, text=True)
    if "" in options.stop or not options.prompt:
        raise UserError("--stop, --prompt: a string is missing or empty.")
    before = common.before_prompt(options, encoding)
    prompts = [[*before, *encoding.encode_ordinary(text)] for text in options.prompt]
    if [] in prompts:
        raise UserError(
            "--prompt: is empty, and nothing stands before it; give a text, or --start end_of_text."
        )
    longest, n_rows = max(map(len, prompts)), len(prompts) * options.inference_batch
    most = options.T or positions(options.model, cfg.model.T)
    if options.max_tokens is None:
        usual = utils.Sample.max_tokens
        options = dataclasses.replace(
            options, max_tokens=min(usual, most - longest) if longest < most else usual
        )
    if longest + options.max_tokens > most:
        about = f"--max_tokens {options.max_tokens}: a prompt's {longest} tokens and these are more than the {most} "
        if cfg.model.architecture == "gpt2":
            raise UserError(
                f"{about}{'of --T' if options.T else 'positions that the model has learned'}."
            )
        print(
            f"warning: {about}{'of --T' if options.T else 'that the model was made for'}",
            file=sys.stderr,
        )

    batch = [ids for ids in prompts for _ in range(options.inference_batch)]
    heads = [f"--- {i}\n" if n_rows > 1 else "" for i in range(n_rows)]
    rows = [Row(encoding, ids, options, len(before), head) for ids, head in zip(batch, heads)]
    batch += [[encoding.eot_token]] * (-n_rows % mesh.shape["dp"])
    n, chunks = math.ceil(longest / MULTIPLE) * MULTIPLE, math.ceil(options.max_tokens / CHUNK)
    ids, lengths = (
        np.array([r + [0] * (n - len(r)) for r in batch], np.int32),
        np.array([*map(len, batch)], np.int32),
    )
    prefill, advance = make_sampler(cfg, mesh, options, n + chunks * CHUNK)
    prefill = prefill.lower(params, ids, lengths).compile()
    began = time.perf_counter()
    state = jax.block_until_ready(prefill(params, ids, lengths))
    prefilled = time.perf_counter() - began
    advance = advance.lower(params, state).compile()

    waiting, ahead, began, steps = deque(rows), None, time.perf_counter(), 0
    for chunk in range(
        chunks + 1
    ):  # the devices draw the next chunk while the host prints the one before
        drawn, ahead = ahead, None
        if chunk < chunks:
            state, ahead = advance(params, state)
        if drawn is not None:
            for row, tokens in zip(rows, np.asarray(drawn).T.tolist()):
                row.add(tokens)
            show(waiting)
            steps += CHUNK
            if not waiting:
                break
    took, total = time.perf_counter() - began, sum(map(len, batch[:n_rows]))
    print(
        f"prefill: {total} tokens, {total / prefilled:,.0f} tokens/s; decode: {n_rows} x {steps} tokens, "
        f"{n_rows * steps / took:,.0f} tokens/s",
        file=sys.stderr,
    )
    return rows


if __name__ == "__main__":
    common.run(lambda: main(options_given))
