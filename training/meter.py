"""What is measured of each step: its metrics, fetched one step late, and its speed."""

import time

import jax


class Pace:
    """The speed of the steps, of `tokens` tokens each. A step takes from the end of the one before, or from when
    training resumed, to its own end, as the host sees it."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.steps = []  # (seconds, of these waiting for data) of each
        self.told = 0  # how many of them were there at the last progress line
        self.resume(0.0)

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
        steps = self.steps[self.told :]
        self.told = len(self.steps)
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


class Meter:
    """The metrics of each step, fetched one step late, so that the devices always have work."""

    def __init__(self, tokens, corpus, bad_steps, profile):
        """tokens: of a step; corpus: a Mixture, which knows how often its data was seen; bad_steps: observes each
        step's loss and gradient; profile: a Profile, which ends its trace after the last step."""
        self.pace = Pace(tokens)
        self.corpus = corpus
        self.bad_steps = bad_steps
        self.profile = profile
        # (step, sequences, metrics on the devices, seconds waited for data) of the last step, until it is fetched
        self.newest = None

    def launched(self, step, sequences, metrics, data_wait):
        """Take note of a step that the devices have been given. Returns the row of the one before, or None."""
        row = self.fetch()
        self.newest = (step, sequences, metrics, data_wait)
        return row

    def wait(self):
        """Wait until the devices have done all that they were given."""
        if self.newest:
            jax.block_until_ready(self.newest[2])

    def fetch(self):
        """{name: number} of the newest step; None where it was fetched before."""
        if self.newest is None:
            return None
        step, sequences, metrics, data_wait = self.newest
        self.newest = None
        metrics = jax.device_get(metrics)
        self.profile.note(step)
        shares = metrics.pop("load/experts", [])
        metrics |= {f"load/expert_{i}": share for i, share in enumerate(shares)}
        row = {"step": step} | {name: float(value) for name, value in metrics.items()}
        row |= self.corpus.epochs(sequences)
        self.bad_steps.observe(step, sequences, row["loss/train_loss"], row["grad_norm"])
        row["bad_steps"] = self.bad_steps.total
        return row | self.pace.ended(data_wait)

    def restart(self):
        """Forget the newest step and all speeds: the run rolls back."""
        self.newest = None
        self.pace = Pace(self.pace.tokens)
