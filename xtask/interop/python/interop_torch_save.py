"""Files of torch.save, for `cargo xtask interop`.

    interop_torch_save.py save FOLDER
    interop_torch_save.py check FOLDER

`save` writes what training code leaves in such files, in every form that torch.save has. `check`
loads these files and those that Rust made of them (`NAME.FORM.pt` of `NAME.pt`), and compares.
"""
import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import pickle
import random
import sys
import warnings

import numpy as np
import torch

warnings.filterwarnings("ignore")

DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn float8_e5m2"
    " float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64 complex32"
).split()
FORMS = ("zip", "zip-2.1", "legacy")


@dataclasses.dataclass
class TrainArgs:
    lr: float
    layers: list
    name: str = "run"


class Phase(enum.Enum):
    WARMUP = 1
    DECAY = 2


def can_be_saved(tensor):
    import io

    try:
        torch.save(tensor, io.BytesIO())
        return True
    except Exception:
        return False


def tensors():
    """Tensors and plain data only: what weights_only=True loads."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    pairs = torch.view_as_complex(torch.arange(6.0).reshape(3, 2))
    weight = torch.arange(12.0).reshape(3, 4)
    dtypes = {}
    for name in DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        raw = torch.arange(96, dtype=torch.uint8) % (2 if name == "bool" else 251)
        tensor = raw.clone().view(dtype)
        if can_be_saved(tensor):
            dtypes[name] = tensor
    return {
        "dtypes": dtypes,
        "views": {
            "transposed": base.t(),
            "slice": base[1:3, 2:5],
            "steps": base[:, ::2],
            "expanded": base[0:1].expand(3, 6),
            "overlapping": base.as_strided((3, 2), (1, 1)),
            "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
            "conj": pairs.conj(),
            "neg": pairs.clone().conj().imag,
            "rows": base[2:],
            "empty": torch.zeros(0, 5),
            "scalar": base[1, 1],
        },
        "tied": {"a": weight, "b": weight, "c": weight.view(4, 3)},
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}, {"lr": 1, "params": []}],
        "names": ["a", "b"],
        "step": 7,
        "big": 2**70,
        "none": None,
        "text": "a\u00e9\u6f22",
    }


def objects():
    """What real training code leaves."""
    args = TrainArgs(0.1, [1, 2])
    loop = argparse.Namespace(lr=0.1, phase=Phase.WARMUP)
    loop.me = loop
    linear = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.01)
    linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model = linear.state_dict()
    random.seed(3)
    np.random.seed(3)
    return {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
        "args": args,
        "loop": loop,
        "shared": [args, args],
        "with_tensors": (args, torch.arange(6.0)[2:4], torch.arange(6).t()),
        "sparse": torch.eye(3).to_sparse(),
        "ordered": collections.OrderedDict([("x", torch.ones(1)), ("y", 2)]),
        "counter": collections.Counter("aab"),
        "lists": [[[torch.zeros(1)], 1], [1, [2]], [{"a": 1}]],
        "numpy": {"scalar": np.float32(1.5), "array": np.arange(6.0).reshape(2, 3), "dtype": np.dtype("i4")},
        "set": {1, 2},
        "frozen": frozenset(["a"]),
        "path": pathlib.PurePosixPath("/a/b"),
        "device": torch.device("cuda", 1),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "when": datetime.datetime(2024, 1, 2, 3, 4, 5, 6),
        "decimal": decimal.Decimal("1.5"),
        "bytes": b"\xff\x00",
        "complex": 1 + 2j,
        "function": torch.nn.functional.relu,
    }


def save(folder):
    torch.save(tensors(), folder / "tensors.pt")
    torch.save(tensors(), folder / "tensors_old.pt", _use_new_zipfile_serialization=False)
    torch.save(objects(), folder / "objects.pt")
    torch.save(objects(), folder / "objects_old.pt", _use_new_zipfile_serialization=False)
    torch.save(objects(), folder / "objects_new.pt", pickle_protocol=4)


# ---- comparing --------------------------------------------------------------------------------


def flat(value, path=(), found=None):
    """By the rule of torch.distributed.checkpoint (2.4 and later)."""
    found = {} if found is None else found

    def descends(value):
        if isinstance(value, collections.abc.Mapping):
            return True
        return isinstance(value, list) and any(
            isinstance(item, torch.Tensor) or descends(item) for item in value
        )

    if not descends(value):
        found[path] = value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            flat(item, (*path, index), found)
    else:
        for key, item in value.items():
            flat(item, (*path, str(key)), found)
    return found


def same(a, b):
    if isinstance(a, torch.Tensor):
        if a.layout != b.layout or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.layout != torch.strided:
            return same(a.to_dense(), b.to_dense())
        a, b = (t.detach().resolve_conj().resolve_neg().contiguous().clone() for t in (a, b))
        return bytes(a.untyped_storage()) == bytes(b.untyped_storage()) if a.numel() else True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, argparse.Namespace):
        return a.lr == b.lr and a.phase == b.phase and b.me is b
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or pickle.dumps(a) == pickle.dumps(b)


def load(file, **options):
    try:
        return torch.load(file, **options)
    except Exception as error:
        raise SystemExit(f"torch {torch.__version__} cannot load {file}: {error}")


def check(folder):
    compared = 0
    for name, plain in [
        ("tensors", True),
        ("tensors_old", True),
        ("objects", False),
        ("objects_old", False),
        ("objects_new", False),
    ]:
        # What torch writes in the older form of types without a storage class, it cannot load.
        before = flat(tensors() if plain else load(folder / f"{name}.pt", weights_only=False))
        for form in FORMS:
            file = folder / f"{name}.{form}.pt"
            loaded = load(file, weights_only=plain)
            after = flat(loaded)
            if set(after) != set(before):
                raise SystemExit(f"{file.name}: {sorted(set(after) ^ set(before), key=str)}")
            for path in before:
                if not same(before[path], after[path]):
                    raise SystemExit(f"{file.name}: {path}: {before[path]} became {after[path]}")
                compared += 1
            if plain:
                a, b, c = loaded["tied"].values()
                if not a.data_ptr() == b.data_ptr() == c.data_ptr():
                    raise SystemExit(f"{file.name}: tied tensors are apart")
            else:
                first, second = loaded["shared"]
                if first is not second:
                    raise SystemExit(f"{file.name}: a shared object was copied")
            if form != "legacy":
                mapped = load(str(file), weights_only=plain, mmap=True)
                if not same(flat(mapped)[path], before[path]):
                    raise SystemExit(f"{file.name}: {path} differs when mapped")
    print(f"  {compared} values agree")


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    {"save": save, "check": check}[command](pathlib.Path(folder))
