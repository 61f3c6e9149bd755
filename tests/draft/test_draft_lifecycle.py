"""Start and end of a draft, as processes: what it says of itself, signals, deaths."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import Tokenizer
from tests.draft.raw_target import RawTarget
from tests.draft.scripted_draft import hello
from tests.processes import DraftProcess, draft
from tests.waiting import HANG_SECONDS

SERVING, NOT_SERVING = 1, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftProcess]:
    flags = ("--metrics-listen", "127.0.0.1:0", "--max-num-seqs", "4", "--max-links", "3")
    with draft(tmp_path_factory.mktemp("draft"), *flags) as process:
        yield process


def test_it_says_what_it_is(server: DraftProcess) -> None:
    info = server.stub().GetDraftInfo(pb.GetDraftInfoRequest(), timeout=30)
    assert info.name == "stories-draft"
    assert info.speculator == pb.SPECULATOR_KIND_MODEL
    directory = resolve_model("stories-draft")
    config = load_model_config(directory)
    assert info.tokenizer_fingerprint == Tokenizer(directory, config).fingerprint
    assert info.vocab_size == config.vocab_size
    assert info.num_parameters > 1e5
    assert (info.max_depth, info.max_branches, info.max_sequences) == (8, 24, 4)
    assert info.num_kv_blocks > 0
    assert info.protocol_version == 1


def test_a_message_that_is_too_large_ends_its_link(server: DraftProcess) -> None:
    with RawTarget(server) as target:
        target.write(bytes(17 * 2**20))
        assert target.end() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_ngrams_need_no_model_and_any_target_fits_until_sigterm(tmp_path: Path) -> None:
    """Links that are there are told, and waited for until they leave."""
    with draft(tmp_path, "--drain-timeout", "3600", model=None) as server:
        info = server.stub().GetDraftInfo(pb.GetDraftInfoRequest(), timeout=HANG_SECONDS)
        assert (info.name, info.speculator) == ("ngram", pb.SPECULATOR_KIND_NGRAM)
        for size in (1000, 200_000):
            target = RawTarget(server, hello(tokenizer_fingerprint="whatever", vocab_size=size))
            assert target.welcome().speculator == pb.SPECULATOR_KIND_NGRAM
            target.leave()
            assert target.end() == grpc.StatusCode.OK
        target = RawTarget(server, hello())
        assert target.welcome().epoch > 0
        server.terminate()
        notice = next(target.heard()).notice
        assert notice.kind == pb.NOTICE_KIND_LEAVING
        assert server.health("readiness") == NOT_SERVING
        assert server.health("liveness") == SERVING
        late = RawTarget(server, hello())
        assert late.end() == grpc.StatusCode.UNAVAILABLE
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(late.call).details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        server.terminate()  # once more: it goes on waiting
        assert server.process.poll() is None
        target.leave()
        assert server.wait_for_exit() == 0
        assert "drained" in server.log()


def test_a_link_that_stays_is_cut_off_after_the_drain_timeout(tmp_path: Path) -> None:
    with draft(tmp_path, "--drain-timeout", "0.2", model=None) as server:
        target = RawTarget(server, hello())
        assert target.welcome().epoch > 0
        server.terminate()
        assert target.end() == grpc.StatusCode.UNAVAILABLE
        assert server.wait_for_exit() == 0
