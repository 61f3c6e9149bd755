"""make check: lint, types, and kernels compiled for a GPU, side by side.

    python -m tools.check

Types and kernels keep what they have found: what has not changed since is not looked at again.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

KERNELS = "build/check/kernels"
LIMIT_SECONDS = 900  # catches a hang
CHECKS = {
    "lint": [["ruff", "check"], ["ruff", "format", "--check"]],
    "types": [["mypy"]],
    "kernels": [["tools.check.kernels", KERNELS]],
}


def check(name: str) -> tuple[str, bool, float, str]:
    """Its name, whether all is well, how long that took, and what was said."""
    begin, said = time.monotonic(), ""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    for module in CHECKS[name]:
        command = [sys.executable, "-m", *module]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        said += done.stdout + done.stderr
        if done.returncode:
            return name, False, time.monotonic() - begin, said
    return name, True, time.monotonic() - begin, said


def main() -> int:
    begin, good = time.monotonic(), True
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for name, well, seconds, said in threads.map(check, CHECKS):
            print(f"{name}: {'well' if well else 'NOT WELL'}, {seconds:.0f} s", flush=True)
            if not well:
                print(said, flush=True)
            good &= well
    print(f"check: {time.monotonic() - begin:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
