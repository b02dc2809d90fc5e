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
    """Every row is a document. This thread alone reads: threads of Arrow would abort the interpreter at its end."""

    def __init__(self, *args):
        super().__init__(*args)
        with ThreadPoolExecutor(16) as pool:  # remote storage is slow to answer
            # {path: the UserError of a file that cannot be used, or None}
            self.errors = dict(zip(self.files, pool.map(self._error_of, self.files)))
        errors = list(filter(None, self.errors.values()))
        if errors and (not self.skip or len(errors) == len(self.files)):
            raise errors[0]

    def _open(self, f):
        return pyarrow.parquet.ParquetFile(
            f,
            pre_buffer=False,  # no thread of Arrow reads ahead
            buffer_size=1 << 20,
            page_checksum_verification=True,
        )

    def _error_of(self, path):
        """The UserError of a file that is damaged or has no text in the column, else None."""
        try:
            with self.fs.open(path, "rb") as f, self._open(f) as table:
                types = dict(zip(table.schema_arrow.names, table.schema_arrow.types))
        except DAMAGE as e:
            return self.cannot_be_read(path, e)
        others = ", ".join(types)
        has = f"has no column {self.column}, only {others}; name that of the text by --text_column"
        if self.column in types:
            kind = types[self.column]
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            if str(kind) in TEXT_TYPES:
                return None
            has = f"holds {kind} in its column {self.column}, which is no text"
        return UserError(f"{path} {has}", flag="source")

    def entries(self, path):
        if self.errors[path]:
            raise self.errors[path]
        row = 0
        with self.fs.open(path, "rb") as f, self._open(f) as table:
            for group in range(table.num_row_groups):
                for row, cell in enumerate(self._cells(table, group), row + 1):
                    done = self.files[path] * row // table.metadata.num_rows
                    yield row, done, self._text(cell, f"row {row} of {path}")

    def _cells(self, table, group):
        """Yield the bytes of the cells of a row group, as they are in Arrow's memory."""
        size = table.metadata.row_group(group).total_byte_size
        # a dictionary may hold one long text for all rows: those that are read at once have room even then
        n_rows = min(100, max(1, text.LONGEST // max(1, size)))
        batches = table.iter_batches(
            row_groups=[group], columns=[self.column], use_threads=False, batch_size=n_rows
        )
        for cell in itertools.chain.from_iterable(batch.column(0) for batch in batches):
            if isinstance(cell, pyarrow.DictionaryScalar):
                cell = cell.value
            yield cell.as_buffer() if cell.is_valid else b""

    def _text(self, cell, where):
        """The text of a cell, with lone surrogates for bytes that are not UTF-8; the Document of one too long."""
        try:
            check_length(len(cell), where, self.advice)
        except UserError as e:
            return self.damaged(e, "damaged_records")
        return bytes(cell).decode(errors="surrogateescape")
