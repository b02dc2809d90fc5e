"""The layout: imports go one way. Every import statement counts, also those inside functions."""

import ast
import graphlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DYNAMIC = {"architectures/__init__.py"}  # the registry imports an architecture by its name
HIDING = {"import_module", "__import__", "exec_module", "run_path", "run_module"}


def order():
    """{package or module at top level: its place in the arrow of CONTRIBUTING.md}. It may import what is left of it."""
    arrow = re.search(r"^```\n(.*?◄.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    return {name.strip(): place for place, name in enumerate(arrow[1].split("◄"))}


def imported(source):
    """Modules, or names in modules, that the statements of a source import."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def import_graph(sources):
    """{module: modules of these that it imports} of {module: source}. Raises graphlib.CycleError."""
    graph = {}
    for module, source in sources.items():
        names = imported(source)
        names |= {name.rpartition(".")[0] for name in names - sources.keys()}
        graph[module] = (names & sources.keys()) - {module}
    graphlib.TopologicalSorter(graph).prepare()
    return graph


def wrong_ways(graph):
    """[(module, what it imports and may not)]."""
    place = order() | {"docs": 0}
    return [
        (module, other)
        for module, others in graph.items()
        for other in sorted(others)
        if place[other.split(".")[0]] > place[module.split(".")[0]]
    ]


def files():
    """{path: source} of the repository's Python files but tests."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    said = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [path for path in sorted(said.split()) if not path.startswith("tests/")]
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).is_file()}


def test_imports_go_one_way_and_in_no_circle():
    modules = {}
    for path, source in files().items():
        modules[path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")] = source
    assert wrong_ways(import_graph(modules)) == []


def test_no_import_is_hidden_from_these_tests():
    for path, source in files().items():
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        called = {getattr(func, "attr", getattr(func, "id", "")) for func in calls}
        assert not called & HIDING or path in DYNAMIC, path


def test_few_files_stand_at_top_level():
    assert len([path for path in files() if "/" not in path]) <= 6


def test_circles_and_wrong_ways_are_found():
    """The checks above can fail."""
    sources = {
        "main": "import planning.plan",
        "planning.plan": "import model\nfrom training import steps",
        "training.steps": "import utils, model",
        "model": "import os\n\ndef f():\n    from utils import UserError",
        "utils": "",
    }
    assert wrong_ways(import_graph(sources)) == []
    hidden = sources | {"utils": "def f():\n    if True:\n        from training import steps"}
    with pytest.raises(graphlib.CycleError, match="training.steps"):
        import_graph(hidden)
    upwards = sources | {"planning.plan": "", "training.steps": "from planning.plan import main"}
    assert wrong_ways(import_graph(upwards)) == [("training.steps", "planning.plan")]
