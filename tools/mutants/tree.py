"""A copy of the repository as it is committed, in which modules may be changed."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *(f"services/{name}" for name in ("engine", "serving", "target", "draft", "gateway")),
    "client",
)


class Tree:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._time = int(time.time())
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
        for built in (ROOT / "services").rglob("*.so"):
            shutil.copy2(built, folder / built.relative_to(ROOT))
        # As old as they are here: tests call make, which would install what is newer than its mark,
        # and everybody who uses this environment would import this tree.
        for name in _output(["git", "ls-files", "-z"], folder).split("\0")[:-1]:
            if (ROOT / name).exists():
                shutil.copystat(ROOT / name, folder / name)

    def modules(self) -> list[Path]:
        found = (path for source in SOURCES for path in (self.folder / source).rglob("*.py"))
        return sorted(path.relative_to(self.folder) for path in found)

    def source(self, module: Path) -> str:
        return (self.folder / module).read_text()

    def restore(self) -> None:
        """As it was committed."""
        for name in _output(["git", "diff", "--name-only"], self.folder).split():
            self.write(Path(name), _output(["git", "show", f"HEAD:{name}"], self.folder))

    def write(self, module: Path, source: str) -> None:
        """With a time of its own, so that nothing compiled before is taken for it."""
        path = self.folder / module
        path.write_text(source)
        self._time += 2
        os.utime(path, (self._time, self._time))

    def pytest(
        self, arguments: Sequence[str], variables: Mapping[str, str], limit: float
    ) -> tuple[int | None, str]:
        """Its exit status, None if it was stopped at the limit in seconds, and what it printed."""
        sources = (str(self.folder / source) for source in (*SOURCES, "protos"))
        environment = dict(os.environ, PYTHONPATH=":".join([str(self.folder), *sources]))
        command = [sys.executable, "-m", "pytest", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, _ = process.communicate()
            return None, said
        return process.returncode, said


def _output(command: Sequence[str], folder: Path) -> str:
    return subprocess.check_output(command, cwd=folder, text=True)
