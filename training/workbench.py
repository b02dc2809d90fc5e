"""What a run takes from the workbench, which the core does not import: main.py passes it in."""

from collections.abc import Callable
from typing import NamedTuple


class Workbench(NamedTuple):
    """Functions that import what they need when they are called; main.py: workbench makes them."""

    plan: Callable  # (flags) -> exit status of a program with --plan
    weights: Callable  # () -> the module inference/weights.py, for --init_from
    plans_of_runs: (
        Callable  # () -> the module planning/plans_of_runs.py: which memory and speed to expect
    )
    make_sampler: Callable  # (cfg, mesh, encoding, ends) -> sample(params) -> texts
    make_task_scorer: Callable  # the same -> score(params, step, last, phases) -> {name: number}, for --eval_tasks
    format_to_export: Callable  # (name of an architecture); raises UserError where it has none
