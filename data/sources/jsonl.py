"""Documents that are lines of .jsonl files, compressed or not."""

import codecs
import io
import json
import os

import pyarrow

from data.sources.base import Entry, Records, text_in, warn
from data.sources.text import wide_encoding
from utils import UserError

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


class Lines(Records):
    """Every line that is not blank is a document: a JSON object with a column of text."""

    endings = (".jsonl", ".jsonl.gz", ".jsonl.zst")

    def entries(self, file, first):
        """Yield an Entry for each line of file number `file` from line `first` on; content is the line itself."""
        path, before = self.files[file].name, self.before(file)
        with self.fs.open(path, "rb") as raw:
            for i, line in enumerate(self._lines(raw, path)):
                line = line.removeprefix(codecs.BOM_UTF8)
                if i >= first and line.strip():
                    text = self._text(line, f"line {i + 1} of {path}")
                    yield Entry(i + 1, before + raw.tell(), line, text)

    def _lines(self, raw, path):
        """The lines, in UTF-8, of an open file in UTF-8 or, with a byte order mark, in UTF-16 or UTF-32."""
        compression = COMPRESSION.get(os.path.splitext(path)[1])
        stream = pyarrow.CompressedInputStream(raw, compression) if compression else raw
        # where a file is torn, what is in this buffer is lost
        stream = io.BufferedReader(stream, 1 << 16)
        if compression and not stream.peek(1) and not raw.tell():
            raise EOFError("no bytes are in it, not even those of an empty archive")
        encoding = wide_encoding(stream.peek(4))
        if encoding is None:
            return stream
        warn("wide", f"{path} is {encoding.upper()} and is read as such")
        return (line.encode() for line in io.TextIOWrapper(stream, encoding, newline="\n"))

    def _text(self, line, where):
        """The text of a line, or the Lost of a damaged one."""
        try:
            # bytes that are not UTF-8 become lone surrogates, which read_text replaces and counts
            row = json.loads(line.decode(errors="surrogateescape"))
            return text_in(row, self.column, where)
        except UserError as e:
            return self.damaged(e, records=1)
        except (ValueError, RecursionError) as e:
            error = UserError(f"--source: {where} is not JSON ({e}){self.advice}.")
            return self.damaged(error, records=1)
