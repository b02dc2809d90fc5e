"""What takes the place of main.py on the hosts of a fake slice: quick, with the contract of a real run.

It knows a few flags, resumes from the newest checkpoint in its bucket, a folder here, saves on SIGTERM, and ends with
the statuses of main.py. Its "bits" are a chain of hashes, a link a step, so a step that is lost or run twice shows. It
waits before its last step while its bucket holds a file "hold".
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

SECONDS = 0.03  # of a step; a checkpoint takes ten times as long


def bits_after(steps):
    """The bits of an undisturbed run."""
    bits = ""
    for step in range(1, steps + 1):
        bits = hashlib.sha256(f"{bits} {step}".encode()).hexdigest()
    return bits


def say(words):
    print(time.strftime("%H:%M:%S"), words, flush=True)


def save(folder, step, bits):
    """In two parts, as a checkpoint has many: the second makes it count."""
    part = folder / f"{step}.{os.getpid()}.part"
    part.write_text(bits[:32])
    time.sleep(5 * SECONDS)
    part.write_text(bits)
    time.sleep(5 * SECONDS)
    os.replace(part, folder / str(step))


def main(bucket, words):
    flags = dict(zip(words[::2], words[1::2]))
    run = bucket / flags["--output_dir"].split("/", 3)[3] / flags["--name"]
    (run / "metrics").mkdir(parents=True, exist_ok=True)
    last, every = int(flags["--training_steps"]), int(flags["--save_steps"])
    steps = [int(path.name) for path in run.iterdir() if path.name.isdigit()]
    step, bits = max(steps, default=0), ""
    if step:
        bits = (run / str(step)).read_text()
        say(f"resuming {run.name} at step {step}, after {step} sequences")
    if (run / "refuses").exists():
        print(f"error: {(run / 'refuses').read_text()}", file=sys.stderr)
        sys.exit(2)
    signals = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    say("compiled in 0s")
    while step < last and not signals:
        if (run / "crashes").exists():
            sys.exit(1)
        time.sleep(SECONDS)
        if step == last - 1 and (bucket / "hold").exists():
            continue  # there is more to come in the test
        step += 1
        bits = hashlib.sha256(f"{bits} {step}".encode()).hexdigest()
        say(f"step {step}/{last}")
        if step % every == 0:
            save(run, step, bits)
            row = {"step": step, "goodput": 0.5}
            (run / "metrics/000001-after-0.jsonl").write_text(json.dumps(row) + "\n")
    save(run, step, bits)
    say(f"done at step {step}" if step == last else f"stopped at step {step}")
    sys.exit(128 + signals[0] if signals else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:])
