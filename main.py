"""The command that trains: python main.py --preset tiny --data data/shards/stdlib

(`bash run.sh local` makes those shards and runs it.) Here the flags are read and jax's environment is set; train.py
then builds the mesh and trains. jax reads its environment once, so nothing that imports jax is imported before it is
set: that is why `cli` imports as it goes.
"""

import sys

from runtime import interrupts


def cli():
    """Read the command line and train, or plan with --plan. The process ends here, with its exit status."""
    # from here on Ctrl-C is answered in a sentence, during imports too
    interrupts.install(interrupts.NOTHING_LOST)
    from config import command_line
    from config.checks import check_processes
    from runtime import launchers, platforms
    from runtime.messages import one_sentence, share_log
    from runtime.pulse import Pulse

    share_log(launchers.number_of(None))
    flags = one_sentence(lambda: command_line.parse(sys.argv[1:]))
    share_log(launchers.number_of(flags.cfg.run))
    for program, machine in (("plan", flags.cfg.plan.plan), ("design", flags.cfg.design.design)):
        if machine:
            platforms.use_no_device()
            interrupts.run(lambda: getattr(workbench(), program)(flags))  # does not return
    n_processes = one_sentence(lambda: check_processes(flags))
    platforms.set_xla_flags(flags.cfg.run.n_devices, n_processes)
    pulse = Pulse("starting")
    import train

    sys.exit(one_sentence(lambda: train.run(flags, workbench(), pulse)))


def workbench():
    """What a run takes from the workbench. No other part of the core imports it, which a test checks; a program without
    a function in here lacks what that function brings, and is otherwise the same."""
    from training.workbench import Workbench

    def plan(flags):
        from planning import command

        return command.main(flags)

    def design(flags):
        from planning import design_page

        return design_page.main(flags)

    def weights():
        from inference import weights

        return weights

    def plans_of_runs():
        from planning import plans_of_runs

        return plans_of_runs

    def make_sampler(*arguments):
        from inference import sampling

        return sampling.make_sampler(*arguments)

    def make_task_scorer(*arguments):
        from inference import tasks  # imports lm_eval, which takes seconds and may be missing

        return tasks.make_task_scorer(*arguments)

    def format_to_export(architecture):
        from hf import registry

        return registry.format_to_export(architecture)

    parts = plan, design, weights, plans_of_runs, make_sampler, make_task_scorer, format_to_export
    return Workbench(*parts)


if __name__ == "__main__":
    cli()
