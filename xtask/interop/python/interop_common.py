"""What both halves of `cargo xtask interop` share: ranks, layouts, the state that Rust saves, and a
lossless JSON of Python objects. Works on every torch from 2.1 on."""
import faulthandler
import json
import logging
import math
import os
import socket
import sys
import time
import warnings
import zlib

warnings.filterwarnings("ignore")
# gloo resolves the host's own name and fails where that has no address.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import ShardedTensor

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # until 2.4
    from torch.distributed._tensor import DTensor, Replicate, Shard

# It warns of the number of collectives that full_tensor takes, and 2.1 reports its dedup.
logging.disable(logging.WARNING)

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def device_mesh(shape, names=None):
    try:
        from torch.distributed.device_mesh import init_device_mesh
    except ImportError:  # until 2.1
        from torch.distributed._tensor import DeviceMesh

        return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fqn_of(path):
    return ".".join(map(str, path))


# ---- ranks ------------------------------------------------------------------------------------

# Seconds, far more than the ranks of any script take.
LIMIT = 300


def _rank_main(rank, function, world, port, limit, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    # Shows where the rank hangs; the parent process ends it.
    faulthandler.dump_traceback_later(limit)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    function(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def on_ranks(function, world, *args):
    """Runs function(rank, world, *args) in `world` processes of one gloo group.

    After LIMIT seconds each rank that still runs prints the lines that it is in, and all end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (function, world, port, LIMIT, args)
    ranks = mp.spawn(_rank_main, args=arguments, nprocs=world, join=False)
    # Ranks count from when they have imported torch, and all have printed before one ends.
    deadline = time.monotonic() + LIMIT + 60
    while not ranks.join(timeout=max(0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            running = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
            for process in ranks.processes:
                process.kill()
            sys.exit("FAILED: ranks %s of %d still run after %d s; their lines are above" % (running, world, LIMIT))


# ---- tensors by formula -----------------------------------------------------------------------


def bytes_by_formula(fqn, dtype, shape, salt):
    """All bytes of a tensor in row-major order. Rust computes the same in examples/interop.rs."""
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    index = np.arange(count, dtype=np.int64)
    data = (zlib.crc32(fqn.encode()) + salt + 31 * index + index // 251) % 256
    return (data & 1 if dtype == torch.bool else data).astype(np.uint8)


def tensor_by_formula(fqn, dtype, shape, salt):
    data = torch.from_numpy(bytes_by_formula(fqn, dtype, shape, salt))
    if data.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return data.view(dtype).reshape(shape)


def raw(tensor):
    """The bytes of a tensor in row-major order; arbitrary bits are NaNs, so values do not compare."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def full(tensor):
    """The whole of a sharded tensor, on every rank."""
    if isinstance(tensor, DTensor):
        if hasattr(tensor, "full_tensor"):
            return tensor.full_tensor()
        # 2.1 has nothing for it.
        from torch.distributed._tensor._utils import compute_local_offset

        parts = [None] * dist.get_world_size()
        offsets = compute_local_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local()
        dist.all_gather_object(parts, (list(offsets), list(local.shape), local))
    elif isinstance(tensor, ShardedTensor):
        parts = [None] * dist.get_world_size()
        mine = [(list(s.metadata.shard_offsets), list(s.metadata.shard_sizes), s.tensor) for s in tensor.local_shards()]
        dist.all_gather_object(parts, mine)
        parts = [shard for shards in parts for shard in shards]
    else:
        return tensor.detach()
    whole = torch.zeros(tuple(tensor.size()), dtype=tensor.dtype)
    for offsets, sizes, part in parts:
        whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] = part
    return whole


def spread(tensor, mesh, placements):
    """distribute_tensor without talking: gloo cannot send every dtype (2.1: not even bfloat16)."""
    local = tensor
    for placement, ranks, rank in zip(placements, mesh.mesh.shape, coordinate(mesh)):
        if isinstance(placement, Shard):
            parts = local.chunk(ranks, placement.dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = parts[rank] if rank < len(parts) else empty
    local, layout = local.clone(), {"shape": tensor.shape, "stride": tensor.stride()}
    if VERSION < (2, 2):
        # from_local takes no shape yet and computes one that is right for even shards only.
        return DTensor(local, mesh, placements, dtype=tensor.dtype, requires_grad=False, **layout)
    return DTensor.from_local(local, mesh, placements, run_check=False, **layout)


def coordinate(mesh):
    return (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()


# ---- the state that Rust saves ----------------------------------------------------------------


def state():
    """The state dict that Rust saves, as JSON: no torch of this version may be unable to load it.

    `layout` is how Rust spreads a tensor over its ranks: `replicated`, `shardD` like DTensor's
    Shard(D), `cyclic` (row i on rank i modulo ranks: several shards a rank), `last` (all on the
    last rank), `grid` (one box per rank, of different sizes)."""
    tensors = []

    def tensor(path, dtype, shape, layout):
        path = path if isinstance(path, list) else path.split("/")
        tensors.append({"path": path, "fqn": fqn_of(path), "dtype": dtype, "shape": shape, "layout": layout})

    tensor("model/embed.weight", "float32", [17, 6], "shard0")
    tensor("model/layers.0.weight", "float32", [9, 5], "shard1")
    tensor("model/layers.1.weight", "bfloat16", [8, 7], "cyclic")
    tensor("model/layers.2.weight", "float16", [12, 10], "grid")
    tensor("model/layers.3.weight", "float64", [4, 3, 5], "shard2")
    tensor("model/layers.4.weight", "float32", [6, 6], "last")
    tensor("model/norm.weight", "float32", [13], "replicated")
    tensor("model/few_rows", "float32", [2, 9], "shard0")
    tensor("model/scalar", "float32", [], "replicated")
    tensor("model/no_rows", "float32", [0, 4], "replicated")
    tensor("model/no_columns", "int32", [4, 0], "shard0")
    tensor("model/large", "float32", [300, 257], "cyclic")
    tensor(["optimizer", "state", "0", "exp_avg"], "float32", [17, 6], "shard0")
    tensor(["optimizer", "steps", 0], "int64", [5], "shard0")
    tensor(["optimizer", "steps", 1], "int64", [], "replicated")
    tensor("dotted.key/in.ner", "uint8", [33], "cyclic")
    tensor("sp ace/k/ключ", "int16", [6, 3], "shard0")
    tensor("types/bool", "bool", [7, 3], "shard1")
    tensor("types/int8", "int8", [21], "shard0")
    tensor("types/complex64", "complex64", [5, 2], "cyclic")
    tensor("types/complex128", "complex128", [4, 3], "grid")
    # Saving these fails in older versions (2.1: float8, 2.4: uint16), and 2.1 has no rebuild
    # function that could read them.
    if VERSION >= (2, 3):
        tensor("types/float8_e4m3fn", "float8_e4m3fn", [10, 4], "shard0")
        tensor("types/float8_e5m2", "float8_e5m2", [3, 8], "replicated")
    if VERSION >= (2, 6):
        for name in ("uint16", "uint32", "uint64"):
            tensor("types/" + name, name, [9, 2], "shard0")
    if VERSION >= (2, 7):
        tensor("types/float8_e8m0fnu", "float8_e8m0fnu", [12], "cyclic")
        tensor("types/complex32", "complex32", [6], "shard0")

    objects = {
        ("step",): 1234,
        ("lr",): 0.1,
        ("name",): "run ж\n",
        ("done",): False,
        ("nothing",): None,
        ("huge",): 2**80 + 1,
        ("infinite",): float("-inf"),
        ("blob",): b"\x00\xff\x80abc",
        ("tuple",): (1, "a", (2.5, None)),
        ("names",): ["a", "b", ["c", 4]],
        ("empty_list",): [],
        ("dotted.key", "seed"): -7,
        ("scheduler", "base_lrs"): [0.1, 0.01],
        ("scheduler", "last_epoch"): 3,
    }
    objects = [{"path": list(path), "fqn": fqn_of(path), "value": tagged(value)} for path, value in objects.items()]
    return {"tensors": tensors, "objects": objects}


def object_zoo():
    """Objects that Rust has to carry from one checkpoint to another without understanding them."""
    import argparse
    import collections
    import datetime
    import decimal
    import pathlib
    import random

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    fallback = collections.defaultdict(int)
    fallback["k"] = 3
    return {
        "numpy_float": np.float32(2.5),
        "numpy_int": np.int64(-9),
        "numpy_bool": np.bool_(True),
        "numpy_array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "rng_torch": torch.get_rng_state(),
        "rng_numpy": np.random.get_state(),
        "rng_python": random.getstate(),
        "namespace": argparse.Namespace(lr=0.1, name="x", sub=[1, 2]),
        "path": pathlib.PurePosixPath("a/b"),
        "date": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "decimal": decimal.Decimal("1.10"),
        "set": {1, 2},
        "frozenset": frozenset(["x"]),
        "range": range(1, 10, 2),
        "complex": 1 - 2j,
        "bytearray": bytearray(b"xy"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "deque": collections.deque([1, 2], maxlen=5),
        "tensors_in_a_tuple": (torch.arange(3), {"w": torch.ones(2)}),
        "int": 2**70,
    }


# ---- objects as JSON --------------------------------------------------------------------------


def tagged(value):
    """Lossless JSON: plain where JSON is, else {"t": type, ...}; what has no tag is its repr."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < 2**53 else {"t": "int", "v": str(value)}
    if type(value) is float:
        return {"t": "float", "bits": "%016x" % np.float64(value).view(np.uint64)}
    if type(value) is complex:
        return {"t": "complex", "v": [tagged(value.real), tagged(value.imag)]}
    if type(value) in (list, tuple):
        return {"t": type(value).__name__, "v": [tagged(item) for item in value]}
    if type(value) in (set, frozenset):
        return {"t": type(value).__name__, "v": sorted((tagged(item) for item in value), key=json.dumps)}
    if type(value) is dict:
        return {"t": "dict", "v": [[tagged(k), tagged(v)] for k, v in value.items()]}
    if type(value) in (bytes, bytearray):
        return {"t": type(value).__name__, "hex": value.hex()}
    if isinstance(value, np.generic):
        return {"t": "numpy_scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if isinstance(value, np.ndarray):
        return {"t": "numpy_array", "dtype": value.dtype.str, "shape": list(value.shape), "hex": np.ascontiguousarray(value).tobytes().hex()}
    if isinstance(value, torch.Tensor):
        return {"t": "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "hex": raw(value).hex()}
    return {"t": type(value).__module__ + "." + type(value).__qualname__, "repr": repr(value)}


def main(function):
    """A failed check ends the program with its message alone; everything else is a bug here."""
    try:
        function(*sys.argv[1:])
    except AssertionError as failed:
        sys.exit("FAILED: %s" % failed)
