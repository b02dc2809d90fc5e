"""Models of the Hugging Face hub, in the hub's own cache: safetensors and what describes them, never code."""

import functools
import os
import shutil
import sys

from inference import hugging_face
from runtime.messages import UserError, first_line, say, size

PREFIX = "hf://"
GPT2 = {
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "distilgpt2",
}  # names without an organisation
DESCRIPTION = ["config.json", "tokenizer.json", "tokenizer_config.json", hugging_face.INDEX]


def is_on_hub(name):
    """Whether a name means a model of the hub: hf://ORGANISATION/NAME, with @REVISION behind it, or a GPT-2."""
    return name.startswith(PREFIX) or (name in GPT2 and not os.path.exists(name))


@functools.cache
def folder_of(name):
    """The local folder of a model, without the weights of one that is on the hub: `download` fetches these."""
    return fetch(name, DESCRIPTION) if is_on_hub(name) else name


def fetch(name, files, revision=None):
    """The folder of the hub's cache with those of the `files` that a model has. Raises UserError."""
    from huggingface_hub import constants, errors, snapshot_download, utils  # takes a second

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    repository, _, asked = name.removeprefix(PREFIX).partition("@")
    revision = revision or asked or None
    try:
        return snapshot_download(repository, revision=revision, allow_patterns=files)
    except errors.GatedRepoError:
        words = "needs its owner's consent: ask for it on the model's page and set HF_TOKEN"
    except errors.LocalEntryNotFoundError:
        cache = constants.HF_HUB_CACHE
        words = (
            f"is not in the cache, {cache}, and the Hugging Face hub cannot be reached from here"
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        words = "the Hugging Face hub has no such model or revision that is public; write hf://ORGANISATION/NAME"
    except Exception as e:  # of the network and of the disk: there is no common class
        words = f"cannot be fetched from the Hugging Face hub ({first_line(e)})"
    raise UserError(f"{name}: {words}.")


def download(name):
    """`folder_of` a model, now with its weights. Prints how much is downloaded. Raises UserError."""
    folder = folder_of(name)
    missing = [f for f in hugging_face.weight_files(folder) if not os.path.isfile(f"{folder}/{f}")]
    if not missing or not is_on_hub(name):
        return folder
    from huggingface_hub import HfApi, constants

    repository = name.removeprefix(PREFIX).partition("@")[0]
    commit = os.path.basename(folder)
    try:
        about = HfApi().model_info(repository, revision=commit, files_metadata=True)
    except Exception as e:
        raise UserError(
            f"{name}: its weights are not in the cache, and the Hugging Face hub cannot be asked ({first_line(e)})."
        ) from None
    sizes = {file.rfilename: file.size or 0 for file in about.siblings}
    if lacks := [file for file in missing if file not in sizes]:
        raise UserError(f"{name}: has no {lacks[0]}; only weights in safetensors are read.")
    cache = constants.HF_HUB_CACHE
    n_bytes = sum(sizes[file] for file in missing)
    say(f"{name}: downloading {size(n_bytes)} to {cache}")
    if n_bytes > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"{name}: takes {size(n_bytes)}, and {cache} has {size(free)} free; HF_HOME names another folder."
        )
    return fetch(name, missing, commit)
