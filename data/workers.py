"""Encode batches of documents on several processes or on a Ray cluster, with the results in order."""

import logging
import os
import signal
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from queue import SimpleQueue

from data.encoding import encode_batch
from runtime import interrupts
from runtime.messages import UserError

ROOT = Path(__file__).resolve().parents[1]
# What a worker takes at once, whichever is reached first: about 0.2 s of work.
BATCH_BYTES = 1_000_000
BATCH_DOCUMENTS = 1000
# Bytes in flight per worker: enough that none waits, and a bound on memory.
IN_FLIGHT = 4 * BATCH_BYTES


def work(pipe, arguments):
    """What a worker process does: encode what arrives through the pipe, until the program closes it or is killed."""
    batches = SimpleQueue()

    def receive():  # in a thread, so that the program never waits until a batch is taken
        try:
            while True:
                batches.put(pipe.recv())
        except (EOFError, OSError):  # the latter where the program was ended within a batch
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            answer = encode_batch(batches.get(), *arguments)
        except UserError as e:
            answer = e
        with suppress(ConnectionError):  # `receive` ends the process then
            pipe.send(answer)


def start_process(arguments):
    """The program's end of the pipe of a new worker."""
    context = get_context("spawn")
    pipe, its_end = context.Pipe()
    resource_tracker.ensure_running()  # whose first start unblocks signals
    with interrupts.ending:  # a signal in between would leave half a process
        # processes that start here ignore Ctrl-C, which a terminal sends to them too
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        context.Process(target=work, args=(its_end, arguments), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    its_end.close()
    return pipe


@contextmanager
def processes(workers, *arguments):
    """(function that submits a batch, function that waits for its result), on this machine's processes, in turns.

    Raises UserError where a worker is killed.
    """
    pipes, n = [], 0

    def submit(batch):
        nonlocal n
        if n < workers:
            pipes.append(start_process(arguments))
        pipe = pipes[n % workers]
        n += 1
        pipe.send(batch)
        return pipe

    def result(pipe):
        answer = pipe.recv()
        if isinstance(answer, UserError):
            raise answer
        return answer

    try:
        yield submit, result
    except (EOFError, ConnectionError):
        time.sleep(0.5)  # a signal that ended them all ends this process too, and says so
        raise UserError(
            f"--workers {workers}: one was killed, as happens when memory is short; try fewer."
        ) from None
    finally:
        for pipe in pipes:
            pipe.close()


@contextmanager
def ray_actors(workers, *arguments):
    """As `processes`, on a Ray cluster or on one that Ray starts here. Ray repeats what a lost worker had to do."""
    try:
        import ray
    except ImportError:
        message = "--ray: the package ray is not installed; pip install ray does that."
        raise UserError(message) from None

    class Encoder:
        def encode(self, batch):
            return encode_batch(batch, *arguments)

    start_ray(ray)
    interrupts.given_back.append(ray.shutdown)
    try:
        options = dict(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
        actor = ray.remote(**options)(Encoder)
        actors = deque(actor.remote() for _ in range(workers))

        def submit(batch):
            actors.rotate()
            return actors[0].encode.remote(batch)

        def result(reference):
            try:
                return ray.get(reference)
            except ray.exceptions.RayTaskError as e:
                raise e.cause from None

        yield submit, result
    finally:
        ray.shutdown()
        interrupts.given_back.remove(ray.shutdown)


def start_ray(ray):
    """Connect to the cluster of RAY_ADDRESS, or start one here."""
    # the cluster's other machines have this repository, and tiktoken's ranks, at the paths that they have here
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        environment["TIKTOKEN_CACHE_DIR"] = os.environ["TIKTOKEN_CACHE_DIR"]
    before = signal.getsignal(signal.SIGTERM)
    settings = dict(log_to_driver=False, logging_level=logging.ERROR)
    ray.init(runtime_env={"env_vars": environment}, **settings)
    signal.signal(signal.SIGTERM, before)  # Ray took it


def encode(batches, workers, start, *arguments):
    """Yield (`encode_batch` of a batch, position after it) for each (batch, position), in order for any `workers`.

    start: None for this process, or `processes` or `ray_actors`; arguments: those of `encode_batch`. IN_FLIGHT bytes
    per worker are underway at most, or one batch where a document alone has more.
    """
    if not start:
        for batch, position in batches:
            yield encode_batch(batch, *arguments), position
        return
    with start(workers, *arguments) as (submit, result):
        underway = deque()  # (future, position, bytes)
        for batch, position in batches:
            size = sum(document.size for document in batch)
            while underway and size + sum(n for *_, n in underway) > IN_FLIGHT * workers:
                future, its_position, _ = underway.popleft()
                yield result(future), its_position
            underway.append((submit(batch), position, size))
        for future, its_position, _ in underway:
            yield result(future), its_position


def cut(source, position):
    """Yield (batch, position after it): the documents of the source from `position` on, in batches."""
    batch, size = [], 0
    for document in source.read(position):
        batch.append(document)
        size += document.size
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch, source.position
            batch, size = [], 0
    if batch:
        yield batch, source.position
