"""Export and import without transformers: bitwise round trips, tokenizers, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import logging as absl_logging
from conftest import (
    ARCHITECTURES,
    ROOT,
    SMALL_DEEPSEEK,
    settled,
    small_config,
    tokenize_tests,
    train_small_tokenizer,
)
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

import main
import utils
from architectures import architecture, gpt2
from data import tokenization
from inference import hugging_face, weights
from runtime import files, messages
from tools import common, evaluate, hf
from training import settings, steps

DEEPSEEK = SMALL_DEEPSEEK | dict(mtp_depth=1)
YARN = dict(rope_factor=4.0)
FLAGS = {
    **ARCHITECTURES,
    "deepseek": DEEPSEEK,
    "yarn": dict(DEEPSEEK, mtp_depth=0, tied=True, n_shared=0, **YARN),
}


def params_of(folder, **flags):
    cfg = small_config(**flags)
    stored, load = weights.open_weights(str(folder))
    free = settings.free_of_weights(cfg.model.architecture)
    of_weights = {flag: value for flag, value in stored.items() if flag not in free}
    assert settled(utils.replace(cfg, **of_weights).model) == settled(cfg.model)
    return jax.tree.map(np.asarray, load(steps.abstract_params(cfg, steps.make_mesh(cfg))))


@pytest.fixture(scope="module", params=FLAGS)
def exported(request, shards, xla_cache, tmp_path_factory):
    """(flags, run directory, exported folder) of two steps of training on (2, 2, 2)."""
    return trained(FLAGS[request.param], shards, xla_cache, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def deepseek(shards, xla_cache, tmp_path_factory):
    return trained(FLAGS["deepseek"], shards, xla_cache, tmp_path_factory.mktemp("hf"))


def trained(flags, shards, xla_cache, folder):
    cfg = small_config(
        (2, 2, 2),
        sequences=8,
        name="run",
        output_dir=str(folder),
        training_steps=2,
        eval_steps=1,
        data=str(shards),
        compilation_cache=str(xla_cache),
        **flags,
    )
    assert main.main(settings.Flags(cfg, frozenset())) == 0
    hf.export(str(folder / "run"), str(folder / "exported"))
    return flags, folder / "run", folder / "exported"


def test_round_trip_is_bitwise(exported, tmp_path):
    flags, run, folder = exported
    empty = [name for name, x in load_file(folder / "model.safetensors").items() if not x.size]
    assert len(empty) == (
        12 if flags is FLAGS["yarn"] else 0
    )  # shared experts of width 0, which transformers misses
    hf.import_folder(str(folder), str(tmp_path / "imported"))
    before, after = params_of(run, **flags), params_of(tmp_path / "imported", **flags)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    hf.export(str(tmp_path / "imported"), str(tmp_path / "again"))
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_shards_of_bounded_size_load_as_one_does(exported, tmp_path, monkeypatch):
    flags, run, _ = exported
    monkeypatch.setattr(hf, "SHARD_BYTES", 30_000)
    hf.export(str(run), str(tmp_path / "cut"))
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    largest = max(x.nbytes for f in files for x in load_file(f).values())
    assert len(files) > 2 and all(
        sum(x.nbytes for x in load_file(f).values()) <= max(30_000, largest) for f in files
    )
    same = jax.tree.map(
        np.array_equal, params_of(run, **flags), params_of(tmp_path / "cut", **flags)
    )
    assert jax.tree.all(same)


def test_bfloat16_rounds_and_loads(exported, tmp_path):
    flags, run, _ = exported
    hf.export(str(run), str(tmp_path / "half"), "bfloat16")
    for a, b in zip(
        jax.tree.leaves(params_of(run, **flags)),
        jax.tree.leaves(params_of(tmp_path / "half", **flags)),
    ):
        assert np.array_equal(a.astype(jax.numpy.bfloat16), b)


@pytest.mark.parametrize("imported", [False, True])
def test_a_run_begins_with_imported_weights(exported, imported, train, tmp_path, capsys):
    """At learning rate 0 it validates exactly as the run that they come from."""
    flags, run, folder = exported
    if imported:
        hf.import_folder(str(folder), str(tmp_path / "imported"))
        folder = tmp_path / "imported"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    still = dict(max_lr=0.0, end_lr=0.0)
    if flags.get("architecture", "deepseek") == "deepseek":
        still["bias_update_rate"] = 0.0
    assert (
        train((2, 2, 2), init_from=folder, training_steps=1, eval_steps=1, **{**flags, **still})
        == 0
    )
    (row,) = [
        json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    ]
    assert row["loss/val_cross_entropy_loss"] == rows[-1]["loss/val_cross_entropy_loss"]
    # and the imported run itself says that it can't be trained on under its own name
    if imported:
        with pytest.raises(messages.UserError, match="weights alone.*--init_from"):
            train((2, 2, 2), name="imported", output_dir=tmp_path, training_steps=3, **flags)


def test_the_tools_measure_a_folder_as_the_run_imported_from_it(
    deepseek, shards, xla_cache, train, tmp_path, capsys
):
    """With the T that the model was trained with; further only with a warning."""
    flags, run, folder = deepseek
    hf.import_folder(str(folder), str(tmp_path / "imported"))

    def measured(model, **options):
        options = (
            dict(n_devices=1, compilation_cache=str(xla_cache), limit=4, data=(str(shards),))
            | options
        )
        (row,) = evaluate.main(common.Evaluate(model=str(model), **options))["data"]
        return row["tokens"], row["loss"]

    capsys.readouterr()
    assert measured(folder) == measured(tmp_path / "imported") and measured(run)[0] == 4 * 32
    assert measured(folder, T=8)[0] == 4 * 8
    said = [line for line in capsys.readouterr().err.splitlines() if "not verified" not in line]
    assert all("nothing tells whether the tokenizer" in line for line in said) and len(said) == 4
    for model in (folder, tmp_path / "imported", run):
        assert measured(model, T=40)[0] == 4 * 40
        about_T = f"warning: --T 40: {model} was made for 32 tokens\n"
        assert capsys.readouterr().err.startswith(about_T)
    with pytest.raises(messages.UserError, match="nowhere"):
        train(init_from=folder, T=40, data=tmp_path / "nowhere", **flags)
    assert (
        f"--T 40: the weights in --init_from {folder} were made for 32 tokens"
        in capsys.readouterr().out
    )
    far = spoilt(folder, tmp_path, {"max_position_embeddings": 8192})
    hf.import_folder(far, str(tmp_path / "far"))
    for model in (far, str(tmp_path / "far")):
        T = weights.open_weights(model)[0]["T"]
        assert (T, weights.positions(model, T)) == (4096, 8192)


HOSTILE = [
    "",
    "a",
    "<|endoftext|> spelled",
    "naïve 日本語 🦙👩‍👩‍👧 \x00\x01",
    "  \n\n\t x   ",
    "1234567 89",
    "I'll WE'VE don't",
    "def f(x):\n    return x**2  # ünï\r\n",
    "a" * 300,
    "\u2028 \u00a0",
]


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "trained"])
def test_the_exported_tokenizer_cuts_as_tiktoken_does(name, tmp_path, named_tokenizers):
    if name == "trained":
        name = str(tmp_path / "small.tiktoken")
        train_small_tokenizer(name)
    encoding = tokenization.load_tokenizer(name)
    run, folder = tmp_path / "run", tmp_path / "folder"
    files.write_file(
        str(run / "config.json"),
        json.dumps({"encoding": tokenization.keep_tokenizer(str(run), name)}),
    )
    folder.mkdir()
    ends = hf.export_tokenizer(str(folder), str(run), utils.Model(T=64))
    theirs = tokenization.load_tokenizer(str(folder / "tokenizer.json"))
    assert (
        ends["eos_token_id"] == encoding.eot_token == theirs.eot_token
        and theirs.n_vocab == encoding.n_vocab
    )
    assert len(encoding.encode_ordinary("import pytest")) < 10  # that there is something to merge
    texts = [*HOSTILE, (ROOT / "README.md").read_text(), (ROOT / "model.py").read_text()]
    for text in texts:
        assert theirs.encode_ordinary(text) == encoding.encode_ordinary(text), text[:40]
        assert theirs.decode(encoding.encode_ordinary(text)) == text
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts[4:]:
        assert auto.encode(text, add_special_tokens=False) == encoding.encode_ordinary(text)
    assert (
        auto.eos_token_id == encoding.eot_token and auto.decode(auto.encode(texts[-1])) == texts[-1]
    )


def test_text_tokenized_with_an_imported_tokenizer_trains_its_model(tmp_path, train):
    """tokenizer.json in place of the ranks that it was made of: the same shards, and all that follows works."""
    ranks, folder = tmp_path / "small.tiktoken", tmp_path / "folder"
    train_small_tokenizer(ranks)
    run = dict(init_from="", training_steps=1, vocab_size=512, **DEEPSEEK)
    for name, tokenizer in dict(first=ranks, second=folder / "tokenizer.json").items():
        tokenize_tests(tmp_path / name, tokenizer)
        flags = {
            **run,
            "data": tmp_path / name,
            "name": name,
            "prompt": "def test",
            "max_tokens": 8,
        }
        assert train((1, 1, 1), **flags) == 0
        samples = (tmp_path / f"runs/{name}/samples.txt").read_text()
        assert samples.count("def test") == 4
        if name == "first":
            hf.export(str(tmp_path / "runs/first"), str(folder))
            run["init_from"] = folder
    for split in ("train", "val"):
        shards = [np.load(tmp_path / name / split / "000000.npy") for name in ("first", "second")]
        assert np.array_equal(*shards) and len(shards[0]) > 1000
    assert (
        json.loads((tmp_path / "runs/second/config.json").read_text())["encoding"]
        == "tokenizer.json"
    )


def spoilt(folder, tmp_path, config=None, **tensors):
    """A copy of a folder with entries of its config changed, and tensors changed or, where None, left out."""
    there, out = load_file(folder / "model.safetensors"), tmp_path / "spoilt"
    tensors = {name.replace("__", "."): x for name, x in tensors.items()}
    out.mkdir()
    save_file(
        {n: x for n, x in (there | tensors).items() if x is not None}, out / "model.safetensors"
    )
    (out / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | (config or {}))
    )
    return str(out)


def float8(folder, block, seed=0):
    """({name of tensor: array} with the matrices of a folder in float8 and their scales, the same by plain loops in
    float32)."""
    rng, stored, plain = np.random.default_rng(seed), load_file(folder / "model.safetensors"), {}
    for name, x in list(stored.items()):
        if x.ndim < 2 or any(
            part in name for part in ("embed", "lm_head", "gate.weight", "eh_proj")
        ):
            continue
        rows, columns = (-(-n // size) for n, size in zip(x.shape, block))
        scales = rng.uniform(0.01, 0.1, (rows, columns)).astype(np.float32)
        stored[name], stored[f"{name}_scale_inv"] = (x * 20).astype(jax.numpy.float8_e4m3fn), scales
        plain[name] = stored[name].astype(np.float32)
        for i, j in np.ndindex(x.shape):
            plain[name][i, j] *= scales[i // block[0], j // block[1]]
    return stored, plain


@pytest.mark.parametrize("block", [(16, 24), (128, 128)])
def test_float8_weights_are_read_times_their_scales(block, deepseek, tmp_path):
    """Blocks that do not divide the weights, and one that is larger than any."""
    flags, _, folder = deepseek
    stored, plain = float8(folder, block)
    quantised = dict(
        quant_method="fp8", fmt="e4m3", weight_block_size=block, activation_scheme="dynamic"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a = spoilt(folder, tmp_path / "a", {"quantization_config": quantised}, **stored)
    b = spoilt(folder, tmp_path / "b", **plain)
    assert len(plain) > 40
    assert jax.tree.all(jax.tree.map(np.array_equal, params_of(a, **flags), params_of(b, **flags)))


NORM, OUT = "model.layers.2.input_layernorm.weight", "model.layers.2.self_attn.o_proj.weight"
FLOAT8 = {OUT: np.ones((32, 40), jax.numpy.float8_e4m3fn)}
QUANTISED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}


@pytest.mark.parametrize(
    "config, tensors, sentence",
    [
        ({}, {NORM: None}, f"{NORM} is missing"),
        (
            {},
            {"model.layers.2.mlp.experts.3.up_proj.weight": None},
            "experts.3.up_proj.weight is missing",
        ),
        (
            {},
            {"model.layers.9.surprise.weight": np.ones(3, np.float32)},
            "surprise.weight is extra",
        ),
        (
            {},
            {NORM: np.ones(7, np.float32)},
            rf"{NORM} is \[7\], but its config.json calls for \[32\]",
        ),
        ({}, {NORM: np.ones(32, np.int8)}, f"{NORM} is I8"),
        ({"num_hidden_layers": 4}, {}, "model.layers.4.* is extra"),
        (
            {"model_type": "t5"},
            {},
            "model_type is 't5'; supported are deepseek_v3, gpt2,",
        ),
        ({"hidden_act": "relu"}, {}, "hidden_act is 'relu'.*'silu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}, "rope_type is 'linear'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, {}, "rope_type is 'longrope'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
            {},
            "truncate is False",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, {}, "factor is 0.5"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "x": 1}},
            {},
            "x is 1, and what that changes",
        ),
        (
            {"rope_interleave": None},
            {},
            "rope_interleave is None",
        ),  # as false there, and not as if it were missing
        ({"head_dim": 4}, {}, "head_dim is 4"),
        (
            {"sliding_window": 128},
            {},
            "sliding_window is 128, and what that changes in deepseek_v3 is not known",
        ),
        ({"tie_word_embeddings": True}, {}, "lm_head.weight is not model.embed_tokens.weight"),
        (
            {"quantization_config": {"bits": 4, "quant_method": "gptq"}},
            {},
            "quant_method is 'gptq'",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            {},
            "weight_block_size is None",
        ),
        ({}, FLOAT8, f"{OUT} is F8_E4M3"),
        (QUANTISED, FLOAT8, f"{OUT}_scale_inv is missing"),
        (
            QUANTISED,
            {**FLOAT8, f"{OUT}_scale_inv": np.ones((2, 2), np.float32)},
            r"is \[2, 2\], .* \[2, 3\]",
        ),
        (QUANTISED, {f"{OUT}_scale_inv": np.ones((2, 3), np.float32)}, f"{OUT}_scale_inv is extra"),
    ],
)
def test_bad_folders_are_refused_by_name(config, tensors, sentence, deepseek, tmp_path):
    folder = spoilt(deepseek[2], tmp_path, config, **tensors)
    with pytest.raises(messages.UserError, match=sentence):
        hf.import_folder(folder, str(tmp_path / "imported"))
    assert not (tmp_path / "imported").exists()


def test_what_import_and_export_say(deepseek, tmp_path, capsys, caplog):
    """One count of parameters, that of main.py; nothing of the libraries, nor of the folder that is written first."""
    flags, run, folder = deepseek
    absl_logging.set_verbosity(absl_logging.WARNING)
    capsys.readouterr()
    hf.run(["import", str(folder), str(tmp_path / "imported")])
    hf.run(["export", str(tmp_path / "imported"), str(tmp_path / "again")])
    out, err = capsys.readouterr()
    count = steps.count_in_words(small_config(**flags))
    assert out.count(count) == 2 and out.count("\n") == 4 and "part" not in out, out
    assert err + caplog.text == ""
    for at, end in ((folder, None), (tmp_path / "again", None)):
        config = json.loads((at / "config.json").read_text())
        assert config["eos_token_id"] is config["bos_token_id"] is end
    assert (
        hf.export_tokenizer(str(tmp_path), str(run), utils.Model(end_of_text=7))["eos_token_id"]
        == 7
    )
    with pytest.raises(messages.UserError, match="down/x: cannot be written"):
        (tmp_path / "down").write_text("")
        hf.export(str(run), str(tmp_path / "down/x"))
    with pytest.raises(messages.UserError, match="down/x: cannot be written"):
        hf.import_folder(str(folder), str(tmp_path / "down/x"))


WORDS = "must be a whole number of at least"


def test_odd_values_are_refused_by_file_and_key(deepseek, tmp_path):
    """Of an imported config.json and of a run's, by whatever reads them."""
    _, run, folder = deepseek
    theirs, ours = (json.loads((at / "config.json").read_text()) for at in (folder, run))
    cases = [
        ("{", "is not JSON"),
        ("null", "holds None, not a JSON object"),
        ("[1]", "not a JSON object"),
        (b"\xff\xfe\x00", "is not JSON"),
        (theirs | {"hidden_size": "32"}, f'hidden_size is "32", but {WORDS} 1'),
        (theirs | {"num_hidden_layers": None}, f"num_hidden_layers is null, but {WORDS} 1"),
        (theirs | {"q_lora_rank": -1}, f"q_lora_rank is -1, but {WORDS} 0"),
        (theirs | {"vocab_size": 2.5}, f"vocab_size is 2.5, but {WORDS}"),
        (theirs | {"kv_lora_rank": True}, f"kv_lora_rank is true, but {WORDS}"),
        (theirs | {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, but must be a number"),
        (
            theirs | {"tie_word_embeddings": "no"},
            'tie_word_embeddings is "no", but must be true or false',
        ),
        (theirs | {"rope_parameters": 3}, "rope_parameters is 3, but must be an object"),
        (
            theirs | {"rope_parameters": {"rope_theta": []}},
            "rope_parameters: rope_theta is [], but",
        ),
        (
            theirs | {"num_experts_per_tok": 99},
            "num_experts_per_tok 99: cannot be more than there are",
        ),
        (theirs | {"first_k_dense_replace": 5}, "num_hidden_layers is 0, but must be at least 1"),
        (theirs | {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7: must be a multiple of 2"),
        (theirs | {"num_hidden_layers": 2**16}, "tensor model.layers"),
        (
            theirs | {"num_hidden_layers": 2**30},
            "num_hidden_layers is 1073741823, but must be at most",
        ),
        ({k: v for k, v in theirs.items() if k != "v_head_dim"}, "v_head_dim is missing"),
        (ours | {"n_head": "4"}, "n_head is '4', but must be a whole number"),
        (ours | {"tied": None}, "tied is None, but must be true or false"),
        (ours | {"activation": "relu"}, "activation is 'relu', but must be one of swiglu, gelu"),
        (ours | {"encoding": 3}, "encoding is 3, but must name a tokenizer"),
        (ours | {"blocks": 0}, "blocks is 0, but must be at least 1"),
        (ours | {"experts_per_token": 99}, "experts_per_token 99: cannot"),
    ]
    odd = tmp_path / "odd"
    odd.mkdir()
    os.symlink(folder / "model.safetensors", odd / "model.safetensors")
    for content, said in cases:
        content = json.dumps(content) if isinstance(content, dict) else content
        files.write_file(str(odd / "config.json"), content)
        use = common.Sample(model=str(odd), n_devices=1, compilation_cache="")
        for program in (
            lambda: hf.import_folder(str(odd), str(tmp_path / "x")),
            lambda: common.open_model(use, False),
            lambda: hf.export(str(odd), str(tmp_path / "x")),
        ):
            with pytest.raises(messages.UserError) as e:
                program()
            reads_it = (
                said in str(e.value)
                or "model_type" in str(e.value)
                or "not a run directory" in str(e.value)
            )
            assert reads_it and "\n" not in str(e.value) and str(odd) in str(e.value), (
                said,
                e.value,
            )
        assert said in str(e.value) or '"model_type"' in str(content)
        assert os.listdir(tmp_path) == ["odd"]


def test_odd_files_and_numbers_are_refused_before_anything_is_written(deepseek, tmp_path):
    folder, index = str(deepseek[2]), "model.safetensors.index.json"
    flat = json.loads((deepseek[2] / "config.json").read_text())
    for number, value in enumerate((np.nan, np.inf, 1e300)):
        (tmp_path / str(number)).mkdir()
        bad = spoilt(deepseek[2], tmp_path / str(number), {}, **{NORM: np.array([value] * 32)})
        with pytest.raises(messages.UserError, match=f"tensor {NORM} holds NaN or infinite values"):
            hf.import_folder(bad, str(tmp_path / "x"))
    for name, content, said in [
        (index, "{", "is not JSON"),
        (index, "[]", "not a JSON object"),
        (index, "{}", ""),
        (index, '{"weight_map": 3}', "weight_map must give each tensor the name of a file"),
        (
            index,
            '{"weight_map": {"a": null}}',
            "weight_map must give each tensor the name of a file",
        ),
        (
            index,
            '{"weight_map": {"a": "../up.safetensors"}}',
            "weight_map must give each tensor the name of a file",
        ),
        (index, '{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing"),
        (index, '{"weight_map": {}}', ""),
        ("tokenizer.json", '{"a"', "cannot be read as a tokenizer"),
        ("tokenizer.json", "", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[", "is not JSON"),
        ("tokenizer_config.json", '{"eos_token": 3}', "has no token 3"),
        ("tokenizer_config.json", '{"eos_token": {"a": 1}}', "has no token {'a': 1}"),
    ]:
        odd = tmp_path / "odd"
        odd.mkdir()
        (odd / "config.json").write_text(json.dumps(flat))
        os.symlink(os.path.join(folder, "model.safetensors"), odd / "model.safetensors")
        Tokenizer(models.BPE({"a": 0}, [])).save(str(odd / "tokenizer.json"))
        (odd / name).write_text(content)
        with pytest.raises(messages.UserError, match=said or "has no token") as e:
            hf.import_folder(str(odd), str(tmp_path / "x"))
        assert "\n" not in str(e.value) and not list(tmp_path.glob("x*")), e.value
        shutil.rmtree(odd)


def test_other_mistakes_give_one_sentence(deepseek, tmp_path, train):
    _, run, folder = deepseek
    deepseek_format = architecture("deepseek").hugging_face
    for call, sentence in [
        (lambda: hf.export(str(tmp_path / "none"), str(tmp_path / "x")), "not a run directory"),
        (lambda: hf.export(str(run), str(folder)), "exists already"),
        (lambda: hf.import_folder(str(folder), str(run)), "exists already"),
        (lambda: hf.import_folder(str(tmp_path), str(tmp_path / "x")), "no config.json"),
        (lambda: hf.run(["import", str(folder), "gs://b/x"]), "gs://b/x: must be a local folder"),
        (lambda: hf.run(["import", str(folder)]), "target: is missing; see --help"),
        (lambda: weights.open_weights(str(tmp_path)), "neither a run directory nor"),
        (
            lambda: deepseek_format.config(small_config(**(DEEPSEEK | dict(latent_conv=3))).model),
            "--latent_conv 3",
        ),
    ]:
        with pytest.raises(messages.UserError, match=sentence):
            call()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(messages.UserError, match="model.safetensors is missing"):
        hf.import_folder(str(broken), str(tmp_path / "x"))
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(messages.UserError, match="cannot be read"):
        hf.import_folder(str(broken), str(tmp_path / "x"))
    assert train((1, 1, 1), training_steps=1, layers_per_block=3) == 0
    with pytest.raises(messages.UserError, match="layers_per_block 3: transformers has no model"):
        hf.export(str(tmp_path / "runs/run"), str(tmp_path / "x"))


def test_an_architecture_may_have_no_such_format(monkeypatch):
    monkeypatch.setattr(gpt2, "ARCHITECTURE", gpt2.ARCHITECTURE._replace(hugging_face=None))
    with pytest.raises(messages.UserError, match="--architecture gpt2: its models have no Hugging"):
        hugging_face.format_to_export("gpt2")
    with pytest.raises(
        messages.UserError,
        match=r"model_type is 'gpt2'; supported are (?!.*gpt2)",
    ):
        hugging_face.format_of({"model_type": "gpt2"}, "config.json")


def test_a_damaged_checkpoint_is_not_exported(deepseek, tmp_path, capsys):
    flags, run, _ = deepseek
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", run, copy], check=True)
    for data in copy.glob("checkpoints/*/state/ocdbt.process_0/d/*"):
        content = bytearray(data.read_bytes())
        for i in range(50, len(content), 1000):
            content[i] ^= 255
        data.write_bytes(content)
    with pytest.raises(messages.UserError, match="no sound checkpoint"):
        hf.export(str(copy), str(tmp_path / "out"))
    assert "is damaged" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_an_interrupted_export_leaves_no_folder_that_loads(deepseek, tmp_path):
    """Killed between two tensors; the next export is whole."""
    _, run, folder = deepseek
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from tools import hf
read, left = hf.StoredParams.read, [20]
def read_and_die(self, *at):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, *at)
hf.StoredParams.read = read_and_die
hf.export({str(run)!r}, {str(tmp_path / "out")!r})
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
        == -signal.SIGKILL
    )
    [left] = os.listdir(tmp_path)
    assert files.PART.search(left) and not (tmp_path / left / "config.json").exists()
    (tmp_path / "out.part").mkdir()  # somebody's own
    with hf.appearing(str(tmp_path / "out")) as alive:
        hf.export(str(run), str(tmp_path / "out"))
        assert set(os.listdir(tmp_path)) == {"out", "out.part", os.path.basename(alive)}
        shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    hf.export(str(run), str(tmp_path / "out"))
    assert set(os.listdir(tmp_path)) == {"out", "out.part"}
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_the_program_says_what_is_wrong(tmp_path):
    words = [
        sys.executable,
        str(ROOT / "tools/hf.py"),
        "export",
        str(tmp_path),
        str(tmp_path / "x"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    )
