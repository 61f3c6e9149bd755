"""A head as what a draft serves: what is recognised, and what is refused before it is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd_draft.cli import main
from ssd_draft.config import DraftConfig
from ssd_draft.front.head_plan import DraftHeadPlan
from ssd_draft.front.server import plan_draft
from ssd_engine.checkpoints.heads.head_config import FeatureNorm
from tests.random_heads import make_head_for_stories, with_another_tokenizer, write_flat
from tests.random_models import make_model

TARGET = ("--target-model", "stories-target")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the shipped target; it names its boundaries, and has neither embedding nor tokenizer."""
    return make_head_for_stories(tmp_path_factory.mktemp("heads") / "random-head")


@pytest.fixture(scope="module")
def vague(head: Path) -> Path:
    """The same in the flat format, which does not say what it reads."""
    directory = head.parent / "vague-head"
    write_flat(head, directory)
    config = json.loads((directory / "config.json").read_text())
    del config["eagle_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def check(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["serve", *map(str, arguments), "--check-config"])
    return result.exit_code, result.output


def plan(model: Path, **options: object) -> DraftHeadPlan:
    options = {"device": "cpu", "target_model": "stories-target", **options}
    found = plan_draft(DraftConfig(model=str(model), **options))  # type: ignore[arg-type]
    assert isinstance(found, DraftHeadPlan)
    return found


def test_a_head_is_recognised_by_its_config(head: Path) -> None:
    for flags in ((), ("--speculator", "head")):
        code, output = check(head, *TARGET, *flags)
        assert code == 0
        assert "random-head, a head of" in output
        assert "that reads boundaries 1, 2, 3" in output


def test_boundaries_are_the_operators_or_the_configs_or_by_the_targets_layers(
    head: Path, vague: Path
) -> None:
    layers = plan(vague).head.config
    assert plan(head, aux_layers="0,4,8").head.needs.boundaries == (0, 4, 8)
    assert plan(head).head.needs.boundaries == (1, 2, 3)
    assert layers.boundaries == plan(vague).head.needs.boundaries == (2, 4, 5)  # of 8 layers


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "has no embed_tokens.weight, as most heads have none: name its target's directory"),
        ((*TARGET, "--speculator", "model"), "is an EAGLE-3 head: leave out --speculator"),
        ((*TARGET, "--aux-layers", "1,2,x"), "--aux-layers: a list such as 2,16,29"),
        ((*TARGET, "--aux-layers", "1,2"), "this head reads 3 hidden states of its target, got 2"),
        ((*TARGET, "--aux-layers", "1,2,9"), "at boundary 9, stories-target has 0 to 8"),
        (
            (*TARGET, "--tp", "2"),
            "--tp 2: random-head is a head, which one rank runs: leave out --tp",
        ),
        ((*TARGET, "--max-model-len", "20"), "--depth 8: random-head has a context of 20 tokens"),
        ((*TARGET, "--feature-window", "1"), "--feature-window: must be in [128, "),
        (("--target-model", "no-such-model"), "no-such-model"),
    ],
)
def test_what_does_not_fit_a_head_is_named(head: Path, flags: tuple[str, ...], words: str) -> None:
    code, output = check(head, *flags)
    assert code == 2
    assert words in output


def test_kv_leaves_room_for_windows_and_for_rows_on_their_way(head: Path) -> None:
    few, many = (plan(head, feature_window=256, max_num_seqs=n).runner.told_bytes for n in (2, 10))
    assert many - few == 8 * 256 * 3 * 256 * 4  # windows of float32 rows
    assert few - 2 * 256 * 3 * 256 * 4 == 128 << 20


def test_the_fingerprint_of_a_head_covers_what_it_reads_and_how(head: Path) -> None:
    found = plan(head)
    tokenizer = found.load_tokenizer()

    def fingerprint(**changes: object) -> str:
        config = replace(found.head.config, **changes)  # type: ignore[arg-type]
        return replace(found, head=replace(found.head, config=config)).fingerprint(tokenizer)

    own = fingerprint()
    assert own == found.fingerprint(tokenizer) == fingerprint(verifier="another/name")
    others = [
        fingerprint(boundaries=(0, 4, 8)),
        fingerprint(norm_before_residual=not found.head.config.norm_before_residual),
        fingerprint(norm_output=not found.head.config.norm_output),
        fingerprint(feature_norm=FeatureNorm.WHOLE),
    ]
    assert len({own, *others}) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (TARGET, "--target-model is of an EAGLE-3 head, MODEL is none"),
        (("--aux-layers", "1,2,3"), "--aux-layers is of an EAGLE-3 head, MODEL is none"),
        (("--feature-window", "256"), "--feature-window is of an EAGLE-3 head, MODEL is none"),
        (("--speculator", "head"), "is a model: leave out --speculator"),
    ],
)
def test_a_model_is_no_head(flags: tuple[str, ...], words: str) -> None:
    code, output = check("stories-draft", *flags)
    assert code == 2
    assert words in output


def test_neither_a_head_that_does_not_say_what_it_reads_is_served_nor_one_of_another_target(
    head: Path, vague: Path, tmp_path: Path
) -> None:
    make_model("llama3-untied", tmp_path)
    code, output = check(head, "--target-model", tmp_path)
    assert code == 2
    assert "made for a target with a hidden size of 256" in output
    code, output = check(vague)
    assert code == 2
    assert "does not say which hidden states it reads" in output


def test_a_tokenizer_of_another_target_is_refused(head: Path, tmp_path: Path) -> None:
    other = with_another_tokenizer(head, tmp_path / "other")
    code, output = check(other, *TARGET)
    assert code == 2
    assert "--target-model: stories-target has another tokenizer than the head" in output
