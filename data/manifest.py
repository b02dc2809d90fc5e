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
SHARD_FIELDS = {"tokens": POSITIVE, "sha256": SHA256}
BLOCK_FIELDS = {"crc32": '"([0-9a-f]{8})+"'}


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
    if CHECKSUM in manifest and manifest[CHECKSUM] != checksum(manifest):
        raise UserError(
            f"{where}{CHECKSUM} is not the hash of all else in it, which was edited or damaged; {ADVICE}."
        )
    check_fields(manifest, FIELDS, where)
    for i, shard in enumerate(manifest["shards"]):
        of_shard = f"{where}shards[{i}]."
        name = re.escape(f'"{shard_name(i)}"')
        check_fields(shard, {"name": name, **SHARD_FIELDS}, of_shard)
        if CHECKSUM in manifest or "crc32" in shard:  # the first version wrote neither
            check_fields(shard, BLOCK_FIELDS, of_shard)
    total = sum(shard["tokens"] for shard in manifest["shards"])
    check_fields(manifest, {"tokens": str(total)}, where)


def check_files(folder, dtype, entries, found):
    """Raises UserError where a folder's files, as list_shards finds them, are not the `entries`, {name: what the
    manifest says of a shard of this dtype}."""
    path = os.path.join(folder, NAME)
    width = int(dtype[4:]) // 8
    for name, shard in entries.items():
        at = os.path.join(folder, name)
        if name not in found:
            raise UserError(f"{at} is missing, although the manifest beside it lists it; {ADVICE}.")
        size, expected = found[name]["size"], HEADER + shard["tokens"] * width
        digits = 8 * -(-size // storage.BLOCK)
        if size != expected or len(shard.get("crc32", "")) not in (0, digits):
            raise UserError(
                f"{at} is damaged (it has {size:,} bytes), or {path} is: its tokens and dtype make {expected:,} bytes, "
                f"its crc32 has 8 digits for each MiB; {ADVICE}."
            )
    if others := found.keys() - entries.keys():
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
    if CHECKSUM not in manifest:
        return f"warning: {os.path.join(folder, NAME)} has no {CHECKSUM}, so it is not verified"
    return ""
