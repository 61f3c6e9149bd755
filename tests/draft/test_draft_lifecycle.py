"""Start and end of a draft, as processes: what it says of itself, signals, deaths."""

import contextlib
import os
import queue
import signal
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
from tests.draft.scripted_draft import frames, hello, opening
from tests.process_tree import computing
from tests.processes import DraftProcess, draft
from tests.suite.scale import full_only
from tests.waiting import HANG_SECONDS, wait_until

SERVING, NOT_SERVING = 1, 2


@pytest.fixture(scope="module")
def fingerprint() -> str:
    directory = resolve_model("stories-draft")
    return Tokenizer(directory, load_model_config(directory)).fingerprint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftProcess]:
    flags = ("--metrics-listen", "127.0.0.1:0", "--max-num-seqs", "4", "--max-links", "3")
    with draft(tmp_path_factory.mktemp("draft"), *flags) as process:
        yield process


class Target:
    """One side of a link, by hand."""

    def __init__(self, server: DraftProcess, fingerprint: str = "", vocab_size: int = 4096) -> None:
        self._outbox: queue.Queue[pb.SpeculateRequest | None] = queue.Queue()
        self.call = server.stub().Speculate(iter(self._outbox.get, None), timeout=HANG_SECONDS)
        self.send(hello(tokenizer_fingerprint=fingerprint, vocab_size=vocab_size))

    def send(self, message: pb.SpeculateRequest) -> None:
        self._outbox.put(message)

    def leave(self) -> None:
        self._outbox.put(None)

    def end(self) -> grpc.StatusCode:
        """Read to the end: a status comes after all that was said."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        code: grpc.StatusCode = self.call.code()
        return code

    def heard(self) -> Iterator[pb.DraftFrame]:
        for response in self.call:
            yield from response.frames.frames


def vocab_size() -> int:
    return load_model_config(resolve_model("stories-draft")).vocab_size


def wait_for_sample(server: DraftProcess, sample: str, value: float) -> None:
    wait_until(lambda: server.metrics().get(sample) == value, server.metrics)


def test_it_says_what_it_is(server: DraftProcess, fingerprint: str) -> None:
    info = server.stub().GetDraftInfo(pb.GetDraftInfoRequest(), timeout=30)
    assert info.name == "stories-draft"
    assert info.speculator == pb.SPECULATOR_KIND_MODEL
    assert info.tokenizer_fingerprint == fingerprint
    assert info.vocab_size == vocab_size()
    assert info.num_parameters > 1e5
    assert (info.max_depth, info.max_branches, info.max_sequences) == (8, 24, 4)
    assert info.num_kv_blocks > 0
    assert info.protocol_version == 1


def test_a_link_gets_branches_and_its_sequences_go_with_it(
    server: DraftProcess, fingerprint: str
) -> None:
    target = Target(server, fingerprint, vocab_size())
    assert next(target.call).welcome.draft_name == "stories-draft"
    target.send(frames(opening(1), opening(2)))
    seen = set()
    for frame in target.heard():
        assert frame.WhichOneof("body") == "branches"
        assert all(branch.accepted == 0 for branch in frame.branches.branches)
        seen.add(frame.sequence)
        if seen == {1, 2}:
            break
    wait_for_sample(server, "ssd_sequences_active", 2)
    assert server.metrics()['ssd_draft_links{state="up"}'] == 1
    target.leave()
    assert target.end() == grpc.StatusCode.OK
    wait_for_sample(server, "ssd_sequences_active", 0)
    wait_for_sample(server, "ssd_draft_kv_cache_usage_ratio", 0)
    assert server.metrics()['ssd_draft_links{state="up"}'] == 0


def test_a_target_with_another_tokenizer_is_told(server: DraftProcess) -> None:
    target = Target(server, "another", vocab_size())
    assert target.end() == grpc.StatusCode.FAILED_PRECONDITION
    assert "tokenizer_fingerprint: the target has 'another'" in target.call.details()
    wait_for_sample(server, 'ssd_draft_handshake_failures_total{reason="tokenizer"}', 1)


def test_a_malformed_frame_ends_only_its_own_link(server: DraftProcess, fingerprint: str) -> None:
    good, bad = (Target(server, fingerprint, vocab_size()) for _ in range(2))
    assert next(good.call).welcome.epoch == next(bad.call).welcome.epoch
    bad.send(frames(pb.TargetFrame(outcome=pb.Outcome(token=2**31))))
    assert bad.end() == grpc.StatusCode.INVALID_ARGUMENT
    assert bad.call.details().startswith("frames.frames[0].outcome.token")
    good.send(frames(opening(1)))
    assert next(good.heard()).sequence == 1
    good.leave()
    assert good.end() == grpc.StatusCode.OK


def test_ngrams_need_no_model_and_any_target_fits_until_sigterm(tmp_path: Path) -> None:
    """Links that are there are told, and waited for until they leave."""
    with draft(tmp_path, "--drain-timeout", "3600", model=None) as server:
        info = server.stub().GetDraftInfo(pb.GetDraftInfoRequest(), timeout=HANG_SECONDS)
        assert (info.name, info.speculator) == ("ngram", pb.SPECULATOR_KIND_NGRAM)
        for size in (1000, 200_000):
            target = Target(server, "whatever", size)
            assert next(target.call).welcome.speculator == pb.SPECULATOR_KIND_NGRAM
            target.leave()
            assert target.end() == grpc.StatusCode.OK
        target = Target(server)
        assert next(target.call).welcome.epoch > 0
        server.terminate()
        notice = next(target.heard()).notice
        assert notice.kind == pb.NOTICE_KIND_LEAVING
        assert server.health("readiness") == NOT_SERVING
        assert server.health("liveness") == SERVING
        late = Target(server)
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
        target = Target(server)
        assert next(target.call).welcome.epoch > 0
        server.terminate()
        assert target.end() == grpc.StatusCode.UNAVAILABLE
        assert server.wait_for_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, full_only(signal.SIGTERM)])
def test_a_signal_to_the_whole_group_while_loading_is_a_clean_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    with draft(tmp_path, ready=False, new_session=True) as server:
        os.killpg(server.process.pid, number)
        assert server.wait_for_exit() == 0
        assert "Traceback" not in server.log()


def test_the_death_of_the_engine_ends_links_which_may_come_again(
    server: DraftProcess, fingerprint: str
) -> None:
    target = Target(server, fingerprint, vocab_size())
    assert next(target.call).welcome.epoch > 0
    (engine,) = computing(server.process.pid)
    os.kill(engine, signal.SIGKILL)
    assert target.end() == grpc.StatusCode.UNAVAILABLE
    assert "the engine process ended with exit code -9; it is started again" in server.log()
    wait_until(lambda: server.health("readiness") == SERVING)
    again = Target(server, fingerprint, vocab_size())
    assert next(again.call).welcome.epoch > 0
    again.leave()
    assert again.end() == grpc.StatusCode.OK
