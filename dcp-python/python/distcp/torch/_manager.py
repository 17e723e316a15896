"""The checkpoints of one training run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from distcp import _native
from distcp._jobs import best_of
from distcp.reports import SavedStep, build
from distcp.torch._checkpointing import apply_loaded, checkpointer, group_of, in_background, plain_state
from distcp.torch._group import for_background
from distcp.torch._tensors import Describer, make_object

State = dict[str, Any]


class CheckpointManager:
    """Saves a run by a schedule, resumes it from the newest checkpoint that loads, and deletes old ones.

    >>> manager = CheckpointManager("s3://bucket/run", every_steps=1000, keep_last=3)
    >>> step = manager.resume(state) or 0
    >>> while training:
    ...     step += 1
    ...     if manager.should_save(step):
    ...         manager.save(step, state, metrics={"loss": loss})

    ``keep_best`` keeps that many checkpoints with the highest value of ``metric``, or the lowest with ``lowest``; with
    ``keep_every`` those of every so many steps stay. The newest one stays whatever the rules. ``on_sigterm`` saves once
    more when the scheduler stops the job: ``should_save`` then returns ``"preemption"``, on all ranks.
    ``load_mode="allow_missing"`` resumes where the state has keys that the checkpoint lacks.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        lowest: bool = False,
        load_mode: str = "strict",
        on_sigterm: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        best = best_of(keep_best, metric, lowest)
        group = group_of(process_group, no_dist)
        # Background saves talk while training does.
        group = None if group is None else for_background(group)
        self._native = _native.Manager(
            os.fspath(url),
            checkpointer(group, load_mode=load_mode),
            every_steps=every_steps,
            every_seconds=every_seconds,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=best,
            on_sigterm=on_sigterm,
        )
        self._pending: Future[SavedStep] | None = None

    def should_save(self, step: int) -> str | None:
        """Why this step is saved, ``"step"``, ``"time"`` or ``"preemption"``; ``None`` if it is not. All ranks call it."""
        return self._native.should_save(step)

    def save(self, step: int, state_dict: State, *, metrics: Mapping[str, float] | None = None) -> SavedStep:
        """Saves a step, and deletes what no rule keeps. Returns what was done."""
        self.wait()
        state = plain_state(state_dict)
        return build(SavedStep, self._native.save(step, state, Describer(loads=False), _pairs(metrics)))

    def async_save(self, step: int, state_dict: State, *, metrics: Mapping[str, float] | None = None) -> None:
        """Copies the state and saves the copy while training goes on. An earlier one is waited for, and its error
        raised."""
        self.wait()
        state = plain_state(state_dict)
        pending = self._native.save_in_background(step, state, Describer(loads=False), _pairs(metrics))
        self._pending = in_background(f"step {step}", lambda: build(SavedStep, pending.wait()))

    def wait(self) -> SavedStep | None:
        """Waits for the save in the background, if there is one."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def resume(self, state_dict: State) -> int | None:
        """Loads the newest checkpoint that is whole, an older one where it is damaged, and returns its step; ``None``
        where the run has none."""
        self.wait()
        state, describer = plain_state(state_dict), Describer(loads=True)
        step = self._native.resume(state, describer, make_object)
        if step is not None:
            describer.finish()
            apply_loaded(state_dict, state)
        return step


def _pairs(metrics: Mapping[str, float] | None) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in (metrics or {}).items()]
