"""Jobs on several checkpoints, and on runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

from distcp import _native
from distcp.reports import (
    AverageWritten,
    CopyReport,
    PrunePlan,
    PruneReport,
    RunListing,
    TraceSummary,
    Written,
    parse,
)

#: A path or a URL.
Url = str | os.PathLike[str]

#: Receives the bytes that are done and those in all.
Progress = Callable[[int, int], object]


def options(
    *,
    to: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    ranks: int | None = None,
    max_shard_bytes: int | None = None,
    config: Url | None = None,
    compress: int | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    part: str | None = None,
    rename: str | Iterable[str] = (),
    max_memory: int | None = None,
    parallelism: int | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """The options of jobs, as the native module takes them."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress is a function of two numbers or a bool, not {progress!r}")
    return {
        "to": to,
        "dtype": None if dtype is None else str(dtype),
        "overwrite": overwrite,
        "dry_run": dry_run,
        "ranks": ranks,
        "max_shard_bytes": max_shard_bytes,
        "config": None if config is None else os.fspath(config),
        "compress": compress,
        "include": _texts(include),
        "exclude": _texts(exclude),
        "part": part,
        "rename": _texts(rename),
        "max_memory": max_memory,
        "parallelism": parallelism,
        "progress": _bar() if progress is True else progress or None,
    }


def _bar() -> Progress:
    """A progress bar of tqdm, where that is installed."""
    try:
        tqdm = importlib.import_module("tqdm.auto")
    except ImportError:
        return lambda done, total: None
    bar = tqdm.tqdm(unit="B", unit_scale=True, unit_divisor=1024)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show


def _texts(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def best_of(count: int | None, metric: str | None, lowest: bool) -> tuple[int, str, bool] | None:
    """The rule that keeps the best checkpoints by a metric, as the native module takes it."""
    if (count is None) != (metric is None):
        raise ValueError("keep_best needs metric, and metric keep_best")
    return None if count is None or metric is None else (count, metric, lowest)


def _urls(urls: Iterable[Url]) -> list[str]:
    if isinstance(urls, (str, os.PathLike)):
        raise TypeError(f"a list of checkpoints is needed, not one: {urls!r}")
    return [os.fspath(url) for url in urls]


def merge(urls: Iterable[Url], target: Url, **chosen: Any) -> Written:
    """Writes checkpoints with other keys as one. Keywords are those of ``Checkpoint.convert``."""
    sources = _urls(urls)
    return parse(Written, _native.merge(sources, os.fspath(target), options(**chosen)))


def average(urls: Iterable[Url], target: Url, **chosen: Any) -> AverageWritten:
    """Writes the average of checkpoints with equal keys. Keywords are those of ``Checkpoint.convert``."""
    sources = _urls(urls)
    return parse(AverageWritten, _native.average(sources, os.fspath(target), options(**chosen)))


def copy(source: Url, target: Url, *, dry_run: bool = False) -> CopyReport:
    """Copies the files of a checkpoint or of a whole run, unchanged, and compares the copy with its source."""
    chosen = options(dry_run=dry_run)
    return parse(CopyReport, _native.copy(os.fspath(source), os.fspath(target), chosen))


def ls(url: Url, *, options: dict[str, str] | None = None) -> RunListing:
    """Lists the checkpoints in a folder: ``entries``, ``latest``."""
    return parse(RunListing, _native.list_run(os.fspath(url), options=options))


def trace(urls: Url | Iterable[Url], *, merge: Url | None = None) -> TraceSummary:
    """Where the time of saves and loads went, from the files of ``Checkpointer::trace`` or ``dcp COMMAND --trace FILE``,
    or folders of them.

    ``merge`` is a file to write with the events of all, which https://ui.perfetto.dev opens; of files that exist, only a
    trace is replaced.
    """
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    target = None if merge is None else os.fspath(merge)
    return parse(TraceSummary, _native.trace(_urls(given), target))


@overload
def prune(
    url: Url,
    *,
    keep_last: int | None = ...,
    keep_every: int | None = ...,
    keep_best: int | None = ...,
    metric: str | None = ...,
    lowest: bool = ...,
    incomplete: bool | float = ...,
    by: str | None = ...,
    dry_run: Literal[True] = ...,
) -> PrunePlan: ...


@overload
def prune(
    url: Url,
    *,
    keep_last: int | None = ...,
    keep_every: int | None = ...,
    keep_best: int | None = ...,
    metric: str | None = ...,
    lowest: bool = ...,
    incomplete: bool | float = ...,
    by: str | None = ...,
    dry_run: Literal[False],
) -> PruneReport: ...


def prune(
    url: Url,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    lowest: bool = False,
    incomplete: bool | float = False,
    by: str | None = None,
    dry_run: bool = True,
) -> PrunePlan | PruneReport:
    """Deletes the checkpoints of a run that no rule keeps.

    As the command, it deletes nothing by default: with ``dry_run=True``, the default, it returns the plan, a
    :class:`PrunePlan <distcp.reports.PrunePlan>`.
    ``incomplete`` also deletes what killed saves left, a day after their last write or as many seconds.
    """
    age = None if incomplete is False else 86400.0 if incomplete is True else float(incomplete)
    report = _native.prune(
        os.fspath(url),
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=best_of(keep_best, metric, lowest),
        incomplete=age,
        by=by,
        dry_run=dry_run,
    )
    return parse(PrunePlan, report) if dry_run else parse(PruneReport, report)
