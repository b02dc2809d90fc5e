"""SIGINT and SIGTERM, from the first line of a program on. No jax in here, nor what else takes long to import."""

import contextlib
import os
import signal
import sys
import threading

SIGNALS = signal.SIGINT, signal.SIGTERM
NOTHING_LOST = "interrupted while no step was in progress; nothing was lost"

given_back = []  # functions that give back what is held of others; they run too where the process ends at once


def end(status, words):
    """End the process now, whatever its threads do, with these words on stderr."""

    def give_back():
        for one in [*given_back]:
            with contextlib.suppress(Exception):
                one()

    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, f"{words}\n".encode() if words else b"")  # sys.stderr may be another's just now
    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    thread.join(5)  # storage may not answer
    os._exit(status)


def at_once(words):
    """Let both signals end the process, with these words, as soon as the main thread is in Python: while it imports.
    A process that the program spawned ends without a word."""
    words = "" if "__mp_main__" in sys.modules else words
    for number in SIGNALS:
        signal.signal(number, lambda number, _: end(128 + number, words))


def as_usual():
    """Give the signals back to Python: KeyboardInterrupt, and the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def watch(note):
    """Call note(number) in a thread of its own for either signal, at once: a handler of Python's would wait until the
    main thread comes out of XLA, which may compile for minutes. Returns a function that ends this."""
    out, into = os.pipe()
    os.set_blocking(into, False)

    def listen():
        while number := os.read(out, 1):
            if number[0] in SIGNALS:
                note(number[0])

    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    before = signal.set_wakeup_fd(into)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()

    def over():
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(into)
        thread.join()
        os.close(out)

    return over
