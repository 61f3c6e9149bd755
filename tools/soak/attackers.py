"""Attackers beside the load: each a process that begins and ends with it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tools.attack.callers import TOKEN_FILE, UNLIMITED
from tools.attack.watch import attacker
from tools.soak.services import Service

LONG_WORDS = 1000  # of their prompts; the targets' context is 1,280 tokens
# Whoever has no limit may take all places: here everybody has one but for the load.
LIMITED = TOKEN_FILE.replace(f'token = "{UNLIMITED}"', f'token = "{UNLIMITED}"\nlimit_requests = 4')
ATTACKS = ("cancel_storm", "idle_connections", "long_prompts", "silent_health_calls")


def write_tokens(folder: Path) -> Path:
    file = folder / "tokens.toml"
    file.write_text(LIMITED)
    file.chmod(0o600)
    return file


@contextlib.contextmanager
def attacked(target: Service) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ATTACKS:
            options = (LONG_WORDS,) if name == "long_prompts" else ()
            stack.enter_context(attacker(name, target.address, *options))
        yield
