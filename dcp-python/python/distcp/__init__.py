"""Distributed model checkpoints: open, load, convert and verify those of PyTorch, Megatron-Core, OLMo-core and
Hugging Face, without executing anything in them.

>>> import distcp
>>> checkpoint = distcp.open("runs/step_1000")
>>> checkpoint["model.embed.weight"][:2]          # reads these rows alone

``distcp.torch`` saves and loads state dicts of PyTorch, in place of ``torch.distributed.checkpoint``.
"""

from distcp import reports
from distcp._checkpoint import Checkpoint, Tensor, open
from distcp._errors import CheckpointError
from distcp._jobs import average, copy, ls, merge, prune, trace
from distcp._native import __version__
from distcp._opaque import Opaque
from distcp._storages import Storage, register_fsspec, register_storage

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Opaque",
    "Storage",
    "Tensor",
    "__version__",
    "average",
    "copy",
    "ls",
    "merge",
    "open",
    "prune",
    "register_fsspec",
    "register_storage",
    "reports",
    "trace",
]
