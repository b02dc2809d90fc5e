"""{flag: value} as JSON files have them: read with the checks of a command line, and written for others to see."""

import os
import re

from config.parser import Facts, facts_of, value_in_file
from runtime.messages import UserError
from utils import FIELDS

# What config.json of a run holds beside flags.
BESIDE_FLAGS = {
    "commit",
    "data_fingerprint",
    "device_kind",
    "encoding",
    "eos_token_id",
    "positions",
}


def read_values(flags, where, names=None, remedy=""):
    """{flag: value} that the JSON file `where` means. names: {flag: what it is called there}. Raises UserError."""
    read = {}
    for name, value in flags.items():
        read[name], must = value_in_file(FIELDS[name], value)
        if must:
            name = (names or {}).get(name, name)
            said = f"{name} is {value!r:.40}, but must be {must}"
            raise UserError(said, where=where, remedy=remedy)
    return read


def shareable(flags):
    """{flag: value} of a run's config.json without what belongs to its machine, to be published with its model: what
    may differ per process is left out, and of paths and addresses only the last name stays."""
    kept = {}
    for name, value in flags.items():
        facts = facts_of(FIELDS[name]) if name in FIELDS else Facts()
        separator = facts.path_separator
        if separator is not None and isinstance(value, str):
            parts = value.split(separator) if separator else [value]
            kept[name] = separator.join(map(last_name, parts))
        elif not facts.per_process:
            kept[name] = value
    return kept


def last_name(place):
    """The last name of a path or an address, and the weight behind it where there is one. A bucket, a host or the home
    folder alone has none. An address of the Hugging Face hub is public, and stays."""
    place = place.strip()
    if place.startswith("hf://"):
        return place
    if place.rstrip("/") == os.path.expanduser("~"):
        return ""
    path = re.sub(r"^[\w+.-]+://[^/]*", "", place)
    return re.sub(r"/+(?=:|$)", "", path).rpartition("/")[2]
