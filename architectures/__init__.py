"""The architectures: each is a file here that registers itself as `ARCHITECTURE`."""

import importlib
from collections.abc import Callable
from typing import NamedTuple


class Architecture(NamedTuple):
    """What a family of models brings along; all else is common to them."""

    table: Callable  # cfg -> parameter table, but for a head of its own
    layers: dict  # {kind of layer, as in the table: function}
    last: str  # kind of the layer that ends a block; those before it are "dense"
    embed: Callable  # (parameters outside layers, ids [B, T], position [B or 1, T]) -> [B, T, D]
    norm: Callable  # (x, parameters, eps) -> x, before the head
    cache: Callable  # (cfg, B, T) -> {kind of layer: (shape, spec)}


def architecture(name):
    """The `Architecture` of that name."""
    return importlib.import_module(f"architectures.{name}").ARCHITECTURE
