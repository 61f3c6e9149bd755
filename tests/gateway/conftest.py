"""A gateway in front of a pair that keeps traces, shared by all tests that only ask it."""

from collections.abc import Iterator

import openai
import pytest

from tests.client.conftest import start
from tests.gateway.callers import sdk_of
from tests.processes import GatewayProcess, TracedPair
from tests.processes import gateway as start_gateway
from tests.suite.dealing import shared_services

__all__ = ["gateway", "sdk", "start"]


@shared_services
def gateway(
    traced_pair: TracedPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    target, _ = traced_pair
    folder = tmp_path_factory.mktemp("gateway")
    with start_gateway(folder, targets=[target.address]) as process:
        yield process


@pytest.fixture
def sdk(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with sdk_of(gateway) as client:
        yield client
