"""Writes golden vectors of weighted means, computed by PyTorch, to the safetensors file of argv[1].

For every dtype the tensors `a.DTYPE`, `b.DTYPE`, `c.DTYPE`, their plain mean as `mean.DTYPE`, and
`weighted.DTYPE` with the weights 0.5, 0.3, 0.2; both summed in float32 (float64 for float64).
`as_bfloat16.DTYPE` is the plain mean as bfloat16.
"""

import sys

import torch
from safetensors.torch import save_file

DTYPES = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn"]


def mean(tensors, weights, wide):
    total = tensors[0].to(wide) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:]):
        total = total + tensor.to(wide) * weight
    return total / sum(weights)


def main(path):
    generator = torch.Generator().manual_seed(3)
    vectors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        three = [torch.randn(4, 75, generator=generator, dtype=torch.float64).to(dtype)
                 for _ in range(3)]
        for letter, tensor in zip("abc", three):
            vectors[f"{letter}.{name}"] = tensor
        plain = mean(three, [1.0, 1.0, 1.0], wide)
        vectors[f"mean.{name}"] = plain.to(dtype)
        vectors[f"weighted.{name}"] = mean(three, [0.5, 0.3, 0.2], wide).to(dtype)
        if name != "float64":
            vectors[f"as_bfloat16.{name}"] = plain.to(torch.bfloat16)
    save_file(vectors, path, {"torch": torch.__version__})


main(sys.argv[1])
