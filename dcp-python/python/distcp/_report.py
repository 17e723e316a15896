"""Results of jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


class Report(Mapping[str, Any]):
    """The result of a job, with the fields that ``dcp COMMAND --json`` prints, as items and as attributes."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        object.__setattr__(self, "_fields", fields)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report of a JSON object."""
        return cls(json.loads(text))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __reduce__(self) -> tuple[type[Report], tuple[dict[str, Any]]]:
        return (Report, (self._fields,))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"the report has no {name!r}; it has {', '.join(self._fields)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a report does not change")

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={_shortened(value)}" for name, value in self._fields.items())
        return f"Report({fields})"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
