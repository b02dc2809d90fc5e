"""What the operations of a compiled step are in the code: of its optimized HLO text."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from planning import hlo

ROOT = Path(__file__).resolve().parents[2]
# Parts of a step, by the innermost of these scopes (jax.named_scope) that an operation stands in.
PARTS = {
    "attention": "attention",
    "feed_forward": "feed_forward",
    "experts": "experts",
    "embed": "vocabulary",
    "head": "vocabulary",
    "optimizer": "optimizer",
}
REST = "rest"
# What jax itself adds to the path of scopes.
NOT_CODE = {
    "jit",
    "pjit",
    "train_step",
    "jvp",
    "transpose",
    "vmap",
    "while",
    "body",
    "cond",
    "closed_call",
}
NOT_CODE |= {"shard_map", "checkpoint", "rematted_computation"}
SLICES = "slices"  # in the place of mesh axes: what TPU slices send each other
BETWEEN_SLICES = ("send", "recv")
LOOPS = ("while", "call", "conditional")  # what they run is traced itself


class Operation(NamedTuple):
    """What stands in the code for one HLO operation or several alike."""

    name: str  # its scopes and what jax calls it: attention/all_to_all
    way: str  # forward, backward, recomputed; "" outside the model
    source: str  # file, line and function
    part: str  # of PARTS
    axes: str  # mesh axes over which it communicates, such as dp+tp; "": it computes
    is_product: bool  # whether it has a matrix product


class Program:
    """A compiled step on a {axis: size} mesh."""

    def __init__(self, text, mesh):
        self.mesh = mesh
        self.name = re.match(r"HloModule ([\w.\-]+)", text)[1]
        self.computations = hlo.computations(text)
        self.entry = {op.name for op in self.computations["ENTRY"]}
        self.ops = {op.name: op for ops in self.computations.values() for op in ops}
        self.sources = Sources(text)

    @functools.cache
    def operation(self, name):
        """`Operation` of the HLO operation of a name; None of a loop. One that the program does not have stands for
        itself."""
        op = self.ops.get(name)
        if op is None:
            return Operation(name, "", "", REST, "", False)
        if op.kind in LOOPS:
            return None
        if op.kind.endswith(("-done", "-update")) and hlo.operands(op)[0] in self.ops:
            return self.operation(hlo.operands(op)[0])
        inside = list(self.inside(op))
        is_product = any(is_product_op(inner) for inner in inside)
        axes = "" if is_product else self.axes_of(inside)
        path = next(filter(None, map(scopes, inside)), name)
        # jvp(attention)/add is in the scope attention too; of operations that XLA joined, "(a/add:b/add)", the first
        words = re.split(r"[/()]+", path.split(":")[0])
        named = [word for word in words if word and word not in NOT_CODE]
        part = next((PARTS[scope] for scope in reversed(named) if scope in PARTS), REST)
        source = next(filter(None, map(self.sources.of, inside)), "")
        return Operation("/".join(named) or name, way(path), source, part, axes, is_product)

    def inside(self, op):
        """An operation and all that it is made of."""
        yield op
        for callee in hlo.CALLED.findall(op.rest):
            for inner in self.computations.get(callee, []):
                yield from self.inside(inner)

    def axes_of(self, ops):
        """Mesh axes over which the first of some operations that communicates does; "" where none does."""
        for op in ops:
            kind = op.kind.removesuffix("-start")
            if kind in hlo.COLLECTIVES:
                return "+".join(hlo.group_axes(op, self.mesh)[0])
            if kind in BETWEEN_SLICES:
                return SLICES
        return ""


def is_product_op(op):
    return op.kind in ("dot", "convolution") or hlo.calls_cublas(op) or hlo.is_kernel(op)


def scopes(op):
    """The path of scopes that jax gave an operation; "" where it gave none."""
    found = re.search(r'op_name="([^"]*)"', op.rest)
    return found[1] if found else ""


def way(path):
    """In which pass of the model an operation of such a path of scopes runs."""
    if "rematted_computation" in path:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else ""


class Sources:
    """Where operations come from: of the tables at the head of an HLO text."""

    def __init__(self, text):
        self.files = table(text, "FileNames")
        self.functions = table(text, "FunctionNames")
        self.locations = table(text, "FileLocations")
        self.frames = table(text, "StackFrames")

    def of(self, op):
        """File, line and function of the innermost call in this repository that made an operation; "" where the text
        does not tell. A call of a collective is told by who called that."""
        found = re.search(r"stack_frame_id=(\d+)", op.rest)
        frame, place = int(found[1]) if found else 0, ""
        while frame in self.frames:
            location, parent = hlo.numbers(self.frames[frame])
            file, function, line, *_ = hlo.numbers(self.locations[location])
            path = in_repository(self.files[file].strip('"'))
            if path:
                words = self.functions[function].strip('"').split(".")
                named = [word for word in words if not word.startswith("<")]  # <listcomp>
                place = f"{path}:{line} {named[-1] if named else ''}".strip()
            if path and path != "collectives.py":
                break
            frame = parent - 1  # the text counts frames from 1, and parents from 2
        return place


def table(text, heading):
    """{number: row} of a table of an HLO text."""
    found = re.search(rf"^{heading}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = re.findall(r"^(\d+) (.*)$", found[1], re.MULTILINE) if found else []
    return {int(number): row for number, row in rows}


@functools.cache
def in_repository(path):
    """A path of the machine that compiled, from this repository's root; None for a library's file."""
    parts = Path(path).parts
    for begin in range(1, len(parts)):
        if "site-packages" not in parts and (ROOT / Path(*parts[begin:])).is_file():
            return "/".join(parts[begin:])
    return None
