"""This installation of the program: its commit, its files and the packages that it needs."""

import contextlib
import subprocess
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.platforms import PLUGINS

ROOT = Path(__file__).resolve().parents[1]
# Packages whose version may change a run's numbers or how its processes communicate.
PACKAGES = "jax", "jaxlib", *PLUGINS["tpu"], *PLUGINS["gpu"], "numpy", "optax", "orbax-checkpoint"


def commit():
    """The commit of this program, with -dirty if files were changed since; "" where git does not know it."""
    words = ["git", "-C", ROOT, "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def facts():
    """{name: value} of this installation: the commit, if git knows it; the versions of the packages that may change a
    run's numbers or how its processes communicate; and checksums of the program's files."""
    # -dirty is left out, since the checksums show exactly which files were changed.
    of_git = commit().removesuffix("-dirty")
    found = {"commit": of_git} if of_git else {}
    for name in PACKAGES:
        found[name] = "none"
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    for path in program_files():
        found[str(path.relative_to(ROOT))] = f"{zlib.crc32(path.read_bytes()):08x}"
    return found


def program_files():
    """The paths of this program's modules: those imported so far, and all others in their packages, which may be
    imported later."""
    for name in sorted({"main", *sys.modules}):
        path = ROOT / name.replace(".", "/")
        if (path / "__init__.py").is_file():
            yield from sorted(path.glob("*.py"))
        elif path.parent == ROOT and path.with_suffix(".py").is_file():
            yield path.with_suffix(".py")
