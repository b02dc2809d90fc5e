"""Traces some steps with jax's profiler, for --profile. tools/trace.py reads the traces."""

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

FOLDER = "plugins/profile"  # in a run directory, where TensorBoard and xprof search for traces
FAILED = "--profile: no trace is written"


def compiler_options(cfg):
    """The compiler options of a step. With --profile on a GPU, kernels are not joined to CUDA graphs, since a trace of
    a graph does not name the operations in it."""
    if cfg.run.profile and jax.default_backend() == "gpu":
        return dict(xla_gpu_graph_min_graph_size=2**31 - 1)
    return {}


class Profile:
    """Traces the steps of --profile; without that flag it does nothing. Each process traces its own devices. A trace
    starts when the devices have finished the step before. A thread writes it while training continues."""

    def __init__(self, cfg, step, train_step, wait):
        """step: the last one before the run starts or resumes. train_step: the compiled step. wait(): returns when the
        devices have finished everything that they were given."""
        self.cfg = cfg
        self.train_step = train_step
        self.wait = wait
        self.is_started = False  # whether the trace was started
        first, self.last = checks.profiled_steps(cfg.run)
        self.first = max(first, step + 1)
        self.done = 0  # the last finished step
        self.local = None  # temporary folder of the trace while it is recorded
        self.worker = ThreadPoolExecutor(1, "profile")
        if cfg.run.profile and self.first > self.last:
            say(f"--profile {cfg.run.profile}: step {step} is done already, so nothing is traced")
        name = f"steps-{self.first}-{self.last}"  # if a run repeats these steps, the new trace replaces the old one
        self.folder = os.path.join(cfg.run.folder, FOLDER, name)

    def start_if_due(self, step):
        """Start the trace if `step` is its first one."""
        if step != self.first or self.first > self.last or self.is_started:
            return
        self.wait()
        self.is_started = True
        options = jax.profiler.ProfileOptions()
        # Recording every call of a Python function would slow the host.
        options.python_tracer_level = 0
        local = tempfile.TemporaryDirectory(prefix="profile-")
        settings = dict(create_perfetto_trace=True, profiler_options=options)
        if attempt(lambda: jax.profiler.start_trace(local.name, **settings), FAILED):
            self.local = local

    def step_done(self, step):
        """Record that the devices have finished `step`. After the last step of --profile the trace ends."""
        self.done = step
        if step >= self.last:
            self.end()

    def end(self):
        """End the trace if one is being recorded."""
        if self.local:
            # Bound here, since both attributes may change before the thread runs.
            local = self.local
            done = self.done
            self.worker.submit(attempt, lambda: self.write(local, done), FAILED)
            self.local = None

    def close(self):
        """End the trace if one is being recorded, and wait until it is written."""
        self.end()
        self.worker.shutdown(wait=True)

    def write(self, local, done):
        """Write the trace, which ends with the step `done`, into the run directory under the name of this process.
        Process 0 also writes the compiled program and a description."""
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
        description = dict(
            steps=[self.first, done],
            written=time.time(),
            platform=devices[0].platform,
            device_kind=devices[0].device_kind,
            processes=jax.process_count(),
            slices=count_slices(devices),
            flags=utils.flatten(self.cfg),
        )
        # Written last: where it is, all other files are too.
        write_json(os.path.join(self.folder, "about.json"), description)
        words = f"profile: steps {self.first} to {done} in {self.folder}"
        say(f"{words}; python tools/trace.py reads it")
