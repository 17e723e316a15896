"""Storages for ``torch.distributed.checkpoint``: a reader of every format, and a writer of PyTorch's."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from distcp import _native
from distcp._errors import of
from distcp.torch._tensors import Described, Describer, described, dtype_name

def _is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether it is a path or a URL; the storage of a scheme that nobody serves fails with the ones that are."""
    return bool(os.fspath(checkpoint_id))


class Reader(StorageReader):
    """Reads a checkpoint of any format that dcp opens, as one of PyTorch.

    >>> torch.distributed.checkpoint.load(state_dict, storage_reader=Reader("meta-llama/Llama-3-8B"))

    ``strict`` refuses a tensor of another dtype than is stored; PyTorch's own readers, and this one by default, cast it.
    ``verify`` compares every byte of the checkpoint with its checksum before anything is read. ``rank`` and ``variant``
    are those of :func:`distcp.open`.

    Objects are decoded without unpickling. Those that are no plain data pass to the planner only if PyTorch's
    ``weights_only`` unpickler takes them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        *,
        strict: bool = False,
        verify: bool = False,
        rank: int | None = None,
        variant: str | None = None,
        options: Mapping[str, str] | None = None,
        **_of_torch: Any,
    ) -> None:
        super().__init__()
        self._strict = strict
        self._verify = verify
        self._rank = rank
        self._variant = variant
        self._options = None if options is None else dict(options)
        self._opened: _native.Checkpoint | None = None
        self.path = os.fspath(path)

    @property
    def checkpoint_id(self) -> str:
        """The place."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another load, of ``checkpoint_id`` instead of the place before if that is a place."""
        self._opened = None
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def _checkpoint(self) -> _native.Checkpoint:
        if self._opened is None:
            self._opened = _native.open(self.path, rank=self._rank, variant=self._variant, options=self._options)
            if self._verify:
                _refuse_damaged(self._opened)
        return self._opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, as PyTorch's planners use it."""
        return metadata_of(self._checkpoint(), self.path)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the index of the load."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of a plan, tensors into the memory of the planner's."""
        native = self._checkpoint()
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(_safe_object(native, item.storage_index.fqn)))
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))
        self._read_tensors(native, tensors)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, native: _native.Checkpoint, tensors: list[tuple[ReadItem, torch.Tensor]]) -> None:
        describer = Describer(loads=True)
        casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        waves: list[dict[str, dict[tuple[int, ...], Described]]] = []
        for item, target in tensors:
            fqn = item.storage_index.fqn
            stored = self._metadata.state_dict_metadata[fqn]
            if isinstance(stored, BytesStorageMetadata):
                raise of("mismatch", f"{fqn} is an object in the checkpoint and a tensor in the plan")
            dtype = stored.properties.dtype
            if target.dtype != dtype:
                if self._strict:
                    problem = f"{fqn} is stored as {dtype_name(dtype)} and is {dtype_name(target.dtype)} in the state dict"
                    raise of("mismatch", problem)
                read = torch.empty(target.shape, dtype=dtype)
                casts.append((target, read))
                target = read
            chunk = item.storage_index.offset or torch.Size([0] * len(stored.size))
            offsets = tuple(a + b for a, b in zip(chunk, item.storage_offsets))
            one = described(describer, target, stored.size, offsets, fqn)
            # A box that is read twice, into two tensors, is read in a wave of its own.
            box = (*offsets, *target.shape)
            wave = next((wave for wave in waves if box not in wave.get(fqn, {})), None)
            if wave is None:
                wave = {}
                waves.append(wave)
            wave.setdefault(fqn, {})[box] = one
        for wave in waves:
            native.read([(fqn, _joined(list(parts.values()))) for fqn, parts in wave.items()])
        describer.finish()
        for target, read in casts:
            target.copy_(read)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL of a scheme that dcp serves."""
        return _is_place(checkpoint_id)


def _joined(parts: list[Described]) -> Described:
    dtype, shape, _, _ = parts[0]
    boxes = [box for _, _, of_part, _ in parts for box in of_part or []]
    return dtype, shape, boxes, [memory for _, _, _, memories in parts for memory in memories]


def _safe_object(native: _native.Checkpoint, fqn: str) -> bytes:
    from distcp._opaque import Opaque
    from distcp.torch._tensors import make_object

    encoded, is_plain = native.encoded_object(fqn)
    if not is_plain:
        make_object(Opaque(fqn, encoded, ""))
    return encoded


def _refuse_damaged(native: _native.Checkpoint) -> None:
    from distcp._jobs import options
    from distcp.reports import VerifyReport, parse

    report = parse(VerifyReport, native.verify(True, options()))
    if not report.ok:
        causes = [problem.message for problem in report.problems[:3]]
        raise of("damaged", f"{native.uri} is damaged", causes=causes)


def metadata_of(native: _native.Checkpoint, path: str) -> Metadata:
    """The index of an opened checkpoint as PyTorch's ``Metadata``."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn, tensor, nested in native.rows():
        paths[fqn] = nested if nested is not None else (fqn,)
        if tensor is None:
            entries[fqn] = BytesStorageMetadata()
            continue
        dtype, shape = tensor
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in native.chunks(fqn)
        ]
        properties = TensorProperties(dtype=getattr(torch, dtype))
        entries[fqn] = TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=chunks)
    meta = StorageMeta(checkpoint_id=path)
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_data={}, storage_meta=meta)


class Writer(StorageWriter):
    """Writes a checkpoint of PyTorch's format, for PyTorch's planners.

    >>> torch.distributed.checkpoint.save(state_dict, storage_writer=Writer("s3://bucket/step_1000"))

    Its files are those of ``FileSystemWriter``, which every reader of PyTorch opens. The place of the old checkpoint
    keeps it until the new one is complete, files are checked before the index names them, and a sidecar has their
    checksums. The parameters are those of ``FileSystemWriter``; files are always synced, and ``thread_count`` is the
    number of files for each rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        **_of_torch: Any,
    ) -> None:
        super().__init__()
        if not single_file_per_rank:
            raise of("unsupported", "distcp writes no file for each item; leave out single_file_per_rank=False")
        self.path = os.fspath(path)
        self.thread_count = thread_count
        self._overwrite = overwrite
        self._save: _native.PlannedSave | None = None
        self._rank = 0

    @property
    def checkpoint_id(self) -> str:
        """The place."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another save, to ``checkpoint_id`` instead of the place before if that is a place."""
        self._abandon()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def _abandon(self) -> None:
        if self._save is not None:
            self._save.abandon()
            self._save = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Claims the place, on the coordinator."""
        if not kwargs.get("use_collectives", True):
            raise of("unsupported", "distcp.torch.Writer saves with collectives; leave out use_collectives=False")
        self._abandon()
        if is_coordinator:
            self._save = _native.PlannedSave.begin(self.path, overwrite=self._overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with the names of files."""
        import dataclasses

        generation = 0 if self._save is None else self._save.generation
        if generation and not all(getattr(plan, "usable", True) for plan in plans):
            raise of(
                "unsupported",
                "a planner with enable_plan_caching saves over a checkpoint, and its ranks keep old names of files",
                hint="save each step to a place of its own, or call distcp.torch.save, which caches plans itself",
            )
        return [
            dataclasses.replace(plan, storage_data=_Names(rank, generation)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of this rank's plan."""
        names = plan.storage_data
        describer = Describer(loads=False)
        items: list[tuple[str, bytes | None, Any]] = []
        for item in plan.items:
            fqn, data = item.index.fqn, planner.resolve_data(item)
            of_tensor = item.tensor_data
            if isinstance(data, io.BytesIO):
                items.append((fqn, data.getvalue(), None))
                continue
            if of_tensor is None:
                raise of("invalid-plan", f"the planner gives a tensor for the object {fqn}")
            chunk = of_tensor.chunk
            part = describer.part(data, fqn)
            dtype = dtype_name(data.dtype)
            items.append((fqn, None, (dtype, list(of_tensor.size), list(chunk.offsets), list(chunk.sizes), part)))
        places, report = _native.PlannedSave.write(
            self.path, names.generation, names.rank, items, files=self.thread_count
        )
        results = [
            WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, offset, length))
            for item, (name, offset, length) in zip(plan.items, places)
        ]
        written: Future[list[WriteResult]] = Future()
        written.set_result([*results, _report_of(report)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the checkpoint, on the coordinator."""
        if self._save is None:
            raise of("protocol", "the save did not begin on this rank")
        places: dict[MetadataIndex, tuple[str, int, int]] = {}
        reports: list[Any] = []
        for of_rank in results:
            *items, report = of_rank
            reports.append(report.storage_data.report)
            for item in items:
                info = item.storage_data
                places[item.index] = (info.relative_path, info.offset, info.length)
        planner_data = metadata.planner_data or {}
        entries: list[Any] = []
        for fqn, entry in metadata.state_dict_metadata.items():
            path = planner_data.get(fqn)
            steps = None if path is None else list(path)
            if isinstance(entry, BytesStorageMetadata):
                entries.append((fqn, steps, places[MetadataIndex(fqn)], None))
                continue
            chunks = [
                (list(chunk.offsets), list(chunk.sizes), places[MetadataIndex(fqn, chunk.offsets)])
                for chunk in entry.chunks
            ]
            tensor = (dtype_name(entry.properties.dtype), list(entry.size), chunks)
            entries.append((fqn, steps, None, tensor))
        self._save.commit(entries, reports)
        self._save = None

    def storage_meta(self) -> StorageMeta | None:
        """The place, for planners."""
        return StorageMeta(checkpoint_id=self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL of a scheme that dcp serves."""
        return _is_place(checkpoint_id)


class _Names:
    """The rank and the generation in the names of files."""

    def __init__(self, rank: int, generation: int) -> None:
        self.rank = rank
        self.generation = generation


class _Written:
    """What a rank wrote, beside the places of its items."""

    def __init__(self, report: Any) -> None:
        self.report = report


def _report_of(report: Any) -> WriteResult:
    return WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=_Written(report))


def as_url(path: str | os.PathLike[str] | None) -> str:
    """The text of a place."""
    if path is None:
        raise of("invalid-option", "a save or load needs a checkpoint_id, or a storage with a path")
    return str(path) if isinstance(path, Path) else os.fspath(path)
