"""Traces of some steps by jax's profiler, for --profile. tools/trace.py reads them."""

import glob
import gzip
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax

import utils
from collectives import count_slices
from config import checks
from runtime.files import write_file, write_json
from runtime.messages import say
from runtime.outbox import attempt

FOLDER = "plugins/profile"  # of a run directory: where TensorBoard and xprof look
FAILED = "--profile: no trace is written"


def compiler_options(cfg):
    """Compiler options for a step: with --profile no graphs of kernels, which do not say what operations they are."""
    if cfg.run.profile and jax.default_backend() == "gpu":
        return dict(xla_gpu_graph_min_graph_size=2**31 - 1)
    return {}


class Profile:
    """Traces the steps of --profile, each process its own devices, and does nothing without that flag. The devices have
    done the step before when a trace begins; a thread writes it while training continues."""

    def __init__(self, cfg, step, train_step, wait):
        """step: the last one that was done before, where the run begins or resumes. train_step: compiled; wait() until
        the devices have done all that they were given."""
        self.cfg = cfg
        self.train_step = train_step
        self.wait = wait
        self.began = False  # the trace
        first, self.last = checks.profiled_steps(cfg.run)
        self.first = max(first, step + 1)
        self.done = 0  # the last step done
        self.local = None  # folder for the trace that is under way
        self.worker = ThreadPoolExecutor(1, "profile")
        if cfg.run.profile and self.first > self.last:
            say(f"--profile {cfg.run.profile}: step {step} is done already, so nothing is traced")
        name = f"steps-{self.first}-{self.last}"  # a run that does them again traces them again
        self.folder = os.path.join(cfg.run.folder, FOLDER, name)

    def start_if_due(self, step):
        """Begin the trace where `step` is its first."""
        if step != self.first or self.first > self.last or self.began:
            return
        self.wait()
        self.began = True
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a call of every function would slow the host
        local = tempfile.TemporaryDirectory(prefix="profile-")
        how = dict(create_perfetto_trace=True, profiler_options=options)
        if attempt(lambda: jax.profiler.start_trace(local.name, **how), FAILED):
            self.local = local

    def step_done(self, step):
        """The devices have done `step`; the trace ends with the last one of --profile."""
        self.done = step
        if step >= self.last:
            self.end()

    def end(self):
        """End the trace, if one is under way."""
        if self.local:
            local, done = self.local, self.done
            self.worker.submit(attempt, lambda: self.write(local, done), FAILED)
            self.local = None

    def close(self):
        """End the trace, if one is under way, and wait until it is written."""
        self.end()
        self.worker.shutdown(wait=True)

    def write(self, local, done):
        """Write the trace, up to the step `done`, into the run directory, under the name of this process."""
        jax.profiler.stop_trace()
        process = jax.process_index()
        kept = {"*.xplane.pb": "xplane.pb", "perfetto_trace.json.gz": "trace.json.gz"}
        with local:
            for pattern, ending in kept.items():
                [path] = glob.glob(f"{local.name}/**/{pattern}", recursive=True)
                with open(path, "rb") as f:
                    write_file(os.path.join(self.folder, f"process-{process}.{ending}"), f.read())
        if process:
            return
        program = gzip.compress(self.train_step.as_text().encode())
        write_file(os.path.join(self.folder, "step.hlo.gz"), program)
        devices = jax.devices()
        about = dict(
            steps=[self.first, done],
            written=time.time(),
            platform=devices[0].platform,
            device_kind=devices[0].device_kind,
            processes=jax.process_count(),
            slices=count_slices(devices),
            flags=utils.flatten(self.cfg),
        )
        write_json(os.path.join(self.folder, "about.json"), about)  # last: all else is there
        words = f"profile: steps {self.first} to {done} in {self.folder}"
        say(f"{words}; python tools/trace.py reads it")
