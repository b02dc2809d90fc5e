"""The time of a run: the speed of its steps, and how all of its time since the first start was spent."""

import contextlib
import time

from runtime.messages import duration

# {part of a run's wall time, as metrics.jsonl calls it: the words that follow its share in a message}.
PARTS = {
    "steps": "in steps",
    "starting": "starting",
    "compiling": "compiling the step",
    "restoring": "restoring",
    "waiting": "waiting for data",
    "evaluating": "evaluating and sampling",
    "saving": "saving",
    "lost": "lost to restarts",
    "resting": "at rest",  # time without a process after a complete end; no share counts it
}


class Goodput:
    """How the wall time of a run was spent since its first start, in all the processes that worked on it in turn.

    Every moment belongs to one of PARTS. The time between the last step that a restart or rollback keeps and the
    restart itself is "lost": it holds steps that are repeated, and the time without a process. But if all steps were
    saved at the end, as after a signal, the time without a process is "resting".
    """

    def __init__(self, started):
        """started: when this process started, by time.time()."""
        self.resumed = 0  # how many times the run was resumed
        self.restart(started)

    def restart(self, started, part="starting"):
        """Count from the time `started`, at a start or a rollback. `add_spent` adds what the run spent before."""
        self.started = started
        self.since = started  # when the current part started
        self.part = part
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def enter(self, part):
        """End the current part and start this one."""
        now = time.time()
        self.seconds[self.part] += now - self.since
        self.part = part
        self.since = now

    def now(self):
        """What the run is doing now, and for how long it has, in words."""
        return f"{PARTS[self.part]}, {duration(time.time() - self.since)}"

    @contextlib.contextmanager
    def during(self, part):
        """Count the length of a `with` block as this part; the part before continues after it."""
        before = self.part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def waited(self, seconds):
        """Move that many seconds from the steps to waiting for data."""
        self.seconds["steps"] -= seconds
        self.seconds["waiting"] += seconds

    def add_spent(self, rows, step, end=None):
        """Add what the run spent before it resumes after `step`. rows: all of its metrics.jsonl, also of later steps.
        end: the last row of a run that ended with all steps saved, as `runlog.end_of` finds it, or None."""
        rows = [row for row in rows if "time" in row]
        if not rows:
            return
        first = rows[0]["time"] - sum(spent_in(rows[0]).values())
        last = end or rows[-1]
        kept = [row for row in (*rows, last) if row["step"] <= step]
        before = spent_in(kept[-1]) if kept else dict.fromkeys(PARTS, 0.0)
        before["resting"] = spent_in(last)["resting"]
        if end:
            before["resting"] += max(0.0, self.started - end["time"])
        self.resumed = 1 + max(row.get("resumed", 0) for row in rows)
        before["lost"] += max(0.0, self.started - first - sum(before.values()))
        self.seconds = {part: self.seconds[part] + before[part] for part in PARTS}

    def row(self):
        """{name: number} of the time until now, for a row of metrics.jsonl."""
        self.enter(self.part)
        share = self.seconds["steps"] / self.whole()
        row = {"time": round(self.since, 3), "goodput": round(share, 6), "resumed": self.resumed}
        return row | {f"seconds/{part}": round(s, 3) for part, s in self.seconds.items()}

    def whole(self):
        """Seconds of all parts except "resting"."""
        return max(1e-9, sum(self.seconds.values()) - self.seconds["resting"])

    def words(self):
        """The shares of all parts that have at least 0.5%, in words: first the steps, then the others by size."""
        self.enter(self.part)
        whole = self.whole()
        shares = {part: seconds / whole for part, seconds in self.seconds.items()}
        others = sorted(PARTS.keys() - {"steps", "resting"}, key=shares.get, reverse=True)
        parts = [f"{shares[part]:.0%} {PARTS[part]}" for part in others if shares[part] >= 0.005]
        return ", ".join([f"{shares['steps']:.0%} of {duration(whole)} in steps", *parts])


def spent_in(row):
    """{part: seconds} that a row of metrics.jsonl records."""
    return {part: row.get(f"seconds/{part}", 0.0) for part in PARTS}


class Pace:
    """The speed of the steps, of `tokens` tokens each. As the host sees it, a step lasts from the end of the step
    before, or from when training resumed, to its own end."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.restart(0.0)

    def restart(self, data_wait):
        """Forget all steps, as after a rollback. data_wait: as for `resume`."""
        self.steps = []  # for each step (seconds, seconds of these that it waited for data)
        self.reported = 0  # number of steps at the last progress line
        self.resume(data_wait)

    def resume(self, data_wait):
        """Training starts or continues. data_wait: seconds so far in which the devices did nothing but wait for
        data."""
        self.last_end = time.time()
        self.data_wait = data_wait

    def ended(self, data_wait):
        """Record the end of a step. Returns {"tokens_per_second", "data/wait"} of the last ten steps; the latter is the
        share of the time that was spent waiting for data."""
        start = self.last_end
        waited = self.data_wait
        self.resume(data_wait)
        self.steps.append((self.last_end - start, data_wait - waited))
        return self._mean(self.steps[-10:])

    def since_last(self):
        """The same of all steps since the last call of this method."""
        steps = self.steps[self.reported :]
        self.reported = len(self.steps)
        return self._mean(steps)

    def seconds_for(self, steps):
        """Seconds that `steps` more steps will take at the mean speed so far."""
        trained = sum(seconds for seconds, _ in self.steps)
        return trained / len(self.steps) * steps

    def _mean(self, steps):
        """{name: number} over some elements of `self.steps`."""
        seconds = max(1e-9, sum(seconds for seconds, _ in steps))
        waited = sum(waited for _, waited in steps)
        return {
            "tokens_per_second": self.tokens * len(steps) / seconds,
            "data/wait": min(1.0, waited / seconds),
        }
