"""The architectures: one file each, which ends with what it registers, `ARCHITECTURE`."""

import functools
import importlib.util
import math
import pkgutil
import symtable
import tokenize
from collections.abc import Callable
from typing import NamedTuple

import utils
from runtime.messages import UserError, nearest


class LayerCost(NamedTuple):
    """What one layer does to a token, in numbers that the mesh does not change; for planning/costs.py."""

    own_weights: int  # weights that only the token's own device of tp uses, such as a router's
    head_weights: int  # weights of one head; tp splits the heads, and each meets all tokens
    query_channels: int  # channels of a head's query and of its key
    value_channels: int  # channels of a head's value
    gathered: int  # channels that attention gathers over tp
    products: int  # channels of attention's products, of all heads, without the last product
    branches: int  # matrices that lead into the feed-forward
    ffn_width: int  # hidden width of the dense feed-forward or of all shared experts; 0: none
    summed: int = 0  # numbers of a token, in float32, that norms over heads sum over tp


class Architecture(NamedTuple):
    """What a family of models brings along. Everything else is common to all of them."""

    table: Callable  # cfg -> parameter table, without a head of its own
    layers: dict  # {kind of layer, as in the table: function; see layers.py}
    last: str  # kind of the layer that ends a block
    embed: Callable  # (parameters outside layers, rows of the embedding [B, T, D], position [B or 1, T]) -> [B, T, D]
    norm: Callable  # (x, parameters, eps) -> x, before the head
    # (flags of the model, kind of layer) -> (shape, mesh axes) of what decoding caches of each token in such a layer
    cache: Callable
    layer_cost: Callable  # (flags of the model, kind of layer) -> LayerCost
    inner: str = ""  # kind of the layers before it in a block (--layers_per_block), if it has such
    first: str = ""  # kind of the layers before the blocks (--first_layers), if it has such
    flags: frozenset = frozenset()  # flags that it has of those with an `absent` in utils.py
    fixed: dict = {}  # {flag: the one value that it has here}, of flags without an `absent`
    check: Callable = lambda cfg: None  # raises UserError for flags that do not fit each other
    learns_positions: bool = False  # whether its weights fix T
    # flags of the model -> n: `embed` also gets the rows of the n tokens before those that it embeds, [B, n + T, D]
    lookback: Callable = lambda m: 0
    # (cfg, parameters, choices of each expert [.., E], tokens) of a training step -> parameters, of which some moved
    # without a gradient
    after_step: Callable = lambda cfg, params, load, n_tokens: params
    # another architecture, as which its models are published but for what `published` says
    like: str = ""
    published: dict = {}  # facts of its published models, which hf/ reads

    @property
    def stacks(self):
        """Kinds of layers that blocks consist of: pp splits their stacks."""
        return {self.last, self.inner} - {""}

    def stack_shapes(self, m):
        """{kind: dims over which its layers are stacked} in a model with the flags `m`, for the kinds that it has."""
        shapes = {
            self.first: (m.first_layers,),
            self.inner: (m.blocks, m.layers_per_block - 1),
            self.last: (m.blocks,),
        }
        return {kind: shape for kind, shape in shapes.items() if math.prod(shape)}

    def numbers(self, m):
        """{kind: number of its layers} in a model with the flags `m`."""
        return {kind: math.prod(shape) for kind, shape in self.stack_shapes(m).items()}


@functools.cache
def names():
    """Names of all architectures, sorted: the files of this folder that define `ARCHITECTURE`."""
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted(filter(defines_architecture, modules))


def defines_architecture(name):
    """Whether a file of this folder assigns `ARCHITECTURE`. It is read and not imported: that would import jax, which
    command lines are parsed before."""
    path = importlib.util.find_spec(f"{__name__}.{name}").origin
    try:
        with tokenize.open(path) as f:
            table = symtable.symtable(f.read(), path, "exec")
    except (OSError, ValueError, SyntaxError):  # not Python: a half-written file, a compiled module
        return False
    if "ARCHITECTURE" not in table.get_identifiers():
        return False
    symbol = table.lookup("ARCHITECTURE")
    return symbol.is_assigned() and not symbol.is_imported()


def architecture(name):
    """The `Architecture` of that name. Raises UserError where it is not one of `names()`."""
    if name not in names():
        near = nearest(name, names())
        known = ", ".join(names())
        raise UserError(
            f"no such architecture{near}; there are {known}",
            flag="architecture",
            value=name,
        )
    return importlib.import_module(f"architectures.{name}").ARCHITECTURE


def architecture_of(cfg):
    """The `Architecture` of a Config."""
    return architecture(cfg.model.architecture)


def flags_without_choice(name):
    """{flag: value} that every configuration of an architecture has: its name, the flags that it does not have, and
    those that have one value in it."""
    own = architecture(name)
    missing = {flag: value for flag, value in utils.ABSENT.items() if flag not in own.flags}
    return dict(architecture=name) | missing | own.fixed
