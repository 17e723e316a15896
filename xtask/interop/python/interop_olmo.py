"""interop_olmo.py save DIR [URL]: OLMo-core saves a small model in both layouts, DIR/nested and
DIR/flat, and the same below a URL of S3, whose store is that of AWS_ENDPOINT_URL.
interop_olmo.py load nested|flat CHECKPOINT DIR: OLMo-core loads it, and finds what it saved.
interop_olmo.py unsharded CHECKPOINT DIR: DIR holds what unshard_checkpoint would have written.
interop_olmo.py torch CHECKPOINT DIR: PyTorch alone reads it, and finds what is in DIR."""
import os
import sys
import tempfile
import warnings

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", OLMO_SHARED_FS="1")
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

RANKS = 2


class Tiny(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(33, 12)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(12, 12) for i in range(3)})
        self.register_buffer("freqs", torch.arange(6, dtype=torch.float32) / 7)
        self.lm_head = nn.Linear(12, 33, bias=False)

    def forward(self, ids):
        x = self.embeddings(ids)
        for block in self.blocks.values():
            x = x + block(x)
        return self.lm_head(x)


def build(seed, shard):
    torch.manual_seed(seed)
    model = Tiny()
    if shard:
        from torch.distributed._composable.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optim = torch.optim.AdamW(groups, lr=1e-3)
    for step in range(2):
        ids = torch.randint(0, 33, (4, 8), generator=torch.Generator().manual_seed(seed + step))
        model(ids).pow(2).mean().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def save_rank(rank, places, rendezvous):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
                      LOCAL_WORLD_SIZE=str(RANKS), NUM_NODES="1")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{rendezvous}")
    from olmo_core.distributed.checkpoint import save_model_and_optim_state

    model, optim = build(1, shard=True)
    for place in places:
        for layout in ("nested", "flat"):
            save_model_and_optim_state(f"{place}/{layout}", model, optim,
                                       flatten_optimizer_state=layout == "flat", thread_count=3)
    dist.barrier()
    dist.destroy_process_group()


def save(folder, *urls):
    os.makedirs(folder)
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(save_rank, ((folder, *urls), os.path.join(scratch, "rendezvous")), nprocs=RANKS)


def state(model, optim):
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, (_, fields) in enumerate(sorted(optim.state_dict()["state"].items())):
        values.update({f"optim.{number}.{field}": value for field, value in fields.items()})
    for number, group in enumerate(optim.param_groups):
        values.update({f"group.{number}.{k}": v for k, v in group.items() if k != "params"})
    return values


def compare(found, expected):
    assert found.keys() == expected.keys(), (found.keys() ^ expected.keys())
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        elif isinstance(value, dict):
            compare(found[key], value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            assert len(found[key]) == len(value), key
            for one, other in zip(found[key], value):
                compare(one, other)
        else:
            assert found[key] == value, (key, found[key], value)


def load(layout, checkpoint, folder):
    from olmo_core.distributed.checkpoint import (get_checkpoint_metadata,
                                                  load_model_and_optim_state)

    metadata = get_checkpoint_metadata(checkpoint)
    place = type(next(iter(metadata.storage_data.values())))
    assert place.__module__ == "olmo_core.distributed.checkpoint.filesystem", place
    # What it saved itself is loaded the same way; both begin with other values.
    states = []
    for source, flat in ((checkpoint, layout == "flat"), (os.path.join(folder, "flat"), True)):
        model, optim = build(2, shard=False)
        before = model.lm_head.weight.detach().clone()
        load_model_and_optim_state(source, model, optim, flatten_optimizer_state=flat)
        assert not torch.equal(model.lm_head.weight, before), "nothing was loaded"
        states.append(state(model, optim))
    compare(*states)
    print(f"OLMo-core loads {len(states[0])} values")


def unsharded(checkpoint, folder):
    from olmo_core.distributed.checkpoint import unshard_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        unshard_checkpoint(checkpoint, scratch, optim=True, quiet=True)
        for name in ("model.pt", "optim.pt"):
            read = lambda path: torch.load(os.path.join(path, name), weights_only=True)
            compare(read(folder), read(scratch))


def by_torch(checkpoint, folder):
    import torch.distributed.checkpoint as dcp

    expected = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load({"model": found}, checkpoint_id=checkpoint, no_dist=True)
    compare(found, expected)


if __name__ == "__main__":
    commands = {"save": save, "load": load, "unsharded": unsharded, "torch": by_torch}
    commands[sys.argv[1]](*sys.argv[2:])
