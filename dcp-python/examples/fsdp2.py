"""FSDP2 on 2 ranks saves through distcp and PyTorch loads it on 3; PyTorch saves on 2 and distcp loads it on 3."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distcp.torch


def model_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 31), torch.nn.ReLU(), torch.nn.Linear(31, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return get_model_state_dict(model)


def save(folder: str) -> None:
    state = {"model": model_state(seed=1), "step": 1000}
    distcp.torch.save(state, checkpoint_id=f"{folder}/by_distcp")
    torch_dcp.save(state, checkpoint_id=f"{folder}/by_torch")


def load(folder: str) -> None:
    saved = {name: value.full_tensor() for name, value in model_state(seed=1).items()}
    for name, loader in (("by_distcp", torch_dcp.load), ("by_torch", distcp.torch.load)):
        state = {"model": model_state(seed=2), "step": 0}
        loader(state, checkpoint_id=f"{folder}/{name}")
        for key, value in state["model"].items():
            assert torch.equal(value.full_tensor(), saved[key]), f"{name}: {key}"
        assert state["step"] == 1000
        if dist.get_rank() == 0:
            print(f"{name} on 2 ranks -> {loader.__module__.split('.')[0]} on 3 ranks: {len(saved)} tensors equal")


def work(rank: int, world_size: int, folder: str, body: Any) -> None:
    rendezvous = f"file://{folder}/rendezvous-{world_size}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    body(folder)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for world_size, body in ((2, save), (3, load)):
            mp.spawn(work, args=(world_size, folder, body), nprocs=world_size)
        print(distcp.open(Path(folder) / "by_distcp"))


if __name__ == "__main__":
    main()
