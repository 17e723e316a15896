"""Every layout, saved and loaded by us and by PyTorch, also on other numbers of ranks: equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import distcp.torch as dcp
import ranks
from distcp.torch import Reader, Writer
from models import assert_same, build, restore, state_of, whole

#: Layout, and the numbers of ranks that save and load.
LAYOUTS = [
    ("fsdp2", 2, 3),
    ("fsdp1", 2, 3),
    ("hsdp", 4, 2),
    ("tp", 2, 3),
    ("tp_fsdp", 4, 2),
    ("plain", 2, 1),
    ("compiled", 1, 2),
    ("frozen", 2, 1),
    ("tied", 2, 3),
]

#: The first version of PyTorch whose `fully_shard` works without a GPU.
HAS_FSDP2 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)

SAVERS = {
    "ours": lambda state, url: dcp.save(state, checkpoint_id=url),
    "torch": lambda state, url: torch_dcp.save(state, checkpoint_id=url),
    "writer": lambda state, url: torch_dcp.save(state, storage_writer=Writer(url)),
    "async": lambda state, url: dcp.async_save(state, checkpoint_id=url).result(),
}

LOADERS = {
    "ours": lambda state, url: dcp.load(state, checkpoint_id=url),
    "torch": lambda state, url: torch_dcp.load(state, checkpoint_id=url),
    "reader": lambda state, url: torch_dcp.load(state, storage_reader=Reader(url)),
}


#: Who saves and who loads.
PAIRS = [
    ("ours", "torch"),
    ("torch", "ours"),
    ("ours", "ours"),
    ("writer", "torch"),
    ("torch", "reader"),
    ("async", "reader"),
]


def save(layout: str, folder: str) -> Any:
    state = state_of(*build(layout, seed=1))
    for how, saver in SAVERS.items():
        saver(state, f"{folder}/{how}")
    return whole(state)


def load(layout: str, folder: str) -> Any:
    loaded = {}
    for saver, loader in PAIRS:
        model, optimizer = build(layout, seed=2)
        state = state_of(model, optimizer)
        state["step"], state["notes"] = 0, {"lr": [0.0, 0.0], "name": ""}
        LOADERS[loader](state, f"{folder}/{saver}")
        restore(model, optimizer, state)
        after = state_of(model, optimizer) | {"step": state["step"], "notes": state["notes"]}
        loaded[saver, loader] = whole(after)
    return loaded


@pytest.mark.parametrize(("layout", "savers", "loaders"), LAYOUTS)
def test_what_one_saves_the_other_loads(layout: str, savers: int, loaders: int, tmp_path: Path) -> None:
    if not HAS_FSDP2 and layout in ("fsdp2", "hsdp", "tp_fsdp", "frozen", "tied"):
        pytest.skip("this PyTorch has no FSDP2 on CPUs")
    saved = ranks.run(savers, tmp_path, save, layout, str(tmp_path))[0]
    loading = "fsdp2_of_tp" if "tp" in layout and HAS_FSDP2 else "plain_of_tp" if "tp" in layout else layout
    for of_rank in ranks.run(loaders, tmp_path, load, loading, str(tmp_path)):
        for (saver, loader), loaded in of_rank.items():
            assert_same(loaded, saved, f"{layout}: {saver} -> {loader}")
