"""Runs in a bucket that fails at drawn moments, and are killed: they end as one on a local disk without faults."""

import contextlib
import os
import signal
import threading
import time

from tests.soak import buckets, jobs
from tests.soak.kills import undisturbed
from tests.soak.programs import BAD_ENDS, Case, start, wait

MOST_LIVES = 12  # of a run that ends with 75, or is killed, and is started again


def draw(rng):
    """(share of requests that fail, their faults, outages, numbers of requests after which the run is killed)."""
    share = rng.choice([0, 0.01, 0.03, 0.1])
    kinds = rng.sample(buckets.FLEETING, rng.randint(1, 3))
    outages = []
    for _ in range(rng.randint(0 if share else 1, 2)):
        kind = rng.choice(buckets.FAULTS)
        seconds = rng.choice([1, 4] if kind == 403 else [1, 4, 10])  # longer, a person must act
        outages.append((rng.uniform(0, 20), seconds, kind))
    kills = sorted(rng.randint(1, 250) for _ in range(rng.choice([0, 0, 1, 2])))
    return share, kinds, outages, kills


def kill_at(proxy, process, request):
    """Kill a process after that many requests, if it lives so long."""
    while process.poll() is None:
        if proxy.requests >= request:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return
        time.sleep(0.01)


def case(rng, sound, folder):
    whole, _ = undisturbed("train", sound, folder / "undisturbed")
    share, kinds, outages, kills = draw(rng)
    tried = f"{share:.0%} {kinds}, outages {outages}, killed after requests {kills}"
    proxy = buckets.Proxy(rng, share, kinds, outages)
    address = f"gs://bucket/{folder.name}"
    at, _ = jobs.places(sound, folder / "bucket", "train")
    words, work = jobs.train_words(at, address), folder / "bucket/work"
    lives = []
    while not lives or (lives[-1].status != 0 and len(lives) < MOST_LIVES):
        process = start(words, work, **buckets.environment(proxy.server_port))
        if kills:
            threading.Thread(
                target=kill_at, args=(proxy, process, kills.pop(0)), daemon=True
            ).start()
        ended = wait(process, work)
        lives.append(ended)
        if ended.status not in (0, 75, -signal.SIGKILL):
            return Case(tried, "bad end", f"status {ended.status}", ended)
        if any(words in ended.out + ended.err for words in BAD_ENDS):
            return Case(tried, "bad end", "traceback", ended)
    proxy.shutdown()
    if ended.status:
        return Case(tried, "no end", f"{MOST_LIVES} lives were not enough", ended)
    buckets.download(address, folder / "copy")
    buckets.remove(address)
    (config,) = (folder / "copy").rglob("config.json")
    result = jobs.result_of("train", config.parent.parent)
    wrong = None if result == whole[0] else f"{result!r:.400} instead of {whole[0]!r:.400}"
    return Case(tried, f"the same after {len(lives)} lives", wrong, ended)
