"""Writes golden vectors of PyTorch's dtype casts on CPU to the safetensors file of argv[1].

`f32`, `f64` and `i64` are the bits that went in, `f32.to.bfloat16` and so on the bits that came
out, as unsigned or signed integers of the same width.
"""

import sys

import numpy as np
import torch
from safetensors.numpy import save_file

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
          "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(tensor):
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(),
                         BITS[tensor.element_size()])


def floats():
    """Every value and every tie of the 8-bit types, limits of the wider ones, random bits."""
    found = []
    for name in FLOATS[4:]:
        codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double()
        finite = torch.unique(codes[codes.isfinite()])
        found += [finite, (finite[1:] + finite[:-1]) / 2]
    edges = [0.0, 65504.0, 65519.0, 65520.0, 65536.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25,
             2.0**-14, 2.0**-133, 2.0**-134, 1.5 * 2.0**-134, 2.0**-149, 448.0, 464.0, 480.0,
             240.0, 248.0, 57344.0, 61440.0, 3.38953139e38, 3.3961775e38, 3.4028234663852886e38,
             1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11,
             float("inf"), float("nan")]
    found.append(torch.tensor(edges, dtype=torch.float64))
    generator = torch.Generator().manual_seed(7)
    random = torch.randint(-(2**31), 2**31, (300,), generator=generator, dtype=torch.int64)
    random = random.to(torch.int32).view(torch.float32).double()
    near_one = torch.randn(200, generator=generator, dtype=torch.float64).float().double()
    found += [random[random.isfinite()], near_one]
    positive = torch.unique(torch.cat(found).float().abs())
    around = [positive, torch.nextafter(positive, torch.tensor(0.0)),
              torch.nextafter(positive, torch.tensor(float("inf")))]
    every = torch.unique(torch.cat(around))
    return torch.cat([every, -every])


def main(path):
    single = floats()
    generator = torch.Generator().manual_seed(8)
    double = torch.randn(500, generator=generator, dtype=torch.float64)
    double = double * 2.0 ** torch.randint(-160, 160, (500,), generator=generator)
    shift = torch.randint(0, 63, (300,), generator=generator)
    integers = torch.randint(-(2**62), 2**62, (300,), generator=generator) >> shift
    integers = torch.cat([integers, torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1])])
    vectors = {"f32": bits(single), "f64": bits(double), "i64": bits(integers)}
    for name in FLOATS:
        dtype = getattr(torch, name)
        if name not in ("float64", "float32"):
            vectors[f"f32.to.{name}"] = bits(single.to(dtype))
        vectors[f"f64.to.{name}"] = bits(double.to(dtype))
        vectors[f"i64.to.{name}"] = bits(integers.to(dtype))
    for name in INTEGERS:
        vectors[f"i64.to.{name}"] = bits(integers.to(getattr(torch, name)))
    small = single[single.abs() < 2**31][::8].clone()
    vectors["f32.small"] = bits(small)
    vectors["f32.small.to.bool"] = bits(small.to(torch.bool))
    vectors["f32.small.to.int32"] = bits(small.to(torch.int32))
    save_file(vectors, path, {"torch": torch.__version__, "format": "pt"})


main(sys.argv[1])
