"""`Reader` and `Writer` as PyTorch's planners and frameworks use them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import distcp
import distcp.torch as dcp
from conftest import FIXTURES
from distcp.torch import Reader, Writer
from models import assert_same


def empty_like_stored(url: Path | str) -> dict[str, torch.Tensor]:
    """Tensors of the shapes and dtypes of a checkpoint."""
    return {
        key: torch.empty(value.shape, dtype=getattr(torch, value.dtype))
        for key, value in distcp.open(url).items()
        if isinstance(value, distcp.Tensor)
    }


@pytest.mark.parametrize(
    "name",
    [
        "hf/sharded_2r",
        "hf/rank0_index",
        "megatron/gpt_tp2pp2_swiglu",
        "megatron/v09_zarr",
        "megatron/run_torch_dist_dp2",
        "olmo/fsdp2-2rank-flat",
        "torch_save/nested",
        "pytorch/t21_plain",
        "pytorch/fsdp1_sharded_tensor_2r",
    ],
)
def test_pytorch_loads_every_format_through_the_reader(name: str) -> None:
    folder = FIXTURES / name
    url = folder if folder.is_dir() and not name.startswith("torch_save") else next(folder.glob("*.pt"))
    state = empty_like_stored(url)
    assert state
    torch_dcp.load(state, storage_reader=Reader(url))
    checkpoint = distcp.open(url)
    for key, value in state.items():
        assert_same(value, checkpoint[key].torch(), key)
    # Ours loads the same.
    again = empty_like_stored(url)
    dcp.load(again, checkpoint_id=url, no_dist=True)
    assert_same(again, state)


def test_another_dtype_is_cast_unless_strict(tmp_path: Path) -> None:
    torch_dcp.save({"w": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=tmp_path / "ck")
    half = {"w": torch.zeros(2, 3, dtype=torch.float16)}
    torch_dcp.load(half, storage_reader=Reader(tmp_path / "ck"))
    assert torch.equal(half["w"], torch.arange(6.0, dtype=torch.float16).reshape(2, 3))
    with pytest.raises(BaseException, match="float32.*float16"):
        torch_dcp.load(half, storage_reader=Reader(tmp_path / "ck", strict=True))
    with pytest.raises(distcp.CheckpointError, match="dtype of \"w\""):
        dcp.load(half, checkpoint_id=tmp_path / "ck", no_dist=True)


def test_verify_refuses_a_flipped_byte(tmp_path: Path) -> None:
    state = {"w": torch.arange(4096.0)}
    dcp.save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    data = next((tmp_path / "ck").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(BaseException, match="damaged"):
        torch_dcp.load(state, storage_reader=Reader(tmp_path / "ck", verify=True))


def test_strided_and_other_tensors(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "transposed": base.transpose(0, 2),
        "narrowed": base[:, 1:3, ::2],
        "expanded": torch.arange(4.0).expand(3, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "nested": {"list": [torch.ones(2), {"a": torch.zeros(1)}], "tuple": (1, "two", None), "set": {3}},
    }
    for saver in (
        lambda url: dcp.save(state, checkpoint_id=url, no_dist=True),
        lambda url: torch_dcp.save(state, storage_writer=Writer(url)),
        lambda url: dcp.async_save(state, checkpoint_id=url, no_dist=True).result(),
    ):
        url = tmp_path / os.urandom(4).hex()
        saver(url)
        assert distcp.open(url).verify(deep=True).ok
        loaded = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        loaded["nested"] = {"list": [torch.zeros(2), {"a": torch.ones(1)}], "tuple": None, "set": None}
        # Into memory with strides of its own.
        loaded["transposed"] = torch.zeros(3, 4, 5).transpose(0, 2)
        loaded["parameter"] = torch.nn.Parameter(torch.zeros(2, 2))
        loaded["expanded"] = torch.zeros(3, 4)
        dcp.load(loaded, checkpoint_id=url, no_dist=True)
        by_torch = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items() if key != "nested"}
        torch_dcp.load(by_torch, checkpoint_id=url)
        for key, value in state.items():
            if key == "nested":
                assert_same(loaded[key]["list"], value["list"])
                assert loaded[key]["tuple"] == (1, "two", None) and loaded[key]["set"] == {3}
            else:
                value = value.detach().resolve_conj()
                assert_same(loaded[key].detach(), value, key)
                assert_same(by_torch[key], value, key)


@dataclass
class Config:
    """A class of the program, which no list of safe ones has."""

    lr: float = 0.1


def test_objects_of_classes(tmp_path: Path) -> None:
    import argparse
    import collections

    state = {
        "ordered": collections.OrderedDict(a=1, b=torch.ones(2)),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "args": argparse.Namespace(lr=0.1),
        "config": Config(),
        "random": np.random.get_state(),
        "scalar": np.float64(0.5),
        "big": 2**80,
        "none": None,
    }
    dcp.save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    by_torch: dict[str, Any] = {"size": None, "dtype": None, "args": None, "big": 0, "config": None}
    torch_dcp.load(by_torch, checkpoint_id=tmp_path / "ck")
    assert by_torch["args"] == state["args"] and by_torch["big"] == 2**80 and by_torch["size"] == state["size"]
    assert by_torch["config"] == Config()
    ours: dict[str, Any] = {"size": None, "dtype": None, "big": 0, "none": 1, "ordered": {"a": 0, "b": torch.zeros(2)}}
    dcp.load(ours, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert ours["size"] == state["size"] and ours["dtype"] == torch.bfloat16 and ours["big"] == 2**80
    assert ours["ordered"]["a"] == 1 and ours["none"] is None
    for key, name in (("config", "Config"), ("args", "Namespace"), ("random", "numpy"), ("scalar", "numpy")):
        with pytest.raises(distcp.CheckpointError, match=name) as refused:
            dcp.load({key: None}, checkpoint_id=tmp_path / "ck", no_dist=True)
        assert "add_safe_globals" in str(refused.value)
    if not hasattr(torch.serialization, "safe_globals"):
        return  # PyTorch 2.4
    with torch.serialization.safe_globals([Config]):
        trusted: dict[str, Any] = {"config": None}
        dcp.load(trusted, checkpoint_id=tmp_path / "ck", no_dist=True)
        assert trusted["config"] == Config()


def test_tied_and_expanded_memory(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(4), "b": torch.full((4,), 2.0), "c": torch.ones(2, 2)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    shared = torch.zeros(4)
    dcp.load({"a": shared, "b": shared, "c": shared.reshape(2, 2)[:, :]}, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert torch.equal(shared, torch.ones(4)), "the last one counts, as in PyTorch's load"
    columns = torch.zeros(4, 2)
    dcp.load({"a": columns[:, 0], "b": columns[:, 1]}, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert torch.equal(columns, torch.tensor([[1.0, 2.0]] * 4))
    with pytest.raises(distcp.CheckpointError, match="expanded"):
        dcp.load({"c": torch.zeros(2).expand(2, 2)}, checkpoint_id=tmp_path / "ck", no_dist=True)


def test_files_are_those_of_pytorch(tmp_path: Path) -> None:
    """PyTorch's own tools read what the writer wrote."""
    state = {"model": {"w": torch.randn(5, 3)}, "step": 3}
    torch_dcp.save(state, storage_writer=Writer(tmp_path / "ck", thread_count=3))
    dcp_to_torch_save(tmp_path / "ck", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same(whole["model"]["w"], state["model"]["w"])
    assert whole["step"] == 3
    metadata = FileSystemReader(tmp_path / "ck").read_metadata()
    assert set(metadata.state_dict_metadata) == {"model.w", "step"}
    saved = dcp.save(state, checkpoint_id=tmp_path / "other", no_dist=True)
    assert set(saved.state_dict_metadata) == {"model.w", "step"}
    assert isinstance(saved, torch_dcp.Metadata)


def test_an_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "ck"
    for value in (1.0, 2.0):
        torch_dcp.save({"w": torch.full((3,), value)}, storage_writer=Writer(place))

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("cannot be saved")

    with pytest.raises(BaseException, match="cannot be saved"):
        torch_dcp.save({"w": torch.zeros(3), "x": Unpicklable()}, storage_writer=Writer(place))
    with pytest.raises(BaseException, match="cannot be saved"):
        dcp.save({"w": torch.zeros(3), "x": Unpicklable()}, checkpoint_id=place, no_dist=True)
    assert distcp.open(place)["w"][0] == 2.0 and distcp.open(place).verify(deep=True).ok
    with pytest.raises(BaseException, match="overwrit"):
        torch_dcp.save({"w": torch.zeros(3)}, storage_writer=Writer(place, overwrite=False))


def test_install_replaces_the_classes_of_pytorch(tmp_path: Path) -> None:
    undo = dcp.install()
    try:
        from torch.distributed.checkpoint import FileSystemWriter as Installed
        from torch.distributed.checkpoint.filesystem import FileSystemReader as InstalledReader

        assert Installed is Writer and InstalledReader is Reader
        torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "ck")
        assert list((tmp_path / "ck").glob(".dcp-*.cbor")), "our writer wrote it"
    finally:
        undo()
    assert torch_dcp.FileSystemWriter is FileSystemWriter and FileSystemWriter is not Writer


def test_the_command_is_in_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distcp", "inspect", str(FIXTURES / "pytorch" / "nested")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "tensor" in done.stdout, done.stderr
    done = subprocess.run([*command[:-1], str(tmp_path / "absent")], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stderr.startswith("error: ")


def test_other_names_are_those_of_pytorch(tmp_path: Path) -> None:
    assert dcp.DefaultLoadPlanner is torch_dcp.DefaultLoadPlanner and dcp.FileSystemWriter is Writer
    state = {"w": torch.ones(2), "new": torch.ones(1)}
    dcp.save({"w": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "ck"), no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path / "ck", planner=dcp.DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    assert state["w"].sum() == 0 and state["new"].sum() == 1
    with pytest.raises(AttributeError, match="no_such"):
        dcp.no_such
