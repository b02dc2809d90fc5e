"""What a keeper knows of its slice and run, in a folder of its own, so that another one can take over at any moment."""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from pathlib import Path

from runtime.messages import UserError


@dataclasses.dataclass
class Record:
    """One run on a slice that comes and goes: what it was started with, and what has happened so far."""

    typed: str  # the command
    flags: list  # of main.py, the file of --config by its text
    commit: str  # that all slices run
    sync: bool  # the commit holds files as they were here
    places: list  # addresses of the run and of its data
    began: float = dataclasses.field(default_factory=time.time)
    process: int = 0  # of the keeper
    phase: str = "starting"
    since: float = dataclasses.field(default_factory=time.time)  # when the phase began
    asked: float = 0.0  # when the slice was last asked for
    was_accepted: bool = False  # the last request
    had: bool = False  # there was a slice
    born: str = ""  # when the node of the slice was made; "" while there is none
    is_launched: bool = False  # the run, on this slice
    is_given_up: bool = False  # this slice, since a host does not answer
    lost: int = 0  # slices
    failures: int = 0  # of the run or its start, since it last resumed from a newer checkpoint
    restarts: int = 0  # of the run, after its first start
    starts: int = 0
    resumed: int = -1  # the step from which it last resumed; -1 before its first step
    chip_seconds: float = 0.0
    looked: float = 0.0  # when Google was last asked
    is_paid: bool = False  # the node existed then
    ending: list = dataclasses.field(default_factory=list)  # [exit status, why], once it is decided
    has_ended: bool = False


class Folder:
    """The keeper's folder, ~/.moe-pretraining/keep/SLICE.

    owner: the number that marks slices as this keeper's; state.json: the `Record`; hosts: HOSTS and COORDINATOR of the
    slice that is there; known_hosts: their ssh keys; log: what the keeper says; stopping: a person has said --stop;
    lock: held by the keeper, and by what it has begun.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.lock = None
        # what is in here lets its reader act as the keeper
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __truediv__(self, name):
        return self.path / name

    def owner(self):
        """The number of this keeper, drawn once."""
        with contextlib.suppress(OSError):
            return (self / "owner").read_text()
        self.write("owner", secrets.token_hex(8))
        return (self / "owner").read_text()

    def write(self, name, text):
        """Replace a file, so that a reader finds the old or the new text, also after a crash of the machine."""
        part = self / f"{name}.part"
        with open(part, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, self / name)

    def read(self):
        """The `Record`; None where there is none."""
        try:
            text = (self / "state.json").read_text()
        except FileNotFoundError:
            return None
        try:
            return Record(**json.loads(text))
        except (ValueError, TypeError):
            said = "is no record of this version of the keeper; delete the slice by gcloud, then this file"
            raise UserError(said, value=str(self / "state.json")) from None

    def save(self, record):
        self.write("state.json", json.dumps(dataclasses.asdict(record), indent=1))

    def take(self):
        """Lock the folder until this process, and the changes that it begins, have ended. Returns whether it could."""
        self.lock = open(self / "lock", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            self.lock = None
        return self.lock is not None

    def is_taken(self):
        """Whether a keeper is at work, or what one has begun."""
        if not self.take():
            return True
        self.lock.close()
        self.lock = None
        return False
