"""Pairs as they are published: one tokenizer, and heads that are padded each in its own way."""

from pathlib import Path
from typing import Any

import pytest

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Verification
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from tests.harness import Request, Result, make_core, make_runner, run
from tests.simulation import Simulation
from tools.gpu.dense_checkpoint import write_dense, write_noisy

TOKENS, TARGET_ROWS, DRAFT_ROWS = 4120, 6400, 5000  # so much padding would be drawn often
SIZE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
)
OPTIONS = [SamplingParams(3, 0.0), SamplingParams(4, 1.0), SamplingParams(5, 0.8, 40, 0.95)]
OPTIONS.append(SamplingParams(6, 1.0, repetition_penalty=1.2, logit_bias=((7, 3.0),)))
DEPTH = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of a target, and of a draft that is often right."""
    folder, sizes = tmp_path_factory.mktemp("pair"), {**SIZE, "vocab_size": TARGET_ROWS}
    target = write_dense(
        "qwen2.5-1.5b", folder / "target", changes=sizes, padding=TARGET_ROWS - TOKENS
    )
    return [target, write_noisy(target, folder / "draft", rows=DRAFT_ROWS)]


@pytest.fixture(scope="module")
def runners(folders: list[Path]) -> list[ModelRunner]:
    return [make_runner(folder, 1024) for folder in folders]


def requests(mode: Mode, verification: Verification) -> list[Request]:
    speculation = SpeculationRequest(mode, verification, DEPTH)
    return [
        Request([11 + i, 40, 7, 300 + i], sampling, 24, speculation=speculation)
        for i, sampling in enumerate(OPTIONS * 2)
    ]


@pytest.fixture(scope="module")
def plain(runners: list[ModelRunner]) -> list[Result]:
    return run(make_core(runners[0]), requests(Mode.OFF, Verification.COUPLED))


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.SSD])
def test_padding_is_never_drawn(
    mode: Mode,
    verification: Verification,
    runners: list[ModelRunner],
    plain: list[Result],
) -> None:
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
    simulation = Simulation(*runners, options, sync=mode is Mode.SYNC, trusted=True)
    results = run(simulation.core, requests(mode, verification))
    assert max(token for result in results for token in result.tokens) < TOKENS
    accepted = sum(result.speculation.accepted_tokens for result in results if result.speculation)
    assert accepted > 20
    if verification is Verification.COUPLED:
        assert [result.tokens for result in results] == [result.tokens for result in plain]


def test_a_token_without_a_row_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_dense("qwen3-0.6b", tmp_path / "model", changes={**SIZE, "vocab_size": 4000})
    whole = resolve_model("stories-target")
    word = Tokenizer(whole, load_model_config(whole)).token_bytes[4050].decode()
    tokenizer = Tokenizer(folder, load_model_config(folder))
    assert len(tokenizer.token_bytes) == 4000
    assert max(tokenizer.encode("A cat.")) < 4000
    said = rf"contains '\S*{word.strip()}', token 4050, which the tokenizer knows"
    with pytest.raises(InputError, match=f"^text: {said}"):
        tokenizer.encode(f"A{word} cat.")
    with pytest.raises(InputError, match=f"^chat.messages: {said}"):
        tokenizer.encode_chat([{"role": "user", "content": f"A{word} cat."}])
