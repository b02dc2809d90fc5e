"""Documents that are JSON objects of files that are not lines: one array of them, or objects one after another."""

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
    """Yield the values of a text of JSON. Raises ValueError or RecursionError where it is none."""
    decode = json.JSONDecoder().raw_decode
    at = SPACE.match(content).end()
    while at < len(content):
        value, at = decode(content, at)
        yield value
        at = SPACE.match(content, at).end()


def objects_in(values):
    """Yield the values, and for an array its elements."""
    for value in values:
        yield from value if isinstance(value, list) else [value]


class Values(Records):
    """Every object is a document."""

    def entries(self, path):
        with self.fs.open(path, "rb") as raw:
            content = content_of(raw, path)
        try:
            objects = list(objects_in(values_in(content)))
        except (ValueError, RecursionError) as e:
            raise UserError(
                f"{path} is not JSON ({e})", flag="source", remedy=self.advice
            ) from None
        for i, value in enumerate(objects, 1):
            yield (
                i,
                self.files[path] * i // len(objects),
                self._text(value, f"object {i} of {path}"),
            )

    def _text(self, value, at):
        """The text of an object, a str or None, or the Document of a damaged one."""
        try:
            return self.cell(value, at)
        except UserError as e:
            return self.damaged(e, "damaged_records")
