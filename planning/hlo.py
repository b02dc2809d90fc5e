"""Analyze the optimized HLO text of a step: operations, bytes of collectives, and how these overlap.

XLA's cost_analysis() counts the body of a loop once. Here everything is multiplied by the trip counts of the loops
around it.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ACROSS = "across slices"

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
SHAPE = re.compile(r"\b(pred|bf16|[suf](?:8|16|32|64))\[([0-9,]*)\]")
CHAIN = re.compile(r'chain_id="(\d+)"')
# Operations that are not counted themselves: what they run, or transfer, is.
CONTAINERS = ("while", "call", "conditional", *COLLECTIVES)
# Operations that move no bytes.
UNMOVED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
# Operations whose result is another view of an array, or of a part of one.
VIEWS = ("bitcast", "reshape", "get-tuple-element")
# Operations that read only a part of their first operand.
SLICES = ("slice", "dynamic-slice", "gather")
# targets of custom calls
KERNELS = ("tpu_custom_call", "xla.gpu.triton", "triton_kernel_call", "mosaic_gpu")
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')
# The four ways in which XLA writes which devices take part in a collective.
PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
)


class Op(NamedTuple):
    """An HLO operation."""

    name: str
    type: str  # of its result
    kind: str  # HLO's opcode, such as "fusion"
    rest: str  # operands and attributes
    inputs: list = []  # the `Op`s that are its operands


def shapes(text):
    """(dtype, dims) of every array in the text of a type."""
    return [(dtype, numbers(dims)) for dtype, dims in SHAPE.findall(text)]


def numbers(text):
    """The whole numbers in a text."""
    return [int(n) for n in re.findall(r"\d+", text)]


def size(text):
    """Bytes of all arrays in the text of a type."""
    total = 0
    for dtype, dims in shapes(text):
        width = 1 if dtype == "pred" else numbers(dtype)[0] // 8
        total += width * math.prod(dims)
    return total


def computations(text):
    """{name of a computation: [Op]}. That of the whole program is "ENTRY". An operation comes after its operands."""
    found = {}
    ops = None
    known = {}
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            is_entry, name = head.groups()
            ops = found[name] = []
            if is_entry:
                found["ENTRY"] = ops
        elif ops is not None and (words := OP.match(line)):
            operands = re.findall(r"%([\w.\-]+)", words[4].split(")")[0])
            op = Op(*words.groups(), [known[name] for name in operands])
            known[op.name] = op
            ops.append(op)
    return found


def device_groups(op, n):
    """The groups of devices in which a collective runs among n devices: their numbers, [group, member]."""
    if pairs := PAIRS.search(op.rest):
        return np.array(numbers(pairs[1])).reshape(-1, 2)
    if listed := LISTED.search(op.rest):
        return np.array([numbers(listed[1])])  # the first group is enough to know the axes
    if iota := IOTA.search(op.rest):
        shape, dims, order = iota.groups()
        return arrange(numbers(dims), order).reshape(numbers(shape))
    if named := NAMED.search(op.rest):
        mesh, dims, order, axes = named.groups()
        lengths = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        shape = [int(length) for length in lengths.values()]
        ids = arrange(numbers(dims) if dims else shape, order).reshape(shape)
        along = [list(lengths).index(axis) for axis in re.findall(r"'(\w+)'", axes)]
        members = math.prod(shape[dim] for dim in along)
        return np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, members)
    return np.arange(n)[None]


def arrange(dims, order):
    """Devices 0, 1, ... in an array of `dims`, transposed to `order`, a text of dims, unless that is empty."""
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(numbers(order)) if order else ids


def group_axes(op, mesh):
    """(axes, number of devices that take part) of a collective. mesh: {axis: size}; XLA numbers its devices row by
    row."""
    groups = device_groups(op, math.prod(mesh.values()))
    return axes_of(groups, mesh), groups.shape[1]


def axes_of(groups, mesh):
    """The axes of a mesh along which the devices of a group [group, member] differ."""
    at = np.stack(np.unravel_index(groups, tuple(mesh.values())))  # [axis, group, member]
    differs = (at != at[..., :1]).any((1, 2))  # [axis]
    return tuple(itertools.compress(mesh, differs))


def sent_bytes(op, n):
    """Bytes that one of n devices sends in a collective, in rings and direct exchanges (arXiv:1909.09756)."""
    shares = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
    own = sum(size(array.type) for array in op.inputs)
    return own * shares.get(op.kind.removesuffix("-start"), (n - 1) / n)


def slow_axis(mesh, slices):
    """The axis of a {axis: size} mesh along which TPU slices lie, the same as in training/device_mesh.py:
    device_grid."""
    return "pp" if mesh["dp"] % slices else "dp"


def matmul_flops(op):
    """Operations of a dot, a convolution or a call of cuBLAS: 2 for each multiplication."""
    arrays = [shapes(array.type)[0][1] for array in (op, *op.inputs[:2])]
    if op.kind == "convolution":
        return convolution_flops(op, *arrays)
    out, lhs, _ = arrays
    contracted = CONTRACTED.search(op.rest)[1]
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in numbers(contracted))


def convolution_flops(op, out, lhs, rhs):
    """Operations of a convolution, as which the TPU compiler writes batched products. Padding does not count."""
    left, right, result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest).groups()
    lhs = dict(zip(left, lhs))
    rhs = dict(zip(right, rhs))
    out = dict(zip(result, out))
    window = re.search(r"window=\{([^}]*)\}|$", op.rest)[1] or ""
    settings = dict(re.findall(r"(\w+)=([\dx_\-]+)", window))
    valid = 1
    for dim in lhs.keys() - {"b", "f"}:  # of the window

        def along(name, default=1):
            if name not in settings:
                return default
            values = settings[name].split("x")
            return int(values[int(dim)].split("_")[0])  # of padding, what is before

        places = np.arange(out[dim])[:, None] * along("stride")
        at = places + np.arange(along("size")) * along("rhs_dilate")
        inputs = np.arange(lhs[dim]) * along("lhs_dilate") + along("pad", 0)
        valid *= int(np.isin(at, inputs).sum())
    return 2 * valid * out["b"] * out["f"] * rhs["i"]


# {HLO's name of a type: ours}, of those in which chips differ
DTYPES = dict(bf16="bfloat16", f16="float16", f32="float32")


def factor_dtype(arrays):
    """The type, as in --model_dtype, of a product's factors by `shapes` of them; float32 for any other."""
    return next((DTYPES[dtype] for dtype, _ in arrays if dtype in DTYPES), "float32")


def is_product(op):
    """Whether an operation is a matrix product, as XLA or cuBLAS computes it."""
    is_call = op.kind == "custom-call" and "__cublas" in op.rest
    return is_call or op.kind in ("dot", "convolution")


def is_kernel(op):
    """Whether an operation is a Pallas kernel, whose computation the HLO does not show."""
    return op.kind == "custom-call" and any(target in op.rest for target in KERNELS)


def moved_bytes(ops):
    """Bytes that a fusion reads and writes, by its operations; an operand is one of kind "parameter".

    Where it reads, or replaces, only a slice of an array, or of what it computes from an array number by number, only
    the slice counts.
    """
    root = ops[-1]
    # {name of an operation: share of its result that is used}
    shares = defaultdict(float, {root.name: 1})
    operands = {}
    for op in reversed(ops):
        for at, array in enumerate(op.inputs):
            read = shares[array.name] + share_read(op, at, shares[op.name])
            shares[array.name] = min(1, read)
            if array.kind == "parameter":
                operands[array.name] = array
    moved = sum(shares[name] * size(array.type) for name, array in operands.items())
    for result in map(viewed, root.inputs if root.kind == "tuple" else [root]):
        if result.kind == "dynamic-update-slice":
            result = result.inputs[1]
        moved += size(result.type)
    return moved


def share_read(op, at, share):
    """The share of its operand number `at` that an operation reads for a share of its result."""
    array = op.inputs[at]
    if op.kind == "dynamic-update-slice" and at == 0:
        return 0
    own, whole = (sum(math.prod(dims) for _, dims in shapes(x.type)) for x in (op, array))
    if op.kind in SLICES and at == 0:
        return share * own / whole
    return share if own == whole else 1


def viewed(op):
    """The array of which an operation is a view; the operation itself where it is none."""
    while op.kind in VIEWS:
        op = op.inputs[0]
    return op


def branches_of(conditional):
    """The computations of a conditional operation, in the order of the index that chooses one; false counts 0."""
    named = re.findall(r"(true|false)_computation=%([\w.\-]+)", conditional.rest)
    if named:
        return [dict(named)[name] for name in ("false", "true")]
    return re.findall(r"%([\w.\-]+)", conditional.rest.split("branch_computations", 1)[1])


@dataclasses.dataclass
class Scope:
    """The state while a computation is walked through, such as the body of a loop."""

    times: int  # how often it runs in a step
    # {name of a transfer: [[(axes, collective), seconds left]]}, the oldest first
    in_flight: dict = dataclasses.field(default_factory=dict)
    spare: float = 0.0  # seconds of computation in one run that hide no transfer in it


class Timeline:
    """What one device does in a step, and how long it computes and waits. text: the optimized HLO of the step.

    mesh: {axis: size} of all `slices`. A transfer between slices counts as the collective "across slices". A subclass
    defines
        in_kernel(words, arrays)    Operations of a custom kernel. words: hold its name; arrays: [(dtype, dims)] of its
                                    operands.
        compute_seconds(flops, cycles, moved, is_kernel)    Seconds of an operation. flops: {type of the factors:
                                    operations of products}; cycles: the TPU compiler's estimate; moved: bytes that it
                                    reads and writes, on a GPU.
        link_seconds(axes, collective, n_bytes, n)    Seconds of a transfer.

    Computation between the start of a transfer and the wait for it hides that transfer. Each second of computation
    hides only one transfer, the one that started first. The rest of a transfer is exposed.
    """

    def __init__(self, text, mesh, slices):
        self.comps = computations(text)
        self.slices = slices
        self.across = slow_axis(mesh, slices)
        # of one slice, since each numbers its own devices
        self.mesh = mesh | {self.across: mesh[self.across] // slices}
        self.has_cycles = "estimated_cycles" in text  # of the TPU compiler
        self.flops = 0.0  # of matrix products
        # {(axes, collective): [bytes, times, seconds]}; axes such as ("dp", "tp")
        self.collectives = defaultdict(lambda: [0, 0, 0.0])
        self.products = 0.0  # seconds of operations with matrix products
        self.others = 0.0  # seconds of all other operations
        self.exposed = defaultdict(float)  # {(axes, collective): seconds that the device waits}
        self.scope = Scope(1)
        self.run("ENTRY", 1)

    def run(self, name, times):
        """Add a computation that runs `times` times in a step.

        Returns the seconds of computation in one run that hide no transfer in it. They can hide transfers that were
        started outside.
        """
        outer = self.scope
        inner = Scope(times)
        self.scope = inner
        self.visit(name)
        for transfer in list(inner.in_flight):
            self.wait(transfer)
        self.scope = outer
        return inner.spare

    def visit(self, name, fused=None):
        """Add the operations of a computation. Returns {type of the factors: operations of its matrix products}.

        Outside fusions, HLO operations are in the order in which a device starts them. fused: None outside a fusion; in
        one, the set of collectives that were seen in earlier fusions. A collective that runs during several fusions is
        part of each of them, and counts once.
        """
        ops = self.comps.get(name, [])
        flops = Counter()
        seen = set()  # collectives in fusions
        last = {} if fused is not None else self.last_parts(ops)
        for op in ops:
            kind = op.kind.removesuffix("-start")
            own = Counter()
            if kind in COLLECTIVES:
                self.start_collective(op, kind, fused)
            elif kind == "send" and "megascale" in op.rest:
                self.start_send(op)
            elif kind.endswith("-done"):
                self.wait(op.inputs[0].name)
            elif is_product(op):
                own[factor_dtype(shapes(op.inputs[0].type))] = matmul_flops(op)
            elif kind == "while":
                n = self.trip_count(op)
                body = re.search(r"body=%?([\w.\-]+)", op.rest)[1]
                self.hide(n * self.run(body, n * self.scope.times))
            elif kind == "fusion":
                for callee in CALLED.findall(op.rest):
                    own += self.visit(callee, seen)
            elif kind == "call":
                for callee in CALLED.findall(op.rest):
                    self.visit(callee)
            elif kind == "conditional":  # the branch of kernels/grouped.py: at_even_load
                branches = branches_of(op)
                even = re.search(r"at_even_load_(\d+)/cond", op.rest)
                self.visit(branches[int(even[1]) if even else 0])
            elif is_kernel(op):
                words = op.name + op.rest.split("backend_config")[0]
                arrays = shapes(" ".join(array.type for array in op.inputs))
                if in_kernel := self.in_kernel(words, arrays):
                    own[factor_dtype(arrays)] = in_kernel
            if fused is None and kind not in CONTAINERS:
                self.compute(op, own)
                for chain, fusion in last.items():
                    if fusion == op.name:
                        self.wait(chain)
            flops += own
        return flops

    def last_parts(self, ops):
        """{chain of a collective: the last fusion that has a part of it} among scheduled operations."""
        last = {}
        for op in ops:
            if op.kind == "fusion":
                for callee in CALLED.findall(op.rest):
                    for inner in self.comps.get(callee, []):
                        if chain := CHAIN.search(inner.rest):
                            last[chain[1]] = op.name
        return last

    def trip_count(self, loop):
        """How often a while loop runs its body.

        It is XLA's own count, where XLA knows it. Where the count depends on the data, it is that of an even load,
        named by the scope around the loop (kernels/grouped.py: at_even_load). Else it is the constant in the loop's
        condition.
        """
        for words in (r"known_trip_count\W+n\W+(\d+)", r"at_even_load_(\d+)/while"):
            if known := re.search(words, loop.rest):
                return int(known[1])
        trips = [1]
        for op in self.comps[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]]:
            if op.kind == "constant" and op.type.startswith("s32[]"):
                trips.append(numbers(op.rest)[0])
        return max(trips)

    def start_collective(self, op, collective, fused):
        """Start the transfer of a collective, unless `fused` shows that it was started already."""
        axes, n = group_axes(op, self.mesh)
        found = CHAIN.search(op.rest)
        chain = found[1] if found else ""
        if chain and fused is not None:
            if chain in fused:
                return
            fused.add(chain)
        waited = op.kind.endswith("-start") and '"is_sync":true' not in op.rest
        self.start(axes, collective, sent_bytes(op, n), n, op.name if waited else chain)

    def start_send(self, op):
        """Start the transfer of a "send" to the host, which takes an array to other slices."""
        share = self.slices - 1
        if "ALL_TO_ALL" in op.rest:
            share /= self.slices
        # of the array; the type also has a number, its place in the host
        n_bytes = size(op.type) * share
        self.start((self.across,), ACROSS, n_bytes, self.slices, op.name)

    def start(self, axes, collective, n_bytes, n, name):
        """Start a transfer of n_bytes by each of n devices. name: the name for `wait`; "": the device waits at once."""
        seconds = self.link_seconds(axes, collective, n_bytes, n)
        entry = self.collectives[axes, collective]
        entry[0] += n_bytes * self.scope.times
        entry[1] += self.scope.times
        entry[2] += seconds * self.scope.times
        self.scope.in_flight.setdefault(name, []).append([(axes, collective), seconds])
        if not name:
            self.wait(name)

    def wait(self, name):
        """Wait for the transfers of a name: what computation has not hidden of them is exposed."""
        for key, left in self.scope.in_flight.pop(name, ()):
            self.exposed[key] += left * self.scope.times

    def hide(self, seconds):
        """Let `seconds` of computation hide transfers in flight, the oldest first."""
        for transfer in itertools.chain(*self.scope.in_flight.values()):
            hidden = min(seconds, transfer[1])
            transfer[1] -= hidden
            seconds -= hidden
        self.scope.spare += seconds

    def compute(self, op, flops):
        """Add the seconds of an operation, and its `flops` {type of the factors: operations}."""
        cycles = 0
        moved = 0
        if self.has_cycles:
            # at most 18 digits: where the compiler has no estimate it writes 2^63 - 1, which has 19
            if estimated := re.search(r'"estimated_cycles":"(\d{1,18})"', op.rest):
                cycles = int(estimated[1])
        elif op.kind in ("fusion", "fusion-start"):
            moved = moved_bytes(self.comps[CALLED.search(op.rest)[1]])
        elif op.kind not in UNMOVED and not op.kind.endswith("-done"):
            given = [array._replace(kind="parameter") for array in op.inputs]
            moved = moved_bytes([op._replace(inputs=given)])
        seconds = self.compute_seconds(flops, cycles, moved, is_kernel(op))
        self.hide(seconds)
        self.flops += flops.total() * self.scope.times
        if flops:
            self.products += seconds * self.scope.times
        else:
            self.others += seconds * self.scope.times
