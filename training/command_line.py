"""The command line: flags to a `utils.Config`, and one sentence for what does not parse. No jax in here."""

import os
import re
import sys

import utils
from data.tokenization import load_tokenizer
from presets import PRESETS, preset
from runtime.files import object_in
from runtime.messages import UserError, nearest, one_sentence
from runtime.parser import Words, value_of
from training import branches
from training.settings import Flags, check_run, settle
from utils import RENAMED, Config, Plan, Run, check_bounds, replace


def parse(argv, load=load_tokenizer, elsewhere=False):
    """Command line -> `settings.Flags`: which were given, on it or in --config, and what they and the preset say.

    load: name -> the tokenizer, or None where it is not to be had. elsewhere: main.py will run on another machine, so
    the trunk in --branch_from is not looked at. Raises UserError for anything that does not parse;
    `--help` prints the preset's values and exits.
    """
    argv = [
        word for word in argv if word != "--use_cache"
    ]  # JAXformer's; here decoding always has a cache
    default = utils.flatten(preset(preset_name(argv))) | vars(Plan())
    words = Words(Config, argv, "main.py", default).given
    given = flags_of_file(words, elsewhere) | words
    cfg = replace(preset(given.get("preset", Run.preset)), **given)
    check_bounds(cfg)
    of_plan = [flag for flag, value in vars(cfg.plan).items() if value]
    if of_plan and not cfg.plan.plan:
        raise UserError(f"--{of_plan[0]}: needs --plan beside it, with a machine such as v4:2x4x4.")
    flags = follow_tokenizer(Flags(cfg, frozenset(given)), load)
    branches.check_flags(flags)
    return flags if elsewhere else branches.follow_trunk(flags)


def preset_name(argv):
    """The value of --preset, whose values --help shows as defaults."""
    for word, after in zip(argv, [*argv[1:], ""]):
        flag, _, value = word.partition("=")
        if flag == "--preset" and (value or after) in PRESETS:
            return value or after
    return Run.preset


# What the file of a run holds beside flags, and the flags that belong to one launch of it.
NO_FLAGS = {
    "data_fingerprint",
    "encoding",
    "end_of_text",
    "config",
    "coordinator",
    "num_processes",
    "process_id",
}


def flags_of_file(beside, elsewhere):
    """{flag: value} of the file in --config, {} without it, `beside` the {flag: value} of the command line.
    Raises UserError."""
    path = beside.get("config")
    if not path or elsewhere:
        return {}
    content = object_in(path)
    if content is None:
        raise UserError(
            f"--config {path}: there is no such file; give one such as runs/tiny/config.json."
        )
    followed = {"n_devices", "pp_interleave"} if "n_device_axis" in beside else set()
    followed |= set() if content.get("branch_from") else {"branch_step"}
    flags = {}
    for name, value in content.items():
        flag = RENAMED.get(name, name)
        if flag in NO_FLAGS | followed:
            continue
        f = utils.FIELDS.get(flag)
        if f is None:
            raise UserError(f"--config {path}: {name} is no flag{nearest(name, utils.FIELDS)}.")
        if isinstance(value, bool) != (f.type is bool) or isinstance(value, dict | type(None)):
            raise UserError(f"--config {path}: --{name} cannot be {value!r:.40}.")
        try:
            values = value if isinstance(value, list) else [value]
            flags[flag] = value_of(f, values if f.type is bool else [str(v) for v in values])
        except UserError as e:
            raise UserError(f"--config {path}: {e}") from None
    return flags


def follow_tokenizer(flags, load):
    """`flags` with the vocabulary of --tokenizer, if that was given alone. Raises UserError where a given one is too
    small."""
    cfg = flags.cfg
    encoding = load(cfg.data.tokenizer) if cfg.data.tokenizer else None
    if encoding is None:
        return flags
    if "vocab_size" not in flags.given:
        return flags.follow(vocab_size=encoding.n_vocab)
    if cfg.model.vocab_size < encoding.n_vocab:
        raise UserError(
            f"--vocab_size {cfg.model.vocab_size}: --tokenizer {cfg.data.tokenizer} has {encoding.n_vocab} "
            f"tokens; give at least that many, or leave the flag out."
        )
    return flags


def check_processes(flags):
    """Check the flags of multi-host training against each other; returns the number of processes if they tell it or
    Slurm does, else 1. Raises UserError."""
    r = flags.cfg.run
    if not r.coordinator:
        if r.num_processes > 1 or r.process_id:
            flag = "num_processes" if r.num_processes > 1 else "process_id"
            raise UserError(
                f"--{flag} {vars(r)[flag]}: needs --coordinator HOST:PORT, where process 0 listens."
            )
        processes = r.num_processes or int(os.environ.get("SLURM_NTASKS", 1))
    else:
        if not re.fullmatch(r"(\[[\da-fA-F:.]+\]|[^\s:]+):\d{1,5}", r.coordinator):
            raise UserError(
                f"--coordinator {r.coordinator}: must be HOST:PORT, such as host0:8476."
            )
        missing = [flag for flag in ("num_processes", "process_id") if flag not in flags.given]
        if missing:
            raise UserError(
                f"--coordinator {r.coordinator}: needs --{' and --'.join(missing)} beside it."
            )
        if r.process_id >= r.num_processes:
            raise UserError(
                f"--process_id {r.process_id}: must be below --num_processes {r.num_processes}."
            )
        processes = r.num_processes
    if r.n_devices % processes:
        raise UserError(
            f"--n_devices {r.n_devices}: must be a multiple of the number of processes, {processes}."
        )
    return processes


def check(argv, elsewhere):
    """All that can be known of main.py's command line without devices, data and weights: what `parse` returns. Raises
    UserError.

    elsewhere: main.py will run on another machine, whose tokenizers and place among its processes are not known here.
    """

    def load(name):
        # A file that comes with the program may not stand in this folder yet.
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        coming = os.path.join(root, name)
        absent = elsewhere or os.path.isfile(coming) and not os.path.isfile(name)
        return None if absent else load_tokenizer(name)

    flags = parse(argv, load, elsewhere)
    r = flags.cfg.run
    if flags.cfg.plan.plan:
        return flags
    if not elsewhere:
        check_processes(flags)
        check_run(flags)
    # the architecture is that of the weights, or of the trunk
    if r.init_from or r.branch_from:
        return flags
    dp, pp, tp = r.n_device_axis
    # where nothing tells how many devices there are: so many that every number of experts fits
    settle(flags, r.n_devices or (dp or flags.cfg.model.n_experts or 1) * pp * tp)
    return flags


if __name__ == "__main__":
    # command_line.py here FLAG... or elsewhere FLAG...: the launcher asks before it stops anything
    one_sentence(lambda: check(sys.argv[2:], sys.argv[1] == "elsewhere"))
    print("flags understood")
