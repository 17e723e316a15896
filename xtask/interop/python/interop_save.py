"""interop_save.py DIR: saves checkpoints on 4 ranks (or none) into folders of DIR, each with what a
reader must find in it: expected.safetensors (whole tensors) and expected.json (objects, dtypes)."""
import json
import os

import interop_common as common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interop_common import VERSION, Replicate, Shard, device_mesh, spread
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

RANKS = 4


def save(state, path, **options):
    """The entry point of each version; 2.1 has only the one that was deprecated later."""
    if VERSION < (2, 2):
        options.setdefault("storage_writer", FileSystemWriter(path))
        writer = options.pop("storage_writer")
        return dcp.save_state_dict(state, writer, no_dist=not dist.is_initialized(), **options)
    if "storage_writer" not in options:
        options["checkpoint_id"] = path
    return dcp.save(state, **options)


def expect(state, path):
    """Writes what a reader must find. The keys are those of this version's own flattening."""
    from safetensors.torch import save_file

    flat, _ = flatten_state_dict(state)
    tensors, dtypes, objects = {}, {}, {}
    for fqn, value in flat.items():
        if isinstance(value, torch.Tensor):
            whole = common.full(value)
            dtypes[fqn] = {"dtype": str(whole.dtype).replace("torch.", ""), "shape": list(whole.shape)}
            # As bytes: safetensors lacks some of the dtypes.
            tensors[fqn] = torch.frombuffer(bytearray(common.raw(whole)), dtype=torch.uint8) if whole.numel() else torch.empty(0, dtype=torch.uint8)
        else:
            objects[fqn] = common.tagged(value)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    save_file(tensors, os.path.join(path, "expected.safetensors"))
    with open(os.path.join(path, "expected.json"), "w") as file:
        json.dump({"tensors": dtypes, "objects": objects}, file, indent=1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 14), torch.nn.Linear(14, 6)])
        self.norm = torch.nn.LayerNorm(6)
        self.batch = torch.nn.BatchNorm1d(6)


def trained(model):
    """Model and optimizer state after two steps, by the helpers that trainers use."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) + (step + 0.5)
        optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "step": 17,
        "scheduler": {"last_epoch": 17, "_last_lr": [0.001], "name": "cosine"},
    }


def fsdp2(mesh):
    if VERSION >= (2, 6):
        from torch.distributed.fsdp import fully_shard
    else:
        from torch.distributed._composable.fsdp import fully_shard
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model)


def fsdp2_over_tensor_parallel():
    """_StridedShard on a 2-D mesh. Sizes divide evenly: where they do not, FSDP2 of 2.15 writes
    boxes into the metadata that are not where the rows are."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    parallelize_module(model[1], mesh["tp"], RowwiseParallel())
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return trained(model)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer_state}


def sharded_tensors(rank):
    """ShardedTensor by hand: uneven rows, and several boxes on each rank."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rows = torch.arange(44.0).reshape(11, 4)
    begin, end = [(0, 2), (2, 5), (5, 6), (6, 11)][rank]
    uneven = init_from_local_shards([LocalShard.from_tensor_and_offsets(rows[begin:end].clone(), [begin, 0], rank)], 11, 4)
    grid = torch.arange(64.0).reshape(8, 8)
    boxes = [LocalShard.from_tensor_and_offsets(grid[4 * i : 4 * i + 4, 2 * rank : 2 * rank + 2].clone(), [4 * i, 2 * rank], rank) for i in range(2)]
    return {"uneven": uneven, "nested": {"boxes": init_from_local_shards(boxes, 8, 8), "plain": torch.ones(2)}}


def dtensors():
    line = device_mesh((4,))
    generator = torch.Generator().manual_seed(3)

    def values(*shape, dtype=torch.float32):
        return (torch.randn(*shape, generator=generator) * 10).to(dtype)

    state = {
        "rows10": spread(values(10, 3), line, [Shard(0)]),
        "columns7": spread(values(3, 7), line, [Shard(1)]),
        "middle": spread(values(2, 5, 3), line, [Shard(1)]),
        "replicated": spread(values(4, 4), line, [Replicate()]),
        "bfloat16": spread(values(6, 3, dtype=torch.bfloat16), line, [Shard(0)]),
        "int64": spread(torch.arange(13), line, [Shard(0)]),
        "plain": values(3, 3),
        "zero": torch.empty(0, 5),
        "scalar": torch.tensor(3.5),
    }
    if VERSION >= (2, 2):
        # 2.1 saves from one-dimensional meshes only, and asserts that no rank goes without a row.
        square = device_mesh((2, 2))
        state["boxes"] = spread(values(7, 5), square, [Shard(0), Shard(1)])
        state["rows_twice"] = spread(values(8, 2), square, [Shard(0), Shard(0)])
        state["half_replicated"] = spread(values(5, 3), square, [Shard(0), Replicate()])
        state["rows3"] = spread(values(3, 2), line, [Shard(0)])
        state["rows1"] = spread(values(1, 5), line, [Shard(0)])
        state["scalar_replicated"] = spread(torch.tensor(-2.25), line, [Replicate()])
    if VERSION >= (2, 4):
        state["rows9_twice"] = spread(values(9, 2), square, [Shard(0), Shard(0)])
        state["no_rows"] = spread(values(0, 4), line, [Shard(0)])
    return state


def plain():
    """Dtypes, layouts in memory, nesting and plain objects, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    base = torch.arange(48.0).reshape(6, 8)
    types = "float64 float32 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128".split()
    if VERSION >= (2, 3):
        types += ["float8_e4m3fn", "float8_e5m2"]
    if VERSION >= (2, 6):
        types += ["uint16", "uint32", "uint64"]
    if VERSION >= (2, 7):
        types += ["float8_e8m0fnu", "complex32"]
    values = (torch.randn(5, 3, generator=generator).abs() + 0.5) * 3
    return {
        "types": {name: values.to(getattr(torch, name)) for name in types},
        "transposed": base.t(),
        "columns": base[:, 2:5],
        "steps": base[::2, ::3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "overlapping": torch.arange(6.0).as_strided((3, 2), (1, 1)),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "list": [torch.ones(2), {"x": torch.zeros(3), "y": [7, 8]}],
        "config": {"lr": 0.1, "nested": {"x": 1, "none": None}, "names": ["a", "b"], "tensor": torch.ones(1)},
        "tuple": (1, "two", 3.0),
        "step": 99,
        "dotted.key": {"in.ner": torch.ones(4)},
        "sp ace": {"k/ключ": torch.ones(2)},
    }


def on_every_rank(rank, world, root):
    def folder(name):
        path = os.path.join(root, name)
        if rank == 0:
            os.makedirs(path)
        dist.barrier()
        return path

    def both(name, state, **options):
        path = folder(name)
        if "writer" in options:
            options["storage_writer"] = options.pop("writer")(path)
        save(state, path, **options)
        expect(state, path)

    both("dtensors", dtensors())
    both("sharded_tensors", sharded_tensors(rank))
    both("plain", plain())
    both("files_by_size", plain(), writer=lambda path: FileSystemWriter(path, thread_count=3))
    both("file_per_item", dtensors(), writer=lambda path: FileSystemWriter(path, single_file_per_rank=False))
    if VERSION >= (2, 15):
        from torch.distributed.checkpoint._extension import ZStandard

        both("compressed", dtensors(), writer=lambda path: FileSystemWriter(path, _extensions=[ZStandard()]))
        both("compressed_files", plain(), writer=lambda path: FileSystemWriter(path, thread_count=3, _extensions=[ZStandard()]))
    if VERSION >= (2, 4):
        both("fsdp1", fsdp1())
        both("fsdp2", fsdp2(device_mesh((4,), ("dp",))))
    if VERSION >= (2, 6):
        # In 2.4 the state dict of a 2-D mesh is "under development".
        both("hsdp", fsdp2(device_mesh((2, 2), ("replicate", "shard"))))
        both("fsdp2_tp", fsdp2_over_tensor_parallel())
    if VERSION >= (2, 4):
        path = folder("async")
        state = dtensors()
        dcp.async_save(state, checkpoint_id=path).result()
        expect(state, path)
    if VERSION >= (2, 10):
        path = folder("no_collectives")
        state = {"rows": spread(torch.arange(20.0).reshape(5, 4), device_mesh((4,)), [Shard(0)]), "same": torch.ones(3), "step": 5}
        dcp.save(state, checkpoint_id=path, use_collectives=False)
        expect(state, path)


def everything(root):
    os.makedirs(root)
    path = os.path.join(root, "objects")
    os.makedirs(path)
    state = common.object_zoo()
    save(state, path)
    expect(state, path)
    common.on_ranks(on_every_rank, RANKS, root)


if __name__ == "__main__":
    common.main(everything)
