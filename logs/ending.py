"""The end of a run: whether all is saved, what it made, and the commands that come next."""

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


def report_end(run, now, signalled, began, format_to_export):
    """Print and record how the run ended; returns its exit status. run: `train.Run`; now: its `train.Now`. began: when
    it did, by time.time(). format_to_export: of `train.Workbench`."""
    cfg, step = run.cfg, now.step
    if run.checkpoints.saved != step:
        report_unsaved(cfg, step, run.checkpoints.on_disk)
        return Unavailable.status
    run.log.ended(run.goodput.row())
    # processes but the first know the time since this start alone
    shares = f" {run.goodput.words()};" if jax.process_index() == 0 else ""
    saved = f"everything is saved in {cfg.run.folder}"
    words = f"at step {step} after {duration(time.time() - began)};{shares} {saved}"
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
    """Print that the checkpoint of `step` could not be written; newest: step of the newest one, None: there is none."""
    then = f"resume from step {newest}" if newest else "begin again: there is none before it"
    first = "once the storage answers," if is_remote(cfg.run.folder) else "make room and"
    say_error(
        f"--output_dir {cfg.run.output_dir}: the last checkpoint, of step {step}, could not be written; {first} "
        f"rerun the same command to {then}."
    )


def best_in_words(checkpoints):
    """Which checkpoint has the smallest held-out loss, as what follows another sentence; "" where none has one."""
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
    with contextlib.suppress(UserError):  # an architecture without such a format
        format_to_export(cfg.model.architecture)
        exported = shlex.quote(f"exported/{cfg.run.name}")
        commands.append(f"{python} tools/hf.py export {folder} {exported}")
    # indented, as what belongs to the line before: that one tells how the run ended, to whoever asks for its status
    lines += ["", "  next:", *(f"    {command}" for command in commands)]
    put_line("\n".join(lines), sys.stdout)


def python_in_words():
    """The word that starts the Python of this process in a shell in this folder."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if here.startswith("..") else here)
