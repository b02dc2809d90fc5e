"""The ladder: train models of growing size that planning/recipe.py designs, and see whether the rules carry over.

python -m dev.ladder train                        # all WIDTHS at the designed rate, then at the other RATES
python -m dev.ladder train --widths 32 --seeds 1 2
python -m dev.ladder predict 160                  # from the smaller rungs, before its run has ended
python -m dev.ladder draw                         # docs/ladder.svg, and the table of docs/rates.md

Each result is written at once to planning/ladder.json, from which planning/ladder.py predicts losses. Runs that it has
are not repeated, and one that was stopped resumes. The corpus is Python's standard library, which differs between
versions of Python: train all rungs with one. A ladder of your own, as on a GPU: move planning/ladder.json away first.
"""

import argparse
import datetime
import importlib.metadata
import io
import json
import platform
import subprocess
import sys

import numpy as np
from matplotlib.figure import Figure

import model
import utils
from data.own_text import TextOptions, corpus_of
from logs.rows import read_rows
from planning import ladder, recipe
from runtime.files import read_json, write_file, write_json
from runtime.messages import short
from shards import manifest
from tools import common

RUNS = "runs/ladder"
PICTURE = "docs/ladder.svg"
# Small, so that the smallest models are not all embedding; the same for all, so that their losses can be compared.
VOCABULARY = 1024
TOKENS_PER_PARAMETER = 10  # half of what the recipe designs, for a quarter of the operations
WIDTHS = (48, 64, 80, 96, 128, 160)
RATES = (1, 0.5, 2)  # multiples of the designed --max_lr
# Flags that alter no more than rounding, or what is looked at: the loss that counts is measured at the end.
BESIDE = dict(microbatch_size=16, val_batch_size=16, eval_steps=20, inference_batch=1, max_tokens=1)


def designed(width, rate=1, seed=0, tokens_per_parameter=TOKENS_PER_PARAMETER):
    """({flag: value} of a run, its active parameters, its operations). rate: a multiple of the designed one, with as
    much decay in all."""
    flags = recipe.model_flags(width, VOCABULARY)
    cfg = utils.replace(utils.Config(), **flags, n_device_axis=(1, 1, 1))
    _, active, embedding = model.count_params(cfg)
    parameters = active + embedding
    tokens = tokens_per_parameter * parameters
    batch = recipe.batch_tokens(tokens, flags["T"])
    flags |= recipe.training_flags(tokens, batch, parameters, flags["T"], width)
    flags |= dict(seed=seed, max_lr=rate * flags["max_lr"])
    flags["weight_decay"] /= rate
    return flags, parameters, model.flops_per_token(cfg) * flags["training_steps"] * batch


def name_of(width, rate=1, seed=0, tokens_per_parameter=TOKENS_PER_PARAMETER):
    """The name of a run, such as 96 or 96-rate2-seed1: the width, and how it differs from the rung's first run."""
    name = str(width)
    if rate != 1:
        name += f"-rate{rate:g}"
    if tokens_per_parameter != TOKENS_PER_PARAMETER:
        name += f"-tokens{tokens_per_parameter:g}"
    return name + (f"-seed{seed}" if seed else "")


def train(asked):
    """Train those of the asked runs that the record lacks."""
    folder, _ = corpus_of("stdlib", TextOptions(), vocab_size=VOCABULARY)
    for rate in asked.rates:
        for width in asked.widths:
            for seed in asked.seeds:
                run = width, rate, seed, asked.tokens_per_parameter
                if name_of(*run) not in read_record(folder)["runs"]:
                    found = train_one(folder, *run)
                    # read again: `predict` may have written in the hours between
                    record = read_record(folder)
                    record["runs"][name_of(*run)] = found
                    write_json(ladder.RECORD, record)


def train_one(folder, *run):
    """Train and evaluate a run. Returns what the record says of it."""
    flags, parameters, operations = designed(*run)
    name = name_of(*run)
    config = f"{RUNS}/{name}.json"
    write_json(config, flags | BESIDE)
    words = ["--config", config, "--data", folder, "--output_dir", RUNS, "--name", name]
    subprocess.run([sys.executable, "main.py", *words], check=True)
    words = ["tools/evaluate.py", f"{RUNS}/{name}", "--data", folder, "--json"]
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)["data"][0]
    last = read_rows(f"{RUNS}/{name}")[-1]
    _, rate, seed, tokens_per_parameter = run
    return dict(
        width=flags["model_dimension"],
        rate=rate,
        seed=seed,
        tokens_per_parameter=tokens_per_parameter,
        parameters=parameters,
        tokens=flags["training_steps"] * flags["global_batch_size"] * flags["T"],
        operations=operations,
        loss=round(found["loss"], 4),
        bits_per_byte=round(found["bits_per_byte"], 4),
        seconds=round(sum(n for name, n in last.items() if name.startswith("seconds/"))),
        ended=now(),
        jax=importlib.metadata.version("jax"),
        flags=flags,
    )


def read_record(folder):
    """ladder.json; a new one where there is none. Exits where it is of another corpus than that in the folder."""
    held = manifest.read(f"{folder}/train")
    names = ("source", "source_listing_sha256", "tokenizer_sha256", "vocab_size", "tokens")
    corpus = {name: held[name] for name in names}
    corpus |= dict(python=platform.python_version())
    new = dict(corpus=corpus, tokens_per_parameter=TOKENS_PER_PARAMETER, runs={}, predictions={})
    record = read_json(ladder.RECORD) or new
    if record["corpus"] != corpus:
        sys.exit(f"error: {ladder.RECORD} is of another corpus than {folder}; move it away.")
    return record


def predict(asked):
    """Write down what the rungs below a width predict for its run, which must not have ended."""
    record = read_json(ladder.RECORD)
    name = name_of(asked.width)
    if name in record["runs"]:
        sys.exit(f"error: the run of {name} has ended; what follows an end is no prediction.")
    below = {w: point for w, point in ladder.rungs_of(record).items() if w < asked.width}
    curve = ladder.curve_through([*below.values()])
    _, _, operations = designed(asked.width)
    record["predictions"][name] = dict(
        rungs=[*below],
        loss=round(float(curve.loss(operations)), 4),
        error=round(float(curve.error(operations)), 4),
        written=now(),
    )
    write_json(ladder.RECORD, record)
    print(f"written to {ladder.RECORD}: {record['predictions'][name]}")


def draw(asked):
    """Draw the picture, and print the table of docs/rates.md."""
    record = read_json(ladder.RECORD)
    write_file(PICTURE, picture(record))
    print(table(record))


def now():
    """The time in UTC, such as 2026-11-28T07:00:00+00:00."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def table(record):
    """A Markdown table with a row for each rung."""
    rows = []
    for width, (operations, loss) in ladder.rungs_of(record).items():
        first = record["runs"][name_of(width)]
        row = dict(width=str(width), active=f"{first['parameters'] / 1e6:.2f}M")
        row["tokens"] = f"{first['tokens'] / 1e6:.1f}M"
        row["operations"] = f"{operations:.2g}"
        row["--max_lr"] = f"{first['flags']['max_lr']:g}"
        row["loss"] = f"{loss:.3f}"
        for rate in RATES[1:]:
            other = record["runs"].get(name_of(width, rate))
            row[f"at {rate:g} x"] = f"{other['loss'] - first['loss']:+.3f}" if other else ""
        predicted = record["predictions"].get(name_of(width))
        row["predicted"] = (
            f"{predicted['loss']:.3f} ± {predicted['error']:.3f}" if predicted else ""
        )
        rows.append(row)
    return common.markdown(rows)


def picture(record):
    """The picture as SVG: the rungs, the curve through all but the last one, and that curve's error. The axis of losses
    is logarithmic above the curve's floor, which makes the curve a straight line."""
    rungs = ladder.rungs_of(record)
    *below, last = rungs.values()
    curve = ladder.curve_through(below)
    operations = np.geomspace(below[0][0], 2 * last[0])
    losses = curve.loss(operations)
    errors = np.array([curve.error(c) for c in operations])
    # without pyplot, which may look for a display
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(operations, losses, lw=1.2, color="C0", label="curve through the smaller ones")
    axes.fill_between(operations, losses - errors, losses + errors, alpha=0.25, color="C0", lw=0)
    others = [run for run in record["runs"].values() if run["rate"] != 1]
    at = [run["operations"] for run in others], [run["loss"] for run in others]
    axes.plot(*at, "x", ms=4, color="C7", label="at half and twice the designed rate")
    axes.plot(*zip(*below), "o", ms=5, color="C0", label="as designed")
    axes.plot(*last, "o", ms=5, color="C1", label="as designed, predicted before its end")
    for width, point in rungs.items():
        parameters = record["runs"][name_of(width)]["parameters"]
        axes.annotate(f" {short(parameters)}", point, fontsize=8, va="bottom")

    def height(loss):
        return np.log(np.maximum(loss - curve.floor, 1e-3))

    axes.set_yscale("function", functions=(height, lambda y: curve.floor + np.exp(y)))
    axes.set(xscale="log", xlabel="operations of the training")
    axes.set(ylabel=f"validation loss (nats per token), logarithmic above {curve.floor:.2f}")
    axes.set_yticks(np.arange(1.8, 3.5, 0.2))
    axes.set_ylim(0.98 * min(losses - errors), 1.02 * max([*losses, *at[1]]))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="svg")
    return image.getvalue()


def main():
    parser = argparse.ArgumentParser("python -m dev.ladder", description=__doc__.splitlines()[0])
    tasks = parser.add_subparsers(required=True)
    training = tasks.add_parser("train", help="train what the record lacks")
    training.add_argument(
        "--widths", nargs="+", type=int, default=WIDTHS, choices=recipe.WIDTHS, metavar="WIDTH"
    )
    training.add_argument("--rates", nargs="+", type=float, default=RATES)
    training.add_argument("--seeds", nargs="+", type=int, default=[0])
    training.add_argument("--tokens_per_parameter", type=float, default=TOKENS_PER_PARAMETER)
    training.set_defaults(do=train)
    predicting = tasks.add_parser("predict", help="predict the loss of a rung")
    predicting.add_argument("width", type=int, choices=recipe.WIDTHS, metavar="WIDTH")
    predicting.set_defaults(do=predict)
    tasks.add_parser("draw", help="draw the picture and print the table").set_defaults(do=draw)
    asked = parser.parse_args()
    asked.do(asked)


if __name__ == "__main__":
    main()
