"""Documents that are rows of .parquet files."""

from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pyarrow.parquet

from data.sources.base import DAMAGE, Entry, Records
from utils import UserError

# Arrow's types of a column that holds text
TEXT_TYPES = ("string", "large_string", "string_view", "null")


class Tables(Records):
    """Every row is a document.

    This thread alone reads them: threads of Arrow that still read when the interpreter ends would abort it.
    """

    endings = (".parquet",)
    unit = " documents"

    def __init__(self, *args):
        super().__init__(*args)
        with ThreadPoolExecutor(16) as pool:  # remote storage is slow to answer
            # of each file, the number of rows of each row group, or a UserError
            self.groups = list(pool.map(self._look, [f.name for f in self.files]))
        errors = [groups for groups in self.groups if isinstance(groups, UserError)]
        if errors and (not self.skip or len(errors) == len(self.groups)):
            raise errors[0]

    def _open(self, f):
        return pyarrow.parquet.ParquetFile(
            f,
            pre_buffer=False,  # no thread of Arrow reads ahead
            buffer_size=1 << 20,
            page_checksum_verification=True,
        )

    def _look(self, path):
        """Rows of each row group of a file, or the UserError of one that is damaged or has no text in the column."""
        try:
            with self.fs.open(path, "rb") as f, self._open(f) as table:
                types = dict(zip(table.schema_arrow.names, table.schema_arrow.types))
                rows = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
        except DAMAGE as e:
            return self.cannot_be_read(path, e)
        if self.column not in types:
            return UserError(
                f"--text_column {self.column}: {path} has no such column; it has {', '.join(types)}."
            )
        kind = types[self.column]
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if str(kind) not in TEXT_TYPES:
            return UserError(
                f"--text_column {self.column}: {path} holds {kind} there, not text; give a column of "
                f"strings."
            )
        return rows

    def before(self, file):
        """Rows of the files before number `file`."""
        return sum(sum(groups) for groups in self.groups[:file] if isinstance(groups, list))

    def read(self, position):
        """As of any records; a position of an earlier version tells the number of rows alone."""
        if position and "file" not in position:
            n = position["documents"]
            ends = [self.before(i + 1) for i in range(len(self.files))]
            file = sum(end <= n for end in ends)
            position = position | {"file": file, "line": n - self.before(file)}
        return super().read(position)

    def entries(self, file, first):
        """Yield an Entry for each row of file number `file` from row `first` on.

        content is the text in UTF-8, or b"\\0" for none.
        """
        path, groups, before = self.files[file].name, self.groups[file], self.before(file)
        if isinstance(groups, UserError):
            raise groups
        end = 0
        with self.fs.open(path, "rb") as f, self._open(f) as table:
            for group, n_rows in enumerate(groups):
                row = end
                end += n_rows
                if end <= first:
                    continue
                try:
                    for row, text in enumerate(self._texts(table, group), row + 1):
                        if row > first:
                            content = b"\0" if text is None else text.encode(errors="surrogatepass")
                            yield Entry(row, before + row, content, text)
                except DAMAGE as e:
                    error = self.cannot_be_read(f"row group {group} of {path}", e)
                    lost = self.damaged(error, records=end - max(row, first))
                    yield Entry(end, before + end, b"", lost)

    def _texts(self, table, group):
        """Yield the texts of a row group; bytes that are not UTF-8 become lone surrogates."""
        batches = table.iter_batches(
            row_groups=[group], columns=[self.column], use_threads=False, batch_size=100
        )
        for batch in batches:
            column = batch.column(0)
            try:
                yield from column.to_pylist()
            except UnicodeDecodeError:
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                for content in column.cast(pyarrow.large_binary()).to_pylist():
                    yield None if content is None else content.decode(errors="surrogateescape")
