"""Two targets, the draft that they share, and gateways: hit, and brought back."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from tools.soak.services import START_SECONDS, Service, SoakFailed

PLAIN = ["--threads", "1"]
HASTY_SECONDS = 1  # which a gateway gives to what runs, once it is told to leave
ENDS_WITHIN = 90.0
UP = 'ssd_link_state{state="up"}'


class Gateway(Service):
    """``ssd-gateway``."""

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def targets(self) -> list[dict[str, Any]]:
        """What it says of each."""
        with urllib.request.urlopen(f"http://{self.address}/ssd/fleet", timeout=30) as answer:
            return cast("list[dict[str, Any]]", json.load(answer)["targets"])


@dataclass(frozen=True)
class Place:
    """A process of a service."""

    service: str
    role: str = "front"

    def __str__(self) -> str:
        return self.service if "gateway" in self.service else f"{self.service} {self.role}"

    @property
    def is_gateway(self) -> bool:
        return "gateway" in self.service


HASTY = f"gateway, drain {HASTY_SECONDS} s"
PLACES = (
    Place("target"),
    Place("target", "engine"),
    Place("draft"),
    Place("draft", "engine"),
    Place("gateway"),
)


class Fleet:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.services: list[Service] = []

    def start(self) -> None:
        self.draft = Service("draft", "ssd_draft", ["stories-draft", *PLAIN], self._folder)
        self._start(self.draft)
        flags = ["stories-target", "--draft", self.draft.address, "--no-auto-off", *PLAIN]
        self.targets = [
            Service(f"{name} target", "ssd_target", flags, self._folder)
            for name in ("one", "other")
        ]
        self._start(*self.targets)
        told = [flag for each in self.targets for flag in ("--target", each.address)]
        hasty = [*told, "--drain-timeout", str(HASTY_SECONDS)]
        self.gateway = Gateway("gateway", "ssd_gateway", told, self._folder)
        self.hasty = Gateway(HASTY, "ssd_gateway", hasty, self._folder)
        self._start(self.gateway, self.hasty)

    def _start(self, *services: Service) -> None:
        for service in services:
            self.services.append(service)
            service.start()
        for service in services:
            service.wait_until_ready()

    def settle(self) -> None:
        """All are ready, linked, and known to be."""
        for service in self.services:
            service.wait_until_ready()
        for target in self.targets:
            _wait(partial(_is_linked, target), f"the link of the {target.name}")
        for gateway in (self.gateway, self.hasty):
            _wait(partial(_is_at_rest, gateway), f"targets of the {gateway.name}")

    def gateway_of(self, place: Place) -> Gateway:
        """The one that streams come through."""
        return self.hasty if place.service == HASTY else self.gateway

    def service_of(self, place: Place) -> Service:
        """Of the targets the one with most streams."""
        if place.is_gateway:
            return self.gateway_of(place)
        return self._busiest() if place.service == "target" else self.draft

    def _busiest(self) -> Service:
        told = max(self.gateway.targets(), key=lambda each: int(each["in_flight"]))
        return next(each for each in self.targets if each.address == told["address"])

    def close(self) -> None:
        for service in self.services:
            service.close()


def _is_linked(target: Service) -> bool:
    return target.metrics()[UP] == 1


def _is_at_rest(gateway: Gateway) -> bool:
    return all(each["ready"] and not each["in_flight"] for each in gateway.targets())


def _wait(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not done():
        if time.monotonic() > end:
            raise SoakFailed(f"waited in vain: {what}")
        time.sleep(0.1)


class Hit:
    """A fault of one process of a service, which is brought back as an orchestrator would."""

    def __init__(self, service: Service, place: Place, number: signal.Signals) -> None:
        self._service, self._number = service, number
        self._role, self._pid = place.role, service.processes()[place.role]
        # Engines leave SIGTERM to their front, which starts those again that have ended.
        self._ends = number is not signal.SIGSTOP and place.role == "front"
        self._ends_engine = number is signal.SIGKILL and place.role == "engine"
        self.at = time.monotonic()
        os.kill(self._pid, number)

    def go_on(self) -> None:
        """Lets a stopped process go on."""
        if self._number is signal.SIGSTOP:
            os.kill(self._pid, signal.SIGCONT)
            self.at = time.monotonic()

    def ready_again(self) -> float:
        """Seconds since the fault, or since a stopped process went on."""
        if self._ends:
            self._wait_for_end()
            self._service.start()
        if self._ends_engine:
            _wait(self._has_another, f"another engine of the {self._service.name}")
        self._service.wait_until_ready()
        return time.monotonic() - self.at

    def _has_another(self) -> bool:
        return self._service.processes().get(self._role, self._pid) != self._pid

    def _wait_for_end(self) -> None:
        try:
            self._service.process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            raise SoakFailed(f"{self._service.name} does not end: {self._service.log()}") from None
