"""How the cost of a step grows: compile time with depth, bytes sent and time with chips (weak scaling) and with T.

python tools/planning/growth.py [--curves blocks chips T] [--plot docs/growth.png] [--json FILE] [any flag of main.py]

Every point is the real train step, compiled for a slice of TPU v4 by the TPU compiler, which needs no TPU (pip install
"jax[tpu]"), and read by planning/plan.py. A point that does not fit has the formulas' numbers, and the table says
so.
"""

if __name__ in ("__main__", "__mp_main__"):
    import program

    program.begin()

import importlib.util
import math
import sys
import time

import utils
from tools import common
from training import command_line, platforms, settings
from utils import UserError

TOKENS = 65_536  # of a replica and step along T


def points_along_T():
    """{T: flags} with as many tokens everywhere."""
    points = {}
    for T in (1024, 4096, 16384, 65536):
        batch = TOKENS // T
        points[T] = f"--T {T} --train_batch_size {batch} --microbatches {min(4, batch)}"
    return points


CURVES = {  # {name: (flags that a user may override, {x: flags of the point})}
    "blocks": (
        "--plan v4:2x4x4 --n_device_axis 8 2 2 --pp_interleave 2",
        {4: "--blocks 4", 8: "--blocks 8", 16: "--blocks 16"},
    ),
    "chips": (
        "--n_device_axis 0 2 2",
        {
            8: "--plan v4:2x2x2",
            32: "--plan v4:2x4x4",
            128: "--plan v4:4x4x8",
            512: "--plan v4:8x8x8",
            1024: "--plan v4:8x8x16",
        },
    ),
    "T": ("--plan v4:2x2x4 --n_device_axis 4 1 4", points_along_T()),
}
PLOTTED = [  # (curve, key of a point, factor, what it then is)
    ("blocks", "compile_cpu_seconds", 1, "compile time (CPU s)"),
    ("chips", "sent_bytes", 1e-9, "GB sent per chip and step"),
    ("chips", "step_seconds", 1, "estimated step time (s)"),
    ("T", "memory_bytes", 1 / 2**30, "memory per chip (GiB)"),
    ("T", "sent_bytes", 1e-9, "GB sent per chip and step"),
    ("T", "step_seconds", 1, "estimated step time (s)"),
]


def measure(argv):
    """{name: number} of one step on one chip, for the flags of main.py with a --plan among them."""
    from planning import machines, plan
    from training import steps

    cfg, _ = command_line.parse(argv)
    machine = machines.parse_machine(cfg.plan.plan)
    cfg = settings.validate(utils.replace(cfg, n_devices=0), machine.n)
    steps.configure_jax(cfg)
    devices = machines.slice_devices(machine)
    compiled, refused = None, None
    began = time.process_time()
    try:
        compiled = machines.compile_step(cfg, devices)
    except machines.TooLarge as e:
        refused = e
    seconds = time.process_time() - began
    a = plan.answer(cfg, machine, compiled, refused)
    return dict(
        compile_cpu_seconds=seconds,
        sent_bytes=sum(row["bytes"] for row in a.collectives),
        mfu=a.mfu,
        memory_bytes=a.memory["total"],
        step_seconds=a.seconds["step"],
        tokens_per_second=a.tokens_per_second,
        fits=a.fits,
    )


HEADINGS = ("compile CPU s", "GB sent", "GiB held", "step s", "tokens/s", "MFU")


def line(x, point):
    """A point as a line of the table."""
    cells = [
        f"{point['compile_cpu_seconds']:.1f}",
        f"{point['sent_bytes'] / 1e9:.2f}",
        f"{point['memory_bytes'] / 2**30:.1f}",
        f"{point['step_seconds']:.3f}",
        f"{point['tokens_per_second']:,.0f}",
        f"{point['mfu']:.1%}",
    ]
    remark = "" if point["fits"] else "  does not fit; from formulas"
    return columns(x, cells) + remark


def columns(first, cells):
    """A row of the table."""
    return f"{first:>8}" + "".join(f"{cell:>15}" for cell in cells)


def draw(curves):
    """PNG bytes of the plots of {curve: {x: point}}; hollow points do not fit and come from formulas."""
    from training import runlog  # here: it imports jax

    plots = [plot for plot in PLOTTED if plot[0] in curves]
    across = min(3, len(plots))
    rows = math.ceil(len(plots) / 3)
    figure = runlog.new_figure(3.4 * across, 2.6 * rows, dpi=100)
    for i, (curve, key, factor, title) in enumerate(plots):
        axes = figure.add_subplot(rows, across, 1 + i)
        draw_curve(axes, curves[curve], key, factor)
        axes.set_xlabel(curve, fontsize=8)
        axes.set_title(title, fontsize=8)
    return runlog.picture(figure)


def draw_curve(axes, points, key, factor):
    """One plot of {x: point}."""
    values = {x: factor * point[key] for x, point in points.items()}
    axes.plot(list(values), list(values.values()), lw=1, color="C0")
    for x, y in values.items():
        fill = "C0" if points[x]["fits"] else "none"
        axes.scatter([x], [y], 14, facecolors=fill, edgecolors="C0", zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1 * max(values.values()))
    labels = [f"{x // 1024}k" if x >= 1024 else str(x) for x in values]
    axes.set_xticks(list(values), labels, fontsize=7)
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(alpha=0.3)


def parse(argv):
    """Command line -> (own flags, words for main.py). Raises UserError."""
    parser = common.Parser(__doc__)
    parser.add_argument(
        "--curves",
        nargs="+",
        choices=CURVES,
        default=list(CURVES),
        help="what to vary (default: all)",
    )
    parser.add_argument(
        "--points", type=int, default=99, help="points of each curve, from its left (default: all)"
    )
    parser.add_argument("--plot", default=None, metavar="FILE", help="PNG file to draw")
    parser.add_argument(
        "--json", default=None, metavar="FILE", help="file to write the numbers to as well"
    )
    own, flags = parser.parse_known_args(argv)
    utils.check_least(vars(own), dict(points=1))
    for flag, path in dict(json=own.json, plot=own.plot).items():
        if path:
            utils.check_place(path, f"--{flag}")
    return own, flags


def main(argv):
    """Print, plot and return {curve: {x: dict of `measure`}}."""
    own, flags = parse(argv)
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            '--curves: the TPU compiler is not installed; pip install "jax[tpu]" brings it.'
        )
    platforms.use_no_device()
    found = {}
    for name in own.curves:
        first, points = CURVES[name]
        found[name] = {}
        print(columns(name, HEADINGS), flush=True)
        for x in list(points)[: own.points]:
            point = measure([*first.split(), *flags, *points[x].split(), "--compilation_cache", ""])
            found[name][x] = point
            print(line(x, point), flush=True)
            save(found, own)  # at every point: each takes a minute
    return found


def save(found, own):
    """Write what is `found` so far to the files that were asked for."""
    if own.json:
        utils.write_file(own.json, utils.to_json(found, indent=1) + "\n")
    if own.plot:
        utils.write_file(own.plot, draw(found))


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
