"""What is known of the folders of --data and --mix before a sequence is read: manifests, tokenizer, first words."""

import itertools
import os
import re

from shards import manifest
from shards.mixture import average_mix, corpus_root, parse_mix
from shards.storage import Cache, Shard, list_split
from shards.tokenization import load_tokenizer, shards_tokenizer, text_of

OPENING = 64  # tokens from the start of a text that are enough for its first words


def manifests(cfg, *splits):
    """[(root of a corpus, its folder of a split, the manifest there or {})] of all corpora of --mix or --data. splits:
    train, val or both; those without shards are left out."""
    found = []
    for name in average_mix(parse_mix(cfg.data.mix)):
        root = corpus_root(cfg, name)
        for folder in [os.path.join(root, split) for split in splits]:
            if list_split(folder):
                found.append((root, folder, manifest.read(folder)))
    return found


def encoding_of(shards, flag):
    """The tokenizer that --tokenizer names, as `flag`, or else the first manifest of `shards`, which `manifests`
    returned; None where neither names one."""
    root, _, made = shards[0] if shards else ("", "", {})
    name = shards_tokenizer(root, made, flag)
    return load_tokenizer(name) if name else None


def opening_of(cfg, shards, encoding):
    """The first words of the validation text, which samples will continue; "" where there are none. shards: as
    `manifests` returns them. Raises UserError where the text cannot be read."""
    held_out = [(folder, made) for _, folder, made in shards if os.path.basename(folder) == "val"]
    if not held_out or encoding is None:
        return ""
    folder, made = held_out[0]
    path, info = next(iter(list_split(folder).items()))
    name = os.path.basename(path)
    entry = next((entry for entry in made.get("shards", []) if entry["name"] == name), {})
    cache = Cache(f"{cfg.data.cache_dir}/blocks", cfg.data.cache_gb * 1e9)
    shard = Shard(path, info, entry, cache)
    ids = shard.read(0, min(OPENING, shard.length), encoding.n_vocab).tolist()
    text = itertools.takewhile(lambda token: token != encoding.eot_token, ids[1:])
    words = re.match(r"\s*(\S+(?: \S+){0,3})\s", text_of(encoding, text) + " ")
    return words[1][:24].rstrip("\ufffd ") if words else ""
