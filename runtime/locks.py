"""A lock of a folder, which one process alone may write to: the file `lock` in it tells which. Imports no jax."""

import contextlib
import fcntl
import inspect
import json
import os
import secrets
import shlex
import socket
import sys
import time

from runtime import interrupts
from runtime.files import filesystem, is_remote, persist, read_file, remove_parts
from runtime.messages import UserError, say

LOCK = "lock"  # the file in a folder that tells which process writes there
BEGINNING = b'{"host": '  # of every such file


def process_began(pid):
    """When the process `pid` began, in clock ticks since its machine did; None where none of that number runs here."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
        state, *fields = f.read().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])  # zombies and dead ones do not run


MACHINE = {  # files that tell one machine, and one start of it, from others
    "machine": "/etc/machine-id",
    "boot": "/proc/sys/kernel/random/boot_id",
}


def this_process():
    """What a lock tells of its holder. Its pid and host alone may be another's too, later or in a container."""
    me = dict(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=process_began(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        command=shlex.join(sys.argv),
        token=secrets.token_hex(8),
    )
    for name, path in MACHINE.items():
        with contextlib.suppress(OSError), open(path) as f:
            me[name] = f.read().strip()
    with contextlib.suppress(OSError):
        me["pids"] = os.readlink("/proc/self/ns/pid")  # the namespace of its pid
    return me


def holder_in(content):
    """What the content of a lock tells of its holder: {} where it is torn or something else."""
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def is_gone(holder, me, dropped=None):
    """Whether the holder of a lock has surely ended.

    dropped: whether the system says that it dropped its lock; the system may not know of other hosts. None where it
    keeps no locks: then only processes of this machine are known.
    """
    keys = ("host", "machine", "boot", "pids")
    same = {key for key in keys if me.get(key) and holder.get(key) == me[key]}
    if dropped:
        return bool(not holder or same & {"host", "boot"})
    if "boot" in same:
        return "pids" in same and process_began(holder.get("pid")) != holder.get("began")
    restarted = "boot" in holder and "boot" in me
    return same >= {"host", "machine"} and restarted


def system_lock(file):
    """Whether this process now has the system's lock of an open file, which ends with the process; None where the file
    system has no such locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_at(file, path):
    """Whether the file is open, and at `path`."""
    with contextlib.suppress(OSError, ValueError):  # a signal's thread may have closed it
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def lock_file(path, me, in_use):
    """Lock a local folder, made if need be, by the file `path`: (what a dead holder left in it, function that releases
    the folder). Raises in_use(content, is it alive) where another process holds it, and OSError."""
    made = missing_folders(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    file = None
    while not (file and is_at(file, path)):  # else its holder removed it just now
        file = open(path, "a+b", buffering=0)
        dropped = system_lock(file)
        file.seek(0)
        left = file.read()
        foreign = not BEGINNING.startswith(left[: len(BEGINNING)])  # some user's file of that name
        if dropped is False or foreign or (left and not is_gone(holder_in(left), me, dropped)):
            raise in_use(left, dropped is False)

    def release():
        if is_at(file, path):
            os.remove(path)
        file.close()
        with contextlib.suppress(OSError):  # a folder with something in it stays
            for folder in made:
                os.rmdir(folder)

    try:
        file.truncate(0)
        file.write(json.dumps(me).encode())
    except OSError:
        release()
        raise
    return left, release


def missing_folders(path):
    """The folders above `path` that do not exist, the deepest first."""
    missing = []
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def lock_object(path, me, in_use):
    """`lock_file` of a remote folder, by an object."""
    fs, there = filesystem(path)
    content = json.dumps(me).encode()
    left = read_file(path)
    if left is not None and not is_gone(holder_in(left), me):
        raise in_use(left, False)
    # Of two processes that create it at once one fails, where the storage and its library support that.
    known = inspect.signature(getattr(fs, "_pipe_file", fs.pipe_file)).parameters
    how = {"mode": "create"} if left is None and "mode" in known else {}
    with contextlib.suppress(FileExistsError):
        persist(lambda: fs.pipe_file(there, content, **how), path)
    time.sleep(1)  # where they do not, one of the two finds the other's content now
    now = read_file(path)
    if now != content:
        raise in_use(now or b"", False)

    def release():
        if read_file(path) == content:
            persist(lambda: fs.rm_file(there), path)

    return left or b"", release


@contextlib.contextmanager
def alone_in(folder, flag, other):
    """Hold `folder`, local or remote, which is made if need be: until the end no other process gets past here for it.

    What a dead process of this machine held is taken over, which is printed, and files that it left unfinished are
    removed. flag: what named the folder, with its value; other: the flag to name another by. Raises UserError where
    another process holds it or it cannot be written.
    """
    path = os.path.join(folder, LOCK)
    lock = lock_object if is_remote(folder) else lock_file

    def in_use(content, alive):
        holder = {"pid": "?", "host": "a host", "since": "some time"} | holder_in(content)
        who = f"process {holder['pid']} on {holder['host']} has been writing to {folder} since {holder['since']}"
        advice = "wait for its end, or" if alive else f"if it runs no more, remove {path}, else"
        return UserError(f"{flag}: {who}; {advice} give another {other}.")

    try:
        left, release = lock(path, this_process(), in_use)
    except OSError as e:
        why = f"{folder} cannot be written ({e.strerror or e})"
        raise UserError(f"{flag}: {why}; give a folder that can be, with room in it.") from None
    interrupts.given_back.append(release)
    try:
        if not is_remote(folder):
            remove_parts(folder)
        if left:
            pid = holder_in(left).get("pid", "?")
            say(f"{folder} is taken over from process {pid}, which ended without a word")
        yield
    finally:
        interrupts.given_back.remove(release)
        with contextlib.suppress(OSError, UserError):  # what stays, the next one takes over
            release()
