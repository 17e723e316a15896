"""Writes what PyTorch makes of NaNs among others, by its vector code: dtype, dtype, bits, bits."""

import torch

FLOATS = {
    "float64": (torch.float64, torch.int64, 64),
    "float32": (torch.float32, torch.int32, 32),
    "float16": (torch.float16, torch.int16, 16),
    "bfloat16": (torch.bfloat16, torch.int16, 16),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8, 8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8, 8),
    "float8_e4m3fnuz": (torch.float8_e4m3fnuz, torch.uint8, 8),
    "float8_e5m2fnuz": (torch.float8_e5m2fnuz, torch.uint8, 8),
    "float8_e8m0fnu": (torch.float8_e8m0fnu, torch.uint8, 8),
}
# Signaling and quiet ones, of both signs, with payloads at both ends.
NANS = {
    "float64": [
        0x7FF0000000000001, 0x7FF8000000000000, 0x7FF8000000000123, 0x7FF4000000000000,
        0xFFF0000000000001, 0xFFF8000000000000, 0x7FFFFFFFFFFFFFFF, 0x7FF0000020000000,
        0xFFF4ABCD12345678,
    ],
    "float32": [
        0x7F800001, 0x7FC00000, 0x7FC00123, 0x7FA00000, 0xFF800001, 0xFFC00000, 0x7FFFFFFF,
        0x7F802000, 0xFFA55555,
    ],
    "float16": [0x7C01, 0x7E00, 0x7E23, 0x7D00, 0xFC01, 0xFE00, 0x7FFF, 0xFD55],
    "bfloat16": [0x7F81, 0x7FC0, 0x7FD3, 0x7FA0, 0xFF81, 0xFFC0, 0x7FFF, 0xFFA5],
    "float8_e4m3fn": [0x7F, 0xFF],
    "float8_e5m2": [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF],
    "float8_e4m3fnuz": [0x80],
    "float8_e5m2fnuz": [0x80],
    "float8_e8m0fnu": [0xFF],
}


def as_integer(bits: int, width: int) -> int:
    return bits - (1 << width) if width > 8 and bits >> (width - 1) else bits


def main() -> None:
    print("# What torch 2.15.0 makes of rows of NaNs on x86-64 with AVX2: from, to, bits, bits.")
    for source, (from_dtype, from_integer, from_width) in FLOATS.items():
        for target, (to_dtype, to_integer, to_width) in FLOATS.items():
            if source == target:
                continue
            for bits in NANS[source]:
                value = torch.tensor([as_integer(bits, from_width)] * 64, dtype=from_integer)
                cast = value.view(from_dtype).to(to_dtype).view(to_integer)[0].item()
                cast &= (1 << to_width) - 1
                print(source, target, f"{bits:0{from_width // 4}x}", f"{cast:0{to_width // 4}x}")


if __name__ == "__main__":
    main()
