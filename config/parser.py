"""Command lines: words to the fields of a dataclass, each of which is a flag. The help of a flag is the text below its
field.

Before it comes the schema (utils.py, or the Options of a program), after it what uses the values: for main.py
config/command_line.py, for the other programs config/program.py.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin

from runtime.messages import UserError, nearest, show

# The largest number of a flag, by its type: for int32, and for float32 with room to multiply.
MOST = {int: 2**31 - 1, float: 1e30}
MANY = 2**16  # layers, heads, experts, microbatches, devices
WIDE = 2**20  # channels, sequences of a batch
VOCABULARY = 2**24  # tokens
DAYS = 10**7  # seconds
Mesh = tuple[int, int, int]  # dp pp tp
FLAG = re.compile(r"--?[A-Za-z]")  # how a flag begins; texts may begin with other hyphens
TRUTHS = set("true false yes no on off 0 1".split())  # what other programs expect after a switch
# How alike a typing error and its flag are, at least: what is less alike is another flag, which nobody asked for.
NEAR = 0.85


@dataclass(frozen=True)
class Facts:
    """What is known of a flag beside its name, type, default and help."""

    on_resume: Literal["kept", "batch", "told", "free"] | None = None
    """Whether a run may resume with another value. kept: it may not, since the parameters' shapes, the tokens seen or
    the mathematics of a step depend on it. batch: it may, as long as a step and a validation batch have as many
    sequences as before. told: it may, and the change is printed. free: it may. None: the flag is none of a run."""
    free_with_weights: bool = False
    """Whether a new run may use the weights in --init_from with another value, although a run keeps it."""
    absent: object = None
    """The value in architectures that do not have the flag; None: every architecture has it."""
    per_process: bool = False
    """Whether each of the processes that train together may have its own value."""
    path_separator: str | None = None
    """What separates the paths or addresses in the value; "": it is one; None: there are none, or the value names what
    the run writes."""
    alias: str = ""
    """Another name that is accepted: JAXformer's."""
    common: bool = False
    """Whether plain --help lists the flag, and not only --help all."""
    derived: bool = False
    """Whether no command line has it: it follows from the other flags and the data."""
    is_argument: bool = False
    """Whether the value is given without the name, before all flags."""
    nonempty: bool = False
    """Whether an empty text is refused: it would mean the current directory, or nothing."""
    expands_home: bool = False
    """Whether ~ at the front of the value is the home folder."""
    least: float = 0
    """The smallest number that makes sense."""
    most: float | None = None
    """The largest; None: that of its type in MOST."""
    below: float = math.inf
    """A number that the value must stay below."""


def flag(default, **facts):
    """A field that is a flag, with its default and its `Facts`. MISSING as default: the flag must be given."""
    return field(default=default, metadata={"facts": Facts(**facts)})


def argument():
    """A field whose value is given without its name, and must be given."""
    return flag(dataclasses.MISSING, is_argument=True, nonempty=True)


def facts_of(f):
    """The `Facts` of a field, which may have been declared without `flag`."""
    return f.metadata.get("facts", Facts())


@dataclass(frozen=True)
class Values:
    """What a flag takes: `count` values of the type `kind`, which may be a Literal. count None: any number of them."""

    kind: type
    count: int | None = 1

    @property
    def choices(self):
        """The words that a Literal allows; () of any other type."""
        return get_args(self.kind)

    @property
    def is_switch(self):
        """Whether the flag takes no word: it is --NAME or --no_NAME."""
        return self.kind is bool

    @property
    def is_list(self):
        """Whether the flag takes any number of words."""
        return self.count is None

    @property
    def is_mesh(self):
        """Whether it is a `Mesh`, the only type of three values."""
        return self.count == 3

    @property
    def is_tuple(self):
        """Whether the value is a tuple, even of a single word."""
        return self.is_list or self.is_mesh

    def __str__(self):
        """What a flag takes, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.is_mesh:
            return "three whole numbers, as in 8 1 1"
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        return words[self.kind]

    def placeholder(self):
        """What stands for the values in the help."""
        if self.is_switch:
            return ""
        if self.is_mesh:
            return "DP PP TP"
        word = "|".join(self.choices) or {int: "N", float: "X"}.get(self.kind, "TEXT")
        return f"{word} ..." if self.is_list else word


def values_of(f):
    """The `Values` of a field, by its type: X, X | None, tuple[X, ...] or Mesh."""
    kind = f.type
    inside = get_args(kind)
    if type(None) in inside:
        kind, inside = inside[0], get_args(inside[0])
    if get_origin(kind) is tuple:
        return Values(inside[0], None if Ellipsis in inside else len(inside))
    return Values(kind)


@dataclass(frozen=True)
class Hints:
    """What a program answers to words that it does not take: parts of a sentence, "" where it has nothing to say."""

    of_flag: Callable = lambda name, known: ""
    """(name of an unknown flag, {flag: field} of the program) -> what that flag is here."""
    of_word: Callable = lambda word: ""
    """(a word that belongs to no flag) -> what it should have been."""


def fields_of(kind):
    """{flag: its field} of a dataclass, whose fields may be dataclasses in turn."""
    found = {}
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.type):
            found |= fields_of(f.type)
        elif not facts_of(f).derived:
            found[f.name] = f
    return found


def shown(f):
    """A field as a message names it."""
    return f.name if facts_of(f).is_argument else f"--{f.name}"


def value_of(f, words):
    """The value of a field that words mean. Raises UserError where they mean none."""
    expected = values_of(f)
    values = []
    for word in words:
        value = os.path.expanduser(word) if facts_of(f).expands_home else word
        if not expected.choices:
            with contextlib.suppress(ValueError):
                value = expected.kind(value)
        if must := unmet(f, value):
            near = nearest(word, expected.choices)
            raise UserError(
                f"{shown(f)} {word or repr(word):.40}: must be {must}{near}; see --help."
            )
        values.append(value)
    return tuple(values) if expected.is_tuple else values[0]


def value_in_file(f, value):
    """(the value of a field that `value` in a JSON file means, "") or (None, what it must be, in words)."""
    expected = values_of(f)
    values = value if isinstance(value, list) else [value]
    if expected.kind is float:
        values = [float(v) if type(v) is int else v for v in values]
    if len(values) != (expected.count or 1):
        return None, str(expected)
    for v in values:
        if must := unmet(f, v):
            return None, must
    if facts_of(f).expands_home:
        values = [os.path.expanduser(v) for v in values]
    return (tuple(values) if expected.is_mesh else values[0]), ""


def unmet(f, value):
    """In words: what a value of a field must be and is not; "" where nothing is wrong with it."""
    expected = values_of(f)
    facts = facts_of(f)
    is_right = value in expected.choices if expected.choices else type(value) is expected.kind
    is_nan = value != value
    if not is_right or is_nan:
        return str(expected)
    if value == "" and facts.nonempty:
        return "a text that is not empty"
    if expected.kind not in MOST:
        return ""
    most = MOST[expected.kind] if facts.most is None else facts.most
    if value < facts.least:
        return f"at least {facts.least}"
    if value > most:
        return f"at most {most}"
    return "" if value < facts.below else f"below {facts.below}"


def read_words(kind, argv, program, others=None, defaults=None, hints=Hints()):
    """({flag: value}, the words of flags that `others` alone has) of a command line whose flags are fields of the
    dataclass `kind`. Raises UserError for what does not parse, and where a flag without a default is missing.

    `--help` prints the help of `program` and exits; defaults(given) -> {flag: value} that it shows of flags that were
    not given. hints: what the program says of words that it does not take.
    """
    own = fields_of(kind)
    if {"-h", "--help"} & {*argv}:
        words = [word for word in argv if word not in ("-h", "--help", "all")]
        given, _ = split_words(own, others, words, hints)
        values = defaults(given) if defaults else {}
        show(help_of(kind, program, values, whole="all" in argv))
        sys.exit()
    given, rest = split_words(own, others, argv, hints)
    for name, f in own.items():
        if name not in given and f.default is dataclasses.MISSING:
            raise missing(f)
    return given, rest


def split_words(own, others, argv, hints):
    """`read_words` without its help: ({flag: value}, words of `others`). own: {flag: field}."""
    known = (fields_of(others) if others else {}) | own
    arguments = [f for f in own.values() if facts_of(f).is_argument]
    words = list(argv)
    given = {}
    rest = []
    while words:
        before = [*words]
        word = words.pop(0)
        if FLAG.match(word):
            f, values = read_flag(word, words, known, hints)
        elif arguments:
            f = arguments[0]
            values = [word]
            if not values_of(f).is_list:
                del arguments[0]
        else:
            raise unexpected(word, known, hints)
        value = value_of(f, values)
        if f.name not in own:
            rest += before[: len(before) - len(words)]
        elif values_of(f).is_list:  # given twice, it has the values of both
            given[f.name] = given.get(f.name, ()) + value
        else:
            given[f.name] = value
    return given, rest


def missing(f):
    """The UserError for a field without a default that was not given."""
    where = ""
    if facts_of(f).is_argument:
        where = ", the word that comes before all flags"
        if values_of(f).choices:
            where += f", {values_of(f)}"
    return UserError(f"{shown(f)}: is missing{where}; see --help.")


def read_flag(word, words, known, hints):
    """(field, words of its value) of a flag, `word`; these are removed from the `words` after it. known: {flag:
    field}."""
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    aliases = {facts_of(f).alias: n for n, f in known.items() if facts_of(f).alias}
    name = aliases.get(name, name)
    by_name = known | {f"no_{n}": f for n, f in known.items() if values_of(f).is_switch}
    f = by_name.get(name)
    if f is None and (said := hints.of_flag(name, known)):
        raise UserError(f"{flag}: {said}; see --help.")
    if not flag.startswith("--") or f is None:
        near = nearest(flag, [f"--{n}" for n in by_name], NEAR)
        raise UserError(f"{flag}: there is no such flag{near}; see --help.")
    expected = values_of(f)
    if expected.is_switch:
        if equals or (words and words[0].lower() in TRUTHS):
            given = word if equals else f"{word} {words[0]}"
            raise UserError(f"{given:.40}: takes no value; give --{f.name} or --no_{f.name} alone.")
        return f, [name == f.name]
    if equals:
        return f, [value]
    follow = itertools.takewhile(lambda word: not re.match(r"--[A-Za-z][\w-]*(=|$)", word), words)
    values = list(itertools.islice(follow, expected.count))
    if len(values) < (expected.count or 1):
        raise UserError(f"--{f.name}: must be followed by {expected}; see --help.")
    del words[: len(values)]
    return f, values


def unexpected(word, known, hints):
    """The UserError for a word that no flag takes."""
    said = f"belongs to no flag{hints.of_word(word)}"
    if re.match(r"[A-Za-z][\w.]*=", word):
        f, (value,) = read_flag(f"--{word}", [], known, hints)
        said = f"begins with no hyphens; give --{f.name} {value}"
    return UserError(f"{word!r:.40}: {said}; see --help.")


def texts_below(kind):
    """{field: the text below it} of a dataclass and of those that it inherits from."""
    found = {}
    for parent in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0].body
        for node, after in itertools.pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def help_of(kind, program, defaults, whole):
    """What --help prints of the dataclass `kind`: the common flags, or all of them if `whole`."""
    fields = fields_of(kind)
    arguments = [f.name.upper() for f in fields.values() if facts_of(f).is_argument]
    usage = " ".join([f"usage: python {program}", *arguments, "[--flag value ...] [--help]"])
    lines = [usage, "", inspect.cleandoc(kind.__doc__), ""]
    sections = [f.type for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.type)]
    brief = not whole and any(facts_of(f).common for f in fields.values())
    for section in sections or [kind]:
        if sections and not brief:
            lines += ["", section.__doc__]
        texts = texts_below(section)
        for f in fields_of(section).values():
            if not brief or facts_of(f).common:
                lines += lines_of(f, texts[f.name], defaults.get(f.name, f.default))
    if brief:
        lines += ["", f"python {program} --help all lists the other flags too, by group."]
    return "\n".join(lines)


def lines_of(f, text, default):
    """The lines of a flag in the help: its name and values, what it means, its default."""
    expected = values_of(f)
    head = (
        f"--{f.name}, --no_{f.name}"
        if expected.is_switch
        else f"{shown(f)} {expected.placeholder()}"
    )
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    if default not in (dataclasses.MISSING, None, ""):
        text += f" (default: {default})"
    indent = " " * 6
    return [f"  {head}", *textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent)]
