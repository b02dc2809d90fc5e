"""The drawings in docs/: what travels between devices, the loss curves of the README and those of docs/rates.md.

python docs/pictures.py [NAME ...]      (all of them without a NAME; the same bytes each time)
"""

import functools
import json
import os
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"  # Jupyter's own may be missing here
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "docs",  # the same ids each time
    "font.family": "sans-serif",
    "font.size": 10,
}
# one color for each mesh axis, in all pictures
DP, PP, TP = "#4878d0", "#6acc64", "#ee854a"
PALE = {DP: "#dbe4f6", PP: "#e1f5e0", TP: "#fbe6da"}
GRAY, INK = "#eeeeee", "#333333"
MICROBATCHES = ["#4878d0", "#ee854a", "#6acc64", "#d5bb67"]


# --- Helpers ------------------------------------------------------------------------------------------------------


def canvas(width, height):
    """A white figure whose units are inches, y upwards."""
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, text="", color=GRAY, edge=INK, size=9, ink=INK):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=size, color=ink)


def arrow(axes, start, end, color=INK, style="-|>", bend=0.0):
    shape = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style,
            connectionstyle=shape,
            color=color,
            mutation_scale=10,
            linewidth=1.3,
            shrinkA=1,
            shrinkB=1,
        )
    )


def label(axes, x, y, text, size=9, color=INK, ha="center", weight="normal"):
    axes.text(x, y, text, ha=ha, va="center", size=size, color=color, weight=weight)


# --- One axis at a time -------------------------------------------------------------------------------------------


def data_parallel():
    """Four devices, a copy of the weights each, and one sum of gradients."""
    figure, axes = canvas(7.4, 2.5)
    for device in range(4):
        x = 0.2 + 1.8 * device
        box(
            axes,
            x,
            1.6,
            1.5,
            0.6,
            f"all weights\nsequences {4 * device}..{4 * device + 3}",
            PALE[DP],
        )
        box(axes, x, 1.1, 1.5, 0.35, "own gradient", GRAY)
        arrow(axes, (x + 0.75, 1.1), (x + 0.75, 0.72), DP, "<|-|>")
        label(axes, x + 0.75, 2.37, f"device {device}", 9, INK, weight="bold")
    box(
        axes,
        0.2,
        0.35,
        6.9,
        0.37,
        "all-reduce: the sum of all gradients, to every device",
        DP,
        ink="white",
    )
    label(axes, 3.65, 0.15, "2 x (n - 1)/n x weights leave each device, once a step", 9)
    return figure


def fsdp():
    """The life of one weight with ZeRO-3: stored in parts, gathered, used, its gradient summed into parts."""
    figure, axes = canvas(7.4, 3.3)
    for device in range(4):
        one_device_of_fsdp(axes, device)
    gather = "all-gather, before use: (n - 1)/n x weights leave each device"
    scatter = "reduce-scatter, after the backward pass: (n - 1)/n x gradients"
    box(axes, 0.2, 2.1, 6.9, 0.3, gather, DP, ink="white")
    box(axes, 0.2, 1.02, 6.9, 0.3, scatter, DP, ink="white")
    stored = (
        "weights, gradients and the optimizer's moments are stored once, a quarter on each device"
    )
    label(axes, 3.65, 0.2, stored)
    return figure


def one_device_of_fsdp(axes, device):
    """Its part of the weight, the whole weight while it is used, its part of the gradient."""
    x = 0.2 + 1.8 * device
    label(axes, x + 0.75, 3.15, f"device {device}", 9, weight="bold")
    for part, color in enumerate(MICROBATCHES[:4]):
        at = x + 0.375 * part
        mine = part == device
        stored = color if mine else "white"
        box(axes, at, 2.6, 0.375, 0.35, f"W{part}" if mine else "", stored)
        box(axes, at, 1.55, 0.375, 0.35, f"W{part}", color)
        box(axes, at, 0.45, 0.375, 0.35, f"dW{part}" if mine else "", stored, size=8)
    arrow(axes, (x + 0.75, 2.6), (x + 0.75, 1.9), DP)
    arrow(axes, (x + 0.75, 1.55), (x + 0.75, 0.8), DP)


def tensor_parallel():
    """What one layer sends over tp, with megatron and with ulysses."""
    figure, axes = canvas(7.6, 4.0)
    wide = [("norm\nT/2", GRAY), ("attention\nT, heads/2", PALE[TP]), ("add, norm\nT/2", GRAY)]
    megatron = [*wide, ("feed-forward\nT, width/2", PALE[TP]), ("add\nT/2", GRAY)]
    between = ["all-gather\ntokens", "reduce-\nscatter", "all-gather\ntokens", "reduce-\nscatter"]
    ulysses = [
        *wide[:2],
        ("project,\nadd, norm\nT/2", GRAY),
        ("feed-forward\nT/2, all width", GRAY),
        ("add\nT/2", GRAY),
    ]
    for top, title, steps, sends in (
        (3.75, "megatron: whole tokens travel four times, weights stay split", megatron, between),
        (
            1.75,
            "ulysses: latents and heads' outputs travel; weights behind the heads are gathered",
            ulysses,
            ["all-gather\nlatents", "all-to-all\nheads", "", ""],
        ),
    ):
        label(axes, 0.1, top, title, 10, ha="left", weight="bold")
        for device in range(2):
            y = top - 0.85 - 0.72 * device
            label(axes, 0.1, y + 0.27, f"device {device}", 8, ha="left")
            for i, (text, color) in enumerate(steps):
                box(axes, 0.75 + 1.42 * i, y, 0.95, 0.54, text, color, size=7.5)
                if i < 4:
                    start = 0.75 + 1.42 * i + 0.95
                    arrow(
                        axes, (start, y + 0.27), (start + 0.47, y + 0.27), TP if sends[i] else INK
                    )
        for i, text in enumerate(sends):
            label(axes, 0.75 + 1.42 * i + 0.95 + 0.235, top - 0.94 + 0.04, text, 6.5, TP)
    return figure


def pipeline():
    """The ticks of two stages and four microbatches, in one round and in two."""
    figure, axes = canvas(7.4, 3.5)
    stages, batches = 2, 4
    for top, rounds, width, letters, title in (
        (3.3, 1, 1.2, [""], "8 blocks in one round: 4 blocks a tick, 4 + 1 = 5 ticks, 1/5 idle"),
        (1.6, 2, 0.6, "ab", "in two rounds: 2 blocks a tick, 2 x 4 + 1 = 9 short ticks, 1/9 idle"),
    ):
        label(axes, 0.2, top, title, 10, ha="left", weight="bold")
        for stage in range(stages):
            y = top - 0.65 - 0.5 * stage
            label(axes, 0.2, y + 0.2, f"stage {stage}", ha="left")
            for tick in range(rounds * batches + stages - 1):
                turn = tick - stage
                busy = 0 <= turn < rounds * batches
                color = MICROBATCHES[turn % batches] if busy else "white"
                text = "idle"
                if busy:
                    text = f"{turn % batches}{letters[turn // batches]}"
                box(axes, 0.95 + width * tick, y, width, 0.4, text, color, size=9 if busy else 7)
    label(
        axes,
        0.2,
        0.2,
        "the number is the microbatch; a is its first round through the stages, b its second",
        ha="left",
    )
    return figure


CHOSEN = [0, 2, 0, 1, 0, 2]  # the expert of each of six tokens
CAPACITY = 2


def experts():
    """Routing of six tokens to three experts of capacity two, and the exchange between two devices."""
    figure, axes = canvas(7.4, 3.1)
    tell = functools.partial(label, axes, 0.3, ha="left")
    tell(2.92, "6 tokens of one device, colored by the expert that they choose")
    for expert in range(3):
        bucket(axes, expert)
    for token, expert in enumerate(CHOSEN):
        x = 0.3 + 0.62 * token
        box(axes, x, 2.4, 0.5, 0.35, f"t{token}", MICROBATCHES[expert])
        place = CHOSEN[:token].count(expert)
        if place < CAPACITY:
            slot = 0.55 + 1.3 * expert + 0.5 * place
            arrow(axes, (x + 0.25, 2.4), (slot, 1.55), MICROBATCHES[expert])
    tell(0.62, "t4 finds the bucket of expert 0 full: its choice goes in", 8)
    tell(0.4, "the next round. One place stays empty.", 8)
    for device in range(3):
        y = 2.35 - 0.75 * device
        text = f"expert {device} on device {device}:\nits buckets of all devices"
        box(axes, 5.3, y, 1.9, 0.5, text, PALE[DP], size=8)
        arrow(axes, (4.0, 1.38), (5.3, y + 0.25), DP)
    label(axes, 6.25, 2.98, "all-to-all over dp x tp", 9, DP)
    label(axes, 5.3, 0.5, "compute, then a second\nall-to-all takes results back", 8, ha="left")
    return figure


def bucket(axes, expert):
    """The bucket of an expert with the tokens that found a place in it."""
    tokens = [token for token in range(6) if CHOSEN[token] == expert]
    x = 0.3 + 1.3 * expert
    for place in range(CAPACITY):
        taken = place < len(tokens)
        text = f"t{tokens[place]}" if taken else ""
        color = MICROBATCHES[expert] if taken else "white"
        box(axes, x + 0.5 * place, 1.2, 0.5, 0.35, text, color)
    label(axes, x + 0.5, 1.0, f"bucket of expert {expert}", 8)


def mesh():
    """Eight devices as the mesh (2, 2, 2)."""
    figure, axes = canvas(7.4, 3.2)
    corners = {}
    for dp in range(2):
        for pp in range(2):
            for tp in range(2):
                x = 0.9 + 1.9 * tp + 0.85 * pp
                y = 0.75 + 1.35 * dp + 0.5 * pp
                corners[dp, pp, tp] = (x, y)
    for at, (x, y) in corners.items():
        for axis, color in enumerate((DP, PP, TP)):
            if at[axis] == 0:
                other = tuple(1 if i == axis else n for i, n in enumerate(at))
                axes.plot(*zip((x, y), corners[other]), color=color, linewidth=2.5, zorder=1)
    for number, (at, (x, y)) in enumerate(corners.items()):
        axes.plot(x, y, "o", color="white", markeredgecolor=INK, markersize=21, zorder=2)
        axes.text(x, y, str(number), ha="center", va="center", size=10, zorder=3)
    words = (
        (DP, "dp: the batch; weights stored in parts"),
        (PP, "pp: blocks, in stages"),
        (TP, "tp: attention heads, else the sequence"),
        (INK, "dp x tp together: the experts"),
    )
    for i, (color, text) in enumerate(words):
        label(axes, 4.15, 2.45 - 0.42 * i, text, 9.5, color, ha="left", weight="bold")
    label(axes, 2.2, 0.2, "8 devices, --n_device_axis 2 2 2")
    return figure


# --- The README's curve -------------------------------------------------------------------------------------------


def loss():
    """Validation loss by training tokens, of docs/loss.json."""
    figure = plt.figure(figsize=(7.0, 3.3), facecolor="white")
    axes = figure.add_axes((0.09, 0.15, 0.88, 0.8))
    curves = json.loads((HERE / "loss.json").read_text())["curves"]
    for curve, color in zip(curves, (DP, TP)):
        tokens = [step * curve["tokens_per_step"] / 1e6 for step in curve["steps"]]
        axes.plot(
            tokens, curve["val_loss"], "o-", color=color, markersize=3.5, label=curve["label"]
        )
        last = (tokens[-1], curve["val_loss"][-1])
        axes.annotate(
            f"{last[1]:.2f}", last, (0, 7), textcoords="offset points", ha="center", color=color
        )
    axes.set(xlabel="million training tokens", ylabel="validation loss, nats per token")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def rates():
    """Final validation loss by rate or weight decay, of docs/rates.json: a panel for each table of docs/rates.md."""
    figure = plt.figure(figsize=(7.4, 6.0), facecolor="white")
    panels = json.loads((HERE / "rates.json").read_text())["panels"]
    for axes, panel in zip(figure.subplots(2, 2).flat, panels):
        for curve, color in zip(panel["curves"], (DP, TP, PP, INK)):
            axes.plot(
                curve["x"], curve["loss"], "o-", color=color, markersize=3.5, label=curve["label"]
            )
        axes.set_xscale(panel["scale"])
        ticks = sorted({x for curve in panel["curves"] for x in curve["x"]})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set(title=panel["title"], xlabel=panel["xlabel"], ylabel="validation loss")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.5 * (high - low))  # room for the legend
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center")
    figure.tight_layout()
    return figure


PICTURES = (data_parallel, fsdp, tensor_parallel, pipeline, experts, mesh, loss, rates)


def draw(picture, folder=HERE, kind="svg"):
    """Write one picture; returns its path."""
    path = Path(folder) / f"{picture.__name__}.{kind}"
    with plt.rc_context(SETTINGS):
        figure = picture()
        figure.savefig(
            path, metadata={"Date": None, "Creator": None} if kind == "svg" else None, dpi=110
        )
        plt.close(figure)
    return path


if __name__ == "__main__":
    for each in PICTURES:
        if len(sys.argv) == 1 or each.__name__ in sys.argv[1:]:
            print(draw(each))
