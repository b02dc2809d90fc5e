"""Programs killed at drawn moments: the same command, run again, ends as if nothing had happened."""

import contextlib
import os
import re
import signal
import time
from typing import NamedTuple

from tests.soak import jobs
from tests.soak.programs import Case, Program, complaint, leftovers

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
GRACE = 15  # seconds after a kill within which workers must have ended too
WEIGHTS = dict(tokenize_many=4, workers_many=4, ranks_many=2, export=4, prune=4, train=8)
WEIGHTS |= {"import": 3, "resume": 4}


class Kill(NamedTuple):
    """When a program ends, and how.

    change: number of the change in its files after which. signals: one or two, `pause` seconds apart. to_all: to its
    workers too.
    """

    change: int
    delay: float
    signals: list
    pause: float
    to_all: bool


def draw(rng, changes):
    """A Kill of a program whose files change `changes` times."""
    return Kill(
        change=rng.randrange(max(1, changes)),
        delay=rng.choice([0, 0, rng.uniform(0, 0.01), rng.uniform(0, 0.2)]),
        signals=rng.choices(SIGNALS, k=rng.choice([1, 1, 1, 2])),
        pause=rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)]),
        to_all=rng.random() < 0.5,
    )


def state_of(folder):
    """What tells that a file of a folder was changed."""
    found = []
    for parent, folders, files in os.walk(folder):  # which passes over what has just gone
        for name in folders + files:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                stat = os.lstat(path)
                found.append((path, stat.st_mtime_ns, stat.st_size))
    return sorted(found)


def watch(program, place, most=float("inf")):
    """Number of changes of a folder, until the program ends or it is `most`."""
    seen, count = state_of(place), 0
    while count < most and program.runs():
        now = state_of(place)
        count += now != seen
        seen = now
        time.sleep(0.004)
    return count


def start(job, at, out):
    return Program(jobs.words_of(job, at, out), out.parent / "work")


def strike(kill, program, place):
    """Let a Kill happen to a program."""
    watch(program, place, kill.change)
    time.sleep(kill.delay)
    while program.runs() and not program.listens():
        time.sleep(0.001)
    for number in kill.signals:
        if program.runs():
            program.send(number, kill.to_all)
        time.sleep(kill.pause)


def made(job, at, out, place):
    """(what a job made, the names of all files), without times and what is drawn at random."""
    names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    names = {re.sub(r"\b[0-9a-f]{32}\b", "HASH", name) for name in names}
    if job in ("train", "resume"):
        # a stopped run has checkpoints that another has not, and Orbax's files are cut as it likes
        names = {name for name in names if "/checkpoints/" not in name or "tmp" in name}
    names.discard("lock")  # of a process killed after its work; the next one takes it over
    return jobs.result_of(job, at, out), sorted(names)


def wrong_after(kill, ended):
    """What is wrong with how a program ended after a Kill, or None."""
    if ended.orphans:
        return f"{ended.orphans} processes outlive it"
    if "JAX distributed service detected fatal errors" in ended.err:
        return None  # jax's own end where another process was lost
    if ended.status is not None and ended.status < 0:
        return None if -ended.status in kill.signals else f"ended by signal {-ended.status}"
    wrong = complaint(ended, (0, 2, *(128 + n for n in kill.signals)))
    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    if not wrong and len(lines) > 1:
        return f"{len(lines)} lines on stderr"
    return wrong


def difference(whole, again):
    """In words, how what a job made differs from what it makes undisturbed; None where it does not."""
    (result, names), (result_again, names_again) = whole, again
    if result != result_again:
        return f"another result: {result_again!r:.200}, not {result!r:.200}"
    if names != names_again:
        return f"other files: {sorted(set(names) ^ set(names_again))[:4]}"
    return None


class Kind:
    """Cases of kills."""

    def __init__(self, sound):
        self.sound, self.whole = sound, {}
        jobs.make(sound)

    def begin(self, job, folder):
        """(the sound files for a job, a new folder for what it makes, the folder that it changes)."""
        at, out = jobs.places(self.sound, folder, job)
        return at, out, at / jobs.CHANGED[job] if job in jobs.CHANGED else out

    def undisturbed(self, job, folder):
        """(what it makes, changes of its files) of a job that nothing disturbs."""
        if job not in self.whole:
            at, out, place = self.begin(job, folder)
            program = start(job, at, out)
            changes = watch(program, place)
            ended = program.wait()
            assert not ended.status, ended
            self.whole[job] = made(job, at, out, place), changes
        return self.whole[job]

    def case(self, rng, folder):
        job = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        whole, changes = self.undisturbed(job, folder)
        kills = [draw(rng, changes) for _ in range(rng.choice([1, 1, 1, 2]))]
        tried = f"{job}: {'; '.join(map(str, kills))}"
        at, out, place = self.begin(job, folder)
        how = "too late"
        for kill in kills:
            program = start(job, at, out)
            strike(kill, program, place)
            ended = program.wait(grace=GRACE)
            if wrong := wrong_after(kill, ended):
                return Case(tried, "bad end", wrong, ended)
            if ended.status:
                how = "the same"
        ended = start(job, at, out).wait()
        there = job in ("export", "import") and "exists already" in ended.err
        if ended.status and not there:
            return Case(tried, "not resumed", complaint(ended, (0,)), ended)
        wrong = difference(whole, made(job, at, out, place)) or leftovers(out)
        return Case(tried, "differs" if wrong else how, wrong, ended)
