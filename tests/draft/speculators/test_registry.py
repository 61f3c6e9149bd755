"""A kind of speculator is a module and a line of the registry: all else follows from its name."""

import re
from importlib import import_module

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.config import DraftConfig
from ssd_draft.speculators.registry import KINDS, SpeculatorKind, check_kind
from ssd_engine.errors import ConfigError
from tests.repository.import_graph import modules

NAMED = re.compile(rf"""["']({"|".join(KINDS)})["']|--speculator ({"|".join(KINDS)})""")
MAY_NAME = {
    "ssd_draft.cli",  # the argument MODEL
    "ssd_draft.config",  # the default
}


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


def test_a_model_is_named_exactly_where_a_new_kind_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, "heads", SpeculatorKind("ssd_draft.heads", needs_model=True))
    monkeypatch.setitem(KINDS, "lists", SpeculatorKind("ssd_draft.lists", needs_model=False))
    check_kind(DraftConfig(speculator="heads", model="stories-draft"))
    check_kind(DraftConfig(speculator="lists"))
    with pytest.raises(ConfigError, match="MODEL is missing"):
        check_kind(DraftConfig(speculator="heads"))
    with pytest.raises(ConfigError, match="--speculator lists takes no MODEL"):
        check_kind(DraftConfig(speculator="lists", model="stories-draft"))
