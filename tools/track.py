"""Train for some hours on fineweb10B, on which others have a board, and write a page that they can compare with.

python tools/track.py --hours 1

`bash run.sh track` runs this once it has made an environment. It fetches the shards of modded-nanogpt, has main.py
design a run for this machine and train it, and writes the page from what the run recorded. It accepts the flags of
main.py, which win over those of the track.
"""

if __name__ == "__main__" and not __package__:
    import startup

    startup.prepare()

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

import utils
from config import command_line
from config.command_line import HINTS
from config.parser import flag, read_words
from config.resume import global_batches
from logs.meter import PARTS, spent_in
from logs.overfitting import HELD_OUT
from logs.rows import read_rows
from runtime import interrupts, platforms
from runtime.files import read_json, write_file
from runtime.installation import ROOT
from runtime.messages import UserError, first_line, masked, one_sentence, say, warn
from shards.mixture import Mixture
from shards.storage import list_split
from tools.common import markdown, stored_config

# The shards: FineWeb's sample of 10B tokens as GPT-2's tokens, in files of 100M. The first file is for validation.
HUB = "kjj0/fineweb10B-gpt2"
FOLDER = "data/shards/fineweb10B"
VAL_FILE, TRAIN_FILE = "fineweb_val_000000.bin", "fineweb_train_{:06d}.bin"
TRAIN_FILES, FILE_TOKENS = 103, 100_000_000
BOARD_TOKENS = 10_485_760  # of validation, from its start, over which the board takes the loss
FLAGS = dict(T=1024, tokenizer="gpt2", vocab_size=50_257, val_tokens=BOARD_TOKENS)
# There the smallest design takes longer than the track, and one evaluation over all those tokens longer than that.
ON_A_CPU = dict(preset="tiny", val_tokens=65_536)
# Evaluations of a run: at most so many, and fewer where they would read more than this share of the tokens that it
# trains on. A token costs a third of a step's operations there, so they add at most a tenth to the time of the steps.
EVALUATIONS, EVALUATED_SHARE = 16, 0.3
PAGE = "track.md"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train for some hours on fineweb10B and write a page to compare with others'. Flags of main.py are accepted too,
    and win: --data names a folder that has the shards, --config trains the flags of a file and designs nothing."""

    hours: float = flag(0.25, least=0, most=1e6)
    """Hours of this machine that the run is designed for, with its start, its evaluations and its checkpoints."""
    tokens: float = flag(0.0)
    """Tokens to train on, as for main.py --design; 0: as many as the hours allow."""
    design: str = ""
    """Machine to design for, as for main.py; empty: this one."""
    by_formulas: bool = True
    """As for main.py --design. --no_by_formulas also asks the compiler, which takes minutes."""
    target_loss: float = 3.28
    """Validation loss to reach. The page says after how many tokens and seconds it was."""


class Evaluation(NamedTuple):
    """What a run had reached when it was evaluated."""

    step: int
    tokens: int  # that it had trained on
    trained: float  # seconds in steps, with those of waiting for data
    wall: float  # seconds since its first start, without those at rest
    loss: float


class Programs:
    """Runs main.py in processes of its own, which get the signals that this process gets."""

    def __init__(self):
        self.child = None

    def run(self, *words):
        """Run main.py with these words. Returns its exit status."""
        # A process group of its own: Ctrl-C would reach it twice, from the terminal and from here.
        self.child = subprocess.Popen([sys.executable, ROOT / "main.py", *words], process_group=0)
        status = self.child.wait()
        self.child = None
        return status if status >= 0 else 128 - status

    def pass_on(self, number):
        """Send the signal to main.py, which saves a checkpoint. Where it does not run, this process ends."""
        if self.child:
            self.child.send_signal(number)
        else:
            interrupts.end(128 + number, "interrupted; rerun the same command to resume")


def main(argv, programs):
    """Fetch, design, train, and write the page. Returns the exit status. Raises UserError."""
    own, words = read_words(Options, argv, "tools/track.py", others=utils.Config, hints=HINTS)
    options = Options(**own)
    flags = command_line.parse(words)
    machine = options.design or this_machine()
    added = FLAGS
    if machine == "cpu":
        added = FLAGS | ON_A_CPU
        warn(
            f"no accelerator is here: the track runs to its end, with a small model and a small part of the validation "
            f"tokens, and does not come near {Options.target_loss}"
        )
    if "data" not in flags.given:
        fetch(1)
        added = added | dict(data=FOLDER)
    if {"preset", "architecture", "model_dimension", "config"} & flags.given:
        added = {name: value for name, value in added.items() if name != "preset"}
    words = [*words_of(flags, **added), *words]
    if "config" not in flags.given:
        name = flags.cfg.run.name if "name" in flags.given else name_of(options, machine)
        words = [*words_of(flags, name=name), *words]
        designed = os.path.join(flags.cfg.run.output_dir, name, "designed.json")
        if status := design(options, machine, designed, words, programs):
            return status
        words = ["--config", designed, *words]
    cfg = command_line.parse(words).cfg
    tokens = cfg.run.training_steps * cfg.data.global_batch_size * cfg.model.T
    if "data" not in flags.given:
        fetch(min(TRAIN_FILES, math.ceil(tokens / FILE_TOKENS)))
    if status := programs.run(*words, *words_of(flags, **evaluations_for(cfg, tokens))):
        return status
    command = shlex.join(["bash", "run.sh", "track", *map(masked, argv)])
    return write_page(cfg.run.folder, command, options.target_loss)


def words_of(flags, **added):
    """The words of these flags, but for those that the user's `Flags` gave."""
    left = {name: value for name, value in added.items() if name not in flags.given}
    return [word for name, value in left.items() for word in (f"--{name}", str(value))]


def this_machine():
    """The name of this machine for --design. Raises UserError where jax's devices are unknown."""
    if platforms.platform() == "cpu":
        return "cpu"
    from planning import machines  # here: it imports jax

    # in another process, since jax would keep the memory of the devices from main.py
    asked = "import jax; print(jax.device_count(), jax.devices()[0].device_kind, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", asked], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError("jax cannot use the devices of this machine (see above).")
    n, kind = done.stdout.splitlines()[-2:]
    name = machines.name_of_devices(kind, int(n))
    if not name:
        raise UserError(
            f"{n} x {kind} are unknown; name a machine like them, such as 1xA100", flag="design"
        )
    return name


def name_of(options, machine):
    """The name of the run, such as track-gpu-1xH200-0.25h."""
    from planning import design

    asked = utils.Design(design=machine, hours=options.hours, tokens=options.tokens)
    return f"track-{design.name_of(asked)}"


def fetch(n):
    """Have the validation file and the first n files to train on in FOLDER, as they are published. Raises UserError."""
    names = [VAL_FILE, *(TRAIN_FILE.format(i) for i in range(1, n + 1))]
    missing = [name for name in names if not os.path.isfile(os.path.join(FOLDER, name))]
    if not missing:
        return
    import huggingface_hub  # here: it takes a second
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # it would print a line for each try
    if not sys.stderr.isatty():
        disable_progress_bars()
    say(f"fetching {len(missing)} files of 200 MB from {HUB} of the Hugging Face hub into {FOLDER}")
    for name in missing:
        try:
            huggingface_hub.hf_hub_download(HUB, name, repo_type="dataset", local_dir=FOLDER)
        except Exception as e:  # errors of the network and of the disk have no common class
            raise UserError(
                f"{name} of {HUB} cannot be fetched from the Hugging Face hub ({first_line(e)}); rerun this command to "
                f"continue, or give a folder that has it",
                flag="data",
                value=FOLDER,
            ) from None


def design(options, machine, path, words, programs):
    """Have main.py write a design into the file `path`, unless a run that resumes has it there. Returns its status."""
    if read_json(path):
        say(f"{path} is there and is used; another --name makes another design")
        return 0
    budget = ["--hours", str(options.hours)]
    if options.tokens:
        budget += ["--tokens", str(options.tokens)]
    if options.by_formulas:
        budget += ["--by_formulas"]
    return programs.run("--design", machine, *budget, "--design_json", path, *words)


def evaluations_for(cfg, tokens):
    """{flag: value} of evaluations over all of --val_tokens, as often as a run on that many tokens affords."""
    batch = cfg.data.global_batch_size
    steps = cfg.run.training_steps
    eval_steps = max(1, (cfg.data.val_tokens or BOARD_TOKENS) // cfg.model.T // batch)
    affordable = EVALUATED_SHARE * tokens / (eval_steps * batch * cfg.model.T)
    eval_every = math.ceil(steps / max(1, min(EVALUATIONS, int(affordable))))
    return dict(eval_steps=eval_steps, eval_every=eval_every, save_steps=math.ceil(steps / 8))


# --- The page ---------------------------------------------------------------------------------------------------


def write_page(folder, command, target):
    """Write the page of a finished run into its folder, and print its first sentence. Returns the exit status."""
    flags = read_json(folder, "config.json")
    rows = read_rows(folder)
    found = evaluations_in(rows, flags)
    result = result_in_words(found, target)
    path = os.path.join(folder, PAGE)
    facts = facts_of(flags, rows[-1], found[-1], command)
    lines = [
        f"# fineweb10B to a loss of {target:g}",
        "",
        f"{result}.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {words} |" for name, words in facts.items()),
        "",
        *definitions(flags),
        "",
        table(found),
        "",
        "All flags, which `python main.py --config FILE` takes:",
        "",
        "```json",
        json.dumps(flags),
        "```",
        "",
    ]
    write_file(path, "\n".join(lines))
    say(f"track: {result}; the page to attach is {path}")
    return 0


def evaluations_in(rows, flags):
    """The `Evaluation`s in rows of metrics.jsonl. flags: config.json of their run."""
    per_step = global_batches(flags)[0] * flags["T"]
    found = []
    for row in rows:
        if HELD_OUT in row:
            spent = spent_in(row)
            trained = spent["steps"] + spent["waiting"]
            wall = sum(spent.values()) - spent["resting"]
            found.append(
                Evaluation(row["step"], row["step"] * per_step, trained, wall, row[HELD_OUT])
            )
    return found


def result_in_words(found, target):
    """Whether and when the target was reached: at the first evaluation at or below it, nothing between is guessed."""
    reached = next((one for one in found if one.loss <= target), None)
    one = reached or min(found, key=lambda one: (math.isnan(one.loss), one.loss))
    when = f"at step {one.step:,}, after {one.tokens:,} tokens and {one.trained:,.1f} s of training"
    when += f" ({one.wall:,.1f} s in all)"
    if reached:
        return f"{target:g} was reached: {one.loss:.4f} {when}"
    return f"{target:g} was not reached: the best loss is {one.loss:.4f} {when}"


def facts_of(flags, row, last, command):
    """{name: words} of a run. flags: its config.json. row: its last row. last: its last `Evaluation`."""
    import model  # here: these import jax
    from planning import design_page

    cfg = stored_config(flags)
    total, _ = global_batches(flags)
    speed = last.tokens / last.trained
    plan = read_json(cfg.run.folder, "plan.json")  # where the peak of the chip is known
    mfu = f"{plan['mfu'] * speed / plan['tokens_per_second']:.1%}" if plan else "not known"
    parts = [f"{PARTS[part]} {s:,.1f} s" for part, s in spent_in(row).items() if s]
    program = f"moe-pretraining, commit {flags['commit'] or 'unknown'}; jax {version('jax')}"
    parameters = design_page.model_in_words(cfg, model.active_params(cfg))
    epochs = ""
    if "data/epoch" in row:  # not with --mix
        n = len(list_split(os.path.join(flags["data"], "train")))
        epochs = f"; {row['data/epoch']:.3f} epochs of {n} files, in an order shuffled by --seed"
    return {
        "machine": f"{flags['n_devices']} x {flags['device_kind']}, mesh (dp, pp, tp) = {cfg.run.n_device_axis}",
        "program": f"{program}, Python {platform.python_version()}",
        "command": f"`{command}`",
        "model": f"{flags['architecture']}, {parameters}",
        "trained on": f"{last.tokens:,} tokens in {last.step:,} steps of {total} x {flags['T']:,}{epochs}",
        "speed": f"{speed:,.0f} tokens a second of training, MFU {mfu}",
        "time": ", ".join(parts),
        "restarts": f"{row.get('resumed', 0)}",
    }


def definitions(flags):
    """Lines that say what the loss and the seconds are. flags: config.json of a run."""
    T = flags["T"]
    _, batch = global_batches(flags)
    there = Mixture(stored_config(flags), "val").n_sequences
    n = min(flags["eval_steps"], there // batch) * batch
    which = f"the first {n * T:,} tokens"
    if n < there:
        which = f"{n * T:,} of the first {there * T:,} tokens"
    theirs = "those of modded-nanogpt's board"
    if n * T != BOARD_TOKENS or n < there:
        theirs = f"where modded-nanogpt's board takes the first {BOARD_TOKENS:,}, so this is another loss"
    return [
        f"**Loss**: the mean cross-entropy of the next token, in nats, over {which} of the validation shards in "
        f"`{flags['data']}`, {theirs}. They are read as {n:,} sequences of {T:,} tokens, without context from before "
        "a sequence. The balancing loss of experts is not in it, and no weights are averaged.",
        "",
        "**Seconds of training** are those in steps, with waiting for data. Seconds in all also count the start, "
        "compiling, evaluations, samples and checkpoints, but not fetching the shards and designing the run. "
        "Nothing is interpolated: the target is reached at the first evaluation at or below it.",
    ]


def table(found):
    """The `Evaluation`s as a Markdown table."""
    rows = []
    for one in found:
        rows.append(
            {
                "step": f"{one.step:,}",
                "tokens": f"{one.tokens:,}",
                "seconds of training": f"{one.trained:,.1f}",
                "seconds in all": f"{one.wall:,.1f}",
                "loss": f"{one.loss:.4f}",
            }
        )
    return markdown(rows)


if __name__ == "__main__":
    programs = Programs()
    interrupts.watch(programs.pass_on)
    sys.exit(one_sentence(lambda: main(sys.argv[1:], programs)))
