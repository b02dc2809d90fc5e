"""The documentation: its links, the files, functions and flags that it names, its layout, and its commands.

A fence of plain `sh` is run as it stands, in a copy of the repository with a small corpus and a small run. What a plain
fence right after it shows must be in its output. One of `sh minutes`, `sh hosts`, `sh accelerator` or `sh network` is
not run: the flags of its commands are parsed.
"""

import ast
import contextlib
import functools
import graphlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_plain
import test_plan
from helpers import BYTE_RANKS, ROOT, copy_repository, files_of_repository, flags_of
from small_models import SMALL_RUN

import model
import utils
from config import command_line, parser, presets, settle
from planning import command as planning
from shards import tokenization

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Entries may name flags and files that are gone: of these pages the links alone are checked.
NOTEBOOK = sorted((ROOT / "dev").glob("*.md"))
KINDS = {"", "python", "sh", "sh minutes", "sh hosts", "sh accelerator", "sh network"}
SCRIPTS = ["run.sh", "launcher.sh", "setup_tpu.sh", "debug_tpu.sh", "cluster/slurm.sbatch"]
PROGRAMS = """main.py data/prepare.py data/tokenize_shards.py data/train_tokenizer.py tools/bench.py
tools/check_machine.py tools/checkpoints.py tools/compare.py tools/evaluate.py tools/hf.py tools/page.py
tools/sample.py tools/trace.py""".split()
OUR_FILE = r"[\w./-]+\.(?:py|sh|sbatch|toml)"  # what runs write is .json, .jsonl, .png


def fences(page):
    """[(what stands behind the opening backticks, body, the plain fence right after it or "")]."""
    pattern = r"^```([^\n]*)\n(.*?)^```$(?=(?:\n\n```\n(.*?)^```$)?)"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


def prose(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(body):
    """The command lines of a fence: comments dropped, continued lines joined, `a && b` as two, variables replaced by
    their values, those of loops by the first."""
    known = dict(re.findall(r'^(\w+)="(.*)"$', body, re.MULTILINE))
    known |= dict(re.findall(r"for (\w+) in (\w+)", body))
    body = re.sub(r"\$(\w+)", lambda name: known.get(name[1], name[0]), body)
    lines = body.replace("\\\n", " ").replace("&&", "\n").splitlines()
    return list(filter(None, [shlex.split(line, comments=True) for line in lines]))


def anchors(text):
    """Of all headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def defines(path, name):
    """Whether a Python file has the name at its top or, for Class.name, in that class."""
    owner, _, name = name.rpartition(".")
    before = rf"^class {owner}\b.*\n(?:(?: .*)?\n)*?    " if owner else "^"
    defined = rf"{before}(?:(?:def|class) {name}\b|(?:\w+, )*{name}(?:,|:| =))"
    return re.search(defined, path.read_text(), re.MULTILINE)


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.parametrize("page", PAGES + NOTEBOOK, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


@every_page
def test_files_and_names_in_them_are_there(page):
    """Files by their path or, in a page about one, its name alone."""
    listed = files_of_repository()
    for file, name in re.findall(rf"`({OUR_FILE})(?::\s+([\w.]+))?`", prose(page.read_text())):
        if "NAME" not in file:  # of the reader's choice
            found = [path for path in listed if f"/{path}".endswith(f"/{file}")]
            assert file in found or len(found) == 1, file
            path = ROOT / (file if file in found else found[0])
            assert not name or defines(path, name), f"{file}: {name}"


def as_flags(words):
    """--a-flag and -a_flag as --a_flag, which is what the programs make of it."""
    return {"--" + word.lstrip("-").replace("-", "_") for word in words}


@functools.cache
def help_of(program):
    """The flags that a program's --help lists, or a shell script's usage."""
    if program in SCRIPTS:
        said = (ROOT / program).read_text()
    else:
        command = [sys.executable, str(ROOT / program), "--help", "all"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        said = done.stdout
    return as_flags(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", said))


@functools.cache
def every_flag():
    """Of all programs and scripts, of pytest and pip none. Old names of main.py are flags too."""
    with ThreadPoolExecutor(2) as both:
        known = set().union(*both.map(help_of, [*PROGRAMS, *SCRIPTS]))
    return known | as_flags(utils.ALIASES)


@every_page
def test_a_program_has_each_flag(page):
    said = re.findall(r"(?<![\w-])--[a-zA-Z]\w*", prose(page.read_text()))
    assert as_flags(said) <= every_flag()


def check_command(command):
    """Raises UserError where main.py would, and fails at a flag that the program has not."""
    ours = [i for i, word in enumerate(command) if word in PROGRAMS + SCRIPTS]
    if not ours:
        return
    program, words = command[ours[0]], command[ours[0] + 1 :]
    if program == "main.py" and "--help" not in words:
        command_line.check(words, True)
    elif program in SCRIPTS and "--preset" in words:
        flags = [word.replace("%a", "1") for word in words]  # the number of a task in a job array
        command_line.check(flags[words.index("--preset") :], True)
    known = help_of(program)
    if program in ("tools/bench.py", *SCRIPTS):  # take those of main.py too
        known = known | help_of("main.py")
    flags = [word.split("=")[0] for word in words if parser.FLAG.match(word)]
    assert as_flags(flags) <= known, (program, flags)


@every_page
def test_commands_are_understood(page):
    for info, body, _ in fences(page):
        assert info in KINDS
        for command in commands(body) if info.startswith("sh") else []:
            check_command(command)


def test_readme_is_short_and_leads_everywhere():
    readme = (ROOT / "README.md").read_bytes()
    assert len(readme) <= 10_000
    linked = re.findall(r"\]\(([^)#]+)", readme.decode())
    assert {f"docs/{page.name}" for page in PAGES if page.parent == ROOT / "docs"} <= set(linked)


def test_every_flag_is_listed_once():
    table = (ROOT / "docs" / "runs.md").read_text().split("| group | flags |")[1].split("\n\n")[0]
    listed = re.findall(r"`(\w+)`", table)
    assert sorted(listed) == sorted(parser.fields_of(utils.Config))


def test_models_tells_the_parameters_of_every_preset():
    text = (ROOT / "docs/models.md").read_text()
    (table,) = re.findall(r"^\| `--preset`.*?(?=\n\n)", text, re.M | re.S)
    rows = table.splitlines()[2:]
    for name in presets.PRESETS:
        total, active, embedding = model.count_params(settle.validate(presets.preset(name), 1))
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        assert f"{total + embedding:,}" in row, (name, total + embedding)
        if "all active" not in row:
            assert f"{active + embedding:,}" in row, (name, active + embedding)


# What pages say of default runs, with the numbers of docs/measured.json, which `python -m dev.measure` writes
STATED = {
    "README.md": [
        "val {tiny[first_val_loss]:.4f}  ",
        "train {tiny[final_train_loss]:.4f}  val {tiny[final_val_loss]:.4f} ",
        "After 40 steps they have validation losses of {tiny[first_val_loss]:.4f} and {mesh[first_val_loss]:.4f},",
        "after 400 of {tiny[final_val_loss]:.4f} and {mesh[final_val_loss]:.4f}:",
        "They end at {tiny[final_val_loss]:.2f} and {gpt2-tiny[final_val_loss]:.2f} nats per token.",
    ],
    "docs/runs.md": ["the step of `tiny` compiles in {tiny[speed][seconds_compiling]} s,"],
    "docs/sampling-and-evaluation.md": [
        "{tiny[evaluated][sequences]:,} |",
        "The run itself ends at {tiny[final_val_loss]:.3f}, because",
        "{tiny[evaluated][loss]:.4f} ± {tiny[evaluated][loss_error]:.4f}",
        "{tiny[evaluated][perplexity]:.4f} ± {tiny[evaluated][perplexity_error]:.4f}",
        "{tiny[evaluated][bits_per_byte]:.4f} ± {tiny[evaluated][bits_per_byte_error]:.4f}",
    ],
}


@pytest.mark.parametrize("page", STATED)
def test_pages_state_what_was_measured(page):
    measured = json.loads((ROOT / "docs/measured.json").read_text())
    text = " ".join((ROOT / page).read_text().split())
    for sentence in STATED[page]:
        assert " ".join(sentence.format(**measured).split()) in text, sentence


def millions(preset):
    """Parameters with the embedding, and those that a token uses, as README writes them."""
    total, active, embedding = model.count_params(settle.validate(presets.preset(preset), 1))
    return f"{(total + embedding) / 1e6:.1f}M", f"{(active + embedding) / 1e6:.1f}M"


def test_readme_tells_the_sizes_of_its_two_models():
    text = " ".join((ROOT / "README.md").read_text().split())
    total, active = millions("tiny")
    assert (
        f"`tiny` is a mixture of experts with {total} parameters, {active} of them active" in text
    )
    assert f"is a dense GPT-2 with {millions('gpt2-tiny')[0]} parameters" in text


def test_pages_count_the_meshes_and_the_plans_of_the_tests():
    meshes = ["five", "six", "seven", "eight"][len(test_plain.MESHES) - 5] + " meshes"
    for page in ("README.md", "CONTRIBUTING.md", "docs/guide.md"):
        assert meshes in (ROOT / page).read_text(), page
    plans = test_plan.CONFIGURATIONS + test_plan.TPU_CONFIGURATIONS + test_plan.GPU_CONFIGURATIONS
    assert f"[{len(plans)} configurations](tests/test_plan.py)" in (ROOT / "README.md").read_text()


def test_the_guide_shows_the_plain_model_as_it_is():
    source = (ROOT / "plain_model.py").read_text()
    shown = [body for info, body, _ in fences(ROOT / "docs/guide.md") if info == "python"]
    assert shown and all(body in source for body in shown)


def test_readme_counts_the_lines_of_the_core():
    """To within a tenth, of each file on a batch's way and of all; the way is the longest walk of a day."""
    text = (ROOT / "README.md").read_text()
    told = {path: int(n) for path, n in re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", text, re.M)}
    assert 8 <= len(told) <= 10 and sum(told.values()) <= 3100
    for path, lines in told.items():
        assert abs(lines_of(path) / lines - 1) < 0.1, (path, lines_of(path))
        assert all(words in (ROOT / path).read_text() for words in ("Comes before", "Comes next"))
    arrow = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    around = {"config", "logs", "runtime"}
    core = {*re.findall(r"\w+", arrow[: arrow.index("◄ data ◄")]), "main"} - around
    counted = re.findall(
        r"^\| the core, ([\d,]+)|^\| what keeps its runs going, ([\d,]+)", text, re.M
    )
    for names, total in zip((core, around), map("".join, counted), strict=True):
        paths = [
            path for path in files_of_repository("*.py") if re.split(r"[/.]", path)[0] in names
        ]
        assert abs(sum(map(lines_of, paths)) / int(total.replace(",", "")) - 1) < 0.1


def lines_of(path):
    return len((ROOT / path).read_text().splitlines())


def test_the_curves_of_rates_are_those_of_the_log():
    text = (ROOT / "dev/log.md").read_text()
    panels = json.loads((ROOT / "dev/rates.json").read_text())["panels"]
    losses = [loss for panel in panels for curve in panel["curves"] for loss in curve["loss"]]
    assert len(losses) > 20 and all(f"{loss:.3f}" in text for loss in losses)


def imported(tree, modules):
    """The `modules` that the statements of a file import. `from package import module` imports the module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & modules or {node.module}
    return names & modules


def tree_of(path):
    """The parsed file of the repository."""
    return ast.parse((ROOT / path).read_text())


def position(arrow, module):
    """The index of a module in the arrow, which names it, or else its package."""
    return arrow.index(module if module in arrow else module.split(".")[0])


def test_imports_go_one_way_and_in_no_circle():
    paths = [
        path for path in files_of_repository("*.py") if not path.startswith(("tests/", "dev/"))
    ]
    names = [re.sub(r"(\.__init__)?\.py$", "", path.replace("/", ".")) for path in paths]
    graph = {name: imported(tree_of(path), {*names}) - {name} for name, path in zip(names, paths)}
    graphlib.TopologicalSorter(graph).prepare()  # fails at a circle
    # a package, or a module that is named, may import what is left of it in this arrow
    drawn = re.search(r"^```\n(.*?◄.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    arrow = [name.strip() for name in drawn[1].split("◄")]
    core = {name for name in graph if position(arrow, name) <= arrow.index("train")}
    # main.py, which belongs to the core, imports the workbench in one function alone
    whole = tree_of("main.py")
    rest = [node for node in whole.body if getattr(node, "name", "") != "workbench"]
    assert len(rest) == len(whole.body) - 1
    assert imported(ast.Module(rest, []), {*names}) <= core < {*names}
    for module, others in graph.items():
        for other in others:
            assert position(arrow, other) <= position(arrow, module), (module, other)
    assert sum("/" not in path for path in paths) <= 7


def test_no_test_file_imports_another():
    """What they share is in files beside them. This file alone reads others: pages say how many cases those have."""
    paths = files_of_repository("tests/test_*.py", "tests/conftest.py")
    tests = {Path(path).stem for path in paths}
    for path in files_of_repository("tests/*.py"):
        if path != "tests/test_docs.py":
            assert not imported(tree_of(path), tests), path


def test_functions_have_under_50_lines():
    """Blank lines do not count: they help a reader."""
    for path in files_of_repository("*.py"):
        text = (ROOT / path).read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = lines[node.lineno - 1 : node.end_lineno]
                assert sum(bool(line.strip()) for line in body) < 50, f"{path}: {node.name}"


def run(words, folder):
    """The output of a command in `folder`. A plan, which needs nothing there, is made in this process."""
    if "--plan" in words:
        assert words[:2] == ["python", "main.py"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert planning.main(command_line.parse(words[2:])) == 0
        return said.getvalue()
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
    copy_repository(folder)
    (folder / "bytes.tiktoken").write_bytes(tokenization.dump_ranks(BYTE_RANKS))
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text("".join(f"{n} {n * i}\n" for n in range(300)))
    run(f"python data/tokenize_shards.py {SHARDS}".split(), folder)
    small = {**SMALL_RUN, "vocab_size": 257, "blocks": 1}
    run(["python", "main.py", "--preset", "tiny", *flags_of(**small), *TRAIN.split()], folder)
    return folder


@every_page
def test_commands_run_as_they_stand(page, copy):
    """Where the page shows lines of an output, spaces and what stands behind # do not count."""
    for info, body, shown in fences(page):
        if info == "sh":
            output = " ".join(" ".join(run(words, copy).split()) for words in commands(body))
            lines = [" ".join(line.split("#")[0].split()) for line in shown.splitlines()]
            assert [line for line in lines if line != "..." and line not in output] == []
