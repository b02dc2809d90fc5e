"""Check how well this machine trains: one command, ten minutes, one page to attach to a report.

python tools/check_machine.py

It needs neither data nor flags, and runs on one host. The page is rewritten after each check.
"""

if not __package__:
    import startup

    startup.prepare()

import contextlib
import math
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import utils
from config import parser
from runtime import installation, interrupts, platforms
from runtime.files import check_writable, names_in, read_json, write_file, write_json
from runtime.messages import UserError, first_line, one_sentence, say
from tools import bench, common


@dataclass(frozen=True)
class Options:
    """Check this machine, and write a page about it."""

    out: str = "machine-report"
    """Folder for the page (report.md), the same as report.json, and a trace."""
    only: tuple[str, ...] = ()
    """Beginnings of the names of checks: only these run. The names begin with kernel, collective, resume, model, step
    or flag."""
    minutes: float = parser.flag(10.0, least=0.1)
    """Minutes for all checks. Checks that would start too late are skipped."""
    n_devices: int = utils.Run.n_devices
    """Devices to simulate where there is no accelerator; 0: one."""


if __name__ == "__main__":
    options_given = common.read_options(Options, "tools/check_machine.py")

import jax
import numpy as np

import model
from config import settle
from config.presets import PRESETS, preset
from kernels import attention
from logs.profiling import Profile
from planning import machines
from planning.advice import WAYS, with_flags
from planning.plan import make_plan, memory_share
from tools import machine_checks as checks
from tools import trace
from tools.machine_checks import Skipped, Wrong

PACKAGES = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin nvidia-nccl-cu12 libtpu"
LATEST = {"model": 0.5, "flag": 0.8}  # share of --minutes after which no such check is started
LONG = 2.0  # planned seconds of a step; the batch of a longer one is halved
# After a first step, a measurement is ROUNDS times STEPS steps.
ROUNDS = 5
STEPS = 2


def presets_that_fit(devices):
    """Yield the validated Configs of presets that fit in memory by the plan, the largest first, with batches small
    enough for short steps."""
    machine = machines.machine_of(devices)
    found = []
    for name in ["tiny"] if devices[0].platform == "cpu" else PRESETS:
        cfg = preset(name)
        if cfg.model.model_dtype == "bfloat16":
            cfg = utils.replace(cfg, model_dtype=machine.chip.dtype)
        # a preset that does not divide over these devices is left out
        with contextlib.suppress(UserError):
            cfg = shrink_batch(settle.validate(cfg, len(devices)), machine)
            found.append((model.count_params(cfg)[0], name, cfg))
    for _, _, cfg in sorted(found, reverse=True):
        if memory_share(cfg, machine) <= 1:
            yield cfg


def shrink_batch(cfg, machine):
    """Halve the microbatches of `cfg` until its planned step is no longer than LONG; on a CPU, as often as possible."""
    d = cfg.data
    is_long = machine.platform == "cpu" or make_plan(cfg, machine).step > LONG
    if d.microbatches % 2 or not is_long:
        return cfg
    batches = "global_batch_size", "train_batch_size", "val_batch_size", "microbatches"
    half = {flag: getattr(d, flag) // 2 for flag in batches}
    return shrink_batch(utils.replace(cfg, **half), machine)


class Step:
    """Checks of the train step of the largest preset that fits, and their results for the page."""

    def __init__(self, out):
        self.out = out
        self.machine = machines.machine_of(jax.devices())
        self.presets = presets_that_fit(jax.devices())
        self.cfg = None
        self.compiled = None  # the step that was measured last
        self.rows = []  # from bench.row; the first has the preset's own flags
        self.report = ""  # of the trace, beside the plan

    def measure(self):
        """Measure the step of the largest preset that has not been tried."""
        if self.rows:
            raise Skipped("a larger one was measured")
        self.cfg = next(self.presets, None)
        if not self.cfg:
            raise Skipped("no preset fits by the plan")
        row = self.run(self.cfg.run.preset, self.cfg)
        seconds, tokens = row["step_seconds"][1], row["tokens_per_step"]
        return f"{self.cfg.run.preset}: {seconds:.4f} s for {tokens:,} tokens"

    def run(self, name, cfg):
        """Measure the step of a configuration. Returns its row. Raises `Wrong` where the loss is not finite."""
        step = self.compile(cfg)
        *_, metrics = step.run(1)
        if not math.isfinite(metrics["loss/train_loss"]):
            raise Wrong("the loss of the first step is not finite")
        seconds = np.transpose([step.run(STEPS)[:2] for _ in range(ROUNDS)])
        speeds = step.facts["tokens_per_step"] * STEPS / seconds
        first = self.rows[0]["tokens_per_second"][1] if self.rows else np.median(speeds[0])
        row = bench.row(name, step.facts, speeds, first, bench.peak_bytes())
        self.rows.append(row)
        return row

    def compile(self, cfg):
        """The `bench.CompiledStep` of a configuration. The one before is freed first, since the devices have memory for
        one."""
        self.compiled = None
        self.compiled = bench.CompiledStep(utils.replace(cfg, compilation_cache=""))
        return self.compiled

    def require_step(self):
        """Raises `Skipped` where no step was measured."""
        if not self.rows:
            raise Skipped("no step was measured")

    def profile(self):
        """Trace three steps, and report where their time went."""
        self.require_step()
        cfg = utils.replace(self.cfg, profile="1:3", output_dir=self.out, name="step")
        compiled = self.compile(cfg)
        compiled.run(1)  # not traced: the first step is slower
        profile = Profile(cfg, 0, compiled.step, lambda: None)
        profile.start_if_due(1)
        compiled.run(3)
        profile.step_done(3)
        profile.close()
        opened = trace.open_trace(cfg.run.folder)
        found = trace.Shares(opened)
        self.report = trace.report(opened, found)
        return f"{found.step:.4f} s of a device in a step"

    def halve_microbatches(self):
        """Measure the step with half as many microbatches."""
        self.require_step()
        half = self.cfg.data.microbatches // 2
        if not half:
            raise Skipped("there is one")
        return self.measure_with("microbatches", half)

    def measure_with(self, flag, value):
        """Measure the step with another value of one flag."""
        self.require_step()
        if utils.flatten(self.cfg)[flag] == value:
            raise Skipped("the step has it")
        cfg = with_flags(self.cfg, self.machine.n, **{flag: value})
        if not cfg:
            raise Skipped(f"{value} does not go with the other flags")
        if memory_share(cfg, self.machine) > 1:
            raise Skipped("it does not fit by the plan")
        row = self.run(f"--{flag} {value}", cfg)
        return f"{row['ratio'][1]:.2f} x the speed of the preset's own flags"


def checks_of(step):
    """{name: check}, in the order in which they run."""
    n = 1 << jax.device_count().bit_length() - 1  # a power of two, so that it divides into meshes
    meshes = checks.all_meshes(n)
    found = {}
    for name in attention.ATTENTION:
        if name != "xla":
            found[f"kernel attention {name}"] = partial(checks.check_attention, name)
    found["kernel loss"] = checks.check_loss
    found["kernel grouped"] = checks.check_grouped
    for name, (axes, *_) in checks.list_collectives(n).items():
        along = "+".join(axes)
        found[f"collective {name} over {along}"] = partial(checks.check_collective, name, n)
    found["resume"] = partial(checks.check_resume, n, meshes[0])
    for mesh in meshes:
        for name in checks.MODELS:
            place = "x".join(map(str, mesh))
            found[f"model {name} on {place}"] = partial(checks.check_model, name, n, mesh)
    found["step"] = step.measure
    # runs only where the first one failed, as when the plan took too large a preset to fit
    found["step of a smaller preset"] = step.measure
    found["step and its trace"] = step.profile
    found["flag --microbatches"] = step.halve_microbatches
    for flag in ("remat", "fsdp"):
        for value in WAYS[flag]:
            found[f"flag --{flag} {value}"] = partial(step.measure_with, flag, value)
    return found


class Report:
    """The results of the checks, and the page about them."""

    def __init__(self, options, step):
        self.options = options
        self.step = step
        self.machine = machine()
        self.began = time.monotonic()
        self.rows = []  # one of each check
        self.whole = False

    def run(self, name, check):
        """Run a check. It fails with whatever it raises, except for `Skipped`."""
        row = dict(check=name, verdict="did not end", found="", seconds=0.0, traceback="")
        self.rows.append(row)
        self.write()
        began = time.monotonic()
        # undo what an earlier check has set
        jax.config.update("jax_default_matmul_precision", None)
        try:
            share = LATEST.get(name.split()[0], 1)
            if began - self.began > 60 * self.options.minutes * share:
                raise Skipped(f"--minutes {self.options.minutes:g} leaves no time for it")
            row.update(found=check(), verdict="passed")
        except Skipped as e:
            row.update(found=str(e), verdict="skipped")
        except Exception as e:  # a faulty machine may make the libraries raise anything
            row.update(found=f"{type(e).__name__}: {first_line(e)}", verdict="FAILED")
            row["traceback"] = traceback.format_exc()
        row["seconds"] = round(time.monotonic() - began, 1)
        say(f"{row['verdict']:<7} {name}: {row['found']} ({row['seconds']} s)")

    def verdict(self):
        """The verdict in one line, the first of the page."""
        counts = Counter(row["verdict"] for row in self.rows)
        words = f"{counts['passed']} checks passed, {counts['skipped']} skipped"
        if counts["FAILED"]:
            failed = [row["check"] for row in self.rows if row["verdict"] == "FAILED"]
            words = f"FAILED: {', '.join(failed)}; {words}"
        return words if self.whole else f"not finished; {words}"

    def write(self):
        """Write report.json, and the same as report.md."""
        step = self.step
        content = dict(verdict=self.verdict(), machine=self.machine, checks=self.rows)
        content |= dict(configurations=step.rows, trace=step.report)
        write_json(f"{self.options.out}/report.json", content)
        parts = [f"# Machine check: {self.verdict()}"]
        parts.append("\n".join(f"- {name}: {value}" for name, value in self.machine.items()))
        parts.append("Attach this page and report.json to an issue, whatever the verdict is.")
        if step.rows:
            parts += ["## Train steps", common.markdown(list(map(bench.cells, step.rows)))]
            parts.append("(On accelerators peak GB is the largest of all steps so far.)")
        if step.report:
            parts.append(step.report)
        shown = ("check", "verdict", "found", "seconds")
        rows = [{key: str(row[key]).replace("|", "/") for key in shown} for row in self.rows]
        parts += ["## Checks", common.markdown(rows)]
        write_file(f"{self.options.out}/report.md", "\n\n".join(parts) + "\n")


def machine():
    """{fact: value} about this machine, in words."""
    devices = jax.devices()
    here = bench.machine()
    versions = [f"Python {sys.version.split()[0]}"]
    for package in PACKAGES.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return {
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "host": f"{here['cores']} cores of {here['cpu']}",
        "versions": ", ".join(versions),
        "driver": first_line(devices[0].client.platform_version),
        "commit": installation.commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def main(options):
    """Run the checks and write the page. Returns 1 where one failed, else 0."""
    check_writable(f"{options.out}/report.md", "out")
    if names_in(options.out) and "verdict" not in read_json(options.out, "report.json"):
        raise UserError("holds files of others; give another folder", flag="out", value=options.out)
    platforms.find_devices()
    step = Step(options.out)
    found = checks_of(step)
    if options.only:
        found = {name: check for name, check in found.items() if name.startswith(options.only)}
    if not found:
        raise UserError("no check's name begins so", flag="only", value=" ".join(options.only))
    report = Report(options, step)
    for name, check in found.items():
        report.run(name, check)
    report.whole = True
    report.write()
    say(f"{report.verdict()}; {options.out}/report.md has all of it")
    return int("FAILED" in report.verdict())


if __name__ == "__main__":
    # a signal ends the program at once, since the devices may hang
    words = f"interrupted; {options_given.out}/report.md has what was found until then"
    interrupts.watch(lambda number: interrupts.end(128 + number, words))
    sys.exit(one_sentence(lambda: main(options_given)))
