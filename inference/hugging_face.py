"""Weights from a folder in the Hugging Face format: config.json and safetensors, onto a mesh."""

import functools
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
from architectures import hf_format
from runtime.files import read_json
from runtime.messages import UserError
from training import settings

READABLE = {"F32", "F16", "BF16", "F64"}  # as safetensors names types
INDEX = "model.safetensors.index.json"


def format_of(config, where):
    """(name, `HuggingFace`) of the architecture of a config.json. Raises UserError where none supports it."""
    formats = {}
    for name in architectures.names():
        form = architectures.architecture(name).hugging_face
        formats |= {kind: (name, form) for kind in (form.model_types if form else ())}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in formats:
        raise UserError(f"{where}: model_type is {kind!r}; supported are {', '.join(formats)}.")
    return formats[kind]


def format_to_export(name):
    """`HuggingFace` of an architecture. Raises UserError where it has none."""
    form = architectures.architecture(name).hugging_face
    if form is None:
        raise UserError(f"--architecture {name}: its models have no Hugging Face format here.")
    return form


def model_flags(config, folder):
    """{flag: value} of the model in a folder with this config.json. Raises UserError for one that is not supported."""
    where = os.path.join(folder, "config.json")
    name, form = format_of(config, where)
    own = hf_format.read_flags(form, config, where)
    flags = architectures.flags_without_choice(name) | own
    settings.check_model(flags, where, form.names)
    return flags


class Stored(NamedTuple):
    """Where a tensor is stored, as the header of its file says."""

    path: str
    shape: tuple
    dtype: str


def weight_files(folder):
    """Names of a folder's safetensors, there or not."""
    index = read_json(folder, INDEX)
    names = index["weight_map"].values() if index else ["model.safetensors"]
    return sorted({os.path.basename(name) for name in names})


def files_of(folder):
    """{name of tensor: `Stored`} of a folder's safetensors. Raises UserError for files that are missing or torn."""
    found = {}
    for path in [os.path.join(folder, name) for name in weight_files(folder)]:
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing; a folder in the Hugging Face format holds it.")
        try:
            with safe_open(path, "numpy") as f:
                for name in f.keys():
                    tensor = f.get_slice(name)
                    found[name] = Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
        except Exception as e:  # safetensors has an error of its own, and others
            raise UserError(f"{path} cannot be read ({e}); copy it again.") from None
    return found


def name_in(there, name, form):
    """The name of a tensor as the folder has it, with or without the prefix of its format."""
    short = name.removeprefix(form.prefix)
    return short if short in there and name not in there else name


def filled(tensors):
    """Those of the tensors that hold numbers."""
    return (t for t in tensors if math.prod(t.shape))


def check(folder, tensors, form):
    """{name: `Stored`} of a folder that holds exactly `tensors`. Raises UserError naming one that is wrong."""
    there, wanted = files_of(folder), {}
    # layers of multi-token prediction, which serve training alone
    predictors = [name.removesuffix("eh_proj.weight") for name in there if "eh_proj" in name]
    for t in tensors:  # an absurd config calls for billions, but then one of the first is missing
        name = name_in(there, t.name, form)
        if name not in there:
            raise UserError(f"{folder}: tensor {name} is missing; its config.json calls for it.")
        wanted[name] = t.shape
    for name, (_, shape, dtype) in there.items():
        if name not in wanted:
            is_copy = re.search(form.copies, name) or 0 in shape
            if is_copy or name.startswith(tuple(predictors)):
                continue
            raise UserError(
                f"{folder}: tensor {name} is extra; its config.json has no place for it."
            )
        if shape != wanted[name]:
            raise UserError(
                f"{folder}: tensor {name} is {list(shape)}, but its config.json calls for "
                f"{list(wanted[name])}."
            )
        if dtype not in READABLE:
            raise UserError(
                f"{folder}: tensor {name} is {dtype}; supported are {', '.join(sorted(READABLE))}."
            )
    return there


def read_tensor(there, name):
    """numpy array of a tensor in a folder. Raises UserError where a number is not finite in float32."""
    path = there[name].path
    with safe_open(path, "numpy") as f:
        x = f.get_tensor(name)
    with np.errstate(over="ignore"):
        if not np.isfinite(x.astype(np.float32, copy=False)).all():
            raise UserError(f"{path}: tensor {name} holds NaN or infinite values; copy it again.")
    return x


def load(folder, abstract):
    """Parameters like `abstract` (steps.abstract_params) from a folder, tensor by tensor. Raises UserError."""
    config = read_json(folder, "config.json")
    _, form = format_of(config, os.path.join(folder, "config.json"))
    m = utils.replace(utils.Config(), **model_flags(config, folder)).model
    there = check(folder, filled(form.tensors(m)), form)
    if m.tied:
        check_head_is_tied(folder, there, form, m)
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, device=a.sharding), abstract)
    for t in filled(form.tensors(m)):
        name = name_in(there, t.name, form)
        part = t.ours(read_tensor(there, name))
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


def check_head_is_tied(folder, there, form, m):
    """Raises UserError where the files hold a head that is not the embedding."""
    rows = name_in(there, next(form.tensors(m)).name, form)
    head = name_in(there, hf_format.HEAD, form)
    if head not in there:
        return
    pair = [read_tensor(there, name) for name in (head, rows)]
    if not np.array_equal(*pair):
        raise UserError(
            f"{folder}: tensor {head} is not {rows}, though its config.json ties them; tie_word_embeddings must be "
            f"false there."
        )


@functools.partial(jax.jit, donate_argnums=0)
def put(leaf, part, starts):
    """`leaf` with `part` written into it from the indices `starts` on."""
    return lax.dynamic_update_slice(leaf, part.astype(leaf.dtype), starts)
