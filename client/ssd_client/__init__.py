"""The client of SSD: sends a prompt to a target, streams its tokens, and goes on elsewhere.

    from ssd_client import Client

    with Client("127.0.0.1:7410") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)

Nothing in here imports torch or a service; local services are started as processes of their own.
docs/python.md tells more.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd_client.connection.security import Security
    from ssd_client.errors import (
        BadInputError,
        ClientError,
        DeadlineError,
        EndpointFullError,
        EndpointLostError,
        ModelMismatchError,
    )
    from ssd_client.generate.api import Client, Stream
    from ssd_client.generate.api_async import AsyncClient, AsyncStream
    from ssd_client.generate.events import (
        Event,
        Finished,
        FinishReason,
        Moved,
        Started,
        TokenLogprobs,
        Tokens,
        Usage,
    )
    from ssd_client.generate.result import GenerationResult, Timing
    from ssd_client.generate.speculation import SpeculationStats

# Imported when they are asked for: a command starts without those that it does not need.
_WHERE = {
    "generate.api": ("Client", "Stream"),
    "generate.api_async": ("AsyncClient", "AsyncStream"),
    "errors": (
        "BadInputError",
        "ClientError",
        "DeadlineError",
        "EndpointFullError",
        "EndpointLostError",
        "ModelMismatchError",
    ),
    "generate.events": (
        "Event",
        "Finished",
        "FinishReason",
        "Moved",
        "Started",
        "TokenLogprobs",
        "Tokens",
        "Usage",
    ),
    "generate.result": ("GenerationResult", "Timing"),
    "connection.security": ("Security",),
    "generate.speculation": ("SpeculationStats",),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadInputError",
    "Client",
    "ClientError",
    "DeadlineError",
    "EndpointFullError",
    "EndpointLostError",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationResult",
    "ModelMismatchError",
    "Moved",
    "Security",
    "SpeculationStats",
    "Started",
    "Stream",
    "Timing",
    "TokenLogprobs",
    "Tokens",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
