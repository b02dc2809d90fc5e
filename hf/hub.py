"""Fetch models of the Hugging Face hub into the hub's own cache: safetensors and their descriptions, never code."""

import functools
import os
import re
import shutil
import sys

import huggingface_hub
from huggingface_hub import errors

from hf import pretrained
from runtime.messages import UserError, first_line, say, size
from shards import tokenization

PREFIX = "hf://"
GPT2 = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2"}  # names that need no prefix
DESCRIPTION = ["config.json", "generation_config.json", "tokenizer.json", *tokenization.BESIDE]
DESCRIPTION += [pretrained.INDEX]
ABSENT = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)


def is_on_hub(name):
    """Whether a name means a model of the hub: hf://ORGANISATION/NAME, with @REVISION behind it, or a GPT-2."""
    return name.startswith(PREFIX) or (name in GPT2 and not os.path.exists(name))


def step_in(name):
    """The step in a name RUN@STEP, which means a checkpoint of a run, or None."""
    found = re.fullmatch(r".+@(\d{1,15})", name)
    return int(found[1]) if found and not is_on_hub(name) and not os.path.exists(name) else None


@functools.cache
def folder_of(name):
    """The local folder of a model, without the weights of one that is on the hub: `download` fetches these."""
    if step_in(name) is not None:
        return name.rpartition("@")[0]
    if not is_on_hub(name):
        return name
    return ask(name, huggingface_hub.snapshot_download, allow_patterns=DESCRIPTION)


def ask(name, method, revision=None, **settings):
    """Call a method of huggingface_hub for the model of this name and return its result. Without `revision` it is the
    one in the name. Raises UserError."""
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    repository, _, named = name.removeprefix(PREFIX).partition("@")
    try:
        return method(repository, revision=revision or named or None, **settings)
    except errors.GatedRepoError:
        words = "needs its owner's consent: ask for it on the model's page and set HF_TOKEN"
    except ABSENT:
        words = "the Hugging Face hub has no such model or revision that is public; write hf://ORGANISATION/NAME"
    except Exception as e:  # errors of the network and of the disk have no common class
        words = f"is not in the hub's cache here, and cannot be fetched ({first_line(e)})"
    raise UserError(f"{name}: {words}.")


def download(name):
    """The local folder of a model, as `folder_of`, but with the weights. Prints how much is downloaded. Raises
    UserError."""
    folder = folder_of(name)
    missing = [f for f in pretrained.weight_files(folder) if not os.path.isfile(f"{folder}/{f}")]
    if not missing or not is_on_hub(name):
        return folder
    commit = os.path.basename(folder)
    info = ask(name, huggingface_hub.HfApi().model_info, commit, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    if pretrained.WHOLE in sizes:
        missing = [pretrained.WHOLE]  # it is used even where there is an index
    for file in missing:
        if file not in sizes:
            raise UserError(f"{name}: has no {file}; only weights in safetensors are read.")
    needed = sum(sizes[file] for file in missing)
    free = shutil.disk_usage(folder).free
    say(f"{name}: downloading {size(needed)} to {folder}, where {size(free)} are free")
    if needed > free:
        raise UserError(f"{name}: does not fit there; HF_HOME names another folder.")
    return ask(name, huggingface_hub.snapshot_download, commit, allow_patterns=missing)
