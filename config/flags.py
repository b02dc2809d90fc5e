"""What settling starts from: the flags of a command line, and what the program found beside them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import architectures
import utils
from runtime.messages import NOT_GIVEN, UserError
from utils import Config, flags_with, flatten, replace


class Flags(NamedTuple):
    """A configuration that is not settled yet, and which of its flags were given."""

    cfg: Config
    given: frozenset

    def with_defaults(self, **flags):
        """With these values of those flags that were not given."""
        rest = without(self.given, flags)
        return self._replace(cfg=replace(self.cfg, **rest)) if rest else self

    def with_given(self, **flags):
        """With these values, as if they had been given."""
        return Flags(replace(self.cfg, **flags), self.given | flags.keys())


@dataclass(frozen=True)
class Found:
    """What the program found, by which it settles what the flags leave open."""

    n_devices: int
    """Devices that are present."""
    device_kind: str = ""
    """Their kind, as jax names it; "" where no device was asked."""
    memory_share: Callable | None = None
    """Config -> the share of a device's memory that a step needs; None where that is not known."""
    active_params: Callable | None = None
    """Config -> the parameters that a token uses, with the embedding; None where that is not known."""
    weights: dict = field(default_factory=dict)
    """{flag: value} of the model whose weights --init_from names, of `weights.open_weights`; {} without that flag."""
    stored: dict = field(default_factory=dict)
    """`resume.stored_config` of the run that is resumed; {} of a new run, and where nothing is trained."""
    is_data_open: bool = False
    """Whether the data was opened: then there are no more shards, and no other tokenizer, than the next two say."""
    shards: list = field(default_factory=list)
    """As `shards/listing.py: manifests` lists them."""
    encoding: Any = None
    """The tokenizer of the shards; None where none is known."""

    @property
    def resumes(self):
        """Whether there is a run of that name already."""
        return bool(self.stored)


def without(some, flags):
    """{flag: value} of `flags` but for `some`."""
    return {flag: value for flag, value in flags.items() if flag not in some}


def free_of_weights(architecture):
    """Flags of the model that may differ between weights and what uses them."""
    free = flags_with(free_with_weights=True) | (utils.FIELDS.keys() - utils.KEPT)
    return free - {"T"} if architectures.architecture(architecture).learns_positions else free


def compare(cfg, others, flags, whose, remedy="leave the flag out", **named):
    """Raises UserError where one of `flags` has another value than in {flag: value} `others`, as `whose` words say;
    named: the flags that these name."""
    now = flatten(cfg)
    for flag in sorted(flags & others.keys()):
        if now[flag] != others[flag]:
            ours = NOT_GIVEN if now[flag] == "" else now[flag]
            named[flag] = NOT_GIVEN if others[flag] == "" else others[flag]
            said = f"{whose} {{{flag}}}"
            raise UserError(said, flag=flag, value=ours, remedy=remedy, **named)
