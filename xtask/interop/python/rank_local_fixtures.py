"""Saves without collectives, for the fixtures `rank_local` (written with torch 2.15.0).

rank_local_fixtures.py DIR    writes DIR/differ, DIR/stale_sharded and DIR/stale_replicated
"""
import os

import interop_common as common
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor


def differ(rank):
    """`same` is equal on both ranks, the rest is not; of `state`, 40 tensors, only the first differs."""
    state = tuple(torch.full((2,), float(n + (rank if n == 0 else 0))) for n in range(40))
    return {
        "same": torch.arange(4.0),
        "buffer": torch.arange(4.0) + rank,
        "cursor": torch.arange(3 + rank),
        "state": state,
        "equal": (torch.arange(2.0), "text"),
    }


def sharded(mesh):
    return {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "step": 4}


def save_all(rank, world, folder):
    save = lambda name, state: dcp.save(state, checkpoint_id=os.path.join(folder, name), use_collectives=False)
    if world == 2:
        save("differ", differ(rank))
    save("stale_sharded", sharded(common.device_mesh((world,))))
    save("stale_replicated", {"w": torch.full((3,), float(world)), "step": world})


def everything(folder):
    # The second save, of 2 ranks, leaves what ranks 2 and 3 of the first wrote.
    common.on_ranks(save_all, 4, folder)
    common.on_ranks(save_all, 2, folder)


if __name__ == "__main__":
    common.main(everything)
