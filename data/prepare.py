"""Prepare a well-known corpus: make shards for training and validation, and print the command that trains on them.

python data/prepare.py tinystories
python data/prepare.py fineweb-edu-10BT --tokens 6e8        # the first of it, for a short run

It prints the licence, the sizes and the hours that it takes before it starts. data/corpora.json lists the corpora.
data/tokenize_shards.py does the work; use it directly for any other corpus.
"""

if __name__ == "__main__" and not __package__:
    import startup

    startup.prepare()

import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from config.parser import argument, flag
from config.program import read_flags
from data import tokenize_shards
from data.command_line import run
from data.corpora import CORPORA, shards_of
from data.encoding import encode_text
from runtime.files import is_remote, read_file, write_file
from runtime.messages import say, size
from shards.tokenization import load_tokenizer

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Prepare a well-known corpus: make shards for training and validation."""

    name: Literal[tuple(CORPORA)] = argument()
    """Which corpus of data/corpora.json. dclm is a hundredth of DCLM-baseline."""
    output: str = flag("", expands_home=True)
    """Folder, gs:// or s3:// address to write train/ and val/ into; empty: data/shards/NAME, or with --tokens 6e8
    data/shards/NAME-600M."""
    tokens: float = flag(0.0, least=0)
    """As in data/tokenize_shards.py."""
    tokenizer: str = flag("gpt2", expands_home=True)
    """As in data/tokenize_shards.py."""
    source: str = flag("", expands_home=True)
    """Its files, where they are downloaded already: a file, a folder or a quoted glob."""
    workers: int = flag(os.cpu_count(), least=1)
    """Processes that tokenize."""


def announce(corpus, shards):
    """Print licence, sizes and hours of a corpus. The tokenizer's speed is measured here, on the pages of docs/."""
    encoding = load_tokenizer(shards.tokenizer)
    sample = "".join(path.read_text() for path in ROOT.glob("docs/*.md")) * 10
    began = time.perf_counter()
    encode_text(sample, encoding)
    rate = shards.workers * len(sample.encode()) / (time.perf_counter() - began)
    share = min(1, shards.tokens / corpus["tokens"]) if shards.tokens else 1
    read, text, n_tokens = (share * corpus[name] for name in ("read_bytes", "text_bytes", "tokens"))
    on_disk = size(n_tokens * (2 if encoding.n_vocab <= 2**16 else 4))
    if not is_remote(shards.output):
        existing = next(filter(Path.exists, Path(shards.output).resolve().parents))
        on_disk += f" ({size(shutil.disk_usage(existing).free)} are free there)"
    say(f"{shards.source}; licence: {corpus['licence']}")
    say(f"about {n_tokens:,.0f} tokens, {size(text)} of text; {size(read)} to read")
    say(f"about {on_disk} of shards in {shards.output}")
    hours = max(0.1, text / rate / 3600)
    say(f"about {hours:.1f} hours, at {rate / 1e6:.0f} MB/s as measured; the network may be slower")


def main():
    """Make the shards of the corpus that the command line names, and print the command that trains on them."""
    options = read_flags(Options, sys.argv[1:], "data/prepare.py")
    corpus = CORPORA[options.name]
    output = options.output or shards_of(options.name, options.tokens)
    shards = tokenize_shards.Options(
        source=options.source or corpus["source"],
        output=output,
        tokenizer=options.tokenizer,
        tokens=options.tokens,
        val_fraction=corpus["val_fraction"],
        workers=options.workers,
        config=corpus.get("config"),
        text_column=corpus.get("text_column", "text"),
    )
    announce(corpus, shards)
    if not options.source and corpus["source"].startswith("https:"):
        shards = replace(shards, source=f"data/shards/{options.name}.txt")
        if read_file(shards.source) is None:
            write_file(shards.source, read_file(corpus["source"]) or b"")
    tokenize_shards.tokenize(shards)
    say(f"next: python main.py --preset {corpus['preset']} --data {output} --name {options.name}")


if __name__ == "__main__":
    run(main, "rerun the same command to resume")
