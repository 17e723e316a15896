"""Failures of ranks, signals, forks, threads, and memory that changes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distcp
import distcp.torch as dcp
import ranks
from conftest import FIXTURES


def save_where_one_fails(folder: str) -> list[str]:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("rank 1 cannot pickle it")

    state: dict[str, Any] = {"w": torch.ones(3)}
    if dist.get_rank() == 1:
        state["mine"] = Unpicklable()
    messages = []
    for call in (dcp.save, lambda *args, **named: dcp.async_save(*args, **named).result()):
        try:
            call(state, checkpoint_id=folder)
        except distcp.CheckpointError as error:
            messages.append(str(error))
    return messages


def save_where_a_state_raises(folder: str) -> str:
    class Model:
        def state_dict(self) -> dict[str, Any]:
            if dist.get_rank() == 1:
                raise RuntimeError("rank 1 has no state")
            return {"w": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    try:
        dcp.save({"model": Model()}, checkpoint_id=folder)
    except distcp.CheckpointError as error:
        return str(error)
    return "saved"


def test_a_state_that_cannot_be_made_raises_on_all_ranks(tmp_path: Path) -> None:
    for message in ranks.run(2, tmp_path, save_where_a_state_raises, str(tmp_path / "ck")):
        assert "rank 1 has no state" in message


def test_a_manager_finishes_its_save_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    program = (
        "import torch, distcp.torch as dcp\n"
        f"manager = dcp.CheckpointManager({str(tmp_path / 'run')!r}, no_dist=True)\n"
        "manager.async_save(1, {'w': torch.ones(1 << 22)})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert distcp.open(tmp_path / "run" / "step-1").verify(deep=True).ok


def test_a_tensor_whose_storage_shrank_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(1 << 16)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(distcp.CheckpointError, match="larger than its storage"):
        dcp.save({"w": tensor}, checkpoint_id=tmp_path / "ck", no_dist=True)


def test_a_failure_of_one_rank_raises_on_all(tmp_path: Path) -> None:
    for messages in ranks.run(3, tmp_path, save_where_one_fails, str(tmp_path / "ck")):
        assert len(messages) == 2 and all("rank 1 cannot pickle it" in one for one in messages), messages
    assert not list((tmp_path / "ck").glob("*.distcp"))


def load_what_does_not_fit(folder: str) -> tuple[str, bool]:
    rank = dist.get_rank()
    target = torch.zeros(3 if rank == 0 else 4)
    try:
        dcp.load({"w": target}, checkpoint_id=folder)
    except distcp.CheckpointError as error:
        return error.kind, bool((target == 0).all())
    return "loaded", False


def test_a_load_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    results = ranks.run(2, tmp_path, load_what_does_not_fit, str(tmp_path / "ck"))
    assert all(kind == "mismatch" and unchanged for kind, unchanged in results), results


def test_what_changes_after_async_save_is_not_saved(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20), "step": 1}
    future = dcp.async_save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    state["w"].fill_(7)
    state["step"] = 2
    future.result()
    checkpoint = distcp.open(tmp_path / "ck")
    assert (checkpoint["w"][...] == 1).all() and checkpoint["step"] == 1


def test_an_interpreter_that_ends_finishes_the_save(tmp_path: Path) -> None:
    program = (
        "import torch, distcp.torch as dcp\n"
        f"dcp.async_save({{'w': torch.ones(1 << 22)}}, checkpoint_id={str(tmp_path / 'ck')!r}, no_dist=True)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert distcp.open(tmp_path / "ck").verify(deep=True).ok


def read_in_child(url: str, results: Any) -> None:
    results.put(float(distcp.open(url)["w"][0]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_are_forked_or_spawned(method: str, tmp_path: Path) -> None:
    url = str(tmp_path / "ck")
    dcp.save({"w": torch.full((4,), 3.0)}, checkpoint_id=url, no_dist=True)
    assert distcp.open(url)["w"][0] == 3.0
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    workers = [context.Process(target=read_in_child, args=(url, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert [results.get() for _ in workers] == [3.0, 3.0]


def test_threads_share_a_checkpoint() -> None:
    checkpoint = distcp.open(FIXTURES / "pytorch" / "fsdp2_adam_2r")
    tensors = [value for value in checkpoint.values() if isinstance(value, distcp.Tensor)]
    expected = [value.torch() for value in tensors]
    wrong: list[str] = []

    def read() -> None:
        for value, of_main in zip(tensors, expected):
            if not torch.equal(value.torch(), of_main):
                wrong.append(value.key)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_ctrl_c_ends_a_call(tmp_path: Path) -> None:
    """The server never answers, and sends the signal itself when the request has come."""
    program = (
        "import signal, sys, threading, os, distcp\n"
        "def interrupt():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "def serve():\n"
        "    connection, _ = server.accept()\n"
        "    connection.recv(1)\n"
        "    interrupt()\n"
        "    connection.recv(1 << 20)\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=serve, daemon=True).start()\n"
        "try:\n"
        "    distcp.open(f'http://127.0.0.1:{server.getsockname()[1]}/model.safetensors')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "    os._exit(0)\n"
        "os._exit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "interrupted\n", done.stderr


def test_memory_of_many_saves_does_not_grow(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20), "nested": {"values": list(range(100))}}

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    for _ in range(200):
        dcp.save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
        dcp.load(state, checkpoint_id=tmp_path / "ck", no_dist=True)
        sizes.append(resident())
    assert sizes[-1] <= sizes[2] * 1.02, (sizes[2], sizes[-1])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    program = Path(__file__).with_name("killed_rank.py")
    place, rendezvous = str(tmp_path / "ck"), str(tmp_path / "rendezvous")
    workers = [
        subprocess.Popen([sys.executable, str(program), str(rank), rendezvous, place], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    texts = [worker.communicate()[0] for worker in workers]
    assert workers[1].returncode == -signal.SIGKILL
    assert workers[0].returncode == 0 and texts[0].startswith("CheckpointError"), texts
    with pytest.raises(distcp.CheckpointError):
        distcp.open(place)
