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

POSITIVE, SHA256 = r"[1-9]\d{0,17}", '"[0-9a-f]{64}"'
FIELDS = {  # {field: the pattern of its value as JSON}
    "tokenizer": r'"\w[\w.+-]*"',  # of a file beside the shards, without a folder
    "tokenizer_sha256": SHA256,
    "vocab_size": r"[1-9]\d{0,9}",
    "dtype": '"uint(16|32)"',
    "tokens": POSITIVE,
    "documents": r"\d{1,18}",
    "bytes": r"\d{1,18}",
    "shards": r"\[\{.*\}\]",
}
# the first version wrote no checksums of blocks
SHARD_FIELDS = {"tokens": POSITIVE, "sha256": SHA256, "crc32": '"([0-9a-f]{8})+"'}


def check_fields(values, fields, where):
    """Raises UserError where a field of `values` does not fit its pattern; where: the manifest and what they are in
    it."""
    for field, pattern in fields.items():
        found = "missing"
        if isinstance(values, dict) and field in values:
            found = json.dumps(values[field], ensure_ascii=False)
        if not re.fullmatch(pattern, found):
            raise UserError(f"{where}{field} is {found:.40}, but must match {pattern}; {ADVICE}.")


def check(manifest, path):
    """Raises UserError, naming the manifest at `path` and the field, where it does not hold what it must."""
    where = f"{path}: "
    if manifest.get(CHECKSUM, checksum(manifest)) != checksum(manifest):
        raise UserError(
            f"{where}{CHECKSUM} is not the hash of all else in it, which was edited or damaged; {ADVICE}."
        )
    check_fields(manifest, FIELDS, where)
    fields = dict(SHARD_FIELDS)
    if CHECKSUM not in manifest and not has_checksums(manifest):
        del fields["crc32"]
    for i, shard in enumerate(manifest["shards"]):
        name = re.escape(f'"{shard_name(i)}"')
        check_fields(shard, {"name": name, **fields}, f"{where}shards[{i}].")
    total = sum(shard["tokens"] for shard in manifest["shards"])
    check_fields(manifest, {"tokens": str(total)}, where)


def has_checksums(manifest):
    """Whether any shard of a manifest has checksums of its blocks."""
    return any("crc32" in shard for shard in manifest["shards"])


def check_files(folder, manifest, found, only=None):
    """Raises UserError where a folder's files, as list_shards finds them, are not those that its manifest lists.

    only: the name of the one shard to look at.
    """
    path = os.path.join(folder, NAME)
    width = int(manifest["dtype"][4:]) // 8
    names = {shard["name"] for shard in manifest["shards"]}
    for i, shard in enumerate(manifest["shards"]):
        name, at = shard["name"], os.path.join(folder, shard["name"])
        if only not in (None, name):
            continue
        if name not in found:
            raise UserError(f"{at} is missing, although the manifest beside it lists it; {ADVICE}.")
        size, expected = found[name]["size"], HEADER + shard["tokens"] * width
        digits = 8 * -(-size // storage.BLOCK)
        if size != expected or len(shard.get("crc32", "")) not in (0, digits):
            raise UserError(
                f"{at} is damaged (it has {size:,} bytes), or {path} is: shards[{i}].tokens and dtype make "
                f"{expected:,} bytes, crc32 has 8 digits for each MiB; {ADVICE}."
            )
    if others := found.keys() - names:
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
    if not manifest:
        return f"warning: {folder} has no {NAME}, so its shards are not verified"
    if CHECKSUM not in manifest or not has_checksums(manifest):
        what = "it is" if has_checksums(manifest) else "it and its shards are"
        return f"warning: {os.path.join(folder, NAME)} lacks checksums, so {what} not verified"
    return ""
