"""The advice for a user whose --data has no shards. It knows some layouts that other programs use for shards."""

import glob
import os
from typing import NamedTuple

from runtime.files import names_in


class Surroundings(NamedTuple):
    """What is near a folder, train or val, in which no shards were found."""

    root: str  # the folder of --data, or the file where --data names one
    corpus: str  # a folder inside `root` that has shards of the split; "" without one
    base: str  # the folder that holds the files with `endings`
    endings: set  # endings of the files in `root`, or of `root` itself if it is a file
    is_split: bool  # whether `root` itself is called train or val
    has_text: bool  # whether `root` is a file, or a folder with files


def surroundings(folder):
    """The `Surroundings` of a folder such as data/shards/web/train."""
    root, split = os.path.split(folder)
    above, name = os.path.split(root)
    shards = sorted(glob.glob(f"{glob.escape(root)}/*/{split}/*.npy"))
    names = [n for n in names_in(root) if n[0] != "."]
    is_file = names == [name]  # the listing of a file contains the file alone
    has_files = glob.glob(f"{glob.escape(root)}/*.*") and not os.path.exists(f"{root}/train")
    return Surroundings(
        root=root,
        corpus=os.path.dirname(os.path.dirname(shards[0])) if shards else "",
        base=above if is_file else root,
        endings={os.path.splitext(n)[1] for n in names},
        is_split=name in ("train", "val"),
        has_text=os.path.isfile(root) or bool(has_files),
    )


def remedy(folder):
    """What the user can do about a folder, train or val, that has no shards, as the end of an error message."""
    root, corpus, base, endings, is_split, has_text = surroundings(folder)
    if corpus:
        return f"give a folder in it, such as {corpus}"
    if ".npy" in endings and is_split:
        return f"give the folder above, {os.path.dirname(root) or '.'}"
    if ".npy" in endings:
        return f"move the .npy files in {base} to {base}/train and {base}/val, each to its split"
    if ".bin" in endings:
        return (
            f"shards are .npy files in {base}/train and {base}/val, of one row of token ids each, as "
            "numpy.save(SHARD, numpy.fromfile(BIN, 'uint16')) makes them of nanoGPT's .bin; llm.c's, which have a "
            f"header, are read as they are: give {base} with NAME_train_000001.bin and NAME_val_000000.bin in it"
        )
    if has_text:
        return f"bash run.sh local --data {root} makes shards of its text and trains on them"
    return "data/tokenize_shards.py makes them of text (val if --val_fraction is above 0), data/prepare.py of corpora"
