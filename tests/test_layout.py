"""The layout: imports go one way. Every import statement counts, also those inside functions."""

import ast
import graphlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def sources():
    """{module: source} of the repository's Python files but tests."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    said = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {}
    for path in said.split():
        if not path.startswith("tests/") and (ROOT / path).is_file():
            module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            found[module] = (ROOT / path).read_text()
    return found


def test_imports_go_one_way_and_in_no_circle():
    modules = sources()
    graph = {name: (imported(modules[name]) & modules.keys()) - {name} for name in modules}
    graphlib.TopologicalSorter(graph).prepare()  # fails at a circle
    place = order()
    for module, others in graph.items():
        for other in others:
            assert place[other.split(".")[0]] <= place[module.split(".")[0]], (module, other)


def test_few_files_stand_at_top_level():
    assert len(list(ROOT.glob("*.py"))) <= 6
