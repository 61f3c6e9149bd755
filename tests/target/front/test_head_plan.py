"""A head as a target's own draft: what is served, and what is refused before anything is loaded."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import LlamaConfig

from ssd.v1 import target_pb2 as pb
from ssd_client.cli import cli
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_target.cli import main
from ssd_target.front import head_plan
from tests.processes import TargetProcess, target
from tests.random_heads import HeadKind, make_head
from tests.random_models import make_model

LIKE_STORIES = dict(vocab_size=4096, hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the shipped target, with random weights: hardly any of its guesses is right."""
    directory = tmp_path_factory.mktemp("heads") / "random-head"
    make_head(HeadKind(LlamaConfig, draft_vocab_size=1000), directory, **LIKE_STORIES)
    return directory


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["serve", *arguments, "--check-config"])
    return result.exit_code, result.output


def test_a_head_is_recognised_and_its_boundaries_are_told(head: Path) -> None:
    code, output = check("stories-target", "--draft-model", str(head), "--device", "cpu")
    assert code == 0
    assert "random-head, a head of" in output
    assert "that reads boundaries 1, 2, 3" in output


def test_operators_may_name_the_boundaries_of_a_head_inside(head: Path) -> None:
    own = ("stories-target", "--device", "cpu", "--draft-model", str(head), "--aux-layers")
    code, output = check(*own, "0,4,8")
    assert code == 0
    assert "that reads boundaries 0, 4, 8" in output
    for named, words in (
        ("1,2,9", "at boundary 9, stories-target has 0 to 8"),
        ("1,2", "this head reads 3 hidden states of its target, got 2"),
        ("1,2,x", "--aux-layers: a list such as 2,16,29"),
    ):
        code, output = check(*own, named)
        assert code == 2
        assert words in output


@pytest.mark.parametrize("draft", [(), ("--draft-model", "stories-draft")])
def test_boundaries_of_no_head_are_refused(draft: tuple[str, ...]) -> None:
    code, output = check("stories-target", "--device", "cpu", *draft, "--aux-layers", "1,2,3")
    assert code == 2
    assert "EAGLE-3 head" in output


def test_a_head_of_another_target_is_refused(head: Path, tmp_path: Path) -> None:
    make_model("llama3-untied", tmp_path)
    code, output = check(str(tmp_path), "--draft-model", str(head), "--device", "cpu")
    assert code == 2
    assert "made for a target with a hidden size of 256" in output


def test_a_head_grows_with_its_target(head: Path) -> None:
    grown = ("--expand-to", "hidden=320,layers=9", "--device", "cpu")
    code, output = check("stories-target", *grown, "--draft-model", "stories-eagle")
    assert code == 0
    assert "stories-eagle, a head of 3.0M parameters that reads boundaries" in output
    own = ("--draft-model", str(head), "--draft-expand-to", "hidden=320")
    code, output = check("stories-target", *grown, *own)
    assert code == 2
    assert "--draft-expand-to: random-head is an EAGLE-3 head" in output


def test_a_tokenizer_of_another_target_is_refused(head: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(head, other)
    content = json.loads((resolve_model("stories-target") / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [*vocabulary][300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    code, output = check("stories-target", "--device", "cpu", "--draft-model", str(other))
    assert code == 2
    assert "--draft-model: other has another tokenizer than its target" in output


def test_the_name_of_another_target_is_a_warning(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(head_plan.log, "warning", lambda words, *about: said.append(words % about))
    named = tmp_path / "named"
    shutil.copytree(head, named)
    config = json.loads((named / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "someone/another"
    (named / "config.json").write_text(json.dumps(config))
    code, _ = check("stories-target", "--device", "cpu", "--draft-model", str(named))
    assert code == 0
    assert said == ["named was trained for someone/another, not stories-target"]


def test_a_context_without_room_for_the_depth_is_refused(head: Path) -> None:
    short = ("--max-model-len", "32", "--depth", "16", "--device", "cpu")
    code, output = check("stories-target", *short, "--draft-model", str(head))
    assert code == 2
    assert "--depth 16: random-head has a context of 32 tokens" in output


def test_a_head_is_no_model_by_itself(head: Path) -> None:
    code, output = check(str(head))
    assert code == 2
    assert "is an EAGLE-3 head, and no model by itself" in output


@pytest.fixture(scope="module")
def serving(head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    folder = tmp_path_factory.mktemp("serving")
    flags = ("--draft-model", str(head), "--no-auto-off", "--no-adapt-depth", "--depth", "3")
    with target(folder, *flags) as process:
        yield process


def generate(
    serving: TargetProcess, mode: "pb.SpeculationMode", seed: int
) -> tuple[list[int], int]:
    """The tokens, and how many rounds were drafted for."""
    request = pb.GenerateRequest(text="Once upon a time there was a fox.")
    request.sampling.seed, request.sampling.temperature = seed, 0.8 * (seed % 2)
    request.stop.max_tokens, request.stop.ignore_eos = 24, True
    request.speculation.mode = mode
    tokens: list[int] = []
    rounds = 0
    for response in serving.stub().Generate(request):
        tokens += response.tokens.token_ids
        rounds += response.finish.speculation.sync_rounds
    return tokens, rounds


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_of_plain_decoding(serving: TargetProcess, seed: int) -> None:
    plain, _ = generate(serving, pb.SPECULATION_MODE_OFF, seed)
    drafted, rounds = generate(serving, pb.SPECULATION_MODE_SYNC, seed)
    assert drafted == plain
    assert len(plain) == 24
    assert rounds > 10


def test_it_says_what_is_inside(serving: TargetProcess) -> None:
    info = serving.stub().GetModelInfo(pb.GetModelInfoRequest())
    assert (info.draft_inside.kind, info.draft_inside.name) == ("head", "random-head")
    for command, words in (
        ("status", "random-head (EAGLE-3 head) inside"),
        ("info", "random-head"),
    ):
        shown = CliRunner().invoke(cli, [command, "--target", serving.address])
        assert words in shown.output
