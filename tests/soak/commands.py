"""Drawn command lines of every program: each ends soon, in success or in one sentence."""

import re
import typing
from typing import NamedTuple

import presets
import utils
from tests.soak import goods
from tests.soak.programs import complaint, fresh_folder, leftovers, run

# --- Programs -----------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A program. words(at, rng): a command line that works; seconds: within which any must end."""

    weight: int
    words: typing.Callable
    seconds: int
    copied: str = "cache"  # the good that is its own


MACHINES = "v4:2x2x2 v4:2x4x4 v5e:4x4 v6e:2x2 2*v5p:2x2x2 gpu:8xH200 gpu:2x8xH100 gpu:A100".split()
NO_MACHINES = (
    "v4 v4: v4:0x1x1 v4:99999x99999x99999 gpu:0xH100 gpu:8xNOTHING 0*v4:2x2x2 v9:2x2".split()
)
NO_MACHINES += "gpu: gpu:-1xH100 gpu:8xH100x 999999999*v4:2x2x2 v4:2x2x2x2 é".split() + [""]
MESHES = [(0, 1, 1), (1, 1, 1), (8, 1, 1), (2, 2, 2), (16, 2, 1), (1, 4, 2), (0, 0, 0), (3, 5, 7)]
SEARCH_SECONDS = 180  # DeepSeek-V3 has many meshes


def plan(at, rng):
    machine = rng.choice(MACHINES * 6 + NO_MACHINES)
    words = ["main.py", "--preset", rng.choice(list(presets.PRESETS)), "--plan", machine]
    words += ["--n_device_axis", *rng.choice(MESHES[:1] * 9 + MESHES), "--by_formulas"]
    return words + ["--search"] * (rng.random() < 0.03)


def check(at, rng):
    where = rng.choice(["here", "elsewhere"])
    return ["training/command_line.py", where, "--preset", rng.choice(list(presets.PRESETS))]


def evaluate(at, rng):
    words = ["tools/evaluate.py", at / rng.choice(["run", "hf"]), "--limit", 8]
    data = rng.choice([at / "shards", at / "records" / "r.jsonl", at / "text"])
    return [*words, "--compilation_cache", at / "cache", "--text_column", "body", "--data", data]


def sample(at, rng):
    model = at / rng.choice(["run", "hf"])
    return ["tools/sample.py", model, "--max_tokens", 4, "--compilation_cache", at / "cache"]


def checkpoints(at, rng):
    return ["tools/checkpoints.py", rng.choice(["list", "verify", "prune"]), at / "run"]


def hf(at, rng):
    if rng.random() < 0.5:
        return ["tools/hf.py", "import", at / "hf", "out"]
    return ["tools/hf.py", "export", at / "run", "out"]


def tokenize(at, rng):
    return goods.tokenize_words(at / "text", "out", at / "ranks.tiktoken")


def tool(name):
    return lambda at, rng: ["tests/soak/parse.py", name, "--preset", "tiny"]


COMMANDS = dict(
    plan=Command(30, plan, 20),
    check=Command(20, check, 10),
    evaluate=Command(6, evaluate, 60),
    sample=Command(6, sample, 60),
    checkpoints=Command(6, checkpoints, 20, "run"),
    hf=Command(5, hf, 20),
    compare=Command(4, lambda at, rng: ["tools/compare.py", at / "run", at / "many/run"], 20),
    trace=Command(5, lambda at, rng: ["tools/trace.py", at / "run"], 20),
    tokenize=Command(8, tokenize, 30),
    ranks=Command(6, lambda at, rng: goods.ranks_words(at / "text", "x.tiktoken"), 30),
    bench=Command(4, tool("bench"), 10),
    variations=Command(4, tool("compare"), 10),
    train=Command(3, lambda at, rng: goods.train_words(at, "runs", steps=1, eval_every=9), 60),
)

# --- Words --------------------------------------------------------------------------------------------------------

# No address, no absolute path: what a program makes of a drawn word lies in the folder of its case.
TEXTS = "x é漢\u202e \udcff ../x a/b -x -- $(x) %s {} . .. ~ * a,b , : 1:2 x:0.7,y true None [1 nan '".split()
TEXTS += ["", " ", "1 2", "x\ny", "x" * 5000]
NUMBERS = "0 1 -1 2 3 7 8 16 100 999 -0 +5 1e3 1.5 0x10 1_000 １２ 1e308 1e400 nan inf -inf".split()
NUMBERS += ["1e-320", "1,5", "", " ", "abc", "2147483647", "2147483648", "4294967296", "1000000000"]
NUMBERS += [str(2**63 - 1), str(2**63), str(-(2**63)), str(10**30)]
FIELDS = utils.FIELDS


def value_of(rng, name):
    """Words for the value of a flag, none of which need be right."""
    field = FIELDS.get(name)
    kind = field.type if field else None
    usual = rng.random() < 0.6  # so that many command lines come through to the program
    if name == "n_device_axis":
        return list(rng.choice(MESHES)) if usual else rng.choices(NUMBERS, k=rng.choice([2, 3, 4]))
    if kind is bool:
        return [] if usual else [rng.choice(["True", "maybe", "1"])]
    if typing.get_origin(kind) is typing.Literal:
        known = list(typing.get_args(kind))
        return [rng.choice(known if usual else [known[0][:-1], known[0].upper(), *TEXTS[:5]])]
    if kind in (int, float):
        return [rng.choice(limits(field) if usual else NUMBERS)]
    return [rng.choice(TEXTS + NUMBERS * (field is None))]


def limits(field):
    """Numbers at the limits of a flag."""
    found = [field.default, field.default + 1, 2 * field.default, 4 * field.default, 1, 2, 64]
    for fact, around in (("least", (-1, 0, 1)), ("below", (-1e-9, 0))):
        if fact in field.metadata:
            found += [field.metadata[fact] + step for step in around]
    return list(map(str, found))


def misspelled(rng, name):
    """A name that is none, mostly."""
    at = rng.randrange(len(name))
    return rng.choice(
        [name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name.upper(), name[: at + 1]]
    )


def flag_words(rng, names):
    """A drawn flag with its value."""
    name = rng.choice(names)
    value = value_of(rng, name)
    if rng.random() < 0.06:
        name = misspelled(rng, name)
    form = rng.choice(["plain"] * 20 + ["equals", "hyphens", "no", "alone", "one hyphen"])
    if form == "equals":
        return [f"--{name}={' '.join(map(str, value))}"]
    if form in ("no", "alone"):
        return [f"--{'no_' * (form == 'no')}{name}"]
    hyphens = "-" if form == "one hyphen" else "--"
    return [hyphens + (name.replace("_", "-") if form == "hyphens" else name), *value]


# --- A case -------------------------------------------------------------------------------------------------------

# what Python says of a value, which tells a user nothing
JARGON = "invalid literal|could not convert|NoneType|has no attribute|not supported between|out of range|Error\\("


class Kind:
    """Cases of command lines."""

    def __init__(self, folder):
        self.sound, self.names = folder / "goods", {}
        goods.make(self.sound)

    def flags_of(self, name, folder, words):
        """Names of the flags of a program, as its help shows them."""
        if name not in self.names:
            ended = run([*words[:2], "--help", "all"], folder / "help")
            shown = run([words[0], "--help"], folder / "help").out + ended.out
            flags = {flag.replace("-", "_") for flag in re.findall(r"--([A-Za-z][\w-]*)", shown)}
            if name in ("bench", "variations", "check"):
                flags |= FIELDS.keys()
            self.names[name] = sorted(flags - {"help"})
        return self.names[name]

    def case(self, rng, folder):
        """(what was tried, how it ended, what is wrong with that or None, the Ended)."""
        name = rng.choices(list(COMMANDS), [c.weight for c in COMMANDS.values()])[0]
        command = COMMANDS[name]
        fresh_folder(folder)
        at = goods.Places(self.sound, folder / "own", {command.copied})
        words = command.words(at, rng)
        names = self.flags_of(name, folder, words)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            words = words + flag_words(rng, names)
        if rng.random() < 0.05:
            words = words + [rng.choice(TEXTS)]
        words = [str(word) for word in words if "\0" not in str(word)]
        seconds = SEARCH_SECONDS if "--search" in words else command.seconds
        ended = run(words, folder / "work", seconds=seconds)
        tried = " ".join(word if len(word) < 99 else f"{word[:20]}..." for word in map(repr, words))
        wrong = complaint(ended)
        if not wrong and (jargon := re.search(JARGON, ended.err)):
            wrong = f"says {jargon[0]!r}"
        if not wrong and (left := leftovers(folder)):
            wrong = f"left {left[0]}"
        how = wrong or {0: "success", 2: "a sentence"}[ended.status]
        return f"{name}: {tried}", how, wrong, ended
