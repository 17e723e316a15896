"""Models of transformers against Megatron-Core: `dcp` converts, this script says what is right.

interop_megatron_hf.py save DIR        for every family of models: DIR/NAME/hf, written by transformers;
                                       DIR/NAME/megatron, the same weights saved by Megatron-Core
interop_megatron_hf.py check DIR OUT   OUT/NAME/hf, made of DIR/NAME/megatron, is the model that transformers
                                       wrote; OUT/NAME/megatron, made of DIR/NAME/hf, holds what Megatron-Core
                                       saved; OUT/NAME/back, made of that, is the model again

The weights change sides in `megatron_weights`, a few lines of PyTorch that know nothing of dcp."""
import argparse
import os

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import interop_common as common
import torch
from interop_common import raw
from interop_megatron import listing_works, without_cuda

TOKENS = torch.arange(36).reshape(3, 12) * 5 % 60


def models():
    """Models with random weights: name to (class, config)."""
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    dense = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=64, tie_word_embeddings=False)
    moe = dict(dense, moe_intermediate_size=24, num_experts_per_tok=2)
    latent = dict(moe, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4,
                  n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1)
    return {
        # A vocabulary that Megatron-Core pads.
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**{**dense, "vocab_size": 61, "rope_theta": 5e5})),
        "llama_tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**{**dense, "tie_word_embeddings": True, "num_key_value_heads": 1})),
        "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**{**dense, "head_dim": 12})),
        "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**{**dense, "tie_word_embeddings": True})),
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**dense, head_dim=16)),
        "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**dense, num_local_experts=4)),
        "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**moe, head_dim=16, num_experts=4, norm_topk_prob=True)),
        "deepseek_v2": (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config(**latent, q_lora_rank=None)),
        "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(**latent, q_lora_rank=24)),
        "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**dense, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)),
    }


def build(name, number):
    kind, config = models()[name]
    torch.manual_seed(number)
    model = kind(config)
    with torch.no_grad():
        # Norms and biases begin as ones and zeros, which would be equal in any order.
        for value in [*model.parameters(), *(v for n, v in model.named_buffers() if "bias" in n)]:
            if value.dim() == 1:
                value.add_(torch.randn(value.shape) * 0.1)
    if name in ("llama", "qwen3_moe"):
        model = model.to(torch.bfloat16)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float().contiguous()


# ---- the reference ----------------------------------------------------------------------------


def grouped(q, k, v, groups):
    """Rows of queries, keys and values as Megatron-Core has them: of each group of queries the queries, the
    key, the value."""
    rows = []
    for group in range(groups):
        for part in (q, k, v):
            size = part.shape[0] // groups
            rows.append(part[group * size : (group + 1) * size])
    return torch.cat(rows)


def llama_layer(w, config, layer):
    """A layer of every family but GPT-2: name within the layer to weight."""
    at = "model.layers.%d." % layer
    groups = config.num_key_value_heads
    found = {}
    attention = "self_attention."
    if hasattr(config, "kv_lora_rank"):
        found["input_layernorm.weight"] = w[at + "input_layernorm.weight"]
        for ours, theirs in [
            ("linear_q_proj.weight", "q_proj.weight"), ("linear_q_down_proj.weight", "q_a_proj.weight"),
            ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight"), ("linear_q_up_proj.weight", "q_b_proj.weight"),
            ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight"),
            ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight"), ("linear_kv_up_proj.weight", "kv_b_proj.weight"),
        ]:
            if at + "self_attn." + theirs in w:
                found[attention + ours] = w[at + "self_attn." + theirs]
    else:
        found[attention + "linear_qkv.layer_norm_weight"] = w[at + "input_layernorm.weight"]
        if at + "self_attn.qkv_proj.weight" in w:
            whole, head = w[at + "self_attn.qkv_proj.weight"], config.hidden_size // config.num_attention_heads
            found[attention + "linear_qkv.weight"] = grouped(*whole.split([config.hidden_size, groups * head, groups * head]), groups)
        for kind in ("weight", "bias"):
            if at + "self_attn.q_proj." + kind in w:
                q, k, v = (w[at + "self_attn.%s_proj.%s" % (name, kind)] for name in "qkv")
                found[attention + "linear_qkv." + kind] = grouped(q, k, v, groups)
        for name in "qk":
            if at + "self_attn.%s_norm.weight" % name in w:
                found[attention + "%s_layernorm.weight" % name] = w[at + "self_attn.%s_norm.weight" % name]
    found[attention + "linear_proj.weight"] = w[at + "self_attn.o_proj.weight"]

    norm, mlp = w[at + "post_attention_layernorm.weight"], at + "mlp."
    moe = at + ("block_sparse_moe." if config.model_type == "mixtral" else "mlp.")
    if moe + "gate.weight" in w:
        gate, up, down = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        experts = range(w[moe + "gate.weight"].shape[0])
        one = lambda expert, name: w[moe + "experts.%d.%s.weight" % (expert, name)]
        found["pre_mlp_layernorm.weight"] = norm
        found["mlp.router.weight"] = w[moe + "gate.weight"]
        if moe + "gate.e_score_correction_bias" in w:
            found["mlp.router.expert_bias"] = w[moe + "gate.e_score_correction_bias"]
        found["mlp.experts.experts.linear_fc1.weight"] = torch.stack([torch.cat([one(e, gate), one(e, up)]) for e in experts])
        found["mlp.experts.experts.linear_fc2.weight"] = torch.stack([one(e, down) for e in experts])
        if moe + "shared_experts.gate_proj.weight" in w:
            shared = [w[moe + "shared_experts.%s.weight" % name] for name in (gate, up, down)]
            found["mlp.shared_experts.linear_fc1.weight"] = torch.cat(shared[:2])
            found["mlp.shared_experts.linear_fc2.weight"] = shared[2]
    else:
        found["mlp.linear_fc1.layer_norm_weight"] = norm
        fused = w.get(mlp + "gate_up_proj.weight")
        found["mlp.linear_fc1.weight"] = torch.cat([w[mlp + "gate_proj.weight"], w[mlp + "up_proj.weight"]]) if fused is None else fused
        found["mlp.linear_fc2.weight"] = w[mlp + "down_proj.weight"]
    return found


def gpt2_layer(w, config, layer):
    at = "transformer.h.%d." % layer
    found = {}
    for kind in ("weight", "bias"):
        # Its linear layers are stored [in, out].
        turned = lambda name: w[at + name + "." + kind].t() if kind == "weight" else w[at + name + "." + kind]
        q, k, v = turned("attn.c_attn").chunk(3)
        found["self_attention.linear_qkv." + kind] = grouped(q, k, v, config.n_head)
        found["self_attention.linear_qkv.layer_norm_" + kind] = w[at + "ln_1." + kind]
        found["self_attention.linear_proj." + kind] = turned("attn.c_proj")
        found["mlp.linear_fc1.layer_norm_" + kind] = w[at + "ln_2." + kind]
        found["mlp.linear_fc1." + kind] = turned("mlp.c_fc")
        found["mlp.linear_fc2." + kind] = turned("mlp.c_proj")
    return found


def megatron_weights(model):
    """All weights as Megatron-Core stores them, without padding; the number of prepended axes of each."""
    config = model.config
    w = {name: value.detach() for name, value in hf_weights(model).items()}
    gpt2 = config.model_type == "gpt2"
    layer_of = gpt2_layer if gpt2 else llama_layer
    layers = [layer_of(w, config, layer) for layer in range(config.num_hidden_layers)]
    found = {}
    expert_axes = lambda name: int(".experts.experts." in name)
    if all(layer.keys() == layers[0].keys() for layer in layers):
        for name in layers[0]:
            found["decoder.layers." + name] = (torch.stack([layer[name] for layer in layers]), 1 + expert_axes(name))
    else:
        # Layers of several kinds keep their numbers.
        for number, layer in enumerate(layers):
            for name, value in layer.items():
                found["decoder.layers.%d.%s" % (number, name)] = (value, expert_axes(name))
    if gpt2:
        whole = {"embedding.word_embeddings.weight": "transformer.wte.weight", "embedding.position_embeddings.weight": "transformer.wpe.weight",
                 "decoder.final_layernorm.weight": "transformer.ln_f.weight", "decoder.final_layernorm.bias": "transformer.ln_f.bias"}
    else:
        whole = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "decoder.final_layernorm.weight": "model.norm.weight",
                 "output_layer.weight": "lm_head.weight"}
    for ours, theirs in whole.items():
        if theirs in w and not (ours == "output_layer.weight" and config.tie_word_embeddings):
            found[ours] = (w[theirs], 0)
    return {name: (value.contiguous(), axes) for name, (value, axes) in found.items()}


def hf_weights(model):
    """The weights under the names that they have in files."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return open_folder(folder)


def arguments(config, padded, dtype):
    """What Megatron-Core's training script would be called with."""
    gpt2 = config.model_type == "gpt2"
    heads = config.num_attention_heads
    args = dict(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, num_attention_heads=heads, padded_vocab_size=padded,
        vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings, seq_length=config.max_position_embeddings,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, make_vocab_size_divisible_by=16, iteration=0, swiglu=not gpt2,
        normalization="LayerNorm" if gpt2 else "RMSNorm", add_bias_linear=gpt2, position_embedding_type="learned_absolute" if gpt2 else "rope",
        untie_embeddings_and_output_weights=not config.tie_word_embeddings, kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layernorm_epsilon=getattr(config, "rms_norm_eps", 1e-5), num_experts=None, transformer_impl="transformer_engine",
        ffn_hidden_size=4 * config.hidden_size if gpt2 else config.intermediate_size, group_query_attention=False, num_query_groups=heads,
        params_dtype=dtype, bf16=dtype == torch.bfloat16,
    )
    if gpt2:
        # The GELU that is fused with the bias is gelu_new.
        return argparse.Namespace(**args, openai_gelu=False, bias_gelu_fusion=True)
    groups = config.num_key_value_heads
    latent = hasattr(config, "kv_lora_rank")
    args.update(group_query_attention=groups != heads and not latent, num_query_groups=groups, rotary_base=config.rope_parameters["rope_theta"],
                qk_layernorm=config.model_type.startswith("qwen3") or latent, add_qkv_bias=config.model_type == "qwen2", multi_latent_attention=latent)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    if experts:
        each = getattr(config, "moe_intermediate_size", config.intermediate_size)
        args.update(num_experts=experts, moe_router_topk=config.num_experts_per_tok, moe_ffn_hidden_size=each, moe_layer_freq=1)
    if latent:
        dense = config.first_k_dense_replace
        args.update(
            q_lora_rank=config.q_lora_rank, kv_lora_rank=config.kv_lora_rank, qk_head_dim=config.qk_nope_head_dim, qk_pos_emb_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim, moe_layer_freq=[0] * dense + [1] * (config.num_hidden_layers - dense), moe_router_num_groups=config.n_group,
            moe_router_group_topk=config.topk_group, moe_router_topk_scaling_factor=config.routed_scaling_factor,
            moe_shared_expert_intermediate_size=config.n_shared_experts * config.moe_intermediate_size, rotary_scaling_factor=1.0,
            moe_router_score_function="sigmoid" if config.model_type == "deepseek_v3" else "softmax",
            moe_router_enable_expert_bias=config.model_type == "deepseek_v3", moe_router_pre_softmax=True,
        )
    return argparse.Namespace(**args)


def padded(value, rows):
    """With rows that mean nothing, as training leaves them."""
    return torch.cat([value, torch.full((rows - value.shape[0], *value.shape[1:]), 7.5, dtype=value.dtype)])


# ---- Megatron-Core ----------------------------------------------------------------------------


def save_rank(rank, world, folder):
    without_cuda()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    for number, name in enumerate(models()):
        model = build(name, number)
        path = os.path.join(folder, name)
        model.save_pretrained(os.path.join(path, "hf"))
        rows = -(-model.config.vocab_size // 16) * 16
        state = {}
        for key, (value, axes) in megatron_weights(model).items():
            if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                value = padded(value, rows)
            grid = value.shape[:axes]
            for place in torch.cartesian_prod(*map(torch.arange, grid)).reshape(-1, axes).tolist() if axes else [[]]:
                offsets = [(axis, at, grid[axis]) for axis, at in enumerate(place)]
                state["%s %s" % (key, place)] = ShardedTensor.from_rank_offsets(key, value[tuple(place)].clone(), *offsets, prepend_axis_num=axes)
        checkpoint = os.path.join(path, "megatron")
        os.makedirs(checkpoint)
        common_state = {"args": arguments(model.config, rows, model.dtype), "checkpoint_version": 3.0, "iteration": 7}
        dist_checkpointing.save({"model": state, **common_state}, checkpoint)


def save(folder):
    os.makedirs(folder)
    common.on_ranks(save_rank, 1, folder)


def check_megatron(rank, world, folder, out):
    without_cuda()
    listing_works()
    from megatron.core import dist_checkpointing

    for name in models():
        theirs, ours = (dist_checkpointing.load_plain_tensors(os.path.join(path, name, "megatron")) for path in (folder, out))
        config = models()[name][1]
        for tensors in (theirs, ours):
            for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                if key in tensors:
                    tensors[key] = tensors[key][: config.vocab_size]
        tensors = lambda state: {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        same(tensors(ours), tensors(theirs), os.path.join(out, name, "megatron"))


# ---- transformers -----------------------------------------------------------------------------


def open_folder(path):
    from safetensors.torch import load_file

    found = {}
    for file in sorted(os.listdir(path)):
        if file.endswith(".safetensors"):
            found.update(load_file(os.path.join(path, file)))
    return found


def same(found, wanted, what):
    assert set(found) == set(wanted), "%s: keys differ: %s" % (what, sorted(set(found) ^ set(wanted)))
    for name, tensor in wanted.items():
        there = found[name]
        assert there.dtype == tensor.dtype and there.shape == tensor.shape, "%s: %s is %s %s, not %s %s" % (
            what, name, there.dtype, tuple(there.shape), tensor.dtype, tuple(tensor.shape))
        assert raw(there) == raw(tensor), "%s: %s differs" % (what, name)


def configuration(path):
    """All that transformers reads in config.json, and what it takes for the rest."""
    from transformers import AutoConfig

    return {name: value for name, value in AutoConfig.from_pretrained(path).to_dict().items() if name != "_name_or_path"}


def check_models(folder, out):
    for name, (kind, _) in models().items():
        theirs = os.path.join(folder, name, "hf")
        weights, original = open_folder(theirs), kind.from_pretrained(theirs, dtype="auto").eval()
        for side in ("hf", "back"):
            path = os.path.join(out, name, side)
            same(open_folder(path), weights, path)
            model, report = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
            wrong = {kind: found for kind, found in report.items() if found}
            assert not wrong, "%s: transformers found %s" % (path, wrong)
            assert torch.equal(logits(model.eval()), logits(original)), "%s: other logits" % path
        # What came from transformers comes back with all that it said.
        found, wanted = configuration(os.path.join(out, name, "back")), configuration(theirs)
        wrong = {field for field in found.keys() | wanted.keys() if found.get(field) != wanted.get(field)}
        assert not wrong, "%s: config.json has other %s" % (name, sorted(wrong))
        print("%s: the tensors of Megatron-Core, the weights, logits and configuration of transformers" % name, flush=True)


def check(folder, out):
    common.on_ranks(check_megatron, 1, folder, out)
    check_models(folder, out)


if __name__ == "__main__":
    commands = {"save": save, "check": check}
    common.main(lambda what, *args: commands[what](*args))
