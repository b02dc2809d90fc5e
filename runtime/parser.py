"""Command lines: dataclasses whose fields are flags. The help of a flag is the text below its field."""

import ast
import dataclasses
import inspect
import itertools
import math
import os
import re
import sys
import textwrap
import typing
from dataclasses import field
from typing import Literal

from runtime.messages import UserError, nearest

# --- Flags ---------------------------------------------------------------------------------------------------------


def flag(default, **facts):
    """A field of the configuration: a flag with its default and what else is known of it. Its help, with the unit,
    is the text below it.

    least, most, below: the smallest and the largest number that make sense, and the one that it must stay below.
        Without `most` it is MOST.
    absent: what stands there in architectures that have no such flag; where there is none, all of them have it.
    of_weights: False where weights in --init_from may go on with another value.
    free_on_resume: True where a run may go on with another value: where neither the parameters' shapes nor the tokens
        seen nor the mathematics of a step depend on it. Batch sizes may differ as long as the global batch stays (see
        `settings.resume`).
    per_process: True where processes that train together may have each its own value.
    first: True where people need it in their first week: --help shows these.
    jaxformer: JAXformer's name of the flag, which command lines may have too.
    positional: True where the value is given without the flag's name.
    derived: True where no command line has it: it follows from the others and the data.
    path: True where ~ at its front is the home folder.
    """
    return field(default=default, metadata=facts)


# The largest number of a flag, by its type: for int32, and for float32 with room to multiply.
MOST = {int: 2**31 - 1, float: 1e30}
MANY = 2**16  # layers, heads, experts, microbatches, devices
WIDE = 2**20  # channels, sequences of a batch
VOCABULARY = 2**24  # tokens
DAYS = 10**7  # seconds
Mesh = tuple[int, int, int]  # dp pp tp


def setting(default, **facts):
    """A `flag` that is free on resume."""
    return flag(default, free_on_resume=True, **facts)


def check_number(flag, value, least=None, most=None, below=None, **_):
    """Raises UserError where a flag's value is a number, or has one, beyond what `flag` allows; other facts of it are
    not looked at."""
    for n in value if isinstance(value, tuple | list) else (value,):
        if type(n) not in MOST:
            continue
        largest = MOST[type(n)] if most is None else most
        smallest = -largest if least is None else least
        if math.isnan(n):
            raise UserError(f"--{flag} {n!s:.40}: must be a number.")
        if n < smallest:
            raise UserError(f"--{flag} {n!s:.40}: must be at least {smallest}.")
        if below is not None and n >= below:
            raise UserError(f"--{flag} {n!s:.40}: must be below {below}.")
        if n > largest:
            raise UserError(f"--{flag} {n!s:.40}: must be at most {largest}.")


# --- Command line --------------------------------------------------------------------------------------------------


def flags_in(argv):
    """The words of a command line that look like flags, without =VALUE."""
    return [word.split("=")[0] for word in argv if re.match(r"--?[A-Za-z]", word)]


def fields_of(kind):
    """{flag: its field} of a dataclass, whose fields may be dataclasses in turn."""
    found = {}
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.type):
            found |= fields_of(f.type)
        elif not f.metadata.get("derived"):
            found[f.name] = f
    return found


class Words:
    """The words of a command line, read as flags that are fields of the dataclass `kind`.

    given: {flag: value}. rest: the words of flags that `others` alone has. Raises UserError for what does not parse.
    `--help` prints the help, with `defaults`, a `kind`, as the values of flags that are not given, and exits.
    """

    def __init__(self, kind, argv, program, defaults=None, others=None):
        self.words, self.given, self.rest = list(argv), {}, []
        self.own, self.others = fields_of(kind), fields_of(others) if others else {}
        places = [f for f in self.own.values() if f.metadata.get("positional")]
        while self.words:
            word = self.words.pop(0)
            if word.split("=")[0] in ("-h", "--help"):
                whole = word == "--help=all" or self.words[:1] == ["all"]
                print(help_of(kind, program, defaults, others, whole), flush=True)
                sys.exit()
            if re.match(r"--?[A-Za-z]", word):
                self.read_flag(word)
            elif places:
                self.keep(places[0], [word])
                places = places if is_many(places[0]) else places[1:]
            else:
                raise UserError(f"{word!r:.40}: belongs to no flag; see --help.")

    def read_flag(self, word):
        """Read a flag and the words of its value."""
        flag, equals, value = word.partition("=")
        known = {**self.others, **self.own}
        name = renamed(known).get(plain(flag), plain(flag))
        f = known.get(name) or known.get(name.removeprefix("no_"))
        if not flag.startswith("--") or f is None or (f.name != name and not is_switch(f)):
            flags = [f"--{n}" for n in known] + [f"--no_{n}" for n in known if is_switch(known[n])]
            raise UserError(f"{flag}: there is no such flag{nearest(flag, flags)}; see --help.")
        if is_switch(f):
            said = [value] if equals else [word for word in self.words[:1] if word[:1] != "-"]
            if said and not any(f.metadata.get("positional") for f in self.own.values()):
                alone = f"--{f.name} or --no_{f.name} alone"
                raise UserError(
                    f"--{name} {said[0]:.40}: takes no value; give {alone}; see --help."
                )
            values = [name == f.name]
        else:
            values = [value] if equals else self.values_after(f)
        if f.name in self.own:
            self.keep(f, values)
        else:
            self.rest += [f"--{name}", *values] if not is_switch(f) else [f"--{name}"]

    def values_after(self, f):
        """The words that follow a flag as its value, taken off `words`."""
        wanted = 3 if f.type == Mesh else len(self.words) if is_many(f) else 1
        flag = re.compile(r"--[A-Za-z][\w-]*(=|$)")  # and no text that begins with hyphens
        values = list(itertools.takewhile(lambda word: not flag.match(word), self.words))
        values = values[:wanted]
        least = 1 if is_many(f) else wanted
        if len(values) < least:
            raise UserError(f"--{f.name}: must have {least} value{'s' * (least > 1)}; see --help.")
        del self.words[: len(values)]
        return values

    def keep(self, f, values):
        """Keep the value of a flag; those of a flag of many are added to those before."""
        value = value_of(f, values)
        self.given[f.name] = self.given.get(f.name, ()) + value if is_many(f) else value


def renamed(fields):
    """{JAXformer's name of a flag: the one here} of {flag: its field}."""
    return {
        f.metadata["jaxformer"]: name for name, f in fields.items() if "jaxformer" in f.metadata
    }


def is_switch(f):
    """Whether a field is a flag without a value, --NAME or --no_NAME."""
    return f.type in (bool, bool | None)


def is_many(f):
    """Whether a field is a flag of any number of values."""
    return Ellipsis in typing.get_args(f.type)


def plain(flag):
    """The name of a flag as it was typed: without its hyphens at the front, with underscores inside."""
    return flag.lstrip("-").replace("-", "_")


def shown(f):
    """A field as a message names it."""
    return f.name if f.metadata.get("positional") else f"--{f.name}"


WANTED = {int: "a whole number", float: "a number", Mesh: "three whole numbers"}


def value_of(f, values):
    """The value of a field that the words `values` stand for. Raises UserError where they stand for none."""
    if is_switch(f):
        return values[0]
    kind, inside, said = f.type, typing.get_args(f.type), f"{shown(f)} {' '.join(values):.40}"
    if type(None) in inside:
        kind, inside = inside[0], typing.get_args(inside[0])
    if typing.get_origin(kind) is Literal:
        return chosen(f, values[0], inside)
    one = inside[0] if inside else kind
    if typing.get_origin(one) is Literal:
        return tuple(chosen(f, value, typing.get_args(one)) for value in values)
    if f.metadata.get("path"):
        values = map(os.path.expanduser, values)
    try:
        found = tuple(map(one, values))
        if kind == Mesh and len(found) != 3:
            raise ValueError
    except ValueError as e:
        wanted = WANTED.get(kind, WANTED.get(one))
        too_long = "Exceeds the limit" in str(e)  # Python's, of digits
        raise UserError(f"{said}: must be {'a smaller number' if too_long else wanted}.") from None
    return found if inside else found[0]


def chosen(f, value, choices):
    """`value`, which a field takes. Raises UserError where it is none of its choices."""
    if value in choices:
        return value
    words = f"must be one of {', '.join(choices)}{nearest(value, choices)}"
    raise UserError(f"{shown(f)} {value:.40}: {words}; see --help.")


# --- Help -------------------------------------------------------------------------------------------------------


def texts_below(kind):
    """{field: the text below it} of a dataclass and of those that it inherits from."""
    found = {}
    for parent in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0].body
        for node, after in itertools.pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def help_of(kind, program, defaults, others, whole):
    """What --help prints of the dataclass `kind`. Where some of its flags are for a first week, that is them, and all
    of them only if `whole`."""
    fields = fields_of(kind)
    first = [name for name, f in fields.items() if f.metadata.get("first")]
    brief = first and not whole
    places = "".join(
        f" {f.name.upper()}" + " ..." * is_many(f)
        for f in fields.values()
        if f.metadata.get("positional")
    )
    lines = [
        f"usage: python {program}{places} [--flag value ...] [--help]",
        "",
        inspect.cleandoc(kind.__doc__),
    ]
    groups = [f.type for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.type)]
    for group in groups or [kind]:
        texts = texts_below(group)
        wanted = [f for f in fields_of(group).values() if not brief or f.name in first]
        if groups and not brief:
            lines += ["", " ".join(group.__doc__.split("\n\n")[0].split())]
        elif group in (groups or [kind])[:1]:
            lines.append("")
        for f in wanted:
            default = f.default if defaults is None else defaults[f.name]
            lines += lines_of(f, texts[f.name], default)
    if brief:
        lines += ["", f"python {program} --help all lists the other flags too, by group."]
    if others:
        lines += [
            "",
            "Every flag of main.py may be given too; python main.py --help all lists them.",
        ]
    return "\n".join(lines)


def lines_of(f, text, default):
    """The lines of a flag in the help: its name and values, what it means, its default."""
    inside = typing.get_args(f.type)
    one = inside[0] if inside and f.type != Mesh else f.type
    metavar = {int: "N", float: "X", Mesh: "DP PP TP"}.get(one, "TEXT")
    choices = inside if all(isinstance(x, str) for x in inside) else typing.get_args(inside[0])
    if is_switch(f):
        head = f"--{f.name}, --no_{f.name}"
    else:
        head = f"{shown(f)} {'|'.join(map(str, choices)) or metavar}" + " ..." * is_many(f)
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    told = "" if default in (dataclasses.MISSING, None, "") else f" (default: {default})"
    return [
        f"  {head}",
        *textwrap.wrap(text + told, 96, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]
