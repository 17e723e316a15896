"""Megatron-Core's own GPTModel, on CPU processes, against transformers: the weights that `dcp` converts are
loaded strictly, and both compute the same logits.

interop_megatron_gpt.py load DIR OUT   GPTModel loads OUT/NAME/megatron, with the names of Transformer Engine's
                                       layers, and as TP2 OUT/NAME/local, with those of its own; both are made
                                       of DIR/NAME/hf
interop_megatron_gpt.py save DIR       GPTModel with random weights saves DIR/NAME/megatron as TP2
interop_megatron_gpt.py check DIR OUT  OUT/NAME/hf, made of DIR/NAME/megatron, is the same function in transformers

The families are those of interop_megatron_hf.py, a model is configured by the arguments in its checkpoint."""
import os

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1")

import contextlib
import copy
import dataclasses

import interop_common as common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interop_megatron import listing_works, without_cuda
from interop_megatron_hf import TOKENS, arguments, logits, models

# ---- Megatron-Core's model --------------------------------------------------------------------


def on_cpu():
    """The rest of what a model takes from CUDA."""
    without_cuda()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Nor is there Transformer Engine, which one module thinks and the other has no name for.
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None
    # Random states of a device; nothing is dropped here.
    CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()


def configuration(args):
    """What Megatron-LM makes of a run's arguments."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    # Its arguments begin as these, whatever the class has for them.
    usual = {"q_lora_rank": None, "rotary_scaling_factor": 1.0}
    fields = {field.name for field in dataclasses.fields(kind)}
    found = {name: value for name, value in {**usual, **vars(args)}.items() if name in fields}
    found.update(
        num_moe_experts=getattr(args, "num_experts", None), use_cpu_initialization=True, params_dtype=torch.float32, bf16=False, fp16=False,
        attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, moe_token_dispatcher_type="allgather",
        tensor_model_parallel_size=dist.get_world_size(), pipeline_model_parallel_size=1,
        bias_activation_fusion=not args.swiglu and getattr(args, "bias_gelu_fusion", True),
    )
    if args.swiglu:
        found.update(gated_linear_unit=True, activation_func=F.silu)
    if not getattr(args, "group_query_attention", False):
        found["num_query_groups"] = None
    if getattr(args, "norm_epsilon", None) is not None:
        found["layernorm_epsilon"] = args.norm_epsilon
    return kind(**found)


def specification(config, fused):
    """The local layers; `fused` with the names that Transformer Engine's layers have."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """For latent attention, which states the size of heads that Megatron-Core's own does not take."""

        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for layer in block.layer_specs:
        parts, latent = layer.submodules, config.multi_latent_attention
        parts.self_attention.submodules.core_attention = Attention
        if fused:
            names = {} if latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
            if latent:
                for part in ("q", "kv"):
                    names["self_attention.%s_layernorm." % part] = "self_attention.linear_%s_up_proj.layer_norm_" % part
            if "experts" not in vars(parts.mlp.submodules):
                names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
            parts.sharded_state_dict_keys_map = names
    return block


def gpt_model(args, fused):
    """A rank's part, with random weights."""
    from megatron.core.models.gpt import GPTModel

    config = configuration(args)
    model = GPTModel(
        config, specification(config, fused), args.padded_vocab_size, args.max_position_embeddings, parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, position_embedding_type=args.position_embedding_type,
        rotary_base=getattr(args, "rotary_base", 10000), rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
    )
    return model.eval()


def model_logits(model, args):
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        return model(TOKENS, positions, None)[..., : args.vocab_size].contiguous()


def parallel(ranks):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def close(found, wanted, what):
    apart, most = (found - wanted).abs().max().item(), wanted.abs().max().item()
    assert apart < 1e-5 * most, "%s: the logits are %.1e apart of %.1e" % (what, apart, most)
    print("%s: the same logits, but for %.0e of %.0e" % (what, apart, most), flush=True)


# ---- what dcp wrote ---------------------------------------------------------------------------


def is_engine_state(key):
    """Whether Transformer Engine's layers alone have this object."""
    module = key.rpartition("._extra_state")[0]
    return module.endswith(("norm", ".core_attention"))


def load_rank(rank, world, side, out, wanted):
    on_cpu()
    listing_works()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    parallel(world)
    for name in wanted:
        path = os.path.join(out, name, side)
        args = dist_checkpointing.load_common_state_dict(path)["args"]
        model = gpt_model(args, fused=side == "megatron")
        request = {"model": model.sharded_state_dict()}
        loaded, missing, unexpected = dist_checkpointing.load(request, path, strict=StrictHandling.RETURN_ALL)
        missing = [key for key in missing if not (side == "megatron" and is_engine_state(key))]
        assert not missing and not unexpected, "%s: not requested: %s; not there: %s" % (path, sorted(missing), sorted(unexpected))
        model.load_state_dict(loaded["model"])
        found = model_logits(model, args)
        if rank == 0:
            close(found, wanted[name], "%s, loaded as TP%d" % (name, world))


def load(folder, out):
    wanted = {}
    for name, (kind, _) in models().items():
        wanted[name] = logits(kind.from_pretrained(os.path.join(folder, name, "hf"), dtype=torch.float32).eval())
    for side, ranks in (("megatron", 1), ("local", 2)):
        common.on_ranks(load_rank, ranks, side, out, wanted)


# ---- what Megatron-Core wrote -----------------------------------------------------------------


def save_rank(rank, world, folder, runs):
    on_cpu()
    from megatron.core import dist_checkpointing

    parallel(world)
    for number, (name, args) in enumerate(runs.items()):
        torch.manual_seed(number)
        model = gpt_model(args, fused=False)
        with torch.no_grad():
            # Norms and biases begin as ones and zeros, which would be equal in any order.
            for value in [*model.parameters(), *(v for n, v in model.named_buffers() if n.endswith("expert_bias"))]:
                if value.dim() == 1:
                    value.add_(torch.randn(value.shape) * 0.1)
        path = os.path.join(folder, name)
        if rank == 0:
            os.makedirs(os.path.join(path, "megatron"))
        dist.barrier()
        state = {"model": model.sharded_state_dict(), "args": args, "checkpoint_version": 3.0, "iteration": 7}
        dist_checkpointing.save(state, os.path.join(path, "megatron"))
        found = model_logits(model, args)
        if rank == 0:
            torch.save(found, os.path.join(path, "logits.pt"))


def save(folder):
    runs = {}
    for name, (_, config) in models().items():
        runs[name] = arguments(config, -(-config.vocab_size // 32) * 32, torch.float32)
        runs[name].tensor_model_parallel_size, runs[name].transformer_impl = 2, "local"
    common.on_ranks(save_rank, 2, folder, runs)


def check(folder, out):
    from transformers import AutoModelForCausalLM

    for name in models():
        # As config.json has it: Phi-3's weights are those of a Llama in Megatron-Core.
        path = os.path.join(out, name, "hf")
        model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        wrong = {kind: found for kind, found in report.items() if found}
        assert not wrong, "%s: transformers found %s" % (path, wrong)
        close(logits(model.eval()), torch.load(os.path.join(folder, name, "logits.pt")), "%s, saved as TP2" % name)


if __name__ == "__main__":
    commands = {"load": load, "save": save, "check": check}
    common.main(lambda what, *args: commands[what](*args))
