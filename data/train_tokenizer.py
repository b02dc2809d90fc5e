"""Train a byte-level BPE tokenizer on the training part of a source and store it as tiktoken ranks.

python data/train_tokenizer.py --source stdlib --vocab_size 8192 --output data/shards/bpe8192.tiktoken
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    from runtime import interrupts

    interrupts.begin("interrupted; nothing was written")

import os
import sys
import time
from dataclasses import MISSING, dataclass

from tokenizers import Regex, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from data.command_line import VAL_FRACTION, Source, run, say_what_is_left
from data.encoding import encode_text
from data.sources.base import many, skipped, warn
from data.sources.files import by_hash
from data.sources.kinds import open_source
from data.sources.text import read_text
from data.splits import ENDS, FEW, WHOLE, are_uneven, divide, hash_of
from data.tokenization import PATTERN, byte_letters, dump_ranks, load_ranks, load_tokenizer
from runtime.files import check_place, is_remote, read_file, write_file
from runtime.messages import UserError, say
from runtime.parser import flag
from utils import read_flags

SAMPLE_BYTES = 20_000_000  # seconds of training; more text hardly changes some thousand merges
# Characters. Training takes time quadratic in the longest word, such as a run of a million spaces.
PIECE = 10_000


def candidates(source):
    """The documents to sample from: all files, but only the first SAMPLE_BYTES of records."""
    documents, size = [], 0
    for document in source.read({}):
        if not any(document.lost):
            documents.append(document)
        if document.text is not None:
            size += document.size
        if size >= SAMPLE_BYTES:
            break
    return documents


def text_of(document, skip):
    """A document's text, "" where it cannot be read and skip is true. Raises UserError."""
    try:
        return read_text(document).text
    except UserError as e:
        if not skip:
            raise
        warn("damage", skipped(e))
        return ""


def sample(documents, skip=False):
    """(texts to train on, held-out texts) of the first documents by hash, so from all over them.

    None of the first is what data/tokenize_shards.py holds out by default: whole documents, or of a few their ends.
    """
    few = len(documents) < FEW
    for validation in (WHOLE, ENDS):
        training, held_out, sizes = [], [], [0, 0]  # in bytes
        for document in by_hash(documents):
            if sizes[0] >= SAMPLE_BYTES:
                break
            text = text_of(document, skip)
            parts = divide(text, hash_of(text), VAL_FRACTION, validation)
            training.append(parts[0][: SAMPLE_BYTES - sizes[0]])
            held_out.append(parts[1][: max(0, SAMPLE_BYTES // 20 - sizes[1])])
            sizes = [size + len(part.encode()) for size, part in zip(sizes, parts)]
        if not few or not are_uneven(sizes, VAL_FRACTION):
            break
    return training, held_out


def train(texts, vocab_size):
    """A `tokenizers.Tokenizer` with at most `vocab_size` tokens: the 256 bytes, then the merges in order."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(PATTERN), "isolated"), to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(short_pieces(texts), trainer)
    return tokenizer


def short_pieces(texts):
    """Yield the texts in pieces of at most PIECE characters."""
    for text in texts:
        for start in range(0, len(text), PIECE):
            yield text[start : start + PIECE]


def to_ranks(tokenizer):
    """{token bytes: rank}: the ids, which are given in the order of the merges, as tiktoken's ranks must be."""
    byte = {letter: b for b, letter in byte_letters().items()}
    return {bytes(byte[c] for c in token): rank for token, rank in tokenizer.get_vocab().items()}


def bytes_per_token(texts, encoding):
    n_bytes = sum(len(text.encode()) for text in texts)
    n_tokens = sum(len(encode_text(text, encoding)) for text in texts)
    return n_bytes / max(1, n_tokens)


def compare(texts):
    """Bytes per token of the well-known tokenizers whose ranks can be had, in words."""
    words = ""
    for name in ("cl100k_base", "gpt2"):
        try:
            words += f", {name} {bytes_per_token(texts, load_tokenizer(name)):.2f}"
        except UserError:  # there is no network
            words += f", {name} not at hand"
    return words


@dataclass(frozen=True, kw_only=True)
class Options(Source):
    """Train a byte-level BPE tokenizer on the training part of a source and store it as tiktoken ranks."""

    vocab_size: int = 8192
    """Number of tokens, with all 256 bytes and the end of text."""
    output: str = flag(MISSING, path=True)
    """File of ranks to write; its name must end in .tiktoken."""


def parse():
    """The command line, checked. Raises UserError."""
    args = read_flags(Options, sys.argv[1:], "data/train_tokenizer.py")
    if args.vocab_size < 257:
        raise UserError(
            f"--vocab_size {args.vocab_size}: must be at least 257, for 256 bytes and the end of text."
        )
    if not args.output.endswith(".tiktoken"):
        raise UserError(f"--output {args.output}: the name must end in .tiktoken.")
    if not is_remote(args.output):
        check_place(args.output, "--output")
    return args


def main():
    args, start = parse(), time.monotonic()
    documents = candidates(open_source(args))
    training, held_out = sample(documents, args.skip_damaged)
    if not any(training):
        raise UserError(
            f"--source {args.source}: there is no text in its {many(len(documents), 'document')}; give "
            f"another, or see that --text_column {args.text_column} is the column with the text."
        )
    tokenizer = train(training, args.vocab_size - 1)
    most = tokenizer.get_vocab_size() + 1
    if most < args.vocab_size:
        raise UserError(
            f"--vocab_size {args.vocab_size}: the text of --source {args.source} yields {most} at most."
        )
    ranks = dump_ranks(to_ranks(tokenizer))
    try:
        # a FIFO would be read until it has another writer
        is_file = is_remote(args.output) or os.path.isfile(args.output)
        if is_file and read_file(args.output) not in (None, b"", ranks):
            raise UserError(
                f"{args.output}: is there already with other content; give another name, or remove it."
            )
        write_file(args.output, ranks)
    except UserError as e:
        raise UserError(f"--output {e}") from None

    say_what_is_left(f"{args.output} is written")
    ratio = bytes_per_token(held_out, load_ranks(args.output, ranks))
    seconds = time.monotonic() - start
    say(
        f"{args.output}: {args.vocab_size} tokens, {ratio:.2f} bytes per token of held-out text"
        f"{compare(held_out)}, {seconds:.1f} s"
    )


if __name__ == "__main__":
    run(main)
