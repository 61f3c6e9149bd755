"""A kind of speculator is a module and a line of the registry: all else follows from its name."""

import re
from importlib import import_module

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.speculators.registry import KINDS
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
