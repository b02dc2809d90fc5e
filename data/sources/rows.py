"""Documents that are rows of .csv and .tsv files, compressed or not."""

import csv

from data.sources import text
from data.sources.base import Records
from data.sources.text import decompressed, lines
from runtime.messages import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}  # {ending of a file's name: its delimiter}


def delimiter_of(path):
    """The delimiter of cells in a file, by the file's name; None where the name is not one of a table of text."""
    stem = text.stem(path)
    return next((d for ending, d in DELIMITERS.items() if stem.endswith(ending)), None)


def table(stream, path):
    """Yield the rows of a stream as lists of cells. The first row holds the names of the columns. Raises UserError."""
    csv.field_size_limit(text.LONGEST)
    try:
        # strict, because otherwise a misplaced quotation mark joins rows silently
        reader = csv.reader(lines(stream), delimiter=delimiter_of(path), strict=True)
        yield from filter(None, reader)  # without blank lines
    except csv.Error as e:
        raise UserError(f"{path} cannot be read ({e})", flag="source") from None


class Rows(Records):
    """Every row after the first, which names the columns, is a document."""

    def entries(self, path):
        """The rows of a file, as `Records` defines `entries`."""
        with self.fs.open(path, "rb") as raw:
            rows = table(decompressed(raw, path), path)
            names = next(rows, [])
            for i, row in enumerate(rows, 1):
                yield i, raw.tell(), self._text(names, row, f"row {i} of {path}")

    def _text(self, names, row, at):
        """The text of a row, a str; a Document where the row is damaged."""
        try:
            if len(row) != len(names):
                raise UserError(
                    f"{at} has {len(row)} cells and the first row names {len(names)} columns",
                    flag="source",
                    remedy=self.advice,
                )
            return self.cell(dict(zip(names, row)), at)
        except UserError as e:
            return self.damaged(e, "damaged_records")
