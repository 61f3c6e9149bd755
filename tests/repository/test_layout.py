"""The import graph is a tree: client -> protos; services -> engine; nothing sideways."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"ssd", "ssd_engine", "ssd_target", "ssd_draft", "ssd_client"}
MAY_IMPORT = {
    "protos/ssd": {"ssd"},
    "services/engine/ssd_engine": {"ssd_engine"},
    "services/target/ssd_target": {"ssd_target", "ssd_engine", "ssd"},
    "services/draft/ssd_draft": {"ssd_draft", "ssd_engine", "ssd"},
    "client/ssd_client": {"ssd_client", "ssd"},
}


def imports(file: Path) -> set[str]:
    """Top-level names of everything that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert imports(file) & OURS <= MAY_IMPORT[package], file


def test_the_client_needs_no_torch() -> None:
    heavy = {"torch", "transformers", "numpy", "safetensors"}
    for file in (ROOT / "client/ssd_client").rglob("*.py"):
        assert not imports(file) & heavy, file


@pytest.mark.parametrize("module", ["scheduler", "sequence"])
def test_the_scheduler_knows_no_tensors(module: str) -> None:
    assert "torch" not in imports(ROOT / f"services/target/ssd_target/{module}.py")


@pytest.mark.parametrize(
    "module",
    [
        "block_pool",
        "cached_path",
        "completion",
        "fan_out",
        "frames",
        "growth",
        "ngram",
        "pace",
        "sampling_params",
        "text",
    ],
)
def test_the_books_know_no_tensors(module: str) -> None:
    assert "torch" not in imports(ROOT / f"services/engine/ssd_engine/{module}.py")


def test_of_the_engine_only_serving_knows_of_grpc() -> None:
    edge = {"grpc", "grpc_health", "google", "click", "prometheus_client"}
    for file in (ROOT / "services/engine/ssd_engine").rglob("*.py"):
        if "serving" not in file.parts:
            assert not imports(file) & edge, file
            assert "ssd_engine.serving" not in file.read_text(), file


@pytest.mark.parametrize("module", ["link", "config"])
def test_links_and_options_know_no_grpc(module: str) -> None:
    assert not imports(ROOT / f"services/draft/ssd_draft/{module}.py") & {"grpc", "torch"}


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
