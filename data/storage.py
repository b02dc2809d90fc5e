"""Shards in storage, local or remote: which there are, and their bytes, verified and cached by blocks. No jax."""

import contextlib
import functools
import hashlib
import io
import os
import threading
import zlib

import fsspec
import numpy as np

from utils import UserError, is_remote, persist

BLOCK = 1 << 20  # bytes of a shard that are read, verified and kept together


def list_shards(folder):
    """{name: what the storage says of it} of the .npy files in a folder, local or remote; {} where there is none."""
    fs, path = fsspec.core.url_to_fs(folder)
    try:
        there = persist(lambda: fs.ls(path, detail=True), folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    there = {os.path.basename(info["name"]): info for info in there}
    return {name: there[name] for name in sorted(there) if name.endswith(".npy")}


class Cache:
    """Blocks of remote shards, in a local folder of at most `limit` bytes: the least recently used ones leave. The
    processes of a host may share it."""

    def __init__(self, folder, limit):
        self.folder, self.limit, self.lock = folder, limit, threading.Lock()
        self.unseen = limit  # bytes written since the folder was last looked through

    def get(self, name):
        """uint8 [n]: a block, memory-mapped, or None where it is not there."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: of no bytes, after a crash
            path = os.path.join(self.folder, name)
            os.utime(path)  # the time of last use
            return np.memmap(path, np.uint8, "r")

    def put(self, name, content):
        """Keep a block. Raises UserError where the folder cannot be written."""
        path = os.path.join(self.folder, name)
        part = f"{path}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(part, "wb") as f:
                f.write(content)
            with contextlib.suppress(
                FileNotFoundError
            ):  # another thread or process made room just then
                os.replace(part, path)
        except OSError as e:
            raise UserError(
                f"--cache_dir: {path} cannot be written ({e}); make room, or give another folder or a "
                f"smaller --cache_gb."
            ) from None
        with self.lock:
            self.unseen += len(content)
            if (
                self.unseen >= self.limit / 16
            ):  # seldom, since looking takes a while, and before the limit is passed
                self.unseen = 0
                self._evict()

    def _evict(self):
        kept = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                kept.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        size = sum(n for _, n, _ in kept)
        for _, n, path in sorted(kept):
            if size <= self.limit * 15 / 16:
                return
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            size -= n


class Shard:
    """One .npy file of token ids, memory-mapped where it is local, else read by blocks through a Cache. A block is
    verified when it is first touched, where the manifest has its checksum.

    info: the file's size and what else its storage says of it; about: its entry in the manifest, {} without one. All
    methods raise UserError, naming the file, where it is missing, unreadable, damaged or no shard.
    """

    def __init__(self, path, info, about, cache):
        self.path, self.about, self.cache, self.size = path, about, cache, info["size"]
        self.checksums = about.get("crc32", "")  # of each block, in eight hexadecimal digits
        self.sound = bytearray(-(-self.size // BLOCK))  # 1: this process has verified the block
        identity = repr(
            (path, sorted(map(repr, info.items())))
        )  # storage tells of an object that was written anew
        self.key = about.get("sha256") or hashlib.sha256(identity.encode()).hexdigest()
        self.fs, self.there = fsspec.core.url_to_fs(path)

    @functools.cached_property
    def mapped(self):
        """uint8 [size]: the bytes of a local file."""
        return np.memmap(self.path, np.uint8, "r")

    @functools.cached_property
    def header(self):
        """(position of the first token, dtype, number of tokens)."""
        try:
            f = io.BytesIO(self._read(0, min(self.size, BLOCK, 4096)).tobytes())
            version = np.lib.format.read_magic(f)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(f)
        except (ValueError, OSError) as e:
            raise UserError(
                f"--bucket_name: {self.path} is not a shard one can read ({e}); make it again."
            ) from None
        if len(shape) != 1 or dtype.kind not in "ui":
            raise UserError(
                f"--bucket_name: {self.path} holds {dtype} of shape {shape}; a shard is one row of token "
                f"ids."
            )
        if (
            f.tell() + shape[0] * dtype.itemsize > self.size
            or self.about.get("tokens", shape[0]) != shape[0]
        ):
            raise self._damaged(f"it has {self.size:,} bytes")
        return f.tell(), dtype, shape[0]

    @property
    def length(self):
        """Number of tokens; the manifest tells it without a look at the file."""
        return self.about.get("tokens") or self.header[2]

    def read(self, start, stop, vocab_size):
        """Token ids start .. stop, of the file's dtype. Raises UserError for one beyond the vocabulary."""
        offset, dtype, _ = self.header
        ids = self._read(offset + start * dtype.itemsize, offset + stop * dtype.itemsize).view(
            dtype
        )
        if (
            len(ids) and (top := int(ids.view(dtype.str.replace("i", "u")).max())) >= vocab_size
        ):  # so are negative ones
            raise UserError(
                f"--vocab_size {vocab_size}: {self.path} holds token id {top}, beyond the vocabulary; give "
                f"a larger --vocab_size or other shards."
            )
        return ids

    def _read(self, start, stop):
        """uint8 [stop - start]: the bytes from `start` on."""
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        parts = [self._block(b)[max(0, start - b * BLOCK) : stop - b * BLOCK] for b in blocks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def _block(self, b):
        """uint8 [at most BLOCK]: block b, from the cache where it is there, from remote storage where it is not."""
        name, start, stop = f"{self.key}-{b}", b * BLOCK, min((b + 1) * BLOCK, self.size)
        sound = self.sound[
            b
        ]  # asked first: another thread may just replace a block that the cache held damaged
        content = self.cache.get(name) if is_remote(self.path) else self.mapped[start:stop]
        if content is not None and (sound or self._verify(b, content)):
            self.sound[b] = True
            return content
        for _ in range(
            2 if is_remote(self.path) else 0
        ):  # twice, since it may have been damaged on its way
            try:
                content = persist(
                    lambda: self.fs.cat_file(self.there, start=start, end=stop), self.path
                )
            except FileNotFoundError:
                raise UserError(
                    f"--bucket_name: {self.path} is missing; put it back or make it again."
                ) from None
            if self._verify(b, content):
                self.cache.put(name, content)
                self.sound[b] = True
                return np.frombuffer(content, np.uint8)
        raise self._damaged(f"its bytes from {start:,} on are not those that the manifest tells of")

    def _verify(self, b, content):
        """Whether `content` has the length and, where one is known, the checksum of block b."""
        whole, known = (
            len(content) == min(BLOCK, self.size - b * BLOCK),
            self.checksums[8 * b : 8 * b + 8],
        )
        return whole and known in ("", f"{zlib.crc32(content):08x}")

    def _damaged(self, how):
        return UserError(f"--bucket_name: {self.path} is damaged ({how}); make it again.")
