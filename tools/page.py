"""A local page about runs: their curves, whether they are well, text of their newest checkpoints, and completions.

python tools/page.py runs gs://bucket/runs
python tools/page.py /home/another/runs --port 9000

It reads and never writes in the runs, which may be those of others. /v1/completions answers in OpenAI's format.
"""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.realpath(__file__ + "/../..")
    from runtime import interrupts

    interrupts.begin()

import contextlib
import glob
import importlib.util
import math
import secrets
import socket
import statistics
import threading
import time
from dataclasses import dataclass

import utils
from runtime import platforms
from runtime.files import ask, filesystem, is_remote, read_file, read_json, to_json
from runtime.messages import UserError, one_sentence
from runtime.parser import flag, place
from tools import common
from training import steps
from training.meter import spent_in
from training.runlog import EXPERT_SHARE, SAMPLES, duration, row_of

PACKAGES = "starlette", "uvicorn", "plotly"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Show runs on a local page, and answer /v1/completions."""

    runs: tuple[str, ...] = place()
    """Run directories, or folders of them; gs:// and s3:// addresses too."""
    port: int = flag(8321, least=0, most=65535)
    """Port of 127.0.0.1 to listen on; 0: any that is free."""
    batch_size: int = flag(32, least=1)
    """Continuations that are drawn at once; each has a cache of the model's whole T."""


def check_packages():
    """Raises UserError where one of PACKAGES is missing."""
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        command = f"{sys.executable} -m pip install {' '.join(PACKAGES)}"
        raise UserError(f"{', '.join(missing)}: not installed; {command} installs what is needed.")


if __name__ == "__main__":
    if "JAX_PLATFORMS" not in os.environ:  # the accelerator may belong to a run
        platforms.choose_cpu()
    options_given = one_sentence(lambda: utils.read_flags(Page, sys.argv[1:], "tools/page.py"))
    one_sentence(check_packages)

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from tools.completions import MOST_BYTES, Engine, Refused, newest_step, read_request

LOSS = "loss/train_cross_entropy_loss"

# --- Runs ---------------------------------------------------------------------------------------------------------


class Run:
    """A run directory as it grows. version: changes where rows that were read before have changed."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.config, self.plan, self.trouble = {}, {}, ""
        self._forget()

    def _forget(self):
        self.version = secrets.token_hex(4)
        self.rows = []
        self.end = 0  # bytes of metrics.jsonl that were read, whole lines
        self.last = b""  # the last of these lines

    def refresh(self):
        """Read what is new."""
        try:
            self.config = read_json(self.folder, "config.json")
            self.plan = read_json(self.folder, "plan.json")
            self._read_rows(f"{self.folder}/metrics.jsonl")
            self.trouble = ""
        except (UserError, OSError) as e:
            self.trouble = str(e)

    def _read_rows(self, path):
        try:
            size = ask(path, "info")["size"]
        except FileNotFoundError:
            size = 0
        begin = self.end - len(self.last)
        content = ask(path, "cat_file", start=begin, end=size) if size > begin else b""
        if not content.startswith(
            self.last
        ):  # the run resumed or rolled back: it wrote the file anew
            self._forget()
            begin = 0
            content = ask(path, "cat_file", start=0, end=size) if size else b""
        whole = content[: content.rfind(b"\n") + 1]  # the last line may be torn
        new = whole[len(self.last) :].splitlines(keepends=True)
        self.rows += filter(None, map(row_of, new))
        self.last = new[-1] if new else self.last
        self.end = begin + len(whole)

    def column(self, key, rows):
        """The values of a metric, None where a row has none; also of `tokens` and `hours` since the first start."""
        if key == "tokens":
            return [row["step"] * self.tokens_per_step() for row in rows]
        if key == "hours":
            return [sum(spent_in(row).values()) / 3600 for row in rows]
        return [row.get(key) for row in rows]

    def tokens_per_step(self):
        c = common.stored_config(self.config)
        return math.prod(steps.batch_shape(c))

    def about(self):
        """What the page lists of it."""
        state, words = self.health(time.time())
        newest = self.rows[-1] if self.rows else {}
        about = dict(
            name=self.name, version=self.version, n=len(self.rows), state=state, words=words
        )
        about |= dict(keys=sorted({*newest, *self._evaluated()}), spent=spent_in(newest))
        speeds = [
            row["tokens_per_second"] for row in self.rows[-100:] if "tokens_per_second" in row
        ]
        about["planned"] = self.plan.get("seconds", {}).get("step")
        if speeds:
            about["speed"] = statistics.median(speeds)
            about["measured"] = self.tokens_per_step() / about["speed"]
        return about

    def _evaluated(self):
        return next((row for row in reversed(self.rows[-10_000:]) if "loss/val_loss" in row), {})

    # --- Is it well?

    def health(self, now):
        """(bad, idle, done or well; a sentence that says why)."""
        state, words = self._health(now)
        resumed = self.rows[-1].get("resumed", 0) if self.rows else 0
        if resumed:
            words += f", resumed {resumed:.0f} times" if resumed > 1 else ", resumed once"
        return state, f"{words}."

    def _health(self, now):
        if self.trouble:
            return "bad", f"It cannot be read: {self.trouble.rstrip('.')}"
        if not self.rows:
            return "idle", "No step is done yet: it compiles, or ended before its first step"
        row, last = self.rows[-1], self.config.get("training_steps", math.inf)
        step = row["step"]
        at = f"step {step:,} of {last:,}"
        if not math.isfinite(row["loss/train_loss"]):
            return "bad", f"The loss of step {step:,} is not finite"
        recent = self.rows[-100:]
        skipped = row.get("bad_steps", 0) - recent[0].get("bad_steps", 0)
        if skipped > 0:
            words = f"{skipped:.0f} of the last {len(recent)} steps were skipped"
            return "bad", f"{words}: their loss or gradient was not finite"
        shares = [value for key, value in row.items() if key.startswith(EXPERT_SHARE)]
        starved = sum(share < 0.1 / len(shares) for share in shares)
        if 2 * starved > len(shares):
            return (
                "bad",
                f"{starved} of {len(shares)} experts get less than a tenth of an even share",
            )
        rise = rising([row[LOSS] for row in self.rows if math.isfinite(row.get(LOSS, math.nan))])
        if rise:
            return "bad", f"The training loss rises: {rise} ({at})"
        if step >= last:
            return "done", f"Finished at {at}, training loss {row['loss/train_loss']:.3f}"
        silent = now - row.get("time", now)
        usual = usual_pause(recent)
        if silent > max(60, 5 * usual):
            words = f"No step for {duration(silent)}, usually at most {duration(usual + 1)}"
            return "idle", f"{words}: it was stopped or hangs at {at}"
        return "well", f"It trains: {at}, training loss {row['loss/train_loss']:.3f}"


def rising(losses):
    """How the mean of the newest losses exceeds that of as many before, in words; "" where it does not by more than
    three standard errors and a hundredth."""
    n = max(10, len(losses) // 10)
    if len(losses) < 3 * n:
        return ""
    before, after = losses[-2 * n : -n], losses[-n:]
    rise = statistics.fmean(after) - statistics.fmean(before)
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / n)
    if rise <= max(3 * error, 0.01 * statistics.fmean(before)):
        return ""
    return f"by {rise:.3f} over the last {n} steps"


def usual_pause(rows):
    """The longest time between two steps of one process, seconds."""
    pairs = [(a, b) for a, b in zip(rows, rows[1:]) if a.get("resumed") == b.get("resumed")]
    return max((b["time"] - a["time"] for a, b in pairs if "time" in a), default=0.0)


class Runs:
    """The runs in folders and addresses, looked at when somebody asks."""

    def __init__(self, folders):
        self.folders = [folder.rstrip("/") for folder in folders]
        self.pause = 15 if any(map(is_remote, folders)) else 1  # seconds between two looks
        self.looked = -math.inf
        self.known = {}
        self.lock = threading.Lock()

    def look(self):
        """{name: Run}, up to date."""
        with self.lock:
            if time.monotonic() - self.looked > self.pause:
                found = dict(name for folder in self.folders for name in self._names(folder))
                self.known = {
                    name: self.known.get(name) or Run(folder, name)
                    for name, folder in found.items()
                }
                for run in self.known.values():
                    run.refresh()
                self.looked = time.monotonic()
            # an exported model has a config.json too
            return {
                name: run
                for name, run in self.known.items()
                if run.trouble or "n_device_axis" in run.config
            }

    def _names(self, folder):
        """(name, folder) of each run in a folder. Raises UserError where that is not there."""
        if not is_remote(folder) and not os.path.isdir(folder):
            raise UserError(f"{folder}: there is no such folder; give one of runs, such as runs.")
        fs, there = filesystem(folder)
        fs.invalidate_cache()  # its lists of a bucket's objects
        for pattern in ("config.json", "*/config.json", "*/*/config.json"):
            for path in sorted(fs.glob(f"{glob.escape(there)}/{pattern}")):
                inside = os.path.dirname(os.path.relpath(path, there))
                at = os.path.join(folder, inside).rstrip("/")
                alone = len(self.folders) == 1 and inside
                yield inside if alone else at, at


# --- The server ---------------------------------------------------------------------------------------------------


def as_json(content, status=200):
    return Response(to_json(content), status, media_type="application/json")


def served_error(_, error):
    """An error as OpenAI's format has it."""
    if not isinstance(error, Refused):
        error = Refused(error.status_code, f"{error.detail}.")
    return as_json(error.body, error.status)


class Server:
    """What the page and the clients of /v1 ask for. The functions that are not async run in threads."""

    def __init__(self, runs, engine):
        self.runs, self.engine = runs, engine

    def run(self, name):
        """The Run of a name. Raises `Refused`."""
        known = self.runs.look()
        if name not in known:
            raise Refused(404, f"{name!r:.80}: there is no such run.", "model", "model_not_found")
        return known[name]

    def list(self, _):
        return as_json([run.about() for run in self.runs.look().values()])

    def rows(self, request):
        """The columns `key` of each `every`-th row of a run, from row `after` on if its `version` is the same."""
        asked = request.query_params
        run = self.run(asked.get("run"))
        same = asked.get("version") == run.version
        after = int(asked.get("after", 0)) if same else 0
        rows, version = run.rows[after :: int(asked.get("every", 1))], run.version
        columns = {key: run.column(key, rows) for key in asked.getlist("key")}
        return as_json(dict(version=version, after=after, n=len(run.rows), columns=columns))

    def samples(self, request):
        content = (
            read_file(f"{self.run(request.query_params.get('run')).folder}/samples.txt") or b""
        )
        return as_json(dict(SAMPLES.findall(content.decode(errors="replace"))))

    def flags(self, request):
        """{flag: its value in each of the runs}, of those that differ."""
        configs = [self.run(name).config for name in request.query_params.getlist("run")]
        names = sorted({name for config in configs for name in config})
        values = {name: [config.get(name) for config in configs] for name in names}
        return as_json({name: v for name, v in values.items() if any(x != v[0] for x in v)})

    # --- OpenAI's

    def models(self, request):
        """All runs that have a checkpoint, or the one that is named."""
        name = request.path_params.get("name")
        found = []
        for run in [self.run(name)] if name else self.runs.look().values():
            with contextlib.suppress(UserError):
                step = newest_step(run.folder)
                found.append(dict(id=run.name, object="model", created=0, owned_by=f"step {step}"))
        if name and not found:
            raise Refused(404, f"{name}: has no checkpoint yet.", "model", "model_not_found")
        return as_json(found[0] if name else dict(object="list", data=found))

    async def completions(self, http):
        body = b""
        async for part in http.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise Refused(413, f"The body has more than {MOST_BYTES:,} bytes.")
        request = read_request(body)
        request.folder = (await run_in_threadpool(self.run, request.model)).folder
        self.engine.ask(request)
        await request.next_event()
        about = dict(id=f"cmpl-{secrets.token_hex(12)}", object="text_completion")
        about |= dict(created=int(time.time()), model=request.model)
        if request.stream:
            return StreamingResponse(stream(request, about), media_type="text/event-stream")
        choices, usage = await request.whole()
        return as_json(about | dict(choices=choices, usage=usage))


async def stream(request, about):
    """The pieces of an answer as server-sent events."""
    try:
        async for piece in request.pieces():
            yield f"data: {to_json(about | dict(choices=[piece]))}\n\n"
        yield "data: [DONE]\n\n"
    except Refused as e:
        yield f"data: {to_json(e.body)}\n\n"
    finally:
        request.left = True


def make_app(runs, engine):
    """The page and what it asks for."""
    here = os.path.dirname(os.path.realpath(__file__))
    (plotly,) = importlib.util.find_spec("plotly").submodule_search_locations
    script = f"{plotly}/package_data/plotly.min.js"
    server = Server(runs, engine)
    routes = [
        Route("/", lambda _: FileResponse(f"{here}/page.html")),
        Route("/plotly.js", lambda _: FileResponse(script)),
        Route("/api/runs", server.list),
        Route("/api/rows", server.rows),
        Route("/api/samples", server.samples),
        Route("/api/flags", server.flags),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    # another site's page that a browser shows may not ask under a name of its own
    here_alone = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    errors = {Refused: served_error, HTTPException: served_error}
    return Starlette(routes=routes, middleware=[here_alone], exception_handlers=errors)


def main(options):
    runs = Runs(options.runs)
    n = len(runs.look())
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except OSError as e:
        raise UserError(
            f"--port {options.port}: {os.strerror(e.errno).lower()}; give another port, or 0 for a free one."
        ) from None
    port = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port} shows {n} runs; Ctrl-C ends it")
    there = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
    print(f"from another machine: {there}, then the same address there", flush=True)
    app = make_app(runs, Engine(options.batch_size))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    server.capture_signals = contextlib.nullcontext  # those of `interrupts.begin` end it at once
    server.run(sockets=[listener])


if __name__ == "__main__":
    one_sentence(lambda: main(options_given))
