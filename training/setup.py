"""Builds what a run needs before its loop, its data, its compiled programs and its log, and prints what they are."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

import utils
from config import resume
from config.flags import without
from logs import profiling
from logs.overfitting import Overfitting
from logs.runlog import NoLog, RunLog
from runtime import chips, installation, processes
from runtime.messages import UserError, duration, say
from shards.mixture import Mixture, data_fingerprint
from shards.tokenization import copy_tokenizer
from training.evaluation import make_evaluate
from training.optimizer import hyperparameters
from training.sizes import batch_shape, count_in_words, tokens_in_words
from training.train_state import abstract_state
from training.train_step import lower_train_step


class Data(NamedTuple):
    """The data of a run."""

    train: Mixture
    val: Mixture
    fingerprint: str  # of both, which must be the same when the run is resumed


class Programs(NamedTuple):
    """The functions that run on the devices."""

    train_step: Callable  # compiled: (state, tokens, targets, numbers) -> (state, metrics)
    numbers: dict  # the last input of that step, of `optimizer.hyperparameters`
    evaluate: Callable  # params -> {name: held-out loss}
    score_tasks: Callable  # (params, step, last, phases) -> {name: number}
    sample: Callable  # params -> texts


def open_data(cfg, opened):
    """The `Data` of the run. Raises UserError where they differ from those of the run that is resumed, or from those of
    the other processes."""
    stored = opened.stored
    per_step = math.prod(batch_shape(cfg)[:-1])  # sequences
    corpus = Mixture(cfg, "train", cfg.run.training_steps * per_step)
    val_corpus = Mixture(cfg, "val")
    for part in (corpus, val_corpus):
        part.check_encoding(opened.encoding)
    fingerprint = data_fingerprint(corpus, val_corpus)
    shared = without(utils.flags_with(per_process=True), utils.flatten(cfg))
    processes.check_agreement(shared, fingerprint, cfg.run)
    if stored and stored["data_fingerprint"] != fingerprint:
        raise UserError(
            f"this run exists and saw other data than is now in --data {cfg.data.data} (it was "
            f"{stored['data']}); give those shards, or another --name, {resume.from_its_weights(cfg)}",
            flag="name",
            value=cfg.run.name,
        )
    return Data(corpus, val_corpus, fingerprint)


def print_setup(cfg, data):
    """Print the mesh, the model and the data."""
    device_kind = jax.devices()[0].device_kind
    say(f"mesh (dp, pp, tp) = {cfg.run.n_device_axis} on {cfg.run.n_devices} x {device_kind}")
    if jax.default_backend() != "cpu" and chips.chip_of(device_kind) is None:
        say(f"the peak of {device_kind} is not known, so no MFU is shown")
    say(f"parameters: {count_in_words(cfg)}")
    corpus = data.train
    shares = corpus.shares / corpus.shares.sum(1, keepdims=True)
    for part, (first, *later) in zip(corpus.corpora, shares.T):
        words = f"data: {part.n_sequences:,} sequences of {part.T} tokens in {part.folder}"
        if len(corpus.corpora) > 1:
            words += f", {first:.3%} of each step's"
        for border, share in zip(corpus.borders, later):
            words += f", {share:.3%} after {border:,} sequences"
        say(words)
    for part in [*corpus.corpora, *data.val.corpora]:
        if part.unverified and jax.process_index() == 0:
            say(f"warning: {part.unverified}")
    say(tokens_in_words(cfg))


def make_programs(cfg, mesh, optimizer, data, opened, workbench, goodput):
    """The `Programs` of a run. The train step is compiled here, the others when they are first called."""
    evaluate = make_evaluate(cfg, mesh, data.val)
    arguments = cfg, mesh, opened.encoding, opened.ends
    score_tasks = processes.on_all(lambda: open_tasks(workbench, *arguments))
    with goodput.during("compiling"):
        train_step = compile_train_step(cfg, mesh, optimizer)
    sample = workbench.make_sampler(*arguments)
    return Programs(train_step, hyperparameters(cfg, mesh), evaluate, score_tasks, sample)


def open_tasks(workbench, cfg, *arguments):
    """The function that scores --eval_tasks, of `Workbench.make_task_scorer`; without that flag one that returns
    {}."""
    if not cfg.run.eval_tasks:
        return lambda *_: {}
    try:
        return workbench.make_task_scorer(cfg, *arguments)
    except UserError as e:  # which knows the flags of tools/evaluate.py
        raise e.renamed(tasks="--eval_tasks", include_path="--eval_tasks") from None


def compile_train_step(cfg, mesh, optimizer):
    """Compile the train step of training/train_step.py, and print how long that took."""
    start = time.time()
    abstract = abstract_state(cfg, mesh, optimizer)
    lowered = lower_train_step(cfg, mesh, abstract)
    # A program from the compilation cache has the names and lines of the code that was compiled then, which a trace
    # would show. With --profile they are part of the cache's key, so that they are those of today's code.
    by_names = "jax_compilation_cache_include_metadata_in_key"
    jax.config.update(by_names, bool(cfg.run.profile))
    train_step = lowered.compile(compiler_options=profiling.compiler_options(cfg))
    jax.config.update(by_names, False)
    say(f"compiled in {duration(time.time() - start)}")
    return train_step


def open_log(cfg, step, goodput, checkpoints):
    """(the log of the steps after `step`, its `Overfitting`).

    This also adds to `goodput` what the run has spent so far, by its rows, and has a checkpoint get its name only after
    the rows before it are written.
    """
    log = RunLog(cfg) if jax.process_index() == 0 else NoLog()
    found, end = processes.on_all(lambda: log.open(step))
    goodput.add_spent(found, step, end)
    checkpoints.wait_for_log = log.wait_for_rows
    return log, Overfitting([row for row in found if row["step"] <= step])


def write_config(log, data, ends):
    """Write config.json, which tools read and which is compared with the flags when the run is resumed, and copy the
    tokenizer beside it."""
    config = utils.flatten(log.cfg) | {
        "data_fingerprint": data.fingerprint,
        "commit": installation.commit(),
        "device_kind": jax.devices()[0].device_kind,
    }
    config["encoding"] = copy_tokenizer(log.folder, data.train.tokenizer)
    if ends:
        config["eos_token_id"] = ends
    log.write("config.json", config)


def write_plan(cfg, log, plans):
    """The plan by formulas, which is also written to plan.json for tools/page.py; None where the devices' peak is
    unknown."""
    planned = plans.plan_of(cfg)
    if planned:
        log.write("plan.json", plans.as_json(planned))
    return planned
