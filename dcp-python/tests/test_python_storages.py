"""Storages in Python, and fsspec's."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import distcp
import distcp.torch as dcp
from distcp.torch import Reader, Writer


class Memory:
    """Objects in a dict."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.lock = threading.Lock()

    def stat(self, key: str) -> int:
        try:
            return len(self.objects[key])
        except KeyError:
            raise FileNotFoundError(key) from None

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self.stat(key)
        return self.objects[key][offset : offset + length]

    def put(self, key: str, data: bytes, only_if_absent: bool) -> None:
        with self.lock:
            if only_if_absent and key in self.objects:
                raise FileExistsError(key)
            self.objects[key] = data

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        return [(key, len(value)) for key, value in self.objects.items() if key.startswith(prefix)]

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


def test_a_storage_of_python_serves_its_scheme(tmp_path: Path) -> None:
    places: dict[str, dict[str, bytes]] = {}
    distcp.register_storage("tape", lambda url: Memory(places.setdefault(url, {})))
    state = {"w": torch.arange(1000.0), "step": 3}
    for value in (0.0, 1.0):
        state["w"] += value
        dcp.save(state, checkpoint_id="tape://7/step_1", no_dist=True)
    torch_dcp.save(state, storage_writer=Writer("tape://7/by_torch"))
    for place in ("tape://7/step_1", "tape://7/by_torch"):
        loaded = {"w": torch.zeros(1000), "step": 0}
        torch_dcp.load(loaded, storage_reader=Reader(place))
        assert torch.equal(loaded["w"], state["w"]) and loaded["step"] == 3
        assert distcp.open(place)["w"][10:12].tolist() == [11.0, 12.0]
        assert distcp.open(place).verify(deep=True).ok
    distcp.copy("tape://7/step_1", tmp_path / "copied")
    assert distcp.open(tmp_path / "copied")["step"] == 3
    with pytest.raises(FileNotFoundError):
        distcp.open("tape://7/absent")


def test_what_a_storage_raises_is_the_error(tmp_path: Path) -> None:
    class Broken(Memory):
        def put(self, key: str, data: bytes, only_if_absent: bool) -> None:
            raise PermissionError("the tape is write protected")

    class Short(Memory):
        def read_range(self, key: str, offset: int, length: int) -> bytes:
            return super().read_range(key, offset, length)[:-1]

    distcp.register_storage("broken", lambda url: Broken({}))
    with pytest.raises(PermissionError, match="write protected"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="broken://x", no_dist=True)
    objects: dict[str, bytes] = {}
    distcp.register_storage("tape", lambda url: Memory(objects))
    dcp.save({"w": torch.ones(2)}, checkpoint_id="tape://x", no_dist=True)
    distcp.register_storage("tape", lambda url: Short(objects))
    with pytest.raises(distcp.CheckpointError, match="requested"):
        distcp.open("tape://x")

    def no_tape(url: str) -> Memory:
        raise ConnectionError("no tape drive")

    distcp.register_storage("tape", no_tape)
    with pytest.raises(distcp.CheckpointError, match="no tape drive") as failed:
        distcp.open("tape://x")
    assert failed.value.retryable


def test_a_file_system_of_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    distcp.register_fsspec("local")
    url = f"local://{tmp_path / 'ck'}"
    dcp.save({"w": torch.ones(5)}, checkpoint_id=url, no_dist=True)
    assert distcp.open(url)["w"][...].sum() == 5
    # The files are those of the same checkpoint on disk.
    assert distcp.open(tmp_path / "ck").verify(deep=True).ok
