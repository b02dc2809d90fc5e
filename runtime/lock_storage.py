"""How a lock is stored: its compare-and-set in a local folder and in each kind of remote storage. Imports no jax.

Every class here has three methods:

    find()              The lock that is there, as a `Found`, or None.
    put(found, beat)    Write the lock as this holder's, if it is still as it was found. Returns the new `Found`, or
                        None if it has changed.
    remove(found)       Remove the lock, if it is still as it was found.

No two writes of a lock have the same version, whichever process makes them. So a process that was paused before its
write, for however long, overwrites nothing that others wrote in the meantime.
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

# Seconds that the storage may take to answer. Without a limit, one lost request would block all later beats.
ANSWER = 20
# The file name inside a local lock: the holder's token and the number of its beat.
BEAT_OF = re.compile(r"([0-9a-f]{16})-\d+")
# Errors of a rename onto a lock that another process holds.
IN_THE_WAY = errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR
# The holder of a lock that does not say who it is; the words fit into messages.
UNKNOWN = dict(token="", host="a host", pid="?", system="", started="", since="some time")


class Found(NamedTuple):
    """A lock as it was last read or written."""

    version: object  # differs between any two writes
    token: str  # of its holder; "" where that is unknown
    holder: dict  # as `locks.this_process` makes it, or UNKNOWN


def holder_in(content, path):
    """The holder that the content of a lock names. UNKNOWN where the content is torn or an older program's. Raises
    UserError where it is not the content of a lock at all."""
    if content.strip(b"\0\n")[:1] not in (b"", b"{"):
        raise UserError(
            f"{path}: is no lock of a program but somebody's file; give it another name."
        )
    with contextlib.suppress(ValueError, TypeError):
        return UNKNOWN | json.loads(content)
    return UNKNOWN


def open_storage(path, holder):
    """The object that stores a lock at a local path or remote address, for this holder."""
    if not is_remote(path):
        return LocalFolder(path, holder)
    protocol = path.split("://")[0]
    storage = {"gs": GoogleStorage, "gcs": GoogleStorage, "s3": S3}.get(protocol, Storage)
    return storage(path, holder)


class LocalFolder:
    """A lock on a local or network file system: a folder with one file in it, which is renamed at every beat.

    A process prepares such a folder beside the lock and renames it to the lock, which fails if the lock has a file
    already. A dead holder's file is removed by its name, which no other file ever has. So neither flock nor hard links
    are needed, which network file systems may lack.
    """

    def __init__(self, path, holder):
        self.path = path
        self.holder = holder
        self.folder = os.path.dirname(path) or "."
        self.is_new = not os.path.lexists(self.folder)

    def find(self):
        """The lock that is there, or None. Raises UserError where something else has its name."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:  # a file, as older versions of this program wrote
            return Found((), "", self._read(self.path))
        # NFS gives such names to files that were removed while they were open.
        names = [name for name in names if not name.startswith(".nfs")]
        strange = [name for name in names if not BEAT_OF.fullmatch(name)]
        if strange:
            raise UserError(
                f"{self.path}: is no lock of a program, {strange[0]} is in it; give it another name."
            )
        if not names:  # it is being released or taken over right now
            return None
        token = BEAT_OF.fullmatch(names[0])[1]
        return Found(tuple(sorted(names)), token, self._read(os.path.join(self.path, names[0])))

    def put(self, found, beat):
        """Write the lock if it is as found: rename this holder's file, or move a new folder into place."""
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
        """Remove the lock, and the folder that it locked if that is empty and was made for it."""
        self._clear(found)
        if self.is_new:
            with contextlib.suppress(OSError):  # a folder that holds anything else stays
                os.rmdir(self.folder)

    def _read(self, path):
        """The holder that a file names; UNKNOWN where a beat has just renamed the file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            with open(path, "rb") as f:
                return holder_in(f.read(), self.path)
        return UNKNOWN

    def _enter(self, found, name):
        """Move a folder with the file `name` to the lock's path, if the lock is as found. Raises OSError if not."""
        part = part_of(self.path)
        try:
            os.makedirs(part)
            # Otherwise another process would take it for a dead one's, and remove it.
            with locked(part):
                with open(os.path.join(part, name), "xb") as f:
                    f.write(json.dumps(self.holder).encode())
                self._clear(found)
                os.rename(part, self.path)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _clear(self, found):
        """Remove the file that was found, then the folder if it is empty: not all file systems can rename a folder onto
        an empty one."""
        if found and not found.version:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(self.path)
        for name in found.version if found else ():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


class Storage:
    """A lock as an object of any storage that fsspec knows. Only its creation is exclusive. A later `put` first reads
    the object and then writes it, and another process may write in between. The subclasses have no such gap."""

    def __init__(self, path, holder):
        self.path = path
        self.holder = holder
        self.fs, self.there = filesystem(path)

    def find(self):
        """The lock that is there, or None."""
        try:
            version, content = self.read()
        except FileNotFoundError:
            return None
        holder = holder_in(content, self.path)
        return Found(version, holder["token"], holder)

    def put(self, found, beat):
        """Write the lock if it is as found."""
        # The number of the beat makes each content, and so each version that a storage derives from it, a new one.
        content = json.dumps(self.holder | dict(beat=beat)).encode()
        version = self.write(content, found.version if found else None)
        return version and Found(version, self.holder["token"], self.holder)

    def read(self):
        """(version, content) of the object. Raises FileNotFoundError."""
        content = self.fs.cat_file(self.there)
        return content, content

    def write(self, content, version):
        """Write the object if it still has this version or, with version None, if there is no object. Returns the new
        version, or None where nothing was written."""
        try:
            if version is not None and self.read()[0] != version:
                return None
            mode = "create" if version is None else "overwrite"
            self.fs.pipe_file(self.there, content, mode=mode)
        except (FileExistsError, FileNotFoundError):
            return None
        return content

    def remove(self, found):
        """Remove the object if it still has the version that was found."""
        if self.read()[0] == found.version:
            self.fs.rm_file(self.there)


class GoogleStorage(Storage):
    """A lock in Google Cloud Storage, where the version of an object is its generation:
    cloud.google.com/storage/docs/request-preconditions."""

    def __init__(self, path, holder):
        super().__init__(path, holder)
        self.bucket, self.key, _ = self.fs.split_path(self.there)

    def read(self):
        """(generation, content of that generation)."""
        metadata = self._call("GET", "b/{}/o/{}", self.bucket, self.key, json_out=True)
        version = metadata["generation"]
        # of that generation, since another process may write the object between the two requests
        return version, self.fs.cat_file(self.there, generation=version, timeout=ANSWER)

    def write(self, content, version):
        """As `Storage.write`, in one request. Generation 0 is that of an object that does not exist."""
        where = self.fs.base.replace("/storage/", "/upload/storage/") + f"b/{quote(self.bucket)}/o"
        settings = dict(uploadType="media", name=self.key, ifGenerationMatch=version or "0")
        try:
            metadata = self._call("POST", where, data=content, json_out=True, **settings)
        except FileExistsError:
            return None
        return metadata["generation"]

    def remove(self, found):
        """As `Storage.remove`, in one request."""
        condition = dict(ifGenerationMatch=found.version)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            self._call("DELETE", "b/{}/o/{}", self.bucket, self.key, **condition)

    def _call(self, *args, **settings):
        return self.fs.call(*args, timeout=ANSWER, **settings)


class S3(Storage):
    """A lock in Amazon's S3 or a compatible storage, where the version of an object is its entity tag:
    docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html."""

    def __init__(self, path, holder):
        super().__init__(path, holder)
        bucket, key, _ = self.fs.split_path(self.there)
        self.object = dict(Bucket=bucket, Key=key)

    def read(self):
        """(entity tag, content), both from one answer."""

        async def read():
            answer = await self.fs._call_s3("get_object", **self.object)
            return answer["ETag"], await answer["Body"].read()

        return fsspec.asyn.sync(self.fs.loop, read, timeout=ANSWER)

    def write(self, content, version):
        """As `Storage.write`, in one request."""
        condition = dict(IfMatch=version) if version else dict(IfNoneMatch="*")
        answer = self._call("put_object", version, Body=content, **condition)
        return answer and answer["ETag"]

    def remove(self, found):
        """As `Storage.remove`, in one request."""
        self._call("delete_object", found.version, IfMatch=found.version)

    def _call(self, method, version, **settings):
        """The answer to a conditional request, or None where the object does not have this version."""
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
