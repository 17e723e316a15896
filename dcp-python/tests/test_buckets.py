"""S3, on an emulator: `cargo xtask interop --python` starts one and sets the variables of its bucket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp

import distcp
import distcp.torch as dcp
import ranks
from distcp.torch import Reader, Writer

BUCKET = os.environ.get("DCP_TEST_S3_BUCKET")
pytestmark = pytest.mark.skipif(BUCKET is None, reason="needs an S3: run cargo xtask interop --python")


def save_and_load(url: str) -> list[float]:
    rank = dist.get_rank()
    state = {"w": torch.full((3,), 5.0), f"rng.{rank}": rank}
    dcp.save(state, checkpoint_id=url)
    torch_dcp.save(state, storage_writer=Writer(f"{url}_writer"))
    loaded = {"w": torch.zeros(3), f"rng.{rank}": -1}
    torch_dcp.load(loaded, storage_reader=Reader(url))
    again = {"w": torch.zeros(3)}
    dcp.load(again, checkpoint_id=f"{url}_writer")
    assert torch.equal(again["w"], loaded["w"])
    return [*loaded["w"].tolist(), float(loaded[f"rng.{rank}"])]


def test_ranks_save_and_load_in_a_bucket(tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/python/step_1"
    assert ranks.run(2, tmp_path, save_and_load, url) == [[5.0, 5.0, 5.0, 0.0], [5.0, 5.0, 5.0, 1.0]]
    checkpoint = distcp.open(url)
    assert checkpoint["w"][1:].tolist() == [5.0, 5.0] and checkpoint.verify(deep=True).ok
    checkpoint.convert(f"s3://{BUCKET}/python/model.safetensors")
    assert distcp.open(f"s3://{BUCKET}/python/model.safetensors")["w"][0] == 5.0


def test_options_are_those_of_the_command() -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"s3://{BUCKET}/python/options", no_dist=True)
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    options = {"aws_endpoint": endpoint, "aws_allow_http": "true"}
    assert distcp.open(f"s3://{BUCKET}/python/options", options=options)["w"][0] == 1.0
    with pytest.raises(distcp.CheckpointError, match="no_such"):
        distcp.open(f"s3://{BUCKET}/python/options", options={"no_such": "1"})
    with pytest.raises(FileNotFoundError):
        distcp.open(f"s3://{BUCKET}/python/absent")
