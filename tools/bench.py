"""Speed, memory and compile time of the compiled train step, for one configuration or several side by side.

python tools/bench.py --preset tiny --vary remat=full remat=none [--json FILE]
python tools/bench.py --preset gpt2-tiny --compare                            (needs pip install torch)

Takes every flag of main.py and trains on random tokens, on one host. Each configuration runs in a process of its own,
as main.py would run it. They take turns, a round of a few steps each, so that other load on the machine slows all of
them alike. The first round of each is not counted. Speeds are medians over rounds, with their quartiles.
"""

if __name__ in ("__main__", "__mp_main__"):
    import program

    program.begin()

import contextlib
import importlib.util
import math
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

import utils
from runtime import chips, parser, platforms
from runtime.files import check_place, to_json, write_file
from runtime.messages import UserError
from tools import common
from training import command_line, settings

# --- One configuration, in a process of its own -----------------------------------------------------------------


def cores():
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_rss():
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def prepare(cfg):
    """Compile main.py's train step: ({name: value} about it, `run(steps)` that returns when the devices have done them,
    `peak()` in bytes). Raises UserError."""
    platforms.set_xla_flags(cfg.run.n_devices)  # before jax is imported
    import jax

    from training import steps
    from training.optimizer import make_optimizer

    steps.configure_jax(cfg)
    cfg = settings.validate(cfg, jax.device_count())
    mesh = steps.make_mesh(cfg)
    optimizer, schedule = make_optimizer(cfg, mesh)
    abstract = steps.abstract_state(cfg, mesh, optimizer)
    state = steps.init_state(cfg, abstract, optimizer)
    batch = random_batch(cfg, mesh)
    began, began_cpu = time.perf_counter(), time.process_time()
    step = steps.lower_train_step(cfg, mesh, optimizer, schedule, abstract).compile()
    about = about_step(cfg, mesh, step.memory_analysis())
    about["compile_seconds"] = time.perf_counter() - began
    about["compile_cpu_seconds"] = time.process_time() - began_cpu

    def run(steps):
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, *batch)
        jax.block_until_ready((state, metrics))

    def peak():
        stats = [device.memory_stats() for device in mesh.devices.flat]
        if not all(stats):  # CPUs tell none
            return peak_rss()
        return max(of_device["peak_bytes_in_use"] for of_device in stats)

    return about, run, peak


def random_batch(cfg, mesh):
    """Global (tokens, targets) of a step, random ones."""
    import dataset
    from training import steps

    shape = steps.batch_shape(cfg)
    *count, T = shape
    random = np.random.default_rng(cfg.run.seed)
    rows = random.integers(0, cfg.model.vocab_size, (math.prod(count), T + 1))
    return dataset.put_batch(lambda numbers: rows[numbers].astype(np.int32), 0, shape, mesh)


def about_step(cfg, mesh, used):
    """{name: value} of a train step; `used`: what the compiler says of its memory."""
    import model
    from training import steps

    compiler_bytes = used.argument_size_in_bytes + used.output_size_in_bytes
    compiler_bytes += used.temp_size_in_bytes - used.alias_size_in_bytes
    return dict(
        device=mesh.devices.flat[0].device_kind,
        devices=mesh.size,
        tokens_per_step=math.prod(steps.batch_shape(cfg)),
        flops_per_token=model.flops_per_token(cfg),
        compiler_bytes=compiler_bytes,
    )


def prepare_torch(cfg, flops_per_token):
    """The same of tools/torch_baseline.py."""
    from tools import torch_baseline

    about, run, peak = torch_baseline.prepare(cfg, cores())
    return about | dict(flops_per_token=flops_per_token), run, peak or peak_rss


def serve(pipe, prepare, *args):
    """The process of one configuration. Sends what is known about it. Then answers every number of steps with the
    (wall, CPU) seconds that they took, and 0 with the peak memory in bytes."""
    with contextlib.suppress(KeyboardInterrupt, EOFError):  # the program ends, in whichever way
        try:
            about, run, peak = prepare(*args)
        except UserError as e:
            pipe.send(e)
            return
        pipe.send(about)
        while steps := pipe.recv():
            wall, cpu = time.perf_counter(), time.process_time()
            run(steps)
            pipe.send((time.perf_counter() - wall, time.process_time() - cpu))
        pipe.send(peak())


class Configuration(NamedTuple):
    """What is measured: a name, and the function with its arguments that prepares it in a process of its own."""

    name: str
    prepare: tuple  # (function, arguments...)


class Worker:
    """The process of a Configuration. Raises UserError where it ends before its time."""

    def __init__(self, configuration):
        self.name = configuration.name
        spawn = multiprocessing.get_context("spawn")  # a fork would share what jax and torch began
        self.pipe, theirs = spawn.Pipe()
        args = (theirs, *configuration.prepare)
        self.process = spawn.Process(target=serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.about = self.answer()
        self.rounds = []  # (wall, CPU) seconds
        print(f"{self.name}: ready to run", file=sys.stderr, flush=True)

    def answer(self):
        try:
            said = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise UserError(
                f"{self.name}: its process ended with status {self.process.exitcode}; its output stands above."
            ) from None
        if isinstance(said, UserError):
            raise said
        return said

    def ask(self, steps):
        self.pipe.send(steps)
        return self.answer()


# --- All of them ------------------------------------------------------------------------------------------------


def measure(configurations, rounds, steps):
    """[dict of numbers] of the configurations: each quantity with a spread is [lower quartile, median, upper one]."""
    groups = [configurations]
    if platforms.platform() == "tpu":  # it belongs to one process at a time
        groups = [[configuration] for configuration in configurations]
    if platforms.platform() == "gpu":  # its memory is shared; jax alone takes three quarters
        share = min(0.75, 0.9 / len(configurations))
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.3f}")
    workers = []
    for group in groups:
        workers += run_rounds(group, rounds, steps)
    return [row(worker, workers[0], steps) for worker in workers]


def run_rounds(group, rounds, steps):
    """[Worker] of configurations that run at the same time, when they have ended; one round is the warm-up."""
    workers = [Worker(configuration) for configuration in group]
    for _ in range(1 + rounds):
        for worker in workers:
            worker.rounds.append(worker.ask(steps))
    for worker in workers:
        worker.peak = worker.ask(0)
        worker.process.join()
    return workers


def speeds(worker, steps):
    """[2, rounds] tokens per second and per CPU second, without the warm-up."""
    seconds = np.array(worker.rounds[1:]).T
    return worker.about["tokens_per_step"] * steps / seconds


def quartiles(x):
    return np.percentile(x, (25, 50, 75)).tolist()


def row(worker, first, steps):
    """The numbers of one Worker, beside those of the first."""
    about = worker.about
    speed, per_cpu_second = speeds(worker, steps)
    speed_of_first, _ = speeds(first, steps)
    mfu = None
    if peak := chips.peak_flops(about["device"]):
        mfu = quartiles(speed * about["flops_per_token"] / peak / about["devices"])
    return dict(
        name=worker.name,
        **about,
        rounds=len(speed),
        steps_per_round=steps,
        tokens_per_second=quartiles(speed),
        ratio=quartiles(speed / speed_of_first),
        step_seconds=quartiles(about["tokens_per_step"] / speed),
        tokens_per_cpu_second=quartiles(per_cpu_second),
        peak_bytes=worker.peak,
        mfu=mfu,
    )


COLUMNS = {  # heading: cell
    "configuration": lambda r: r["name"],
    "tokens/s (quartiles)": lambda r: "{1:,.0f} ({0:,.0f}-{2:,.0f})".format(
        *r["tokens_per_second"]
    ),
    "x first": lambda r: "{1:.2f} ({0:.2f}-{2:.2f})".format(*r["ratio"]),
    "step ms": lambda r: f"{1e3 * r['step_seconds'][1]:,.1f}",
    "tokens/CPU s": lambda r: f"{r['tokens_per_cpu_second'][1]:,.0f}",
    "MFU": lambda r: f"{r['mfu'][1]:.1%}" if r["mfu"] else "-",
    "peak GB": lambda r: f"{r['peak_bytes'] / 1e9:.2f}",
    "compiler's GB": lambda r: f"{r['compiler_bytes'] / 1e9:.3f}" if r["compiler_bytes"] else "-",
    "compile s (CPU s)": lambda r: (
        "{compile_seconds:.1f} ({compile_cpu_seconds:.1f})".format(**r)
        if r["compile_seconds"]
        else "-"
    ),
}


def machine():
    """{name: value} of where this runs."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*)", info.read_text() if info.exists() else "")
    versions = {}
    for name in ("jax", "jaxlib", "torch"):
        if importlib.util.find_spec(name):
            versions[name] = version(name)
    return dict(cpu=cpu[1] if cpu else platform.machine(), cores=cores(), versions=versions)


# --- The command line -------------------------------------------------------------------------------------------


def words(variant):
    """Command-line words of a variant: "a=1,2 no_b" -> --a 1 2 --no_b."""
    out = []
    for part in variant.split():
        flag, _, values = part.partition("=")
        out += [f"--{flag}", *filter(None, values.split(","))]
    return out


@dataclass(frozen=True)
class Options:
    """Speed, memory and compile time of the compiled train step, for one configuration or several side by side."""

    vary: tuple[str, ...] = ()
    """A configuration each, by the flags that it has besides, such as remat=none "n_device_axis=2,2,2 n_devices=8"."""
    rounds: int = parser.flag(10, least=1)
    """Rounds of each configuration."""
    steps: int = parser.flag(5, least=1)
    """Training steps of a round."""
    compare: bool = False
    """Beside each configuration, which must be a GPT-2 on one device, the same in torch (tools/torch_baseline.py)."""
    json: str = ""
    """File to write the numbers to as well."""


def parse(argv):
    """Command line -> (own flags, Configurations). Raises UserError."""
    own, flags = utils.read_own_flags(Options, argv, "tools/bench.py")
    configurations = []
    for variant in own.vary or [""]:
        configurations += configurations_of(own, variant, [*flags, *words(variant)])
    return own, configurations


def configurations_of(own, variant, line):
    """[Configuration] of one variant, whose flags are `line`, and with --compare that of its baseline."""
    for word in line:
        if re.match("--(plan|search)", word):
            raise UserError(f"{word}: here steps are run, not planned; give the flag to main.py.")
    # what is measured is compiling, not reading
    flags = settings.follow(command_line.parse(line).follow(compilation_cache=""))
    name, cfg = variant or flags.cfg.run.preset, flags.cfg
    # the validation batch is no part of the step: any that fits will do
    cfg = utils.replace(cfg, val_batch_size=cfg.data.microbatches)
    if not own.compare:
        return [Configuration(name, (prepare, cfg))]
    cfg = comparable(cfg)
    import model  # and with it jax, which otherwise only the configurations' processes need

    flops = model.flops_per_token(cfg)
    return [
        Configuration(name, (prepare, cfg)),
        Configuration(f"{name}, torch", (prepare_torch, cfg, flops)),
    ]


def comparable(cfg):
    """`cfg` on one device. Raises UserError where tools/torch_baseline.py cannot train the same model."""
    if not importlib.util.find_spec("torch"):
        raise UserError("--compare: torch is not installed; pip install torch brings it.")
    if cfg.model.architecture != "gpt2":
        raise UserError("--compare: the baseline is a GPT-2; give --preset gpt2-tiny or gpt2-124m.")
    if cfg.model.dropout_rate or cfg.model.document_mask or not cfg.model.tied:
        raise UserError(
            "--compare: the baseline has no --dropout_rate, no --document_mask and a tied head."
        )
    if platforms.platform() == "tpu":
        raise UserError(
            "--compare: the baseline runs on a GPU or a CPU; JAX_PLATFORMS=cpu takes the latter."
        )
    if cfg.run.n_devices > 1:
        raise UserError(
            f"--n_devices {cfg.run.n_devices}: with --compare it must be 1, as the baseline's is."
        )
    return settings.validate(utils.replace(cfg, n_devices=1), 1)


def main(argv):
    """Print and return the rows of `measure`."""
    own, configurations = parse(argv)
    if own.json:
        check_place(own.json, "--json")
    where = machine()
    rows = measure(configurations, own.rounds, own.steps)
    first = rows[0]
    print(
        f"{first['devices']} x {first['device']}, {where['cores']} cores of {where['cpu']}, "
        f"{first['tokens_per_step']:,} tokens a step, {own.rounds} rounds of {own.steps} steps"
    )
    cells = [[cell(row) for cell in COLUMNS.values()] for row in rows]
    print("\n".join(common.markdown(list(COLUMNS), cells)))
    if own.json:
        content = where | dict(configurations=rows)
        write_file(own.json, to_json(content, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    common.run(lambda: main(sys.argv[1:]))
