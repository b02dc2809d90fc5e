"""Variations of a configuration, trained one after another on the same data with several seeds, and their losses.

python tools/ablate.py --preset tiny --bucket_name data/shards/stdlib --seeds 3 --output runs/ablations/lr \
    --variation base --variation "high: --max_lr 3e-3" --variation "wide: --model_dimension 192"

Takes every flag of main.py for all variations; each variation is a name, a colon and flags of its own. A run is a
process of main.py with a directory and a log of its own in --output. Every seed draws the weights and the order of the
data; that order is the same for all variations of a seed, so they are compared seed by seed. Stopped or failed, the
same command goes on where it was; finished runs are not trained again.
"""

if __name__ == "__main__":
    import program

    program.begin()

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np

import utils
from tools import common
from training import command_line, platforms, settings
from utils import UserError, say

ENVIRONMENT = dict(os.environ)  # of the runs: importing jax changes it
import model
from tools import curves
from training.runlog import duration

MAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "main.py")
# Ahead of the user's flags, which win: an ablation should not fill a disk.
SAVE_LITTLE = "--keep_checkpoints 1 --no_keep_best --inference_batch 1 --max_tokens 1".split()
# What each run gets from here.
OWN = dict(
    seed="--seeds says how many",
    name="variations have names",
    output_dir="give --output",
    plan="main.py plans",
)
# Flags of which all variations must have the same value.
SAME_TEXT = ["T", "bucket_name", "mix", "train_folder_name", "val_folder_name", "eval_steps"]
# Flags of a run that belong to the definition of a variation, as those of model, data and optimizer do.
OF_RUN = ["training_steps", "accumulation_steps", "eval_steps", "eval_every", "init_from"]

# --- Variations -------------------------------------------------------------------------------------------------


class Variation(NamedTuple):
    """One configuration of the ablation. words: its flags for main.py; cfg: the Config that they make."""

    name: str
    words: list
    cfg: utils.Config

    def definition(self):
        """{flag: value} of all that its losses depend on, but for the seed."""
        flags = {name: getattr(self.cfg.run, name) for name in OF_RUN}
        for group in (self.cfg.model, self.cfg.data, self.cfg.optimizer):
            flags |= vars(group)
        return settings.as_json(settings.without(utils.flags_with("per_process"), flags))


def parse_variation(text, flags):
    """The Variation "name: flags", after the `flags` of all. Raises UserError, as main.py does."""
    name, _, own = text.partition(":")
    name = name.strip()
    if not re.fullmatch(r"[\w.+=@-]+", name):
        raise UserError(
            f"--variation {text!r}: must be a name, of letters, digits and . _ - + = @ only, a colon and "
            f'flags, such as "high: --max_lr 3e-3".'
        )
    try:
        words = [*flags, *shlex.split(own)]
    except ValueError:
        raise UserError(f"--variation {name}: a quotation mark lacks its second in{own}.") from None
    try:
        cfg, given = command_line.check(words, True)
    except UserError as e:
        raise UserError(f"--variation {name}: {e}") from None
    for flag in OWN.keys() & given:
        raise UserError(f"--{flag}: each run here gets one of its own; {OWN[flag]}.")
    return Variation(name, words, cfg)


def check_comparable(variations):
    """Raises UserError where two have the same name, or would be measured on other text than the first."""
    first = variations[0]
    names = [variation.name for variation in variations]
    for other in variations:
        if names.count(other.name) > 1:
            raise UserError(f"--variation {other.name}: two have this name; give each its own.")
        now, wanted = measured_on(other.cfg), measured_on(first.cfg)
        for what in now:
            if now[what] != wanted[what]:
                raise UserError(
                    f"--variation {other.name}: {what} is {now[what]!r}, but {wanted[what]!r} for {first.name}; losses "
                    f"on different text cannot be compared, so give all the same."
                )


def measured_on(cfg):
    """{what: value} of all that the validation text depends on."""
    flags = utils.flatten(cfg)
    text = {f"--{flag}": flags[flag] for flag in SAME_TEXT}
    replicas = max(1, cfg.run.n_device_axis[0])  # 0, as many as there are, in all or in none
    return text | {"--val_batch_size x dp": cfg.data.val_batch_size * replicas}


# --- Runs -------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """One run of the ablation: a variation with a seed."""

    variation: Variation
    seed: int
    output: str

    @property
    def name(self):
        return f"{self.variation.name}-seed{self.seed}"

    @property
    def folder(self):
        return os.path.join(self.output, self.name)

    @property
    def log(self):
        return f"{self.folder}.log"

    def command(self):
        """The words that train it, or go on with it."""
        own = ["--seed", str(self.seed), "--name", self.name, "--output_dir", self.output]
        return [sys.executable, MAIN, *SAVE_LITTLE, *self.variation.words, *own]

    def curve(self):
        """Its Curve when it is finished, else None."""
        if not os.path.exists(os.path.join(self.folder, "config.json")):
            return None
        try:
            curve = curves.read_curve(self.folder)
        except UserError:  # no evaluation yet
            return None
        last = curve.steps[curve.evaluated[-1]]
        return curve if last >= self.variation.cfg.run.training_steps else None


def check_definition(trial):
    """Raises UserError where the trial's directory holds a run of another definition."""
    kept = utils.read_json(trial.folder, "variation.json")
    now = trial.variation.definition()
    differ = [flag for flag in now if flag in kept and kept[flag] != now[flag]]
    if differ:
        fields = ", ".join(f"{n} was {kept[n]!r} and is now {now[n]!r}" for n in differ)
        raise UserError(
            f"--variation {trial.variation.name}: {trial.folder} was trained with another definition "
            f"({fields}); give the variation another name, or another --output."
        )


def train(trial):
    """Train a trial, or go on with it, to its end; returns the exit status of main.py. Ends this program with a
    sentence where Ctrl-C ended the run."""
    definition = json.dumps(trial.variation.definition(), indent=1) + "\n"
    utils.write_file(os.path.join(trial.folder, "variation.json"), definition)
    with open(trial.log, "a") as log:
        status, interrupted = run_to_end(trial.command(), log)
    if interrupted:
        say(f"stopped in {trial.name}; the same command goes on from here")
        sys.exit(128 + signal.SIGINT)
    return status


def run_to_end(command, log):
    """(exit status, whether Ctrl-C came) of a process that writes to an open file. Ctrl-C is passed on to it."""
    interrupted = False
    # in a session of its own: a terminal's Ctrl-C reaches it from here alone, and once
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
    )
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
    return process.returncode, interrupted


def train_all(trials, after):
    """Train those that are not finished; after() is called whenever one is. Returns the number that failed."""
    failed = 0
    for number, trial in enumerate(trials, 1):
        if trial.curve():
            say(f"{trial.name} is finished")
            continue
        say(f"{trial.name}, run {number} of {len(trials)}; its log is {trial.log}")
        status = train(trial)
        curve = trial.curve()
        if status or not curve:
            failed += 1
            say(f"{trial.name} failed with status {status}{last_error(trial.log)}; see {trial.log}")
            continue
        say(f"{trial.name}: {curve.val_loss[-1]:.4f}, trained {duration(curve.seconds[-1])}")
        after()
    return failed


def last_error(path):
    """The last sentence with which main.py refused something, as a log tells it, after a colon; "" where there is
    none."""
    with open(path, errors="replace") as log:
        errors = [line.strip() for line in log if line.startswith("error: ")]
    return f": {errors[-1].removeprefix('error: ').rstrip('.')}" if errors else ""


# --- Results ----------------------------------------------------------------------------------------------------


def measured(values):
    """{"mean", "standard_error"} of one value for each seed, the latter None for a single one; None for no value."""
    if not values:
        return None
    error = None
    if len(values) > 1:
        error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    return dict(mean=float(np.mean(values)), standard_error=error)


def marks_of(first):
    """Up to three evaluations of a Curve, at about a quarter, half and three quarters of it: [tokens]."""
    n = len(first.evaluated)
    chosen = {math.ceil(n * quarter / 4) - 1 for quarter in (1, 2, 3)}
    return [int(first.val_tokens[i]) for i in sorted(chosen - {n - 1})]


def results(variations, trials, own):
    """{name: dict of numbers} of the variations with finished runs, beside the first of them."""
    finished = {variation.name: {} for variation in variations}
    for trial in trials:
        if curve := trial.curve():
            finished[trial.variation.name][trial.seed] = curve
    first = finished[variations[0].name]
    marks = own.marks
    if not marks and first:
        marks = marks_of(next(iter(first.values())))
    found = {}
    for variation in variations:
        if runs := finished[variation.name]:
            found[variation.name] = numbers(variation, runs, first, marks or [], own.target)
    return found


def numbers(variation, runs, first, marks, target):
    """{name: value} of a variation. runs, first: {seed: Curve} of it and of the first variation; marks: tokens;
    target: a loss, None for the final one of the first variation with the same seed."""
    pairs = [(run, first[seed]) for seed, run in runs.items() if seed in first]
    to_target, shares = [], []
    for run, other in pairs:
        loss = other.val_loss[-1] if target is None else target
        to_target.append(run.tokens_to(loss))
        shares.append(run.tokens_to(loss) / other.tokens_to(loss))
    one = next(iter(runs.values()))
    total, active = one.parameters
    return dict(
        flags=variation.words,
        parameters=total,
        active_parameters=active,
        flops_per_token=model.flops_per_token(one.cfg),
        seconds_per_token=measured([1 / run.tokens_per_second for run in runs.values()]),
        loss_at={mark: measured([run.loss_at(mark) for run in runs.values()]) for mark in marks},
        final_loss=measured([run.val_loss[-1] for run in runs.values()]),
        difference=measured([run.val_loss[-1] - other.val_loss[-1] for run, other in pairs]),
        tokens_to_target=measured(to_target),
        share_of_tokens=measured(shares),
        seeds={seed: curve_numbers(run) for seed, run in runs.items()},
    )


def curve_numbers(run):
    """What the JSON file keeps of a Curve: its evaluations."""
    seconds = run.seconds[run.evaluated]
    return dict(
        folder=run.folder,
        tokens=run.val_tokens.tolist(),
        seconds=seconds.tolist(),
        loss=run.val_loss.tolist(),
    )


def cell(value, form, factor=1, sign=""):
    """What `measured` returns as text, each number as `form` says; "-" where there is none."""
    if value is None or math.isnan(value["mean"]):
        return "-"
    numbers = [format(factor * x, form) for x in value.values() if x is not None]
    numbers[0] = format(factor * value["mean"], sign + form)
    return " ± ".join(numbers)


def row(name, one, first):
    """Cells of the table for the variation `name` with `numbers` one; first: name of the first variation."""
    difference, share = "-", "1"
    if name != first:
        difference = cell(one["difference"], ".4f", sign="+")
        share = cell(one["share_of_tokens"], ".3f")
    return [
        name,
        curves.in_millions(one["parameters"]),
        *[cell(loss, ".4f") for loss in one["loss_at"].values()],
        cell(one["final_loss"], ".4f"),
        difference,
        cell(one["tokens_to_target"], ".3f", 1e-6),
        share,
        f"{one['flops_per_token'] / 1e6:.2f}",
        cell(one["seconds_per_token"], ".1f", 1e6),
    ]


def table(found, first):
    """Lines of a Markdown table of `results`; first: name of the first variation."""
    marks = next(iter(found.values()))["loss_at"]
    headings = [
        "variation",
        "parameters",
        *[f"loss at {curves.in_millions(mark)}" for mark in marks],
        "final loss",
        f"against {first}",
        "M tokens to target",
        f"x {first}'s",
        "MFLOP/token",
        "µs/token",
    ]
    return curves.markdown(headings, [row(name, one, first) for name, one in found.items()])


def draw(found):
    """The Figure of `results`: the mean over seeds and a band of its standard error over tokens."""
    figure = curves.new_figure(7, 4.5)
    axes = figure.subplots()
    for i, (name, one) in enumerate(found.items()):
        runs = list(one["seeds"].values())
        losses = [measured(of_seeds) for of_seeds in zip(*[run["loss"] for run in runs])]
        mean = np.array([loss["mean"] for loss in losses])
        error = np.array([loss["standard_error"] or 0.0 for loss in losses])
        tokens = runs[0]["tokens"]
        axes.plot(tokens, mean, "o-", ms=3, lw=1.2, color=f"C{i}", label=name)
        axes.fill_between(tokens, mean - error, mean + error, alpha=0.25, color=f"C{i}", lw=0)
    axes.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    axes.xaxis.set_major_formatter(curves.tick)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


# --- The program ------------------------------------------------------------------------------------------------


def own_flags():
    """The parser of the program's own flags."""
    parser = common.Parser(__doc__)
    parser.add_argument(
        "--variation",
        action="append",
        default=[],
        metavar='"NAME: FLAGS"',
        help="a variation: its name and the flags of main.py that it has besides; once for each, the one that the "
        "others are compared with first",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each variation: 0, 1, ...")
    parser.add_argument("--output", default="runs/ablation", help="folder of the runs and results")
    parser.add_argument(
        "--marks",
        type=float,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="tokens after which the table tells the loss (default: three evaluations of the first variation)",
    )
    parser.add_argument(
        "--target",
        type=float,
        default=None,
        metavar="LOSS",
        help="loss to reach (default: the final one of the first variation, seed by seed)",
    )
    return parser


def parse(argv):
    """Command line -> (own flags, [Variation]). Raises UserError."""
    own, flags = own_flags().parse_known_args(argv)
    utils.check_least(vars(own), dict(seeds=1))
    if not own.variation:
        raise UserError(
            'ablate.py: give variations, such as --variation base --variation "high: --max_lr 3e-3".'
        )
    if utils.is_remote(own.output):
        raise UserError(f"--output {own.output}: must be a local folder; the logs stand in it.")
    variations = [parse_variation(text, flags) for text in own.variation]
    check_comparable(variations)
    return own, variations


def main(argv):
    """Train what is not trained yet, then print, plot and return `results`; the status is 1 where a run failed."""
    own, variations = parse(argv)
    platforms.choose_cpu()  # the devices belong to the runs
    # a run in progress is stopped with this program, whatever stops it
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # all variations of a seed before the next seed: early results can be compared
    trials = [Trial(v, seed, own.output) for seed in range(own.seeds) for v in variations]
    for trial in trials:
        check_definition(trial)
    utils.check_place(os.path.join(own.output, "results.json"), "--output")

    def save():
        found = results(variations, trials, own)
        path = os.path.join(own.output, "results.json")
        utils.write_file(path, utils.to_json(found, indent=1) + "\n")
        draw(found).savefig(os.path.join(own.output, "losses.png"))
        return found

    failed = train_all(trials, save)
    found = save()
    if found:
        print("\n".join(table(found, variations[0].name)))
        print(f"\nresults.json and losses.png stand in {own.output}")
    if failed:
        say(f"{failed} of {len(trials)} runs failed; the same command tries them again")
        sys.exit(1)
    return found


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
