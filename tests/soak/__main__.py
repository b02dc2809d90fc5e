"""Try the programs with what their tests do not have, and say how each try ended.

python -m tests.soak [kills] [damage] [commands] [meshes] [--seed N] [--count N]

Each case is drawn from its kind, the seed and its number alone, so `--only NUMBER` repeats it. Every case is a line of
the log; a table and the cases that failed come at the end, and the status is 1 if any did.
"""

import argparse
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.soak import programs

KINDS = {
    "kills": 10,
    "damage": 40,
    "commands": 100,
    "meshes": 2,
}  # cases where no count is given: a minute or two


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; none: all")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--count", type=int, help=f"cases of each kind (default: {KINDS})")
    parser.add_argument("--only", type=int, help="the one case to repeat")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument(
        "--folder", type=Path, help="place for sound files, to keep them (default: a temporary one)"
    )
    parser.add_argument(
        "--log", type=Path, default=Path("runs/soak.jsonl"), help="(default: %(default)s)"
    )
    args = parser.parse_args()
    unknown = set(args.kinds) - set(KINDS)
    if unknown:
        parser.error(f"there are {', '.join(KINDS)}, not {', '.join(unknown)}")
    return args


class Soak:
    """The cases of a seed, several at a time, and what came of them."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.lock = threading.Lock()
        self.rows = []
        args.log.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(args.log, "a")

    def run(self, name):
        """All cases of a kind."""
        kind = importlib.import_module(f"tests.soak.{name}").Kind(self.folder)
        numbers = range(self.args.count or KINDS[name])
        if self.args.only is not None:
            numbers = [self.args.only]
        pool = ThreadPoolExecutor(self.args.workers)
        try:
            for _ in pool.map(lambda number: self.one(name, kind, number), numbers):
                pass
        finally:
            pool.shutdown(cancel_futures=True)

    def one(self, name, kind, number):
        """A case: its line in the log."""
        began = time.monotonic()
        place = self.folder / f"{name}-{number}"
        try:
            rng = random.Random(f"{name} {self.args.seed} {number}")
            tried, how, wrong, said = kind.case(rng, place)
        except Exception as e:  # of the soak itself
            tried, how, wrong, said = "?", "soak failed", f"{type(e).__name__}: {e}", None
        row = dict(
            kind=name, seed=self.args.seed, number=number, tried=tried, ended=how, failed=wrong
        )
        row["seconds"] = round(time.monotonic() - began, 2)
        if said:
            row |= dict(status=said.status, out=said.out[-2000:], err=said.err[-2000:])
        with self.lock:
            self.rows.append(row)
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()
            if wrong:
                print(f"{name} {number}: {wrong}: {tried}", flush=True)
        if self.args.only is None:
            shutil.rmtree(place, ignore_errors=True)
        elif said:
            print(f"{tried}\n{said.out}{said.err}status {said.status}; its files are in {place}")


def table(soak):
    """The lines that are printed at the end."""
    by_kind = itertools.groupby(soak.rows, key=lambda row: row["kind"])
    lines = [f"{'kind':9} {'cases':>6} {'failed':>7} {'s/case':>7}  how they ended"]
    for name, rows in by_kind:
        rows = list(rows)
        ends = Counter(row["ended"] for row in rows)
        words = ", ".join(f"{how} {n}" for how, n in ends.most_common())
        failed = sum(bool(row["failed"]) for row in rows)
        seconds = sum(row["seconds"] for row in rows) / len(rows)
        lines.append(f"{name:9} {len(rows):6} {failed:7} {seconds:7.2f}  {words}")
    for row in soak.rows:
        if row["failed"]:
            again = (
                f"python -m tests.soak {row['kind']} --seed {row['seed']} --only {row['number']}"
            )
            lines.append(f"{again}    # {row['failed']}: {row['tried']:.150}")
    return lines


def main():
    args = parse()
    programs.prepare()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(args, folder.resolve())
    try:
        for name in args.kinds or KINDS:
            soak.run(name)
    except KeyboardInterrupt:
        print("interrupted; until then:")
    print("\n".join(table(soak)))
    if not args.folder and args.only is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(row["failed"] for row in soak.rows) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
