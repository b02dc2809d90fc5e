"""Programs killed at drawn moments: the same command, run again, ends as if nothing had happened."""

import contextlib
import os
import re
import signal
import time
from typing import NamedTuple

from test_cluster import XLA_FLAGS, free_port

from tests.soak import jobs
from tests.soak.programs import Case, Program, complaint, leftovers

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
GRACE = 15  # seconds after a kill within which workers must have ended too
WEIGHTS = dict(tokenize_many=4, workers_many=4, ranks_many=2, export=4, prune=4, train=8)
WEIGHTS |= {"import": 3, "resume": 4, "pair": 4}


class Kill(NamedTuple):
    """When a life of a job ends, and how.

    change: number of the change in its files after which. signals: one or two, `pause` seconds apart. victims: numbers
    of the processes. to_all: to their workers too.
    """

    change: int
    delay: float
    signals: list
    pause: float
    victims: list
    to_all: bool


def draw(rng, job, changes):
    """A Kill of a job whose files change `changes` times."""
    return Kill(
        change=rng.randrange(max(1, changes)),
        delay=rng.choice([0, 0, rng.uniform(0, 0.01), rng.uniform(0, 0.2)]),
        signals=rng.choices(SIGNALS, k=rng.choice([1, 1, 1, 2])),
        pause=rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)]),
        victims=rng.choice([[0], [1], [0, 1]]) if job == "pair" else [0],
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


def watch(programs, place, most=float("inf")):
    """Number of changes of a folder, until one of the programs ends or it is `most`."""
    seen, count = state_of(place), 0
    while count < most and all(program.runs() for program in programs):
        now = state_of(place)
        count += now != seen
        seen = now
        time.sleep(0.004)
    return count


def start(job, at, out):
    """The Programs of a job."""
    words = jobs.words_of(job, at, out)
    if job != "pair":
        return [Program(words, out.parent / "work0")]
    words += ["--coordinator", f"127.0.0.1:{free_port()}"]
    return [
        Program([*words, "--process_id", i], out.parent / f"work{i}", XLA_FLAGS=XLA_FLAGS)
        for i in range(2)
    ]


def strike(kill, programs, place):
    """Let a Kill happen to the programs of a job."""
    watch(programs, place, kill.change)
    time.sleep(kill.delay)
    victims = [programs[i] for i in kill.victims]
    while any(one.runs() and not one.listens() for one in victims):
        time.sleep(0.001)
    for number in kill.signals:
        for one in victims:
            if one.runs():
                one.send(number, kill.to_all)
        time.sleep(kill.pause)


def made(job, at, out, place):
    """(what a job made, the names of all files), without times and what is drawn at random."""
    names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    names = {re.sub(r"\b[0-9a-f]{32}\b", "HASH", name) for name in names}
    if job in ("train", "pair", "resume"):
        # a stopped run has checkpoints that another has not, and Orbax's files are cut as it likes
        names = {name for name in names if "/checkpoints/" not in name or "tmp" in name}
    names.discard("lock")  # of a process killed after its work; the next one takes it over
    return jobs.result_of(job, at, out), sorted(names)


def wrong_after(kill, ended):
    """What is wrong with how a program ended after a Kill, or None."""
    if ended.orphans:
        return f"{ended.orphans} processes outlive it"
    if ended.status is not None and ended.status < 0:
        return None if -ended.status in kill.signals else f"ended by signal {-ended.status}"
    # 75: another process was lost; 1: it did not come
    wrong = complaint(ended, (0, 1, 2, 75, *(128 + n for n in kill.signals)))
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
            programs = start(job, at, out)
            changes = watch(programs, place)
            ended = [program.wait() for program in programs]
            assert not any(one.status for one in ended), ended
            self.whole[job] = made(job, at, out, place), changes
        return self.whole[job]

    def case(self, rng, folder):
        job = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        whole, changes = self.undisturbed(job, folder)
        kills = [draw(rng, job, changes) for _ in range(rng.choice([1, 1, 1, 2]))]
        tried = f"{job}: {'; '.join(map(str, kills))}"
        at, out, place = self.begin(job, folder)
        how = "too late"
        for kill in kills:
            programs = start(job, at, out)
            strike(kill, programs, place)
            ended = [program.wait(90, GRACE) for program in programs]
            for one in ended:
                if wrong := wrong_after(kill, one):
                    return Case(tried, "bad end", wrong, one)
            if any(one.status for one in ended):
                how = "the same"
        for one in [program.wait() for program in start(job, at, out)]:
            there = job in ("export", "import") and "exists already" in one.err
            if one.status and not there:
                return Case(tried, "not resumed", complaint(one, (0,)), one)
        wrong = difference(whole, made(job, at, out, place)) or leftovers(out)
        return Case(tried, "differs" if wrong else how, wrong, one)
