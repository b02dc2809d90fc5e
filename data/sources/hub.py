"""Documents that are rows of a dataset of the Hugging Face hub."""

from concurrent.futures import ThreadPoolExecutor

from data.sources.base import Source, record, text_in
from data.sources.parquet import Tables
from runtime.files import filesystem
from runtime.messages import UserError, first_line


class Rows(Source):
    """A source that the package `datasets` streams from the hub, of files that are not parquet. A row is a document."""

    unit = " documents"

    def __init__(self, column, skip, *args, **kwargs):
        """args and kwargs: those of datasets.load_dataset."""
        import datasets  # takes a second

        super().__init__([], skip)
        self.column = column
        self.identity = {"text_column": column}
        self.stream = datasets.load_dataset(*args, **kwargs, streaming=True)
        split = (self.stream.info.splits or {}).get(kwargs["split"])
        self.total = (split.num_examples or None) if split else None
        if self.stream.column_names and column in self.stream.column_names:
            self.stream = self.stream.select_columns([column])
        self.start = self.stream.state_dict()

    def read(self, position):
        """Yield documents from `position` on; self.position then says where the next one begins."""
        n = position.get("documents", 0)
        self.stream.load_state_dict(position.get("state", self.start))
        rows = iter(self.stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as e:  # of the network, of a format: datasets raises what it meets
                message = f"--source: document {n} cannot be read ({first_line(e)})."
                raise UserError(message) from None
            try:
                document = record(n, text_in(row, self.column, f"document {n}"))
                n += 1
            except UserError as e:
                document = record(n, self.damaged(e, records=1))
            self.position = {"documents": n, "done": n, "state": self.stream.state_dict()}
            yield document


def open_dataset(name, config, split, *settings):
    """The rows of a dataset of the hub, at the revision that is its newest now. Raises UserError.

    settings: the text column and --skip_damaged.
    """
    import datasets
    import huggingface_hub

    try:
        revision = huggingface_hub.HfApi().dataset_info(name).sha
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        urls = (builder.config.data_files or {}).get(split, [])
        if urls and all(url.endswith(".parquet") for url in urls):
            source = Tables(*find_files(urls), *settings)
            del source.identity["source_listing_sha256"]  # the revision tells
        else:
            source = Rows(*settings, name, config, revision=revision, split=split)
    except UserError:
        raise
    except Exception as e:  # of the network, of datasets' builders: there is no common class
        raise UserError(
            f"--source {name}: there is no such file or folder, and the Hugging Face hub gives no such "
            f"dataset with --config {config} and --split {split} ({first_line(e)})."
        ) from None
    source.identity = {"config": config, "split": split, "revision": revision} | source.identity
    return source


def find_files(urls):
    """(file system, {path: what it says of the file}) of addresses."""
    fs = filesystem(urls[0])[0]
    with ThreadPoolExecutor(16) as pool:
        infos = list(pool.map(fs.info, urls))
    return fs, {fs._strip_protocol(url): info for url, info in zip(urls, infos)}
