"""Packages by role: the graph of imports is a tree, and docs/architecture.md says which."""

import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.repository.import_graph import (
    ROOT,
    below,
    layers,
    module_graph,
    modules,
    package_of,
    parsed,
)

MOST_MODULES = 14
TABLE = layers((ROOT / "docs/architecture.md").read_text())
PACKAGES = [package for line in TABLE for package in line]
SERVICES = {"ssd_target", "ssd_draft"}
BASE = {"ssd_engine", "ssd_serving"}
# What a package may import of ours beside itself.
ALLOWED = {
    "ssd_target": BASE,
    "ssd_draft": BASE,
    "ssd_gateway": {*BASE, "ssd_client"},
    "ssd_client": set[str](),
}
# What nothing in a package imports.
FORBIDDEN = {
    "ssd_engine": (
        *("grpc", "grpc_health", "google", "click", "prometheus_client", "ssd", "ssd_serving"),
    ),
    "ssd_client": ("torch", "transformers", "numpy", "safetensors"),
}
# The same idea in two packages: the client has no code of the services.
SAME_IDEA = {"FinishReason", "SpeculationStats", "TraceEvent"}
NOT_ABOUT_TENSORS = [
    "ssd_engine.checkpoints.model_expansion",
    "ssd_engine.kvcache.block_pool",
    "ssd_engine.kvcache.cached_path",
    "ssd_engine.sampling.params",
    "ssd_engine.speculation.fan_out",
    "ssd_engine.speculation.features",
    "ssd_engine.speculation.frames",
    "ssd_engine.speculation.latency_model",
    "ssd_engine.speculation.ngram",
    "ssd_engine.tensor_plane.protocol.handshake",
    "ssd_engine.tensor_plane.protocol.state",
    "ssd_engine.tensor_plane.protocol.report",
    "ssd_engine.tensor_plane.protocol.streams",
    "ssd_engine.tensor_plane.transports.address",
    "ssd_engine.tensor_plane.transports.connection",
    "ssd_engine.tensor_plane.transports.greeting",
    "ssd_engine.text.completion",
    "ssd_engine.text.detokenizer",
    "ssd_draft.config",
    "ssd_draft.front.link",
    "ssd_target.scheduling.scheduler",
    "ssd_target.scheduling.sequence",
]


def top(module: str) -> str:
    return module.partition(".")[0]


def test_no_module_imports_itself_through_others() -> None:
    TopologicalSorter(module_graph()).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"b"}}).prepare()


def test_every_package_has_a_line_in_the_architecture() -> None:
    folders = {name for name, file in modules().items() if file.name == "__init__.py"}
    assert folders <= set(PACKAGES)
    assert set(PACKAGES) <= set(modules())
    assert len(PACKAGES) == len(set(PACKAGES))


def test_a_package_imports_only_what_stands_above_it() -> None:
    line_of = {package: i for i, line in enumerate(TABLE) for package in line}
    wrong = [
        f"{module} -> {other}"
        for module, others in module_graph().items()
        for other in others
        if (mine := package_of(module, PACKAGES)) != (theirs := package_of(other, PACKAGES))
        and line_of[mine] <= line_of[theirs]
        and other != top(module)  # the version, which is no module's business
    ]
    assert wrong == []


def test_services_and_client_do_not_import_each_other() -> None:
    found = {(top(name), top(other)) for name, all_ in module_graph().items() for other in all_}
    assert {(own, other) for own, other in found if other not in ALLOWED.get(own, {other})} <= {
        (own, own) for own in ALLOWED
    }


def test_a_folder_holds_about_a_dozen_modules() -> None:
    folders = Counter(file.parent for file in modules().values() if file.name != "__init__.py")
    assert {str(folder): n for folder, n in folders.items() if n > MOST_MODULES} == {}


def test_a_package_is_told_in_one_sentence() -> None:
    """But for the names that a package gives to its users."""
    files = [file for name, file in modules().items() if file.name == "__init__.py" and "." in name]
    assert [file for file in files if len(file.read_text().splitlines()) != 1] == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_needs_nothing_that_is_not_its_business(package: str) -> None:
    """The engine knows nothing of serving, and the client needs no torch."""
    own = [name for name in modules() if top(name) == package]
    assert [name for name in own if parsed(name).imports_any(*FORBIDDEN[package])] == []


def test_what_is_not_about_tensors_knows_none() -> None:
    """Nor what lies below it, nor gRPC."""
    reached = {module: below(module) for module in NOT_ABOUT_TENSORS}
    wrong = [
        f"{module}, by {name}"
        for module, names in reached.items()
        for name in names
        if parsed(name).imports_any("torch", "grpc")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("service", "model"), [("ssd_target", "stories-target"), ("ssd_draft", "stories-draft")]
)
def test_a_front_does_not_load_torch(service: str, model: str) -> None:
    """It takes seconds, and half a gigabyte, that only the engine has a use for.

    Nor transformers, which takes a second, where the tokenizer's files say all.
    """
    code = f"""
import sys
from {service}.cli import main
main(["serve", "{model}", "--check-config"], standalone_mode=False)
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_class_name_means_one_class() -> None:
    found = Counter(name for module in modules() for name in parsed(module).classes)
    assert {name for name, number in found.items() if number > 1} == SAME_IDEA
