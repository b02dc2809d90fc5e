"""The packages that every program needs, looked for before any of them is imported."""

import importlib.util
import sys

NEEDED = "jax", "optax", "orbax", "tiktoken", "fsspec"


# How Python, its libraries and the loader of shared objects say that there is no memory.
NO_MEMORY = "failed to map segment", "cannot allocate memory", "can't start new thread"
# Libraries whose errors come of storage or of the way there.
OF_STORAGE = "gcsfs", "s3fs", "aiohttp", "botocore", "aiobotocore", "google", "requests"


def explain(kind, error, trace):
    """Python's last resort for an error (sys.excepthook), with a sentence in place of the traceback where the cause is
    outside of this program."""
    said = " ".join(str(error).split())[:300] or kind.__name__
    if issubclass(kind, MemoryError) or any(word in said.lower() for word in NO_MEMORY):
        advice = "see ulimit -v, and what else runs on this machine or in this container"
        print(f"error: this process gets no more memory ({said}); {advice}.", file=sys.stderr)
    elif kind.__module__.split(".")[0] in OF_STORAGE:
        advice = "see that the storage can be reached and that this machine's credentials are good for it"
        print(f"error: storage failed ({kind.__name__}: {said}); {advice}.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def check():
    """End the program with a sentence where this Python lacks one of them; see `explain` for other errors."""
    sys.excepthook = explain
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            advice = "source .venv/bin/activate, which bash setup_tpu.sh makes"
            error = f"error: {sys.executable} has no package {name}: first {advice}."
            print(error, file=sys.stderr)
            sys.exit(2)
