"""Programs killed at drawn moments: the same command, run again, ends as if nothing had happened."""

import contextlib
import os
import re
import signal
import time

from tests.soak import jobs
from tests.soak.programs import Case, complaint, leftovers, run, start, wait

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
JOBS = "tokenize_source workers_source ranks_source export import train train resume".split()


def state_of(folder):
    """What tells that a file of a folder was changed."""
    found = set()
    with contextlib.suppress(OSError):  # of what has just gone
        for path in folder.rglob("*"):
            stat = path.lstat()
            found.add((path, stat.st_mtime_ns, stat.st_size))
    return found


def watch(process, place, most=float("inf")):
    """Number of changes of a folder, until the program ends or it is `most`."""
    seen, count = state_of(place), 0
    while count < most and process.poll() is None:
        now = state_of(place)
        count += now != seen
        seen = now
        time.sleep(0.004)
    return count


def made(job, place):
    """(what a job made, the names of all files), without times and what is drawn at random."""
    names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    names = {re.sub(r"\b[0-9a-f]{32}\b", "HASH", name) for name in names}
    if job in ("train", "resume"):
        # a stopped run has checkpoints that another has not, and Orbax's files are cut as it likes
        names = {name for name in names if "/checkpoints/" not in name or "tmp" in name}
    # that of a process killed after its work stays; the next one takes it over
    names = {name for name in names if not name.startswith("lock/")}
    return jobs.result_of(job, place), sorted(names)


UNDISTURBED = {}  # {job: (what it makes, changes of its files)}


def undisturbed(job, sound, folder):
    if job not in UNDISTURBED:
        at, place = jobs.places(sound, folder, job)
        process = start(jobs.words_of(job, at, place), folder / "work")
        changes = watch(process, place)
        ended = wait(process, folder / "work")
        assert ended.status == 0, ended
        UNDISTURBED[job] = made(job, place), changes
    return UNDISTURBED[job]


def case(rng, sound, folder):
    job = rng.choice(JOBS)
    whole, changes = undisturbed(job, sound, folder / "undisturbed")
    change = rng.randint(1, max(1, changes))  # the first shows that the program handles signals
    number = rng.choice(SIGNALS)
    to_all = rng.random() < 0.5  # as a terminal does, to its workers too
    tried = f"{job}: {number.name} {'to all ' if to_all else ''}after change {change}"
    at, place = jobs.places(sound, folder / "killed", job)
    words, work = jobs.words_of(job, at, place), folder / "killed/work"
    process = start(words, work)
    watch(process, place, change)
    time.sleep(rng.choice([0, rng.uniform(0, 0.2)]))
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if to_all else os.kill)(process.pid, number)
    killed = wait(process, work)
    # jax has an end of its own where another process was lost
    its_end = killed.status == -number or "service detected fatal errors" in killed.err
    if wrong := not its_end and complaint(killed, (0, 2, 128 + number)):
        return Case(tried, "bad end", wrong, killed)
    ended = run(words, work)
    there = job in ("export", "import") and "exists already" in ended.err
    if ended.status and not there:
        return Case(tried, "not resumed", complaint(ended, (0,)), ended)
    again = made(job, place)
    wrong = leftovers(place) if again == whole else f"{again!r:.400} instead of {whole!r:.400}"
    return Case(tried, "the same" if killed.status else "too late", wrong, ended)
