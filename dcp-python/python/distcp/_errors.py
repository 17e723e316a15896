"""The exceptions of this package, and their table by kind."""

from __future__ import annotations


class CheckpointError(Exception):
    """A save, a load or a job failed.

    ``kind`` is for programs, such as ``"damaged"`` or ``"rank-lost"``. ``rank`` is the rank that failed first, where one
    did; ``hint`` is advice. ``retryable`` says whether the same call may succeed when it is repeated. Subclasses are also
    what Python programs expect: a missing key is a ``KeyError``, a full disk an ``OSError``.
    """

    kind: str = "other"
    message: str = ""
    causes: tuple[str, ...] = ()
    hint: str | None = None
    rank: int | None = None
    retryable: bool = False

    def __str__(self) -> str:
        text = ": ".join([self.message, *self.causes])
        return f"{text} (hint: {self.hint})" if self.hint else text


class StorageError(CheckpointError, OSError):
    """A storage failed: a full disk, a lost connection, a permission."""


class NotFoundError(StorageError, FileNotFoundError):
    """There is nothing at the place."""


class ExistsError(StorageError, FileExistsError):
    """There is something at the target, and replacing it was not requested."""


class DeniedError(StorageError, PermissionError):
    """The storage refuses the access."""


class DamagedError(CheckpointError, ValueError):
    """The checkpoint is damaged, unfinished, or none at all."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint and the state dict have other keys, shapes or dtypes."""


class OptionError(CheckpointError, ValueError):
    """An argument makes no sense here."""


class UnknownKeyError(CheckpointError, KeyError):
    """The checkpoint has no key of that name."""

    __str__ = CheckpointError.__str__


class OutOfMemoryError(CheckpointError, MemoryError):
    """There is not enough memory."""


class RankError(CheckpointError, RuntimeError):
    """A rank died, did not answer, or is out of step."""


_CLASSES: dict[str, type[CheckpointError]] = {
    "storage-not-found": NotFoundError,
    "storage-already-exists": ExistsError,
    "storage-denied": DeniedError,
    "storage-credentials": DeniedError,
    "io": StorageError,
    "not-a-checkpoint": DamagedError,
    "damaged": DamagedError,
    "unfinished": DamagedError,
    "mismatch": MismatchError,
    "invalid-plan": MismatchError,
    "disagreement": MismatchError,
    "invalid-option": OptionError,
    "storage-invalid": OptionError,
    "storage-unsupported": OptionError,
    "invalid-place": OptionError,
    "undecided": OptionError,
    "unsupported": OptionError,
    "same-target": OptionError,
    "overlap": OptionError,
    "other-checkpoint": ExistsError,
    "unknown-key": UnknownKeyError,
    "out-of-memory": OutOfMemoryError,
    "rank-lost": RankError,
    "protocol": RankError,
}


def of(
    kind: str,
    message: str,
    causes: list[str] | tuple[str, ...] = (),
    hint: str | None = None,
    rank: int | None = None,
    retryable: bool = False,
) -> CheckpointError:
    """The exception of a kind; the native module calls it."""
    default = StorageError if kind.startswith("storage-") else CheckpointError
    error = _CLASSES.get(kind, default)(": ".join([message, *causes]))
    error.kind = kind
    error.message = message
    error.causes = tuple(causes)
    error.hint = hint
    error.rank = rank
    error.retryable = retryable
    return error
