"""The well-known corpora: data/corpora.json, and where their shards are. Needs no packages."""

import json
from pathlib import Path

# {name: address, licence, and rounded sizes; tokens are counted with GPT-2's tokenizer}
CORPORA = json.loads(Path(__file__).with_name("corpora.json").read_text())


def shards_of(name, tokens=0):
    """The folder for the shards of a corpus, data/shards/NAME, or of its first `tokens`, data/shards/NAME-600M."""
    return f"data/shards/{name}{f'-{tokens / 1e6:g}M' if tokens else ''}"
