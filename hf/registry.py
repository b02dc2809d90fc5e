"""The Hugging Face format of each architecture that has one: `FORMAT` in the file of this folder with its name, or what
the file of the architecture that it is `like` makes of what it has `published`."""

import importlib
import importlib.util

import architectures
from runtime.messages import UserError


def format_of(name):
    """`HuggingFace` of the architecture of that name, or None where it has none."""
    arch = architectures.architecture(name)
    map_name = arch.like or name
    if importlib.util.find_spec(f"hf.{map_name}") is None:
        return None
    module = importlib.import_module(f"hf.{map_name}")
    if arch.like:
        return module.format_like(arch.published)
    return getattr(module, "FORMAT", None)


def format_to_export(name):
    """`HuggingFace` of an architecture. Raises UserError where it has none."""
    form = format_of(name)
    if form is None:
        raise UserError(
            "its models have no Hugging Face format here", flag="architecture", value=name
        )
    return form


def format_of_config(config, where):
    """(name, `HuggingFace`) of the architecture of a config.json. Raises UserError where none supports it."""
    formats = {}
    for name in architectures.names():
        form = format_of(name)
        for kind in form.model_types if form else ():
            if kind in formats:
                raise UserError(
                    f"{where}: both --architecture {formats[kind][0]} and {name} have the model_type {kind!r}; take it "
                    f"out of one of them."
                )
            formats[kind] = name, form
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in formats:
        raise UserError(f"{where}: model_type is {kind!r}; supported are {', '.join(formats)}.")
    return formats[kind]
