"""Documents that are rows of .parquet files."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pyarrow.parquet

from data.sources import text
from data.sources.base import Records
from data.sources.text import DAMAGE, check_length
from runtime.messages import UserError

TEXT_TYPES = ("string", "large_string", "string_view", "null")  # Arrow's, of a column of text


class Tables(Records):
    """Every row is a document.

    Only the calling thread reads. Arrow's own threads, if they still read when the interpreter exits, would abort it.
    """

    def __init__(self, *args):
        super().__init__(*args)
        # {path: the UserError of a file that cannot be used, or None}. 16 at once: remote storage is slow to answer.
        with ThreadPoolExecutor(16) as pool:
            self.errors = dict(zip(self.files, pool.map(self._error_of, self.files)))
        errors = list(filter(None, self.errors.values()))
        if errors and (not self.skip or len(errors) == len(self.files)):
            raise errors[0]

    def _open(self, f):
        return pyarrow.parquet.ParquetFile(
            f,
            pre_buffer=False,  # reading ahead would use Arrow's threads
            buffer_size=1 << 20,
            page_checksum_verification=True,
        )

    def _error_of(self, path):
        """The UserError of a file that is damaged or that lacks a column of text; None for a sound file."""
        try:
            with self.fs.open(path, "rb") as f, self._open(f) as table:
                types = dict(zip(table.schema_arrow.names, table.schema_arrow.types))
        except DAMAGE as e:
            return self.cannot_be_read(path, e)
        others = ", ".join(types)
        has = f"has no column {self.column}, only {others}; name that of the text by --text_column"
        if self.column in types:
            column_type = types[self.column]
            if pyarrow.types.is_dictionary(column_type):
                column_type = column_type.value_type
            if str(column_type) in TEXT_TYPES:
                return None
            has = f"holds {column_type} in its column {self.column}, which is no text"
        return UserError(f"{path} {has}", flag="source")

    def entries(self, path):
        """The rows of a file, as `Records` defines `entries`."""
        if self.errors[path]:
            raise self.errors[path]
        row = 0
        with self.fs.open(path, "rb") as f, self._open(f) as table:
            for group in range(table.num_row_groups):
                for row, cell in enumerate(self._cells(table, group), row + 1):
                    done = self.files[path] * row // table.metadata.num_rows
                    yield row, done, self._text(cell, f"row {row} of {path}")

    def _cells(self, table, group):
        """Yield the text cells of a row group as buffers in Arrow's memory, uncopied; b"" for an empty cell."""
        size = table.metadata.row_group(group).total_byte_size
        # A dictionary may hold one long text that all rows share, so a row can be as long as the whole group. Only as
        # many rows are read at once as fit in memory even then.
        n_rows = min(100, max(1, text.LONGEST // max(1, size)))
        batches = table.iter_batches(
            row_groups=[group], columns=[self.column], use_threads=False, batch_size=n_rows
        )
        for cell in itertools.chain.from_iterable(batch.column(0) for batch in batches):
            if isinstance(cell, pyarrow.DictionaryScalar):
                cell = cell.value
            yield cell.as_buffer() if cell.is_valid else b""

    def _text(self, cell, where):
        """The text of a cell, with lone surrogates for bytes that are not UTF-8; a Document where it is too long."""
        try:
            check_length(len(cell), where, self.advice)
        except UserError as e:
            return self.damaged(e, "damaged_records")
        return bytes(cell).decode(errors="surrogateescape")
