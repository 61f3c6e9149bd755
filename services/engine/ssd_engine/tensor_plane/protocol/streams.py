"""Streams of rows: each declares what its rows are, and which way they go. No torch here.

A plane carries one stream. Both sides declare it, and are made from what they have agreed on.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

MAX_SEND_BYTES = 1 << 30
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class RowsDirection(Enum):
    UNSPECIFIED = "unspecified"  # by a peer, or in a word that is not known here
    TO_TARGET = "to_target"
    TO_DRAFT = "to_draft"


@dataclass(frozen=True)
class RowsStream:
    """Every row has ``width`` values of ``dtype``; one send has 1 to ``max_rows`` rows."""

    name: str
    direction: RowsDirection
    width: int
    dtype: str
    max_rows: int

    @property
    def row_bytes(self) -> int:
        return self.width * VALUE_BYTES[self.dtype]

    @property
    def max_bytes(self) -> int:
        return self.max_rows * self.row_bytes

    def check(self) -> None:
        """Raises ValueError for what no plane carries."""
        if self.dtype not in VALUE_BYTES or self.direction is RowsDirection.UNSPECIFIED:
            raise ValueError(f"rows of {self.dtype} cannot be sent {self.direction.value}")
        if self.width < 1 or self.max_rows < 1:
            raise ValueError("rows need at least one value, sends at least one row")
        if self.max_bytes > MAX_SEND_BYTES:
            raise ValueError(f"{self.max_rows} rows of {self.row_bytes} bytes are too much to send")

    def check_count(self, num_rows: int) -> None:
        if not 1 <= num_rows <= self.max_rows:
            raise ValueError(f"{num_rows} rows; 1 to {self.max_rows} were agreed")

    def fields(self) -> dict[str, Any]:
        """The declaration in plain values, by the names of what it declares."""
        return {**asdict(self), "direction": self.direction.value}

    def agreed_with(self, declared: Iterable["RowsStream"]) -> "RowsStream":
        """This stream as both sides can have it; raises ValueError for one that differs."""
        theirs = next((each for each in declared if each.name == self.name), None)
        if theirs is None:
            raise ValueError(f"the peer declares no {self.name}, or speaks another version of it")
        check_same(self.fields(), replace(theirs, max_rows=self.max_rows).fields())
        return replace(self, max_rows=min(self.max_rows, theirs.max_rows))


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises ValueError with the name of what differs."""
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ValueError(f"other {name}: {theirs.get(name)!r} there, {value!r} here")
