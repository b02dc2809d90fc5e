"""Documents that are files: text files, compressed or not, or Python's standard library."""

import os
import sysconfig

from data.sources import text
from data.sources.base import Document, warn_of_left_out
from runtime.messages import UserError

PART = 1_000_000  # bytes of a part of a text file that is too long for one document
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def walk(root, leave_out=()):
    """Paths of the regular files in a local folder and its subfolders.

    Subfolders that are hidden, named in leave_out or symlinked are left out, the symlinked ones with a warning. Raises
    UserError where a folder cannot be read.
    """

    def stop(e):
        raise UserError(f"{e.filename} cannot be read ({e.strerror})", flag="source")

    paths, links = [], []
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [s for s in subfolders if s not in leave_out and not s.startswith(".")]
        links += filter(os.path.islink, (os.path.join(folder, s) for s in subfolders))
        paths += filter(os.path.isfile, (os.path.join(folder, f) for f in files))
    warn_of_left_out("symlinked folder", links)
    return paths


def stdlib_documents():
    """The .py files of Python's standard library, sorted by name."""
    root = sysconfig.get_paths()["stdlib"]
    paths = [path for path in walk(root, NOT_STDLIB) if path.endswith(".py")]
    # The library's tests of encodings are files in other encodings than UTF-8.
    return [document._replace(is_known=True) for document in documents_of(paths, root)]


def documents_of(paths, root):
    """The documents of files in a folder `root`, sorted by name."""
    names = {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths}
    return [document for name, path in sorted(names.items()) for document in parts_of(name, path)]


def parts_of(name, path):
    """The documents of a file: the whole file or, where it is too long for one document, parts of about PART bytes.

    Parts end at the end of a line. Compressed files, UTF-16 and UTF-32 are not divided.
    """
    size = os.path.getsize(path)
    whole = [Document(name, path, size)]
    if size <= text.LONGEST or text.compression_of(path):
        return whole
    parts = []
    start = 0
    try:
        with open(path, "rb") as f:
            if text.wide_encoding(f.read(4)):
                return whole
            while start < size:
                f.seek(start + PART)
                while (line := f.readline(PART)) and not line.endswith(b"\n"):
                    pass
                end = min(f.tell(), size)
                parts.append(Document(f"{name}:{start}", path, end - start, start=start))
                start = end
    except OSError:  # the same error is reported when the document is read
        return whole
    return parts
