"""Writes fixtures/peft/wide_*: adapters of models whose matrices are large enough for MKL's usual kernels.

Usage: peft_fixtures.py FOLDER [NAME...]. Needs peft 0.21, transformers and torch 2.15.
"""

import os
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

CASES = {
    "wide_lora": dict(r=8, lora_alpha=12, use_rslora=True, target_modules="all-linear"),
    "wide_dora": dict(r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "down_proj"]),
    "wide_embedding": dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "o_proj"]),
    "wide_fan": dict(r=4, lora_alpha=6, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    # PEFT corrects fan_in_fan_out for each class of modules, and saves that of the last one.
    "wide_mixed": dict(r=4, lora_alpha=6, target_modules=["attn.c_proj", "lm_head"]),
    "wide_tied": dict(r=4, lora_alpha=6, target_modules=["embed_tokens", "o_proj"]),
    "wide_untied": dict(r=4, lora_alpha=6, target_modules=["o_proj"], modules_to_save=["embed_tokens"]),
}


def model(name):
    if name in ("wide_fan", "wide_mixed"):
        sizes = dict(vocab_size=20, n_positions=8, n_embd=24, n_layer=1, n_head=2)
        return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=name == "wide_fan"))
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=name != "wide_embedding"))


def main(root, only):
    for name, settings in CASES.items():
        if only and name not in only:
            continue
        torch.manual_seed(3)
        base, adapter = os.path.join(root, name, "base"), os.path.join(root, name, "ckpt")
        plain = model(name)
        plain.save_pretrained(base)
        adapted = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        adapted.save_pretrained(adapter)
        os.remove(os.path.join(adapter, "README.md"))
        for dtype, file in ((torch.float32, "expected"), (torch.bfloat16, "expected_bf16")):
            again = type(plain).from_pretrained(base, dtype=dtype)
            merged = PeftModel.from_pretrained(again, adapter).merge_and_unload()
            tensors = dict(merged.state_dict())
            if tensors["lm_head.weight"].data_ptr() == merged.get_input_embeddings().weight.data_ptr():
                tensors.pop("lm_head.weight")
            save_file(tensors, os.path.join(root, name, f"{file}.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
