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
    formats = {}  # {model_type: (name of the architecture, its `HuggingFace`)}
    for name in architectures.names():
        form = format_of(name)
        for model_type in form.model_types if form else ():
            if model_type in formats:
                other, _ = formats[model_type]
                raise UserError(
                    f"{where}: both --architecture {other} and {name} have the model_type {model_type!r}; take it out "
                    f"of one of them."
                )
            formats[model_type] = name, form
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in formats:
        raise UserError(
            f"{where}: model_type is {model_type!r}; supported are {', '.join(formats)}."
        )
    return formats[model_type]
