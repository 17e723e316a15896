"""The classes of this package in the place of PyTorch's, for programs that name those."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from distcp.torch._storage import Reader, Writer

_OURS: dict[Any, type] = {FileSystemReader: Reader, FileSystemWriter: Writer}


def install() -> Callable[[], None]:
    """Replaces ``FileSystemReader`` and ``FileSystemWriter`` in every module that has imported them, and returns a
    function that undoes it.

    Call it before the framework makes its storages: objects that exist stay what they are.
    """
    replaced: list[tuple[ModuleType, str, type]] = []
    for module in [torch_dcp, *list(sys.modules.values())]:
        # A module of this package subclasses nothing of them and imports them by name, as do those that are lazy.
        if not isinstance(module, ModuleType) or module.__name__.startswith("distcp"):
            continue
        for name, value in list(vars(module).items()):
            # `type(value)`, as some objects of PyTorch warn when their `__class__` is read.
            if issubclass(type(value), type) and value in _OURS:
                replaced.append((module, name, value))
                setattr(module, name, _OURS[value])

    def undo() -> None:
        for module, name, value in replaced:
            setattr(module, name, value)
        replaced.clear()

    return undo
