"""Programs killed at drawn moments: the same command, run again, ends as if nothing had happened."""

import contextlib
import os
import re
import shutil
import signal
import time
from typing import NamedTuple

from conftest import SMALL_GPT2
from test_cluster import XLA_FLAGS, free_port

from tests.soak import goods
from tests.soak.programs import Program, complaint, fresh_folder, leftovers

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
GRACE = 15  # seconds after a kill within which workers must have ended too
# compiled and traced sooner than a mixture of experts; what writes files is the same
QUICK = {**SMALL_GPT2, "blocks": 1, "n_head": 2, "ffn_dim": 32, "T": 16, "vocab_size": 300}
PAIR = dict(n_device_axis=(2, 1, 1), n_devices=2, train_batch_size=2, val_batch_size=2)
PAIR |= dict(num_processes=2, peer_timeout=10)

# --- What is killed -----------------------------------------------------------------------------------------------

WEIGHTS = dict(tokenize=4, tokenize_workers=4, ranks=2, export=4, prune=4)
WEIGHTS |= {"import": 3, "train": 8, "train_cold": 1, "resume": 4, "pair": 4}
CHANGED = dict(resume="quick", prune="many", train_cold="cache")  # what a job changes


def lines_of(job, at, out):
    """The command lines of a job, one for each of its processes."""
    quick = dict(QUICK, compilation_cache=at / "cache")
    if job == "pair":
        meet = dict(PAIR, coordinator=f"127.0.0.1:{free_port()}")
        flags = quick | meet
        return [goods.train_words(at, out, **flags, process_id=i) for i in range(2)]
    workers = ("--workers", 2 if job == "tokenize_workers" else 1)
    ranks = at / "ranks.tiktoken"
    tokenize = goods.stopped_words(at / "stopped" / "in", out, ranks, *workers)
    lines = dict(
        tokenize=tokenize,
        tokenize_workers=tokenize,
        ranks=goods.ranks_words(at / "stopped" / "in", out / "ranks.tiktoken"),
        train=goods.train_words(at, out, **quick),
        train_cold=goods.train_words(at, out, **quick),
        resume=goods.train_words(at, at / "quick", **quick),
        export=["tools/hf.py", "export", at / "run", out / "hf"],
        prune=[
            "tools/checkpoints.py",
            "prune",
            at / "many" / "run",
            "--keep",
            1,
            "--best",
            "False",
        ],
    )
    lines["import"] = ["tools/hf.py", "import", at / "hf", out / "run"]
    return [lines[job]]


def place_of(job, at, out):
    """The folder that a job writes to."""
    return {"resume": at / "quick", "prune": at / "many"}.get(job, out)


def result_of(job, place):
    """(what a job made, the names of all files), without times and what is drawn at random."""
    names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    names = sorted(re.sub(r"\b[0-9a-f]{32}\b", "HASH", name) for name in names)
    if job.startswith("tokenize"):
        # of a process killed after its work; the next one would take it over, if there were work left
        return goods.shards(place), [name for name in names if name != "lock"]
    if job in ("export", "ranks"):
        return goods.hashes(place), names
    if job == "prune":
        return goods.fingerprints(place / "run"), names
    if job == "import":
        return goods.fingerprints(place / "run"), sorted(set(names))
    # a stopped run has checkpoints that another has not, and Orbax's files are cut as it likes
    names = [name for name in names if "/checkpoints/" not in name or "tmp" in name]
    return goods.trained(place / "run", last=goods.STEPS), names


# --- Kills --------------------------------------------------------------------------------------------------------


class Kill(NamedTuple):
    """When a life of a job ends, and how.

    part: of the time that the job takes; change: number of the change in its files after which; None for the other.
    signals: one or two, `pause` seconds apart. victims: numbers of the processes. to_all: to their workers too.
    """

    part: float | None
    change: int | None
    delay: float
    signals: list
    pause: float
    victims: list
    to_all: bool
    fresh: bool

    def __str__(self):
        when = (
            f"at {self.part:.2f} of its time" if self.change is None else f"at change {self.change}"
        )
        names = " ".join(signal.Signals(n).name for n in self.signals)
        who = f" to {self.victims}" + " and workers" * self.to_all + ", fresh" * self.fresh
        return f"{names} {when} + {self.delay:.3f} s{who}"


def draw(rng, job, changes):
    """A Kill of a job whose files change `changes` times."""
    by_files = rng.random() < 0.6
    signals = [rng.choice(SIGNALS)]
    if rng.random() < 0.25:
        signals.append(rng.choice(SIGNALS))
    both = [0, 1]
    return Kill(
        part=None if by_files else rng.uniform(0, 0.95),
        change=rng.randint(1, max(1, changes)) if by_files else None,
        delay=rng.choice([0, 0, rng.uniform(0, 0.01), rng.uniform(0, 0.2)]),
        signals=signals,
        pause=rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)]),
        victims=rng.choice([[0], [1], both]) if job == "pair" else [0],
        to_all=rng.random() < 0.5,
        fresh=rng.random() < 0.1,
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


def watch(programs, place, change=None, until=float("inf")):
    """Changes of a folder, until the first of the programs ends, or their number is `change`, or that moment."""
    seen, count = state_of(place), 0
    while all(program.runs() for program in programs) and time.monotonic() < until:
        now = state_of(place)
        count += now != seen
        seen = now
        if change and count >= change:
            break
        time.sleep(0.004)
    return count


def start(job, at, out, folder, fresh=False):
    environment = {"XLA_FLAGS": XLA_FLAGS} if job == "pair" else {}
    lines = lines_of(job, at, out)
    started = []
    for i, line in enumerate(lines):
        started.append(Program(line, folder / f"work{i}", fresh=fresh, **environment))
    return started


def strike(kill, programs, place, seconds):
    """Let a Kill happen to the programs of a job that takes so many seconds."""
    until = time.monotonic() + (seconds * kill.part if kill.part else 4 * seconds)
    watch(programs, place, kill.change, until)
    time.sleep(kill.delay)
    victims = [programs[i] for i in kill.victims]
    while any(one.runs() and not one.listens() for one in victims):
        time.sleep(0.001)
    for number in kill.signals:
        for one in victims:
            if one.runs():
                one.send(number, kill.to_all)
        time.sleep(kill.pause)


# --- A case -------------------------------------------------------------------------------------------------------


class Kind:
    """Cases of kills."""

    def __init__(self, folder):
        self.folder, self.sound, self.whole = folder, folder / "goods", {}
        goods.make(self.sound)
        if not (self.sound / "quick").exists():
            flags = dict(QUICK, compilation_cache=self.sound / "cache", steps=2 * goods.SAVES)
            words = goods.train_words(self.sound, self.sound / "quick", **flags)
            goods.must(words, self.sound / "work")

    def places(self, job, folder):
        """(the goods for a job, the folder for what it makes), anew."""
        fresh_folder(folder)
        changed = CHANGED.get(job)
        at = goods.Places(self.sound, folder / "own", {changed} - {None})
        if job == "train_cold":
            shutil.rmtree(at / "cache")
        (folder / "out").mkdir()
        return at, folder / "out"

    def undisturbed(self, job, folder):
        """(result, seconds, changes of its files) of a job that nothing disturbs."""
        if job not in self.whole:
            at, out = self.places(job, folder)
            began = time.monotonic()
            programs = start(job, at, out, folder)
            changes = watch(programs, place_of(job, at, out))
            ended = [program.wait() for program in programs]
            assert not any(one.status for one in ended), ended
            result = result_of(job, place_of(job, at, out))
            self.whole[job] = result, time.monotonic() - began, changes
        return self.whole[job]

    def case(self, rng, folder):
        """(what was tried, how it ended, what is wrong with that or None, the last Ended)."""
        job = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        result, seconds, changes = self.undisturbed(job, folder)
        kills = [draw(rng, job, changes) for _ in range(rng.choice([1, 1, 1, 2]))]
        tried = f"{job}: {'; '.join(map(str, kills))}"
        at, out = self.places(job, folder)
        place, how = place_of(job, at, out), "too late"
        for kill in kills:
            programs = start(job, at, out, folder, kill.fresh)
            strike(kill, programs, place, seconds)
            ended = [program.wait(90, GRACE) for program in programs]
            for one in ended:
                if wrong := wrong_after(kill, one):
                    return tried, "bad end", wrong, one
            if any(one.status for one in ended):
                how = "the same"
        ended = [program.wait() for program in start(job, at, out, folder)]
        for one in ended:
            there = job in ("export", "import") and "exists already" in one.err
            if one.status and not there:
                return tried, "not resumed", complaint(one, (0,)), one
        wrong = difference(result, result_of(job, place))
        if not wrong and (left := leftovers(folder / "out")):
            wrong = f"left {left[0]}"
        return tried, "differs" if wrong else how, wrong, ended[0]


def wrong_after(kill, ended):
    """What is wrong with how a program ended after a Kill, or None."""
    if ended.orphans:
        return f"{ended.orphans} processes outlive it"
    if "JAX distributed service detected fatal errors" in ended.err:
        return None  # jax's own end where another process was lost
    if ended.status is not None and ended.status < 0:
        return None if -ended.status in kill.signals else f"ended by signal {-ended.status}"
    # 75: another process was lost; 1: it did not come
    wrong = complaint(ended, (0, 1, 2, 75, *(128 + n for n in kill.signals)))
    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    if not wrong and len(lines) > 1:
        return f"{len(lines)} lines on stderr"
    return wrong


def difference(whole, again):
    """In words, how a result differs from that of a job that was not disturbed; None where it does not."""
    (made, names), (made_again, names_again) = whole, again
    if made != made_again:
        return f"another result: {first_difference(made, made_again)}"
    if names != names_again:
        return f"other files: {sorted(set(names) ^ set(names_again))[:4]}"
    return None


def first_difference(a, b, where=""):
    """In words, where two results differ first."""
    if type(a) is type(b) and isinstance(a, list | tuple):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return f"{where} {a!r:.60}, and {b!r:.60}"
    if a.keys() != b.keys():
        return f"{where} has {len(a)} entries, and {len(b)}: {sorted(a.keys() ^ b.keys(), key=str)[:3]}"
    key = next(key for key in a if a[key] != b[key])
    return first_difference(a[key], b[key], f"{where}.{key}")
