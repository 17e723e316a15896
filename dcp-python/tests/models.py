"""Models and optimizers in the layouts that training programs have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh


class Net(nn.Module):
    """Three layers whose sizes no number of ranks divides evenly, and a tied weight."""

    def __init__(self, width: int = 13, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))))


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A trained model and its optimizer in a layout, the same for equal seeds on any number of ranks."""
    torch.manual_seed(seed)
    # Tensor parallelism divides evenly, or the layers do not fit.
    model: nn.Module = Net(width=12 if "tp" in layout else 13, tied=layout == "tied")
    if layout == "frozen":
        for parameter in model.up.parameters():
            parameter.requires_grad = False
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif layout in ("fsdp2", "fsdp2_of_tp", "frozen", "tied"):
        _fully_shard(model, init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        _fully_shard(model, mesh)
    elif layout in ("tp", "tp_fsdp"):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        shape = (world,) if layout == "tp" else (world // 2, 2)
        names = ("tp",) if layout == "tp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "tp_fsdp":
            _fully_shard(model, mesh["dp"])
    elif layout == "compiled":
        model = torch.compile(model, backend="eager")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01)
    # The same tokens on every rank, so that replicas stay equal.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        tokens = torch.randint(0, 11, (4,), generator=generator)
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _fully_shard(model: nn.Module, mesh: Any) -> None:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard  # PyTorch 2.4
    fully_shard(model, mesh=mesh)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of a training program: model, optimizer, and plain data."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optim": of_optimizer, "step": 7, "notes": {"lr": [0.1, 0.2], "name": "run"}}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Puts a loaded state into a model and its optimizer."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def whole(value: Any) -> Any:
    """A state with whole tensors of the CPU, on every rank."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    if isinstance(value, ShardedTensor):
        parts: list[Any] = [None] * dist.get_world_size()
        mine = [(one.metadata.shard_offsets, one.metadata.shard_sizes, one.tensor.clone()) for one in value.local_shards()]
        dist.all_gather_object(parts, mine)
        out = torch.zeros(value.size(), dtype=value.dtype)
        for offsets, sizes, part in (one for of_rank in parts for one in of_rank):
            out[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))] = part
        return out
    if hasattr(value, "full_tensor"):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def assert_same(ours: Any, theirs: Any, name: str = "state") -> None:
    """Fails unless both are equal bit for bit."""
    if isinstance(theirs, dict):
        assert list(map(str, ours)) == list(map(str, theirs)), name
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{name}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), name
        for at, (a, b) in enumerate(zip(ours, theirs)):
            assert_same(a, b, f"{name}.{at}")
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        assert torch.equal(ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)), name
    else:
        assert type(ours) is type(theirs) and ours == theirs, name
