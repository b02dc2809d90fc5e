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
from runtime.messages import UserError
from tools import common

if __name__ == "__main__":
    options_given = common.begin(common.Sample, "tools/sample.py")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from architectures import architecture
from inference import decoding
from inference.weights import positions

CHUNK = (
    8  # tokens that the devices draw for a row before the host looks at them: few looks cost little
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
    cache = {kind: NamedSharding(mesh, spec) for kind, (_, spec) in specs.items()}
    placed = (rows, rows, cache, everywhere)
    advance = jax.jit(advance, out_shardings=(placed, everywhere), donate_argnums=1)
    return jax.jit(prefill, out_shardings=placed), advance


class Row:
    """One sequence as its tokens arrive. prompt: token ids, the first `hidden` of which are not shown; head: text to
    show before it."""

    def __init__(self, encoding, prompt, options, hidden=1, head=""):
        self.encoding, self.prompt, self.options = encoding, prompt, options
        self.tokens = []  # that were drawn
        self.text = ""  # of them, as far as no later token changes it
        self.done = False
        self.prompt_length = len(text_of(encoding, prompt))  # characters
        self.unseen = head + text_of(encoding, prompt[hidden:])  # text that was not printed yet

    def add(self, tokens):
        """Take further tokens. `text` and `unseen` grow by what no later token changes."""
        if self.done:
            return
        end = self.encoding.eot_token
        tokens = tokens[: self.options.max_tokens - len(self.tokens)]
        self.tokens += itertools.takewhile(lambda token: token != end, tokens)
        self.done = end in tokens or len(self.tokens) == self.options.max_tokens
        text = text_of(self.encoding, self.prompt + self.tokens)[self.prompt_length :]
        at = first_stop(text, self.options.stop)
        if at is not None:
            text, self.done = text[:at], True
        if not self.done:
            text = settled(text, self.options.stop)
        self.unseen += text[len(self.text) :]
        self.text = text


def first_stop(text, stop):
    """Where the stop string begins that is the first to be whole in a text; None where there is none."""
    found = []
    for string in stop:
        at = text.find(string)
        if at >= 0:
            found.append((at + len(string), at))
    return min(found)[1] if found else None


def settled(text, stop):
    """A text without what later tokens may change at its end: part of a character, or of a stop string."""
    text = text.rstrip("\ufffd")
    longest = 0
    for string in stop:
        for n in range(len(string)):
            if text.endswith(string[:n]):
                longest = max(longest, n)
    return text[: len(text) - longest]


def show(waiting):
    """Print what is unseen of the `waiting` rows, a deque: the first as it grows, the others when it is done."""
    while waiting:
        print(waiting[0].unseen, end="", flush=True)
        waiting[0].unseen = ""
        if not waiting[0].done:
            return
        print(flush=True)
        waiting.popleft()


def encode_prompts(options, before, encoding):
    """Token ids of the prompts, the tokens `before` first. Raises UserError where a prompt has none."""
    if "" in options.stop or not options.prompt:
        raise UserError("--stop, --prompt: a string is missing or empty.")
    prompts = [[*before, *encoding.encode_ordinary(text)] for text in options.prompt]
    if [] in prompts:
        raise UserError(
            "--prompt: is empty, and nothing stands before it; give a text, or --start end_of_text."
        )
    return prompts


def fit_max_tokens(options, cfg, longest):
    """`options` with --max_tokens for prompts of at most `longest` tokens. Warns where these are more tokens together
    than the model was made for; raises UserError where it has no positions for them."""
    most = options.T or positions(options.model, cfg.model.T)
    if options.max_tokens is None:
        max_tokens = utils.Sample.max_tokens
        if longest < most:
            max_tokens = min(max_tokens, most - longest)
        options = dataclasses.replace(options, max_tokens=max_tokens)
    if longest + options.max_tokens <= most:
        return options
    about = f"--max_tokens {options.max_tokens}: a prompt's {longest} tokens and these are more than the {most} "
    if architecture(cfg.model.architecture).learns_positions:
        limit = "of --T" if options.T else "positions that the model has learned"
        raise UserError(f"{about}{limit}.")
    limit = "of --T" if options.T else "that the model was made for"
    print(f"warning: {about}{limit}", file=sys.stderr)
    return options


def pad(sequences, n):
    """Sequences of token ids as (ids [B, n], lengths [B]), int32."""
    ids = np.zeros((len(sequences), n), np.int32)
    for row, sequence in zip(ids, sequences):
        row[: len(sequence)] = sequence
    return ids, np.array([len(sequence) for sequence in sequences], np.int32)


def draw_all(rows, advance, params, state, chunks):
    """Draw tokens until all `rows` are done and print them as they come."""
    waiting, ahead = deque(rows), None
    for chunk in range(chunks + 1):  # the devices draw a chunk while the host prints the one before
        drawn, ahead = ahead, None
        if chunk < chunks:
            state, ahead = advance(params, state)
        if drawn is None:
            continue
        for row, tokens in zip(rows, np.asarray(drawn).T.tolist()):
            row.add(tokens)
        show(waiting)
        if not waiting:
            break


def main(options):
    """Print the continuations of the prompts; returns their `Row`s."""
    cfg, mesh, params, encoding = common.open_model(options, text=True)
    before = common.before_prompt(options, encoding)
    prompts = encode_prompts(options, before, encoding)
    longest = max(map(len, prompts))
    options = fit_max_tokens(options, cfg, longest)

    batch = [ids for ids in prompts for _ in range(options.inference_batch)]
    rows = []
    for i, ids in enumerate(batch):
        head = f"--- {i}\n" if len(batch) > 1 else ""
        rows.append(Row(encoding, ids, options, len(before), head))
    n_tokens = sum(map(len, batch))
    batch += [[encoding.eot_token]] * (-len(batch) % mesh.shape["dp"])  # dp must divide it
    n = math.ceil(longest / MULTIPLE) * MULTIPLE
    chunks = math.ceil(options.max_tokens / CHUNK)
    ids, lengths = pad(batch, n)

    prefill, advance = make_sampler(cfg, mesh, options, n + chunks * CHUNK)
    prefill = prefill.lower(params, ids, lengths).compile()
    began = time.perf_counter()
    state = jax.block_until_ready(prefill(params, ids, lengths))
    prefill_seconds = time.perf_counter() - began
    advance = advance.lower(params, state).compile()
    began = time.perf_counter()
    draw_all(rows, advance, params, state, chunks)
    seconds = time.perf_counter() - began
    drawn = sum(len(row.tokens) for row in rows)
    print(
        f"prefill: {n_tokens} tokens, {n_tokens / prefill_seconds:,.0f} tokens/s; "
        f"decode: {drawn} tokens, {drawn / seconds:,.0f} tokens/s",
        file=sys.stderr,
    )
    return rows


if __name__ == "__main__":
    common.run(lambda: main(options_given))
