"""The lock of a folder, which one process alone may write to. Imports no jax.

The lock is a file or object called `lock` in the folder. It names its holder, the process that made it, which renews it
every BEAT seconds. A process that finds another's lock asks the operating system whether the holder still runs, if both
run on the same system. Otherwise it waits to see whether the lock is renewed. Nothing compares host names, which
containers share, or the clocks of two machines. A holder that was paused, or cut off from the storage, learns at its
next beat whether it still holds the lock. Until then `Lock.confirm` lets it write nothing.
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
BEAT = 20  # seconds between two beats, which is 4,320 small writes a day
# Seconds without a beat after which a holder counts as dead. Five beats in a row may fail before, and NFS may show a
# beat 60 s late.
DEAD = 120
# Seconds after a beat in which no other process can have taken over the lock. It is half of DEAD, so that a write which
# starts just before they are over still has time to end.
FRESH = DEAD / 2
POLL = 5  # seconds between two reads of another process's lock
# Seconds that a release may take. A lock that could not be removed by then is taken over by the next process.
RELEASE = 10
TRIES = 3  # of a write whose answer was lost
# Reads of a lock before `acquire` gives up. Waiting for DEAD seconds takes 24 of them, even if every answer is late,
# and no process loses several hundred races.
MOST = 500


def uptime():
    """Seconds of a clock of this machine that nobody sets, and that also counts the time while it was suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def this_process():
    """What a lock records about this process as its holder: for people to read, and for `is_alive`."""
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
    """A name for the system in which this process has its pid. Two processes have the same one only if a pid means the
    same process to both: it joins the id of the boot and the namespaces of pids and times. "" where it is unknown."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # this /proc shows the pids of another namespace
        with open("/proc/sys/kernel/random/boot_id") as f:
            names = [f.read().strip()]
        for namespace in ("pid", "time"):
            if os.path.lexists(f"/proc/self/ns/{namespace}"):
                names.append(os.readlink(f"/proc/self/ns/{namespace}"))
    except OSError:
        return ""
    return " ".join(names)


def state_of(pid):
    """(state letter, start in ticks since the boot) of a process, both as strings from /proc; ("", "") where they are
    unknown."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            after_name = f.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return after_name[0], after_name[19]


def is_alive(holder):
    """Whether the holder of a lock still runs: True or False where this system can prove it, else None."""
    pid = holder["pid"]
    system = this_system()
    if not system or holder["system"] != system or not isinstance(pid, int) or pid < 1:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        pass
    state, started = state_of(pid)
    if not started or not holder["started"]:
        return None
    # Z and X are processes that have ended. Another start means that the pid was given to a new process.
    return state not in "ZX" and started == holder["started"]


class Lock:
    """The lock of a folder.

    Call `acquire` first, `confirm` before every write that could destroy another process's files, and `release` at the
    end. After `acquire`, one thread makes all beats and also removes the lock, so two writes of it never overlap.
    """

    def __init__(self, folder):
        self.folder = folder
        self.path = os.path.join(folder, LOCK)
        holder = this_process()
        self.token = holder["token"]
        self.storage = open_storage(self.path, holder)
        self.beats = 0
        self.found = None  # the lock as this process last wrote it
        self.confirmed = -math.inf  # `uptime` just before the newest beat that succeeded
        self.is_lost = False  # whether another process has taken the lock over
        self.is_late = False  # whether a warning about missing beats was printed
        self.asked = threading.Event()  # set to ask for a beat at once
        self.over = threading.Event()  # set to end the thread
        self.keeper = threading.Thread(target=self._renew, name="lock", daemon=True)

    def acquire(self, in_use):
        """Make the lock this process's. Where another process has it, wait until that one is known to be dead.

        Raises in_use(holder) if the other process is alive, and UserError or OSError if the lock cannot be read or
        written.
        """
        watched = None  # version of the lock when it was first read; a later one is a beat, so its holder is alive
        waited = 0  # seconds without a beat
        last_read = 0  # `uptime` of the read before
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
                    # In a longer gap the storage or this process may have been away: that time proves nothing.
                    waited += min(uptime() - last_read, 2 * POLL)
                last_read = uptime()
                if waited < DEAD:
                    time.sleep(POLL)
                    continue
            if persist(lambda: self._write(found), self.path):
                if found:
                    print_taken_over(self.folder, found.holder, alive)
                self.keeper.start()
                return
            time.sleep(0.1)  # another process was faster; read the lock again to see which
        raise OSError(errno.EBUSY, "its lock cannot be replaced")

    def confirm(self):
        """Return once it is certain that no other process holds the lock: at once if the newest beat is fresh, else
        after one more beat. Raises Unavailable where no beat succeeds. The process ends where the lock is another's."""
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
        """Remove the lock if it is still this process's."""
        self.over.set()
        self.asked.set()
        if self.keeper.is_alive() and not self.is_lost:
            self.keeper.join(RELEASE)

    def _renew(self):
        """The thread: a beat every BEAT seconds, more often after a failed one. At the end it removes the lock."""
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
        """Make one beat. A failed one is only reported, since `_renew` soon makes another. Ends the process where the
        lock is another's."""
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
        """Renew the lock. Returns whether this process has held it ever since the last beat."""
        before = self.confirmed
        if self._write(self.found):
            return True
        if self.seen:
            return False
        # The lock is gone. Either a person removed it; or another process took it over, wrote to the folder and
        # released it, which takes at least DEAD seconds. So the time since the last beat decides. It is checked both
        # before the write and after it, since this process may be paused in between.
        in_time = uptime() - before <= FRESH
        return in_time and self._write(None) and uptime() - before <= FRESH

    def _write(self, found):
        """Write the lock as this process's, if it is still as `found`. Returns whether it is this process's now; if
        not, `seen` is what is there instead. Raises what the storage raises."""
        for _ in range(TRIES):
            start = uptime()
            self.beats += 1
            written = self.storage.put(found, self.beats)
            if written:
                self.found = written
                self.confirmed = start
                return True
            found = self.storage.find()
            self.seen = found
            if not found or found.token != self.token:
                return False
            # The lock was written and the answer was lost. When it was written is unknown, so it is written again.
        raise ConnectionError("its answers get lost")

    def _remove(self):
        """Remove the lock if it is this process's."""
        found = self.storage.find()
        if found and found.token == self.token:
            self.storage.remove(found)


def print_waiting(folder, holder):
    """Print that another process may hold the folder and is being watched."""
    who = f"process {holder['pid']} on {holder['host']}"
    say(
        f"{folder}: {who} has held its lock since {holder['since']}; waiting up to {DEAD:g} s for a sign of its life"
    )


def print_taken_over(folder, holder, alive):
    """Print that a dead holder's lock was taken over. alive: False if this system proved its death, None if the holder
    only gave no sign of life."""
    who = f"process {holder['pid']}"
    if alive is None:
        how = f"on {holder['host']}, which gave no sign of life for {DEAD:g} s"
        say(f"{folder} is taken over from {who} {how}")
    else:
        say(f"{folder} is taken over from {who}, which ended without releasing it")


def is_held(folder):
    """Whether a folder has a lock, be it of a running process or of one that died. Raises UserError."""
    path = os.path.join(folder, LOCK)
    return persist(open_storage(path, {}).find, path) is not None


@contextlib.contextmanager
def alone_in(folder, flag, value, other):
    """Hold the lock of `folder`, local or remote, for the length of a `with` block, and yield the `Lock`.

    The folder is made if need be. No other process enters such a block for it meanwhile. The lock of a dead process is
    taken over, and the files that it left unfinished are removed. flag, value: the flag that named the folder. other:
    the flag that would name another one. Raises UserError.
    """

    def in_use(holder):
        who = f"process {holder['pid']} on {holder['host']}"
        has = f"has been writing to {folder} since {holder['since']}"
        remedy = f"wait for its end, or give another {{{other}}}"
        return Unavailable(f"{who} {has}", flag=flag, value=value, remedy=remedy, **{other: None})

    lock = Lock(folder)
    interrupts.releases.append(lock.release)
    try:
        try:
            lock.acquire(in_use)
        except OSError as e:
            why = f"{folder} cannot be written ({e.strerror or e})"
            remedy = "give a folder that can be, with room in it"
            raise UserError(why, flag=flag, value=value, remedy=remedy) from None
        lock.confirm()  # this process may have been paused since `acquire`
        if not is_remote(folder):
            remove_parts(folder)
        yield lock
    finally:
        interrupts.releases.remove(lock.release)
        lock.release()
