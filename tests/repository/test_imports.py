"""Packages by role: the graph of imports is a tree, and docs/architecture.md says which."""

import subprocess
import sys
from collections import Counter

import pytest

from tests.repository.import_graph import (
    ROOT,
    class_names,
    cycle_in,
    imports,
    layers,
    module_graph,
    modules,
    package_of,
)

MOST_MODULES = 14
TABLE = layers((ROOT / "docs/architecture.md").read_text())
PACKAGES = [package for line in TABLE for package in line]
GRAPH = module_graph()
SERVICES = {"ssd_target", "ssd_draft"}
# The same idea in two packages: the client has no code of the services.
SAME_IDEA = {"FinishReason", "SpeculationStats", "TraceEvent"}


def top(module: str) -> str:
    return module.partition(".")[0]


def test_no_module_imports_itself_through_others() -> None:
    assert cycle_in(GRAPH) == []


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_every_package_has_a_line_in_the_architecture() -> None:
    folders = {name for name, file in modules().items() if file.name == "__init__.py"}
    assert folders <= set(PACKAGES)
    assert set(PACKAGES) <= set(modules())
    assert len(PACKAGES) == len(set(PACKAGES))


def test_a_package_imports_only_what_stands_above_it() -> None:
    line_of = {package: i for i, line in enumerate(TABLE) for package in line}
    wrong = [
        f"{module} -> {other}"
        for module, others in GRAPH.items()
        for other in others
        if (mine := package_of(module, PACKAGES)) != (theirs := package_of(other, PACKAGES))
        and line_of[mine] <= line_of[theirs]
        and other != top(module)  # the version, which is no module's business
    ]
    assert wrong == []


def test_services_and_client_do_not_import_each_other() -> None:
    for module, others in GRAPH.items():
        if top(module) in SERVICES:
            assert {top(other) for other in others} <= {top(module), "ssd_engine", "ssd_serving"}
        if top(module) == "ssd_gateway":
            assert not {top(other) for other in others} & SERVICES
        if top(module) == "ssd_client":
            assert {top(other) for other in others} <= {"ssd_client"}


def test_a_folder_holds_about_a_dozen_modules() -> None:
    folders = Counter(file.parent for file in modules().values() if file.name != "__init__.py")
    assert {str(folder): n for folder, n in folders.items() if n > MOST_MODULES} == {}


def test_a_package_is_told_in_one_sentence() -> None:
    """But for the names that a package gives to its users."""
    for name, file in modules().items():
        if file.name == "__init__.py" and "." in name:
            assert len(file.read_text().splitlines()) == 1, file


def test_the_engine_knows_nothing_of_serving() -> None:
    edge = {"grpc", "grpc_health", "google", "click", "prometheus_client", "ssd", "ssd_serving"}
    for name, file in modules().items():
        if top(name) == "ssd_engine":
            assert not {top(each) for each in imports(file)} & edge, file


def test_the_client_needs_no_torch() -> None:
    heavy = {"torch", "transformers", "numpy", "safetensors"}
    for name, file in modules().items():
        if top(name) == "ssd_client":
            assert not {top(each) for each in imports(file)} & heavy, file


@pytest.mark.parametrize(
    "module",
    [
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
    ],
)
def test_what_is_not_about_tensors_knows_none(module: str) -> None:
    """Nor what lies below it, nor gRPC."""
    below, seen = [module], set()
    while below:
        name = below.pop()
        if name not in seen:
            seen.add(name)
            below += GRAPH[name]
    for name in seen:
        assert not {top(each) for each in imports(modules()[name])} & {"torch", "grpc"}, name


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
    twice = {name for name, found in class_names().items() if len(found) > 1}
    assert twice == SAME_IDEA
