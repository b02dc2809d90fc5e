"""The errors and lines that a user reads: how they are worded, and where they are printed."""

import contextlib
import difflib
import os
import re
import signal
import sys
import time

# The secrets that an address may hold: what precedes @ in it (but for hf://, where a revision may follow @), and the
# values in its query whose names are like these, such as X-Amz-Signature and access_token.
BEFORE_HOST = re.compile(r"(?<!hf)(://)[^\s/'\"]+@")
NAMES = "token|sig|secret|pass|pwd|key|cred|auth|session|code"
IN_QUERY = re.compile(rf"([?&;][^\s=&;]*(?:{NAMES})[^\s=&;]*=)[^\s&;'\"),]+", re.IGNORECASE)
HIDDEN = "***"


def masked(text):
    """The text with HIDDEN in place of the passwords and tokens of the addresses in it."""
    text = BEFORE_HOST.sub(rf"\1{HIDDEN}@", str(text))
    return IN_QUERY.sub(rf"\1{HIDDEN}", text)


NOT_GIVEN = object()  # the value of a flag, in a UserError, where the words are "no --flag"


class UserError(Exception):
    """A mistake that the user can fix: one sentence that says what is wrong, where, and what would be right.

    said: the whole sentence. Or, with any of the following, what is wrong, without a full stop:
    flag, value: the flag that is wrong, without hyphens, and its value; a flag or a value alone will do.
    remedy: what would do.
    where: the file that holds the flag.
    others: {flag: value} of the other flags that `said` and `remedy` name: as {flag} there; None: without a value.

        UserError("must divide {n_head}", flag="n_kv_head", value=5, n_head=8)

    reads "--n_kv_head 5: must divide --n_head 8." Where the user knows these flags by other names, such as those of a
    file, a caller that knows them calls `renamed`; nobody rewrites the sentence.
    """

    status = 2  # the exit status of a program that it ends
    is_common = False  # whether every process of the run raises it, see `common_errors`

    def __init__(self, said, *, flag="", value=None, remedy="", where="", **others):
        super().__init__(said)
        self.said = said
        self.flag = flag
        self.value = value
        self.remedy = remedy
        self.where = where
        self.others = others
        self.names = {}  # {flag: what the user calls it}; a flag that is not in it is called --flag

    def renamed(self, where="", **names):
        """This error, with {flag: the name by which the user knows it, "" for none} and the file that holds the
        flags."""
        self.names |= names
        self.where = where or self.where
        return self

    def worded(self, flag, value):
        """A flag and its value, as they would be written on the command line or in the file."""
        name = self.names.get(flag, f"--{flag}")
        if value is None or value is True:
            return name
        if value is False:
            return f"--no_{flag}" if name == f"--{flag}" else f"{name} false"
        if value is NOT_GIVEN:
            return f"no {name}"
        if value == "":
            return f"{name} ''"
        words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return f"{name} {words}".strip()

    def with_others(self, text):
        """`text` with the wording of each {flag} of `others`. Other braces stay, since they may be part of a user's
        value."""
        for flag, value in self.others.items():
            text = text.replace(f"{{{flag}}}", self.worded(flag, value))
        return text

    def __str__(self):
        subject = "" if self.value is None else str(self.value)
        if self.flag:
            subject = self.worded(self.flag, self.value)
        if not (self.where or subject or self.remedy):
            return masked(self.said)
        said = self.with_others(self.said).removesuffix(".")  # of a whole sentence with a `where`
        parts = [part for part in (self.where, subject, said) if part]
        remedy = f"; {self.with_others(self.remedy)}" if self.remedy else ""
        return masked(f"{': '.join(parts)}{remedy}.")


@contextlib.contextmanager
def common_errors():
    """Mark the UserErrors of a `with` block as those that all processes of a run raise, since they follow from what all
    have in common, such as the command line. Then process 0 prints them for all."""
    try:
        yield
    except UserError as e:
        e.is_common = True
        raise


class Unavailable(UserError):
    """A problem that may pass by itself, such as an outage of the storage. tools/cluster/supervise.sh starts a program
    that it ended again."""

    status = 75  # "temporary failure" in sysexits.h


def first_line(error):
    """The first line of a library's error, at most 200 characters, or its class where it has none."""
    # TensorStore appends the addresses of its functions
    text = masked(error).split(" See full TensorStore")[0].strip()
    return (text or type(error).__name__).splitlines()[0][:200]


def open_streams():
    """Prepare the standard streams of a program for any text.

    Characters that their encoding lacks are escaped, as Python does on stderr by itself. A stream that is closed is
    opened to /dev/null. Otherwise the next file that the program opens would get the stream's number, and with it
    whatever a library prints.
    """
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is the stream's.
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))
    with contextlib.suppress(AttributeError):  # the streams of a notebook have no `reconfigure`
        sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdin.reconfigure(errors="surrogateescape")


def one_sentence(program):
    """The result of `program()`. Errors that a user can fix end the process with at most one line:

    - a UserError with its sentence and its status;
    - an output whose reader has ended, such as `head`, silently with status 141, as the shell has it;
    - an output that cannot be written, as to a full disk, with a sentence and status 1.
    """
    try:
        done = program()
        sys.stdout.flush()
        return done
    except BrokenPipeError:
        give_up_stdout()
        sys.exit(128 + signal.SIGPIPE)
    except UserError as e:
        say_error(e, own=not e.is_common)
        sys.exit(e.status)
    except OSError as e:
        if can_print():
            raise
        give_up_stdout()
        say_error(
            f"standard output cannot be written ({e.strerror}); make room, or send it elsewhere."
        )
        sys.exit(1)


def can_print():
    """Whether stdout accepts a line. An OSError does not say which file could not be written, so this asks."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def give_up_stdout():
    """Discard what else is printed. Python flushes stdout once more as it ends, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def nearest(word, known, least=0.6):
    """The words "; the nearest is X" for the one of the words `known` that is most like `word`; "" if none is at least
    `least` like it, from 0 to 1 as difflib measures it."""
    plain = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), plain, 1, least)
    return f"; the nearest is {plain[near[0]]}" if near else ""


def size(n):
    """A number of bytes in a unit that suits it: 0.06 KiB, 16.00 KiB, 0.12 GiB."""
    for power, unit in enumerate(("KiB", "MiB", "GiB"), 1):
        if n < 102.4 * 1024**power or power == 3:
            return f"{n / 1024**power:.2f} {unit}"


def short(n):
    """A number of tokens or parameters in few characters: 287k, 1.15M, 2.49B, 4.72T."""
    for unit, each in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= 0.9995 * each:
            return f"{n / each:.2f}{unit}"
    return f"{n / 1e3:.0f}k"


def duration(seconds):
    """Seconds in words: 42s, 3m05s, 2h10m, 4d03h."""
    minutes, s = divmod(int(max(0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    d, h = divmod(hours, 24)
    if d:
        return f"{d}d{h:02d}h"
    if h:
        return f"{h}h{m:02d}m"
    if m:
        return f"{m}m{s:02d}s"
    return f"{s}s"


spoke = time.monotonic()  # when something was last printed; see pulse.py
# The number of this process, where several print into one log. Process 0 prints what concerns the whole run; the others
# print only what is their own, such as an error that they alone have, with their number before it: [3].
number = 0


def share_log(process):
    """From here on this is the process of that number among those that print into one log.

    LOG_PER_PROCESS=yes says that each has a log of its own: then each prints every line, without a number.
    """
    global number
    number = 0 if os.environ.get("LOG_PER_PROCESS") == "yes" else process


def numbered(text):
    """`text` with the number of this process before each of its lines, unless it is process 0."""
    return "\n".join(f"[{number}] {line}" for line in text.split("\n")) if number else text


def say(words, own=False):
    """Print a line with the time of day, at once. own: as for `put_line`."""
    put_line(f"{time.strftime('%H:%M:%S')} {masked(words)}", sys.stdout, own)


def say_aside(words, own=False):
    """Print words on stderr, at once. Stdout is left alone, since it may be one JSON object."""
    put_line(masked(words), sys.stderr, own)


def put_line(line, file, own=False):
    """Print a line at once, above any progress bars on the terminal.

    own: whether it is this process's own, and no line of the whole run, which process 0 prints for all.
    """
    global spoke
    if number and not own:
        return
    line = numbered(line)
    spoke = time.monotonic()
    with contextlib.suppress(OSError):  # a full disk below the log must not end training
        bars = sys.modules.get("tqdm")  # a program that has not imported it has no bars
        # tqdm has no public name for the list of open bars.
        if bars and getattr(bars.tqdm, "_instances", None):
            bars.tqdm.write(line, file=file)
        else:
            # One write: the processes of a merged log would otherwise cut each other's lines.
            file.write(f"{line}\n")
        file.flush()


def show(text):
    """Print a text for which somebody asked, such as --help. Process 0 prints it for all."""
    if not number:
        print(text, flush=True)


def warn(words, own=False):
    """Print a warning on stderr."""
    say_aside(f"warning: {words}", own)


def say_error(sentence, own=True):
    """Print an error as one line. The values in it that a user wrote may have several lines."""
    say_aside(f"error: {' '.join(str(sentence).splitlines())}", own)


def flush_output():
    """Write what was printed so far, if stdout still has a reader."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
