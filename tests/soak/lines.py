"""Drawn command lines of every program: each does its work or ends with one sentence."""

import os

import utils
from config import parser
from data import prepare, tokenize_shards, train_tokenizer
from tests.soak import jobs
from tests.soak.programs import Case, complaint, leftovers, run
from tools import bench, check_machine, checkpoints, common, compare, hf, trace

# {program: what reads its flags}
KINDS = {
    "main.py": utils.Config,
    "data/prepare.py": prepare.Options,
    "data/tokenize_shards.py": tokenize_shards.Options,
    "data/train_tokenizer.py": train_tokenizer.Options,
    "tools/bench.py": bench.Options,
    "tools/check_machine.py": check_machine.Options,
    "tools/checkpoints.py": checkpoints.Options,
    "tools/compare.py": compare.Options,
    "tools/evaluate.py": common.Evaluate,
    "tools/hf.py": hf.Options,
    "tools/sample.py": common.Sample,
    "tools/trace.py": trace.Options,
}
ALL = {name: f for kind in KINDS.values() for name, f in parser.fields_of(kind).items()}
# what takes long where nothing is wrong with the line
ENDLESS = {"tools/check_machine.py", "tools/bench.py"}
WRONG = "--no_such_flag"
JOBS = "tokenize tokenize_records.jsonl.gz tokenize_records.parquet ranks evaluate evaluate_hf sample verify"
JOBS = f"{JOBS} export import train resume".split()
PLAN = "--plan v5e-8 --by_formulas".split()  # ends within a second
# others would wait for processes and storage that are nowhere, or for a limit that was set to seconds
LEFT_OUT = {"coordinator", "num_processes", "process_id", "stuck_limit", "peer_timeout", "ray"}
TEXTS = [
    "",
    " ",
    "x",
    "-",
    "--",
    "-1",
    "a b",
    "é漢",
    "\udcff",
    "'\"$(ls)",
    "a\nb",
    "x" * 5000,
    "%s{}",
    "None",
]
NUMBERS = "0 -1 -0 1 2 3 7 0.5 1e3 1e31 -1e31 1e999 nan inf -inf 0x10 1_000 2147483648 １ 99999999999999999999".split()
LARGE = "127 65535 65536 1048576 2147483647 1e30".split()  # they may make a step that takes long
PATHS = "missing missing/a . .. folder file empty pipe dangling loop ~ ~nobody /dev/null /dev/full /proc/x".split()
PATHS += ["junk.json", "list.json", "file/a", "missing.jsonl", "x.npy"]


def make_odd_files(folder):
    """What PATHS name, in the folder where a program runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "folder").mkdir()
    for name, content in dict(file="x y\n", empty="", list="[1]", junk='{"T": {').items():
        (folder / name).write_text(content)
        (folder / f"{name}.json").write_text(content)
    (folder / "x.npy").write_bytes(b"\x93NUMPY")
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")


def value(rng, f, large):
    """Words that a flag may be followed by."""
    expected = parser.values_of(f)
    one = expected.kind
    n = 0 if expected.is_switch else expected.count or 0
    numbers = NUMBERS + large * LARGE
    right = (
        {int: numbers, float: numbers, str: TEXTS + PATHS}.get(one)
        or list(expected.choices)
        or ["true"]
    )
    count = rng.choice([n] * 6 + [0, 1, 2])
    return [
        rng.choice(right if rng.random() < 0.7 else TEXTS + PATHS + numbers)
        for _ in range(max(0, count))
    ]


def flag(rng, program, large):
    """Words of a flag, mostly of the program's own."""
    own = parser.fields_of(KINDS[program])
    fields = own if rng.random() < 0.85 else ALL
    f = fields[rng.choice(sorted(fields.keys() - LEFT_OUT))]
    name = rng.choice(
        [f"--{f.name}"] * 9 + [f"--no_{f.name}", f"-{f.name}", f"--{f.name[:-1]}", "--x", "--help"]
    )
    words = value(rng, f, large)
    if words and rng.random() < 0.3:
        return [f"{name}={words[0]}", *words[1:]]
    return [name, *words]


def line(rng, at, place):
    """(words of a command line, which may be wrong in several ways)."""
    job = rng.choice([*JOBS, *["plan"] * 6, *["any"] * 4])
    if job == "plan":
        words = ["main.py", *flag(rng, "main.py", True), *flag(rng, "main.py", True), *PLAN]
    elif job == "any":
        program = rng.choice(sorted(KINDS))
        words = [program, *flag(rng, program, True), WRONG] if program in ENDLESS else [program]
    else:
        words = [str(word) for word in jobs.words_of(job, at, place)]
    program = words[0]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        i = rng.randint(1, len(words))
        how = rng.choice(["add", "add", "add", "drop", "replace", "repeat"])
        if how == "add":
            words += flag(rng, program, job == "plan")
        elif how == "repeat":
            words += words[i : i + 2]
        elif i < len(words) and words[i] not in PLAN:
            words[i : i + 1] = [rng.choice(TEXTS + PATHS)] if how == "replace" else []
    return words


def case(rng, sound, folder):
    at, place = jobs.places(sound, folder, "resume")
    make_odd_files(folder / "work")
    words = line(rng, at, place)
    tried = " ".join(map(repr, words)).replace(str(folder), ".").replace(str(sound), "sound")
    ended = run(words, folder / "work")
    # --plan: 3 where the step does not fit
    wrong = complaint(ended, (0, 2, 3, 75))
    return Case(tried, wrong or f"status {ended.status}", wrong or leftovers(folder), ended)
