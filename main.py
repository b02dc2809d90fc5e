"""Train: the mesh, the optimizer, the compiled steps and the loop. `main` reads from top to bottom.

python main.py --preset tiny --bucket_name data/shards/stdlib     (run.sh local does this and all before it)
"""

import interrupts

if __name__ in interrupts.PROGRAM:
    interrupts.at_once(interrupts.NOTHING_LOST, __name__)

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import sys
import time
import traceback
from typing import Any, NamedTuple

import cli
import platforms
import utils
from utils import UserError, say

if __name__ == "__main__":  # flags for XLA must stand in the environment before jax is imported
    cfg_given = utils.one_sentence(lambda: cli.parse(sys.argv[1:]))
    if cfg_given[0].plan.plan:
        platforms.use_no_device()
        from tools import common, plan

        common.run(lambda: plan.main(*cfg_given))
    n_processes = utils.one_sentence(lambda: cli.check_processes(*cfg_given))
    platforms.set_xla_flags(cfg_given[0].run.n_devices, n_processes)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import decoding
import model
from checkpointing import Checkpoints, shapes_of
from dataset import Mixture, Prefetch, put_batch
from processes import (
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
from runlog import Pace, RunLog, check_login, duration, progress, uploading
from tokenization import keep_tokenizer, text_of


class TrainState(NamedTuple):
    """All that a step reads and writes; with the number of sequences consumed it is the whole checkpoint."""

    params: Any  # float32, see model.param_table
    opt_state: Any
    step: jax.Array  # int32 []
    key: jax.Array  # uint32 [2], of dropout


# --- Mesh, optimizer, state ---------------------------------------------------------------------------------------


def make_mesh(cfg):
    """The (dp, pp, tp) mesh over the first n_devices devices, laid out so that neighbours on an axis are near."""
    grid = device_grid(cfg.run.n_device_axis, jax.devices()[: cfg.run.n_devices])
    return Mesh(grid, model.AXES, axis_types=(AxisType.Auto,) * 3)


def device_grid(shape, devices):
    """`devices` as an array of `shape` (dp, pp, tp): tp on the fastest links, then pp, then dp. Slices of TPUs, which
    only a slow network joins, lie along dp, else along pp."""
    # a single slice that only a compiler knows (tools/plan.py) has no index
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across = next((axis for axis in (0, 1) if shape[axis] % slices == 0), None)
    if across is None:
        raise UserError(f"--n_device_axis {' '.join(map(str, shape))}: dp or pp must be a multiple of the number of "
                        f"TPU slices, {slices}.")  # fmt: skip
    outer = [slices if axis == across else 1 for axis in range(3)]
    inner = [size // n for size, n in zip(shape, outer)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)


def make_optimizer(cfg):
    """AdamW (arXiv:1711.05101) after clipping by the global norm, and its schedule: step -> learning rate."""
    o = cfg.optimizer
    schedule = optax.warmup_cosine_decay_schedule(o.min_lr, o.max_lr, o.warmup_steps, o.end_steps, o.end_lr)
    decayed = model.table_map(lambda p: p.matrix, model.param_table(cfg))
    adamw = optax.adamw(schedule, b1=0.9, b2=o.adam_b2, weight_decay=o.weight_decay, mask=decayed)
    embedding = {name: jax.tree.map(lambda _: name == "embedding", part) for name, part in decayed.items()}
    faster = optax.masked(optax.scale(o.embedding_lr), embedding)
    return optax.chain(optax.clip_by_global_norm(o.grad_clip_norm), adamw, faster), schedule


def abstract_params(cfg, mesh):
    """The parameters as float32 ShapeDtypeStructs with shardings."""
    table = model.param_table(cfg)
    return jax.tree.map(lambda p, sharding: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding), table,
                        model.shardings(table, mesh), is_leaf=model.is_param)  # fmt: skip


def abstract_state(cfg, mesh, optimizer):
    """TrainState of ShapeDtypeStructs with shardings: optimizer leaves lie as their parameters do, scalars all over."""
    params, replicated = abstract_params(cfg, mesh), NamedSharding(mesh, P())
    opt_state = optax.tree_map_params(
        optimizer, lambda s, p: s.update(sharding=p.sharding), jax.eval_shape(optimizer.init, params), params,
        transform_non_params=lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated),
    )  # fmt: skip
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return TrainState(params, opt_state, step, jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated))


def arranger(cfg, abstract):
    """Function that gives a tree the shapes and shardings of `abstract`: checkpoints and samples have the blocks in one
    row, --pp_interleave deals them out in rounds."""
    if cfg.run.pp_interleave == 1:
        return lambda tree: tree
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    return jax.jit(lambda t: jax.tree.map(lambda x, a: x.reshape(a.shape), t, abstract), out_shardings=shardings)


def init_state(cfg, abstract, optimizer, params=None):
    """TrainState at step 0, made in place on the mesh, the same on every mesh. `params`, if given, are used up."""

    def init(params):
        init_key, key = jax.random.split(jax.random.key(cfg.run.seed))
        params = params or model.init_params(model.param_table(cfg), init_key)
        return TrainState(params, optimizer.init(params), jnp.int32(0), jax.random.key_data(key))

    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params)


def other_flags(cfg, kept, there):
    """In words: the flags of the model that are not those of a checkpoint with arrays of the shapes {path: shape}
    `there`. kept: {flag: value} that it was saved with; for None, in older ones, it is found out if it is one flag."""
    free = utils.free_of_weights(cfg.model.architecture)
    now, kept = {flag: value for flag, value in vars(cfg.model).items() if flag not in free}, kept or {}
    differ = {flag: kept[flag] for flag in now if flag in kept and kept[flag] != now[flag]}
    if not kept and (wanted := {path: shape for path, shape in there.items() if path.startswith("params.")}):
        fitting = (other for other in neighbours(now, wanted) if parameter_shapes(cfg, *other) == wanted)
        differ = dict(itertools.islice(fitting, 1))
    return ", ".join(f"--{flag} was {value} and is now {now[flag]}" for flag, value in differ.items())


def neighbours(flags, shapes):
    """Yield each (flag, value) that differs from {flag: value} `flags` and may give parameters of `shapes`."""
    sizes = sorted({*range(10), *itertools.chain(*shapes.values())})
    for flag, value in flags.items():
        known = [True, False] if isinstance(value, bool) else sizes if isinstance(value, int) else []
        for other in ["swiglu", "gelu"] if flag == "activation" else known:
            if other != value:
                yield flag, other


def parameter_shapes(cfg, flag, value):
    """{path: shape} of the parameters of `cfg` with the flag of the model changed, or {} where that is no model."""
    with contextlib.suppress(ArithmeticError, ValueError):
        table = model.param_table(utils.replace(cfg, **{flag: value}))
        return shapes_of({"params": model.table_map(lambda p: np.broadcast_to(0, p.shape), table)})
    return {}


def open_weights(folder):
    """({flag: value} of the model in `folder`, load), where load(abstract) places its parameters as `abstract_params`.

    `folder` is a run directory, whose newest sound checkpoint is taken, or in the Hugging Face format. Raises UserError
    where it is neither.
    """
    config = utils.run_config(folder)
    if "model_type" in config:
        from tools import hf

        return hf.model_flags(config, folder), functools.partial(hf.load, folder)
    if "model_dimension" not in config:
        raise UserError(f"{folder}: neither a run directory nor a folder in the Hugging Face format (each holds a "
                        f"config.json).")  # fmt: skip
    flags = model_of_run(config, folder)
    explain = functools.partial(other_flags, utils.replace(utils.Config(), pp_interleave=1, **flags))
    return flags, Checkpoints(os.path.join(folder, "checkpoints"), explain=explain).restore_params


def model_of_run(config, folder):
    """{flag: value} of the model that a run's config.json tells of. Raises UserError for values that no model has."""
    utils.check_stored(config, folder, ["architecture"])
    flags = {name: config[name] for name in vars(utils.Model()) if name in config}
    cli.check_model(flags, os.path.join(folder, "config.json"))
    return flags


def positions(folder, T):
    """Tokens of the longest sequence that the model in `folder` was made for; T: what `open_weights` says that it was
    trained with, which may be less."""
    config = utils.read_json(folder, "config.json")
    most = config.get("max_position_embeddings") or config.get("positions")
    return most if isinstance(most, int) else T


# --- Steps --------------------------------------------------------------------------------------------------------


def make_train_step(cfg, mesh, optimizer, schedule):
    """`train_step(state, tokens, targets)` -> (state, metrics); tokens and targets int32 [accumulation, M, B, T].

    Gradients are averaged over the accumulation in float32. shard_map stands around the loss alone: gradient, clipping
    and optimizer see global arrays, so norms are global and replicated parameters get one gradient. Where the loss or
    the norm of the gradient is not finite, all but the step stays as it was.
    """
    gradient = jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True)

    def train_step(state, tokens, targets):
        A, M, B, _ = tokens.shape
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def accumulate(total, batch):
            i, tokens, targets = batch
            return jax.tree.map(jnp.add, total, gradient(state.params, tokens, targets, key, i * M * B)), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, state.params, tokens[0], targets[0], key, 0))
        total, _ = lax.scan(accumulate, zeros, (jnp.arange(A), tokens, targets))
        (mean_loss, seen), grads = jax.tree.map(lambda x: x / A, total)

        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            params = model.update_router_bias(params, seen.load, cfg.optimizer.bias_update_rate)
            norm = optax.tree.norm(grads)
            sound = jnp.isfinite(mean_loss) & jnp.isfinite(norm)
            params, opt_state = jax.tree.map(functools.partial(jnp.where, sound), (params, opt_state),
                                             (state.params, state.opt_state))  # fmt: skip
        metrics = {
            "loss/train_loss": mean_loss,
            "loss/train_cross_entropy_loss": seen.cross_entropy,
            "lr": schedule(state.step),
            "grad_norm": norm,
        }
        if cfg.model.n_experts:
            load = jnp.concatenate([x.reshape(-1, cfg.model.n_experts) for x in seen.load.values()])  # [layers, E]
            metrics |= {
                "loss/load_loss": seen.load_loss,
                "load/head": (load / load.sum(-1, keepdims=True)).mean(0),  # [E] share of the routed tokens
                "load/dropped": seen.dropped,
            }
        if cfg.model.mtp_depth:
            metrics["loss/mtp_loss"] = seen.mtp
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    return train_step


def batch_shape(cfg):
    """[accumulation, M, B, T] of a step's tokens over the whole mesh."""
    d, r = cfg.data, cfg.run
    return r.grad_step, d.micro_batch_size, d.train_batch_size * r.n_device_axis[0] // d.micro_batch_size, cfg.model.T


def lower_train_step(cfg, mesh, optimizer, schedule, abstract):
    """`make_train_step`, to be compiled for a TrainState like `abstract`, which it overwrites. (Not for a state itself:
    one that was restored would make another program.)"""
    tokens = jax.ShapeDtypeStruct(batch_shape(cfg), jnp.int32, sharding=NamedSharding(mesh, model.BATCH_SPEC))
    shardings = jax.tree.map(lambda s: s.sharding, abstract), NamedSharding(mesh, P())
    step = jax.jit(make_train_step(cfg, mesh, optimizer, schedule), donate_argnums=0, out_shardings=shardings)
    return step.lower(abstract, tokens, tokens)


def make_evaluate(cfg, mesh, corpus):
    """`evaluate(params)` -> {"loss/val_loss", "loss/val_cross_entropy_loss"} over eval_steps batches drawn from all
    of the validation shards: the same ones every time, whatever --seed."""
    M, B = cfg.data.micro_batch_size, cfg.data.val_batch_size * cfg.run.n_device_axis[0]
    batches = min(cfg.run.eval_steps, corpus.n_sequences // B)
    if not batches:
        raise UserError(f"--val_batch_size {cfg.data.val_batch_size}: a validation batch would be {B} sequences of "
                        f"{corpus.T + 1} tokens, but {corpus.folder} holds {corpus.n_sequences}.")  # fmt: skip
    if batches < cfg.run.eval_steps:
        say(f"validation: {corpus.folder} holds {batches} batches of {B} sequences, so --eval_steps is {batches}")
    loss, order = jax.jit(model.make_loss(cfg, mesh, train=False)), functools.partial(corpus.sequences, seed=0)

    def evaluate(params):
        make = lambda i: put_batch(order, i * B, (1, M, B // M, corpus.T), mesh)  # noqa: E731
        ahead = Prefetch(make, range(batches), depth=batches)
        together(ahead.error(batches))
        losses, seen = zip(*[loss(params, x[0], y[0], jax.random.key(0), 0) for x, y in ahead])
        return {"loss/val_loss": float(sum(losses) / batches),
                "loss/val_cross_entropy_loss": float(sum(s.cross_entropy for s in seen) / batches)}  # fmt: skip

    return evaluate


# --- The run ------------------------------------------------------------------------------------------------------

MOST_RETURNS = 3  # to a checkpoint after bad steps; more would show that it does not help


def quiet_libraries():
    """Leave out what the libraries say of matters that the programs here say themselves."""
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax's errors are caught and said in a sentence, which need not
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # hide in the many traces of its tasks


def configure_jax(cfg):
    """Settings of jax itself, made here and nowhere at import."""
    quiet_libraries()
    if cache := os.path.expanduser(cfg.run.compilation_cache):
        try:
            if not utils.is_remote(cache):
                utils.check_place(os.path.join(cache, "entry"), "--compilation_cache")
            jax.config.update("jax_compilation_cache_dir", cache)
        except UserError as e:  # jax would warn of every program
            print(f"warning: {e}", file=sys.stderr, flush=True)
    if cfg.model.model_dtype == "float32":  # accelerators would otherwise round the inputs of matrix products
        jax.config.update("jax_default_matmul_precision", "float32")


def count_in_words(cfg):
    """The model's parameters in words, the same wherever they are told."""
    total, active, embedding = model.count_params(cfg)
    return f"{total:,} total, {active:,} active per token, both without the {embedding:,} of the embedding"


def data_fingerprint(*mixtures):
    """Hash of what the shards are, wherever they stand."""

    def shards(c):
        return [{k: s[k] for k in s if k != "crc32"} for s in c.manifest.get("shards", [])]

    what = [[shards(c) or [(os.path.basename(s.path), s.length) for s in c.shards], c.manifest.get("tokenizer_sha256")]
            for mixture in mixtures for c in mixture.corpora]  # fmt: skip
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def with_prompt(cfg, given, encoding):
    """(`cfg`, token ids of --prompt as the beginning of a document), of which what was not given is cut so that both
    and --max_tokens fit in --T; the ids are None where no tokeniser is known or T leaves no room for a sample."""
    if encoding is None or cfg.model.T < 2:
        return cfg, None
    ids, tokens = [encoding.eot_token, *encoding.encode_ordinary(cfg.sample.prompt)], cfg.sample.max_tokens
    if "prompt" not in given:
        ids = ids[: max(1, cfg.model.T - (tokens if "max_tokens" in given else 1))]
    if "max_tokens" not in given:
        tokens = max(1, min(tokens, cfg.model.T - len(ids)))
    if len(ids) + tokens > cfg.model.T:
        flag = f"max_tokens {tokens}" if "max_tokens" in given else "prompt"
        raise UserError(f"--{flag}: the prompt's {len(ids)} tokens and {tokens} after it are more than --T "
                        f"{cfg.model.T}.")  # fmt: skip
    return utils.replace(cfg, max_tokens=tokens), np.array(ids, np.int32)


def main(cfg, given):
    """Train as `cfg` says, resuming where the run left off. Returns the exit status: 0, or 128 + the signal."""
    configure_jax(cfg)
    load = None
    if cfg.run.init_from:
        flags, load = open_weights(cfg.run.init_from)
        cfg = utils.adopt(cfg, given, flags)
        if cfg.model.T > (most := positions(cfg.run.init_from, flags["T"])):
            weights = f"the weights in --init_from {cfg.run.init_from}"
            say(f"warning: --T {cfg.model.T}: {weights} were made for {most} tokens")
    cfg = utils.validate(cfg, jax.device_count())
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
    train, val = Mixture(cfg, cfg.data.train_folder_name), Mixture(cfg, cfg.data.val_folder_name, optional=True)
    data = data_fingerprint(train, val)
    check_agreement(cfg, data)
    encoding = train.encoding()
    if cfg.model.document_mask and cfg.model.end_of_text < 0:
        if encoding is None:
            raise UserError(f"--document_mask: nothing tells which token begins a document in {train.folder}; give its "
                            f"--tokenizer or the token id as --end_of_text.")  # fmt: skip
        cfg = utils.replace(cfg, end_of_text=encoding.eot_token)
    cfg = utils.follow(utils.resume(cfg, given, data), {*given, "train_batch_size", "val_batch_size"})
    cfg, prompt = with_prompt(utils.validate(cfg, jax.device_count()), given, encoding)
    mesh = make_mesh(cfg)
    dp, pp, tp = cfg.run.n_device_axis
    shape = batch_shape(cfg)
    per_step = math.prod(shape[:-1])  # sequences
    order = functools.partial(train.sequences, seed=cfg.run.seed)

    # --- Model, optimizer
    kind = jax.devices()[0].device_kind
    say(f"mesh (dp, pp, tp) = ({dp}, {pp}, {tp}) on {cfg.run.n_devices} x {kind}")
    say(f"parameters: {count_in_words(cfg)}")
    for c, share in zip(train.corpora, train.shares / train.shares.sum()):
        say(f"data: {c.n_sequences:,} sequences of {c.T} tokens in {c.folder}, {share:.3%} of each step's")
    say(f"{per_step * train.T:,} tokens a step")
    optimizer, schedule = make_optimizer(cfg)
    in_a_row = utils.replace(cfg, pp_interleave=1)  # as blocks stand in checkpoints
    abstract, stored = abstract_state(cfg, mesh, optimizer), abstract_state(in_a_row, mesh, optimizer)
    to_run, to_store, to_sample = (arranger(cfg, a) for a in (abstract, stored, stored.params))

    # --- Restore
    checkpoints = Checkpoints(os.path.join(cfg.run.folder, "checkpoints"), cfg.run.keep_checkpoints, cfg.run.keep_every,
                              cfg.run.keep_best, functools.partial(other_flags, in_a_row))  # fmt: skip

    def beginning():
        params = load(stored.params) if load else None
        return init_state(in_a_row, stored, optimizer, params), dict(step=0, sequences=0)

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
        batches = Prefetch(lambda n: put_batch(order, n, shape, mesh), numbers,
                           busy=lambda: pending and jax.block_until_ready(pending[-1]))  # fmt: skip
        together(batches.error(2))
        return batches

    batches = read_on()  # what is wrong with the data is said before minutes of compiling
    evaluate = make_evaluate(cfg, mesh, val)
    compiling = time.time()
    train_step = lower_train_step(cfg, mesh, optimizer, schedule, abstract).compile()
    say(f"compiled in {duration(time.time() - compiling)}")
    generate = jax.jit(decoding.make_generate(in_a_row, mesh), out_shardings=NamedSharding(mesh, P()))

    # --- What the run says and leaves behind
    main_process = jax.process_index() == 0
    log = RunLog(cfg, step, main_process)
    peak = platforms.peak_flops(kind)
    at_peak = peak and peak * cfg.run.n_devices / model.flops_per_token(cfg)  # tokens per second
    about = dict(mesh=[dp, pp, tp], versions={p.__name__: p.__version__ for p in (jax, optax, ocp, np)},
                 config=utils.to_resume(cfg, data))  # fmt: skip
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
        ids = np.asarray(generate(to_sample(state.params), prompt, jax.random.key(cfg.run.seed))).tolist()
        rows = [itertools.takewhile(lambda t: t != encoding.eot_token, row[1:]) for row in ids]  # the first is one too
        log.text(step, [text_of(encoding, row) for row in rows])

    def at_stake():
        """Steps that are in no checkpoint yet, in words."""
        first = (checkpoints.on_disk or 0) + 1
        return f"the steps from {first} to {step}" if step >= first else "no step"

    def fetch(step, sequences, metrics):
        """Numbers of a finished step, for the log."""
        values = jax.device_get(metrics)
        heads = {f"load/head_{i}": float(v) for i, v in enumerate(values.pop("load/head", []))}
        row = {"step": step} | {key: float(v) for key, v in values.items()} | heads | train.epochs(sequences)
        if math.isfinite(row["loss/train_loss"]) and math.isfinite(row["grad_norm"]):
            faults["in_a_row"] = 0
        else:
            faults["bad_steps"] += 1
            faults["in_a_row"] += 1
            say(f"warning: step {step} is skipped, its loss is {row['loss/train_loss']:.4f} and the norm of its "
                f"gradient {row['grad_norm']:.3f} ({faults['in_a_row']} in a row)")  # fmt: skip
            if faults["in_a_row"] >= cfg.run.max_bad_steps > 0 and not faults["back"]:
                faults["back"] = dict(before=step + 1 - faults["in_a_row"], sequences=sequences,
                                      bad_steps=faults["bad_steps"])  # fmt: skip
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
                        raise UserError(f"--max_bad_steps {cfg.run.max_bad_steps}: so many in a row from step "
                                        f"{back['before']} on had a loss or gradient that is not finite, after "
                                        f"{MOST_RETURNS} returns to a checkpoint; look at the losses before, or begin "
                                        f"another run by --init_from with a lower --max_lr.")  # fmt: skip
                    watchdog.begin("return", step)
                    pending = state = None  # there is memory for one
                    batches.close()
                    state, meta = checkpoints.restore(stored, back["before"], cfg.run.save_steps) or beginning()
                    state, step, sequences = to_run(state), meta["step"], back["sequences"]
                    faults |= dict(bad_steps=back["bad_steps"], in_a_row=0, returns=faults["returns"] + 1, back=None)
                    say(f"warning: going back to step {step}, and on with the data after sequence {sequences:,} "
                        f"(return {faults['returns']} of {MOST_RETURNS})")  # fmt: skip
                    batches, interrupt.earlier = read_on(), 0  # what could not be read before may be skipped now
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
                signalled = interrupt.agreed(error)  # once: a signal that arrives from here on belongs to the next step
                stop = signalled or step == cfg.run.training_steps
                scheduled = step % cfg.run.checkpoint_steps == 0
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
        except UserError:  # of all processes, at the same step: storage failed; keep what was reached
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
    say(f"{'stopped' if signalled else 'done'} at step {step} after {duration(time.time() - started)}; "
        f"everything stands in {log.dir}{', and the same command goes on from here' if signalled else ''}")  # fmt: skip
    if checkpoints.saved != step:
        print(f"error: --output_dir {cfg.run.output_dir}: the last checkpoint, of step {step}, is not written; make "
              f"room, and the same command goes on from the one before.", file=sys.stderr, flush=True)  # fmt: skip
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
        interrupts.end(status, f"warning: --wandb: the upload takes too long; wandb sync {runs} goes on with it")
    return status


if __name__ == "__main__":
    sys.exit(utils.one_sentence(lambda: run(*cfg_given)))
