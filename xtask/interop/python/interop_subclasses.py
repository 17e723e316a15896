"""Tensors of torchao's classes, which DCP and torch.save store as objects of several tensors, and
PyTorch's quantized ones, which have a scale beside their elements.

interop_subclasses.py save DIR        writes them, and `plain.pt` with their plain numbers
interop_subclasses.py check DIR OUT   compares what `dcp convert` made of them, their plain numbers too
"""
import os

import interop_common as common
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8
from torchao.quantization import (
    Float8Tensor, Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8Tensor, Int8WeightOnlyConfig, PerBlock, PerGroup, PerRow,
    PerTensor, quantize_,
)
from torchao.quantization.quant_primitives import MappingType


def state(seed, rows=64):
    torch.manual_seed(seed)
    tensors = {
        "signed": OptimState8bit.zeros((rows, 64), signed=True, block_size=64),
        "unsigned": OptimState8bit.zeros((rows, 64), signed=False, block_size=64),
        "four": OptimState4bit.zeros((rows, 64), signed=True, block_size=64),
        "fp8": OptimStateFp8.zeros((rows, 64), block_size=64),
    }
    for name, tensor in tensors.items():
        values = torch.randn(rows, 64)
        tensor.copy_(values.abs() if name == "unsigned" else values)
    for name, config in (
        ("int8", Int8WeightOnlyConfig()), ("float8", Float8WeightOnlyConfig()), ("dynamic", Int8DynamicActivationInt8WeightConfig()),
    ):
        model = torch.nn.Linear(64, rows, bias=False).to(torch.bfloat16)
        quantize_(model, config)
        tensors[name] = model.weight.detach()
    # The scales are the same for all seeds: a load with DCP keeps those of the target.
    values = torch.randn(rows, 64)
    scales = torch.arange(rows) * 0.1 + 0.1
    tensors["per_tensor"] = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    tensors["per_channel"] = torch.quantize_per_channel(values, scales, torch.arange(rows), 0, torch.quint8)
    tensors["bias"] = torch.randn(3)
    return tensors


def others():
    """Other layouts: blocks in two and three dimensions, one scale for all, zero points, scales in bfloat16."""
    torch.manual_seed(3)
    weight, matrices = torch.randn(32, 64), torch.randn(3, 16, 32)
    tensors = {
        "int8_tensor": Int8Tensor.from_hp(weight.bfloat16(), granularity=PerTensor()),
        "int8_groups": Int8Tensor.from_hp(weight, granularity=PerGroup(16)),
        "int8_zero": Int8Tensor.from_hp(weight.abs().bfloat16(), granularity=PerRow(), mapping_type=MappingType.ASYMMETRIC),
        "int8_half": Int8Tensor.from_hp(weight.half(), granularity=PerRow()),
        "float8_tensor": Float8Tensor.from_hp(weight.bfloat16(), granularity=PerTensor()),
        "float8_blocks": Float8Tensor.from_hp(weight, granularity=PerBlock([8, 16])),
        "float8_e5m2": Float8Tensor.from_hp(matrices, float8_dtype=torch.float8_e5m2, granularity=PerRow()),
        "turned": Float8Tensor.from_hp(weight, granularity=PerRow()).t(),
        "odd": OptimState8bit.zeros((6, 10), signed=True, block_size=20),
        "four_odd": OptimState4bit.zeros((6, 10), signed=False, block_size=20),
    }
    tensors["odd"].copy_(torch.randn(6, 10))
    tensors["four_odd"].copy_(torch.rand(6, 10))
    return tensors


def plain(tensors):
    return {name: tensor.dequantize() if hasattr(tensor, "dequantize") and type(tensor) is not torch.Tensor else tensor for name, tensor in tensors.items()}


def save(folder):
    tensors = state(1)
    dcp.save({"w": tensors}, checkpoint_id=os.path.join(folder, "dcp"), no_dist=True)
    torch.save({"w": tensors}, os.path.join(folder, "file.pt"))
    unscaled = {name: tensor for name, tensor in tensors.items() if not tensor.is_quantized}
    torch.save({"w": {**unscaled, **others()}}, os.path.join(folder, "quantized.pt"))
    # The fixtures.
    small = state(1, rows=4)
    torch.save({"w": small}, os.path.join(folder, "small.pt"))
    torch.save({"w": plain(small)}, os.path.join(folder, "plain.pt"))
    dcp.save({"w": tensors["int8"]}, checkpoint_id=os.path.join(folder, "one"), no_dist=True)


def same(found, wanted, what):
    assert type(found) is type(wanted), "%s is a %s" % (what, type(found))
    if wanted.is_quantized:
        assert found.qscheme() == wanted.qscheme() and torch.equal(found, wanted), what
        return
    names = [name for name, value in vars(wanted).items() if isinstance(value, torch.Tensor)] if type(wanted) is not torch.Tensor else []
    for one, other in [(getattr(found, name), getattr(wanted, name)) for name in names] or [(found, wanted)]:
        assert one.dtype == other.dtype and common.raw(one) == common.raw(other), what


def check(folder, out):
    wanted = torch.load(os.path.join(folder, "file.pt"), weights_only=False)["w"]
    for name in ("dcp", "file"):
        loaded = {"w": state(2)}
        dcp.load(loaded, checkpoint_id=os.path.join(out, name), no_dist=True)
        for key, tensor in wanted.items():
            same(loaded["w"][key], tensor, "%s: %s" % (name, key))
    for key in ("bias", "per_tensor"):
        same(torch.load(os.path.join(out, "w.%s.pt" % key), weights_only=True), wanted[key], "dcp get: " + key)
    for name in ("copy.pt", "from_dcp.pt"):
        for key, tensor in torch.load(os.path.join(out, name), weights_only=False)["w"].items():
            same(tensor, wanted[key], "%s: %s" % (name, key))
    quantized = torch.load(os.path.join(folder, "quantized.pt"), weights_only=False)["w"]
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        found = load_file(os.path.join(out, name + ".safetensors"))
        assert len(found) == len(quantized)
        for key, tensor in quantized.items():
            expected = tensor if type(tensor) is torch.Tensor else tensor.dequantize(output_dtype=dtype)
            same(found["w." + key], expected.contiguous(), "%s: %s" % (name, key))


def everything(what, *args):
    if what == "save":
        os.makedirs(args[0])
        save(*args)
    else:
        check(*args)


if __name__ == "__main__":
    common.main(everything)
