"""What launcher.sh does where cluster.env describes a slice that comes and goes: --keep, --status, --stop.

    python3 -m tools.cluster.keep start PLACES COMMIT SYNC TYPED FLAG...
    python3 -m tools.cluster.keep status | stop | run

Settings come in the environment. Needs Python 3.10 and no packages. `keeper.Keeper` does the work, in a tmux session of
its own where there is tmux; what starts it follows its log until the slice is asked for.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time

from planning.prices import dollars, price_of
from runtime import chips
from runtime.messages import UserError, duration, one_sentence, say_aside
from tools.cluster import keeper, slices
from tools.cluster.record import Folder, Record

BEGINNING = (
    "starting",
    "asking for the slice",
)  # phases in which a mistake in the settings may still show


def folder_of_settings():
    return Folder(os.environ["KEEPER"])


def start(places, commit, sync, typed, *flags):
    """--keep: begin, or take over what an earlier keeper left. typed: the command, whose flags may name a file that
    flags hold the text of."""
    chips.parse_slice(os.environ["TPU_TYPE"])
    folder = folder_of_settings()
    found = folder.read()
    if is_at_work(folder, found):
        raise UserError(
            f"process {found.process} keeps this slice already; see --status, or end that by --stop",
            value=f"TPU_NAME={os.environ['TPU_NAME']}",
        )
    if found and not found.has_ended:
        check_same_run(found, typed, list(flags))
        say_aside(f"taking over what is there; it runs commit {found.commit[:10]}")
    else:
        places = places.split("\t")
        for address in places[1:]:
            check_data(address)
        for bucket in sorted({part.split("/")[2] for part in places if part.startswith("gs://")}):
            check_bucket(bucket)
        folder.save(Record(typed, list(flags), commit, bool(sync), places))
    (folder / "stopping").unlink(missing_ok=True)
    return run_in_tmux(folder) if shutil.which("tmux") and "TMUX" not in os.environ else run()


def check_same_run(found, typed, flags):
    """Raises UserError where the slice is kept for a run with other flags."""
    if found.flags == flags:
        return
    if found.typed == typed:
        said = "the file of --config has changed since the run was started; restore it"
    else:
        said = f"the slice is kept for another run, started by {found.typed}; give that command"
    raise UserError(f"{said}, or first end the run by --stop")


def is_at_work(folder, record):
    """Whether a keeper runs. What one that was killed has begun, such as a request to Google, is waited for."""
    words = ["ps", "-o", "command=", "-p", str(record.process if record else 0)]
    if folder.is_taken():
        if "tools.cluster.keep" in subprocess.run(words, capture_output=True, text=True).stdout:
            return True
        say_aside("waiting for what the keeper before had begun")
        while folder.is_taken():
            time.sleep(0.3)
    return False


def check_data(address):
    """Raises UserError where gcloud finds nothing at the address of the data."""
    if not address.startswith("gs://"):
        return
    try:
        slices.gcloud("storage", "ls", address)
    except slices.Absent as e:
        raise UserError(f"there is nothing ({e})", flag="data", value=address) from None
    except (slices.Passing, slices.Refused) as e:
        say_aside(f"note: gcloud cannot look whether data is in {address} ({e})")


def check_bucket(bucket):
    """Raises UserError where the bucket does not exist; says where it lies in another region than the slice."""
    try:
        words = ["storage", "buckets", "describe", f"gs://{bucket}", "--format=value(location)"]
        location = slices.gcloud(*words).strip()
    except slices.Absent as e:
        raise UserError(f"there is no such bucket ({e})", value=f"gs://{bucket}") from None
    except (slices.Passing, slices.Refused) as e:
        return say_aside(f"note: gcloud does not tell where gs://{bucket} lies ({e})")
    region = os.environ["ZONE"].rpartition("-")[0]
    if location.lower() != region:
        say_aside(
            f"note: gs://{bucket} lies in {location}, the slice in {region}; Google charges for traffic between them"
        )


def run_in_tmux(folder):
    """Start the keeper in a detached tmux session, and follow its log until the slice is asked for."""
    at = log_size(folder)
    # tmux would show variables to all who ask for its environment
    folder.write("environment", json.dumps(dict(os.environ)))
    hidden = os.environ.get("SECRETS", "").split()
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    command = f"exec {shlex.quote(sys.executable)} -m tools.cluster.keep run detached"
    tmux = ["tmux", "-L", os.environ["KEEPER_TMUX"]]
    words = [*tmux, "new-session", "-d", "-s", "main", command]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"tmux could not start a session ({done.stderr.strip()}).")

    def lives():
        return subprocess.run([*tmux, "has-session"], capture_output=True).returncode == 0

    record = follow(folder, at, lives, until=lambda record: record.phase not in BEGINNING)
    if record.has_ended:
        return record.ending[0]
    if not lives():
        raise UserError(f"the keeper has ended; its log {folder / 'log'} says why.")
    print(
        "the keeper works in the background; bash launcher.sh --status, --logs keeper, --attach keeper, --stop"
    )
    return 0


def log_size(folder):
    path = folder / "log"
    return path.stat().st_size if path.exists() else 0


def follow(folder, at, lives, until):
    """Print the keeper's log from byte `at` while it lives(), or until(record). Returns the record."""
    while True:
        is_alive, record = lives(), folder.read()
        if (folder / "log").exists():
            with open(folder / "log", "rb") as log:
                log.seek(at)
                new = log.read()
            at += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
        if not is_alive or until(record):
            return record
        time.sleep(0.3)


def run(*detached):
    """The keeper itself, whose output also goes into its log. detached: its environment is in a file."""
    folder = folder_of_settings()
    for _ in range(20):  # others look at the lock for a moment
        if folder.take():
            break
        time.sleep(0.25)
    else:
        raise UserError("another keeper of this slice has just begun.")
    if detached:
        os.environ.update(json.loads((folder / "environment").read_text()))
        (folder / "environment").unlink()
    tee = subprocess.Popen(["tee", "-i", "-a", folder / "log"], stdin=subprocess.PIPE)
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    tee.stdin.close()
    try:
        return keep(folder)
    finally:
        sys.stdout.flush()
        for stream in (1, 2):
            os.close(stream)
        tee.wait()


def keep(folder):
    chip, n = chips.parse_slice(os.environ["TPU_TYPE"])
    the_slice = slices.slice_of_settings(chip, folder.owner())
    try:
        return keeper.Keeper(the_slice, folder, n).keep()
    except KeyboardInterrupt:
        print(
            "the keeper ends; the slice and its run stay and cost money: give the same command to go back to them, or "
            "bash launcher.sh --stop",
            flush=True,
        )
        return 130


def stop():
    """--stop: a keeper that is at work ends the run and deletes the slice; without one, this process does."""
    folder = folder_of_settings()
    record = folder.read()
    if record is None:
        raise UserError("nothing is kept", value=f"TPU_NAME={os.environ['TPU_NAME']}")
    (folder / "stopping").touch()
    if is_at_work(folder, record):
        record = follow(folder, log_size(folder), folder.is_taken, until=lambda record: False)
    elif record.has_ended and not record.is_paid:
        print(f"nothing is left to stop: {record.ending[1]}")
        return 0
    if not record.has_ended or record.is_paid:  # as where KEEP_SLICE kept it
        record.has_ended = False
        folder.save(record)
        run()
        record = folder.read()
    return 0 if record.ending[0] == keeper.STOPPED[0] else record.ending[0]


def status():
    """--status: what the keeper knows. Returns 1 where the run ended badly, or nobody keeps it."""
    folder = folder_of_settings()
    record = folder.read()
    if record is None:
        raise UserError(
            "nothing is kept; --keep begins", value=f"TPU_NAME={os.environ['TPU_NAME']}"
        )
    kind = f"{'spot ' if os.environ.get('SPOT') else ''}{os.environ['TPU_TYPE']}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.since))
    lasts = f" ({duration(time.time() - record.since)})"
    print(f"slice    {os.environ['TPU_NAME']}, {kind} in {os.environ['ZONE']}")
    print(
        f"state    ended at {when}"
        if record.has_ended
        else f"state    {record.phase} since {when}{lasts}"
    )
    if record.ending:
        print(f"         {record.ending[1]}")
    print(f"restarts {record.restarts}; slices lost: {record.lost}")
    print(f"cost     {cost_of(record)}")
    print(f"goodput  {goodput_of(record)}")
    sys.stdout.flush()
    if record.has_ended:
        return int(record.ending[0] not in (0, keeper.STOPPED[0]))
    if not folder.is_taken():
        raise UserError(
            f"nobody keeps the slice any more, and it may cost money; take over by: {record.typed}"
        )
    return 0


def cost_of(record):
    """Chip-hours so far, and their list price."""
    chip, n = chips.parse_slice(os.environ["TPU_TYPE"])
    seconds = record.chip_seconds + record.is_paid * n * (time.time() - record.looked)
    price = price_of(chip.name, 1, seconds / 3600)
    amount = price.spot if os.environ.get("SPOT") else price.on_demand
    known = f", about {dollars(amount)} (list price: {price.source})" if amount is not None else ""
    return f"{price.chip_hours:.2f} chip-hours{known}"


def goodput_of(record):
    """The share of the time in steps, from the newest row that the run has written into its bucket."""
    parts = record.places[0] + "/metrics/"
    try:
        names = [
            name for name in slices.gcloud("storage", "ls", parts).split() if "-after-" in name
        ]
        rows = slices.gcloud("storage", "cat", max(names)).splitlines()
        row = json.loads(rows[-1])
        return f"{row['goodput']:.0%} of the time since the run's first start in steps, up to step {row['step']}"
    except (slices.Absent, slices.Passing, slices.Refused, ValueError, KeyError, IndexError):
        return f"not known; there are no metrics in {parts} yet"


if __name__ == "__main__":
    action = dict(start=start, status=status, stop=stop, run=run)[sys.argv[1]]
    try:
        sys.exit(one_sentence(lambda: action(*sys.argv[2:])))
    except KeyboardInterrupt:  # of who follows its log
        say_aside(
            "what the keeper has begun continues in the background; see --status and --logs -f keeper"
        )
        sys.exit(130)
