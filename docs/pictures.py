"""The measured curves in docs/: the README's, of loss.json, and those of rates.md, of rates.json.

python docs/pictures.py      (the same bytes each time)
"""

import json
import os
from pathlib import Path

os.environ["MPLBACKEND"] = "Agg"  # Jupyter's own may be missing here
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "docs",  # the same ids each time
    "font.family": "sans-serif",
    "font.size": 10,
}
COLORS = ("#4878d0", "#ee854a", "#6acc64", "#333333")


def plot(axes, curve, x, losses, color):
    """A curve with its points, named in the legend."""
    axes.plot(x, losses, "o-", color=color, markersize=3.5, label=curve["label"])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def loss():
    """Validation loss by training tokens."""
    figure = plt.figure(figsize=(7.0, 3.3), facecolor="white")
    axes = figure.add_axes((0.09, 0.15, 0.88, 0.8))
    for curve, color in zip(json.loads((HERE / "loss.json").read_text())["curves"], COLORS):
        tokens = [step * curve["tokens_per_step"] / 1e6 for step in curve["steps"]]
        plot(axes, curve, tokens, curve["val_loss"], color)
        last = (tokens[-1], curve["val_loss"][-1])
        axes.annotate(
            f"{last[1]:.2f}", last, (0, 7), textcoords="offset points", ha="center", color=color
        )
    axes.set(xlabel="million training tokens", ylabel="validation loss, nats per token")
    axes.legend(frameon=False)
    return figure


def rates():
    """Final validation loss by rate or weight decay: a panel for each table of docs/rates.md."""
    figure = plt.figure(figsize=(7.4, 6.0), facecolor="white")
    panels = json.loads((HERE / "rates.json").read_text())["panels"]
    for axes, panel in zip(figure.subplots(2, 2).flat, panels):
        for curve, color in zip(panel["curves"], COLORS):
            plot(axes, curve, curve["x"], curve["loss"], color)
        axes.set_xscale(panel["scale"])
        ticks = sorted({x for curve in panel["curves"] for x in curve["x"]})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set(title=panel["title"], xlabel=panel["xlabel"], ylabel="validation loss")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.5 * (high - low))  # room for the legend
        axes.legend(frameon=False, fontsize=8, loc="upper center")
    figure.tight_layout()
    return figure


def draw(picture, folder=HERE):
    """Write one picture; returns its path."""
    path = Path(folder) / f"{picture.__name__}.svg"
    with plt.rc_context(SETTINGS):
        figure = picture()
        figure.savefig(path, metadata={"Date": None, "Creator": None}, dpi=110)
        plt.close(figure)
    return path


if __name__ == "__main__":
    for each in (loss, rates):
        print(draw(each))
