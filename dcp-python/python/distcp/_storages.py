"""Storages in Python, for schemes that Rust does not serve."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from distcp import _native


#: How often storages were registered: what keeps storages opens them again after another one.
registered = 0


class Storage(Protocol):
    """The objects below a URL, by keys such as ``step_1/.metadata``.

    Calls come from several threads. What fails raises ``FileNotFoundError``, ``FileExistsError``, ``PermissionError``,
    ``ConnectionError`` or ``TimeoutError`` (which are retried by nobody but the caller), or any other exception.
    """

    def stat(self, key: str) -> int:
        """The length of an object."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """The bytes of a range, all of them."""

    def put(self, key: str, data: bytes, only_if_absent: bool) -> None:
        """Writes a whole object; readers see the old one or the new one. With ``only_if_absent`` it fails if there is
        one."""

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        """Keys that begin with a prefix, at any depth, and the lengths of their objects."""

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; those that do not exist are no error."""


def register_storage(scheme: str, open: Callable[[str], Storage]) -> None:
    """Serves URLs of a scheme, such as ``hdfs``, by the storages that ``open`` returns for them.

    Everything of this package takes these URLs then. Each call holds the GIL, whole objects are in memory while they are
    written, and nothing keeps two savers of one place apart.
    """
    global registered
    _native.register_storage(scheme, open)
    registered += 1


def register_fsspec(scheme: str, **settings: Any) -> None:
    """Serves URLs of a scheme by the file system that ``fsspec`` has for it, with the settings of that."""

    def open(url: str) -> Storage:
        file_system, root = importlib.import_module("fsspec.core").url_to_fs(url, **settings)
        return _FsspecStorage(file_system, root)

    register_storage(scheme, open)


class _FsspecStorage:
    def __init__(self, file_system: Any, root: str) -> None:
        self._fs = file_system
        self._root = root.rstrip("/")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def stat(self, key: str) -> int:
        found = self._fs.info(self._path(key))
        if found["type"] != "file":
            raise FileNotFoundError(f"{key} is a {found['type']}")
        return int(found["size"])

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=offset, end=offset + length))

    def put(self, key: str, data: bytes, only_if_absent: bool) -> None:
        path = self._path(key)
        if only_if_absent and self._fs.exists(path):
            raise FileExistsError(key)
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._fs.pipe_file(path, data)

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        folder = self._path(prefix).rstrip("/")
        try:
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return
        root = self._fs._strip_protocol(self._root)
        for path, info in found.items():
            key = path[len(root) :].lstrip("/")
            if key.startswith(prefix):
                yield key, int(info["size"])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                continue
