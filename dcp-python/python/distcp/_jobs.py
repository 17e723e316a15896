"""Jobs on several checkpoints, and on runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from distcp import _native
from distcp._report import Report

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


def merge(urls: Iterable[Url], target: Url, **chosen: Any) -> Report:
    """Writes checkpoints with other keys as one. Keywords are those of ``Checkpoint.convert``."""
    sources = _urls(urls)
    return Report.from_json(_native.merge(sources, os.fspath(target), options(**chosen)))


def average(urls: Iterable[Url], target: Url, **chosen: Any) -> Report:
    """Writes the average of checkpoints with equal keys. Keywords are those of ``Checkpoint.convert``."""
    sources = _urls(urls)
    return Report.from_json(_native.average(sources, os.fspath(target), options(**chosen)))


def copy(source: Url, target: Url, *, dry_run: bool = False) -> Report:
    """Copies the files of a checkpoint or of a whole run, unchanged, and compares the copy with its source."""
    chosen = options(dry_run=dry_run)
    return Report.from_json(_native.copy(os.fspath(source), os.fspath(target), chosen))


def ls(url: Url, *, options: dict[str, str] | None = None) -> Report:
    """Lists the checkpoints in a folder: ``entries``, ``latest``."""
    return Report.from_json(_native.list_run(os.fspath(url), options=options))


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
) -> Report:
    """Deletes the checkpoints of a run that no rule keeps.

    As the command, it deletes nothing by default: with ``dry_run=True``, the default, it returns the plan.
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
    return Report.from_json(report)
