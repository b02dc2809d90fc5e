"""How exact the formulas of planning/costs.py are: beside what a compiler says of configurations drawn at random.

python tools/planning/exactness.py --draw 10 --seed 1 --machines gpu:8xH200 gpu:2x8xH100     a row for each
python tools/planning/exactness.py --plan gpu:8xH200 --preset gpt2-124m --n_device_axis 2 2 2      the flags given
"""

if __name__ in ("__main__", "__mp_main__"):
    import program

    program.begin()

import random
import sys

import utils
from tools import common
from training import command_line, platforms, settings
from utils import UserError

# what is drawn of each flag, for a preset; what does not go together is drawn anew
SHAPES = dict(
    T=(512, 1024, 2048),
    train_batch_size=(4, 8, 16, 32),
    microbatches=(1, 2, 4, 8),
    fsdp=("full", "hoist", "none"),
    remat=("full", "dots", "none"),
    sequence_parallel=("ulysses", "megatron"),
)
DRAWN = {
    "moe1b": SHAPES
    | dict(
        model_dimension=(512, 768, 1024, 1280),
        blocks=(2, 4, 8),
        layers_per_block=(1, 2, 3),
        n_head=(8, 16),
        n_experts=(8, 16, 32),
        experts_per_token=(2, 4),
        optimizer=("adamw", "muon"),
    ),
    "gpt2-124m": SHAPES | dict(model_dimension=(768, 1024), blocks=(6, 12), n_head=(8, 16)),
}


def draw(machines, dice):
    """Flags of main.py as words, which are valid together, for a step that fits by the formulas."""
    from planning import plan
    from planning.machines import parse_machine

    preset = dice.choice(
        list(DRAWN)
    )  # before the loop: what rarely goes together is drawn as often
    while True:
        machine = parse_machine(dice.choice(machines))
        flags = {flag: dice.choice(values) for flag, values in DRAWN[preset].items()}
        pp, tp = dice.choice((1, 2, 4)), dice.choice((1, 2, 4))
        if machine.n % (pp * tp):
            continue
        mesh = machine.n // (pp * tp), pp, tp
        words = ["--preset", preset, "--n_device_axis", *map(str, mesh), "--plan", machine.name]
        for flag, value in flags.items():
            words += [f"--{flag}", str(value)]
        words += ["--val_batch_size", str(flags["microbatches"])]
        try:
            cfg, machine = configure(words)
        except UserError:
            continue
        if plan.answer(cfg, machine).fits:
            return words


def configure(words):
    """(validated Config, `machines.Machine`) for flags of main.py. Raises UserError."""
    from planning import machines

    cfg, _ = command_line.parse(words)
    machine = machines.parse_machine(cfg.plan.plan)
    return settings.validate(utils.replace(cfg, n_devices=0), machine.n), machine


def compare(words):
    """(Answer by formulas, Answer by the compiler, None where it crashes or refuses) for flags of main.py."""
    from planning import plan
    from training import steps

    cfg, machine = configure(words)
    steps.configure_jax(cfg)
    by_compiler, _ = plan.compiled_answer(cfg, machine)
    return plan.answer(cfg, machine), by_compiler if by_compiler.compiled else None


def by_axes(a):
    """{axes: bytes} that an Answer says are sent."""
    sent = {}
    for row in a.collectives:
        axes = "+".join(row["axes"])
        sent[axes] = sent.get(axes, 0) + row["bytes"]
    return sent


def deviation(ours, theirs):
    """-3%, say."""
    percent = 100 * (ours / theirs - 1)
    return "0" if abs(percent) < 0.5 else f"{percent:+.0f}%"


def row(words, ours, theirs):
    """A row of the table in docs/planning.md: formulas against the compiler."""
    preset_and_flags = " ".join(word.removeprefix("--") for word in words)
    if theirs is None:
        return f"| {preset_and_flags} | the compiler crashes or refuses |"
    sent, found = by_axes(ours), by_axes(theirs)
    few = 0.001 * sum(found.values())  # sums of a few numbers
    axes = [a for a in found if found[a] > few]
    memory, step = theirs.memory["total"], theirs.seconds["step"]
    cells = [
        preset_and_flags,
        f"{deviation(ours.memory['total'], memory)} of {memory / 2**30:.2f} GiB",
        ", ".join(f"{a} {deviation(sent.get(a, 0), found[a])}" for a in axes) or "nothing",
        deviation(ours.flops["program"], theirs.flops["program"]),
        f"{deviation(ours.seconds['step'], step)} of {step:.3f} s",
    ]
    return f"| {' | '.join(cells)} |"


def parse(argv):
    """Command line -> (own flags, words for main.py). Raises UserError."""
    parser = common.Parser(__doc__)
    parser.add_argument("--draw", type=int, default=0, help="configurations to draw (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--machines", nargs="+", default=["gpu:8xH200"], help="one of which each draw is for"
    )
    own, flags = parser.parse_known_args(argv)
    utils.check_least(vars(own), dict(draw=0))
    return own, flags


def main(argv):
    """Print a row for the flags given, or for each of those drawn."""
    own, flags = parse(argv)
    platforms.use_no_device()
    dice = random.Random(own.seed)
    print(
        "| flags | memory | bytes sent, by axis | operations | step |\n| --- | --- | --- | --- | --- |"
    )
    drawn = (draw(own.machines, dice) for _ in range(own.draw))
    for words in drawn if own.draw else [flags]:
        print(row(words, *compare([*words, *flags, "--compilation_cache", ""])), flush=True)


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
