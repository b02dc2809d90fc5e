"""The packages that every program needs, looked for before any of them is imported."""

import importlib.util
import sys

NEEDED = "jax", "optax", "orbax", "tiktoken", "fsspec"


def check():
    """End the program with a sentence where this Python lacks one of them."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            advice = "source .venv/bin/activate, which bash setup_tpu.sh makes"
            error = f"error: {sys.executable} has no package {name}: first {advice}."
            print(error, file=sys.stderr)
            sys.exit(2)
