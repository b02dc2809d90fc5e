"""What is installed here of this program: its commit, its files and the packages that it needs."""

import contextlib
import subprocess
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.platforms import PLUGINS

ROOT = Path(__file__).resolve().parents[1]
# What may differ between installations of the program and change its numbers or how its processes talk.
PACKAGES = "jax", "jaxlib", *PLUGINS["tpu"], *PLUGINS["gpu"], "numpy", "optax", "orbax-checkpoint"


def commit():
    """The commit of this program, with -dirty where files were changed since; "" where there is no git for it."""
    words = ["git", "-C", ROOT, "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def facts():
    """{name: value} of the commit, where git tells it, of packages that may change a run's numbers or how its processes
    talk, and checksums of the program's files."""
    of_git = commit().removesuffix("-dirty")  # the files tell more
    found = {"commit": of_git} if of_git else {}
    for name in PACKAGES:
        found[name] = "none"
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    for path in program_files():
        found[str(path.relative_to(ROOT))] = f"{zlib.crc32(path.read_bytes()):08x}"
    return found


def program_files():
    """Paths of this program: modules imported so far, and all in their packages, which may be imported later."""
    for name in sorted({"main", *sys.modules}):
        place = ROOT / name.replace(".", "/")
        if (place / "__init__.py").is_file():
            yield from sorted(place.glob("*.py"))
        elif place.parent == ROOT and place.with_suffix(".py").is_file():
            yield place.with_suffix(".py")
