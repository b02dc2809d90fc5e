"""Local files that appear whole, and the same for gs:// and s3:// by fsspec."""

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import logging
import math
import os
import random
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time

import fsspec

from runtime import interrupts
from runtime.messages import Unavailable, UserError, first_line, warn

# They would print a traceback of each failed try; `persist` reports failures in a sentence.
LIBRARIES = "gcsfs", "s3fs", "fsspec", "google", "aiohttp", "aiobotocore", "botocore", "asyncio"
WAITS = (1, 2, 4, 8, 16, 32)  # seconds before each further try: a minute's failure costs no run
DENIED = 5  # tries where access is denied, in 15 s: rights may be on their way, a person should not wait for a minute
FIRST, PAUSE = 2, 5  # seconds until a line about storage that does not answer, and between two
# What Orbax takes for something else in a path, of which it makes a glob and an address: brackets, **, a backslash,
# gs:/ with one slash, and bytes that are not UTF-8.
MISREAD = re.compile(r"[][\\\ud800-\udfff]|\*\*|gs:/(?!/)")
PART = re.compile(r"\.[0-9a-f]{16}\.part$")  # what only names of `part_of` end in


def is_remote(path):
    return "://" in path


def filesystem(path):
    """(fsspec's file system of a local path or remote address, the path in it). Raises UserError."""
    kind = path.split("://")[0]
    settings = {}
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.CRITICAL)
    if kind in ("gs", "gcs"):
        import aiohttp

        # its own limits, but for 30 s until it is connected, six times, and 5 minutes without an answer
        limits = aiohttp.ClientTimeout(total=300, sock_connect=5, sock_read=30)
        # also for Orbax, which opens the bucket itself; what is listed there changes meanwhile
        fsspec.config.conf["gs"] = dict(requests_timeout=limits, use_listings_cache=False)
    if kind == "s3":
        settings["config_kwargs"] = dict(connect_timeout=5)
        settings["use_listings_cache"] = False
    try:
        return fsspec.core.url_to_fs(path, **settings)
    except (ImportError, ValueError) as e:
        raise UserError(
            f"{path}: is no address that can be used ({e}); bash setup_tpu.sh gs, or s3, adds the package for that."
        ) from None


class Waiting:
    """What is asked of remote storage and not done: a line tells of it after FIRST seconds or its first failure, and
    then every `pause`. A thread prints it, since libraries try again inside one call, and one that connects may hang.
    Where many calls are under way, as of a corpus that is read, one line is of all."""

    def __init__(self):
        self.calls = {}  # {a call: [path, when it began, what its last try raised, in words]}
        self.lock = threading.Lock()
        self.thread = None
        self.said = -math.inf  # when the last line was printed
        self.pause = PAUSE

    @contextlib.contextmanager
    def on(self, path):
        """A call while it is under way: what `failed` takes."""
        call = object()
        with self.lock:
            self.calls[call] = [path, time.monotonic(), ""]
            if not self.thread or not self.thread.is_alive():  # as after a fork
                self.thread = threading.Thread(target=self._watch, name="waiting", daemon=True)
                self.thread.start()
        try:
            yield call
        finally:
            with self.lock:
                del self.calls[call]

    def failed(self, call, error):
        with self.lock:
            self.calls[call][2] = f" ({error})"
            self._tell(call, "trying again")

    def _watch(self):
        """Until nothing is under way."""
        while True:
            time.sleep(1)
            with self.lock:
                if not self.calls:
                    self.thread = None
                    return
                call = min(self.calls, key=lambda call: self.calls[call][1])
                waited = time.monotonic() - self.calls[call][1]
                if waited >= FIRST:
                    self._tell(call, f"not done after {waited:.0f} s, still waiting")

    def _tell(self, call, words):
        if time.monotonic() - self.said < self.pause:
            return
        self.said = time.monotonic()
        path, _, error = self.calls[call]
        others = f" and {len(self.calls) - 1} more" if len(self.calls) > 1 else ""
        warn(f"{path}{others}{error}: {words}")


WAITING = Waiting()


def persist(work, path, patience=None):
    """work(), which reads or writes `path`, tried again with exponential back-off while remote storage fails, which
    `Waiting` tells. Raises Unavailable, after `patience` seconds, where storage may answer later, and UserError where a
    person must act. By default that is about a minute, and soon where access is denied. FileNotFoundError and its kin
    are raised at once."""
    if not is_remote(path):
        return work()
    with WAITING.on(path) as call:
        return persist_in(call, work, path, patience)


def persist_in(call, work, path, patience):
    """`persist` in a call of `Waiting`."""
    began = time.monotonic()
    pauses = itertools.chain(WAITS, itertools.repeat(WAITS[-1]) if patience else [None])
    for tries, pause in enumerate(pauses, 1):
        try:
            return work()
        except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
            raise
        except UserError:  # of `filesystem`
            raise
        except Exception as e:  # every kind of storage has errors of its own
            said = f"{type(e).__name__}: {first_line(e)}"
            # libraries have tried again, too
            late = time.monotonic() > began + (patience or sum(WAITS))
            if pause is None or late or (not patience and tries == DENIED and is_denied(e)):
                if needs_a_person(e):
                    advice = "check that it exists and your credentials give access to it"
                    raise UserError(f"{path} cannot be used ({said}); {advice}.") from None
                raise Unavailable(
                    f"{path} cannot be used ({said}); rerun when it answers."
                ) from None
            WAITING.failed(call, said)
            time.sleep(pause * random.uniform(0.5, 1.0))  # hosts should not all retry at once


def status_of(error):
    """The HTTP status that a library's error tells; None where it tells none."""
    response = getattr(error, "response", None)  # of botocore
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = getattr(error, "code", None) or getattr(error, "status", None)
    return int(code) if str(code).isdecimal() else None


def lacks_credentials(error):
    return type(error).__name__ in ("DefaultCredentialsError", "NoCredentialsError")


def is_denied(error):
    """Whether an error of a library for storage means missing rights."""
    denied = isinstance(error, PermissionError) or str(error).startswith("Forbidden")
    return lacks_credentials(error) or denied or status_of(error) in (401, 403)


def needs_a_person(error):
    """Whether asking once more is no use: rights are missing, or what was asked is wrong. A status of 401 may pass, as
    when a token is renewed, and so may the lack of a connection."""
    status = status_of(error)
    if status is None:
        return is_denied(error)
    return 400 <= status < 500 and status not in (401, 408, 409, 425, 429)


def ask(path, method, *args, patience=None, **settings):
    """What a method of fsspec's file system answers for a path or address. Raises as `persist` does."""

    def work():
        fs, there = filesystem(path)  # here: looking for credentials may take as long as asking
        return getattr(fs, method)(there, *args, **settings)

    return persist(work, path, patience)


def list_folder(folder, detail=True):
    """What a local folder or remote address holds, as fsspec tells it: {"name": path, ...} of each, or its path alone.
    Nothing where it is not there. Raises UserError where it cannot be listed."""
    try:
        return ask(folder, "ls", detail=detail)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise UserError(f"{folder}: cannot be listed ({e.strerror or e}).") from None


def names_in(folder):
    """Names of what a local folder or remote address holds, as `list_folder` lists it."""
    return [os.path.basename(path.rstrip("/")) for path in list_folder(folder, detail=False)]


def check_plain(path):
    """Raises OSError where no plain file can be written at the local `path`, as where a folder or a pipe is."""
    with contextlib.suppress(FileNotFoundError):
        if path.endswith("/") or not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_run_path(path, other="place"):
    """Raises UserError where no checkpoint saved at the path or address could be read back; symlinks are followed.
    other: what to give another of."""
    path = path if is_remote(path) else os.path.realpath(path)
    if found := MISREAD.search(path):
        raise UserError(
            f"{path}: no checkpoint can be saved in a path with {found[0]} in it; give another {other}."
        )


def part_of(path):
    """A name beside the local `path` that nothing has, for what becomes `path` when it is whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{name}.{secrets.token_hex(8)}.part")


def remove_parts(folder, name="*"):
    """Remove what killed programs left unfinished of a name in a local folder, by default of all in it."""
    name = name if name == "*" else glob.escape(name)
    for path in glob.glob(os.path.join(glob.escape(folder), f"{name}.*.part")):
        if PART.search(path):
            with contextlib.suppress(OSError), locked(path, fcntl.LOCK_NB):
                # not reached while a program writes it
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


@contextlib.contextmanager
def locked(path, how=0):
    """Hold the system's lock of a file or folder, which ends with the process. With LOCK_NB raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        except OSError:  # also from a file system without locks
            if how:
                raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def removed(remove):
    """Call `remove` at the end, also where a signal ends the process meanwhile."""
    interrupts.given_back.append(remove)
    try:
        yield
    finally:
        remove()
        interrupts.given_back.remove(remove)


@contextlib.contextmanager
def replacing(path, lasting=True):
    """A binary file to write and read that becomes the local `path`, or the target of that symlink, when it is whole;
    if `lasting`, also where the machine fails right after. Raises OSError."""
    check_plain(path)
    path = os.path.realpath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    remove_parts(*os.path.split(path))
    part = part_of(path)

    def remove():
        with contextlib.suppress(OSError):
            os.remove(part)

    with removed(remove):
        with interrupts.ending:
            f = open(part, "x+b")
        with f:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(f, fcntl.LOCK_EX)
            yield f
            f.flush()
            if lasting:
                os.fsync(f.fileno())
        with contextlib.suppress(OSError):
            os.chmod(part, stat.S_IMODE(os.stat(path).st_mode))
        with interrupts.ending:
            os.replace(part, path)  # `remove` finds nothing then


@contextlib.contextmanager
def appearing(folder):
    """A new folder that becomes `folder` when all is written, and is removed where that fails. Raises UserError."""
    path = os.path.normpath(folder)
    remove_parts(*os.path.split(path))
    part = part_of(path)
    try:
        with removed(lambda: shutil.rmtree(part, ignore_errors=True)):
            with interrupts.ending:
                os.makedirs(part)
            with locked(part):
                yield part
                os.sync()
                with interrupts.ending:
                    os.rename(part, folder)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror or e}).") from None


def write_file(path, content):
    """Write bytes or text to a path or address; a reader sees the old content or the new. Raises UserError."""
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):  # an object appears whole when its upload ends
        return ask(path, "pipe_file", content)
    try:
        with replacing(path) as f:
            f.write(content)
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}); give another place.") from None


def check_writable(path, flag):
    """Raises UserError where no file can be written at a local `path` that `flag` named: before one works for it."""
    if not path or is_remote(path):
        return
    try:
        check_plain(path)
        at = os.path.dirname(os.path.realpath(path))
        while not os.path.exists(at):
            at = os.path.dirname(at)
        tempfile.TemporaryFile(dir=at).close()
    except OSError as e:
        why = f"cannot be written ({e.strerror})"
        raise UserError(why, flag=flag, value=path, remedy="give another") from None


def check_not_pipe(path):
    """Raises UserError where what is at a local `path` may never end, as a named pipe or a symlink to a device: whoever
    reads it would wait. One that was given as such, /dev/stdin or a shell's /dev/fd/63, is read."""
    if is_remote(path) or path.startswith("/dev/"):
        return
    with contextlib.suppress(OSError):  # whoever reads it will say so
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise UserError("is a pipe or a device", value=path, remedy="put a file there")


def read_file(path):
    """Bytes of a local file or remote object, None where there is none. Raises UserError where it cannot be read."""
    check_not_pipe(path)
    try:
        return ask(path, "cat_file")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise UserError(f"cannot be read ({e.strerror or e})", value=path) from None


def read_json(*path):
    """The object in a JSON file, its path in parts; {} where there is none. Raises UserError where it is no object."""
    path = os.path.join(*path)
    content = read_file(path)
    try:
        content = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as e:
        raise UserError(f"is not JSON ({e})", value=path, remedy="restore it") from None
    if not isinstance(content, dict):
        said = f"holds {content!r:.40}, not a JSON object"
        raise UserError(said, value=path, remedy="restore it")
    return content


def write_json(path, content):
    """Write an object as JSON, as `write_file` does."""
    write_file(path, to_json(content, indent=1) + "\n")


def to_json(content, **settings):
    """JSON of `content`, with null for numbers that are not finite, since it has no others; settings: of json.dumps."""

    def finite(x):
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [finite(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(content), **settings)
