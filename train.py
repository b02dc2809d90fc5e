"""The training program: data, mesh, model, optimizer, checkpoints, compiled steps, then the loop.

Comes before: `main.py`, which calls `run` once the flags are read and jax's environment is set. `start` settles the
configuration by what the flags name, `train` builds what the loop works with, and `loop` is the loop. Comes next: what
happens in one step, in `dataset.py`, `training/train_step.py`, `model.py` and `training/optimizer.py`.

The host runs one step ahead: it launches step n + 1 before it reads the metrics of step n, so that the devices never
wait for it. What follows from the metrics of a step, such as a rollback, therefore comes a step late.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax

import model
import utils
from config import checks, command_line, resume, settle
from config.flags import Found
from config.presets import preset
from dataset import Prefetch, put_batch
from logs.ending import best_in_words, report_end
from logs.meter import Goodput, Pace
from logs.overfitting import Overfitting
from logs.phases import Phases
from logs.profiling import Profile
from logs.runlog import Progress
from runtime import files, interrupts, processes
from runtime.files import check_run_path, is_remote
from runtime.jax_setup import configure_jax, set_precision
from runtime.messages import UserError, say
from runtime.pulse import Pulse
from shards.listing import encoding_of, manifests, opening_of
from training import loss_scale, memory
from training.bad_steps import BadSteps
from training.device_mesh import make_mesh
from training.optimizer import make_optimizer
from training.run_checkpoints import RunCheckpoints
from training.setup import (
    Data,
    Programs,
    make_programs,
    open_data,
    open_log,
    print_setup,
    write_config,
    write_plan,
)
from training.sizes import batch_shape, tokens_per_step
from training.train_step import as_row


def run(flags, workbench, pulse=None):
    """`start`, together with the other processes of the run; returns its exit status."""
    interrupts.watch(processes.end_by_signal)
    try:
        processes.join_processes(flags.cfg, lambda: command_line.shared_settings(flags.cfg))
        status = start(flags, workbench, interrupts.STARTED, pulse)
    except BaseException as e:
        if not jax.distributed.is_initialized():
            raise
        processes.end_at_once(e)
    processes.leave(status)
    return status


def start(flags, workbench, began=None, pulse=None):
    """Train as `Flags` say, resuming where the run left off. began: when the process did, by time.time();
    None: now. pulse: the `Pulse` that it began with; None: a new one. Returns 0 or 128 + the signal."""
    goodput = Goodput(began or time.time())
    with pulse or Pulse("starting") as pulse:
        pulse.doing = goodput.now
        if jax.process_index():  # one process speaks for all
            pulse.close()
        asked = flags.cfg  # not settled yet: read only fields that nothing below can change
        checks.check_names(asked)  # before anything is written there
        processes.on_all(lambda: check_run_path(asked.run.folder, "--output_dir"))
        configure_jax(asked)
        # early, since its package may be missing
        processes.on_main_process(lambda: asked.run.tensorboard and import_module("logs.events"))
        with processes.alone_in_folder(asked.run) as lock:
            cfg, opened = open_and_settle(flags, workbench, lock)
            set_precision(cfg)
            return train(cfg, opened, workbench, goodput, pulse)


class Opened(NamedTuple):
    """What the flags name, opened."""

    stored: dict  # config.json of the run that is resumed; {} of a new one
    encoding: Any  # tokenizer of the shards, or None
    load_weights: Callable | None  # of `weights.open_weights`, for --init_from
    ends: list  # ids that end a text beside the tokenizer's own, of the run or of those weights
    lock: Any  # the `Lock` of the run directory on process 0, else None


def open_and_settle(flags, workbench, lock):
    """(the final configuration, `Opened`)."""
    asked, weights = flags.cfg, workbench.weights()
    source = asked.run.init_from
    of_weights, load_weights = {}, None
    if source:
        of_weights, load_weights = weights.open_weights(source)
    stored = resume.stored_config(asked.run.folder)
    shards = manifests(asked, "train", "val")
    if load_weights and not stored:
        weights.check_tokenizer(f"--init_from {source}", source, shards, asked.data.tokenizer)
    encoding = encoding_of(shards, asked.data.tokenizer)
    flags = suit_prompt(flags, shards, encoding)
    found = Found(
        jax.device_count(),
        device_kind=jax.devices()[0].device_kind,
        memory_share=workbench.plans_of_runs().memory_share(),
        active_params=model.active_params,
        weights=of_weights,
        stored=stored,
        is_data_open=True,
        shards=shards,
        encoding=encoding,
    )
    cfg = settle.settle(flags, found)
    if of_weights:
        most = weights.max_positions(source, of_weights["T"])
        if cfg.model.T > most:
            them = f"the weights in --init_from {source}"
            say(f"warning: --T {cfg.model.T}: {them} were made for {most} tokens")
    whose = cfg.run.folder if stored else source
    ends = weights.end_tokens(whose) if whose else []
    return cfg, Opened(stored, encoding, load_weights, ends, lock)


def suit_prompt(flags, shards, encoding):
    """`flags` with the first words of the validation text as --prompt, where neither flags nor the preset, for its own
    data, have one."""
    cfg = flags.cfg
    if "prompt" in flags.given or cfg.data.data == preset(cfg.run.preset).data.data:
        return flags
    return flags.with_defaults(prompt=opening_of(cfg, shards, encoding) or cfg.sample.prompt)


class Run(NamedTuple):
    """What the loop works with. Where the run is at a moment is `Now`."""

    cfg: utils.Config
    data: Data
    mesh: jax.sharding.Mesh
    programs: Programs
    checkpoints: RunCheckpoints
    log: Any  # RunLog on process 0, NoLog on the others
    progress: Progress
    overfitting: Overfitting
    bad_steps: BadSteps
    goodput: Goodput
    pace: Pace
    phases: Phases
    interrupt: processes.Interrupt
    pulse: Pulse


@dataclasses.dataclass
class Now:
    """Where a run is."""

    state: Any  # TrainState after `step` steps, which the devices may still be computing
    step: int
    sequences: int  # of the training data that are behind: those of the steps, and those that rollbacks left out
    faults: dict | None = None  # of the `BadSteps` when the state was saved
    batches: Any = None  # `Prefetch` of the batches of the next steps
    # (step, sequences, metrics, data wait) until `finish_step` reads it
    launched: tuple | None = None
    row: dict | None = None  # its metrics, read and not logged yet
    val_loss: float | None = None  # held-out loss after this step; None: not evaluated
    logged: dict | None = None  # the row that was logged last
    texts: Sequence = ()  # the samples that were drawn last

    def wait(self):
        """Wait until the devices have done all that they were given."""
        if self.launched:
            jax.block_until_ready(self.launched[2])


def train(cfg, opened, workbench, goodput, pulse):
    """Train with a settled configuration, in a run directory that is this run's alone. Returns the exit status."""
    began = time.time()
    plans = workbench.plans_of_runs()
    explained = functools.partial(memory.explained, cfg, plans.out_of_memory)

    # --- Data
    data = open_data(cfg, opened)

    # --- Mesh, model, optimizer
    mesh = make_mesh(cfg)
    print_setup(cfg, data)
    optimizer = make_optimizer(cfg, mesh)

    # --- Restore
    begins_with = data.fingerprint, opened.load_weights, data.train.borders
    checkpoints = RunCheckpoints(cfg, mesh, optimizer, *begins_with, opened.lock)
    with goodput.during("restoring" if checkpoints.steps() else "starting"), explained():
        now = restore(cfg, data, checkpoints)
    if now.step >= cfg.run.training_steps:
        say(f"nothing to do: {cfg.run.name} is at its last step; give more steps, or another name")
        checkpoints.close()
        return 0
    processes.on_main_process(lambda: resume.tell_schedule(cfg, opened.stored))

    # --- Batches: before minutes of compiling, so that what is wrong with them is said first
    with goodput.during("waiting"):
        now.batches = read_batches(cfg, data, mesh, now)

    # --- Programs
    with explained():
        programs = make_programs(cfg, mesh, optimizer, data, opened, workbench, goodput)

    # --- Log
    log, overfitting = open_log(cfg, now.step, goodput, checkpoints)
    processes.on_main_process(lambda: write_config(log, data, opened.ends))
    planned = write_plan(cfg, log, plans)

    # --- Loop
    run = Run(
        *(cfg, data, mesh, programs, checkpoints, log),
        progress=Progress(cfg, data.val.bytes_per_token, planned),
        overfitting=overfitting,
        bad_steps=BadSteps(cfg.run.max_bad_steps, now.faults),
        goodput=goodput,
        pace=Pace(tokens_per_step(cfg)),
        phases=Phases(cfg, goodput, Profile(cfg, now.step, programs.train_step, now.wait)),
        interrupt=processes.Interrupt(lambda: checkpoints.not_saved(now.step)),
        pulse=pulse,
    )
    with explained():
        signalled = run_loop(run, now)
    return report_end(run, now, signalled, began, workbench.format_to_export)


def restore(cfg, data, checkpoints):
    """The `Now` of the newest checkpoint, or of step 0."""
    state, meta = checkpoints.restore_or_init()
    now = Now(state, meta["step"], meta["sequences"], meta.get("faults"))
    data.train.check_borders(meta.get("mix_borders", []), now.sequences)
    if now.step:
        say(f"resuming {cfg.run.name} at step {now.step}, after {now.sequences:,} sequences")
    return now


def run_loop(run, now):
    """`loop`, and what belongs around it: signals, and an end that saves what was reached. Returns the signal that
    ended it, or 0. Raises UserError on all processes."""
    last = run.cfg.run.training_steps
    run.pulse.count(lambda: in_words(run, now), last, now.step)
    files.WAITING.pause = 60  # seconds: the run itself does not wait for what that tells of
    with run.interrupt:
        try:
            signalled = loop(run, now)
            finish_saving(run, now)
            return signalled
        except UserError:
            # All processes raise it at the same step, mostly because storage failed.
            save_what_was_reached(run, now)
            raise
        finally:
            close(run, now)


def loop(run, now):
    """Train to the last step, or until a signal, which is returned; else 0."""
    cfg = run.cfg
    run.goodput.enter("steps")
    run.pace.resume(now.batches.waited)
    while now.step < cfg.run.training_steps:
        if run.bad_steps.due:
            roll_back(run, now)
        with run.phases("training", now.step + 1):
            launch_step(run, now)
            # Several processes must know of the step after next: they agree on an answer a step late.
            error = now.batches.error(min(2, jax.process_count()))
            # 0, the signal to stop for, or FAILED and more where a process has an error. A later signal belongs to
            # the next step.
            stop = run.interrupt.agreed(error)
            due = due_after(now.step, cfg.run, stop)
            if not any(due):  # and no stop either: it makes a checkpoint due
                continue

            now.row = finish_step(run, now)
            if due.evaluation:
                with run.phases("evaluation", now.step):
                    evaluate(run, now)
            log_row(run, now, now.row)
            if due.evaluation or stop:
                run.log.flush()

            last = now.step == cfg.run.training_steps
            # Between bad steps a regular checkpoint could displace the one that a rollback needs.
            between_bad_steps = run.bad_steps.in_progress and not last
            if due.checkpoint and (stop or not between_bad_steps):
                save(run, now, waits=stop or last)
            if due.samples and not between_bad_steps:
                with run.phases("sampling", now.step):
                    sample(run, now)
            run.pace.resume(now.batches.waited)
        if stop >= run.interrupt.FAILED:
            raise processes.failure(stop - run.interrupt.FAILED, error)
        if stop:
            return stop
    return 0


class Due(NamedTuple):
    """What follows a step."""

    evaluation: bool
    checkpoint: bool
    samples: bool


def due_after(step, run, stop):
    """The `Due` of a step. run: `utils.Run`; stop: the signal to stop for, or 0."""
    last = step == run.training_steps
    regular = step % run.save_steps == 0
    return Due(
        evaluation=step % run.eval_every == 0 or (last and not stop),
        checkpoint=bool(stop) or last or regular,
        samples=last or regular,  # also before a stop: the run that resumes draws none of this step
    )


def launch_step(run, now):
    """Give the devices the next step, and log the one before."""
    step = now.step + 1
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
        batch = next(now.batches)
        now.state, metrics = run.programs.train_step(now.state, *batch, run.programs.numbers)
    now.step = step
    now.sequences += math.prod(batch_shape(run.cfg)[:-1])
    now.val_loss = None
    if step == run.phases.profile.first and run.cfg.run.profile:
        memory.write_memory_profile(run.cfg, "memory")
    row = finish_step(run, now)
    now.launched = (step, now.sequences, metrics, now.batches.waited)
    if row:
        log_row(run, now, row)
    run.pulse.bar.update(step - run.pulse.bar.n)


def finish_step(run, now):
    """Wait until the devices have done the step that was launched last. Its row of metrics.jsonl; None where that was
    made before."""
    if now.launched is None:
        return None
    step, sequences, metrics, data_wait = now.launched
    now.launched = None
    row = {"step": step} | as_row(jax.device_get(metrics)) | run.data.train.epochs(sequences)
    run.phases.profile.step_done(step)
    if not loss_scale.overflowed(row):
        run.bad_steps.observe(step, sequences, row["loss/train_loss"], row["grad_norm"])
    row["bad_steps"] = run.bad_steps.total
    row |= run.pace.ended(data_wait)
    _, waited = run.pace.steps[-1]
    run.goodput.waited(waited)
    return row


def evaluate(run, now):
    """Add the held-out loss, and scores of tasks where these are due, to the row of the step; print the line."""
    programs, params = run.programs, now.state.params
    now.row |= programs.evaluate(params)
    now.val_loss = now.row["loss/val_cross_entropy_loss"]
    run.progress.print(now.row, run.pace, run.checkpoints.on_disk)
    last = now.step == run.cfg.run.training_steps
    now.row |= programs.score_tasks(params, now.step, last, run.phases)


def sample(run, now):
    """Draw samples, and log them."""
    now.texts = run.programs.sample(now.state.params)
    if now.texts:
        run.log.text(now.step, now.texts)


def log_row(run, now, row):
    """Log the row of a step, and warn where the run begins to overfit."""
    run.log.metrics(row | run.goodput.row())
    now.row = None
    now.logged = row
    if run.overfitting.add(row) and jax.process_index() == 0:
        say(f"warning: {run.overfitting.now.words}{best_in_words(run.checkpoints)}")


PATIENCE = 120  # seconds for a checkpoint, after which training no longer waits for it where the next is due
PAUSE = 15  # seconds between two tries of the last checkpoint in a bucket
TRIES = 40  # of it, which makes ten minutes


def save(run, now, waits=True):
    """Begin to write a checkpoint. waits: also where the one before is not written yet for minutes, since the run ends
    here."""
    with run.phases("checkpoint", now.step):
        run.log.flush(now=True)
        patience = None if waits else PATIENCE
        reached = now.step, now.sequences, now.state, run.bad_steps
        run.checkpoints.save_running(*reached, now.val_loss, patience)


def finish_saving(run, now):
    """Wait until the last checkpoint is written. A bucket that does not answer is tried again for ten minutes."""
    for _ in range(TRIES):
        with run.phases("checkpoint", now.step):
            run.checkpoints.finish()
            if run.checkpoints.saved == now.step or not is_remote(run.cfg.run.folder):
                return
            say(f"checkpoint {now.step} is tried again in {PAUSE} s")
            time.sleep(PAUSE)
        save(run, now)


def save_what_was_reached(run, now):
    """Log and save the newest step, before an error ends the run."""
    row = now.row or finish_step(run, now)
    if row:
        log_row(run, now, row)
    if not run.bad_steps.due:
        save(run, now)
        finish_saving(run, now)


def close(run, now):
    """End what works beside the loop, and wait until it has written all."""
    run.goodput.enter("saving")
    run.phases.watchdog.over.set()
    run.phases.profile.close()
    run.pulse.doing = run.goodput.now
    run.checkpoints.close()
    if run.checkpoints.saved != now.step:
        lost = run.checkpoints.not_saved(now.step)
        interrupts.words = f"interrupted; {lost} are lost"
    run.log.close()
    now.batches.close()  # it may take a minute until a read without an answer is given up


def roll_back(run, now):
    """Return to the checkpoint before the bad steps; training continues with the data after them."""
    due = run.bad_steps.due
    run.bad_steps.check()
    with run.phases("rollback", now.step):
        run.goodput.restart(time.time(), "restoring")
        now.batches.close()
        now.launched = None
        now.state = None  # the devices have room for one
        now.state, meta = run.checkpoints.roll_back(due.before)
        now.step = meta["step"]
        now.sequences = due.sequences
        run.bad_steps.rolled_back(now.step)
        now.batches = read_batches(run.cfg, run.data, run.mesh, now)
        run.interrupt.asked = 0  # the batch that failed may be left out now
        run.goodput.add_spent(run.log.rows_so_far(), now.step)
        run.log.rewind(now.step)
        run.overfitting.rewind(now.step)
    run.pace.restart(now.batches.waited)


def in_words(run, now):
    """What the run does now, for its sign of life."""
    if run.goodput.part != "steps" or not now.logged:
        return run.goodput.now()
    row = now.logged
    done = f"step {row['step']}/{run.cfg.run.training_steps}"
    speed = f"{row['tokens_per_second']:,.0f} tokens/s"
    return f"{done}  train {row['loss/train_loss']:.4f}  {speed}"


def read_batches(cfg, data, mesh, now):
    """Batches of the next steps, read ahead. Raises UserError on all processes where the first cannot be read."""
    shape = batch_shape(cfg)
    per_step = math.prod(shape[:-1])  # sequences
    end = now.sequences + (cfg.run.training_steps - now.step) * per_step
    each_first = range(now.sequences, end, per_step)
    order = functools.partial(data.train.sequences, seed=cfg.run.seed)

    def batch_from(first):
        return put_batch(order, first, shape, mesh)

    batches = Prefetch(batch_from, each_first, busy=now.wait)
    processes.raise_together(batches.error(2))
    return batches
