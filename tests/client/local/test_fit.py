"""The share of one GPU that a draft gets beside its target, and how deep it speculates."""

import json

import pytest

from ssd_client.local.fit import DEPTHS, Fit, choose_fit, forward_bytes
from ssd_client.local.launcher import LocalFlags, LocalPlan, plan_local

# hidden, layers, heads, KV heads, head_dim, ff, vocabulary, as they were published.
SHAPES = {
    "70b": (8192, 80, 64, 8, 128, 28672, 128256),
    "32b": (5120, 64, 64, 8, 128, 25600, 151936),
    "14b": (5120, 40, 40, 8, 128, 17408, 151936),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
}
KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


@pytest.fixture
def models(tmp_path):
    """Folders with nothing but a config.json, by name."""
    for name, sizes in SHAPES.items():
        (tmp_path / name).mkdir()
        config = dict(zip(KEYS, sizes, strict=True))
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {name: str(tmp_path / name) for name in SHAPES}


@pytest.mark.parametrize(("name", "size"), [("32b", 32.0e9), ("8b", 7.5e9), ("0.6b", 0.6e9)])
def test_bytes_are_those_of_layers_and_head(models, name, size):
    assert forward_bytes(models[name]) == pytest.approx(2 * size, rel=0.01)


@pytest.mark.parametrize(
    ("target", "draft", "fit"),
    [
        ("32b", "0.6b", Fit(30, 7)),  # as measured: docs/gpu.md
        ("8b", "1b", None),  # as measured
        ("8b", "0.6b", None),
        ("14b", "0.6b", Fit(30, 3)),
        ("70b", "1b", Fit(30, 7)),
        ("70b", "8b", None),
    ],
)
def test_what_fits(models, target, draft, fit):
    assert choose_fit(forward_bytes(models[target]), forward_bytes(models[draft])) == fit


def test_a_larger_target_has_room_for_as_much_or_more():
    draft = 1_200_000_000
    fits = [choose_fit(target * 10**9, draft) for target in range(5, 200, 5)]
    depths = [0 if fit is None else fit.depth for fit in fits]
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (0, DEPTHS[0])


def test_the_deepest_that_fits_is_planned_unless_a_depth_is_given(models):
    flags = {"local_model": models["70b"], "local_draft": models["1b"], "local_mps": True}
    for depth, planned in ((None, "7"), (3, "3")):
        plan = LocalPlan(
            models["70b"], models["1b"], ("--depth", planned), mps=True, draft_share=30
        )
        assert plan_local(LocalFlags(**flags, depth=depth)) == plan
    deeper = plan_local(LocalFlags(**flags, depth=40))
    assert deeper.draft is None
    assert deeper.target_flags == ("--depth", "40", "--draft-model", models["1b"])


def test_a_draft_without_room_drafts_inside_the_target(models):
    flags = {"local_model": models["8b"], "local_draft": models["1b"], "local_mps": True}
    plan = plan_local(LocalFlags(**flags, local_device="cuda"))
    device = ("--device", "cuda")
    assert plan.target_flags == (*device, "--draft-model", models["1b"])
    assert (plan.draft, plan.draft_flags, plan.mps) == (None, (), False)
    assert plan.note.startswith(f"one GPU has no room for {models['1b']} beside {models['8b']}:")
    for insisting in ({"mode": "ssd"}, {"local_draft_share": 30}):
        started = plan_local(LocalFlags(**flags, **insisting))
        assert (started.draft, started.mps, started.draft_share) == (models["1b"], True, 30)
    without = plan_local(LocalFlags(models["8b"], models["1b"]))
    assert without == LocalPlan(models["8b"], models["1b"])  # not on one GPU at the same time


@pytest.mark.parametrize("content", [None, "{", "[]", '{"hidden_size": 8}'])
def test_where_sizes_are_not_known_the_draft_gets_its_usual_part(models, tmp_path, content):
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "config.json").write_text(content)
    assert forward_bytes(str(other)) is None
    plan = plan_local(LocalFlags(str(other), models["1b"], local_mps=True))
    assert plan == LocalPlan(str(other), models["1b"], mps=True, draft_share=30)
    grown = LocalFlags(models["8b"], models["1b"], local_mps=True, local_expand_to="x=1")
    assert plan_local(grown).draft_share == 30


def test_a_hub_id_is_looked_up_in_the_cache(models, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert forward_bytes("some/model") is None
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / "abc").symlink_to(models["8b"])
    assert forward_bytes("some/model") == forward_bytes(models["8b"])
