"""Encode batches of documents on several processes or on a Ray cluster, with the results in order."""

import logging
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process, util
from pathlib import Path

from data.encoding import encode_batch
from runtime import interrupts
from runtime.messages import UserError

ROOT = Path(__file__).resolve().parents[1]
# What a worker takes at once, whichever is reached first: about 0.2 s of work.
BATCH_BYTES = 1_000_000
BATCH_DOCUMENTS = 1000
# Bytes in flight per worker: enough that none waits, and a bound on memory.
IN_FLIGHT = 4 * BATCH_BYTES


def set_up_worker(*arguments):
    """Keep in the worker process what is the same for all its batches, and end with the program if that is killed."""
    global encode_arguments
    encode_arguments = arguments
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def encode_in_worker(batch):
    return encode_batch(batch, *encode_arguments)


@contextmanager
def processes(workers, *arguments):
    """(function that submits a batch, function that waits for its result), on this machine's processes.

    Raises UserError where a worker is killed. Not a multiprocessing.Pool: that would wait forever then.
    """
    killed = UserError(
        f"--workers {workers}: one was killed, as happens when memory is short; try fewer."
    )
    most = 0  # workers that were alive at once

    def submit(batch):
        nonlocal most
        with interrupts.ending:
            # processes that start here ignore Ctrl-C, which a terminal sends to them too
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            future = executor.submit(encode_in_worker, batch)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            most = max(most, len(active_children()))
        return future

    def kill():
        for worker in active_children():
            worker.kill()
        # removes semaphores, which Python would report as leaked; does not wait for the workers
        util._run_finalizers(0)

    def result(future):
        while True:
            try:
                return future.result(timeout=5)
            except TimeoutError:
                # one was killed in the middle of a message, for the rest of which the executor would wait
                if len(active_children()) < most:
                    interrupts.end(2, f"error: {killed}")

    with interrupts.ending:  # else a signal in between would leave semaphores
        executor = ProcessPoolExecutor(workers, get_context("spawn"), set_up_worker, arguments)
        interrupts.given_back.append(kill)
    try:
        yield submit, result
    except BrokenProcessPool:
        time.sleep(0.5)  # a signal that ended them all ends this process too, and says so
        raise killed from None
    finally:
        executor.shutdown(cancel_futures=True)  # the semaphores last longer, and so does `kill`


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
        n_bytes = 0
        for batch, position in batches:
            size = sum(document.size for document in batch)
            while underway and (
                n_bytes + size > IN_FLIGHT * workers or len(underway) >= 4 * workers
            ):
                future, its_position, its_size = underway.popleft()
                n_bytes -= its_size
                yield result(future), its_position
            underway.append((submit(batch), position, size))
            n_bytes += size
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
