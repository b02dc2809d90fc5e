"""Completions of runs in OpenAI's format, as `tools/page.py` serves them: what a request may ask, and the thread that
answers all of them in one batch of the cached decoding."""

import asyncio
import dataclasses
import functools
import json
import math
import queue
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from data.tokenization import text_of, whole_characters
from inference import decoding
from inference.weights import positions
from runtime.files import names_in
from runtime.messages import UserError, first_line, warn
from tools import common
from tools.sample import MULTIPLE, Row

MOST_BYTES = 2**20  # of a request
MOST_WAITING = 1024  # continuations that wait or are drawn
LIKELIEST = 5  # alternatives to a token that are kept


class Refused(Exception):
    """A request that is not answered: HTTP status, sentence, the parameter that it is about."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": dict(message=message, type=kind, param=param, code=code)}


# --- Requests -----------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """What a client asks, checked, and the events of its answer: None once the prompts are token ids, then choices of
    OpenAI's format, each with what is new of it, or `Refused`."""

    model: str
    prompt: list
    max_tokens: int = 16
    temperature: float = 1.0
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    stop: list = field(default_factory=list)
    stream: bool = False
    folder: str = ""  # of the run
    n_tokens: int = 0  # of the prompts
    n_drawn: int = 0  # tokens
    left: bool = False  # the client has gone

    def __post_init__(self):
        self.events = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.seed = secrets.randbits(32) if self.seed is None else self.seed

    def tell(self, event):
        """Pass an event on, from any thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def next_event(self):
        """The next event. Raises `Refused`."""
        event = await self.events.get()
        if isinstance(event, Refused):
            raise event
        return event

    async def pieces(self):
        """Choices as they grow, until all have ended."""
        running = len(self.prompt) * self.n
        while running:
            piece = await self.next_event()
            running -= piece["finish_reason"] is not None
            yield piece

    async def whole(self):
        """(all choices, the usage) once all have ended."""
        choices = {}
        async for piece in self.pieces():
            whole = choices.setdefault(piece["index"], piece)
            if whole is not piece:
                whole["text"] += piece["text"]
                whole["finish_reason"] = piece["finish_reason"]
                for name, more in (piece["logprobs"] or {}).items():
                    whole["logprobs"][name] += more
        used = dict(prompt_tokens=self.n_tokens, completion_tokens=self.n_drawn)
        usage = used | dict(total_tokens=self.n_tokens + self.n_drawn)
        return [choices[i] for i in sorted(choices)], usage


def is_number(value, least, most, kind=int | float):
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most


def is_texts(value, least=0):
    return isinstance(value, list) and all(isinstance(x, str) and len(x) >= least for x in value)


def is_ids(value):
    return isinstance(value, list) and value and all(is_number(x, 0, 2**31, int) for x in value)


def is_prompt(value):
    if isinstance(value, str) or is_ids(value):
        return True
    return bool(value) and (
        is_texts(value) or (isinstance(value, list) and all(map(is_ids, value)))
    )


def is_stop(value):
    value = [value] if isinstance(value, str) else value
    return is_texts(value, least=1) and len(value) <= 4


# {parameter: (whether a value is accepted, what would be right)}
PARAMETERS = {
    "model": (lambda x: isinstance(x, str), "the name of a run"),
    "prompt": (is_prompt, "a text, token ids, or a list of either, none of them empty"),
    "max_tokens": (lambda x: is_number(x, 1, 2**20, int), "a whole number from 1 on"),
    "temperature": (lambda x: is_number(x, 0, 2), "a number from 0 to 2"),
    "n": (lambda x: is_number(x, 1, 128, int), "a whole number from 1 to 128"),
    "seed": (lambda x: is_number(x, -(2**63), 2**63, int), "a whole number of 64 bits"),
    "logprobs": (
        lambda x: is_number(x, 0, LIKELIEST, int),
        f"a whole number from 0 to {LIKELIEST}",
    ),
    "stop": (is_stop, "a text or at most four, none of them empty"),
    "stream": (lambda x: isinstance(x, bool), "true or false"),
}
# {parameter that does nothing here: the only value that it may have}
NEUTRAL = dict(
    echo=False,
    best_of=1,
    suffix="",
    top_p=1,
    presence_penalty=0,
    frequency_penalty=0,
    logit_bias={},
)


def refuse_constant(name):
    raise ValueError(f"{name} is not a number of JSON")


def read_request(body):
    """The `Request` in the bytes of a body. Raises `Refused`."""
    try:
        given = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"The body is not JSON ({first_line(e)}).") from None
    if not isinstance(given, dict):
        raise Refused(400, "The body must be a JSON object.")
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("model", "prompt"):
        if name not in given:
            raise Refused(400, f"{name} is missing; give {PARAMETERS[name][1]}.", name)
    for name, value in given.items():
        if name in PARAMETERS:
            accepts, right = PARAMETERS[name]
            if not accepts(value):
                raise Refused(400, f"{name}: {value!r:.80} is not possible; give {right}.", name)
        elif name not in NEUTRAL:
            raise Refused(400, f"{name!r:.80}: there is no such parameter.", name[:80])
        elif value != NEUTRAL[name] or isinstance(value, bool) != isinstance(NEUTRAL[name], bool):
            only = json.dumps(NEUTRAL[name])
            raise Refused(400, f"{name} is not supported; leave it out or give {only}.", name)
    fields = {f.name for f in dataclasses.fields(Request)} & PARAMETERS.keys()
    request = Request(**{name: given[name] for name in fields & given.keys()})
    if isinstance(request.prompt, str) or is_ids(request.prompt):
        request.prompt = [request.prompt]
    if isinstance(request.stop, str):
        request.stop = [request.stop]
    if len(request.prompt) * request.n > MOST_WAITING:
        raise Refused(400, f"prompt and n: more than {MOST_WAITING} continuations.", "n")
    return request


# --- Answers ------------------------------------------------------------------------------------------------------


class Continuation:
    """One continuation of a prompt, token ids, number `index` of its request."""

    def __init__(self, request, index, prompt, encoding):
        self.request, self.index = request, index
        self.row = Row(encoding, prompt, request, hidden=len(prompt))
        self.told = []  # of each token: (its log p, the likeliest tokens' log p, these tokens)
        self.shown = 0  # tokens whose probabilities the client has

    def add(self, tokens, told):
        """Take further tokens and pass on what is new of the text."""
        self.row.add(tokens)
        self.told += told
        request, row = self.request, self.row
        reason = ("stop" if row.stopped else "length") if row.done else None
        logprobs = self.logprobs() if request.logprobs is not None else None
        if row.done:
            request.n_drawn += len(row.tokens)
        choice = dict(index=self.index, text=row.unseen, logprobs=logprobs, finish_reason=reason)
        request.tell(choice)
        row.unseen = ""

    def logprobs(self):
        """Probabilities of the tokens whose text was shown since the last call, in OpenAI's format."""
        row, found = self.row, dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        while self.shown < len(row.tokens):
            before = row.prompt + row.tokens[: self.shown]
            offset = len(text_of(row.encoding, before)) - row.prompt_length
            if offset >= len(row.text):
                break
            own, likeliest, ids = self.told[self.shown]
            alternatives = {}
            for token, logprob in zip(ids[: self.request.logprobs], likeliest):
                alternatives.setdefault(text_of(row.encoding, [token]), logprob)
            found["tokens"].append(text_of(row.encoding, [row.tokens[self.shown]]))
            found["token_logprobs"].append(own)
            found["top_logprobs"].append(alternatives)
            found["text_offset"].append(offset)
            self.shown += 1
        return found


# --- Drawing ------------------------------------------------------------------------------------------------------


def draw(logits, how, _):
    """As `decoding.draw_next`, each row with a temperature and a seed of its own, so that no row depends on the others:
    ((token, its log p, the log p of the likeliest tokens, these tokens), how to draw the next)."""
    hot = how["temperature"] > 0

    def draw_row(seed, count, logits):
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), count), logits)

    def draw_all():
        scaled = logits / jnp.where(hot, how["temperature"], 1.0)[:, None]
        return jax.vmap(draw_row)(how["seed"], how["count"], scaled)

    greedy = jnp.argmax(logits, -1)
    token = jnp.where(hot, lax.cond(hot.any(), draw_all, lambda: greedy), greedy)
    logprobs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]
    likeliest, ids = lax.top_k(logprobs, LIKELIEST)
    return (token.astype(jnp.int32), own, likeliest, ids), how | dict(count=how["count"] + 1)


@functools.lru_cache(1)
def programs(cfg, mesh, T):
    """(prefill, advance) of `decoding.make_stream`, join(state, new, row) -> state with the first row of the state
    `new` in the place of number `row`. A newer checkpoint of the same run takes the same ones."""
    prefill, advance = decoding.make_stream(cfg, mesh, None, T, draw=draw)
    specs = decoding.cache_specs(cfg)
    dims = {kind: list(spec).index("dp") for kind, spec in specs.items()}

    def join(state, new, row):
        def put(x, y, dim=0):
            first = lax.slice_in_dim(y, 0, 1, axis=dim)
            return lax.dynamic_update_slice_in_dim(x, first, row, dim)

        token, position, cache, how = state
        new_token, new_position, new_cache, new_how = new
        cache = {kind: put(x, new_cache[kind], dims[kind]) for kind, x in cache.items()}
        token = jax.tree.map(put, token, new_token)
        how = jax.tree.map(put, how, new_how)
        return token, put(position, new_position), cache, how

    return prefill, advance, jax.jit(join, donate_argnums=0)


def newest_step(folder):
    """The step of the newest checkpoint of a run. Raises UserError where there is none."""
    names = names_in(f"{folder}/checkpoints")
    found = [int(name) for name in names if name.isdecimal()]
    if not found:
        raise UserError(f"{folder}: has no checkpoint yet.")
    return max(found)


class Batch:
    """The rows of a model that are continued at once. A row joins when another has ended.

    Programs have fixed shapes: a prompt is read alone, padded to a multiple of MULTIPLE, and all rows advance together,
    used or not. So an answer does not depend on what else is asked.
    """

    def __init__(self, folder, step, batch_size):
        self.folder, self.step = folder, step
        options = common.Options(model=folder)
        self.cfg, mesh, self.params, self.encoding = common.open_model(options, text=True)
        self.before = common.before_prompt(options, self.encoding)
        self.T = positions(folder, self.cfg.model.T)
        self.dp = mesh.shape["dp"]
        self.n_rows = math.ceil(batch_size / self.dp) * self.dp
        self.prefill, self.advance, self.join = programs(self.cfg, mesh, self.T)
        self.rows = {}  # {number of a row: its Continuation}
        self.state = None

    def token_ids(self, request):
        """The prompts of a request as token ids. Raises `Refused`."""
        prompts = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                text = whole_characters(prompt)
                prompt = [*self.before, *self.encoding.encode_ordinary(text)]
            if not prompt:
                raise Refused(400, "prompt: is empty; give a text.", "prompt")
            if max(prompt) >= self.cfg.model.vocab_size:
                right = f"this model has {self.cfg.model.vocab_size} tokens"
                raise Refused(400, f"prompt: there is no token {max(prompt)}; {right}.", "prompt")
            if len(prompt) + request.max_tokens > self.T:
                said = f"{len(prompt)} tokens of prompt and {request.max_tokens} to be drawn"
                words = f"{said} exceed the {self.T} tokens that {request.model} was made for."
                raise Refused(400, words, "max_tokens", "context_length_exceeded")
            prompts.append(prompt)
        return prompts

    def how(self, B, temperature=0.0, seed=0):
        """What `draw` needs of B rows alike."""
        return dict(
            temperature=np.full(B, temperature, np.float32),
            seed=np.full(B, seed, np.uint32),
            count=np.zeros(B, np.int32),
        )

    def begin(self, continuation):
        """Read a prompt into a free row."""
        request, prompt = continuation.request, continuation.row.prompt
        row = next(i for i in range(self.n_rows) if i not in self.rows)
        n = min(self.T, math.ceil(len(prompt) / MULTIPLE) * MULTIPLE)
        how = self.how(self.dp, request.temperature, (request.seed + continuation.index) % 2**32)
        new = self.prefill(self.params, *decoding.pad([prompt] * self.dp, n), how)
        if self.state is None:
            unused = *decoding.pad([[0]] * self.n_rows, 1), self.how(self.n_rows)
            shapes = jax.eval_shape(self.prefill, self.params, *unused)
            self.state = jax.tree.map(
                lambda x, like: jnp.zeros(x.shape, x.dtype, device=like.sharding), shapes, new
            )
        self.state = self.join(self.state, new, row)
        self.rows[row] = continuation

    def draw(self):
        """Draw the next tokens of all rows, and pass them on."""
        self.state, drawn = self.advance(self.params, self.state)
        tokens, *told = (np.asarray(x).swapaxes(0, 1).tolist() for x in drawn)
        for row, continuation in [*self.rows.items()]:
            continuation.add(tokens[row], list(zip(*(x[row] for x in told))))
            if continuation.row.done or continuation.request.left:
                del self.rows[row]


class Engine:
    """The thread that owns jax: it opens a model at its first request, one at a time, and answers in order."""

    def __init__(self, batch_size):
        self.batch_size = batch_size  # rows
        self.requests = queue.Queue()
        self.next = None  # a request that waits until another model's are done
        self.waiting = deque()  # continuations without a row
        self.batch = None
        threading.Thread(target=self.work, name="engine", daemon=True).start()

    def ask(self, request):
        """Answer a request, by its events. Raises `Refused`."""
        if self.requests.qsize() + len(self.waiting) > MOST_WAITING:
            raise Refused(429, f"More than {MOST_WAITING} requests wait; try again later.")
        self.requests.put(request)

    def work(self):
        while True:
            try:
                self.turn()
            except Exception as e:  # of a device, say: the others are answered
                warn(f"completions: {type(e).__name__}: {first_line(e)}")
                self.fail(Refused(500, f"The model failed ({first_line(e)})."))

    def turn(self):
        """Take the requests that came, and draw once for all rows."""
        while self.next or not self.busy() or not self.requests.empty():
            self.next = self.next or self.requests.get()
            if self.busy() and self.next.folder != self.batch.folder:
                break
            request, self.next = self.next, None
            self.accept(request)
        while self.waiting and len(self.batch.rows) < self.batch.n_rows:
            continuation = self.waiting.popleft()
            if not continuation.request.left:
                self.batch.begin(continuation)
        if self.batch.rows:
            self.batch.draw()

    def busy(self):
        return bool(self.waiting or (self.batch and self.batch.rows))

    def accept(self, request):
        """Have the continuations of a request wait for rows."""
        try:
            if not self.busy():
                self.open(request.folder)
            prompts = self.batch.token_ids(request)
        except Refused as e:
            return request.tell(e)
        except UserError as e:
            return request.tell(Refused(404, str(e), "model", "model_not_found"))
        except Exception as e:  # whatever a damaged run makes the libraries raise
            return request.tell(
                Refused(500, f"{request.model} cannot be opened ({first_line(e)}).")
            )
        request.n_tokens = sum(map(len, prompts))
        request.tell(None)
        rows = [ids for ids in prompts for _ in range(request.n)]
        for i, ids in enumerate(rows):
            self.waiting.append(Continuation(request, i, ids, self.batch.encoding))

    def open(self, folder):
        """Have the newest checkpoint of a run in `batch`."""
        step = newest_step(folder)
        if self.batch and (self.batch.folder, self.batch.step) == (folder, step):
            return
        self.batch = None  # there is room for one
        self.batch = Batch(folder, step, self.batch_size)

    def fail(self, refused):
        """Refuse all that is in progress."""
        rows = self.batch.rows.values() if self.batch else []
        for request in {id(c.request): c.request for c in [*self.waiting, *rows]}.values():
            request.tell(refused)
        self.waiting.clear()
        self.batch = None
