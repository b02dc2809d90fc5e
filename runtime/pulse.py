"""Shows that a program is still working while it prints nothing."""

import os
import sys
import threading
import time

from tqdm import tqdm

from runtime import messages

# Without a terminal, a line is printed after this many seconds of silence. People start to wonder after ten; it is
# fewer, since on a busy machine the thread wakes late.
PAUSE = 8
LATER = 60  # the same after the first HOUR, so that the log of a run of days stays short
HOUR = 3600
BEAT = 0.5  # seconds between two updates of the terminal


def has_terminal():
    """Whether stderr is a terminal with room for a bar. Terminals that programs create may have zero columns."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


class Pulse:
    """A thread that shows what the program is doing: on a terminal in a line that is updated, elsewhere by printing a
    line after some seconds of silence.

    doing: a function that returns words; or words, to which the time since then is added. lines: False for a program
    whose output is read by another one: it shows nothing where there is no terminal. settings: arguments of the bar, a
    tqdm. With a `total` it shows how much is done, which `bar.update` counts.
    """

    def __init__(self, doing, lines=True, **settings):
        self.doing = doing
        self.lines = lines
        self.started = time.monotonic()
        if "total" not in settings:
            settings["bar_format"] = "{desc}"
        self.bar = tqdm(disable=not has_terminal(), leave=False, **settings)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.thread.start()

    def count(self, doing, total, done):
        """From now on also show how many of `total` steps are done. `bar.update` counts further ones."""
        self.doing = doing
        self.bar.bar_format = "{desc}  |{bar:20}| {remaining} left"
        self.bar.reset(total)
        self.bar.n = done
        # So that the time left is estimated from the steps of this process alone.
        self.bar.initial = done

    def words(self):
        """What the program is doing now, in words."""
        if callable(self.doing):
            return self.doing()
        return f"{self.doing}, {messages.duration(time.monotonic() - self.started)}"

    def _beat(self):
        """The thread: update the bar, or print a line where nothing was printed for a while."""
        while not self.over.wait(BEAT):
            words = self.words()
            if not self.bar.disable:
                self.bar.set_description_str(words)
                continue
            now = time.monotonic()
            pause = PAUSE if now - self.started < HOUR else LATER
            if self.lines and now - max(messages.spoke, self.started) >= pause - BEAT:
                messages.say(words)

    def close(self):
        """Show nothing from now on."""
        self.over.set()
        self.thread.join()
        self.bar.close()
        self.bar.disable = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
