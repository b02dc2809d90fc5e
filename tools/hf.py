"""A run's weights to and from a folder that Hugging Face's transformers loads, tensor by tensor.

python tools/hf.py export runs/deepseek-tiny exported      checkpoint -> folder
python tools/hf.py import exported runs/imported           folder -> run directory with its weights alone

`main.py --init_from FOLDER` trains on from such a folder without the detour.
"""

if __name__ == "__main__":
    import program

    program.begin()

import contextlib
import glob
import json
import math
import os
import re
import shutil
import sys
from dataclasses import MISSING, dataclass
from typing import Literal

import utils
from data import tokenization
from runtime import platforms
from runtime.files import PART, is_remote, part_of, read_json, write_file
from runtime.messages import UserError, say
from runtime.parser import flag
from tools import common

if __name__ == "__main__":
    platforms.set_xla_flags(0)

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
import tokenizers
from tokenizers import pre_tokenizers

import model
from architectures import parameters
from inference import hugging_face, weights
from runtime import locks
from training import checkpointing, settings, steps

SHARD_BYTES = 5 * 10**9  # most in one file
DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # to store in, by safetensors' name


# --- Import -------------------------------------------------------------------------------------------------------


def import_folder(folder, run_dir):
    """Write a run directory with the weights of `folder` as its only checkpoint."""
    if os.path.lexists(run_dir):
        raise UserError(
            f"{run_dir} exists already; give another run directory, or remove that one."
        )
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(
            f"{folder}: there is no config.json; a folder in the Hugging Face format holds one."
        )
    flags = hugging_face.model_flags(read_json(folder, "config.json"), folder)
    cfg = config_of_one_device(flags, run_dir)
    tokenization.folder_tokenizer(folder)  # a torn tokenizer is refused before weights are read
    params = hugging_face.load(folder, steps.abstract_params(cfg, steps.make_mesh(cfg)))
    config = utils.flatten(cfg) | dict(encoding="", positions=weights.positions(folder, flags["T"]))
    with appearing(run_dir) as part:
        tokenizer = os.path.join(folder, "tokenizer.json")
        if os.path.isfile(tokenizer):
            config["encoding"] = tokenization.keep_tokenizer(part, tokenizer)
        else:
            say(f"warning: {folder} has no tokenizer.json, so the run can't turn text into tokens")
        save_weights(part, params, run_dir)
        write_file(os.path.join(part, "config.json"), json.dumps(config, indent=1) + "\n")
    say(
        f"{run_dir}: {steps.count_in_words(cfg)}; begin a run from them with main.py --init_from {run_dir}"
    )


def config_of_one_device(flags, run_dir):
    """Configuration of the run in `run_dir` with these flags of its model, on one device."""
    output_dir, name = os.path.split(os.path.abspath(run_dir))
    cfg = utils.replace(
        utils.Config(),
        **flags,
        name=name,
        output_dir=output_dir,
        n_device_axis=(1, 1, 1),
        n_devices=1,
    )
    return settings.validate(cfg, jax.device_count())


def save_weights(folder, params, run_dir):
    """Write a checkpoint of the parameters alone. Raises UserError naming `run_dir` where that fails."""
    checkpoints = checkpointing.Checkpoints(os.path.join(folder, "checkpoints"))
    checkpoints.save(0, {"params": params}, 0, {})
    checkpoints.close()
    if checkpoints.saved is None:
        raise UserError(f"{run_dir}: the checkpoint could not be written there.")


@contextlib.contextmanager
def appearing(folder):
    """A new folder beside `folder` to write into. It is renamed to `folder` when all is written, and removed where that
    fails. Raises UserError where it cannot be written."""
    part = part_of(os.path.normpath(folder))
    try:
        for left in glob.glob(f"{glob.escape(PART.sub('', part))}.*.part"):
            if PART.search(left) and lock_folder(left):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        os.makedirs(part)
        lock_folder(part)
        yield part
        os.rename(part, folder)
    except BaseException as e:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(e, OSError):
            raise UserError(f"{folder}: cannot be written ({e.strerror or e}).") from None
        raise


def lock_folder(path):
    """Whether this process has locked a folder, until it ends."""
    return locks.system_lock(os.open(path, os.O_RDONLY))


# --- Export -------------------------------------------------------------------------------------------------------


def export(run_dir, folder, dtype="float32"):
    """Write the newest sound checkpoint of a run directory as a folder that transformers loads. The folder appears when
    it is whole."""
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; give another folder, or remove that one.")
    stored = settings.run_config(run_dir)
    if "model_dimension" not in stored:
        raise UserError(f"{run_dir}: not a run directory (there is no config.json of a run in it).")
    flags = weights.model_of_run(stored, run_dir)
    cfg = utils.replace(utils.Config(), **flags, n_device_axis=(1, 1, 1))
    config = hugging_face.format_to_export(cfg.model.architecture).config(cfg.model)
    tokenization.folder_tokenizer(run_dir)  # a torn tokenizer is refused before weights are written
    with appearing(folder) as part:
        step = write_newest(part, run_dir, cfg, dtype)
        config |= dict(torch_dtype=dtype) | export_tokenizer(part, run_dir, cfg.model)
        write_file(os.path.join(part, "config.json"), json.dumps(config, indent=2) + "\n")
    say(f"{folder}: {steps.count_in_words(cfg)}; of step {step}, as {config['architectures'][0]}")


def write_newest(folder, run_dir, cfg, dtype):
    """`write_tensors` of the newest sound checkpoint; returns its step. Raises UserError where there is none."""
    table = model.param_table(cfg)
    form = hugging_face.format_to_export(cfg.model.architecture)
    tensors = list(form.tensors(cfg.model))
    checkpoints = checkpointing.Checkpoints(os.path.join(run_dir, "checkpoints"))
    for step in checkpoints.steps():
        try:
            params = StoredParams(checkpoints, step, table)
            write_tensors(folder, tensors, params, dtype)
            params.verify(cfg.model.vocab_size)
            return step
        except Damaged as e:
            say(f"warning: checkpoint {step} is damaged ({e})")
            for name in os.listdir(folder):
                os.remove(os.path.join(folder, name))
    raise UserError(f"{run_dir}: there is no sound checkpoint in it.")


class Damaged(Exception):
    """A checkpoint whose contents are not those that were saved."""


class StoredParams:
    """The parameters in a checkpoint, read part by part with TensorStore, without the rest of the state. What can't be
    read raises Damaged."""

    def __init__(self, checkpoints, step, table):
        try:
            fingerprint = checkpoints.meta(step)["fingerprint"]
        except Exception as e:  # whatever a damaged file makes the library raise
            raise Damaged(f"its meta can't be read: {type(e).__name__}") from None
        # experts come one by one out of chunks that hold several
        cache = {"cache_pool": {"total_bytes_limit": 3 * checkpointing.CHUNK}}
        context = tensorstore.Context(cache)
        folder = str(checkpoints.folder / str(step))
        base = f"{'' if is_remote(folder) else 'file://'}{folder}/state/"
        paths = jax.tree_util.tree_flatten_with_path(table, is_leaf=parameters.is_param)[0]
        self.leaves = {}  # {path of a leaf: its TensorStore}
        self.saved_sums = {}  # {path: fingerprint when it was saved}
        self.sums = {}  # {path: fingerprint of the parts read so far}
        for (path, _), saved_sum in zip(paths, fingerprint):
            leaf = tuple(key.key for key in path)
            kvstore = dict(driver="ocdbt", base=base, path=f"params.{'.'.join(leaf)}/")
            opened = tensorstore.open(dict(driver="zarr", kvstore=kvstore), context=context)
            self.leaves[leaf] = self._result(leaf, opened)
            self.saved_sums[leaf] = saved_sum
            self.sums[leaf] = 0

    @staticmethod
    def _result(leaf, future):
        try:
            return future.result()
        except ValueError as e:  # TensorStore's error for what is missing or corrupt
            raise Damaged(f"{'.'.join(leaf)}: {str(e)[:150]}") from None

    def read(self, leaf, at):
        """float32 array: the part `at` of a leaf."""
        x = self._result(leaf, self.leaves[leaf][at].read())
        # the same sum as checkpointing.fingerprint
        self.sums[leaf] += int(x.view(np.uint32).sum(dtype=np.uint32))
        return x

    def verify(self, vocab_size):
        """Raise Damaged where what was read, and the vocabulary's padding, is not what was saved. Everything but the
        padding must have been read once."""
        for leaf, saved_sum in self.saved_sums.items():
            if leaf in (("embedding",), ("head",)):
                self.read(leaf, (slice(vocab_size, None),))
            if self.sums[leaf] % 2**32 != saved_sum:
                raise Damaged(f"{'.'.join(leaf)} is not what was saved")


# --- Safetensors --------------------------------------------------------------------------------------------------


def write_tensors(folder, tensors, stored, dtype):
    """Write the tensors as safetensors files of at most SHARD_BYTES, with one tensor in memory at a time, and the index
    that transformers needs of several files."""
    groups = in_groups(tensors, dtype)
    files = {"model.safetensors": tensors}
    if len(groups) > 1:
        total = f"{len(groups):05d}"
        files = {f"model-{i:05d}-of-{total}.safetensors": g for i, g in enumerate(groups, 1)}
        write_index(folder, files, dtype)
    for name, group in files.items():
        write_safetensors(os.path.join(folder, name), group, stored, dtype)


def size_of(tensor, dtype):
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * jnp.dtype(dtype).itemsize


def in_groups(tensors, dtype):
    """The tensors in their order, in groups of at most SHARD_BYTES; a larger tensor is a group of its own."""
    groups, room = [], 0
    for t in tensors:
        size = size_of(t, dtype)
        if size > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(t)
        room -= size
    return groups


def write_index(folder, files, dtype):
    """The file that says which of `files`, {name: tensors}, holds which tensor."""
    total, where = 0, {}
    for name, group in files.items():
        for t in group:
            total += size_of(t, dtype)
            where[t.name] = name
    index = dict(metadata=dict(total_size=total), weight_map=where)
    write_file(os.path.join(folder, hugging_face.INDEX), json.dumps(index, indent=1))


def write_safetensors(path, tensors, stored, dtype):
    """One file: the length of its header, the header (JSON, padded to a multiple of 8 bytes), the numbers."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for t in tensors:
        end = offset + size_of(t, dtype)
        header[t.name] = dict(dtype=DTYPES[dtype], shape=t.shape, data_offsets=[offset, end])
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for t in tensors:
            x = stored.read(t.leaf, t.at) if math.prod(t.shape) else np.zeros(t.part)
            x = np.ascontiguousarray(t.theirs(x).astype(dtype, copy=False))
            f.write(x.view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


# --- Tokenizer ----------------------------------------------------------------------------------------------------


def export_tokenizer(folder, run_dir, m):
    """Write files that AutoTokenizer loads, where the run has a tokenizer; returns what config.json says of it. Without
    one the end of text is that of the utils.Model, or null, so that transformers takes no id of its own."""
    encoding = tokenization.folder_tokenizer(run_dir)
    if encoding is None:
        say(f"warning: {run_dir} has no tokenizer, so what is exported has none")
        end = m.end_of_text if m.end_of_text >= 0 else None
        return dict(bos_token_id=end, eos_token_id=end)
    if isinstance(encoding, tokenization.HubTokenizer):
        tokenization.keep_tokenizer(folder, os.path.join(run_dir, "tokenizer.json"))
    else:
        byte_level(encoding).save(os.path.join(folder, "tokenizer.json"))
        about = dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=tokenization.END_OF_TEXT,
            eos_token=tokenization.END_OF_TEXT,
            model_max_length=m.T,
            clean_up_tokenization_spaces=False,
        )
        write_file(
            os.path.join(folder, "tokenizer_config.json"), json.dumps(about, indent=1) + "\n"
        )
    return dict(bos_token_id=encoding.eot_token, eos_token_id=encoding.eot_token)


def byte_level(encoding):
    """tokenizers.Tokenizer with the tokens, merges and cuts of a tiktoken.Encoding."""
    letters = tokenization.byte_letters()

    def spell(token):
        return "".join(letters[b] for b in token)

    ranks = encoding._mergeable_ranks
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            first, second = halves(token, rank, ranks)
            merges.append((spell(first), spell(second)))
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    bpe = tokenizers.models.BPE(vocabulary, merges, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    cuts = pre_tokenizers.Split(cut_pattern(encoding), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cuts, to_letters])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for name in special_tokens(encoding):
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    return tokenizer


def halves(token, rank, ranks):
    """The two tokens that were merged into `token`: what the merges of lower rank make of its bytes."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
        i = min(range(len(pairs)), key=pairs.__getitem__)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def cut_pattern(encoding):
    """The pattern by which text is cut before merges, as tokenizers.Regex means it: possessive quantifiers only save
    time in these patterns, and mean something else after {1,3} there; so does $."""
    pattern = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", encoding._pat_str)
    return tokenizers.Regex(pattern.replace("$", r"\z"))


def special_tokens(encoding):
    """Names of the special tokens by id. An id that stands for nothing has a name too, since ids have no gaps."""
    names = {i: name for name, i in encoding._special_tokens.items()}
    taken = set(encoding._mergeable_ranks.values())
    for i in range(max([*names, *taken])):
        if i not in taken and i not in names:
            names[i] = f"<|unused_{i}|>"
    return [names[i] for i in sorted(names)]


# --- Command line -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """A run's weights to and from a folder that Hugging Face's transformers loads."""

    command: Literal["export", "import"] = flag(MISSING, positional=True)
    """export: checkpoint of a run directory -> folder. import: folder -> run directory with its weights alone."""
    source: str = flag(MISSING, positional=True)
    """The run directory, or the folder to import."""
    target: str = flag(MISSING, positional=True)
    """The folder or run directory to write."""
    dtype: Literal[*DTYPES] = "float32"
    """Type to store an export in; bfloat16 rounds."""


def run(argv):
    options = utils.read_flags(Options, argv, "tools/hf.py")
    both = [options.target, options.source]
    for path in both[:1] if options.command == "export" else both:
        if is_remote(path):
            raise UserError(f"{path}: must be a local folder; copy it with the storage's own tool.")
    steps.quiet_libraries()
    if options.command == "export":
        export(options.source, options.target, options.dtype)
    else:
        import_folder(options.source, options.target)


if __name__ == "__main__":
    common.run(lambda: run(sys.argv[1:]))
