"""The results of jobs as dataclasses, and messages in the names of Python."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distcp
from conftest import FIXTURES
from distcp import _native, reports

CHECKPOINTS = [
    *sorted(path for path in (FIXTURES / "pytorch").iterdir() if path.is_dir() and (path / ".metadata").exists()),
    FIXTURES / "deepspeed" / "z2_bf16_w2" / "ckpt",
    FIXTURES / "peft" / "lora" / "adapter",
]


@pytest.mark.parametrize("path", [path for path in CHECKPOINTS if path.exists()], ids=lambda path: path.name)
def test_every_field_of_the_command_is_a_field(path: Path, tmp_path: Path) -> None:
    """A field that a dataclass lacks raises."""
    checkpoint = distcp.open(path)
    found = checkpoint.inspect()
    assert found.keys.keys() == set(checkpoint)
    assert checkpoint.verify(deep=True).format == found.format
    stats = checkpoint.stats()
    assert all(isinstance(one, reports.TensorStats) for one in stats.tensors.values())
    assert checkpoint.diff(checkpoint).equal
    page = tmp_path / "report.html"
    report = checkpoint.report(page, stats=True)
    assert report.totals.tensors == len(stats.tensors) and "<html" in page.read_text()
    for one in (found, stats, report):
        assert pickle.loads(pickle.dumps(one)) == one
        json.dumps(dataclasses.asdict(one))
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.format = "other"  # type: ignore[misc]


def test_a_difference_has_its_values(tmp_path: Path) -> None:
    source = distcp.open(FIXTURES / "pytorch" / "fsdp2_adam_2r")
    source.convert(tmp_path / "other", to="dcp", dtype="bfloat16")
    difference = source.diff(distcp.open(tmp_path / "other"))
    assert not difference.equal and difference.counts.dtype > 0
    one = next(one for one in difference.differences if one.difference == "dtype")
    assert one.a["dtype"] == "float32" and one.b["dtype"] == "bfloat16"


def test_plans_of_prunes_and_dry_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        distcp.copy(FIXTURES / "pytorch" / "nested", run / f"step_{step}")
    plan = distcp.prune(run, keep_last=1, by="step")
    assert isinstance(plan, reports.PrunePlan) and [one.delete for one in plan.steps] == [True, False]
    done = distcp.prune(run, keep_last=1, by="step", dry_run=False)
    assert isinstance(done, reports.PruneReport) and done.deleted[0].name == "step_1"
    written = distcp.open(run / "step_2").convert(tmp_path / "x.safetensors", dry_run=True)
    assert written.dry_run and all(isinstance(one, reports.PlannedTensor) for one in written.keys.values())
    mean = distcp.average([run / "step_2", run / "step_2"], tmp_path / "mean.safetensors")
    assert mean.averaged > 0


def test_a_trace_is_summed_up(tmp_path: Path) -> None:
    source, trace = str(FIXTURES / "pytorch" / "nested"), str(tmp_path / "trace.json")
    command = [sys.executable, "-m", "distcp", "-q", "convert", source, str(tmp_path / "copy"), "--to", "dcp"]
    subprocess.run([*command, "--trace", trace], check=True)
    summary = distcp.trace(trace, merge=tmp_path / "all.json")
    assert summary.requests and not summary.is_cut
    assert distcp.trace([tmp_path / "all.json"]).requests == summary.requests
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="no trace"):
        distcp.trace(broken)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        distcp.trace(trace, merge=tmp_path / "notes.txt")


def test_hints_name_arguments_of_python(tmp_path: Path) -> None:
    source = distcp.open(FIXTURES / "pytorch" / "nested")
    source.convert(tmp_path / "model.safetensors")
    with pytest.raises(FileExistsError) as exists:
        source.convert(tmp_path / "model.safetensors")
    assert "`overwrite=True`" in str(exists.value)


def test_no_message_names_a_setter_of_rust() -> None:
    """The table of the package has every term that the command's has, or the command's text stands in its place."""
    terms = (FIXTURES.parent / "dcp-cli" / "src" / "terms.rs").read_text()
    assert len(re.findall(r'^    \("`', terms, re.MULTILINE)) > 50
    arguments = _arguments()
    ours = (FIXTURES.parent / "dcp-python" / "src" / "terms.rs").read_text()
    rows = re.findall(r'^    \("(`[^"]+`)", "([^"]+)"\)', ours, re.MULTILINE)
    assert len(rows) > 20
    for library, python in rows:
        assert f'("{library}"' in terms, f"the command has no {library}"
        for name in re.findall(r"\b(\w+)=", python):
            assert name in arguments, f"{library}: no function has {name}="


def _arguments() -> set[str]:
    import inspect

    from distcp import _jobs

    functions: list[Any] = [distcp.open, distcp.prune, _jobs.options, distcp.Checkpoint.verify]
    return {name for one in functions for name in inspect.signature(one).parameters}


def test_a_field_that_is_not_known_is_an_error() -> None:
    with pytest.raises(TypeError, match="punched"):
        reports.parse(reports.CopyReport, '{"punched": 1}')
    assert _native.__version__ == distcp.__version__
