"""The files of a dataset of the Hugging Face hub."""

import os
from concurrent.futures import ThreadPoolExecutor

from runtime.files import filesystem
from runtime.messages import UserError, first_line


def find_dataset(args):
    """(file system, {path: bytes}, {setting: value} of the manifest) of a dataset of the hub, at its newest revision,
    or in the hub's cache. args: a command_line.Source. Raises UserError."""
    import datasets  # takes a second

    name, split = args.source, args.split
    try:
        revision, place = newest(name)
        builder = datasets.load_dataset_builder(place, args.config, revision=revision)
        urls = builder.config.data_files[split]
        fs = filesystem(urls[0])[0]
        with ThreadPoolExecutor(16) as pool:
            infos = list(pool.map(fs.info, urls))
    except Exception as e:  # of the network, of datasets' builders: there is no common class
        raise UserError(
            f"there is no such file or folder, nor a dataset of the hub with --config {args.config} "
            f"and --split {split} ({first_line(e)})",
            flag="source",
            value=name,
        ) from None
    files = {fs._strip_protocol(url): info["size"] for url, info in zip(urls, infos)}
    return fs, files, {"config": args.config, "split": split, "revision": revision}


def newest(name):
    """(revision, name or local folder) of a dataset of the hub. Raises what huggingface_hub does."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return HfApi().dataset_info(name).sha, name
    except Exception as e:
        try:
            folder = snapshot_download(name, repo_type="dataset", local_files_only=True)
        except Exception:
            raise e from None
        return os.path.basename(folder), folder
