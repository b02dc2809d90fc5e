"""The lock of a folder, which one process alone may write to. Imports no jax.

The lock, `lock` in the folder, names its holder, which renews it every BEAT seconds. A process that finds the lock of
another asks this system whether that runs, where both are of one. Else it waits for a sign of life. Nobody compares
host names, which containers share, or clocks of two machines. A holder that was paused, or cut off from storage, learns
by its next beat whether it is the holder still, and until then `Lock.confirm` lets nothing be written.
"""

import contextlib
import errno
import math
import os
import secrets
import shlex
import socket
import sys
import threading
import time

from runtime import interrupts
from runtime.files import is_remote, persist, remove_parts
from runtime.lock_storage import ANSWER, open_storage
from runtime.messages import Unavailable, UserError, first_line, say, warn

LOCK = "lock"  # its name in the folder
BEAT = 20  # seconds between two beats: 4,320 small writes a day
DEAD = 120  # seconds without a beat after which a holder is taken for dead: five may fail, or NFS show them 60 s late
FRESH = DEAD / 2  # seconds after a beat in which nobody can have taken the lock, nor soon after
POLL = 5  # seconds between two looks at another's lock
RELEASE = 10  # seconds that a release may take; what stays, the next one takes over
TRIES = 3  # of a write whose answer was lost
MOST = 500  # looks at a lock: DEAD has 24, even if every answer is late, and nobody loses so many races


def uptime():
    """Seconds of this machine's clock that counts the time in which it was suspended, and that nobody sets."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def this_process():
    """What a lock records of its holder: for people, and for `is_alive`."""
    return dict(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        system=this_system(),
        started=state_of("self")[1],
        since=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        command=shlex.join(sys.argv),
    )


def this_system():
    """What all processes have in common whose numbers mean the same: the boot, and the namespaces of their numbers and
    of their times. "" where that is not known."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # this /proc has the numbers of another namespace
        with open("/proc/sys/kernel/random/boot_id") as f:
            names = [f.read().strip()]
        for kind in ("pid", "time"):
            if os.path.lexists(f"/proc/self/ns/{kind}"):
                names.append(os.readlink(f"/proc/self/ns/{kind}"))
    except OSError:
        return ""
    return " ".join(names)


def state_of(pid):
    """(state, start in ticks since the boot) of a process, as /proc has them; ("", "") where it does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            after_name = f.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return after_name[0], after_name[19]


def is_alive(holder):
    """Whether the holder of a lock runs: True or False where this system can prove it, else None."""
    pid = holder["pid"]
    system = this_system()
    if not system or holder["system"] != system or not isinstance(pid, int) or pid < 1:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    state, started = state_of(pid)
    if not started or not holder["started"]:
        return None
    return state not in "ZX" and started == holder["started"]


class Lock:
    """The lock of a folder. `take` it, then `confirm` it before every write that would destroy another's, `release` it
    at the end. A thread of its own makes all its beats and removes it, so no two of its writes are on their way."""

    def __init__(self, folder):
        self.folder = folder
        self.path = os.path.join(folder, LOCK)
        holder = this_process()
        self.token = holder["token"]
        self.storage = open_storage(self.path, holder)
        self.beats = 0
        self.found = None  # the lock as this process wrote it last
        self.confirmed = -math.inf  # uptime before the newest beat that arrived
        self.is_lost = self.is_late = False
        self.asked = threading.Event()  # for a beat at once
        self.over = threading.Event()
        self.keeper = threading.Thread(target=self._renew, name="lock", daemon=True)

    def acquire(self, in_use):
        """Hold the lock; where another's is there, wait until that one is known to be dead. Raises in_use(holder)
        where it lives, UserError or OSError where the lock cannot be read or written."""
        watched = None  # a version
        waited = looked = 0
        for _ in range(MOST):
            found = persist(self.storage.find, self.path)
            alive = is_alive(found.holder) if found else False
            if alive:
                raise in_use(found.holder)
            if alive is None:
                if watched is None:
                    watched = found.version
                    print_waiting(self.folder, found.holder)
                elif found.version != watched:
                    raise in_use(found.holder)
                else:
                    # a longer gap is one in which storage, or this process, may have been away
                    waited += min(uptime() - looked, 2 * POLL)
                looked = uptime()
                if waited < DEAD:
                    time.sleep(POLL)
                    continue
            if persist(lambda: self._write(found), self.path):
                if found:
                    print_taken_over(self.folder, found.holder, alive)
                self.keeper.start()
                return
            time.sleep(0.1)  # another was faster; look who
        raise OSError(errno.EBUSY, "its lock cannot be replaced")

    def confirm(self):
        """Return while no other process can have taken the lock: at once after a beat that arrived, else after another
        one. Raises Unavailable where none arrives; where the lock is another's, the process ends."""
        for _ in range(5 * ANSWER):
            if not self.is_lost and uptime() - self.confirmed <= FRESH:
                return
            self.asked.set()
            time.sleep(0.2)
        raise Unavailable(
            f"{self.path} could not be renewed for {uptime() - self.confirmed:.0f} s; nothing can be saved there until "
            f"it can, since another process might hold it."
        )

    def release(self):
        """Remove the lock, if it is still this process's."""
        self.over.set()
        self.asked.set()
        if self.keeper.is_alive() and not self.is_lost:
            self.keeper.join(RELEASE)

    def _renew(self):
        while not self.over.is_set():
            late = uptime() - self.confirmed > BEAT
            self.asked.wait(POLL if late else BEAT)
            self.asked.clear()
            if not self.over.is_set():
                self._try_beat()
        if not self.is_lost:
            with contextlib.suppress(OSError, UserError):
                persist(self._remove, self.path)

    def _try_beat(self):
        """A beat; one that fails is made again soon. Ends the process where the lock is another's."""
        before = self.confirmed
        try:
            held = self._beat()
        except Exception as e:  # every kind of storage has errors of its own
            if uptime() - before > FRESH and not self.is_late:
                self.is_late = True
                why = f"{type(e).__name__}: {first_line(e)}"
                warn(f"{self.path} could not be renewed for {FRESH:.0f} s ({why}); trying again")
            return
        if not held:
            self.is_lost = True
            gap = uptime() - before
            interrupts.end(
                75,
                f"error: {self.folder}: another process may have written there since this one gave no sign of life for "
                f"{gap:.0f} s; this one ends. The same command resumes when the other has ended.",
            )
        elif self.is_late:
            self.is_late = False
            say(f"{self.path} is renewed again")

    def _beat(self):
        """Renew the lock. Returns whether this process has held it without a break."""
        before = self.confirmed
        if self._write(self.found):
            return True
        if self.seen:
            return False
        # It is gone. A person removed it; or another took it for dead, wrote, and is gone too, which takes DEAD. So the
        # time is looked at before the write, and after it: this process may be paused between.
        in_time = uptime() - before <= FRESH
        return in_time and self._write(None) and uptime() - before <= FRESH

    def _write(self, found):
        """Make the lock this process's where it is still as found. Returns whether it is then; else `seen` is what is
        there. Raises what storage raises."""
        for _ in range(TRIES):
            began = uptime()
            self.beats += 1
            written = self.storage.put(found, self.beats)
            if written:
                self.found = written
                self.confirmed = began
                return True
            self.seen = found = self.storage.find()
            if not found or found.token != self.token:
                return False
            # It was written, its answer lost. Nobody knows when, so it is written again.
        raise ConnectionError("its answers get lost")

    def _remove(self):
        found = self.storage.find()
        if found and found.token == self.token:
            self.storage.remove(found)


def print_waiting(folder, holder):
    who = f"process {holder['pid']} on {holder['host']}"
    say(
        f"{folder}: {who} has held its lock since {holder['since']}; waiting up to {DEAD:g} s for a sign of its life"
    )


def print_taken_over(folder, holder, alive):
    """alive: of `is_alive`."""
    who = f"process {holder['pid']}"
    if alive is None:
        how = f"on {holder['host']}, which gave no sign of life for {DEAD:g} s"
        say(f"{folder} is taken over from {who} {how}")
    else:
        say(f"{folder} is taken over from {who}, which ended without releasing it")


def is_held(folder):
    """Whether a process holds a folder, or one that died did. Raises UserError."""
    path = os.path.join(folder, LOCK)
    return persist(open_storage(path, {}).find, path) is not None


@contextlib.contextmanager
def alone_in(folder, flag, value, other):
    """Hold `folder`, local or remote, which is made if need be: until the end no other process gets past here for it.
    What a dead process held is taken over, without the files that it left unfinished. Yields the `Lock`.
    flag, value: what named the folder; other: the flag to name another by. Raises UserError."""

    def in_use(holder):
        who = f"process {holder['pid']} on {holder['host']}"
        has = f"has been writing to {folder} since {holder['since']}"
        remedy = f"wait for its end, or give another {{{other}}}"
        return Unavailable(f"{who} {has}", flag=flag, value=value, remedy=remedy, **{other: None})

    lock = Lock(folder)
    interrupts.given_back.append(lock.release)
    try:
        try:
            lock.acquire(in_use)
        except OSError as e:
            why = f"{folder} cannot be written ({e.strerror or e})"
            remedy = "give a folder that can be, with room in it"
            raise UserError(why, flag=flag, value=value, remedy=remedy) from None
        lock.confirm()  # this process may have been paused since
        if not is_remote(folder):
            remove_parts(folder)
        yield lock
    finally:
        interrupts.given_back.remove(lock.release)
        lock.release()
