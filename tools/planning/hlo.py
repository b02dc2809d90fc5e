"""What an optimized HLO text says of one step: floating-point operations, the compiler's own estimate of their time,
and the bytes that each collective sends over each mesh axis.

XLA's cost_analysis() counts the body of a loop once; here everything is multiplied by the trip counts around it.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

DTYPE_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ACROSS = "across slices"
UNKNOWN = 2**62  # cycles; the compiler writes 2^63 - 1 where it has no estimate

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
SHAPE = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
# The ways in which XLA writes the devices that take part in a collective.
PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
)


class Op(NamedTuple):
    name: str
    type: str  # of its result
    kind: str
    rest: str  # operands and attributes


class Cost(NamedTuple):
    """Of one step on one device."""

    flops: float  # of matrix products
    kernels: dict  # {name: times that it runs} of custom kernels, whose operations the program does not tell
    matmul_cycles: float  # the compiler's estimate for operations that hold a matrix product
    other_cycles: float  # and for all others, which memory bandwidth bounds
    sent: dict  # {axes: bytes}: axes such as ("dp", "tp"), over which one collective runs
    collectives: dict  # {(axes, kind): [bytes, times, devices that take part]}


def shapes(text):
    """(dtype, dims) of every array in the text of a type."""
    found = []
    for dtype, dims in SHAPE.findall(text):
        if dtype in DTYPE_BYTES:
            found.append((dtype, tuple(numbers(dims))))
    return found


def numbers(text):
    """The whole numbers in a text."""
    return [int(n) for n in re.findall(r"\d+", text)]


def size(shape):
    """Bytes of (dtype, dims)."""
    dtype, dims = shape
    return DTYPE_BYTES[dtype] * math.prod(dims)


def computations(text):
    """{name: [Op]}, the program's own under "ENTRY"."""
    found, ops = {}, None
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            is_entry, name = head.groups()
            ops = found[name] = []
            if is_entry:
                found["ENTRY"] = ops
        elif ops is not None and (op := OP.match(line)):
            ops.append(Op(*op.groups()))
    return found


def trip_count(loop, comps):
    """How often a while loop runs its body: as XLA found it, else the constant that its condition compares with."""
    known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.rest)
    if known:
        return int(known[1])
    condition = comps[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]]
    reached = list(condition)
    for op in condition:
        for callee in CALLED.findall(op.rest):
            reached += comps.get(callee, [])
    constants = []
    for op in reached:
        if op.kind == "constant" and op.type.startswith("s32[]"):
            constants.append(int(op.rest.split(")")[0]))
    return max(constants, default=1)


# --- Collectives --------------------------------------------------------------------------------------------------


def device_groups(op, n):
    """The groups of devices, numbers [group, member], in which a collective runs among n devices."""
    if pairs := PAIRS.search(op.rest):
        return np.array(numbers(pairs[1])).reshape(-1, 2)
    if listed := LISTED.search(op.rest):
        return np.array([numbers(listed[1])])  # the first group tells the axes
    if iota := IOTA.search(op.rest):
        shape, dims, order = iota.groups()
        return arrange(numbers(dims), order).reshape(numbers(shape))
    if named := NAMED.search(op.rest):
        return named_groups(*named.groups())
    return np.arange(n)[None]


def named_groups(mesh, dims, order, axes):
    """`device_groups` along some axes of a named mesh: texts such as 'a'=2,'b'=4 and 'b'. `dims` and `order`, if there
    are any, say how the devices lie in it."""
    names, shape = [], []
    for name, length in re.findall(r"'(\w+)'=(\d+)", mesh):
        names.append(name)
        shape.append(int(length))
    ids = arrange(numbers(dims) if dims else shape, order).reshape(shape)
    along = [names.index(name) for name in re.findall(r"'(\w+)'", axes)]
    members = math.prod(shape[dim] for dim in along)
    last = range(-len(along), 0)
    return np.moveaxis(ids, along, last).reshape(-1, members)


def arrange(dims, order):
    """Devices 0, 1, .. in an array of `dims`, transposed to `order`, the text of dims, if there is one."""
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(numbers(order)) if order else ids


def group_axes(op, mesh):
    """(axes, devices that take part) of a collective on a {axis: size} mesh, whose devices XLA numbers row by row."""
    groups = device_groups(op, math.prod(mesh.values()))
    at = np.stack(np.unravel_index(groups, tuple(mesh.values())))  # [axis, group, member]
    moved = (at != at[..., :1]).any((1, 2))  # [axis]
    return tuple(axis for axis, differs in zip(mesh, moved) if differs), groups.shape[1]


def result_type(op):
    """The type of what a collective gives. That of a start holds the operands too: ((f32[2], s8[2]), (f32[8], s8[8])),
    of several arrays at once; that of an all-reduce, which changes no shape, does not."""
    if not op.kind.endswith("-start") or op.kind == "all-reduce-start":
        return op.type
    _, result, *_ = elements(op.type)
    return result


def elements(text):
    """The texts of a tuple's elements."""
    found, depth, begin = [], 0, 1
    for at, character in enumerate(text):
        depth += character in "([{"
        depth -= character in ")]}"
        if depth == 0 or depth == 1 and character == ",":
            found.append(text[begin:at].strip())
            begin = at + 1
    return found


def sent_bytes(op, n):
    """Bytes that one of `n` devices sends in a collective, by rings and direct exchanges (arXiv:1909.09756 counts
    likewise)."""
    kind = op.kind.removesuffix("-start")
    whole = sum(size(shape) for shape in shapes(result_type(op)))
    return {
        "all-gather": whole * (n - 1) / n,
        "all-reduce": 2 * whole * (n - 1) / n,
        "reduce-scatter": whole * (n - 1),
        "all-to-all": whole * (n - 1) / n,
        "collective-permute": whole,
    }[kind]


# --- Matrix products ----------------------------------------------------------------------------------------------


def matmul_flops(op, types):
    """2 x the multiplications of a dot or convolution; `types` {name: type} of the operations around it."""
    operands = re.findall(r"%([\w.\-]+)", op.rest.split(")")[0])
    _, out = shapes(op.type)[0]
    _, lhs = shapes(types[operands[0]])[0]
    _, rhs = shapes(types[operands[1]])[0]
    if op.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)[1]
        return 2 * math.prod(out) * math.prod(lhs[dim] for dim in numbers(contracted))
    return convolution_flops(op, out, lhs, rhs)


def convolution_flops(op, out, lhs, rhs):
    """2 x the multiplications of a convolution of such dims. The TPU compiler writes batched products as convolutions
    over padded or dilated dims; what falls on padding is not counted."""
    left, right, result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest).groups()
    window = re.search(r"window=\{([^}]*)\}", op.rest)
    settings = dict(re.findall(r"(\w+)=([\dx_\-]+)", window[1])) if window else {}

    def along(name, dim, default):
        return settings[name].split("x")[dim] if name in settings else default

    valid = 1
    for dim in range(len(left) - 2):  # of the window, all but batch and features
        length = lhs[left.index(str(dim))]
        places = np.arange(out[result.index(str(dim))])[:, None]
        within = np.arange(int(along("size", dim, 1)))
        before = int(along("pad", dim, "0_0").split("_")[0])
        dilation = int(along("lhs_dilate", dim, 1))
        at = places * int(along("stride", dim, 1)) - before
        at = at + within * int(along("rhs_dilate", dim, 1))
        inside = (at >= 0) & (at <= (length - 1) * dilation)
        valid *= int((inside & (at % dilation == 0)).sum())
    return 2 * valid * out[result.index("b")] * out[result.index("f")] * rhs[right.index("i")]


# --- The program --------------------------------------------------------------------------------------------------


class Reader:
    """Adds up the computations of a program; see `analyze`."""

    def __init__(self, text, mesh, slices, across):
        self.comps = computations(text)
        self.mesh, self.slices, self.across = mesh, slices, across
        self.kernels = defaultdict(int)
        self.collectives = {}
        self.flops, self.matmul_cycles, self.other_cycles = 0.0, 0.0, 0.0

    def visit(self, name, times, fused=None):
        """Adds up a computation that runs so many times; returns the floating-point operations of one run.

        Inside a fusion, `fused` is the set of collectives that fusions before it have parts of: one that runs beside
        several fusions stands in all of them. Cycles are told of scheduled operations alone, those outside fusions.
        """
        ops, flops, beside = self.comps.get(name, []), 0, set()
        types = {op.name: op.type for op in ops}
        for op in ops:
            kind, own = op.kind.removesuffix("-start"), 0
            if kind in COLLECTIVES:
                if is_part_of_another(op, fused):
                    continue
                self.add_collective(op, kind, times)
            elif kind == "send" and "megascale" in op.rest:
                self.add_send(op, times)
            elif kind in ("dot", "convolution"):
                own = matmul_flops(op, types)
                self.flops += own * times
            elif kind == "while":
                body = re.search(r"body=%?([\w.\-]+)", op.rest)[1]
                self.visit(body, times * trip_count(op, self.comps))
            elif kind == "fusion":
                own = sum(self.visit(callee, times, beside) for callee in CALLED.findall(op.rest))
            elif kind in ("call", "conditional", "async"):
                own = sum(self.visit(callee, times) for callee in callees(op))
            elif kind == "custom-call" and "tpu_custom_call" in op.rest:
                self.kernels[re.sub(r"[.\d]+$", "", op.name)] += times
            if fused is None:
                self.add_cycles(op, bool(own), times)
            flops += own
        return flops

    def add_collective(self, op, kind, times):
        axes, n = group_axes(op, self.mesh)
        self.add_sent(axes, kind, n, sent_bytes(op, n) * times, times)

    def add_send(self, op, times):
        """Add what a "send" to the host takes to other slices."""
        share = self.slices - 1
        if "ALL_TO_ALL" in op.rest:
            share /= self.slices
        n_bytes = max(size(shape) for shape in shapes(op.type)) * share * times
        self.add_sent((self.across,), ACROSS, self.slices, n_bytes, times)

    def add_sent(self, axes, kind, n, n_bytes, times):
        entry = self.collectives.setdefault((axes, kind), [0, 0, n])
        entry[0] += n_bytes
        entry[1] += times

    def add_cycles(self, op, has_product, times):
        cycles = re.search(r'"estimated_cycles":"(\d+)"', op.rest)
        if not cycles or int(cycles[1]) >= UNKNOWN:
            return
        if has_product:
            self.matmul_cycles += int(cycles[1]) * times
        else:
            self.other_cycles += int(cycles[1]) * times


def is_part_of_another(op, fused):
    """Whether a collective belongs to one whose chain is in the set `fused`; adds its chain. Outside fusions (None)
    every collective is one of its own."""
    chain = re.search(r'chain_id="(\d+)"', op.rest)
    if fused is None or chain is None:
        return False
    if chain[1] in fused:
        return True
    fused.add(chain[1])
    return False


def callees(op):
    """Names of the computations that a call or a conditional runs."""
    if branches := re.search(r"branch_computations=\{([^}]*)\}", op.rest):
        return re.findall(r"[\w.\-]+", branches[1])
    either = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", op.rest)
    return either or CALLED.findall(op.rest)


def analyze(text, mesh, slices=1, across="dp"):
    """`Cost` of the optimized HLO `text` of a program on a {axis: size} mesh of so many TPU slices, which the axis
    `across` joins. What travels between slices, in "send"s to their hosts, counts as kind "across slices"."""
    of_slice = mesh | {across: mesh[across] // slices}  # each slice numbers its own devices
    reader = Reader(text, of_slice, slices, across)
    reader.visit("ENTRY", 1)
    sent = defaultdict(float)
    for (axes, _), (n_bytes, _, _) in reader.collectives.items():
        sent[axes] += n_bytes
    return Cost(
        flops=reader.flops,
        kernels=dict(reader.kernels),
        matmul_cycles=reader.matmul_cycles,
        other_cycles=reader.other_cycles,
        sent=dict(sent),
        collectives=reader.collectives,
    )
