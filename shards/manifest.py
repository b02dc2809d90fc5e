"""The manifest, a JSON file beside shards that says what they are. Every program that reads one reads it here. No jax.

Its keys are

- the settings of the program that made the shards: source, tokenizer, tokenizer_sha256, vocab_size, dtype, end_of_text
  (the token id that begins each document) and others;
- totals: tokens, documents, and bytes of UTF-8;
- shards: for each its name, its number of tokens, its sha256, and its crc32, which is a string of 8 hexadecimal digits
  for each `storage.BLOCK` of its bytes, so that a run can verify the blocks that it reads and need not read the others;
- manifest_sha256: the hash of all other keys.
"""

import hashlib
import json
import os

from runtime.files import read_json
from runtime.messages import UserError

NAME = "manifest.json"
CHECKSUM = "manifest_sha256"  # the key of the hash of all other keys
HEADER = 128  # bytes that numpy.save writes before the numbers of a one-dimensional array
MOST_LOST = 0.01  # share of a text's characters that a tokenizer may lose without a warning
ADVICE = "restore it, or delete the folder and tokenize the text again"


def shard_name(i):
    """The file name of shard number i."""
    return f"{i:06d}.npy"


def check_files(folder, manifest, found):
    """Raises UserError where the files of a folder, as `storage.list_shards` finds them, differ from those that its
    manifest lists, in name or in size."""
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
    """Whether the tokenizer loses more than MOST_LOST of the text, according to the counts in a manifest."""
    return counts.get("lost_characters", 0) > MOST_LOST * counts.get("sampled_characters", 0)


def end_of_text(manifest):
    """The token id that begins each document, or None where it is not known.

    Older manifests do not have this key. The end-of-text token of a file of ranks was then always the id after the last
    rank, even if its publisher uses another one, such as 100257 in cl100k_base.
    """
    if "end_of_text" in manifest:
        return manifest["end_of_text"]
    if manifest.get("tokenizer", "").endswith(".tiktoken") and "vocab_size" in manifest:
        return manifest["vocab_size"] - 1
    return None


def checksum(manifest):
    """The hash of a manifest's keys and values, which does not depend on the order or the spaces in its file."""
    rest = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def dump(manifest):
    """The text of a manifest's file: the manifest and its checksum."""
    return json.dumps(manifest | {CHECKSUM: checksum(manifest)}, indent=1) + "\n"


def read(folder):
    """The manifest of a folder, local or remote, or {} if it has none. Raises UserError where it is damaged."""
    path = os.path.join(folder, NAME)
    manifest = read_json(path)
    if manifest and manifest.get(CHECKSUM) != checksum(manifest):
        raise UserError(f"{path}: {CHECKSUM} does not match the rest of the file; {ADVICE}.")
    return manifest
