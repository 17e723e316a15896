"""Tensors of PyTorch as the native module takes them: where their elements are, and which part of the whole they are.

Supported are plain tensors and parameters, ``DTensor`` (FSDP2, HSDP, tensor and context parallelism), ``ShardedTensor``
(FSDP1) and ``CheckpointableTensor`` (PyTorch 2.15). Elements on a GPU pass through memory of the host.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

#: Address, bytes from it, strides in elements unless they are row-major, and the object that keeps them.
Part = tuple[int, int, list[int] | None, object]
Box = tuple[list[int], list[int]]
#: Dtype, shape of the whole, offsets and sizes of the parts unless there is one whole, and the parts.
Described = tuple[str, list[int], list[Box] | None, list[Part]]


class Failed:
    """The place of a state that a function of the program could not make. Describing it raises the error where the
    engine passes it on to all ranks, which wait for this one."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Describer:
    """Describes the leaves of a state dict that is saved, or loaded where ``loads``."""

    def __init__(self, *, loads: bool) -> None:
        self._loads = loads
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Begin and end of the memory that a load fills, in ascending order.
        self._filled: list[tuple[int, int]] = []

    def __call__(self, value: object, name: str) -> Described | bytes:
        """The description of a tensor, or the bytes of ``torch.save`` for another object."""
        if isinstance(value, Failed):
            raise value.error
        if isinstance(value, torch.Tensor) or _is_sharded_tensor(value):
            shape, dtype, boxes, locals_ = _pieces(value, name)
            parts = [self.part(local, name) for local in locals_]
            return dtype_name(dtype), shape, boxes, parts
        if self._loads:
            # What is there is replaced; its encoding is of no use.
            return _saved(None)
        return _saved(value)

    def part(self, local: torch.Tensor, name: str) -> Part:
        """The memory of a tensor that is no shard of another: its own, or a copy on the host."""
        if hasattr(local, "trigger_wait"):
            local = local.trigger_wait()  # of a collective of PyTorch that is still under way
        local = local.detach()
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            raise TypeError(f"{name} is a {local.layout} tensor on {local.device}, which a checkpoint cannot hold")
        if self._loads and any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape)):
            raise TypeError(f"{name} is an expanded tensor, of which elements share memory; load into a copy of it")
        if local.device.type != "cpu" or local.is_conj() or local.is_neg() or (self._loads and self._is_shared(local)):
            host = torch.empty(local.shape, dtype=local.dtype)
            if self._loads:
                self._later.append((local, host))
            else:
                host.copy_(local)
            local = host
        return _memory(local)

    def _is_shared(self, local: torch.Tensor) -> bool:
        """Whether the memory is that of a tensor before, as of tied weights: both are filled at the same time, so the
        second one is read into memory of its own, and counts as in PyTorch's loads."""
        address, length, _, _ = _memory(local)
        if length == 0:
            return False
        at = bisect_right(self._filled, (address, sys.maxsize))
        before = self._filled[at - 1] if at else (0, 0)
        after = self._filled[at] if at < len(self._filled) else (sys.maxsize, sys.maxsize)
        if before[1] > address or after[0] < address + length:
            return True
        self._filled.insert(at, (address, address + length))
        return False

    def finish(self) -> None:
        """Copies what was loaded to devices and tied tensors."""
        for target, host in self._later:
            target.copy_(host)
        self._later.clear()


def _memory(local: torch.Tensor) -> Part:
    size = local.element_size()
    strides = None if local.is_contiguous() else list(local.stride())
    last = sum((length - 1) * stride for length, stride in zip(local.shape, local.stride())) if local.numel() else -1
    length = (last + 1) * size
    if local.storage_offset() * size + length > local.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(local.shape)} is larger than its storage, which was resized")
    return local.data_ptr(), length, strides, local


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _pieces(value: Any, name: str) -> tuple[list[int], torch.dtype, list[Box] | None, list[torch.Tensor]]:
    """Shape of the whole, dtype, boxes and local tensors of the parts that this rank has."""
    if _is_dtensor(value):
        return _of_dtensor(value)
    if _is_sharded_tensor(value):
        shards = value.local_shards()
        boxes = [(list(one.metadata.shard_offsets), list(one.metadata.shard_sizes)) for one in shards]
        properties = value.metadata().tensor_properties
        return list(value.size()), properties.dtype, boxes, [one.tensor for one in shards]
    if _is_checkpointable(value):
        boxes, locals_ = [], []
        for start, within, sizes in zip(value.global_offsets, value.local_offsets, value.local_sizes):
            part = value.detach()
            for axis, (offset, size) in enumerate(zip(within, sizes)):
                part = part.narrow(axis, offset, size)
            boxes.append((list(start), list(sizes)))
            locals_.append(part)
        return list(value.global_shape), value.dtype, boxes, locals_
    if hasattr(value, "__tensor_flatten__") and type(value) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name} is a {kind}, a tensor of several tensors, which distcp does not save")
    return list(value.shape), value.dtype, None, [value]


def _of_dtensor(value: Any) -> tuple[list[int], torch.dtype, list[Box] | None, list[torch.Tensor]]:
    shape = list(value.shape)
    if value.device_mesh.get_coordinate() is None:
        return shape, value.dtype, [], []
    extent = _module_of_dtensors("_utils").compute_local_shape_and_global_offset
    sizes, offsets = extent(value.shape, value.device_mesh, value.placements)
    local = value.to_local()
    if local.numel() == 0 and 0 not in shape:
        return shape, value.dtype, [], []
    return shape, value.dtype, [(list(offsets), list(sizes))], [local]


def _is_dtensor(value: object) -> bool:
    return isinstance(value, _module_of_dtensors("").DTensor)


@functools.cache
def _module_of_dtensors(name: str) -> Any:
    """The module `torch.distributed.tensor`, or one in it. PyTorch 2.4 has it as `_tensor`."""
    below = f".{name}" if name else ""
    try:
        module = importlib.import_module(f"torch.distributed.tensor{below}")
        if name or hasattr(module, "DTensor"):
            return module
    except ImportError:
        pass
    return importlib.import_module(f"torch.distributed._tensor{below}")


def _is_sharded_tensor(value: object) -> bool:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(value, ShardedTensor)


def _is_checkpointable(value: object) -> bool:
    names = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in names)


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name without ``torch.``"""
    return str(dtype).removeprefix("torch.")


def described(
    describer: Describer, tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], name: str
) -> Described:
    """A tensor as the box at ``offsets`` of a whole with ``shape``."""
    box = (list(offsets), list(tensor.shape))
    return dtype_name(tensor.dtype), list(shape), [box], [describer.part(tensor, name)]


def make_object(value: object) -> object:
    """The object of a ``distcp.Opaque``, as far as PyTorch holds its classes for safe; other values unchanged."""
    from distcp._errors import of
    from distcp._opaque import Opaque

    if not isinstance(value, Opaque):
        return value
    try:
        return torch.load(io.BytesIO(value.encoded), map_location="cpu", weights_only=True)
    except Exception as error:
        hint = "torch.serialization.add_safe_globals names classes that you trust"
        problem = f"object {value.key!r} needs classes of Python that PyTorch does not hold for safe"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = next((line for line in lines if "GLOBAL" in line.upper()), lines[0] if lines else "unknown")
        raise of("callables", problem, causes=[cause], hint=hint) from error
