"""The functions of the workbench that a run uses. The core does not import them: main.py passes them in."""

from collections.abc import Callable
from typing import NamedTuple


class Workbench(NamedTuple):
    """Functions that import what they need only when they are called; main.py: workbench makes this record."""

    plan: Callable  # (flags) -> exit status of a program with --plan
    design: Callable  # (flags) -> exit status of a program with --design
    weights: Callable  # () -> the module inference/weights.py, for --init_from
    # () -> the module planning/plans_of_runs.py, which estimates memory and speed
    plans_of_runs: Callable
    make_sampler: Callable  # (cfg, mesh, encoding, ends) -> sample(params) -> texts
    make_task_scorer: Callable  # the same -> score(params, step, last, phases) -> {name: number}, for --eval_tasks
    format_to_export: Callable  # (name of an architecture); raises UserError where it has none
