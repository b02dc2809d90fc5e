"""The processes of a run: they meet, agree on what they were given and when to stop, and say where they hang."""

import contextlib
import ctypes
import faulthandler
import hashlib
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import utils
from training import interrupts, locks
from utils import UserError, say

LOST = "another process of this run was lost; its log says why, and the same command on all goes on from a checkpoint."


def is_loss(error):
    """Whether an error of jax's tells of another process that does not answer any more."""
    words = (
        "Gloo",
        "NCCL",
        "UNAVAILABLE",
        "Connection closed by peer",
        "Connection reset",
        "heartbeat",
        "coordination",
    )
    return any(word in str(error) for word in words)


def end_for_loss(*_):
    interrupts.end(75, f"error: {LOST}")


def end_when_one_is_lost():
    """Let jax end this process with a sentence when another one is lost, not from C++ with a stack. To be called before
    `jax.distributed.initialize`, which leaves no choice."""
    with contextlib.suppress(ImportError, AttributeError):  # another jax, which ends in its own way
        from jax._src.lib import _jax as lib

        connect = lib.get_distributed_runtime_client

        def connect_and_watch(*args, **kwargs):
            with contextlib.suppress(AttributeError, OSError):
                # jax 0.10 cannot call `end_for_loss` and has C++ end the process, which calls this
                connect_and_watch.kept = ctypes.CFUNCTYPE(None)(end_for_loss)
                ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(connect_and_watch.kept)
            return connect(*args, missed_heartbeat_callback=end_for_loss, **kwargs)

        if "missed_heartbeat_callback" in connect.__doc__:
            lib.get_distributed_runtime_client = connect_and_watch


def write_own_cache_entries():
    """Let each process write what it compiled for CPUs into the compilation cache. jax has process 0 do so for all, but
    the key of an entry names the devices as a process sees them, which on CPUs are others for each process."""
    with contextlib.suppress(ImportError, AttributeError):  # another jax
        from jax._src import compilation_cache, compiler

        write = compiler._cache_write

        def write_own(
            key, seconds, name, backend, executable, *callbacks
        ):  # jax 0.12 has no callbacks there
            if jax.process_index() == 0 or backend.platform != "cpu":
                write(key, seconds, name, backend, executable, *callbacks)
            elif (
                not any(callbacks)
                and seconds >= jax.config.jax_persistent_cache_min_compile_time_secs
            ):
                compilation_cache.put_executable_and_time(
                    key, name, executable, backend, int(seconds)
                )

        compiler._cache_write = write_own


def join_processes(cfg):
    """Meet the other processes of the run, if there are any: at --coordinator, else where jax finds that a TPU pod,
    Slurm or Kubernetes tells. Raises UserError where the devices cannot all take part."""
    r = cfg.run
    if r.num_processes == 1:
        return
    end_when_one_is_lost()
    write_own_cache_entries()
    # That service would swallow SIGTERM from here on; Interrupt makes a signal known to all processes.
    jax.config.update("jax_enable_preemption_service", False)
    where = {}
    if r.coordinator:
        host, port = r.coordinator.rsplit(":", 1)
        # by itself jax listens on [::], which a machine without IPv6 does not have
        where = dict(
            coordinator_address=r.coordinator,
            num_processes=r.num_processes,
            process_id=r.process_id,
            coordinator_bind_address=f"{'[::]' if host[0] == '[' else '0.0.0.0'}:{port}",
        )

    def too_late():
        what = "the other processes did not all come"
        if r.coordinator:
            what = (
                f"not all --num_processes {r.num_processes} came to --coordinator {r.coordinator}"
            )
            try:
                socket.create_connection((host.strip("[]"), int(port)), 5).close()
            except OSError as e:
                what = f"--coordinator {r.coordinator} could not be reached ({e.strerror or e})"
        print(
            f"error: --connect_timeout {r.connect_timeout}: {what} in so many seconds; is the same command running "
            f"on every host, each with its own --process_id?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # not 2: it may mend itself. jax is deep in C++ and would end in a stack trace

    late = threading.Timer(r.connect_timeout, too_late)
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=r.connect_timeout + 60,
            heartbeat_timeout_seconds=r.peer_timeout,
            shutdown_timeout_seconds=3600,  # process 0 may still upload its log
        )
    except ValueError:
        if r.coordinator:
            raise
        return  # jax knows no cluster that this process is part of
    except RuntimeError as e:
        raise UserError(
            f"--num_processes: this process cannot join its cluster ({e}); give 1 to train alone, or "
            f"--coordinator."
        ) from None
    finally:
        late.cancel()
    if r.n_devices not in (0, jax.device_count()):
        raise UserError(
            f"--n_devices {r.n_devices}: {jax.process_count()} processes train on all devices that they "
            f"have, {jax.device_count()}."
        )


def all_of(here):
    """Whether `here` is true on every process; waits for all of them."""
    return (
        here
        if jax.process_count() == 1
        else bool(multihost_utils.process_allgather(np.array(here)).all())
    )


def together(error):
    """Raise `error`, in which something ended on this process or None, if there is one: on the others a UserError."""
    if not all_of(error is None):
        raise error or UserError(ANOTHER)


ANOTHER = "another process cannot go on; its log says why."


@contextlib.contextmanager
def alone_in_folder(run):
    """Hold the run directory for the processes of this run, by process 0, before any of them writes there. Raises
    UserError on all of them where another run holds it or it cannot be written."""
    with contextlib.ExitStack() as held:
        error = None
        try:
            if jax.process_index() == 0:
                held.enter_context(
                    locks.alone_in(run.folder, f"--output_dir {run.output_dir}", "--name")
                )
        except UserError as e:
            error = e
        together(error)
        yield


def check_agreement(cfg, data):
    """Raise UserError on all processes unless they have the same flags and shards (`data`: fingerprint of these), and
    each sees what process 0 writes in output_dir: a checkpoint, of which each writes its part, would never be
    complete."""
    if jax.process_count() == 1:
        return
    flags = {
        f"--{flag}": value
        for flag, value in utils.flatten(cfg).items()
        if flag not in utils.flags_with("per_process")
    }
    same_everywhere(flags | {"--bucket_name": data})
    path = os.path.join(cfg.run.folder, "shared")
    token = str(multihost_utils.broadcast_one_to_all(np.uint32(time.time_ns() % 2**32)))
    if jax.process_index() == 0:
        utils.write_file(path, token)
    all_of(True)
    same_everywhere({"--output_dir": (utils.read_file(path) or b"").decode() == token})


def same_everywhere(things):
    """Raise UserError on all processes if the {name: value} `things` are not the same on each of them."""
    digests = [hashlib.sha256(repr(value).encode()).digest()[:4] for value in things.values()]
    every = multihost_utils.process_allgather(
        np.array([np.frombuffer(d, np.uint32)[0] for d in digests])
    )
    for process, row in enumerate(every):
        differ = [name for name, a, b in zip(things, row, every[0]) if a != b]
        if differ:
            raise UserError(
                f"{', '.join(differ)}: not the same on process {process} as on process 0; give all the "
                f"same flags, with a --bucket_name and --output_dir that each can see."
            )


class Interrupt:
    """SIGTERM and SIGINT: the first is noted until the step in progress is done and saved. A second one says what a
    third would lose, which ends the process at once. lost(): that, in words."""

    FAILED = 99  # above every signal

    def __init__(self, lost):
        mesh = Mesh(np.array(jax.devices()), "all")
        self.spread, self.earlier = NamedSharding(mesh, P("all")), 0
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self.lost, self.signal, self.received = lost, 0, 0

    def agreed(self, failed):
        """The signal to stop for, FAILED where a process has `failed`, or 0. Several processes must stop at the same
        step and a signal may reach only one, so they ask each other on the devices, after every step, and read the
        answer a step later: nobody waits."""
        mine = self.FAILED if failed else self.signal
        if jax.process_count() == 1:
            return mine
        mine = jax.make_array_from_callback(
            (jax.device_count(),), self.spread, lambda _: np.array([mine])
        )
        earlier, self.earlier = self.earlier, self.largest(mine)
        return int(earlier)

    def __enter__(self):
        self.over = interrupts.watch(self._note)
        return self

    def _note(self, number):
        name, self.received = signal.Signals(number).name, self.received + 1
        if self.received == 1:
            self.signal = number
            say(f"{name}: stopping after this step, with a checkpoint")
        elif self.received == 2:
            say(
                f"{name}: what was begun is still being finished; a third signal ends it at once, losing {self.lost()}"
            )
        else:
            interrupts.end(128 + number, f"{name}: ended at once, losing {self.lost()}")

    def __exit__(self, *_):
        self.over()


class Watchdog:
    """A thread that writes the stacks of all threads when a phase of the loop takes stuck_factor times its median so
    far, and ends the process after stuck_limit. What hangs one process hangs the others too, so all of them tell."""

    def __init__(self, cfg):
        self.factor, self.limit, self.took, self.over = (
            cfg.run.stuck_factor,
            cfg.run.stuck_limit,
            {},
            threading.Event(),
        )
        self.now = None  # (phase, step, when it began)
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, phase, step):
        """The phase before has ended, this one begins."""
        if self.now:
            self.took.setdefault(self.now[0], deque(maxlen=99)).append(
                time.monotonic() - self.now[2]
            )
        self.now = (phase, step, time.monotonic())

    def _watch(self):
        told = None
        while not self.over.wait(1):
            if not (now := self.now):
                continue
            phase, step, began = now
            took, since = list(self.took.get(phase, [])), time.monotonic() - began
            # less than 5 s, and medians of one or two, may be anything
            if (
                now is not told
                and len(took) > 2
                and since > max(5, self.factor * statistics.median(took))
            ):
                told = now
                say(
                    f"watchdog: {phase} of step {step} has taken {since:.0f} s, usually {statistics.median(took):.2f}"
                )
                faulthandler.dump_traceback(sys.stdout)
            if since > self.limit:
                # 75: "temporary failure" in sysexits.h, to be started again
                words = f"watchdog: {phase} of step {step} has taken more than --stuck_limit {self.limit} s; ending"
                interrupts.end(75, words)
