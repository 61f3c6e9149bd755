"""The one piece of C that Triton compiles on a machine: the helper by which it launches kernels.

An image without a compiler needs it beforehand. ``compile`` puts it into TRITON_CACHE_DIR while the
image is built; ``check`` tells, without a compiler, whether Triton would find it there. Neither
needs a GPU or its driver. TRITON_LIBCUDA_PATH, and whether there is a program ``file``, are part of
the cache's key: they have to be the same in both.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from triton.backends import nvidia
from triton.runtime import build


def helper() -> None:
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def compile_helper() -> str:
    """Linked against a stand-in for the driver, which a cluster's nodes bring along."""
    stub = Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1"
    stub.parent.mkdir(parents=True, exist_ok=True)
    make_stub(stub)
    # Seen by what names it as a library that it needs, and by nothing else: that it loads shows
    # that it is bound to the driver.
    ctypes.CDLL(str(stub), mode=os.RTLD_LOCAL)
    helper()
    stub.unlink()
    found = [str(each) for each in Path(os.environ["TRITON_CACHE_DIR"]).rglob("cuda_utils*")]
    if len(found) != 1:
        raise SystemExit(f"Triton compiled something else than one helper: {found}")
    return found[0]


def make_stub(place: Path) -> None:
    """A library with the functions that the helper calls: a linker leaves out one without."""
    source = (Path(nvidia.__file__).parent / "driver.c").read_text()
    functions = sorted(set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", source)))
    code = "".join(f"int {each}(void) {{ return 1; }}\n" for each in functions)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(place), "-x", "c"]
    subprocess.run([*command, "-"], input=code, text=True, check=True)


def check_helper() -> NoReturn:
    def would_compile(*_: object, **__: object) -> NoReturn:
        raise SystemExit("Triton does not find its helper, and would compile it")

    def found(_: str, path: str) -> NoReturn:
        print(f"found: {path}")
        raise SystemExit(0)

    build._build = would_compile
    build._load_module_from_path = found
    helper()
    raise SystemExit("Triton asked for no helper")


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        print(f"compiled: {compile_helper()}")
    elif sys.argv[1:] == ["check"]:
        check_helper()
    else:
        raise SystemExit("usage: triton_launcher.py compile|check")
