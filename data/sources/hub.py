"""The files of a dataset of the Hugging Face hub."""

import os
from concurrent.futures import ThreadPoolExecutor

from runtime.files import filesystem
from runtime.messages import UserError, first_line


def find_dataset(args):
    """Find a dataset of the hub, at its newest revision, or offline in the hub's cache.

    Returns (file system, {path: bytes}, {setting: value} for the manifest). args: a command_line.Source. Raises
    UserError.
    """
    import datasets  # here, since importing it takes a second

    name = args.source
    split = args.split
    try:
        revision, address = newest(name)
        builder = datasets.load_dataset_builder(address, args.config, revision=revision)
        urls = builder.config.data_files[split]
        fs = filesystem(urls[0])[0]
        with ThreadPoolExecutor(16) as pool:
            infos = list(pool.map(fs.info, urls))
    except Exception as e:  # errors of the network and of datasets' builders have no common class
        raise UserError(
            f"there is no such file or folder, nor a dataset of the hub with --config {args.config} "
            f"and --split {split} ({first_line(e)})",
            flag="source",
            value=name,
        ) from None
    files = {fs._strip_protocol(url): info["size"] for url, info in zip(urls, infos)}
    return fs, files, {"config": args.config, "split": split, "revision": revision}


def newest(name):
    """(newest revision, name) of a dataset of the hub or, where the hub does not answer, (revision, folder) of the copy
    in the cache. Raises the errors of huggingface_hub."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return HfApi().dataset_info(name).sha, name
    except Exception as e:
        try:
            folder = snapshot_download(name, repo_type="dataset", local_files_only=True)
        except Exception:
            raise e from None
        return os.path.basename(folder), folder
