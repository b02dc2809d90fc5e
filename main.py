"""Train: the mesh, the optimizer, the compiled steps and the loop. `main` reads from top to bottom.

python main.py --preset tiny --bucket_name data/shards/stdlib     (run.sh local does this and all before it)
"""

from training import interrupts

if __name__ in interrupts.PROGRAM:
    interrupts.at_once(interrupts.NOTHING_LOST, __name__)

import functools
import hashlib
import itertools
import json
import math
import os
import sys
import time
import traceback

import utils
from training import command_line, platforms
from utils import UserError, say

if __name__ == "__main__":  # flags for XLA must stand in the environment before jax is imported
    cfg_given = utils.one_sentence(lambda: command_line.parse(sys.argv[1:]))
    if cfg_given[0].plan.plan:
        platforms.use_no_device()
        from tools import common
        from tools.planning import plan

        common.run(lambda: plan.main(*cfg_given))
    n_processes = utils.one_sentence(lambda: command_line.check_processes(*cfg_given))
    platforms.set_xla_flags(cfg_given[0].run.n_devices, n_processes)

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import model
from data.tokenization import keep_tokenizer, text_of
from dataset import Mixture, Prefetch, put_batch
from training import decoding, settings, steps, weights
from training.checkpointing import Checkpoints
from training.optimizer import make_optimizer
from training.processes import (
    ANOTHER,
    Interrupt,
    Watchdog,
    alone_in_folder,
    check_agreement,
    end_for_loss,
    is_loss,
    join_processes,
    together,
)
from training.runlog import Pace, RunLog, check_login, duration, progress, uploading

# --- The run ------------------------------------------------------------------------------------------------------

MOST_RETURNS = 3  # to a checkpoint after bad steps; more would show that it does not help


def data_fingerprint(*mixtures):
    """Hash of what the shards are, wherever they stand."""

    def shards(c):
        return [{k: s[k] for k in s if k != "crc32"} for s in c.manifest.get("shards", [])]

    what = [
        [
            shards(c) or [(os.path.basename(s.path), s.length) for s in c.shards],
            c.manifest.get("tokenizer_sha256"),
        ]
        for mixture in mixtures
        for c in mixture.corpora
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def main(cfg, given):
    """Train as `cfg` says, resuming where the run left off. Returns the exit status: 0, or 128 + the signal."""
    steps.configure_jax(cfg)
    flags, load = None, None
    if cfg.run.init_from:
        flags, load = weights.open_weights(cfg.run.init_from)
    cfg = settings.settle(cfg, given, jax.device_count(), flags)
    if load:
        if cfg.model.T > (most := weights.positions(cfg.run.init_from, flags["T"])):
            them = f"the weights in --init_from {cfg.run.init_from}"
            say(f"warning: --T {cfg.model.T}: {them} were made for {most} tokens")
    error = None
    try:
        if cfg.run.wandb and jax.process_index() == 0:
            check_login()
    except UserError as e:
        error = e
    together(error)
    with alone_in_folder(cfg.run):
        return train_in_folder(cfg, given, load)


def train_in_folder(cfg, given, load):
    """`main`, in a run directory that is this run's alone. load: of `open_weights`, for --init_from."""
    started = time.time()

    # --- Data
    train, val = (
        Mixture(cfg, cfg.data.train_folder_name),
        Mixture(cfg, cfg.data.val_folder_name, optional=True),
    )
    data = data_fingerprint(train, val)
    check_agreement(cfg, data)
    encoding = train.encoding()
    cfg = settings.settle(cfg, given, jax.device_count(), fingerprint=data, encoding=encoding)
    prompt = settings.prompt_ids(cfg, encoding)
    mesh = steps.make_mesh(cfg)
    dp, pp, tp = cfg.run.n_device_axis
    shape = steps.batch_shape(cfg)
    per_step = math.prod(shape[:-1])  # sequences
    order = functools.partial(train.sequences, seed=cfg.run.seed)

    # --- Model, optimizer
    kind = jax.devices()[0].device_kind
    say(f"mesh (dp, pp, tp) = ({dp}, {pp}, {tp}) on {cfg.run.n_devices} x {kind}")
    say(f"parameters: {steps.count_in_words(cfg)}")
    for c, share in zip(train.corpora, train.shares / train.shares.sum()):
        say(
            f"data: {c.n_sequences:,} sequences of {c.T} tokens in {c.folder}, {share:.3%} of each step's"
        )
    say(f"{per_step * train.T:,} tokens a step")
    optimizer, schedule = make_optimizer(cfg)
    in_a_row = utils.replace(cfg, pp_interleave=1)  # as blocks stand in checkpoints
    abstract, stored = (
        steps.abstract_state(cfg, mesh, optimizer),
        steps.abstract_state(in_a_row, mesh, optimizer),
    )
    to_run, to_store, to_sample = (
        steps.arranger(cfg, a) for a in (abstract, stored, stored.params)
    )

    # --- Restore
    checkpoints = Checkpoints(
        os.path.join(cfg.run.folder, "checkpoints"),
        cfg.run.keep_checkpoints,
        cfg.run.keep_every,
        cfg.run.keep_best,
        functools.partial(weights.other_flags, in_a_row),
    )

    def beginning():
        params = load(stored.params) if load else None
        return steps.init_state(in_a_row, stored, optimizer, params), dict(step=0, sequences=0)

    state, meta = checkpoints.restore(stored) or beginning()
    state, step, sequences = to_run(state), meta["step"], meta["sequences"]
    # back: where to go back to and on from, once max_bad_steps in a row were bad
    faults = dict(bad_steps=0, in_a_row=0, returns=0, back=None) | meta.get("faults", {})
    if step:
        say(f"resuming {cfg.run.name} at step {step}, after {sequences:,} sequences")
    if step >= cfg.run.training_steps:
        say(f"nothing to do: --training_steps {cfg.run.training_steps} is reached")
        checkpoints.close()
        return 0

    # --- Steps
    pending = None  # (step, sequences, metrics) not fetched

    def read_on():
        numbers = range(sequences, sequences + (cfg.run.training_steps - step) * per_step, per_step)
        batches = Prefetch(
            lambda n: put_batch(order, n, shape, mesh),
            numbers,
            busy=lambda: pending and jax.block_until_ready(pending[-1]),
        )
        together(batches.error(2))
        return batches

    batches = read_on()  # what is wrong with the data is said before minutes of compiling
    evaluate = steps.make_evaluate(cfg, mesh, val)
    compiling = time.time()
    train_step = steps.lower_train_step(cfg, mesh, optimizer, schedule, abstract).compile()
    say(f"compiled in {duration(time.time() - compiling)}")
    generate = jax.jit(
        decoding.make_generate(in_a_row, mesh), out_shardings=NamedSharding(mesh, P())
    )

    # --- What the run says and leaves behind
    main_process = jax.process_index() == 0
    log = RunLog(cfg, step, main_process)
    peak = platforms.peak_flops(kind)
    at_peak = peak and peak * cfg.run.n_devices / model.flops_per_token(cfg)  # tokens per second
    about = dict(
        mesh=[dp, pp, tp],
        versions={p.__name__: p.__version__ for p in (jax, optax, ocp, np)},
        config=settings.to_resume(cfg, data),
    )
    if main_process:
        config = dict(utils.flatten(cfg), data_fingerprint=data)
        config["encoding"] = keep_tokenizer(cfg.run.folder, train.tokenizer)
        utils.write_file(log.path("config.json"), json.dumps(config, indent=1) + "\n")

    def save(state, row):
        kept = about | {"faults": dict(faults)}
        checkpoints.save(step, to_store(state), sequences, kept, row.get("loss/val_loss"))

    def sample(state):
        if prompt is None:
            return
        ids = np.asarray(
            generate(to_sample(state.params), prompt, jax.random.key(cfg.run.seed))
        ).tolist()
        rows = [
            itertools.takewhile(lambda t: t != encoding.eot_token, row[1:]) for row in ids
        ]  # the first is one too
        log.text(step, [text_of(encoding, row) for row in rows])

    def at_stake():
        """Steps that are in no checkpoint yet, in words."""
        first = (checkpoints.on_disk or 0) + 1
        return f"the steps from {first} to {step}" if step >= first else "no step"

    def fetch(step, sequences, metrics):
        """Numbers of a finished step, for the log."""
        values = jax.device_get(metrics)
        heads = {f"load/head_{i}": float(v) for i, v in enumerate(values.pop("load/head", []))}
        row = (
            {"step": step}
            | {key: float(v) for key, v in values.items()}
            | heads
            | train.epochs(sequences)
        )
        if math.isfinite(row["loss/train_loss"]) and math.isfinite(row["grad_norm"]):
            faults["in_a_row"] = 0
        else:
            faults["bad_steps"] += 1
            faults["in_a_row"] += 1
            say(
                f"warning: step {step} is skipped, its loss is {row['loss/train_loss']:.4f} and the norm of its "
                f"gradient {row['grad_norm']:.3f} ({faults['in_a_row']} in a row)"
            )
            if faults["in_a_row"] >= cfg.run.max_bad_steps > 0 and not faults["back"]:
                faults["back"] = dict(
                    before=step + 1 - faults["in_a_row"],
                    sequences=sequences,
                    bad_steps=faults["bad_steps"],
                )
        row["bad_steps"] = faults["bad_steps"]
        return row | pace.step()

    # --- Loop: the host runs one step ahead of the devices, so metrics are fetched a step late
    quiet = not (main_process and sys.stderr.isatty())
    bar = tqdm(total=cfg.run.training_steps, initial=step, unit="step", disable=quiet)
    watchdog = Watchdog(cfg)
    pace = Pace(per_step * train.T, batches.waited)
    began, first_step = time.time(), step  # of training; moved on by the time spent off it
    row = None  # of the last step, where it is fetched and not logged
    # until all is written: a signal may reach this process when all have agreed to stop
    with Interrupt(at_stake) as interrupt:
        try:
            while True:
                if back := faults["back"]:
                    if faults["returns"] == MOST_RETURNS:
                        raise UserError(
                            f"--max_bad_steps {cfg.run.max_bad_steps}: so many in a row from step "
                            f"{back['before']} on had a loss or gradient that is not finite, after "
                            f"{MOST_RETURNS} returns to a checkpoint; look at the losses before, or begin "
                            f"another run by --init_from with a lower --max_lr."
                        )
                    watchdog.begin("return", step)
                    pending = state = None  # there is memory for one
                    batches.close()
                    state, meta = (
                        checkpoints.restore(stored, back["before"], cfg.run.save_steps)
                        or beginning()
                    )
                    state, step, sequences = to_run(state), meta["step"], back["sequences"]
                    faults |= dict(
                        bad_steps=back["bad_steps"],
                        in_a_row=0,
                        returns=faults["returns"] + 1,
                        back=None,
                    )
                    say(
                        f"warning: going back to step {step}, and on with the data after sequence {sequences:,} "
                        f"(return {faults['returns']} of {MOST_RETURNS})"
                    )
                    batches, interrupt.earlier = (
                        read_on(),
                        0,
                    )  # what could not be read before may be skipped now
                    log.rewind(step)
                    pace.close()
                    pace = Pace(per_step * train.T, batches.waited)
                    began, first_step = time.time(), step
                watchdog.begin("training", step + 1)
                state, metrics = train_step(state, *next(batches))
                pace.launched(metrics, batches.waited)
                step, sequences = step + 1, sequences + per_step
                if pending:
                    log.metrics(fetch(*pending))
                pending = (step, sequences, metrics)
                bar.update(step - bar.n)
                # Of several processes each must know of the step after next, since what they agree on comes a step late
                error = batches.error(min(2, jax.process_count()))
                signalled = interrupt.agreed(
                    error
                )  # once: a signal that arrives from here on belongs to the next step
                stop = signalled or step == cfg.run.training_steps
                scheduled = step % cfg.run.eval_every == 0
                saves = stop or step % cfg.run.save_steps == 0
                if not (scheduled or saves):
                    continue
                row, pending = fetch(*pending), None
                off = time.time()
                if scheduled or (stop and not signalled):
                    watchdog.begin("evaluation", step)
                    row |= evaluate(state.params)
                    left = (off - began) / (step - first_step) * (cfg.run.training_steps - step)
                    progress(cfg, row | pace.since_last(), left, val.bytes_per_token, at_peak)
                log.metrics(row)
                if scheduled or stop:
                    log.plots()
                # between bad steps nothing changes, and what they go back to must not leave for it
                saves = stop or (saves and not (faults["in_a_row"] or faults["back"]))
                if saves:
                    watchdog.begin("checkpoint", step)
                    save(state, row)
                row = None
                if signalled == interrupt.FAILED:
                    raise error or UserError(ANOTHER)
                if saves and not signalled:
                    watchdog.begin("sampling", step)
                    sample(state)
                pace.on(batches.waited)
                began += time.time() - off
                if stop:
                    break
        except (
            UserError
        ):  # of all processes, at the same step: storage failed; keep what was reached
            row = fetch(*pending) if pending else row
            if row:
                log.metrics(row)
            if not faults["back"]:
                save(state, {})
            raise
        finally:
            watchdog.over.set()
            pace.close()
            bar.close()
            checkpoints.close()
            log.close()
            batches.close()  # last: a read that storage does not answer may take a minute to give up
    say(
        f"{'stopped' if signalled else 'done'} at step {step} after {duration(time.time() - started)}; "
        f"everything stands in {log.dir}{', and the same command goes on from here' if signalled else ''}"
    )
    if checkpoints.saved != step:
        print(
            f"error: --output_dir {cfg.run.output_dir}: the last checkpoint, of step {step}, is not written; make "
            f"room, and the same command goes on from the one before.",
            file=sys.stderr,
            flush=True,
        )
        return 1
    return 128 + signalled if signalled else 0


def run(cfg, given):
    """`main`, together with the other processes of the run. One that fails leaves at once: at a usual exit jax would
    wait for the others, which wait for this one, and end in a stack trace."""
    interrupts.watch(lambda number: interrupts.end(128 + number, interrupts.NOTHING_LOST))
    join_processes(cfg)
    try:
        status = main(cfg, given)
    except BaseException as e:
        if jax.process_count() == 1:
            raise
        status = 1
        if isinstance(e, UserError):
            status = 2
            print(f"error: {e}", file=sys.stderr)
        elif is_loss(e):
            end_for_loss()
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(2)  # its end is that of the others, who may be about to say the same
        os._exit(status)
    if uploading():
        jax.distributed.shutdown()
        runs = os.path.join(cfg.run.folder, "wandb", "run-*")
        interrupts.end(
            status,
            f"warning: --wandb: the upload takes too long; wandb sync {runs} goes on with it",
        )
    return status


if __name__ == "__main__":
    sys.exit(utils.one_sentence(lambda: run(*cfg_given)))
