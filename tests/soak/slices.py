"""A training run on slices that vanish at drawn moments, beside one that is left alone.

python -m tests.soak.slices --seed 1 --preemptions 10

main.py trains in an emulated bucket on hosts in network namespaces (tests/cloud.py), kept by launcher.sh --keep. gcloud
is slow, fails or loses answers, and the keeper is killed three times. It prints each preemption, and fails unless the
run ends with the bits and rows of the one that trains on a local disk, and nothing is left over. Needs to be root.
"""

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cloud as clouds
from helpers import ROOT, wait_for
from small_models import given

from tests.soak import buckets, jobs

SHARED = "JAX_PLATFORMS XLA_FLAGS JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS".split()
KILLS = 3  # of the keeper
STEPS = 300
# steps that take a while, so that moments lie between them
LARGER = given("""
    --model_dimension 64 --T 64 --expert_dim 96 --ffn_dim 256 --latent_dim 32 --eval_every 10 --save_steps 20
    --keep_checkpoints 2 --train_batch_size 32 --val_batch_size 32 --microbatches 2
""")


class Uploads(buckets.Counted):
    """Of a proxy: knows when a checkpoint was last written to."""

    def behind(self, body):
        if self.command != "GET" and "checkpoints" in f"{self.path} {body[:999]!r}":
            self.server.saved = time.monotonic()
        return super().behind(body)


class Cloud(clouds.Cloud):
    """Hosts reach the bucket through a proxy on the bridge."""

    def __init__(self):
        super().__init__()
        address = f"10.213.{self.net}.1"
        self.proxy = buckets.Proxy(None, 0, (), (), address=address, handler=Uploads)
        self.proxy.saved = 0.0
        self.environment = buckets.environment(self.proxy.server_port, address)
        # as the run has it that is left alone
        self.environment |= {name: os.environ[name] for name in SHARED}

    def is_saving(self):
        return time.monotonic() < self.proxy.saved + 0.2


def moments(rng, n):
    kinds = "CREATING PROVISIONING setup running running running checkpoint".split()
    drawn = [rng.choice(kinds) for _ in range(n)]
    late = ("setup", "running")
    return [(kind, rng.uniform(0, 3) * (kind in late), rng.random() < 0.3) for kind in drawn]


def keep(rng, kept, words):
    """Keep the run to its end, through `KILLS` deaths of the keeper. Returns the exit status of the last one."""
    for life in range(KILLS + 1):
        keeper = kept.begin("--keep", *words, **kept.cloud.environment)
        left = len(kept.cloud.plan) * (KILLS - life) // (KILLS + 1)
        wait_for(lambda: keeper.poll() is not None or len(kept.cloud.plan) <= left, 3000)
        if life < KILLS and keeper.poll() is None:
            time.sleep(rng.uniform(0, 2))
            os.kill(kept.record["process"], signal.SIGKILL)
        if life < KILLS:
            keeper.communicate()
    said = "".join(keeper.communicate(timeout=3000))
    return keeper.returncode, said


def main():
    parser = argparse.ArgumentParser("python -m tests.soak.slices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preemptions", type=int, default=10)
    args = parser.parse_args()
    if why := clouds.lacks():
        sys.exit(why)
    rng = random.Random(f"slices {args.seed}")
    folder = Path(tempfile.mkdtemp(prefix="slices-"))
    at = {name: folder / "sound" / name for name in jobs.SOUND.split()}
    jobs.make(folder / "sound")
    alone = jobs.train_words(at, folder / "alone", STEPS, **LARGER)
    subprocess.run([sys.executable, *map(str, alone)], cwd=ROOT, check=True, capture_output=True)

    cloud = Cloud()
    passed = " ".join(cloud.environment)
    kept = clouds.Keeping(cloud, settings=f'{clouds.SETTINGS}PASS_ENV="{passed}"\n')
    kept.set()
    kept.home.mkdir()
    cloud.reset(faulty=0.1, seed=args.seed)
    cloud.plan = moments(rng, args.preemptions)
    buckets.upload(at["shards"], "gs://bucket/shards")
    flags = jobs.train_words(
        at | {"shards": "gs://bucket/shards"}, "gs://bucket/runs", STEPS, **LARGER
    )
    began = time.monotonic()
    status, said = keep(rng, kept, ["--preset", "tiny", *map(str, flags[3:])])
    seconds = time.monotonic() - began
    buckets.download("gs://bucket/runs", folder / "copy")
    (config,) = (folder / "copy").rglob("config.json")
    wait_for(lambda: not cloud.leftovers(), 60)
    runs = config.parent.parent, folder / "alone"
    ours, whole = [jobs.result_of("train", run, steps=STEPS) for run in runs]
    record = kept.record
    for number, moment in enumerate(cloud.preemptions, 1):
        print(f"seed {args.seed}, preemption {number}: {moment}")
    print(f"{record['lost']} slices lost, {record['starts']} starts, {KILLS} kills of the keeper")
    print(f"{seconds:.0f} s; status {status}; the same bits and rows: {ours == whole}")
    cloud.close()
    if status or ours != whole or len(cloud.preemptions) < args.preemptions:
        print(said)
        sys.exit(f"its files are in {folder}: {shlex.join(map(str, flags))}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
