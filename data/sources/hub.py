"""Documents that are rows of a dataset of the Hugging Face hub, whose files are parquet or lines of JSON."""

from concurrent.futures import ThreadPoolExecutor

from data.sources.jsonl import Lines
from data.sources.parquet import Tables
from runtime.files import filesystem
from runtime.messages import UserError, first_line


def open_dataset(name, config, split, *settings):
    """The rows of a dataset of the hub, at its newest revision. settings: the text column and --skip_damaged. Raises
    UserError."""
    import datasets  # takes a second
    import huggingface_hub

    try:
        revision = huggingface_hub.HfApi().dataset_info(name).sha
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        urls = builder.config.data_files[split]
        fs = filesystem(urls[0])[0]
        with ThreadPoolExecutor(16) as pool:
            infos = list(pool.map(fs.info, urls))
    except UserError:
        raise
    except Exception as e:  # of the network, of datasets' builders: there is no common class
        raise UserError(
            f"--source {name}: there is no such file or folder, and the Hugging Face hub gives no such "
            f"dataset with --config {config} and --split {split} ({first_line(e)})."
        ) from None
    if all(url.endswith(".parquet") for url in urls):
        kind = Tables
    elif all(url.endswith((".json", ".json.gz", ".json.zst", *Lines.endings)) for url in urls):
        kind = Lines
    else:
        raise UserError(
            f"--source {name}: its files, such as {urls[0]}, are neither .parquet nor .jsonl, which alone are read."
        )
    paths = map(fs._strip_protocol, urls)
    source = kind(fs, {path: info["size"] for path, info in zip(paths, infos)}, *settings)
    source.identity = dict(config=config, split=split, revision=revision, text_column=settings[0])
    return source
