"""Variations of a configuration, trained one after another on the same data with several seeds, and their losses.

python tools/ablate.py --preset tiny --bucket_name data/shards/stdlib --seeds 3 --output runs/ablations/lr \
    --variation base --variation "high: --max_lr 3e-3" --variation "wide: --model_dimension 192"

Takes every flag of main.py for all variations; each variation is a name, a colon and flags of its own. A run is a
process of main.py with a directory and a log of its own in --output. Every seed draws the weights and the order of the
data; that order is the same for all variations of a seed, so they are compared seed by seed. Stopped or
failed: rerun the same command to resume; finished runs are not trained again.
"""

if __name__ == "__main__":
    import program

    program.begin()

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from typing import NamedTuple

import utils
from tools import common
from training import command_line, platforms, settings
from utils import UserError, say

ENVIRONMENT = dict(os.environ)  # of the runs: importing jax changes it
from tools import curves, seeds
from training.runlog import duration, picture

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
        """The words that train it, or resumes it."""
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
    """Raises UserError where the trial's directory holds a run of another definition, of which a step was made."""
    if not os.path.exists(os.path.join(trial.folder, "config.json")):
        return
    kept = utils.read_json(trial.folder, "variation.json")
    now = trial.variation.definition()
    differ = [flag for flag in now if flag in kept and kept[flag] != now[flag]]
    if differ:
        fields = ", ".join(f"{n} was {kept[n]!r} and is now {now[n]!r}" for n in differ)
        raise UserError(
            f"--variation {trial.variation.name}: {trial.folder} was begun with another definition "
            f"({fields}); give the variation another name, or another --output."
        )


def train(trial):
    """Train a trial, or resume it, to its end; returns the exit status of main.py. Ends this program with a
    sentence where Ctrl-C ended the run."""
    definition = json.dumps(trial.variation.definition(), indent=1) + "\n"
    utils.write_file(os.path.join(trial.folder, "variation.json"), definition)
    with open(trial.log, "a") as log:
        status, interrupted = run_to_end(trial.command(), log)
    if interrupted:
        say(f"stopped in {trial.name}; rerun the same command to resume")
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


def finished_runs(trials):
    """{name of a variation: {seed: Curve}} of the trials that are finished. Raises UserError where they saw different
    data."""
    finished = {trial.variation.name: {} for trial in trials}
    first = None
    for trial in trials:
        if not (curve := trial.curve()):
            continue
        finished[trial.variation.name][trial.seed] = curve
        first = first or curve
        if curve.data != first.data:
            raise UserError(
                f"--output {trial.output}: {curve.folder} saw other data than {first.folder}, so they cannot be "
                f"compared; give another --output."
            )
    return finished


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
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="seeds of each variation: 0, 1, ... (default: 3 of them)",
    )
    parser.add_argument(
        "--output",
        default="runs/ablation",
        help="folder of the runs and results (default: runs/ablation)",
    )
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
    own.marks = [round(mark) for mark in own.marks]
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
    """Train what is not finished, then print, plot and return `seeds.results`; the status is 1 where a run failed."""
    own, variations = parse(argv)
    platforms.choose_cpu()  # the devices belong to the runs
    # a run in progress is stopped with this program, whatever stops it; nohup stays what it is
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    # all variations of a seed before the next seed: early results can be compared
    trials = [Trial(v, seed, own.output) for seed in range(own.seeds) for v in variations]
    for trial in trials:
        check_definition(trial)
    utils.check_place(os.path.join(own.output, "results.json"), "--output")
    failed = train_all(trials, lambda: save(trials, own))
    found = save(trials, own)
    if found:
        print("\n".join(seeds.table(found, variations[0].name)))
        print(f"\nresults.json and losses.png stand in {own.output}")
    if failed:
        say(f"{failed} of {len(trials)} runs failed; rerun the same command to try them again")
        sys.exit(1)
    return found


def save(trials, own):
    """Write the numbers of the finished runs and their picture, if there are any; returns `seeds.results`."""
    found = seeds.results(finished_runs(trials), own.marks, own.target)
    if found:
        path = os.path.join(own.output, "results.json")
        utils.write_file(path, utils.to_json(found, indent=1) + "\n")
        drawn = picture(seeds.draw(found))
        utils.write_file(os.path.join(own.output, "losses.png"), drawn)
    return found


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
