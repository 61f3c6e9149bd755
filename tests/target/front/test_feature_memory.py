"""Features have a place in the host's memory, which KV on a CPU leaves to them."""

from typing import Any

import pytest

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.execution import runner as runner_module
from ssd_engine.execution.runner import CPU_CACHE_SHARE, ModelRunner
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_target.config import MOST_HEAD_BYTES, TargetConfig, head_bytes
from ssd_target.front import server
from ssd_target.front.server import plan_target
from ssd_target.records.speculation_options import HEAD_WINDOW

MODEL = "stories-target"
ROW_BYTES = 3 * load_model_config(resolve_model(MODEL)).hidden_size * 4


def planned(**options: Any) -> int:
    config = TargetConfig(MODEL, max_num_seqs=4, **options)
    return plan_target(config).target.runner.host_bytes


def test_memory_is_planned_for_windows_and_kept_blocks_where_links_can_ask() -> None:
    assert planned() == planned(feature_window=50) == 0
    drafts = {"draft": ("127.0.0.1:1",), "feature_window": 50}
    assert planned(**drafts) == 4 * 50 * ROW_BYTES
    assert planned(**drafts, keep_features=3) == 4 * 50 * ROW_BYTES + (3 << 20)
    assert planned(allow_draft=("*",)) == 4 * 1024 * ROW_BYTES


def blocks(monkeypatch: pytest.MonkeyPatch, available: int, **options: Any) -> int:
    monkeypatch.setattr(runner_module, "available_memory", lambda: available)
    plan = plan_target(TargetConfig(MODEL, max_model_len=256, max_num_seqs=4, **options)).target
    return ModelRunner(plan.model, plan.runner, SingleRank()).num_blocks


def test_kv_leaves_this_memory_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_target(TargetConfig(MODEL, max_model_len=256, max_num_seqs=4)).target
    block = ModelRunner(plan.model, plan.runner, SingleRank()).kv.spec.bytes_per_block
    available = int((40 * block + (2 << 20)) / CPU_CACHE_SHARE) + 1
    few = {"draft": ("127.0.0.1:1",), "feature_window": 1}
    without = blocks(monkeypatch, available, **few)
    kept = blocks(monkeypatch, available, **few, keep_features=2)
    assert without - kept == pytest.approx((2 << 20) / block, abs=1)
    with pytest.raises(ConfigError, match=r"\d+ MiB of it are for features"):
        blocks(monkeypatch, available, **few, keep_features=1 << 20)


def test_what_nobody_could_be_told_is_not_kept() -> None:
    with pytest.raises(ConfigError, match=r"--keep-features needs --draft or --allow-draft"):
        planned(keep_features=100)


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the KV is not sized from the same memory: on a GPU, or with a number of blocks."""
    monkeypatch.setattr(server, "available_memory", lambda: 100 << 20)
    few = {"draft": ("127.0.0.1:1",), "feature_window": 1, "num_kv_blocks": 64}
    assert planned(**few, keep_features=99) >= 99 << 20
    with pytest.raises(ConfigError, match=r"^--keep-features, --feature-window: .* 0\.1 GiB are"):
        planned(**few, keep_features=101)


def test_a_head_inside_has_its_place_beside_the_kv() -> None:
    plan = plan_target(TargetConfig(MODEL, max_num_seqs=4, draft_model="stories-eagle"))
    head, kept = plan.head, plan.target.runner.told_bytes
    assert head is not None
    assert kept == head.options.kept_bytes == 4 * HEAD_WINDOW * ROW_BYTES
    config = TargetConfig(MODEL, max_num_seqs=10_000)
    assert head_bytes(config, head.options.config, 8192, "bfloat16") == MOST_HEAD_BYTES
