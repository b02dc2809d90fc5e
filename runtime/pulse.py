"""A sign of life while a program is at work and prints nothing."""

import os
import sys
import threading
import time

from tqdm import tqdm

from runtime import messages

# Seconds without a line, after which one is printed where there is no terminal: fewer than ten, after which people
# wonder, since under load the thread wakes late.
PAUSE = 8
LATER = 60  # the same after the first HOUR, so that the log of days stays short
HOUR = 3600
BEAT = 0.5  # seconds between two looks


def has_terminal():
    """Whether stderr is a terminal that has room: one of no columns, as programs make them, shows no bar."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


class Pulse:
    """A thread that shows what the program does: on a terminal in a line that moves, else in a line after some seconds
    without one.

    doing: () -> words; or words, to which the seconds since then are added. lines: False for a program whose output
    others read, which shows nothing where there is no terminal. settings: of the bar, a tqdm; with a `total` it shows
    how much is done, which `bar.update` counts.
    """

    def __init__(self, doing, lines=True, **settings):
        self.doing = doing
        self.lines = lines
        self.began = time.monotonic()
        if "total" not in settings:
            settings["bar_format"] = "{desc}"
        self.bar = tqdm(disable=not has_terminal(), leave=False, **settings)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.thread.start()

    def count(self, doing, total, done):
        """From now on show how much of `total` steps is done as well; `bar.update` counts on."""
        self.doing = doing
        self.bar.bar_format = "{desc}  |{bar:20}| {remaining} left"
        self.bar.reset(total)
        self.bar.initial = self.bar.n = done

    def words(self):
        """What the program does now."""
        if callable(self.doing):
            return self.doing()
        return f"{self.doing}, {messages.duration(time.monotonic() - self.began)}"

    def _beat(self):
        while not self.over.wait(BEAT):
            words = self.words()
            if not self.bar.disable:
                self.bar.set_description_str(words)
                continue
            now = time.monotonic()
            pause = PAUSE if now - self.began < HOUR else LATER
            if self.lines and now - max(messages.spoke, self.began) >= pause - BEAT:
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
