"""Generate the Python code of protos/ beside the .proto files.

    python tools/generate_protos.py [--out DIR]

The result is committed; a test regenerates it into a temporary folder and compares.
"""

import argparse
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"


def generate(out: Path) -> None:
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("ssd/v1/*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROTOS)
    generate(parser.parse_args().out)
