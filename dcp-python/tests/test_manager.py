"""`CheckpointManager`, notes and progress."""

from __future__ import annotations

import logging
import shutil
import sys
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
    assert sorted(one["name"] for one in distcp.ls(run).entries) == ["step-10", "step-4", "step-8"]
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


def test_a_progress_that_raises_does_not_stop_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("no terminal")

    raised: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: raised.append(str(one.exc_value)))
    distcp.open(FIXTURES / "pytorch" / "nested").convert(tmp_path / "model.safetensors", progress=fail)
    assert set(raised) == {"no terminal"}
    assert distcp.open(tmp_path / "model.safetensors").verify().ok


def test_is_distributed_only_where_it_is() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="needs metric"):
        dcp.CheckpointManager("run", keep_best=1)
