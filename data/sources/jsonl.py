"""Documents that are lines of JSON, compressed or not."""

import json

from data.sources.base import Records
from data.sources.text import check_length, decompressed, lines
from runtime.messages import UserError


class Lines(Records):
    """Every line that is not blank is a document: a JSON object with a column of text."""

    def entries(self, path):
        """The lines of a file, as `Records` defines `entries`."""
        with self.fs.open(path, "rb") as raw:
            for i, line in enumerate(lines(decompressed(raw, path)), 1):
                if line.strip():
                    yield i, raw.tell(), self._text(line, f"line {i} of {path}")

    def _text(self, line, at):
        """The text of a line, a str or None; a Document where the line is damaged."""
        try:
            check_length(len(line), at, self.advice)
            return self.cell(json.loads(line), at)
        except UserError as e:
            error = e
        except (ValueError, TypeError, RecursionError) as e:
            error = UserError(f"{at} is not a JSON object ({e})", flag="source", remedy=self.advice)
        return self.damaged(error, "damaged_records")
