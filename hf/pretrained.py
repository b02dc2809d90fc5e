"""Weights from a folder in the Hugging Face format: config.json and safetensors are checked and read onto a mesh.

The tensors of a folder must be exactly those that its config.json calls for. Where they are not, the message says which
entry of config.json may be wrong.
"""

import functools
import itertools
import json
import math
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from safetensors import safe_open

import architectures
import utils
from config import settle
from hf.format import HEAD, NULL, read_flags
from hf.registry import format_of_config
from runtime.files import read_json
from runtime.messages import UserError, warn

READABLE = {"F32", "F16", "BF16", "F64"}  # as safetensors names types
WHOLE = "model.safetensors"  # the file of all tensors
INDEX = f"{WHOLE}.index.json"  # says which of several files holds a tensor


def model_flags(config, folder):
    """{flag: value} of the model in a folder with this config.json. Raises UserError for one that is not supported."""
    where = os.path.join(folder, "config.json")
    name, form = format_of_config(config, where)
    own = read_flags(form, config, where)
    flags = architectures.flags_without_choice(name) | own
    settle.check_model(flags, where, form.names)
    return flags


def model_of(config, folder):
    """`utils.Model` of a folder with this config.json. Raises UserError for one that is not supported."""
    return utils.replace(utils.Config(), **model_flags(config, folder)).model


class Stored(NamedTuple):
    """Where a tensor is stored, as the header of its file says."""

    path: str
    shape: tuple
    dtype: str


def weight_map(folder):
    """{name of tensor: name of its file} of a folder's index, {} where there is none. Raises UserError."""
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return {}
    files = read_json(path).get("weight_map")
    if not files or not isinstance(files, dict):
        raise UserError(
            f"{path}: weight_map must name the file of each tensor, but is {files!r:.40}; copy the index again, or "
            f"remove it where {WHOLE} holds all tensors."
        )
    for tensor, file in files.items():
        if not is_weight_file(file):
            raise UserError(
                f"{path}: the file of tensor {tensor} is {file!r:.80}, but must be a .safetensors file of the folder."
            )
    return files


def is_weight_file(name):
    """Whether an index may give this name of a file: it must lie in the folder of the index."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return not os.path.isabs(name) and ".." not in name.split("/")


def weight_files(folder):
    """Names of the files that hold a folder's tensors, whether these files exist or not. As in transformers, a file of
    all tensors takes precedence over an index. Raises UserError."""
    files = set(weight_map(folder).values())
    if not files or os.path.isfile(os.path.join(folder, WHOLE)):
        return [WHOLE]
    return sorted(files)


def files_of(folder):
    """{name of tensor: `Stored`} of a folder's safetensors. Raises UserError for files that are missing or torn."""
    files = weight_files(folder)
    owner = weight_map(folder)
    found = {}
    left_over = {}
    if files == [WHOLE]:
        warn_of_others(folder, owner)
        owner = {}
    for file in files:
        path = os.path.join(folder, file)
        for name, tensor in headers(path):
            if owner.get(name, file) != file:
                # left from an earlier save: the index has the tensor in another file
                left_over[name] = path
                continue
            if name in found:
                raise UserError(
                    f"{folder}: tensor {name} is in {found[name].path} and in {path}, and {INDEX} does not say which "
                    f"counts."
                )
            found[name] = tensor
    for name in left_over.keys() - found.keys():
        raise UserError(
            f"{folder}: tensor {name} is in {left_over[name]}, but {INDEX} has it in {owner[name]}; copy both again."
        )
    return found


def warn_of_others(folder, owner):
    """Warn where a folder has both the file of all tensors, which is read, and the files that its index names."""
    others = {file for file in owner.values() if file != WHOLE}
    others = [file for file in others if os.path.isfile(os.path.join(folder, file))]
    if others:
        warn(
            f"{folder}: {WHOLE} is read, as transformers reads it, and not the {len(others)} other files that {INDEX} "
            f"names"
        )


def headers(path):
    """Yield (name, `Stored`) of each tensor in a file. Raises UserError where it is missing or torn."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is missing; a folder in the Hugging Face format holds it.")
    try:
        with safe_open(path, "numpy") as f:
            for name in f.keys():
                tensor = f.get_slice(name)
                yield name, Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
    except Exception as e:  # safetensors raises errors of its own and others
        raise UserError(f"{path} cannot be read ({e}); copy it again.") from None


def name_in(stored, name, form):
    """The name of a tensor in the folder: some files leave out the prefix of the format."""
    short = name.removeprefix(form.prefix)
    return short if short in stored and name not in stored else name


def filled(tensors):
    """The tensors that are not empty."""
    return (t for t in tensors if math.prod(t.shape))


def needed(stored, form):
    """Names of the folder's tensors that the model must have parameters for. Copies of other tensors need none, and
    neither do layers of multi-token prediction, which only serve training."""
    predictors = tuple(name.removesuffix("eh_proj.weight") for name in stored if "eh_proj" in name)
    names = [name for name in stored if not name.startswith(predictors)]
    return [
        name for name in names if 0 not in stored[name].shape and not re.search(form.copies, name)
    ]


def mismatch(stored, names, m, form):
    """How well a folder fits a utils.Model: (number of tensors that fit, what is wrong with the next one), or (inf, "")
    where all fit. `names` are those of `needed`."""
    wanted = set()
    # a loop that stops at the first tensor that is missing: an absurd config may call for billions of them
    for t in filled(form.tensors(m)):
        name = name_in(stored, t.name, form)
        if name not in stored:
            return len(wanted), f"{name} is missing; its config.json calls for it"
        shape = stored[name].shape
        if shape != t.shape:
            words = f"{name} is {list(shape)}, but its config.json calls for {list(t.shape)}"
            return len(wanted), words
        wanted.add(name)
    for name in names:
        if name not in wanted:
            return len(wanted), f"{name} is extra; its config.json has no place for it"
    return math.inf, ""


def check_tensors(folder, config, m, form):
    """{name: `Stored`} of a folder's tensors. Raises UserError, which names a tensor, unless these are exactly the
    tensors of the utils.Model `m` that its `config` describes."""
    stored = files_of(folder)
    names = needed(stored, form)
    _, wrong = mismatch(stored, names, m, form)
    if wrong:
        advice = wrong_entries(config, stored, names, m, form)
        raise UserError(f"{folder}: tensor {wrong}{advice}.")
    for t in filled(form.tensors(m)):
        name = name_in(stored, t.name, form)
        dtype = stored[name].dtype
        if dtype not in READABLE:
            raise UserError(
                f"{folder}: tensor {name} is {dtype}; supported are {', '.join(sorted(READABLE))}."
            )
    return stored


def wrong_entries(config, stored, names, m, form):
    """Advice after the message that a tensor does not fit: the entries of config.json with whose values all tensors
    would fit if one value were another, or else more tensors than now. "" where there is none."""
    fitting, _ = mismatch(stored, names, m, form)
    found = {}  # {number of tensors that fit: {entry: its value}}
    for entry, values in other_values(config, stored, names, m, form).items():
        same = {entry, *(name for name, other in form.equal.items() if other == entry)}
        for value in values:
            try:
                other = model_of(config | dict.fromkeys(same & config.keys() | {entry}, value), "")
            except UserError:
                continue
            number, _ = mismatch(stored, names, other, form)
            found.setdefault(number, {}).setdefault(entry, value)
    most = max(found, default=0)
    if most <= fitting:
        return ""
    what = "all tensors fit" if most == math.inf else "it fits"
    words = []
    for entry, value in found[most].items():
        now = json.dumps(config[entry]) if entry in config else "missing"
        words.append(f"{entry} is {now}, and with {json.dumps(value)} {what}")
    return f"; its {', or its '.join(words)}"


def other_values(config, stored, names, m, form):
    """{entry of config.json: values to try}: small numbers, the sizes and the numbers of the folder's tensors, and what
    would turn a size that `m` calls for into the size that is stored."""
    sizes = set(range(9)) | counts(names)  # small ones: of shared experts, of heads of keys
    changes = set()  # (size that is stored, size that m calls for)
    for name in names:
        sizes.update(stored[name].shape)
    for t in itertools.islice(filled(form.tensors(m)), len(stored)):
        name = name_in(stored, t.name, form)
        if name in stored:
            changes.update(zip(stored[name].shape, t.shape))
    values = {"model_type": form.model_types}
    for entry, flag in form.entries.items():
        flag_type = type(getattr(utils.Model(), flag))
        now = config.get(entry, form.missing.get(entry))
        if flag_type is bool:
            values[entry] = [False, True]
        elif flag_type is int:
            values[entry] = set(sizes)
            for size, wanted in changes if isinstance(now, int) else ():
                values[entry] |= {now * size // wanted, now + size - wanted}
            if NULL.get(entry) == 0:
                values[entry] = values[entry] - {0} | {None}
    return values


def counts(names):
    """Numbers of layers and of experts that the names of tensors suggest: the smallest index at each place where the
    names have an index, and the largest one plus 1."""
    found = {}  # {name without its numbers: its numbers in each tensor}
    for name in names:
        numbers = [int(number) for number in re.findall(r"\.(\d{1,6})(?=\.)", name)]
        found.setdefault(re.sub(r"\d+", "", name), []).append(numbers)
    columns = [column for rows in found.values() for column in zip(*rows)]
    return {min(column) for column in columns} | {max(column) + 1 for column in columns}


def read_tensor(stored, name):
    """numpy array of a tensor in a folder. Raises UserError where a number is not finite in float32."""
    path = stored[name].path
    with safe_open(path, "numpy") as f:
        x = f.get_tensor(name)
    with np.errstate(over="ignore"):
        if not np.isfinite(x.astype(np.float32, copy=False)).all():
            raise UserError(f"{path}: tensor {name} holds NaN or infinite values; copy it again.")
    return x


def load_params(folder, abstract):
    """Parameters with the shapes and shardings of `abstract`, read from a folder one tensor at a time. Raises
    UserError."""
    config = read_json(folder, "config.json")
    _, form = format_of_config(config, os.path.join(folder, "config.json"))
    m = model_of(config, folder)
    stored = check_tensors(folder, config, m, form)
    if m.tied:
        check_head_is_tied(folder, stored, form, m)
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, device=a.sharding), abstract)
    for t in filled(form.tensors(m)):
        name = name_in(stored, t.name, form)
        part = t.ours(read_tensor(stored, name))
        *parents, last = t.leaf
        node = functools.reduce(dict.__getitem__, parents, params)
        leaf = node[last]
        starts = [0] * leaf.ndim
        for dim, index in enumerate(t.at):
            if isinstance(index, int):
                starts[dim] = index
                part = np.expand_dims(part, dim)
            else:
                starts[dim] = index.start or 0
        node[last] = put(leaf, part, starts)
    return params


def check_head_is_tied(folder, stored, form, m):
    """Raises UserError where the files hold a head that is not the embedding."""
    rows = name_in(stored, next(form.tensors(m)).name, form)
    head = name_in(stored, HEAD, form)
    if head not in stored:
        return
    pair = [read_tensor(stored, name) for name in (head, rows)]
    if not np.array_equal(*pair):
        raise UserError(
            f"{folder}: tensor {head} is not {rows}, though its config.json ties them; tie_word_embeddings must be "
            f"false there."
        )


@functools.partial(jax.jit, donate_argnums=0)
def put(leaf, part, starts):
    """`leaf` with `part` written into it, its first number at the index `starts`."""
    return lax.dynamic_update_slice(leaf, part.astype(leaf.dtype), starts)
