"""A gateway in front of a pair that keeps traces, shared by all tests that only ask it."""

from collections.abc import Iterator

import openai
import pytest

from tests.processes import GatewayProcess, TracedPair
from tests.processes import gateway as start_gateway
from tests.suite.dealing import shared_services


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
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
