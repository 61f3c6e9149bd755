"""The command line of a container, read by the program that will read it."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from ssd_client.cli import cli as client_main
from ssd_draft.cli import main as draft_main
from ssd_draft.config import DraftConfig, plane_ports
from ssd_gateway.cli import main as gateway_main
from ssd_gateway.config import GatewayConfig
from ssd_serving.config import parse_address
from ssd_target.cli import main as target_main
from ssd_target.config import TargetConfig
from tests.deploy.manifests import Manifest

Config = TargetConfig | DraftConfig | GatewayConfig
PROGRAMS: Mapping[str, click.Group] = {
    "ssd-target": target_main,
    "ssd-draft": draft_main,
    "ssd-gateway": gateway_main,
    "ssd-client": client_main,
}
PREFIXES = {
    "ssd-target": "SSD_TARGET_",
    "ssd-draft": "SSD_DRAFT_",
    "ssd-gateway": "SSD_GATEWAY_",
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
    raw: Mapping[str, str] = field(default_factory=dict)  # of flags, as they are written

    @property
    def serves(self) -> bool:
        return self.command == "serve"

    @property
    def stays(self) -> bool:
        """Runs until it is told to stop, and is watched meanwhile."""
        return self.command in ("serve", "join")

    def text(self, flag: str) -> str | None:
        return self.raw.get(flag)


def is_ours(container: Manifest) -> bool:
    return container["command"][0] in PROGRAMS


def read(container: Manifest) -> CommandLine:
    said = (container["command"], container["args"], container.get("env", ()))
    return _read(*map(json.dumps, said))


@functools.cache  # rules ask again and again
def _read(programs: str, words: str, environment: str) -> CommandLine:
    program = json.loads(programs)[0]
    command, *arguments = [expanded(each) for each in json.loads(words)]
    variables = {each["name"]: each.get("value", "") for each in json.loads(environment)}
    flags = dict(each.split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    found = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), command)
    if found is None:
        return CommandLine(program, command, {}, (command, *sorted(flags)), flags)
    unknown = [each for each in _of_options(variables, program) if each not in _known(found)]
    with _environment(variables):
        options, unknown_flags = _parsed(found, arguments)
    return CommandLine(program, command, options, (*unknown_flags, *unknown), flags)


def expanded(argument: str) -> str:
    """As a kubelet does it with $(VARIABLE)."""
    for variable, value in GIVEN.items():
        argument = argument.replace(f"$({variable})", value)
    return argument


def _of_options(variables: Mapping[str, str], program: str) -> list[str]:
    prefix = PREFIXES.get(program, "SSD_CLIENT_")
    return [each for each in variables if each.startswith(prefix)]


def _known(command: click.Command) -> set[str]:
    """Variables that stand for options."""
    return {str(each.envvar) for each in command.params if each.envvar}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    ours = {name: value for name, value in os.environ.items() if name.startswith("SSD_")}
    for each in ours:
        del os.environ[each]
    os.environ.update(variables)
    try:
        yield
    finally:
        for each in variables:
            del os.environ[each]
        os.environ.update(ours)


def _parsed(command: click.Command, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Options as the program will see them, and flags that it would refuse."""
    arguments, unknown = list(arguments), []
    while True:
        try:
            context = command.make_context(command.name, list(arguments))
        except click.NoSuchOption as error:
            unknown.append(error.option_name)
            arguments = [a for a in arguments if a.partition("=")[0] != error.option_name]
        else:
            return context.params, unknown


def config_of(line: CommandLine) -> Config:
    """Raises ConfigError for what the program would refuse."""
    kind = CONFIGS[line.program, line.command]
    options = {key: value for key, value in line.options.items() if key != "check_config"}
    return kind(**options)


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
    found = [_address(flag, value) for flag, value in _addresses(line)]
    if line.program == "ssd-draft":
        config = config_of(line)
        assert isinstance(config, DraftConfig)
        ports = plane_ports(config)
        if ports is not None:
            found.append(Listening("plane-ports", parse_address("", config.listen)[0], ports))
    return found


def _addresses(line: CommandLine) -> Iterator[tuple[str, str]]:
    for key, value in line.options.items():
        if (key == "listen" or key.endswith("_listen")) and value is not None:
            yield key.replace("_", "-"), value
    for flag in line.unknown:
        if flag.endswith("-listen"):
            yield flag.removeprefix("--"), line.raw[flag]


def _address(flag: str, value: str) -> Listening:
    host, port = parse_address(f"--{flag}", value)
    return Listening(flag, host, range(port, port + 1))
