"""Checks what a request asks of speculation against what this server offers; says what it got."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.speculation.frames import Verification
from ssd_target.records.speculation_options import Mode, SpeculationRequest
from ssd_target.records.speculation_stats import SpeculationStats, per_position

MAX_ENDPOINTS = 16
MAX_ADDRESS = 300  # characters
MODES, VERIFICATIONS = frozenset(Mode) - {Mode.AUTO}, frozenset(Verification)
ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class SpeculationTerms:
    modes: tuple[Mode, ...]  # modes that a request may name
    depth: int
    link_of: Callable[[str], int]  # dials what is allowed; InputError for what is not
    default: Mode | None = None  # for requests that name none; None: the first of modes

    def settle(self, options: pb.SpeculationOptions, trace_context: str = "") -> SpeculationRequest:
        """Raises InputError; what it names is dialled from here on."""
        mode = self._mode(options)
        if options.depth > self.depth:
            raise InputError(
                "speculation.depth", f"at most {self.depth} (--depth), got {options.depth}"
            )
        weight = options.down_weight if options.HasField("down_weight") else 1.0
        if not 0.0 <= weight <= 1.0:
            raise InputError("speculation.down_weight", f"must be in [0, 1], got {weight:g}")
        return SpeculationRequest(
            mode=mode,
            verification=_verification(options.verification),
            depth=options.depth or self.depth,
            links=self._links(options.endpoints) if mode is Mode.SSD else None,
            down_weight=weight,
            trace_context=trace_context,
        )

    def _mode(self, options: pb.SpeculationOptions) -> Mode:
        known = options.mode in MODES
        if not known and not options.endpoints:
            return self.modes[0] if self.default is None else self.default
        if not known:
            if Mode.SSD not in self.modes:
                raise InputError("speculation.endpoints", "none is allowed here")
            return Mode.SSD
        mode = Mode(options.mode)
        if mode not in self.modes:
            offered = ", ".join(mode.name.lower() for mode in self.modes)
            raise InputError(
                "speculation.mode", f"{mode.name.lower()} is not offered here, only {offered}"
            )
        return mode

    def _links(self, addresses: Sequence[str]) -> list[int] | None:
        if len(addresses) > MAX_ENDPOINTS:
            raise InputError(
                "speculation.endpoints", f"at most {MAX_ENDPOINTS}, got {len(addresses)}"
            )
        for address in addresses:
            _check_address(address)
        return [self.link_of(address) for address in addresses] or None


def _check_address(address: str) -> None:
    """Allows HOST:PORT alone: a scheme, a path or an escape could mean other than it matches."""
    found = ADDRESS.fullmatch(address) if len(address) <= MAX_ADDRESS else None
    if found is None or int(found["port"]) > 65535:
        raise InputError("speculation.endpoints", f"HOST:PORT is needed, got {address[:80]!r}")


def _verification(value: int) -> Verification:
    return Verification(value) if value in VERIFICATIONS else Verification.COUPLED


def unknown_values(options: pb.SpeculationOptions) -> list[str]:
    """Fields that say what only a newer client knows: the text is the same without it."""
    values = {"mode": (options.mode, MODES), "verification": (options.verification, VERIFICATIONS)}
    return [name for name, (value, known) in values.items() if value and value not in known]


def speculation_stats(request: SpeculationRequest, stats: SpeculationStats) -> pb.SpeculationStats:
    """A request that named no mode is told the one that served most of its rounds."""
    message = speculation_message(stats)
    mode = stats.usual_mode if request.mode is Mode.AUTO else request.mode
    message.mode = int(mode)  # type: ignore[assignment]
    message.verification = (
        pb.VERIFICATION_MODE_REJECTION if stats.rejection_rounds else pb.VERIFICATION_MODE_COUPLED
    )
    return message


def speculation_message(stats: SpeculationStats) -> pb.SpeculationStats:
    unsaid = ("waits", "mode_rounds")
    names = [name for name in stats.__struct_fields__ if name not in unsaid]
    counts = {name: getattr(stats, name) for name in names}
    return pb.SpeculationStats(
        drafted_per_position=per_position(counts.pop("drafted_lengths")),
        accepted_per_position=per_position(counts.pop("accepted_lengths")),
        **counts,
    )
