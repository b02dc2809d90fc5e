"""The mathematics against Hugging Face's independent implementation of DeepSeek-V3, with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, furthest, small_config
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import main
import model

torch = pytest.importorskip("torch", reason="torch is not installed; pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

# What all sizes share, all of them odd; below what each adds or changes
DEEPSEEK = dict(tied=False, layers_per_block=1, moe_rope=True, blocks=2, first_layers=1, n_head=4, nope_dim=12,
                v_dim=10, dhR=6, latent_dim=20, q_latent_dim=18, routed_scaling=2.5, capacity_factor=0.0)  # fmt: skip
SIZES = {
    "groups": dict(n_experts=8, n_groups=4, k_groups=2, k=3),
    "no query latent": dict(q_latent_dim=0, first_layers=2, n_shared=2, norm_eps=1e-5, rope_base=50_000.0),
    "yarn": dict(
        rope_factor=40.0, rope_original_T=16, first_layers=0, model_dimension=40, nope_dim=7, v_dim=13, dhR=10
    ),
}


def reference(cfg):
    """DeepseekV3ForCausalLM of the same shape with random weights, every one of which matters."""
    m = cfg.model
    rope = dict(rope_type="default", rope_theta=m.rope_base)
    if m.rope_factor > 1:
        rope |= dict(rope_type="yarn", factor=m.rope_factor, original_max_position_embeddings=m.rope_original_T,
                     beta_fast=32, beta_slow=1, mscale=m.rope_mscale, mscale_all_dim=m.rope_mscale)  # fmt: skip
    config = transformers.DeepseekV3Config(
        vocab_size=m.vocab_size, hidden_size=m.model_dimension, intermediate_size=m.ffn_width,
        moe_intermediate_size=m.expert_width, num_hidden_layers=m.first_layers + m.blocks, num_attention_heads=m.n_head,
        num_key_value_heads=m.n_head, n_shared_experts=m.n_shared, n_routed_experts=m.n_experts,
        routed_scaling_factor=m.routed_scaling, kv_lora_rank=m.latent_dim, q_lora_rank=m.q_latent or None,
        qk_rope_head_dim=m.dhR, qk_nope_head_dim=m.head_dim, v_head_dim=m.value_dim, n_group=m.n_groups,
        topk_group=m.k_groups, num_experts_per_tok=m.k, first_k_dense_replace=m.first_layers, norm_topk_prob=True,
        max_position_embeddings=m.T, rms_norm_eps=m.norm_eps, rope_parameters=rope, num_mtp_layers=0,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.DeepseekV3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, p in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif "correction_bias" in name:
                p.uniform_(-0.2, 0.2)
            elif "inv_freq" not in name:
                p.normal_(0, 0.5 if "gate.weight" in name else 1.5 * p.shape[-1] ** -0.5)
    return theirs


def ours_from(tensors, cfg):
    """Our parameter tree of the tensors {name: array} of DeepseekV3ForCausalLM: the weights, or their gradients."""
    m = cfg.model
    K, V, R = m.head_dim, m.value_dim, m.latent_dim
    halves = np.r_[0 : m.dhR : 2, 1 : m.dhR : 2]  # theirs rotates neighbouring channels, ours those half of dhR apart

    def layer(n):
        get = lambda name: tensors[f"model.layers.{n}.{name}.weight"].T  # noqa: E731
        q = get("self_attn.q_b_proj" if m.q_latent else "self_attn.q_proj").reshape(-1, m.n_head, K + m.dhR)
        kv = get("self_attn.kv_a_proj_with_mqa")
        down = [get("self_attn.q_a_proj")] if m.q_latent else []
        attention = dict(
            norm=get("input_layernorm"),
            down=np.concatenate([*down, kv[:, :R], kv[:, R:][:, halves]], 1),
            kv_norm=get("self_attn.kv_a_layernorm"),
            q_up=np.concatenate([q[..., :K], q[..., K:][..., halves]], -1),
            kv_up=get("self_attn.kv_b_proj").reshape(R, m.n_head, K + V),
            out=get("self_attn.o_proj").reshape(m.n_head, V, -1),
        )
        if m.q_latent:
            attention["q_norm"] = get("self_attn.q_a_layernorm")

        def ffn(at):
            up = np.stack([get(f"{at}.gate_proj"), get(f"{at}.up_proj")], 1)
            return dict(up=up, down=get(f"{at}.down_proj"))

        out = dict(attention=attention, norm=get("post_attention_layernorm"))
        if n < m.first_layers:
            return out | dict(ffn=ffn("mlp"))
        up, down = (tensors[f"model.layers.{n}.mlp.experts.{w}"].swapaxes(1, 2) for w in ("gate_up_proj", "down_proj"))
        bias = tensors.get(f"model.layers.{n}.mlp.gate.e_score_correction_bias", np.zeros(m.n_experts, np.float32))
        experts = dict(up=up.reshape(m.n_experts, -1, 2, m.expert_width), down=down)
        return out | dict(router=get("mlp.gate"), bias=bias, experts=experts, shared=ffn("mlp.shared_experts"))

    def rows(name):
        return np.pad(tensors[name], ((0, m.padded_vocab - m.vocab_size), (0, 0)))

    layers = [layer(n) for n in range(m.first_layers + m.blocks)]
    stack = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves), *trees)  # noqa: E731
    tree = dict(embedding=rows("model.embed_tokens.weight"), head=rows("lm_head.weight"),
                norm=tensors["model.norm.weight"], moe=stack(layers[m.first_layers :]))  # fmt: skip
    if m.first_layers:
        tree["first"] = stack(layers[: m.first_layers])
    return tree


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)])
def test_deepseek_v3_gives_the_logits_and_gradients_of_transformers(size, mesh_shape):
    assert mesh_shape in MESHES
    cfg = small_config(mesh_shape, sequences=8, alpha=0.0, **{**DEEPSEEK, **SIZES[size]})
    m, mesh, theirs = cfg.model, main.make_mesh(cfg), reference(cfg)
    rows = np.random.default_rng(0).integers(0, m.vocab_size, (8, m.T + 1))
    logits = theirs(torch.tensor(rows[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(rows[:, 1:]).flatten())
    loss.backward()
    arrays = {name: p.detach().numpy() for name, p in [*theirs.named_parameters(), *theirs.named_buffers()]}
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}

    table = model.param_table(cfg)
    params = jax.tree.map(jnp.asarray, ours_from(arrays, cfg))
    assert jax.tree.map(jnp.shape, params) == model.table_map(lambda p: p.shape, table)
    params = jax.device_put(params, model.shardings(table, mesh))
    decode = jax.jit(model.make_decode(cfg, mesh))
    at, cache = [0, 1, m.T // 2, m.T - 1], model.empty_cache(cfg, 8, m.T)
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
    assert furthest(ours_from(gradients, cfg), our_gradients)[0] < 1e-3
