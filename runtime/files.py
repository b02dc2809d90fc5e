"""Files and folders, local or in storage (gs:// and s3://, through fsspec).

A reader never sees a file that is half written. Calls to remote storage are repeated while it fails (`persist`).
"""

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

# Libraries whose loggers are silenced: they would print a traceback of each failed try, which `persist` reports in a
# sentence.
LIBRARIES = "gcsfs", "s3fs", "fsspec", "google", "aiohttp", "aiobotocore", "botocore", "asyncio"
# Seconds before each further try. They add up to a minute, so an outage of that length ends no run.
WAITS = (1, 2, 4, 8, 16, 32)
# Tries where access is denied, which take 15 s. New rights may need a moment to arrive, but a person who lacks them
# should not wait for a minute.
DENIED = 5
FIRST = 2  # seconds until a line is printed about a storage that does not answer
PAUSE = 5  # seconds between two such lines
# What Orbax misreads in a path, since it turns paths into globs and addresses: brackets, **, a backslash, gs:/ with one
# slash, and bytes that are not UTF-8.
MISREAD = re.compile(r"[][\\\ud800-\udfff]|\*\*|gs:/(?!/)")
# The end of the names that `part_of` makes, and of no others.
PART = re.compile(r"\.[0-9a-f]{16}\.part$")


def is_remote(path):
    """Whether a path is an address in remote storage, such as gs://bucket/folder."""
    return "://" in path


def filesystem(path):
    """(fsspec's file system of a local path or remote address, the path in it). Raises UserError."""
    protocol = path.split("://")[0]
    settings = {}
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.CRITICAL)
    if protocol in ("gs", "gcs"):
        import aiohttp

        # By default gcsfs waits 30 s for a connection, six times, and 5 minutes for an answer.
        limits = aiohttp.ClientTimeout(total=300, sock_connect=5, sock_read=30)
        # Set for the whole process, since Orbax opens buckets itself. Listings are not cached: they change meanwhile.
        fsspec.config.conf["gs"] = dict(requests_timeout=limits, use_listings_cache=False)
    if protocol == "s3":
        settings["config_kwargs"] = dict(connect_timeout=5)
        settings["use_listings_cache"] = False
    try:
        return fsspec.core.url_to_fs(path, **settings)
    except (ImportError, ValueError) as e:
        raise UserError(
            f"{path}: is no address that can be used ({e}); bash setup_tpu.sh gs, or s3, adds the package for that."
        ) from None


class Waiting:
    """Reports calls to remote storage that take long.

    A line is printed FIRST seconds after a call started, or when it first fails, and then every `pause` seconds. A
    thread prints it, since libraries repeat requests inside one call, and a call that connects may hang. When many
    calls are in progress, such as the reads of a corpus, one line reports them all.
    """

    def __init__(self):
        self.calls = {}  # {call: [path, when it started, the error of its last try in words]}
        self.lock = threading.Lock()
        self.thread = None
        self.printed = -math.inf  # when the last line was printed
        self.pause = PAUSE

    @contextlib.contextmanager
    def on(self, path):
        """Report a call for the length of a `with` block, which gets the call's key, for `failed`."""
        call = object()
        with self.lock:
            self.calls[call] = [path, time.monotonic(), ""]
            # A fork copies this object without its thread.
            if not self.thread or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._watch, name="waiting", daemon=True)
                self.thread.start()
        try:
            yield call
        finally:
            with self.lock:
                del self.calls[call]

    def failed(self, call, error):
        """Report that one try of a call failed with this error, in words, and that it will be tried again."""
        with self.lock:
            self.calls[call][2] = f" ({error})"
            self._report(call, "trying again")

    def _watch(self):
        """The thread: report the oldest call until none is in progress."""
        while True:
            time.sleep(1)
            with self.lock:
                if not self.calls:
                    self.thread = None
                    return
                call = min(self.calls, key=lambda call: self.calls[call][1])
                waited = time.monotonic() - self.calls[call][1]
                if waited >= FIRST:
                    self._report(call, f"not done after {waited:.0f} s, still waiting")

    def _report(self, call, words):
        """Print a line about a call, unless another line was printed less than `pause` seconds ago."""
        if time.monotonic() - self.printed < self.pause:
            return
        self.printed = time.monotonic()
        path, _, error = self.calls[call]
        others = f" and {len(self.calls) - 1} more" if len(self.calls) > 1 else ""
        warn(f"{path}{others}{error}: {words}", own=True)


WAITING = Waiting()


def persist(work, path, patience=None):
    """The result of work(), which reads or writes `path`; repeated with exponential back-off while remote storage
    fails, as `Waiting` reports.

    After `patience` seconds raises Unavailable if the storage may answer later, and UserError if a person must act
    first. By default that is after about a minute, or after 15 s where access is denied. FileNotFoundError and its
    relatives are raised at once.
    """
    if not is_remote(path):
        return work()
    with WAITING.on(path) as call:
        return persist_in(call, work, path, patience)


def persist_in(call, work, path, patience):
    """`persist` for a remote path, as the call of `Waiting` with this key."""
    start = time.monotonic()
    pauses = itertools.chain(WAITS, itertools.repeat(WAITS[-1]) if patience else [None])
    for tries, pause in enumerate(pauses, 1):
        try:
            return work()
        except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
            raise
        except UserError:  # raised by `filesystem`
            raise
        except Exception as e:  # every kind of storage has errors of its own
            said = f"{type(e).__name__}: {first_line(e)}"
            # The libraries repeat requests too, so the limit is in seconds and not only in tries.
            late = time.monotonic() > start + (patience or sum(WAITS))
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
    """The HTTP status of a library's error; None where it has none."""
    response = getattr(error, "response", None)  # botocore's
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = getattr(error, "code", None) or getattr(error, "status", None)
    return int(code) if str(code).isdecimal() else None


def lacks_credentials(error):
    """Whether an error means that a library found no credentials at all."""
    return type(error).__name__ in ("DefaultCredentialsError", "NoCredentialsError")


def is_denied(error):
    """Whether an error of a storage library means that rights are missing."""
    denied = isinstance(error, PermissionError) or str(error).startswith("Forbidden")
    return lacks_credentials(error) or denied or status_of(error) in (401, 403)


def needs_a_person(error):
    """Whether another try is useless, because rights are missing or the request is wrong. A status of 401 may pass by
    itself, as when a token is renewed, and so may a missing connection."""
    status = status_of(error)
    if status is None:
        return is_denied(error)
    return 400 <= status < 500 and status not in (401, 408, 409, 425, 429)


def ask(path, method, *args, patience=None, **settings):
    """The result of a method of fsspec's file system for a path or address. Raises as `persist` does."""

    def work():
        # inside `persist`, since the search for credentials may take as long as the call itself
        fs, there = filesystem(path)
        return getattr(fs, method)(there, *args, **settings)

    return persist(work, path, patience)


def list_folder(folder, detail=True):
    """What a local folder or remote address holds, as fsspec lists it: for each entry {"name": path, ...} or, without
    `detail`, its path. [] where there is no such folder. Raises UserError where it cannot be listed."""
    try:
        return ask(folder, "ls", detail=detail)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise UserError(f"{folder}: cannot be listed ({e.strerror or e}).") from None


def names_in(folder):
    """The names of the entries of a local folder or remote address; [] where there is no such folder."""
    return [os.path.basename(path.rstrip("/")) for path in list_folder(folder, detail=False)]


def check_plain(path):
    """Raises OSError where no plain file can be written at the local `path`, for example because it is a folder or a
    pipe."""
    with contextlib.suppress(FileNotFoundError):
        if path.endswith("/") or not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_run_path(path, other="place"):
    """Raises UserError where a checkpoint saved at the path or address could not be read back; symlinks are followed.
    other: what the user should give another of, as the message calls it."""
    path = path if is_remote(path) else os.path.realpath(path)
    if found := MISREAD.search(path):
        raise UserError(
            f"{path}: no checkpoint can be saved in a path with {found[0]} in it; give another {other}."
        )


def part_of(path):
    """A new name beside the local `path`, for the unfinished file or folder that is renamed to `path` when it is
    whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{name}.{secrets.token_hex(8)}.part")


def remove_parts(folder, name="*"):
    """Remove the unfinished files that killed programs left in a local folder: those of one name, or by default all."""
    name = name if name == "*" else glob.escape(name)
    for path in glob.glob(os.path.join(glob.escape(folder), f"{name}.*.part")):
        if PART.search(path):
            with contextlib.suppress(OSError), locked(path, fcntl.LOCK_NB):
                # Reached only if no program is writing it: a writer holds this lock.
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


@contextlib.contextmanager
def locked(path, flags=0):
    """Hold the operating system's lock of a file or folder, which ends with the process at the latest. With `flags`
    LOCK_NB raises OSError where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        except OSError:
            # Raised also by a file system without locks, where the caller continues without one.
            if flags:
                raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def removed(remove):
    """Call `remove` at the end of a `with` block, also if a signal ends the process before."""
    interrupts.releases.append(remove)
    try:
        yield
    finally:
        remove()
        interrupts.releases.remove(remove)


@contextlib.contextmanager
def replacing(path, lasting=True):
    """A binary file to write and read, which at the end of the `with` block replaces the local `path`, or the target of
    a symlink. If `lasting`, it is on disk then, even if the machine fails right after. Raises OSError."""
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
            os.replace(part, path)  # after this, `remove` finds no file


@contextlib.contextmanager
def appearing(folder):
    """A new folder to fill, which is renamed to `folder` at the end of the `with` block, or removed if the block fails.
    Raises UserError."""
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
    """Raises UserError where no file can be written at a local `path`, which `flag` named. Programs call it before the
    work whose result they will write there."""
    if not path or is_remote(path):
        return
    try:
        check_plain(path)
        folder = os.path.dirname(os.path.realpath(path))
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        why = f"cannot be written ({e.strerror})"
        raise UserError(why, flag=flag, value=path, remedy="give another") from None


def check_not_pipe(path):
    """Raises UserError where a local `path` is a named pipe or a symlink to a device, since reading it may never end.
    A path below /dev is read nevertheless: the user gave /dev/stdin, or a shell's /dev/fd/63, on purpose."""
    if is_remote(path) or path.startswith("/dev/"):
        return
    with contextlib.suppress(OSError):  # the program that reads it will report the error
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UserError("is a pipe or a device", value=path, remedy="put a file there")


def read_file(path):
    """The bytes of a local file or remote object, None where there is none. Raises UserError where it cannot be
    read."""
    check_not_pipe(path)
    try:
        return ask(path, "cat_file")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise UserError(f"cannot be read ({e.strerror or e})", value=path) from None


def read_json(*path):
    """The object in a JSON file, whose path is given in parts; {} where there is no file. Raises UserError where it
    holds anything but an object."""
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
    """The JSON of `content`, with null for numbers that are not finite, which JSON cannot express. settings: arguments
    of json.dumps."""

    def finite(x):
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [finite(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(content), **settings)
