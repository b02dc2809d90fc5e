"""Tokenize a source of text into shards of token ids, for training and for validation.

python data/tokenize_shards.py --source stdlib --output data/shards/stdlib --tokenizer data/shards/bpe8192.tiktoken

Writes OUTPUT/train/000000.npy, ... and OUTPUT/val/000000.npy, ...: uint16 where that holds the vocabulary, else uint32.
A document is the end-of-text token followed by the tokens of its text, none of which is a special token. Documents
continue from one shard into the next. manifest.json beside the shards is written last. Until then, rerun the same
command to resume from the last whole shard, which OUTPUT/progress.npz records.
"""

if __name__ == "__main__" and not __package__:
    import startup

    startup.prepare()

import contextlib
import functools
import os
import sys
import time
from dataclasses import MISSING, dataclass
from pathlib import Path

import numpy as np

from config.parser import flag
from config.program import read_flags
from data.command_line import VAL_FRACTION, Source, no_text_error, run, suggest_source
from data.encoding import encode_document
from data.output import Output
from data.sources.base import counted, warn
from data.sources.formats import open_source
from data.splits import ENDS
from data.workers import encode_batches, make_batches, processes, ray_actors
from runtime.files import is_remote
from runtime.locks import alone_in
from runtime.messages import UserError, masked, say
from runtime.pulse import Pulse
from shards.manifest import MOST_LOST, is_lossy
from shards.tokenization import TOKENIZER_FILES, content_sha256, load_tokenizer

# After this many characters of the sample, a tokenizer that loses too much text ends the run early.
EARLY = 100_000


@dataclass(frozen=True, kw_only=True)
class Options(Source):
    """Tokenize a source of text into shards of token ids, for training and for validation."""

    output: str = flag(MISSING, nonempty=True, expands_home=True)
    """Folder, gs:// or s3:// address to write train/ and val/ into."""
    tokenizer: str = flag(MISSING, nonempty=True, expands_home=True)
    """tiktoken's name of an encoding (gpt2, cl100k_base, ...), a .tiktoken file of ranks or a Hugging Face
    tokenizer.json; files are copied to OUTPUT."""
    lossy: bool = False
    """Accept a tokenizer that loses more than 1% of the text, such as one without tokens for its letters."""
    tokens: float = flag(0.0, least=0)
    """Stop with the document at which train/ has this many tokens, such as 6e8; 0: the whole source."""
    shard_tokens: int = flag(100_000_000, least=1)
    """Tokens per shard; memory holds three of them."""
    val_fraction: float = flag(VAL_FRACTION, below=1)
    """Share of the documents that goes to val/: those whose text hashes lowest; where there are too few, the last share
    of each."""
    drop_duplicates: bool = False
    """Leave out documents whose text is exactly that of an earlier one."""
    workers: int = flag(os.cpu_count(), least=1)
    """Processes; the shards do not depend on it."""
    ray: bool = False
    """Have the workers on the Ray cluster that RAY_ADDRESS names, or on one of this machine; all of its machines need
    this repository, and a source of text files, at the same paths."""


def main():
    """Write the shards that the command line describes. Raises UserError."""
    args = read_flags(Options, sys.argv[1:], "data/tokenize_shards.py", suggest_source)
    local = args.source != "stdlib" and not is_remote(args.source) and not is_remote(args.output)
    source = Path(args.source).resolve()
    output = Path(args.output).resolve()
    above = [output, *output.parents]
    is_glob = not source.exists()
    if local and any(path == source or (is_glob and path.match(str(source))) for path in above):
        raise UserError(
            "must not lie in {source}, whose files are documents",
            flag="output",
            value=args.output,
            source=args.source,
        )
    tokenize(args)


def tokenize(args, source=None):
    """Write the shards that `Options` describe, or those that are missing. source: args.source, opened; None: it is
    opened here. Raises UserError."""
    start = time.monotonic()
    source = source or open_source(args)
    encoding = load_tokenizer(args.tokenizer)
    settings = settings_of_text(args, source) | settings_of_tokens(args, encoding)
    output = Output(args.output, source, settings)
    with alone_in(args.output, "output", args.output, "output"):
        if not output.is_finished():
            summary = write_shards(args, source, output, encoding)
            say(f"{args.output}: {summary}; {time.monotonic() - start:.1f} s")
            return
        output.remove_progress()
    same = "shards of files with these names and sizes"
    say(f"{args.output}: {same} are there already, nothing to do; delete it if a text has changed")


def settings_of_text(args, source):
    """{setting: value} of the manifest that identify the text. Shards that differ in one are of another text."""
    where = os.path.abspath(args.source) if os.path.exists(args.source) else masked(args.source)
    settings = dict(val_fraction=args.val_fraction, drop_duplicates=args.drop_duplicates)
    return {"source": where, **source.identity, **settings}


def settings_of_tokens(args, encoding):
    """{setting: value} of the manifest for the tokenizer, and the sizes of the whole and of its shards."""
    ending = os.path.splitext(args.tokenizer)[1]
    return {
        "tokenizer_sha256": content_sha256(encoding),
        "end_of_text": encoding.eot_token,
        "vocab_size": encoding.n_vocab,
        "tokens_wanted": args.tokens,
        "shard_tokens": args.shard_tokens,
        "tokenizer": f"tokenizer{ending}" if ending in TOKENIZER_FILES else args.tokenizer,
        "dtype": "uint16" if encoding.n_vocab <= 2**16 else "uint32",
    }


def write_shards(args, source, output, encoding):
    """Write the shards of every split, then the manifests. Returns a summary in words. Raises UserError."""
    output.prepare(args.tokenizer)
    if output.validation == ENDS:
        share = f"{100 * args.val_fraction:g}%"
        say(f"{args.output}: too few documents to hold some out: val is the last {share} of each")
    fill_shards(args, source, output, encoding)
    totals = output.totals()
    check_loss(args, totals)
    damaged = ""
    if totals["damaged_files"] + totals["damaged_records"]:
        files = counted(totals["damaged_files"], "damaged file")
        damaged = f"{files} and {counted(totals['damaged_records'], 'damaged record')} left out"
    if not totals["documents"]:
        empty = counted(totals["empty_documents"], "empty document")
        raise no_text_error(args, f"{empty}, {damaged}" if damaged else empty)
    for split, writer in output.writers.items():
        if not writer.totals["documents"]:
            raise UserError(
                f"there is no text for {split} in {counted(totals['documents'], 'document')} with "
                f"a val_fraction of {args.val_fraction:g}; give more of it",
                flag="tokens" if args.tokens else "source",
                value=f"{args.tokens:g}" if args.tokens else args.source,
            )
    output.finish()
    if n := totals["replaced_characters"]:
        documents = counted(totals["replaced_documents"], "document")
        warn("total", f"{counted(n, 'character')} of {documents} became U+FFFD, not being UTF-8")
    if totals["lost_characters"] + totals["lost_whitespace"]:
        warn("total", loss_in_words(args, totals))
    if damaged:
        warn("total", f"{damaged}; of a file, what comes before the damage is there")
    summaries = []
    for split, writer in output.writers.items():
        documents = counted(writer.totals["documents"], "document")
        summaries.append(f"{split} {writer.manifest()['tokens']:,} tokens of {documents}")
    if n := totals["duplicate_documents"]:
        how = "left out" if args.drop_duplicates else "kept"
        summaries.append(f"{counted(n, 'exact duplicate')} {how}")
    return ", ".join(summaries)


def loss_in_words(args, totals):
    """A sentence on what --tokenizer loses of the text, from the totals of the COUNTS."""
    sampled = totals["sampled_characters"]
    lost = []
    for name, what in (("lost_characters", ""), ("lost_whitespace", " of whitespace")):
        if n := totals[name]:
            lost.append(f"{n:,}{what} ({n / sampled:.2%})")
    sample = f"of a sample of {counted(sampled, 'character')}, {' and '.join(lost)} are lost"
    return f"--tokenizer {args.tokenizer}: {sample} when its tokens are decoded"


def check_loss(args, totals, least=0):
    """Raises UserError where --tokenizer loses too much text, in a sample of at least `least` characters."""
    if args.lossy or totals["sampled_characters"] < least or not is_lossy(totals):
        return
    raise UserError(
        f"{loss_in_words(args, totals)}; give a tokenizer that knows this text or, to accept a loss of more than "
        f"{MOST_LOST:.0%}, data/tokenize_shards.py --lossy."
    )


def fill_shards(args, source, output, encoding):
    """Encode the source from the output's position on and add it to the output."""
    dtype = np.dtype(output.settings["dtype"])
    how = args.skip_damaged, args.val_fraction, output.validation
    encode = functools.partial(encode_document, encoding, dtype, *how)
    start = ray_actors if args.ray else processes if args.workers > 1 else None
    at = {"done": 0, "documents": 0} | output.position

    def done():
        """How much there is, of what will be: tokens where their number is known, else bytes of the source."""
        return output.train_tokens if args.tokens else at["done"]

    total, unit = (int(args.tokens), "token") if args.tokens else (source.total, "B")

    def words():
        share = min(1, done() / max(1, total))
        return f"tokenizing: {at['documents']:,} documents, {share:.0%}"

    batches = make_batches(source, output.position)
    encoded = encode_batches(batches, args.workers, start, encode)
    bar = dict(total=total, initial=done(), unit=unit, unit_scale=True)
    # closed where no more of them is needed: then its workers end
    with Pulse(words, **bar) as pulse, contextlib.closing(encoded):
        while not output.is_full and (found := next(encoded, None)):
            batch, position = found
            for document in batch:
                if document.warning:
                    warn(*document.warning)
            output.add(batch, position)
            check_loss(args, output.totals(), EARLY)
            at |= position
            pulse.bar.update(done() - pulse.bar.n)


if __name__ == "__main__":
    run(main, "rerun the same command to resume")
