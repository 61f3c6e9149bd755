"""make test-mutants: the faults that it draws are faults, and what they stand in still compiles."""

import ast
from pathlib import Path

from tools.mutants.faults import draw, faults
from tools.mutants.tree import SOURCES, Tree

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
def lengths(texts: list[str], most: int = 5) -> list[int]:
    """Not changed: "0" == 1."""
    log.info("%d texts", len(texts) + 1)
    state.seen = "é" if texts else None
    if not texts or most < 1:
        raise ValueError(f"{most + 1}")
    return [min(len(text), most) for text in texts]
'''


def test_a_place_of_a_function_becomes_what_it_is_not() -> None:
    found = [(fault.line, fault.was, fault.instead) for fault in faults(Path("m"), SOURCE)]
    assert sorted(found) == [
        (5, '"é" if texts else None', "(None if texts else 'é')"),
        (5, 'state.seen = "é" if texts else None', "pass"),
        (6, "1", "(2)"),
        (6, "most < 1", "(most <= 1)"),
        (6, "not texts", "(texts)"),
        (6, "not texts or most < 1", "(not texts and most < 1)"),
        (7, 'raise ValueError(f"{most + 1}")', "pass"),
        (8, "min(len(text), most)", "(max(len(text), most))"),
        (8, "return [min(len(text), most) for text in texts]", "return None"),
    ]


def test_every_fault_of_the_services_and_its_probe_compile() -> None:
    modules = [path for source in SOURCES for path in (ROOT / source).rglob("*.py")]
    drawn = draw(ROOT, modules, 10, seed=7)
    assert len({fault.module for fault in drawn}) == 10
    for fault in drawn:
        source = fault.module.read_text()
        for changed in (fault.applied(source), fault.told(source, "probe()")):
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), fault
    assert drawn == draw(ROOT, modules, 10, seed=7)


def test_the_tree_with_a_fault_installs_nothing(tmp_path: Path) -> None:
    """It uses this environment, and make installs what is newer than the environment."""
    tree = Tree(tmp_path / "tree")
    for name in ("pyproject.toml", "services/engine/ssd_engine/kernels/cpu/panels.c"):
        assert (tree.folder / name).stat().st_mtime == (ROOT / name).stat().st_mtime
