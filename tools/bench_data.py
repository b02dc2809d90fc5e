"""Measure the data programs side by side: the tokenizer against a bare loop, workers, reading, and memory.

python tools/bench_data.py --source stdlib [--mb 1000] [--json FILE]      (a quick look: --mb 50)

Every measure is taken on the same text, in turns, so that a machine that others share treats them alike; of several
rounds the fastest counts. Speeds of the tokenizer are those of the whole program from reading text to renamed shards,
without the start of Python; the bare loop encodes text that is in memory and throws the tokens away.
"""

if __name__ == "__main__":
    import program

    program.begin()

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import dataset
import utils
from data import command_line, tokenization
from data.sources.files import list_documents
from data.sources.text import read_text
from presets import preset
from tools import common
from training import settings, steps

TINY_TOKENS_PER_SECOND = 5_000  # of the preset tiny on two CPU cores, see docs/performance.md
SHARD_TOKENS = 2_000_000  # small beside the memory that is measured


def write_text(path, documents, megabytes):
    """A .jsonl file of the texts of `documents`, repeated until it has so many megabytes of text."""
    size, texts = 0, [read_text(d)[0] for d in documents]
    with open(path, "w") as f:
        while size < megabytes * 1e6:
            for text in texts:
                f.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                if size >= megabytes * 1e6:
                    break
    return path


def tokenize(text, output, ranks, workers):
    """Run data/tokenize_shards.py; (seconds it says it took, peak resident memory of its own process in MB)."""
    program = [
        sys.executable,
        ROOT / "data" / "tokenize_shards.py",
        "--source",
        text,
        "--output",
        output,
        "--workers",
        str(workers),
        "--tokenizer",
        ranks,
        "--shard_tokens",
        str(SHARD_TOKENS),
        "--val_fraction",
        "0",
    ]
    process, peak = subprocess.Popen(program, stdout=subprocess.PIPE, text=True), 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *(int(kb) / 1e3 for kb in re.findall(r"VmHWM:\s+(\d+)", status))])
        except OSError:
            pass  # it has just ended
        time.sleep(0.05)
    said = process.stdout.read()
    if process.returncode:
        raise utils.UserError(
            f"--source: data/tokenize_shards.py ended with status {process.returncode} ({said})."
        )
    return float(re.search(r"([\d.]+) s$", said)[1]), peak


def bare_loop(text, ranks):
    """Seconds of `encode_ordinary_batch` on one thread, a thousand documents at a time."""
    encoding = tokenization.load_tokenizer(str(ranks))
    with open(text) as f:
        texts = [json.loads(line)["text"] for line in f]
    seconds = 0.0
    for i in range(0, len(texts), 1000):
        began = time.perf_counter()
        encoding.encode_ordinary_batch(texts[i : i + 1000], num_threads=1)
        seconds += time.perf_counter() - began
    return seconds


def read(bucket, cache, seconds=5.0):
    """Tokens/s from shards to batches on the device, as main.py reads them for the preset tiny."""
    cfg = utils.replace(
        preset("tiny"), data=str(bucket), cache_dir=str(cache), n_device_axis=(1, 1, 1)
    )
    cfg = settings.validate(utils.replace(cfg, n_devices=1), jax.device_count())
    mesh, sequences, T = steps.make_mesh(cfg), cfg.data.train_batch_size, cfg.model.T
    shape = 1, cfg.data.microbatches, sequences // cfg.data.microbatches, T
    order = partial(dataset.Mixture(cfg, "train").sequences, seed=0)

    def make(first):
        return dataset.put_batch(order, first, shape, mesh)

    batches = dataset.Prefetch(make, range(0, 10**12, sequences))
    jax.block_until_ready(next(batches))
    began, n = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        jax.block_until_ready(next(batches))
        n += 1
    speed = n * sequences * T / (time.perf_counter() - began)
    batches.close()
    return speed


def train_tokenizer(source, ranks):
    """Run data/train_tokenizer.py, which writes the file `ranks`."""
    program = [sys.executable, ROOT / "data" / "train_tokenizer.py"]
    flags = ["--source", source, "--vocab_size", "8192", "--output", ranks]
    subprocess.run([*program, *flags], check=True, stdout=subprocess.DEVNULL)


def tokenizer_speeds(text, megabytes, rounds, folder, ranks):
    """{"bare loop", "1 worker", "2 workers": MB/s} on a text of so many megabytes, the fastest of the rounds."""
    seconds = {"bare loop": [], "1 worker": [], "2 workers": []}
    for i in range(rounds):
        seconds["bare loop"].append(bare_loop(text, ranks))
        for workers, name in ((1, "1 worker"), (2, "2 workers")):
            took, _ = tokenize(text, folder / f"{workers}-{i}", ranks, workers)
            seconds[name].append(took)
    return {name: megabytes / min(took) for name, took in seconds.items()}


def measure(args, folder):
    """{name: (value, least value that it should have or None)}; text, shards and cache are written to `folder`."""
    documents, ranks = list_documents(args.source), folder / "bench.tiktoken"
    train_tokenizer(args.source, ranks)
    megabytes = 0.3 * args.mb  # for speeds: enough that starting two workers does not count
    text = write_text(folder / "text.jsonl", documents, megabytes)
    speed = tokenizer_speeds(text, megabytes, args.rounds, folder, ranks)
    text.unlink()
    table = {f"{name}, MB/s": (value, None) for name, value in speed.items()}
    table["1 worker / bare loop"] = speed["1 worker"] / speed["bare loop"], 0.9
    table["2 workers / 1 worker"] = speed["2 workers"] / speed["1 worker"], 1.7

    shards, cache = folder / "1-0", folder / "cache"
    wanted = 100 * TINY_TOKENS_PER_SECOND
    table["local shards to batches, tokens/s"] = read(shards, cache), wanted
    remote = f"file://{shards}"
    table["cached remote shards to batches, tokens/s"] = read(remote, cache), None

    peaks = []
    for size in (args.mb / 10, args.mb):
        text = write_text(folder / "text.jsonl", documents, size)
        _, peak = tokenize(text, folder / f"{size}", ranks, 1)
        peaks.append(peak)
        table[f"peak memory at {size:g} MB, MB"] = peak, None
    table["50 MB / growth of memory"] = 50 / max(peaks[1] - peaks[0], 1), 1
    return table


@dataclass(frozen=True, kw_only=True)
class Options(command_line.Source):
    """Measure the data programs side by side: the tokenizer against a bare loop, workers, reading, and memory."""

    mb: float = utils.flag(1000.0, least=1, most=10**6)
    """Megabytes of text of the larger measure of memory; the smaller takes a tenth, speeds take three tenths."""
    rounds: int = utils.flag(3, least=1)
    """Times that each speed is measured."""
    json: str = ""
    """File to write the numbers to as well."""


def main():
    args = utils.read_flags(Options, sys.argv[1:], "tools/bench_data.py")
    if args.json:
        utils.check_place(args.json, "--json")
    with tempfile.TemporaryDirectory() as folder:
        table = measure(args, Path(folder))
    for name, (value, wanted) in table.items():
        verdict = ""
        if wanted is not None:
            said = "ok" if value >= wanted else "BELOW"
            verdict = f"  {said}, should be at least {wanted:,}"
        print(f"{name:45} {value:15,.2f}{verdict}", flush=True)
    if args.json:
        values = {name: value for name, (value, _) in table.items()}
        utils.write_file(args.json, utils.to_json(values, indent=1) + "\n")


if __name__ == "__main__":
    common.run(main)
