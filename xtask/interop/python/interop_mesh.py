"""interop_mesh.py FILE: what DTensor computes for every rank of every mesh of 1 to 3 axes and up to 8
ranks, with every combination of placements, one case per line:

    box SHAPE MESH PLACEMENTS = OFFSETS SIZES for each rank, of compute_local_shape_and_global_offset
    data SHAPE MESH PLACEMENTS = the elements of each rank, by number, of distribute_tensor and fully_shard
    partial SHAPE MESH PLACEMENTS = ok, or error where saving the DTensor is refused

Placements are R, S<axis>, T<axis>/<split factor> (_StridedShard) and P. One process plays all ranks,
with a process group that sends nothing.
"""
import itertools
import math
import sys

import interop_common as common  # noqa: F401 (its settings)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

SHAPES = [(), (0,), (1,), (5,), (8,), (2, 5), (7, 3), (4, 0), (3, 2, 5)]
DATA_SHAPES = [(5,), (7, 3), (3, 2, 5)]
MAX_RANKS = 8


def meshes():
    for axes in (1, 2, 3):
        for mesh in itertools.product(range(1, MAX_RANKS + 1), repeat=axes):
            if math.prod(mesh) <= MAX_RANKS:
                yield mesh


def placements(shape, strided=True):
    choices = [Replicate(), *(Shard(axis) for axis in range(len(shape)))]
    if strided:
        factors = {0: [], 1: [2, 3], 2: [2], 3: [2]}[len(shape)]
        axes = range(len(shape)) if len(shape) < 3 else [1]
        choices += [_StridedShard(axis, split_factor=factor) for axis in axes for factor in factors]
    return choices


def code(placement):
    if isinstance(placement, _StridedShard):
        return f"T{placement.dim}/{placement.split_factor}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"


def numbers(values):
    return ",".join(map(str, values)) or "-"


def case(kind, shape, mesh, placed):
    return f"{kind} {numbers(shape)} {numbers(mesh)} {';'.join(map(code, placed))}"


def of_rank(mesh_shape, cases):
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).reshape(mesh_shape), mesh_dim_names=("a", "b", "c")[: len(mesh_shape)])
    for shape in SHAPES:
        for placed in itertools.product(placements(shape), repeat=len(mesh_shape)):
            sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placed)
            cases.setdefault(case("box", shape, mesh_shape, placed), []).append(f"{numbers(offsets)} {numbers(sizes)}")
    for shape in DATA_SHAPES:
        whole = torch.arange(math.prod(shape)).reshape(shape)
        for placed in itertools.product(placements(shape, strided=False), repeat=len(mesh_shape)):
            local = distribute_tensor(whole, mesh, placed, src_data_rank=None).to_local()
            cases.setdefault(case("data", shape, mesh_shape, placed), []).append(numbers(local.reshape(-1).tolist()))
    if len(mesh_shape) == 2:
        for rows in (5, 7, 8):
            layer = nn.Linear(2, rows, bias=False)
            layer.weight = nn.Parameter(distribute_tensor(torch.arange(2.0 * rows).reshape(rows, 2), mesh["b"], [Shard(0)], src_data_rank=None))
            fully_shard(layer, mesh=mesh["a"])
            local = layer.weight.to_local().detach().reshape(-1).long().tolist()
            cases.setdefault(case("data", (rows, 2), mesh_shape, layer.weight.placements), []).append(numbers(local))


def partial():
    """Where a Partial among the placements is refused."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    for placed in itertools.product([Replicate(), Shard(0), Partial()], repeat=2):
        tensor = DTensor.from_local(torch.zeros(2), mesh, placed, run_check=False)
        try:
            tensor.__create_write_items__("w", tensor)
            result = "ok"
        except ValueError as error:
            assert "partial placements" in str(error)
            result = "error"
        yield f"{case('partial', tensor.shape, (2, 2), placed)} = {result}"


def main(path):
    with open(path, "w") as file:
        for mesh_shape in meshes():
            world, cases = math.prod(mesh_shape), {}
            for rank in range(world):
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
                of_rank(mesh_shape, cases)
                if mesh_shape == (2, 2) and rank == 0:
                    file.writelines(f"{line}\n" for line in partial())
                dist.destroy_process_group()
            for name, ranks in cases.items():
                file.write(f"{name} = {' | '.join(ranks)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
