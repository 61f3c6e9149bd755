"""Try third-party clients against a gateway, each in an environment of its own.

    python -m tools.clients [NAME ...] [--environments build/clients]

Each client is installed from its registry once, as anybody would, and left at its defaults. It
chats, streams, calls tools, asks for structure, asks too much, and leaves in the middle, against
the shipped pair behind a gateway. Exit code 0: all did what they do elsewhere.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ssd_engine
from tools.bench_kit import setting
from tools.clients import services
from tools.clients.environments import (
    NotInstalled,
    command_of,
    install,
    variables_of,
    version_of,
)
from tools.clients.table import CLIENTS, Client

ENVIRONMENTS = Path("build/clients")
TOKENIZER = Path(ssd_engine.__file__).parent / "shipped/stories-target"
SECONDS = 600.0  # for all scenarios of a client
LINE = "{:<13} {:<10} {:<44} {}"


@dataclass(frozen=True)
class Row:
    client: str
    version: str
    scenario: str
    error: str = ""


def main() -> int:
    options = _options()
    clients = [client for client in CLIENTS if client.name in options.names]
    print(setting())
    print(LINE.format("client", "version", "scenario", "result"), flush=True)
    failed = []
    with services.gateway() as url:
        for client in clients:
            for row in tried(client, options.environments, url):
                result = "failed" if row.error else "ok"
                print(LINE.format(row.client, row.version, row.scenario, result), flush=True)
                failed += [row] if row.error else []
    for row in failed:
        print(f"FAILED: {row.client}, {row.scenario}\n{row.error.rstrip()}")
    print(f"clients: {len(failed)} scenarios failed" if failed else "clients: none failed")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(
        prog="python -m tools.clients", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    options.names = options.names or names
    return options


def tried(client: Client, environments: Path, url: str) -> Iterator[Row]:
    """A row for each scenario, and one for what the client has left at the gateway."""
    try:
        place = install(client, environments.resolve())
    except NotInstalled as error:
        yield Row(client.name, "", "install", str(error))
        return
    version = version_of(client, place)
    for scenario, problem in run(client, place, url):
        yield Row(client.name, version, scenario, problem)
    left = "" if services.ends_what_was_left(url) else str(services.targets_of(url))
    yield Row(client.name, version, "nothing runs once it is gone", left)


def run(client: Client, place: Path, url: str) -> Iterator[tuple[str, str]]:
    """Scenarios of the client's script, and what each failed by; how the script itself ended, where
    that was not in order."""
    try:
        done = subprocess.run(
            command_of(client, place),
            env=variables_of(url, TOKENIZER),
            cwd=place,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        yield "its script", f"did not end within {SECONDS:g} s: {error.stdout!r}"
        return
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    for each in told:
        yield each["scenario"], each["error"]
    if done.returncode or not told:
        yield "its script", f"exit code {done.returncode}: {done.stderr[-3000:]}"


if __name__ == "__main__":
    sys.exit(main())
