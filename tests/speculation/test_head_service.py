"""A head in a service of its own: real processes, with features on the plane of their link."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.token_ids import pack_tokens
from tests import clockwork
from tests.processes import DraftProcess, TargetProcess, draft, target
from tests.speculation.generations import (
    METRICS,
    OFF,
    SSD,
    WAITS_2_SECONDS,
    draft_info,
    endpoint,
    generate,
    is_up,
    with_speculation,
)
from tests.waiting import wait_until

DEPTH = 4


def write_tokenizer(directory: Path) -> None:
    """A token for each of some bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: clockwork.VOCAB]
    library = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[TargetProcess, DraftProcess]]:
    clockwork.make_target(tmp_path / "target")
    write_tokenizer(tmp_path / "target")
    clockwork.make_head(tmp_path / "head")
    named = (*METRICS, "--target-model", str(tmp_path / "target"))
    with draft(tmp_path / "draft", *named, model=str(tmp_path / "head")) as head:
        flags = ("--draft", head.address, *WAITS_2_SECONDS, "--depth", str(DEPTH), *METRICS)
        kept = ("--keep-features", "8")
        with target(tmp_path / "served", *flags, *kept, model=str(tmp_path / "target")) as server:
            yield server, head


def asked(seed: int, prompt: int, tokens: int, temperature: float = 0.0) -> pb.GenerateRequest:
    tokens_of_prompt = [(5 * i + 11 * seed) % clockwork.VOCAB for i in range(prompt)]
    return pb.GenerateRequest(
        token_ids=pack_tokens(tokens_of_prompt),
        sampling=pb.SamplingOptions(seed=seed, temperature=temperature),
        stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=SSD),
    )


def generate_foreseen(
    server: TargetProcess, head: DraftProcess, message: pb.GenerateRequest
) -> pb.SpeculationStats:
    """Its text is plain decoding's, and it came from the head's foresight."""
    wait_until(lambda: is_up(server, head.address), server.log)
    expected = generate(server, with_speculation(message, mode=OFF)).tokens

    def attempt() -> pb.SpeculationStats | None:
        output = generate(server, message)
        assert output.tokens == expected
        stats = output.finish.speculation
        return stats if stats.accepted_tokens else None

    stats = wait_until(attempt, server.log)
    assert stats is not None
    return stats


def test_a_head_foresees_what_its_target_says_by_a_plane_that_both_name(
    services: tuple[TargetProcess, DraftProcess],
) -> None:
    server, head = services
    stats = generate_foreseen(server, head, asked(1, 20, 24))
    assert stats.accepted_tokens == stats.drafted_tokens
    generate_foreseen(server, head, asked(2, 40, 16, temperature=0.7))
    found = endpoint(server, head.address)
    assert found is not None
    [sent] = found.planes
    info = draft_info(head)
    assert info.speculator == 3
    assert list(info.features.boundaries) == [1, 2, 3]
    [received] = info.planes
    assert (sent.stream, received.stream) == ("features", "features")
    assert (sent.kind, sent.state) == ("shared_memory", "up")
    assert sent.bytes == sent.rows * 3 * clockwork.VOCAB * 4 > 0
    assert head.metrics()["ssd_draft_feature_rows_total"] > 0
    assert "features go by shared_memory" in server.log()
    assert "features go by shared_memory" in head.log()
