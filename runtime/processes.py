"""The processes of a run: how they meet, agree on their flags and on when to stop, and report where they hang."""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

# jax.process_index() would look for devices, which waits for the other processes
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import interrupts, locks, platforms
from runtime.files import read_file, write_file
from runtime.messages import Unavailable, UserError, first_line, flush_output, say, say_aside

# How errors of jax's tell that another process does not answer any more.
LOSS = re.compile(
    "Gloo|NCCL|UNAVAILABLE|Connection closed by peer|Connection reset|heartbeat|coordination"
)
# tools/cluster/on_host.sh: start knows by "its log says why" that another host's does
ANOTHER = "another process failed; its log says why."
LOST = "another process of this run was lost; its log says why"
# Statuses of a process, each worse than the one before: where several fail, all end with the worst. After UserError's a
# supervisor does not start its process again, and one alone would wait for the others.
ENDS = 0, 1, Unavailable.status, UserError.status
LINGER = 6  # seconds that process 0 waits for the end of the others
watched = threading.Event()  # set where `end_with_the_first` has nothing more to do
LOOPBACK = "localhost", "127.0.0.1", "[::1]"  # which no other machine reaches
STUCK = 10  # times its median from which a part of the loop is taken for stuck


def end_at_once(error):
    """Print the error and end this process, one of several. At a usual exit jax would wait for the others, which wait
    for this one, and end in a stack trace."""
    words = f"error: {error}"
    if not isinstance(error, UserError):
        if LOSS.search(str(error)):
            if status := published_status():
                interrupts.end(status, f"error: {ANOTHER}")
            advice = "and the same command on all resumes from a checkpoint."
            interrupts.end(75, f"error: {LOST}, {advice}")
        words = "".join(traceback.format_exception(error))
    flush_output()
    say_aside(words)
    status = ENDS[rank_of(error)]
    publish_status(status)
    os._exit(status)


def rank_of(error):
    """Place in ENDS of the exit status that an error, or None, gives a process."""
    status = error.status if isinstance(error, UserError) else int(error is not None)
    return ENDS.index(status)


def publish_status(status):
    """Tell the other processes that this one ends, with which status. With process 0 they would end too, in a stack
    trace: it waits until they have told their end, for some seconds."""
    watched.set()
    me = distributed.global_state
    with contextlib.suppress(RuntimeError):  # process 0 is gone
        me.client.key_value_set(f"ended/{me.process_id}", str(status))
        if me.process_id > 0:
            return
        for _ in range(LINGER):
            told = me.client.key_value_dir_get("ended/")
            time.sleep(1)  # for those that have told it, and not ended yet
            if len(told) == me.num_processes:
                return


def published_status():
    """The worst exit status of those that processes have told as they ended; 0 where none has."""
    with contextlib.suppress(RuntimeError):  # process 0 is gone
        told = distributed.global_state.client.key_value_dir_get("ended/")
        return max([int(status) for _, status in told], key=ENDS.index, default=0)
    return 0


def end_with_the_first():
    """In a thread, until steps run: end this process soon after another one that failed alone. What the others wait for
    no longer comes. Once steps run, they agree on their end (`Interrupt.agreed`)."""
    while not watched.wait(1):
        # all may have failed together, and this one be about to print why
        if published_status() and not watched.wait(3):
            status = published_status()
            publish_status(status)
            interrupts.end(status, f"error: {ANOTHER}")


def join_processes(cfg, alike):
    """Meet the other processes of the run, if there are any, agree with them on alike(), {name: value} of what all must
    have in common, and find the devices of all. Raises UserError."""
    run = cfg.run
    if run.num_processes != 1:
        connect(run)
    several = jax.distributed.is_initialized()
    if several:
        threading.Thread(target=end_with_the_first, daemon=True).start()
        same_everywhere(alike(), run)
    platforms.find_devices()
    if several and run.n_devices not in (0, jax.device_count()):
        raise UserError(
            f"several processes train on all their devices, {jax.device_count()}",
            flag="n_devices",
            value=run.n_devices,
        )


def leave(status):
    """Leave the other processes, which leave too. Ends this one, with that status, where one is gone already."""
    watched.set()
    try:
        jax.distributed.shutdown()
    except RuntimeError:  # all is saved, and jax would end in a trace
        flush_output()
        interrupts.end(status, "")


def connect(run):
    """Meet the other processes: at --coordinator, or where a TPU pod, Slurm or Kubernetes tells jax."""
    # That service would swallow SIGTERM from here on; `Interrupt` makes a signal known to all processes.
    jax.config.update("jax_enable_preemption_service", False)
    limit = 3 * run.peer_timeout  # machines do not all start at one moment
    # else jax would end in a stack trace
    words = (
        f"error: --peer_timeout {run.peer_timeout}: the processes did not all meet within {limit} s; does the same "
        f"command run on every host, each with its own --process_id, and can all reach --coordinator?"
    )
    late = threading.Timer(limit, interrupts.end, [Unavailable.status, words])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            **coordinator_arguments(run),
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


def coordinator_arguments(run):
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


def largest_of(here):
    """The largest of the numbers `here` of all processes; waits for all of them."""
    return int(multihost_utils.process_allgather(np.array(here)).max())


def all_of(here):
    """Whether `here` is true on every process; waits for all of them."""
    return not largest_of(not here)


def together(error):
    """Raise an error on all processes or on none. error: what this one failed with, or None."""
    rank = largest_of(rank_of(error))
    if rank:
        raise failure(rank, error)


def failure(rank, error):
    """What this process raises where one has failed: its own error, if it has one. All end with the status at `rank` in
    ENDS."""
    error = error or UserError(ANOTHER)
    if isinstance(error, UserError):
        error.status = ENDS[rank]
    return error


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
    """Hold the run directory for the processes of this run, by process 0, for which it yields the `locks.Lock`, for
    others None. Raises UserError on all of them."""
    with contextlib.ExitStack() as held:
        alone = locks.alone_in(run.folder, "output_dir", run.output_dir, "name")
        is_main = jax.process_index() == 0
        yield on_all(lambda: held.enter_context(alone) if is_main else None)


def check_agreement(flags, data, run):
    """Raise UserError on all processes unless all settled on the same {flag: value}, with what each found in its files,
    have the same shards, by their fingerprint `data`, and see what process 0 writes in the run directory, where each
    writes its part of a checkpoint."""
    if jax.process_count() == 1:
        return
    path = f"{run.folder}/shared"
    on_main_process(lambda: write_file(path, f"written by process 0 at {time.time_ns()}"))
    seen = (read_file(path) or b"not shared").decode()
    flags = {f"--{flag}": value for flag, value in flags.items()}
    same_everywhere(flags | {"--data": data, "--output_dir": seen}, run)


rounds = itertools.count()  # of `same_everywhere`


def same_everywhere(things, run):
    """Raise UserError on all processes where {name: value} `things` differ in what two of them both name; Unavailable
    where one does not tell its own. Needs no devices: process 0 compares what all put into its key-value store."""
    me = distributed.global_state
    key = f"same/{next(rounds)}"
    # before jax ends this process, in a stack trace, for one that is gone
    seconds = min(30, run.peer_timeout / 2)
    me.client.key_value_set(f"{key}/{me.process_id}", json.dumps(things))
    if me.process_id == 0:
        me.client.key_value_set(f"{key}/found", json.dumps(compare(key, seconds)))
    status, words = shared_value(f"{key}/found", 1.5 * seconds) or no_answer(0, seconds)
    if words:
        error = UserError(words)
        error.status = status
        raise error


def compare(key, seconds):
    """(exit status, what differs) between process 0, which calls it, and another one; (0, "") where nothing does."""
    end = time.monotonic() + seconds
    mine = shared_value(f"{key}/0", seconds)
    for process in range(1, distributed.global_state.num_processes):
        theirs = shared_value(f"{key}/{process}", max(0, end - time.monotonic()))
        if theirs is None:
            return no_answer(process, seconds)
        differ = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
        if differ:
            each = [f"{n} {in_words(theirs[n])} instead of {in_words(mine[n])}" for n in differ[:3]]
            more = f" and {len(differ) - 3} more" if differ[3:] else ""
            return UserError.status, (
                f"process {process} differs from process 0 in {', '.join(each)}{more}; give all the same program, "
                f"packages and flags, with a --data and --output_dir that each can see."
            )
    return 0, ""


def shared_value(key, seconds):
    """What a process has put into the key-value store, or None where it does not in that many seconds."""
    with contextlib.suppress(RuntimeError):
        get = distributed.global_state.client.blocking_key_value_get
        return json.loads(get(key, int(1000 * seconds) + 1))


def no_answer(process, seconds):
    words = f"process {process} did not tell its program and flags within {seconds:g} s; its log says why."
    return Unavailable.status, words


def in_words(value):
    """A value of `things` as a message has it."""
    return f"{value if value and isinstance(value, str) else json.dumps(value):.50}"


class Interrupt:
    """The signals while steps run. The first one is noted until the step in progress is done and saved; the second
    prints what a third would lose; the third ends the process at once, if it is SIGINT or SIGTERM: the kernel itself
    repeats SIGXCPU every second, and SIGHUP comes from the shell and from the terminal. unsaved(): what it loses, in
    words."""

    FAILED = 99  # above every signal, where a process has failed; added to it is the place in ENDS of its status

    def __init__(self, unsaved):
        mesh = Mesh(np.array(jax.devices()), "all")
        self.one_each = NamedSharding(mesh, P("all"))
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self.unsaved = unsaved
        self.asked = 0  # answer of the devices to the question of the step before
        self.signal = 0  # the first signal
        self.received = 0  # number of signals

    def agreed(self, failed):
        """The signal to stop for, FAILED or more where a process `failed` with an error, or 0. All processes stop at a
        step: they ask each other on the devices after each, and read the answer a step later, so that nobody waits."""
        mine = self.FAILED + rank_of(failed) if failed else self.signal
        if jax.process_count() == 1:
            return mine
        shape = (jax.device_count(),)
        all_of_them = jax.make_array_from_callback(shape, self.one_each, lambda _: np.array([mine]))
        answer, self.asked = self.asked, self.largest(all_of_them)
        return int(answer)

    def __enter__(self):
        watched.set()
        self.over = interrupts.watch(self._on_signal)
        return self

    def _on_signal(self, number):
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

    @contextlib.contextmanager
    def during(self, name, step):
        """Time the activity `name` of a step. The one around it, if there is one, stands still meanwhile."""
        outer, entered = self.now, time.monotonic()
        self.enter(name, step)
        yield
        ended = time.monotonic()
        _, _, began = self.now
        self.took.setdefault(name, deque(maxlen=99)).append(ended - began)
        if outer:
            name, step, began = outer
            outer = (name, step, began + ended - entered)
        self.now = outer

    def enter(self, name, step):
        """An activity begins."""
        self.now = (name, step, time.monotonic())

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
