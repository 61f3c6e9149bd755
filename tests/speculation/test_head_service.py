"""A head in a service of its own: real processes, with features on the plane of their link."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.token_ids import pack_tokens
from tests import clockwork
from tests.processes import PATIENT, DraftProcess, Output, TargetProcess, draft, target
from tests.speculation.generations import (
    METRICS,
    OFF,
    SSD,
    Generations,
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


@dataclass
class Services:
    target: TargetProcess
    draft: DraftProcess
    folder: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("clockwork")
    clockwork.make_target(folder / "target")
    write_tokenizer(folder / "target")
    clockwork.make_head(folder / "head")
    return folder


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[Services]:
    named = (*METRICS, "--target-model", str(folder / "target"))
    with draft(folder / "draft", *named, model=str(folder / "head")) as head:
        flags = ("--draft", head.address, *PATIENT, "--depth", str(DEPTH), *METRICS)
        kept = ("--keep-features", "8")
        with target(folder / "served", *flags, *kept, model=str(folder / "target")) as server:
            wait_until(lambda: is_up(server, head.address), server.log)
            yield Services(server, head, folder)


def asked(seed: int, prompt: int, tokens: int, temperature: float = 0.0) -> pb.GenerateRequest:
    tokens_of_prompt = [(5 * i + 11 * seed) % clockwork.VOCAB for i in range(prompt)]
    return pb.GenerateRequest(
        token_ids=pack_tokens(tokens_of_prompt),
        sampling=pb.SamplingOptions(seed=seed, temperature=temperature),
        stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=SSD),
    )


def plain(services: Services, message: pb.GenerateRequest) -> list[int]:
    return generate(services.target, with_speculation(message, mode=OFF)).tokens


def acceptance(output: Output) -> float:
    stats = output.finish.speculation
    return stats.accepted_tokens / max(1, stats.drafted_tokens)


def generate_foreseen(services: Services, message: pb.GenerateRequest) -> Output:
    """Its text is plain decoding's, and it came from the head's foresight."""
    expected = plain(services, message)

    def attempt() -> Output | None:
        output = generate(services.target, message)
        assert output.tokens == expected
        return output if output.finish.speculation.accepted_tokens else None

    output = wait_until(attempt, services.target.log)
    assert output is not None
    return output


def test_a_head_foresees_what_its_target_says(services: Services) -> None:
    output = generate_foreseen(services, asked(1, 20, 60))
    assert acceptance(output) == 1.0
    for seed in (2, 3):
        generate_foreseen(services, asked(seed, 40, 40, temperature=0.7))


def test_planes_and_boundaries_are_told(services: Services) -> None:
    generate_foreseen(services, asked(4, 20, 20))
    found = endpoint(services.target, services.draft.address)
    assert found is not None
    [sent] = found.planes
    info = draft_info(services.draft)
    assert info.speculator == 3
    assert list(info.features.boundaries) == [1, 2, 3]
    [received] = info.planes
    assert (sent.stream, received.stream) == ("features", "features")
    assert (sent.kind, sent.state) == ("shared_memory", "up")
    assert sent.bytes == sent.rows * 3 * clockwork.VOCAB * 4 > 0
    assert services.draft.metrics()["ssd_draft_feature_rows_total"] > 0
    assert "features go by shared_memory" in services.target.log()
    assert "features go by shared_memory" in services.draft.log()


def test_a_draft_that_is_killed_and_comes_back_is_told_again(services: Services) -> None:
    """In the middle of a text, the target tells what it has kept."""
    message = asked(5, 30, 200)
    expected = plain(services, message)
    with Generations(services.target, [message]) as running:
        running.until_each_has(20)
        services.draft.kill()
    assert running.outputs[0].tokens == expected
    port = services.draft.address.rpartition(":")[2]
    flags = (*METRICS, "--target-model", str(services.folder / "target"))
    flags += ("--listen", f"127.0.0.1:{port}")
    with draft(services.folder / "again", *flags, model=str(services.folder / "head")) as again:
        wait_until(lambda: is_up(services.target, again.address), services.target.log)
        other = Services(services.target, again, services.folder)
        output = generate_foreseen(other, message)
        assert acceptance(output) == 1.0
