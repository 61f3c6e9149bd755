"""A kind of speculator is a module and a line of the registry: all else follows from its name."""

import re
from importlib import import_module

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.config import DraftConfig
from ssd_draft.speculators.registry import KINDS, SpeculatorKind, kind_of
from ssd_engine.errors import ConfigError
from tests.clockwork import make_head
from tests.repository.import_graph import modules

NAMED = re.compile(rf"""["']({"|".join(KINDS)})["']|--speculator ({"|".join(KINDS)})""")
MAY_NAME = {"ssd_draft.cli"}  # the argument MODEL


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_made_by_its_module_and_has_a_name_on_the_wire(name: str) -> None:
    assert callable(import_module(KINDS[name].module).make_speculator)
    assert pb.SpeculatorKind.Value(f"SPECULATOR_KIND_{name.upper()}")


def test_only_the_registry_knows_kinds_by_name() -> None:
    naming = {
        module
        for module, file in modules().items()
        if module.startswith("ssd_draft.") and NAMED.search(file.read_text())
    }
    assert naming == {"ssd_draft.speculators.registry", *MAY_NAME}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("heads") / "head"
    make_head(directory)
    return str(directory)


def test_a_model_is_named_exactly_where_a_new_kind_needs_one(
    monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.setitem(KINDS, "others", SpeculatorKind("ssd_draft.others", needs_model=True))
    monkeypatch.setitem(KINDS, "lists", SpeculatorKind("ssd_draft.lists", needs_model=False))
    assert kind_of(DraftConfig(speculator="others", model="stories-draft")) == "others"
    assert kind_of(DraftConfig(speculator="lists")) == "lists"
    with pytest.raises(ConfigError, match="MODEL is missing"):
        kind_of(DraftConfig(speculator="others"))
    with pytest.raises(ConfigError, match="--speculator lists takes no MODEL"):
        kind_of(DraftConfig(speculator="lists", model="stories-draft"))
    with pytest.raises(ConfigError, match=r"--speculator others: .* is an EAGLE-3 head"):
        kind_of(DraftConfig(speculator="others", model=head))


def test_a_kind_is_what_the_model_is_where_none_is_named(head: str) -> None:
    assert kind_of(DraftConfig(model="stories-draft")) == "model"
    assert kind_of(DraftConfig(model=head)) == "head"
    with pytest.raises(ConfigError, match=r"--speculator head: .* is a model"):
        kind_of(DraftConfig(model="stories-draft", speculator="head"))
    with pytest.raises(ConfigError, match="MODEL is missing"):
        kind_of(DraftConfig())
