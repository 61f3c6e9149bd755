"""A server whose KV cache holds far fewer tokens than its requests may have."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from tests.processes import TargetProcess, collect, target, wait_until_idle
from tests.suite.scale import full_only
from tests.waiting import HANG_SECONDS

NUM_REQUESTS = 4


def generate(server: TargetProcess, number: int, schema: str | None = None) -> list[int]:
    """It names no ``max_tokens``: so it may fill the whole context."""
    request = pb.GenerateRequest(
        text=f"Once upon a time there were {number} lambs",
        sampling=pb.SamplingOptions(temperature=1.0, seed=number),
        stop=pb.StopOptions(ignore_eos=schema is None),
        grammar=None if schema is None else pb.Grammar(json_schema=schema),
    )
    return collect(server.stub().Generate(request, timeout=HANG_SECONDS)).tokens


def assert_all_end_with_their_text(
    tmp_path: Path, schema: str | None, *flags: str
) -> tuple[dict[str, float], str]:
    """Metrics and log of the server, which has set some aside."""
    size = ("--max-model-len", "96", "--num-kv-blocks", "12", "--metrics-listen", "127.0.0.1:0")
    numbers = range(NUM_REQUESTS)
    with target(tmp_path, *size, *flags) as server:
        alone = [generate(server, number, schema) for number in numbers]
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            together = list(pool.map(lambda number: generate(server, number, schema), numbers))
        assert together == alone
        assert all(len(tokens) > 50 for tokens in alone)
        wait_until_idle(server)
        metrics = server.metrics()
        assert metrics["ssd_sequences_set_aside_total"] >= 1
        return metrics, server.log()


@pytest.mark.parametrize("ranks", ["1", full_only("2")])
def test_requests_without_a_limit_all_end_with_their_text(ranks: str, tmp_path: Path) -> None:
    flags = ("--swap-gib", "0.01", "--tp", ranks)
    metrics, log = assert_all_end_with_their_text(tmp_path, None, *flags)
    assert metrics["ssd_sequences_swapped_out_total"] >= 1
    assert "KV blocks run out" in log


def test_what_is_set_aside_under_a_grammar_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Its text fills the context."""
    items = {"type": "string", "minLength": 9}
    schema = json.dumps({"type": "array", "items": items, "minItems": 30})
    assert_all_end_with_their_text(tmp_path, schema, "--swap-gib", "0")
