"""The command line of a container, read by the program that will read it."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import click

from ssd_client.cli import cli as client_main
from ssd_draft.cli import main as draft_main
from ssd_draft.config import DraftConfig, plane_ports
from ssd_gateway.cli import main as gateway_main
from ssd_gateway.config import GatewayConfig
from ssd_serving.config import parse_address
from ssd_target.cli import main as target_main
from ssd_target.config import TargetConfig
from tests.deploy.manifests import Manifest, Manifests, Pod, pods

Config = TargetConfig | DraftConfig | GatewayConfig
PROGRAMS: Mapping[str, click.Group] = {
    "ssd-target": target_main,
    "ssd-draft": draft_main,
    "ssd-gateway": gateway_main,
    "ssd-client": client_main,
}
CONFIGS: Mapping[tuple[str, str], Callable[..., Config]] = {
    ("ssd-target", "serve"): TargetConfig,
    ("ssd-draft", "serve"): DraftConfig,
    ("ssd-gateway", "serve"): GatewayConfig,
}
# Set for a container by what makes its pod.
GIVEN = {"LWS_LEADER_ADDRESS": "ssd-target-nodes-0.ssd-target-nodes.ssd", "LWS_WORKER_INDEX": "1"}


@dataclass(frozen=True)
class CommandLine:
    program: str
    command: str
    options: Mapping[str, Any]  # by the names of the configuration
    unknown: tuple[str, ...]  # flags, commands and variables that the program does not have
    raw: Mapping[str, str]  # of flags, as they are written

    @property
    def serves(self) -> bool:
        return self.command == "serve"

    @property
    def stays(self) -> bool:
        """Runs until it is told to stop, and is watched meanwhile."""
        return self.command in ("serve", "join")


def is_ours(container: Manifest) -> bool:
    return container["command"][0] in PROGRAMS


def ours(objects: Manifests) -> Iterator[tuple[Pod, Manifest, CommandLine]]:
    """Containers that run our programs, and beside what."""
    for pod in pods(objects):
        for container in filter(is_ours, pod.spec["containers"]):
            yield pod, container, read(container)


def read(container: Manifest) -> CommandLine:
    words = tuple(map(expanded, container["args"]))
    variables = {each["name"]: each.get("value", "") for each in container.get("env", ())}
    return _read(container["command"][0], words, tuple(variables.items()))


@functools.cache  # rules ask again and again
def _read(
    program: str, words: tuple[str, ...], variables: tuple[tuple[str, str], ...]
) -> CommandLine:
    command, *arguments = words
    flags = dict(each.split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    found = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), command)
    if found is None:
        return CommandLine(program, command, {}, (command, *sorted(flags)), flags)
    prefix = program.upper().replace("-", "_") + "_"
    known = {str(each.envvar) for each in found.params}
    unknown = [name for name, _ in variables if name.startswith(prefix) and name not in known]
    others = {name: value for name, value in os.environ.items() if not name.startswith("SSD_")}
    with patch.dict(os.environ, {**others, **dict(variables)}, clear=True):
        options, unknown_flags = _parsed(found, arguments)
    return CommandLine(program, command, options, (*unknown_flags, *unknown), flags)


def expanded(argument: str) -> str:
    """As a kubelet does it with $(VARIABLE)."""
    for variable, value in GIVEN.items():
        argument = argument.replace(f"$({variable})", value)
    return argument


def _parsed(command: click.Command, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Options as the program will see them, and flags that it would refuse."""
    try:
        return command.make_context(command.name, list(arguments)).params, []
    except click.NoSuchOption as error:
        known = [each for each in arguments if each.partition("=")[0] != error.option_name]
        options, unknown = _parsed(command, known)
        return options, [error.option_name, *unknown]


def config_of(line: CommandLine) -> Config:
    """Raises ConfigError for what the program would refuse."""
    options = {key: value for key, value in line.options.items() if key != "check_config"}
    return CONFIGS[line.program, line.command](**options)


@dataclass(frozen=True)
class Listening:
    what: str  # the flag, without its dashes
    host: str
    ports: range

    @property
    def beyond_loopback(self) -> bool:
        return self.host not in ("127.0.0.1", "::1", "localhost")


def listening(line: CommandLine) -> list[Listening]:
    """Everywhere that this process listens, from the options that it would run with."""
    said = {flag: line.raw[flag] for flag in line.unknown if flag.endswith("-listen")}
    said |= {f"--{key.replace('_', '-')}": value for key, value in line.options.items()}
    found = []
    for flag, value in said.items():
        if flag.endswith("-listen") and value is not None:
            host, port = parse_address(flag, value)
            found.append(Listening(flag.removeprefix("--"), host, range(port, port + 1)))
    if line.program == "ssd-draft":
        config: Any = config_of(line)
        ports = plane_ports(config)
        if ports is not None:
            found.append(Listening("plane-ports", parse_address("", config.listen)[0], ports))
    return found
