"""Processes that race for the lock of a folder, in a world whose clock, threads and faults are drawn.

Of all threads one runs at a time, up to its next look at storage or sleep. There its process may be paused, for longer
than a holder is given, or die. So an hour of a race takes a tenth of a second, and is the same with the same seed.
"""

import builtins
import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import threading
import time
from types import SimpleNamespace
from unittest import mock

from storage_servers import storage_server

from runtime import files, interrupts, lock_storage, locks
from runtime.messages import Unavailable, UserError
from tests.soak.programs import Case

PLACES = "local", "no flock", "memory", "gs", "s3"
OLD = "none", "dead here", "dead elsewhere", "older program", "torn"  # what is there before
ONE = threading.Lock()  # a race at a time: it has the program's modules for itself
MOST = 100_000  # turns of threads, beyond which a race is endless
PAUSES = (1, 15), (30, 90), (100, 500), (130, 300)  # seconds
SERVERS = {}


class Died(BaseException):
    """What ends the threads of a process that has ended."""


class Process:
    """A contender, with what is drawn of its fate."""

    def __init__(self, world, name, begins, faults):
        rng = world.rng
        self.name = name
        self.system = rng.choice(["", "one", "one", "other"])
        self.boot = rng.uniform(0, 1e6)  # its machine's clock shows this at the beginning
        self.begins = begins
        # seconds before each write
        self.stays = [rng.uniform(0, 90) for _ in range(rng.randint(0, 9))]
        self.tries = rng.randint(1, 4) if faults else 1  # as a supervisor makes
        self.turns = itertools.count()
        self.pauses = {}  # {turn: seconds}
        self.dies = rng.choice([None, None, rng.randint(5, 90)]) if faults else None
        for _ in range(rng.randint(0, 4) if faults else 0):
            self.pauses[rng.randint(1, 150)] = rng.uniform(*rng.choice(PAUSES))
        self.paused_until = 0
        self.ended = None  # when, by the world's clock
        self.is_dead = False  # before its program was done
        self.entry = None  # number of its entry into the folder
        self.how = None


class Task:
    """A thread of a process."""

    def __init__(self, world, process, work):
        self.process = process
        self.wake = 0
        self.condition = lambda: False
        self.turn = threading.Semaphore(0)
        self.is_done = False
        self.thread = threading.Thread(target=self.run, args=(world, work), daemon=True)
        self.thread.start()

    def run(self, world, work):
        world.here.task = self
        world.here.inside = False
        self.turn.acquire()
        try:
            if not self.process.is_dead:
                work()
        except Died:
            pass
        except BaseException as e:
            world.wrong = f"{self.process.name} raises {e!r}"
        self.is_done = True
        world.back.release()


class World:
    def __init__(self, rng, faults):
        self.rng = rng
        self.clock = 0.0
        self.loss = rng.choice([0, 0.02, 0.1]) if faults else 0  # of answers, and as many requests
        self.here = threading.local()
        self.back = threading.Semaphore(0)
        self.tasks = []
        self.processes = {}
        self.entries = 0
        self.said = []
        self.wrong = None

    @property
    def process(self):
        return self.here.task.process

    def spawn(self, process, work):
        task = Task(self, process, work)
        self.tasks.append(task)
        return task

    def point(self, wake=0, condition=lambda: False):
        """Let others run, until a time or a condition. What the process does next, it may do after a pause."""
        task, process = self.here.task, self.process
        turn = next(process.turns)
        if turn == process.dies:
            self.end(process)
        if turn in process.pauses:
            process.paused_until = self.clock + process.pauses[turn]
            self.note(f"is paused for {process.pauses[turn]:.0f} s")
        task.wake, task.condition = wake, condition
        self.back.release()
        task.turn.acquire()
        if process.is_dead:
            raise Died

    def end(self, process):
        process.is_dead = True
        process.ended = self.clock
        self.note("has ended")

    def note(self, words, own=True):
        self.said.append(f"{self.clock:8.1f} {self.process.name} {words}")

    def run(self):
        for _ in range(MOST):
            waiting = [task for task in self.tasks if not task.is_done]
            if not waiting:
                return
            ready = []
            for task in waiting:
                paused = task.process.paused_until > self.clock and not task.process.is_dead
                due = task.wake <= self.clock or task.condition() or task.process.is_dead
                if due and not paused:
                    ready.append(task)
            if ready:
                task = self.rng.choice(ready)
                self.clock += self.rng.choice([0, 0.01, 0.3])
                task.turn.release()
                self.back.acquire()
            else:
                self.clock = min(
                    max(task.wake, task.process.paused_until)
                    for task in waiting
                    if max(task.wake, task.process.paused_until) > self.clock
                )
        self.wrong = "endless"

    # what the program's modules find instead of the system

    def faulty(self, work, error):
        """work(), whose request or answer may get lost."""
        self.point()
        draw = self.rng.random()
        if draw < self.loss:
            raise error
        done = work()
        if draw > 1 - self.loss:
            self.note("loses an answer")
            raise error
        return done

    def local(self, name, function):
        def call(*args, **settings):
            self.point()
            done = function(*args, **settings)
            if name == "rename" and self.rng.random() < self.loss:
                self.note("loses an answer")
                # NFS asks again, and finds what it has renamed renamed
                raise FileNotFoundError(errno.ENOENT, "its answer got lost")
            return done

        return call

    def is_alive(self, holder):
        if not self.process.system or holder["system"] != self.process.system:
            return None
        return holder["started"] in self.processes and not self.processes[holder["started"]].ended

    def this_process(self):
        """All have the same host and number, as in containers."""
        me = self.process
        token = f"{self.rng.getrandbits(64):016x}"
        about = dict(token=token, host="localhost", pid=1, system=me.system, started=me.name)
        return about | dict(since=me.name, command="x")

    def exit(self, status, words):
        self.note(f"ends itself: {words}")
        self.process.how = "lost"
        self.end(self.process)
        raise Died


class Time:
    """The world's clock, but for threads that are not of the world, such as one that reports a slow answer."""

    CLOCK_BOOTTIME = CLOCK_MONOTONIC = time.CLOCK_MONOTONIC
    strftime = time.strftime

    def __init__(self, world):
        self.world = world

    def sleep(self, seconds):
        if not hasattr(self.world.here, "task"):
            return time.sleep(seconds)
        self.world.point(self.world.clock + seconds)

    def clock_gettime(self, _):
        if not hasattr(self.world.here, "task"):
            return time.monotonic()
        return self.world.clock + self.world.process.boot

    def monotonic(self):
        return self.clock_gettime(None)


def threads(world):
    class Event:
        def __init__(self):
            self.is_it = False

        def set(self):
            self.is_it = True

        def clear(self):
            self.is_it = False

        def is_set(self):
            return self.is_it

        def wait(self, seconds):
            world.point(world.clock + seconds, self.is_set)

    class Thread:
        def __init__(self, target, name, daemon):
            self.target = target
            self.task = None

        def start(self):
            self.task = world.spawn(world.process, self.target)

        def is_alive(self):
            return self.task is not None and not self.task.is_done

        def join(self, seconds):
            world.point(world.clock + seconds, lambda: self.task.is_done)

    return SimpleNamespace(Event=Event, Thread=Thread)


class Wrapped:
    """A module, of which some functions are others."""

    def __init__(self, module, **others):
        self.__dict__.update(others)
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name)


@contextlib.contextmanager
def simulated(world, place):
    """The modules of the lock see the world, and nothing else does."""
    clock = Time(world)
    points = {}
    for name in ("listdir", "rename", "unlink", "rmdir", "makedirs"):
        points[name] = world.local(name, getattr(os, name))
    removes = SimpleNamespace(rmtree=world.local("rmtree", shutil.rmtree))
    opens = world.local("open", builtins.open)
    remove_parts = world.local("remove_parts", files.remove_parts)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with contextlib.ExitStack() as stack:

        def patch(module, **others):
            stack.enter_context(mock.patch.multiple(module, create=True, **others))

        patch(locks, time=clock, threading=threads(world), remove_parts=remove_parts)
        patch(locks, is_alive=world.is_alive, this_process=world.this_process)
        patch(locks, say=world.note, warn=world.note)
        patch(lock_storage, os=Wrapped(os, **points), shutil=removes, open=opens)
        patch(files, time=clock, warn=world.note)
        patch(interrupts, end=world.exit, releases=[])
        if place == "no flock":
            patch(files, fcntl=Wrapped(fcntl, flock=no_locks))
        for kind in (lock_storage.Storage, lock_storage.GoogleStorage, lock_storage.S3):
            for name in ("read", "write", "remove"):
                if name in vars(kind):
                    patch(kind, **{name: remote(world, vars(kind)[name])})
        yield


def remote(world, method):
    def call(self, *args):
        if world.here.inside:  # what one method asks of another
            return method(self, *args)
        world.here.inside = True
        try:
            return world.faulty(lambda: method(self, *args), ConnectionError("503"))
        finally:
            world.here.inside = False

    return call


def contend(world, process, folder):
    """What a program does with its folder, and does again after a refusal."""
    clock = Time(world)
    clock.sleep(process.begins)
    for _ in range(process.tries):
        process.begins = world.clock
        try:
            with locks.alone_in(folder, "output", "x", "output") as held:
                hold(world, process, held)
            process.how = "done"
            break
        except Unavailable as e:
            world.note(f"is refused: {e}")
            process.how = "refused"
            by = re.search(r"since (\S+);", str(e))
            if by and not lived(world, by[1], process.begins):
                world.wrong = f"{process.name} is refused by a dead one"
            clock.sleep(30)
        except UserError as e:
            world.note(f"fails: {e}")
            process.how = "failed"
            break
    process.ended = process.ended or world.clock


def hold(world, process, held):
    held.confirm()
    world.entries += 1
    process.entry = world.entries
    world.note("is in")
    for seconds in process.stays:
        Time(world).sleep(seconds)
        with contextlib.suppress(Unavailable):
            held.confirm()
            if process.entry != world.entries:
                world.wrong = f"{process.name} writes after another is in"
            world.note("writes")


def lived(world, name, begin):
    """Whether a process of that name lived at some time since `begin`."""
    process = world.processes.get(name)
    return process is not None and (process.ended or world.clock) >= begin


def server(kind):
    """The proxy to an emulator that serves all races."""
    if kind not in SERVERS:
        stack = contextlib.ExitStack()
        proxy, _, env = stack.enter_context(storage_server(kind))
        proxy.fault = lambda: drawn_fault(proxy.rng.random(), proxy.loss)
        os.environ.update(env, AWS_MAX_ATTEMPTS="2")
        quick = mock.patch("gcsfs.retry.random", SimpleNamespace(random=lambda: -1))
        stack.enter_context(quick if kind == "gs" else contextlib.nullcontext())
        SERVERS[kind] = stack, proxy
    return SERVERS[kind][1]


def drawn_fault(draw, loss):
    """What is wrong with a request to an emulator: nothing, 503, or an answer that gets lost."""
    if draw < loss:
        return 503
    return "late" if draw > 1 - loss else None


def close_servers():
    for stack, _ in SERVERS.values():
        stack.close()
    SERVERS.clear()


def leave(old, path):
    """Make what a process left before the race."""
    about = dict(token="0" * 16, host="localhost", pid=1, started="before", since="before")
    about["system"] = "one" if old == "dead here" else "far"
    content = json.dumps(about)
    if old == "older program":
        content = json.dumps(dict(host="localhost", pid=1, since="before", command="x"))
    if old == "torn":
        content = ""
    if files.is_remote(path):
        files.ask(path, "pipe_file", content.encode())
    elif old == "older program":
        files.write_file(path, content)
    else:
        os.makedirs(path)
        files.write_file(os.path.join(path, f"{about['token']}-7"), content)


def race(rng, place, folder, faults=True):
    """(the World after a race, what was drawn, in words)."""
    old = rng.choice(OLD)
    n = rng.choice([2, 2, 3])
    world = World(rng, faults)
    proxy = server(place) if place in ("gs", "s3") else SimpleNamespace()
    proxy.rng, proxy.loss = rng, 0
    if old != "none":
        leave(old, os.path.join(folder, locks.LOCK))
    proxy.loss = world.loss / 4
    tried = f"{n} on {place}, {old} before, {world.loss:.0%} lost"
    spread = rng.choice([0, 1, 100, 300])
    for i in range(n):
        process = Process(world, f"p{i}", rng.uniform(0, spread), faults)
        world.processes[process.name] = process
    with simulated(world, place):
        for process in [*world.processes.values()]:
            world.spawn(process, lambda process=process: contend(world, process, folder))
        world.run()
        proxy.loss = world.loss = 0
        last = Process(world, "last", world.clock, faults=False)  # when the others have ended
        world.processes["last"] = last
        world.spawn(last, lambda: contend(world, last, folder))
        world.run()
    world.wrong = world.wrong or complaint(world)
    return world, tried


def complaint(world):
    """What is wrong with how a race ended, or None."""
    *drawn, last = world.processes.values()
    if last.how != "done":
        return f"the last one: {last.how}"
    survived = [process for process in drawn if not process.is_dead and process.how != "failed"]
    if len(survived) == len(drawn) and not any(process.entry for process in drawn):
        return "nobody was in"
    return None


def case(rng, sound, folder):
    place = rng.choice(PLACES)
    there = dict(memory=f"memory://{folder.name}")
    there |= {kind: f"{kind}://bucket/{folder.name}" for kind in ("gs", "s3")}
    with ONE:
        world, tried = race(rng, place, there.get(place, str(folder)))
    return Case(tried, place, world.wrong, "\n".join(world.said))
