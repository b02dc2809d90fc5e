"""Completions in OpenAI's format, as `tools/page.py` serves them: what a request may ask, and the thread that answers
all of them in one batch of the cached decoding."""

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

MOST_WAITING = 1024  # continuations of a request, or requests
LIKELIEST = 5  # alternatives to a token that are kept
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Several = Annotated[list[str] | list[Ids], Field(min_length=1)]
# of OpenAI's parameters, what changes nothing
UNCHANGED = dict(logit_bias={}, suffix="", frequency_penalty=0, presence_penalty=0)


class Refused(Exception):
    """A request that is not answered: HTTP status, sentence, the parameter that it is about, OpenAI's code."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": dict(message=message, type=kind, param=param, code=code)}


class StreamOptions(pydantic.BaseModel, extra="forbid", strict=True):
    """What is streamed beside the choices."""

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is added to hide the pieces' sizes


class Parameters(pydantic.BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """The body of a request."""

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
    """`Parameters` of the bytes of a body, prompt and stop as lists. Raises `Refused`."""
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
    """What the engine makes of a request: events that any thread passes on and the event loop takes."""

    def __init__(self, asked, folder):
        self.asked, self.folder = asked, folder  # of the run
        self.n_prompt = self.n_drawn = 0  # tokens
        self.left = False  # the client has gone
        self.events = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def tell(self, event):
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def next(self):
        """The next event. Raises `Refused`."""
        event = await self.events.get()
        if isinstance(event, Refused):
            raise event
        return event

    async def pieces(self):
        """Choices of OpenAI's format: whole ones as they end, or with `stream` what is new of each as it comes."""
        running = len(self.asked.prompt) * self.asked.n
        while running:
            piece = await self.next()
            running -= piece["finish_reason"] is not None
            yield piece

    def usage(self):
        n, drawn = self.n_prompt, self.n_drawn
        return dict(prompt_tokens=n, completion_tokens=drawn, total_tokens=n + drawn)


class Continuation:
    """One choice of an answer: the row of its prompt, of which the request did not have the first `before` tokens."""

    def __init__(self, answer, index, prompt, before, encoding, ends):
        self.answer, self.index = answer, index
        self.first = before if answer.asked.echo else len(prompt)  # token that is shown
        self.row = Row(encoding, prompt, answer.asked, hidden=self.first, ends=ends)
        # of each token from the first on: its log p, the likeliest tokens' log p, these tokens; None where nothing is
        # before it
        self.told = []
        self.shown = self.first  # tokens whose probabilities were passed on, and those before

    def add(self, tokens, told):
        """Take further tokens, with what `draw` tells of them, and pass on what may be shown."""
        row = self.row
        row.add(tokens)
        self.told += told
        if not (row.done or self.answer.asked.stream):
            return
        piece = dict(index=self.index, text=row.unseen, logprobs=None, finish_reason=None)
        row.unseen = ""
        if self.answer.asked.logprobs is not None:
            piece["logprobs"] = self.logprobs()
        if row.done:
            piece["finish_reason"] = "stop" if row.stopped else "length"
            self.answer.n_drawn += len(row.tokens)
        self.answer.tell(piece)

    def logprobs(self):
        """Those of the tokens whose text was shown since the last call."""
        row = self.row
        tokens = [*row.prompt, *row.tokens, *row.ending]
        begin = len(text_of(row.encoding, tokens[: self.first]))
        end = row.prompt_length + len(row.text)
        before = text_of(row.encoding, tokens[: self.shown])
        whole = row.done and not row.cut
        found = dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens[self.shown :]:
            after = text_of(row.encoding, tokens[: self.shown + 1])
            offset = place_of_last(before, after)
            if offset >= end and not whole:
                break
            told = self.told[self.shown - self.first]
            found["tokens"].append(text_of(row.encoding, [token]))
            found["token_logprobs"].append(told and told[0])
            found["top_logprobs"].append(told and self.alternatives(token, *told))
            found["text_offset"].append(max(0, offset - begin))
            self.shown += 1
            before = after
        return found

    def alternatives(self, token, own, likeliest, ids):
        """{text: log p} of the likeliest tokens in the place of one, and of that itself."""
        logprobs = dict(zip(ids[: self.answer.asked.logprobs], likeliest)) | {token: own}
        found = {}
        for other, logprob in logprobs.items():
            text = text_of(self.row.encoding, [other])
            if text in found:  # parts of a character look alike
                text += f" (token {other})"
            found[text] = logprob
        return found


def place_of_last(before, after):
    """The character at which the last token of a text begins, by the texts without and with it. One that is a part of a
    character begins where that does."""
    if not after.startswith(before):  # which ends in such a part
        before = before.rstrip("\ufffd")
    return max(0, min(len(before), len(after) - 1))


def draw(logits, how, _):
    """As `decoding.draw_next`, each row with settings of its own, so that no row depends on the others: ((token, its
    log p, the log p of the likeliest tokens, these tokens), how to draw the next)."""
    hot = how["temperature"] > 0
    scaled = logits / jnp.where(hot, how["temperature"], 1.0)[:, None]
    some = (how["top_p"] < 1).any()  # a nucleus takes time
    scaled = lax.cond(some, keep_nucleus, lambda x, _: x, scaled, how["top_p"][:, None])

    def draw_row(scaled, hot, seed, count):
        key = jax.random.fold_in(jax.random.key(seed), count)
        drawn = jax.random.categorical(key, scaled)
        return jnp.where(hot, drawn, jnp.argmax(scaled)).astype(jnp.int32)

    token = jax.vmap(draw_row)(scaled, hot, how["seed"], how["count"])
    told = loss.beside_likeliest(logits, token, LIKELIEST)
    return (token, *told), how | dict(count=how["count"] + 1)


def keep_nucleus(logits, top_p):
    """The logits [B, V] with -inf for what is not in the nucleus of probability top_p [B, 1], where that is below 1."""
    out = logits < decoding.smallest_of_nucleus(logits, top_p)
    return jnp.where(out & (top_p < 1), -jnp.inf, logits)


def settings(rows, temperature=0.0, top_p=1.0, seed=0):
    """What `draw` needs of that many rows alike."""
    return dict(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        seed=np.full(rows, seed % 2**32, np.uint32),
        count=np.zeros(rows, np.int32),
    )


def said_of(error):
    """An error of the engine in words, which are printed as a warning too."""
    words = f"{type(error).__name__}: {first_line(error)}"
    warn(f"completions: {words}")
    return words


@functools.lru_cache(1)
def programs(cfg, mesh, T):
    """(prefill, advance) of `decoding.make_stream`, join(state, new, row) -> state with the state `new` of one row in
    the place of number `row`, and `model.make_score` that tells of a prompt's tokens what `draw` tells of those that it
    draws. A newer checkpoint of the same run takes the same ones."""
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
    """The rows of a model that are continued at once. A row joins when another has ended. Programs have fixed shapes: a
    prompt is read alone, padded to a length of `length_for`; all rows advance together, used or not. So an answer does
    not depend on what else is asked."""

    def __init__(self, folder, step, n_rows):
        self.folder, self.step = folder, step
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
        self.rows = [None] * n_rows  # the Continuation of each that is used
        self.waiting = deque()  # continuations without a row

    def busy(self):
        return bool(self.waiting or any(self.rows))

    def token_ids(self, prompt, max_tokens):
        """A prompt as token ids. Raises `Refused`."""
        longest = longest_token(self.encoding) if isinstance(prompt, str) else 1
        if len(prompt) > self.T * longest:  # asked first: tokenizing takes time, and a cache memory
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

    def take(self, answer):
        """Have the continuations of a request wait for rows. The first event of its answer is None."""
        asked = answer.asked
        prompts = [self.token_ids(prompt, asked.max_tokens) for prompt in asked.prompt]
        answer.n_prompt = sum(map(len, prompts))
        answer.tell(None)
        for n, (given, prompt) in enumerate(zip(asked.prompt, prompts)):
            before = len(self.before) if isinstance(given, str) else 0
            for index in range(n * asked.n, (n + 1) * asked.n):
                one = Continuation(answer, index, prompt, before, self.encoding, self.ends)
                self.waiting.append(one)

    def draw(self):
        """Begin continuations that wait where rows are free, draw the next tokens of all rows, and pass them on."""
        for row, used in enumerate(self.rows):
            if self.waiting and not used:
                one = self.rows[row] = self.waiting.popleft()
                self.start(one, row)
                if one.row.done:
                    self.rows[row] = None
        if not any(self.rows):
            return
        self.state, drawn = self.advance(self.params, self.state)
        tokens, *told = (np.asarray(x).swapaxes(0, 1).tolist() for x in drawn)
        for row, one in enumerate(self.rows):
            if one:
                one.add(tokens[row], [*zip(*(x[row] for x in told))])
                if one.row.done or one.answer.left:
                    self.rows[row] = None

    def start(self, one, row):
        """Read the prompt of a continuation, which is continued in a row if it has more than one token to be drawn."""
        asked, prompt = one.answer.asked, one.row.prompt
        if asked.echo and asked.logprobs is not None:
            one.told += self.tell(prompt)[one.first :]
        if asked.max_tokens == 0:
            one.add([], [])
            return
        ids = decoding.pad([prompt], min(self.T, length_for(len(prompt))))
        how = settings(1, asked.temperature, asked.top_p, asked.seed + one.index)
        state = self.prefill(self.params, *ids, how)
        if asked.max_tokens == 1:
            token, *told = (np.asarray(x).tolist() for x in state[0])
            one.add(token, [*zip(*told)])
        else:
            self.state = self.join(self.state, state, row)

    def tell(self, prompt):
        """Of each token of a prompt what `draw` tells; None of the first."""
        n = len(prompt) - 1
        if n == 0:
            return [None]
        length = scores.fit_kernel(self.cfg, self.mesh, length_for(n))
        ids, targets = scores.pad([scores.Piece(np.array(prompt), 0, 0)], 1, length)
        told = self.score(self.params, ids[None], targets[None])
        return [None, *zip(*(np.asarray(x)[0, 0, :n].tolist() for x in told))]


class Engine:
    """The thread that owns jax: it opens a model at its first request, one at a time, and answers in order."""

    def __init__(self, n_rows):
        self.n_rows = n_rows
        self.asked = queue.Queue()  # Answers to begin
        self.next = None  # one that waits until another model's are done
        self.batch = None
        self.lock = threading.Lock()  # of starting
        self.start()

    def start(self):
        self.thread = threading.Thread(target=self.work, name="engine", daemon=True)
        self.thread.start()

    def answer(self, asked, folder):
        """The `Answer` to `Parameters`, of the run in `folder`. Raises `Refused`."""
        if self.asked.qsize() > MOST_WAITING:
            raise Refused(429, f"More than {MOST_WAITING} requests wait; try again later.")
        answer = Answer(asked, folder)
        self.asked.put(answer)
        with self.lock:
            if not self.thread.is_alive():  # or every request from now on would wait for ever
                self.fail(RuntimeError("the thread that answers had ended; it is started again"))
                self.start()
        return answer

    def work(self):
        while True:
            try:
                self.begin()
                self.batch.draw()
            except BaseException as e:  # of a device, say: later requests are answered
                self.fail(e)

    def fail(self, error):
        """Warn, and refuse whatever is being answered."""
        words = said_of(error)
        batch, self.batch = self.batch, None
        for one in filter(None, [*batch.waiting, *batch.rows] if batch else []):
            one.answer.tell(Refused(500, f"The model failed: {words}."))

    def begin(self):
        """Begin the answers to the requests that came, and to one at least where there is nothing else to do."""
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
                self.batch.take(answer)
            except Refused as e:
                answer.tell(e)
            except UserError as e:
                answer.tell(Refused(404, first_line(e), "model"))
            except BaseException as e:  # whatever damage makes the libraries raise, panics too
                answer.tell(Refused(500, f"The model failed: {said_of(e)}.", "model"))

    def open(self, folder):
        """Open the newest checkpoint of a run, unless it is open. Raises UserError where there is none."""
        step = next(iter(checkpoint_steps(folder)), None)
        if step is None:
            raise UserError(f"{folder}: has no checkpoint yet.")
        if not self.batch or (self.batch.folder, self.batch.step) != (folder, step):
            self.batch = None  # there is room for one
            self.batch = Batch(folder, step, self.n_rows)
