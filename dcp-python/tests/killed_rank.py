"""A rank of two, of which the second one dies in a save."""

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import distcp
import distcp.torch as dcp

rank, rendezvous, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
)


class Last:
    """Is pickled when the save has begun."""

    def __reduce__(self) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return (int, ())


try:
    dcp.save({"w": torch.ones(3), "last": Last()}, checkpoint_id=place)
except distcp.CheckpointError as error:
    print("CheckpointError", error.kind, error, flush=True)
    os._exit(0)
