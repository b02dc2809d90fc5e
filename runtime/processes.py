"""The processes of a run: how they meet, agree on their flags and on when to stop, and report where they hang."""

import contextlib
import faulthandler
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
import traceback
import zlib
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import interrupts, locks, platforms
from runtime.files import read_file, write_file
from runtime.messages import UserError, first_line, flush_output, say, say_aside

# How errors of jax's tell that another process does not answer any more.
LOSS = re.compile(
    "Gloo|NCCL|UNAVAILABLE|Connection closed by peer|Connection reset|heartbeat|coordination"
)
# tools/cluster/on_host.sh: start knows by "its log says why" that another host's does
ANOTHER = "another process failed; its log says why."
LOST = "another process of this run was lost; its log says why"
LOOPBACK = "localhost", "127.0.0.1", "[::1]"  # which no other machine reaches
STUCK = 10  # times its median from which a part of the loop is taken for stuck


def end_at_once(error):
    """Print the error and end this process, one of several. At a usual exit jax would wait for the others, which wait
    for this one, and end in a stack trace."""
    status = 1
    if isinstance(error, UserError):
        status = error.status
        words = f"error: {error}"
    else:
        if LOSS.search(str(error)):
            advice = "and the same command on all resumes from a checkpoint."
            interrupts.end(75, f"error: {LOST}, {advice}")
        words = "".join(traceback.format_exception(error))
    flush_output()
    say_aside(words)
    if jax.process_index() == 0:
        time.sleep(2)  # when it ends the others end too; they may be about to print the same error
    os._exit(status)


def join_processes(cfg):
    """Meet the other processes of the run, if there are any, and find the devices of all."""
    run = cfg.run
    if run.num_processes != 1:
        meet(run)
    several = jax.distributed.is_initialized()
    try:
        platforms.find_devices()
    except UserError as e:
        if several:
            # at a usual exit jax would wait for the others, and they for the devices of this one
            interrupts.end(e.status, f"error: {e}")
        raise
    if several and run.n_devices not in (0, jax.device_count()):
        raise UserError(
            f"--n_devices {run.n_devices}: several processes train on all their devices, {jax.device_count()}."
        )


def meet(run):
    """Meet the other processes: at --coordinator, or where a TPU pod, Slurm or Kubernetes tells jax."""
    # That service would swallow SIGTERM from here on; `Interrupt` makes a signal known to all processes.
    jax.config.update("jax_enable_preemption_service", False)
    limit = 3 * run.peer_timeout  # machines do not all start at one moment
    # else jax would end in a stack trace
    words = (
        f"error: --peer_timeout {run.peer_timeout}: the processes did not all meet within {limit} s; does the same "
        f"command run on every host, each with its own --process_id, and can all reach --coordinator?"
    )
    late = threading.Timer(limit, interrupts.end, [1, words])  # not 2: another try may succeed
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            **meeting_place(run),
            initialization_timeout=limit + 60,
            heartbeat_timeout_seconds=run.peer_timeout,
            shutdown_timeout_seconds=3600,  # process 0 may still upload its log
        )
    except (ValueError, RuntimeError) as e:
        if "coordinator_address should be defined" in str(e):
            return  # jax knows no cluster around this process
        raise UserError(
            f"this process cannot join the others ({first_line(e)}); give --num_processes 1 to train alone, or "
            f"--coordinator, --num_processes and --process_id."
        ) from None
    finally:
        late.cancel()


def meeting_place(run):
    """Arguments of `jax.distributed.initialize`: those that --coordinator tells, else none."""
    if not run.coordinator:
        return {}
    host, port = run.coordinator.rsplit(":", 1)
    # by itself jax listens on [::], which a machine without IPv6 does not have
    every = "[::]" if host[0] == "[" else "0.0.0.0"
    bind = run.coordinator if host in LOOPBACK else f"{every}:{port}"
    return dict(
        coordinator_address=run.coordinator,
        num_processes=run.num_processes,
        process_id=run.process_id,
        coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind),
    )


def all_of(here):
    """Whether `here` is true on every process; waits for all of them."""
    return bool(multihost_utils.process_allgather(np.array(here)).all())


def together(error):
    """Raise an error on all processes or on none. error: what this one failed with, or None."""
    if not all_of(error is None):
        raise error or UserError(ANOTHER)


def on_all(work):
    """work(). Raises UserError on all processes where it does so on any."""
    done = error = None
    try:
        done = work()
    except UserError as e:
        error = e
    together(error)
    return done


def on_main_process(work):
    """Call work() on process 0. Raises UserError on all processes where it did so there."""
    on_all(work if jax.process_index() == 0 else lambda: None)


@contextlib.contextmanager
def alone_in_folder(run):
    """Hold the run directory for the processes of this run, by process 0. Raises UserError on all of them."""
    with contextlib.ExitStack() as held:
        lock = locks.alone_in(run.folder, f"--output_dir {run.output_dir}", "--name")
        on_main_process(lambda: held.enter_context(lock))
        yield


def check_agreement(flags, data, folder):
    """Raise UserError on all processes unless all have the same {flag: value}, the same shards, by their fingerprint
    `data`, and see what process 0 writes in `folder`, the run directory, where each writes its part of a checkpoint."""
    if jax.process_count() == 1:
        return
    same_everywhere({f"--{flag}": value for flag, value in flags.items()} | {"--data": data})
    path = f"{folder}/shared"
    token = str(multihost_utils.broadcast_one_to_all(np.uint32(time.time_ns() % 2**32)))
    if jax.process_index() == 0:
        write_file(path, token)
    all_of(True)
    seen = read_file(path) or b""
    same_everywhere({"--output_dir": seen.decode() == token})


def same_everywhere(things):
    """Raise UserError on all processes if the {name: value} `things` are not the same on each of them."""
    sums = [zlib.crc32(repr(value).encode()) for value in things.values()]
    mine = np.array(sums, np.uint32)
    every = multihost_utils.process_allgather(mine)
    for process, theirs in enumerate(every):
        differ = [name for name, a, b in zip(things, theirs, every[0]) if a != b]
        if differ:
            raise UserError(
                f"{', '.join(differ)}: not the same on process {process} as on process 0; give all the same flags, "
                f"with a --data and --output_dir that each can see."
            )


class Interrupt:
    """The signals while steps run. The first one is noted until the step in progress is done and saved; the second
    prints what a third would lose; the third ends the process at once, if it is SIGINT or SIGTERM: the kernel itself
    repeats SIGXCPU every second, and SIGHUP comes from the shell and from the terminal. unsaved(): what it loses, in
    words."""

    FAILED = 99  # above every signal

    def __init__(self, unsaved):
        mesh = Mesh(np.array(jax.devices()), "all")
        self.one_each = NamedSharding(mesh, P("all"))
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self.unsaved = unsaved
        self.asked = 0  # answer of the devices to the question of the step before
        self.signal = 0  # the first signal
        self.received = 0  # number of signals

    def agreed(self, failed):
        """The signal to stop for, FAILED where a process has `failed`, or 0. All processes stop at the same step: they
        ask each other on the devices after every step, and read the answer a step later, so that nobody waits."""
        mine = self.FAILED if failed else self.signal
        if jax.process_count() == 1:
            return mine
        shape = (jax.device_count(),)
        all_of_them = jax.make_array_from_callback(shape, self.one_each, lambda _: np.array([mine]))
        answer, self.asked = self.asked, self.largest(all_of_them)
        return int(answer)

    def __enter__(self):
        self.over = interrupts.watch(self._note)
        return self

    def _note(self, number):
        name = signal.Signals(number).name
        self.received += 1
        if self.received == 1:
            self.signal = number
            say(f"{name}: stopping after this step, with a checkpoint")
        elif self.received == 2:
            say(f"{name}: still stopping; a third signal ends it at once, losing {self.unsaved()}")
        elif number in interrupts.INSISTING:
            interrupts.end(128 + number, f"{name}: ended at once, losing {self.unsaved()}")

    def __exit__(self, *_):
        self.over()


class Watchdog:
    """A thread that prints the stacks of all threads when an activity of the loop takes STUCK times its median so far,
    and ends the process after stuck_limit seconds. What hangs one process hangs the others too, so all report."""

    def __init__(self, cfg):
        self.limit = cfg.run.stuck_limit
        self.took = {}  # {name of an activity: seconds of the last times}
        self.over = threading.Event()
        self.now = None  # (name of the activity, step, when it began by time.monotonic())
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, name, step):
        """The activity before has ended, this one begins."""
        began = time.monotonic()
        if self.now:
            before, _, then = self.now
            self.took.setdefault(before, deque(maxlen=99)).append(began - then)
        self.now = (name, step, began)

    def alive(self):
        """The activity makes progress: --stuck_limit counts from here."""
        name, step, _ = self.now
        self.now = (name, step, time.monotonic())

    def _watch(self):
        reported = None
        while not self.over.wait(1):
            now = self.now
            if not now:
                continue
            name, step, began = now
            seconds = time.monotonic() - began
            took = list(self.took.get(name, []))
            usual = statistics.median(took) if len(took) > 2 else math.inf
            words = f"watchdog: {name} of step {step} has taken"
            pause = min(60, self.limit / 2)  # of a busy machine
            patience = min(self.limit, max(pause, STUCK * usual))
            if now is not reported and seconds > patience:
                reported = now
                say(f"{words} {seconds:.0f} s, usually {usual:.2f}")
                faulthandler.dump_traceback(sys.stdout)
            if seconds > self.limit:
                # 75: "temporary failure" in sysexits.h, to be started again
                interrupts.end(75, f"{words} more than --stuck_limit {self.limit} s; ending")
