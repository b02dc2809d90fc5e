"""The mathematics against the independent implementations in Hugging Face transformers, with random weights."""

import functools
import json
import math

import families
import jax
import numpy as np
import pytest
from families import GROUPS
from helpers import ROOT, random_transformer
from mesh_helpers import batch_of
from small_models import given, settled, small_config

import model
import utils
from config import presets, program
from hf.format import read_flags
from hf.registry import format_of, format_of_config
from inference import decoding, weights
from shards import tokenization
from tools import common, hf, sample
from training.device_mesh import make_mesh
from training.train_state import abstract_params

torch = pytest.importorskip("torch", reason="pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="pip install torch transformers")
# Models that transformers does not know, by the code that an export writes beside the weights
OWN = given("--n_head 2 --blocks 2 --layers_per_block 3 --head_dim 9 --first_layers 1 --rope_dim 6")
OWN |= given("--balance_weight 0 --norm_eps 2e-4")
OWN_GELU = OWN | GROUPS
OWN_GELU |= given(
    "--activation gelu --layers_per_block 1 --no_embedding_norm --embedding_conv 0 --no_backout"
    " --no_exclusive_attention"
)
OWN_GELU |= given("--q_latent_dim 0 --no_tied --n_shared 0 --experts_per_token 1 --norm_eps 3e-5")
SIZES = families.SIZES | {"own": OWN, "own gelu": OWN_GELU}


def reference(cfg, folder):
    """transformers' model of the same shape with random weights, every one of which matters."""
    form = format_of(cfg.model.architecture)
    theirs = random_transformer(form.config(cfg.model), folder).eval()
    with torch.no_grad():
        for name, p in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "norm" in name or ".ln_" in name or name.endswith("backout"):
                p.uniform_(0.5, 1.5)
            elif name.endswith("conv") or "correction_bias" in name:
                p.uniform_(-0.2, 0.2)
            elif p.dim() > 1 and p.numel():
                p.normal_(0, 0.5 if "gate.weight" in name else 1.5 * p.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.3)
    return theirs


def gradients_of(theirs, m):
    """{name in a file: gradient}; in memory transformers' matrices of all experts of a layer are one tensor."""
    gradients = {}
    for name, p in theirs.named_parameters():
        if not p.numel():  # of shared experts where there are none
            continue
        g = p.grad.numpy()
        if g.ndim < 3:
            gradients[name] = g
            continue
        for e in range(m.n_experts):
            prefix = f"{name.rpartition('.')[0]}.{e}"
            if "gate_up" in name:
                gate, up = np.split(g[e], 2)
                gradients |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
            else:
                gradients[f"{prefix}.down_proj.weight"] = g[e]
    return gradients


@pytest.mark.parametrize("size", SIZES)
def test_logits_and_gradients_are_those_of_transformers(size, tmp_path):
    cfg = small_config((2, 2, 2), sequences=8, **SIZES[size])
    m, mesh, theirs = cfg.model, make_mesh(cfg), reference(cfg, tmp_path)
    batch = [part[0] for part in batch_of(cfg, mesh)]
    ids, targets = (np.asarray(part).reshape(8, m.T) for part in batch)
    logits = theirs(torch.tensor(ids)).logits
    targets = torch.tensor(targets.flatten(), dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
    loss.backward()

    theirs.save_pretrained(tmp_path)
    flags, load = weights.open_weights(str(tmp_path))
    assert settled(utils.replace(cfg, **flags).model) == settled(m)
    params = load(abstract_params(cfg, mesh))
    decode, cache = jax.jit(decoding.make_decode(cfg, mesh)), decoding.empty_cache(cfg, 8, m.T)
    at = [0, 1, m.T // 2, m.T - 1]
    ours = [decode(params, ids, cache, np.zeros(8, int), np.full(8, i))[0] for i in at]
    ours = np.stack(ours, 1)[..., : m.vocab_size]
    assert np.abs(ours - logits[:, at].detach().numpy()).max() < 2e-4

    grad = jax.jit(jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True))
    (our_loss, _), our_gradients = grad(params, *batch, jax.random.key(0), 0)
    assert abs(float(our_loss) - loss.item()) < 1e-5
    wanted = gradients_of(theirs, m)
    for t in format_of(m.architecture).tensors(m):
        if "correction_bias" in t.name or not math.prod(t.shape):
            continue  # moved by the load, not by a gradient; or of no shared experts
        theirs_ = wanted.pop(t.name)
        ours = t.theirs(np.asarray(functools.reduce(dict.__getitem__, t.leaf, our_gradients))[t.at])
        assert np.abs(ours - theirs_).max() < 1e-3 * np.abs(theirs_).max(), t.name
    assert not wanted


def test_the_trainer_accumulates_gradients_as_of_one_batch(tmp_path):
    """Its loss and gradient do not depend on how a batch is cut, also where rows have unequal numbers of targets."""
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    cfg = small_config(**OWN | given("--blocks 1 --layers_per_block 2 --n_experts 2"))
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (4, 12)).tolist()
    labels = [[-100] * 2 * i + row[2 * i :] for i, row in enumerate(tokens)]
    rows = [dict(input_ids=ids, labels=targets) for ids, targets in zip(tokens, labels)]
    logged = []
    for accumulation in (1, 2):
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(reference(cfg, tmp_path), args, train_dataset=rows)
        torch.manual_seed(0)
        trainer.train()
        logged.append([trainer.state.log_history[0][key] for key in ("loss", "grad_norm")])
    assert np.allclose(logged, logged[0], rtol=1e-4) and logged[0][0] > 1


def test_a_cache_that_the_exported_code_has_not_gets_a_sentence(tmp_path):
    theirs = reference(small_config(**OWN), tmp_path)
    with pytest.raises(
        ValueError, match="with a DynamicCache, not with a StaticCache; leave cache"
    ):
        theirs.generate(torch.arange(5)[None], max_new_tokens=2, cache_implementation="static")


# the first size of each family
FIRST = [next(iter(family.sizes)) for family in families.FAMILIES.values() if family.sizes]


@pytest.mark.parametrize("size", ["own", *FIRST])
def test_text_continues_as_transformers_continues_it(size, train, text_shards, tmp_path):
    """From a prompt's text to the text after it, by two independent programs, of a run that knows its tokenizer."""
    flags = {**SIZES[size], "T": 80, "vocab_size": 512, "training_steps": 3, "max_tokens": 8}
    assert train((1, 1, 1), data=text_shards, prompt="x", **flags) == 0
    hf.export(str(tmp_path / "runs/run"), str(tmp_path / "exported"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    make = transformers.AutoModelForCausalLM.from_pretrained
    theirs = make(tmp_path / "exported", trust_remote_code=size == "own")
    prompts = ["def test_of(", "x"]  # transformers pads the second
    for name, before in [("exported", ""), ("runs/run", tokenization.END_OF_TEXT)]:
        texts = [before + prompt for prompt in prompts]
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        greedy = dict(max_new_tokens=64, do_sample=False, eos_token_id=None)
        generated = theirs.generate(**inputs, **greedy)[:, inputs.input_ids.shape[1] :]
        wanted = tokenizer.batch_decode(generated)
        words = [str(tmp_path / name), "--prompt", *prompts]
        words += "--max_tokens 64 --temperature 0 --n_devices 1 --model_dtype float32".split()
        rows = sample.main(program.read_flags(common.Sample, words, "sample.py"))
        ends = [text.split(tokenization.END_OF_TEXT)[0] for text in wanted]
        assert [row.text for row in rows] == ends


@pytest.mark.parametrize("size", ["own", "own gelu"])
def test_padding_on_the_left_changes_no_logit(size, tmp_path):
    """Without positions, with and without a cache: a token's logits do not depend on where its text begins."""
    cfg = small_config(**SIZES[size])
    theirs = reference(cfg, tmp_path)
    ids = torch.randint(cfg.model.vocab_size, (2, 9), generator=torch.manual_seed(0))
    padded = torch.nn.functional.pad(ids, (7, 0))
    mask = (torch.arange(16) >= 7).int().expand(2, -1)
    with torch.no_grad():
        alone = theirs(ids).logits
        assert (theirs(padded, mask).logits[:, 7:] - alone).abs().max() < 1e-4
        cache = transformers.DynamicCache()
        theirs(padded[:, :12], mask[:, :12], past_key_values=cache)
        rest = theirs(padded[:, 12:], mask, past_key_values=cache).logits
        assert (rest - alone[:, 5:]).abs().max() < 1e-4


# {preset: config.json} of deepseek-ai/DeepSeek-V3, moonshotai/Moonlight-16B-A3B, openai-community/gpt2,
# Qwen/Qwen3-0.6B-Base and Qwen/Qwen3-30B-A3B-Base
CONFIGS = json.loads((ROOT / "tests/published.json").read_text())


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_understood(name, saved):
    config, preset = CONFIGS[name], presets.preset(name)
    architecture_name, form = format_of_config(config, "")
    assert architecture_name == preset.model.architecture
    if saved:
        config = transformers.AutoConfig.for_model(**config).to_dict()
    flags = read_flags(form, json.loads(json.dumps(config)), "")
    assert flags.pop("T") == min(preset.model.T, 4096)
    assert settled(utils.replace(preset, **flags).model) == settled(preset.model)
