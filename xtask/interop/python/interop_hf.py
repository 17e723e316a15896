"""Hugging Face folders against the libraries themselves: safetensors, transformers, and PyTorch's
Hugging Face storage.

interop_hf.py save DIR        writes models and what they hold
interop_hf.py check DIR OUT   opens what `dcp convert` made of them
"""
import json
import os

import interop_common as common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interop_common import Shard, device_mesh, spread
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

os.environ["HF_HUB_OFFLINE"] = "1"

INDEX = "model.safetensors.index.json"
TOKENS = torch.arange(24).reshape(2, 12) % 64


def models():
    """Models with random weights, small enough for a moment's work: name to (class, config)."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    llama = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )
    gpt2 = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return {"llama": (transformers.LlamaForCausalLM, llama), "gpt2": (transformers.GPT2LMHeadModel, gpt2)}


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(TOKENS).logits.float().contiguous()


def save_models(folder):
    for number, (name, (kind, config)) in enumerate(models().items()):
        torch.manual_seed(number)
        model = kind(config)
        if name == "llama":
            model = model.to(torch.bfloat16)
        path = os.path.join(folder, name)
        model.save_pretrained(path, max_shard_size="20KB")
        # What a trainer leaves: the same model within a larger state.
        state = {"model": model.state_dict(), "optimizer": {"lr": 0.1}}
        dcp.save(state, checkpoint_id=os.path.join(folder, name + "_dcp"), no_dist=True)


def gpt_oss():
    """Weights of experts in MXFP4, with as many outputs as inputs where an exchange would not show
    in the shape."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"], eos_token_id=1, pad_token_id=0,
    )
    return transformers.GptOssForCausalLM, config


def save_gpt_oss(folder):
    kind, config = gpt_oss()
    torch.manual_seed(7)
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in kind(config).state_dict().items()}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        state[name + "_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        state[name + "_scales"] = torch.randint(110, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
    os.makedirs(folder)
    save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.architectures = ["GptOssForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def check_gpt_oss(folder, out):
    kind, _ = gpt_oss()
    # Without an accelerator transformers makes the weights plain numbers.
    original = kind.from_pretrained(folder, dtype=torch.bfloat16)
    model, report = kind.from_pretrained(out, dtype="auto", output_loading_info=True)
    wrong = {what: found for what, found in report.items() if found}
    assert not wrong, "%s: transformers found %s" % (out, wrong)
    same(model.state_dict(), original.state_dict(), out)
    assert torch.equal(logits(model), logits(original)), "%s: other logits" % out


def parts():
    """Tensors of many dtypes: name to (dtype, shape, axis that is cut or None)."""
    return {
        "rows": (torch.float32, (7, 5), 0), "columns": (torch.bfloat16, (4, 9), 1), "ints": (torch.int64, (6,), 0),
        "flags": (torch.bool, (5, 2), 0), "scalar": (torch.float32, (), None), "whole": (torch.float16, (3, 3), None),
        "eights": (torch.float8_e4m3fn, (8, 4), None),
    }


def save_parts(rank, world, folder):
    mesh = device_mesh((world,))
    state, whole = {}, {}
    for name, (dtype, shape, axis) in parts().items():
        tensor = common.tensor_by_formula(name, dtype, list(shape), 1)
        whole[name] = tensor
        if axis is None:
            if rank == 0:
                state[name] = tensor
        else:
            state[name] = spread(tensor, mesh, [Shard(axis)])
    numbers = {name: 1 + number % 2 for number, name in enumerate(parts())}
    for name, mapping in (("parts", None), ("parts_mapped", numbers)):
        writer = HuggingFaceStorageWriter(os.path.join(folder, name), fqn_to_index_mapping=mapping, save_distributed=True)
        dcp.save(state, storage_writer=writer)
    # Its consolidation fails on integers and turns scalars to zero (2.15).
    floats = {name: tensor for name, tensor in state.items() if tensor.dtype.is_floating_point and tensor.dim()}
    path = os.path.join(folder, "consolidated")
    numbers = {name: number for name, number in numbers.items() if name in ("rows", "columns", "whole", "eights")}
    writer = HuggingFaceStorageWriter(path, fqn_to_index_mapping=numbers, save_distributed=True, enable_consolidation=True)
    dcp.save(floats, storage_writer=writer)
    if rank == 0:
        save_file(whole, os.path.join(folder, "parts.safetensors"))


def open_folder(path):
    """All tensors of a folder, through its index if it has one, as the safetensors library sees them."""
    if not os.path.exists(os.path.join(path, INDEX)):
        assert [name for name in os.listdir(path) if name.endswith(".safetensors")] == ["model.safetensors"], path
        return load_file(os.path.join(path, "model.safetensors"))
    with open(os.path.join(path, INDEX)) as file:
        index = json.load(file)
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(os.path.join(path, file), "pt") as opened:
            assert opened.metadata()["format"] == "pt", file
            tensors[name] = opened.get_tensor(name)
    held = set()
    for file in set(index["weight_map"].values()):
        held |= set(load_file(os.path.join(path, file)))
    assert held == set(tensors), "%s: the index does not name %s" % (path, sorted(held ^ set(tensors)))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == size, "%s: total_size is wrong" % path
    return tensors


def same(found, wanted, what):
    assert set(found) == set(wanted), "%s: keys differ: %s" % (what, sorted(set(found) ^ set(wanted)))
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, "%s: %s is %s %s" % (what, name, found[name].dtype, tuple(found[name].shape))
        assert common.raw(found[name]) == common.raw(tensor), "%s: %s differs" % (what, name)


def check_models(folder, out):
    for name, (kind, _) in models().items():
        original = kind.from_pretrained(os.path.join(folder, name), dtype="auto")
        expected = logits(original)
        tensors = open_folder(os.path.join(folder, name))
        for source in ("", "_dcp", "_ranks"):
            path = os.path.join(out, name + source)
            assert len([file for file in os.listdir(path) if file.endswith(".safetensors")]) > 1, path
            model, report = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
            wrong = {kind: found for kind, found in report.items() if found}
            assert not wrong, "%s: transformers found %s" % (path, wrong)
            same(model.state_dict(), original.state_dict(), path)
            assert torch.equal(logits(model), expected), "%s: other logits" % path
            found = open_folder(path)
            # Of tied tensors the libraries write one, a state dict has both.
            same({key: found[key] for key in tensors}, tensors, path)
        # PyTorch's own reader, as a checkpoint of whole tensors, and of the shards of ranks.
        for path in (name, os.path.join(name + "_ranks", "sharded")):
            state = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
            dcp.load(state, storage_reader=HuggingFaceStorageReader(os.path.join(out, path)), no_dist=True)
            same(state, tensors, path)


def check_parts(folder, out):
    whole = load_file(os.path.join(folder, "parts.safetensors"))
    for name in ("parts", "parts_mapped"):
        same(load_file(os.path.join(out, name + ".safetensors")), whole, name)
        same(open_folder(os.path.join(out, name)), whole, name)
    floats = {name: tensor for name, tensor in whole.items() if tensor.dtype.is_floating_point and tensor.dim()}
    same(open_folder(os.path.join(out, "consolidated")), floats, "consolidated")


def everything(what, *args):
    if what == "save":
        (folder,) = args
        os.makedirs(folder)
        save_models(folder)
        save_gpt_oss(os.path.join(folder, "gpt_oss"))
        common.on_ranks(save_parts, 2, folder)
    else:
        check_models(*args)
        check_parts(*args)
        check_gpt_oss(*(os.path.join(place, "gpt_oss") for place in args))


if __name__ == "__main__":
    common.main(everything)
