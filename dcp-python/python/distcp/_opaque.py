"""Objects of checkpoints that only Python code could make."""

from __future__ import annotations


class Opaque:
    """An object that is no plain data, such as an instance of a class. It was decoded, not unpickled.

    ``encoded`` is the archive of ``torch.save``. ``torch.load(io.BytesIO(value.encoded), weights_only=True)`` makes the
    object of it if PyTorch holds its classes for safe.
    """

    __slots__ = ("encoded", "key", "shown")

    def __init__(self, key: str, encoded: bytes, shown: str) -> None:
        self.key = key
        self.encoded = encoded
        self.shown = shown

    def __repr__(self) -> str:
        return f"<distcp.Opaque {self.key!r}: {self.shown}>"
