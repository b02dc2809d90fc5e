"""The mathematics against Hugging Face's independent implementations of DeepSeek-V3 and GPT-2, with random weights."""

import functools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import MESHES, ROOT, SMALL_GPT2, small_config
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import decoding
import main
import model
import presets
import tokenization
import utils
from tools import common, hf, sample

torch = pytest.importorskip("torch", reason="torch is not installed; pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

# What all sizes share, all of them odd; below what each adds or changes
DEEPSEEK = dict(tied=False, layers_per_block=1, moe_rope=True, blocks=2, first_layers=1, n_head=4, nope_dim=12,
                v_dim=10, dhR=6, latent_dim=20, q_latent_dim=18, routed_scaling=2.5, capacity_factor=0.0)  # fmt: skip
SIZES = {
    "groups": dict(DEEPSEEK, n_experts=8, n_groups=4, k_groups=2, k=3),
    "no query latent": dict(DEEPSEEK, q_latent_dim=0, first_layers=2, n_shared=2, norm_eps=1e-5, rope_base=50_000.0),
    "yarn": dict(DEEPSEEK, rope_factor=40.0, rope_original_T=16, first_layers=0, model_dimension=40, nope_dim=7,
                 v_dim=13, dhR=10),
    "gpt2": dict(SMALL_GPT2, model_dimension=36, T=24),
    "gpt2 wide": dict(SMALL_GPT2, model_dimension=28, n_head=2, blocks=2, ffn_dim=0, norm_eps=1e-5, tied=False),
}  # fmt: skip


def reference(cfg):
    """transformers' model of the same shape with random weights, every one of which matters."""
    kind = hf.MODEL_TYPES[cfg.model.architecture]
    config = transformers.AutoConfig.for_model(**{**hf.FORMATS[kind].config(cfg.model), "attn_implementation": "eager"})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "norm" in name or ".ln_" in name:
                p.uniform_(0.5, 1.5)
            elif "correction_bias" in name:
                p.uniform_(-0.2, 0.2)
            elif p.dim() > 1:
                p.normal_(0, 0.5 if "gate.weight" in name else 1.5 * p.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.3)
    return theirs


def gradients_of(theirs, m):
    """{name in a file: gradient}; in memory the matrices of all experts of a layer are one tensor."""
    gradients = {}
    for name, p in theirs.named_parameters():
        g = p.grad.numpy()
        if ".mlp.experts." not in name:
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
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)])
def test_logits_and_gradients_are_those_of_transformers(size, mesh_shape, tmp_path):
    assert mesh_shape in MESHES
    cfg = small_config(mesh_shape, sequences=8, alpha=0.0, **SIZES[size])
    m, mesh, theirs = cfg.model, main.make_mesh(cfg), reference(cfg)
    rows = np.random.default_rng(0).integers(0, m.vocab_size, (8, m.T + 1))
    logits = theirs(torch.tensor(rows[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(rows[:, 1:]).flatten())
    loss.backward()

    theirs.save_pretrained(tmp_path)
    flags, load = main.open_weights(str(tmp_path))
    stored = utils.replace(cfg, **flags).model
    for name in ("head_dim", "value_dim", "q_latent", "ffn_width", "rope_base", "rope_factor", "norm_eps", "tied"):
        assert getattr(stored, name) == getattr(m, name)
    params = load(main.abstract_params(cfg, mesh))
    decode, cache = jax.jit(decoding.make_decode(cfg, mesh)), decoding.empty_cache(cfg, 8, m.T)
    at = [0, 1, m.T // 2, m.T - 1]
    ours = [decode(params, rows[:, :-1].astype(np.int32), cache, np.zeros(8, int), np.full(8, i))[0] for i in at]
    ours = np.stack(ours, 1)[..., : m.vocab_size]
    assert np.abs(ours - logits[:, at].detach().numpy()).max() < 2e-4

    batch = rows.astype(np.int32).reshape(cfg.data.micro_batch_size, -1, m.T + 1)
    batch = [
        jax.device_put(b, NamedSharding(mesh, P(*model.BATCH_SPEC[1:]))) for b in (batch[..., :-1], batch[..., 1:])
    ]
    grad = jax.jit(jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True))
    (our_loss, _), our_gradients = grad(params, *batch, jax.random.key(0), 0)
    assert abs(float(our_loss) - loss.item()) < 1e-5
    wanted = gradients_of(theirs, m)
    for t in hf.FORMATS[hf.MODEL_TYPES[m.architecture]].tensors(m):
        if "correction_bias" in t.name:  # moved by the load, not by a gradient
            continue
        theirs_ = wanted.pop(t.name)
        ours = t.theirs(np.asarray(functools.reduce(dict.__getitem__, t.leaf, our_gradients))[t.at])
        assert np.abs(ours - theirs_).max() < 1e-3 * np.abs(theirs_).max(), t.name
    assert not wanted


@pytest.mark.parametrize("size", ["groups", "yarn", "gpt2"])
def test_an_exported_run_generates_the_same_64_tokens(size, train, tmp_path):
    """Trained here for three steps, loaded there by AutoModelForCausalLM, greedily continued by both."""
    flags = {**SIZES[size], "T": 80, "temperature": 0.0, "max_tokens": 64, "training_steps": 3, "prompt": "x"}
    assert train((2, 2, 2), train_batch_size=4, val_batch_size=4, **flags) == 0
    run, folder = str(tmp_path / "runs/run"), str(tmp_path / "exported")
    hf.export(run, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cfg = small_config((2, 2, 2), sequences=8, **flags)
    mesh = main.make_mesh(cfg)
    _, load = main.open_weights(run)
    prompt = np.arange(7, dtype=np.int32)
    ours = jax.jit(decoding.make_generate(cfg, mesh))(load(main.abstract_params(cfg, mesh)), prompt, jax.random.key(0))
    ids = torch.tensor(prompt[None]).long()
    generated = theirs.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert generated.shape == (1, 71) and np.array_equal(generated[0], ours[0])


def test_text_continues_as_transformers_continues_it(train, tmp_path, capsys):
    """From a prompt's text to the text after it, by two programs of two houses, of a run that knows its tokeniser."""
    tool = lambda *words: subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True)  # noqa: E731
    ranks, shards = tmp_path / "small.tiktoken", tmp_path / "shards"
    tool(ROOT / "data/train_tokenizer.py", "--source", ROOT / "tests", "--vocab_size", 512, "--output", ranks)
    tool(ROOT / "data/tokenize_shards.py", "--source", ROOT / "tests", "--output", shards, "--tokenizer", ranks,
         "--val_fraction", "0.2")  # fmt: skip
    flags = {**SIZES["groups"], "T": 80, "vocab_size": 512, "training_steps": 3, "prompt": "x", "max_tokens": 8}
    assert train((1, 1, 1), bucket_name=shards, **flags) == 0
    hf.export(str(tmp_path / "runs/run"), str(tmp_path / "exported"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for model_, before in [("exported", ""), ("runs/run", tokenization.END_OF_TEXT)]:
        ids = tokenizer(f"{before}def test_of(", return_tensors="pt").input_ids
        generated = theirs.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
        wanted = tokenizer.decode(generated[0, ids.shape[1] :])
        words = [str(tmp_path / model_), "--prompt", "def test_of(", "--max_tokens", "40", "--temperature", "0",
                 "--n_devices", "1", "--model_dtype", "float32"]  # fmt: skip
        (row,) = sample.main(common.parse(common.Sample, words, "sample.py"))
        assert row.text == wanted.split(tokenization.END_OF_TEXT)[0]


def test_a_published_deepseek_config_is_understood():
    """What deepseek-ai/DeepSeek-V3 and moonshotai/Moonlight-16B-A3B have in theirs, as far as it matters."""
    both = dict(model_type="deepseek_v3", hidden_act="silu", attention_bias=False, moe_layer_freq=1,
                norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", tie_word_embeddings=False,
                kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)  # fmt: skip
    v3 = dict(both, vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
              num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1,
              n_routed_experts=256, routed_scaling_factor=2.5, q_lora_rank=1536, n_group=8, topk_group=4,
              num_experts_per_tok=8, first_k_dense_replace=3, rms_norm_eps=1e-6, rope_theta=10000,
              rope_scaling=dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                                original_max_position_embeddings=4096))  # fmt: skip
    moonlight = dict(both, vocab_size=163840, hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408,
                     num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2,
                     n_routed_experts=64, routed_scaling_factor=2.446, q_lora_rank=None, n_group=1, topk_group=1,
                     num_experts_per_tok=6, first_k_dense_replace=1, rms_norm_eps=1e-5, rope_theta=50000.0,
                     rope_scaling=None)  # fmt: skip
    for config, name in [(v3, "deepseek-v3-671b"), (moonlight, "moonlight-16b")]:
        flags, preset = hf.deepseek_flags(json.loads(json.dumps(config))), presets.preset(name)
        stretched = {"rope_factor", "rope_mscale", "rope_original_T"}  # the preset trains before the context is
        for flag in flags.keys() - stretched:
            wanted = getattr(preset.model, flag)
            assert flags[flag] == wanted or flag in ("expert_dim", "ffn_dim"), flag
        assert utils.replace(preset, **{k: v for k, v in flags.items() if k not in stretched}) == preset
