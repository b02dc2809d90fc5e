"""The signals that ask a program to end. They are handled from its first line on.

This file imports nothing that takes time to load, since Ctrl-C during such an import would end in a traceback.
"""

import _signal as signal  # the C module behind `signal`; it loads fast, since it has no enums
import os
import sys
import time
from _thread import allocate_lock

# Signals that a person or a supervisor repeats on purpose.
INSISTING = signal.SIGINT, signal.SIGTERM
# The others come when a terminal is closed (SIGHUP), from a batch system before the time of a job is over (SIGUSR1,
# SIGUSR2), and at the limit of a process's CPU time (SIGXCPU).
SIGNALS = *INSISTING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
PACKAGES = "jax", "optax", "orbax", "tiktoken", "fsspec"  # packages that every program needs
NOTHING_LOST = "interrupted while no step was in progress; nothing was lost"
words = NOTHING_LOST  # printed when a signal ends main.py at once; replaced where something could not be saved

STARTED = time.time()  # when the process started
# Functions that release what other processes may wait for. They run also where the process ends at once.
releases = []
# Held while the process ends. Code that starts a worker process, or creates or renames a file, holds it meanwhile, so
# that the process never ends in the middle of that.
ending = allocate_lock()


def end(status, words):
    """End the process now, whatever its threads are doing, and print these words on stderr."""
    ending.acquire(True, 5)  # at most 5 s: the process must end even if another thread hangs
    # It may be missing or half imported during the first imports.
    numbered = getattr(sys.modules.get("runtime.messages"), "numbered", str)
    words = words and numbered(words)
    try:  # not by sys.stderr, which another thread may be writing to
        os.write(2, f"{words}\n".encode() if words else b"")
    except OSError:  # the terminal is gone
        pass
    if releases:  # it is empty during the first imports, when `threading` may be half imported
        import threading

        thread = threading.Thread(target=release_all, daemon=True)
        thread.start()
        thread.join(5)  # the storage may not answer
    os._exit(status)


def release_all():
    """Call the functions of `releases`."""
    for release in [*releases]:
        try:
            release()
        except Exception:  # an error must not keep the next ones from being released
            pass


def handled_signals():
    """The SIGNALS that this program handles: all but those that were set to be ignored when it was started, as nohup
    does with SIGHUP. SIGINT is handled even so, since a shell ignores it for every program in the background."""
    ignored = {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN}
    return [number for number in SIGNALS if number in INSISTING or number not in ignored]


def install(words="interrupted"):
    """Install a handler that ends the process and prints these words, for the time before the program does its work. A
    spawned process prints nothing. Every program calls this first.

    The handler runs only when the main thread executes Python, which is soon while modules are imported. If a package
    is missing, the program ends here, with a sentence.
    """
    words = "" if "__mp_main__" in sys.modules else words
    for number in handled_signals():
        signal.signal(number, lambda number, _: end(128 + number, words))
    # Here, so that a signal during this import is handled already.
    from importlib.util import find_spec

    from runtime.messages import open_streams

    open_streams()
    for name in PACKAGES:
        if find_spec(name) is None:
            advice = "source .venv/bin/activate, which bash setup_tpu.sh makes"
            error = f"error: {sys.executable} has no package {name}: first {advice}."
            print(error, file=sys.stderr)
            sys.exit(2)


def run(program):
    """Run `program()` and end the process with the status that it returns, or 0, or as `messages.one_sentence` does.
    Every program ends with this call.

    A signal ends the process at once, with a word. It does not raise KeyboardInterrupt, which libraries that are being
    imported or that wait for threads would turn into another error.
    """
    import multiprocessing

    from runtime import messages

    def interrupted(number):
        for child in multiprocessing.active_children():
            child.kill()
        end(128 + number, "interrupted")

    watch(interrupted)
    done = messages.one_sentence(program)
    sys.exit(done if isinstance(done, int) else 0)


def watch(on_signal):
    """Call on_signal(number) for every signal, at once, in a thread of its own. Returns a function that ends this.

    A usual Python handler would run only when the main thread returns from XLA, which may compile for minutes.
    """
    import threading

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def listen():
        while received := os.read(read_end, 1):  # empty when the pipe is closed
            if received[0] in SIGNALS:
                on_signal(received[0])

    handlers = {number: signal.signal(number, lambda *_: None) for number in handled_signals()}
    before = signal.set_wakeup_fd(write_end)  # Python writes the number of each signal to this pipe
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()

    def stop():
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(write_end)
        thread.join()
        os.close(read_end)

    return stop
