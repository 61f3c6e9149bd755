"""The gateway that its own tests ask, too."""

from tests.gateway.conftest import gateway

__all__ = ["gateway"]
