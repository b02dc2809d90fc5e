"""Shards in storage, local or remote: listing them, and reading their tokens, verified and cached by blocks. No jax.

Comes before: the programs of `data/`, which write shards. Comes next: `shards/corpus.py`, which asks a `Shard` for the
tokens of a sequence. The `Shard` reads only the blocks that hold them, verifies each block against the manifest, and
keeps those of remote shards in a `Cache` on the local disk.
"""

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

# Seconds for which a failed read of a block is tried again, so that a run outlasts an outage of the storage. It may end
# earlier by its --stuck_limit.
PATIENCE = 3600
BLOCK = 1 << 20  # bytes of a shard that are read, verified and cached together
# llm.c's .bin: 256 int32, of which the first are these two and the number of tokens; then the tokens as uint16.
BIN_BEGINS = [20240520, 1]
BIN_HEADER = 1024  # bytes
# Names of the files of a Cache: blocks, and blocks that are still being written, to whose names runtime/files.py adds
# 16 random digits.
KEPT = re.compile(r"[0-9a-f]{40}-\d{1,9}(\.[0-9a-f]{16}\.part)?")


def list_shards(folder):
    """{name: the storage's metadata of the file} of the .npy files in a folder, local or remote; {} if it has none.
    Hidden files are left out, such as the ._000000.npy that macOS puts beside 000000.npy. Raises UserError."""
    found = {os.path.basename(info["name"]): info for info in list_folder(folder)}
    shards = [name for name in sorted(found) if name.endswith(".npy") and name[0] != "."]
    return {name: found[name] for name in shards}


def list_split(folder):
    """{path: the storage's metadata of the file} of the shards of a split, such as data/shards/web/train; {} if it has
    none. They are the .npy files in the folder. Where it has none, they are llm.c's .bin files beside it that have the
    split in their names, such as fineweb10B/fineweb_train_000001.bin of fineweb10B/train. Raises UserError."""
    root, split = os.path.split(folder)
    found = list_shards(folder)
    if found:
        return {os.path.join(folder, name): info for name, info in found.items()}
    beside = {os.path.basename(info["name"]): info for info in list_folder(root)}
    beside.pop(os.path.basename(root), None)  # the listing of a file contains the file alone
    named = re.compile(rf"[^.].*_{re.escape(split)}(_\d+)?\.bin")
    shards = filter(named.fullmatch, sorted(beside))
    return {os.path.join(root, name): beside[name] for name in shards}


def read_part(path, start, stop):
    """(bytes `start` to `stop` of a local file as uint8, its os.stat_result). There are fewer bytes where the file ends
    before `stop`. Raises OSError.

    The file is opened for each read, since thousands of shards would be too many open files. It is not memory-mapped,
    since then the process would be killed when the file becomes shorter or its disk fails.
    """
    # O_NONBLOCK: opening a pipe would wait until another process writes to it
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
    """Blocks of remote shards in a local folder of at most `limit` bytes. Several processes may share the folder. The
    least recently used blocks are removed first."""

    def __init__(self, folder, limit):
        self.folder = folder
        self.limit = limit
        # Bytes written since the folder was last scanned. It starts at the limit, so that the first `put` scans.
        self.unseen = limit
        self.lock = threading.Lock()

    def get(self, name, start, stop):
        """Bytes `start` to `stop` of a cached block as uint8, or no bytes if it is not cached."""
        path = os.path.join(self.folder, name)
        with contextlib.suppress(OSError):
            os.utime(path)  # `_evict` reads this as the time of last use
            return read_part(path, start, stop)[0]
        return np.empty(0, np.uint8)

    def put(self, name, content):
        """Write a block. Raises UserError where the folder cannot be written."""
        path = os.path.join(self.folder, name)
        try:
            # Another thread or process may remove the unfinished file before it is renamed: then it is not cached.
            with contextlib.suppress(FileNotFoundError), replacing(path, lasting=False) as f:
                f.write(content)
        except OSError as e:
            raise UserError(
                f"{path} cannot be written ({e}); make room, give another folder, or less --cache_gb",
                flag="cache_dir",
            ) from None
        with self.lock:
            self.unseen += len(content)
            # Scanning a large folder takes a while, so it is done once per sixteenth of the limit.
            if self.unseen >= self.limit / 16:
                self.unseen = 0
                self._evict()

    def _evict(self):
        """Remove the least recently used blocks until the rest take 15/16 of the limit. Other files are left alone."""
        files = []
        for entry in os.scandir(self.folder):
            if not KEPT.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
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
    """One .npy or .bin file of token ids, local, or remote and read through a Cache by blocks.

    The first read of a block reads and verifies all of it. Later reads get only the bytes that they ask for, unless the
    local file has changed since; then the block is verified again.

    info: the file's size and the rest of the storage's metadata. entry: its entry in the manifest, {} without one.
    All methods raise UserError, which names the file, where it is missing, damaged or not a shard, and Unavailable
    where it cannot be read.
    """

    def __init__(self, path, info, entry, cache):
        self.path = path
        self.size = info["size"]
        self.entry = entry
        self.locks = {}  # {block: lock}
        self.verified = {}  # {block: version of the local copy that was verified}
        self.first = None  # version of the local file when it was first read
        self.cache = cache
        # The key of its blocks in the cache. Without a manifest, the storage's metadata of the object, such as the time
        # of its last change, shows whether it was replaced.
        identity = repr((path, sorted(map(repr, info.items()))))
        self.key = entry.get("sha256") or hashlib.sha256(identity.encode()).hexdigest()
        self.is_remote = is_remote(path)

    @functools.cached_property
    def header(self):
        """(position of the first token, dtype, number of tokens)."""
        read = self._bin_header if self.path.endswith(".bin") else self._npy_header
        offset, dtype, n_tokens = read()
        expected = offset + n_tokens * dtype.itemsize
        if n_tokens < 0 or expected > self.size:
            raise self._damaged(f"it has {self.size:,} bytes, and by its header {expected:,}")
        return offset, dtype, n_tokens

    def _bin_header(self):
        """`header` as llm.c writes it."""
        begins = self._read_bytes(0, min(self.size, 12)).tobytes().ljust(12, b"\0")
        *found, n_tokens = np.frombuffer(begins, "<i4").tolist()
        if found != BIN_BEGINS:
            raise self._damaged(
                f"it begins with {found} and not with {BIN_BEGINS}, as llm.c's shards of uint16 do"
            )
        return BIN_HEADER, np.dtype("<u2"), n_tokens

    def _npy_header(self):
        """`header` as numpy writes it."""
        try:
            f = io.BytesIO(self._read_bytes(0, min(self.size, BLOCK, 4096)).tobytes())
            version = np.lib.format.read_magic(f)
            # 3.0 differs from 2.0 only in how it encodes names of fields, which plain arrays do not have
            read = np.lib.format.read_array_header_2_0
            if version == (1, 0):
                read = np.lib.format.read_array_header_1_0
            shape, _, dtype = read(f)
        except ValueError as e:
            raise self._damaged(f"it is no .npy file: {e}") from None
        if len(shape) != 1 or dtype.kind not in "ui":
            raise self._damaged(f"it holds {dtype} of shape {shape}, not one row of token ids")
        return f.tell(), dtype, shape[0]

    @property
    def length(self):
        """Number of tokens. Without a manifest it is read from the file's header."""
        return self.entry.get("tokens") or self.header[2]

    def read(self, start, stop, vocab_size):
        """Token ids `start` to `stop`, in the file's dtype. Raises UserError for an id beyond the vocabulary."""
        offset, dtype, _ = self.header
        first_byte = offset + start * dtype.itemsize
        end = offset + stop * dtype.itemsize
        ids = self._read_bytes(first_byte, end).view(dtype)
        # As unsigned numbers, negative ids are large, and so beyond the vocabulary too.
        unsigned = dtype.str.replace("i", "u")
        top = int(ids.view(unsigned).max(initial=0))
        if top >= vocab_size:
            raise UserError(
                f"{self.path} holds token id {top}, beyond the model's vocabulary (--vocab_size {vocab_size}); "
                f"give other shards or, to a model that is not trained yet, a larger vocabulary",
                flag="data",
            )
        return ids

    def check(self, vocab_size):
        """Read all tokens. Raises UserError as `read` does."""
        for start in range(0, self.length, BLOCK):
            self.read(start, min(start + BLOCK, self.length), vocab_size)

    def _read_bytes(self, start, stop):
        """Bytes `start` to `stop` of the file as uint8."""
        parts = [np.empty(0, np.uint8)]
        for b in range(start // BLOCK, -(-stop // BLOCK)):
            first = b * BLOCK
            parts.append(self._read_block(b, max(0, start - first), min(stop - first, BLOCK)))
        return np.concatenate(parts)

    def _read_block(self, b, start, stop):
        """Bytes `start` to `stop` of block b as uint8. The block is verified when it is first read."""
        # One lock per block, so that two threads do not fetch the same block.
        with self.locks.setdefault(b, threading.Lock()):
            if b in self.verified:
                content, version = self._read_local(b, start, stop)
                if self.verified[b] == version and len(content) == stop - start:
                    return content
            content, self.verified[b] = self._verify(b)
            return content[start:stop]

    def _verify(self, b):
        """(all bytes of block b as uint8, their version), verified. A remote block is fetched unless it is cached."""
        start = b * BLOCK
        length = min(BLOCK, self.size - start)
        content, version = self._read_local(b, 0, length)
        if self._is_sound(b, content):
            return content, version
        for _ in range(2 * self.is_remote):  # twice, since a block may be damaged on its way here
            try:
                part = dict(start=start, end=start + length)
                content = ask(self.path, "cat_file", patience=PATIENCE, **part)
            except FileNotFoundError:
                raise self._missing() from None
            if self._is_sound(b, content):
                self.cache.put(self._name(b), content)
                return np.frombuffer(content, np.uint8), version
        raise self._damaged(f"its bytes from {start:,} on do not have the checksum of the manifest")

    def _read_local(self, b, start, stop):
        """(bytes `start` to `stop` of block b as uint8, their version) as they are on this machine, not verified. A
        remote block has no bytes where it is not cached, and always the same version."""
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
        # Without checksums nothing tells whether a changed file still has the same tokens.
        if version != self.first and not self.entry.get("crc32"):
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
        """The error for a shard that is not there."""
        return UserError(f"{self.path} is missing; make it again", flag="data")

    def _damaged(self, how):
        """The error for a damaged shard."""
        return UserError(f"{self.path} is damaged ({how}); make it again", flag="data")
