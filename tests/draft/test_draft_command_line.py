"""``ssd-draft`` at start-up: bad input is one line and exit code 2, before anything is loaded."""

import pytest
from click.testing import CliRunner

from ssd_draft.cli import main, serve
from ssd_draft.config import DraftConfig, fan_outs
from ssd_draft.front.head_plan import DraftHeadPlan
from ssd_draft.front.server import plan_draft


def check(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of ``ssd-draft serve … --check-config``."""
    result = CliRunner().invoke(main, ["serve", *arguments, "--check-config"], env=env)
    return result.exit_code, result.output


def test_check_config_accepts_a_model_and_none() -> None:
    code, output = check("stories-draft")
    assert code == 0
    assert output.startswith("ok: stories-draft, ")
    assert check("--speculator", "ngram") == (0, "ok: ngram\n")


def test_a_shipped_head_knows_its_target_and_grows_with_it() -> None:
    code, output = check("stories-eagle")
    assert code == 0
    assert output.startswith("ok: stories-eagle, a head of 2.4M parameters that reads boundaries")
    plan = plan_draft(DraftConfig(model="stories-eagle", expand_to="llama-3.1-8b", device="cpu"))
    assert isinstance(plan, DraftHeadPlan)
    assert plan.head.needs.hidden_size == 4096
    assert plan.runner.expand_to is not None
    assert plan.runner.expand_to.layers is None
    assert plan.num_parameters > 800e6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "MODEL is missing: name a draft model, or use --speculator ngram"),
        (["stories-draft", "--speculator", "ngram"], "takes no MODEL, got 'stories-draft'"),
        (["no-such-model"], "stories-draft"),
        (["stories-draft", "--speculator", "magic"], "--speculator"),
        (["stories-draft", "--listen", "nowhere"], "--listen: HOST:PORT"),
        (["stories-draft", "--tp", "3"], "--tp 3 must divide"),
        (["stories-draft", "--max-links", "0"], "--max-links: must be in [1, "),
        (["stories-draft", "--max-seqs-per-link", "0"], "--max-seqs-per-link: must be in [1, "),
        (["stories-draft", "--depth", "0"], "--depth: must be in [1, 64], got 0"),
        (["stories-draft", "--budget", "0"], "--budget: must be in [1, 1024], got 0"),
        (["stories-draft", "--max-rows", "8"], "--max-rows 8 must be at least --budget 24"),
        (["stories-draft", "--max-frames", "0"], "--max-frames: must be in [1, "),
        (["stories-draft", "--link-write-timeout", "nan"], "--link-write-timeout: must be in [1, "),
        (["stories-draft", "--fan-out", "3,x"], "--fan-out: auto, or a list such as 3,2,1"),
        (["stories-draft", "--fan-out", ""], "--fan-out: auto, or a list"),
        (["stories-draft", "--fan-out", "3,-1"], "--fan-out: auto, or a list"),
        (["stories-draft", "--fan-out", "1,1,1,1", "--depth", "2"], "at most 3 numbers"),
        (["stories-draft", "--fan-out-miss", "4,3"], "--fan-out-miss: 4,3 makes 28 branches"),
        (["stories-draft", "--expand-to", "layers=1"], "--expand-to: layers=1 is less than"),
        (["stories-draft", "--max-model-len", "1000000"], "--allow-long-context"),
        (["stories-draft", "--plane-ports", "7500"], "--plane-ports: a range of ports such as"),
        (["stories-draft", "--plane-ports", "7599-7500"], "got '7599-7500'"),
        (["stories-draft", "--plane-ports", "0-70000"], "--plane-ports: a range of ports"),
        (["stories-draft", "--plane-kind", "pigeon"], "--plane-kind"),
        (["stories-draft", "--device", "cpu", "--plane-kind", "nccl"], "joins GPUs, but this"),
        (
            [
                "stories-draft",
                *["--device", "cuda", "--plane-kind", "nccl", "--plane-ports", "1-9"],
            ],
            "--plane-ports: NCCL takes any port",
        ),
        (["stories-draft", "--unknown-flag", "1"], "--unknown-flag"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(flags: list[str], words: str) -> None:
    code, output = check(*flags)
    assert code == 2
    assert words in output
    assert len([line for line in output.splitlines() if "rror: " in line]) == 1


def test_fan_outs_are_lists_or_left_to_the_draft() -> None:
    """A draft may prepare for nothing, and be waited for."""
    assert fan_outs(DraftConfig(fan_out="0", fan_out_miss="0")) == ((0,), (0,))
    config = DraftConfig(fan_out="3, 2,1", fan_out_miss="auto", budget=13)
    assert fan_outs(config) == ((3, 2, 1), None)


def test_the_runner_has_room_for_every_row_of_a_tree() -> None:
    plan = plan_draft(DraftConfig(model="stories-draft", depth=5, budget=7, max_rows=1000))
    assert plan is not None
    assert plan.runner.max_forward_tokens == 1000
    assert plan.runner.max_tail >= 5 + 5 * 7


class TestEnvironment:
    def test_every_option_has_a_variable(self) -> None:
        options = {p.name: p for p in serve.params if p.name not in ("model", "help")}
        settable = {f for f in DraftConfig.__dataclass_fields__ if f != "model"}
        assert options.keys() == settable | {"check_config"}
        for name, option in options.items():
            assert option.envvar == f"SSD_DRAFT_{name.upper()}"

    @pytest.mark.parametrize(
        ("variable", "value", "words"),
        [
            ("SSD_DRAFT_LISTEN", "nowhere", "--listen: HOST:PORT"),
            ("SSD_DRAFT_DEPTH", "0", "--depth: must be"),
            ("SSD_DRAFT_SPECULATOR", "magic", "'--speculator'"),
            ("SSD_DRAFT_FAN_OUT_MISS", "x", "--fan-out-miss"),
        ],
    )
    def test_a_bad_variable_is_refused_like_its_flag(
        self, variable: str, value: str, words: str
    ) -> None:
        code, output = check("stories-draft", env={variable: value})
        assert code == 2
        assert words in output

    def test_the_model_has_one_as_well_and_a_target_s_are_not_a_draft_s(self) -> None:
        assert check(env={"SSD_DRAFT_MODEL": "stories-draft", "SSD_TARGET_TP": "3"})[0] == 0
