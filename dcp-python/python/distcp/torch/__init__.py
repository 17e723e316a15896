"""PyTorch's distributed checkpoints through dcp.

>>> import distcp.torch as dcp
>>> dcp.save({"model": model.state_dict()}, checkpoint_id="s3://bucket/step_1000")
>>> dcp.load({"model": state}, checkpoint_id="hf-folder")

:func:`save`, :func:`load` and :func:`async_save` have the parameters of ``torch.distributed.checkpoint``. Who keeps
PyTorch's functions, or a framework that calls them, passes :class:`Writer` and :class:`Reader` as storages, or calls
:func:`install`. Every other name is that of ``torch.distributed.checkpoint``, such as ``DefaultLoadPlanner``, so that a
program changes its import alone; ``FileSystemWriter`` and ``FileSystemReader`` are those of this package.
"""

from typing import Any

import torch.distributed.checkpoint as _torch_dcp

from distcp.torch._checkpointing import async_save, load, save
from distcp.torch._install import install
from distcp.torch._manager import CheckpointManager
from distcp.torch._storage import Reader, Writer

FileSystemReader = Reader
FileSystemWriter = Writer

__all__ = ["CheckpointManager", "Reader", "Writer", "async_save", "install", "load", "save"]


def __getattr__(name: str) -> Any:
    try:
        return getattr(_torch_dcp, name)
    except AttributeError:
        raise AttributeError(f"neither distcp.torch nor torch.distributed.checkpoint has {name!r}") from None
