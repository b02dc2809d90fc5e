"""Train on this machine from text. `bash run.sh local` runs this once it has made an environment.

python tools/local.py --data input.txt

It accepts the flags of main.py and those of data/own_text.py: TextOptions. First the text that --data names is
tokenized, or Python's standard library where it names none. Then main.py replaces this process.
"""

if __name__ == "__main__" and not __package__:
    import startup

    startup.prepare()

import glob
import math
import os
import re
import sys

import utils
from config.command_line import HINTS, flags_of_file
from config.parser import read_words
from data.corpora import CORPORA
from data.own_text import TextOptions, corpus_of
from runtime import interrupts, platforms
from runtime.files import is_remote
from runtime.messages import UserError, nearest, one_sentence
from shards.storage import list_split
from shards.tokenization import folder_tokenizer_name

STDLIB = "data/shards/stdlib"
# This flag of XLA simulates devices. Where the environment has it, the number of devices is decided there.
SIMULATES = "xla_force_host_platform_device_count"


def main(argv):
    """The command line of main.py for the flags in `argv`. Makes the corpus where it is missing. Raises UserError."""
    if {"-h", "--help"} & {*argv}:
        return ["--preset", "tiny", *argv]
    of_text, words = read_words(TextOptions, argv, "main.py", others=utils.Config, hints=HINTS)
    text_options = TextOptions(**of_text)
    given, _ = read_words(utils.Config, words, "main.py", hints=HINTS)
    # both need no shards: a design without --data names a corpus itself
    if given.get("preset") == "list" or ("design" in given and "data" not in given):
        return argv
    if "config" in given:
        given = flags_of_file(given["config"], given) | given
    if "preset" not in given and "design" not in given:
        words = ["--preset", "tiny", *words]
    tokenizer = given.get("tokenizer") or tokenizer_of_weights(given)
    vocab_size = given.get("vocab_size")
    making = text_options, tokenizer, vocab_size
    if given.get("data") == f"{STDLIB}-{vocab_size}" and not is_made(given["data"]):
        corpus_of("stdlib", *making)  # which a design without --data is for
    elif "data" not in given:
        folder = STDLIB
        # existing shards are used, even if another version of Python made them of another library
        if tokenizer or vocab_size or text_options != TextOptions() or not is_made(folder):
            folder, _ = corpus_of("stdlib", *making)
        words += ["--data", folder]
    elif is_text(given):
        folder, name = corpus_of(given["data"], *making)
        words += ["--data", folder]
        if "name" not in given and "design" not in given:
            words += ["--name", name]
    return [*words, *simulated(given)]


def tokenizer_of_weights(given):
    """The tokenizer of the weights in a local folder that --init_from names, since they know no other; "" where there
    is none."""
    folder = given.get("init_from", "")
    name = folder_tokenizer_name(folder) if os.path.isdir(folder) else ""
    is_file = bool(os.path.dirname(name))
    return name if os.path.isfile(name) or not is_file else ""


def is_made(folder):
    """Whether a folder has complete shards for training and for validation: manifests are written last."""
    return all(os.path.isfile(f"{folder}/{split}/manifest.json") for split in ("train", "val"))


def is_text(given):
    """Whether --data in `given`, {flag: value}, names text rather than a folder of shards. Raises UserError where there
    is no such file or folder."""
    data = given["data"]
    if is_remote(data) or "mix" in given:
        return False
    data = glob.escape(data) if os.path.exists(data) else data
    if not glob.glob(data):
        folder, name = os.path.split(data)
        beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        other = nearest(name, beside)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and not other:
            other = "; data/tokenize_shards.py makes shards of a dataset of the Hugging Face hub"
        if name in CORPORA:
            other = f"; python data/prepare.py {name} makes these shards"
        raise UserError(
            f"there is no such file or folder; give a text file, a folder of text, or a folder of "
            f"shards{other}",
            flag="data",
            value=data,
        )
    return not list_split(f"{given['data']}/train") and not glob.glob(f"{data}/*/train/*.npy")


def simulated(given):
    """The flag that simulates as many devices as a given mesh has, where the machine has no accelerator; else []."""
    n = math.prod(given.get("n_device_axis", ()))
    if "n_device_axis" not in given or "n_devices" in given or not n:
        return []
    if platforms.accelerator() != "cpu" or SIMULATES in os.environ.get("XLA_FLAGS", ""):
        return []
    return ["--n_devices", str(n)]


if __name__ == "__main__":
    lost = "interrupted; rerun the same command to resume"
    watched = interrupts.watch(lambda number: interrupts.end(128 + number, lost))
    words = one_sentence(lambda: main(sys.argv[1:]))
    watched()
    # exec, so that signals reach main.py itself, which then saves a checkpoint
    os.execv(sys.executable, [sys.executable, "main.py", *words])
