"""A head as a target's own draft: what is served, and what is refused before anything is loaded."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd.v1 import target_pb2 as pb
from ssd_client.cli import cli
from ssd_target.cli import main
from ssd_target.front import head_plan
from tests.processes import TargetProcess, collect, target
from tests.random_heads import make_head_for_stories, with_another_tokenizer
from tests.random_models import make_model


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the shipped target, with random weights: hardly any of its guesses is right."""
    return make_head_for_stories(tmp_path_factory.mktemp("heads") / "random-head")


def check(*arguments: str) -> tuple[int, str]:
    command = ["serve", *arguments, "--device", "cpu", "--check-config"]
    result = CliRunner().invoke(main, command)
    return result.exit_code, result.output


def assert_refused(words: str, *arguments: str) -> None:
    code, output = check(*arguments)
    assert code == 2
    assert words in output


def test_operators_may_name_the_boundaries_of_a_head_inside(head: Path) -> None:
    own = ("stories-target", "--draft-model", str(head))
    for flags, boundaries in (((), "1, 2, 3"), (("--aux-layers", "0,4,8"), "0, 4, 8")):
        code, output = check(*own, *flags)
        assert code == 0
        assert "random-head, a head of" in output
        assert f"that reads boundaries {boundaries}" in output
    for named, words in (
        ("1,2,9", "at boundary 9, stories-target has 0 to 8"),
        ("1,2", "this head reads 3 hidden states of its target, got 2"),
        ("1,2,x", "--aux-layers: a list such as 2,16,29"),
    ):
        assert_refused(words, *own, "--aux-layers", named)
    for draft in ((), ("--draft-model", "stories-draft")):
        assert_refused("EAGLE-3 head", "stories-target", *draft, "--aux-layers", "1,2,3")


def test_a_head_grows_with_its_target(head: Path) -> None:
    grown = ("stories-target", "--expand-to", "hidden=320,layers=9", "--draft-model")
    code, output = check(*grown, "stories-eagle")
    assert code == 0
    assert "stories-eagle, a head of 3.0M parameters that reads boundaries" in output
    words = "--draft-expand-to: random-head is an EAGLE-3 head"
    assert_refused(words, *grown, str(head), "--draft-expand-to", "hidden=320")


def test_what_does_not_fit_its_target_is_refused(head: Path, tmp_path: Path) -> None:
    """A target of another width or tokenizer, a context without room for the depth; and a head is
    no model by itself."""
    make_model("llama3-untied", tmp_path / "wide")
    other = with_another_tokenizer(head, tmp_path / "other")
    short = ("--max-model-len", "32", "--depth", "16")
    for model, draft, flags, words in (
        (str(tmp_path / "wide"), head, (), "made for a target with a hidden size of 256"),
        ("stories-target", other, (), "--draft-model: other has another tokenizer than its target"),
        ("stories-target", head, short, "--depth 16: random-head has a context of 32 tokens"),
    ):
        assert_refused(words, model, "--draft-model", str(draft), *flags)
    assert_refused("is an EAGLE-3 head, and no model by itself", str(head))


def test_the_name_of_another_target_is_a_warning(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(head_plan.log, "warning", lambda words, *about: said.append(words % about))
    named = shutil.copytree(head, tmp_path / "named")
    config = json.loads((named / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "someone/another"
    (named / "config.json").write_text(json.dumps(config))
    code, _ = check("stories-target", "--draft-model", str(named))
    assert code == 0
    assert said == ["named was trained for someone/another, not stories-target"]


@pytest.fixture(scope="module")
def serving(head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    folder = tmp_path_factory.mktemp("serving")
    flags = ("--draft-model", str(head), "--no-auto-off", "--no-adapt-depth", "--depth", "3")
    with target(folder, *flags) as process:
        yield process


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_those_of_plain_decoding(serving: TargetProcess, seed: int) -> None:
    request = pb.GenerateRequest(text="Once upon a time there was a fox.")
    request.sampling.seed, request.sampling.temperature = seed, 0.8 * seed
    request.stop.max_tokens, request.stop.ignore_eos = 24, True
    request.speculation.mode = pb.SPECULATION_MODE_OFF
    plain = collect(serving.stub().Generate(request))
    request.speculation.mode = pb.SPECULATION_MODE_SYNC
    drafted = collect(serving.stub().Generate(request))
    assert drafted.tokens == plain.tokens
    assert drafted.finish.speculation.sync_rounds > 10


def test_it_says_what_is_inside(serving: TargetProcess) -> None:
    info = serving.stub().GetModelInfo(pb.GetModelInfoRequest())
    assert (info.draft_inside.kind, info.draft_inside.name) == ("head", "random-head")
    for command, words in (
        ("status", "random-head (EAGLE-3 head) inside"),
        ("info", "random-head"),
    ):
        shown = CliRunner().invoke(cli, [command, "--target", serving.address])
        assert words in shown.output
