"""`CheckpointManager`, notes and progress."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distcp
import distcp.torch as dcp
import ranks
from conftest import FIXTURES


def train(run: str, until: int, background: bool) -> tuple[Any, ...]:
    manager = dcp.CheckpointManager(run, every_steps=2, keep_last=2, keep_best=1, metric="loss", lowest=True)
    state: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    step = manager.resume(state) or 0
    begun = (step, state["w"].tolist(), state["step"])
    while step < until:
        step += 1
        state["w"] += 1
        state["step"] = step
        if manager.should_save(step):
            save = manager.async_save if background else manager.save
            save(step, state, metrics={"loss": abs(step - 4)})
            # The copy was taken: what follows is not in it.
            state["w"] += 0
    manager.wait()
    return begun


@pytest.mark.parametrize("background", [False, True])
def test_a_run_is_saved_resumed_and_pruned(background: bool, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for begun in ranks.run(2, tmp_path, train, run, 10, background):
        assert begun == (0, [0.0] * 4, 0)
    assert sorted(one.name for one in distcp.ls(run).entries) == ["step-10", "step-4", "step-8"]
    # The newest one is damaged: the run goes on from the one before.
    data = next((tmp_path / "run" / "step-10").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:40])
    for begun in ranks.run(3, tmp_path, train, run, 12, background):
        assert begun == (8, [8.0] * 4, 8)


def test_notes_reach_the_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(FIXTURES / "pytorch" / "nested", tmp_path / "run" / "step_1")
    with caplog.at_level(logging.WARNING, logger="distcp"):
        source = distcp.open(FIXTURES / "pytorch" / "fsdp2_adam_2r")
        source.convert(tmp_path / "model", to="hf")
    assert any(record.name == "distcp" for record in caplog.records), caplog.records


def test_progress_is_called(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    distcp.open(FIXTURES / "pytorch" / "fsdp2_adam_2r").convert(
        tmp_path / "model.safetensors", progress=lambda done, total: seen.append((done, total))
    )
    assert seen and seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > 0


def test_an_exception_of_the_progress_function_ends_the_job(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source = distcp.open(FIXTURES / "pytorch" / "nested")
    with pytest.raises(KeyboardInterrupt):
        source.verify(deep=True, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        source.stats(progress=stop)
    with pytest.raises(KeyboardInterrupt):
        source.convert(tmp_path / "model.safetensors", progress=stop)


def test_rules_that_keep_nothing_are_refused(tmp_path: Path) -> None:
    for rules in ({"keep_last": 0}, {"keep_every": 0}, {"keep_best": 0, "metric": "loss"}):
        with pytest.raises(ValueError, match=f"{next(iter(rules))}=0"):
            dcp.CheckpointManager(tmp_path, no_dist=True, **rules)
        with pytest.raises(ValueError, match=f"{next(iter(rules))}=0"):
            distcp.prune(tmp_path, **rules)
    for schedule in ({"every_steps": 0}, {"every_seconds": 0.0}):
        with pytest.raises(ValueError, match="every 0"):
            dcp.CheckpointManager(tmp_path, no_dist=True, **schedule)


def test_a_manager_says_what_it_saved_and_deleted(tmp_path: Path) -> None:
    manager = dcp.CheckpointManager(tmp_path / "run", keep_last=1, no_dist=True)
    state: dict[str, Any] = {"w": torch.ones(4), "step": 1}
    first = manager.save(1, state)
    assert (first.step, first.entries, first.deleted) == (1, 2, [])
    manager.async_save(2, state)
    second = manager.wait()
    assert second is not None and (second.step, second.deleted, second.problem) == (2, [1], None)


def test_is_distributed_only_where_it_is() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="needs metric"):
        dcp.CheckpointManager("run", keep_best=1)
