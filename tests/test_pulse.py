"""The sign of life of a program that is at work: lines where there is no terminal, one that moves where there is."""

import fcntl
import os
import struct
import sys
import termios
import time

import pytest
from helpers import wait_for

from runtime import messages, pulse


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(pulse, "PAUSE", 0.3)
    monkeypatch.setattr(pulse, "BEAT", 0.02)


def test_silence_is_broken_by_what_the_program_does_and_nothing_else_is(quick, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(
        messages, "say", lambda words: (said.append(words), messages.put_line("", sys.stdout))
    )
    beats = []

    def doing():
        beats.append(None)
        return f"step {len(beats)}/9"

    def pass_beats(n):
        last = len(beats) + n
        wait_for(lambda: len(beats) >= last)

    with pulse.Pulse("compiling") as shown:
        wait_for(lambda: len(said) == 2)
        assert all(words.startswith("compiling, ") for words in said)
        shown.count(doing, 9, 0)
        wait_for(lambda: said[-1].startswith("step "))
        # As if the program had just printed a line of its own. Twice, since a line may be on its way.
        for _ in range(2):
            monkeypatch.setattr(messages, "spoke", time.monotonic() + 1000)
            pass_beats(2)
        n = len(said)
        pass_beats(30)
        assert len(said) == n
        monkeypatch.setattr(messages, "spoke", 0.0)
        wait_for(lambda: len(said) > n)
    n = len(said)
    time.sleep(0.7)
    assert len(said) == n, "closed"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_with_room_shows_a_bar_and_no_lines(quick, monkeypatch, columns):
    mine, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    said = []
    monkeypatch.setattr(messages, "say", said.append)
    with open(its, "w") as stderr, open(mine, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", stderr)
        with pulse.Pulse("compiling"):
            if columns:
                assert b"compiling" in screen.read(99) + screen.read(99)
                time.sleep(0.5)
            else:
                wait_for(lambda: said)
        assert bool(said) == (columns == 0)
