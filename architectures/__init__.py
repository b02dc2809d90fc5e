"""The architectures: one file each, which ends with what it registers, `ARCHITECTURE`."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from architectures import hf_format

# files of this folder that architectures are made of
PARTS = {"parameters", "layers", "experts", "hf_format"}


class LayerCost(NamedTuple):
    """What one layer does to a token, in numbers that the mesh does not change. tools/planning/costs.py makes
    operations, bytes and memory of them. A product with n weights takes 2n operations a token."""

    own_weights: (
        int  # weights that a token meets on one device of tp alone, such as those of a router
    )
    head_weights: int  # weights of one head: tp splits the heads, and all tokens meet them
    query_channels: int  # channels of a head's query and of its key
    value_channels: int  # channels of a head's value
    gathered: int  # channels that attention gathers over tp
    products: int  # channels of what attention's products with weights give, all heads, but for the last product
    branches: int  # matrices that lead into the feed-forward
    ffn_width: (
        int  # hidden width of the dense feed-forward, or of all shared experts; 0: there is neither
    )
    kept_ratio: float  # channels that --remat none keeps per channel of intermediates, fitted (tools/planning/costs.py)


class Architecture(NamedTuple):
    """What a family of models brings along. Everything else is common to all of them."""

    table: Callable  # cfg -> parameter table, without a head of its own
    layers: dict  # {kind of layer, as in the table: function}
    last: str  # kind of the layer that ends a block; the layers before it are "dense"
    stacks: frozenset  # kinds of layers that blocks consist of: pp splits their stacks
    routed: dict  # {kind of layer with routed experts: mesh axes over which its tokens are spread}
    embed: Callable  # (parameters outside layers, ids [B, T], position [B or 1, T]) -> [B, T, D]
    norm: Callable  # (x, parameters, eps) -> x, before the head
    cache: Callable  # (cfg, B, T) -> {kind of layer: (shape, spec)}
    predict_further: (
        Callable | None
    )  # the loss of multi-token prediction; see architectures/deepseek.py
    layer_cost: Callable  # (flags of the model, kind of layer) -> LayerCost
    hugging_face: hf_format.HuggingFace  # its models in the Hugging Face format


def names():
    """Names of all architectures, sorted: the files of this folder that are not `PARTS`. Imports none of them."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - PARTS)


def architecture(name):
    """The `Architecture` of that name, one of `names()`."""
    return importlib.import_module(f"architectures.{name}").ARCHITECTURE
