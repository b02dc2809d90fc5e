"""How the cost of a step grows: compile time with depth, bytes sent and time with chips (weak scaling) and with T.

python tools/planning/growth.py [--curves blocks chips T] [--plot docs/growth.png] [--json FILE] [any flag of main.py]

Every point is the real train step, compiled for a slice of TPU v4 by the TPU compiler, which needs no TPU (pip install
"jax[tpu]"), and read by tools/planning/plan.py. A point that does not fit has the formulas' numbers, and says by how much.
"""

import importlib.util
import io
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import interrupts

if __name__ in interrupts.PROGRAM:
    interrupts.at_once("interrupted", __name__)

import utils
from tools import common
from training import command_line, platforms, settings
from utils import UserError

TOKENS = 65_536  # of a replica and step along T
CURVES = {  # {name: (flags that a user may override, {x: flags of the point})}
    "blocks": (
        "--plan v4:2x4x4 --n_device_axis 8 2 2 --pp_interleave 2",
        {n: f"--blocks {n}" for n in (4, 8, 16)},
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
    "T": (
        "--plan v4:2x2x4 --n_device_axis 4 1 4",
        {
            T: f"--T {T} --train_batch_size {TOKENS // T} --microbatches {min(4, TOKENS // T)}"
            for T in (1024, 4096, 16384, 65536)
        },
    ),
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
    from tools.planning import plan
    from training import steps

    cfg, _ = command_line.parse(argv)
    machine = plan.parse_machine(cfg.plan.plan)
    cfg = settings.validate(utils.replace(cfg, n_devices=0), machine.n)
    steps.configure_jax(cfg)
    devices, began, said = plan.slice_devices(machine), time.process_time(), {}
    try:
        said["compiled"] = plan.compile_step(cfg, devices)
    except plan.TooLarge as e:
        said["too_large"] = e
    seconds, a = time.process_time() - began, plan.answer(cfg, machine, **said)
    return dict(
        compile_cpu_seconds=seconds,
        sent_bytes=sum(row["bytes"] for row in a.collectives),
        mfu=a.mfu,
        memory_bytes=a.memory["total"],
        step_seconds=a.seconds["step"],
        tokens_per_second=a.tokens_per_second,
        fits=a.fits,
    )


HEADINGS = "compile CPU s", "GB sent", "GiB held", "step s", "tokens/s", "MFU"


def line(x, p):
    """A point as a line of the table."""
    cells = [
        f"{p['compile_cpu_seconds']:.1f}",
        f"{p['sent_bytes'] / 1e9:.2f}",
        f"{p['memory_bytes'] / 2**30:.1f}",
        f"{p['step_seconds']:.3f}",
        f"{p['tokens_per_second']:,.0f}",
        f"{p['mfu']:.1%}",
    ]
    return (
        f"{x:>8}"
        + "".join(f"{c:>15}" for c in cells)
        + ("" if p["fits"] else "  does not fit; from formulas")
    )


def draw(curves):
    """PNG bytes of the plots of {curve: {x: point}}; hollow points do not fit and come from formulas."""
    from matplotlib.figure import Figure

    plots = [plot for plot in PLOTTED if plot[0] in curves]
    figure = Figure(
        figsize=(3.4 * min(3, len(plots)), 2.6 * -(-len(plots) // 3)), dpi=100, layout="constrained"
    )
    for i, (curve, key, factor, title) in enumerate(plots):
        axes = figure.add_subplot(-(-len(plots) // 3), min(3, len(plots)), 1 + i)
        points = {x: (factor * p[key], p["fits"]) for x, p in curves[curve].items()}
        axes.plot(list(points), [y for y, _ in points.values()], lw=1, color="C0")
        for fits, fill in ((True, "C0"), (False, "none")):
            some = {x: y for x, (y, fit) in points.items() if fit == fits}
            axes.scatter(
                list(some), list(some.values()), 14, facecolors=fill, edgecolors="C0", zorder=3
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1 * max(y for y, _ in points.values()))
        axes.set_xticks(
            list(points), [f"{x // 1024}k" if x >= 1024 else str(x) for x in points], fontsize=7
        )
        axes.minorticks_off()
        axes.set_xlabel(curve, fontsize=8)
        axes.set_title(title, fontsize=8)
        axes.tick_params(axis="y", labelsize=7)
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def main(argv):
    """Print, plot and return {curve: {x: dict of `measure`}}."""
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
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            '--curves: the TPU compiler is not installed; pip install "jax[tpu]" brings it.'
        )
    platforms.use_no_device()
    found = {}
    for name in own.curves:
        first, points = CURVES[name]
        print(f"{name:>8}" + "".join(f"{h:>15}" for h in HEADINGS), flush=True)
        for x in list(points)[: own.points]:
            point = measure([*first.split(), *flags, *points[x].split(), "--compilation_cache", ""])
            found.setdefault(name, {})[x] = point
            print(line(x, point), flush=True)
            if own.json:  # at every point, not to lose what took a minute each
                utils.write_file(own.json, utils.to_json(found, indent=1) + "\n")
            if own.plot:
                utils.write_file(own.plot, draw(found))
    return found


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
