"""The command line: flags to a `utils.Config`, and one sentence for what does not parse. No jax in here."""

import argparse
import contextlib
import dataclasses
import io
import os
import re
import sys
import typing
from typing import Annotated

import tyro

from data.tokenization import load_tokenizer
from presets import PRESETS, preset
from training import branches
from training.settings import check_run, follow, validate
from utils import RENAMED, Config, UserError, check_bounds, complaint, one_sentence, replace


def parse(argv, load=load_tokenizer, elsewhere=False):
    """Command line -> (Config, set of the flags that were given).

    load: name -> the tokenizer, or None where it is not to be had. elsewhere: main.py will run on another machine, so
    the trunk in --branch_from is not looked at. Raises UserError for anything that does not parse;
    `--help` prints the preset's values and exits.
    """
    argv = [renamed(word) for word in argv]
    default = preset(preset_name(argv))
    cfg = read_flags(Annotated[Config, tyro.conf.OmitArgPrefixes], argv, "main.py", default=default)
    flags = [re.match(r"--(?:no[-_])?([A-Za-z][\w-]*)", word) for word in argv]
    given = {flag[1].replace("-", "_") for flag in flags if flag}
    cfg = follow_tokenizer(cfg, given, load)
    branches.check_flags(cfg, given)
    if not elsewhere:
        cfg, given = branches.follow_trunk(cfg, given)
    cfg = follow(cfg, given)
    of_plan = [flag for flag, value in vars(cfg.plan).items() if value]
    if of_plan and not cfg.plan.plan:
        raise UserError(f"--{of_plan[0]}: needs --plan beside it, with a machine such as v4:2x4x4.")
    return cfg, given


def preset_name(argv):
    """The value of --preset, whose values are the defaults of all other flags. Raises UserError where it is missing."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="moe1b")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return first.parse_known_args(argv)[0].preset
    except SystemExit:
        raise UserError(f"--preset: a name is missing; there are {', '.join(PRESETS)}.") from None


def follow_tokenizer(cfg, given, load):
    """`cfg` with the vocabulary of --tokenizer, if that was given alone. Raises UserError where a given one is too
    small."""
    encoding = load(cfg.data.tokenizer) if cfg.data.tokenizer else None
    if encoding is None:
        return cfg
    if "vocab_size" not in given:
        return replace(cfg, vocab_size=encoding.n_vocab)
    if cfg.model.vocab_size < encoding.n_vocab:
        raise UserError(
            f"--vocab_size {cfg.model.vocab_size}: --tokenizer {cfg.data.tokenizer} has {encoding.n_vocab} "
            f"tokens; give at least that many, or leave the flag out."
        )
    return cfg


def renamed(word):
    """A word of the command line, with the clear name of a flag in place of one from before."""
    flag, equals, value = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and name in RENAMED:
        return f"--{RENAMED[name]}{equals}{value}"
    return word


def read_flags(kind, argv, program, **settings):
    """Command line of `program` -> an instance of the dataclass `kind`. Raises UserError for anything that does not
    parse, and for numbers beyond their bounds; `--help` exits. settings: tyro's."""
    output = io.StringIO()
    try:
        # tyro draws a box for people; it is printed for --help and boiled down to one sentence otherwise
        with contextlib.redirect_stderr(output):
            options = tyro.cli(kind, args=argv, prog=program, use_underscores=True, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(complaint(boiled_down(output.getvalue()), argv, flags_of(kind))) from None
    check_bounds(options)
    return options


def flags_of(kind):
    """All flags of the dataclass `kind`, whose fields may be dataclasses in turn."""
    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    flags = ["--help"]
    for name, one in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(one):
            flags += flags_of(one)
        else:
            flags += [f"--{name}", f"--no_{name}"] if one is bool else [f"--{name}"]
    return flags


def boiled_down(box):
    """What tyro's error box says, on one line: without its frame, its title and its advice."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in box.splitlines()]
    lines = [line.strip("│─ ") for line in lines if line.strip() and line.strip()[0] not in "╭╰"]
    said = []
    for line in lines:
        if not line:  # a rule across the box: advice follows
            break
        said.append(line)
    return re.sub(r"\[/?bold\]", "", " ".join(said))


def check_processes(cfg, given):
    """Check the flags of multi-host training against each other; returns the number of processes if they tell it or
    Slurm does, else 1. Raises UserError."""
    r = cfg.run
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
        missing = [flag for flag in ("num_processes", "process_id") if flag not in given]
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

    cfg, given = parse(argv, load, elsewhere)
    if cfg.plan.plan:
        return cfg, given
    if not elsewhere:
        check_processes(cfg, given)
        check_run(cfg, given)
    # the architecture is that of the weights, or of the trunk
    if cfg.run.init_from or cfg.run.branch_from:
        return cfg, given
    dp, pp, tp = cfg.run.n_device_axis
    # where nothing tells how many devices there are: so many that every number of experts fits
    validate(cfg, cfg.run.n_devices or (dp or cfg.model.n_experts or 1) * pp * tp)
    return cfg, given


if __name__ == "__main__":
    # command_line.py here FLAG... or elsewhere FLAG...: the launcher asks before it stops anything
    one_sentence(lambda: check(sys.argv[2:], sys.argv[1] == "elsewhere"))
    print("flags understood")
