"""Measure data/tokenize_shards.py beside a bare loop of tiktoken, and its memory.

python tools/bench_data.py --source stdlib [--mb 1000] [--rounds 3]      (a quick look: --mb 50)

Every measure is taken on the same text, in turns, so that a machine that others share treats them alike; of several
rounds the fastest counts. Speeds are those of the whole program from reading text to renamed shards, without the start
of Python; the bare loop encodes text that is in memory and throws the tokens away.
"""

if __name__ == "__main__":
    import program

    program.begin()

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import utils
from data import command_line, tokenization
from data.sources.files import list_documents
from data.sources.text import read_text
from runtime import parser
from runtime.messages import UserError
from tools import common

DATA = Path(__file__).resolve().parents[1] / "data"


def write_text(path, documents, megabytes):
    """A .jsonl file of the texts of `documents`, repeated until it has so many megabytes of text."""
    left = megabytes * 1e6
    texts = [read_text(document)[0] for document in documents]
    with open(path, "w") as f:
        while left > 0:
            for text in texts:
                if left > 0:
                    f.write(json.dumps({"text": text}) + "\n")
                    left -= len(text.encode())


def run(program, **flags):
    """(what a program of data/ said, its peak resident memory in MB). Raises UserError where it fails."""
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    words = [sys.executable, DATA / program, *words]
    process, peak = subprocess.Popen(words, stdout=subprocess.PIPE, text=True), 0.0
    while process.poll() is None:
        try:  # not getrusage, which counts what this process held when it began the other
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break  # it has just ended
        found = re.search(r"VmHWM:\s+(\d+)", status)
        peak = max(peak, int(found[1]) / 1e3) if found else peak
        time.sleep(0.05)
    said, _ = process.communicate()
    if process.returncode:
        ended = f"data/{program} ended with status {process.returncode} ({said.strip()})"
        raise UserError(f"--source: {ended}.")
    return said, peak


def tokenize(text, output, ranks, workers):
    """(seconds that data/tokenize_shards.py says it took, its peak memory in MB)."""
    small = dict(shard_tokens=2_000_000, val_fraction=0)  # beside the memory that is measured
    said, peak = run(
        "tokenize_shards.py", source=text, output=output, tokenizer=ranks, workers=workers, **small
    )
    return float(re.search(r"([\d.]+) s$", said)[1]), peak


def bare_loop(text, ranks):
    """Seconds of `encode_ordinary_batch` on one thread, a thousand documents at a time."""
    encoding = tokenization.load_tokenizer(str(ranks))
    with open(text) as f:
        texts = [json.loads(line)["text"] for line in f]
    began = time.perf_counter()
    for i in range(0, len(texts), 1000):
        encoding.encode_ordinary_batch(texts[i : i + 1000], num_threads=1)
    return time.perf_counter() - began


def measure(args, folder):
    """Print speeds, then peak memory; everything is written to `folder`."""
    documents, ranks = list_documents(args.source), folder / "bench.tiktoken"
    run("train_tokenizer.py", source=args.source, vocab_size=8192, output=ranks)
    text = folder / "text.jsonl"
    megabytes = 0.3 * args.mb  # for speeds: enough that starting two workers does not count
    write_text(text, documents, megabytes)
    seconds = {"bare loop": [], "1 worker": [], "2 workers": []}
    for i in range(args.rounds):
        seconds["bare loop"].append(bare_loop(text, ranks))
        for workers, name in ((1, "1 worker"), (2, "2 workers")):
            seconds[name].append(tokenize(text, folder / f"{workers}-{i}", ranks, workers)[0])
    for name, took in seconds.items():
        print(f"{name:30} {megabytes / min(took):8.1f} MB/s", flush=True)
    for size in (args.mb / 10, args.mb):
        write_text(text, documents, size)
        _, peak = tokenize(text, folder / f"{size}", ranks, 1)
        print(f"{f'peak memory at {size:g} MB of text':30} {peak:8.1f} MB", flush=True)


@dataclass(frozen=True, kw_only=True)
class Options(command_line.Source):
    """Measure data/tokenize_shards.py beside a bare loop of tiktoken, and its memory."""

    mb: float = parser.flag(1000.0, least=1, most=10**6)
    """Megabytes of text of the larger measure of memory; the smaller takes a tenth, speeds take three tenths."""
    rounds: int = parser.flag(3, least=1)
    """Times that each speed is measured."""


def main():
    args = utils.read_flags(Options, sys.argv[1:], "tools/bench_data.py")
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    common.run(main)
