"""`distcp.open`: what PyTorch and safetensors read of the same files, slices, values, errors."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import distcp
from conftest import FIXTURES
from models import assert_same


def read_by_torch(folder: Path) -> dict[str, Any]:
    """The flat state that PyTorch reads of a folder."""
    flat: dict[str, Any] = {}

    class Flat(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_planner(*args, **kwargs)
            flat.update(self.state_dict)

        def load_bytes(self, item: Any, value: io.BytesIO) -> None:
            flat[item.dest_index.fqn] = torch.load(value, weights_only=False)

    state: dict[str, Any] = {}
    torch_dcp.state_dict_loader._load_state_dict(
        state, storage_reader=torch_dcp.FileSystemReader(folder), planner=Flat(), no_dist=True
    )
    return flat


NEWEST = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


@pytest.mark.parametrize("name", ["fsdp2_adam_2r", "nested", "t24_plain", "tp_fsdp_2x2", "zstd_2r", "all_dtypes"])
def test_reads_what_pytorch_reads(name: str) -> None:
    if not NEWEST and not name.startswith("t24"):
        pytest.skip("PyTorch 2.15 wrote it, which older versions do not read")
    if name.startswith("zstd"):
        pytest.importorskip("zstandard", reason="PyTorch needs it to read zstd")
    checkpoint = distcp.open(FIXTURES / "pytorch" / name)
    theirs = read_by_torch(FIXTURES / "pytorch" / name)
    assert set(checkpoint) == set(theirs)
    for key, value in theirs.items():
        ours = checkpoint[key]
        if isinstance(value, torch.Tensor):
            assert_same(ours.torch(), value, key)
        elif not isinstance(ours, distcp.Opaque):
            assert_same(ours, value, key)


def test_slices_are_those_of_numpy(tmp_path: Path) -> None:
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    torch_dcp.save({"w": whole, "scalar": torch.tensor(3)}, checkpoint_id=tmp_path / "ck")
    tensor, expected = distcp.open(tmp_path / "ck")["w"], whole.numpy()
    slices = [
        np.s_[...], np.s_[2], np.s_[-1], np.s_[1:4], np.s_[:, 2], np.s_[..., 1], np.s_[::-1], np.s_[5:1:-2, ::2, 1:],
        np.s_[3:3], np.s_[10:], np.s_[1, ..., 2], np.s_[:, :, -2:],
    ]  # fmt: skip
    for one in slices:
        np.testing.assert_array_equal(tensor[one], expected[one], err_msg=str(one))
        if not any(isinstance(part, slice) and (part.step or 1) < 0 for part in (one if isinstance(one, tuple) else (one,))):
            assert torch.equal(tensor.torch(one), whole[one]), one
    assert np.asarray(tensor, dtype=np.float64).dtype == np.float64
    assert distcp.open(tmp_path / "ck")["scalar"][()] == 3
    assert len(tensor) == 7 and tensor.ndim == 3 and tensor.size == 105
    assert torch.equal(tensor.torch(np.s_[::-1, 1, ::-2]), torch.from_numpy(expected[::-1, 1, ::-2].copy()))
    scalar = distcp.open(tmp_path / "ck")["scalar"]
    assert np.asarray(scalar).shape == () and scalar.numpy().shape == () and int(np.asarray(scalar)) == 3
    report = distcp.open(tmp_path / "ck").verify()
    assert pickle.loads(pickle.dumps(report)) == report
    for bad in (np.s_[7], np.s_[0, 0, 0, 0], np.s_[..., ...], True, None, "w", 1.0, [0]):
        with pytest.raises(IndexError):
            tensor[bad]


def test_a_dtype_of_pytorch_alone(tmp_path: Path) -> None:
    weight = torch.randn(4, 3).to(torch.bfloat16)
    torch_dcp.save({"w": weight}, checkpoint_id=tmp_path / "ck")
    tensor = distcp.open(tmp_path / "ck")["w"]
    assert torch.equal(tensor.torch(), weight)
    with pytest.raises(TypeError, match=r"bfloat16.*torch"):
        tensor[...]


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (print, ("executed",))


def test_nothing_is_executed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch_dcp.save({"evil": Evil(), "good": {"a": (1, 2)}}, checkpoint_id=tmp_path / "ck")
    capfd.readouterr()
    checkpoint = distcp.open(tmp_path / "ck")
    value = checkpoint["evil"]
    assert isinstance(value, distcp.Opaque) and "print" in repr(value)
    assert checkpoint["good.a"] == (1, 2)
    assert "executed" not in capfd.readouterr().out


def test_errors_are_those_of_python(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        distcp.open(tmp_path / "absent")
    assert isinstance(missing.value, distcp.CheckpointError) and missing.value.kind == "storage-not-found"
    checkpoint = distcp.open(FIXTURES / "pytorch" / "nested")
    with pytest.raises(KeyError) as unknown:
        checkpoint["no.such.key"]
    assert "no.such.key" in str(unknown.value) and isinstance(unknown.value, distcp.CheckpointError)
    with pytest.raises(ValueError, match="punched-card"):
        distcp.open("punched-card://7")
    copied = tmp_path / "copied"
    shutil.copytree(FIXTURES / "pytorch" / "fsdp2_adam_2r", copied)
    data = next(copied.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises((ValueError, OSError)) as damaged:
        {key: value.torch() for key, value in distcp.open(copied).items() if isinstance(value, distcp.Tensor)}
    assert data.name in str(damaged.value)
    assert not distcp.open(copied).verify().ok


def test_jobs(tmp_path: Path) -> None:
    source = distcp.open(FIXTURES / "pytorch" / "fsdp2_adam_2r")
    report = source.convert(tmp_path / "model.safetensors", part="model", dtype="bfloat16")
    assert report.tensors == 12 and list(report.files) == ["model.safetensors"]
    model = distcp.open(tmp_path / "model.safetensors")
    assert model["embed.weight"].dtype == "bfloat16"
    with pytest.raises(FileExistsError):
        source.convert(tmp_path / "model.safetensors", part="model")
    source.reshard(tmp_path / "four", ranks=4)
    four = distcp.open(tmp_path / "four")
    assert four.verify(deep=True).ok and len(four.inspect().keys) == len(four)
    difference = source.diff(four)
    assert difference.equal, difference
    assert source.stats("model.embed.weight").tensors
    run = tmp_path / "run"
    for step in (1, 2, 3):
        distcp.copy(FIXTURES / "pytorch" / "nested", run / f"step_{step}")
    assert distcp.ls(run).latest == "step_3"
    plan = distcp.prune(run, keep_last=1, by="step")
    assert [one.name for one in plan.steps if one.delete] == ["step_1", "step_2"] and (run / "step_1").exists()
    distcp.prune(run, keep_last=1, by="step", dry_run=False)
    assert [one.name for one in distcp.ls(run).entries] == ["step_3"]
    distcp.average([run / "step_3", run / "step_3"], tmp_path / "mean.safetensors")
    with pytest.raises(ValueError, match="keep_best"):
        distcp.prune(run, keep_best=1)
    with pytest.raises(TypeError, match="no_such"):
        source.convert(tmp_path / "x", no_such=1)
