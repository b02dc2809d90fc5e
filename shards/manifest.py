"""The manifest beside shards. All who read one do it here. No jax.

It holds the settings of the program that made them (source, tokenizer, tokenizer_sha256, end_of_text: the id that
begins a document, vocab_size, dtype, ...), the sums tokens, documents and bytes (of UTF-8), and for each of the shards
its name, tokens, sha256 and crc32: of each storage.BLOCK of its bytes, in 8 hexadecimal digits. manifest_sha256 is the
hash of all other keys.
"""

import hashlib
import json
import os

from runtime.files import read_json
from runtime.messages import UserError

NAME = "manifest.json"
CHECKSUM = "manifest_sha256"  # the key of the hash of all other keys
HEADER = 128  # bytes that numpy.save writes before a row of numbers
MOST_LOST = 0.01  # share of a text's characters
ADVICE = "restore it, or delete the folder and tokenize the text again"


def shard_name(i):
    return f"{i:06d}.npy"


def check_files(folder, manifest, found):
    """Raises UserError where a folder's files, as list_shards finds them, are not those of its manifest."""
    path = os.path.join(folder, NAME)
    width = int(manifest["dtype"][4:]) // 8
    names = {shard["name"] for shard in manifest["shards"]}
    for shard in manifest["shards"]:
        at = os.path.join(folder, shard["name"])
        if shard["name"] not in found:
            raise UserError(f"{at} is missing, although the manifest beside it lists it; {ADVICE}.")
        size, expected = found[shard["name"]]["size"], HEADER + shard["tokens"] * width
        if size != expected:
            raise UserError(
                f"{at} is damaged (it has {size:,} bytes; {path} says {expected:,}); {ADVICE}."
            )
    if others := found.keys() - names:
        raise UserError(
            f"{os.path.join(folder, min(others))} lies beside {path}, whose shards do not list it; move it away."
        )


def is_lossy(counts):
    """Whether a tokenizer loses more than MOST_LOST of the text, by the counts of a manifest."""
    return counts.get("lost_characters", 0) > MOST_LOST * counts.get("sampled_characters", 0)


def end_of_text(manifest):
    """The token id that begins each document; None where nothing tells. Before manifests said it, that of a file of
    ranks came after the last of them, also where its publisher has another, such as cl100k_base's 100257."""
    if "end_of_text" in manifest:
        return manifest["end_of_text"]
    if manifest.get("tokenizer", "").endswith(".tiktoken") and "vocab_size" in manifest:
        return manifest["vocab_size"] - 1
    return None


def checksum(manifest):
    """Hash of a manifest's keys and values, however they are laid out in its file."""
    rest = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def dump(manifest):
    """A manifest with its checksum as the text of its file."""
    return json.dumps(manifest | {CHECKSUM: checksum(manifest)}, indent=1) + "\n"


def read(folder):
    """The manifest of a folder, local or remote; {} where there is none. Raises UserError where it is damaged."""
    path = os.path.join(folder, NAME)
    manifest = read_json(path)
    if manifest and manifest.get(CHECKSUM) != checksum(manifest):
        raise UserError(f"{path}: {CHECKSUM} does not match the rest of the file; {ADVICE}.")
    return manifest
