"""A process group of PyTorch as the group of ranks that the native module calls.

Messages are bytes. They travel as tensors of one length for all ranks, after an exchange of their true lengths: no
pickle of another process is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

#: The group of background saves of each group; both live as long as the other, so that an id is that of one group.
_background: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all ranks."""
    world = group if group is not None else dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has no process group")
    return world


class Group:
    """The calls of ``dcp_core::Collective`` over a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = _world(group)
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self._device = _device(self._group)

    def gather(self, root: int, mine: bytes) -> list[bytes] | None:
        """All messages in the order of ranks, on ``root``."""
        lengths = self._lengths(len(mine))
        padded = self._padded(mine, max(lengths))
        all_ = [torch.empty_like(padded) for _ in lengths] if self.rank == root else None
        dist.gather(padded, all_, dst=self._global(root), group=self._group)
        return None if all_ is None else _cut(all_, lengths)

    def scatter(self, root: int, messages: Sequence[bytes] | None) -> bytes:
        """The message of ``root`` for this rank."""
        mine = [0] * self.world_size if messages is None else [len(one) for one in messages]
        lengths = self._numbers(mine)
        dist.broadcast(lengths, src=self._global(root), group=self._group)
        known = [int(one) for one in lengths.tolist()]
        longest = max(known)
        out = torch.empty(longest, dtype=torch.uint8, device=self._device)
        all_ = None if messages is None else [self._padded(one, longest) for one in messages]
        dist.scatter(out, all_, src=self._global(root), group=self._group)
        return _cut([out], [known[self.rank]])[0]

    def broadcast(self, root: int, message: bytes | None) -> bytes:
        """The message of ``root``."""
        length = self._numbers([0 if message is None else len(message)])
        dist.broadcast(length, src=self._global(root), group=self._group)
        size = int(length.item())
        data = self._padded(b"" if message is None else message, size)
        dist.broadcast(data, src=self._global(root), group=self._group)
        return _cut([data], [size])[0]

    def all_gather(self, mine: bytes) -> list[bytes]:
        """All messages in the order of ranks."""
        lengths = self._lengths(len(mine))
        padded = self._padded(mine, max(lengths))
        all_ = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(all_, padded, group=self._group)
        return _cut(all_, lengths)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._lengths(0)

    def abort(self, reason: str) -> None:
        """Lets the other ranks wait until the timeout of the group: PyTorch has no message for it."""

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def _lengths(self, mine: int) -> list[int]:
        all_ = [self._numbers([0]) for _ in range(self.world_size)]
        dist.all_gather(all_, self._numbers([mine]), group=self._group)
        return [int(one.item()) for one in all_]

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _padded(self, message: bytes, length: int) -> torch.Tensor:
        data = torch.zeros(length, dtype=torch.uint8)
        if message:
            data[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return data.to(self._device)


def _cut(tensors: list[torch.Tensor], lengths: list[int]) -> list[bytes]:
    return [one[:length].cpu().numpy().tobytes() for one, length in zip(tensors, lengths)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """The CPU where a backend of the group serves it, else the GPU of this process."""
    if torch.device("cpu") in group._device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def is_distributed(no_dist: bool) -> bool:
    """Whether ranks save and load together."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def for_background(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same ranks for saves in the background.

    Two threads that use one group at a time may send in another order on each rank. So it is a group of its own, of
    gloo, which all ranks make at the first such save.
    """
    of = _world(group)
    if id(of) not in _background:
        ranks = dist.get_process_group_ranks(of)
        is_world = len(ranks) == dist.get_world_size()
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=not is_world)
        if isinstance(made, int):
            raise RuntimeError("this process is no rank of the group that it saves in")
        _background[id(of)] = (of, made)
    return _background[id(of)][1]
