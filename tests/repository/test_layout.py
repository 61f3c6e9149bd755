"""The import graph is a tree: client -> protos; services -> engine; nothing sideways."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"ssd", "ssd_engine", "ssd_target", "ssd_draft", "ssd_client"}
MAY_IMPORT = {
    "protos/ssd": {"ssd"},
    "services/engine/ssd_engine": {"ssd_engine"},
    "services/target/ssd_target": {"ssd_target", "ssd_engine", "ssd"},
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


@pytest.mark.parametrize("module", ["block_pool", "text", "completion", "sampling_params"])
def test_the_books_know_no_tensors(module: str) -> None:
    assert "torch" not in imports(ROOT / f"services/engine/ssd_engine/{module}.py")
