"""What a machine can train: the rows of the table in docs/models.md, each a design by formulas.

python -m dev.machines

It prints them after some minutes. tests/test_chips.py computes a few of them again: after a change of the recipe or of
the formulas, replace the rows of the table.
"""

import model
from config import command_line
from planning import design, machines
from runtime.messages import short, size

# A day of a grant, a weekend of one's own GPU, a session of a free one; then a week of machines small to large.
MACHINES = [
    ("1xT4", 9),
    ("v6e-4", 10),
    ("v5e-8", 24),
    ("8xH100", 24),
    ("v4-32", 72),
    ("1xRTX4090", 100),
    ("1xT4", 168),
    ("v5e-1", 168),
    ("v3-8", 168),
    ("1xH100", 168),
    ("8xH200", 168),
]


def row(name, hours):
    """The row of a machine and its hours."""
    flags = command_line.parse(["--design", name, "--hours", str(hours), "--by_formulas"])
    machine = machines.parse_machine(name)
    flags = flags.with_defaults(plan=machine.name, compilation_cache="")
    setting = design.setting_of(flags, machine)
    budget = design.budget_of(flags.cfg.design, setting)
    found = design.designed(setting, budget, compiler=False)

    plan, m = found.plan, found.plan.cfg.model
    total, _, embedding = model.count_params(plan.cfg)
    cells = [
        f"`{name}`",
        str(hours),
        short(total + embedding),
        short(found.active),
        short(found.tokens),
        f"{m.model_dimension:,} x {m.first_layers + m.blocks * m.layers_per_block}",
        ", ".join(map(str, plan.cfg.run.n_device_axis)),
        f"{plan.memory.total / 2**30:.1f} of {size(plan.memory_limit)}",
        f"{plan.mfu:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def main():
    for name, hours in MACHINES:
        print(row(name, hours), flush=True)


if __name__ == "__main__":
    main()
