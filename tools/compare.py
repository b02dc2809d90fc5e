"""The losses of runs beside one another, in a table and a picture: of runs that are there, or of variations of a
configuration, which it trains one after another on the same data with several seeds.

python tools/compare.py runs/tiny runs/gpt2-tiny --output compare.png
python tools/compare.py --preset tiny --data data/shards/stdlib --seeds 3 --output runs/ablations/lr \
    --variation base --variation "high: --max_lr 3e-3" --variation "wide: --model_dimension 192"

With --variation it takes every flag of main.py for all variations; each is a name, a colon and flags of its own. A run
is a process of main.py with a directory and a log of its own in --output. Every seed draws the weights and the order of
the data, the same for all variations. Rerun the same command to resume; finished runs are not trained again.
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
from dataclasses import dataclass, replace
from typing import NamedTuple

import utils
from runtime import parser, platforms
from runtime.files import check_place, is_remote, read_json, to_json, write_file
from runtime.messages import UserError, say
from tools import common
from training import command_line, settings

ENVIRONMENT = dict(os.environ)  # of the runs: importing jax changes it
from tools import curves
from training.runlog import duration, picture

MAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "main.py")
# Ahead of the user's flags, which win: many runs should not fill a disk.
SAVE_LITTLE = "--keep_checkpoints 1 --no_keep_best --inference_batch 1 --max_tokens 1".split()
# What each run gets from here.
OWN = dict(
    seed="--seeds says how many",
    name="variations have names",
    output_dir="give --output",
    plan="main.py plans",
)
# Flags of which all variations must have the same value.
SAME_TEXT = ["T", "data", "mix", "eval_steps"]
# Flags of a run that belong to the definition of a variation, as those of model, data and optimizer do.
OF_RUN = ["training_steps", "accumulation_steps", "eval_steps", "eval_every", "init_from"]

# --- Variations -------------------------------------------------------------------------------------------------


class Variation(NamedTuple):
    """One configuration. words: its flags for main.py; cfg: the Config that they make."""

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
        flags = settings.follow(command_line.check(words, True))
    except UserError as e:
        raise UserError(f"--variation {name}: {e}") from None
    for flag in OWN.keys() & flags.given:
        raise UserError(f"--{flag}: each run here gets one of its own; {OWN[flag]}.")
    return Variation(name, words, flags.cfg)


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


# --- Training them ----------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A variation with a seed."""

    variation: Variation
    seed: int
    output: str

    @property
    def name(self):
        return f"{self.variation.name}-seed{self.seed}"

    @property
    def folder(self):
        return os.path.join(self.output, self.name)

    def command(self):
        """The words that train it, or resume it."""
        own = ["--seed", str(self.seed), "--name", self.name, "--output_dir", self.output]
        return [sys.executable, MAIN, *SAVE_LITTLE, *self.variation.words, *own]

    def curve(self):
        """Its Curve when it is finished, else None."""
        try:
            curve = curves.read_curve(self.folder)
        except UserError:  # there is none, or no evaluation yet
            return None
        return curve if curve.last >= self.variation.cfg.run.training_steps else None


def check_definition(trial):
    """Raises UserError where the trial's directory holds a run of another definition, of which a step was made."""
    if not os.path.exists(os.path.join(trial.folder, "config.json")):
        return
    kept = read_json(trial.folder, "variation.json")
    now = trial.variation.definition()
    differ = [flag for flag in now if flag in kept and kept[flag] != now[flag]]
    if differ:
        fields = ", ".join(f"{n} was {kept[n]!r} and is now {now[n]!r}" for n in differ)
        raise UserError(
            f"--variation {trial.variation.name}: {trial.folder} was begun with another definition "
            f"({fields}); give the variation another name, or another --output."
        )


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


def train(trial, log):
    """Train a trial to its end; whether it failed. Ends this program with a sentence where Ctrl-C ended the run."""
    definition = json.dumps(trial.variation.definition(), indent=1) + "\n"
    write_file(os.path.join(trial.folder, "variation.json"), definition)
    with open(log, "a") as output:
        status, interrupted = run_to_end(trial.command(), output)
    if interrupted:
        say(f"stopped in {trial.name}; rerun the same command to resume")
        sys.exit(128 + signal.SIGINT)
    curve = trial.curve()
    if status or not curve:
        with open(log, errors="replace") as output:  # what main.py refused, it says in a line
            errors = [line.strip()[7:].rstrip(".") for line in output if line.startswith("error: ")]
        reason = f": {errors[-1]}" if errors else ""
        say(f"{trial.name} failed with status {status}{reason}; see {log}")
        return True
    say(f"{trial.name}: {curve.loss[-1]:.4f}, trained {duration(curve.seconds[-1])}")
    return False


def train_all(trials, after):
    """Train those that are not finished; after() is called whenever one is. Returns the number that failed."""
    failed = 0
    for number, trial in enumerate(trials, 1):
        log = f"{trial.folder}.log"
        if trial.curve():
            say(f"{trial.name} is finished")
            continue
        say(f"{trial.name}, run {number} of {len(trials)}; its log is {log}")
        if train(trial, log):
            failed += 1
        else:
            after()
    return failed


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


def compare_variations(own, variations):
    """Train what is not finished, then print, draw and return `curves.results`; the status is 1 where a run failed."""
    # a run in progress is stopped with this program, whatever stops it; nohup stays what it is
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    # all variations of a seed before the next seed: early results can be compared
    trials = [Trial(v, seed, own.output) for seed in range(own.seeds) for v in variations]
    for trial in trials:
        check_definition(trial)
    path = os.path.join(own.output, "results.json")
    check_place(path, "--output")

    def save():
        found = curves.results(finished_runs(trials), own.marks, own.target)
        if found:
            write_file(path, to_json(found, indent=1) + "\n")
            drawn = picture(curves.draw(found))
            write_file(os.path.join(own.output, "losses.png"), drawn)
        return found

    failed = train_all(trials, save)
    found = save()
    if found:
        print("\n".join(curves.table(found)))
        print(f"\nresults.json and losses.png are saved in {own.output}")
    if failed:
        say(f"{failed} of {len(trials)} runs failed; rerun the same command to try them again")
        sys.exit(1)
    return found


# --- The program ------------------------------------------------------------------------------------------------


def compare_runs(own):
    """Print, draw and return `curves.results` of the runs that are there."""
    kinds = (".png", ".svg", ".pdf")
    if not own.output.endswith(kinds):
        raise UserError(f"--output {own.output}: must be a file that ends in {', '.join(kinds)}.")
    check_place(own.output, "--output")
    names = [os.path.basename(folder.rstrip("/")) for folder in own.runs]
    if len(set(names)) < len(names):
        names = own.runs
    groups = {name: {0: curves.read_curve(folder)} for name, folder in zip(names, own.runs)}
    found = curves.results(groups, own.marks, own.target)
    print("\n".join(curves.table(found)))
    kind = os.path.splitext(own.output)[1][1:]
    write_file(own.output, picture(curves.draw(found), kind))
    print(f"\nthe losses are drawn in {own.output}")
    return found


@dataclass(frozen=True)
class Options:
    """Compare the losses of runs, or train variations of a configuration and compare theirs."""

    runs: tuple[str, ...] = parser.flag((), positional=True)
    """Run directories, or their gs:// or s3:// addresses; none with --variation."""
    variation: tuple[str, ...] = ()
    """A variation to train, "NAME: FLAGS": its name and the flags of main.py that it has besides; once for each, the
    one that the others are compared with first."""
    seeds: int = parser.flag(3, least=1)
    """Seeds of each variation: 0, 1, ..."""
    output: str = ""
    """Picture to write, .png, .svg or .pdf; empty: compare.png. With --variation the folder of the runs and results;
    empty: runs/ablation."""
    marks: tuple[float, ...] = ()
    """Tokens after which the table has the loss; without it three evaluations of the first run."""
    target: float | None = None
    """Loss to reach; without it the final one of the first run, seed by seed."""


def parse(argv):
    """Command line -> (own flags, [Variation]). Raises UserError."""
    own, flags = utils.read_own_flags(Options, argv, "tools/compare.py")
    if bool(own.runs) == bool(own.variation) or (own.runs and flags):
        raise UserError(
            "compare.py: give run directories, such as runs/tiny, or variations, such as --variation base "
            '--variation "high: --max_lr 3e-3".'
        )
    if own.runs:
        return replace(own, output=own.output or "compare.png"), []
    own = replace(own, output=own.output or "runs/ablation")
    if is_remote(own.output):
        raise UserError(f"--output {own.output}: must be a local folder, which holds the logs.")
    variations = [parse_variation(text, flags) for text in own.variation]
    check_comparable(variations)
    return own, variations


def main(argv):
    own, variations = parse(argv)
    platforms.choose_cpu()  # the devices belong to the runs
    return compare_variations(own, variations) if variations else compare_runs(own)


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
