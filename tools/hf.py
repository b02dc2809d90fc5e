"""A run's weights to and from a folder that Hugging Face's transformers loads, tensor by tensor.

python tools/hf.py export runs/deepseek-tiny exported      checkpoint -> folder
python tools/hf.py import exported runs/imported           folder -> run directory with its weights alone

`main.py --init_from FOLDER` trains on from such a folder without the detour.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from training import interrupts

if __name__ == "__main__":
    interrupts.at_once("interrupted")

import utils
from data import tokenization
from tools import common
from training import platforms
from utils import UserError, say

if __name__ == "__main__":
    platforms.set_xla_flags(0)

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
import tokenizers

import model
from architectures import architecture, parameters
from training import checkpointing, hugging_face, settings, steps, weights

SHARD_BYTES = 5 * 10**9  # most in one file
DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # to store in, by safetensors' name


# --- Import -------------------------------------------------------------------------------------------------------


def import_folder(folder, run_dir):
    """A run directory with the weights of `folder` as its only checkpoint."""
    if os.path.exists(run_dir):
        raise UserError(
            f"{run_dir} exists already; give another run directory, or remove that one."
        )
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise UserError(
            f"{folder}: there is no config.json; a folder in the Hugging Face format holds one."
        )
    config = utils.read_json(folder, "config.json")
    flags = hugging_face.model_flags(config, folder)
    output_dir, name = os.path.split(os.path.abspath(run_dir))
    cfg = utils.replace(
        utils.Config(),
        **flags,
        name=name,
        output_dir=output_dir,
        n_device_axis=(1, 1, 1),
        n_devices=1,
    )
    cfg = settings.validate(cfg, jax.device_count())
    tokenization.folder_tokenizer(folder)  # said now, if it is torn
    mesh = steps.make_mesh(cfg)
    params = hugging_face.load(folder, steps.abstract_params(cfg, mesh))
    tokenizer = os.path.join(folder, "tokenizer.json")
    config = dict(utils.flatten(cfg), encoding="", positions=weights.positions(folder, flags["T"]))
    with appearing(run_dir) as part:
        if os.path.isfile(tokenizer):
            config["encoding"] = tokenization.keep_tokenizer(part, tokenizer)
        else:
            say(f"warning: {folder} has no tokenizer.json, so the run can't turn text into tokens")
        checkpoints = checkpointing.Checkpoints(os.path.join(part, "checkpoints"))
        checkpoints.save(0, {"params": params}, 0, {})
        checkpoints.close()
        if checkpoints.saved is None:
            raise UserError(f"{run_dir}: the checkpoint could not be written there.")
        utils.write_file(os.path.join(part, "config.json"), json.dumps(config, indent=1) + "\n")
    say(
        f"{run_dir}: {steps.count_in_words(cfg)}; begin a run from them with main.py --init_from {run_dir}"
    )


@contextlib.contextmanager
def appearing(folder):
    """A new folder beside to write into, which becomes `folder` when all is written, or goes where that fails. Raises
    UserError where it cannot be written."""
    part = os.path.normpath(folder) + ".part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        os.makedirs(part)
        yield part
        os.rename(part, folder)
    except OSError as e:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"{folder}: cannot be written ({e.strerror}).") from None
    except UserError:
        shutil.rmtree(part, ignore_errors=True)
        raise


# --- Export -------------------------------------------------------------------------------------------------------


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
        context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": 3 * checkpointing.CHUNK}}
        )
        base = f"file://{checkpoints.folder / str(step)}/state/"
        at = jax.tree_util.tree_flatten_with_path(table, is_leaf=parameters.is_param)[0]
        self.leaves, self.wanted, self.seen = {}, {}, {}
        for (path, _), number in zip(at, fingerprint):
            leaf = tuple(key.key for key in path)
            kvstore = dict(driver="ocdbt", base=base, path=f"params.{'.'.join(leaf)}/")
            opened = tensorstore.open(dict(driver="zarr", kvstore=kvstore), context=context)
            self.leaves[leaf] = self._result(leaf, opened)
            self.wanted[leaf], self.seen[leaf] = number, 0

    @staticmethod
    def _result(leaf, future):
        try:
            return future.result()
        except ValueError as e:  # TensorStore's error for what is missing or corrupt
            raise Damaged(f"{'.'.join(leaf)}: {str(e)[:150]}") from None

    def read(self, leaf, at):
        """float32 array: the part `at` of a leaf."""
        x = self._result(leaf, self.leaves[leaf][at].read())
        self.seen[leaf] += int(
            x.view(np.uint32).sum(dtype=np.uint32)
        )  # as checkpointing.fingerprint
        return x

    def verify(self, vocab_size):
        """Raise Damaged where what was read, and the vocabulary's padding, is not what was saved. All else must have
        been read once."""
        for leaf, wanted in self.wanted.items():
            if leaf in (("embedding",), ("head",)):
                self.read(leaf, (slice(vocab_size, None),))
            if self.seen[leaf] % 2**32 != wanted:
                raise Damaged(f"{'.'.join(leaf)} is not what was saved")


def write_tensors(folder, tensors, stored, dtype):
    """The tensors as safetensors files of at most SHARD_BYTES (a larger tensor has a file to itself), one tensor in
    memory at a time, with the index that transformers needs of several files."""
    size_of = lambda t: math.prod(t.shape) * jnp.dtype(dtype).itemsize  # noqa: E731
    groups, room = [], 0
    for t in tensors:
        if size_of(t) > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(t)
        room -= size_of(t)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else ["model.safetensors"]
    for name, group in zip(names, groups):
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for t in group:
            header[t.name] = dict(
                dtype=DTYPES[dtype], shape=t.shape, data_offsets=[offset, offset + size_of(t)]
            )
            offset += size_of(t)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with open(os.path.join(folder, name), "wb") as f:
            f.write(len(head).to_bytes(8, "little") + head)
            for t in group:
                x = stored.read(t.leaf, t.at) if math.prod(t.shape) else np.zeros(t.part)
                x = t.theirs(x).astype(dtype, copy=False)
                f.write(np.ascontiguousarray(x).view(np.uint8).data)
            f.flush()
            os.fsync(f.fileno())
    if len(groups) > 1:
        where = {t.name: name for name, group in zip(names, groups) for t in group}
        index = dict(metadata=dict(total_size=sum(map(size_of, tensors))), weight_map=where)
        utils.write_file(
            os.path.join(folder, "model.safetensors.index.json"), json.dumps(index, indent=1)
        )


def byte_level(encoding):
    """tokenizers.Tokenizer with the tokens, merges and cuts of a tiktoken.Encoding."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    ranks, merges = encoding._mergeable_ranks, []

    def halves(token, rank):
        """The two tokens that were merged into this one: what its bytes come to without it."""
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = min(range(len(pairs)), key=pairs.__getitem__)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            merges.append(tuple(map(spell, halves(token, rank))))
    bpe = tokenizers.models.BPE({spell(t): i for t, i in ranks.items()}, merges, ignore_merges=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    # possessive quantifiers only save time in these patterns, and mean something else after {1,3} here; so does $
    cuts = tokenizers.Regex(
        re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", encoding._pat_str).replace("$", r"\z")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(cuts, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = {i: name for name, i in encoding._special_tokens.items()}
    last = max([*special, *ranks.values()])
    unused = {
        i: f"<|unused_{i}|>" for i in set(range(last)) - set(ranks.values()) - set(special)
    }  # ids have no gaps
    for _, name in sorted((special | unused).items()):
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    return tokenizer


def export_tokenizer(folder, run_dir, m):
    """Files that AutoTokenizer loads, where the run has a tokenizer; returns what config.json says of it. Without one
    the ends of text are those of the utils.Model, or null, where transformers would take ids of its own."""
    encoding = tokenization.folder_tokenizer(run_dir)
    if encoding is None:
        say(f"warning: {run_dir} has no tokenizer, so what is exported has none")
        return dict.fromkeys(
            ("bos_token_id", "eos_token_id"), m.end_of_text if m.end_of_text >= 0 else None
        )
    if isinstance(encoding, tokenization.HubTokenizer):
        tokenization.keep_tokenizer(folder, os.path.join(run_dir, "tokenizer.json"))
    else:
        byte_level(encoding).save(os.path.join(folder, "tokenizer.json"))
        end = tokenization.END_OF_TEXT
        about = dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=end,
            eos_token=end,
            model_max_length=m.T,
            clean_up_tokenization_spaces=False,
        )
        utils.write_file(
            os.path.join(folder, "tokenizer_config.json"), json.dumps(about, indent=1) + "\n"
        )
    return dict(bos_token_id=encoding.eot_token, eos_token_id=encoding.eot_token)


def export(run_dir, folder, dtype="float32"):
    """The newest sound checkpoint of a run directory as a folder that transformers loads. It appears when whole."""
    if os.path.exists(folder):
        raise UserError(f"{folder} exists already; give another folder, or remove that one.")
    stored = settings.run_config(run_dir)
    if "model_dimension" not in stored:
        raise UserError(f"{run_dir}: not a run directory (there is no config.json of a run in it).")
    cfg = utils.replace(
        utils.Config(), **weights.model_of_run(stored, run_dir), n_device_axis=(1, 1, 1)
    )
    m, table = cfg.model, model.param_table(cfg)
    form = architecture(m.architecture).hugging_face
    config, tensors = form.config(m), list(form.tensors(m))
    tokenization.folder_tokenizer(run_dir)  # said now, if it is torn
    checkpoints = checkpointing.Checkpoints(os.path.join(run_dir, "checkpoints"))
    with appearing(folder) as part:
        step = write_newest(part, checkpoints, table, tensors, m.vocab_size, dtype)
        if step is None:
            raise UserError(f"{run_dir}: there is no sound checkpoint in it.")
        about = dict(config, torch_dtype=dtype, **export_tokenizer(part, run_dir, m))
        utils.write_file(os.path.join(part, "config.json"), json.dumps(about, indent=2) + "\n")
    say(f"{folder}: {steps.count_in_words(cfg)}; of step {step}, as {config['architectures'][0]}")


def write_newest(folder, checkpoints, table, tensors, vocab_size, dtype):
    """`write_tensors` of the newest sound checkpoint; returns its step, None where there is none."""
    for step in checkpoints.steps():
        try:
            params = StoredParams(checkpoints, step, table)
            write_tensors(folder, tensors, params, dtype)
            params.verify(vocab_size)
            return step
        except Damaged as e:
            say(f"warning: checkpoint {step} is damaged ({e})")
            for name in os.listdir(folder):
                os.remove(os.path.join(folder, name))
    return None


def run(argv):
    parser = utils.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser(
        "export", help="checkpoint of a run directory -> folder that transformers loads"
    )
    out.add_argument("run_dir")
    out.add_argument("folder")
    out.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="type to store in; bfloat16 rounds"
    )
    into = commands.add_parser("import", help="folder in the Hugging Face format -> run directory")
    into.add_argument("folder")
    into.add_argument("run_dir")
    args = parser.parse_args(argv)
    for path in (args.run_dir, args.folder):
        if utils.is_remote(path):
            raise UserError(f"{path}: must be a local folder; copy it with the storage's own tool.")
    steps.quiet_libraries()
    if args.command == "export":
        export(args.run_dir, args.folder, args.dtype)
    else:
        import_folder(args.folder, args.run_dir)


if __name__ == "__main__":
    common.run(lambda: run(sys.argv[1:]))
