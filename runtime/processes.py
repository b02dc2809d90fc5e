"""The processes of a run: how they connect, agree on their flags and on when to stop, and report where they hang."""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import re
import signal
import socket
import statistics
import tempfile
import threading
import time
import traceback
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

# `distributed` knows the process's number, since jax.process_index() would search for devices, and wait for the others.
from jax._src import cloud_tpu_init, distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime import interrupts, launchers, locks, messages, platforms
from runtime.files import read_file, write_file
from runtime.messages import (
    Unavailable,
    UserError,
    first_line,
    flush_output,
    say,
    say_aside,
    share_log,
    warn,
)

# Words in jax's errors that mean that another process no longer answers.
LOSS = re.compile(
    "Gloo|NCCL|UNAVAILABLE|Connection closed by peer|Connection reset|heartbeat|coordination"
)
# tools/cluster/on_host.sh: start searches for "its log says why": then the reason is in the log of another host.
ANOTHER = "another process failed; its log says why."
LOST = "another process of this run was lost; its log says why"
# Exit statuses of a process, from the best to the worst. Where several processes fail, all end with the worst of their
# statuses: a supervisor does not restart a process after a UserError, and the restarted ones would wait for that one.
ENDS = 0, 1, Unavailable.status, UserError.status
METADATA_PAUSE = 15  # seconds between two questions to the metadata server of a TPU VM
LINGER = 6  # seconds that process 0 waits for the others to end
watched = threading.Event()  # set when `end_with_the_first` is no longer needed
LOOPBACK = "localhost", "127.0.0.1", "[::1]"  # hosts that no other machine can reach
STUCK = 10  # an activity of the loop counts as stuck after this many times its median duration


def end_at_once(error):
    """Print the error and end this process, which is one of several. With a usual exit, jax would wait for the other
    processes, which wait for this one, and end in a stack trace."""
    words = f"error: {error}"
    if not isinstance(error, UserError):
        if LOSS.search(str(error)):
            if status := published_status():
                interrupts.end(status, for_all(f"error: {ANOTHER}"))
            advice = "and the same command on all resumes from a checkpoint."
            words = f"error: {LOST}, {advice}"
            interrupts.end(75, for_all(words) if first_answers() else words)
        words = "".join(traceback.format_exception(error)).strip()
    flush_output()
    watched.set()  # else a failure elsewhere could end this process before it has printed its own
    if not spoken_for("error", words):
        say_aside(words, own=str(error) != ANOTHER)
    status = ENDS[rank_of(error)]
    publish_status(status)
    os._exit(status)


def for_all(words):
    """The words if this process prints what concerns the whole run, else ""."""
    return "" if messages.number else words


def first_answers():
    """Whether process 0, which holds the key-value store, still answers."""
    try:
        distributed.global_state.client.key_value_dir_get("ended/")
        return True
    except RuntimeError:
        return False


def spoken_for(event, words, seconds=5):
    """Whether process 0 prints these words, so that another process need not, where they print into one log. All
    processes call this when `event` happens to them; the others wait that many seconds for process 0."""
    me = distributed.global_state
    if me.client is None:
        return False
    key = f"printed/{event}"
    if me.process_id == 0:
        with contextlib.suppress(RuntimeError):
            me.client.key_value_set(key, json.dumps(words), allow_overwrite=True)
    return bool(messages.number) and shared_value(key, seconds) == words


def rank_of(error):
    """The index in ENDS of the exit status of a process that ends with this error, or with None."""
    status = error.status if isinstance(error, UserError) else int(error is not None)
    return ENDS.index(status)


def publish_status(status):
    """Publish to the other processes that this one ends with this status."""
    watched.set()
    publish_last("ended", status)


def publish_last(kind, value):
    """Publish a value to the other processes just before this one ends.

    Process 0 then waits for LINGER seconds at most until all others have published one of this kind. It holds the
    key-value store, and when it ends the others end too, in a stack trace.
    """
    me = distributed.global_state
    client = me.client
    if client is None:  # this process is alone, or has disconnected
        return
    with contextlib.suppress(RuntimeError):  # process 0 is gone
        client.key_value_set(f"{kind}/{me.process_id}", str(value))
        if me.process_id > 0:
            return
        for _ in range(LINGER):
            published = client.key_value_dir_get(f"{kind}/")
            time.sleep(1)  # a process ends a moment after it has published its value
            if len(published) == me.num_processes:
                return


def published_status():
    """The worst exit status that processes have published so far; 0 where none has."""
    with contextlib.suppress(RuntimeError):  # process 0 is gone
        published = distributed.global_state.client.key_value_dir_get("ended/")
        return max([int(status) for _, status in published], key=ENDS.index, default=0)
    return 0


def end_with_the_first():
    """End this process soon after another one that failed alone, since the others would wait for it in vain. It runs in
    a thread until steps run. From then on the processes agree on when to end (`Interrupt.agreed`)."""
    while not watched.wait(1):
        # All may have failed together, and this one may be about to print why: it gets 3 s for that.
        if published_status() and not watched.wait(3):
            status = published_status()
            publish_status(status)
            interrupts.end(status, for_all(f"error: {ANOTHER}"))


def end_by_signal(number):
    """End this process because of a signal, before steps run or after them. Mostly all processes get it."""
    words = interrupts.words
    if spoken_for("signal", words):
        words = ""
    publish_last("signalled", number)
    interrupts.end(128 + number, words)


def join_processes(cfg, shared_settings):
    """Connect to the other processes of the run, if there are any, check that the {name: value} of shared_settings() is
    the same in all of them, and find the devices of all. Raises UserError."""
    run = cfg.run
    # One task of Slurm's has nobody to meet. jax would also give it only the first GPU of its node.
    is_one_task = launchers.in_slurm_step() and launchers.tasks_of_slurm() == 1
    if run.num_processes > 1 or (run.num_processes == 0 and not is_one_task):
        connect(run)
    several = jax.distributed.is_initialized()
    tasks = launchers.tasks_without_srun()
    if tasks and not several and run.num_processes == 0:
        warn(
            f"SLURM_NTASKS={tasks}, but this process was not started by srun, so it trains alone; srun python main.py "
            f"starts {tasks} that train together"
        )
    if several:
        share_log(distributed.global_state.process_id)
        threading.Thread(target=end_with_the_first, daemon=True).start()
        same_everywhere(shared_settings(), run)
    platforms.find_devices()
    if several and run.coordinator and jax.process_index() != run.process_id:
        # A TPU numbers its hosts by itself, and gcloud may list them in another order.
        raise UserError(
            f"this host is number {jax.process_index()} of its TPU; leave --coordinator out and jax asks the TPU (in "
            f"cluster.env: COORDINATOR=none)",
            flag="process_id",
            value=run.process_id,
        )
    if several and run.n_devices not in (0, jax.device_count()):
        raise UserError(
            f"several processes train on all their devices, {jax.device_count()}",
            flag="n_devices",
            value=run.n_devices,
        )
    if several:
        introduce()


def introduce():
    """Print where this process runs and which devices it has. It is the first line of each process, and in a log of
    several the only one of most."""
    kind = jax.local_devices()[0].device_kind
    place = f"{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}, {jax.local_device_count()} x {kind}"
    process = f"process {jax.process_index()} of {jax.process_count()} on {place}"
    say(process + ("; process 0 prints what concerns all" if messages.number else ""), own=True)


def leave(status):
    """Disconnect from the other processes, which do the same. If one of them is gone already, end this process with
    that status."""
    watched.set()
    try:
        jax.distributed.shutdown()
    except RuntimeError:
        # Everything is saved, so the process may end; jax would end it in a stack trace.
        flush_output()
        interrupts.end(status, "")


def connect(run):
    """Connect to the other processes: at --coordinator or, without it, at the address that jax gets from a TPU pod,
    Slurm or Kubernetes."""
    asks_tpu = not run.coordinator and cloud_tpu_init.running_in_cloud_tpu_vm
    if asks_tpu:
        if note := launchers.prepare_tpu_slice():
            say(f"note: {note}")
        if launchers.is_one_tpu_host():
            return
    # jax's own service would swallow SIGTERM from here on. `Interrupt` passes signals on to all processes instead.
    jax.config.update("jax_enable_preemption_service", False)
    # Longer than for a lost process, since machines start at different times.
    limit = 3 * run.peer_timeout
    # A timer prints this before jax's own limit, which would end the process in a stack trace.
    late = threading.Timer(limit, interrupts.end, [Unavailable.status, too_late(run, limit)])
    late.daemon = True
    late.start()
    arguments = dict(
        coordinator_arguments(run),
        initialization_timeout=limit + 60,
        heartbeat_timeout_seconds=run.peer_timeout,
        shutdown_timeout_seconds=3600,  # process 0 may still be uploading its log
    )
    try:
        while not join(arguments, asks_tpu):
            time.sleep(METADATA_PAUSE)
    finally:
        late.cancel()


def too_late(run, limit):
    """The error of a process that waited `limit` seconds for the others."""
    address = "--coordinator"
    if not run.coordinator:
        port = os.environ.get("JAX_COORDINATOR_PORT")
        address = f"port {port} of process 0 through the firewall" if port else "process 0"
    each = ", each with its own --process_id" if run.coordinator else ""
    return (
        f"error: --peer_timeout {run.peer_timeout}: the processes did not all meet within {limit} s; does the same "
        f"command run on every host{each}, and can all reach {address}?"
    )


def join(arguments, asks_tpu):
    """Call `jax.distributed.initialize`. Returns whether that is done; False where a TPU VM does not know its slice
    yet. Raises UserError."""
    try:
        jax.distributed.initialize(**arguments)
        choose_gpus()
    except (ValueError, RuntimeError, OSError) as e:
        if "coordinator_address should be defined" in str(e):
            return True  # jax knows no cluster around this process
        if asks_tpu and isinstance(e, (ValueError, OSError)):
            # The metadata of a new VM is incomplete for a while: jax finds no number, or no server.
            say(
                f"waiting for the metadata of this TPU VM, which names the hosts ({first_line(e)}); --num_processes 1 "
                f"trains on this host alone"
            )
            return False
        raise UserError(
            f"this process cannot join the others ({first_line(e)}); give --num_processes 1 to train alone, or "
            f"--coordinator, --num_processes and --process_id."
        ) from None
    return True


def choose_gpus():
    """Have jax use the GPUs that are this task's, where Slurm started it and nobody chose them otherwise."""
    if "JAX_LOCAL_DEVICE_IDS" in os.environ or not launchers.in_slurm_step():
        return
    if gpus := launchers.gpus_of_task():
        jax.config.update("jax_cuda_visible_devices", gpus)
        jax.config.update("jax_rocm_visible_devices", gpus)


def coordinator_arguments(run):
    """The arguments of `jax.distributed.initialize` that --coordinator gives; none without it."""
    if not run.coordinator:
        return {}
    host, port = run.coordinator.rsplit(":", 1)
    # By default jax listens on [::], which a machine without IPv6 does not have.
    every = "[::]" if host[0] == "[" else "0.0.0.0"
    bind = run.coordinator if host in LOOPBACK else f"{every}:{port}"
    return dict(
        coordinator_address=run.coordinator,
        num_processes=run.num_processes,
        process_id=run.process_id,
        coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind),
    )


def largest_of(here):
    """The largest of the numbers `here` that all processes pass; waits for all of them."""
    return int(multihost_utils.process_allgather(np.array(here)).max())


def all_of(here):
    """Whether `here` is true on every process; waits for all of them."""
    return not largest_of(not here)


def raise_together(error):
    """Raise an error on all processes or on none; waits for all of them. error: that of this process, or None."""
    rank = largest_of(rank_of(error))
    if rank:
        raise failure(rank, error)


def failure(rank, error):
    """The error that this process raises when any process has failed: its own if it has one. All processes get the exit
    status ENDS[rank]."""
    error = error or UserError(ANOTHER)
    if isinstance(error, UserError):
        error.status = ENDS[rank]
    return error


def on_all(work):
    """The result of work() on every process. Raises UserError on all of them where work() raises it on any."""
    result = None
    error = None
    try:
        result = work()
    except UserError as e:
        error = e
    raise_together(error)
    return result


def on_main_process(work):
    """Call work() on process 0 alone. Raises UserError on all processes where work() raises it there."""
    on_all(work if jax.process_index() == 0 else lambda: None)


@contextlib.contextmanager
def alone_in_folder(run):
    """Hold the lock of the run directory for the length of a `with` block. Process 0 holds it for all and gets the
    `locks.Lock`; the others get None. Raises UserError on all of them."""
    with contextlib.ExitStack() as held:
        alone = locks.alone_in(run.folder, "output_dir", run.output_dir, "name")
        is_main = jax.process_index() == 0
        yield on_all(lambda: held.enter_context(alone) if is_main else None)


def check_agreement(flags, data, run):
    """Check that all processes work on the same run. Raises UserError on all of them unless they have

    - the same {flag: value} `flags`, also where a value came from a file;
    - the same shards, by their fingerprint `data`;
    - one and the same run directory, in which each writes its part of a checkpoint: all must see there what process 0
      writes.
    """
    if jax.process_count() == 1:
        return
    path = f"{run.folder}/shared"
    on_main_process(lambda: write_file(path, f"written by process 0 at {time.time_ns()}"))
    seen = (read_file(path) or b"not shared").decode()
    flags = {f"--{flag}": value for flag, value in flags.items()}
    same_everywhere(flags | {"--data": data, "--output_dir": seen}, run)


# Numbers the calls of `same_everywhere`, each of which has keys of its own.
calls = itertools.count()


def same_everywhere(values, run):
    """Raise UserError on all processes where {name: value} `values` differ for a name that two of them have, and
    Unavailable where a process does not send its values.

    This needs no devices: process 0 compares what all put into the key-value store that it holds.
    """
    me = distributed.global_state
    key = f"same/{next(calls)}"
    # Shorter than --peer_timeout, after which jax would end this process in a stack trace because of a lost one.
    seconds = min(30, run.peer_timeout / 2)
    me.client.key_value_set(f"{key}/{me.process_id}", json.dumps(values))
    if me.process_id == 0:
        me.client.key_value_set(f"{key}/found", json.dumps(compare(key, seconds)))
    status, words = shared_value(f"{key}/found", 1.5 * seconds) or no_answer(0, seconds)
    if words:
        error = UserError(words)
        error.status = status
        raise error


def compare(key, seconds):
    """Compare the values below `key` of all processes with those of process 0, which calls this. Returns (exit status,
    what differs, in words) of the first process that differs or does not answer; (0, "") where there is none."""
    end = time.monotonic() + seconds
    mine = shared_value(f"{key}/0", seconds)
    for process in range(1, distributed.global_state.num_processes):
        theirs = shared_value(f"{key}/{process}", max(0, end - time.monotonic()))
        if theirs is None:
            return no_answer(process, seconds)
        differ = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
        if differ:
            each = []
            for name in differ[:3]:
                each.append(f"{name} {in_words(theirs[name])} instead of {in_words(mine[name])}")
            more = f" and {len(differ) - 3} more" if differ[3:] else ""
            return UserError.status, (
                f"process {process} differs from process 0 in {', '.join(each)}{more}; give all the same program, "
                f"packages and flags, with a --data and --output_dir that each can see."
            )
    return 0, ""


def shared_value(key, seconds):
    """The value of a key in the key-value store; None where no process sets it within that many seconds."""
    with contextlib.suppress(RuntimeError):
        get = distributed.global_state.client.blocking_key_value_get
        return json.loads(get(key, int(1000 * seconds) + 1))


def no_answer(process, seconds):
    """(exit status, message) for a process that did not send its values."""
    words = f"process {process} did not send its program and flags within {seconds:g} s; its log says why."
    return Unavailable.status, words


def in_words(value):
    """A compared value as it is written in a message."""
    return f"{value if value and isinstance(value, str) else json.dumps(value):.50}"


class Interrupt:
    """Handles signals while steps run.

    The first signal is recorded, and the run stops when the step in progress is done and saved. The second prints what
    a third would lose. The third ends the process at once, but only SIGINT and SIGTERM count for that: the kernel
    repeats SIGXCPU every second, and SIGHUP comes twice, from the shell and from the terminal. unsaved() returns what
    would be lost, in words.
    """

    # What a process that failed sends in place of a signal is FAILED + `rank_of` its error. It is above every signal.
    FAILED = 99

    def __init__(self, unsaved):
        mesh = Mesh(np.array(jax.devices()), "all")
        self.one_each = NamedSharding(mesh, P("all"))
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self.unsaved = unsaved
        self.asked = 0  # the largest of what all processes sent after the step before, as an array on the devices
        self.signal = 0  # the first signal, 0 for none
        self.received = 0  # number of signals

    def agreed(self, failed):
        """What the run should stop for: a signal; FAILED or more if a process failed; or 0. failed: the error of this
        process, or None.

        All processes stop after the same step. After each step every process sends its own answer, and the devices
        find the largest. It is read one step later, so that no process waits for the others.
        """
        mine = self.FAILED + rank_of(failed) if failed else self.signal
        if jax.process_count() == 1:
            return mine
        shape = (jax.device_count(),)
        all_of_them = jax.make_array_from_callback(shape, self.one_each, lambda _: np.array([mine]))
        answer = self.asked
        self.asked = self.largest(all_of_them)
        return int(answer)

    def __enter__(self):
        watched.set()
        self.over = interrupts.watch(self._on_signal)
        return self

    def _on_signal(self, number):
        """Handle a signal; called in the thread of `interrupts.watch`."""
        name = signal.Signals(number).name
        self.received += 1
        if self.received == 1:
            self.signal = number
            self._say(f"{name}: stopping after this step, with a checkpoint")
        elif self.received == 2:
            self._say(
                f"{name}: still stopping; a third signal ends it at once, losing {self.unsaved()}"
            )
        elif number in interrupts.INSISTING:
            interrupts.end(128 + number, f"{name}: ended at once, losing {self.unsaved()}")

    def _say(self, words):
        """Print what a signal causes. Mostly all processes get it; one that got it alone says so."""
        if not spoken_for(f"signal {self.received}", words):
            say(words, own=True)

    def __exit__(self, *_):
        self.over()


def stacks():
    """The stack traces of all threads, as faulthandler writes them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().rstrip()


class Watchdog:
    """A thread that prints the stacks of all threads when an activity of the loop takes STUCK times its median duration
    so far, and ends the process after --stuck_limit seconds. If one process hangs, the others wait for it, so all of
    them report."""

    def __init__(self, cfg):
        self.limit = cfg.run.stuck_limit
        self.took = {}  # {name of an activity: its last durations in seconds}
        self.over = threading.Event()
        self.now = None  # (name of the activity, step, when it started by time.monotonic())
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def during(self, name, step):
        """Time the activity `name` of a step for the length of a `with` block. An activity around it is not timed
        meanwhile."""
        outer = self.now
        entered = time.monotonic()
        self.enter(name, step)
        try:
            yield
        finally:  # also after an error: what saves the run then may take longer than --stuck_limit
            ended = time.monotonic()
            _, _, start = self.now
            self.took.setdefault(name, deque(maxlen=99)).append(ended - start)
            if outer:
                name, step, start = outer
                outer = (name, step, start + ended - entered)
            self.now = outer

    def enter(self, name, step):
        """Start an activity."""
        self.now = (name, step, time.monotonic())

    def alive(self):
        """Report that the activity makes progress: --stuck_limit counts from now."""
        name, step, _ = self.now
        self.now = (name, step, time.monotonic())

    def _watch(self):
        """The thread: check the activity once a second."""
        reported = None  # the activity whose stacks were printed
        while not self.over.wait(1):
            now = self.now
            if not now:
                continue
            name, step, start = now
            seconds = time.monotonic() - start
            took = list(self.took.get(name, []))
            usual = statistics.median(took) if len(took) > 2 else math.inf
            words = f"watchdog: {name} of step {step} has taken"
            pause = min(60, self.limit / 2)  # shorter delays are normal on a busy machine
            patience = min(self.limit, max(pause, STUCK * usual))
            if now is not reported and seconds > patience:
                reported = now
                say(f"{words} {seconds:.0f} s, usually {usual:.2f}\n{stacks()}", own=True)
            if seconds > self.limit:
                # 75 is "temporary failure" in sysexits.h: a supervisor starts the process again.
                interrupts.end(75, f"{words} more than --stuck_limit {self.limit} s; ending")
