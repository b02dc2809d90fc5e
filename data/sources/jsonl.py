"""Documents that are lines of .jsonl files, compressed or not."""

import json

from data.sources.base import Records
from data.sources.text import check_length, decompressed, lines
from runtime.messages import UserError


class Lines(Records):
    """Every line that is not blank is a document: a JSON object with a column of text."""

    endings = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd")

    def entries(self, path):
        with self.fs.open(path, "rb") as raw:
            for i, line in enumerate(lines(decompressed(raw, path)), 1):
                if line.strip():
                    yield i, raw.tell(), self._text(line, f"line {i} of {path}")

    def _text(self, line, at):
        """The text of a line, a str or None, or the Document of a damaged one."""
        try:
            check_length(len(line), at, self.advice)
            row = json.loads(line)
            if not isinstance(row, dict) or self.column not in row:
                raise UserError(
                    f"--text_column {self.column}: {at} has no such column; it has {', '.join(row)}."
                )
            text = row[self.column]
            if not isinstance(text, str | None):
                raise UserError(f"--text_column {self.column}: {at} holds {text!r:.40}, not text.")
            return text
        except UserError as e:
            error = e
        except (ValueError, TypeError, RecursionError) as e:
            error = UserError(f"--source: {at} is not a JSON object ({e}){self.advice}.")
        return self.damaged(error, "damaged_records")
