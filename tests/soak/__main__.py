"""Try the programs with what their tests do not have.

python -m tests.soak [kills] [damage] [lines] [meshes] [storage] [locks]
    [--seed N] [--first N] [--count N] [--plain]

Each case is drawn from its kind, the seed and its number alone, so `--only NUMBER` repeats it. It does so with ordinary
processes in place of forked ones (tests/soak/forks.py), as `--plain` has all cases. A case that failed is printed with
the command that repeats it, and the exit status is 1.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.soak import damage, jobs, kills, lines, locks, meshes, programs, storage

KINDS = dict(
    kills=kills.case,
    damage=damage.case,
    lines=lines.case,
    meshes=meshes.case,
    storage=storage.case,
    locks=locks.case,
)
# cases, without --count
COUNTS = dict(kills=10, damage=40, lines=40, meshes=2, storage=3, locks=200)
WORKERS = dict(storage=6)  # cases at once, which mostly wait; else one on each core


def run_kind(name, args, folder):
    """Run all cases of a kind and print how they ended. Returns how many failed."""

    def run_case(number):
        rng = random.Random(f"{name} {args.seed} {number}")
        case = KINDS[name](rng, folder / "sound", folder / f"{name}-{number}")
        if case.wrong:
            again = f"python -m tests.soak {name} --seed {args.seed} --only {number}"
            print(f"{again}    # {case.wrong}: {case.tried}", flush=True)
        if args.only is not None:
            print(f"{case.tried}\n{case.ended}\nits files are in {folder}")
        elif not case.wrong:
            shutil.rmtree(folder / f"{name}-{number}", ignore_errors=True)
        return case

    last = args.first + (args.count or COUNTS[name])
    numbers = range(args.first, last) if args.only is None else [args.only]
    with ThreadPoolExecutor(WORKERS.get(name, os.cpu_count())) as pool:
        cases = list(pool.map(run_case, numbers))
    failed = sum(bool(case.wrong) for case in cases)
    ends = Counter(case.how for case in cases).most_common()
    words = ", ".join(f"{how} {n}" for how, n in ends)
    print(f"{name}: {len(cases)} cases, {failed} failed: {words}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS, help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--count", type=int, help=f"cases of each kind (default: {COUNTS})")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first case of each kind"
    )
    parser.add_argument("--plain", action="store_true", help="run ordinary processes")
    parser.add_argument("--only", type=int, help="number of the one case to repeat")
    args = parser.parse_args()
    programs.FORKED = not (args.plain or args.only is not None)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    if {*args.kinds} - {"meshes", "locks"}:
        jobs.make(folder / "sound")
    failed = sum(run_kind(name, args, folder) for name in args.kinds)
    locks.close_servers()
    if failed:
        print(f"the files of those that failed are in {folder}")
    elif args.only is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
