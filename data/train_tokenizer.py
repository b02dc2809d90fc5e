"""Train a byte-level BPE tokenizer on the training part of a source and store it as tiktoken ranks.

python data/train_tokenizer.py --source stdlib --vocab_size 8192 --output data/shards/bpe8192.tiktoken
"""

if __name__ == "__main__" and not __package__:
    import startup

    startup.prepare()

import hashlib
import os
import sys
import time
from dataclasses import MISSING, dataclass

from tokenizers import Regex, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from config.parser import flag
from config.program import read_flags
from data.command_line import VAL_FRACTION, Source, no_text_error, run, suggest_source
from data.sources.base import counted
from data.sources.formats import open_source
from data.splits import choose_validation, divide, text_of
from runtime.files import check_writable, read_file, write_file
from runtime.messages import UserError, say
from runtime.pulse import Pulse
from shards.tokenization import PATTERN, byte_letters, dump_ranks

# This much text trains in seconds. More hardly changes a vocabulary of some thousand merges.
SAMPLE_BYTES = 20_000_000
LARGEST = 8192  # the largest vocabulary that is chosen where --vocab_size is not given
# Bytes of text for each token of a vocabulary that is chosen: with less text, most tokens would be seen only a few
# times.
BYTES_A_TOKEN = 256
# Characters of a piece of text. Training takes time quadratic in the longest word, which may be a million spaces.
PIECE = 10_000


def sample(source):
    """A list of texts to train on, of SAMPLE_BYTES in all: a random sample, which a hash of the documents' names draws.

    The sample is drawn from all files, or from the first SAMPLE_BYTES of records. It contains nothing of what
    data/tokenize_shards.py holds out by default.
    """
    validation = choose_validation(source, VAL_FRACTION)
    documents = []
    size = 0  # bytes
    for document in source.read({}):
        documents.append(document)
        if document.text is not None:
            size += document.size
        if size >= SAMPLE_BYTES:
            break
    documents.sort(key=lambda document: hashlib.sha256(os.fsencode(document.name)).digest())
    texts = []
    size = 0
    for document in documents:
        if size >= SAMPLE_BYTES:
            break
        text, _ = divide(text_of(document, source.skip), VAL_FRACTION, validation)
        content = text.encode()[: SAMPLE_BYTES - size]
        texts.append(content.decode(errors="ignore"))  # without the half of a character at the cut
        size += len(content)
    return texts


def train(texts, vocab_size):
    """A `tokenizers.Tokenizer` with at most `vocab_size` tokens: the 256 bytes, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(PATTERN), "isolated"), to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    pieces = (text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def to_ranks(tokenizer):
    """{bytes of a token: rank}. Ranks are the tokenizer's ids, which follow the order of the merges."""
    byte = {letter: b for b, letter in byte_letters().items()}
    ranks = tokenizer.get_vocab()
    return {bytes(map(byte.get, token)): rank for token, rank in ranks.items()}


@dataclass(frozen=True, kw_only=True)
class Options(Source):
    """Train a byte-level BPE tokenizer on the training part of a source and store it as tiktoken ranks."""

    vocab_size: int | None = flag(None, least=257)
    """Maximum number of tokens, including the 256 bytes and the end of text. None: 8192, or fewer for less than 2 MB of
    text."""
    output: str = flag(MISSING, nonempty=True, expands_home=True)
    """File of ranks to write; its name must end in .tiktoken."""


def main():
    """Train the tokenizer that the command line describes. Raises UserError."""
    make_tokenizer(read_flags(Options, sys.argv[1:], "data/train_tokenizer.py", suggest_source))


def make_tokenizer(args, source=None):
    """Train the tokenizer that `Options` describe and write it. source: args.source, opened; None: it is opened here.
    Raises UserError."""
    if not args.output.endswith(".tiktoken"):
        raise UserError("the name must end in .tiktoken", flag="output", value=args.output)
    if args.vocab_size is not None and args.vocab_size <= 256:
        raise UserError(
            "must be at least 257, the bytes and the end of text, to train a "
            "tokenizer; give more, or --tokenizer",
            flag="vocab_size",
            value=args.vocab_size,
        )
    check_writable(args.output, "output")
    start = time.monotonic()
    with Pulse(f"learning a tokenizer from {args.source}"):
        found, wanted, ranks = learn(args, source or open_source(args))
    if read_file(args.output) not in (None, b"", ranks):
        raise UserError(
            "is there with other content; give another", flag="output", value=args.output
        )
    write_file(args.output, ranks)
    fewer = f", which is all that the text yields of {wanted}" if found < wanted else ""
    say(f"{args.output}: {found} tokens{fewer}, {time.monotonic() - start:.1f} s")


def learn(args, source):
    """Train a tokenizer by `Options`: (its number of tokens, the number wanted, its ranks as bytes). Raises
    UserError."""
    texts = sample(source)
    if not any(texts):
        raise no_text_error(args, counted(len(texts), "empty document"))
    n_bytes = sum(len(text.encode()) for text in texts)
    wanted = args.vocab_size or min(LARGEST, 257 + n_bytes // BYTES_A_TOKEN)
    tokenizer = train(texts, wanted - 1)
    found = tokenizer.get_vocab_size() + 1
    return found, wanted, dump_ranks(to_ranks(tokenizer))


if __name__ == "__main__":
    run(main, "nothing was written")
