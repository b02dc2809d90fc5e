"""Completions in OpenAI's format, as `tools/page.py` serves them: the parameters of a request, and the thread that
answers all requests in one batch of the cached decoding."""

import asyncio
import contextlib
import functools
import json
import queue
import secrets
import threading
from collections import deque
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax import lax
from pydantic import Field

import model
from config.resume import checkpoint_steps
from data.encoding import encode_text
from inference import decoding, scores
from inference.scores import length_for
from inference.weights import end_tokens, max_positions
from kernels import loss
from runtime.messages import UserError, first_line, warn
from shards.tokenization import longest_token, text_of, whole_characters
from tools import common
from tools.sample import Row

MOST_WAITING = 1024  # most choices of a request, and most requests that wait
LIKELIEST = 5  # alternatives to a token that are kept, the most that a request may ask for
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Several = Annotated[list[str] | list[Ids], Field(min_length=1)]
# parameters of OpenAI's that are not supported, with the value that changes nothing, which is accepted
UNCHANGED = dict(logit_bias={}, suffix="", frequency_penalty=0, presence_penalty=0)


class Refused(Exception):
    """A request that is refused. status: of HTTP; message: a sentence; param: the parameter at fault; code:
    OpenAI's."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status = status
        error_type = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": dict(message=message, type=error_type, param=param, code=code)}


class StreamOptions(pydantic.BaseModel, extra="forbid", strict=True):
    """What is streamed in addition to the choices."""

    include_usage: bool = False
    include_obfuscation: bool = False  # not supported: padding that hides the sizes of pieces


class Parameters(pydantic.BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """The body of a request, as OpenAI documents it."""

    model: str
    prompt: str | Ids | Several
    max_tokens: int = Field(16, ge=0)
    temperature: float = Field(1, ge=0, le=2)
    top_p: float = Field(1, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    best_of: int = None
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    logprobs: int = Field(None, ge=0, le=LIKELIEST)
    echo: bool = False
    stop: Text | Annotated[list[Text], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = None
    user: str = ""


def read_parameters(body):
    """The `Parameters` in the bytes of a body, with prompt and stop as lists. Raises `Refused`."""
    try:
        given = json.loads(body)
        given = {name: value for name, value in given.items() if value is not None}
    except (ValueError, RecursionError, AttributeError):
        raise Refused(400, "The body must be a JSON object.") from None
    for name, value in UNCHANGED.items():
        if given.pop(name, value) != value:
            words = f"{name} is not supported; leave it out, or give what changes nothing."
            raise Refused(400, words, name)
    given.setdefault("seed", secrets.randbits(32))
    try:
        asked = Parameters.model_validate(given)
    except pydantic.ValidationError as e:
        error = e.errors()[0]
        name = str(error["loc"][0])[:80]
        raise Refused(400, f"{name} cannot be used: {error['msg']}.", name) from None
    if asked.best_of not in (None, asked.n):
        words = f"best_of must be n, {asked.n}, or be left out: all that is drawn is returned."
        raise Refused(400, words, "best_of")
    if asked.stream_options and not asked.stream:
        words = "stream_options can only be given beside stream."
        raise Refused(400, words, "stream_options")
    if isinstance(asked.prompt, str) or isinstance(asked.prompt[0], int):
        asked.prompt = [asked.prompt]
    if isinstance(asked.stop, str):
        asked.stop = [asked.stop]
    if len(asked.prompt) * asked.n > MOST_WAITING:
        raise Refused(400, f"prompt and n: these are more than {MOST_WAITING} choices.", "n")
    return asked


class Answer:
    """The answer to a request: a queue of events, which the engine's thread puts in and the event loop takes out."""

    def __init__(self, asked, folder):
        self.asked = asked  # the Parameters
        self.folder = folder  # of the run
        self.n_prompt = 0  # tokens
        self.n_drawn = 0
        self.disconnected = False  # whether the client has gone
        self.events = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def put_event(self, event):
        """Queue an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits for it
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def next(self):
        """The next event. Raises it where it is `Refused`."""
        event = await self.events.get()
        if isinstance(event, Refused):
            raise event
        return event

    async def pieces(self):
        """Yield choices in OpenAI's format: each as a whole when it ends or, with `stream`, its new text as it is
        drawn."""
        running = len(self.asked.prompt) * self.asked.n
        while running:
            piece = await self.next()
            running -= piece["finish_reason"] is not None
            yield piece

    def usage(self):
        """The numbers of tokens, in OpenAI's format."""
        n, drawn = self.n_prompt, self.n_drawn
        return dict(prompt_tokens=n, completion_tokens=drawn, total_tokens=n + drawn)


class Continuation:
    """One choice of an answer, and the row that draws it. The first `before` tokens of its prompt were added to that of
    the request, and are not shown."""

    def __init__(self, answer, index, prompt, before, encoding, ends):
        self.answer = answer
        self.index = index
        # index of the first token that is shown
        self.first = before if answer.asked.echo else len(prompt)
        self.row = Row(encoding, prompt, answer.asked, hidden=self.first, ends=ends)
        # For each token from `first` on: (its log p, log p of the likeliest tokens, these tokens), as `draw` returns
        # them. None for the first token of a prompt, which nothing predicts.
        self.likelihoods = []
        # index of the first token whose probabilities were not passed on yet
        self.shown = self.first

    def add(self, tokens, likelihoods):
        """Add drawn tokens with their `likelihoods`, and pass on to the client what may be shown."""
        row = self.row
        row.add(tokens)
        self.likelihoods += likelihoods
        if not (row.done or self.answer.asked.stream):
            return
        piece = dict(index=self.index, text=row.unseen, logprobs=None, finish_reason=None)
        row.unseen = ""
        if self.answer.asked.logprobs is not None:
            piece["logprobs"] = self.logprobs()
        if row.done:
            piece["finish_reason"] = "stop" if row.stopped else "length"
            self.answer.n_drawn += len(row.tokens)
        self.answer.put_event(piece)

    def logprobs(self):
        """Log probabilities, in OpenAI's format, of the tokens whose text was shown since the last call."""
        row = self.row
        tokens = [*row.prompt, *row.tokens, *row.ending]
        begin = len(row.text_before(self.first))
        end = row.prompt_length + len(row.text)
        before = row.text_before(self.shown)
        whole = row.done and not row.cut
        found = dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens[self.shown :]:
            after = row.text_before(self.shown + 1)
            offset = offset_of_last(before, after)
            if offset >= end and not whole:
                break
            likelihoods = self.likelihoods[self.shown - self.first]
            found["tokens"].append(text_of(row.encoding, [token]))
            found["token_logprobs"].append(likelihoods and likelihoods[0])
            found["top_logprobs"].append(likelihoods and self.alternatives(token, *likelihoods))
            found["text_offset"].append(max(0, offset - begin))
            self.shown += 1
            before = after
        return found

    def alternatives(self, token, own, likeliest, ids):
        """{text: log p} of a token and of the likeliest tokens in its place."""
        logprobs = dict(zip(ids[: self.answer.asked.logprobs], likeliest)) | {token: own}
        found = {}
        for other, logprob in logprobs.items():
            text = text_of(self.row.encoding, [other])
            if text in found:  # parts of characters all have the same text, U+FFFD
                text += f" (token {other})"
            found[text] = logprob
        return found


def offset_of_last(before, after):
    """Offset of the last token of a text in characters. before, after: the text without and with that token.

    A token that is a part of a character has the offset of that character. One without a text, such as a special token
    that was drawn, has the offset of the text after it.
    """
    if after == before and not after.endswith("\ufffd"):
        return len(after)
    if not after.startswith(before):  # `before` ends in a part of a character
        before = before.rstrip("\ufffd")
    return max(0, min(len(before), len(after) - 1))


def draw(logits, how, _):
    """As `decoding.draw_next`, but each row has settings of its own, so that no row depends on the others.

    how: from `settings`. Returns ((token, its log p, log p of the likeliest tokens, these tokens), `how` for the next).
    """
    hot = how["temperature"] > 0
    scaled = logits / jnp.where(hot, how["temperature"], 1.0)[:, None]
    some = (how["top_p"] < 1).any()  # the nucleus takes time to find: only where a row needs it
    scaled = lax.cond(some, keep_nucleus, lambda x, _: x, scaled, how["top_p"][:, None])

    def draw_row(scaled, hot, seed, count):
        key = jax.random.fold_in(jax.random.key(seed), count)
        drawn = jax.random.categorical(key, scaled)
        return jnp.where(hot, drawn, jnp.argmax(scaled)).astype(jnp.int32)

    token = jax.vmap(draw_row)(scaled, hot, how["seed"], how["count"])
    likelihoods = loss.beside_likeliest(logits, token, LIKELIEST)
    return (token, *likelihoods), how | dict(count=how["count"] + 1)


def keep_nucleus(logits, top_p):
    """The logits [B, V], with -inf for tokens outside the nucleus of probability top_p [B, 1]; unchanged where that is
    1."""
    out = logits < decoding.smallest_of_nucleus(logits, top_p)
    return jnp.where(out & (top_p < 1), -jnp.inf, logits)


def settings(rows, temperature=0.0, top_p=1.0, seed=0):
    """The settings with which `draw` draws n rows, the same for all."""
    return dict(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        seed=np.full(rows, seed % 2**32, np.uint32),
        count=np.zeros(rows, np.int32),
    )


def warn_of_error(error):
    """Print an error of the engine as a warning. Returns its words."""
    words = f"{type(error).__name__}: {first_line(error)}"
    warn(f"completions: {words}")
    return words


@functools.lru_cache(1)
def programs(cfg, mesh, T):
    """The compiled functions of a `Batch`: (prefill, advance, join, score). Checkpoints of the same run share them.

    prefill, advance: of `decoding.make_stream`. join(state, new, row): the state in which number `row` is replaced by
    the one row of the state `new`. score: `model.make_score`, with the same numbers for the tokens of a prompt that
    `draw` returns for those that it draws.
    """
    specs = decoding.cache_specs(cfg)
    dims = 0, 0, {kind: list(spec).index("dp") for kind, spec in specs.items()}, 0

    def join(state, new, row):
        def put(dim, x, y):
            return lax.dynamic_update_slice_in_dim(x, y, row, dim)

        return jax.tree.map(put, jax.tree.broadcast(dims, state), state, new)

    stream = decoding.make_stream(cfg, mesh, None, T, draw=draw)
    measure = functools.partial(loss.token_choices, k=LIKELIEST)
    score = model.make_score(cfg, mesh, measure)
    return *stream, jax.jit(join, donate_argnums=0), jax.jit(score)


class Batch:
    """The rows of a model that are decoded together. A new row joins as soon as another has ended.

    Programs have fixed shapes: a prompt is read by itself, padded to a length of `length_for`, and all rows advance
    together, used or not. So an answer does not depend on the other requests.
    """

    def __init__(self, folder, step, n_rows):
        self.folder = folder
        self.step = step
        options = common.Options(model=folder, n_device_axis=(1, 1, 1), n_devices=1)
        self.cfg, self.mesh, self.params, self.encoding = common.open_model(options, text=True)
        self.before = common.before_prompt(options, self.encoding)
        self.ends = end_tokens(folder)
        self.T = max_positions(folder, self.cfg.model.T)
        made = programs(self.cfg, self.mesh, self.T)
        self.prefill, self.advance, self.join, self.score = made
        unused = *decoding.pad([[0]] * n_rows, 1), settings(n_rows)
        shapes = jax.eval_shape(self.prefill, self.params, *unused)
        self.state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        self.rows = [None] * n_rows  # the Continuation in each row; None: the row is free
        self.waiting = deque()  # continuations without a row

    def busy(self):
        """Whether any continuation is being drawn or waits for a row."""
        return bool(self.waiting or any(self.rows))

    def token_ids(self, prompt, max_tokens):
        """The token ids of a prompt. Raises `Refused`."""
        longest = longest_token(self.encoding) if isinstance(prompt, str) else 1
        if len(prompt) > self.T * longest:  # before it is tokenized, which takes time
            words = f"prompt has more than the {self.T} tokens that this model was made for."
            raise Refused(400, words, "prompt")
        if isinstance(prompt, str):
            text = encode_text(whole_characters(prompt), self.encoding)
            prompt = [*self.before, *text.tolist()]
        vocabulary = self.cfg.model.vocab_size
        if not prompt or max(prompt) >= vocabulary:
            words = f"prompt must have tokens, of the {vocabulary} of this model."
            raise Refused(400, words, "prompt")
        if len(prompt) + max_tokens > self.T:
            words = f"max_tokens must leave room for a prompt of {len(prompt)} in {self.T} tokens."
            raise Refused(400, words, "max_tokens")
        return prompt

    def enqueue(self, answer):
        """Queue the continuations of a request until rows are free. The first event of its answer is None."""
        asked = answer.asked
        prompts = [self.token_ids(prompt, asked.max_tokens) for prompt in asked.prompt]
        answer.n_prompt = sum(map(len, prompts))
        answer.put_event(None)
        for n, (given, prompt) in enumerate(zip(asked.prompt, prompts)):
            before = len(self.before) if isinstance(given, str) else 0
            for index in range(n * asked.n, (n + 1) * asked.n):
                one = Continuation(answer, index, prompt, before, self.encoding, self.ends)
                self.waiting.append(one)

    def draw(self):
        """Start waiting continuations in free rows, draw the next tokens of all rows, and pass them on."""
        for row, used in enumerate(self.rows):
            if self.waiting and not used:
                one = self.waiting.popleft()
                self.rows[row] = one
                self.start(one, row)
                if one.row.done:
                    self.rows[row] = None
        if not any(self.rows):
            return
        self.state, drawn = self.advance(self.params, self.state)
        tokens, *likelihoods = (np.asarray(x).swapaxes(0, 1).tolist() for x in drawn)
        for row, one in enumerate(self.rows):
            if one:
                one.add(tokens[row], [*zip(*(x[row] for x in likelihoods))])
                if one.row.done or one.answer.disconnected:
                    self.rows[row] = None

    def start(self, one, row):
        """Read the prompt of a continuation. It occupies the row unless one token, or none, is to be drawn."""
        asked, prompt = one.answer.asked, one.row.prompt
        if asked.echo and asked.logprobs is not None:
            one.likelihoods += self.score_prompt(prompt)[one.first :]
        if asked.max_tokens == 0:
            one.add([], [])
            return
        ids = decoding.pad([prompt], min(self.T, length_for(len(prompt))))
        how = settings(1, asked.temperature, asked.top_p, asked.seed + one.index)
        state = self.prefill(self.params, *ids, how)
        if asked.max_tokens == 1:
            token, *likelihoods = (np.asarray(x).tolist() for x in state[0])
            one.add(token, [*zip(*likelihoods)])
        else:
            self.state = self.join(self.state, state, row)

    def score_prompt(self, prompt):
        """(log p, log p of the likeliest tokens, these tokens) of each token of a prompt; None for the first one."""
        n = len(prompt) - 1
        if n == 0:
            return [None]
        length = scores.fit_kernel(self.cfg, self.mesh, length_for(n))
        ids, targets = scores.pad([scores.Piece(np.array(prompt), 0, 0)], 1, length)
        likelihoods = self.score(self.params, ids[None], targets[None])
        return [None, *zip(*(np.asarray(x)[0, 0, :n].tolist() for x in likelihoods))]


class Engine:
    """The thread that uses jax. It has one model open at a time, opens it at the first request, and answers in
    order."""

    def __init__(self, n_rows):
        self.n_rows = n_rows
        self.asked = queue.Queue()  # Answers to requests that were not started
        self.next = None  # an Answer that waits until those of another model are done
        self.batch = None
        self.lock = threading.Lock()  # held while the thread is started anew
        self.start()

    def start(self):
        """Start the thread."""
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    def answer(self, asked, folder):
        """The `Answer` to `Parameters`, of the run in `folder`. Raises `Refused`."""
        if self.asked.qsize() > MOST_WAITING:
            raise Refused(429, f"More than {MOST_WAITING} requests wait; try again later.")
        answer = Answer(asked, folder)
        self.asked.put(answer)
        with self.lock:
            # otherwise every request from now on would wait for ever
            if not self.thread.is_alive():
                self.fail(RuntimeError("the thread that answers had ended; it is started again"))
                self.start()
        return answer

    def run(self):
        """The main loop of the thread: start new answers, and draw the next tokens of all."""
        while True:
            try:
                self.start_answers()
                self.batch.draw()
            # such as that of a device; later requests must still be answered
            except BaseException as e:
                self.fail(e)

    def fail(self, error):
        """Print a warning, and refuse all requests that are being answered."""
        words = warn_of_error(error)
        batch, self.batch = self.batch, None
        for one in filter(None, [*batch.waiting, *batch.rows] if batch else []):
            one.answer.put_event(Refused(500, f"The model failed: {words}."))

    def start_answers(self):
        """Start to answer the requests that have arrived. Waits for one where there is nothing else to do."""
        while True:
            busy = self.batch and self.batch.busy()
            nothing_new = not self.next and self.asked.empty()
            if busy and (nothing_new or len(self.batch.waiting) >= self.n_rows):
                return
            self.next = self.next or self.asked.get()
            if busy and self.next.folder != self.batch.folder:
                return
            answer, self.next = self.next, None
            try:
                if not busy:
                    self.open(answer.folder)
                self.batch.enqueue(answer)
            except Refused as e:
                answer.put_event(e)
            except UserError as e:
                answer.put_event(Refused(404, first_line(e), "model"))
            # damaged files may make the libraries raise any error, even panics
            except BaseException as e:
                answer.put_event(Refused(500, f"The model failed: {warn_of_error(e)}.", "model"))

    def open(self, folder):
        """Open the newest checkpoint of a run, unless it is open already. Raises UserError where the run has none."""
        step = next(iter(checkpoint_steps(folder)), None)
        if step is None:
            raise UserError(f"{folder}: has no checkpoint yet.")
        if not self.batch or (self.batch.folder, self.batch.step) != (folder, step):
            self.batch = None  # first, since memory has room for one
            self.batch = Batch(folder, step, self.n_rows)
