"""Drawn command lines of every program: each ends soon, in success or in one sentence."""

import re
import typing

import presets
import utils
from tests.soak import jobs
from tests.soak.programs import Case, complaint, leftovers, run

# --- Command lines that work --------------------------------------------------------------------------------------

MACHINES = "v4:2x2x2 v4:2x4x4 v5e:4x4 v6e:2x2 2*v5p:2x2x2 gpu:8xH200 gpu:2x8xH100 gpu:A100".split()
NO_MACHINES = "v4 v4: v4:0x1x1 v4:99999x99999x99999 gpu:0xH100 gpu:8xNOTHING 0*v4:2x2x2".split()
NO_MACHINES += "gpu: gpu:-1xH100 gpu:8xH100x 999999999*v4:2x2x2 v4:2x2x2x2 v9:2x2 é".split() + [""]
MESHES = [(0, 1, 1), (1, 1, 1), (8, 1, 1), (2, 2, 2), (16, 2, 1), (1, 4, 2), (0, 0, 0), (3, 5, 7)]
# how often each program is drawn; those that are not here are jobs
WEIGHTS = dict(plan=30, check=20, evaluate=6, evaluate_hf=2, sample=6, sample_hf=2, verify=4)
WEIGHTS |= {"prune": 2, "export": 3, "import": 2, "compare": 4, "trace": 5, "tokenize": 8}
WEIGHTS |= dict(ranks=6, train=3)
SECONDS = dict(plan=20, check=10)  # within which any command line must end; 60 of the others


def words_of(rng, name, at, out):
    """A command line of a program that works, mostly."""
    preset = ["--preset", rng.choice(list(presets.PRESETS))]
    if name == "check":
        return ["training/command_line.py", rng.choice(["here", "elsewhere"]), *preset]
    if name != "plan":
        return jobs.words_of(name, at, out)
    machine = rng.choice(MACHINES * 6 + NO_MACHINES)
    mesh = rng.choice(MESHES[:1] * 9 + MESHES)
    return ["main.py", *preset, "--plan", machine, "--n_device_axis", *mesh, "--by_formulas"]


# --- Drawn words --------------------------------------------------------------------------------------------------

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
    return [str(number) for number in found]


def flag_words(rng, names):
    """A drawn flag with its value, now and then misspelled."""
    name = rng.choice(names)
    value = value_of(rng, name)
    if rng.random() < 0.06:
        at = rng.randrange(len(name))
        name = rng.choice([name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name.upper()])
    form = rng.choice(["plain"] * 20 + ["equals", "hyphens", "no", "one hyphen"])
    if form == "equals":
        return [f"--{name}={' '.join(map(str, value))}"]
    if form == "no":
        return [f"--no_{name}"]
    if form == "hyphens":
        name = name.replace("_", "-")
    return [f"{'-' if form == 'one hyphen' else '--'}{name}", *value]


# --- A case -------------------------------------------------------------------------------------------------------

# what Python says of a value, which tells a user nothing
JARGON = "invalid literal|could not convert|NoneType|has no attribute|not supported between|out of range|Error\\("


class Kind:
    """Cases of command lines."""

    def __init__(self, sound):
        self.sound, self.names = sound, {}
        jobs.make(sound)

    def flags_of(self, words, folder):
        """Names of the flags of a program, as its help shows them."""
        program = words[0]
        if program not in self.names:
            shown = (
                run([program, "--help", "all"], folder).out + run([program, "--help"], folder).out
            )
            flags = {flag.replace("-", "_") for flag in re.findall(r"--([A-Za-z][\w-]*)", shown)}
            if program == "training/command_line.py":
                flags |= FIELDS.keys()
            self.names[program] = sorted(flags - {"help"})
        return self.names[program]

    def case(self, rng, folder):
        name = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        at, out = jobs.places(self.sound, folder, name)
        words = words_of(rng, name, at, out)
        names = self.flags_of(words, folder / "help")
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            words += flag_words(rng, names)
        if rng.random() < 0.05:
            words.append(rng.choice(TEXTS))
        words = [str(word) for word in words]
        seconds = 180 if "--search" in words else SECONDS.get(name, 60)  # there are many meshes
        ended = run(words, folder / "work", seconds=seconds)
        tried = " ".join(word if len(word) < 99 else f"{word[:20]}..." for word in map(repr, words))
        wrong = complaint(ended)
        if not wrong and (jargon := re.search(JARGON, ended.err)):
            wrong = f"says {jargon[0]!r}"
        wrong = wrong or leftovers(folder)
        how = wrong or {0: "success", 2: "a sentence"}[ended.status]
        return Case(f"{name}: {tried}", how, wrong, ended)
