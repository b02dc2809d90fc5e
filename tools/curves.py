"""What a run measured while it trained, read of its config.json and metrics.jsonl, and tables of it."""

import math
import os
from dataclasses import dataclass

import numpy as np

import model
import utils
from training import runlog, settings, steps
from utils import UserError


@dataclass(frozen=True)
class Curve:
    """The losses of a run, in nats per token, after each of its n logged steps and at e of them, its evaluations."""

    folder: str
    cfg: utils.Config
    data: str  # fingerprint of the shards
    steps: np.ndarray  # [n] their numbers
    tokens: np.ndarray  # [n] that were trained on until then
    seconds: (
        np.ndarray
    )  # [n] of training until then, without evaluations, checkpoints, samples and stops
    speed: np.ndarray  # [n] tokens per second
    train_loss: np.ndarray  # [n]
    evaluated: np.ndarray  # [e] which of the n steps
    val_loss: np.ndarray  # [e] cross-entropy

    @property
    def val_tokens(self):
        """[e] tokens that were trained on until each evaluation."""
        return self.tokens[self.evaluated]

    @property
    def finite_val_loss(self):
        """[at most e] the validation losses without those that are not finite."""
        return self.val_loss[np.isfinite(self.val_loss)]

    @property
    def parameters(self):
        """(all, those that a token uses), both with the embedding."""
        total, active, embedding = model.count_params(self.cfg)
        return total + embedding, active + embedding

    @property
    def tokens_per_second(self):
        """Of training; a median over the steps, so that a busy spell of the machine hardly counts."""
        return float(np.median(self.speed))

    def loss_at(self, tokens):
        """The validation loss after so many tokens, between evaluations on a straight line; nan before the first of
        them and after the last."""
        return float(np.interp(tokens, self.val_tokens, self.val_loss, math.nan, math.nan))

    def tokens_to(self, loss):
        """Tokens until the validation loss first was at most `loss`, between evaluations on a straight line; nan where
        it never was.

        Example: 5.0 at 100 tokens and 4.0 at 200, so 4.2 was reached after 180.
        """
        reached = np.flatnonzero(self.val_loss <= loss)
        if not len(reached):
            return math.nan
        i = reached[0]
        around = slice(max(0, i - 1), i + 1)
        # np.interp wants rising abscissae, and the loss falls
        falling, tokens = -self.val_loss[around], self.val_tokens[around]
        return float(np.interp(-loss, falling, tokens))


def read_curve(folder):
    """The Curve of the run in a local folder or at an address. Raises UserError where there is none."""
    config = settings.run_config(folder)
    if "n_device_axis" not in config:
        raise UserError(f"{folder}: is no run directory, which holds a config.json of main.py.")
    settings.check_stored(config, folder, settings.NEEDED_TO_RESUME)
    cfg = config_of(config)
    content = utils.read_file(os.path.join(folder, "metrics.jsonl")) or b""
    rows = runlog.rows_in(content)
    evaluated = [i for i, row in enumerate(rows) if "loss/val_loss" in row]
    if not evaluated:
        raise UserError(f"{folder}: its metrics.jsonl holds no evaluation yet.")
    per_step = math.prod(steps.batch_shape(cfg))
    reached = np.array([row["step"] for row in rows])
    # a run may begin with the step of another's checkpoint
    trained = np.diff(reached, prepend=reached[0] - 1) * per_step
    speed = np.array([row.get("tokens_per_second", math.nan) for row in rows])
    return Curve(
        folder=folder,
        cfg=cfg,
        data=config.get("data_fingerprint", ""),
        steps=reached,
        tokens=reached * per_step,
        seconds=np.cumsum(trained / speed),
        speed=speed,
        train_loss=np.array([row["loss/train_loss"] for row in rows]),
        evaluated=np.array(evaluated),
        val_loss=np.array([cross_entropy(rows[i]) for i in evaluated]),
    )


def config_of(config):
    """The Config of {flag: value} as config.json has it; flags that it lacks have their defaults."""
    flags = {name: value for name, value in config.items() if name in utils.FIELDS}
    flags["n_device_axis"] = tuple(flags["n_device_axis"])
    return utils.replace(utils.Config(), **flags)


def cross_entropy(row):
    """The validation loss of an evaluation, without what training adds to it to balance the experts: so runs that
    weigh that differently can be compared."""
    return row.get("loss/val_cross_entropy_loss", row["loss/val_loss"])


# --- Tables and pictures ----------------------------------------------------------------------------------------


def markdown(headings, rows):
    """Lines of a Markdown table, its columns aligned; all cells are text, the first of each row a name."""
    cells = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for name, *numbers in cells:
        aligned = [name.ljust(widths[0])]
        aligned += [number.rjust(width) for number, width in zip(numbers, widths[1:])]
        lines.append(f"| {' | '.join(aligned)} |")
    rules = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines.insert(1, f"| {' | '.join(rules)} |")
    return lines


def in_millions(tokens):
    """A number of tokens or parameters: 287k, 1.15M, 2.49B."""
    for power, letter in ((9, "B"), (6, "M")):
        if tokens >= 0.9995 * 10**power:
            return f"{tokens / 10**power:.2f}{letter}"
    return f"{tokens / 1000:.0f}k"


def tick(tokens, _):
    """The label of a tick of an axis of tokens."""
    return in_millions(tokens) if tokens > 0 else "0"


def check_picture(path, flag):
    """Raises UserError where no picture can be written at the local `path` that `flag` named."""
    kinds = (".png", ".svg", ".pdf")
    if not path.endswith(kinds):
        raise UserError(f"{flag} {path}: must be a file that ends in {', '.join(kinds)}.")
    utils.check_place(path, flag)
