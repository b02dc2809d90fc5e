"""How long a compiled train step takes on a machine: `planning/hlo.py` with the speeds of the machine's chips."""

import math

import collectives
from architectures.experts import choose_transport
from kernels import attention
from planning import hlo
from planning.fitted import LAUNCH, attention_slowdown
from planning.links import link_seconds


class Program(hlo.Timeline):
    """The `hlo.Timeline` of the step of a validated Config, with the speeds of a machine. text: its optimized HLO."""

    def __init__(self, text, cfg, machine):
        self.cfg = cfg
        self.machine = machine
        self.kernel = attention.ATTENTION[attention.choose_kernel(cfg.model, machine.kernels)]
        mesh = dict(zip(collectives.AXES, cfg.run.n_device_axis))
        super().__init__(text, mesh, machine.slices)

    def in_kernel(self, words, arrays):
        """Operations of an attention kernel; 0 for others. As `hlo.Timeline` defines it."""
        m = self.cfg.model
        kernel = self.kernel
        group = m.n_head // m.kv_heads  # heads of queries that read the same values
        for name, (keys, values) in kernel.products.items():
            if name in words:  # the first arrays of floats are queries, keys and values
                q, _, v = [math.prod(dims) for dtype, dims in arrays if "f" in dtype][:3]
                return 2 * m.T * kernel.score_share(m) * (keys * q + values * group * v)
        return 0

    def compute_seconds(self, flops, cycles, moved, is_kernel):
        """Seconds of an operation. As `hlo.Timeline` defines it."""
        chip = self.machine.chip
        # compilers do not estimate the time of kernels
        products = sum(n / chip.speed_in(dtype) for dtype, n in flops.items())
        products *= attention_slowdown(chip) if is_kernel else 1
        if chip.gpu:
            return bool(flops or moved) * LAUNCH + max(products, moved / chip.memory_speed)
        return products if is_kernel else cycles / chip.clock

    def link_seconds(self, *transfer):
        """Seconds of a transfer. As `hlo.Timeline` defines it."""
        # without slices: what leaves a TPU slice is a transfer of its own in the program
        machine = self.machine
        joined = machine._replace(groups=machine.groups // machine.slices)
        return link_seconds(self.cfg, joined, *transfer)

    def overlapped(self):
        """Seconds of the step as the compiler scheduled it."""
        return self.products + self.others + sum(self.exposed.values())


def further_round(program, text):
    """Seconds by which a step gets longer if the experts of every layer need one more round, or the next larger buckets
    (`experts.in_buckets`).

    program: the `Program` of the HLO `text`, which counts no such round.
    """
    m = program.cfg.model
    machine = program.machine
    if not m.n_experts or m.capacity_factor or choose_transport(m, machine.platform) == "tiles":
        return 0.0
    with_one = text.replace("at_even_load_0/", "at_even_load_1/")
    return Program(with_one, program.cfg, machine).overlapped() - program.overlapped()
