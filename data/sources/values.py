"""Documents that are JSON objects, in files that are not lines of JSON: an array of objects, or a sequence of them."""

import json
import re

from data.sources import text
from data.sources.base import Records
from runtime.messages import UserError

SPACE = re.compile(r"\s*")


def content_of(raw, path):
    """The text of an open file. Raises UserError or one of text.DAMAGE."""
    return text.content_of(raw, path, "; make lines of its objects (jq -c '.[]')")


def values_in(content):
    """Yield the JSON values that a text consists of. Raises ValueError or RecursionError at what is not JSON."""
    decode = json.JSONDecoder().raw_decode
    at = SPACE.match(content).end()
    while at < len(content):
        value, at = decode(content, at)
        yield value
        at = SPACE.match(content, at).end()


def objects_in(values):
    """Yield the values; in place of an array its elements."""
    for value in values:
        yield from value if isinstance(value, list) else [value]


class Values(Records):
    """Every object is a document."""

    def entries(self, path):
        """The objects of a file, as `Records` defines `entries`."""
        with self.fs.open(path, "rb") as raw:
            content = content_of(raw, path)
        try:
            objects = list(objects_in(values_in(content)))
        except (ValueError, RecursionError) as e:
            raise UserError(
                f"{path} is not JSON ({e})", flag="source", remedy=self.advice
            ) from None
        for i, value in enumerate(objects, 1):
            done = self.files[path] * i // len(objects)
            yield i, done, self._text(value, f"object {i} of {path}")

    def _text(self, value, at):
        """The text of an object, a str or None; a Document where the object is damaged."""
        try:
            return self.cell(value, at)
        except UserError as e:
            return self.damaged(e, "damaged_records")
