"""Command lines: dataclasses whose fields are flags. The help of a flag is the text below its field."""

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
from dataclasses import field
from typing import get_args, get_origin

from runtime.messages import UserError, nearest

# The largest number of a flag, by its type: for int32, and for float32 with room to multiply.
MOST = {int: 2**31 - 1, float: 1e30}
MANY = 2**16  # layers, heads, experts, microbatches, devices
WIDE = 2**20  # channels, sequences of a batch
VOCABULARY = 2**24  # tokens
DAYS = 10**7  # seconds
Mesh = tuple[int, int, int]  # dp pp tp
# {JAXformer's name of a flag, which is accepted too: the one here}
RENAMED = {
    "bucket_name": "data",
    "micro_batch_size": "microbatches",
    "checkpoint_steps": "eval_every",
    "process_path": "cache_dir",
    "grad_step": "accumulation_steps",
    "dhR": "rope_dim",
    "k": "experts_per_token",
    "alpha": "balance_weight",
}
FLAG = re.compile(r"--?[A-Za-z]")  # how a flag begins; texts may begin with other hyphens
TRUTHS = set("true false yes no on off 0 1".split())  # what other programs take after a switch
# How alike a typing error and its flag are, at least: less is another flag, which nobody asked for.
NEAR = 0.85
# lines of flags as nanoGPT, nanochat, Hugging Face, torchtitan, MaxText and lm_eval call them, each with what is said
FOREIGN = os.path.join(os.path.dirname(__file__), "foreign_flags.txt")


def flag(default, **facts):
    """A field of the configuration: a flag with its default and what is known of it. Its help is the text below it.

    least, most, below: the smallest number that makes sense, by default 0, the largest, by default that of its type,
        and the one that it must stay below.
    of_weights: False where weights in --init_from may be used with another value, as with one that is free on resume.
    free_on_resume: True where a run may resume with another value: where neither the parameters' shapes nor the tokens
        seen nor the mathematics of a step depend on it. Batch sizes may differ as long as the global batch stays (see
        `settle.resume`).
    per_process: True where processes that train together may have each its own value.
    needed: True where an empty text would mean the current directory, or nothing.
    places: what is between the parts of a value each of which may be a path or an address; "" where it is one.
    first: True where people need it in their first week: --help shows these.
    derived: True where no command line has it: it follows from the others and the data.
    path: True where ~ at its front is the home folder.
    """
    return field(default=default, metadata=facts)


def setting(default, **facts):
    """A `flag` that is free on resume."""
    return flag(default, free_on_resume=True, **facts)


def place():
    """A flag whose value is given without its name, and must be given."""
    return flag(dataclasses.MISSING, positional=True, needed=True)


def choice(default, **facts):
    """A `flag` that some architectures have not. absent: its value there, if it is not the default."""
    return flag(default, **dict(absent=default) | facts)


def fields_of(kind):
    """{flag: its field} of a dataclass, whose fields may be dataclasses in turn."""
    found = {}
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.type):
            found |= fields_of(f.type)
        elif not f.metadata.get("derived"):
            found[f.name] = f
    return found


def type_of(f):
    """(type of a value of a field, how many it has: 0 of a switch, --NAME or --no_NAME, 1, 3, or -1 for any number)."""
    kind = f.type
    inside = get_args(f.type)
    if type(None) in inside:
        kind, inside = inside[0], get_args(inside[0])
    if get_origin(kind) is tuple:
        return inside[0], -1 if Ellipsis in inside else len(inside)
    return kind, 0 if kind is bool else 1


def wanted(f):
    """In words: what a field takes."""
    one, n = type_of(f)
    if choices := get_args(one):
        return f"one of {', '.join(choices)}"
    if n == 3:
        return "three whole numbers, as in 8 1 1"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[one]


def is_place(f):
    return f.metadata.get("positional", False)


def shown(f):
    """A field as a message names it."""
    return f.name if is_place(f) else f"--{f.name}"


def value_of(f, words):
    """The value of a field that words mean. Raises UserError where they mean none."""
    one, n = type_of(f)
    choices = get_args(one)
    values = []
    for word in words:
        value = os.path.expanduser(word) if f.metadata.get("path") else word
        if not choices:
            with contextlib.suppress(ValueError):
                value = one(value)
        if must := unmet(f, value):
            near = nearest(word, choices)
            raise UserError(
                f"{shown(f)} {word or repr(word):.40}: must be {must}{near}; see --help."
            )
        values.append(value)
    return values[0] if n in (0, 1) else tuple(values)


def value_in_file(f, value):
    """The value of a field that `value` in a JSON file means. Raises UserError with what it must be."""
    one, n = type_of(f)
    values = value if isinstance(value, list) else [value]
    if one is float:
        values = [float(v) if type(v) is int else v for v in values]
    if len(values) != max(1, n):
        raise UserError(wanted(f))
    for v in values:
        if must := unmet(f, v):
            raise UserError(must)
    if f.metadata.get("path"):
        values = [os.path.expanduser(v) for v in values]
    return tuple(values) if n > 1 else values[0]


def unmet(f, value):
    """In words: what a value of a field must be and is not; "" where nothing is wrong with it."""
    one, _ = type_of(f)
    choices = get_args(one)
    is_right = value in choices if choices else type(value) is one
    if not is_right or value != value:  # it is NaN
        return wanted(f)
    if value == "" and f.metadata.get("needed"):
        return "a text that is not empty"
    if one not in MOST:
        return ""
    least = f.metadata.get("least", 0)
    most = f.metadata.get("most", MOST[one])
    below = f.metadata.get("below", math.inf)
    if value < least:
        return f"at least {least}"
    if value > most:
        return f"at most {most}"
    return "" if value < below else f"below {below}"


def read_words(kind, argv, program, others=None, defaults=None):
    """({flag: value}, the words of flags that `others` alone has) of a command line whose flags are fields of the
    dataclass `kind`. Raises UserError for what does not parse, and where a flag without a default is missing.
    `--help` prints the help and exits; defaults(given) -> {flag: value} that it shows of flags that were not given."""
    own = fields_of(kind)
    known = (fields_of(others) if others else {}) | own
    places = list(filter(is_place, own.values()))
    words = list(argv)
    given = {}
    rest = []
    help_asked = {"-h", "--help"} & {*argv}
    if help_asked:
        words = [word for word in argv if word not in ("-h", "--help", "all")]
    while words:
        before = [*words]
        word = words.pop(0)
        if FLAG.match(word):
            f, values = read_flag(word, words, known)
        elif places:
            f = places[0]
            values = [word]
            if type_of(f)[1] == 1:
                del places[0]
        else:
            raise stray(word, known)
        value = value_of(f, values)
        if f.name not in own:
            rest += before[: len(before) - len(words)]
        elif type_of(f)[1] < 0:
            given[f.name] = given.get(f.name, ()) + value
        else:
            given[f.name] = value
    if help_asked:
        values = defaults(given) if defaults else {}
        print(help_of(kind, program, values, whole="all" in argv), flush=True)
        sys.exit()
    for name, f in own.items():
        if name not in given and f.default is dataclasses.MISSING:
            where = ", the word that comes before all flags" if is_place(f) else ""
            where += f", {wanted(f)}" if where and get_args(type_of(f)[0]) else ""
            raise UserError(f"{shown(f)}: is missing{where}; see --help.")
    return given, rest


def read_flag(word, words, known):
    """(field, words of its value) of a flag, `word`; these are taken off the `words` after it. known: {flag: field}."""
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    name = RENAMED.get(name, name)
    by_name = known | {f"no_{n}": f for n, f in known.items() if type_of(f)[1] == 0}
    f = by_name.get(name)
    if f is None and (said := foreign(name, known)):
        raise UserError(f"{flag}: {said}; see --help.")
    if not flag.startswith("--") or f is None:
        near = nearest(flag, [f"--{n}" for n in by_name], NEAR)
        raise UserError(f"{flag}: there is no such flag{near}; see --help.")
    _, n = type_of(f)
    if n == 0 and (equals or (words and words[0].lower() in TRUTHS)):
        given = word if equals else f"{word} {words[0]}"
        raise UserError(f"{given:.40}: takes no value; give --{f.name} or --no_{f.name} alone.")
    if n == 0:
        return f, [name == f.name]
    if equals:
        return f, [value]
    follow = itertools.takewhile(lambda word: not re.match(r"--[A-Za-z][\w-]*(=|$)", word), words)
    values = list(itertools.islice(follow, n if n > 0 else None))
    if len(values) < max(1, n):
        raise UserError(f"--{f.name}: must be followed by {wanted(f)}; see --help.")
    del words[: len(values)]
    return f, values


def foreign(name, known):
    """In words: what a flag of another program is here, in a program with the flags `known`, or ""."""
    name = name.split(".")[-1]  # torchtitan's have their group before them
    with open(FOREIGN) as f:
        lines = f.read().splitlines()
    said = ""
    for names, words in zip(lines[::2], lines[1::2]):
        named = re.findall(r"--(?:no_)?(\w+)|\b(MODEL)\b", words)
        if {name, name.removeprefix("no_")} & {*names.split()}:
            said = "belongs to another program here"
            if known.keys() >= {flag or place.lower() for flag, place in named}:
                return words.strip()
    return said


def stray(word, known):
    """The UserError for a word that no flag takes: what it should have been, where that can be told."""
    said = "belongs to no flag"
    if re.match(r"[A-Za-z][\w.]*=", word):  # as MaxText has them
        f, (value,) = read_flag(f"--{word}", [], known)
        said = f"begins with no hyphens; give --{f.name} {value}"
    elif re.search(r"\.(py|ya?ml|toml|json)$", word) and "preset" in known:
        said += "; a file of flags is --config FILE.json, and a model with its settings is --preset NAME"
    elif "source" in known and os.path.exists(word):
        said += f"; give --source {word}"
    elif "preset" in known:
        said += ": each value comes after its flag, as in --preset tiny; switches such as --wandb take none"
    elif "prompt" in known:
        said += "; give --prompt with the text"
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
    """What --help prints of the dataclass `kind`: the flags of a first week, or all of them if `whole`."""
    fields = fields_of(kind)
    places = [f.name.upper() for f in filter(is_place, fields.values())]
    usage = " ".join([f"usage: python {program}", *places, "[--flag value ...] [--help]"])
    lines = [usage, "", inspect.cleandoc(kind.__doc__), ""]
    groups = [f.type for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.type)]
    brief = not whole and any(f.metadata.get("first") for f in fields.values())
    for group in groups or [kind]:
        if groups and not brief:
            lines += ["", group.__doc__]
        texts = texts_below(group)
        for f in fields_of(group).values():
            if not brief or f.metadata.get("first"):
                lines += lines_of(f, texts[f.name], defaults.get(f.name, f.default))
    if brief:
        lines += ["", f"python {program} --help all lists the other flags too, by group."]
    return "\n".join(lines)


def lines_of(f, text, default):
    """The lines of a flag in the help: its name and values, what it means, its default."""
    one, n = type_of(f)
    values = "|".join(get_args(one)) or {int: "N", float: "X"}.get(one, "TEXT")
    values = {0: "", 3: "DP PP TP", -1: f"{values} ..."}.get(n, values)
    head = f"--{f.name}, --no_{f.name}" if n == 0 else f"{shown(f)} {values}"
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    if default not in (dataclasses.MISSING, None, ""):
        text += f" (default: {default})"
    indent = " " * 6
    return [f"  {head}", *textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent)]
