"""Generate text with the newest checkpoint of a run or with a model in the Hugging Face format.

python tools/sample.py runs/tiny --prompt "def" "import os" --max_tokens 100
python tools/sample.py runs/tiny                                    # continues what is typed, line by line

All prompts, of any lengths, are decoded as one batch with a cache, on any mesh. Text goes to stdout as it is drawn, row
after row, and speeds go to stderr.
"""

if not __package__:
    import startup

    startup.prepare()

import dataclasses
import itertools
import math
import re
import sys
import time
from collections import deque

import utils
from runtime import interrupts
from runtime.messages import UserError, say_aside, say_error
from runtime.pulse import Pulse
from shards.tokenization import check_ids, has_chat_template, longest_token, ordinary, text_of
from tools import common

if __name__ == "__main__":
    meant = "; give --prompt with the text"
    options_given = common.read_options(common.Sample, "tools/sample.py", lambda word: meant)

import jax

from data.encoding import encode_text
from hf import hub
from inference import decoding
from inference.weights import end_tokens, max_positions

# Prompts are padded to a multiple of this length, so that a program compiled for one prompt fits others.
MULTIPLE = 64


class Row:
    """One sequence, to which drawn tokens are added.

    prompt: token ids, of which the first `hidden` are not shown. head: text that is shown first. ends: from
    `weights.end_tokens`.
    """

    def __init__(self, encoding, prompt, options, hidden=1, head="", ends=()):
        self.encoding = encoding
        self.prompt = prompt
        self.options = options
        self.ends = {encoding.eot_token, *ends}
        self.tokens = []  # drawn so far
        self.text = ""  # text of the ordinary ones, as far as no later token can change it
        self.done = False
        self.ending = []  # the token that ended the sequence, if one did
        self.cut = False  # whether a stop string ended it
        self.prompt_length = len(text_of(encoding, prompt))  # characters
        self.unseen = head + text_of(encoding, prompt[hidden:])  # text that is not printed yet

    @property
    def stopped(self):
        """Whether an end token or a stop string ended the sequence, rather than max_tokens."""
        return bool(self.ending) or self.cut

    def add(self, tokens):
        """Add drawn tokens. `text` and `unseen` grow by the text that no later token can change."""
        if self.done:
            return
        stop = self.options.stop
        tokens = tokens[: self.options.max_tokens - len(self.tokens)]
        kept = [*itertools.takewhile(lambda token: token not in self.ends, tokens)]
        self.tokens += kept
        self.ending = tokens[len(kept) : len(kept) + 1]
        text = self.text_before(len(self.prompt) + len(self.tokens))[self.prompt_length :]
        for string in stop:
            self.cut = self.cut or string in text
            text = text.split(string)[0]
        self.done = self.stopped or len(self.tokens) == self.options.max_tokens
        if not self.done:  # the last characters may be parts of a character, or of a stop string
            text = text.rstrip("\ufffd")
            held = max(map(len, stop), default=1) - 1
            text = text[: max(0, len(text) - held)]
        self.unseen += text[len(self.text) :]
        self.text = text

    def text_before(self, n):
        """The text of the first n tokens: all of the prompt's, and the ordinary ones of those that were drawn."""
        drawn = [*self.tokens, *self.ending][: max(0, n - len(self.prompt))]
        return text_of(self.encoding, self.prompt[:n] + ordinary(self.encoding, drawn))


def print_rows(rows, chunks):
    """Print the rows as chunks of their next tokens [B, chunk] are drawn. Stops early when all rows are done."""
    unfinished = deque(rows)
    for drawn in chunks:
        for row, tokens in zip(rows, drawn.tolist()):
            row.add(tokens)
        print_unseen(unfinished)
        if not unfinished:
            return


def print_unseen(unfinished):
    """Print the new text of a deque of `Row`s, in order: that of the first at once, that of a later one when those
    before it are done. Rows that are done leave the deque."""
    while unfinished:
        first = unfinished[0]
        print(first.unseen, end="", flush=True)
        first.unseen = ""
        if not first.done:
            return
        print(flush=True)
        unfinished.popleft()


def limit_of(options, cfg):
    """(most tokens of a prompt and its continuation, words that say whose limit this is)."""
    of = "of --T" if options.T else f"that {options.model} was made for"
    return options.T or max_positions(options.model, cfg.model.T), of


def token_ids(text, encoding, options, cfg):
    """The token ids of a prompt. Raises UserError where they are too many, before a cache of their length is allocated.

    A prompt whose length in characters shows that is not even tokenized, which would take long.
    """
    most, of = limit_of(options, cfg)
    n = math.ceil(len(text) / longest_token(encoding))
    if n <= most:
        ids = encode_text(text, encoding).tolist()
        n = len(ids)
    if n > most:
        longer = "" if options.T else f", or --T {n} for a model that has no such limit"
        raise UserError(
            f"the prompt {text!r:.40} has {n} tokens or more, beyond the {most} {of}; give a shorter one{longer}."
        )
    return ids


def fit_max_tokens(options, cfg, longest):
    """`options` with a number for --max_tokens, for prompts of up to `longest` tokens. Warns where they exceed the
    limit of the model, or raises UserError, as `warn_or_refuse`."""
    most, of = limit_of(options, cfg)
    if options.max_tokens is None:
        room = most - longest if longest < most else math.inf
        options = dataclasses.replace(options, max_tokens=min(utils.Sample.max_tokens, room))
    if longest + options.max_tokens > most:
        said = f"--max_tokens {options.max_tokens}: a prompt has {longest} tokens, so these exceed the {most} {of}"
        common.warn_or_refuse(cfg.model.architecture, said)
    return options


def main(options):
    """`continue_all`, with a UserError where the devices run out of memory."""
    with common.memory_explained(
        "give shorter or fewer prompts, --inference_batch or --max_tokens"
    ):
        return continue_all(options)


def continue_all(options):
    """Print the continuations of --prompt and return their `Row`s; without --prompt, continue each line that is
    typed."""
    with Pulse("opening the model", lines=False):
        opened = common.open_model(options, text=True)
    folder = hub.folder_of(options.model)
    if has_chat_template(folder):
        say_aside(
            f"{folder} has a chat template, which is not applied here: prompts are continued as plain text"
        )
    programs = {}  # {(rows, tokens of a prompt, chunks): compiled (prefill, advance)}
    if options.prompt:
        return continue_prompts(options, *opened, programs)
    settings = f"temperature {options.temperature}, top_k {options.top_k}"
    say_aside(f"{settings}; type a prompt, Ctrl-D ends")
    cursor = "> " if sys.stdin.isatty() else ""
    for number in itertools.count():
        try:
            if line := input(cursor):
                one = dataclasses.replace(options, prompt=(line,), seed=options.seed + number)
                continue_prompts(one, *opened, programs, chunk=1)
        except EOFError:
            return None
        except UserError as e:  # the next line may be right
            say_error(e)


def compile_stream(cfg, mesh, options, whole, chunk, inputs):
    """Compile (prefill, advance) of `decoding.make_stream` for prefill inputs with the shapes of `inputs`."""
    with Pulse("compiling", lines=False):
        prefill, advance = decoding.make_stream(cfg, mesh, options, whole, chunk)
        prefill = prefill.lower(*inputs).compile()
        params, *_ = inputs
        return prefill, advance.lower(params, prefill(*inputs)).compile()


def prompts_of(options, cfg, encoding, before):
    """The token ids of each --prompt, preceded by `before`. Raises UserError for a prompt that the model cannot
    read."""
    vocab_size = cfg.model.vocab_size
    check_ids(encoding, before, vocab_size, f"--start {options.start}: what precedes a prompt")
    for text in options.prompt:
        if re.search("[\udc80-\udcff]", text):  # in these, Python keeps bytes that it cannot decode
            raise UserError(
                f"the prompt {text!r:.40} holds bytes that are no text; write it in UTF-8."
            )
    prompts = [[*before, *token_ids(text, encoding, options, cfg)] for text in options.prompt]
    if [] in prompts:
        raise UserError("is empty; give a text, or --start end_of_text", flag="prompt")
    for ids in prompts:
        check_ids(encoding, ids, vocab_size, "--prompt: a text")
    return prompts


def continue_prompts(options, cfg, mesh, params, encoding, programs, chunk=decoding.CHUNK):
    """Print the continuations of the prompts, `chunk` tokens at a time. Returns their `Row`s."""
    if "" in options.stop:
        raise UserError("is empty; give a text", flag="stop")
    before = common.before_prompt(options, encoding)
    prompts = prompts_of(options, cfg, encoding, before)
    longest = max(map(len, prompts))
    options = fit_max_tokens(options, cfg, longest)
    batch = [ids for ids in prompts for _ in range(options.inference_batch)]
    further_ends = end_tokens(options.model)
    rows = []
    for i, ids in enumerate(batch):
        head = f"--- {i}\n" if len(batch) > 1 else ""
        rows.append(Row(encoding, ids, options, len(before), head, further_ends))

    n_tokens = sum(map(len, batch))
    # to a multiple of dp, over which the rows are split
    batch += batch[:1] * (-len(batch) % mesh.shape["dp"])
    n = math.ceil(longest / MULTIPLE) * MULTIPLE
    chunks = math.ceil(options.max_tokens / chunk)
    inputs = params, *decoding.pad(batch, n), jax.random.key(options.seed)
    shape = len(batch), n, chunks
    # compiled before the clock starts, so that the speeds are those of the devices
    if shape not in programs:
        programs[shape] = compile_stream(cfg, mesh, options, n + chunks * chunk, chunk, inputs)
    prefill, advance = programs[shape]
    began = time.perf_counter()
    state = jax.block_until_ready(prefill(*inputs))
    prefilled = time.perf_counter()
    print_rows(rows, decoding.chunks_of(advance, params, state, chunks))
    seconds = time.perf_counter() - prefilled
    drawn = sum(len(row.tokens) for row in rows)
    say_aside(
        f"prefill: {n_tokens} tokens, {n_tokens / (prefilled - began):,.0f} tokens/s; "
        f"decode: {drawn} tokens, {drawn / seconds:,.0f} tokens/s"
    )
    return rows


if __name__ == "__main__":
    interrupts.run(lambda: main(options_given))
