"""What an optimised HLO text says of one step: floating-point operations, the compiler's own estimate of their time,
and the bytes that each collective sends over each mesh axis.

XLA's cost_analysis() counts the body of a loop once; here everything is multiplied by the trip counts around it.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

DTYPE_BYTES = dict(
    pred=1, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8
)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ACROSS = "across slices"
OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
UNKNOWN = 2**62  # cycles; the compiler writes 2^63 - 1 where it has no estimate
SHAPE = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")


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
    return [
        (d, tuple(int(n) for n in dims.split(",") if n))
        for d, dims in SHAPE.findall(text)
        if d in DTYPE_BYTES
    ]


def size(shape):
    """Bytes of (dtype, dims)."""
    return DTYPE_BYTES[shape[0]] * math.prod(shape[1])


def computations(text):
    """{name: [Op]}, the program's own under "ENTRY"."""
    found, ops = {}, None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)
        if head:
            ops = found[head[2]] = []
            if head[1]:
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
    reached = condition + [
        op for c in condition for callee in CALLED.findall(c.rest) for op in comps.get(callee, [])
    ]
    constants = [
        int(op.rest.split(")")[0])
        for op in reached
        if op.kind == "constant" and op.type.startswith("s32[]")
    ]
    return max(constants, default=1)


def group_axes(op, mesh):
    """(axes, devices that take part) of a collective on a {axis: size} mesh, whose devices XLA numbers row by row."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", op.rest)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", op.rest)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", op.rest)
    named = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}",
        op.rest,
    )

    def numbers(text):
        return [int(n) for n in re.findall(r"\d+", text)]

    def arrange(dims, order):
        ids = np.arange(math.prod(dims)).reshape(dims)
        return ids.transpose(numbers(order)) if order else ids

    if pairs:
        groups = np.array(numbers(pairs[1])).reshape(-1, 2)
    elif listed:
        groups = np.array([numbers(listed[1])])
    elif iota:
        groups = arrange(numbers(iota[2]), iota[3]).reshape(numbers(iota[1]))
    elif named:
        parts = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        along = [list(parts).index(name) for name in re.findall(r"'(\w+)'", named[4])]
        dims = numbers(named[2]) if named[2] else list(parts.values())
        ids = arrange(dims, named[3]).reshape(list(parts.values()))
        groups = np.moveaxis(ids, along, range(-len(along), 0)).reshape(
            -1, math.prod(ids.shape[a] for a in along)
        )
    else:
        groups = np.arange(math.prod(mesh.values()))[None]
    at = np.stack(np.unravel_index(groups, tuple(mesh.values())))  # [axis, group, member]
    return tuple(
        a for a, moved in zip(mesh, (at != at[..., :1]).any((1, 2))) if moved
    ), groups.shape[1]


def sent_bytes(op, n):
    """Bytes that one of `n` devices sends in a collective, by rings and direct exchanges (arXiv:1909.09756 counts
    likewise)."""
    arrays = [size(s) for s in shapes(op.type)]
    # the type of an asynchronous start holds operand and result
    whole = max(arrays, default=0) if op.kind.endswith("-start") else sum(arrays)
    kind = op.kind.removesuffix("-start")
    return {
        "all-gather": whole * (n - 1) / n,
        "all-reduce": 2 * whole * (n - 1) / n,
        "reduce-scatter": whole * (n - 1),
        "all-to-all": whole * (n - 1) / n,
        "collective-permute": whole,
    }[kind]


def matmul_flops(op, types):
    """2 x the multiplications of a dot or convolution; `types` {name: type} of the operations around it. The TPU
    compiler writes batched products as convolutions over padded or dilated dims; what falls on padding is not counted.
    """
    out = shapes(op.type)[0][1]
    lhs, rhs = (
        shapes(types[name])[0][1] for name in re.findall(r"%([\w.\-]+)", op.rest.split(")")[0])[:2]
    )
    if op.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)[1]
        return 2 * math.prod(out) * math.prod(lhs[int(d)] for d in contracted.split(",") if d)
    left, right, result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest).groups()
    window = dict(
        re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", op.rest) or [""] * 2)[1])
    )

    def along(name, default):
        return window[name].split("x") if name in window else [default] * (len(left) - 2)

    valid = 1
    for i, (width, stride, pad, stretch, spread) in enumerate(
        zip(
            along("size", 1),
            along("stride", 1),
            along("pad", "0_0"),
            along("lhs_dilate", 1),
            along("rhs_dilate", 1),
        )
    ):
        n, stretch = lhs[left.index(str(i))], int(stretch)
        at = np.arange(out[result.index(str(i))])[:, None] * int(stride) - int(pad.split("_")[0])
        at = at + np.arange(int(width)) * int(spread)
        valid *= int(((at >= 0) & (at <= (n - 1) * stretch) & (at % stretch == 0)).sum())
    return 2 * valid * out[result.index("b")] * out[result.index("f")] * rhs[right.index("i")]


def analyse(text, mesh, slices=1, across="dp"):
    """`Cost` of the optimised HLO `text` of a program on a {axis: size} mesh of so many TPU slices, which the axis
    `across` joins. What travels between slices, in "send"s to their hosts, counts as kind "across slices"."""
    mesh = mesh | {across: mesh[across] // slices}  # each slice numbers its own devices
    comps = computations(text)
    kernels, collectives, total = defaultdict(int), {}, defaultdict(float)

    def visit(name, times, fused=None):
        """Adds up a computation that runs so many times; returns the floating-point operations of one run. Inside a
        fusion, `fused` holds the collectives that others before it took parts of: one that runs beside several fusions
        stands in all of them. Cycles are told of scheduled operations alone."""
        ops, types, flops, scheduled, beside = comps.get(name, []), None, 0, fused is None, set()
        for op in ops:
            own, kind = 0, op.kind.removesuffix("-start")
            if kind in COLLECTIVES:
                if not scheduled and (chain := re.search(r'chain_id="(\d+)"', op.rest)):
                    if chain[1] in fused:
                        continue
                    fused.add(chain[1])
                axes, n = group_axes(op, mesh)
                entry = collectives.setdefault((axes, kind), [0, 0, n])
                entry[0] += sent_bytes(op, n) * times
                entry[1] += times
            elif kind == "send" and "megascale" in op.rest:
                entry = collectives.setdefault(((across,), ACROSS), [0, 0, slices])
                share = slices - 1 if "ALL_TO_ALL" not in op.rest else (slices - 1) / slices
                entry[0] += max(size(s) for s in shapes(op.type)) * share * times
                entry[1] += times
            elif kind in ("dot", "convolution"):
                types = types or {o.name: o.type for o in ops}
                own = matmul_flops(op, types)
                total["flops"] += own * times
            elif kind == "while":
                visit(re.search(r"body=%?([\w.\-]+)", op.rest)[1], times * trip_count(op, comps))
            elif kind == "fusion":
                own = sum(visit(callee, times, beside) for callee in CALLED.findall(op.rest))
            elif kind in ("call", "conditional", "async"):
                branches = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
                either = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", op.rest)
                for callee in (
                    re.findall(r"[\w.\-]+", branches[1])
                    if branches
                    else either or CALLED.findall(op.rest)
                ):
                    own += visit(callee, times)
            elif kind == "custom-call" and "tpu_custom_call" in op.rest:
                kernels[re.sub(r"[.\d]+$", "", op.name)] += times
            cycles = re.search(r'"estimated_cycles":"(\d+)"', op.rest)
            if scheduled and cycles and int(cycles[1]) < UNKNOWN:
                total["matmul_cycles" if own else "other_cycles"] += int(cycles[1]) * times
            flops += own
        return flops

    visit("ENTRY", 1)
    sent = defaultdict(float)
    for (axes, _), (n_bytes, _, _) in collectives.items():
        sent[axes] += n_bytes
    return Cost(
        total["flops"],
        dict(kernels),
        total["matmul_cycles"],
        total["other_cycles"],
        dict(sent),
        collectives,
    )
