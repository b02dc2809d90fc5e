"""Serve a local page about runs: their curves, their health, text of their newest checkpoints, and completions.

python tools/page.py runs gs://bucket/runs
python tools/page.py ../theirs/runs --port 9000

It only reads the runs, which may be those of other people. /v1/completions answers in OpenAI's format.
"""

if not __package__:
    import startup

    startup.prepare()

import contextlib
import functools
import glob
import importlib.util
import itertools
import math
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from urllib.parse import urlsplit

import utils
from config.batch import SPLIT
from config.parser import argument, flag
from config.program import read_flags
from config.resume import checkpoint_steps
from config.stored import shareable
from logs.meter import spent_in
from logs.overfitting import evaluations, overfit_in
from logs.rows import NAME, PARTS, join_rows, parts_in, read_files, rows_in
from logs.runlog import SAMPLES, end_of
from runtime import platforms
from runtime.files import ask, check_not_pipe, filesystem, is_remote, read_file, read_json, to_json
from runtime.locks import LOCK, is_held
from runtime.messages import UserError, duration, first_line, one_sentence
from tools import common

PACKAGES = "starlette", "uvicorn", "pydantic", "plotly"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Show runs on a local page, and answer /v1/completions."""

    runs: tuple[str, ...] = argument()
    """Run directories, or folders of them; gs:// and s3:// addresses too."""
    port: int = flag(8321, least=0, most=65535)
    """Port of 127.0.0.1 to listen on; 0: any free one."""
    batch_size: int = flag(32, least=1)
    """Continuations that are drawn at once. Each has a cache for the model's whole T."""


def check_packages():
    """Raises UserError where one of PACKAGES is missing."""
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(f"the page needs {' and '.join(missing)}; bash setup_tpu.sh page adds it.")


if __name__ == "__main__":
    if "JAX_PLATFORMS" not in os.environ:  # the accelerator may belong to a run
        platforms.choose_cpu()
    options_given = one_sentence(lambda: read_flags(Page, sys.argv[1:], "tools/page.py"))
    one_sentence(check_packages)

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from tools.completions import Engine, Refused, read_parameters
from training.sizes import tokens_per_step

MOST_BYTES = 2**20  # most bytes of a request
MOST_NAMED = 20  # most models that a message names
METHODS = "GET", "POST", "PUT", "PATCH", "DELETE"
# Up to this many bytes of a request that is too long are read before it is refused, since few clients read an answer
# while they send.
DRAINED = 2**24
# Bytes of a file that are read at once, and the most that a file may have which is read as a whole (SMALL).
PIECE = 2**26
PATIENCE = 20  # seconds after which the page is shown without a run whose storage has not answered
RECENT = 100  # number of the last rows, from which the health of a run is determined
LOSS = "loss/train_loss"
# what config.json records of the machines, not of the training; the page shows it separately
OF_MACHINES = SPLIT | {"val_batch_size", "n_device_axis", "n_devices", "pp_interleave"}
OF_MACHINES |= {"num_processes", "data_fingerprint", "commit", "device_kind"}
OF_MACHINES |= utils.flags_with(per_process=True)
# What a browser may do with an answer: run the page's own scripts and contact no server but this one. plotly needs the
# exceptions: it draws heat maps as images with data: addresses, and sets style attributes.
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "style-src-attr": "'unsafe-inline'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(
        f"{directive} {sources}" for directive, sources in POLICY.items()
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# files of a run that are read as a whole
SMALL = "config.json", "plan.json", "samples.txt", "ended.json", LOCK


class Run:
    """A run directory as it grows: its config.json, its plan.json if it has one, and the rows of its metrics.jsonl.

    version: changes when rows that were read before may have changed. summary: what the page lists of the run.
    """

    def __init__(self, folder, name):
        self.folder = folder
        self.name = name
        self.config = {}
        self.started = None  # time.time() of its first start
        self.seen = None  # version and number of the rows from which these two were computed:
        self.evaluations = []  # from `overfitting.evaluations`
        self.overfit = None  # from `overfitting.overfit_in`
        self._reset()
        self.set_status("idle", "It is being read.")

    def _reset(self):
        """Forget all rows, as when a run has written its metrics.jsonl anew."""
        self.version = secrets.token_hex(4)
        self.log = []  # the rows of metrics.jsonl
        self.rows = self.log  # all rows: with those of the parts, where there are any
        self.parts = {}  # {name of a part: (step after which its rows begin, its rows)}
        self.end = 0  # bytes of metrics.jsonl that were read, up to the end of a line
        self.last = b""  # the last line that was read

    def refresh(self):
        """Read what is new, and set the status."""
        try:
            self._check_files()
            self.config = read_json(self.folder, "config.json")
            with contextlib.suppress(FileNotFoundError):
                self._read_rows(f"{self.folder}/{NAME}")
            self._read_parts()
            self._evaluate()
            self.started = self._first_start()
            found = self._measured() if self.rows else {}
            state, words = health(self.rows, self.config, time.time(), self._ended())
            if found.get("left"):
                found["left"] += " left, once it resumes" if state == "idle" else " left"
            if self.overfit and state != "bad":
                state, words = "overfit", f"{words} {self._overfit_words()}"
        except Exception as e:  # the files of other people's runs may hold anything
            return self.set_status("bad", f"It cannot be read: {first_line(e)}")
        self.set_status(state, words, **found)

    def set_status(self, state, words, **found):
        """Set the state and the sentence that the page lists for the run. found: from `_measured`."""
        summary = dict(name=self.name, version=self.version, n=len(self.rows))
        summary |= dict(state=state, words=words, started=self.started, keys=[], spent={})
        self.summary = summary | found

    def _check_files(self):
        """Raises UserError for a local file whose reading would never end, such as a pipe, or would fill the memory."""
        if not is_remote(self.folder):
            parts = [f"{PARTS}/{name}" for *_, name in parts_in(self.folder)]
            for name in (*SMALL, *parts):
                path = f"{self.folder}/{name}"
                check_not_pipe(path)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.getsize(path) > PIECE:
                        raise UserError(f"{path}: has more than {PIECE:,} bytes; remove it.")

    def _read_rows(self, path):
        """Read the new rows of a metrics.jsonl."""
        check_not_pipe(path)
        size = ask(path, "info")["size"]
        while self._read_piece(path, size):
            pass

    def _read_piece(self, path, size):
        """Read the next rows of a file of `size` bytes. Returns whether there may be more."""
        begin = self.end - len(self.last)
        end = min(size, begin + PIECE)
        content = ask(path, "cat_file", start=begin, end=end) if end > begin else b""
        if not content.startswith(self.last):  # a run that resumed has written the file anew
            self._reset()
            return True
        whole = content[: content.rfind(b"\n") + 1]  # the last line may be incomplete
        if len(whole) <= len(self.last) and end < size:
            raise UserError(f"{path}: has a line of more than {PIECE:,} bytes; remove it.")
        new = whole[len(self.last) :].splitlines(keepends=True)
        self.log += rows_in(new)
        self.last = new[-1] if new else self.last
        self.end = begin + len(whole)
        return end < size

    def _read_parts(self):
        """Read the new parts of the rows of a run in a bucket. Each part is written once."""
        found = parts_in(self.folder)
        if not found and not self.parts:
            return
        new = [(after, name) for _, after, name in found if name not in self.parts]
        read = read_files([f"{self.folder}/{PARTS}/{name}" for _, name in new])
        for (after, name), content in zip(new, read):
            if content is not None:  # None: its rows are in a later part now
                self.parts[name] = after, rows_in(content.splitlines())
        self.parts = {name: self.parts[name] for *_, name in found if name in self.parts}
        rows = join_rows([(0, self.log), *self.parts.values()])
        if rows[: len(self.rows)] != self.rows:
            self.version = secrets.token_hex(4)
        self.rows = rows

    def _ended(self):
        """Whether the run has ended with all steps saved, and no process has resumed it."""
        end = end_of(self.folder, self.rows)
        return end is not None and not is_held(self.folder)

    def _first_start(self):
        """The time of the run's first start; while it has no row, the time at which its config.json was written."""
        if not self.rows:
            return ask(f"{self.folder}/config.json", "modified").timestamp()
        return self.rows[0].get("time", 0) - sum(spent_in(self.rows[0]).values())

    def _evaluate(self):
        """Find the evaluations in the rows, and whether the run overfits, where rows are new."""
        now = self.version, len(self.rows)
        if now != self.seen:
            self.seen = now
            self.evaluations = evaluations(self.rows)
            self.overfit = overfit_in(self.evaluations)

    def checkpoint(self):
        """Step of the checkpoint that is sampled: the best of a run that overfits, else the newest; None without one.
        Raises UserError."""
        steps = checkpoint_steps(self.folder)
        saved = [one for one in self.evaluations if one.step in steps]
        if self.overfit and saved:
            return min(saved, key=lambda one: one.held_out).step
        return next(iter(steps), None)

    def _overfit_words(self):
        """A sentence on a run that overfits, with its best checkpoint."""
        step = self.checkpoint()
        losses = {one.step: one.held_out for one in self.evaluations}
        if step not in losses:
            return f"{self.overfit.words}."
        loss = "" if step == self.overfit.step else f", at {losses[step]:.4f}"
        return f"{self.overfit.words}; step {step:,} is the best checkpoint{loss}."

    def _measured(self):
        """Names of the metrics, goodput, evaluations as (step, held-out loss), the time left, tokens of a step, its
        measured and planned seconds."""
        newest = self.rows[-1]
        evaluated = next((row for row in reversed(self.rows) if "loss/val_loss" in row), {})
        best = min(self.evaluations, key=lambda one: one.held_out, default=None)
        spent = spent_in(newest)
        left = seconds_left(self.rows, self.config.get("training_steps", math.nan))
        tokens = tokens_per_step(common.stored_config(self.config))
        planned = read_json(self.folder, "plan.json").get("seconds", {}).get("step")
        speed = statistics.median(row["tokens_per_second"] for row in self.rows[-RECENT:])
        return dict(
            keys=sorted({*newest, *evaluated}),
            spent={part: seconds for part, seconds in spent.items() if part != "resting"},
            left=duration(left) if left > 0 else "",
            tokens=tokens,
            measured=tokens / speed,
            planned=planned if isinstance(planned, int | float) else None,
            held_out=self.evaluations[-1][:2] if best else None,
            best=best[:2] if best else None,
        )


def seconds_left(rows, last):
    """Seconds until step `last`, at the pace of the last steps, with evaluations and saves between them; nan where that
    is not known."""
    newest = rows[-1]
    first = next(row for row in rows[-RECENT:] if row.get("resumed") == newest.get("resumed"))
    n = newest["step"] - first["step"]
    seconds = newest.get("time", math.nan) - first.get("time", math.nan)
    return (last - newest["step"]) * seconds / n if n else math.nan


def health(rows, config, now, ended=False):
    """Whether a run is well: (well, done, idle or bad; a sentence that says why). now: time.time(); ended: whether all
    steps are saved and no process runs."""
    if not rows:
        return "idle", "No step is done yet: it compiles, or ended before."
    row = rows[-1]
    last = config.get("training_steps", math.inf)
    pauses = [60]  # seconds; and five times each pause between two steps of the same process
    for before, after in itertools.pairwise(rows[-RECENT:]):
        if before.get("resumed") == after.get("resumed"):
            pauses.append(5 * (after.get("time", 0) - before.get("time", 0)))
    silent = now - row.get("time", now)
    state, words = "well", "It trains"
    if trouble := trouble_in(rows):
        state, words = "bad", trouble
    elif row["step"] >= last:
        state, words = "done", "Finished"
    elif ended:
        state, words = "idle", f"Stopped {duration(silent)} ago, with all saved,"
    elif silent > max(pauses):
        state, words = "idle", f"Stopped, or it hangs: no step for {duration(silent)}"
    return state, f"{words} at step {row['step']:,} of {last:,}, training loss {row[LOSS]:.3f}."


def trouble_in(rows):
    """What is wrong with the run that wrote these rows, in words; "" where nothing is."""
    row = rows[-1]
    recent = rows[-RECENT:]
    if not math.isfinite(row[LOSS]):
        return "Its loss is not finite"
    skipped = row.get("bad_steps", 0) - recent[0].get("bad_steps", 0)
    if skipped > 0:
        return f"{skipped:.0f} of the last {len(recent)} steps were not finite, so skipped,"
    shares = [value for key, value in row.items() if key.startswith("load/expert_")]
    starved = sum(share * len(shares) < 0.1 for share in shares)
    if 2 * starved > len(shares):
        return f"{starved} of {len(shares)} experts get less than a tenth of an even share"
    n = max(10, len(rows) // 10)
    if len(rows) >= 3 * n:
        before, after = np.reshape([row[LOSS] for row in rows[-2 * n :]], (2, n))
        rise = after.mean() - before.mean()
        error = math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / n)
        if rise > max(3 * error, 0.01 * before.mean()):
            return f"Its loss rose by {rise:.3f} within {n} steps"
    return ""


class Runs:
    """The runs in folders and addresses, read anew when a client asks.

    Each is read in a thread of its own, so that one whose storage does not answer does not delay the others.
    """

    def __init__(self, folders):
        self.folders = [folder.rstrip("/") for folder in folders]
        self.pause = 15 if any(map(is_remote, folders)) else 1  # seconds between two refreshes
        self.refreshed = -math.inf
        self.found = {folder: {} for folder in self.folders}  # {folder: {name: Run}}
        self.known = {}
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(32, "refresh")
        self.calls = {}  # {folder or Run: the Future of its last refresh}

    def refresh(self):
        """{name: Run}, up to date."""
        with self.lock:
            if time.monotonic() - self.refreshed > self.pause:
                lists = {folder: functools.partial(self._list, folder) for folder in self.folders}
                self._call_in_threads(lists)
                runs = {n: run for found in self.found.values() for n, run in found.items()}
                self._call_in_threads({run: run.refresh for run in runs.values()})
                # an exported model has a config.json too
                self.known = {n: run for n, run in runs.items() if "model_type" not in run.config}
                self.refreshed = time.monotonic()
            return self.known

    def _list(self, folder):
        """Find the runs in a folder. Those that are known already keep their `Run`."""
        before = self.found[folder]
        found = {}
        try:
            check_folder(folder)
            for name, at in runs_in(folder):
                name = printable(name if name and len(self.folders) == 1 else at)
                found[name] = before.get(name) or Run(at, name)
        except Exception as e:  # every storage has errors of its own, and may answer again soon
            found = dict(before) if is_remote(folder) else {}
            found[folder] = Unreadable(folder, folder)
            found[folder].set_status("bad", f"It cannot be read: {first_line(e)}")
        self.found[folder] = found

    def _call_in_threads(self, functions):
        """Call functions, {folder or Run: function}, in threads, and wait for PATIENCE seconds at most. Those whose
        last call has not ended yet are left out."""
        self.calls = {one: call for one, call in self.calls.items() if not call.done()}
        started = []
        for one, function in functions.items():
            if one not in self.calls:
                self.calls[one] = self.pool.submit(function)
                started.append(self.calls[one])
        wait(started, PATIENCE)
        for one, call in self.calls.items():
            if isinstance(one, Run) and not call.done():
                one.set_status("bad", "Its storage does not answer.")


class Unreadable(Run):
    """A folder of runs that cannot be listed, shown in place of its runs."""

    def refresh(self):
        """Nothing: its status is set already."""


def check_folder(folder):
    """Raises UserError where a local folder does not exist."""
    if not is_remote(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder}: there is no such folder; give one that holds runs.")


def printable(name):
    """The name of a file as text that a browser can send back, whatever bytes it has."""
    return os.fsencode(name).decode(errors="backslashreplace")


def runs_in(folder):
    """Yield (name relative to the folder, path) of each run in a folder, up to two levels deep."""
    fs, root = filesystem(folder)
    fs.invalidate_cache()  # fsspec caches the lists of a bucket's objects
    for pattern in ("config.json", "*/config.json", "*/*/config.json"):
        for path in sorted(fs.glob(f"{glob.escape(root)}/{pattern}")):
            name = os.path.relpath(os.path.dirname(path), root).removeprefix(".")
            yield name, os.path.join(folder, name).rstrip("/")


def as_json(content, status=200):
    """A response in JSON."""
    # 413: the rest of a request that is too long is not read, since its body may never end
    headers = {"Connection": "close"} if status == 413 else {}
    return Response(to_json(content), status, headers, media_type="application/json")


def error_as_json(_, error):
    """The response for an error, in OpenAI's format."""
    if not isinstance(error, Refused):
        words = getattr(error, "detail", f"What was asked cannot be read: {error}")
        error = Refused(getattr(error, "status_code", 400), f"{words}.")
    return as_json(error.body, error.status)


class Answers:
    """The handlers of all requests, of the page and of /v1. Those that are not async run in threads."""

    def __init__(self, runs, engine):
        self.runs = runs
        self.engine = engine

    def run(self, name):
        """The Run of a name. Raises `Refused`."""
        run = self.runs.refresh().get(name)
        if run is None:
            raise Refused(404, f"{name!r:.80}: there is no such run.", "model")
        return run

    def list(self, _):
        """The summaries of all runs."""
        return as_json([run.summary for run in self.runs.refresh().values()])

    def rows(self, request):
        """Columns of a run's rows: for each metric `key` its values in every `every`-th row.

        They begin at row `after` where the client's `version` is the current one, so that its rows before are valid;
        else at the first row.
        """
        query = request.query_params
        run = self.run(query.get("run"))
        version, rows = run.version, run.rows
        after = int(query.get("after", 0)) if query.get("version") == version else 0
        rows = rows[after :: int(query.get("every", 1))]
        columns = {key: [row.get(key) for row in rows] for key in query.getlist("key")}
        return as_json(dict(version=version, after=after, columns=columns))

    def samples(self, request):
        """{step: text} of the samples of a run."""
        run = self.run(request.query_params.get("run"))
        content = read_file(f"{run.folder}/samples.txt") or b""
        return as_json(dict(SAMPLES.findall(content.decode(errors="replace"))))

    def flags(self, request):
        """The flags of a run, those of its training and those of its machines."""
        flags, machine = flags_of(self.run(request.query_params.get("run")).config)
        return as_json(dict(flags=flags, machine=machine))

    def known_models(self):
        """{name: a model in OpenAI's format} of all runs that have a checkpoint."""
        found = {}
        for run in self.runs.refresh().values():
            with contextlib.suppress(UserError, OSError):  # a damaged run has no checkpoint to use
                step = run.checkpoint()
                if step is not None:
                    model = dict(object="model", created=0, owned_by=f"step {step}")
                    found[run.name] = dict(id=run.name, **model)
        return found

    def models(self, _):
        """All models, in OpenAI's format."""
        return as_json(dict(object="list", data=[*self.known_models().values()]))

    def model(self, request):
        """One model, in OpenAI's format. Raises `Refused`."""
        name = request.path_params["name"]
        model = self.known_models().get(name)
        if model is None:
            raise self.no_model(name)
        return as_json(model)

    def run_of_model(self, name):
        """The Run that a request names as its model. Raises `Refused`."""
        run = self.runs.refresh().get(name)
        if run is None:
            raise self.no_model(name)
        return run

    def no_model(self, name):
        """The `Refused` for a name that no model has."""
        known = [*self.known_models()]
        others = f"there are {', '.join(known[:MOST_NAMED])}"
        if len(known) > MOST_NAMED:
            others += f" and {len(known) - MOST_NAMED} more, which /v1/models lists"
        others = others if known else "no run here has a checkpoint yet"
        words = f"{name!r:.80}: there is no such model; {others}."
        return Refused(404, words, "model", "model_not_found")

    def chat(self, _):
        """Refuse a request for chat, and say what to use instead. Raises `Refused`."""
        name = next(iter(self.known_models()), "NAME")
        example = to_json(dict(model=name, prompt="Once", max_tokens=40))
        words = (
            "Models that were only pretrained have no chat template; ask for a continuation: POST"
        )
        raise Refused(400, f"{words} /v1/completions with a prompt, such as {example}.", "messages")

    def unknown(self, request):
        """Refuse another path of OpenAI's API, or a known one without /v1. Raises `Refused`."""
        here = "POST /v1/completions, GET /v1/models and GET /v1/models/NAME are"
        words = f"{request.method} {request.url.path:.80} is not answered here; {here}"
        raise Refused(404, f"{words}, so a client's base_url ends in /v1.")

    async def completions(self, http):
        """Answer a request for completions, at once or as a stream. Raises `Refused`."""
        body = await body_of(http)
        check_sender(http)
        asked = read_parameters(body)
        run = await run_in_threadpool(self.run_of_model, asked.model)
        answer = self.engine.answer(asked, run.folder)
        await answer.next()  # until the prompts are accepted
        response = dict(id=f"cmpl-{secrets.token_hex(12)}", object="text_completion")
        response |= dict(created=int(time.time()), model=run.name)
        if asked.stream:
            return StreamingResponse(stream(answer, response), media_type="text/event-stream")
        choices = [piece async for piece in answer.pieces()]
        response["choices"] = sorted(choices, key=lambda choice: choice["index"])
        return as_json(response | dict(usage=answer.usage()))


def flags_of(config):
    """Divide a run's config.json: ({flag: value} of its training, {fact: value} of its machines).

    For the data, the first has the name, the second the folder and the fingerprint.
    """
    machine = {name: value for name, value in config.items() if name in OF_MACHINES}
    flags = shareable(config)
    left_out = OF_MACHINES - {"data"} | {"name"}
    return {name: value for name, value in flags.items() if name not in left_out}, machine


def check_sender(http):
    """Raises `Refused` for a request from a page of another site. Browsers name that site in the header Origin, and do
    not let it send JSON without asking this server."""
    origin = http.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != http.headers.get("host"):
        raise Refused(403, "Another site's page may not ask; leave Origin out, or open the page.")
    if http.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        words = "The body must be sent with the header Content-Type: application/json."
        raise Refused(415, words)


async def body_of(http):
    """The body of a request, of at most MOST_BYTES. Raises `Refused`."""
    read = 0
    body = bytearray()
    if int(http.headers.get("content-length", 0)) <= DRAINED:
        async for part in http.stream():
            read += len(part)
            if read > DRAINED:
                break
            body += part[: MOST_BYTES + 1 - len(body)]
        if len(body) <= MOST_BYTES:
            return bytes(body)
    raise Refused(413, f"The body must have at most {MOST_BYTES:,} bytes.")


async def stream(answer, response):
    """Yield the pieces of an answer as server-sent events, followed by its usage where the request asks for it."""
    options = answer.asked.stream_options
    counts = options is not None and options.include_usage
    if counts:
        response = response | dict(usage=None)
    try:
        async for piece in answer.pieces():
            yield f"data: {to_json(response | dict(choices=[piece]))}\n\n"
        if counts:
            yield f"data: {to_json(response | dict(choices=[], usage=answer.usage()))}\n\n"
        yield "data: [DONE]\n\n"
    except Refused as e:
        yield f"data: {to_json(e.body)}\n\n"
    finally:
        answer.disconnected = True


class Headers:
    """Adds HEADERS to every response of an ASGI application."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def file_route(address, path):
    """The Route of a file of the page. A browser asks at each visit whether the file has changed."""
    return Route(address, lambda _: FileResponse(path, headers={"Cache-Control": "no-cache"}))


def make_app(runs, engine):
    """The ASGI application."""
    here = os.path.dirname(os.path.realpath(__file__))
    (plotly,) = importlib.util.find_spec("plotly").submodule_search_locations
    answers = Answers(runs, engine)
    routes = [
        file_route("/", f"{here}/page.html"),
        file_route("/page.css", f"{here}/page.css"),
        file_route("/page_view.js", f"{here}/page_view.js"),
        file_route("/page.js", f"{here}/page.js"),
        file_route("/plotly.js", f"{plotly}/package_data/plotly.min.js"),
        Route("/api/runs", answers.list),
        Route("/api/rows", answers.rows),
        Route("/api/samples", answers.samples),
        Route("/api/flags", answers.flags),
        Route("/v1/models", answers.models),
        Route("/v1/models/{name:path}", answers.model),
        Route("/v1/completions", answers.completions, methods=["POST"]),
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
    ]
    others = "/v1", "/v1/{path:path}", "/completions", "/chat/completions", "/models"
    routes += [Route(path, answers.unknown, methods=METHODS) for path in others]
    # Only local host names: a page of another site could reach this server under a host name of its own, which that
    # site lets point to 127.0.0.1 (DNS rebinding).
    local_hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    expected = Refused, UserError, HTTPException, ValueError, ClientDisconnect
    errors = dict.fromkeys(expected, error_as_json)
    middleware = [Middleware(Headers), local_hosts]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=errors)


def main(options):
    """Serve the page until a signal ends it. Raises UserError."""
    for folder in options.runs:
        check_folder(folder)
    runs = Runs(options.runs)
    n = len(runs.refresh())
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except OSError as e:
        words = f"--port {options.port}: {e.strerror}; give another, or 0 for a free one."
        raise UserError(words) from None
    port = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port} shows {n} run{'s' * (n != 1)}; Ctrl-C ends it")
    tunnel = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
    print(f"from another machine: {tunnel}, then the same address there", flush=True)
    app = make_app(runs, Engine(options.batch_size))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    # the handlers of `interrupts.install` end the process at once
    server.capture_signals = contextlib.nullcontext
    server.run(sockets=[listener])


if __name__ == "__main__":
    # not interrupts.run: a signal must not wait for the server
    one_sentence(lambda: main(options_given))
