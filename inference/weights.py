"""Load weights of another run, of a folder in the Hugging Face format, or of a model of the Hugging Face hub."""

import functools
import glob
import os
import re

import jax

import utils
from config import resume, settle
from hf import hub, pretrained
from logs.overfitting import overfit
from logs.rows import read_rows
from runtime.files import is_remote, read_json
from runtime.messages import UserError, nearest, say_aside, warn
from runtime.processes import on_all
from shards import tokenization
from training.checkpointing import Checkpoints


def open_weights(folder):
    """Open a model: ({flag: value} of the model, load_weights).

    load_weights(abstract) reads the parameters and shards them like `abstract`, from `train_state.abstract_params`.
    folder: one of
        a run directory, of which `choose_checkpoint` chooses a checkpoint
        a folder in the Hugging Face format
        the name of a model of the hub (`hub.is_on_hub`), which load_weights downloads
    Raises UserError where it is none of these.
    """
    local = hub.folder_of(folder)
    config = read_json(local, "config.json")
    if "model_type" in config:
        if is_remote(local):
            raise UserError(
                f"{folder}: a folder in the Hugging Face format must be local; copy it with the storage's own tool."
            )

        def load_downloaded(abstract):
            return pretrained.load_params(on_all(lambda: hub.download(folder)), abstract)

        return pretrained.model_flags(config, local), load_downloaded
    if "model_dimension" not in config:
        raise UserError(
            f"{folder}: neither a run directory nor a folder in the Hugging Face format (each holds a config.json)"
            f"{hint(folder)}."
        )
    resume.check_stored(config, folder, ["architecture"])
    flags = {name: config[name] for name in vars(utils.Model()) if name in config}
    settle.check_model(flags, os.path.join(folder, "config.json"))
    cfg = utils.replace(utils.Config(), pp_interleave=1, **flags)
    explain = functools.partial(resume.other_flags, cfg)
    checkpoints = Checkpoints(os.path.join(local, "checkpoints"), explain=explain)

    def load_chosen(abstract):
        chosen = on_all(lambda: choose_checkpoint(folder, local, checkpoints))
        return checkpoints.restore_params(abstract, chosen)

    return flags, load_chosen


def choose_checkpoint(folder, local, checkpoints):
    """The step of the checkpoint of a run to load: STEP where `folder` is RUN@STEP; in a run that overfits, that of the
    smallest held-out loss, which is printed; else None, which means the newest sound one. Raises UserError."""
    steps = resume.checkpoint_steps(local)
    if asked := hub.step_in(folder):
        if asked not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"{folder}: there is no checkpoint of step {asked} in {local}, only {there}."
            )
        return asked
    losses = {step: checkpoints.val_loss(step) for step in steps}
    losses = {step: loss for step, loss in losses.items() if loss is not None}
    best = min(losses, key=losses.get, default=None)
    if best is None or best == steps[0]:  # without reading all rows of the run
        return None
    found = overfit(read_rows(local))
    if not found:
        return None
    if jax.process_index() == 0:
        say_aside(
            f"{local}: {found.words[0].lower()}{found.words[1:]}; checkpoint {best} is the best and is taken "
            f"({local}@{steps[0]} is the newest)"
        )
    return best


HINTS = {  # values that nanoGPT's --init_from has
    "resume": "; rerun the same command to resume a run",
    "scratch": "; without this flag a new run begins with random weights",
}


def hint(folder):
    """Advice that ends the message that `folder` holds no model: the model that was probably meant, or ""."""
    parent = os.path.dirname(os.path.abspath(folder))
    beside = glob.glob(f"{glob.escape(parent)}/*")
    inside = glob.glob(f"{glob.escape(folder)}/*")
    nearby = [parent, os.path.dirname(parent), *beside, *inside]
    runs = [os.path.relpath(path) for path in nearby if os.path.isfile(f"{path}/config.json")]
    other = f"; there is {runs[0]}" if runs else ""
    if not runs and re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        other = f"; a model of the Hugging Face hub is {hub.PREFIX}{folder}"
    return HINTS.get(folder) or nearest(os.path.relpath(folder), runs) or other


def max_positions(folder, T):
    """Tokens of the longest sequence that the model in `folder` was made for. T, from `open_weights`, is the answer
    where its config.json does not say."""
    config = read_json(hub.folder_of(folder), "config.json")
    most = config.get("max_position_embeddings") or config.get("positions")
    return most if isinstance(most, int) else T


def end_tokens(folder):
    """Ids of the tokens that end a text, in addition to the end of text of the tokenizer: every eos_token_id in the
    model's config.json, also that of a run, and in its generation_config.json. Raises UserError where one is no id."""
    local = hub.folder_of(folder)
    found = []
    for name in ("config.json", "generation_config.json"):
        ids = read_json(local, name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        for token in ids:
            if token is not None and type(token) is not int:
                raise UserError(
                    f"{os.path.join(local, name)}: eos_token_id is {token!r:.40}, but must be a token id or a list of "
                    f"them."
                )
        found += [token for token in ids if token is not None and token >= 0]
    return list(dict.fromkeys(found))


def check_tokenizer(where, folder, shards, flag=""):
    """Raises UserError where shards were made with another tokenizer than that of the weights in `folder`, so that
    their ids mean other tokens; warns where that is unknown.

    where: the message begins with it. shards: as `listing.manifests` lists them. flag: the value of --tokenizer for the
    shards.
    """
    local = hub.folder_of(folder)
    encoding = tokenization.folder_tokenizer(local)
    unknown = []
    for root, there, manifest in shards:
        made_with = tokenization.shards_tokenizer(root, manifest, flag)
        same = tokenization.made_shards(encoding, made_with, manifest) if encoding else None
        if same is None:
            unknown.append(there)
        elif not same:
            own = tokenization.folder_tokenizer_name(local)
            raise UserError(
                f"{where}: the shards in {there} were made with another tokenizer ({made_with}) than the weights "
                f"({own}), so their ids mean other tokens; tokenize the text with {own}."
            )
    if unknown:
        warn(
            f"{where}: nothing tells whether the tokenizer of {folder} made the shards in "
            f"{', '.join(unknown)}; if another did, their ids mean other tokens"
        )
