"""The results of jobs, as dataclasses: the fields are those that ``dcp COMMAND --json`` prints.

They do not change, compare by value, and are pickled. ``dataclasses.asdict`` makes plain dicts of them. A field that a
job has nothing to say in is empty, or ``None``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_origin

R = TypeVar("R")

__all__ = [
    "AverageWritten", "BadChunk", "BadValue", "ChunkSummary", "CopyReport", "Deleted", "DiffCounts", "DiffReport",
    "DiffScope", "Difference", "DtypeShare", "FileShare", "FileSummary", "ForeignCallable", "Inspected", "KeyReport",
    "KeySummary", "LayerShare", "LeftBehind", "NonFinite", "NotDeleted", "NumberStats", "ObjectStats",
    "OperationSummary", "PartShare", "PhaseSummary", "Planned", "PlannedTensor", "Problem", "PrunePlan", "PruneReport",
    "RankShare", "RankSummary", "Report", "RequestSummary", "RunEntry", "RunListing", "SavedStep", "SkippedStep",
    "Stack", "StatsReport", "TensorStats", "Totals", "TraceSummary", "UnmatchedPattern", "VerifyReport", "Written",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class UnmatchedPattern:
    """A pattern that no key matches."""

    option: str
    pattern: str
    nearest: str | None = None


@dataclass(frozen=True, kw_only=True)
class ForeignCallable:
    """A class or function that a pickle names, and that nothing here calls."""

    name: str
    dangerous: bool
    key: str | None = None
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChunkSummary:
    """A stored piece of a tensor: its box, and its place in a file."""

    offsets: list[int]
    sizes: list[int]
    file: str | None = None
    byte_offset: int | None = None
    byte_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeySummary:
    """A tensor, with dtype, shape, size in bytes and chunks, or an object with its value."""

    kind: str
    dtype: str | None = None
    shape: list[int] | None = None
    bytes: int | None = None
    chunks: list[ChunkSummary] = field(default_factory=list)
    device: str | None = None
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """Keys and files of a checkpoint. ``files`` has their sizes in bytes, ``None`` where a file is missing."""

    format: str
    keys: dict[str, KeySummary]
    files: dict[str, int | None]
    callables: list[ForeignCallable] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    #: ``state`` is ``"absent"``, ``"damaged"`` or ``"found"``, then with the facts of the save.
    sidecar: dict[str, Any] | None = None
    problem: str | None = None
    #: The report of the framework that wrote it, such as Megatron's arguments, under its name.
    frameworks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong with a checkpoint."""

    kind: str
    message: str
    key: str | None = None
    file: str | None = None
    byte_offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Whether everything is there; ``bytes_checked`` were compared with checksums."""

    ok: bool
    deep: bool
    format: str
    tensors: int
    objects: int
    files: int
    bytes_checked: int
    problems: list[Problem]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class NumberStats:
    """Numbers of elements, and of their values. ``histogram`` has counts by exponent of two and sign."""

    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    subnormal: int
    near_overflow: int
    histogram: list[dict[str, int]]
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    abs_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class BadChunk:
    """A chunk with elements that are NaN or infinite."""

    offsets: list[int]
    sizes: list[int]
    nan: int
    inf: int
    first: list[int]
    file: str | None = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class TensorStats(NumberStats):
    """The statistics of a tensor."""

    dtype: str
    shape: list[int]
    bytes: int
    non_finite_chunks: list[BadChunk]
    non_finite_chunk_count: int
    first_non_finite: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class BadValue:
    """A number in an object that is NaN or infinite."""

    key: str
    path: str
    value: str


@dataclass(frozen=True, kw_only=True)
class ObjectStats:
    """The numbers in objects."""

    count: int
    numbers: int
    nan: int
    inf: int
    non_finite: list[BadValue]


@dataclass(frozen=True, kw_only=True)
class StatsReport:
    """The statistics of a checkpoint."""

    format: str
    tensors: dict[str, TensorStats]
    objects: ObjectStats
    total: NumberStats
    unmatched: list[UnmatchedPattern] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DiffScope:
    """What was compared: keys of both sides, and whether values were."""

    keys_a: int
    keys_b: int
    tensors: int
    objects: int
    values: bool
    bytes: int


@dataclass(frozen=True, kw_only=True)
class DiffCounts:
    """The number of differences by kind."""

    kind: int
    shape: int
    only_in_a: int
    only_in_b: int
    values: int
    object: int
    dtype: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of one key. ``difference`` is a name in :class:`DiffCounts`; ``a`` and ``b`` are what each side has."""

    key: str
    difference: str
    key_a: str | None = None
    key_b: str | None = None
    a: Any = None
    b: Any = None
    comparable: bool | None = None
    path: str | None = None
    missing: str | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    shape: list[int] | None = None
    count: int | None = None
    different: int | None = None
    nan_mismatches: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    first: dict[str, Any] | None = None
    largest: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """The differences of two checkpoints."""

    equal: bool
    compared: DiffScope
    counts: DiffCounts
    differences: list[Difference]
    unmatched: list[UnmatchedPattern] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor that a dry run would write."""

    dtype: str
    shape: list[int]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a conversion wrote, or would write with ``dry_run``: ``files`` with their sizes in bytes."""

    dry_run: bool
    tensors: int
    objects: int
    chunks: int
    bytes: int
    files: dict[str, int]
    left_out: list[str]
    not_taken: int
    raw: list[str]
    tied: dict[str, str]
    unmatched: list[UnmatchedPattern] = field(default_factory=list)
    without_scale: list[str] = field(default_factory=list)
    callables: list[ForeignCallable] = field(default_factory=list)
    replaced: list[dict[str, Any]] = field(default_factory=list)
    oldest_version: str | None = None
    cast: dict[str, Any] | None = None
    overflowed: dict[str, int] = field(default_factory=dict)
    keys: dict[str, PlannedTensor] = field(default_factory=dict)
    mapping: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AverageWritten(Written):
    """What an average wrote: tensors that were averaged, and those taken from the first checkpoint."""

    averaged: int
    taken: int


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """The files and bytes that were copied, and those that were at the target already."""

    copied_files: int
    copied_bytes: int
    kept_files: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A checkpoint in a folder. ``complete`` is ``None`` where that was not decided; ``modified`` is in seconds since
    1970."""

    name: str
    kind: str
    files: int
    bytes: int
    complete: bool | None = None
    problem: str | None = None
    strays: list[str] = field(default_factory=list)
    step: int | None = None
    ephemeral: bool | None = None
    version: str | None = None
    modified: int | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunListing:
    """The checkpoints in a folder."""

    entries: list[RunEntry]
    other: int
    truncated: bool
    latest: str | None = None
    tracker_problem: str | None = None
    unread: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A step that is no checkpoint, and why."""

    name: str
    step: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """A temporary file or an open upload of a killed save."""

    path: str
    kind: str
    bytes: int | None = None
    modified: int | None = None


@dataclass(frozen=True, kw_only=True)
class NotDeleted:
    """A step that stays although no rule keeps it, and why."""

    name: str
    step: int
    reason: str
    failed: bool


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step of a run, whether it is deleted, and the reason."""

    name: str
    step: int
    format: str
    delete: bool
    reason: str
    files: int
    bytes: int
    metrics: dict[str, float]
    pinned: bool
    tracked: bool
    named_by: list[str]
    deleting: bool
    checkpoint: str | None = None
    complete: bool | None = None
    problem: str | None = None
    strays: list[str] = field(default_factory=list)
    modified: int | None = None


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """What a prune would delete."""

    steps: list[Planned]
    skipped: list[SkippedStep]
    leftovers: list[LeftBehind]
    not_deleted: list[NotDeleted]
    others: list[str]
    unclear_notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Deleted:
    """A step that was deleted."""

    name: str
    step: int
    files: int
    bytes: int
    folder_stays: str | None = None


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """What a prune deleted."""

    deleted: list[Deleted]
    not_deleted: list[NotDeleted]
    files: int
    bytes: int
    leftovers: list[LeftBehind]
    others: list[str]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The sums of a checkpoint."""

    tensors: int
    objects: int
    chunks: int
    parameters: int
    elements: int
    tensor_bytes: int
    file_bytes: int
    files: int
    missing_files: int


@dataclass(frozen=True, kw_only=True)
class DtypeShare:
    """The tensors of a dtype."""

    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PartShare:
    """The tensors of a part: the model, the optimizer."""

    part: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerShare:
    """The tensors of a layer."""

    layer: int
    tensors: int
    model_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers under one name."""

    name: str
    layers: list[LayerShare]


@dataclass(frozen=True, kw_only=True)
class FileShare:
    """A file; its rank where the name has one."""

    name: str
    chunks: int
    bytes: int | None = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The files of a rank."""

    rank: int
    files: int
    bytes: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The tensors with elements that are NaN or infinite."""

    tensors: int
    nan: int
    inf: int
    in_objects: int
    values: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """A tensor or an object of a report. ``chunks`` and ``numbers`` have a list for each column."""

    kind: str
    name: str
    dtype: str | None = None
    shape: list[int] | None = None
    bytes: int | None = None
    part: str | None = None
    chunk_count: int | None = None
    chunks: dict[str, Any] | None = None
    numbers: dict[str, Any] | None = None
    value: Any = None
    value_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The bytes of a checkpoint by rank, file, layer and dtype. ``cut`` counts what long lists leave out."""

    name: str
    format: str
    provenance: list[list[str]]
    totals: Totals
    dtypes: list[DtypeShare]
    parts: list[PartShare]
    stacks: list[Stack]
    files: list[FileShare]
    ranks: list[RankShare]
    keys: list[KeyReport]
    cut: dict[str, int]
    file_imbalance: float | None = None
    rank_imbalance: float | None = None
    non_finite: NonFinite | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """A phase of a save or load on one rank. Times are in microseconds, begins since 1970."""

    name: str
    began: float
    duration: float


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A rank in a save or load; ``work`` is the time of its own writes or reads."""

    rank: int
    began: float
    duration: float
    bytes: int
    work: float
    phases: list[PhaseSummary]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class OperationSummary:
    """A save or load of all ranks."""

    name: str
    number: int
    began: float
    duration: float
    bytes: int
    slowest_rank: int
    imbalance: float
    ranks: list[RankSummary]


@dataclass(frozen=True, kw_only=True)
class FileSummary:
    """A file that was written or read."""

    file: str
    rank: int
    written: bool
    bytes: int
    duration: float


@dataclass(frozen=True, kw_only=True)
class RequestSummary:
    """The requests of one kind to a storage."""

    name: str
    count: int
    failed: int
    bytes: int
    total: float
    median: float
    p99: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Where the time of saves and loads went, slowest first."""

    ranks: list[int]
    operations: list[OperationSummary]
    files: list[FileSummary]
    requests: list[RequestSummary]
    is_cut: bool


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A step that a manager saved, and the steps that it deleted after it. ``problem`` is why steps were not deleted."""

    step: int
    entries: int
    bytes_written: int
    files: int
    reused_plan: bool
    differing: list[tuple[str, list[int]]]
    deleted: list[int]
    problem: str | None = None


def parse(report: type[R], text: str) -> R:
    """The report of a JSON object."""
    return build(report, json.loads(text))


def build(report: type[R], fields: dict[str, Any]) -> R:
    """The report with these fields. Those that it does not have are of a framework."""
    hashable: Any = report
    known = _fields(hashable)
    values = {name: _value(known[name], value) for name, value in fields.items() if name in known}
    others = {name: value for name, value in fields.items() if name not in known}
    if others and "frameworks" in known:
        values["frameworks"] = others
    elif others:
        raise TypeError(f"{report.__name__} has no {', '.join(others)}")
    return report(**values)


@functools.cache
def _fields(report: type) -> dict[str, Any]:
    hints = typing.get_type_hints(report)
    return {one.name: hints[one.name] for one in dataclasses.fields(report)}


def _value(kind: Any, value: Any) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin is types.UnionType:
        return _value(next(one for one in of if one is not type(None)), value)
    if origin is list:
        return [_value(of[0], one) for one in value]
    if origin is dict:
        return {key: _value(of[1], one) for key, one in value.items()}
    return build(kind, value) if dataclasses.is_dataclass(kind) and isinstance(kind, type) else value
