"""The signals that ask a program to end, from its first line on.

Imports nothing that takes time to load: Ctrl-C in the middle of that would end in a traceback.
"""

import _signal as signal  # what is behind signal, without its enums
import os
import sys
import time
from _thread import allocate_lock

INSISTING = signal.SIGINT, signal.SIGTERM  # which a person or a supervisor repeats on purpose
# A terminal that is closed; a batch system before the time of its job is over; the limit of a process's CPU time.
SIGNALS = *INSISTING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
PACKAGES = "jax", "optax", "orbax", "tiktoken", "fsspec"  # that every program needs
NOTHING_LOST = "interrupted while no step was in progress; nothing was lost"
words = NOTHING_LOST  # what a signal says that ends main.py at once, unless it could not save all

BEGAN = time.time()  # of the process
given_back = []  # functions that release what is held of others; they run also where the process ends at once
ending = allocate_lock()  # held while the process ends; workers start under it, whole or not at all


def end(status, words):
    """End the process now, whatever its threads do, with these words on stderr."""
    ending.acquire(True, 5)
    try:  # past sys.stderr, which another thread may be writing to
        os.write(2, f"{words}\n".encode() if words else b"")
    except OSError:  # a terminal that is gone
        pass
    if given_back:  # not during the first imports, which may be those of threading
        import threading

        thread = threading.Thread(target=give_back, daemon=True)
        thread.start()
        thread.join(5)  # storage may not answer
    os._exit(status)


def give_back():
    for release in [*given_back]:
        try:
            release()
        except Exception:  # the next ones are to be released too
            pass


def heeded():
    """The SIGNALS but for those that whoever started this program had it ignore, as nohup does with SIGHUP. A shell
    ignores SIGINT for what it puts in the background, which is no such wish."""
    ignored = {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN}
    return [number for number in SIGNALS if number in INSISTING or number not in ignored]


def install(words="interrupted"):
    """What every program calls first. From now on a signal ends the process with these words, as soon as the main
    thread is in Python, also in the middle of an import. A process that the program spawned ends without a word. A
    package that is missing ends the program with a sentence, too."""
    words = "" if "__mp_main__" in sys.modules else words
    for number in heeded():
        signal.signal(number, lambda number, _: end(128 + number, words))
    from importlib.util import find_spec  # here: a signal while it is imported is heard

    from runtime.messages import open_streams

    open_streams()
    for name in PACKAGES:
        if find_spec(name) is None:
            advice = "source .venv/bin/activate, which bash setup_tpu.sh makes"
            error = f"error: {sys.executable} has no package {name}: first {advice}."
            print(error, file=sys.stderr)
            sys.exit(2)


def run(program):
    """What every program calls last: run `program()` and end the process, with the status that it returns or 0, or as
    `messages.one_sentence` does. A signal ends it at once, with a word: libraries that are being imported or that wait
    for threads would make a KeyboardInterrupt something else."""
    import multiprocessing

    from runtime import messages

    def interrupted(number):
        for child in multiprocessing.active_children():
            child.kill()
        end(128 + number, "interrupted")

    watch(interrupted)
    done = messages.one_sentence(program)
    sys.exit(done if isinstance(done, int) else 0)


def watch(note):
    """Call note(number) in a thread of its own for every signal, at once: a handler of Python's would wait until the
    main thread comes out of XLA, which may compile for minutes. Returns a function that ends this."""
    import threading

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def listen():
        while received := os.read(read_end, 1):  # empty when the pipe is closed
            if received[0] in SIGNALS:
                note(received[0])

    handlers = {number: signal.signal(number, lambda *_: None) for number in heeded()}
    before = signal.set_wakeup_fd(write_end)  # Python writes the number of each signal there
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()

    def over():
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(write_end)
        thread.join()
        os.close(read_end)

    return over
