"""The documentation: its links, the files, functions and flags that it names, and its commands.

A fence of plain `sh` is run as it stands, in a copy of the repository with a small corpus and a small run. What a plain
fence right after it shows must be in its output. One of `sh minutes`, `sh hosts`, `sh accelerator` or `sh network` is
not run: the flags of its commands are parsed.
"""

import ast
import base64
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, SMALL, flags_of

import model
import presets
import utils
from runtime import messages, parser
from training import command_line, settings

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {"minutes", "hosts", "accelerator", "network"}
SCRIPTS = ["run.sh", "launcher.sh", "setup_tpu.sh", "debug_tpu.sh"]
PROGRAMS = """main.py data/tokenize_shards.py data/train_tokenizer.py tools/bench.py tools/checkpoints.py
tools/compare.py tools/evaluate.py tools/hf.py tools/sample.py tools/trace.py""".split()
OUR_FILE = r"[\w./-]+\.(?:py|sh|toml)"  # what runs write is .json, .jsonl, .png


# --- What a page says ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fence:
    info: str  # what stands behind the opening backticks
    body: str
    shown: str  # the plain fence right after it, "" where there is none


def fences(text):
    pattern = r"^```([^\n]*)\n(.*?)^```$(?=(?:\n\n```\n(.*?)^```$)?)"
    found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return [Fence(info.strip(), body, shown) for info, body, shown in found]


def prose(text):
    """The page without its fences."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(fence):
    """The command lines of a fence: comments dropped, continued lines joined, `a && b` as two."""
    lines = fence.body.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split("&&")]
    words = [shlex.split(part, comments=True) for part in parts]
    return [command for command in words if command]


def anchors(text):
    """Of all headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def names_in(path):
    """What a Python file defines at its top, and the methods and fields of its classes as Class.name."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            names |= {n.id for target in node.targets for n in ast.walk(target) if hasattr(n, "id")}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else []:
            name = getattr(inner, "name", None) or getattr(getattr(inner, "target", None), "id", "")
            names.add(f"{node.name}.{name}")
    return names


# --- What is wrong with it: lists of sentences --------------------------------------------------------------------


def wrong_links(page, text):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists():
            wrong.append(f"{page.name}: {target} does not exist")
        elif anchor and anchor not in anchors(text if path == page else path.read_text()):
            wrong.append(f"{page.name}: {target} is no heading of that page")
    return wrong


def find(file):
    """The file of the repository that a page names, by its path or, in a page about it, its name alone."""
    if (ROOT / file).exists():
        return ROOT / file
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    alone = [path for path in listed.split() if path.endswith(f"/{file}") and "/" not in file]
    return ROOT / alone[0] if len(alone) == 1 else None


def wrong_names(page, text):
    wrong = []
    for file, name in re.findall(rf"`({OUR_FILE})(?::\s+([\w.]+))?`", prose(text)):
        path = find(file)
        if "NAME" in file:  # of the reader's choice
            continue
        if path is None:
            wrong.append(f"{page.name}: there is no {file}")
        elif name and name not in names_in(path):
            wrong.append(f"{page.name}: {file} has no {name}")
    return wrong


def as_flag(word):
    """--a-flag or -a_flag as --a_flag, which is what the programs make of it."""
    return "--" + word.lstrip("-").replace("-", "_")


@functools.cache
def help_of(program):
    """The flags that a program's --help lists, or a shell script's usage."""
    if program.endswith(".sh"):
        said = (ROOT / program).read_text()
    else:
        command = [sys.executable, str(ROOT / program), "--help", "all"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        said = done.stdout
    return {as_flag(word) for word in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", said)}


@functools.cache
def every_flag():
    """Of all programs and scripts, of pytest and pip none. Old names of main.py are flags too."""
    with ThreadPoolExecutor(2) as both:
        known = set().union(*both.map(help_of, [*PROGRAMS, *SCRIPTS]))
    return known | {as_flag(old) for old in utils.RENAMED}


def wrong_flags(page, text):
    """Flags in the page's prose that no program has."""
    said = set(re.findall(r"(?<![\w-])--[a-zA-Z]\w*", prose(text)))
    unknown = [flag for flag in sorted(said) if as_flag(flag) not in every_flag()]
    return [f"{page.name}: no program has {flag}" for flag in unknown]


def program_of(command):
    """(the program of ours that the words of a command call, what follows it), or None."""
    for i, word in enumerate(command):
        if word in PROGRAMS or word in SCRIPTS:
            return word, command[i + 1 :]
    return None


def wrong_command(command):
    """What is wrong with the words of a command, or None."""
    if (called := program_of(command)) is None:
        return None
    program, words = called
    try:
        if program == "main.py" and "--help" not in words:
            command_line.check(words, True)
        elif program in ("launcher.sh", "run.sh") and "--preset" in words:
            command_line.check(words[words.index("--preset") :], True)
    except messages.UserError as e:
        return str(e)
    known = help_of(program)
    if program in ("tools/compare.py", "tools/bench.py", *SCRIPTS):  # take those of main.py too
        known = known | help_of("main.py")
    for flag in [word.split("=")[0] for word in words if parser.FLAG.match(word)]:
        if as_flag(flag) not in known:
            return f"{program} has no {flag}"
    return None


def wrong_commands(page, text):
    wrong = []
    for fence in fences(text):
        for command in commands(fence) if fence.info.startswith("sh") else []:
            if said := wrong_command(command):
                wrong.append(f"{page.name}: {' '.join(command)}: {said}")
    return wrong


# --- Tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [wrong_links, wrong_names, wrong_flags, wrong_commands])
def test_what_the_pages_name_is_there(check):
    assert [said for page in PAGES for said in check(page, page.read_text())] == []


def test_fences_say_what_they_are():
    kinds = {fence.info for page in PAGES for fence in fences(page.read_text())}
    assert kinds <= {"", "python", "sh"} | {f"sh {reason}" for reason in NOT_RUN}


def test_readme_is_short_and_leads_everywhere():
    readme = (ROOT / "README.md").read_bytes()
    assert len(readme) <= 10_000
    linked = re.findall(r"\]\(([^)#]+)", readme.decode())
    assert {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"} <= set(linked)


def test_every_flag_is_listed_once():
    """The table of flags in docs/runs.md."""
    table = (ROOT / "docs" / "runs.md").read_text().split("| group | flags |")[1].split("\n\n")[0]
    listed = re.findall(r"`(\w+)`", table)
    assert sorted(listed) == sorted(parser.fields_of(utils.Config))


def test_models_tells_the_parameters_of_every_preset():
    rows = [line for line in (ROOT / "docs/models.md").read_text().splitlines() if "| `" in line]
    for name in presets.PRESETS:
        total, active, embedding = model.count_params(settings.validate(presets.preset(name), 1))
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        assert f"{total + embedding:,}" in row, (name, total + embedding)
        if "all active" not in row:
            assert f"{active + embedding:,}" in row, (name, active + embedding)


def test_the_curves_of_rates_are_those_of_its_tables():
    text = (ROOT / "docs/rates.md").read_text()
    panels = json.loads((ROOT / "docs/rates.json").read_text())["panels"]
    losses = [loss for panel in panels for curve in panel["curves"] for loss in curve["loss"]]
    assert len(losses) > 20 and all(f"{loss:.3f}" in text for loss in losses)


# --- Commands that are run ----------------------------------------------------------------------------------------


def run(words, folder):
    """A command of a page, in `folder`; its output."""
    words = [sys.executable if word == "python" else word for word in words]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "xla")}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


SHARDS = "--source text --tokenizer bytes.tiktoken --val_fraction 0.2 --output data/shards/stdlib"
TRAIN = """--compilation_cache xla --training_steps 2 --profile 2:2 --warmup_steps 1 --eval_every 2 --eval_steps 1
--max_tokens 4 --n_devices 1 --n_device_axis 1 1 1 --train_batch_size 4 --val_batch_size 4 --data data/shards/stdlib"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with shards in data/shards/stdlib and a run of a few steps in runs/tiny."""
    folder = tmp_path_factory.mktemp("docs") / "copy"
    left_out = (".*", "runs", "shards", "cache", "wandb", "__pycache__", "tests")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out))
    ranks = [base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)]
    (folder / "bytes.tiktoken").write_bytes(b"".join(ranks))
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text("".join(f"{n} {n * i}\n" for n in range(300)))
    run(f"python data/tokenize_shards.py {SHARDS}".split(), folder)
    small = {**SMALL, "vocab_size": 257, "blocks": 2, "layers_per_block": 2}
    run(["python", "main.py", "--preset", "tiny", *flags_of(**small), *TRAIN.split()], folder)
    return folder


def missing(shown, output):
    """Lines that a page shows of an output and that are not in it; spaces and what stands behind # do not count."""
    plain = " ".join(output.split())
    lines = [" ".join(line.split("#")[0].split()) for line in shown.splitlines()]
    return [line for line in lines if line != "..." and line not in plain]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_as_they_stand(page, copy):
    def not_in_output(fence):
        output = "\n".join(run(command, copy) for command in commands(fence))
        return missing(fence.shown, output)

    to_run = [fence for fence in fences(page.read_text()) if fence.info == "sh"]
    with ThreadPoolExecutor(2) as both:
        assert sum(both.map(not_in_output, to_run), []) == []
