"""Tokenize a source of text into shards of token ids, for training and for validation.

python data/tokenize_shards.py --source stdlib --output data/shards/stdlib --tokenizer data/shards/bpe8192.tiktoken

Writes OUTPUT/train/000000.npy, ... and OUTPUT/val/000000.npy, ...: one-dimensional arrays that numpy.load reads, uint16
where that holds the vocabulary, else uint32. A document is the end-of-text token and then its text, no part of which
becomes a special token; documents continue from one shard into the next. manifest.json beside them is written last: a
folder without one is unfinished, and the same command goes on from the last whole shard, as OUTPUT/progress.npz says.
OUTPUT/source.npz tells whether a file of the source has changed since.
"""

if __name__ == "__main__":
    import program

    program.begin()

import hashlib
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.command_line import VAL_FRACTION, Parser, run
from data.output import Output, ShardWriter
from data.sources import open_source
from data.sources.base import many, warn
from data.tokenization import (
    TOKENIZER_FILES,
    HubTokenizer,
    dump_ranks,
    keep_tokenizer,
    load_tokenizer,
)
from data.workers import cut, encode, processes, ray_actors
from training.locks import alone_in
from utils import UserError, check_number, is_remote, say

BAR = "{l_bar}{bar}| {n_fmt}{unit}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"

# --- The command line -------------------------------------------------------------------------------------------


def parse():
    """The command line, checked. Raises UserError."""
    parser = Parser(__doc__.splitlines()[0])
    add_flags(parser)
    args = parser.parse_args()
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction}: must be at least 0 and below 1.")
    check_number("shard_tokens", args.shard_tokens, least=1)
    check_number("workers", args.workers, least=1, most=1024)
    local = args.source != "stdlib" and not is_remote(args.source) and not is_remote(args.output)
    if local and Path(args.output).resolve().is_relative_to(Path(args.source).resolve()):
        raise UserError(
            f"--output {args.output}: must not lie in --source {args.source}, whose files are documents."
        )
    return args


def add_flags(parser):
    parser.add_argument(
        "--output",
        required=True,
        help="folder, gs:// or s3:// address to write train/ and val/ into",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="tiktoken's name of an encoding (gpt2, cl100k_base, ...), "
        "a .tiktoken file of ranks or a Hugging Face tokenizer.json; files are copied to OUTPUT",
    )
    parser.add_argument(
        "--shard_tokens",
        type=int,
        default=100_000_000,
        help="tokens per shard; memory holds one for training and one for validation",
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=VAL_FRACTION,
        help="share of the documents that goes to "
        "val/, from 0 to below 1: those whose relative paths, or numbers, hash lowest",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="processes; the shards do not depend on it",
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        default=False,
        help="have the workers on the Ray cluster that "
        "RAY_ADDRESS names, or on one of this machine; all of its machines need this repository, and "
        "a source of text files, at the same paths",
    )


# --- The program ------------------------------------------------------------------------------------------------


def main():
    args, start = parse(), time.monotonic()
    source = open_source(args, args.val_fraction)
    encoding = load_tokenizer(args.tokenizer)
    settings = settings_of(args, source, encoding)
    try:
        output = Output(args.output, source, settings)
        summary = None if output.is_finished() else write_alone(args, source, output, encoding)
        if not summary:
            output.forget_progress()  # of a run that was killed just before it would have done so
            say(f"{args.output}: these shards are there already, nothing to do")
            return
    except OSError as e:
        raise UserError(
            f"--output {args.output}: cannot be used ({e}); make room, or give another."
        ) from None
    say(f"{args.output}: {summary}; {time.monotonic() - start:.1f} s")


def settings_of(args, source, encoding):
    """{setting: value} of the manifest: what shards must agree in to be the same shards."""
    if isinstance(encoding, HubTokenizer):
        content = Path(args.tokenizer).read_bytes()
    else:
        content = dump_ranks(encoding._mergeable_ranks)
    kind = os.path.splitext(args.tokenizer)[1]
    return {
        "source": os.path.abspath(args.source) if os.path.exists(args.source) else args.source,
        **source.identity,
        "tokenizer_sha256": hashlib.sha256(content).hexdigest(),
        "vocab_size": encoding.n_vocab,
        "shard_tokens": args.shard_tokens,
        "val_fraction": args.val_fraction,
        "tokenizer": f"tokenizer{kind}" if kind in TOKENIZER_FILES else args.tokenizer,
        "dtype": "uint16" if encoding.n_vocab <= 2**16 else "uint32",
    }


def write_alone(args, source, output, encoding):
    """`write`, while no other process writes to the folder; None where one has just done it all."""
    with alone_in(args.output, f"--output {args.output}", "--output"):
        return None if output.is_finished() else write(args, source, output, encoding)


def write(args, source, output, encoding):
    """Write every split, the manifests last; returns a summary in words."""
    dtype = np.dtype(output.settings["dtype"])
    writers = {}
    for split in source.splits:
        writers[split] = ShardWriter(os.path.join(args.output, split), args.shard_tokens, dtype)
    position = output.load_progress(writers)
    if not position:
        output.clear()
    keep_tokenizer(args.output, args.tokenizer)
    start = None
    if args.ray:
        start = ray_actors
    elif args.workers > 1:
        start = processes
    arguments = encoding, dtype, args.skip_damaged
    results = encode(cut(source, position), args.workers, start, *arguments)
    with Progress(source, position) as progress:
        for (parts, crc32s, warnings), position in results:
            source.crc32s += crc32s
            for kind, words in warnings:
                warn(kind, words)
            filled = [writers[split].add(*part) for split, part in parts.items()]
            if any(filled):
                output.save_progress(position, writers)
            progress.show(parts, position)
    totals = sum((writer.totals for writer in writers.values()), start=Counter())
    check_text(args, writers, totals)
    output.finish(writers)
    warn_of_losses(totals)
    summaries = []
    for split, writer in writers.items():
        documents = writer.totals["documents"]
        summaries.append(f"{split} {writer.n_tokens:,} tokens of {documents:,} documents")
    return ", ".join(summaries)


class Progress:
    """The progress bar, which only a terminal shows."""

    def __init__(self, source, position):
        self.done = position.get("done", 0)
        self.n_bytes = self.n_tokens = 0
        self.start = time.monotonic()
        self.bar = tqdm(
            total=source.total,
            initial=self.done,
            unit=source.unit,
            unit_scale=True,
            bar_format=BAR,
            disable=None,  # except on a terminal
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()

    def show(self, parts, position):
        """Take note of a batch, encoded as `parts`, up to `position`."""
        for ids, counts in parts.values():
            self.n_tokens += len(ids)
            self.n_bytes += counts["bytes"]
        seconds = time.monotonic() - self.start
        megabytes, millions = self.n_bytes / 1e6 / seconds, self.n_tokens / 1e6 / seconds
        words = (
            f"{position['documents']:,} documents, {megabytes:.1f} MB/s, {millions:.2f}M tokens/s"
        )
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(position["done"] - self.done)
        self.done = position["done"]


# --- What was lost ----------------------------------------------------------------------------------------------


def check_text(args, writers, totals):
    """Raises UserError where a split has no text."""
    if not any(writer.n_tokens for writer in writers.values()):
        what = f"{many(totals['empty_documents'], 'document')}, all of them empty"
        if totals["damaged_files"] + totals["damaged_records"]:
            what += f", and {left_out(totals)} left out"
        raise UserError(
            f"--source {args.source}: there is no text in it ({what}); give another, or see that "
            f"--text_column {args.text_column} is the column with the text."
        )
    for split, writer in writers.items():
        if not writer.n_tokens:
            raise UserError(
                f"--val_fraction {args.val_fraction}: there is no text for {split} in the "
                f"{writer.totals['empty_documents']} documents that fall to it; 0 makes no val."
            )


def left_out(totals):
    files = many(totals["damaged_files"], "damaged file")
    return f"{files} and {many(totals['damaged_records'], 'damaged record')}"


def warn_of_losses(totals):
    """Say how much of the text was replaced or left out, by all runs that made these shards."""
    if totals["replaced_characters"]:
        characters = many(totals["replaced_characters"], "character")
        documents = many(totals["replaced_documents"], "document")
        words = f"{characters} of {documents} became U+FFFD, not being UTF-8"
        if totals["foreign_documents"]:
            words += f"; {many(totals['foreign_documents'], 'document')} perhaps in latin-1"
        warn("total", words)
    if totals["damaged_files"] + totals["damaged_records"]:
        words = "left out; of a file, what comes before the damage is there"
        warn("total", f"{left_out(totals)} {words}")


if __name__ == "__main__":
    run(main)
