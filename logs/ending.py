"""The end of a run: reports whether everything is saved, what it produced, and the commands that come next."""

import contextlib
import os
import shlex
import shutil
import sys
import textwrap
import time

import jax

from runtime.files import is_remote
from runtime.messages import Unavailable, UserError, duration, put_line, say, say_error

SAMPLES_SHOWN = 3


def report_end(run, now, signalled, started, format_to_export):
    """Print and record how the run ended, and return its exit status.

    run: a `train.Run`; now: its `train.Now`. signalled: the signal that stopped it, or 0. started: when it started, by
    time.time(). format_to_export: of a `Workbench`.
    """
    cfg = run.cfg
    step = now.step
    if run.checkpoints.saved != step:
        report_unsaved(cfg, step, run.checkpoints.on_disk)
        return Unavailable.status
    run.log.ended(run.goodput.row())
    # Only process 0 reads the log, and so knows the time before this start.
    shares = f" {run.goodput.words()};" if jax.process_index() == 0 else ""
    saved = f"everything is saved in {cfg.run.folder}"
    words = f"at step {step} after {duration(time.time() - started)};{shares} {saved}"
    if signalled:
        say(f"stopped {words}; rerun the same command to resume")
        return 128 + signalled
    overfit = run.overfitting.now
    if overfit:
        say(
            f"{overfit.words}; more text would help, or fewer steps. The best checkpoint is taken below."
        )
    say(f"done {words}")
    if jax.process_index() == 0:
        print_next_commands(cfg, now.texts, format_to_export)
    return 0


def report_unsaved(cfg, step, newest):
    """Print that the checkpoint of `step` could not be written. newest: the step of the newest one, None for none."""
    then = f"resume from step {newest}" if newest else "begin again: there is none before it"
    first = "once the storage answers," if is_remote(cfg.run.folder) else "make room and"
    say_error(
        f"--output_dir {cfg.run.output_dir}: the last checkpoint, of step {step}, could not be written; {first} "
        f"rerun the same command to {then}.",
        own=False,
    )


def best_in_words(checkpoints):
    """Words that name the checkpoint with the smallest held-out loss, to append to a sentence; "" where no checkpoint
    has one."""
    losses = {step: loss for step, loss in checkpoints.losses.items() if loss is not None}
    if not losses:
        return ""
    best = min(losses, key=losses.get)
    return f"; checkpoint {best} is the best so far, with {losses[best]:.4f}, and is kept"


def print_next_commands(cfg, texts, format_to_export):
    """Print samples of the finished run, and the commands that come next."""
    lines = []
    for text in list(dict.fromkeys(texts))[:SAMPLES_SHOWN]:
        lines += ["", textwrap.indent(text.strip(), "  | ", lambda line: True)]
    python = python_in_words()
    prompt = shlex.quote(cfg.sample.prompt)
    folder = shlex.quote(cfg.run.folder)
    runs = shlex.quote(cfg.run.output_dir)
    commands = [
        f"{python} tools/sample.py {folder} --prompt {prompt}",
        f"bash setup_tpu.sh page && {python} tools/page.py {runs}",
    ]
    with contextlib.suppress(UserError):  # raised where the architecture has no Hugging Face format
        format_to_export(cfg.model.architecture)
        exported = shlex.quote(f"exported/{cfg.run.name}")
        commands.append(f"{python} tools/hf.py export {folder} {exported}")
    # They are indented, as a continuation of the line before: programs that ask for a run's status read that one.
    lines += ["", "  next:", *(f"    {command}" for command in commands)]
    put_line("\n".join(lines), sys.stdout)


def python_in_words():
    """The command that starts this process's Python in a shell in this folder."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if here.startswith("..") else here)
