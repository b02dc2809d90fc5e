"""The mathematics against Hugging Face's independent implementations of DeepSeek-V3 and GPT-2, with random weights."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from conftest import (
    SMALL,
    SMALL_DEEPSEEK,
    SMALL_GPT2,
    SMALL_QWEN3,
    random_transformer,
    settled,
    small_config,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
import model
import presets
import utils
from architectures import architecture, hf_format
from data import tokenization
from inference import decoding, hugging_face, weights
from tools import common, hf, sample
from training import steps

torch = pytest.importorskip("torch", reason="pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="pip install torch transformers")

# All sizes odd
DEEPSEEK = SMALL_DEEPSEEK | dict(n_groups=1, k_groups=1, experts_per_token=2, balance_weight=0.0)
DEEPSEEK |= dict(blocks=2, rope_dim=6, latent_dim=20, q_latent_dim=18)
GROUPS = dict(n_experts=8, n_groups=4, k_groups=2, experts_per_token=3, n_shared=2)
NO_LATENT = dict(q_latent_dim=0, first_layers=2, rope_base=5e4, n_shared=0)
SPARSE = {**NO_LATENT, "first_layers": 0, "n_shared": 1, "n_experts": 16, "experts_per_token": 4}
SPARSE |= dict(tied=True, expert_dim=8)
DENSE = dict(n_kv_head=2, blocks=2, n_experts=0, experts_per_token=0, tied=False)
# Models that transformers does not know, by the code that an export writes beside the weights
OWN = SMALL | dict(balance_weight=0.0, n_head=2, blocks=2, head_dim=9, first_layers=1, rope_dim=6)
OWN_GELU = OWN | GROUPS | dict(activation="gelu", layers_per_block=1, embedding_norm=False)
OWN_GELU |= dict(q_latent_dim=0, tied=False, n_shared=0)
SIZES = {
    "own": OWN,
    "own gelu": OWN_GELU,
    "groups": DEEPSEEK | GROUPS,
    "no query latent": DEEPSEEK | NO_LATENT | dict(sequence_parallel="megatron"),
    "moe-sparse": DEEPSEEK | SPARSE,
    "gpt2": dict(SMALL_GPT2, model_dimension=36, T=24),
    "gpt2 wide": dict(SMALL_GPT2, model_dimension=28, n_head=2, blocks=2, ffn_dim=0, tied=False),
    "qwen3": dict(SMALL_QWEN3, balance_weight=0.0),
    "qwen3 dense": SMALL_QWEN3 | DENSE,
}
for flags, exponent in zip(SIZES.values(), np.random.default_rng(0).uniform(-6, -3, len(SIZES))):
    flags["norm_eps"] = float(10**exponent)


def reference(cfg, folder):
    """transformers' model of the same shape with random weights, every one of which matters."""
    form = architecture(cfg.model.architecture).hugging_face
    theirs = random_transformer(form.config(cfg.model), folder).eval()
    with torch.no_grad():
        for name, p in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "norm" in name or ".ln_" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("conv"):
                p.uniform_(-0.2, 0.2)
            elif "correction_bias" in name:
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
    m, mesh, theirs = cfg.model, steps.make_mesh(cfg), reference(cfg, tmp_path)
    rows = np.random.default_rng(0).integers(0, m.vocab_size, (8, m.T + 1))
    logits = theirs(torch.tensor(rows[:, :-1])).logits
    wanted = torch.tensor(rows[:, 1:]).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted)
    loss.backward()

    theirs.save_pretrained(tmp_path)
    flags, load = weights.open_weights(str(tmp_path))
    assert settled(utils.replace(cfg, **flags).model) == settled(m)
    params = load(steps.abstract_params(cfg, mesh))
    decode, cache = jax.jit(decoding.make_decode(cfg, mesh)), decoding.empty_cache(cfg, 8, m.T)
    at = [0, 1, m.T // 2, m.T - 1]
    ids = rows[:, :-1].astype(np.int32)
    ours = [decode(params, ids, cache, np.zeros(8, int), np.full(8, i))[0] for i in at]
    ours = np.stack(ours, 1)[..., : m.vocab_size]
    assert np.abs(ours - logits[:, at].detach().numpy()).max() < 2e-4

    batch = rows.astype(np.int32).reshape(cfg.data.microbatches, -1, m.T + 1)
    sharding = NamedSharding(mesh, P(*collectives.BATCH_SPEC[1:]))
    batch = [jax.device_put(b, sharding) for b in (batch[..., :-1], batch[..., 1:])]
    grad = jax.jit(jax.value_and_grad(model.make_loss(cfg, mesh, train=True), has_aux=True))
    (our_loss, _), our_gradients = grad(params, *batch, jax.random.key(0), 0)
    assert abs(float(our_loss) - loss.item()) < 1e-5
    wanted = gradients_of(theirs, m)
    for t in architecture(m.architecture).hugging_face.tensors(m):
        if "correction_bias" in t.name or not math.prod(t.shape):
            continue  # moved by the load, not by a gradient; or of no shared experts
        theirs_ = wanted.pop(t.name)
        ours = t.theirs(np.asarray(functools.reduce(dict.__getitem__, t.leaf, our_gradients))[t.at])
        assert np.abs(ours - theirs_).max() < 1e-3 * np.abs(theirs_).max(), t.name
    assert not wanted


@pytest.mark.parametrize("size", ["own", "groups", "gpt2", "qwen3"])
def test_text_continues_as_transformers_continues_it(size, train, text_shards, tmp_path):
    """From a prompt's text to the text after it, by two independent programs, of a run that knows its tokenizer."""
    flags = {**SIZES[size], "T": 80, "vocab_size": 512, "training_steps": 3, "max_tokens": 8}
    assert train((1, 1, 1), data=text_shards, prompt="x", **flags) == 0
    hf.export(str(tmp_path / "runs/run"), str(tmp_path / "exported"))
    own_code = dict(trust_remote_code=size == "own")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    make = transformers.AutoModelForCausalLM.from_pretrained
    theirs = make(tmp_path / "exported", **own_code)
    prompts = ["def test_of(", "x"]  # transformers pads the second
    for name, before in [("exported", ""), ("runs/run", tokenization.END_OF_TEXT)]:
        inputs = [before + prompt for prompt in prompts]
        inputs = tokenizer(inputs, padding=True, return_tensors="pt")
        plan = dict(max_new_tokens=64, do_sample=False, eos_token_id=None)
        generated = theirs.generate(**inputs, **plan)[:, inputs.input_ids.shape[1] :]
        wanted = tokenizer.batch_decode(generated)
        words = [str(tmp_path / name), "--prompt", *prompts]
        words += "--max_tokens 64 --temperature 0 --n_devices 1 --model_dtype float32".split()
        rows = sample.main(utils.read_flags(common.Sample, words, "sample.py"))
        ends = [text.split(tokenization.END_OF_TEXT)[0] for text in wanted]
        assert [row.text for row in rows] == ends


# config.json of deepseek-ai/DeepSeek-V3, and what others have otherwise
PUBLISHED = json.loads("""{
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "seq_aux": true,
    "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280
}""")
# of moonshotai/Moonlight-16B-A3B
MOONLIGHT = PUBLISHED | json.loads("""{
    "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_size": 2048,
    "intermediate_size": 11264, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null, "quantization_config": null,
    "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "rope_scaling": null,
    "topk_group": 1, "vocab_size": 163840, "pad_token_id": 163838
}""")
# of openai-community/gpt2
GPT2 = json.loads("""{
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
    "summary_use_proj": true,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
}""")
# of Qwen/Qwen3-0.6B-Base
QWEN3 = json.loads("""{
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}""")
# of Qwen/Qwen3-30B-A3B-Base
QWEN3_MOE = QWEN3 | json.loads("""{
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 48, "model_type": "qwen3_moe", "num_attention_heads": 32, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "tie_word_embeddings": false, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
    "output_router_logits": false, "router_aux_loss_coef": 0.001
}""")


CONFIGS = {"deepseek-v3-671b": PUBLISHED, "moonlight-16b": MOONLIGHT, "gpt2-124m": GPT2}
CONFIGS |= {"qwen3-0.6b": QWEN3, "qwen3-30b-a3b": QWEN3_MOE}


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_understood(name, saved):
    """As it is, and as transformers writes it again."""
    config, preset = CONFIGS[name], presets.preset(name)
    architecture_name, form = hugging_face.format_of(config, "")
    assert architecture_name == preset.model.architecture
    if saved:
        config = transformers.AutoConfig.for_model(**config).to_dict()
    flags = hf_format.read_flags(form, json.loads(json.dumps(config)), "")
    assert flags.pop("T") == min(preset.model.T, 4096)
    assert settled(utils.replace(preset, **flags).model) == settled(preset.model)
