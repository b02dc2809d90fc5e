"""Documents that are lines of .jsonl files, compressed or not."""

import codecs
import io
import json

from data.sources.base import Entry, Records, text_in, warn
from data.sources.text import check_length, decompressed, lines, wide_encoding
from runtime.messages import UserError


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
        stream = decompressed(raw, path)
        encoding = wide_encoding(stream.peek(4))
        if encoding is None:
            return lines(stream)
        warn("wide", f"{path} is {encoding.upper()} and is read as such")
        return (line.encode() for line in lines(io.TextIOWrapper(stream, encoding, newline="\n")))

    def _text(self, line, where):
        """The text of a line, or the Lost of a damaged one."""
        try:
            check_length(len(line), where, self.advice)
            # bytes that are not UTF-8 become lone surrogates, which read_text replaces and counts
            row = json.loads(line.decode(errors="surrogateescape"))
            return text_in(row, self.column, where)
        except UserError as e:
            return self.damaged(e, records=1)
        except (ValueError, RecursionError) as e:
            error = UserError(f"--source: {where} is not JSON ({e}){self.advice}.")
            return self.damaged(error, records=1)
        except MemoryError:  # a list of empty lists takes twenty times its bytes
            error = UserError(f"--source: {where} does not fit into memory{self.advice}.")
            return self.damaged(error, records=1)
