"""Speed, memory and compile time of the compiled train step, for one configuration or several side by side.

python tools/bench.py --preset tiny --vary remat=full remat=none [--json FILE]

Takes every flag of main.py and trains on random tokens, on one host. Each configuration runs in a process of its own.
On CPUs they take turns, a round of a few steps each, so that other load on the machine slows all of them alike.
"""

if __name__ == "__mp_main__":
    from tools import startup

    startup.prepare()
elif not __package__:
    import startup

    startup.prepare()

import math
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

import utils
from config import command_line, parser, settle
from config.flags import Found
from runtime import chips, interrupts, platforms
from runtime.files import check_writable, write_json
from runtime.messages import UserError
from tools import common


class CompiledStep:
    """main.py's train step of a configuration, compiled, with a state and a batch of random tokens to run it on."""

    def __init__(self, cfg):
        """Raises UserError. Sets `facts`, {name: value} about the step."""
        platforms.set_xla_flags(cfg.run.n_devices)  # before jax is imported
        import jax

        from logs import profiling
        from runtime.jax_setup import configure_jax
        from training.device_mesh import make_mesh
        from training.optimizer import hyperparameters, make_optimizer
        from training.train_state import abstract_state, init_state
        from training.train_step import lower_train_step

        platforms.find_devices()
        configure_jax(cfg)
        cfg = settle.validate(cfg, jax.device_count())
        mesh = make_mesh(cfg)
        optimizer = make_optimizer(cfg, mesh)
        abstract = abstract_state(cfg, mesh, optimizer)
        start = time.perf_counter()
        lowered = lower_train_step(cfg, mesh, abstract)
        self.step = lowered.compile(compiler_options=profiling.compiler_options(cfg))
        seconds = time.perf_counter() - start
        self.state = init_state(cfg, abstract, optimizer)
        self.inputs = *random_batch(cfg, mesh), hyperparameters(cfg, mesh)
        self.facts = facts_of(cfg, mesh, self.step) | dict(compile_seconds=seconds)

    def run(self, n):
        """Run n steps. Returns (wall seconds, CPU seconds, metrics of the last step)."""
        import jax

        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(n):
            self.state, metrics = self.step(self.state, *self.inputs)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - wall, time.process_time() - cpu, metrics


def facts_of(cfg, mesh, step):
    """{name: value} about a compiled step."""
    import model
    from training.sizes import tokens_per_step

    used = step.memory_analysis()
    new_outputs = used.output_size_in_bytes - used.alias_size_in_bytes
    return dict(
        device=mesh.devices.flat[0].device_kind,
        devices=mesh.size,
        tokens_per_step=tokens_per_step(cfg),
        flops_per_token=model.flops_per_token(cfg),
        model_dtype=cfg.model.model_dtype,
        compiler_bytes=used.argument_size_in_bytes + used.temp_size_in_bytes + new_outputs,
    )


def random_batch(cfg, mesh):
    """Global (tokens, targets) [accumulation, M, B, T] of random tokens, the same sequences on every mesh."""
    from dataset import put_batch
    from training.sizes import batch_shape

    *count, T = shape = batch_shape(cfg)
    random = np.random.default_rng(cfg.run.seed)
    rows = random.integers(0, cfg.model.vocab_size, (math.prod(count), T + 1), np.int32)
    return put_batch(rows.__getitem__, 0, shape, mesh)


def peak_bytes():
    """Peak memory: of the fullest device or, on CPUs, which do not report it, of this process."""
    import jax

    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(of_device["peak_bytes_in_use"] for of_device in stats)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def serve(pipe, cfg):
    """What the process of a configuration does. It sends the facts of its `CompiledStep`, or the UserError that it
    raises. For each number of steps that it receives, it runs them and sends (wall, CPU) seconds. For None it sends its
    peak memory, and ends.
    """
    try:
        compiled = CompiledStep(cfg)
    except UserError as e:
        pipe.send(e)
        return
    pipe.send(compiled.facts)
    while n := pipe.recv():
        pipe.send(compiled.run(n)[:2])
    pipe.send(peak_bytes())


class Server:
    """A process of its own that serves a configuration. Several compile at once, and then run steps one by one."""

    def __init__(self, cfg):
        spawn = multiprocessing.get_context("spawn")  # a fork would share what jax has started
        self.pipe, other_end = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other_end, cfg), daemon=True)
        self.process.start()
        other_end.close()  # so that the end of the process is the end of the pipe

    def receive(self):
        """What the process sends next. Raises UserError where it could not, or ended."""
        try:
            received = self.pipe.recv()
        except EOFError:
            words = "--vary: the process of a configuration died; see its output above."
            raise UserError(words) from None
        if isinstance(received, UserError):
            raise received
        return received

    def ask(self, question):
        """Send a number of steps, or None for the peak memory, and receive the answer."""
        with suppress(BrokenPipeError):  # `receive` says why
            self.pipe.send(question)
        return self.receive()

    def close(self):
        self.process.kill()
        self.process.join()


def measure(configurations, rounds, steps):
    """[dict of numbers] of [(name, Config)]: each quantity with a spread is [lower quartile, median, upper one]."""
    groups = [configurations]
    if platforms.platform() != "cpu":  # an accelerator's memory belongs to one process at a time
        groups = [[configuration] for configuration in configurations]
    rows = []
    for group in groups:
        with ExitStack() as servers_end:
            servers = []
            for _, cfg in group:
                servers.append(Server(cfg))
                servers_end.callback(servers[-1].close)
            facts = [server.receive() for server in servers]
            seconds = []  # [round, configuration, 2]
            for _ in range(1 + rounds):  # the first is the warm-up
                seconds.append([server.ask(steps) for server in servers])
            peaks = [server.ask(None) for server in servers]
        for i, (name, _) in enumerate(group):
            speeds = facts[i]["tokens_per_step"] * steps / np.array(seconds)[1:, i].T
            if not rows:
                first = speeds[0]
            rows.append(row(name, facts[i], speeds, first, peaks[i]))
    return rows


def quartiles(x):
    return np.percentile(x, (25, 50, 75)).tolist()


def row(name, facts, speeds, first, peak):
    """The numbers of a configuration. facts: of its `CompiledStep`. speeds: tokens per second and CPU second of each
    round; first: tokens per second of the first configuration."""
    speed, per_cpu_second = speeds
    mfu = None
    if chip := chips.chip_of(facts["device"]):
        peak = chip.peak_in(facts["model_dtype"]) * facts["devices"]
        mfu = quartiles(speed * facts["flops_per_token"] / peak)
    return facts | dict(
        name=name,
        rounds=len(speed),
        tokens_per_second=quartiles(speed),
        ratio=quartiles(speed / first),
        step_seconds=quartiles(facts["tokens_per_step"] / speed),
        tokens_per_cpu_second=quartiles(per_cpu_second),
        peak_bytes=peak,
        mfu=mfu,
    )


def cells(row):
    """{heading: text} of the table's line of a row."""
    speed, ratio = row["tokens_per_second"], row["ratio"]
    return {
        "configuration": row["name"],
        "tokens/s (quartiles)": f"{speed[1]:,.0f} ({speed[0]:,.0f}-{speed[2]:,.0f})",
        "x first": f"{ratio[1]:.2f} ({ratio[0]:.2f}-{ratio[2]:.2f})",
        "step ms": f"{1e3 * row['step_seconds'][1]:,.1f}",
        "tokens/CPU s": f"{row['tokens_per_cpu_second'][1]:,.0f}",
        "MFU": f"{row['mfu'][1]:.1%}" if row["mfu"] else "-",
        "peak GB": f"{row['peak_bytes'] / 1e9:.2f}",
        "compiler's GB": f"{row['compiler_bytes'] / 1e9:.3f}",
        "compile s": f"{row['compile_seconds']:.1f}",
    }


def machine():
    """{name: value} of where this runs."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*)", info.read_text() if info.exists() else "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return dict(cpu=cpu[1] if cpu else platform.machine(), cores=cores, jax=version("jax"))


@dataclass(frozen=True)
class Options:
    """Speed, memory and compile time of the compiled train step, for one configuration or several side by side.

    Flags of main.py are accepted too; python main.py --help all lists them.
    """

    vary: tuple[str, ...] = ()
    """A configuration each, by the flags that it has besides, such as remat=none "n_device_axis=2,2,2 n_devices=8"."""
    rounds: int = parser.flag(10, least=1)
    """Rounds of each configuration."""
    steps: int = parser.flag(5, least=1)
    """Training steps of a round."""
    json: str = ""
    """File to write the numbers to as well."""


def parse(argv):
    """Command line -> (own flags, [(name, Config)]). Raises UserError."""
    values, flags = parser.read_words(
        Options, argv, "tools/bench.py", others=utils.Config, hints=command_line.HINTS
    )
    own = Options(**values)
    configurations = []
    for variant in own.vary or [""]:
        words = re.sub(r"(\S+)", r"--\1", variant)  # "a=1,2 no_b" -> --a 1 2 --no_b
        given = command_line.parse([*flags, *re.findall(r"[^\s=,]+", words)])
        if given.cfg.plan.plan:
            raise UserError("bench.py runs steps; give the flag to main.py", flag="plan")
        given = given.with_defaults(compilation_cache="")  # compiling is measured, not reading
        # the devices are not known before jax is imported
        cfg = settle.settle_model(given, Found(0, device_kind=platforms.platform())).cfg
        configurations.append((variant or cfg.run.preset, cfg))
    return own, configurations


def main(argv):
    """Print the rows of `measure`."""
    own, configurations = parse(argv)
    check_writable(own.json, "json")
    where = machine()
    rows = measure(configurations, own.rounds, own.steps)
    first = rows[0]
    print(
        f"{first['devices']} x {first['device']}, {where['cores']} cores of {where['cpu']}, "
        f"{first['tokens_per_step']:,} tokens a step, {own.rounds} rounds of {own.steps} steps"
    )
    print(common.markdown(list(map(cells, rows))))
    if own.json:
        write_json(own.json, where | dict(configurations=rows))


if __name__ == "__main__":
    interrupts.run(lambda: main(sys.argv[1:]))
