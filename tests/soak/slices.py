"""A training run on slices that vanish at drawn moments, beside one that is left alone.

python -m tests.soak.slices --seed 1

main.py trains in an emulated bucket on hosts in network namespaces (tests/cloud.py), kept by launcher.sh --keep. gcloud
is slow, fails or loses answers, and the keeper is killed three times. It prints a row with the preemptions, and fails
unless the run ends with the bits and rows of the one that trains on a local disk, and nothing is left over. Needs root.
"""

import argparse
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cloud as clouds
from helpers import ROOT, wait_for
from small_models import given

from tests.soak import buckets, jobs, programs

SHARED = "JAX_PLATFORMS XLA_FLAGS JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS".split()
PREEMPTIONS, KILLS = 10, 3  # of slices, and of the keeper
STEPS = 400  # more than there are between the preemptions
# steps that take a while, so that moments lie between them
LARGER = given("""
    --model_dimension 32 --T 32 --eval_every 20 --save_steps 20 --keep_checkpoints 2 --train_batch_size 16
    --val_batch_size 16 --microbatches 2
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


def main():
    parser = argparse.ArgumentParser("python -m tests.soak.slices")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if why := clouds.lacks():
        sys.exit(why)
    rng = random.Random(f"slices {args.seed}")
    folder = Path(tempfile.mkdtemp(prefix="slices-"))
    at = {name: folder / "sound" / name for name in jobs.SOUND.split()}
    jobs.make_texts(folder / "sound")
    for job, place in (("ranks", folder / "sound"), ("tokenize", at["shards"])):
        ended = programs.run(jobs.words_of(job, at, place), folder / "work")
        assert ended.status == 0, ended
    alone = jobs.train_words(at, folder / "alone", STEPS, **LARGER)
    subprocess.run([sys.executable, *map(str, alone)], cwd=ROOT, check=True, capture_output=True)

    cloud = Cloud()
    passed = " ".join(cloud.environment)
    kept = clouds.Keeping(cloud, settings=f'{clouds.SETTINGS}PASS_ENV="{passed}"\n')
    kept.set()
    kept.home.mkdir()
    cloud.reset(faulty=0.1, seed=args.seed)
    cloud.plan = clouds.moments(rng, PREEMPTIONS, longest=1)
    buckets.upload(at["shards"], "gs://bucket/shards")
    flags = jobs.train_words(
        at | {"shards": "gs://bucket/shards"}, "gs://bucket/runs", STEPS, **LARGER
    )
    began = time.monotonic()
    words = ["--preset", "tiny", *map(str, flags[3:])]
    keeper = kept.keep(rng, KILLS, *words, **cloud.environment)
    seconds = time.monotonic() - began
    buckets.download("gs://bucket/runs", folder / "copy")
    (config,) = (folder / "copy").rglob("config.json")
    wait_for(lambda: not cloud.leftovers(), 60)
    runs = config.parent.parent, folder / "alone"
    ours, whole = [jobs.result_of("train", run, steps=STEPS) for run in runs]
    print(f"| {args.seed} | {', '.join(cloud.preemptions)} | {kept.summary()} |")
    print(f"{seconds:.0f} s; status {keeper.returncode}; the same bits and rows: {ours == whole}")
    said = kept.log()
    cloud.close()
    if keeper.returncode or ours != whole or len(cloud.preemptions) < PREEMPTIONS:
        print(said)
        sys.exit(f"its files are in {folder}: {shlex.join(map(str, flags))}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
