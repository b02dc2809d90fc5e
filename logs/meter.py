"""The time of a run: the speed of its steps, and where all the time since its first start went."""

import contextlib
import time

from runtime.messages import duration

# {part of a run's wall time, as metrics.jsonl calls it: in words, after its share}
PARTS = {
    "steps": "in steps",
    "starting": "starting",
    "compiling": "compiling the step",
    "restoring": "restoring",
    "waiting": "waiting for data",
    "evaluating": "evaluating and sampling",
    "saving": "saving",
    "lost": "lost to restarts",
    "resting": "at rest",  # not the run's: no share counts it
}


class Goodput:
    """Where the wall time since the first start of a run went, over all processes that it had one after the other.

    Every moment belongs to one of PARTS. Lost is what lies between the last step that a restart or a rollback keeps and
    that restart: steps that are repeated, and the time without a process. After an end with all steps saved, as by a
    signal, that time is rest.
    """

    def __init__(self, began):
        """began: when this process did, by time.time()."""
        self.resumed = 0  # times
        self.restart(began)

    def restart(self, began, part="starting"):
        """The run starts, or rolls back: what it spent before is up to `add_spent`."""
        self.began = self.since = began
        self.part = part
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def enter(self, part):
        """The part until now has ended, this one begins."""
        now = time.time()
        self.seconds[self.part] += now - self.since
        self.part, self.since = part, now

    def now(self):
        """What the run does now, in words, and since when."""
        return f"{PARTS[self.part]}, {duration(time.time() - self.since)}"

    @contextlib.contextmanager
    def during(self, part):
        """This part as long as the block lasts, then the one before."""
        before = self.part
        self.enter(part)
        yield
        self.enter(before)

    def waited(self, seconds):
        """That part of the steps' time was spent waiting for data."""
        self.seconds["steps"] -= seconds
        self.seconds["waiting"] += seconds

    def add_spent(self, rows, step, end=None):
        """The run resumes after `step`: add what it spent until then. rows: of its metrics.jsonl, also later ones.
        end: of `runlog.end_of` these rows."""
        rows = [row for row in rows if "time" in row]
        if not rows:
            return
        first = rows[0]["time"] - sum(spent_in(rows[0]).values())
        last = end or rows[-1]
        kept = [row for row in (*rows, last) if row["step"] <= step]
        before = spent_in(kept[-1]) if kept else dict.fromkeys(PARTS, 0.0)
        before["resting"] = spent_in(last)["resting"]
        if end:
            before["resting"] += max(0.0, self.began - end["time"])
        self.resumed = 1 + max(row.get("resumed", 0) for row in rows)
        before["lost"] += max(0.0, self.began - first - sum(before.values()))
        self.seconds = {part: self.seconds[part] + before[part] for part in PARTS}

    def row(self):
        """{name: number} for metrics.jsonl, up to now."""
        self.enter(self.part)
        share = self.seconds["steps"] / self.whole()
        row = {"time": round(self.since, 3), "goodput": round(share, 6), "resumed": self.resumed}
        return row | {f"seconds/{part}": round(s, 3) for part, s in self.seconds.items()}

    def whole(self):
        """Seconds of all parts but rest."""
        return max(1e-9, sum(self.seconds.values()) - self.seconds["resting"])

    def words(self):
        """The shares of all parts that have one, the largest of the others first."""
        self.enter(self.part)
        whole = self.whole()
        shares = {part: seconds / whole for part, seconds in self.seconds.items()}
        others = sorted(PARTS.keys() - {"steps", "resting"}, key=shares.get, reverse=True)
        parts = [f"{shares[part]:.0%} {PARTS[part]}" for part in others if shares[part] >= 0.005]
        return ", ".join([f"{shares['steps']:.0%} of {duration(whole)} in steps", *parts])


def spent_in(row):
    """{part: seconds} of a row of metrics.jsonl."""
    return {part: row.get(f"seconds/{part}", 0.0) for part in PARTS}


class Pace:
    """The speed of the steps, of `tokens` tokens each. A step takes from the end of the one before, or from when
    training resumed, to its own end, as the host sees it."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.restart(0.0)

    def restart(self, data_wait):
        """Forget all steps: the run rolls back. data_wait: of `resume`."""
        self.steps = []  # (seconds, of these waiting for data) of each
        self.reported = 0  # how many of them were there at the last progress line
        self.resume(data_wait)

    def resume(self, data_wait):
        """The devices turn to training. data_wait: seconds so far in which they waited for data alone."""
        self.last_end = time.time()
        self.data_wait = data_wait

    def ended(self, data_wait):
        """A step has ended. {"tokens_per_second", "data/wait": share of the time}, means of the last ten steps."""
        began, waited = self.last_end, self.data_wait
        self.resume(data_wait)
        self.steps.append((self.last_end - began, data_wait - waited))
        return self._mean(self.steps[-10:])

    def since_last(self):
        """The same, means of all steps since the last call."""
        steps = self.steps[self.reported :]
        self.reported = len(self.steps)
        return self._mean(steps)

    def seconds_for(self, steps):
        """How long `steps` more steps will take, at the mean speed so far."""
        trained = sum(seconds for seconds, _ in self.steps)
        return trained / len(self.steps) * steps

    def _mean(self, steps):
        seconds = max(1e-9, sum(seconds for seconds, _ in steps))
        waited = sum(waited for _, waited in steps)
        return {
            "tokens_per_second": self.tokens * len(steps) / seconds,
            "data/wait": min(1.0, waited / seconds),
        }
