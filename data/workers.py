"""Encode batches of documents in several processes or on a Ray cluster, and return the results in order."""

import functools
import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from pathlib import Path

from runtime import interrupts
from runtime.messages import UserError

ROOT = Path(__file__).resolve().parents[1]
# Size of a batch, whichever limit is reached first: about 0.2 s of work for a worker.
BATCH_BYTES = 1_000_000
BATCH_DOCUMENTS = 1000
# Bytes of batches that are submitted for each worker: enough that none waits, and a bound on memory.
IN_FLIGHT = 4 * BATCH_BYTES


def run_worker(pipe, encode):
    """The main of a worker process: encode the batches that arrive through the pipe, until the program closes it or is
    killed."""
    with suppress(EOFError, OSError):
        while True:
            batch = pipe.recv()
            try:
                answer = [encode(document) for document in batch]
            except UserError as e:
                answer = e
            pipe.send(answer)


@contextmanager
def processes(workers, encode):
    """A pool of processes on this machine: (function that submits a batch, function that waits for its result).

    Each process belongs to a thread, which sends it a batch and waits for the answer. Raises UserError where a process
    is killed.
    """
    pipes = []
    own = threading.local()  # .pipe: to the process of this thread

    def start_process():
        context = get_context("spawn")
        own.pipe, its_end = context.Pipe()
        pipes.append(own.pipe)
        # now, since its first start unblocks the signals that are blocked below
        resource_tracker.ensure_running()
        with interrupts.ending:  # a signal in the middle would leave a process half started
            # A terminal sends Ctrl-C to all processes. Workers inherit this mask and ignore it: the main process ends
            # them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            context.Process(target=run_worker, args=(its_end, encode), daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its_end.close()

    def encode_there(batch):
        own.pipe.send(batch)
        answer = own.pipe.recv()
        if isinstance(answer, UserError):
            raise answer
        return answer

    threads = ThreadPoolExecutor(workers, initializer=start_process)
    try:
        yield functools.partial(threads.submit, encode_there), Future.result
    except (EOFError, ConnectionError):
        # a signal that ended all processes ends this one too, meanwhile, with a message of its own
        time.sleep(0.5)
        raise UserError(
            "one was killed, as when memory is short; try fewer", flag="workers", value=workers
        ) from None
    finally:
        for pipe in pipes:
            pipe.close()
        threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def ray_actors(workers, encode):
    """The same as `processes` on a Ray cluster, or on one that Ray starts here. Ray repeats the work of lost
    workers."""
    try:
        import ray
    except ImportError:
        message = "--ray: the package ray is not installed; pip install ray does that."
        raise UserError(message) from None

    class Encoder:
        def encode(self, batch):
            return [encode(document) for document in batch]

    # the cluster's other machines have this repository, and tiktoken's ranks, at the same paths as this one
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        environment["TIKTOKEN_CACHE_DIR"] = os.environ["TIKTOKEN_CACHE_DIR"]
    before = signal.getsignal(signal.SIGTERM)
    quiet = dict(log_to_driver=False, logging_level=logging.ERROR)
    ray.init(runtime_env={"env_vars": environment}, **quiet)
    signal.signal(signal.SIGTERM, before)  # Ray replaced the handler
    interrupts.releases.append(ray.shutdown)
    try:
        options = dict(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
        actor = ray.remote(**options)(Encoder)
        actors = itertools.cycle([actor.remote() for _ in range(workers)])

        def result(reference):
            try:
                return ray.get(reference)
            except ray.exceptions.RayTaskError as e:
                raise e.cause from None

        yield lambda batch: next(actors).encode.remote(batch), result
    finally:
        ray.shutdown()
        interrupts.releases.remove(ray.shutdown)


def encode_batches(batches, workers, start, encode):
    """Yield ([encode(document) for the documents of a batch], position) for each (batch, position), in order.

    start: None to encode in this process, or `processes` or `ray_actors`.
    """
    if not start:
        for batch, position in batches:
            yield [encode(document) for document in batch], position
        return
    with start(workers, encode) as (submit, result):
        underway = deque()  # (future, position, bytes)
        for batch, position in batches:
            size = sum(document.size for document in batch)
            while underway and size + sum(n for *_, n in underway) > IN_FLIGHT * workers:
                future, its_position, _ = underway.popleft()
                yield result(future), its_position
            underway.append((submit(batch), position, size))
        for future, its_position, _ in underway:
            yield result(future), its_position


def make_batches(source, position):
    """Yield (batch, position after it): lists of the documents of the source from `position` on."""
    batch = []
    size = 0
    for document in source.read(position):
        batch.append(document)
        size += document.size
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch, source.position
            batch = []
            size = 0
    if batch:
        yield batch, source.position
