"""What an optimized HLO text says of one step: floating-point operations, the bytes that each collective sends over
each mesh axis, and what runs in which order.

XLA's cost_analysis() counts the body of a loop once; here everything is multiplied by the trip counts around it.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ACROSS = "across slices"
UNKNOWN = 2**62  # cycles; the compiler writes 2^63 - 1 where it has no estimate

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
SHAPE = re.compile(r"\b(pred|bf16|[suf](?:8|16|32|64))\[([0-9,]*)\]")
CHAIN = re.compile(r'chain_id="(\d+)"')
# Operations that are not in a schedule themselves, since what they run is; that move nothing; that name all or a part
# of an array anew; that read a part of their first operand.
CONTAINERS = ("while", "call", "conditional", "async", *COLLECTIVES)
UNMOVED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
VIEWS = ("bitcast", "reshape", "get-tuple-element")
SLICES = ("slice", "dynamic-slice", "gather")
KERNELS = ("tpu_custom_call", "xla.gpu.triton", "triton_kernel_call", "mosaic_gpu")  # targets
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')
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
    collectives: (
        dict  # {(axes, kind): [bytes, times, devices that take part]}; axes such as ("dp", "tp")
    )
    # of Compute, Transfer, Wait and Loop, in the order in which a device begins them
    schedule: list


class Compute(NamedTuple):
    """An operation that keeps the device busy."""

    flops: float  # of matrix products
    cycles: int  # as the TPU compiler estimates them; GPU: 0
    moved: float  # bytes read and written; TPU: 0
    is_kernel: bool = False  # a custom kernel


class Transfer(NamedTuple):
    """A collective begins."""

    axes: tuple
    kind: str
    bytes: float  # that a device sends
    devices: int  # that take part
    name: str = ""  # by which a `Wait` knows it; "": the device waits at once


class Wait(NamedTuple):
    """The device waits for what a transfer brings."""

    name: str


class Loop(NamedTuple):
    times: int
    body: list  # as `Cost.schedule`


def shapes(text):
    """(dtype, dims) of every array in the text of a type."""
    return [(dtype, tuple(numbers(dims))) for dtype, dims in SHAPE.findall(text)]


def numbers(text):
    """The whole numbers in a text."""
    return [int(n) for n in re.findall(r"\d+", text)]


def size(shape):
    """Bytes of (dtype, dims)."""
    dtype, dims = shape
    bits = 8 if dtype == "pred" else numbers(dtype)[0]
    return bits // 8 * math.prod(dims)


def type_size(text):
    """Bytes of all arrays in the text of a type."""
    return sum(size(shape) for shape in shapes(text))


def operands(op):
    """Names of an operation's operands."""
    return re.findall(r"%([\w.\-]+)", op.rest.split(")")[0])


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
    """How often a while loop runs its body: as XLA found it; as the scope around it expects, where that depends on the
    data (kernels/grouped.py: expected_trips); else the constant that its condition compares with."""
    known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.rest)
    known = known or re.search(r"expected_trips_(\d+)/while", loop.rest)
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


def sent_bytes(op, types, n):
    """Bytes that one of `n` devices sends in a collective, by rings and direct exchanges (arXiv:1909.09756 counts
    likewise). types: {name: type} of its operands."""
    own = sum(type_size(types[name]) for name in operands(op))
    return {
        "all-gather": own * (n - 1),
        "all-reduce": 2 * own * (n - 1) / n,
        "reduce-scatter": own * (n - 1) / n,
        "all-to-all": own * (n - 1) / n,
        "collective-permute": own,
    }[op.kind.removesuffix("-start")]


# --- Matrix products ----------------------------------------------------------------------------------------------


def matmul_flops(op, types):
    """2 x the multiplications of a dot, a convolution or a call of cuBLAS; `types`: {name: type} of its operands."""
    left, right = operands(op)[:2]
    _, out = shapes(op.type)[0]
    _, lhs = shapes(types[left])[0]
    _, rhs = shapes(types[right])[0]
    if op.kind != "convolution":
        contracted = CONTRACTED.search(op.rest)[1]
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
    """Reads the computations of a program into a schedule; see `analyze`."""

    def __init__(self, text, mesh, slices, across, in_kernel):
        self.comps = computations(text)
        self.mesh, self.slices, self.across, self.in_kernel = mesh, slices, across, in_kernel
        self.schedule = []
        self.begun = set()  # names of transfers
        self.has_cycles = "estimated_cycles" in text  # of the TPU compiler

    def visit(self, name, fused=None, wrapper=""):
        """Add a computation to the schedule; returns the operations of its matrix products.

        Inside a fusion, `fused` is the set of collectives that fusions before it have parts of: one that runs beside
        several fusions stands in all of them. Inside an asynchronous start, `wrapper` is its name. Operations outside
        fusions are scheduled.
        """
        ops, flops, beside = self.comps.get(name, []), 0, set()
        types = {op.name: op.type for op in ops}
        last = {} if fused is not None else self.last_parts(ops)
        for op in ops:
            kind, own = op.kind.removesuffix("-start"), 0
            if kind in COLLECTIVES:
                if not is_part_of_another(op, fused):
                    self.add_collective(op, kind, types, wrapper)
            elif kind == "send" and "megascale" in op.rest:
                self.add_send(op)
            elif kind.endswith("-done"):
                self.add_wait(operands(op)[0])
            elif kind in ("dot", "convolution") or calls_cublas(op):
                own = matmul_flops(op, types)
            elif kind == "while":
                self.add_loop(op)
            elif kind == "fusion":
                own = sum(self.visit(callee, beside) for callee in CALLED.findall(op.rest))
            elif kind in ("call", "conditional", "async"):
                begun = op.name if kind != op.kind else ""
                for callee in callees(op):
                    self.visit(callee, None, begun)
            elif is_kernel(op):
                own = self.kernel_flops(op, types)
            if fused is None and kind not in CONTAINERS:
                self.add_compute(op, own, types)
                for chain in last.get(op.name, ()):
                    self.add_wait(chain)
            flops += own
        return flops

    def kernel_flops(self, op, types):
        """Operations of a call of a custom kernel."""
        words = op.name + op.rest.split("backend_config")[0]
        arrays = [shape for name in operands(op) for shape in shapes(types[name])]
        return self.in_kernel(words, arrays)

    def last_parts(self, ops):
        """{fusion: chains of collectives that end beside it} among scheduled operations."""
        last = {}
        for op in ops:
            if op.kind == "fusion":
                for callee in CALLED.findall(op.rest):
                    for inner in self.comps.get(callee, []):
                        if chain := CHAIN.search(inner.rest):
                            last[chain[1]] = op.name
        found = defaultdict(list)
        for chain, name in last.items():
            found[name].append(chain)
        return found

    def add_loop(self, op):
        around, self.schedule = self.schedule, []
        self.visit(re.search(r"body=%?([\w.\-]+)", op.rest)[1])
        around.append(Loop(trip_count(op, self.comps), self.schedule))
        self.schedule = around

    def add_collective(self, op, kind, types, wrapper):
        axes, n = group_axes(op, self.mesh)
        name = wrapper
        if op.kind.endswith("-start") and '"is_sync":true' not in op.rest:
            name = op.name
        elif chain := CHAIN.search(op.rest):
            name = chain[1]
        self.add_transfer(Transfer(axes, kind, sent_bytes(op, types, n), n, name))

    def add_send(self, op):
        """Add what a "send" to the host takes to other slices."""
        share = self.slices - 1
        if "ALL_TO_ALL" in op.rest:
            share /= self.slices
        n_bytes = max(size(shape) for shape in shapes(op.type)) * share
        self.add_transfer(Transfer((self.across,), ACROSS, n_bytes, self.slices, op.name))

    def add_transfer(self, transfer):
        self.schedule.append(transfer)
        self.begun.add(transfer.name)

    def add_wait(self, name):
        if name in self.begun:
            self.schedule.append(Wait(name))

    def add_compute(self, op, flops, types):
        """Add the time that a scheduled operation takes, as far as the program tells of it."""
        cycles, moved = 0, 0
        if not self.has_cycles:
            moved = self.moved_bytes(op, types)
        elif estimated := re.search(r'"estimated_cycles":"(\d+)"', op.rest):
            cycles = int(estimated[1])
        if cycles >= UNKNOWN:
            cycles = 0
        if flops or cycles or moved or is_kernel(op):
            self.schedule.append(Compute(flops, cycles, moved, is_kernel(op)))

    def moved_bytes(self, op, types):
        """Bytes that an operation outside fusions reads and writes. Of what it takes or replaces a slice of, only the
        slice moves."""
        if op.kind in UNMOVED or op.kind.endswith("-done"):
            return 0
        ops = [op]
        for name in dict.fromkeys(operands(op)):
            ops.append(Op(name, types.get(name, ""), "parameter", ""))
        read = sum(self.read_bytes(ops, parameter) for parameter in ops[1:])
        return read + self.written_bytes(op, types)

    def read_bytes(self, ops, source):
        """Bytes that `ops` read of the result of one of them."""
        whole, read = type_size(source.type), 0
        for user in ops:
            for at, name in enumerate(operands(user)):
                if name != source.name:
                    continue
                if user.kind in VIEWS:
                    read += self.read_bytes(ops, user)
                elif user.kind in SLICES and at == 0:
                    read += type_size(user.type)
                elif user.kind == "dynamic-update-slice" and at == 0:
                    continue
                elif user.kind == "fusion":
                    inner = self.comps.get(CALLED.search(user.rest)[1], [])
                    parameters = [op for op in inner if op.kind == "parameter"]
                    own = next(op for op in parameters if int(op.rest.split(")")[0]) == at)
                    read += self.read_bytes(inner, own)
                else:
                    read += whole
        return min(read, whole)

    def written_bytes(self, op, types):
        """Bytes of the result of an operation, a replaced slice of it alone."""
        if op.kind == "dynamic-update-slice":
            return type_size(types[operands(op)[1]])
        if op.kind != "fusion":
            return type_size(op.type)
        inner = self.comps.get(CALLED.search(op.rest)[1], [])
        inner_types = {op.name: op.type for op in inner}
        by_name = {op.name: op for op in inner}
        root = inner[-1]
        results = operands(root) if root.kind == "tuple" else [root.name]
        written = 0
        for name in results:
            result = by_name[name]
            while result.kind in VIEWS:
                result = by_name[operands(result)[0]]
            written += self.written_bytes(result, inner_types)
        return written


def calls_cublas(op):
    return op.kind == "custom-call" and "__cublas" in op.rest


def is_kernel(op):
    """Whether an operation is a Pallas kernel, of which the program does not tell what it computes."""
    return op.kind == "custom-call" and any(target in op.rest for target in KERNELS)


def is_part_of_another(op, fused):
    """Whether a collective belongs to one whose chain is in the set `fused`; adds its chain. Outside fusions (None)
    every collective is one of its own."""
    chain = CHAIN.search(op.rest)
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


def analyze(text, mesh, slices=1, across="dp", in_kernel=lambda words, arrays: 0):
    """`Cost` of the optimized HLO `text` of a program on a {axis: size} mesh of so many TPU slices, which the axis
    `across` joins. What travels between slices, in "send"s to their hosts, counts as kind "across slices".

    in_kernel(words, arrays): operations of a call of a custom kernel, of the words that name it and (dtype, dims) of
    its operands.
    """
    of_slice = mesh | {across: mesh[across] // slices}  # each slice numbers its own devices
    reader = Reader(text, of_slice, slices, across, in_kernel)
    reader.visit("ENTRY")
    collectives = {}
    flops = add_up(reader.schedule, 1, collectives)
    return Cost(flops, collectives, reader.schedule)


def add_up(schedule, times, collectives):
    """Add the transfers of a schedule that runs `times` times to `collectives`. Returns its operations."""
    flops = 0.0
    for event in schedule:
        match event:
            case Compute():
                flops += event.flops * times
            case Loop():
                flops += add_up(event.body, times * event.times, collectives)
            case Transfer():
                entry = collectives.setdefault((event.axes, event.kind), [0, 0, event.devices])
                entry[0] += event.bytes * times
                entry[1] += times
    return flops
