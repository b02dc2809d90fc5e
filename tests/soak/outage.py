"""One long run in a bucket under random faults, three kills and a move to another host, beside one without any.

python -m tests.soak.outage --seed 1 --minutes 20 --steps 10000

Each request fails with 5%; in every two minutes lies an outage of 30 seconds. It prints what that cost, and fails
unless the run ends with the bits and rows of the other one, which trains on a local disk. Needs to be root.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers import ROOT
from small_models import given

from tests.soak import buckets, jobs
from tests.soak.programs import BAD_ENDS

KILLS = 3
# larger than the soak's: steps that take a while, so that minutes make no millions of rows
LARGER = given("""
    --model_dimension 64 --T 64 --expert_dim 96 --ffn_dim 256 --latent_dim 32 --eval_every 100 --save_steps 100
    --keep_checkpoints 2 --train_batch_size 32 --val_batch_size 32 --microbatches 2
""")
MOVED = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh"]


def live(words, log, environment, until, is_moved):
    """Exit status of one life of a run, which is killed at `until`, by time.monotonic()."""
    program = [*(MOVED if is_moved else []), sys.executable, ROOT / words[0], *words[1:]]
    with open(log, "a") as f:
        out = dict(stdout=f, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        process = subprocess.Popen([*map(str, program)], **out)
        try:
            return process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def disturbed(rng, words, log, minutes):
    """Run main.py until it has reached its end; (the proxy, exit statuses of its lives, seconds)."""
    outages = []
    for begin in range(0, int(60 * minutes) * 3, 120):  # also while it makes up for them
        outages.append((begin + rng.uniform(0, 90), 30, rng.choice(buckets.FAULTS)))
    proxy = buckets.Proxy(rng, 0.05, buckets.FLEETING, outages)
    environment = buckets.environment(proxy.server_port)
    began = time.monotonic()
    kills = sorted(began + 60 * rng.uniform(0.1, 0.9) * minutes for _ in range(KILLS))
    statuses = []
    while not statuses or (statuses[-1] in (75, -9) and len(statuses) < 40):
        until = kills[0] if kills else began + 86400
        statuses.append(live(words, log, environment, until, is_moved=len(statuses) == 1))
        if statuses[-1] == -9:
            kills.pop(0)
        elif statuses[-1]:
            time.sleep(5)  # as tools/cluster/supervise.sh
    return proxy, statuses, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser("python -m tests.soak.outage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20, help="within which the kills lie")
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    rng = random.Random(f"outage {args.seed}")
    folder = Path(tempfile.mkdtemp(prefix="outage-"))
    at = {name: folder / "sound" / name for name in jobs.SOUND.split()}
    jobs.make(folder / "sound")

    def local(name, steps):
        began = time.monotonic()
        words = jobs.train_words(at, folder / name, steps, **LARGER)
        assert live(words, folder / f"{name}.log", {}, began + 86400, False) == 0, folder
        return time.monotonic() - began

    local("warm", 100)  # fills the cache of compiled programs
    steps = args.steps
    words = jobs.train_words(at, "gs://bucket/runs", steps, **LARGER)
    log = folder / "disturbed.log"
    with (
        ThreadPoolExecutor() as pool
    ):  # both at once: the machine is as busy for the one as for the other
        whole = pool.submit(local, "whole", steps)
        proxy, statuses, disturbed_seconds = disturbed(rng, words, log, args.minutes)
        seconds = whole.result()
    buckets.download("gs://bucket/runs", folder / "copy")
    (config,) = (folder / "copy").rglob("config.json")
    same = jobs.result_of("train", config.parent.parent, steps=steps) == jobs.result_of(
        "train", folder / "whole", steps=steps
    )
    said = log.read_text()
    print(f"seed {args.seed}: {steps} steps; lives ended with {statuses}")
    print(f"{proxy.requests} requests, {proxy.failed} failed; bytes sent {dict(proxy.sent)}")
    print(f"{seconds:.0f} s undisturbed on a local disk, {disturbed_seconds:.0f} s disturbed")
    print(f"{said.count('warning: ')} warnings, traceback: {any(w in said for w in BAD_ENDS)}")
    print(f"the same bits and rows: {same}", flush=True)
    if not same or statuses[-1]:
        sys.exit(f"its files are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
