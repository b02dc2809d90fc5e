"""The command line of main.py: words, a file of flags and a preset to `Flags`. No jax in here.

config/parser.py reads the words; afterwards config/settle.py settles what nobody gave.
"""

import json
import math
import os
import re
import sys

import utils
from config import foreign
from config.batch import SPLIT
from config.checks import check_processes
from config.flags import Flags, Found, without
from config.parser import NEAR, read_words
from config.presets import PRESETS, preset
from config.resume import check_resumable, check_same
from config.settle import settle, validate
from config.stored import BESIDE_FLAGS, read_values
from runtime import chips, installation
from runtime.files import check_run_path, is_remote, read_json
from runtime.messages import (
    HIDDEN,
    NOT_GIVEN,
    UserError,
    common_errors,
    masked,
    nearest,
    one_sentence,
    short,
    show,
)
from shards.mixture import average_mix, corpus_root, parse_mix
from shards.tokenization import load_tokenizer
from utils import Config, Design, Plan, Run, replace

# What the file of a run or a design holds beside flags, and the flags that belong to one launch of it.
NO_FLAGS = BESIDE_FLAGS | {"config", "coordinator", "num_processes", "process_id"}
NO_FLAGS |= {"design", "end_of_text", "revision"}
# What a run has of the machine that it ran on: its mesh, how its batches were divided for that, and what it keeps for
# the backward pass, which a single GPU chooses by its memory. None of them changes more than rounding.
OF_A_MACHINE = {"n_device_axis", "n_devices", "pp_interleave", "val_batch_size", "remat"}
OF_A_MACHINE |= SPLIT - {"microbatch_size"}
# The --preset that prints them all.
LIST = "list"


def meant(word):
    """What a word that belongs to no flag should have been."""
    if re.search(r"\.(py|ya?ml|toml|json)$", word):
        return "; a file of flags is --config FILE.json, and a model with its settings is --preset NAME"
    return (
        ": each value comes after its flag, as in --preset tiny; switches such as --wandb take none"
    )


HINTS = foreign.hints(meant)


def parse(argv, load=load_tokenizer, elsewhere=False):
    """Command line -> `flags.Flags`: which were given, on it or in --config, and what they and the preset say.

    load: name -> the tokenizer, or None where it is not to be had. elsewhere: main.py will run on another machine, so
    the file in --config is not read. Raises UserError; `--help` prints the preset's values and exits, `--preset list`
    the presets.
    """

    def named(given):
        name = given.get("preset", Run.preset)
        if name == LIST and not elsewhere:
            show(preset_table())
            sys.exit()
        return preset(name)

    def defaults(given):
        return utils.flatten(named(given)) | vars(Plan()) | vars(Design())

    # JAXformer's; here decoding always has a cache
    argv = [word for word in argv if word != "--use_cache"]
    with common_errors():
        given, _ = read_words(Config, argv, "main.py", defaults=defaults, hints=HINTS)
    sys.argv = [*map(masked, sys.argv)]  # which wandb sends with a run
    config = given.get("config", "")
    if is_json(config):
        given = flags_of_text(given.pop("config"), given) | given
    elif config and not elsewhere:
        given = flags_of_file(config, given) | given
    cfg = replace(named(given), **given)
    check_machine_flags(cfg, given)
    return with_vocabulary(Flags(cfg, frozenset(given)), load)


def check_machine_flags(cfg, given):
    """Raises UserError where a flag of --plan or --design is given without it."""
    beside_design = {"hours", "tokens", "target_loss", "design_json"} & given.keys()
    beside_plan = {"search", "plan_json"} & given.keys()
    if "by_formulas" in given and not cfg.design.design:
        beside_plan |= {"by_formulas"}
    for flags, flag, machine in (
        (beside_design, "--design", cfg.design.design),
        (beside_plan, "--plan", cfg.plan.plan),
    ):
        if flags and not machine:
            remedy = f"needs {flag} beside it, with a machine such as v4:2x4x4"
            if "tokens" in flags:
                remedy += "; the tokens of a run are --training_steps x --global_batch_size x --T"
            if "hours" in flags:
                remedy += "; the length of a run is --training_steps"
            raise UserError(f"--{min(flags)}: {remedy}.")
    if cfg.plan.plan and cfg.design.design:
        raise UserError(
            "plans what it designs; give one of the two", flag="design", value=cfg.design.design
        )


def preset_table():
    """All presets, a line for each: how large the model is, and how long it trains."""
    import model  # here: it imports jax

    lines = [("preset", "parameters", "active", "layers", "width", "T", "tokens of its training")]
    for name in PRESETS:
        cfg = validate(preset(name), 1)
        m = cfg.model
        total, active, embedding = model.count_params(cfg)
        layers = m.first_layers + m.blocks * m.layers_per_block
        tokens = cfg.data.global_batch_size * m.T * cfg.run.training_steps
        counts = short(total + embedding), short(active + embedding)
        lines.append((name, *counts, str(layers), str(m.model_dimension), str(m.T), short(tokens)))
    first, *others = [max(map(len, column)) for column in zip(*lines)]
    table = []
    for name, *cells in lines:
        table.append("  ".join([name.ljust(first), *map(str.rjust, cells, others)]))
    return "\n".join(table)


def is_json(config):
    """Whether a value of --config is the text of a file rather than its name. The launcher sends it so."""
    return config.lstrip().startswith("{")


def flags_of_text(text, beside):
    """`flags_of_file` of the text of a file."""
    try:
        content = json.loads(text)
    except ValueError as e:
        raise UserError(f"--config: its text is no JSON ({e}).") from None
    return flags_in(content, "the text", beside)


def flags_of_file(path, beside):
    """{flag: value} of the file in --config, `beside` those of the command line. Raises UserError."""
    try:
        content = read_json(path)
    except UserError as e:
        if e.value == path:  # not storage that fails
            e.flag, e.remedy = "config", "give a JSON file, such as runs/tiny/config.json"
        raise
    if not content:
        raise UserError(
            "no such file, or no flag in it; give one such as runs/tiny/config.json",
            flag="config",
            value=path,
        )
    return flags_in(content, path, beside)


def flags_in(content, path, beside):
    """{flag: value} of the `content` of a file in --config, `beside` those of the command line. Raises UserError."""
    flags = without(NO_FLAGS, content)
    if "data_fingerprint" in content:  # of a run, which another machine may repeat
        flags = without(OF_A_MACHINE, flags)
    if "n_device_axis" in beside:  # which these follow
        flags = without(["n_devices", "pp_interleave"], flags)
    if beside.keys() & {"n_device_axis", "global_batch_size"}:  # whose batch is divided anew
        flags = without(SPLIT - {"microbatch_size"}, flags)
    steps = beside.get("training_steps", math.inf)
    if flags.get("warmup_steps", 0) + flags.get("decay_steps", 0) >= steps:  # of a longer run
        flags = without(["warmup_steps", "decay_steps"], flags)
    if "train_batch_size" in beside:  # which makes a global batch of its own
        flags = without(["global_batch_size", "accumulation_steps", "microbatches"], flags)
    flags = {utils.ALIASES.get(name, name): value for name, value in flags.items()}
    for name in sorted(flags.keys() - utils.FIELDS.keys()):
        said = (
            foreign.said_of(name, utils.FIELDS) or f"is no flag{nearest(name, utils.FIELDS, NEAR)}"
        )
        raise UserError(f"{name} {said}", flag="config", value=path)
    values = read_values(flags, f"--config {path}")
    for name in values.keys() - beside.keys():
        if isinstance(values[name], str) and HIDDEN in values[name]:
            raise UserError(
                f"{name} is {values[name]}, without the password or token that it had; give --{name}",
                flag="config",
                value=path,
            )
    return values


def shared_settings(cfg):
    """{name: value} of what all processes of a run must have in common: the installation and the flags."""
    flags = without(utils.flags_with(per_process=True), utils.flatten(cfg))
    return installation.facts() | {f"--{flag}": value for flag, value in flags.items()}


def with_vocabulary(flags, load):
    """`flags` with the vocabulary of --tokenizer. Raises UserError where a given one is too small. That of weights may
    be: published tokenizers have tokens that no text becomes."""
    name = flags.cfg.data.tokenizer
    size = flags.cfg.model.vocab_size
    encoding = load(name) if name else None
    if encoding is None:
        return flags
    if "vocab_size" in flags.given and size < encoding.n_vocab and not flags.cfg.run.init_from:
        raise UserError(
            f"--tokenizer {name} has {encoding.n_vocab} tokens; give at least that many, or leave "
            f"the flag out",
            flag="vocab_size",
            value=size,
        )
    return flags.with_defaults(vocab_size=encoding.n_vocab)


def check(argv, elsewhere, devices=0, stored=None):
    """`parse`, and all checks that need no devices, data and weights. elsewhere: main.py will run on another machine,
    whose tokenizers and place among its processes are not known here. devices: how many it has; 0: not known. stored:
    config.json of the run that will be resumed there; {} where none is known."""

    def load(name):
        # a file of the program's own may be missing yet in the folder where it will run
        comes = not os.path.isfile(name) and (installation.ROOT / name).is_file()
        return None if elsewhere or comes else load_tokenizer(name)

    flags = parse(argv, load, elsewhere)
    r = flags.cfg.run
    if flags.cfg.plan.plan:
        return flags
    if not elsewhere or is_remote(r.folder):
        check_run_path(r.folder, "--output_dir")
    if not elsewhere:
        check_processes(flags)
        if not is_remote(r.folder):
            check_same(flags.cfg, read_json(r.folder, "config.json"), flags.given)
    elif stored:
        check_same(flags.cfg, stored, flags.given)
        check_resumable(flags.cfg, stored)
    if r.init_from:  # which has the architecture
        return flags
    dp, pp, tp = r.n_device_axis
    n_devices = devices or r.n_devices or (dp or some_dp(flags.cfg)) * pp * tp
    settle(flags, Found(n_devices, stored=stored or {}))
    return flags


def check_on_slice(argv, slice_type, stored=None):
    """`check` for a TPU slice such as v4-32 that will be created for the run and may vanish at any time."""
    chip, n = chips.parse_slice(slice_type)
    flags = check(argv, elsewhere=True, devices=n * chip.cores, stored=stored)
    run, *corpora = places_of(flags.cfg)
    for name, addresses in dict(output_dir=[run], data=corpora).items():
        if not all(map(is_remote, addresses)):
            raise UserError(
                "a slice that vanishes takes its disks with it; give an address in a bucket, such as gs://BUCKET/FOLDER",
                flag=name,
                value=utils.flatten(flags.cfg)[name] if name in flags.given else NOT_GIVEN,
            )
    return flags


def places_of(cfg):
    """Addresses of the run, and of each of its corpora."""
    corpora = average_mix(parse_mix(cfg.data.mix))
    return [cfg.run.folder, *(corpus_root(cfg, name).rstrip("/") for name in corpora)]


def some_dp(cfg):
    """A dp that the experts and the global batch allow, where nothing tells how many devices there are; 1 if none."""
    _, pp, tp = cfg.run.n_device_axis
    experts = max(1, cfg.model.n_experts)
    # a batch per replica fits any dp
    total = 0 if cfg.data.train_batch_size else cfg.data.global_batch_size
    for dp in range(1, experts + 1):
        n = dp * max(1, tp)
        if total % (dp * max(1, pp)) == 0 and (n % experts == 0 or experts % n == 0):
            return dp
    return 1


def main(where, *argv):
    """The launcher asks before it stops anything. where: "here", "elsewhere", or the type of a slice.

    Before the flags for a slice comes the text of the run's config.json, "" where there is none, and the addresses of
    the run and of its corpora are printed.
    """
    if where in ("here", "elsewhere"):
        check(argv, where == "elsewhere")
        print("flags understood")
    else:
        stored, *argv = argv
        cfg = check_on_slice(argv, where, json.loads(stored or "{}")).cfg
        print(*places_of(cfg), sep="\t")


if __name__ == "__main__":
    one_sentence(lambda: main(*sys.argv[1:]))
