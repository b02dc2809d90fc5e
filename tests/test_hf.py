"""Export and import without transformers: bitwise round trips, tokenizers, and what is refused."""

import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import jax
import numpy as np
import pytest
import tokenizers
from absl import logging as absl_logging
from families import ARCHITECTURES, FAMILIES
from helpers import ROOT, describe, make_run, refusal, small_tokenizer, tokenize_tests
from hf_helpers import exported_run, params_of, same
from safetensors.numpy import load_file, save_file
from small_models import small_config

import architectures
import utils
from config import command_line, parser, settle
from config.flags import Found
from config.program import read_flags
from config.stored import shareable
from hf import gpt2, pretrained, registry
from inference import sampling, weights
from runtime import files, messages
from shards import tokenization
from shards.listing import manifests
from shards.mixture import Mixture
from tools import common, evaluate, hf, model_card, sample
from training.sizes import count_in_words

DEEPSEEK = ARCHITECTURES["deepseek"]
NO_SHARED = dict(DEEPSEEK, tied=True, n_shared=0)
# the last one with layers that transformers does not know
FLAGS = ARCHITECTURES | {"no shared": NO_SHARED, "own": dict(layers_per_block=3)}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return exported_run(tmp_path_factory.mktemp("hf"), DEEPSEEK)


@pytest.mark.parametrize("name", FLAGS)
def test_round_trip_is_bitwise_and_short_types_round(name, tmp_path):
    cfg, run, folder = exported_run(tmp_path, FLAGS[name])
    tensors = load_file(folder / "model.safetensors")
    # shared experts of width 0, which transformers would miss
    assert sum(not x.size for x in tensors.values()) == (6 if name == "no shared" else 0)
    hf.import_folder(str(folder), str(tmp_path / "imported"))
    before = params_of(run, cfg)
    assert same(before, params_of(tmp_path / "imported", cfg))
    hf.export(str(tmp_path / "imported"), str(tmp_path / "again"))
    again = (tmp_path / "again/model.safetensors").read_bytes()
    assert again == (folder / "model.safetensors").read_bytes()
    for dtype in ("bfloat16", "float16"):
        hf.export(str(run), str(tmp_path / dtype), dtype)
        rounded = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), before)
        assert same(rounded, params_of(tmp_path / dtype, cfg))


def test_a_folder_of_several_files_loads_as_one_does(deepseek, tmp_path):
    cfg, run, folder = deepseek
    shutil.copytree(folder, tmp_path / "cut")
    tensors, where = load_file(folder / "model.safetensors"), {}
    (tmp_path / "cut/model.safetensors").unlink()
    for i in range(3):
        part = {name: tensors[name] for name in list(tensors)[i::3]}
        save_file(part, tmp_path / f"cut/{i}.safetensors")
        where |= dict.fromkeys(part, f"{i}.safetensors")
    (tmp_path / "cut" / pretrained.INDEX).write_text(json.dumps(dict(weight_map=where)))
    assert same(params_of(run, cfg), params_of(tmp_path / "cut", cfg))


STALE, *REST = (f"model.{of}.weight" for of in ("embed_tokens", "norm", "layers.0.input_layernorm"))
ALONE = "model.layers.1.input_layernorm.weight"


def cut_in_two(folder, out, **changes):
    """A copy of a folder in two files, the first with REST, which both also hold zeros in the place of what the index
    has in the other. changes: of the index; None: not in it."""
    shutil.copytree(folder, out)
    tensors = load_file(out / pretrained.WHOLE)
    (out / pretrained.WHOLE).unlink()
    zeros = {name: np.zeros_like(tensors[name]) for name in (STALE, *REST)}
    rest = {name: tensors[name] for name in REST}
    save_file(rest | {STALE: zeros.pop(STALE)}, out / "1.safetensors")
    save_file(tensors | zeros, out / "2.safetensors")
    where = dict.fromkeys(tensors, "2.safetensors") | dict.fromkeys(REST, "1.safetensors") | changes
    where = {name: file for name, file in where.items() if file}
    files.write_json(f"{out}/{pretrained.INDEX}", dict(weight_map=where))
    return out


def test_a_tensor_is_read_from_the_file_that_the_index_names(deepseek, tmp_path):
    """Whichever file comes last; one that the index does not name is taken where one file alone holds it."""
    cfg, run, folder = deepseek
    ours = params_of(run, cfg)
    assert same(ours, params_of(cut_in_two(folder, tmp_path / "a"), cfg))
    assert same(ours, params_of(cut_in_two(folder, tmp_path / "b", **{ALONE: None}), cfg))
    for name, changes, said in [
        ("c", {REST[0]: None}, f"tensor {REST[0]} is in "),
        ("d", {ALONE: "1.safetensors"}, f"{ALONE} is in "),
        ("e", {ALONE: "3.safetensors"}, "3.safetensors is missing"),
    ]:
        other = cut_in_two(folder, tmp_path / name, **changes)
        refusal(lambda: params_of(other, cfg), str(other), said)


def test_a_whole_file_counts_beside_an_index(deepseek, tmp_path, capsys):
    """As in transformers, also where the files of the index are gone; where they are there, a warning."""
    cfg, run, folder = deepseek
    both = cut_in_two(folder, tmp_path / "both")
    shutil.copy(folder / pretrained.WHOLE, both)
    ours = params_of(run, cfg)
    assert same(ours, params_of(both, cfg))
    assert f"{both}: model.safetensors is read" in capsys.readouterr().err
    for file in ("1.safetensors", "2.safetensors"):
        (both / file).unlink()
    assert same(ours, params_of(both, cfg)) and not capsys.readouterr().err


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_wrong_size_in_config_json_is_named_with_the_right_one(name, tmp_path):
    m = small_config(**ARCHITECTURES[name]).model
    form = registry.format_of(name)
    save_file({t.name: np.zeros(t.shape) for t in form.tensors(m)}, tmp_path / pretrained.WHOLE)
    config = form.config(m)
    found = 0
    for entry in form.entries:
        now = config.get(entry)
        if type(now) is not int:
            continue
        same = {other for other, its in form.equal.items() if its == entry} & config.keys()
        wrong = config | dict.fromkeys(same | {entry}, 2 * now)
        try:
            other = pretrained.model_of(wrong, "")
        except messages.UserError:  # a model that cannot be
            continue
        if shapes(form, other) == shapes(form, m):
            continue
        said = f"its {entry} is {2 * now}, and with {now} all tensors fit"
        refusal(lambda: pretrained.check_tensors(str(tmp_path), wrong, other, form), said)
        found += 1
    assert found >= 5


def shapes(form, m):
    return {t.name: t.shape for t in form.tensors(m)}


def measured(model, shards, **options):
    flags = dict(model=str(model), data=(str(shards),), model_dtype="float32", limit=8)
    (row,) = evaluate.main(common.Evaluate(**flags, n_devices=1, **options))["data"]
    return row["tokens"], row["loss"]


def test_a_run_begins_with_imported_weights(deepseek, train, shards, xla_cache, tmp_path):
    """At learning rate 0 it validates as its weights are measured in the folder, and in the run that it was imported
    to, which cannot be trained under its own name."""
    folder, cached = (
        with_ends(deepseek[2], tmp_path / "folder", [256, 9, 7]),
        dict(compilation_cache=str(xla_cache)),
    )
    hf.import_folder(str(folder), str(tmp_path / "imported"))
    tokens, loss = measured(folder, shards, **cached)
    assert measured(tmp_path / "imported", shards, **cached) == (tokens, loss)
    flags = DEEPSEEK | dict(max_lr=0.0, end_lr=0.0, bias_update_rate=0.0, model_dtype="float32")
    flags |= dict(vocab_size=None, blocks=2, training_steps=1, eval_steps=1, optimizer="adamw")
    assert train((2, 2, 2), init_from=folder, **flags) == 0
    (row,) = map(json.loads, (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines())
    assert row["loss/val_cross_entropy_loss"] == pytest.approx(loss, rel=1e-5)
    assert weights.end_tokens(str(tmp_path / "runs/run")) == [256, 9, 7]
    flags |= dict(name="imported", output_dir=tmp_path)
    refusal(lambda: train((2, 2, 2), **flags), "weights alone", "--init_from")


def test_a_longer_T_than_the_weights_know_gets_a_warning(deepseek, shards, tmp_path, train, capsys):
    folder = deepseek[2]
    flags = DEEPSEEK | dict(vocab_size=None, blocks=2)
    flags |= dict(init_from=folder, T=40, data=tmp_path / "nowhere")
    refusal(lambda: train(**flags), "nowhere")
    said = f"--T 40: the weights in --init_from {folder} were made for 32 tokens"
    assert said in capsys.readouterr().out
    far = spoilt(folder, tmp_path, {"max_position_embeddings": 8192})
    hf.import_folder(far, str(tmp_path / "far"))
    for model in (far, str(tmp_path / "far")):
        T = weights.open_weights(model)[0]["T"]
        assert (T, weights.max_positions(model, T)) == (4096, 8192)


def with_ends(folder, out, tokens):
    """A copy of a folder whose generation_config.json has some of the tokens as its ends, and config.json the rest."""
    shutil.copytree(folder, out)
    for name, ids in [("config.json", tokens[0]), ("generation_config.json", tokens[1:])]:
        content = files.read_json(str(out), name) | dict(eos_token_id=ids)
        files.write_json(f"{out}/{name}", content)
    return out


def test_text_ends_at_every_eos_token_id(tmp_path):
    """Of config.json and generation_config.json, in the folder and in the run that it is imported to, which writes them
    back when it is exported; so do the samples of a run."""
    run, cfg, mesh, params = make_run(tmp_path, **DEEPSEEK)
    hf.export(str(run), str(tmp_path / "exported"))

    def drawn(folder):
        words = [str(folder), "--temperature", "0", "--max_tokens", "24", "--prompt", "ab", "x"]
        words += ["--n_devices", "1", "--model_dtype", "float32"]
        rows = sample.main(read_flags(common.Sample, words, "sample.py"))
        return [(row.tokens, row.stopped) for row in rows]

    def cut(ends):
        wanted = [list(itertools.takewhile(lambda t: t not in ends, row)) for row, _ in whole]
        return [(cut, len(cut) < len(row)) for cut, (row, _) in zip(wanted, whole)]

    whole = drawn(tmp_path / "exported")
    ends = [row[5] for row, _ in whole] + [255]
    assert ends[0] != ends[1] and cut(ends) != cut(ends[:1]) != cut(ends[1:]) != whole
    folder = with_ends(tmp_path / "exported", tmp_path / "two", ends)
    hf.import_folder(str(folder), str(tmp_path / "imported"))
    hf.export(str(tmp_path / "imported"), str(tmp_path / "again"))
    for place in ("two", "imported"):
        assert drawn(tmp_path / place) == cut(ends), place
    ids = [
        files.read_json(str(tmp_path / "again"), f"{name}.json")
        for name in ("generation_config", "config")
    ]
    assert [one["eos_token_id"] for one in ids] == [[256, *sorted(ends)], 256]
    encoding = tokenization.folder_tokenizer(str(run))
    cfg = utils.replace(cfg, prompt="ab", temperature=0.0, max_tokens=24)
    text, *_ = sampling.make_sampler(cfg, mesh, encoding)(params)
    end = next(letter for letter in text[2:] if letter.isascii())  # a token is a byte
    shorter, *_ = sampling.make_sampler(cfg, mesh, encoding, [255, ord(end)])(params)
    assert shorter == "ab" + text[2:].split(end)[0]


@pytest.mark.parametrize("wrong", ["2", 1.5, True, {}, [1, "2"]])
def test_an_eos_token_id_that_is_none_gets_a_sentence(wrong, tmp_path):
    files.write_json(f"{tmp_path}/generation_config.json", dict(eos_token_id=wrong))
    refusal(lambda: weights.end_tokens(str(tmp_path)), "generation_config.json: eos_token_id is")


@pytest.fixture(scope="module")
def more_tokens(deepseek, tmp_path_factory):
    """A folder whose tokenizer has tokens beyond the model's 257, as published ones often have: special ones, which no
    text becomes, and <new>, which is 300."""
    folder = tmp_path_factory.mktemp("more") / "model"
    shutil.copytree(deepseek[2], folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<pad{i}>" for i in range(257, 300)])
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_may_have_more_tokens_than_the_model(more_tokens, tmp_path, capsys):
    """It samples, measures, is imported and exported, with a warning; only text that has such a token is refused."""
    model = str(more_tokens)
    said = ": its tokenizer has 301 tokens, and the model 257"
    one = dict(n_devices=1, compilation_cache="")

    def continued(*prompts):
        sample.main(common.Sample(model=model, prompt=prompts, max_tokens=3, **one))

    continued("a <pad257>")
    assert f"warning: {model}{said}" in capsys.readouterr().err
    beyond = "has token '<new>', whose id 300 is beyond the model's vocabulary of 257; leave it out"
    refusal(lambda: continued("a", "b<new>"), f"--prompt: a text {beyond}")
    (tmp_path / "a.txt").write_text("some <new> text")
    options = common.Evaluate(model=model, data=(str(tmp_path / "a.txt"),), **one)
    refusal(lambda: evaluate.main(options), f"--data: a document {beyond}")
    hf.import_folder(model, str(tmp_path / "run"))
    capsys.readouterr()
    hf.export(str(tmp_path / "run"), str(tmp_path / "exported"))
    assert f"warning: {tmp_path}/run{said}" in capsys.readouterr().err


def test_weights_train_on_shards_of_a_tokenizer_with_more_tokens(
    more_tokens, tmp_path, train, capsys
):
    """With a warning, and whatever of --vocab_size and --tokenizer is given. A token beyond is refused, by no flag that
    others refuse."""
    path = str(more_tokens / "tokenizer.json")
    made = dict(tokenizer="tokenizer.json", vocab_size=301, end_of_text=256)
    made["tokenizer_sha256"] = tokenization.content_sha256(tokenization.load_tokenizer(path))
    data = tmp_path / "data"
    tokenization.copy_tokenizer(str(data), path)
    for split in ("train", "val"):
        (data / split).mkdir()
        ids = np.arange(2000) % 257
        np.save(data / split / "000000.npy", ids.astype(np.uint16))
    describe(data, **made)
    warned = f"warning: the tokenizer of {data}/train has 301 tokens, and the model 257"
    words = ["--init_from", str(more_tokens), "--data", str(data), "--T", "32"]
    of_weights, _ = weights.open_weights(str(more_tokens))
    for given in ([], ["--tokenizer", path], ["--tokenizer", path, "--vocab_size", "257"]):
        parsed = command_line.parse([*words, *given])
        cfg = settle.settle(
            parsed, Found(1, weights=of_weights, shards=manifests(parsed.cfg, "train", "val"))
        )
        assert cfg.model.vocab_size == 257 and warned in capsys.readouterr().out
        assert Mixture(cfg, "train", 10).n_sequences
    parsed = command_line.parse(["--tokenizer", path])
    resumed = settle.settle_model(parsed, Found(1, stored={"vocab_size": 257}))
    assert resumed.cfg.model.vocab_size == 257
    parsed = command_line.parse([*words, "--tokenizer", path, "--vocab_size", "257"])
    refusal(
        lambda: settle.settle(parsed, Found(1, shards=manifests(cfg, "train"))),
        "need 301; give that",
    )
    ids[7] = 300
    np.save(data / "train/000000.npy", ids.astype(np.uint16))
    describe(data, **made)
    said = refusal(lambda: Mixture(cfg, "train", 10), "000000.npy holds token id 300, beyond")
    assert "to a model that is not trained yet, a larger vocabulary" in said


HOSTILE = ["", "a", "<|endoftext|> spelled", "naïve 日本語 🦙👩‍👩‍👧 \x00\x01", "  \n\n\t x   "]
HOSTILE += ["1234567 89", "I'll WE'VE don't", "def f(x):\n    return x**2  # ünï\r\n"]
HOSTILE += ["a" * 300, "\u2028 \u00a0"]


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "trained"])
def test_the_exported_tokenizer_cuts_as_tiktoken_does(
    name, text_shards, tmp_path, named_tokenizers
):
    trained = name == "trained"
    if trained:
        name = str(text_shards / "tokenizer.tiktoken")
    encoding = tokenization.load_tokenizer(name)
    run, folder = tmp_path / "run", tmp_path / "folder"
    kept = {"encoding": tokenization.copy_tokenizer(str(run), name)}
    files.write_file(str(run / "config.json"), json.dumps(kept))
    folder.mkdir()
    ends = hf.export_tokenizer(str(folder), str(run), utils.Model(T=64))
    theirs = tokenization.load_tokenizer(str(folder / "tokenizer.json"))
    assert ends["eos_token_id"] == encoding.eot_token == theirs.eot_token
    assert theirs.n_vocab == encoding.n_vocab
    assert len(encoding.encode_ordinary("import pytest")) < 10  # that there is something to merge
    texts = [*HOSTILE, (ROOT / "README.md").read_text(), (ROOT / "model.py").read_text()]
    for text in texts:
        assert theirs.encode_ordinary(text) == encoding.encode_ordinary(text), text[:40]
        assert theirs.decode(encoding.encode_ordinary(text)) == text
    if trained:  # the same shards from either file
        tokenize_tests(tmp_path / "shards", folder / "tokenizer.json")
        found = [np.load(at / "train/000000.npy") for at in (text_shards, tmp_path / "shards")]
        assert np.array_equal(*found) and len(found[0]) > 1000
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts[4:]:
        assert auto.encode(text, add_special_tokens=False) == encoding.encode_ordinary(text)
    assert auto.eos_token_id == encoding.eot_token
    assert auto.decode(auto.encode(texts[-1])) == texts[-1]


def spoilt(folder, tmp_path, config=None, **tensors):
    """A copy of a folder with entries of its config changed, and tensors changed or, where None, left out."""
    there, out = load_file(folder / "model.safetensors") | tensors, tmp_path / "spoilt"
    changed = files.read_json(str(folder), "config.json") | (config or {})
    files.write_file(str(out / "config.json"), json.dumps(changed))
    left = {name: x for name, x in there.items() if x is not None}
    save_file(left, out / "model.safetensors")
    return str(out)


NORM, OUT = "model.layers.2.input_layernorm.weight", "model.layers.2.self_attn.o_proj.weight"
EXPERT, HEAD = "model.layers.2.mlp.experts.3.up_proj.weight", "lm_head.weight"
FLOAT8 = {OUT: np.ones((32, 48), jax.numpy.float8_e4m3fn)}
BAD_TENSORS = [  # entries of config.json, tensors, what is said
    ({}, {NORM: None}, f"{NORM} is missing"),
    ({}, {EXPERT: None}, f"{EXPERT} is missing"),
    ({}, {HEAD: None}, f"{HEAD} is missing; its config.json calls for it; its tie_word_embeddings"),
    ({}, {"model.layers.9.x.weight": np.ones(3, np.float32)}, "x.weight is extra"),
    ({}, {NORM: np.ones(7, np.float32)}, f"{NORM} is [7], but its config.json calls for [32]"),
    ({}, {NORM: np.ones(32, np.int8)}, f"{NORM} is I8"),
    ({}, {NORM: np.array([np.nan] * 32)}, f"tensor {NORM} holds NaN or infinite values"),
    ({}, {NORM: np.array([1e300] * 32)}, f"tensor {NORM} holds NaN or infinite values"),
    ({"num_hidden_layers": 2}, {}, "is extra"),
    ({"tie_word_embeddings": True}, {}, "lm_head.weight is not model.embed_tokens.weight"),
    ({}, FLOAT8, f"{OUT} is F8_E4M3"),
]
BAD_CONFIGS = [  # entries of config.json, what is said
    ({"model_type": "t5"}, "model_type is 't5'; supported are deepseek_v3, moe_pretraining, gpt2,"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
    ({"rope_scaling": {"factor": 2.0, "type": "yarn"}}, "rope_type is 'yarn'"),
    ({"rope_interleave": None}, "rope_interleave is None"),  # as false there, not as if missing
    ({"sliding_window": 128}, "sliding_window is 128, and what that changes in deepseek_v3"),
    ({"quantization_config": {"quant_method": "gptq"}}, "convert them to bfloat16 first"),
    ({"hidden_size": "32"}, "hidden_size is '32', but must be a whole number"),
    ({"q_lora_rank": -1}, "q_a_proj.weight is [10, 32], but its config.json calls for [16, 32]"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, but must be a number"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', but must be true or false"),
    ({"rope_parameters": {"rope_theta": []}}, "rope_theta is [], but must be a number"),
    ({"num_experts_per_tok": 1}, "norm_topk_prob is True, but supported is False with num_exp"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False, but supported is True with num_experts_"),
    ({"num_experts_per_tok": 99}, "num_experts_per_tok 99: cannot be more than there are"),
    ({"num_hidden_layers": 2**16}, "tensor model.layers"),
    ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, but must be at most"),
]
BAD_INDEXES = [  # content, what is said
    ("{}", f"{pretrained.INDEX}: weight_map must name the file of each tensor, but is None"),
    ('{"weight_map": {}}', "weight_map must name"),
    ('{"weight_map": ["1.safetensors"]}', "weight_map must name"),
    ("[]", "not a JSON object"),
    ('{"weight_map": {"a": 1}}', "the file of tensor a is 1, but must be"),
    ('{"weight_map": {"a": null}}', "the file of tensor a is None, but must be"),
    ('{"weight_map": {"a": "../b.safetensors"}}', "the file of tensor a is '../b.safetensors'"),
    ('{"weight_map": {"a": "/b.safetensors"}}', "the file of tensor a is '/b.safetensors'"),
    ('{"weight_map": {"a": "pytorch_model.bin"}}', "must be a .safetensors file of the folder"),
]
BAD_FILES = [  # name of a file, its content, what is said
    ("config.json", "{", "is not JSON"),
    ("config.json", "null", "holds None, not a JSON object"),
    ("config.json", '{"model_type": "gpt2"}', "is missing"),
    *[(pretrained.INDEX, content, said) for content, said in BAD_INDEXES],
    ("model.safetensors", "torn", "cannot be read"),
    ("tokenizer.json", '{"a"', "is no tokenizer"),
    ("tokenizer_config.json", '{"eos_token": 3}', "has no token 3"),
]


ROTARY = [  # entries that mean what is there
    {"hidden_act": "swish"},
    {"partial_rotary_factor": 1.0},
    {"rope_scaling": {"type": "linear", "factor": 1.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    {"rope_scaling": None, "mlp_bias": False},
    {"attn_logit_softcapping": None},
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_spellings_in_config_json_mean_the_same(name):
    form = registry.format_of(name)
    config = form.config(small_config(**ARCHITECTURES[name]).model)
    wanted = pretrained.model_flags(config, "")
    rotary = ROTARY if "rope_base" in architectures.architecture(name).flags else []
    for other in [*rotary, *FAMILIES[name].spellings]:
        assert pretrained.model_flags(config | other, "") == wanted, other
    for other in [{"partial_rotary_factor": 0.5}, {"hidden_act": "gelu"}, {"unknown": 1}]:
        refusal(lambda: pretrained.model_flags(config | other, ""), *other)


def test_bad_configs_tensors_and_files_are_refused_by_name(deepseek, tmp_path):
    folder, odd, out = deepseek[2], tmp_path / "spoilt", str(tmp_path / "x")
    configs = [(config, {}, said) for config, said in BAD_CONFIGS]
    for config, tensors, said in BAD_TENSORS + configs:
        refusal(lambda: hf.import_folder(spoilt(folder, tmp_path, config, **tensors), out), said)
        shutil.rmtree(odd)
    for name, content, said in BAD_FILES:
        shutil.copytree(folder, odd)
        small_tokenizer(odd)
        files.write_file(str(odd / name), content)
        refusal(lambda: hf.import_folder(str(odd), out), said)
        shutil.rmtree(odd)
    assert not list(tmp_path.iterdir())


def test_other_mistakes_give_one_sentence(deepseek, tmp_path):
    _, run, folder = (str(part) for part in deepseek)
    (tmp_path / "file").write_text("")
    names = "x none file/x begun odd".split()
    out, none, bad, begun, odd = (str(tmp_path / name) for name in names)
    config = files.read_json(run, "config.json")
    files.write_json(f"{begun}/config.json", config)
    files.write_json(f"{odd}/config.json", config | {"activation": "relu"})
    for *words, said in [
        ("export", none, out, "neither a run directory"),
        ("export", odd, out, f"{odd}/config.json: activation is 'relu', but must be one of swiglu"),
        ("export", begun, out, "begun/checkpoints: there is no checkpoint in here"),
        ("export", run, folder, "exists already"),
        ("import", folder, run, "exists already"),
        ("import", tmp_path, out, "model_type is None; supported are"),
        ("import", folder, "gs://b/x", "gs://b/x: must be a local folder"),
        ("import", folder, "target: is missing, the word that comes"),
        ("push", run, "x", "x: must be USER/NAME"),
        ("export", run, bad, "file/x: cannot be written"),
        ("import", folder, bad, "x: cannot be written"),
    ]:
        words = list(map(str, words))
        refusal(lambda: hf.main(read_flags(hf.Options, words, "hf.py")), said)


def test_an_architecture_may_have_no_such_format(monkeypatch):
    monkeypatch.setattr(gpt2, "FORMAT", None)
    exporting = "--architecture gpt2: its models have no Hugging"
    refusal(lambda: registry.format_to_export("gpt2"), exporting)
    config = {"model_type": "gpt2"}
    said = refusal(lambda: registry.format_of_config(config, "config.json"), "model_type is 'gpt2'")
    assert said.count("gpt2") == 1


def test_only_a_file_that_defines_an_architecture_is_one(tmp_path, monkeypatch):
    """Files are read and not run. Two architectures do not share a model_type."""
    names = architectures.names.__wrapped__
    formats = sys.modules["hf"]
    copy = "from architectures.gpt2 import ARCHITECTURE as GPT2\n"
    (tmp_path / "another.py").write_text(f"{copy}ARCHITECTURE: object = GPT2")
    for name, content in dict(
        helper="import no_such_package",
        imports="from architectures.gpt2 import ARCHITECTURE",
        shows='"""For example\nARCHITECTURE = Architecture(...)\n"""',
        torn="ARCHITECTURE = (",
        within="def make():\n    ARCHITECTURE = None",
    ).items():
        (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.setattr(architectures, "names", names)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    assert names() == ["another", *sorted(ARCHITECTURES)]
    assert registry.format_of_config({"model_type": "gpt2"}, "")[0] == "gpt2"
    (tmp_path / "mine.py").write_text(f"{copy}ARCHITECTURE = GPT2")
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats/mine.py").write_text("from hf.gpt2 import FORMAT as FORMAT")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "formats")])
    both = "both --architecture gpt2 and mine have the model_type 'gpt2'"
    refusal(lambda: registry.format_of_config({"model_type": "gpt2"}, "config.json"), both)
    words = "import architectures, sys; architectures.names(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], cwd=ROOT).returncode == 0


def test_what_import_and_export_say(deepseek, tmp_path, capsys, caplog):
    """One count of parameters, that of main.py; nothing of the libraries, nor of the folder that is written first."""
    cfg, _, folder = deepseek
    absl_logging.set_verbosity(absl_logging.WARNING)
    capsys.readouterr()
    hf.main(hf.Options("import", str(folder), str(tmp_path / "imported")))
    hf.main(hf.Options("export", str(tmp_path / "imported"), str(tmp_path / "again")))
    out, err = capsys.readouterr()
    assert out.count(count_in_words(cfg)) == out.count("\n") == 2 and "part" not in out, out
    assert err + caplog.text == ""
    for end_of_text, wanted in ((7, 7), (-1, None)):  # of runs without a tokenizer
        m = utils.Model(end_of_text=end_of_text)
        assert hf.export_tokenizer(str(tmp_path), str(tmp_path), m)["eos_token_id"] == wanted


def test_a_run_is_pushed_to_the_hub_with_its_numbers(train, text_shards, tmp_path, monkeypatch):
    """All that an export writes; the card has what the run wrote. Whom the hub refuses gets one sentence."""
    assert train(data=text_shards, vocab_size=512, training_steps=2) == 0
    run, committed = tmp_path / "runs/run", {}

    def upload(repo_id, folder_path):
        committed.update((path.name, path.read_bytes()) for path in Path(folder_path).iterdir())
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")

    def push():
        hf.main(read_flags(hf.Options, ["push", str(run), "user/name"], "hf.py"))

    hub = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    hub.create_repo.side_effect = [PermissionError("Invalid username or password."), None]
    hub.upload_folder.side_effect = upload
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    refusal(push, "user/name: the hub took nothing (Invalid username or password")
    assert not committed
    push()
    hub.create_repo.assert_called_with("user/name", private=True, exist_ok=True)
    hf.export(str(run), str(tmp_path / "exported"))
    written = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    card = committed["README.md"].decode()
    assert committed == written | {"README.md": card.encode()}
    *_, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    cfg = json.loads((run / "config.json").read_text())
    tokens = 2 * cfg["train_batch_size"] * cfg["T"]
    known = [f"`{text_shards.name}`", cfg["commit"], '"user/name", trust_remote_code=True)']
    known += [f"{last[f'loss/{of}_cross_entropy_loss']:.4f} nats" for of in ("train", "val")]
    assert all(part in card for part in [*known, f"{tokens:,} (2 steps"]), card
    flags = ["--config", str(tmp_path / "exported/training.json"), "--data", str(text_shards)]
    again = command_line.parse(flags).cfg
    assert again.model == utils.replace(again, vocab_size=512).model and again.run.seed == 0


TEXTS = {"architecture", "attention", "preset", "name", "profile", "prompt"}  # of no place
LOCAL = {
    "data": "gs://alices-bucket/corpora/web",
    "mix": "gs://alices-bucket/corpora/web:0.7,/home/alice/code/:0.2 until 0.5, s3://alices-bucket/w:1",
    "coordinator": "alices-machine:8476",
    "eval_tasks": "hellaswag,/home/alice/tasks/mine",
}


def test_nothing_of_the_machine_leaves_with_a_model(tmp_path):
    """Whatever flag names a place, also those that come; files have the mode that any other has."""
    run, _, _, _ = make_run(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, tokenization.END_OF_TEXT: 1}, [])).save(
        str(run / "tokenizer.json")
    )
    about = dict(name_or_path="/home/alice/x", eos_token=tokenization.END_OF_TEXT, unk_token="/")
    (run / "tokenizer_config.json").write_text(json.dumps(about))
    config = json.loads((run / "config.json").read_text()) | {"encoding": "tokenizer.json"}
    for name, f in utils.FIELDS.items():
        one = parser.values_of(f).kind
        if one is str and name not in TEXTS:
            config[name] = LOCAL.get(name, f"/home/alice/{name}/last")
    (run / "config.json").write_text(json.dumps(config))
    row = {"step": 0, "loss/train_cross_entropy_loss": 3.0}
    before = os.umask(0o022)
    with mock.patch.object(model_card, "read_rows", lambda _: [row]):
        hf.export(str(run), str(tmp_path / "out"))
    os.umask(before)
    secret = "alice", "8476", str(tmp_path), os.path.expanduser("~/"), str(ROOT), "gs://", "s3://"
    for path in (tmp_path / "out").iterdir():
        content = path.read_bytes()
        assert not [word for word in secret if word.encode() in content], path.name
        assert path.stat().st_mode & 0o777 == 0o644, path.name
    told = json.loads((tmp_path / "out/training.json").read_text())
    assert told["mix"] == "web:0.7,code:0.2 until 0.5,w:1" and told["init_from"] == "last"
    assert told["eval_tasks"] == "hellaswag,mine" and told["T"] == config["T"]
    assert "`web:0.7,code:0.2 until 0.5,w:1`" in (tmp_path / "out/README.md").read_text()
    assert shareable({"init_from": "hf://org/name@main"}) == {"init_from": "hf://org/name@main"}
    home = os.path.expanduser("~")
    for place in (home, f"{home}/", "gs://alices-bucket", "https://user:alice@host"):
        assert shareable({"data": place}) == {"data": ""}


def test_a_folder_that_was_not_trained_here_is_exported_again(deepseek, tmp_path):
    _, _, folder = deepseek
    hf.export(str(folder), str(tmp_path / "again"))
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert again["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert "were imported" in again["README.md"].decode() and "training.json" not in again


def test_a_disk_that_is_full_leaves_nothing_of_an_export(deepseek, tmp_path):
    """Whatever is written when it is full, the library's file too."""
    _, run, _ = deepseek
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (100, 4096, 2**16):  # bytes of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            refusal(lambda: hf.export(str(run), str(tmp_path / "out")), "out", "cannot be written")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert os.listdir(tmp_path) == []


def test_a_folder_appears_when_it_is_whole(tmp_path):
    out = str(tmp_path / "out")
    with hf.appearing(out) as part:
        assert os.listdir(tmp_path) == [os.path.basename(part)] != ["out"]
        with contextlib.suppress(ZeroDivisionError), hf.appearing(out):
            1 / 0
    assert os.listdir(tmp_path) == ["out"]
