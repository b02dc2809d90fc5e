"""A lock of a folder, which one process alone may write to: the file `lock` in it tells which. Imports no jax."""

import contextlib
import fcntl
import json
import os
import shlex
import socket
import sys
import time

from runtime import interrupts
from runtime.files import ask, is_remote, read_file, remove_parts
from runtime.messages import UserError, say

LOCK = "lock"  # the file in a folder that tells which process writes there


def this_process():
    """What a lock records of its holder, as JSON."""
    holder = dict(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        command=shlex.join(sys.argv),
    )
    return json.dumps(holder).encode()


def holder_in(content):
    """What the content of a lock, which may be torn, records of its holder."""
    unknown = {"pid": "?", "host": "a host", "since": "some time"}
    with contextlib.suppress(ValueError, TypeError):
        return unknown | json.loads(content)
    return unknown


def system_lock(file):
    """Whether this process now has the system's lock of an open file; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def lock_file(path, in_use):
    """Lock a local folder by the file `path`: (what a dead holder left in it, function that releases it), or raise."""
    folder = os.path.dirname(path) or "."
    is_new = not os.path.lexists(folder)
    os.makedirs(folder, exist_ok=True)
    file = open(path, "a+b", buffering=0)
    locked = system_lock(file)
    file.seek(0)
    left = file.read()
    # The system knows of the processes of this machine, and not always of others.
    here = holder_in(left)["host"] == socket.gethostname()
    held = locked is False or not is_at(file, path)  # its holder may have removed it just now
    if held or (left and not (locked and here)):
        file.close()
        raise in_use(left, held)

    def release():
        if is_at(file, path):
            os.remove(path)
        file.close()
        if is_new:
            os.rmdir(folder)  # where nothing is in it

    file.truncate(0)
    file.write(this_process())
    return left, release


def is_at(file, path):
    """Whether the file is open, and at `path`."""
    with contextlib.suppress(OSError, ValueError):  # a signal's thread may have closed it
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def lock_object(path, in_use):
    """`lock_file` of a remote folder, by an object that is created only where there is none."""
    mine = this_process()
    left = read_file(path) or b""
    if left:
        holder = holder_in(left)
        may_run = holder["pid"] != os.getpid() and os.path.exists(f"/proc/{holder['pid']}")
        if may_run or holder["host"] != socket.gethostname():
            raise in_use(left, False)
        ask(path, "rm_file")
    try:
        ask(path, "pipe_file", mine, mode="create")
    except FileExistsError:
        now = read_file(path) or b""
        if now != mine:  # another process was faster; else a try whose answer got lost
            raise in_use(now, False) from None

    def release():
        if read_file(path) == mine:
            ask(path, "rm_file")

    return left, release


@contextlib.contextmanager
def alone_in(folder, flag, other):
    """Hold `folder`, local or remote, which is made if need be: until the end no other process gets past here for it.
    What a dead process of this machine held is taken over, without the files that it left unfinished.
    flag: what named the folder, with its value; other: the flag to name another by. Raises UserError."""
    path = os.path.join(folder, LOCK)
    lock = lock_object if is_remote(folder) else lock_file

    def in_use(content, alive):
        holder = holder_in(content)
        who = f"process {holder['pid']} on {holder['host']} has been writing to {folder} since {holder['since']}"
        advice = "wait for its end, or" if alive else f"if it runs no more, remove {path}, else"
        return UserError(f"{flag}: {who}; {advice} give another {other}.")

    try:
        left, release = lock(path, in_use)
    except OSError as e:
        why = f"{folder} cannot be written ({e.strerror or e})"
        raise UserError(f"{flag}: {why}; give a folder that can be, with room in it.") from None
    interrupts.given_back.append(release)
    try:
        if not is_remote(folder):
            remove_parts(folder)
        if left:
            pid = holder_in(left)["pid"]
            say(f"{folder} is taken over from process {pid}, which ended without releasing it")
        yield
    finally:
        interrupts.given_back.remove(release)
        with contextlib.suppress(OSError, UserError):  # what stays, the next one takes over
            release()
