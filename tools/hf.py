"""Convert a run's weights to and from a folder that Hugging Face's transformers loads, tensor by tensor.

python tools/hf.py export runs/deepseek-tiny exported      checkpoint -> folder
python tools/hf.py import exported runs/imported           folder -> run directory with its weights alone
python tools/hf.py push runs/deepseek-tiny user/name       checkpoint -> repository of the Hugging Face hub

`main.py --init_from FOLDER` trains on from such a folder directly, without an import.
"""

if not __package__:
    import startup

    startup.prepare()

import functools
import math
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from typing import Literal

import huggingface_hub
import jax
import numpy as np
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

import utils
from config import settle
from config.parser import argument
from config.stored import shareable
from hf import hub, pretrained
from hf.registry import format_to_export
from inference import weights
from runtime.files import (
    appearing,
    check_run_path,
    is_remote,
    read_json,
    removed,
    write_file,
    write_json,
)
from runtime.jax_setup import quiet_libraries
from runtime.messages import UserError, first_line, say
from runtime.pulse import Pulse
from shards import tokenization
from tools import common
from tools.model_card import model_card
from training import checkpointing
from training.device_mesh import make_mesh
from training.sizes import count_in_words
from training.train_state import abstract_params

# PyTorch code of models that transformers lacks
CODE = os.path.realpath(f"{__file__}/../../hf/exported")


def import_folder(folder, run_dir):
    """Write a run directory whose only checkpoint has the weights of `folder`, or of a model of the hub."""
    folder = hub.download(folder)
    flags = pretrained.model_flags(read_json(folder, "config.json"), folder)
    cfg = config_of_one_device(flags, run_dir)
    # so that a damaged tokenizer is refused before weights are read
    tokenization.folder_tokenizer(folder)
    params = pretrained.load_params(folder, abstract_params(cfg, make_mesh(cfg)))
    output_dir, name = os.path.split(os.path.abspath(run_dir))
    config = utils.flatten(cfg) | dict(name=name, output_dir=output_dir, encoding="")
    config["positions"] = weights.max_positions(folder, flags["T"])
    config["eos_token_id"] = weights.end_tokens(folder)
    with appearing(run_dir) as part:
        tokenizer = f"{folder}/tokenizer.json"
        if os.path.isfile(tokenizer):
            config["encoding"] = tokenization.copy_tokenizer(part, tokenizer)
        else:
            say(f"warning: {folder} has no tokenizer.json, so the run can't turn text into tokens")
        checkpoints = checkpointing.Checkpoints(f"{part}/checkpoints", keep=1)
        checkpoints.save(0, {"params": params}, 0, {})
        checkpoints.close()
        if checkpoints.saved is None:
            raise UserError(f"{run_dir}: the checkpoint could not be written there.")
        write_json(f"{part}/config.json", config)
    count = count_in_words(cfg)
    say(f"{run_dir}: {count}; main.py --init_from {run_dir} begins a run with them")


def export(run_dir, folder, dtype="float32", title=""):
    """Write a run's newest sound checkpoint as a folder that transformers loads. title: the model's name in its card;
    "": that of the folder."""
    flags, load = weights.open_weights(run_dir)
    cfg = config_of_one_device(flags, run_dir)
    form = format_to_export(cfg.model.architecture)
    local = hub.folder_of(run_dir)
    config = form.config(cfg.model) | dict(torch_dtype=dtype)
    params = load(abstract_params(cfg, make_mesh(cfg)))
    count = count_in_words(cfg)
    with appearing(folder) as part:
        ends = export_tokenizer(part, local, cfg.model)
        config |= ends
        tensors = {}
        for t in form.tensors(cfg.model):
            x = np.zeros(t.part, np.float32)
            if math.prod(t.shape):
                x = np.asarray(functools.reduce(dict.__getitem__, t.leaf, params))[t.at]
            tensors[t.name] = np.ascontiguousarray(t.theirs(x).astype(dtype, copy=False))
        write_json(f"{part}/config.json", config)
        write_tensors(f"{part}/model.safetensors", tensors)
        stored = read_json(local, "config.json")
        if "model_type" not in stored:  # else the model was not trained here
            write_json(f"{part}/training.json", shareable(stored))
        # without max_length, transformers generates 256 tokens, more than a small GPT-2 has positions for
        generation = ends | dict(pad_token_id=ends["eos_token_id"], max_length=int(cfg.model.T))
        others = set(weights.end_tokens(run_dir)) - {ends["eos_token_id"]}
        if others:
            generation["eos_token_id"] = [ends["eos_token_id"], *sorted(others)]
        write_json(f"{part}/generation_config.json", generation)
        name = title or os.path.basename(os.path.abspath(folder))
        write_file(f"{part}/README.md", model_card(local, name, config, count))
        # the code of models that transformers lacks
        for name in config.get("auto_map", {}).values():
            file = f"{name.split('.')[0]}.py"
            shutil.copyfile(f"{CODE}/{file}", f"{part}/{file}")
    say(f"{folder}: {count}; as {config['architectures'][0]}")


def write_tensors(path, tensors):
    """Write {name: array} as a safetensors file that has the permissions of other files. Raises OSError."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as e:  # it is no OSError, even where the disk is full
        raise OSError(first_line(e)) from None
    # the library writes it with mode 600
    shutil.copymode(f"{os.path.dirname(path)}/config.json", path)


def push(run_dir, name, dtype, public):
    """Export a run and upload the folder as the repository `name` of the Hugging Face hub. Raises UserError."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name}: must be USER/NAME of a repository of the Hugging Face hub.")
    api = huggingface_hub.HfApi()
    try:
        # first, so that a missing login is found before the export
        api.create_repo(name, private=not public, exist_ok=True)
        folder = tempfile.mkdtemp()
        with removed(lambda: shutil.rmtree(folder, ignore_errors=True)):
            export(run_dir, f"{folder}/model", dtype, title=name)
            commit = api.upload_folder(repo_id=name, folder_path=f"{folder}/model")
    except UserError:
        raise
    except Exception as e:  # the errors' classes change with the version of the client
        raise UserError(
            f"{name}: the hub took nothing ({first_line(e)}); see that you are logged in (hf auth login) and rerun."
        ) from None
    say(f"uploaded to {commit.commit_url}")


def config_of_one_device(flags, model):
    """The Config of a model with these flags on one device."""
    one = common.Options(model=model, n_device_axis=(1, 1, 1), n_devices=1)
    return settle.validate(common.config_of(one, flags), jax.device_count())


def export_tokenizer(folder, run_dir, m):
    """Write files that AutoTokenizer loads, where the run has a tokenizer. Returns the ids of its first and last token
    for config.json."""
    encoding = tokenization.folder_tokenizer(run_dir)
    common.warn_of_more_tokens(encoding, m.vocab_size, run_dir)
    if encoding is None:
        say(f"warning: {run_dir} has no tokenizer, so what is exported has none")
        # None keeps transformers from using a default of its own
        begin = m.end_of_text if m.end_of_text >= 0 else None
        end = next(iter(weights.end_tokens(run_dir)), begin)
    else:
        end = encoding.eot_token
        begin = getattr(encoding, "bos_token", end)
    if isinstance(encoding, tokenization.HubTokenizer):
        tokenization.copy_tokenizer(folder, encoding.path)
        remove_paths(f"{folder}/tokenizer_config.json")
    elif encoding:
        write_file(f"{folder}/tokenizer.json", byte_level(encoding).to_str(pretty=True))
        ends = ("bos_token", "eos_token", "pad_token")
        config = dict.fromkeys(ends, tokenization.END_OF_TEXT) | dict(
            tokenizer_class="PreTrainedTokenizerFast",
            padding_side="left",  # so that prompts of several lengths continue as one batch
            model_max_length=m.T,
            clean_up_tokenization_spaces=False,
        )
        write_json(f"{folder}/tokenizer_config.json", config)
    return dict(bos_token_id=begin, eos_token_id=end)


def remove_paths(path):
    """Remove from a tokenizer_config.json the paths of the machine that wrote it, which transformers records there."""
    config = read_json(path)
    kept = {}
    for name, value in config.items():
        is_path = isinstance(value, str) and re.match(r"[~.]{0,2}/\S", value)
        if name.endswith("_token") or not is_path:
            kept[name] = value
    if kept != config:
        write_json(path, kept)


def byte_level(encoding):
    """A tokenizers.Tokenizer with the tokens, the merges and the pattern of a tiktoken.Encoding."""
    tokens = tokenization.tokens_of(encoding)
    ranks = encoding._mergeable_ranks
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            first, second = halves(token, rank, ranks)
            merges.append((tokens[ranks[first]], tokens[ranks[second]]))
    vocabulary = {token: number for number, token in tokens.items()}
    bpe = tokenizers.models.BPE(vocabulary, merges, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    # A + after a quantifier makes it possessive, which only saves time. In the library's regular expressions it means
    # something else after {1,3}, so it is removed. $ means something else too: \z is its equivalent.
    pattern = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", encoding._pat_str).replace("$", r"\z")
    cuts = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cuts, to_letters])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for name in encoding._special_tokens:
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    return tokenizer


def halves(token, rank, ranks):
    """The two tokens that the merge of rank `rank` joins into `token`, found by applying all merges of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
        i = min(range(len(pairs)), key=pairs.__getitem__)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@dataclass(frozen=True)
class Options:
    """Convert a run's weights to and from a folder that Hugging Face's transformers loads."""

    command: Literal["export", "import", "push"] = argument()
    """export: checkpoint of a run directory -> folder. import: folder -> run directory with its weights alone. push:
    checkpoint -> repository of the Hugging Face hub."""
    source: str = argument()
    """The run directory, or the folder to import, or hf://ORGANISATION/NAME of the Hugging Face hub."""
    target: str = argument()
    """The folder or run directory to write, or USER/NAME to push to."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type to store an export in; the others round."""
    public: bool = False
    """Make the repository that push creates visible to everyone."""


def main(options):
    """Export, import or push a model. Raises UserError."""
    quiet_libraries()
    if options.command == "push":
        return push(options.source, options.target, options.dtype, options.public)
    local = [options.target]
    if options.command == "import" and not hub.is_on_hub(options.source):
        local.append(options.source)
    for path in filter(is_remote, local):
        raise UserError(f"{path}: must be a local folder; copy it with the storage's own tool.")
    if os.path.lexists(options.target):
        raise UserError(f"{options.target} exists already; give another place, or remove that one.")
    if options.command == "export":
        with Pulse("exporting", lines=False):
            export(options.source, options.target, options.dtype)
    else:
        check_run_path(options.target)
        import_folder(options.source, options.target)


if __name__ == "__main__":
    common.run_on_cpu(Options, "tools/hf.py", main)
