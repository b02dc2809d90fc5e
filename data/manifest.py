"""The manifest beside shards: what it must hold, and its own checksum. All who read one do it here. No jax."""

import hashlib
import json
import os
import re

from data import storage
from runtime.files import read_json
from runtime.messages import UserError

NAME = "manifest.json"
CHECKSUM = "manifest_sha256"  # the key of the hash of all other keys
HEADER = 128  # bytes that numpy.save writes before a row of numbers
ADVICE = "put back what it was, or delete the folder and tokenize the text again"


def shard_name(i):
    """The name of shard number i of a folder."""
    return f"{i:06d}.npy"


# --- What it must hold ------------------------------------------------------------------------------------------


def is_count(value, least=0):
    return type(value) is int and least <= value < 2**63


def is_sha256(value):
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)


def is_file_name(value):
    return isinstance(value, str) and re.fullmatch(r"\w[\w.+-]*", value)


def is_crc32(value):
    return isinstance(value, str) and re.fullmatch("([0-9a-f]{8})+", value)


def is_list_of_objects(value):
    return isinstance(value, list) and value and all(isinstance(one, dict) for one in value)


COUNT = is_count, "a whole number from 0 on"
POSITIVE = lambda value: is_count(value, 1), "a whole number from 1 on"
SHA256 = is_sha256, "64 hexadecimal digits"

FIELDS = {  # {field: (whether a value fits, what does in words)}
    "tokenizer": (is_file_name, "the name of a tokenizer or of its file, without a folder"),
    "tokenizer_sha256": SHA256,
    "vocab_size": (lambda value: is_count(value, 1) and value <= 2**32, "from 1 to 2^32"),
    "dtype": (lambda value: value in ("uint16", "uint32"), "uint16 or uint32"),
    "tokens": POSITIVE,
    "documents": COUNT,
    "bytes": COUNT,
    "shards": (is_list_of_objects, "a list of one or more objects"),
}
OTHER_COUNTS = re.compile(r"\w+_(documents|characters|files|records)")
# the first version wrote no checksums of blocks
SHARD_FIELDS = {
    "tokens": POSITIVE,
    "sha256": SHA256,
    "crc32": (is_crc32, "8 hexadecimal digits for each MiB of the file"),
}


def expect(values, field, rule, where):
    """Raises UserError where values[field] does not fit the rule; where: the manifest and what `values` are in it."""
    fits, words = rule
    if field not in values:
        raise UserError(f"{where}{field} is missing; {ADVICE}.")
    if not fits(values[field]):
        raise UserError(f"{where}{field} is {values[field]!r:.40}, but must be {words}; {ADVICE}.")


def exactly(value, words=None):
    """The rule of a field that has this value alone."""
    return lambda other: other == value, words or value


def check(manifest, path):
    """Raises UserError, naming the manifest at `path` and the field, where it does not hold what it must."""
    where = f"{path}: "
    for field, rule in FIELDS.items():
        expect(manifest, field, rule, where)
    for field in filter(OTHER_COUNTS.fullmatch, manifest):
        expect(manifest, field, COUNT, where)
    shards = manifest["shards"]
    fields = dict(SHARD_FIELDS)
    if CHECKSUM not in manifest and not has_checksums(manifest):
        del fields["crc32"]
    for i, shard in enumerate(shards):
        fields["name"] = exactly(shard_name(i))
        for field, rule in fields.items():
            expect(shard, field, rule, f"{where}shards[{i}].")
    total = sum(shard["tokens"] for shard in shards)
    expect(manifest, "tokens", exactly(total, f"{total}, the sum of its shards"), where)
    if CHECKSUM in manifest:
        rule = exactly(
            checksum(manifest), "the hash of all else in it, which was edited or damaged"
        )
        expect(manifest, CHECKSUM, rule, where)


def has_checksums(manifest):
    """Whether any shard of a manifest has checksums of its blocks."""
    return any("crc32" in shard for shard in manifest["shards"])


def check_files(folder, manifest, found, only=None):
    """Raises UserError where a folder's files, as list_shards finds them, are not those that its manifest lists.

    only: the name of the one shard to look at.
    """
    path = os.path.join(folder, NAME)
    width = int(manifest["dtype"][4:]) // 8
    for i, shard in enumerate(manifest["shards"]):
        name, tokens = shard["name"], shard["tokens"]
        at = os.path.join(folder, name)
        if only not in (None, name):
            continue
        if name not in found:
            raise UserError(f"{at} is missing, although the manifest beside it lists it; {ADVICE}.")
        size, expected = found[name]["size"], HEADER + tokens * width
        if size != expected:
            raise UserError(
                f"{at} is damaged (it has {size:,} bytes), or {path} is: by its shards[{i}].tokens and its dtype it "
                f"would have {expected:,}; {ADVICE}."
            )
        digits = 8 * -(-size // storage.BLOCK)
        if len(shard.get("crc32", "")) not in (0, digits):
            raise UserError(
                f"{path}: shards[{i}].crc32 has {len(shard['crc32'])} digits, but must have {digits}; {ADVICE}."
            )
    others = found.keys() - {shard["name"] for shard in manifest["shards"]}
    if others:
        raise UserError(
            f"{os.path.join(folder, min(others))} lies beside {path}, whose shards do not list it; move it away."
        )


# --- Reading and writing ----------------------------------------------------------------------------------------


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
    if manifest:
        check(manifest, path)
    return manifest


def unverified(folder, manifest):
    """What nothing verifies of a folder with this manifest, {} without one, as a warning; "" where all is verified."""
    path = os.path.join(folder, NAME)
    if not manifest:
        return f"warning: {folder} has no {NAME}, so its shards are not verified"
    if not has_checksums(manifest):
        return f"warning: {path} has no checksums, so neither it nor its shards are verified"
    if CHECKSUM not in manifest:
        return f"warning: {path} has no {CHECKSUM}, so it is not verified itself"
    return ""
