"""Runs a function on several ranks, as processes over gloo."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(world_size: int, folder: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of ``body(*args)`` on each rank; raises what a rank raised."""
    rendezvous = folder / f"rendezvous-{os.urandom(4).hex()}"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(rank, world_size, str(rendezvous), results, body, args))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    ended = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    failures = [text for _, ok, text in ended if not ok]
    assert not failures, "\n".join(failures)
    values = [value for _, _, value in sorted(ended, key=lambda one: one[0])]
    return [torch.load(io.BytesIO(value), weights_only=False) for value in values]


def _work(
    rank: int, world_size: int, rendezvous: str, results: Any, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        value = body(*args)
        dist.barrier()
        dist.destroy_process_group()
        # As bytes: tensors in a queue are memory of a process that is about to end.
        stream = io.BytesIO()
        torch.save(value, stream)
        results.put((rank, True, stream.getvalue()))
    except BaseException:
        results.put((rank, False, f"rank {rank}:\n{traceback.format_exc()}"))
