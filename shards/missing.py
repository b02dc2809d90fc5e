"""What to do where --data has no shards. Other programs lay shards out otherwise: some of their layouts are known."""

import glob
import os
from typing import NamedTuple

from runtime.files import names_in


class Surroundings(NamedTuple):
    """What is near the folder, train or val, in which shards were looked for."""

    root: str  # the folder of --data, or a file
    corpus: str  # a folder inside `root` that has the split, "" without one
    base: str  # the folder that holds `endings`
    endings: set  # of files in `root`, or of `root` itself where it is a file
    is_split: bool  # whether `root` itself is the train or val of a folder with shards
    has_text: bool  # whether `root` is a file, or a folder of files


def surroundings(folder):
    """The `Surroundings` of a folder such as data/shards/web/train."""
    root, split = os.path.split(folder)
    above, name = os.path.split(root)
    shards = sorted(glob.glob(f"{glob.escape(root)}/*/{split}/*.npy"))
    names = [n for n in names_in(root) if n[0] != "."]
    is_file = names == [name]  # a file lists itself alone
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
    """What the user can do about a folder, train or val, that has no shards: the end of an error's sentence."""
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
            "numpy.save(SHARD, numpy.fromfile(BIN, 'uint16')) makes them of nanoGPT's .bin"
        )
    if has_text:
        return f"bash run.sh local --data {root} makes shards of its text and trains on them"
    return "data/tokenize_shards.py makes them of text (val if --val_fraction is above 0), data/prepare.py of corpora"
