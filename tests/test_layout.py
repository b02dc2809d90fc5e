"""The layout: imports go one way. Every import statement counts, also those inside functions."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def order():
    """{package or module at top level: its place in the arrow of CONTRIBUTING.md}. It may import what is left of it."""
    arrow = re.search(r"^```\n(.*?◄.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    return {name.strip(): place for place, name in enumerate(arrow[1].split("◄"))}


DYNAMIC = {"architectures/__init__.py"}  # the registry imports an architecture by its name


def imported(tree):
    """Yield the modules, or names in modules, that the statements of a syntax tree import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def import_graph(sources):
    """{module: modules of these that it imports} of {module: source}."""
    graph = {}
    for module, source in sources.items():
        names = set(imported(ast.parse(source)))
        parents = {name.rpartition(".")[0] for name in names if name not in sources}
        graph[module] = ((names | parents) & sources.keys()) - {module}
    return graph


def circle(graph):
    """The modules of one circle of imports, [] where there is none."""
    done = set()

    def search(module, path):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module]):
            found = search(other, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        found = search(module, [])
        if found:
            return found
    return []


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
    """The repository's Python files but tests, as paths."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    said = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in sorted(said.split()) if (ROOT / line).is_file()]
    return [path for path in paths if path.parts[0] != "tests"]


def repository_graph():
    sources = {}
    for path in files():
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        sources[module] = (ROOT / path).read_text()
    return import_graph(sources)


def test_imports_go_round_in_no_circle():
    assert circle(repository_graph()) == []


def test_imports_go_one_way():
    assert wrong_ways(repository_graph()) == []


def test_no_import_is_hidden_from_these_tests():
    for path in files():
        calls = [
            n for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.Call)
        ]
        called = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
        hidden = called & {"import_module", "__import__", "exec_module", "run_path", "run_module"}
        assert not hidden or str(path) in DYNAMIC, (path, hidden)


def test_few_files_stand_at_top_level():
    assert len([path for path in files() if len(path.parts) == 1]) <= 6


def test_circles_and_wrong_ways_are_found():
    """The checks above can fail."""
    sources = {
        "main": "import planning.plan",
        "planning": "",
        "planning.plan": "import model\nfrom training import steps",
        "training": "",
        "training.steps": "import utils, model",
        "model": "import os\n\ndef f():\n    from utils import UserError",
        "utils": "",
    }
    assert circle(import_graph(sources)) == [] and wrong_ways(import_graph(sources)) == []
    hidden = sources | {"utils": "def f():\n    if True:\n        from training import steps"}
    assert circle(import_graph(hidden)) == ["model", "utils", "training.steps"]
    upwards = sources | {"training.steps": "import utils\nfrom planning.plan import main"}
    assert ("training.steps", "planning.plan") in wrong_ways(import_graph(upwards))
    from_main = sources | {"planning.plan": "from main import train"}
    assert wrong_ways(import_graph(from_main)) == [("planning.plan", "main")]
