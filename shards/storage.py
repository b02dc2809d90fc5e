"""Shards in storage, local or remote: which there are, and their tokens, verified and cached by blocks. No jax."""

import contextlib
import functools
import hashlib
import io
import os
import re
import threading
import zlib

import numpy as np

from runtime.files import ask, is_remote, list_folder, replacing
from runtime.messages import Unavailable, UserError

# seconds that a block is asked for again: a run that trains outlives an outage, within its --stuck_limit
PATIENCE = 3600
BLOCK = 1 << 20  # bytes of a shard that are read, verified and kept together
# Names of the files of a Cache: of blocks, and of those that are being written. The former have at most 50 characters,
# of which runtime/files.py makes the latter: no two blocks have the same.
KEPT = re.compile(r"[0-9a-f]{40}-\d{1,9}(\.[0-9a-f]{16}\.part)?")


def list_shards(folder):
    """{name: what the storage says of it} of the .npy files in a folder, local or remote, but for hidden ones, such as
    the ._000000.npy that macOS puts beside 000000.npy; {} where there is none. Raises UserError."""
    found = {os.path.basename(info["name"]): info for info in list_folder(folder)}
    shards = [name for name in sorted(found) if name.endswith(".npy") and name[0] != "."]
    return {name: found[name] for name in shards}


def read_part(path, start, stop):
    """(uint8 [at most stop - start], os.stat_result) of a local file, with fewer bytes where it ends before `stop`.
    Raises OSError.

    The file is opened for each read: thousands of shards would be too many open files, and one that is memory-mapped
    kills the process where it has become shorter, or its disk fails.
    """
    # a pipe would have it wait for somebody who writes
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content = np.empty(stop - start, np.uint8)
        n = 0
        while count := os.preadv(descriptor, [content[n:]], start + n):
            n += count
        return content[:n], os.fstat(descriptor)
    finally:
        os.close(descriptor)


class Cache:
    """Blocks of remote shards in a folder of at most `limit` bytes, which processes may share; the least used leave."""

    def __init__(self, folder, limit):
        self.folder = folder
        self.limit = limit
        self.unseen = limit  # bytes written since the folder was last looked through
        self.lock = threading.Lock()

    def get(self, name, start, stop):
        """uint8 [at most stop - start]: bytes of a block; none where it is not there."""
        path = os.path.join(self.folder, name)
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of last use
            return read_part(path, start, stop)[0]
        return np.empty(0, np.uint8)

    def put(self, name, content):
        """Keep a block. Raises UserError where the folder cannot be written."""
        path = os.path.join(self.folder, name)
        try:
            # another thread or process may evict it before it has its name
            with contextlib.suppress(FileNotFoundError), replacing(path, lasting=False) as f:
                f.write(content)
        except OSError as e:
            raise UserError(
                f"--cache_dir: {path} cannot be written ({e}); make room, give another folder, or less --cache_gb."
            ) from None
        with self.lock:
            self.unseen += len(content)
            # seldom, since looking takes a while, and before the limit is passed
            if self.unseen >= self.limit / 16:
                self.unseen = 0
                self._evict()

    def _evict(self):
        """Remove the least recently used blocks, down to 15/16 of the limit; what else is there stays."""
        files = []
        for entry in os.scandir(self.folder):
            if not KEPT.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                stat = entry.stat()
                files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit * 15 / 16:
                return
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            total -= size


class Shard:
    """One .npy file of token ids, local, or remote and read through a Cache by blocks.

    A block is verified when it is first read, and again where the local file has changed since; then only the bytes
    that are asked for are read. info: the file's size and what else its storage says of it; entry: its entry in the
    manifest, {} without one. All methods raise UserError, naming the file, where it is missing, damaged or no shard,
    and Unavailable where it cannot be read.
    """

    def __init__(self, path, info, entry, cache):
        self.path = path
        self.size = info["size"]
        self.entry = entry
        self.locks = {}  # {block: lock}
        self.verified = {}  # {block: version of its copy on this machine that was found sound}
        self.first = None  # version of the local file when it was first read
        self.cache = cache
        # without a manifest, what storage says tells whether an object was written anew
        identity = repr((path, sorted(map(repr, info.items()))))
        self.key = entry.get("sha256") or hashlib.sha256(identity.encode()).hexdigest()
        self.is_remote = is_remote(path)

    @functools.cached_property
    def header(self):
        """(position of the first token, dtype, number of tokens)."""
        try:
            f = io.BytesIO(self._read_bytes(0, min(self.size, BLOCK, 4096)).tobytes())
            version = np.lib.format.read_magic(f)
            # 3.0 differs from 2.0 in the encoding of names, which rows of numbers have not
            is_first = version == (1, 0)
            read = (
                np.lib.format.read_array_header_1_0
                if is_first
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(f)
        except ValueError as e:
            raise self._damaged(f"it is no .npy file: {e}") from None
        if len(shape) != 1 or dtype.kind not in "ui":
            raise self._damaged(f"it holds {dtype} of shape {shape}, not one row of token ids")
        offset, n_tokens = f.tell(), shape[0]
        if offset + n_tokens * dtype.itemsize > self.size:
            raise self._damaged(f"it has {self.size:,} bytes")
        return offset, dtype, n_tokens

    @property
    def length(self):
        """Number of tokens, which the manifest tells without a look at the file."""
        return self.entry.get("tokens") or self.header[2]

    def read(self, start, stop, vocab_size):
        """Token ids start .. stop, of the file's dtype. Raises UserError for one beyond the vocabulary."""
        offset, dtype, _ = self.header
        begin, end = offset + start * dtype.itemsize, offset + stop * dtype.itemsize
        ids = self._read_bytes(begin, end).view(dtype)
        # seen as unsigned, negative ids are beyond the vocabulary too
        unsigned = dtype.str.replace("i", "u")
        top = int(ids.view(unsigned).max(initial=0))
        if top >= vocab_size:
            raise UserError(
                f"--data: {self.path} holds token id {top}, beyond the model's vocabulary (--vocab_size {vocab_size}); "
                f"give other shards or, to a model that is not trained yet, a larger vocabulary."
            )
        return ids

    def check(self, vocab_size):
        """Read all tokens. Raises UserError as `read` does."""
        for start in range(0, self.length, BLOCK):
            self.read(start, min(start + BLOCK, self.length), vocab_size)

    def _read_bytes(self, start, stop):
        """uint8 [stop - start]: the bytes from `start` on."""
        parts = [np.empty(0, np.uint8)]
        for b in range(start // BLOCK, -(-stop // BLOCK)):
            first = b * BLOCK
            parts.append(self._read_block(b, max(0, start - first), min(stop - first, BLOCK)))
        return np.concatenate(parts)

    def _read_block(self, b, start, stop):
        """uint8 [stop - start]: bytes of block b, which is verified when it is first read."""
        with self.locks.setdefault(b, threading.Lock()):  # of two threads one fetches it
            if b in self.verified:
                content, version = self._kept(b, start, stop)
                if self.verified[b] == version and len(content) == stop - start:
                    return content
            content, self.verified[b] = self._verify(b)
            return content[start:stop]

    def _verify(self, b):
        """(uint8 [at most BLOCK], version) of block b, which is sound. A remote one is fetched unless it is cached."""
        start, length = b * BLOCK, min(BLOCK, self.size - b * BLOCK)
        content, version = self._kept(b, 0, length)
        if self._is_sound(b, content):
            return content, version
        for _ in range(2 * self.is_remote):  # it may be damaged on its way
            try:
                place = dict(start=start, end=start + length)
                content = ask(self.path, "cat_file", patience=PATIENCE, **place)
            except FileNotFoundError:
                raise self._missing() from None
            if self._is_sound(b, content):
                self.cache.put(self._name(b), content)
                return np.frombuffer(content, np.uint8), version
        raise self._damaged(f"its bytes from {start:,} on do not have the checksum of the manifest")

    def _kept(self, b, start, stop):
        """(uint8 [at most stop - start], version) of block b as it is on this machine, not verified. A remote one has
        one version, and no bytes where it is not in the cache."""
        if self.is_remote:
            return self.cache.get(self._name(b), start, stop), "of the cache"
        first = b * BLOCK
        try:
            content, stat = read_part(self.path, first + start, first + stop)
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as e:
            raise Unavailable(f"--data: {self.path} cannot be read ({e.strerror or e}).") from None
        if stat.st_size < self.size:
            raise self._damaged(f"it has {stat.st_size:,} bytes instead of {self.size:,}")
        version = stat.st_size, stat.st_mtime_ns
        self.first = self.first or version
        if version != self.first and not self.entry.get(
            "crc32"
        ):  # nothing tells whether it is the same
            raise self._damaged("it was changed after training began")
        return content, version

    def _name(self, b):
        """Name of block b in the cache."""
        return f"{self.key[:40]}-{b}"

    def _is_sound(self, b, content):
        """Whether `content` has the length and, where one is known, the checksum of block b."""
        if len(content) != min(BLOCK, self.size - b * BLOCK):
            return False
        known = self.entry.get("crc32", "")[8 * b : 8 * b + 8]
        return known in ("", f"{zlib.crc32(content):08x}")

    def _missing(self):
        return UserError(f"--data: {self.path} is missing; make it again.")

    def _damaged(self, how):
        return UserError(f"--data: {self.path} is damaged ({how}); make it again.")
