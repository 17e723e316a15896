"""An opened checkpoint as a mapping from keys to values."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from distcp import _native
from distcp._jobs import Url, options
from distcp.reports import DiffReport, Inspected, Report, StatsReport, VerifyReport, Written, parse

if TYPE_CHECKING:
    import numpy as np
    import torch

#: What `Tensor.__getitem__` takes for each axis.
Index = int | slice | EllipsisType

#: Bytes of an element, and the names of NumPy's dtypes where they differ from PyTorch's.
_NUMPY = {
    "float64": "f8", "float32": "f4", "float16": "f2", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1",
    "uint64": "u8", "uint32": "u4", "uint16": "u2", "uint8": "u1", "bool": "?", "complex128": "c16", "complex64": "c8",
}  # fmt: skip


def open(
    url: Url,
    *,
    rank: int | None = None,
    variant: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Opens the checkpoint at a path or URL, of any format: a folder, a run of checkpoints, or a file.

    ``rank`` chooses one of ranks that saved without collectives, ``variant`` one of the variants of a Hugging Face model.
    ``options`` are settings of storages, as those of ``dcp --storage-option``.

    Raises :class:`distcp.CheckpointError`, which is also a ``FileNotFoundError`` where there is nothing.
    """
    settings = None if options is None else dict(options)
    return Checkpoint(_native.open(os.fspath(url), rank=rank, variant=variant, options=settings))


class Checkpoint(Mapping[str, Any]):
    """A checkpoint: a mapping from keys to tensors, which are read when they are indexed, and to plain values.

    >>> weight = checkpoint["model.embed.weight"]   # reads nothing
    >>> weight.shape, weight.dtype
    ((32000, 4096), 'bfloat16')
    >>> weight[:2].shape                            # reads two rows
    (2, 4096)
    """

    def __init__(self, native: _native.Checkpoint) -> None:
        self._native = native
        self._rows = {fqn: (tensor, path) for fqn, tensor, path in native.rows()}

    @property
    def format(self) -> str:
        """The name of the format, such as ``torch_dcp`` or ``hf``."""
        return self._native.format

    @property
    def uri(self) -> str:
        """The place, without secrets."""
        return self._native.uri

    @property
    def notes(self) -> list[str]:
        """What opening noted."""
        return self._native.notes

    def __getitem__(self, key: str) -> Any:
        try:
            tensor, _ = self._rows[key]
        except KeyError:
            from distcp._errors import of

            close = [name for name in self._rows if str(key) in name][:3]
            hint = f"keys with that text: {', '.join(close)}" if close else None
            raise of("unknown-key", f"{self.uri} has no key {key!r}", hint=hint) from None
        if tensor is None:
            return self._native.object(key)
        return Tensor(self._native, key, *tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __repr__(self) -> str:
        return f"<distcp.Checkpoint {self.uri!r}: {self.format}, {len(self)} keys>"

    def inspect(self, key: str | None = None) -> Inspected:
        """Keys, shapes, dtypes and files; of one key with ``key``."""
        return parse(Inspected, self._native.inspect(key))

    def verify(self, *, deep: bool = False, **chosen: Any) -> VerifyReport:
        """Checks that everything is there: ``ok`` and ``problems``. ``deep`` compares every byte with its checksum."""
        return parse(VerifyReport, self._native.verify(deep, options(**chosen)))

    def stats(self, key: str | None = None, **chosen: Any) -> StatsReport:
        """Minimum, maximum, mean, NaNs and infinities of each tensor."""
        return parse(StatsReport, self._native.stats(key, options(**chosen)))

    def diff(self, other: Checkpoint, **chosen: Any) -> DiffReport:
        """The differences from another checkpoint, of any format."""
        return parse(DiffReport, self._native.diff(other._native, options(**chosen)))

    def report(
        self, target: Url | None = None, *, stats: bool = False, overwrite: bool = False, **chosen: Any
    ) -> Report:
        """The bytes of it by rank, file, layer and dtype. ``target`` is a file for the page of ``dcp report``, HTML that
        loads nothing. ``stats`` reads all tensors, for their range, mean and histogram."""
        file = None if target is None else os.fspath(target)
        return parse(Report, self._native.report(file, stats, options(overwrite=overwrite, **chosen)))

    def convert(self, target: Url, **chosen: Any) -> Written:
        """Writes it in another format: ``to`` is ``"dcp"``, ``"hf"``, ``"safetensors"``, ``"torch-save"`` or the target
        of a framework; without it, the name of the target decides.

        Keywords: ``to``, ``dtype``, ``overwrite``, ``dry_run``, ``ranks``, ``max_shard_bytes``, ``config`` (a folder with
        the configuration and tokenizer of a Hugging Face model), ``compress`` (a level of zstd), ``include`` and
        ``exclude`` (patterns of keys), ``part`` (``"everything"``, ``"model"``, ``"without_optimizer"``), ``rename``
        (``"s/PATTERN/REPLACEMENT/"``), ``max_memory`` (bytes), ``parallelism`` (reads in flight),
        ``progress`` (a function of the bytes that are done and those in all, or ``True`` for a bar of tqdm).
        """
        return parse(Written, self._native.convert(os.fspath(target), options(**chosen)))

    def reshard(self, target: Url, *, ranks: int, **chosen: Any) -> Written:
        """Writes it for another number of ranks, in its own format. Keywords are those of :meth:`convert`."""
        return parse(Written, self._native.reshard(os.fspath(target), options(ranks=ranks, **chosen)))


class Tensor:
    """A tensor of a checkpoint. Nothing is read before it is indexed or converted."""

    __slots__ = ("_native", "dtype", "key", "shape")

    def __init__(self, native: _native.Checkpoint, key: str, dtype: str, shape: list[int]) -> None:
        self._native = native
        #: The key.
        self.key = key
        #: PyTorch's name of the dtype, without ``torch.``
        self.dtype = dtype
        #: The shape.
        self.shape = tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.key} has no axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<distcp.Tensor {self.key!r}: {self.dtype} {self.shape}>"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array; a dtype that NumPy lacks, such as bfloat16, needs :meth:`torch`.

        Takes integers, slices and an ellipsis. Only their box is read; a slice with a step reads the box and steps
        through it.
        """
        import numpy as np

        box, view = self._box(index)
        found = self._numpy(box)[view]
        # NumPy's scalar is what an index without an ellipsis gives.
        given = index if isinstance(index, tuple) else (index,)
        return np.asarray(found) if any(one is ... for one in given) else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a tensor of a checkpoint cannot be an array without a copy")
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def numpy(self) -> np.ndarray[Any, Any]:
        """All elements as a NumPy array."""
        return self[...]

    def torch(self, index: Index | tuple[Index, ...] = ...) -> torch.Tensor:
        """The elements as a tensor of PyTorch, of any dtype."""
        import torch

        box, view = self._box(index)
        sizes = [size for _, size in box]
        dtype = getattr(torch, self.dtype)
        tensor = torch.empty(sizes, dtype=dtype)
        self._fill(box, tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
        # PyTorch has no slices with a negative step.
        back = [axis for axis, one in enumerate(view) if isinstance(one, slice) and (one.step or 1) < 0]
        forth = tuple(slice(None, None, abs(one.step)) if isinstance(one, slice) and one.step else one for one in view)
        return tensor.flip(back)[forth] if back else tensor[view]

    def _box(self, index: Index | tuple[Index, ...]) -> tuple[list[tuple[int, int]], tuple[int | slice, ...]]:
        """Offset and size of each axis to read, and the index into what was read."""
        given = list(index) if isinstance(index, tuple) else [index]
        ellipses = sum(1 for one in given if one is ...)
        rest = self.ndim - (len(given) - ellipses)
        if rest < 0 or ellipses > 1:
            raise IndexError(f"{index!r} has too many indices for {self!r}")
        where = next((at for at, one in enumerate(given) if one is ...), len(given))
        full: list[Any] = [*given[:where], *[slice(None)] * rest, *given[where + 1 :]]
        box: list[tuple[int, int]] = []
        view: list[int | slice] = []
        for axis, (one, size) in enumerate(zip(full, self.shape)):
            if isinstance(one, slice):
                picked = range(*one.indices(size))
                low, high = (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)
                box.append((low, high - low))
                # A negative step begins at the end of the box.
                view.append(slice(None, None, picked.step))
            else:
                if isinstance(one, bool) or not hasattr(one, "__index__"):
                    raise IndexError(f"{one!r} is no index of {self!r}; integers, slices and an ellipsis are")
                at = one.__index__()
                if not -size <= at < size:
                    raise IndexError(f"index {at} is out of bounds of axis {axis} with size {size}")
                box.append((at % size, 1))
                view.append(0)
        return box, tuple(view)

    def _numpy(self, box: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
        import numpy as np

        if self.dtype not in _NUMPY:
            raise TypeError(f"NumPy has no {self.dtype}; `Tensor.torch` reads {self.key!r} as a tensor of PyTorch")
        array = np.empty([size for _, size in box], dtype=np.dtype(_NUMPY[self.dtype]).newbyteorder("<"))
        self._fill(box, array.ctypes.data, array.nbytes, array)
        return array

    def _fill(self, box: list[tuple[int, int]], address: int, byte_len: int, owner: object) -> None:
        offsets, sizes = [offset for offset, _ in box], [size for _, size in box]
        if 0 in sizes:
            return
        part: tuple[int, int, list[int] | None, object] = (address, byte_len, None, owner)
        boxes: list[tuple[list[int], list[int]]] | None = [(offsets, sizes)]
        described = (self.dtype, list(self.shape), boxes, [part])
        self._native.read([(self.key, described)])
