"""Where a lock is written: its compare-and-set in a local folder and in each kind of remote storage. Imports no jax.

Every place has `find()`, what is there; `put(found, beat)`, which makes the lock this holder's where it is still as it
was found, and returns it or None; and `remove(found)`, likewise. No two writes of a lock have the same version, whoever
makes them. So a process that was paused before its write, for however long, changes nothing that came meanwhile.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from typing import NamedTuple
from urllib.parse import quote

import fsspec

from runtime.files import filesystem, is_remote, locked, part_of
from runtime.messages import UserError

ANSWER = 20  # seconds that storage may take for an answer; without a limit one lost request would end all beats
# the name of a lock's file: the holder's token and the number of its beat
BEAT_OF = re.compile(r"([0-9a-f]{16})-\d+")
IN_THE_WAY = errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR
UNKNOWN = dict(token="", host="a host", pid="?", system="", started="", since="some time")


class Found(NamedTuple):
    """A lock as it was read or written."""

    version: object
    token: str  # of its holder, "" where that is not known
    holder: dict  # of `locks.this_process`, or UNKNOWN


def holder_in(content, path):
    """What the content of a lock records of its holder; it may be torn, or an older program's. Raises UserError where
    it is no lock's."""
    if content.strip(b"\0\n")[:1] not in (b"", b"{"):
        raise UserError(
            f"{path}: is no lock of a program but somebody's file; give it another name."
        )
    with contextlib.suppress(ValueError, TypeError):
        return UNKNOWN | json.loads(content)
    return UNKNOWN


def open_storage(path, holder):
    """The place of a lock at a local path or remote address, for this holder."""
    if not is_remote(path):
        return LocalFolder(path, holder)
    kind = path.split("://")[0]
    return {"gs": GoogleStorage, "gcs": GoogleStorage, "s3": S3}.get(kind, Storage)(path, holder)


class LocalFolder:
    """A folder with one file in it, which has a new name at every beat. It becomes the lock by a rename, which fails
    where a file is in the lock already; a dead holder's file is removed by its name, which no other has. So it needs
    neither flock nor hard links, which network file systems may lack."""

    def __init__(self, path, holder):
        self.path = path
        self.holder = holder
        self.folder = os.path.dirname(path) or "."
        self.is_new = not os.path.lexists(self.folder)

    def find(self):
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:  # a file, as older programs had it
            return Found((), "", self._read(self.path))
        names = [name for name in names if not name.startswith(".nfs")]  # removed, still open
        strange = [name for name in names if not BEAT_OF.fullmatch(name)]
        if strange:
            raise UserError(
                f"{self.path}: is no lock of a program, {strange[0]} is in it; give it another name."
            )
        if not names:  # just now released, or about to be taken
            return None
        token = BEAT_OF.fullmatch(names[0])[1]
        return Found(tuple(sorted(names)), token, self._read(os.path.join(self.path, names[0])))

    def put(self, found, beat):
        name = f"{self.holder['token']}-{beat}"
        try:
            if found and found.token == self.holder["token"]:
                os.rename(os.path.join(self.path, *found.version), os.path.join(self.path, name))
            else:
                self._enter(found, name)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno in IN_THE_WAY:
                return None
            raise
        return Found((name,), self.holder["token"], self.holder)

    def remove(self, found):
        self._clear(found)
        if self.is_new:
            with contextlib.suppress(OSError):  # what else is in it stays
                os.rmdir(self.folder)

    def _read(self, path):
        """The holder in a file, which its beat may rename just now."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            with open(path, "rb") as f:
                return holder_in(f.read(), self.path)
        return UNKNOWN

    def _enter(self, found, name):
        """Put a folder with the file `name` where the lock is as found. Raises OSError where it is not."""
        part = part_of(self.path)
        try:
            os.makedirs(part)
            with locked(part):  # or another would take it for what a dead process left
                with open(os.path.join(part, name), "xb") as f:
                    f.write(json.dumps(self.holder).encode())
                self._clear(found)
                os.rename(part, self.path)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _clear(self, found):
        """Remove what was found, and the folder where it is empty then: not all file systems rename onto one."""
        if found and not found.version:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(self.path)
        for name in found.version if found else ():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


class Storage:
    """An object of any storage that fsspec knows. Only its creation is exclusive: between the look and the write of a
    later `put` another process may come."""

    def __init__(self, path, holder):
        self.path = path
        self.holder = holder
        self.fs, self.there = filesystem(path)

    def find(self):
        try:
            version, content = self.read()
        except FileNotFoundError:
            return None
        holder = holder_in(content, self.path)
        return Found(version, holder["token"], holder)

    def put(self, found, beat):
        # with its number each content, and what storage makes a version of it, is another
        content = json.dumps(self.holder | dict(beat=beat)).encode()
        version = self.write(content, found.version if found else None)
        return version and Found(version, self.holder["token"], self.holder)

    def read(self):
        """(version, content). Raises FileNotFoundError."""
        content = self.fs.cat_file(self.there)
        return content, content

    def write(self, content, version):
        """The new version, or None where the object has not this one any more (None: where there is one)."""
        try:
            if version is not None and self.read()[0] != version:
                return None
            mode = "create" if version is None else "overwrite"
            self.fs.pipe_file(self.there, content, mode=mode)
        except (FileExistsError, FileNotFoundError):
            return None
        return content

    def remove(self, found):
        if self.read()[0] == found.version:
            self.fs.rm_file(self.there)


class GoogleStorage(Storage):
    """An object of Google's, whose versions are generations: cloud.google.com/storage/docs/request-preconditions."""

    def __init__(self, path, holder):
        super().__init__(path, holder)
        self.bucket, self.key, _ = self.fs.split_path(self.there)

    def read(self):
        about = self._ask("GET", "b/{}/o/{}", self.bucket, self.key, json_out=True)
        version = about["generation"]  # older than the content where that is written anew meanwhile
        return version, self.fs.cat_file(self.there, generation=version, timeout=ANSWER)

    def write(self, content, version):
        where = self.fs.base.replace("/storage/", "/upload/storage/") + f"b/{quote(self.bucket)}/o"
        settings = dict(uploadType="media", name=self.key, ifGenerationMatch=version or "0")
        try:
            about = self._ask("POST", where, data=content, json_out=True, **settings)
        except FileExistsError:
            return None
        return about["generation"]

    def remove(self, found):
        condition = dict(ifGenerationMatch=found.version)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            self._ask("DELETE", "b/{}/o/{}", self.bucket, self.key, **condition)

    def _ask(self, *words, **settings):
        return self.fs.call(*words, timeout=ANSWER, **settings)


class S3(Storage):
    """An object of Amazon's or the like, whose versions are entity tags:
    docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html."""

    def __init__(self, path, holder):
        super().__init__(path, holder)
        bucket, key, _ = self.fs.split_path(self.there)
        self.object = dict(Bucket=bucket, Key=key)

    def read(self):
        async def read():
            answer = await self.fs._call_s3("get_object", **self.object)
            return answer["ETag"], await answer["Body"].read()

        return fsspec.asyn.sync(self.fs.loop, read, timeout=ANSWER)

    def write(self, content, version):
        condition = dict(IfMatch=version) if version else dict(IfNoneMatch="*")
        answer = self._ask("put_object", version, Body=content, **condition)
        return answer and answer["ETag"]

    def remove(self, found):
        self._ask("delete_object", found.version, IfMatch=found.version)

    def _ask(self, method, version, **settings):
        """The answer, or None where the object has not this version."""
        try:
            return self.fs.call_s3(method, timeout=ANSWER, **self.object, **settings)
        except FileExistsError:
            return None
        except FileNotFoundError:
            if version:
                return None
            raise  # there is no such bucket
        except OSError as e:
            refused = getattr(e.__cause__, "response", {}).get("Error", {}).get("Code")
            if refused != "PreconditionFailed":
                raise
            return None
