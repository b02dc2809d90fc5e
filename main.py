"""Train: the mesh, the optimizer, the compiled steps and the loop. `main` reads from top to bottom.

python main.py --preset tiny --data data/shards/stdlib     (run.sh local does this and all before it)
"""

from runtime import interrupts

if __name__ in ("__main__", "__mp_main__"):
    interrupts.begin(interrupts.NOTHING_LOST)

import contextlib
import functools
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from importlib import import_module

import utils
from config import command_line
from runtime import files, platforms
from runtime.files import check_run_path, is_remote, write_file
from runtime.messages import (
    Unavailable,
    UserError,
    duration,
    one_sentence,
    put_line,
    say,
    say_error,
)
from runtime.outbox import attempt
from runtime.pulse import Pulse

if __name__ == "__main__":  # flags for XLA must be in the environment before jax is imported
    flags = one_sentence(lambda: command_line.parse(sys.argv[1:]))
    if flags.cfg.plan.plan:
        platforms.use_no_device()
        from planning import plan

        interrupts.run(lambda: plan.main(flags))
    n_processes = one_sentence(lambda: command_line.check_processes(flags))
    platforms.set_xla_flags(flags.cfg.run.n_devices, n_processes)
    pulse = Pulse("starting")

import jax

from config import settle
from config.presets import preset
from dataset import Prefetch, put_batch
from hf import registry
from inference import weights
from inference.sampling import make_sampler
from runtime import chips, processes
from runtime.jax_setup import configure_jax, set_precision
from shards.listing import encoding_of, manifests, opening_of
from shards.mixture import Mixture, data_fingerprint
from shards.tokenization import keep_tokenizer
from training import profiling
from training.bad_steps import BadSteps
from training.device_mesh import make_mesh
from training.evaluation import make_evaluate
from training.meter import Goodput, Meter
from training.optimizer import hyperparameters, make_optimizer
from training.overfitting import Overfitting
from training.run_checkpoints import RunCheckpoints
from training.runlog import NoLog, Progress, RunLog
from training.sizes import batch_shape, count_in_words, tokens_in_words
from training.train_state import abstract_state
from training.train_step import lower_train_step


def main(flags, began=None, pulse=None):
    """Train as `settle.Flags` say, resuming where the run left off. began: when the process did, by time.time();
    None: now. pulse: the `Pulse` that it began with; None: a new one. Returns 0 or 128 + the signal."""
    goodput = Goodput(began or time.time())
    with pulse or Pulse("starting") as pulse:
        pulse.doing = goodput.now
        if jax.process_index():  # one of many tells of all
            pulse.close()
        return begin(flags, goodput, pulse)


def begin(flags, goodput, pulse):
    """`main`: open what the flags name, settle them by it, and train."""
    asked = flags.cfg  # not settled: only what no run, no data and no device changes is read of it
    settle.check_names(asked)  # before anything is written there
    processes.on_all(lambda: check_run_path(asked.run.folder, "--output_dir"))
    configure_jax(asked)
    of_weights = load_weights = None
    if asked.run.init_from:
        of_weights, load_weights = weights.open_weights(asked.run.init_from)
    # its package may be missing
    processes.on_main_process(lambda: asked.run.tensorboard and import_module("training.events"))
    with processes.alone_in_folder(asked.run) as lock:
        stored = settle.stored_config(asked.run.folder)
        shards = manifests(asked, "train", "val")
        if load_weights and not stored:
            where = f"--init_from {asked.run.init_from}"
            weights.check_tokenizer(where, asked.run.init_from, shards, asked.data.tokenizer)
        encoding = encoding_of(shards, asked.data.tokenizer)
        flags = suit_prompt(flags, shards, encoding)
        kind = jax.devices()[0].device_kind
        n, share = jax.device_count(), memory_share(kind)
        cfg = settle.settle(flags, n, of_weights, stored, shards, encoding, kind, share)
        set_precision(cfg)
        if of_weights:
            most = weights.positions(cfg.run.init_from, of_weights["T"])
            if cfg.model.T > most:
                them = f"the weights in --init_from {cfg.run.init_from}"
                say(f"warning: --T {cfg.model.T}: {them} were made for {most} tokens")
        return train(cfg, stored, encoding, load_weights, goodput, pulse, lock)


def suit_prompt(flags, shards, encoding):
    """`flags` with the first words of the validation text as --prompt, where neither flags nor the preset, for its own
    data, have one."""
    cfg = flags.cfg
    if "prompt" in flags.given or cfg.data.data == preset(cfg.run.preset).data.data:
        return flags
    return flags.follow(prompt=opening_of(cfg, shards, encoding) or cfg.sample.prompt)


def train(cfg, stored, encoding, load_weights, goodput, pulse, lock):
    """`main`, settled, in a run directory that is this run's alone. stored: its config.json so far. load_weights: of
    `open_weights`, for --init_from. lock: the directory's `Lock` on process 0, else None."""
    began = time.time()

    # --- Data
    corpus, val_corpus, data = open_data(cfg, stored, encoding)

    # --- Mesh, model
    mesh = make_mesh(cfg)
    print_setup(cfg, corpus, val_corpus)

    # --- Optimizer
    optimizer = make_optimizer(cfg, mesh)

    # --- Restore
    checkpoints = RunCheckpoints(cfg, mesh, optimizer, data, load_weights, corpus.borders, lock)
    with goodput.during("restoring" if checkpoints.steps() else "starting"), memory_explained(cfg):
        state, meta = checkpoints.restore_or_begin()
    step = meta["step"]
    corpus.check_borders(meta.get("mix_borders", []), meta["sequences"])
    if step:
        say(f"resuming {cfg.run.name} at step {step}, after {meta['sequences']:,} sequences")
    if step >= cfg.run.training_steps:
        say(f"nothing to do: {cfg.run.name} is at its last step; give more steps, or another name")
        checkpoints.close()
        return 0
    processes.on_main_process(lambda: settle.tell_schedule(cfg, stored))

    # --- Steps: the batches come first, so that what is wrong with them is said before minutes of compiling
    with goodput.during("waiting"):
        training = Training(cfg, mesh, corpus, checkpoints, state, meta, goodput, pulse)
    training.evaluate = make_evaluate(cfg, mesh, val_corpus)
    whose = cfg.run.folder if stored else cfg.run.init_from
    ends = weights.ends(whose) if whose else []
    training.score_tasks = processes.on_all(lambda: open_tasks(cfg, mesh, encoding, ends))
    with goodput.during("compiling"), memory_explained(cfg):
        training.train_step = compile_train_step(cfg, mesh, optimizer)
    training.sample = make_sampler(cfg, mesh, encoding, ends)

    # --- Log
    training.log, training.overfitting = open_log(cfg, step, goodput, checkpoints)
    processes.on_main_process(lambda: write_config(training.log, data, corpus, ends))
    training.progress = Progress(cfg, val_corpus.bytes_per_token, write_plan(cfg, training.log))

    # --- Loop
    with memory_explained(cfg):
        signalled = training.run()
    return tell_end(training, signalled, began)


PATIENCE = 120  # seconds for a checkpoint, after which training no longer waits for it where the next is due
PAUSE = 15  # seconds between two tries of the last checkpoint in a bucket


class Training:
    """The loop of a run. The host runs one step ahead of the devices. `train` adds the step's programs and the logs.
    state: TrainState after `step` steps on `sequences` sequences, which `checkpoints` restored with its meta."""

    def __init__(self, cfg, mesh, corpus, checkpoints, state, meta, goodput, pulse):
        self.cfg = cfg
        self.mesh = mesh
        self.corpus = corpus
        self.checkpoints = checkpoints
        self.goodput = goodput
        self.pulse = pulse
        self.numbers = hyperparameters(cfg, mesh)
        self.state = state
        self.step = meta["step"]
        self.sequences = meta["sequences"]
        self.bad_steps = BadSteps(cfg.run.max_bad_steps, meta.get("faults"))
        self.profile = profiling.Profile(cfg, self.step)
        self.per_step = math.prod(batch_shape(cfg)[:-1])  # sequences
        tokens = self.per_step * corpus.T
        self.meter = Meter(tokens, corpus, self.bad_steps, self.profile, goodput)
        self.newest = None  # the row that was logged last
        self.texts = []  # the samples that were drawn last
        self.batches = self.read_batches()

    def now(self):
        """What the run does now, in words."""
        if self.goodput.part != "steps" or not self.newest:
            return self.goodput.now()
        loss, speed = self.newest["loss/train_loss"], self.newest["tokens_per_second"]
        done = f"step {self.newest['step']}/{self.cfg.run.training_steps}"
        return f"{done}  train {loss:.4f}  {speed:,.0f} tokens/s"

    def run(self):
        """Train to the end, or until a signal. Returns that, or 0. Raises UserError on all processes."""
        self.row = None  # metrics of the newest step, fetched and not logged yet
        self.watchdog = processes.Watchdog(self.cfg)
        last = self.cfg.run.training_steps
        self.pulse.count(self.now, last, self.step)
        self.meter.pace.resume(self.batches.waited)
        files.WAITING.pause = 60  # seconds: the run itself does not wait for what that tells of
        with processes.Interrupt(lambda: self.checkpoints.not_saved(self.step)) as self.interrupt:
            try:
                signalled = 0
                while self.step < last and not signalled:
                    if self.bad_steps.due:
                        self.roll_back()
                    self.train()
                    self.pulse.bar.update(self.step - self.pulse.bar.n)
                    signalled = self.look()
                self.finish_saving()
                return signalled
            except UserError:
                # All processes raise it at the same step, mostly because storage failed: keep what was reached.
                self.keep()
                raise
            finally:
                self.goodput.turn("saving")
                self.watchdog.over.set()
                self.profile.close()
                self.pulse.doing = self.goodput.now
                self.checkpoints.close()
                if self.checkpoints.saved != self.step:
                    lost = self.checkpoints.not_saved(self.step)
                    interrupts.words = f"interrupted; {lost} are lost"
                self.log.close()
                self.batches.close()  # it may take a minute until a read without an answer is given up

    def train(self):
        """Launch a step, and log the one before."""
        step = self.step + 1
        self.watchdog.begin("training", step)
        self.goodput.turn("steps")
        self.profile.begin(step, self.train_step, self.meter.wait)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            batch = next(self.batches)
            self.state, metrics = self.train_step(self.state, *batch, self.numbers)
        self.step = step
        self.sequences += self.per_step
        if self.cfg.run.profile and step == self.profile.first:
            write_memory_profile(self.cfg, "memory")
        before = self.meter.launched(step, self.sequences, metrics, self.batches.waited)
        if before:
            self.log_row(before)

    def look(self):
        """Evaluate, save and sample where that is due after a step. Returns the signal to stop for, or 0."""
        run = self.cfg.run
        step = self.step
        # Several processes must know of the step after next: they agree on an answer a step late.
        error = self.batches.error(min(2, jax.process_count()))
        signalled = self.interrupt.agreed(error)  # a later signal belongs to the next step
        last = step == run.training_steps
        evaluates = step % run.eval_every == 0 or (last and not signalled)
        samples = last or step % run.save_steps == 0
        if not (evaluates or signalled or samples):
            return 0
        self.row = self.meter.fetch()
        if evaluates:
            self.watchdog.begin("evaluation", step)
            self.goodput.turn("evaluating")
            self.row |= self.evaluate(self.state.params)
            self.progress.print(self.row, self.meter.pace, self.checkpoints.on_disk)
            self.row |= self.score_tasks(self.state.params, step, last, self.watchdog)
        val_loss = self.row.get("loss/val_cross_entropy_loss")
        self.log_row(self.row)
        if evaluates or signalled:
            self.log.flush()
        samples = last or (samples and not self.bad_steps.in_progress)
        if signalled or samples:
            self.save(val_loss, waits=signalled or last)
        if samples:  # also before a stop: the run that resumes draws none of this step
            self.watchdog.begin("sampling", step)
            self.goodput.turn("evaluating")
            self.texts = self.sample(self.state.params)
            if self.texts:
                self.log.text(step, self.texts)
        if signalled >= self.interrupt.FAILED:
            raise processes.failure(signalled - self.interrupt.FAILED, error)
        self.meter.pace.resume(self.batches.waited)
        return signalled

    def log_row(self, row):
        self.log.metrics(row | self.goodput.row())
        self.row = None
        self.newest = row
        if self.overfitting.begins(row) and jax.process_index() == 0:
            say(f"warning: {self.overfitting.now.words}{best_in_words(self.checkpoints)}")

    def save(self, val_loss=None, waits=True):
        """Begin to write a checkpoint. waits: also where the one before is not written yet for minutes, since the run
        ends here."""
        self.watchdog.begin("checkpoint", self.step)
        self.goodput.turn("saving")
        self.log.flush(now=True)
        patience = None if waits else PATIENCE
        state = self.state, self.bad_steps
        self.checkpoints.save_running(self.step, self.sequences, *state, val_loss, patience)
        self.save_again = functools.partial(self.save, val_loss)

    def finish_saving(self):
        """Wait until the last checkpoint is written. A bucket that does not answer is tried again for ten minutes."""
        for _ in range(40):
            self.checkpoints.finish()
            if self.checkpoints.saved == self.step or not is_remote(self.cfg.run.folder):
                return
            say(f"checkpoint {self.step} is tried again in {PAUSE} s")
            time.sleep(PAUSE)
            self.save_again()

    def keep(self):
        """Log and save what was reached before an error."""
        self.row = self.row or self.meter.fetch()
        if self.row:
            self.log_row(self.row)
        if not self.bad_steps.due:
            self.save()
            self.finish_saving()

    def roll_back(self):
        """Return to the checkpoint before the bad steps; training continues with the data after them."""
        due = self.bad_steps.due
        self.bad_steps.check()
        self.watchdog.begin("rollback", self.step)
        self.goodput.begin(time.time())
        self.goodput.turn("restoring")
        self.batches.close()
        self.meter.restart()
        self.state = None  # the devices have room for one
        self.state, meta = self.checkpoints.roll_back(due.before)
        self.step = meta["step"]
        self.sequences = due.sequences
        self.bad_steps.rolled_back(self.step)
        self.batches = self.read_batches()
        self.interrupt.asked = 0  # the batch that failed may be left out now
        self.goodput.keep(self.log.rows_so_far(), self.step)
        self.log.rewind(self.step)
        self.overfitting.rewind(self.step)
        self.meter.pace.resume(self.batches.waited)

    def read_batches(self):
        """Batches of the next steps, read ahead. Raises UserError on all processes where the first cannot be read."""
        shape = batch_shape(self.cfg)
        steps_left = self.cfg.run.training_steps - self.step
        end = self.sequences + steps_left * self.per_step
        each_first = range(self.sequences, end, self.per_step)
        order = functools.partial(self.corpus.sequences, seed=self.cfg.run.seed)

        def batch_from(first):
            return put_batch(order, first, shape, self.mesh)

        batches = Prefetch(batch_from, each_first, busy=self.meter.wait)
        processes.together(batches.error(2))
        return batches


def open_data(cfg, stored, encoding):
    """(training data, validation data, their fingerprint), checked against `stored` and the other processes."""
    per_step = math.prod(batch_shape(cfg)[:-1])  # sequences
    corpus = Mixture(cfg, "train", cfg.run.training_steps * per_step)
    val_corpus = Mixture(cfg, "val")
    for part in (corpus, val_corpus):
        part.check_encoding(encoding)
    data = data_fingerprint(corpus, val_corpus)
    alike = settle.without(utils.flags_with(per_process=True), utils.flatten(cfg))
    processes.check_agreement(alike, data, cfg.run)
    if stored and stored["data_fingerprint"] != data:
        raise UserError(
            f"--name {cfg.run.name}: this run exists and saw other data than is now in --data {cfg.data.data} (it was "
            f"{stored['data']}); give those shards, or another --name, {settle.from_its_weights(cfg)}."
        )
    return corpus, val_corpus, data


def print_setup(cfg, corpus, val_corpus):
    """Print the mesh, the model and the data."""
    kind = jax.devices()[0].device_kind
    say(f"mesh (dp, pp, tp) = {cfg.run.n_device_axis} on {cfg.run.n_devices} x {kind}")
    if jax.default_backend() != "cpu" and chips.chip_of(kind) is None:
        say(f"the peak of {kind} is not known, so no MFU is shown")
    say(f"parameters: {count_in_words(cfg)}")
    shares = corpus.shares / corpus.shares.sum(1, keepdims=True)
    for part, (first, *later) in zip(corpus.corpora, shares.T):
        words = f"data: {part.n_sequences:,} sequences of {part.T} tokens in {part.folder}"
        if len(corpus.corpora) > 1:
            words += f", {first:.3%} of each step's"
        for border, share in zip(corpus.borders, later):
            words += f", {share:.3%} after {border:,} sequences"
        say(words)
    for part in [*corpus.corpora, *val_corpus.corpora]:
        if part.unverified and jax.process_index() == 0:
            say(f"warning: {part.unverified}")
    say(tokens_in_words(cfg))


def open_tasks(cfg, mesh, encoding, ends):
    """`inference/tasks.py: make_task_scorer` of --eval_tasks; without that flag a function that returns {}."""
    if not cfg.run.eval_tasks:
        return lambda *_: {}
    from inference import tasks  # here: it imports lm_eval

    try:
        return tasks.make_task_scorer(cfg, mesh, encoding, ends)
    except UserError as e:  # which knows the flags of tools/evaluate.py
        raise UserError(re.sub("--(tasks|include_path)", "--eval_tasks", str(e))) from None


def compile_train_step(cfg, mesh, optimizer):
    """The compiled train step of training/train_step.py; how long that took is printed."""
    began = time.time()
    abstract = abstract_state(cfg, mesh, optimizer)
    lowered = lower_train_step(cfg, mesh, abstract)
    # A cached program carries the names of the code that compiled it, which --profile would show.
    by_names = "jax_compilation_cache_include_metadata_in_key"
    jax.config.update(by_names, bool(cfg.run.profile))
    train_step = lowered.compile(compiler_options=profiling.compiler_options(cfg))
    jax.config.update(by_names, False)
    say(f"compiled in {duration(time.time() - began)}")
    return train_step


def open_log(cfg, step, goodput, checkpoints):
    """(the log of the steps after `step`, its `Overfitting`). Its rows so far tell the `Goodput` what the run has
    spent, and the `Checkpoints` follow it."""
    log = RunLog(cfg) if jax.process_index() == 0 else NoLog()
    found, end = processes.on_all(lambda: log.begin(step))
    goodput.keep(found, step, end)
    checkpoints.wait_for_log = log.wait_for_rows
    return log, Overfitting([row for row in found if row["step"] <= step])


def write_config(log, data, corpus, ends):
    """Write config.json, which tools read and a resumed run is compared with, and keep the tokenizer beside it.
    ends: of `weights.ends`."""
    config = utils.flatten(log.cfg) | {"data_fingerprint": data, "commit": command_line.commit()}
    config["encoding"] = keep_tokenizer(log.folder, corpus.tokenizer)
    if ends:
        config["eos_token_id"] = ends
    log.write("config.json", config)


def write_plan(cfg, log):
    """The plan by formulas, which plan.json keeps for tools/page.py; None where the devices' peak is not known."""
    devices = jax.devices()[: cfg.run.n_devices]
    if chips.chip_of(devices[0].device_kind) is None:
        return None
    from planning import plan  # here: a run on CPUs needs none of it

    planned = plan.answer(cfg, plan.machine_of(devices))
    log.write("plan.json", plan.as_json(planned))
    return planned


def memory_share(kind):
    """Config -> the share of their memory that a step needs on the devices here, of a `kind` as jax calls it; None
    where that is not known."""
    chip = chips.chip_of(kind)
    if chip is None:
        return None
    from planning import plan  # here: a run on CPUs needs none of it

    # by the table, not what is free: all processes, and the run that resumes, must find the same
    return plan.memory_share_of(plan.machine_of(jax.devices(), chip.memory))


# As XLA says it, its allocators (BFC, TPU) and CUDA; RESOURCE_EXHAUSTED alone may be a full disk.
OUT_OF_MEMORY = re.compile("out.of.memory|RESOURCE_EXHAUSTED: .*(allocat|reserve|hbm)", re.I)


@contextlib.contextmanager
def memory_explained(cfg):
    """Raises UserError where the devices lack memory for what is done in here: which flags would make a step fit."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # the latter where a batch finds no room
        if not OUT_OF_MEMORY.search(str(e)):
            raise
        if cfg.run.profile:
            write_memory_profile(cfg, "out_of_memory")
        from planning import plan  # here: few runs need it

        machine = plan.machine_of(jax.devices()[: cfg.run.n_devices])
        raise UserError(plan.explain(cfg, machine, str(e))) from None


def write_memory_profile(cfg, name):
    """Write the arrays on this process's devices now, as a profile for pprof, into the run directory."""
    path = f"{cfg.run.folder}/{name}-{jax.process_index()}.pprof"
    content = jax.profiler.device_memory_profile()
    if attempt(lambda: write_file(path, content), f"--profile: {path} could not be written"):
        say(f"--profile: {path} holds what is in the devices' memory now")


def tell_end(training, signalled, began):
    """Print and record how the run ended; returns its exit status."""
    cfg, checkpoints, step = training.cfg, training.checkpoints, training.step
    if checkpoints.saved != step:
        newest = checkpoints.on_disk
        then = f"resume from step {newest}" if newest else "begin again: there is none before it"
        first = "once the storage answers," if is_remote(cfg.run.folder) else "make room and"
        say_error(
            f"--output_dir {cfg.run.output_dir}: the last checkpoint, of step {step}, could not be written; {first} "
            f"rerun the same command to {then}."
        )
        return Unavailable.status
    training.log.ended(training.goodput.row())
    # processes but the first know the time since this start alone
    shares = f" {training.goodput.words()};" if jax.process_index() == 0 else ""
    saved = f"everything is saved in {cfg.run.folder}"
    words = f"at step {step} after {duration(time.time() - began)};{shares} {saved}"
    if signalled:
        say(f"stopped {words}; rerun the same command to resume")
        return 128 + signalled
    overfit = training.overfitting.now
    if overfit:
        say(
            f"{overfit.words}; more text would help, or fewer steps. The best checkpoint is taken below."
        )
    say(f"done {words}")
    if jax.process_index() == 0:
        tell_next(training)
    return 0


def best_in_words(checkpoints):
    """Which checkpoint has the smallest held-out loss, as what follows another sentence; "" where none has one."""
    losses = {step: loss for step, loss in checkpoints.losses.items() if loss is not None}
    if not losses:
        return ""
    best = min(losses, key=losses.get)
    return f"; checkpoint {best} is the best so far, with {losses[best]:.4f}, and is kept"


SHOWN = 3  # of the samples, at the end


def tell_next(training):
    """Print what the finished run made, samples, and the commands that come next."""
    cfg = training.cfg
    lines = []
    for text in list(dict.fromkeys(training.texts))[:SHOWN]:
        lines += ["", textwrap.indent(text.strip(), "  | ", lambda line: True)]
    python = python_in_words()
    prompt = shlex.quote(cfg.sample.prompt)
    folder = shlex.quote(cfg.run.folder)
    commands = [f"{python} tools/sample.py {folder} --prompt {prompt}"]
    runs = shlex.quote(cfg.run.output_dir)
    commands.append(f"bash setup_tpu.sh page && {python} tools/page.py {runs}")
    with contextlib.suppress(UserError):  # an architecture without such a format
        registry.format_to_export(cfg.model.architecture)
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


def run(flags, pulse=None):
    """`main`, together with the other processes of the run; returns its exit status. pulse: of `main`."""
    interrupts.watch(lambda number: interrupts.end(128 + number, interrupts.words))
    try:
        processes.join_processes(flags.cfg, lambda: command_line.alike(flags.cfg))
        status = main(flags, interrupts.BEGAN, pulse)
    except BaseException as e:
        if not jax.distributed.is_initialized():
            raise
        processes.end_at_once(e)
    processes.part(status)
    return status


if __name__ == "__main__":
    sys.exit(one_sentence(lambda: run(flags, pulse)))
