"""``save``, ``load`` and ``async_save`` with the parameters of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_by_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from distcp import _native, _storages
from distcp.torch._group import Group, for_background, is_distributed
from distcp.torch._storage import Reader, Writer, as_url, metadata_of
from distcp.torch._tensors import Describer, Failed, make_object

State = dict[str, Any]
Place = str | os.PathLike[str]
T = TypeVar("T")

_checkpointers: dict[tuple[Any, ...], _native.Checkpointer] = {}


_FIELDS = frozenset(field.name for field in fields(Metadata))


class SavedMetadata(Metadata):
    """The index of a place that was saved to, which is read when a field of it is first looked at: that of a later save
    into the place, if there was one.

    PyTorch broadcasts the index after every save; most programs drop it.
    """

    @classmethod
    def of(cls, url: str) -> SavedMetadata:
        """The index at a URL."""
        metadata = cls.__new__(cls)
        metadata.__dict__["_url"] = url
        return metadata

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS and (url := self.__dict__.get("_url")) is not None:
            read = metadata_of(_native.open(url), url)
            del self.__dict__["_url"]
            self.__dict__.update(read.__dict__)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        url = self.__dict__.get("_url")
        return f"<metadata of {url}>" if url is not None else super().__repr__()


def save(
    state_dict: State,
    *,
    checkpoint_id: Place | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves a state dict, as ``torch.distributed.checkpoint.save`` does and with its parameters.

    Every rank of ``process_group`` calls it with its own state. The checkpoint appears when all ranks have written, and
    one that was there stays until then. A failure of any rank raises on all, :class:`distcp.CheckpointError`.

    A planner or a storage writer that is not PyTorch's default or of this package is used as PyTorch uses it.
    """
    rule = _save_rule(planner)
    if rule is None or not use_collectives or not (storage_writer is None or type(storage_writer) is Writer):
        writer = storage_writer if storage_writer is not None else Writer(as_url(checkpoint_id))
        return cast(
            Metadata,
            save_by_torch(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                **_given(no_dist=no_dist, use_collectives=use_collectives),
            ),
        )
    url, native = _setup(checkpoint_id, storage_writer, rule, group_of(process_group, no_dist))
    native.save(plain_state(state_dict), url, Describer(loads=False))
    return SavedMetadata.of(url)


def async_save(
    state_dict: State,
    *,
    checkpoint_id: Place | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Copies the state dict, and saves the copy while training goes on.

    Returns the future of the saved metadata, as ``torch.distributed.checkpoint.async_save`` does. When it returns, the
    state may change. Threads of Rust write, without the GIL; so there is no process to choose, and
    ``async_checkpointer_type`` changes nothing. A later save waits for this one. With a stager, a planner or a storage
    writer that is not PyTorch's default or of this package, PyTorch's own function is called.

    Ranks talk over a group of their own, of gloo, which all of them make at the first such save.
    """
    rule = _save_rule(planner)
    own = storage_writer is None or type(storage_writer) is Writer
    if rule is None or not use_collectives or async_stager is not None or not own:
        writer = storage_writer if storage_writer is not None else Writer(as_url(checkpoint_id))
        chosen = _given(no_dist=no_dist, use_collectives=use_collectives)
        if async_checkpointer_type is not None:
            chosen["async_checkpointer_type"] = async_checkpointer_type
        if async_stager is not None:
            chosen["async_stager"] = async_stager
        return async_save_by_torch(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            **chosen,
        )
    group = for_background(process_group) if is_distributed(no_dist) else None
    url, native = _setup(checkpoint_id, storage_writer, rule, group)
    pending = native.save_in_background(plain_state(state_dict), url, Describer(loads=False))

    def wait() -> Metadata:
        pending.wait()
        return SavedMetadata.of(url)

    return in_background(url, wait)


def in_background(what: str, wait: Callable[[], T]) -> Future[T]:
    """The future of a save in the background."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(wait())
        except BaseException as error:
            # The future may have no reader.
            logging.getLogger("distcp").error("the save of %s in the background failed: %s", what, error)
            future.set_exception(error)

    # No daemon: an interpreter that ends waits for the save.
    threading.Thread(target=run, name="distcp-async-save").start()
    return future


def load(
    state_dict: State,
    *,
    checkpoint_id: Place | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads a checkpoint of any format into a state dict, as ``torch.distributed.checkpoint.load`` does.

    Tensors are filled in place, on any number of ranks and in any layout; objects are replaced. Nothing is changed before
    every rank has found that the checkpoint fits: a key that is missing, or of another shape or dtype, raises
    :class:`distcp.CheckpointError` on all ranks. PyTorch casts a tensor of another dtype; this function does not, and
    ``storage_reader=Reader(url)`` with PyTorch's own ``load`` does.

    Objects are decoded, not unpickled; those of classes that PyTorch's ``weights_only`` does not take raise, when tensors
    are filled already.
    """
    mode = _load_mode(planner)
    if mode is None or storage_reader is not None:
        reader = storage_reader if storage_reader is not None else Reader(as_url(checkpoint_id))
        load_by_torch(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            **_given(no_dist=no_dist, use_collectives=True),
        )
        return
    url = as_url(checkpoint_id)
    native = checkpointer(group_of(process_group, no_dist))
    states = plain_state(state_dict)
    describer = Describer(loads=True)
    native.load(states, url, describer, make_object, mode)
    describer.finish()
    apply_loaded(state_dict, states)


def apply_loaded(state_dict: State, loaded: State) -> None:
    """Puts loaded states into a state dict, as PyTorch does: into stateful values by their own function."""
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]


def _given(*, no_dist: bool, use_collectives: bool) -> dict[str, Any]:
    """Arguments of PyTorch's functions that differ from the defaults; older versions do not have them."""
    chosen: dict[str, Any] = {}
    if no_dist:
        chosen["no_dist"] = True
    if not use_collectives:
        chosen["use_collectives"] = False
    return chosen


def plain_state(state_dict: State) -> State:
    """The state with the states of its stateful values, as PyTorch expands them."""
    if not isinstance(state_dict, Mapping):
        failed = TypeError(f"a state dict is a dict with tensors and plain data in it, not {type(state_dict).__name__}")
        return {"state_dict": Failed(failed)}
    return {key: _state_of(value) for key, value in state_dict.items()}


def _state_of(value: Any) -> Any:
    if not isinstance(value, Stateful):
        return value
    try:
        return value.state_dict()
    except Exception as error:
        return Failed(error)


def group_of(process_group: dist.ProcessGroup | None, no_dist: bool) -> dist.ProcessGroup | None:
    if not is_distributed(no_dist):
        return None
    return process_group if process_group is not None else dist.group.WORLD


def _setup(
    checkpoint_id: Place | None,
    storage_writer: StorageWriter | None,
    flatten: bool,
    group: dist.ProcessGroup | None,
) -> tuple[str, _native.Checkpointer]:
    files, overwrite = 1, True
    if isinstance(storage_writer, Writer):
        files, overwrite = storage_writer.thread_count, storage_writer._overwrite
        checkpoint_id = checkpoint_id if checkpoint_id is not None else storage_writer.path
    return as_url(checkpoint_id), checkpointer(group, files=files, overwrite=overwrite, flatten=flatten)


def checkpointer(
    group: dist.ProcessGroup | None,
    *,
    files: int = 1,
    overwrite: bool = True,
    flatten: bool = True,
    load_mode: str = "strict",
) -> _native.Checkpointer:
    """The checkpointer of a group and settings, which remembers plans and memory between saves."""
    key = (os.getpid(), id(group), files, overwrite, flatten, load_mode, _storages.registered)
    if key not in _checkpointers:
        _checkpointers[key] = _native.Checkpointer(
            group=None if group is None else Group(group),
            files=files,
            overwrite=overwrite,
            flatten=flatten,
            load_mode=load_mode,
        )
    return _checkpointers[key]


def _save_rule(planner: SavePlanner | None) -> bool | None:
    """Whether nested states are flattened; ``None`` for a planner that only PyTorch can call."""
    if planner is None:
        return True
    if type(planner) is not DefaultSavePlanner or getattr(planner, "dedup_save_to_lowest_rank", False):
        return None
    return bool(planner.flatten_state_dict)


def _load_mode(planner: LoadPlanner | None) -> str | None:
    """The mode of a load; ``None`` for a planner that only PyTorch can call."""
    if planner is None:
        return "strict"
    if type(planner) is not DefaultLoadPlanner or not planner.flatten_state_dict:
        return None
    return "allow_missing" if getattr(planner, "allow_partial_load", False) else "strict"
