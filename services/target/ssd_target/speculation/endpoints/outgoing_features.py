"""Features on their way to the plane of an endpoint."""

from collections.abc import Callable

import torch
from torch import Tensor

from ssd_engine.tensor_plane.host_rows import HostRows
from ssd_target.speculation.endpoints.feature_text import FEW_ROWS


class OutgoingFeatures:
    """Some rows that were handed over: made by the plane's thread, or before, where it is slow and
    they would hold more than themselves."""

    def __init__(self, pieces: list[HostRows], cut: Callable[[Tensor], Tensor]) -> None:
        """``cut``: what the endpoint reads of them, as it travels."""
        self._content: list[HostRows] | Tensor | None = pieces
        self._cut = cut
        self.num_rows = sum(map(len, pieces))
        self.num_bytes = sum(piece.num_bytes for piece in pieces)  # as they wait

    @property
    def holds_more(self) -> bool:
        """Whether few rows keep the memory of a whole forward."""
        content = self._content
        few = self.num_rows <= FEW_ROWS and isinstance(content, list)
        return few and any(piece.is_borrowed for piece in content or ())

    def make(self) -> Tensor:
        """In the plane's thread, once."""
        content = self._content
        if content is None:
            raise RuntimeError("features are sent once")
        rows = content if isinstance(content, Tensor) else self._made(content)
        self._content = None
        return rows

    def settle(self) -> None:
        """In the engine's thread, after they have landed: the same rows, in memory of their own."""
        content = self._content
        if isinstance(content, list):
            self._content = self._made(content)

    def _made(self, pieces: list[HostRows]) -> Tensor:
        return self._cut(torch.cat([piece.get() for piece in pieces]))
